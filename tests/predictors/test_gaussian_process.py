"""Gaussian processes as predictors: against scikit-learn and a NumPy loop of Adam, and their answers to bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from jaxcal import metrics
from jaxcal.gp import Exact, Nearest, Sparse, Stochastic
from jaxcal.optimize import Result
from jaxcal.predictors import gaussian_process

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
needs_float64 = pytest.mark.skipif(not X64, reason="the oracle works in float64")
N, NOISE = 60, 0.2


def rows(seed, n=N):
    """Inputs [n, 3], of which the first matters most and the last not at all, and targets."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 3))
    return x, 5 + np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + NOISE * rng.normal(size=n)


X, Y = rows(1)
NEW, NEW_Y = rows(0, 500)


@pytest.fixture(scope="module")
def fitted():
    return gaussian_process.fit(X, Y, inference=Exact(tolerance=0.0))


def standardized(a):
    return (a - a.mean(axis=0)) / a.std(axis=0, ddof=1)


@needs_float64
def test_evidence_and_prediction_are_those_of_sklearn(fitted):
    kernel = ConstantKernel(np.exp(fitted.kernel.log_variance)) * RBF(np.exp(fitted.kernel.log_lengthscale))
    oracle = GaussianProcessRegressor(kernel, alpha=float(fitted.scaled_noise), optimizer=None)
    oracle.fit(standardized(X), standardized(Y))
    np.testing.assert_allclose(fitted.evidence, oracle.log_marginal_likelihood_value_, rtol=1e-8)
    mean, std = oracle.predict((NEW - X.mean(axis=0)) / X.std(axis=0, ddof=1), return_std=True)
    scale = Y.std(ddof=1)
    distribution, latent = fitted(NEW), fitted(NEW, include_noise=False)
    np.testing.assert_allclose(distribution.mean, Y.mean() + scale * mean, rtol=1e-8)
    np.testing.assert_allclose(latent.std, scale * std, rtol=1e-8)
    np.testing.assert_allclose(distribution.std, scale * np.sqrt(std**2 + float(fitted.scaled_noise)), rtol=1e-8)
    np.testing.assert_allclose(distribution.variance - latent.variance, fitted.noise_variance, rtol=1e-8)


@needs_float64
def test_optimum_is_no_worse_than_sklearns(fitted):
    kernel = ConstantKernel() * RBF(np.ones(3), (1e-2, 1e9)) + WhiteKernel()
    oracle = GaussianProcessRegressor(kernel, alpha=0.0).fit(standardized(X), standardized(Y))
    assert fitted.evidence > oracle.log_marginal_likelihood_value_ - 1e-3


def test_learns_noise_and_relevance(fitted):
    distribution = fitted(NEW)
    np.testing.assert_allclose(fitted.noise_variance, NOISE**2, rtol=0.5)
    assert jnp.all(jnp.diff(fitted.kernel.log_lengthscale) > 0)
    assert 0.85 < metrics.coverage(NEW_Y, distribution, confidence_level=0.9) < 0.95


@pytest.mark.slow
def test_sparse_is_exact_with_all_rows_as_inducing_points(fitted):
    sparse = gaussian_process.fit(X, Y, inference=Sparse(num_inducing=N, tolerance=0.0))
    # L-BFGS may stop anywhere within its tolerance of the optimum.
    tolerance = 1e-3 if X64 else 2e-2
    np.testing.assert_allclose(sparse.evidence, fitted.evidence, atol=tolerance)
    np.testing.assert_allclose(sparse(NEW).mean, fitted(NEW).mean, atol=tolerance)
    np.testing.assert_allclose(sparse(NEW).std, fitted(NEW).std, atol=tolerance)


