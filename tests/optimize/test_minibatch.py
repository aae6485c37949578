"""Minibatch training: Keras's arithmetic, checked by hand-written loops, and how the loop ends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcal.optimize import (
    Result,
    adam,
    keras_rmsprop,
    raise_unless_finite,
    train_full_batch,
    train_minibatches,
)

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)


def squared_error(params, rows, key):
    x, y = rows
    return (x @ params["slope"] + params["offset"] - y) ** 2


def v_shaped(position, rows, key):
    """Each training step moves the position by 1; the validation loss is lowest at 5."""
    return jnp.abs(position - 5 + 0 * rows) if key is None else -position + 0 * rows


def keras_step(w, v, x, y, rate=1e-3):
    """One step of Keras 2's RMSprop on the mean squared error of a batch."""
    gradient = 2 * x.T @ (x @ w - y) / len(y)
    v = 0.9 * v + 0.1 * gradient**2
    return w - rate * gradient / (np.sqrt(v) + 1e-7), v


def linear_loss(w, rows, key):
    x, y = rows
    return (x @ w - y) ** 2


def walk(**options):
    """Train on `v_shaped`, one row and so one step an epoch."""
    defaults = {"key": KEY, "optimizer": optax.sgd, "learning_rate": 1.0}
    return train_minibatches(v_shaped, jnp.zeros(()), jnp.ones(1), jnp.ones(2), **(defaults | options))


def test_rmsprop_is_that_of_keras(rng):
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    w, v = np.zeros(3), np.zeros(3)
    for _ in range(40):
        w, v = keras_step(w, v, x, y)
    data = (jnp.asarray(x), jnp.asarray(y))
    ours = train_minibatches(linear_loss, jnp.zeros(3), data, data, key=KEY, max_epochs=40)
    np.testing.assert_allclose(ours.params, w, rtol=1e-4)


def test_the_last_batch_is_averaged_over_its_own_rows(rng):
    """Three rows in batches of two: after two epochs the weights are those of one of the 36 orders."""
    x, y = rng.normal(size=(3, 2)), rng.normal(size=3)
    orders = list(itertools.permutations(range(3)))
    possible = []
    for epochs in itertools.product(orders, orders):
        w, v = np.zeros(2), np.zeros(2)
        for order in epochs:
            for batch in (list(order[:2]), list(order[2:])):
                w, v = keras_step(w, v, x[batch], y[batch], rate=0.1)
        possible.append(w)
    data = (jnp.asarray(x), jnp.asarray(y))
    found = set()
    for seed in range(12):
        ours = train_minibatches(
            linear_loss,
            jnp.zeros(2),
            data,
            data,
            key=jax.random.key(seed),
            learning_rate=0.1,
            batch_size=2,
            max_epochs=2,
            restore_best=False,
        )
        errors = np.abs(np.asarray(ours.params) - np.array(possible)).max(axis=1)
        assert errors.min() < 1e-5
        found.add(int(errors.argmin()))
    assert len(found) > 3  # the rows are shuffled, differently for each key


def test_every_row_is_used_once_an_epoch_in_a_new_order():
    """The gradient of row i is -1 in coordinate i, so the weights add up each row's share of its batch."""

    def share(w, rows, key):
        return jnp.sum(rows, axis=1) if key is None else -(rows @ w)

    rows = jnp.eye(5)
    options = {
        "key": KEY,
        "optimizer": optax.sgd,
        "learning_rate": 1.0,
        "batch_size": 2,
        "restore_best": False,
    }
    lone_rows = set()
    before = np.zeros(5)
    for epochs in range(1, 6):
        w = train_minibatches(share, jnp.zeros(5), rows, rows, max_epochs=epochs, **options).params
        shares, before = np.asarray(w) - before, np.asarray(w)
        np.testing.assert_allclose(sorted(shares), [0.5, 0.5, 0.5, 0.5, 1.0], atol=1e-6)
        lone_rows.add(int(shares.argmax()))
    assert len(lone_rows) > 1


def test_least_squares_reaches_the_optimum(rng):
    x = rng.normal(size=(50, 2))
    y = x @ [1.0, -2.0] + 3 + 0.1 * rng.normal(size=50)
    expected = np.linalg.lstsq(np.c_[x, np.ones(50)], y)[0]
    data = (jnp.asarray(x), jnp.asarray(y))
    start = {"slope": jnp.zeros(2), "offset": jnp.zeros(())}
    options = {
        "optimizer": optax.adam,
        "learning_rate": 0.1,
        "batch_size": 50,
        "max_epochs": 2000,
        "patience": 200,
    }
    optimum = train_minibatches(squared_error, start, data, data, key=KEY, **options)
    np.testing.assert_allclose([*optimum.params["slope"], optimum.params["offset"]], expected, rtol=1e-4)
    np.testing.assert_allclose(optimum.loss, np.mean((np.c_[x, np.ones(50)] @ expected - y) ** 2), rtol=1e-4)


def test_it_stops_after_patience_epochs_and_restores_the_best():
    optimum = walk(patience=3)
    assert (optimum.params, optimum.loss, optimum.steps, optimum.result) == (5, 0, 8, Result.CONVERGED)


