"""Damped Newton steps on the evidence, with the average information in place of the Hessian.

Gilmour, Thompson & Cullis, "Average Information REML", Biometrics 1995. The matrix is never negative and costs little
beside the gradient. Steps are damped as Levenberg and Marquardt do, and kept within a box: a hyperparameter on its way
to where it has no effect, a variance to zero, say, must not shorten the steps of the others.

Several ascents stand along a leading axis s. A step of all is one function, `advance(xp, ...)`: of NumPy's arrays
where the host climbs, of JAX's inside of a transformation (`optimize.iterate`).
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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

# NumPy's arrays or JAX's.
Floats = Any


class Local(NamedTuple):
    """An objective near points; of a single one without the axis s.

    Attributes:
        value: [s]; not finite where there is none: such a step is too long.
        gradient: [s, p].
        information: [s, p, p], an approximation of the negative Hessian that is never negative.
        makes_sense: [s], whether the value may be believed; ascents pass where it does not.
    """

    value: Float[Floats, "*s"]
    gradient: Float[Floats, "*s p"]
    information: Float[Floats, "*s p p"]
    makes_sense: Bool[Floats, "*s"]


class Ascents(NamedTuple):
    """Where several ascents are, and what they try next.

    Attributes:
        place: [s, p].
        local: the objective there; its value is NaN if it is not finite at the initial place.
        information: [s, p, p], of which steps are made: that of `local`, corrected.
        damping: [s].
        move: [s, p], to try next.
        ahead: [s], the gain that is foreseen, were each hyperparameter to move by at most three.
        steps: [s], evaluations after the first one; -1 before it.
        mark: [s], the value some steps ago.
        done: [s], whether the gain foreseen is below the tolerance, or rounding hides any gain.
    """

    place: Float[Floats, "s p"]
    local: Local
    information: Float[Floats, "s p p"]
    damping: Float[Floats, " s"]
    move: Float[Floats, "s p"]
    ahead: Float[Floats, " s"]
    steps: Int[Floats, " s"]
    mark: Float[Floats, " s"]
    done: Bool[Floats, " s"]

    @classmethod
    def at(cls, xp: ModuleType, place: Float[Floats, "s p"]) -> "Ascents":
        """Before the first evaluation, which is a step of no length."""
        zeros, matrix = xp.zeros_like(place[:, 0]), xp.zeros_like(place[:, :, None] * place[:, None])
        return cls(
            place=place,
            local=Local(zeros, xp.zeros_like(place), matrix, zeros == 0),
            information=matrix,
            damping=zeros + _DAMPING,
            move=xp.zeros_like(place),
            ahead=zeros + np.inf,
            steps=xp.full(place.shape[0], -1, np.int32),
            mark=zeros,
            done=zeros > 0,
        )

    @property
    def asked(self) -> Float[Floats, "s p"]:
        """Where the objective is to be evaluated."""
        return self.place + self.move


def advance(
    xp: ModuleType, ascents: Ascents, found: Local, active: Bool[Floats, " s"], tolerance: Float[Floats, " s"]
) -> Ascents:
    """One step of those that are active, by what the objective is where they asked; no step lowers it.

    An ascent is done where the quadratic model foresees a gain below the tolerance; where eight steps together have
    gained less, as on a curved ridge; or where no step however short gains anything, by rounding.
    """
    first, move = ascents.steps < 0, ascents.move
    local = ascents.local
    gain = found.value - local.value
    foreseen = _foreseen(local.gradient, ascents.information, move)
    ratio = gain / xp.maximum(foreseen, np.finfo(gain.dtype).tiny)
    finite = xp.isfinite(found.gradient).all(-1) & xp.isfinite(found.information).all((-2, -1))
    # False where the value is not a number.
    taken = first | ((gain > 0) & (ratio > _LEAST_RATIO) & finite)
    there = first & ~(xp.isfinite(found.value) & finite)
    found = found._replace(value=xp.where(there, np.nan, found.value))
    choose = lambda new, old: _where(xp, taken, new, old)
    corrected = _corrected(xp, found.information, move, local.gradient - found.gradient)
    corrected = _where(xp, (ratio > 1) & ~first, corrected, found.information)
    local = Local(*(choose(new, old) for new, old in zip(found, local, strict=True)))
    information = choose(corrected, ascents.information)

    one = xp.ones_like(gain)
    factor = xp.where(ratio > 0.7, one / 3, xp.where(ratio < 0.25, 2 * one, one))
    factor = xp.where(first, one, xp.where(taken, factor, 5 * one))
    damping = xp.maximum(ascents.damping * factor, xp.where(taken, _LEAST_DAMPING * one, _DAMPING * one))
    stuck = ~taken & (ascents.damping > _GREATEST_DAMPING)
    steps = ascents.steps + 1
    checked = steps % _RIDGE_STEPS == 0
    ridge = checked & ~first & (local.value - ascents.mark < tolerance)
    next_move, ahead = _look_ahead(xp, local, information, damping)
    after = Ascents(
        place=choose(ascents.asked, ascents.place),
        local=local,
        information=information,
        damping=damping,
        move=next_move,
        ahead=ahead,
        steps=steps,
        mark=xp.where(checked, local.value, ascents.mark),
        done=stuck | ridge | (ahead < tolerance),
    )
    return where(xp, active, after, ascents)


def where(xp: ModuleType, chosen: Bool[Floats, " s"], new: Any, old: Any) -> Any:
    """Some ascents of one, the others of the other."""
    local = Local(*(_where(xp, chosen, a, b) for a, b in zip(new.local, old.local, strict=True)))
    rest = {name: _where(xp, chosen, a, getattr(old, name)) for name, a in new._asdict().items() if name != "local"}
    return Ascents(local=local, **rest)


def _where(xp: ModuleType, chosen: Bool[Floats, " s"], new: Floats, old: Floats) -> Floats:
    return xp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 1)), new, old)


def _look_ahead(
    xp: ModuleType, local: Local, information: Float[Floats, "s p p"], damping: Float[Floats, " s"]
) -> tuple[Float[Floats, "s p"], Float[Floats, " s"]]:
    """The next moves, and the gains that are foreseen if both the average and the corrected information are right.

    That is the gain of all hyperparameters together, or of one alone if that is more. All three systems of equations
    of an ascent are solved at once.
    """
    gradient, dtype = local.gradient[None], damping.dtype
    slight = 1e3 * float(np.finfo(dtype).eps)
    models = xp.stack([local.information, information])
    diagonals = xp.diagonal(models, axis1=-2, axis2=-1)
    eye = np.eye(models.shape[-1], dtype=dtype)[None, None]
    added = xp.stack([damping[:, None] * (diagonals[1] + _CURVATURE), *(slight * (diagonals + 1))])
    curvatures = xp.stack([information, *models]) + eye * added[:, :, None]
    longest = np.array([_LONGEST_STEP, _FORESEEN_STEP, _FORESEEN_STEP], dtype)[:, None, None]
    moves = _step_in_box(xp, curvatures, xp.broadcast_to(gradient, (3, *gradient.shape[1:])), longest)
    together = _foreseen(gradient, models, moves[1:])
    alone = xp.clip(gradient / (diagonals + slight), -_FORESEEN_STEP, _FORESEEN_STEP)
    gains = xp.max(gradient * alone - alone**2 * diagonals / 2, axis=-1)
    return moves[0], xp.maximum(xp.max(together, axis=0), xp.max(gains, axis=0))


def _corrected(
    xp: ModuleType, information: Float[Floats, "s p p"], move: Float[Floats, "s p"], change: Float[Floats, "s p"]
) -> Float[Floats, "s p p"]:
    """The information with less curvature along the last step, where the gradient's change tells of less.

    Along a ridge the average information may be too great by factors: steps would be too short, and the end too early.
    """
    along = _times(information, move)
    foreseen = xp.sum(move * along, axis=-1)
    usable = foreseen > 0
    divisor = xp.where(usable, foreseen, 1)
    ratio = xp.clip(xp.where(usable, xp.sum(move * change, axis=-1) / divisor, 1), _LEAST_CURVATURE, 1)
    return information + ((ratio - 1) / divisor)[:, None, None] * (along[:, :, None] * along[:, None])


def _foreseen(
    gradient: Float[Floats, "... p"], information: Float[Floats, "... p p"], move: Float[Floats, "... p"]
) -> Float[Floats, "..."]:
    return (move * (gradient - _times(information, move) / 2)).sum(-1)


def _times(matrix: Float[Floats, "... p p"], vector: Float[Floats, "... p"]) -> Float[Floats, "... p"]:
    return (matrix * vector[..., None, :]).sum(-1)


def _step_in_box(
    xp: ModuleType, curvature: Float[Floats, "k s p p"], gradient: Float[Floats, "k s p"], reach: Float[Floats, "k 1 1"]
) -> Float[Floats, "k s p"]:
    """The Newton steps by k curvatures; what would leave the box is held at its edge, and the rest solved for again."""
    solve = _solve_on_host if xp is np else _solve
    step = solve(curvature, gradient)
    outside = abs(step) >= reach
    edge = xp.where(outside, xp.clip(step, -reach, reach), 0)
    right = xp.where(outside, edge, gradient - _times(curvature, edge))
    held = outside[..., :, None] | outside[..., None, :]
    eye = np.eye(gradient.shape[-1], dtype=gradient.dtype)[None, None]
    step = solve(xp.where(held, eye, curvature), right)
    return xp.clip(step, -reach, reach)


def _solve_on_host(matrix: Float[np.ndarray, "k s p p"], right: Float[np.ndarray, "k s p"]) -> np.ndarray:
    """The solutions of small positive definite systems; NaN where they are not finite."""
    finite = np.asarray(np.isfinite(matrix).all((-2, -1)) & np.isfinite(right).all(-1))
    solvable = np.where(finite[..., None, None], matrix, np.eye(right.shape[-1]))
    return np.where(finite[..., None], np.linalg.solve(solvable, right[..., None])[..., 0], np.nan)


def _solve(matrix: Float[Array, "k s p p"], right: Float[Array, "k s p"]) -> Float[Array, "k s p"]:
    """The same by elimination: fewer operations to compile than a factor's."""
    table = jnp.concatenate([matrix, right[..., None]], axis=-1)
    rows = np.arange(right.shape[-1])[None, None, :, None]

    def eliminate(k: Int[Array, ""], table: Float[Array, "m s p q"]) -> Float[Array, "m s p q"]:
        row = lax.dynamic_index_in_dim(table, k, -2)
        row = row / lax.dynamic_index_in_dim(row, k, -1)
        column = lax.dynamic_index_in_dim(table, k, -1)
        return jnp.where(rows == k, row, table - column * row)

    return lax.fori_loop(0, right.shape[-1], eliminate, table)[..., -1]
