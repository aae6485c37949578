"""Tables of weighted values, one for every group, as distributions whose cdfs are linear between the values.

A table's k-th value of L has the level (m_k + w / 2) / (W + w). Here m_k is the sum of the weights below the value plus
half of its own weight. W is the sum of all weights, and w is the weight of a new row. With weights of 1 the level is
k / (L + 1), the probability that a new exchangeable row lies at or below the value. Beyond the outermost values there
are atoms at them, or tails of a normal distribution with the table's mean and std. The tails are scaled to the mass
that remains.

All tables together take O(M) memory for M values. Every look-up is a binary search in O(log M) time. The values are
kept in units in which the mean of their table is 0 and its std is 1.
"""

from functools import lru_cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int

from jaxcal._numpy import JaxArray, namespace
from jaxcal.functional import linalg, normal_tail, smoothing
from jaxcal.functional.tables import GroupOfRows, OfRows, OfValues, Starts, moments, places_upto, sums_within

TAILS = ("constant", "normal")


class GroupLevels(eqx.Module):
    """The values of groups 0, 1, ..., and their levels.

    Attributes:
        values: of all groups [M], in increasing order within each, in units of the group.
        middle: the sum of the weights [M] below each value plus half of its own weight, within its group.
        start: where the table of each group begins [groups + 1]; the last one is M.
        total: the sum of the weights of each group [groups].
    """

    values: OfValues
    middle: OfValues
    start: Starts
    total: Float[JaxArray, " groups"]


class LinearTables(GroupLevels):
    """`GroupLevels` with sums that are computed in advance; made by `make`.

    Attributes:
        center: the mean of each group [groups], the zero of its unit.
        spread: the std of each group [groups], its unit.
        below: the integrals of 1, middle and middle^2 up to each value [M, 3], within its group.
        above: the integrals of 1, total - middle and its square from each value on [M, 3].
        moments: the integrals of value and value^2 over middle [groups, 2].
        density: the bins of the densities.
    """

    center: Float[JaxArray, " groups"]
    spread: Float[JaxArray, " groups"]
    below: Float[JaxArray, "m 3"]
    above: Float[JaxArray, "m 3"]
    moments: Float[JaxArray, "groups 2"]
    density: "_Density"


class _Density(eqx.Module):
    """Bins of all groups, each with a logistic shape, as in `functional.smoothing.sample_log_density`.

    Attributes:
        ends: where the bins of all groups end [B], in logistic units of the group, and then padding.
        first: where the ends of each group begin [groups + 1].
        log_ratio: the log of a ratio for each end [B]: the weight between this end and the end before it, over the
            logistic mass there.
        center: the medians [groups].
        unit: the logistic scales [groups], on the scale of `values`; 0 where all values are equal.
    """

    ends: Float[JaxArray, " b"]
    first: Starts
    log_ratio: Float[JaxArray, " b"]
    center: Float[JaxArray, " groups"]
    unit: Float[JaxArray, " groups"]


def make(
    values: OfValues, group: Int[ArrayLike, " m"], sizes: Int[np.ndarray, " groups"], weights: OfValues | None = None
) -> LinearTables:
    """The tables of values in any order.

    Args:
        values: of all groups [M].
        group: the number of each value's group [M].
        sizes: how many values each group has [groups], at least one; known numbers.
        weights: of the values [M], positive; 1 where None.

    Example:
        >>> import numpy as np
        >>> tables = make(jnp.array([3.0, 1.0, 5.0]), jnp.array([0, 0, 1]), np.array([2, 1]))
        >>> print(tables.middle, tables.start, tables.center)
        [0.5 1.5 0.5] [0 2 3] [2. 5.]
    """
    start = np.concatenate([[0], np.cumsum(sizes)])
    ranks = [_bin_ranks(int(size)) for size in sizes]
    first = np.concatenate([[0], np.cumsum([len(each) for each in ranks])])
    at_ends = np.concatenate(ranks) - 1 + np.repeat(start[:-1], np.diff(first))
    # The ends are padded to a power of 2, so that groups of other sizes rarely need another program. No group has the
    # padding.
    at_ends = np.pad(at_ends, (0, (1 << int(len(at_ends) - 1).bit_length()) - len(at_ends)), mode="edge")
    whole = lambda numbers: jax.device_put(numbers.astype(np.int32))
    return _make(values, whole(np.asarray(group)), weights, whole(start), whole(at_ends), whole(first))


