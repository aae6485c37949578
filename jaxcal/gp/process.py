"""A Gaussian process after data: what a fit gives and what it predicts; the better of two fits."""

from collections.abc import Iterable
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxcal._numpy import AnyArray, namespace
from jaxcal._programs import exact_products
from jaxcal.functional import gp, noise, normal
from jaxcal.gp import model as models
from jaxcal.gp import nearest
from jaxcal.gp.kernels import Points, SquaredExponential, median, scattered, take
from jaxcal.gp.model import Data, Found, Model, predict
from jaxcal.optimize import Result

# Where a prediction asks the nearest rows, outliers are looked for among so many.
_CHECKED = 10_000


class Either(eqx.Module):
    """What the data say at the inducing points, and what the rows say: the predictions are those of one of them.

    Attributes:
        sparse: at the inducing points.
        nearest: of the rows.
        rows: as the kernel takes them.
        asks_nearest: whether predictions ask the nearest rows.
    """

    sparse: gp.Posterior
    nearest: nearest.Nearest
    rows: Points
    asks_nearest: Bool[Array, ""]


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
    """

    model: Model
    points: Points
    posterior: gp.Posterior | nearest.Nearest | Either
    noise_variance: Float[AnyArray, "*runs"]
    rounding_fraction: Float[AnyArray, "*runs"]
    evidence: Float[AnyArray, "*runs"]
    iterations: Int[AnyArray, "*runs"]
    result: Int[AnyArray, "*runs"]
    jitter: Float[AnyArray, "*runs"]
    failed_initial_values: Int[AnyArray, "*runs"]
    greatest_error: tuple[Float[AnyArray, "*runs"], Int[AnyArray, "*runs"]] | None = None
    log_noise: "Process | None" = None
    log_noise_offset: Float[Array, "*runs"] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it is a sum of squared exponentials with Gaussian noise, given all rows: NumPy can predict it."""
        parts = getattr(self.model.kernel, "parts", lambda points: ())(self.points)
        plain = self.log_noise is None and self.model.student_t is None and isinstance(self.posterior, gp.Posterior)
        return plain and bool(parts) and all(isinstance(kernel, SquaredExponential) for _, kernel in parts)

    @exact_products
    def __call__(self, points: Points) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
        """Latent means and variances at points; RIO, eq. 5 and 6."""
        kernel, given = self.model.kernel, self.posterior
        if isinstance(given, Either):
            ask_nearest = lambda: nearest.predict(kernel, given.nearest, given.rows, points)
            return lax.cond(given.asks_nearest, ask_nearest, lambda: predict(kernel, given.sparse, self.points, points))
        if isinstance(given, nearest.Nearest):
            return nearest.predict(kernel, given, self.points, points)
        return predict(kernel, given, self.points, points)

    @property
    def scale(self) -> Float[Array, "*runs"]:
        """By what the variances of kernel and noise are multiplied: other than 1 where the nearest rows are asked."""
        given = self.posterior
        if isinstance(given, Either):
            return jnp.where(given.asks_nearest, given.nearest.scale, 1)
        return given.scale if isinstance(given, nearest.Nearest) else jnp.ones_like(self.noise_variance)

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
            base_variance = jnp.exp(log_mean + log_variance / 2 + jnp.asarray(self.log_noise_offset))
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
    def points(self) -> Points:
        """The conditioning points as the kernel takes them, in scaled units: training rows, or inducing points."""
        return self.process.points

    @property
    def scaled_noise(self) -> Float[Array, "*runs"]:
        """The (mean) variance of the noise, in units of the scaled target."""
        return self.process.noise_variance

    @property
    def evidence(self) -> Float[Array, "*runs"]:
        """The log marginal likelihood, or its lower bound, of the scaled target."""
        return self.process.evidence

    @property
    def iterations(self) -> Int[Array, "*runs"]:
        """Of the optimizer, from where the search ended."""
        return self.process.iterations

    @property
    def result(self) -> Int[Array, "*runs"]:
        """How the optimization ended, one of `jaxcal.optimize.Result`; Adam ends at its limit of steps."""
        return self.process.result

    @property
    def jitter(self) -> Float[Array, "*runs"]:
        """What was added to the covariance's diagonal, as a fraction of its mean."""
        return self.process.jitter


