"""The bound of a sparse Gaussian process with its gradient by NumPy and BLAS, which compile nothing.

`sparse_gp.collapsed_bound` is the same formula in JAX. Here the covariance is a sum of squared exponentials, each on
its own rows. The derivative is in closed form: it costs a product of two matrices, [m, m] and [m, n].
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import blas

from jaxcal.functional.gp import LOG_2PI
from jaxcal.functional.gp_host import Part
from jaxcal.functional.linalg import (
    cholesky,
    column_squares,
    crossproduct,
    half_log_det,
    inverse_factor,
    inverse_triangular,
)

# The number of rows whose covariances with the inducing points are computed at once. Up to the second number of
# covariances, all are held for the gradient. If there are more, they are computed again.
_CHUNK, _HELD = 1024, 2**25


class Gradient(NamedTuple):
    """The derivatives of a log marginal likelihood, or of a bound on it.

    Attributes:
        parts: [p], with respect to the log variance and the log lengthscales of each part, through covariances of
            two points.
        prior: with respect to the sum of the parts' variances, where the sum appears by itself: in the unexplained
            variance and in the jitter.
        noise: with respect to the common variance of the noise.
        relative: [n], with respect to the relative variances of the rows' noise.
        points: [m, d] of every part, with respect to the inducing points; empty if there are none.
    """

    parts: Float[np.ndarray, " p"]
    prior: float
    noise: float
    relative: Float[np.ndarray, " n"]
    points: tuple[Float[np.ndarray, "m _"], ...] = ()


class _Known(NamedTuple):
    """Sums over all rows, as in `sparse_gp.RowSums`, and the factors of both matrices.

    Attributes:
        whiten: W = L^-1, with the factor L of K_zz, the covariance of the inducing points with jitter.
        outer: [m, m], the sum over the rows of a a' / r, with a = W k.
        cross: [m], the sum over the rows of y a / r.
        inverse: [m, m], B^-1, with B = I + outer / noise.
        half_log_det: log|B| / 2.
        mean: [m], B^-1 cross / noise, the mean of the whitened inducing values.
        gap: the sum over the rows of the variance that the inducing points do not explain, over r.
    """

    whiten: Float[np.ndarray, "m m"]
    outer: Float[np.ndarray, "m m"]
    cross: Float[np.ndarray, " m"]
    inverse: Float[np.ndarray, "m m"]
    half_log_det: float
    mean: Float[np.ndarray, " m"]
    gap: float


def bound(
    points: Sequence[Part],
    rows: Sequence[Float[np.ndarray, "n _"]],
    jitter: float,
    noise: float,
    relative: Float[np.ndarray, " n"],
    targets: Float[np.ndarray, " n"],
) -> tuple[float, Gradient | None]:
    """The collapsed bound on log p(y) and its derivatives; NaN and None where a matrix is not positive definite.

    Titsias (2009), eq. 9. It takes O(n m^2) time.

    Args:
        points: the parts of the kernel, with the inducing points.
        rows: the same rows of data, as each part takes them.
        jitter: on the diagonal of the inducing points' covariance, as a fraction of the prior variance.
        noise: the likelihood's common variance.
        relative: r, the variance of every row's noise over the common one.
        targets: y.

    Example:
        >>> one, y = np.zeros((1, 1)), np.ones(1)
        >>> value, gradient = bound([Part(one, 1.0, np.ones(1))], [one], 0.0, 1.0, y, y)
        >>> print(round(value, 4), round(gradient.noise, 4))
        -1.5155 -0.125
    """
    problem = _BoundTerms(points, rows, jitter, noise, relative, targets)
    known = problem.known()
    if known is None:
        return float("nan"), None
    log_noise = len(targets) * (LOG_2PI + np.log(noise)) + float(np.log(relative).sum())
    fit = float(known.mean @ known.cross) - problem.square - known.gap
    return fit / noise / 2 - known.half_log_det - log_noise / 2, problem.gradient(known)


class _BoundTerms:
    """The arguments of `bound`, and the numbers that it needs more than once."""

    def __init__(
        self,
        points: Sequence[Part],
        rows: Sequence[Float[np.ndarray, "n _"]],
        jitter: float,
        noise: float,
        relative: Float[np.ndarray, " n"],
        targets: Float[np.ndarray, " n"],
    ) -> None:
        self.points, self.rows, self.jitter, self.noise = points, rows, jitter, noise
        self.targets, self.precisions = targets, 1 / relative
        self.prior, self.square = sum(float(part.variance) for part in points), float(targets**2 @ self.precisions)
        size = len(points) * len(targets) * len(points[0].rows)
        self.grams = cache(self._grams) if size <= _HELD else self._grams

    def _grams(self, first: int) -> list[Float[np.ndarray, "m c"]]:
        """The covariances of the inducing points with a chunk of rows, from the row `first` on, for each part."""
        some = slice(first, first + _CHUNK)
        return [covariance(part, each[some]) for part, each in zip(self.points, self.rows, strict=True)]

    def known(self) -> _Known | None:
        """The sums over all rows, and the factors; None where a matrix is not positive definite."""
        gram, targets, roots = _total(list(map(_of_points, self.points))), self.targets, np.sqrt(self.precisions)
        gram.flat[:: len(gram) + 1] += self.jitter * self.prior
        whiten = inverse_factor(gram)
        outer, cross = np.zeros_like(gram), np.zeros(len(gram))
        for some in _chunks(len(targets)):
            root = whitened(whiten, _total(self.grams(some.start)))
            root *= roots[some]
            outer += root @ root.T
            cross += root @ (targets[some] * roots[some])
        factor = cholesky(outer / self.noise + np.eye(len(gram)))
        if not np.isfinite(factor[-1, -1]):
            return None
        log_det = float(half_log_det(factor))  # before the factor's memory holds its inverse
        inverse = crossproduct(inverse_triangular(factor))
        gap = max(self.prior * float(self.precisions.sum()) - float(np.trace(outer)), 0.0)
        return _Known(whiten, outer, cross, inverse, log_det, inverse @ cross / self.noise, gap)

    def gradient(self, known: _Known) -> Gradient:
        """One more pass over the rows, with the cotangents of the sums known.

        Let b be the mean of the whitened inducing values. These are the cotangents:

        - of the outer sum: G = (I - B^-1 - b b') / (2 noise).
        - of the cross sum: b / noise.
        - of a row's covariances k: (H k + W'b y / noise) / r, with H = 2 W'G W.
        - of K_zz: -W'(B - 2 I + B^-1 + b b')W / 2.

        Where the gap is lost in rounding, it has no derivative. Then the I in G is omitted, and so is B - I in the
        cotangent of K_zz.
        """
        whiten, inverse, noise, targets = known.whiten, known.inverse, self.noise, self.targets
        is_open, eye, square = float(known.gap > 0), np.eye(len(known.mean)), np.outer(known.mean, known.mean)
        target_factor = whiten.T @ known.mean / noise
        gram_factor = whiten.T @ ((is_open * eye - inverse - square) / noise) @ whiten
        point_cotangent = whiten.T @ (is_open * known.outer / noise - eye + inverse + square) @ whiten / -2
        sums, grad_precisions = [_ByPart(part) for part in self.points], np.empty(len(targets))
        for some in _chunks(len(targets)):
            grams = self.grams(some.start)
            gram = _total(grams)
            cotangent = gram_factor @ gram
            grad_precisions[some] = np.einsum("mn,mn->n", cotangent, gram) / 2 + (target_factor @ gram) * targets[some]
            cotangent += target_factor[:, None] * targets[some]
            cotangent *= self.precisions[some]
            for part, each, one in zip(sums, self.rows, grams, strict=True):
                one *= cotangent
                part.add(each[some], one)
        grad_precisions += 1 / self.precisions / 2 - (is_open * self.prior + targets**2) / noise / 2
        for part in sums:
            part.add_points(point_cotangent)
        grad_gap = is_open * float(self.precisions.sum()) / noise / 2
        return Gradient(
            parts=np.concatenate([part.by_hyperparameters for part in sums]),
            prior=self.jitter * float(np.trace(point_cotangent)) - grad_gap,
            noise=self._by_noise(known),
            relative=-grad_precisions * self.precisions**2,
            points=tuple(part.grad_points / part.part.lengthscale for part in sums),
        )

    def _by_noise(self, known: _Known) -> float:
        spread = float(known.mean @ (known.outer @ known.mean - 2 * known.cross))
        unexplained = (self.square + known.gap + spread) / self.noise
        return (unexplained + len(known.mean) - float(np.trace(known.inverse)) - len(self.targets)) / self.noise / 2


class _ByPart:
    """Sums of a cotangent times the derivatives of one part's covariances."""

    def __init__(self, part: Part) -> None:
        self.part, self.points = part, _scaled(part, part.rows)
        self.total, self.grad_columns, self.grad_points = 0.0, np.zeros(part.rows.shape[1]), np.zeros_like(part.rows)

    def add(self, rows: Float[np.ndarray, "n d"], weighted: Float[np.ndarray, "m n"], times: float = 1.0) -> None:
        """Add the sums over rows; `weighted` is the cotangent times their covariances with the points."""
        s, points = _scaled(self.part, rows), self.points
        products = weighted @ np.concatenate([np.ones_like(s[:, :1]), s], axis=1)
        point_sums, row_products, row_sums = products[:, :1], products[:, 1:], weighted.sum(axis=0)
        self.total += float(point_sums.sum())
        # The derivative of K is K (s - z)^2 by the log of a lengthscale, and K (s - z) / lengthscale by a point.
        self.grad_columns += (points**2 * point_sums - 2 * points * row_products).sum(axis=0) + row_sums @ s**2
        self.grad_points += times * (row_products - point_sums * points)

    def add_points(self, cotangent: Float[np.ndarray, "m m"]) -> None:
        """Add the sums over pairs of inducing points, where every point is on both sides."""
        self.add(self.part.rows, cotangent * _of_points(self.part), times=2.0)

    @property
    def by_hyperparameters(self) -> Float[np.ndarray, " q"]:
        """The sums for the log variance and the log lengthscales."""
        wide = len(self.part.lengthscale) == len(self.grad_columns)
        return np.append(self.total, self.grad_columns if wide else self.grad_columns.sum(keepdims=True))


