"""Integrals of the standard Student t distribution between knots: moments of `SmoothQuantiles` are sums of them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import student_t
from jaxcal.functional.quantiles import unit_gauss_legendre

_POINTS, _POINTS_OF_A_TAIL = 12, 24


class Knots(NamedTuple):
    """Knots t_1 < ... < t_k of the standard Student t distribution, and integrals over the k + 1 intervals they cut.

    They are integrals over each interval, with the density f and the cdf F:

    Attributes:
        t: the knots [k].
        below: the integral of F from -inf to each knot [k].
        mass: of f [k + 1].
        first: of u f(u) [k + 1].
        second: of u^2 f(u) [k + 1]; infinite where df <= 2.
        spread: of F(u) (1 - F(u)) [k + 1].
    """

    t: Float[AnyArray, "*k"]
    below: Float[AnyArray, "*k"]
    mass: Float[AnyArray, "*s"]
    first: Float[AnyArray, "*s"]
    second: Float[AnyArray, "*s"]
    spread: Float[AnyArray, "*s"]


@numpy_or_jit
def knots(levels: Float[AnyArray, " k"], df: Float[AnyArray, ""]) -> Knots:
    """The knots at these levels.

    Args:
        levels: [k] in increasing order in (0, 1), the first below and the last above 1/2.
        df: degrees of freedom, more than 1.
    """
    xp = namespace(levels, df)
    t = student_t.icdf(levels, df)
    h = first_moment_above(t, df)
    cdf = xp.pad(levels, (1, 1), constant_values=(0, 1))
    mass = xp.diff(cdf)
    first = -xp.diff(xp.pad(h, (1, 1)))
    # Integration by parts gives (1 - 1 / (df - 1)) times the integral of u^2 f.
    has_std = df > 2
    safe = xp.where(has_std, df, 3)
    second = ((safe - 1) * -xp.diff(xp.pad(t * h, (1, 1))) + safe * mass) / (safe - 2)
    second = xp.where(has_std, second, np.inf)
    return Knots(t, integral_of_cdf(t, df), mass, first, second, _spread(t, df))


def first_moment_above(t: Float[AnyArray, "*n"], df: Float[AnyArray, "..."]) -> Float[AnyArray, "*n"]:
    """The integral of u f(u) from t on: f(t) (df + t^2) / (df - 1)."""
    return student_t.density_times_square(t, df) / (df - 1)


def integral_of_cdf(t: Float[AnyArray, "*n"], df: Float[AnyArray, "..."]) -> Float[AnyArray, "*n"]:
    """The integral of F from -inf to t: t F(t) + f(t) (df + t^2) / (df - 1)."""
    return namespace(t).where(t > -np.inf, t, 0) * student_t.cdf(t, df) + first_moment_above(t, df)


def _spread(t: Float[AnyArray, " k"], df: Float[AnyArray, ""]) -> Float[AnyArray, " s"]:
    """The integrals of F (1 - F) between the knots, and beyond them."""
    xp = namespace(t, df)
    nodes, weights = (xp.asarray(part, t.dtype) for part in unit_gauss_legendre(_POINTS))
    width = xp.diff(t)
    tails = student_t.cdf(-abs(t[:-1, None] + width[:, None] * nodes[None]), df)
    inner = width * (tails * (1 - tails) * weights[None]).sum(-1)
    # F (1 - F) = (1 - F) - (1 - F)^2. Beyond a knot t, the first integral is known. The second is over v = t / u.
    ends = xp.stack([-t[0], t[-1]])
    v, weights = (xp.asarray(part, t.dtype) for part in unit_gauss_legendre(_POINTS_OF_A_TAIL))
    squares = student_t.cdf(-ends[:, None] / v[None], df) ** 2 * (weights / v**2)[None]
    outer = integral_of_cdf(-ends, df) - ends * squares.sum(-1)
    return xp.concatenate([outer[:1], inner, outer[1:]])
