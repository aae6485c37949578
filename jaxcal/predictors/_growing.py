"""How USNRT's trees grow: a node is split where the spread of the residuals differs most between the sides."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks, _random, progress
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, stacked
from jaxcal.frames.columns import Columns
from jaxcal.frames.preprocessing import LogTails, Standardizer, input_scaler
from jaxcal.functional import levene, multiplicity
from jaxcal.networks import presets
from jaxcal.predictors._tree import Node, Tree

# Ma, Yan & Zhang (2023), section V-A: a leaf has at least a tenth of the rows, or this number if that is more. Fewer
# are enough where the networks of a leaf start from the networks of all rows.
_LEAVES, _LEAST_ROWS_OF_PAPER, _LEAST_ROWS = 10, 1000, 200
# Number of folds of the networks whose residuals decide on the splits.
FOLDS = 5
# The level of the intervals of std ratios.
_CONFIDENCE_LEVEL = 0.95


class GrowingData(NamedTuple):
    """The training rows: as a table, as inputs of networks, and as sorted columns for the search of thresholds."""

    columns: Columns
    x: Float[np.ndarray, "n d"]
    codes: Int[np.ndarray, "n d"]
    inputs: Float[Array, "n p"]
    target: Float[Array, " n"]
    ordered: Float[Array, "n c"]
    orders: Int[Array, "c n"]


class NetworkScalers(NamedTuple):
    """The standardization of the networks' inputs, and of the target."""

    x: Standardizer | LogTails
    y: Standardizer


def arranged(
    columns: Columns, table: Float[Array, "n c"], y: Float[Array, " n"], *, log_tails: bool
) -> tuple[NetworkScalers, GrowingData]:
    """The standardizations, and the training rows as the tree and its networks take them."""
    scalers, codes, *arrays = _arrays_of(columns, table, y, log_tails)
    return scalers, GrowingData(columns, np.asarray(table), np.asarray(codes), *arrays)


@numpy_or_jit
def _arrays_of(columns: Columns, table: Float[AnyArray, "n c"], y: Float[AnyArray, " n"], log_tails: bool) -> tuple:
    """The arrays of `arranged`."""
    # If there is no column of numbers, a constant one stands in: it has no split.
    ordered = table[:, np.array(columns.ordered)] if columns.ordered else namespace(table).zeros_like(table[:, :1])
    inputs = columns.inputs(table)
    x_scaler = input_scaler(inputs, columns.indicators, log_tails=log_tails)
    scalers = NetworkScalers(x_scaler, Standardizer.of(y))
    orders = levene.feature_orders(ordered)
    return scalers, columns.codes(table), x_scaler(inputs), scalers.y(y), ordered, orders