def covariance(part: Part, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "m n"]:
    """K(z, x) of the inducing points with rows, by one product of matrices; no covariance is above the variance."""
    points, rows = _scaled(part, part.rows), _scaled(part, rows)
    point_halves, row_halves = (column_squares(each.T)[:, None] / -2 for each in (points, rows))
    left = np.concatenate([points, point_halves, np.ones_like(point_halves)], axis=1)
    right = np.concatenate([rows, np.ones_like(row_halves), row_halves], axis=1)
    exponents = left @ right.T
    np.minimum(exponents, 0, out=exponents)
    np.exp(exponents, out=exponents)
    exponents *= float(part.variance)
    return exponents


def _of_points(part: Part) -> Float[np.ndarray, "m m"]:
    """K(z, z) with an exact diagonal, where the rounding of large rows would show."""
    gram = covariance(part, part.rows)
    gram.flat[:: len(gram) + 1] = float(part.variance)
    return gram


def _scaled(part: Part, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Rows in lengthscales from the median of the inducing points, which no outlier moves: less cancels in squares."""
    return (rows - np.median(part.rows, axis=0)) / part.lengthscale


def whitened(whiten: Float[np.ndarray, "m m"], cross: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "m n"]:
    """W k of a lower triangular W, in the memory of the covariances k: half of the operations of a product."""
    (trmm,) = blas.get_blas_funcs(("trmm",), (whiten, cross))
    return trmm(1.0, whiten, cross.T, side=1, lower=1, trans_a=1, overwrite_b=1).T


def _chunks(n: int) -> list[slice]:
    return [slice(first, first + _CHUNK) for first in range(0, n, _CHUNK)]


def _total(parts: list[Float[np.ndarray, "m c"]]) -> Float[np.ndarray, "m c"]:
    """The sum of the parts, in new memory."""
    return sum(parts[1:], parts[0].copy())
