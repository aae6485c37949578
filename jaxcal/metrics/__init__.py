"""What predictive distributions are worth: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`: targets [n] and a `Distribution` of n rows in, one number out; `pit`
and `observed_fractions` return arrays. `weights` [n] say how much each row counts, in means over rows and in empirical
distribution functions; they are not negative. All are pure and may be called inside `jit`, and under `vmap` over runs.
Lower is better, except for `improvement_ratio`, where higher is, and for `coverage`, `worst_group_coverage` and
`worst_slab_coverage`, which should be near the confidence level.
"""

from jaxcal.metrics.accuracy import crps, improvement_ratio, interval_score, mae, nlpd, pinball, rmse
from jaxcal.metrics.calibration import (
    calibrated_ece,
    calibration_rmse,
    calibration_sse,
    coverage,
    ece,
    ence,
    max_calibration_error,
    observed_fractions,
    pit,
    tce,
)
from jaxcal.metrics.evaluate import Scores, evaluate
from jaxcal.metrics.groups import worst_group_coverage, worst_slab_coverage
from jaxcal.metrics.sharpness import mean_std, mean_width, sharpness

__all__ = [
    "Scores",
    "calibrated_ece",
    "calibration_rmse",
    "calibration_sse",
    "coverage",
    "crps",
    "ece",
    "ence",
    "evaluate",
    "improvement_ratio",
    "interval_score",
    "mae",
    "max_calibration_error",
    "mean_std",
    "mean_width",
    "nlpd",
    "observed_fractions",
    "pinball",
    "pit",
    "rmse",
    "sharpness",
    "tce",
    "worst_group_coverage",
    "worst_slab_coverage",
]
