"""The exact fit of known rows on a CPU, by NumPy and LAPACK, which compile nothing.

It is for sums of squared exponentials with Gaussian noise. `gp.exact` has the rules of the search, and the same
objective in JAX for any kernel; `functional.gp_host` the algebra.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from jaxtyping import Float, Int

from jaxcal._numpy import threads_for
from jaxcal.functional import gp, gp_host
from jaxcal.functional.gp import LOG_2PI
from jaxcal.functional.linalg import column_squares, inverse_triangular
from jaxcal.gp import exact, race
from jaxcal.gp.kernels import scattered
from jaxcal.gp.model import ABSURD, NOISE_FLOOR, Data, Found, Model, as_vector, exact_jitters, one_of
from jaxcal.gp.newton import Local
from jaxcal.gp.process import Process, first_fit, process_given
from jaxcal.gp.protocols import Inference, Noise, Prepare, S

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


def fit(prepare: Prepare[S], inference: Inference, first: First | None, *rows: np.ndarray | None) -> tuple[S, Process]:
    """What rows are scaled by, and the process at the smallest jitter at which evidence and posterior are finite.

    Args:
        prepare: as of `fit.fit_rows`; the initial values are of a sum of squared exponentials.
        inference: how: by Newton's steps, under Gaussian noise.
        first: what some of many rows say, where it is known.
        rows: of one output.
    """
    scales, initial_of, data = prepare(*rows, None)
    start = exact.Start.of(initial_of(data, None), data, inference).in_float64()
    n, model = len(data.targets), one_of(start.models)
    ladder = _Ladder.of(model, data, start)

    def attempt(jitter: Float[np.ndarray, ""]) -> Process:
        exactly = Evidence(ladder.rungs[-1], jitter)
        with threads_for(n):
            begin = ladder.first([jitter], start, inference) if first is None else first.optimum
            best = ladder.optimum(exactly, begin, start, inference)
            return _process_at(best, exactly, data, model, jitter)

    return scales, first_fit(map(attempt, exact_jitters(data.targets.dtype)))


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

    def first(self, jitters: list[Float[np.ndarray, ""]], start: exact.Start, inference: Inference) -> exact.Optimum:
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


class Rows(NamedTuple):
    """What a process of squared exponentials is fitted to.

    Attributes:
        parts: the rows of every kernel, [n, d] each.
        widths: how many lengthscales every kernel has.
        targets: [n], of mean zero.
        base_variance: as of `model.Data`, [n]; None where it gave none.
        relative_noise: as of `model.Data`, [n]; None where it is equal.
        log_noise: of noise that is known; None where it is learned.
        eps: of the dtype in which the posterior is stored, whose rounding is among the noise.
    """

    parts: tuple[Float[np.ndarray, "n _"], ...]
    widths: tuple[int, ...]
    targets: Float[np.ndarray, " n"]
    base_variance: Float[np.ndarray, " n"] | None = None
    relative_noise: Float[np.ndarray, " n"] | None = None
    log_noise: float | None = None
    eps: float = float(np.finfo(float).eps)

    @classmethod
    def of(cls, model: Model, data: Data) -> "Rows":
        """The rows in float64, for a model's kernels."""
        kernel: Any = model.kernel
        parts = kernel.parts(data.points)
        return cls(
            parts=tuple(points.astype(float) for points, _ in parts),
            widths=tuple(kernel.log_lengthscale.size for _, kernel in parts),
            targets=data.targets.astype(float),
            base_variance=None if data.base_variance is None else data.base_variance.astype(float),
            relative_noise=None if data.relative_noise is None else data.relative_noise.astype(float),
            log_noise=float(model.log_noise) if "log_noise" in model.fixed else None,
            eps=float(np.finfo(data.targets.dtype).eps),
        )

    @property
    def starts(self) -> Int[np.ndarray, " k"]:
        """Where in a vector the kernels begin, and what is of the noise."""
        return np.cumsum([0, *(1 + width for width in self.widths)])

    def kernels(self, vector: Float[np.ndarray, " p"]) -> list[gp_host.Part]:
        """The kernels of a vector, with their rows."""
        values = np.exp(vector)
        return [
            gp_host.Part(points, values[at], values[at + 1 : at + 1 + width])
            for points, width, at in zip(self.parts, self.widths, self.starts, strict=False)
        ]

    def diagonal(self, vector: Float[np.ndarray, " p"], jitter: float, number: int) -> "Diagonal":
        """What is on the covariance's diagonal beside the kernel, as `model.Model` has it.

        Args:
            vector: of hyperparameters, as of `Evidence`.
            jitter: as a fraction of the prior variance.
            number: how many rows are factorized together.
        """
        n, values, starts = len(self.targets), np.exp(vector), self.starts
        relative = np.ones(n) if self.relative_noise is None else self.relative_noise
        derivatives = np.zeros((n, len(vector)))
        prior = values[starts[:-1]].sum()
        noise = values[starts[-1]] if self.log_noise is None else np.exp(self.log_noise)
        common = NOISE_FLOOR + noise + self.eps * number * prior
        if self.base_variance is not None:
            # The noise of a row: common (1 - s + s base_variance), with s the sigmoid of the logit.
            fraction = 1 / (1 + np.exp(-vector[-1]))
            derivatives[:, -1] = common * fraction * (1 - fraction) * relative * (self.base_variance - 1)
            relative = relative * (1 - fraction + fraction * self.base_variance)
        derivatives[:, starts[:-1]] = values[starts[:-1]] * (jitter + self.eps * number * relative[:, None])
        if self.log_noise is None:
            derivatives[:, starts[-1]] = noise * relative
        return Diagonal(jitter * prior + common * relative, derivatives, prior, common, common * relative.min())

    def in_float32(self) -> "Rows":
        """The same rows for an evaluation in half of the time."""
        return self._mapped(lambda array: array.astype(np.float32))

    def some(self, numbers: Int[np.ndarray, " m"]) -> "Rows":
        """Some of the rows."""
        return self._mapped(lambda array: array[numbers])

    def _mapped(self, change: Any) -> "Rows":
        return self._replace(
            parts=tuple(map(change, self.parts)),
            targets=change(self.targets),
            base_variance=None if self.base_variance is None else change(self.base_variance),
            relative_noise=None if self.relative_noise is None else change(self.relative_noise),
        )


