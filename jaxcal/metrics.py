"""What predictive distributions are worth: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`: targets [n] and a `Distribution` of n rows in, one number out.
All are pure and may be called inside `jit`, and under `vmap` over runs. Lower is better, but for `coverage`,
which should equal its confidence level, and `improvement_ratio`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxcal import _checks
from jaxcal.distributions import Distribution, Mixture, Normal, Recalibrated, StudentT
from jaxcal.functional import linalg, scores

Scalar = Float[Array, ""]
P = ParamSpec("P")


def _metric(
    formula: Callable[Concatenate[Float[Array, " n"], Distribution, P], Scalar],
) -> Callable[Concatenate[ArrayLike, Distribution, P], Scalar]:
    """The metric of a formula: the targets are checked where their values are known, the rest is one program."""
    compiled = eqx.filter_jit(formula)

    @wraps(formula)
    def metric(y: ArrayLike, distribution: Distribution, *args: P.args, **options: P.kwargs) -> Scalar:
        return compiled(_as_targets(y, distribution), distribution, *args, **options)

    return metric


# Errors of the mean, and proper scores


@_metric
def rmse(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Root mean squared error of the predicted mean, in the unit of y.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(f"{jc.metrics.rmse(np.array([3.0, 4.0]), jc.Point(np.zeros(2))):.3f}")
        3.536
    """
    return linalg.root_mean_square(y - distribution.mean)


