"""The exact evidence of sums of squared exponentials as the host sees it: NumPy and LAPACK, in float64.

`gp.exact` has the same objective in JAX, for any kernel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcal.functional import gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.gp.model import ABSURD, NOISE_FLOOR
from jaxcal.gp.newton import Local

_EPS = float(np.finfo(float).eps)


class Rows(NamedTuple):
    """What a process of squared exponentials is fitted to, on the host.

    Attributes:
        parts: the rows of every kernel, [n, d] each.
        targets: [n], of mean zero.
        base_variance: as of `model.Data`, [n]; None where it gave none.
        log_noise: of noise that is known; None where it is learned.
    """

    parts: tuple[Float[np.ndarray, "n _"], ...]
    targets: Float[np.ndarray, " n"]
    base_variance: Float[np.ndarray, " n"] | None = None
    log_noise: float | None = None


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
    prior, rounding = sum(variances), _EPS * n * sum(variances)
    common = NOISE_FLOOR + found.noise + rounding
    relative = np.ones(n)
    if rows.base_variance is not None:
        relative = 1 - found.fraction + found.fraction * rows.base_variance
    by_diagonal, at = np.zeros((n, p)), 0
    for variance, width in zip(variances, widths, strict=True):
        by_diagonal[:, at] = variance * (jitter + _EPS * n * relative)
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


def objective(rows: Rows, widths: Sequence[int], low: np.ndarray, high: np.ndarray, jitter: float):
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
