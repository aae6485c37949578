"""The upper tail of the standard normal distribution beyond an end: N given that N > end.

The tail below -end is its mirror image. Everything is computed in logs or by continued fractions, so results are
precise even for an end at 40.
"""

import math

import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace, special
from jaxcal.functional import linalg, normal
from jaxcal.functional._loops import scan
from jaxcal.functional.quantiles import invert_cdf


def survival(x: Float[AnyArray, "*n"], end: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """P(N > x | N > end) for x >= end.

    Example:
        >>> print(f"{survival(np.array(1.0), np.array(0.0)):.4f}")
        0.3173
    """
    xp, log_ndtr = namespace(x, end), special(x, end).log_ndtr
    log_survival = log_ndtr(-x) - log_ndtr(-end)
    return xp.exp(linalg.snapped(log_survival, xp.minimum(log_survival, 0)))


def quantile(fraction: Float[AnyArray, "*n"], end: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The x beyond which a fraction of the tail lies, for fractions in (0, 1].

    Example:
        >>> print(f"{quantile(np.array(0.5), np.array(0.0)):.4f}")
        0.6745
    """
    xp, log_ndtr = namespace(fraction, end), special(fraction, end).log_ndtr
    log_level = xp.log(fraction) + log_ndtr(-end)
    hazard = lambda x: xp.exp(normal.log_prob(x, 0, 1) - log_ndtr(x))
    # Phi(-x) <= exp(-x^2 / 2) / 2 for x >= 0: the search starts below the answer.
    return -invert_cdf(log_ndtr, log_level, -xp.sqrt(-2 * log_level), -end, hazard)


def log_prob(x: Float[AnyArray, "*n"], end: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The log density at x >= end."""
    return normal.log_prob(x, 0, 1) - special(end).log_ndtr(-end)


def excess(end: Float[AnyArray, "*n"]) -> tuple[Float[AnyArray, "*n"], Float[AnyArray, "*n"]]:
    """The mean and the mean square of N - end.

    The mean is phi(end) / Phi(-end) - end. The mean square is 1 - end * mean. Far out these differences cancel, and
    both come from the continued fraction of Mills' ratio.
    """
    xp, far = namespace(end), end > 5
    near = xp.where(far, 5, end)
    mean = xp.exp(normal.log_prob(near, 0.0, 1.0)) / special(end).ndtr(-near) - near
    end = xp.where(far, end, 5)
    rest, _ = scan(lambda rest, k: (k / (end + rest), None), xp.zeros_like(end), np.arange(25, 1, -1, dtype=end.dtype))
    return xp.where(far, 1 / (end + rest), mean), xp.where(far, rest / (end + rest), 1 - near * mean)


def square_of_survival(end: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The integral of `survival`^2 from the end on, which the tail adds to a CRPS.

    Let t = -end and h = phi(t) / Phi(t). The integral is t + 2 h - Phi(sqrt(2) t) / (sqrt(pi) Phi(t)^2). For end > 0 it
    is written in the mean excesses e over end and e' over sqrt(2) end, so that nothing cancels.
    """
    xp, ndtr, root = namespace(end), special(end).ndtr, math.sqrt(2)
    t, outer = xp.where(end > 0, 0, -end), xp.where(end > 0, end, 0)
    e, e_root = excess(end)[0], excess(root * outer)[0]
    inner = 2 * e - t - ndtr(root * t) / (math.sqrt(math.pi) * ndtr(t) ** 2)
    return xp.where(end > 0, (outer * e_root + 2 * e * e_root - root * e**2) / (root * outer + e_root), inner)
