"""Rows that fill up a fit to a common number change nothing but what has to be compiled."""

import equinox as eqx
import jax
import numpy as np
import pytest
from compiled import compilations

from jaxcal import Normal, Point, gaussian_process, rio

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
    return gaussian_process.fit(x, y, ard=True)(x[:7])


@pytest.mark.parametrize(
    "predict",
    [pytest.param(by_rio, marks=pytest.mark.slow), pytest.param(by_rio_with_std, marks=pytest.mark.slow), by_process],
)
def test_padding_changes_no_prediction(predict):
    """Under jit rows are not filled up."""
    x, mean, y = rows(45)
    found, alone = predict(x, mean, y), eqx.filter_jit(lambda mean, y: predict(x, mean, y))(mean, y)
    np.testing.assert_allclose(found.mean, alone.mean, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(found.std, alone.std, rtol=TOLERANCE)


@pytest.mark.slow
def test_what_was_fitted_has_the_rows_that_there_are():
    x, mean, y = rows(45, outputs=2)
    fitted = rio.fit(x, Point(mean), y)
    alone = eqx.filter_jit(lambda y: rio.fit(x, Point(mean), y))(y)
    assert jax.tree.map(np.shape, fitted) == jax.tree.map(np.shape, alone)
    np.testing.assert_allclose(fitted.evidence, alone.evidence, rtol=TOLERANCE, atol=10 * TOLERANCE)
    np.testing.assert_allclose(fitted.scaled_noise, alone.scaled_noise, rtol=10 * TOLERANCE)


@pytest.mark.parametrize("predict", [by_rio, by_process])
def test_another_number_of_rows_compiles_no_fit(predict):
    predict(*rows(45))
    with compilations() as compiled:
        predict(*rows(43))
    # The prediction is of as many rows as were fitted to.
    assert compiled == ["jit(_predict)"]
