"""A network that predicts a normal distribution, its mean and its variance, with early stopping.

The joint form is one network with two outputs, trained on the likelihood: Nix & Weigend, "Estimating the Mean and
Variance of the Target Probability Distribution", ICNN 1994. The alternating form has a network for the mean and one for
the variance, trained alternately.

The preset "crude" is the model of CRUDE that "separately predicts a mean and variance": Zelikman et al., "CRUDE:
Calibrating Regression Uncertainty Distributions Empirically", section 5.1. The preset "usnrt" is the heteroscedastic
neural network that USNRT is compared with: Ma, Yan & Zhang, "Improving Uncertainty Quantification of Variance Networks
by Tree-Structured Learning", section V-A.
"""

from typing import Unpack

from jaxtyping import Float, PRNGKeyArray

from jaxcal import _checks
from jaxcal._numpy import AnyArray
from jaxcal.distributions import Normal
from jaxcal.frames.columns import Categorical, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.networks import NormalNetwork, StepOptions
from jaxcal.networks.held_out import widened
from jaxcal.networks.normal import as_normal, settle_normal, train_normal
from jaxcal.networks.trained import WidenedNetwork


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    form: str | None = None,
    rounds: int = 2,
    preset: str | None = None,
    **options: "Unpack[StepOptions]",
) -> "VarianceNetwork":
    """Train networks for the mean m(x) and the variance v(x) of a normal distribution by Adam.

    The loss of a row is its negative log likelihood (Nix & Weigend, 1994),

        (log v(x) + (y - m(x))^2 / v(x) + log 2 pi) / 2,    v(x) = softplus(output) + floor.

    `form="joint"` trains one network with two outputs on this loss. In training, the loss of a row is multiplied by the
    root of v(x), which is held fixed. So the network also learns from rows with a large variance: Seitzer et al., "On
    the Pitfalls of Heteroscedastic Uncertainty Estimation with Probabilistic Neural Networks", ICLR 2022, with beta =
    0.5.

    `form="alternating"` trains a network for the mean on the squared error. It then trains a network for the variance
    on this loss, with the mean held fixed. Each of `rounds` rounds trains both anew. From the second round on, the mean
    is trained on the squared error over the variance of the round before.

    A variance that is learned from residuals of the training rows is too small for new rows. So the validation set,
    which nothing is trained on, widens the predicted variance by a factor and a floor. The floor has the greatest
    likelihood of the validation rows. The factor is the geometric mean of two factors. One has the greatest likelihood.
    With the other, nine tenths of these rows lie in the 90 % intervals. No predicted variance is below the least
    variance of these rows, however far a new row lies from all others (`jaxcal.networks.Widening`).

    The presets, which are settings of papers, have the plain likelihood, and nothing is widened. Every training of the
    alternating form then draws its own validation rows. The floor of the variance keeps every std above a thousandth of
    the target's std, or above a ten-thousandth in the alternating form.

    `preset="crude"` is the setting of CRUDE, appendix A: three hidden layers of 1024, learning rate 1e-4 and weight
    decay 0.01. The paper does not give the form, the batches, the epochs and the stopping: those stay as here.

    `preset="usnrt"` is the setting of USNRT, section V-A: the alternating form, learning rate 0.01 and batches of 64.
    The hidden layers have 8d and 4d units, with tanh in place of ReLU in the network of the variance. The authors' code
    measures the validation loss after every batch; here it is measured after every epoch.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x. With `steps`, Adam trains the joint form, and the training has derivatives in x, y, the initial
    weights, the learning rate and the weight decay. It takes the plain likelihood, and nothing is widened, as there is
    no validation set. A derivative through a training without `steps` is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows and the batches.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        form: "joint" (the default) or "alternating".
        rounds: number of times that the alternating form trains both networks.
        preset: None, or "crude" or "usnrt" for other defaults, as above.
        **options: of the training, as in `jaxcal.networks.TrainingOptions` and, for steps,
            `jaxcal.networks.StepOptions`.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range.
            `jaxcal.networks.TrainingOptions` and `jaxcal.networks.StepOptions` list the other errors of a training.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import variance_network
        >>> x = np.linspace(-1, 1, 400)
        >>> y = 4 * x + np.where(x < 0, 0.1, 1.0) * np.random.default_rng(0).normal(size=400)
        >>> network = variance_network.fit(x, y, key=jax.random.key(0), max_epochs=100)
        >>> distribution = network(np.array([-0.5, 0.5]))
        >>> distribution.mean.round(0).tolist(), bool(distribution.std[1] > 3 * distribution.std[0])
        ([-2.0, 2.0], True)
    """
    _checks.check_key(key)
    columns, x, y = as_data(x, y, categorical)
    own = {"form": form, "rounds": rounds}
    settings = settle_normal(fit, x.shape[1], options, preset, StepOptions, **own)
    optimum, rows = train_normal(x, y, settings, columns.indicators, key=key)
    return VarianceNetwork.of(columns, rows, optimum, settings, network=optimum.params)


class VarianceNetwork(WidenedNetwork[Normal]):
    """A trained network of means and variances; made by `fit`.

    Attributes:
        network: the weights.
        widening: the correction of its variance to the variance of new rows; None with a preset, and after `steps`.
            `jaxcal.networks.TrainedNetwork` describes the other fields.
    """

    network: NormalNetwork

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict with it."""
        return self.network.in_numpy

    def _distribution(self, x: Float[AnyArray, "n d"]) -> Normal:
        mean, variance = self._moments(x)
        return as_normal((mean, widened(variance, self.widening)), self.y_scaler)

    def _moments(self, x: Float[AnyArray, "n d"]) -> tuple[Float[AnyArray, " n"], ...]:
        return self.network.of_rows(x)
