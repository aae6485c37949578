"""Initial values of hyperparameters: lengthscales relative to the distances between rows, fractions of noise."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace
from jaxcal.gp.kernels import GPJaxKernel, Kernel, SquaredExponential, spacing
from jaxcal.gp.model import Data, Model, alone
from jaxcal.gp.protocols import Noise

# `_ONE` is for a kernel on one set of rows: its lengthscale relative to the distances between rows, and the fraction of
# noise. `_TWO` is for a sum of two kernels: the lengthscale of each, and the fraction of noise. The best optimum
# reached from them is seldom below the best from many random initial values: benchmarks/speed/gp_optima.py.
_ONE = ((0.25, 0.5), (0.25, 0.03), (1.0, 0.03), (0.04, 0.03))
_TWO = ((0.25, 0.25, 0.5), (1.0, 1.0, 0.001), (0.25, 0.04, 1e-4), (1.0, 0.06, 0.003))
# A kernel that the user gives begins at its own hyperparameters, with each of these fractions of noise.
_NOISES = (0.003, 0.03, 0.3, 0.9)
# If the noise variance is known, the initial variance of the process is at least this.
_LEAST_SIGNAL = 0.1

# Makes a kernel of squared exponentials, one for each set of rows that it depends on.
Combine = Callable[[Sequence[SquaredExponential]], Kernel]


class GivenParts(NamedTuple):
    """The parts of a process that a user gave; None for a part that is learned or preset.

    Attributes:
        kernel: the kernel, whose hyperparameters are initial values.
        noise_variance: in squared units of the target.
    """

    kernel: Kernel | None
    noise_variance: Float[AnyArray, ""] | None

    @classmethod
    def of(cls, kernel: Kernel | None, noise: Noise) -> "GivenParts":
        """A kernel, and the variance of a noise if it is known."""
        variance = noise.known_variance
        if variance is not None:
            known = variance if isinstance(variance, jax.Array) else np.asarray(variance)
            variance = _checks.as_floats("the variance of the noise", known)
        return cls(kernel, variance)

    def scaled_noise(self, scale: Float[AnyArray, ""]) -> Float[AnyArray, ""] | None:
        """The known variance of the noise for a target divided by a scale; None if it is not known."""
        return None if self.noise_variance is None else self.noise_variance / scale / scale


def on_grid(
    data: Data, parts: Sequence[Float[AnyArray, "n _"]], combine: Combine, *, noise: Float[AnyArray, ""] | None = None
) -> Model:
    """Models of several lengthscales and fractions of noise, along a leading axis of their arrays.

    Args:
        data: the rows, whose targets have variance one.
        parts: the sets of rows that the kernel depends on: one or two.
        combine: makes the kernel from the squared exponentials, one for each set.
        noise: the variance of the noise, which stays; None if it is learned.
    """
    xp, dtype = namespace(data.targets), data.targets.dtype
    *factors, noises = xp.asarray(np.transpose(_ONE if len(parts) == 1 else _TWO), dtype)
    variances = noises if noise is None else xp.broadcast_to(noise, noises.shape).astype(dtype)
    log_signals = xp.log(xp.maximum(1 - variances, _LEAST_SIGNAL) / len(parts))
    kernels = [
        SquaredExponential(log_signals, xp.log(factor * spacing(part, data.included)))
        for factor, part in zip(factors, parts, strict=True)
    ]
    return _model(data, combine(kernels), variances, () if noise is None else ("log_noise",))


def at_given(data: Data, kernel: Kernel, *, noise: Float[AnyArray, ""] | None = None) -> Model:
    """Models with a kernel as it is, and several fractions of noise; arguments as of `on_grid`."""
    kernel = _of_dtype(kernel, data.targets.dtype)
    noises = jnp.asarray(_NOISES, data.targets.dtype) if noise is None else jnp.reshape(noise, (1,))
    fixed = () if noise is None else ("log_noise",)
    return eqx.filter_vmap(lambda noise: _model(data, kernel, noise, fixed))(noises.astype(data.targets.dtype))


def at(data: Data, kernel: Kernel, noise: float) -> Model:
    """One model with this kernel and noise variance, with a leading axis of length one."""
    xp, dtype = namespace(data.targets), data.targets.dtype
    return alone(_model(data, _of_dtype(kernel, dtype), xp.asarray(noise, dtype)))


def nngp_grid(data: Data, variances: Iterable[ArrayLike], noise: ArrayLike) -> Model:
    """Models with the kernel `nngp.NNGP` over a grid of its variances; all their hyperparameters are fixed.

    Args:
        data: the rows.
        variances: weight variances and bias variances.
        noise: the variance of the noise.
    """
    # Imported only here: it imports gpjax, which takes longer than all of jaxcal.
    from jaxcal.gp.nngp import NNGP

    def initial(weight_variance, bias_variance):
        kernel = GPJaxKernel(NNGP(2, weight_variance, bias_variance))
        return _model(data, kernel, jnp.asarray(noise, data.targets.dtype), ("kernel", "log_noise"))

    grid = jnp.meshgrid(*(jnp.asarray(values, data.targets.dtype) for values in variances), indexing="ij")
    return eqx.filter_vmap(initial)(*map(jnp.ravel, grid))


def _model(data: Data, kernel: Kernel, noise: Float[AnyArray, "*s"], fixed: tuple[str, ...] = ()) -> Model:
    xp = namespace(noise)
    logit = None if data.base_variance is None else xp.zeros_like(noise)
    return Model(kernel, xp.log(noise), logit, fixed=fixed)


def _of_dtype(kernel: Kernel, dtype: DTypeLike) -> Kernel:
    """The kernel with arrays of this dtype: gpjax makes parameters of JAX's default dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, kernel)
