"""From data to a fitted Gaussian process: the search, the posterior, and the answers to what went wrong."""

import warnings
from functools import partial
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks
from jaxcal.functional import noise
from jaxcal.gp import exact, host, nearest
from jaxcal.gp.implicit import with_derivatives
from jaxcal.gp.kernels import SquaredExponential, scattered
from jaxcal.gp.model import Data, Found, Model, as_vector, one_of
from jaxcal.gp.newton import Floats
from jaxcal.gp.noise import InitialOf, with_input_noise, with_student_t_noise
from jaxcal.gp.options import Options
from jaxcal.gp.process import Process, better_of, process_of, process_of_nearest
from jaxcal.gp.search import jitter_of_try, optimum_of_some, search
from jaxcal.optimize import Result, as_constants, first_finite, one_run_at_a_time

# How many amounts of jitter are tried, each a hundred times the one before.
JITTER_TRIES = 4
# Where rounding may hide more than this fraction of the leave-one-out variance, stds are off by more than a few per
# cent.
_MUCH_ROUNDING = 0.1


def maximize_evidence(initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process of the greatest evidence, at the smallest jitter at which evidence and posterior are finite.

    Safe under `vmap`: see `optimize.one_run_at_a_time`.

    Args:
        initial_of: gives the initial values; a pytree where it holds arrays, such as an `eqx.Partial`.
        data: what to explain.
        options: how.
    """
    if host.suits(data, options):
        start, order = _start(initial_of, data, options.of_rows())
        if (parts := host.parts_of(start.models, data)) is not None:
            return _on_host(start, parts, data, order, options)
    return _compiled(initial_of, data, options)


@eqx.filter_jit
def _start(initial_of: InitialOf, data: Data, options: Options) -> tuple[exact.Start, Int[Array, " n"]]:
    """Where the host begins, and the rows in the order in which few are taken."""
    return exact.Start.of(initial_of(data, None), data, options), scattered(data.points, data.included)


def _on_host(
    start: exact.Start,
    parts: list[tuple[Array, SquaredExponential]],
    data: Data,
    order: Int[Array, " n"],
    options: Options,
) -> Process:
    """The process at the smallest jitter at which evidence and posterior are finite, by a search on the host."""
    process = None
    for tries in range(JITTER_TRIES):
        jitter = jitter_of_try(jnp.int32(tries), data.targets.dtype, options.bound)
        found = host.search(start, parts, data, np.asarray(order), float(jitter), options)
        process = _process_at(start.models, data, jitter, found)
        if int(process.result) != Result.NOT_FINITE:
            break
    return cast(Process, process)


@eqx.filter_jit
def _process_of_vector(
    models: Model,
    data: Data,
    jitter: Float[Array, ""],
    vector: Float[Floats, " p"],
    evidence: Float[Floats, ""],
    steps: Int[Floats, ""],
    result: Int[Floats, ""],
    failed: Int[Floats, ""],
) -> Process:
    """The process of the model that a vector says."""
    model = as_vector(one_of(models))[1](vector)
    return process_of(Found(model, evidence, steps, result, failed), data, jitter, None)


def _process_at(models: Model, data: Data, jitter: Float[Array, ""], found: host.Found) -> Process:
    """The process with what the host found."""
    dtype = data.targets.dtype
    result = Result.CONVERGED if found.converged else Result.STEP_LIMIT
    if not np.isfinite(found.evidence):
        result = Result.NOT_FINITE
    numbers = (found.vector.astype(dtype), np.asarray(found.evidence, dtype))
    counts = (np.int32(found.steps), np.int32(result), np.int32(found.failed_initial_values))
    return _process_of_vector(models, data, jitter, *numbers, *counts)


@eqx.filter_jit
def _compiled(initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process by one program, for all other cases."""
    _warn_of_float64_on_a_tpu(data)
    search_all = one_run_at_a_time(partial(first_finite, _attempt, JITTER_TRIES))
    if not options.differentiable:
        return search_all(initial_of, data, options)
    process = search_all(*as_constants((initial_of, data)), options)
    return with_derivatives(process, initial_of, data, options)


def _warn_of_float64_on_a_tpu(data: Data) -> None:
    """While a program is traced: once for every one that is compiled, and never for one that is there."""
    if data.targets.dtype == jnp.float64 and jax.default_backend() == "tpu":
        warnings.warn(
            "a TPU has no float64: the program that imitates it compiles for minutes. Give float32 rows.", stacklevel=2
        )


def _attempt(initial_of: InitialOf, data: Data, options: Options, tries: Int[Array, ""]) -> Process:
    """The process by the noise that the options ask for, with the jitter after so many tries."""
    initial_models, jitter = initial_of(data, None), jitter_of_try(tries, data.targets.dtype, options.bound)
    if options.noise == "student_t":
        return process_of(with_student_t_noise(initial_models, data, jitter, options), data, jitter, options.mesh)
    if options.bound in ("nearest", "better"):
        first = optimum_of_some(initial_models, data, jitter, options)
        by_rows = nearest.optimum(first, data, jitter, options)
        if options.bound == "nearest":
            return process_of_nearest(by_rows, data, jitter)
        is_last = tries == JITTER_TRIES - 1
        return better_of(search(initial_models, data, jitter, options, first), by_rows, data, jitter, is_last)
    found = search(initial_models, data, jitter, options)
    if options.noise == "input":
        return with_input_noise(found, initial_of, data, jitter, options)
    return process_of(found, data, jitter, options.mesh)


def check_fit(process: Process, n: int, *, throw: bool) -> None:
    """Raise if there is no fit to n rows, and `throw`; warn of outliers and of rounding. Nothing while traced."""
    if throw:
        raise_unless_factorized(process.result, process.jitter, n)
    warn_of_outliers(process, n)
    warn_of_rounding(process.rounding_fraction)


def warn_of_outliers(process: Process, n: int) -> None:
    """Warn if an error of a fit that makes sense is greater than any of n normal ones; nothing while traced."""
    if process.greatest_error is None or _checks.is_traced(*process.greatest_error, process.result):
        return
    errors, rows = (np.ravel(a) for a in process.greatest_error)
    errors = np.where(np.ravel(process.result) == Result.NOT_FINITE, 0, errors)
    worst = int(np.argmax(errors))
    error = float(errors[worst])
    if not noise.is_usual(error, n) and error > noise.greatest_error(n):
        warnings.warn(
            f"row {rows[worst]} lies {error:.1f} standard deviations from what the other rows say: it is an "
            "outlier, or the noise has heavy tails or depends on the inputs. noise='student_t' keeps single rows from "
            "deciding the fit; noise='input' lets the noise differ.",
            stacklevel=4,
        )


def warn_of_rounding(fraction: Float[Array, "*runs"]) -> None:
    """Warn if rounding may hide much of the leave-one-out variance; nothing while traced."""
    if not _checks.is_traced(fraction) and np.any(np.asarray(fraction) > _MUCH_ROUNDING):
        warnings.warn(
            f"the uncertainty is hardly greater than what rounding in {fraction.dtype} hides: stds may be off by "
            "factors. jax.config.update('jax_enable_x64', True), before anything else, gives them in float64.",
            stacklevel=4,
        )


def raise_unless_factorized(result: Int[Array, "*runs"], jitter: Float[Array, "*runs"], n: int) -> None:
    """Raise FloatingPointError if no fit made sense at any jitter; nothing while traced."""
    if not _checks.is_traced(result) and np.any(np.asarray(result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {n} rows could not be factorized, or only with hyperparameters that make no sense, "
            f"even with a jitter of {np.max(jitter):.0e} of its mean variance. Is a hyperparameter of the kernel "
            "negative or extreme? throw=False returns the fit."
        )
