"""How a process is fitted: with all rows, with inducing points, with the nearest rows, or in minibatches."""

from jaxcal.gp.inference.exact import Exact as Exact
from jaxcal.gp.inference.nearest import Nearest as Nearest
from jaxcal.gp.inference.sparse import Sparse as Sparse
from jaxcal.gp.inference.stochastic import Stochastic as Stochastic
