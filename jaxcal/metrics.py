"""What predictive distributions are worth: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`: targets [n] and a `Distribution` of n rows in, one number out; `pit`
and `observed_fractions` return arrays. `weights` [n] say how much each row counts, in means over rows and in empirical
distribution functions; they are not negative. All are pure and may be called inside `jit`, and under `vmap` over runs.
Lower is better, except for `improvement_ratio`, where higher is, and for `coverage`, `worst_group_coverage` and
`worst_slab_coverage`, which should be near the confidence level.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal._numpy import JaxArray, is_working, namespace, numpy_or_jit
from jaxcal.distributions import (
    Concatenated,
    CrossConformal,
    Distribution,
    Empirical,
    Mixture,
    Normal,
    Point,
    Quantiles,
    Recalibrated,
    ScaledQuantiles,
    StudentT,
)
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import linalg, scores

Scalar = Float[JaxArray, ""]
Weights = Real[ArrayLike, " n"] | None
P = ParamSpec("P")


def _in_numpy(y: ArrayLike, distribution: Distribution, *_: Any, **__: Any) -> bool:
    """Whether NumPy knows the methods of a distribution."""
    return distribution._in_numpy


def _metric(
    formula: Callable[Concatenate[Float[JaxArray, " n"], Distribution, P], Scalar],
) -> Callable[Concatenate[ArrayLike, Distribution, P], Scalar]:
    """The metric of a formula: the targets are checked where their values are known, the rest is one program."""
    answer = numpy_or_jit(formula, when=_in_numpy)

    @wraps(formula)
    def metric(y: ArrayLike, distribution: Distribution, *args: P.args, **options: P.kwargs) -> Scalar:
        y = _as_targets(y, distribution)
        options["weights"] = _checks.as_weights(options.get("weights"), y.shape[0])
        return answer(y, distribution, *args, **options)

    return metric


# Errors of the mean, and proper scores


@_metric
def rmse(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root mean squared error of the predicted mean, in the unit of y.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(f"{jc.metrics.rmse(np.array([3.0, 4.0]), jc.Point(np.zeros(2))):.3f}")
        3.536
    """
    return linalg.root_mean_square(y - distribution.mean, weights)


