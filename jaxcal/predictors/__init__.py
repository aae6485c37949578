"""Models fitted from data: `fit(x, y, *, key, ...)` gives a module, and `module(x)` a Distribution."""

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

__all__ = [
    "deep_ensemble",
    "dropout",
    "evidential",
    "forests",
    "gaussian_process",
    "mlp",
    "neural_process",
    "quantile_boosting",
    "usnrt",
    "variance_network",
]
