"""Covariances of pairs of rows, as pure functions.

- `squared_exponential`: RIO, eq. 3.
- `squared_exponential_derivatives`: its derivatives with respect to its hyperparameters, in products with a vector and
  a matrix.
- `relu_covariance`: the covariance of rectified normal variables from their covariance, Cho & Saul (2009).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxcal._numpy import AnyArray, constant, namespace
from jaxcal._programs import exact_products
from jaxcal.functional.linalg import sqrt

# Rows of at most this number of columns are subtracted: that is exact, and as fast as a product of matrices.
_FEW_COLUMNS = 8


def squared_exponential(
    a: Float[AnyArray, "n d"],
    b: Float[AnyArray, "m d"],
    lengthscale: Float[AnyArray, ""] | Float[AnyArray, " d"],
    variance: ArrayLike = 1.0,
) -> Float[AnyArray, "n m"]:
    """variance * exp(-|a - b|^2 / (2 lengthscale^2)) for every pair of rows; RIO, eq. 3.

    No squared distance is negative, so no covariance exceeds the variance at any lengthscale. Up to eight columns, the
    distances come from differences of rows, which rounding does not spoil. For more columns they come from one matrix
    product. In 32 bits its rounding shows where a lengthscale is less than a thousandth of the rows' distance from
    their mean.

    With one lengthscale for all columns, the derivative with respect to hyperparameters does not pass through `b`. So
    let `b` be the many rows, and `a` the few inducing points.

    Args:
        a: rows.
        b: other rows.
        lengthscale: one for all columns, or one for each.
        variance: the covariance of a row with itself.

    >>> import jax.numpy as jnp
    >>> round(squared_exponential(jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.asarray(1.0)).item(), 4)
    0.3679
    """
    xp = namespace(a, b, lengthscale, variance)
    if np.ndim(lengthscale):
        return xp.asarray(variance) * exp(-0.5 * squared_distances(a, b, 1 / lengthscale))
    distances = squared_distances(a, b, xp.ones(a.shape[1], a.dtype))
    return xp.asarray(variance) * exp(-0.5 * lengthscale**-2 * distances)


def exp(values: Float[AnyArray, "n m"]) -> Float[AnyArray, "n m"]:
    """The exponential function; an array of NumPy is overwritten, so no other code may use it.

    >>> exp(np.zeros((1, 1))).item()
    1.0
    """
    return jnp.exp(values) if namespace(values) is jnp else np.exp(values, out=values)


def squared_distances(
    a: Float[AnyArray, "n d"], b: Float[AnyArray, "m d"], weights: Float[AnyArray, " d"]
) -> Float[AnyArray, "n m"]:
    """|weights (a - b)|^2 for every pair of rows, never negative.

    >>> squared_distances(np.zeros((1, 2)), np.ones((1, 2)), np.array([1.0, 3.0])).item()
    10.0
    """
    has_derivatives = namespace(a, b, weights) is jnp and a.dtype == jnp.float64
    return _by_products(a, b, weights) if has_derivatives else _distances(a, b, weights)


@exact_products
def weighted_squares(
    a: Float[AnyArray, "n d"],
    b: Float[AnyArray, "m d"],
    weights: Float[AnyArray, " d"],
    pair_weights: Float[AnyArray, "n m"],
) -> Float[AnyArray, " d"]:
    """The sum over pairs of rows of w_ij weights^2 (a_i - b_j)^2 for every column, by one product of matrices.

    With w = -S K it is the sum of S K_d. Here K_d is the derivative of a squared exponential K with respect to the log
    of the weight of column d. A weight is one over a lengthscale.

    Args:
        a: rows.
        b: other rows.
        weights: of the columns.
        pair_weights: w.

    >>> weighted_squares(np.zeros((1, 2)), np.ones((1, 2)), np.array([1.0, 3.0]), np.full((1, 1), 2.0)).tolist()
    [2.0, 18.0]
    """
    # sum_ij w_ij (a_i - b_j)^2 = sum_i a_i^2 (w 1)_i + sum_j b_j^2 (w'1)_j - 2 sum_i a_i (w b)_i.
    a, b = _weighted(a, b, weights)
    first_sums, second_sums = pair_weights.sum(axis=1)[:, None], pair_weights.sum(axis=0)[:, None]
    return (
        (a * a * first_sums).sum(axis=0) + (b * b * second_sums).sum(axis=0) - 2 * (a * (pair_weights @ b)).sum(axis=0)
    )


@exact_products
def _distances(
    a: Float[AnyArray, "n d"], b: Float[AnyArray, "m d"], weights: Float[AnyArray, " d"]
) -> Float[AnyArray, "n m"]:
    xp = namespace(a, b, weights)
    if a.shape[1] <= _FEW_COLUMNS and xp is np:
        return _by_differences(a, b, weights)
    if a.shape[1] <= _FEW_COLUMNS:
        # The difference comes before the weight. Otherwise a multiplication that is fused into the subtraction would
        # round one side alone, and the covariance would not be symmetric.
        columns = ((a[:, j][:, None] - b[:, j][None]) * weights[j] for j in range(a.shape[1]))
        return xp.asarray(sum(map(xp.square, columns)))
    a, b = _weighted(a, b, weights)
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b.
    squares = xp.sum(a * a, axis=1)[:, None] + xp.sum(b * b, axis=1)[None]
    return xp.maximum(squares - 2 * (a @ b.T), 0)


def _by_differences(
    a: Float[np.ndarray, "n d"], b: Float[np.ndarray, "m d"], weights: Float[np.ndarray, " d"]
) -> Float[np.ndarray, "n m"]:
    """`_distances`, column by column in the same memory: allocation would take longer than the computation."""
    total = np.zeros((len(a), len(b)), np.result_type(a, b, weights))
    difference = np.empty_like(total)
    for column_a, column_b, weight in zip(a.T, b.T, weights, strict=True):
        np.subtract(column_a[:, None], column_b[None], out=difference)
        difference *= weight
        total += np.square(difference, out=difference)
    return total


def _weighted(a: AnyArray, b: AnyArray, weights: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Both times the weights, minus the mean of `a`: distances do not change, and smaller numbers cancel less."""
    a, b = a * weights[None], b * weights[None]
    origin = constant(a.mean(axis=0, keepdims=True))
    return a - origin, b - origin


