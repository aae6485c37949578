"""A network that predicts a normal law, its mean and its variance, with early stopping.

The joint form, one network with two outputs trained on the likelihood, is that of Nix & Weigend, "Estimating the Mean
and Variance of the Target Probability Distribution", ICNN 1994. The alternating form has a network for the mean and
one for the variance, trained in turns. With its preset it is the model of CRUDE that "separately predicts a mean and
variance" (Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", section 5.1).
"""

from collections.abc import Callable, Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import Normal
from jaxcal.functional.scores import normal_log_prob
from jaxcal.nn import FeedForward, NormalNetwork, as_variance
from jaxcal.optimize import Optimum, adam_l2, raise_unless_finite, train_minibatches
from jaxcal.predictors._training import XY, Rows, as_data, as_inputs, hold_out, settle, squared_error, start
from jaxcal.scaling import Standardiser


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: PRNGKeyArray,
    form: str = "joint",
    rounds: int = 2,
    hidden: Sequence[int] | None = None,
    learning_rate: ArrayLike | None = None,
    weight_decay: ArrayLike | None = None,
    batch_size: int = 32,
    max_epochs: int = 1000,
    patience: int = 10,
    validation_share: float = 0.2,
    preset: str | None = None,
    throw: bool = True,
) -> "VarianceNetwork":
    """Train ReLU networks for the mean m(x) and the variance v(x) of a normal law by Adam.

    The loss of a row is its negative log likelihood (Nix & Weigend, 1994),

        (log v(x) + (y - m(x))^2 / v(x) + log 2 pi) / 2,    v(x) = softplus(output) + 1e-6.

    `form="joint"` trains one network with two outputs on it. `form="alternating"` trains a network for the mean on the
    squared error, then one for the variance on this loss with the mean held fixed; then both anew, the mean on the
    squared error over the variance found before; and so on for `rounds` rounds. The residuals are those of the rows
    that the mean was trained on, but the variance stops by those of the rows held out.

    Inputs and target are standardised by the rows given here, so y -> a y + b changes the prediction exactly so, up to
    rounding; the floor of the variance keeps every std above a thousandth of the target's. A share of the rows, drawn
    at random, is held out: training stops when their loss has not improved for `patience` epochs, and the weights of
    the best epoch are kept.

    `preset="crude"` is the setting of CRUDE, appendix A: three hidden layers of 1024, learning rate 1e-4 and weight
    decay 0.01. The paper says neither which form, nor anything of batches, epochs and stopping: those stay as here.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. No gradient passes
    through the training; predictions are differentiable in x.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows and the batches.
        form: "joint" or "alternating".
        rounds: how often the alternating form trains both networks.
        hidden: widths of the hidden layers (default 64, 64).
        learning_rate: of Adam (default 1e-3).
        weight_decay: of Adam, as an L2 penalty on all weights and biases (default 0).
        batch_size: rows a step.
        max_epochs: number of epochs to stop at, of each training.
        patience: epochs without improvement to stop at.
        validation_share: share of the rows held out for stopping; n - floor(n (1 - share)) rows.
        preset: None, or "crude" for other defaults of hidden, learning_rate and weight_decay, as above.
        throw: whether to raise if training diverges; the module's `result` says so in any case.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, there are too few rows to hold some
            out (two are the least), or an option is out of its range.
        FloatingPointError: if the loss becomes NaN or infinite, and `throw`.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import variance_network
        >>> x = np.linspace(-1, 1, 400)
        >>> y = 4 * x + np.where(x < 0, 0.1, 1.0) * np.random.default_rng(0).normal(size=400)
        >>> network = variance_network.fit(x, y, key=jax.random.key(0), max_epochs=100)
        >>> law = network(np.array([-0.5, 0.5]))
        >>> law.mean.round(0).tolist(), bool(law.std[1] > 3 * law.std[0])
        ([-2.0, 2.0], True)
    """
    _checks.check_choice("form", form, ("joint", "alternating"))
    _checks.check_at_least("rounds", rounds, 1)
    setting = settle(preset, hidden, learning_rate, weight_decay)
    x, y, num_train = as_data(x, y, validation_share)
    split_key, train_key = jax.random.split(key)
    rows = hold_out(x, y, num_train, split_key)
    train = partial(
        train_minibatches,
        optimizer=Partial(adam_l2, weight_decay=jnp.asarray(setting.weight_decay)),
        learning_rate=setting.learning_rate,
        batch_size=batch_size,
        max_epochs=max_epochs,
        patience=patience,
    )
    new = partial(start, x.shape[1], setting.hidden, dtype=rows.train[0].dtype)
    if form == "joint":
        optimum = _joint(rows, new, train, train_key)
    else:
        optimum = _alternate(rows, new, train, train_key, rounds)
    if throw:
        raise_unless_finite(optimum)
    return VarianceNetwork(optimum.params, rows.x_scaler, rows.y_scaler, optimum.steps, optimum.loss, optimum.result)


