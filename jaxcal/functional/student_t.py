"""The Student t distribution: its log density, cdf, survival and quantile function, and its CRPS.

All are differentiable in the degrees of freedom, and right into the tails.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, special
from jaxcal.functional.normal import LOG_SQRT_2PI, SQRT_PI, PerRow, in_one_dtype
from jaxcal.functional.quantiles import invert_cdf, unit_gauss_legendre

# How many tails are integrated at once: each holds all points of the rule. By NumPy, they must fit into a core's cache.
_AT_ONCE, _AT_ONCE_BY_NUMPY = 2**16, 2**11


@numpy_or_jit
def log_prob(y: PerRow, df: PerRow, loc: PerRow, scale: PerRow) -> Float[AnyArray, "*n"]:
    """Log density of a Student t distribution with `df` degrees of freedom; -inf at scale = 0, where there is none.

    Args:
        y: outcomes [n].
        df: degrees of freedom [n], positive.
        loc: locations [n].
        scale: scales [n], not negative (the std is scale sqrt(df / (df - 2))).

    Returns:
        the log density of every row.

    Example:
        >>> print(f"{log_prob(1e6, 1.0, 0.0, 1.0):.3f}")
        -28.776
    """
    xp, y, df, loc, scale = in_one_dtype(y, df, loc, scale)
    positive = xp.greater(scale, 0)
    safe = xp.where(positive, scale, 1)
    t = xp.subtract(y, loc) / safe
    log_density = _log_constant(df) - 0.5 * (df + 1) / df * _wallace(t, df) ** 2 - xp.log(safe)
    return xp.where(positive, log_density, -np.inf)


@numpy_or_jit
def crps(y: PerRow, df: PerRow, loc: PerRow, scale: PerRow) -> Float[AnyArray, "*n"]:
    """CRPS of a Student t distribution with more than one degree of freedom.

    Let t = (y - loc) / scale. The score is scale times
    t (2 F(t) - 1) + 2 f(t) (df + t^2) / (df - 1) - 2 sqrt(df) / (df - 1) B(1/2, df - 1/2) / B(1/2, df/2)^2.

    At scale = 0 it is |y - loc|, its limit, with finite derivatives.

    Args:
        y: outcomes [n].
        df: degrees of freedom [n]; NaN is returned where they are 1 or less.
        loc: locations [n].
        scale: scales [n], not negative.

    Returns:
        the score of every row, in the unit of y.

    Source: Jordan, Krueger and Lerch, Journal of Statistical Software 90 (2019), appendix A.

    Example:
        >>> print(f"{crps(0.0, 5.0, 0.0, 1.0):.3f}")
        0.257
    """
    xp, y, df, loc, scale = in_one_dtype(y, df, loc, scale)
    has_mean, positive = xp.greater(df, 1), xp.greater(scale, 0)
    df, safe = xp.where(has_mean, df, 2), xp.where(positive, scale, 1)
    distance = xp.subtract(y, loc)
    t = distance / safe
    peak = density_times_square(t, df)
    spread = xp.sqrt(df) / SQRT_PI * xp.exp(2 * _log_gamma_ratio(df / 2) - _log_gamma_ratio(df - 0.5))
    score = distance * (2 * cdf(t, df) - 1) + safe * 2 * (peak - spread) / (df - 1)
    return xp.where(has_mean, xp.where(positive, score, abs(distance)), np.nan)


def density_times_square(t: Float[AnyArray, "*n"], df: Float[AnyArray, "..."]) -> Float[AnyArray, "*n"]:
    """f(t) (df + t^2), which is f(0) df (1 + t^2 / df)^(-(df - 1) / 2).

    It is df - 1 times the integral of u f(u) from t on. The arrays are of one library and one dtype. `df` has the shape
    of t, or is a number.
    """
    xp = namespace(t, df)
    return xp.exp(_log_constant(df) - 0.5 * (df - 1) / df * _wallace(t, df) ** 2) * df


@numpy_or_jit
def cdf(t: PerRow, df: PerRow) -> Float[AnyArray, "*n"]:
    """The cumulative distribution function of the standard Student t distribution.

    In the variable w = sqrt(df log(1 + t^2 / df)) the density is nearly normal. A Gauss-Legendre rule of 32 points
    gives the lesser tail with a relative error of 1e-13 in float64 for df >= 1. Unlike `betainc` it is
    differentiable in df, and keeps float32's precision up to df = 1e6.

    Args:
        t: the points, of any shape.
        df: degrees of freedom, positive, in the shape of t or one for all.

    Returns:
        the probabilities, in the shape of t.

    Source: the variable is from Wallace, Annals of Mathematical Statistics 30 (1959).

    Example:
        >>> print(cdf(jnp.array([-1.0, 0.0, 1.0]), 1.0).round(4))
        [0.25 0.5  0.75]
    """
    _, t, df = in_one_dtype(t, df)
    return _cdf_of_wallace(_wallace(t, df), df)


@numpy_or_jit
def log_sf(t: PerRow, df: PerRow) -> Float[AnyArray, "*n"]:
    """The logarithm of the survival function 1 - F(t) of the standard Student t; right where that underflows.

    It uses the quadrature of `cdf`, and is differentiable in both arguments.

    Args:
        t: the points, of any shape.
        df: degrees of freedom, positive, in the shape of t or one for all.

    Returns:
        the logarithms, in the shape of t.

    Example:
        >>> print(f"{log_sf(100.0, 1000.0):.2f}")
        -1203.27
    """
    xp, t, df = in_one_dtype(t, df)
    w, df = xp.broadcast_arrays(_wallace(t, df), df)
    log_peak, area = _tail_of_wallace(xp.where(w < 0, -w, w), df)
    log_tail = log_peak + xp.log(area)
    return xp.where(w < 0, xp.log1p(-xp.exp(log_tail)), log_tail)


@numpy_or_jit
def icdf(p: Float[ArrayLike, "*#n"], df: PerRow) -> Float[AnyArray, "*n"]:
    """The quantile function of the standard Student t distribution, right into the tails (p = 1e-12, df = 1).

    In the variable w of `cdf` the quantile lies between the normal quantile z and z phi(0) / f(0), where f is
    the density. There it is searched for. It is differentiable in p and in df.

    Args:
        p: levels in [0, 1], of any shape.
        df: degrees of freedom, positive, in the shape of p or one for all.

    Returns:
        the quantiles, in the shape of p.

    Example:
        >>> print(icdf(jnp.array([0.25, 0.5, 0.75]), 1.0).round(4))
        [-1.  0.  1.]
    """
    xp, *operands = in_one_dtype(p, df)
    p, df = xp.broadcast_arrays(*operands)
    lower = xp.less_equal(p, 0.5)
    tail = xp.where(lower, p, 1 - p)  # exact, and so the upper tail is as precise as the lower one
    z = special(tail).ndtri(tail)
    far = z * xp.exp(-LOG_SQRT_2PI - _log_constant(df))
    w = invert_cdf(lambda w: _cdf_of_wallace(w, df), tail, far, z, lambda w: _density_of_wallace(w, df))
    w = xp.where(lower, w, -w)
    largest = math.log(float(jnp.finfo(w.dtype).max)) - 1  # its exponential is finite
    return w * xp.sqrt(_ratio(xp.expm1, xp.minimum(w**2 / df, largest)))


def _wallace(t: AnyArray, df: AnyArray) -> AnyArray:
    """The variable sign(t) sqrt(df log(1 + t^2 / df)), smooth at t = 0."""
    xp = namespace(t, df)
    root = xp.sqrt(df)
    largest = 1e-3 * math.sqrt(float(jnp.finfo(root.dtype).max))  # its square over df is finite
    ratio = xp.clip(t, -largest, largest) / root
    return root * ratio * xp.sqrt(_ratio(xp.log1p, ratio**2))


def _cdf_of_wallace(w: AnyArray, df: AnyArray) -> AnyArray:
    """The cdf of the Student t distribution in the variable w: the tail beyond |w|."""
    xp = namespace(w, df)
    w, df = xp.broadcast_arrays(w, df)
    log_peak, area = _tail_of_wallace(xp.where(w < 0, -w, w), df)
    tail = xp.exp(log_peak) * area
    return xp.where(w < 0, tail, 1 - tail)


def _density_of_wallace(w: AnyArray, df: AnyArray) -> AnyArray:
    """The derivative of `_cdf_of_wallace` in w."""
    xp = namespace(w, df)
    return xp.exp(_log_constant(df) - 0.5 * w**2) / xp.sqrt(_ratio(lambda x: -xp.expm1(-x), w**2 / df))


def _tail_of_wallace(size: AnyArray, df: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The tail beyond `size` in the variable w, by quadrature: the logarithm of one factor, and the other one."""
    sizes, dfs = size.ravel(), df.ravel()
    if namespace(size) is np:
        parts = [slice(start, start + _AT_ONCE_BY_NUMPY) for start in range(0, sizes.size, _AT_ONCE_BY_NUMPY)]
        area = np.concatenate([_area(sizes[part], dfs[part]) for part in parts]).reshape(size.shape)
    elif size.size > _AT_ONCE:
        area = jax.lax.map(lambda one: _area(*one), (sizes, dfs), batch_size=_AT_ONCE).reshape(size.shape)
    else:
        area = _area(size, df)
    return _log_constant(df) - 0.5 * size**2, area


