"""L-BFGS with a weak Wolfe line search, as one compiled loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxcal._numpy import AnyArray
from jaxcal.functional._loops import carried
from jaxcal.optimize.result import Best, Optimum, Result, lowest, select

# The weak Wolfe conditions of L-BFGS's line search, and how often it tries; the usual values.
_SUFFICIENT_DECREASE, _CURVATURE, _LINE_SEARCH_TRIALS = 1e-4, 0.9, 30
# The fraction of a quasi-Newton step below which the step counts as cut short.
_CUT_SHORT = 1e-3
# So many steps may gain little without an end: L-BFGS knows little of the loss yet.
_EARLY_STEPS = 4


def minimize(
    loss: Callable[..., Float[Array, ""]],
    params: PyTree,
    *,
    max_iterations: int | Int[AnyArray, ""] = 1000,
    loss_tolerance: float = 2.2e-9,
    gradient_tolerance: float = 1e-5,
    gain_tolerance: float | Float[AnyArray, ""] = 0.0,
    validation_loss: Callable[..., Float[Array, ""]] | None = None,
    patience: int | Int[Array, ""] = 10,
) -> Optimum:
    """Minimize a smooth function of all its parameters by L-BFGS (ten corrections, weak Wolfe line search).

    Stops as scipy's L-BFGS-B does by default: when the loss falls by at most `loss_tolerance` of
    max(|old|, |new|, 1), when no entry of the gradient exceeds `gradient_tolerance`, or after `max_iterations`; and
    earlier, where `gain_tolerance` allows. Where the loss is NaN the step is shortened; an initial value there ends the
    loop at once.

    Meant for use inside a jitted function; see `one_run_at_a_time` for its use under `vmap`.

    Args:
        loss: `loss(params) -> scalar`.
        params: initial values: a pytree of floating-point arrays.
        max_iterations: number of steps to stop at.
        loss_tolerance: relative decrease of the loss to stop at.
        gradient_tolerance: largest entry of the gradient to stop at.
        gain_tolerance: decrease of the loss, in its own units, to stop at: after two steps in a row that gained less
            and beyond which the quadratic model foresees less, the first four not counted.
        validation_loss: `validation_loss(params) -> scalar`: what to stop by early, and to choose the returned
            parameters by, among those after each step and the initial ones.
        patience: number of steps in a row without a lower validation loss to stop at.

    Example:
        >>> import jax.numpy as jnp
        >>> optimum = minimize(lambda p: (p - 3) ** 2, jnp.asarray(0.0))
        >>> round(float(optimum.params), 3), Result(int(optimum.result)).name
        (3.0, 'CONVERGED')
    """
    lbfgs = optax.scale_by_lbfgs(memory_size=10)
    # One vector: for a tree, XLA would compile every update once a leaf.
    params, unravel = ravel_pytree(params)
    # optax's weights of the corrections have the default dtype.
    as_params = lambda a: a.astype(params.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    no_memory = jax.tree.map(as_params, lbfgs.init(params))
    value_and_grad = jax.value_and_grad(lambda vector: loss(unravel(vector)))

    def step(state):
        params, (old, gradient), direction, memory, fresh, slow, best, steps, _ = state
        first = steps < 0
        params, (new, gradient), length = _line_search(value_and_grad, params, (old, gradient), direction, first)
        size = jnp.maximum(jnp.maximum(jnp.abs(old), jnp.abs(new)), 1)
        stalled = old - new <= loss_tolerance * size
        # A stall on a step cut this short tells of a bad direction, not of an optimum: go on without memory, once.
        forget = stalled & (length < _CUT_SHORT) & ~fresh
        flat = optax.tree.norm(gradient, ord=jnp.inf) <= gradient_tolerance
        # One slow step alone may be a step of a bad length; the first ones, a plateau's end.
        slows = (steps >= _EARLY_STEPS) & (old - new < gain_tolerance)
        best = watch(params, best)
        stale = False if best is None else best.stale >= patience
        descent, memory = lbfgs.update(gradient, select(forget, no_memory, memory), params)
        # Small gains alone may be those of a plateau: the quadratic model must foresee no more, either.
        slows &= jnp.asarray(optax.tree.vdot(gradient, descent)) / 2 < gain_tolerance
        done = ~first & ((stalled & ~forget) | flat | (slow & slows) | stale)
        direction = optax.tree.scale(-1, descent)
        return params, (new, gradient), direction, memory, forget | first, slows, best, steps + 1, done

    def unfinished(state):
        _, (value, _), *_, steps, done = state
        return (steps < 0) | (~done & (steps < max_iterations) & jnp.isfinite(value))

    def watch(params, best):
        """The best parameters so far by the validation loss, if there is one."""
        return None if validation_loss is None else best.after(params, validation_loss(unravel(params)))

    # The first evaluation is a step of no length: the compiled program holds the loss once.
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(value_and_grad, params))
    true, false = jnp.ones((), bool), jnp.zeros((), bool)
    best = None if validation_loss is None else Best.before(params, nothing[0].dtype)
    initial = params, nothing, jnp.zeros_like(params), no_memory, true, false, best, jnp.int32(-1), false
    params, (value, _), *_, best, steps, done = lax.while_loop(unfinished, step, carried(initial))
    ended = jnp.where(done, Result.CONVERGED, Result.STEP_LIMIT)
    result = jnp.where(jnp.isfinite(value), ended, Result.NOT_FINITE)
    if best is not None:
        params, value = best.params, best.loss
    return Optimum(unravel(params), value, steps, result)


def minimize_from_each(loss: Callable[..., Float[Array, ""]], initial: PyTree, **options: Any) -> Optimum:
    """The lowest of the minima that `minimize` reaches from several initial values, in one `vmap`.

    Args:
        loss: `loss(params) -> scalar`.
        initial: where to begin, stacked along the leading axis of every array.
        options: those of `minimize`.

    Example:
        >>> import jax.numpy as jnp
        >>> optimum = minimize_from_each(lambda p: (p**2 - 1) ** 2 + p, jnp.array([2.0, -2.0]))
        >>> round(float(optimum.params), 2)
        -1.11
    """
    optima = jax.vmap(lambda params: minimize(loss, params, **options))(initial)
    return lowest(optima)


def _line_search(
    value_and_grad: Callable,
    params: Float[Array, " p"],
    start: tuple,
    direction: Float[Array, " p"],
    take_any: Bool[Array, ""],
) -> tuple[Float[Array, " p"], tuple, Float[Array, ""]]:
    """A step along `direction` that satisfies the weak Wolfe conditions: its end, value and gradient there, its length.

    By doubling and bisection (Lewis & Overton 2013, algorithm 2.6): one evaluation a trial, and one copy of the loss
    in the compiled program. The last point of sufficient decrease is taken where no trial satisfies both; the first
    trial, whatever its value, if `take_any`.
    """
    value, gradient = start
    slope = jnp.asarray(optax.tree.vdot(direction, gradient))
    dtype = value.dtype

    def trial(state):
        low, high, length, best, tries, _ = state
        point = optax.tree.add_scale(params, length, direction)
        found = value_and_grad(point)
        # False where the value is NaN: such a step is too long.
        falls = take_any | (found[0] <= value + _SUFFICIENT_DECREASE * length * slope)
        levels_off = jnp.asarray(optax.tree.vdot(direction, found[1])) >= _CURVATURE * slope
        low, high = jnp.where(falls, length, low), jnp.where(falls, high, length)
        best = select(falls, (point, found, length), best)
        longer = jnp.where(jnp.isinf(high), 2 * length, (low + high) / 2)
        return low, high, longer, best, tries + 1, take_any | (falls & levels_off)

    def unfinished(state):
        *_, tries, accepted = state
        return ~accepted & (tries < _LINE_SEARCH_TRIALS)

    bounds = jnp.asarray(0, dtype), jnp.asarray(jnp.inf, dtype), jnp.asarray(1, dtype)
    state = (*bounds, (params, start, bounds[0]), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    return lax.while_loop(unfinished, trial, carried(state))[3]
