"""Gaussian maximum likelihood: against an optimizer, loops and regressions; its coverage; bad input."""

import math

import equinox as eqx
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
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift=reading, preset="paper")
    np.testing.assert_allclose([fitted.shift, fitted.scale], [best.x[0], math.exp(best.x[1])], rtol=1e-5, atol=1e-5)


def regression(y, mean, std, reading):
    """The shift, the sum of squares, its degrees of freedom and 1 / sum(w^2) of a regression through the origin."""
    z = (y - mean) / std
    if reading == "none":
        return 0.0, (z**2).sum(), len(z), 0.0
    w = 1 / std if reading == "constant" else np.ones(len(z))
    shift, *_ = np.linalg.lstsq(w[:, None], z)
    return shift[0], ((z - shift[0] * w) ** 2).sum(), len(z) - 1, 1 / (w**2).sum()


def test_the_formulas_as_loops():
    base = Normal(MEAN, STD)
    weight = total = 0.0
    for y, mu, s in zip(Y, MEAN, STD, strict=True):
        weight, total = weight + 1 / s**2, total + (y - mu) / s**2
    a = total / weight
    b = math.sqrt(sum((y - mu - a) ** 2 / s**2 for y, mu, s in zip(Y, MEAN, STD, strict=True)) / 60)
    of = lambda **options: gaussian_mle.fit(None, base, Y, preset="paper", **options)(None, base)
    distribution = of()
    assert isinstance(distribution, Normal)
    np.testing.assert_allclose(distribution.mean, MEAN + a, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.std, b * STD, rtol=EXACT)
    z = [(y - mu) / s for y, mu, s in zip(Y, MEAN, STD, strict=True)]
    distribution = of(shift="scaled")
    np.testing.assert_allclose(distribution.mean, MEAN + np.mean(z) * STD, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(distribution.std, np.std(z) * STD, rtol=EXACT)
    distribution = of(shift="none")
    np.testing.assert_allclose(distribution.mean, MEAN, rtol=EXACT)
    np.testing.assert_allclose(distribution.std, math.sqrt(sum(value**2 for value in z) / 60) * STD, rtol=EXACT)


@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_a_new_row_follows_the_student_t_of_a_regression(reading):
    shift, squares, df, variance = regression(Y, MEAN, STD, reading)
    distribution = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift=reading)(None, Normal(MEAN[:7], STD[:7]))
    unit = STD[:7] if reading == "scaled" else np.ones(7)
    np.testing.assert_allclose(distribution.df, np.full(7, df))
    np.testing.assert_allclose(distribution.loc, MEAN[:7] + shift * unit, rtol=10 * EXACT, atol=EXACT)
    scale = np.sqrt(squares / df * (STD[:7] ** 2 + variance * unit**2))
    np.testing.assert_allclose(distribution.scale, scale, rtol=10 * EXACT)


@pytest.mark.parametrize(("moved", "expected"), [(0.0, "none"), (0.3, "none"), (2.0, "constant")])
def test_the_shift_is_taken_where_it_predicts_rows_better_that_were_not_used(moved, expected):
    rng = np.random.default_rng(2)
    mean, std = rng.normal(size=12), rng.uniform(0.5, 2, size=12)
    y = mean + moved + std * rng.normal(size=12)
    scores = {"constant": 0.0, "none": 0.0}
    for reading in scores:
        for i in range(12):
            rest = np.arange(12) != i
            shift, squares, df, variance = regression(y[rest], mean[rest], std[rest], reading)
            scale = math.sqrt(squares / df * (std[i] ** 2 + variance))
            scores[reading] += scipy.stats.t.logpdf(y[i], df, mean[i] + shift, scale)
    best = max(scores, key=scores.get)
    assert best == expected
    base = Normal(mean, std)
    chosen, asked = (gaussian_mle.fit(None, base, y, **options) for options in ({}, {"shift": best}))
    if best == "none":  # the choice costs a degree of freedom
        asked = eqx.tree_at(lambda mle: (mle.df, mle.scale), asked, (jnp.array(11.0), asked.scale * math.sqrt(12 / 11)))
    assert float(chosen.shift != 0) == (best == "constant")
    for name in ("shift", "scale", "shift_std", "df"):
        np.testing.assert_allclose(getattr(chosen, name), getattr(asked, name), rtol=10 * EXACT, atol=EXACT)