class Search(NamedTuple):
    """How the splits of a node are searched and tested, and by which residuals.

    The values here are the defaults.

    Attributes:
        min_leaf: the least number of rows in a leaf.
        significance: the p-value up to which a node is split.
        center: what Levene's test takes deviations from, "mean" or "median".
        correction: of the p-value for the number of splits that were tried.
        step: every step-th cut is tried.
        num_folds: number of folds of the networks that give out-of-fold residuals; 1 for a network at every node.
        hidden: widths of the hidden layers of these networks.
    """

    min_leaf: int = _LEAST_ROWS
    significance: float = 0.01
    center: str = "median"
    correction: str = "miller-siegmund"
    step: int = 1
    num_folds: int = FOLDS
    hidden: Sequence[int] = presets.DEFAULT.hidden

    @classmethod
    def of(
        cls,
        preset: str | None,
        num_rows: int,
        num_columns: int,
        min_leaf: int | str,
        **options: int | float | str | Sequence | None,
    ) -> "Search":
        """The given options, and the preset's values in place of None."""
        paper_options = {"center": "mean", "correction": "none", "step": 10, "num_folds": 1}
        paper = cls(_LEAST_ROWS_OF_PAPER, hidden=presets.usnrt(num_columns).hidden, **paper_options)
        search = presets.settle({None: cls(), "paper": paper}, preset, **options)
        is_auto = isinstance(min_leaf, str)
        if is_auto:
            _checks.check_choice("min_leaf", min_leaf, ("auto",))
            min_leaf = max(num_rows // _LEAVES, search.min_leaf)
        _checks.check_at_least("min_leaf", min_leaf, 2)
        if is_auto and num_rows < 2 * min_leaf:
            _checks.warn(
                f"min_leaf='auto' splits {2 * min_leaf} rows and more; of {num_rows} rows the tree is one leaf. Give a "
                "min_leaf, or take variance_network.fit."
            )
        return search._replace(min_leaf=min_leaf)

    def slots(self, num_rows: int) -> int:
        """The most nodes of one level that can be tested.

        Searches have this size at every level, so that all levels share a compiled program.
        """
        return max(num_rows // (2 * self.min_leaf), 1)


class Growing(NamedTuple):
    """A tree that grows: its nodes, the root first, and the training rows in each."""

    nodes: list[Node]
    rows: list[np.ndarray]

    def leaves(self) -> list[np.ndarray]:
        """The rows of every leaf, in the order of the nodes."""
        return [rows for node, rows in zip(*self, strict=True) if node.feature < 0]

    def add(self, rows: np.ndarray, problem: GrowingData, *, residual_std: ArrayLike = math.nan) -> None:
        """A new node with these rows."""
        num_categories = max(problem.columns.sizes, default=1)
        node = Node.new(len(rows), num_categories, problem.x.dtype)
        self.nodes.append(node.updated(residual_std=residual_std))
        self.rows.append(rows)


def grow(
    problem: GrowingData,
    search: Search,
    residuals_of: Callable[[list[int], list[np.ndarray], PRNGKeyArray | None], list[np.ndarray]],
    num_members: int,
    key: PRNGKeyArray | None,
) -> list[Growing]:
    """Every member's tree; all trees grow level by level.

    `residuals_of(members, rows, key)` gives the residuals of the nodes of one level, from the member and the rows of
    each node. The key is None where neither the residuals nor the test draw anything: the program that splits keys need
    not be compiled then.
    """
    trees = [Growing([], []) for _ in range(num_members)]
    for tree in trees:
        tree.add(np.arange(problem.target.shape[0]), problem)
    frontier = [(member, 0) for member in range(num_members)]
    with progress.work("usnrt.fit: nodes tested", None) as tested:
        while frontier := [
            (member, place) for member, place in frontier if len(trees[member].rows[place]) >= 2 * search.min_leaf
        ]:
            number = 2 + num_members
            key, train_key, *search_keys = [None] * number if key is None else _random.split(key, number)
            members = [member for member, _ in frontier]
            residuals = residuals_of(members, [trees[member].rows[place] for member, place in frontier], train_key)
            below = []
            for member, (tree, search_key) in enumerate(zip(trees, search_keys, strict=True)):
                mine = [
                    (place, part) for (owner, place), part in zip(frontier, residuals, strict=True) if owner == member
                ]
                # A member's tree may be complete before the others.
                below += [(member, place) for place in _split(problem, search, tree, mine, search_key)] if mine else []
            frontier = below
            tested.advance(len(members))
    return trees


def _split(
    problem: GrowingData, search: Search, tree: Growing, tested: list[tuple[int, np.ndarray]], key: PRNGKeyArray | None
) -> list[int]:
    """Split the tested nodes of a tree where the test is significant; return the places of the new nodes."""
    residuals = np.zeros(problem.target.shape, problem.target.dtype)
    nodes = np.full(residuals.shape, -1, np.int32)
    for number, (place, part) in enumerate(tested):
        residuals[tree.rows[place]], nodes[tree.rows[place]] = part, number
    new = []
    for (place, part), best in zip(tested, _best_splits(problem, search, residuals, nodes, key), strict=True):
        node = tree.nodes[place].updated(statistic=best.statistic, log_p=best.log_p, residual_std=part.std(ddof=1))
        if best.feature >= 0 and best.log_p <= math.log(search.significance):
            children = len(tree.nodes), len(tree.nodes) + 1
            node = node.updated(feature=best.feature, threshold=best.threshold, children=children)
            if best.left_categories is not None:
                padding = node.left_categories.shape[0] - len(best.left_categories)
                node = node.updated(left_categories=np.pad(best.left_categories, (0, padding)))
            rows = tree.rows[place]
            left = best.goes_left(problem, rows)
            sides = np.full(residuals.shape, -1, np.int32)
            sides[rows] = np.where(left, 0, 1)
            # The std of the residuals on the right over the std on the left, with its interval.
            ratio, *interval = levene.std_ratio(residuals, sides, best.critical_value)
            node = node.updated(std_ratio=ratio, std_ratio_interval=np.stack(interval))
            for side in (left, ~left):
                # This std stands until the child is tested itself.
                tree.add(rows[side], problem, residual_std=part[side].std(ddof=1))
            new += children
        tree.nodes[place] = node
    return new


class _NodeSplit(NamedTuple):
    """The best split of a node: of a continuous column by a threshold, or of a categorical one by its categories."""

    statistic: float
    log_p: float
    critical_value: float
    feature: int
    threshold: float
    left_categories: np.ndarray | None

    def goes_left(self, problem: GrowingData, rows: np.ndarray) -> np.ndarray:
        if self.left_categories is None:
            return problem.x[rows, self.feature] <= self.threshold
        return self.left_categories[problem.codes[rows, self.feature]]


def _best_splits(
    problem: GrowingData, search: Search, residuals: np.ndarray, nodes: np.ndarray, key: PRNGKeyArray | None
) -> list[_NodeSplit]:
    """The best split of every node over all columns, with its corrected p-value."""
    num_nodes = nodes.max() + 1
    cuts = _best_cuts(problem, search, residuals, nodes)
    subsets = [
        [_best_subset(problem, search, residuals, nodes == k, column) for k in range(num_nodes)]
        for column in range(len(problem.columns.categorical))
    ]
    log_p, critical_value = _corrected_log_p(problem, search, residuals, nodes, cuts, subsets, key)
    best = []
    for k in range(num_nodes):
        feature = problem.columns.ordered[cuts.feature[k]] if cuts.feature[k] >= 0 else -1
        cut = _NodeSplit(
            statistic=float(cuts.statistic[k]),
            log_p=float(log_p[k]),
            critical_value=float(critical_value[k]),
            feature=feature,
            threshold=float(cuts.threshold[k]),
            left_categories=None,
        )
        category_splits = [
            cut._replace(
                statistic=float(node_subsets[k].statistic),
                feature=column if node_subsets[k].num_left else -1,
                threshold=np.inf,
                left_categories=node_subsets[k].left,
            )
            for column, node_subsets in zip(problem.columns.categorical, subsets, strict=True)
        ]
        best.append(max([cut, *category_splits], key=lambda split: split.statistic))
    return best


def _best_cuts(problem: GrowingData, search: Search, residuals: np.ndarray, nodes: np.ndarray) -> levene.LeveneSplit:
    """The best threshold of every node over the continuous columns."""
    splits = levene.best_splits(problem.ordered, residuals, nodes, **_cut_options(problem, search))
    return jax.tree.map(np.asarray, splits)


def _cut_options(problem: GrowingData, search: Search) -> dict[str, Any]:
    """The options of the searches over thresholds."""
    return {
        "num_nodes": search.slots(problem.target.shape[0]),
        "min_leaf": search.min_leaf,
        "center": search.center,
        "step": search.step,
        "orders": problem.orders,
    }


def _best_subset(
    problem: GrowingData, search: Search, residuals: np.ndarray, is_in: np.ndarray, position: int
) -> levene.Subset:
    """The best subset of the categories of one column, for the node that contains the rows `is_in`."""
    column, num_categories = problem.columns.categorical[position], problem.columns.sizes[position]
    categories = np.where(is_in, problem.codes[:, column], -1)
    options = {"num_categories": num_categories, "min_leaf": search.min_leaf, "center": search.center}
    subset = levene.best_subset(categories, residuals, **options)
    return jax.tree.map(np.asarray, subset)


def _corrected_log_p(
    problem: GrowingData,
    search: Search,
    residuals: np.ndarray,
    nodes: np.ndarray,
    cuts: levene.LeveneSplit,
    subsets: list[list[levene.Subset]],
    key: PRNGKeyArray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm of the p-value of every node's largest |T|, corrected for the number of splits.

    The second result is the |T| whose p-value is 1 - `_CONFIDENCE_LEVEL`. Permutations have no such |T|: it is the
    bound's.
    """
    num_nodes, slots, dtype = nodes.max() + 1, len(cuts.statistic), cuts.statistic.dtype
    # Filled up to the most nodes of a level, so that all levels share a compiled program. The filling has no splits.
    filled = lambda values, value: np.pad(values, ((0, 0), (0, slots - num_nodes)), constant_values=value)
    subset_statistics, subset_counts = (
        np.array([[getattr(one, name) for one in node_subsets] for node_subsets in subsets], dtype).reshape(
            -1, num_nodes
        )
        for name in ("statistic", "log_num_splits")
    )
    subset_statistics, subset_counts = filled(subset_statistics, 0), filled(subset_counts, -np.inf)
    # max |T| over all columns, and the log number of splits of each column: together they give the bound.
    largest = np.max([cuts.statistic, *subset_statistics], axis=0)
    counts = np.concatenate([cuts.log_num_splits, subset_counts.T], axis=1)
    is_ordered = np.arange(counts.shape[1]) < cuts.log_num_splits.shape[1]
    if search.correction == "none":  # a single split
        counts, is_ordered = np.zeros_like(counts[:, :1]), np.zeros(1, bool)
    log_p, critical_value = _bounds(largest, cuts.num_rows, search.min_leaf, counts, is_ordered)
    if search.correction == "permutation":
        assert key is not None  # `fit` gives a key where something is drawn
        log_p = multiplicity.permutation_log_p(
            problem.ordered, residuals, nodes, key=key, **_cut_options(problem, search)
        )
        if subsets:  # Bonferroni over the two kinds of columns
            is_ordered = np.zeros(len(subsets), bool)
            subset_log_p, _ = _bounds(
                subset_statistics.max(axis=0), cuts.num_rows, search.min_leaf, subset_counts.T, is_ordered
            )
            log_p = np.minimum(math.log(2) + np.minimum(log_p, subset_log_p), 0)
    return np.asarray(log_p)[:num_nodes], np.asarray(critical_value)[:num_nodes]


@numpy_or_jit
def _bounds(statistic, num_rows, min_leaf: int, log_num_splits, ordered) -> tuple[AnyArray, AnyArray]:
    """The bound for the log p-value of |T|, and the |T| whose bound is 1 - `_CONFIDENCE_LEVEL`."""
    options = {"num_rows": num_rows, "min_leaf": min_leaf, "log_num_splits": log_num_splits, "ordered": ordered}
    log_level = math.log(1 - _CONFIDENCE_LEVEL)
    return (
        multiplicity.miller_siegmund(statistic, **options),
        multiplicity.miller_siegmund_quantile(log_level, **options),
    )


def stack_trees(trees: list[Growing], unit: Float[Array, ""]) -> Tree:
    """The trees of all members as one, with the stds of residuals in the unit of the target."""
    size = max(len(tree.nodes) for tree in trees)
    tree = stacked([Tree.of(tree.nodes, size) for tree in trees])
    return eqx.tree_at(lambda tree: tree.residual_std, tree, in_unit(tree.residual_std, unit))


@numpy_or_jit
def in_unit(values: Float[AnyArray, "*shape"], unit: Float[AnyArray, ""]) -> Float[AnyArray, "*shape"]:
    """Standardized values in the unit of the target."""
    return unit * values