class Diagonal(NamedTuple):
    """What is on a covariance's diagonal beside the kernel.

    Attributes:
        values: [n], noise and jitter.
        derivatives: [n, p], by every hyperparameter.
        prior: the variance of the process.
        noise: the mean variance of the noise, with its floor and with rounding.
        least: the least variance of a row's noise.
    """

    values: Float[np.ndarray, " n"]
    derivatives: Float[np.ndarray, "n p"]
    prior: float
    noise: float
    least: float


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
        hidden = np.finfo(rows.targets.dtype).eps * n * diagonal.prior
        if self.exactly is not None and diagonal.least < _SAFE * hidden:
            return self.exactly(vector)
        kernels, memory = rows.kernels(vector), self._memory
        terms = gp_host.likelihood_terms(kernels, diagonal.values, diagonal.derivatives, rows.targets, memory)
        if terms is None:
            local = Local(np.full((), np.nan), np.full(p, np.nan), np.full((p, p), np.nan), np.asarray(False))
        else:
            makes_sense = np.asarray(self._makes_sense(terms.value, diagonal))
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
        if found is None or self._makes_sense(found.value, diagonal):
            return found
        return found._replace(value=np.nan)

    def _makes_sense(self, value: float, diagonal: Diagonal) -> bool:
        """As `model.is_sane`."""
        targets = self.rows.targets
        greatest = -len(targets) * (LOG_2PI + np.log(diagonal.least)) / 2
        absurd = ABSURD * np.mean(targets**2)
        return bool((value <= greatest) & (max(diagonal.prior, diagonal.noise) < absurd))


def _process_at(
    best: exact.Optimum, evidence: Evidence, data: Data, model: Model, jitter: Float[np.ndarray, ""]
) -> Process:
    """The process with what was found."""
    dtype, n, known = data.targets.dtype, len(data.targets), evidence.conditioned(best.place)
    value = np.asarray(np.nan if known is None else known.value, dtype)
    found = best._replace(value=value).as_found(as_vector(model)[1](best.place.astype(dtype)))
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
