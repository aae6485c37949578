"""L-BFGS with a weak Wolfe line search: a loop of the host, or a part of a compiled program.

Every round is one evaluation of the loss, a trial of the line search. `_advance` decides what to try next. It is a
function of NumPy's or of JAX's arrays: see `optimize.iterate`.
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
from jaxcal.optimize.result import EarlyStopping, Optimum, Result, lowest

# The number of corrections of a quasi-Newton step.
_CORRECTIONS = 10
# The constants of the weak Wolfe conditions, and the most trials of a line search; the usual values.
_SUFFICIENT_DECREASE, _CURVATURE, _LINE_SEARCH_TRIALS = 1e-4, 0.9, 30
# The fraction of a quasi-Newton step below which the step counts as cut short.
_CUT_SHORT = 1e-3
# The number of first steps that may gain little without an end: L-BFGS knows little of the loss yet.
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
    """Descend to a minimum by L-BFGS, as `minimize` does, with a function that gives values and gradients.

    Args:
        evaluate: gives the loss and its gradient [p] at a vector [p]. A step to a NaN counts as too long.
        start: where to begin. All is computed in its dtype. Values in float32 need a line search in float32, which ends
            when rounding hides the gain.
        max_iterations: as of `minimize`, like the following arguments.
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

    It stops as scipy's L-BFGS-B does by default, in the first of these cases:

    - The loss falls by at most `loss_tolerance` times max(|old|, |new|, 1).
    - No entry of the gradient exceeds `gradient_tolerance`.
    - `max_iterations` steps have been made.

    It may stop earlier by `gain_tolerance`. If the loss is NaN the step is shortened. If the initial loss is NaN the
    loop ends at once.

    Meant for use inside a jitted function; see `one_run_at_a_time` for its use under `vmap`.

    Args:
        loss: `loss(params) -> scalar`.
        params: initial values: a pytree of floating-point arrays.
        max_iterations: number of steps to stop at.
        loss_tolerance: relative decrease of the loss to stop at.
        gradient_tolerance: largest entry of the gradient to stop at.
        gain_tolerance: decrease of the loss to stop at, in its own units. The loop stops after two steps in a row that
            gained less, if the quadratic model also predicts less. The first four steps do not count.
        validation_loss: `validation_loss(params) -> scalar`, for early stopping. The returned parameters are the best
            by it among the initial parameters and the parameters after each step.
        patience: number of steps in a row without a lower validation loss to stop at.

    Example:
        >>> import jax.numpy as jnp
        >>> optimum = minimize(lambda p: (p - 3) ** 2, jnp.asarray(0.0))
        >>> round(float(optimum.params), 3), Result(int(optimum.result)).name
        (3.0, 'CONVERGED')
    """
    # The parameters are one vector: for a tree, XLA would compile every update once for each leaf.
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
        initial: the initial values, stacked along the leading axis of every array.
        options: the options of `minimize`.

    Example:
        >>> import jax.numpy as jnp
        >>> optimum = minimize_from_each(lambda p: (p**2 - 1) ** 2 + p, jnp.array([2.0, -2.0]))
        >>> round(float(optimum.params), 2)
        -1.11
    """
    optima = jax.vmap(lambda params: minimize(loss, params, **options))(initial)
    return lowest(optima)


class _Rules(NamedTuple):
    """The stopping rules: options of `minimize`, in the dtype of the place."""

    max_iterations: Int[AnyArray, ""]
    loss_tolerance: Scalar
    gradient_tolerance: Scalar
    gain_tolerance: Scalar
    validation_loss: Callable[[Vector], Scalar] | None = None
    patience: int | Int[AnyArray, ""] = 0

    @classmethod
    def of(cls, xp: ModuleType, dtype: Any, max_iterations: Any, *tolerances: Any) -> "_Rules":
        """The rules without a validation loss."""
        return cls(xp.asarray(max_iterations), *(xp.asarray(tolerance, dtype) for tolerance in tolerances))


