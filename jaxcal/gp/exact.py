"""The greatest exact evidence: damped Newton steps from several initial values.

All are climbed from by some steps; those on the way to different places then go on to the end. Of many rows some decide
which two optima are climbed to on all. A lengthscale for every column is climbed to from the isotropic optimum.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal.functional import gp
from jaxcal.functional._loops import carried
from jaxcal.gp import newton
from jaxcal.gp.model import (
    Data,
    Found,
    Model,
    as_vector,
    bounds,
    is_sane,
    log_likelihood_of_padding,
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

    Of many rows some decide which two optima are climbed to on all. With ard="auto" each further lengthscale must gain
    log(n) / 2 nats, Schwarz's criterion.
    """
    owners, further = _owners(one_of(initial_models), data)
    by_column = bool(options.ard and further)
    if by_column:
        wide = eqx.filter_vmap(lambda model: model.kernel.by_column(data.points))(initial_models)
        initial_models = eqx.tree_at(lambda m: m.kernel, initial_models, wide)
    model_of = as_vector(one_of(initial_models))[1]
    vectors = eqx.filter_vmap(lambda model: as_vector(model)[0])(initial_models)
    tied = _tied(owners) if by_column else jnp.eye(vectors.shape[1], dtype=vectors.dtype)
    climb = partial(_climb_some, model_of=model_of, jitter=jitter)
    failed, are_rivals = None, None
    if number_of(initial_models) > 2 and data.targets.shape[0] > _FEW_ROWS:
        ends = _race_on_few_rows(climb, vectors, tied, data, options)
        failed, (vectors, are_rivals) = ends.failed, _best_two(ends)
    ends = _race(partial(climb, data=data, options=options), vectors, are_rivals, tied, by_column, options)
    first = jax.tree.map(lambda end: end[: len(vectors)], ends)
    best = jnp.argmax(first.heights)
    chosen = jax.tree.map(lambda end: end[best], first)
    if by_column:
        cost = 0.5 * further * jnp.log(jnp.asarray(data.number, vectors.dtype)) if options.ard == "auto" else 0.0
        chosen = _wider_if_it_gains(chosen, jax.tree.map(lambda end: end[-1], ends), jnp.asarray(cost))
    result = jnp.where(chosen.converged, Result.CONVERGED, Result.STEP_LIMIT)
    return Found(
        model=model_of(chosen.places),
        evidence=chosen.values,
        steps=chosen.steps,
        result=jnp.where(jnp.isfinite(chosen.values), result, Result.NOT_FINITE),
        failed_initial_values=first.failed if failed is None else failed,
    )


def _wider_if_it_gains(isotropic: "_Ends", wide: "_Ends", cost: Float[Array, ""]) -> "_Ends":
    """Where the climb by column ended, or the isotropic one that it began at if it gains no more than the cost."""
    gains = wide.values > isotropic.values + cost
    chosen = jax.tree.map(lambda new, old: jnp.where(gains, new, old), wide, isotropic)
    return chosen._replace(steps=isotropic.steps + wide.steps)


def _owners(model: Model, data: Data) -> tuple[Float[Array, " q"], int]:
    """For each hyperparameter with lengthscales by column the number of the one it has without, and how many more."""
    vector, model_of = as_vector(model)
    numbered = model_of(jnp.arange(len(vector), dtype=vector.dtype))
    wide = eqx.tree_at(lambda m: m.kernel, numbered, numbered.kernel.by_column(data.points))
    owners = as_vector(wide)[0]
    return owners, len(owners) - len(vector)


def _tied(owners: Float[Array, " q"]) -> Float[Array, "q q"]:
    """The directions in which hyperparameters of one owner move together, one a column; those that are left are 0."""
    return (owners[:, None] == jnp.arange(len(owners))[None]).astype(owners.dtype)


