"""Kernels of Gaussian processes: covariances that rounding does not spoil, at any lengthscale; their derivatives."""

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxcal.calibrators.rio import IOKernel, Points
from jaxcal.functional import kernels
from jaxcal.gp.kernels import GPJaxKernel, SquaredExponential, gram
from jaxcal.gp.nngp import NNGP

pytestmark = pytest.mark.any_precision

X64 = jax.config.jax_enable_x64
DTYPES = [np.float32, pytest.param(np.float64, marks=pytest.mark.skipif(not X64, reason="float64 is off"))]
LENGTHSCALES = 10.0 ** np.arange(-12, 13, 1.5)
VARIANCES = 10.0 ** np.arange(-6, 7, 2)
VARIANCE = 1.7


def log(value, dtype):
    return jnp.log(jnp.asarray(value, dtype))


def isotropic(scale, dtype):
    return SquaredExponential(log(VARIANCE, dtype), log(scale, dtype))


def by_column(scale, dtype):
    return SquaredExponential(log(VARIANCE, dtype), log(scale * np.array([1.0, 2.0, 3.0]), dtype))


def of_gpjax(kind, scale, dtype):
    return GPJaxKernel(kind(lengthscale=jnp.asarray(scale, dtype), variance=jnp.asarray(VARIANCE, dtype)))


def network(variance, dtype):
    return GPJaxKernel(NNGP(2, jnp.asarray(variance, dtype), jnp.asarray(variance / 10, dtype)))


KERNELS = {
    "isotropic": isotropic,
    "by column": by_column,
    "RBF": lambda scale, dtype: of_gpjax(gpx.kernels.RBF, scale, dtype),
    "Matern32": lambda scale, dtype: of_gpjax(gpx.kernels.Matern32, scale, dtype),
    "Matern52": lambda scale, dtype: of_gpjax(gpx.kernels.Matern52, scale, dtype),
    "NNGP": network,
    "io": lambda scale, dtype: IOKernel(isotropic(1 / scale, dtype), isotropic(scale, dtype)),
    "io by column": lambda scale, dtype: IOKernel(by_column(scale, dtype), isotropic(scale, dtype)),
}


def columns(name, x):
    """The rows as the kernel takes them."""
    return Points(x, x[:, :1] + x[:, 1:2]) if name.startswith("io") else x


def duplicated(rng, difference):
    """Rows [60, 3], of which 20 are there twice, and 20 once more with a relative difference."""
    x = rng.normal(size=(20, 3))
    return np.concatenate([x, x, x * (1 + difference * rng.normal(size=x.shape))])


def with_outlier(rng):
    x = duplicated(rng, 1e-3)
    x[-1] = 1000.0
    return x


ROWS = {
    "apart": lambda rng: rng.normal(size=(60, 3)),
    "closer than rounding": lambda rng: duplicated(rng, 1e-7),
    "close": lambda rng: duplicated(rng, 1e-3),
    "far from the origin": lambda rng: 1000 + duplicated(rng, 1e-3),
    "one row far away": with_outlier,
}


def check_covariance(covariance, diagonal, eps):
    """Finite, its diagonal exact and above all else, symmetric and not negative but for rounding."""
    covariance, diagonal = np.asarray(covariance, float), np.asarray(diagonal, float)
    assert np.isfinite(covariance).all()
    np.testing.assert_allclose(covariance, covariance.T, rtol=0, atol=eps * diagonal.max())
    np.testing.assert_array_equal(np.diag(covariance), diagonal)
    bound = np.sqrt(np.outer(diagonal, diagonal)) * (1 + 4 * eps)
    assert (np.abs(covariance) <= bound).all()
    assert np.linalg.eigvalsh(covariance)[0] > -10 * len(diagonal) * eps * diagonal.max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_covariances_of_any_lengthscale_are_those_of_a_process(name, dtype, rng):
    make = jax.jit(lambda kernel, x: (gram(kernel, x), kernel.diagonal(x)))
    for rows, draw in ROWS.items():
        points = columns(name, jnp.asarray(draw(rng), dtype))
        for scale in VARIANCES if name == "NNGP" else LENGTHSCALES:
            covariance, diagonal = make(KERNELS[name](scale, dtype), points)
            assert covariance.dtype == dtype
            try:
                check_covariance(covariance, diagonal, np.finfo(dtype).eps)
            except AssertionError as error:
                raise AssertionError(f"rows {rows}, lengthscale or variance {scale:.0e}") from error


