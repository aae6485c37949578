"""Linear algebra and norms that stay finite, with the derivatives that a Gaussian process needs.

- `sqrt`, `root_mean_square`, `root_sum_squares`: roots of numbers whose squares may leave the range of their dtype.
  Their derivatives are 0 where a plain root has none.
- `scale_of`: the divisor of numbers that are to be squared.
- `finite_part`: values without infinite ones.
- `inverse_softplus`: the inverse of the softplus function.
- `snapped`: a value without its rounding, with the derivative of the rounded value.
- `weighted_mean`, `fractions_of`: means over rows that count differently.
- `add_diagonal`, `with_diagonal`: covariances with noise on the diagonal.
- `cholesky`, `inverse_factor`, `inverse_triangular`, `solve_lower`, `crossproduct`, `column_squares`,
  `half_log_det`: Cholesky factors and operations with them. LAPACK does them for NumPy's arrays.
"""

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Real

from jaxcal._numpy import AnyArray, constant, namespace
from jaxcal._programs import exact_products

# Triangular matrices up to the first size are taken as a whole, which compiles faster. Larger ones are halved, down to
# the second size. The third number is the number of strips of their crossproducts.
_WHOLE, _LEAF, _STRIPS = 1024, 128, 6


def sqrt(x: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The square root, with a derivative of 0 in place of infinity at 0; NaN stays NaN.

    >>> import jax
    >>> jax.grad(sqrt)(jnp.zeros(())).item()
    0.0
    """
    xp, is_zero = namespace(x), x == 0
    return xp.where(is_zero, 0, xp.sqrt(xp.where(is_zero, 1, x)))


def scale_of(*values: Float[AnyArray, "..."], axis: int | None = None) -> Float[AnyArray, "..."]:
    """The divisor of values that are to be squared: the largest size along an axis, which is kept.

    It is 1 where the largest size is 0 or not finite. Squares of float32 numbers are finite and not 0 only for numbers
    between 1e-19 and 1e19. The divisor has no derivative.

    >>> scale_of(jnp.array([3.0, -4.0])).item()
    4.0
    """
    xp = namespace(*values)
    sizes = [xp.max(abs(each), axis, keepdims=axis is not None) for each in values]
    size = constant(xp.max(xp.stack(sizes), axis=0))
    return xp.where((size > 0) & xp.isfinite(size), size, 1)


def finite_part(values: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The values, where infinite ones become the greatest or the least finite value, or 0 if there is none.

    >>> finite_part(jnp.array([-jnp.inf, 1.0, 3.0])).tolist()
    [1.0, 1.0, 3.0]
    """
    xp = namespace(values)
    finite = xp.isfinite(values)
    most = lambda side: side * xp.max(side * xp.where(finite, values, -side * np.inf))
    low, high = (xp.where(finite.any(), constant(most(side)), 0).astype(values.dtype) for side in (-1, 1))
    return xp.where(finite | xp.isnan(values), values, xp.where(values > 0, high, low))


def snapped(x: Float[AnyArray, "..."], value: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """`value` in place of x, from which it differs by rounding only; all derivatives are derivatives of x.

    A rule of `jax.custom_jvp` would not do, because a loop forgets it before the second derivative.

    >>> x, bounded = jnp.array(1.0), lambda x: snapped(x, jnp.minimum(x, 1))
    >>> print(bounded(x), jax.grad(bounded)(x), jax.grad(lambda x: jnp.minimum(x, 1))(x))
    1.0 1.0 0.5
    """
    # The difference of two numbers so close is exact, and so is the sum.
    xp, difference = namespace(x, value), constant(value - x)
    return x + xp.where(xp.isfinite(difference), difference, 0)


def root_mean_square(
    values: Float[AnyArray, "..."], weights: Real[ArrayLike, "..."] | None = None
) -> Float[AnyArray, ""]:
    """The root of the mean of the squares of numbers of any size; with weights, the root of the weighted mean.

    >>> f"{root_mean_square(jnp.full(3, 1e30)):.1e}"
    '1.0e+30'
    """
    scale = scale_of(values)
    return scale * sqrt(weighted_mean((values / scale) ** 2, weights))


def weighted_mean(values: Float[AnyArray, "..."], weights: Real[ArrayLike, "..."] | None) -> Float[AnyArray, ""]:
    """The mean, weighted if there are weights; values of weight 0 do not count, even if they are infinite or NaN.

    In the derivative with respect to a weight of 0, a value that is not finite counts as 0.

    >>> weighted_mean(jnp.array([1.0, 4.0, jnp.inf]), jnp.array([1.0, 2.0, 0.0])).item()
    3.0
    """
    xp = namespace(values)
    if weights is None:
        return xp.mean(values)
    fractions = fractions_of(weights, values.dtype)
    # The derivative with respect to a weight of 0 depends on its value.
    return xp.sum(fractions * xp.where((fractions > 0) | xp.isfinite(values), values, 0))


def fractions_of(weights: Real[ArrayLike, "..."], dtype: DTypeLike) -> Float[AnyArray, "..."]:
    """Weights divided by their sum."""
    counts: AnyArray = namespace(weights).asarray(weights, dtype)
    return counts / counts.sum()


def root_sum_squares(a: AnyArray, b: AnyArray) -> AnyArray:
    """sqrt(a^2 + b^2) for numbers of any size, with derivatives of 0 where both are 0."""
    xp = namespace(a, b)
    size = constant(xp.maximum(abs(a), abs(b)))
    scale = xp.where(size > 0, size, 1)
    return scale * sqrt((a / scale) ** 2 + (b / scale) ** 2)


def add_diagonal(matrix: Float[Array, "n n"], value: ArrayLike) -> Float[Array, "n n"]:
    """The matrix with `value` added along its diagonal: noise, or jitter; one for all rows, or one for each."""
    return matrix + jnp.reshape(value, (-1, 1)) * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def with_diagonal(matrix: Float[AnyArray, "n n"], diagonal: ArrayLike) -> Float[AnyArray, "n n"]:
    """The matrix with another diagonal, one number or [n]; an array of NumPy is overwritten.

    >>> with_diagonal(np.ones((2, 2)), 3.0).tolist()
    [[3.0, 1.0], [1.0, 3.0]]
    """
    if namespace(matrix, diagonal) is jnp:
        return jnp.where(np.eye(len(matrix), dtype=bool), jnp.reshape(diagonal, (-1, 1)), matrix)
    matrix.flat[:: len(matrix) + 1] = diagonal
    return matrix


def cholesky(gram: Float[AnyArray, "n n"]) -> Float[AnyArray, "n n"]:
    """The lower Cholesky factor of a symmetric matrix; NaN where it is not positive definite.

    >>> cholesky(np.array([[4.0, 2.0], [2.0, 2.0]])).tolist()
    [[2.0, 0.0], [1.0, 1.0]]
    """
    if namespace(gram) is jnp:
        return lax.linalg.cholesky(gram, symmetrize_input=False)
    factor, failed = _lapack("potrf", gram)(gram.T, lower=1, clean=1)
    return np.full_like(gram, np.nan) if failed else factor


def inverse_factor(gram: Float[AnyArray, "m m"]) -> Float[AnyArray, "m m"]:
    """L^-1, where L is the Cholesky factor of a matrix G.

    Its differential is -phi(L^-1 dG L^-T) L^-1, where phi takes the lower triangle with half of the diagonal.
    """
    return _inverse_factor(gram) if namespace(gram) is jnp else inverse_triangular(cholesky(gram))


@jax.custom_jvp
def _inverse_factor(gram: Float[Array, "m m"]) -> Float[Array, "m m"]:
    return inverse_triangular(jnp.linalg.cholesky(gram))


@_inverse_factor.defjvp
@exact_products
def _inverse_factor_jvp(primals, tangents):
    inverse = _inverse_factor(*primals)
    half = jnp.tril(jnp.ones_like(inverse)) - 0.5 * jnp.eye(inverse.shape[0], dtype=inverse.dtype)
    return inverse, -(half * (inverse @ tangents[0] @ inverse.T)) @ inverse


@exact_products
def solve_lower(
    factor: Float[AnyArray, "n n"], right: Float[AnyArray, "n m"], *, transposed: bool = False
) -> Float[AnyArray, "n m"]:
    """L^-1 R of a lower triangular L, or L^-T R: by halves, so that most of the work is products of matrices.

    >>> solve_lower(jnp.array([[2.0, 0.0], [2.0, 1.0]]), jnp.array([[2.0], [3.0]])).ravel().tolist()
    [1.0, 1.0]
    """
    n = factor.shape[0]
    if namespace(factor, right) is np:
        return _lapack("trtrs", factor)(factor, right, lower=1, trans=int(transposed))[0]
    if n <= _LEAF:
        return solve_triangular(factor, right, lower=True, trans=int(transposed))
    # Let L = [[A, 0], [C, B]] and u = A^-1 r. Then L^-1 [r; s] = [u; B^-1 (s - C u)].
    half = n // 2
    first, corner, last = factor[:half, :half], factor[half:, :half], factor[half:, half:]
    if transposed:
        below = solve_lower(last, right[half:], transposed=True)
        above = solve_lower(first, right[:half] - lax.optimization_barrier(corner.T) @ below, transposed=True)
    else:
        above = solve_lower(first, right[:half])
        below = solve_lower(last, right[half:] - corner @ above)
    return jnp.concatenate([above, below])


@exact_products
def inverse_triangular(factor: Float[AnyArray, "n n"]) -> Float[AnyArray, "n n"]:
    """The inverse of a lower triangular matrix: by halves, so that most of the work is products of matrices.

    Where an array of NumPy is stored by columns, the inverse overwrites the factor, and no other code may use it.
    """
    if namespace(factor) is np:
        return _lapack("trtri", factor)(factor, lower=1, overwrite_c=1)[0]
    # Without the barrier, XLA joins the blocks again, entry by entry, for every use of the whole matrix.
    return lax.optimization_barrier(_inverse_by_halves(factor, _WHOLE))


def _inverse_by_halves(factor: Float[Array, "n n"], whole: int) -> Float[Array, "n n"]:
    n = factor.shape[0]
    if n <= whole:
        return solve_triangular(factor, jnp.eye(n, dtype=factor.dtype), lower=True)
    half = n // 2
    # [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    first, last = (_inverse_by_halves(part, _LEAF) for part in (factor[:half, :half], factor[half:, half:]))
    corner = -last @ (factor[half:, :half] @ first)
    return jnp.block([[first, jnp.zeros_like(corner.T)], [corner, last]])


@exact_products
def crossproduct(factor: Float[AnyArray, "n n"]) -> Float[AnyArray, "n n"]:
    """X'X of a lower triangular X: its lower half, strip by strip without the zeros of X, and the mirror image."""
    n = factor.shape[0]
    if n <= _WHOLE or namespace(factor) is np:
        return factor.T @ factor
    # XLA multiplies by a transposed matrix on the right as fast as by any other matrix. On the left it takes twice the
    # time (float64 on a CPU). A separate transposition is faster than one within a sum.
    columns = lax.optimization_barrier(factor.T)
    edges = [n * strip // _STRIPS for strip in range(_STRIPS + 1)]
    strips = [
        jnp.pad(columns[first:end, first:] @ columns[:end, first:].T, ((0, 0), (0, n - end)))
        for first, end in pairwise(edges)
    ]
    lower = jnp.concatenate(strips)
    mirrored = lax.optimization_barrier(lower.T)
    return jnp.where(np.tri(n, dtype=bool), lower, mirrored)


def column_squares(matrix: Float[AnyArray, "n m"]) -> Float[AnyArray, " m"]:
    """The sum of the squares of every column.

    >>> column_squares(np.array([[3.0, 1.0], [4.0, 1.0]])).tolist()
    [25.0, 2.0]
    """
    return jnp.sum(matrix**2, axis=0) if namespace(matrix) is jnp else np.einsum("ij,ij->j", matrix, matrix)


def half_log_det(factor: Float[AnyArray, "n n"]) -> Float[AnyArray, ""]:
    """log|G| / 2 of the Cholesky factor of a matrix G."""
    if namespace(factor) is np:
        return np.log(np.diagonal(factor)).sum()
    # A sum over rows: the gather of a diagonal takes longer to compile.
    return jnp.sum(jnp.log(jnp.sum(factor * jnp.eye(factor.shape[0], dtype=factor.dtype), axis=1)))


def _lapack(name: str, array: np.ndarray) -> Callable[..., tuple]:
    """A function of LAPACK for the dtype of an array; it takes arrays of any order, and those by columns uncopied."""
    from scipy.linalg import lapack  # imported only where it is needed: this takes a quarter of a second

    return lapack.get_lapack_funcs((name,), (array,))[0]


def inverse_softplus(value: Float[AnyArray, "*d"]) -> Float[AnyArray, "*d"]:
    """The number whose softplus is the given positive value.

    >>> round(float(inverse_softplus(np.log(2.0))), 6)
    0.0
    """
    xp = namespace(value)
    return value + xp.log(-xp.expm1(-value))
