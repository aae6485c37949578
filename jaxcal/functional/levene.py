"""Levene's test for two groups, and an exact search for the split of rows on which it is most significant.

Levene, "Robust tests for equality of variances" (1960), compares the mean absolute deviations of two groups from their
means. Brown and Forsythe, JASA 69 (1974), take the deviations from the medians. Ma, Yan and Zhang, "Improving
Uncertainty Quantification of Variance Networks by Tree-Structured Learning" (2023), compute it for the residuals of a
tree's node (their eq. 5, `statistic`). They split the node where it is largest over all features and thresholds
(eq. 6, `best_split`). `multiplicity` says how large the largest of many statistics may be by chance.

All splits of a feature are tested in O(n log n). A group's deviations e - m from its mean m sum to zero. So the sum of
|e - m| is 2 (m C - S), where C and S are the number and the sum of the residuals below m. C and S are two queries of a
wavelet tree over the ranks of the residuals, listed in the order of the feature.

A median is one or two selections in the tree. When a residual joins a group, the sum of |e - median| grows by the
residual's distance to a median. It is the median of the old group or of the new group, whichever has an odd size.

All nodes of a level of a tree lie side by side in one such list, so one search serves them all. The residuals of a node
have higher ranks than all residuals of the nodes before it, so the queries need not distinguish the nodes.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Real

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import _wavelet, student_t
from jaxcal.functional._loops import over_leading_axis
from jaxcal.functional._nodes import (
    Ranked,
    SplitSearch,
    admissible_cuts,
    by_node,
    centered_deviations,
    layout_of,
    number_of_each,
    over_nodes,
    rank,
)
from jaxcal.functional.quantiles import last_place

# Up to this number of categories all partitions are tried: 32767 of 16 categories.
_MAX_ENUMERATED = 16
_PARTITIONS_AT_ONCE = 1024
# How many features are searched at once on an accelerator. Each search takes the memory of about twenty features.
_AT_ONCE = 16
# Up to this number of rows, NumPy finds the splits in less time than a search takes to compile.
_FEW_ROWS = 20_000


class LeveneSplit(NamedTuple):
    """The best split of a node, or of every node [k]: rows with x[:, feature] <= threshold go left.

    There is no split if none is admissible, or if all of them have statistic 0. Then `feature` is -1, `threshold` is
    infinite, and `num_left`, `statistic` and `log_p` are 0.
    """

    statistic: Float[AnyArray, "*k"]
    """|T|, the statistic's absolute value."""
    feature: Int[AnyArray, "*k"]
    threshold: Float[AnyArray, "*k"]
    """The largest value of the feature on the left."""
    log_p: Float[AnyArray, "*k"]
    """The logarithm of the split's own p-value, without a correction for the other splits."""
    num_left: Int[AnyArray, "*k"]
    num_rows: Int[AnyArray, "*k"]
    log_num_splits: Float[AnyArray, "*k d"]
    """The logarithm of the number of admissible splits of every feature."""

    @property
    def exists(self) -> Bool[AnyArray, "*k"]:
        """Whether there is a split at all."""
        return self.feature >= 0


class Subset(NamedTuple):
    """The best split of a categorical feature: rows whose category is in `left` go left, and all others right."""

    statistic: Float[AnyArray, ""]
    left: Bool[AnyArray, " num_categories"]
    log_p: Float[AnyArray, ""]
    num_left: Int[AnyArray, ""]
    num_rows: Int[AnyArray, ""]
    log_num_splits: Float[AnyArray, ""]
    """The logarithm of the number of partitions among which this one was chosen."""

    @property
    def exists(self) -> Bool[AnyArray, ""]:
        """Whether there is a split at all."""
        return self.num_left > 0


