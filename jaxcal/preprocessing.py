"""What is done to columns and targets before every fit.

Whatever the scale of the data, what is fitted has mean 0 and standard deviation 1; categorical columns become
indicators of their categories.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks
from jaxcal.functional import linalg

# The interquartile range of the standard normal distribution.
_NORMAL_RANGE = 1.3489795
# Beyond so many standard deviations the inputs of networks grow like a logarithm.
_TAIL = 3.0
# Quantiles beyond which values have no part in the standard deviation of a column with tails.
_WITHOUT_TAILS = (0.005, 0.995)


class Standardizer(eqx.Module):
    """The affine map that gives a sample mean 0 and standard deviation 1 (divisor n - 1), and its inverse.

    A constant column has no scale: it maps to 0, and the inverse is the constant whatever comes in.
    """

    loc: Float[Array, "*d"]
    scale: Float[Array, "*d"]

    @classmethod
    @eqx.filter_jit
    def of(cls, values: Float[Array, " n *d"], weights: Float[Array, " n"] | None = None) -> "Standardizer":
        """The standardizer of a sample, column by column; with positive weights of the rows of a weighted one."""
        # On the range [0, 1] no square over- or underflows, and a constant column is exactly constant.
        low = jnp.min(values, axis=0)
        span = jnp.max(values, axis=0) - low
        unit = (values - low[None]) / _nonzero(span)[None]
        if weights is None:
            # The derivative of the root is 0 where a column is constant.
            return cls(low + span * jnp.mean(unit, axis=0), span * linalg.sqrt(jnp.var(unit, axis=0, ddof=1)))
        fractions = (weights / weights.sum()).astype(values.dtype)
        mean = jnp.tensordot(fractions, unit, 1)
        # The divisor n - 1 of n rows of equal weight.
        variance = jnp.tensordot(fractions, (unit - mean[None]) ** 2, 1) / (1 - jnp.sum(fractions**2))
        return cls(low + span * mean, span * linalg.sqrt(variance))

    @classmethod
    @eqx.filter_jit
    def robust(cls, values: Float[Array, " n *d"]) -> "Standardizer":
        """By the median and the interquartile range, over that of a standard normal sample; as `of` where it is 0."""
        lower, middle, upper = jnp.quantile(values, jnp.asarray([0.25, 0.5, 0.75], values.dtype), axis=0)
        spread = (upper - lower) / _NORMAL_RANGE
        return cls(middle, jnp.where(spread > 0, spread, cls.of(values).scale))

    @property
    def num_columns(self) -> int:
        """How many columns a matrix of values has."""
        return self.loc.shape[-1]

    @classmethod
    def identity(cls, like: Float[Array, " n *d"]) -> "Standardizer":
        """The standardizer that changes nothing, for a sample of this shape and dtype."""
        return cls(jnp.zeros_like(like[0]), jnp.ones_like(like[0]))

    @eqx.filter_jit
    def __call__(self, values: Float[Array, " n *d"]) -> Float[Array, " n *d"]:
        """`(values - loc) / scale`, row by row."""
        return (values - self.loc[None]) / _nonzero(self.scale)[None]

    @eqx.filter_jit
    def inverse(self, values: Float[Array, " n *d"]) -> Float[Array, " n *d"]:
        """`loc + scale * values`, row by row."""
        return self.loc[None] + self.scale[None] * values


def _nonzero(scale: Float[Array, "*d"]) -> Float[Array, "*d"]:
    return jnp.where(scale > 0, scale, 1)


class LogTails(eqx.Module):
    """A standardization of columns whose tails are logarithmic: the inputs of a network.

    With z the standardized value, of a mean and a standard deviation that the outer halves of a hundredth of the values
    have no part in,

        z where |z| <= 3,    sign(z) 3 (1 + log(|z| / 3)) elsewhere,

    so that values far from all others neither decide the scale of a column nor lead a network far from its data.

    Attributes:
        standardizer: gives z.
    """

    standardizer: Standardizer

    @classmethod
    @eqx.filter_jit
    def of(cls, values: Float[Array, "n d"]) -> "LogTails":
        """That of a sample, column by column; a column that is constant but for its tails is standardized with them."""
        low, high = jnp.quantile(values, jnp.asarray(_WITHOUT_TAILS, values.dtype), axis=0)
        inner, all_of_it = Standardizer.of(jnp.clip(values, low[None], high[None])), Standardizer.of(values)
        varies = inner.scale > 0
        return cls(jax.tree.map(lambda part, whole: jnp.where(varies, part, whole), inner, all_of_it))

    @property
    def num_columns(self) -> int:
        """How many columns a matrix of values has."""
        return self.standardizer.num_columns

    @eqx.filter_jit
    def __call__(self, values: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """The inputs of the rows."""
        z = self.standardizer(values)
        tail = _TAIL * (1 + jnp.log(jnp.maximum(jnp.abs(z), _TAIL) / _TAIL))
        return jnp.where(jnp.abs(z) <= _TAIL, z, jnp.sign(z) * tail)


class Encoder(eqx.Module):
    """What turns rows [n, d] into the inputs [n, p] of a network; made by `Encoder.of`.

    Attributes:
        scaler: the standardization of all columns, of which the continuous ones are used.
        categories: the values of every categorical column, ascending.
        majority: the position of the most frequent category of every categorical column.
        categorical: which columns are categorical.
        unseen: what a category that was not there means: an "error", or the "majority" category in its place.
    """

    scaler: Standardizer | LogTails
    categories: tuple[Float[Array, " categories"], ...]
    majority: tuple[Int[Array, ""], ...]
    categorical: tuple[int, ...] = eqx.field(static=True)
    unseen: str = eqx.field(static=True)

    @classmethod
    def of(
        cls, x: Float[Array, "n d"], categorical: tuple[int, ...], unseen: str, *, log_tails: bool = False
    ) -> "Encoder":
        """The encoder of the columns of x, whose values must be known; continuous ones may have logarithmic tails."""
        found = [np.unique(np.asarray(x[:, column]), return_counts=True) for column in categorical]
        categories = tuple(jnp.asarray(values) for values, _ in found)
        majority = tuple(jnp.asarray(counts.argmax(), jnp.int32) for _, counts in found)
        return cls(
            scaler=LogTails.of(x) if log_tails else Standardizer.of(x),
            categories=categories,
            majority=majority,
            categorical=categorical,
            unseen=unseen,
        )

    @property
    def continuous(self) -> tuple[int, ...]:
        """The columns that are not categorical."""
        return tuple(column for column in range(self.scaler.num_columns) if column not in self.categorical)

    def codes(self, x: Float[Array, "n d"]) -> Int[Array, "n d"]:
        """The position of every value of a categorical column among its categories; 0 in the other columns."""
        codes = jnp.zeros(x.shape, jnp.int32)
        for column, categories, majority in zip(self.categorical, self.categories, self.majority, strict=True):
            values = x[:, column]
            position = jnp.clip(jnp.searchsorted(categories, values), 0, categories.shape[0] - 1).astype(jnp.int32)
            codes = codes.at[:, column].set(jnp.where(categories[position] == values, position, majority))
        return codes

    @eqx.filter_jit
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """The inputs of a network: the continuous columns, then an indicator for every category of the others."""
        codes = self.codes(x)
        indicators = [
            jax.nn.one_hot(codes[:, column], categories.shape[0], dtype=x.dtype)
            for column, categories in zip(self.categorical, self.categories, strict=True)
        ]
        return jnp.concatenate([self.scaler(x)[:, np.array(self.continuous, int)], *indicators], axis=1)

    def check_seen(self, x: Float[Array, "n d"]) -> None:
        """Raise ValueError if a known value of a categorical column is none of its categories, and that is an error."""
        if self.unseen != "error" or _checks.is_traced(x, *self.categories):
            return
        for column, categories in zip(self.categorical, self.categories, strict=True):
            values = np.asarray(x[:, column])
            unseen = np.setdiff1d(values, np.asarray(categories))
            if unseen.size:
                raise ValueError(
                    f"column {column} of x holds {unseen[0]:g}, which is none of the {categories.shape[0]} categories "
                    "it was fitted on; unseen='majority' takes the most frequent category in its place."
                )
