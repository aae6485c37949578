"""`Histogram`: distributions by masses between edges, for example from a model that classifies the target's bins."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, JaxArray, namespace, numpy_or_jit, special
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
from jaxcal.functional import linalg, normal

_TAILS = ("uniform", "half_normal")
# For larger tables a program needs less memory than NumPy.
_MOST = 2**21
# For |N| with N standard normal: its median, its mean, its variance, and the mean of the smaller of two such values.
_MEDIAN = 0.6744897501960817
_MEAN = math.sqrt(2 / math.pi)
_VARIANCE = 1 - 2 / math.pi
_SMALLER = (2 * math.sqrt(2) - 2) / math.sqrt(math.pi)
_LOG_2 = math.log(2)
# P(|N| > 40) is 0 in every dtype.
_FAR = 40.0


class Histogram(Distribution):
    """Predictions given by their masses in k bins, between k + 1 edges.

    Within a bin the density is constant. There are two kinds of tails:

    - tails="uniform": the density is 0 beyond the outermost edges, and the log density of a target there is -inf.
    - tails="half_normal": the outermost bins have no outer edge. Each is half of a normal distribution, which starts at
      the bin's inner edge and has half of its mass within the bin. So there is a density everywhere. This is the bar
      distribution with full support of TabPFN (Mueller et al., "Transformers Can Do Bayesian Inference", ICLR 2022).

    A bin without a width is an atom, which the density omits. All methods are exact for this distribution.

    Args:
        edges: [k + 1], the same for all rows, or [n, k + 1]; finite, not decreasing along a row.
        masses: [n, k], the probability of each bin, not negative; the sum of a row is 1.
        tails: "uniform", or "half_normal", which needs at least two bins.

    Raises:
        ValueError: if the edges have another shape, are not finite or decrease. Also if a mass is negative or not
            finite, the sum of a row is not 1, or tails is another word.

    Example:
        >>> distribution = Histogram(np.array([0.0, 1.0, 3.0]), np.array([[0.5, 0.5], [0.1, 0.9]]))
        >>> print(distribution.cdf(2.0), distribution.icdf(0.55))
        [0.75 0.55] [1.2 2. ]
    """

    edges: Float[AnyArray, "*n_k1"]
    masses: Float[AnyArray, "*n k"]
    tails: str = eqx.field(static=True)

    def __init__(self, edges: Values, masses: Values, tails: str = "uniform"):
        _checks.check_choice("tails", tails, _TAILS)
        masses = _checks.as_matrix("masses", masses)
        rows, bins = masses.shape
        if tails == "half_normal" and bins < 2:
            raise ValueError(f"tails='half_normal' needs two bins at least; masses have shape {masses.shape}.")
        if np.ndim(edges) < 2:
            edges = _checks.as_vector("edges", edges)
        else:
            edges = _checks.as_matrix("edges", edges, length=rows)
        if edges.shape[-1] != bins + 1:
            raise ValueError(
                f"edges must be one more than the bins: got shape {edges.shape} and masses of shape {masses.shape}."
            )
        self.edges, self.tails = as_parameter(edges, masses.dtype), tails
        check_increasing("edges", self.edges, strictly=False)
        _checks.check_not_negative("masses", masses)
        _check_sums(masses)
        self.masses = _with_sum_1(as_parameter(masses, masses.dtype))

    @property
    def is_continuous(self) -> bool:
        """Whether the tails are half normal, so that there is a density everywhere."""
        return self.tails == "half_normal"

    @property
    def _in_numpy(self) -> bool:
        """NumPy computes the methods of one run of up to 2^21 masses."""
        return self.masses.ndim == 2 and self.masses.size <= _MOST

    @property
    def _shared(self) -> Mapping[str, int]:
        """The edges, unless each row has its own. Edges and masses have the leading axes of runs in common."""
        return {"edges": 1} if self.edges.ndim < self.masses.ndim else {}

    @property
    @numpy_or_jit(when=numpy_knows)
    def mean(self) -> Float[AnyArray, "*n"]:
        """The sum of the bins' means, weighted by the masses."""
        bins, center = self._bins, self._center
        return center + (self.masses * (bins.mean - center[..., None])).sum(-1)

    @property
    @numpy_or_jit(when=numpy_knows)
    def std(self) -> Float[AnyArray, "*n"]:
        """The root of the variance within the bins plus the variance between their means."""
        bins = self._bins
        deviation, within = bins.mean - self.mean[..., None], bins.std
        unit = linalg.scale_of(deviation, within, axis=-1)
        # var = sum_k m_k ((mu_k - mu)^2 + s_k^2), in units of the scale of its terms.
        squares = self.masses * ((deviation / unit) ** 2 + (within / unit) ** 2)
        return unit[..., 0] * linalg.sqrt(squares.sum(-1))

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """The sum of the masses of the lower bins, plus the mass of y's bin below y."""
        y = match(y, self._center)
        bin_of_y = self._bin_of(y)
        xp, fraction = namespace(y, bin_of_y.mass), bin_of_y.fraction(y)
        if self.tails == "half_normal":
            beyond = 2 * special(y).ndtr(-bin_of_y.score(y))
            fraction = xp.where(bin_of_y.is_last, 1 - beyond, xp.where(bin_of_y.is_first, beyond, fraction))
        return xp.minimum(bin_of_y.below + bin_of_y.mass * fraction, 1)

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """The log of the mass of y's bin over its width, or of the tail's density; -inf where the mass is 0."""
        y = match(y, self._center)
        bin_of_y = self._bin_of(y)
        xp = namespace(y, bin_of_y.mass)
        log_density = -xp.log(bin_of_y.safe(bin_of_y.width))
        if self.tails == "half_normal":
            tail = _LOG_2 + normal.log_prob(bin_of_y.score(y), 0, 1) - xp.log(bin_of_y.safe(bin_of_y.scale))
            log_density = xp.where(bin_of_y.is_first | bin_of_y.is_last, tail, log_density)
            is_inside = xp.ones_like(y, dtype=bool)
        else:
            is_inside = (y >= self._edges[..., 0]) & (y <= self._edges[..., -1])
        is_there = is_inside & (bin_of_y.mass > 0) & (bin_of_y.width > 0)
        return xp.where(is_there, xp.log(xp.where(is_there, bin_of_y.mass, 1)) + log_density, -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """E|Y - y| - E|Y - Y'| / 2: the mean distances of all bins, minus the integrals of F (1 - F)."""
        y = match(y, self._center)
        xp, bins, mass, level = namespace(y, self.masses), self._bins, self.masses, self._levels
        is_finite = abs(y) < np.inf
        distance = bins.distance(xp.where(is_finite, y, self._center)[..., None])
        spread = level * (1 - level)
        # F (1 - F) is a parabola in a bin: the trapezoidal rule, plus its error m^2 / 6 for a bin of mass m.
        inside = bins.width * ((spread[..., :-1] + spread[..., 1:]) / 2 + mass**2 / 6)
        # 1 - F is m S in a tail of mass m. The integral of m S (1 - m S) is m E|N| - m^2 E min(|N|, |N'|).
        tail = bins.scale * mass * (_MEAN - mass * _SMALLER)
        return xp.where(is_finite, (mass * distance - xp.where(bins.is_tail, tail, inside)).sum(-1), np.inf)

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The quantiles at checked levels. The masses are summed once for all levels."""
        sums = self._levels
        return at_levels(lambda p: self._quantile(sums, p), levels, self._center)

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The lower edge of the level's bin, plus a part of its width; at levels 0 and 1 the outermost edges with mass.

        With half normal tails the quantile at such a level is infinite.
        """
        return self._quantile(self._levels, p)

    def _quantile(self, levels: Float[AnyArray, "*n k1"], p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The quantile, with the levels of the edges already computed."""
        inner = levels[..., 1:-1]
        bin_of_p = self._at(((inner < p[..., None]) | (inner <= 0)).sum(-1), levels)
        # The mass is a difference of levels, so that level 1 gives the end to the last digit.
        xp, mass = namespace(p, bin_of_p.mass), bin_of_p.above - bin_of_p.below
        has_mass = mass > 0
        mass = xp.where(has_mass, mass, 1)
        value = bin_of_p.start + bin_of_p.width * xp.clip((p - bin_of_p.below) / mass, 0, 1)
        if self.tails == "uniform":
            return value
        beyond = xp.clip(xp.where(bin_of_p.is_last, 1 - p, p) / mass, 0, 1)
        is_end = beyond <= 0
        score = xp.where(is_end, np.inf, -special(p).ndtri(xp.where(is_end, 1, beyond) / 2))
        distance = bin_of_p.scale * xp.where(bin_of_p.width > 0, score, 0)
        tail = xp.where(bin_of_p.is_last, bin_of_p.start + distance, bin_of_p.end - distance)
        return xp.where((bin_of_p.is_first | bin_of_p.is_last) & has_mass, tail, value)

    @property
    def _edges(self) -> Float[AnyArray, "*n k1"]:
        """The edges of each row."""
        edges = self.edges if not self._shared else self.edges[..., None, :]
        return namespace(edges).broadcast_to(edges, (*self.masses.shape[:-1], edges.shape[-1]))

    @property
    def _center(self) -> Float[AnyArray, "*n"]:
        """An edge in the middle of each row."""
        return self._edges[..., self.masses.shape[-1] // 2]

    @property
    def _levels(self) -> Float[AnyArray, "*n k1"]:
        """The cdf at the inner edges, with 0 and 1 at the ends."""
        xp = namespace(self.masses)
        sums = xp.cumsum(self.masses, axis=-1)
        sums = sums / sums[..., -1:]  # 1 at the last mass, whatever the rounding
        return xp.concatenate([xp.zeros_like(sums[..., :1]), sums], axis=-1)

    @property
    def _bins(self) -> "_Bins":
        """All bins."""
        edges, last = self._edges, self.masses.shape[-1] - 1
        number = np.arange(last + 1)
        is_first, is_last = number == 0, number == last
        if self.tails == "uniform":
            is_first = is_last = np.zeros(last + 1, bool)
        xp = namespace(edges)
        spread = lambda mask: xp.broadcast_to(xp.asarray(mask), self.masses.shape)
        return _Bins(edges[..., :-1], edges[..., 1:], spread(is_first), spread(is_last))

    def _bin_of(self, y: Float[AnyArray, "*n"]) -> "_BinOfRows":
        """The bin of each row's value. A value at an inner edge lies in the upper bin."""
        return self._at((self._edges[..., 1:-1] <= y[..., None]).sum(-1), self._levels)

    def _at(self, number: Int[AnyArray, "*n"], levels: Float[AnyArray, "*n k1"]) -> "_BinOfRows":
        """The bin of this number in each row, with the cdf at the edges."""
        take = lambda values, number: namespace(values).take_along_axis(values, number[..., None], axis=-1)[..., 0]
        last, edges = self.masses.shape[-1] - 1, self._edges
        return _BinOfRows(
            start=take(edges, number),
            end=take(edges, number + 1),
            below=take(levels, number),
            above=take(levels, number + 1),
            mass=take(self.masses, number),
            is_first=number == 0,
            is_last=number == last,
        )


class _Bins(NamedTuple):
    """Bins between edges, and which of them are tails."""

    start: Float[AnyArray, "..."]
    end: Float[AnyArray, "..."]
    is_first: Bool[AnyArray, "..."]
    is_last: Bool[AnyArray, "..."]

    @property
    def is_tail(self) -> Bool[AnyArray, "..."]:
        return self.is_first | self.is_last

    @property
    def width(self) -> Float[AnyArray, "..."]:
        return self.end - self.start

    @property
    def scale(self) -> Float[AnyArray, "..."]:
        """The scale of the normal distribution of a tail."""
        return self.width / _MEDIAN

    @property
    def mean(self) -> Float[AnyArray, "..."]:
        xp, middle, excess = namespace(self.start), self.start + self.width / 2, self.scale * _MEAN
        return xp.where(self.is_first, self.end - excess, xp.where(self.is_last, self.start + excess, middle))

    @property
    def std(self) -> Float[AnyArray, "..."]:
        xp = namespace(self.start)
        return xp.where(self.is_tail, self.scale * math.sqrt(_VARIANCE), self.width / math.sqrt(12))

    def distance(self, y: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The mean distance of a value from y.

        Let a uniform bin have the half width h, and y the distance d from its middle. Then the mean distance is
        (d^2 / h + h) / 2 if d < h, else d. For a tail, y is at z in units of |N|. The mean distance is E|N| - z before
        the tail's start, and z - E|N| + 2 E(|N| - z)+ after it.
        """
        xp = namespace(y, self.start)
        half = self.width / 2
        d = abs(y - (self.start + half))
        is_inside = d < half
        inner, ratio = xp.where(is_inside, d, 0), xp.where(is_inside, half, 1)
        uniform = xp.where(is_inside, (inner * (inner / ratio) + half) / 2, d)
        beyond = xp.where(self.is_first, self.end - y, y - self.start)
        z = xp.clip(beyond / xp.where(self.scale > 0, self.scale, 1), 0, _FAR)
        excess = 2 * (xp.exp(normal.log_prob(z, 0, 1)) - z * special(z).ndtr(-z))
        tail = xp.where(beyond > 0, beyond + self.scale * (2 * excess - _MEAN), self.scale * _MEAN - beyond)
        return xp.where(self.is_tail, tail, uniform)


class _BinOfRows(NamedTuple):
    """One bin of each row: its edges, the cdf there, its mass, and whether it is the first or the last."""

    start: Float[AnyArray, "*n"]
    end: Float[AnyArray, "*n"]
    below: Float[AnyArray, "*n"]
    above: Float[AnyArray, "*n"]
    mass: Float[AnyArray, "*n"]
    is_first: Bool[AnyArray, "*n"]
    is_last: Bool[AnyArray, "*n"]

    @property
    def width(self) -> Float[AnyArray, "*n"]:
        return self.end - self.start

    @property
    def scale(self) -> Float[AnyArray, "*n"]:
        """The scale of the normal distribution of a tail."""
        return self.width / _MEDIAN

    def safe(self, size: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """A size to divide by: 1 where the bin has no width."""
        return namespace(size).where(self.width > 0, size, 1)

    def fraction(self, y: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The fraction of a bin of constant density below y. For an atom it is 1 if y is not below it, else 0."""
        xp, part = namespace(y, self.start), (y - self.start) / self.safe(self.width)
        return xp.where(self.width > 0, xp.clip(part, 0, 1), (y >= self.start).astype(part.dtype))

    def score(self, y: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The distance of y from the inner edge of a tail, in units of the tail's scale; 0 in other bins."""
        xp = namespace(y, self.start)
        beyond = xp.where(self.is_last, y - self.start, self.end - y) / self.safe(self.scale)
        return xp.where(self.is_first | self.is_last, xp.where(self.width > 0, beyond, np.inf), 0)


def _check_sums(masses: Float[JaxArray, "n k"]) -> None:
    """Raise ValueError unless the known masses of every row sum to 1."""
    if _checks.is_traced(masses):
        return
    sums = np.asarray(masses).sum(axis=1)
    bad = np.flatnonzero(~(abs(sums - 1) < 1e-3))
    if bad.size:
        raise ValueError(f"the masses of a row must have the sum 1; got {sums[bad[0]]:g} in row {bad[0]}.")


@numpy_or_jit
def _with_sum_1(masses: Float[JaxArray, "n k"]) -> Float[JaxArray, "n k"]:
    """The masses divided by their sum, which differs from 1 by rounding."""
    return masses / masses.sum(-1, keepdims=True)
