"""Tables of weighted values, one for every group, behind one another in one array: quantiles, cdfs, scores.

A group's table is its values in increasing order and the sums of their weights. All tables together take O(M) memory
for M values, however the groups differ in size. Every look-up is a binary search in O(log M) time, in the table of its
row's group. If every weight is 1, the quantiles are as in `functional.quantiles.empirical_quantile`.
"""

import math
from collections.abc import Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Bool, Float, Int

from jaxcal._numpy import JaxArray, namespace
from jaxcal.functional import linalg
from jaxcal.functional._loops import carried
from jaxcal.functional.quantiles import last_place

# For the rows that are looked up: the number of each row's group, and a value for each row.
GroupOfRows = Int[ArrayLike, " n"]
OfRows = Float[JaxArray, " n"]
# For the values of all tables: a number for each value, and where the table of each group begins.
OfValues = Float[JaxArray, " m"]
Starts = Int[JaxArray, " groups_and_1"]


class Tables(eqx.Module):
    """The tables of groups 0, 1, ..., made by `make`.

    Attributes:
        values: of all groups [M], in increasing order within each.
        upto: the sums of the weights [M] up to each value, within its group.
        start: where the table of each group begins [groups + 1]; the last one is M.
        mean: of each table [groups].
        std: of each table [groups].
        sums: the sums of weight * (value - mean) up to each value [M], within its group.
        distance: half the mean distance of two values of a table [groups], E|Z - Z'| / 2.
    """

    values: OfValues
    upto: OfValues
    start: Starts
    mean: Float[JaxArray, " groups"]
    std: Float[JaxArray, " groups"]
    sums: OfValues
    distance: Float[JaxArray, " groups"]


@partial(jax.jit, static_argnames=("number", "symmetric"))
def make(
    values: OfValues, group: Int[ArrayLike, " m"], number: int, weights: OfValues | None = None, symmetric: bool = False
) -> Tables:
    """The tables of values in any order.

    Args:
        values: of all groups [M]. Infinite ones count as the outermost finite ones in means, stds and scores.
        group: the number of each value's group [M], from 0 to number - 1.
        number: the number of groups, each with at least one value.
        weights: of the values [M], positive; 1 where None.
        symmetric: whether each value stands for itself and for its negative. Then no value may be negative.

    Example:
        >>> tables = make(jnp.array([3.0, 1.0, 5.0]), jnp.array([0, 0, 1]), 2)
        >>> print(tables.values, tables.upto, tables.start)
        [1. 3. 5.] [1. 2. 1.] [0 2 3]
    """
    operands = (jnp.asarray(group, jnp.int32), values) + (() if weights is None else (weights.astype(values.dtype),))
    group, values, *counts = jax.lax.sort(operands, num_keys=2)
    start = jnp.searchsorted(group, jnp.arange(number + 1, dtype=jnp.int32)).astype(jnp.int32)
    if symmetric:
        values, group, counts, start = _with_negatives(values, group, counts, start)
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    if counts:
        counts, upto = counts[0], sums_within(counts[0], place == start[group])
    else:  # counted in integers, which are exact
        counts, upto = jnp.ones_like(values), (place - start[group] + 1).astype(values.dtype)
    total = upto[start[1:] - 1]
    mean, deviations, std = moments(linalg.finite_part(values), counts, group, total)
    parts = counts / total[group] * deviations * ((2 * upto - counts) / total[group] - 1)
    distance = jax.ops.segment_sum(parts, group, number, indices_are_sorted=True)
    sums = sums_within(counts * deviations, place == start[group])
    return Tables(values=values, upto=upto, start=start, mean=mean, std=std, sums=sums, distance=distance)


def _with_negatives(
    values: OfValues, group: Int[JaxArray, " m"], counts: Sequence[JaxArray], start: Starts
) -> tuple[Float[JaxArray, " twice_m"], Int[JaxArray, " twice_m"], list[JaxArray], Starts]:
    """Sorted tables with the negatives of their values before them, sorted too."""
    group = jnp.repeat(group, 2)
    size, first = (start[1:] - start[:-1])[group], start[:-1][group]
    place = jnp.arange(group.shape[0], dtype=jnp.int32) - 2 * first
    negative = place < size
    row = first + jnp.where(negative, size - 1 - place, place - size)
    return jnp.where(negative, -values[row], values[row]), group, [each[row] for each in counts], 2 * start


def cdf(tables: Tables, group: GroupOfRows, u: OfRows) -> OfRows:
    """The fraction of the weight of each row's table that lies at or below u."""
    start, total = tables.start[group], _totals(tables, group)
    place = places_upto(tables.values, start, tables.start[group + 1], u)
    return _before(tables.upto, place, start) / total


