"""A point network: a multilayer perceptron trained on the squared error, with early stopping.

The setting is that of RIO (Qiu, Meyerson and Miikkulainen, "Quantifying Point-Prediction Uncertainty in
Neural Networks via Residual Estimation with an I/O Kernel", ICLR 2020, appendix D.1).
"""

from collections.abc import Sequence

import equinox as eqx
import jax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import Point
from jaxcal.nn import FeedForward
from jaxcal.optimize import raise_unless_finite, train_minibatches
from jaxcal.predictors._training import as_data, as_inputs, hold_out, squared_error, start
from jaxcal.scaling import Standardiser


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: PRNGKeyArray,
    hidden: Sequence[int] = (64, 64),
    learning_rate: ArrayLike = 1e-3,
    batch_size: int = 32,
    max_epochs: int = 1000,
    patience: int = 10,
    validation_share: float = 0.2,
    preset: str | None = None,
    throw: bool = True,
) -> "MLP":
    """Train a ReLU network on the mean squared error by RMSprop, with Keras's defaults.

    Inputs and target are standardised by the rows given here, so y -> a y + b changes the prediction exactly
    so, up to rounding. A share of the rows, drawn at random, is held out: training stops when their loss has
    not improved for `patience` epochs, and the weights of the best epoch are kept.

    `preset="paper"` repeats the published code where it differs:

    - the target is left as it is, so the result depends on its unit;
    - the validation rows are the last ones in the order given: the rows must come shuffled, as the paper's;
    - the weights of the last epoch are kept, `patience` epochs after the best one.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. No gradient passes
    through the training; predictions are differentiable in x.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly (not with the preset).
        key: random key of the weights, the validation rows and the batches.
        hidden: widths of the hidden layers.
        learning_rate: of RMSprop (decay 0.9, epsilon 1e-7).
        batch_size: rows a step.
        max_epochs: number of epochs to stop at.
        patience: epochs without improvement to stop at.
        validation_share: share of the rows held out for stopping; n - floor(n (1 - share)) rows.
        preset: None, or "paper" for the setting described above.
        throw: whether to raise if training diverges; the module's `result` says so in any case.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, there are too few rows to hold some
            out (two are the least), or an option is out of its range.
        FloatingPointError: if the loss becomes NaN or infinite, and `throw`.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import mlp
        >>> x = np.linspace(-1, 1, 200)[:, None]
        >>> network = mlp.fit(x, 4 * x[:, 0] + 5, key=jax.random.key(0), max_epochs=100)
        >>> network(np.array([[-0.5], [0.0], [0.5]])).mean.round(0).tolist()
        [3.0, 5.0, 7.0]
    """
    _checks.check_choice("preset", preset, (None, "paper"))
    x, y, num_train = as_data(x, y, validation_share)
    paper = preset == "paper"
    init_key, split_key, train_key = jax.random.split(key, 3)
    rows = hold_out(x, y, num_train, None if paper else split_key, scale_target=not paper)
    optimum = train_minibatches(
        squared_error,
        start(x.shape[1], tuple(hidden), "scalar", key=init_key, dtype=rows.train[0].dtype),
        rows.train,
        rows.validation,
        key=train_key,
        learning_rate=learning_rate,
        batch_size=batch_size,
        max_epochs=max_epochs,
        patience=patience,
        restore_best=not paper,
    )
    if throw:
        raise_unless_finite(optimum)
    return MLP(optimum.params, rows.x_scaler, rows.y_scaler, optimum.steps, optimum.loss, optimum.result)


class MLP(eqx.Module):
    """A trained point network; made by `fit`.

    Attributes:
        network: the weights.
        x_scaler: the standardisation of the inputs.
        y_scaler: the standardisation of the target.
        epochs: how many epochs were run.
        validation_loss: the lowest mean squared error of the validation rows, on the scale of `y_scaler`.
        result: how training ended, one of `jaxcal.optimize.Result`.
    """

    network: FeedForward
    x_scaler: Standardiser
    y_scaler: Standardiser
    epochs: Int[Array, "*runs"]
    validation_loss: Float[Array, "*runs"]
    result: Int[Array, "*runs"]

    def __call__(self, x: ArrayLike) -> Point:
        """The predictions at the rows of x.

        Args:
            x: inputs [n, d]; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        return Point(_predict(self, as_inputs(x, self.x_scaler)))

    def features(self, x: ArrayLike, *, layer: int = -1) -> Float[Array, "n width"]:
        """The activations of a hidden layer at the rows of x: what a calibrator may look at in place of x.

        Args:
            x: inputs [n, d]; a vector [n] is one column.
            layer: which hidden layer: 0 is the first one, -1 the last one.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs; if there
                is no such hidden layer.

        Example:
            >>> import jax, numpy as np, jaxcal as jc
            >>> x = np.random.default_rng(0).normal(size=(100, 20))
            >>> y = np.abs(x[:, 0]) + x[:, 1]
            >>> network = jc.mlp.fit(x[:50], y[:50], key=jax.random.key(0), hidden=(16, 8), max_epochs=20)
            >>> network.features(x).shape
            (100, 8)
            >>> rio = jc.rio.fit(network.features(x[50:]), network(x[50:]), y[50:])
            >>> rio(network.features(x[:5]), network(x[:5])).mean.shape
            (5,)
        """
        num_layers = len(self.network.layers) - 1
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"there is no hidden layer {layer}: the network has {num_layers}.")
        return _features(self, as_inputs(x, self.x_scaler), layer)


@eqx.filter_jit
def _predict(mlp: MLP, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    return mlp.y_scaler.inverse(jax.vmap(mlp.network)(mlp.x_scaler(x)))


@eqx.filter_jit
def _features(mlp: MLP, x: Float[Array, "n d"], layer: int) -> Float[Array, "n width"]:
    return jax.vmap(mlp.network.features)(mlp.x_scaler(x))[layer]
