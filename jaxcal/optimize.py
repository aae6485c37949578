"""Minibatch training with early stopping, L-BFGS, and many runs at once: a whole fit is one compiled loop."""

import enum
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks

# Keras's RMSprop: v <- 0.9 v + 0.1 g^2 from v = 0, and w <- w - rate g / (sqrt(v) + 1e-7), with epsilon outside
# the root, unlike optax's default.
keras_rmsprop = partial(optax.rmsprop, decay=0.9, eps=1e-7, eps_in_sqrt=False)


# The weak Wolfe conditions of L-BFGS's line search, and how often it tries; the usual values.
_SUFFICIENT_DECREASE, _CURVATURE, _LINE_SEARCH_TRIALS = 1e-4, 0.9, 30
# The fraction of a quasi-Newton step below which the step counts as cut short.
_CUT_SHORT = 1e-3
# So many steps may gain little without an end: L-BFGS knows little of the loss yet.
_EARLY_STEPS = 4


class Result(enum.IntEnum):
    """How an optimization ended: the values that an array of result codes holds."""

    CONVERGED = 0
    """The stopping rule was met."""
    STEP_LIMIT = 1
    """The allowed number of steps or epochs was used up first."""
    NOT_FINITE = 2
    """The loss became NaN or infinite, and the loop was left."""


class Optimum(NamedTuple):
    """What an optimization found.

    Attributes:
        params: the parameters, in the form in which they came.
        loss: the lowest loss met: of the validation rows where there are any.
        steps: how many steps or epochs were run.
        result: one of the values of `Result`.
    """

    params: PyTree
    loss: Float[Array, ""]
    steps: Int[Array, ""]
    result: Int[Array, ""]


