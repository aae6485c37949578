"""The fitted process as a function of the data: its hyperparameters are that by the implicit function theorem.

A search gives the hyperparameters as constants. Here the last digits are taken, and they become functions of the data:
the optimum of the evidence, of its sparse bound, or of the leave-one-out CRPS of few rows. Which rows are inducing
points or neighbors stays; inducing points that are rows move with them.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcal.functional import gp
from jaxcal.gp import nearest
from jaxcal.gp.exact import exact_optimum
from jaxcal.gp.kernels import Points, take
from jaxcal.gp.model import Data, Found, Model, alone, as_vector, cost_beyond_bounds, evidence, one_of
from jaxcal.gp.noise import InitialOf
from jaxcal.gp.options import Options
from jaxcal.gp.process import Either, Process, process_of, process_of_nearest
from jaxcal.gp.search import rows_that_decide
from jaxcal.optimize import as_constants, as_function, minimize

# A direction in which the log evidence bends by less, in nats for a step of one in a log hyperparameter, has no optimum
# to speak of: a hyperparameter is on its way to where it has no effect.
_LEAST_CURVATURE = 1e-4
# Where the climb to the optimum ends, by the gain in nats; that of L-BFGS by the relative gain of the loss, and by the
# gradient. Newton steps take the rest.
_TOLERANCE, _to_the_end = 1e-8, partial(minimize, loss_tolerance=1e-13, gradient_tolerance=1e-6)


def with_derivatives(process: Process, initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process of a search, as a function of the data; its derivatives are NaN where it is no optimum.

    Args:
        process: what `fit.maximize_evidence` found, which is held constant.
        initial_of: gives the initial values, and with them what is not learned.
        data: what the process is fitted to.
        options: how.
    """
    process = as_constants(process)
    given = process.posterior
    if not isinstance(given, Either):
        with_derivatives_of = _by_rows if isinstance(given, nearest.Nearest) else _through_points
        return with_derivatives_of(process, initial_of, data, options)

    def through_points() -> Process:
        after = _through_points(process, initial_of, data, options)
        either = Either(cast(gp.Posterior, after.posterior), given.nearest, data.points, given.asks_nearest)
        return eqx.tree_at(lambda p: p.posterior, after, either)

    def by_rows() -> Process:
        after = _by_rows(process, initial_of, data, options)
        either = Either(given.sparse, cast(nearest.Nearest, after.posterior), data.points, given.asks_nearest)
        return eqx.tree_at(lambda p: (p.points, p.posterior), after, (process.points, either))

    return lax.cond(given.asks_nearest, by_rows, through_points)


def _through_points(process: Process, initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process at the optimum of the evidence, or of its sparse bound."""
    is_sparse, rows = options.bound != "exact", None
    trained = is_sparse and options.inducing == "trained"
    if is_sparse and not trained:
        rows = _numbers(process.points, as_constants(data.points))

    def problem(data: Data) -> _Problem:
        model, some = _with_what_is_given(process.model, initial_of, data), data
        if is_sparse:
            some = rows_that_decide(data, options)
            inducing = process.points if rows is None else take(data.points, rows)
            model = eqx.tree_at(lambda m: m.inducing, model, inducing, is_leaf=lambda node: node is None)
        return _Problem.of(model, some, lambda model: -evidence(model, some, process.jitter), trained=trained)

    def climb(problem: _Problem) -> Float[Array, " p"]:
        if is_sparse:
            return _descend(problem, options)
        tight = options._replace(tolerance=_TOLERANCE, ard=False)
        return problem.vector_of(exact_optimum(alone(problem.model), problem.data, process.jitter, tight).model)

    model, result = _optimum(problem, climb, data, process)
    value = evidence(model, data, process.jitter)
    return process_of(_found(process, model, value, result), data, process.jitter, None)


def _by_rows(process: Process, initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process at the optimum of the leave-one-out CRPS, each row given those nearest to it."""
    held = as_constants(data)
    rows = nearest.deciding_rows(held)
    near = nearest.neighbors(process.model, held, process.jitter, rows)

    def problem(data: Data) -> _Problem:
        model = _with_what_is_given(process.model, initial_of, data)
        loss = lambda model: nearest.log_crps(model, data, process.jitter, rows, near)
        return _Problem.of(model, data, loss, n=rows.shape[0])

    model, result = _optimum(problem, partial(_descend, options=options), data, process)
    return process_of_nearest(_found(process, model, process.evidence, result), data, process.jitter)


class _Problem(NamedTuple):
    """What is minimized.

    Attributes:
        model: near the optimum.
        data: the rows that decide.
        vector_of: what is learned of a model.
        model_of: the model of such a vector.
        loss: of the vector, with what is beyond the bounds.
    """

    model: Model
    data: Data
    vector_of: Callable[[Model], Float[Array, " p"]]
    model_of: Callable[[Float[Array, " p"]], Model]
    loss: Callable[[Float[Array, " p"]], Float[Array, ""]]

    @classmethod
    def of(
        cls, model: Model, data: Data, loss: Callable[[Model], Array], *, trained: bool = False, n: int | None = None
    ) -> "_Problem":
        """The problem of a model, and of its inducing points if they are trained; `n` as of `cost_beyond_bounds`."""
        model_of, cost = as_vector(model, with_inducing=trained)[1], cost_beyond_bounds(model, data, n)

        def total(vector: Float[Array, " p"]) -> Float[Array, ""]:
            model = model_of(vector)
            return cost(model) + loss(model)

        vector_of = lambda model: as_vector(model, with_inducing=trained)[0]
        return cls(model=model, data=data, vector_of=vector_of, model_of=model_of, loss=total)


def _optimum(
    problem: Callable[[Data], _Problem], climb: Callable[[_Problem], Float[Array, " p"]], data: Data, process: Process
) -> tuple[Model, Int[Array, ""]]:
    """The model at the optimum, and how the search for it ended."""
    of_data = problem(data)
    start = of_data.vector_of(of_data.model)
    if not start.size:
        return of_data.model, process.result
    loss_of, near_of = (lambda data: problem(data).loss), (lambda data: climb(problem(data)))
    vector, result = as_function(loss_of, near_of, (data,), start, process.result, _LEAST_CURVATURE)
    return of_data.model_of(vector), result


def _descend(problem: _Problem, options: Options) -> Float[Array, " p"]:
    """The vector of the least loss near that of the model, by L-BFGS."""
    start = problem.vector_of(problem.model)
    return _to_the_end(problem.loss, start, max_iterations=options.max_iterations).params


def _with_what_is_given(model: Model, initial_of: InitialOf, data: Data) -> Model:
    """The model with noise that is known, which depends on the target's scale, as it is given."""
    if "log_noise" not in model.fixed:
        return model
    return eqx.tree_at(lambda m: m.log_noise, model, one_of(initial_of(data, None)).log_noise)


def _found(process: Process, model: Model, value: Float[Array, ""], result: Int[Array, ""]) -> Found:
    return Found(
        model=model,
        evidence=value,
        steps=process.iterations,
        result=result,
        failed_initial_values=process.failed_initial_values,
    )


def _numbers(some: Points, points: Points) -> Int[Array, " m"]:
    """The numbers of the rows that some points are."""

    def number(point: Points) -> Int[Array, ""]:
        parts = jax.tree.map(lambda rows, one: jnp.sum(jnp.abs(rows - one[None]), axis=1), points, point)
        return jnp.argmin(sum(jax.tree.leaves(parts)))

    return lax.map(number, some)
