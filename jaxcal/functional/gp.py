"""Gaussian-process algebra on Gram matrices: exact, and sparse with inducing points.

Functions here know no kernel: they take the matrices that a kernel gives. A matrix that will be factorised
must come with its noise or jitter already on the diagonal (`add_diagonal`).

- `exact_log_likelihood`: log p(y), Rasmussen & Williams (2006), eq. 2.30; eq. 4 of RIO, whose print lacks an inverse.
- `collapsed_bound`: the lower bound on it that is left when the optimal q(u) is put into the sparse variational
  bound, Titsias (2009), eq. 9. It is what SVGP's bound reaches for a Gaussian likelihood, without its parameters.
- `exact_posterior`, `sparse_posterior`, `predict`: eq. 5 and 6 of RIO, latent (without the noise).
- `greedy_rows`: inducing points by conditional variance (pivoted Cholesky), Burt, Rasmussen & van der Wilk (2020).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Int

_LOG_2PI = 1.8378770664093453


class Posterior(NamedTuple):
    """A Gaussian process after data, as `predict` needs it.

    With k the covariances of a point with the m conditioning points (the training rows, or the inducing points):
    mean = k . weights, variance = prior - |shrink k|^2 + |widen k|^2.

    Attributes:
        weights: [m].
        shrink: [m, m], the inverse Cholesky factor of the conditioning points' covariance.
        widen: [m, m], what is still unknown at the inducing points; None for an exact posterior.
    """

    weights: Float[Array, " m"]
    shrink: Float[Array, "m m"]
    widen: Float[Array, "m m"] | None


def squared_exponential(
    a: Float[Array, "n d"], b: Float[Array, "m d"], lengthscale: Float[Array, ""] | Float[Array, " d"]
) -> Float[Array, "n m"]:
    """exp(-|a - b|^2 / (2 l^2)) for every pair of rows, through one matrix product; RIO, eq. 3.

    >>> import jax.numpy as jnp
    >>> round(squared_exponential(jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.asarray(1.0)).item(), 4)
    0.3679
    """
    # Distances do not change with the origin, and products of small numbers cancel less.
    origin = jnp.mean(b, axis=0, keepdims=True)
    scale = jnp.broadcast_to(lengthscale, (1, a.shape[1]))
    a, b = (a - origin) / scale, (b - origin) / scale
    squared = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :] - 2 * a @ b.T
    return jnp.exp(-0.5 * jnp.maximum(squared, 0))


def add_diagonal(matrix: Float[Array, "n n"], value: Float[Array, ""]) -> Float[Array, "n n"]:
    """The matrix with `value` added along its diagonal: noise, or jitter."""
    return matrix + value * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


@jax.custom_jvp
def exact_log_likelihood(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> Float[Array, ""]:
    """log N(y; 0, G) = -y' G^-1 y / 2 - log|G| / 2 - n log(2 pi) / 2, with G = K + noise I.

    Rasmussen & Williams (2006), eq. 2.30. The derivative is the closed form of their eq. 5.9, which needs one
    inverse of a triangular matrix: half the time of differentiating through the factorisation. Not a number
    where G is not positive definite.

    >>> import jax.numpy as jnp
    >>> round(exact_log_likelihood(jnp.eye(2), jnp.zeros(2)).item(), 4)
    -1.8379
    """
    factor = jnp.linalg.cholesky(gram)
    return _log_density(factor, solve_triangular(factor, targets, lower=True))


@exact_log_likelihood.defjvp
def _exact_log_likelihood_jvp(primals, tangents):
    gram, targets = primals
    gram_dot, targets_dot = tangents
    factor = jnp.linalg.cholesky(gram)
    inverse = _inverse(factor)
    whitened = inverse @ targets
    weights = inverse.T @ whitened
    slope = 0.5 * (jnp.outer(weights, weights) - inverse.T @ inverse)
    return _log_density(factor, whitened), jnp.sum(slope * gram_dot) - weights @ targets_dot


def collapsed_bound(
    gram_zz: Float[Array, "m m"],
    gram_zx: Float[Array, "m n"],
    prior_variance: Float[Array, " n"],
    targets: Float[Array, " n"],
    noise_variance: Float[Array, ""],
) -> Float[Array, ""]:
    """log N(y; 0, Q + noise I) - tr(K - Q) / (2 noise), with Q = K_xz K_zz^-1 K_zx.

    Titsias (2009), eq. 9: a lower bound on `exact_log_likelihood`, equal to it when the inducing points are
    the rows. O(n m^2).

    Args:
        gram_zz: covariance of the inducing points, with jitter on its diagonal.
        gram_zx: covariances of the inducing points with the rows.
        prior_variance: the kernel's value at each row with itself.
        targets: the rows' targets, of mean zero.
        noise_variance: the likelihood's variance.
    """
    _, root, capacity, whitened = _condition(gram_zz, gram_zx, targets, noise_variance)
    fit = (targets @ targets / noise_variance - whitened @ whitened) / 2
    gap = (jnp.sum(prior_variance) / noise_variance - jnp.sum(root * root)) / 2
    log_det = jnp.sum(jnp.log(jnp.diagonal(capacity)))
    return -fit - gap - log_det - targets.shape[0] * (_LOG_2PI + jnp.log(noise_variance)) / 2


def exact_posterior(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> Posterior:
    """The posterior given all rows; `gram` holds the noise on its diagonal."""
    shrink = _inverse(jnp.linalg.cholesky(gram))
    return Posterior(weights=shrink.T @ (shrink @ targets), shrink=shrink, widen=None)


def sparse_posterior(
    gram_zz: Float[Array, "m m"],
    gram_zx: Float[Array, "m n"],
    targets: Float[Array, " n"],
    noise_variance: Float[Array, ""],
) -> Posterior:
    """The posterior through the inducing points under the optimal q(u), Titsias (2009), eq. 6 and 10.

    Arguments as in `collapsed_bound`.
    """
    factor, _, capacity, whitened = _condition(gram_zz, gram_zx, targets, noise_variance)
    shrink = _inverse(factor)
    widen = solve_triangular(capacity, shrink, lower=True)
    return Posterior(weights=widen.T @ whitened, shrink=shrink, widen=widen)


def predict(
    posterior: Posterior, cross: Float[Array, " m"], prior_variance: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Latent mean and variance at one point; RIO, eq. 5 and 6.

    Args:
        posterior: what `exact_posterior` or `sparse_posterior` gave.
        cross: the point's covariances with the conditioning points.
        prior_variance: the point's covariance with itself.
    """
    known = posterior.shrink @ cross
    variance = prior_variance - known @ known
    if posterior.widen is not None:
        unknown = posterior.widen @ cross
        variance = variance + unknown @ unknown
    return cross @ posterior.weights, jnp.maximum(variance, 0)


