"""The search for the greatest exact evidence by the host: NumPy and LAPACK, in float64, which compile nothing.

It is for sums of squared exponentials with Gaussian noise, on CPUs, where nothing is traced. `gp.exact` has the rules
of the search, and the same objective in JAX for any kernel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks
from jaxcal.functional import gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.gp import exact, race
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import ABSURD, NOISE_FLOOR, Data, Model
from jaxcal.gp.newton import Local
from jaxcal.gp.options import Options

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
    n = len(rows.targets)

    def at(vector: Float[np.ndarray, " p"], shares: Float[np.ndarray, " p"]) -> Local:
        terms, is_sane = evaluate(vector, rows, widths, jitter)
        if terms is None:
            p = len(vector)
            return Local(np.full((), np.nan), np.full(p, np.nan), np.full((p, p), np.nan), np.asarray(False))
        beyond = np.maximum(vector - high, 0) - np.maximum(low - vector, 0)
        weight = 2 * n * shares
        cost = np.sum(weight * beyond**2) / 2
        bend = np.diag(np.where(beyond != 0, weight, 0))
        return Local(
            value=np.asarray(terms.value - cost),
            gradient=terms.gradient - weight * beyond,
            information=terms.information + bend,
            makes_sense=np.asarray(is_sane),
        )

    return at


def suits(data: Data, options: Options) -> bool:
    """Whether the host may search: of concrete rows, on a CPU, the exact evidence with Gaussian noise."""
    simple = options.bound == "exact" and options.noise == "gaussian" and options.learning_rate is None
    is_concrete = not _checks.is_traced(*jax.tree.leaves(data))
    return simple and not options.differentiable and is_concrete and jax.default_backend() == "cpu"


def parts_of(models: Model, data: Data) -> list[tuple[Array, SquaredExponential]] | None:
    """The rows and the kernel of every squared exponential; None where there is something else, or nothing to learn."""
    parts = getattr(models.kernel, "parts", None)
    found = None if parts is None or "kernel" in models.fixed else parts(data.points)
    is_known = found and all(isinstance(kernel, SquaredExponential) for _, kernel in found)
    return found if is_known else None


class Found(NamedTuple):
    """What the host found.

    Attributes:
        vector: what is learned of the best model.
        evidence: its log evidence; NaN where there is none.
        steps: as of `exact.Optimum`.
        converged: likewise.
        failed_initial_values: likewise.
    """

    vector: Float[np.ndarray, " p"]
    evidence: float
    steps: int
    converged: bool
    failed_initial_values: int


def search(
    start: exact.Start,
    parts: list[tuple[Array, SquaredExponential]],
    data: Data,
    order: Int[np.ndarray, " n"],
    jitter: float,
    options: Options,
) -> Found:
    """The best hyperparameters.

    Args:
        start: where to begin.
        parts: the rows and the kernels, `parts_of(start.models, data)`.
        data: the rows, which may be padded.
        order: the rows' numbers as `kernels.scattered` has them.
        jitter: as a fraction of the mean variance.
        options: how.
    """
    as_numbers = lambda array: np.asarray(array, float)
    counts = np.ones(len(data.targets), bool) if data.included is None else np.asarray(data.included)
    is_known = "log_noise" in start.models.fixed
    rows = Rows(
        parts=tuple(as_numbers(points)[counts] for points, _ in parts),
        targets=as_numbers(data.targets)[counts],
        base_variance=None if data.base_variance is None else as_numbers(data.base_variance)[counts],
        log_noise=float(start.models.log_noise[0]) if is_known else None,
        eps=float(np.finfo(data.targets.dtype).eps),
    )
    widths = [int(np.prod(kernel.log_lengthscale.shape[1:], dtype=int)) for _, kernel in parts]
    start = start._replace(
        vectors=as_numbers(start.vectors),
        low=as_numbers(start.low),
        high=as_numbers(start.high),
        tied=None if start.tied is None else as_numbers(start.tied),
        cost=as_numbers(start.cost),
    )
    on = lambda rows: objective(rows, widths, start.low, start.high, jitter)
    few = None
    if start.few_decide(data):
        few = on(rows.some((np.cumsum(counts) - 1)[order[: exact.FEW_ROWS]]))
    is_small = len(rows.targets) <= _SMALL
    best = exact.optimum(on(rows if is_small else rows.in_float32()), few, start, options, on_host=True)
    if not is_small:
        best = exact.ended(on(rows), best, options)
    terms, is_sane = evaluate(best.place, rows, widths, jitter)
    return Found(
        vector=best.place,
        evidence=terms.value if terms is not None and is_sane else np.nan,
        steps=int(best.steps),
        converged=bool(best.converged),
        failed_initial_values=int(best.failed_initial_values),
    )
