"""Lengthscales for sharp quantiles: for each level the lengthscales whose quantiles lie closest to the mean.

Capone, Hirche & Pleiss, "Sharp Calibrated Gaussian Processes", NeurIPS 2023. The objective is `log_width`, eq. 7. From
the middle outwards lengthscales do not grow, so that the variance does not fall (Assumption 4.1). For the
squared-exponential kernel this is a theorem. The kernel with the shorter lengthscale is the kernel with the longer
lengthscale times a kernel of unit diagonal.

The search goes from the outermost level inwards. Near the middle all lengthscales are about equally good, and the
lengthscales found there would restrict the levels further out.
"""

import math
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional._loops import over_leading_axis, scan
from jaxcal.functional.conditional_variance import (
    explained_variance,
    explained_variance_and_pullback,
    leave_one_out_variance,
    leave_one_out_variance_and_pullback,
)
from jaxcal.functional.kernels import exp, squared_distances, weighted_squares
from jaxcal.functional.linalg import inverse_softplus, with_diagonal
from jaxcal.functional.quantiles import linear_entries
from jaxcal.optimize import as_constants, descend, lowest, one_run_at_a_time

# The range and number of the multiples of the regression's inverse lengthscales: for search="line", and as initial
# values of L-BFGS.
_SMALLEST, _LARGEST = 0.1, 10.0
_NUM_ON_LINE, _NUM_STARTS = 42, 9
# L-BFGS improves this number of the best initial values by at most this number of steps. It ends when a step lowers the
# width by less than this fraction.
_NUM_IMPROVED, _STEPS, _GAIN = 2, 40, 1e-4
# Bounds of the log inverse lengthscales of a column, in standard deviations of the inputs. The variance hardly
# changes beyond them.
_LEAST, _GREATEST = math.log(1e-4), math.log(1e2)
# The least distance of initial values from their upper bound, the result of the level before: at the bound itself the
# gradient is 0.
_LEAST_GAP = 1e-3


def log_width(
    variance: Float[AnyArray, "*s n"], errors: Float[AnyArray, " n"], level: Float[ArrayLike, "..."]
) -> Float[AnyArray, "..."]:
    """log |beta| + log(mean of variance) / 2, with beta the quantile of errors / sqrt(variance) at a level.

    Eq. 7 adds up beta^2 variance over the rows, the squared distances of the quantiles from the mean. `log_width` is
    half the log of the mean of these terms. A factor of the variance does not change it. It is -inf if beta is 0.

    Args:
        variance: the variances of the rows, positive.
        errors: the errors of the rows, y - mean.
        level: in (0, 1).

    Example:
        >>> round(float(np.exp(log_width(np.ones(3), np.array([-1.0, 2.0, 4.0]), 0.5))), 3)
        2.0
    """
    xp, leading = namespace(variance, errors), (1,) * (variance.ndim - 1)
    z = xp.sort(errors.reshape(leading + errors.shape) / xp.sqrt(variance))
    low, high, fraction = linear_entries(len(errors), level, z.dtype)
    # beta = (1 - f) z_low + f z_high
    beta = z[..., low] + fraction.reshape(leading + fraction.shape) * (z[..., high] - z[..., low])
    size = xp.log(xp.mean(variance, axis=-1)) / 2
    return xp.log(abs(beta)) + size.reshape(size.shape + (1,) * np.ndim(level))


def log_width_and_slope(
    variance: Float[AnyArray, " n"], errors: Float[AnyArray, " n"], level: Float[ArrayLike, ""]
) -> tuple[Float[AnyArray, ""], Float[AnyArray, " n"]]:
    """`log_width` at one level, and its derivative in the variances.

    beta depends only on the two rows that it lies between. Let z be the error of a row divided by its sigma; its
    derivative in the variance is -z / (2 variance).

    >>> log_width_and_slope(np.ones(3), np.array([-1.0, 2.0, 4.0]), 0.5)[1].round(3).tolist()
    [0.167, -0.333, 0.167]
    """
    xp, rows = namespace(variance, errors), np.arange(len(errors))
    z = errors / xp.sqrt(variance)
    order = xp.argsort(z)
    low, high, fraction = linear_entries(len(errors), level, variance.dtype)
    low, high = order[low], order[high]
    beta = z[low] + fraction * (z[high] - z[low])
    weights = xp.where(rows == low, 1 - fraction, 0) + xp.where(rows == high, fraction, 0)
    # d/dv_i (log |beta| + log(mean v) / 2) = (1 / sum(v) - w_i z_i / (beta v_i)) / 2, with beta = sum(w_i z_i)
    value = xp.log(abs(beta)) + xp.log(xp.mean(variance)) / 2
    return value, (1 / xp.sum(variance) - weights.astype(variance.dtype) * z / beta / variance) / 2


