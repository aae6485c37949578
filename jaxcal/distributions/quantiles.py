"""Distributions whose quantile function is linear between knots: `Quantiles`, `ScaledQuantiles`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray, is_working, namespace, numpy_or_jit
from jaxcal.distributions._base import (
    ROUNDINGS,
    Distribution,
    as_parameter,
    as_parameters,
    at_levels,
    check_group,
    check_increasing,
    check_share,
    match,
    numpy_knows,
    of_targets,
    place,
    place_levels,
)
from jaxcal.distributions._reach import EVERYWHERE, Reach
from jaxcal.distributions._rows import MANY, Values, program_of_rows
from jaxcal.functional import linalg, linear_tables, normal_tail, quantiles, scores, smoothing
from jaxcal.functional.linear_tables import LinearTables

# For each kind of tails, the quantile beyond the outermost values of a sample.
_BEYOND = {
    "constant": "the quantile is the outermost of their values, and covers less than its level",
    "normal": "the quantile lies beyond all their values, in a normal tail, and may cover less than its level",
}


class Quantiles(Distribution):
    """Predictions given by their quantiles at k levels, linear in between.

    Beyond the outer levels the quantile function is constant. So atoms of mass levels[0] and 1 - levels[-1] lie at the
    outer quantiles. The mean, the std, the cdf and the score are exact for this distribution. `icdf` and `interval`
    warn at a level beyond the outermost levels.

    If a separate model is fitted to every level, quantiles can cross: the quantile at a higher level is lower.
    `sort=True` sorts them within each row, the rearrangement of Chernozhukov, Fernandez-Val & Galichon (Econometrica
    78, 2010). Whatever the targets are, sorting never increases the mean of the pinball loss over the levels.

    With `lowest` and `highest`, the quantiles of a row are known between two levels of its own. A quantile beyond these
    levels is infinite, with a warning: there is no guarantee for it. The finite values alone decide mean, std, cdf,
    density, score and samples.

    Args:
        levels: [k], strictly increasing in (0, 1), the same for all rows.
        values: [n, k], the quantiles, finite and not decreasing along a row unless they are sorted.
        sort: whether to sort the values within each row.
        lowest: [n], or one number for all rows: the level below which a quantile is -inf. It is 0 where no quantile is
            -inf, and None for all rows if `highest` is None, too.
        highest: [n], or one number for all rows: the level above which a quantile is +inf; 1 where no quantile is.
        num_calibration: how many calibration rows bound the levels of all rows; None if rows differ.

    Raises:
        ValueError: if the number of columns of the values is not the number of levels, or a row of values decreases and
            is not sorted. Also if the levels do not increase strictly within (0, 1), or `lowest` or `highest` lies
            outside [0, 1].

    Example:
        >>> distribution = Quantiles(jnp.array([0.25, 0.75]), jnp.array([[0.0, 2.0]]))
        >>> print(distribution.cdf(1.0), distribution.icdf(0.625))
        [0.5] [1.5]
        >>> print(Quantiles(jnp.array([0.25, 0.75]), jnp.array([[2.0, 0.0]]), sort=True).values)
        [[0. 2.]]
        >>> partial = Quantiles(jnp.array([0.1, 0.25, 0.75]), jnp.array([[-3.0, -1.0, 1.0]]), lowest=0.25, highest=1.0)
        >>> print(partial.icdf(0.25))  # icdf(0.1) is -inf, and comes with a warning
        [-1.]
    """

    levels: Float[JaxArray, "*k"]
    values: Float[JaxArray, "*n k"]
    lowest: Float[JaxArray, "*n"] | None
    highest: Float[JaxArray, "*n"] | None
    num_calibration: int | None = eqx.field(static=True)
    _shared: ClassVar = {"levels": 1}
    is_continuous = False

    def __init__(
        self,
        levels: Values,
        values: Values,
        *,
        sort: bool = False,
        lowest: Values | None = None,
        highest: Values | None = None,
        num_calibration: int | None = None,
    ):
        self.levels, self.values = levels_and_values(levels, values)
        if sort:
            self.values = jnp.sort(self.values, axis=1)
        _check_not_crossing(self.values)
        self.lowest, self.highest, self.num_calibration = None, None, num_calibration
        if lowest is not None or highest is not None:
            low, high = 0.0 if lowest is None else lowest, 1.0 if highest is None else highest
            self.lowest, self.highest, _ = as_parameters(lowest=low, highest=high, values=_first(self.values))
            check_share("lowest", self.lowest)
            check_share("highest", self.highest)

    @property
    def reach(self) -> Reach:
        """The lowest and the highest of the levels, or of the levels that are known in each row."""
        if self.num_calibration is not None:
            return Reach.of_rows(self.num_calibration)
        low, high = self.levels[..., 0], self.levels[..., -1]
        if self.lowest is None or self.highest is None:
            return Reach(low, high)
        xp = namespace(self.lowest)
        return Reach(xp.maximum(self.lowest, low[..., None]), xp.minimum(self.highest, high[..., None]))

    @property
    def _num_filled(self) -> int | None:
        return len(self.values) if self.values.ndim == 2 else None

    @property
    @program_of_rows
    def mean(self) -> Float[JaxArray, "*n"]:
        """The integral of the quantile function over the level."""
        return _mean(*self._knots)

    @property
    @program_of_rows
    def std(self) -> Float[JaxArray, "*n"]:
        """The root of the integral of the squared deviation from the mean over the level."""
        p, q = self._knots
        deviations = q - self.mean[..., None]
        # std = u sqrt(mean((d / u)^2)), so that no square leaves the range of the dtype.
        unit = linalg.scale_of(deviations, axis=-1)
        return unit[..., 0] * linalg.sqrt(_mean_square(p, deviations / unit))

    @of_targets
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """The largest level whose quantile is at most y."""
        p, q = self._knots
        return _with_knots(quantiles.interpolate_monotone)(match(y, q[..., 0]), q, p)

    @of_targets
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """The log of the constant density between two quantiles; -inf outside, where there are only atoms."""
        p, q = self._knots
        return _with_knots(_log_slope)(match(y, q[..., 0]), q, p)

    @of_targets
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The score by the closed form of `functional.scores.quantile_crps`."""
        levels = jnp.expand_dims(self.levels, -2)
        return _with_knots(scores.quantile_crps)(match(y, self.values[..., 0]), levels, self.values)

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[JaxArray, "..."]:
        """The quantiles at uniformly random levels."""
        _checks.check_key(key)
        rows = self.values.shape[:-1]
        levels = jax.random.uniform(key, (math.prod(shape), *rows), self.values.dtype)
        return jax.vmap(self._known)(levels).reshape(shape + rows)

    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The quantile by linear interpolation between the levels."""
        known = self._known(p)
        if self.lowest is None or self.highest is None:
            return known
        return jnp.where(p < self.lowest, -jnp.inf, jnp.where(p > self.highest, jnp.inf, known))

    def _known(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The quantiles without the bounds `lowest` and `highest`."""
        return _with_knots(quantiles.interpolate_monotone)(p, *self._knots)

    @property
    def _knots(self) -> tuple[Float[JaxArray, "..."], Float[JaxArray, "..."]]:
        """The levels with 0 and 1 added, and the quantiles at these levels, both [n, k + 2]."""
        levels = jnp.broadcast_to(jnp.expand_dims(self.levels, -2), self.values.shape)
        ends = [(0, 0)] * (self.values.ndim - 1) + [(1, 1)]
        return jnp.pad(levels, ends, constant_values=(0, 1)), jnp.pad(self.values, ends, mode="edge")


