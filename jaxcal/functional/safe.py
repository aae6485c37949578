"""Functions that stay finite: in their derivatives at the edge of their domain, and where squares leave the range."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root, with a derivative of 0 in place of infinity at 0; NaN stays NaN.

    >>> import jax
    >>> jax.grad(sqrt)(jnp.zeros(())).item()
    0.0
    """
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def unit_of(*values: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """What values are divided by before they are squared: the largest size along an axis, which is kept, or 1 for 0.

    Squares of float32 numbers are finite and not 0 only between 1e-19 and 1e19. No derivative passes.

    >>> unit_of(jnp.array([3.0, -4.0])).item()
    4.0
    """
    sizes = [jnp.max(jnp.abs(each), axis, keepdims=axis is not None) for each in values]
    size = lax.stop_gradient(jnp.max(jnp.stack(sizes), axis=0))
    return jnp.where((size > 0) & jnp.isfinite(size), size, 1)


def root_mean_square(values: Float[Array, "..."]) -> Float[Array, ""]:
    """The root of the mean of all squares, of numbers of any size.

    >>> f"{root_mean_square(jnp.full(3, 1e30)):.1e}"
    '1.0e+30'
    """
    unit = unit_of(values)
    return unit * sqrt(jnp.mean((values / unit) ** 2))
