"""A binary tree whose nodes are rows of padded arrays: where a point ends, and the tree as text."""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


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

    def text(self, names: Sequence[str], levels: dict[int, Sequence[str]]) -> str:
        """The tree, a line for every node; `names` of the columns, `levels` of the categorical ones."""
        tree = jax.tree.map(np.asarray, self)
        lines = []

        def write(node: int, indent: str, condition: str) -> None:
            about = f"{tree.num_rows[node]} rows"
            if np.isfinite(tree.residual_std[node]):
                about += f", residual std {tree.residual_std[node]:.4g}"
            if np.isfinite(tree.statistic[node]):
                about += f", |T| {tree.statistic[node]:.2f}, log p {tree.log_p[node]:.1f}"
            feature = tree.feature[node]
            is_leaf = feature < 0
            lines.append(f"{indent}{condition}{f'leaf {tree.leaf[node]}: ' if is_leaf else ''}{about}")
            if is_leaf:
                return
            name = names[feature]
            if feature in levels:
                # The rest of them is padding.
                chosen = tree.left_levels[node]
                sides = (
                    [level for level, left in zip(levels[feature], chosen, strict=False) if left == side]
                    for side in (True, False)
                )
                conditions = [f"{name} in {{{', '.join(side)}}}: " for side in sides]
            else:
                conditions = [f"{name} {sign} {tree.threshold[node]:.6g}: " for sign in ("<=", ">")]
            for child, text in zip(tree.children[node].tolist(), conditions, strict=True):
                write(child, indent + "  ", text)

        write(0, "", "")
        return "\n".join(lines)
