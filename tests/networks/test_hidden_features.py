"""A network's hidden layers: what `features` gives, and a process that depends on them in place of the inputs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

import jaxcal as jc
from jaxcal.networks import FeedForward
from jaxcal.predictors import mlp

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def data():
    """Inputs of very different units, and a network briefly trained on them."""
    rng = np.random.default_rng(20203)
    x = np.array([1e-3, 1.0, 1e3]) * rng.normal(size=(60, 3)) + np.array([0.0, 5.0, -1e3])
    y = np.abs(x[:, 1] - 5) + rng.normal(size=60)
    return x, y, mlp.fit(x, y, key=KEY, hidden=(8, 5), max_epochs=5)


def by_hand(network, x):
    """Both hidden layers in NumPy."""
    z = np.asarray(network.x_scaler(x))
    found = []
    for layer in network.network.layers[:-1]:
        z = np.maximum(0, z @ np.asarray(layer.weight).T + np.asarray(layer.bias))
        found.append(z)
    return found


def test_features_are_the_activations_of_the_hidden_layers(data):
    x, _, network = data
    first, last = by_hand(network, x)
    assert first.shape == (60, 8)
    assert last.shape == (60, 5)
    assert 0 < np.count_nonzero(last) < last.size
    for layer, expected in ((0, first), (-2, first), (1, last), (-1, last)):
        np.testing.assert_allclose(network.features(x, layer=layer), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(network.features(x), network.features(x, layer=-1))


def test_the_prediction_is_linear_in_the_last_hidden_layer(data):
    x, _, network = data
    weight, bias = (np.asarray(a) for a in (network.network.layers[-1].weight, network.network.layers[-1].bias))
    scaled = np.asarray(network.features(x)) @ weight[0] + bias
    expected = np.asarray(network.y_scaler.loc) + np.asarray(network.y_scaler.scale) * scaled
    np.testing.assert_allclose(network(x).mean, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_features_are_differentiable_in_x_and_work_under_jit_and_vmap(data):
    x, y, network = data
    jitted = jax.jit(lambda x: network.features(x))(jnp.asarray(x))
    np.testing.assert_allclose(jitted, network.features(x), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: network.features(x).sum())(jnp.asarray(x))
    assert np.isfinite(gradient).all()
    assert np.any(gradient != 0)
    fit = lambda key: mlp.fit(x, y, key=key, hidden=(8, 5), max_epochs=5)
    keys = jax.random.split(KEY, 2)
    together = eqx.filter_vmap(lambda network: network.features(x))(eqx.filter_vmap(fit)(keys))
    for key, found in zip(keys, together, strict=True):
        np.testing.assert_allclose(found, fit(key).features(x), rtol=1e-3, atol=1e-4)
    assert not np.allclose(together[0], together[1])


def test_equal_shapes_compile_once(data):
    x, _, network = data
    network.features(x)
    with compilations() as compiled:
        network.features(x + 1)
    assert not compiled


def test_bad_input_is_named(data):
    x, y, network = data
    for layer in (2, -3):
        with pytest.raises(ValueError, match=f"no hidden layer {layer}: the network has 2"):
            network.features(x, layer=layer)
    with pytest.raises(ValueError, match="x has 2 columns; the fit had 3"):
        network.features(x[:, :2])
    linear = mlp.fit(x, y, key=KEY, hidden=(), max_epochs=1)
    with pytest.raises(ValueError, match="no hidden layer -1: the network has 0"):
        linear.features(x)


def test_a_network_without_hidden_layers_has_no_features():
    assert FeedForward(3, (), 2, key=KEY).features(jnp.ones(3)) == ()


@pytest.mark.slow
def test_rio_learns_from_a_hidden_layer_what_the_output_has_lost(data):
    """The residual is a function of the hidden layer; how the base's mean comes about does not matter."""
    x, _, network = data
    seen, means = network.features(x, layer=0), x[:, 1]
    y = means + np.asarray(seen).sum(axis=1)
    base = lambda rows: jc.Point(means[rows])
    train, test = np.arange(60) % 4 > 0, np.arange(60) % 4 == 0
    rio = jc.rio.fit(seen[train], base(train), y[train], kernel="input")
    after = rio(seen[test], base(test))
    constant = jc.Point(means[test] + (y - means)[train].mean())
    assert jc.metrics.rmse(y[test], after) < 0.1 * jc.metrics.rmse(y[test], constant)
    with pytest.raises(ValueError, match="x has 3 columns; the fit had 8"):
        rio(x[test], base(test))
