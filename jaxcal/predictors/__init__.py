"""Models fitted from data: `fit(x, y, *, key, ...)` gives a module, and `module(x)` a Distribution."""

from jaxcal.predictors import mlp

__all__ = ["mlp"]
