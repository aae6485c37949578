"""Kernels as modules: the squared exponential, any kernel of gpjax, and the methods that a fit needs of each.

A kernel takes two sets of points and gives their covariances. Each kernel decides what its points are: an array of
rows, or any pytree of arrays with a leading axis of rows. `calibrators.rio` has its own kernel, on pairs of inputs and
output.
"""

import math
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional import kernels, linalg

Points = PyTree[Float[AnyArray, "..."]]

# The search keeps variances and lengthscales within these multiples of the target's variance and of the distance
# between rows. Beyond them the evidence hardly changes, rounding decides, or a kernel explains single rows.
_VARIANCES = 1e-7, 1e4
_LENGTHSCALES = 1e-2, 1e3
# The number of pairs of rows of which the median distance is taken.
_PAIRS = 500
# The rows' sums times this factor, in radians, have sines that look random.
_SCATTER = 1e3
# The derivatives of this many rows' covariances fit into the cache of a processor.
_ROWS_AT_ONCE = 32


@runtime_checkable
class Kernel(Protocol):
    """The methods that a Gaussian process needs of a kernel."""

    def __call__(self, a: Points, b: Points) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        ...

    def diagonal(self, a: Points) -> Float[Array, " n"]:
        """The variance at every row of a."""
        ...

    def derivatives(
        self, a: Points, weights: Float[Array, " n"], cotangents: Float[Array, "n n"]
    ) -> tuple[Float[Array, " p"], Float[Array, "n p"]]:
        """The sums sum(cotangents K_i), and the columns K_i @ weights.

        K_i is the derivative of `self(a, a)` by the entry i of the kernel's arrays, in the order of `ravel_pytree`. The
        cotangents are symmetric.
        """
        ...

    def bounds(
        self, a: Points, target_variance: Float[Array, ""], included: Bool[Array, " n"] | None
    ) -> tuple["Kernel", "Kernel"]:
        """The least and the greatest hyperparameters that make sense for the rows that count, as kernels."""
        ...

    def by_column(self, a: Points) -> "Kernel":
        """The same kernel with a lengthscale for every input column, if it supports that."""
        ...


class SquaredExponential(eqx.Module):
    """variance * exp(-|a - b|^2 / (2 lengthscale^2)), with one lengthscale for all columns or one each; RIO, eq. 3.

    Several kernels may be stacked along leading axes of the arrays.
    """

    log_variance: Float[AnyArray, "*s"]
    log_lengthscale: Float[AnyArray, "*s"] | Float[AnyArray, "*s d"]

    def __call__(self, a: Float[AnyArray, "n d"], b: Float[AnyArray, "m d"]) -> Float[AnyArray, "n m"]:
        """The covariance of every row of a with every row of b."""
        xp = namespace(self.log_variance)
        return kernels.squared_exponential(a, b, xp.exp(self.log_lengthscale), xp.exp(self.log_variance))

    def diagonal(self, a: Float[AnyArray, "n d"]) -> Float[AnyArray, " n"]:
        """The variance at every row of a."""
        xp = namespace(a, self.log_variance)
        return xp.full_like(a[:, 0], xp.exp(self.log_variance))

    def derivatives(
        self, a: Float[Array, "n d"], weights: Float[Array, " n"], cotangents: Float[Array, "n n"]
    ) -> tuple[Float[Array, " p"], Float[Array, "n p"]]:
        """The derivatives by the log variance and the log lengthscales, as `Kernel.derivatives` describes them."""
        scales = jnp.exp(self.log_lengthscale), jnp.exp(self.log_variance)
        return kernels.squared_exponential_derivatives(a, *scales, weights, cotangents)

    def bounds(
        self, a: Float[AnyArray, "n d"], target_variance: Float[AnyArray, ""], included: Bool[AnyArray, " n"] | None
    ) -> tuple["SquaredExponential", "SquaredExponential"]:
        """The least and the greatest hyperparameters that make sense for the rows that count."""
        xp = namespace(a, target_variance)
        log_spacing = xp.broadcast_to(xp.log(spacing(a, included)), self.log_lengthscale.shape)
        log_variance = xp.broadcast_to(xp.log(target_variance), self.log_variance.shape)
        low, high = (
            SquaredExponential(log_variance + math.log(variance), log_spacing + math.log(scale))
            for variance, scale in zip(_VARIANCES, _LENGTHSCALES, strict=True)
        )
        return low, high

    def by_column(self, a: Float[AnyArray, "n d"]) -> "SquaredExponential":
        """The same kernel with a lengthscale for every column; unchanged for one column, or if it has them."""
        if a.shape[1] == 1 or self.log_lengthscale.ndim > self.log_variance.ndim:
            return self
        xp, shape = namespace(self.log_lengthscale), (*self.log_lengthscale.shape, a.shape[1])
        return SquaredExponential(self.log_variance, xp.broadcast_to(self.log_lengthscale[..., None], shape))

    def parts(self, a: Float[AnyArray, "n d"]) -> "list[tuple[AnyArray, SquaredExponential]]":
        """The squared exponentials whose sum this kernel is, each with its rows."""
        return [(a, self)]