@_metric
def mae(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Mean absolute error of the predicted mean, in the unit of y."""
    return jnp.mean(jnp.abs(y - distribution.mean))


@_metric
def nlpd(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
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
    return -jnp.mean(distribution.log_prob(y))


@_metric
def crps(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Continuous ranked probability score, the mean over rows of ∫ (F(t) - 1{t >= y})² dt, in the unit of y.

    For a `Point` it is the mean absolute error (Gneiting and Raftery 2007, eq. 20).
    """
    return jnp.mean(distribution.crps(y))


def interval_score(y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9) -> Scalar:
    """Interval score of the central interval [l, u], in the unit of y.

    The mean over rows of (u - l) + 2/a max(l - y, 0) + 2/a max(y - u, 0) with a = 1 - confidence_level
    (Gneiting and Raftery 2007, eq. 43): narrow intervals are rewarded, misses fined by their distance.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    lower, upper = distribution.interval(confidence_level)
    return jnp.mean(scores.interval_score(y, lower, upper, confidence_level))


def pinball(y: ArrayLike, distribution: Distribution, levels: ArrayLike) -> Scalar:
    """Pinball loss of the quantiles q_p at one level p or at several, in the unit of y.

    The mean over rows and levels of max(p (y - q_p), (p - 1)(y - q_p)) (Koenker and Bassett 1978).

    Raises:
        ValueError: if a level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    _checks.check_fraction("levels", levels)
    levels = _checks.as_vector("levels", jnp.atleast_1d(_checks.as_floats("levels", levels)))
    return _pinball(y, distribution, levels.astype(_dtype(y, distribution)))


@eqx.filter_jit
def _pinball(y: Float[Array, " n"], distribution: Distribution, levels: Float[Array, " k"]) -> Scalar:
    def loss(level: Scalar) -> Scalar:
        return jnp.mean(scores.pinball(y, distribution.icdf(level), level))

    # Level by level: the quantiles of a million rows at 99 levels would fill 800 MB.
    return jnp.mean(jax.lax.map(loss, levels))


def improvement_ratio(y: ArrayLike, before: Distribution, after: Distribution) -> Scalar:
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
    return _share(improved, _dtype(y, after))


# Calibration


def pit(y: ArrayLike, distribution: Distribution) -> Float[Array, " n"]:
    """Probability integral transform F(y) of every row [n]: uniform on (0, 1) for a calibrated forecast."""
    return distribution.cdf(_as_targets(y, distribution))


def observed_fractions(
    y: ArrayLike, distribution: Distribution, levels: ArrayLike, *, closed: bool = False
) -> Float[Array, " k"]:
    """Fraction of the targets below the predicted quantile of every level: the curve of a reliability diagram.

    The fraction at level p is mean 1{y < F⁻¹(p)} (CRUDE eq. 11, USNRT eq. 9), with `closed` 1{y <= F⁻¹(p)}
    (Sharp-GP eq. 9). Memory stays O(n) for any number of levels.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        levels: probabilities [k] in [0, 1]. At 0 and 1 the quantiles of an unbounded distribution are infinite, so
            that its fractions there are 0 and 1.
        closed: whether a target that equals the quantile counts.

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
    if not _checks.is_traced(levels) and ((levels < 0) | (levels > 1)).any():
        raise ValueError(f"levels must lie between 0 and 1; got {np.asarray(levels)}.")
    return _observed_fractions(y, distribution, levels.astype(_dtype(y, distribution)), closed)


@eqx.filter_jit
def _observed_fractions(
    y: Float[Array, " n"], distribution: Distribution, levels: Float[Array, " k"], closed: bool
) -> Float[Array, " k"]:
    is_below = _below_quantile(y, distribution, jnp.less_equal if closed else jnp.less)
    return jax.lax.map(lambda level: _share(is_below(level), levels.dtype), levels)


def _below_quantile(
    y: Float[Array, " n"], distribution: Distribution, less: Callable
) -> Callable[[Scalar], Bool[Array, " n"]]:
    """A function that tells for a level which rows lie below their quantile of that level.

    The definitions are by quantile, and ties with atoms count: so compare with the quantile. Only where that
    is the root of a continuous cdf, and dear, is the cdf at y compared with the level instead: these are the
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
        return _is_continuous_without_closed_quantiles(distribution.base)
    return isinstance(distribution, StudentT)


def coverage(y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9) -> Scalar:
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
    return _share_inside(y, *distribution.interval(confidence_level))


@jax.jit
def _share_inside(y: Float[Array, " n"], lower: Float[Array, " n"], upper: Float[Array, " n"]) -> Scalar:
    return _share((lower <= y) & (y <= upper), jnp.result_type(y, lower))


@_metric
def ece(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Expected calibration error over 99 levels, in percent: USNRT eq. 9-10.

    100/99 sum_k |mean 1{y < F⁻¹(t_k)} - t_k|, t_k = 0.01, ..., 0.99 (Ma, Yan and Zhang). It is not 0 for a
    perfect model: with n rows its mean is about 31/sqrt(n).
    """
    levels = _levels(range(1, 100), y, distribution)
    return 100 * jnp.mean(jnp.abs(observed_fractions(y, distribution, levels) - levels))


@_metric
def tce(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Tail-interval calibration error, in percent: USNRT eq. 11-12.

    The mean over t = 0.05, 0.1, 0.15, 0.2 of 100 |mean 1{F⁻¹(t) < y < F⁻¹(1 - t)} - (1 - 2t)|, intervals
    open: how far the coverages of the 90, 80, 70 and 60 % intervals are off (Ma, Yan and Zhang).
    """
    lows, highs = _levels((5, 10, 15, 20), y, distribution), _levels((95, 90, 85, 80), y, distribution)
    return 100 * jnp.mean(jnp.abs(_shares_between(y, distribution, lows, highs) - (highs - lows)))


@eqx.filter_jit
def _shares_between(
    y: Float[Array, " n"], distribution: Distribution, lows: Float[Array, " k"], highs: Float[Array, " k"]
) -> Float[Array, " k"]:
    def fraction(levels: tuple[Scalar, Scalar]) -> Scalar:
        lower, upper = (distribution.icdf(level) for level in levels)
        return _share((lower < y) & (y < upper), y.dtype)

    return jax.lax.map(fraction, (lows, highs))


@_metric
def calibration_rmse(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Root mean squared distance of the reliability curve from the diagonal, a fraction: CRUDE eq. 11-12.

    sqrt(1/100 sum_j (mean 1{y < F⁻¹(p_j)} - p_j)²) over the 101 levels p_j = j/100: as printed, 101 terms are
    divided by 100. The end levels add nothing if the distribution is unbounded (Zelikman et al. 2020).
    """
    levels = _levels(range(101), y, distribution)
    gaps = observed_fractions(y, distribution, levels) - levels
    return linalg.sqrt(jnp.sum(gaps**2) / 100)


@_metric
def calibration_sse(y: Float[Array, " n"], distribution: Distribution, *, num_levels: int = 21) -> Scalar:
    """Sum of squared distances of the reliability curve from the diagonal: Sharp-GP eq. 8-9.

    sum_j (p_j - mean 1{y <= F⁻¹(p_j)})² over levels p_j evenly spaced from 0 to 1, both included (Capone,
    Hirche and Pleiss, NeurIPS 2023). Equation 8 is this **sum**; the "ECE" of the paper's Table 1 is the
    **mean** over the 21 levels: `calibration_sse(y, distribution) / 21`.

    Raises:
        ValueError: if there are fewer than 2 levels.
    """
    _checks.check_at_least("num_levels", num_levels, 2)
    levels = jnp.linspace(0, 1, num_levels, dtype=_dtype(y, distribution))
    return jnp.sum((observed_fractions(y, distribution, levels, closed=True) - levels) ** 2)


@_metric
def max_calibration_error(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Largest distance of the reliability curve from the diagonal, in percent: ACCRUE's "Cal. err.".

    100 sup |C(phi) - phi|, where C is the empirical cdf of the PIT values, without binning: both sides of
    every jump count (Camporeale and Carè 2021, sections 3 and 5). It is the Kolmogorov-Smirnov statistic of
    uniformity, and about 83/sqrt(n) for a perfect model.
    """
    values = jnp.sort(pit(y, distribution))
    num_rows = values.shape[0]
    after_jump = (jnp.arange(1, num_rows + 1) / num_rows).astype(values.dtype)
    before_jump = (jnp.arange(num_rows) / num_rows).astype(values.dtype)
    return 100 * jnp.maximum(jnp.max(after_jump - values), jnp.max(values - before_jump))


@_metric
def ence(y: Float[Array, " n"], distribution: Distribution, *, num_bins: int = 10) -> Scalar:
    """Expected normalized calibration error of the predicted standard deviation, a fraction.

    The rows are sorted by predicted std into bins of equal size (to one row), and |RMV - RMSE| / RMV is
    averaged over the bins, with RMV the root of the bin's mean predicted variance and RMSE that of its mean
    squared error (Levi et al., Sensors 2022). Rows of equal std keep their order. With fewer rows than bins
    every row is a bin. A bin that predicts no variance adds infinity, unless it makes no error.

    Raises:
        ValueError: if there is less than one bin.
    """
    _checks.check_at_least("num_bins", num_bins, 1)
    num_rows = y.shape[0]
    num_bins = min(num_bins, num_rows)
    order = jnp.argsort(distribution.std, stable=True)
    bins = np.arange(num_rows) * num_bins // num_rows

    def bin_sums(values: Float[Array, " n"]) -> Float[Array, " bins"]:
        return jax.ops.segment_sum(values[order], bins, num_segments=num_bins, indices_are_sorted=True)

    # Both are root means over the same rows of the bin: the counts cancel in the ratio.
    std, errors = distribution.std, y - distribution.mean
    unit = linalg.scale_of(std, errors)
    root_variance = linalg.sqrt(bin_sums((std / unit) ** 2))
    root_error = linalg.sqrt(bin_sums((errors / unit) ** 2))
    gap = jnp.abs(root_variance - root_error)
    return jnp.mean(jnp.where(gap == 0, 0, gap / jnp.where(gap == 0, 1, root_variance)))


# Sharpness


def mean_width(y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9) -> Scalar:
    """Mean width of the central interval, in the unit of y; 0 for a `Point`.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = _as_targets(y, distribution)
    return _mean_difference(*distribution.interval(confidence_level))


@jax.jit
def _mean_difference(lower: Float[Array, " n"], upper: Float[Array, " n"]) -> Scalar:
    return jnp.mean(upper - lower)


@_metric
def sharpness(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Root of the mean predicted variance, in the unit of y (CRUDE, section 4: Zelikman et al. 2020)."""
    return linalg.root_mean_square(distribution.std)


@_metric
def mean_std(y: Float[Array, " n"], distribution: Distribution) -> Scalar:
    """Mean predicted standard deviation, in the unit of y; USNRT's sharpness (eq. 13) is 100 times this."""
    return jnp.mean(distribution.std)


# All at once

_METRICS: dict[str, Callable[[ArrayLike, Distribution], Scalar]] = {
    "rmse": rmse,
    "mae": mae,
    "nlpd": nlpd,
    "crps": crps,
    "interval_score_90": interval_score,
    "coverage_90": coverage,
    "ece": ece,
    "tce": tce,
    "calibration_rmse": calibration_rmse,
    "calibration_sse": calibration_sse,
    "max_calibration_error": max_calibration_error,
    "ence": ence,
    "width_90": mean_width,
    "sharpness": sharpness,
    "mean_std": mean_std,
}


def evaluate(y: ArrayLike, distribution: Distribution) -> dict[str, Scalar]:
    """Every metric that needs no parameter, by name, with intervals at 90 %, compiled as one function.

    Args:
        y: targets [n].
        distribution: predictions of n rows.

    Raises:
        ValueError: if y is not a vector of n finite numbers, or a predicted standard deviation is negative.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.array([1.0, 2.0])
        >>> scores = jc.metrics.evaluate(y, jc.Normal(y, 1.0))
        >>> print(scores["rmse"], scores["coverage_90"])
        0.0 1.0
    """
    y = _as_targets(y, distribution)
    _check_std(distribution)
    values = _evaluate(y, distribution)
    return {name: values[name] for name in _METRICS}  # jit sorts the keys of a dict


@eqx.filter_jit
def _evaluate(y: Float[Array, " n"], distribution: Distribution) -> dict[str, Scalar]:
    return {name: metric(y, distribution) for name, metric in _METRICS.items()}


# Helpers


def _as_targets(y: ArrayLike, distribution: Distribution) -> Float[Array, " n"]:
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


def _levels(percents: range | tuple[int, ...], y: ArrayLike, distribution: Distribution) -> Float[Array, " k"]:
    return jnp.asarray(np.array(percents) / 100, dtype=_dtype(y, distribution))


def _share(rows: Bool[Array, " n"], dtype: DTypeLike) -> Scalar:
    # Counted in integers: a float32 sum of ones stops growing at 2^24.
    return jnp.count_nonzero(rows).astype(dtype) / rows.size
