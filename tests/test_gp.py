"""Gaussian-process algebra, against gpjax and textbook formulas in NumPy."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpjax.objectives import collapsed_elbo, conjugate_mll

from jaxcal.functional import gp

NOISE, JITTER = 0.3, 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:X is not of type float64", "ignore:y is not of type float64")


@pytest.fixture
def problem(rng):
    """Rows, inducing points, new points and targets; float64 where it is on."""
    x = jnp.asarray(rng.normal(size=(40, 3)))
    return x, x[:7] + 0.1, jnp.asarray(rng.normal(size=(5, 3))), jnp.sin(x[:, 0]) + x[:, 1]


def kernel(a, b):
    return 1.7 * gp.squared_exponential(a, b, jnp.asarray(1.3))


def oracle():
    rbf = gpx.kernels.RBF(lengthscale=1.3, variance=1.7)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=rbf, jitter=JITTER)
    return prior * gpx.likelihoods.Gaussian(obs_stddev=np.sqrt(NOISE))


def row_sums(x, z, y, jitter, **options):
    """The inverse factor of the covariance at z, and the sums over the rows x."""
    whiten = gp.inverse_factor(gp.add_diagonal(kernel(z, z), jnp.asarray(jitter)))
    return whiten, gp.row_sums(eqx.Partial(kernel, z), whiten, x, jnp.full(len(y), 1.7), y, **options)


def tolerance(x, strict, loose):
    return strict if x.dtype == jnp.float64 else loose


def test_squared_exponential_is_that_of_gpjax(problem):
    x, z, _, _ = problem
    lengthscales = jnp.asarray([0.5, 1.0, 2.0])
    expected = gpx.kernels.RBF(lengthscale=lengthscales).cross_covariance(x, z)
    np.testing.assert_allclose(gp.squared_exponential(x, z, lengthscales), expected, atol=tolerance(x, 1e-13, 2e-6))


def test_squared_exponential_far_from_the_origin(problem):
    x, z, _, _ = problem
    near = gp.squared_exponential(x, z, jnp.asarray(1.0))
    far = gp.squared_exponential(x + 1024, z + 1024, jnp.asarray(1.0))
    np.testing.assert_allclose(near, far, atol=tolerance(x, 1e-11, 2e-3))


def test_exact_likelihood_and_prediction_are_those_of_gpjax(problem):
    x, _, new, y = problem
    gram = gp.add_diagonal(kernel(x, x), jnp.asarray(NOISE + JITTER))
    data = gpx.Dataset(X=x, y=y[:, None])
    tight = tolerance(x, 1e-9, 1e-4)
    np.testing.assert_allclose(gp.exact_log_likelihood(gram, y), conjugate_mll(oracle(), data), rtol=tight)

    posterior = gp.exact_posterior(gram, y)
    mean, variance = jax.vmap(lambda k: gp.predict(posterior, k, jnp.asarray(1.7)))(kernel(new, x))
    expected = oracle().condition(data)(new)
    np.testing.assert_allclose(mean, expected.mean, atol=tolerance(x, 1e-9, 1e-4))
    # gpjax adds its jitter to the predicted variances as well.
    np.testing.assert_allclose(variance, jnp.diagonal(expected.covariance()) - JITTER, atol=tolerance(x, 1e-9, 1e-4))


def test_collapsed_bound_and_prediction_are_those_of_gpjax(problem):
    x, z, new, y = problem
    family = gpx.variational_families.CollapsedVariationalGaussian(model=oracle(), inducing_inputs=z)
    data = gpx.Dataset(X=x, y=y[:, None])
    whiten, sums = row_sums(x, z, y, JITTER)
    bound = gp.collapsed_bound(sums, jnp.asarray(NOISE))
    np.testing.assert_allclose(bound, collapsed_elbo(family, data), rtol=tolerance(x, 1e-9, 1e-4))

    posterior = gp.sparse_posterior(sums, whiten, jnp.asarray(NOISE))
    mean, variance = jax.vmap(lambda k: gp.predict(posterior, k, jnp.asarray(1.7)))(kernel(new, z))
    expected = family.condition(data)(new)
    np.testing.assert_allclose(mean, expected.mean, atol=tolerance(x, 1e-6, 1e-3))
    np.testing.assert_allclose(variance, jnp.diagonal(expected.covariance()) - JITTER, atol=tolerance(x, 1e-6, 1e-3))


def test_collapsed_bound_is_exact_with_every_row_inducing(problem):
    x, z, _, y = problem
    exact = gp.exact_log_likelihood(gp.add_diagonal(kernel(x, x), jnp.asarray(NOISE)), y)

    def bound(points):
        _, sums = row_sums(x, points, y, tolerance(x, 1e-10, 1e-5))
        return gp.collapsed_bound(sums, jnp.asarray(NOISE))

    np.testing.assert_allclose(bound(x), exact, rtol=tolerance(x, 1e-7, 1e-3))
    assert bound(z) < exact


def test_gradient_of_the_exact_likelihood_is_that_of_autodiff(problem):
    x, _, _, y = problem

    def gram(log_lengthscale):
        return gp.add_diagonal(1.7 * gp.squared_exponential(x, x, jnp.exp(log_lengthscale)), jnp.asarray(NOISE))

    def plain(log_lengthscale, y):
        return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros(40), gram(log_lengthscale))

    def ours(log_lengthscale, y):
        return gp.exact_log_likelihood(gram(log_lengthscale), y)

    at = jnp.asarray(0.2)
    close = tolerance(x, 1e-9, 2e-3)
    for argument in (0, 1):
        np.testing.assert_allclose(
            jax.grad(ours, argument)(at, y), jax.grad(plain, argument)(at, y), rtol=close, atol=close
        )
    np.testing.assert_allclose(jax.jvp(lambda t: ours(t, y), (at,), (at,))[1], at * jax.grad(ours)(at, y), rtol=1e-4)


def brute_force_greedy(gram, m):
    """The row of largest conditional variance, by a full solve at each step."""
    rows = []
    for _ in range(m):
        known = gram[np.ix_(rows, rows)]
        cross = gram[:, rows]
        variance = (
            np.diag(gram) - np.einsum("ij,ji->i", cross, np.linalg.solve(known, cross.T)) if rows else np.diag(gram)
        )
        variance = np.where(np.isin(np.arange(len(gram)), rows), -np.inf, variance)
        rows.append(int(np.argmax(variance)))
    return rows


def test_greedy_rows_are_those_of_largest_conditional_variance(problem):
    x, _, _, _ = problem
    gram = kernel(x, x) + jnp.outer(x[:, 0], x[:, 0])  # rows of different variances
    rows = gp.greedy_rows(lambda row: gram[row], jnp.diagonal(gram), 9)
    assert rows.tolist() == brute_force_greedy(np.asarray(gram, float), 9)


def test_greedy_rows_are_distinct_among_duplicates():
    x = jnp.repeat(jnp.arange(3.0), 4)[:, None]
    gram = kernel(x, x)
    rows = gp.greedy_rows(lambda row: gram[row], jnp.diagonal(gram), 12)
    assert sorted(rows.tolist()) == list(range(12))
    assert len(set(x[rows[:3], 0].tolist())) == 3
