"""NGBoost and forests: against the package itself, a loop over leaves and new rows, and their answers to bad input."""

import pickle
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Normal, conformal, cross_conformal, isotonic, metrics
from jaxcal.predictors import forests
from jaxcal.predictors._quantile_forest import Shape

pytestmark = pytest.mark.contract_in_32_bits

pytest.importorskip("sklearn", reason="scikit-learn is of the extra forests")
KEY = jax.random.key(0)


def rows(seed, n=200):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    return x, 5 + np.sin(2 * x[:, 0]) + np.where(x[:, 1] > 0, 0.6, 0.1) * rng.normal(size=n)


X, Y = rows(0)
NEW, NEW_Y = rows(1)


@pytest.fixture(scope="module", params=["random_forest", "extra_trees"])
def forest(request):
    return forests.fit(X, Y, key=KEY, model=request.param, num_trees=40, preset="usnrt")


@pytest.fixture
def ngboost():
    return pytest.importorskip("ngboost", reason="NGBoost is of the extra forests")


def test_distribution_of_a_forest_is_that_of_the_rows_in_its_leaves(forest):
    distribution = forest(NEW[:20])
    bootstraps = forest.trees.estimators_samples_ if forest.model == "random_forest" else [np.arange(200)] * 40
    for i, point in enumerate(NEW[:20]):
        targets, weights = [], []
        for tree, bootstrap in zip(forest.trees.estimators_, bootstraps, strict=True):
            together = bootstrap[tree.apply(X[bootstrap]) == tree.apply(point[None])]
            targets.append(Y[together])
            weights.append(np.full(len(together), 1 / len(together)))
        targets, weights = np.concatenate(targets), np.concatenate(weights)
        mean = np.average(targets, weights=weights)
        std = np.sqrt(np.average((targets - mean) ** 2, weights=weights))
        np.testing.assert_allclose(distribution.mean[i], mean, rtol=1e-5)
        np.testing.assert_allclose(distribution.std[i], std, rtol=1e-5)


@pytest.fixture(scope="module")
def bagged():
    return forests.fit(X, Y, key=KEY, model="random_forest", num_trees=60, preset="usnrt")


@pytest.fixture(scope="module")
def whole():
    return forests.fit(X, Y, key=KEY, model="random_forest", num_trees=60)


@pytest.fixture(scope="module")
def whole_of_extra_trees():
    return forests.fit(X, Y, key=KEY, model="extra_trees", num_trees=60)


def of_equal_slices(forest):
    """A forest whose slices count equally and are not widened."""
    shape = Shape(np.append(np.full(20, 1 / 20), 0.0), 0.0)
    return replace(forest, distribution=replace(forest.distribution, shape=shape))


def test_equal_slices_have_the_moments_of_the_rows_in_the_leaves(whole, whole_of_extra_trees):
    for forest in (whole, whole_of_extra_trees):
        mixture, moments = of_equal_slices(forest)(NEW), replace(forest, distribution=None)(NEW)
        np.testing.assert_allclose(mixture.mean, moments.mean, rtol=1e-5)
        np.testing.assert_allclose(mixture.std, moments.std, rtol=1e-3)
    mixture, moments = of_equal_slices(whole).out_of_bag(X), replace(whole, distribution=None).out_of_bag(X)
    np.testing.assert_allclose(mixture.mean, moments.mean, rtol=1e-5)
    np.testing.assert_allclose(mixture.std, moments.std, rtol=1e-3)


def test_what_is_said_of_a_row_depends_on_no_other_row(whole):
    """Not in the last digit: else the errors of calibration rows and of new ones are not exchangeable."""
    many, few = whole(np.concatenate([NEW, NEW[:50]])).components, whole(NEW[:7]).components
    for of_many, of_few in ((many.mean, few.mean), (many.std, few.std)):
        np.testing.assert_array_equal(of_many[:, len(NEW) :], of_many[:, :50])
        np.testing.assert_array_equal(of_many[:, :7], of_few)


