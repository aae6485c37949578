"""Networks of means and variances, alone or in an ensemble: how they are trained and what they predict.

`variance_network.fit` describes the networks and their losses.
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
from jaxcal.networks.training import XY, TrainingOptions, TrainingSplit
from jaxcal.optimize import Optimum


def settle_normal(
    fit: Callable,
    num_inputs: int,
    options: TrainingOptions,
    preset: str | None,
    declared: type = TrainingOptions,
    **own: str | int | None,
) -> presets.Settings:
    """The settings of networks of means and variances, from the options of `variance_network.fit`."""
    usnrt = presets.usnrt(num_inputs)._replace(form="alternating")
    known = {None: presets.DEFAULT, "crude": presets.CRUDE, "usnrt": usnrt}
    settings = training.settle(fit, options, known, preset, declared, **own)
    _checks.check_choice("form", settings.form, ("joint", "alternating"))
    _checks.check_at_least("rounds", settings.rounds, 1)
    if settings.steps is not None and settings.form != "joint":
        raise ValueError(f"steps={settings.steps} trains one network: give form='joint'; got {settings.form!r}.")
    return settings


def train_normal(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    settings: presets.Settings,
    indicators: tuple[int, ...],
    *,
    key: PRNGKeyArray,
    rows: TrainingSplit | None = None,
) -> tuple[Optimum, TrainingSplit]:
    """The trained networks, and the rows they were trained on: the given `rows`, or x and y divided by the key.

    `training.split` describes the indicators.
    """
    split_key, train_key = _random.split(key)
    if rows is None:
        rows = training.split(x, y, settings, split_key, indicators=indicators)
    if settings.form == "joint":
        return _joint(rows, settings, train_key), rows
    # The rates are arrays: another value compiles no new program.
    _checks.check_positive("learning_rate", settings.learning_rate)
    rates = {name: jnp.asarray(getattr(settings, name)) for name in ("learning_rate", "weight_decay")}
    return _alternating(rows, settings._replace(**rates), train_key), rows


def as_normal(moments: tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]], y_scaler: Standardizer) -> Normal:
    """Normal distributions in the unit of the data, from standardized means and variances."""
    mean, variance = moments
    return Normal(y_scaler.inverse(mean), y_scaler.scale[None] * namespace(variance).sqrt(variance))


def as_mixture(
    means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"], widening: Widening | None, y_scaler: Standardizer
) -> Mixture:
    """The mixture of the members, widened as a whole."""
    if widening is not None:
        means, variances = widening.of_members(means, variances)
    members = as_normal((means.ravel(), variances.ravel()), y_scaler)
    return Mixture(jax.tree.map(lambda leaf: leaf.reshape(means.shape), members))


def _joint(rows: TrainingSplit, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
    """One network with two outputs, trained on the likelihood."""
    init_key, train_key = _random.split(key)
    new = training.new_network(rows.train[0], settings.hidden)
    network = training.starting_network(settings.initial, lambda: NormalNetwork((new(2, key=init_key),)))
    loss = Partial(_negative_log_likelihood, beta=jnp.asarray(settings.beta, rows.train[1].dtype))
    return training.trainer(settings)(loss, network, rows.train, rows.validation, key=train_key)


def _alternating(rows: TrainingSplit, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
    """Two networks, trained alternately: from Python where possible, else in one program.

    The program holds the loops of each training once.
    """
    return (_alternating_rows if can_be_filled(rows, key) else _program_of_rows)(rows, settings, key)


def _alternating_rows(rows: TrainingSplit, settings: presets.Settings, key: PRNGKeyArray) -> Optimum:
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

    `data` are the rows (x, y) to train on and the rows to stop by; `num_rows` are their numbers. With `anew`, every
    training divides the rows again. The variance then also learns from residuals of rows that the mean was not trained
    on. Without `anew`, nothing is trained on the rows to stop by. They can then show by how much the variance is too
    small.
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
        # In a loop the compiled program holds both trainings once, whatever the number of rounds.
        return _last(lax.scan(one_round, carried(variances), jax.random.split(key, (rounds, 6)))[1])
    keys, optima = _random.split(key, 6 * rounds), []
    for first in range(0, len(keys), 6):
        variances, optimum = one_round(variances, keys[first : first + 6])
        optima.append(optimum)
    return _last(stacked(optima))


@numpy_or_jit
def _joined(train: tuple, validation: tuple) -> tuple:
    """The rows (x, y) of both parts together, and a variance of 1 for each."""
    xp = namespace(train[1])
    x, y = (xp.concatenate(parts) for parts in zip(train, validation, strict=True))
    return x, y, xp.ones_like(y)


@numpy_or_jit
def with_unit_variances(*parts: tuple) -> tuple[tuple, ...]:
    """Rows (x, y, 1)."""
    return tuple((x, y, namespace(y).ones_like(y)) for x, y in parts)


@numpy_or_jit
def errors_of(network: FeedForward, x: Float[AnyArray, "n d"], y: Float[AnyArray, " n"]) -> Float[AnyArray, " n"]:
    """The errors y - m(x) of a network of the mean."""
    return y - at_rows(network, x)


@numpy_or_jit
def _variances(
    network: FeedForward,
    x: Float[AnyArray, "n d"],
    errors: Float[AnyArray, " n"],
    widened_by: tuple[int, ArrayLike] | None,
) -> Float[AnyArray, " n"]:
    """The variances that weigh the rows of the next mean; with `widened_by`, the held-out rows widen them.

    `widened_by` is the place of the first held-out row, and their number.
    """
    variances = as_variance(at_rows(network, x), alternating=True)
    if widened_by is None:
        return variances
    first, number = widened_by
    # The network may memorize rows: their variance is then small, and they would have nearly all the weight.
    there = namespace(errors).arange(len(errors) - first) < number
    widening = Widening.of(variances[first:], errors[first:], weights=there.astype(errors.dtype))
    # factor (v + floor), without the least variance: none of these rows lies far from all others.
    return widening.factor * (variances + widening.floor)


@numpy_or_jit
def _last(optima: tuple[Optimum, Optimum]) -> Optimum:
    """The networks of the last round, with the steps of all trainings and their worst result."""
    mean, variance = jax.tree.map(lambda leaf: leaf[-1], optima)
    # A larger result code is a worse one.
    xp = namespace(mean.steps)
    steps, result = (xp.stack([getattr(o, name) for o in optima]) for name in ("steps", "result"))
    return Optimum(NormalNetwork((mean.params, variance.params)), variance.loss, steps.sum(), result.max())


@numpy_or_jit
def _divide(
    rows: tuple, draws: Float[AnyArray, " n"], lengths: tuple[int, int], num_rows: tuple[ArrayLike, ArrayLike]
) -> tuple[tuple, tuple]:
    """A random division of the rows into two parts of `num_rows` rows, padded to `lengths`.

    The incoming rows are padded in the same way.
    """
    xp = namespace(draws)
    places = [xp.arange(length) for length in lengths]
    is_there = xp.concatenate([place < number for place, number in zip(places, num_rows, strict=True)])
    # The draws are in [0, 1): padding, with 2, comes last.
    order = xp.argsort(xp.where(is_there, draws, 2), stable=True)
    chosen = order[places[0]], order[xp.minimum(num_rows[0] + places[1], order.shape[0] - 1)]
    training, validation = (jax.tree.map(lambda part, at=at: part[at], rows) for at in chosen)
    return training, validation


def _negative_log_likelihood(
    network: NormalNetwork, rows: XY, key: PRNGKeyArray | None, *, beta: Float[Array, ""]
) -> Float[AnyArray, " n"]:
    """The negative log likelihood of every row; in training it is multiplied by v^beta, which is held fixed."""
    x, y = rows
    mean, variance = at_rows(network, x)
    loss = -normal.log_prob(y, mean, jnp.sqrt(variance))
    return loss if key is None else lax.stop_gradient(variance) ** beta * loss


def weighted_squared_error(network: FeedForward, rows: tuple, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """The squared error of every row over its variance, which comes after x and y."""
    *xy, variance = rows
    return training.squared_error(network, tuple(xy), key) / variance


def residual_negative_log_likelihood(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[AnyArray, " n"]:
    """The negative log likelihood of residuals under N(0, v(x)), with a network of the variance v."""
    x, residual = rows
    std = namespace(residual).sqrt(as_variance(at_rows(network, x), alternating=True))
    return -normal.log_prob(residual, 0.0, std)
