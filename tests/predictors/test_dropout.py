"""Monte Carlo and concrete dropout: their masks, moments, noise and learned rates, and their answers to bad input."""

import itertools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import expit, logit

from jaxcal import Mixture, Normal, Point
from jaxcal.networks import ConcreteNetwork, FeedForward
from jaxcal.predictors import dropout

pytestmark = pytest.mark.contract_in_32_bits

TOLERANCE = 1e-6 if jax.config.jax_enable_x64 else 1e-4
KEY = jax.random.key(0)
# One setting and one size for nearly all tests, so that they share what is compiled.
SETTING: dict[str, Any] = {
    "key": KEY,
    "rate": 0.25,
    "num_samples": 400,
    "hidden": (4, 3),
    "batch_size": 200,
    "max_epochs": 60,
    "patience": 60,
    "learning_rate": 0.02,
}
ROWS = 2000


def fit(x, y, **options):
    return dropout.fit(x, y, **(SETTING | options))


@pytest.fixture
def data(rng):
    return sample(rng)


def sample(rng):
    x = rng.normal(size=(ROWS, 2))
    return x, np.abs(x[:, 0]) + x[:, 1] + 0.5 * rng.normal(size=ROWS)


def forward(layers, x, masks, rate):
    """The outputs of a ReLU network whose hidden activations are kept where the mask is 1, and scaled up."""
    for (weight, bias), mask in zip(layers[:-1], masks, strict=True):
        x = np.maximum(x @ weight.T + bias, 0) * mask / (1 - rate)
    weight, bias = layers[-1]
    return (x @ weight.T + bias)[:, 0]


def test_every_sample_is_the_forward_pass_of_one_mask(data):
    """Each is one of the 2^7 possible networks, the same one in all rows."""
    x, y = data
    fitted = fit(x, y, distribution="mixture")
    samples = (np.asarray(fitted(x).components.mean, float)[:, :40] - y.mean()) / y.std(ddof=1)
    # As they were before they were drawn to their mean, or from it.
    middle = samples.mean(axis=0)
    samples = middle + (samples - middle) / np.sqrt(float(fitted.widening.factor))
    z = np.asarray(fitted.x_scaler(x), float)[:40]
    layers = [(np.asarray(l.weight, float), np.asarray(l.bias, float)) for l in fitted.passes.network.layers]
    masks = np.array(list(itertools.product((0, 1), repeat=7)))
    possible = np.array([forward(layers, z, (mask[:4], mask[4:]), 0.25) for mask in masks])
    distances = np.abs(samples[:, None] - possible[None]).max(axis=-1)
    assert distances.min(axis=1).max() < TOLERANCE
    # And no mask is favored: the mean over samples is that over masks, by their probabilities.
    probabilities = np.prod(np.where(masks, 0.75, 0.25), axis=1)
    mean = probabilities @ possible
    variance = probabilities @ (possible - mean) ** 2
    z_scores = (samples.mean(axis=0) - mean) / np.sqrt(variance / len(samples))
    assert np.abs(z_scores).max() < 4
    np.testing.assert_allclose(samples.var(axis=0).mean(), variance.mean(), rtol=0.2)


def test_a_fraction_of_the_activations_is_dropped():
    """Of 10,000 units with activation 1, `rate` are 0 and the rest 1 / (1 - rate); without a key, none is."""
    network = eqx.filter_jit(FeedForward)(1, (10_000,), "scalar", key=KEY)
    network = eqx.tree_at(lambda n: n.layers[0].bias, network, jnp.ones(10_000))
    (dropped,) = network.features(jnp.zeros(1), rate=0.2, key=KEY)
    assert set(np.unique(dropped)) == {0, np.asarray(1, dropped.dtype) / np.asarray(0.8, dropped.dtype)}
    assert abs(np.mean(dropped == 0) - 0.2) < 0.02
    (kept,) = network.features(jnp.zeros(1), rate=0.2)
    np.testing.assert_array_equal(kept, np.ones(10_000))


def test_the_distribution_is_that_of_the_moments_or_the_mixture(data):
    x, y = data
    normal, mixture = fit(x, y)(x), fit(x, y, distribution="mixture")(x)
    assert isinstance(normal, Normal)
    assert isinstance(mixture, Mixture)
    samples, noise = np.asarray(mixture.components.mean, float), np.asarray(mixture.components.std, float)
    np.testing.assert_array_equal(noise, np.broadcast_to(noise[0], noise.shape))
    assert noise.min() > 0
    np.testing.assert_allclose(normal.mean, samples.mean(axis=0), atol=TOLERANCE)
    np.testing.assert_allclose(normal.variance, samples.var(axis=0) + noise[0] ** 2, rtol=1e-3)