def test_slices_are_the_means_of_pieces_of_the_quantile_function(whole):
    """Of the targets in the leaves of a row, one by one, and at 40,000 levels."""
    components = of_equal_slices(whole)(NEW[:5]).components
    fine = (np.arange(40_000) + 0.5) / 40_000
    for i, point in enumerate(NEW[:5]):
        targets, weights = [], []
        for tree, sample in zip(whole.trees.estimators_, whole.trees.estimators_samples_, strict=True):
            together = sample[tree.apply(X[sample]) == tree.apply(point[None])]
            targets.append(Y[together])
            weights.append(np.full(len(together), 1 / 60 / len(together)))
        targets, weights = np.concatenate(targets), np.concatenate(weights)
        order = np.argsort(targets)
        level = np.cumsum(weights[order])
        quantiles = targets[order][np.searchsorted(level, fine).clip(0, len(order) - 1)].reshape(20, 2000)
        np.testing.assert_allclose(components.mean[:20, i], quantiles.mean(axis=1), atol=2e-3)
        np.testing.assert_allclose(components.std[:20, i], quantiles.std(axis=1), atol=2e-2)


@pytest.mark.parametrize("name", ["whole", "whole_of_extra_trees"])
def test_the_whole_distribution_holds_on_new_rows(name, request):
    """It scores better than the normal distribution with the moments of the leaves, which is not calibrated."""
    forest = request.getfixturevalue(name)
    x, y = rows(2, 2000)
    distribution, moments = forest(x), replace(forest, distribution=None)(x)
    assert 0.86 < metrics.coverage(y, distribution) < 0.95
    assert 0.43 < metrics.coverage(y, distribution, confidence_level=0.5) < 0.62
    assert metrics.crps(y, distribution) < metrics.crps(y, moments)
    assert metrics.nlpd(y, distribution) < metrics.nlpd(y, moments)
    assert metrics.rmse(y, distribution) < 1.03 * metrics.rmse(y, moments)


@pytest.mark.parametrize("model", ["random_forest", "extra_trees"])
def test_a_leaf_of_one_target_has_a_density(model, rng):
    """One target in every leaf: the distribution of the leaves is a point, and an error costs infinitely much."""
    x = np.repeat(np.arange(40.0), 25)
    y = np.repeat(rng.normal(size=40), 25)
    forest = forests.fit(x, y, key=KEY, model=model, num_trees=20, min_leaf_rows=1)
    distribution = forest(np.arange(40.0))
    assert np.isfinite(distribution.log_prob(1000.0)).all()
    assert metrics.nlpd(y[::25], distribution) < metrics.nlpd(y, np_normal(y)) - 2


def np_normal(y):
    return Normal(np.full(len(y), y.mean()), y.std())


@pytest.mark.slow
def test_out_of_bag_distributions_calibrate_without_a_second_set(whole):
    base = whole.out_of_bag(X)
    assert base.is_out_of_fold
    assert 0.86 < metrics.coverage(Y, base) < 0.94
    x, y = rows(2, 2000)
    calibrated = isotonic.fit(None, base, Y)(None, whole(x))
    assert 0.86 < metrics.coverage(y, calibrated) < 0.95
    assert metrics.crps(y, calibrated) < 1.05 * metrics.crps(y, whole(x))


def test_extra_trees_are_grown_on_all_rows(whole_of_extra_trees):
    before = forests.fit(X, Y, key=KEY, model="extra_trees", num_trees=60, preset="usnrt")
    np.testing.assert_array_equal(whole_of_extra_trees.tree_means(NEW), before.tree_means(NEW))


