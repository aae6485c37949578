"""What predictive distributions are worth: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`: targets [n] and a `Distribution` of n rows in, one number out; `pit`
and `observed_fractions` return arrays. `weights` [n] say how much each row counts, in means over rows and in empirical
distribution functions; they are not negative. All are pure and may be called inside `jit`, and under `vmap` over runs.
Lower is better, except for `improvement_ratio`, where higher is, and for `coverage`, `worst_group_coverage` and
`worst_slab_coverage`, which should be near the confidence level.
"""

from jaxcal.metrics.accuracy import crps as crps
from jaxcal.metrics.accuracy import improvement_ratio as improvement_ratio
from jaxcal.metrics.accuracy import interval_score as interval_score
from jaxcal.metrics.accuracy import mae as mae
from jaxcal.metrics.accuracy import nlpd as nlpd
from jaxcal.metrics.accuracy import pinball as pinball
from jaxcal.metrics.accuracy import rmse as rmse
from jaxcal.metrics.calibration import calibrated_ece as calibrated_ece
from jaxcal.metrics.calibration import calibration_rmse as calibration_rmse
from jaxcal.metrics.calibration import calibration_sse as calibration_sse
from jaxcal.metrics.calibration import coverage as coverage
from jaxcal.metrics.calibration import ece as ece
from jaxcal.metrics.calibration import ence as ence
from jaxcal.metrics.calibration import max_calibration_error as max_calibration_error
from jaxcal.metrics.calibration import observed_fractions as observed_fractions
from jaxcal.metrics.calibration import pit as pit
from jaxcal.metrics.calibration import tce as tce
from jaxcal.metrics.evaluate import Scores as Scores
from jaxcal.metrics.evaluate import evaluate as evaluate
from jaxcal.metrics.groups import worst_group_coverage as worst_group_coverage
from jaxcal.metrics.groups import worst_slab_coverage as worst_slab_coverage
from jaxcal.metrics.sharpness import mean_std as mean_std
from jaxcal.metrics.sharpness import mean_width as mean_width
from jaxcal.metrics.sharpness import sharpness as sharpness