@_metric
def mae(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Mean absolute error of the predicted mean, in the unit of y."""
    return linalg.weighted_mean(abs(y - distribution.mean), weights)


@_metric
def nlpd(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Negative log predictive density, -mean log p(y), in nats.

    It is infinite for distributions without a density: `Point`, and `Empirical`, which `crude`, `conformal` without a
    rule and its rule="randomized" give; a `Mixture` of these; and for `Quantiles`, and `ScaledQuantiles` with constant
    tails that are not of a sample, where a target lies beyond the outermost quantiles. Of `isotonic` and `conformal`
    with rule="linear" the density is that of a smoothed version (`log_prob` of `ScaledQuantiles`, `Recalibrated`).

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(f"{jc.metrics.nlpd(np.zeros(2), jc.Normal(np.zeros(2), 1.0)):.4f}")  # log(2 pi) / 2
        0.9189
    """
    return -linalg.weighted_mean(distribution.log_prob(y), weights)


@_metric
def crps(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Continuous ranked probability score, the mean over rows of ∫ (F(t) - 1{t >= y})² dt, in the unit of y.

    For a `Point` it is the mean absolute error (Gneiting and Raftery 2007, eq. 20).
    """
    return linalg.weighted_mean(distribution.crps(y), weights)


def interval_score(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Interval score of the central interval [l, u], in the unit of y.

    The mean over rows of (u - l) + 2/a max(l - y, 0) + 2/a max(y - u, 0) with a = 1 - confidence_level
    (Gneiting and Raftery 2007, eq. 43): narrow intervals are rewarded, misses fined by their distance.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    confidence_level = _checks.as_fraction("confidence_level", confidence_level)
    lower, upper = distribution.interval(confidence_level)
    weights = _checks.as_weights(weights, y.shape[0])
    return linalg.weighted_mean(scores.interval_score(y, lower, upper, confidence_level), weights)


def pinball(y: ArrayLike, distribution: Distribution, levels: ArrayLike, *, weights: Weights = None) -> Scalar:
    """Pinball loss of the quantiles q_p at one level p or at several, in the unit of y.

    The mean over rows and levels of max(p (y - q_p), (p - 1)(y - q_p)) (Koenker and Bassett 1978).

    Raises:
        ValueError: if a level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    _checks.check_fraction("levels", levels)
    levels = _checks.as_vector("levels", jnp.atleast_1d(_checks.as_floats("levels", levels)))
    weights = _checks.as_weights(weights, y.shape[0])
    return _pinball(y, distribution, levels.astype(_dtype(y, distribution)), weights)


@eqx.filter_jit
def _pinball(
    y: Float[JaxArray, " n"], distribution: Distribution, levels: Float[JaxArray, " k"], weights: Weights
) -> Scalar:
    def loss(level: Scalar) -> Scalar:
        return linalg.weighted_mean(scores.pinball(y, distribution.icdf(level), level), weights)

    # Level by level: the quantiles of a million rows at 99 levels would fill 800 MB.
    return jnp.mean(jax.lax.map(loss, levels))


def improvement_ratio(y: ArrayLike, before: Distribution, after: Distribution, *, weights: Weights = None) -> Scalar:
    """Fraction of rows whose predicted mean moved nearer to the truth, |y - after| < |y - before|.

    A row whose error did not change counts as not improved, so a correction that leaves all as it was has
    ratio 0 (Qiu, Meyerson and Miikkulainen, ICLR 2020: "Improvement Ratio", the number of successful
    corrections over the number of rows). Higher is better.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> before, after = jc.Point(np.ones(4)), jc.Point(np.array([0.5, 1.0, -1.0, 0.0]))
        >>> print(jc.metrics.improvement_ratio(np.zeros(4), before, after))
        0.5
    """
    y = _as_targets(y, before)
    y = _as_targets(y, after)
    improved = jnp.abs(y - after.mean) < jnp.abs(y - before.mean)
    return _share(improved, _dtype(y, after), _checks.as_weights(weights, y.shape[0]))


# Calibration


def pit(y: ArrayLike, distribution: Distribution) -> Float[JaxArray, " n"]:
    """Probability integral transform F(y) of every row [n]: uniform on (0, 1) for a calibrated forecast."""
    return distribution.cdf(_as_targets(y, distribution))


def observed_fractions(
    y: ArrayLike, distribution: Distribution, levels: ArrayLike, *, closed: bool = False, weights: Weights = None
) -> Float[JaxArray, " k"]:
    """Fraction of the targets below the predicted quantile of every level: the curve of a reliability diagram.

    The fraction at level p is mean 1{y < F⁻¹(p)} (CRUDE eq. 11, USNRT eq. 9), with `closed` 1{y <= F⁻¹(p)}
    (Sharp-GP eq. 9). Memory stays O(n) for any number of levels.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        levels: probabilities [k] in [0, 1]. At 0 and 1 the quantiles of an unbounded distribution are infinite, so
            that its fractions there are 0 and 1.
        closed: whether a target that equals the quantile counts.
        weights: of the rows [n].

    Raises:
        ValueError: if a level lies outside [0, 1].

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y, levels = np.array([-3.0, -1.0, 1.0, 3.0]), np.array([0.0, 0.1, 0.5, 1.0])
        >>> print(jc.metrics.observed_fractions(y, jc.Normal(np.zeros(4), 1.0), levels))
        [0.   0.25 0.5  1.  ]
    """
    y = _as_targets(y, distribution)
    levels = _checks.as_vector("levels", levels)
    if not _checks.is_traced(levels):
        known = np.asarray(levels)
        if ((known < 0) | (known > 1)).any():
            raise ValueError(f"levels must lie between 0 and 1; got {known}.")
    weights = _checks.as_weights(weights, y.shape[0])
    return _observed_fractions(y, distribution, levels.astype(_dtype(y, distribution)), closed, weights)


@numpy_or_jit(when=_in_numpy)
def _observed_fractions(
    y: Float[JaxArray, " n"], distribution: Distribution, levels: Float[JaxArray, " k"], closed: bool, weights: Weights
) -> Float[JaxArray, " k"]:
    is_below = _below_quantile(y, distribution, operator.le if closed else operator.lt)
    return _one_by_one(lambda level: _share(is_below(level), levels.dtype, weights), levels)


def _one_by_one(function: Callable[[JaxArray], JaxArray], values: JaxArray) -> JaxArray:
    """The function over the leading axis, in the memory of one."""
    stack: Any = np.stack
    return stack([function(value) for value in values]) if is_working() else jax.lax.map(function, values)


def _below_quantile(
    y: Float[JaxArray, " n"], distribution: Distribution, less: Callable
) -> Callable[[Scalar], Bool[JaxArray, " n"]]:
    """A function that says for a level which rows lie below their quantile of that level.

    The definitions are by quantile, and ties with atoms count: so compare with the quantile. Only where that
    is the root of a continuous cdf, and expensive, is the cdf at y compared with the level instead: these are the
    same rows, at one evaluation for all levels.
    """
    if not _is_continuous_without_closed_quantiles(distribution):
        return lambda level: less(y, distribution.icdf(level))
    values = distribution.cdf(y)
    # A cdf that rounds to 0 or 1 far out must not put y beyond an infinite quantile.
    return lambda level: jnp.where((level > 0) & (level < 1), less(values, level), level >= 1)


def _is_continuous_without_closed_quantiles(distribution: Distribution) -> bool:
    if isinstance(distribution, Mixture):
        return isinstance(distribution.components, Normal | StudentT)
    if isinstance(distribution, Recalibrated):
        return distribution.steps is None and _is_continuous_without_closed_quantiles(distribution.base)
    return isinstance(distribution, StudentT)


def coverage(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Fraction of the targets inside the central interval, l <= y <= u; it should equal `confidence_level`.

    The interval is closed, as in conformal guarantees. A `Point` covers only what it hits exactly.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(jc.metrics.coverage(np.array([0.0, 1.0, 2.0, 1.5]), jc.Normal(np.zeros(4), 1.0)))
        0.75
    """
    y = _as_targets(y, distribution)
    return _share_inside(y, *distribution.interval(confidence_level), weights=_checks.as_weights(weights, y.shape[0]))


@numpy_or_jit
def _share_inside(
    y: Float[JaxArray, " n"], lower: Float[JaxArray, " n"], upper: Float[JaxArray, " n"], weights: Weights
) -> Scalar:
    return _share((lower <= y) & (y <= upper), jnp.result_type(y, lower), weights)


@_metric
def ece(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Expected calibration error over 99 levels, in percent: USNRT eq. 9-10.

    100/99 sum_k |mean 1{y < F⁻¹(t_k)} - t_k|, t_k = 0.01, ..., 0.99 (Ma, Yan and Zhang). It is not 0 for a
    perfect model: with n rows its mean is about 31/sqrt(n). At levels beyond those of `Quantiles` the outermost one
    counts, without a warning.
    """
    return _ece(_curve(y, distribution, _PERCENTS, weights))


def calibrated_ece(num_rows: int) -> float:
    """The expected calibration error, in percent, that calibrated forecasts stay below in 19 of 20 cases.

    It is simulated: of a calibrated forecast the number of independent rows between quantiles at levels 0.01, ...,
    0.99 is multinomial. The 95 % quantile of 4,000 such draws, with a fixed seed.

    Args:
        num_rows: the number of rows n.

    Raises:
        ValueError: if there is no row.

    Example:
        >>> calibrated_ece(100) > 4 * calibrated_ece(10_000) > 0
        True
    """
    _checks.check_at_least("num_rows", num_rows, 1)
    counts = np.random.default_rng(0).multinomial(num_rows, np.full(100, 0.01), size=4000)
    below = np.cumsum(counts, axis=1)[:, :-1] / num_rows
    errors = 100 * np.abs(below - np.arange(1, 100) / 100).mean(axis=1)
    return float(np.quantile(errors, 0.95))


@_metric
def tce(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Tail-interval calibration error, in percent: USNRT eq. 11-12.

    The mean over t = 0.05, 0.1, 0.15, 0.2 of 100 |mean 1{F⁻¹(t) < y < F⁻¹(1 - t)} - (1 - 2t)|, intervals
    open: how far the coverages of the 90, 80, 70 and 60 % intervals are off (Ma, Yan and Zhang).
    """
    return _tce(_curve(y, distribution, _TAILS, weights))


@_metric
def calibration_rmse(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root mean squared distance of the reliability curve from the diagonal, a fraction: CRUDE eq. 11-12.

    sqrt(1/100 sum_j (mean 1{y < F⁻¹(p_j)} - p_j)²) over the 101 levels p_j = j/100: as printed, 101 terms are
    divided by 100. The end levels add nothing if the distribution is unbounded (Zelikman et al. 2020).
    """
    return _calibration_rmse(_curve(y, distribution, _PERCENTS, weights))


@_metric
def calibration_sse(
    y: Float[JaxArray, " n"], distribution: Distribution, *, num_levels: int = 21, weights: Weights = None
) -> Scalar:
    """Sum of squared distances of the reliability curve from the diagonal: Sharp-GP eq. 8-9.

    sum_j (p_j - mean 1{y <= F⁻¹(p_j)})² over levels p_j evenly spaced from 0 to 1, both included (Capone,
    Hirche and Pleiss, NeurIPS 2023). Equation 8 is this **sum**; the "ECE" of the paper's Table 1 is the
    **mean** over the 21 levels: `calibration_sse(y, distribution) / 21`.

    Raises:
        ValueError: if there are fewer than 2 levels.
    """
    _checks.check_at_least("num_levels", num_levels, 2)
    levels = namespace(y).asarray(np.arange(num_levels) / (num_levels - 1), _dtype(y, distribution))
    return ((observed_fractions(y, distribution, levels, closed=True, weights=weights) - levels) ** 2).sum()


# Levels t in percent whose curve, with 1 - t, the metrics above take: every level, and those of the tails.
_PERCENTS, _TAILS = tuple(range(51)), (5, 10, 15, 20)


class _Curve(NamedTuple):
    """Fractions of the targets at levels t, at most a half, and 1 - t.

    Attributes:
        levels: [2, k], t and 1 - t.
        below: [2, k], of y < F⁻¹(level).
        at_most: [2, k], of y <= F⁻¹(level).
        between: [k], of F⁻¹(t) < y < F⁻¹(1 - t).
    """

    levels: Float[JaxArray, "2 k"]
    below: Float[JaxArray, "2 k"]
    at_most: Float[JaxArray, "2 k"]
    between: Float[JaxArray, " k"]


def _curve(y: Float[JaxArray, " n"], distribution: Distribution, percents: tuple[int, ...], weights: Weights) -> _Curve:
    """The curve at t of so many percent: one pass over the quantiles, in O(n) memory."""
    xp, low, dtype = namespace(y), np.array(percents), _dtype(y, distribution)
    levels = xp.asarray(np.stack([low, 100 - low]) / 100, dtype)
    is_below, is_at_most = (_below_quantile(y, distribution, less) for less in (operator.lt, operator.le))

    def fractions(pair: Float[JaxArray, " 2"]) -> Float[JaxArray, " 5"]:
        below, at_most = ([of(level) for level in pair] for of in (is_below, is_at_most))
        rows = [*below, *at_most, below[1] & ~at_most[0]]
        return xp.stack([_share(each, dtype, weights) for each in rows])

    found = _one_by_one(fractions, levels.T).T
    return _Curve(levels, found[:2], found[2:4], found[4])


def _ece(curve: _Curve) -> Scalar:
    return 100 * _in_order(abs(curve.below - curve.levels))[1:-1].mean()


def _tce(curve: _Curve) -> Scalar:
    return 100 * abs(curve.between - (curve.levels[1] - curve.levels[0])).mean()


def _calibration_rmse(curve: _Curve) -> Scalar:
    return linalg.sqrt((_in_order(curve.below - curve.levels) ** 2).sum() / 100)


def _in_order(values: Float[JaxArray, "2 k"]) -> Float[JaxArray, " levels"]:
    """Values at levels t and 1 - t, up to a half, as values at increasing levels."""
    return namespace(values).concatenate([values[0], values[1, -2::-1]])


@_metric
def max_calibration_error(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Largest distance of the reliability curve from the diagonal, in percent: ACCRUE's "Cal. err.".

    100 sup |C(phi) - phi|, where C is the empirical cdf of the PIT values, without binning: both sides of
    every jump count (Camporeale and Carè 2021, sections 3 and 5). It is the Kolmogorov-Smirnov statistic of
    uniformity, and about 83/sqrt(n) for a perfect model.
    """
    xp, values = namespace(y), pit(y, distribution)
    num_rows = values.shape[0]
    if weights is None:
        values, steps = xp.sort(values), xp.arange(num_rows + 1, dtype=values.dtype) / num_rows
    else:
        order = xp.argsort(values)
        values, steps = values[order], xp.cumsum(linalg.fractions_of(weights, values.dtype)[order])
        steps = xp.concatenate([xp.zeros(1, values.dtype), steps])
    return 100 * xp.maximum(xp.max(steps[1:] - values), xp.max(values - steps[:-1]))


@_metric
def ence(
    y: Float[JaxArray, " n"], distribution: Distribution, *, num_bins: int = 10, weights: Weights = None
) -> Scalar:
    """Expected normalized calibration error of the predicted standard deviation, a fraction.

    The rows are sorted by predicted std into bins of equal size (to one row), and |RMV - RMSE| / RMV is
    averaged over the bins, with RMV the root of the bin's mean predicted variance and RMSE that of its mean
    squared error (Levi et al., Sensors 2022). Rows of equal std keep their order. With fewer rows than bins
    every row is a bin. With weights the bins have equal weight, and those without any do not count. A bin that
    predicts no variance adds infinity, unless it makes no error.

    Raises:
        ValueError: if there is less than one bin.
    """
    _checks.check_at_least("num_bins", num_bins, 1)
    num_rows = y.shape[0]
    num_bins = min(num_bins, num_rows)
    xp = namespace(y)
    order = xp.argsort(distribution.std, stable=True)
    bins, counts = np.arange(num_rows) * num_bins // num_rows, xp.ones(num_rows, y.dtype)
    if weights is not None:
        counts = linalg.fractions_of(weights, y.dtype)[order]
        # What rounding puts just below the edge of a bin lies on it.
        before = num_bins * (xp.cumsum(counts) - counts + num_rows * float(np.finfo(y.dtype).eps))
        bins = xp.clip(before, 0, num_bins - 1).astype(np.int32)

    def bin_sums(values: Float[JaxArray, " n"]) -> Float[JaxArray, " bins"]:
        of_rows = counts * values[order]
        if is_working():
            count: Any = np.bincount
            return count(bins, of_rows, num_bins).astype(y.dtype)
        return jax.ops.segment_sum(of_rows, bins, num_segments=num_bins, indices_are_sorted=True)

    # Both are root means over the same rows of the bin: the counts cancel in the ratio.
    std, errors = distribution.std, y - distribution.mean
    unit = linalg.scale_of(std, errors)
    root_variance = linalg.sqrt(bin_sums((std / unit) ** 2))
    root_error = linalg.sqrt(bin_sums((errors / unit) ** 2))
    gap = abs(root_variance - root_error)
    ratios = xp.where(gap == 0, 0, gap / xp.where(gap == 0, 1, root_variance))
    return linalg.weighted_mean(ratios, (bin_sums(xp.ones_like(std)) > 0).astype(std.dtype))


# Sharpness


def mean_width(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Mean width of the central interval, in the unit of y; 0 for a `Point`.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    return _mean_difference(*distribution.interval(confidence_level), weights=_checks.as_weights(weights, y.shape[0]))


@numpy_or_jit
def _mean_difference(lower: Float[JaxArray, " n"], upper: Float[JaxArray, " n"], weights: Weights) -> Scalar:
    return linalg.weighted_mean(upper - lower, weights)


@_metric
def sharpness(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root of the mean predicted variance, in the unit of y (CRUDE, section 4: Zelikman et al. 2020)."""
    return linalg.root_mean_square(distribution.std, weights)


@_metric
def mean_std(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Mean predicted standard deviation, in the unit of y; USNRT's sharpness (eq. 13) is 100 times this."""
    return linalg.weighted_mean(distribution.std, weights)


# All at once


class Scores(dict[Any, Any]):
    """Metrics by name, or those of groups by label: a `dict` that prints a line for each, and why NLPD is infinite.

    Attributes:
        why: why NLPD is infinite, where it is; not kept by transformations of JAX, for which this is as a `dict`.
    """

    def __init__(self, values: Mapping, why: str = ""):
        super().__init__(values)
        self.why = why

    def __repr__(self) -> str:
        """A line for each."""
        return "\n".join(_lines(self))


def _lines(scores: Scores) -> Iterator[str]:
    width = 2 + max((len(str(name)) for name in scores), default=0)
    for name, value in scores.items():
        if isinstance(value, Scores):
            yield from (f"{name}:", *(f"  {line}" for line in _lines(value)))
            continue
        is_known_number = not _checks.is_traced(value) and np.ndim(value) == 0
        shown = f"{float(value):.4g}" if is_known_number else str(value)
        yield f"{name:{width}}{shown}" + (f": {scores.why}" if name == "nlpd" and shown == "inf" and scores.why else "")


jax.tree_util.register_pytree_with_keys(
    Scores,
    lambda scores: ([(jax.tree_util.DictKey(name), value) for name, value in scores.items()], tuple(scores)),
    lambda names, values: Scores(dict(zip(names, values, strict=True))),
)


@overload
def evaluate(
    y: ArrayLike, distribution: Distribution, *, weights: Weights = None, by: None = None
) -> dict[str, Scalar]: ...
@overload
def evaluate(
    y: ArrayLike, distribution: Distribution, *, weights: Weights = None, by: ArrayLike | Sequence
) -> dict[Any, dict[str, Scalar | int]]: ...
def evaluate(
    y: ArrayLike, distribution: Distribution, *, weights: Weights = None, by: ArrayLike | Sequence | None = None
) -> dict[str, Scalar] | dict[Any, dict[str, Scalar | int]]:
    """Every metric that needs no parameter, by name, with intervals at 90 %; `print` shows a line for each.

    Where NLPD is infinite, its line says why.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        weights: of the rows [n].
        by: labels of groups [n], numbers or strings: the metrics of every group, by its label, and how many "rows" it
            has. The cost grows with the number of groups.

    Raises:
        TypeError: if `by` is traced.
        ValueError: if y is not a vector of n finite numbers, a predicted standard deviation is negative, a weight is
            negative or all of a group are 0, or `by` is not of n labels.

    Warns:
        UserWarning: as `Distribution.interval` does, if the interval at 90 % is beyond what the distribution knows.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.array([1.0, 2.0])
        >>> scores = jc.metrics.evaluate(y, jc.Normal(y, 1.0))
        >>> print(scores["rmse"], scores["coverage_90"])
        0.0 1.0
        >>> print(jc.metrics.evaluate(y, jc.Normal(y + [0, 3], 1.0), by=["left", "right"])["right"]["rmse"])
        3.0
        >>> print(str(jc.metrics.evaluate(y, jc.Point(y))).splitlines()[2])
        nlpd                   inf: Point has no density
    """
    y = _as_targets(y, distribution)
    _check_std(distribution)
    weights = _checks.as_weights(weights, y.shape[0])
    lower, upper = distribution.interval(0.9)
    if by is None:
        values = _evaluate(y, distribution, lower, upper, weights)
        (why,) = _why_infinite(values.nlpd, y, distribution, weights, np.zeros(y.shape, int))
        return Scores(values._asdict(), why)
    labels, number = _groups(by, weights, y)
    values = _evaluate_groups(y, distribution, lower, upper, number, weights, len(labels))
    why, rows = _why_infinite(values.nlpd, y, distribution, weights, number), np.bincount(number).tolist()
    of_group = lambda k: {name: value[k] for name, value in values._asdict().items()}
    return Scores({label: Scores({"rows": rows[k], **of_group(k)}, why[k]) for k, label in enumerate(labels)})


class _Evaluated(NamedTuple):
    """What `evaluate` gives, in this order; of groups [groups]."""

    rmse: Float[JaxArray, "*groups"]
    mae: Float[JaxArray, "*groups"]
    nlpd: Float[JaxArray, "*groups"]
    crps: Float[JaxArray, "*groups"]
    interval_score_90: Float[JaxArray, "*groups"]
    coverage_90: Float[JaxArray, "*groups"]
    ece: Float[JaxArray, "*groups"]
    tce: Float[JaxArray, "*groups"]
    calibration_rmse: Float[JaxArray, "*groups"]
    calibration_sse: Float[JaxArray, "*groups"]
    max_calibration_error: Float[JaxArray, "*groups"]
    ence: Float[JaxArray, "*groups"]
    width_90: Float[JaxArray, "*groups"]
    sharpness: Float[JaxArray, "*groups"]
    mean_std: Float[JaxArray, "*groups"]


@numpy_or_jit(when=_in_numpy)
def _evaluate(
    y: Float[JaxArray, " n"],
    distribution: Distribution,
    lower: Float[JaxArray, " n"],
    upper: Float[JaxArray, " n"],
    weights: Weights,
) -> _Evaluated:
    """All metrics, with one interval and one curve for those that take them."""
    curve = _curve(y, distribution, _PERCENTS, weights)
    of_rows = lambda metric: metric(y, distribution, weights=weights)
    return _Evaluated(
        rmse=of_rows(rmse),
        mae=of_rows(mae),
        nlpd=of_rows(nlpd),
        crps=of_rows(crps),
        interval_score_90=linalg.weighted_mean(scores.interval_score(y, lower, upper, 0.9), weights),
        coverage_90=_share_inside(y, lower, upper, weights),
        ece=_ece(curve),
        tce=_tce(jax.tree.map(lambda values: values[..., np.array(_TAILS)], curve)),
        calibration_rmse=_calibration_rmse(curve),
        calibration_sse=(_in_order(curve.at_most - curve.levels)[::5] ** 2).sum(),
        max_calibration_error=of_rows(max_calibration_error),
        ence=of_rows(ence),
        width_90=_mean_difference(lower, upper, weights),
        sharpness=of_rows(sharpness),
        mean_std=of_rows(mean_std),
    )


@eqx.filter_jit
def _evaluate_groups(
    y: Float[JaxArray, " n"],
    distribution: Distribution,
    lower: Float[JaxArray, " n"],
    upper: Float[JaxArray, " n"],
    number: Int[ArrayLike, " n"],
    weights: Weights,
    groups: int,
) -> _Evaluated:
    of_group = lambda weights: _evaluate(y, distribution, lower, upper, weights)
    return _map_groups(of_group, number, weights, groups, y.dtype)


def _why_infinite(
    nlpd: Float[JaxArray, "*groups"],
    y: Float[JaxArray, " n"],
    distribution: Distribution,
    weights: Weights,
    number: Int[ArrayLike, " n"],
) -> list[str]:
    """Why the NLPD of each group is infinite: no density at all, or not at some targets; "" of one that is not."""
    if _checks.is_traced(nlpd) or not (infinite := np.isposinf(np.atleast_1d(nlpd))).any():
        return [""] * nlpd.size
    kinds = _kinds(distribution)
    if kinds <= _ATOMS:
        names = dict.fromkeys([type(distribution).__name__, *sorted(kind.__name__ for kind in kinds)])
        return [f"{' of '.join(names)} has no density" if is_one else "" for is_one in infinite]
    counts = np.ones(y.shape, bool) if weights is None else np.asarray(weights) > 0
    without = counts & np.isneginf(distribution.log_prob(y))
    where = "at or beyond the outermost quantiles" if kinds <= _BETWEEN_QUANTILES else "where there is no density"

    def reason(group: int) -> str:
        own = number == group
        rows = np.flatnonzero(without & own)
        if not len(rows):  # a finite density, whose mean is out of the range of its dtype
            return ""
        return f"{len(rows)} of {(counts & own).sum()} targets lie {where}, the first at index {rows[0]}"

    return [reason(group) if is_one else "" for group, is_one in enumerate(infinite)]


# Distributions without a density, and those whose density ends at their outermost quantiles.
_ATOMS = {Point, Empirical, CrossConformal}
_BETWEEN_QUANTILES = {Quantiles, ScaledQuantiles}


def _kinds(distribution: Distribution) -> set[type]:
    """The classes of the distributions that it is made of."""
    if isinstance(distribution, Mixture):
        return _kinds(distribution.components)
    if isinstance(distribution, Recalibrated):
        return _kinds(distribution.base if distribution.steps is None else distribution.steps)
    if isinstance(distribution, Concatenated):
        return set().union(*map(_kinds, distribution.parts))
    return {type(distribution)}


def worst_group_coverage(
    y: ArrayLike,
    distribution: Distribution,
    by: ArrayLike | Sequence,
    *,
    confidence_level: ArrayLike = 0.9,
    weights: Weights = None,
) -> Scalar:
    """The least coverage of the central interval over the groups with these labels.

    Also of exact intervals it is less than the confidence level: it is the least of several random fractions.
    `evaluate(y, distribution, by=by)` has the coverage at 90 % of every group, and how many rows it has.

    Raises:
        TypeError, ValueError: as `evaluate` and `coverage` do.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y, distribution = np.array([0.0, 1.0, 9.0]), jc.Normal(np.zeros(3), 1.0)
        >>> print(jc.metrics.worst_group_coverage(y, distribution, [0, 1, 1]))
        0.5
    """
    y = _as_targets(y, distribution)
    weights = _checks.as_weights(weights, y.shape[0])
    labels, number = _groups(by, weights, y)
    return _worst_coverage(y, *distribution.interval(confidence_level), number, weights, len(labels))


@eqx.filter_jit
def _worst_coverage(
    y: Float[Array, " n"],
    lower: Float[Array, " n"],
    upper: Float[Array, " n"],
    number: Int[ArrayLike, " n"],
    weights: Weights,
    groups: int,
) -> Scalar:
    coverage = lambda weights: _share_inside(y, lower, upper, weights)
    return _map_groups(coverage, number, weights, groups, y.dtype).min()


def _groups(by: ArrayLike | Sequence, weights: Weights, y: Float[Array, " n"]) -> tuple[list, np.ndarray]:
    """The labels of the groups, and the number of every row's group.

    Raises:
        ValueError: if the labels are not as many as the rows, or all weights of a group are 0.
    """
    labels, number = np.unique(_checks.as_labels("by", by, y.shape[0]), return_inverse=True)
    if weights is not None:
        _checks.check_weights_of_groups(labels, number, weights)
    return labels.tolist(), number.astype(np.int32)


def _map_groups(
    function: Callable, number: Int[ArrayLike, " n"], weights: Weights, groups: int, dtype: DTypeLike
) -> Any:
    """The function of the weights of every group, one group at a time: 0 where a row is of another group."""
    own = jnp.ones((), dtype) if weights is None else jnp.asarray(weights, dtype)
    return jax.lax.map(lambda k: function(jnp.where(number == k, own, 0)), jnp.arange(groups, dtype=jnp.int32))


def worst_slab_coverage(
    x: ArrayLike,
    y: ArrayLike,
    distribution: Distribution,
    *,
    confidence_level: ArrayLike = 0.9,
    fraction: float = 0.2,
    num_directions: int = 200,
    key: PRNGKeyArray,
) -> Scalar:
    """The coverage of the central interval over the worst slab of inputs, {x: a <= v'x <= b}, that can be found.

    One half of the rows finds, over random directions v of standardized columns, the slab with at least a `fraction`
    of the rows whose coverage is the least; the other half measures the coverage there. So an interval that covers
    equally often everywhere has the coverage of its level in the mean, and one that does not has less.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n].
        distribution: predictions of n rows.
        confidence_level: of the interval.
        fraction: of the rows that a slab holds at least, in (0, 1).
        num_directions: how many directions are tried; the columns themselves are tried as well.
        key: random key of the halves and the directions.

    Raises:
        TypeError: if key is no random key.
        ValueError: as `coverage` does; if `fraction` is out of its range, or there are fewer than 2 / fraction rows.

    Source: Cauchois, Gupta and Duchi, Knowing what you know, JMLR 22 (2021), section 4; in two halves as by Romano,
    Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020, section S1.2.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, 1000)
        >>> y = np.where(x > 0, 2.0, 0.5) * rng.normal(size=1000)
        >>> distribution = jc.Normal(np.zeros(1000), 1.458)  # covers 90 % of all rows
        >>> print(jc.metrics.worst_slab_coverage(x, y, distribution, key=jax.random.key(0)) < 0.85)
        True
    """
    y = _as_targets(y, distribution)
    x = _checks.as_matrix("x", x, length=y.shape[0])
    _checks.check_key(key)
    _checks.check_fraction("fraction", fraction)
    _checks.check_at_least("num_directions", num_directions, 0)
    _checks.check_rows("y", y, math.ceil(2 / fraction))
    lower, upper = distribution.interval(confidence_level)
    return _worst_slab_coverage(x, (lower <= y) & (y <= upper), fraction, num_directions, key)


@eqx.filter_jit
def _worst_slab_coverage(
    x: Float[Array, "n d"], covered: Bool[Array, " n"], fraction: float, num_directions: int, key: PRNGKeyArray
) -> Scalar:
    order_key, key = jax.random.split(key)
    order = jax.random.permutation(order_key, x.shape[0])
    x, covered = Standardizer.of(x)(x)[order], covered[order].astype(x.dtype)
    half = x.shape[0] // 2
    random = jax.random.normal(key, (num_directions, x.shape[1]), x.dtype)
    directions = jnp.concatenate([jnp.eye(x.shape[1], dtype=x.dtype), random])
    shortest = math.ceil(fraction * half)

    def find(direction: Float[Array, " d"]) -> tuple[Scalar, Scalar, Scalar]:
        places = x[:half] @ direction
        rows = jnp.argsort(places)
        least, start, length = scores.least_mean_of_runs(covered[:half][rows], shortest)
        return least, places[rows[start]], places[rows[start + length - 1]]

    least, low, high = jax.lax.map(find, directions)
    worst = jnp.argmin(least)
    places = x[half:] @ directions[worst]
    return linalg.weighted_mean(covered[half:], ((low[worst] <= places) & (places <= high[worst])).astype(x.dtype))


# Helpers


def _as_targets(y: ArrayLike, distribution: Distribution) -> Float[JaxArray, " n"]:
    """The targets as a vector of as many rows as there are predictions."""
    shape = distribution.mean.shape
    if len(shape) != 1:
        raise ValueError(f"A metric takes predictions of shape (n,); got {shape}: use vmap over runs.")
    return _checks.as_vector("y", y, length=shape[0])


def _check_std(distribution: Distribution) -> None:
    if _checks.is_traced(distribution.std):
        return
    std = np.asarray(distribution.std)
    rows = np.flatnonzero(std < 0)
    if rows.size:
        raise ValueError(
            f"The predicted std is negative in {rows.size} rows, the first at index {rows[0]} ({std[rows[0]]:g})."
        )


def _dtype(y: ArrayLike, distribution: Distribution) -> DTypeLike:
    return jnp.result_type(_checks.as_floats("y", y), distribution.mean)


def _share(rows: Bool[JaxArray, " n"], dtype: DTypeLike, weights: Weights = None) -> Scalar:
    if weights is not None:
        return linalg.weighted_mean(rows.astype(dtype), weights)
    # Counted in integers: a float32 sum of ones stops growing at 2^24.
    return namespace(rows).asarray(rows.sum(dtype=np.int32), dtype) / rows.size
