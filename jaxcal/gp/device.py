"""The search for the greatest exact evidence of known rows by programs: on accelerators, and for any kernel.

The host decides, as in `gp.host`, in the dtype of the rows; `gp.exact` has the rules of the search and the objective.
There are two kinds of programs: where the search begins, and the objective near vectors for all rows and each part.
"""

from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from jaxcal import _programs
from jaxcal._numpy import AnyArray, part
from jaxcal.gp import exact, race
from jaxcal.gp.model import Data, Found, Model, as_vector, one_of, some_rows
from jaxcal.gp.newton import Local
from jaxcal.gp.protocols import Inference


def search(initial_models: Model, data: Data, jitter: Float[AnyArray, ""], inference: Inference) -> Found:
    """The hyperparameters of the greatest exact evidence, as `exact.exact_optimum`, of known rows."""
    few, rungs, start = _begin(initial_models, data, inference)
    start, n, dtype = jax.device_get(start), len(data.targets), data.targets.dtype
    on = partial(_objectives, start.models, jitter)
    decide, parts = None if few is None else on(few), [on(rows) for rows in (*rungs, data)]
    first = exact.optimum(parts[0], decide, start.of_part(exact.rung_sizes(n)[0] / n), inference, on_host=True)
    best = exact.climbed(parts, first, start, inference, n)
    found = best.as_found(as_vector(one_of(start.models))[1](best.place.astype(dtype)))
    return found._replace(evidence=found.evidence.astype(dtype))


@part
def _begin(initial_models: Model, data: Data, inference: Inference) -> tuple[Data | None, list[Data], exact.Start]:
    """The few rows that decide on optima, None if all do; the parts of the rows before all; where ascents begin."""
    start, sizes = exact.Start.of(initial_models, data, inference), exact.rung_sizes(data.targets.shape[0])
    few = some_rows(data, exact.FEW_ROWS) if start.few_decide(sizes[0]) else None
    return few, [some_rows(data, size) for size in sizes[:-1]], start


def _objectives(models: Model, jitter: Float[AnyArray, ""], data: Data) -> race.Objectives:
    """The objective at the host's vectors: on a CPU where ascents are active, elsewhere everywhere in one call."""

    def near(vectors: Float[np.ndarray, "s p"]) -> Local:
        found = _near(models, data, jitter, vectors.astype(data.targets.dtype))
        return Local(*map(np.asarray, found))

    if jax.default_backend() == "cpu":
        return race.one_by_one(lambda vector: Local(*(each[0] for each in near(vector[None]))))
    return lambda vectors, _: near(vectors)


@_programs.jit
def _near(models: Model, data: Data, jitter: Float[AnyArray, ""], vectors: Float[AnyArray, "s p"]) -> Local:
    return jax.vmap(exact.exact_objective(as_vector(one_of(models))[1], data, jitter))(vectors)
