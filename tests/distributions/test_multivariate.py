"""Distributions of vectors, against NumPy and scipy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal.distributions import MultivariateEmpirical, MultivariateNormal

pytestmark = pytest.mark.contract_in_32_bits

EXACT = 1e-10 if jax.config.jax_enable_x64 else 2e-5
RNG = np.random.default_rng(7)
MEAN = RNG.normal(size=(4, 3))
ROOT = RNG.normal(size=(4, 3, 3))
COVARIANCE = ROOT @ ROOT.mT + 0.1 * np.eye(3)
FACTOR = np.linalg.cholesky(COVARIANCE)
Z = RNG.exponential(size=(50, 3)) @ np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]])
Y = RNG.normal(size=(4, 3))


def build(name):
    return MultivariateNormal(MEAN, COVARIANCE) if name == "normal" else MultivariateEmpirical(MEAN, FACTOR, Z)


each_distribution = pytest.mark.parametrize("name", ["normal", "empirical"])


@each_distribution
def test_moments(name):
    distribution = build(name)
    means, covariances = MEAN, COVARIANCE
    if name == "empirical":
        vectors = MEAN[:, None] + np.einsum("nij,lj->nli", FACTOR, Z)
        means, covariances = vectors.mean(1), np.stack([np.cov(v.T, ddof=0) for v in vectors])
    np.testing.assert_allclose(distribution.mean, means, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.covariance, covariances, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.std**2, np.diagonal(covariances, axis1=1, axis2=2), rtol=EXACT)


@each_distribution
def test_whitening(name):
    white = np.stack([np.linalg.solve(factor, y - m) for factor, y, m in zip(FACTOR, Y, MEAN, strict=True)])
    np.testing.assert_allclose(build(name).whiten(Y), white, rtol=100 * EXACT, atol=10 * EXACT)


def test_whitened_outcomes_give_the_density():
    white = np.asarray(build("normal").whiten(Y))
    logs = scipy.stats.norm.logpdf(white).sum(1) - np.log(np.diagonal(FACTOR, axis1=1, axis2=2)).sum(1)
    rows = zip(Y, MEAN, COVARIANCE, strict=True)
    expected = [scipy.stats.multivariate_normal(m, c).logpdf(y) for y, m, c in rows]
    np.testing.assert_allclose(logs, expected, rtol=100 * EXACT)


def test_marginals():
    j = 2
    t = MEAN[:, j] + 0.4
    expected = scipy.stats.norm.cdf(t, MEAN[:, j], np.sqrt(COVARIANCE[:, j, j]))
    np.testing.assert_allclose(build("normal").marginal(j).cdf(t), expected, rtol=EXACT)
    distribution = build("empirical").marginal(j)
    values = MEAN[:, None, j] + np.einsum("nj,lj->nl", FACTOR[:, j], Z)
    np.testing.assert_allclose(distribution.cdf(t), (values <= t[:, None]).mean(1), rtol=EXACT)
    np.testing.assert_allclose(distribution.icdf(0.5), np.sort(values, axis=1)[:, 24], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.mean, values.mean(1), rtol=EXACT, atol=EXACT)


@each_distribution
def test_samples_follow_the_distribution(name):
    distribution = build(name)
    draws = np.asarray(jax.jit(lambda distribution: distribution.sample(jax.random.key(1), (20, 200)))(distribution))
    assert draws.shape == (20, 200, 4, 3)
    draws = draws.reshape(4000, 4, 3)
    error = 5 * np.asarray(distribution.std).max() / math.sqrt(4000)
    np.testing.assert_allclose(draws.mean(0), distribution.mean, atol=error)
    for row in range(4):
        covariance = np.asarray(distribution.covariance[row])
        size = np.diag(covariance).max()
        np.testing.assert_allclose(np.cov(draws[:, row].T), covariance, atol=0.2 * size)
    assert distribution.sample(jax.random.key(0)).shape == (4, 3)


def test_empirical_samples_are_vectors_of_the_table():
    draws = np.asarray(build("empirical").sample(jax.random.key(0), (5,)))
    white = np.stack([np.linalg.solve(f, (draws[:, i] - MEAN[i]).T).T for i, f in enumerate(FACTOR)])
    nearest = np.abs(white[:, :, None] - Z).max(-1).min(-1)
    assert nearest.max() < 1e3 * EXACT


@each_distribution
def test_vmap_and_gradients(name):
    distribution = build(name)
    runs = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), distribution)
    methods = lambda distribution: (
        distribution.mean,
        distribution.std,
        distribution.whiten(Y),
        distribution.marginal(1).std,
        distribution.sample(jax.random.key(0)),
    )
    together, alone = jax.jit(jax.vmap(methods))(runs), jax.jit(methods)(jax.tree.map(lambda a: 2 * a, distribution))
    for both, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(both[1], one, rtol=1e3 * EXACT, atol=1e2 * EXACT)
    slopes = jax.jit(jax.grad(lambda distribution: sum(value.sum() for value in methods(distribution))))(distribution)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_the_dtype_of_the_input_is_kept():
    single = [np.asarray(a, np.float32) for a in (MEAN, COVARIANCE, FACTOR)]
    read = lambda distribution: (
        distribution.mean,
        distribution.covariance,
        distribution.whiten(Y),
        distribution.marginal(0).mean,
        distribution.sample(jax.random.key(0)),
    )
    for distribution in (MultivariateNormal(*single[:2]), MultivariateEmpirical(single[0], single[2], Z)):
        assert {value.dtype for value in jax.eval_shape(read, distribution)} == {jnp.dtype("float32")}


def spoilt(matrices, row, i, j, value):
    matrices = matrices.copy()
    matrices[row, i, j] = value
    return matrices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultivariateNormal(MEAN[:, 0], COVARIANCE), r"mean must have shape \(n, t\); got \(4,\)"),
        (
            lambda: MultivariateNormal(MEAN, COVARIANCE[:, :2]),
            r"covariance must have shape \(4, 3, 3\); got \(4, 2, 3\)",
        ),
        (
            lambda: MultivariateNormal(MEAN, spoilt(COVARIANCE, 1, 0, 0, np.nan)),
            r"covariance holds 1 values .* \(1, 0, 0\)",
        ),
        (lambda: MultivariateNormal(MEAN, spoilt(COVARIANCE, 2, 0, 1, 9.0)), "covariance must be symmetric; .* row 2"),
        (lambda: MultivariateNormal(MEAN, spoilt(COVARIANCE, 3, 1, 1, -1.0)), "must be positive definite; .* row 3"),
        (lambda: MultivariateEmpirical(MEAN, COVARIANCE, Z), "factor must be lower triangular; .* row 0"),
        (lambda: MultivariateEmpirical(MEAN, spoilt(FACTOR, 1, 2, 2, 0.0), Z), "a positive diagonal; .* row 1"),
        (lambda: MultivariateEmpirical(MEAN, FACTOR, Z[:, :2]), "z has 2 columns; the number of outcomes is 3"),
        (lambda: build("normal").whiten(Y[:2]), r"y must have shape \(4, 3\); got \(2, 3\)"),
        (lambda: build("normal").marginal(3), "j must be one of the components 0 to 2; got 3"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
