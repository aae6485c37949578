"""Conditional conformal prediction: cutoffs against linear programs, groups that overlap, coverage by simulation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from jaxcal import Normal, Point, Quantiles, out_of_fold
from jaxcal.calibrators import conditional_conformal, conformal
from jaxcal.functional import quantile_regression
from jaxcal.guarantee import ConditionalGuarantee

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
# What does not depend on the precision runs in 64 bits only.
once = pytest.mark.skipif(not X64, reason="does not depend on the precision")
EXACT = 1e-10 if X64 else 3e-5
LEVELS = (0.5, 0.8, 0.9)
FEW = "ignore:in .* rows the quantile is infinite"


# The regression


def dual_of_new_row(rows, scores, score, level):
    """The dual of the last row, with this score, in the regression of all rows: a linear program of its own."""
    values = np.append(scores, score)
    bounds = [(level - 1, level)] * len(values)
    return linprog(-values, A_eq=rows.T, b_eq=np.zeros(rows.shape[1]), bounds=bounds, method="highs").x[-1]


def problem(kind, seed):
    """24 rows and 5 new ones, some of them outlying, with three features, and their level."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(29, 2)) if kind == "continuous" else rng.integers(0, 2, size=(29, 2))
    rows[24:26] *= 5 if kind == "continuous" else 1
    features, scores = np.column_stack([np.ones(29), rows]), np.abs(rng.normal(size=24))
    scores = scores if kind == "continuous" else np.round(2 * scores) / 2
    return features[:24], scores, features[24:], (0.3, 0.5, 0.75, 0.8, 0.9)[seed % 5]


def cutoffs_of(features, scores, new, level, dual):
    features, scores, new = (each.astype(float if X64 else np.float32) for each in (features, scores, new))
    moved = quantile_regression.separated(scores)
    vertex = quantile_regression.solve(features, moved, level, quantile_regression.independent_rows(features))
    arrays = [jnp.asarray(each, features.dtype) for each in (features, scores, moved)]
    dual = jnp.full(len(new), dual, features.dtype)
    return quantile_regression.cutoffs(*arrays, vertex, level, jnp.asarray(new), dual)


@pytest.mark.parametrize("kind", ["continuous", "equal rows and scores"])
@pytest.mark.parametrize("randomized", [False, True])
def test_a_cutoff_is_where_the_dual_of_the_new_row_passes_its_end(kind, randomized):
    """Below it the regression of all rows gives the new row a smaller dual, above it one that is at least as large."""
    met = set()
    for seed in range(20):
        features, scores, new, level = problem(kind, seed)
        dual = np.random.default_rng(seed).uniform(level - 1, level) if randomized else level
        found = cutoffs_of(features, scores, new, level, dual)
        for row, value, outcome in zip(new, *map(np.asarray, found), strict=True):
            met.add(int(outcome))
            rows, solved = np.vstack([features, row]), outcome == quantile_regression.SOLVED
            if outcome != quantile_regression.MINUS_INFINITE:
                assert dual_of_new_row(rows, scores, value - 1e-3 if solved else 1e4, level) < dual - 1e-4
            if outcome != quantile_regression.INFINITE:
                assert dual_of_new_row(rows, scores, value + 1e-3 if solved else -1e4, level) > dual - 1e-7
    assert quantile_regression.SOLVED in met
    assert quantile_regression.FAILED not in met
    assert (quantile_regression.INFINITE in met) or randomized


@once
@pytest.mark.parametrize("kind", ["continuous", "equal rows and scores"])
def test_the_regression_is_that_of_a_linear_program(kind):
    for seed in range(20):
        features, scores, _, level = problem(kind, seed)
        moved = quantile_regression.separated(scores)
        vertex = quantile_regression.solve(features, moved, level, quantile_regression.independent_rows(features))
        residuals = scores - features @ np.linalg.solve(features[vertex.basis], scores[vertex.basis])
        loss = np.maximum(level * residuals, (level - 1) * residuals).sum()
        program = linprog(-scores, A_eq=features.T, b_eq=np.zeros(3), bounds=[(level - 1, level)] * 24)
        np.testing.assert_allclose(loss, -program.fun, rtol=1e-9)


