"""The fitted process as a function of the data: its hyperparameters are that by the implicit function theorem.

A search gives the hyperparameters as constants. Here the last digits are taken, and they become functions of the data:
the optimum of the evidence, of its sparse bound, or of the leave-one-out CRPS of few rows. Which rows are inducing
points or neighbors stays; inducing points that are rows move with them.
"""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float, Int

from jaxcal.gp.model import Data, Found, Model, one_of
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import Inference, InitialOf, Problem
from jaxcal.optimize import as_constants, as_function

# A direction in which the log evidence bends by less, in nats for a step of one in a log hyperparameter, has no optimum
# to speak of: a hyperparameter is on its way to where it has no effect.
_LEAST_CURVATURE = 1e-4


def with_derivatives(process: Process, initial_of: InitialOf, data: Data, inference: Inference) -> Process:
    """The process of a search, as a function of the data; its derivatives are NaN where it is no optimum.

    Args:
        process: what a search found, which is held constant.
        initial_of: gives the initial values, and with them what is not learned.
        data: what the process is fitted to.
        inference: how it was found.
    """
    process = as_constants(process)
    kept = inference.kept(process, as_constants(data))

    def problem(data: Data) -> Problem:
        model = _with_what_is_given(process.model, initial_of, data)
        return inference.problem(model, data, process.jitter, kept)

    climb = lambda problem: inference.climb(problem, process.jitter)
    model, result = _optimum(problem, climb, data, process)
    found = Found(
        model=model,
        evidence=inference.evidence(model, data, process.jitter),
        steps=process.iterations,
        result=result,
        failed_initial_values=process.failed_initial_values,
    )
    return inference.conclude(found, data, process.jitter)


def _optimum(
    problem: Callable[[Data], Problem], climb: Callable[[Problem], Float[Array, " p"]], data: Data, process: Process
) -> tuple[Model, Int[Array, ""]]:
    """The model at the optimum, and how the search for it ended."""
    of_data = problem(data)
    start = of_data.vector_of(of_data.model)
    if not start.size:
        return of_data.model, process.result
    loss_of, near_of = (lambda data: problem(data).loss), (lambda data: climb(problem(data)))
    vector, result = as_function(loss_of, near_of, (data,), start, process.result, _LEAST_CURVATURE)
    return of_data.model_of(vector), result


def _with_what_is_given(model: Model, initial_of: InitialOf, data: Data) -> Model:
    """The model with noise that is known, which depends on the target's scale, as it is given."""
    if "log_noise" not in model.fixed:
        return model
    return eqx.tree_at(lambda m: m.log_noise, model, one_of(initial_of(data, None)).log_noise)
