"""The evidence of known rows, or a bound on it, with its gradient by the learned parameters, by NumPy.

It is for sums of squared exponentials, exact or with inducing points, with Gaussian or Student t noise.
`model.evidence` is the same in JAX.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
from jaxtyping import Float

from jaxcal._numpy import AnyArray, threads_for
from jaxcal.functional import gp_host, noise, sparse_host
from jaxcal.functional.gp_host import Part
from jaxcal.gp.model import Data, Model, StudentTLikelihood, bounds, penalty
from jaxcal.gp.rows import NoiseAt, ProcessData, parts_of

Vector = Float[np.ndarray, "_"]


def loss_of(
    model: Model, data: Data, jitter: Float[AnyArray, ""], *, with_inducing: bool
) -> Callable[[Vector], tuple[float, Vector]]:
    """The negative evidence plus the penalty beyond the bounds, and its gradient, as a function of a vector.

    Args:
        model: the model that gives the bounds and the fixed parameters. `model.as_vector` says what the vector holds.
        data: the rows.
        jitter: as a fraction of the prior variance.
        with_inducing: whether the inducing points move.
    """
    evidence = _BoundObjective(model, data, jitter, with_inducing=with_inducing)
    low, high = (np.asarray(bound, float) for bound in bounds(model, data))

    def loss(vector: Vector) -> tuple[float, Vector]:
        with threads_for(len(data.targets)):
            value, gradient = evidence(vector)
        cost, slope, _ = penalty(vector[: len(low)], low, high, len(data.targets))
        return cost - value, np.append(slope, np.zeros(len(vector) - len(low))) - gradient

    return loss


class _BoundObjective:
    """The evidence as a function of a vector: of kernels and noise, of Student t noise, and of inducing points."""

    def __init__(self, model: Model, data: Data, jitter: Float[AnyArray, ""], *, with_inducing: bool) -> None:
        self.rows, self.jitter, self.model = ProcessData.of(model, data), float(jitter), model
        self.number, n = self.rows.number, len(data.targets)
        self.points = None if model.inducing is None else [part.rows for part in parts_of(model.kernel, model.inducing)]
        self.moves = with_inducing
        self.memory = None if self.points is not None else np.empty((len(self.rows.parts) + 1, n, n))

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        head, student, points = self._split(vector)
        rows = self.rows
        at = rows.noise(head, len(rows.targets))
        weights = None if student is None else student.weights
        relative = at.relative if weights is None else at.relative / weights
        kernels = rows.kernels(head)
        if points is None:
            value, slopes = self._exact(kernels, at, relative)
        else:
            value, slopes = self._through(points, kernels, at, relative)
        if slopes is None:
            return value, np.full_like(vector, np.nan)
        parts = [self._by_head(head, at, slopes, weights)]
        if student is not None and weights is not None:
            value += float(noise.student_t_bound(weights, student.df))
            parts.append(_by_student_t(student, weights, slopes.relative * relative))
        if self.moves:
            parts.extend(map(np.ravel, slopes.points))
        return value, np.concatenate(parts)

    def _split(self, vector: Vector) -> tuple[Vector, StudentTLikelihood | None, list[np.ndarray] | None]:
        """The three parts of a vector: for kernels and noise, for Student t noise, and the inducing points."""
        at, n = self.number, len(self.rows.targets)
        head, student, points = vector[:at], None, self.points
        if self.model.student_t is not None:
            student = StudentTLikelihood(vector[at], vector[at + 1 : at + 1 + n])
            at += 1 + n
        if self.moves and points is not None:
            sizes = np.cumsum([each.size for each in points])[:-1]
            parts = np.split(vector[at:], sizes)
            points = [part.reshape(each.shape) for part, each in zip(parts, points, strict=True)]
        return head, student, points

    def _exact(
        self, kernels: list[Part], at: NoiseAt, relative: Float[np.ndarray, " n"]
    ) -> tuple[float, sparse_host.Gradient | None]:
        diagonal = self.jitter * at.prior + at.common * relative
        nothing = np.zeros((len(relative), self.rows.starts[-1]))
        terms = gp_host.likelihood_terms(kernels, diagonal, nothing, self.rows.targets, cast(np.ndarray, self.memory))
        if terms is None:
            return np.nan, None
        grad_diagonal = terms.grad_diagonal
        return terms.value, sparse_host.Gradient(
            parts=terms.gradient,
            prior=self.jitter * float(grad_diagonal.sum()),
            noise=float(grad_diagonal @ relative),
            relative=at.common * grad_diagonal,
        )

    def _through(
        self, points: list[np.ndarray], kernels: list[Part], at: NoiseAt, relative: Float[np.ndarray, " n"]
    ) -> tuple[float, sparse_host.Gradient | None]:
        inducing = [part._replace(rows=rows) for part, rows in zip(kernels, points, strict=True)]
        return sparse_host.bound(inducing, self.rows.parts, self.jitter, at.common, relative, self.rows.targets)

    def _by_head(
        self, head: Vector, at: NoiseAt, slopes: sparse_host.Gradient, weights: Float[np.ndarray, " n"] | None
    ) -> Vector:
        """The gradient by kernels and noise.

        The noise includes rounding, which is proportional to the prior variance.
        """
        rows, variances = self.rows, self.rows.starts[:-1]
        gradient = np.zeros(len(head))
        gradient[: rows.starts[-1]] = slopes.parts
        grad_prior = slopes.prior + slopes.noise * at.rounding
        gradient[variances] += np.exp(head[variances]) * grad_prior
        if rows.log_noise is None:
            gradient[rows.starts[-1]] = slopes.noise * at.learned
        if at.grad_logit is not None:
            gradient[-1] = slopes.relative @ (at.grad_logit if weights is None else at.grad_logit / weights)
        return gradient


def _by_student_t(
    student: StudentTLikelihood, weights: Float[np.ndarray, " n"], grad_log_relative: Float[np.ndarray, " n"]
) -> Vector:
    """The derivatives by the two arrays of `StudentTLikelihood`, which also change the weights."""
    squares, df = np.exp(cast(np.ndarray, student.log_squares)), student.df
    grad_weights, grad_df = noise.student_t_slopes(weights, df)
    # The noise is common * relative / w, with w = (df + 1) / (df + square).
    grad_weights = grad_weights - grad_log_relative / weights
    grad_df = grad_df + grad_weights @ ((squares - 1) / (df + squares) ** 2)
    grad_squares = -grad_weights * (df + 1) / (df + squares) ** 2
    return np.append(grad_df * student.slope, grad_squares * squares)
