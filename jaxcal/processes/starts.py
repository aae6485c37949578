"""Where the search for hyperparameters starts: lengthscales relative to the distances between rows, shares of noise."""

from collections.abc import Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from jaxcal.processes.evidence import Data, GaussianProcess
from jaxcal.processes.kernels import GPJaxKernel, IOKernel, SquaredExponential

# The grid of starts: lengthscales relative to the distances between rows, and shares of noise.
_LENGTHSCALES = (0.25, 0.5, 1, 2)
_NOISES = (0.003, 0.03, 0.3, 0.9)
# A process whose noise is given starts with at least so much variance of its own.
_LEAST_SIGNAL = 0.1
# Distances are judged by so many pairs of rows.
_PAIRS = 500


def on_grid(
    data: Data, *, ard: bool, given: IOKernel | None = None, noise: Float[Array, ""] | None = None
) -> GaussianProcess:
    """Processes over a grid of lengthscales and noise, along a leading axis of their arrays.

    Args:
        data: what to explain, of variance one.
        ard: whether every input column has a lengthscale of its own.
        given: a kernel that starts where it is; None for squared exponentials.
        noise: the variance of the noise, which stays; None where it is learnt.
    """
    given, is_learnt = _of_dtype(given, data.targets.dtype), noise is None
    spacings = [None if points is None else _spacing(points) for points in data.points]
    num_kernels = sum(points is not None for points in data.points)

    def start(factor, noise):
        lengthscales = [None if spacing is None else factor * spacing for spacing in spacings]
        variance = jnp.maximum(1 - noise, _LEAST_SIGNAL)
        kernel = given or _kernels(data, lengthscales, variance / num_kernels, ard)
        return _process(data, kernel, noise, () if is_learnt else ("log_noise",))

    factors = _LENGTHSCALES if given is None else (1.0,)
    noises = jnp.asarray(_NOISES) if noise is None else jnp.reshape(noise, (1,))
    grid = jnp.meshgrid(jnp.asarray(factors), noises, indexing="ij")
    return eqx.filter_vmap(start)(*(jnp.ravel(values).astype(data.targets.dtype) for values in grid))


def nngp_grid(data: Data, variances: Iterable[ArrayLike], noise: ArrayLike) -> GaussianProcess:
    """Processes with the kernel `nngp.NNGP` over a grid of its variances, in which nothing is left to learn.

    Args:
        data: what to explain.
        variances: weight variances and bias variances.
        noise: the variance of the noise.
    """
    # Imported only here: it imports gpjax, which takes longer than all of jaxcal.
    from jaxcal.processes.nngp import NNGP

    def start(weight_variance, bias_variance):
        kernel = IOKernel(GPJaxKernel(NNGP(2, weight_variance, bias_variance)), None)
        return _process(data, kernel, jnp.asarray(noise, data.targets.dtype), ("kernel", "log_noise"))

    grid = jnp.meshgrid(*(jnp.asarray(values, data.targets.dtype) for values in variances), indexing="ij")
    return eqx.filter_vmap(start)(*map(jnp.ravel, grid))


def at(
    data: Data, lengthscale: float, variance: float, noise: float, *, ard: bool, given: IOKernel | None = None
) -> GaussianProcess:
    """One process of this lengthscale, variance and noise variance, along a leading axis of one; the rest as above."""
    given = _of_dtype(given, data.targets.dtype)

    def start(lengthscale, variance, noise):
        kernel = given or _kernels(data, [lengthscale] * len(data.points), variance, ard)
        return _process(data, kernel, noise)

    return eqx.filter_vmap(start)(*jnp.asarray([[lengthscale, variance, noise]], data.targets.dtype).T)


def _process(data: Data, kernel: IOKernel, noise: Float[Array, ""], fixed: tuple[str, ...] = ()) -> GaussianProcess:
    share = None if data.spread is None else jnp.zeros_like(noise)
    return GaussianProcess(kernel, jnp.log(noise), share, fixed=fixed)


def _of_dtype(given: IOKernel | None, dtype: DTypeLike) -> IOKernel | None:
    """gpjax makes parameters of the default dtype, whatever the data's."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, given)


def _kernels(data: Data, lengthscales: list, variance: ArrayLike, ard: bool) -> IOKernel:
    """A kernel for the inputs and one for the output, where they are looked at."""
    return IOKernel(
        *(
            None if points is None else _kernel(points, lengthscale, variance, ard)
            for points, lengthscale in zip(data.points, lengthscales, strict=True)
        )
    )


def _kernel(points: Float[Array, "n d"], lengthscale, variance, ard: bool) -> SquaredExponential:
    shape, dtype = (points.shape[1],) if ard and points.shape[1] > 1 else (), points.dtype
    log_lengthscale = jnp.log(jnp.asarray(lengthscale, dtype))
    return SquaredExponential(jnp.log(jnp.asarray(variance, dtype)), jnp.broadcast_to(log_lengthscale, shape))


def _spacing(points: Float[Array, "n d"]) -> Float[Array, ""]:
    """The lengthscale at which the median pair of rows has a correlation of 1 / e."""
    some = points[:: max(1, points.shape[0] // _PAIRS)]
    distances = jnp.linalg.norm(some - jnp.roll(some, some.shape[0] // 2, axis=0), axis=1)
    median = jnp.median(distances)
    return jnp.where(median > 0, median, jnp.sqrt(2.0 * points.shape[1])) / jnp.sqrt(2.0)