def test_trees_that_are_there_already_get_the_same_distribution(whole):
    target = np.asarray(whole.y_scaler(jnp.asarray(Y)), float)
    mine, levels = forests.of_trees(whole.trees, X, target), jnp.array([0.1, 0.5, 0.9])
    scale, loc = float(whole.y_scaler.scale), float(whole.y_scaler.loc)
    np.testing.assert_allclose(loc + scale * mine(NEW).icdf(levels), whole(NEW).icdf(levels), rtol=1e-4)
    np.testing.assert_allclose(loc + scale * mine.tree_means(NEW), whole.tree_means(NEW), rtol=1e-5)
    with pytest.raises(ValueError, match="y must be the targets that the forest was fitted to"):
        forests.of_trees(whole.trees, X, target[::-1])
    extra = forests.fit(X, Y, key=KEY, model="extra_trees", num_trees=2, preset="usnrt").trees
    with pytest.raises(ValueError, match="trees must be a forest with bootstrap=True"):
        forests.of_trees(extra, X, target)


@pytest.mark.parametrize("model", ["random_forest", "extra_trees"])
def test_few_trees_and_few_rows_have_a_distribution(model):
    distribution = forests.fit(X[:12], Y[:12], key=KEY, model=model, num_trees=2)(NEW)
    assert np.isfinite(distribution.log_prob(NEW_Y)).all()
    assert (distribution.std > 0).all()


def trees_without_each_row(bagged):
    """[T, n] by hand."""
    return np.array([~np.isin(np.arange(200), sample) for sample in bagged.trees.estimators_samples_])


def test_out_of_bag_predictions_are_those_of_the_trees_grown_without_a_row(bagged):
    distribution, without = bagged.out_of_bag(X), trees_without_each_row(bagged)
    np.testing.assert_array_equal(bagged.in_bag(X, Y), ~without)
    means = np.asarray(bagged.tree_means(X))
    np.testing.assert_allclose(means.mean(axis=1), bagged(X).mean, rtol=1e-5)
    for row in range(0, 200, 17):
        targets, weights = [], []
        for k in np.flatnonzero(without[:, row]):
            tree, sample = bagged.trees.estimators_[k], bagged.trees.estimators_samples_[k]
            together = sample[tree.apply(X[sample]) == tree.apply(X[row : row + 1])]
            np.testing.assert_allclose(means[row, k], Y[together].mean(), rtol=1e-5)
            targets.append(Y[together])
            weights.append(np.full(len(together), 1 / len(together)))
        targets, weights = np.concatenate(targets), np.concatenate(weights)
        mean = np.average(targets, weights=weights)
        np.testing.assert_allclose(distribution.mean[row], mean, rtol=1e-5)
        std = np.sqrt(np.average((targets - mean) ** 2, weights=weights))
        np.testing.assert_allclose(distribution.std[row], std, rtol=1e-5)


def test_out_of_bag_errors_are_honest_and_guarantee_nothing_of_the_whole_forest(bagged):
    own, new = (metrics.rmse(y, bagged(x)) for x, y in ((X, Y), (NEW, NEW_Y)))
    out_of_bag = metrics.rmse(Y, bagged.out_of_bag(X))
    assert own < 0.85 * new
    assert 0.85 * new < out_of_bag < 1.2 * new
    calibrated = conformal.fit(None, bagged.out_of_bag(X), Y)
    assert 0.8 < metrics.coverage(NEW_Y, calibrated(None, bagged(NEW))) < 0.97
    with pytest.raises(ValueError, match="out of fold"):
        calibrated.guarantee(0.9)