@pytest.mark.parametrize("rate", [0.02, 0.25])
def test_the_variance_is_that_of_new_errors(rate, data, rng):
    """On average and to a fifth, however much of it dropout explains: the noise is the rest."""
    new_x, new_y = sample(rng)
    distribution = fit(*data, rate=rate)(new_x)
    np.testing.assert_allclose(np.mean(distribution.variance), np.mean((new_y - distribution.mean) ** 2), rtol=0.2)


def test_the_passes_may_leave_no_noise(data):
    """Where dropout explains more than the errors there are, the noise is 0, not the root of something negative."""
    x, _ = data
    fitted = fit(x, x[:, 0], rate=0.4)
    assert fitted.noise_std == 0
    assert np.isfinite(jax.grad(lambda x: fitted(x).std.sum())(jnp.asarray(x))).all()


@pytest.mark.slow
def test_the_preset_is_that_of_crude(data):
    """Its layers, and, with layers of our own, what else it stands for."""
    x, y = data
    network = eqx.filter_eval_shape(partial(dropout.fit, key=KEY, preset="crude"), x, y).passes.network
    assert [l.weight.shape for l in network.layers] == [(1024, 2), (1024, 1024), (1024, 1024), (1, 1024)]
    crude = SETTING | {"preset": "crude", "rate": 0.2, "learning_rate": None}
    samples = lambda **options: dropout.fit(x, y, distribution="mixture", **(crude | options))(x).components
    assert isinstance(samples(), Point)
    written_out = samples(preset="usnrt", learning_rate=1e-4, weight_decay=0.01)
    np.testing.assert_array_equal(samples().mean, written_out.mean)
    for change in ({"learning_rate": 1e-3}, {"weight_decay": 0.0}):
        assert not np.array_equal(samples().mean, samples(**change).mean)


def test_the_preset_of_usnrt(data):
    """Its layers, without noise where the rate is given, for two inputs."""
    x, y = data
    preset = partial(dropout.fit, key=KEY, preset="usnrt")
    widths = lambda network: [layer.weight.shape[0] for layer in network.layers]
    given = eqx.filter_eval_shape(partial(preset, rate=0.5), x, y)
    assert widths(given.passes.network) == [16, 32, 8, 1]
    assert given.noise_std is None
    learned = eqx.filter_eval_shape(partial(preset, rate="concrete"), x, y)
    assert widths(learned.passes.network.network) == [16, 8, 2]


def test_the_masks_of_concrete_dropout():
    """Of 10,000 inputs that one layer lets through: their distribution is the Concrete one, at temperature 0.1."""
    size, rate = 10_000, 0.3
    single = eqx.filter_jit(FeedForward)(1, (), 1, key=KEY)
    network = with_rates(ConcreteNetwork(single), [rate])
    network = eqx.tree_at(lambda n: n.network.layers[0].weight, network, jnp.ones((1, 1)))
    masks = jax.vmap(lambda key: network(jnp.ones(1), key=key)[0])(jax.random.split(KEY, size)) * (1 - rate)
    assert abs(np.mean(masks < 0.5) - rate) < 0.02
    # z < c where the noise, of a logistic distribution, is below t logit(c) + logit(p).
    inner = masks[(masks > 1e-3) & (masks < 1 - 1e-3)]
    cdf = lambda c: expit(0.1 * logit(c) + logit(rate))
    ends = cdf(np.array([1e-3, 1 - 1e-3]))
    assert abs(len(inner) / size - np.diff(ends)[0]) < 0.02
    assert stats.kstest(inner, lambda c: (cdf(c) - ends[0]) / np.diff(ends)).pvalue > 0.01
    np.testing.assert_allclose(network(jnp.ones(1)), 1)


def with_rates(network, rates):
    logits = jnp.asarray(logit(np.array(rates)), network.rate_logits.dtype)
    return eqx.tree_at(lambda n: n.rate_logits, network, logits)


def test_the_divergence_of_concrete_dropout():
    """Equations 3 and 4 by hand, for layers of 3 and 5 inputs."""
    network = with_rates(ConcreteNetwork(eqx.filter_jit(FeedForward)(3, (5,), 2, key=KEY)), [0.2, 0.6])
    first, second = (np.sum(np.asarray(layer.weight, float) ** 2) for layer in network.network.layers)
    weights = 0.7**2 / 2 * (first / 0.8 + second / 0.4)
    entropies = 3 * stats.bernoulli.entropy(0.2) + 5 * stats.bernoulli.entropy(0.6)
    np.testing.assert_allclose(network.divergence(0.7), weights - entropies, rtol=1e-5)
    np.testing.assert_allclose(network.rates, [0.2, 0.6], rtol=1e-5)
    # Its derivative is finite at a rate that underflows.
    slope = jax.grad(lambda logits: eqx.tree_at(lambda n: n.rate_logits, network, logits).divergence(0.7))
    assert np.isfinite(slope(jnp.array([-1000.0, 0.0], network.rate_logits.dtype))).all()


