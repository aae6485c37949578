"""Calibrated, sharp predictive distributions from any regression model, in JAX.

A predictor is fitted from data, `fit(x, y, key=key)`, and called on inputs gives a Distribution. A calibrator is
fitted from somebody's predictions, `fit(x, base, y)`, and called on inputs and predictions gives a better one.
"""

from jaxcal import datasets, functional, metrics, nn, optimize, plots
from jaxcal.calibrators import rio
from jaxcal.distributions import Distribution, Empirical, Mixture, Normal, Point, Quantiles, StudentT
from jaxcal.predictors import mlp

__version__ = "0.1.0"

__all__ = [
    "Distribution",
    "Empirical",
    "Mixture",
    "Normal",
    "Point",
    "Quantiles",
    "StudentT",
    "datasets",
    "functional",
    "metrics",
    "mlp",
    "nn",
    "optimize",
    "plots",
    "rio",
]
