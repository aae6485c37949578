"""Fits under noise that is Student t or depends on the inputs; `functional.noise` has the formulas."""

from collections.abc import Callable
from typing import TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxcal.functional import gp, noise
from jaxcal.gp.model import Data, Found, Model, StudentT, evidence, expected_squares, leave_one_out, posterior
from jaxcal.gp.options import Options
from jaxcal.gp.process import Process, process_of
from jaxcal.gp.search import descend, refine, search

# Student t noise: the degrees of freedom of the first precisions, and those that the climb begins with.
_FIRST_DF, _CLIMBED_DF = 4.0, 10.0
# Noise that depends on the inputs: how often the two processes are fitted, and how far the one of the noise is.
_NOISE_ROUNDS, _NOISE_STEPS, _NOISE_TOLERANCE = 2, 20, 0.1

# Gives the initial values, for rows and, where it is known, the variance of their noise: models without inducing
# points, stacked along a leading axis of their arrays.
InitialOf = Callable[[Data, Float[Array, ""] | None], Model]

S = TypeVar("S")
# Gives what rows are scaled by, the initial values, and the rows as the process takes them.
Prepare = Callable[..., tuple[S, InitialOf, Data]]


def with_student_t_noise(initial_models: Model, data: Data, jitter: Float[Array, ""], options: Options) -> Found:
    """The model of the greatest bound under Student t noise: hyperparameters, degrees of freedom and rows' precisions.

    The search is that of normal noise with the precisions that the targets alone suggest. From its end all are climbed
    together; alternating between them, the degrees of freedom creep.
    """
    first = noise.student_t_weights(data.targets**2, jnp.asarray(_FIRST_DF, data.targets.dtype))
    found = search(initial_models, data._replace(relative_noise=1 / first), jitter, options)

    def squares(model: Model, data: Data) -> Float[Array, " n"]:
        after = posterior(model, data, jitter, options.mesh)
        return expected_squares(model, after, data) / model.noise_variance(data.points)

    student_t = StudentT.of(_CLIMBED_DF, squares(found.model, data._replace(relative_noise=1 / first)))
    model = eqx.tree_at(lambda m: m.student_t, found.model, student_t, is_leaf=lambda node: node is None)
    climbed = descend(model, data, jitter, options)
    # The last update is in closed form, and raises the bound.
    last = squares(climbed.model, data)
    model = eqx.tree_at(lambda m: m.student_t, climbed.model, StudentT.of(noise.student_t_df(last), last))
    value = evidence(model, data, jitter, options.mesh)
    return climbed._replace(model=model, evidence=value, failed_initial_values=found.failed_initial_values)


def with_input_noise(
    found: Found, initial_of: InitialOf, data: Data, jitter: Float[Array, ""], options: Options
) -> Process:
    """The process whose noise follows a second one, of the log of the noise variance, as far as that helps.

    Kersting et al. (2007), with leave-one-out errors: each row's noise is foreseen by the other rows, and the fraction
    of the noise that follows it is learned, so that a second process that says nothing has no part.
    """
    logit = jnp.zeros_like(found.evidence)
    first = eqx.tree_at(lambda m: m.logit_fraction, found.model, logit, is_leaf=lambda node: node is None)
    ones = jnp.ones_like(data.targets)
    variance = jnp.asarray(noise.LOG_SQUARE_VARIANCE, data.targets.dtype)
    of_noise = options._replace(ard=False, max_iterations=_NOISE_STEPS, tolerance=_NOISE_TOLERANCE)
    arrays, static = eqx.partition(first, eqx.is_array)
    rest: list[PyTree] = []

    def one_round(state, _):
        arrays, base_variance = state
        model, rows = eqx.combine(arrays, static), data._replace(base_variance=base_variance)
        errors = leave_one_out(model, posterior(model, rows, jitter, options.mesh), rows).standardized
        relative = model.relative_noise(base_variance)
        responses = noise.log_noise_responses(errors, relative)
        center = jnp.mean(responses)
        logs = Data(data.points, responses - center)
        second = search(initial_of(logs, variance), logs, jitter, of_noise)
        after = process_of(second, logs, jitter, options.mesh)
        others = leave_one_out(second.model, cast(gp.Posterior, after.posterior), logs)
        foreseen = jnp.exp(logs.targets - others.error + jnp.maximum(others.variance - variance, 0) / 2)
        scale = jnp.mean(foreseen)
        rows = data._replace(base_variance=foreseen / scale)
        better = refine(model, rows, jitter, options)
        out_arrays, other = eqx.partition((better, after), eqx.is_array)
        rest[:] = [other]
        return (eqx.filter(better.model, eqx.is_array), rows.base_variance), (out_arrays, -jnp.log(scale))

    (_, base_variance), history = lax.scan(one_round, (arrays, ones), length=_NOISE_ROUNDS)
    arrays, offset = jax.tree.map(lambda a: a[-1], history)
    better, after = eqx.combine(arrays, rest[0])
    rows = data._replace(base_variance=base_variance)
    process = process_of(better._replace(failed_initial_values=found.failed_initial_values), rows, jitter, options.mesh)
    put = lambda p: (p.log_noise, p.log_noise_offset)
    return eqx.tree_at(put, process, (after, offset), is_leaf=lambda node: node is None)
