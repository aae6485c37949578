"""From data to a fitted Gaussian process: the search, the posterior, and the answers to what went wrong."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks, _programs
from jaxcal._numpy import ARRAYS, AnyArray, by_numpy, in_jax, is_known, is_on_host
from jaxcal.functional import noise
from jaxcal.gp import device, host, nearest
from jaxcal.gp.device import warn_of_float64_on_a_tpu
from jaxcal.gp.implicit import with_derivatives
from jaxcal.gp.model import JITTER_TRIES, Data, jitter_of_try
from jaxcal.gp.noise import InitialOf, Prepare, S, with_input_noise, with_student_t_noise
from jaxcal.gp.options import Options
from jaxcal.gp.padding import device_of
from jaxcal.gp.process import Process, better_of, process_of, process_of_nearest
from jaxcal.gp.search import optimum_of_some, search
from jaxcal.optimize import Result, as_constants, first_finite, one_run_at_a_time

T = TypeVar("T")

# Where rounding may hide more than this fraction of the leave-one-out variance, stds are off by more than a few per
# cent.
_MUCH_ROUNDING = 0.1


def fit_rows(prepare: Prepare[S], rows: Sequence[Any], options: Options, *, in_numpy: bool) -> tuple[S, Process]:
    """What the rows are scaled by, and the process of the greatest evidence.

    The host searches for the exact evidence of known rows under Gaussian noise. It asks NumPy on a CPU (`gp.host`), and
    small programs on accelerators and for other kernels (`gp.device`). Any other fit is one compiled program.

    Args:
        prepare: `prepare(*rows, included)` gives what the rows are scaled by, the initial values and the data. It is
            written for the arrays of NumPy and of JAX, and a pytree, such as an `eqx.Partial`.
        rows: x, and what has a last axis of outputs if there are several; None for what is not there.
        options: how.
        in_numpy: whether the kernel is a sum of squared exponentials, which NumPy knows.
    """
    rows = tuple(rows)
    known = as_constants((prepare, rows))
    if not (options.is_plain and is_known(known)):
        return _compiled(prepare, rows, options.of_numbers())
    if in_numpy and is_on_host(known):
        found = by_numpy(over_outputs, eqx.Partial(host.fit, known[0], options), known[1])
    else:
        with _programs.at_top():
            fit_one = partial(device.fit, known[0], options, device_of(known))
            found = in_jax(over_outputs(fit_one, jax.tree.map(np.asarray, known[1])))
    return _with_derivatives(found[1], prepare, rows, options.of_numbers()) if options.differentiable else found


@_programs.jit
def _compiled(prepare: Prepare[S], rows: Sequence[Any], options: Options) -> tuple[S, Process]:
    def one(*rows: Array | None) -> tuple[S, Process]:
        scales, initial_of, data = prepare(*rows, None)
        return scales, maximize_evidence(initial_of, data, options)

    return over_outputs(one, rows)


@_programs.jit
@_programs.exact_products
def _with_derivatives(
    process: Process, prepare: Prepare[S], rows: Sequence[Any], options: Options
) -> tuple[S, Process]:
    """The process that a search has found, as a function of the rows; arguments as of `fit_rows`."""

    def one(process: Process, *rows: Array | None) -> tuple[S, Process]:
        scales, initial_of, data = prepare(*rows, None)
        return scales, with_derivatives(process, initial_of, data, options)

    x, *outputs = rows
    if outputs[-1].ndim == 1:
        return one(process, *rows)
    by_output = lambda process, *outputs: one(process, x, *outputs)
    return eqx.filter_vmap(by_output, in_axes=(eqx.if_array(0), *(1 for _ in outputs)))(process, *outputs)


def over_outputs(fit_one: Callable[..., T], rows: Sequence[AnyArray]) -> T:
    """`fit_one(*rows)`, or of several outputs one after the other, on the host, or all by one `vmap`.

    Args:
        fit_one: of one output.
        rows: as of `fit_rows`.
    """
    x, *outputs = rows
    if outputs[-1].ndim == 1:
        return fit_one(x, *outputs)
    if isinstance(outputs[-1], jax.Array):
        return eqx.filter_vmap(partial(fit_one, x), in_axes=1)(*outputs)
    column = lambda array, k: None if array is None else array[:, k]
    each = [fit_one(x, *(column(array, k) for array in outputs)) for k in range(outputs[-1].shape[1])]
    return jax.tree.map(lambda *parts: np.stack(parts) if isinstance(parts[0], ARRAYS) else parts[0], *each)


@_programs.exact_products
def maximize_evidence(initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process of the greatest evidence, at the smallest jitter at which evidence and posterior are finite.

    Part of a compiled program; safe under `vmap`: see `optimize.one_run_at_a_time`.

    Args:
        initial_of: gives the initial values.
        data: what to explain.
        options: how.
    """
    warn_of_float64_on_a_tpu(data)
    search_all = one_run_at_a_time(partial(first_finite, _attempt, JITTER_TRIES))
    if not options.differentiable:
        return search_all(initial_of, data, options)
    process = search_all(*as_constants((initial_of, data)), options)
    return with_derivatives(process, initial_of, data, options)


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
        _checks.warn(
            f"row {rows[worst]} lies {error:.1f} standard deviations from what the other rows say: it is an "
            "outlier, or the noise has heavy tails or depends on the inputs. noise='student_t' keeps single rows from "
            "deciding the fit; noise='input' lets the noise differ."
        )


def warn_of_rounding(fraction: Float[Array, "*runs"]) -> None:
    """Warn if rounding may hide much of the leave-one-out variance; nothing while traced."""
    if not _checks.is_traced(fraction) and np.any(np.asarray(fraction) > _MUCH_ROUNDING):
        _checks.warn(
            f"the uncertainty is hardly greater than what rounding in {fraction.dtype} hides: stds may be off by "
            "factors. jax.config.update('jax_enable_x64', True), before anything else, gives them in float64."
        )


def raise_unless_factorized(result: Int[Array, "*runs"], jitter: Float[Array, "*runs"], n: int) -> None:
    """Raise FloatingPointError if no fit made sense at any jitter; nothing while traced."""
    if not _checks.is_traced(result) and np.any(np.asarray(result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {n} rows could not be factorized, or only with hyperparameters that make no sense, "
            f"even with a jitter of {np.max(jitter):.0e} of its mean variance. Is a hyperparameter of the kernel "
            "negative or extreme? throw=False returns the fit."
        )
