"""LAPACK's Cholesky factor and the inverse from it, computed while other threads of Python run.

SciPy's own functions hold Python's lock while they compute, so fits in two threads waited for each other. SciPy also
offers the same routines to callers from C, in `scipy.linalg.cython_lapack`. Called from there, they do not hold the
lock.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
from jaxtyping import Float
from scipy.linalg import cython_lapack  # pyright: ignore[reportAttributeAccessIssue]

_LETTERS = {"float32": "s", "float64": "d"}
_INT = ctypes.POINTER(ctypes.c_int)
_Routine = ctypes.CFUNCTYPE(None, ctypes.c_char_p, _INT, ctypes.c_void_p, _INT, _INT)


def factorize(gram: Float[np.ndarray, "n n"]) -> bool:
    """Overwrite the lower triangle of a matrix with its Cholesky factor; False if it is not positive definite.

    Args:
        gram: stored by columns.

    Example:
        >>> matrix = np.asfortranarray([[4.0, 2.0], [2.0, 2.0]])
        >>> factorize(matrix), np.tril(matrix).tolist()
        (True, [[2.0, 0.0], [1.0, 1.0]])
    """
    return _called("potrf", gram)


def invert(factor: Float[np.ndarray, "n n"]) -> None:
    """Overwrite the lower Cholesky factor of a matrix with the lower triangle of the matrix's inverse.

    Args:
        factor: stored by columns.

    Example:
        >>> factor = np.asfortranarray([[2.0, 0.0], [1.0, 1.0]])
        >>> invert(factor)
        >>> factor.tolist()
        [[0.5, 0.0], [-0.5, 1.0]]
    """
    _called("potri", factor)


def _called(name: str, matrix: Float[np.ndarray, "n n"]) -> bool:
    """Run a routine of LAPACK on a lower triangle, in place; whether it succeeded."""
    if not (matrix.flags.f_contiguous and matrix.flags.writeable):
        raise ValueError("the matrix must be stored by columns, and be writable.")
    size, status = ctypes.c_int(len(matrix)), ctypes.c_int()
    _routine(_LETTERS[matrix.dtype.name] + name)(b"L", size, matrix.ctypes.data, size, status)
    return status.value == 0


@cache
def _routine(name: str) -> Callable[..., None]:
    capsule = cython_lapack.__pyx_capi__[name]
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _Routine(pointer_of(capsule, name_of(capsule)))
