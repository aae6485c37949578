"""Groups and weights of calibration rows: tables against loops, coverage within groups and after a shift of inputs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Empirical, Normal, Point
from jaxcal.calibrators import _pooling, conformal, crude, isotonic
from jaxcal.frames.labels import ColumnBins, StdBins
from jaxcal.functional import tables

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-10 if X64 else 3e-5
# 23 values of three groups, one of which has a single value; two are equal.
NUMBER = np.array([0] * 9 + [1] * 13 + [2])
VALUES = np.round(np.random.default_rng(0).normal(size=23), 2)
VALUES[3] = VALUES[5]
WEIGHTS = np.random.default_rng(1).integers(1, 4, 23) / 4
ROWS = np.array([0, 1, 2, 1, 0])
U = np.array([-0.3, 0.4, 0.1, -5.0, VALUES[3]])
LEVELS = (0.0, 0.1, 0.29, 0.5, 0.6, 0.9, 1.0)


def of_group(k, weighted=False):
    """The sorted values of a group and their weights."""
    mine = np.equal(NUMBER, k)
    order = np.argsort(VALUES[mine], kind="stable")
    return VALUES[mine][order], (WEIGHTS[mine] if weighted else np.ones(mine.sum()))[order]


@pytest.fixture(scope="module", params=[False, True], ids=["equal", "weighted"])
def table(request):
    """The tables of rows in another order, and whether they are weighted."""
    order = np.random.default_rng(2).permutation(23)
    weights = WEIGHTS[order] if request.param else None
    return tables.make(jnp.asarray(VALUES[order]), NUMBER[order], 3, weights), request.param


def test_tables_are_those_of_the_groups(table):
    found, weighted = table
    for k in range(3):
        values, weights = of_group(k, weighted)
        mine = slice(int(found.start[k]), int(found.start[k + 1]))
        np.testing.assert_allclose(found.values[mine], values, rtol=EXACT)
        np.testing.assert_allclose(found.upto[mine][-1], weights.sum(), rtol=EXACT)
        mean = np.average(values, weights=weights)
        np.testing.assert_allclose(found.mean[k], mean, atol=EXACT)
        np.testing.assert_allclose(found.std[k] ** 2, np.average((values - mean) ** 2, weights=weights), atol=EXACT)


def test_cdf_and_score_are_those_of_loops(table):
    found, weighted = table
    cdf, crps = jax.jit(lambda u: (tables.cdf(found, ROWS, u), tables.crps(found, ROWS, u)))(jnp.asarray(U))
    for row, (k, u) in enumerate(zip(ROWS, U, strict=True)):
        values, weights = of_group(k, weighted)
        p = weights / weights.sum()
        np.testing.assert_allclose(cdf[row], p[values <= u + 1e-9].sum(), rtol=EXACT)
        pairs = np.abs(values[:, None] - values) * p[:, None] * p
        np.testing.assert_allclose(crps[row], p @ np.abs(values - u) - pairs.sum() / 2, rtol=10 * EXACT)


def quantile_by_loop(values, weights, p, rule, new):
    """The definitions, with sums that are exact numbers."""
    upto, total = np.cumsum(weights), weights.sum()
    if rule == "conformal" and p < 0.5:
        return -quantile_by_loop(-values[::-1], weights[::-1], 1 - p, rule, new)
    if rule == "conformal":
        return np.append(values, np.inf)[np.searchsorted(upto, np.round(p * (total + new), 9))]
    target = np.round(p * total, 9)
    place = np.searchsorted(upto, target, side="right" if rule == "crude" else "left")
    return values[min(place, len(values) - 1)]


@pytest.mark.parametrize("rule", ["inverse_cdf", "crude", "conformal"])
def test_quantiles_are_those_of_loops(table, rule):
    found, weighted = table
    new = np.array([0.5, 1.0, 2.0, 1.5, 0.0])
    read = jax.jit(lambda p, new: tables.quantile(found, ROWS, p, rule, new))
    for level in LEVELS:
        expected = [quantile_by_loop(*of_group(k, weighted), level, rule, w) for k, w in zip(ROWS, new, strict=True)]
        np.testing.assert_allclose(read(jnp.full(5, level), jnp.asarray(new)), expected, rtol=EXACT)


@pytest.mark.parametrize(
    "rule",
    [*(pytest.param(rule, marks=pytest.mark.slow) for rule in ("inverse_cdf", "crude")), "conformal", "symmetric"],
)
@pytest.mark.filterwarnings("ignore:.*quantile is infinite", "ignore:.*too few for the level")
def test_a_table_of_each_group_is_an_empirical_distribution(rule):
    loc, scale, y = np.array([0.0, 1.0, -2.0]), np.array([1.0, 0.5, 0.0]), np.array([0.1, 0.9, -1.0])
    values, number = VALUES[:22], NUMBER[:22]
    if rule == "symmetric":
        values, number = np.concatenate([values, -values]), np.concatenate([number, number])
    for k in range(2):
        alone = Empirical(loc, scale, np.sort(values[number == k]), rule)
        made = tables.make(jnp.asarray(values), number, 2)
        grouped = Empirical(loc, scale, made, rule, group=jnp.full(3, k))
        pairs = [(getattr(alone, name), getattr(grouped, name)) for name in ("mean", "std")]
        pairs += [(getattr(alone, name)(y), getattr(grouped, name)(y)) for name in ("cdf", "crps", "log_prob")]
        pairs += [(alone.icdf(np.array(LEVELS)), grouped.icdf(np.array(LEVELS)))]
        pairs += list(zip(alone.interval(0.8), grouped.interval(0.8), strict=True))
        for expected, found in pairs:
            np.testing.assert_allclose(found, expected, rtol=EXACT, atol=EXACT)


def test_samples_follow_the_weights():
    made = tables.make(jnp.asarray([1.0, 2.0, 7.0]), np.array([0, 0, 1]), 2, jnp.asarray([1.0, 3.0, 1.0]))
    distribution = Empirical(np.zeros(2), 1.0, made, group=jnp.asarray([0, 1]))
    drawn = np.asarray(distribution.sample(jax.random.key(0), (4000,)))
    np.testing.assert_allclose(np.mean(drawn[:, 0] == 2), 0.75, atol=0.03)
    assert (drawn[:, 1] == 7).all()


# Calibrators


def rows_of(n, seed):
    """Inputs, predictions, targets: the noise is three times as large in group "loud"."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(n, 2))
    labels = np.where(x[:, 0] > 0, "loud", "quiet")
    y = x[:, 1] + np.where(x[:, 0] > 0, 1.5, 0.5) * rng.normal(size=n)
    return x, Point(x[:, 1]), y, labels