def crps(tables: Tables, group: GroupOfRows, u: OfRows) -> OfRows:
    """CRPS at u of the distribution of each row's table: E|u - Z| - E|Z - Z'| / 2, by sums up to u.

    Source: Jordan, Krueger and Lerch, Journal of Statistical Software 90 (2019).
    """
    # E|u - Z| = (2 F(u) - 1) (u - mean) - 2 `sums` / W, with the sums up to u.
    start, total = tables.start[group], _totals(tables, group)
    place = places_upto(linalg.finite_part(tables.values), start, tables.start[group + 1], u)
    below, sums = (_before(each, place, start) / total for each in (tables.upto, tables.sums))
    return (2 * below - 1) * (u - tables.mean[group]) - 2 * sums - tables.distance[group]


def quantile(tables: Tables, group: GroupOfRows, p: OfRows, rule: str, new_weight: OfRows | None = None) -> OfRows:
    """The quantile of each row's table at level p, by the rules of `functional.quantiles.empirical_quantile`.

    With weights a rank is a sum of weights. Let W be the sum of all weights of a table, and w the weight of the new
    row.

    - "inverse_cdf": the least value up to which the sum is p W or more.
    - "crude": the least value up to which the sum is more than p W.
    - "conformal", from p = 1/2 on: the least value up to which the sum is p (W + w) or more, else +inf.
    - "conformal", below p = 1/2: the greatest value from which on the sum is (1 - p) (W + w) or more, else -inf. This
      is as in `functional.quantiles.outward_quantile`.
    - "symmetric": sign(p - 1/2) s, for a table that is symmetric about 0. Here s is the conformal quantile of its
      positive half at level |2 p - 1|.

    Args:
        tables: of `make`.
        group: the number of each row's group.
        p: levels in [0, 1].
        rule: one of these.
        new_weight: w; 1 where None.

    Source: for the conformal rules with weights Tibshirani, Barber, Candès and Ramdas, NeurIPS 2019, corollary 1.

    Example:
        >>> tables = make(jnp.array([3.0, 1.0, 5.0]), jnp.array([0, 0, 1]), 2)
        >>> print(quantile(tables, jnp.array([0, 0, 1]), jnp.array([0.6, 0.9, 0.5]), "conformal"))
        [ 3. inf  5.]
    """
    new = jnp.ones_like(p) if new_weight is None else new_weight
    if rule == "conformal":
        above = reaching(tables, group, jnp.maximum(p, 1 - p), new, jnp.zeros_like(p))
        below = _reached_from_above(tables, group, jnp.maximum(p, 1 - p), new)
        return jnp.where(p < 0.5, below, above)
    if rule == "symmetric":
        level = jnp.abs(2 * p - 1)
        size = reaching(tables, group, level, new, _totals(tables, group) / 2)
        return jnp.where(level > 0, jnp.sign(2 * p - 1) * size, 0)
    start, end, total = tables.start[group], tables.start[group + 1], _totals(tables, group)
    target, tolerance = p * total, _tolerance(p * total, total, end - start)
    is_before = (lambda sums: sums <= target + tolerance) if rule == "crude" else lambda sums: sums < target - tolerance
    place = last_place(lambda place: is_before(_before(tables.upto, place, start)), start, end, tables.values.shape[0])
    return tables.values[jnp.minimum(place, end - 1)]


def reaching(tables: Tables, group: GroupOfRows, p: OfRows, new: OfRows, skipped: OfRows) -> OfRows:
    """The least value up to which the sum of the weights, without the skipped ones, reaches p (W + w); else +inf.

    Args:
        tables: of `make`.
        group: the number of each row's group.
        p: levels in [0, 1].
        new: w.
        skipped: sums of weights at the beginning of the tables that do not count.

    Example:
        >>> tables = make(jnp.array([3.0, 1.0, 5.0]), jnp.array([0, 0, 1]), 2)
        >>> print(reaching(tables, jnp.array([0, 0]), jnp.array([0.3, 0.6]), jnp.ones(2), jnp.zeros(2)))
        [1. 3.]
    """
    start, end, total = tables.start[group], tables.start[group + 1], _totals(tables, group)
    target = p * (total - skipped + new)
    tolerance = _tolerance(target, total, end - start)
    holds = lambda place: _before(tables.upto, place, start) - skipped < target - tolerance
    place = last_place(holds, start, end, tables.values.shape[0])
    return jnp.where(place >= end, jnp.inf, tables.values[jnp.minimum(place, end - 1)])