def test_on_a_plateau_the_steps_become_shorter():
    """After half of the patience without improvement: the best is at step 5, and the steps from 7 on are shorter."""
    options = {"patience": 4, "plateau_decay": 0.25, "restore_best": False}
    ends = [float(walk(max_epochs=number, **options).params) for number in (5, 7, 8, 20)]
    assert ends == [5, 7, 7.25, 7.5]


def test_the_steps_become_shorter_at_every_plateau():
    """By steps of 1 it goes to and fro over 5.3; by those of 1/4 it comes to 5.25, and by those of 1/16 nearer."""
    distance = lambda position, rows, key: jnp.abs(position - 5.3) + 0 * rows

    def error(plateau_decay):
        options = {"optimizer": optax.sgd, "learning_rate": 1.0, "patience": 4, "plateau_decay": plateau_decay}
        return train_minibatches(distance, jnp.zeros(()), jnp.ones(1), jnp.ones(2), key=KEY, **options).loss

    np.testing.assert_allclose(error(1.0), 0.3, rtol=1e-5)
    assert error(0.25) < 0.02


def test_without_restoring_the_last_epoch_is_kept():
    optimum = walk(patience=3, restore_best=False)
    assert (optimum.params, optimum.loss, optimum.steps) == (8, 0, 8)


def test_an_equal_loss_is_no_improvement():
    def flat(w, rows, key):
        return 0 * w + rows

    optimum = train_minibatches(flat, jnp.ones(()), jnp.ones(1), jnp.ones(1), key=KEY, patience=4)
    assert optimum.steps == 5  # the first epoch improves on nothing known


def test_the_number_of_epochs_is_limited():
    optimum = walk(max_epochs=4)
    assert (optimum.params, optimum.steps, optimum.result) == (4, 4, Result.STEP_LIMIT)


def test_a_loss_of_nan_ends_the_loop_and_is_reported():
    def breaks(w, rows, key):
        return jnp.where(w < 2.5, v_shaped(w, rows, key), jnp.nan)

    options = {"key": KEY, "optimizer": optax.sgd, "learning_rate": 1.0}
    optimum = train_minibatches(breaks, jnp.zeros(()), jnp.ones(1), jnp.ones(1), **options)
    assert (optimum.params, optimum.steps, optimum.result) == (2, 3, Result.NOT_FINITE)
    with pytest.raises(FloatingPointError, match="after 3 epochs"):
        raise_unless_finite(optimum)
    raise_unless_finite(walk())


def test_vmap_equals_the_loop(rng):
    """Over keys, folds and learning rates at once; the runs stop at different epochs."""
    xs, ys = jnp.asarray(rng.normal(size=(4, 10, 2))), jnp.asarray(rng.normal(size=(4, 10)))
    keys, rates = jax.random.split(KEY, 4), jnp.asarray([0.3, 0.1, 0.03, 0.01])

    def run(x, y, key, rate):
        train, validation = (x[:7], y[:7]), (x[7:], y[7:])
        options = {"key": key, "learning_rate": rate, "batch_size": 3, "patience": 3}
        return train_minibatches(linear_loss, jnp.zeros(2), train, validation, **options)

    together = jax.vmap(run)(xs, ys, keys, rates)
    for i in range(4):
        alone = run(xs[i], ys[i], keys[i], rates[i])
        assert alone.steps == together.steps[i]
        np.testing.assert_allclose(alone.params, together.params[i], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(alone.loss, together.loss[i], rtol=1e-4)
    assert len(set(together.steps.tolist())) > 1


def test_equal_shapes_compile_once(rng):
    traces = []

    def counted(w, rows, key):
        traces.append(1)
        return (rows - w) ** 2

    counts = []
    for seed, (rate, epochs, patience) in enumerate([(0.1, 10, 2), (0.2, 20, 3), (0.3, 30, 4)]):
        rows = jnp.asarray(rng.normal(size=8))
        options = {"learning_rate": rate, "max_epochs": epochs, "patience": patience}
        train_minibatches(counted, jnp.zeros(()), rows, rows, key=jax.random.key(seed), **options)
        counts.append(len(traces))
    assert counts[0] == counts[-1] > 0


def test_the_loss_gets_a_new_key_each_batch_and_none_for_validation():
    def noisy(w, rows, key):
        return rows if key is None else -w * jax.random.normal(key, rows.shape)

    options = {"optimizer": optax.sgd, "learning_rate": 1.0, "batch_size": 1, "restore_best": False}
    run = lambda rows, epochs: (
        train_minibatches(
            noisy, jnp.zeros(()), jnp.ones(rows), jnp.ones(1), key=KEY, max_epochs=epochs, **options
        ).params
    )
    assert run(1, 2) != 2 * run(1, 1)
    assert run(2, 1) != 2 * run(1, 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jax.dtypes.canonicalize_dtype(float)])
