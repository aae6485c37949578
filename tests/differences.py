"""Gradients beside central differences: what the tests of several files share."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def check_gradients(
    value: Callable, arguments: Sequence, step: float = 1e-5, *, atol: float = 0.0, compiled: bool = True
) -> tuple[float, list[float]]:
    """Of a function of arrays, by each of them, along a direction: to 1e-4, relative; gives value and differences."""
    both = jax.value_and_grad(value, tuple(range(len(arguments))))
    both = jax.jit(both) if compiled else both
    arguments = [jnp.asarray(argument) for argument in arguments]
    found, gradients = both(*arguments)
    directions, differences = np.random.default_rng(1), []
    for number, gradient in enumerate(gradients):
        direction = directions.normal(size=gradient.shape)
        moved = lambda s: [a + s * direction if i == number else a for i, a in enumerate(arguments)]  # noqa: B023
        differences.append((both(*moved(step))[0] - both(*moved(-step))[0]) / (2 * step))
        np.testing.assert_allclose(jnp.sum(gradient * direction), differences[-1], rtol=1e-4, atol=atol)
    return found, differences
