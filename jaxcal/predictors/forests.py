"""Ensembles of trees with a predictive distribution: random forests, extra trees and natural gradient boosting.

Random forests and extremely randomized trees (Geurts, Ernst & Wehenkel, Machine Learning 63, 2006) come from
scikit-learn. They predict the distribution of Meinshausen, "Quantile Regression Forests", JMLR 7 (2006). Rows that
trees were grown without calibrate it (`_quantile_forest`).

Natural gradient boosting comes from the authors' package: Duan, Avati, Ding, Thai, Basu, Ng & Schuler, "NGBoost:
Natural Gradient Boosting for Probabilistic Prediction", ICML 2020. The extra `forests` installs both packages.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal._extras import needed
from jaxcal._numpy import as_numpy
from jaxcal.distributions import Mixture, Normal
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.frames.columns import Categorical, Columns, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.predictors import _tree_arrays
from jaxcal.predictors._quantile_forest import LeafTargets, Shape, Slices, WholeDistribution
from jaxcal.predictors._tree_arrays import BoostedNormal, ForestArrays

if TYPE_CHECKING:
    from ngboost import NGBRegressor
    from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor

    ForestRegressor = RandomForestRegressor | ExtraTreesRegressor
    GrownForest = ForestRegressor | ForestArrays

# The number of trees where none is given. For NGBoost it is the most trees, as in its paper's experiments.
_BOOSTED_TREES, _FOREST_TREES = 2000, 500
# The names of scikit-learn's classes.
_FORESTS = {"random_forest": "RandomForestRegressor", "extra_trees": "ExtraTreesRegressor"}
# NGBoost's default number of trees.
_CRUDE_TREES = 500
# Boosting stops after this many trees in a row that do not improve the score of the validation set. This fraction of
# all rows is the validation set.
_PATIENCE, _HELD_OUT = 50, 0.2
# The least number of rows that `fit` takes.
_LEAST_ROWS = 10
# Extra trees have no bootstrap: forests that are grown without one of this many folds calibrate their distribution.
_FOLDS = 10


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    model: str = "random_forest",
    num_trees: int | None = None,
    learning_rate: float = 0.01,
    min_leaf_rows: int = 5,
    max_depth: int | None = None,
    max_features: float = 1.0,
    preset: str | None = None,
) -> "Forest":
    """Grow trees that give a distribution for every row.

    "random_forest" gives the distribution of a quantile regression forest. This forest draws a tree, and then one of
    the bootstrapped training rows in the leaf that x falls into. The targets of these rows, each with its probability,
    are cut into 20 slices of equal probability. A slice becomes the normal distribution with its mean and variance,
    widened a little, so that there is a density everywhere. With equal weights, the mean and the variance would be the
    mean and the variance of the forest's distribution (the variance except for the widening).

    The weights are learned instead, by the likelihood of every training row under the trees that were grown without it.
    They make the distribution as narrow, as skewed and as heavy in the tails as these errors are. A last component, the
    normal distribution of all targets, has its own weight. The predicted mean is the mean of this mixture;
    `Forest.tree_means` has the forest's own means.

    "extra_trees" gives the same distribution with trees that are grown on all rows, without a bootstrap. A split is the
    best of random thresholds, one for every feature it may use. The weights are learned from ten smaller forests, each
    grown without a tenth of the rows, which doubles the time.

    `preset="usnrt"` is for these two models. It gives the normal distribution with the mean and the variance of the
    forest's distribution, without calibration. In the leaf of tree t the target has the mean m_t and the variance v_t,
    and mean = avg(m_t), variance = avg(v_t) + avg((m_t - mean)^2). The variance is 0 where all rows of these leaves
    have one target.

    "ngboost" boosts the mean and the log std of a normal distribution by natural gradients of its log score, with trees
    of depth 3 for each. As in its paper, the score of a validation set, a random fifth of the rows, chooses the number
    of trees. All rows are then fitted with this number of trees. `preset="crude"` takes the package's defaults, as
    CRUDE does (Zelikman, Healy, Zhou & Avati 2020): 500 trees, without a validation set.

    The target is standardized by the rows given here. So y -> a y + b changes the prediction in exactly this way, up to
    rounding, which may decide where a tree splits. The trees come from NumPy packages: neither fit nor prediction runs
    under `jit`, `vmap` or `grad`.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n].
        key: random key of the validation set and of the trees.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        model: "random_forest", "extra_trees" or "ngboost".
        num_trees: number of trees. The default is 500 for a forest; NGBoost chooses it as above, up to 2000.
        learning_rate: of NGBoost.
        min_leaf_rows: for forests, not NGBoost: the least number of rows in a leaf.
        max_depth: for forests: the most splits on the path to a leaf; None for any number.
        max_features: for forests: the fraction of the features, drawn at random, that a split may use; above 0, at most
            1.
        preset: None, "crude" or "usnrt", as above.

    Raises:
        TypeError: if key is no random key.
        ImportError: if the packages of the extra are not installed.
        TypeError: if x or y is traced by a transformation of JAX.
        ValueError: if x or y is empty, not finite or of the wrong shape, or has fewer than ten rows. Also if y is
            constant, or would be without the validation set, or if an option is out of its range.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import forests
        >>> x = np.linspace(-1, 1, 400)
        >>> y = np.sign(x) + np.where(x > 0, 0.5, 0.1) * np.random.default_rng(0).normal(size=400)
        >>> distribution = forests.fit(x, y, key=jax.random.key(0))(np.array([-0.5, 0.5]))
        >>> distribution.mean.round().tolist(), bool(distribution.std[1] > 2 * distribution.std[0])
        ([-1.0, 1.0], True)
    """
    _checks.check_key(key)
    _checks.check_known("forests", x, y)
    columns, x, y = as_data(x, y, categorical, at_least=_LEAST_ROWS)
    _checks.check_choice("model", model, (*_FORESTS, "ngboost"))
    _checks.check_choice("preset", preset, (None, "crude" if model == "ngboost" else "usnrt"))
    _checks.check_at_least("min_leaf_rows", min_leaf_rows, 1)
    for name, count in (("num_trees", num_trees), ("max_depth", max_depth)):
        if count is not None:
            _checks.check_at_least(name, count, 1)
    if not 0 < max_features <= 1:
        raise ValueError(f"max_features must lie above 0 and be at most 1, all features; got {max_features}.")
    _checks.check_positive("learning_rate", learning_rate)
    _checks.check_varies("y is", y)
    y_scaler = Standardizer.of(y)
    rows = np.asarray(x, float), np.asarray(y_scaler(y), float)
    seed = int(jax.random.bits(key, dtype="uint32"))
    if model == "ngboost":
        num_trees = num_trees or (_CRUDE_TREES if preset else None)
        trees = _boost(*rows, np.asarray(y), num_trees, learning_rate, seed)
        return Forest(model, trees, y_scaler, columns)
    limits = {"min_samples_leaf": min_leaf_rows, "max_depth": max_depth, "max_features": float(max_features)}
    grow = partial(_grow_forest, model, random_state=seed, **limits)
    trees = grow(*rows, n_estimators=num_trees or _FOREST_TREES)
    forest = Forest(model, trees, y_scaler, columns)
    if preset == "usnrt":
        return forest
    if model == "random_forest":
        return _by_out_of_bag(forest, *rows, y_scaler)
    targets = LeafTargets.of(_trees_of(trees), trees.apply(rows[0]), np.ones((len(trees), len(y)), int), rows[1])
    shape = Shape.of(*_out_of_fold(grow, *rows, len(trees), seed))
    return replace(forest, distribution=WholeDistribution(targets, shape, y_scaler))


def of_trees(trees: "ForestRegressor", x: Table, y: Series) -> "Forest":
    """The whole distribution of a fitted forest of scikit-learn, as `fit` gives it; nothing is grown.

    Args:
        trees: a fitted `RandomForestRegressor` or `ExtraTreesRegressor` with bootstrap=True, of one target.
        x: the inputs [n, d] that the forest was fitted to, in the same order; a vector [n] is one column.
        y: their targets [n].

    Raises:
        TypeError: if x or y is traced by a transformation of JAX.
        ValueError: if the trees have no bootstrap, or were not fitted to x and y; if y is constant.

    Example:
        >>> import numpy as np
        >>> from sklearn.ensemble import RandomForestRegressor
        >>> from jaxcal.predictors import forests
        >>> x = np.linspace(-1, 1, 200)[:, None]
        >>> y = x[:, 0] + 0.1 * np.random.default_rng(0).normal(size=200)
        >>> trees = RandomForestRegressor(min_samples_leaf=5, random_state=0).fit(x, y)
        >>> lower, upper = forests.of_trees(trees, x, y)(x).interval(0.9)
        >>> bool(0.8 < np.mean((lower <= y) & (y <= upper)))
        True
    """
    if not getattr(trees, "bootstrap", False) or trees.max_samples is not None:
        raise ValueError(
            "trees must be a forest with bootstrap=True and max_samples=None. Otherwise no row is out of bag, or it is "
            "unknown which rows are. jaxcal.forests.fit(model='extra_trees') grows trees without a bootstrap."
        )
    _checks.check_known("forests", x, y)
    columns, x, y = as_data(x, y, at_least=1)
    _checks.check_varies("y is", y)
    model = {name: kind for kind, name in _FORESTS.items()}[type(trees).__name__]
    forest = Forest(model, trees, Standardizer.identity(y), columns)
    forest.in_bag(x, y)  # raises where the trees were fitted to other rows
    y_scaler = Standardizer.of(y)
    return _by_out_of_bag(forest, np.asarray(x, float), np.asarray(y_scaler(y), float), y_scaler)


@dataclass(frozen=True)
class Forest:
    """Grown trees; made by `fit`. It is no pytree, as it holds no JAX array.

    `jaxcal.save` writes the trees as arrays. A loaded forest predicts the same and needs neither package, but it is
    slower for many rows.

    Attributes:
        model: "ngboost", "random_forest" or "extra_trees".
        trees: an `NGBRegressor`, `RandomForestRegressor` or `ExtraTreesRegressor`, of the standardized target. A loaded
            forest has their arrays.
        y_scaler: the standardization of the trees' target. After `of_trees` it is the identity, as these trees predict
            the target as it is.
        columns: what the columns of the training inputs were.
        distribution: the parts of the whole distribution; None where a normal distribution is predicted.
    """

    model: str
    trees: Any
    y_scaler: Standardizer
    columns: Columns
    distribution: WholeDistribution | None = None

    def __call__(self, x: Table) -> Normal | Mixture:
        """The predictions at the rows of x, in its dtype.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            TypeError: if x is traced by a transformation of JAX.
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        x = self._checked(x)
        if self.distribution is not None:
            return self.distribution(self.trees.apply(np.asarray(x, float)), None, x.dtype)
        moments = _boosted_moments if self.model == "ngboost" else _forest_moments
        return self._in_units_of_y(*moments(self.trees, np.asarray(x, float)), x.dtype)

    def out_of_bag(self, x: Table) -> Normal | Mixture:
        """The distributions of the rows that a random forest was fitted to, each by the trees grown without the row.

        Their errors are about as large as the errors of new rows, and they are marked as `Distribution.is_out_of_fold`.
        A calibrator fitted to them corrects the whole forest, without a second set of rows and without a guarantee. The
        shape of these distributions was learned from the same rows, but it is one shape for all.
        `jaxcal.cross_conformal.of_forest` has a guarantee.

        Args:
            x: the inputs that the forest was fitted to, in the same order.

        Raises:
            TypeError: if x is traced by a transformation of JAX.
            ValueError: if the trees have no bootstrap, as in "extra_trees", or if the forest was not fitted to x. Also
                if a row is in the samples of all trees.

        Example:
            >>> import jax, numpy as np
            >>> from jaxcal.predictors import forests
            >>> x, key = np.linspace(-1, 1, 100), jax.random.key(0)
            >>> y = x + np.random.default_rng(0).normal(size=100)
            >>> forest = forests.fit(x, y, key=key, model="random_forest", num_trees=100)
            >>> bool(np.std(y - forest(x).mean) < np.std(y - forest.out_of_bag(x).mean))
            True
        """
        weights = out_of_bag_weights(self.in_bag(x))
        x = self._checked(x)
        if self.distribution is not None:
            leaves = self.trees.apply(np.asarray(x, float))
            return marked_out_of_fold(self.distribution(leaves, weights, x.dtype))
        mean, std = _moments_of_leaves(*_leaves(self.trees, np.asarray(x, float)), weights)
        return marked_out_of_fold(self._in_units_of_y(mean, std, x.dtype))

    def in_bag(self, x: Table, y: Series | None = None) -> np.ndarray:
        """Which of the rows that a random forest was fitted to each tree was grown on: [T, n].

        Args:
            x: the inputs that the forest was fitted to, in the same order.
            y: their targets; None skips their check.

        Raises:
            TypeError: if x or y is traced by a transformation of JAX.
            ValueError: if the trees have no bootstrap, as in "extra_trees"; if the forest was not fitted to x, or y.
        """
        if not getattr(self.trees, "bootstrap", False):
            raise ValueError(
                f"model is {self.model!r}, whose trees are not grown on bootstrap samples: no row is out of bag. Fit "
                "with model='random_forest'."
            )
        x = np.asarray(self._checked(x), float)
        trees = _trees_of(self.trees)
        rows = int(trees[0].weighted_n_node_samples[0])
        _checks.check_length("x", x, rows)
        counts = _bootstrap_counts(self.trees, rows)
        targets = None
        if y is not None:
            _checks.check_known("forests", y)
            targets = np.asarray(self.y_scaler(_checks.as_vector("y", y, length=rows)), float)
        for tree, leaf, count in zip(trees, self.trees.apply(x).T, counts, strict=True):
            _check_grown_on(tree, leaf, count, targets)
        return counts > 0

    def tree_means(self, x: Table, number: int | None = None) -> Float[Array, "n t"]:
        """The predictions of each tree of a forest, or of the first ones, at the rows of x, in the unit of y.

        Args:
            x: inputs as of the call.
            number: number of trees; None for all.

        Raises:
            TypeError: if x is traced by a transformation of JAX.
            ValueError: if the model is "ngboost", which has no such trees; as in the call for x.
        """
        _checks.check_choice("model", self.model, tuple(_FORESTS))
        x = self._checked(x)
        means, _ = _leaves(self.trees, np.asarray(x, float), number)
        loc, scale = float(self.y_scaler.loc), float(self.y_scaler.scale)
        return jax.device_put((loc + scale * means.T).astype(x.dtype))

    def _to_save(self) -> "Forest":
        """The forest with arrays in place of the trees of other packages: `jaxcal.serialization`."""
        if isinstance(self.trees, ForestArrays | BoostedNormal):
            return self
        if self.model == "ngboost":
            return replace(self, trees=_tree_arrays.of_ngboost(self.trees))
        rows = int(_trees_of(self.trees)[0].weighted_n_node_samples[0])
        counts = _bootstrap_counts(self.trees, rows) if self.trees.bootstrap else None
        return replace(self, trees=_tree_arrays.of_forest(self.trees, counts))

    def _checked(self, x: Table) -> Float[Array, "n d"]:
        _checks.check_known("forests", x)
        return self.columns(x)

    def _in_units_of_y(self, mean: np.ndarray, std: np.ndarray, dtype: DTypeLike) -> Normal:
        scaler = as_numpy(self.y_scaler)
        center, spread = scaler.inverse(mean.astype(dtype)), scaler.scale * std.astype(dtype)
        return Normal(center.astype(dtype), spread.astype(dtype))


