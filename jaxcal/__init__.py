"""Calibrated, sharp predictive distributions from any regression model, in JAX."""

__version__ = "0.1.0"
