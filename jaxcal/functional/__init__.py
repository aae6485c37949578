"""Pure functions of arrays, which know nothing of the rest of the library."""

from . import quantiles, scores

__all__ = ["quantiles", "scores"]
