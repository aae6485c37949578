"""The attentive neural process: its bound and initial values, what it learns, its answers to bad input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from jaxcal import Mixture, Normal, metrics
from jaxcal.optimize import Result
from jaxcal.predictors import neural_process

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
N = 200
SMALL = {"key": KEY, "width": 16, "batch_size": 8, "max_iterations": 200, "learning_rate": 5e-3}


def table(seed, n=N):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    return x, 7 + 3 * np.sin(x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=n)


@pytest.fixture(scope="module")
def fitted():
    return neural_process.fit(*table(0), **SMALL)


def test_learns_a_table(fitted):
    x, y = table(1)
    distribution = fitted(x)
    assert isinstance(distribution, Mixture)
    assert metrics.rmse(y, distribution) < 0.3 * y.std()
    assert metrics.coverage(y, distribution, confidence_level=0.9) > 0.8
    assert fitted.training.result == Result.STEP_LIMIT


def normal_divergence(mean, std, other_mean, other_std):
    """KL(N(mean, std^2) || N(other_mean, other_std^2)) by numerical integration."""
    own, other = scipy.stats.norm(mean, std), scipy.stats.norm(other_mean, other_std)
    integrand = lambda z: own.pdf(z) * (own.logpdf(z) - other.logpdf(z))
    return scipy.integrate.quad(integrand, mean - 12 * std, mean + 12 * std, points=[mean])[0]


def negative_elbo(y, predicted, posterior, prior):
    """What is to be minimized, of the sums over targets and latents, divided by the number of targets."""
    log_likelihood = sum(scipy.stats.norm.logpdf(y, *predicted))
    divergence = sum(normal_divergence(*each) for each in zip(*posterior, *prior, strict=True))
    return -(log_likelihood - divergence) / len(y)


@pytest.mark.parametrize(("num_targets", "num_latents"), [(1, 1), (5, 3), (64, 2), (2, 8)])
def test_elbo_is_that_of_numerical_integration(num_targets, num_latents, rng):
    pair = lambda size: (rng.normal(size=size), rng.uniform(0.1, 1.0, size=size))
    y, predicted, posterior, prior = rng.normal(size=num_targets), *map(pair, (num_targets, num_latents, num_latents))
    found = jax.jit(neural_process._negative_elbo)(y, predicted, posterior, prior)
    np.testing.assert_allclose(found, negative_elbo(y, predicted, posterior, prior), rtol=1e-8 if X64 else 1e-4)


def forward(network, x):
    """A network of ReLU in numpy."""
    *hidden, last = [(np.asarray(layer.weight, float), np.asarray(layer.bias, float)) for layer in network.layers]
    for weight, bias in hidden:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ last[0].T + last[1]


def latents(network, x, y):
    """Mean and std of q(z | rows), with the std of Kim et al.'s code."""
    mean, spread = np.split(
        forward(network.latent_distribution, forward(network.latent_encoder, np.c_[x, y]).mean(axis=0)), 2
    )
    return mean, 0.1 + 0.9 * scipy.special.expit(spread)


def attend(network, x, context_x, context_y):
    """Eight heads of scaled dot-product attention, one after another (Kim et al., section 3)."""
    parts = "query_proj", "key_proj", "value_proj", "output_proj"
    weights = [np.asarray(getattr(network.attention, part).weight, float) for part in parts]
    inputs = forward(network.embedding, x), forward(network.embedding, context_x)
    inputs = *inputs, forward(network.encoder, np.c_[context_x, context_y])
    heads = [np.split(rows @ weight.T, 8, axis=1) for rows, weight in zip(inputs, weights[:3], strict=True)]
    soft = lambda q, k: scipy.special.softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1)
    found = [soft(q, k) @ v for q, k, v in zip(*heads, strict=True)]
    return np.hstack(found) @ weights[3].T


