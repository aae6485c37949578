"""Monte Carlo dropout: a network that predicts as an ensemble of random parts of itself.

Gal & Ghahramani, "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning", ICML 2016.
Its predictive variance (section 4) is the variance over passes with dropout plus the variance of the noise, 1 / tau.
Gal, Hron & Kendall, "Concrete Dropout", NeurIPS 2017, learn the rates: `networks.ConcreteNetwork` has the equations.
"""

from functools import partial
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, UInt32

from jaxcal import _checks, _programs, _random
from jaxcal.distributions import Mixture, Normal, Point
from jaxcal.frames.columns import Categorical, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.functional import linalg, normal
from jaxcal.networks import ConcreteNetwork, FeedForward, TrainingOptions, presets
from jaxcal.networks.held_out import mixture_moments, widened
from jaxcal.networks.normal import as_mixture
from jaxcal.networks.trained import WidenedNetwork, weighing_held_out_rows
from jaxcal.networks.training import XY, new_network, settle, split, squared_error, trainer


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    rate: "ArrayLike | str" = 0.2,
    length_scale: "ArrayLike" = 1e-4,
    num_samples: int = 100,
    distribution: str = "normal",
    preset: str | None = None,
    **options: "Unpack[TrainingOptions]",
) -> "Dropout":
    """Train a ReLU network on the mean squared error by Adam, with dropout after every hidden layer.

    In training every row of every batch has its own mask. A prediction uses `num_samples` masks, which are drawn once
    and are the same for all rows. Each mask gives a network f_s. The distribution at x is the mixture over s of
    N(f_s(x), noise), or the normal distribution with the mixture's moments (Gal & Ghahramani, section 4),

        mean(x) = mean_s f_s(x),    variance(x) = var_s f_s(x) + noise.

    The variance of the noise is the part of the squared error in the validation set that the passes leave unexplained.
    It is the mean of (y - mean(x))^2 - var_s f_s(x), but at least 0. The same rows then widen or narrow the variance as
    a whole, as in `variance_network.fit`.

    The loss of the validation set is computed without dropout.

    `rate="concrete"` learns a rate for the inputs of every layer, x included (Gal, Hron & Kendall 2017). The network
    then has two outputs: the mean f_s(x) and the logarithm of the variance of the noise. This variance is part of every
    pass, and no longer a constant. The loss of a row is its negative log likelihood plus 1 / N of the divergence from
    the prior, for N training rows (`networks.ConcreteNetwork.divergence`). This is half of the authors' loss. The rates
    start at 0.1 and move slowly: with little patience, training ends before they settle.

    `preset="crude"` is the setting of Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions
    Empirically", appendix A: three hidden layers of 1024, learning rate 1e-4 and weight decay 0.01. The paper's rate is
    0.2, the default. In this setting the distribution consists of the passes alone, without noise, which makes it
    overconfident. The samples, the batches, the epochs and the stopping, which the paper does not describe, stay as
    here.

    `preset="usnrt"` is the setting of the dropout that USNRT is compared with, again without noise. It has learning
    rate 0.01, batch size 64 and three hidden layers of 8d, 16d and 4d units. Where the rates are learned, it has two
    hidden layers of 8d and 4d units. See Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks by
    Tree-Structured Learning", sections V-A and VI-A. The preset does not set `rate` and `num_samples`: the paper has a
    rate of 0.5, and 1000 samples in both variants.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x; a derivative through the training is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows, the batches and the masks.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        rate: probability that an activation is dropped, or "concrete" to learn it.
        length_scale: of the weights' prior N(0, 1 / length_scale^2), where the rates are learned.
        num_samples: number of masks of a prediction.
        distribution: what is predicted: the "normal" distribution of the moments, or the "mixture" itself, with
            [num_samples, n] numbers.
        preset: None, "usnrt" or, with a given rate, "crude" for other defaults, as above.
        **options: of the training, as `jaxcal.networks.TrainingOptions` describes them.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range.
            `jaxcal.networks.TrainingOptions` lists the other errors of a training.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import dropout
        >>> x = np.linspace(-1, 1, 200)
        >>> network = dropout.fit(x, 4 * x + 5, key=jax.random.key(0), max_epochs=100)
        >>> distribution = network(np.array([-0.5, 0.5, 10.0]))
        >>> distribution.mean[:2].round(0).tolist(), bool(distribution.std[2] > 3 * distribution.std[1])
        ([3.0, 7.0], True)
    """
    _checks.check_key(key)
    if isinstance(rate, str):
        _checks.check_choice("rate", rate, ("concrete",))
    else:
        _checks.check_fraction("rate", rate)
    _checks.check_positive("length_scale", length_scale)
    _checks.check_at_least("num_samples", num_samples, 2)
    _checks.check_choice("distribution", distribution, ("normal", "mixture"))
    columns, x, y = as_data(x, y, categorical)
    settings = settle(fit, options, _presets(rate, x.shape[1]), preset)
    if not settings.hidden:
        raise ValueError("hidden must hold at least one width: dropout follows the hidden layers.")
    init_key, split_key, train_key, mask_key = _random.split(key, 4)
    rows = split(x, y, settings, split_key, indicators=columns.indicators)
    dtype = rows.train[0].dtype
    new = partial(new_network(rows.train[0], settings.hidden), key=init_key)
    if isinstance(rate, str):
        given_rate, network = None, ConcreteNetwork(new(2))
        known = {"length_scale": length_scale, "num_rows": rows.train[1].shape[0]}
        loss = Partial(_evidence_bound, **{name: jnp.asarray(value, dtype) for name, value in known.items()})
    else:
        given_rate, network = jnp.asarray(rate, dtype), new("scalar")
        loss = Partial(_squared_error, rate=given_rate)
    optimum = trainer(settings)(loss, network, rows.train, rows.validation, key=train_key)
    passes = Passes(optimum.params, given_rate, jax.random.bits(mask_key, (num_samples,), "uint32"))
    unexplained = preset is None and given_rate is not None
    noise_std = _noise_std(passes, rows.validation) if unexplained else None
    own = {"passes": passes, "noise_std": noise_std, "distribution": distribution}
    return Dropout.of(columns, rows, optimum, settings, **own)