@pytest.mark.parametrize("size", [5, 9])
@pytest.mark.parametrize("reading", ["constant", "scaled", "none", "auto"])
def test_intervals_of_few_normal_rows_cover_what_they_claim(size, reading):
    # The plug-in normal distribution covers 75 % from five rows.
    runs, rng = 4000, np.random.default_rng(3)
    std = rng.uniform(0.5, 2, size=(runs, size + 1))
    y, x = 0.3 + 1.7 * std * rng.normal(size=(runs, size + 1)), np.zeros((runs, size + 1))
    if reading in ("none", "scaled"):
        y = y - 0.3 + (0.3 * std if reading == "scaled" else 0)

    def one(mean, std, y):
        fitted = gaussian_mle.fit(None, Normal(mean[:-1], std[:-1]), y[:-1], shift=reading)
        return fitted(None, Normal(mean[-1:], std[-1:])).cdf(y[-1:])[0]

    p = np.asarray(jax.jit(jax.vmap(one))(x, std, y))
    for level in (0.5, 0.9):
        covered = np.mean(np.abs(2 * p - 1) < level)
        # A shift that is chosen by the rows changes it a little.
        slack = 0.01 if reading == "auto" else 0
        assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / runs) + slack


def test_points_have_the_mean_and_the_std_of_their_residuals():
    base = Point(MEAN)
    for reading in ("constant", "scaled"):
        distribution = gaussian_mle.fit(None, base, Y, shift=reading, preset="paper")(None, base)
        np.testing.assert_allclose(distribution.mean, MEAN + np.mean(Y - MEAN), rtol=EXACT, atol=EXACT)
        np.testing.assert_allclose(distribution.std, np.full(60, np.std(Y - MEAN)), rtol=EXACT)


def test_the_least_numbers_of_rows():
    of = lambda rows, **options: gaussian_mle.fit(None, Point(np.zeros(rows)), np.arange(1.0, 1 + rows), **options)
    with pytest.raises(ValueError, match="leave 1 degrees of freedom to the scale; at least 2 are needed"):
        of(2)
    with pytest.raises(ValueError, match="leave 1 degrees"):
        of(1, shift="none")
    with pytest.warns(UserWarning, match="leave 2 degrees of freedom .* the std is infinite"):
        assert np.isinf(of(3)(None, Point(0.0)).std).all()
    assert np.isfinite(of(4)(None, Point(0.0)).std).all()
    assert of(1, preset="paper", shift="none").scale == 1


def test_no_weight_overflows():
    tiny = np.float32(1e-30)
    base = Normal(np.float32(MEAN) * tiny, np.float32(STD) * tiny)
    small = gaussian_mle.fit(None, base, np.float32(Y) * tiny, shift="constant")
    usual = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift="constant")
    np.testing.assert_allclose([small.shift / tiny, small.scale], [usual.shift, usual.scale], rtol=1e-5)


@pytest.mark.parametrize("preset", [None, "paper"])
@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_targets_equal_to_the_means_give_a_proper_distribution(reading, preset):
    base = Normal(MEAN, STD)
    with pytest.warns(UserWarning, match=r"y equals the \(shifted\) mean of base in every row"):
        fitted = gaussian_mle.fit(None, base, base.mean, shift=reading, preset=preset)
    distribution = fitted(None, base)
    np.testing.assert_allclose(distribution.mean, MEAN, rtol=EXACT)
    least = jnp.finfo(distribution.std.dtype).eps
    np.testing.assert_allclose(distribution.std / STD, np.full(60, least), rtol=EXACT if preset else 0.5)


@pytest.mark.parametrize(
    ("base", "y", "options", "message"),
    [
        (Normal(MEAN, STD), Y, {"shift": "relative"}, "shift must be one of .* got 'relative'"),
        (
            Normal(MEAN, STD),
            Y,
            {"shift": "auto", "preset": "paper"},
            "shift must be one of None, 'constant', .* 'auto'",
        ),
        (Normal(MEAN, STD), Y, {"preset": "crude"}, "preset must be one of None, 'paper'; got 'crude'"),
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
