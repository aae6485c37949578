"""Split conformal prediction against NumPy loops, its guarantee against simulation and the Beta distribution."""

import math
from fractions import Fraction
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal.calibrators import conformal, crude
from jaxcal.distributions import Normal, Point, Quantiles
from jaxcal.functional import quantiles
from jaxcal.guarantee import Guarantee

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-12 if X64 else 1e-5
LEVELS = (0.5, 0.8, 0.9, 0.95)


@pytest.fixture
def rows(rng):
    """Means, stds and targets of 60 calibration rows, and means and stds of 4 new ones."""
    mean, std = rng.normal(size=60), rng.uniform(0.5, 2, size=60)
    return mean, std, mean + std * rng.standard_t(4, size=60), rng.normal(size=4), rng.uniform(0.5, 2, size=4)


@pytest.mark.parametrize("score", ["absolute", "scaled", "signed"])
def test_a_traced_fit_has_the_scores_and_intervals_of_a_known_one_to_the_bit(rng, score):
    # Many rows are equal, some have no error, and one of these has no std.
    mean, std = jnp.asarray(rng.integers(-9, 9, 200) / 10), jnp.asarray(rng.integers(1, 5, 200) / 3)
    y = jnp.asarray(rng.integers(-9, 9, 200) / 10).at[0].set(mean[0])
    std = std.at[0].set(0)

    def fit(mean, std, y):
        found = conformal.fit(None, Normal(mean, std), y, score=score)
        return found.scores, found(None, Normal(mean, std)).interval(0.9)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(fit)(mean, std, y), fit(mean, std, y))


@pytest.mark.parametrize("rule", ["inverse_cdf", "crude", "conformal"])
@pytest.mark.parametrize("size", [1, 19, 400, 99_999])
def test_traced_ranks_are_known_ranks(rule, size):
    rank, levels = partial(quantiles.empirical_rank, size=size, rule=rule), jnp.linspace(0, 1, 1001)
    np.testing.assert_array_equal(jax.jit(rank)(levels), rank(levels))


@pytest.mark.parametrize(
    ("score", "has_std"),
    [("absolute", False), ("absolute", True), ("scaled", True), ("signed", False), ("signed", True)],
)
def test_intervals_of_a_table_are_those_of_a_loop(rows, score, has_std):
    mean, std, y, new_mean, new_std = rows
    make = Normal if has_std else lambda mean, std: Point(mean)
    distribution = conformal.fit(None, make(mean, std), y, score=score)(None, make(new_mean, new_std))
    if score == "absolute" or not has_std:
        std, new_std = np.ones(60), np.ones(4)
    z = sorted((y - mean) / std)
    for level in LEVELS:
        level = Fraction(level).limit_denominator(100)
        if score == "signed":
            low, high = z[math.floor(61 * (1 - level) / 2) - 1], z[math.ceil(61 * (1 + level) / 2) - 1]
        else:
            high = sorted(map(abs, z))[math.ceil(61 * level) - 1]
            low = -high
        lower, upper = distribution.interval(float(level))
        np.testing.assert_allclose(lower, new_mean + low * new_std, rtol=10 * EXACT, atol=EXACT)
        np.testing.assert_allclose(upper, new_mean + high * new_std, rtol=10 * EXACT, atol=EXACT)


def test_the_score_follows_the_base(rows):
    mean, std, y, *_ = rows
    for base, score in ((Normal(mean, std), "scaled"), (Point(mean), "absolute")):
        assert eqx.tree_equal(conformal.fit(None, base, y), conformal.fit(None, base, y, score=score))
    signed = conformal.fit(None, Normal(mean, std), y, score="signed")
    assert eqx.tree_equal(signed.scores, crude.fit(None, Normal(mean, std), y, rank="conformal").z)


def conformalized(interval, y, new, level):
    """The interval of conformalized quantile regression at one level, by a loop."""
    errors = sorted(max(low - t, t - high) for low, t, high in zip(interval[0], y, interval[1], strict=True))
    margin = errors[math.ceil(round((len(y) + 1) * level, 9)) - 1]
    return new[0] - margin, new[1] + margin