def best_split(
    x: ArrayLike,
    residuals: ArrayLike,
    *,
    min_leaf: int,
    center: str = "median",
    step: int = 1,
    orders: ArrayLike | None = None,
) -> LeveneSplit:
    """The split of all rows with the largest |T|, over all features and all admissible thresholds, exactly.

    A split is admissible if it leaves at least `min_leaf` rows on either side and keeps equal values of its feature
    together. All splits have the same degrees of freedom, so the largest |T| has the least p-value. The search takes
    O(n log n) time per feature, and O(n) memory. It takes one feature after the other, or 16 at once on an accelerator.
    Of equal |T| the first one counts.

    Args:
        x: features [n, d].
        residuals: [n].
        min_leaf: the least number of rows on either side, at least 1.
        center: the center of the deviations, the "mean" or the "median" of the side.
        step: only splits with min_leaf, min_leaf + step, ... rows on the left are candidates (the paper's short cut).
        orders: the `feature_orders` of x, if they are known: sorting takes a sixth of the time.

    Raises:
        ValueError: if the lengths differ, a value is NaN or infinite, or an option is none of those above.

    Source: Ma, Yan and Zhang (2023), eq. 6.

    Example:
        >>> x = jnp.array([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0], [4.0, 0.0], [5.0, 1.0], [6.0, 1.0]])
        >>> split = best_split(x, jnp.array([-1.0, 1.0, -1.1, 8.0, -7.0, 9.0]), min_leaf=2, center="mean")
        >>> int(split.feature), float(split.threshold), int(split.num_left), f"{split.statistic:.2f}"
        (0, 3.0, 3, '3.39')
    """
    return _of_one(_search(SplitSearch.of(x, residuals, orders, None, min_leaf, 1, center, step)))


def best_splits(
    x: ArrayLike,
    residuals: ArrayLike,
    nodes: ArrayLike,
    *,
    num_nodes: int,
    min_leaf: int,
    center: str = "median",
    step: int = 1,
    orders: ArrayLike | None = None,
) -> LeveneSplit:
    """The `best_split` of every node of a level of a tree: one search over all rows, however many nodes they are in.

    Args:
        x: features [n, d].
        residuals: [n].
        nodes: the node of every row, 0 to num_nodes - 1. A row with any other number is in no node: it is in a leaf,
            or it is padding.
        num_nodes: k, the number of nodes.
        min_leaf: the least number of rows on either side, at least 1.
        center: the center of the deviations, the "mean" or the "median" of the side.
        step: only splits with min_leaf, min_leaf + step, ... rows on the left are candidates.
        orders: the `feature_orders` of all of x, if they are known: the same for all levels of a tree.

    Returns:
        the splits of all nodes, [k] of everything.

    Raises:
        ValueError: if the lengths differ, a value is NaN or infinite, or an option is none of those above.

    Example:
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0, 9.0, 8.0, 7.0, 6.0, 0.0])[:, None]
        >>> residuals = jnp.array([-1.0, 1.0, -5.0, 5.0, -1.0, 1.0, -1.2, -4.0, 99.0])
        >>> splits = best_splits(x, residuals, jnp.array([0, 0, 0, 0, 1, 1, 1, 1, -1]), num_nodes=2, min_leaf=1)
        >>> print(splits.feature, splits.threshold, splits.num_left, splits.num_rows)
        [0 0] [2. 7.] [2 2] [4 4]
    """
    return _search(SplitSearch.of(x, residuals, orders, nodes, min_leaf, num_nodes, center, step))


