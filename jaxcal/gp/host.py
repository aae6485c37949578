"""The exact fit of known rows on a CPU, by NumPy and LAPACK, which compile nothing.

It is for sums of squared exponentials. `gp.exact` has the rules of the search, and the same objective in JAX for any
kernel. `functional.gp_host` has the algebra.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp, gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.functional.linalg import half_log_det
from jaxcal.gp import exact, race
from jaxcal.gp.kernels import scattered
from jaxcal.gp.model import ABSURD, Data, Model, SearchResult, as_vector, exact_jitters, noisy_gram, one_of, stored
from jaxcal.gp.newton import Local
from jaxcal.gp.process import Process, process_given
from jaxcal.gp.protocols import Inference, Noise, Prepare
from jaxcal.gp.rows import NoiseAt, ProcessData

# More than 300 rows are searched in float32, in half of the time, if the noise is 30 times the variance that rounding
# hides.
_SMALL, _SAFE = 300, 30.0


class First(NamedTuple):
    """The greatest exact evidence of some rows, from which every search of many known rows begins.

    Attributes:
        optimum: its place.
        outcome: the same with its model.
    """

    optimum: exact.EvidenceOptimum
    outcome: SearchResult

    @classmethod
    def of(cls, prepare: Prepare[Any], inference: Inference, noise: Noise, *rows: np.ndarray | None) -> "First":
        """The optimum at the smallest jitter at which the evidence is finite.

        Args:
            prepare: as of `fit.fit_rows`.
            inference: gives `ard`, the tolerance and the most steps.
            noise: the noise of the process.
            rows: the rows of one output.
        """
        _, initial_of, data = prepare(*rows, None)
        ladder = _Ladder.of(initial_of(data, None), noise.first_data(data), inference)
        best = ladder.first(exact_jitters(data.targets.dtype))
        return cls(best, ladder.found(best))


def search(
    initial_models: Model, data: Data, jitter: Float[AnyArray, ""], inference: Inference, first: First | None = None
) -> SearchResult:
    """The hyperparameters of the greatest exact evidence for sums of squared exponentials, as `exact.exact_optimum`.

    Args:
        initial_models: the initial models along a leading axis.
        data: the rows.
        jitter: as a fraction of the prior variance.
        inference: gives `ard`, the tolerance and the most steps.
        first: the optimum of some of many rows; None to search it here.
    """
    ladder = _Ladder.of(initial_models, data, inference)
    with threads_for(len(data.targets)):
        begin = ladder.first([jitter]) if first is None else first.optimum
        return ladder.found(ladder.optimum(jitter, begin))


def concluded(optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""]) -> Process:
    """The process of all rows at the hyperparameters found, with the evidence in float64.

    A search on many rows gives the evidence in float32 alone.
    """
    n, targets = len(data.targets), data.targets.astype(float)
    with threads_for(n):
        after = gp.posterior(noisy_gram(optimum.model, data, jitter), targets)
    # log p(y) = -log|G| / 2 - (y . G^-1 y + n log(2 pi)) / 2; Rasmussen & Williams (2006), eq. 2.30.
    value = half_log_det(after.shrink) - (targets @ after.weights + n * LOG_2PI) / 2
    optimum = optimum._replace(evidence=np.asarray(value, data.targets.dtype))
    return process_given(optimum, data, jitter, *stored((after, gp.leave_one_out(after)), data))


class _Ladder(NamedTuple):
    """The parts of the rows on which the search runs, one after the other.

    Attributes:
        few: the rows that decide which optima the first rung's ascents go to; None if all of its rows decide.
        rungs: parts of the rows; the last one has all of them.
        start: where the search begins.
        inference: gives the tolerance and the most steps.
        dtype: the dtype of the rows.
    """

    few: ProcessData | None
    rungs: list[ProcessData]
    start: exact.Start
    inference: Inference
    dtype: Any

    @classmethod
    def of(cls, initial_models: Model, data: Data, inference: Inference) -> "_Ladder":
        """The ladder of initial models and rows."""
        start = exact.Start.of(initial_models, data, inference).in_float64()
        every, order = ProcessData.of(one_of(start.models), data), scattered(data.points)
        sizes = exact.rung_sizes(len(data.targets))
        few = every.some(order[: exact.FEW_ROWS]) if start.few_decide(sizes[0]) else None
        rungs = [*(every.some(order[:size]) for size in sizes[:-1]), every]
        return cls(few, rungs, start, inference, data.targets.dtype)

    def first(self, jitters: list[Float[AnyArray, ""]]) -> exact.EvidenceOptimum:
        """The optimum of the first rung, at the first of some jitters at which it is finite."""
        rung, best = self.rungs[0], None
        begin = self.start.of_part(len(rung.targets) / len(self.rungs[-1].targets))
        for jitter in jitters:
            exactly = Evidence(rung, jitter)
            quickly = exactly if len(rung.targets) <= _SMALL else exactly.in_float32()
            few = None if self.few is None else race.one_by_one(Evidence(self.few, jitter).in_float32())
            with threads_for(len(rung.targets)):
                best = exact.optimum(race.one_by_one(quickly), few, begin, self.inference, on_host=True)
            if np.isfinite(best.value):
                break
        return cast(exact.EvidenceOptimum, best)

    def optimum(self, jitter: Float[AnyArray, ""], begin: exact.EvidenceOptimum) -> exact.EvidenceOptimum:
        """The optimum of all rows, from the optimum of the first rung. A single rung is searched in float64 at last."""
        n, inference = len(self.rungs[-1].targets), self.inference
        if n <= _SMALL:
            return begin
        exactly = [Evidence(rows, jitter) for rows in self.rungs]
        quickly = [race.one_by_one(each.in_float32()) for each in exactly]
        best = exact.climbed(quickly, begin, self.start, inference, n)
        if len(exactly) > 1:
            return best
        evidence = race.one_by_one(exactly[0])
        return exact.ended(evidence, best, self.start, inference.tolerance, inference.max_iterations)

    def found(self, best: exact.EvidenceOptimum) -> SearchResult:
        """The result of the search, in the dtype of the rows."""
        model_of = as_vector(one_of(self.start.models))[1]
        result = best.as_found(model_of(best.place.astype(self.dtype)))
        return result._replace(evidence=np.asarray(result.evidence, self.dtype))


class Evidence:
    """The evidence of rows near vectors of hyperparameters, as `exact.exact_objective`.

    A vector holds the logs of the variance and the lengthscales of each kernel. If the noise variance is learned, its
    log follows. If the base has a variance, the logit of the fraction of noise that follows it comes last.

    Attributes:
        rows: the data.
        jitter: as a fraction of the prior variance.
        exactly: the evidence that is evaluated in place of this one if rounding hides much of the noise. None for one
            in float64.
    """

    def __init__(self, rows: ProcessData, jitter: float | Float[Any, ""], exactly: "Evidence | None" = None) -> None:
        self.rows, self.jitter, self.exactly = rows, float(jitter), exactly
        self._memory: np.ndarray | None = None

    def in_float32(self) -> "Evidence":
        """The same evidence in float32, in half of the time; in float64 at vectors where float32 is not safe."""
        return Evidence(self.rows.in_float32(), self.jitter, self)

    def __call__(self, vector: Float[np.ndarray, " p"]) -> Local:
        """The evidence near a vector."""
        rows, n, p = self.rows, len(self.rows.targets), len(vector)
        diagonal = rows.diagonal(vector, self.jitter, n)
        # Rounding hides noise below eps n (prior variance).
        hidden = np.finfo(rows.targets.dtype).eps * n * diagonal.noise.prior
        if self.exactly is not None and diagonal.noise.least < _SAFE * hidden:
            return self.exactly(vector)
        if self._memory is None:
            self._memory = np.empty((len(rows.parts) + 1, n, n), rows.targets.dtype)
        kernels, memory = rows.kernels(vector), self._memory
        terms = gp_host.likelihood_terms(kernels, diagonal.values, diagonal.derivatives, rows.targets, memory)
        if terms is None:
            return Local(np.full((), np.nan), np.full(p, np.nan), np.full((p, p), np.nan), np.asarray(False))
        makes_sense = np.asarray(self._makes_sense(terms.value, diagonal.noise))
        return Local(np.asarray(terms.value), terms.gradient, terms.information, makes_sense)

    def _makes_sense(self, value: float, noise: NoiseAt) -> bool:
        """Whether a value makes sense, as in `model.is_sane`."""
        targets = self.rows.targets
        greatest = -len(targets) * (LOG_2PI + np.log(noise.least)) / 2
        absurd = ABSURD * np.mean(targets**2)
        return bool((value <= greatest) & (max(noise.prior, noise.common) < absurd))
