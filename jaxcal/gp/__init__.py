"""Gaussian processes over a model's inputs and outputs: their kernels, and the search for their hyperparameters.

The objects for the arguments `inference=` and `noise=` are here. `protocols.Inference` and `protocols.Noise` say what
the engine needs of such an object.
"""

from jaxcal.gp.inference import Exact as Exact
from jaxcal.gp.inference import Nearest as Nearest
from jaxcal.gp.inference import Sparse as Sparse
from jaxcal.gp.inference import Stochastic as Stochastic
from jaxcal.gp.noise import GaussianNoise as GaussianNoise
from jaxcal.gp.noise import InputNoise as InputNoise
from jaxcal.gp.noise import StudentTNoise as StudentTNoise
