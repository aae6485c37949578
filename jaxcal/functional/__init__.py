"""Pure functions of arrays, which know nothing of the rest of the library."""

from jaxcal.functional import gp as gp
from jaxcal.functional import kernels as kernels
from jaxcal.functional import levene as levene
from jaxcal.functional import linalg as linalg
from jaxcal.functional import linear_tables as linear_tables
from jaxcal.functional import martingales as martingales
from jaxcal.functional import multiplicity as multiplicity
from jaxcal.functional import noise as noise
from jaxcal.functional import normal as normal
from jaxcal.functional import normal_tail as normal_tail
from jaxcal.functional import quantile_regression as quantile_regression
from jaxcal.functional import quantiles as quantiles
from jaxcal.functional import rounding as rounding
from jaxcal.functional import scores as scores
from jaxcal.functional import smoothing as smoothing
from jaxcal.functional import sparse_gp as sparse_gp
from jaxcal.functional import student_t as student_t
from jaxcal.functional import tables as tables
from jaxcal.functional import tracking as tracking
