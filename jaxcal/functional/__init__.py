"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import gp, quantiles, safe, scores

__all__ = ["gp", "quantiles", "safe", "scores"]