@jax.custom_jvp
def _by_products(a: Float[Array, "n d"], b: Float[Array, "m d"], weights: Float[Array, " d"]) -> Float[Array, "n m"]:
    """`_distances` with a derivative in products of matrices, whose transpose consists of products too.

    The derivative of differences passes over all pairs once for every column. Float32 is too coarse for the products.
    """
    return _distances(a, b, weights)


@_by_products.defjvp
@exact_products
def _by_products_jvp(primals, tangents):
    # d |a - b|^2 = 2 (a.da + b.db - a.db - da.b).
    (a, b), (a_dot, b_dot) = jax.jvp(_weighted, primals, tangents)
    squares = jnp.sum(a * a_dot, axis=1)[:, None] + jnp.sum(b * b_dot, axis=1)[None]
    return _distances(*primals), 2 * (squares - a @ b_dot.T - a_dot @ b.T)


@exact_products
def squared_exponential_derivatives(
    a: Float[Array, "n d"],
    lengthscale: Float[Array, ""] | Float[Array, " d"],
    variance: ArrayLike,
    weights: Float[Array, " n"],
    cotangents: Float[Array, "n n"],
) -> tuple[Float[Array, " p"], Float[Array, "n p"]]:
    """Products with the derivatives K_i of K(a, a) with respect to the log variance (first) and the log lengthscale(s).

    Let s = a / lengthscale, with squares taken by element. Let B be the product by element of S and K. For lengthscale
    j these hold:

    - K_j w = s_j^2 (K w) - 2 s_j K(s_j w) + K(s_j^2 w).
    - sum(S K_j) = 2 sum(s_j^2 (B 1) - s_j (B s_j)).

    So all are products with two matrices, in O(n^2 d) time and O(n^2) memory.

    Args:
        a: rows.
        lengthscale: one for all columns, or one for each.
        variance: the covariance of a row with itself.
        weights: w, one for each row.
        cotangents: S, symmetric.

    Returns:
        sum(S K_i) for every hyperparameter i, and the columns K_i w.

    >>> import jax.numpy as jnp
    >>> a, w = jnp.asarray([[0.0], [1.0]]), jnp.asarray([1.0, 0.0])
    >>> sums, products = squared_exponential_derivatives(a, jnp.ones(1), 1.0, w, jnp.ones((2, 2)))
    >>> print(f"{sums[0]:.3f} {sums[1]:.3f}", products.shape)
    3.213 1.213 (2, 2)
    """
    covariance = squared_exponential(a, a, lengthscale, variance)
    s = (a - jnp.mean(a, axis=0, keepdims=True)) / jnp.reshape(lengthscale, (1, -1))
    squares, w, weighted = s * s, weights[:, None], cotangents * covariance
    weight_sums, row_sums, square_sums = jnp.split(
        covariance @ jnp.concatenate([w, s * w, squares * w], axis=1), [1, 1 + s.shape[1]], axis=1
    )
    products = squares * weight_sums - 2 * s * row_sums + square_sums
    total = jnp.sum(weighted, axis=1, keepdims=True)
    sums = 2 * jnp.sum(squares * total - s * (weighted @ s), axis=0)
    if not jnp.ndim(lengthscale):
        products, sums = jnp.sum(products, axis=1, keepdims=True), jnp.sum(sums, keepdims=True)
    return jnp.concatenate([jnp.sum(total, keepdims=True)[0], sums]), jnp.concatenate([weight_sums, products], axis=1)


