"""A network that returns recalibrated quantiles: distribution calibration by quantile regression.

Kuleshov and Deshpande, "Calibrated and Sharp Uncertainties in Deep Learning via Density Estimation", ICML 2022. The
recalibrator R takes a level tau and features of the base distribution F, which are its quantiles at evenly spaced
levels. R returns the quantile of y at tau given F. It minimizes the pinball loss, `functional.scores.pinball`, at
uniformly random levels, on rows that the model was not trained on. Any property of the base's distribution of a row may
change the answer. So rows with different distributions are corrected differently, but no finite number of rows
guarantees a coverage.

Capone, Hirche and Pleiss, "Sharp Calibrated Gaussian Processes", NeurIPS 2023, section 7, measure it as "NN". They use
the network of that paper, "trained over 200 epochs, with additional pretraining over 2000 epochs using a single
dataset".

These texts leave some choices open. This module chooses:

- The network. It has two hidden layers of 20 units with learned slopes below 0 (PReLU). Each hidden layer, and the
  output layer, takes the inputs and all layers before it. The features are the nine deciles. The optimizer is Adam at
  1e-3, with batches of 32 and one level for each row and step. Public code of the method has these choices. Other code
  has one hidden layer of ReLU and an L2 penalty. Neither is compared with the paper's own text.
- The pretraining. The weights seem to come from another data set, which the text does not describe. Here the network
  first learns to repeat the base's own quantiles at random levels, on the distributions of the calibration rows. No
  target is used, and training starts at the recalibrator that changes nothing.
- The units. The deciles enter as the median and the differences from it, in units of the calibration rows. The output
  is the distance from the median. The first and the last layer could learn these maps, but the spread of a sharp
  distribution would be lost in its location. The level enters as its standard normal quantile.
- Crossing. A network's quantiles may cross. They are put in increasing order, which brings them closer to the true
  quantiles (Chernozhukov, Fernandez-Val and Galichon, "Quantile and Probability Curves Without Crossing", Econometrica
  78, 2010).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr, ndtri
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, PyTree

from jaxcal import _checks, _programs, _random
from jaxcal._numpy import AnyArray, in_jax, namespace, numpy_or_jit
from jaxcal.calibrators import _groups
from jaxcal.calibrators._base import FINE_LEVELS, as_levels, check_base, rows_that_count
from jaxcal.calibrators._groups import Weights
from jaxcal.distributions import Distribution, Quantiles
from jaxcal.distributions._base import numpy_knows
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional.scores import pinball
from jaxcal.networks import FeedForward, TrainingRecord, presets
from jaxcal.networks.training import GIVE_STEPS, check_names, check_steps, first_and_others, starting_network
from jaxcal.optimize import Optimum, Result, adam, num_train, raise_unless_finite, train_full_batch, train_minibatches

_HIDDEN = (20, 20)
# The levels of the returned distribution, and of pretraining.
_LEVELS = np.array(FINE_LEVELS)
_DECILES = slice(19, None, 20)
_MEDIAN = 4
_IS_MEDIAN = np.arange(9) == _MEDIAN
# The loss of the validation set is a mean over these levels: 0.05, 0.1, ..., 0.95.
_WATCHED = _LEVELS[9::10]
# Pretraining has no validation set to stop by. It evaluates the loss of this number of rows only to detect divergence.
_FEW_ROWS = 64
# The number of rows that are predicted at a time: the units of rows x levels then fit into a processor's cache.
_CHUNK = 64


class NeuralQuantilesOptions(TypedDict, total=False):
    """The options of the training; an option that is None has its default.

    Attributes:
        learning_rate: the learning rate of Adam (default 1e-3).
        max_epochs: the largest number of epochs (default 1000; 200 with the preset). For 0 the network repeats the
            base's quantiles.
        patience: the number of epochs without improvement that ends the training (default 20).
        pretraining_epochs: number of epochs on the base's own quantiles (default 500; 2000 with the preset).
        validation_fraction: fraction of the rows in the validation set, `l - floor(l (1 - fraction))` of them (default
            0.2; 0 with the preset). With 0 the training uses all rows for all epochs, and keeps the last weights.
        steps: number of full-batch steps, as `jaxcal.networks.StepOptions` describes them, in place of epochs,
            patience, pretraining, validation set and preset; None for a training that the validation set stops.
        initial: the network that the steps start from; None for a network with random weights.
        throw: whether to raise an error if training diverges (default True); the module's `training.result` says so in
            any case.
    """

    learning_rate: ArrayLike | None
    max_epochs: int | None
    patience: int | None
    pretraining_epochs: int | None
    validation_fraction: float | None
    steps: int | None
    initial: "Recalibrator | None"
    throw: bool | None


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    levels: "Sequence[float] | None" = None,
    weights: "Weights | None" = None,
    preset: str | None = None,
    **options: "Unpack[NeuralQuantilesOptions]",
) -> "NeuralQuantiles":
    """Train a network that returns the quantile at a level from the base's deciles, by the pinball loss.

    The network first learns, by squared error, to repeat the base's own quantiles, and then learns from the targets. A
    random fraction of the rows is the validation set. Training stops when the validation loss has not improved for
    `patience` epochs, and the weights of the best epoch are kept. The method needs some hundred rows. If the errors
    have one distribution in units of the std, `isotonic` learns it from fewer rows. If a property is the same in all
    rows of the fit, such as the std, the network does not learn its effect.

    `preset="paper"` is the setting in which Capone, Hirche and Pleiss (2023) measure the method. It trains for 200
    epochs on all rows after 2000 epochs of pretraining, and keeps the last weights. If the base is already calibrated,
    this learns noise, and the intervals become too narrow.

    With weights the pinball losses of the training rows, and of the validation set, are weighted. A row of weight 2
    counts as two rows, and a row of weight 0 does not count. Weights that are all equal have no effect. Let w(x) be the
    density of new inputs divided by the density of the calibration inputs. The losses then estimate the losses of new
    rows. A weight of k times the mean makes the steps about k times as noisy.

    Features and errors are in units of the rows of the fit. So y -> a y + b (a > 0) transforms the predictions in the
    same way, up to rounding. Works under `jit` and, over keys and over runs of equal size, under `eqx.filter_vmap`.
    Predictions are differentiable in base.

    With `steps` the optimizer of the training, Adam, takes that number of steps on all rows. Each step draws a new
    random level for every row. Derivatives pass through the steps, in base, y, weights, the initial network and the
    learning rate. The gradient of the pinball loss depends only on the side of a quantile on which y lies. So the
    derivative in y comes from the unit alone. There is no pretraining. A fit with `max_epochs=0` has a `network` that
    repeats the base's quantiles; it can be the initial network. A derivative through a training without `steps` raises
    an error.

    Args:
        x: inputs [l, d]. Only a function of x that gives weights uses them; else x may be None.
        base: the model's predictions [l], any distribution with a std, on rows that it was not trained on.
        y: targets [l].
        key: random key of the weights, the validation set, the batches and the levels.
        levels: the levels of the returned quantiles [k], strictly increasing in (0, 1) (default 0.005, 0.01, ...,
            0.995). The distribution has atoms beyond the lowest and the highest level.
        weights: the weights of the rows [l], not negative, or a function of x that gives them; None for equal weights.
            The call needs no weights.
        preset: None, or "paper" as above.
        **options: of the training, as `NeuralQuantilesOptions` lists them.

    Raises:
        TypeError: if base is not a Distribution, or key is no random key. If there is no such option, or a derivative
            through a training without steps is requested.
        ValueError: if y or base is empty, not finite or of the wrong shape. If base is a `Point`, or all its stds are
            0. If a quantile of base at a level from 0.005 to 0.995 is infinite. If there are too few rows for a
            validation set, without rows of weight 0; at least two are needed. If an option is out of its range. If
            there are not as many weights as rows, a weight is negative, NaN or infinite, or all are 0. For further
            errors with steps see `jaxcal.networks.StepOptions`.
        FloatingPointError: if the loss becomes NaN or infinite and `throw` is set.

    Source: Kuleshov and Deshpande (2022), with the choices at the top of this module.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> y = 2 * np.random.default_rng(0).normal(size=500)
        >>> base = jc.Normal(np.zeros(500), np.ones(500))
        >>> fitted = jc.neural_quantiles.fit(None, base, y, key=jax.random.key(0), pretraining_epochs=100)
        >>> distribution = fitted(None, jc.Normal(np.array([0.0]), np.array([1.0])))
        >>> lower, upper = distribution.interval(0.9)
        >>> bool(lower[0] < -2.5), bool(upper[0] > 2.5)
        (True, True)
    """
    _checks.check_key(key)
    check_names(fit, options, NeuralQuantilesOptions)
    settings = presets.settle(presets.NEURAL_QUANTILES, preset, **options)
    steps, initial = settings.steps, settings.initial
    without = ("max_epochs", "patience", "pretraining_epochs", "validation_fraction")
    check_steps(steps, initial, preset=preset, **{name: options.get(name) for name in without})
    _checks.check_at_least("max_epochs", settings.max_epochs, 0)
    _checks.check_at_least("pretraining_epochs", settings.pretraining_epochs, 0)
    _checks.check_at_least("patience", settings.patience, 1)
    levels = as_levels(FINE_LEVELS if levels is None else levels)
    quantiles = _quantiles_of(base, _LEVELS)
    y = _checks.as_vector("y", y, length=quantiles.shape[0])
    (quantiles, std, y), counts = rows_that_count((quantiles, base.std, y), _groups.weights_of(x, weights, y.shape[0]))
    fraction = settings.validation_fraction if steps is None else 0.0
    size = num_train(y.shape[0], fraction) if fraction else y.shape[0]
    split_key, init_key, pretraining_key, key = _random.split(key, 4)
    rows = _prepare(quantiles, std, y, counts, size, _random.permutation(split_key, len(y)) if fraction else None)
    new = partial(_initial_network, rows.features.shape[1], key=init_key, dtype=rows.features.dtype)
    if steps is None:
        network = new()
        optimum = _pretrain_and_train(rows, network, (pretraining_key, key), size, settings)
    else:
        take = partial(train_full_batch, num_steps=steps, optimizer=adam, learning_rate=settings.learning_rate)
        network, learned = starting_network(initial, new), (rows.features, rows.errors, rows.weights)
        optimum = take(_check_loss, network, learned, key=key)
    training = TrainingRecord.of(optimum, throw=settings.throw)
    return NeuralQuantiles(network=optimum.params, scaler=rows.scaler, unit=rows.unit, training=training, levels=levels)


class Recalibrator(eqx.Module):
    """The network: it maps features of a distribution and the standard normal quantile of a level to a quantile.

    Every layer takes the inputs and all layers before it. Below 0 a unit has a slope of its own, initially 0.
    """

    layers: tuple[FeedForward, ...]
    slopes: tuple[Float[Array, "*runs width"], ...]

    def __init__(self, num_features: int, *, key: PRNGKeyArray, dtype: DTypeLike):
        seen = np.cumsum([num_features + 1, *_HIDDEN]).tolist()
        keys = jax.random.split(key, len(seen))
        self.layers = tuple(
            FeedForward(fan_in, (), fan_out, key=key, dtype=dtype)
            for fan_in, fan_out, key in zip(seen, (*_HIDDEN, 1), keys, strict=True)
        )
        self.slopes = tuple(jnp.zeros(width, dtype) for width in _HIDDEN)

    def __call__(self, features: Float[Array, " d"], z: Float[Array, ""]) -> Float[Array, ""]:
        """The quantile at the level Phi(z), as a distance from the median."""
        *hidden, last = self.layers
        seen = jnp.append(features, z)
        for layer, slopes in zip(hidden, self.slopes, strict=True):
            # h = W v + b and v <- (v, h if h > 0 else slope h): every layer takes all layers before it.
            units = layer(seen)
            seen = jnp.concatenate([seen, jnp.where(units > 0, units, slopes * units)])
        return last(seen)[0]


class NeuralQuantiles(eqx.Module):
    """A trained recalibrator; made by `fit`.

    Attributes:
        network: the weights.
        scaler: the standardization of the features: the base's median, and the distances of its other deciles from it.
        unit: the unit of the network's output, the mean absolute error of the base's medians.
        training: the record of the training after the pretraining, a `jaxcal.networks.TrainingRecord`. Its loss is the
            pinball loss in units of `unit`, on the validation set, or on all rows if there is none. The loss is
            infinite without training.
        levels: the levels of the returned quantiles.
    """

    network: Recalibrator
    scaler: Standardizer
    unit: Float[Array, "*runs"]
    training: TrainingRecord
    levels: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, x: Table | None, base: Distribution) -> Quantiles:
        """The recalibrated distributions.

        Args:
            x: not used; may be None.
            base: the model's predictions [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if base is a `Point` or empty, if a mean, std or decile of it is not finite, or if all stds are
                0.
        """
        return _predict(self, _quantiles_of(base, _LEVELS[_DECILES]))


@predicted_by_buckets
@_programs.jit
def _predict(fitted: NeuralQuantiles, deciles: Float[Array, "n 9"]) -> Quantiles:
    levels = jnp.asarray(fitted.levels, deciles.dtype)
    curve = lambda features: jax.vmap(fitted.network, (None, 0))(features, ndtri(levels))
    features = fitted.scaler(_features(deciles))
    distances = lax.map(curve, features, batch_size=min(_CHUNK, deciles.shape[0]))
    # q(tau) = median + unit R(features, Phi^-1(tau)), sorted over tau.
    return Quantiles(levels, jnp.sort(deciles[:, _MEDIAN, None] + fitted.unit[None, None] * distances, axis=1))


def _quantiles_of(base: Distribution, levels: np.ndarray) -> Float[Array, "n k"]:
    """The quantiles of the base, after checks of the base; they are finite."""
    check_base(base)
    if not base.has_std:
        raise ValueError(
            f"base is a {type(base).__name__}, whose quantiles are all its mean: it must have a std. "
            "jaxcal.accrue learns a std, for example."
        )
    if not _checks.is_traced(std := base.std) and not np.asarray(std).any():
        raise ValueError("base.std is 0 in every row: there is no shape to correct. jaxcal.accrue learns a std.")
    levels = in_jax(levels.astype(base.mean.dtype))
    # The warning of levels beyond a table is not needed: an infinite quantile raises an error.
    quantiles = base._rounded_quantiles(levels) if numpy_knows(base) else _icdf(base, levels)
    _checks.check_finite("base.icdf(levels)", quantiles)
    return quantiles


# One compiled program in place of the many small programs that most distributions need.
_icdf = _programs.jit(lambda base, levels: base.icdf(levels))


class _NetworkRows(NamedTuple):
    """Rows in the units of the network, and these units."""

    features: Float[AnyArray, "l 9"]
    quantiles: Float[AnyArray, "l k"]
    errors: Float[AnyArray, " l"]
    weights: Float[AnyArray, " l"] | None
    scaler: Standardizer
    unit: Float[AnyArray, ""]


@numpy_or_jit
def _prepare(quantiles, std, y, weights, trained: int, order: Int[AnyArray, " l"] | None) -> _NetworkRows:
    """The rows in an order; the weights of the training rows, and of the validation rows, have mean 1."""
    xp, dtype = namespace(quantiles, y), np.result_type(quantiles.dtype, y.dtype)
    quantiles, std, y = (a.astype(dtype) for a in (quantiles, std, y))
    features = _features(quantiles[:, _DECILES])
    medians = features[:, _MEDIAN]
    spread = xp.mean(std)
    # The standard deviations of the columns would be rounding errors if all rows had the same width, or the same mean.
    scales = xp.where(_IS_MEDIAN, spread + Standardizer.of(medians).scale, spread)
    scaler = Standardizer(Standardizer.of(features).loc, scales)
    errors = y - medians
    size = xp.mean(abs(errors))
    unit = xp.where(size > 0, size, spread)
    order = xp.arange(y.shape[0]) if order is None else order
    if weights is not None:
        weights = weights.astype(dtype)[order]
        parts = (weights[:trained], weights[trained:]) if trained < y.shape[0] else (weights,)
        weights = xp.concatenate([part / part.mean() for part in parts])
    distances = (quantiles - medians[:, None]) / unit[None, None]
    return _NetworkRows(
        features=scaler(features)[order],
        quantiles=distances[order],
        errors=errors[order] / unit[None],
        weights=weights,
        scaler=scaler,
        unit=unit,
    )


def _features(deciles: Float[AnyArray, "n 9"]) -> Float[AnyArray, "n 9"]:
    """The median, and the distances of the other deciles from it."""
    medians = deciles[:, _MEDIAN, None]
    return namespace(deciles).where(_IS_MEDIAN[None], medians, deciles - medians)


# A network with its initial weights, made by one compiled program.
_initial_network = _programs.jit(Recalibrator)


def _pretrain_and_train(
    rows: _NetworkRows,
    network: Recalibrator,
    keys: tuple[PRNGKeyArray, PRNGKeyArray],
    size: int,
    settings: presets.NeuralQuantilesSettings,
) -> Optimum:
    """Pretrain on the base's own quantiles, then train on the first `size` rows; the rest is the validation set."""
    own, learned = (rows.features, rows.quantiles), (rows.features, rows.errors, rows.weights)
    few, _ = first_and_others(own, _FEW_ROWS)
    train, rest = first_and_others(learned, size)
    descend = partial(_train, learning_rate=settings.learning_rate)
    pretrained = descend(_identity_loss, network, own, few, key=keys[0], epochs=settings.pretraining_epochs)
    if settings.throw:
        raise_unless_finite(pretrained)
    is_validated = size < rows.errors.shape[0]
    held_out, patience = (rest, settings.patience) if is_validated else (train, None)
    options = {"key": keys[1], "epochs": settings.max_epochs, "patience": patience}
    optimum = descend(_check_loss, pretrained.params, train, held_out, **options)
    diverged = pretrained.result == Result.NOT_FINITE
    return optimum._replace(result=jnp.where(diverged, pretrained.result, optimum.result))


