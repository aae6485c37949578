"""Whether predicted probabilities are observed frequencies: PIT, reliability curves, coverage, calibration errors."""

import operator
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Float

from jaxcal import _checks
from jaxcal._numpy import JaxArray, is_working, namespace, numpy_or_jit
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg
from jaxcal.metrics._common import (
    PERCENTS,
    TAILS,
    Scalar,
    Weights,
    as_metric,
    as_targets,
    below_quantile,
    calibration_rmse_of,
    curve_of,
    dtype_of,
    ece_of,
    in_numpy,
    one_by_one,
    share,
    share_inside,
    tce_of,
)


def pit(y: ArrayLike, distribution: Distribution) -> Float[JaxArray, " n"]:
    """Probability integral transform F(y) of every row [n]: uniform on (0, 1) for a calibrated forecast."""
    return distribution.cdf(as_targets(y, distribution))


def observed_fractions(
    y: ArrayLike, distribution: Distribution, levels: ArrayLike, *, closed: bool = False, weights: Weights = None
) -> Float[JaxArray, " k"]:
    """Fraction of the targets below the predicted quantile of every level: the curve of a reliability diagram.

    The fraction at level p is mean 1{y < F⁻¹(p)} (CRUDE eq. 11, USNRT eq. 9). With `closed` it is
    mean 1{y <= F⁻¹(p)} (Sharp-GP eq. 9). Memory stays O(n) for any number of levels.

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
    y = as_targets(y, distribution)
    levels = _checks.as_vector("levels", levels)
    if not _checks.is_traced(levels):
        known = np.asarray(levels)
        if ((known < 0) | (known > 1)).any():
            raise ValueError(f"levels must lie between 0 and 1; got {known}.")
    weights = _checks.as_weights(weights, y.shape[0])
    return _observed_fractions(y, distribution, levels.astype(dtype_of(y, distribution)), closed, weights)


@numpy_or_jit(when=in_numpy)
def _observed_fractions(
    y: Float[JaxArray, " n"], distribution: Distribution, levels: Float[JaxArray, " k"], closed: bool, weights: Weights
) -> Float[JaxArray, " k"]:
    is_below = below_quantile(y, distribution, operator.le if closed else operator.lt)
    return one_by_one(lambda level: share(is_below(level), levels.dtype, weights), levels)


def coverage(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Fraction of the targets inside the central interval, l <= y <= u; it should equal `confidence_level`.

    The interval is closed, as in conformal guarantees. A `Point` covers only targets that it hits exactly.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(jc.metrics.coverage(np.array([0.0, 1.0, 2.0, 1.5]), jc.Normal(np.zeros(4), 1.0)))
        0.75
    """
    y = as_targets(y, distribution)
    return share_inside(y, distribution.interval(confidence_level), _checks.as_weights(weights, y.shape[0]))


@as_metric
def ece(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Expected calibration error over 99 levels, in percent: USNRT eq. 9-10.

    100/99 sum_k |mean 1{y < F⁻¹(t_k)} - t_k|, t_k = 0.01, ..., 0.99 (Ma, Yan and Zhang). It is not 0 for a
    perfect model: with n rows its mean is about 31/sqrt(n). At levels beyond the levels of `Quantiles`, the outermost
    quantile counts, without a warning.
    """
    return ece_of(curve_of(y, distribution, PERCENTS, weights))


def calibrated_ece(num_rows: int) -> float:
    """The expected calibration error, in percent, that calibrated forecasts stay below in 19 of 20 cases.

    It is simulated. For a calibrated forecast, the numbers of independent rows between quantiles at levels 0.01, ...,
    0.99 are multinomial. The result is the 95 % quantile of 4,000 such draws, with a fixed seed.

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


@as_metric
def tce(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Tail-interval calibration error, in percent: USNRT eq. 11-12.

    It is the mean over t = 0.05, 0.1, 0.15, 0.2 of 100 |mean 1{F⁻¹(t) < y < F⁻¹(1 - t)} - (1 - 2t)|. This says how
    far the coverages of the 90, 80, 70 and 60 % intervals are off (Ma, Yan and Zhang). The intervals are open.
    """
    return tce_of(curve_of(y, distribution, TAILS, weights))


@as_metric
def calibration_rmse(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root mean squared distance of the reliability curve from the diagonal, a fraction: CRUDE eq. 11-12.

    sqrt(1/100 sum_j (mean 1{y < F⁻¹(p_j)} - p_j)²) over the 101 levels p_j = j/100: as printed, 101 terms are
    divided by 100. The end levels add nothing if the distribution is unbounded (Zelikman et al. 2020).
    """
    return calibration_rmse_of(curve_of(y, distribution, PERCENTS, weights))


@as_metric
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
    levels = namespace(y).asarray(np.arange(num_levels) / (num_levels - 1), dtype_of(y, distribution))
    return ((observed_fractions(y, distribution, levels, closed=True, weights=weights) - levels) ** 2).sum()


@as_metric
def max_calibration_error(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Largest distance of the reliability curve from the diagonal, in percent: ACCRUE's "Cal. err.".

    It is 100 sup |C(phi) - phi|, where C is the empirical cdf of the PIT values, without binning. Both sides of
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


@as_metric
def ence(
    y: Float[JaxArray, " n"], distribution: Distribution, *, num_bins: int = 10, weights: Weights = None
) -> Scalar:
    """Expected normalized calibration error of the predicted standard deviation, a fraction.

    The rows are sorted by predicted std into bins of equal size (to one row). Then |RMV - RMSE| / RMV is averaged
    over the bins. RMV is the root of the bin's mean predicted variance, and RMSE is the root of its mean squared
    error (Levi et al., Sensors 2022). Rows of equal std keep their order. With fewer rows than bins, every row is a
    bin. With weights, the bins have equal weight, and bins without weight do not count. A bin that predicts no
    variance adds infinity, unless it makes no error.

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
        # A row that rounding puts directly below the edge of a bin counts as on the edge.
        before = num_bins * (xp.cumsum(counts) - counts + num_rows * float(np.finfo(y.dtype).eps))
        bins = xp.clip(before, 0, num_bins - 1).astype(np.int32)

    def bin_sums(values: Float[JaxArray, " n"]) -> Float[JaxArray, " bins"]:
        weighted_values = counts * values[order]
        if is_working():
            count: Any = np.bincount
            return count(bins, weighted_values, num_bins).astype(y.dtype)
        return jax.ops.segment_sum(weighted_values, bins, num_segments=num_bins, indices_are_sorted=True)

    # RMV and RMSE are root means over the same rows of the bin, so the counts cancel in the ratio.
    std, errors = distribution.std, y - distribution.mean
    unit = linalg.scale_of(std, errors)
    root_variance = linalg.sqrt(bin_sums((std / unit) ** 2))
    root_error = linalg.sqrt(bin_sums((errors / unit) ** 2))
    gap = abs(root_variance - root_error)
    ratios = xp.where(gap == 0, 0, gap / xp.where(gap == 0, 1, root_variance))
    return linalg.weighted_mean(ratios, (bin_sums(xp.ones_like(std)) > 0).astype(std.dtype))
