"""Networks, and how they are trained: options and presets are declared here, once for all methods."""

from jaxcal.networks.held_out import Widening
from jaxcal.networks.modules import ConcreteNetwork, FeedForward, NormalNetwork
from jaxcal.networks.trained import TrainedNetwork
from jaxcal.networks.training import StepOptions, TrainingOptions, TrainingRecord

__all__ = [
    "ConcreteNetwork",
    "FeedForward",
    "NormalNetwork",
    "StepOptions",
    "TrainedNetwork",
    "TrainingOptions",
    "TrainingRecord",
    "Widening",
]
