"""Hyperparameters of the greatest evidence: of the exact process, or of the sparse one through inducing points.

The exact evidence is climbed by damped Newton steps (`newton`): on some of the rows from every initial value, then on
all of them from the best two that differ. The sparse bound starts where the exact evidence of some of the rows has its
maximum, and goes on by L-BFGS; by Adam, as GPyTorch's examples do, if a learning rate is given. Greedy inducing points
are rows chosen by conditional variance under the initial kernel.
"""

import math
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
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jaxcal import _checks
from jaxcal.functional import gp, noise
from jaxcal.gp import newton
from jaxcal.gp.kernels import Kernel, Points, scattered, take
from jaxcal.gp.model import (
    Data,
    Model,
    Process,
    StudentT,
    evidence,
    expected_squares,
    leave_one_out,
    noisy_gram,
    posterior,
    row_noise,
    split,
)
from jaxcal.optimize import Optimum, Result, first_finite, minimize, one_run_at_a_time, over_runs

# Up to this many rows "auto" takes the exact Gaussian process: O(n^3), but few iterations, and more exact.
_EXACT_ROWS = 2000
_NUM_INDUCING = 400
# The gain of log evidence, in nats, below which a fit ends: the data hardly distinguish hyperparameters so close.
_TOLERANCE, _SPARSE_TOLERANCE = 0.005, 1.0
# Of more rows than this, so many decide which optima are climbed to.
_FEW_ROWS = 500
# Every initial value is climbed from by so many steps; to the end go those within so many nats of the best, but for
# those less than so many nats from a better one: they are on the way to the same place.
_FIRST_LAP, _CLOSE, _ALIKE = 8, 10.0, 0.2
# Two optima are one if no log hyperparameter differs by more.
_SAME = 0.3
# The sparse bound may start from the exact evidence of so many rows.
_SUBSET_ROWS = 1000
# That start and others are compared by the bound of so many rows, with so many inducing points, also at these fractions
# of noise.
_COMPARED_ROWS, _COMPARED_POINTS, _MORE_NOISE = 4000, 100, (0.1, 0.5)
# Greedy inducing points are chosen among so many rows.
_GREEDY_ROWS = 10_000
# A prior variance, or that of the noise, that exceeds the target's by this factor is absurd.
_ABSURD = 1e6
# How many amounts of jitter are tried, each a hundred times the one before.
JITTER_TRIES = 4
# Student t noise: the degrees of freedom of the first precisions, and those that the climb starts from.
_FIRST_DF, _CLIMBED_DF = 4.0, 10.0
# Noise that depends on the inputs: how often the two processes are fitted, and how far the one of the noise is.
_NOISE_ROUNDS, _NOISE_STEPS, _NOISE_TOLERANCE = 2, 20, 0.1
# GPyTorch keeps the variance of the noise above this.
_GPYTORCH_NOISE = 1e-4


