"""Training by minibatches with early stopping, or by a fixed number of full-batch steps, as one compiled loop."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks, _programs, _random, progress
from jaxcal._numpy import bucket, can_be_filled, filled
from jaxcal.functional import linalg
from jaxcal.functional._loops import carried
from jaxcal.optimize.result import EarlyStopping, Optimum, Result

# Keras's RMSprop: the decay of the mean square, and the epsilon that is added to its root.
_DECAY, _EPSILON = 0.9, 1e-7
# The advice of the error for a derivative of training with early stopping.
_INSTEAD = "take optimize.train_full_batch"


def keras_rmsprop(learning_rate: ArrayLike) -> optax.GradientTransformation:
    """Keras's RMSprop: v <- 0.9 v + 0.1 g^2 from v = 0, and w <- w - rate g / (sqrt(v) + 1e-7).

    Epsilon is added to the root, unlike in optax's default. The step also has a derivative where v is 0, as for the
    weights of a unit that is never active.
    """

    def scale(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        # v <- 0.9 v + 0.1 g^2
        state = jax.tree.map(lambda g, v: (1 - _DECAY) * g**2 + _DECAY * v, updates, state)
        return jax.tree.map(lambda g, v: 1 / (linalg.sqrt(v) + _EPSILON) * g, updates, state), state

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    scale_by_rms = optax.GradientTransformation(zeros, scale)
    return optax.chain(scale_by_rms, optax.scale_by_learning_rate(jnp.asarray(learning_rate)))


def adam(learning_rate: ArrayLike) -> optax.GradientTransformation:
    """Adam, whose step also has a derivative where the second moment is 0.

    The moment is 0, for example, for the weights of a unit that is never active. The smallest positive number is added
    to it, which changes no step.
    """
    rate = jnp.asarray(learning_rate)
    return optax.chain(scale_by_adam(rate.dtype), optax.scale_by_learning_rate(rate))


def scale_by_adam(dtype: DTypeLike) -> optax.GradientTransformation:
    """The scaling of gradients in `adam`, computed in the dtype of the parameters alone.

    optax counts the steps in integers, and the decay to the power of an integer has the default dtype.
    """
    scale = optax.scale_by_adam(eps_root=float(jnp.finfo(dtype).tiny))
    init = lambda params: cast(Any, scale.init(params))._replace(count=jnp.zeros((), dtype))
    return optax.GradientTransformation(init, scale.update)


def num_train(num_rows: int, validation_fraction: float) -> int:
    """The number of training rows, floor(n (1 - fraction)), as in Keras; the rest are the validation set.

    Raises:
        ValueError: if the fraction lies outside (0, 1), or if there is no row for training or none for validation.
    """
    _checks.check_fraction("validation_fraction", validation_fraction)
    # With the margin, rounding does not take away a row: 10 * (1 - 0.9) is slightly less than 1.
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

    The penalty's gradient, weight_decay w, is added to the loss's gradient before the moments, as in PyTorch's
    `Adam(weight_decay=...)`. In contrast, `optax.adamw` adds it to the step.

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
    plateau_decay: ArrayLike = 1.0,
    restore_best: bool = True,
    num_rows: tuple[Int[ArrayLike, ""], Int[ArrayLike, ""]] | None = None,
    what: str = "optimize.train_minibatches",
    instead: str = _INSTEAD,
) -> Optimum:
    """Minimize the mean of a loss over rows by minibatches, until the validation loss stops improving.

    Training works as in Keras. Each epoch takes all rows once, in a new order. The last batch may be smaller, and its
    loss is the mean over its own rows. The validation loss is measured after each epoch. Training stops when it has not
    fallen below its minimum for `patience` epochs in a row.

    Safe under `jit` and `vmap` (over keys, folds of equal size, learning rates). No derivative passes, since a loop of
    unknown length has no reverse mode; `train_full_batch` can be differentiated.

    Args:
        loss: `loss(params, rows, key)`, one value for each row. `rows` has the form of `data`, with the rows of a
            batch. `key` is a new one for each batch, and None for the validation loss, which is without dropout. A
            function at module level (or a Module) compiles once; a new lambda compiles anew.
        params: initial parameters. Floating-point arrays in it are trained, everything else is kept.
        data: arrays with a common leading axis, the training rows.
        validation: the same for the validation rows.
        key: random key for the order of the rows and for `loss`.
        optimizer: a function from the learning rate to an optax optimizer, such as `optax.adam`.
        learning_rate: its learning rate.
        batch_size: the number of rows for a step; at most all of them.
        max_epochs: the number of epochs after which training stops.
        patience: the number of epochs without improvement after which training stops.
        plateau_decay: the learning rate is multiplied by this after `patience` / 2 epochs without improvement, each
            time that this happens.
        restore_best: whether to return the parameters of the best epoch in place of the last epoch's.
        num_rows: the numbers of training rows and of validation rows, if the arrays have more. The rows after them have
            no effect, and cost nothing but memory. This is for problems of several sizes in one compiled program, or
            one after another in `over_runs`.
        what: the name of the fit, for the error if a derivative is asked for.
        instead: the advice of this error, a clause.

    Raises:
        TypeError: if a derivative is asked for; if key is no random key.
        ValueError: if batch_size, max_epochs or patience is less than 1, or the learning rate or plateau_decay not
            positive.

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
    _checks.check_key(key)
    _checks.check_at_least("batch_size", batch_size, 1)
    lengths = tuple(jax.tree.leaves(part)[0].shape[0] for part in (data, validation))
    rows = _Datasets(data, validation, lengths if num_rows is None else num_rows)
    problem = _DifferentiableInputs(
        loss, params, rows, optimizer, _Schedule.of(learning_rate, max_epochs, patience, plateau_decay)
    )
    return _train(problem, key, min(batch_size, lengths[0]), restore_best, what, instead)


