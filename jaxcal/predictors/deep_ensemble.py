"""Deep ensembles: a mixture of networks of means and variances, each from its own initial weights.

Lakshminarayanan, Pritzel & Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles",
NeurIPS 2017, algorithm 1 without its optional step of adversarial training.
"""

from typing import Unpack

import jax
from jax.tree_util import Partial
from jaxtyping import Float, PRNGKeyArray

from jaxcal import _checks, _programs, _random, progress
from jaxcal._numpy import AnyArray, is_on_host, stacked
from jaxcal.distributions import Mixture
from jaxcal.frames.columns import Categorical, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.networks import NormalNetwork, TrainingOptions
from jaxcal.networks.held_out import mixture_moments
from jaxcal.networks.normal import as_mixture, settle_normal, train_normal
from jaxcal.networks.trained import WidenedNetwork
from jaxcal.networks.training import TrainingSplit, split
from jaxcal.optimize import Optimum, over_runs


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    num_members: int = 5,
    form: str | None = None,
    rounds: int = 2,
    preset: str | None = None,
    **options: "Unpack[TrainingOptions]",
) -> "DeepEnsemble":
    """Train `num_members` variance networks, and mix their distributions with equal weights.

    Member i of M predicts the mean m_i(x) and the variance v_i(x). The distribution at x is the mixture of the
    N(m_i(x), v_i(x)). It has the moments (Lakshminarayanan et al. 2017, section 2.4)

        mean(x) = avg_i m_i(x),    variance(x) = avg_i (v_i(x) + m_i(x)^2) - mean(x)^2.

    Every member is a network of `variance_network.fit`, with its own initial weights and batches. The members have a
    common validation set. It widens the mixture as a whole, as `variance_network.fit` widens a network. The members'
    variances are multiplied by the factor, and their distances from the mean by its root.

    With a preset, every member has its own validation rows. It is then the network that `variance_network.fit` gives
    with the member's key, one of `jax.random.split(key, num_members)`. The members are trained one after another on a
    CPU, and in one `vmap` on an accelerator.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x; a derivative through the training is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the members.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        num_members: how many networks M.
        form: "joint" or "alternating". This and the options below are options of every member, as in
            `variance_network.fit`.
        rounds: number of times that the alternating form trains both networks.
        preset: None, or one of `variance_network.fit`.
        **options: of the training, as `jaxcal.networks.TrainingOptions` describes them.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range.
            `jaxcal.networks.TrainingOptions` lists the other errors of a training.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import deep_ensemble
        >>> x = np.linspace(-1, 1, 200)
        >>> y = np.sin(3 * x) + 0.1 * np.random.default_rng(0).normal(size=200)
        >>> ensemble = deep_ensemble.fit(x, y, key=jax.random.key(0), max_epochs=100)
        >>> distribution = ensemble(np.array([-0.5, 0.5, 6.0]))  # the members agree less far from the data
        >>> distribution.mean[:2].round(0).tolist(), bool(distribution.std[2] > 1.1 * distribution.std[1])
        ([-1.0, 1.0], True)
    """
    _checks.check_key(key)
    _checks.check_at_least("num_members", num_members, 1)
    # The values are checked here, as they are traced under `over_runs`.
    columns, x, y = as_data(x, y, categorical)
    settings = settle_normal(fit, x.shape[1], options, preset, form=form, rounds=rounds)
    train, rows = Partial(train_normal, x, y, settings=settings, indicators=columns.indicators), None
    if settings.calibrate:  # by validation rows that all members share
        rows = split(x, y, settings, _random.split(key, num_members + 1)[-1], indicators=columns.indicators)
    members = _one_by_one if is_on_host(train, key) else _at_once
    optima, rows = members(train, rows, key, num_members)
    return DeepEnsemble.of(columns, rows, optima, settings, networks=optima.params)


class DeepEnsemble(WidenedNetwork[Mixture]):
    """Trained networks of means and variances; made by `fit`.

    Attributes:
        networks: the weights of the members, stacked: every array has a leading axis [m].
        widening: the correction of the mixture's variance to the variance of new rows; None with a preset.
            `jaxcal.networks.TrainedNetwork` describes the other fields; every array of `training` also has an axis [m].
    """

    networks: NormalNetwork

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict with it."""
        return self.networks.in_numpy

    def _distribution(self, x: Float[AnyArray, "n d"]) -> Mixture:
        return as_mixture(*self.networks.of_rows(x), self.widening, self.y_scaler)

    def _moments(self, x: Float[AnyArray, "n d"]) -> tuple[Float[AnyArray, " n"], ...]:
        return mixture_moments(*self.networks.of_rows(x))


def _one_by_one(
    train: Partial, rows: TrainingSplit | None, key: PRNGKeyArray, num_members: int
) -> tuple[Optimum, TrainingSplit]:
    """The stacked members, and the rows of the first, which are the rows of all where they have the same rows."""
    trained = []
    with progress.work("deep_ensemble.fit: members", num_members) as work:
        for own_key in _random.split(key, num_members):
            trained.append(train(key=own_key, rows=rows))
            work.advance()
    optima, (first_rows, *_) = zip(*trained, strict=True)
    return stacked(optima), first_rows


@_programs.jit
def _at_once(
    train: Partial, rows: TrainingSplit | None, key: PRNGKeyArray, num_members: int
) -> tuple[Optimum, TrainingSplit]:
    """The stacked members and rows, by one program, which trains them in one `vmap` on an accelerator."""
    optima, rows_of_members = over_runs(lambda key: train(key=key, rows=rows))(jax.random.split(key, num_members))
    return optima, jax.tree.map(lambda stacked: stacked[0], rows_of_members)
