"""Deep evidential regression: a network that predicts how much evidence there is for a mean and a variance.

Amini, Schwarting, Soleimany & Rus, "Deep Evidential Regression", NeurIPS 2020. Its likelihood (eq. 8) is the Student t
density, `functional.student_t.log_prob`; its penalty on evidence for wrong predictions is eq. 9.
"""

from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import StudentT
from jaxcal.functional import student_t
from jaxcal.networks import FeedForward, TrainingOptions, TrainingRecord, presets
from jaxcal.networks.training import XY, as_data, as_inputs, settle, split, start, trainer
from jaxcal.preprocessing import Standardizer

# What nu, alpha - 1 and beta are at least, so that scale and std are finite and no density is infinite.
_FLOOR = 1e-6


@_checks.renamed(validation_share="validation_fraction")
def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: PRNGKeyArray,
    penalty: ArrayLike = 0.01,
    preset: str | None = None,
    **options: Unpack[TrainingOptions],
) -> "Evidential":
    """Train a ReLU network for the four parameters of a normal-inverse-gamma distribution by Adam.

    Where y ~ N(mu, sigma^2), mu ~ N(gamma, sigma^2 / nu) and sigma^2 ~ InverseGamma(alpha, beta), y has the Student t
    distribution that is predicted (Amini et al., eq. 7), with the four parameters functions of x,

        df = 2 alpha,    loc = gamma,    scale^2 = beta (1 + nu) / (nu alpha).

    The network's outputs give gamma as they are, nu and beta by a softplus, and alpha by one plus a softplus. The loss
    of a row is the negative log density at y (eq. 8), and a penalty on evidence where the prediction is wrong (eq. 9),

        -log p(y) + penalty |y - gamma| (2 nu + alpha).

    `preset="usnrt"` is the setting in which USNRT is measured against it (Ma, Yan & Zhang, "Improving Uncertainty
    Quantification of Variance Networks by Tree-Structured Learning", sections V-A and VI-A): hidden layers of 8d and 4d
    units, learning rate 0.01 and batches of 64.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. No gradient passes
    through the training; predictions are differentiable in x.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows and the batches.
        penalty: the weight lambda of eq. 9, not negative, for a target of variance 1.
        preset: None, or "usnrt" for other defaults of hidden, learning_rate and batch_size, as above.
        **options: of the training, `jaxcal.networks.TrainingOptions`: hidden, learning_rate, weight_decay, batch_size,
            max_epochs, patience, validation_fraction and throw.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, there are fewer than two rows for
            training and validation, or an option is out of its range.
        TypeError: if there is no such option.
        FloatingPointError: if the loss becomes NaN or infinite, and `throw`.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import evidential
        >>> x = np.linspace(-1, 1, 400)
        >>> y = 4 * x + np.where(x < 0, 0.1, 1.0) * np.random.default_rng(0).normal(size=400)
        >>> network = evidential.fit(x, y, key=jax.random.key(0), max_epochs=100)
        >>> distribution = network(np.array([-0.5, 0.5]))
        >>> distribution.mean.round(0).tolist(), bool(distribution.scale[1] > 3 * distribution.scale[0])
        ([-2.0, 2.0], True)
    """
    _checks.check_not_negative("penalty", penalty)
    x, y = as_data(x, y)
    settings = settle(options, {None: presets.DEFAULT, "usnrt": presets.usnrt(x.shape[1])}, preset)
    init_key, split_key, train_key = jax.random.split(key, 3)
    rows = split(x, y, settings.validation_fraction, split_key)
    dtype = rows.train[0].dtype
    optimum = trainer(settings)(
        Partial(_loss, penalty=jax.lax.stop_gradient(jnp.asarray(penalty, dtype))),
        start(x.shape[1], settings.hidden, 4, key=init_key, dtype=dtype),
        rows.train,
        rows.validation,
        key=train_key,
    )
    training = TrainingRecord.of(optimum, throw=settings.throw)
    return Evidential(optimum.params, rows.x_scaler, rows.y_scaler, training)


class Evidential(eqx.Module):
    """A trained evidential network; made by `fit`.

    Attributes:
        network: the weights.
        x_scaler: the standardization of the inputs.
        y_scaler: the standardization of the target.
        training: how training went, a `jaxcal.networks.TrainingRecord`.
    """

    network: FeedForward
    x_scaler: Standardizer
    y_scaler: Standardizer
    training: TrainingRecord

    def __call__(self, x: ArrayLike) -> StudentT:
        """The predictions at the rows of x.

        Args:
            x: inputs [n, d]; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        return _predict(self, as_inputs(x, self.x_scaler))


@eqx.filter_jit
def _predict(fitted: Evidential, x: Float[Array, "n d"]) -> StudentT:
    gamma, nu, alpha, beta = _evidence(fitted.network, fitted.x_scaler(x))
    scale = _scale(nu, alpha, beta)
    return StudentT(2 * alpha, fitted.y_scaler.inverse(gamma), fitted.y_scaler.scale[None] * scale)


def _loss(network: FeedForward, rows: XY, key: PRNGKeyArray | None, *, penalty: Float[Array, ""]) -> Float[Array, " n"]:
    x, y = rows
    gamma, nu, alpha, beta = _evidence(network, x)
    log_density = student_t.log_prob(y, 2 * alpha, gamma, _scale(nu, alpha, beta))
    return penalty * jnp.abs(y - gamma) * (2 * nu + alpha) - log_density


def _evidence(network: FeedForward, x: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
    """The parameters gamma, nu, alpha and beta at every row."""
    gamma, *outputs = jax.vmap(network)(x).T
    nu, above_one, beta = (jax.nn.softplus(output) + _FLOOR for output in outputs)
    return gamma, nu, 1 + above_one, beta


def _scale(nu: Float[Array, " n"], alpha: Float[Array, " n"], beta: Float[Array, " n"]) -> Float[Array, " n"]:
    return jnp.sqrt(beta * (1 + nu) / (nu * alpha))
