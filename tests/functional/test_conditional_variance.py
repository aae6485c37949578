"""Variances given rows: the same by LAPACK and in JAX, and pullbacks against derivatives through the factorization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal.functional import kernels, linalg
from jaxcal.functional.conditional_variance import (
    explained_variance,
    explained_variance_and_pullback,
    leave_one_out_variance,
    leave_one_out_variance_and_pullback,
)

pytestmark = pytest.mark.any_precision

X64 = jax.config.jax_enable_x64
CLOSE = {"rtol": 1e-9, "atol": 1e-9} if X64 else {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def matrices(rng):
    """A Gram matrix with noise, the covariances with other rows, and weights of both variances."""
    dtype = jnp.zeros(()).dtype
    x, new = rng.normal(size=(40, 2)).astype(dtype), rng.normal(size=(5, 2)).astype(dtype)
    covariance = lambda b: kernels.squared_exponential(x, b, np.ones(2, dtype), dtype.type(1.7))
    gram = linalg.with_diagonal(covariance(x), dtype.type(2.0))
    return gram, covariance(new), rng.normal(size=5).astype(dtype), rng.normal(size=40).astype(dtype)


def symmetric(slope):
    """A covariance is symmetric: only this part of the slope by it matters."""
    return np.asarray(slope) + np.asarray(slope).T


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_explained_variance(matrices, of):
    gram, cross, weights, _ = matrices
    explained = lambda g, k: jnp.sum(k * jnp.linalg.solve(g, k), axis=0)
    value, pullback = explained_variance_and_pullback(of(gram), of(cross))
    np.testing.assert_allclose(value, explained(gram, cross), **CLOSE)
    np.testing.assert_array_equal(value, explained_variance(of(gram), of(cross)))
    by_gram, by_cross = jax.grad(lambda *given: weights @ explained(*given), (0, 1))(gram, cross)
    found = pullback(of(weights))
    np.testing.assert_allclose(symmetric(found[0]), symmetric(by_gram), **CLOSE)
    np.testing.assert_allclose(found[1], by_cross, **CLOSE)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_leave_one_out_variance(matrices, of):
    gram, _, _, weights = matrices
    left_out = lambda g: 1 / jnp.diagonal(jnp.linalg.inv(g))
    value, pullback = leave_one_out_variance_and_pullback(of(gram))
    np.testing.assert_allclose(value, left_out(gram), **CLOSE)
    np.testing.assert_array_equal(value, leave_one_out_variance(of(gram)))
    through = jax.grad(lambda g: weights @ left_out(g))(gram)
    np.testing.assert_allclose(symmetric(pullback(of(weights))), symmetric(through), **CLOSE)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_what_is_not_positive_definite_has_no_variance(of):
    gram = of(np.array([[1.0, 2.0], [2.0, 1.0]], jnp.zeros(()).dtype))
    assert np.isnan(leave_one_out_variance(gram)).all()
    assert np.isnan(explained_variance(gram, gram)).all()
    assert np.isnan(linalg.inverse_factor(gram)).any()