@needs_float64
def test_crude_takes_the_steps_of_adam_from_the_initial_values_of_gpytorch():
    (x, y), steps = rows(2, 25), 50
    squares = np.sum((standardized(x)[:, None] - standardized(x)[None]) ** 2, axis=2)

    def hyperparameters(raw):
        return np.log1p(np.exp(raw)) + np.array([0, 0, 1e-4])

    def loss(raw):
        lengthscale, variance, noise = hyperparameters(raw)
        # jaxcal's own least noise is 1e-6.
        gram = variance * np.exp(-squares / (2 * lengthscale**2)) + (noise + 1e-6) * np.eye(25)
        return -scipy.stats.multivariate_normal(np.zeros(25), gram).logpdf(standardized(y))

    raw, first, second = np.zeros(3), np.zeros(3), np.zeros(3)
    for step in range(1, steps + 1):
        slope = np.array([(loss(raw + h) - loss(raw - h)) / 2e-5 for h in 1e-5 * np.eye(3)])
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        raw = raw - 0.01 * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)

    inference = Exact(ard=False, learning_rate=0.01, max_iterations=steps)
    fit = gaussian_process.fit(x, y, preset="crude", inference=inference)
    assert fit.iterations == steps
    lengthscale, variance, noise = hyperparameters(raw)
    np.testing.assert_allclose(np.exp(fit.kernel.log_lengthscale), lengthscale, rtol=1e-7)
    np.testing.assert_allclose(np.exp(fit.kernel.log_variance), variance, rtol=1e-7)
    np.testing.assert_allclose(fit.scaled_noise, noise + 1e-6, rtol=1e-7)
    np.testing.assert_allclose(fit.evidence, -loss(raw), rtol=1e-7)


@pytest.mark.slow
def test_adam_comes_to_where_newton_comes():
    newton = gaussian_process.fit(X, Y, inference=Exact(ard=False, tolerance=0.0))
    adam = gaussian_process.fit(X, Y, inference=Exact(ard=False, learning_rate=0.1, max_iterations=300))
    np.testing.assert_allclose(adam.evidence, newton.evidence, atol=0.1)


@pytest.mark.slow
def test_a_constant_column_is_without_effect(fitted):
    widened = lambda x: np.column_stack([x, np.full(len(x), 0.1)])
    distribution = gaussian_process.fit(widened(X), Y, inference=Exact(tolerance=0.0))(widened(NEW))
    np.testing.assert_allclose(distribution.mean, fitted(NEW).mean, atol=1e-3 if X64 else 2e-2)


@pytest.mark.slow
@needs_float64
def test_the_stochastic_bound_comes_near_the_collapsed_one():
    x, y = rows(3, 300)
    collapsed = gaussian_process.fit(x, y, inference=Sparse(num_inducing=20, points="trained"))
    by_parts = Stochastic(epochs=200, num_inducing=20)
    stochastic = gaussian_process.fit(x, y, inference=by_parts, key=jax.random.key(0))
    assert stochastic.evidence > collapsed.evidence - 0.02 * abs(collapsed.evidence)
    np.testing.assert_allclose(stochastic.noise_variance, collapsed.noise_variance, rtol=0.1)


NAN_AT_3 = np.where(np.arange(N) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": NAN_AT_3}, r"x holds 1 values that are NaN or infinite, the first at index \(3, 0\)"),
        ({"y": NAN_AT_3}, "y holds 1 values that are NaN or infinite, the first at index 3"),
        ({"x": X[1:]}, f"x has {N - 1} rows where {N} are expected"),
        ({"y": Y[:, None]}, r"did you mean y\[:, 0\]"),
        ({"x": X[:1], "y": Y[:1]}, "at least 2 are needed"),
        ({"y": np.full(N, 3.0)}, r"y is constant \(3\)"),
        ({"inference": Stochastic()}, "Stochastic needs a key"),
        ({"preset": "paper"}, "preset must be one of None, 'crude', 'nngp'; got 'paper'"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        gaussian_process.fit(**({"x": X, "y": Y} | change))


@pytest.mark.parametrize(
    ("inference", "option", "message"),
    [
        (Exact, {"learning_rate": -1.0}, "learning_rate must be positive; got -1.0"),
        (Sparse, {"num_inducing": 0}, "num_inducing must be at least 1; got 0"),
        (Stochastic, {"num_inducing": 0}, "num_inducing must be at least 1; got 0"),
        (Nearest, {"neighbors": 0}, "neighbors must be at least 1; got 0"),
    ],
)
def test_options_of_an_inference_out_of_range(inference, option, message):
    with pytest.raises(ValueError, match=message):
        inference(**option)


def test_prediction_on_other_columns(fitted):
    with pytest.raises(ValueError, match="x has 1 columns; the fit had 3"):
        fitted(X[:, 0])


def test_a_covariance_that_cannot_be_factorized_is_reported():
    adam = Exact(ard=False, learning_rate=1e30, max_iterations=3)
    diverging = {"preset": "crude", "inference": adam}
    with pytest.raises(FloatingPointError, match="could not be factorized"):
        gaussian_process.fit(X, Y, **diverging)
    assert gaussian_process.fit(X, Y, **diverging, throw=False).result == Result.NOT_FINITE
