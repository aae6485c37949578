"""`SmoothQuantiles`: distributions through quantiles at a few levels, with a density and Student t tails."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.distributions._base import (
    Distribution,
    as_parameter,
    at_levels,
    check_increasing,
    match,
    numpy_knows,
    of_targets,
)
from jaxcal.distributions._rows import Values
from jaxcal.distributions.quantiles import levels_and_values
from jaxcal.functional import linalg, student_scores, student_t
from jaxcal.functional.student_scores import Knots


class SmoothQuantiles(Distribution):
    """Predictions given by their quantiles at k levels, with a density everywhere.

    The predicted value is q(T), where T follows a standard Student t distribution. The function q is linear between
    knots. A knot lies at the quantile of T at a level, and q has there the predicted quantile at this level. Beyond the
    outermost levels the outermost lines continue, so that the tails are Student t tails. All methods are exact for this
    distribution. Distributions with the same levels can be averaged. The means of their values define a distribution
    whose quantiles are the means of their quantiles.

    Args:
        levels: [k], strictly increasing in (0, 1), the first below and the last above 1/2, the same for all rows.
        values: [n, k], the quantiles, finite, not decreasing along a row. Equal values are an atom, which the density
            omits. Where the outermost two values are equal, the distribution ends there, and has no tail.
        df: degrees of freedom, one number, more than 2.

    Raises:
        ValueError: if the number of columns of the values is not the number of levels, or the values decrease. Also if
            the levels do not increase strictly within (0, 1), 1/2 is not between them, or df is 2 or less.

    Example:
        >>> levels, z = np.array([0.1, 0.5, 0.9]), np.array([-1.3, 0.0, 2.6])
        >>> distribution = SmoothQuantiles(levels, np.array([[0.0], [10.0]]) + z, df=5.0)
        >>> print([f"{quantile:.1f}" for quantile in distribution.icdf(0.9)], f"{distribution.cdf(10.0)[1]:.2f}")
        ['2.6', '12.6'] 0.50
    """

    _shared: ClassVar = {"levels": 1, "df": 0, "_knots": 1}

    levels: Float[AnyArray, "*k"]
    values: Float[AnyArray, "*n k"]
    df: Float[AnyArray, "*r"]
    _knots: Knots

    def __init__(self, levels: Values, values: Values, df: Values = 4.0):
        self.levels, self.values = levels_and_values(levels, values)
        self.df = as_parameter(_checks.as_floats("df", df), self.values.dtype)
        check_increasing("values", self.values, strictly=False)
        if not _checks.is_traced(self.levels, self.df):
            known = np.asarray(self.levels)
            low, high, df = (float(each) for each in (known[0], known[-1], np.asarray(self.df)))
            if not low < 0.5 < high:
                raise ValueError(f"levels must have 1/2 between the first and the last; got {low:g} and {high:g}.")
            if not df > 2:
                raise ValueError(f"df must be more than 2; got {df:g}.")
        self._knots = student_scores.knots(self.levels, self.df)

    @property
    def _in_numpy(self) -> bool:
        """NumPy computes the methods of one run."""
        return self.levels.ndim == 1

    @property
    @numpy_or_jit(when=numpy_knows)
    def mean(self) -> Float[AnyArray, "*n"]:
        """The sum of the integrals of all lines."""
        line, center = self._lines, self._center
        mass, first = _like(line.start, self._knots.mass, self._knots.first)
        start = line.start - center[..., None]
        # The integral of (a + b (t - t0)) f(t) over a line, by its integrals of f(t) (mass) and t f(t) (first).
        return center + (start * mass + line.slope * (first - mass * line.at)).sum(-1)

    @property
    @numpy_or_jit(when=numpy_knows)
    def std(self) -> Float[AnyArray, "*n"]:
        """The root of the sum over all lines of the integral of the squared deviation from the mean."""
        line = self._lines
        mass, first, second = _like(line.start, self._knots.mass, self._knots.first, self._knots.second)
        deviation = line.start - self.mean[..., None] - line.slope * line.at  # of the line at u = 0
        unit = linalg.scale_of(deviation, line.slope, axis=-1)
        deviation, slope = deviation / unit, line.slope / unit
        # The integral of (d + b t)^2 f(t) = d^2 mass + 2 d b first + b^2 second, in units of their scale.
        squares = deviation**2 * mass + 2 * deviation * slope * first + slope**2 * second
        return unit[..., 0] * linalg.sqrt(squares.sum(-1))

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """F(u), where q(u) is y."""
        return student_t.cdf(_score(self.values, self._lines, match(y, self._center)).u, self._df)

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """log f(u) minus the log of the slope of q at u; -inf for a point."""
        score = _score(self.values, self._lines, match(y, self._center))
        xp, positive = namespace(score.u), score.slope > 0
        u = xp.where(positive, score.u, 0)
        log_density = student_t.log_prob(u, self._df, xp.zeros_like(u), xp.ones_like(u))
        return xp.where(positive, log_density - xp.log(xp.where(positive, score.slope, 1)), -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """E|Y - y| - E|Y - Y'| / 2, by integrals over the lines of the cdf F and of F (1 - F)."""
        y = match(y, self._center)
        line, knots = self._lines, self._knots
        score = _score(self.values, line, y)
        xp = namespace(y)
        # The integral of the cdf from -inf to y: up to the last knot below y (`until`), and from there to y (`rest`).
        below_line = xp.concatenate([xp.zeros_like(knots.below[..., :1]), knots.below], axis=-1)
        (parts,) = _like(self.values, xp.diff(below_line))
        until = xp.cumsum(line.slope[..., :-1] * parts, axis=-1)
        until = xp.concatenate([xp.zeros_like(until[..., :1]), until], axis=-1)
        began = _at(_like(until, below_line)[0], score.place)
        rest = xp.where(score.slope > 0, student_scores.integral_of_cdf(score.u, self._df) - began, 0)
        below = _at(until, score.place) + xp.where(score.slope > 0, score.slope * rest, xp.maximum(y - self._center, 0))
        (spread,) = _like(line.slope, knots.spread)
        # E|Y - y| is E Y - y plus twice the integral of F up to y. E|Y - Y'| / 2 is the integral of F (1 - F).
        return xp.where(abs(y) < np.inf, self.mean - y + 2 * below - (line.slope * spread).sum(-1), np.inf)

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The quantiles at checked levels. A level lies on the same line in all rows."""
        if self.levels.ndim > 1:
            return at_levels(self.quantile, levels, self._center)
        u = student_t.icdf(levels.astype(self.values.dtype), self.df)
        place = namespace(u).searchsorted(self._knots.t, u)
        return _on_line(_Segments(*(part[..., place] for part in self._lines)), u)

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """q at the Student t quantile of the level."""
        u = student_t.icdf(p, self._df)
        place = (_like(self.values, self._knots.t)[0] < u[..., None]).sum(-1)
        return _on_line(_Segments(*(_at(part, place) for part in self._lines)), u)

    @property
    def _df(self) -> Float[AnyArray, "*n"]:
        """The degrees of freedom of each row."""
        return namespace(self.df).broadcast_to(self.df[..., None], self.values.shape[:-1])

    @property
    def _center(self) -> Float[AnyArray, "*n"]:
        """A value in the middle of each row."""
        return self.values[..., self.values.shape[-1] // 2]

    @property
    def _lines(self) -> "_Segments":
        """The lines of q below, between and above the knots."""
        xp, t = namespace(self.values), self._knots.t
        first = np.maximum(np.arange(t.shape[-1] + 1) - 1, 0)  # the knot before each line; the first knot for line 0
        slope = xp.diff(self.values, axis=-1) / _like(self.values, xp.diff(t))[0]
        slope = xp.concatenate([slope[..., :1], slope, slope[..., -1:]], axis=-1)
        return _Segments(self.values[..., first], _like(slope, t[..., first])[0], slope)


class _Segments(NamedTuple):
    """Lines of q, one for each interval between knots: the value at a knot, the knot's place, and the slope."""

    start: Float[AnyArray, "..."]
    at: Float[AnyArray, "..."]
    slope: Float[AnyArray, "..."]


