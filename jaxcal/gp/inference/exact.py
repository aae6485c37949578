"""The exact process, which is conditioned on all rows."""

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
from jaxcal.gp.model import Data, Model, SearchResult
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, MinimizationProblem, Noise, best_initial, has_more_to_learn

# A fit ends when the predicted gain of log evidence is below this many nats: the data hardly distinguish such
# hyperparameters. Above 2000 rows the tolerance is loose: a step takes seconds, and its gain changes no prediction.
TOLERANCE, _LOOSE_TOLERANCE = 0.005, 0.5
# The tolerance of an optimization to the last digits.
_TIGHT = 1e-8


class Exact(Inference):
    """The process given all rows: O(n^3) time and O(n^2) memory.

    The hyperparameters maximize `log p(y) = -y' G^-1 y / 2 - log|G| / 2 - n log(2 pi) / 2`, with G the covariance of
    the targets: Rasmussen & Williams (2006), eq. 2.30. Damped Newton steps maximize it from several initial values.
    With more than 512 rows, some of them decide which optima are searched with all rows. With more than 2000 known
    rows, 1000 of them decide on the optimum. Then a few steps follow on more and more rows, and on all.

    Attributes:
        ard: a lengthscale for every column (True), one for all columns (False), or the better of the two by the
            evidence ("auto"). With "auto" each further lengthscale must raise the log evidence by log(n) / 2 nats. With
            more than 2000 rows "auto" is True. None for the method's default.
        tolerance: the fit ends when the predicted rise of the log evidence is less, in nats. None for 0.005, and for
            0.5 above 2000 rows.
        max_iterations: the most steps of an ascent.
        learning_rate: the learning rate of Adam, which then takes `max_iterations` steps in GPyTorch's parameters. None
            for Newton's steps.

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
        """Whether Newton steps are taken: always except with Adam."""
        return self.learning_rate is None

    def jitter_of_try(self, step: Int[AnyArray, ""], dtype: DTypeLike) -> Float[AnyArray, ""]:
        """0 at first, because the diagonal already has the noise."""
        return models.exact_jitter(step, dtype)

    @property
    def is_host_driven(self) -> bool:
        """True except with Adam: `gp.host` and `gp.device` have the fits."""
        return self.by_newton

    def search(
        self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> SearchResult:
        """The optimum of the evidence."""
        if not has_more_to_learn(initial_models):
            return best_initial(initial_models, data, jitter)
        if self.by_newton:
            return exact_search(self, initial_models, data, jitter, first)
        model, steps = models.one_of(initial_models), self.max_iterations
        return descended_by_adam(model, data, jitter, self.learning_rate, steps)

    def refine(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> SearchResult:
        """The model of the greatest evidence near this one, by Newton's steps."""
        return exact_search(replace(self, ard=False), models.alone(model), data, jitter)

    def conclude(self, optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""]) -> Process:
        """The process after data at the hyperparameters found."""
        if not is_known(optimum, data) or optimum.model.student_t is not None:
            return super().conclude(optimum, data, jitter)
        by = host if namespace(data.targets) is np else device
        return by.concluded(optimum, data, jitter)

    def problem(self, model: Model, data: Data, jitter: Float[AnyArray, ""], kept: None) -> MinimizationProblem:
        """The negative evidence."""
        del kept
        return MinimizationProblem.of(model, data, lambda model: -models.evidence(model, data, jitter))

    def climb(self, problem: MinimizationProblem, jitter: Float[AnyArray, ""]) -> Float[AnyArray, " p"]:
        """The vector of the greatest evidence near the problem's model, by Newton's steps."""
        tight = replace(self, ard=False, tolerance=jnp.asarray(_TIGHT, problem.data.targets.dtype))
        return problem.vector_of(exact_optimum(models.alone(problem.model), problem.data, jitter, tight).model)


def exact_search(
    inference: Inference, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
) -> SearchResult:
    """The hyperparameters of the greatest exact evidence, by NumPy or JAX, for known or traced rows; as `search`."""
    if not is_known(data):
        return exact_optimum(initial_models, data, jitter, inference)
    if namespace(data.targets) is not np:
        return device.search(initial_models, data, jitter, inference)
    begin = first() if first is not None and len(data.targets) > LADDER_ROWS else None
    return host.search(initial_models, data, jitter, inference, begin)
