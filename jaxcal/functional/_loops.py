"""What the loops of all layers have in common."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcal._numpy import namespace

T = TypeVar("T")


def over_leading_axis(fun: Callable[[Any], Any], arrays: Any, *, at_once: int | None = None) -> Any:
    """`fun` over the leading axis of the arrays: one after the other on a CPU, else all, or so many, at once.

    NumPy's arrays are taken by a loop that compiles nothing.
    """
    if namespace(*jax.tree.leaves(arrays)) is np:
        return _stacked([fun(each) for each in _each(arrays)])
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


def scan(
    step: Callable[[T, Any], tuple[T, Any]], initial: T, arrays: Any, *, reverse: bool = False, again: bool = False
) -> tuple[T, Any]:
    """`lax.scan`, which of NumPy's arrays is a loop that compiles nothing.

    Args:
        step: `step(state, each)` gives the next state, and what is kept.
        initial: the first state.
        arrays: with a leading axis, along which the steps go.
        reverse: whether they begin at its end.
        again: whether a gradient computes each step again: what is kept for it does not grow with their number.

    Example:
        >>> running = lambda total, each: (total + each, total + each)
        >>> scan(running, 0, np.array([1, 2, 3]))[1].tolist()
        [1, 3, 6]
    """
    if namespace(*jax.tree.leaves((initial, arrays))) is jnp:
        return lax.scan(jax.checkpoint(step) if again else step, carried(initial), arrays, reverse=reverse)
    state, kept = initial, []
    for each in reversed(_each(arrays)) if reverse else _each(arrays):
        state, found = step(state, each)
        kept.append(found)
    return state, _stacked(kept[::-1] if reverse else kept)


def while_loop(unfinished: Callable[[T], Any], step: Callable[[T], T], initial: T) -> T:
    """`lax.while_loop`, which of NumPy's arrays is a loop that compiles nothing.

    Example:
        >>> while_loop(lambda number: number < 10, lambda number: 2 * number, np.array(1)).item()
        16
    """
    if namespace(*jax.tree.leaves(initial)) is jnp:
        return lax.while_loop(unfinished, step, initial)
    state = initial
    while unfinished(state):
        state = step(state)
    return state


def _each(arrays: Any) -> list[Any]:
    """The parts of a pytree of NumPy's arrays along their leading axis."""
    leaves, tree = jax.tree.flatten(arrays)
    return [tree.unflatten(parts) for parts in zip(*leaves, strict=True)]


def _stacked(parts: list[Any]) -> Any:
    """Pytrees of NumPy's arrays, stacked."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
