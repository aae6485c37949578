"""The whole distribution of a forest: the training targets, weighted by the leaves that a row shares with them.

Meinshausen, "Quantile Regression Forests", JMLR 7 (2006): draw a tree, and then one of its training rows in the leaf
that the row falls into. These weighted targets are cut into slices of equal probability. Every slice becomes a normal
distribution with the slice's mean and variance, so that there is a density; the weights of the slices, which are equal
as they are cut, are learned from predictions of rows that the trees were grown without. All is in NumPy, of targets in
units in which their mean is 0 and their std 1.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxcal.distributions import Mixture, Normal
from jaxcal.frames.preprocessing import Standardizer

# So many slices of equal probability.
_SLICES = 20
# The normal distribution of a slice is widened by one of these, in stds of the row's whole distribution. A target of
# few values takes the least, and would take a smaller one if there were any.
_WIDTHS = (0.1, 0.2, 0.4, 0.8)
# Of every slice, in stds of the target: where all targets in the leaves are equal.
_LEAST_STD = 1e-3
# The steps of the EM algorithm.
_STEPS = 100
# The most numbers of a sparse matrix that are in memory at once.
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
    """Which training targets lie in the leaves of all trees.

    Attributes:
        targets: the training targets [n], in increasing order.
        shares: [leaves, n] the weight that each of them has in a leaf; a sparse matrix, of rows with sum 1.
        first: the number of the first leaf of each tree [T].
    """

    targets: np.ndarray
    shares: Any
    first: np.ndarray

    @classmethod
    def of(cls, trees: list, leaves: np.ndarray, counts: np.ndarray, targets: np.ndarray) -> "LeafTargets":
        """Those of trees that were grown on known rows.

        Args:
            trees: the trees [T] as scikit-learn has them.
            leaves: the leaf [n, T] of each tree that a training row falls into.
            counts: how often a row is among those that a tree was grown on [T, n].
            targets: of the training rows [n].
        """
        from scipy.sparse import csr_matrix

        sizes = np.array([tree.node_count for tree in trees])
        first = np.cumsum(sizes) - sizes
        order = np.argsort(targets, kind="stable")
        tree, place = np.nonzero(counts[:, order])
        row = order[place]
        leaf, count = leaves[row, tree] + first[tree], counts[tree, row]
        in_leaf = np.bincount(leaf, weights=count, minlength=sizes.sum())
        shares = csr_matrix((count / in_leaf[leaf], (leaf, place)), shape=(sizes.sum(), len(targets)))
        return cls(targets[order], shares, first)

    def slices(self, leaves: np.ndarray, weights: np.ndarray | None = None) -> Slices:
        """The slices of rows.

        Args:
            leaves: the leaf [m, T] of each tree that a row falls into.
            weights: of the trees for each row [T, m], with sums 1; equal where None.
        """
        number, trees = leaves.shape
        of_trees = np.full((trees, 1), 1 / trees) if weights is None else weights
        of_trees = np.broadcast_to(of_trees.T, (number, trees))
        # A row reaches a leaf the more often the larger the leaf is.
        in_leaf = np.diff(self.shares.indptr)
        reached = max(float((in_leaf**2).sum() / max(in_leaf.sum(), 1)), 1.0)
        at_once = max(int(_AT_ONCE / (trees * reached)), 1)
        starts = range(0, number, at_once)
        parts = [self._slices(leaves[k : k + at_once], of_trees[k : k + at_once]) for k in starts]
        return Slices(*map(np.concatenate, zip(*parts, strict=True)))

    def _slices(self, leaves: np.ndarray, weights: np.ndarray) -> Slices:
        from scipy.sparse import csr_matrix

        number, trees = leaves.shape
        ends = np.arange(number + 1) * trees
        chosen = csr_matrix((weights.ravel(), (leaves + self.first).ravel(), ends), (number, self.shares.shape[0]))
        # Twice the other way round: the targets of a row come in increasing order, faster than by a sort.
        mixed = (chosen @ self.shares).tocsc().tocsr()
        return _cut(mixed.data, self.targets[mixed.indices], mixed.indptr)


def _cut(weights: np.ndarray, targets: np.ndarray, ends: np.ndarray) -> Slices:
    """The slices of weighted targets; those of row i, in increasing order, are at ends[i] to ends[i + 1].

    G(p) is the integral of the quantile function from 0 to p. The mean of the slice from p to p' is
    (G(p') - G(p)) / (p' - p), and its mean square likewise. Every row is summed up by itself. If its last digit
    depended on the rows beside it, calibration rows and new ones would not be exchangeable.
    """
    sizes = np.diff(ends)
    is_there = np.arange(sizes.max())[None] < sizes[:, None]
    weight, target = np.zeros(is_there.shape), np.zeros(is_there.shape)
    weight[is_there], target[is_there] = weights, targets
    level, at = np.cumsum(weight, axis=1), np.arange(1, _SLICES) / _SLICES
    weight, level = weight / level[:, -1:], level / level[:, -1:]
    place = np.stack([np.searchsorted(own, at) for own in level])
    of = lambda table: np.take_along_axis(table, place, axis=1)
    inside = at[None] - of(_until(level))

    def means(values: np.ndarray) -> np.ndarray:
        sums = np.cumsum(weight * values, axis=1)
        inner = of(_until(sums)) + inside * of(values)
        return _SLICES * np.diff(np.column_stack([np.zeros(len(sizes)), inner, sums[:, -1]]), axis=1)

    found = means(target)
    return Slices(found, (means(target**2) - found**2).clip(0))


def _until(sums: np.ndarray) -> np.ndarray:
    """The running sums along the rows, each without its own term."""
    return np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)


@dataclass(frozen=True)
class Shape:
    """How much each slice counts, and how wide it is.

    Attributes:
        weights: of the slices, and last of the normal distribution of all targets [21]; with sum 1.
        width: what widens the slices, in stds of the whole distribution of a row.
    """

    weights: np.ndarray
    width: float

    @classmethod
    def of(cls, slices: Slices, targets: np.ndarray) -> "Shape":
        """The most likely weights, nearer to equal ones the fewer the rows are, of the most likely width.

        Args:
            slices: of rows that the trees were grown without, n of them.
            targets: of these rows [n].
        """
        found = []
        for width in _WIDTHS:
            weights, log_likelihood = _most_likely(_log_densities(targets, *components(slices, width)))
            found.append((log_likelihood, cls(weights, width)))
        return max(found, key=lambda each: each[0])[1]


@dataclass(frozen=True)
class WholeDistribution:
    """What a forest predicts its whole distribution by.

    Attributes:
        targets: in the leaves of its trees.
        shape: of the distribution.
        y_scaler: the standardization of the targets.
    """

    targets: LeafTargets
    shape: Shape
    y_scaler: Standardizer

    def __call__(self, leaves: np.ndarray, weights: np.ndarray | None, dtype: DTypeLike) -> Mixture:
        """The distributions of rows in the unit of y; leaves and weights as of `LeafTargets.slices`."""
        means, stds = components(self.targets.slices(leaves, weights), self.shape.width)
        loc, scale = float(self.y_scaler.loc), float(self.y_scaler.scale)
        placed = [jax.device_put(each.astype(dtype)) for each in (loc + scale * means, scale * stds)]
        return Mixture(jax.vmap(Normal)(*placed), self.shape.weights)


def components(slices: Slices, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The means and the stds [21, n] of the normal distributions of all slices, and that of all targets."""
    number = len(slices.means)
    widened = slices.variances + (width * slices.spread[:, None]) ** 2 + _LEAST_STD**2
    means = np.concatenate([slices.means.T, np.zeros((1, number))])
    return means, np.concatenate([np.sqrt(widened).T, np.ones((1, number))])


def _log_densities(targets: np.ndarray, means: np.ndarray, stds: np.ndarray) -> np.ndarray:
    """Those of all components at the targets, up to a constant [21, n]."""
    return -0.5 * ((targets - means) / stds) ** 2 - np.log(stds)


def _most_likely(log_densities: np.ndarray) -> tuple[np.ndarray, float]:
    """The weights of a mixture [k] by the EM algorithm, and their log likelihood.

    Every component is taken to hold one row before the first is seen: so none has the weight 0, and that of all targets
    bounds the density from below.
    """
    size, number = log_densities.shape
    largest = log_densities.max(axis=0)
    densities = np.exp(log_densities - largest)
    weights = np.full(size, 1 / size)
    for _ in range(_STEPS):
        counts = weights * (densities @ (1 / (weights @ densities)))
        weights = (counts + 1) / (number + size)
    return weights, float((np.log(weights @ densities) + largest).sum())
