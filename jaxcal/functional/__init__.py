"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import (
    gp,
    kernels,
    levene,
    linalg,
    multiplicity,
    noise,
    normal,
    quantiles,
    scores,
    smoothing,
    sparse_gp,
    student_t,
)

__all__ = [
    "gp",
    "kernels",
    "levene",
    "linalg",
    "multiplicity",
    "noise",
    "normal",
    "quantiles",
    "scores",
    "smoothing",
    "sparse_gp",
    "student_t",
]
