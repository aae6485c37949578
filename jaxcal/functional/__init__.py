"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import gp, quantiles, scores

__all__ = ["gp", "quantiles", "scores"]