class _EvaluatedPoint(NamedTuple):
    """A place [p] at which the loss is known, with its value and its gradient [p]."""

    place: Vector
    value: Scalar
    gradient: Vector


class _Memory(NamedTuple):
    """The last corrections, the newest one last; 0 before there are as many as `_CORRECTIONS`.

    Byrd, Nocedal & Schnabel, "Representations of quasi-Newton matrices and their use in limited memory methods",
    Mathematical Programming 1994. With the inverse a step takes four products, in place of twenty in sequence.

    Attributes:
        moves: s, the moves of the place [m, p].
        changes: y, the changes of the gradient [m, p].
        inverse: the inverse of the triangle of the products s_i'y_j for i <= j [m, m].
    """

    moves: Float[AnyArray, "m p"]
    changes: Float[AnyArray, "m p"]
    inverse: Float[AnyArray, "m m"]

    def after(
        self, xp: ModuleType, move: Vector, change: Vector, gradient: Vector, fresh: Bool[AnyArray, ""]
    ) -> tuple["_Memory", Vector]:
        """The memory after a step (empty if `fresh`), and the inverse of the Hessian times the gradient at its end.

        A correction without curvature has no effect.
        """
        moves = xp.concatenate([self.moves[1:], move[None]])
        changes = xp.concatenate([self.changes[1:], change[None]])
        products = _dots(moves, change)
        curvature, older = products[-1], self.inverse[1:, 1:]
        weight = xp.where(curvature == 0, 0, 1 / xp.where(curvature == 0, 1, curvature))
        # `[[R, r], [0, c]]^-1 = [[R^-1, -R^-1 r / c], [0, 1 / c]]`, with r = S y and c = s . y of the new pair.
        column = xp.concatenate([-weight * _dots(older, products[:-1]), weight[None]])
        rows = xp.concatenate([older, xp.zeros_like(older[:1])])
        memory = _Memory(moves, changes, xp.concatenate([rows, column[:, None]], axis=1))
        memory = _Memory(*(xp.where(fresh, 0, part) for part in memory))
        bend = _dot(change, change)
        # The scale of the initial inverse is s . y / y . y.
        known = xp.where(bend > 0, curvature / xp.where(bend > 0, bend, 1), 1)
        # Without memory a step has at most the length 1.
        shortened = 1 / xp.maximum(xp.sqrt(_dot(gradient, gradient)), 1)
        return memory, memory.times(gradient, xp.where(fresh, shortened, known))

    def times(self, gradient: Vector, scale: Scalar) -> Vector:
        """The inverse of the Hessian times a gradient; the initial inverse is `scale` times the identity: eq. 3.1."""
        # `h r + S' R^-T (D w - h Y r)`, with w = R^-1 S g, r = g - Y' w, h the scale and D = diag(s_i . y_i).
        weights = _dots(self.inverse, _dots(self.moves, gradient))
        rest = gradient - _dots(self.changes.T, weights)
        curvatures = (self.moves * self.changes).sum(-1)
        along = _dots(self.inverse.T, curvatures * weights - scale * _dots(self.changes, rest))
        return scale * rest + _dots(self.moves.T, along)