_bin_ranks = lru_cache(smoothing.bin_ranks)


@jax.jit
def _make(
    values: OfValues,
    group: Int[JaxArray, " m"],
    weights: OfValues | None,
    start: Starts,
    at_ends: Int[JaxArray, " b"],
    first: Starts,
) -> LinearTables:
    number = start.shape[0] - 1
    weights = jnp.ones_like(values) if weights is None else weights.astype(values.dtype)
    group, values, weights = jax.lax.sort((group, values, weights), num_keys=2)
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    is_first, is_last = place == start[group], place == start[group + 1] - 1
    group_sums = partial(jax.ops.segment_sum, segment_ids=group, num_segments=number, indices_are_sorted=True)
    total = group_sums(weights)
    center, deviations, spread = moments(values, weights, group, total)
    z = deviations / jnp.where(spread > 0, spread, 1)[group]
    middle = sums_within(weights, is_first) - weights / 2
    # The difference between each value and the value before it; 0 for the first value of a table.
    step = lambda each: jnp.where(is_first, 0, jnp.diff(each, prepend=each[:1]))
    width, rise, before = step(z), step(middle), lambda each: each - step(each)
    rest = total[group] - middle
    # The means of 1, f and f^2 between each value and the value before it, for f that is linear there.
    powers = lambda f: jnp.stack([jnp.ones_like(f), (before(f) + f) / 2, _mean_square(before(f), f)], axis=1)
    # The integrals from each value on are sums of the steps behind it, from the last value backwards.
    behind = jnp.where(is_last[:, None], 0, jnp.roll(width[:, None] * powers(rest), -1, axis=0))
    steps = jnp.stack([width[:, None] * powers(middle), behind[::-1]])
    below, above = jax.vmap(sums_within)(steps, jnp.stack([is_first, is_last[::-1]]))
    levels = GroupLevels(z, middle, start, total)
    return LinearTables(
        values=z,
        middle=middle,
        start=start,
        total=total,
        center=center,
        spread=spread,
        below=below,
        above=above[::-1],
        moments=group_sums(rise[:, None] * powers(z)[:, 1:]),
        density=_density(levels, spread, group, at_ends, first),
    )


def _density(
    levels: GroupLevels,
    spread: Float[JaxArray, " groups"],
    group: Int[JaxArray, " m"],
    at_ends: Int[JaxArray, " b"],
    first: Starts,
) -> _Density:
    """The bins that end at these places."""
    numbers = jnp.arange(spread.shape[0], dtype=jnp.int32)
    low, center, high = (quantile(levels, numbers, jnp.full_like(spread, p)) for p in (0.25, 0.5, 0.75))
    # Where half of the values are equal, the other values give the unit, by the std about the median.
    std = jnp.where(spread > 0, linalg.root_sum_squares(jnp.ones_like(center), center), 0)
    unit = jnp.where(high > low, (high - low) / (2 * smoothing.LOGISTIC_QUARTILE), std / smoothing.LOGISTIC_STD)
    group = group[at_ends]
    ends = (levels.values[at_ends] - center[group]) / jnp.where(unit > 0, unit, 1)[group]
    middle = levels.middle[at_ends]
    before = jnp.maximum(jnp.arange(at_ends.shape[0]) - 1, 0)
    inside = (jnp.arange(at_ends.shape[0]) > first[group]) & (ends > ends[before])
    log_mass = _log(jnp.where(inside, middle - middle[before], 1))
    log_logistic = smoothing.log_logistic_mass(jnp.where(inside, ends[before], -1), jnp.where(inside, ends, 1))
    return _Density(ends, first, jnp.where(inside, log_mass - log_logistic, 0), center, unit)


def cdf(
    tables: LinearTables, group: GroupOfRows, u: OfRows, new_weight: OfRows | None = None, tails: str = "constant"
) -> OfRows:
    """The level of u, in units of its group, in each row's table.

    Args:
        tables: of `make`.
        group: the number of each row's group.
        u: values [n].
        new_weight: w; the mean of the group's weights where None.
        tails: "constant" or "normal".

    Example:
        >>> import numpy as np
        >>> tables = make(jnp.array([-1.0, 1.0]), jnp.array([0, 0]), np.array([2]))
        >>> print(cdf(tables, jnp.array([0, 0]), jnp.array([0.0, -2.0])))
        [0.5 0. ]
    """
    xp = namespace(tables.values, u)
    half, whole, start, end = _rows(tables, group, new_weight)
    middle, after = _read(tables.values, tables.middle, start, end, u)
    level = (middle + half) / whole
    is_below, is_above = after == start, after == end
    if tails == "constant":
        return xp.where(is_below, 0, xp.where(is_above, 1, level))
    upper, mass, bound, x = _nearest_end(tables, group, u, half, whole)
    tail = mass * normal_tail.survival(x, bound)
    return xp.where(is_below, tail, xp.where(is_above & upper, 1 - tail, level))


