"""Kernels on what goes into a model and what comes out of it: RIO's I/O kernel, of our own or of gpjax's kernels."""

import operator
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcal.functional import gp


class Points(NamedTuple):
    """Where the kernel is evaluated: what went into the model and what came out, or None where it is not looked at."""

    inputs: Float[Array, "n d"] | None
    output: Float[Array, "n 1"] | None

    def take(self, rows: Int[Array, " m"]) -> "Points":
        """Some of the points, by their numbers."""
        return jax.tree.map(lambda a: a[rows], self)


class SquaredExponential(eqx.Module):
    """variance * exp(-|a - b|^2 / (2 lengthscale^2)), a lengthscale for all columns or one each; RIO, eq. 3."""

    log_variance: Float[Array, ""]
    log_lengthscale: Float[Array, ""] | Float[Array, " d"]

    def __call__(self, a: Float[Array, "n d"], b: Float[Array, "m d"]) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return gp.exponential_of_squares(a, b, jnp.exp(-2 * self.log_lengthscale), self.log_variance)

    def diagonal(self, a: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return jnp.full_like(a[:, 0], jnp.exp(self.log_variance))


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


class IOKernel(eqx.Module):
    """k_in(x, x') + k_out(m, m') of inputs x and outputs m, or one of the two alone; RIO, eq. 2."""

    input: SquaredExponential | GPJaxKernel | None
    output: SquaredExponential | GPJaxKernel | None

    def __call__(self, a: Points, b: Points) -> Float[Array, "n m"]:
        """The covariance of every row of a with every row of b."""
        return _sum(part(one, other) for part, one, other in self._parts(a, b))

    def diagonal(self, a: Points) -> Float[Array, " n"]:
        """The variance at every row of a."""
        return _sum(part.diagonal(one) for part, one in self._parts(a))

    def _parts(self, *points: Points) -> Iterable[tuple]:
        """The kernels that there are, each with what it sees of the points."""
        return (seen for seen in zip((self.input, self.output), *points, strict=True) if seen[0] is not None)


def _sum(terms: Iterable[Array]) -> Array:
    return reduce(operator.add, terms)
