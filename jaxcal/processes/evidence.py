"""Gaussian processes fitted by their evidence: exact, or sparse with greedy or trained inducing points.

The hyperparameters maximise log p(targets) or its collapsed lower bound by L-BFGS (`functional.gp` has both), from the
best of several starts; or by Adam, as GPyTorch's examples do. Greedy inducing points are rows chosen by conditional
variance under the best start.
"""

import operator
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxcal import _checks
from jaxcal.functional import gp
from jaxcal.optimize import Optimum, Result, first_finite, minimize, one_run_at_a_time
from jaxcal.processes.kernels import IOKernel, Points

# Up to this many rows "auto" takes the exact Gaussian process: O(n^3), but few iterations, and more exact.
_EXACT_ROWS = 1000
# Gain of log evidence in a step, in nats, at which the fit stops: hyperparameters that differ by less are hardly told
# apart by the data.
_TOLERANCE = 1.0
_NUM_INDUCING = 100
# Noise below this share of the target's variance is not told from none.
_NOISE_FLOOR = 1e-6
# Starts are compared by their evidence on so many of the rows. On fewer of them much noise is not told from none under
# a short lengthscale; where the process is exact, and so the rows few, the difference is not worth the time.
_COMPARED_ROWS = {"exact": 200, "collapsed": 500}
_PREDICTED_AT_ONCE = 2048
# GPyTorch keeps the variance of the noise above this.
_GPYTORCH_NOISE = 1e-4
# How many amounts of jitter are tried, each a hundred times the one before.
JITTER_TRIES = 4


class Data(NamedTuple):
    """What a process is fitted to.

    Attributes:
        points: the rows, as the kernel sees them.
        targets: their targets, of mean zero.
        spread: the variance that the base model gave every row, relative to its mean; None where it gave none.
    """

    points: Points
    targets: Float[Array, " n"]
    spread: Float[Array, " n"] | None = None


class GaussianProcess(eqx.Module):
    """What is learnt by maximising the evidence; inducing points only where they are, too.

    The noise of a row is noise_variance * (1 - s + s spread), with s between 0 and 1 the share of the noise that
    follows the base model's own variance. What `fixed` names stays as it starts.
    """

    kernel: IOKernel
    log_noise: Float[Array, ""]
    logit_share: Float[Array, ""] | None = None
    inducing: Points | None = None
    fixed: tuple[str, ...] = eqx.field(static=True, default=())

    def noise_variance(self, points: Points) -> Float[Array, ""]:
        """The mean variance of the noise at the training rows, in units of the scaled target.

        Noise that rounding in the factorisation of the rows' covariance would drown is not told from none.
        """
        prior = self.kernel.diagonal(points)
        return _NOISE_FLOOR + jnp.exp(self.log_noise) + jnp.finfo(prior.dtype).eps * jnp.sum(prior)

    def relative_noise(self, spread: Float[Array, " n"] | None) -> Float[Array, " n"] | None:
        """The variance of the noise at every row, relative to `noise_variance`; None where it is the same."""
        if self.logit_share is None or spread is None:
            return None
        share = jax.nn.sigmoid(self.logit_share)
        return 1 - share + share * spread


class Options(NamedTuple):
    """How a process is fitted; what decides what is compiled. With a learning rate it is by Adam, else by L-BFGS."""

    bound: str
    inducing: str
    num_inducing: int
    max_iterations: int
    tolerance: float = 0.0
    mesh: Mesh | None = None
    learning_rate: float | None = None

    @classmethod
    def of(
        cls,
        n: int,
        bound: str,
        num_inducing: int | None,
        inducing: str | None,
        max_iterations: int,
        tolerance: float | None,
        mesh: Mesh | None = None,
        learning_rate: float | None = None,
    ) -> "Options":
        """What the user of a method asked for n rows, checked, with the defaults in place of None."""
        _checks.check_choice("bound", bound, ("auto", "exact", "collapsed", "stochastic"))
        _checks.check_choice("inducing", inducing, (None, "greedy", "trained"))
        _checks.check_at_least("max_iterations", max_iterations, 1)
        tolerance = _TOLERANCE if tolerance is None else tolerance
        _checks.check_not_negative("tolerance", tolerance)
        if bound == "auto":
            bound = "exact" if n <= _EXACT_ROWS else "collapsed"
        num_inducing = _NUM_INDUCING if num_inducing is None else num_inducing
        _checks.check_at_least("num_inducing", num_inducing, 1)
        if num_inducing > n and bound == "collapsed":
            warnings.warn(f"num_inducing is {num_inducing}, but there are {n} rows; {n} are taken.", stacklevel=4)
        inducing = inducing or ("trained" if bound == "stochastic" else "greedy")
        return cls(bound, inducing, min(num_inducing, n), max_iterations, tolerance, mesh, learning_rate)