@pytest.mark.parametrize("score", ["absolute", "signed"])
def test_each_group_is_calibrated_by_its_own_rows(score):
    x, base, y, labels = rows_of(200, 0)
    fitted = conformal.fit(x, base, y, score=score, by=labels)
    new_x, new_base, _, new_labels = rows_of(50, 1)
    distribution = fitted(new_x, new_base, by=new_labels)
    for label in ("loud", "quiet"):
        own, new = labels == label, new_labels == label
        alone = conformal.fit(None, Point(base.mean[own]), y[own], score=score)
        expected = alone(None, Point(new_base.mean[new])).interval(0.9)
        for end, expected_end in zip(distribution.interval(0.9), expected, strict=True):
            np.testing.assert_allclose(end[new], expected_end, rtol=EXACT, atol=EXACT)
        assert fitted.guarantee(0.9, label) == alone.guarantee(0.9)


def test_labels_may_come_from_a_function_of_x():
    x, base, y, labels = rows_of(100, 0)
    by = lambda x: x[:, 0] > 0
    fitted = conformal.fit(x, base, y, by=by)
    given = conformal.fit(x, base, y, by=labels)
    np.testing.assert_array_equal(fitted(x, base).icdf(0.9), given(None, base, by=labels).icdf(0.9))
    of_call = eqx.filter_jit(lambda x, base: fitted(x, base).icdf(0.9))
    np.testing.assert_allclose(of_call(jnp.asarray(x), base), fitted(x, base).icdf(0.9), rtol=EXACT)