def _boost(
    x: np.ndarray, z: np.ndarray, y: np.ndarray, num_trees: int | None, learning_rate: float, seed: int
) -> "NGBRegressor":
    """Boosted trees of the standardized targets z; y has the targets as the user gave them."""
    with needed("ngboost", "'jaxcal[forests]'"):
        from ngboost import NGBRegressor
        from sklearn.tree import DecisionTreeRegressor

    def unfitted(num_trees: int) -> "NGBRegressor":
        # The package's default base learner takes its random numbers from NumPy's global state.
        base = DecisionTreeRegressor(max_depth=3, random_state=seed)
        return NGBRegressor(
            Base=base, n_estimators=num_trees, learning_rate=learning_rate, random_state=seed, verbose=False
        )

    if num_trees is None:
        order = np.random.default_rng(seed).permutation(len(y))
        held_out, rest = np.split(order, [int(_HELD_OUT * len(y))])
        _checks.check_varies("without the validation set, y is", y[rest])
        trial = unfitted(_BOOSTED_TREES).fit(
            x[rest], z[rest], X_val=x[held_out], Y_val=z[held_out], early_stopping_rounds=_PATIENCE
        )
        num_trees = int(trial.best_val_loss_itr) + 1
    return unfitted(num_trees).fit(x, z)


