"""A point network: a multilayer perceptron trained on the squared error, with early stopping.

`preset="paper"` is the setting of RIO: Qiu, Meyerson and Miikkulainen, "Quantifying Point-Prediction Uncertainty in
Neural Networks via Residual Estimation with an I/O Kernel", ICLR 2020, appendix D.1.
"""

from functools import partial
from typing import Unpack

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import _checks, _programs, _random
from jaxcal._numpy import AnyArray
from jaxcal.distributions import Point
from jaxcal.frames.columns import Categorical, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.networks import FeedForward, StepOptions, TrainedNetwork, presets, training
from jaxcal.optimize import adam, keras_rmsprop


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    preset: str | None = None,
    **options: "Unpack[StepOptions]",
) -> "MLP":
    """Train a ReLU network on the mean squared error by Adam.

    `preset="paper"` repeats the published code, which differs in these points:

    - the optimizer is RMSprop with Keras's defaults, its learning rate is 1e-3 and the patience 10;
    - the inputs are standardized alone: their tails are not made logarithmic, and no scales are trained;
    - the target is left as it is, so the result depends on its unit;
    - the validation rows are the last ones in the order given: the rows must come shuffled, as in the paper;
    - the weights of the last epoch are kept, `patience` epochs after the best one.

    Works under `jit` and, over keys and over folds of equal size, under `eqx.filter_vmap`. Predictions are
    differentiable in x. With `steps`, the optimizer is also Adam, and the training has derivatives in x, y, the initial
    weights, the learning rate and the weight decay. A derivative through a training without `steps` is refused.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n]. A constant target is predicted exactly (not with the preset).
        key: random key of the weights, the validation rows and the batches.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        preset: None, or "paper" for the setting described above.
        **options: of the training, as in `jaxcal.networks.TrainingOptions` and, for steps,
            `jaxcal.networks.StepOptions`.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or an option is out of its range.
            `jaxcal.networks.TrainingOptions` and `jaxcal.networks.StepOptions` list the other errors of a training.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import mlp
        >>> x = np.linspace(-1, 1, 200)[:, None]
        >>> network = mlp.fit(x, 4 * x[:, 0] + 5, key=jax.random.key(0), max_epochs=100)
        >>> network(np.array([[-0.5], [0.0], [0.5]])).mean.round(0).tolist()
        [3.0, 5.0, 7.0]
    """
    _checks.check_key(key)
    columns, x, y = as_data(x, y, categorical)
    settings = training.settle(fit, options, {None: presets.DEFAULT, "paper": presets.RIO}, preset, StepOptions)
    training.check_steps(settings.steps, preset=preset)
    paper = preset == "paper"
    init_key, split_key, train_key = _random.split(key, 3)
    split_key = None if paper else split_key
    rows = training.split(x, y, settings, split_key, indicators=columns.indicators, scale_target=not paper)
    new = partial(training.new_network(rows.train[0], settings.hidden), "scalar", key=init_key)
    optimizer = keras_rmsprop if paper else adam
    train = training.trainer(settings, optimizer, restore_best=not paper)
    network = training.starting_network(settings.initial, new)
    optimum = train(training.squared_error, network, rows.train, rows.validation, key=train_key)
    return MLP.of(columns, rows, optimum, settings, network=optimum.params)


class MLP(TrainedNetwork[Point]):
    """A trained point network; made by `fit`.

    Attributes:
        network: the weights. `jaxcal.networks.TrainedNetwork` describes the other fields.
    """

    network: FeedForward

    def features(self, x: Table, *, layer: int = -1) -> Float[Array, "n width"]:
        """The activations of a hidden layer at the rows of x: a calibrator may use them in place of x.

        Args:
            x: inputs as in the call.
            layer: which hidden layer: 0 is the first one, -1 the last one.

        Raises:
            ValueError: as the call does; if there is no such hidden layer.

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
        return _features(self, self.columns(x), layer)

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict with it."""
        return self.network.in_numpy

    def _distribution(self, x: Float[AnyArray, "n d"]) -> Point:
        return Point(self.y_scaler.inverse(self.network.of_rows(x)))


@_programs.jit
def _features(mlp: MLP, x: Float[Array, "n d"], layer: int) -> Float[Array, "n width"]:
    return jax.vmap(mlp.network.features)(mlp.x_scaler(x))[layer]