@pytest.mark.parametrize("rank", ["crude", "conformal"])
def test_crude_has_a_table_for_each_group(rank):
    x, base, y, labels = rows_of(200, 0)
    base = Normal(base.mean, 1 + x[:, 1] ** 2)
    fitted = crude.fit(x, base, y, rank=rank, by=labels)
    own = labels == "loud"
    alone = crude.fit(None, Normal(base.mean[own], base.std[own]), y[own], rank=rank)
    expected = alone(None, Normal(base.mean[own], base.std[own])).interval(0.8)
    for end, expected_end in zip(fitted(x, base, by=labels).interval(0.8), expected, strict=True):
        np.testing.assert_allclose(end[own], expected_end, rtol=EXACT, atol=EXACT)


def test_quantiles_of_a_base_move_by_the_scores_of_their_group():
    x, base, y, labels = rows_of(100, 0)
    base, levels = Normal(base.mean, 1 + x[:, 1] ** 2), (0.3, 0.8)
    fitted = conformal.fit(x, base, y, score="quantile", confidence_levels=levels, by=labels)
    distribution = fitted(None, base, by=labels)
    own = labels == "loud"
    mine = Normal(base.mean[own], base.std[own])
    alone = conformal.fit(None, mine, y[own], score="quantile", confidence_levels=levels)
    for level in levels:
        for end, expected in zip(distribution.interval(level), alone(None, mine).interval(level), strict=True):
            np.testing.assert_allclose(end[own], expected, rtol=EXACT, atol=EXACT)
    assert fitted.guarantee(0.8, "loud").places == alone.guarantee(0.8).places
    with pytest.raises(ValueError, match=r"group 'quiet' has [0-9]+ rows, too few for confidence level 0.99"):
        conformal.fit(x, base, y, score="quantile", confidence_levels=[0.99], by=labels)
    # A row of weight 0 does not count; one that outweighs the calibration rows has no finite interval.
    counts = own.astype(float)
    weighted = conformal.fit(x, base, y, score="quantile", confidence_levels=levels, weights=counts)
    distribution = weighted(None, mine, weights=np.ones(own.sum()))
    np.testing.assert_allclose(distribution.interval(0.8)[1], alone(None, mine).interval(0.8)[1], rtol=EXACT)
    heavy = weighted(None, mine, weights=np.full(own.sum(), 50.0))
    with pytest.warns(UserWarning, match="the quantile is infinite"):
        assert np.isposinf(heavy.interval(0.8)[1]).all()
    assert np.isfinite(heavy.interval(0.3)[1]).all()
    assert np.isfinite(heavy.std).all()


