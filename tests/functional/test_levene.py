"""The search for the best split against scipy, plain loops and simulation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from compiled import compilations
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcal as jc
from jaxcal.functional import levene, multiplicity, normal, student_t

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
# Relative errors of T^2 where it is of the order of 1.
EXACT = 1e-8 if X64 else 2e-4
CENTERS = ("mean", "median")


def plain_statistic(left, right, center):
    """T of eq. 5 as the paper has it."""
    z = [np.abs(group - getattr(np, center)(group)) for group in (left, right)]
    n, m = len(left), len(right)
    pooled = (((z[0] - z[0].mean()) ** 2).sum() + ((z[1] - z[1].mean()) ** 2).sum()) / (n + m - 2)
    return (z[0].mean() - z[1].mean()) / np.sqrt(pooled * (1 / n + 1 / m))


def plain_search(x, residuals, min_leaf, center, step=1):
    """|T| of every admissible split, by loops: {(feature, threshold): |T|}."""
    found, n = {}, len(residuals)
    for feature, column in enumerate(x.T):
        order = np.argsort(column, kind="stable")
        for left in range(min_leaf, n - min_leaf + 1, step):
            if column[order[left - 1]] < column[order[left]]:
                groups = residuals[order[:left]], residuals[order[left:]]
                found[feature, column[order[left - 1]]] = abs(plain_statistic(*groups, center))
    return found


def t_of_3(key, shape):
    return jax.random.t(key, 3, shape)


def rough(rng, rows, features=3):
    """Features with many ties, few and none; residuals with ties, whose spread depends on the second feature."""
    x = np.column_stack([rng.integers(0, 4, rows), rng.integers(0, 20, rows), *rng.normal(size=(features - 2, rows))])
    return x, np.round(rng.normal(size=rows) * (1 + (x[:, 1] > 9)), 1)


@pytest.mark.parametrize("center", CENTERS)
def test_every_split_is_as_in_scipy(center, rng):
    n = 64
    distribution = {
        "normal": rng.normal(size=n),
        "ties": rng.integers(-3, 4, n),
        "shifted": 100 + rng.exponential(size=n),
    }
    for residuals in distribution.values():
        expected = [scipy.stats.levene(residuals[:i], residuals[i:], center=center)[0] for i in range(2, n - 1)]
        found = np.asarray(levene.split_statistics(residuals.astype(float), center=center))
        # float32 cannot tell apart what a shift of 100 has rounded away.
        shift = 1 if X64 or residuals.mean() < 50 else 20
        np.testing.assert_allclose(found[1:-1] ** 2, expected, rtol=shift * EXACT, atol=shift * EXACT)


@pytest.mark.parametrize("center", CENTERS)
def test_statistic_of_two_groups(center, rng):
    left, right = rng.normal(size=30), np.round(3 * rng.normal(size=41), 1)
    expected = scipy.stats.levene(left, right, center=center)[0]
    found = levene.statistic(left, right, center=center)
    assert found < 0  # the right one spreads more
    np.testing.assert_allclose(found**2, expected, rtol=EXACT)
    slopes = jax.grad(lambda e: levene.statistic(e, jnp.zeros(3), center=center))(jnp.zeros(4))
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("center", CENTERS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**9), min_leaf=st.integers(1, 22))
def test_winner_is_that_of_all_splits(center, seed, min_leaf):
    x, residuals = rough(np.random.default_rng(seed), 40)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = plain_search(x, residuals, min_leaf, center)
    # Where all |e - center| of both sides are equal there is no T.
    expected = {split: size for split, size in expected.items() if np.isfinite(size)}
    split = levene.best_split(x, residuals, min_leaf=min_leaf, center=center)
    assert bool(split.exists) == (bool(expected) and max(expected.values()) > 0)
    if split.exists:
        np.testing.assert_allclose(split.statistic, max(expected.values()), rtol=EXACT)
        feature, threshold = int(split.feature), float(split.threshold)
        size = next(s for (f, t), s in expected.items() if f == feature and np.isclose(t, threshold, atol=1e-6))
        np.testing.assert_allclose(size, max(expected.values()), rtol=EXACT)
        num_left = (x[:, feature] <= threshold + 1e-6).sum()
        assert int(split.num_left) == num_left
        assert min_leaf <= num_left <= 40 - min_leaf
    counts = [sum(f == feature for f, _ in plain_search(x, np.arange(40.0), min_leaf, "mean")) for feature in range(3)]
    np.testing.assert_allclose(np.exp(split.log_num_splits), counts, rtol=1e-5)


def test_a_step_visits_as_the_paper_does(rng):
    x, residuals = rough(rng, 40)
    expected = plain_search(x, residuals, 4, "mean", step=3)
    split = levene.best_split(x, residuals, min_leaf=4, center="mean", step=3)
    np.testing.assert_allclose(split.statistic, max(expected.values()), rtol=EXACT)


def three_nodes(rng):
    """Three nodes of 40 rows, with residuals of very different sizes, and as many rows of none, in random order."""
    x, residuals = rough(rng, 160)
    residuals *= np.repeat([1.0, 1e-3, 1e4, 1e6], 40)
    nodes, rows = np.repeat([1, 0, 2, -1], 40), rng.permutation(160)
    return x[rows], (residuals + 50 * nodes)[rows], nodes[rows]


def assert_same_split(found, expected):
    for name in ("feature", "threshold", "num_left", "num_rows"):
        assert getattr(found, name) == getattr(expected, name)
    np.testing.assert_allclose(found.statistic, expected.statistic, rtol=10 * EXACT)
    np.testing.assert_allclose(found.log_p, expected.log_p, rtol=100 * EXACT)
    np.testing.assert_allclose(found.log_num_splits, expected.log_num_splits, rtol=1e-6)


@pytest.mark.parametrize("center", CENTERS)
def test_nodes_together_are_as_each_alone(center, rng):
    x, residuals, nodes = three_nodes(rng)
    options = {"min_leaf": 5, "center": center}
    splits = levene.best_splits(x, residuals, nodes, num_nodes=3, orders=levene.feature_orders(x), **options)
    for node in range(3):
        alone = levene.best_split(x[nodes == node], residuals[nodes == node], **options)
        assert_same_split(jax.tree.map(lambda part, node=node: part[node], splits), alone)


def test_masks_in_a_vmap(rng):
    x, residuals, nodes = three_nodes(rng)
    search = lambda mask: levene.best_splits(x, residuals, mask - 1, num_nodes=1, min_leaf=5)
    splits = jax.vmap(search)((nodes == np.arange(3)[:, None]).astype(int))
    for node in range(3):
        alone = levene.best_split(x[nodes == node], residuals[nodes == node], min_leaf=5)
        assert_same_split(jax.tree.map(lambda part, node=node: part[node, 0], splits), alone)


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize(
    ("x", "residuals", "min_leaf"),
    [
        (np.arange(40.0), np.full(40, 0.1), 1),
        (np.ones(40), np.sin(np.arange(40)), 1),
        (np.arange(40.0), np.sin(np.arange(40)), 21),
        (np.repeat([0.0, 1.0], [4, 36]), np.sin(np.arange(40)), 5),
    ],
    ids=["constant residuals", "constant feature", "too few rows", "too few on one side"],
)
def test_nothing_to_split(center, x, residuals, min_leaf):
    x = np.column_stack([x, x, x])
    split = levene.best_split(x, residuals, min_leaf=min_leaf, center=center)
    assert not split.exists
    assert (int(split.feature), int(split.num_left), float(split.statistic), float(split.log_p)) == (-1, 0, 0.0, 0.0)
    assert np.isposinf(split.threshold)
    bound = multiplicity.miller_siegmund(split.statistic, split.num_rows, split.log_num_splits, min_leaf=min_leaf)
    assert float(bound) == 0.0


def test_groups_without_spread_of_their_deviations():
    """The deviations are 1 on the left and 2 on the right, without any variance: T is large, and not infinite."""
    residuals = np.tile([1.0, -1.0], 20) * np.repeat([1, 2], 20)
    split = levene.best_split(np.tile(np.arange(40.0)[:, None], 3), residuals, min_leaf=2)
    assert int(split.num_left) == 20
    assert np.isfinite(split.statistic)
    assert split.log_p < -100


@pytest.mark.slow
@pytest.mark.skipif(not X64, reason="needs x64")
@pytest.mark.parametrize("center", CENTERS)
def test_float32_picks_the_same_split_on_protein(center):
    data = jc.datasets.load("protein")
    x, y = data.x[:36584], data.y[:36584]
    design = np.column_stack([np.ones(len(y)), x])
    # A shift by a hundred stds, which float32 has no digits to spare for.
    residuals = 500 + y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    exact = levene.best_split(x, residuals, min_leaf=3658, center=center)
    split = levene.best_split(x.astype("float32"), residuals.astype("float32"), min_leaf=3658, center=center)
    assert split.statistic.dtype == split.threshold.dtype == split.log_p.dtype == "float32"
    assert (int(split.feature), int(split.num_left)) == (int(exact.feature), int(exact.num_left))
    np.testing.assert_allclose(split.statistic, exact.statistic, rtol=1e-4)


def test_log_p_value_far_out():
    size, df = np.array([0.0, 0.5, 5.0, 30.0, 60.0]), 5000
    density = lambda t, far: np.exp(scipy.stats.t.logpdf(t, df) - scipy.stats.t.logpdf(far, df))
    tails = [scipy.integrate.quad(density, far, far + 20, args=(far,), epsabs=0, epsrel=1e-12)[0] for far in size]
    expected = np.log(2) + np.log(tails) + scipy.stats.t.logpdf(size, df)
    np.testing.assert_allclose(levene.log_p_value(-size, df + 2), expected, rtol=1e-9 if X64 else 1e-5, atol=1e-6)
    slope = jax.grad(levene.log_p_value)(60.0, df + 2)
    hazard = np.exp(scipy.stats.t.logpdf(60, df) - expected[-1] + np.log(2))
    np.testing.assert_allclose(slope, -hazard, rtol=1e-4)


def test_miller_siegmund():
    b, odds = 4.19, 9.0
    path = scipy.stats.norm.pdf(b) * (4 / b + 2 * (b - 1 / b) * np.log(odds))
    many = np.full(9, np.log(1e9))
    found = np.exp(multiplicity.miller_siegmund(b, 10**7, many, min_leaf=10**6))
    np.testing.assert_allclose(found, 9 * path, rtol=1e-3)
    # Few splits, or categories: Bonferroni. Features without splits do not count.
    p = 2 * scipy.stats.t.sf(b, 1998)
    mixed = np.array([np.log(2), -np.inf, np.log(511)])
    found = np.exp(multiplicity.miller_siegmund(b, 2000, mixed, min_leaf=200, ordered=np.array([True, True, False])))
    np.testing.assert_allclose(found, 513 * p, rtol=1e-4)
    # The inverse; of one split the quantile of Student's t.
    splits = np.full(9, 7.0)
    quantile = multiplicity.miller_siegmund_quantile(np.log(0.05), 2000, splits, min_leaf=200)
    np.testing.assert_allclose(multiplicity.miller_siegmund(quantile, 2000, splits, min_leaf=200), np.log(0.05), 1e-3)
    alone = multiplicity.miller_siegmund_quantile(np.log(0.05), 50, np.zeros(1), min_leaf=5, ordered=np.array([False]))
    np.testing.assert_allclose(alone, scipy.stats.t.isf(0.025, 48), rtol=1e-4)
    # A bound above 1 says nothing.
    assert float(multiplicity.miller_siegmund(0.5, 2000, many, min_leaf=200)) == 0.0


@pytest.mark.slow
def test_permutations(rng):
    x = rng.normal(size=(60, 2))
    find = jax.jit(
        jax.vmap(lambda e, key: multiplicity.permutation_log_p(x, e, key=key, min_leaf=6, num_permutations=19)[0])
    )
    keys = jax.random.split(jax.random.key(0), 400)
    noise = find(rng.exponential(size=(400, 60)), keys)
    # By chance p <= q with probability q, here within four standard errors.
    for q in (0.05, 0.25, 0.5):
        assert abs((np.exp(noise) <= q + 1e-6).mean() - q) < 4 * np.sqrt(q * (1 - q) / 400)
    signal = find(rng.normal(size=(400, 60)) * np.where(x[:, 1] > 0, 5, 1), keys)
    assert (np.exp(signal) < 0.051).mean() > 0.9
    # Two nodes, of which one has a signal and one has no admissible split.
    nodes = np.where(np.arange(60) < 50, 1, 0)
    residuals = rng.normal(size=60) * np.where(x[:, 1] > 0, 9, 1)
    found = multiplicity.permutation_log_p(
        x, residuals, nodes, key=jax.random.key(1), num_nodes=2, min_leaf=6, num_permutations=19
    )
    np.testing.assert_allclose(np.exp(found), [1, 0.05], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("center", CENTERS)
def test_best_subset_is_that_of_all_partitions(center, rng):
    for min_leaf in (1, 12):
        categories = rng.integers(0, 5, 60)
        categories[categories == 3] = 6  # a category without rows, and one beyond
        counted = categories < 6
        residuals = np.round(rng.normal(size=60) * (1 + categories % 3), 1)
        subset = levene.best_subset(
            np.where(counted, categories, -1), residuals, num_categories=6, min_leaf=min_leaf, center=center
        )
        sizes = []
        for number in range(1, 4):
            for left in itertools.combinations((1, 2, 4), number):
                is_left = np.isin(categories[counted], left)
                if min_leaf <= is_left.sum() <= counted.sum() - min_leaf:
                    kept = residuals[counted]
                    sizes.append(abs(plain_statistic(kept[is_left], kept[~is_left], center)))
        np.testing.assert_allclose(subset.statistic, max(sizes), rtol=EXACT)
        np.testing.assert_allclose(np.exp(subset.log_num_splits), len(sizes), rtol=1e-5)
        is_left = np.asarray(subset.left)[np.where(counted, categories, 0)] & counted
        found = plain_statistic(residuals[is_left], residuals[counted & ~is_left], center)
        np.testing.assert_allclose(subset.statistic, abs(found), rtol=EXACT)
        assert int(subset.num_left) == is_left.sum()
        assert int(subset.num_rows) == counted.sum()
        assert not subset.left[3]


def test_the_best_of_12_categories_is_that_of_all_partitions():
    """Cuts of an order of the categories miss it here."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(10):
        categories, residuals = rng.integers(0, 12, 40), rng.normal(size=40)
        present = np.unique(categories)
        sides = np.array(list(itertools.product([False, True], repeat=len(present) - 1)))[1:]
        lefts = np.pad(sides, ((0, 0), (1, 0)))[:, np.searchsorted(present, categories)]
        lefts = lefts[(lefts.sum(1) >= 4) & (lefts.sum(1) <= 36)]
        sizes = [abs(plain_statistic(residuals[left], residuals[~left], "median")) for left in lefts]
        subset = levene.best_subset(categories, residuals, num_categories=12, min_leaf=4)
        np.testing.assert_allclose(subset.statistic, max(sizes), rtol=EXACT)
        cuts = levene.best_subset(categories, residuals, num_categories=17, min_leaf=4)
        missed += float(cuts.statistic) < 0.999 * max(sizes)
    assert missed


