"""Distributions that are given by quantiles, not all of which are finite: `PartialQuantiles`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import (
    Distribution,
    as_rows,
    check_share,
    outer_levels,
    warn_if_beyond,
    warn_if_too_few,
)
from jaxcal.distributions.piecewise import Quantiles


class PartialQuantiles(Distribution):
    """`Quantiles` of which only those between two levels of its own are known in a row.

    Beyond these levels a quantile is infinite: it is refused. All else, mean, std, cdf, density, score and samples, is
    that of finite values in their place.

    Args:
        levels: [k], strictly increasing in (0, 1), the same for all rows.
        values: [n, k], finite and not decreasing along a row.
        lowest: [n], the level below which the quantile of a row is -inf; 0 where none is.
        highest: [n], the level above which it is +inf; 1 where none is.
        num_calibration: how many calibration rows bound the levels, of all rows alike; None where rows differ.

    Example:
        >>> levels, values = jnp.array([0.1, 0.25, 0.75, 0.9]), jnp.array([[-3.0, -1.0, 1.0, 2.0]])
        >>> distribution = PartialQuantiles(levels, values, 0.25, 1.0)
        >>> print(distribution.icdf(0.25), distribution.icdf(0.9))  # icdf(0.1) is -inf, and comes with a warning
        [-1.] [2.]
    """

    finite: Quantiles
    lowest: Float[Array, "*n"]
    highest: Float[Array, "*n"]
    num_calibration: int | None = eqx.field(static=True)

    def __init__(
        self,
        levels: Real[ArrayLike, "..."],
        values: Real[ArrayLike, "..."],
        lowest: Real[ArrayLike, "..."],
        highest: Real[ArrayLike, "..."],
        num_calibration: int | None = None,
    ):
        self.finite = Quantiles(levels, values)
        self.lowest, self.highest, _ = as_rows(lowest=lowest, highest=highest, values=self.finite.values[:, 0])
        check_share("lowest", self.lowest)
        check_share("highest", self.highest)
        self.num_calibration = num_calibration

    @property
    def mean(self) -> Float[Array, "*n"]:
        """That of the finite values."""
        return self.finite.mean

    @property
    def std(self) -> Float[Array, "*n"]:
        """That of the finite values."""
        return self.finite.std

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """That of the finite values."""
        return self.finite.cdf(y)

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """That of the finite values."""
        return self.finite.log_prob(y)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """That of the finite values."""
        return self.finite.crps(y)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Those of the finite values."""
        return self.finite.sample(key, shape)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        known = self.finite._icdf(p)
        return jnp.where(p < self.lowest, -jnp.inf, jnp.where(p > self.highest, jnp.inf, known))

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """The ends (lower, upper) of the central interval: the quantiles at (1 -+ confidence_level) / 2."""
        confidence_level = _checks.as_fraction("confidence_level", confidence_level)
        both = (1 - confidence_level) / 2, (1 + confidence_level) / 2
        ends = [self._quantiles(jnp.asarray(p)) for p in both]
        if not _checks.is_traced(*both):
            self._warn_of_levels(np.array(both), jnp.stack(ends, axis=-1))  # an end may be infinite without the other
        return ends[0], ends[1]

    def _warn_of_levels(self, p: ArrayLike, values: Float[Array, "..."]) -> None:
        if self.num_calibration is not None:
            warn_if_too_few(self.num_calibration, outer_levels(p))
            return
        if _checks.is_traced(p, values):
            return
        infinite = np.isinf(np.asarray(values))
        if rows := int((infinite.any(axis=-1) if infinite.ndim > self.lowest.ndim else infinite).sum()):
            _checks.warn(
                f"in {rows} rows the quantile is infinite: too few calibration rows resemble them for a guarantee at "
                "the level asked for.",
            )
        else:
            warn_if_beyond(self.finite.levels, p)
