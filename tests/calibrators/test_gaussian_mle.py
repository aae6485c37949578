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
from jaxcal.frames.labels import StdBins

pytestmark = pytest.mark.contract_in_32_bits

EXACT = 1e-12 if jax.config.jax_enable_x64 else 1e-5
RNG = np.random.default_rng(5)
MEAN, STD = RNG.normal(size=60), RNG.uniform(0.2, 3.0, size=60)
Y = MEAN + 0.7 + 2.5 * STD * RNG.standard_t(4, size=60)
WEIGHTS = RNG.exponential(size=60)
LABELS = RNG.choice(["big", "none", "small"], size=60)


@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_no_other_shift_and_scale_are_more_likely(reading):
    scale = {"constant": np.ones(60), "scaled": STD, "none": np.zeros(60)}[reading]
    loss = lambda q: -scipy.stats.norm.logpdf(Y, MEAN + q[0] * scale, math.exp(q[1]) * STD).sum()
    best = scipy.optimize.minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-8})
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift=reading, preset="paper")
    np.testing.assert_allclose([fitted.shift, fitted.scale], [best.x[0], math.exp(best.x[1])], rtol=1e-5, atol=1e-5)


def regression(y, mean, std, reading, weights=None, lost=0):
    """The shift, b^2, its degrees of freedom and the shift's variance over b^2, of a regression through the origin.

    `lost` is how many of the effective rows do not count.
    """
    z, weights = (y - mean) / std, np.ones(len(y)) if weights is None else weights
    effective, root = weights.sum() ** 2 / (weights**2).sum() - lost, np.sqrt(weights)
    if reading == "none":
        return 0.0, np.average(z**2, weights=weights), effective, 0.0
    u = 1 / std if reading == "constant" else np.ones(len(z))
    shift, *_ = np.linalg.lstsq((root * u)[:, None], root * z)
    squares = np.average((z - shift[0] * u) ** 2, weights=weights)
    variance = ((weights * u) ** 2).sum() / (weights @ u**2) ** 2
    return shift[0], squares * effective / (effective - 1), effective - 1, variance


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


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_a_new_row_follows_the_student_t_of_a_regression(reading, weights):
    shift, square, df, variance = regression(Y, MEAN, STD, reading, weights)
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), Y, shift=reading, weights=weights)
    distribution = fitted(None, Normal(MEAN[:7], STD[:7]))
    unit = STD[:7] if reading == "scaled" else np.ones(7)
    np.testing.assert_allclose(distribution.df, np.full(7, df), rtol=EXACT)
    np.testing.assert_allclose(distribution.loc, MEAN[:7] + shift * unit, rtol=10 * EXACT, atol=EXACT)
    scale = np.sqrt(square * (STD[:7] ** 2 + variance * unit**2))
    np.testing.assert_allclose(distribution.scale, scale, rtol=10 * EXACT)


@pytest.mark.parametrize("weights", [None, WEIGHTS[:12]], ids=["equal", "weighted"])
@pytest.mark.parametrize(("moved", "expected"), [(0.0, "none"), (0.3, "none"), (2.0, "constant")])
def test_the_shift_is_taken_where_it_predicts_rows_better_that_were_not_used(moved, expected, weights):
    rng = np.random.default_rng(2)
    mean, std = rng.normal(size=12), rng.uniform(0.5, 2, size=12)
    y = mean + moved + std * rng.normal(size=12)
    w = np.ones(12) if weights is None else weights
    effective = w.sum() ** 2 / (w**2).sum()
    scores = {"constant": 0.0, "none": 0.0}
    for reading in scores:
        for i in range(12):
            rest = np.arange(12) != i
            # The others are worth one effective row less than all.
            lost = w[rest].sum() ** 2 / (w[rest] ** 2).sum() - (effective - 1)
            shift, square, df, variance = regression(y[rest], mean[rest], std[rest], reading, w[rest], lost)
            scale = math.sqrt(square * (std[i] ** 2 + variance))
            scores[reading] += w[i] * scipy.stats.t.logpdf(y[i], df, mean[i] + shift, scale)
    best = max(scores, key=scores.get)
    assert best == expected
    base = Normal(mean, std)
    chosen, asked = (gaussian_mle.fit(None, base, y, weights=weights, **given) for given in ({}, {"shift": best}))
    if best == "none":  # the choice costs a degree of freedom
        df = jnp.array(effective - 1)
        asked = eqx.tree_at(lambda mle: (mle.df, mle.scale), asked, (df, asked.scale * math.sqrt(effective / df)))
    assert float(chosen.shift != 0) == (best == "constant")
    for name in ("shift", "scale", "shift_std", "df"):
        np.testing.assert_allclose(getattr(chosen, name), getattr(asked, name), rtol=10 * EXACT, atol=EXACT)


