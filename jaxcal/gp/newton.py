"""Damped Newton steps on the evidence, with the average information in place of the Hessian.

Gilmour, Thompson & Cullis, "Average Information REML", Biometrics 1995. The matrix is positive semidefinite and costs
little beside the gradient. Steps are damped as by Levenberg and Marquardt, and kept within a box. So a hyperparameter
on its way to where it has no effect, such as a vanishing variance, does not shorten the steps of the others.

Several ascents are stacked along a leading axis s. One function, `advance(xp, ...)`, makes a step of all. It takes
NumPy's arrays on the host, and JAX's arrays inside a transformation (`optimize.iterate`).
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# The longest step of a log hyperparameter, and the longest step whose predicted gain counts as still possible.
_LONGEST_STEP, _FORESEEN_STEP = 2.0, 3.0
# An ascent is on a ridge if this number of steps together gains less than the tolerance.
_RIDGE_STEPS = 8
# The corrected curvature along a step is at least this fraction of the average information's curvature.
_LEAST_CURVATURE = 0.1
# A step is taken if it gains more than this fraction of the gain that the quadratic model predicts.
_LEAST_RATIO = 1e-3
# The damping at first, its least value and its greatest, and the number added to a curvature before it is multiplied by
# the damping.
_DAMPING, _LEAST_DAMPING, _GREATEST_DAMPING, _CURVATURE = 0.1, 1e-6, 1e4, 0.1

# NumPy's arrays or JAX's.
Floats = Any


class Local(NamedTuple):
    """An objective near several points along the axis s, or near one point, without this axis.

    Attributes:
        value: [s]; not finite if there is no value, because the step is too long.
        gradient: [s, p].
        information: [s, p, p], an approximation of the negative Hessian, positive semidefinite.
        makes_sense: [s], whether the value makes sense. An ascent may pass places where it does not, but not end there.
    """

    value: Float[Floats, "*s"]
    gradient: Float[Floats, "*s p"]
    information: Float[Floats, "*s p p"]
    makes_sense: Bool[Floats, "*s"]


class Ascents(NamedTuple):
    """The places of several ascents, and their next moves.

    Attributes:
        place: [s, p].
        local: the objective at the place. Its value is NaN if it is not finite at the initial place.
        information: [s, p, p], the matrix of which steps are made: the information of `local`, corrected.
        damping: [s].
        move: [s, p], the move to try next.
        ahead: [s], the predicted gain if each hyperparameter moves by at most three.
        steps: [s], the number of evaluations after the first one; -1 before the first one.
        mark: [s], the value some steps ago.
        done: [s], whether the ascent has ended, as `advance` says.
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
        """Ascents before their first evaluation, which is a step of length zero."""
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
        """The places at which the objective is to be evaluated."""
        return self.place + self.move


def advance(
    xp: ModuleType, ascents: Ascents, trial: Local, active: Bool[Floats, " s"], tolerance: Float[Floats, " s"]
) -> Ascents:
    """One step of the active ascents, given the objective at the places that they asked for; no step lowers it.

    An ascent is done in three cases. First, if the quadratic model predicts a gain below the tolerance. Second, if
    eight steps together have gained less than the tolerance, as on a curved ridge. Third, if even the shortest steps
    gain nothing, because of rounding.
    """
    first, move = ascents.steps < 0, ascents.move
    local = ascents.local
    gain = trial.value - local.value
    foreseen = _foreseen(local.gradient, ascents.information, move)
    # The ratio of the gain and the predicted gain decides on the step and the damping.
    ratio = gain / xp.maximum(foreseen, np.finfo(gain.dtype).tiny)
    finite = xp.isfinite(trial.gradient).all(-1) & xp.isfinite(trial.information).all((-2, -1))
    # A comparison with NaN is False, so that a step to NaN is not taken.
    taken = first | ((gain > 0) & (ratio > _LEAST_RATIO) & finite)
    there = first & ~(xp.isfinite(trial.value) & finite)
    trial = trial._replace(value=xp.where(there, np.nan, trial.value))
    choose = lambda new, old: _where(xp, taken, new, old)
    corrected = _corrected(xp, trial.information, move, local.gradient - trial.gradient)
    corrected = _where(xp, (ratio > 1) & ~first, corrected, trial.information)
    local = Local(*(choose(new, old) for new, old in zip(trial, local, strict=True)))
    information = choose(corrected, ascents.information)

    one = xp.ones_like(gain)
    # The damping is divided by 3 after a good step, and times 2 after a bad one or 5 after one that is not taken.
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
    """The chosen ascents from `new`, the others from `old`."""
    local = Local(*(_where(xp, chosen, a, b) for a, b in zip(new.local, old.local, strict=True)))
    rest = {name: _where(xp, chosen, a, getattr(old, name)) for name, a in new._asdict().items() if name != "local"}
    return Ascents(local=local, **rest)