def test_whole_weights_are_repeated_calibration_rows():
    x, base, y, labels = rows_of(60, 0)
    weights = np.arange(60) % 3
    repeated = np.repeat(np.arange(60), weights)
    fitted = conformal.fit(x, base, y, weights=weights, by=labels, score="signed")
    again = conformal.fit(x, Point(base.mean[repeated]), y[repeated], by=labels[repeated], score="signed")
    distribution = fitted(x, base, by=labels, weights=np.ones(60))
    for end, expected in zip(distribution.interval(0.8), again(x, base, by=labels).interval(0.8), strict=True):
        np.testing.assert_allclose(end, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*quantile is infinite")
def test_weights_keep_the_coverage_where_inputs_are_shifted():
    """Inputs of mean 0 and, where it is asked, of mean 1; noise that grows with x: Tibshirani et al., section 2."""
    rng = np.random.default_rng(0)
    covered = {"plain": [], "weighted": []}
    ratio = lambda x: jnp.exp(x[:, 0] - 0.5)
    for _ in range(300):
        x, new_x = rng.normal(size=(200, 1)), rng.normal(1, 1, size=(50, 1))
        y, new_y = (np.exp(each[:, 0] / 2) * rng.normal(size=len(each)) for each in (x, new_x))
        for name, weights in (("plain", None), ("weighted", ratio)):
            fitted = conformal.fit(x, Point(np.zeros(200)), y, weights=weights)
            lower, upper = fitted(new_x, Point(np.zeros(50))).interval(0.9)
            covered[name].append(np.mean((lower <= new_y) & (new_y <= upper)))
    assert np.mean(covered["plain"]) < 0.86
    assert abs(np.mean(covered["weighted"]) - 0.9) < 0.015


def test_the_guarantee_of_weights_says_what_it_rests_on():
    x, base, y, _ = rows_of(100, 0)
    fitted = conformal.fit(x, base, y, weights=lambda x: jnp.exp(x[:, 0]))
    guarantee = fitted.guarantee(0.9)
    weights = np.exp(x[:, 0])
    assert guarantee.effective == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-5)
    assert "density of new inputs" in " ".join(str(guarantee).split())


def test_what_is_missing_or_unknown_is_quoted():
    x, base, y, labels = rows_of(100, 0)
    fitted = conformal.fit(x, base, y, by=labels)
    with pytest.raises(ValueError, match="give the labels of these rows, by=labels"):
        fitted(x, base)
    with pytest.raises(
        ValueError, match="by holds the label 'new', which no calibration row has; there are 'loud', 'quiet'"
    ):
        fitted(x, base, by=["new"] * 100)
    with pytest.raises(ValueError, match="the labels of the fit are"):
        fitted(x, base, by=np.arange(100))
    with pytest.raises(ValueError, match="group must be one of 'loud', 'quiet'; got None"):
        fitted.guarantee(0.9)
    with pytest.raises(ValueError, match="weights have no effect"):
        fitted(x, base, by=labels, weights=np.ones(100))
    with pytest.raises(ValueError, match="x is None, but by is a function of x"):
        conformal.fit(None, base, y, by=lambda x: x[:, 0] > 0)
    with pytest.raises(ValueError, match="the weights of group 'loud' are all 0"):
        conformal.fit(x, base, y, by=labels, weights=(labels == "quiet").astype(float))
    with pytest.raises(ValueError, match="by and weights go with"):
        conformal.fit(x, base, y, by=labels, rule="randomized", key=jax.random.key(0))
    with pytest.raises(ValueError, match="partial_pooling goes with labels of groups"):
        crude.fit(x, base, y, partial_pooling=True)
    with pytest.raises(ValueError, match="tables read by the rule 'linear' guarantee nothing"):
        conformal.fit(x, base, y, by=labels, rule="linear").guarantee(0.9, "loud")
    weighted = conformal.fit(x, base, y, weights=np.ones(100))
    with pytest.raises(ValueError, match="fitted with weights: give the weights of these rows"):
        weighted(x, base)
    small = conformal.fit(x[:12], Point(base.mean[:12]), y[:12], by=labels[:12])
    with pytest.warns(UserWarning, match="in 12 rows the quantile is infinite.*the smallest has [1-6]"):
        small(x[:12], Point(base.mean[:12]), by=labels[:12]).interval(0.99)
    with pytest.raises(ValueError, match=r"group 'loud' has [0-9]+ calibration rows, too few .* at least 99"):
        small.guarantee(0.99, "loud")


def test_many_groups_cost_no_more_than_their_rows():
    rng = np.random.default_rng(0)
    number = rng.integers(0, 1000, 20_000)
    base = Point(np.zeros(20_000))
    fitted = conformal.fit(None, base, rng.normal(size=20_000), by=number)
    sizes = jax.tree.map(lambda leaf: leaf.size, eqx.filter(fitted, eqx.is_array))
    assert max(jax.tree.leaves(sizes)) <= 40_000
    upper = np.asarray(fitted(None, base, by=number).icdf(0.8))
    assert np.unique(upper).size > 900


