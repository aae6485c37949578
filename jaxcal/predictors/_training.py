"""What the fits of networks share: the rows, checked, standardised and in part held out, and the settings of papers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal.nn import FeedForward
from jaxcal.optimize import Optimum, adam_l2, num_train, train_minibatches
from jaxcal.scaling import Standardiser

XY = tuple[Float[Array, "n d"], Float[Array, " n"]]

# A network with its initial weights, made by one compiled program.
start = eqx.filter_jit(FeedForward)


class Rows(NamedTuple):
    """Rows (x, y) to train on and to stop by, and the standardisation they went through."""

    train: XY
    validation: XY
    x_scaler: Standardiser
    y_scaler: Standardiser


class Setting(NamedTuple):
    """What a preset decides."""

    hidden: tuple[int, ...]
    learning_rate: ArrayLike
    weight_decay: ArrayLike
    batch_size: int


DEFAULT = Setting((64, 64), 1e-3, 0.0, 32)
# Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", appendix A.
CRUDE = Setting((1024, 1024, 1024), 1e-4, 0.01, 32)


def usnrt_setting(num_inputs: int) -> Setting:
    """Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by Tree-Structured Learning", V-A."""
    return Setting((8 * num_inputs, 4 * num_inputs), 0.01, 0.0, 64)


def settle(
    presets: Mapping[str | None, Setting],
    preset: str | None,
    *,
    hidden: Sequence[int] | None,
    learning_rate: ArrayLike | None,
    weight_decay: ArrayLike | None,
    batch_size: int | None,
) -> Setting:
    """The options that were given, and those of the preset in place of None."""
    _checks.check_choice("preset", preset, tuple(presets))
    if weight_decay is not None:
        _checks.check_not_negative("weight_decay", weight_decay)
    default = presets[preset]
    return Setting(
        default.hidden if hidden is None else tuple(hidden),
        default.learning_rate if learning_rate is None else learning_rate,
        default.weight_decay if weight_decay is None else weight_decay,
        default.batch_size if batch_size is None else batch_size,
    )


def trainer(setting: Setting, max_epochs: int, patience: int) -> Callable[..., Optimum]:
    """`train_minibatches` by Adam, as a setting has it."""
    return partial(
        train_minibatches,
        optimizer=Partial(adam_l2, weight_decay=jnp.asarray(setting.weight_decay)),
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        max_epochs=max_epochs,
        patience=patience,
    )


def as_data(x: ArrayLike, y: ArrayLike, validation_share: float) -> tuple[Float[Array, "n d"], Float[Array, " n"], int]:
    """Checked inputs and targets, and how many of the rows to train on."""
    x = _checks.as_matrix("x", x)
    y = _checks.as_vector("y", y, length=x.shape[0])
    _checks.check_rows("x", x, 2)
    return x, y, num_train(x.shape[0], validation_share)


def as_inputs(x: ArrayLike, x_scaler: Standardiser) -> Float[Array, "n d"]:
    """Checked inputs, that have the columns of the training inputs."""
    x = _checks.as_matrix("x", x)
    _checks.check_columns("x", x, x_scaler.loc.shape[-1], "the network was trained on")
    return x


@eqx.filter_jit
def hold_out(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    num_train: int,
    key: PRNGKeyArray | None,
    *,
    scale_target: bool = True,
) -> Rows:
    """Standardised rows, of which `num_train` are trained on: a random choice, or, without a key, the first ones."""
    x, y = lax.stop_gradient((x, y))
    dtype = jnp.result_type(x, y)
    x, y = x.astype(dtype), y.astype(dtype)
    x_scaler = Standardiser.of(x)
    y_scaler = Standardiser.of(y) if scale_target else Standardiser.identity(y)
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
