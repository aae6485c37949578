"""The search for hyperparameters: by the exact evidence, or by the sparse bound through inducing points.

The sparse bound begins at the best of several models by the bound itself, and goes on by L-BFGS; by Adam, as GPyTorch's
examples do, if a learning rate is given. Greedy inducing points are rows chosen by conditional variance under the
initial kernel; with them, and on one device, a part of the rows decides on the hyperparameters of many.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional import sparse_gp
from jaxcal.gp import model as models
from jaxcal.gp.exact import exact_optimum
from jaxcal.gp.kernels import Kernel, Points, take
from jaxcal.gp.model import Data, Found, Model
from jaxcal.gp.options import TOLERANCE, Options
from jaxcal.optimize import Optimum, Result, adam, as_constants, minimize

# The sparse bound may begin at the exact evidence of so many rows.
_SUBSET_ROWS = 1000
# That model and others are compared by the bound of so many rows, with so many inducing points, also at these fractions
# of noise.
_COMPARED_ROWS, _COMPARED_POINTS, _MORE_NOISE = 4000, 100, (0.1, 0.5)
# Greedy inducing points are chosen among so many rows, which then decide on the hyperparameters.
_MANY_ROWS = 10_000
# GPyTorch keeps the variance of the noise above this.
_GPYTORCH_NOISE = 1e-4


def search(
    initial_models: Model, data: Data, jitter: Float[Array, ""], options: Options, first: Found | None = None
) -> Found:
    """The best hyperparameters found from the initial values; `first` is what some rows say, where it is known."""
    if options.bound == "exact":
        if not _has_more_to_learn(initial_models):
            return best_initial(initial_models, data, jitter)
        if options.learning_rate is None:
            return exact_optimum(initial_models, data, jitter, options)
        return descend(models.one_of(initial_models), data, jitter, options)
    best = sparse_initial(initial_models, data, jitter, options, first)
    model = with_inducing_points(best.model, data, options)
    rows = rows_that_decide(data, options)
    found = descend(model, rows, jitter, options)
    if rows is not data:
        found = found._replace(evidence=models.evidence(found.model, data, jitter))
    return found._replace(failed_initial_values=best.failed_initial_values)


def rows_that_decide(data: Data, options: Options) -> Data:
    """The rows that decide on the hyperparameters by the sparse bound: a part of many, with greedy inducing points."""
    takes_all = options.mesh is not None or options.inducing == "trained"
    return data if takes_all else models.some_rows(data, _MANY_ROWS)


def optimum_of_some(initial_models: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """Where a fit to many rows begins: at the only initial values, or at the exact optimum of some rows."""
    some = models.some_rows(data, _SUBSET_ROWS)
    if not _has_more_to_learn(initial_models):
        return best_initial(initial_models, some, jitter)
    if models.number_of(initial_models) == 1:
        unknown = jnp.full((), jnp.nan, data.targets.dtype)
        return Found(
            model=models.one_of(initial_models),
            evidence=unknown,
            steps=jnp.int32(0),
            result=jnp.int32(Result.STEP_LIMIT),
            failed_initial_values=jnp.int32(0),
        )
    return exact_optimum(initial_models, some, jitter, options._replace(tolerance=min(options.tolerance, TOLERANCE)))


def sparse_initial(
    initial_models: Model, data: Data, jitter: Float[Array, ""], options: Options, first: Found | None = None
) -> Found:
    """Where the sparse bound begins: at the best by the bound itself of several.

    Those are the initial values and the optimum of the exact evidence of some rows, each with its own noise and with
    more: what few inducing points do not explain is noise to them.
    """
    first = optimum_of_some(initial_models, data, jitter, options) if first is None else first
    if models.number_of(initial_models) == 1 or not _has_more_to_learn(initial_models):
        return first
    if options.ard:
        wide = eqx.filter_vmap(lambda model: model.kernel.by_column(data.points))(initial_models)
        initial_models = eqx.tree_at(lambda m: m.kernel, initial_models, wide)
    join = lambda several, one: jnp.concatenate([several, one[None]]) if eqx.is_array(one) else one
    candidates = models.with_more_noise(jax.tree.map(join, initial_models, first.model), _MORE_NOISE)
    compared = models.some_rows(data, _COMPARED_ROWS)
    few_points = options._replace(inducing="greedy", num_inducing=min(options.num_inducing, _COMPARED_POINTS))
    bound = lambda model: models.evidence(with_inducing_points(model, compared, few_points), compared, jitter)
    best, values = models.greatest(candidates, bound)
    return first._replace(model=models.one_of(candidates, best), evidence=values[best])


def refine(model: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The hyperparameters of the greatest evidence near those of one model, whose inducing points stay."""
    if model.inducing is not None:
        return descend(model, data, jitter, options._replace(inducing="greedy"))
    return exact_optimum(models.alone(model), data, jitter, options._replace(ard=False))


