"""The network of means and variances: what it learns, by which loss, in which steps, and what it makes of bad input."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compilations
from growing_noise import ROWS, SETTING, draw, mean, std
from jax.tree_util import Partial
from scipy import stats

from jaxcal.networks import FeedForward
from jaxcal.networks.modules import as_variance
from jaxcal.networks.normal import alternate
from jaxcal.optimize import Optimum, train_minibatches, with_weight_decay
from jaxcal.predictors import variance_network

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
FORMS = ("joint", "alternating")


def fit(x, y, **options):
    return variance_network.fit(x, y, **(SETTING | options))


@pytest.fixture
def data(rng):
    return draw(rng)


def softplus(x):
    return np.logaddexp(0, x)


def forward(network, x):
    """The outputs of a ReLU network, layer by layer."""
    weights = [(np.asarray(layer.weight, float), np.asarray(layer.bias, float)) for layer in network.layers]
    for weight, bias in weights[:-1]:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ weights[-1][0].T + weights[-1][1]


@pytest.mark.parametrize("form", FORMS)
def test_it_recovers_a_std_that_varies(form, data):
    """To a tenth on average and a fifth everywhere, with the mean within a fifth of a std."""
    grid = np.linspace(-1.8, 1.8, 50)
    distribution = fit(*data, form=form)(grid)
    error = np.abs(distribution.std / std(grid) - 1)
    assert error.mean() < 0.1
    assert error.max() < 0.2
    assert np.mean(np.abs(distribution.mean - mean(grid)) / std(grid)) < 0.2


@pytest.mark.parametrize("form", FORMS)
def test_the_prediction_is_the_forward_pass(form, data):
    x, y = data
    network = fit(x, y, form=form)
    z = np.asarray(network.x_scaler(x[:, None]), float)
    center, output = np.hstack([forward(part, z) for part in network.network.networks]).T
    distribution = network(x)
    np.testing.assert_allclose(distribution.mean, y.mean() + y.std(ddof=1) * center, atol=1e-4)
    variance = network.widening(jnp.asarray(softplus(output) + 1e-6))
    np.testing.assert_allclose(distribution.variance, y.var(ddof=1) * variance, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_the_negative_log_likelihood(form):
    """Of rows of two kinds, the 400 for validation are so many of one and the rest of the other: a whole number."""
    y = np.arange(ROWS) % 4 == 0
    network = fit(np.zeros(ROWS), y, form=form)
    outputs = np.hstack([forward(part, np.zeros((1, 1))) for part in network.network.networks])[0]
    std = np.sqrt(softplus(outputs[1]) + (1e-8 if form == "alternating" else 1e-6))
    standardized = (np.array([0, 1]) - y.mean()) / y.std(ddof=1)
    zeros, ones = -stats.norm.logpdf(standardized, outputs[0], std)
    number = 400 * (network.training.validation_loss - zeros) / (ones - zeros)
    assert 50 < number < 150
    assert abs(number - np.round(number)) < (1e-8 if X64 else 1e-2)


def test_weight_decay_is_that_of_torch():
    """Its steps, written out: the decay joins the gradient before the moments."""
    rate, decay, steps = 0.05, 0.3, 7
    slope, weights = np.array([1.0, -2.0, 0.01]), np.array([3.0, -1.0, 0.5])
    first, second = np.zeros(3), np.zeros(3)
    for step in range(1, steps + 1):
        gradient = slope + decay * weights
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weights = weights - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    row = (jnp.ones((1, 1)),)
    optimum = train_minibatches(
        lambda w, rows, key: (w * jnp.asarray(slope, w.dtype)).sum() * rows[0][:, 0],
        jnp.array([3.0, -1.0, 0.5]),
        row,
        row,
        key=KEY,
        optimizer=Partial(with_weight_decay, optimizer=optax.adam, weight_decay=jnp.asarray(decay)),
        learning_rate=rate,
        max_epochs=steps,
        restore_best=False,
    )
    np.testing.assert_allclose(optimum.params, weights, atol=1e-5)


def test_weight_decay_shrinks_the_weights(data):
    norm = lambda network: sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(network.network))
    plain, decayed = fit(*data), fit(*data, weight_decay=1.0)
    assert norm(decayed) < 0.5 * norm(plain)


def test_noisy_rows_weigh_less_in_the_second_round(data):
    """Where half of the rows are hardly worth anything, only a mean that knows it is right on the others."""
    x, y = data
    noise = (y - mean(x)) / std(x)
    y = x + np.where(x < 0, 10.0, 0.01) * noise
    fits = [fit(x, y, form="alternating", rounds=rounds) for rounds in (1, 2)]
    once, twice = (np.abs(network(x).mean - x)[x > 0].mean() for network in fits)
    assert twice < 0.5 * once
    assert fits[1].training.epochs > fits[0].training.epochs


def test_the_preset_has_the_layers_of_crude(data):
    preset = partial(variance_network.fit, key=KEY, preset="crude")
    (network,) = eqx.filter_eval_shape(preset, *data).network.networks
    assert [layer.weight.shape for layer in network.layers] == [(1024, 1), (1024, 1024), (1024, 1024), (2, 1024)]


def test_the_preset_of_usnrt(data):
    """Its networks, and, with widths of our own, what else it stands for."""
    x, y = data
    inputs = np.stack([x, x**2, np.cos(x)], axis=1)
    preset = partial(variance_network.fit, key=KEY, preset="usnrt")
    networks = eqx.filter_eval_shape(preset, inputs, y).network.networks
    for network in networks:
        assert [layer.weight.shape for layer in network.layers] == [(24, 3), (12, 24), (1, 12)]
    assert [network.activations for network in networks] == [(jax.nn.relu,) * 2, (jnp.tanh,) * 2]
    joint = partial(variance_network.fit, x, y, key=KEY, form="joint", hidden=(16,), max_epochs=3)
    written_out = joint(preset="crude", batch_size=64, learning_rate=0.01, weight_decay=0.0)
    np.testing.assert_array_equal(joint(preset="usnrt")(x).mean, written_out(x).mean)


def test_the_variance_has_a_floor():
    outputs = np.array([-1e3, -10.0, 0.0, 10.0, 1e3])
    for alternating, floor in ((False, 1e-6), (True, 1e-8)):
        variance = as_variance(jnp.asarray(outputs), alternating=alternating)
        np.testing.assert_allclose(variance, softplus(outputs) + floor, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "separate"}, "form must be one of 'joint', 'alternating'; got 'separate'"),
        ({"rounds": 0}, "rounds must be at least 1; got 0"),
        ({"preset": "paper"}, "preset must be one of None, 'crude', 'usnrt'; got 'paper'"),
    ],
)
def test_bad_options(options, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*data, **options)


@pytest.mark.parametrize("form", FORMS)
def test_another_fit_of_so_many_rows_compiles_nothing(form, data):
    x, y = data
    other = jax.random.key(1)
    fit(x, y, form=form, learning_rate=0.01, weight_decay=0.2)(x)
    with compilations() as compiled:
        fit(2 * x, y + 1, form=form, key=other, learning_rate=0.02, weight_decay=0.1)(x)
    assert not compiled


def test_every_alternating_training_has_a_validation_set_of_its_own():
    """Of padded rows, too: those beyond the numbers that there are belong to no part."""
    y = jnp.arange(14.0)
    data = (y[:9, None], y[:9]), (y[9:, None], y[9:])
    num_rows = 8, 3  # so that rows 8, 12 and 13 are padding
    there = {*range(8), 9, 10, 11}
    parts = []

    def train(loss, network, training, validation, *, key):
        jax.debug.callback(lambda *rows: parts.append(rows), training[0], validation[0])  # in a loop, traced
        return Optimum(network, jnp.zeros(()), jnp.zeros((), int), jnp.zeros((), int))

    new = partial(FeedForward, 1, (2,))
    alternate(data, num_rows, new, new, train, KEY, 2, anew=True)
    jax.effects_barrier()
    divided = [
        tuple({*rows[:number, 0].tolist()} for rows, number in zip(part, num_rows, strict=True)) for part in parts
    ]
    assert [(len(first), len(second), first | second) for first, second in divided] == [(8, 3, there)] * 4
    assert len({frozenset(second) for _, second in divided}) > 1