class Options(NamedTuple):
    """How a process is fitted; what decides what is compiled. With a learning rate it is by Adam."""

    bound: str
    inducing: str
    num_inducing: int
    max_iterations: int
    tolerance: float = 0.0
    ard: bool | str = False
    noise: str = "gaussian"
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
        ard: bool | str = False,
        noise: str = "gaussian",
        mesh: Mesh | None = None,
        learning_rate: float | None = None,
    ) -> "Options":
        """What the user of a method asked for n rows, checked, with the defaults in place of None."""
        _checks.check_choice("bound", bound, ("auto", "exact", "collapsed", "stochastic"))
        _checks.check_choice("inducing", inducing, (None, "greedy", "trained"))
        _checks.check_choice("ard", ard, (True, False, "auto"))
        _checks.check_choice("noise", noise, ("gaussian", "student_t", "input"))
        if noise != "gaussian" and (bound == "stochastic" or learning_rate is not None):
            raise ValueError(f"noise={noise!r} is for the exact and the collapsed bound, without Adam or a preset.")
        _checks.check_at_least("max_iterations", max_iterations, 1)
        sparse = {"num_inducing": num_inducing, "inducing": inducing, "mesh": mesh}
        if bound == "exact":
            given = [name for name, value in sparse.items() if value is not None]
            if given:
                raise ValueError(
                    f"bound='exact' has no inducing points: {given[0]} has no effect. Leave it out, or take "
                    "bound='collapsed'."
                )
        if bound == "auto":
            wants_sparse = any(value is not None for value in sparse.values())
            exact = num_inducing >= n if num_inducing is not None else n <= _EXACT_ROWS and not wants_sparse
            bound = "exact" if exact else "collapsed"
        if tolerance is None:
            tolerance = _TOLERANCE if bound == "exact" else _SPARSE_TOLERANCE
        _checks.check_not_negative("tolerance", tolerance)
        num_inducing = _NUM_INDUCING if num_inducing is None else num_inducing
        _checks.check_at_least("num_inducing", num_inducing, 1)
        if num_inducing > n and bound == "collapsed":
            warnings.warn(f"num_inducing is {num_inducing}, but there are {n} rows; {n} are taken.", stacklevel=4)
        inducing = inducing or ("trained" if bound == "stochastic" else "greedy")
        return cls(
            bound=bound,
            inducing=inducing,
            num_inducing=min(num_inducing, n),
            max_iterations=max_iterations,
            tolerance=tolerance,
            ard=ard,
            noise=noise,
            mesh=mesh,
            learning_rate=learning_rate,
        )


class Found(NamedTuple):
    """What a search found.

    Attributes:
        model: with the best hyperparameters.
        evidence: its log evidence, or the bound on it.
        steps: of the optimizer, from the chosen initial value.
        result: a value of `Result`.
        failed_starts: how many initial values had no sane evidence.
    """

    model: Model
    evidence: Float[Array, ""]
    steps: Int[Array, ""]
    result: Int[Array, ""]
    failed_starts: Int[Array, ""]


# Gives where to start, for rows and, where it is known, the variance of their noise: models without inducing points,
# whose arrays have a leading axis of starts.
StartsOf = Callable[[Data, Float[Array, ""] | None], Model]


def maximize(starts_of: StartsOf, data: Data, options: Options) -> Process:
    """The process of the greatest evidence, at the smallest jitter at which evidence and posterior are finite.

    Safe under `vmap`: see `optimize.one_run_at_a_time`.

    Args:
        starts_of: gives where to start; a pytree where it holds arrays, such as an `eqx.Partial`.
        data: what to explain.
        options: how.
    """
    rest: list[PyTree] = []
    arrays, static = eqx.partition((starts_of, data), eqx.is_array)

    def run(arrays):
        starts_of, data = eqx.combine(arrays, static)

        def attempt(tries):
            jitter = jitter_of_try(tries, data.targets.dtype, options.bound)
            found, other = eqx.partition(_fitted(starts_of, data, jitter, options), eqx.is_array)
            rest[:] = [other]
            return found

        return first_finite(attempt, JITTER_TRIES)

    return eqx.combine(one_run_at_a_time(run)(arrays), rest[0])


def _fitted(starts_of: StartsOf, data: Data, jitter: Float[Array, ""], options: Options) -> Process:
    """The process by the noise that the options ask for."""
    starts = starts_of(data, None)
    if options.noise == "student_t":
        return process_of(_with_student_t_noise(starts, data, jitter, options), data, jitter, options)
    found = search(starts, data, jitter, options)
    if options.noise == "input":
        return _with_input_noise(found, starts_of, data, jitter, options)
    return process_of(found, data, jitter, options)


def process_of(found: Found, data: Data, jitter: Float[Array, ""], options: Options) -> Process:
    """The process after data, NOT_FINITE where its posterior is not, or where it makes no sense."""
    model = found.model
    after = posterior(model, data, jitter, options.mesh)
    good = after.is_finite & is_sane(model, found.evidence, data)
    greatest, stored = None, without_rows(model)
    if model.student_t is None:
        errors = jnp.abs(standardized_errors(model, after, data))
        greatest = jnp.max(errors), jnp.argmax(errors)
    return Process(
        model=stored,
        points=data.points if model.inducing is None else model.inducing,
        posterior=after,
        noise_variance=model.noise_variance(data.points),
        evidence=found.evidence,
        iterations=found.steps,
        result=jnp.where(good, found.result, Result.NOT_FINITE),
        jitter=jitter,
        failed_starts=found.failed_starts,
        greatest_error=greatest,
    )