def best_initial(initial_models: Model, data: Data, jitter: ArrayLike) -> Found:
    """The initial values of the greatest exact evidence, of those along the leading axis of the arrays."""
    best, values = models.greatest(initial_models, lambda model: models.evidence(model, data, jitter))
    is_nan = jnp.isnan(values)
    result = jnp.where(is_nan[best], Result.NOT_FINITE, Result.CONVERGED)
    return Found(
        model=models.one_of(initial_models, best),
        evidence=values[best],
        steps=jnp.int32(0),
        result=result,
        failed_initial_values=jnp.sum(is_nan, dtype=jnp.int32),
    )


def with_inducing_points(model: Model, data: Data, options: Options) -> Model:
    """The model with the inducing points that the options ask for: greedy ones, or the first rows, to be trained."""
    if options.inducing == "greedy":
        inducing = greedy_points(model.kernel, models.some_rows(data, _MANY_ROWS).points, options.num_inducing)
    else:
        inducing = take(data.points, jnp.arange(options.num_inducing))
    return eqx.tree_at(lambda m: m.inducing, model, inducing, is_leaf=lambda node: node is None)


def greedy_points(kernel: Kernel, points: Points, num_inducing: int) -> Points:
    """The points that leave the least variance unexplained, chosen one by one: `sparse_gp.greedy_rows`.

    Derivatives pass to the points, but not through the choice.
    """
    kernel, held = as_constants((kernel, points))
    covariances_with = lambda row: kernel(take(held, row[None]), held)[0]
    return take(points, sparse_gp.greedy_rows(covariances_with, kernel.diagonal(held), num_inducing))


def descend(model: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The model of the greatest evidence near this one, by L-BFGS or Adam; trained inducing points move."""
    params, fixed = models.split(model, with_inducing=options.inducing == "trained" and options.bound != "exact")
    cost = models.cost_beyond_bounds(model, data)

    def loss(params: PyTree) -> Float[Array, ""]:
        model = eqx.combine(params, fixed)
        return cost(model) - models.evidence(model, data, jitter, options.mesh)

    if not jax.tree.leaves(params):
        value = loss(params)
        optimum = Optimum(params, value, jnp.int32(0), jnp.int32(Result.CONVERGED))
    elif options.learning_rate is None:
        optimum = minimize(loss, params, max_iterations=options.max_iterations, gain_tolerance=options.tolerance)
    else:
        optimum = _minimize_by_adam(loss, params, options.learning_rate, options.max_iterations)
    result = jnp.where(jnp.isfinite(optimum.loss), optimum.result, Result.NOT_FINITE)
    model = eqx.combine(optimum.params, fixed)
    return Found(model, -optimum.loss, optimum.steps, result, failed_initial_values=jnp.int32(0))


def _minimize_by_adam(
    loss: Callable[[Model], Float[Array, ""]], params: Model, learning_rate: float, steps: int
) -> Optimum:
    """So many steps of Adam in GPyTorch's coordinates: hyperparameters are the softplus of what is learned."""
    # One vector: for a tree, XLA would compile every update once a leaf.
    raw, unravel = ravel_pytree(_map_hyperparameters(lambda log, least: inverse_softplus(jnp.exp(log) - least), params))
    descent = adam(jnp.asarray(learning_rate, raw.dtype))

    def model_of(raw: Float[Array, " p"]) -> Model:
        return _map_hyperparameters(lambda value, least: jnp.log(jax.nn.softplus(value) + least), unravel(raw))

    def step(state, _):
        raw, memory = state
        updates, memory = descent.update(jax.grad(lambda raw: loss(model_of(raw)))(raw), memory)
        return (raw + updates, memory), None

    (raw, _), _ = lax.scan(step, (raw, descent.init(raw)), length=steps)
    value = loss(model_of(raw))
    result = jnp.where(jnp.isfinite(value), Result.STEP_LIMIT, Result.NOT_FINITE)
    return Optimum(model_of(raw), value, jnp.int32(steps), result)


def _map_hyperparameters(change: Callable, model: Model) -> Model:
    """Kernel and noise changed by `change(value, least)`, with the least value that GPyTorch allows."""
    kernel = jax.tree.map(lambda value: change(value, 0.0), model.kernel)
    return eqx.tree_at(lambda m: (m.kernel, m.log_noise), model, (kernel, change(model.log_noise, _GPYTORCH_NOISE)))


def inverse_softplus(value: Float[AnyArray, "*d"]) -> Float[AnyArray, "*d"]:
    """The number whose softplus a positive value is."""
    xp = namespace(value)
    return value + xp.log(-xp.expm1(-value))


def _has_more_to_learn(model: Model) -> bool:
    return bool(jax.tree.leaves(models.split(model)[0]))
