"""Calibrators: `fit(x, base, y) -> module`, and `module(x, base) -> Distribution`."""

from jaxcal.calibrators import accrue, conformal, crude, gaussian_mle, isotonic, kmeans, neural_quantiles, rio, sharp_gp

__all__ = ["accrue", "conformal", "crude", "gaussian_mle", "isotonic", "kmeans", "neural_quantiles", "rio", "sharp_gp"]
