"""How networks are trained: the options, the validation set, the optimizer and the record of it."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypedDict, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks, _random, optimize
from jaxcal._numpy import AnyArray, in_jax, numpy_or_jit
from jaxcal.frames.preprocessing import LogTails, Standardizer, input_scaler
from jaxcal.networks import presets
from jaxcal.networks.modules import FeedForward, at_rows
from jaxcal.networks.presets import Settings
from jaxcal.optimize import Optimum, Result, adam

XY = tuple[Float[AnyArray, "n d"], Float[AnyArray, " n"]]

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N", bound=eqx.Module)

# What to do where a derivative of a training until it stops is asked for, of a method that takes steps and of others.
GIVE_STEPS = "give steps= for so many full-batch steps, which have derivatives"
TAKE_ANOTHER = "take mlp.fit or variance_network.fit with steps= for so many full-batch steps, which have derivatives"

# How much faster the scales of inputs move than weights do.
_SPEED_OF_SCALES = 6.0

# Of a batch by default, doubled as often as an epoch would have more steps: rows then cost less than in proportion,
# and errors are no greater.
_ROWS_OF_A_BATCH, _STEPS_OF_AN_EPOCH = 32, 256


class TrainingOptions(TypedDict, total=False):
    """The options of every fit that trains networks; one that is None has its default.

    Inputs and target are standardized by the data given, so y -> a y + b changes the prediction exactly so, up to
    rounding. A random fraction of the data is the validation set: training stops when its loss has not improved for
    `patience` epochs, and the weights of the best epoch are kept. No derivative passes through such a training.

    By default the inputs have logarithmic tails (`preprocessing.LogTails`), and a scale for each of them is
    trained with the weights, faster than these, so that a network learns early which inputs matter (Holzmüller,
    Grinsztajn & Steinwart, "Better by Default", NeurIPS 2024). In the settings of papers, their presets, there is
    neither, `learning_rate` stays as it is, and it and `patience` are those of the paper, or 1e-3 and 10 where it names
    none.

    Attributes:
        hidden: widths of the hidden layers (default 64, 64).
        learning_rate: of the optimizer (default 6e-3), at first: it is quartered where the validation loss has not
            improved for half of `patience` epochs.
        weight_decay: an L2 penalty on all weights and biases (default 0).
        batch_size: data points a step (default 32, doubled as often as an epoch would have more than 256 steps).
        max_epochs: number of epochs to stop at, of each training (default 1000).
        patience: epochs without improvement to stop at (default 50).
        validation_fraction: fraction of the n data points in the validation set, n - floor(n (1 - fraction)) of them
            (default 0.2).
        throw: whether to raise if training diverges (default True); the module's `training.result` says so in any case.

    Raises:
        TypeError: if there is no such option, or a derivative through the training is asked for.
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


class StepOptions(TrainingOptions, total=False):
    """The options of a fit that derivatives can pass through: those of `TrainingOptions`, and a number of steps.

    With `steps` the method's optimizer takes so many steps from the `initial` network, every one of them on all data
    points: there is no validation set, and nothing to stop by; no scales of the inputs are trained. What is trained is
    then a function of x and y, of the initial weights, of `learning_rate` and of `weight_decay`, and has derivatives in
    them, for a training inside of another optimization. They are those of the steps that were taken, not of an
    optimum. The reverse mode keeps the weights of every step, and computes its activations anew. Another number of
    steps compiles anew.

    Adam divides a gradient by its own size: a derivative is large where a gradient is nearly 0. It is finite where a
    weight has none at all, as those of a unit that is never active.

    Attributes:
        steps: number of steps; None (the default) for a training that the validation set stops.
        initial: the network to start from, such as the `network` of a module that was fitted before, for inputs and
            targets as its scalers give them; where None one with random weights.

    Raises:
        TypeError: if `initial` is no such network.
        ValueError: if steps is negative; if an option is given, too, that has no part in steps: batch_size, max_epochs,
            patience, validation_fraction, and hidden beside `initial`; if `initial` is given without steps, or has
            another number of inputs or outputs.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, jaxcal as jc
        >>> x, key = jnp.linspace(-1, 1, 20), jax.random.key(0)
        >>> def error(learning_rate):
        ...     options = {"hidden": (8,), "steps": 5, "learning_rate": learning_rate}
        ...     network = jc.mlp.fit(x[::2], jnp.sin(x[::2]), key=key, **options)
        ...     return jnp.mean((network(x).mean - jnp.sin(x)) ** 2)
        >>> bool(jax.grad(error)(0.001) < 0)  # faster would have been better
        True
    """

    steps: int | None
    initial: eqx.Module | None