def test_jackknife_plus_after_bootstrap_of_a_forest_is_a_loop_over_its_trees(bagged):
    fitted = cross_conformal.of_forest(bagged, X, Y, key=KEY)
    number = fitted.weights.shape[0]
    assert 5 < number < 40  # of 60, 37 % in the mean
    without = trees_without_each_row(bagged)[:number]
    at_rows, at_new = (np.stack([t.predict(x) for t in bagged.trees.estimators_[:number]]) for x in (X, NEW[:5]))
    in_units = lambda means: float(bagged.y_scaler.loc) + float(bagged.y_scaler.scale) * means
    errors = np.array([abs(Y[i] - in_units(at_rows[without[:, i], i]).mean()) for i in range(200)])
    lower, upper = fitted(NEW[:5]).interval(0.9)
    for row in range(5):
        centers = np.array([in_units(at_new[without[:, i], row]).mean() for i in range(200)])
        # Ranks floor(0.1 * 201) and ceil(0.9 * 201).
        np.testing.assert_allclose(lower[row], np.sort(centers - errors)[20 - 1], rtol=1e-4)
        np.testing.assert_allclose(upper[row], np.sort(centers + errors)[181 - 1], rtol=1e-4)
    assert fitted.guarantee(0.9).coverage == pytest.approx(0.8)
    assert 0.85 < metrics.coverage(NEW_Y, fitted(NEW)) < 0.97
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted))(NEW).mean, fitted(NEW).mean)


def test_out_of_bag_needs_the_rows_of_the_fit_and_a_bootstrap(bagged):
    fit = lambda model, trees: forests.fit(X, Y, key=KEY, model=model, num_trees=trees)
    with pytest.raises(ValueError, match="x must be the inputs that the forest was fitted to, in the same order"):
        bagged.out_of_bag(X[::-1])
    with pytest.raises(ValueError, match="x has 199 rows where 200 are expected"):
        bagged.out_of_bag(X[1:])
    with pytest.raises(ValueError, match="y must be the targets that the forest was fitted to"):
        cross_conformal.of_forest(bagged, X, Y[::-1], key=KEY)
    with pytest.raises(ValueError, match="model is 'extra_trees', whose trees are not grown on bootstrap samples"):
        fit("extra_trees", 3).out_of_bag(X)
    with pytest.raises(ValueError, match=r"row \d+ is in the bootstrap samples of all 3 models"):
        fit("random_forest", 3).out_of_bag(X)


def test_forest_learns_mean_and_spread(forest):
    distribution = forest(NEW)
    assert metrics.rmse(NEW_Y, distribution) < 0.7 * NEW_Y.std()
    loud = NEW[:, 1] > 0
    # Random thresholds tell the two halves apart less sharply than the best ones.
    ratio = {"random_forest": 1.3, "extra_trees": 1.2}[forest.model]
    assert distribution.std[loud].mean() > ratio * distribution.std[~loud].mean()


@pytest.mark.parametrize("model", ["random_forest", "extra_trees"])
def test_depth_and_features_are_limited(model):
    """Of a hundred splits at the root, each of one feature at random, about half are of either."""
    stumps = forests.fit(X, Y, key=KEY, model=model, num_trees=100, max_depth=1, max_features=0.5).trees
    assert max(tree.get_depth() for tree in stumps.estimators_) == 1
    roots = np.array([tree.tree_.feature[0] for tree in stumps.estimators_])
    assert 30 < np.sum(roots == 0) < 70
    assert 30 < np.sum(roots == 1) < 70


def test_extra_trees_split_at_random():
    """Grown on the same rows, all 20 have another threshold at the root."""
    trees = forests.fit(X, Y, key=KEY, model="extra_trees", num_trees=20).trees.estimators_
    assert len({tree.tree_.threshold[0] for tree in trees}) == 20


def test_crude_is_the_package_by_itself(ngboost):
    ours = forests.fit(X, Y, key=KEY, model="ngboost", preset="crude", num_trees=20)(NEW)
    theirs = ngboost.NGBRegressor(n_estimators=20, verbose=False).fit(X, Y).pred_dist(NEW)
    np.testing.assert_allclose(ours.mean, theirs.params["loc"], rtol=1e-5)
    np.testing.assert_allclose(ours.std, theirs.params["scale"], rtol=1e-4)
    assert ngboost.NGBRegressor().n_estimators == forests._CRUDE_TREES


