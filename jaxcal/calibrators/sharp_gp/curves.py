"""The curve through a row's quantiles, and the places of errors on it.

A curve holds the errors [c] of one row at the levels with lengthscales of their own. The 0 of the mean is in the
middle. At these errors places are whole numbers: -1 at the first quantile below the middle, 2 at the second quantile
above it. The place of an error is its score.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float

from jaxcal._numpy import AnyArray, constant, namespace


def nested(distances: Float[AnyArray, "n k"], num_below: int) -> Float[AnyArray, "n c"]:
    """The curves, whose distances from the middle never fall outwards.

    Args:
        distances: the distances of every row's quantiles from its mean, for each level.
        num_below: the number of levels below the middle.

    Example:
        >>> nested(np.array([[3.0, 1.0, 2.0, 1.0]]), 2).tolist()
        [[-3.0, -1.0, 0.0, 2.0, 2.0]]
    """
    below = -greatest_so_far(distances[:, :num_below][:, ::-1])[:, ::-1]
    above = greatest_so_far(distances[:, num_below:])
    return namespace(distances).concatenate([below, 0 * distances[:, :1], above], axis=1)


def greatest_so_far(values: Float[AnyArray, "n l"]) -> Float[AnyArray, "n l"]:
    """The greatest value of a row up to every column."""
    return lax.cummax(values, axis=1) if namespace(values) is jnp else np.maximum.accumulate(values, axis=1)


def scores(curves: Float[AnyArray, "n c"], errors: Float[AnyArray, " n"], num_below: int) -> Float[AnyArray, " n"]:
    """The place of every row's error on the row's curve.

    Beyond an end of the curve a unit of places is the distance of this end from the middle.

    >>> scores(np.array([[-3.0, 0.0, 2.0]]), np.array([1.0]), 1).tolist()
    [0.5]
    """
    xp, x = namespace(curves, errors), errors[:, None]
    right = xp.clip(xp.sum(curves <= x, axis=1, keepdims=True), 1, curves.shape[1] - 1)
    start, end = xp.take_along_axis(curves, right - 1, axis=1), xp.take_along_axis(curves, right, axis=1)
    # The score of start <= x < end is (place of start) + (x - start) / (end - start).
    is_inside = (x >= start) & (x < end)
    fraction = xp.where(is_inside, (x - start) / xp.where(is_inside, end - start, 1), 0)
    inside = xp.where(x < end, fraction - 1, 0) + (right - num_below).astype(curves.dtype)
    outermost, place, unit = _end(curves, x > 0, num_below)
    beyond = xp.abs(x) - xp.abs(outermost)
    outside = place + xp.sign(x) * beyond / xp.where(beyond > 0, unit, 1)
    return xp.where(beyond > 0, outside, inside)[:, 0]


def errors(curves: Float[AnyArray, "n c"], scores: Float[AnyArray, " l"], num_below: int) -> Float[AnyArray, "n l"]:
    """The errors at these places on every row's curve: the inverse of `scores`.

    >>> errors(np.array([[-3.0, 0.0, 2.0]]), np.array([-2.0, 0.5]), 1).tolist()
    [[-6.0, 1.0]]
    """
    xp, score = namespace(curves, scores), scores[None]
    low = xp.clip(constant(xp.floor(scores)).astype(int) + num_below, 0, curves.shape[1] - 2)
    start, end = curves[:, low], curves[:, low + 1]
    inside = start + (score - (low - num_below).astype(curves.dtype)[None]) * (end - start)
    outermost, place, unit = _end(curves, score > 0, num_below)
    beyond = xp.abs(score) - xp.abs(place)
    return xp.where(beyond > 0, outermost + xp.sign(score) * beyond * unit, inside)


def _end(
    curves: Float[AnyArray, "n c"], is_above: Bool[AnyArray, "#n #l"], num_below: int
) -> tuple[Float[AnyArray, "n l"], Float[AnyArray, "#n #l"], Float[AnyArray, "n l"]]:
    """A curve's end on one side, its place, and the unit of places beyond it, the distance of the end from the middle.

    A side without levels, or of no width, has the unit of the other side.
    """
    xp, lower, upper = namespace(curves, is_above), curves[:, :1], curves[:, -1:]
    end, other = xp.where(is_above, upper, lower), xp.where(is_above, lower, upper)
    unit = xp.abs(xp.where(end == 0, other, end))
    place = xp.where(is_above, curves.shape[1] - 1 - num_below, -num_below).astype(curves.dtype)
    return end, place, unit
