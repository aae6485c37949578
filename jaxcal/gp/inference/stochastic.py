"""Sparse Gaussian processes of more rows than fit in memory: read chunk by chunk, fitted by minibatches.

Hensman, Fusi & Lawrence, "Gaussian Processes for Big Data", UAI 2013. The bound of a minibatch is
`functional.sparse_gp.variational_bound` (their eq. 4). All begins where L-BFGS ends on a random sample of the rows.
q(u) moves by natural gradients (`natural_step`, their eq. 9 to 11). Hyperparameters and inducing points move by Adam.
When they move, the information of the data about u stays, and q(u) moves with the prior (`transported`): Adam, Chang,
Khan & Solin, "Dual Parameterization of Sparse Variational Gaussian Processes", NeurIPS 2021. Last, one pass over all
rows replaces q(u) by the optimal q(u). So evidence and posterior are exactly the evidence and posterior of the
collapsed bound.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks, _programs, progress
from jaxcal._numpy import AnyArray
from jaxcal.frames import unread
from jaxcal.frames.unread import chunks
from jaxcal.functional import gp, linalg, sparse_gp
from jaxcal.gp import model as models
from jaxcal.gp.inference.sparse import Sparse, sparse_initial
from jaxcal.gp.kernels import Points
from jaxcal.gp.model import JITTER_TRIES, Data, Model, SearchResult
from jaxcal.gp.process import Process, first_fit
from jaxcal.gp.protocols import First, Inference, Noise
from jaxcal.optimize import Result, minimize, scale_by_adam

# Gives the rows of a slice, or the rows of increasing numbers.
Read = Callable[[slice | Int[np.ndarray, " k"]], Data]

# More inducing points are better and slower: benchmarks/results/stochastic_bound.txt.
_NUM_INDUCING = 400
# The learning rate of Adam at the beginning.
_LEARNING_RATE = 0.05
# The number of rows of the sample to which the initial values are fitted.
_SAMPLE_ROWS = 4_096
# q forgets a row after about this many others.
_WINDOW_ROWS = 10_240


class Sites(NamedTuple):
    """The likelihood terms of the whitened inducing values v: q(v) ~ N(v; 0, I) exp(shift . v - v . precision v / 2).

    They are the natural parameters of q minus the natural parameters of the prior.

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
    # With I + precision = L L': the mean is L^-T L^-1 shift, the covariance L^-T L^-1.
    inverse = linalg.inverse_factor(linalg.add_diagonal(sites.precision, 1))
    return inverse.T @ (inverse @ sites.shift), inverse.T


def natural_step(sites: Sites, optimum: Sites, size: ArrayLike) -> Sites:
    """The sites after a natural gradient step; size 1 goes to the optimum. Hensman et al. (2013), eq. 9 to 11."""
    return jax.tree.map(lambda old, new: (1 - size) * old + size * new, sites, optimum)


def transported(sites: Sites, whiten: Float[Array, "m m"], factor: Float[Array, "m m"]) -> Sites:
    """Sites in other whitened coordinates: from u = L v to u = M v, so that their information about u stays.

    Args:
        sites: the sites of v = L^-1 u.
        whiten: L^-1.
        factor: M, the Cholesky factor of the inducing values' covariance under other hyperparameters.
    """
    # v = A w with A = L^-1 M, so that the sites of w are A' P A and A' s.
    move = whiten @ factor
    return Sites(move.T @ sites.precision @ move, move.T @ sites.shift)