@once
@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_regression_of_many_equal_scores_has_an_optimum(level, dtype):
    # 20,000 scores, moved apart by less than sums of them round.
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 2, size=(20_000, 2)) / 0.49 - 1.03
    features = np.column_stack([np.ones(20_000), groups]).astype(dtype)
    moved = quantile_regression.separated(dtype(50) + rng.integers(0, 2, 20_000).astype(dtype))
    vertex = quantile_regression.solve(features, moved, level, quantile_regression.independent_rows(features))
    basis, duals = np.asarray(vertex.basis), np.where(np.asarray(vertex.side) > 0, level, level - 1)
    duals[basis] = vertex.duals
    assert ((duals >= level - 1) & (duals <= level)).all()
    np.testing.assert_allclose(duals @ features, 0, atol=1e-2 if dtype == np.float32 else 1e-7)
    residuals = moved - features.astype(float) @ np.linalg.solve(features[basis].astype(float), moved[basis])
    assert (np.asarray(vertex.side) * residuals > -1e-12).all()


# The calibrator


def rows_of(n, seed, discrete=False):
    """Inputs with groups that overlap, predictions, targets: the noise depends on both columns."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(n, 2))
    y = x[:, 0] + (1 + (x[:, 0] > 0) + 2 * (x[:, 1] > 0.3)) * rng.normal(size=n)
    return x, Point(np.zeros(n) if discrete else x[:, 0]), np.round(y) if discrete else y


def groups(x):
    return jnp.stack([x[:, 0] > 0, x[:, 1] > 0.3], axis=1)


X, BASE, Y = rows_of(60, 0)
X_NEW, BASE_NEW, _ = rows_of(10, 1)


@pytest.fixture(scope="module")
def fitted():
    return conditional_conformal.fit(X, BASE, Y, features=groups, confidence_levels=LEVELS)


def assert_same_intervals(found, expected, rtol=EXACT):
    for level in LEVELS:
        for end, expected_end in zip(found.interval(level), expected.interval(level), strict=True):
            np.testing.assert_allclose(end, expected_end, rtol=rtol, atol=rtol)


# With rounded targets many scores are equal.
@pytest.mark.parametrize("score", ["absolute", pytest.param("signed", marks=once)])
@pytest.mark.parametrize("discrete", [False, True])
def test_indicators_of_disjoint_groups_give_a_table_for_each_group(score, discrete):
    _, base, y = rows_of(60, 2, discrete)
    number, new = np.arange(60) % 3, np.arange(10) % 3
    fit = conditional_conformal.fit
    by_features = fit(None, base, y, features=np.eye(3)[number], score=score, confidence_levels=LEVELS)
    by_labels = conformal.fit(None, base, y, by=number, score=score)
    found = by_features(None, BASE_NEW, features=np.eye(3)[new])
    assert_same_intervals(found, by_labels(None, BASE_NEW, by=new), 10 * EXACT)


def test_the_constant_alone_gives_split_conformal_prediction():
    """Of 59 rows all ranks, (59 + 1) c, are whole numbers, which rounding must not exceed."""
    base, nothing = Normal(BASE.mean[:59], 1 + X[:59, 0] ** 2), np.zeros(59)
    fitted = conditional_conformal.fit(None, base, Y[:59], features=nothing, confidence_levels=LEVELS)
    assert_same_intervals(fitted(None, base, features=nothing), conformal.fit(None, base, Y[:59])(None, base))
    assert fitted.guarantee(0.9).num_features == 1


@once
def test_what_the_features_are_made_of_does_not_matter(fitted):
    """Combinations, more of them than are independent, other units and origins."""
    matrix = np.array([[1.0, 2.0, 0.0, 3.0], [1.0, -1.0, 2.0, 0.0]])
    mixed = lambda x: 1e4 + groups(x).astype(float) @ matrix
    other = conditional_conformal.fit(X, BASE, Y, features=mixed, confidence_levels=LEVELS)
    assert other.guarantee(0.9) == fitted.guarantee(0.9)
    assert_same_intervals(other(X_NEW, BASE_NEW), fitted(X_NEW, BASE_NEW), 1e-8)


def test_an_end_that_equals_a_target_holds_it():
    """Of equal scores rounding must not leave one out: the interval ends at an integer, or just beyond."""
    x, base, y = rows_of(60, 3, discrete=True)
    fitted = conditional_conformal.fit(x, base, y, features=groups, confidence_levels=LEVELS)
    for level in LEVELS:
        _, upper = fitted(X_NEW, Point(np.zeros(10))).interval(level)
        assert (np.asarray(upper) >= np.round(upper)).all()
        np.testing.assert_allclose(upper, np.round(upper), atol=100 * EXACT)


@once
def test_runs_under_jit_and_over_runs(fitted):
    ends = lambda module, x, base: module(x, base).interval(0.9)
    x = jnp.asarray(X_NEW)
    expected = ends(fitted, x, BASE_NEW)
    np.testing.assert_allclose(eqx.filter_jit(ends)(fitted, x, BASE_NEW), expected, rtol=EXACT)
    other = conditional_conformal.fit(X, BASE, 2 * Y[::-1], features=groups, confidence_levels=LEVELS)
    modules = jax.tree.map(lambda *runs: jnp.stack(runs), fitted, other)
    found = eqx.filter_vmap(ends, in_axes=(0, None, None))(modules, x, BASE_NEW)
    for end, first, second in zip(found, expected, ends(other, x, BASE_NEW), strict=True):
        np.testing.assert_allclose(end, np.stack([first, second]), rtol=EXACT)
    tree = jax.tree.map(lambda a, b: jnp.stack([a, b]), fitted(x, BASE_NEW), other(x, BASE_NEW))
    assert eqx.filter_vmap(lambda d: d.icdf(0.95))(tree).shape == (2, 10)


@once
def test_the_derivative_in_the_inputs_is_that_of_the_regression():
    """The cutoff is linear in the features wherever no row changes place."""
    fitted = conditional_conformal.fit(X, BASE, Y, features=lambda x: x, confidence_levels=(0.9,))
    upper = lambda shift: fitted(jnp.asarray(X_NEW) + shift, BASE_NEW).values[:, 1]
    _, slope = jax.jvp(upper, (0.0,), (1.0,))
    np.testing.assert_allclose(slope, (upper(1e-6) - upper(-1e-6)) / 2e-6, rtol=1e-4)
    total = lambda mean: fitted(jnp.asarray(X_NEW), Point(mean)).mean.sum()
    np.testing.assert_allclose(jax.grad(total)(BASE_NEW.mean), np.ones(10))


@once
def test_intervals_are_infinite_where_too_few_rows_resemble_the_new_one():
    """Of a group of 7 rows at 90 %, and of a group that no row is in; the moments take the last finite cutoff."""
    number, new = np.arange(60) % 3, np.arange(10) % 3
    number[number == 2] = np.where(np.arange(20) < 7, 2, 0)
    indicators = np.column_stack([np.eye(3)[number], np.zeros(60)])
    fitted = conditional_conformal.fit(None, BASE, Y, features=indicators, confidence_levels=LEVELS)
    at_call = np.column_stack([np.eye(3)[new], new == 1])
    distribution = fitted(None, BASE_NEW, features=at_call)
    with pytest.warns(UserWarning, match="in 6 rows the quantile is infinite: too few calibration rows resemble"):
        lower, upper = distribution.interval(0.9)
    np.testing.assert_array_equal(np.isinf(upper), new > 0)
    np.testing.assert_array_equal(np.isinf(lower), new > 0)
    with pytest.warns(UserWarning, match="in 3 rows"):
        distribution.icdf(0.75)
    assert np.isfinite(distribution.std).all()
    largest = np.abs(Y - BASE.mean)[number == 2].max()
    values = distribution.values
    np.testing.assert_allclose(values[:, -1][new == 2], BASE_NEW.mean[new == 2] + largest, rtol=1e-9)


@once
def test_a_randomized_interval_of_a_group_without_rows_is_infinite_as_often_as_its_level():
    """Else it is empty, a point: any score has the dual 0 there."""
    indicators = np.column_stack([np.arange(60) % 2, np.zeros(60)])
    fitted = conditional_conformal.fit(
        None, BASE, Y, features=indicators, confidence_levels=LEVELS, key=jax.random.key(0)
    )
    distribution = fitted(None, Point(np.zeros(2000)), features=np.ones((2000, 2)))
    for level, reached in zip(LEVELS, (0.5, 0.75, 0.9), strict=True):
        infinite = np.asarray(distribution.highest) <= reached
        assert abs(infinite.mean() - level) < 4 * np.sqrt(level * (1 - level) / 2000)
    assert (np.asarray(distribution.values)[np.asarray(distribution.highest) == 1] == 0).all()


@once
def test_intervals_are_nested():
    x = np.random.default_rng(0).normal(size=(60, 3))
    fitted = conditional_conformal.fit(None, BASE, Y, features=x, score="signed", confidence_levels=(0.5, 0.55, 0.6))
    values = fitted(None, BASE, features=3 * x[::-1]).values
    assert (np.diff(values, axis=1) >= 0).all()
    assert (np.diff(values, axis=1) == 0).any()  # some had to be widened


def test_draws_belong_to_rows_and_keys(fitted):
    fit = lambda key: conditional_conformal.fit(X, BASE, Y, features=groups, confidence_levels=LEVELS, key=key)
    randomized = fit(jax.random.key(0))
    ends = lambda module: module(X_NEW, BASE_NEW).values[:, -1]
    np.testing.assert_array_equal(ends(randomized), ends(randomized))
    assert (np.asarray(ends(randomized)) != np.asarray(ends(fit(jax.random.key(1))))).any()
    assert (np.asarray(ends(randomized)) <= np.asarray(ends(fitted)) + EXACT).all()


@once
def test_the_guarantee_says_what_it_rests_on(fitted):
    guarantee = fitted.guarantee(0.9)
    assert guarantee == ConditionalGuarantee(0.9, 60, 3)
    assert guarantee.coverage == 0.9
    assert guarantee.most(0.8) == pytest.approx(0.9 + 3 / (61 * 0.8))
    assert guarantee.most(0.1) == 1.0
    assert guarantee.most() == pytest.approx(0.9 + 3 / 61)
    assert "in every group of rows whose indicator is a combination of the 3 features" in str(guarantee)
    exact = conditional_conformal.fit(
        None, BASE, Y, features=X, score="signed", confidence_levels=(0.9,), key=jax.random.key(0)
    ).guarantee(0.9)
    assert (exact.tails, exact.most(0.1)) == (2, 0.9)
    assert "probability 90 % in every group" in str(exact)
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\]; got 0"):
        guarantee.most(0.0)


def least_squares(x, y, *, key):
    weights = jnp.linalg.lstsq(x, y)[0]
    return lambda x: jnp.asarray(x) @ weights


@once
def test_what_is_missing_or_wrong_is_quoted(fitted):
    fit = conditional_conformal.fit
    with pytest.raises(ValueError, match="score must be one of None, 'absolute', 'scaled', 'signed'; got 'cdf'"):
        fit(X, BASE, Y, features=groups, score="cdf")
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        fit(X, BASE, Y, features=groups, score="scaled")
    with pytest.raises(ValueError, match="x is None, but features is a function of x: give x"):
        fit(None, BASE, Y, features=groups)
    with pytest.raises(ValueError, match="features has 59 rows where 60 are expected"):
        fit(X, BASE, Y, features=X[:59])
    with pytest.raises(ValueError, match=r"60 rows are too few for confidence level 0\.99: at least 99 are needed"):
        fit(X, BASE, Y, features=groups, confidence_levels=(0.99,))
    with pytest.raises(ValueError, match=r"confidence_levels must lie between 0 and 1; got 90: did you mean 0\.9\?"):
        fit(X, BASE, Y, features=groups, confidence_levels=(90.0,))
    with pytest.raises(TypeError, match="an argument is traced, but a regression runs by its values"):
        jax.jit(lambda y: fit(X, BASE, y, features=X, confidence_levels=LEVELS))(Y)
    by_array = fit(None, BASE, Y, features=X, confidence_levels=LEVELS)
    by_inputs = fit(X, BASE, Y, confidence_levels=LEVELS)  # the features are the columns of x
    np.testing.assert_array_equal(by_inputs(X_NEW, BASE_NEW).mean, by_array(None, BASE_NEW, features=X_NEW).mean)
    with pytest.raises(ValueError, match="fitted with an array of features: give features= for these rows"):
        by_array(X_NEW, BASE_NEW)
    with pytest.raises(ValueError, match="features has 1 columns; the calibrator was fitted with 2"):
        by_array(None, BASE_NEW, features=X_NEW[:, 0])
    with pytest.raises(ValueError, match=r"confidence_level must be one of 0\.5, 0\.8, 0\.9; got 0\.7"):
        fitted.guarantee(0.7)
    predicted = out_of_fold(least_squares, X, Y, key=jax.random.key(0), folds=3)
    with pytest.raises(ValueError, match="the errors are out of fold"):
        fit(X, predicted, Y, features=groups, confidence_levels=LEVELS).guarantee(0.9)


@once
def test_a_path_that_was_not_solved_is_infinite_and_said_so(fitted):
    """A basis whose inverse is wrong, as rounding might make it."""
    broken = eqx.tree_at(
        lambda module: module.regressions.vertices.inverse, fitted, replace_fn=lambda inverse: 3 * inverse
    )
    with pytest.warns(UserWarning, match="in 10 rows the interval is infinite: the regression could not be solved"):
        distribution = broken(X_NEW, BASE_NEW)
    assert (np.asarray(distribution.highest) < 1).all()


# The distribution


@once
@pytest.mark.filterwarnings(FEW)
def test_partial_quantiles_are_quantiles_but_for_the_infinite_ones():
    levels, values = np.array([0.1, 0.3, 0.7, 0.9]), np.array([[-2.0, -1.0, 1.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    known = Quantiles(levels, values)
    partial = Quantiles(levels, values, lowest=np.array([0.3, 0.0]), highest=np.array([1.0, 0.7]))
    y, key = np.array([0.3, 2.2]), jax.random.key(0)
    for name in ("mean", "std"):
        np.testing.assert_array_equal(getattr(partial, name), getattr(known, name))
    for name in ("cdf", "crps", "log_prob"):
        np.testing.assert_array_equal(getattr(partial, name)(y), getattr(known, name)(y))
    np.testing.assert_array_equal(partial.sample(key, (5,)), known.sample(key, (5,)))
    lower, upper = partial.interval(0.8)
    np.testing.assert_array_equal(lower, [-np.inf, 0.0])
    np.testing.assert_array_equal(upper, [3.0, np.inf])
    found, p = partial.icdf(np.array([0.2, 0.3, 0.5, 0.7, 0.8])), [0.2, 0.3, 0.5, 0.7, 0.8]
    expected = np.array(known.icdf(np.array(p)))
    expected[0, 0], expected[1, 4] = -np.inf, np.inf
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="highest must lie between 0 and 1"):
        Quantiles(levels, values, highest=2.0)


# Coverage


@pytest.mark.slow
@pytest.mark.filterwarnings(FEW)
@pytest.mark.parametrize("randomized", [False, True])
def test_coverage_holds_in_groups_that_overlap(randomized):
    """Randomized exactly; else at least, and at most by what `most` says. Split conformal prediction covers neither."""
    covered, members = [], []
    for seed in range(1500):
        (x, base, y), (new_x, new_base, new_y) = rows_of(60, 2 * seed), rows_of(10, 2 * seed + 1)
        key = jax.random.key(seed) if randomized else None
        fitted = conditional_conformal.fit(x, base, y, features=groups, confidence_levels=LEVELS, key=key)
        lower, upper = fitted(new_x, new_base).interval(0.8)
        covered.append((lower <= new_y) & (new_y <= upper))
        members.append(np.column_stack([np.ones(10), groups(new_x)]))
    covered, members = np.concatenate(covered), np.concatenate(members).astype(bool)
    for group in members.T:
        rate, share = covered[group].mean(), group.mean()
        error = 3 * np.sqrt(0.16 / group.sum() * 4)  # rows of one run depend on each other
        guarantee = ConditionalGuarantee(0.8, 60, 3, randomized)
        assert guarantee.coverage - error < rate < guarantee.most(share) + error
        if randomized:
            assert abs(rate - 0.8) < error
