"""The fit of a Gaussian process to data: the search, the posterior, and the errors and warnings of a failed fit."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, as_numpy, by_numpy, in_jax, is_array, is_known, is_on_host, numpy_or_jit, part
from jaxcal.functional import noise
from jaxcal.gp import exact, host, padding
from jaxcal.gp.implicit import with_derivatives
from jaxcal.gp.inference.automatic import chosen, leave_one_out_crps
from jaxcal.gp.inference.exact import TOLERANCE, Exact
from jaxcal.gp.model import JITTER_TRIES, Data
from jaxcal.gp.padding import device_of
from jaxcal.gp.process import Process, first_fit
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise, Prepare, S
from jaxcal.optimize import Result, as_constants, first_finite, one_run_at_a_time

T = TypeVar("T")

# If rounding may hide more than this fraction of the leave-one-out variance, stds are wrong by more than a few percent.
_MUCH_ROUNDING = 0.1
# The tolerance, in nats, of the search on some of many rows: the searches on more rows continue from its end.
_TOLERANCE_OF_SOME = 0.1


class Way(NamedTuple):
    """How a process is fitted.

    Attributes:
        inferences: the inferences, with their defaults for the rows. If there are several, the fit with the best
            leave-one-out predictions is taken.
        noise: the noise of the process.
        differentiable: whether derivatives pass through the fit.
    """

    inferences: tuple[Inference, ...]
    noise: Noise
    differentiable: bool = False

    @classmethod
    def of(
        cls,
        n: int,
        inference: Inference | None,
        noise: Noise,
        *,
        ard: bool | str,
        inputs: int,
        is_known: bool,
        in_numpy: bool,
        differentiable: bool,
    ) -> "Way":
        """The way that a user asked for, checked, with the defaults for n rows in place of None.

        Args:
            n: how many rows there are.
            inference: the inference asked for; None for the default for the rows.
            noise: the noise of the process.
            ard: `ard` for an inference that has None.
            inputs: how many columns have a lengthscale with ard=True.
            is_known: whether no transformation traces the rows.
            in_numpy: whether the kernel is a sum of squared exponentials, for which there is a fit in NumPy.
            differentiable: whether derivatives pass through the fit.
        """
        if differentiable and not noise.is_gaussian:
            raise ValueError(f"differentiable=True goes with Gaussian noise; got {type(noise).__name__}.")
        asked = chosen(n, noise, is_known=is_known, in_numpy=in_numpy) if inference is None else (inference,)
        settled = (each.with_ard(ard, n, inputs).settled(n, noise, differentiable=differentiable) for each in asked)
        return cls(tuple(settled), noise, differentiable)

    @property
    def inference(self) -> Inference:
        """The only one, or the first."""
        return self.inferences[0]

    def by(self, inference: Inference) -> "Way":
        """The same way with one inference.

        Its numbers are arrays, so that a compiled program does not depend on their values.
        """
        return self._replace(inferences=(inference.of_arrays(),), noise=self.noise.of_arrays())


def check_objects(inference: Any, noise: Any) -> None:
    """Raise TypeError if `inference` or `noise` is no object of `jaxcal.gp`; an inference may be None."""
    for name, value, kind, example in (
        ("inference", inference, (Inference, type(None)), "Exact()"),
        ("noise", noise, Noise, "GaussianNoise()"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be an object of jaxcal.gp, {example}, say; got {value!r}.")


def fit_rows(prepare: Prepare[S], rows: Sequence[Any], way: Way, *, in_numpy: bool) -> tuple[S, Process]:
    """The scales of the rows, and the process of the greatest evidence.

    The host fits known rows: by NumPy on a CPU if the kernel is a sum of squared exponentials, else by small programs.
    A fit to traced rows is one compiled program. So are fits on a mesh, fits by Adam, and fits by an object without
    `is_host_driven`. A fit whose inducing points move is one program, too, unless NumPy does it.

    Args:
        prepare: `prepare(*rows, included)` gives the scales of the rows, the initial values and the data. It takes
            arrays of NumPy and of JAX, and is a pytree, such as an `eqx.Partial`.
        rows: x, and the arrays that have a last axis of outputs if there are several outputs; None for an array that is
            not there.
        way: how to fit.
        in_numpy: whether the kernel is a sum of squared exponentials, for which there is a fit in NumPy.
    """
    rows = tuple(rows)
    known = as_constants((prepare, rows, way._replace(differentiable=False)))
    if not is_known(known):
        return _in_program(prepare, rows, way.by(way.inference))
    on_host = in_numpy and is_on_host(known)
    with _programs.at_top():
        fit, taken = _of_known(*known, on_host=on_host)
    return _with_derivatives(fit[1], prepare, rows, taken.of_arrays()) if way.differentiable else fit


def _of_known(
    prepare: Prepare[S], rows: Sequence[Any], way: Way, *, on_host: bool
) -> tuple[tuple[S, Process], Inference]:
    """The fit of known rows, one output after the other, and the inference that made it."""
    outputs = _outputs(rows)
    firsts = [_first(prepare, way, output) for output in outputs]
    fits = []
    for inference in way.inferences:
        one = partial(_of_output, prepare, inference, way, on_host=on_host)
        fits.append([one(output, first) for output, first in zip(outputs, firsts, strict=True)])
    best = 0
    if len(fits) > 1:
        scores = [[_score(prepare, *each) for each in zip(outputs, fit, strict=True)] for fit in fits]
        best = int(np.argmin(np.mean(scores, axis=1)))
    return _together(fits[best], rows), way.inferences[best]


def _first(prepare: Prepare[Any], way: Way, rows: Sequence[Any]) -> First:
    """Gives the exact optimum of some rows of one output in NumPy's arrays; it is computed at the first call alone."""
    tolerance = TOLERANCE if len(rows[-1]) <= exact.LADDER_ROWS else _TOLERANCE_OF_SOME
    few = Exact(way.inference.ard, tolerance, way.inference.max_iterations)
    return cache(lambda: host.First.of(*as_numpy((prepare, few, way.noise, *rows))))