def _area(size: AnyArray, df: AnyArray) -> AnyArray:
    """The integral of the density from `size` on, divided by the density there."""
    xp = namespace(size)
    # From `size` to `size + reach` the integrand falls to the precision of the dtype.
    fall = -2 * math.log(float(jnp.finfo(size.dtype).eps))
    reach = fall / (xp.sqrt(size**2 + fall) + size)
    points = 32 if fall > 50 else 16

    nodes, weights = (
        xp.asarray(part, size.dtype).reshape(-1, *[1] * size.ndim) for part in unit_gauss_legendre(points)
    )
    r = nodes * reach[None]
    ratio = _ratio(lambda x: -xp.expm1(-x), (size[None] + r) ** 2 / df[None])
    return reach * (weights * xp.exp(-r * (size[None] + r / 2)) / xp.sqrt(ratio)).sum(0)


def _ratio(function: Callable[[AnyArray], AnyArray], x: AnyArray) -> AnyArray:
    """function(x) / x for x >= 0 and a function with value 0 and slope 1 at 0."""
    xp, positive = namespace(x), x > 0
    return xp.where(positive, function(x) / xp.where(positive, x, 1), 1)


def _log_constant(df: AnyArray) -> AnyArray:
    """The log density at 0 of the standard Student t distribution."""
    return _log_gamma_ratio(df / 2) - 0.5 * namespace(df).log(math.pi * df)


def _log_gamma_ratio(x: AnyArray) -> AnyArray:
    """log(Gamma(x + 1/2) / Gamma(x)) without the cancellation of two large log gammas.

    It takes the asymptotic series at x + 10, where the series is right to 1e-13, and ten steps of the recurrence down
    to x.
    """
    shifted = x + 10
    steps = math.prod((x + j) / (x + (j + 0.5)) for j in range(10))
    inverse = 1 / shifted
    square = inverse**2
    series = -1 / 8 + square * (1 / 192 - square * (1 / 640 - square * (17 / 14336 - square * 31 / 18432)))
    xp = namespace(x)
    return xp.log(steps) + 0.5 * xp.log(shifted) + inverse * series