def arrays_of(fitted):
    return [
        getattr(fitted, name) for name in ("shift", "scale", "shift_std", "df") if getattr(fitted, name) is not None
    ]


@pytest.mark.parametrize("reading", ["constant", "scaled", "none"])
def test_whole_weights_estimate_what_repeated_rows_do(reading):
    times = np.arange(60) % 4  # some 0
    fit = lambda rows, **given: gaussian_mle.fit(
        None, Normal(MEAN[rows], STD[rows]), Y[rows], shift=reading, preset="paper", **given
    )
    weighted, repeated = fit(np.arange(60), weights=times), fit(np.repeat(np.arange(60), times))
    for name in ("shift", "scale"):
        np.testing.assert_allclose(getattr(weighted, name), getattr(repeated, name), rtol=10 * EXACT, atol=EXACT)


@pytest.mark.parametrize("by", [None, LABELS], ids=["all", "groups"])
def test_equal_weights_are_none_and_the_unit_of_weights_has_no_part(by):
    fit = lambda weights: arrays_of(gaussian_mle.fit(None, Normal(MEAN, STD), Y, by=by, weights=weights))
    for size in (0.1, 3.7):
        for equal, none in zip(fit(np.full(60, size)), fit(None), strict=True):
            np.testing.assert_array_equal(equal, none)
    for one, other in zip(fit(WEIGHTS), fit(1e4 * WEIGHTS), strict=True):
        np.testing.assert_allclose(one, other, rtol=100 * EXACT, atol=EXACT)


