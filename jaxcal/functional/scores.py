"""Scores of predictive distributions, as pure functions.

The proper scores take `(y, parameters...)` and give one value a row. All are negatively oriented (the less the
better), except the log densities. The continuous ranked probability score, CRPS(F, y) = integral of
(F(t) - 1{y <= t})^2 dt, is in the unit of y. The reliability score and the loss of ACCRUE judge all rows together.
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from statistics import NormalDist
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import normal
from jaxcal.functional._loops import scan
from jaxcal.functional.linalg import fractions_of, root_sum_squares, weighted_mean
from jaxcal.functional.normal import SQRT_PI, PerRow
from jaxcal.functional.quantiles import unit_gauss_legendre

P = ParamSpec("P")
T = TypeVar("T")

# Half the mean distance of two independent values of N(0, 1/2).
_HALF_MEAN_DIFFERENCE = 1 / math.sqrt(2 * math.pi)
# The least CRPS of a normal distribution around an error of 1, over all stds.
_LEAST_CRPS = math.erf(math.sqrt(math.log(4)) / 2)
# The number of rows whose distances to all others are held at once.
_ROWS_AT_ONCE = 256


@numpy_or_jit
def normal_mixture_crps(
    y: Real[ArrayLike, "*n"],
    means: Real[ArrayLike, " m *n"],
    stds: Real[ArrayLike, " m *n"],
    weights: Real[ArrayLike, " m"],
) -> Float[AnyArray, "*n"]:
    """CRPS of a mixture of m normal distributions, with A(d, s) = E|N(d, s^2)|.

    sum_i w_i A(y - mean_i, std_i) - 1/2 sum_ij w_i w_j A(mean_i - mean_j, sqrt(std_i^2 + std_j^2)).
    It takes O(m^2 n) operations, one member at a time, in the memory of the arguments. Members with std 0 are
    point masses.

    Args:
        y: outcomes [n].
        means: means [m, n], one row a member.
        stds: standard deviations [m, n], not negative.
        weights: [m], not negative, with sum 1.

    Returns:
        the score of every row, in the unit of y.

    Source: Grimit, Gneiting, Berrocal and Johnson, QJRMS 132 (2006).

    Example:
        >>> means, stds, weights = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1)), jnp.array([0.5, 0.5])
        >>> print(f"{normal_mixture_crps(jnp.array([0.0]), means, stds, weights)[0]:.3f}")
        0.359
    """
    xp: Any = namespace(y, means, stds, weights)
    outcomes, locs, scales, fractions = map(xp.asarray, (y, means, stds, weights))
    columns = xp.expand_dims(fractions, tuple(range(1, locs.ndim)))

    def add_member(total: AnyArray, member: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[AnyArray, None]:
        mean, std, weight = member
        between = normal.mean_abs(locs - mean[None], root_sum_squares(scales, std[None]))
        return total + weight * (normal.mean_abs(outcomes - mean, std) - 0.5 * (columns * between).sum(0)), None

    # A gradient needs no [m, m, n] array either.
    return scan(add_member, xp.zeros_like(outcomes + locs[0]), (locs, scales, fractions), again=True)[0]


@numpy_or_jit
def empirical_crps(u: Real[ArrayLike, "*n"], table: Real[ArrayLike, " l"]) -> Float[AnyArray, "*n"]:
    """CRPS of the distribution that is uniform on the values of a sorted table: E|u - Z| - E|Z - Z'| / 2.

    It takes O(L + n log L) operations: prefix sums of the table, centered first so that float32 suffices.

    Args:
        u: outcomes, of any shape.
        table: [L] values in increasing order; ties are allowed.

    Returns:
        the scores, in the shape and the unit of u.

    Source: Jordan, Krueger and Lerch, Journal of Statistical Software 90 (2019).

    Example:
        >>> print(empirical_crps(jnp.array([0.0, 1.0]), jnp.array([0.0, 2.0])))
        [0.5 0.5]
    """
    xp = namespace(u, table)
    values: AnyArray = xp.asarray(table)
    outcomes: AnyArray = xp.asarray(u)
    dtype = np.result_type(outcomes.dtype, values.dtype)
    if xp is np:
        values = values.astype(float)  # NumPy's prefix sums of 32 bits would round
    size, center = values.shape[0], values.mean()
    z, v = values - center, outcomes - center
    sums = xp.concatenate([xp.zeros_like(z[:1]), xp.cumsum(z)]) / size
    below = xp.searchsorted(values, outcomes, side="right")
    # E|u - Z| = v (2 F(u) - 1) + mean z - 2 sum_{z <= v} z / L. E|Z - Z'| / 2 = sum_i z_i (2 i - 1 - L) / L^2.
    # Integers are cast first: an int32 over a number is a float32, whatever the dtype of the table.
    distance = (2 * below.astype(z.dtype) / size - 1) * v + sums[-1] - 2 * sums[below]
    spread = (z * ((2 * xp.arange(size, dtype=z.dtype) + 1) / size - 1)).sum() / size
    score = distance - spread
    return score.astype(dtype) if np.issubdtype(dtype, np.floating) else score


@jax.jit
def quantile_crps(
    y: Real[ArrayLike, ""], levels: Real[ArrayLike, " k"], values: Real[ArrayLike, " k"]
) -> Float[Array, ""]:
    """CRPS of the distribution whose quantile function is piecewise linear through knots and constant beyond them.

    It is twice the integral of the pinball loss over the level, exact on every piece. Constant pieces are atoms,
    and so are the two ends (with the masses levels[0] and 1 - levels[-1]).

    Args:
        y: one outcome.
        levels: [k] increasing levels in (0, 1).
        values: [k] non-decreasing quantiles.

    Returns:
        the score, in the unit of y.

    Example:
        >>> print(f"{quantile_crps(1.0, jnp.array([0.25, 0.75]), jnp.array([0.0, 2.0])):.4f}")
        0.2917
    """
    levels, values = jnp.asarray(levels), jnp.asarray(values)
    p, q = jnp.pad(levels, 1, constant_values=(0, 1)), jnp.pad(values, 1, mode="edge")
    start, rise, first, step = q[:-1] - y, jnp.diff(q), p[:-1], jnp.diff(p)
    # On a piece, with s in [0, 1]: q - y = start + rise s, p = first + step s. There q passes y at s = fraction.
    inside = (start < 0) & (start + rise > 0)
    fraction = jnp.where(inside, -start / jnp.where(inside, rise, 1), start + rise <= 0)
    below = _integral_of_product(start, rise, first, step, fraction)
    above = [_integral_of_product(start, rise, 1 - first, -step, s) for s in (fraction, 1.0)]
    return 2 * (step * (above[1] - above[0] - below)).sum()


def mixture_crps(
    y: Float[AnyArray, "*n"],
    weights: Float[AnyArray, " m"],
    crps: Callable[[AnyArray], AnyArray],
    icdf: Callable[[AnyArray], AnyArray],
) -> Float[AnyArray, "*n"]:
    """CRPS of a mixture of m distributions of any kind, from their scores and quantile functions.

    It is sum_i w_i crps_i(y) - 1/2 sum_ij w_i w_j D_ij, where D_ij is the integral of (F_i - F_j)^2. D_ij is also
    E[crps_i(X_j) - crps_j(X_j)] for X_j from distribution j. A Gauss-Legendre rule of 24 points computes this mean over
    the levels of X_j. The levels p = v^3 (10 - 15 v + 6 v^2) crowd at both ends. In each pair the narrower distribution
    is j, because the score of the other distribution is smooth there.

    The relative error in float64 is:

    - below 1e-7 for normal members of any scales.
    - below 1e-4 for Student t members down to df = 1.2.
    - within 1e-2 for members with 30 or more atoms or kinks.

    Args:
        y: outcomes [n].
        weights: [m], not negative, with sum 1.
        crps: the scores of all members: outcomes [n] -> [m, n].
        icdf: the quantiles of all members, elementwise: levels [n] -> [m, n].

    Returns:
        the score of every row, in the unit of y.

    Source: it follows from the kernel form of the score, E|X - y| - E|X - X'| / 2; Gneiting and Raftery, JASA
    102 (2007), eq. 21.

    Example:
        >>> means = jnp.array([[-1.0], [1.0]])
        >>> crps = lambda y: normal.crps(y[None], means, 1.0)
        >>> icdf = lambda p: means + jax.scipy.special.ndtri(p)[None]
        >>> print(f"{mixture_crps(jnp.array([0.0]), jnp.array([0.5, 0.5]), crps, icdf)[0]:.3f}")
        0.359
    """
    xp = namespace(y, weights)
    each = lambda function, arrays: scan(lambda state, array: (state, function(array)), xp.zeros(()), arrays)[1]
    fractions = xp.expand_dims(weights, tuple(range(1, 1 + y.ndim)))
    quartiles = each(lambda level: icdf(xp.full_like(y, level)), xp.asarray([0.25, 0.75], y.dtype))
    spread = quartiles[1] - quartiles[0]
    # [j, i]: 2 where distribution j is the narrower one, 0 where it is the wider one, 1 where both are equally wide.
    order = 1 + xp.sign(spread[None] - spread[:, None])
    pairs = 0.5 * order * fractions[:, None] * fractions[None]

    def add_point(total: AnyArray, point: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, None]:
        level, weight = point
        members = icdf(xp.full_like(y, level))
        at_members = each(crps, members)
        own = xp.moveaxis(xp.diagonal(at_members), -1, 0)
        return total + weight * (pairs * (at_members - own[:, None])).sum((0, 1)), None

    v, weights = (xp.asarray(part, y.dtype) for part in unit_gauss_legendre(24))
    levels = xp.minimum(v**3 * (10 - 15 * v + 6 * v**2), 1 - float(jnp.finfo(y.dtype).epsneg))
    points = (levels, weights * 30 * v**2 * (1 - v) ** 2)
    diversity = scan(add_point, xp.zeros_like(y), points, again=True)[0]
    return (fractions * crps(y)).sum(0) - diversity


@jax.jit
def pinball(y: PerRow, quantile: PerRow, level: PerRow) -> Float[Array, "*n"]:
    """Pinball (quantile) loss of a predicted quantile: (level - 1{y < quantile}) (y - quantile).

    Args:
        y: outcomes [n].
        quantile: predicted quantiles [n].
        level: the level in (0, 1), one for all rows or [n].

    Returns:
        the loss of every row, in the unit of y.

    Source: Koenker and Bassett, Econometrica 46 (1978).

    Example:
        >>> print(pinball(jnp.array([0.0, 3.0]), 1.0, 0.75))
        [0.25 1.5 ]
    """
    error = jnp.subtract(y, quantile)
    return jnp.maximum(level * error, jnp.subtract(level, 1) * error)


@numpy_or_jit
def interval_score(
    y: PerRow, lower: PerRow, upper: PerRow, confidence_level: Real[ArrayLike, ""]
) -> Float[AnyArray, "*n"]:
    """Interval (Winkler) score: the width plus 2 / (1 - confidence_level) times the distance of y from the interval.

    Args:
        y: outcomes [n].
        lower: lower ends [n] of the central intervals.
        upper: upper ends [n].
        confidence_level: the intended coverage of the intervals, in (0, 1).

    Returns:
        the score of every row, in the unit of y.

    Source: Gneiting and Raftery, JASA 102 (2007), eq. 43, with alpha = 1 - confidence_level.

    Example:
        >>> print(interval_score(jnp.array([0.5, 2.0]), 0.0, 1.0, 0.5))
        [1. 5.]
    """
    xp = namespace(y, lower, upper)
    miss = xp.maximum(xp.subtract(lower, y), 0) + xp.maximum(xp.subtract(y, upper), 0)
    return xp.subtract(upper, lower) + 2 / (1 - confidence_level) * miss


def _checks_weights(compiled: Callable[P, T]) -> Callable[P, T]:
    """The function, after its keyword `weights` is checked where the values are known."""

    @wraps(compiled)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        weights: Any = options.get("weights")
        if weights is not None and not _checks.is_traced(weights):
            known = np.asarray(weights)
            if not (np.isfinite(known) & (known >= 0)).all() or not known.any():
                raise ValueError(
                    f"weights must not be negative, and not all zero; got {known.min():g} to {known.max():g}."
                )
        return compiled(*args, **options)

    return checked


@_checks_weights
@partial(jax.jit, static_argnames=("crps", "unbiased"))
def reliability_score(
    errors: Real[ArrayLike, " n"],
    std: Real[ArrayLike, "*#n"],
    *,
    weights: Real[ArrayLike, " n"] | None = None,
    crps: Callable[[Array], Array] | None = None,
    unbiased: bool = False,
    smoothing: Real[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """How far the distribution of the standardized errors is from the standard normal distribution.

    RS = integral of (Phi(t) - C(t))^2 dt / sqrt(2), where C is the empirical cdf of z = errors / std. Let D be the mean
    of |z_i - z_j| over all pairs. In closed form, RS = (mean CRPS(Phi, z_i) - D / 2) / sqrt(2). This is half an energy
    distance, whose second term takes one sort. It is never negative. For n calibrated errors its mean is 0.3989 / n.

    Ties need no care, in the value or in the derivative. At a tie the derivative is the limit of central differences.
    A second derivative is valid between ties: the first derivative jumps where two standardized errors change places.

    Args:
        errors: y - mean [n].
        std: predicted standard deviations [n], positive, or one number. Where one is 0 and its error is not, the
            score is infinite.
        weights: of the rows [n], not negative and not all zero; equal where None.
        crps: for another location-scale family, the CRPS of its standard distribution at z: a function [n] -> [n]. Then
            `std` is the scale of the family, and its standard cdf replaces Phi.
        unbiased: whether D is the mean over pairs of different rows, for minibatches. Then the mean over random
            batches is the score of all rows, whatever the size of a batch. The plain score of m rows is larger: for
            calibrated rows by 0.3989 / m in the mean. Calibrated errors then have a mean score of 0, so a score may be
            negative.
        smoothing: a length s > 0, in standardized errors. Then sqrt(d^2 + s^2) - s replaces every distance
            d = |z_i - z_j|, and the first derivative has no jumps. It takes O(n^2) time.

    Returns:
        the score, without a unit.

    Raises:
        ValueError: if a known weight is negative, or all are zero.

    Source: Camporeale and Carè (2021), eq. 6 and 8; the form by pairs: Székely and Rizzo (2005).

    Example:
        >>> z = jax.scipy.special.ndtri((jnp.arange(100) + 0.5) / 100)
        >>> print(f"{reliability_score(z, 1.0):.5f}, with half the std {reliability_score(z, 0.5):.3f}")
        0.00004, with half the std 0.065
    """
    errors, std = jnp.broadcast_arrays(errors, std)
    positive = std > 0
    z = jnp.where(positive, errors / jnp.where(positive, std, 1), 0)
    fractions = jnp.full(z.shape, 1 / z.size, z.dtype) if weights is None else fractions_of(weights, z.dtype)
    halves = _half_distances(z, fractions) if smoothing is None else _smoothed_halves(z, fractions, smoothing)
    if unbiased:
        halves = halves / (1 - jnp.sum(fractions**2))
    gaps = (normal.crps(z, 0.0, 1.0) if crps is None else crps(z)) - halves
    score = jnp.sum(fractions * gaps) / math.sqrt(2)
    return jnp.where(jnp.any(~positive & (errors != 0)), jnp.inf, score)


def min_reliability_score(num_rows: int) -> Float[Array, ""]:
    """The least reliability score that n errors can have: the score of the normal quantiles at (2 i - 1) / (2 n).

    Source: Camporeale and Carè (2021), eq. 13.

    Example:
        >>> print(f"{min_reliability_score(100):.1e}")
        3.7e-05
    """
    return jnp.asarray(_mean_density_of_quantiles(num_rows) - _HALF_MEAN_DIFFERENCE)


@_checks_weights
@numpy_or_jit
def accrue_beta(errors: Real[ArrayLike, " n"], *, weights: Real[ArrayLike, " n"] | None = None) -> Float[AnyArray, ""]:
    """The weight beta of ACCRUE's two scores that brings their least values to one size.

    It is beta = m / (c + m). Here c = 0.594904 mean |error| is the least mean CRPS, at std = |error| / sqrt(log 2) in
    every row. The number m = RS_min + 0.3989 omits the negative constant of RS_min, as in the authors' practice. With
    the constant, beta would be nearly 0. The CRPS has the unit of the errors, and the reliability score has no unit. So
    give the errors in units of the target's standard deviation.

    Args:
        errors: y - mean [n].
        weights: of the rows [n], not negative and not all zero; equal where None.

    Source: Camporeale and Carè (2021), eq. 12 and 13; the paper prints the factor 0.5887, and errors with their sign.

    Example:
        >>> print(f"{accrue_beta(jnp.array([-1.0, 0.5, 0.0, 2.0])):.3f}")
        0.443
    """
    sizes: AnyArray = abs(namespace(errors).asarray(errors))
    most = _mean_density_of_quantiles(sizes.size)
    return most / (_LEAST_CRPS * weighted_mean(sizes, weights) + most)


@_checks_weights
@partial(jax.jit, static_argnames="unbiased")
def accrue_loss(
    errors: Real[ArrayLike, " n"],
    std: Real[ArrayLike, "*#n"],
    beta: Real[ArrayLike, ""],
    *,
    weights: Real[ArrayLike, " n"] | None = None,
    unbiased: bool = False,
    smoothing: Real[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """ACCRUE's loss: beta times the mean CRPS of normal distributions plus 1 - beta times their reliability score.

    Args:
        errors: y - mean [n], in units of the target's standard deviation, see `accrue_beta`.
        std: standard deviations [n] in the same unit, positive, or one number.
        beta: the weight of accuracy, in [0, 1]; 1 is the CRPS alone.
        weights: of the rows [n], not negative and not all zero; equal where None.
        unbiased: for minibatches, see `reliability_score`.
        smoothing: of the reliability score.

    Source: Camporeale and Carè (2021), eq. 11.

    Example:
        >>> errors = jnp.array([-1.0, 0.5, 0.0, 2.0])
        >>> print(f"{accrue_loss(errors, 1.0, accrue_beta(errors)):.3f}")
        0.314
    """
    crps = normal.crps(errors, 0.0, std)
    score = reliability_score(errors, std, weights=weights, unbiased=unbiased, smoothing=smoothing)
    return beta * weighted_mean(crps, weights) + (1 - beta) * score


def least_mean_of_runs(
    values: Float[Array, " n"], shortest: int
) -> tuple[Float[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """The least mean of at least `shortest` consecutive values: the mean, the first place, the number of values.

    It takes O(n shortest) operations and O(n) memory. Runs of twice the shortest length or more need no search: such a
    run has a half whose mean is not greater.

    Example:
        >>> mean, start, length = least_mean_of_runs(jnp.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]), 3)
        >>> print(f"{mean:.3f}", start, length)
        0.250 1 4
    """
    n = values.shape[0]
    sums, starts = jnp.concatenate([jnp.zeros_like(values[:1]), jnp.cumsum(values)]), jnp.arange(n)

    def best_of(length: Int[Array, ""]) -> tuple[Float[Array, ""], Int[Array, ""]]:
        means = (sums[jnp.minimum(starts + length, n)] - sums[starts]) / length
        means = jnp.where(starts + length <= n, means, jnp.inf)
        return means.min(), means.argmin()

    lengths = jnp.arange(shortest, min(2 * shortest, n + 1))
    means, first = jax.lax.map(best_of, lengths)
    best = means.argmin()
    return means[best], first[best], lengths[best]


def _integral_of_product(a: Array, b: Array, c: Array, d: Array, s: Array | float) -> Array:
    """The integral of (a + b x) (c + d x) over x in [0, s]."""
    return s * (a * c + s * ((a * d + b * c) / 2 + s * b * d / 3))


def _half_distances(z: Float[Array, " n"], fractions: Float[Array, " n"]) -> Float[Array, " n"]:
    """A number for every value, by one sort; their mean is half the mean of |z_i - z_j| over all pairs."""
    # The factor of z is twice the mid-rank minus 1. It is constant in z between ties, so it is the derivative, too.
    return z * _fraction_below_less_above(jax.lax.stop_gradient(z), fractions)


def _smoothed_halves(
    z: Float[Array, " n"], fractions: Float[Array, " n"], smoothing: Real[ArrayLike, ""]
) -> Float[Array, " n"]:
    """For every value half the mean of sqrt((z_i - z_j)^2 + s^2) - s over all others."""
    length = jnp.asarray(smoothing, z.dtype)
    # A row is computed again for the derivative: the distances of all pairs are never held at once.
    half = jax.checkpoint(lambda one: jnp.sum(fractions * (jnp.sqrt((one - z) ** 2 + length**2) - length)) / 2)
    return jax.lax.map(half, z, batch_size=_ROWS_AT_ONCE)


def _fraction_below_less_above(z: Float[Array, " n"], fractions: Float[Array, " n"]) -> Float[Array, " n"]:
    """For every value, the fraction of smaller values minus the fraction of greater values, by one sort."""
    n, places = z.shape[0], jnp.arange(z.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((z, places), num_keys=1)
    # Without checks of bounds, which would take time.
    at = lambda values, chosen: values.at[chosen].get(mode="promise_in_bounds")
    upto = jnp.concatenate([jnp.zeros_like(z[:1]), jnp.cumsum(at(fractions, order))])
    # Where the run of ties of each value begins, and where the next one does.
    steps = ordered[1:] > ordered[:-1]
    first = jax.lax.cummax(jnp.concatenate([places[:1], jnp.where(steps, places[1:], 0)]))
    after = jax.lax.cummin(jnp.concatenate([jnp.where(steps, places[1:], n), places[:1] + n]), reverse=True)
    differences = at(upto, first) + at(upto, after) - upto[-1]
    return jnp.zeros_like(z).at[order].set(differences, unique_indices=True, mode="promise_in_bounds")


def _mean_density_of_quantiles(num_rows: int) -> float:
    """sqrt(2) times the mean of phi(z) over the normal quantiles z at (2 i - 1) / (2 n)."""
    z = np.array([NormalDist().inv_cdf((place + 0.5) / num_rows) for place in range(num_rows)])
    return float(np.mean(np.exp(-0.5 * z**2))) / SQRT_PI
