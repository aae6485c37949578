"""A Gaussian process after data: what a fit gives and what it predicts."""

from collections.abc import Iterable
from typing import Protocol, cast, runtime_checkable

import equinox as eqx
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxcal._numpy import AnyArray, namespace, part
from jaxcal._programs import exact_products
from jaxcal.functional import gp, noise
from jaxcal.gp import model as models
from jaxcal.gp.kernels import Kernel, Points, SquaredExponential, median
from jaxcal.gp.model import Data, Found, Model, predict
from jaxcal.optimize import Result


@runtime_checkable
class Conditioned(Protocol):
    """What is known after data, for processes that do not predict by matrices of the conditioning points."""

    @property
    def scale(self) -> Float[AnyArray, "*runs"]:
        """By what the variances of kernel and noise are multiplied."""
        ...

    def predict(self, kernel: Kernel, at: Points, points: Points) -> tuple[AnyArray, AnyArray]:
        """Latent means and variances at points, given those `at`."""
        ...


class Process(eqx.Module):
    """A Gaussian process after data.

    Attributes:
        model: with the hyperparameters found.
        points: the conditioning points: the rows, or the inducing points.
        posterior: what the data say at them.
        noise_variance: of the scaled target; the mean one, where rows have their own.
        rounding_fraction: the variance that rounding may hide, over the median leave-one-out variance.
        evidence: log marginal likelihood, or its lower bound, of the scaled target; where predictions ask the nearest
            rows their log density, each given those nearest to it.
        iterations: of the optimizer, from where the search ended.
        result: how the optimization ended, one of `jaxcal.optimize.Result`.
        jitter: what was added to the covariance's diagonal, as a fraction of its mean.
        failed_initial_values: how many of the initial values had no finite evidence.
        greatest_error: the greatest leave-one-out error over its standard deviation, and the row that has it; None
            where the noise is Student t.
        log_noise: a second process, of the log of the relative noise variance; None where noise does not depend on the
            inputs.
        log_noise_offset: what is added to it.
        inference: how it was fitted: "exact", "sparse", "nearest" or "stochastic".
    """

    model: Model
    points: Points
    posterior: gp.Posterior | Conditioned
    noise_variance: Float[AnyArray, "*runs"]
    rounding_fraction: Float[AnyArray, "*runs"]
    evidence: Float[AnyArray, "*runs"]
    iterations: Int[AnyArray, "*runs"]
    result: Int[AnyArray, "*runs"]
    jitter: Float[AnyArray, "*runs"]
    failed_initial_values: Int[AnyArray, "*runs"]
    greatest_error: tuple[Float[AnyArray, "*runs"], Int[AnyArray, "*runs"]] | None = None
    log_noise: "Process | None" = None
    log_noise_offset: Float[AnyArray, "*runs"] | None = None
    inference: str = eqx.field(static=True, default="exact")

    @property
    def in_numpy(self) -> bool:
        """Whether it is a sum of squared exponentials: NumPy can predict it."""
        parts = getattr(self.model.kernel, "parts", lambda points: ())(self.points)
        return bool(parts) and all(isinstance(kernel, SquaredExponential) for _, kernel in parts)

    @exact_products
    def __call__(self, points: Points) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
        """Latent means and variances at points; RIO, eq. 5 and 6."""
        kernel, given = self.model.kernel, self.posterior
        if isinstance(given, gp.Posterior):
            return predict(kernel, given, self.points, points)
        return given.predict(kernel, self.points, points)

    @property
    def scale(self) -> Float[AnyArray, "*runs"]:
        """By what the variances of kernel and noise are multiplied: other than 1 where the nearest rows are asked."""
        given = self.posterior
        return (
            namespace(self.noise_variance).ones_like(self.noise_variance)
            if isinstance(given, gp.Posterior)
            else given.scale
        )

    def observed(
        self, points: Points, base_variance: Float[AnyArray, " n"] | None = None
    ) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"], Float[AnyArray, " n"] | None]:
        """Means, variances and no degrees of freedom of new targets; or of Student t ones squared scales and degrees.

        Args:
            points: where.
            base_variance: as of `Data`.
        """
        mean, variance = self(points)
        if self.log_noise is not None:
            log_mean, log_variance = self.log_noise(points)
            base_variance = namespace(log_mean).exp(log_mean + log_variance / 2 + self.log_noise_offset)
        relative = self.model.relative_noise(base_variance)
        added = self.noise_variance * (namespace(mean).ones_like(mean) if relative is None else relative)
        if self.model.student_t is None:
            return mean, variance + added, None
        df, scale = noise.student_t_sum(added, self.model.student_t.df, variance)
        return mean, scale, df


class HoldsProcess(eqx.Module):
    """What a method tells of the fitted process that it holds."""

    process: eqx.AbstractVar[Process]

    @property
    def inference(self) -> str:
        """How the process was fitted: "exact", "sparse", "nearest" or "stochastic"."""
        return self.process.inference

    @property
    def points(self) -> Points:
        """The conditioning points as the kernel takes them, in scaled units: training rows, or inducing points."""
        return self.process.points

    @property
    def scaled_noise(self) -> Float[AnyArray, "*runs"]:
        """The (mean) variance of the noise, in units of the scaled target."""
        return self.process.noise_variance

    @property
    def evidence(self) -> Float[AnyArray, "*runs"]:
        """The log marginal likelihood, or its lower bound, of the scaled target."""
        return self.process.evidence

    @property
    def iterations(self) -> Int[AnyArray, "*runs"]:
        """Of the optimizer, from where the search ended."""
        return self.process.iterations

    @property
    def result(self) -> Int[AnyArray, "*runs"]:
        """How the optimization ended, one of `jaxcal.optimize.Result`; Adam ends at its limit of steps."""
        return self.process.result

    @property
    def jitter(self) -> Float[AnyArray, "*runs"]:
        """What was added to the covariance's diagonal, as a fraction of its mean."""
        return self.process.jitter


def first_fit(attempts: Iterable[Process]) -> Process:
    """The first of them that makes sense, or the last one; on the host, where those after it are not made."""
    process = None
    for process in attempts:
        if process.result != Result.NOT_FINITE:
            break
    return cast(Process, process)


@part
def process_of(found: Found, data: Data, jitter: Float[AnyArray, ""], mesh: Mesh | None) -> Process:
    """The process after data, NOT_FINITE where its posterior is not, or where it makes no sense."""
    after = models.posterior(found.model, data, jitter, mesh)
    return process_given(found, data, jitter, after, models.leave_one_out(found.model, after, data))


def process_given(
    found: Found, data: Data, jitter: Float[AnyArray, ""], after: gp.Posterior, others: gp.LeaveOneOut
) -> Process:
    """`process_of`, given the posterior and the leave-one-out errors."""
    model, xp = found.model, namespace(after.weights)
    good = after.is_finite & models.is_sane(model, found.evidence, data)
    greatest = None
    if model.student_t is None:
        errors = abs(others.standardized)  # 0 of padding
        greatest = xp.max(errors), xp.argmax(errors).astype(np.int32)
    return Process(
        model=models.without_rows(model),
        points=data.points if model.inducing is None else model.inducing,
        posterior=after,
        noise_variance=model.noise_variance(data.points, data.included),
        rounding_fraction=model.rounding(data.points, data.included) / median(others.variance, data.included),
        evidence=found.evidence,
        iterations=found.steps,
        result=xp.where(good, found.result, Result.NOT_FINITE).astype(np.int32),
        jitter=jitter,
        failed_initial_values=found.failed_initial_values,
        greatest_error=greatest,
        inference="exact" if model.inducing is None else "sparse",
    )