def without_rows(model: Model) -> Model:
    """The model without what is of the training rows: inducing points, and the precisions of Student t noise."""
    model = eqx.tree_at(lambda m: m.inducing, model, None, is_leaf=lambda node: node is None)
    if model.student_t is None:
        return model
    return eqx.tree_at(lambda m: m.student_t.log_squares, model, None, is_leaf=lambda node: node is None)


def standardized_errors(model: Model, after: gp.Posterior, data: Data) -> Float[Array, " n"]:
    """Leave-one-out errors of the rows over their standard deviations."""
    errors = leave_one_out(model, after, data)
    return errors.error / jnp.sqrt(errors.variance)


def warn_of_outliers(process: Process, n: int) -> None:
    """Warn if an error is greater than any of n normal ones; nothing while traced."""
    if process.greatest_error is None or _checks.is_traced(*process.greatest_error):
        return
    errors, rows = (np.ravel(a) for a in process.greatest_error)
    worst = int(np.argmax(errors))
    if errors[worst] > float(noise.greatest_error(n)):
        warnings.warn(
            f"row {rows[worst]} lies {errors[worst]:.1f} standard deviations from what the other rows say: it is an "
            "outlier, or the noise has heavy tails or depends on the inputs. noise='student_t' keeps single rows from "
            "deciding the fit; noise='input' lets the noise differ.",
            stacklevel=3,
        )


def is_sane(model: Model, value: Float[Array, ""], data: Data) -> Bool[Array, ""]:
    """Whether an evidence is finite and one that the noise allows, of variances not far beyond the target's."""
    noise, variance = row_noise(model, data), jnp.mean(data.targets**2)
    greatest = gp.greatest_log_likelihood(data.targets.shape[0], jnp.min(noise))
    prior = jnp.mean(model.kernel.diagonal(data.points))
    return (value <= greatest) & (jnp.maximum(prior, model.noise_variance(data.points)) < _ABSURD * variance)


