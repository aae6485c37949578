"""Predictive distributions: Equinox modules of arrays, one row a prediction, all with one interface.

Predictors return distributions, calibrators take and return them, and metrics and plots accept them.

A distribution computes in the dtype of its own parameters. Its methods are elementwise in the rows. So a `vmap` over
runs or ensemble members gives a valid distribution, whose arrays have further leading axes.
"""

from jaxcal.distributions._base import Distribution as Distribution
from jaxcal.distributions._reach import Reach as Reach
from jaxcal.distributions.concatenated import Concatenated as Concatenated
from jaxcal.distributions.concatenated import concatenate as concatenate
from jaxcal.distributions.cross_conformal import CrossConformal as CrossConformal
from jaxcal.distributions.empirical import Empirical as Empirical
from jaxcal.distributions.histogram import Histogram as Histogram
from jaxcal.distributions.mixture import Mixture as Mixture
from jaxcal.distributions.multivariate import MultivariateEmpirical as MultivariateEmpirical
from jaxcal.distributions.multivariate import MultivariateNormal as MultivariateNormal
from jaxcal.distributions.parametric import Normal as Normal
from jaxcal.distributions.parametric import Point as Point
from jaxcal.distributions.parametric import StudentT as StudentT
from jaxcal.distributions.quantiles import Quantiles as Quantiles
from jaxcal.distributions.quantiles import ScaledQuantiles as ScaledQuantiles
from jaxcal.distributions.recalibrated import Recalibrated as Recalibrated
from jaxcal.distributions.smooth_quantiles import SmoothQuantiles as SmoothQuantiles
