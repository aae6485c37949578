"""Calibrated, sharp predictive distributions from any regression model, in JAX.

A predictor is fitted from data, `fit(x, y, key=key)`, and called on inputs gives a Distribution. A calibrator is
fitted from somebody's predictions, `fit(x, base, y)`, and called on inputs and predictions gives a better one.
"""

from jaxcal import datasets as datasets
from jaxcal import density_ratio as density_ratio
from jaxcal import functional as functional
from jaxcal import metrics as metrics
from jaxcal import networks as networks
from jaxcal import online as online
from jaxcal import optimize as optimize
from jaxcal import pipeline as pipeline
from jaxcal import plots as plots
from jaxcal import progress as progress
from jaxcal.calibrators import accrue as accrue
from jaxcal.calibrators import conditional_conformal as conditional_conformal
from jaxcal.calibrators import conformal as conformal
from jaxcal.calibrators import crude as crude
from jaxcal.calibrators import gaussian_mle as gaussian_mle
from jaxcal.calibrators import isotonic as isotonic
from jaxcal.calibrators import kmeans as kmeans
from jaxcal.calibrators import neural_quantiles as neural_quantiles
from jaxcal.calibrators import rio as rio
from jaxcal.calibrators import sharp_gp as sharp_gp
from jaxcal.compilation import enable_compilation_cache as enable_compilation_cache
from jaxcal.distributions import Distribution as Distribution
from jaxcal.distributions import Empirical as Empirical
from jaxcal.distributions import Mixture as Mixture
from jaxcal.distributions import MultivariateEmpirical as MultivariateEmpirical
from jaxcal.distributions import MultivariateNormal as MultivariateNormal
from jaxcal.distributions import Normal as Normal
from jaxcal.distributions import Point as Point
from jaxcal.distributions import Quantiles as Quantiles
from jaxcal.distributions import Recalibrated as Recalibrated
from jaxcal.distributions import ScaledQuantiles as ScaledQuantiles
from jaxcal.distributions import StudentT as StudentT
from jaxcal.distributions import concatenate as concatenate
from jaxcal.frames import labels as labels
from jaxcal.guarantee import Guarantee as Guarantee
from jaxcal.pipeline import chain as chain
from jaxcal.pipeline import cross_conformal as cross_conformal
from jaxcal.pipeline.out_of_fold import out_of_fold as out_of_fold
from jaxcal.predictors import deep_ensemble as deep_ensemble
from jaxcal.predictors import dropout as dropout
from jaxcal.predictors import evidential as evidential
from jaxcal.predictors import forests as forests
from jaxcal.predictors import gaussian_process as gaussian_process
from jaxcal.predictors import mlp as mlp
from jaxcal.predictors import neural_process as neural_process
from jaxcal.predictors import quantile_boosting as quantile_boosting
from jaxcal.predictors import usnrt as usnrt
from jaxcal.predictors import variance_network as variance_network
from jaxcal.serialization import load as load
from jaxcal.serialization import save as save

__version__ = "0.1.0"