def test_rows_of_weight_zero_do_not_count():
    y, std, weights = Y.copy(), STD.copy(), WEIGHTS.copy()
    y[3], std[4], weights[[3, 4]] = 1e30, 1e-30, 0
    rest = ~np.isin(np.arange(60), [3, 4])
    found = gaussian_mle.fit(None, Normal(MEAN, std), y, weights=weights)
    expected = gaussian_mle.fit(None, Normal(MEAN[rest], STD[rest]), Y[rest], weights=WEIGHTS[rest])
    for one, other in zip(arrays_of(found), arrays_of(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=10 * EXACT, atol=EXACT)


@pytest.mark.parametrize("preset", [None, "paper"])
def test_every_group_is_fitted_by_itself(preset):
    # A shift in one group alone, which "auto" finds; errors of another size in each.
    noise = (Y - MEAN - 0.7) * np.where(LABELS == "small", 0.01, 1)
    y = MEAN + np.where(LABELS == "big", 9.0, 0) + noise
    fitted = gaussian_mle.fit(None, Normal(MEAN, STD), y, by=LABELS, weights=WEIGHTS, preset=preset)
    new = np.array(["small", "big", "none", "big"])
    distribution = fitted(None, Normal(MEAN[:4], STD[:4]), by=new)
    for k, label in enumerate(np.unique(LABELS)):
        own = label == LABELS
        alone = gaussian_mle.fit(None, Normal(MEAN[own], STD[own]), y[own], weights=WEIGHTS[own], preset=preset)
        for grouped, single in zip(arrays_of(fitted), arrays_of(alone), strict=True):
            np.testing.assert_allclose(grouped[k], single, rtol=10 * EXACT, atol=EXACT)
        if not preset:
            assert (fitted.shift[k] != 0) == (label == "big")
        rows, expected = np.flatnonzero(new == label), alone(None, Normal(MEAN[:4], STD[:4]))
        np.testing.assert_allclose(distribution.cdf(Y[:4])[rows], expected.cdf(Y[:4])[rows], atol=10 * EXACT)
    assert isinstance(distribution, Normal) == (preset is not None)


def test_groups_and_weights_may_be_functions_of_x():
    x, base = MEAN[:, None], Normal(MEAN, STD)
    by, weights = (lambda x: x[:, 0] > 0), (lambda x: np.exp(x[:, 0]))
    fitted = gaussian_mle.fit(x, base, Y, by=by, weights=weights)
    given = gaussian_mle.fit(None, base, Y, by=MEAN > 0, weights=np.exp(MEAN))
    np.testing.assert_array_equal(fitted(x, base).loc, given(None, base, by=MEAN > 0).loc)
    traced = eqx.filter_jit(lambda x, base: fitted(x, base).loc)(jnp.asarray(x), base)
    np.testing.assert_allclose(traced, fitted(x, base).loc, rtol=EXACT, atol=EXACT)
    with pytest.raises(ValueError, match="x is None, but by is a function of x"):
        fitted(None, base)
    with pytest.raises(ValueError, match="by holds the label 2, which no calibration row has"):
        given(None, base, by=np.full(60, 2))
    bins = StdBins.of(base, number=2)
    of_std = gaussian_mle.fit(None, base, Y, by=bins)
    np.testing.assert_array_equal(
        of_std(None, base).loc, gaussian_mle.fit(x, base, Y, by=bins(base))(x, base, by=bins(base)).loc
    )
    # Data frames hold strings as objects.
    named = gaussian_mle.fit(None, base, Y, by=LABELS.astype(object))
    np.testing.assert_array_equal(named(None, base, by=LABELS.astype(object)).loc, named(None, base, by=LABELS).loc)
    with pytest.raises(ValueError, match="fitted with labels of groups: give the labels of these rows"):
        given(None, base)


def test_groups_under_vmap_over_runs():
    runs = [np.stack([a, a[::-1]]) for a in (MEAN, STD, Y, WEIGHTS)]

    def predict(mean, std, y, weights):
        base = Normal(mean, std)
        return gaussian_mle.fit(None, base, y, by=LABELS, weights=weights)(None, base, by=LABELS).cdf(y)

    expected = [predict(*run) for run in zip(*runs, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(predict))(*runs), expected, atol=10 * EXACT)


def test_groups_that_are_too_small_are_named():
    labels = ["few"] * 2 + ["many"] * 58
    fit = lambda **options: gaussian_mle.fit(None, Normal(MEAN, STD), Y, **options)
    with pytest.raises(ValueError, match=r"the 2 rows of group 'few' leave 1 degrees .*: 1 more rows .* needed"):
        fit(by=labels)
    with pytest.warns(UserWarning, match="the 2 rows of group 'few' leave 2 degrees .* the std is infinite"):
        fit(by=labels, shift="none")
    weights = np.where(np.arange(60) < 2, 1.0, 1e-3)
    with pytest.raises(ValueError, match=r"the 60 rows leave 1\.12 degrees of freedom to the scale; at least 2"):
        fit(weights=weights)
    with pytest.raises(ValueError, match="the weights of group 'few' are all 0"):
        fit(by=labels, weights=1 - 1.0 * (np.arange(60) < 2))
    with pytest.warns(UserWarning, match="in every row of 1 groups, the first of them 'few'"):
        gaussian_mle.fit(None, Point(np.zeros(60)), np.maximum(np.arange(60) - 4.0, 0), by=["few"] * 5 + ["many"] * 55)


def probabilities_after_a_shift_of_inputs(size, spread, weighted, runs, reading=None):
    """F(y) of new rows: calibration inputs N(0, 1), new ones N(1, 1), errors of std exp(spread x)."""
    x = np.random.default_rng(4).normal(size=(runs, size + 1)) + np.eye(size + 1)[-1]
    y = np.exp(spread * x) * np.random.default_rng(5).normal(size=x.shape)

    def one(x, y):
        weights = jnp.exp(x[:-1]) if weighted else None
        fitted = gaussian_mle.fit(None, Point(jnp.zeros(size)), y[:-1], shift=reading, weights=weights)
        return fitted(None, Point(jnp.zeros(1))).cdf(y[-1:])[0]

    return np.asarray(jax.jit(jax.vmap(one))(x, y))


def coverage(p, level):
    return np.mean(np.abs(2 * p - 1) < level)


def test_weights_make_intervals_cover_rows_with_shifted_inputs():
    error = 3 * math.sqrt(0.09 / 2000)
    known = probabilities_after_a_shift_of_inputs(40, 0.0, True, 2000)
    assert abs(coverage(known, 0.9) - 0.9) < error + 0.01
    ignored, weighted = (probabilities_after_a_shift_of_inputs(40, 0.4, use, 2000) for use in (False, True))
    assert coverage(ignored, 0.9) < 0.85 < coverage(weighted, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("reading", ["constant", "none", "auto"])
@pytest.mark.parametrize("size", [9, 19, 99, 999])
def test_weighted_intervals_cover_about_what_they_claim(size, reading):
    # Effective rows: 5, 10, 41, 370.
    runs = 20000 if size < 999 else 4000
    p = probabilities_after_a_shift_of_inputs(size, 0.0, True, runs, reading)
    for level in (0.5, 0.8, 0.9, 0.99):
        error = 4 * math.sqrt(level * (1 - level) / runs)
        assert -error - 0.005 < coverage(p, level) - level < error + (0.04 if size == 9 else 0.015)


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
