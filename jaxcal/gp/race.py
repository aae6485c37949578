"""A race of ascents to the greatest evidence: isotropic ascents, then ascents with a lengthscale for every column.

All ascents are stacked along one axis, and those that still run are active. Every eight rounds the race stops some
ascents: they are on the way to the place of a better one, or cannot reach the best one any more. When the isotropic
ascents have ended, ascents by column begin at the best of their ends and at given places. One round of all ascents is
one function of NumPy's or of JAX's arrays: see `optimize.iterate`.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxcal.functional._loops import carried
from jaxcal.gp import newton
from jaxcal.gp.model import penalty
from jaxcal.gp.newton import Floats, Local
from jaxcal.optimize.iterate import iterate

# The number of rounds between two comparisons of the ascents.
_LAP = 8
# The lower one of two ascents is on its way to the place of the other in two cases. Either no log hyperparameter
# differs by more than `SAME`. Or it is lower by less than `ALIKE` nats, and its predicted gain is also less.
ALIKE, SAME = 0.2, 0.3
# `Field.hope` for ascents on few rows, which are cheap, and for ascents from places near their end.
HOPE = 30.0
# If the best ascent by column gains more than its cost by this much, the best isotropic ascent need not be ended.
_CLEAR = 5.0
# The order of the phases: isotropic ascents, ascents by column, the best isotropic ascent to its end, none.
_ISOTROPIC, _BY_COLUMN, _LAST, _OVER = range(4)

# `Objective` is evaluated at one vector, `Objectives` at the active [s] ones of several vectors [s, p].
Objective = Callable[[Float[Floats, " p"]], Local]
Objectives = Callable[[Float[Floats, "s p"], Bool[Floats, " s"]], Local]


class Field(NamedTuple):
    """The ascents that run, and their limits.

    Attributes:
        isotropic: where the isotropic ascents begin [a, p].
        runs: which of the isotropic ascents run [a].
        tied: the directions in which isotropic ascents move, one a column [p, p].
        column_starts: where ascents by column begin [b, p]. The first `num_seeded` begin where isotropic ascents ended.
        runs_by_column: which of the ascents by column run [b].
        tolerances: of isotropic ascents at first, of ascents by column, and of the best isotropic ascent at last. The
            last is None if that ascent need not be ended.
        limits: the most steps of isotropic ascents, and of ascents by column.
        cost: the gain that an ascent by column must reach.
        low, high: the bounds [p]. A hyperparameter beyond them costs `number` times the squared excess. Hyperparameters
            that move together divide this cost among themselves.
        number: the number of rows.
        num_seeded: how many ascents by column begin where the best isotropic ascents ended, one or two.
        within: by how much the second of these isotropic ends may be below the best.
        hope: an ascent is stopped if its value plus `hope` times its predicted gain is below the best value.
    """

    isotropic: Float[Floats, "a p"]
    runs: Bool[Floats, " a"]
    tied: Float[Floats, "p p"]
    column_starts: Float[Floats, "b p"]
    runs_by_column: Bool[Floats, " b"]
    tolerances: tuple
    limits: tuple
    cost: Float[Floats, ""]
    low: Float[Floats, " p"]
    high: Float[Floats, " p"]
    number: int | Int[Floats, ""]
    num_seeded: int = 1
    within: float = np.inf
    hope: float = HOPE

    @property
    def is_isotropic(self) -> Bool[np.ndarray, " s"]:
        """Which of all ascents are isotropic: the first ones."""
        number = self.isotropic.shape[0]
        return np.arange(number + self.column_starts.shape[0]) < number


class Ends(NamedTuple):
    """The ends of several ascents along the axis s, or of one ascent, without this axis.

    Attributes:
        places: [s, p].
        values: the objective [s]; -inf if it has no value.
        steps: [s], the number of evaluations after the first one.
        converged: [s].
    """

    places: Float[Floats, "*s p"]
    values: Float[Floats, "*s"]
    steps: Int[Floats, "*s"]
    converged: Bool[Floats, "*s"]


class _Race(NamedTuple):
    """The state of a race.

    Attributes:
        ascents: the ascents along the directions, relative to their starts.
        starts: [s, p].
        active: which ascents still run [s].
        rounds: the number of rounds since the phase began.
        phase: the current phase, `_ISOTROPIC` to `_OVER`.
    """

    ascents: newton.Ascents
    starts: Float[Floats, "s p"]
    active: Bool[Floats, " s"]
    rounds: Int[Floats, ""]
    phase: Int[Floats, ""]


def one_by_one(objective: Objective) -> Objectives:
    """Several objectives that the host evaluates one by one, for active ascents alone."""

    def evaluate(vectors: Float[np.ndarray, "s p"], active: Bool[np.ndarray, " s"]) -> Local:
        s, p = vectors.shape
        local = Local(np.zeros(s), np.zeros((s, p)), np.zeros((s, p, p)), np.zeros(s, bool))
        for k in np.flatnonzero(active):
            for whole, part in zip(local, objective(vectors[k]), strict=True):
                whole[k] = part
        return local

    return evaluate


def in_program(objective: Objective) -> Objectives:
    """Several objectives as a part of a program: on a CPU for active ascents alone, elsewhere for all at once."""

    def evaluate(vectors: Float[Array, "s p"], active: Bool[Array, " s"]) -> Local:
        everywhere = lambda vectors, _: jax.vmap(objective)(vectors)
        return lax.platform_dependent(vectors, active, cpu=partial(_one_after_another, objective), default=everywhere)

    return evaluate


def _one_after_another(objective: Objective, vectors: Float[Array, "s p"], active: Bool[Array, " s"]) -> Local:
    order, (s, p) = jnp.argsort(~active), vectors.shape
    zeros = lambda *shape: jnp.zeros(shape, vectors.dtype)
    nothing = Local(zeros(s), zeros(s, p), zeros(s, p, p), jnp.zeros(s, bool))

    def add(k: Int[Array, ""], local: Local) -> Local:
        row = order[k]
        return jax.tree.map(lambda whole, part: whole.at[row].set(part), local, objective(vectors[row]))

    return lax.fori_loop(0, active.sum(), add, carried(nothing))


def run(objectives: Objectives, field: Field, *, on_host: bool) -> Ends:
    """The ends of all ascents of a field, the isotropic ascents first.

    Args:
        objectives: a result of `one_by_one` or of `in_program`.
        field: the ascents that run.
        on_host: as of `optimize.iterate`. The field has NumPy's arrays then.
    """
    xp = np if on_host else jnp
    number = field.isotropic.shape[0]
    starts = xp.concatenate([field.isotropic, field.column_starts])
    eye = np.eye(starts.shape[1], dtype=starts.dtype)
    # Isotropic ascents move several hyperparameters together, ascents by column move each alone.
    directions = xp.stack([field.tied] * number + [xp.asarray(eye)] * field.column_starts.shape[0])
    directions = directions if on_host else carried(directions)
    race = _Race(
        ascents=newton.Ascents.at(xp, xp.zeros_like(starts)),
        starts=starts,
        active=xp.concatenate([field.runs, xp.zeros_like(field.runs_by_column)]),
        rounds=xp.zeros((), np.int32),
        phase=xp.zeros((), np.int32),
    )
    end = iterate(
        partial(_evaluated, objectives, field, directions),
        partial(_advance, field=field, directions=directions),
        race,
        lambda race: race.active.any(),
        on_host=on_host,
    )
    return Ends(_places(end, directions), _heights(xp, end.ascents), xp.maximum(end.ascents.steps, 0), end.ascents.done)


def penalty_of(
    field: Field, vectors: Float[Floats, "s p"], directions: Float[Floats, "s p p"]
) -> tuple[Float[Floats, " s"], Float[Floats, "s p"], Float[Floats, "s p"]]:
    """The cost of vectors beyond the bounds, `model.penalty`; hyperparameters that move together divide it."""
    # 1 / k for each of k hyperparameters that move together.
    together = 1 / (directions * directions.sum(1)[:, None]).sum(-1)
    return penalty(vectors, field.low[None], field.high[None], field.number * together)


def _evaluated(objectives: Objectives, field: Field, directions: Float[Floats, "s p p"], race: _Race) -> Local:
    """The objective less the penalty at the places that the active ascents ask for, along their directions."""
    vectors = race.starts + _along(directions, race.ascents.asked)
    local = objectives(vectors, race.active)
    cost, steepness, bend = penalty_of(field, vectors, directions)
    # With vectors x = start + D z: the gradient is D' g, the information D' H D.
    gradient = local.gradient - steepness
    information = local.information + bend[:, None] * np.eye(bend.shape[1], dtype=bend.dtype)[None]
    return local._replace(
        value=local.value - cost,
        gradient=(gradient[:, None] @ directions)[:, 0],
        information=directions.swapaxes(1, 2) @ information @ directions,
    )


def _advance(xp: ModuleType, race: _Race, local: Local, *, field: Field, directions: Float[Floats, "s p p"]) -> _Race:
    """One round of all active ascents; the next phase begins when no ascent of a phase is active any more."""
    is_isotropic = field.is_isotropic
    first, wide, last = (xp.asarray(0 if each is None else each, race.starts.dtype) for each in field.tolerances)
    tolerance = xp.where(is_isotropic, xp.where(race.phase == _LAST, last, first), wide)
    limit = xp.where(is_isotropic, *field.limits)
    ascents = newton.advance(xp, race.ascents, local, race.active, tolerance)
    heights, rounds = _heights(xp, ascents), race.rounds + 1
    goes_on = race.active & ~ascents.done & (ascents.steps < limit) & xp.isfinite(ascents.local.value)
    race = race._replace(ascents=ascents, rounds=rounds, active=goes_on)
    kept = _worth(xp, race, heights, field, directions)
    race = race._replace(active=goes_on & (kept | (rounds % _LAP != 0)))
    if not field.column_starts.shape[0]:
        return race
    return _next_phase(xp, race, heights, field, directions)


def _worth(
    xp: ModuleType, race: _Race, heights: Float[Floats, " s"], field: Field, directions: Float[Floats, "s p p"]
) -> Bool[Floats, " s"]:
    """The ascents that may reach the best of their kind and are not on the way to the place of a better one."""
    alike = field.is_isotropic[:, None] == field.is_isotropic[None]
    best = xp.max(xp.where(alike, heights[None], -np.inf), axis=1)
    # value + hope * predicted gain + ALIKE >= best value
    may_reach = heights + field.hope * race.ascents.ahead + ALIKE >= best
    return may_reach & ~follow(xp, _places(race, directions), heights, race.ascents.ahead, alike)


def _next_phase(
    xp: ModuleType, race: _Race, heights: Float[Floats, " s"], field: Field, directions: Float[Floats, "s p p"]
) -> _Race:
    """The race as it is, or at the beginning of the next phase if no ascent runs any more."""
    number, further = field.isotropic.shape[0], field.column_starts.shape[0]
    places = _places(race, directions)
    over = ~race.active.any()
    to_columns, to_last = over & (race.phase == _ISOTROPIC), over & (race.phase == _BY_COLUMN)
    # Ascents by column begin at the best isotropic ends, if there are any.
    seeds, are_there = best_two(xp, places[:number], heights[:number], field.within)
    starts = xp.concatenate([race.starts[:number], seeds[: field.num_seeded], race.starts[number + field.num_seeded :]])
    runs = xp.concatenate([are_there[: field.num_seeded], xp.ones(further - field.num_seeded, bool)])
    begin = xp.concatenate([xp.zeros(number, bool), runs & field.runs_by_column])
    # The best isotropic ascent runs last, unless an ascent by column is better by far.
    best = xp.argmax(heights[:number])
    gains = xp.max(heights[number:]) > heights[best] + field.cost + _CLEAR
    ahead = race.ascents.ahead[best]
    tight = 0.0 if field.tolerances[2] is None else field.tolerances[2]
    ends = (field.tolerances[2] is not None) & ~gains & (ahead >= tight) & xp.isfinite(heights[best])
    ends = ends & (race.ascents.steps[best] < field.limits[0])
    last = (np.arange(number + further) == best) & ends
    active = xp.where(to_columns, begin, xp.where(to_last, last, race.active))
    phase = race.phase + over
    return race._replace(
        starts=xp.where(to_columns & ~field.is_isotropic[:, None], starts, race.starts),
        active=active,
        rounds=xp.where(over, 0, race.rounds),
        # A phase in which no ascent begins is passed over in the next round.
        phase=xp.asarray(phase, np.int32),
    )


def best_two(
    xp: ModuleType, places: Float[Floats, "s p"], heights: Float[Floats, " s"], within: float = np.inf
) -> tuple[Float[Floats, "2 p"], Bool[Floats, "2"]]:
    """The best place and the best place apart from it, and whether each has a value `within` the best value."""
    best = xp.argmax(heights)
    apart = xp.max(abs(places - places[best][None]), axis=1) > SAME
    others = xp.where(apart, heights, -np.inf)
    two = xp.stack([best, xp.argmax(others)])
    values = xp.stack([heights[best], xp.max(others)])
    return places[two], xp.isfinite(values) & (values >= heights[best] - within)


def follow(
    xp: ModuleType,
    places: Float[Floats, "s p"],
    heights: Float[Floats, " s"],
    ahead: Float[Floats, " s"],
    alike: Bool[Floats, "s s"],
) -> Bool[Floats, " s"]:
    """Whether each ascent is on its way to the place of a better ascent of its kind.

    It is if the better one is near, or if the better one is hardly higher and the ascent itself predicts hardly any
    gain.
    """
    gap = heights[None] - heights[:, None]
    better = alike & ((gap > 0) | ((gap == 0) & np.tri(heights.shape[0], k=-1, dtype=bool)))
    near = xp.max(abs(places[:, None] - places[None]), axis=2) <= SAME
    near = near | ((gap < ALIKE) & (ahead < ALIKE)[:, None])
    return (better & near).any(axis=1)


def _places(race: _Race, directions: Float[Floats, "s p p"]) -> Float[Floats, "s p"]:
    return race.starts + _along(directions, race.ascents.place)


def _along(directions: Float[Floats, "s p p"], moved: Float[Floats, "s p"]) -> Float[Floats, "s p"]:
    return (directions * moved[:, None]).sum(-1)


def _heights(xp: ModuleType, ascents: newton.Ascents) -> Float[Floats, " s"]:
    """The values to compare: -inf if an ascent has no value, none yet, or a value that makes no sense."""
    known = xp.isfinite(ascents.local.value) & (ascents.steps >= 0) & ascents.local.makes_sense
    return xp.where(known, ascents.local.value, -np.inf)