@pytest.fixture(scope="module")
def linear():
    """An isotonic calibrator of two groups, and its distributions of new rows."""
    x, base, y, labels = rows_of(60, 0)
    base = Normal(base.mean, 1 + x[:, 1] ** 2)
    y = np.round(y, 1)  # some errors are equal
    fitted = isotonic.fit(x, base, y, by=labels)
    return fitted, x, base, y, labels, fitted(x, base, by=labels)


def test_each_group_is_recalibrated_by_its_own_rows(linear):
    _, _, base, y, labels, distribution = linear
    own = labels == "quiet"
    mine, new = Normal(base.mean[own], base.std[own]), np.linspace(-6, 6, 60)
    alone = isotonic.fit(None, mine, y[own])(None, mine)
    for method in ("cdf", "crps"):
        expected = getattr(alone, method)(new[own])
        np.testing.assert_allclose(getattr(distribution, method)(new)[own], expected, rtol=100 * EXACT, atol=EXACT)
    for name in ("mean", "std"):
        np.testing.assert_allclose(getattr(distribution, name)[own], getattr(alone, name), rtol=100 * EXACT)
    levels = np.array([0.001, 0.2, 0.5, 0.77, 0.999])
    with pytest.warns(UserWarning, match="calibration rows"):
        expected = alone.icdf(levels)
    with pytest.warns(UserWarning, match="their groups have too few calibration rows"):
        np.testing.assert_allclose(distribution.icdf(levels)[own], expected, rtol=1000 * EXACT, atol=30 * EXACT)
    # The quartiles that the bins of the density have their shape by differ a little.
    np.testing.assert_allclose(distribution.log_prob(new)[own], alone.log_prob(new[own]), atol=0.25)


def test_whole_weights_are_repeated_rows_of_a_linear_cdf():
    x, base, y, _ = rows_of(30, 0)
    weights = 1 + np.arange(30) % 3
    repeated = np.repeat(np.arange(30), weights)
    fitted = isotonic.fit(x, base, y, weights=weights)(x, base, weights=np.ones(30))
    z = y - np.asarray(base.mean)
    order = np.argsort(z)
    middle = np.cumsum(weights[order]) - weights[order] / 2
    levels = (middle + 0.5) / (weights.sum() + 1)
    np.testing.assert_allclose(fitted.icdf(0.4), base.mean + np.interp(0.4, levels, z[order]), rtol=EXACT, atol=EXACT)
    # The mean of the values at equally many levels for each of the repeated rows.
    again = isotonic.fit(x, Point(base.mean[repeated]), y[repeated])(x, base)
    np.testing.assert_allclose(fitted.mean, again.mean, atol=0.02)
    np.testing.assert_allclose(fitted.std, again.std, rtol=0.03)


def test_the_density_integrates_to_one_and_the_score_is_an_integral_of_the_cdf(linear):
    distribution = linear[-1]
    u = np.linspace(-60, 60, 200_001)
    of_grid = eqx.tree_at(
        lambda d: (d.loc, d.scale, d.group),
        distribution,
        (jnp.full(u.shape, distribution.loc[0]), jnp.full(u.shape, distribution.scale[0]), jnp.zeros(u.shape, int)),
    )
    assert np.trapezoid(np.exp(np.asarray(of_grid.log_prob(u), float)), u) == pytest.approx(1, abs=2e-3)
    of_group = eqx.tree_at(lambda d: d.group, distribution, jnp.zeros_like(distribution.group))
    cdf = np.asarray(of_grid.cdf(u), float)
    for y in (-3.0, 0.21, 9.0):
        expected = np.trapezoid((cdf - (u >= y)) ** 2, u)
        assert float(of_group.crps(y)[0]) == pytest.approx(expected, rel=2e-3)


