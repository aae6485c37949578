"""Predictive distributions: Equinox modules of arrays, one row a prediction, all with one interface.

They are what predictors return, what calibrators take and give back, and what metrics and plots accept.

A distribution computes in the dtype of its own parameters. Its methods are elementwise in the rows, so that a `vmap`
over runs or ensemble members gives a valid distribution, whose arrays have further leading axes.
"""

from jaxcal.distributions._base import Distribution
from jaxcal.distributions._reach import Reach
from jaxcal.distributions.concatenated import Concatenated, concatenate
from jaxcal.distributions.cross_conformal import CrossConformal
from jaxcal.distributions.empirical import Empirical
from jaxcal.distributions.mixture import Mixture
from jaxcal.distributions.multivariate import MultivariateEmpirical, MultivariateNormal
from jaxcal.distributions.parametric import Normal, Point, StudentT
from jaxcal.distributions.quantiles import Quantiles, ScaledQuantiles
from jaxcal.distributions.recalibrated import Recalibrated

__all__ = [
    "Concatenated",
    "CrossConformal",
    "Distribution",
    "Empirical",
    "Mixture",
    "MultivariateEmpirical",
    "MultivariateNormal",
    "Normal",
    "Point",
    "Quantiles",
    "Reach",
    "Recalibrated",
    "ScaledQuantiles",
    "StudentT",
    "concatenate",
]
