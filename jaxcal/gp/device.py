"""The exact fit of known rows by compiled programs: on accelerators, and for any kernel.

The host makes the decisions, as in `gp.host`, in the dtype of the rows. `gp.exact` has the rules of the search and the
objective. One program computes where the search begins. One program evaluates the objective near vectors, for all rows
and for each part. Three programs make the process at the end.
"""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from jaxcal import _programs
from jaxcal._numpy import AnyArray, part
from jaxcal.functional import gp
from jaxcal.gp import exact, race
from jaxcal.gp import model as models
from jaxcal.gp.model import Data, Model, SearchResult, as_vector, one_of, some_rows
from jaxcal.gp.newton import Local
from jaxcal.gp.process import Process, process_given
from jaxcal.gp.protocols import Inference

# The number of rows whose covariances with all others are held at once in float64.
_ROWS_AT_ONCE = 256


def search(initial_models: Model, data: Data, jitter: Float[AnyArray, ""], inference: Inference) -> SearchResult:
    """The hyperparameters of the greatest exact evidence of known rows, as `exact.exact_optimum`."""
    few, rungs, start = _begin(initial_models, data, inference)
    start, n, dtype = jax.device_get(start), len(data.targets), data.targets.dtype
    on = partial(_objectives, start.models, jitter)
    decide, parts = None if few is None else on(few), [on(rows) for rows in (*rungs, data)]
    first = exact.optimum(parts[0], decide, start.of_part(exact.rung_sizes(n)[0] / n), inference, on_host=True)
    best = exact.climbed(parts, first, start, inference, n)
    optimum = best.as_found(as_vector(one_of(start.models))[1](best.place.astype(dtype)))
    return optimum._replace(evidence=optimum.evidence.astype(dtype))


@part
def _begin(initial_models: Model, data: Data, inference: Inference) -> tuple[Data | None, list[Data], exact.Start]:
    """The few rows that choose the optima, or None if all rows do; the rungs below all rows; where ascents begin."""
    start, sizes = exact.Start.of(initial_models, data, inference), exact.rung_sizes(data.targets.shape[0])
    few = some_rows(data, exact.FEW_ROWS) if start.few_decide(sizes[0]) else None
    return few, [some_rows(data, size) for size in sizes[:-1]], start


def _objectives(models: Model, jitter: Float[AnyArray, ""], data: Data) -> race.Objectives:
    """The objective at the host's vectors: on a CPU for active ascents alone, elsewhere for all in one call."""

    def near(vectors: Float[np.ndarray, "s p"]) -> Local:
        local = _near(models, data, jitter, vectors.astype(data.targets.dtype))
        return Local(*map(np.asarray, local))

    if jax.default_backend() == "cpu":
        return race.one_by_one(lambda vector: Local(*(each[0] for each in near(vector[None]))))
    return lambda vectors, _: near(vectors)


@_programs.jit
def _near(models: Model, data: Data, jitter: Float[AnyArray, ""], vectors: Float[AnyArray, "s p"]) -> Local:
    return jax.vmap(exact.exact_objective(as_vector(one_of(models))[1], data, jitter))(vectors)


def concluded(optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""]) -> Process:
    """The process of all rows at the hyperparameters found.

    Its weights in float32 are corrected by their residual in float64. Without this, means predicted from rows without
    noise are wrong by half of a std. A TPU has no float64, and no correction.
    """
    after, residual = models.posterior(optimum.model, data, jitter), None
    if data.targets.dtype == np.float32 and jax.default_backend() != "tpu":
        with jax.enable_x64(True):
            residual = _residual(optimum.model, data, jitter, after.weights)
    return _concluded(optimum, data, jitter, after, residual)


@part
def _residual(
    model: Model, data: Data, jitter: Float[AnyArray, ""], weights: Float[AnyArray, " n"]
) -> Float[AnyArray, " n"]:
    """The residual y - G a of the weights a, in float64; 0 for rows that do not count."""
    variance = jitter * models.mean_variance(model.kernel, data.points, data.included) + models.row_noise(model, data)
    wide = partial(jax.tree.map, lambda leaf: leaf.astype(np.float64) if eqx.is_inexact_array(leaf) else leaf)
    kernel, points, weights = wide((model.kernel, data.points, weights))
    covered = weights if data.included is None else jnp.where(data.included, weights, 0)
    products = lax.map(lambda point: kernel(models.alone(point), points)[0] @ covered, points, batch_size=_ROWS_AT_ONCE)
    residual = data.targets - products - variance * weights
    return (residual if data.included is None else jnp.where(data.included, residual, 0)).astype(data.targets.dtype)


@part
def _concluded(
    optimum: SearchResult,
    data: Data,
    jitter: Float[AnyArray, ""],
    after: gp.Posterior,
    residual: Float[AnyArray, " n"] | None,
) -> Process:
    """The process, with weights a + G^-1 (y - G a): iterative refinement, Golub & Van Loan (2013), section 3.5.3."""
    if residual is not None:
        # G^-1 r = L^-T (L^-1 r)
        change = after.shrink.T @ (after.shrink @ residual)
        after = replace(after, weights=after.weights + change)
    return process_given(optimum, data, jitter, after, gp.leave_one_out(after))
