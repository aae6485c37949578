"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import (
    gp,
    kernels,
    levene,
    linalg,
    martingales,
    multiplicity,
    noise,
    normal,
    quantile_regression,
    quantiles,
    scores,
    smoothing,
    sparse_gp,
    student_t,
    tracking,
)

__all__ = [
    "gp",
    "kernels",
    "levene",
    "linalg",
    "martingales",
    "multiplicity",
    "noise",
    "normal",
    "quantile_regression",
    "quantiles",
    "scores",
    "smoothing",
    "sparse_gp",
    "student_t",
    "tracking",
]
