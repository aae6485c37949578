"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import gp, levene, quantiles, safe, scores

__all__ = ["gp", "levene", "quantiles", "safe", "scores"]
