"""The exact fit of known rows on a CPU, by NumPy and LAPACK, which compile nothing.

It is for sums of squared exponentials with Gaussian noise. `gp.exact` has the rules of the search, and the same
objective in JAX for any kernel; `functional.gp_host` the algebra.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp, gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.functional.linalg import column_squares, inverse_triangular
from jaxcal.gp import exact, race
from jaxcal.gp.kernels import scattered
from jaxcal.gp.model import ABSURD, Data, Found, Model, as_vector, exact_jitters, one_of
from jaxcal.gp.newton import Local
from jaxcal.gp.process import Process, process_given
from jaxcal.gp.protocols import Inference, Noise, Prepare
from jaxcal.gp.rows import NoiseAt, Rows

# More rows are searched in float32, in half of the time, where the noise is so many times what rounding hides.
_SMALL, _SAFE = 300, 30.0


class First(NamedTuple):
    """The greatest exact evidence of some rows, with which every search of many known rows begins.

    Attributes:
        optimum: where it is.
        found: the same with its model.
    """

    optimum: exact.Optimum
    found: Found

    @classmethod
    def of(cls, prepare: Prepare[Any], inference: Inference, noise: Noise, *rows: np.ndarray | None) -> "First":
        """By the smallest jitter at which the evidence is finite; arguments as of `fit`, and the noise."""
        _, initial_of, data = prepare(*rows, None)
        data = noise.first_data(data)
        start = exact.Start.of(initial_of(data, None), data, inference).in_float64()
        model, dtype = one_of(start.models), data.targets.dtype
        best = _Ladder.of(model, data, start).first(exact_jitters(dtype), start, inference)
        found = best.as_found(as_vector(model)[1](best.place.astype(dtype)))
        return cls(best, found._replace(evidence=np.asarray(found.evidence, dtype)))


def search(
    initial_models: Model, data: Data, jitter: Float[AnyArray, ""], inference: Inference, first: First | None = None
) -> Found:
    """The hyperparameters of the greatest exact evidence, as `exact.exact_optimum`, of a sum of squared exponentials.

    Args:
        initial_models: along a leading axis.
        data: the rows.
        jitter: as a fraction of the prior variance.
        inference: of which `ard`, tolerance and steps count.
        first: what some of many rows say; None to ask them.
    """
    start = exact.Start.of(initial_models, data, inference).in_float64()
    model, dtype = one_of(start.models), data.targets.dtype
    ladder = _Ladder.of(model, data, start)
    with threads_for(len(data.targets)):
        begin = ladder.first([jitter], start, inference) if first is None else first.optimum
        best = ladder.optimum(Evidence(ladder.rungs[-1], jitter), begin, start, inference)
    found = best.as_found(as_vector(model)[1](best.place.astype(dtype)))
    return found._replace(evidence=np.asarray(found.evidence, dtype))


class _Ladder(NamedTuple):
    """The rows that the search climbs on, one part after the other.

    Attributes:
        few: the rows that decide which optima the first rung climbs to; None where all of it do.
        rungs: parts of the rows, the last one all of them.
    """

    few: "Rows | None"
    rungs: list["Rows"]

    @classmethod
    def of(cls, model: Model, data: Data, start: exact.Start) -> "_Ladder":
        """The ladder of a model's rows."""
        sizes, order, every = exact.rung_sizes(len(data.targets)), scattered(data.points), Rows.of(model, data)
        few = every.some(order[: exact.FEW_ROWS]) if start.few_decide(sizes[0]) else None
        return cls(few, [*(every.some(order[:size]) for size in sizes[:-1]), every])

    def first(self, jitters: list[Float[AnyArray, ""]], start: exact.Start, inference: Inference) -> exact.Optimum:
        """The optimum of the first rung, by the first of some jitters at which it is finite."""
        rung, best = self.rungs[0], None
        for jitter in jitters:
            exactly = Evidence(rung, jitter)
            quickly = exactly if len(rung.targets) <= _SMALL else exactly.in_float32()
            few = None if self.few is None else race.one_by_one(Evidence(self.few, jitter).in_float32())
            begin = start.of_part(len(rung.targets) / len(self.rungs[-1].targets))
            with threads_for(len(rung.targets)):
                best = exact.optimum(race.one_by_one(quickly), few, begin, inference, on_host=True)
            if np.isfinite(best.value):
                break
        return cast(exact.Optimum, best)

    def optimum(
        self, exactly: "Evidence", begin: exact.Optimum, start: exact.Start, inference: Inference
    ) -> exact.Optimum:
        """The optimum of all rows from the one of the first rung; of one rung in float64 at last."""
        n = len(exactly.rows.targets)
        if n <= _SMALL:
            return begin
        quickly = [Evidence(rows, exactly.jitter).in_float32() for rows in self.rungs[:-1]] + [exactly.in_float32()]
        best = exact.climbed(list(map(race.one_by_one, quickly)), begin, start, inference, n)
        if len(quickly) > 1:
            return best
        return exact.ended(race.one_by_one(exactly), best, start, inference.tolerance, inference.max_iterations)


