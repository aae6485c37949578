"""The fitted process as a differentiable function of the data, by the implicit function theorem.

A search gives the hyperparameters as constants. Here they are optimized to the last digits and become functions of the
data. The objective is the evidence, its sparse bound, or the leave-one-out CRPS of few rows. The choice of the rows
that are inducing points or neighbors stays. Inducing points that are rows move with these rows.
"""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Int

from jaxcal.gp.model import Data, Model, SearchResult, one_of
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import Inference, InitialOf, MinimizationProblem
from jaxcal.optimize import as_constants, as_function

# The least curvature of the log evidence at which a direction has an optimum, in nats for a step of one in a log
# hyperparameter. With less, a hyperparameter is on its way to where it has no effect.
_LEAST_CURVATURE = 1e-4


def with_derivatives(process: Process, initial_of: InitialOf, data: Data, inference: Inference) -> Process:
    """The process of a search, as a function of the data; its derivatives are NaN if it is no optimum.

    Args:
        process: the result of a search, which is held constant.
        initial_of: gives the initial values, and with them the parameters that are not learned.
        data: the data that the process is fitted to.
        inference: the inference of the search.
    """
    process = as_constants(process)
    kept = inference.kept(process, as_constants(data))

    def problem(data: Data) -> MinimizationProblem:
        model = _with_what_is_given(process.model, initial_of, data)
        return inference.problem(model, data, process.jitter, kept)

    climb = lambda problem: inference.climb(problem, process.jitter)
    model, result = _optimum(problem, climb, data, process)
    optimum = SearchResult(
        model=model,
        evidence=inference.evidence(model, data, process.jitter),
        steps=process.iterations,
        result=result,
        failed_initial_values=process.failed_initial_values,
    )
    return inference.conclude(optimum, data, process.jitter)


def _optimum(
    problem: Callable[[Data], MinimizationProblem],
    climb: Callable[[MinimizationProblem], Float[Array, " p"]],
    data: Data,
    process: Process,
) -> tuple[Model, Int[Array, ""]]:
    """The model at the optimum, and how the search for it ended."""
    instance = problem(data)
    start = instance.vector_of(instance.model)
    if not start.size:
        return instance.model, process.result
    loss_of, near_of = (lambda data: problem(data).loss), (lambda data: climb(problem(data)))
    vector, result = as_function(loss_of, near_of, (data,), start, process.result, _LEAST_CURVATURE)
    return instance.model_of(vector), result


def _with_what_is_given(model: Model, initial_of: InitialOf, data: Data) -> Model:
    """The model with the known noise variance, if there is one, as a function of the target's scale."""
    if "log_noise" not in model.fixed:
        return model
    return eqx.tree_at(lambda m: m.log_noise, model, one_of(initial_of(data, None)).log_noise)
