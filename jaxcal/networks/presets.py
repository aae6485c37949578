"""The settings for training networks: jaxcal's own, under None, and the settings of papers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from jaxcal import _checks

S = TypeVar("S")


class Settings(NamedTuple):
    """Every option of `training.StepOptions`, with a value, and further settings, which are not options.

    The default values here are the base of the papers' settings.

    Attributes:
        batch_size: rows a step; None for a number that grows with the number of all rows.
        plateau_decay: factor of the learning rate where the validation loss does not improve for half of the patience.
        scale_inputs: whether a scale for every input is trained with the weights.
        log_tails: whether the inputs have logarithmic tails, `preprocessing.LogTails`.
        beta: the power of the variance that weighs the likelihood of a row, `normal.train_normal`.
        calibrate: whether the std is scaled by the validation set, `held_out.Widening`.
        variance_activation: the activation of the variance's own network, in the alternating form.
        form: of a network of means and variances, as in `variance_network.fit`.
        rounds: of the alternating form, as in `variance_network.fit`.
        what: the name of the fit that trains, for messages.
        instead: the advice where a derivative through the training is asked for, as in `_checks.without_derivative`.
    """

    hidden: tuple[int, ...] = (64, 64)
    learning_rate: ArrayLike = 1e-3
    weight_decay: ArrayLike = 0.0
    batch_size: int | None = 32
    max_epochs: int = 1000
    patience: int = 10
    validation_fraction: float = 0.2
    throw: bool = True
    steps: int | None = None
    initial: eqx.Module | None = None
    plateau_decay: float = 1.0
    scale_inputs: bool = False
    log_tails: bool = False
    beta: float = 0.0
    calibrate: bool = False
    variance_activation: Callable = jax.nn.relu
    form: str = "joint"
    rounds: int = 2
    what: str = ""
    instead: str = ""


class NeuralProcessSettings(NamedTuple):
    """The options of the training of `neural_process.fit`, with values, and the least std."""

    max_iterations: int = 10_000
    learning_rate: ArrayLike = 1e-3
    least_std: float = 0.01
    batch_size: int = 16
    patience: int = 20
    validation_fraction: float = 0.2
    throw: bool = True


class NeuralQuantilesSettings(NamedTuple):
    """The options of the training of `neural_quantiles.fit`, with values."""

    max_epochs: int = 1000
    pretraining_epochs: int = 500
    validation_fraction: float = 0.2
    patience: int = 20
    learning_rate: ArrayLike = 1e-3
    steps: int | None = None
    initial: eqx.Module | None = None
    throw: bool = True


class AccrueSettings(NamedTuple):
    """The options of the training of `accrue.fit`, with values."""

    restarts: int = 5
    validation_fraction: float = 0.5
    max_iterations: int = 500
    patience: int = 10
    learning_rate: ArrayLike = 0.01
    steps: int | None = None


# These values are chosen by the errors on data sets of all kinds: `benchmarks/tables/predictors.py`.
DEFAULT = Settings(
    learning_rate=6e-3,
    batch_size=None,
    patience=50,
    plateau_decay=0.25,
    scale_inputs=True,
    log_tails=True,
    beta=0.5,
    calibrate=True,
)
# Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural Networks via Residual Estimation
# with an I/O Kernel", appendix D.1.
RIO = Settings()
# Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", appendix A.
CRUDE = Settings(hidden=(1024, 1024, 1024), learning_rate=1e-4, weight_decay=0.01)
# Qiu, Meyerson & Miikkulainen, "Quantifying Point-Prediction Uncertainty in Neural Networks via Residual Estimation
# with an I/O Kernel", appendix D.1. The least std is from the code of Kim et al., "Attentive Neural Processes".
NEURAL_PROCESS = {None: NeuralProcessSettings(), "paper": NeuralProcessSettings(2000, 1e-4, 0.1)}
# Capone, Hirche and Pleiss, "Sharp Calibrated Gaussian Processes", section 7.
NEURAL_QUANTILES = {None: NeuralQuantilesSettings(), "paper": NeuralQuantilesSettings(200, 2000, 0.0)}


def usnrt(num_inputs: int) -> Settings:
    """Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning", V-A."""
    hidden = (8 * num_inputs, 4 * num_inputs)
    return Settings(hidden=hidden, learning_rate=0.01, batch_size=64, variance_activation=jnp.tanh)


def settle(known: Mapping[str | None, S], preset: str | None, **options: Any) -> S:
    """The given options, and the preset's values in place of None.

    Raises:
        ValueError: if there is no such preset.
    """
    _checks.check_choice("preset", preset, tuple(known))
    return cast(Any, known[preset])._replace(**{name: value for name, value in options.items() if value is not None})
