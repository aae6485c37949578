"""How a Gaussian process is fitted: what a user asks for, checked, with the defaults filled in."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxcal import _checks

# Up to this many rows "auto" takes the exact Gaussian process: O(n^3), but few iterations, and more exact.
_EXACT_ROWS = 2000
# Above so many it does not ask the nearest rows: to predict as many takes O(n^2), hours of a million.
_NEAREST_ROWS = 250_000
# Fewer are faster and less exact: benchmarks/results/gp_inducing.txt. Over minibatches they are trained, and cost more.
_NUM_INDUCING, _NUM_STOCHASTIC = 800, 400
# The gain of log evidence, in nats, below which a fit ends: the data hardly distinguish hyperparameters so close.
TOLERANCE, _SPARSE_TOLERANCE = 0.005, 1.0


class Options(NamedTuple):
    """How a process is fitted; what decides what is compiled. With a learning rate it is by Adam.

    The bound "better" is "collapsed" or "nearest": what has the better leave-one-out predictions.
    """

    bound: str
    inducing: str
    num_inducing: int
    max_iterations: int
    tolerance: float = 0.0
    ard: bool | str = False
    noise: str = "gaussian"
    mesh: Mesh | None = None
    learning_rate: float | None = None
    differentiable: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether Newton's steps lead to the exact evidence under Gaussian noise."""
        return self.bound == "exact" and self.noise == "gaussian" and self.learning_rate is None

    def of_numbers(self) -> "Options":
        """The same, by arrays where a compiled program need not know a number."""
        if not self.is_plain:
            return self
        return self._replace(tolerance=np.float32(self.tolerance), max_iterations=np.int32(self.max_iterations))

    @classmethod
    def of(
        cls,
        n: int,
        *,
        bound: str,
        max_iterations: int,
        num_inducing: int | None = None,
        inducing: str | None = None,
        tolerance: float | None = None,
        **others: Any,
    ) -> "Options":
        """What the user of a method asked for n rows, checked, with the defaults in place of None."""
        asked = cls(bound, "greedy", 0, max_iterations, **others)
        _checks.check_choice("bound", bound, ("auto", "exact", "nearest", "collapsed", "stochastic"))
        _checks.check_choice("inducing", inducing, (None, "greedy", "trained"))
        _checks.check_choice("ard", asked.ard, (True, False, "auto"))
        _checks.check_choice("noise", asked.noise, ("gaussian", "student_t", "input"))
        gaussian, adam = asked.noise == "gaussian", asked.learning_rate is not None
        if bound == "nearest" and adam:
            raise ValueError("bound='nearest' goes without Adam and without a preset.")
        if not gaussian and (bound in ("nearest", "stochastic") or adam):
            raise ValueError(
                f"noise={asked.noise!r} is for the exact and the collapsed bound, without Adam or a preset."
            )
        if asked.differentiable and (not gaussian or bound == "stochastic" or asked.mesh or adam):
            raise ValueError(
                "differentiable=True needs an optimum: it goes with noise='gaussian' on one device, without "
                "bound='stochastic', Adam and the presets that take Adam."
            )
        _checks.check_at_least("max_iterations", max_iterations, 1)
        sparse = {"num_inducing": num_inducing, "inducing": inducing, "mesh": asked.mesh}
        wants_sparse = [name for name, value in sparse.items() if value is not None]
        if bound in ("exact", "nearest") and wants_sparse:
            raise ValueError(
                f"bound={bound!r} has no inducing points: {wants_sparse[0]} has no effect. Leave it out, or take "
                "bound='collapsed'."
            )
        if bound == "auto":
            exact = num_inducing >= n if num_inducing is not None else n <= _EXACT_ROWS and not wants_sparse
            asks = gaussian and not adam and not wants_sparse and n <= _NEAREST_ROWS
            many = "better" if asks else "collapsed"
            bound = "exact" if exact else many
        if tolerance is None:
            tolerance = TOLERANCE if bound == "exact" else _SPARSE_TOLERANCE
        _checks.check_not_negative("tolerance", tolerance)
        if num_inducing is None:
            num_inducing = min(n, _NUM_STOCHASTIC if bound == "stochastic" else _NUM_INDUCING)
        _checks.check_at_least("num_inducing", num_inducing, 1)
        if num_inducing > n and bound == "collapsed":
            _checks.warn(f"num_inducing is {num_inducing}, but there are {n} rows; {n} are taken.")
        if inducing is None:
            inducing = "trained" if bound == "stochastic" else "greedy"
        # Not the number of rows: programs of several numbers of them are the same.
        num_inducing = 0 if bound == "exact" else min(num_inducing, n)
        return asked._replace(bound=bound, inducing=inducing, num_inducing=num_inducing, tolerance=tolerance)