def relu_covariance(
    covariance: Float[Array, "*n"], variance: Float[Array, "*n"], other_variance: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """E[relu(u) relu(v)] of normal u and v of mean 0: half of eq. 3 and 6 of Cho & Saul (2009).

    Let t be the angle whose cosine is the correlation. The result is
    sqrt(var u var v) (sin t + (pi - t) cos t) / (2 pi).

    Args:
        covariance: of u and v.
        variance: of u.
        other_variance: of v.

    >>> import jax.numpy as jnp
    >>> round(relu_covariance(jnp.array(3.0), jnp.array(3.0), jnp.array(3.0)).item(), 4)
    1.5
    """
    size = sqrt(variance) * sqrt(other_variance)
    cosine = covariance / jnp.where(size > 0, size, 1)
    return size * _arc_cosine(jnp.clip(cosine, -1, 1)) / 2


@jax.custom_jvp
def _arc_cosine(cosine: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """(sin t + (pi - t) cos t) / pi. Its derivative is 1 - t / pi; the derivatives of t and sin t are infinite at 1."""
    return (jnp.sqrt(1 - cosine**2) + (jnp.pi - _angle(cosine)) * cosine) / jnp.pi


@_arc_cosine.defjvp
def _arc_cosine_jvp(primals, tangents):
    (cosine,), (tangent,) = primals, tangents
    return _arc_cosine(cosine), (1 - _angle(cosine) / jnp.pi) * tangent


@jax.custom_jvp
def _angle(cosine: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """arccos in a third of the time of XLA's arccos on a CPU; its derivative at -1 and 1 is 0, not infinite."""
    return 2 * jnp.arctan(jnp.sqrt((1 - cosine) / (1 + cosine)))


@_angle.defjvp
def _angle_jvp(primals, tangents):
    (cosine,), (tangent,) = primals, tangents
    inside = jnp.abs(cosine) < 1
    return _angle(cosine), jnp.where(inside, -1 / jnp.sqrt(1 - jnp.where(inside, cosine, 0) ** 2), 0) * tangent