def train_steps(
    loss: Callable[[PyTree, PyTree, PRNGKeyArray | None], Float[Array, " rows"]],
    params: PyTree,
    validation: PyTree[Array],
    *,
    key: PRNGKeyArray,
    num_steps: int,
    optimizer: Callable[..., optax.GradientTransformation] = adam,
    learning_rate: ArrayLike = 1e-3,
    max_epochs: int = 1000,
    patience: int = 10,
    restore_best: bool = True,
    what: str = "optimize.train_steps",
    instead: str = _INSTEAD,
) -> Optimum:
    """`train_minibatches` for a loss that draws its own examples; an epoch is a number of steps.

    Args:
        loss: `loss(params, None, key)`, one value for each example that it draws with the key; and `loss(params,
            validation, None)`, one value for each row of the validation set.
        params: as in `train_minibatches`.
        validation: arrays with a common leading axis. None if the loss has its own examples when it is called without a
            key; they show whether training diverges.
        key: random key.
        num_steps: the number of steps in an epoch.
        optimizer: as in `train_minibatches`.
        learning_rate: as in `train_minibatches`.
        max_epochs: as in `train_minibatches`.
        patience: as in `train_minibatches`.
        restore_best: as in `train_minibatches`.
        what: as in `train_minibatches`.
        instead: as in `train_minibatches`.

    Raises:
        TypeError: if a derivative is asked for; if key is no random key.
        ValueError: if num_steps, max_epochs or patience is less than 1, or the learning rate not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def squared_distance(center, rows, key):
        ...     drawn = 3 + (jnp.zeros(8) if key is None else jax.random.normal(key, (8,)))
        ...     return (drawn - center) ** 2
        >>> optimum = train_steps(
        ...     squared_distance, jnp.zeros(()), None, key=jax.random.key(0), num_steps=100, learning_rate=0.1
        ... )
        >>> round(float(optimum.params), 1)
        3.0
    """
    _checks.check_key(key)
    _checks.check_at_least("num_steps", num_steps, 1)
    schedule = _Schedule.of(learning_rate, max_epochs, patience, plateau_decay=1.0)
    problem = _DifferentiableInputs(loss, params, _Datasets(None, validation, None), optimizer, schedule)
    return _train(problem, key, num_steps, restore_best, what, instead)


