"""The settings of the training of networks: jaxcal's own, and those of the papers."""

from typing import NamedTuple

from jaxtyping import ArrayLike


class Settings(NamedTuple):
    """Every option of `training.TrainingOptions`, with a value."""

    hidden: tuple[int, ...] = (64, 64)
    learning_rate: ArrayLike = 1e-3
    weight_decay: ArrayLike = 0.0
    batch_size: int = 32
    max_epochs: int = 1000
    patience: int = 10
    validation_fraction: float = 0.2
    throw: bool = True


DEFAULT = Settings()
# Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", appendix A.
CRUDE = Settings(hidden=(1024, 1024, 1024), learning_rate=1e-4, weight_decay=0.01)


def usnrt(num_inputs: int) -> Settings:
    """Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning", V-A."""
    return Settings(hidden=(8 * num_inputs, 4 * num_inputs), learning_rate=0.01, batch_size=64)
