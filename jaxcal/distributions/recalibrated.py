"""A distribution composed with a monotone map of its probabilities: `Recalibrated`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal.distributions._base import Distribution, as_parameter, check_increasing, match, of_targets
from jaxcal.distributions._reach import Reach
from jaxcal.distributions._rows import Values, replaced
from jaxcal.distributions.empirical import Empirical
from jaxcal.functional import linalg, rounding, smoothing
from jaxcal.functional.quantiles import interpolate_monotone, unit_gauss_legendre

# A quadrature over the level has so many pieces at most, and so many points in each of the outer two.
_PIECES, _POINTS_OF_A_TAIL = 96, 24
_BEYOND = "the quantile lies beyond all their values, in the tail of the base, and may cover less than its level"


class Recalibrated(Distribution):
    """The distributions with cdf R(base.cdf(y)), where R maps probabilities to the fractions that were observed.

    By default R is piecewise linear: R(u_(j)) = j / (L + 1) for the j-th smallest u = base.cdf(y) of L calibration
    rows, R(0) = 0 and R(1) = 1. So every row keeps the shape of its base, and beyond the calibration rows its tails. A
    new exchangeable row lies below the quantile at level j / (L + 1) with that probability. Memory is O(n + L). Mean,
    std and CRPS are integrals over the level by quadrature, with a relative error of about 1e-4; of 1e-3 where the
    base's std is half of what it should be.

    With a rule R is the cdf of an `Empirical` of the table u, and the quantiles are the base's own at values of the
    table. Mean, std, score and samples are those of a table for each row, its L quantiles of the base.

    Calibration rows decide the quantiles. So they are moved outward, until base.cdf there is beyond the value of the
    table (`functional.rounding.beyond`); a probability within rounding of such a value counts as equal.

    Args:
        base: the distributions of the rows, [n], which must have a density everywhere.
        u: [L], the probabilities, in increasing order, in (0, 1).
        rule: "linear", or how quantiles are read from the table, as of `Empirical`.
        tau: [n], as of `Empirical`, with rule="randomized" only.

    Example:
        >>> from jaxcal.distributions import StudentT
        >>> distribution = Recalibrated(StudentT(4.0, jnp.array([0.0, 10.0]), 1.0), jnp.array([0.1, 0.5, 0.9]))
        >>> print([f"{quantile:.2f}" for quantile in distribution.icdf(0.75)])
        ['1.53', '11.53']
    """

    base: Distribution
    u: Float[Array, "*l"]
    steps: Empirical | None = None
    _shared: ClassVar = {"u": 1}

    def __init__(self, base: Distribution, u: Values, rule: str = "linear", tau: Values | None = None):
        self.base = base
        self.u = as_parameter(_checks.as_vector("u", u), base.mean.dtype)
        _checks.check_fraction("u", self.u)
        check_increasing("u", self.u, strictly=False)
        one = jnp.ones_like(base.mean)
        self.steps = None if rule == "linear" else Empirical(0 * one, one, self.u, rule, tau)

    @property
    def has_density(self) -> bool:
        """Whether there is no rule."""
        return self.steps is None

    @property
    def is_continuous(self) -> bool:
        """Whether there is no rule."""
        return self.has_density

    @property
    def has_closed_quantiles(self) -> bool:
        """As of the base."""
        return self.base.has_closed_quantiles

    @property
    def reach(self) -> Reach:
        """As far as the ranks of the calibration rows reach."""
        return Reach.of_rows(self.u.shape[-1], _BEYOND) if self.steps is None else self.steps.reach

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.base)

    def _take(self, rows: Int[Array | np.ndarray, " k"]) -> "Recalibrated":
        self._check_one_run()
        steps = None if self.steps is None else self.steps._take(rows)
        return replaced(self, base=self.base._take(rows), steps=steps)  # bases need not be arrays with a row each

    @property
    @_programs.jit
    def mean(self) -> Float[Array, "*n"]:
        """The integral of the quantile function over the level; not finite where that of the base is not."""
        if self.steps is not None:
            return self._table(self.steps).mean
        base = self.base.mean
        return jnp.where(jnp.isfinite(base), base + self._expectation(lambda p, q: q - base), base)

    @property
    @_programs.jit
    def std(self) -> Float[Array, "*n"]:
        """The root of the integral of the squared deviation from the mean; not finite where that of the base is not."""
        if self.steps is not None:
            return self._table(self.steps).std
        mean, unit = self.mean, self.base.std
        finite = jnp.isfinite(unit) & (unit > 0)
        divisor = jnp.where(finite, unit, 1)
        square = self._expectation(lambda p, q: ((q - mean) / divisor) ** 2)
        return jnp.where(finite, divisor * linalg.sqrt(square), unit)

    @of_targets
    def cdf(self, y: Values) -> Float[Array, "*n"]:
        """R(base.cdf(y))."""
        p = self.base.cdf(match(y, self.base.mean))
        if self.steps is not None:
            return self.steps.cdf(p)
        u, levels = self._knots
        return _on_one_axis(interpolate_monotone)(rounding.outward(p, 1), u, levels)

    @of_targets
    def log_prob(self, y: Values) -> Float[Array, "*n"]:
        """The log density of a smoothed version: base.log_prob(y) + log r(base.cdf(y)).

        r is the density of the probabilities u by `functional.smoothing.map_log_slope`, in bins that hold several: the
        cdf and the quantiles are not the integral of this density, though near it. With a rule it is -inf.
        """
        y = match(y, self.base.mean)
        if self.steps is not None:
            return jnp.full_like(y, -jnp.inf)
        slope = jnp.vectorize(smoothing.map_log_slope, signature="(n),(l)->(n)")(self.base.cdf(y), self.u)
        return self.base.log_prob(y) + slope

    @of_targets
    def crps(self, y: Values) -> Float[Array, "*n"]:
        """Twice the integral of the pinball loss over the level, by quadrature; with a rule that of the table."""
        y = match(y, self.base.mean)
        if self.steps is not None:
            return self._table(self.steps).crps(y)
        return 2 * self._expectation(lambda p, q: jnp.maximum(q - y, 0) - p * (q - y))

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The quantiles at uniformly random levels; with a rule values of the table."""
        if self.steps is not None:
            return self._table(self.steps).sample(key, shape)
        return super().sample(key, shape)

    @property
    def _mirrors_levels(self) -> bool:
        return self.steps is not None and self.steps._mirrors_levels

    def _sides(self, levels: Float[Array, "..."]) -> Array:
        return super()._sides(levels) if self.steps is None else self.steps._sides(levels)

    def _moved(self, values: Float[Array, "..."], levels: Float[Array, "..."], side: Values) -> Float[Array, "..."]:
        base = jax.lax.stop_gradient(self.base)
        size = base.std

        def move(value: Array, level: Array, side: Array) -> Array:
            at = self._base_level(jnp.full(value.shape, level, value.dtype))
            return rounding.beyond(base.cdf, value, at, side, base.mean, size)

        side = jnp.broadcast_to(side, levels.shape)
        return move(values, levels, side) if levels.ndim == 0 else jax.vmap(move, (-1, 0, 0), -1)(values, levels, side)

    def quantile(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The base's quantile at the level that R maps to p."""
        level = self._base_level(p)
        infinite = jnp.isinf(level)
        return jnp.where(infinite, level, self.base.quantile(jnp.where(infinite, 0.5, level)))

    def _base_level(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The level of the base at which the quantile at level p lies; infinite where the rule has no finite one."""
        if self.steps is not None:
            return self.steps.quantile(p)
        u, levels = self._knots
        level = _on_one_axis(interpolate_monotone)(p, levels, u)
        # Rounding must not put a level below 1 at 1, where a quantile may be infinite.
        return jnp.where(p < 1, jnp.minimum(level, 1 - float(jnp.finfo(u.dtype).epsneg)), 1)

    def _table(self, steps: Empirical) -> Empirical:
        """For every row the quantiles of the base at the values of the table [n, L], in increasing order."""
        quantiles = jax.vmap(lambda p: self.base.quantile(jnp.full_like(self.base.mean, p)), out_axes=-1)(self.u)
        # Rounding in the search for a quantile must not put two of them out of order.
        ordered = jax.lax.cummax(jax.lax.stop_gradient(quantiles), axis=1)
        return Empirical(steps.loc, 1.0, linalg.snapped(quantiles, ordered), steps.rule, steps.tau)

    @property
    def _knots(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The probabilities and the levels of R, with 0 and 1 added."""
        size = self.u.shape[-1]
        ends = [(0, 0)] * (self.u.ndim - 1) + [(1, 1)]
        levels = jnp.arange(size + 2, dtype=self.u.dtype) / (size + 1)
        u = jnp.pad(self.u, ends, constant_values=(0, 1))
        return u, jnp.broadcast_to(levels, u.shape)

    def _expectation(self, function: Callable[[Array, Array], Array]) -> Float[Array, "*n"]:
        """The integral over the level p of a function of p and the quantiles of all rows at p, by quadrature."""
        nodes, weights = _quadrature(self.u.shape[-1])
        dtype, info = self.u.dtype, jnp.finfo(self.u.dtype)
        # Rounding must not put a level at 1, where a quantile may be infinite.
        points = np.stack([np.clip(nodes, float(info.tiny), 1 - float(info.epsneg)), weights], axis=1)

        @jax.checkpoint
        def add_point(total: Array, point: Array) -> tuple[Array, None]:
            level = jnp.full_like(total, point[0])
            return total + point[1] * function(level, self.quantile(level)), None

        return jax.lax.scan(add_point, jnp.zeros_like(self.base.mean), jnp.asarray(points, dtype))[0]


def _quadrature(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of an integral over the level, of a function that is smooth between levels k / (size + 1).

    Gauss-Legendre rules on the pieces between these levels, or between some of many. On both outer pieces, whose
    quantiles go to infinity, the points crowd at the end.
    """
    ends = np.unique(np.linspace(0, size + 1, min(size + 1, _PIECES) + 1).round()) / (size + 1)
    v, inner_weights = unit_gauss_legendre(max(2, 2 * _PIECES // len(ends)))
    start, width = ends[1:-2, None], np.diff(ends)[1:-1, None]
    nodes, weights = (start + width * v).ravel(), (width * inner_weights).ravel()
    v, outer_weights = unit_gauss_legendre(_POINTS_OF_A_TAIL)
    tail, tail_weights = ends[1] * v**3, ends[1] * 3 * v**2 * outer_weights
    return np.concatenate([tail, nodes, 1 - tail]), np.concatenate([tail_weights, weights, tail_weights])


def _on_one_axis(function: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """A function of all rows and the knots of one curve."""
    return jnp.vectorize(function, signature="(n),(k),(k)->(n)")
