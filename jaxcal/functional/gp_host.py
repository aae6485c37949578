"""The marginal likelihood of an exact Gaussian process and its derivatives, by NumPy and LAPACK without compilation.

`gp.likelihood_terms`, `gp.average_information` and `kernels.squared_exponential_derivatives` are the same formulas in
JAX, for accelerators and for transformations. Here the covariance is a sum of squared exponentials, each on its own
rows. LAPACK's `potri` computes G^-1 in place of two products of matrices. In all this takes n^3 operations, where XLA
needs three times as many.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcal.functional import _lapack
from jaxcal.functional.gp import LOG_2PI

# How many rows of a triangle are mirrored at a time.
_BLOCK = 64


class Part(NamedTuple):
    """A squared exponential, variance * exp(-|a - b|^2 / (2 lengthscale^2)) on rows a; RIO, eq. 3.

    Attributes:
        rows: [n, d].
        variance: the covariance of a row with itself.
        lengthscale: one for all columns [1], or one each [d].
    """

    rows: Float[np.ndarray, "n d"]
    variance: Float[Any, ""]
    lengthscale: Float[np.ndarray, " k"]


class Terms(NamedTuple):
    """log N(y; 0, G), and the derivatives that a step of an optimizer needs.

    Attributes:
        value: the log marginal likelihood.
        gradient: [p], with respect to the log variance and the log lengthscales of each part, and then to the
            hyperparameters of the diagonal alone.
        information: [p, p], the average information; Gilmour, Thompson & Cullis (1995), eq. 6.
        grad_diagonal: [n], the derivative with respect to every entry of the diagonal.
    """

    value: float
    gradient: Float[np.ndarray, " p"]
    information: Float[np.ndarray, "p p"]
    grad_diagonal: Float[np.ndarray, " n"]


def likelihood_terms(
    parts: Sequence[Part],
    diagonal: Float[np.ndarray, " n"],
    derivatives: Float[np.ndarray, "n p"],
    targets: Float[np.ndarray, " n"],
    memory: Float[np.ndarray, "k n n"],
) -> Terms | None:
    """The log marginal likelihood of G = K + diag(diagonal), with its gradient and average information.

    Args:
        parts: of K.
        diagonal: the noise and the jitter, which are added to the diagonal of K.
        derivatives: of the diagonal, with respect to every hyperparameter.
        targets: y.
        memory: one matrix for each part and one more, in which everything is computed. Of 800 rows, a new allocation
            for every call would take a quarter of the time.

    Returns:
        the terms; None where G is not positive definite, or not finite.

    Example:
        >>> rows, y = np.zeros((2, 1)), np.array([1.0, -1.0])
        >>> parts, memory = [Part(rows, 1.0, np.ones(1))], np.empty((2, 2, 2))
        >>> terms = likelihood_terms(parts, np.ones(2), np.zeros((2, 3)), y, memory)
        >>> print(round(terms.value, 4), terms.grad_diagonal.round(4))
        -3.3872 [0.1667 0.1667]
    """
    derivatives = derivatives.astype(targets.dtype)
    *covariances, gram = memory
    factor = _factor(parts, diagonal, covariances, gram)
    if factor is None:
        return None
    half_log_det = np.log(np.diagonal(factor)).sum(dtype=float)
    _lapack.invert(factor)
    inverse = _mirrored(factor)
    weights, precision = inverse @ targets, np.diagonal(inverse).copy()
    # log p(y) = -y'a / 2 - log|G| / 2 - n log(2 pi) / 2, with a = G^-1 y; Rasmussen & Williams (2006), eq. 2.30.
    value = -float(targets.astype(float) @ weights) / 2 - half_log_det - len(targets) * LOG_2PI / 2

    # The derivative with respect to G is (a a' - G^-1) / 2; Rasmussen & Williams (2006), eq. 5.9.
    grad_diagonal = (weights**2 - precision) / 2
    gradient = grad_diagonal @ derivatives
    products = derivatives * weights[:, None]  # the columns G_i a
    at = 0
    for part, covariance in zip(parts, covariances, strict=True):
        sums, columns = _derivatives(part, covariance, weights, inverse)
        gradient[at : at + len(sums)] += sums
        products[:, at : at + len(sums)] += columns
        at += len(sums)
    # (G_i a)' G^-1 (G_j a) / 2; Gilmour, Thompson & Cullis (1995), eq. 6.
    information = products.T @ (inverse @ products) / 2
    return Terms(value, gradient, information, grad_diagonal)


def _factor(
    parts: Sequence[Part],
    diagonal: Float[np.ndarray, " n"],
    covariances: Sequence[Float[np.ndarray, "n n"]],
    gram: Float[np.ndarray, "n n"],
) -> Float[np.ndarray, "n n"] | None:
    """The lower Cholesky factor, in the memory of the Gram matrix; None where G is not positive definite, or finite."""
    gram[:] = 0
    for part, covariance in zip(parts, covariances, strict=True):
        _covariance(part, covariance)
        gram += covariance
    gram.flat[:: len(gram) + 1] += diagonal.astype(gram.dtype)
    factor = gram.T  # LAPACK stores by columns
    return factor if _lapack.factorize(factor) and np.isfinite(factor[-1, -1]) else None


def _covariance(part: Part, exponents: Float[np.ndarray, "n n"]) -> None:
    """Overwrite `exponents` with K(a, a), symmetric and with the exact variance on its diagonal."""
    scaled = _scaled(part)
    halves, ones = np.einsum("ij,ij->i", scaled, scaled)[:, None] / -2, np.ones_like(scaled[:, :1])
    # -|a - b|^2 / 2 = a.b - |a|^2 / 2 - |b|^2 / 2 by one product of matrices. Rounding may not leave an exponent above
    # 0, and the exponents on the diagonal are 0.
    left, right = np.concatenate([scaled, halves, ones], axis=1), np.concatenate([scaled, ones, halves], axis=1)
    np.matmul(left, right.T, out=exponents)
    np.minimum(exponents, 0, out=exponents)
    exponents.flat[:: len(halves) + 1] = 0
    np.exp(exponents, out=exponents)
    exponents *= exponents.dtype.type(part.variance)


def _scaled(part: Part) -> Float[np.ndarray, "n d"]:
    """Rows minus their mean, in lengthscales: distances do not change, and less cancels in their squares."""
    return (part.rows - part.rows.mean(axis=0)) / part.lengthscale.astype(part.rows.dtype)


def _derivatives(
    part: Part, gram: Float[np.ndarray, "n n"], weights: Float[np.ndarray, " n"], inverse: Float[np.ndarray, "n n"]
) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, "n q"]]:
    """sum(S K_i) with S = (a a' - G^-1) / 2, and K_i a, for the log variance and the log lengthscales i.

    `kernels.squared_exponential_derivatives` has the formulas. The part a a' of S needs no product of its own: it
    follows from the products of K with a. The Gram matrix is overwritten.
    """
    s = _scaled(part)
    squares, a, ones = s * s, weights[:, None], np.ones_like(s[:, :1])
    gram_products = gram @ np.concatenate([a, s * a, squares * a], axis=1)
    weight_sums, row_sums, square_sums = np.split(gram_products, [1, 1 + s.shape[1]], axis=1)
    np.multiply(inverse, gram, out=gram)
    weighted = gram @ np.concatenate([ones, s], axis=1)
    total, scaled_total = (a * weight_sums - weighted[:, :1]) / 2, (a * row_sums - weighted[:, 1:]) / 2
    sums = 2 * (squares * total - s * scaled_total).sum(axis=0)
    products = squares * weight_sums - 2 * s * row_sums + square_sums
    if len(part.lengthscale) < s.shape[1]:  # one for all columns
        sums, products = sums.sum(keepdims=True), products.sum(axis=1, keepdims=True)
    return np.append(total.sum(), sums), np.concatenate([weight_sums, products], axis=1)


def _mirrored(lower: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Copy the lower triangle of a matrix to its upper triangle, in place and block by block."""
    for first in range(0, len(lower), _BLOCK):
        block = slice(first, first + _BLOCK)
        below = slice(first + _BLOCK, None)
        lower[block, below] = lower[below, block].T
        square = lower[block, block]
        square[:] = np.tril(square) + np.tril(square, -1).T
    return lower
