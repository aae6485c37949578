"""The standardization of inputs and targets before every fit.

Whatever the scale of the data is, the fitted values have mean 0 and standard deviation 1. Indicators have no scale, and
stay 0 and 1.
"""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import linalg

# The interquartile range of the standard normal distribution.
_NORMAL_RANGE = 1.3489795
# The inputs of networks grow like a logarithm beyond 3 standard deviations.
_TAIL = 3.0
# Values beyond these quantiles do not affect the standard deviation of a column with tails.
_WITHOUT_TAILS = (0.005, 0.995)


class Standardizer(eqx.Module):
    """The affine map that gives a sample mean 0 and standard deviation 1 (divisor n - 1), and its inverse.

    A constant column has no scale. It maps to 0, and the inverse gives the constant for every value.
    """

    loc: Float[AnyArray, "*d"]
    scale: Float[AnyArray, "*d"]

    @classmethod
    @numpy_or_jit
    def of(cls, values: Float[AnyArray, " n *d"], weights: Float[AnyArray, " n"] | None = None) -> "Standardizer":
        """The standardizer of a sample, column by column. The rows may have positive weights."""
        xp, dtype = namespace(values), values.dtype
        if xp is np:
            values = values.astype(float)  # sums of NumPy over many rows of 32 bits would round
        # The values are mapped to [0, 1]. There no square over- or underflows, and a constant column is exactly 0.
        low = xp.min(values, axis=0)
        span = xp.max(values, axis=0) - low
        unit = (values - low[None]) / _nonzero(span)[None]
        if weights is None:
            mean, variance = xp.mean(unit, axis=0), xp.var(unit, axis=0, ddof=1)
        else:
            fractions = (weights / weights.sum()).astype(values.dtype)
            mean = xp.tensordot(fractions, unit, 1)
            # sum f (u - m)^2 / (1 - sum f^2): for n equal weights this is the divisor n - 1.
            variance = xp.tensordot(fractions, (unit - mean[None]) ** 2, 1) / (1 - xp.sum(fractions**2))
        # The derivative of the root is 0 where a column is constant.
        return cls((low + span * mean).astype(dtype), (span * linalg.sqrt(variance)).astype(dtype))

    @classmethod
    @numpy_or_jit
    def robust(cls, values: Float[AnyArray, " n *d"]) -> "Standardizer":
        """The standardizer by the median, and by the interquartile range over its value for a standard normal sample.

        A column whose interquartile range is 0 has the scale of `of`.
        """
        xp = namespace(values)
        lower, middle, upper = xp.quantile(values, xp.asarray([0.25, 0.5, 0.75], values.dtype), axis=0)
        spread = (upper - lower) / _NORMAL_RANGE
        return cls(middle, xp.where(spread > 0, spread, cls.of(values).scale))

    @classmethod
    def identity(cls, like: Float[AnyArray, " n *d"]) -> "Standardizer":
        """The standardizer that changes nothing, for a sample of this shape and dtype."""
        xp = namespace(like)
        return cls(xp.zeros_like(like[0]), xp.ones_like(like[0]))

    @numpy_or_jit
    def __call__(self, values: Float[AnyArray, " n *d"]) -> Float[AnyArray, " n *d"]:
        """`(values - loc) / scale`, row by row."""
        return (values - self.loc[None]) / _nonzero(self.scale)[None]

    @numpy_or_jit
    def inverse(self, values: Float[AnyArray, " n *d"]) -> Float[AnyArray, " n *d"]:
        """`loc + scale * values`, row by row."""
        return self.loc[None] + self.scale[None] * values

    @numpy_or_jit
    def without(self, columns: tuple[int, ...]) -> "Standardizer":
        """The same map of all columns but these, which stay unchanged."""
        if not columns:
            return self
        xp, chosen = namespace(self.loc), np.isin(np.arange(self.loc.shape[-1]), columns)
        return Standardizer(xp.where(chosen, 0, self.loc), xp.where(chosen, 1, self.scale))


def _nonzero(scale: Float[AnyArray, "*d"]) -> Float[AnyArray, "*d"]:
    return namespace(scale).where(scale > 0, scale, 1)


def input_scaler(
    inputs: Float[AnyArray, "n p"], indicators: tuple[int, ...], *, log_tails: bool
) -> "Standardizer | LogTails":
    """The standardization of the inputs of a network, which leaves indicators unchanged."""
    return (LogTails.of(inputs) if log_tails else Standardizer.of(inputs)).without(indicators)


class LogTails(eqx.Module):
    """A standardization of columns whose tails are logarithmic: the inputs of a network.

    Let z be the standardized value. Its mean and standard deviation are computed after values beyond the quantiles at
    0.5 % and 99.5 % are clipped to these quantiles. The result is

        z where |z| <= 3,    sign(z) 3 (1 + log(|z| / 3)) elsewhere.

    So a value far from all others does not decide the scale of a column, and does not lead a network far from its data.

    Attributes:
        standardizer: gives z.
    """

    standardizer: Standardizer

    @classmethod
    @numpy_or_jit
    def of(cls, values: Float[AnyArray, "n d"]) -> "LogTails":
        """The standardization of a sample, column by column.

        If a column is constant except in its tails, its standardization includes the tails.
        """
        xp = namespace(values)
        low, high = xp.quantile(values, xp.asarray(_WITHOUT_TAILS, values.dtype), axis=0)
        inner, all_of_it = Standardizer.of(xp.clip(values, low[None], high[None])), Standardizer.of(values)
        varies = inner.scale > 0
        return cls(jax.tree.map(lambda part, whole: xp.where(varies, part, whole), inner, all_of_it))

    def without(self, columns: tuple[int, ...]) -> "LogTails":
        """The same map of all columns but these, which stay unchanged where they lie between -3 and 3."""
        return LogTails(self.standardizer.without(columns))

    @numpy_or_jit
    def __call__(self, values: Float[AnyArray, "n d"]) -> Float[AnyArray, "n d"]:
        """The inputs of the rows."""
        xp, z = namespace(values), self.standardizer(values)
        tail = _TAIL * (1 + xp.log(xp.maximum(abs(z), _TAIL) / _TAIL))
        return xp.where(abs(z) <= _TAIL, z, xp.sign(z) * tail)
