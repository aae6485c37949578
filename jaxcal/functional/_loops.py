"""Loops for all layers: over JAX's arrays as parts of a program, over NumPy's arrays without compilation."""

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
    """`fun` over the leading axis of the arrays: one by one on a CPU, elsewhere all or `at_once` of them together.

    For NumPy's arrays it is a loop that compiles nothing.
    """
    if namespace(*jax.tree.leaves(arrays)) is np:
        return _stacked([fun(each) for each in _each(arrays)])
    traced = jax.jit(fun)  # traced once for both platforms
    together = jax.vmap(traced) if at_once is None else partial(lax.map, traced, batch_size=at_once)
    return lax.platform_dependent(arrays, cpu=partial(lax.map, traced), default=together)


def carried(initial: T) -> T:
    """The initial values of a loop, with the type that its steps return where devices have rows or runs of their own.

    Inside of `jax.shard_map`, the type of a constant says that it is the same on all devices. The type of a result of
    their data says that it varies. A loop may not begin with the first type and continue with the second. Outside of
    `jax.shard_map` the values are returned as they are.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return initial
    # The condition varies over the devices, and so does the type of the result. A compiled program has no such choice.
    here = lax.pcast(jnp.zeros((), bool), axes, to="varying")
    return jax.tree.map(lambda value: jnp.where(here, value, value), initial)


def scan(
    step: Callable[[T, Any], tuple[T, Any]], initial: T, arrays: Any, *, reverse: bool = False, again: bool = False
) -> tuple[T, Any]:
    """`lax.scan`; for NumPy's arrays, a loop that compiles nothing.

    Args:
        step: `step(state, each)` returns the next state, and an output of this step.
        initial: the first state.
        arrays: with a leading axis, along which the steps go.
        reverse: whether the steps begin at the end of that axis.
        again: whether a gradient computes each step again. Then it keeps the state of every step, and no other result.

    Returns:
        the last state, and the outputs of all steps, stacked.

    Example:
        >>> running = lambda total, each: (total + each, total + each)
        >>> scan(running, 0, np.array([1, 2, 3]))[1].tolist()
        [1, 3, 6]
    """
    if namespace(*jax.tree.leaves((initial, arrays))) is jnp:
        return lax.scan(jax.checkpoint(step) if again else step, carried(initial), arrays, reverse=reverse)
    state, kept = initial, []
    for each in reversed(_each(arrays)) if reverse else _each(arrays):
        state, output = step(state, each)
        kept.append(output)
    return state, _stacked(kept[::-1] if reverse else kept)


def while_loop(unfinished: Callable[[T], Any], step: Callable[[T], T], initial: T) -> T:
    """`lax.while_loop`; for NumPy's arrays, a loop that compiles nothing.

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
