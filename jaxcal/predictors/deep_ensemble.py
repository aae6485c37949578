"""Deep ensembles: several networks of means and variances, each from its own start, and the mixture of their laws.

Lakshminarayanan, Pritzel & Blundell, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles",
NeurIPS 2017, algorithm 1 without its optional step of adversarial training.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import Mixture
from jaxcal.nn import NormalNetwork
from jaxcal.optimize import Optimum, over_runs, raise_unless_finite
from jaxcal.predictors._normal_networks import as_normal, train_normal
from jaxcal.predictors._training import as_data, as_inputs
from jaxcal.scaling import Standardiser


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: PRNGKeyArray,
    num_members: int = 5,
    form: str | None = None,
    rounds: int = 2,
    hidden: Sequence[int] | None = None,
    learning_rate: ArrayLike | None = None,
    weight_decay: ArrayLike | None = None,
    batch_size: int | None = None,
    max_epochs: int = 1000,
    patience: int = 10,
    validation_share: float = 0.2,
    preset: str | None = None,
    throw: bool = True,
) -> "DeepEnsemble":
    """Train `num_members` variance networks, and mix their laws with equal weights.

    With m_i(x) and v_i(x) the mean and the variance of member i of M, the law at x is the mixture of the
    N(m_i(x), v_i(x)), whose moments are (Lakshminarayanan et al. 2017, section 2.4)

        mean(x) = avg_i m_i(x),    variance(x) = avg_i (v_i(x) + m_i(x)^2) - mean(x)^2.

    Every member has initial weights, held-out rows and batches of its own, and is what `variance_network.fit` gives
    with its key, one of `jax.random.split(key, num_members)`. The members are trained one after another on a CPU, in
    one `vmap` on an accelerator.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. No gradient passes
    through the training; predictions are differentiable in x.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly, with std 0.
        key: random key of the members.
        num_members: how many networks M.
        form: "joint" or "alternating"; this and all options but the last are every member's, those of
            `variance_network.fit`.
        rounds: how often the alternating form trains both networks.
        hidden: widths of the hidden layers.
        learning_rate: of Adam.
        weight_decay: of Adam, as an L2 penalty.
        batch_size: rows a step.
        max_epochs: number of epochs to stop at, of each training.
        patience: epochs without improvement to stop at.
        validation_share: share of the rows held out for stopping.
        preset: None, or one of `variance_network.fit`.
        throw: whether to raise if the training of a member diverges; the module's `result` says so in any case.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, there are too few rows to hold some
            out (two are the least), or an option is out of its range.
        FloatingPointError: if the loss of a member becomes NaN or infinite, and `throw`.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import deep_ensemble
        >>> x = np.linspace(-1, 1, 200)
        >>> y = np.sin(3 * x) + 0.1 * np.random.default_rng(0).normal(size=200)
        >>> ensemble = deep_ensemble.fit(x, y, key=jax.random.key(0), max_epochs=100)
        >>> law = ensemble(np.array([-0.5, 0.5, 6.0]))  # the members agree near the data, and nowhere else
        >>> law.mean[:2].round(0).tolist(), bool(law.std[2] > 3 * law.std[1])
        ([-1.0, 1.0], True)
    """
    _checks.check_at_least("num_members", num_members, 1)
    # Values can be checked here only: under `over_runs` they are traced.
    x, y, _ = as_data(x, y, validation_share)
    train = Partial(
        train_normal,
        form=form,
        rounds=rounds,
        hidden=hidden,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batch_size=batch_size,
        max_epochs=max_epochs,
        patience=patience,
        validation_share=validation_share,
        preset=preset,
    )
    optima, x_scaler, y_scaler = _train_members(train, x, y, key, num_members)
    if throw:
        raise_unless_finite(optima)
    return DeepEnsemble(optima.params, x_scaler, y_scaler, optima.steps, optima.loss, optima.result)


class DeepEnsemble(eqx.Module):
    """Trained networks of means and variances; made by `fit`.

    Attributes:
        networks: the weights of the members, stacked: every array has a leading axis [m].
        x_scaler: the standardisation of the inputs, one for all members.
        y_scaler: the standardisation of the target.
        epochs: how many epochs every member was trained for [m].
        validation_loss: the lowest mean negative log likelihood of every member's validation rows [m], on the scale of
            `y_scaler`.
        result: how the training of every member ended [m], of `jaxcal.optimize.Result`.
    """

    networks: NormalNetwork
    x_scaler: Standardiser
    y_scaler: Standardiser
    epochs: Int[Array, "*runs m"]
    validation_loss: Float[Array, "*runs m"]
    result: Int[Array, "*runs m"]

    def __call__(self, x: ArrayLike) -> Mixture:
        """The predictions at the rows of x.

        Args:
            x: inputs [n, d]; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        return _predict(self, as_inputs(x, self.x_scaler))


@eqx.filter_jit
def _predict(fitted: DeepEnsemble, x: Float[Array, "n d"]) -> Mixture:
    law = lambda network: as_normal(jax.vmap(network)(fitted.x_scaler(x)), fitted.y_scaler)
    return Mixture(eqx.filter_vmap(law)(fitted.networks))


@eqx.filter_jit
def _train_members(
    train: Partial, x: Float[Array, "n d"], y: Float[Array, " n"], key: PRNGKeyArray, num_members: int
) -> tuple[Optimum, Standardiser, Standardiser]:
    """The members, stacked, and the standardisations, which are the same for all."""

    def member(key: PRNGKeyArray) -> tuple[Optimum, Standardiser, Standardiser]:
        optimum, rows = train(x, y, key=key)
        return optimum, rows.x_scaler, rows.y_scaler

    optima, *scalers = over_runs(member)(jax.random.split(key, num_members))
    return optima, *jax.tree.map(lambda stacked: stacked[0], scalers)
