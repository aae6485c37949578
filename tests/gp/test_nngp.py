"""The neural-network Gaussian process: its kernel against random wide networks, its grid, its answers to bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from gpjax.kernels import Matern32
from gpjax.parameters import NonNegativeReal

from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import kernels
from jaxcal.gp import Exact, GaussianNoise, Stochastic
from jaxcal.gp.kernels import GPJaxKernel
from jaxcal.gp.model import Data
from jaxcal.gp.nngp import NNGP
from jaxcal.predictors import gaussian_process

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
WEIGHT, BIAS = 1.7, 0.3
POINTS = np.array([[1.0, -0.5, 2.0], [0.4, 0.3, -1.0], [-1.0, 0.5, -2.0], [0.0, 0.0, 0.0]])


def covariance(depth, points=POINTS):
    return np.asarray(
        jax.jit(GPJaxKernel(NNGP(depth, WEIGHT, BIAS)).__call__)(jnp.asarray(points), jnp.asarray(points))
    )


def layer(rng, inputs, width):
    """The activations [..., units, points] of another layer: weights N(0, WEIGHT / inputs), biases N(0, BIAS)."""
    shape = (*inputs.shape[:-2], width)
    weights = rng.normal(scale=np.sqrt(WEIGHT / inputs.shape[-2]), size=(*shape, inputs.shape[-2]))
    return weights @ inputs + rng.normal(scale=np.sqrt(BIAS), size=(*shape, 1))


@pytest.mark.parametrize("correlation", [-1.0, -0.6, 0.0, 0.8, 1.0])
def test_relu_covariance_is_the_integral(correlation):
    std, other = 0.7, 1.9

    def given(u):
        """E[relu(v) | u] times relu(u)."""
        mean, spread = correlation * other / std * u, other * np.sqrt(1 - correlation**2)
        if spread == 0:
            return max(u, 0) * max(mean, 0)
        z = mean / spread
        return max(u, 0) * (mean * scipy.stats.norm.cdf(z) + spread * scipy.stats.norm.pdf(z))

    expected, _ = scipy.integrate.quad(lambda u: given(u) * scipy.stats.norm.pdf(u, scale=std), -8, 8, points=[0])
    found = kernels.relu_covariance(*map(jnp.asarray, (correlation * std * other, std**2, other**2)))
    np.testing.assert_allclose(found, expected, rtol=1e-6 if X64 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_kernel_is_the_covariance_over_the_units_of_a_wide_network(depth, rng):
    """Of 8000 units the error is some 2 %."""
    hidden = POINTS.T
    for width in [2000] * (depth - 1) + [8000]:
        hidden = np.maximum(layer(rng, hidden, width), 0)
    empirical = BIAS + WEIGHT * hidden.T @ hidden / hidden.shape[0]
    np.testing.assert_allclose(covariance(depth), empirical, rtol=0.1)


def test_kernel_is_the_covariance_over_random_networks(rng):
    """Of the outputs of 4000 networks of two hidden layers, within four standard errors."""
    hidden = np.maximum(layer(rng, np.broadcast_to(POINTS.T, (4000, 3, 4)), 100), 0)
    outputs = layer(rng, np.maximum(layer(rng, hidden, 100), 0), 1)[:, 0]
    products = outputs[:, :, None] * outputs[:, None]
    error = products.std(axis=0) / np.sqrt(len(products))
    assert np.all(np.abs(products.mean(axis=0) - covariance(2)) < 4 * error)


def test_derivatives_are_finite_and_those_of_differences():
    """Also at equal rows, where the angle between them has no derivative, and at the origin without a bias."""

    @jax.jit
    def total(variances, x):
        kernel = GPJaxKernel(NNGP(2, variances[0], variances[1]))
        return jnp.sum(jnp.sin(kernel(x, x)))

    x = jnp.asarray(np.vstack([POINTS, POINTS[:1]]))
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    by_variances, by_inputs = gradients(jnp.array([WEIGHT, BIAS]), x)
    assert jnp.all(jnp.isfinite(by_inputs))
    step = 1e-5 if X64 else 1e-2
    for i, shift in enumerate(step * jnp.eye(2)):
        up, down = (total(jnp.array([WEIGHT, BIAS]) + sign * shift, x) for sign in (1, -1))
        np.testing.assert_allclose(by_variances[i], (up - down) / (2 * step), rtol=1e-6 if X64 else 5e-2)
    assert jnp.all(jnp.isfinite(gradients(jnp.array([WEIGHT, 0.0]), x)[1]))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(25, 2))
    return x, 3 + np.abs(x[:, 0]) - x[:, 1] + 0.1 * rng.normal(size=25)


# RIO, appendix D.1: 30 points evenly spaced from 0.1 to 5 and 30 from 0 to 2.
GRID = [(0.1 + 4.9 * i / 29, 2 * j / 29) for i in range(30) for j in range(30)]


def relu_gram(x, weight, bias, depth=2):
    """The covariance of a wide network of ReLU by angles between rows (Cho & Saul 2009, eq. 6), in numpy."""
    gram = bias + weight * x @ x.T / x.shape[1]
    for _ in range(depth):
        std = np.sqrt(np.diag(gram))
        cosine = np.clip(gram / np.outer(std, std), -1, 1)
        angle = np.arccos(cosine)
        gram = bias + weight * np.outer(std, std) * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
    return gram


def test_initial_values_of_the_preset_are_the_grid_of_the_paper(data):
    x, y = map(jnp.asarray, data)
    unscaled = Standardizer.identity(y)
    rows, given = Data(Standardizer.of(x)(x), unscaled(y)), gaussian_process.GivenParts(None, None)
    starts = gaussian_process._initial_models(given, unscaled, "nngp", rows)
    is_kernel = lambda node: isinstance(node, NNGP)
    (kernel,) = filter(is_kernel, jax.tree.leaves(starts, is_leaf=is_kernel))
    pairs = np.column_stack([kernel.weight_variance.unwrap(), kernel.bias_variance.unwrap()])
    np.testing.assert_allclose(pairs, GRID, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.exp(starts.log_noise), 0.01, rtol=1e-6)
    assert kernel.depth == 2


@pytest.mark.skipif(not X64, reason="the oracle works in float64")
def test_preset_takes_the_pair_of_the_greatest_evidence(data):
    x, y = data
    fit = gaussian_process.fit(x, y, preset="nngp")
    scaled = (x - x.mean(axis=0)) / x.std(axis=0, ddof=1)

    def log_evidence(weight, bias):
        covariance = relu_gram(scaled, weight, bias) + (0.01 + 1e-6) * np.eye(25)
        return scipy.stats.multivariate_normal(np.zeros(25), covariance).logpdf(y)

    values = [log_evidence(*pair) for pair in GRID]
    found = [float(part.unwrap()) for part in (fit.kernel.weight_variance, fit.kernel.bias_variance)]
    np.testing.assert_allclose(found, GRID[np.argmax(values)], rtol=1e-8)
    np.testing.assert_allclose(fit.evidence, max(values), rtol=1e-8)
    assert fit.failed_initial_values == 0
    assert fit.iterations == 0


@pytest.mark.slow
def test_evidence_grows_from_the_noise_of_the_preset_to_a_learnt_one(data):
    fit = partial(gaussian_process.fit, *data, kernel="nngp", inference=Exact(tolerance=0.0))
    given, learned = fit(noise=GaussianNoise(variance=0.5)), fit()
    np.testing.assert_allclose(given.noise_variance, 0.5, rtol=1e-3)
    assert learned.evidence > given.evidence
    assert learned.noise_variance < 0.5
    assert given.result == learned.result == 0
    with pytest.raises(TypeError, match="lengthscale is there for a squared-exponential kernel; this is NNGP"):
        learned.lengthscale  # noqa: B018


@pytest.mark.slow
def test_any_kernel_of_gpjax_and_any_depth(data):
    x, y = data
    for kernel in (Matern32(), NNGP(depth=4)):
        distribution = gaussian_process.fit(x, y, kernel=kernel)(x)
        assert np.corrcoef(distribution.mean, y)[0, 1] > 0.95


@pytest.mark.slow
def test_initial_values_that_cannot_be_factorized_are_counted(data):
    broken = NNGP(2, NonNegativeReal(jnp.nan))
    fit = gaussian_process.fit(*data, kernel=broken, throw=False)
    assert fit.failed_initial_values == 4
    with pytest.raises(FloatingPointError, match="could not be factorized"):
        gaussian_process.fit(*data, kernel=broken)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": "rbf"}, ValueError, "kernel must be one of 'squared_exponential', 'nngp'; got 'rbf'"),
        ({"kernel": 3}, TypeError, "kernel must be a kernel of gpjax; got int"),
        ({"kernel": "nngp", "preset": "nngp"}, ValueError, "preset='nngp' has a kernel and a noise of its own"),
        (
            {"noise": GaussianNoise(variance=0.1), "preset": "crude"},
            ValueError,
            "preset='crude' has a kernel and a noise of its own",
        ),
        (
            {"preset": "nngp", "inference": Stochastic(), "key": jax.random.key(0)},
            ValueError,
            "preset='nngp' needs all rows at once: it does not go with Stochastic",
        ),
    ],
)
def test_bad_options_are_refused(data, change, error, message):
    with pytest.raises(error, match=message):
        gaussian_process.fit(*data, **change)


def test_bad_kernels_are_refused():
    with pytest.raises(ValueError, match="depth must be at least 1; got 0"):
        NNGP(0)
    with pytest.raises(ValueError, match="bias_variance must not be negative"):
        NNGP(1, 1.0, -0.1)