def test_no_covariance_of_many_rows_exceeds_the_variance(rng):
    """In 32 bits squared distances that rounding made negative gave a covariance of 1e29."""
    x = jnp.asarray(rng.normal(size=(500, 8)), jnp.float32)
    covariance = gram(SquaredExponential(jnp.float32(0), log(1e-4, jnp.float32)), x)
    np.testing.assert_array_equal(covariance, np.eye(500))


DERIVED = {**KERNELS, "one column": isotropic}


def derivatives_by_autodiff(covariance, vector, weights, slopes):
    """sum(slopes K_i) and K_i @ weights of the covariance that `covariance(vector)` gives."""
    by_vector = jax.jacfwd(covariance)(vector)
    return jnp.einsum("nm,nmp->p", slopes, by_vector), jnp.einsum("nmp,m->np", by_vector, weights)


def check_derivatives(found, expected, close):
    assert [part.shape for part in found] == [part.shape for part in expected]
    for part, by_autodiff in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, by_autodiff, rtol=close, atol=close * np.abs(by_autodiff).max())
        assert np.abs(np.atleast_2d(by_autodiff)).max(axis=0).min() > 0.01


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_are_those_of_autodiff(name, rng):
    points = columns(name, jnp.asarray(rng.normal(size=(12, 1 if name == "one column" else 3))))
    weights, slopes = jnp.asarray(rng.normal(size=12)), jnp.asarray(rng.normal(size=(12, 12)))
    slopes = slopes + slopes.T
    kernel = DERIVED[name](1.3, weights.dtype)
    vector, unravel = ravel_pytree(eqx.filter(kernel, eqx.is_inexact_array))
    covariance = lambda vector: eqx.combine(unravel(vector), kernel)(points, points)
    expected = jax.jit(lambda vector: derivatives_by_autodiff(covariance, vector, weights, slopes))(vector)
    found = jax.jit(lambda: kernel.derivatives(points, weights, slopes))()
    check_derivatives(found, expected, 1e-11 if X64 else 1e-4)


@pytest.mark.parametrize("lengthscale", [[0.7], [0.7, 1.4, 3.0]], ids=["one", "each"])
def test_derivatives_are_those_of_autodiff_far_from_the_origin(lengthscale, rng):
    points = 1000 + jnp.asarray(rng.normal(size=(12, 3)))
    weights, slopes = jnp.asarray(rng.normal(size=12)), jnp.asarray(rng.normal(size=(12, 12)))
    slopes = slopes + slopes.T
    shaped = lambda scales: scales if len(lengthscale) > 1 else scales[0]

    def covariance(vector):
        return kernels.squared_exponential(points, points, shaped(jnp.exp(vector[1:])), jnp.exp(vector[0]))

    vector = jnp.log(jnp.asarray([VARIANCE, *lengthscale]))
    expected = jax.jit(lambda vector: derivatives_by_autodiff(covariance, vector, weights, slopes))(vector)
    scales = shaped(jnp.exp(vector[1:])), jnp.exp(vector[0])
    found = jax.jit(kernels.squared_exponential_derivatives)(points, *scales, weights, slopes)
    check_derivatives(found, expected, 1e-9 if X64 else 1e-3)


@pytest.mark.parametrize(
    "columns", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(12, marks=pytest.mark.slow)]
)
def test_derivatives_of_covariances_are_those_of_the_formula(columns, rng):
    a, b, scale = (jnp.asarray(rng.normal(size=shape)) for shape in ((5, columns), (7, columns), (columns,)))
    units = lambda a, b, scale: (a[:, None] - b[None]) / jnp.exp(scale)[None, None]
    by_formula = lambda a, b, scale: jnp.exp(-0.5 * jnp.sum(units(a, b, scale) ** 2, axis=2))
    total = lambda f: lambda *given: jnp.sum(jnp.sin(3 * f(*given)))
    ours, formula = total(lambda a, b, scale: kernels.squared_exponential(a, b, jnp.exp(scale))), total(by_formula)
    exact = {"rtol": 1e-9, "atol": 1e-10} if X64 else {"rtol": 1e-3, "atol": 1e-4}
    for derivative in (jax.grad, jax.hessian):
        pairs = (jax.tree.leaves(jax.jit(derivative(f, argnums=(0, 1, 2)))(a, b, scale)) for f in (ours, formula))
        for one, other in zip(*pairs, strict=True):
            np.testing.assert_allclose(one, other, **exact)
