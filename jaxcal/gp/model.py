"""A Gaussian process before data, with its evidence, posterior, predictions and leave-one-out errors given data.

The process is exact if the model has no inducing points, and else sparse: Titsias (2009). `functional.gp` has the
algebra.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Bool, DTypeLike, Float, Int, PyTree

from jaxcal._numpy import AnyArray, constant, is_array, namespace, part, threads_for
from jaxcal.functional import gp, linalg, noise, sparse_gp
from jaxcal.gp.kernels import Kernel, Points, gram, scattered, take

M = TypeVar("M")

# The noise variance is at least this fraction of the target's variance.
NOISE_FLOOR = 1e-6
# The search keeps the variance of the noise within these multiples of the target's.
_NOISES = 1e-9, 1e1
# The search keeps the logit of the fraction of the noise that follows the base's variance between minus and plus this.
_LOGIT_FRACTION = 14.0
_LOG_DFS = math.log(noise.GREATEST_DF / noise.LEAST_DF)
_PREDICTED_AT_ONCE = 2048
# The number of values of the jitter that are tried. Each is a hundred times the value before.
JITTER_TRIES = 4
# A fit makes no sense if the prior variance or the noise variance exceeds the target's variance by this factor.
ABSURD = 1e6


class Data(NamedTuple):
    """The data that a process is fitted to.

    Attributes:
        points: the inputs of the rows, in the form that the kernel takes.
        targets: [n], of mean zero.
        base_variance: [n], the base model's variance of every row, relative to the mean of these variances. None if the
            base has no variance.
        relative_noise: [n], the variance of the noise at every row, relative to the other rows. None if it is equal.
        included: [n], which rows count. The others are padding, with a target of 0. None if all rows count.
    """

    points: Points
    targets: Float[AnyArray, " n"]
    base_variance: Float[AnyArray, " n"] | None = None
    relative_noise: Float[AnyArray, " n"] | None = None
    included: Bool[AnyArray, " n"] | None = None

    @classmethod
    def of(
        cls,
        points: Points,
        targets: Float[AnyArray, " n"],
        base_variance: Float[AnyArray, " n"] | None = None,
        included: Bool[AnyArray, " n"] | None = None,
    ) -> "Data":
        """The rows; the target of a row that does not count becomes 0."""
        targets = targets if included is None else namespace(targets).where(included, targets, 0)
        return cls(points, targets, base_variance, included=included)

    @property
    def number(self) -> int | Int[AnyArray, ""]:
        """How many rows count."""
        return self.targets.shape[0] if self.included is None else self.included.sum(dtype=np.int32)

    @property
    def mean_square(self) -> Float[AnyArray, ""]:
        """The mean square of the targets."""
        return (self.targets**2).sum() / self.number


class StudentTLikelihood(eqx.Module):
    """Student t noise: a normal distribution for every row, of unknown precision.

    Attributes:
        logit_df: the log of the degrees of freedom within its bounds is the sigmoid of this.
        log_squares: [n], the logs of the rows' expected squared errors over the noise variance. They determine the
            distributions of the precisions. None after the fit.
    """

    logit_df: Float[AnyArray, ""]
    log_squares: Float[AnyArray, " n"] | None

    @classmethod
    def of(cls, df: ArrayLike, squares: Float[AnyArray, " n"]) -> "StudentTLikelihood":
        """Noise with `df` degrees of freedom, given the expected squared errors of the rows over the noise variance."""
        xp, dtype = namespace(squares, df), squares.dtype
        edge = np.asarray(1e-3, dtype)
        # log df = log LEAST_DF + u log(GREATEST_DF / LEAST_DF); the logit of u is learned.
        unit = xp.clip(xp.log(xp.asarray(df, dtype) / noise.LEAST_DF) / _LOG_DFS, edge, 1 - edge)
        least = np.finfo(dtype).tiny
        return cls((xp.log(unit) - xp.log1p(-unit)).astype(dtype), xp.log(xp.maximum(squares, least)))

    @property
    def df(self) -> Float[AnyArray, ""]:
        """Degrees of freedom."""
        return noise.LEAST_DF * namespace(self.logit_df).exp(_LOG_DFS * self._unit)

    @property
    def slope(self) -> Float[AnyArray, ""]:
        """The derivative of the degrees of freedom by `logit_df`."""
        # d df / d logit = df log(GREATEST_DF / LEAST_DF) u (1 - u), with u the sigmoid.
        return self.df * _LOG_DFS * self._unit * (1 - self._unit)

    @property
    def _unit(self) -> Float[AnyArray, ""]:
        # sigmoid(z) = (1 + tanh(z / 2)) / 2, which has finite derivatives everywhere.
        return (1 + namespace(self.logit_df).tanh(self.logit_df / 2)) / 2

    @property
    def weights(self) -> Float[AnyArray, " n"]:
        """The expected precisions of the rows, relative to the common precision."""
        return noise.student_t_weights(namespace(self.log_squares).exp(self.log_squares), self.df)


class Model(eqx.Module):
    """A Gaussian process before data, whose hyperparameters are learned by maximizing the evidence.

    The noise variance of a row is noise_variance * relative_noise * (1 - s + s base_variance). Here s, between 0 and 1,
    is the fraction of the noise that follows the base's variance. Student t noise divides it by the row's expected
    precision. The fields named in `fixed` stay at their initial values.
    """

    kernel: Kernel
    log_noise: Float[AnyArray, "*s"]
    logit_fraction: Float[AnyArray, "*s"] | None = None
    student_t: StudentTLikelihood | None = None
    inducing: Points | None = None
    fixed: tuple[str, ...] = eqx.field(static=True, default=())

    def noise_variance(self, points: Points, included: Bool[AnyArray, " n"] | None = None) -> Float[AnyArray, ""]:
        """The mean variance of the noise at the training rows (of `Data`), in units of the scaled target.

        It is at least `rounding`.
        """
        return self.noise_above(self.rounding(points, included))

    def noise_above(self, rounding: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        """`noise_variance`, given `rounding`."""
        return NOISE_FLOOR + namespace(self.log_noise).exp(self.log_noise) + rounding

    def rounding(self, points: Points, included: Bool[AnyArray, " n"] | None = None) -> Float[AnyArray, ""]:
        """The noise variance that rounding in the factorization of the rows' covariance would hide."""
        variances = self.kernel.diagonal(points)
        return rounding_of(variances.sum() if included is None else variances.sum(where=included))

    def relative_noise(
        self, base_variance: Float[AnyArray, " n"] | None, relative_noise: Float[AnyArray, " n"] | None = None
    ) -> Float[AnyArray, " n"] | None:
        """The variance of the noise at every row, relative to `noise_variance`; None if it is the same at all rows."""
        factors = [] if relative_noise is None else [relative_noise]
        if self.logit_fraction is not None and base_variance is not None:
            # s = sigmoid(logit); the factor of a row is 1 - s + s base_variance.
            fraction = 1 / (1 + namespace(self.logit_fraction).exp(-self.logit_fraction))
            factors.append(1 - fraction + fraction * base_variance)
        if self.student_t is not None and self.student_t.log_squares is not None:
            factors.append(1 / self.student_t.weights)
        return reduce(operator.mul, factors) if factors else None

    def bounds(self, data: Data) -> tuple["Model", "Model"]:
        """The least and the greatest hyperparameters that make sense for these rows."""
        variance = data.mean_square
        xp, kernels = namespace(variance), self.kernel.bounds(data.points, variance, data.included)
        log_noises = [xp.log(variance * bound) for bound in _NOISES]
        logits = [None if self.logit_fraction is None else xp.full_like(variance, b * _LOGIT_FRACTION) for b in (-1, 1)]
        rest = [jax.tree.map(lambda a, b=b: xp.full_like(a, b), self.student_t) for b in (-np.inf, np.inf)]
        low, high = (
            Model(kernel, log_noise, logit, student_t, fixed=self.fixed)
            for kernel, log_noise, logit, student_t in zip(kernels, log_noises, logits, rest, strict=True)
        )
        return low, high


