"""A binary tree whose nodes are rows of padded arrays: it finds the leaf of a point, and can be shown."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal._numpy import AnyArray, constant, namespace, stacked
from jaxcal.functional._loops import carried


class Node(eqx.Module):
    """The fields of a node, or of many nodes that are stacked.

    Attributes:
        feature: the column a node is split on, -1 in a leaf.
        threshold: rows with a value up to this one go left.
        left_categories: rows with one of these categories go left, where the column is categorical.
        children: the positions of the nodes on the left and on the right.
        leaf: the number of a leaf, from 0 on; -1 where the node is split.
        statistic: |T| of Levene's test of the best split; NaN where no split was tested.
        log_p: the logarithm of its p-value, corrected.
        num_rows: number of training rows in the node.
        residual_std: the standard deviation of the tested residuals, in the unit of y. A node that was not tested has
            the residuals of the test of the node above; NaN where there is no node above, either.
        std_ratio: the std of the residuals on the right of the split over the std on the left; NaN in a leaf.
        std_ratio_interval: the ends of an interval for this ratio.
    """

    feature: Int[AnyArray, "*nodes"]
    threshold: Float[AnyArray, "*nodes"]
    left_categories: Bool[AnyArray, "*nodes categories"]
    children: Int[AnyArray, "*nodes 2"]
    leaf: Int[AnyArray, "*nodes"]
    statistic: Float[AnyArray, "*nodes"]
    log_p: Float[AnyArray, "*nodes"]
    num_rows: Int[AnyArray, "*nodes"]
    residual_std: Float[AnyArray, "*nodes"]
    std_ratio: Float[AnyArray, "*nodes"]
    std_ratio_interval: Float[AnyArray, "*nodes 2"]

    @classmethod
    def new(cls, num_rows: int, num_categories: int, dtype: np.dtype) -> "Node":
        """A node that has not been tested, with NumPy arrays, as the nodes of a growing tree have them."""
        integer, number = (lambda value: np.asarray(value, np.int32)), (lambda value: np.asarray(value, dtype))
        return cls(
            feature=integer(-1),
            threshold=number(np.inf),
            left_categories=np.zeros(num_categories, bool),
            children=integer([0, 0]),
            leaf=integer(-1),
            statistic=number(np.nan),
            log_p=number(np.nan),
            num_rows=integer(num_rows),
            residual_std=number(np.nan),
            std_ratio=number(np.nan),
            std_ratio_interval=number([np.nan, np.nan]),
        )

    def updated(self, **values: Any) -> "Node":
        """The node with new values, cast to the dtypes of its fields."""
        return replace(self, **{name: np.asarray(value, getattr(self, name).dtype) for name, value in values.items()})


class Branch(Node):
    """A node of a grown tree as it is shown, with the branches below it.

    Attributes:
        condition: leads here from the node above, "age <= 30"; "" at the root.
        path: all conditions that lead here from the root, "age <= 30 and color in {red, blue}".
        rmse: the root mean square of a leaf's training residuals, in the unit of y; NaN where the node is split.
        below: the branches on the left and on the right; a leaf has none. `Node` describes the other fields.
    """

    condition: str
    path: str
    rmse: Float[Array, ""]
    below: tuple["Branch", ...]

    def leaves(self) -> list["Branch"]:
        """The leaves, from the left to the right."""
        return [leaf for part in self.below for leaf in part.leaves()] if self.below else [self]

    def depth(self) -> int:
        """The number of splits on the longest path to a leaf."""
        return max((1 + part.depth() for part in self.below), default=0)

    def text(self, indent: str = "") -> str:
        """The branch as text, a line for every node."""
        about = [f"{self.num_rows} rows"]
        if math.isfinite(self.residual_std):
            about.append(f"residual std {self.residual_std:.4g}")
        if math.isfinite(self.statistic):
            about += [f"|T| {self.statistic:.2f}", f"log p {self.log_p:.1f}"]
        if self.below:
            about.append("std ratio {:.2f} ({:.2f} to {:.2f})".format(self.std_ratio, *self.std_ratio_interval))
        else:
            about.append(f"rmse {self.rmse:.4g}")
        start = f"{self.condition}: " if self.condition else ""
        line = f"{indent}{start}{'' if self.below else f'leaf {self.leaf}: '}{', '.join(about)}"
        return "\n".join([line, *(branch.text(indent + "  ") for branch in self.below)])


class Tree(Node):
    """A grown tree, with [nodes] in every field, or several stacked trees.

    Node 0 is the root. Some nodes may be padding.
    """

    @classmethod
    def of(cls, nodes: Sequence[Node], size: int) -> "Tree":
        """The tree of grown nodes, with its leaves numbered.

        It is padded to `size` nodes with leaves that no split leads to.
        """
        padding = Node.new(0, nodes[0].left_categories.shape[0], nodes[0].threshold.dtype)
        whole = stacked([*nodes, *[padding] * (size - len(nodes))])
        is_leaf = np.asarray(whole.feature) < 0
        parts = {field.name: getattr(whole, field.name) for field in fields(Node)}
        leaf = np.where(is_leaf, np.cumsum(is_leaf) - 1, -1).astype(np.int32)
        return cls(**{**parts, "leaf": jax.device_put(leaf)})

    def leaves_of(
        self, x: Float[AnyArray, "n d"], codes: Int[AnyArray, "n d"], categorical: Bool[AnyArray, " d"]
    ) -> Int[AnyArray, " n"]:
        """The number of the leaf of each row; `codes` has the positions of the row's categories."""
        xp, x = namespace(x, self.feature), constant(x)
        rows = xp.arange(x.shape[0])

        def below(node: Int[AnyArray, " n"]) -> Int[AnyArray, " n"]:
            feature = xp.maximum(self.feature[node], 0)
            is_left_category = self.left_categories[node, codes[rows, feature]]
            left = xp.where(categorical[feature], is_left_category, x[rows, feature] <= self.threshold[node])
            child = xp.where(left, self.children[node, 0], self.children[node, 1])
            return xp.where(self.feature[node] >= 0, child, node)

        node = xp.zeros(x.shape[0], np.int32)
        is_split = lambda node: (self.feature[node] >= 0).any()
        if xp is jnp:
            return self.leaf[lax.while_loop(is_split, below, carried(node))]
        while is_split(node):
            node = below(node)
        return self.leaf[node]

    def branch(self, names: Sequence[str], categories: Mapping[int, Sequence[str]], leaf_rmse: ArrayLike) -> Branch:
        """The nodes as they are shown.

        Args:
            names: of the columns.
            categories: for every categorical column, the names of its categories.
            leaf_rmse: the root mean square residual of every leaf.
        """
        tree, rmse = jax.tree.map(np.asarray, self), np.asarray(leaf_rmse)

        def sides(node: int, reach: dict[int, np.ndarray]) -> Iterator[tuple[str, str, dict[int, np.ndarray]]]:
            """The condition of each side, its kind, and the categories of every column that get there."""
            feature = int(tree.feature[node])
            for is_left, sign in ((True, "<="), (False, ">")):
                if feature not in categories:
                    condition = f"{names[feature]} {sign} {tree.threshold[node]:.6g}"
                    yield condition, f"{feature} {sign}", reach
                else:
                    # `left_categories` is padded beyond the categories of this column.
                    there = reach[feature] & (tree.left_categories[node, : len(categories[feature])] == is_left)
                    listed = ", ".join(np.asarray(categories[feature])[there])
                    yield f"{names[feature]} in {{{listed}}}", f"{feature} in", {**reach, feature: there}

        def branch(node: int, condition: str, path: dict[str, str], reach: dict[int, np.ndarray]) -> Branch:
            leaf = int(tree.leaf[node])
            parts = ()
            if leaf < 0:
                # A later condition of the same kind is narrower, and replaces the earlier one.
                parts = tuple(
                    branch(child, leads, {**path, kind: leads}, there)
                    for child, (leads, kind, there) in zip(
                        tree.children[node].tolist(), sides(node, reach), strict=True
                    )
                )
            own = {field.name: jnp.asarray(getattr(tree, field.name)[node]) for field in fields(Node)}
            own_rmse = jnp.asarray(rmse[leaf] if leaf >= 0 else math.nan, rmse.dtype)
            return Branch(**own, condition=condition, path=" and ".join(path.values()), rmse=own_rmse, below=parts)

        return branch(0, "", {}, {column: np.ones(len(named), bool) for column, named in categories.items()})
