"""A binary tree whose nodes are rows of padded arrays: where a point ends, and the tree as it is shown."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int


class Node(NamedTuple):
    """What is known of one node while a tree grows.

    Attributes:
        rows: the training rows in it.
        feature: the column it is split on, -1 in a leaf.
        threshold: the largest value of a continuous column on the left.
        left_levels: the levels of a categorical column on the left [levels].
        children: the positions of the two nodes below.
        statistic: |T| of Levene's test of its best split; NaN where none was looked for.
        log_p: the logarithm of that split's p-value, corrected.
        residual_std: of the residuals that were tested; NaN where none were.
    """

    rows: np.ndarray
    feature: int = -1
    threshold: float = np.inf
    left_levels: np.ndarray | None = None
    children: tuple[int, int] = (0, 0)
    statistic: float = np.nan
    log_p: float = np.nan
    residual_std: float = np.nan


class Branch(NamedTuple):
    """A node of a grown tree as it is shown, with what is below it.

    Attributes:
        condition: what leads here from the node above, "age <= 30"; of the root "".
        num_rows: how many training rows came here.
        statistic: |T| of Levene's test of the best split; NaN where none was looked for.
        log_p: the logarithm of its p-value, corrected.
        residual_std: the standard deviation of the tested residuals, in the unit of y; NaN where none were.
        leaf: the number of a leaf; -1 where the node is split.
        rmse: the root mean square of a leaf's training residuals, in the unit of y; NaN where the node is split.
        below: the branches on the left and on the right; none of a leaf.
    """

    condition: str
    num_rows: int
    statistic: float
    log_p: float
    residual_std: float
    leaf: int
    rmse: float
    below: tuple["Branch", ...]

    def leaves(self) -> list["Branch"]:
        """The leaves, from the left to the right."""
        return [leaf for part in self.below for leaf in part.leaves()] if self.below else [self]

    def depth(self) -> int:
        """The number of splits on the longest way to a leaf."""
        return max((1 + part.depth() for part in self.below), default=0)

    def text(self, indent: str = "") -> str:
        """The branch, a line for every node."""
        about = [f"{self.num_rows} rows"]
        if math.isfinite(self.residual_std):
            about.append(f"residual std {self.residual_std:.4g}")
        if math.isfinite(self.statistic):
            about += [f"|T| {self.statistic:.2f}", f"log p {self.log_p:.1f}"]
        if not self.below:
            about.append(f"rmse {self.rmse:.4g}")
        start = f"{self.condition}: " if self.condition else ""
        line = f"{indent}{start}{'' if self.below else f'leaf {self.leaf}: '}{', '.join(about)}"
        return "\n".join([line, *(branch.text(indent + "  ") for branch in self.below)])


class Tree(eqx.Module):
    """A grown tree, or several stacked: node 0 is the root, and nodes that are not there are leaves nothing leads to.

    Attributes:
        feature: the column a node is split on, -1 in a leaf.
        threshold: rows with a value up to it go left.
        left_levels: rows with one of these levels go left, where the column is categorical.
        children: the nodes on the left and on the right.
        leaf: the number of a leaf, from 0 on.
        statistic: |T| of Levene's test of the best split; NaN where none was looked for.
        log_p: the logarithm of its p-value, corrected.
        num_rows: how many training rows came here.
        residual_std: the standard deviation of the tested residuals, in the unit of y; NaN where none were.
    """

    feature: Int[Array, "*members nodes"]
    threshold: Float[Array, "*members nodes"]
    left_levels: Bool[Array, "*members nodes levels"]
    children: Int[Array, "*members nodes 2"]
    leaf: Int[Array, "*members nodes"]
    statistic: Float[Array, "*members nodes"]
    log_p: Float[Array, "*members nodes"]
    num_rows: Int[Array, "*members nodes"]
    residual_std: Float[Array, "*members nodes"]

    @classmethod
    def of(cls, nodes: Sequence[Node], size: int, num_levels: int, dtype: np.dtype) -> "Tree":
        """The arrays of grown nodes, padded to `size` nodes, with `num_levels` levels of categorical columns."""
        padding = [Node(np.empty(0, int))] * (size - len(nodes))
        nodes = [*nodes, *padding]
        is_leaf = np.array([node.feature < 0 for node in nodes])
        left_levels = np.zeros((size, num_levels), bool)
        for row, node in zip(left_levels, nodes, strict=True):
            if node.left_levels is not None:
                row[: len(node.left_levels)] = node.left_levels
        column = lambda name: jnp.asarray(np.array([getattr(node, name) for node in nodes], dtype))
        return cls(
            jnp.array([node.feature for node in nodes], jnp.int32),
            column("threshold"),
            jnp.asarray(left_levels),
            jnp.array([node.children for node in nodes], jnp.int32),
            jnp.asarray(np.where(is_leaf, np.cumsum(is_leaf) - 1, -1), jnp.int32),
            column("statistic"),
            column("log_p"),
            jnp.array([len(node.rows) for node in nodes], jnp.int32),
            column("residual_std"),
        )

    def leaf_of(self, x: Float[Array, " d"], codes: Int[Array, " d"], categorical: Bool[Array, " d"]) -> Int[Array, ""]:
        """The number of the leaf that a point falls into; `codes` has the positions of its levels."""
        x = lax.stop_gradient(x)

        def below(node):
            feature = self.feature[node]
            by_level = self.left_levels[node, codes[feature]]
            left = jnp.where(categorical[feature], by_level, x[feature] <= self.threshold[node])
            return jnp.where(left, self.children[node, 0], self.children[node, 1])

        return self.leaf[lax.while_loop(lambda node: self.feature[node] >= 0, below, jnp.int32(0))]

    def branch(self, names: Sequence[str], levels: dict[int, Sequence[str]], leaf_rmse: ArrayLike) -> Branch:
        """The nodes as they are shown.

        Args:
            names: of the columns.
            levels: of the categorical columns.
            leaf_rmse: the root mean square residual of every leaf.
        """
        tree, rmse = jax.tree.map(np.asarray, self), np.asarray(leaf_rmse)

        def sides(node: int, reach: dict[int, np.ndarray]) -> Iterator[tuple[str, dict[int, np.ndarray]]]:
            """What leads to the left and to the right, and the levels of every categorical column that get there."""
            feature = int(tree.feature[node])
            for is_left, sign in ((True, "<="), (False, ">")):
                if feature not in levels:
                    yield f"{names[feature]} {sign} {tree.threshold[node]:.6g}", reach
                else:
                    # Beyond the levels of this column, `left_levels` is padding.
                    there = reach[feature] & (tree.left_levels[node, : len(levels[feature])] == is_left)
                    listed = ", ".join(np.asarray(levels[feature])[there])
                    yield f"{names[feature]} in {{{listed}}}", {**reach, feature: there}

        def branch(node: int, condition: str, reach: dict[int, np.ndarray]) -> Branch:
            leaf = int(tree.leaf[node])
            below = zip(tree.children[node].tolist(), sides(node, reach), strict=True) if leaf < 0 else ()
            parts = tuple(branch(child, *side) for child, side in below)
            return Branch(
                condition=condition,
                num_rows=int(tree.num_rows[node]),
                statistic=float(tree.statistic[node]),
                log_p=float(tree.log_p[node]),
                residual_std=float(tree.residual_std[node]),
                leaf=leaf,
                rmse=float(rmse[leaf]) if leaf >= 0 else math.nan,
                below=parts,
            )

        return branch(0, "", {column: np.ones(len(named), bool) for column, named in levels.items()})