def test_quantiles_are_conformalized_as_in_a_loop(rows):
    mean, std, y, new_mean, new_std = rows
    # In any order, and once each.
    levels = [0.9, 0.5, 0.95, 0.8, 0.9]
    fitted = conformal.fit(None, Normal(mean, std), y, score="quantile", confidence_levels=levels)
    assert fitted.confidence_levels == LEVELS
    distribution = fitted(None, Normal(new_mean, new_std))
    interval = eqx.filter_jit(distribution.interval)
    for level in LEVELS:
        lower, upper = interval(level)
        ends = (scipy.stats.norm.interval(level, *moments) for moments in ((mean, std), (new_mean, new_std)))
        expected = conformalized(next(ends), y, next(ends), level)
        np.testing.assert_allclose(lower, expected[0], rtol=10 * EXACT, atol=10 * EXACT)
        np.testing.assert_allclose(upper, expected[1], rtol=10 * EXACT, atol=10 * EXACT)
    np.testing.assert_allclose(distribution.values[:, 4], new_mean, rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_crossing_intervals_are_widened_until_they_nest(rng):
    # The base's wide intervals are far too wide and its narrow ones too narrow: moved, they would cross.
    shape = np.array([-30.0, -20.0, -0.1, 0.0, 0.1, 20.0, 30.0])
    levels = np.array([0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975])
    scales, new_scales, y = rng.uniform(0.1, 3, size=60), np.array([0.05, 1.0, 3.0]), rng.normal(size=60)
    base, new = (Quantiles(levels, scale[:, None] * shape) for scale in (scales, new_scales))
    distribution = conformal.fit(None, base, y, score="quantile", confidence_levels=(0.5, 0.9, 0.95))(None, new)
    lower, upper = np.zeros(3), np.zeros(3)
    crossed = False
    for k, level in enumerate((0.5, 0.9, 0.95)):
        of = lambda scale: (scale * shape[2 - k], scale * shape[4 + k])  # noqa: B023
        own = conformalized(of(scales), y, of(new_scales), level)
        crossed |= (own[0] > lower).any()
        lower, upper = np.minimum(lower, own[0]), np.maximum(upper, own[1])
        np.testing.assert_allclose(distribution.values[:, 2 - k], lower, rtol=10 * EXACT, atol=10 * EXACT)
        np.testing.assert_allclose(distribution.values[:, 4 + k], upper, rtol=10 * EXACT, atol=10 * EXACT)
    assert crossed


def test_a_widened_interval_tells_what_it_covers():
    # Wide scores and narrow ones that have little to do with each other: the wide interval does not contain the other.
    rng, rows, runs = np.random.default_rng(8), 99, 30
    levels, counted, covered = (0.79, 0.8), [], []
    knots = np.array([0.1, 0.105, 0.5, 0.895, 0.9])

    def base_of(size):
        # The interval at 79 % has its width from one column, that at 80 % from another.
        narrow, wide = rng.uniform(0.2, 3, size=size), rng.uniform(0, 0.5, size=size)
        return Quantiles(knots, np.stack([-narrow - wide, -narrow, 0 * narrow, narrow, narrow + wide], 1))

    for _ in range(runs):
        base, y = base_of(rows), rng.normal(size=rows)
        fitted = conformal.fit(None, base, y, score="quantile", confidence_levels=levels)
        new, y_new = base_of(2000), rng.normal(size=2000)
        distribution = fitted(None, new)
        inside = (distribution.values[:, 0] <= y_new) & (y_new <= distribution.values[:, -1])
        guarantee = fitted.guarantee(0.8)
        lower, upper = fitted(None, base).values[:, 0], fitted(None, base).values[:, -1]
        held = int(((lower <= y + 1e-5) & (y - 1e-5 <= upper)).sum())
        assert (guarantee.widened_to or guarantee.places) == held >= guarantee.places
        counted.append(held / (rows + 1))
        covered.append(np.mean(inside))
    error = np.std(np.subtract(counted, covered)) / math.sqrt(runs)
    assert abs(np.mean(counted) - np.mean(covered)) < 4 * error + 0.005
    assert np.mean(covered) > 0.81 > fitted.guarantee(0.79).coverage
    assert fitted.guarantee(0.79).widened_to is None


def test_quantiles_may_coincide():
    base = Quantiles(np.array([0.05, 0.5, 0.95]), np.zeros((20, 3)))
    fitted = conformal.fit(None, base, np.arange(20.0), score="quantile", confidence_levels=[0.9])
    assert fitted.scores.tolist() == [18.0]


# ------------------------------------------------------------------ the guarantee


def simulated(score, size, level, runs):
    """The realized coverage of a normal outcome after each of many calibrations of a wrong model, and its guarantee."""
    y = jax.random.normal(jax.random.key(size), (runs, size))
    base = lambda rows: Normal(jnp.full(rows, 0.3), jnp.full(rows, 0.6))
    options = {"confidence_levels": [level]} if score == "quantile" else {}

    @eqx.filter_jit
    @eqx.filter_vmap
    def ends(y):
        fitted = conformal.fit(None, base(size), y, score=score, **options)
        return fitted(None, base(1)).interval(level)

    lower, upper = (np.asarray(end)[:, 0] for end in ends(y))
    guarantee = conformal.fit(None, base(size), y[0], score=score, **options).guarantee(level)
    return scipy.stats.norm.cdf(upper) - scipy.stats.norm.cdf(lower), guarantee


@pytest.mark.parametrize("size", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("score", ["absolute", "scaled", "signed", "quantile"])
def test_coverage_follows_its_beta_distribution(score, size):
    runs = 10_000
    for level in (0.5, 0.9):
        coverage, guarantee = simulated(score, size, level, runs)
        assert level - 1e-9 <= guarantee.coverage < level + 2 / size
        error = coverage.std() / math.sqrt(runs)
        assert abs(coverage.mean() - guarantee.coverage) < 4 * error
        distribution = scipy.stats.beta(guarantee.places, size + 1 - guarantee.places)
        assert scipy.stats.kstest(coverage, distribution.cdf).pvalue > 1e-4
        low, high = guarantee.interval(0.9)
        assert abs(np.mean((coverage >= low) & (coverage <= high)) - 0.9) < 4 * math.sqrt(0.09 / runs)


@pytest.mark.parametrize("score", ["scaled", "signed", "quantile"])
def test_ties_only_add_to_the_coverage(score, rng):
    # Standard normal outcomes, rounded to whole numbers.
    y = np.round(rng.normal(size=(2000, 39)), 0)
    fractions = np.array([0.3829, 0.2417, 0.0606, 0.0060, 0.0002])  # of 0, +-1, ..., +-4
    options = {"confidence_levels": [0.8]} if score == "quantile" else {}
    fit = lambda y: conformal.fit(None, Normal(jnp.zeros(39), 1.0), y, score=score, **options)
    lower, upper = eqx.filter_jit(eqx.filter_vmap(lambda y: fit(y)(None, Normal(jnp.zeros(1), 1.0)).interval(0.8)))(y)
    values = np.arange(-4, 5)
    covered = ((values[None] >= np.asarray(lower)) & (values[None] <= np.asarray(upper))) @ fractions[np.abs(values)]
    assert covered.mean() >= 0.8 - 4 * covered.std() / math.sqrt(2000)


def test_the_coverage_follows_a_beta_distribution():
    guarantee = Guarantee.of(0.9, 100, "symmetric")
    assert (guarantee.places, guarantee.coverage) == (91, pytest.approx(91 / 101))
    for p in (0.01, 0.5, 0.975):
        assert guarantee.quantile(p) == pytest.approx(scipy.stats.beta.ppf(p, 91, 10), rel=1e-9)
    assert guarantee.interval(0.8) == (guarantee.quantile(0.1), pytest.approx(guarantee.quantile(0.9)))
    assert "84.8 % and 94.5 %" in str(guarantee)


@pytest.mark.parametrize(("rule", "enough"), [("symmetric", 99), ("conformal", 199)])
def test_an_infinite_interval_covers_all(rule, enough):
    guarantee = Guarantee.of(0.99, enough - 1, rule)
    assert guarantee.coverage == 1
    assert guarantee.interval() == (1, 1)
    assert str(guarantee).startswith(f"The 99 % interval is infinite: {enough - 1} calibration rows are too few")
    guarantee = Guarantee.of(0.99, enough, rule)
    assert guarantee.coverage == pytest.approx(0.99)
    assert guarantee.quantile(0.5) < 1


@pytest.mark.parametrize("size", [1, 7, 100, 999, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64"] if X64 else ["float32"])
def test_symmetric_quantiles_take_the_right_rank(size, dtype):
    sizes = np.arange(1, size + 1, dtype=dtype)
    levels = [Fraction(i, 1000) for i in range(1001)]
    ranks = np.array([math.ceil(abs(2 * p - 1) * (size + 1)) for p in levels], float)
    expected = np.sign([float(2 * p - 1) for p in levels]) * np.where(ranks > size, np.inf, ranks)
    table = np.concatenate([-sizes[::-1], sizes])
    actual = quantiles.empirical_quantile(table, np.array([float(p) for p in levels], dtype), "symmetric")
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected)


# ------------------------------------------------------------------ mistakes


def test_an_interval_with_ends_between_scores_has_a_guarantee_too(rng):
    """Of uniform scores the interval covers as much as it is long."""
    size, level = 57, 0.9
    guarantee = Guarantee.of(level, size, "linear")
    assert level - 2 / (size + 1) < guarantee.coverage <= level
    knots = np.pad(np.sort(rng.uniform(size=(4000, size))), ((0, 0), (1, 1)), constant_values=(0, 1))
    levels = np.arange(size + 2) / (size + 1)
    covered = np.mean([np.diff(np.interp([0.05, 0.95], levels, each))[0] for each in knots])
    assert guarantee.coverage < covered + 0.002
    assert covered < guarantee.coverage + 2 / (size + 1) + 0.002
    assert "at least" in str(fit_on(rule="linear", size=size).guarantee(level))
    assert "too few" in str(Guarantee.of(0.9, 1, "linear"))
    # The realized coverage lies in the band of 90 % of the sets.
    low, high = Guarantee.of(level, size, "linear").interval()
    realized = np.array([np.diff(np.interp([0.05, 0.95], levels, each))[0] for each in knots])
    assert np.mean((realized >= low) & (realized <= high)) >= 0.9
    assert Guarantee.of(0.9, 1, "linear").interval()[0] == 0


def fit_on(make=Normal, size=60, **options):
    base = make(np.zeros(size), np.ones(size))
    return conformal.fit(None, base, np.arange(float(size)), **options)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: fit_on(score="cqr"), "score must be one of .*'quantile'; got 'cqr'"),
        (lambda: fit_on(lambda mean, std: Point(mean), score="scaled"), "base is a Point"),
        (lambda: fit_on()(None, Point(0.0)), "base is a Point"),
        (
            lambda: fit_on(confidence_levels=[0.9]),
            "go with score='quantile'; score='scaled' answers at any level: drop them",
        ),
        (lambda: fit_on(score="quantile", confidence_levels=[]), "confidence_levels is empty"),
        (lambda: fit_on(score="quantile", confidence_levels=[0.5, 90.0]), "got 90: did you mean 0.9"),
        (
            lambda: fit_on(score="quantile", confidence_levels=[0.5, 0.99]),
            "60 rows are too few for confidence level 0.99: at least 99 are needed. Give more rows",
        ),
        (lambda: fit_on(score="quantile", size=18), "level 0.95: at least 19 are needed"),
        (lambda: fit_on(score="quantile").guarantee(0.7), "must be one of 0.5, 0.8, 0.9, 0.95; got 0.7"),
        (lambda: fit_on().guarantee(90.0), "did you mean 0.9"),
        (
            lambda: fit_on(rule="randomized", key=jax.random.key(0)).guarantee(0.9),
            "tables read by the rule 'randomized' guarantee nothing: use",
        ),
        (
            lambda: fit_on()(None, Point(np.zeros(2)), by=["a", "b"]),
            "by has no effect: the calibrator was fitted without groups",
        ),
        (
            lambda: fit_on(score="quantile")(None, Normal(0.0, 1.0), weights=np.ones(1)),
            "weights have no effect: the calibrator was fitted without",
        ),
        (lambda: conformal.fit(None, Point(np.zeros(3)), np.zeros(4)), "base.mean has 3 rows where 4"),
        (lambda: Guarantee.of(0.9, 20, "symmetric").interval(90.0), "probability .* did you mean 0.9"),
    ],
)
def test_mistakes_are_named(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()