class Fitted(NamedTuple):
    """A process after data.

    Attributes:
        process: with the hyperparameters found.
        posterior: what the data say.
        jitter: the share of the mean variance that had to be added to the covariance's diagonal.
        failed_starts: how many of the starts had a covariance that could not be factorised.
    """

    process: GaussianProcess
    posterior: gp.Posterior
    jitter: Float[Array, ""]
    failed_starts: Int[Array, ""]


def maximise(starts: GaussianProcess, data: Data, options: Options) -> tuple[Optimum, Fitted]:
    """The process of the greatest evidence, its posterior, and the smallest jitter at which both are finite.

    Safe under `vmap`: see `optimize.one_run_at_a_time`.

    Args:
        starts: where to start, without inducing points: its arrays have a leading axis of starts.
        data: what to explain.
        options: how.
    """
    arrays, static = eqx.partition(starts, eqx.is_array)

    def run(arrays, data):
        # By the exact evidence, without the blur of a sparse bound; of all rows where nothing follows.
        starts = eqx.combine(arrays, static)
        compared = _few_rows(data, options.bound) if _has_more_to_learn(starts) else data
        start, failed = best_start(starts, lambda process: evidence(process, compared, 0))

        def attempt(tries):
            jitter = jitter_of_try(tries, data.targets.dtype, options.bound)
            optimum = _climb(with_inducing_points(start, data, options), data, jitter, options)
            found = posterior(optimum.params, data, jitter, options.mesh)
            return optimum._replace(
                params=Fitted(eqx.filter(optimum.params, eqx.is_array), found, jitter, failed),
                result=jnp.where(found.is_finite, optimum.result, Result.NOT_FINITE),
            )

        return first_finite(attempt, JITTER_TRIES)

    optimum = one_run_at_a_time(run)(arrays, data)
    fitted = optimum.params
    kernel = eqx.combine(fitted.process.kernel, static.kernel)
    return optimum, fitted._replace(process=eqx.tree_at(lambda p: p.kernel, fitted.process, kernel))


def evidence(process: GaussianProcess, data: Data, jitter: ArrayLike, mesh: Mesh | None = None) -> Float[Array, ""]:
    """The log marginal likelihood of the targets, or with inducing points its collapsed lower bound."""
    if process.inducing is None:
        return gp.exact_log_likelihood(_noisy_gram(process, data, jitter), data.targets)
    sums, _ = row_sums(process, process.inducing, data, jitter, mesh)
    return gp.collapsed_bound(sums, process.noise_variance(data.points))


def posterior(process: GaussianProcess, data: Data, jitter: ArrayLike, mesh: Mesh | None = None) -> gp.Posterior:
    """What the data say at the rows, or at the inducing points."""
    if process.inducing is None:
        return gp.exact_posterior(_noisy_gram(process, data, jitter), data.targets)
    sums, whiten = row_sums(process, process.inducing, data, jitter, mesh)
    return gp.sparse_posterior(sums, whiten, process.noise_variance(data.points))


def predict(kernel: IOKernel, given: gp.Posterior, at: Points, points: Points) -> tuple[Array, Array]:
    """Latent means and variances at points; RIO, eq. 5 and 6.

    Args:
        kernel: of the process.
        given: its posterior at the conditioning points.
        at: those points: the rows, or the inducing points.
        points: where to predict.
    """

    def predict_one(point: Points):
        return gp.predict(given, *_covariances(kernel, point, at))

    return lax.map(predict_one, points, batch_size=_PREDICTED_AT_ONCE)