def levels_and_values(levels: Values, values: Values) -> tuple[Float[JaxArray, " k"], Float[JaxArray, "n k"]]:
    """Levels that increase strictly in (0, 1), and quantiles with a column for each level.

    Raises:
        ValueError: if the number of columns is not the number of levels, or the levels do not increase so.
    """
    matrix = _checks.as_matrix("values", values)
    values = as_parameter(matrix, matrix.dtype)
    levels = as_parameter(_checks.as_vector("levels", levels), matrix.dtype)
    if values.shape[1] != levels.shape[0]:
        raise ValueError(f"values must have one column a level: got shape {values.shape} and {levels.shape[0]} levels.")
    _checks.check_fraction("levels", levels)
    check_increasing("levels", levels, strictly=True)
    return levels, values


@numpy_or_jit
def _first(values: Float[JaxArray, "n k"]) -> Float[JaxArray, " n"]:
    """The first column."""
    return values[:, 0]


class ScaledQuantiles(Distribution):
    """Predictions loc + scale * Z, where the quantile function of Z is linear between knots.

    All rows, or all rows of a group, share the knots. Beyond the outer levels there are two kinds of tails:

    - tails="constant": the quantile function is constant, as in `Quantiles`.
    - tails="normal": Z has the tails of a standard normal distribution, scaled to the mass beyond the knot. So
      P(Z <= t) is levels[0] Phi(t) / Phi(z[0]) for t <= z[0], and likewise above the last knot. The logs are computed,
      so that a knot at -40 is no problem.

    All methods are exact for this distribution. The cdf and the score cost O(log L) per row, and no [n, L] array is
    made. A row with scale 0 is a point.

    If z is a sorted sample, the density between two knots is a poor estimate of the density of the sample's
    distribution. With `from_sample` the log density is therefore the log density of a smoothed version. Quantiles at
    levels beyond the reach of the sample come with a warning. Nothing else depends on `from_sample` but rounding.

    With `group` every row has the sample of its group, whose values may have weights. Normal tails then have the mean
    and the std of the sample. A row costs O(log M) for M values of all groups.

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        levels: [L], in increasing order in (0, 1). The last level may be 1 if the tails are constant. None with tables
            of groups, which have their own levels.
        z: [L], the quantiles of Z at these levels, in increasing order. If there is a `group`, z are the tables of all
            groups, made by `functional.linear_tables.make`.
        tails: "constant" or "normal".
        from_sample: whether z are the sorted values of a sample. Tables of groups always are. The values decide the
            ends of intervals, which are then rounded outward.
        shift: [n], a part of loc, if z are in units of their own. The rounding depends on its size.
        group: the number of each row's group [n], only with tables of groups.
        new_weight: the weight of each row [n], on the scale of the weights of its group's table. None for the mean of
            these weights.

    Raises:
        ValueError: if an argument is not finite or has the wrong shape, z or the levels do not increase, or the levels
            leave (0, 1). Also if group comes without tables of groups, or such tables without group.

    Example:
        >>> distribution = ScaledQuantiles(jnp.array([0.0, 10.0]), 2.0, jnp.array([0.25, 0.75]), jnp.array([-1.0, 1.0]))
        >>> print(distribution.icdf(0.625), distribution.cdf(1.0))
        [ 1. 11.] [0.625 0.   ]
        >>> values, group = jnp.array([-1.0, 1.0, -5.0, 5.0]), jnp.array([0, 0, 1, 1])
        >>> both = linear_tables.make(values, group, np.array([2, 2]))
        >>> distribution = ScaledQuantiles(jnp.zeros(2), 1.0, None, both, group=jnp.array([0, 1]))
        >>> print(", ".join(f"{quantile:.1f}" for quantile in distribution.icdf(0.6)))
        0.6, 3.0
    """

    loc: Float[JaxArray, "*n"]
    scale: Float[JaxArray, "*n"]
    levels: Float[JaxArray, "*l"] | None
    z: Float[JaxArray, "*l"] | LinearTables
    shift: Float[JaxArray, "*n"] | None
    group: Int[JaxArray, "*n"] | None
    new_weight: Float[JaxArray, "*n"] | None
    tails: str = eqx.field(static=True)
    from_sample: bool = eqx.field(static=True)
    _shared: ClassVar = {"levels": 1, "z": 1}
    is_continuous = False

    def __init__(
        self,
        loc: Values,
        scale: Values,
        levels: Values | None,
        z: Values | LinearTables,
        tails: str = "constant",
        *,
        from_sample: bool = False,
        shift: Values | None = None,
        group: Int[JaxArray, "*n"] | None = None,
        new_weight: Float[JaxArray, "*n"] | None = None,
    ):
        _checks.check_choice("tails", tails, linear_tables.TAILS)
        check_group(z, LinearTables, group, new_weight)
        self.loc, self.scale = as_parameters(loc=loc, scale=scale)
        self.shift = None if shift is None else as_parameters(loc=self.loc, shift=shift)[1].astype(self.loc.dtype)
        self.tails, self.from_sample = tails, from_sample or group is not None
        self.levels, self.z = (None, z) if isinstance(z, LinearTables) else _as_curve(levels, z, self.loc, tails)
        self.group, self.new_weight = group, new_weight
        _checks.check_not_negative("scale", self.scale)

    @property
    def reach(self) -> Reach:
        """The levels that the ranks of a sample reach.

        If there is no sample, they go from the lowest to the highest level. With normal tails they are all levels.
        """
        return self._curve.reach

    @property
    def _in_numpy(self) -> bool:
        """NumPy computes the methods of one run of up to 2^16 rows.

        The intervals of 100,000 rows take NumPy 20 ms, and a warm program 0.3 ms.
        """
        return jax.tree.leaves(self.z)[0].ndim == self.loc.ndim == 1 and len(self.loc) <= MANY

    @property
    @partial(numpy_or_jit, when=numpy_knows)
    def mean(self) -> Float[JaxArray, "*n"]:
        """loc + scale * m, with m the mean of Z."""
        loc, scale = self._units
        return loc + scale * self._curve.moments()[0]

    @property
    @partial(numpy_or_jit, when=numpy_knows)
    def std(self) -> Float[JaxArray, "*n"]:
        """scale * s, with s the std of Z."""
        return self._units[1] * self._curve.moments()[1]

    @of_targets
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """The largest level whose quantile is at most y; in normal tails by the formula of the class."""
        y = match(y, self.loc)
        error, u = self._standardized(self._moved(y, y, 1))  # y moves only if calibration rows decide quantiles
        cdf = self._curve.cdf(u)
        return namespace(cdf).where(self._units[1] > 0, cdf, (error >= 0).astype(cdf.dtype))

    @of_targets
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """The log density, which is constant between two knots; -inf where there are only atoms.

        With `from_sample` it is the log density of a smoothed version, which is finite everywhere:
        `functional.smoothing.sample_log_density`, or `functional.linear_tables.log_density` for groups. The cdf is near
        the integral of this density, but not equal to it.
        """
        xp, scale = namespace(self.loc), self._units[1]
        # log f_Y(y) = log f_Z((y - loc) / scale) - log(scale).
        log_density = self._curve.log_density(self._standardized(y)[1])
        return xp.where(scale > 0, log_density - xp.log(xp.where(scale > 0, scale, 1)), -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The scale times the score of Z at u = (y - loc) / scale, by prefix sums of integrals over the segments.

        If u lies beyond an outer knot, two terms are added. They are the distance of u from this knot, and minus twice
        the integral of the tail between them.
        """
        error, u = self._standardized(y)
        scale = self._units[1]
        return namespace(scale).where(scale > 0, scale * self._curve.crps(u), abs(error))

    def _moved(
        self, values: Float[JaxArray, "..."], levels: Float[JaxArray, "..."], side: Values
    ) -> Float[JaxArray, "..."]:
        return super()._moved(values, levels, ROUNDINGS * side if len(self._locations) > 1 else side)

    @property
    def _locations(self) -> tuple[Float[JaxArray, "*n"], ...]:
        if not self.from_sample:
            return ()
        if isinstance(curve := self._curve, _CurvesOfGroups):
            return self.loc, self.scale * curve.tables.center[curve.group]
        return (self.loc,) if self.shift is None else (self.loc - self.shift, self.shift)

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[JaxArray, "..."]) -> Float[JaxArray, "..."]:
        """The quantiles of Z at checked levels, placed in every row."""
        return place_levels(self._curve.quantiles(levels), *self._units)

    @numpy_or_jit(when=numpy_knows)
    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """loc + scale * z, with z the quantile of Z."""
        return place(self._curve.icdf(p), *self._units)

    @property
    def _curve(self) -> "_SharedQuantiles | _CurvesOfGroups":
        """The distribution of Z: one for all rows, or one for each group."""
        if isinstance(self.z, LinearTables) and self.group is not None:
            return _CurvesOfGroups(self.z, self.group, self.new_weight, self.tails)
        return _SharedQuantiles(cast("JaxArray", self.levels), cast("JaxArray", self.z), self.tails, self.from_sample)

    @property
    def _units(self) -> tuple[Float[JaxArray, "*n"], Float[JaxArray, "*n"]]:
        """The location and the scale of Z's unit in every row."""
        return self._curve.units(self.loc, self.scale)

    def _standardized(self, y: ArrayLike) -> tuple[JaxArray, JaxArray]:
        """The error y - loc, and (y - loc) / scale, in the unit of Z; a scale of 0 counts as 1."""
        loc, scale = self._units
        error = match(y, loc) - loc
        return error, error / namespace(scale).where(scale > 0, scale, 1)


class _SharedQuantiles(NamedTuple):
    """A distribution of Z that is the same for all rows.

    Attributes:
        levels: [L], behind leading axes of runs.
        z: the quantiles at these levels, of the same shape.
        tails: as in `ScaledQuantiles`.
        from_sample: as in `ScaledQuantiles`.
    """

    levels: Float[JaxArray, "*l"]
    z: Float[JaxArray, "*l"]
    tails: str
    from_sample: bool

    def units(self, loc: JaxArray, scale: JaxArray) -> tuple[JaxArray, JaxArray]:
        """The location and the scale of z's unit in rows of this location and scale."""
        return loc, scale

    def moments(self) -> tuple[Float[JaxArray, "..."], Float[JaxArray, "..."]]:
        """The mean and the std, both [1]."""
        xp, (p, q) = namespace(self.z), self._knots
        mean = _mean(p, q)
        if self.tails == "constant":
            deviations = q - mean[..., None]
            unit = linalg.scale_of(deviations, axis=-1)
            return mean, unit[..., 0] * linalg.sqrt(_mean_square(p, deviations / unit))
        masses, ends = self._ends
        excess, square = normal_tail.excess(ends)
        # The tails, of masses m and mean excesses e, shift the mean by m_upper e_upper - m_lower e_lower.
        mean = mean + xp.diff(masses * excess)
        deviations = q - mean[..., None]
        # The std of a normal tail is about 1. Smaller deviations are negligible beside it, and their squares may be 0.
        unit = xp.maximum(linalg.scale_of(deviations, axis=-1), 1)
        inside, unit = _mean_square(p, deviations / unit), unit[..., 0]
        deviations = ends + xp.concatenate([mean, -mean], axis=-1)
        beyond = (masses * (2 * deviations * excess + square)).sum(-1, keepdims=True)
        return mean, unit * linalg.sqrt(inside + beyond / unit / unit)

    def cdf(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The level of u."""
        xp, (p, q) = namespace(self.z), self._knots
        cdf = _with_knots(quantiles.interpolate_monotone)(u, q, p)
        if self.tails == "constant":
            return cdf
        upper, mass, end, x = self._nearest_end(u)
        tail = mass * normal_tail.survival(x, end)
        return xp.where(upper, 1 - tail, xp.where(x > end, tail, cdf))

    def log_density(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The log density at u; for a sample, the log density of a smoothed version."""
        if self.from_sample:
            density = smoothing.sample_log_density
            return (density if is_working() else jnp.vectorize(density, signature="(n),(l)->(n)"))(u, self.z)
        xp, (p, q) = namespace(self.z), self._knots
        log_density = _with_knots(_log_slope)(u, q, p)
        if self.tails == "constant":
            return log_density
        upper, mass, end, x = self._nearest_end(u)
        in_tail = xp.log(mass) + normal_tail.log_prob(x, end)
        return xp.where(upper | (x > end), in_tail, log_density)

    def crps(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The score E|Z - u| - E|Z - Z'| / 2."""
        xp, (p, q) = namespace(self.z), self._knots
        upper, mass, end, x = self._nearest_end(u)
        score = _with_knots(_linear_crps)(xp.clip(u, q[..., 0], q[..., -1]), q, p) + x - end
        if self.tails == "constant":
            return score
        masses, ends = self._ends
        inside = (masses**2 * normal_tail.square_of_survival(ends)).sum(-1, keepdims=True)
        beyond_end = _pick(upper, masses * normal_tail.excess(ends)[0])
        return score + inside - 2 * (beyond_end - mass * normal_tail.survival(x, end) * normal_tail.excess(x)[0])

    def quantiles(self, levels: Float[JaxArray, "..."]) -> Float[JaxArray, "..."]:
        """The quantiles at one level or k levels, [1] or [1, k]."""
        return at_levels(self.icdf, levels, self.z[..., :1])

    def icdf(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The quantile of every row at a level of its own."""
        xp, (levels, q) = namespace(self.z), self._knots
        z = _with_knots(quantiles.interpolate_monotone)(p, levels, q)
        if self.tails == "constant":
            return z
        upper = p > self.levels[..., -1:]
        fraction = xp.where(upper, 1 - p, p)
        mass, end = (_pick(upper, pair) for pair in self._ends)
        beyond, possible = fraction < mass, fraction > 0
        x = normal_tail.quantile(xp.where(beyond & possible, fraction, mass) / mass, end)
        x = xp.where(possible, x, np.inf)
        return xp.where(beyond, xp.where(upper, x, -x), z)

    @property
    def reach(self) -> Reach:
        """The levels between which quantiles are known."""
        if self.from_sample:
            return Reach.of_rows(self.z.shape[-1], _BEYOND[self.tails])
        return Reach(self.levels[..., 0], self.levels[..., -1]) if self.tails == "constant" else EVERYWHERE

    @property
    def _knots(self) -> tuple[Float[JaxArray, "..."], Float[JaxArray, "..."]]:
        """The levels with 0 and 1 added, and z at these levels, both [1, L + 2], for all rows."""
        xp, ends = namespace(self.z), [(0, 0)] * (self.z.ndim - 1) + [(1, 1)]
        levels, z = xp.pad(self.levels, ends, constant_values=(0, 1)), xp.pad(self.z, ends, mode="edge")
        return xp.expand_dims(levels, -2), xp.expand_dims(z, -2)

    @property
    def _ends(self) -> tuple[Float[JaxArray, "..."], Float[JaxArray, "..."]]:
        """The masses beyond the first and the last knot, and the outward coordinates -z[0] and z[-1]; both [2]."""
        xp = namespace(self.z)
        masses = xp.concatenate([self.levels[..., :1], 1 - self.levels[..., -1:]], axis=-1)
        return masses, xp.concatenate([-self.z[..., :1], self.z[..., -1:]], axis=-1)

    def _nearest_end(self, u: JaxArray) -> tuple[JaxArray, ...]:
        """The end on the side of u, as a tuple of four values.

        The first value is whether u is at or beyond the upper end. Then come the mass beyond the end, the end, and the
        larger of the end and u. The last two are in outward coordinates.
        """
        xp, upper = namespace(self.z), u >= self.z[..., -1:]
        mass, end = (_pick(upper, pair) for pair in self._ends)
        return upper, mass, end, xp.maximum(xp.where(upper, u, -u), end)


class _CurvesOfGroups(NamedTuple):
    """The distributions of Z of all groups, in units of each group, and the number of each row's group [n].

    The methods are the methods of `_SharedQuantiles`.
    """

    tables: LinearTables
    group: Int[JaxArray, "*n"]
    new_weight: Float[JaxArray, "*n"] | None
    tails: str

    def units(self, loc: JaxArray, scale: JaxArray) -> tuple[JaxArray, JaxArray]:
        """The location and the scale of the unit of each row's table."""
        return loc + scale * self.tables.center[self.group], scale * self.tables.spread[self.group]

    def moments(self) -> tuple[Float[JaxArray, "*n"], Float[JaxArray, "*n"]]:
        """The mean and the std, both [n]."""
        return linear_tables.mean_and_std(self.tables, self.group, self.new_weight, self.tails)

    def cdf(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The level of u."""
        return linear_tables.cdf(self.tables, self.group, u, self.new_weight, self.tails)

    def log_density(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The log density at u of a smoothed version."""
        return linear_tables.log_density(self.tables, self.group, u, self.new_weight)

    def crps(self, u: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The score at u."""
        return linear_tables.crps(self.tables, self.group, u, self.new_weight, self.tails)

    def quantiles(self, levels: Float[JaxArray, "..."]) -> Float[JaxArray, "..."]:
        """The quantiles at one level or k levels. The rows of a group share one search if `new_weight` is None."""
        number = self.tables.total.shape[0]
        if self.new_weight is not None or number > self.group.shape[0]:
            return at_levels(self.icdf, levels, self.tables.total[self.group])
        group_rows = self._replace(group=namespace(self.group).arange(number, dtype=np.int32))
        return at_levels(group_rows.icdf, levels, self.tables.total)[self.group]

    def icdf(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The quantile of every row at a level of its own."""
        return linear_tables.quantile(self.tables, self.group, p, self.new_weight, self.tails)

    @property
    def reach(self) -> Reach:
        """The levels between which quantiles are known, by the weights of each row's group."""
        start, end = self.tables.start[self.group], self.tables.start[self.group + 1]
        total = self.tables.total[self.group]
        new = total / (end - start) if self.new_weight is None else self.new_weight
        # The level of value k is (W_k + w / 2) / (W + w). W_k is the weight up to its middle, and w the new weight.
        low, high = ((self.tables.middle[place] + new / 2) / (total + new) for place in (start, end - 1))
        return Reach(low, high, "the quantile may cover less than its level", end - start)


def _as_curve(
    levels: Values | None, z: Values, loc: Float[JaxArray, "*n"], tails: str
) -> tuple[Float[JaxArray, "*l"], Float[JaxArray, "*l"]]:
    """Checked levels and quantiles of Z in the dtype of the rows."""
    if levels is None:
        raise ValueError("levels is None, which goes with tables of groups as z: give the levels of z.")
    z = as_parameter(_checks.as_vector("z", z), loc.dtype)
    levels = as_parameter(_checks.as_vector("levels", levels, length=z.shape[0]), loc.dtype)
    check_increasing("z", z, strictly=False)
    check_increasing("levels", levels, strictly=False)
    if not _checks.is_traced(levels):
        inner = np.asarray(levels)
        _checks.check_fraction("levels", inner if tails == "normal" else inner[inner != 1])
    return levels, z


def _check_not_crossing(values: Float[JaxArray, "n k"]) -> None:
    """Raise ValueError if known quantiles decrease along a row; say in how many rows, and which row is the first."""
    if _checks.is_traced(values):
        return
    known = np.asarray(values)
    crossing = np.diff(known) < 0
    rows = np.flatnonzero(crossing.any(axis=1))
    if rows.size:
        row, k = rows[0], crossing[rows[0]].argmax()
        raise ValueError(
            f"values must not decrease along a row: the quantiles of {rows.size} of {len(known)} rows cross, the first "
            f"in row {row}, {known[row, k]:g} before {known[row, k + 1]:g}. sort=True sorts them within each row."
        )


def _with_knots(function: Callable[..., JaxArray]) -> Callable[[JaxArray, JaxArray, JaxArray], JaxArray]:
    """A function of one value and the k knots of one curve, applied to all rows."""
    if is_working():  # NumPy has one curve for all rows
        return lambda x, knots, values: function(x, knots[0], values[0])
    return jnp.vectorize(function, signature="(),(k),(k)->()")


def _mean(p: JaxArray, q: JaxArray) -> JaxArray:
    """The integral over the level p of quantiles q that are linear between levels."""
    return (namespace(p, q).diff(p) * (q[..., :-1] + q[..., 1:]) / 2).sum(-1)


def _mean_square(p: JaxArray, q: JaxArray) -> JaxArray:
    """The integral over the level p of q^2, for quantiles q that are linear between levels."""
    # The mean of (a + (b - a) t)^2 over t in [0, 1] is (a^2 + a b + b^2) / 3.
    a, b = q[..., :-1], q[..., 1:]
    return (namespace(p, q).diff(p) * (a * a + a * b + b * b) / 3).sum(-1)


def _log_slope(x: JaxArray, knots: JaxArray, values: JaxArray) -> JaxArray:
    """The log of the slope at x of a piecewise-linear curve; -inf where it jumps or is constant."""
    xp = namespace(x, knots, values)
    right = xp.clip(xp.searchsorted(knots, x, side="right"), 1, knots.shape[0] - 1)
    step, rise = knots[right] - knots[right - 1], values[right] - values[right - 1]
    sloped = (step > 0) & (rise > 0) & (x >= knots[0])
    rise, step = xp.where(sloped, rise, 1), xp.where(sloped, step, 1)
    return xp.where(sloped, xp.log(rise) - xp.log(step), -np.inf)


def _linear_crps(u: JaxArray, q: JaxArray, p: JaxArray) -> JaxArray:
    """CRPS at u within the knots q of the distribution whose cdf is linear between values p from 0 to 1.

    It costs O(log k) per value. The integrals of cdf^2 up to every knot, and of (1 - cdf)^2 from every knot on, are
    prefix sums of positive terms.
    """
    xp, dtype = namespace(u, q, p), u.dtype
    if xp is np:
        q, p = q.astype(float), p.astype(float)  # NumPy's prefix sums of 32 bits would round
    width, squares = xp.diff(q), lambda f: f[:-1] ** 2 + f[:-1] * f[1:] + f[1:] ** 2
    below = xp.pad(xp.cumsum(width * squares(p) / 3), (1, 0))
    above = xp.pad(xp.cumsum((width * squares(1 - p) / 3)[::-1])[::-1], (0, 1))
    left = xp.maximum(xp.searchsorted(q, u, side="right") - 1, 0)
    # F^2 - (1 - F)^2 = 2 F - 1. Its integral from q_l to u is (u - q_l) (F(q_l) + F(u) - 1).
    score = (below + above)[left] + (u - q[left]) * (p[left] + quantiles.interpolate_monotone(u, q, p) - 1)
    return score.astype(dtype)


def _pick(upper: JaxArray, pair: JaxArray) -> JaxArray:
    """The second of a pair where `upper` is true, the first elsewhere."""
    return namespace(pair).where(upper, pair[..., 1:], pair[..., :1])
