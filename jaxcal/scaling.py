"""The scaling around every fit: whatever the scale of the data, what is fitted has mean 0 and standard deviation 1."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

# The interquartile range of the standard normal distribution.
_NORMAL_RANGE = 1.3489795


class Standardizer(eqx.Module):
    """The affine map that gives a sample mean 0 and standard deviation 1 (divisor n - 1), and its inverse.

    A constant column has no scale: it maps to 0, and the inverse is the constant whatever comes in.
    """

    loc: Float[Array, "*d"]
    scale: Float[Array, "*d"]

    @classmethod
    def of(cls, values: Float[Array, " n *d"]) -> "Standardizer":
        """The standardizer of a sample, column by column."""
        # On the range [0, 1] no square over- or underflows, and a constant column is exactly constant.
        low = jnp.min(values, axis=0)
        span = jnp.max(values, axis=0) - low
        unit = (values - low[None]) / _nonzero(span)[None]
        return cls(low + span * jnp.mean(unit, axis=0), span * jnp.std(unit, axis=0, ddof=1))

    @classmethod
    def robust(cls, values: Float[Array, " n *d"]) -> "Standardizer":
        """By the median and the interquartile range, over that of a standard normal sample; as `of` where it is 0."""
        lower, middle, upper = jnp.quantile(values, jnp.asarray([0.25, 0.5, 0.75], values.dtype), axis=0)
        spread = (upper - lower) / _NORMAL_RANGE
        return cls(middle, jnp.where(spread > 0, spread, cls.of(values).scale))

    @classmethod
    def identity(cls, like: Float[Array, " n *d"]) -> "Standardizer":
        """The standardizer that changes nothing, for a sample of this shape and dtype."""
        return cls(jnp.zeros_like(like[0]), jnp.ones_like(like[0]))

    def __call__(self, values: Float[Array, " n *d"]) -> Float[Array, " n *d"]:
        """`(values - loc) / scale`, row by row."""
        return (values - self.loc[None]) / _nonzero(self.scale)[None]

    def inverse(self, values: Float[Array, " n *d"]) -> Float[Array, " n *d"]:
        """`loc + scale * values`, row by row."""
        return self.loc[None] + self.scale[None] * values


def _nonzero(scale: Float[Array, "*d"]) -> Float[Array, "*d"]:
    return jnp.where(scale > 0, scale, 1)