@pytest.mark.parametrize("num_context", [1, 4, 8])
def test_loss_of_a_context_is_that_of_its_rows_alone(num_context, rng):
    """The oracle is given the first rows only; the library has all nine, and a mask."""
    network = neural_process._initial_network(2, 16, 0.1, jnp.zeros(()).dtype, key=KEY)
    # Larger weights: the divergence and the attention differ more from those of other rows.
    network = jax.tree.map(lambda leaf: 1.5 * leaf if eqx.is_array(leaf) else leaf, network)
    x, y, noise = rng.normal(size=(9, 2)), rng.normal(size=9), rng.normal(size=16)
    found = eqx.filter_jit(neural_process._context_loss)(network, *map(np.asarray, (x, y, num_context, noise)))

    context = x[:num_context], y[:num_context]
    prior, posterior = latents(network, *context), latents(network, x, y)
    z = np.broadcast_to(posterior[0] + posterior[1] * noise, (9, 16))
    mean, spread = forward(network.decoder, np.c_[x, attend(network, x, *context), z]).T
    std = 0.1 + 0.9 * np.logaddexp(0, spread)
    expected = negative_elbo(y, (mean, std), posterior, prior)
    np.testing.assert_allclose(found, expected, rtol=1e-8 if X64 else 1e-4)


def glorot(layer):
    """The distribution of Keras's initial weights, the default of the authors' `tf.layers.dense`."""
    limit = np.sqrt(6 / sum(layer.weight.shape))
    return scipy.stats.uniform(-limit, 2 * limit)


def test_initial_values_are_those_of_the_authors_code():
    """attentive_neural_process.ipynb of google-deepmind/neural-processes, with the sizes of RIO's appendix D.1."""
    network = neural_process._initial_network(6, 64, 0.1, jnp.zeros(()).dtype, key=KEY)
    sizes = {
        "latent_encoder": [7, 64, 64, 64, 64],
        "latent_distribution": [64, 64, 128],
        "encoder": [7, 64, 64, 64, 64],
        "embedding": [6, 64, 64],
        "decoder": [6 + 64 + 64, 64, 64, 64, 64, 2],
    }
    drawn = []
    for name, widths in sizes.items():
        layers = getattr(network, name).layers
        assert [layers[0].weight.shape[1], *(len(layer.weight) for layer in layers)] == widths
        assert not any(np.any(layer.bias) for layer in layers)
        drawn += [(layer.weight, glorot(layer)) for layer in layers if name != "latent_distribution"]
    penultimate, last = network.latent_distribution.layers
    # The mean and the std of z come from a layer each, of 64 units.
    drawn += [(weight, glorot(penultimate)) for weight in (penultimate.weight, *np.split(np.asarray(last.weight), 2))]
    for part in ("query_proj", "key_proj", "value_proj", "output_proj"):
        projection = getattr(network.attention, part)
        assert projection.bias is None
        assert projection.weight.shape == (64, 64)
        drawn.append((projection.weight, scipy.stats.norm(scale=64**-0.5)))
    for weight, expected in drawn:
        assert scipy.stats.kstest(np.ravel(weight), expected.cdf).pvalue > 1e-3
    assert len({float(weight[0, 0]) for weight, _ in drawn}) == len(drawn)


@pytest.mark.slow
def test_preset_takes_steps_of_its_learning_rate_from_there():
    """The first step of Adam is the learning rate, for every weight with a gradient."""
    x, y = table(0, 20)
    process = neural_process.fit(x, y, key=KEY, batch_size=1, max_iterations=1, preset="paper")
    start = neural_process._initial_network(2, 64, 0.1, process.y_scaler.scale.dtype, key=jax.random.split(KEY, 4)[1])
    networks = [eqx.filter(network, eqx.is_array) for network in (process.network, start)]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), *networks)
    np.testing.assert_allclose(jax.tree.leaves(moved), 1e-4, rtol=1e-2)


PAPER = {"key": KEY, "width": 8, "max_context": 5, "batch_size": 2, "preset": "paper"}


def rows_of_preset(x, y, process):
    """The rows y that the preset trains on, in the units of the table, and the validation set."""
    rows = neural_process._split(jnp.asarray(x), jnp.asarray(y), 0.2, 5, (), KEY, paper=True)
    return np.sort(scaled_back(process.y_scaler, rows.train[1])), rows.validation


