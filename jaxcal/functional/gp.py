"""Exact Gaussian processes as algebra on Gram matrices; `sparse_gp` has processes with inducing points.

The functions here know no kernel: they take the matrices of a kernel. A matrix that will be factorized must have its
noise or jitter on the diagonal already (`linalg.add_diagonal`).

- `log_likelihood`: log p(y), Rasmussen & Williams (2006), eq. 2.30. It is eq. 4 of RIO, whose print lacks an inverse.
- `likelihood_terms`: log p(y) with its derivative with respect to the covariance.
- `average_information`: the curvature of log p(y), Gilmour, Thompson & Cullis (1995).
- `greatest_log_likelihood`: an upper bound on log p(y).
- `posterior`, `predict`: eq. 5 and 6 of RIO, for the latent function (without the noise).
- `conditional`: the same at one point given few rows.
- `leave_one_out`: errors and variances of each row given all others, from a posterior.

The module `conditional_variance` has the variances alone, with their derivatives with respect to the kernel's matrices.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal._numpy import AnyArray, namespace
from jaxcal._programs import exact_products
from jaxcal.functional.linalg import (
    cholesky,
    column_squares,
    crossproduct,
    half_log_det,
    inverse_factor,
    inverse_triangular,
    solve_lower,
)

Scalar = Float[AnyArray, ""]

LOG_2PI = 1.8378770664093453


class Posterior(eqx.Module):
    """A Gaussian process given data, as `predict` needs it.

    The m conditioning points are the training rows, or the inducing points. Let k be the covariances of a point with
    them. Then mean = k . weights and variance = prior - |shrink k|^2 + |widen k|^2.

    Attributes:
        weights: [m].
        shrink: [m, m], the inverse Cholesky factor of the conditioning points' covariance.
        widen: [m, m], which adds the posterior variance at the inducing points; None for an exact posterior.
    """

    weights: Float[AnyArray, " m"]
    shrink: Float[AnyArray, "m m"]
    widen: Float[AnyArray, "m m"] | None

    @property
    def is_finite(self) -> Bool[AnyArray, ""]:
        """Whether the covariances could be factorized."""
        xp = namespace(self.weights)
        return xp.isfinite(self.weights).all() & xp.isfinite(self.shrink).all()


class LeaveOneOut(NamedTuple):
    """Predictions of a process for each of its rows given all others, at the same hyperparameters.

    Attributes:
        error: [n], target minus mean.
        variance: [n], of the target, with the noise.
    """

    error: Float[AnyArray, " n"]
    variance: Float[AnyArray, " n"]

    @property
    def standardized(self) -> Float[AnyArray, " n"]:
        """Errors over their standard deviations."""
        return self.error / namespace(self.variance).sqrt(self.variance)


def log_likelihood(gram: Float[AnyArray, "n n"], targets: Float[AnyArray, " n"]) -> Scalar:
    """log N(y; 0, G) = -y' G^-1 y / 2 - log|G| / 2 - n log(2 pi) / 2.

    Here G = K + noise I; Rasmussen & Williams (2006), eq. 2.30. The derivative is the closed form of their eq. 5.9. It
    needs one inverse of a triangular matrix, and takes half the time of differentiating through the factorization. The
    result is NaN where G is not positive definite.

    >>> import jax.numpy as jnp
    >>> round(log_likelihood(jnp.eye(2), jnp.zeros(2)).item(), 4)
    -1.8379
    """
    log_det, fit = log_det_and_fit(gram, targets)
    return -fit - log_det - 0.5 * targets.shape[0] * LOG_2PI


class LikelihoodTerms(NamedTuple):
    """log p(y), and the terms of its derivatives.

    Attributes:
        value: log N(y; 0, G).
        weights: [n], a = G^-1 y.
        inverse: [n, n], L^-1, with the Cholesky factor L of G.
        grad_gram: [n, n], (a a' - G^-1) / 2, the derivative with respect to G; Rasmussen & Williams (2006), eq. 5.9.
    """

    value: Scalar
    weights: Float[Array, " n"]
    inverse: Float[Array, "n n"]
    grad_gram: Float[Array, "n n"]


@exact_products
def likelihood_terms(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> LikelihoodTerms:
    """`log_likelihood` with its derivative with respect to G, from one factorization of the lower triangle of G."""
    # G = L L', a = G^-1 y = L^-T (L^-1 y), y' G^-1 y = |L^-1 y|^2.
    factor = lax.linalg.cholesky(gram, symmetrize_input=False)
    inverse = inverse_triangular(factor)
    whitened = inverse @ targets
    weights = inverse.T @ whitened
    value = -whitened @ whitened / 2 - half_log_det(factor) - 0.5 * targets.shape[0] * LOG_2PI
    return LikelihoodTerms(value, weights, inverse, (jnp.outer(weights, weights) - crossproduct(inverse)) / 2)


@exact_products
def average_information(inverse: Float[Array, "n n"], gradients: Float[Array, "n p"]) -> Float[Array, "p p"]:
    """(G_i a)' G^-1 (G_j a) / 2, the average of the observed and the expected information on hyperparameters i and j.

    Gilmour, Thompson & Cullis (1995), eq. 6. It is positive semidefinite. It takes O(n^2) time per hyperparameter,
    where either information alone needs a product of matrices. It omits the second derivatives of G.

    Args:
        inverse: L^-1, with the Cholesky factor L of G, as in `likelihood_terms`.
        gradients: the columns G_i a, with a = G^-1 y and G_i the derivative of G with respect to hyperparameter i.
    """
    whitened = inverse @ gradients
    return whitened.T @ whitened / 2


def greatest_log_likelihood(n: int | Int[AnyArray, ""], noise_variance: ArrayLike) -> Float[AnyArray, ""]:
    """-n log(2 pi noise) / 2: no targets have a greater log N(y; 0, G) if G is at least noise I.

    >>> round(greatest_log_likelihood(2, 1.0).item(), 4)
    -1.8379
    """
    xp = np if isinstance(noise_variance, np.ndarray | np.generic) else jnp
    log_noise = xp.log(xp.asarray(noise_variance))
    return -0.5 * xp.asarray(n, log_noise.dtype) * (LOG_2PI + log_noise)


@exact_products
def posterior(gram: Float[AnyArray, "n n"], targets: Float[AnyArray, " n"]) -> Posterior:
    """The posterior given all rows; `gram` includes the noise on its diagonal."""
    # weights = L^-T L^-1 y = G^-1 y.
    shrink = inverse_factor(gram)
    return Posterior(weights=shrink.T @ (shrink @ targets), shrink=shrink, widen=None)


@exact_products
def predict(
    posterior: Posterior, cross: Float[AnyArray, "*p m"], prior_variance: Float[AnyArray, "*p"]
) -> tuple[Float[AnyArray, "*p"], Float[AnyArray, "*p"]]:
    """Latent means and variances at one point, or at several; RIO, eq. 5 and 6.

    Args:
        posterior: the result of `posterior` or `sparse_gp.posterior`.
        cross: the points' covariances with the conditioning points.
        prior_variance: the points' covariances with themselves.
    """
    known = cross @ posterior.shrink.T
    variance = prior_variance - (known**2).sum(-1)
    if posterior.widen is not None:
        variance = variance + ((cross @ posterior.widen.T) ** 2).sum(-1)
    return cross @ posterior.weights, namespace(variance).maximum(variance, 0)


@exact_products
def conditional(
    gram: Float[Array, "k k"], cross: Float[Array, " k"], targets: Float[Array, " k"], prior_variance: Scalar
) -> tuple[Scalar, Scalar]:
    """Latent mean and variance at one point given few rows, without a posterior to keep; RIO, eq. 5 and 6.

    Args:
        gram: the rows' covariance, with the noise on its diagonal.
        cross: the point's covariances with the rows.
        targets: of the rows.
        prior_variance: the point's covariance with itself.
    """
    # The derivatives of `solve` are solves with the same factor. Derivatives of a factorization would take most of the
    # time. mean = c'G^-1 y, variance = prior - c'G^-1 c.
    shares = solve(gram, cross, assume_a="pos")
    return shares @ targets, jnp.maximum(prior_variance - shares @ cross, 0)


def leave_one_out(posterior: Posterior) -> LeaveOneOut:
    """Errors [G^-1 y]_i / [G^-1]_ii and variances 1 / [G^-1]_ii; Rasmussen & Williams (2006), eq. 5.12.

    Args:
        posterior: the exact posterior given the rows.
    """
    precision = column_squares(posterior.shrink)
    return LeaveOneOut(posterior.weights / precision, 1 / precision)


@exact_products
def log_det_and_fit(gram: Float[AnyArray, "n n"], targets: Float[AnyArray, " n"]) -> tuple[Scalar, Scalar]:
    """log|G| / 2 and y' G^-1 y / 2."""
    return (_log_det_and_fit if namespace(gram) is np else _differentiable)(gram, targets)


def _log_det_and_fit(gram: Float[AnyArray, "n n"], targets: Float[AnyArray, " n"]) -> tuple[Scalar, Scalar]:
    factor = cholesky(gram)
    whitened = solve_lower(factor, targets[:, None])[:, 0]
    return half_log_det(factor), whitened @ whitened / 2


_differentiable = jax.custom_jvp(_log_det_and_fit)


@_differentiable.defjvp
@exact_products
def _log_det_and_fit_jvp(primals, tangents):
    gram, targets = primals
    gram_dot, targets_dot = tangents
    # Let a = G^-1 y. Then d log|G| = tr(G^-1 dG) and d (y'a) / 2 = a'dy - a'dG a / 2. The derivative of
    # `inverse_factor`, which second derivatives need, consists of products of matrices.
    inverse = inverse_factor(gram)
    whitened = inverse @ targets
    weights = inverse.T @ whitened
    log_det_dot = jnp.sum(crossproduct(inverse) * gram_dot) / 2
    fit_dot = weights @ targets_dot - jnp.sum(jnp.outer(weights, weights) * gram_dot) / 2
    return (-half_log_det(inverse), whitened @ whitened / 2), (log_det_dot, fit_dot)
