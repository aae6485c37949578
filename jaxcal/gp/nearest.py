"""A Gaussian process that asks, at every point, only the rows nearest to it: few of many.

Vecchia (1988) conditions on few rows. The hyperparameters here are those of the least leave-one-out CRPS of some rows,
each given the rows nearest to it among all (by the density: Sundararajan & Keerthi, 2001). Unlike the evidence of few
rows it knows how close the rows lie on which predictions will rest; unlike the density it is not ruled by a few
outliers, nor by rows that are there twice. A common factor of all variances, which changes no mean, is then the mean
squared standardized error of other rows, as of Allison, Stephenson & Samson (2023).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal.functional import gp, normal
from jaxcal.gp.kernels import Kernel, Points, gram, scattered, take
from jaxcal.gp.model import Data, Found, Model, alone, as_vector, cost_beyond_bounds, greatest, one_of, with_more_noise
from jaxcal.gp.options import Options
from jaxcal.optimize import Result, minimize, over_runs

# How many rows a prediction asks.
_NEAREST = 50
# So many rows decide on the hyperparameters, and as many, others if there are enough, on the scale. The descent is made
# twice: with the rows that are nearest at the initial values, and with those that are nearest at the first end.
_DECIDING, _DESCENTS = 2000, 2
# The first begins with the noise of the initial values, or with the best of these fractions of the target's variance.
_MORE_NOISE = 0.01, 0.1, 0.5
# So many covariances are held at once where neighbors are looked for.
_AT_ONCE = 2**24


class Nearest(eqx.Module):
    """What the rows say of which each prediction asks the nearest.

    Attributes:
        targets: [n].
        noises: [n], the variance of the noise, and jitter, at every row, before it is scaled.
        scale: by what all variances are multiplied.
    """

    targets: Float[Array, " n"]
    noises: Float[Array, " n"]
    scale: Float[Array, ""]

    @classmethod
    def of(cls, model: Model, data: Data, jitter: ArrayLike) -> "Nearest":
        """The rows with their noise under a model."""
        relative = model.relative_noise(data.base_variance, data.relative_noise)
        noise = model.noise_variance(factorized_together(data.points)) * (1 if relative is None else relative)
        added = jitter * jnp.mean(model.kernel.diagonal(data.points)) + noise
        return cls(data.targets, jnp.broadcast_to(added, data.targets.shape), jnp.ones_like(data.targets[0]))


def factorized_together(points: Points) -> Points:
    """As many rows as are factorized together: the more they are, the more noise is hidden by rounding."""
    return jax.tree.map(lambda a: a[:_NEAREST], points)


def predict(kernel: Kernel, given: Nearest, at: Points, points: Points) -> tuple[Array, Array]:
    """Latent means and variances at points; arguments as of `model.predict`, `at` being all rows."""
    near = lax.map(lambda point: _neighbors(kernel, at, point), points, batch_size=_batch(given))
    return over_runs(lambda point, near: _predict_one(kernel, given, at, point, near))(points, near)


def leave_one_out(kernel: Kernel, given: Nearest, at: Points, rows: Int[Array, " r"]) -> gp.LeaveOneOut:
    """Errors and variances of some of the rows, each given the rows nearest to it."""
    return _errors(kernel, given, at, rows, _neighbors_of_rows(kernel, given, at, rows))


def optimum(first: Found, data: Data, jitter: ArrayLike, options: Options) -> Found:
    """The hyperparameters of the least leave-one-out CRPS that are descended to from what some rows say."""
    rows = deciding_rows(data)
    cost = cost_beyond_bounds(first.model, data, rows.shape[0])
    near_of = lambda model: neighbors(model, data, jitter, rows)
    loss_of = lambda model, near: log_crps(model, data, jitter, rows, near)
    start = _of_the_best_noise(first.model, eqx.Partial(loss_of, near=near_of(first.model)))
    vector, model_of = as_vector(start)

    def descend(vector, _):
        near = near_of(model_of(vector))

        def loss(vector):
            model = model_of(vector)
            return cost(model) + loss_of(model, near)

        if not vector.size:
            return vector, (jnp.int32(0), jnp.int32(Result.CONVERGED))
        end = minimize(loss, vector, max_iterations=options.max_iterations, gain_tolerance=options.tolerance)
        return end.params, (end.steps, jnp.where(jnp.isfinite(end.loss), end.result, Result.NOT_FINITE))

    vector, (steps, results) = lax.scan(descend, vector, length=_DESCENTS)
    return first._replace(model=model_of(vector), steps=jnp.sum(steps), result=results[-1])


def log_crps(
    model: Model, data: Data, jitter: ArrayLike, rows: Int[Array, " r"], near: Int[Array, "r k"]
) -> Float[Array, ""]:
    """Of the mean leave-one-out CRPS of some rows, times their number: in nats, as a log density."""
    others = _errors(model.kernel, Nearest.of(model, data, jitter), data.points, rows, near)
    return rows.shape[0] * jnp.log(jnp.mean(normal.crps(others.error, 0.0, jnp.sqrt(others.variance))))


def neighbors(model: Model, data: Data, jitter: ArrayLike, rows: Int[Array, " r"]) -> Int[Array, "r k"]:
    """The numbers of the rows nearest to some of them, without themselves, under a model."""
    return _neighbors_of_rows(model.kernel, Nearest.of(model, data, jitter), data.points, rows)


def calibrated(model: Model, data: Data, jitter: ArrayLike) -> Nearest:
    """What the rows say, with the scale that their leave-one-out errors ask for; 1 where the noise is known."""
    given = Nearest.of(model, data, jitter)
    if "log_noise" in model.fixed:
        return given
    others = leave_one_out(model.kernel, given, data.points, other_rows(data))
    return eqx.tree_at(lambda given: given.scale, given, jnp.mean(others.error**2 / others.variance))


def deciding_rows(data: Data) -> Int[Array, " r"]:
    """The numbers of the rows that decide on the hyperparameters."""
    return scattered(data.points)[:_DECIDING]


def other_rows(data: Data) -> Int[Array, " r"]:
    """The numbers of rows that have no part in the choice of hyperparameters, if there are enough."""
    first = max(0, min(_DECIDING, data.targets.shape[0] - _DECIDING))
    return scattered(data.points)[first : first + _DECIDING]


def _of_the_best_noise(model: Model, loss) -> Model:
    """The model with its own noise, or with more."""
    models = with_more_noise(alone(model), _MORE_NOISE)
    return one_of(models, greatest(models, lambda model: -loss(model))[0])


def _errors(
    kernel: Kernel, given: Nearest, at: Points, rows: Int[Array, " r"], near: Int[Array, "r k"]
) -> gp.LeaveOneOut:
    """Errors and variances of some of the rows, given others."""
    # A row is cheap to predict again; to keep its matrices for the derivative takes three times as long.
    predict_row = jax.checkpoint(lambda row, near: _predict_one(kernel, given, at, take(at, row), near))
    mean, variance = over_runs(predict_row)(rows, near)
    return gp.LeaveOneOut(given.targets[rows] - mean, variance + given.scale * given.noises[rows])


def _predict_one(kernel: Kernel, given: Nearest, at: Points, point: Points, near: Int[Array, " k"]):
    """Latent mean and variance at a point, given some of the rows."""
    some, point = take(at, near), alone(point)
    cross, prior = kernel(point, some)[0], kernel.diagonal(point)[0]
    mean, variance = gp.conditional(gram(kernel, some, given.noises[near]), cross, given.targets[near], prior)
    return mean, given.scale * variance


def _neighbors_of_rows(kernel: Kernel, given: Nearest, at: Points, rows: Int[Array, " r"]) -> Int[Array, "r k"]:
    """The numbers of the rows nearest to some of them, without themselves."""
    find = lambda row: _neighbors(kernel, at, take(at, row), without=row)
    return lax.map(find, rows, batch_size=_batch(given))


def _neighbors(kernel: Kernel, at: Points, point: Points, without: ArrayLike = -1) -> Int[Array, " k"]:
    """The numbers of the rows nearest to a point in the metric of the kernel; one of them may be excluded.

    The squared distance is the variance of the difference between the process there and here.
    """
    point, priors = alone(point), kernel.diagonal(at)
    distances = kernel.diagonal(point) + priors - 2 * kernel(point, at)[0]
    n = priors.shape[0]
    distances = jnp.where(jnp.arange(n) == without, jnp.inf, distances)
    # In 64 bits XLA sorts the whole array on a CPU.
    return lax.top_k(-distances.astype(jnp.float32), min(_NEAREST, n - 1))[1]


def _batch(given: Nearest) -> int:
    """For how many points at once neighbors are looked for."""
    return max(1, _AT_ONCE // given.targets.shape[0])
