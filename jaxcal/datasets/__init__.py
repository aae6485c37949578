"""Named public regression data sets, raw and in their original row order, their splits, and simulated data sets."""

from jaxcal.datasets.loader import Dataset as Dataset
from jaxcal.datasets.loader import Location as Location
from jaxcal.datasets.loader import find as find
from jaxcal.datasets.loader import license_of as license_of
from jaxcal.datasets.loader import load as load
from jaxcal.datasets.loader import names as names
from jaxcal.datasets.loader import pbp_split as pbp_split
from jaxcal.datasets.loader import split as split
from jaxcal.datasets.simulated import Heteroscedastic as Heteroscedastic
from jaxcal.datasets.simulated import heteroscedastic as heteroscedastic
from jaxcal.datasets.simulated import heteroscedastic_moments as heteroscedastic_moments
