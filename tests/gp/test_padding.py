"""What is compiled: nothing of known rows on a CPU; elsewhere rows that fill up a fit change nothing but that."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from gpjax.kernels import Polynomial

from jaxcal import Normal, Point, gaussian_process, rio
from jaxcal._numpy import as_numpy
from jaxcal.gp import Exact, device, fit, host
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model, SearchResult, posterior

X64 = jax.config.read("jax_enable_x64")
TOLERANCE = 1e-6 if X64 else 2e-2


def rows(number, outputs=0):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(number, 3))
    mean = np.sin(2 * x[:, 0])
    y = mean + 0.5 * np.cos(x[:, 1]) + 0.2 * rng.normal(size=number)
    return (x, np.stack([mean] * outputs, 1), np.stack([y, y**2], 1)) if outputs else (x, mean, y)


def by_rio(x, mean, y):
    return rio.fit(x, Point(mean), y)(x[:7], Point(mean[:7]))


def by_rio_with_std(x, mean, y):
    std = 0.1 + np.abs(x[:, 0])
    return rio.fit(x, Normal(mean, std), y)(x[:7], Normal(mean[:7], std[:7]))


def by_process(x, mean, y):
    return gaussian_process.fit(x, y)(x[:7])


@pytest.mark.parametrize(
    "predict",
    [pytest.param(by_rio, marks=pytest.mark.slow), pytest.param(by_rio_with_std, marks=pytest.mark.slow), by_process],
)
def test_padding_changes_no_prediction(predict, monkeypatch):
    """The host fills nothing up, nor does a program under jit: that is for devices."""
    x, mean, y = rows(45)
    alone = predict(x, mean, y)
    monkeypatch.setattr(fit, "is_on_host", lambda *_: False)
    found, inside = predict(x, mean, y), eqx.filter_jit(lambda mean, y: predict(x, mean, y))(mean, y)
    for other in (found, inside):
        np.testing.assert_allclose(other.mean, alone.mean, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(other.std, alone.std, rtol=TOLERANCE)


@pytest.mark.slow
def test_what_was_fitted_has_the_rows_that_there_are(monkeypatch):
    monkeypatch.setattr(fit, "is_on_host", lambda *_: False)
    x, mean, y = rows(45, outputs=2)
    fitted = rio.fit(x, Point(mean), y)
    alone = eqx.filter_jit(lambda y: rio.fit(x, Point(mean), y))(y)
    assert jax.tree.map(np.shape, fitted) == jax.tree.map(np.shape, alone)
    np.testing.assert_allclose(fitted.evidence, alone.evidence, rtol=TOLERANCE, atol=10 * TOLERANCE)
    np.testing.assert_allclose(fitted.scaled_noise, alone.scaled_noise, rtol=10 * TOLERANCE)


def test_another_number_of_rows_compiles_no_fit(monkeypatch):
    """On a device, where rows are filled up; nor does another tolerance or another limit of steps."""
    monkeypatch.setattr(fit, "is_on_host", lambda *_: False)
    x, _, y = rows(45)
    gaussian_process.fit(x, y)
    with compilations() as compiled:
        gaussian_process.fit(x[:43], y[:43], inference=Exact(tolerance=0.01, max_iterations=50))
    assert compiled == []


@pytest.mark.parametrize("predict", [by_rio, by_rio_with_std, by_process])
def test_known_rows_compile_nothing(predict):
    """On a CPU, whatever their number."""
    with compilations() as compiled:
        predict(*rows(43))
    assert compiled == []


def test_a_kernel_that_holds_a_number_is_fitted_in_float32():
    x = np.linspace(-1, 1, 45, dtype=np.float32)
    y = x**2 + 0.3 * np.cos(40 * x)
    fitted = gaussian_process.fit(x, y, kernel=Polynomial(degree=2))
    assert np.isfinite(fitted(x[:3]).mean).all()


def test_weights_in_float32_are_corrected_in_float64():
    """Of rows nearly without noise float32 alone loses two digits more."""
    x = np.random.default_rng(0).normal(size=(600, 2)).astype(np.float32)
    y = np.sin(x[:, 0]) * np.cos(x[:, 1])
    kernel = SquaredExponential(jnp.asarray(1.0, np.float32), jnp.asarray(0.5, np.float32))
    model = Model(kernel, jnp.asarray(-30.0, np.float32))
    data, jitter = Data(jnp.asarray(x), jnp.asarray(y - y.mean())), np.zeros((), np.float32)
    found = SearchResult(model, jnp.zeros((), np.float32), *jnp.zeros(3, int))

    right = host.concluded(*as_numpy((found, data, jitter))).posterior.weights
    error = lambda weights: np.linalg.norm(weights - right) / np.linalg.norm(right)
    alone = error(posterior(model, data, jitter).weights)
    assert error(device.concluded(found, data, jitter).posterior.weights) < min(alone / 5, 0.01)