def first_fit(attempts: Iterable[Process]) -> Process:
    """The first of them that makes sense, or the last one; on the host, where those after it are not made."""
    process = None
    for process in attempts:
        if process.result != Result.NOT_FINITE:
            break
    return cast(Process, process)


def process_of(found: Found, data: Data, jitter: Float[Array, ""], mesh: Mesh | None) -> Process:
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
    )


def process_of_nearest(found: Found, data: Data, jitter: Float[Array, ""]) -> Process:
    """The process that asks the nearest rows, NOT_FINITE where it makes no sense."""
    model, few = found.model, nearest.factorized_together(data.points)
    given = nearest.calibrated(model, data, jitter)
    rows = scattered(data.points)[:_CHECKED]
    others = nearest.leave_one_out(model.kernel, given, data.points, rows)
    density = data.targets.shape[0] * jnp.mean(normal.log_prob(others.error, 0.0, jnp.sqrt(others.variance)))
    errors = jnp.abs(others.standardized)
    good = jnp.isfinite(errors).all() & models.has_sane_variances(model, data)
    return Process(
        model=model,
        points=data.points,
        posterior=given,
        noise_variance=given.scale * model.noise_variance(few),
        rounding_fraction=given.scale * model.rounding(few) / jnp.median(others.variance),
        evidence=density,
        iterations=found.steps,
        result=jnp.where(good, found.result, Result.NOT_FINITE),
        jitter=jitter,
        failed_initial_values=found.failed_initial_values,
        greatest_error=(jnp.max(errors), rows[jnp.argmax(errors)]),
    )


def better_of(sparse: Found, by_rows: Found, data: Data, jitter: Float[Array, ""], is_last: Bool[Array, ""]) -> Process:
    """The process through inducing points or the one that asks the nearest rows: of the lower leave-one-out CRPS.

    It is that of some rows, which had no part in the choice of hyperparameters for the nearest if there are enough.
    NOT_FINITE where the inducing points failed, and more jitter may yet help them.
    """
    through, asking = process_of(sparse, data, jitter, None), process_of_nearest(by_rows, data, jitter)
    after, given = cast(gp.Posterior, through.posterior), cast(nearest.Nearest, asking.posterior)
    rows = nearest.other_rows(data)
    crps_through = _crps(models.leave_one_out(sparse.model, after, take(data, rows)), through)
    crps_asking = _crps(nearest.leave_one_out(by_rows.model.kernel, given, data.points, rows), asking)
    asks = crps_asking < crps_through
    parts = lambda process: (process.points, process.posterior)
    alike = (eqx.tree_at(parts, process, (None, None)) for process in (asking, through))
    chosen = jax.tree.map(lambda a, b: jnp.where(asks, a, b), *alike)
    failed = (through.result == Result.NOT_FINITE) & ~is_last
    chosen = eqx.tree_at(lambda p: p.result, chosen, jnp.where(failed, Result.NOT_FINITE, chosen.result))
    either = Either(after, given, data.points, asks)
    return eqx.tree_at(parts, chosen, (through.points, either), is_leaf=lambda node: node is None)


def _crps(others: gp.LeaveOneOut, process: Process) -> Float[Array, ""]:
    """The mean leave-one-out CRPS; infinite where the fit failed."""
    score = jnp.mean(normal.crps(others.error, 0.0, jnp.sqrt(others.variance)))
    return jnp.where((process.result == Result.NOT_FINITE) | jnp.isnan(score), jnp.inf, score)
