"""A Gaussian process after data: the results of a fit, and predictions."""

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
from jaxcal.gp.model import Data, Model, SearchResult, predict
from jaxcal.optimize import Result


@runtime_checkable
class Conditioned(Protocol):
    """The posterior of a process that does not predict by matrices of the conditioning points."""

    @property
    def scale(self) -> Float[AnyArray, "*runs"]:
        """The factor by which the variances of kernel and noise are multiplied."""
        ...

    def predict(self, kernel: Kernel, at: Points, points: Points) -> tuple[AnyArray, AnyArray]:
        """Latent means and variances at points, given the conditioning points `at`."""
        ...


class Process(eqx.Module):
    """A Gaussian process after data.

    Attributes:
        model: the model with the hyperparameters found.
        points: the conditioning points: the rows, or the inducing points.
        posterior: the posterior at the conditioning points.
        noise_variance: the noise variance of the scaled target; the mean, if every row has its own.
        rounding_fraction: the variance that rounding may hide, over the median leave-one-out variance.
        evidence: the log marginal likelihood of the scaled target, or its lower bound. For `Nearest`, the log density
            of the rows, each given the rows nearest to it.
        iterations: the number of steps of the optimizer on the way to the hyperparameters found.
        result: how the optimization ended, one of `jaxcal.optimize.Result`.
        jitter: the jitter added to the covariance's diagonal, as a fraction of its mean.
        failed_initial_values: how many of the initial values had no finite evidence.
        greatest_error: the greatest leave-one-out error over its standard deviation, and the number of its row. None
            for Student t noise.
        log_noise: a second process, for the log of the relative noise variance. None if the noise does not depend on
            the inputs.
        log_noise_offset: the number added to the predictions of this second process.
        inference: the name of the inference: "exact", "sparse", "nearest" or "stochastic".
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
        """Whether the kernel is a sum of squared exponentials, for which NumPy can predict."""
        parts = getattr(self.model.kernel, "parts", lambda points: ())(self.points)
        return bool(parts) and all(isinstance(kernel, SquaredExponential) for _, kernel in parts)

    @exact_products
    def __call__(self, points: Points) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
        """Latent means and variances at points; RIO, eq. 5 and 6."""
        kernel, posterior = self.model.kernel, self.posterior
        if isinstance(posterior, gp.Posterior):
            return predict(kernel, posterior, self.points, points)
        return posterior.predict(kernel, self.points, points)

    @property
    def scale(self) -> Float[AnyArray, "*runs"]:
        """The factor by which the variances of kernel and noise are multiplied; 1 except for `Nearest`."""
        posterior = self.posterior
        return (
            namespace(self.noise_variance).ones_like(self.noise_variance)
            if isinstance(posterior, gp.Posterior)
            else posterior.scale
        )

    def observed(
        self, points: Points, base_variance: Float[AnyArray, " n"] | None = None
    ) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"], Float[AnyArray, " n"] | None]:
        """Means and variances of new targets, and None; for Student t noise means, squared scales, degrees of freedom.

        Args:
            points: where to predict.
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
    """The properties of a method that come from the fitted process that it holds."""

    process: eqx.AbstractVar[Process]

    @property
    def inference(self) -> str:
        """The name of the inference: "exact", "sparse", "nearest" or "stochastic"."""
        return self.process.inference

    @property
    def points(self) -> Points:
        """The conditioning points as the kernel takes them, in scaled units: training rows, or inducing points."""
        return self.process.points

    @property
    def scaled_noise(self) -> Float[AnyArray, "*runs"]:
        """The variance of the noise, in units of the scaled target; the mean, if every row has its own."""
        return self.process.noise_variance

    @property
    def evidence(self) -> Float[AnyArray, "*runs"]:
        """The log marginal likelihood, or its lower bound, of the scaled target."""
        return self.process.evidence

    @property
    def iterations(self) -> Int[AnyArray, "*runs"]:
        """The number of steps of the optimizer on the way to the hyperparameters found."""
        return self.process.iterations

    @property
    def result(self) -> Int[AnyArray, "*runs"]:
        """How the optimization ended, one of `jaxcal.optimize.Result`; Adam ends at its limit of steps."""
        return self.process.result

    @property
    def jitter(self) -> Float[AnyArray, "*runs"]:
        """The jitter added to the covariance's diagonal, as a fraction of its mean."""
        return self.process.jitter


def first_fit(attempts: Iterable[Process]) -> Process:
    """The first of the attempts that makes sense, or the last one; on the host, which makes no attempt after it."""
    process = None
    for process in attempts:
        if process.result != Result.NOT_FINITE:
            break
    return cast(Process, process)


@part
def process_of(optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""], mesh: Mesh | None) -> Process:
    """The process after data; its result is NOT_FINITE if its posterior is not finite or it makes no sense."""
    after = models.posterior(optimum.model, data, jitter, mesh)
    return process_given(optimum, data, jitter, after, models.leave_one_out(optimum.model, after, data))


def process_given(
    optimum: SearchResult, data: Data, jitter: Float[AnyArray, ""], after: gp.Posterior, others: gp.LeaveOneOut
) -> Process:
    """`process_of`, given the posterior and the leave-one-out errors."""
    model, xp = optimum.model, namespace(after.weights)
    good = after.is_finite & models.is_sane(model, optimum.evidence, data)
    greatest = None
    if model.student_t is None:
        errors = abs(others.standardized)  # 0 for padding
        greatest = xp.max(errors), xp.argmax(errors).astype(np.int32)
    return Process(
        model=models.without_rows(model),
        points=data.points if model.inducing is None else model.inducing,
        posterior=after,
        noise_variance=model.noise_variance(data.points, data.included),
        rounding_fraction=model.rounding(data.points, data.included) / median(others.variance, data.included),
        evidence=optimum.evidence,
        iterations=optimum.steps,
        result=xp.where(good, optimum.result, Result.NOT_FINITE).astype(np.int32),
        jitter=jitter,
        failed_initial_values=optimum.failed_initial_values,
        greatest_error=greatest,
        inference="exact" if model.inducing is None else "sparse",
    )
