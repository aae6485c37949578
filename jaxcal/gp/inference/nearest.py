"""The process that conditions, at every point, on the few rows nearest to it.

Vecchia (1988) conditions on few rows. Here the hyperparameters minimize the leave-one-out CRPS of some rows, each given
the rows nearest to it among all rows. Sundararajan & Keerthi (2001) use the leave-one-out density. Unlike the evidence
of few rows, the CRPS depends on the distances to the rows that predictions will use. Unlike the density, a few outliers
or duplicate rows do not dominate it. Then all variances are multiplied by one factor, which changes no mean. The factor
is the mean squared standardized error of other rows, as in Allison, Stephenson & Samson (2023).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, as_numpy, is_known, namespace, part
from jaxcal.functional import gp, normal
from jaxcal.functional._loops import scan
from jaxcal.gp import model as models
from jaxcal.gp import nearest_host
from jaxcal.gp.inference.sparse import optimum_of_some, with_initial
from jaxcal.gp.kernels import Kernel, Points, gram, scattered, take
from jaxcal.gp.model import (
    Data,
    Model,
    SearchResult,
    alone,
    as_vector,
    greatest,
    number_of,
    one_of,
    with_more_noise,
)
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, MinimizationProblem, Noise, has_more_to_learn, in_numpy
from jaxcal.optimize import Result, descend, over_runs

# The number of rows that decide on the hyperparameters, and the most rows that are predicted with them or as a check.
_DECIDING, _ASKED = 2000, 10_000
# The descent begins at the best of several models, which are compared on 200 of the deciding rows. Each model has its
# own noise variance, or one of these fractions of the target's variance.
_COMPARED, _MORE_NOISE = 200, (0.01, 0.1, 0.5)
# There are two descents. The first uses the rows that are nearest at the initial values. The second uses the rows that
# are nearest at the end of the first. A first descent with fewer deciding rows ends at worse optima: on the data set
# election the CRPS was .039 in place of .010.
_DESCENTS = 2
# The number of covariances that are held at once in the search for neighbors.
_AT_ONCE = 2**24


class Nearest(Inference):
    """The process given, at every point, the rows nearest to it: O(n) time to fit, O(n) for every prediction.

    The hyperparameters minimize the leave-one-out CRPS of 2000 rows, each given the rows nearest to it in the metric of
    the kernel. L-BFGS descends twice. All variances are multiplied by the mean squared standardized error of other
    rows, up to 8000. To predict as many rows as are fitted takes O(n^2).

    Attributes:
        neighbors: how many rows a prediction conditions on.
        ard: as of `Exact`.
        tolerance: as of `Exact`, for the number of deciding rows times the log of their mean CRPS. None for 1 nat.
        max_iterations: the most steps of L-BFGS.

    Raises:
        ValueError: if an option is out of its range.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 6, 60)
        >>> y = np.sin(x) + 0.1 * np.cos(37 * x)
        >>> jc.gaussian_process.fit(x, y, inference=jc.gp.Nearest(neighbors=8)).inference
        'nearest'
    """

    neighbors: int = eqx.field(static=True, default=50)
    ard: bool | str | None = eqx.field(static=True, default=None)
    tolerance: Any = None
    max_iterations: Any = 1000

    def __check_init__(self) -> None:
        """Check the options."""
        _checks.check_at_least("neighbors", self.neighbors, 1)

    def settled(self, n: int, noise: Noise, *, differentiable: bool) -> "Nearest":
        """The same with its tolerance."""
        del n, differentiable
        if not noise.is_gaussian:
            raise ValueError(f"Nearest goes with Gaussian noise; for {type(noise).__name__} take Exact or Sparse.")
        return replace(self, tolerance=1.0) if self.tolerance is None else self

    @property
    def is_host_driven(self) -> bool:
        """True: `gp.nearest_host` computes in NumPy, and small programs compute the rest."""
        return True

    def search(
        self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> SearchResult:
        """The hyperparameters of the least leave-one-out CRPS near the best of several initial models."""
        optimum = optimum_of_some(self, initial_models, data, jitter, first)
        rows, model, on_host = _deciding_rows(data), optimum.model, is_known(data)
        if number_of(initial_models) > 1 and has_more_to_learn(initial_models):
            starts = _starts(self, initial_models, model, data)
            model = _best_of(self, starts, data, jitter, rows[:_COMPARED])
        vector, model_of = as_vector(as_numpy(model) if on_host else model)
        xp, dtype = namespace(vector), vector.dtype
        if not vector.size:
            steps, result = (xp.asarray(number, np.int32) for number in (0, Result.CONVERGED))
            return optimum._replace(model=model, steps=steps, result=result)

        def descent(vector: Float[AnyArray, " p"], _: Any) -> tuple[Float[AnyArray, " p"], tuple[AnyArray, AnyArray]]:
            loss = self._loss_near(model_of(vector.astype(dtype)), data, jitter, rows)
            limits = {"max_iterations": self.max_iterations, "gain_tolerance": self.tolerance}
            end = descend(loss, vector, **limits, on_host=on_host)
            return end.params, (end.steps, end.result)

        start = vector.astype(float) if namespace(data.targets) is np else vector
        end, (steps, results) = scan(descent, start, np.arange(_DESCENTS))
        model = model_of(end.astype(dtype))
        return optimum._replace(model=model, steps=steps.sum(dtype=np.int32), result=results[-1].astype(np.int32))

    def _loss_near(self, model: Model, data: Data, jitter: Float[AnyArray, ""], rows: Int[AnyArray, " r"]) -> Callable:
        """The loss and its gradient, as a function of a vector; the neighbors are those under this model."""
        if namespace(data.targets) is np:
            return nearest_host.loss_near(model, data, jitter, rows, self.neighbors)
        near = self.neighbors_of(model, data, jitter, rows)
        loss = partial(_loss, self, model, data, jitter, rows, near)
        return in_numpy(loss) if is_known(data) else loss

    @part
    def conclude(self, optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""]) -> Process:
        """The process given the nearest rows; its result is NOT_FINITE if it makes no sense."""
        model, xp, rows = optimum.model, namespace(data.targets), scattered(data.points)[:_ASKED]
        posterior = NearestRows.of(model, data, jitter, self.neighbors)
        few = posterior.factorized_together(data.points)
        others = leave_one_out(model.kernel, posterior, data.points, rows)
        if "log_noise" not in model.fixed:
            posterior, others = _calibrated(posterior, others)
        density = data.targets.shape[0] * normal.log_prob(others.error, 0.0, xp.sqrt(others.variance)).mean()
        errors = abs(others.standardized)
        good = xp.isfinite(errors).all() & models.has_sane_variances(model, data)
        return Process(
            model=model,
            points=data.points,
            posterior=posterior,
            noise_variance=posterior.scale * model.noise_variance(few),
            rounding_fraction=posterior.scale * model.rounding(few) / xp.median(others.variance),
            evidence=density,
            iterations=optimum.steps,
            result=xp.where(good, optimum.result, Result.NOT_FINITE).astype(np.int32),
            jitter=jitter,
            failed_initial_values=optimum.failed_initial_values,
            greatest_error=(xp.max(errors), rows[xp.argmax(errors)]),
            inference="nearest",
        )

    def kept(self, process: Process, data: Data) -> Any:
        """The rows that decide, and the rows nearest to each."""
        rows = _deciding_rows(data)
        return rows, self.neighbors_of(process.model, data, process.jitter, rows)

    def problem(self, model: Model, data: Data, jitter: Float[AnyArray, ""], kept: Any) -> MinimizationProblem:
        """The log of the leave-one-out CRPS."""
        rows, near = kept
        return MinimizationProblem.of(
            model, data, lambda model: log_crps(model, data, jitter, rows, near), n=rows.shape[0]
        )

    def evidence(self, model: Model, data: Data, jitter: Float[AnyArray, ""]) -> Float[Array, ""]:
        """NaN: `conclude` computes the density in its place."""
        del model, jitter
        return jnp.full((), jnp.nan, data.targets.dtype)

    @part
    def neighbors_of(self, model: Model, data: Data, jitter: ArrayLike, rows: Int[Array, " r"]) -> Int[Array, "r k"]:
        """For some rows the numbers of the other rows nearest to each, under a model."""
        return _neighbors_of_rows(model.kernel, NearestRows.of(model, data, jitter, self.neighbors), data.points, rows)


class NearestRows(eqx.Module):
    """The rows, of which each prediction uses the nearest, with their noise.

    Attributes:
        targets: [n].
        noises: [n], the variance of noise and jitter at every row, before it is scaled.
        scale: the factor by which all variances are multiplied.
        neighbors: how many rows a prediction conditions on.
    """

    targets: Float[AnyArray, " n"]
    noises: Float[AnyArray, " n"]
    scale: Float[AnyArray, ""]
    neighbors: int = eqx.field(static=True)

    @classmethod
    def of(cls, model: Model, data: Data, jitter: ArrayLike, neighbors: int) -> "NearestRows":
        """The rows with their noise under a model."""
        relative = model.relative_noise(data.base_variance, data.relative_noise)
        noise = model.noise_variance(take(data.points, slice(neighbors))) * (1 if relative is None else relative)
        xp = namespace(data.targets)
        added = (jitter * model.kernel.diagonal(data.points).mean() + noise).astype(data.targets.dtype)
        return cls(data.targets, xp.broadcast_to(added, data.targets.shape), xp.ones_like(data.targets[0]), neighbors)

    def factorized_together(self, points: Points) -> Points:
        """As many rows as are factorized together; with more of them, rounding hides more noise."""
        return take(points, slice(self.neighbors))

    def predict(self, kernel: Kernel, at: Points, points: Points) -> tuple[AnyArray, AnyArray]:
        """Latent means and variances at points; arguments as of `model.predict`, `at` being all rows."""
        if namespace(self.targets) is np:
            rows = self.targets, self.noises, at
            mean, variance = nearest_host.predict(kernel, *rows, points, self.neighbors)
            return mean, self.scale * variance
        near = lax.map(lambda point: _neighbors(kernel, self, at, point), points, batch_size=_batch(self))
        return over_runs(lambda point, near: _predict_one(kernel, self, at, point, near))(points, near)


def leave_one_out(kernel: Kernel, posterior: NearestRows, at: Points, rows: Int[AnyArray, " r"]) -> gp.LeaveOneOut:
    """Errors and variances of some of the rows, each given the rows nearest to it."""
    if namespace(posterior.targets) is np:
        rest = posterior.targets, posterior.noises, at
        mean, variance = nearest_host.predict(kernel, *rest, take(at, rows), posterior.neighbors, without=rows)
        return gp.LeaveOneOut(posterior.targets[rows] - mean, posterior.scale * (variance + posterior.noises[rows]))
    return _errors(kernel, posterior, at, rows, _neighbors_of_rows(kernel, posterior, at, rows))


def log_crps(
    model: Model, data: Data, jitter: ArrayLike, rows: Int[Array, " r"], near: Int[Array, "r k"]
) -> Float[Array, ""]:
    """The log of the mean leave-one-out CRPS of some rows, times their number: in nats, like a log density."""
    posterior = NearestRows.of(model, data, jitter, near.shape[1])
    return _log_crps(_errors(model.kernel, posterior, data.points, rows, near))


def _log_crps(others: gp.LeaveOneOut) -> Float[AnyArray, ""]:
    xp = namespace(others.error)
    return len(others.error) * xp.log(normal.crps(others.error, 0.0, xp.sqrt(others.variance)).mean())


@part
def _starts(inference: Nearest, initial_models: Model, model: Model, data: Data) -> Model:
    """The models at which descents may begin: initial models and another one, each also with more noise."""
    return with_more_noise(with_initial(inference, initial_models, model, data), _MORE_NOISE)


@part
def _best_of(inference: Nearest, starts: Model, data: Data, jitter: ArrayLike, rows: Int[AnyArray, " r"]) -> Model:
    """The model, among several, under which few rows have the least leave-one-out CRPS."""

    def height(model: Model) -> Float[AnyArray, ""]:
        posterior = NearestRows.of(model, data, jitter, inference.neighbors)
        return -_log_crps(leave_one_out(model.kernel, posterior, data.points, rows))

    return one_of(starts, greatest(starts, height)[0])


@part
def _loss(
    inference: Nearest,
    model: Model,
    data: Data,
    jitter: Float[AnyArray, ""],
    rows: Int[Array, " r"],
    near: Int[Array, "r k"],
    vector: Float[AnyArray, " p"],
) -> tuple[Float[Array, ""], Float[Array, " p"]]:
    return inference.problem(model, data, jitter, (rows, near)).loss_with_gradient(vector)


def other_rows(data: Data) -> Int[AnyArray, " r"]:
    """The numbers of rows that have no part in the choice of hyperparameters, if there are enough."""
    return scattered(data.points)[_first_of_others(data.targets.shape[0]) : _ASKED]


def _first_of_others(n: int) -> int:
    return max(0, min(_DECIDING, n - _DECIDING))


def _calibrated(posterior: "NearestRows", asked: gp.LeaveOneOut) -> tuple["NearestRows", gp.LeaveOneOut]:
    """The rows and their errors, scaled by the mean squared standardized error of the rows that did not decide."""
    others = slice(_first_of_others(posterior.targets.shape[0]), None)
    # mean of e^2 / v
    scale = (asked.error[others] ** 2 / asked.variance[others]).mean()
    return replace(posterior, scale=scale), gp.LeaveOneOut(asked.error, scale * asked.variance)


@part
def _deciding_rows(data: Data) -> Int[AnyArray, " r"]:
    return scattered(data.points)[:_DECIDING]


def _errors(
    kernel: Kernel, posterior: NearestRows, at: Points, rows: Int[Array, " r"], near: Int[Array, "r k"]
) -> gp.LeaveOneOut:
    """Errors and variances of some of the rows, each given the rows `near`."""
    # The derivative predicts each row again, which is cheap. To store its matrices takes three times as long.
    predict_row = jax.checkpoint(lambda row, near: _predict_one(kernel, posterior, at, take(at, row), near))
    mean, variance = over_runs(predict_row)(rows, near)
    return gp.LeaveOneOut(posterior.targets[rows] - mean, variance + posterior.scale * posterior.noises[rows])


def _predict_one(kernel: Kernel, posterior: NearestRows, at: Points, point: Points, near: Int[Array, " k"]):
    """Latent mean and variance at a point, given the rows `near`."""
    some, point = take(at, near), alone(point)
    cross, prior = kernel(point, some)[0], kernel.diagonal(point)[0]
    mean, variance = gp.conditional(gram(kernel, some, posterior.noises[near]), cross, posterior.targets[near], prior)
    return mean, posterior.scale * variance


def _neighbors_of_rows(kernel: Kernel, posterior: NearestRows, at: Points, rows: Int[Array, " r"]) -> Int[Array, "r k"]:
    """For some rows the numbers of the other rows nearest to each."""
    find = lambda row: _neighbors(kernel, posterior, at, take(at, row), without=row)
    return lax.map(find, rows, batch_size=_batch(posterior))


def _neighbors(
    kernel: Kernel, posterior: NearestRows, at: Points, point: Points, without: ArrayLike = -1
) -> Int[Array, " k"]:
    """The numbers of the rows nearest to a point in the metric of the kernel; one row may be excluded.

    The squared distance is the variance of the difference of the process, Var(f(x) - f(x')) = k(x, x) + k(x', x') - 2
    k(x, x').
    """
    point, priors = alone(point), kernel.diagonal(at)
    distances = kernel.diagonal(point) + priors - 2 * kernel(point, at)[0]
    n = priors.shape[0]
    distances = jnp.where(jnp.arange(n) == without, jnp.inf, distances)
    # The distances are in float32: in float64 XLA sorts the whole array on a CPU.
    return lax.top_k(-distances.astype(jnp.float32), min(posterior.neighbors, n - 1))[1]


def _batch(posterior: NearestRows) -> int:
    """The number of points whose neighbors are searched at once."""
    return max(1, _AT_ONCE // posterior.targets.shape[0])
