"""The point network: what it learns, what it repeats of the paper, and what it makes of bad input."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

from jaxcal.frames.preprocessing import Standardizer
from jaxcal.networks import FeedForward
from jaxcal.optimize import Result
from jaxcal.predictors import mlp

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)
# One small setting for most tests, so that they share what is compiled.
SMALL: dict[str, Any] = {
    "key": KEY,
    "hidden": (8,),
    "batch_size": 16,
    "max_epochs": 30,
    "patience": 5,
    "learning_rate": 0.01,
}


def fit(x, y, **options):
    return mlp.fit(x, y, **(SMALL | options))


@pytest.fixture
def data(rng):
    x = rng.normal(size=(50, 2))
    return x, np.abs(x[:, 0]) + x[:, 1]


def test_it_learns_a_function_that_is_not_linear(rng):
    x = rng.uniform(-2, 2, size=(500, 2))
    y = np.abs(x[:, 0]) + x[:, 1] ** 2
    network = mlp.fit(x[:400], y[:400], key=KEY)
    errors = network(x[400:]).mean - y[400:]
    assert np.sqrt(np.mean(errors**2)) < 0.1 * y.std()
    assert network.training.result == Result.CONVERGED
    np.testing.assert_allclose(network.training.validation_loss, np.mean(errors**2) / y.var(), rtol=1)


def test_the_prediction_does_not_depend_on_the_unit_of_the_inputs(data):
    x, y = data
    changed = np.array([1e-6, 1e6]) * x + np.array([0.0, 1e6])
    np.testing.assert_allclose(fit(changed, y)(changed).mean, fit(x, y)(x).mean, atol=1e-4)


def test_the_gradient_in_x_is_that_of_the_prediction(data):
    x, y = map(jnp.asarray, data)
    network = fit(x, y)
    gradient = jax.grad(lambda x: network(x).mean.sum())(x)
    assert np.isfinite(gradient).all()
    step = 1e-3
    secant = (network(x + step).mean - network(x - step).mean) / (2 * step)
    np.testing.assert_allclose(np.median(np.abs(gradient.sum(axis=1) - secant)), 0, atol=1e-2)


def test_equal_shapes_compile_once(data):
    x, y = data
    other = jax.random.key(1)
    fit(x, y)(x)
    with compilations() as compiled:
        fit(2 * x, y + 1, key=other, learning_rate=0.02, max_epochs=25, patience=4)(x)
    assert not compiled


def test_the_best_epoch_is_restored_in_the_default(data):
    """Stopped by patience, the network is the one of `patience` epochs before."""
    x, y = data
    stopped = fit(x, y, max_epochs=1000, patience=5)
    assert stopped.training.result == Result.CONVERGED
    best = fit(x, y, max_epochs=int(stopped.training.epochs) - 5, patience=5)
    assert best.training.result == Result.STEP_LIMIT
    np.testing.assert_array_equal(stopped(x).mean, best(x).mean)


def test_the_paper_keeps_the_last_epoch(data):
    x, y = data
    stopped = fit(x, y, preset="paper", max_epochs=1000, patience=5)
    assert stopped.training.result == Result.CONVERGED
    last = fit(x, y, preset="paper", max_epochs=int(stopped.training.epochs), patience=1000)
    best = fit(x, y, preset="paper", max_epochs=int(stopped.training.epochs) - 5, patience=1000)
    np.testing.assert_array_equal(stopped(x).mean, last(x).mean)
    assert not np.array_equal(stopped(x).mean, best(x).mean)


def test_the_paper_validates_on_the_last_fifth_of_the_rows(data):
    """With a raw target and a fixed number of epochs, the targets of those rows change no weight."""
    x, y = data
    predict = lambda y: fit(x, y, preset="paper", max_epochs=5)(x).mean
    last_fifth, before = np.arange(50) >= 40, np.arange(50) == 39
    np.testing.assert_array_equal(predict(y + last_fifth), predict(y))
    assert not np.array_equal(predict(y + before), predict(y))


def test_the_paper_does_not_scale_the_target(data):
    x, y = data
    network = fit(x, y + 100, preset="paper")
    assert (network.y_scaler.loc, network.y_scaler.scale) == (0, 1)


def test_the_validation_rows_are_drawn_with_the_key(data):
    """An outlier counts among the validation rows for about a fifth of the keys."""
    x, y = data
    y = np.where(np.arange(50) == 49, 1e3, y)
    losses = np.array([fit(x, y, key=key).training.validation_loss for key in jax.random.split(KEY, 20)])
    assert 0 < np.sum(losses > 1) < 20


def test_constant_and_duplicated_columns(data):
    x, y = data
    network = fit(np.c_[x, np.full(50, 0.1), x[:, 0]], y, max_epochs=100, patience=50)
    predictions = network(np.c_[x, np.full(50, 0.1), x[:, 0]]).mean
    assert np.mean((predictions - y) ** 2) < 0.2 * y.var()
    np.testing.assert_array_equal(network.x_scaler.standardizer.scale[2], 0)


def test_integers_vectors_and_float32(data):
    integers = fit(np.arange(50), np.arange(50) ** 2)
    assert integers(np.arange(5)).mean.shape == (5,)
    single = eqx.filter_eval_shape(fit, *(a.astype(np.float32) for a in data))
    assert {leaf.dtype for leaf in jax.tree.leaves(single) if leaf.dtype.kind == "f"} == {np.dtype("float32")}


def test_two_rows_are_enough():
    network = fit(np.array([[0.0], [1.0]]), np.array([0.0, 1.0]))
    assert np.isfinite(network(np.array([[0.5]])).mean).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (np.where(x > 2, np.nan, x), y), "x holds .* NaN or infinite, the first at"),
        (lambda x, y: (x, np.where(np.arange(50) == 7, np.inf, y)), "y holds 1 values .* at index 7"),
        (lambda x, y: (x[:0], y[:0]), "x is empty"),
        (lambda x, y: (x[:, :0], y), "x has no columns"),
        (lambda x, y: (x[:1], y[:1]), "x has 1 rows; at least 2"),
        (lambda x, y: (x, y[:-1]), "y has 49 rows where 50 are expected"),
        (lambda x, y: (x, y[:, None]), r"did you mean y\[:, 0\]"),
        (lambda x, y: (x[None], y), r"x must have shape \(n, d\); got \(1, 50, 2\)"),
        (lambda x, y: (x.astype(str), y), "x must .*real numbers"),
    ],
)
def test_bad_data(change, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*change(*data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction must lie between 0 and 1; got 0"),
        ({"validation_fraction": 20.0}, r"got 20: did you mean 0.2\?"),
        ({"validation_fraction": 0.99}, "leaves 0 of 50 rows to train on"),
        ({"preset": "papers"}, "preset must be one of None, 'paper'; got 'papers'"),
        ({"hidden": (8, 0)}, r"hidden must hold widths of at least 1; got \(8, 0\)"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative; got -0.1"),
        ({"learning_rate": -1.0}, "learning_rate must be positive; got -1"),
    ],
)
def test_bad_options(options, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*data, **options)


def test_bad_inputs_of_the_prediction(data):
    x, y = data
    network = fit(x, y)
    with pytest.raises(ValueError, match="x has 3 columns; the fit had 2"):
        network(np.ones((4, 3)))
    with pytest.raises(ValueError, match="x is empty"):
        network(x[:0])
    with pytest.raises(ValueError, match="NaN or infinite"):
        network(np.full((1, 2), np.nan))


def test_initial_weights_are_glorot_uniform_and_biases_zero():
    network = eqx.filter_jit(FeedForward)(100, (200, 50), "scalar", key=KEY)
    for layer, (fan_in, fan_out) in zip(network.layers, [(100, 200), (200, 50), (50, 1)], strict=True):
        limit = np.sqrt(6 / (fan_in + fan_out))
        weights = np.abs(np.asarray(layer.weight))
        assert weights.shape == (fan_out, fan_in)
        assert 0.9 * limit < weights.max() <= limit
        np.testing.assert_allclose(weights.mean(), limit / 2, rtol=0.2)
        np.testing.assert_array_equal(layer.bias, np.zeros(fan_out))


def test_a_network_without_hidden_layers_is_linear(rng):
    network = eqx.filter_jit(FeedForward)(3, (), 2, key=KEY)
    x = jnp.asarray(rng.normal(size=3))
    np.testing.assert_allclose(network(x), np.asarray(network.layers[0].weight) @ x, rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-25, 1.0, 1e25])
def test_the_standardizer_at_any_scale(unit, rng):
    values = jnp.asarray(unit * rng.normal(5, 2, size=(40, 3)), jnp.float32).at[:, 1].set(0.1 * unit)
    scaler = Standardizer.of(values)
    expected = np.asarray(values, dtype=np.float64)[:, [0, 2]]
    np.testing.assert_allclose(scaler.scale[jnp.array([0, 2])], expected.std(axis=0, ddof=1), rtol=1e-5)
    scaled = scaler(values)
    np.testing.assert_allclose(scaled[:, [0, 2]].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_array_equal(scaled[:, 1], np.zeros(40))
    np.testing.assert_allclose(scaler.inverse(scaled), values, rtol=1e-4)
