"""Trees of scikit-learn and NGBoost as NumPy arrays, which can be saved and predict the same bit by bit.

Rows go to the left where their value is at most the threshold. As in the packages, the trees take float32, and the
trees of gradient boosting float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

# The number of rows that go down the trees together.
_AT_ONCE = 256


@dataclass(frozen=True)
class Nodes:
    """The nodes of several trees, one tree after the other.

    Attributes:
        first: the number of the root of each tree [T].
        children: the numbers of the nodes on the right and on the left [nodes, 2]; a leaf has its own number.
        feature: the column that a node is split by [nodes]; -1 in a leaf.
        threshold: rows with a value up to it go to the left [nodes].
        value: what a node predicts [nodes].
        missing_left: whether rows with a missing value go to the left [nodes]; None where missing values are refused.
    """

    first: np.ndarray
    children: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    missing_left: np.ndarray | None = None

    @classmethod
    def of(cls, trees: Sequence[Any]) -> "Nodes":
        """The nodes of scikit-learn's trees of one target."""
        parts = [(tree.children_left, tree.children_right, tree.feature, tree.threshold) for tree in trees]
        return cls._joined(parts, [tree.value[:, 0, 0] for tree in trees])

    @classmethod
    def of_boosting(cls, trees: Sequence[np.ndarray]) -> "Nodes":
        """The nodes of scikit-learn's gradient boosting, whose trees are arrays of records."""
        parts = []
        for nodes in trees:
            is_leaf = nodes["is_leaf"] != 0
            children = (np.where(is_leaf, -1, nodes[side].astype(int)) for side in ("left", "right"))
            parts.append((*children, nodes["feature_idx"], nodes["num_threshold"]))
        joined = cls._joined(parts, [nodes["value"] for nodes in trees])
        return replace(joined, missing_left=np.concatenate([nodes["missing_go_to_left"] != 0 for nodes in trees]))

    @classmethod
    def _joined(cls, parts: Sequence[tuple], values: Sequence[np.ndarray]) -> "Nodes":
        """The nodes of trees whose leaves have the children -1."""
        sizes = np.array([len(value) for value in values])
        first = np.cumsum(sizes) - sizes
        left, right, feature, threshold = map(np.concatenate, zip(*parts, strict=True))
        is_leaf = left < 0
        own, start = np.arange(len(left)), np.repeat(first, sizes)
        # A child's number over all trees is its number in the tree plus the number of the root; a leaf leads to itself.
        sides = [np.where(is_leaf, own, start + side) for side in (right, left)]
        return cls(
            first=first,
            children=np.stack(sides, axis=1).astype(np.int32),
            feature=np.where(is_leaf, -1, feature).astype(np.int32),
            threshold=np.where(is_leaf, 0.0, threshold),
            value=np.concatenate(values),
        )

    def leaves(self, x: np.ndarray) -> np.ndarray:
        """The numbers of the leaves that rows fall into [n, T].

        Raises:
            ValueError: if values are missing and the trees cannot take them.
        """
        if self.missing_left is None and np.isnan(x).any():
            raise ValueError("x holds missing values, which these trees do not take: fill them.")
        leaves = np.empty((len(x), len(self.first)), int)
        for start in range(0, len(x), _AT_ONCE):
            leaves[start : start + _AT_ONCE] = self._leaves(x[start : start + _AT_ONCE])
        return leaves

    def sums(self, x: np.ndarray, constant: float) -> np.ndarray:
        """The constant plus the values of all trees, added in the trees' order as the packages do [n]."""
        total = np.full(len(x), constant)
        for values in self.value[self.leaves(x)].T:
            total += values
        return total

    def _leaves(self, x: np.ndarray) -> np.ndarray:
        node = np.tile(self.first, len(x))
        row = np.repeat(np.arange(len(x)), len(self.first))
        below = np.flatnonzero(self.feature[node] >= 0)
        while len(below):
            at = node[below]
            values = x[row[below], self.feature[at]]
            is_left = values <= self.threshold[at]
            if self.missing_left is not None:
                is_left |= np.isnan(values) & self.missing_left[at]
            at = self.children[at, is_left.astype(int)]
            node[below] = at
            below = below[self.feature[at] >= 0]
        return node.reshape(len(x), -1)


class NodeArrays(NamedTuple):
    """The fields of one tree's nodes, under the names of scikit-learn."""

    children_left: np.ndarray
    value: np.ndarray
    impurity: np.ndarray
    weighted_n_node_samples: np.ndarray

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return len(self.impurity)