def _reached_from_above(tables: Tables, group: GroupOfRows, p: OfRows, new: OfRows) -> OfRows:
    """The greatest value from which on the sum of the weights reaches p (W + w); else -inf."""
    start, end, total = tables.start[group], tables.start[group + 1], _totals(tables, group)
    target = p * (total + new)
    tolerance = _tolerance(target, total, end - start)
    holds = lambda place: total - _before(tables.upto, place, start) >= target - tolerance
    place = last_place(holds, start, end - 1, tables.values.shape[0])
    return jnp.where(total < target - tolerance, -jnp.inf, tables.values[place])


def _totals(tables: Tables, group: GroupOfRows) -> OfRows:
    return tables.upto[tables.start[group + 1] - 1]


def places_upto(keys: OfValues, start: Int[JaxArray, " n"], end: Int[JaxArray, " n"], u: OfRows) -> Int[JaxArray, " n"]:
    """The place behind the last key not above u, from each `start` to each `end`; keys increase in between.

    Example:
        >>> print(places_upto(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 2]), jnp.array([2, 3]), jnp.array([1.5, 1.0])))
        [1 2]
    """
    xp = namespace(keys, u)
    holds = lambda place: (place == start) | (keys[xp.maximum(place - 1, 0)] <= u)
    return last_place(holds, start, end, keys.shape[0])


def moments(
    values: OfValues, weights: OfValues, group: Int[JaxArray, " m"], total: Float[JaxArray, " groups"]
) -> tuple[Float[JaxArray, " groups"], OfValues, Float[JaxArray, " groups"]]:
    """The weighted mean of each group, the deviations of all values from it, and the std of each group.

    Args:
        values: of all groups, with the values of a group side by side.
        weights: of the values.
        group: the number of each value's group, not decreasing.
        total: the sum of the weights of each group.

    Example:
        >>> print(*moments(jnp.array([3.0, 1.0]), jnp.ones(2), jnp.array([0, 0]), jnp.array([2.0])))
        [2.] [ 1. -1.] [1.]
    """
    group_sums = partial(jax.ops.segment_sum, segment_ids=group, num_segments=total.shape[0], indices_are_sorted=True)
    # Squares of deviations stay in the range of the dtype only in units of the largest value.
    unit = linalg.scale_of(values)
    mean = unit * group_sums(weights * (values / unit)) / total
    deviations = values - mean[group]
    return mean, deviations, unit * linalg.sqrt(group_sums(weights * (deviations / unit) ** 2) / total)


def _before(sums: OfValues, place: Int[JaxArray, " n"], start: Int[JaxArray, " n"]) -> OfRows:
    """The sum over the values of a table before a place."""
    return jnp.where(place > start, sums[jnp.maximum(place - 1, 0)], 0)


def _tolerance(target: OfRows, total: OfRows, size: Int[JaxArray, " n"]) -> OfRows:
    """How much a sum and its target may differ by rounding, as for ranks, in units of the mean weight."""
    eps, mean = float(jnp.finfo(target.dtype).eps), total / size
    return jnp.minimum(eps * (4 * target + mean * jnp.minimum(size, 1000)), 0.25 * mean)


def sums_within(values: Float[JaxArray, "m ..."], first: Bool[JaxArray, " m"]) -> Float[JaxArray, "m ..."]:
    """Sums up to each value, or row of values, which begin anew at the first value of each table.

    The values are laid out in about sqrt(M) lines of about sqrt(M) values. All lines are summed at once. Then the sum
    before each line is added. A parallel scan would take seconds to compile.

    Example:
        >>> print(sums_within(jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True])))
        [1. 3. 4.]
    """
    size = values.shape[0]
    width = math.isqrt(size - 1) + 1
    lines = -(-size // width)
    steps = lambda array: _padded(array, lines * width).reshape(lines, width, *array.shape[1:]).swapaxes(0, 1)
    anew = first.reshape(first.shape + (1,) * (values.ndim - 1))

    def along(carry, step):
        sums, begun = carry
        value, is_first = step
        carry = jnp.where(is_first, value, sums + value), begun | is_first
        return carry, carry

    start = carried((jnp.zeros((lines, *values.shape[1:]), values.dtype), jnp.zeros((lines, *anew.shape[1:]), bool)))
    ends, (sums, begun) = jax.lax.scan(along, start, (steps(values), steps(anew)))
    of_line = lambda before, end: (jnp.where(end[1], end[0], before + end[0]), before)
    before = jax.lax.scan(of_line, start[0][0], ends)[1]
    total = jnp.where(begun, sums, sums + before[None])
    return total.swapaxes(0, 1).reshape(lines * width, *values.shape[1:])[:size]


def _padded(array: JaxArray, size: int) -> JaxArray:
    return jnp.pad(array, [(0, size - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
