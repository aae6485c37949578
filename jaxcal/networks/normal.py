"""Networks of means and variances, alone or in an ensemble: how they are trained and what they predict.

`variance_network.fit` describes what is trained, and on which loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _programs, _random
from jaxcal._numpy import AnyArray, can_be_filled, namespace, numpy_or_jit, stacked
from jaxcal.distributions import Mixture, Normal
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import normal
from jaxcal.functional._loops import carried
from jaxcal.networks import presets, training
from jaxcal.networks.held_out import Widening
from jaxcal.networks.modules import FeedForward, NormalNetwork, as_variance, at_rows
from jaxcal.networks.training import XY, Rows, TrainingOptions
from jaxcal.optimize import Optimum


def settle_normal(
    what: str,
    num_inputs: int,
    options: TrainingOptions,
    preset: str | None,
    declared: type = TrainingOptions,
    **own: str | int | None,
) -> presets.Settings:
    """The settings of networks of means and variances; the options are those of `variance_network.fit`."""
    usnrt = presets.usnrt(num_inputs)._replace(form="alternating")
    known = {None: presets.DEFAULT, "crude": presets.CRUDE, "usnrt": usnrt}
    settings = training.settle(what, options, known, preset, declared, **own)
    _checks.check_choice("form", settings.form, ("joint", "alternating"))
    _checks.check_at_least("rounds", settings.rounds, 1)
    if settings.steps is not None and settings.form != "joint":
        raise ValueError(f"steps={settings.steps} are those of one network: give form='joint'; got {settings.form!r}.")
    return settings


def train_normal(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    settings: presets.Settings,
    indicators: tuple[int, ...],
    *,
    key: PRNGKeyArray,
    rows: Rows | None = None,
) -> tuple[Optimum, Rows]:
    """The networks, trained, and the rows they were trained on: those given, or x and y divided by the key.

    Indicators are described by `training.split`.
    """
    split_key, train_key = _random.split(key)
    if rows is None:
        rows = training.split(x, y, settings, split_key, indicators=indicators)
    if settings.form == "joint":
        return _joint(rows, settings, train_key), rows
    # Arrays: another rate compiles no new program.
    _checks.check_positive("learning_rate", settings.learning_rate)
    rates = {name: jnp.asarray(getattr(settings, name)) for name in ("learning_rate", "weight_decay")}
    return _alternating(rows, settings._replace(**rates), train_key), rows


def as_normal(moments: tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]], y_scaler: Standardizer) -> Normal:
    """The distributions of standardized means and variances, in the unit of the data."""
    mean, variance = moments
    return Normal(y_scaler.inverse(mean), y_scaler.scale[None] * namespace(variance).sqrt(variance))


def as_mixture(
    means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"], widening: Widening | None, y_scaler: Standardizer
) -> Mixture:
    """The mixture of members, widened as a whole."""
    if widening is not None:
        means, variances = widening.of_members(means, variances)
    members = as_normal((means.ravel(), variances.ravel()), y_scaler)
    return Mixture(jax.tree.map(lambda leaf: leaf.reshape(means.shape), members))


def _joint(rows: Rows, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
    """One network with two outputs, trained on the likelihood."""
    init_key, train_key = _random.split(key)
    new = training.new_network(rows.train[0], settings.hidden)
    network = training.starting_network(settings.initial, lambda: NormalNetwork((new(2, key=init_key),)))
    loss = Partial(_negative_log_likelihood, beta=jnp.asarray(settings.beta, rows.train[1].dtype))
    return training.trainer(settings)(loss, network, rows.train, rows.validation, key=train_key)


def _alternating(rows: Rows, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
    """Two networks, trained alternately: by the host where it may, else by one program, which holds its loops once."""
    return (_alternating_rows if can_be_filled(rows, key) else _program_of_rows)(rows, settings, key)


def _alternating_rows(rows: Rows, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
    new = training.new_network(rows.train[0], settings.hidden)
    new_variance = partial(new, activation=settings.variance_activation)
    num_rows = rows.train[1].shape[0], rows.validation[1].shape[0]
    parts, train, anew = (rows.train, rows.validation), training.trainer(settings), not settings.calibrate
    return alternate(parts, num_rows, new, new_variance, train, key, settings.rounds, anew=anew)


_program_of_rows = _programs.jit(_alternating_rows)


def alternate(
    data: tuple[tuple, tuple],
    num_rows: tuple[ArrayLike, ArrayLike],
    new_mean: Callable[..., FeedForward],
    new_variance: Callable[..., FeedForward],
    train: Callable[..., Optimum],
    key: PRNGKeyArray,
    rounds: int,
    *,
    anew: bool,
) -> Optimum:
    """A network for the mean and one for the variance, trained alternately, in every round from new weights.

    `data` are the rows (x, y) to train on, and those to stop by, of which there are `num_rows`. With `anew` every
    training divides them anew, so that the variance learns from residuals of rows, too, that the mean was not trained
    on; else nothing is trained on the rows to stop by, which can tell by how much the variance is too small.
    """
    x, y, variances = _joined(*data)
    lengths = tuple(part.shape[0] for _, part in data)

    def divide(rows: tuple, key: PRNGKeyArray) -> tuple[tuple, tuple]:
        if not anew:
            return training.first_and_others(rows, lengths[0])
        return _divide(rows, _random.uniform(key, sum(lengths), y.dtype), lengths, num_rows)

    def one_round(variances: Float[AnyArray, " n"], keys: Any) -> tuple[Float[AnyArray, " n"], tuple]:
        parts = divide((x, y, variances), keys[0])
        mean = train(weighted_squared_error, new_mean("scalar", key=keys[1]), *parts, key=keys[2])
        errors = errors_of(mean.params, x, y)
        initial = new_variance("scalar", key=keys[4])
        parts = divide((x, errors), keys[3])
        variance = train(residual_negative_log_likelihood, initial, *parts, key=keys[5])
        widened_by = None if anew else (lengths[0], num_rows[1])
        return _variances(variance.params, x, errors, widened_by), (mean, variance)

    if not can_be_filled(data, key):
        # A loop: the compiled program holds both trainings once, whatever the number of rounds.
        return _last(lax.scan(one_round, carried(variances), jax.random.split(key, (rounds, 6)))[1])
    keys, optima = _random.split(key, 6 * rounds), []
    for first in range(0, len(keys), 6):
        variances, found = one_round(variances, keys[first : first + 6])
        optima.append(found)
    return _last(stacked(optima))


@numpy_or_jit
def _joined(train: tuple, validation: tuple) -> tuple:
    """The rows (x, y) of both parts together, and variances of 1."""
    xp = namespace(train[1])
    x, y = (xp.concatenate(parts) for parts in zip(train, validation, strict=True))
    return x, y, xp.ones_like(y)


@numpy_or_jit
def with_unit_variances(*parts: tuple) -> tuple[tuple, ...]:
    """Rows (x, y, 1)."""
    return tuple((x, y, namespace(y).ones_like(y)) for x, y in parts)


@numpy_or_jit
def errors_of(network: FeedForward, x: Float[AnyArray, "n d"], y: Float[AnyArray, " n"]) -> Float[AnyArray, " n"]:
    """Of a network of the mean."""
    return y - at_rows(network, x)


@numpy_or_jit
def _variances(
    network: FeedForward,
    x: Float[AnyArray, "n d"],
    errors: Float[AnyArray, " n"],
    widened_by: tuple[int, ArrayLike] | None,
) -> Float[AnyArray, " n"]:
    """What the next mean weighs its rows by: widened by the held-out ones, from a first place on and so many."""
    variances = as_variance(at_rows(network, x), alternating=True)
    if widened_by is None:
        return variances
    first, number = widened_by
    # Rows that were learned by heart have a small variance, and would count for everything.
    there = namespace(errors).arange(len(errors) - first) < number
    widening = Widening.of(variances[first:], errors[first:], weights=there.astype(errors.dtype))
    # Without its least variance: these rows are not far from all.
    return widening.factor * (variances + widening.floor)


@numpy_or_jit
def _last(optima: tuple[Optimum, Optimum]) -> Optimum:
    """The networks of mean and variance of the last round, and how all of them went."""
    mean, variance = jax.tree.map(lambda leaf: leaf[-1], optima)
    # A later result code is a worse one.
    xp = namespace(mean.steps)
    steps, result = (xp.stack([getattr(o, name) for o in optima]) for name in ("steps", "result"))
    return Optimum(NormalNetwork((mean.params, variance.params)), variance.loss, steps.sum(), result.max())


@numpy_or_jit
def _divide(
    rows: tuple, draws: Float[AnyArray, " n"], lengths: tuple[int, int], num_rows: tuple[ArrayLike, ArrayLike]
) -> tuple[tuple, tuple]:
    """A random division into two parts of so many rows, padded to these lengths, as the rows are that come in."""
    xp = namespace(draws)
    places = [xp.arange(length) for length in lengths]
    is_there = xp.concatenate([place < number for place, number in zip(places, num_rows, strict=True)])
    order = xp.argsort(xp.where(is_there, draws, 2), stable=True)
    chosen = order[places[0]], order[xp.minimum(num_rows[0] + places[1], order.shape[0] - 1)]
    training, validation = (jax.tree.map(lambda part, at=at: part[at], rows) for at in chosen)
    return training, validation


def _negative_log_likelihood(
    network: NormalNetwork, rows: XY, key: PRNGKeyArray | None, *, beta: Float[Array, ""]
) -> Float[AnyArray, " n"]:
    """That of every row; in training times its variance to the power beta, which is held fixed."""
    x, y = rows
    mean, variance = at_rows(network, x)
    loss = -normal.log_prob(y, mean, jnp.sqrt(variance))
    return loss if key is None else lax.stop_gradient(variance) ** beta * loss


def weighted_squared_error(network: FeedForward, rows: tuple, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """Over the variance of every row, which comes after x and y."""
    *xy, variance = rows
    return training.squared_error(network, tuple(xy), key) / variance


def residual_negative_log_likelihood(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """Of residuals, by a network of their variance."""
    x, residual = rows
    std = namespace(residual).sqrt(as_variance(at_rows(network, x), alternating=True))
    return -normal.log_prob(residual, 0.0, std)
