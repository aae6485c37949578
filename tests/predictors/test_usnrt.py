"""USNRT: the tree that is grown, what its leaves predict, and how wrong input is answered."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations

from jaxcal import Mixture, Normal, progress
from jaxcal.calibrators import conformal
from jaxcal.predictors import usnrt

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)
FLOAT = np.zeros(0, jnp.result_type(float)).dtype.type
OPTIONS: dict[str, Any] = {"min_leaf": 60, "max_epochs": 15}


def data(n=600, seed=0):
    """Noise ten times as large where column 1 is above 0.2, or else in categories 2 and 7 of column 2."""
    rng = np.random.default_rng(seed)
    # Few digits, so that the text tells the thresholds exactly.
    x = np.column_stack([rng.uniform(-1, 1, (n, 2)).round(4), rng.choice([2, 5, 7], n)])
    noisy = (x[:, 1] > 0.2) | ((x[:, 2] != 5) & (x[:, 1] <= 0.2))
    y = x[:, 0] + np.where(noisy, 1.0, 0.1) * rng.normal(size=n)
    return x.astype(FLOAT), y.astype(FLOAT)


X, Y = data()


@pytest.fixture(scope="module")
def fitted():
    return usnrt.fit(X, Y, key=KEY, categorical=[2], **OPTIONS)


def test_predictions_of_known_rows_compile_nothing(fitted):
    """Categories, too."""
    fitted(X[:5])
    with compilations() as compiled:
        for number in (1, 37, 53):
            fitted(X[:number])
    assert compiled == []


def test_a_fit_that_reports_is_the_same(fitted, monkeypatch):
    monkeypatch.setattr(progress, "_BETWEEN_REPORTS", 0.0)  # after every network
    seen = []
    with progress.to(seen.append):
        reported = usnrt.fit(X, Y, key=KEY, categorical=[2], **OPTIONS)
    jax.tree.map(np.testing.assert_array_equal, *(eqx.filter(each, eqx.is_array) for each in (fitted, reported)))
    ends = [each for each in seen if each.is_finished]
    labels = [each.label.removeprefix("usnrt.fit: ") for each in ends]
    assert labels == ["networks without a fold", "nodes tested", "networks of all rows", "leaves"]
    assert ends[0].done == ends[0].total == 5
    assert ends[-1].done == fitted.leaf_rmse.size
    assert len(seen) > ends[0].total + ends[-1].total


def leaves(module, x):
    """The leaf of every row, by a walk down the tree's own text."""
    lines = module.text().splitlines()
    paths, stack = {}, []
    for line in lines[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        condition = line.strip().split(":")[0]
        stack = [*stack[: depth - 1], condition]
        if "leaf" in line:
            paths[int(line.split("leaf ")[1].split(":")[0])] = list(stack)
    found = np.full(len(x), -1)
    for leaf, conditions in paths.items():
        is_in = np.ones(len(x), bool)
        for condition in conditions:
            column = x[:, int(condition[2])]
            if "{" in condition:
                is_in &= np.isin(column, [float(level) for level in condition.split("{")[1].rstrip("}").split(",")])
            else:
                threshold = float(condition.split()[-1])
                is_in &= column <= threshold if "<=" in condition else column > threshold
        found[is_in] = leaf
    return found


def test_it_splits_where_the_noise_differs_and_nowhere_else(fitted):
    columns = set(np.asarray(fitted.trees.feature).ravel().tolist())
    assert columns == {-1, 1, 2}
    own = leaves(fitted, X)
    assert (own >= 0).all()
    distribution = fitted(X)
    quiet = (X[:, 1] <= 0.2) & (X[:, 2] == 5)
    assert np.median(distribution.std[~quiet]) > 3 * np.median(distribution.std[quiet])


def test_leaves_hold_the_rows_that_their_text_says(fitted):
    own = leaves(fitted, X)
    is_leaf = (fitted.trees.feature[0] < 0) & (fitted.trees.num_rows[0] > 0)
    counts = dict(zip(fitted.trees.leaf[0][is_leaf].tolist(), fitted.trees.num_rows[0][is_leaf].tolist(), strict=True))
    assert counts == {leaf: int((own == leaf).sum()) for leaf in counts}
    assert min(counts.values()) >= 60
    np.testing.assert_array_equal(fitted.apply(X), own)
    calibrated = conformal.fit(X, fitted(X), Y, by=fitted.apply)
    assert calibrated.guarantee(0.9, 0).num_calibration == counts[0]
    # The residuals of a leaf are those of the predicted means.
    squares = (Y - np.asarray(fitted(X).mean)) ** 2
    rmse = [np.sqrt(squares[own == leaf].mean()) for leaf in sorted(counts)]
    np.testing.assert_allclose(fitted.leaf_rmse[0], rmse, rtol=1e-4)
    np.testing.assert_allclose(fitted.heterogeneity[0], np.log(rmse).std(), rtol=1e-3)


@pytest.mark.slow
def test_fewer_rows_than_two_leaves_are_one_leaf():
    tree = usnrt.fit(X[:110], Y[:110], key=KEY, **OPTIONS)
    assert tree.leaf_rmse.shape == (1, 1)
    assert tree.text() == f"leaf 0: 110 rows, rmse {float(tree.leaf_rmse[0, 0]):.4g}"


def test_noise_that_is_the_same_everywhere_is_not_split():
    rng = np.random.default_rng(1)
    y = rng.normal(size=600).astype(FLOAT)
    tree = usnrt.fit(X, y, key=KEY, categorical=[2], **OPTIONS)
    assert tree.leaf_rmse.shape == (1, 1)
    assert tree.trees.log_p[0, 0] > np.log(0.01)


@pytest.mark.parametrize("correction", ["none", "permutation"])
def test_corrections_agree_where_the_noise_differs_clearly(fitted, correction):
    tree = usnrt.fit(X, Y, key=KEY, categorical=[2], splits=usnrt.Splits(correction=correction), **OPTIONS)
    assert tree.trees.feature[0, 0] == fitted.trees.feature[0, 0]
    assert tree.trees.threshold[0, 0] == fitted.trees.threshold[0, 0]
    assert tree.trees.log_p[0, 0] < np.log(0.01)


@pytest.mark.slow
def test_the_papers_preset_is_center_correction_and_step():
    options = {"center": "mean", "correction": "none", "step": 10, "num_folds": 1, "hidden": (24, 12)}
    named = usnrt.fit(X, Y, key=KEY, preset="paper", **OPTIONS)
    given = usnrt.fit(X, Y, key=KEY, preset="paper", splits=usnrt.Splits(**options), **OPTIONS)
    assert named.text() == given.text()


@pytest.mark.slow
def test_an_ensemble_is_the_mixture_of_its_members():
    ensemble = usnrt.fit(X, Y, key=KEY, categorical=[2], num_members=2, **OPTIONS)
    distribution = ensemble(X[:20])
    assert isinstance(distribution, Mixture)
    means = distribution.components.mean
    assert means.shape == (2, 20)
    assert (means[0] != means[1]).any()
    np.testing.assert_allclose(distribution.mean, means.mean(0), rtol=1e-5)
    assert ensemble.text(member=1).startswith("600 rows")


@pytest.mark.slow
def test_members_may_be_grown_one_before_the_other():
    """Noise, which the raw rule splits at random, gives every member a tree of its own."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(400, 2)).astype(FLOAT), rng.normal(size=400).astype(FLOAT)
    splits = usnrt.Splits(correction="none", significance=0.5)
    options = {"splits": splits, "min_leaf": 60, "max_epochs": 2}
    ensemble = usnrt.fit(x, y, key=jax.random.key(0), num_members=4, **options)
    roots = [ensemble.root(member=member) for member in range(4)]
    assert len({root.depth() for root in roots}) > 1
    for root in roots:
        assert sum(leaf.num_rows for leaf in root.leaves()) == 400
    assert np.isfinite(ensemble(x).std).all()


@pytest.mark.slow
def test_leaves_of_100_of_500_rows_are_found():
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, (500, 2)).astype(FLOAT)
    y = (x[:, 0] + np.where(x[:, 1] > 0.2, 1.0, 0.1) * rng.normal(size=500)).astype(FLOAT)
    tree = usnrt.fit(x, y, key=KEY, min_leaf=100, max_epochs=15)
    assert tree.trees.feature[0, 0] == 1
    assert min(tree.leaf_table()["num_rows"]) >= 100


@pytest.mark.slow
def test_too_few_rows_for_a_split_are_told():
    with pytest.warns(UserWarning, match="'auto' splits 400 rows and more; of 399 rows the tree is one leaf"):
        usnrt.fit(X[:399], Y[:399], key=KEY, categorical=[2], max_epochs=1)


def test_residuals_are_tested_out_of_fold():
    """Noise has no mean to learn: out of fold its residuals are no smaller, those of training rows are."""
    y = np.random.default_rng(3).normal(size=len(X)).astype(FLOAT)
    options = {"key": KEY, "categorical": [2], **OPTIONS}
    fits = [usnrt.fit(X, y, splits=usnrt.Splits(num_folds=k), **options) for k in (5, 1)]
    stds = [float(fitted.trees.residual_std[0, 0]) for fitted in fits]
    assert stds[0] > y.std(ddof=1) > stds[1]


def test_small_leaves_know_what_all_rows_say(rng):
    """Their means are no worse than those of one leaf, where the noise differs and the mean is one curve."""
    curve = lambda x: np.sin(4 * x[:, 0])
    y = (curve(X) + np.where(X[:, 1] > 0, 0.4, 0.1) * rng.normal(size=len(X))).astype(FLOAT)
    options = {**OPTIONS, "categorical": [2], "key": KEY}
    trees = [usnrt.fit(X, y, **{**options, "min_leaf": least}) for least in (60, 301)]
    assert [bool(len(tree.leaf_table()["leaf"]) > 1) for tree in trees] == [True, False]
    x, _ = data(1000, seed=4)
    small, whole = (np.sqrt(np.mean((tree(x).mean - curve(x)) ** 2)) for tree in trees)
    assert small < 1.2 * whole


def test_the_ratio_of_stds_is_that_of_the_sides(fitted):
    root = fitted.root()
    left, right = (float(part.residual_std) for part in root.below)
    low, high = root.std_ratio_interval
    assert low < root.std_ratio < high
    np.testing.assert_allclose(root.std_ratio, right / left, rtol=1e-4)
    assert not low < 1 < high
    assert f"std ratio {root.std_ratio:.2f} ({low:.2f} to {high:.2f})" in fitted.text()


def test_the_leaves_as_a_table(fitted):
    table = fitted.leaf_table(["a", "b", "c"])
    assert sorted(table["leaf"]) == list(range(len(table["leaf"])))
    np.testing.assert_array_equal(table["num_rows"], np.bincount(np.asarray(fitted.apply(X)))[table["leaf"]])
    np.testing.assert_allclose(table["rmse"], fitted.leaf_rmse[0][table["leaf"]])
    assert np.isfinite(table["residual_std"]).all()
    # By the same rows the tree was widened.
    assert abs(np.average(table["coverage"], weights=table["num_rows"]) - 0.9) < 0.06
    assert all(condition.count("b <= ") <= 1 for condition in table["condition"])
    with pytest.raises(ValueError, match="member must be one of 0"):
        fitted.leaf_table(member=1)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_names_columns_and_categories(fitted, library):
    frames = pytest.importorskip(library)
    colors = np.array(["", "", "red", "", "", "green", "", "blue"])[X[:, 2].astype(int)]
    frame = frames.DataFrame({"size": X[:, 0], "age": X[:, 1], "color": colors})
    tree = usnrt.fit(frame, Y, key=KEY, **OPTIONS)
    assert tree.columns.categorical == (2,)
    text = tree.text()
    assert "age <= " in text
    assert "color in {green}" in text
    by_number = np.column_stack([X[:, :2], np.searchsorted(["blue", "green", "red"], colors)])
    np.testing.assert_array_equal(tree(frame).std, tree(by_number).std)
    # Columns are looked up by their names.
    np.testing.assert_array_equal(tree(frame[["color", "age", "size"]]).std, tree(frame).std)
    calibrated = conformal.fit(by_number, tree(frame), Y, by=tree.apply)
    table = tree.leaf_table()
    assert calibrated.guarantee(0.9, 0).num_calibration == table["num_rows"][list(table["leaf"]).index(0)]
    strange = frames.DataFrame({"size": X[:2, 0], "age": X[:2, 1], "color": ["red", "pink"]})
    with pytest.raises(ValueError, match="column 'color' of x holds 'pink', which is none of the 3 categories"):
        tree(strange)
    with pytest.raises(ValueError, match="x has no column 'size'"):
        tree(strange[["age", "color"]])
    with pytest.raises(ValueError, match=r"column .color. of x holds .missing., which is none of the 3 categories"):
        tree(frames.DataFrame({"size": X[:2, 0], "age": X[:2, 1], "color": ["red", None]}))
    with pytest.raises(ValueError, match="0 to 2, or size, age, color"):
        usnrt.fit(frame, Y, key=KEY, categorical=["weight"])


def test_predictions_under_jit_vmap_and_grad(fitted):
    distribution = eqx.filter_jit(fitted)(X[:10])
    assert isinstance(distribution, Normal)
    np.testing.assert_allclose(distribution.mean, fitted(X[:10]).mean, rtol=1e-5)
    stacked = jax.vmap(lambda x: fitted(x).mean)(jnp.stack([X[:10], X[10:20]]))
    np.testing.assert_allclose(stacked[1], fitted(X[10:20]).mean, rtol=1e-5)
    slopes = jax.grad(lambda x: fitted(x).mean.sum())(jnp.asarray(X[:10]))
    assert np.isfinite(slopes).all()
    assert (slopes[:, 0] != 0).any()
    np.testing.assert_array_equal(slopes[:, 2], 0)


def test_the_unit_of_the_target_does_not_matter(fitted):
    scaled = usnrt.fit(X, 4 * Y - 8, key=KEY, categorical=[2], **OPTIONS)
    assert (scaled.trees.feature == fitted.trees.feature).all()
    np.testing.assert_allclose(scaled(X).std, 4 * fitted(X).std, rtol=1e-6 if FLOAT is np.float64 else 0.1)


def test_unseen_categories(fitted):
    new = X[:2].copy()
    new[0, 2] = 3
    with pytest.raises(ValueError, match="column 2 of x holds 3, which is none of the 3 categories"):
        fitted(new)
    tolerant = usnrt.fit(X, Y, key=KEY, categorical=[2], unseen="majority", **OPTIONS)
    levels, counts = np.unique(X[:, 2], return_counts=True)
    usual = new.copy()
    usual[0, 2] = levels[counts.argmax()]
    np.testing.assert_array_equal(tolerant(new).std, tolerant(usual).std)


@pytest.mark.slow
def test_degenerate_columns_and_targets():
    x = X.copy()
    x[:, 0], x[:, 2] = 3.0, 4.0  # a constant column, and a column of one category
    tree = usnrt.fit(x, Y, key=KEY, categorical=[2], **OPTIONS)
    assert set(np.asarray(tree.trees.feature).ravel().tolist()) <= {-1, 1}
    assert np.isfinite(tree(x).std).all()
    only_categories = usnrt.fit(X[:, 2:], Y, key=KEY, categorical=[0], **OPTIONS)
    assert only_categories.trees.feature[0, 0] == 0
    constant = usnrt.fit(X, np.full_like(Y, 7.0), key=KEY, **OPTIONS)
    np.testing.assert_array_equal(constant(X[:3]).mean, 7.0)
    np.testing.assert_array_equal(constant(X[:3]).std, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"categorical": [3]}, "categorical must hold columns of x, 0 to 2"),
        ({"min_leaf": 1}, "min_leaf must be at least 2"),
        ({"min_leaf": "tenth"}, "'auto'"),
        ({"unseen": "skip"}, "unseen"),
        ({"num_members": 0}, "num_members"),
        ({"preset": "crude"}, "preset"),
    ],
)
def test_wrong_options_are_quoted(options, message):
    with pytest.raises(ValueError, match=message):
        usnrt.fit(X, Y, key=KEY, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"significance": 5.0}, "did you mean 0.05"),
        ({"center": "mode"}, "center"),
        ({"correction": "fdr"}, "correction"),
        ({"num_folds": 0}, "num_folds must be at least 1; got 0"),
    ],
)
def test_wrong_options_of_splits_are_quoted(options, message):
    with pytest.raises(ValueError, match=message):
        usnrt.Splits(**options)


def test_wrong_rows_are_quoted(fitted):
    with pytest.raises(ValueError, match="NaN"):
        usnrt.fit(np.where(X[0] == X, np.nan, X), Y, key=KEY)
    with pytest.raises(TypeError, match="does not run under jit"):
        eqx.filter_jit(usnrt.fit)(jnp.asarray(X), jnp.asarray(Y), key=KEY)
    with pytest.raises(ValueError, match="2 columns"):
        fitted(X[:, :2])


def test_categories_that_were_sent_elsewhere_are_not_named_again(fitted):
    def check(branch, levels):
        if "{" in branch.condition:
            named = set(branch.condition.split("{")[1].rstrip("}").split(", "))
            assert named <= levels
            levels = named
        for part in branch.below:
            check(part, levels)

    check(fitted.root(), {"2", "5", "7"})
    assert sum(leaf.num_rows for leaf in fitted.root().leaves()) == len(Y)
