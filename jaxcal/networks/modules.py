"""Networks, from which the predictors are built.

Each is written for one point, [d] -> [k]. `jax.vmap` maps it over rows, and another `jax.vmap` over seeds and folds.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _functions, _random
from jaxcal._numpy import AnyArray, in_jax, namespace

# For a target of variance 1: every predicted std is at least a thousandth of the target's std, or a ten-thousandth in
# the alternating form.
_VARIANCE_FLOOR, _ALTERNATING_FLOOR = 1e-6, 1e-8
# Activations as functions of NumPy.
_BY_NUMPY: dict[Any, Callable] = {
    "jax.nn.relu": lambda x: np.maximum(x, 0),
    "jax.nn.tanh": np.tanh,
    "jax.nn.identity": lambda x: x,
}
# For concrete dropout: the initial rate, and the temperature of the masks, as in the paper.
_FIRST_RATE, _TEMPERATURE = 0.1, 0.1


class FeedForward(eqx.Module):
    """A fully connected network: hidden layers of the given widths, and a linear output.

    Initial weights are Glorot-uniform and initial biases zero, as in Keras: W ~ U(-l, l) with
    l = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010, eq. 16).

    Args:
        in_size: number of inputs d.
        hidden: the widths of the hidden layers; none gives a linear model.
        out_size: number of outputs k, or "scalar" for an output of shape ().
        key: random key of the initial weights.
        activation: the function applied after every hidden layer, or a sequence with one for each. To be pickled, a
            function that is not of jax.nn or jax.numpy must have a name.
        dtype: of the weights; None takes the default float.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> network = FeedForward(3, (16, 8), 2, key=jax.random.key(0))
        >>> network(jnp.ones(3)).shape
        (2,)
    """

    layers: tuple[eqx.nn.Linear, ...]
    # Functions of JAX are kept by name.
    activation_names: tuple[str | Callable, ...] = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        hidden: Sequence[int],
        out_size: int | Literal["scalar"],
        *,
        key: PRNGKeyArray,
        activation: Callable | Sequence[Callable] = jax.nn.relu,
        dtype: DTypeLike | None = None,
    ):
        if any(width < 1 for width in hidden):
            raise ValueError(f"hidden must hold widths of at least 1; got {tuple(hidden)}.")
        fans = list(zip((in_size, *hidden), (*hidden, out_size), strict=True))
        dtype = jnp.result_type(float if dtype is None else dtype)
        self.layers = _with_keras_initial_values([_linear(*ends, dtype) for ends in fans], key)
        activations = (activation,) * len(hidden) if callable(activation) else tuple(activation)
        if len(activations) != len(hidden):
            raise ValueError(f"activation has {len(activations)} functions for {len(hidden)} hidden layers.")
        self.activation_names = tuple(map(_functions.named, activations))

    @property
    def activations(self) -> tuple[Callable, ...]:
        """The functions that are applied after every hidden layer."""
        return tuple(map(_functions.function_of, self.activation_names))

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy has all functions that are applied after hidden layers."""
        return all(name in _BY_NUMPY for name in self.activation_names)

    def of_rows(self, x: Float[AnyArray, "n d"]) -> Float[AnyArray, "..."]:
        """The outputs at rows, [n, k] or [n]; networks stacked along an axis m give [m, n, k] or [m, n]."""
        xp, layers = namespace(x), cast(Any, self.layers)
        x = x.reshape((1,) * (layers[0].weight.ndim - 2) + x.shape)
        functions = [_BY_NUMPY.get(name) for name in self.activation_names]
        for layer, activation in zip(layers, [*(self.activations if xp is jnp else functions), None], strict=True):
            x = x @ xp.swapaxes(layer.weight, -1, -2) + layer.bias[..., None, :]
            x = x if activation is None else activation(x)
        return x[..., 0] if self.layers[-1].out_features == "scalar" else x

    def __call__(
        self, x: Float[Array, " d"], *, rate: ArrayLike = 0.0, key: PRNGKeyArray | None = None
    ) -> Float[Array, "..."]:
        """The outputs, [k] or (), at one point; with a key, under dropout of its hidden layers (see `features`)."""
        *_, last = (x, *self.features(x, rate=rate, key=key))
        return self.layers[-1](last)

    def features(
        self, x: Float[Array, " d"], *, rate: ArrayLike = 0.0, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, " width"], ...]:
        """The activations of every hidden layer at one point, from the first layer to the last.

        With a key, each activation is 0 with probability `rate`, and otherwise divided by 1 - rate. The key alone
        decides which are 0.
        """
        dropout = eqx.nn.Dropout(rate, inference=key is None)  # pyright: ignore[reportArgumentType]
        hidden = self.layers[:-1]
        keys = [None] * len(hidden) if key is None else jax.random.split(key, len(hidden))
        activations = []
        for layer, activation, layer_key in zip(hidden, self.activations, keys, strict=True):
            x = dropout(activation(layer(x)), key=layer_key)
            activations.append(x)
        return tuple(activations)