def train_full_batch(
    loss: Callable[[PyTree, PyTree, PRNGKeyArray | None], Float[Array, "*rows"]],
    params: PyTree,
    data: PyTree,
    *,
    key: PRNGKeyArray,
    num_steps: int,
    optimizer: Callable[..., optax.GradientTransformation] = keras_rmsprop,
    learning_rate: ArrayLike = 1e-3,
) -> Optimum:
    """Take a fixed number of steps on the mean of a loss over all rows; derivatives pass.

    There is no validation set and no early stopping. So the final parameters are a differentiable function of the
    initial parameters, the data and the learning rate. They are also differentiable by the arrays in the loss and the
    optimizer. Its derivatives are the derivatives of the steps as they were taken. The reverse mode keeps the
    parameters and the moments of every step, and computes the rest of a step anew.

    Works under `jit` and `vmap`. Another number of steps compiles anew.

    Args:
        loss: `loss(params, data, key)`, one value for each row, or one for all rows. `key` is a new one for each step,
            and None for the loss that is returned. It compiles like the loss of `train_minibatches`.
        params: initial parameters; floating-point arrays in it are trained, everything else is kept.
        data: all rows.
        key: random key for `loss`.
        num_steps: how many steps. With 0 the parameters are the initial ones.
        optimizer: a function from the learning rate to an optax optimizer. If a gradient is 0 in every step,
            `keras_rmsprop` and `adam` have derivatives, but `optax.rmsprop` and `optax.adam` have none.
        learning_rate: its learning rate.

    Returns:
        The last parameters, and their loss; the result is `STEP_LIMIT`, or `NOT_FINITE`.

    Raises:
        TypeError: if key is no random key.
        ValueError: if num_steps is negative, or the learning rate not positive.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> def squared_error(slope, rows, key):
        ...     x, y = rows
        ...     return (slope * x - y) ** 2
        >>> x = jnp.array([-1.0, 1.0])
        >>> def slope(y, learning_rate):
        ...     options = {"optimizer": optax.sgd, "learning_rate": learning_rate, "num_steps": 2}
        ...     return train_full_batch(squared_error, jnp.zeros(()), (x, y), key=jax.random.key(0), **options).params
        >>> slope(3 * x, 0.25).item()  # 3 (1 - (1 - 2 rate)^2)
        2.25
        >>> jax.grad(slope, 1)(3 * x, 0.25).item()  # 12 (1 - 2 rate)
        6.0
    """
    _checks.check_key(key)
    _checks.check_at_least("num_steps", num_steps, 0)
    _checks.check_positive("learning_rate", learning_rate)
    return _take_steps(loss, params, data, key, optimizer, jnp.asarray(learning_rate), num_steps)


class _Datasets(NamedTuple):
    """The data for training and validation, and their numbers of rows; the numbers are None for drawn examples."""

    train: PyTree
    validation: PyTree
    numbers: tuple[Int[ArrayLike, ""], Int[ArrayLike, ""]] | None

    def in_buckets(self) -> "_Datasets":
        """The same rows, padded, with their numbers as arrays; nearby numbers of rows share a compiled program."""
        in_bucket = lambda part: filled(part, bucket(jax.tree.leaves(part)[0].shape[0]))
        numbers: Any = tuple(np.int32(each) for each in cast(tuple, self.numbers))
        return _Datasets(in_bucket(self.train), in_bucket(self.validation), numbers)


class _Schedule(NamedTuple):
    """How fast and how long to train, as arrays, so that other values do not compile anew."""

    learning_rate: Float[Array, ""]
    max_epochs: Int[Array, ""]
    patience: Int[Array, ""]
    plateau_decay: Float[Array, ""]

    @classmethod
    def of(cls, learning_rate: ArrayLike, max_epochs: int, patience: int, plateau_decay: ArrayLike) -> "_Schedule":
        for name, value in (("max_epochs", max_epochs), ("patience", patience)):
            _checks.check_at_least(name, value, 1)
        for name, value in (("learning_rate", learning_rate), ("plateau_decay", plateau_decay)):
            _checks.check_positive(name, value)
        return cls(*map(jnp.asarray, (learning_rate, max_epochs, patience, plateau_decay)))


class _DifferentiableInputs(NamedTuple):
    """Everything by which a derivative could be asked for."""

    loss: Callable
    params: PyTree
    rows: _Datasets
    optimizer: Callable[..., optax.GradientTransformation]
    schedule: _Schedule


class _EpochState(NamedTuple):
    """The state of the loop over epochs, as lists of arrays, which are passed to a compiled program in no time."""

    params: list[Array]
    optimizer: list[Array]
    rate: Float[Array, ""]
    best: EarlyStopping
    epochs: Int[Array, ""]
    finite: Bool[Array, ""]


