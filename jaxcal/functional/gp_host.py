"""The evidence of an exact Gaussian process and its derivatives by NumPy and LAPACK, which compile nothing.

`gp.likelihood_terms`, `gp.average_information` and `kernels.squared_exponential_derivatives` are the same formulas in
JAX, for accelerators and for transformations. Here the covariance is a sum of squared exponentials, each on rows of its
own, and `potri` gives G^-1 in place of two products of matrices: n^3 operations in all, where XLA needs three times as
many.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import lapack

from jaxcal.functional.gp import LOG_2PI


class Part(NamedTuple):
    """A squared exponential, variance * exp(-|a - b|^2 / (2 lengthscale^2)) on rows a; RIO, eq. 3.

    Attributes:
        rows: [n, d].
        variance: the covariance of a row with itself.
        lengthscale: one for all columns [1], or one each [d].
    """

    rows: Float[np.ndarray, "n d"]
    variance: float
    lengthscale: Float[np.ndarray, " k"]


class Terms(NamedTuple):
    """log N(y; 0, G) and what a Newton step and the posterior need.

    Attributes:
        value: the log evidence; NaN where G is not positive definite, and then nothing else is there.
        gradient: [p], by the log variance and the log lengthscales of each part, then by what is on the diagonal alone.
        information: [p, p], the average information; Gilmour, Thompson & Cullis (1995), eq. 6.
        weights: [n], a = G^-1 y.
        factor: [n, n], the lower Cholesky factor L of G.
        precision: [n], the diagonal of G^-1.
    """

    value: float
    gradient: Float[np.ndarray, " p"]
    information: Float[np.ndarray, "p p"]
    weights: Float[np.ndarray, " n"]
    factor: Float[np.ndarray, "n n"]
    precision: Float[np.ndarray, " n"]


def likelihood_terms(
    parts: Sequence[Part],
    diagonal: Float[np.ndarray, " n"],
    by_diagonal: Float[np.ndarray, "n p"],
    targets: Float[np.ndarray, " n"],
) -> Terms | None:
    """The log evidence of G = K + diag(diagonal), with its gradient and average information.

    Args:
        parts: of K.
        diagonal: what is on the diagonal beside the kernel: noise, and jitter.
        by_diagonal: its derivative by every hyperparameter.
        targets: y.

    Returns:
        the terms; None where G is not positive definite, or not finite.

    Example:
        >>> rows, y = np.zeros((2, 1)), np.array([1.0, -1.0])
        >>> terms = likelihood_terms([Part(rows, 1.0, np.ones(1))], np.ones(2), np.zeros((2, 3)), y)
        >>> print(round(terms.value, 4), terms.weights)
        -3.3872 [ 1. -1.]
    """
    dtype = targets.dtype
    diagonal, by_diagonal = diagonal.astype(dtype), by_diagonal.astype(dtype)
    covariances = [_covariance(part) for part in parts]
    gram = sum(covariances[1:], covariances[0].copy())
    on_diagonal = slice(None, None, len(targets) + 1)
    gram.flat[on_diagonal] += diagonal
    potrf, potri = lapack.get_lapack_funcs(("potrf", "potri"), (gram,))
    factor, failed = potrf(gram, lower=1, clean=1, overwrite_a=1)
    if failed or not np.isfinite(factor[-1, -1]):
        return None
    inverse, _ = potri(factor, lower=1)
    inverse = _mirrored(inverse)
    weights = inverse @ targets
    log_det = np.log(np.diagonal(factor)).sum(dtype=float)  # half of it
    value = -float(targets.astype(float) @ weights) / 2 - log_det - len(targets) * LOG_2PI / 2

    # The derivative by G, (a a' - G^-1) / 2; Rasmussen & Williams (2006), eq. 5.9.
    by_gram = np.multiply.outer(weights, weights)
    by_gram -= inverse
    by_gram /= 2
    gradient = (by_gram.flat[on_diagonal] @ by_diagonal).astype(dtype)
    products = by_diagonal * weights[:, None]  # the columns G_i a
    at = 0
    for part, covariance in zip(parts, covariances, strict=True):
        sums, columns = _derivatives(part, covariance, weights, by_gram)
        gradient[at : at + len(sums)] += sums
        products[:, at : at + len(sums)] += columns
        at += len(sums)
    information = products.T @ (inverse @ products) / 2
    precision = inverse.flat[on_diagonal].copy()
    return Terms(value, gradient, information, weights, factor, precision)


def _covariance(part: Part) -> Float[np.ndarray, "n n"]:
    """K(a, a), symmetric, with the variance on its diagonal."""
    scaled = _scaled(part)
    halves = np.einsum("ij,ij->i", scaled, scaled) / 2
    # -|a - b|^2 / 2 by one product of matrices: no exponent is above 0, and those of the diagonal are 0.
    exponents = scaled @ scaled.T
    exponents -= halves[:, None]
    exponents -= halves
    np.minimum(exponents, 0, out=exponents)
    exponents.flat[:: len(halves) + 1] = 0
    np.exp(exponents, out=exponents)
    exponents *= exponents.dtype.type(part.variance)
    return exponents


def _scaled(part: Part) -> Float[np.ndarray, "n d"]:
    """Rows in lengthscales, from their mean: distances are the same, and less cancels in their squares."""
    return (part.rows - part.rows.mean(axis=0)) / part.lengthscale.astype(part.rows.dtype)


def _derivatives(
    part: Part,
    covariance: Float[np.ndarray, "n n"],
    weights: Float[np.ndarray, " n"],
    cotangents: Float[np.ndarray, "n n"],
) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, "n q"]]:
    """sum(S K_i) and K_i a of the log variance and the log lengthscales: `kernels.squared_exponential_derivatives`."""
    s = _scaled(part)
    squares, a = s * s, weights[:, None]
    weighted = cotangents * covariance
    total = weighted.sum(axis=1)
    sums = 2 * (total @ squares - np.einsum("ij,ij->j", s, weighted @ s))
    found = covariance @ np.concatenate([a, s * a, squares * a], axis=1)
    by_weights, by_rows, by_squares = np.split(found, [1, 1 + s.shape[1]], axis=1)
    products = squares * by_weights - 2 * s * by_rows + by_squares
    if len(part.lengthscale) < s.shape[1]:  # one for all columns
        sums, products = sums.sum(keepdims=True), products.sum(axis=1, keepdims=True)
    return np.append(total.sum(), sums), np.concatenate([by_weights, products], axis=1)


def _mirrored(lower: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """The symmetric matrix whose lower triangle is given."""
    whole = np.tril(lower)
    whole += np.tril(lower, -1).T
    return whole