def _boosted_moments(model: "NGBRegressor | BoostedNormal", x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means and stds of a boosted normal distribution."""
    if isinstance(model, BoostedNormal):
        return model.moments(x)
    distribution = model.pred_dist(x)
    return distribution.params["loc"], distribution.params["scale"]


def _grow_forest(model: str, x: np.ndarray, y: np.ndarray, **options: Any) -> "ForestRegressor":
    with needed("scikit-learn", "'jaxcal[forests]'"):
        from sklearn import ensemble
    return getattr(ensemble, _FORESTS[model])(**options).fit(x, y)


def _by_out_of_bag(forest: Forest, x: np.ndarray, y: np.ndarray, y_scaler: Standardizer) -> Forest:
    """A forest with the whole distribution; its shape is learned from rows that trees were grown without."""
    leaves, counts = forest.trees.apply(x), _bootstrap_counts(forest.trees, len(y))
    targets = LeafTargets.of(_trees_of(forest.trees), leaves, counts, y)
    known = (counts == 0).any(axis=0)  # with few trees, not all rows
    slices = targets.slices(leaves[known], out_of_bag_weights(counts[:, known] > 0))
    return replace(forest, distribution=WholeDistribution(targets, Shape.of(slices, y[known]), y_scaler))


def _out_of_fold(grow: Callable, x: np.ndarray, y: np.ndarray, num_trees: int, seed: int) -> tuple[Slices, np.ndarray]:
    """The slices of all rows, each by a forest grown without the row's fold, and their targets in the same order.

    These forests have a tenth of the trees, but at least ten, or all trees if there are fewer.
    """
    number = min(num_trees, max(_FOLDS, num_trees // _FOLDS))
    folds = np.array_split(np.random.default_rng(seed).permutation(len(y)), _FOLDS)
    parts = []
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(y)), fold)
        trees = grow(x[rest], y[rest], n_estimators=number)
        counts = np.ones((number, len(rest)), int)
        targets = LeafTargets.of(_trees_of(trees), trees.apply(x[rest]), counts, y[rest])
        parts.append(targets.slices(trees.apply(x[fold])))
    return Slices(*map(np.concatenate, zip(*parts, strict=True))), y[np.concatenate(folds)]


def _trees_of(forest: "GrownForest") -> list:
    return forest.trees if isinstance(forest, ForestArrays) else [estimator.tree_ for estimator in forest.estimators_]


def _bootstrap_counts(forest: "GrownForest", rows: int) -> np.ndarray:
    """How often each row is in the bootstrap sample of each tree [T, n]."""
    if isinstance(forest, ForestArrays):
        return np.asarray(forest.counts)
    return np.stack([np.bincount(sample, minlength=rows) for sample in forest.estimators_samples_])


def _forest_moments(forest: "GrownForest", x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means and stds of the distribution that draws a tree, and then a row in the leaf that x falls into."""
    means, variances = _leaves(forest, x)
    return _moments_of_leaves(means, variances, np.full((len(means), 1), 1 / len(means)))


def _leaves(forest: "GrownForest", x: np.ndarray, number: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The target's mean and variance [T, n] in the leaves that the rows fall into, for all trees or the first ones."""
    trees = _trees_of(forest)[:number]
    leaves = forest.apply(x).T[:number]
    means = np.stack([tree.value[leaf, 0, 0] for tree, leaf in zip(trees, leaves, strict=True)])
    # The impurity of a leaf is the variance of its targets, up to rounding: it can be below 0 where all are equal.
    variances = np.stack([tree.impurity[leaf].clip(0) for tree, leaf in zip(trees, leaves, strict=True)])
    return means, variances


def _moments_of_leaves(means: np.ndarray, variances: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the std of every row, from trees with weights [T, n] that sum to 1."""
    # mean = sum_t w_t m_t and variance = sum_t w_t (v_t + (m_t - mean)^2)
    mean = (weights * means).sum(axis=0)
    return mean, np.sqrt((weights * (variances + (means - mean) ** 2)).sum(axis=0))


def _check_grown_on(tree: Any, leaf: np.ndarray, count: np.ndarray, targets: np.ndarray | None) -> None:
    """Raise ValueError unless a tree was grown on rows in these leaves, each row `count` times."""
    is_leaf = tree.children_left < 0
    in_leaf = np.bincount(leaf, weights=count, minlength=tree.node_count)[is_leaf]
    if not np.array_equal(in_leaf, tree.weighted_n_node_samples[is_leaf]):
        raise ValueError("x must be the inputs that the forest was fitted to, in the same order; got other rows.")
    if targets is None:
        return
    # The mean target of a leaf is sum(count * target) / sum(count) over the rows in it.
    means = np.bincount(leaf, weights=count * targets, minlength=tree.node_count)[is_leaf] / in_leaf
    if not np.allclose(means, tree.value[is_leaf, 0, 0], atol=1e-4 * targets.std()):
        raise ValueError("y must be the targets that the forest was fitted to, in the same order; got other targets.")


def out_of_bag_weights(in_bag: np.ndarray) -> np.ndarray:
    """For every row, equal weights with sum 1 for the models whose samples do not contain it.

    Args:
        in_bag: [m, n] whether row i is in the sample of model k.

    Raises:
        ValueError: if a row is in all samples.
    """
    without = ~in_bag
    numbers = without.sum(axis=0)
    if not numbers.all():
        row = int(numbers.argmin())
        raise ValueError(
            f"row {row} is in the bootstrap samples of all {len(in_bag)} models: none was fitted without it. Fit more."
        )
    return without / numbers
