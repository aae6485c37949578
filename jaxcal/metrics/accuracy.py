"""How near predictions are to the targets: errors of the mean, and proper scores of the distribution."""

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg, scores
from jaxcal.metrics._common import Scalar, Weights, as_metric, as_targets, dtype_of, share


@as_metric
def rmse(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root mean squared error of the predicted mean, in the unit of y.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(f"{jc.metrics.rmse(np.array([3.0, 4.0]), jc.Point(np.zeros(2))):.3f}")
        3.536
    """
    return linalg.root_mean_square(y - distribution.mean, weights)


@as_metric
def mae(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Mean absolute error of the predicted mean, in the unit of y."""
    return linalg.weighted_mean(abs(y - distribution.mean), weights)


@as_metric
def nlpd(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Negative log predictive density, -mean log p(y), in nats.

    It is infinite for distributions without a density:

    - `Point`.
    - `Empirical`, the distribution of `crude`, and of `conformal` without a rule or with rule="randomized".
    - a `Mixture` of these.

    It is also infinite where a target lies beyond the outermost quantiles of `Quantiles`. The same holds for
    `ScaledQuantiles` with constant tails that are not of a sample. `isotonic`, and `conformal` with rule="linear", have
    the density of a smoothed version (`log_prob` of `ScaledQuantiles`, `Recalibrated`).

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> print(f"{jc.metrics.nlpd(np.zeros(2), jc.Normal(np.zeros(2), 1.0)):.4f}")  # log(2 pi) / 2
        0.9189
    """
    return -linalg.weighted_mean(distribution.log_prob(y), weights)


@as_metric
def crps(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Continuous ranked probability score, the mean over rows of ∫ (F(t) - 1{t >= y})² dt, in the unit of y.

    For a `Point` it is the mean absolute error (Gneiting and Raftery 2007, eq. 20).
    """
    return linalg.weighted_mean(distribution.crps(y), weights)


def interval_score(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Interval score of the central interval [l, u], in the unit of y.

    It is the mean over rows of (u - l) + 2/a max(l - y, 0) + 2/a max(y - u, 0). Here a = 1 - confidence_level
    (Gneiting and Raftery 2007, eq. 43). Narrow intervals score better, and a miss adds a penalty for its distance.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = as_targets(y, distribution)
    confidence_level = _checks.as_fraction("confidence_level", confidence_level)
    lower, upper = distribution.interval(confidence_level)
    weights = _checks.as_weights(weights, y.shape[0])
    return linalg.weighted_mean(scores.interval_score(y, lower, upper, confidence_level), weights)


def pinball(y: ArrayLike, distribution: Distribution, levels: ArrayLike, *, weights: Weights = None) -> Scalar:
    """Pinball loss of the quantiles q_p at one level p or at several, in the unit of y.

    It is the mean over rows and levels of max(p (y - q_p), (p - 1)(y - q_p)) (Koenker and Bassett 1978).

    Raises:
        ValueError: if a level lies outside (0, 1).
    """
    y = as_targets(y, distribution)
    _checks.check_fraction("levels", levels)
    levels = _checks.as_vector("levels", jnp.atleast_1d(_checks.as_floats("levels", levels)))
    weights = _checks.as_weights(weights, y.shape[0])
    return _pinball(y, distribution, levels.astype(dtype_of(y, distribution)), weights)


@_programs.jit
def _pinball(
    y: Float[JaxArray, " n"], distribution: Distribution, levels: Float[JaxArray, " k"], weights: Weights
) -> Scalar:
    def loss(level: Scalar) -> Scalar:
        return linalg.weighted_mean(scores.pinball(y, distribution.icdf(level), level), weights)

    # Level by level: the quantiles of a million rows at 99 levels would fill 800 MB.
    return jnp.mean(jax.lax.map(loss, levels))


def improvement_ratio(y: ArrayLike, before: Distribution, after: Distribution, *, weights: Weights = None) -> Scalar:
    """Fraction of rows whose predicted mean moved nearer to the truth, |y - after| < |y - before|.

    A row whose error did not change counts as not improved. So a correction that changes nothing has ratio 0. This
    is the "Improvement Ratio" of Qiu, Meyerson and Miikkulainen, ICLR 2020: the number of successful corrections
    over the number of rows. Higher is better.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> before, after = jc.Point(np.ones(4)), jc.Point(np.array([0.5, 1.0, -1.0, 0.0]))
        >>> print(jc.metrics.improvement_ratio(np.zeros(4), before, after))
        0.5
    """
    y = as_targets(y, before)
    y = as_targets(y, after)
    improved = jnp.abs(y - after.mean) < jnp.abs(y - before.mean)
    return share(improved, dtype_of(y, after), _checks.as_weights(weights, y.shape[0]))
