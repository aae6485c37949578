"""How narrow predictions are: widths of intervals, and predicted standard deviations."""

from jaxtyping import ArrayLike, Float

from jaxcal import _checks
from jaxcal._numpy import JaxArray
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg
from jaxcal.metrics._common import Scalar, Weights, as_metric, as_targets, mean_width_of


def mean_width(
    y: ArrayLike, distribution: Distribution, *, confidence_level: ArrayLike = 0.9, weights: Weights = None
) -> Scalar:
    """Mean width of the central interval, in the unit of y; 0 for a `Point`.

    Raises:
        ValueError: if the confidence level lies outside (0, 1).
    """
    y = as_targets(y, distribution)
    return mean_width_of(distribution.interval(confidence_level), _checks.as_weights(weights, y.shape[0]))


@as_metric
def sharpness(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Root of the mean predicted variance, in the unit of y (CRUDE, section 4: Zelikman et al. 2020)."""
    return linalg.root_mean_square(distribution.std, weights)


@as_metric
def mean_std(y: Float[JaxArray, " n"], distribution: Distribution, *, weights: Weights = None) -> Scalar:
    """Mean predicted standard deviation, in the unit of y; USNRT's sharpness (eq. 13) is 100 times this."""
    return linalg.weighted_mean(distribution.std, weights)