def best_subset(
    categories: ArrayLike, residuals: ArrayLike, *, num_categories: int, min_leaf: int, center: str = "median"
) -> Subset:
    """The split of the categories of a feature in two with the largest |T|.

    Up to 16 categories, all 2^(k-1) - 1 partitions are tried. More categories are put in the order of their mean
    |e - c|, with c the center of all residuals. Then the k - 1 cuts of that order are tried.

    With deviations from a fixed c, the cuts would contain the best partition. The larger the variance between the sides
    is, the larger is |T|. This variance is a convex function of the left side's (number, sum of deviations). Its
    largest value over all sums of some categories' (number, sum) is at a vertex of their convex hull. A vertex consists
    of the categories whose mean deviation is on one side of a threshold.

    With the sides' own centers, or where `min_leaf` forbids the best cut, the cuts may miss the best partition. With 12
    categories and 40 rows of noise they do so in 23 % of problems, down to 0.69 of the largest |T|. In 200 problems of
    400 rows they never do. So 17 and more categories want many rows each.

    Args:
        categories: [n], 0 to num_categories - 1; a row with any other number is not counted.
        residuals: [n].
        num_categories: k, the number of categories.
        min_leaf: the least number of rows on either side, at least 1.
        center: the center of the deviations, the "mean" or the "median" of the side.

    Returns:
        the best partition. Categories without rows are on its right. Up to 16 categories, the first category with rows
        is on its right, too. With more categories, the left has the categories with the lesser deviations.

    Raises:
        ValueError: if the lengths differ, a residual is NaN or infinite, or an option is none of those above.

    Source: Ma, Yan and Zhang (2023), section IV-B; for the order of the categories: Fisher, JASA 53 (1958).

    Example:
        >>> categories = jnp.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
        >>> residuals = jnp.array([-1.0, 0.0, 1.2, 5.0, -6.0, 0.0, 1.0, -1.0, 0.1])
        >>> print(best_subset(categories, residuals, num_categories=3, min_leaf=3).left)
        [False  True False]
    """
    categories = jnp.asarray(categories)
    _checks.check_length("categories", categories, None)
    residuals = _checks.as_vector("residuals", residuals, length=categories.shape[0])
    _checks.check_choice("center", center, ("mean", "median"))
    _checks.check_at_least("num_categories", num_categories, 1)
    _checks.check_at_least("min_leaf", min_leaf, 1)
    search = _best_of_partitions if num_categories <= _MAX_ENUMERATED else _best_of_cuts
    return search(categories, residuals, min_leaf, num_categories, center)


@numpy_or_jit
def feature_orders(x: Real[ArrayLike, "n d"]) -> Int[AnyArray, "d n"]:
    """The row numbers in increasing order of every feature, sorted once for all levels of a tree.

    Example:
        >>> print(feature_orders(jnp.array([[3.0, 0.0], [1.0, 0.0], [2.0, -1.0]])))
        [[1 2 0]
         [2 0 1]]
    """
    columns = _checks.as_floats("x", x).T
    if namespace(columns) is np:
        return np.argsort(columns, axis=1, kind="stable").astype(np.int32)
    return over_leading_axis(_wavelet.float_order, columns, at_once=_AT_ONCE)


@partial(jax.jit, static_argnames="center")
def split_statistics(residuals: Real[ArrayLike, " n"], *, center: str = "median") -> Float[AnyArray, " n-1"]:
    """T of the first i residuals against all others, for every i from 1 to n - 1, in O(n log n).

    Args:
        residuals: [n], in the order of a feature.
        center: the center of the deviations, the "mean" or the "median" of the side.

    Example:
        >>> print(split_statistics(jnp.array([-1.0, 1.0, -1.0, 5.0, -5.0]), center="mean").round(2))
        [ -1.16  -1.36 -14.33   1.1 ]
    """
    _checks.check_choice("center", center, ("mean", "median"))
    residuals = _checks.as_floats("residuals", residuals)
    ranked = rank(residuals, layout_of(None, residuals, 1))
    return _statistics(ranked.residuals, ranked.ranks, ranked, center)[1 : residuals.shape[0]]