def _train(
    loss: Callable,
    network: Recalibrator,
    data: PyTree,
    validation: PyTree,
    *,
    key: PRNGKeyArray,
    epochs: int,
    learning_rate: ArrayLike,
    patience: int | None = None,
) -> Optimum:
    """Train until the validation loss stops improving; without `patience` for all epochs, with the last weights."""
    if epochs == 0:
        infinity = jnp.full((), jnp.inf, data[0].dtype)
        return Optimum(network, infinity, jnp.zeros((), jnp.int32), jnp.asarray(Result.STEP_LIMIT))
    return train_minibatches(
        loss,
        network,
        data,
        validation,
        key=key,
        optimizer=adam,
        learning_rate=learning_rate,
        max_epochs=epochs,
        patience=epochs + 1 if patience is None else patience,
        restore_best=patience is not None,
        what="neural_quantiles.fit",
        instead=GIVE_STEPS,
    )


def _check_loss(network: Recalibrator, rows: PyTree, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    """The weighted pinball loss at one random level for each row; without a key its mean over fixed levels."""
    features, errors, weights = rows
    counted = lambda losses: losses if weights is None else weights * losses
    if key is None:
        levels = jnp.asarray(_WATCHED, errors.dtype)
        at = lambda level: pinball(errors, _at(network, features, jnp.full_like(errors, ndtri(level))), level)
        return counted(jnp.mean(jax.vmap(at)(levels), axis=0))
    # The standard normal quantile of a uniform level, which is never infinite.
    z = jax.random.normal(key, errors.shape, errors.dtype)
    return counted(pinball(errors, _at(network, features, z), ndtr(z)))


def _identity_loss(network: Recalibrator, rows: PyTree, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    """The squared error of the base's quantile at a random level for each row; without a key its mean over deciles."""
    features, quantiles = rows
    z = ndtri(jnp.asarray(_LEVELS, quantiles.dtype))
    if key is None:
        at = lambda z: _at(network, features, jnp.full_like(quantiles[:, 0], z))
        return jnp.mean((jax.vmap(at, out_axes=1)(z[_DECILES]) - quantiles[:, _DECILES]) ** 2, axis=1)
    chosen = jax.random.randint(key, quantiles.shape[:1], 0, z.shape[0])
    return (_at(network, features, z[chosen]) - jnp.take_along_axis(quantiles, chosen[:, None], axis=1)[:, 0]) ** 2


def _at(network: Recalibrator, features: Float[Array, "n 9"], z: Float[Array, " n"]) -> Float[Array, " n"]:
    """The network's quantile of every row at a level of its own, Phi(z)."""
    return jax.vmap(network)(features, z)