class Stochastic(Inference):
    """The sparse process over minibatches, for rows that do not fit in memory (for example, a `numpy.memmap`).

    It maximizes the bound of Hensman, Fusi & Lawrence (2013), eq. 4, with two chunks of the rows in memory at a time.
    It needs O(chunk + m^2) memory whatever n is, and O(n m^2) time an epoch. The search starts at the greatest exact
    evidence of some rows of a random sample. L-BFGS improves it on the bound of the sample, whose rows are weighted so
    that they count as all rows. Then follow the epochs of minibatches, which also train the inducing points. An epoch
    reads all chunks in random order and shuffles the rows of each. A few random rows are omitted so that all chunks and
    batches are equal. The learning rate falls to zero along half a cosine. Last, one pass over all rows gives the
    optimal q(u). The fit needs a key, and fits one output. It reads rows during the fit, so it does not run inside
    `jit`.

    Attributes:
        epochs: the number of passes over the rows.
        batch_size: the most rows of a minibatch.
        num_inducing: how many inducing points, at most n. None for 400.
        ard: as of `Exact`.
        tolerance: the tolerance of the search on the sample, as of `Exact`; None for 1 nat.
        max_iterations: the most steps of L-BFGS on the sample.

    Raises:
        ValueError: if an option is out of its range.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, by_parts = np.linspace(0, 6, 300), jc.gp.Stochastic(epochs=2, num_inducing=10)
        >>> y = np.sin(x) + 0.1 * np.cos(37 * x)
        >>> jc.gaussian_process.fit(x, y, inference=by_parts, key=jax.random.key(0)).inference
        'stochastic'
    """

    epochs: int = eqx.field(static=True, default=20)
    batch_size: int = eqx.field(static=True, default=1024)
    num_inducing: int | None = eqx.field(static=True, default=None)
    ard: bool | str | None = eqx.field(static=True, default=None)
    tolerance: Any = None
    max_iterations: Any = 1000

    def __check_init__(self) -> None:
        """Check the options."""
        for name in ("epochs", "batch_size"):
            _checks.check_at_least(name, getattr(self, name), 1)
        if self.num_inducing is not None:
            _checks.check_at_least("num_inducing", self.num_inducing, 1)

    def settled(self, n: int, noise: Noise, *, differentiable: bool) -> "Stochastic":
        """The same with the number of points and the tolerance for n rows."""
        if not noise.is_gaussian:
            raise ValueError(f"Stochastic goes with Gaussian noise; for {type(noise).__name__} take Exact or Sparse.")
        if differentiable:
            raise ValueError("differentiable=True needs an optimum, where minibatches do not end: take Sparse.")
        number, sampled = self.num_inducing or min(n, _NUM_INDUCING), min(n, _SAMPLE_ROWS)
        if number > sampled:
            raise ValueError(f"num_inducing must be at most {sampled}; got {number}.")
        return replace(self, num_inducing=number, tolerance=1.0 if self.tolerance is None else self.tolerance)

    @property
    def sparse(self) -> Sparse:
        """The inference of the search on the sample."""
        limits = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        return Sparse(num_inducing=self.num_inducing, points="trained", ard=self.ard, **limits)

    def search(
        self, initial_models: Model, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> SearchResult:
        """The search on rows in memory; `maximize_bound` reads the rows part by part."""
        return self.sparse.search(initial_models, data, jitter, first)


def maximize_bound(
    stochastic: Stochastic, initial_of: Callable[[Data], Model], read: Read, n: int, *, key: PRNGKeyArray
) -> Process:
    """A process with a great collapsed bound.

    Args:
        stochastic: the options, with their defaults for n rows.
        initial_of: gives the initial values, from a sample of the rows: models without inducing points, stacked along
            a leading axis of their arrays.
        read: gives the rows of a slice, or of increasing numbers, in the form that the kernel takes. The targets have
            mean zero: `frames.unread.column_moments` finds the scales.
        n: how many rows there are.
        key: random key for the sample and for the order of the rows.

    Returns:
        The process after data. Its evidence is the collapsed bound, its iterations are the minibatches, and its result
        is STEP_LIMIT or NOT_FINITE.

    Raises:
        ValueError: if `read` gives another number of rows than it is asked for.
    """
    num_sampled = min(n, _SAMPLE_ROWS)
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
    sample, plan = _sample(read, n, num_sampled, rng), _EpochPlan.of(n, stochastic.batch_size, stochastic.epochs)
    candidates, dtype, sparse = initial_of(sample), sample.targets.dtype, stochastic.sparse.of_arrays()

    def attempt(tries: int) -> Process:
        jitter = jnp.asarray(stochastic.jitter_of_try(np.int32(tries), dtype))
        model, sites, failed = _start(candidates, sample, jnp.asarray(n / num_sampled, dtype), jitter, sparse)
        model = _descend(model, sites, read, plan, _Rates.of(plan, jitter), rng)
        bound, posterior, noise, rounding = _condition(model, read, n, jitter)
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
            inference="stochastic",
        )

    return first_fit(map(attempt, range(JITTER_TRIES)))


def check_known(*rows: Any) -> None:
    """Raise TypeError if rows are traced."""
    if _checks.is_traced(*rows):
        raise TypeError("Stochastic reads its rows part by part: fit does not run under jit, vmap or grad.")