@partial(jax.jit, static_argnames="center")
def statistic(
    left: Real[ArrayLike, " n"], right: Real[ArrayLike, " m"], *, center: str = "median"
) -> Float[AnyArray, ""]:
    """Levene's statistic of two groups: T = (mean z_L - mean z_R) / (w sqrt(1 / n + 1 / m)), z = |e - center of e|.

    w^2 is the pooled variance of z. Where the spreads are equal, T is about Student's t with n + m - 2 degrees of
    freedom. Its square is the W of `scipy.stats.levene`. The rounding error bounds w from below, so T is finite where
    all z of either group are equal. Where all residuals are equal, T is 0.

    Args:
        left: residuals [n] of one group, n >= 1.
        right: residuals [m] of the other one, m >= 1.
        center: the center of the deviations, the "mean" or the "median" of the group.

    Source: Ma, Yan and Zhang (2023), eq. 5.

    Example:
        >>> print(f"{statistic(jnp.array([-3.0, 0.0, 3.0]), jnp.array([-1.0, 0.0, 2.0]), center='median'):.4f}")
        0.8660
    """
    _checks.check_choice("center", center, ("mean", "median"))
    of = jnp.median if center == "median" else jnp.mean
    groups = [_checks.as_floats("group", group) for group in (left, right)]
    pooled = jnp.median(jnp.concatenate(groups))
    groups = [group - pooled for group in groups]
    deviations = [jnp.abs(group - of(group)) for group in groups]
    first, second = (_Side(jnp.asarray(z.shape[0], z.dtype), z.sum(), (z**2).sum()) for z in deviations)
    return _statistic(first, second, (groups[0] ** 2).sum() + (groups[1] ** 2).sum())


@numpy_or_jit
def std_ratio(
    residuals: Real[ArrayLike, " n"], sides: Int[ArrayLike, " n"], critical_value: Real[ArrayLike, ""]
) -> tuple[Float[AnyArray, ""], Float[AnyArray, ""], Float[AnyArray, ""]]:
    """The ratio of the residuals' std on the right to their std on the left, and an interval for it.

    The logarithm of the ratio is about normal. Its variance is the sum over both sides of
    (k - (n - 3) / n) / (4 (n - 1)). Here n is the number of rows of a side, and k is the kurtosis of both sides
    together: 3 for normal residuals, 9 for exponential ones. Each side's own kurtosis would be estimated too low, and
    the interval would be too short. The fourth powers are of deviations from the trimmed mean. The interval is valid
    for residuals whose kurtosis is finite and the same on both sides.

    In 2000 problems with 100 rows on either side, intervals of a nominal 95 % cover the ratio as follows:

    - normal residuals: 94 %.
    - Laplace residuals and exponential residuals: 93 %.
    - Student's t residuals with 3 degrees of freedom, which have no kurtosis: 89 %.

    With 60 and 540 rows on the sides, they cover it in 94 to 95 % of all these problems.

    If a search has found the split, the ratio is the largest of many, and 1.96 is too small. A critical value that
    holds for all splits together is `multiplicity.miller_siegmund_quantile`.

    Args:
        residuals: [n].
        sides: of every residual, 0 on the left and 1 on the right; others are not counted.
        critical_value: how many standard errors the interval reaches on either side, 1.96 for a confidence of 95 %.

    Returns:
        the ratio and the two ends of the interval; they are not finite where a side has no variance.

    Source: Bonett, "Approximate confidence interval for standard deviation of nonnormal distributions", Computational
    Statistics & Data Analysis 50 (2006). The paper has one log variance; here it is a difference of two.

    Example:
        >>> residuals = jnp.array([-1.0, 0.5, 0.0, 1.0, -0.5, -2.0, 1.0, 0.0, 2.0, -1.0])
        >>> ratio, low, high = std_ratio(residuals, jnp.arange(10) // 5, 1.96)
        >>> print(f"{ratio:.2f}, {low:.2f} to {high:.2f}")
        2.00, 0.91 to 4.41
    """
    residuals = _checks.as_floats("residuals", residuals)
    xp = namespace(residuals, sides)
    side_moments = [_moments(residuals, xp.equal(sides, side)) for side in (0, 1)]
    number, std, kurtosis = (xp.stack(parts) for parts in zip(*side_moments, strict=True))
    # var(log ratio) = sum of (k - (n - 3) / n) / (4 (n - 1)) over both sides, with the pooled kurtosis k.
    pooled_kurtosis = (number * kurtosis).sum() / number.sum()
    variance = ((pooled_kurtosis - (number - 3) / number) / (4 * (number - 1))).sum()
    log_ratio = xp.log(std[1] / std[0])
    reach = xp.asarray(critical_value, variance.dtype) * xp.sqrt(variance)
    return xp.exp(log_ratio), xp.exp(log_ratio - reach), xp.exp(log_ratio + reach)


