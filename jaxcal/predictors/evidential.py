"""Deep evidential regression: a network that predicts how much evidence there is for a mean and a variance.

Amini, Schwarting, Soleimany & Rus, "Deep Evidential Regression", NeurIPS 2020. The likelihood (eq. 8) is the Student t
density, `functional.student_t.log_prob`. The penalty on evidence for wrong predictions is eq. 9.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal.distributions import StudentT
from jaxcal.frames.columns import Categorical, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.functional import student_t
from jaxcal.networks import FeedForward, TrainingOptions, presets
from jaxcal.networks.held_out import widened
from jaxcal.networks.trained import WidenedNetwork
from jaxcal.networks.training import XY, new_network, settle, split, trainer

# The least value of nu, alpha - 1 and beta, so that scale and std are finite and no density is infinite.
_FLOOR = 1e-6


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    penalty: "ArrayLike" = 0.01,
    preset: str | None = None,
    **options: "Unpack[TrainingOptions]",
) -> "Evidential":
    """Train a ReLU network for the four parameters of a normal-inverse-gamma distribution by Adam.

    The model is y ~ N(mu, sigma^2), mu ~ N(gamma, sigma^2 / nu) and sigma^2 ~ InverseGamma(alpha, beta). It predicts
    the Student t distribution of y (Amini et al., eq. 7). The four parameters are functions of x, and

        df = 2 alpha,    loc = gamma,    scale^2 = beta (1 + nu) / (nu alpha).

    One output of the network is gamma itself. Softplus functions of the others give nu, alpha - 1 and beta. The loss of
    a row is the negative log density at y (eq. 8). A penalty on evidence for wrong predictions is added (eq. 9),

        -log p(y) + penalty |y - gamma| (2 nu + alpha).

    The validation set then widens the square of the scale, as in `variance_network.fit`, by the likelihood of Student t
    errors. With the preset nothing is widened.

    `preset="usnrt"` is the setting of the evidential network that USNRT is compared with: hidden layers of 8d and 4d
    units, learning rate 0.01 and batches of 64. See Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance
    Networks by Tree-Structured Learning", sections V-A and VI-A.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x; a derivative through the training is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows and the batches.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        penalty: the weight lambda of eq. 9, not negative, for a target of variance 1.
        preset: None, or "usnrt" for other defaults of hidden, learning_rate and batch_size, as above.
        **options: of the training, as `jaxcal.networks.TrainingOptions` describes them.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range.
            `jaxcal.networks.TrainingOptions` lists the other errors of a training.

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
    _checks.check_key(key)
    _checks.check_not_negative("penalty", penalty)
    columns, x, y = as_data(x, y, categorical)
    known = {None: presets.DEFAULT, "usnrt": presets.usnrt(x.shape[1])}
    settings = settle(fit, options, known, preset)
    init_key, split_key, train_key = _random.split(key, 3)
    rows = split(x, y, settings, split_key, indicators=columns.indicators)
    network = new_network(rows.train[0], settings.hidden)(4, key=init_key)
    loss = Partial(_loss, penalty=jnp.asarray(penalty, rows.train[0].dtype))
    optimum = trainer(settings)(loss, network, rows.train, rows.validation, key=train_key)
    return Evidential.of(columns, rows, optimum, settings, network=optimum.params)


class Evidential(WidenedNetwork[StudentT]):
    """A trained evidential network; made by `fit`.

    Attributes:
        network: the weights.
        widening: the correction of its squared scale to new rows; None with a preset. `jaxcal.networks.TrainedNetwork`
            describes the other fields.
    """

    network: FeedForward

    def _distribution(self, x: Float[Array, "n d"]) -> StudentT:
        loc, squared_scale, df = self._moments(x)
        scale = jnp.sqrt(widened(squared_scale, self.widening))
        return StudentT(df, self.y_scaler.inverse(loc), self.y_scaler.scale[None] * scale)

    def _moments(self, x: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
        gamma, nu, alpha, beta = _evidence(self.network, x)
        return gamma, _squared_scale(nu, alpha, beta), 2 * alpha


def _loss(network: FeedForward, rows: XY, key: PRNGKeyArray | None, *, penalty: Float[Array, ""]) -> Float[Array, " n"]:
    x, y = rows
    gamma, nu, alpha, beta = _evidence(network, x)
    # loss = -log p(y) + penalty |y - gamma| (2 nu + alpha)
    log_density = student_t.log_prob(y, 2 * alpha, gamma, jnp.sqrt(_squared_scale(nu, alpha, beta)))
    return penalty * jnp.abs(y - gamma) * (2 * nu + alpha) - log_density


def _evidence(network: FeedForward, x: Float[Array, "n d"]) -> tuple[Float[Array, " n"], ...]:
    """The parameters gamma, nu, alpha and beta at every row."""
    gamma, *outputs = jax.vmap(network)(x).T
    nu, above_one, beta = (jax.nn.softplus(output) + _FLOOR for output in outputs)
    return gamma, nu, 1 + above_one, beta


def _squared_scale(nu: Float[Array, " n"], alpha: Float[Array, " n"], beta: Float[Array, " n"]) -> Float[Array, " n"]:
    return beta * (1 + nu) / (nu * alpha)
