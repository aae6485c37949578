"""Calibrators: `fit(x, base, y) -> module`, and `module(x, base) -> Distribution`."""

from jaxcal.calibrators import conformal, crude, gaussian_mle, isotonic, rio

__all__ = ["conformal", "crude", "gaussian_mle", "isotonic", "rio"]