class WidthData(NamedTuple):
    """The data that choose the lengthscales.

    Attributes:
        x: inputs that the variance is conditioned on.
        noise_ratio: the variance of the noise, in units of the variance of the process.
        errors: the errors of the rows at `at`, or of the rows at `x` if `at` is None.
        at: inputs of other rows; None for the rows at `x`, each by leave-one-out.
    """

    x: Float[AnyArray, "n d"]
    noise_ratio: Float[AnyArray, ""]
    errors: Float[AnyArray, " m"]
    at: Float[AnyArray, "m d"] | None

    def of_some_rows(self, most: int) -> "WidthData":
        """The problem of at most `most` inputs and `most` errors, at equal distances in their order."""
        some = lambda rows: rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)]
        return self._replace(x=some(self.x), errors=some(self.errors), at=None if self.at is None else some(self.at))

    def exponents(self, log_scale: Float[AnyArray, " d"]) -> "_OfPairs":
        """Logs of the covariances of all pairs of rows at inverse lengthscales exp(log_scale)."""
        scale = namespace(log_scale).exp(log_scale)
        across = None if self.at is None else squared_distances(self.x, self.at, scale) / -2
        return _OfPairs(squared_distances(self.x, self.x, scale) / -2, across)

    def variance_given(self, exponents: "_OfPairs") -> Float[AnyArray, " m"]:
        """sigma^2 of the rows (eq. 3b) from their `exponents`, whose memory it may reuse: do not use them again."""
        gram, cross = self._covariances(exponents)
        if cross is None:
            return leave_one_out_variance(gram)
        # sigma^2 = 1 + noise - k^T K^-1 k
        return 1 + self.noise_ratio - explained_variance(gram, cross)

    def variance(self, log_scale: Float[AnyArray, " d"]) -> Float[AnyArray, " m"]:
        """sigma^2 of the rows (eq. 3b) at inverse lengthscales exp(log_scale), within their bounds."""
        return self.variance_given(self.exponents(_bounded(log_scale)))

    def log_width(self, log_scale: Float[AnyArray, " d"], level: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        """The objective."""
        return log_width(self.variance(log_scale), self.errors, level)

    def log_width_and_gradient(
        self, log_scale: Float[AnyArray, " d"], level: Float[AnyArray, ""]
    ) -> tuple[Float[AnyArray, ""], Float[AnyArray, " d"]]:
        """The objective and its gradient in `log_scale`, in closed form: half the time of automatic derivatives."""
        xp, bounded = namespace(self.x, log_scale), _bounded(log_scale)
        scale, (gram, cross) = xp.exp(bounded), self._covariances(self.exponents(bounded))
        if cross is None:
            variance, pullback = leave_one_out_variance_and_pullback(gram)
            value, slope = log_width_and_slope(variance, self.errors, level)
            grad_gram, gradient = pullback(slope), 0
        else:
            explained, pullback = explained_variance_and_pullback(gram, cross)
            value, slope = log_width_and_slope(1 + self.noise_ratio - explained, self.errors, level)
            grad_gram, grad_cross = pullback(-slope)
            gradient = weighted_squares(self.x, self.at, scale, -grad_cross * cross)
        # The diagonal of the Gram matrix depends on no lengthscale.
        pair_weights = with_diagonal(-grad_gram * gram, 0)
        gradient = gradient + weighted_squares(self.x, self.x, scale, pair_weights)
        return value, xp.where(bounded == log_scale, gradient, 0)

    def _covariances(self, exponents: "_OfPairs") -> "_OfPairs":
        """The covariances of the inputs, with the noise on the diagonal, and of the inputs with the other rows.

        NumPy's covariances reuse the memory of the exponents.
        """
        gram = with_diagonal(exp(exponents.within), 1 + self.noise_ratio)
        return _OfPairs(gram, None if exponents.across is None else exp(exponents.across))


class _OfPairs(NamedTuple):
    """Numbers for all pairs of inputs, and for all pairs of an input with another row; None without other rows."""

    within: Float[AnyArray, "n n"]
    across: Float[AnyArray, "n m"] | None


def on_line(problem: WidthData, log_scale: Float[AnyArray, " d"], levels: tuple[float, ...]) -> Float[AnyArray, "k d"]:
    """The best common multiples of the inverse lengthscales exp(log_scale), in logs, one for every level.

    All levels use the same factorizations. Among the multiples tried, the choice is exact: the sequences that do not
    fall outwards and have the least sum of log widths. Derivatives pass to the lengthscales, but not through the
    choice.

    Args:
        problem: the data that choose the multiples.
        log_scale: logs of the regression's inverse lengthscales.
        levels: in increasing order; the levels below 1/2 are one side, the other levels are the other side.
    """
    xp, dtype = namespace(log_scale), log_scale.dtype
    multiples = xp.asarray(_multiples(_NUM_ON_LINE, dtype))
    held, held_scale = as_constants((problem, log_scale))
    within, across = held.exponents(held_scale)

    # A multiple m of the inverse lengthscales multiplies all exponents -|a - b|^2 / 2 by m^2.
    def variance_of(factor):
        return held.variance_given(_OfPairs(factor * within, None if across is None else factor * across))

    variances = over_leading_axis(variance_of, xp.exp(2 * multiples))
    widths = log_width(variances, held.errors, np.asarray(levels, dtype)).T
    widths = xp.where(xp.isnan(widths), np.inf, widths)
    below = num_below(levels)
    sides = [widths[:below][::-1], widths[below:]]
    chosen = [_best_path(side) if side.shape[0] else np.zeros(0, int) for side in sides]
    best = xp.concatenate([chosen[0][::-1], chosen[1]])
    return log_scale[None] + multiples[best][:, None]


def by_column(
    problem: WidthData, log_scale: Float[AnyArray, " d"], levels: tuple[float, ...]
) -> Float[AnyArray, "k d"]:
    """The best log inverse lengthscales of every column and level, by L-BFGS from the best of some multiples.

    See `on_line` for the arguments. Safe under `vmap`: see `optimize.one_run_at_a_time`.
    """
    xp, dtype = namespace(log_scale), log_scale.dtype
    below, number = num_below(levels), len(levels)
    # Each side goes from its outermost level inwards.
    order = np.concatenate([np.arange(below), np.arange(below, number)[::-1]])
    steps = xp.asarray(np.array(levels)[order], dtype), xp.asarray(np.isin(np.arange(number), [0, below]))

    def search(problem, log_scale):
        tried = log_scale[None] + _multiples(_NUM_STARTS, dtype)[:, None]

        def next_level(bound, step):
            level, is_outermost = step
            bound = xp.where(is_outermost, xp.asarray(_GREATEST, dtype), bound)
            best = _best_below(problem, xp.minimum(tried, bound[None]), bound, level)
            return best, best

        return scan(next_level, log_scale, steps)[1][np.argsort(order)]

    return (search if xp is np else one_run_at_a_time(search))(problem, log_scale)


def num_below(levels: tuple[float, ...]) -> int:
    """The number of levels below 1/2."""
    return sum(level < 0.5 for level in levels)


def _best_below(
    problem: WidthData, tried: Float[AnyArray, "s d"], bound: Float[AnyArray, " d"], level: Float[AnyArray, ""]
) -> Float[AnyArray, " d"]:
    """The best of the minima below a bound that L-BFGS reaches from the best of some initial values."""
    xp, dtype = namespace(tried), tried.dtype
    # log_scale = bound - softplus(gap). Remark 5.3 has the log of the distance from the bound in place of the inverse
    # softplus, which is not as flat far from the bound.
    place = lambda gap: bound - xp.logaddexp(gap, xp.zeros_like(gap))

    def evaluate(gap):
        gap = gap.astype(dtype)
        value, gradient = problem.log_width_and_gradient(place(gap), level)
        # d(bound - softplus(gap)) / d gap = -1 / (1 + exp(-gap))
        return value, -gradient / (1 + xp.exp(-gap))

    def improve(one):
        gap = inverse_softplus(xp.maximum(bound - one, _LEAST_GAP))
        gap = gap.astype(float) if xp is np else gap
        return descend(evaluate, gap, max_iterations=_STEPS, gain_tolerance=_GAIN, on_host=xp is np)

    widths = over_leading_axis(lambda initial: problem.log_width(initial, level), tried)
    best = xp.argsort(xp.where(xp.isnan(widths), np.inf, widths))[:_NUM_IMPROVED]
    return _bounded(place(lowest(over_leading_axis(improve, tried[best])).params.astype(dtype)))


def _bounded(log_scale: Float[AnyArray, " d"]) -> Float[AnyArray, " d"]:
    return namespace(log_scale).clip(log_scale, _LEAST, _GREATEST)


def _multiples(number: int, dtype: DTypeLike) -> Float[np.ndarray, " s"]:
    """Logs of multiples, in increasing order."""
    return np.log(np.geomspace(_SMALLEST, _LARGEST, number)).astype(dtype)


def _best_path(costs: Float[AnyArray, "k s"]) -> Int[AnyArray, " k"]:
    """The places p[0] <= p[1] <= ... with the least sum of costs[i, p[i]], by dynamic programming."""
    xp, number = namespace(costs), costs.shape[1]
    not_after, places = np.tri(number, dtype=bool), np.arange(number)

    def forwards(total, cost):
        """total_i(s) = costs[i, s] + min over r <= s of total_(i-1)(r), and the last r with this minimum."""
        up_to = xp.where(not_after, total[None], np.inf)
        came_from = number - 1 - xp.argmin(up_to[:, ::-1], axis=1)
        return cost + xp.min(up_to, axis=1), xp.minimum(came_from, places)

    total, came_from = scan(forwards, xp.zeros_like(costs[0]), costs)

    def backwards(place, came_from):
        return came_from[place], place

    # The place before the first cost does not matter.
    return scan(backwards, xp.argmin(total), came_from, reverse=True)[1]
