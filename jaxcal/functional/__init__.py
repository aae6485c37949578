"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import gp, kernels, levene, noise, quantiles, safe, scores

__all__ = ["gp", "kernels", "levene", "noise", "quantiles", "safe", "scores"]