class NormalNetwork(eqx.Module):
    """The mean and the variance of a normal distribution: one network with two outputs, or two networks with one each.

    The variance is softplus(output) + floor, for targets of variance 1. The floor is 1e-6 where one network learns both
    moments, as in deep ensembles. It is 1e-8 where two networks are trained alternately, as in USNRT's code.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> network = NormalNetwork((FeedForward(3, (16,), 2, key=jax.random.key(0)),))
        >>> mean, variance = network(jnp.zeros(3))
        >>> print(f"{mean:.1f}, {variance:.4f}")
        0.0, 0.6931
    """

    networks: tuple[FeedForward, ...]

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict with it."""
        return all(network.in_numpy for network in self.networks)

    def of_rows(self, x: Float[AnyArray, "n d"]) -> tuple[Float[AnyArray, "*m n"], Float[AnyArray, "*m n"]]:
        """The means and the variances at rows; stacked networks give them a leading axis."""
        outputs = [network.of_rows(x) for network in self.networks]
        mean, output = outputs if len(outputs) > 1 else (outputs[0][..., 0], outputs[0][..., 1])
        return mean, as_variance(output, alternating=len(outputs) > 1)

    def __call__(self, x: Float[Array, " d"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The mean and the variance at one point."""
        mean, output = jnp.hstack([network(x) for network in self.networks])
        return mean, as_variance(output, alternating=len(self.networks) > 1)