def test_the_loss_of_concrete_dropout(rng):
    """At rates too small to drop anything: the negative log likelihood, in training with its part of the divergence."""
    network = with_rates(ConcreteNetwork(eqx.filter_jit(FeedForward)(2, (), 2, key=KEY)), [1e-9])
    x, y = rng.normal(size=(7, 2)), rng.normal(size=7)
    mean, log_variance = np.asarray(network.network.layers[0].weight, float) @ x.T
    expected = -stats.norm.logpdf(y, mean, np.exp(log_variance / 2))
    loss = partial(dropout._evidence_bound, network, (jnp.asarray(x), jnp.asarray(y)))
    options = {"length_scale": jnp.asarray(5.0), "num_rows": jnp.asarray(30.0)}
    np.testing.assert_allclose(loss(None, **options), expected, atol=TOLERANCE)
    np.testing.assert_allclose(loss(KEY, **options), expected + network.divergence(5.0) / 30, atol=TOLERANCE)


@pytest.mark.slow
def test_learned_rates_grow_with_the_noise_and_with_fewer_rows(data):
    x, _ = data
    rates = lambda x, noise: concrete(x, x[:, 0] + noise).passes.network.rates
    noise = np.sin(100 * x[:, 1])
    quiet, loud = rates(x, 0.1 * noise), rates(x, 10 * noise)
    few = rates(x[:50], 0.1 * noise[:50])
    assert (quiet[1:] < 0.1).all()
    assert (loud[1:] > 2 * quiet[1:]).all()
    assert (few[1:] > 2 * quiet[1:]).all()


def concrete(x, y, **options):
    return fit(x, y, **({"rate": "concrete", "hidden": (16, 16)} | options))


@pytest.mark.slow
def test_concrete_dropout_learns_the_noise(data, rng):
    """Whose std grows sevenfold; its mixture and its normal distribution have the same moments."""
    x, _ = data
    std = np.exp(x[:, 0])
    y = x[:, 1] + std * rng.normal(size=ROWS)
    normal, mixture = concrete(x, y)(x), concrete(x, y, distribution="mixture")(x)
    inside = np.abs(x).max(axis=1) < 1.5
    np.testing.assert_allclose(np.mean((normal.std / std)[inside]), 1, atol=0.15)
    assert np.corrcoef(np.log(normal.std), x[:, 0])[0, 1] > 0.9
    means, stds = (np.asarray(values, float) for values in (mixture.components.mean, mixture.components.std))
    np.testing.assert_allclose(normal.mean, means.mean(axis=0), atol=TOLERANCE)
    np.testing.assert_allclose(normal.variance, means.var(axis=0) + (stds**2).mean(axis=0), rtol=1e-3)


def test_a_prediction_is_reproducible_and_the_key_decides_it(data):
    x, y = data
    fitted = fit(x, y)
    np.testing.assert_array_equal(fitted(x).mean, fitted(x).mean)
    np.testing.assert_array_equal(fitted(x).mean, fit(x, y)(x).mean)
    assert not np.allclose(fitted(x).mean, fit(x, y, key=jax.random.key(1))(x).mean)


def test_many_masks_do_not_fill_the_memory(data):
    """Neither for a prediction nor for its gradient is [masks, rows, units] ever made."""
    x, y = data
    fitted = fit(x, y)
    activations = 400 * ROWS * 4 * fitted(x).mean.dtype.itemsize
    total = lambda x: fitted(x).mean.sum()
    for function in (total, jax.grad(total)):
        memory = jax.jit(function).lower(jnp.asarray(x)).compile().memory_analysis()
        assert memory.temp_size_in_bytes < activations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 20}, r"rate must lie between 0 and 1; got 20: did you mean 0.2\?"),
        ({"rate": 0.0}, "rate must lie between 0 and 1; got 0"),
        ({"rate": "learned"}, "rate must be one of 'concrete'; got 'learned'"),
        ({"rate": "concrete", "length_scale": 0.0}, "length_scale must be positive; got 0"),
        ({"rate": "concrete", "preset": "crude"}, "preset must be one of None, 'usnrt'; got 'crude'"),
        ({"num_samples": 1}, "num_samples must be at least 2; got 1"),
        ({"distribution": "point"}, "distribution must be one of 'normal', 'mixture'; got 'point'"),
        ({"hidden": ()}, "hidden must hold at least one width: dropout follows the hidden layers"),
        ({"preset": "paper"}, "preset must be one of None, 'crude', 'usnrt'; got 'paper'"),
    ],
)
def test_bad_options(options, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*data, **options)
