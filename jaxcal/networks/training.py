"""How networks are trained: the options, the validation set, the optimizer and the record of the training."""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict, TypeVar

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

N = TypeVar("N", bound=eqx.Module)

# The advice where a derivative through a training with early stopping is asked for: for methods that take steps, and
# for the others.
GIVE_STEPS = "give steps=, a number of full-batch steps, which have derivatives"
TAKE_ANOTHER = "take mlp.fit or variance_network.fit with steps=, a number of full-batch steps, which have derivatives"

# The scales of inputs move this many times as fast as weights.
_SPEED_OF_SCALES = 6.0

# The default batch size, and the most steps of an epoch: the batch size is doubled until an epoch has no more. Many
# rows then cost less than in proportion, and errors are no greater.
_ROWS_OF_A_BATCH, _STEPS_OF_AN_EPOCH = 32, 256


class TrainingOptions(TypedDict, total=False):
    """The options of every fit that trains networks; an option that is None has its default.

    Inputs and target are standardized by the data given. So y -> a y + b changes the prediction in exactly this way, up
    to rounding. A random fraction of the data is the validation set. Training stops when the validation loss has not
    improved for `patience` epochs, and the weights of the best epoch are kept. No derivative passes through such a
    training.

    By default the inputs have logarithmic tails (`preprocessing.LogTails`). A scale for each input is trained with the
    weights, but moves faster. The network then learns early which inputs matter (Holzmüller, Grinsztajn & Steinwart,
    "Better by Default", NeurIPS 2024).

    The presets are the settings of papers, and have neither. Their `learning_rate` stays constant. It and `patience`
    are the paper's, or 1e-3 and 10 where the paper names none.

    Attributes:
        hidden: widths of the hidden layers (default 64, 64).
        learning_rate: of the optimizer, at first (default 6e-3). It is quartered where the validation loss has not
            improved for half of `patience` epochs.
        weight_decay: an L2 penalty on all weights and biases (default 0).
        batch_size: data points a step (default 32, doubled until an epoch has at most 256 steps).
        max_epochs: the most epochs of each training (default 1000).
        patience: training stops after this many epochs without improvement (default 50).
        validation_fraction: fraction of the n data points in the validation set (default 0.2), n - floor(n (1 -
            fraction)) data points.
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
    """The options of a fit that derivatives can pass through: `TrainingOptions`, a number of steps and a network.

    With `steps` the method's optimizer takes this number of steps from the `initial` network, each on all data points.
    There is no validation set and no early stopping, and no scales of the inputs are trained. The trained network is
    then a function of x, y, the initial weights, `learning_rate` and `weight_decay`. It has derivatives in all of them,
    for a training inside another optimization. They are derivatives of the steps that were taken, not of an optimum.
    The reverse mode keeps the weights of every step, and computes the activations again. Another number of steps
    compiles anew.

    Adam divides a gradient by its own size, so a derivative is large where a gradient is nearly 0. A derivative is
    finite where a weight has no gradient at all, as in a unit that is never active.

    Attributes:
        steps: number of steps; None (the default) for a training that the validation set stops.
        initial: the network to start from, such as the `network` of a module that was fitted before. It maps
            standardized inputs to standardized targets, as the module's scalers give them. None takes a network with
            random weights.

    Raises:
        TypeError: if `initial` is another kind of network.
        ValueError: if steps is negative, or comes with batch_size, max_epochs, patience or validation_fraction. Also if
            `initial` comes with hidden or without steps, or has another number of inputs or outputs.

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


class TrainingRecord(eqx.Module):
    """How the training of a network went.

    Attributes:
        epochs: number of epochs, of all trainings together where there are several. A full-batch step is one epoch.
        validation_loss: the lowest mean loss of the validation set, for a standardized target. After several trainings
            it is the loss of the last one. None where there was no validation set.
        result: how training ended, one of `jaxcal.optimize.Result`; the worst of several trainings.
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


def check_names(fit: Callable, options: Mapping[str, Any], declared: type) -> None:
    """Raise TypeError if an option of a fit is none of the declared ones; suggest the nearest name."""
    unknown = next((name for name in options if name not in declared.__annotations__), None)
    if unknown is None:
        return
    named = [each.name for each in inspect.signature(fit).parameters.values() if each.kind is not each.VAR_KEYWORD]
    nearest = difflib.get_close_matches(unknown, [*named, *declared.__annotations__], n=1)
    listed = f"the options of its training are {', '.join(declared.__annotations__)}."
    raise TypeError(
        f"{name_of(fit)} has no option {unknown!r}: {f'did you mean {nearest[0]!r}?' if nearest else listed}"
    )


def name_of(fit: Callable) -> str:
    """What messages call a fit: its module and its name, such as "mlp.fit"."""
    return f"{fit.__module__.rpartition('.')[2]}.{fit.__name__}"


def settle(
    fit: Callable,
    options: TrainingOptions,
    known: Mapping[str | None, Settings],
    preset: str | None = None,
    declared: type = TrainingOptions,
    **own: Any,
) -> Settings:
    """The given options, of training and of the method, and the preset's values in place of the others.

    Args:
        fit: the fit that trains.
        options: of training.
        known: the presets.
        preset: the name of one of them.
        declared: the class that declares all options.
        **own: the method's own options.

    Raises:
        TypeError: if there is no such option.
        ValueError: if there is no such preset, if the weight decay is negative, or as in `check_steps`.
    """
    check_names(fit, options, declared)
    instead = GIVE_STEPS if "steps" in declared.__annotations__ else TAKE_ANOTHER
    settings = presets.settle(known, preset, **options, **own, what=name_of(fit), instead=instead)
    _checks.check_not_negative("weight_decay", settings.weight_decay)
    without = ("batch_size", "max_epochs", "patience", "validation_fraction")
    check_steps(settings.steps, settings.initial, **{name: options.get(name) for name in without})
    if settings.initial is not None and options.get("hidden") is not None:
        raise ValueError("initial has hidden layers of its own: do not give hidden.")
    if settings.steps is not None:
        # Steps are differentiated: the weight v^beta, which is held fixed, would make their derivatives wrong. And
        # there are no validation rows, as all rows are trained on.
        settings = settings._replace(scale_inputs=False, beta=0.0, calibrate=False)
    return settings._replace(hidden=tuple(settings.hidden))


def check_steps(steps: int | None, initial: eqx.Module | None = None, **others: object) -> None:
    """Raise ValueError if steps is negative or comes with the others, or if `initial` comes without steps."""
    if steps is None:
        if initial is not None:
            raise ValueError("initial is the network that differentiable steps start from: give steps, too.")
        return
    _checks.check_at_least("steps", steps, 0)
    _checks.check_alone(f"steps={steps} is a training on all rows that nothing stops", **others)


def new_network(inputs: Float[Array, "n d"], hidden: tuple[int, ...]) -> Callable[..., FeedForward]:
    """A function that makes networks for such inputs, with initial weights."""
    return partial(FeedForward, inputs.shape[1], hidden, dtype=inputs.dtype)


def starting_network(initial: N | None, new: Callable[[], N]) -> N:
    """The network to start from: `initial`, whose hidden layers may differ from a new network's, or else a new one.

    Raises:
        TypeError: if `initial` is another kind of network.
        ValueError: if `initial` has another number of inputs or outputs.
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
    """The numbers of inputs and outputs of a network."""
    layers = _linear_layers(network)
    return layers[0].in_features, layers[-1].out_features


