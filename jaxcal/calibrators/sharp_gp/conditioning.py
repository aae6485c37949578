"""The conditions of a variance: training rows, themselves or through inducing points, and the noise.

The hyperparameters of the regression come from a kernel, or maximize the marginal likelihood.
"""

from typing import NamedTuple, cast

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxcal._numpy import AnyArray, is_known, namespace, numpy_or_jit
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import gp
from jaxcal.gp import Exact, GaussianNoise, Sparse, initial
from jaxcal.gp import model as models
from jaxcal.gp.fit import Way, fit_rows
from jaxcal.gp.inference.sparse import greedy_points
from jaxcal.gp.kernels import SquaredExponential, gram
from jaxcal.gp.model import Data, Model, jitter_of_try
from jaxcal.gp.protocols import InitialOf
from jaxcal.optimize import Result, as_constants

# With more training rows than this the regression uses inducing points.
EXACT_ROWS = 2000
_BY_ALL, _THROUGH_POINTS = Exact(), Sparse()


class Hyperparameters(NamedTuple):
    """The hyperparameters of the regression, in scaled units.

    Attributes:
        log_lengthscale: the log lengthscale of every column.
        noise_ratio: the variance of the noise divided by the variance of the process.
        result: how the search for them ended, one of `jaxcal.optimize.Result`.
    """

    log_lengthscale: Float[AnyArray, " d"]
    noise_ratio: Float[AnyArray, ""]
    result: Int[AnyArray, ""]


def scaled(
    lengthscale: Float[AnyArray, " d"], noise_ratio: Float[AnyArray, ""], x_scaler: Standardizer
) -> Hyperparameters:
    """The hyperparameters of a kernel; in constant columns any lengthscale will do, since rows do not differ there."""
    xp, has_scale = namespace(lengthscale), x_scaler.scale > 0
    ratio = xp.where(has_scale, lengthscale, 1) / xp.where(has_scale, x_scaler.scale, 1)
    return Hyperparameters(xp.log(ratio), noise_ratio, xp.asarray(Result.CONVERGED, np.int32))


def of_greatest_evidence(
    x: Float[AnyArray, "n d"], y: Float[AnyArray, " n"], indicators: tuple[int, ...], *, differentiable: bool
) -> Hyperparameters:
    """The hyperparameters that maximize the marginal likelihood of standardized rows; for known rows on the host."""
    way = Way.of(
        y.shape[0],
        _BY_ALL if y.shape[0] <= EXACT_ROWS else _THROUGH_POINTS,
        GaussianNoise(),
        ard=True,
        inputs=x.shape[1],
        is_known=is_known(as_constants((x, y))),
        in_numpy=True,
        differentiable=differentiable,
    )
    _, process = fit_rows(eqx.Partial(_prepared, indicators), (x, y), way, in_numpy=True)
    kernel = cast(SquaredExponential, process.model.kernel)
    return _of_process(kernel, process.noise_variance, process.result, x.shape[1])


@numpy_or_jit
def _of_process(
    kernel: SquaredExponential, noise_variance: Float[AnyArray, ""], result: Int[AnyArray, ""], num_columns: int
) -> Hyperparameters:
    xp = namespace(noise_variance)
    log_lengthscale = xp.broadcast_to(kernel.log_lengthscale, (num_columns,))
    return Hyperparameters(log_lengthscale, noise_variance / xp.exp(kernel.log_variance), result)


def _prepared(
    indicators: tuple[int, ...],
    x: Float[AnyArray, "n d"],
    y: Float[AnyArray, " n"],
    included: Bool[AnyArray, " n"] | None,
) -> tuple[None, InitialOf, Data]:
    """The initial values and the standardized rows, as `fit_rows` needs them."""
    weights = None if included is None else included.astype(x.dtype)
    x_scaler, y_scaler = Standardizer.of(x, weights).without(indicators), Standardizer.of(y, weights)
    return None, _initial_models, Data.of(x_scaler(x), y_scaler(y), included=included)


def _initial_models(data: Data, noise: Float[AnyArray, ""] | None = None) -> Model:
    return initial.on_grid(data, [data.points], lambda kernels: kernels[0], noise=noise)


class ConditioningData(NamedTuple):
    """The rows and the noise that a variance is conditioned on.

    Attributes:
        x: the scaled inputs [n, d].
        targets: the scaled targets [n].
        noise: the noise ratio of the regression.
        inducing: the inducing points; None to condition on the rows themselves.
    """

    x: Float[AnyArray, "n d"]
    targets: Float[AnyArray, " n"]
    noise: Float[AnyArray, ""]
    inducing: Float[AnyArray, "m d"] | None

    @classmethod
    def of(
        cls,
        x: Float[AnyArray, "n d"],
        targets: Float[AnyArray, " n"],
        hyperparameters: Hyperparameters,
        num_inducing: int | None,
    ) -> "ConditioningData":
        """The rows, with `num_inducing` of them as inducing points under the regression's lengthscales unless None."""
        inducing = (
            None if num_inducing is None else greedy_points(_kernel(hyperparameters.log_lengthscale), x, num_inducing)
        )
        return cls(x, targets, hyperparameters.noise_ratio, inducing)

    @property
    def points(self) -> Float[AnyArray, "m d"]:
        """The conditioning points."""
        return self.x if self.inducing is None else self.inducing

    @property
    def rounding(self) -> Float[AnyArray, ""]:
        """The noise variance that rounding would hide, in units of the process's variance."""
        return models.rounding_of(namespace(self.targets).ones_like(self.targets).sum())

    @property
    def noise_ratio(self) -> Float[AnyArray, ""]:
        """The variance of the noise, with the floor and the part for rounding, in units of the process's variance."""
        return models.NOISE_FLOOR + self.noise + self.rounding

    def posterior(self, log_lengthscale: Float[AnyArray, " d"]) -> gp.Posterior:
        """The posterior under these lengthscales."""
        if self.inducing is None:
            return gp.posterior(gram(_kernel(log_lengthscale), self.x, self.noise_ratio), self.targets)
        jitter = jitter_of_try(np.int32(0), self.x.dtype)
        return models.posterior(self._model(log_lengthscale), self._data, jitter)

    def leave_one_out(self, log_lengthscale: Float[AnyArray, " d"], posterior: gp.Posterior) -> gp.LeaveOneOut:
        """The leave-one-out errors and variances of the training rows."""
        if self.inducing is None:
            return gp.leave_one_out(posterior)
        return models.leave_one_out(self._model(log_lengthscale), posterior, self._data)

    @property
    def _data(self) -> Data:
        return Data(self.x, self.targets)

    def _model(self, log_lengthscale: Float[AnyArray, " d"]) -> Model:
        """The prior of the process through inducing points."""
        return Model(_kernel(log_lengthscale), namespace(self.noise).log(self.noise), inducing=self.inducing)


def variance(
    log_lengthscale: Float[AnyArray, " d"],
    posterior: gp.Posterior,
    points: Float[AnyArray, "m d"],
    noise_ratio: Float[AnyArray, ""],
    x: Float[AnyArray, "n d"],
) -> Float[AnyArray, " n"]:
    """sigma^2 of new rows, in scaled units (eq. 3b)."""
    return models.predict(_kernel(log_lengthscale), posterior, points, x)[1] + noise_ratio


def _kernel(log_lengthscale: Float[AnyArray, " d"]) -> SquaredExponential:
    return SquaredExponential(0 * log_lengthscale[0], log_lengthscale)
