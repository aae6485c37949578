"""An optimum as a function of the loss's arguments, with derivatives by the implicit function theorem.

Let the gradient g of a loss be 0 and its Hessian H be positive definite. If the arguments of the loss change, the
optimum moves by -H^-1 dg. This is true of the optimum itself, not of a place where an optimizer stops short of it. So
the last digits are optimized first. In some directions the loss has hardly any curvature, and so no clear optimum. An
example is a hyperparameter on its way to where it has no effect. The place does not move in these directions.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jaxcal._checks import is_traced
from jaxcal.optimize.batching import one_run_at_a_time
from jaxcal.optimize.result import Result, select

# The most Newton steps with one Hessian, the fraction of a step below which they end, and the most Hessians.
_STEPS, _SHORTEST, _HESSIANS = 10, 0.01, 5

T = TypeVar("T")
Loss = Callable[[Float[Array, " p"]], Float[Array, ""]]
Gradient = Callable[[Float[Array, " p"]], Float[Array, " p"]]


def as_function(
    loss_of: Callable[..., Loss],
    near_of: Callable[..., Float[Array, " p"]],
    args: tuple[PyTree, ...],
    start: Float[Array, " p"],
    result: Int[Array, ""],
    least_curvature: ArrayLike,
) -> tuple[Float[Array, " p"], Int[Array, ""]]:
    """The optimum next to the end of a search, as a function of arguments, and how the search ended.

    If there is no optimum, the place is the start, its derivatives are NaN, and the result is not CONVERGED.

    Args:
        loss_of: gives the loss for the arguments.
        near_of: gives the end of an optimizer with a tight tolerance, for the arguments held constant.
        args: arrays, and pytrees of them.
        start: the place where the search has stopped, a constant.
        result: how the search ended, a value of `Result`.
        least_curvature: the curvature of the loss below which a direction is held.
    """
    converged = result == Result.CONVERGED

    def last_digits(*args: PyTree) -> Stationary:
        polished = polish(loss_of(*args), near_of(*args), least_curvature)
        is_optimum = converged & polished.is_optimum
        return Stationary(jnp.where(is_optimum, polished.place, start), is_optimum)

    # Arrays in its closure become arguments, too: `one_run_at_a_time` must know all that differs from run to run.
    last_digits = eqx.filter_closure_convert(last_digits, *args)
    stationary = one_run_at_a_time(lambda run, *args: run(*args))(*as_constants((last_digits, *args)))
    place = at_optimum(loss_of(*args), stationary, least_curvature)
    return place, jnp.where(converged & ~stationary.is_optimum, Result.STEP_LIMIT, result)


class Stationary(NamedTuple):
    """A minimum of a loss.

    Attributes:
        place: [p].
        is_optimum: whether the loss can hardly fall any further, and nowhere bends downwards.
    """

    place: Float[Array, " p"]
    is_optimum: Bool[Array, ""]


def polish(loss: Loss, near: Float[Array, " p"], least_curvature: ArrayLike) -> Stationary:
    """The optimum next to a place, to the last digits, by Newton steps.

    Meant for use inside `one_run_at_a_time`, as is `minimize`.

    Args:
        loss: the loss to minimize.
        near: the place where an optimizer with a tight tolerance has stopped.
        least_curvature: the curvature of the loss below which a direction is held.

    Example:
        >>> found = polish(lambda p: jnp.sum((p - 3) ** 4 + (p - 3) ** 2), jnp.array([3.1]), 1e-8)
        >>> found.place.round(4).item(), found.is_optimum.item()
        (3.0, True)
    """
    gradient, enough = jax.grad(loss), jnp.sqrt(jnp.finfo(near.dtype).eps)

    def improve(state):
        place, _, hessians = state
        hessian = _matrix(jax.linearize(gradient, place)[1], place)
        bent, least = _bent(hessian, least_curvature)
        # The quadratic model predicts that the loss falls by g' H^-1 g / 2.
        fall = lambda slope: slope @ _solve(hessian, bent, slope) / 2

        def step(state):
            place, slope, foreseen, length, steps = state
            new = place - length * _solve(hessian, bent, slope)
            new_slope = gradient(new)
            new_foreseen = fall(new_slope)
            better = new_foreseen < foreseen
            chosen = select(better, (new, new_slope, new_foreseen), (place, slope, foreseen))
            return *chosen, jnp.where(better, jnp.minimum(2 * length, 1), length / 4), steps + 1

        slope, one = gradient(place), jnp.ones_like(place[0])
        start = place, slope, fall(slope), one, jnp.int32(0)
        going_on = lambda state: (state[-2] > _SHORTEST) & (state[-1] < _STEPS)
        place, _, foreseen, *_ = lax.while_loop(going_on, step, start)
        downwards = least < -jnp.asarray(least_curvature)
        return place, ~downwards & (foreseen >= 0) & (foreseen < enough), hessians + 1

    unfinished = lambda state: ~state[1] & (state[2] < _HESSIANS)
    place, is_optimum, _ = lax.while_loop(unfinished, improve, (near, jnp.zeros((), bool), jnp.int32(0)))
    return Stationary(place, is_optimum)


def at_optimum(loss: Loss, stationary: Stationary, least_curvature: ArrayLike) -> Float[Array, " p"]:
    """The place of an optimum, with its derivatives by all arguments of the loss; they are NaN if it is none.

    The place itself is a constant, so that the search for it needs no derivative.

    Args:
        loss: the loss, which closes over its arguments.
        stationary: the result of `polish`.
        least_curvature: as of `polish`.

    Example:
        >>> loss, near = lambda p, a: jnp.sum((p**2 - a) ** 2), jnp.full(1, 1.9)
        >>> root = lambda a: at_optimum(lambda p: loss(p, a), polish(lambda p: loss(p, 4.0), near, 0.0), 0.0)
        >>> print(jax.jacobian(root)(4.0).round(3))
        [0.25]
    """
    place, is_optimum = lax.stop_gradient(stationary)

    def solve(pushforward: Gradient, slope: Float[Array, " p"]) -> Float[Array, " p"]:
        hessian = _matrix(pushforward, place)
        return _solve(hessian, _bent(hessian, least_curvature)[0], slope) * jnp.where(is_optimum, 1, jnp.nan)

    # g(p, a) = 0, so dp/da = -H^-1 dg/da.
    return lax.custom_root(jax.grad(loss), place, lambda _, place: place, solve)


def as_constants(tree: T) -> T:
    """A pytree with its traced arrays held constant, so that no derivative passes. All else stays as it is."""
    hold = lambda leaf: lax.stop_gradient(leaf) if is_traced(leaf) and eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(hold, tree)


def _matrix(pushforward: Gradient, place: Float[Array, " p"]) -> Float[Array, "p p"]:
    """The matrix of a symmetric linear map, row by row.

    All rows at once would need the map's intermediate matrices once for each row.
    """
    return lax.map(pushforward, jnp.eye(place.size, dtype=place.dtype))


def _bent(hessian: Float[Array, "p p"], least_curvature: ArrayLike) -> tuple[Float[Array, "p p"], Float[Array, ""]]:
    """The projection to the directions in which the loss bends upwards, and the least curvature of all."""
    hessian = lax.stop_gradient(hessian)
    curvatures, directions = jnp.linalg.eigh((hessian + hessian.T) / 2)
    # The projection V V' with the eigenvectors V of curvature above the least one.
    kept = directions * (curvatures > jnp.asarray(least_curvature))[None]
    return kept @ kept.T, curvatures[0]


def _solve(hessian: Float[Array, "p p"], bent: Float[Array, "p p"], slope: Float[Array, " p"]) -> Float[Array, " p"]:
    """H^-1 slope in the directions that bend upwards, and 0 in the others."""
    # P (P H P + I - P)^-1 P slope, with P the projection `bent`
    others = jnp.eye(slope.size, dtype=slope.dtype) - bent
    return bent @ jnp.linalg.solve(bent @ hessian @ bent + others, bent @ slope)