def _linear_layers(network: eqx.Module) -> list[eqx.nn.Linear]:
    is_layer = lambda node: isinstance(node, eqx.nn.Linear)
    return [node for node in jax.tree.leaves(network, is_leaf=is_layer) if is_layer(node)]


def trainer(
    settings: Settings, optimizer: Callable[..., optax.GradientTransformation] = adam, *, restore_best: bool = True
) -> Callable[..., Optimum]:
    """`train_minibatches` with these settings, or `train_full_batch`, which does not use validation rows.

    Args:
        settings: of the training.
        optimizer: a function of the learning rate.
        restore_best: as in `train_minibatches`.
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
    """The default batch size: 32, doubled until an epoch has at most 256 steps."""
    return _ROWS_OF_A_BATCH * 2 ** max(math.ceil(math.log2(num_rows / _ROWS_OF_A_BATCH / _STEPS_OF_AN_EPOCH)), 0)


def _with_scaled_inputs(
    train: Callable[..., Optimum], loss: Callable, network: eqx.Module, *data: tuple, **options: Any
) -> Optimum:
    """Train the network and scales of its inputs, which the first weights take up in the end."""
    layer = _linear_layers(network)[0]
    scaled = _ScaledInputs(network, in_jax(np.zeros(layer.weight.shape[-1:], layer.weight.dtype)))
    optimum = train(Partial(_loss_of_scaled, loss), scaled, *data, **options)
    return optimum._replace(params=_merged(optimum.params))


class _ScaledInputs(eqx.Module):
    """A network whose inputs are multiplied by 1 + 6 s; s is trained as the weights are, so the scales move faster.

    The factor 6 is from Holzmüller, Grinsztajn & Steinwart (2024).
    """

    network: eqx.Module
    s: Float[AnyArray, " d"]

    def merged(self) -> eqx.Module:
        """The network for inputs without scales: its first weights hold the scales."""
        scales = 1 + _SPEED_OF_SCALES * self.s

        def scaled(node):
            if not isinstance(node, FeedForward):
                return node
            # W (x * scales) = (W * scales) x
            return eqx.tree_at(lambda n: n.layers[0].weight, node, node.layers[0].weight * scales[None])

        return jax.tree.map(scaled, self.network, is_leaf=lambda node: isinstance(node, FeedForward))


@numpy_or_jit
def _merged(scaled: _ScaledInputs) -> eqx.Module:
    return scaled.merged()


def _loss_of_scaled(loss: Callable, scaled: _ScaledInputs, rows: Any, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    return loss(scaled.merged(), rows, key)


class TrainingSplit(NamedTuple):
    """Rows (x, y) to train on, rows of the validation set, which may be empty, and the standardization of both."""

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
) -> TrainingSplit:
    """Standardized rows; the validation set is a random fraction of them or, without a key, the last rows.

    With steps, all rows are trained on. Indicators are not scaled.
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
) -> TrainingSplit:
    dtype = np.result_type(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    x_scaler = input_scaler(x, indicators, log_tails=log_tails)
    y_scaler = Standardizer.of(y) if scale_target else Standardizer.identity(y)
    rows = (x_scaler(x), y_scaler(y))
    if order is not None:
        rows = jax.tree.map(lambda a: a[order], rows)
    train, validation = first_and_others(rows, num_train)
    return TrainingSplit(train, validation, x_scaler, y_scaler)


@numpy_or_jit
def first_and_others(rows: PyTree, number: int) -> tuple[PyTree, PyTree]:
    """The first `number` rows of all arrays, and the other rows."""
    return jax.tree.map(lambda a: a[:number], rows), jax.tree.map(lambda a: a[number:], rows)


def squared_error(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """The squared error of every row, a loss for `optimize.train_minibatches`."""
    x, y = rows
    return (at_rows(network, x) - y) ** 2