class ConcreteNetwork(eqx.Module):
    """A network with dropout of the inputs of every layer, each at a rate that is learned with the weights.

    Gal, Hron & Kendall, "Concrete Dropout", NeurIPS 2017. An input is multiplied by z / (1 - p), where z is continuous.
    It replaces a variable that is 0 with probability p and 1 otherwise. Its equation has u uniform and temperature t =
    0.1 (eq. 5),

        z = 1 - sigmoid((log(p / (1 - p)) + log(u / (1 - u))) / t).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> network = ConcreteNetwork(FeedForward(3, (16,), 2, key=jax.random.key(0)))
        >>> print(network.rates)
        [0.1 0.1]
        >>> bool(jnp.all(network(jnp.ones(3), key=jax.random.key(1)) != network(jnp.ones(3))))
        True
    """

    network: FeedForward
    rate_logits: Float[Array, "*runs layers"]

    def __init__(self, network: FeedForward):
        self.network = network
        logit = math.log(_FIRST_RATE / (1 - _FIRST_RATE))
        self.rate_logits = jnp.full(len(network.layers), logit, network.layers[0].weight.dtype)

    @property
    def rates(self) -> Float[Array, "*runs layers"]:
        """The probability p that an input is dropped, for every layer."""
        return jax.nn.sigmoid(self.rate_logits)

    def __call__(self, x: Float[Array, " d"], *, key: PRNGKeyArray | None = None) -> Float[Array, "..."]:
        """The outputs at one point; with a key, under dropout."""
        layers = self.network.layers
        activations = (*self.network.activations, lambda outputs: outputs)
        keys = [None] * len(layers) if key is None else jax.random.split(key, len(layers))
        for layer, activation, logit, layer_key in zip(layers, activations, self.rate_logits, keys, strict=True):
            if layer_key is not None:
                # log(u / (1 - u)) has the logistic distribution, which is symmetric: z = sigmoid((noise - logit(p)) /
                # t). And 1 - p = sigmoid(-logit(p)).
                noise = jax.random.logistic(layer_key, x.shape, x.dtype)
                x = x * jax.nn.sigmoid((noise - logit) / _TEMPERATURE) / jax.nn.sigmoid(-logit)
            x = activation(layer(x))
        return x

    def divergence(self, length_scale: ArrayLike) -> Float[Array, ""]:
        """The Kullback-Leibler divergence from a normal prior N(0, 1 / length_scale^2) of all weights, plus a constant.

        It is a sum over layers of K inputs, with weights W and rate p (eq. 3 and 4, whose M is W / (1 - p)):

            length_scale^2 |W|^2 / (2 (1 - p)) - K H(p),    H(p) = -p log p - (1 - p) log(1 - p).
        """
        dropped, kept = self.rates, jax.nn.sigmoid(-self.rate_logits)
        # H(p) = -p log p - (1 - p) log(1 - p), by log_sigmoid: finite where a rate underflows.
        entropy = -dropped * jax.nn.log_sigmoid(self.rate_logits) - kept * jax.nn.log_sigmoid(-self.rate_logits)
        squares = jnp.stack([jnp.sum(layer.weight**2) for layer in self.network.layers])
        num_inputs = jnp.array([layer.weight.shape[1] for layer in self.network.layers], entropy.dtype)
        return jnp.sum(jnp.square(length_scale) * squares / (2 * kept) - num_inputs * entropy)


def at_rows(network: Any, x: Float[AnyArray, "n d"]) -> Any:
    """A network's outputs at rows, by NumPy or JAX as x is."""
    return network.of_rows(x) if namespace(x) is np else jax.vmap(network)(x)


def as_variance(output: Float[AnyArray, "*n"], *, alternating: bool) -> Float[AnyArray, "*n"]:
    """An output of a network as a variance, as `NormalNetwork` says."""
    return namespace(output).logaddexp(output, 0) + (_ALTERNATING_FLOOR if alternating else _VARIANCE_FLOOR)


@cache
def _linear(fan_in: int, fan_out: int | Literal["scalar"], dtype: DTypeLike) -> eqx.nn.Linear:
    """A layer that has shapes and dtypes, but no values."""
    return eqx.filter_eval_shape(eqx.nn.Linear, fan_in, fan_out, dtype=dtype, key=jax.random.key(0))


def _with_keras_initial_values(layers: Sequence[eqx.nn.Linear], key: PRNGKeyArray) -> tuple[eqx.nn.Linear, ...]:
    """Layers with Keras's initial values; the given layers have shapes alone."""

    def initial(layer: eqx.nn.Linear, draws: Float[AnyArray, " size"]) -> eqx.nn.Linear:
        # W ~ U(-l, l) with l = sqrt(6 / (fan_in + fan_out)), and b = 0; draws ~ U(-1, 1)
        limit = math.sqrt(6 / sum(layer.weight.shape))
        weight = limit * draws.reshape(layer.weight.shape)
        return eqx.tree_at(lambda l: (l.weight, l.bias), layer, (weight, namespace(weight).zeros_like(weight[:, 0])))

    # One draw for all layers: compiling a random number generator takes longer than compiling the rest.
    ends = np.cumsum([layer.weight.size for layer in layers])
    draws = _random.uniform(key, int(ends[-1]), layers[0].weight.dtype, -1.0, 1.0)
    return in_jax(tuple(map(initial, layers, namespace(draws).split(draws, ends[:-1]))))
