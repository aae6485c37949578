"""USNRT: a tree that splits where the uncertainty differs, with networks of mean and variance in its leaves.

Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning" (2023). At
every node a network is trained, and Levene's test looks among all splits for the one between whose sides the residuals'
spread differs most; if that is significant, the node is split (section IV-B, algorithm 1). In every leaf a variance
network is trained in its alternating form (section IV-D). Several such trees make the ensemble.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import Mixture, Normal
from jaxcal.functional import levene, multiplicity
from jaxcal.networks import NormalNetwork, TrainingOptions, TrainingRecord, Widening, presets
from jaxcal.networks.held_out import widened
from jaxcal.networks.normal import alternate, as_mixture, as_normal, new_network
from jaxcal.networks.training import (
    TAKE_ANOTHER,
    as_data,
    settle,
    squared_error,
    takes_training_options,
    trainer,
)
from jaxcal.optimize import Optimum, num_train, over_runs
from jaxcal.predictors._columns import Columns, positions
from jaxcal.predictors._tree import Branch, Node, Tree, stack_on_host
from jaxcal.preprocessing import Encoder, Standardizer

# Section V-A: a tenth of the rows in a leaf, or so many.
_LEAVES, _LEAST_ROWS = 10, 1000
_FOLDS = 5
_ROUNDS = 2
# A leaf with so many held-out rows is widened by its own, others by those of the whole tree.
_ENOUGH_HELD_OUT = 100
# Of the intervals of std ratios.
_CONFIDENCE_LEVEL = 0.95


@takes_training_options()
def fit(
    x: Any,
    y: ArrayLike,
    *,
    key: PRNGKeyArray,
    categorical: Sequence[int | str] = (),
    unseen: str = "error",
    num_members: int = 1,
    min_leaf: int | str = "auto",
    significance: float = 0.01,
    center: str | None = None,
    correction: str | None = None,
    step: int | None = None,
    num_folds: int | None = None,
    split_hidden: Sequence[int] | None = None,
    preset: str | None = None,
    **options: Unpack[TrainingOptions],
) -> "USNRT":
    """Grow a tree by Levene's test on residuals, and train networks of mean and variance in its leaves.

    At a node with at least 2 `min_leaf` rows ReLU networks are trained on the squared error, one without each of five
    folds of the rows. Of all splits of the rows in two, of a
    continuous column by a threshold or of a categorical one by its categories, that leave `min_leaf` rows on either
    side, the one with the largest |T| of Levene's test between the out-of-fold residuals of the sides is found (eq. 5
    and 6; `functional.levene`), exactly up to 16 categories. Where its p-value is at most `significance`, the node is
    split. In a leaf, ReLU networks for the mean and the variance are trained alternately, twice, as in
    `variance_network`'s alternating form (eq. 7). The distribution of a row is N(m(x), v(x)) by the networks of its
    leaf; of several members, their mixture.

    All networks are trained as `jaxcal.networks.TrainingOptions` says. The validation set of a leaf are its rows among
    a random fraction of all that no leaf of any member is trained on. By them the variance of every leaf is widened, as
    `variance_network.fit` says; of a leaf with fewer than 100 such rows by those of the whole tree; and of several
    members the mixture once more. A categorical column enters as indicators of its categories.

    The least of very many p-values is small where nothing differs, too: the paper's rule, which knows nothing of it,
    splits pure noise four times in five. `correction="miller-siegmund"` is a bound for the largest |T|,
    "permutation" an exact test that permutes the residuals, "none" the paper's rule. Of skewed residuals only the
    median-centered test holds its level.

    A network's residuals on its own training rows are too small, and most so where it bends most: a split may follow
    that in place of the noise. Out-of-fold residuals do not have this, but they have what the networks of the other
    folds cannot fit, which differs from place to place, too: of few rows and little noise more than `significance` of
    the fits are split where the noise is the same everywhere.

    A column of a data frame that is categorical or holds strings is taken as categorical. The fit keeps the names and
    the labels; predictions take a frame, whose columns are looked up by their names, or an array of numbers.

    `preset="paper"` takes center="mean" (eq. 5), correction="none", step=10 and num_folds=1, as in the paper's
    experiments; the authors' code centers at the median. Its networks have hidden layers of 8d and 4d units at nodes
    and of 4d and 2d in leaves, with tanh for ReLU in that of the variance, where d is the number of columns; learning
    rate 0.01, batches of 64 and patience 25. Every training draws validation rows of its own, and nothing is widened.

    A tree grows by the values of its rows: the fit does not run under `jit` or `vmap`. Predictions do, and are
    differentiable in x within a leaf.

    Args:
        x: inputs [n, d], or a data frame; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows, the batches and the permutations.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        unseen: what a category is that was not there in the fit: an "error", or the "majority" category in its place.
        num_members: how many trees, each with networks of its own.
        min_leaf: the least rows of a leaf; "auto" is a tenth of the rows, or 1000 if that is more; where that is more
            than half of the rows a warning says that the tree is one leaf. The test finds differences among far fewer
            rows, but the networks of small leaves predict worse: on airfoil and steel, of 1200 and 2000 rows, the NLPD
            of one leaf is 0.2 and 1.4 nats below that of leaves of 100.
        significance: the p-value up to which a node is split.
        center: what Levene's test takes deviations from, "median" (the default) or "mean".
        correction: "miller-siegmund" (the default), "permutation" or "none".
        step: only every step-th row of a column's order is a candidate threshold (default 1).
        num_folds: how many folds the rows of a node are divided in for out-of-fold residuals (default 5); 1 for those
            of one network, of which most are of its own training rows.
        split_hidden: widths of the hidden layers of the networks at a node that is tested (default 64, 64).
        preset: None, or "paper" for other defaults, as above.
        **options: of the training, as `jaxcal.networks.TrainingOptions` describes them; hidden are the widths of both
            networks in a leaf.

    Raises:
        TypeError: if x or y is traced by a transformation of JAX.
        ValueError: if x or y is empty, not finite or of the wrong shape, there are too few rows to hold some
            out, or an option is out of its range.
        FloatingPointError: if the loss of a leaf becomes NaN or infinite, and `throw`.

    Source: Ma, Yan and Zhang (2023), sections IV and V-A.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import usnrt
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, size=(400, 2))
        >>> y = x[:, 0] + np.where(x[:, 1] > 0.2, 1.0, 0.1) * rng.normal(size=400)
        >>> tree = usnrt.fit(x, y, key=jax.random.key(0), min_leaf=100, max_epochs=20)
        >>> [line.split()[0] for line in tree.text(["a", "b"]).splitlines()]
        ['400', 'b', 'b']
        >>> distribution = tree(np.array([[0.0, -0.5], [0.0, 0.5]]))
        >>> bool(distribution.std[1] > 3 * distribution.std[0])
        True
    """
    if _checks.is_traced(x, y):
        raise TypeError("a tree grows by the values of x and y: fit does not run under jit, vmap or grad.")
    _checks.check_choice("unseen", unseen, ("error", "majority"))
    columns = Columns.of(x)
    x, y = as_data(x if columns is None else columns.matrix(x, unseen), y)
    of_paper = presets.usnrt(x.shape[1])
    leaf = of_paper._replace(hidden=(4 * x.shape[1], 2 * x.shape[1]), patience=25)
    settings = settle(options, {None: presets.DEFAULT, "paper": leaf}, preset)
    if split_hidden is None:
        split_hidden = of_paper.hidden if preset == "paper" else presets.DEFAULT.hidden
    names, labeled = (None, ()) if columns is None else (columns.names, columns.categorical)
    categorical = positions((*categorical, *labeled), names, x.shape[1])
    _checks.check_at_least("num_members", num_members, 1)
    num_folds = _num_folds(num_folds, preset)
    search = _Search.of(
        preset,
        len(y),
        min_leaf=min_leaf,
        significance=significance,
        center=center,
        correction=correction,
        step=step,
    )
    training = _Training(
        num_folds=num_folds,
        splitting=settings._replace(hidden=tuple(split_hidden)),
        leaf=settings,
    )
    encoder = Encoder.of(x, categorical, unseen, log_tails=settings.log_tails)
    y_scaler, problem = _arranged(encoder, x, y)
    grow_key, leaf_key = _split_key(key, 2)
    trees = _grow(problem, search, training, num_members, grow_key)
    held_out = _held_out(problem, settings, leaf_key)
    leaves = _train_leaves(problem, training, trees, search.min_leaf, held_out, leaf_key)
    fitted = USNRT(
        columns=columns,
        encoder=encoder,
        y_scaler=y_scaler,
        trees=_stack_trees(trees, y_scaler.scale),
        networks=leaves.optima.params,
        leaf_rmse=y_scaler.scale * leaves.rmse,
        training=TrainingRecord.of(leaves.optima, throw=settings.throw),
        leaf_widening=leaves.widening,
        widening=None,
    )
    if num_members == 1 or held_out is None:
        return fitted
    rows = np.flatnonzero(held_out)
    widening = _widening_of_mixture(fitted, x[rows], problem.target[rows])
    return replace(fitted, widening=widening)


class USNRT(eqx.Module):
    """A grown tree with the networks of its leaves, or an ensemble of several; made by `fit`.

    Attributes:
        columns: the names and the labels of the columns of a data frame; None where the inputs were an array.
        encoder: what makes network inputs of columns.
        y_scaler: the standardization of the target.
        trees: the trees of the members, padded to a common size [m, nodes].
        networks: the networks of the leaves [m, leaves]; of a tree with fewer leaves, the rest are copies of its first.
        leaf_rmse: the root mean square of the training residuals in every leaf [m, leaves], in the unit of y; NaN where
            there is no such leaf.
        training: how the training of every leaf's networks went [m, leaves], a `jaxcal.networks.TrainingRecord`.
        leaf_widening: what makes the variance in every leaf [m, leaves] that of new rows; None with the preset.
        widening: what makes the variance of the mixture of several members that of new rows, after this.
    """

    columns: Columns | None
    encoder: Encoder
    y_scaler: Standardizer
    trees: Tree
    networks: NormalNetwork
    leaf_rmse: Float[Array, "m leaves"]
    training: TrainingRecord
    leaf_widening: Widening | None
    widening: Widening | None

    def __call__(self, x: Any) -> Normal | Mixture:
        """The predictions at the rows of x: normal distributions, or of an ensemble mixtures of them.

        Args:
            x: inputs [n, d], or a data frame if the tree was fitted to one; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs, or lacks
                one of their names, or a categorical column has an unseen category, where that is an error.
        """
        return _predict(self, self._checked(x))

    def apply(self, x: Any, *, member: int = 0) -> Int[Array, " n"]:
        """The number of the leaf of a member's tree that each row of x falls into: groups for `by=fitted.apply`.

        Args:
            x: as of the call.
            member: which one.

        Raises:
            ValueError: as the call does; if there is no such member.
        """
        return _leaves(self, self._tree_of(member), self._checked(x))

    @property
    def heterogeneity(self) -> Float[Array, " m"]:
        """How much the uncertainty differs between leaves, for every member: the standard deviation of log `leaf_rmse`.

        A leaf that is predicted to rounding counts with the rounding error of the target's standard deviation.

        Source: Ma, Yan and Zhang (2023), table IX.
        """
        rounding = jnp.finfo(self.leaf_rmse.dtype).eps * self.y_scaler.scale
        return jnp.nanstd(jnp.log(jnp.maximum(self.leaf_rmse, rounding)), axis=1)

    def root(self, names: Sequence[str] | None = None, *, member: int = 0) -> Branch:
        """A member's tree, as nested nodes to read or to draw (`plots.tree`).

        Args:
            names: the names of the columns of x; by default those of the data frame of the fit, or x[0], x[1], ...
            member: which one.

        Raises:
            ValueError: if there is another number of names than columns, or no such member.
        """
        num_columns = self.encoder.scaler.num_columns
        if names is None:
            names = [f"x[{column}]" for column in range(num_columns)] if self.columns is None else self.columns.names
        if len(names) != num_columns:
            raise ValueError(f"there are {num_columns} columns; got {len(names)} names.")
        tree, leaf_rmse = self._tree_of(member), self.leaf_rmse[member]
        return tree.branch(names, self._labels(), leaf_rmse)

    def text(self, names: Sequence[str] | None = None, *, member: int = 0) -> str:
        """A member's tree as text, a line for every node; the arguments are those of `root`.

        A line has the rows of a node, the std of its residuals, |T| of its best split with the logarithm of its
        corrected p-value, and where it is split the std of the residuals on the right over that on the left, with its
        interval (`USNRT.trees`); of a leaf the root mean square of its training residuals.
        """
        return self.root(names, member=member).text()

    def leaf_table(self, names: Sequence[str] | None = None, *, member: int = 0) -> dict[str, np.ndarray]:
        """The leaves of a member's tree as a table, a list [leaves] for every column: `pandas.DataFrame` takes it.

        Args:
            names: as of `root`.
            member: which one.

        Returns:
            "leaf": its number, as `apply` gives it; "condition": what leads there from the root; "num_rows": its
            training rows; "residual_std": the standard deviation of their residuals by the last test, in the unit of y,
            NaN where there was no test; "rmse": the root mean square of the residuals of the leaf's own networks.

        Raises:
            ValueError: as `root`.
        """
        leaves = self.root(names, member=member).leaves()
        table = {
            name: np.array([getattr(leaf, name) for leaf in leaves])
            for name in ("leaf", "num_rows", "residual_std", "rmse")
        }
        return {"leaf": table.pop("leaf"), "condition": np.array([leaf.path for leaf in leaves]), **table}

    def _tree_of(self, member: int) -> Tree:
        _checks.check_choice("member", member, tuple(range(self.leaf_rmse.shape[0])))
        return jax.tree.map(lambda part: part[member], self.trees)

    def _labels(self) -> dict[int, Sequence[str]]:
        """The categories of every categorical column as they are shown."""
        labels = {} if self.columns is None else dict(enumerate(self.columns.categories))
        return {
            column: labels.get(column) or [f"{value:g}" for value in values.tolist()]
            for column, values in zip(self.encoder.categorical, self.encoder.categories, strict=True)
        }

    def _checked(self, x: Any) -> Float[Array, "n d"]:
        x = _checks.as_matrix("x", x if self.columns is None else self.columns.matrix(x, self.encoder.unseen))
        _checks.check_columns("x", x, self.encoder.scaler.num_columns, "the tree was grown on")
        self.encoder.check_seen(x)
        return x


class _Search(NamedTuple):
    """How splits are looked for."""

    min_leaf: int
    log_significance: float
    center: str
    correction: str
    step: int

    @classmethod
    def of(
        cls,
        preset: str | None,
        num_rows: int,
        *,
        min_leaf: int | str,
        significance: float,
        center: str | None,
        correction: str | None,
        step: int | None,
    ) -> "_Search":
        """The options that were given, and those of the preset in place of None."""
        _checks.check_choice("preset", preset, (None, "paper"))
        paper = preset == "paper"
        is_auto = isinstance(min_leaf, str)
        if is_auto:
            _checks.check_choice("min_leaf", min_leaf, ("auto",))
            min_leaf = max(num_rows // _LEAVES, _LEAST_ROWS)
        _checks.check_at_least("min_leaf", min_leaf, 2)
        _checks.check_fraction("significance", significance)
        if center is None:
            center = "mean" if paper else "median"
        _checks.check_choice("center", center, ("mean", "median"))
        if correction is None:
            correction = "none" if paper else "miller-siegmund"
        _checks.check_choice("correction", correction, ("none", "miller-siegmund", "permutation"))
        if step is None:
            step = 10 if paper else 1
        _checks.check_at_least("step", step, 1)
        if is_auto and num_rows < 2 * min_leaf:
            warnings.warn(
                f"min_leaf='auto' splits {2 * min_leaf} rows and more; of {num_rows} rows the tree is one leaf. Give a "
                "min_leaf, or take variance_network.fit.",
                stacklevel=4,  # past fit and the decorator of its options
            )
        log_significance = math.log(significance)
        return cls(
            min_leaf=min_leaf, log_significance=log_significance, center=center, correction=correction, step=step
        )


class _Training(NamedTuple):
    """How the networks at nodes that are tested are trained, and those in the leaves."""

    splitting: presets.Settings
    num_folds: int
    leaf: presets.Settings


def _num_folds(num_folds: int | None, preset: str | None) -> int:
    """The number that was given, or that of the preset."""
    if num_folds is None:
        return 1 if preset == "paper" else _FOLDS
    _checks.check_at_least("num_folds", num_folds, 1)
    return num_folds


class _Problem(NamedTuple):
    """The training rows."""

    encoder: Encoder
    x: Float[np.ndarray, "n d"]
    codes: Int[np.ndarray, "n d"]
    inputs: Float[Array, "n p"]
    target: Float[Array, " n"]
    ordered: Float[Array, "n c"]
    orders: Int[Array, "c n"]


def _arranged(encoder: Encoder, x: Float[Array, "n d"], y: Float[Array, " n"]) -> tuple[Standardizer, _Problem]:
    """The standardization of the target, and the training rows as the tree and its networks take them."""
    y_scaler, codes, inputs, target, ordered, orders = _arrays_of(encoder, x, y)
    problem = _Problem(
        encoder=encoder,
        x=np.asarray(x),
        codes=np.asarray(codes),
        inputs=inputs,
        target=target,
        ordered=ordered,
        orders=orders,
    )
    return y_scaler, problem


@eqx.filter_jit
def _arrays_of(encoder: Encoder, x: Float[Array, "n d"], y: Float[Array, " n"]) -> tuple:
    """What `_arranged` needs, as one program."""
    # Without continuous columns, one that is constant: it has no split.
    ordered = x[:, np.array(encoder.continuous)] if encoder.continuous else jnp.zeros_like(x[:, :1])
    y_scaler = Standardizer.of(y)
    return y_scaler, encoder.codes(x), encoder(x), y_scaler(y), ordered, levene.feature_orders(ordered)


@partial(jax.jit, static_argnames="number")
def _split_key(key: PRNGKeyArray, number: int) -> tuple[Array, ...]:
    """The key split in so many, as one program."""
    return tuple(jax.random.split(key, number))


@partial(jax.jit, static_argnames="slots")
def _seed_and_keys(key: PRNGKeyArray, slots: int) -> tuple[Array, Array]:
    """A seed for the order of the rows, and a key for every network, as one program."""
    list_key, train_key = jax.random.split(key)
    return jax.random.bits(list_key), jax.random.split(train_key, slots)


class _Lists(NamedTuple):
    """The rows of nodes, to train on and to stop by: padded lists of row numbers, and how long they are."""

    train: Int[Array, "*k m"]
    num_train: Int[Array, "*k"]
    validation: Int[Array, "*k v"]
    num_validation: Int[Array, "*k"]


class _Growing(NamedTuple):
    """A tree that grows: its nodes, the root first, and the training rows in each."""

    nodes: list[Node]
    rows: list[np.ndarray]

    def add(self, rows: np.ndarray, problem: _Problem, *, residual_std: float = math.nan) -> None:
        """A new node with these rows."""
        num_categories = max((part.shape[0] for part in problem.encoder.categories), default=1)
        node = Node.new(len(rows), num_categories, problem.x.dtype)
        self.nodes.append(node.updated(residual_std=residual_std))
        self.rows.append(rows)


def _grow(
    problem: _Problem, search: _Search, training: _Training, num_members: int, key: PRNGKeyArray
) -> list[_Growing]:
    """Every member's tree. The networks of a level's nodes are trained at once."""
    trees = [_Growing([], []) for _ in range(num_members)]
    for tree in trees:
        tree.add(np.arange(problem.target.shape[0]), problem)
    slots = num_members * _slots(problem, search)
    frontier = [(tree, 0) for tree in trees]
    while frontier := [(tree, place) for tree, place in frontier if len(tree.rows[place]) >= 2 * search.min_leaf]:
        key, train_key, *search_keys = _split_key(key, 2 + num_members)
        rows = [tree.rows[place] for tree, place in frontier]
        residuals = _split_residuals(problem, training, rows, slots, train_key)
        below = []
        for tree, search_key in zip(trees, search_keys, strict=True):
            mine = [(place, part) for (owner, place), part in zip(frontier, residuals, strict=True) if owner is tree]
            # A member may be grown before the others are.
            below += [(tree, place) for place in _split(problem, search, tree, mine, search_key)] if mine else []
        frontier = below
    return trees


def _split(
    problem: _Problem, search: _Search, tree: _Growing, tested: list[tuple[int, np.ndarray]], key: PRNGKeyArray
) -> list[int]:
    """Split the tested nodes of a tree where that is significant; the places of the new nodes."""
    residuals = np.zeros(problem.target.shape, problem.target.dtype)
    nodes = np.full(residuals.shape, -1)
    for number, (place, part) in enumerate(tested):
        residuals[tree.rows[place]], nodes[tree.rows[place]] = part, number
    new = []
    for (place, part), best in zip(tested, _best_splits(problem, search, residuals, nodes, key), strict=True):
        node = tree.nodes[place].updated(statistic=best.statistic, log_p=best.log_p, residual_std=part.std(ddof=1))
        if best.feature >= 0 and best.log_p <= search.log_significance:
            children = len(tree.nodes), len(tree.nodes) + 1
            node = node.updated(feature=best.feature, threshold=best.threshold, children=children)
            if best.left_categories is not None:
                padding = node.left_categories.shape[0] - len(best.left_categories)
                node = node.updated(left_categories=np.pad(best.left_categories, (0, padding)))
            rows = tree.rows[place]
            left = best.goes_left(problem, rows)
            sides = np.full(residuals.shape, -1)
            sides[rows] = np.where(left, 0, 1)
            ratio, *interval = levene.std_ratio(residuals, sides, best.critical_value)
            node = node.updated(std_ratio=ratio, std_ratio_interval=jnp.stack(interval))
            for side in (left, ~left):
                # Until it is tested itself.
                tree.add(rows[side], problem, residual_std=part[side].std(ddof=1))
            new += children
        tree.nodes[place] = node
    return new


class _Split(NamedTuple):
    """The best split of a node: of a continuous column by a threshold, or of a categorical one by its categories."""

    statistic: float
    log_p: float
    critical_value: float
    feature: int
    threshold: float
    left_categories: np.ndarray | None

    def goes_left(self, problem: _Problem, rows: np.ndarray) -> np.ndarray:
        if self.left_categories is None:
            return problem.x[rows, self.feature] <= self.threshold
        return self.left_categories[problem.codes[rows, self.feature]]


def _best_splits(
    problem: _Problem, search: _Search, residuals: np.ndarray, nodes: np.ndarray, key: PRNGKeyArray
) -> list[_Split]:
    """The best split of every node over all columns, with its p-value corrected."""
    num_nodes = nodes.max() + 1
    cuts = _best_cuts(problem, search, residuals, nodes)
    subsets = [
        [_best_subset(problem, search, residuals, nodes == k, column) for k in range(num_nodes)]
        for column in range(len(problem.encoder.categorical))
    ]
    log_p, critical_value = _corrected_log_p(problem, search, residuals, nodes, cuts, subsets, key)
    best = []
    for k in range(num_nodes):
        feature = problem.encoder.continuous[cuts.feature[k]] if cuts.feature[k] >= 0 else -1
        cut = _Split(
            statistic=float(cuts.statistic[k]),
            log_p=float(log_p[k]),
            critical_value=float(critical_value[k]),
            feature=feature,
            threshold=float(cuts.threshold[k]),
            left_categories=None,
        )
        by_categories = [
            cut._replace(
                statistic=float(of_nodes[k].statistic),
                feature=column if of_nodes[k].num_left else -1,
                threshold=np.inf,
                left_categories=of_nodes[k].left,
            )
            for column, of_nodes in zip(problem.encoder.categorical, subsets, strict=True)
        ]
        best.append(max([cut, *by_categories], key=lambda split: split.statistic))
    return best


def _best_cuts(problem: _Problem, search: _Search, residuals: np.ndarray, nodes: np.ndarray) -> levene.Split:
    """The best threshold of every node over the continuous columns."""
    splits = levene.best_splits(problem.ordered, residuals, nodes, **_cut_options(problem, search))
    return jax.tree.map(np.asarray, splits)


def _cut_options(problem: _Problem, search: _Search) -> dict[str, Any]:
    """The options of the searches over thresholds."""
    return {
        "num_nodes": _slots(problem, search),
        "min_leaf": search.min_leaf,
        "center": search.center,
        "step": search.step,
        "orders": problem.orders,
    }


def _best_subset(
    problem: _Problem, search: _Search, residuals: np.ndarray, is_in: np.ndarray, position: int
) -> levene.Subset:
    """The best subset of the categories of one column, for the node that some rows are in."""
    column, categories = problem.encoder.categorical[position], problem.encoder.categories[position]
    subset = levene.best_subset(
        np.where(is_in, problem.codes[:, column], -1),
        residuals,
        num_categories=categories.shape[0],
        min_leaf=search.min_leaf,
        center=search.center,
    )
    return jax.tree.map(np.asarray, subset)


def _corrected_log_p(
    problem: _Problem,
    search: _Search,
    residuals: np.ndarray,
    nodes: np.ndarray,
    cuts: levene.Split,
    subsets: list[list[levene.Subset]],
    key: PRNGKeyArray,
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm of the p-value of every node's largest |T|, corrected for the number of splits.

    And the |T| with the p-value 1 - `_CONFIDENCE_LEVEL`: of permutations, which have none, that of the bound.
    """
    num_nodes, slots = nodes.max() + 1, len(cuts.statistic)
    # As many as there can be, so that all levels share a compiled program; no splits where there is no node.
    filled = lambda values, value: np.pad(values, ((0, 0), (0, slots - num_nodes)), constant_values=value)
    by_subset, of_subsets = (
        np.array([[getattr(subset, name) for subset in of_nodes] for of_nodes in subsets]).reshape(-1, num_nodes)
        for name in ("statistic", "log_num_splits")
    )
    by_subset, of_subsets = filled(by_subset, 0), filled(of_subsets, -np.inf)
    largest = np.max([cuts.statistic, *by_subset], axis=0)
    counts = np.concatenate([cuts.log_num_splits, of_subsets.T], axis=1)
    is_ordered = np.arange(counts.shape[1]) < cuts.log_num_splits.shape[1]
    if search.correction == "none":  # a single split
        counts, is_ordered = np.zeros_like(counts[:, :1]), np.zeros(1, bool)
    options = {"num_rows": cuts.num_rows, "min_leaf": search.min_leaf}
    bound = partial(multiplicity.miller_siegmund, **options)
    critical_value = multiplicity.miller_siegmund_quantile(
        math.log(1 - _CONFIDENCE_LEVEL), log_num_splits=counts, ordered=is_ordered, **options
    )
    if search.correction != "permutation":
        log_p = bound(largest, log_num_splits=counts, ordered=is_ordered)
    else:
        log_p = multiplicity.permutation_log_p(
            problem.ordered, residuals, nodes, key=key, **_cut_options(problem, search)
        )
        if subsets:  # Bonferroni over the two kinds of columns
            by_bound = bound(by_subset.max(axis=0), log_num_splits=of_subsets.T, ordered=np.zeros(len(subsets), bool))
            log_p = np.minimum(math.log(2) + np.minimum(log_p, by_bound), 0)
    return np.asarray(log_p)[:num_nodes], np.asarray(critical_value)[:num_nodes]


