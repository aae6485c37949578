"""Gaussian maximum likelihood: the formulas against an optimizer and a loop; bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from jaxcal.calibrators import gaussian_mle
from jaxcal.distributions import Normal, Point

pytestmark = pytest.mark.contract_in_32_bits

EXACT = 1e-12 if jax.config.jax_enable_x64 else 1e-5
RNG = np.random.default_rng(5)
MEAN, STD = RNG.normal(size=60), RNG.uniform(0.2, 3.0, size=60)
Y = MEAN + 0.7 + 2.5 * STD * RNG.standard_t(4, size=60)


@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_no_other_shift_and_scale_are_more_likely(reading):
    scale = {"constant": np.ones(60), "scaled": STD, "none": np.zeros(60)}[reading]
    loss = lambda q: -scipy.stats.norm.logpdf(Y, MEAN + q[0] * scale, math.exp(q[1]) * STD).sum()
    best = scipy.optimize.minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-8})
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift=reading)
    np.testing.assert_allclose([fitted.shift, fitted.scale], [best.x[0], math.exp(best.x[1])], rtol=1e-5, atol=1e-5)


def test_the_formulas_as_loops():
    base = Normal(MEAN, STD)
    weight = total = 0.0
    for y, mu, s in zip(Y, MEAN, STD, strict=True):
        weight, total = weight + 1 / s**2, total + (y - mu) / s**2
    a = total / weight
    b = math.sqrt(sum((y - mu - a) ** 2 / s**2 for y, mu, s in zip(Y, MEAN, STD, strict=True)) / 60)
    distribution = gaussian_mle.fit(None, base, Y)(None, base)
    np.testing.assert_allclose(distribution.mean, MEAN + a, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.std, b * STD, rtol=EXACT)
    z = [(y - mu) / s for y, mu, s in zip(Y, MEAN, STD, strict=True)]
    distribution = gaussian_mle.fit(None, base, Y, shift="scaled")(None, base)
    np.testing.assert_allclose(distribution.mean, MEAN + np.mean(z) * STD, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.std, np.std(z) * STD, rtol=EXACT)
    distribution = gaussian_mle.fit(None, base, Y, shift="none")(None, base)
    np.testing.assert_allclose(distribution.mean, MEAN, rtol=EXACT)
    np.testing.assert_allclose(distribution.std, math.sqrt(sum(value**2 for value in z) / 60) * STD, rtol=EXACT)


def test_points_have_the_mean_and_the_std_of_their_residuals():
    base = Point(MEAN)
    for reading in ("constant", "scaled"):
        distribution = gaussian_mle.fit(None, base, Y, shift=reading)(None, base)
        np.testing.assert_allclose(distribution.mean, MEAN + np.mean(Y - MEAN), rtol=EXACT, atol=EXACT)
        np.testing.assert_allclose(distribution.std, np.full(60, np.std(Y - MEAN)), rtol=EXACT)


def test_no_weight_overflows():
    tiny = np.float32(1e-30)
    base = Normal(np.float32(MEAN) * tiny, np.float32(STD) * tiny)
    small = gaussian_mle.fit(None, base, np.float32(Y) * tiny)
    usual = gaussian_mle.fit(None, Normal(MEAN, STD), Y)
    np.testing.assert_allclose([small.shift / tiny, small.scale], [usual.shift, usual.scale], rtol=1e-5)


@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_targets_equal_to_the_means_give_a_proper_distribution(reading):
    base = Normal(MEAN, STD)
    with pytest.warns(UserWarning, match=r"y equals the \(shifted\) mean of base in every row"):
        fitted = gaussian_mle.fit(None, base, base.mean, shift=reading)
    distribution = fitted(None, base)
    np.testing.assert_allclose(distribution.mean, MEAN, rtol=EXACT)
    np.testing.assert_allclose(distribution.std / STD, np.full(60, jnp.finfo(distribution.std.dtype).eps), rtol=EXACT)


@pytest.mark.parametrize(
    ("base", "y", "options", "message"),
    [
        (Normal(MEAN, STD), Y, {"shift": "relative"}, "shift must be one of .* got 'relative'"),
        (Normal(MEAN, STD), Y[:-1], {}, "y has 59 rows where 60 are expected"),
        (Normal(MEAN, STD), np.where(MEAN > 0, np.nan, Y), {}, "y holds .* NaN"),
        (Normal(MEAN, np.where(np.arange(60) == 3, 0.0, STD)), Y, {}, "base.std must be positive; .* index 3"),
    ],
)
def test_mistakes_are_named(base, y, options, message):
    with pytest.raises(ValueError, match=message):
        gaussian_mle.fit(None, base, y, **options)


def test_a_base_must_keep_its_kind():
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), Y)
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        fitted(None, Point(MEAN))