def rounding_of(prior: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
    """`Model.rounding`, given the sum of the rows' prior variances."""
    return float(np.finfo(prior.dtype).eps) * prior


@part
def evidence(model: Model, data: Data, jitter: ArrayLike, mesh: Mesh | None = None) -> Float[AnyArray, ""]:
    """The log marginal likelihood of the targets; a lower bound on it with inducing points or Student t noise."""
    if model.inducing is None:
        value = gp.log_likelihood(noisy_gram(model, data, jitter), data.targets) - log_likelihood_of_padding(data)
    else:
        sums, _ = row_sums(model, data, jitter, mesh)
        value = sparse_gp.collapsed_bound(sums, model.noise_variance(data.points))
    if model.student_t is not None:
        value = value + noise.student_t_bound(model.student_t.weights, model.student_t.df)
    return stored(value, data)


@part
def posterior(model: Model, data: Data, jitter: ArrayLike, mesh: Mesh | None = None) -> gp.Posterior:
    """The posterior at the rows or, for a sparse process, at the inducing points."""
    if model.inducing is None:
        return stored(gp.posterior(noisy_gram(model, data, jitter), data.targets), data)
    sums, whiten = row_sums(model, data, jitter, mesh)
    return stored(sparse_gp.posterior(sums, whiten, model.noise_variance(data.points)), data)


def predict(
    kernel: Kernel, posterior: gp.Posterior, at: Points, points: Points
) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
    """Latent means and variances at points; RIO, eq. 5 and 6.

    Args:
        kernel: the kernel of the process.
        posterior: the posterior at the conditioning points.
        at: the conditioning points: the rows, or the inducing points.
        points: where to predict.
    """
    if namespace(posterior.weights) is jnp:
        one = lambda point: gp.predict(posterior, *_covariances(kernel, point, at))
        return lax.map(one, points, batch_size=_PREDICTED_AT_ONCE)
    with threads_for(len(posterior.weights)):
        predictions = [gp.predict(posterior, kernel(part, at), kernel.diagonal(part)) for part in _parts(points)]
    means, variances = (np.concatenate(each) for each in zip(*predictions, strict=True))
    return means, variances


@part
def leave_one_out(model: Model, posterior: gp.Posterior, data: Data) -> gp.LeaveOneOut:
    """Leave-one-out errors and variances of the rows, at the same hyperparameters.

    Args:
        model: the model, with its inducing points if it has any.
        posterior: the posterior of these rows.
        data: the rows.
    """
    if model.inducing is None:
        return gp.leave_one_out(posterior)
    xp, kernel = namespace(data.targets), model.kernel
    rows = data.points, data.targets, xp.broadcast_to(row_noise(model, data), data.targets.shape)

    def one_row(row):
        point, target, own_noise = row
        cross, prior = _covariances(kernel, point, model.inducing)
        return sparse_gp.leave_one_out(posterior, cross, target, prior, own_noise)

    if xp is jnp:
        return lax.map(one_row, rows, batch_size=_PREDICTED_AT_ONCE)
    with threads_for(len(posterior.weights)):
        parts = [
            sparse_gp.leave_one_out(posterior, kernel(part, model.inducing), target, kernel.diagonal(part), own_noise)
            for part, target, own_noise in _parts(rows)
        ]
    return gp.LeaveOneOut(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _parts(rows: Points) -> list[Points]:
    """The rows, cut into parts of at most `_PREDICTED_AT_ONCE` rows."""
    number = jax.tree.leaves(rows)[0].shape[0]
    return [take(rows, slice(k, k + _PREDICTED_AT_ONCE)) for k in range(0, number, _PREDICTED_AT_ONCE)]


def _in_float64(tree: M) -> M:
    """A tree with NumPy's arrays in float64, in which the host computes; JAX's arrays stay as they are."""
    wide = lambda leaf: leaf.astype(float) if isinstance(leaf, np.ndarray | np.generic) else leaf
    return jax.tree.map(wide, tree)


def stored(tree: M, data: Data) -> M:
    """A tree with NumPy's arrays in the dtype of the data; JAX's arrays stay as they are."""
    narrow = lambda leaf: leaf.astype(data.targets.dtype) if isinstance(leaf, np.ndarray | np.generic) else leaf
    return jax.tree.map(narrow, tree)


def expected_squares(model: Model, posterior: gp.Posterior, data: Data) -> Float[AnyArray, " n"]:
    """The expectation E (y - f)^2 of every row under the posterior; arguments as of `leave_one_out`."""
    at = data.points if model.inducing is None else model.inducing
    mean, variance = predict(model.kernel, posterior, at, data.points)
    return (data.targets - mean) ** 2 + variance


def row_sums(model: Model, data: Data, jitter: ArrayLike, mesh: Mesh | None = None):
    """The sums over the rows that the sparse bound needs, and the inverse factor at the inducing points."""
    relative = model.relative_noise(data.base_variance, data.relative_noise)
    model, data, relative = _in_float64((model, data, relative))
    kernel, inducing = model.kernel, cast(Points, model.inducing)
    whiten = linalg.inverse_factor(jittered_gram(kernel, inducing, jitter))
    sums = sparse_gp.row_sums(
        eqx.Partial(kernel, inducing),
        whiten,
        data.points,
        kernel.diagonal(data.points),
        data.targets,
        None if relative is None else 1 / relative,
        mesh,
    )
    return sums, whiten


def noisy_gram(model: Model, data: Data, jitter: ArrayLike) -> Float[AnyArray, "n n"]:
    """The covariance of the targets; a padding row has variance 1 and covariance 0, so that the determinant stays."""
    added, (kernel, points) = row_noise(model, data), _in_float64((model.kernel, data.points))
    covariance = jittered_gram(kernel, points, jitter, added, data.included)
    if data.included is None:
        return covariance
    counted = data.included[:, None] & data.included[None]
    return jnp.where(counted, covariance, jnp.eye(len(covariance), dtype=covariance.dtype))


def log_likelihood_of_padding(data: Data) -> Float[AnyArray, ""]:
    """The part of a log likelihood with `noisy_gram` that comes from the rows that do not count."""
    xp = namespace(data.targets)
    return -0.5 * gp.LOG_2PI * xp.asarray(data.targets.shape[0] - data.number, data.targets.dtype)


def row_noise(model: Model, data: Data) -> Float[AnyArray, "*n"]:
    """The variance of the noise: one for every row, or one for all rows."""
    common = model.noise_variance(data.points, data.included)
    relative = model.relative_noise(data.base_variance, data.relative_noise)
    return common if relative is None else common * relative


def jitter_of_try(step: Int[AnyArray, ""], dtype: DTypeLike) -> Float[AnyArray, ""]:
    """The jitter of a try, a fraction of the mean variance: a hundred times the jitter of the try before."""
    least = max(1e-8, 10 * float(jnp.finfo(dtype).eps))
    return (least * np.asarray(100, dtype) ** step).astype(dtype)


def exact_jitter(step: Int[AnyArray, ""], dtype: DTypeLike) -> Float[AnyArray, ""]:
    """`jitter_of_try` for the exact process: 0 at first, because its diagonal already has the noise."""
    return namespace(step).where(step > 0, jitter_of_try(step, dtype), 0).astype(dtype)


def exact_jitters(dtype: DTypeLike) -> list[Float[np.ndarray, ""]]:
    """The values of the jitter that a host tries, one after the other."""
    return [exact_jitter(np.int32(tries), dtype) for tries in range(JITTER_TRIES)]


def mean_variance(kernel: Kernel, points: Points, included: Bool[AnyArray, " n"] | None = None) -> Float[AnyArray, ""]:
    """The mean prior variance of the rows that count; the jitter is a fraction of it."""
    variances = kernel.diagonal(points)
    return variances.mean() if included is None else variances.mean(where=included)


def jittered_gram(
    kernel: Kernel,
    points: Points,
    jitter: ArrayLike,
    added: ArrayLike = 0,
    included: Bool[AnyArray, " n"] | None = None,
) -> Float[AnyArray, "n n"]:
    """The covariance of the points with themselves, with jitter and noise on the diagonal."""
    return gram(kernel, points, jitter * mean_variance(kernel, points, included) + added)


def split(model: Model, *, with_inducing: bool = False) -> tuple[PyTree, PyTree]:
    """The learned parameters of a model, and the rest of it."""
    learned = jax.tree.map(eqx.is_inexact_array, model)
    for name in (*model.fixed, *(() if with_inducing else ("inducing",))):
        learned = eqx.tree_at(operator.attrgetter(name), learned, False, is_leaf=lambda node: node is None)
    return eqx.partition(model, learned)


def _covariances(kernel: Kernel, point: Points, at: Points) -> tuple[Float[AnyArray, " m"], Float[AnyArray, ""]]:
    """One point's covariances with the points `at`, and its own variance."""
    row = alone(point)
    return kernel(row, at)[0], kernel.diagonal(row)[0]


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        model: the model with the best hyperparameters.
        evidence: its log evidence, or the bound on it.
        steps: the number of steps of the optimizer, from the chosen initial values.
        result: a value of `Result`.
        failed_initial_values: how many of the initial values had no evidence that makes sense.
    """

    model: Model
    evidence: Float[AnyArray, ""]
    steps: Int[AnyArray, ""]
    result: Int[AnyArray, ""]
    failed_initial_values: Int[AnyArray, ""]


def without_rows(model: Model) -> Model:
    """The model without the parts that belong to training rows: inducing points, and precisions of Student t noise."""
    student_t = None if model.student_t is None else replace(model.student_t, log_squares=None)
    return replace(model, inducing=None, student_t=student_t)


def is_sane(model: Model, value: Float[AnyArray, ""], data: Data) -> Bool[AnyArray, ""]:
    """Whether an evidence is finite and possible with this noise, and no variance is far above the target's."""
    # log p(y) <= -n log(2 pi v) / 2 if every noise variance is at least v
    greatest = gp.greatest_log_likelihood(data.number, row_noise(model, data).min())
    return (value <= greatest) & has_sane_variances(model, data)


def has_sane_variances(model: Model, data: Data) -> Bool[AnyArray, ""]:
    """Whether neither the prior variance nor the noise variance is far above the target's variance."""
    prior, absurd = mean_variance(model.kernel, data.points, data.included), ABSURD * data.mean_square
    return (prior < absurd) & (model.noise_variance(data.points, data.included) < absurd)


def some_rows(data: Data, number: int) -> Data:
    """At most `number` of the rows; the choice does not depend on their order."""
    return data if data.targets.shape[0] <= number else _scattered(data, number)


@part
def _scattered(data: Data, number: int) -> Data:
    return take(data, scattered(data.points, data.included)[:number])


def as_vector(
    model: Model, *, with_inducing: bool = False
) -> tuple[Float[AnyArray, " p"], Callable[[Float[AnyArray, " p"]], Model]]:
    """A model's learned parameters as a vector, with or without inducing points, and the map back to models."""
    params, fixed = split(model, with_inducing=with_inducing)
    if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(params)):
        vector, unravel = ravel_pytree(params)
        return vector, lambda vector: eqx.combine(unravel(vector), fixed)
    leaves, tree = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])

    def model_of(vector: Float[AnyArray, " p"]) -> Model:
        parts = [vector[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
        return eqx.combine(tree.unflatten(parts), fixed)

    return np.concatenate([np.ravel(leaf) for leaf in leaves]), model_of


def bounds(model: Model, data: Data) -> tuple[Float[AnyArray, " p"], Float[AnyArray, " p"]]:
    """The least and the greatest hyperparameters, as vectors."""
    low, high = (constant(as_vector(bound)[0]) for bound in model.bounds(data))
    return low, high


def penalty(
    vector: Float[AnyArray, "*s p"],
    low: Float[AnyArray, "*#s p"],
    high: Float[AnyArray, "*#s p"],
    n: int | Float[AnyArray, "*s p"],
) -> tuple[Float[AnyArray, "*s"], Float[AnyArray, "*s p"], Float[AnyArray, "*s p"]]:
    """The penalty of hyperparameters beyond their bounds, n sum(beyond^2), with first and second derivatives.

    A step of one in the log of a variance gains at most half a nat a row. So no hyperparameter goes far beyond its
    bounds.
    """
    xp = namespace(vector)
    beyond = xp.maximum(vector - high, 0) - xp.maximum(low - vector, 0)
    return (n * beyond**2).sum(-1), 2 * n * beyond, xp.where(beyond != 0, 2 * n, xp.zeros_like(beyond))


def cost_beyond_bounds(model: Model, data: Data, n: int | None = None) -> Callable[[Model], Float[AnyArray, ""]]:
    """The penalty as a function of models, with the bounds of this model; its weight is `n`, or the number of rows."""
    low, high = bounds(model, data)
    weight = data.targets.shape[0] if n is None else n
    return lambda other: penalty(as_vector(other)[0], low, high, weight)[0]


def with_more_noise(models: Model, variances: tuple[float, ...]) -> Model:
    """The models along the leading axis, and copies with each of these noise variances, if the noise is learned.

    The variances are fractions of the target's variance. Few rows may show no noise where many rows do. And the
    variance that few inducing points do not explain counts as noise.
    """
    if "log_noise" in models.fixed:
        return models
    xp = namespace(models.log_noise)
    log_noises = [models.log_noise, *(xp.full_like(models.log_noise, math.log(variance)) for variance in variances)]
    repeat = lambda leaf: xp.concatenate([leaf] * len(log_noises)) if is_array(leaf) else leaf
    return eqx.tree_at(lambda m: m.log_noise, jax.tree.map(repeat, models), xp.concatenate(log_noises))


def one_of(models: M, number: Any = 0) -> M:
    """One of several models (or other modules) that are stacked along the leading axis of their arrays."""
    return jax.tree.map(lambda leaf: leaf[number] if isinstance(leaf, jax.Array | np.ndarray) else leaf, models)


def greatest(
    models: Model, value_of: Callable[[Model], Float[AnyArray, ""]]
) -> tuple[Int[AnyArray, ""], Float[AnyArray, " s"]]:
    """The number of the model with the greatest value among those along a leading axis, and the values of all.

    The models are evaluated one after the other. All at once would need a covariance matrix of the rows for each.
    """
    if namespace(*jax.tree.leaves(models)) is np:
        values = np.stack([value_of(one_of(models, k)) for k in range(number_of(models))])
        return np.argmax(np.where(np.isnan(values), -np.inf, values)), values
    arrays, static = eqx.partition(models, eqx.is_array)
    values = lax.map(lambda one: value_of(eqx.combine(one, static)), arrays)
    return jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values)), values


def alone(model: M) -> M:
    """A model, or a point, with a leading axis of length one."""
    return jax.tree.map(lambda leaf: leaf[None] if is_array(leaf) else leaf, model)


def number_of(models: Model) -> int:
    """How many models lie along the leading axis of their arrays."""
    return next(leaf for leaf in jax.tree.leaves(models) if isinstance(leaf, jax.Array | np.ndarray)).shape[0]