@dataclass(frozen=True)
class ForestArrays:
    """A random forest, or one of extra trees.

    Attributes:
        nodes: of all trees.
        impurity: the variance of the targets at each node.
        weight: number of training rows in each node.
        counts: how often each row is in the bootstrap sample of each tree [T, n]; None where there is no bootstrap.
    """

    nodes: Nodes
    impurity: np.ndarray
    weight: np.ndarray
    counts: np.ndarray | None

    @property
    def bootstrap(self) -> bool:
        """Whether the trees were grown on bootstrap samples."""
        return self.counts is not None

    @property
    def trees(self) -> list[NodeArrays]:
        """The trees one by one."""
        left = np.where(self.nodes.feature < 0, -1, self.nodes.children[:, 1])
        parts = left, self.nodes.value[:, None, None], self.impurity, self.weight
        return [
            NodeArrays(*each) for each in zip(*(np.split(part, self.nodes.first[1:]) for part in parts), strict=True)
        ]

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The number of the leaf in each tree that each row falls into [n, T]."""
        return self.nodes.leaves(x.astype(np.float32)) - self.nodes.first


@dataclass(frozen=True)
class BoostedNormal:
    """NGBoost's mean and log std.

    The trees of a step follow each other: one for the mean, and one for the log std.

    Attributes:
        nodes: of all trees.
        initial: the mean and the log std before the first step.
        scalings: the factor of each step.
        learning_rate: the factor of all steps.
    """

    nodes: Nodes
    initial: np.ndarray
    scalings: np.ndarray
    learning_rate: float

    def moments(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The means and stds of rows."""
        steps = self.nodes.value[self.nodes.leaves(x.astype(np.float32))].reshape(len(x), -1, 2)
        params = np.ones((len(x), 2)) * self.initial
        for step, scaling in zip(np.moveaxis(steps, 1, 0), self.scalings, strict=True):
            # (mean, log std) <- (mean, log std) - learning rate * scaling * (outputs of the step's two trees)
            params -= self.learning_rate * step * scaling
        return params[:, 0], np.exp(params[:, 1])


@dataclass(frozen=True)
class BoostedSum:
    """A quantile or a mean of scikit-learn's gradient boosting: a constant plus the predictions of its trees."""

    nodes: Nodes
    constant: float

    def predict(self, x: Any) -> np.ndarray:
        """The sum at every row of an array or a frame of numbers."""
        return self.nodes.sums(np.asarray(x, float), self.constant)


@dataclass(frozen=True)
class TreeMean:
    """A constant plus the predictions of trees that take float32, divided by a number.

    Extra trees, random forests and gradient boosting have this form.
    """

    nodes: Nodes
    constant: float
    divisor: int

    def predict(self, x: Any) -> np.ndarray:
        """The value at every row of an array or a frame of numbers."""
        return self.nodes.sums(np.asarray(x, np.float32), self.constant) / self.divisor


def of_means(model: Any) -> Any:
    """The arrays of scikit-learn's fitted trees that predict means; any other model unchanged."""
    kinds = (type(model).__module__.partition(".")[0], type(model).__name__)
    if kinds == ("sklearn", "HistGradientBoostingRegressor"):
        return of_gradient_boosting(model)
    if kinds in (("sklearn", "ExtraTreesRegressor"), ("sklearn", "RandomForestRegressor")) and model.n_outputs_ == 1:
        return TreeMean(Nodes.of([each.tree_ for each in model.estimators_]), 0.0, len(model.estimators_))
    if kinds == ("sklearn", "GradientBoostingRegressor") and model.init is None:
        nodes = Nodes.of([each.tree_ for each in model.estimators_[:, 0]])
        return TreeMean(replace(nodes, value=model.learning_rate * nodes.value), model.init_.constant_.item(), 1)
    return model


def of_forest(forest: Any, counts: np.ndarray | None) -> ForestArrays:
    """The arrays of a fitted forest of scikit-learn, with its bootstrap samples if it has any."""
    trees = [estimator.tree_ for estimator in forest.estimators_]
    impurity, weight = (
        np.concatenate([getattr(tree, name) for tree in trees]) for name in ("impurity", "weighted_n_node_samples")
    )
    return ForestArrays(Nodes.of(trees), impurity, weight, None if counts is None else counts.astype(np.uint16))


def of_ngboost(model: Any) -> BoostedNormal:
    """The arrays of a fitted NGBRegressor of a normal distribution, whose trees use all columns."""
    nodes = Nodes.of([tree.tree_ for step in model.base_models for tree in step])
    return BoostedNormal(nodes, np.asarray(model.init_params), np.asarray(model.scalings), float(model.learning_rate))


def of_gradient_boosting(model: Any) -> Any:
    """The arrays of a fitted HistGradientBoostingRegressor; unchanged with categorical columns or a link function."""
    is_sum = getattr(model, "loss", "") in ("quantile", "squared_error")
    if not is_sum or model.is_categorical_ is not None:
        return model
    trees = [predictor.nodes for (predictor,) in model._predictors]
    return BoostedSum(Nodes.of_boosting(trees), model._baseline_prediction.item())