def left_out(process: GaussianProcess, given: gp.Posterior, data: Data) -> gp.LeftOut:
    """Errors and variances of the rows, each left out of the data in turn; their noise is equal.

    Args:
        process: the process.
        given: its posterior of these rows.
        data: the rows.
    """
    inducing = process.inducing
    if inducing is None:
        return gp.exact_left_out(given)
    noise = process.noise_variance(data.points)

    def one_row(row):
        point, target = row
        cross, prior = _covariances(process.kernel, point, inducing)
        return gp.sparse_left_out(given, cross, target, prior, noise)

    return lax.map(one_row, (data.points, data.targets), batch_size=_PREDICTED_AT_ONCE)


def _covariances(kernel: IOKernel, point: Points, at: Points) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """One point's covariances with others, and with itself."""
    row = jax.tree.map(lambda a: a[None], point)
    return kernel(row, at)[0], kernel.diagonal(row)[0]


def raise_unless_factorised(result: Int[Array, "*runs"], jitter: Float[Array, "*runs"], n: int) -> None:
    """Raise FloatingPointError if no jitter made the covariance of n rows positive definite; nothing while traced."""
    if not _checks.is_traced(result) and np.any(np.asarray(result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {n} rows could not be factorised, even with a jitter of "
            f"{np.max(jitter):.0e} of its mean variance. Is a hyperparameter of the kernel negative or extreme? "
            "throw=False returns the fit."
        )


def greedy_points(kernel: IOKernel, points: Points, num_inducing: int) -> Points:
    """The points that leave the least variance unexplained, chosen one by one: `gp.greedy_rows`."""
    rows = gp.greedy_rows(lambda row: kernel(points.take(row[None]), points)[0], kernel.diagonal(points), num_inducing)
    return points.take(rows)


def best_start(
    starts: GaussianProcess, value: Callable[[GaussianProcess], Float[Array, ""]]
) -> tuple[GaussianProcess, Int[Array, ""]]:
    """The start of the greatest value, of those along the leading axis of the arrays, and how many values are NaN.

    One after the other: all at once would hold as many matrices of the rows' covariances.
    """
    arrays, static = eqx.partition(starts, eqx.is_array)
    if jax.tree.leaves(arrays)[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[0], starts), jnp.int32(0)
    values = lax.map(lambda start: value(eqx.combine(start, static)), arrays)
    is_nan = jnp.isnan(values)
    best = jnp.argmax(jnp.where(is_nan, -jnp.inf, values))
    return eqx.combine(jax.tree.map(lambda a: a[best], arrays), static), jnp.sum(is_nan, dtype=jnp.int32)


def with_inducing_points(process: GaussianProcess, data: Data, options: Options) -> GaussianProcess:
    """The process with the inducing points that the options ask for: greedy ones, or the first rows, to be trained."""
    if options.bound == "exact":
        return process
    if options.inducing == "greedy":
        inducing = greedy_points(process.kernel, data.points, options.num_inducing)
    else:
        inducing = data.points.take(jnp.arange(options.num_inducing))
    return eqx.tree_at(lambda p: p.inducing, process, inducing, is_leaf=lambda node: node is None)


def split(process: GaussianProcess, *, with_inducing: bool) -> tuple[PyTree, PyTree]:
    """What is learnt of a process, and the rest."""
    learnt = jax.tree.map(eqx.is_inexact_array, process)
    for name in (*process.fixed, *(() if with_inducing else ("inducing",))):
        learnt = eqx.tree_at(operator.attrgetter(name), learnt, False, is_leaf=lambda node: node is None)
    return eqx.partition(process, learnt)


def _has_more_to_learn(process: GaussianProcess) -> bool:
    return bool(jax.tree.leaves(split(process, with_inducing=False)[0]))


def row_sums(process: GaussianProcess, inducing: Points, data: Data, jitter: ArrayLike, mesh: Mesh | None):
    """The sums over the rows that the sparse bound needs, and the inverse factor at the inducing points."""
    kernel, relative = process.kernel, process.relative_noise(data.spread)
    whiten = gp.inverse_factor(covariance(kernel, inducing, jitter))
    sums = gp.row_sums(
        eqx.Partial(kernel, inducing),
        whiten,
        data.points,
        kernel.diagonal(data.points),
        data.targets,
        None if relative is None else 1 / relative,
        mesh,
    )
    return sums, whiten


def covariance(kernel: IOKernel, points: Points, jitter: ArrayLike, noise: ArrayLike = 0) -> Float[Array, "n n"]:
    """The covariance of the points with themselves, with jitter and noise on the diagonal."""
    return gp.add_diagonal(kernel(points, points), jitter * jnp.mean(kernel.diagonal(points)) + noise)


def jitter_of_try(step: Int[Array, ""], dtype, bound: str) -> Float[Array, ""]:
    """The share of the mean variance that is added to the diagonal: a hundred times more at each step.

    Noise is on the exact process's diagonal already: it starts without.
    """
    least = max(1e-8, 10 * float(jnp.finfo(dtype).eps))
    jitter = least * jnp.asarray(100, dtype) ** step
    return jnp.where(step > 0, jitter, 0) if bound == "exact" else jitter


def _few_rows(data: Data, bound: str) -> Data:
    """Rows at equal distances, on which the starts are compared."""
    n = data.targets.shape[0]
    rows = jnp.linspace(0, n - 1, min(n, _COMPARED_ROWS[bound])).astype(int)
    return jax.tree.map(lambda a: a[rows], data)


def _climb(initial: GaussianProcess, data: Data, jitter: Float[Array, ""], options: Options) -> Optimum:
    """Maximise the evidence over the hyperparameters, and over the inducing points where they are trained."""
    params, fixed = split(initial, with_inducing=options.inducing == "trained")

    def loss(params: PyTree) -> Float[Array, ""]:
        return -evidence(eqx.combine(params, fixed), data, jitter, options.mesh)

    if not jax.tree.leaves(params):
        value = loss(params)
        result = jnp.where(jnp.isfinite(value), Result.CONVERGED, Result.NOT_FINITE)
        optimum = Optimum(params, value, jnp.int32(0), result)
    elif options.learning_rate is None:
        optimum = minimize(loss, params, max_iterations=options.max_iterations, gain_tolerance=options.tolerance)
    else:
        optimum = _minimize_by_adam(loss, params, options.learning_rate, options.max_iterations)
    return optimum._replace(params=eqx.combine(optimum.params, fixed))


def _minimize_by_adam(
    loss: Callable[[GaussianProcess], Float[Array, ""]], params: GaussianProcess, learning_rate: float, steps: int
) -> Optimum:
    """So many steps of Adam in GPyTorch's coordinates: hyperparameters are the softplus of what is learnt."""
    adam = optax.adam(learning_rate)
    # One vector: for a tree, XLA would compile every update once a leaf.
    raw, unravel = ravel_pytree(_map_hyperparameters(lambda log, least: inverse_softplus(jnp.exp(log) - least), params))

    def process_of(raw: Float[Array, " p"]) -> GaussianProcess:
        return _map_hyperparameters(lambda value, least: jnp.log(jax.nn.softplus(value) + least), unravel(raw))

    def step(state, _):
        raw, memory = state
        updates, memory = adam.update(jax.grad(lambda raw: loss(process_of(raw)))(raw), memory)
        return (raw + updates, memory), None

    (raw, _), _ = lax.scan(step, (raw, adam.init(raw)), length=steps)
    value = loss(process_of(raw))
    result = jnp.where(jnp.isfinite(value), Result.STEP_LIMIT, Result.NOT_FINITE)
    return Optimum(process_of(raw), value, jnp.int32(steps), result)


def _map_hyperparameters(change: Callable, process: GaussianProcess) -> GaussianProcess:
    """Kernel and noise changed by `change(value, least)`, with the least value that GPyTorch allows."""
    kernel = jax.tree.map(lambda value: change(value, 0.0), process.kernel)
    noise = change(process.log_noise, _GPYTORCH_NOISE)
    return eqx.tree_at(lambda p: (p.kernel, p.log_noise), process, (kernel, noise))


def inverse_softplus(value: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """The number whose softplus a positive value is."""
    return value + jnp.log(-jnp.expm1(-value))


def _noisy_gram(process: GaussianProcess, data: Data, jitter: ArrayLike) -> Float[Array, "n n"]:
    """The covariance of the targets."""
    noise, relative = process.noise_variance(data.points), process.relative_noise(data.spread)
    return covariance(process.kernel, data.points, jitter, noise if relative is None else noise * relative)
