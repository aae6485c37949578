"""Adam on the evidence in GPyTorch's coordinates, as in CRUDE and in GPyTorch's examples."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal.functional.linalg import inverse_softplus
from jaxcal.gp import model as models
from jaxcal.gp.model import Data, Model, SearchResult
from jaxcal.optimize import Result, adam

# GPyTorch keeps the noise variance above this.
_GPYTORCH_NOISE = 1e-4


def descended_by_adam(
    model: Model, data: Data, jitter: Float[Array, ""], learning_rate: ArrayLike, steps: int | Int[ArrayLike, ""]
) -> SearchResult:
    """The model after `steps` steps of Adam, whose hyperparameters are the softplus of the learned parameters."""
    params, fixed = models.split(model)
    cost = models.cost_beyond_bounds(model, data)
    # The parameters are one vector: for a tree, XLA would compile every update once for each leaf.
    raw, unravel = ravel_pytree(_map_hyperparameters(lambda log, least: inverse_softplus(jnp.exp(log) - least), params))
    descent = adam(jnp.asarray(learning_rate, raw.dtype))

    def model_of(raw: Float[Array, " p"]) -> Model:
        learned = _map_hyperparameters(lambda value, least: jnp.log(jax.nn.softplus(value) + least), unravel(raw))
        return eqx.combine(learned, fixed)

    def loss(raw: Float[Array, " p"]) -> Float[Array, ""]:
        model = model_of(raw)
        return cost(model) - models.evidence(model, data, jitter)

    def step(_, state):
        raw, memory = state
        updates, memory = descent.update(jax.grad(loss)(raw), memory)
        return raw + updates, memory

    raw, _ = lax.fori_loop(0, steps, step, (raw, descent.init(raw)))
    value = loss(raw)
    return SearchResult(
        model=model_of(raw),
        evidence=-value,
        steps=jnp.asarray(steps, jnp.int32),
        result=jnp.where(jnp.isfinite(value), Result.STEP_LIMIT, Result.NOT_FINITE),
        failed_initial_values=jnp.int32(0),
    )


def _map_hyperparameters(change: Callable, model: Model) -> Model:
    """The model with kernel and noise changed by `change(value, least)`; `least` is the least value in GPyTorch."""
    parts = lambda model: (model.kernel, model.log_noise)
    kernel, noise = parts(model)
    kernel = jax.tree.map(lambda value: change(value, 0.0), kernel)
    noise = jax.tree.map(lambda value: change(value, _GPYTORCH_NOISE), noise)  # None if it is fixed
    return eqx.tree_at(parts, model, (kernel, noise), is_leaf=lambda node: node is None)