class _TrainingProgram(NamedTuple):
    """The static input of a training's compiled programs: the problem without its arrays, and options.

    `batch_size` is the number of steps in an epoch if the loss draws its own examples.
    """

    structure: Any
    others: tuple
    batch_size: int
    restore_best: bool

    def problem(self, arrays: list[Array]) -> _DifferentiableInputs:
        """The problem with these arrays."""
        left = iter(arrays)
        leaves = [next(left) if other is _ARRAY else other for other in self.others]
        return jax.tree.unflatten(self.structure, leaves)


# Stands in place of an array.
_ARRAY = "array"


def _train(
    problem: _DifferentiableInputs, key: PRNGKeyArray, batch_size: int, restore_best: bool, what: str, instead: str
) -> Optimum:
    """One loop over epochs.

    If progress is reported and nothing is traced, the loop is left for each report, and entered again.
    """
    problem = _checks.without_derivative(problem, what, instead)
    if problem.rows.numbers is not None and can_be_filled(problem, key) and _random.draws_prefixes(key):
        problem = problem._replace(rows=problem.rows.in_buckets())
        batch_size = min(batch_size, jax.tree.leaves(problem.rows.train)[0].shape[0])
    leaves, structure = jax.tree.flatten(problem)
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    others = tuple(_ARRAY if _is_array(leaf) else leaf for leaf in leaves)
    setting = _TrainingProgram(structure, others, batch_size, restore_best)
    state = _begin(arrays, setting._replace(batch_size=1))  # one program for all batch sizes
    if _checks.is_traced(*arrays, key):
        return _optimum(problem, restore_best, *_go_on(arrays, key, state, None, setting)[:2])
    with progress.work(f"{what}: epochs", int(problem.schedule.max_epochs)) as work:
        while True:
            state, result, is_unfinished = _go_on(arrays, key, state, np.int32(work.next_stop()), setting)
            if work.is_silent:
                break
            if _checks.is_traced(state.epochs):  # by a value that the loss closes over
                state, result, _ = _go_on(arrays, key, state, None, setting)
                break
            work.report(int(state.epochs))
            if not is_unfinished:
                break
    return _optimum(problem, restore_best, state, result)


@_programs.jit
def _begin(arrays: list[Array], setting: _TrainingProgram) -> _EpochState:
    """The initial state of the loop."""
    problem = setting.problem(arrays)
    params, descent, _, validation_loss = _parts_of(problem)
    state = _EpochState(
        params=params,
        optimizer=jax.tree.leaves(descent.init(params)),
        rate=jnp.ones((), jnp.result_type(*params)),
        best=EarlyStopping.before(
            params if setting.restore_best else None, jax.eval_shape(validation_loss, params).dtype
        ),
        epochs=jnp.zeros((), jnp.int32),
        finite=jnp.ones((), bool),
    )
    # The dtypes are the dtypes of the loop's results: no array has the weak type of a Python number.
    return jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), state)