def _race_on_few_rows(
    climb: Callable[..., "_Ends"], vectors: Float[Array, "s p"], tied: Float[Array, "p p"], data: Data, options: Options
) -> "_Ends":
    """Every vector is climbed from by some steps on the fewest rows, then those to different places on more, nearly."""
    loose = options._replace(tolerance=max(options.tolerance, _FEW_ROWS_TOLERANCE))
    climb = partial(climb, directions=jnp.stack([tied] * len(vectors)), options=loose)
    few_steps = jnp.full(len(vectors), min(_FIRST_LAP, options.max_iterations))
    ends = climb(_Ends.before(vectors), few_steps, data=some_rows(data, _FIRST_ROWS))
    # What so few rows say is no end, and their evidence no match for that of more.
    ends = ends._replace(converged=jnp.zeros_like(ends.converged))
    limits = jnp.where(_goes_on(ends), options.max_iterations, -1)
    unmatched = jnp.where(jnp.isnan(ends.values), ends.values, -jnp.inf)
    return climb(ends._replace(values=unmatched), limits, data=some_rows(data, _FEW_ROWS))


def _race(
    climb: Callable[..., "_Ends"],
    vectors: Float[Array, "s p"],
    are_rivals: Bool[Array, " s"] | None,
    tied: Float[Array, "p p"],
    by_column: bool,
    options: Options,
) -> "_Ends":
    """The vectors that are rivals are climbed from to the end.

    Where nobody knows which are, every vector is climbed from by some steps, and those on the way to different places
    to the end. All in directions that are tied; from the best place then, as a further vector, in all directions if
    `by_column`. One loop for all: the compiled program holds the climb once.
    """
    number, width = vectors.shape
    directions = jnp.stack([tied] * number + [jnp.eye(width, dtype=vectors.dtype)] * by_column)
    ends = _Ends.before(jnp.concatenate([vectors, vectors[:1]]) if by_column else vectors)
    is_further = np.arange(number + by_column) >= number
    known = None if are_rivals is None else jnp.concatenate([are_rivals, jnp.zeros(int(by_column), bool)])
    if known is not None:
        ends = ends._replace(values=jnp.where(known, ends.values, jnp.nan))

    def lap(count, ends: _Ends) -> _Ends:
        values = jnp.where(is_further, -jnp.inf, ends.heights)
        goes_on = _goes_on(ends._replace(values=values)) if known is None else known
        first = jnp.where(is_further, -1, min(_FIRST_LAP, options.max_iterations))
        last, further = (jnp.where(which, options.max_iterations, -1) for which in (goes_on, is_further))
        limits = jnp.where(count == 0, first, jnp.where(count == 1, last, further))
        best = ends.places[jnp.argmax(values)]
        places = jnp.where((is_further & (count == 2))[:, None], best[None], ends.places)
        return climb(ends._replace(places=places), limits, directions=directions)

    return lax.fori_loop(0 if known is None else 1, 2 + by_column, lap, carried(ends))


class _Ends(NamedTuple):
    """Where several climbs ended; where one did, without the axis s.

    Attributes:
        places: [s, p].
        values: [s], the evidence; NaN where there is none, or an absurd one.
        steps: [s].
        converged: [s].
    """

    places: Float[Array, "*s p"]
    values: Float[Array, "*s"]
    steps: Int[Array, "*s"]
    converged: Bool[Array, "*s"]

    @classmethod
    def before(cls, vectors: Float[Array, "s p"]) -> "_Ends":
        """No climb, yet, from these vectors."""
        zeros, number = jnp.zeros_like(vectors[:, 0]), len(vectors)
        return cls(vectors, zeros, jnp.zeros(number, jnp.int32), jnp.zeros(number, bool))

    @property
    def heights(self) -> Float[Array, "*s"]:
        """The values to compare: -inf where there is none."""
        return jnp.where(jnp.isnan(self.values), -jnp.inf, self.values)

    @property
    def failed(self) -> Int[Array, ""]:
        """How many found nothing."""
        return jnp.sum(jnp.isnan(self.values), dtype=jnp.int32)


