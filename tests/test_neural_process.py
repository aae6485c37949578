"""The attentive neural process: what it learns of a table or of a family of functions, and its answers to bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Mixture, Normal, metrics
from jaxcal.optimize import Result
from jaxcal.predictors import neural_process

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
N = 200
SMALL = {"key": KEY, "width": 16, "max_iterations": 300, "learning_rate": 3e-3}


def table(seed, n=N):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    return x, 7 + 3 * np.sin(x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=n)


@pytest.fixture(scope="module")
def fitted():
    return neural_process.fit(*table(0), **SMALL)


def test_learns_a_table(fitted):
    x, y = table(1)
    law = fitted(x)
    assert isinstance(law, Mixture)
    assert metrics.rmse(y, law) < 0.3 * y.std()
    assert metrics.coverage(y, law, confidence_level=0.9) > 0.8
    assert fitted.result == Result.STEP_LIMIT


def test_the_order_of_the_context_does_not_matter(fitted):
    x, y = table(2, 30)
    new = table(3, 20)[0]
    order = np.random.default_rng(0).permutation(30)
    one, other = fitted(new, context=(x, y)), fitted(new, context=(x[order], y[order]))
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-6)
    np.testing.assert_allclose(one.std, other.std, rtol=1e-6 if X64 else 1e-5)


@pytest.mark.slow
def test_one_member_is_a_normal_law_near_the_mixture(fitted):
    x, y = table(1)
    law = neural_process.fit(*table(0), **SMALL, num_samples=None)(x)
    assert isinstance(law, Normal)
    np.testing.assert_allclose(law.mean, fitted(x).mean, atol=0.1 * y.std())


def waves(rng, number, n):
    """Functions a sin(x + b), and inputs in no order."""
    x = rng.uniform(-3, 3, size=(number, n))
    size, phase = rng.uniform(0.5, 2, size=(number, 1)), rng.uniform(0, np.pi, size=(number, 1))
    return x, size * np.sin(x + phase)


@pytest.fixture(scope="module")
def of_waves():
    rows = waves(np.random.default_rng(0), 300, 30)
    return neural_process.fit(*rows, key=KEY, width=32, max_context=10, max_iterations=1000, learning_rate=2e-3)


def test_goes_on_from_the_context_of_another_function(of_waves, rng):
    x, y = waves(rng, 30, 40)
    laws = [of_waves(own_x[10:], context=(own_x[:10], own_y[:10])) for own_x, own_y in zip(x, y, strict=True)]
    errors = [metrics.rmse(own_y[10:], law) for own_y, law in zip(y, laws, strict=True)]
    covered = [metrics.coverage(own_y[10:], law, confidence_level=0.9) for own_y, law in zip(y, laws, strict=True)]
    assert np.median(errors) < 0.3 * y.std()
    assert np.mean(covered) > 0.8


def test_the_less_is_known_the_wider(of_waves, rng):
    x, y = waves(rng, 10, 20)
    widths = [
        np.mean([of_waves(x[i], context=(x[i, :rows], y[i, :rows])).std.mean() for i in range(10)]) for rows in (1, 10)
    ]
    assert widths[0] > widths[1]
    with pytest.raises(ValueError, match="trained on several functions: give the context"):
        of_waves(x[0])


@pytest.mark.slow
def test_preset_keeps_a_tenth_of_the_targets_std():
    x, y = table(0)
    law = neural_process.fit(x, y, key=KEY, width=16, max_iterations=3, preset="paper")(x)
    assert law.std.min() > 0.1 * y.std()


NAN_AT_3 = np.where(np.arange(N) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": NAN_AT_3}, r"x holds 1 values that are NaN or infinite, the first at index \(3, 0\)"),
        ({"y": NAN_AT_3}, "y holds 1 values that are NaN or infinite, the first at index 3"),
        ({"x": np.ones((N - 1, 2))}, f"x has {N - 1} rows where {N} are expected"),
        ({"y": np.ones((4, 20))}, r"x must have shape \(f, n, d\) with y of shape \(f, n\) = \(4, 20\)"),
        ({"x": np.ones((3, 2)), "y": np.arange(3.0)}, "the number of rows of a function must be at least 4; got 3"),
        ({"width": 20}, "width must be a multiple of 8, the number of heads; got 20"),
        ({"max_context": 0}, "max_context must be at least 1; got 0"),
        ({"num_samples": 0}, "num_samples must be at least 1; got 0"),
        ({"max_iterations": 0}, "iterations must be at least 1; got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
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
        (np.ones((3, 1)), None, "x has 1 columns; the network was trained on 2"),
        (np.ones((3, 2)), (np.ones((4, 2)), np.ones(5)), r"context\[0\] has 4 rows where 5 are expected"),
        (np.ones((3, 2)), (np.ones((4, 3)), np.ones(4)), "has 3 columns"),
        (np.ones((3, 2)), (np.ones((1, 2)), np.array([np.nan])), r"context\[1\] holds 1 values that are NaN"),
    ],
)
def test_bad_calls_are_refused(fitted, x, context, message):
    with pytest.raises(ValueError, match=message):
        fitted(x, context=context)


def test_divergence_is_told():
    diverging = {**SMALL, "learning_rate": 1e30}
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        neural_process.fit(*table(0), **diverging)
    process = neural_process.fit(*table(0), **diverging, throw=False)
    assert process.result == Result.NOT_FINITE


@pytest.mark.slow
def test_a_constant_target_is_exact():
    x = table(0)[0]
    law = neural_process.fit(x, jnp.full(N, 3.0), **SMALL)(x)
    np.testing.assert_allclose(law.mean, 3, rtol=1e-6)
    np.testing.assert_allclose(law.std, 0, atol=1e-6)
