"""The normal distribution: log density and continuous ranked probability score."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, ArrayLike, Float, Real

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
SQRT_PI = math.sqrt(math.pi)
# exp(-z^2 / 2) is 0 in every dtype from here on.
_FAR = 40.0


@jax.jit
def crps(y: Real[ArrayLike, "*#n"], mean: Real[ArrayLike, "*#n"], std: Real[ArrayLike, "*#n"]) -> Float[Array, "*n"]:
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
        >>> [f"{score:.3f}" for score in crps(jnp.array([0.0, 2.0]), 0.0, jnp.array([1.0, 0.0]))]
        ['0.234', '2.000']
    """
    return mean_abs(jnp.subtract(y, mean), std) - jnp.divide(std, SQRT_PI)


@jax.jit
def log_prob(
    y: Real[ArrayLike, "*#n"], mean: Real[ArrayLike, "*#n"], std: Real[ArrayLike, "*#n"]
) -> Float[Array, "*n"]:
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
    positive = jnp.greater(std, 0)
    safe = jnp.where(positive, std, 1.0)
    z = jnp.subtract(y, mean) / safe
    return jnp.where(positive, -0.5 * z**2 - jnp.log(safe) - LOG_SQRT_2PI, -jnp.inf)


def mean_abs(mean: Array, std: ArrayLike) -> Array:
    """E|X| for X normal: mean (2 Phi(z) - 1) + 2 std phi(z), z = mean / std; |mean| at std = 0."""
    near = jnp.abs(mean) < jnp.multiply(_FAR, std)
    z = jnp.where(near, mean / jnp.where(near, std, jnp.ones_like(mean)), _FAR * jnp.sign(mean))
    return mean * (2 * ndtr(z) - 1) + 2 * std * jnp.exp(-0.5 * z**2 - LOG_SQRT_2PI)