class Evidence:
    """The evidence of rows near vectors of hyperparameters, as `exact.exact_objective`.

    A vector holds the logs of the variance and the lengthscales of each kernel. If the noise variance is learned, its
    log follows. If the base has a variance, the logit of the fraction of noise that follows it comes last.

    Attributes:
        rows: the data.
        jitter: as a fraction of the prior variance.
        exactly: asked in place of this one where rounding hides much of the noise; None for an exact one.
        last: the last vector, what was found there, and what the posterior needs; None where that is not finite.
    """

    last: Any

    def __init__(self, rows: Rows, jitter: float | Float[Any, ""], exactly: "Evidence | None" = None) -> None:
        self.rows, self.jitter, self.exactly, self.last = rows, float(jitter), exactly, None
        n = len(rows.targets)
        self._memory = np.empty((len(rows.parts) + 2, n, n), rows.targets.dtype)

    def in_float32(self) -> "Evidence":
        """The same in half of the time where that is safe."""
        return Evidence(self.rows.in_float32(), self.jitter, self)

    def __call__(self, vector: Float[np.ndarray, " p"]) -> Local:
        """The evidence near a vector."""
        if self.last is not None and np.array_equal(self.last[0], vector):
            return self.last[1]
        rows, n, p = self.rows, len(self.rows.targets), len(vector)
        diagonal = rows.diagonal(vector, self.jitter, n)
        hidden = np.finfo(rows.targets.dtype).eps * n * diagonal.noise.prior
        if self.exactly is not None and diagonal.noise.least < _SAFE * hidden:
            return self.exactly(vector)
        kernels, memory = rows.kernels(vector), self._memory
        terms = gp_host.likelihood_terms(kernels, diagonal.values, diagonal.derivatives, rows.targets, memory)
        if terms is None:
            local = Local(np.full((), np.nan), np.full(p, np.nan), np.full((p, p), np.nan), np.asarray(False))
        else:
            makes_sense = np.asarray(self._makes_sense(terms.value, diagonal.noise))
            local = Local(np.asarray(terms.value), terms.gradient, terms.information, makes_sense)
        self.last = vector.copy(), local, terms
        return local

    def conditioned(self, vector: Float[np.ndarray, " p"]) -> gp_host.Conditioned | None:
        """What is known at a vector, with a value that is not finite where it makes no sense; None without a factor."""
        rows = self.rows
        diagonal = rows.diagonal(vector, self.jitter, len(rows.targets))
        if self.last is not None and np.array_equal(self.last[0], vector):
            terms = self.last[2]
            found = None if terms is None else gp_host.Conditioned(terms.value, terms.weights, terms.factor)
        else:
            found = gp_host.conditioned(rows.kernels(vector), diagonal.values, rows.targets, self._memory)
        if found is None or self._makes_sense(found.value, diagonal.noise):
            return found
        return found._replace(value=np.nan)

    def _makes_sense(self, value: float, noise: NoiseAt) -> bool:
        """As `model.is_sane`."""
        targets = self.rows.targets
        greatest = -len(targets) * (LOG_2PI + np.log(noise.least)) / 2
        absurd = ABSURD * np.mean(targets**2)
        return bool((value <= greatest) & (max(noise.prior, noise.common) < absurd))


def concluded(found: Found, data: Data, jitter: Float[AnyArray, ""]) -> Process:
    """The process of all rows with what was found."""
    dtype, n, vector = data.targets.dtype, len(data.targets), as_vector(found.model)[0].astype(float)
    with threads_for(n):
        known = Evidence(Rows.of(found.model, data), jitter).conditioned(vector)
        found = found._replace(evidence=np.asarray(np.nan if known is None else known.value, dtype))
        if known is None:
            nothing = np.full(n, np.nan, dtype)
            after = gp.Posterior(nothing, np.full((n, n), np.nan, dtype), None)
            return process_given(found, data, jitter, after, gp.LeaveOneOut(nothing, nothing))
        shrink = inverse_triangular(known.factor)  # in its memory, which nobody reads any more
    after = gp.Posterior(known.weights.astype(dtype), shrink.astype(dtype), None)
    # Rasmussen & Williams (2006), eq. 5.12.
    precision = column_squares(shrink)
    others = gp.LeaveOneOut((known.weights / precision).astype(dtype), (1 / precision).astype(dtype))
    return process_given(found, data, jitter, after, others)