def _of_output(
    prepare: Prepare[S], inference: Inference, way: Way, rows: Sequence[Any], first: First, *, on_host: bool
) -> tuple[S, Process]:
    """The fit of one output's known rows: by NumPy if possible, else by small programs or by a single one."""
    host_drives = inference.is_host_driven and way.noise.is_host_driven and (on_host or not inference.takes_many_steps)
    if not host_drives:
        return _in_program(prepare, rows, way.by(inference))
    if on_host:
        return by_numpy(_by_parts, prepare, inference, way.noise, first, *rows)
    return in_jax(_by_programs(prepare, way.by(inference), rows))


def _by_programs(prepare: Prepare[S], way: Way, rows: Sequence[Any]) -> tuple[S, Process]:
    """The fit by small programs.

    Rows of the exact process are padded, so that nearby numbers of rows share the programs.
    """
    number, device, included = len(rows[-1]), device_of(prepare, rows), None
    if way.inference.by_newton and way.noise.is_gaussian:
        rows, included = padding.padded(rows, device)
    rows = jax.tree.map(partial(jax.device_put, device=device), tuple(rows))
    scales, process = _by_parts(prepare, way.inference, way.noise, None, *rows, included=included)
    return scales, process if included is None else padding.without_padding(process, number)


@part
def _prepared(
    prepare: Prepare[S], *rows: AnyArray | None, included: Bool[AnyArray, " n"] | None
) -> tuple[S, InitialOf, Data]:
    scales, initial_of, data = prepare(*rows, included)
    _warn_of_float64_on_a_tpu(data)
    return scales, initial_of, data


@_programs.exact_products
def _by_parts(
    prepare: Prepare[S],
    inference: Inference,
    noise: Noise,
    first: First,
    *rows: AnyArray | None,
    included: Bool[AnyArray, " n"] | None = None,
) -> tuple[S, Process]:
    """The fit by a host that calls NumPy or small programs, at the smallest jitter at which all is finite."""
    scales, initial_of, data = _prepared(prepare, *rows, included=included)

    def attempt(tries: int) -> Process:
        jitter = inference.jitter_of_try(np.int32(tries), data.targets.dtype)
        return noise.fit(inference, initial_of, data, jitter, first)

    return scales, first_fit(map(attempt, range(JITTER_TRIES)))


