"""The rounding of values that went through a score and came back: by how much an end of an interval is moved outward.

In floating point loc + scale * ((y - loc) / scale) is not y. With u = eps / 2, the difference, the quotient and the
product are each off by u of |scale z|. The sum is off by u of the end. Together that is 2 eps of the largest size.
An interval that ends at a calibration row's own value would lose each new row of that value. So ends are moved outward
by 4 eps of the largest size, which is 4 to 8 units in its last place. A value within that distance of an end counts as
equal.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Bool, Float, Real

from jaxcal._numpy import AnyArray, constant, namespace
from jaxcal.functional._loops import while_loop

# How far an end is moved, in eps of the largest size: twice the largest error.
UNITS = 4
# Each try to move an end beyond a level goes twice as far as the try before. This number leaves the range of any dtype.
_MOST_TRIES = 1100


def tolerance(*sizes: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """4 eps of the largest of some sizes, arrays of one shape; 0 where that is not finite. It has no derivative.

    Example:
        >>> print(tolerance(jnp.array([1.0, -8.0]), jnp.array([2.0, 4.0])) / jnp.finfo(jnp.float32).eps)
        [ 8. 32.]
    """
    xp = namespace(*sizes)
    size = constant(xp.max(xp.stack([xp.abs(each) for each in sizes]), axis=0))
    return UNITS * float(jnp.finfo(size.dtype).eps) * xp.where(xp.isfinite(size), size, 0)


def outward(
    end: Float[AnyArray, "..."], side: Real[ArrayLike, "..."], *sizes: Float[AnyArray, "..."]
) -> Float[AnyArray, "..."]:
    """The end of an interval, moved outward by the `tolerance` of its size and the other sizes; infinite ends stay.

    Args:
        end: the ends, of any shape.
        side: 1 for an upper end, -1 for a lower end, 0 for an end that stays; in the shape of the ends, or one number.
        sizes: the terms whose sum is the end, in its shape.

    Example:
        >>> lower, upper = outward(jnp.array([0.1, jnp.inf]), jnp.array([-1, 1]), jnp.array([10.0, 1.0]))
        >>> print(lower < 0.1, upper)
        True inf
    """
    return end + namespace(end, *sizes).asarray(side, end.dtype) * tolerance(end, *sizes)


def of_probability(p: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The possible rounding error of a probability: 4 eps of p (1 - log p). It has no derivative.

    The relative error of exp(-s) is s times the relative error of s. NumPy and a compiled program compute cdfs of
    Student t that differ by this much.
    """
    xp, p = namespace(p), constant(p)
    tiny = float(jnp.finfo(p.dtype).tiny)
    return UNITS * float(jnp.finfo(p.dtype).eps) * p * (1 - xp.log(xp.clip(p, tiny, 1)))


def beyond(
    cdf: Callable[[AnyArray], AnyArray],
    end: Float[AnyArray, "..."],
    level: Float[AnyArray, "..."],
    side: Real[ArrayLike, "..."],
    *sizes: Float[AnyArray, "..."],
) -> Float[AnyArray, "..."]:
    """A quantile, moved outward until the cdf there is beyond the level, so that all y of that level lie inside.

    Units in the last place do not say how far that is: a cdf near 1 is the same for a wide range of y. The
    first move is the move of `outward`, and each further move is twice as long. The cdf is beyond the level if it
    differs by more than `of_probability`, or if it is 0 or 1. If no y is beyond the level, the end is infinite.

    Args:
        cdf: elementwise; no derivative passes through it.
        end: the quantiles, in the shape that `cdf` takes.
        level: the levels of the quantiles, as values of `cdf`.
        side: as for `outward`.
        sizes: as for `outward`; at least one of them is not 0.

    Example:
        >>> import jax
        >>> end = jnp.array(16.0)  # up to 16.03 the cdf is the same, by rounding
        >>> moved = beyond(jax.nn.sigmoid, end, jax.nn.sigmoid(end), 1, end)
        >>> print(jax.nn.sigmoid(moved) > jax.nn.sigmoid(end))
        True
    """
    xp, info = namespace(end, level, *sizes), jnp.finfo(end.dtype)
    direction: AnyArray = xp.asarray(side, end.dtype)
    start, level, step = jax.tree.map(constant, (end, level, tolerance(end, *sizes)))
    margin = of_probability(level)
    highest = xp.minimum(level + margin, 1 - float(info.epsneg))
    lowest = xp.maximum(level - margin, float(info.tiny))

    def is_inside(move: AnyArray) -> Bool[AnyArray, "..."]:
        place = start + direction * move
        level = cdf(place)
        inside = ((direction > 0) & (level <= highest)) | ((direction < 0) & (level >= lowest))
        return inside & xp.isfinite(place)

    def again(state: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray, AnyArray]:
        tries, move, inside = state
        move = xp.where(inside, 2 * move, move)
        return tries + 1, move, is_inside(move)

    unfinished = lambda state: xp.any(state[2]) & (state[0] < _MOST_TRIES)
    _, move, _ = while_loop(unfinished, again, (xp.zeros((), int), step, is_inside(step)))
    return end + direction * move