def test_std_ratio_of_two_sides(rng):
    left, right = rng.exponential(size=50), 3 * rng.exponential(size=30)
    order = rng.permutation(90)
    residuals = np.concatenate([left, right, np.full(10, 99.0)])[order]
    sides = np.repeat([0, 1, -1], [50, 30, 10])[order]
    ratio, low, high = levene.std_ratio(residuals, sides, 1.96)
    np.testing.assert_allclose(ratio, right.std(ddof=1) / left.std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(low * high, ratio**2, rtol=1e-5)
    trimmed = [scipy.stats.trim_mean(part, 1 / (2 * np.sqrt(len(part) - 4))) for part in (left, right)]
    fourth = sum((((z - c) / z.std()) ** 4).sum() for z, c in zip((left, right), trimmed, strict=True))
    variance = sum((fourth / 80 - (n - 3) / n) / (4 * (n - 1)) for n in (50, 30))
    np.testing.assert_allclose(np.log(high / ratio), 1.96 * np.sqrt(variance), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
@pytest.mark.parametrize(
    ("fun", "number"),
    [
        (lambda t: levene.log_p_value(t, 12), 3),
        (lambda t: student_t.log_sf(t, 5.0), 3),
        (lambda t: student_t.log_sf(t, t + 3), 3),
        (lambda t: student_t.cdf(t, 5.0), 3),
        (lambda t: student_t.icdf(t / 10, 5.0), 3),
        (lambda t: student_t.log_prob(1.0, 5.0, t, 2), 3),
        (lambda t: student_t.crps(t, 5, 0.0, t), 3),
        (lambda t: normal.log_prob(t, 0, 1), 3),
        (lambda t: normal.crps(1.0, t, 2), 3),
        (lambda t: multiplicity.miller_siegmund(t, np.full(3, 2000), jnp.full((3, 2), 7.0), min_leaf=200), 3),
        (lambda t: levene.std_ratio(t, np.array([0, 0, 1, 1, 2]), 1.96), 5),
        (lambda t: levene.std_ratio(t, np.zeros(5, int), 1.96), 5),
    ],
)
def test_known_and_traced_arguments_give_the_same(fun, number, dtype):
    t = jnp.asarray(np.array([3, 1, 2, 5, 9])[:number].astype(dtype))
    for found, expected in zip(jax.tree.leaves(fun(t)), jax.tree.leaves(jax.jit(fun)(t)), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "least"),
    [(jax.random.normal, 0.935), (jax.random.laplace, 0.91), (jax.random.exponential, 0.91), (t_of_3, 0.86)],
    ids=["normal", "laplace", "exponential", "t3"],
)
@pytest.mark.parametrize("sizes", [(60, 540), (100, 100), (200, 1800)])
def test_intervals_of_std_ratios_cover(draw, least, sizes):
    """Of 2000 problems: at nominal 95 %, and where they allow for a search, as of 4.2 standard errors."""
    sides = jnp.repeat(jnp.arange(2), jnp.array(sizes), total_repeat_length=sum(sizes))
    residuals = draw(jax.random.key(0), (2000, sum(sizes))) * jnp.where(sides == 0, 1, 2)[None]
    for critical_value, fraction in ((1.96, least), (4.2, 0.99)):
        _, low, high = jax.lax.map(lambda e, c=critical_value: levene.std_ratio(e, sides, c), residuals)
        assert ((low <= 2) & (high >= 2)).mean() >= fraction


def test_cuts_of_many_categories(rng):
    categories = rng.integers(0, 30, 900)
    categories[categories == 7] = 8
    residuals = rng.normal(size=900) * np.where(categories % 2 == 0, 3, 1)
    subset = levene.best_subset(categories, residuals, num_categories=30, min_leaf=50)
    expected = np.where(np.isin(np.arange(30), categories), np.arange(30) % 2 == 1, False)
    np.testing.assert_array_equal(subset.left, expected)
    is_left = expected[categories]
    found = scipy.stats.levene(residuals[is_left], residuals[~is_left])[0]
    np.testing.assert_allclose(subset.statistic**2, found, rtol=10 * EXACT)
    np.testing.assert_allclose(subset.log_num_splits, np.log(2.0**28 - 1), rtol=1e-6)


def test_a_fixed_center_needs_the_cuts_of_an_order_only(rng):
    """What `best_subset` relies on: the variance between two groups is largest at a cut of their means."""
    for _ in range(50):
        sizes, means = rng.integers(1, 30, 7), rng.exponential(size=7)
        grand = (sizes * means).sum() / sizes.sum()
        masks = np.array(list(itertools.product([False, True], repeat=7)))[1:-1]
        between = (masks @ (sizes * (means - grand))) ** 2 / (masks @ sizes) / (sizes.sum() - masks @ sizes)
        cuts = np.array([means <= cut for cut in np.sort(means)[:-1]])
        of_cuts = (cuts @ (sizes * (means - grand))) ** 2 / (cuts @ sizes) / (sizes.sum() - cuts @ sizes)
        np.testing.assert_allclose(of_cuts.max(), between.max(), rtol=1e-9)


@pytest.mark.parametrize("center", CENTERS)
def test_numpy_finds_what_the_program_finds(rng, center, monkeypatch):
    x, residuals = rough(rng, 400)
    nodes = rng.integers(-1, 3, 400)
    options = {"num_nodes": 4, "min_leaf": 20, "center": center}
    by_numpy = levene.best_splits(x, residuals, nodes, **options)
    monkeypatch.setattr(levene, "_FEW_ROWS", 0)
    by_program = levene.best_splits(x, residuals, nodes, **options)
    for name, found, expected in zip(levene.LeveneSplit._fields, by_numpy, by_program, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=EXACT, atol=1e-4 * EXACT, err_msg=name)


def test_a_second_search_compiles_nothing(rng, monkeypatch):
    x, residuals = rough(rng, 40)
    with compilations() as compiled:
        levene.best_split(x, residuals, min_leaf=3)
    assert not compiled
    monkeypatch.setattr(levene, "_FEW_ROWS", 0)
    levene.best_split(x, residuals, min_leaf=3)
    with compilations() as compiled:
        levene.best_split(x[::-1].copy(), residuals, min_leaf=7)
    assert not compiled


def test_wrong_input(rng):
    x, residuals = rough(rng, 40)
    with pytest.raises(ValueError, match="residuals has 39 rows where 40 are expected"):
        levene.best_split(x, residuals[:-1], min_leaf=3)
    with pytest.raises(ValueError, match="min_leaf must be at least 1; got 0"):
        levene.best_split(x, residuals, min_leaf=0)
    with pytest.raises(ValueError, match="NaN"):
        levene.best_split(np.where(x == x[0, 0], np.nan, x), residuals, min_leaf=3)
    with pytest.raises(ValueError, match=r"orders must have shape \(d, n\) = \(3, 40\); got \(40, 3\)"):
        levene.best_split(x, residuals, min_leaf=3, orders=np.argsort(x, 0))


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["normal", "t3", "exponential"])
def test_pure_noise_is_not_split(distribution):
    """At significance 0.01 the default rule splits homoscedastic noise in at most 2 of 100 cases."""
    rng = np.random.default_rng(0)
    draw = {"normal": rng.normal, "t3": lambda size: rng.standard_t(3, size), "exponential": rng.exponential}[
        distribution
    ]
    find = jax.jit(lambda x, e: levene.best_split(x, e, min_leaf=200))
    splits = 0
    for _ in range(1000):
        split = find(rng.normal(size=(2000, 9)), draw(size=2000))
        bound = multiplicity.miller_siegmund(split.statistic, 2000, split.log_num_splits, min_leaf=200)
        splits += float(bound) <= np.log(0.01)
    assert splits <= 20