class _Descent(NamedTuple):
    """The place of a descent, and its next trial.

    Attributes:
        start: the point where the step begins.
        direction: the direction of the step [p].
        slope: the slope of the loss along the direction.
        low: the longest length so far at which the loss has fallen enough; 0 if there is none.
        high: the shortest length so far at which it has not, or infinity.
        length: the length to try next, as a multiple of the direction.
        tries: how many lengths have been tried.
        best: the end of the step at the length `low`.
        memory: the corrections.
        fresh: whether there are no corrections.
        slow: whether the last step gained little, and the quadratic model predicts little.
        steps: how many steps have been made; -1 before the first evaluation.
        done: whether a stopping rule is met.
        watched: the best place by the validation loss; None if there is none.
    """

    start: _EvaluatedPoint
    direction: Vector
    slope: Scalar
    low: Scalar
    high: Scalar
    length: Scalar
    tries: Int[AnyArray, ""]
    best: _EvaluatedPoint
    memory: _Memory
    fresh: Bool[AnyArray, ""]
    slow: Bool[AnyArray, ""]
    steps: Int[AnyArray, ""]
    done: Bool[AnyArray, ""]
    watched: EarlyStopping | None

    @classmethod
    def at(cls, xp: ModuleType, place: Vector, rules: _Rules) -> "_Descent":
        """The descent before the first evaluation, which is a step of length zero."""
        zero, false, zeros = xp.zeros((), place.dtype), xp.zeros((), bool), xp.zeros_like(place)
        point = _EvaluatedPoint(place, zero, zeros)
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
            watched=None if rules.validation_loss is None else EarlyStopping.before(place, place.dtype),
        )

    @property
    def asked(self) -> Vector:
        """The place at which the loss is to be evaluated."""
        return self.start.place + self.length * self.direction

    def optimum(self, xp: ModuleType) -> Optimum:
        """The result of a descent that has ended."""
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


def _advance(xp: ModuleType, descent: _Descent, evaluation: tuple[Scalar, Vector], *, rules: _Rules) -> _Descent:
    """The descent after one more trial of the line search, which may be the last one of a step.

    The line search uses doubling and bisection (Lewis & Overton 2013, algorithm 2.6). A step ends at the first trial
    that satisfies the weak Wolfe conditions. If no trial does, it ends at the last trial with sufficient decrease.
    """
    first, length, slope = descent.steps < 0, descent.length, descent.slope
    point = _EvaluatedPoint(descent.asked, *(xp.asarray(part, length.dtype) for part in evaluation))
    # False if the value is NaN: such a step is too long.
    # Sufficient decrease: f(x + l d) <= f(x) + c1 l slope. Curvature: g(x + l d) . d >= c2 slope.
    falls = first | (point.value <= descent.start.value + _SUFFICIENT_DECREASE * length * slope)
    levels_off = _dot(descent.direction, point.gradient) >= _CURVATURE * slope
    low, high = xp.where(falls, length, descent.low), xp.where(falls, descent.high, length)
    tried = descent._replace(
        low=low,
        high=high,
        length=xp.where(xp.isinf(high), 2 * length, (low + high) / 2),
        tries=descent.tries + 1,
        best=_EvaluatedPoint(*(xp.where(falls, new, old) for new, old in zip(point, descent.best, strict=True))),
    )
    ended = first | (falls & levels_off) | (tried.tries >= _LINE_SEARCH_TRIALS)
    return when(xp, ended, lambda: _stepped(xp, tried, rules), tried)


def _stepped(xp: ModuleType, descent: _Descent, rules: _Rules) -> _Descent:
    """The descent after a step, at the beginning of the next one."""
    first, old, new, watched = descent.steps < 0, descent.start, descent.best, descent.watched
    gain, gradient = old.value - new.value, new.gradient
    stalled = gain <= rules.loss_tolerance * xp.maximum(xp.maximum(abs(old.value), abs(new.value)), 1)
    # A stall on a very short step shows a bad direction, not an optimum. The descent goes on once without memory.
    forget = stalled & (descent.low < _CUT_SHORT) & ~descent.fresh
    fresh = first | forget
    memory, steepest = descent.memory.after(xp, new.place - old.place, gradient - old.gradient, gradient, fresh)
    slope = -_dot(gradient, steepest)
    # A single slow step may have had a bad length, and the first steps may be slow at the end of a plateau. On a
    # plateau gains are small, too, so the quadratic model must also predict a small gain.
    # The quadratic model's gain is g' H^-1 g / 2 = -slope / 2.
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
    """The inner product in full precision on every device, unlike a product of matrices."""
    return (one * other).sum()


def _dots(rows: Float[AnyArray, "k p"], vector: Vector) -> Float[AnyArray, " k"]:
    return (rows * vector[None]).sum(-1)
