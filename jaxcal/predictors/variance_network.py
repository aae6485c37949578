"""A network that predicts a normal distribution, its mean and its variance, with early stopping.

The joint form, one network with two outputs trained on the likelihood, is that of Nix & Weigend, "Estimating the Mean
and Variance of the Target Probability Distribution", ICNN 1994. The alternating form has a network for the mean and
one for the variance, trained alternately. With their presets they are the model of CRUDE that "separately predicts a
mean and variance" (Zelikman et al., "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", section
5.1), and the heteroscedastic neural network that USNRT is measured against (Ma, Yan & Zhang, "Improving Uncertainty
Quantification of Variance Networks by Tree-Structured Learning", section V-A).
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
from jaxcal.networks.training import takes_training_options


@takes_training_options(StepOptions)
def fit(
    x: Table,
    y: Series,
    *,
    key: PRNGKeyArray,
    categorical: Categorical = (),
    form: str | None = None,
    rounds: int = 2,
    preset: str | None = None,
    **options: Unpack[StepOptions],
) -> "VarianceNetwork":
    """Train networks for the mean m(x) and the variance v(x) of a normal distribution by Adam.

    The loss of a row is its negative log likelihood (Nix & Weigend, 1994),

        (log v(x) + (y - m(x))^2 / v(x) + log 2 pi) / 2,    v(x) = softplus(output) + floor.

    `form="joint"` trains one network with two outputs on it, in training times the root of v(x), which is held fixed,
    so that rows with a large variance are learned from, too (Seitzer et al., "On the Pitfalls of Heteroscedastic
    Uncertainty Estimation with Probabilistic Neural Networks", ICLR 2022, with beta = 0.5). `form="alternating"` trains
    a network for the mean on the squared error, then one for the variance on this loss with the mean held fixed; then
    both anew, the mean on the squared error over the variance found before; and so on for `rounds` rounds.

    What is learned from residuals of the training rows is too small for new rows. So the variance that is predicted is
    widened by the validation set, which nothing is trained on: a factor and a floor are those of the greatest
    likelihood of its rows, and the factor besides such that nine tenths of them lie in the 90 % intervals. No variance
    below the least of these rows is predicted, however far a new row lies from all others (`jaxcal.networks.Widening`).

    In the settings of papers the likelihood is the plain one, nothing is widened, and every training of the alternating
    form draws validation rows of its own: there the floor of the variance keeps every std above a thousandth of the
    target's, in the alternating form a ten thousandth.

    `preset="crude"` is the setting of CRUDE, appendix A: three hidden layers of 1024, learning rate 1e-4 and weight
    decay 0.01. The paper says neither which form, nor anything of batches, epochs and stopping: those stay as here.
    `preset="usnrt"` is the setting of USNRT, section V-A: the alternating form, hidden layers of 8d and 4d units, with
    tanh for ReLU in the variance's network, learning rate 0.01 and batches of 64. The authors' code measures the
    validation loss after every batch; here it is measured after every epoch.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x. So is a training of the joint form by `steps`, of Adam as the other, in x, y, the initial
    weights, the learning rate and the weight decay; a derivative through a training without `steps` is refused. Steps
    take the plain likelihood, and nothing is widened, as there is no validation set.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the weights, the validation rows and the batches.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        form: "joint" (the default) or "alternating".
        rounds: how often the alternating form trains both networks.
        preset: None, or "crude" or "usnrt" for other defaults, as above.
        **options: of the training, as `jaxcal.networks.TrainingOptions` and, of steps, `jaxcal.networks.StepOptions`
            describe them.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range. What else is
            raised in training, `jaxcal.networks.TrainingOptions` and `jaxcal.networks.StepOptions` say.

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
    settings = settle_normal("variance_network.fit", x.shape[1], options, preset, StepOptions, **own)
    optimum, rows = train_normal(x, y, settings, columns.indicators, key=key)
    return VarianceNetwork.of(columns, rows, optimum, settings, network=optimum.params)


class VarianceNetwork(WidenedNetwork[Normal]):
    """A trained network of means and variances; made by `fit`.

    Attributes:
        network: the weights.
        widening: what makes its variance that of new rows; None with a preset, and after `steps`. The rest is described
            by `jaxcal.networks.TrainedNetwork`.
    """

    network: NormalNetwork

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict by it."""
        return self.network.in_numpy

    def _distribution(self, x: Float[AnyArray, "n d"]) -> Normal:
        mean, variance = self._moments(x)
        return as_normal((mean, widened(variance, self.widening)), self.y_scaler)

    def _moments(self, x: Float[AnyArray, "n d"]) -> tuple[Float[AnyArray, " n"], ...]:
        return self.network.of_rows(x)