def quantile(
    tables: GroupLevels, group: GroupOfRows, p: OfRows, new_weight: OfRows | None = None, tails: str = "constant"
) -> OfRows:
    """The quantile of each row's table at levels p in [0, 1], in units of its group; the arguments are as for `cdf`.

    Example:
        >>> import numpy as np
        >>> tables = make(jnp.array([-1.0, 1.0]), jnp.array([0, 0]), np.array([2]))
        >>> print(quantile(tables, jnp.array([0, 0]), jnp.array([0.5, 0.9])))
        [0. 1.]
    """
    xp = namespace(tables.values, p)
    half, whole, start, end = _rows(tables, group, new_weight)
    z, after = _read(tables.middle, tables.values, start, end, p * whole - half)
    if tails == "constant":
        return z
    upper = p > 0.5
    fraction = xp.where(upper, 1 - p, p)
    mass, bound = _end(tables, group, upper, half, whole)
    beyond, possible = (after == start) | (after == end), fraction > 0
    part = xp.where(mass > 0, fraction / xp.where(mass > 0, mass, 1), 1)
    x = normal_tail.quantile(xp.where(beyond & possible, linalg.snapped(part, xp.minimum(part, 1)), 1), bound)
    x = xp.where(possible, x, np.inf)
    return xp.where(beyond, xp.where(upper, x, -x), z)


def mean_and_std(
    tables: LinearTables, group: GroupOfRows, new_weight: OfRows | None = None, tails: str = "constant"
) -> tuple[OfRows, OfRows]:
    """The mean and the std of each row's table, in units of its group; the arguments are as for `cdf`."""
    xp = namespace(tables.values)
    half, whole, *_ = _rows(tables, group, new_weight)
    mean, square = (tables.moments[group, k] / whole for k in range(2))
    for upper in (False, True):
        mass, bound = _end(tables, group, xp.full(whole.shape, upper), half, whole)
        excess, excess_square = (xp.zeros_like(bound),) * 2 if tails == "constant" else normal_tail.excess(bound)
        # The part beyond an end adds mass E[b + e] to the mean and mass E[(b + e)^2] to the mean square.
        mean = mean + (1 if upper else -1) * mass * (bound + excess)
        square = square + mass * (bound**2 + 2 * bound * excess + excess_square)
    return mean, linalg.sqrt(xp.maximum(square - mean**2, 0))


def crps(
    tables: LinearTables, group: GroupOfRows, u: OfRows, new_weight: OfRows | None = None, tails: str = "constant"
) -> OfRows:
    """CRPS of each row's table at u, in units of its group; the arguments are as for `cdf`.

    It is the integral of cdf^2 up to u plus the integral of (1 - cdf)^2 from u on. Sums of both between the values are
    known in advance.
    """
    xp = namespace(tables.values, u)
    half, whole, start, end = _rows(tables, group, new_weight)
    inner = xp.clip(u, tables.values[start], tables.values[end - 1])
    middle, after = _read(tables.values, tables.middle, start, end, inner)
    left = xp.maximum(after - 1, start)
    # cdf^2 = (half^2 + 2 half middle + middle^2) / whole^2, and (1 - cdf)^2 is the same with total - middle.
    powers = xp.stack([half**2, 2 * half, xp.ones_like(half)], axis=1) / (whole**2)[:, None]
    between = ((tables.below[left] + tables.above[left]) * powers).sum(1)
    levels = middle + half, tables.middle[left] + half
    score = between + (inner - tables.values[left]) * (sum(levels) / whole - 1)
    _, mass, bound, x = _nearest_end(tables, group, u, half, whole)
    score = score + x - bound
    if tails == "constant":
        return score
    ends = [_end(tables, group, xp.full(whole.shape, side), half, whole) for side in (False, True)]
    inside = sum(mass**2 * normal_tail.square_of_survival(bound) for mass, bound in ends)
    beyond = mass * (normal_tail.excess(bound)[0] - normal_tail.survival(x, bound) * normal_tail.excess(x)[0])
    return score + inside - 2 * beyond


