"""`Recalibrated`: distributions whose probabilities a monotone map has corrected."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, constant, is_working, namespace, numpy_or_jit
from jaxcal.distributions._base import (
    Distribution,
    as_parameter,
    at_levels,
    check_increasing,
    match,
    numpy_knows,
    of_targets,
)
from jaxcal.distributions._reach import Reach
from jaxcal.distributions._rows import Values, replaced
from jaxcal.distributions.empirical import Empirical
from jaxcal.functional import linalg, rounding, smoothing
from jaxcal.functional._loops import scan
from jaxcal.functional.quantiles import interpolate_monotone, unit_gauss_legendre

# A quadrature over the level has at most 96 pieces, and 24 points in each of the two outer pieces. It takes 16 points
# at once.
_PIECES, _POINTS_OF_A_TAIL, _AT_ONCE = 96, 24, 16
_BEYOND = "the quantile lies beyond all their values, in the tail of the base, and may cover less than its level"


class Recalibrated(Distribution):
    """The distributions with cdf R(base.cdf(y)), where R maps probabilities to the fractions that were observed.

    By default R is piecewise linear: R(u_(j)) = j / (L + 1) for the j-th smallest u = base.cdf(y) of L calibration
    rows, R(0) = 0 and R(1) = 1. So every row keeps the shape of its base. It keeps the tails of its base beyond the
    calibration rows. A new exchangeable row lies below the quantile at level j / (L + 1) with that probability. Memory
    is O(n + L). Mean, std and CRPS are integrals over the level by quadrature. Their relative error is about 1e-4, and
    1e-3 if the base's std is half of the correct std.

    With a rule, R is the cdf of an `Empirical` of the table u. The quantiles are then quantiles of the base at values
    of the table. Mean, std, score and samples are computed from a table for each row: its L quantiles of the base.

    Calibration rows decide the quantiles. So a quantile q is moved outward, until base.cdf(q) is beyond the value of
    the table (`functional.rounding.beyond`). A probability within rounding of such a value counts as equal to it.

    Args:
        base: the distributions of the rows, [n], which must have a density everywhere.
        u: [L], the probabilities, in increasing order, in (0, 1).
        rule: "linear", or a rule of `Empirical` by which quantiles are read from the table.
        tau: [n], as in `Empirical`, only with rule="randomized".
        central: whether u holds the ends of central intervals around 1/2, [2 L + 1] for L calibration rows.

    Example:
        >>> from jaxcal.distributions import StudentT
        >>> distribution = Recalibrated(StudentT(4.0, jnp.array([0.0, 10.0]), 1.0), jnp.array([0.1, 0.5, 0.9]))
        >>> print([f"{quantile:.2f}" for quantile in distribution.icdf(0.75)])
        ['1.53', '11.53']
    """

    base: Distribution
    u: Float[AnyArray, "*l"]
    steps: Empirical | None = None
    central: bool = eqx.field(static=True, default=False)
    _shared: ClassVar = {"u": 1}

    def __init__(
        self, base: Distribution, u: Values, rule: str = "linear", tau: Values | None = None, *, central: bool = False
    ):
        self.central = central
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
        """Whether the base has closed quantiles."""
        return self.base.has_closed_quantiles

    @property
    def reach(self) -> Reach:
        """The levels that the ranks of the calibration rows reach."""
        if self.steps is not None:
            return self.steps.reach
        number = self.u.shape[-1]
        return Reach.of_rows((number - 1) // 2 if self.central else number, _BEYOND, central=self.central)

    @property
    def _in_numpy(self) -> bool:
        """NumPy computes the methods of one run without a rule, if it computes the methods of the base."""
        return self.steps is None and self.u.ndim == 1 and self.base._in_numpy

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.base)

    def _take(self, rows: Int[AnyArray, " k"]) -> "Recalibrated":
        self._check_one_run()
        steps = None if self.steps is None else self.steps._take(rows)
        return replaced(self, base=self.base._take(rows), steps=steps)  # a base may take rows in another way

    @property
    @numpy_or_jit(when=numpy_knows)
    def mean(self) -> Float[AnyArray, "*n"]:
        """The integral of the quantile function over the level; not finite where the base's mean is not finite."""
        if self.steps is not None:
            return self._table(self.steps).mean
        base = self.base.mean
        offset = self._expectation(lambda p, q: q - base[..., None])
        return namespace(base).where(abs(base) < np.inf, base + offset, base)

    @property
    @numpy_or_jit(when=numpy_knows)
    def std(self) -> Float[AnyArray, "*n"]:
        """The root of the integral of the squared deviation from the mean.

        It is not finite where the base's std is not finite.
        """
        if self.steps is not None:
            return self._table(self.steps).std
        mean, unit = self.mean, self.base.std
        xp = namespace(unit)
        finite = xp.isfinite(unit) & (unit > 0)
        divisor = xp.where(finite, unit, 1)
        square = self._expectation(lambda p, q: ((q - mean[..., None]) / divisor[..., None]) ** 2)
        return xp.where(finite, divisor * linalg.sqrt(square), unit)

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """R(base.cdf(y))."""
        p = self.base.cdf(match(y, self.base.mean))
        if self.steps is not None:
            return self.steps.cdf(p)
        u, levels = self._knots
        return _on_one_axis(interpolate_monotone)(p + rounding.of_probability(p), u, levels)

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """The log density of a smoothed version: base.log_prob(y) + log r(base.cdf(y)).

        r is the density of the probabilities u, by `functional.smoothing.map_log_slope`, in bins that hold several. The
        cdf is near the integral of this density, but not equal to it. With a rule the log density is -inf.
        """
        y = match(y, self.base.mean)
        if self.steps is not None:
            return jnp.full_like(y, -jnp.inf)
        slope = smoothing.map_log_slope
        slope = slope if is_working() else jnp.vectorize(slope, signature="(n),(l)->(n)")
        return self.base.log_prob(y) + slope(self.base.cdf(y), self.u)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """Twice the integral of the pinball loss over the level, by quadrature; with a rule, the table's score."""
        y = match(y, self.base.mean)
        if self.steps is not None:
            return self._table(self.steps).crps(y)
        xp, y = namespace(y), y[..., None]
        return 2 * self._expectation(lambda p, q: xp.maximum(q - y, 0) - p * (q - y))

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[AnyArray, "..."]:
        """The quantiles at uniformly random levels; with a rule, values of the table."""
        if self.steps is not None:
            return self._table(self.steps).sample(key, shape)
        return super().sample(key, shape)

    @property
    def _mirrors_levels(self) -> bool:
        return self.steps is not None and self.steps._mirrors_levels

    def _sides(self, levels: Float[AnyArray, "..."]) -> AnyArray:
        return super()._sides(levels) if self.steps is None else self.steps._sides(levels)

    def _moved(
        self, values: Float[AnyArray, "..."], levels: Float[AnyArray, "..."], side: Values
    ) -> Float[AnyArray, "..."]:
        xp, base = namespace(values), jax.tree.map(constant, self.base)
        center, size = base.mean, base.std

        def moved(value: AnyArray, level: AnyArray, side: AnyArray) -> AnyArray:
            at = self._base_level(xp.full(value.shape, level, value.dtype))
            return rounding.beyond(base.cdf, value, at, side, center, size)

        sides: AnyArray = xp.broadcast_to(xp.asarray(side), levels.shape)
        if levels.ndim == 0:
            return moved(values, levels, sides)
        return xp.stack([moved(values[..., k], levels[k], sides[k]) for k in range(len(levels))], -1)

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The base's quantiles at the levels that R maps to these."""
        if self.steps is not None or self.u.ndim > 1:
            return at_levels(self.quantile, levels, self.base.mean)
        return self.base._quantiles(self._base_level(levels))

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The base's quantile at the level that R maps to p."""
        level = self._base_level(p)
        if self.steps is None:
            return self.base.quantile(level)
        infinite = jnp.isinf(level)
        return jnp.where(infinite, level, self.base.quantile(jnp.where(infinite, 0.5, level)))

    def _base_level(self, p: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The level of the base for the quantile at level p; infinite where the rule has no finite quantile."""
        if self.steps is not None:
            return self.steps.quantile(p)
        xp, (u, levels) = namespace(self.u), self._knots
        level = _on_one_axis(interpolate_monotone)(p if p.ndim else p[None], levels, u)
        level = level if p.ndim else level[..., 0]
        # Rounding must not move a level below 1 to 1, where a quantile may be infinite.
        return xp.where(p < 1, xp.minimum(level, 1 - float(jnp.finfo(u.dtype).epsneg)), 1)

    def _table(self, steps: Empirical) -> Empirical:
        """The quantiles of every row's base at the values of the table [n, L], in increasing order."""
        quantiles = jax.vmap(lambda p: self.base.quantile(jnp.full_like(self.base.mean, p)), out_axes=-1)(self.u)
        # Rounding in the search for a quantile must not exchange two quantiles.
        ordered = jax.lax.cummax(jax.lax.stop_gradient(quantiles), axis=1)
        return Empirical(steps.loc, 1.0, linalg.snapped(quantiles, ordered), steps.rule, steps.tau)

    @property
    def _knots(self) -> tuple[Float[AnyArray, "..."], Float[AnyArray, "..."]]:
        """The probabilities and the levels of R, with 0 and 1 added."""
        size = self.u.shape[-1]
        xp, ends = namespace(self.u), [(0, 0)] * (self.u.ndim - 1) + [(1, 1)]
        levels = xp.arange(size + 2, dtype=self.u.dtype) / (size + 1)
        u = xp.pad(self.u, ends, constant_values=(0, 1))
        return u, xp.broadcast_to(levels, u.shape)

    def _expectation(self, function: Callable[[AnyArray, AnyArray], AnyArray]) -> Float[AnyArray, "*n"]:
        """The integral over the level p of a function of p and the quantiles of all rows there, both [n, k]."""
        nodes, weights = _quadrature(self.u.shape[-1])
        xp, dtype, info = namespace(self.u, self.base.mean), self.u.dtype, jnp.finfo(self.u.dtype)
        # Rounding must not move a level to 1, where a quantile may be infinite.
        nodes = np.clip(nodes, float(info.tiny), 1 - float(info.epsneg))
        filling = (0, -len(nodes) % _AT_ONCE)  # with points of weight 0
        points = np.stack([np.pad(nodes, filling, constant_values=0.5), np.pad(weights, filling)])
        points = points.reshape(2, -1, _AT_ONCE).swapaxes(0, 1)

        def add_points(total: AnyArray, some: AnyArray) -> tuple[AnyArray, None]:
            levels, weights = some
            quantiles = self._quantiles(levels)
            levels, weights = (xp.broadcast_to(each, quantiles.shape) for each in (levels, weights))
            return total + (weights * function(levels, quantiles)).sum(-1), None

        return scan(add_points, xp.zeros_like(self.base.mean), xp.asarray(points, dtype), again=True)[0]


def _quadrature(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of an integral over the level, of a function that is smooth between levels k / (size + 1).

    It uses Gauss-Legendre rules on the pieces between these levels, or between some of the levels if there are many. On
    both outer pieces the quantiles go to infinity. There the points are dense near the end.
    """
    ends = np.unique(np.linspace(0, size + 1, min(size + 1, _PIECES) + 1).round()) / (size + 1)
    v, inner_weights = unit_gauss_legendre(max(2, 2 * _PIECES // len(ends)))
    start, width = ends[1:-2, None], np.diff(ends)[1:-1, None]
    nodes, weights = (start + width * v).ravel(), (width * inner_weights).ravel()
    v, outer_weights = unit_gauss_legendre(_POINTS_OF_A_TAIL)
    # On an outer piece p = e v^3, so that dp = 3 e v^2 dv.
    tail, tail_weights = ends[1] * v**3, ends[1] * 3 * v**2 * outer_weights
    return np.concatenate([tail, nodes, 1 - tail]), np.concatenate([tail_weights, weights, tail_weights])


def _on_one_axis(
    function: Callable[[AnyArray, AnyArray, AnyArray], AnyArray],
) -> Callable[[AnyArray, AnyArray, AnyArray], AnyArray]:
    """The function of one curve's knots and of all rows, for each run."""
    return function if is_working() else jnp.vectorize(function, signature="(n),(k),(k)->(n)")