def _moments(residuals: AnyArray, is_in: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The number, the std and the kurtosis of some residuals, the latter about a trimmed mean."""
    xp = namespace(residuals)
    number = is_in.sum().astype(residuals.dtype)
    mean_of = lambda values, where: xp.sum(values, where=where) / where.sum().astype(values.dtype)  # NaN without values
    mean = mean_of(residuals, is_in)
    variance = mean_of((residuals - mean) ** 2, is_in)
    # The trimmed mean omits a fraction 1 / (2 sqrt(n - 4)) of the residuals at either end.
    place = xp.arange(residuals.shape[0], dtype=residuals.dtype)
    trimmed = xp.floor(number / (2 * xp.sqrt(xp.maximum(number - 4, 1))))
    kept = (place >= trimmed) & (place < number - trimmed)
    center = mean_of(xp.sort(xp.where(is_in, residuals, xp.inf)), kept)
    kurtosis = mean_of(((residuals - center) ** 2 / variance) ** 2, is_in)
    return number, xp.sqrt(variance * number / (number - 1)), kurtosis


@numpy_or_jit
def log_p_value(statistic: Real[ArrayLike, "*#k"], num_rows: Real[ArrayLike, "*#k"]) -> Float[AnyArray, "*k"]:
    """The logarithm of P(|t| >= |T|) for Student's t with `num_rows` - 2 degrees of freedom, however small.

    Args:
        statistic: T, of either sign.
        num_rows: of both groups together, at least 3.

    Example:
        >>> print(f"{log_p_value(60.0, 30_000):.1f}")
        -1704.2
    """
    size = abs(_checks.as_floats("statistic", statistic))
    xp = namespace(size, num_rows)
    df = xp.maximum(xp.asarray(num_rows, size.dtype) - 2, 1)
    return xp.minimum(math.log(2) + student_t.log_sf(size, df), 0)


class _Side(NamedTuple):
    """The number of a group's deviations from its center, their sum, and the sum of their squares."""

    number: AnyArray
    total: AnyArray
    squares: AnyArray


def _statistic(left: _Side, right: _Side, squares: AnyArray) -> AnyArray:
    """T of eq. 5; `squares`, the sum of the squared residuals about any center, sets the size of the rounding error."""
    # T = (mean z_L - mean z_R) / (w sqrt(1 / n + 1 / m)), w^2 = within / (n + m - 2).
    xp = namespace(squares)
    means = [side.total / side.number for side in (left, right)]
    within = left.squares - left.total * means[0] + (right.squares - right.total * means[1])
    within = xp.maximum(within, 16 * np.finfo(squares.dtype).eps * squares)
    df = xp.maximum(left.number + right.number - 2, 1)
    varies = within > 0
    variance = xp.where(varies, within, 1) / df * (1 / left.number + 1 / right.number)
    return xp.where(varies, (means[0] - means[1]) / xp.sqrt(variance), 0)


def _has_few_rows(problem: SplitSearch) -> bool:
    return problem.x.shape[0] <= _FEW_ROWS


@numpy_or_jit(when=_has_few_rows)
def _search(problem: SplitSearch) -> LeveneSplit:
    """The best split of every node, one feature after the other."""
    layout, xp, num_nodes = problem.layout, namespace(problem.x), problem.num_nodes
    ranked = rank(problem.residuals, layout)

    def search(feature: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, ...]:
        column, order = feature
        order = by_node(order, layout)
        column = column[order]
        size = abs(_statistics(ranked.residuals[order], ranked.ranks[order], ranked, problem.center))
        admissible = admissible_cuts(column, layout, problem.min_leaf, problem.step)
        size = xp.where(admissible, size, -1)
        best = over_nodes("max", size, layout)
        cuts = xp.arange(size.shape[0], dtype=np.int32)
        cut = over_nodes("min", xp.where(size == best[layout.node], cuts, np.int32(size.shape[0])), layout)
        number = over_nodes("sum", admissible.astype(np.int32), layout)
        threshold = column[xp.clip(cut - 1, 0, column.shape[0] - 1)]
        return tuple(part[:num_nodes] for part in (best, cut - layout.first, threshold, number))

    orders = feature_orders(problem.x) if problem.orders is None else problem.orders
    best, num_left, threshold, number = over_leading_axis(search, (problem.x.T, orders), at_once=_AT_ONCE)
    feature = best.argmax(0)
    exists = best.max(0) > 0
    chosen = lambda parts, default: xp.where(exists, xp.take_along_axis(parts, feature[None], 0)[0], default)
    statistic, num_rows = chosen(best, 0), layout.size[:num_nodes]
    return LeveneSplit(
        statistic=statistic,
        feature=xp.where(exists, feature, -1),
        threshold=chosen(threshold, np.inf),
        log_p=log_p_value(statistic, num_rows),
        num_left=chosen(num_left, 0),
        num_rows=num_rows,
        log_num_splits=xp.log(number.T.astype(statistic.dtype)),
    )


def _of_one(split: LeveneSplit) -> LeveneSplit:
    """The split of the only node."""
    return jax.tree.map(lambda part: part[0], split)


def _statistics(residuals: AnyArray, ranks: AnyArray, ranked: Ranked, center: str) -> AnyArray:
    """T of each node's rows before each place [padded] against its other rows; the arguments are in list order."""
    start, end, xp = ranked.layout.start, ranked.layout.end, namespace(residuals)
    cut = xp.arange(start.shape[0], dtype=np.int32)
    numbers = [xp.maximum(number, 1).astype(residuals.dtype) for number in (cut - start, end - cut)]
    sums, squares = (_wavelet.prefix_sums(part) for part in (residuals, residuals**2))
    both_sides = lambda before: (before - before[start], before[end] - before)
    sums_of_sides, squares_of_sides = both_sides(sums), both_sides(squares)
    if center == "mean":
        centers = tuple(total / number for total, number in zip(sums_of_sides, numbers, strict=True))
        deviations = _deviations_from_means(centers, sums, residuals, ranks, ranked)
    else:
        centers, deviations = _deviations_from_medians(residuals, ranks, ranked)
    # The sum of (e - m)^2 is sum e^2 - m (2 sum e - n m).
    left, right = (
        _Side(number, deviation, square - middle * (2 * total - number * middle))
        for number, deviation, square, middle, total in zip(
            numbers, deviations, squares_of_sides, centers, sums_of_sides, strict=True
        )
    )
    return _statistic(left, right, squares_of_sides[0] + squares_of_sides[1])


def _deviations_from_means(
    means: tuple[AnyArray, ...], sums: AnyArray, residuals: AnyArray, ranks: AnyArray, ranked: Ranked
) -> tuple[AnyArray, ...]:
    """The sums of |e - mean| = 2 (mean C - S) on both sides.

    C and S are the number and the sum of the residuals below the mean. On the right, they are the numbers of the node
    minus the numbers of the left.
    """
    layout = ranked.layout
    bounds = [_bound(mean, ranked) for mean in means]
    left, right = _wavelet.count_and_sum_below(ranks, residuals, ranked.sums, bounds)
    count = (left[0] - layout.start).astype(residuals.dtype), (bounds[1] - right[0]).astype(residuals.dtype)
    below = left[1] - sums[layout.start], ranked.sums[bounds[1]] - right[1]
    return tuple(2 * (m * c - s) for m, c, s in zip(means, count, below, strict=True))


def _bound(values: AnyArray, ranked: Ranked) -> AnyArray:
    """The first rank above the ranks of all residuals of the node that are below a value [padded]."""
    start, end = ranked.layout.start, ranked.layout.end
    xp = namespace(values)
    is_below = lambda place: ranked.ordered[xp.maximum(place - 1, 0)] < values
    return last_place(is_below, start, end, ranked.ordered.shape[0])


def _deviations_from_medians(
    residuals: AnyArray, ranks: AnyArray, ranked: Ranked
) -> tuple[tuple[AnyArray, ...], tuple[AnyArray, ...]]:
    """The medians of both sides, and the sums of |e - median|.

    The upper median is looked up for every cut. The lower median is looked up where the size of the side is even.
    """
    start, end, xp = ranked.layout.start, ranked.layout.end, namespace(residuals)
    cut = xp.arange(start.shape[0], dtype=np.int32)
    sizes = cut - start, end - cut
    even = [_even_of_pairs(size) for size in sizes]
    (upper_left, lower_left), (upper_right, lower_right) = _wavelet.select(
        ranks,
        [(cut, start + sizes[0] // 2), (even[0], start[even[0]] + sizes[0][even[0]] // 2 - 1)],
        [(cut, sizes[1] // 2), (even[1], sizes[1][even[1]] // 2 - 1)],
    )
    n, last = residuals.shape[0], ranked.ordered.shape[0] - 1
    value = lambda ranks: ranked.ordered[xp.clip(ranks, 0, last)]
    upper = [value(upper_left), value(upper_right)]
    lower = [value(lower_left)[cut // 2], value(lower_right)[cut // 2]]
    medians = tuple(xp.where(s % 2 == 0, 0.5 * (a + b), b) for s, a, b in zip(sizes, lower, upper, strict=True))
    # A row joins the left of the cut before it, and the right of the cut after it.
    odd_left = xp.where(sizes[0][:n] % 2 == 0, upper[0][1 : n + 1], upper[0][:n])
    odd_right = xp.where(sizes[1][:n] % 2 == 1, upper[1][:n], upper[1][1 : n + 1])
    left, right = (_wavelet.prefix_sums(xp.abs(residuals - odd)) for odd in (odd_left, odd_right))
    return medians, (left - left[start], right[end] - right)


def _even_of_pairs(sizes: AnyArray) -> AnyArray:
    """The cut with an even size in every pair of cuts: 0 and 1, 2 and 3, ..."""
    first = 2 * namespace(sizes).arange(sizes.shape[0] // 2, dtype=np.int32)
    return first + sizes[first] % 2


@partial(jax.jit, static_argnames=("num_categories", "center"))
def _best_of_partitions(
    categories: Int[Array, " n"], residuals: Float[Array, " n"], min_leaf: ArrayLike, num_categories: int, center: str
) -> Subset:
    """The best of all partitions, from prefix sums over the ranks of the residuals, category by category."""
    counted = (categories >= 0) & (categories < num_categories)
    ranked = rank(residuals, layout_of(jnp.where(counted, 0, -1), residuals, 1))
    in_order = _wavelet.moved(categories, ranked.ranks)
    is_category = in_order[None] == jnp.arange(num_categories, dtype=categories.dtype)[:, None]
    values = ranked.ordered[: categories.shape[0]]
    counts = jax.vmap(_wavelet.prefix_sums)(is_category.astype(jnp.int32))
    sums = jax.vmap(_wavelet.prefix_sums)(jnp.where(is_category, values[None], 0))
    squares = jnp.where(is_category, values[None] ** 2, 0).sum(1)
    number = counts[:, -1]
    is_present = number > 0

    def side(is_in: Bool[AnyArray, " num_categories"]) -> _Side:
        of = lambda table: jnp.where(is_in, table, 0).sum(dtype=table.dtype)
        total, size = of(sums[:, -1]), of(number)
        real_size = jnp.maximum(size, 1).astype(total.dtype)
        if center == "mean":
            middle = total / real_size
        else:
            upper, lower = (_select_of_categories(counts, is_in, k) for k in (size // 2, (size - 1) // 2))
            middle = 0.5 * (ranked.ordered[upper] + ranked.ordered[lower])
        # The sum of |e - m| is 2 (m C - S) + sum e - n m. C and S count and sum the residuals below m.
        bound = jnp.searchsorted(values, middle)
        below = middle * of(counts[:, bound]).astype(total.dtype) - of(sums[:, bound])
        deviations = 2 * below + total - middle * real_size
        return _Side(real_size, deviations, of(squares) - middle * (2 * total - middle * real_size))

    def partition(number_of_mask: AnyArray) -> tuple[AnyArray, AnyArray]:
        """|T| of a partition, and whether it counts: one of two complements does, if all its categories have rows."""
        is_in = mask_of(number_of_mask)
        left, right = side(is_in), side(~is_in)
        distinct = is_in.any() & ~(is_in & ~is_present).any() & ~is_in[is_present.argmax()]
        admissible = distinct & (left.number >= min_leaf) & (right.number >= min_leaf)
        return jnp.where(admissible, jnp.abs(_statistic(left, right, squares.sum())), 0), admissible

    # The first category is always on the right.
    mask_of = lambda number: (2 * number >> jnp.arange(num_categories)) & 1 == 1
    masks = jnp.arange(2 ** (num_categories - 1))
    sizes, admissible = lax.map(partition, masks, batch_size=min(masks.shape[0], _PARTITIONS_AT_ONCE))
    best = sizes.argmax()
    exists = sizes[best] > 0
    left = mask_of(masks[best]) & exists
    num_left, num_rows = (each.sum(dtype=jnp.int32) for each in (jnp.where(left, number, 0), number))
    log_num_splits = jnp.log(admissible.sum().astype(residuals.dtype))
    return Subset(
        statistic=sizes[best],
        left=left,
        log_p=log_p_value(sizes[best], num_rows),
        num_left=num_left,
        num_rows=num_rows,
        log_num_splits=log_num_splits,
    )


@partial(jax.jit, static_argnames=("num_categories", "center"))
def _best_of_cuts(
    categories: Int[Array, " n"], residuals: Float[Array, " n"], min_leaf: ArrayLike, num_categories: int, center: str
) -> Subset:
    """The best cut of the categories in the order of their mean deviations: a split by their place in this order."""
    counted = (categories >= 0) & (categories < num_categories)
    nodes = jnp.where(counted, 0, -1)
    layout = layout_of(nodes, residuals, 1)
    deviations = centered_deviations(rank(residuals, layout).residuals, layout, center)
    bins = jnp.where(counted, categories, num_categories)
    number = number_of_each(bins, num_categories + 1)[:-1]
    total = jax.ops.segment_sum(deviations, bins, num_categories + 1)[:-1]
    means = jnp.where(number > 0, total / jnp.maximum(number, 1), jnp.inf)
    place = jnp.argsort(jnp.argsort(means)).astype(residuals.dtype)
    x = jnp.pad(place, (0, 1))[bins][:, None]
    problem = SplitSearch(
        x, residuals, orders=None, nodes=nodes, min_leaf=jnp.asarray(min_leaf), num_nodes=1, center=center, step=1
    )
    split = _of_one(_search(problem))
    left = (place <= split.threshold) & (number > 0) & split.exists
    # The order was chosen by the residuals, so the best cut counts as the best of all 2^(k - 1) - 1 partitions.
    doublings = jnp.maximum((number > 0).sum() - 1, 0).astype(residuals.dtype)
    log_num_splits = doublings * math.log(2) + jnp.log1p(-jnp.exp2(-doublings))
    log_num_splits = jnp.where(jnp.isfinite(split.log_num_splits[0]), log_num_splits, -jnp.inf)
    return Subset(
        statistic=split.statistic,
        left=left,
        log_p=split.log_p,
        num_left=split.num_left,
        num_rows=split.num_rows,
        log_num_splits=log_num_splits,
    )


def _select_of_categories(counts: AnyArray, is_in: AnyArray, k: AnyArray) -> AnyArray:
    """The k-th smallest rank of the residuals of some categories, by bisection of their prefix counts."""
    is_before = lambda place: jnp.where(is_in, counts[:, place], 0).sum(dtype=k.dtype) <= k
    return last_place(is_before, jnp.zeros_like(k), counts.shape[1] - 1, counts.shape[1])