def takes_training_options(declared: type = TrainingOptions) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: `help` shows the options in place of `**options`."""

    def decorate(fit: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(fit)
        *parameters, _ = signature.parameters.values()
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in declared.__annotations__.items()
        ]
        fit.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[*parameters, *options]
        )
        return fit

    return decorate


class TrainingRecord(eqx.Module):
    """How the training of a network went.

    Attributes:
        epochs: how many epochs were run; of several trainings, all together. A full-batch step is one.
        validation_loss: the lowest mean loss of the validation set, for a standardized target; of several trainings,
            that of the last. None where there was no validation set.
        result: how it ended, one of `jaxcal.optimize.Result`; of several trainings, the worst.
    """

    epochs: Int[Array, "*runs"]
    validation_loss: Float[Array, "*runs"] | None
    result: Int[Array, "*runs"]

    @classmethod
    def of(cls, optimum: Optimum, *, throw: bool, validated: bool = True) -> "TrainingRecord":
        """The record of a training, with a validation set or without.

        Raises:
            FloatingPointError: if the loss became NaN or infinite, and `throw`.
        """
        if throw:
            optimize.raise_unless_finite(optimum)
        loss = optimum.loss if validated else None
        return cls(epochs=optimum.steps, validation_loss=loss, result=optimum.result)

    @property
    def converged(self) -> Bool[Array, "*runs"]:
        """Whether training ended because the validation loss no longer improved."""
        return self.result == Result.CONVERGED


def settle(
    what: str,
    options: TrainingOptions,
    known: Mapping[str | None, Settings],
    preset: str | None = None,
    declared: type = TrainingOptions,
    **own: Any,
) -> Settings:
    """The options that were given, of training and the method's own, and those of the preset in place of the others.

    Args:
        what: the fit that trains, "mlp.fit".
        options: of training.
        known: the presets.
        preset: which of them.
        declared: the options that there are.
        **own: options of the method's own.

    Raises:
        TypeError: if there is no such option.
        ValueError: if there is no such preset, the weight decay is negative, or as `check_steps`.
    """
    if unknown := sorted({*options} - {*declared.__annotations__}):
        raise TypeError(
            f"fit has no option {unknown[0]!r}; those of training are {', '.join(declared.__annotations__)}."
        )
    instead = GIVE_STEPS if "steps" in declared.__annotations__ else TAKE_ANOTHER
    settings = presets.settle(known, preset, **options, **own, what=what, instead=instead)
    _checks.check_not_negative("weight_decay", settings.weight_decay)
    without = ("batch_size", "max_epochs", "patience", "validation_fraction")
    check_steps(settings.steps, settings.initial, **{name: options.get(name) for name in without})
    if settings.initial is not None and options.get("hidden") is not None:
        raise ValueError("initial has hidden layers of its own: leave hidden out.")
    if settings.steps is not None:
        # Steps are differentiated: a weight that is held fixed would make their derivatives wrong. And all rows are
        # trained on.
        settings = settings._replace(scale_inputs=False, beta=0.0, calibrate=False)
    return settings._replace(hidden=tuple(settings.hidden))


def check_steps(steps: int | None, initial: eqx.Module | None = None, **others: object) -> None:
    """Raise ValueError unless steps is None, as is then `initial`, or a number that comes without the others."""
    if steps is None:
        if initial is not None:
            raise ValueError("initial is what differentiable steps start from: give steps, too.")
        return
    _checks.check_at_least("steps", steps, 0)
    _checks.check_alone(f"steps={steps} is a training on all rows that nothing stops", **others)


def new_network(inputs: Float[Array, "n d"], hidden: tuple[int, ...]) -> Callable[..., FeedForward]:
    """What makes networks of such inputs, with their initial weights."""
    return partial(FeedForward, inputs.shape[1], hidden, dtype=inputs.dtype)


def starting_network(initial: N | None, new: Callable[[], N]) -> N:
    """The network to start from: the given one, which may differ from a new one by its hidden layers, or a new one.

    Raises:
        TypeError: if the given one is of another kind.
        ValueError: if it has another number of inputs or outputs.
    """
    network = new()
    if initial is None:
        return network
    if not isinstance(initial, type(network)):
        raise TypeError(
            f"initial must be a {type(network).__name__}, as the network of a fitted module is; "
            f"got {type(initial).__name__}."
        )
    if _ends(initial) != _ends(network):
        raise ValueError(
            "initial must map {} inputs to {} outputs; it maps {} to {}.".format(*_ends(network), *_ends(initial))
        )
    return initial


def _ends(network: eqx.Module) -> tuple[int | str, int | str]:
    """How many inputs and outputs a network has."""
    layers = _linear_layers(network)
    return layers[0].in_features, layers[-1].out_features


def _linear_layers(network: eqx.Module) -> list[eqx.nn.Linear]:
    is_layer = lambda node: isinstance(node, eqx.nn.Linear)
    return [node for node in jax.tree.leaves(network, is_leaf=is_layer) if is_layer(node)]


def trainer(
    settings: Settings, optimizer: Callable[..., optax.GradientTransformation] = adam, *, restore_best: bool = True
) -> Callable[..., Optimum]:
    """`train_minibatches` as the settings have it, or `train_full_batch`, to which validation rows mean nothing.

    Args:
        settings: of the training.
        optimizer: a function from the learning rate.
        restore_best: see there.
    """
    descent = Partial(optimize.with_weight_decay, optimizer=optimizer, weight_decay=jnp.asarray(settings.weight_decay))
    if settings.steps is not None:
        take = partial(
            optimize.train_full_batch, num_steps=settings.steps, optimizer=descent, learning_rate=settings.learning_rate
        )
        return lambda loss, params, data, validation, *, key: take(loss, params, data, key=key)
    until_it_stops = partial(
        optimize.train_minibatches,
        optimizer=descent,
        learning_rate=settings.learning_rate,
        max_epochs=settings.max_epochs,
        patience=settings.patience,
        plateau_decay=settings.plateau_decay,
        restore_best=restore_best,
        what=settings.what,
        instead=settings.instead,
    )

    def train(loss, params, data, *rest, **options):
        batch_size = settings.batch_size
        if batch_size is None:
            batch_size = _batch_size(jax.tree.leaves(data)[0].shape[0])
        return until_it_stops(loss, params, data, *rest, batch_size=batch_size, **options)

    return partial(_with_scaled_inputs, train) if settings.scale_inputs else train


def _batch_size(num_rows: int) -> int:
    """The default: of so many rows that an epoch has at most so many steps, which double the rows of a batch."""
    return _ROWS_OF_A_BATCH * 2 ** max(math.ceil(math.log2(num_rows / _ROWS_OF_A_BATCH / _STEPS_OF_AN_EPOCH)), 0)


def _with_scaled_inputs(
    train: Callable[..., Optimum], loss: Callable, network: eqx.Module, *data: tuple, **options: Any
) -> Optimum:
    """A training of the network and of scales of its inputs, which then are part of the weights."""
    layer = _linear_layers(network)[0]
    scaled = _ScaledInputs(network, in_jax(np.zeros(layer.weight.shape[-1:], layer.weight.dtype)))
    optimum = train(Partial(_loss_of_scaled, loss), scaled, *data, **options)
    return optimum._replace(params=_merged(optimum.params))


class _ScaledInputs(eqx.Module):
    """A network whose inputs are multiplied by 1 + 6 s: where s is trained as the weights are, the scales move faster.

    The factor is that of Holzmüller, Grinsztajn & Steinwart (2024).
    """

    network: eqx.Module
    s: Float[AnyArray, " d"]

    def merged(self) -> eqx.Module:
        """The network of the inputs as they are, whose first weights hold the scales."""
        scales = 1 + _SPEED_OF_SCALES * self.s

        def scaled(node):
            if not isinstance(node, FeedForward):
                return node
            return eqx.tree_at(lambda n: n.layers[0].weight, node, node.layers[0].weight * scales[None])

        return jax.tree.map(scaled, self.network, is_leaf=lambda node: isinstance(node, FeedForward))


@numpy_or_jit
def _merged(scaled: _ScaledInputs) -> eqx.Module:
    return scaled.merged()


def _loss_of_scaled(loss: Callable, scaled: _ScaledInputs, rows: Any, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    return loss(scaled.merged(), rows, key)


class Rows(NamedTuple):
    """Rows (x, y) to train on and of the validation set, which may be none, and their standardization."""

    train: XY
    validation: XY
    x_scaler: Standardizer | LogTails
    y_scaler: Standardizer


def split(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    settings: Settings,
    key: PRNGKeyArray | None,
    *,
    indicators: tuple[int, ...],
    scale_target: bool = True,
) -> Rows:
    """Standardized rows, of which a random fraction, or, without a key, the last ones, are the validation set.

    With steps all of them are trained on. Indicators are not scaled.
    """
    number = x.shape[0] if settings.steps is not None else optimize.num_train(x.shape[0], settings.validation_fraction)
    order = None if settings.steps is not None or key is None else _random.permutation(key, y.shape[0])
    return _split(x, y, number, order, indicators, scale_target, settings.log_tails)


@numpy_or_jit
def _split(
    x: Float[AnyArray, "n d"],
    y: Float[AnyArray, " n"],
    num_train: int,
    order: Int[AnyArray, " n"] | None,
    indicators: tuple[int, ...],
    scale_target: bool,
    log_tails: bool,
) -> Rows:
    dtype = np.result_type(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    x_scaler = input_scaler(x, indicators, log_tails=log_tails)
    y_scaler = Standardizer.of(y) if scale_target else Standardizer.identity(y)
    rows = (x_scaler(x), y_scaler(y))
    if order is not None:
        rows = jax.tree.map(lambda a: a[order], rows)
    train, validation = first_and_others(rows, num_train)
    return Rows(train, validation, x_scaler, y_scaler)


@numpy_or_jit
def first_and_others(rows: PyTree, number: int) -> tuple[PyTree, PyTree]:
    """The first rows of all arrays, so many, and the other rows."""
    return jax.tree.map(lambda a: a[:number], rows), jax.tree.map(lambda a: a[number:], rows)


def squared_error(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """A loss for `optimize.train_minibatches`."""
    x, y = rows
    return (at_rows(network, x) - y) ** 2