class Passes(eqx.Module):
    """A network and the random masks that it is evaluated with.

    Attributes:
        network: the weights.
        rate: probability that an activation is dropped; None where the network has learned its own.
        seeds: a seed for the random key of every mask; unlike keys, they can be saved.
    """

    network: FeedForward | ConcreteNetwork
    rate: Float[Array, "*runs"] | None
    seeds: UInt32[Array, "*samples"]

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "samples n ..."]:
        """The outputs under each mask, one mask after another: memory holds the activations of one mask at a time."""

        # For the same reason, derivatives compute the activations again.
        @jax.checkpoint
        def one(seed: UInt32[Array, ""]) -> Float[Array, "n ..."]:
            options = {} if self.rate is None else {"rate": self.rate}
            return jax.vmap(partial(self.network, key=jax.random.key(seed), **options))(x)

        return lax.map(one, self.seeds)


class Dropout(WidenedNetwork[Normal | Mixture]):
    """A trained network with its masks; made by `fit`.

    Attributes:
        passes: the weights and the masks.
        noise_std: the std of the noise, on the scale of `y_scaler`; None with the preset, and where every pass predicts
            its own noise.
        widening: the correction of the variance to the variance of new rows; None with a preset.
        distribution: what is predicted, "normal" or "mixture". `jaxcal.networks.TrainedNetwork` describes the other
            fields. The validation loss is the squared error without dropout. For concrete dropout it is the negative
            log likelihood.
    """

    passes: Passes
    noise_std: Float[Array, "*runs"] | None
    distribution: str = eqx.field(static=True)

    def _distribution(self, x: Float[Array, "n d"]) -> Normal | Mixture:
        means, noise = self._of_passes(x)
        scaler = self.y_scaler
        if self.distribution == "normal":
            mean, variance = mixture_moments(means, noise)
            std = linalg.sqrt(widened(variance, self.widening))
            return Normal(scaler.inverse(mean), scaler.scale[None] * std)
        if self.passes.rate is not None and self.noise_std is None:
            return Mixture(jax.vmap(lambda mean: Point(scaler.inverse(mean)))(means))
        return as_mixture(means, noise, self.widening, scaler)

    def _moments(self, x: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        return mixture_moments(*self._of_passes(x))

    def _of_passes(self, x: Float[Array, "n d"]) -> tuple[Float[Array, "samples n"], Float[Array, "samples n"]]:
        """The mean of every pass, and the variance of its noise, which is 0 if there is none."""
        samples = self.passes(x)
        if self.passes.rate is None:
            means, log_variances = jnp.moveaxis(samples, -1, 0)
            return means, jnp.exp(log_variances)
        variance = 0 if self.noise_std is None else self.noise_std**2
        return samples, jnp.broadcast_to(variance, samples.shape).astype(samples.dtype)


def _presets(rate: ArrayLike | str, num_inputs: int) -> dict[str | None, presets.Settings]:
    """The settings of papers, for a given rate or for rates to be learned."""
    usnrt = presets.usnrt(num_inputs)
    if isinstance(rate, str):
        return {None: presets.DEFAULT, "usnrt": usnrt}
    hidden = (8 * num_inputs, 16 * num_inputs, 4 * num_inputs)
    return {None: presets.DEFAULT, "crude": presets.CRUDE, "usnrt": usnrt._replace(hidden=hidden)}


@weighing_held_out_rows
@_programs.jit
def _noise_std(passes: Passes, validation: XY, weights: Float[Array, " n"] | None = None) -> Float[Array, ""]:
    """The root of the mean squared error minus the mean variance of the passes, at least 0."""
    x, y = validation
    samples = passes(x)
    squared_error = (y - jnp.mean(samples, axis=0)) ** 2
    # noise = mean((y - mean_s f_s(x))^2 - var_s f_s(x))
    left = jnp.average(squared_error - jnp.var(samples, axis=0), weights=weights)
    return linalg.sqrt(jnp.maximum(left, 0))


def _squared_error(
    network: FeedForward, rows: XY, key: PRNGKeyArray | None, *, rate: Float[Array, ""]
) -> Float[Array, " n"]:
    if key is None:
        return squared_error(network, rows, key)
    x, y = rows
    keys = jax.random.split(key, y.shape[0])
    return (jax.vmap(lambda row, key: network(row, rate=rate, key=key))(x, keys) - y) ** 2


def _evidence_bound(
    network: ConcreteNetwork,
    rows: XY,
    key: PRNGKeyArray | None,
    *,
    length_scale: Float[Array, ""],
    num_rows: Float[Array, ""],
) -> Float[Array, " n"]:
    """The negative log likelihood of every row; in training, under dropout and plus the divergence over N."""
    x, y = rows
    if key is None:
        outputs, penalty = jax.vmap(network)(x), 0.0
    else:
        outputs = jax.vmap(lambda row, key: network(row, key=key))(x, jax.random.split(key, y.shape[0]))
        penalty = network.divergence(length_scale) / num_rows
    mean, log_variance = outputs.T
    return penalty - normal.log_prob(y, mean, jnp.exp(log_variance / 2))
