"""The greatest exact evidence: damped Newton steps from several initial values.

All are climbed from by some steps; those on the way to different places then go on to the end. Of many rows some decide
which two optima are climbed to on all. A lengthscale for every column is climbed to from the isotropic optimum.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal.functional import gp
from jaxcal.gp import newton
from jaxcal.gp.model import (
    Data,
    Found,
    Model,
    as_vector,
    bounds,
    is_sane,
    noisy_gram,
    number_of,
    one_of,
    penalty,
    row_noise,
    some_rows,
)
from jaxcal.gp.options import Options
from jaxcal.optimize import Result, over_runs

# Of more rows than this, so many decide which optima are climbed to, as far as to this tolerance: the best, and another
# one no further below than this.
_FEW_ROWS, _FEW_ROWS_TOLERANCE, _RIVAL = 500, 0.1, 10.0
# Every initial value is climbed from by so many steps, on so many rows; to the end go all but those less than so many
# nats from a better one: they are on the way to the same place. None is left for being low: a plateau may lie before
# the highest optimum.
_FIRST_LAP, _FIRST_ROWS, _ALIKE = 8, 250, 0.2
# Two optima are one if no log hyperparameter differs by more.
_SAME = 0.3


def exact_optimum(initial_models: Model, data: Data, jitter: ArrayLike, options: Options) -> Found:
    """The hyperparameters of the greatest exact evidence: isotropic ones, then by column where the options ask for it.

    Of many rows some decide which two optima are climbed on all.
    """
    model_of = as_vector(one_of(initial_models))[1]
    vectors = eqx.filter_vmap(lambda model: as_vector(model)[0])(initial_models)
    first_rows = some_rows(data, _FIRST_ROWS) if number_of(initial_models) > 2 else data
    if first_rows is not data and data.targets.shape[0] > _FEW_ROWS:
        loose = options._replace(tolerance=max(options.tolerance, _FEW_ROWS_TOLERANCE))
        ends = _race(vectors, model_of, first_rows, some_rows(data, _FEW_ROWS), jitter, loose)
        failed, (vectors, is_rival) = ends.failed, _best_two(ends)
        limits = jnp.where(is_rival, options.max_iterations, -1)
        ends = _climb_each(vectors, limits, model_of, data, jitter, options.tolerance)
    else:
        ends = _race(vectors, model_of, first_rows, data, jitter, options)
        failed = ends.failed
    best = jnp.argmax(jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values))
    place, value, steps, converged = (end[best] for end in ends)
    model = model_of(place)
    if options.ard and _has_columns(model, data):
        model, value, steps, converged = _by_column(model, value, steps, converged, data, jitter, options)
    result = jnp.where(converged, Result.CONVERGED, Result.STEP_LIMIT)
    result = jnp.where(jnp.isfinite(value), result, Result.NOT_FINITE)
    return Found(model=model, evidence=value, steps=steps, result=result, failed_initial_values=failed)


def _race(
    vectors: Float[Array, "s p"],
    model_of: Callable[[Float[Array, " p"]], Model],
    first_rows: Data,
    data: Data,
    jitter: ArrayLike,
    options: Options,
) -> "_Ends":
    """Every vector is climbed from by some steps on the first rows, those on the way to different places to the end."""

    def lap(ends: _Ends, limits: Int[Array, " s"], rows: Data) -> _Ends:
        after = _climb_each(ends.places, limits, model_of, rows, jitter, options.tolerance)
        kept = jax.tree.map(lambda new, old: jnp.where(_rows_like(limits >= 0, new), new, old), after, ends)
        return kept._replace(steps=ends.steps + jnp.maximum(after.steps, 0))

    zeros, number = jnp.zeros_like(vectors[:, 0]), vectors.shape[0]
    ends = _Ends(vectors, zeros, jnp.zeros(number, jnp.int32), jnp.zeros(number, bool))
    few_steps = jnp.full(number, min(_FIRST_LAP, options.max_iterations))
    to_the_end = lambda ends: jnp.where(_goes_on(ends), options.max_iterations, -1)
    if first_rows is data:
        # In a loop both laps are compiled once.
        limits = lambda number, ends: jnp.where(number == 0, few_steps, to_the_end(ends))
        return lax.fori_loop(0, 2, lambda number, ends: lap(ends, limits(number, ends), data), ends)
    # What few rows say is no end, and their evidence no match for that of all.
    ends = lap(ends, few_steps, first_rows)._replace(converged=jnp.zeros(number, bool))
    limits, unmatched = to_the_end(ends), jnp.where(jnp.isnan(ends.values), ends.values, -jnp.inf)
    return lap(ends._replace(values=unmatched), limits, data)


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
    vector, model_of = as_vector(wide)
    limit = jnp.asarray([options.max_iterations])
    ends = _climb_each(vector[None], limit, model_of, data, jitter, options.tolerance)
    place, wide_value, more_steps, wide_converged = (end[0] for end in ends)
    further = vector.shape[0] - as_vector(model)[0].shape[0]
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
    low, high = bounds(model_of(vectors[0]), data)
    evaluate = _exact_objective(model_of, low, high, data, jitter)

    def climb(vector, limit):
        end = newton.ascend(evaluate, vector, tolerance=tolerance, max_iterations=limit)
        model = model_of(end.place)
        value = end.value + penalty(end.place, low, high, data.targets.shape[0])[0]
        return end.place, jnp.where(is_sane(model, value, data), value, jnp.nan), end.steps, end.converged

    return _Ends(*over_runs(climb)(vectors, limits))


def _exact_objective(
    model_of: Callable[[Float[Array, " p"]], Model],
    low: Float[Array, " p"],
    high: Float[Array, " p"],
    data: Data,
    jitter: ArrayLike,
) -> Callable[[Float[Array, " p"]], newton.Local]:
    """The exact evidence, less what is beyond its bounds, with its gradient and average information."""
    n = data.targets.shape[0]

    def on_diagonal(vector):
        model = model_of(vector)
        added = jitter * jnp.mean(model.kernel.diagonal(data.points)) + row_noise(model, data)
        return jnp.broadcast_to(added, n)

    def evaluate(vector: Float[Array, " p"]) -> newton.Local:
        model = model_of(vector)
        terms = gp.likelihood_terms(noisy_gram(model, data, jitter), data.targets)
        by_diagonal = jax.jacfwd(on_diagonal)(vector)
        gradient = jnp.diagonal(terms.by_gram) @ by_diagonal
        products = by_diagonal * terms.weights[:, None]
        if "kernel" not in model.fixed:
            # The diagonal of the kernel itself is among its derivatives.
            by_kernel, columns = model.kernel.derivatives(data.points, terms.weights, terms.by_gram)
            gradient = gradient.at[: len(by_kernel)].add(by_kernel)
            products = products.at[:, : len(by_kernel)].add(columns)
        information = gp.average_information(terms.inverse, products)
        beyond, steepness, bend = penalty(vector, low, high, n)
        return newton.Local(terms.value - beyond, gradient - steepness, information + jnp.diag(bend))

    return evaluate


def _best_two(ends: _Ends) -> tuple[Float[Array, "2 p"], Bool[Array, "2"]]:
    """The best place, and the best of those that differ from it; and whether they may be the best of more rows."""
    values = jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values)
    best = jnp.argmax(values)
    others = jnp.where(_differs(ends.places, ends.places[best]), values, -jnp.inf)
    two = jnp.stack([best, jnp.argmax(others)])
    return ends.places[two], jnp.stack([values[best], jnp.max(others)]) >= values[best] - _RIVAL


def _goes_on(ends: _Ends) -> Bool[Array, " s"]:
    """The climbs that have not ended, without those on the way to where a better one is."""
    values = jnp.where(jnp.isnan(ends.values), -jnp.inf, ends.values)
    number = values.shape[0]
    better = (values[None] > values[:, None]) | ((values[None] == values[:, None]) & np.tri(number, k=-1, dtype=bool))
    near = ~jax.vmap(lambda place: _differs(ends.places, place))(ends.places)
    near |= jnp.abs(values[None] - values[:, None]) < _ALIKE
    return jnp.isfinite(values) & ~jnp.any(better & near, axis=1) & ~ends.converged


def _differs(places: Float[Array, "s p"], place: Float[Array, " p"]) -> Bool[Array, " s"]:
    return jnp.max(jnp.abs(places - place[None]), axis=1) > _SAME


def _rows_like(condition: Bool[Array, " s"], array: Array) -> Bool[Array, "s ..."]:
    return condition.reshape(-1, *(1,) * (array.ndim - 1))


def _has_columns(model: Model, data: Data) -> bool:
    """Whether the kernel can have more lengthscales than it has."""
    wide = jax.eval_shape(lambda: model.kernel.by_column(data.points))
    return [leaf.shape for leaf in jax.tree.leaves(wide)] != [leaf.shape for leaf in jax.tree.leaves(model.kernel)]