class VarianceNetwork(eqx.Module):
    """A trained network of means and variances; made by `fit`.

    Attributes:
        network: the weights.
        x_scaler: the standardisation of the inputs.
        y_scaler: the standardisation of the target.
        epochs: how many epochs were run; in the alternating form those of all its trainings.
        validation_loss: the lowest mean negative log likelihood of the validation rows, on the scale of `y_scaler`;
            in the alternating form that of the last round.
        result: how training ended, one of `jaxcal.optimize.Result`; of several trainings, the worst.
    """

    network: NormalNetwork
    x_scaler: Standardiser
    y_scaler: Standardiser
    epochs: Int[Array, "*runs"]
    validation_loss: Float[Array, "*runs"]
    result: Int[Array, "*runs"]

    def __call__(self, x: ArrayLike) -> Normal:
        """The predictions at the rows of x.

        Args:
            x: inputs [n, d]; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        return _predict(self, as_inputs(x, self.x_scaler))


@eqx.filter_jit
def _predict(fitted: VarianceNetwork, x: Float[Array, "n d"]) -> Normal:
    mean, variance = jax.vmap(fitted.network)(fitted.x_scaler(x))
    return Normal(fitted.y_scaler.inverse(mean), fitted.y_scaler.scale[None] * jnp.sqrt(variance))


def _joint(rows: Rows, new: Callable[..., FeedForward], train: Callable[..., Optimum], key: PRNGKeyArray) -> Optimum:
    """One network with two outputs, trained on the likelihood."""
    init_key, train_key = jax.random.split(key)
    network = NormalNetwork((new(2, key=init_key),))
    return train(_negative_log_likelihood, network, rows.train, rows.validation, key=train_key)


def _alternate(
    rows: Rows, new: Callable[..., FeedForward], train: Callable[..., Optimum], key: PRNGKeyArray, rounds: int
) -> Optimum:
    """A network for the mean and one for the variance, trained in turns, in every round from new weights."""
    data = rows.train, rows.validation
    variances = [jnp.ones_like(y) for _, y in data]
    optima = []
    for keys in jax.random.split(key, (rounds, 4)):
        weighted = [(*xy, variance) for xy, variance in zip(data, variances, strict=True)]
        mean = train(_weighted_squared_error, new("scalar", key=keys[0]), *weighted, key=keys[1])
        residuals = [(x, y - _outputs(mean.params, x)) for x, y in data]
        variance = train(_residual_negative_log_likelihood, new("scalar", key=keys[2]), *residuals, key=keys[3])
        variances = [as_variance(_outputs(variance.params, x)) for x, _ in data]
        optima += [mean, variance]
    mean, variance = optima[-2:]
    # A later result code is a worse one.
    steps, result = (jnp.stack([getattr(o, name) for o in optima]) for name in ("steps", "result"))
    return Optimum(NormalNetwork((mean.params, variance.params)), variance.loss, steps.sum(), result.max())


def _negative_log_likelihood(network: NormalNetwork, rows: XY, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    x, y = rows
    mean, variance = jax.vmap(network)(x)
    return -normal_log_prob(y, mean, jnp.sqrt(variance))


def _weighted_squared_error(network: FeedForward, rows: tuple, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    *xy, variance = rows
    return squared_error(network, tuple(xy), key) / variance


def _residual_negative_log_likelihood(network: FeedForward, rows: XY, key: PRNGKeyArray | None) -> Float[Array, " n"]:
    x, residual = rows
    return -normal_log_prob(residual, 0.0, jnp.sqrt(as_variance(jax.vmap(network)(x))))


@eqx.filter_jit
def _outputs(network: FeedForward, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return jax.vmap(network)(x)