def given_key(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key.

    Raises:
        ValueError: if there is none.
    """
    if key is None:
        raise ValueError("Stochastic needs a key: jax.random.key(0), say.")
    return key


def reader(data_of: Callable[..., Data], columns: tuple, dtype: jnp.dtype) -> Read:
    """A function that reads some rows of the columns and makes data of them; columns may be None.

    The columns stay on the host, where a slice compiles nothing.
    """
    on_host = jax.tree.map(np.asarray, columns)
    return lambda part: data_of(*jax.tree.map(lambda column: jnp.asarray(column[part], dtype), on_host))


class _EpochPlan(NamedTuple):
    """How the epochs pass over the rows: in chunks of equal size, each cut into batches of equal size."""

    n: int
    num_chunks: int
    chunk_rows: int
    num_batches: int
    batch_rows: int
    epochs: int

    @classmethod
    def of(cls, n: int, batch_size: int, epochs: int) -> "_EpochPlan":
        num_chunks = -(-n // unread.CHUNK_ROWS)
        chunk_rows = n // num_chunks
        num_batches = -(-chunk_rows // batch_size)
        return cls(n, num_chunks, chunk_rows, num_batches, chunk_rows // num_batches, epochs)

    def starts(self, rng: np.random.Generator) -> Iterator[int]:
        """The first rows of all chunks of all epochs, in their order. The rows that an epoch omits vary."""
        for _ in range(self.epochs):
            first = int(rng.integers(self.n - self.num_chunks * self.chunk_rows + 1))
            yield from (first + chunk * self.chunk_rows for chunk in rng.permutation(self.num_chunks).tolist())

    @property
    def num_steps(self) -> int:
        return self.epochs * self.num_chunks * self.num_batches


class _Rates(NamedTuple):
    """The numbers that are the same for all batches, as arrays, so that other values do not compile anew."""

    jitter: Float[AnyArray, ""]
    scale: Float[Array, ""]
    natural_step: Float[Array, ""]
    learning_rate: Float[Array, ""]
    num_steps: Float[Array, ""]

    @classmethod
    def of(cls, plan: _EpochPlan, jitter: Float[AnyArray, ""]) -> "_Rates":
        natural_step = min(1, plan.batch_rows / _WINDOW_ROWS)
        rest = plan.n / plan.batch_rows, natural_step, _LEARNING_RATE, plan.num_steps
        return cls(jitter, *(jnp.asarray(number, jitter.dtype) for number in rest))

    @property
    def adam(self) -> optax.GradientTransformation:
        dtype = self.learning_rate.dtype
        # rate (1 + cos(pi t / T)) / 2 at step t of T
        rate = lambda step: self.learning_rate * (1 + jnp.cos(jnp.pi * step.astype(dtype) / self.num_steps)) / 2
        return optax.chain(scale_by_adam(dtype), optax.scale_by_learning_rate(rate))


class _MinibatchState(NamedTuple):
    """The state that the minibatches change."""

    params: PyTree
    optimizer: PyTree
    sites: Sites
    whitened_by: PyTree


@_programs.jit
def _start(
    initial_models: Model, sample: Data, scale: Float[Array, ""], jitter: Float[AnyArray, ""], sparse: Sparse
) -> tuple[Model, Sites, Int[Array, ""]]:
    """The model of a sample's exact evidence, improved by L-BFGS; its sites; how many initial values failed.

    L-BFGS maximizes the bound of the sample, in which the sample counts `scale` times. Otherwise its few rows are often
    best explained as noise. The cost of the variance that the inducing points miss is proportional to the number of
    rows. But the function that they explain is learned better with more rows.
    """

    def scaled_sums(model):
        sums, prior = jax.tree.map(lambda total: scale * total, _sum_over(model, sample, jitter))
        return sums, model.noise_above(models.rounding_of(prior))

    first = sparse_initial(sparse, initial_models, sample, jitter)
    params, fixed = models.split(sparse.with_inducing_points(first.model, sample))
    optimum = minimize(
        lambda params: -sparse_gp.collapsed_bound(*scaled_sums(eqx.combine(params, fixed))),
        params,
        max_iterations=sparse.max_iterations,
        gain_tolerance=sparse.tolerance,
    )
    model = eqx.combine(optimum.params, fixed)
    return model, optimal(*scaled_sums(model)), first.failed_initial_values


def _descend(
    model: Model, sites: Sites, read: Read, plan: _EpochPlan, rates: _Rates, rng: np.random.Generator
) -> Model:
    """The model after all epochs. The epochs end early if it is not finite."""
    params, fixed = models.split(model, with_inducing=True)
    state, before = _MinibatchState(params, rates.adam.init(params), sites, params), jnp.ones((), bool)
    with progress.work("stochastic bound: chunks of rows", plan.epochs * plan.num_chunks) as work:
        for start in plan.starts(rng):
            data = _checked(read(slice(start, start + plan.chunk_rows)), plan.chunk_rows)
            order = rng.permutation(plan.chunk_rows)[: plan.num_batches * plan.batch_rows]
            batches = jnp.asarray(order.reshape(plan.num_batches, plan.batch_rows))
            state, finite = _pass_over(state, fixed, data, batches, rates)
            # The test waits for its value. So it tests the chunk before: the device works on this chunk while the next
            # one is read.
            if not before:
                break
            before = finite
            work.advance()
    return eqx.combine(state.params, fixed)


@_programs.jit
def _pass_over(
    state: _MinibatchState, fixed: PyTree, data: Data, batches: Int[Array, "batches b"], rates: _Rates
) -> tuple[_MinibatchState, Bool[Array, ""]]:
    """The state after the minibatches of a chunk, and whether it is finite."""

    def gram(params, points):
        return models.jittered_gram(eqx.combine(params, fixed).kernel, points, rates.jitter)

    def loss(params, batch, sites, whitened_by):
        model = eqx.combine(params, fixed)
        points = lax.stop_gradient(model.inducing)
        whiten = linalg.inverse_factor(gram(whitened_by, points))
        sites = transported(sites, whiten, jnp.linalg.cholesky(gram(params, points)))
        sums, prior = _sum_over(model, batch, rates.jitter)
        noise = model.noise_above(models.rounding_of(rates.scale * prior))
        bound = sparse_gp.variational_bound(sums, *moments(sites), noise, rates.scale)
        return -bound, natural_step(sites, optimal(sums, noise, rates.scale), rates.natural_step)

    def step(state, rows):
        batch = jax.tree.map(lambda a: a[rows], data)
        gradients, sites = jax.grad(loss, has_aux=True)(state.params, batch, state.sites, state.whitened_by)
        updates, optimizer = rates.adam.update(gradients, state.optimizer, state.params)
        return _MinibatchState(optax.apply_updates(state.params, updates), optimizer, sites, state.params), None

    state, _ = lax.scan(step, state, batches)
    return state, jnp.isfinite(optax.tree.norm((state.params, state.sites)))


def _condition(
    model: Model, read: Read, n: int, jitter: Float[AnyArray, ""]
) -> tuple[Float[Array, ""], gp.Posterior, Float[Array, ""], Float[Array, ""]]:
    """The collapsed bound of all rows, the posterior under the optimal q, the noise variance, its part by rounding."""
    read_all = (_checked(read(part), part.stop - part.start) for part in chunks(n))
    totals = (_jitted_sum_over(model, chunk, jitter) for chunk in read_all)
    sums, prior = reduce(partial(jax.tree.map, operator.add), totals)
    return _conclude(model, sums, prior, jitter)


@_programs.jit
def _conclude(model: Model, sums: sparse_gp.RowSums, prior: Float[Array, ""], jitter: Float[AnyArray, ""]):
    rounding = models.rounding_of(prior)
    noise = model.noise_above(rounding)
    whiten = linalg.inverse_factor(models.jittered_gram(model.kernel, _inducing(model), jitter))
    return sparse_gp.collapsed_bound(sums, noise), sparse_gp.posterior(sums, whiten, noise), noise, rounding


def _sum_over(model: Model, data: Data, jitter: Float[AnyArray, ""]) -> tuple[sparse_gp.RowSums, Float[Array, ""]]:
    """The terms of some rows in the sums over all rows, and the sum of their prior variances."""
    sums, _ = models.row_sums(model, data, jitter)
    return sums, jnp.sum(model.kernel.diagonal(data.points))


_jitted_sum_over = _programs.jit(_sum_over)


def _inducing(model: Model) -> Points:
    return cast(Points, model.inducing)


def _sample(read: Read, n: int, num_rows: int, rng: np.random.Generator) -> Data:
    """Random rows in random order."""
    data = _checked(read(np.sort(rng.choice(n, num_rows, replace=False))), num_rows)
    order = rng.permutation(num_rows)
    return jax.tree.map(lambda a: jnp.asarray(a[order]), data)


def _checked(data: Data, num_rows: int) -> Data:
    """The rows that were read; ValueError if their number is not `num_rows`."""
    if data.targets.shape != (num_rows,):
        raise ValueError(f"read must give the {num_rows} rows asked for; got targets of shape {data.targets.shape}.")
    return data
