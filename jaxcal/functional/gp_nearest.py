"""A Gaussian process in which each row is given few others: leave-one-out errors and their CRPS by NumPy.

Vecchia (1988) conditions on few rows. The covariance is a sum of squared exponentials (`gp_host.Part`). All systems of
few rows are solved at once. The derivatives are sums over the systems in closed form, so nothing is compiled.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Float, Int

from jaxcal.functional.gp_host import Part

# How many covariances are held at once at most, and how many rows are solved at once. Arrays that fit into the cache of
# a processor take a third of the time.
_COVARIANCES, _ROWS = 2**20, 64


def nearest(
    parts: Sequence[Part], at: Sequence[Float[np.ndarray, "m _"]], number: int, without: Int[np.ndarray, " m"] | None
) -> Int[np.ndarray, "m k"]:
    """The numbers of the rows with the largest covariances with each point: the nearest rows in the kernel's metric.

    Args:
        parts: with the rows.
        at: the points, as each part takes them.
        number: how many rows each point gets.
        without: for every point the number of a row that does not count; None where all rows count.
    """
    n, m = len(parts[0].rows), len(at[0])
    scaled = [(part.rows / part.lengthscale, points / part.lengthscale) for part, points in zip(parts, at, strict=True)]
    at_once, neighbors = max(1, _COVARIANCES // n), []
    for first in range(0, m, at_once):
        some = slice(first, first + at_once)
        total = np.zeros((len(at[0][some]), n), np.float32)
        for part, (rows, points) in zip(parts, scaled, strict=True):
            total += part.variance * np.exp(_exponents(points[some], rows))
        if without is not None:
            total[np.arange(len(total)), without[some]] = -np.inf
        chosen = np.argpartition(total, n - number, axis=1)[:, n - number :]
        # Sorted, so that the order does not depend on the search.
        neighbors.append(np.sort(chosen, axis=1))
    return np.concatenate(neighbors)


def _exponents(a: Float[np.ndarray, "m d"], b: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "m n"]:
    """-|a - b|^2 / 2 by one product of matrices, at most 0."""
    middle = b.mean(axis=0)
    a, b = (a - middle).astype(np.float32), (b - middle).astype(np.float32)
    halves_a, halves_b = (np.einsum("ij,ij->i", each, each) / 2 for each in (a, b))
    return np.minimum(a @ b.T - halves_a[:, None] - halves_b[None], 0)


class Few(NamedTuple):
    """Points, and the rows that each point is given.

    Attributes:
        at: the points, as each part takes them.
        near: [r, k], the numbers of the rows.
    """

    at: Sequence[Float[np.ndarray, "r _"]]
    near: Int[np.ndarray, "r k"]

    def parts(self) -> Iterator[tuple[slice, "Few"]]:
        """Batches of the points, each with its slice."""
        for first in range(0, len(self.near), _ROWS):
            some = slice(first, first + _ROWS)
            yield some, Few([points[some] for points in self.at], self.near[some])


class Noisy(NamedTuple):
    """The variances that are added to the kernel's diagonal, and the targets.

    Attributes:
        variances: of all rows [n].
        derivatives: of the variances with respect to every hyperparameter [n, p]. These are the log variance and the
            log lengthscales of each part, and then the hyperparameters of the noise alone.
        targets: of all rows [n].
    """

    variances: Float[np.ndarray, " n"]
    derivatives: Float[np.ndarray, "n p"]
    targets: Float[np.ndarray, " n"]


def predict(
    parts: Sequence[Part], few: Few, noises: Float[np.ndarray, " n"], targets: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " r"], Float[np.ndarray, " r"]]:
    """Latent means and variances at points, each given the rows near it; RIO, eq. 5 and 6.

    Args:
        parts: with the rows.
        few: the points, and the rows near each.
        noises: of all rows, the variances that are added to the kernel's diagonal.
        targets: of all rows.
    """
    solved = [_solved(parts, some, noises, targets) for _, some in few.parts()]
    return np.concatenate([each.mean for each in solved]), np.concatenate([each.variance for each in solved])


def log_crps(
    parts: Sequence[Part], rows: Int[np.ndarray, " r"], near: Int[np.ndarray, "r k"], noisy: Noisy
) -> tuple[float, Float[np.ndarray, " p"]]:
    """r log(mean CRPS) of r rows, each given the rows near it, and its gradient; NaN where a system is singular.

    Args:
        parts: with the rows.
        rows: the numbers of the r rows that are scored.
        near: the numbers of the rows that each of them is given.
        noisy: the noise and the targets.

    Returns:
        the loss, in nats as a log density, and its gradient.
    """
    total, gradient = 0.0, np.zeros(noisy.derivatives.shape[1])
    try:
        for some, few in Few([part.rows[rows] for part in parts], near).parts():
            value, slope = _crps(parts, rows[some], few, noisy)
            total, gradient = total + value, gradient + slope
    except np.linalg.LinAlgError:
        return float("nan"), np.full_like(gradient, np.nan)
    return float(len(rows) * np.log(total / len(rows))), gradient * (len(rows) / total)


class _Solved(NamedTuple):
    """Points given few rows, where G is the rows' covariance and c their covariances with the point.

    Attributes:
        mean, variance: [r], of the latent function.
        shares: [r, k], a = G^-1 c.
        weights: [r, k], w = G^-1 y, where y are the rows' targets.
        offsets: for every part the rows minus the point, in lengthscales.
        grams: the part of G that each part of the kernel adds.
        crosses: the part of c that each part of the kernel adds.
    """

    mean: Float[np.ndarray, " r"]
    variance: Float[np.ndarray, " r"]
    shares: Float[np.ndarray, "r k"]
    weights: Float[np.ndarray, "r k"]
    offsets: list[Float[np.ndarray, "r k _"]]
    grams: list[Float[np.ndarray, "r k k"]]
    crosses: list[Float[np.ndarray, "r k"]]


def _solved(
    parts: Sequence[Part], few: Few, noises: Float[np.ndarray, " n"], targets: Float[np.ndarray, " n"]
) -> _Solved:
    each = list(zip(parts, few.at, strict=True))
    offsets = [(part.rows[few.near] - points[:, None]) / part.lengthscale for part, points in each]
    squares = [np.einsum("rkd,rkd->rk", one, one) / 2 for one in offsets]
    grams = [_gram(part, *one) for part, *one in zip(parts, offsets, squares, strict=True)]
    crosses = [part.variance * np.exp(-half) for part, half in zip(parts, squares, strict=True)]
    gram, cross, diagonal = sum(grams[1:], grams[0].copy()), sum(crosses[1:], crosses[0]), np.arange(few.near.shape[1])
    gram[:, diagonal, diagonal] += noises[few.near]
    # a = G^-1 c, w = G^-1 y, mean = c'w, variance = k - a'c.
    right = np.stack([cross, targets[few.near]], axis=-1)
    shares, weights = np.moveaxis(np.linalg.solve(gram, right), -1, 0)
    prior = sum(part.variance for part in parts)
    variance = np.maximum(prior - (shares * cross).sum(-1), 0)
    return _Solved((weights * cross).sum(-1), variance, shares, weights, offsets, grams, crosses)


def _crps(
    parts: Sequence[Part], rows: Int[np.ndarray, " r"], few: Few, noisy: Noisy
) -> tuple[float, Float[np.ndarray, " p"]]:
    """The sum of the rows' CRPS, and its gradient.

    A target has the error e = y - c'w and the variance v = k - a'c + noise. Let z = e / sqrt(v). By the formula of
    Gneiting & Raftery (2007), the CRPS has these derivatives:

    - with respect to e: 2 Phi(z) - 1.
    - with respect to v: (2 phi(z) - 1 / sqrt(pi)) / (2 sqrt(v)).

    The differentials are de = a'(dG) w - (dc)'w and dv = dk - 2 a'(dc) + a'(dG) a + d noise.
    """
    solved = _solved(parts, few, noisy.variances, noisy.targets)
    error, variance = noisy.targets[rows] - solved.mean, solved.variance + noisy.variances[rows]
    std = np.sqrt(variance)
    z = error / std
    spread = 2 * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    grad_error, grad_variance = 2 * scipy.special.ndtr(z) - 1, spread / (2 * std)
    # Where the latent variance is lost in rounding, it is 0 and has no derivative.
    latent = np.where(solved.variance > 0, grad_variance, 0)
    a, w = solved.shares, solved.weights
    # The cotangent of G is the product a b', with b = grad_error w + latent a. The cotangent of c is `cross_cotangent`.
    b = grad_error[:, None] * w + latent[:, None] * a
    cross_cotangent = -grad_error[:, None] * w - 2 * latent[:, None] * a
    gradient = grad_variance @ noisy.derivatives[rows] + np.tensordot(a * b, noisy.derivatives[few.near], axes=2)
    first = 0
    for k, part in enumerate(parts):
        cross = cross_cotangent * solved.crosses[k]
        slopes = _by_part(part, solved.offsets[k], solved.grams[k], a, b, cross)
        slopes[0] += latent.sum() * part.variance
        gradient[first : first + len(slopes)] += slopes
        first += len(slopes)
    return float((error * grad_error + std * spread).sum()), gradient


def _gram(
    part: Part, offsets: Float[np.ndarray, "r k d"], halves: Float[np.ndarray, "r k"]
) -> Float[np.ndarray, "r k k"]:
    gram = offsets @ offsets.swapaxes(1, 2)
    gram -= halves[..., None]
    gram -= halves[:, None]
    np.exp(np.minimum(gram, 0, out=gram), out=gram)
    gram *= part.variance
    diagonal = np.arange(gram.shape[1])
    gram[:, diagonal, diagonal] = part.variance
    return gram


def _by_part(
    part: Part,
    offsets: Float[np.ndarray, "r k d"],
    gram: Float[np.ndarray, "r k k"],
    a: Float[np.ndarray, "r k"],
    b: Float[np.ndarray, "r k"],
    cross: Float[np.ndarray, "r k"],
) -> Float[np.ndarray, " q"]:
    """The gradient with respect to the log variance and the log lengthscales, from the cotangents of G and c.

    The cotangent of G is a b'. `cross` is c times its cotangent. The derivative of G with respect to a log lengthscale
    is G_kl (s_k - s_l)^2, with s the rows in lengthscales.
    """
    squares, right = offsets**2, b[..., None]
    products = gram @ np.concatenate([right, offsets * right, squares * right], axis=-1)
    right_sums, offset_sums, square_sums = np.split(products, [1, 1 + offsets.shape[-1]], axis=-1)
    # sum_l G_kl (s_k - s_l)^2 b_l = s_k^2 (G b)_k - 2 s_k (G s b)_k + (G s^2 b)_k.
    sums = squares * right_sums - 2 * offsets * offset_sums + square_sums
    grad_lengthscale = np.tensordot(a, sums, axes=2) + np.tensordot(cross, squares, axes=2)
    if len(part.lengthscale) < offsets.shape[-1]:  # one for all columns
        grad_lengthscale = grad_lengthscale.sum(keepdims=True)
    return np.append((a * right_sums[..., 0]).sum() + cross.sum(), grad_lengthscale)
