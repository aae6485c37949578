"""Quantiles: of a sorted table, of a curve through knots, and of a cumulative distribution function.

Every function is written for one table, one curve or one distribution; batches come from `jax.vmap` outside.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxcal import _checks
from jaxcal._numpy import AnyArray, constant, namespace, numpy_or_jit
from jaxcal.functional import linalg
from jaxcal.functional._loops import scan, while_loop

RULES = ("inverse_cdf", "crude", "conformal", "symmetric")
# The rules that guarantee the coverage of a new exchangeable value; infinite where the table is too short for that.
CONFORMAL_RULES = ("conformal", "symmetric")


@numpy_or_jit
def empirical_quantile(
    table: Real[ArrayLike, " l"], p: Real[ArrayLike, "*n"], rule: str = "inverse_cdf"
) -> Float[AnyArray, "*n"]:
    """The quantile of a sorted table at level p: its k-th smallest value, where the rule sets the rank k.

    - "inverse_cdf": k = ceil(p L), the smallest value z with #{table <= z} / L >= p: the inverse of the
      empirical cdf. A new exchangeable value lies at or below it with probability k / (L + 1), which is
      less than p at high levels.
    - "crude": k = floor(p L) + 1, at most L: the 0-based entry int(p L) of CRUDE's Algorithm 1 (Zelikman et
      al. 2020). It is one rank above "inverse_cdf" where p L is an integer, and else the same.
    - "conformal": k = ceil((L + 1) p), which covers a new exchangeable value with probability k / (L + 1),
      never less than p. No finite value guarantees that below rank 1 or above rank L: these are -inf and +inf.
    - "symmetric": the quantile of a table of 2 L values -s_(L), ..., -s_(1), s_(1), ..., s_(L). It is
      sign(p - 1/2) s_(k) with the "conformal" rank k = ceil((L + 1) |2 p - 1|) among the s. It is 0 at p = 1/2. The
      central interval at level c is -+ s_(ceil((L + 1) c)), the split conformal interval.

    A product such as 0.29 x 100 = 28.999999999999996 counts as the integer it stands for. So levels of three
    decimals give the right ranks in every dtype up to a million rows. The exception is "symmetric", whose 2 p - 1
    loses digits in the middle. Its ranks are right up to a thousand rows, and up to a million rows from
    |2 p - 1| = 1/4 on.

    Args:
        table: [L] values in increasing order.
        p: levels in [0, 1], of any shape.
        rule: the rule for the rank, one of `RULES`.

    Returns:
        the quantiles, in the shape of p.

    Example:
        >>> table = jnp.arange(1.0, 101.0)
        >>> [int(empirical_quantile(table, 0.29, rule)) for rule in ("inverse_cdf", "crude", "conformal")]
        [29, 30, 30]
    """
    _checks.check_choice("rule", rule, RULES)
    xp, p = namespace(table, p), _checks.as_floats("p", p)
    values: AnyArray = xp.asarray(table)
    size = values.shape[0]
    if rule == "symmetric":
        distance = empirical_quantile(values[size // 2 :], xp.abs(2 * p - 1), "conformal")
        # At level 0 the conformal quantile is -inf.
        return xp.sign(2 * p - 1).astype(distance.dtype) * xp.maximum(distance, 0)
    return _entry(values, _rank(p, size, rule))


def empirical_rank(p: Real[ArrayLike, "*n"], size: int, rule: str = "inverse_cdf") -> Float[Array, "*n"]:
    """The rank k of `empirical_quantile`, from 1 to L; "conformal" from 0 to L + 1, at which the quantile is infinite.

    Args:
        p: levels in [0, 1], of any shape.
        size: the length L of the table.
        rule: "inverse_cdf", "crude" or "conformal".

    Returns:
        the ranks, in the shape of p: whole numbers in its dtype.

    Example:
        >>> print(empirical_rank(0.95, 20, "crude"), empirical_rank(0.99, 20, "conformal"))
        20.0 21.0
    """
    return _rank(_checks.as_floats("p", p), size, rule)


@numpy_or_jit
def _rank(p: Float[AnyArray, "*n"], size: int, rule: str) -> Float[AnyArray, "*n"]:
    """`empirical_rank` at checked levels; few known levels are not worth the compilation of a program."""
    xp = namespace(p)
    if rule == "conformal":
        return xp.ceil(_snapped(p * (size + 1), size))
    count = _snapped(p * size, size)
    return xp.clip(xp.floor(count) + 1 if rule == "crude" else xp.ceil(count), 1, size)


@numpy_or_jit
def outward_quantile(table: Real[ArrayLike, " l"], p: Real[ArrayLike, "*n"]) -> Float[AnyArray, "*n"]:
    """The "conformal" quantile of a sorted table, with ranks rounded away from the median.

    From the median on its rank is ceil((L + 1) p), and below the median its rank is floor((L + 1) p). So the quantiles
    at (1 -+ c) / 2 have the ranks L + 1 - k and k. A new exchangeable value lies between them with probability at least
    c.

    Args:
        table: [L] values in increasing order.
        p: levels in [0, 1], of any shape.

    Returns:
        the quantiles, in the shape of p; -inf at rank 0, +inf at rank L + 1.

    Example:
        >>> print(outward_quantile(jnp.arange(1.0, 31.0), jnp.array([0.05, 0.95])))
        [ 1. 30.]
    """
    xp, p = namespace(table, p), _checks.as_floats("p", p)
    values: AnyArray = xp.asarray(table)
    size, lower = values.shape[0], p < 0.5
    rank = _rank(xp.where(lower, 1 - p, p), size, "conformal")
    return _entry(values, xp.where(lower, size + 1 - rank, rank))


def entries(table: Float[ArrayLike, " l"], p: Real[ArrayLike, "*n"], rule: str) -> Float[AnyArray, "*n"]:
    """The quantiles of a sorted table by a rule; "conformal" gives `outward_quantile`.

    >>> print(entries(jnp.arange(1.0, 31.0), jnp.array([0.05, 0.95]), "conformal"))
    [ 1. 30.]
    """
    return outward_quantile(table, p) if rule == "conformal" else empirical_quantile(table, p, rule)


@jax.jit
def randomized_quantile(
    table: Float[ArrayLike, " l"], p: Real[ArrayLike, "*n"], tau: Real[ArrayLike, "*n"]
) -> Float[Array, "*n"]:
    """The quantile of a sorted table at level p, with a random rank whose mean is t = (L + 1) p.

    The rank is the smallest k with (k + tau) / (L + 1) >= p. So it is floor(t) + 1 where tau < t - floor(t), else
    floor(t). If tau is uniform on [0, 1), a new exchangeable value lies at or below the quantile with probability p, at
    every level. No finite value does below rank 1 or above rank L, where the quantiles are -inf and +inf. Quantiles
    with the same tau do not cross.

    Args:
        table: [L] values in increasing order.
        p: levels in [0, 1], of any shape.
        tau: random numbers in [0, 1) that choose the ranks, in the shape of p.

    Returns:
        the quantiles, in the shape of p.

    Source: Vovk et al., Conformal calibrators, COPA 2020.

    Example:
        >>> print(randomized_quantile(jnp.array([1.0, 2.0, 4.0]), jnp.full(3, 0.6), jnp.array([0.0, 0.3, 0.5])))
        [4. 4. 2.]
    """
    table, p = jnp.asarray(table), _checks.as_floats("p", p)
    position = _snapped(p * (table.shape[0] + 1), table.shape[0])
    below = jnp.floor(position)
    # The floor of a sum with tau would not do: the sum rounds up where tau is next to 1.
    return _entry(table, below + (jnp.asarray(tau) < position - below))


@numpy_or_jit
def jackknife_plus_quantile(
    centers: Float[AnyArray, " l"], widths: Float[AnyArray, " l"], p: Real[ArrayLike, "*k"]
) -> Float[AnyArray, "*k"]:
    """The quantile at level p of one prediction, with the central intervals of the jackknife+ and of CV+.

    Calibration row i has an error R_i of the model that was fitted without it. The centers c_i are the predictions of
    these models for the new row. The widths w_i are the errors R_i in units of the new row. Let
    k = ceil((L + 1) |2 p - 1|). For p > 1/2 the quantile is the k-th smallest of the c_i + w_i. For p < 1/2 it is the
    k-th largest of the c_i - w_i. So the central interval at level 1 - a goes from rank floor(a (L + 1)) to rank
    ceil((1 - a) (L + 1)). No finite value does at rank L + 1, where the quantiles are -inf and +inf.

    At low confidence levels these ends may cross. So the quantile at p = 1/2 is the median of the centers. For p > 1/2
    a quantile is at least this median, and for p < 1/2 it is at most this median. So quantiles increase with p, and
    intervals can only become wider.

    Args:
        centers: [L], in any order.
        widths: [L], not negative.
        p: levels in [0, 1], of any shape.

    Returns:
        the quantiles, in the shape of p.

    Source: Barber, Candes, Ramdas and Tibshirani, Predictive inference with the jackknife+, Annals of Statistics 49
    (2021): the intervals of its Theorems 1 and 4.

    Example:
        >>> centers, widths = jnp.array([0.0, 1.0, 0.0, 2.0]), jnp.array([1.0, 3.0, 2.0, 4.0])
        >>> print(jackknife_plus_quantile(centers, widths, jnp.array([0.2, 0.5, 0.8])))
        [-2.   0.5  4. ]
    """
    xp, p = namespace(centers, widths), _checks.as_floats("p", p)
    level, last = abs(2 * p - 1), centers.shape[0] - 1
    ordered = xp.sort(centers)
    median = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    # At level 0 the conformal quantile is -inf.
    above = xp.maximum(empirical_quantile(xp.sort(centers + widths), level, "conformal"), median)
    below = xp.minimum(-empirical_quantile(xp.sort(widths - centers), level, "conformal"), median)
    return xp.where(p < 0.5, below, above)


def smallest_table(p: float | np.floating) -> int:
    """The length L from which on the "conformal" quantile at level p < 1 is finite: ceil(p / (1 - p)).

    Example:
        >>> [smallest_table(level) for level in (0.5, 0.9, 0.95, 0.99)]
        [1, 9, 19, 99]
    """
    odds = float(p) / (1 - float(p))
    eps = float(np.finfo(np.asarray(p).dtype).eps)
    return math.ceil(odds - 2 * eps * (1 + odds) ** 2)


@numpy_or_jit
def linear_quantile(table: Float[ArrayLike, " l"], p: Real[ArrayLike, "*n"]) -> Float[AnyArray, "*n"]:
    """The quantile of a sorted table, the j-th smallest value at level j / (N + 1) and linear in between.

    With t = clip(p (N + 1), 1, N) and l = floor(t) it is a_(l) + (t - l) (a_(l+1) - a_(l)). A new
    exchangeable value lies at or below the j-th smallest value with probability j / (N + 1), which
    `jnp.quantile` ignores. The quantile is differentiable in the table and in p.

    Args:
        table: [N] values in increasing order.
        p: levels in [0, 1], of any shape.

    Returns:
        the quantiles, in the shape of p.

    Source: Capone, Hirche and Pleiss, NeurIPS 2023, eq. 6.

    Example:
        >>> print(linear_quantile(jnp.array([1.0, 2.0, 4.0]), jnp.array([0.0, 0.25, 0.625, 0.75])))
        [1. 1. 3. 4.]
    """
    values: AnyArray = namespace(table, p).asarray(table)
    low, high, fraction = linear_entries(values.shape[0], p, values.dtype)
    return values[low] + fraction * (values[high] - values[low])


def linear_entries(
    size: int, p: Real[ArrayLike, "*n"], dtype: DTypeLike
) -> tuple[Int[AnyArray, "*n"], Int[AnyArray, "*n"], Float[AnyArray, "*n"]]:
    """The places of the two entries around `linear_quantile`, and its fraction of the way from the first to the second.

    >>> low, high, fraction = linear_entries(3, np.array([0.25, 0.625]), float)
    >>> print(low, high, fraction)
    [0 1] [1 2] [0.  0.5]
    """
    xp = namespace(p)
    position = xp.multiply(p, size + 1).astype(dtype)
    position = xp.clip(linalg.snapped(position, _snapped(position, size)), 1, size)
    low = constant(xp.floor(position))
    place = low.astype(int) - 1
    return place, xp.minimum(place + 1, size - 1), position - low


@jax.jit
def smoothed_table(table: Float[ArrayLike, " l"], fraction: Real[ArrayLike, ""]) -> Float[Array, " l"]:
    """A sorted table whose every value becomes the mean of the values within floor(fraction L) ranks.

    Towards both ends the window shrinks symmetrically. The value of rank k becomes the mean of the values of the ranks
    k - r to k + r. Here r = min(floor(fraction L), k - 1, L - k). So the ends stay, the table stays sorted, and a table
    that is linear in the rank does not change.

    A quantile of the smoothed table has a derivative with respect to all values around it. So a gradient for training
    through this quantile depends on many values, not on one or two.

    Args:
        table: [L] values in increasing order.
        fraction: half the width of the window, as a fraction of the values, in (0, 1/2].

    Returns:
        the smoothed values [L], in increasing order.

    Source: a kernel quantile estimator, with a uniform kernel: Parzen, JASA 74 (1979). Stutz, Dvijotham, Cemgil and
    Doucet, Learning Optimal Conformal Classifiers, ICLR 2022, smooth quantiles for training through a calibration.

    Example:
        >>> print(smoothed_table(jnp.array([0.0, 1.0, 5.0, 6.0, 8.0]), 0.2).round(2))
        [0.   2.   4.   6.33 8.  ]
    """
    table = jnp.asarray(table)
    size = table.shape[0]
    ranks, most = jnp.arange(size), jnp.floor(_snapped(jnp.asarray(fraction, table.dtype) * size, size)).astype(int)
    reach = jnp.minimum(jnp.minimum(ranks, size - 1 - ranks), most)
    center = jax.lax.stop_gradient(table.mean())
    sums = jnp.concatenate([jnp.zeros_like(table[:1]), jnp.cumsum(table - center)])
    means = center + (sums[ranks + reach + 1] - sums[ranks - reach]) / (2 * reach + 1).astype(table.dtype)
    # Rounding must not put two means out of order, or one mean beyond the ends.
    return linalg.snapped(means, jnp.clip(jax.lax.cummax(jax.lax.stop_gradient(means)), table[0], table[-1]))


def weighted_quantile(
    values: Real[ArrayLike, " m *n"], weights: Real[ArrayLike, " m"], p: Real[ArrayLike, "*#n"]
) -> Float[AnyArray, "*n"]:
    """The smallest of m weighted values at or below which lies a fraction of at least p, in every column.

    Args:
        values: [m, n], in any order.
        weights: [m], not negative, with sum 1.
        p: levels in [0, 1], [n] or one for all columns.

    Returns:
        the quantiles [n], each one of the values.

    Example:
        >>> print(weighted_quantile(jnp.array([[3.0], [1.0], [2.0]]), jnp.array([0.25, 0.5, 0.25]), 0.6))
        [2.]
    """
    xp: Any = namespace(values, weights, p)
    columns = xp.asarray(values)
    order = xp.argsort(columns, axis=0, stable=True)
    fraction = xp.cumsum(xp.asarray(weights)[order], axis=0)
    # Sums such as 0.1 + 0.2 and levels such as 0.3 differ by rounding only.
    tolerance = 2 * columns.shape[0] * float(jnp.finfo(fraction.dtype).eps)
    reached = fraction >= xp.broadcast_to(p, fraction.shape[1:])[None] - tolerance
    reached = xp.concatenate([reached[:-1], xp.ones_like(reached[-1:])])
    first = xp.argmax(reached, axis=0, keepdims=True)
    return xp.take_along_axis(columns, xp.take_along_axis(order, first, axis=0), axis=0)[0]


def replace_in_sorted(
    table: Float[Array, " l"], old: Float[ArrayLike, ""], new: Float[ArrayLike, ""]
) -> Float[Array, " l"]:
    """A sorted table with one of its values replaced by another one, sorted again in O(L).

    Args:
        table: [L] values in increasing order.
        old: a value of the table.
        new: the value that takes its place.

    Example:
        >>> print(replace_in_sorted(jnp.array([1.0, 2.0, 4.0, 8.0]), 2.0, 5.0))
        [1. 4. 5. 8.]
    """
    old, new = jnp.asarray(old, table.dtype), jnp.asarray(new, table.dtype)
    places = jnp.arange(table.shape[0])
    gap = jnp.sum(table < old)
    place = jnp.sum(table < new) - (old < new)
    down, up = jnp.roll(table, -1), jnp.roll(table, 1)
    moved = jnp.where((gap <= places) & (places < place), down, table)
    moved = jnp.where((place < places) & (places <= gap), up, moved)
    return jnp.where(places == place, new, moved)


def interpolate_monotone(
    x: Real[ArrayLike, "*n"], xp: Real[ArrayLike, " k"], fp: Real[ArrayLike, " k"]
) -> Float[AnyArray, "*n"]:
    """A non-decreasing piecewise-linear curve through knots, constant beyond the first and the last.

    Where knots are repeated, the curve jumps and takes the value of the last of them (as a cdf does). It is
    differentiable in x and in the knots wherever it is smooth. Its derivatives are finite everywhere. At a knot they
    are the derivatives of the piece to the right.

    Args:
        x: the points, of any shape.
        xp: [k] positions of at least two knots, non-decreasing.
        fp: [k] values at the knots, non-decreasing.

    Returns:
        the values of the curve, in the shape of x.

    Example:
        >>> knots, values = jnp.array([0.0, 1.0, 1.0, 2.0]), jnp.array([0.0, 1.0, 3.0, 4.0])
        >>> print(interpolate_monotone(jnp.array([-1.0, 0.5, 1.0, 1.5, 9.0]), knots, values))
        [0.  0.5 3.  3.5 4. ]
    """
    library: Any = namespace(x, xp, fp)
    at, knots, values = (library.asarray(each) for each in (x, xp, fp))
    right = library.clip(library.searchsorted(knots, at, side="right"), 1, knots.shape[0] - 1)
    start, end = knots[right - 1], knots[right]
    inside = (at >= start) & (at < end)
    fraction = library.where(inside, (at - start) / library.where(inside, end - start, 1), 0)
    return library.where(at < end, values[right - 1] + fraction * (values[right] - values[right - 1]), values[right])


def invert_cdf(
    cdf: Callable[[AnyArray], AnyArray],
    p: Float[AnyArray, "*n"],
    lower: Float[AnyArray, "*n"],
    upper: Float[AnyArray, "*n"],
    density: Callable[[AnyArray], AnyArray] | None = None,
) -> Float[AnyArray, "*n"]:
    """The smallest y in [lower, upper] with cdf(y) >= p, elementwise, by a bracketing search.

    The search needs no density and copes with jumps and flat pieces. The quantile has derivatives with respect to p
    and to the parameters of the cdf. They are derivatives of the implicit function: dy = (dp - d cdf) / density.
    They are 0 where the density is 0.

    Args:
        cdf: a non-decreasing function, elementwise.
        p: the levels [n].
        lower: [n], with cdf <= p.
        upper: [n], with cdf >= p. Where an end of the bracket is infinite it is the answer (`lower` for
            p < 1/2, else `upper`).
        density: the derivative of the cdf. NumPy's arrays need it for the last step; JAX differentiates the cdf.

    Returns:
        the quantiles [n]. They are exact to rounding where the cdf is smooth. At a jump they lie above it, by less
        than eps^(2/3) of the bracket's width.

    Source: Chandrupatla, Advances in Engineering Software 28 (1997), and one Newton step at the end.

    Example:
        >>> root = invert_cdf(lambda y: y**3, jnp.array(0.125), jnp.array(0.0), jnp.array(1.0))
        >>> print(f"{root:.4f}")
        0.5000
    """
    xp, lower, upper = namespace(p, lower, upper), constant(lower), constant(upper)
    bounded = xp.isfinite(lower) & xp.isfinite(upper)
    start, end = xp.where(bounded, lower, 0), xp.where(bounded, upper, 0)

    def search(excess: Callable[[AnyArray], AnyArray], start: AnyArray) -> AnyArray:
        low, high = _chandrupatla(excess, start, end)
        if xp is np and density:
            value, slope = excess(high), density(high)
        else:
            value, slope = jax.jvp(excess, (high,), (jnp.ones_like(high),))
        correction = value / xp.where(slope > 0, slope, np.inf)
        return xp.where(correction <= 2 * (high - low), high - correction, high)

    excess = lambda y: cdf(y) - p
    root = search(excess, start) if xp is np else jax.lax.custom_root(excess, start, search, _divide_by_slope)
    return xp.where(bounded, root, xp.where(p < 0.5, lower, upper))


def last_place(holds: Callable[[AnyArray], AnyArray], start: AnyArray, end: ArrayLike, length: int) -> AnyArray:
    """The last places from `start` to `end` up to which a condition holds, by binary search.

    Args:
        holds: whether the condition holds at each of an array of places. It holds at the start.
        start: the first places.
        end: the last places, each at most `length` after its start.
        length: a bound on the distances.

    Example:
        >>> table = jnp.array([1.0, 3.0, 3.0, 8.0])
        >>> print(last_place(lambda place: table[place] <= 3, jnp.array([0, 1]), 3, 4))
        [2 2]
    """
    xp = namespace(start)

    def halve(lower: AnyArray, width: AnyArray) -> tuple[AnyArray, None]:
        probe = xp.minimum(lower + width, end)
        return xp.where(holds(probe), probe, lower), None

    steps = range(length.bit_length() - 1, -1, -1)
    return scan(halve, start, np.array([1 << step for step in steps], np.int32))[0]


def _entry(table: AnyArray, rank: AnyArray) -> AnyArray:
    """The values of these ranks, from 1 to L: -inf below and +inf above."""
    xp, size = namespace(table, rank), table.shape[0]
    value = table[xp.clip(xp.where(xp.isnan(rank), size, rank), 1, size).astype(int) - 1]
    # A table of integers gives floats, as quantiles may be infinite.
    dtype = table.dtype if np.issubdtype(table.dtype, np.inexact) else rank.dtype
    return xp.where(rank < 1, -np.inf, xp.where(rank > size, np.inf, value)).astype(dtype)


def _snapped(count: AnyArray, size: int) -> AnyArray:
    """`count`, or the nearest integer where they differ only by the rounding of p or of 1 - p."""
    xp, eps = namespace(count), float(jnp.finfo(count.dtype).eps)
    tolerance = xp.minimum(eps * (4 * count + min(size, 1000)), 0.25)
    nearest = xp.round(count)
    return xp.where(xp.abs(count - nearest) <= tolerance, nearest, count)


def _chandrupatla(
    excess: Callable[[AnyArray], AnyArray], lower: AnyArray, upper: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """A narrow bracket of the root of an increasing function: its ends (low, high), excess(high) >= 0.

    It is wide enough that rounding does not affect the search. After one Newton step from it, the error is rounding.
    """
    xp, info = namespace(lower, upper), jnp.finfo(lower.dtype)
    eps, tiny = float(info.eps), float(info.tiny)
    tolerance = eps ** (2 / 3) * (upper - lower) + 4 * eps * xp.maximum(xp.abs(lower), xp.abs(upper))
    most_steps = 200  # many more than it takes: a guard against functions that do not increase

    def is_open(a: AnyArray, b: AnyArray) -> AnyArray:
        return xp.abs(b - a) > tolerance

    def step(state: tuple[AnyArray, ...]) -> tuple[AnyArray, ...]:
        count, *old = state
        a, b, fa, fb, fraction = old
        x = a + fraction * (b - a)
        fx = excess(x)
        # The new bracket is [x, b]; c is the point that it no longer contains.
        same = (fx >= 0) == (fa >= 0)
        b, c = xp.where(same, b, a), xp.where(same, a, b)
        fb, fc = xp.where(same, fb, fa), xp.where(same, fa, fb)
        # Inverse quadratic interpolation where it is safe, else bisection.
        xi, phi = (x - b) / (c - b), (fx - fb) / (fc - fb)
        inverse = fx / (fb - fx) * fc / (fb - fc) + (c - x) / (b - x) * fx / (fc - fx) * fb / (fc - fb)
        fraction = xp.where((phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi), inverse, 0.5)
        margin = xp.minimum(tolerance / xp.abs(b - x) / 2, 0.5)
        new = (x, b, fx, fb, xp.clip(fraction, margin, 1 - margin))
        going = is_open(*old[:2])
        return (count + 1, *(xp.where(going, after, before) for after, before in zip(new, old, strict=True)))

    def unfinished(state: tuple[AnyArray, ...]) -> AnyArray:
        return xp.any(is_open(*state[1:3])) & (state[0] < most_steps)

    # Neither rounding nor a jump at an end may undo the signs at the ends.
    at_lower, at_upper = xp.minimum(excess(lower), -tiny), xp.maximum(excess(upper), 0)
    state = (xp.zeros((), int), lower, upper, at_lower, at_upper, xp.full_like(lower, 0.5))
    _, a, b, fa, *_ = while_loop(unfinished, step, state)
    return xp.where(fa >= 0, b, a), xp.where(fa >= 0, a, b)


def _divide_by_slope(linear: Callable[[Array], Array], values: Array) -> Array:
    """Solve linear(x) = values, elementwise; 0 where the slope is 0."""
    slope = linear(jnp.ones_like(values))
    return jnp.where(slope > 0, values / jnp.where(slope > 0, slope, 1), 0)


def unit_gauss_legendre(points: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return (nodes + 1) / 2, weights / 2