def raise_unless_finite(optimum: Optimum) -> None:
    """Raise FloatingPointError if a loss became NaN or infinite; inside a transformation, do nothing."""
    if _checks.is_traced(optimum.result):
        return
    if np.any(np.asarray(optimum.result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"training diverged: the loss is NaN or infinite after {np.max(optimum.steps)} epochs. "
            "A lower learning_rate may help; throw=False returns the parameters as they are."
        )


def num_train(num_rows: int, validation_fraction: float) -> int:
    """How many rows are trained on: floor(n (1 - fraction)), as Keras has it; the rest are the validation set.

    Raises:
        ValueError: if the fraction lies outside (0, 1), or leaves no row to train on or none for validation.
    """
    _checks.check_fraction("validation_fraction", validation_fraction)
    # The margin keeps a fraction like 0.9 of 10 rows from falling one short by rounding.
    size = math.floor(num_rows * (1 - validation_fraction) + 1e-9)
    if not 0 < size < num_rows:
        raise ValueError(
            f"a validation_fraction of {validation_fraction:g} leaves {size} of {num_rows} rows to train on "
            f"and {num_rows - size} for validation; at least one of each is needed."
        )
    return size


def with_weight_decay(
    learning_rate: ArrayLike, *, optimizer: Callable[..., optax.GradientTransformation], weight_decay: ArrayLike
) -> optax.GradientTransformation:
    """An optimizer on a loss with the penalty weight_decay |w|^2 / 2, biases included.

    The penalty's gradient, weight_decay w, joins the loss's before the moments, as PyTorch's `Adam(weight_decay=...)`
    has it; `optax.adamw` adds it to the step.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = with_weight_decay(0.1, optimizer=optax.adam, weight_decay=0.01)
        >>> params = jnp.array([5.0, 0.0, -3.0])
        >>> updates, _ = optimizer.update(jnp.zeros(3), optimizer.init(params), params)
        >>> print(updates.round(3))
        [-0.1 -0.   0.1]
    """
    rate = jnp.asarray(learning_rate)
    return optax.chain(optax.add_decayed_weights(jnp.asarray(weight_decay, rate.dtype)), optimizer(rate))


def train_minibatches(
    loss: Callable[[PyTree, PyTree, PRNGKeyArray | None], Float[Array, " rows"]],
    params: PyTree,
    data: PyTree[Array],
    validation: PyTree[Array],
    *,
    key: PRNGKeyArray,
    optimizer: Callable[..., optax.GradientTransformation] = keras_rmsprop,
    learning_rate: ArrayLike = 1e-3,
    batch_size: int = 32,
    max_epochs: int = 1000,
    patience: int = 10,
    restore_best: bool = True,
    num_rows: tuple[Int[Array, ""], Int[Array, ""]] | None = None,
) -> Optimum:
    """Minimize the mean of a loss over rows by minibatches, until the validation loss stops improving.

    The semantics are those of Keras: each epoch takes all rows once, in a new order; the last batch may be
    smaller, and is averaged over its own rows; the validation loss is measured after each epoch, and training
    stops once it has not fallen below its minimum for `patience` epochs in a row.

    Safe under `jit` and `vmap` (over keys, folds of equal size, learning rates). No derivative passes: the
    inputs are held constant, since a loop of unknown length has no reverse mode.

    Args:
        loss: `loss(params, rows, key)`, one value a row; `rows` is what `data` is, cut down to a batch. `key`
            is a new one each batch, and None for the validation loss, which is without dropout.
            A function at module level (or a Module) compiles once; a new lambda compiles anew.
        params: initial parameters; floating-point arrays in it are trained, everything else is kept.
        data: arrays with a common leading axis, the training rows.
        validation: the same for the validation rows.
        key: random key of the order of the rows and of `loss`.
        optimizer: a function from the learning rate to an optax optimizer, such as `optax.adam`.
        learning_rate: its learning rate.
        batch_size: rows a step; at most all of them.
        max_epochs: number of epochs to stop at.
        patience: number of epochs without improvement to stop at.
        restore_best: whether to return the parameters of the best epoch in place of those of the last one.
        num_rows: how many of the training and of the validation rows there are, where the arrays have more: those
            after them take no part, and cost nothing but memory. For problems of several sizes in one compiled
            program, or one after another in `over_runs`.

    Raises:
        ValueError: if batch_size, max_epochs or patience is less than 1, or the learning rate not positive.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def squared_error(slope, rows, key):
        ...     x, y = rows
        ...     return (slope * x - y) ** 2
        >>> x = jnp.linspace(-1, 1, 50)
        >>> optimum = train_minibatches(
        ...     squared_error, jnp.zeros(()), (x, 3 * x), (x, 3 * x),
        ...     key=jax.random.key(0), optimizer=optax.sgd, learning_rate=0.1,
        ... )
        >>> round(float(optimum.params), 3)
        3.0
    """
    for name, value in (("batch_size", batch_size), ("max_epochs", max_epochs), ("patience", patience)):
        _checks.check_at_least(name, value, 1)
    _checks.check_positive("learning_rate", learning_rate)
    lengths = tuple(jax.tree.leaves(part)[0].shape[0] for part in (data, validation))
    return _train(
        loss,
        params,
        data,
        validation,
        lengths if num_rows is None else num_rows,
        key,
        optimizer,
        jnp.asarray(learning_rate),
        min(batch_size, lengths[0]),
        jnp.asarray(max_epochs),
        jnp.asarray(patience),
        restore_best,
    )


class _State(NamedTuple):
    """What the loop over epochs carries."""

    params: PyTree
    optimizer: PyTree
    best_params: PyTree
    best_loss: Float[Array, ""]
    epochs: Int[Array, ""]
    stale_epochs: Int[Array, ""]
    finite: Bool[Array, ""]


@eqx.filter_jit
def _train(
    loss,
    params,
    data,
    validation,
    num_rows,
    key,
    optimizer,
    learning_rate,
    batch_size,
    max_epochs,
    patience,
    restore_best,
) -> Optimum:
    params, fixed = eqx.partition(params, eqx.is_inexact_array)
    params, data, validation, learning_rate = lax.stop_gradient((params, data, validation, learning_rate))
    optimizer = optimizer(learning_rate.astype(jnp.result_type(*jax.tree.leaves(params))))

    def batch_loss(params, rows, included, key):
        return jnp.mean(loss(eqx.combine(params, fixed), rows, key), where=included)

    def validation_loss(params):
        values = loss(eqx.combine(params, fixed), validation, None)
        return jnp.mean(values, where=jnp.arange(values.shape[0]) < num_rows[1])

    def epoch(state: _State) -> _State:
        num_batches, batch = _batches(data, num_rows[0], batch_size, jax.random.fold_in(key, state.epochs))

        def step(i, carry):
            params, state = carry
            updates, state = optimizer.update(jax.grad(batch_loss)(params, *batch(i)), state, params)
            return optax.apply_updates(params, updates), state

        params, optimizer_state = lax.fori_loop(0, num_batches, step, (state.params, state.optimizer))
        value = validation_loss(params)
        improved = value < state.best_loss
        return _State(
            params=params,
            optimizer=optimizer_state,
            best_params=_select(improved, params, state.best_params) if restore_best else None,
            best_loss=jnp.where(improved, value, state.best_loss),
            epochs=state.epochs + 1,
            stale_epochs=jnp.where(improved, 0, state.stale_epochs + 1),
            finite=jnp.isfinite(value),
        )

    def unfinished(state: _State) -> Bool[Array, ""]:
        return state.finite & (state.epochs < max_epochs) & (state.stale_epochs < patience)

    infinity = jnp.full_like(jax.eval_shape(validation_loss, params), jnp.inf)
    initial = _State(
        params=params,
        optimizer=optimizer.init(params),
        best_params=params if restore_best else None,
        best_loss=infinity,
        epochs=jnp.zeros((), jnp.int32),
        stale_epochs=jnp.zeros((), jnp.int32),
        finite=jnp.ones((), bool),
    )
    final = lax.while_loop(unfinished, epoch, initial)
    ended = jnp.where(final.stale_epochs < patience, Result.STEP_LIMIT, Result.CONVERGED)
    return Optimum(
        eqx.combine(final.best_params if restore_best else final.params, fixed),
        final.best_loss,
        final.epochs,
        jnp.where(final.finite, ended, Result.NOT_FINITE),
    )


def _batches(data: PyTree[Array], num_rows: int | Int[Array, ""], batch_size: int, key: PRNGKeyArray):
    """How many batches the rows make in a random order, and a function of i that gives the batch i.

    A batch is its rows, which of them to include, since the last one is filled up, and a key.
    """
    length = jax.tree.leaves(data)[0].shape[0]
    most = math.ceil(length / batch_size)
    order_key, loss_key = jax.random.split(key)
    order = jax.random.permutation(order_key, length)
    if not isinstance(num_rows, int):
        # The rows that there are, in their random order, come first.
        order = order[jnp.nonzero(order < num_rows, size=length)[0]]
    order = jnp.resize(order, (most, batch_size))
    keys = jax.random.split(loss_key, most)

    def batch(i):
        included = i * batch_size + jnp.arange(batch_size) < num_rows
        return jax.tree.map(lambda a: a[order[i]], data), included, keys[i]

    return -(-num_rows // batch_size), batch


def _select(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def minimize(
    loss: Callable[..., Float[Array, ""]],
    params: PyTree,
    *,
    max_iterations: int | Int[Array, ""] = 1000,
    loss_tolerance: float = 2.2e-9,
    gradient_tolerance: float = 1e-5,
    gain_tolerance: float = 0.0,
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
        params: where to start: a pytree of floating-point arrays.
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
        stale = False if best is None else best.stale_steps >= patience
        descent, memory = lbfgs.update(gradient, _select(forget, lbfgs.init(params), memory), params)
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
        if validation_loss is None:
            return None
        loss = validation_loss(unravel(params))
        improved = loss < best.loss
        return _select(improved, _Best(params, loss, jnp.int32(0)), best._replace(stale_steps=best.stale_steps + 1))

    # The first evaluation is a step of no length: the compiled program holds the loss once.
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(value_and_grad, params))
    true, false = jnp.ones((), bool), jnp.zeros((), bool)
    best = None if validation_loss is None else _Best(params, jnp.full_like(nothing[0], jnp.inf), jnp.int32(0))
    initial = params, nothing, jnp.zeros_like(params), lbfgs.init(params), true, false, best, jnp.int32(-1), false
    params, (value, _), *_, best, steps, done = lax.while_loop(unfinished, step, initial)
    ended = jnp.where(done, Result.CONVERGED, Result.STEP_LIMIT)
    result = jnp.where(jnp.isfinite(value), ended, Result.NOT_FINITE)
    if best is not None:
        params, value = best.params, best.loss
    return Optimum(unravel(params), value, steps, result)


def minimize_from_each(loss: Callable[..., Float[Array, ""]], starts: PyTree, **options) -> Optimum:
    """The lowest of the minima that `minimize` reaches from several starts, in one `vmap`.

    Args:
        loss: `loss(params) -> scalar`.
        starts: where to start, stacked along the leading axis of every array.
        options: those of `minimize`.

    Example:
        >>> import jax.numpy as jnp
        >>> optimum = minimize_from_each(lambda p: (p**2 - 1) ** 2 + p, jnp.array([2.0, -2.0]))
        >>> round(float(optimum.params), 2)
        -1.11
    """
    optima = jax.vmap(lambda params: minimize(loss, params, **options))(starts)
    return lowest(optima)


def lowest(optima: Optimum) -> Optimum:
    """The one of the lowest loss, of those stacked along the leading axis of every array; NaN is the greatest."""
    best = jnp.argmin(jnp.where(jnp.isnan(optima.loss), jnp.inf, optima.loss))
    return jax.tree.map(lambda leaf: leaf[best], optima)


class _Best(NamedTuple):
    """What `minimize` has found by its validation loss, and for how many steps there was nothing better."""

    params: Float[Array, " p"]
    loss: Float[Array, ""]
    stale_steps: Int[Array, ""]


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
        best = _select(falls, (point, found, length), best)
        longer = jnp.where(jnp.isinf(high), 2 * length, (low + high) / 2)
        return low, high, longer, best, tries + 1, take_any | (falls & levels_off)

    def unfinished(state):
        *_, tries, accepted = state
        return ~accepted & (tries < _LINE_SEARCH_TRIALS)

    bounds = jnp.asarray(0, dtype), jnp.asarray(jnp.inf, dtype), jnp.asarray(1, dtype)
    state = (*bounds, (params, start, bounds[0]), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    return lax.while_loop(unfinished, trial, state)[3]


def first_finite(attempt: Callable[[Int[Array, ""]], PyTree], tries: int) -> PyTree:
    """The result of attempt(0), or of the first of attempt(1), attempt(2), ... that does not end in NaN.

    Args:
        attempt: gives a record of arrays, one of them its `result`, a value of `Result`.
        tries: how often at most.
    """

    def failed(state):
        tried, found = state
        return (tried < tries) & (found.result == Result.NOT_FINITE)

    def again(state):
        tried, _ = state
        return tried + 1, attempt(tried)

    attempt = jax.jit(attempt)  # traced once, not here and in the loop
    shapes = jax.eval_shape(attempt, jnp.int32(0))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    nothing = eqx.tree_at(lambda n: n.result, nothing, jnp.full_like(nothing.result, Result.NOT_FINITE))
    return lax.while_loop(failed, again, (jnp.int32(0), nothing))[1]


def over_runs(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun` over the leading axis of its array arguments: one run after another on a CPU, else all in one `vmap`.

    On a CPU a vmap of an optimizer gains nothing: every run waits for the slowest line search. On an accelerator
    it is what fills the device. Arguments that are not arrays are shared by all runs.

    Example:
        >>> import jax.numpy as jnp
        >>> over_runs(lambda x: x**2)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 4.0]
    """

    def mapped(*args: PyTree) -> PyTree:
        arrays, static = eqx.partition(args, eqx.is_array)
        # What is not an array is the same in every run, so the trace of one run tells it.
        static_out = []

        def run(arrays):
            out_arrays, out = eqx.partition(fun(*eqx.combine(arrays, static)), eqx.is_array)
            static_out.append(out)
            return out_arrays

        run = jax.jit(run)  # traced once for both
        out_arrays = lax.platform_dependent(arrays, cpu=partial(lax.map, run), default=jax.vmap(run))
        return eqx.combine(out_arrays, static_out[0])

    return mapped


def one_run_at_a_time(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, with the rule that a `vmap` of it becomes `over_runs`.

    XLA's CPU client with a pool of two threads can hang for ever in a batched loop that holds a line search over
    Cholesky factorizations. With this around the loop, `vmap` is safe on every device. `fun` takes and returns
    pytrees of arrays.
    """
    safe = jax.custom_batching.custom_vmap(fun)

    @safe.def_vmap
    def rule(axis_size, in_batched, *args):
        del axis_size
        batched = jax.tree.map(lambda a, b: a if b else None, args, tuple(in_batched))
        shared = jax.tree.map(lambda a, b: None if b else a, args, tuple(in_batched))
        out = lax.platform_dependent(
            batched,
            cpu=partial(lax.map, lambda batched: safe(*eqx.combine(batched, shared))),
            default=jax.vmap(lambda batched: fun(*eqx.combine(batched, shared))),
        )
        return out, jax.tree.map(lambda _: True, out)

    return safe