class _Places(NamedTuple):
    """The u at which q has the value of each row, the slope of q there, and the number of the line.

    Where the slope is 0, u is infinite.
    """

    u: Float[AnyArray, "*n"]
    slope: Float[AnyArray, "*n"]
    place: Int[AnyArray, "*n"]


def _score(values: Float[AnyArray, "*n k"], lines: _Segments, y: Float[AnyArray, "*n"]) -> _Places:
    """The u with q(u) = y, for the q through these values and on these lines."""
    xp = namespace(values)
    place = (values <= y[..., None]).sum(-1)
    start, at, slope = (_at(part, place) for part in lines)
    distance, positive = y - start, slope > 0
    beside = xp.where(distance < 0, xp.full_like(y, -np.inf), np.inf)
    return _Places(xp.where(positive, at + distance / xp.where(positive, slope, 1), beside), slope, place)


def _on_line(line: _Segments, u: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The values at u. A line with slope 0 has one value, also where u is infinite."""
    xp = namespace(line.start)
    return line.start + line.slope * xp.where(line.slope > 0, xp.broadcast_to(u, line.slope.shape) - line.at, 0)


def _like(rows: Float[AnyArray, "*n _"], *vectors: Float[AnyArray, "*r s"]) -> tuple[Float[AnyArray, "*n s"], ...]:
    """Vectors that all rows of a run share, repeated for each row."""
    xp = namespace(rows, *vectors)
    return tuple(xp.broadcast_to(each[..., None, :], (*rows.shape[:-1], each.shape[-1])) for each in vectors)


def _at(rows: Float[AnyArray, "*n s"], place: Int[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The number at its place in every row."""
    return namespace(rows).take_along_axis(rows, place[..., None], axis=-1)[..., 0]