def greedy_rows(
    covariances_with: Callable[[Int[Array, ""]], Float[Array, " n"]],
    prior_variance: Float[Array, " n"],
    num_rows: int,
) -> Int[Array, " m"]:
    """Row numbers chosen one by one, each the row whose variance given those before it is the largest.

    Pivoted Cholesky, stopped at `num_rows`: Burt, Rasmussen & van der Wilk (2020), algorithm 1 without its
    sampling. No row is chosen twice. O(n m^2) time, O(n m) memory.

    Args:
        covariances_with: gives the covariances of a row, named by its number, with all rows.
        prior_variance: the kernel's value at each row with itself.
        num_rows: how many to choose, at most n.
    """
    n, dtype = prior_variance.shape[0], prior_variance.dtype
    negligible = jnp.finfo(dtype).eps * jnp.max(prior_variance)

    def choose(step, state):
        rows, factor, variance = state
        row = jnp.argmax(variance)
        left = variance[row]
        # Where only duplicates are left nothing is explained any more, and the next rows are as good as any.
        scale = jnp.where(left > negligible, 1 / jnp.sqrt(jnp.maximum(left, negligible)), 0)
        column = scale * (covariances_with(row) - factor[:, row] @ factor)
        variance = (variance - column**2).at[row].set(-jnp.inf)
        return rows.at[step].set(row), factor.at[step].set(column), variance

    start = (jnp.zeros(num_rows, int), jnp.zeros((num_rows, n), dtype), prior_variance)
    return jax.lax.fori_loop(0, num_rows, choose, start)[0]


def _condition(gram_zz, gram_zx, targets, noise_variance):
    """L of K_zz; A = L^-1 K_zx / noise_std; M of I + A A'; and M^-1 A y / noise_std."""
    noise_std = jnp.sqrt(noise_variance)
    factor = jnp.linalg.cholesky(gram_zz)
    root = solve_triangular(factor, gram_zx, lower=True) / noise_std
    capacity = jnp.linalg.cholesky(add_diagonal(root @ root.T, jnp.asarray(1, root.dtype)))
    whitened = solve_triangular(capacity, root @ targets, lower=True) / noise_std
    return factor, root, capacity, whitened


def _log_density(factor: Float[Array, "n n"], whitened: Float[Array, " n"]) -> Float[Array, ""]:
    log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -0.5 * whitened @ whitened - log_det - 0.5 * whitened.shape[0] * _LOG_2PI


def _inverse(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    return solve_triangular(factor, jnp.eye(factor.shape[0], dtype=factor.dtype), lower=True)
