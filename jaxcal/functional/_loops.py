"""What the loops of all layers have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def over_leading_axis(fun: Callable[[Any], Any], arrays: Any, *, at_once: int | None = None) -> Any:
    """`fun` over the leading axis of the arrays: one after the other on a CPU, else all, or so many, at once."""
    traced = jax.jit(fun)  # once for both
    together = jax.vmap(traced) if at_once is None else partial(lax.map, traced, batch_size=at_once)
    return lax.platform_dependent(arrays, cpu=partial(lax.map, traced), default=together)


def carried(initial: T) -> T:
    """The initial values of a loop as its steps give them, where devices have rows or runs of their own.

    Inside of `jax.shard_map` a constant is known to be the same on all devices, and what follows from their data is
    not: a loop may not begin with the one and go on with the other. Elsewhere these are the values as they are.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return initial
    # To choose between a value and itself depends on the device, and is no operation once it is compiled.
    here = lax.pcast(jnp.zeros((), bool), axes, to="varying")
    return jax.tree.map(lambda value: jnp.where(here, value, value), initial)
