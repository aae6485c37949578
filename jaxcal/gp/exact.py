"""The greatest exact evidence: a race of damped Newton steps from several initial values, on few rows and on all.

If there are many rows, some of them decide which two optima the ascents on all rows go to. They also decide where
further ascents by column begin. If there are very many known rows, the race is on 1000 of them. A few steps on more and
more rows follow.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal._numpy import AnyArray, namespace
from jaxcal._programs import exact_products
from jaxcal.functional import gp
from jaxcal.gp import model as models
from jaxcal.gp import race
from jaxcal.gp.model import Data, Model, SearchResult, as_vector, number_of, one_of
from jaxcal.gp.newton import Floats, Local
from jaxcal.gp.protocols import Inference
from jaxcal.optimize import Result

# Above 512 rows, 250 of them decide which optima the ascents on all rows go to. The number 512 is a multiple of 16,
# like every number of rows that `gp.padding` makes.
_MANY_ROWS, FEW_ROWS = 512, 250
# Ascents on the few rows end at the tolerance 0.1. The ascents on all rows go to the best optimum, and to a second one
# that is less than 10 nats below it. From both, ascents by column on the few rows take at most 40 steps, to the loose
# tolerance.
_FEW_ROWS_TOLERANCE, _RIVAL, _FEW_ROWS_STEPS = 0.1, 10.0, 40
# A search on more than 2000 known rows begins with 1000 of them. Each rung has about 2.24 times the rows of the rung
# before, and takes at most five steps. The gain of more steps changes no prediction.
LADDER_ROWS, _FIRST_RUNG, _GROWTH, _RUNG_STEPS = 2000, 1000, 2.24, 5
# The first tolerance of isotropic ascents that ascents by column follow.
_LOOSE = 0.5
# `race.Field.hope` for ascents on many rows that begin at the ends of ascents on few rows.
_HOPE_OF_MANY = 3.0


class Start(NamedTuple):
    """The beginning of a search for the greatest exact evidence.

    Attributes:
        models: the initial models along a leading axis, with lengthscales by column if the inference asks for them.
        vectors: the learned parameters of these models [a, p].
        low, high: the bounds [p].
        tied: the directions in which isotropic ascents move, one a column [p, p]. None if no ascents by column follow.
        cost: the gain, in nats, that an ascent by column must reach.
        number: the number of rows.
    """

    models: Model
    vectors: Float[Floats, "a p"]
    low: Float[Floats, " p"]
    high: Float[Floats, " p"]
    tied: Float[Floats, "p p"] | None
    cost: Float[Floats, ""]
    number: int | Int[Floats, ""]

    @classmethod
    def of(cls, initial_models: Model, data: Data, inference: Inference) -> "Start":
        """The start from initial models, which are isotropic.

        With ard="auto" each further lengthscale must gain log(n) / 2 nats, Schwarz's criterion.
        """
        xp, dtype = namespace(data.targets), data.targets.dtype
        owners, further = _owners(one_of(initial_models), data)
        tied, cost = None, xp.zeros((), dtype)
        if inference.ard and further:
            wide = initial_models.kernel.by_column(data.points)
            initial_models = eqx.tree_at(lambda m: m.kernel, initial_models, wide)
            tied = _tied(owners)
            if inference.ard == "auto":
                cost = 0.5 * further * xp.log(xp.asarray(data.number, dtype))
        vectors = xp.stack([as_vector(one_of(initial_models, k))[0] for k in range(number_of(initial_models))])
        low, high = models.bounds(one_of(initial_models), data)
        return cls(models=initial_models, vectors=vectors, low=low, high=high, tied=tied, cost=cost, number=data.number)

    def in_float64(self) -> "Start":
        """The same, for a search by NumPy."""
        wide = lambda array: None if array is None else np.asarray(array, float)
        names = ("vectors", "low", "high", "tied", "cost")
        return self._replace(**{name: wide(getattr(self, name)) for name in names})

    def of_part(self, fraction: float) -> "Start":
        """The same for a part of the rows: the cost and the number of rows are multiplied by their fraction."""
        if fraction == 1:
            return self
        return self._replace(cost=self.cost * fraction, number=np.maximum(np.round(self.number * fraction), 1))

    def few_decide(self, number: int) -> bool:
        """Whether a few of `number` rows decide which optima the ascents on all rows go to."""
        return self.vectors.shape[0] > 2 and number > _MANY_ROWS


def exact_optimum(initial_models: Model, data: Data, jitter: ArrayLike, inference: Inference) -> SearchResult:
    """The hyperparameters of the greatest exact evidence: isotropic ones, then by column if asked for.

    If there are many rows, some of them decide which two optima the ascents on all rows go to.
    """
    start = Start.of(initial_models, data, inference)
    model_of = as_vector(one_of(start.models))[1]
    on = lambda rows: race.in_program(exact_objective(model_of, rows, jitter))
    few = on(models.some_rows(data, FEW_ROWS)) if start.few_decide(data.targets.shape[0]) else None
    best = optimum(on(data), few, start, inference, on_host=False)
    return best.as_found(model_of(best.place))


class EvidenceOptimum(NamedTuple):
    """The best place that was found.

    Attributes:
        place: [p].
        value: the evidence at the place; not finite if there is none.
        steps: the number of steps of the ascents to the place, on all rows.
        converged: whether the ascent ended by the tolerance.
        directions: the directions of the ascent, one a column [p, p].
        failed_initial_values: how many initial vectors had no value.
    """

    place: Float[Floats, " p"]
    value: Float[Floats, ""]
    steps: Int[Floats, ""]
    converged: Bool[Floats, ""]
    directions: Float[Floats, "p p"]
    failed_initial_values: Int[Floats, ""]

    def as_found(self, model: Model) -> SearchResult:
        """The result of the search, with the model at the place."""
        xp = namespace(self.value)
        result = xp.where(self.converged, Result.CONVERGED, Result.STEP_LIMIT)
        return SearchResult(
            model=model,
            evidence=self.value,
            steps=self.steps,
            result=xp.where(xp.isfinite(self.value), result, Result.NOT_FINITE).astype(np.int32),
            failed_initial_values=self.failed_initial_values,
        )


def optimum(
    objective: race.Objectives, few: race.Objectives | None, start: Start, inference: Inference, *, on_host: bool
) -> EvidenceOptimum:
    """The greatest value of the objective, and its place.

    Args:
        objective: the objective on all rows.
        few: the objective on few rows, which decide which optima the ascents on all rows go to. None if all rows
            decide.
        start: where to begin; of NumPy's arrays on the host.
        inference: gives the tolerance and the most steps.
        on_host: as of `optimize.iterate`.
    """
    vectors, tied, tolerance, most = start.vectors, start.tied, inference.tolerance, inference.max_iterations
    xp = np if on_host else jnp
    loose = tolerance if tied is None else xp.maximum(tolerance, _LOOSE)
    # Ascents by column begin at the best isotropic ends, one if few rows chose the optima and else two, and at an
    # initial vector.
    column_starts = vectors[np.zeros(0 if tied is None else 3 if few is None else 2, int)]
    field = race.Field(
        isotropic=vectors,
        runs=xp.ones(len(vectors), bool),
        tied=xp.asarray(np.eye(vectors.shape[1]), vectors.dtype) if tied is None else tied,
        column_starts=column_starts,
        runs_by_column=xp.ones(len(column_starts), bool),
        tolerances=(loose, tolerance, tolerance),
        limits=(most, most),
        cost=start.cost,
        low=start.low,
        high=start.high,
        number=start.number,
        num_seeded=2 if few is None else 1,
        within=_RIVAL,
        hope=race.HOPE if few is None else _HOPE_OF_MANY,
    )
    failed = None
    if few is not None:
        field, failed = _decided_by_few(few, field, on_host=on_host)
    number = field.isotropic.shape[0]
    ends = race.run(objective, field, on_host=on_host)
    failed = xp.sum(~xp.isfinite(ends.values[:number])) if failed is None else failed
    heights = xp.where(xp.arange(len(ends.values)) < number, ends.values + field.cost, ends.values)
    best = xp.argmax(heights)
    isotropic = xp.argmax(heights[:number])
    is_wide = best >= number
    directions = xp.where(is_wide, np.eye(vectors.shape[1], dtype=vectors.dtype), field.tied)
    beyond = race.penalty_of(field, ends.places[best][None], directions[None])[0][0]
    return EvidenceOptimum(
        place=ends.places[best],
        value=ends.values[best] + beyond,
        steps=ends.steps[best] + xp.where(is_wide, ends.steps[isotropic], 0),
        converged=ends.converged[best],
        directions=directions,
        failed_initial_values=xp.asarray(failed, np.int32),
    )


def climbed(
    rungs: Sequence[race.Objectives], best: EvidenceOptimum, start: Start, inference: Inference, n: int
) -> EvidenceOptimum:
    """The optimum of all n rows: from the optimum of the first rung, by few steps on more and more rows.

    Args:
        rungs: the objectives on parts of the rows, whose sizes `rung_sizes` gives.
        best: the optimum of the first rung.
        start: where its search began; of NumPy's arrays.
        inference: gives the tolerance and the most steps.
        n: how many rows there are, with padding.
    """
    limit = np.minimum(inference.max_iterations, _RUNG_STEPS)
    for objective, size in zip(rungs[1:], rung_sizes(n)[1:], strict=True):
        best = ended(objective, best, start.of_part(size / n), inference.tolerance, limit)
    return best


def rung_sizes(n: int) -> list[int]:
    """The numbers of rows of the rungs of a search on known rows; a single rung of all rows if they are not many."""
    if n <= LADDER_ROWS:
        return [n]
    number = max(1, round(math.log(n / _FIRST_RUNG) / math.log(_GROWTH)))
    return np.geomspace(_FIRST_RUNG, n, number + 1).round().astype(int).tolist()


def ended(
    objective: race.Objectives, best: EvidenceOptimum, start: Start, tolerance: ArrayLike, limit: int | Int[Floats, ""]
) -> EvidenceOptimum:
    """The optimum near the optimum of a less exact objective, or of fewer rows; on the host."""
    place = best.place[None]
    field = race.Field(
        isotropic=place,
        runs=np.ones(1, bool),
        tied=best.directions,
        column_starts=place[:0],
        runs_by_column=np.zeros(0, bool),
        tolerances=(tolerance, tolerance, None),
        limits=(limit, limit),
        cost=np.zeros(()),
        low=start.low,
        high=start.high,
        number=start.number,
    )
    place, value, steps, converged = (each[0] for each in race.run(objective, field, on_host=True))
    return best._replace(place=place, value=value, steps=best.steps + steps, converged=converged)


def _decided_by_few(
    objective: race.Objectives, field: race.Field, *, on_host: bool
) -> tuple[race.Field, Int[Floats, ""]]:
    """The field on all rows, which begins at the best two optima of few rows and at the ends by column from both."""
    xp = np if on_host else jnp
    tolerance, limit = xp.maximum(field.tolerances[1], _FEW_ROWS_TOLERANCE), field.limits[0]
    number, has_columns = field.isotropic.shape[0], field.column_starts.shape[0] > 0
    ends = race.run(
        objective,
        field._replace(
            column_starts=field.isotropic[np.zeros(3 * has_columns, int)],
            runs_by_column=xp.ones(3 * has_columns, bool),
            num_seeded=2,
            tolerances=(tolerance, xp.maximum(tolerance, _LOOSE), None),
            limits=(limit, xp.minimum(limit, _FEW_ROWS_STEPS)),
            number=xp.minimum(field.number, FEW_ROWS),
            hope=race.HOPE,
        ),
        on_host=on_host,
    )
    isotropic, runs = race.best_two(xp, ends.places[:number], ends.values[:number], _RIVAL)
    places, values = ends.places[number:], ends.values[number:]
    alone = ~race.follow(xp, places, values, xp.zeros_like(values), np.ones((len(values), len(values)), bool))
    return field._replace(
        isotropic=isotropic,
        runs=runs,
        column_starts=xp.concatenate([field.column_starts[:1], places]),
        runs_by_column=xp.concatenate([field.runs_by_column[:1], xp.isfinite(values) & alone]),
    ), xp.sum(~xp.isfinite(ends.values[:number]))


def _owners(model: Model, data: Data) -> tuple[Float[AnyArray, " q"], int]:
    """For each hyperparameter by column the number of its isotropic one, and how many more there are by column."""
    vector, model_of = as_vector(model)
    numbered = model_of(namespace(vector).arange(len(vector), dtype=vector.dtype))
    wide = eqx.tree_at(lambda m: m.kernel, numbered, numbered.kernel.by_column(data.points))
    owners = as_vector(wide)[0]
    return owners, len(owners) - len(vector)


def _tied(owners: Float[AnyArray, " q"]) -> Float[AnyArray, "q q"]:
    """The directions in which hyperparameters of one owner move together, one a column; further columns are 0."""
    return (owners[:, None] == np.arange(len(owners))[None]).astype(owners.dtype)


def exact_objective(
    model_of: Callable[[Float[Array, " p"]], Model], data: Data, jitter: ArrayLike
) -> Callable[[Float[Array, " p"]], Local]:
    """The exact evidence, with its gradient and average information."""
    counts = jnp.ones_like(data.targets) if data.included is None else data.included.astype(data.targets.dtype)

    def on_diagonal(vector: Float[Array, " p"]) -> Float[Array, " n"]:
        model = model_of(vector)
        added = jitter * models.mean_variance(model.kernel, data.points, data.included) + models.row_noise(model, data)
        return added * counts

    @exact_products
    def evaluate(vector: Float[Array, " p"]) -> Local:
        model = model_of(vector)
        terms = gp.likelihood_terms(models.noisy_gram(model, data, jitter), data.targets)
        jacobian = jax.jacfwd(on_diagonal)(vector)
        # The chain rule through the diagonal: d log p / d x_i = sum_k (d log p / d G_kk) (d G_kk / d x_i).
        gradient = jnp.diagonal(terms.grad_gram) @ jacobian
        products = jacobian * terms.weights[:, None]  # the columns G_i a, with a = G^-1 y
        if "kernel" not in model.fixed:
            # `on_diagonal` has jitter and noise alone: the kernel's own diagonal is in its derivatives.
            grad_gram = terms.grad_gram if data.included is None else terms.grad_gram * counts[:, None] * counts[None]
            grad_kernel, columns = model.kernel.derivatives(data.points, terms.weights, grad_gram)
            gradient = gradient.at[: len(grad_kernel)].add(grad_kernel)
            products = products.at[:, : len(grad_kernel)].add(columns * counts[:, None])
        information = gp.average_information(terms.inverse, products)
        value = terms.value - models.log_likelihood_of_padding(data)
        return Local(value, gradient, information, models.is_sane(model, value, data))

    return evaluate
