"""Known rows and hyperparameters for NumPy: in float64, with the rows of each squared exponential."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxcal.functional import gp_host
from jaxcal.gp.kernels import Points
from jaxcal.gp.model import NOISE_FLOOR, Data, Model


class ProcessData(NamedTuple):
    """The data of a process of squared exponentials.

    Attributes:
        parts: the rows of every kernel, [n, d] each.
        widths: how many lengthscales every kernel has.
        targets: [n], of mean zero.
        base_variance: as of `model.Data`, [n]; None if the base has no variance.
        relative_noise: as of `model.Data`, [n]; None if it is equal.
        log_noise: the log of a known noise variance; None if it is learned.
        eps: the eps of the dtype in which the posterior is stored; its rounding counts as noise.
    """

    parts: tuple[Float[np.ndarray, "n _"], ...]
    widths: tuple[int, ...]
    targets: Float[np.ndarray, " n"]
    base_variance: Float[np.ndarray, " n"] | None = None
    relative_noise: Float[np.ndarray, " n"] | None = None
    log_noise: float | None = None
    eps: float = float(np.finfo(float).eps)

    @classmethod
    def of(cls, model: Model, data: Data) -> "ProcessData":
        """The rows in float64, for a model's kernels."""
        parts, base = parts_of(model.kernel, data.points), data.base_variance
        return cls(
            parts=tuple(part.rows for part in parts),
            widths=tuple(len(part.lengthscale) for part in parts),
            targets=data.targets.astype(float),
            base_variance=None if model.logit_fraction is None or base is None else base.astype(float),
            relative_noise=None if data.relative_noise is None else data.relative_noise.astype(float),
            log_noise=float(model.log_noise) if "log_noise" in model.fixed else None,
            eps=float(np.finfo(data.targets.dtype).eps),
        )

    @property
    def starts(self) -> Int[np.ndarray, " k"]:
        """The positions in a vector at which each kernel begins, and then the noise."""
        return np.cumsum([0, *(1 + width for width in self.widths)])

    def kernels(self, vector: Float[np.ndarray, " p"]) -> list[gp_host.Part]:
        """The kernels with the hyperparameters of a vector, with their rows."""
        values = np.exp(vector)
        return [
            gp_host.Part(points, values[at], values[at + 1 : at + 1 + width])
            for points, width, at in zip(self.parts, self.widths, self.starts, strict=False)
        ]

    @property
    def number(self) -> int:
        """How many hyperparameters of the kernels and of the rows' noise a vector has."""
        return int(self.starts[-1]) + (self.log_noise is None) + (self.base_variance is not None)

    def noise(self, vector: Float[np.ndarray, " p"], number: int) -> "NoiseAt":
        """The noise of the rows, as in `model.Model`.

        Args:
            vector: the hyperparameters, as of `host.Evidence`.
            number: how many rows are factorized together.
        """
        n, starts = len(self.targets), self.starts
        prior = np.exp(vector[starts[:-1]]).sum()
        learned = float(np.exp(vector[starts[-1]] if self.log_noise is None else self.log_noise))
        relative, grad_logit = np.ones(n) if self.relative_noise is None else self.relative_noise, None
        if self.base_variance is not None:
            # The noise of a row: common (1 - s + s base_variance), with s the sigmoid of the logit.
            fraction = 1 / (1 + np.exp(-vector[self.number - 1]))
            grad_logit = fraction * (1 - fraction) * relative * (self.base_variance - 1)
            relative = relative * (1 - fraction + fraction * self.base_variance)
        rounding = self.eps * number
        return NoiseAt(prior, learned, NOISE_FLOOR + learned + rounding * prior, relative, grad_logit, rounding)

    def diagonal(self, vector: Float[np.ndarray, " p"], jitter: float, number: int) -> "Diagonal":
        """The noise and jitter on the covariance's diagonal.

        Args:
            vector: as of `noise`.
            jitter: as a fraction of the prior variance.
            number: as of `noise`.
        """
        noise, starts = self.noise(vector, number), self.starts
        # d/d log v = v (jitter + rounding relative), d/d log noise = noise relative, d/d logit = common grad_logit
        derivatives = np.zeros((len(self.targets), len(vector)))
        variances = np.exp(vector[starts[:-1]])
        derivatives[:, starts[:-1]] = variances * (jitter + noise.rounding * noise.relative[:, None])
        if self.log_noise is None:
            derivatives[:, starts[-1]] = noise.learned * noise.relative
        if noise.grad_logit is not None:
            derivatives[:, -1] = noise.common * noise.grad_logit
        return Diagonal(jitter * noise.prior + noise.common * noise.relative, derivatives, noise)

    def in_float32(self) -> "ProcessData":
        """The same rows for an evaluation in half of the time."""
        return self._mapped(lambda array: array.astype(np.float32))

    def some(self, numbers: Int[np.ndarray, " m"]) -> "ProcessData":
        """Some of the rows."""
        return self._mapped(lambda array: array[numbers])

    def _mapped(self, change: Any) -> "ProcessData":
        return self._replace(
            parts=tuple(map(change, self.parts)),
            targets=change(self.targets),
            base_variance=None if self.base_variance is None else change(self.base_variance),
            relative_noise=None if self.relative_noise is None else change(self.relative_noise),
        )


class NoiseAt(NamedTuple):
    """The noise of rows at some hyperparameters.

    Attributes:
        prior: the variance of the process.
        learned: the variance of the noise, without its floor and without rounding.
        common: the mean variance of the noise, with its floor and with rounding.
        relative: [n], the variance of every row's noise over the common variance.
        grad_logit: [n], the derivative of `relative` by the logit of the fraction that follows the base's variance; or
            None.
        rounding: the part of the common variance for rounding, as a multiple of the variance of the process.
    """

    prior: float
    learned: float
    common: float
    relative: Float[np.ndarray, " n"]
    grad_logit: Float[np.ndarray, " n"] | None
    rounding: float

    @property
    def least(self) -> float:
        """The least variance of a row's noise."""
        return self.common * float(self.relative.min())


class Diagonal(NamedTuple):
    """The noise and jitter on a covariance's diagonal.

    Attributes:
        values: [n], the noise and jitter.
        derivatives: [n, p], the derivatives by every hyperparameter.
        noise: the noise of the rows.
    """

    values: Float[np.ndarray, " n"]
    derivatives: Float[np.ndarray, "n p"]
    noise: NoiseAt


def parts_of(kernel: Any, points: Points) -> list[gp_host.Part]:
    """The squared exponentials of a kernel, with their rows, in float64."""
    return [
        gp_host.Part(
            rows.astype(float),
            np.exp(float(part.log_variance)),
            np.atleast_1d(np.exp(part.log_lengthscale.astype(float))),
        )
        for rows, part in kernel.parts(points)
    ]
