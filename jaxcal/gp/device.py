"""The exact fit of known rows by small programs that the host calls: for accelerators, and for any kernel.

The host decides, as in `gp.host`; `gp.exact` has the rules of the search and the objective. There are three programs:
what the rows give, the objective near vectors, and the process at the best one. Rows are filled up (`gp.padding`), so
that nearby numbers of them share the programs. Where nothing is left to learn, the best initial process is taken.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device
from jaxtyping import Array, Bool, Float

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray
from jaxcal.gp import exact, padding, race
from jaxcal.gp.model import Data, Model, as_vector, exact_jitters, one_of, some_rows
from jaxcal.gp.newton import Local
from jaxcal.gp.process import Process, first_fit, process_of
from jaxcal.gp.protocols import Inference, Prepare, S, best_initial


def fit(prepare: Prepare[S], inference: Inference, device: Device | None, *rows: Any) -> tuple[S, Process]:
    """What rows are scaled by, and the process at the smallest jitter at which evidence and posterior are finite.

    Args:
        prepare: as of `fit.fit_rows`.
        inference: how: by Newton's steps, under Gaussian noise.
        device: where; None for the one that JAX takes.
        rows: of one output, in NumPy's arrays; None for what is not there.
    """
    number = len(rows[-1])
    scales, data, parts, start = _prepared(prepare, *padding.padded(rows, device), inference.of_arrays())
    few, rungs = parts
    begin = jax.device_get(start).in_float64()

    def attempt(jitter: Float[np.ndarray, ""]) -> Process:
        if not begin.vectors.shape[1]:
            return _process_of_best(start.models, data, jitter)
        on = partial(_objectives, start.models, jitter)
        parts, n = list(map(on, [*rungs, data])), len(data.targets)
        decides = None if few is None else on(few)
        begin_few = begin.of_part(exact.rung_sizes(n)[0] / n)
        first = exact.optimum(parts[0], decides, begin_few, inference, on_host=True)
        best = exact.climbed(parts, first, begin, inference, n)
        return _process_at(start.models, data, jitter, best)

    process = first_fit(map(attempt, exact_jitters(data.targets.dtype)))
    return scales, padding.without_padding(process, number)


def warn_of_float64_on_a_tpu(data: Data) -> None:
    """While a program is traced: once for every one that is compiled, and never for one that is there."""
    if data.targets.dtype == jnp.float64 and jax.default_backend() == "tpu":
        _checks.warn("a TPU has no float64: the program that imitates it compiles for minutes. Give float32 rows.")


@_programs.jit
def _prepared(
    prepare: Prepare[S], rows: Sequence[Any], included: Bool[Array, " n"], inference: Inference
) -> tuple[S, Data, tuple[Data | None, list[Data]], exact.Start]:
    """What the rows are scaled by, all of them, few that decide and parts to climb on, and where the search begins."""
    scales, initial_of, data = prepare(*rows, included)
    warn_of_float64_on_a_tpu(data)
    start = exact.Start.of(initial_of(data, None), data, inference)
    sizes = exact.rung_sizes(data.targets.shape[0])
    few = some_rows(data, exact.FEW_ROWS) if start.few_decide(sizes[0]) else None
    return scales, data, (few, [some_rows(data, size) for size in sizes[:-1]]), start


def _objectives(models: Model, jitter: Float[np.ndarray, ""], data: Data) -> race.Objectives:
    """The objective at the host's vectors: on a CPU where ascents are active, elsewhere everywhere in one call."""

    def near(vectors: Float[np.ndarray, "s p"]) -> Local:
        found = _near(models, data, jitter, vectors.astype(data.targets.dtype))
        return Local(*map(np.asarray, found))

    if jax.default_backend() == "cpu":
        return race.one_by_one(lambda vector: Local(*(part[0] for part in near(vector[None]))))
    return lambda vectors, _: near(vectors)


@_programs.jit
def _near(models: Model, data: Data, jitter: Float[AnyArray, ""], vectors: Float[AnyArray, "s p"]) -> Local:
    return jax.vmap(exact.exact_objective(as_vector(one_of(models))[1], data, jitter))(vectors)


@_programs.jit
def _process_of_best(models: Model, data: Data, jitter: Float[AnyArray, ""]) -> Process:
    """The best of the processes in which nothing is left to learn."""
    return process_of(best_initial(models, data, jitter), data, jitter, None)


@_programs.jit
def _process_at(models: Model, data: Data, jitter: Float[AnyArray, ""], best: exact.Optimum) -> Process:
    """The process with what was found."""
    found = best.as_found(as_vector(one_of(models))[1](best.place.astype(data.targets.dtype)))
    return process_of(found._replace(evidence=found.evidence.astype(data.targets.dtype)), data, jitter, None)
