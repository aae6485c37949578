"""The exact process, given all rows."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, is_known, namespace
from jaxcal.gp import device, host
from jaxcal.gp import model as models
from jaxcal.gp.exact import LADDER_ROWS, exact_optimum
from jaxcal.gp.inference._adam import descended_by_adam
from jaxcal.gp.model import Data, Found, Model
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, Noise, Problem, best_initial, has_more_to_learn

# The gain of log evidence, in nats, below which a fit ends: the data hardly distinguish hyperparameters so close. Of
# rows that climb a ladder a step takes seconds, and what it gains changes no prediction.
TOLERANCE, _LOOSE_TOLERANCE = 0.005, 0.5
# Where a climb to the last digits ends.
_TIGHT = 1e-8


class Exact(Inference):
    """The process given all rows: O(n^3) time and O(n^2) memory.

    The hyperparameters maximize log p(y) = -y' G^-1 y / 2 - log|G| / 2 - n log(2 pi) / 2, with G the covariance of the
    targets: Rasmussen & Williams (2006), eq. 2.30. Damped Newton steps climb from several initial values; of more than
    512 rows some decide which optima all of them climb to. Of more than 2000 known rows 1000 decide on the
    optimum, and few steps of more and more rows and of all end it.

    Attributes:
        ard: a lengthscale for every column (True), one for all (False), or what the evidence prefers ("auto"). Each
            further lengthscale must raise it by log(n) / 2 nats then. Of more than 2000 rows "auto" is True. None for
            what the method takes.
        tolerance: the fit ends where the log evidence is foreseen to rise by less, in nats. None for 0.005, and for 0.5
            above 2000 rows.
        max_iterations: the most steps of an ascent.
        learning_rate: for so many steps of Adam in GPyTorch's parameters, in place of Newton's; None for these.

    Raises:
        ValueError: if an option is out of its range.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 6, 60)
        >>> y = np.sin(x) + 0.1 * np.cos(37 * x)
        >>> jc.gaussian_process.fit(x, y, inference=jc.gp.Exact(ard=False)).inference
        'exact'
    """

    ard: bool | str | None = eqx.field(static=True, default=None)
    tolerance: Any = None
    max_iterations: Any = 1000
    learning_rate: Any = None

    def __check_init__(self) -> None:
        """Check the options."""
        if self.learning_rate is not None:
            _checks.check_positive("learning_rate", self.learning_rate)

    def settled(self, n: int, noise: Noise, *, differentiable: bool) -> "Exact":
        """The same with its tolerance."""
        if self.learning_rate is not None and not noise.is_gaussian:
            raise ValueError(f"Exact goes with {type(noise).__name__} without Adam: leave learning_rate out.")
        if self.learning_rate is not None and differentiable:
            raise ValueError("differentiable=True needs an optimum, where Adam does not end: leave learning_rate out.")
        if self.tolerance is not None:
            return self
        return replace(self, tolerance=TOLERANCE if n <= LADDER_ROWS else _LOOSE_TOLERANCE)

    @property
    def by_newton(self) -> bool:
        """Unless it is by Adam."""
        return self.learning_rate is None

    def jitter_of_try(self, step: Int[AnyArray, ""], dtype: DTypeLike) -> Float[AnyArray, ""]:
        """None at first: noise is on the diagonal already."""
        return models.exact_jitter(step, dtype)

    @property
    def by_parts(self) -> bool:
        """Unless by Adam: `gp.host` and `gp.device`."""
        return self.by_newton

    def search(self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None) -> Found:
        """The optimum of the evidence."""
        if not has_more_to_learn(initial_models):
            return best_initial(initial_models, data, jitter)
        if self.by_newton:
            return exact_search(self, initial_models, data, jitter, first)
        model, steps = models.one_of(initial_models), self.max_iterations
        return descended_by_adam(model, data, jitter, self.learning_rate, steps)

    def refine(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> Found:
        """By Newton's steps."""
        return exact_search(replace(self, ard=False), models.alone(model), data, jitter)

    def conclude(self, found: Found, data: Data, jitter: Float[AnyArray, ""]) -> Process:
        """The process after data at the hyperparameters found."""
        if not is_known(found, data) or found.model.student_t is not None:
            return super().conclude(found, data, jitter)
        by = host if namespace(data.targets) is np else device
        return by.concluded(found, data, jitter)

    def problem(self, model: Model, data: Data, jitter: Float[AnyArray, ""], kept: None) -> Problem:
        """The negative evidence."""
        del kept
        return Problem.of(model, data, lambda model: -models.evidence(model, data, jitter))

    def climb(self, problem: Problem, jitter: Float[AnyArray, ""]) -> Float[AnyArray, " p"]:
        """By Newton's steps."""
        tight = replace(self, ard=False, tolerance=jnp.asarray(_TIGHT, problem.data.targets.dtype))
        return problem.vector_of(exact_optimum(models.alone(problem.model), problem.data, jitter, tight).model)


def exact_search(
    inference: Inference, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
) -> Found:
    """The hyperparameters of the greatest exact evidence, of NumPy's arrays, known ones or traced ones; as `search`."""
    if not is_known(data):
        return exact_optimum(initial_models, data, jitter, inference)
    if namespace(data.targets) is not np:
        return device.search(initial_models, data, jitter, inference)
    begin = first() if first is not None and len(data.targets) > LADDER_ROWS else None
    return host.search(initial_models, data, jitter, inference, begin)
