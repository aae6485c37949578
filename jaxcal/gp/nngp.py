"""The kernel of the neural-network Gaussian process: an untrained network with infinitely wide layers of ReLU.

Lee, Bahri, Novak, Schoenholz, Pennington & Sohl-Dickstein, "Deep Neural Networks as Gaussian Processes", ICLR 2018.
`NNGP` is its eq. 5, the recursion from layer to layer. `functional.kernels.relu_covariance` is the expectation in it.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from gpjax.kernels import AbstractKernel
from gpjax.parameters import NonNegativeReal, val
from gpjax.typing import Array
from jaxtyping import ArrayLike, Float, Num

from jaxcal import _checks
from jaxcal.functional import kernels


class NNGP(AbstractKernel):
    """The covariance of the outputs of a random, infinitely wide network with ReLU, as a kernel of gpjax.

    Weights of a layer with m inputs have the distribution N(0, weight_variance / m), biases N(0, bias_variance). The
    recursion begins with K_0(a, b) = bias_variance + weight_variance a . b / d. Its step, with u, v ~ N(0, K_l) at two
    points, is Lee et al., eq. 5:

        K_{l+1} = bias_variance + weight_variance E[relu(u) relu(v)],

    The kernel is K_depth. It is not stationary: inputs should be standardized.

    Args:
        depth: the number of hidden layers, at least 1.
        weight_variance: the variance of the weights into a unit, summed over its inputs; not negative, or a parameter
            of gpjax.
        bias_variance: the variance of the biases; not negative, or a parameter of gpjax.
        active_dims: the columns that the kernel depends on, as for every kernel of gpjax.

    Raises:
        ValueError: if depth is below 1, or a variance negative.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = NNGP(depth=1, weight_variance=2.0, bias_variance=0.0)
        >>> f"{kernel(jnp.array([1.0, 1.0]), jnp.array([1.0, 1.0])):.3f}"
        '2.000'
        >>> f"{kernel(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])):.3f}"
        '0.318'
    """

    depth: int = eqx.field(static=True, default=2)
    weight_variance: Any = 2.0
    bias_variance: Any = 0.1
    name = "NNGP"

    def __init__(
        self,
        depth: int = 2,
        weight_variance: ArrayLike | Any = 2.0,
        bias_variance: ArrayLike | Any = 0.1,
        active_dims: list[int] | slice | None = None,
    ):
        _checks.check_at_least("depth", depth, 1)
        self.depth = depth
        self.weight_variance = _parameter("weight_variance", weight_variance)
        self.bias_variance = _parameter("bias_variance", bias_variance)
        super().__init__(active_dims)

    def __call__(self, x: Num[Array, " d"], y: Num[Array, " d"]) -> Float[Array, ""]:
        """The covariance of the outputs at two points."""
        x, y = self.slice_input(x), self.slice_input(y)
        weight, bias = val(self.weight_variance), val(self.bias_variance)
        own_x, own_y, shared = (bias + weight * jnp.dot(a, b) / x.shape[0] for a, b in ((x, x), (y, y), (x, y)))
        for _ in range(self.depth):
            # At a single point E[relu(u)^2] = K_l / 2.
            shared = bias + weight * kernels.relu_covariance(shared, own_x, own_y)
            own_x, own_y = bias + weight * own_x / 2, bias + weight * own_y / 2
        return shared


def _parameter(name: str, value: ArrayLike | Any) -> Any:
    """A number as a parameter of gpjax that cannot become negative; a parameter stays as it is."""
    if eqx.is_array_like(value):
        _checks.check_not_negative(name, value)
        return NonNegativeReal(value)
    return value
