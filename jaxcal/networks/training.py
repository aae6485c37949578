"""How networks are trained: the options, the validation set, the optimizer and the record of it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, ParamSpec, TypedDict, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.networks import presets
from jaxcal.networks.modules import FeedForward
from jaxcal.networks.presets import Settings
from jaxcal.optimize import Optimum, Result, num_train, raise_unless_finite, train_minibatches, with_weight_decay
from jaxcal.preprocessing import Standardizer

XY = tuple[Float[Array, "n d"], Float[Array, " n"]]

P = ParamSpec("P")
T = TypeVar("T")

# A network with its initial weights, made by one compiled program.
initial_network = eqx.filter_jit(FeedForward)


class TrainingOptions(TypedDict, total=False):
    """The options of every fit that trains networks; one that is None has its default.

    Inputs and target are standardized by the data given, so y -> a y + b changes the prediction exactly so, up to
    rounding. A random fraction of the data is the validation set: training stops when its loss has not improved for
    `patience` epochs, and the weights of the best epoch are kept.

    Attributes:
        hidden: widths of the hidden layers (default 64, 64).
        learning_rate: of the optimizer (default 1e-3).
        weight_decay: an L2 penalty on all weights and biases (default 0).
        batch_size: data points a step (default 32).
        max_epochs: number of epochs to stop at, of each training (default 1000).
        patience: epochs without improvement to stop at (default 10).
        validation_fraction: fraction of the n data points in the validation set, n - floor(n (1 - fraction)) of them
            (default 0.2).
        throw: whether to raise if training diverges (default True); the module's `training.result` says so in any case.

    Raises:
        TypeError: if there is no such option.
        ValueError: if an option is out of its range, or there are fewer than two data points: one to train on and one
            for validation.
        FloatingPointError: if the loss becomes NaN or infinite, and `throw`.
    """

    hidden: Sequence[int] | None
    learning_rate: ArrayLike | None
    weight_decay: ArrayLike | None
    batch_size: int | None
    max_epochs: int | None
    patience: int | None
    validation_fraction: float | None
    throw: bool | None


def takes_training_options(**old_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: `help` shows the options in place of `**options`; their old names, and others, are taken, too."""

    def decorate(fit: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(fit)
        *parameters, _ = signature.parameters.values()
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in TrainingOptions.__annotations__.items()
        ]
        fit = _checks.renamed(validation_share="validation_fraction", **old_names)(fit)
        fit.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[*parameters, *options]
        )
        return fit

    return decorate


class TrainingRecord(eqx.Module):
    """How the training of a network went.

    Attributes:
        epochs: how many epochs were run; of several trainings, all together.
        validation_loss: the lowest mean loss of the validation set, for a standardized target; of several trainings,
            that of the last. None where there was no validation set.
        result: how it ended, one of `jaxcal.optimize.Result`; of several trainings, the worst.
    """

    epochs: Int[Array, "*runs"]
    validation_loss: Float[Array, "*runs"] | None
    result: Int[Array, "*runs"]

    @classmethod
    def of(cls, optimum: Optimum, *, throw: bool) -> "TrainingRecord":
        """The record of a training.

        Raises:
            FloatingPointError: if the loss became NaN or infinite, and `throw`.
        """
        if throw:
            raise_unless_finite(optimum)
        return cls(epochs=optimum.steps, validation_loss=optimum.loss, result=optimum.result)

    @property
    def converged(self) -> Bool[Array, "*runs"]:
        """Whether training ended because the validation loss no longer improved."""
        return self.result == Result.CONVERGED


def settle(options: TrainingOptions, known: Mapping[str | None, Settings], preset: str | None = None) -> Settings:
    """The options that were given, and those of the preset in place of the others.

    Raises:
        TypeError: if there is no such option.
        ValueError: if there is no such preset, or the weight decay is negative.
    """
    if unknown := sorted({*options} - {*Settings._fields}):
        raise TypeError(f"fit has no option {unknown[0]!r}; those of training are {', '.join(Settings._fields)}.")
    settings = presets.settle(known, preset, **options)
    _checks.check_not_negative("weight_decay", settings.weight_decay)
    return settings._replace(hidden=tuple(settings.hidden))


def trainer(settings: Settings, optimizer: Callable[..., optax.GradientTransformation] = optax.adam) -> Callable:
    """`train_minibatches` as the settings have it."""
    weight_decay = jnp.asarray(settings.weight_decay)
    return partial(
        train_minibatches,
        optimizer=Partial(with_weight_decay, optimizer=optimizer, weight_decay=weight_decay),
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        max_epochs=settings.max_epochs,
        patience=settings.patience,
    )


class Rows(NamedTuple):
    """Rows (x, y) to train on and of the validation set, and the standardization they went through."""

    train: XY
    validation: XY
    x_scaler: Standardizer
    y_scaler: Standardizer


def as_data(x: ArrayLike, y: ArrayLike) -> XY:
    """Checked inputs and targets."""
    x = _checks.as_matrix("x", x)
    y = _checks.as_vector("y", y, length=x.shape[0])
    _checks.check_rows("x", x, 2)
    return x, y


def as_inputs(x: ArrayLike, x_scaler: Standardizer) -> Float[Array, "n d"]:
    """Checked inputs, that have the columns of the training inputs."""
    x = _checks.as_matrix("x", x)
    _checks.check_columns("x", x, x_scaler.loc.shape[-1], "the network was trained on")
    return x


def split(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    validation_fraction: float,
    key: PRNGKeyArray | None,
    *,
    scale_target: bool = True,
) -> Rows:
    """Standardized rows, of which a random fraction, or, without a key, the last ones, are the validation set."""
    return _split(x, y, num_train(x.shape[0], validation_fraction), key, scale_target)


@eqx.filter_jit
def _split(
    x: Float[Array, "n d"], y: Float[Array, " n"], num_train: int, key: PRNGKeyArray | None, scale_target: bool
) -> Rows:
    x, y = lax.stop_gradient((x, y))
    dtype = jnp.result_type(x, y)
    x, y = x.astype(dtype), y.astype(dtype)
    x_scaler = Standardizer.of(x)
    y_scaler = Standardizer.of(y) if scale_target else Standardizer.identity(y)
    rows = (x_scaler(x), y_scaler(y))
    if key is not None:
        order = jax.random.permutation(key, y.shape[0])
        rows = jax.tree.map(lambda a: a[order], rows)
    train = jax.tree.map(lambda a: a[:num_train], rows)
    validation = jax.tree.map(lambda a: a[num_train:], rows)
    return Rows(train, validation, x_scaler, y_scaler)


def squared_error(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    """A loss for `optimize.train_minibatches`."""
    x, y = rows
    return (jax.vmap(network)(x) - y) ** 2
