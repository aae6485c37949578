"""Sparse Gaussian processes of more rows than fit in memory: read chunk by chunk, fitted by minibatches.

Hensman, Fusi & Lawrence, "Gaussian Processes for Big Data", UAI 2013. The bound of a minibatch is
`functional.sparse_gp.variational_bound` (their eq. 4). q(u) moves by natural gradients (`natural_step`, their eq. 9 to
11), the hyperparameters and inducing points by Adam, from where L-BFGS ends on a random sample of the rows. Where the
hyperparameters move, what the data said about u stays, and q(u) moves along (`transported`): Adam, Chang, Khan & Solin,
"Dual Parameterization of Sparse Variational Gaussian Processes", NeurIPS 2021. Last, one pass over all rows replaces
q(u) by the optimal one, so that evidence and posterior are exactly those of the collapsed bound.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks, progress
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import gp, linalg, sparse_gp
from jaxcal.gp import model as models
from jaxcal.gp.kernels import Points
from jaxcal.gp.model import JITTER_TRIES, Data, Model
from jaxcal.gp.options import Options
from jaxcal.gp.process import Process, first_fit
from jaxcal.gp.search import sparse_initial, with_inducing_points
from jaxcal.optimize import Result, minimize, scale_by_adam

# Gives the rows of a slice, or those of increasing numbers.
Read = Callable[[slice | Int[np.ndarray, " k"]], Data]

# Rows that are in memory at once.
_CHUNK_ROWS = 65_536
# The initial values are fitted to so many rows.
_SAMPLE_ROWS = 4_096
# q forgets a row after about so many others.
_WINDOW_ROWS = 10_240


class Sites(NamedTuple):
    """What the data say about the whitened inducing values v: q(v) ~ N(v; 0, I) exp(shift . v - v . precision v / 2).

    Those are the natural parameters of q without its prior's.

    Attributes:
        precision: [m, m].
        shift: [m].
    """

    precision: Float[Array, "m m"]
    shift: Float[Array, " m"]


def optimal(sums: sparse_gp.RowSums, noise_variance: Float[Array, ""], scale: ArrayLike = 1.0) -> Sites:
    """The sites under which `sparse_gp.variational_bound` of these rows is greatest; arguments as there."""
    weight = jnp.asarray(scale) / noise_variance
    return Sites(weight * sums.outer, weight * sums.cross)


def moments(sites: Sites) -> tuple[Float[Array, " m"], Float[Array, "m m"]]:
    """The mean of q(v), and a triangular square root of its covariance."""
    inverse = linalg.inverse_factor(linalg.add_diagonal(sites.precision, 1))
    return inverse.T @ (inverse @ sites.shift), inverse.T


def natural_step(sites: Sites, optimum: Sites, size: ArrayLike) -> Sites:
    """The sites after a natural gradient step, one of size 1 to the optimum; Hensman et al. (2013), eq. 9 to 11."""
    return jax.tree.map(lambda old, new: (1 - size) * old + size * new, sites, optimum)


def transported(sites: Sites, whiten: Float[Array, "m m"], factor: Float[Array, "m m"]) -> Sites:
    """Sites of the same u = L v in other whitened coordinates, u = M v: what they say about u stays.

    Args:
        sites: those of v = L^-1 u.
        whiten: L^-1.
        factor: M, the Cholesky factor of the inducing values' covariance under other hyperparameters.
    """
    move = whiten @ factor
    return Sites(move.T @ sites.precision @ move, move.T @ sites.shift)


def maximize_bound(
    initial_of: Callable[[Data], Model],
    read: Read,
    n: int,
    options: Options,
    *,
    key: PRNGKeyArray,
    epochs: int = 20,
    batch_size: int = 1024,
    learning_rate: float = 0.05,
) -> Process:
    """A process of great collapsed bound.

    What `fit.maximize_evidence` does, with two chunks of the rows in memory at a time: O(chunk + m^2) memory whatever n
    is, and O(n m^2) time an epoch, about that of the collapsed bound with its gradient. It reads while it goes: not for
    use inside of `jit`.

    It starts at the greatest exact evidence of some rows of a random sample, and is improved by L-BFGS on the bound of
    that sample, which counts as often as it takes to make up all rows. Then follow the epochs of minibatches: an epoch
    reads all chunks in random order and shuffles the rows of each; a few, at random, are omitted so that all chunks and
    batches are equal. The learning rate falls to zero along half a cosine.

    With inducing="greedy" the inducing points are rows of the sample chosen by conditional variance, and stay. With
    "trained" they are random rows, trained by the minibatches: a better bound for hardly more time.

    Args:
        initial_of: gives the initial values, from a sample of the rows: models without inducing points, stacked along
            a leading axis of their arrays.
        read: gives the rows of a slice, or those of increasing numbers, as the kernel takes them, with targets of mean
            zero: `column_moments` finds what to scale by.
        n: how many rows there are.
        options: how; whatever its bound, the collapsed one is meant.
        key: random key of the sample and of the order of the rows.
        epochs: how often the rows are passed over.
        batch_size: the most rows of a minibatch.
        learning_rate: of Adam, at the beginning.

    Returns:
        The process after data: its evidence the collapsed bound, its iterations the minibatches, its result
        STEP_LIMIT or NOT_FINITE.

    Raises:
        ValueError: if a count is less than 1, the learning rate not positive, or there are more inducing points than
            rows in the sample; if `read` gives another number of rows than it is asked for.
    """
    for name, value in (("n", n), ("epochs", epochs), ("batch_size", batch_size)):
        _checks.check_at_least(name, value, 1)
    _checks.check_positive("learning_rate", learning_rate)
    num_sampled = min(n, _SAMPLE_ROWS)
    if options.num_inducing > num_sampled:
        raise ValueError(f"num_inducing must be at most {num_sampled}; got {options.num_inducing}.")
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
    sample, plan = _sample(read, n, num_sampled, rng), _Plan.of(n, batch_size, epochs)
    candidates, dtype = initial_of(sample), sample.targets.dtype

    def attempt(tries: int) -> Process:
        jitter = models.jitter_of_try(jnp.int32(tries), dtype, "collapsed")
        model, sites, failed = _start(candidates, sample, jnp.asarray(n / num_sampled, dtype), jitter, options)
        model = _descend(model, sites, read, plan, _Rates.of(plan, learning_rate, jitter), options, rng)
        bound, posterior, noise, rounding = _condition(model, read, n, jitter, options.mesh)
        good = posterior.is_finite & models.is_sane(model, bound * num_sampled / n, sample)
        return Process(
            model=eqx.tree_at(lambda m: m.inducing, model, None),
            points=_inducing(model),
            posterior=posterior,
            noise_variance=noise,
            rounding_fraction=rounding / noise,
            evidence=bound,
            iterations=jnp.asarray(plan.num_steps),
            result=jnp.where(good, Result.STEP_LIMIT, Result.NOT_FINITE),
            jitter=jitter,
            failed_initial_values=failed,
        )

    return first_fit(map(attempt, range(JITTER_TRIES)))


def column_moments(
    read: Callable[[slice], Float[np.ndarray, " k *d"]], n: int
) -> tuple[Float[np.ndarray, "*d"], Float[np.ndarray, "*d"]]:
    """Means and standard deviations (divisor n - 1) of columns, in one pass over chunks of their rows, in float64.

    A chunk's mean and sum of squared deviations are merged with those before as Chan, Golub & LeVeque, "Algorithms for
    Computing the Sample Variance" (1983), eq. 2.1, do: no large sums of squares cancel. That of a constant column is 0.

    Args:
        read: gives the rows of a slice.
        n: how many rows there are, at least two.

    Raises:
        ValueError: if there are fewer rows, or one of them is NaN or infinite.

    Example:
        >>> import numpy as np
        >>> rows = np.asarray([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
        >>> mean, std = column_moments(lambda part: rows[part], 3)
        >>> mean.tolist(), std.round(4).tolist()
        ([4.0, 5.0], [3.6056, 0.0])
    """
    _checks.check_at_least("n", n, 2)
    origin = np.asarray(read(slice(0, 1)), float)[0]
    count, mean, square = 0, np.zeros_like(origin), np.zeros_like(origin)
    for part in _parts(n):
        values = np.asarray(read(part), float) - origin
        if not np.isfinite(values).all():
            row = part.start + np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1))
            raise ValueError(f"row {row} holds a value that is NaN or infinite.")
        own, total = values.mean(axis=0), count + len(values)
        square += np.sum((values - own) ** 2, axis=0) + (own - mean) ** 2 * (count * len(values) / total)
        mean += (own - mean) * (len(values) / total)
        count = total
    return np.asarray(origin + mean), np.asarray(np.sqrt(square / (n - 1)))


def check_known(*rows: Any) -> None:
    """Raise TypeError if rows are traced."""
    if _checks.is_traced(*rows):
        raise TypeError("bound='stochastic' reads its rows part by part: fit does not run under jit, vmap or grad.")


def given_key(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key.

    Raises:
        ValueError: if there is none.
    """
    if key is None:
        raise ValueError("bound='stochastic' needs a key: jax.random.key(0), say.")
    return key


def unread_rows(x: ArrayLike, length: int) -> np.ndarray:
    """Inputs [n, d] where they are, a file on disk, say: no more of them is read than their first row.

    Raises:
        ValueError: if they are not numbers, or not as many rows.
    """
    x = np.asanyarray(x)
    if x.ndim == 1:
        x = x[:, None]
    _checks.as_matrix("x", x[:1])
    _checks.check_length("x", x, length)
    return x


def reader(data_of: Callable[..., Data], columns: tuple, dtype: jnp.dtype) -> Read:
    """What reads some rows of the columns, some of which may be None, and makes data of them.

    The columns are kept on the host, where to cut out a part compiles nothing.
    """
    on_host = jax.tree.map(np.asarray, columns)
    return lambda part: data_of(*jax.tree.map(lambda column: jnp.asarray(column[part], dtype), on_host))


def standardizer(x: np.ndarray, dtype: jnp.dtype) -> Standardizer:
    """The standardizer of inputs [n, d], read in chunks."""
    moments = column_moments(lambda part: x[part], len(x))
    return Standardizer(*(jnp.asarray(moment, dtype) for moment in moments))


class _Plan(NamedTuple):
    """How the epochs pass over the rows: chunks of equal size, and of each of them batches of equal size."""

    n: int
    num_chunks: int
    chunk_rows: int
    num_batches: int
    batch_rows: int
    epochs: int

    @classmethod
    def of(cls, n: int, batch_size: int, epochs: int) -> "_Plan":
        num_chunks = -(-n // _CHUNK_ROWS)
        chunk_rows = n // num_chunks
        num_batches = -(-chunk_rows // batch_size)
        return cls(n, num_chunks, chunk_rows, num_batches, chunk_rows // num_batches, epochs)

    def starts(self, rng: np.random.Generator) -> Iterator[int]:
        """The first rows of all chunks of all epochs, in their order; the rows that an epoch does not hold vary."""
        for _ in range(self.epochs):
            first = int(rng.integers(self.n - self.num_chunks * self.chunk_rows + 1))
            yield from (first + chunk * self.chunk_rows for chunk in rng.permutation(self.num_chunks).tolist())

    @property
    def num_steps(self) -> int:
        return self.epochs * self.num_chunks * self.num_batches


class _Rates(NamedTuple):
    """What stays the same from batch to batch, as arrays, so that other values do not compile anew."""

    jitter: Float[Array, ""]
    scale: Float[Array, ""]
    natural_step: Float[Array, ""]
    learning_rate: Float[Array, ""]
    num_steps: Float[Array, ""]

    @classmethod
    def of(cls, plan: _Plan, learning_rate: float, jitter: Float[Array, ""]) -> "_Rates":
        natural_step = min(1, plan.batch_rows / _WINDOW_ROWS)
        rest = plan.n / plan.batch_rows, natural_step, learning_rate, plan.num_steps
        return cls(jitter, *(jnp.asarray(number, jitter.dtype) for number in rest))

    @property
    def adam(self) -> optax.GradientTransformation:
        dtype = self.learning_rate.dtype
        rate = lambda step: self.learning_rate * (1 + jnp.cos(jnp.pi * step.astype(dtype) / self.num_steps)) / 2
        return optax.chain(scale_by_adam(dtype), optax.scale_by_learning_rate(rate))


class _State(NamedTuple):
    """What the minibatches change."""

    params: PyTree
    optimizer: PyTree
    sites: Sites
    whitened_by: PyTree


@eqx.filter_jit
def _start(
    initial_models: Model, sample: Data, scale: Float[Array, ""], jitter: Float[Array, ""], options: Options
) -> tuple[Model, Sites, Int[Array, ""]]:
    """The model of a sample's exact evidence, improved by L-BFGS on its bound; its sites; how many initial values
    failed.

    In the bound the sample counts `scale` times. Counted once, so few rows are often best explained as noise: every row
    pays alike for what the inducing points miss, while what they explain is learned the better, the more rows there
    are.
    """

    def scaled_sums(model):
        sums, prior = jax.tree.map(lambda total: scale * total, _sum_over(model, sample, jitter, options.mesh))
        return sums, model.noise_above(models.rounding_of(prior))

    first = sparse_initial(initial_models, sample, jitter, options)
    params, fixed = models.split(with_inducing_points(first.model, sample, options))
    optimum = minimize(
        lambda params: -sparse_gp.collapsed_bound(*scaled_sums(eqx.combine(params, fixed))),
        params,
        max_iterations=options.max_iterations,
        gain_tolerance=options.tolerance,
    )
    model = eqx.combine(optimum.params, fixed)
    return model, optimal(*scaled_sums(model)), first.failed_initial_values


def _descend(model: Model, sites: Sites, read: Read, plan: _Plan, rates: _Rates, options: Options, rng) -> Model:
    """The model after all epochs, or as soon as it is not finite."""
    params, fixed = models.split(model, with_inducing=options.inducing == "trained")
    state, before = _State(params, rates.adam.init(params), sites, params), jnp.ones((), bool)
    with progress.work("stochastic bound: chunks of rows", plan.epochs * plan.num_chunks) as work:
        for start in plan.starts(rng):
            data = _checked(read(slice(start, start + plan.chunk_rows)), plan.chunk_rows)
            order = rng.permutation(plan.chunk_rows)[: plan.num_batches * plan.batch_rows]
            batches = jnp.asarray(order.reshape(plan.num_batches, plan.batch_rows))
            state, finite = _pass_over(state, fixed, data, batches, rates, options.mesh)
            # To ask is to wait for the answer: while the next chunk is read, the device works on this one alone.
            if not before:
                break
            before = finite
            work.advance()
    return eqx.combine(state.params, fixed)


@eqx.filter_jit
def _pass_over(
    state: _State, fixed: PyTree, data: Data, batches: Int[Array, "batches b"], rates: _Rates, mesh: Mesh | None
) -> tuple[_State, Bool[Array, ""]]:
    """The state after the minibatches of a chunk, and whether it is finite."""

    def gram(params, points):
        return models.jittered_gram(eqx.combine(params, fixed).kernel, points, rates.jitter)

    def loss(params, batch, sites, whitened_by):
        model = eqx.combine(params, fixed)
        points = lax.stop_gradient(model.inducing)
        whiten = linalg.inverse_factor(gram(whitened_by, points))
        sites = transported(sites, whiten, jnp.linalg.cholesky(gram(params, points)))
        sums, prior = _sum_over(model, batch, rates.jitter, mesh)
        noise = model.noise_above(models.rounding_of(rates.scale * prior))
        bound = sparse_gp.variational_bound(sums, *moments(sites), noise, rates.scale)
        return -bound, natural_step(sites, optimal(sums, noise, rates.scale), rates.natural_step)

    def step(state, rows):
        batch = jax.tree.map(lambda a: a[rows], data)
        gradients, sites = jax.grad(loss, has_aux=True)(state.params, batch, state.sites, state.whitened_by)
        updates, optimizer = rates.adam.update(gradients, state.optimizer, state.params)
        return _State(optax.apply_updates(state.params, updates), optimizer, sites, state.params), None

    state, _ = lax.scan(step, state, batches)
    return state, jnp.isfinite(optax.tree.norm((state.params, state.sites)))


def _condition(
    model: Model, read: Read, n: int, jitter: Float[Array, ""], mesh: Mesh | None
) -> tuple[Float[Array, ""], gp.Posterior, Float[Array, ""], Float[Array, ""]]:
    """The collapsed bound of all rows, the posterior under the optimal q, the noise variance, and that for rounding."""
    chunks = (_checked(read(part), part.stop - part.start) for part in _parts(n))
    totals = (_jitted_sum_over(model, chunk, jitter, mesh) for chunk in chunks)
    sums, prior = reduce(partial(jax.tree.map, operator.add), totals)
    return _conclude(model, sums, prior, jitter)


@eqx.filter_jit
def _conclude(model: Model, sums: sparse_gp.RowSums, prior: Float[Array, ""], jitter: Float[Array, ""]):
    rounding = models.rounding_of(prior)
    noise = model.noise_above(rounding)
    whiten = linalg.inverse_factor(models.jittered_gram(model.kernel, _inducing(model), jitter))
    return sparse_gp.collapsed_bound(sums, noise), sparse_gp.posterior(sums, whiten, noise), noise, rounding


def _sum_over(
    model: Model, data: Data, jitter: Float[Array, ""], mesh: Mesh | None
) -> tuple[sparse_gp.RowSums, Float[Array, ""]]:
    """What rows add to the sums over all of them, and to that of their prior variances."""
    sums, _ = models.row_sums(model, data, jitter, mesh)
    return sums, jnp.sum(model.kernel.diagonal(data.points))


_jitted_sum_over = eqx.filter_jit(_sum_over)


def _inducing(model: Model) -> Points:
    return cast(Points, model.inducing)


def _sample(read: Read, n: int, num_rows: int, rng: np.random.Generator) -> Data:
    """Random rows in random order."""
    data = _checked(read(np.sort(rng.choice(n, num_rows, replace=False))), num_rows)
    order = rng.permutation(num_rows)
    return jax.tree.map(lambda a: jnp.asarray(a[order]), data)


def _checked(data: Data, num_rows: int) -> Data:
    """The rows read, if they are as many as asked for."""
    if data.targets.shape != (num_rows,):
        raise ValueError(f"read must give the {num_rows} rows asked for; got targets of shape {data.targets.shape}.")
    return data


def _parts(n: int) -> Iterator[slice]:
    """All rows in chunks of two sizes at most, so that no more programs are compiled."""
    edges = np.linspace(0, n, -(-n // _CHUNK_ROWS) + 1).astype(int).tolist()
    return (slice(start, stop) for start, stop in itertools.pairwise(edges))
