"""Gaussian-process algebra on Gram matrices: exact, and sparse with inducing points.

The functions here know no kernel: they take the matrices that a kernel gives. A matrix that will be factorized
must come with its noise or jitter already on the diagonal (`add_diagonal`).

- `exact_log_likelihood`: log p(y), Rasmussen & Williams (2006), eq. 2.30; eq. 4 of RIO, whose print lacks an inverse.
- `exact_terms`: the same with its derivative by the covariance; `average_information`: the curvature that goes with it,
  Gilmour, Thompson & Cullis (1995).
- `greatest_log_likelihood`: what no log p(y) can exceed.
- `row_sums`: the one pass over the rows that `collapsed_bound` and `sparse_posterior` need, in chunks, on one device or
  distributed over many.
- `collapsed_bound`: the lower bound on it that is left when the optimal q(u) is put into the sparse variational
  bound, Titsias (2009), eq. 9. It is what SVGP's bound reaches for a Gaussian likelihood, without its parameters.
- `variational_bound`: the same bound at any q(u), which may be estimated from a minibatch, Hensman, Fusi & Lawrence
  (2013), eq. 4.
- `exact_posterior`, `sparse_posterior`, `predict`: eq. 5 and 6 of RIO, latent (without the noise); `conditional`: the
  same at one point given few rows.
- `explained_variance`, `leave_one_out_variance`: the variance of new rows, and of each row given all others, as
  functions of the kernel's matrices, with closed-form derivatives.
- `exact_leave_one_out`, `sparse_leave_one_out`: errors and variances of each row given all others, from a posterior.
- `greedy_rows`: inducing points by conditional variance (pivoted Cholesky), Burt, Rasmussen & van der Wilk (2020).
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

_LOG_2PI = 1.8378770664093453
# Rows whose covariances with the inducing points are held at once: they should fit in a core's cache.
_CHUNK = 256
# Triangular matrices up to this size are not halved any further.
_LEAF = 256


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

    @property
    def is_finite(self) -> Bool[Array, ""]:
        """Whether the covariances could be factorized."""
        return jnp.isfinite(self.weights).all() & jnp.isfinite(self.shrink).all()


def add_diagonal(matrix: Float[Array, "n n"], value: ArrayLike) -> Float[Array, "n n"]:
    """The matrix with `value` added along its diagonal: noise, or jitter; one for all rows, or one each."""
    return matrix + jnp.reshape(value, (-1, 1)) * jnp.eye(matrix.shape[0], dtype=matrix.dtype)


def exact_log_likelihood(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> Float[Array, ""]:
    """log N(y; 0, G) = -y' G^-1 y / 2 - log|G| / 2 - n log(2 pi) / 2, with G = K + noise I.

    Rasmussen & Williams (2006), eq. 2.30. The derivative is the closed form of their eq. 5.9, which needs one
    inverse of a triangular matrix: half the time of differentiating through the factorization. Not a number
    where G is not positive definite.

    >>> import jax.numpy as jnp
    >>> round(exact_log_likelihood(jnp.eye(2), jnp.zeros(2)).item(), 4)
    -1.8379
    """
    log_det, fit = _halves(gram, targets)
    return -fit - log_det - 0.5 * targets.shape[0] * _LOG_2PI


class ExactTerms(NamedTuple):
    """log p(y) and what its derivatives need.

    Attributes:
        value: log N(y; 0, G).
        weights: [n], a = G^-1 y.
        inverse: [n, n], L^-1, of the Cholesky factor of G.
        by_gram: [n, n], (a a' - G^-1) / 2, the derivative by G; Rasmussen & Williams (2006), eq. 5.9.
    """

    value: Float[Array, ""]
    weights: Float[Array, " n"]
    inverse: Float[Array, "n n"]
    by_gram: Float[Array, "n n"]


def exact_terms(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> ExactTerms:
    """`exact_log_likelihood` with its derivative by the covariance, from one factorization."""
    factor = jnp.linalg.cholesky(gram)
    inverse = _inverse(factor)
    whitened = inverse @ targets
    weights = inverse.T @ whitened
    value = -whitened @ whitened / 2 - _half_log_det(factor) - 0.5 * targets.shape[0] * _LOG_2PI
    return ExactTerms(value, weights, inverse, (jnp.outer(weights, weights) - _crossproduct(inverse)) / 2)


def average_information(inverse: Float[Array, "n n"], gradients: Float[Array, "n p"]) -> Float[Array, "p p"]:
    """(G_i a)' G^-1 (G_j a) / 2, the average of the observed and the expected information on hyperparameters i and j.

    Gilmour, Thompson & Cullis (1995), eq. 6. Never negative; O(n^2) a hyperparameter, where either of the two would
    need a product of matrices. It leaves out the second derivatives of G.

    Args:
        inverse: L^-1, of the Cholesky factor of G, as `exact_terms` has it.
        gradients: the columns G_i a, with a = G^-1 y and G_i the derivative of G by hyperparameter i.
    """
    whitened = inverse @ gradients
    return whitened.T @ whitened / 2


def greatest_log_likelihood(n: int, noise_variance: ArrayLike) -> Float[Array, ""]:
    """-n log(2 pi noise) / 2: no targets have a greater log N(y; 0, G) where G is at least noise I.

    >>> round(greatest_log_likelihood(2, 1.0).item(), 4)
    -1.8379
    """
    return -0.5 * n * (_LOG_2PI + jnp.log(jnp.asarray(noise_variance)))


class RowSums(NamedTuple):
    """All that n rows say about m inducing points: sums over the rows, each weighted by its precision p.

    Attributes:
        outer: [m, m], the sum of p a a', with a = L^-1 k, k a row's covariances with the inducing points, K_zz = L L'.
        cross: [m], the sum of p y a.
        prior: the sum of p k(x, x).
        square: the sum of p y^2.
        log_precision: the sum of log p.
        num_rows: how many they are.
    """

    outer: Float[Array, "m m"]
    cross: Float[Array, " m"]
    prior: Float[Array, ""]
    square: Float[Array, ""]
    log_precision: Float[Array, ""]
    num_rows: ArrayLike


def row_sums(
    covariances: Callable[[PyTree], Float[Array, "m c"]],
    whiten: Float[Array, "m m"],
    rows: PyTree[Float[Array, "n ..."]],
    prior_variance: Float[Array, " n"],
    targets: Float[Array, " n"],
    precisions: Float[Array, " n"] | None = None,
    mesh: Mesh | None = None,
) -> RowSums:
    """The sums that the sparse bound and posterior need of the rows, in one pass over chunks of them.

    O(n m^2) time; beyond the rows themselves O(m chunk) memory, for the derivative too, which passes over the rows
    once more. Whitened chunk by chunk: sums of k k', whitened afterwards, lose half of the digits.

    Args:
        covariances: a Module: the covariances of the inducing points with some rows.
        whiten: L^-1, of the covariance of the inducing points with jitter on its diagonal: `inverse_factor`.
        rows: what `covariances` takes: arrays with a leading axis of rows.
        prior_variance: the kernel's value at each row with itself.
        targets: the rows' targets, of mean zero.
        precisions: the rows' noise precision relative to that of the noise variance given later; None for equal noise.
        mesh: devices over whose axes the rows are distributed; None for wherever they are.
    """
    n = targets.shape[0]
    weights = jnp.ones_like(targets) if precisions is None else precisions
    if mesh is None:
        outer, cross = _streamed_sums((covariances, whiten, weights), rows, targets)
    else:
        outer, cross = _distributed_sums((covariances, whiten, weights), rows, targets, mesh)
    log_precision = jnp.zeros((), targets.dtype) if precisions is None else jnp.sum(jnp.log(precisions))
    return RowSums(
        outer=outer,
        cross=cross,
        prior=weights @ prior_variance,
        square=weights @ targets**2,
        log_precision=log_precision,
        num_rows=n,
    )


def collapsed_bound(sums: RowSums, noise_variance: Float[Array, ""]) -> Float[Array, ""]:
    """log N(y; 0, Q + noise P^-1) - tr(P (K - Q)) / (2 noise), with Q = K_xz K_zz^-1 K_zx and precisions P.

    Titsias (2009), eq. 9: a lower bound on `exact_log_likelihood`, equal to it when the inducing points are
    the rows.

    Args:
        sums: what `row_sums` gave.
        noise_variance: the likelihood's variance, of a row of precision 1.
    """
    log_det, explained = _halves(_capacity(sums, noise_variance), sums.cross / noise_variance)
    fit = sums.square / noise_variance / 2 - explained
    # Rounding must not make the inducing points know more than there is.
    gap = jnp.maximum(sums.prior - jnp.trace(sums.outer), 0) / noise_variance / 2
    log_noise = sums.num_rows * (_LOG_2PI + jnp.log(noise_variance)) - sums.log_precision
    return -fit - gap - log_det - log_noise / 2


def variational_bound(
    sums: RowSums,
    mean: Float[Array, " m"],
    root: Float[Array, "m m"],
    noise_variance: Float[Array, ""],
    scale: Float[Array, ""] | float = 1.0,
) -> Float[Array, ""]:
    """scale * sum over rows of E_q log N(y; f(x), noise / p) - KL(q(v) || N(0, I)), with u = L v, q(v) = N(mean, R R').

    Hensman, Fusi & Lawrence (2013), eq. 4, in whitened coordinates. At most `collapsed_bound`, which it equals where
    q is optimal: R R' = (I + outer / noise)^-1, mean = R R' cross / noise.

    Args:
        sums: what `row_sums` gave of all rows, or of a minibatch.
        mean: the mean of q(v).
        root: R, a triangular square root of its covariance, of a positive diagonal.
        noise_variance: the likelihood's variance, of a row of precision 1.
        scale: all rows by those of the minibatch: with it the bound of a random minibatch is unbiased.
    """
    fit = sums.square - 2 * mean @ sums.cross + mean @ sums.outer @ mean
    unknown = sums.prior - jnp.trace(sums.outer) + jnp.sum(root * (sums.outer @ root))
    log_noise = sums.num_rows * (_LOG_2PI + jnp.log(noise_variance)) - sums.log_precision
    expected = -((fit + unknown) / noise_variance + log_noise) / 2
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(root)))
    divergence = (mean @ mean + jnp.sum(root * root) - root.shape[0] - log_det) / 2
    return scale * expected - divergence


def exact_posterior(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> Posterior:
    """The posterior given all rows; `gram` holds the noise on its diagonal."""
    shrink = inverse_factor(gram)
    return Posterior(weights=shrink.T @ (shrink @ targets), shrink=shrink, widen=None)


def sparse_posterior(sums: RowSums, whiten: Float[Array, "m m"], noise_variance: Float[Array, ""]) -> Posterior:
    """The posterior through the inducing points under the optimal q(u), Titsias (2009), eq. 6 and 10.

    Arguments as in `row_sums` and `collapsed_bound`.
    """
    capacity = jnp.linalg.cholesky(_capacity(sums, noise_variance))
    whitened = solve_triangular(capacity, sums.cross, lower=True) / noise_variance
    widen = solve_triangular(capacity, whiten, lower=True)
    return Posterior(weights=widen.T @ whitened, shrink=whiten, widen=widen)


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


def conditional(
    gram: Float[Array, "k k"], cross: Float[Array, " k"], targets: Float[Array, " k"], prior_variance: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Latent mean and variance at one point given few rows, without a posterior to keep; RIO, eq. 5 and 6.

    Args:
        gram: the rows' covariance, with the noise on its diagonal.
        cross: the point's covariances with the rows.
        targets: of the rows.
        prior_variance: the point's covariance with itself.
    """
    factor = jnp.linalg.cholesky(gram)
    known, whitened = solve_triangular(factor, jnp.stack([cross, targets], axis=1), lower=True).T
    return known @ whitened, jnp.maximum(prior_variance - known @ known, 0)


class LeaveOneOut(NamedTuple):
    """What a process says of each of its own rows given all others, at the same hyperparameters.

    Attributes:
        error: [n], target minus mean.
        variance: [n], of the target: with the noise.
    """

    error: Float[Array, " n"]
    variance: Float[Array, " n"]

    @property
    def standardized(self) -> Float[Array, " n"]:
        """Errors over their standard deviations."""
        return self.error / jnp.sqrt(self.variance)


def exact_leave_one_out(posterior: Posterior) -> LeaveOneOut:
    """Errors [G^-1 y]_i / [G^-1]_ii and variances 1 / [G^-1]_ii; Rasmussen & Williams (2006), eq. 5.12.

    Args:
        posterior: what `exact_posterior` gave of the rows.
    """
    precision = jnp.sum(posterior.shrink**2, axis=0)
    return LeaveOneOut(posterior.weights / precision, 1 / precision)


def sparse_leave_one_out(
    posterior: Posterior,
    cross: Float[Array, " m"],
    target: Float[Array, ""],
    prior_variance: Float[Array, ""],
    noise_variance: Float[Array, ""],
) -> LeaveOneOut:
    """Error and variance of one row given all others, the inducing points staying where they are.

    The row's part in what is known is of rank one: with h = k'S k the variance that the inducing values, of covariance
    S, leave in its latent value, without it they leave h / (1 - h / noise), and its error is 1 / (1 - h / noise) times
    as large.

    Args:
        posterior: what `sparse_posterior` gave of all rows, of equal noise.
        cross: the row's covariances with the inducing points.
        target: of the row.
        prior_variance: the row's covariance with itself.
        noise_variance: the likelihood's variance.
    """
    known, unknown = posterior.shrink @ cross, cast(Array, posterior.widen) @ cross
    spread = unknown @ unknown
    # Rounding must not take more out than there is.
    left = jnp.maximum(1 - spread / noise_variance, jnp.finfo(cross.dtype).eps)
    latent = jnp.maximum(prior_variance - known @ known + spread / left, 0)
    return LeaveOneOut((target - cross @ posterior.weights) / left, latent + noise_variance)


@jax.custom_vjp
def explained_variance(gram: Float[Array, "n n"], cross: Float[Array, "n m"]) -> Float[Array, " m"]:
    """k'G^-1 k of every column k: by how much n rows lower the variance of m others; `gram` holds the noise.

    With A = G^-1 k and the cotangent w of the result, that of G is -A diag(w) A', and that of k 2 A diag(w): half
    of the time of differentiating through the factorization and the two triangular solves.

    >>> import jax.numpy as jnp
    >>> explained_variance(2 * jnp.eye(2), jnp.ones((2, 1))).round(3).tolist()
    [1.0]
    """
    return _explained_variance_fwd(gram, cross)[0]


def _explained_variance_fwd(gram, cross):
    factor = jnp.linalg.cholesky(gram)
    whitened = solve_triangular(factor, cross, lower=True)
    return jnp.sum(whitened**2, axis=0), (factor, whitened)


def _explained_variance_bwd(kept, cotangent):
    factor, whitened = kept
    weights = solve_triangular(factor, whitened, lower=True, trans=1)
    weighted = weights * cotangent[None]
    return -weighted @ weights.T, 2 * weighted


explained_variance.defvjp(_explained_variance_fwd, _explained_variance_bwd)


@jax.custom_vjp
def leave_one_out_variance(gram: Float[Array, "n n"]) -> Float[Array, " n"]:
    """1 / [G^-1]_ii: the variance of each row's target given those of all others; `gram` holds the noise.

    With P = G^-1 and the cotangent w of the result, that of G is P diag(w / P_ii^2) P.

    >>> import jax.numpy as jnp
    >>> leave_one_out_variance(2 * jnp.eye(2)).round(3).tolist()
    [2.0, 2.0]
    """
    return _leave_one_out_variance_fwd(gram)[0]


def _leave_one_out_variance_fwd(gram):
    inverse = _inverse(jnp.linalg.cholesky(gram))
    variance = 1 / jnp.sum(inverse**2, axis=0)
    return variance, (inverse, variance)


def _leave_one_out_variance_bwd(kept, cotangent):
    inverse, variance = kept
    precision = _crossproduct(inverse)
    return ((precision * (cotangent * variance**2)[None]) @ precision,)


leave_one_out_variance.defvjp(_leave_one_out_variance_fwd, _leave_one_out_variance_bwd)


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
    return lax.fori_loop(0, num_rows, choose, start)[0]


@jax.custom_jvp
def inverse_factor(gram: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """L^-1, of the Cholesky factor L of a matrix; its derivative by G is L^-1 -> -phi(L^-1 dG L^-T) L^-1.

    phi takes the lower triangle with half of the diagonal.
    """
    return _inverse(jnp.linalg.cholesky(gram))


@inverse_factor.defjvp
def _inverse_factor_jvp(primals, tangents):
    inverse = inverse_factor(*primals)
    half = jnp.tril(jnp.ones_like(inverse)) - 0.5 * jnp.eye(inverse.shape[0], dtype=inverse.dtype)
    return inverse, -(half * (inverse @ tangents[0] @ inverse.T)) @ inverse


def _capacity(sums: RowSums, noise_variance) -> Float[Array, "m m"]:
    """I + A A' / noise."""
    return add_diagonal(sums.outer / noise_variance, 1)


@eqx.filter_custom_vjp
def _streamed_sums(learned, rows, targets):
    """Outer and cross of `RowSums`; `learned` is (covariances, whiten, precisions)."""
    covariances, whiten, precisions = learned

    def add(sums, chunk):
        rows, targets, precisions = chunk
        root = whiten @ covariances(rows)
        weighted = root * precisions[None]
        return (sums[0] + weighted @ root.T, sums[1] + weighted @ targets), None

    nothing = jnp.zeros_like(whiten), jnp.zeros_like(whiten[0])
    return lax.scan(add, nothing, _chunks((rows, targets, precisions)))[0]


@_streamed_sums.def_fwd
def _streamed_sums_fwd(perturbed, learned, rows, targets):
    del perturbed
    sums = _streamed_sums(learned, rows, targets)
    return sums, sums


@_streamed_sums.def_bwd
def _streamed_sums_bwd(sums, cotangents, perturbed, learned, rows, targets):
    """One more pass over the rows, with the cotangents of the sums known: no chunk's covariances are kept.

    With G the symmetrized cotangent of the outer sum and g that of the cross sum, M = L^-T G L^-1 and u = L^-T g, the
    cotangent of a row's covariances k is p (M k + u y), and that of its precision k'M k / 2 + y u'k. M has large
    entries that cancel: in float64 that costs five digits of sixteen, in float32 all, so that M k is taken in two
    products there.
    """
    covariances, whiten, precisions = learned
    outer, cross = sums
    # A sum that nothing depends on has no cotangent.
    cotangents = [
        jnp.zeros_like(total) if cotangent is None else cotangent
        for cotangent, total in zip(cotangents, sums, strict=True)
    ]
    by_outer, by_cross = cotangents[0] + cotangents[0].T, cotangents[1]
    half, by_row = whiten.T @ by_outer, whiten.T @ by_cross
    by_pair = half @ whiten if whiten.dtype == jnp.float64 else None
    varied, fixed = eqx.partition(covariances, perturbed[0])
    varied = jax.tree.map(jnp.asarray, varied)  # outside of jit a hyperparameter may be a Python number

    def add(total, chunk):
        rows, targets, precisions = chunk
        gram, pull = eqx.filter_vjp(lambda varied: eqx.combine(varied, fixed)(rows), varied)
        pairs = half @ (whiten @ gram) if by_pair is None else by_pair @ gram
        (cotangent,) = pull((pairs + by_row[:, None] * targets[None]) * precisions[None])
        by_precision = None
        if perturbed[2]:
            by_precision = jnp.sum(gram * pairs, axis=0) / 2 + targets * (by_row @ gram)
        return jax.tree.map(jnp.add, total, cotangent), by_precision

    nothing = jax.tree.map(jnp.zeros_like, varied)
    by_covariances, by_precision = lax.scan(add, nothing, _chunks((rows, targets, precisions)))
    if by_precision is not None:
        by_precision = by_precision.reshape(-1)[: precisions.shape[0]]
    by_root = by_outer @ outer + jnp.outer(by_cross, cross)
    return by_covariances, solve_triangular(whiten, by_root.T, lower=True).T, by_precision


def _distributed_sums(learned, rows, targets, mesh: Mesh):
    """As `_streamed_sums`, every device of the mesh summing over its part of the rows."""
    (covariances, whiten, precisions), spread = learned, PartitionSpec(mesh.axis_names)
    arrays, static = eqx.partition(covariances, eqx.is_array)
    # Every device takes the same number of rows.
    spread_out = _padded((rows, targets, precisions), mesh.size)
    if AxisType.Explicit in mesh.axis_types:  # as `jax.make_mesh` gives them: the rows go where they are told to
        spread_out = jax.tree.map(lambda a: jax.reshard(a, NamedSharding(mesh, spread)), spread_out)

    def local(arrays, whiten, rows, targets, precisions):
        # Every device has its own cotangent of what all of them share: the transpose of this cast adds these up.
        arrays, whiten = lax.pcast((arrays, whiten), mesh.axis_names, to="varying")
        sums = _streamed_sums((eqx.combine(arrays, static), whiten, precisions), rows, targets)
        return lax.psum(sums, mesh.axis_names)

    specs = PartitionSpec(), PartitionSpec(), spread, spread, spread
    distributed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    # Outside of jit shard_map knows no derivative of a function with a rule of its own.
    return jax.jit(distributed)(arrays, whiten, *spread_out)


def _chunks(arrays: PyTree[Array]) -> PyTree[Array]:
    """Rows as chunks [chunks, rows a chunk, ...], of nearly equal size."""
    n = jax.tree.leaves(arrays)[0].shape[0]
    chunks = -(-n // _CHUNK)
    return jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), _padded(arrays, chunks))


def _padded(arrays: tuple[PyTree[Array], Array, Array], multiple: int) -> PyTree[Array]:
    """(rows, targets, precisions) with the last row repeated at precision zero, up to a multiple of rows."""
    rows, targets, precisions = arrays
    missing = -targets.shape[0] % multiple
    if not missing:
        return arrays
    repeat = lambda a: jnp.concatenate([a, jnp.repeat(a[-1:], missing, axis=0)])
    return jax.tree.map(repeat, rows), repeat(targets), jnp.concatenate([precisions, jnp.zeros(missing, targets.dtype)])


@jax.custom_jvp
def _halves(gram: Float[Array, "n n"], targets: Float[Array, " n"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """log|G| / 2 and y' G^-1 y / 2."""
    factor = jnp.linalg.cholesky(gram)
    whitened = solve_triangular(factor, targets, lower=True)
    return _half_log_det(factor), whitened @ whitened / 2


@_halves.defjvp
def _halves_jvp(primals, tangents):
    gram, targets = primals
    gram_dot, targets_dot = tangents
    factor = jnp.linalg.cholesky(gram)
    inverse = _inverse(factor)
    whitened = inverse @ targets
    weights = inverse.T @ whitened
    by_log_det = jnp.sum(_crossproduct(inverse) * gram_dot) / 2
    by_fit = weights @ targets_dot - jnp.sum(jnp.outer(weights, weights) * gram_dot) / 2
    return (_half_log_det(factor), whitened @ whitened / 2), (by_log_det, by_fit)


def _half_log_det(factor: Float[Array, "n n"]) -> Float[Array, ""]:
    # A sum over rows: the gather of a diagonal takes longer to compile.
    return jnp.sum(jnp.log(jnp.sum(factor * jnp.eye(factor.shape[0], dtype=factor.dtype), axis=1)))


def _inverse(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a lower triangular matrix: by halves, so that most of the work is products of matrices."""
    n = factor.shape[0]
    if n <= _LEAF:
        return solve_triangular(factor, jnp.eye(n, dtype=factor.dtype), lower=True)
    half = n // 2
    first, last = _inverse(factor[:half, :half]), _inverse(factor[half:, half:])
    corner = -last @ (factor[half:, :half] @ first)
    return jnp.block([[first, jnp.zeros_like(corner.T)], [corner, last]])


def _crossproduct(factor: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """X'X of a lower triangular X: by halves, which leaves out two thirds of the products, those with zeros."""
    n = factor.shape[0]
    if n <= _LEAF:
        return factor.T @ factor
    half = n // 2
    below, last = factor[half:, :half], factor[half:, half:]
    corner = last.T @ below
    return jnp.block([[_crossproduct(factor[:half, :half]) + below.T @ below, corner.T], [corner, _crossproduct(last)]])
