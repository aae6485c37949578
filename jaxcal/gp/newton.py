"""Damped Newton steps on the evidence, with the average information in place of the Hessian.

Gilmour, Thompson & Cullis, "Average Information REML", Biometrics 1995. The matrix is never negative and costs little
beside the gradient. Steps are damped as Levenberg and Marquardt do, and kept within a box: a hyperparameter on its way
to where it has no effect, a variance to zero, say, must not shorten the steps of the others.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxcal.functional._loops import carried

# The longest step of a log hyperparameter, and the longest one whose gain counts as still to be had.
_LONGEST_STEP, _FORESEEN_STEP = 2.0, 3.0
# So many steps that together gain less than the tolerance are on a ridge.
_RIDGE_STEPS = 8
# The curvature along a step is taken for no less than this fraction of the average information.
_LEAST_CURVATURE = 0.1
# A step is taken if it gains this fraction of what the quadratic model foresees.
_LEAST_RATIO = 1e-3
# Damping: at first, the least and the greatest, and what is added to the curvature before it is multiplied.
_DAMPING, _LEAST_DAMPING, _GREATEST_DAMPING, _CURVATURE = 0.1, 1e-6, 1e4, 0.1


class Local(NamedTuple):
    """An objective near a point.

    Attributes:
        value: there.
        gradient: [p].
        information: [p, p], an approximation of the negative Hessian that is never negative.
    """

    value: Float[Array, ""]
    gradient: Float[Array, " p"]
    information: Float[Array, "p p"]


class Ascent(NamedTuple):
    """Where an ascent ended.

    Attributes:
        place: [p].
        value: of the objective there; NaN if it was not finite at the initial values.
        steps: evaluations after the first one.
        converged: whether the gain foreseen is below the tolerance, or rounding hides any gain.
    """

    place: Float[Array, " p"]
    value: Float[Array, ""]
    steps: Int[Array, ""]
    converged: Bool[Array, ""]


class _State(NamedTuple):
    """What a step begins with: the place and what is known there, the damping, and the move to try from it."""

    place: Float[Array, " p"]
    local: Local
    information: Float[Array, "p p"]
    damping: Float[Array, ""]
    move: Float[Array, " p"]
    steps: Int[Array, ""]
    mark: Float[Array, ""]
    done: Bool[Array, ""]


def ascend(
    evaluate: Callable[[Float[Array, " p"]], Local],
    initial: Float[Array, " p"],
    *,
    tolerance: float | Float[Array, ""],
    max_iterations: int | Int[Array, ""],
) -> Ascent:
    """Maximize an objective from initial values, by steps that never lower it.

    Ends where the quadratic model foresees a gain below `tolerance`, were each hyperparameter to move by at most three;
    where eight steps together have gained less, as on a curved ridge; or where no step however short gains anything, by
    rounding.

    Args:
        evaluate: the objective near a point; not finite where there is none: such a step is too long.
        initial: where to begin.
        tolerance: in units of the objective.
        max_iterations: how many steps are tried at most; below 0 nothing is evaluated, and the value is NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> bowl = lambda p: Local(-jnp.sum((p - 1) ** 2), -2 * (p - 1), 2 * jnp.eye(2))
        >>> ascent = ascend(bowl, jnp.zeros(2), tolerance=1e-6, max_iterations=50)
        >>> ascent.place.round(2).tolist(), bool(ascent.converged)
        ([1.0, 1.0], True)
    """
    evaluate = jax.jit(evaluate)  # traced once

    def step(state: _State) -> _State:
        place, local, information, damping, move, steps, mark, _ = state
        first = steps < 0
        found = evaluate(place + move)
        gain = found.value - local.value
        foreseen = _foreseen(local.gradient, information, move)
        ratio = gain / jnp.maximum(foreseen, jnp.finfo(gain.dtype).tiny)
        # False where the value is not a number.
        taken = first | ((gain > 0) & (ratio > _LEAST_RATIO) & jnp.isfinite(found.gradient).all())
        choose = lambda new, old: jnp.where(taken, new, old)
        change = local.gradient - found.gradient
        place, local = jax.tree.map(choose, (place + move, found), (place, local))
        corrected = jnp.where(ratio > 1, _corrected(local.information, move, change), local.information)
        information = jnp.where(taken, corrected, information)
        factor = jnp.where(ratio > 0.7, 1 / 3, jnp.where(ratio < 0.25, 2.0, jnp.ones_like(damping)))
        factor = jnp.where(first, 1.0, jnp.where(taken, factor, 5.0)).astype(damping.dtype)
        stuck = ~taken & (damping > _GREATEST_DAMPING)
        damping = jnp.maximum(damping * factor, jnp.where(taken, _LEAST_DAMPING, jnp.full_like(damping, _DAMPING)))
        checked = (steps + 1) % _RIDGE_STEPS == 0
        ridge = checked & ~first & (local.value - mark < tolerance)
        mark = jnp.where(checked, local.value, mark)
        move, ahead = _look_ahead(local, information, damping)
        return _State(
            place=place,
            local=local,
            information=information,
            damping=damping,
            move=move,
            steps=steps + 1,
            mark=mark,
            done=stuck | ridge | (ahead < tolerance),
        )

    def unfinished(state: _State) -> Bool[Array, ""]:
        going_on = ~state.done & (state.steps < max_iterations) & jnp.isfinite(state.local.value)
        return ((state.steps < 0) & (max_iterations >= 0)) | going_on

    # The first evaluation is a step of no length: the compiled program holds the objective once.
    nothing = Local(*(jnp.zeros(part.shape, part.dtype) for part in jax.eval_shape(evaluate, initial)))
    state = _State(
        place=initial,
        local=nothing,
        information=nothing.information,
        damping=jnp.asarray(_DAMPING, initial.dtype),
        move=jnp.zeros_like(initial),
        steps=jnp.int32(-1),
        mark=nothing.value,
        done=jnp.zeros((), bool),
    )
    end = lax.while_loop(unfinished, step, carried(state))
    return Ascent(end.place, jnp.where(end.steps < 0, jnp.nan, end.local.value), end.steps, end.done)


def _look_ahead(
    local: Local, information: Float[Array, "p p"], damping: Float[Array, ""]
) -> tuple[Float[Array, " p"], Float[Array, ""]]:
    """The next move, and the gain that is foreseen if both the average and the corrected information are right.

    That is the gain of all hyperparameters together, or of one alone if that is more. All three systems of equations
    are solved at once: the compiled program holds a solution once.
    """
    gradient, slight = local.gradient, 1e3 * jnp.finfo(damping.dtype).eps
    models = jnp.stack([local.information, information])
    diagonals = jnp.diagonal(models, axis1=1, axis2=2)
    damped = information + _diagonal(damping * (diagonals[1] + _CURVATURE))
    curvatures = jnp.concatenate([damped[None], models + jax.vmap(_diagonal)(slight * (diagonals + 1))])
    longest = jnp.array([_LONGEST_STEP, _FORESEEN_STEP, _FORESEEN_STEP], gradient.dtype)
    moves = jax.vmap(_step_in_box, (0, None, 0))(curvatures, gradient, longest)
    together = jax.vmap(_foreseen, (None, 0, 0))(gradient, models, moves[1:])
    alone = jnp.clip(gradient[None] / (diagonals + slight), -_FORESEEN_STEP, _FORESEEN_STEP)
    return moves[0], jnp.maximum(jnp.max(together), jnp.max(gradient[None] * alone - alone**2 * diagonals / 2))


def _corrected(
    information: Float[Array, "p p"], move: Float[Array, " p"], change: Float[Array, " p"]
) -> Float[Array, "p p"]:
    """The information with less curvature along the last step, where the gradient's change tells of less.

    Along a ridge the average information may be too great by factors: steps would be too short, and the end too early.
    """
    along = information @ move
    foreseen = move @ along
    usable = foreseen > 0
    ratio = jnp.clip(jnp.where(usable, move @ change / jnp.where(usable, foreseen, 1), 1), _LEAST_CURVATURE, 1)
    return information + (ratio - 1) * jnp.outer(along, along) / jnp.where(usable, foreseen, 1)


def _foreseen(
    gradient: Float[Array, " p"], information: Float[Array, "p p"], move: Float[Array, " p"]
) -> Float[Array, ""]:
    return move @ gradient - move @ information @ move / 2


def _step_in_box(
    curvature: Float[Array, "p p"], gradient: Float[Array, " p"], longest: Float[Array, ""]
) -> Float[Array, " p"]:
    """The Newton step, with what would leave the box held at its edge and the rest solved for again."""
    step = _solve(curvature, gradient)
    outside = jnp.abs(step) >= longest
    edge = jnp.where(outside, jnp.clip(step, -longest, longest), 0)
    right = jnp.where(outside, edge, gradient - curvature @ edge)
    held = outside[:, None] | outside[None]
    step = _solve(jnp.where(held, jnp.eye(len(step), dtype=step.dtype), curvature), right)
    return jnp.clip(step, -longest, longest)


def _solve(matrix: Float[Array, "p p"], right: Float[Array, " p"]) -> Float[Array, " p"]:
    """The solution of a small positive definite system, by elimination: fewer operations to compile than a factor's."""
    table = jnp.concatenate([matrix, right[:, None]], axis=1)
    rows = jnp.arange(len(right))[:, None]

    def eliminate(k: Int[Array, ""], table: Float[Array, "p q"]) -> Float[Array, "p q"]:
        row = table[k] / table[k, k]
        return jnp.where(rows == k, row[None], table - table[:, k, None] * row[None])

    return lax.fori_loop(0, len(right), eliminate, table)[:, -1]


def _diagonal(values: Float[Array, " p"]) -> Float[Array, "p p"]:
    return values[:, None] * jnp.eye(values.shape[0], dtype=values.dtype)