def _climb_some(
    ends: _Ends,
    limits: Int[Array, " s"],
    *,
    directions: Float[Array, "s p p"],
    model_of: Callable[[Float[Array, " p"]], Model],
    data: Data,
    jitter: ArrayLike,
    options: Options,
) -> _Ends:
    """Where the exact evidence is climbed to from each place, in so many steps along the columns of its directions.

    Where the limit is negative the end stays as it is.
    """
    low, high = bounds(model_of(ends.places[0]), data)
    evaluate = _exact_objective(model_of, low, high, data, jitter)

    def climb(vector, limit, along):
        # Hyperparameters that move together have one penalty.
        shares = 1 / (along @ jnp.sum(along, axis=0))

        def local(moved):
            value, gradient, information = evaluate(vector + along @ moved, shares)
            return newton.Local(value, gradient @ along, along.T @ information @ along)

        end = newton.ascend(local, jnp.zeros_like(vector), tolerance=options.tolerance, max_iterations=limit)
        place = vector + along @ end.place
        value = end.value + penalty(place, low, high, data.number * shares)[0]
        return place, jnp.where(is_sane(model_of(place), value, data), value, jnp.nan), end.steps, end.converged

    after = _Ends(*over_runs(climb, mesh=options.mesh)(ends.places, limits, directions))
    kept = jax.tree.map(lambda new, old: jnp.where(_rows_like(limits >= 0, new), new, old), after, ends)
    return kept._replace(steps=ends.steps + jnp.maximum(after.steps, 0))


def _exact_objective(
    model_of: Callable[[Float[Array, " p"]], Model],
    low: Float[Array, " p"],
    high: Float[Array, " p"],
    data: Data,
    jitter: ArrayLike,
) -> Callable[[Float[Array, " p"], Float[Array, " p"]], newton.Local]:
    """The exact evidence, less a fraction of what is beyond its bounds, with its gradient and average information."""
    n = data.number
    counts = jnp.ones_like(data.targets) if data.included is None else data.included.astype(data.targets.dtype)

    def on_diagonal(vector):
        model = model_of(vector)
        added = jitter * jnp.mean(model.kernel.diagonal(data.points)) + row_noise(model, data)
        return added * counts

    def evaluate(vector: Float[Array, " p"], shares: Float[Array, " p"]) -> newton.Local:
        model = model_of(vector)
        terms = gp.likelihood_terms(noisy_gram(model, data, jitter), data.targets)
        by_diagonal = jax.jacfwd(on_diagonal)(vector)
        gradient = jnp.diagonal(terms.by_gram) @ by_diagonal
        products = by_diagonal * terms.weights[:, None]
        if "kernel" not in model.fixed:
            # The diagonal of the kernel itself is among its derivatives.
            by_gram = terms.by_gram if data.included is None else terms.by_gram * counts[:, None] * counts[None]
            by_kernel, columns = model.kernel.derivatives(data.points, terms.weights, by_gram)
            gradient = gradient.at[: len(by_kernel)].add(by_kernel)
            products = products.at[:, : len(by_kernel)].add(columns * counts[:, None])
        information = gp.average_information(terms.inverse, products)
        beyond, steepness, bend = penalty(vector, low, high, n * shares)
        return newton.Local(
            terms.value - log_likelihood_of_padding(data) - beyond, gradient - steepness, information + jnp.diag(bend)
        )

    return evaluate


def _best_two(ends: _Ends) -> tuple[Float[Array, "2 p"], Bool[Array, "2"]]:
    """The best place, and the best of those that differ from it; and whether they may be the best of more rows."""
    values = ends.heights
    best = jnp.argmax(values)
    others = jnp.where(_differs(ends.places, ends.places[best]), values, -jnp.inf)
    two = jnp.stack([best, jnp.argmax(others)])
    return ends.places[two], jnp.stack([values[best], jnp.max(others)]) >= values[best] - _RIVAL


def _goes_on(ends: _Ends) -> Bool[Array, " s"]:
    """The climbs that have not ended, without those on the way to where a better one is."""
    values, number = ends.heights, ends.values.shape[0]
    better = (values[None] > values[:, None]) | ((values[None] == values[:, None]) & np.tri(number, k=-1, dtype=bool))
    near = ~jax.vmap(lambda place: _differs(ends.places, place))(ends.places)
    near |= jnp.abs(values[None] - values[:, None]) < _ALIKE
    return jnp.isfinite(values) & ~jnp.any(better & near, axis=1) & ~ends.converged


def _differs(places: Float[Array, "s p"], place: Float[Array, " p"]) -> Bool[Array, " s"]:
    return jnp.max(jnp.abs(places - place[None]), axis=1) > _SAME


def _rows_like(condition: Bool[Array, " s"], array: Array) -> Bool[Array, "s ..."]:
    return condition.reshape(-1, *(1,) * (array.ndim - 1))