def test_the_number_of_boosted_trees_is_chosen(ngboost):
    chosen = forests.fit(X, Y, key=KEY, model="ngboost", learning_rate=0.1)
    assert 5 < chosen.trees.n_estimators < 100
    many = forests.fit(X, Y, key=KEY, model="ngboost", learning_rate=0.1, num_trees=150)
    assert metrics.nlpd(NEW_Y, chosen(NEW)) < metrics.nlpd(NEW_Y, many(NEW)) - 0.1


@pytest.mark.parametrize("model", ["ngboost", "random_forest", "extra_trees"])
def test_key_dtype_scale_and_pickle(model, request):
    if model == "ngboost":
        request.getfixturevalue("ngboost")
    fit = lambda y, key=KEY: forests.fit(X, y, key=key, model=model, num_trees=5)
    fitted = fit(Y)
    distribution, again = fitted(NEW), fit(Y)(NEW)
    np.testing.assert_array_equal(distribution.mean, again.mean)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted))(NEW).std, distribution.std)
    np.testing.assert_allclose(fit(2.0**-30 * Y)(NEW).std * 2.0**30, distribution.std, rtol=1e-5)
    single = fitted(NEW.astype(np.float32))
    assert single.mean.dtype == single.std.dtype == jnp.float32
    if model != "ngboost":
        assert np.any(fit(Y, jax.random.key(1))(NEW).mean != distribution.mean)


@pytest.mark.parametrize("model", ["ngboost", "random_forest", "extra_trees"])
def test_a_missing_package_is_named_with_its_extra(model, monkeypatch):
    for name in ("ngboost", "sklearn", "sklearn.ensemble"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"not installed: pip install 'jaxcal\[forests\]'"):
        forests.fit(X, Y, key=KEY, model=model)


def test_tracers_are_answered(forest):
    with pytest.raises(TypeError, match="neither fit nor prediction runs under jit"):
        jax.jit(lambda x: forest(x).mean)(NEW)
    with pytest.raises(TypeError, match="neither fit nor prediction runs under jit"):
        jax.vmap(lambda y: forests.fit(X, y, key=KEY)(X).mean)(jnp.asarray([Y, Y]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.where(X > 1.9, np.nan, X)}, "x holds .* values that are NaN or infinite"),
        ({"y": Y[1:]}, "y has 199 rows where 200 are expected"),
        ({"x": X[:9], "y": Y[:9]}, "x has 9 rows; at least 10 are needed"),
        ({"y": np.full(200, 3.0)}, r"y is constant \(3\)"),
        ({"model": "xgboost"}, "model must be one of 'random_forest', 'extra_trees', 'ngboost'; got 'xgboost'"),
        ({"preset": "crude"}, "preset must be one of None, 'usnrt'; got 'crude'"),
        ({"num_trees": 0}, "num_trees must be at least 1; got 0"),
        ({"min_leaf_rows": 0}, "min_leaf_rows must be at least 1; got 0"),
        ({"max_depth": 0}, "max_depth must be at least 1; got 0"),
        ({"max_features": 3.0}, "max_features must lie above 0 and be at most 1, all features; got 3"),
        ({"learning_rate": 0.0}, "learning_rate must be positive; got 0.0"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        forests.fit(**({"x": X, "y": Y, "key": KEY, "model": "random_forest"} | change))


def test_prediction_on_other_columns(forest):
    with pytest.raises(ValueError, match="x has 1 columns; the fit had 2"):
        forest(NEW[:, 0])


@pytest.mark.parametrize("model", ["random_forest", "extra_trees"])
def test_leaves_of_one_target_have_no_variance(model, rng):
    x = np.repeat(np.arange(40.0), 25)
    y = np.repeat(rng.normal(size=40), 25)
    forest = forests.fit(x, y, key=KEY, model=model, num_trees=20, min_leaf_rows=1, preset="usnrt")
    std = forest(np.arange(40.0)).std
    assert (std >= 0).all()
    assert std.min() < 1e-6