class GPJaxKernel(eqx.Module):
    """A kernel of gpjax in the form of `SquaredExponential`."""

    kernel: Any

    @classmethod
    def of(cls, name: str, kernel: Any) -> "GPJaxKernel":
        """The kernel, if it is one of gpjax; TypeError, which names the argument, if not."""
        # Imported only here: it takes longer to import than all of jaxcal.
        from gpjax.kernels import AbstractKernel

        if not isinstance(kernel, AbstractKernel):
            raise TypeError(f"{name} must be a kernel of gpjax; got {type(kernel).__name__}.")
        return cls(kernel)

    def __call__(self, a: Float[Array, "n d"], b: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return self.kernel.cross_covariance(a, b)

    def diagonal(self, a: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return jax.vmap(self.kernel)(a, a)

    def derivatives(
        self, a: Float[Array, "n d"], weights: Float[Array, " n"], cotangents: Float[Array, "n n"]
    ) -> tuple[Float[Array, " p"], Float[Array, "n p"]]:
        """The derivatives by the kernel's arrays: automatic differentiation for every pair of rows, in parts."""
        arrays, static = eqx.partition(self, eqx.is_inexact_array)
        vector, unravel = ravel_pytree(arrays)
        gradient = jax.grad(lambda vector, one, other: eqx.combine(unravel(vector), static).kernel(one, other))
        gradients = jax.vmap(gradient, in_axes=(None, None, 0))

        def of_row(row: tuple[Float[Array, " d"], Float[Array, " n"]]) -> Float[Array, "2 p"]:
            one, cotangent = row
            return jnp.stack([cotangent, weights]) @ gradients(vector, one, a)

        sums = lax.map(of_row, (a, cotangents), batch_size=_ROWS_AT_ONCE)
        return sums[:, 0].sum(axis=0), sums[:, 1]

    def bounds(
        self, a: Float[Array, "n d"], target_variance: Float[Array, ""], included: Bool[Array, " n"] | None
    ) -> tuple["GPJaxKernel", "GPJaxKernel"]:
        """Infinite bounds: the meaning of the parameters is known to gpjax alone."""
        del a, target_variance, included
        filled = lambda value: jax.tree.map(
            lambda leaf: jnp.full_like(leaf, value) if eqx.is_inexact_array(leaf) else leaf, self
        )
        return filled(-jnp.inf), filled(jnp.inf)

    def by_column(self, a: Float[Array, "n d"]) -> "GPJaxKernel":
        """The kernel as it is: its lengthscales are the user's."""
        del a
        return self


def gram(kernel: Kernel, points: Points, extra: ArrayLike = 0) -> Float[AnyArray, "n n"]:
    """The covariance of the points with themselves, with `extra` (noise or jitter) added to its exact diagonal."""
    return linalg.with_diagonal(kernel(points, points), kernel.diagonal(points) + extra)


def take(points: Points, rows: ArrayLike | slice) -> Points:
    """Some of the points, by their numbers."""
    return jax.tree.map(lambda a: a[rows], points)


def scattered(points: Points, included: Bool[AnyArray, " n"] | None = None) -> Int[AnyArray, " n"]:
    """The numbers of the rows in an order that looks random; it depends on the rows' values, not on their order.

    Rows that do not count come last.
    """
    leaves = jax.tree.leaves(points)
    xp = namespace(*leaves)
    total = sum(xp.sum(leaf.reshape(leaf.shape[0], -1), axis=1) for leaf in leaves)
    place = xp.sin(_SCATTER * total)
    return xp.argsort(place if included is None else xp.where(included, place, np.inf), stable=True)


def spacing(points: Float[AnyArray, "n d"], included: Bool[AnyArray, " n"] | None = None) -> Float[AnyArray, ""]:
    """The lengthscale at which the median pair of rows has a correlation of 1 / e."""
    xp = namespace(points)
    some = points[scattered(points, included)[:_PAIRS]]
    number = some.shape[0] if included is None else xp.minimum(xp.sum(included, dtype=np.int32), some.shape[0])
    pairs = xp.arange(some.shape[0], dtype=np.int32)
    distances = xp.linalg.norm(some - some[(pairs - number // 2) % number], axis=1)
    # exp(-distance^2 / (2 l^2)) = 1 / e for l = distance / sqrt(2)
    middle = median(distances, None if included is None else pairs < number)
    return xp.where(middle > 0, middle, math.sqrt(2 * points.shape[1])) / math.sqrt(2)


def median(values: Float[AnyArray, " n"], included: Bool[AnyArray, " n"] | None = None) -> Float[AnyArray, ""]:
    """The median of the values that count."""
    xp = namespace(values)
    if included is None:
        return xp.median(values)
    ordered, number = xp.sort(xp.where(included, values, np.inf)), xp.sum(included, dtype=np.int32)
    return (ordered[(number - 1) // 2] + ordered[number // 2]) / 2