def _where(xp: ModuleType, chosen: Bool[Floats, " s"], new: Floats, old: Floats) -> Floats:
    return xp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 1)), new, old)


def _look_ahead(
    xp: ModuleType, local: Local, information: Float[Floats, "s p p"], damping: Float[Floats, " s"]
) -> tuple[Float[Floats, "s p"], Float[Floats, " s"]]:
    """The next moves, and the predicted gains: the greater one by the average and by the corrected information.

    A predicted gain is the gain of all hyperparameters together, or of a single one if that is more. The three systems
    of equations of an ascent are solved at once.
    """
    gradient, dtype = local.gradient[None], damping.dtype
    slight = 1e3 * float(np.finfo(dtype).eps)
    models = xp.stack([local.information, information])
    diagonals = xp.diagonal(models, axis1=-2, axis2=-1)
    eye = np.eye(models.shape[-1], dtype=dtype)[None, None]
    # (H + damping diag(diag(H) + c)) d = g for the move, and (H + slight diag(diag(H) + 1)) d = g for the gains.
    added = xp.stack([damping[:, None] * (diagonals[1] + _CURVATURE), *(slight * (diagonals + 1))])
    curvatures = xp.stack([information, *models]) + eye * added[:, :, None]
    longest = np.array([_LONGEST_STEP, _FORESEEN_STEP, _FORESEEN_STEP], dtype)[:, None, None]
    moves = _step_in_box(xp, curvatures, xp.broadcast_to(gradient, (3, *gradient.shape[1:])), longest)
    together = _foreseen(gradient, models, moves[1:])
    # One hyperparameter alone: d_i = g_i / H_ii, with the gain g_i d_i - d_i^2 H_ii / 2.
    alone = xp.clip(gradient / (diagonals + slight), -_FORESEEN_STEP, _FORESEEN_STEP)
    gains = xp.max(gradient * alone - alone**2 * diagonals / 2, axis=-1)
    return moves[0], xp.maximum(xp.max(together, axis=0), xp.max(gains, axis=0))


def _corrected(
    xp: ModuleType, information: Float[Floats, "s p p"], move: Float[Floats, "s p"], change: Float[Floats, "s p"]
) -> Float[Floats, "s p p"]:
    """The information with less curvature along the last step, if the gradient changed by less than it predicts.

    Along a ridge the average information may be several times too great. The steps would be too short, and the end too
    early.
    """
    along = _times(information, move)
    foreseen = xp.sum(move * along, axis=-1)
    usable = foreseen > 0
    divisor = xp.where(usable, foreseen, 1)
    ratio = xp.clip(xp.where(usable, xp.sum(move * change, axis=-1) / divisor, 1), _LEAST_CURVATURE, 1)
    # `H + (r - 1) H d d' H / (d' H d)`, with `r = d' (change of g) / (d' H d)`, which multiplies d' H d by r.
    return information + ((ratio - 1) / divisor)[:, None, None] * (along[:, :, None] * along[:, None])


def _foreseen(
    gradient: Float[Floats, "... p"], information: Float[Floats, "... p p"], move: Float[Floats, "... p"]
) -> Float[Floats, "..."]:
    # g . d - d' H d / 2
    return (move * (gradient - _times(information, move) / 2)).sum(-1)


def _times(matrix: Float[Floats, "... p p"], vector: Float[Floats, "... p"]) -> Float[Floats, "... p"]:
    return (matrix * vector[..., None, :]).sum(-1)


def _step_in_box(
    xp: ModuleType, curvature: Float[Floats, "k s p p"], gradient: Float[Floats, "k s p"], reach: Float[Floats, "k 1 1"]
) -> Float[Floats, "k s p"]:
    """The Newton steps by k curvatures, within a box.

    Entries that would leave the box are held at its edge, and the others are solved for again.
    """
    solve = _solve_on_host if xp is np else _solve
    step = solve(curvature, gradient)
    outside = abs(step) >= reach
    edge = xp.where(outside, xp.clip(step, -reach, reach), 0)
    # The rest d_r solves H_rr d_r = g_r - H_re d_e, given the entries d_e at the edge.
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
    """The same by Gauss-Jordan elimination, which has fewer operations to compile than a factorization."""
    table = jnp.concatenate([matrix, right[..., None]], axis=-1)
    rows = np.arange(right.shape[-1])[None, None, :, None]

    def eliminate(k: Int[Array, ""], table: Float[Array, "m s p q"]) -> Float[Array, "m s p q"]:
        row = lax.dynamic_index_in_dim(table, k, -2)
        row = row / lax.dynamic_index_in_dim(row, k, -1)
        column = lax.dynamic_index_in_dim(table, k, -1)
        return jnp.where(rows == k, row, table - column * row)

    return lax.fori_loop(0, right.shape[-1], eliminate, table)[..., -1]
