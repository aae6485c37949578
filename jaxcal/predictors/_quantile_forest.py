"""The whole distribution of a forest: the training targets, weighted by how often they share a leaf with a row.

Meinshausen, "Quantile Regression Forests", JMLR 7 (2006): draw a tree, and then one of its training rows in the leaf
that the row falls into. These weighted targets are cut into slices of equal probability. Every slice becomes a normal
distribution with the slice's mean and variance, so that there is a density. At first the slices have equal weights. The
final weights are learned from predictions of rows that the trees were grown without. Everything is in NumPy, and
targets are in units in which their mean is 0 and their std 1.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxcal.distributions import Mixture, Normal
from jaxcal.frames.preprocessing import Standardizer

# The number of slices of equal probability.
_SLICES = 20
# The normal distribution of a slice is widened by one of these, in stds of the row's whole distribution. A target with
# few distinct values takes the least width, and would take a smaller one if it were offered.
_WIDTHS = (0.1, 0.2, 0.4, 0.8)
# The least std of every slice, in stds of the target, for leaves whose targets are all equal.
_LEAST_STD = 1e-3
# The steps of the EM algorithm.
_STEPS = 100
# The most entries of a sparse matrix that are in memory at once.
_AT_ONCE = 2**20


class Slices(NamedTuple):
    """The means and the variances [n, 20] of the slices of every row."""

    means: np.ndarray
    variances: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """The std [n] of the whole distribution of every row."""
        center = self.means.mean(axis=1, keepdims=True)
        return np.sqrt((self.variances + (self.means - center) ** 2).mean(axis=1))


@dataclass(frozen=True)
class LeafTargets:
    """The training targets in the leaves of all trees.

    Attributes:
        targets: the training targets [n], in increasing order.
        shares: [leaves, n] the weight of each target in a leaf; a sparse matrix, whose rows have the sum 1.
        first: the number of the first leaf of each tree [T].
    """

    targets: np.ndarray
    shares: Any
    first: np.ndarray

    @classmethod
    def of(cls, trees: list, leaves: np.ndarray, counts: np.ndarray, targets: np.ndarray) -> "LeafTargets":
        """The targets in the leaves of trees that were grown on known rows.

        Args:
            trees: the trees [T] as scikit-learn has them.
            leaves: the leaf [n, T] of each tree that each training row falls into.
            counts: how often each row is in the sample of each tree [T, n].
            targets: of the training rows [n].
        """
        from scipy.sparse import csr_matrix

        sizes = np.array([tree.node_count for tree in trees])
        first = np.cumsum(sizes) - sizes
        order = np.argsort(targets, kind="stable")
        # The weight of target i in leaf l of a tree is count_i / (sum of the counts of the rows in l).
        tree, place = np.nonzero(counts[:, order])
        row = order[place]
        leaf, count = leaves[row, tree] + first[tree], counts[tree, row]
        in_leaf = np.bincount(leaf, weights=count, minlength=sizes.sum())
        shares = csr_matrix((count / in_leaf[leaf], (leaf, place)), shape=(sizes.sum(), len(targets)))
        return cls(targets[order], shares, first)

    def slices(self, leaves: np.ndarray, weights: np.ndarray | None = None) -> Slices:
        """The slices of rows.

        Args:
            leaves: the leaf [m, T] of each tree that each row falls into.
            weights: of the trees for each row [T, m], with the sum 1 over trees; None for equal weights.
        """
        number, trees = leaves.shape
        tree_weights = np.full((trees, 1), 1 / trees) if weights is None else weights
        tree_weights = np.broadcast_to(tree_weights.T, (number, trees))
        # The expected number of targets that a row reaches in a tree: it reaches large leaves more often than small
        # ones.
        in_leaf = np.diff(self.shares.indptr)
        reached = max(float((in_leaf**2).sum() / max(in_leaf.sum(), 1)), 1.0)
        at_once = max(int(_AT_ONCE / (trees * reached)), 1)
        starts = range(0, number, at_once)
        parts = [self._slices(leaves[k : k + at_once], tree_weights[k : k + at_once]) for k in starts]
        return Slices(*map(np.concatenate, zip(*parts, strict=True)))

    def _slices(self, leaves: np.ndarray, weights: np.ndarray) -> Slices:
        from scipy.sparse import csr_matrix

        number, trees = leaves.shape
        ends = np.arange(number + 1) * trees
        chosen = csr_matrix((weights.ravel(), (leaves + self.first).ravel(), ends), (number, self.shares.shape[0]))
        # Row i of the product holds the targets' weights sum_t w_t share_t. Converting to columns and back puts the
        # targets of a row in increasing order, faster than a sort.
        mixed = (chosen @ self.shares).tocsc().tocsr()
        return _cut(mixed.data, self.targets[mixed.indices], mixed.indptr)


def _cut(weights: np.ndarray, targets: np.ndarray, ends: np.ndarray) -> Slices:
    """The slices of weighted targets; the targets of row i, in increasing order, are at ends[i] to ends[i + 1].

    G(p) is the integral of the quantile function from 0 to p. The mean of the slice from p to p' is (G(p') - G(p)) /
    (p' - p), and its mean square likewise. Every row is summed up by itself. If its last digit depended on the rows
    beside it, calibration rows and new rows would not be exchangeable.
    """
    sizes = np.diff(ends)
    is_there = np.arange(sizes.max())[None] < sizes[:, None]
    weight, target = np.zeros(is_there.shape), np.zeros(is_there.shape)
    weight[is_there], target[is_there] = weights, targets
    level, at = np.cumsum(weight, axis=1), np.arange(1, _SLICES) / _SLICES
    weight, level = weight / level[:, -1:], level / level[:, -1:]
    # The target at which the running weight reaches each level; `inside` is the part of its weight below the level.
    place = np.stack([np.searchsorted(own, at) for own in level])
    of = lambda table: np.take_along_axis(table, place, axis=1)
    inside = at[None] - of(_until(level))

    def means(values: np.ndarray) -> np.ndarray:
        # G(p) = sum of weight * value before the target at p, plus inside * value; slices have p' - p = 1 / 20.
        sums = np.cumsum(weight * values, axis=1)
        inner = of(_until(sums)) + inside * of(values)
        return _SLICES * np.diff(np.column_stack([np.zeros(len(sizes)), inner, sums[:, -1]]), axis=1)

    centers = means(target)
    return Slices(centers, (means(target**2) - centers**2).clip(0))


def _until(sums: np.ndarray) -> np.ndarray:
    """The running sums along the rows, each without its own term: sums[j - 1], and 0 at first."""
    return np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)


@dataclass(frozen=True)
class Shape:
    """The weight of each slice, and how much the slices are widened.

    Attributes:
        weights: of the slices, and last of the normal distribution of all targets [21]; their sum is 1.
        width: the std that widens the slices, in stds of a row's whole distribution.
    """

    weights: np.ndarray
    width: float

    @classmethod
    def of(cls, slices: Slices, targets: np.ndarray) -> "Shape":
        """The most likely weights and width; the fewer the rows, the nearer the weights are to equal ones.

        Args:
            slices: of n rows that the trees were grown without.
            targets: of these rows [n].
        """
        shapes = []
        for width in _WIDTHS:
            weights, log_likelihood = _most_likely(_log_densities(targets, *components(slices, width)))
            shapes.append((log_likelihood, cls(weights, width)))
        return max(shapes, key=lambda each: each[0])[1]


@dataclass(frozen=True)
class WholeDistribution:
    """The parts by which a forest predicts its whole distribution.

    Attributes:
        targets: the training targets in the leaves of its trees.
        shape: the weights and the width of the slices.
        y_scaler: the standardization of the targets.
    """

    targets: LeafTargets
    shape: Shape
    y_scaler: Standardizer

    def __call__(self, leaves: np.ndarray, weights: np.ndarray | None, dtype: DTypeLike) -> Mixture:
        """The distributions of rows in the unit of y, from leaves and weights as `LeafTargets.slices` takes them."""
        means, stds = components(self.targets.slices(leaves, weights), self.shape.width)
        loc, scale = float(self.y_scaler.loc), float(self.y_scaler.scale)
        placed = [jax.device_put(each.astype(dtype)) for each in (loc + scale * means, scale * stds)]
        return Mixture(jax.vmap(Normal)(*placed), self.shape.weights)


def components(slices: Slices, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The means and the stds [21, n] of the normal distributions of all slices, and last of all targets."""
    number = len(slices.means)
    # std^2 = slice's variance + (width * row's std)^2 + least std^2; the last component is N(0, 1).
    widened = slices.variances + (width * slices.spread[:, None]) ** 2 + _LEAST_STD**2
    means = np.concatenate([slices.means.T, np.zeros((1, number))])
    return means, np.concatenate([np.sqrt(widened).T, np.ones((1, number))])


def _log_densities(targets: np.ndarray, means: np.ndarray, stds: np.ndarray) -> np.ndarray:
    """The log densities [21, n] of all components at the targets, up to a constant."""
    return -0.5 * ((targets - means) / stds) ** 2 - np.log(stds)


def _most_likely(log_densities: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights of a mixture [k] by the EM algorithm, and their log likelihood.

    Every component counts one row before the first row is read. So no component has the weight 0, and the component of
    all targets bounds the density from below.
    """
    size, number = log_densities.shape
    largest = log_densities.max(axis=0)
    densities = np.exp(log_densities - largest)
    weights = np.full(size, 1 / size)
    for _ in range(_STEPS):
        # c_k = sum_i w_k p_ki / sum_j w_j p_ji and w_k = (c_k + 1) / (n + k)
        counts = weights * (densities @ (1 / (weights @ densities)))
        weights = (counts + 1) / (number + size)
    return weights, float((np.log(weights @ densities) + largest).sum())
