"""The normal distribution: log density and continuous ranked probability score."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Real

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, special

# A value for each row, or one for all.
PerRow = Real[ArrayLike, "*#n"]

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
SQRT_PI = math.sqrt(math.pi)
# exp(-z^2 / 2) is 0 in every dtype from here on.
_FAR = 40.0


@numpy_or_jit
def crps(y: PerRow, mean: PerRow, std: PerRow) -> Float[AnyArray, "*n"]:
    """CRPS of a normal distribution: std (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)), z = (y - mean) / std.

    At std = 0 it is |y - mean|, its limit, with finite derivatives.

    Args:
        y: outcomes [n].
        mean: means [n].
        std: standard deviations [n], not negative.

    Returns:
        the score of every row, in the unit of y.

    Source: Gneiting and Raftery, JASA 102 (2007), section 4.2.

    Example:
        >>> [f"{score:.3f}" for score in crps(np.array([0.0, 2.0]), 0.0, np.array([1.0, 0.0]))]
        ['0.234', '2.000']
    """
    xp, y, mean, std = in_one_dtype(y, mean, std)
    return mean_abs(xp.subtract(y, mean), std) - std / SQRT_PI


@numpy_or_jit
def log_prob(y: PerRow, mean: PerRow, std: PerRow) -> Float[AnyArray, "*n"]:
    """Log density of a normal distribution, -z^2 / 2 - log(std) - log(2 pi) / 2; -inf at std = 0, where there is none.

    Args:
        y: outcomes [n].
        mean: means [n].
        std: standard deviations [n], not negative.

    Returns:
        the log density of every row.

    Example:
        >>> print(f"{log_prob(100.0, 0.0, 1.0):.1f}")
        -5000.9
    """
    xp, y, mean, std = in_one_dtype(y, mean, std)
    positive = xp.greater(std, 0)
    safe = xp.where(positive, std, 1)
    z = xp.subtract(y, mean) / safe
    return xp.where(positive, -0.5 * z**2 - xp.log(safe) - LOG_SQRT_2PI, -np.inf)


def mean_abs(mean: AnyArray, std: ArrayLike) -> AnyArray:
    """E|X| for X normal: mean (2 Phi(z) - 1) + 2 std phi(z), z = mean / std; |mean| at std = 0."""
    xp = namespace(mean, std)
    near = abs(mean) < _FAR * std
    z = xp.where(near, mean / xp.where(near, std, xp.ones_like(mean)), _FAR * xp.sign(mean))
    return mean * (2 * special(mean, std).ndtr(z) - 1) + 2 * std * xp.exp(-0.5 * z**2 - LOG_SQRT_2PI)


def in_one_dtype(*values: PerRow) -> list[Any]:
    """The library of the values, and the values as its arrays in one float dtype, which plain numbers do not affect.

    The dtype is at least float32, because intermediate results leave the range of half precision.

    >>> _, y, std = in_one_dtype(np.ones(2, np.float32), 2.0)
    >>> print(y.dtype, std.dtype)
    float32 float32
    """
    xp, dtype = namespace(*values), jnp.promote_types(jnp.result_type(*values, float), np.float32)
    return [xp, *(xp.asarray(each, dtype) for each in values)]
