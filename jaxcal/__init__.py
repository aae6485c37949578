"""Calibrated, sharp predictive distributions from any regression model, in JAX.

A predictor is fitted from data, `fit(x, y, key=key)`, and called on inputs gives a Distribution. A calibrator is
fitted from somebody's predictions, `fit(x, base, y)`, and called on inputs and predictions gives a better one.
"""

from jaxcal import (
    datasets,
    density_ratio,
    functional,
    metrics,
    networks,
    online,
    optimize,
    pipeline,
    plots,
    progress,
)
from jaxcal.calibrators import (
    accrue,
    conditional_conformal,
    conformal,
    crude,
    gaussian_mle,
    isotonic,
    kmeans,
    neural_quantiles,
    rio,
    sharp_gp,
)
from jaxcal.compilation import enable_compilation_cache
from jaxcal.distributions import (
    Distribution,
    Empirical,
    Mixture,
    MultivariateEmpirical,
    MultivariateNormal,
    Normal,
    Point,
    Quantiles,
    Recalibrated,
    ScaledQuantiles,
    StudentT,
    concatenate,
)
from jaxcal.frames import labels
from jaxcal.guarantee import Guarantee
from jaxcal.pipeline import chain, cross_conformal
from jaxcal.pipeline.out_of_fold import out_of_fold
from jaxcal.predictors import (
    deep_ensemble,
    dropout,
    evidential,
    forests,
    gaussian_process,
    mlp,
    neural_process,
    quantile_boosting,
    usnrt,
    variance_network,
)
from jaxcal.serialization import load, save

__version__ = "0.1.0"

__all__ = [
    "Distribution",
    "Empirical",
    "Guarantee",
    "Mixture",
    "MultivariateEmpirical",
    "MultivariateNormal",
    "Normal",
    "Point",
    "Quantiles",
    "Recalibrated",
    "ScaledQuantiles",
    "StudentT",
    "accrue",
    "chain",
    "concatenate",
    "conditional_conformal",
    "conformal",
    "cross_conformal",
    "crude",
    "datasets",
    "deep_ensemble",
    "density_ratio",
    "dropout",
    "enable_compilation_cache",
    "evidential",
    "forests",
    "functional",
    "gaussian_mle",
    "gaussian_process",
    "isotonic",
    "kmeans",
    "labels",
    "load",
    "metrics",
    "mlp",
    "networks",
    "neural_process",
    "neural_quantiles",
    "online",
    "optimize",
    "out_of_fold",
    "pipeline",
    "plots",
    "progress",
    "quantile_boosting",
    "rio",
    "save",
    "sharp_gp",
    "usnrt",
    "variance_network",
]