@pytest.mark.slow
def test_preset_trains_on_all_rows_without_a_validation_set():
    x, y = table(0)
    process = neural_process.fit(x, y, **PAPER)
    assert process.iterations == 2000
    assert process.training.result == Result.STEP_LIMIT
    assert process.training.validation_loss is None
    trained, validation = rows_of_preset(x[None], y[None], process)
    np.testing.assert_allclose(trained, np.sort(y)[None], rtol=1e-5)
    assert validation is None
    narrowest = eqx.tree_at(
        lambda p: (p.network.decoder.layers[-1].bias, p.noise), process, (jnp.array([0.0, -1e3]), None)
    )
    np.testing.assert_allclose(narrowest(x).std, 0.1 * y.std(ddof=1), rtol=1e-4)


@pytest.mark.slow
def test_divergence_of_the_preset_is_reported():
    x, y = table(0)
    diverged = neural_process.fit(x, y, **PAPER, learning_rate=1e30, throw=False)
    assert diverged.training.result == Result.NOT_FINITE
    assert diverged.iterations < 2000
    assert diverged.training.validation_loss is None
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        neural_process.fit(x, y, **PAPER, learning_rate=1e30)


@pytest.mark.slow
def test_preset_trains_on_all_functions_without_a_validation_set():
    x, y = waves(np.random.default_rng(0), 5, 8)
    process = neural_process.fit(x, y, **PAPER, max_iterations=200)
    trained, validation = rows_of_preset(x[..., None], y, process)
    np.testing.assert_allclose(trained, np.sort(y), atol=1e-5)
    assert validation is None
    assert process.training.validation_loss is None


def scaled_back(scaler, values):
    return np.asarray(scaler.loc) + np.asarray(scaler.scale) * np.asarray(values)


def log_loss(process, x, y, context):
    """The mean negative log likelihood, on the scale of `y_scaler`, with the latents at their mean."""
    distribution = eqx.tree_at(lambda p: p.noise, process, None)(x, context=context)
    return -np.mean(distribution.log_prob(y)) - np.log(process.y_scaler.scale)


def held_out(x, y, process, max_context):
    """The targets trained on, and the validation set (context_x, context_y, x, y), in the units of the table."""
    key = jax.random.split(KEY, 4)[0]
    rows = neural_process._split(jnp.asarray(x), jnp.asarray(y), 0.2, max_context, (), key, paper=False)
    scalers = (process.x_scaler, process.y_scaler) * 2
    parts = [scaled_back(*each) for each in zip(scalers, rows.validation, strict=True)]
    return scaled_back(process.y_scaler, rows.train[1]), parts