def raise_unless_factorized(result: Int[Array, "*runs"], jitter: Float[Array, "*runs"], n: int) -> None:
    """Raise FloatingPointError if no fit made sense at any jitter; nothing while traced."""
    if not _checks.is_traced(result) and np.any(np.asarray(result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {n} rows could not be factorized, or only with hyperparameters that make no sense, "
            f"even with a jitter of {np.max(jitter):.0e} of its mean variance. Is a hyperparameter of the kernel "
            "negative or extreme? throw=False returns the fit."
        )


def search(starts: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The best hyperparameters that are found from the starts."""
    if options.bound == "exact":
        if not _has_more_to_learn(starts):
            return best_start(starts, data, jitter)
        if options.learning_rate is None:
            return exact_optimum(starts, data, jitter, options)
        return _descend(_one(starts), data, jitter, options)
    start = sparse_start(starts, data, jitter, options)
    found = _descend(with_inducing_points(start.model, data, options), data, jitter, options)
    return found._replace(failed_starts=start.failed_starts)


def sparse_start(starts: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """Where the sparse bound starts: at the only start; or at the best by the bound itself of several.

    Those are the starts and the optimum of the exact evidence of some rows, each with its own noise and with more: what
    few inducing points do not explain is noise to them.
    """
    some = some_rows(data, _SUBSET_ROWS)
    if not _has_more_to_learn(starts):
        return best_start(starts, some, jitter)
    if _number(starts) == 1:
        unknown = jnp.full((), jnp.nan, data.targets.dtype)
        return Found(_one(starts), unknown, jnp.int32(0), jnp.int32(Result.STEP_LIMIT), jnp.int32(0))
    found = exact_optimum(starts, some, jitter, options._replace(tolerance=min(options.tolerance, _TOLERANCE)))
    if options.ard:
        wide = eqx.filter_vmap(lambda model: model.kernel.by_column(data.points))(starts)
        starts = eqx.tree_at(lambda m: m.kernel, starts, wide)
    join = lambda several, one: jnp.concatenate([several, one[None]]) if eqx.is_array(one) else one
    candidates = jax.tree.map(join, starts, found.model)
    if "log_noise" not in starts.fixed:
        log_noises = [candidates.log_noise, *(jnp.full_like(candidates.log_noise, math.log(q)) for q in _MORE_NOISE)]
        repeat = lambda leaf: jnp.concatenate([leaf] * len(log_noises)) if eqx.is_array(leaf) else leaf
        candidates = jax.tree.map(repeat, candidates)
        candidates = eqx.tree_at(lambda m: m.log_noise, candidates, jnp.concatenate(log_noises))
    compared = some_rows(data, _COMPARED_ROWS)
    few_points = options._replace(inducing="greedy", num_inducing=min(options.num_inducing, _COMPARED_POINTS))
    arrays, static = eqx.partition(candidates, eqx.is_array)

    def bound(candidate) -> Float[Array, ""]:
        model = with_inducing_points(eqx.combine(candidate, static), compared, few_points)
        return evidence(model, compared, jitter)

    values = lax.map(bound, arrays)
    best = jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values))
    return found._replace(model=_one(candidates, best), evidence=values[best])


def refine(model: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The hyperparameters of the greatest evidence near those of one model, whose inducing points stay."""
    if model.inducing is not None:
        return _descend(model, data, jitter, options._replace(inducing="greedy"))
    start = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, model)
    return exact_optimum(start, data, jitter, options._replace(ard=False))


def _with_student_t_noise(starts: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The model of the greatest bound under Student t noise: hyperparameters, degrees of freedom and rows' precisions.

    The search is that of normal noise with the precisions that the targets alone suggest. From its end all are climbed
    together; alternating between them, the degrees of freedom creep.
    """
    first = noise.student_t_weights(data.targets**2, jnp.asarray(_FIRST_DF, data.targets.dtype))
    found = search(starts, data._replace(relative_noise=1 / first), jitter, options)

    def squares(model: Model, data: Data) -> Float[Array, " n"]:
        after = posterior(model, data, jitter, options.mesh)
        return expected_squares(model, after, data) / model.noise_variance(data.points)

    student_t = StudentT.of(_CLIMBED_DF, squares(found.model, data._replace(relative_noise=1 / first)))
    model = eqx.tree_at(lambda m: m.student_t, found.model, student_t, is_leaf=lambda node: node is None)
    climbed = _descend(model, data, jitter, options)
    # The last update is in closed form, and raises the bound.
    last = squares(climbed.model, data)
    model = eqx.tree_at(lambda m: m.student_t, climbed.model, StudentT.of(noise.student_t_df(last), last))
    value = evidence(model, data, jitter, options.mesh)
    return climbed._replace(model=model, evidence=value, failed_starts=found.failed_starts)


def _with_input_noise(
    found: Found, starts_of: StartsOf, data: Data, jitter: Float[Array, ""], options: Options
) -> Process:
    """The process whose noise follows a second one, of the log of the noise variance, as far as that helps.

    Kersting et al. (2007), with leave-one-out errors: each row's noise is foreseen by the other rows, and the fraction
    of the noise that follows it is learned, so that a second process that says nothing has no part.
    """
    logit = jnp.zeros_like(found.evidence)
    first = eqx.tree_at(lambda m: m.logit_fraction, found.model, logit, is_leaf=lambda node: node is None)
    ones = jnp.ones_like(data.targets)
    variance = jnp.asarray(noise.LOG_SQUARE_VARIANCE, data.targets.dtype)
    of_noise = options._replace(ard=False, max_iterations=_NOISE_STEPS, tolerance=_NOISE_TOLERANCE)
    arrays, static = eqx.partition(first, eqx.is_array)
    rest: list[PyTree] = []

    def one_round(state, _):
        arrays, base_variance = state
        model, rows = eqx.combine(arrays, static), data._replace(base_variance=base_variance)
        errors = standardized_errors(model, posterior(model, rows, jitter, options.mesh), rows)
        relative = model.relative_noise(base_variance)
        responses = noise.log_noise_responses(errors, relative)
        center = jnp.mean(responses)
        logs = Data(data.points, responses - center)
        second = search(starts_of(logs, variance), logs, jitter, of_noise)
        after = process_of(second, logs, jitter, options)
        others = leave_one_out(second.model, after.posterior, logs)
        foreseen = jnp.exp(logs.targets - others.error + jnp.maximum(others.variance - variance, 0) / 2)
        scale = jnp.mean(foreseen)
        rows = data._replace(base_variance=foreseen / scale)
        better = refine(model, rows, jitter, options)
        out_arrays, other = eqx.partition((better, after), eqx.is_array)
        rest[:] = [other]
        return (eqx.filter(better.model, eqx.is_array), rows.base_variance), (out_arrays, -jnp.log(scale))

    (_, base_variance), history = lax.scan(one_round, (arrays, ones), length=_NOISE_ROUNDS)
    arrays, offset = jax.tree.map(lambda a: a[-1], history)
    better, after = eqx.combine(arrays, rest[0])
    rows = data._replace(base_variance=base_variance)
    process = process_of(better._replace(failed_starts=found.failed_starts), rows, jitter, options)
    put = lambda p: (p.log_noise, p.log_noise_offset)
    return eqx.tree_at(put, process, (after, offset), is_leaf=lambda node: node is None)


def exact_optimum(starts: Model, data: Data, jitter: ArrayLike, options: Options) -> Found:
    """The hyperparameters of the greatest exact evidence: isotropic ones, then by column where the options ask for it.

    Of many rows some decide which two optima are climbed on all.
    """
    model_of = _as_vector(_one(starts))[1]
    vectors = eqx.filter_vmap(lambda model: _as_vector(model)[0])(starts)
    failed = jnp.int32(0)
    if _number(starts) > 2 and data.targets.shape[0] > _FEW_ROWS:
        ends = _race(vectors, model_of, some_rows(data, _FEW_ROWS), jitter, options)
        failed, vectors = ends.failed, _best_two(ends)
    ends = _race(vectors, model_of, data, jitter, options)
    best = jnp.argmax(jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values))
    place, value, steps, converged = (end[best] for end in ends)
    model = model_of(place)
    if options.ard and _has_columns(model, data):
        model, value, steps, converged = _by_column(model, value, steps, converged, data, jitter, options)
    result = jnp.where(converged, Result.CONVERGED, Result.STEP_LIMIT)
    result = jnp.where(jnp.isfinite(value), result, Result.NOT_FINITE)
    return Found(model, value, steps, result, failed + ends.failed)


def _race(
    vectors: Float[Array, "s p"],
    model_of: Callable[[Float[Array, " p"]], Model],
    data: Data,
    jitter: ArrayLike,
    options: Options,
) -> "_Ends":
    """Every vector is climbed from by some steps, and by those in contention then to the end."""

    def lap(number, ends: _Ends) -> _Ends:
        last = jnp.where(_in_contention(ends), options.max_iterations, -1)
        limits = jnp.where(number == 0, min(_FIRST_LAP, options.max_iterations), last)
        after = _climb_each(ends.places, limits, model_of, data, jitter, options.tolerance)
        kept = jax.tree.map(lambda new, old: jnp.where(_rows_like(limits >= 0, new), new, old), after, ends)
        return kept._replace(steps=ends.steps + jnp.maximum(after.steps, 0))

    zeros, number = jnp.zeros_like(vectors[:, 0]), vectors.shape[0]
    ends = _Ends(vectors, zeros, jnp.zeros(number, jnp.int32), jnp.zeros(number, bool))
    return lax.fori_loop(0, 2, lap, ends)


class _Ends(NamedTuple):
    """Where several climbs ended.

    Attributes:
        places: [s, p].
        values: [s], the evidence; NaN where there is none, or an absurd one.
        steps: [s].
        converged: [s].
    """

    places: Float[Array, "s p"]
    values: Float[Array, " s"]
    steps: Int[Array, " s"]
    converged: Bool[Array, " s"]

    @property
    def failed(self) -> Int[Array, ""]:
        """How many found nothing."""
        return jnp.sum(jnp.isnan(self.values), dtype=jnp.int32)


def _by_column(model: Model, value, steps, converged, data: Data, jitter: ArrayLike, options: Options):
    """The model with a lengthscale for every column, or the isotropic one it is climbed to from if it gains too little.

    With ard="auto" each further lengthscale must gain log(n) / 2 nats, Schwarz's criterion.
    """
    wide = eqx.tree_at(lambda m: m.kernel, model, model.kernel.by_column(data.points))
    vector, model_of = _as_vector(wide)
    limit = jnp.asarray([options.max_iterations])
    ends = _climb_each(vector[None], limit, model_of, data, jitter, options.tolerance)
    place, wide_value, more_steps, wide_converged = (end[0] for end in ends)
    further = vector.shape[0] - _as_vector(model)[0].shape[0]
    cost = 0.5 * further * jnp.log(data.targets.shape[0]) if options.ard == "auto" else 0.0
    gains = wide_value > jnp.asarray(value + cost)
    choose = lambda new, old: jnp.where(gains, new, old)
    found = model_of(choose(place, vector))
    return found, choose(wide_value, value), steps + more_steps, choose(wide_converged, converged)


def _climb_each(
    vectors: Float[Array, "s p"],
    limits: Int[Array, " s"],
    model_of: Callable[[Float[Array, " p"]], Model],
    data: Data,
    jitter: ArrayLike,
    tolerance: float,
) -> _Ends:
    """Where the exact evidence is climbed to from each vector."""
    evaluate = _exact_objective(vectors[0], model_of, data, jitter)

    def climb(vector, limit):
        end = newton.ascend(evaluate, vector, tolerance=tolerance, max_iterations=limit)
        model = model_of(end.place)
        value = end.value + _penalty(end.place, *_bounds(model, data), data.targets.shape[0])[0]
        return end.place, jnp.where(is_sane(model, value, data), value, jnp.nan), end.steps, end.converged

    return _Ends(*over_runs(climb)(vectors, limits))


def _exact_objective(
    vector: Float[Array, " p"], model_of: Callable[[Float[Array, " p"]], Model], data: Data, jitter: ArrayLike
) -> Callable[[Float[Array, " p"]], newton.Local]:
    """The exact evidence, less what is beyond its bounds, with its gradient and average information."""
    low, high = _bounds(model_of(vector), data)
    n = data.targets.shape[0]

    def on_diagonal(vector):
        model = model_of(vector)
        added = jitter * jnp.mean(model.kernel.diagonal(data.points)) + row_noise(model, data)
        return jnp.broadcast_to(added, n)

    def evaluate(vector: Float[Array, " p"]) -> newton.Local:
        model = model_of(vector)
        terms = gp.exact_terms(noisy_gram(model, data, jitter), data.targets)
        by_diagonal = jax.jacfwd(on_diagonal)(vector)
        gradient = jnp.diagonal(terms.by_gram) @ by_diagonal
        products = by_diagonal * terms.weights[:, None]
        if "kernel" not in model.fixed:
            # The diagonal of the kernel itself is among its derivatives.
            by_kernel, columns = model.kernel.derivatives(data.points, terms.weights, terms.by_gram)
            gradient = gradient.at[: len(by_kernel)].add(by_kernel)
            products = products.at[:, : len(by_kernel)].add(columns)
        information = gp.average_information(terms.inverse, products)
        beyond, slope, bend = _penalty(vector, low, high, n)
        return newton.Local(terms.value - beyond, gradient - slope, information + jnp.diag(bend))

    return evaluate


def _penalty(
    vector: Float[Array, " p"], low: Float[Array, " p"], high: Float[Array, " p"], n: int
) -> tuple[Float[Array, ""], Float[Array, " p"], Float[Array, " p"]]:
    """What hyperparameters beyond their bounds cost, n times the square, with first and second derivatives.

    No row gives more than half a nat for a step of one in the log of a variance: none goes far beyond.
    """
    beyond = jnp.maximum(vector - high, 0) - jnp.maximum(low - vector, 0)
    return n * beyond @ beyond, 2 * n * beyond, jnp.where(beyond != 0, 2 * n, jnp.zeros_like(beyond))


def _bounds(model: Model, data: Data) -> tuple[Float[Array, " p"], Float[Array, " p"]]:
    """The least and the greatest hyperparameters, as vectors."""
    low, high = (lax.stop_gradient(_as_vector(bound)[0]) for bound in model.bounds(data))
    return low, high


def _best_two(ends: _Ends) -> Float[Array, "2 p"]:
    """The best place, and the best of those that differ from it, if there is one."""
    values = jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values)
    best = jnp.argmax(values)
    others = jnp.where(_differs(ends.places, ends.places[best]), values, -jnp.inf)
    return ends.places[jnp.stack([best, jnp.argmax(others)])]


def _in_contention(ends: _Ends) -> Bool[Array, " s"]:
    """The climbs that are not far below the best, without those on the way to where a better one is."""
    values = jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values)
    number = values.shape[0]
    better = (values[None] > values[:, None]) | ((values[None] == values[:, None]) & np.tri(number, k=-1, dtype=bool))
    near = ~jax.vmap(lambda place: _differs(ends.places, place))(ends.places)
    near |= jnp.abs(values[None] - values[:, None]) < _ALIKE
    return (values > jnp.max(values) - _CLOSE) & ~jnp.any(better & near, axis=1) & ~ends.converged


def _differs(places: Float[Array, "s p"], place: Float[Array, " p"]) -> Bool[Array, " s"]:
    return jnp.max(jnp.abs(places - place[None]), axis=1) > _SAME


def _rows_like(condition: Bool[Array, " s"], array: Array) -> Bool[Array, "s ..."]:
    return condition.reshape(-1, *(1,) * (array.ndim - 1))


def best_start(starts: Model, data: Data, jitter: ArrayLike) -> Found:
    """The start of the greatest exact evidence, of those along the leading axis of the arrays.

    One after the other: all at once would hold as many matrices of the rows' covariances.
    """
    arrays, static = eqx.partition(starts, eqx.is_array)
    values = lax.map(lambda start: evidence(eqx.combine(start, static), data, jitter), arrays)
    is_nan = jnp.isnan(values)
    best = jnp.argmax(jnp.where(is_nan, -jnp.inf, values))
    result = jnp.where(is_nan[best], Result.NOT_FINITE, Result.CONVERGED)
    return Found(_one(starts, best), values[best], jnp.int32(0), result, jnp.sum(is_nan, dtype=jnp.int32))


def some_rows(data: Data, number: int) -> Data:
    """At most so many rows, which ones not depending on their order."""
    if data.targets.shape[0] <= number:
        return data
    return take(data, scattered(data.points)[:number])


def with_inducing_points(model: Model, data: Data, options: Options) -> Model:
    """The model with the inducing points that the options ask for: greedy ones, or the first rows, to be trained."""
    if options.inducing == "greedy":
        inducing = greedy_points(model.kernel, some_rows(data, _GREEDY_ROWS).points, options.num_inducing)
    else:
        inducing = take(data.points, jnp.arange(options.num_inducing))
    return eqx.tree_at(lambda m: m.inducing, model, inducing, is_leaf=lambda node: node is None)


def greedy_points(kernel: Kernel, points: Points, num_inducing: int) -> Points:
    """The points that leave the least variance unexplained, chosen one by one: `gp.greedy_rows`."""
    covariances_with = lambda row: kernel(take(points, row[None]), points)[0]
    return take(points, gp.greedy_rows(covariances_with, kernel.diagonal(points), num_inducing))


def jitter_of_try(step: Int[Array, ""], dtype, bound: str) -> Float[Array, ""]:
    """The fraction of the mean variance that is added to the diagonal: a hundred times more at each step.

    Noise is on the exact process's diagonal already: it starts without.
    """
    least = max(1e-8, 10 * float(jnp.finfo(dtype).eps))
    jitter = least * jnp.asarray(100, dtype) ** step
    return jnp.where(step > 0, jitter, 0) if bound == "exact" else jitter


def _descend(model: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The model of the greatest evidence near this one, by L-BFGS or Adam; trained inducing points move."""
    params, fixed = split(model, with_inducing=options.inducing == "trained" and options.bound != "exact")
    low, high = _bounds(model, data)

    def loss(params: PyTree) -> Float[Array, ""]:
        model = eqx.combine(params, fixed)
        beyond = _penalty(_as_vector(model)[0], low, high, data.targets.shape[0])[0]
        return beyond - evidence(model, data, jitter, options.mesh)

    if not jax.tree.leaves(params):
        value = loss(params)
        optimum = Optimum(params, value, jnp.int32(0), jnp.int32(Result.CONVERGED))
    elif options.learning_rate is None:
        optimum = minimize(loss, params, max_iterations=options.max_iterations, gain_tolerance=options.tolerance)
    else:
        optimum = _minimize_by_adam(loss, params, options.learning_rate, options.max_iterations)
    result = jnp.where(jnp.isfinite(optimum.loss), optimum.result, Result.NOT_FINITE)
    return Found(eqx.combine(optimum.params, fixed), -optimum.loss, optimum.steps, result, jnp.int32(0))


def _minimize_by_adam(
    loss: Callable[[Model], Float[Array, ""]], params: Model, learning_rate: float, steps: int
) -> Optimum:
    """So many steps of Adam in GPyTorch's coordinates: hyperparameters are the softplus of what is learned."""
    adam = optax.adam(learning_rate)
    # One vector: for a tree, XLA would compile every update once a leaf.
    raw, unravel = ravel_pytree(_map_hyperparameters(lambda log, least: inverse_softplus(jnp.exp(log) - least), params))

    def model_of(raw: Float[Array, " p"]) -> Model:
        return _map_hyperparameters(lambda value, least: jnp.log(jax.nn.softplus(value) + least), unravel(raw))

    def step(state, _):
        raw, memory = state
        updates, memory = adam.update(jax.grad(lambda raw: loss(model_of(raw)))(raw), memory)
        return (raw + updates, memory), None

    (raw, _), _ = lax.scan(step, (raw, adam.init(raw)), length=steps)
    value = loss(model_of(raw))
    result = jnp.where(jnp.isfinite(value), Result.STEP_LIMIT, Result.NOT_FINITE)
    return Optimum(model_of(raw), value, jnp.int32(steps), result)


def _map_hyperparameters(change: Callable, model: Model) -> Model:
    """Kernel and noise changed by `change(value, least)`, with the least value that GPyTorch allows."""
    kernel = jax.tree.map(lambda value: change(value, 0.0), model.kernel)
    return eqx.tree_at(lambda m: (m.kernel, m.log_noise), model, (kernel, change(model.log_noise, _GPYTORCH_NOISE)))


def inverse_softplus(value: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """The number whose softplus a positive value is."""
    return value + jnp.log(-jnp.expm1(-value))


def _as_vector(model: Model) -> tuple[Float[Array, " p"], Callable[[Float[Array, " p"]], Model]]:
    """What is learned of a model but for inducing points, as a vector, and the model of such a vector."""
    params, fixed = split(model)
    vector, unravel = ravel_pytree(params)
    return vector, lambda vector: eqx.combine(unravel(vector), fixed)


def _has_more_to_learn(model: Model) -> bool:
    return bool(jax.tree.leaves(split(model)[0]))


def _has_columns(model: Model, data: Data) -> bool:
    """Whether the kernel can have more lengthscales than it has."""
    wide = jax.eval_shape(lambda: model.kernel.by_column(data.points))
    return [leaf.shape for leaf in jax.tree.leaves(wide)] != [leaf.shape for leaf in jax.tree.leaves(model.kernel)]


def _one(models: Model, number: ArrayLike = 0) -> Model:
    """One of the models along the leading axis of their arrays."""
    return jax.tree.map(lambda leaf: leaf[number] if eqx.is_array(leaf) else leaf, models)


def _number(models: Model) -> int:
    return next(leaf for leaf in jax.tree.leaves(models) if eqx.is_array(leaf)).shape[0]
