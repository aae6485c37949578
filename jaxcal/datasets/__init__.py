"""Named public regression data sets, raw and in their original row order, the splits of them, and simulated ones."""

from jaxcal.datasets.loader import Dataset, Location, find, license_of, load, names, pbp_split, split
from jaxcal.datasets.simulated import Heteroscedastic, heteroscedastic, heteroscedastic_moments

__all__ = [
    "Dataset",
    "Heteroscedastic",
    "Location",
    "find",
    "heteroscedastic",
    "heteroscedastic_moments",
    "license_of",
    "load",
    "names",
    "pbp_split",
    "split",
]