def _outputs(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows of every output."""
    x, *outputs = rows
    if outputs[-1].ndim == 1:
        return [tuple(rows)]
    put, column = partial(jax.device_put, device=device_of(rows)), lambda array, k: np.asarray(array)[:, k]
    number = outputs[-1].shape[1]
    return [(x, *(None if each is None else put(column(each, k)) for each in outputs)) for k in range(number)]


def _together(fits: list[T], rows: Sequence[Any]) -> T:
    """The fits of all outputs as one, with a leading axis of outputs if there are several."""
    if rows[-1].ndim == 1:
        return fits[0]
    stack = lambda *parts: np.stack(parts) if is_array(parts[0]) else parts[0]
    return in_jax(jax.tree.map(stack, *fits))


def _in_numpy(prepare: Prepare[Any], rows: Sequence[Any], fit: tuple[Any, Process]) -> bool:
    """Whether NumPy can compute the leave-one-out errors."""
    del prepare, rows
    return fit[1].in_numpy


@numpy_or_jit(when=_in_numpy)
def _score(prepare: Prepare[Any], rows: Sequence[Any], fit: tuple[Any, Process]) -> Float[AnyArray, ""]:
    return leave_one_out_crps(fit[1], prepare(*rows, None)[2])


@_programs.jit
def _in_program(prepare: Prepare[S], rows: Sequence[Any], way: Way) -> tuple[S, Process]:
    def one(*rows: Array | None) -> tuple[S, Process]:
        scales, initial_of, data = prepare(*rows, None)
        return scales, maximize_evidence(initial_of, data, way)

    return over_outputs(one, rows)


@_programs.jit
@_programs.exact_products
def _with_derivatives(
    process: Process, prepare: Prepare[S], rows: Sequence[Any], inference: Inference
) -> tuple[S, Process]:
    """The process of a search, as a function of the rows; arguments as of `fit_rows`."""

    def one(process: Process, *rows: Array | None) -> tuple[S, Process]:
        scales, initial_of, data = prepare(*rows, None)
        return scales, with_derivatives(process, initial_of, data, inference)

    x, *outputs = rows
    if outputs[-1].ndim == 1:
        return one(process, *rows)
    by_output = lambda process, *outputs: one(process, x, *outputs)
    return eqx.filter_vmap(by_output, in_axes=(eqx.if_array(0), *(1 for _ in outputs)))(process, *outputs)


def over_outputs(fit_one: Callable[..., T], rows: Sequence[Any]) -> T:
    """`fit_one(*rows)`, or one `vmap` of it over several outputs; a part of a program.

    Args:
        fit_one: fits one output.
        rows: as of `fit_rows`.
    """
    x, *outputs = rows
    if outputs[-1].ndim == 1:
        return fit_one(x, *outputs)
    return eqx.filter_vmap(partial(fit_one, x), in_axes=1)(*outputs)


@_programs.exact_products
def maximize_evidence(initial_of: InitialOf, data: Data, way: Way) -> Process:
    """The process of the greatest evidence, at the smallest jitter at which evidence and posterior are finite.

    Part of a compiled program; safe under `vmap`: see `optimize.one_run_at_a_time`.

    Args:
        initial_of: gives the initial values.
        data: the data to fit.
        way: how to fit, with one inference.
    """
    _warn_of_float64_on_a_tpu(data)
    search_all = one_run_at_a_time(partial(first_finite, _attempt, JITTER_TRIES))
    if not way.differentiable:
        return search_all(initial_of, data, way)
    process = search_all(*as_constants((initial_of, data)), way)
    return with_derivatives(process, initial_of, data, way.inference)


def _attempt(initial_of: InitialOf, data: Data, way: Way, tries: Int[Array, ""]) -> Process:
    """The process, with the jitter of try number `tries`."""
    jitter = way.inference.jitter_of_try(tries, data.targets.dtype)
    return way.noise.fit(way.inference, initial_of, data, jitter)


def _warn_of_float64_on_a_tpu(data: Data) -> None:
    """Warn while a program is traced.

    So a program that is compiled warns once, and one that is compiled already never warns.
    """
    if data.targets.dtype == np.float64 and jax.default_backend() == "tpu":
        _checks.warn("a TPU has no float64: the program that imitates it compiles for minutes. Give float32 rows.")


def check_fit(process: Process, n: int, *, throw: bool) -> None:
    """Raise if there is no fit to n rows and `throw` is true; warn of outliers and of rounding.

    Do nothing while traced.
    """
    if throw:
        raise_unless_factorized(process.result, process.jitter, n)
    warn_of_outliers(process, n)
    warn_of_rounding(process.rounding_fraction)


def warn_of_outliers(process: Process, n: int) -> None:
    """Warn if an error of a fit that makes sense is too great for n normal errors; do nothing while traced."""
    if process.greatest_error is None or _checks.is_traced(*process.greatest_error, process.result):
        return
    errors, rows = (np.ravel(a) for a in process.greatest_error)
    errors = np.where(np.ravel(process.result) == Result.NOT_FINITE, 0, errors)
    worst = int(np.argmax(errors))
    error = float(errors[worst])
    if not noise.is_usual(error, n) and error > noise.greatest_error(n):
        _checks.warn(
            f"row {rows[worst]} lies {error:.1f} standard deviations from what the other rows say: it is an "
            "outlier, or the noise has heavy tails or depends on the inputs. noise=jaxcal.gp.StudentTNoise() keeps "
            "single rows from deciding the fit; jaxcal.gp.InputNoise() lets the noise differ."
        )


def warn_of_rounding(fraction: Float[Array, "*runs"]) -> None:
    """Warn if rounding may hide much of the leave-one-out variance; do nothing while traced."""
    if not _checks.is_traced(fraction) and np.any(np.asarray(fraction) > _MUCH_ROUNDING):
        _checks.warn(
            f"the uncertainty is hardly greater than what rounding in {fraction.dtype} hides: stds may be off by "
            "factors. jax.config.update('jax_enable_x64', True), before anything else, gives them in float64."
        )


def raise_unless_factorized(result: Int[Array, "*runs"], jitter: Float[Array, "*runs"], n: int) -> None:
    """Raise FloatingPointError if no fit made sense at any jitter; do nothing while traced."""
    if not _checks.is_traced(result) and np.any(np.asarray(result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"the covariance of {n} rows could not be factorized, or only with hyperparameters that make no sense. "
            f"The jitter went up to {np.max(jitter):.0e} of its mean variance. Is a hyperparameter of the kernel "
            "negative or extreme? throw=False returns the fit."
        )
