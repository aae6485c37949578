"""Networks, and how they are trained: options and presets are declared here, once for all methods."""

from jaxcal.networks.held_out import Widening as Widening
from jaxcal.networks.modules import ConcreteNetwork as ConcreteNetwork
from jaxcal.networks.modules import FeedForward as FeedForward
from jaxcal.networks.modules import NormalNetwork as NormalNetwork
from jaxcal.networks.trained import TrainedNetwork as TrainedNetwork
from jaxcal.networks.training import StepOptions as StepOptions
from jaxcal.networks.training import TrainingOptions as TrainingOptions
from jaxcal.networks.training import TrainingRecord as TrainingRecord