def test_validation_loss_of_a_table_is_of_a_fifth_of_its_rows(fitted):
    x, y = table(0)
    train_y, (context_x, context_y, held_x, held_y) = held_out(x[None], y[None], fitted, 50)
    assert held_y.shape == (1, N // 5)
    assert context_y.shape == (1, 50)
    np.testing.assert_allclose(np.sort(np.hstack([train_y, held_y])[0]), np.sort(y), rtol=1e-5)
    expected = log_loss(fitted, held_x[0], held_y[0], (context_x[0], context_y[0]))
    np.testing.assert_allclose(fitted.training.validation_loss, expected, rtol=1e-8 if X64 else 1e-3)


@pytest.mark.slow
def test_one_member_is_a_normal_distribution_near_the_mixture(fitted):
    x, y = table(1)
    distribution = neural_process.fit(*table(0), **SMALL, num_samples=None)(x)
    assert isinstance(distribution, Normal)
    np.testing.assert_allclose(distribution.mean, fitted(x).mean, atol=0.1 * y.std())


def waves(rng, number, n):
    """Functions a sin(x + b), and inputs in no order."""
    x = rng.uniform(-3, 3, size=(number, n))
    size, phase = rng.uniform(0.5, 2, size=(number, 1)), rng.uniform(0, np.pi, size=(number, 1))
    return x, size * np.sin(x + phase)


@pytest.fixture(scope="module")
def of_waves():
    rows = waves(np.random.default_rng(0), 300, 30)
    return neural_process.fit(*rows, key=KEY, width=32, max_context=10, max_iterations=1000, learning_rate=2e-3)


@pytest.mark.slow
def test_validation_loss_of_a_family_is_of_a_fifth_of_its_functions(of_waves):
    x, y = waves(np.random.default_rng(0), 300, 30)
    train_y, parts = held_out(x[..., None], y, of_waves, 10)
    assert train_y.shape == (240, 30)
    assert parts[3].shape == (60, 20)
    losses = [log_loss(of_waves, *part[2:], part[:2]) for part in zip(*parts, strict=True)]
    np.testing.assert_allclose(of_waves.training.validation_loss, np.mean(losses), rtol=1e-8 if X64 else 1e-3)


@pytest.mark.slow
def test_goes_on_from_the_context_of_another_function(of_waves, rng):
    x, y = waves(rng, 30, 40)
    distributions = [of_waves(own_x[10:], context=(own_x[:10], own_y[:10])) for own_x, own_y in zip(x, y, strict=True)]
    errors = [metrics.rmse(own_y[10:], distribution) for own_y, distribution in zip(y, distributions, strict=True)]
    covered = [
        metrics.coverage(own_y[10:], distribution, confidence_level=0.9)
        for own_y, distribution in zip(y, distributions, strict=True)
    ]
    assert np.median(errors) < 0.3 * y.std()
    assert np.mean(covered) > 0.8


@pytest.mark.slow
def test_the_less_is_known_the_wider(of_waves, rng):
    x, y = waves(rng, 10, 20)
    widths = [
        np.mean([of_waves(x[i], context=(x[i, :rows], y[i, :rows])).std.mean() for i in range(10)]) for rows in (1, 10)
    ]
    assert widths[0] > widths[1]
    with pytest.raises(ValueError, match="trained on several functions: give the context"):
        of_waves(x[0])


NAN_AT_3 = np.where(np.arange(N) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": NAN_AT_3}, r"x holds 1 values that are NaN or infinite, the first at index \(3, 0\)"),
        ({"y": NAN_AT_3}, "y holds 1 values that are NaN or infinite, the first at index 3"),
        ({"x": np.ones((N - 1, 2))}, f"y has {N} rows where {N - 1} are expected"),
        ({"y": np.ones((4, 20))}, r"x must have shape \(f, n, d\) with y of shape \(f, n\) = \(4, 20\)"),
        ({"x": np.ones((3, 2)), "y": np.arange(3.0)}, "the number of rows of a function must be at least 4; got 3"),
        ({"width": 20}, "width must be a multiple of 8, the number of heads; got 20"),
        ({"max_context": 0}, "max_context must be at least 1; got 0"),
        ({"num_samples": 0}, "num_samples must be at least 1; got 0"),
        ({"max_iterations": 0}, "iterations must be at least 1; got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"validation_fraction": 0.994}, "the number of rows to train on must be at least 2; got 1"),
        ({"preset": "kim"}, "preset must be one of None, 'paper'; got 'kim'"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    x, y = table(0)
    with pytest.raises(ValueError, match=message):
        neural_process.fit(**{"x": x, "y": y, "key": KEY, **change})


@pytest.mark.parametrize(
    ("x", "context", "message"),
    [
        (np.ones((3, 1)), None, "x has 1 columns; the fit had 2"),
        (np.ones((3, 2)), (np.ones((4, 2)), np.ones(5)), r"context\[0\] has 4 rows where 5 are expected"),
        (np.ones((3, 2)), (np.ones((4, 3)), np.ones(4)), "has 3 columns"),
        (np.ones((3, 2)), (np.ones((1, 2)), np.array([np.nan])), r"context\[1\] holds 1 values that are NaN"),
    ],
)
def test_bad_calls_are_refused(fitted, x, context, message):
    with pytest.raises(ValueError, match=message):
        fitted(x, context=context)
