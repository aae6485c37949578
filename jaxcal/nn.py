"""Networks, from which the predictors are put together.

Written for one point, [d] -> [k]; rows come from `jax.vmap`, seeds and folds from another one around it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray


class FeedForward(eqx.Module):
    """A fully connected network: hidden layers of the given widths, and a linear output.

    Weights are drawn Glorot-uniform and biases start at zero, as in Keras: W ~ U(-l, l) with
    l = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010, eq. 16).

    Args:
        in_size: number of inputs d.
        hidden: the widths of the hidden layers; none gives a linear model.
        out_size: number of outputs k, or "scalar" for an output of shape ().
        key: random key of the initial weights.
        activation: applied after every hidden layer.
        dtype: of the weights; the default float where None.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> network = FeedForward(3, (16, 8), 2, key=jax.random.key(0))
        >>> network(jnp.ones(3)).shape
        (2,)
    """

    layers: tuple[eqx.nn.Linear, ...]
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        hidden: Sequence[int],
        out_size: int | Literal["scalar"],
        *,
        key: PRNGKeyArray,
        activation: Callable = jax.nn.relu,
        dtype: DTypeLike | None = None,
    ):
        if any(width < 1 for width in hidden):
            raise ValueError(f"hidden must hold widths of at least 1; got {tuple(hidden)}.")
        fans = list(zip((in_size, *hidden), (*hidden, out_size), strict=True))
        layers = [eqx.nn.Linear(fan_in, fan_out, dtype=dtype, key=key) for fan_in, fan_out in fans]
        self.layers = _with_keras_start(layers, key)
        self.activation = activation

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, "..."]:
        """The outputs, [k] or (), at one point."""
        *_, last = (x, *self.features(x))
        return self.layers[-1](last)

    def features(self, x: Float[Array, " d"]) -> tuple[Float[Array, " width"], ...]:
        """The activations of every hidden layer at one point, from the first layer to the last."""
        found = []
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
            found.append(x)
        return tuple(found)


def _with_keras_start(layers: Sequence[eqx.nn.Linear], key: PRNGKeyArray) -> tuple[eqx.nn.Linear, ...]:
    """The layers with Keras's initial values in place of Equinox's."""

    def start(layer: eqx.nn.Linear, draws: Float[Array, " size"]) -> eqx.nn.Linear:
        limit = math.sqrt(6 / sum(layer.weight.shape))
        weight = limit * draws.reshape(layer.weight.shape)
        return eqx.tree_at(lambda l: (l.weight, l.bias), layer, (weight, jnp.zeros_like(weight[:, 0])))

    # One draw for all layers: compiling a random number generator takes longer than compiling the rest.
    ends = np.cumsum([layer.weight.size for layer in layers])
    draws = jax.random.uniform(key, (ends[-1],), layers[0].weight.dtype, -1, 1)
    return tuple(map(start, layers, jnp.split(draws, ends[:-1])))
