"""Where the search for hyperparameters starts: lengthscales relative to the distances between rows, shares of noise."""

import itertools

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxcal.processes.evidence import Data, GaussianProcess
from jaxcal.processes.kernels import IOKernel, SquaredExponential

# The grid of starts: lengthscales relative to the distances between rows, and shares of noise.
_LENGTHSCALES = (0.25, 0.5, 1, 2)
_NOISES = (0.003, 0.03, 0.3, 0.9)
# Distances are judged by so many pairs of rows.
_PAIRS = 500


def on_grid(data: Data, *, ard: bool, given: IOKernel | None = None) -> GaussianProcess:
    """Processes over a grid of lengthscales and noise, along a leading axis of their arrays.

    Args:
        data: what to explain, of variance one.
        ard: whether every input column has a lengthscale of its own.
        given: a kernel that starts where it is, whatever the grid says; None for squared exponentials.
    """
    spacings = [None if points is None else _spacing(points) for points in data.points]
    num_kernels = sum(points is not None for points in data.points)

    def start(factor, noise):
        lengthscales = [None if spacing is None else factor * spacing for spacing in spacings]
        kernel = given or _kernels(data, lengthscales, (1 - noise) / num_kernels, ard)
        return _process(data, kernel, noise)

    grid = list(itertools.product(_LENGTHSCALES, _NOISES))
    return eqx.filter_vmap(start)(*jnp.asarray(grid, data.targets.dtype).T)


def at(
    data: Data, lengthscale: float, variance: float, noise: float, *, ard: bool, given: IOKernel | None = None
) -> GaussianProcess:
    """One process of this lengthscale, variance and noise variance, along a leading axis of one; the rest as above."""

    def start(lengthscale, variance, noise):
        kernel = given or _kernels(data, [lengthscale] * len(data.points), variance, ard)
        return _process(data, kernel, noise)

    return eqx.filter_vmap(start)(*jnp.asarray([[lengthscale, variance, noise]], data.targets.dtype).T)


def _process(data: Data, kernel: IOKernel, noise: Float[Array, ""]) -> GaussianProcess:
    share = None if data.spread is None else jnp.zeros_like(noise)
    return GaussianProcess(kernel, jnp.log(noise), share)


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