@_programs.jit
def _go_on(
    arrays: list[Array],
    key: PRNGKeyArray,
    state: _EpochState,
    until: Int[ArrayLike, ""] | None,
    setting: _TrainingProgram,
) -> tuple[_EpochState, Int[Array, ""], Bool[Array, ""]]:
    """The state after `until` epochs (None for all), how the training ended, and whether it is unfinished."""
    problem = setting.problem(arrays)
    rows, schedule, size = problem.rows, problem.schedule, setting.batch_size
    params, descent, losses, validation_loss = _parts_of(problem)
    memory_structure = jax.tree.structure(descent.init(params))

    def batch_loss(params, batch, included, key):
        return jnp.mean(losses(params, batch, key), where=included)

    def epoch(state: _EpochState) -> _EpochState:
        own_key = jax.random.fold_in(key, state.epochs)
        number, batch = _drawn(size, own_key) if rows.numbers is None else _batches(rows, size, own_key)

        def step(i, carry):
            params, memory = carry
            updates, memory = descent.update(jax.grad(batch_loss)(params, *batch(i)), memory, params)
            updates = jax.tree.map(lambda update: state.rate.astype(update.dtype) * update, updates)
            return optax.apply_updates(params, updates), memory

        memory = jax.tree.unflatten(memory_structure, state.optimizer)
        params, memory = lax.fori_loop(0, number, step, carried((state.params, memory)))
        value = validation_loss(params)
        best = state.best.after(params, value)
        is_plateau = best.stale == jnp.maximum(schedule.patience // 2, 1)
        return _EpochState(
            params=params,
            optimizer=jax.tree.leaves(memory),
            rate=jnp.where(is_plateau, schedule.plateau_decay.astype(state.rate.dtype), 1) * state.rate,
            best=best,
            epochs=state.epochs + 1,
            finite=jnp.isfinite(value),
        )

    def unfinished(limit: Int[Array, ""], state: _EpochState) -> Bool[Array, ""]:
        return state.finite & (state.epochs < limit) & (state.best.stale < schedule.patience)

    most = schedule.max_epochs
    stop = most if until is None else jnp.minimum(most, until)
    state = lax.while_loop(partial(unfinished, stop), epoch, carried(state))
    ended = jnp.where(state.best.stale < schedule.patience, Result.STEP_LIMIT, Result.CONVERGED)
    return state, jnp.where(state.finite, ended, Result.NOT_FINITE), unfinished(most, state)


def _parts_of(problem: _DifferentiableInputs) -> tuple[list[Array], optax.GradientTransformation, Callable, Callable]:
    """The trained parameters, their optimizer, the losses of a batch's rows, and the validation loss."""
    trained, fixed = eqx.partition(problem.params, _is_trained)
    params, structure = jax.tree.flatten(trained)

    def losses(params, batch, key):
        return problem.loss(eqx.combine(jax.tree.unflatten(structure, params), fixed), batch, key)

    def validation_loss(params):
        values, numbers = losses(params, problem.rows.validation, None), problem.rows.numbers
        return jnp.mean(values, where=None if numbers is None else jnp.arange(values.size) < numbers[1])

    rate = problem.schedule.learning_rate.astype(jnp.result_type(*params))
    return params, problem.optimizer(rate), losses, validation_loss


def _optimum(problem: _DifferentiableInputs, restore_best: bool, state: _EpochState, result: Int[Array, ""]) -> Optimum:
    trained = iter(state.best.params if restore_best else state.params)
    params = jax.tree.map(lambda leaf: next(trained) if _is_trained(leaf) else leaf, problem.params)
    return Optimum(params, state.best.loss, state.epochs, result)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_trained(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _drawn(num_steps: int, key: PRNGKeyArray):
    """`_batches` for a loss that draws its own examples: a batch is a key."""
    keys = jax.random.split(jax.random.split(key)[1], num_steps)
    return num_steps, lambda i: (None, None, keys[i])


def _batches(rows: _Datasets, batch_size: int, key: PRNGKeyArray):
    """The number of batches of the rows in a random order, and a function that gives the batch i.

    A batch has its rows, the mask of the rows that count (the last batch is padded), and a key.
    """
    data, (num_rows, _) = rows.train, cast(tuple, rows.numbers)
    length = jax.tree.leaves(data)[0].shape[0]
    most = math.ceil(length / batch_size)
    order_key, loss_key = jax.random.split(key)
    order = jnp.resize(_random.leading(order_key, length, num_rows), (most, batch_size))
    keys = jax.random.split(loss_key, most)

    def batch(i):
        included = i * batch_size + jnp.arange(batch_size) < num_rows
        return jax.tree.map(lambda a: a[order[i]], data), included, keys[i]

    return -(-num_rows // batch_size), batch


@_programs.jit
def _take_steps(
    loss: Callable,
    params: PyTree,
    data: PyTree,
    key: PRNGKeyArray,
    optimizer: Callable[..., optax.GradientTransformation],
    learning_rate: Float[Array, ""],
    num_steps: int,
) -> Optimum:
    params, fixed = eqx.partition(params, eqx.is_inexact_array)
    descent = optimizer(learning_rate.astype(jnp.result_type(*jax.tree.leaves(params))))
    mean_loss = lambda params, key: jnp.mean(loss(eqx.combine(params, fixed), data, key))

    # Only one step's activations are in memory at a time, in derivatives, too.
    @partial(jax.checkpoint, prevent_cse=False)
    def step(carry, key):
        params, memory = carry
        updates, memory = descent.update(jax.grad(mean_loss)(params, key), memory, params)
        return (optax.apply_updates(params, updates), memory), None

    (params, _), _ = lax.scan(step, carried((params, descent.init(params))), jax.random.split(key, num_steps))
    value = mean_loss(params, None)
    result = jnp.where(jnp.isfinite(value), Result.STEP_LIMIT, Result.NOT_FINITE)
    return Optimum(eqx.combine(params, fixed), value, jnp.asarray(num_steps, jnp.int32), result)