def test_the_dtype_is_that_of_the_parameters(dtype, rng):
    rows = (jnp.asarray(rng.normal(size=(6, 2)), dtype), jnp.asarray(rng.normal(size=6), dtype))
    optimum = train_minibatches(linear_loss, jnp.zeros(2, dtype), rows, rows, key=KEY, max_epochs=3)
    assert optimum.params.dtype == dtype
    assert optimum.loss.dtype == dtype


def test_a_derivative_through_a_training_until_it_stops_is_refused(rng):
    x, y = jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(rng.normal(size=6))
    run = lambda y: train_minibatches(linear_loss, jnp.zeros(2), (x, y), (x, y), key=KEY, max_epochs=3).loss
    with pytest.raises(TypeError, match=r"through optimize\.train_minibatches: take optimize\.train_full_batch"):
        jax.make_jaxpr(jax.grad(run))(y)


def test_full_batches_are_the_steps_of_keras(rng):
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    w, v = np.zeros(3), np.zeros(3)
    for _ in range(9):
        w, v = keras_step(w, v, x, y)
    ours = train_full_batch(linear_loss, jnp.zeros(3), (jnp.asarray(x), jnp.asarray(y)), key=KEY, num_steps=9)
    np.testing.assert_allclose(ours.params, w, rtol=1e-4)
    np.testing.assert_allclose(ours.loss, np.mean((x @ w - y) ** 2), rtol=1e-4)
    assert (ours.steps, ours.result) == (9, Result.STEP_LIMIT)


def test_adam_is_that_of_optax_in_the_dtype_of_its_rate():
    gradients = jnp.asarray(np.random.default_rng(1).normal(size=(30, 4)))
    rate = jnp.asarray(0.1, gradients.dtype)
    ours, theirs = adam(rate), optax.adam(rate)
    state, expected = ours.init(gradients[0]), theirs.init(gradients[0])
    for gradient in gradients:
        step, state = ours.update(gradient, state)
        expected_step, expected = theirs.update(gradient, expected)
        np.testing.assert_allclose(step, expected_step, rtol=10 * float(jnp.finfo(rate.dtype).eps))
    low = adam(jnp.float32(0.1)).init(gradients[0].astype(jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("optimizer", [keras_rmsprop, adam])
def test_steps_without_a_gradient_have_derivatives(optimizer):
    """The second weight has no part in the loss."""

    def params(target, rate):
        loss = lambda w, rows, key: (w[0] - rows) ** 2
        options = {"num_steps": 3, "optimizer": optimizer, "learning_rate": rate}
        return train_full_batch(loss, jnp.ones(2), target[None], key=KEY, **options).params

    for found in jax.jit(jax.jacrev(params, (0, 1)))(jnp.asarray(3.0), jnp.asarray(0.1)):
        assert jnp.isfinite(found).all()
        assert found[0] != 0
        assert found[1] == 0


def test_derivatives_keep_the_parameters_of_every_step_and_not_its_activations():
    rows = jnp.ones((5000, 2)), jnp.ones(5000)

    def bytes_of(num_steps):
        run = lambda rate: train_full_batch(
            linear_loss, jnp.zeros(2), rows, key=KEY, num_steps=num_steps, learning_rate=rate
        ).params.sum()
        return jax.jit(jax.grad(run)).lower(0.1).compile().memory_analysis().temp_size_in_bytes

    assert (bytes_of(24) - bytes_of(8)) / 16 < 100


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"max_epochs": 0}, "max_epochs must be at least 1; got 0"),
        ({"patience": -1}, "patience must be at least 1; got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive; got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive; got nan"),
        ({"plateau_decay": 0.0}, "plateau_decay must be positive; got 0.0"),
    ],
)
def test_options_out_of_range(option, message):
    with pytest.raises(ValueError, match=message):
        walk(**option)


def test_epsilon_is_outside_the_root_and_no_gradient_is_no_step():
    """With gradients this small it matters where epsilon stands."""
    optimizer = keras_rmsprop(0.1)
    state = optimizer.init(jnp.ones(2))
    updates, _ = optimizer.update(jnp.asarray([0.0, 1e-6]), state)
    np.testing.assert_allclose(jnp.asarray(updates), [0.0, -0.1 * 1e-6 / (np.sqrt(0.1 * 1e-12) + 1e-7)], rtol=1e-5)


def test_rows_beyond_those_that_there_are_take_no_part():
    """Of eight training rows and four validation rows five and one count; a step moves by a row's value."""

    def product(position, rows, key):
        return -position * rows

    data, validation = jnp.array([1.0, 2, 3, 4, 5, 90, 90, 90]), jnp.array([1.0, -90, -90, -90])
    train = jax.jit(
        lambda num_rows: train_minibatches(
            product,
            jnp.zeros(()),
            data,
            validation,
            key=KEY,
            optimizer=optax.sgd,
            learning_rate=1.0,
            batch_size=1,
            max_epochs=2,
            num_rows=num_rows,
        )
    )
    few = train((jnp.int32(5), jnp.int32(1)))
    assert float(few.params) == 2 * 15
    assert float(few.loss) == -30
    all_rows = train((jnp.int32(8), jnp.int32(1)))
    assert float(all_rows.params) == 2 * (15 + 270)
