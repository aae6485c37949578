"""Calibrators: `fit(x, base, y) -> module`, and `module(x, base) -> Distribution`."""

from jaxcal.calibrators import rio

__all__ = ["rio"]
