"""The search for the greatest exact evidence by the host: NumPy and LAPACK, in float64, which compile nothing.

It is for sums of squared exponentials with Gaussian noise, on CPUs, where nothing is traced. `gp.exact` has the rules
of the search, and the same objective in JAX for any kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import lapack

from jaxcal.functional import gp, gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.gp import exact, race
from jaxcal.gp.kernels import scattered
from jaxcal.gp.model import ABSURD, NOISE_FLOOR, Data, Found, Model, as_vector, one_of, penalty
from jaxcal.gp.newton import Local
from jaxcal.gp.noise import InitialOf
from jaxcal.gp.options import Options
from jaxcal.gp.process import Process, process_given
from jaxcal.gp.search import JITTER_TRIES, jitter_of_try
from jaxcal.optimize import Result

# Of more rows the search is in float32, and only its end in float64.
_SMALL = 300


class Rows(NamedTuple):
    """What a process of squared exponentials is fitted to, on the host.

    Attributes:
        parts: the rows of every kernel, [n, d] each.
        targets: [n], of mean zero.
        base_variance: as of `model.Data`, [n]; None where it gave none.
        log_noise: of noise that is known; None where it is learned.
        eps: of the dtype in which the posterior is computed, whose rounding is among the noise.
    """

    parts: tuple[Float[np.ndarray, "n _"], ...]
    targets: Float[np.ndarray, " n"]
    base_variance: Float[np.ndarray, " n"] | None = None
    log_noise: float | None = None
    eps: float = float(np.finfo(float).eps)

    def in_float32(self) -> "Rows":
        """The same rows, for a search in half of the time."""
        cast = lambda array: None if array is None else array.astype(np.float32)
        return self._replace(
            parts=tuple(map(cast, self.parts)),
            targets=cast(self.targets),
            base_variance=cast(self.base_variance),
            eps=float(np.finfo(np.float32).eps),
        )

    def some(self, numbers: Int[np.ndarray, " m"]) -> "Rows":
        """Some of the rows."""
        cut = lambda array: None if array is None else array[numbers]
        return self._replace(
            parts=tuple(part[numbers] for part in self.parts),
            targets=self.targets[numbers],
            base_variance=cut(self.base_variance),
        )


class Hyperparameters(NamedTuple):
    """What a vector says.

    Attributes:
        parts: the kernels.
        noise: of the common noise variance what is learned or given, without the floor and rounding.
        fraction: of the noise that follows the base's variance; 0 where there is none.
    """

    parts: list[gp_host.Part]
    noise: float
    fraction: float


def read(vector: Float[np.ndarray, " p"], rows: Rows, widths: Sequence[int]) -> Hyperparameters:
    """The hyperparameters that a vector holds, with so many lengthscales for every part."""
    parts, at = [], 0
    values = np.exp(vector)
    for points, width in zip(rows.parts, widths, strict=True):
        parts.append(gp_host.Part(points, float(values[at]), values[at + 1 : at + 1 + width]))
        at += 1 + width
    noise = float(values[at]) if rows.log_noise is None else float(np.exp(rows.log_noise))
    fraction = 0.0 if rows.base_variance is None else float(1 / (1 + np.exp(-vector[-1])))
    return Hyperparameters(parts, noise, fraction)


def evaluate(
    vector: Float[np.ndarray, " p"], rows: Rows, widths: Sequence[int], jitter: float
) -> tuple[gp_host.Terms | None, bool]:
    """The evidence at a vector, and whether it makes sense: see `model.is_sane`."""
    n, p = len(rows.targets), len(vector)
    found = read(vector, rows, widths)
    variances = [part.variance for part in found.parts]
    prior, rounding = sum(variances), rows.eps * n * sum(variances)
    common = NOISE_FLOOR + found.noise + rounding
    relative = np.ones(n)
    if rows.base_variance is not None:
        relative = 1 - found.fraction + found.fraction * rows.base_variance
    by_diagonal, at = np.zeros((n, p)), 0
    for variance, width in zip(variances, widths, strict=True):
        by_diagonal[:, at] = variance * (jitter + rows.eps * n * relative)
        at += 1 + width
    if rows.log_noise is None:
        by_diagonal[:, at] = found.noise * relative
    if rows.base_variance is not None:
        by_diagonal[:, -1] = common * found.fraction * (1 - found.fraction) * (rows.base_variance - 1)
    terms = gp_host.likelihood_terms(found.parts, jitter * prior + common * relative, by_diagonal, rows.targets)
    if terms is None:
        return None, False
    greatest = -n * (LOG_2PI + np.log(common * relative.min())) / 2
    mean_square = np.mean(rows.targets**2)
    return terms, bool(terms.value <= greatest and max(prior, common) < ABSURD * mean_square)


def objective(
    rows: Rows, widths: Sequence[int], low: Float[np.ndarray, " p"], high: Float[np.ndarray, " p"], jitter: float
) -> race.Objective:
    """The evidence, less what is beyond the bounds: as `exact._exact_objective`."""
    n, p = len(rows.targets), len(low)
    nothing = Local(np.full((), np.nan), np.full(p, np.nan), np.full((p, p), np.nan), np.asarray(False))

    def at(vector: Float[np.ndarray, " p"], shares: Float[np.ndarray, " p"]) -> Local:
        terms, is_sane = evaluate(vector, rows, widths, jitter)
        if terms is None:
            return nothing
        beyond, steepness, bend = penalty(vector, low, high, n * shares)
        return Local(
            value=np.asarray(terms.value - beyond),
            gradient=terms.gradient - steepness,
            information=terms.information + np.diag(bend),
            makes_sense=np.asarray(is_sane),
        )

    return at


def fit(initial_of: InitialOf, data: Data, options: Options) -> Process:
    """The process at the smallest jitter at which evidence and posterior are finite.

    Args:
        initial_of: gives the initial values: of a sum of squared exponentials.
        data: what to explain, of NumPy's arrays and without padding.
        options: how: by the exact evidence, under Gaussian noise.
    """
    start = exact.Start.of(initial_of(data, None), data, options)
    one, dtype = one_of(start.models), data.targets.dtype
    kernel: Any = one.kernel
    model_of, parts = as_vector(one)[1], kernel.parts(data.points)
    widths = [kernel.log_lengthscale.size for _, kernel in parts]
    is_known = "log_noise" in start.models.fixed
    rows = Rows(
        parts=tuple(points.astype(float) for points, _ in parts),
        targets=data.targets.astype(float),
        base_variance=None if data.base_variance is None else data.base_variance.astype(float),
        log_noise=float(start.models.log_noise[0]) if is_known else None,
        eps=float(np.finfo(dtype).eps),
    )
    wide = lambda array: None if array is None else array.astype(float)
    start = start._replace(**{name: wide(getattr(start, name)) for name in ("vectors", "low", "high", "tied", "cost")})
    order = scattered(data.points)[: exact.FEW_ROWS]

    def attempt(tries: int) -> Process:
        jitter = jitter_of_try(np.int32(tries), dtype, options.bound)
        best = _searched(start, rows, widths, order, float(jitter), options)
        return _process_at(best, rows, widths, data, model_of(best.place.astype(dtype)), jitter)

    process = attempt(0)
    for tries in range(1, JITTER_TRIES):
        if process.result != Result.NOT_FINITE:
            break
        process = attempt(tries)
    return process


def _searched(
    start: exact.Start,
    rows: Rows,
    widths: Sequence[int],
    order: Int[np.ndarray, " m"],
    jitter: float,
    options: Options,
) -> exact.Optimum:
    """The best hyperparameters: of many rows found in float32, and climbed to in float64."""
    on = lambda rows: objective(rows, widths, start.low, start.high, jitter)
    few = on(rows.some(order)) if start.few_decide(len(rows.targets)) else None
    is_small = len(rows.targets) <= _SMALL
    best = exact.optimum(on(rows if is_small else rows.in_float32()), few, start, options, on_host=True)
    return best if is_small else exact.ended(on(rows), best, options)


def _process_at(
    best: exact.Optimum,
    rows: Rows,
    widths: Sequence[int],
    data: Data,
    model: Model,
    jitter: Float[np.ndarray, ""],
) -> Process:
    """The process with what was found; the last evaluation is its posterior."""
    dtype, n = data.targets.dtype, len(data.targets)
    terms, is_sane = evaluate(best.place, rows, widths, float(jitter))
    found = Found(
        model=model,
        evidence=np.asarray(terms.value if terms is not None and is_sane else np.nan, dtype),
        steps=best.steps,
        result=np.int32(Result.CONVERGED if best.converged else Result.STEP_LIMIT),
        failed_initial_values=best.failed_initial_values,
    )
    if terms is None:
        after = gp.Posterior(np.full(n, np.nan, dtype), np.full((n, n), np.nan, dtype), None)
        return process_given(found, data, jitter, after, gp.LeaveOneOut(after.weights, after.weights))
    shrink, _ = lapack.get_lapack_funcs(("trtri",), (terms.factor,))[0](terms.factor, lower=1)
    after = gp.Posterior(terms.weights.astype(dtype), shrink.astype(dtype), None)
    others = gp.LeaveOneOut(terms.weights / terms.precision, 1 / terms.precision)
    return process_given(found, data, jitter, after, jax.tree.map(lambda part: part.astype(dtype), others))
