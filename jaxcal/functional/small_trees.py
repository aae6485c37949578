"""Sums of trees of at most 8 leaves, as in gradient boosting, without a branch (QuickScorer).

A node that sends a row to the right rules out the leaves on its left. Each node has a byte with the bits of the other
leaves, from the left to the right. The row's leaf is the lowest bit that no such byte lacks.

Source: Lucchese et al., "QuickScorer: a Fast Algorithm to Rank Documents with Additive Ensembles of Regression Trees",
SIGIR 2015.
"""

from functools import reduce
from operator import and_
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from jaxcal._numpy import AnyArray, namespace

MOST_LEAVES = 8
_ALL = 255
_LOWEST_BIT = np.array([(byte & -byte).bit_length() - 1 for byte in range(1, 256)])


class SmallTrees(NamedTuple):
    """Trees, with up to 7 nodes each that have children; made by `small_trees`.

    Attributes:
        feature: the column by which a node splits rows [t, 7].
        threshold: rows with a value up to the threshold go to the left [t, 7].
        missing_left: whether rows with a missing value go to the left [t, 7].
        others: the bits of the leaves that are not on the left of a node [t, 7].
        values: the value of the leaf for each byte from 1 to 255 [t, 255].
        constant: a number that is added to the sum.
    """

    feature: Int[AnyArray, "t 7"]
    threshold: Float[AnyArray, "t 7"]
    missing_left: Bool[AnyArray, "t 7"]
    others: UInt8[AnyArray, "t 7"]
    values: Float[AnyArray, "t 255"]
    constant: Float[AnyArray, ""]


def small_trees(trees: list[np.ndarray], constant: float) -> SmallTrees:
    """Trees of scikit-learn's gradient boosting on histograms, each an array of records, without categories.

    Raises:
        ValueError: if one has more than 8 leaves.
    """
    number, most = len(trees), MOST_LEAVES - 1
    feature, threshold = np.zeros((number, most), np.int32), np.zeros((number, most))
    missing_left, others = np.zeros((number, most), bool), np.full((number, most), _ALL, np.uint8)
    values = np.zeros((number, _ALL))
    for k, nodes in enumerate(trees):
        leaves, inner = _leaves_below(nodes, 0), np.flatnonzero(nodes["is_leaf"] == 0)
        if len(leaves) > MOST_LEAVES:
            raise ValueError(f"a tree has {len(leaves)} leaves; at most {MOST_LEAVES} are taken.")
        place = {leaf: bit for bit, leaf in enumerate(leaves)}
        for j, node in enumerate(inner):
            feature[k, j], threshold[k, j] = nodes["feature_idx"][node], nodes["num_threshold"][node]
            missing_left[k, j] = nodes["missing_go_to_left"][node]
            others[k, j] = _ALL - sum(1 << place[leaf] for leaf in _leaves_below(nodes, int(nodes["left"][node])))
        values[k] = nodes["value"][leaves][np.minimum(_LOWEST_BIT, len(leaves) - 1)]
    return SmallTrees(feature, threshold, missing_left, others, values, np.array(constant))


def _leaves_below(nodes: np.ndarray, node: int) -> list[int]:
    """The numbers of the leaves under a node, from the left to the right."""
    if nodes["is_leaf"][node]:
        return [int(node)]
    return [leaf for side in ("left", "right") for leaf in _leaves_below(nodes, int(nodes[side][node]))]


def sums(trees: SmallTrees, x: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
    """The sum over trees of the values of each row's leaves; a missing value is NaN."""
    *parts, constant = trees
    if namespace(x) is np:
        return constant + sum(_values(x, *map(np.asarray, tree)) for tree in zip(*parts, strict=True))
    return constant + jax.vmap(_values, (None, 0, 0, 0, 0, 0))(x, *parts).sum(0)


def _values(
    x: Float[AnyArray, "n d"],
    feature: Int[AnyArray, " 7"],
    threshold: Float[AnyArray, " 7"],
    missing_left: Bool[AnyArray, " 7"],
    others: UInt8[AnyArray, " 7"],
    values: Float[AnyArray, " 255"],
) -> Float[AnyArray, " n"]:
    """The values of each row's leaf of one tree."""
    xp, split = namespace(x, feature), x[:, feature]
    goes_left = (split <= threshold[None]) | (xp.isnan(split) & missing_left[None])
    # The leaves that no node rules out, as one byte.
    left_over = xp.where(goes_left, xp.uint8(_ALL), others[None])
    return values[reduce(and_, left_over.T).astype(np.int32) - 1]
