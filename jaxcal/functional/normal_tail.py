"""The upper tail of the standard normal distribution beyond an end: N given that N > end.

The tail below -end is its mirror image. All is computed in logs or by continued fractions, so that an end at 40 does no
harm.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, ndtr
from jaxtyping import Array, Float

from jaxcal.functional import linalg, normal
from jaxcal.functional.quantiles import invert_cdf


def survival(x: Float[Array, "*n"], end: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """P(N > x | N > end) for x >= end.

    Example:
        >>> print(f"{survival(jnp.array(1.0), jnp.array(0.0)):.4f}")
        0.3173
    """
    log_survival = log_ndtr(-x) - log_ndtr(-end)
    return jnp.exp(linalg.snapped(log_survival, jnp.minimum(log_survival, 0)))


def quantile(fraction: Float[Array, "*n"], end: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The x of which a fraction of the tail in (0, 1] lies beyond.

    Example:
        >>> print(f"{quantile(jnp.array(0.5), jnp.array(0.0)):.4f}")
        0.6745
    """
    log_level = jnp.log(fraction) + log_ndtr(-end)
    # Phi(-x) <= exp(-x^2 / 2) / 2 for x >= 0: the search starts below the answer.
    return -invert_cdf(log_ndtr, log_level, -jnp.sqrt(-2 * log_level), -end)


def log_prob(x: Float[Array, "*n"], end: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The log density at x >= end."""
    return normal.log_prob(x, 0, 1) - log_ndtr(-end)


def excess(end: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The mean and the mean square of N - end.

    The mean is phi(end) / Phi(-end) - end, the mean square 1 - end * mean; far out, where these cancel, both by the
    continued fraction of Mills' ratio.
    """
    far = end > 5
    near = jnp.where(far, 5, end)
    mean = jnp.exp(normal.log_prob(near, 0.0, 1.0)) / ndtr(-near) - near
    end = jnp.where(far, end, 5)
    rest = jax.lax.fori_loop(0, 24, lambda k, rest: (25 - k) / (end + rest), jnp.zeros_like(end))
    return jnp.where(far, 1 / (end + rest), mean), jnp.where(far, rest / (end + rest), 1 - near * mean)


def square_of_survival(end: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The integral of `survival`^2 from the end on: what the tail adds to a CRPS.

    With t = -end and h = phi(t) / Phi(t) it is t + 2 h - Phi(sqrt(2) t) / (sqrt(pi) Phi(t)^2). For end > 0 the same in
    the mean excesses e over end and e' over sqrt(2) end, so that nothing cancels.
    """
    root = math.sqrt(2)
    t, outer = jnp.where(end > 0, 0, -end), jnp.where(end > 0, end, 0)
    e, e_root = excess(end)[0], excess(root * outer)[0]
    inner = 2 * e - t - ndtr(root * t) / (math.sqrt(math.pi) * ndtr(t) ** 2)
    return jnp.where(end > 0, (outer * e_root + 2 * e * e_root - root * e**2) / (root * outer + e_root), inner)