def log_density(tables: LinearTables, group: GroupOfRows, u: OfRows, new_weight: OfRows | None = None) -> OfRows:
    """The log density at u of a smoothed version of each row's table, in units of its group.

    It is the density of `functional.smoothing.sample_log_density`, for every group and with weights. It is -inf where
    all values of a table are equal, and finite everywhere for all other tables.
    """
    xp = namespace(tables.values, u)
    half, whole, *_ = _rows(tables, group, new_weight)
    bins = tables.density
    start, end, unit = bins.first[group], bins.first[group + 1], bins.unit[group]
    x = (u - bins.center[group]) / xp.where(unit > 0, unit, 1)
    after = places_upto(bins.ends, start, end, x)
    mass, _ = _end(tables, group, after == end, half, whole)
    outermost = xp.where(after == end, -bins.ends[end - 1], bins.ends[start])
    in_tail = _log(mass * whole) - smoothing.log_sigmoid(outermost)
    inside = (after > start) & (after < end)
    ratio = xp.where(inside, bins.log_ratio[xp.minimum(after, end - 1)], in_tail) - xp.log(whole)
    log_density = smoothing.log_sigmoid(x) + smoothing.log_sigmoid(-x) + ratio - xp.log(xp.where(unit > 0, unit, 1))
    return xp.where(unit > 0, log_density, -np.inf)


def _rows(tables: GroupLevels, group: GroupOfRows, new_weight: OfRows | None) -> tuple[JaxArray, ...]:
    """w / 2 and W + w of every row, and where the table of its group begins and ends."""
    start, end, total = tables.start[group], tables.start[group + 1], tables.total[group]
    new = total / (end - start).astype(total.dtype) if new_weight is None else new_weight
    return new / 2, total + new, start, end


def _read(
    keys: OfValues, answers: OfValues, start: Int[JaxArray, " n"], end: Int[JaxArray, " n"], u: OfRows
) -> tuple[OfRows, Int[JaxArray, " n"]]:
    """The answer at u, linear between the keys of a table and constant beyond them; and the place behind u."""
    xp = namespace(keys, u)
    after = places_upto(keys, start, end, u)
    right = xp.clip(after, start, end - 1)
    left = xp.clip(after - 1, start, end - 1)
    width = keys[right] - keys[left]
    part = (u - keys[left]) / xp.where(width > 0, width, 1)
    part = xp.where(width > 0, linalg.snapped(part, xp.clip(part, 0, 1)), 0)
    return answers[left] + part * (answers[right] - answers[left]), after


def _end(
    tables: GroupLevels, group: GroupOfRows, upper: Bool[JaxArray, " n"], half: OfRows, whole: OfRows
) -> tuple[OfRows, OfRows]:
    """The mass beyond the upper or lower outermost value of each row's table, and this value, negated if lower."""
    xp, first, last = namespace(half), tables.start[group], tables.start[group + 1] - 1
    outside = xp.where(upper, tables.total[group] - tables.middle[last], tables.middle[first])
    return (outside + half) / whole, xp.where(upper, tables.values[last], -tables.values[first])


def _nearest_end(
    tables: GroupLevels, group: GroupOfRows, u: OfRows, half: OfRows, whole: OfRows
) -> tuple[JaxArray, ...]:
    """Whether u reaches the upper end, the mass and the end on u's side, and u (negated if lower), at least the end."""
    xp = namespace(tables.values, u)
    upper = u >= tables.values[tables.start[group + 1] - 1]
    mass, end = _end(tables, group, upper, half, whole)
    return upper, mass, end, xp.maximum(xp.where(upper, u, -u), end)


def _log(mass: JaxArray) -> JaxArray:
    """The logarithm; -inf, with a derivative of 0, where the rows have weight 0."""
    xp = namespace(mass)
    return xp.where(mass > 0, xp.log(xp.where(mass > 0, mass, 1)), -np.inf)


def _mean_square(a: JaxArray, b: JaxArray) -> JaxArray:
    """The mean square of a function that is linear from a to b."""
    return (a * a + a * b + b * b) / 3
