"""The density of a distribution that is known by the sorted values of a sample.

A density that is constant between neighboring order statistics is not consistent. The probability between two of n
values is about exponential with mean 1 / n. Let T be exponential with mean 1. For any n, the mean log density of a new
value is too low by E[T log T] = 0.42 nats. Here the bins hold about n^(2/3) values each, and fewer at both ends. That
is consistent, and there are tails beyond the sample.
"""

from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Float, Real

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import linalg
from jaxcal.functional.quantiles import linear_quantile

# The quartiles of the standard logistic distribution are -+ log 3, its std is pi / sqrt(3).
LOGISTIC_QUARTILE, LOGISTIC_STD = float(np.log(3)), float(np.pi / np.sqrt(3))


def bin_ranks(size: int) -> np.ndarray:
    """The ranks of the order statistics of a sample at which the bins of its density end.

    They are 1, 2, 4, 8, ... from either end, and in between about `size`^(2/3) apart. So there are enough bins for the
    shape, and each has enough values for a reliable count. The bins are finer where a tail thins out.

    Example:
        >>> print(bin_ranks(100))
        [  1   2   4   8  16  39  62  85  93  97  99 100]
    """
    largest = max(size ** (2 / 3), 1)
    ends = 2 ** np.arange(1 + int(np.log2(largest)))
    ends = ends[ends <= size // 2]
    low, high = (int(ends[-1]), size + 1 - int(ends[-1])) if ends.size else (0, size + 1)
    middle = np.linspace(low, high, max(round((high - low) / largest), 1) + 1).round().astype(int)[1:-1]
    return np.unique(np.concatenate([ends, middle, size + 1 - ends]))


@numpy_or_jit
def sample_log_density(u: Real[ArrayLike, "*n"], table: Real[ArrayLike, " l"]) -> Float[AnyArray, "*n"]:
    """The log density at u of the distribution that a sorted sample comes from.

    A bin between order statistics of ranks r and r' of `bin_ranks` has the mass (r' - r) / (L + 1). The mass beyond
    either end is 1 / (L + 1). Within a bin the density has the shape of the logistic distribution with the sample's
    median and quartiles. So its tails fall exponentially, and its logarithm is finite everywhere. For normal values the
    logarithm is within 0.06 nats of the truth in the mean at L = 100. At L = 1000 it is within 0.011 nats. The mass of
    repeated values has no density. The result is -inf where all values are equal.

    Args:
        u: the points, of any shape.
        table: [L] values in increasing order.

    Returns:
        the log densities, in the shape of u.

    Example:
        >>> from jax.scipy.special import ndtri
        >>> table = ndtri(np.arange(1, 1000) / 1000)
        >>> at_0, at_2 = sample_log_density(np.array([0.0, 2.0]), table)
        >>> print(f"{at_0:.2f}, {at_2:.2f}")  # of the normal distribution -0.92, -2.92
        -0.92, -2.91
    """
    xp: Any = namespace(u, table)
    values = xp.asarray(table)
    size, ranks = values.shape[0], bin_ranks(values.shape[0])
    first, loc, last = linear_quantile(values, xp.asarray([0.25, 0.5, 0.75], values.dtype))
    quartiles, std = (last - first) / 2, linalg.root_mean_square(values - loc)
    # Where half of the values are equal, the other values give the scale, by the std about the median.
    scale = xp.where(quartiles > 0, quartiles / LOGISTIC_QUARTILE, std / LOGISTIC_STD)
    spread = scale > 0
    unit = xp.where(spread, scale, 1)
    x, ends = (xp.asarray(u) - loc) / unit, (values[ranks - 1] - loc) / unit
    mass = np.diff(np.concatenate([[0], ranks, [size + 1]])) / (size + 1)
    log_ratio = xp.log(xp.asarray(mass, values.dtype)) - _log_logistic_masses(ends)
    log_shape = log_sigmoid(x) + log_sigmoid(-x)
    return xp.where(spread, log_shape + log_ratio[xp.searchsorted(ends, x, side="right")] - xp.log(unit), -np.inf)


@numpy_or_jit
def map_log_slope(p: Float[ArrayLike, "*n"], table: Float[ArrayLike, " l"]) -> Float[AnyArray, "*n"]:
    """The log density at p of probabilities in (0, 1) of which a sorted sample is known.

    It is constant between order statistics of the ranks of `bin_ranks`, with the masses of `sample_log_density`. For L
    uniform values it is within 0.011 nats of the truth in the mean at L = 1000.

    Args:
        p: the points, of any shape.
        table: [L] values in (0, 1), in increasing order.

    Returns:
        the log densities, in the shape of p.

    Example:
        >>> uniform = np.arange(1, 200) / 200
        >>> print(np.exp(map_log_slope(np.array([0.1, 0.9]), uniform)).round(2))
        [1. 1.]
    """
    xp: Any = namespace(p, table)
    values = xp.asarray(table)
    size, ranks = values.shape[0], bin_ranks(values.shape[0])
    ends = values[ranks - 1]
    widths = xp.diff(xp.pad(ends, (1, 1), constant_values=(0, 1)))
    mass = np.diff(np.concatenate([[0], ranks, [size + 1]])) / (size + 1)
    log_slope = xp.log(xp.asarray(mass, values.dtype)) - xp.log(xp.where(widths > 0, widths, 1))
    return log_slope[xp.searchsorted(ends, xp.asarray(p), side="right")]


def log_sigmoid(x: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The log of the standard logistic cdf, -log(1 + exp(-x)).

    >>> [f"{value:.4f}" for value in log_sigmoid(np.array([-800.0, 0.0]))]
    ['-800.0000', '-0.6931']
    """
    return -namespace(x).logaddexp(-x, 0)


def _log_logistic_masses(ends: Float[AnyArray, " m"]) -> Float[AnyArray, " m_plus_1"]:
    """The logs of the standard logistic masses below, between and above increasing ends; 0 for an empty bin."""
    xp, low, high = namespace(ends), ends[:-1], ends[1:]
    wide = high > low
    between = log_logistic_mass(low, xp.where(wide, high, low + 1))
    below, above = log_sigmoid(ends[:1]), log_sigmoid(-ends[-1:])
    return xp.concatenate([below, xp.where(wide, between, 0), above])


def log_logistic_mass(low: Float[AnyArray, "*n"], high: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The log of the mass of the standard logistic distribution between low and high > low.

    Example:
        >>> print(f"{np.exp(log_logistic_mass(np.array(-1.0), np.array(1.0))):.4f}")
        0.4621
    """
    # F(high) - F(low) = F(high) F(-low) (1 - exp(low - high)).
    xp = namespace(low, high)
    return log_sigmoid(high) + log_sigmoid(-low) + xp.log(-xp.expm1(low - high))
