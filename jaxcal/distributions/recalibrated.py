"""A distribution composed with a monotone map of its probabilities: `Recalibrated`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import (
    Distribution,
    as_parameter,
    check_confidence_level,
    check_increasing,
    match,
    warn_beyond_sample,
)
from jaxcal.functional import linalg, smoothing
from jaxcal.functional.quantiles import interpolate_monotone, unit_gauss_legendre

# The points of a quadrature over the level. The error of the moments of a base with more than 3 degrees of freedom is
# below 1e-4 of the std.
_POINTS = 64
_BEYOND = "the quantile lies beyond all their values, in the tail of the base, and may cover less than its level"


class Recalibrated(Distribution):
    """The distributions with cdf R(base.cdf(y)), where R maps probabilities to the fractions that were observed.

    R is piecewise linear: R(u_(j)) = j / (L + 1) for the j-th smallest u = base.cdf(y) of L calibration rows, R(0) = 0
    and R(1) = 1. So every row keeps the shape of its base, and beyond the calibration rows its tails. A new
    exchangeable row lies below the quantile at level j / (L + 1) with just that probability.

    Memory is O(n + L). Mean, std and CRPS are integrals over the level by quadrature.

    Args:
        base: the distributions of the rows, [n], which must have a density everywhere.
        u: [L], the probabilities, in increasing order, in (0, 1).

    Example:
        >>> from jaxcal.distributions import StudentT
        >>> distribution = Recalibrated(StudentT(4.0, jnp.array([0.0, 10.0]), 1.0), jnp.array([0.1, 0.5, 0.9]))
        >>> print(distribution.icdf(0.25), distribution.cdf(10.0))
        [-1.5332063  8.466794 ] [0.9999297 0.5      ]
    """

    base: Distribution
    u: Float[Array, "*l"]

    def __init__(self, base: Distribution, u: Real[ArrayLike, "..."]):
        if not isinstance(base, Distribution):
            raise ValueError(f"base must be a Distribution; got {type(base).__name__}.")
        self.base = base
        self.u = as_parameter(_checks.as_vector("u", u), base.mean.dtype)
        _checks.check_fraction("u", self.u)
        check_increasing("u", self.u, strictly=False)

    @property
    @eqx.filter_jit
    def mean(self) -> Float[Array, "*n"]:
        """The integral of the quantile function over the level; not finite where that of the base is not."""
        base = self.base.mean
        zero, one = jnp.zeros_like(base), jnp.ones_like(base)
        mean = self._between(zero, one, lambda p, q: q - base)
        return jnp.where(jnp.isfinite(base), base + mean, base)

    @property
    @eqx.filter_jit
    def std(self) -> Float[Array, "*n"]:
        """The root of the integral of the squared deviation from the mean; not finite where that of the base is not."""
        mean, unit = self.mean, self.base.std
        finite = jnp.isfinite(unit) & (unit > 0)
        divisor = jnp.where(finite, unit, 1)
        zero, one = jnp.zeros_like(mean), jnp.ones_like(mean)
        square = self._between(zero, one, lambda p, q: ((q - mean) / divisor) ** 2)
        return jnp.where(finite, divisor * linalg.sqrt(square), unit)

    @eqx.filter_jit
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """R(base.cdf(y))."""
        u, levels = self._knots
        return _on_one_axis(interpolate_monotone)(self.base.cdf(match(y, self.base.mean)), u, levels)

    @eqx.filter_jit
    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density of a smoothed version: base.log_prob(y) + log r(base.cdf(y)).

        r is the density of the probabilities u by `functional.smoothing.map_log_slope`, in bins that hold several: the
        cdf and the quantiles are not the integral of this density, though near it.
        """
        y = match(y, self.base.mean)
        slope = jnp.vectorize(smoothing.map_log_slope, signature="(n),(l)->(n)")(self.base.cdf(y), self.u)
        return self.base.log_prob(y) + slope

    @eqx.filter_jit
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Twice the integral of the pinball loss over the level, below and above cdf(y), by quadrature."""
        y = match(y, self.base.mean)
        level = self.cdf(y)
        below = self._between(jnp.zeros_like(level), level, lambda p, q: p * (y - q))
        above = self._between(level, jnp.ones_like(level), lambda p, q: (1 - p) * (q - y))
        return 2 * (below + above)

    def icdf(self, p: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The base's quantiles at the levels that R maps to p: [n] for one level, [n, k] for k levels.

        Raises:
            ValueError: if p has more than one axis, or a known level lies outside [0, 1].

        Warns:
            UserWarning: if there are too few calibration rows for a known level strictly between 0 and 1.
        """
        values = super().icdf(p)
        warn_beyond_sample(p, self.u.shape[-1], _BEYOND)
        return values

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """The ends (lower, upper) of the central interval: the quantiles at (1 -+ confidence_level) / 2.

        Raises:
            ValueError: if `confidence_level` is not one number between 0 and 1.

        Warns:
            UserWarning: as `icdf` does.
        """
        check_confidence_level(confidence_level)
        upper = self.icdf((1 + confidence_level) / 2)
        return super().icdf((1 - confidence_level) / 2), upper

    @eqx.filter_jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The quantiles at uniformly random levels."""
        rows, dtype = self.base.mean.shape, self.u.dtype
        levels = jax.random.uniform(key, (math.prod(shape), *rows), dtype)
        # In the middles of the cells that random numbers come from: never 0, where a quantile may be infinite.
        return jax.vmap(self._icdf)(levels + float(jnp.finfo(dtype).epsneg)).reshape(shape + rows)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        u, levels = self._knots
        level = _on_one_axis(interpolate_monotone)(p, levels, u)
        # Rounding must not put a level below 1 at 1, where a quantile may be infinite.
        return self.base._icdf(jnp.where(p < 1, jnp.minimum(level, 1 - float(jnp.finfo(u.dtype).epsneg)), 1))

    @property
    def _knots(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The probabilities and the levels of R, with 0 and 1 added."""
        size = self.u.shape[-1]
        ends = [(0, 0)] * (self.u.ndim - 1) + [(1, 1)]
        levels = jnp.arange(size + 2, dtype=self.u.dtype) / (size + 1)
        u = jnp.pad(self.u, ends, constant_values=(0, 1))
        return u, jnp.broadcast_to(levels, u.shape)

    def _between(
        self, start: Float[Array, "*n"], end: Float[Array, "*n"], integrand: Callable[[Array, Array], Array]
    ) -> Float[Array, "*n"]:
        """The integral over the levels p in [start, end] of a function of p and the quantile; for all rows at once.

        A Gauss-Legendre rule in v, with p = v^3 (10 - 15 v + 6 v^2) of the way: points crowd at both ends.
        """
        info = jnp.finfo(start.dtype)
        v, weights = unit_gauss_legendre(_POINTS)
        way, slope = v**3 * (10 - 15 * v + 6 * v**2), 30 * v**2 * (1 - v) ** 2
        points = np.stack([way, weights * slope], axis=1)

        @jax.checkpoint
        def add_point(total: Array, point: Array) -> tuple[Array, None]:
            # Rounding must not put it at 0 or 1, where a quantile may be infinite.
            level = jnp.clip(start + (end - start) * point[0], float(info.tiny), 1 - float(info.epsneg))
            return total + point[1] * integrand(level, self._icdf(level)), None

        total = jax.lax.scan(add_point, jnp.zeros_like(start), jnp.asarray(points, start.dtype))[0]
        return (end - start) * total


def _on_one_axis(function: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """A function of all rows and the knots of one curve."""
    return jnp.vectorize(function, signature="(n),(k),(k)->(n)")