def test_the_best_pooling_is_that_of_leaving_rows_out():
    rng = np.random.default_rng(0)
    sizes = np.array([1, 4, 9])
    number = np.repeat(np.arange(3, dtype=np.int32), sizes)
    errors, scale = rng.normal(size=14) + number, rng.uniform(1, 2, 14)
    mean_distance = lambda a, p, b, q: (p[:, None] * q[None] * np.abs(a[:, None] - b[None])).sum()

    def score(k):
        total = 0
        for i in range(14):
            others = np.arange(14) != i
            own, every = errors[others & (number == number[i])], errors[others]
            part = k / (k + len(own))
            z = np.concatenate([own, every])
            p = np.concatenate(
                [np.full(len(own), (1 - part) / max(len(own), 1)), np.full(len(every), part / len(every))]
            )
            total += scale[i] * (p @ np.abs(z - errors[i]) - mean_distance(z, p, z, p) / 2)
        return total

    best = min(_pooling.COUNTS, key=score)
    found = _pooling.best(jnp.asarray(errors), jnp.asarray(number), jnp.asarray(sizes), jnp.asarray(scale))
    assert float(found) == best


def test_partial_pooling_lies_between_the_table_of_a_group_and_that_of_all_rows():
    x, base, y, labels = rows_of(40, 0)
    distribution = crude.fit(x, base, y, by=labels, partial_pooling=True)(x, base, by=labels)
    own = crude.fit(x, base, y, by=labels)(x, base, by=labels)
    every = crude.fit(x, base, y)(x, base)
    low, high = np.minimum(own.std, every.std), np.maximum(own.std, every.std)
    assert ((low < distribution.std) & (distribution.std < high)).all()
    with pytest.raises(ValueError, match="partially pooled tables guarantee nothing"):
        crude.fit(x, base, y, by=labels, partial_pooling=True).guarantee(0.9, "loud")
    smooth = isotonic.fit(x, base, y, by=labels, partial_pooling=True)(x, base, by=labels)
    assert (smooth.std > distribution.std).all()  # by its tails
    np.testing.assert_allclose(smooth.mean, distribution.mean, atol=0.1)


def test_labels_by_bins_of_a_column_and_of_the_predicted_std():
    x, base, y, _ = rows_of(100, 0)
    base = Normal(base.mean, 1 + x[:, 1] ** 2)
    by = ColumnBins.of(x, column=1, number=4)
    assert np.bincount(by(x)).tolist() == [25, 25, 25, 25]
    fitted = conformal.fit(x, base, y, by=by)
    given = conformal.fit(None, base, y, by=np.asarray(by(x)))(None, base, by=np.asarray(by(x)))
    upper = eqx.filter_jit(lambda fitted, x, base: fitted(x, base).icdf(0.8))(fitted, jnp.asarray(x), base)
    np.testing.assert_allclose(upper, given.icdf(0.8), rtol=EXACT)
    by = StdBins.of(base, number=2)
    assert (np.asarray(by(base)) == (base.std > np.median(base.std))).all()
    halves = conformal.fit(None, base, y, by=by)
    assert halves.guarantee(0.9, 1).num_calibration == 50
    assert np.unique(np.asarray(halves(None, base).icdf(0.9) - base.mean) / np.asarray(base.std)).size >= 2
    with pytest.raises(ValueError, match="column must be one of 0 to 1; got 2"):
        ColumnBins.of(x, column=2)


@pytest.mark.parametrize(("score", "needed"), [("absolute", 9), ("signed", 19)])
def test_a_small_group_says_how_many_rows_it_needs(score, needed):
    x, base, y, _ = rows_of(60, 0)
    fitted = conformal.fit(x, base, y, score=score, by=np.where(np.arange(60) < 5, "few", "many"))
    with pytest.warns(UserWarning, match=f"the smallest has 5, and {needed} of equal weight are needed"):
        fitted(x[:2], base[:2], by=["few", "many"]).interval(0.9)