def _slots(problem: _Problem, search: _Search) -> int:
    """How many nodes of one level can be tested at most: so many are searched, for one compiled program."""
    return max(problem.target.shape[0] // (2 * search.min_leaf), 1)


def _split_residuals(
    problem: _Problem, training: _Training, rows: list[np.ndarray], slots: int, key: PRNGKeyArray
) -> list[np.ndarray]:
    """The residuals of networks trained on the rows of every node (section IV-B), out of fold if there are folds."""
    seed, keys = _seed_and_keys(key, slots * training.num_folds)
    if training.num_folds > 1:
        lists = _divide_in_folds(rows, slots, training.num_folds, problem.target.shape[0], int(seed))
    else:
        lists = _divide(rows, slots, training.splitting.validation_fraction, problem.target.shape[0], int(seed))
    parts = _train_splitting(problem.inputs, problem.target, lists, keys, training.splitting)
    parts, lists = jax.tree.map(np.asarray, (parts, lists))
    tested = [(parts[1], lists.validation, lists.num_validation)]
    if training.num_folds == 1:
        tested.append((parts[0], lists.train, lists.num_train))
    whole = np.zeros(problem.target.shape, problem.target.dtype)
    found = []
    for node, node_rows in enumerate(rows):
        # Nodes of several members may share rows; each is read before the next one is written.
        for k in range(node * training.num_folds, (node + 1) * training.num_folds):
            for part, numbers, count in tested:
                whole[numbers[k, : count[k]]] = part[k, : count[k]]
        found.append(whole[node_rows])
    return found


def _divide_in_folds(rows: list[np.ndarray], slots: int, num_folds: int, num_rows: int, seed: int) -> _Lists:
    """The rows of every node in random folds: a list for each fold of a node, with the fold to stop by."""
    rng = np.random.default_rng(seed)
    train, validation = [], []
    for part in rows:
        folds = np.array_split(rng.permutation(part), num_folds)
        # Of fewer rows than folds nothing is trained for those that are empty.
        validation += folds
        train += [
            np.concatenate([*folds[:k], *folds[k + 1 :]]) if len(folds[k]) else folds[k] for k in range(num_folds)
        ]
    return _padded(train, validation, slots * num_folds, (num_rows - num_rows // num_folds, -(-num_rows // num_folds)))


def _divide(
    rows: list[np.ndarray],
    slots: int,
    fraction: float,
    num_rows: int,
    seed: int,
    held_out: Bool[np.ndarray, " n"] | None = None,
) -> _Lists:
    """The rows of every node in a random order, the first ones to train on and the others to stop by.

    These are those that are held out, where some are, and a random fraction of a node that has none of them, or only
    such. So that all levels share a few compiled programs, the lists are as many as `slots`, the last of them without
    rows, and as long as all rows or as a quarter, a sixteenth, ... of them.
    """
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(part) for part in rows]
    sizes = [num_train(len(order), fraction) for order in orders]
    if held_out is not None:
        orders = [order[np.argsort(held_out[order], kind="stable")] for order in orders]
        known = [np.count_nonzero(~held_out[order]) for order in orders]
        sizes = [k if 0 < k < len(o) else size for k, o, size in zip(known, orders, sizes, strict=True)]
    train, validation = zip(*(np.split(order, [size]) for order, size in zip(orders, sizes, strict=True)), strict=True)
    return _padded(train, validation, slots, (num_train(num_rows, fraction), num_rows - num_train(num_rows, fraction)))


def _padded(train: Sequence[np.ndarray], validation: Sequence[np.ndarray], slots: int, most: tuple[int, int]) -> _Lists:
    """Lists of rows as arrays: as many as `slots`, and as long as `most`, or a quarter, a sixteenth, ... of it."""
    padded = []
    for part, length in zip((train, validation), most, strict=True):
        counts = [len(numbers) for numbers in part] + [0] * (slots - len(part))
        while -(-length // 4) >= max(counts):
            length = -(-length // 4)
        lists = np.zeros((slots, length), np.int32)
        for padded_numbers, numbers in zip(lists, part, strict=False):
            padded_numbers[: len(numbers)] = numbers
        padded += [jax.device_put(lists), jax.device_put(np.array(counts, np.int32))]
    return _Lists(*padded)


@eqx.filter_jit
def _train_splitting(inputs, target, lists: _Lists, keys, settings: presets.Settings):
    """The residuals of every node's rows, those to train on and those to stop by, padded as the lists are."""

    def one(lists: _Lists, key):
        train, validation = ((inputs[part], target[part]) for part in (lists.train, lists.validation))
        init_key, train_key = jax.random.split(key)
        network = new_network(inputs, settings.hidden)("scalar", key=init_key)
        optimum = _trainer(lists, settings)(squared_error, network, train, validation, key=train_key)
        return tuple(y - jax.vmap(optimum.params)(x) for x, y in (train, validation))

    return over_runs(one)(lists, keys)


def _stack_trees(trees: list[_Growing], unit: Float[Array, ""]) -> Tree:
    """The trees of all members as one, the stds of the residuals in the unit of the target."""
    size = max(len(tree.nodes) for tree in trees)
    tree = stack_on_host([Tree.of(tree.nodes, size) for tree in trees])
    return eqx.tree_at(lambda tree: tree.residual_std, tree, unit * tree.residual_std)


class _Leaves(NamedTuple):
    """What is known of all leaves, [m, leaves]: their networks, root mean square residuals and widenings."""

    optima: Optimum
    rmse: Float[Array, "m leaves"]
    widening: Widening | None


def _held_out(problem: _Problem, settings: presets.Settings, key: PRNGKeyArray) -> Bool[np.ndarray, " n"] | None:
    """The rows that no member's leaves are trained on; None where nothing is widened by them."""
    if not settings.calibrate:
        return None
    number = problem.target.shape[0]
    order = np.random.default_rng(int(jax.random.bits(key))).permutation(number)
    return np.isin(np.arange(number), order[num_train(number, settings.validation_fraction) :])


def _train_leaves(
    problem: _Problem,
    training: _Training,
    trees: list[_Growing],
    min_leaf: int,
    held_out: Bool[np.ndarray, " n"] | None,
    key: PRNGKeyArray,
) -> _Leaves:
    """The networks of all leaves, and what is known of them."""
    leaves = [[rows for node, rows in zip(*tree, strict=True) if node.feature < 0] for tree in trees]
    flat = [rows for of_tree in leaves for rows in of_tree]
    # As many as there can be at most.
    slots = len(trees) * max(problem.target.shape[0] // min_leaf, 1)
    seed, keys = _seed_and_keys(key, slots)
    lists = _divide(flat, slots, training.leaf.validation_fraction, problem.target.shape[0], int(seed), held_out)
    found = _train_variance(problem.inputs, problem.target, lists, keys, training.leaf)
    # Trees with fewer leaves than others are filled up.
    counts = np.array([len(of_tree) for of_tree in leaves])
    place = np.arange(counts.max())
    is_there = place < counts[:, None]
    number = (np.cumsum(counts) - counts)[:, None] + np.where(is_there, place, 0)
    return _by_leaf(found, jnp.asarray(number), jnp.asarray(is_there), training.leaf.calibrate)


class _HeldOut(NamedTuple):
    """The rows of leaves that their networks were not trained on, padded, and which of them there are."""

    variance: Float[Array, "*k v"]
    errors: Float[Array, "*k v"]
    included: Bool[Array, "*k v"]

    def widening(self) -> Widening:
        """That of these rows."""
        return Widening.of(self.variance, self.errors, included=self.included)


@eqx.filter_jit
def _by_leaf(found: tuple, number: Int[Array, "m leaves"], is_there: Bool[Array, "m leaves"], widen: bool) -> _Leaves:
    """What every leaf has, [m, leaves]: of those there are, the one of its number."""
    optima, rmse, held_out = jax.tree.map(lambda leaf: leaf[number] if eqx.is_array(leaf) else leaf, found)
    rmse = jnp.where(is_there, rmse, jnp.nan)
    if not widen:
        return _Leaves(optima, rmse, None)
    held_out = held_out._replace(included=held_out.included & is_there[..., None])
    of_leaves = jax.vmap(jax.vmap(_HeldOut.widening))(held_out)
    of_trees = jax.vmap(_HeldOut.widening)(jax.tree.map(lambda part: part.reshape(len(part), -1), held_out))
    # Of few rows a leaf has no widening of its own.
    many = jnp.sum(held_out.included, axis=-1) >= _ENOUGH_HELD_OUT
    choose = lambda leaf, tree: jnp.where(many, leaf, tree[:, None])
    return _Leaves(optima, rmse, jax.tree.map(choose, of_leaves, of_trees))


@eqx.filter_jit
def _train_variance(inputs, target, lists: _Lists, keys, settings: presets.Settings):
    """The optimum of every leaf's networks, the root mean square of the residuals, and the held-out rows."""

    def one(lists: _Lists, key):
        train, validation = ((inputs[part], target[part]) for part in (lists.train, lists.validation))
        new = new_network(inputs, settings.hidden)
        new_variance = partial(new, activation=settings.variance_activation)
        counts = lists.num_train, lists.num_validation
        fit = _trainer(lists, settings)
        anew = not settings.calibrate
        optimum = alternate((train, validation), counts, new, new_variance, fit, key, _ROUNDS, anew=anew)
        moments = [jax.vmap(optimum.params)(x) for x, _ in (train, validation)]
        errors = [y - mean for (_, y), (mean, _) in zip((train, validation), moments, strict=True)]
        included = [jnp.arange(e.shape[0]) < count for e, count in zip(errors, counts, strict=True)]
        total = sum(jnp.sum(e**2, where=there) for e, there in zip(errors, included, strict=True))
        held_out = _HeldOut(moments[1][1], errors[1], included[1])
        return optimum, jnp.sqrt(total / (counts[0] + counts[1])), held_out

    return over_runs(one)(lists, keys)


def _trainer(lists: _Lists, settings: presets.Settings):
    """How all these networks are trained, on the rows that there are."""
    train = trainer(settings, what="usnrt.fit", instead=TAKE_ANOTHER)
    return partial(train, num_rows=(lists.num_train, lists.num_validation))


@eqx.filter_jit
def _leaves(fitted: USNRT, tree: Tree, x: Float[Array, "n d"]) -> Int[Array, " n"]:
    """The number of the leaf of one tree that each row falls into."""
    codes = fitted.encoder.codes(x)
    is_categorical = jnp.isin(jnp.arange(x.shape[1]), jnp.array(fitted.encoder.categorical, int))
    return jax.vmap(lambda row, codes: tree.leaf_of(row, codes, is_categorical))(x, codes)


@eqx.filter_jit
def _predict(fitted: USNRT, x: Float[Array, "n d"]) -> Normal | Mixture:
    means, variances = _moments(fitted, x)
    if means.shape[0] == 1:
        return as_normal((means[0], variances[0]), fitted.y_scaler)
    return as_mixture(means, variances, fitted.widening, fitted.y_scaler)


def _moments(fitted: USNRT, x: Float[Array, "n d"]) -> tuple[Float[Array, "m n"], Float[Array, "m n"]]:
    """The mean and the variance of every member, of the standardized target."""
    inputs = fitted.encoder(x)
    networks, fixed = eqx.partition(fitted.networks, eqx.is_array)
    numbers = jnp.arange(fitted.leaf_rmse.shape[-1])

    def member(tree: Tree, of_leaves):
        leaf = _leaves(fitted, tree, x)

        def place(moments, part):
            number, (network, widening) = part
            mean, variance = jax.vmap(eqx.combine(network, fixed))(inputs)
            found = mean, widened(variance, widening)
            return jax.tree.map(lambda new, old: jnp.where(leaf == number, new, old), found, moments), None

        nothing = jnp.zeros(x.shape[0], inputs.dtype)
        moments, _ = lax.scan(place, (nothing, nothing), (numbers, of_leaves))
        return moments

    return jax.vmap(member)(fitted.trees, (networks, fitted.leaf_widening))


@eqx.filter_jit
def _widening_of_mixture(fitted: USNRT, x: Float[Array, "n d"], target: Float[Array, " n"]) -> Widening:
    """That of held-out rows, of the standardized target."""
    return Widening.of_mixture(*_moments(fitted, x), target)
