"""L-BFGS with a weak Wolfe line search: a loop of the host, or a part of a compiled program.

Every round is one evaluation of the loss, a trial of the line search. `_advance` says what to try next: a function of
NumPy's or of JAX's arrays, see `optimize.iterate`.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxcal._numpy import AnyArray
from jaxcal.optimize.iterate import iterate, when
from jaxcal.optimize.result import Best, Optimum, Result, lowest

# So many corrections make the quasi-Newton step.
_CORRECTIONS = 10
# The weak Wolfe conditions of the line search, and how often it tries; the usual values.
_SUFFICIENT_DECREASE, _CURVATURE, _LINE_SEARCH_TRIALS = 1e-4, 0.9, 30
# The fraction of a quasi-Newton step below which the step counts as cut short.
_CUT_SHORT = 1e-3
# So many steps may gain little without an end: L-BFGS knows little of the loss yet.
_EARLY_STEPS = 4

Vector = Float[AnyArray, " p"]
Scalar = Float[AnyArray, ""]


def descend(
    evaluate: Callable[[Vector], tuple[Scalar, Vector]],
    start: Vector,
    *,
    max_iterations: int | Int[AnyArray, ""] = 1000,
    loss_tolerance: float | Scalar = 2.2e-9,
    gradient_tolerance: float | Scalar = 1e-5,
    gain_tolerance: float | Scalar = 0.0,
    on_host: bool,
) -> Optimum:
    """Descend to a minimum by L-BFGS, as `minimize` does, with values and gradients from wherever they come.

    Args:
        evaluate: the loss and its gradient [p] at a vector [p]; where the loss is NaN, steps are too long.
        start: where to begin. All is computed in its dtype: values in float32 need a line search in float32, which
            ends where rounding hides the gain.
        max_iterations: as of `minimize`, like the following ones.
        loss_tolerance: relative decrease of the loss to stop at.
        gradient_tolerance: largest entry of the gradient to stop at.
        gain_tolerance: decrease of the loss to stop at, in its own units.
        on_host: as of `optimize.iterate`; the result has NumPy's arrays then.

    Example:
        >>> import numpy as np
        >>> evaluate = lambda vector: (np.sum((vector - 3) ** 2), 2 * (vector - 3))
        >>> optimum = descend(evaluate, np.zeros(2), on_host=True)
        >>> optimum.params.round(3).tolist(), Result(int(optimum.result)).name
        ([3.0, 3.0], 'CONVERGED')
    """
    xp = np if on_host else jnp
    rules = _Rules.of(xp, start.dtype, max_iterations, loss_tolerance, gradient_tolerance, gain_tolerance)
    return _descended(evaluate, start, rules, on_host=on_host).optimum(xp)


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
    # One vector: for a tree, XLA would compile every update once a leaf.
    start, unravel = ravel_pytree(params)
    rules = _Rules.of(jnp, start.dtype, max_iterations, loss_tolerance, gradient_tolerance, gain_tolerance)
    if validation_loss is not None:
        rules = rules._replace(validation_loss=lambda vector: validation_loss(unravel(vector)), patience=patience)
    end = _descended(jax.value_and_grad(lambda vector: loss(unravel(vector))), start, rules, on_host=False)
    optimum = end.optimum(jnp)
    if end.watched is not None:
        optimum = optimum._replace(params=end.watched.params, loss=end.watched.loss)
    return optimum._replace(params=unravel(optimum.params))


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


class _Rules(NamedTuple):
    """When to stop: options of `minimize`, in the dtype of the place."""

    max_iterations: Int[AnyArray, ""]
    loss_tolerance: Scalar
    gradient_tolerance: Scalar
    gain_tolerance: Scalar
    validation_loss: Callable[[Vector], Scalar] | None = None
    patience: int | Int[AnyArray, ""] = 0

    @classmethod
    def of(cls, xp: ModuleType, dtype: Any, max_iterations: Any, *tolerances: Any) -> "_Rules":
        """Those without a validation loss."""
        return cls(xp.asarray(max_iterations), *(xp.asarray(tolerance, dtype) for tolerance in tolerances))


class _Point(NamedTuple):
    """Where the loss is known: the place [p], its value and its gradient [p]."""

    place: Vector
    value: Scalar
    gradient: Vector


class _Memory(NamedTuple):
    """The last corrections, the newest one last; 0 where there have not been so many.

    Byrd, Nocedal & Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
    Mathematical Programming 1994. The inverse makes a step of four products in place of twenty in a row.

    Attributes:
        moves: s, of the place [m, p].
        changes: y, of the gradient [m, p].
        inverse: of the triangle of the products s_i'y_j for i <= j [m, m].
    """

    moves: Float[AnyArray, "m p"]
    changes: Float[AnyArray, "m p"]
    inverse: Float[AnyArray, "m m"]

    def after(
        self, xp: ModuleType, move: Vector, change: Vector, gradient: Vector, fresh: Bool[AnyArray, ""]
    ) -> tuple["_Memory", Vector]:
        """The memory after a step, none if `fresh`, and the inverse of the Hessian times the gradient at its end.

        A correction without curvature has no part in it.
        """
        moves = xp.concatenate([self.moves[1:], move[None]])
        changes = xp.concatenate([self.changes[1:], change[None]])
        products = _dots(moves, change)
        curvature, older = products[-1], self.inverse[1:, 1:]
        weight = xp.where(curvature == 0, 0, 1 / xp.where(curvature == 0, 1, curvature))
        column = xp.concatenate([-weight * _dots(older, products[:-1]), weight[None]])
        rows = xp.concatenate([older, xp.zeros_like(older[:1])])
        memory = _Memory(moves, changes, xp.concatenate([rows, column[:, None]], axis=1))
        memory = _Memory(*(xp.where(fresh, 0, part) for part in memory))
        bend = _dot(change, change)
        known = xp.where(bend > 0, curvature / xp.where(bend > 0, bend, 1), 1)
        # Without memory a step has the length 1 at most.
        shortened = 1 / xp.maximum(xp.sqrt(_dot(gradient, gradient)), 1)
        return memory, memory.times(gradient, xp.where(fresh, shortened, known))

    def times(self, gradient: Vector, scale: Scalar) -> Vector:
        """The inverse of the Hessian times a gradient, where `scale` times the identity was known before: eq. 3.1."""
        weights = _dots(self.inverse, _dots(self.moves, gradient))
        rest = gradient - _dots(self.changes.T, weights)
        curvatures = (self.moves * self.changes).sum(-1)
        along = _dots(self.inverse.T, curvatures * weights - scale * _dots(self.changes, rest))
        return scale * rest + _dots(self.moves.T, along)


class _Descent(NamedTuple):
    """Where a descent is, and what it tries next.

    Attributes:
        start: where the step begins.
        direction: of the step [p].
        slope: of the loss along it.
        low: the longest length that falls so far, 0 if there is none.
        high: the shortest length that does not, or infinity.
        length: to try next, as a multiple of the direction.
        tries: how many lengths have been tried.
        best: the end of the step at the length `low`.
        memory: the corrections.
        fresh: whether there are none.
        slow: whether the last step gained little, and little is foreseen.
        steps: how many have been made; -1 before the first evaluation.
        done: whether a stopping rule is met.
        watched: the best place by the validation loss; None if there is none.
    """

    start: _Point
    direction: Vector
    slope: Scalar
    low: Scalar
    high: Scalar
    length: Scalar
    tries: Int[AnyArray, ""]
    best: _Point
    memory: _Memory
    fresh: Bool[AnyArray, ""]
    slow: Bool[AnyArray, ""]
    steps: Int[AnyArray, ""]
    done: Bool[AnyArray, ""]
    watched: Best | None

    @classmethod
    def at(cls, xp: ModuleType, place: Vector, rules: _Rules) -> "_Descent":
        """Before the first evaluation, which is a step of no length."""
        zero, false, zeros = xp.zeros((), place.dtype), xp.zeros((), bool), xp.zeros_like(place)
        point = _Point(place, zero, zeros)
        corrections = xp.zeros((_CORRECTIONS, *place.shape), place.dtype)
        return cls(
            start=point,
            direction=zeros,
            slope=zero,
            low=zero,
            high=zero + np.inf,
            length=zero + 1,
            tries=xp.zeros((), np.int32),
            best=point,
            memory=_Memory(corrections, corrections, xp.zeros((_CORRECTIONS, _CORRECTIONS), place.dtype)),
            fresh=~false,
            slow=false,
            steps=xp.full((), -1, np.int32),
            done=false,
            watched=None if rules.validation_loss is None else Best.before(place, place.dtype),
        )

    @property
    def asked(self) -> Vector:
        """Where the loss is to be evaluated."""
        return self.start.place + self.length * self.direction

    def optimum(self, xp: ModuleType) -> Optimum:
        """What a descent that has ended has found."""
        ended = xp.where(self.done, Result.CONVERGED, Result.STEP_LIMIT)
        result = xp.where(xp.isfinite(self.start.value), ended, Result.NOT_FINITE)
        return Optimum(self.start.place, self.start.value, self.steps, result)


def _descended(evaluate: Callable, start: Vector, rules: _Rules, *, on_host: bool) -> _Descent:
    """The end of a descent."""
    xp = np if on_host else jnp

    def unfinished(descent: _Descent) -> Bool[AnyArray, ""]:
        goes_on = ~descent.done & (descent.steps < rules.max_iterations) & xp.isfinite(descent.start.value)
        return (descent.steps < 0) | goes_on

    ask, advance = (lambda descent: evaluate(descent.asked)), partial(_advance, rules=rules)
    return iterate(ask, advance, _Descent.at(xp, start, rules), unfinished, on_host=on_host)


def _advance(xp: ModuleType, descent: _Descent, found: tuple[Scalar, Vector], *, rules: _Rules) -> _Descent:
    """The descent after one more trial of the line search, which may be the last one of a step.

    By doubling and bisection (Lewis & Overton 2013, algorithm 2.6). A step ends at the first trial that satisfies the
    weak Wolfe conditions; where none does, at the last one of sufficient decrease.
    """
    first, length, slope = descent.steps < 0, descent.length, descent.slope
    point = _Point(descent.asked, *(xp.asarray(part, length.dtype) for part in found))
    # False where the value is NaN: such a step is too long.
    falls = first | (point.value <= descent.start.value + _SUFFICIENT_DECREASE * length * slope)
    levels_off = _dot(descent.direction, point.gradient) >= _CURVATURE * slope
    low, high = xp.where(falls, length, descent.low), xp.where(falls, descent.high, length)
    tried = descent._replace(
        low=low,
        high=high,
        length=xp.where(xp.isinf(high), 2 * length, (low + high) / 2),
        tries=descent.tries + 1,
        best=_Point(*(xp.where(falls, new, old) for new, old in zip(point, descent.best, strict=True))),
    )
    ended = first | (falls & levels_off) | (tried.tries >= _LINE_SEARCH_TRIALS)
    return when(xp, ended, lambda: _stepped(xp, tried, rules), tried)


def _stepped(xp: ModuleType, descent: _Descent, rules: _Rules) -> _Descent:
    """The descent after a step, at the begin of the next one."""
    first, old, new, watched = descent.steps < 0, descent.start, descent.best, descent.watched
    gain, gradient = old.value - new.value, new.gradient
    stalled = gain <= rules.loss_tolerance * xp.maximum(xp.maximum(abs(old.value), abs(new.value)), 1)
    # A stall on a step cut this short tells of a bad direction, not of an optimum: go on without memory, once.
    forget = stalled & (descent.low < _CUT_SHORT) & ~descent.fresh
    fresh = first | forget
    memory, steepest = descent.memory.after(xp, new.place - old.place, gradient - old.gradient, gradient, fresh)
    slope = -_dot(gradient, steepest)
    # One slow step alone may be a step of a bad length; the first ones, a plateau's end. Small gains alone may be those
    # of a plateau: the quadratic model must foresee no more, either.
    slow = (descent.steps >= _EARLY_STEPS) & (gain < rules.gain_tolerance) & (-slope / 2 < rules.gain_tolerance)
    flat = xp.max(abs(gradient)) <= rules.gradient_tolerance
    done = (stalled & ~forget) | flat | (descent.slow & slow)
    if rules.validation_loss is not None and watched is not None:
        watched = watched.after(new.place, xp.asarray(rules.validation_loss(new.place), new.place.dtype))
        done = done | (watched.stale >= rules.patience)
    zero = xp.zeros_like(descent.low)
    return descent._replace(
        start=new,
        direction=-steepest,
        slope=slope,
        low=zero,
        high=zero + np.inf,
        length=zero + 1,
        tries=xp.zeros_like(descent.tries),
        memory=memory,
        fresh=fresh,
        slow=slow,
        steps=descent.steps + 1,
        done=~first & done,
        watched=watched,
    )


def _dot(one: Vector, other: Vector) -> Scalar:
    """In full precision on every device, which a product of matrices is not."""
    return (one * other).sum()


def _dots(rows: Float[AnyArray, "k p"], vector: Vector) -> Float[AnyArray, " k"]:
    return (rows * vector[None]).sum(-1)
