"""Conditional variances as functions of the kernel's matrices, with their derivatives.

- `explained_variance`: by how much rows lower the variance of other rows.
- `leave_one_out_variance`: the variance of every row given all others; Rasmussen & Williams (2006), eq. 5.12.

Each has a form that also returns its pullback, which maps the cotangent of the variances to the cotangents of the
matrices. The pullback takes half of the time of differentiating through the factorization. NumPy's arrays are
factorized by LAPACK.
"""

from collections.abc import Callable

from jaxtyping import Float

from jaxcal._numpy import AnyArray
from jaxcal._programs import exact_products
from jaxcal.functional.linalg import cholesky, column_squares, crossproduct, inverse_triangular, solve_lower

Matrix = Float[AnyArray, "_ _"]
Vector = Float[AnyArray, " _"]


def explained_variance(gram: Float[AnyArray, "n n"], cross: Float[AnyArray, "n m"]) -> Float[AnyArray, " m"]:
    """k'G^-1 k of every column k: by how much n rows lower the variance of m others; `gram` includes the noise.

    >>> import numpy as np
    >>> explained_variance(2 * np.eye(2), np.ones((2, 1))).round(3).tolist()
    [1.0]
    """
    return explained_variance_and_pullback(gram, cross)[0]


@exact_products
def explained_variance_and_pullback(
    gram: Float[AnyArray, "n n"], cross: Float[AnyArray, "n m"]
) -> tuple[Float[AnyArray, " m"], Callable[[Vector], tuple[Matrix, Matrix]]]:
    """`explained_variance`, and the map of its cotangent to the cotangents of `gram` and `cross`.

    Let A = G^-1 k, and let w be the cotangent of the result. Then -A diag(w) A' is the cotangent of G, and 2 A diag(w)
    is the cotangent of k.
    """
    # G = L L', and k'G^-1 k = |L^-1 k|^2.
    factor = cholesky(gram)
    whitened = solve_lower(factor, cross)

    @exact_products
    def pullback(cotangent: Vector) -> tuple[Matrix, Matrix]:
        weights = solve_lower(factor, whitened, transposed=True)
        weighted = weights * cotangent[None]
        return -weighted @ weights.T, 2 * weighted

    return column_squares(whitened), pullback


def leave_one_out_variance(gram: Float[AnyArray, "n n"]) -> Float[AnyArray, " n"]:
    """1 / [G^-1]_ii: the variance of each row's target given all other targets; `gram` includes the noise.

    >>> import numpy as np
    >>> leave_one_out_variance(2 * np.eye(2)).round(3).tolist()
    [2.0, 2.0]
    """
    return leave_one_out_variance_and_pullback(gram)[0]


@exact_products
def leave_one_out_variance_and_pullback(
    gram: Float[AnyArray, "n n"],
) -> tuple[Float[AnyArray, " n"], Callable[[Vector], Matrix]]:
    """`leave_one_out_variance`, and the map of its cotangent to the cotangent of `gram`.

    With P = G^-1 and the cotangent w of the result, the cotangent of G is P diag(w / P_ii^2) P.
    """
    # P = L^-T L^-1, so P_ii is the sum of the squares of column i of L^-1.
    inverse = inverse_triangular(cholesky(gram))
    variance = 1 / column_squares(inverse)

    @exact_products
    def pullback(cotangent: Vector) -> Matrix:
        precision = crossproduct(inverse)
        return (precision * (cotangent * variance**2)[None]) @ precision

    return variance, pullback
