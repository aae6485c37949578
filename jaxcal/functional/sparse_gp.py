"""Sparse Gaussian processes: all rows are condensed to a few inducing points, as algebra on matrices.

- `row_sums`: the one pass over the rows that `collapsed_bound` and `posterior` need, in chunks, on one device or
  distributed over many.
- `collapsed_bound`: the sparse variational lower bound on log p(y) at the optimal q(u), Titsias (2009), eq. 9. It is
  the largest value of SVGP's bound for a Gaussian likelihood, without SVGP's parameters.
- `variational_bound`: the same bound at any q(u), Hensman, Fusi & Lawrence (2013), eq. 4. It may be estimated from a
  minibatch.
- `posterior`: the posterior under the optimal q(u), for `gp.predict`.
- `leave_one_out`: one row given all others.
- `greedy_rows`: inducing points by conditional variance (pivoted Cholesky), Burt, Rasmussen & van der Wilk (2020).
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxcal._numpy import AnyArray, namespace
from jaxcal._programs import exact_products
from jaxcal.functional._loops import carried, scan
from jaxcal.functional.gp import LOG_2PI, LeaveOneOut, Posterior, Scalar, log_det_and_fit
from jaxcal.functional.linalg import cholesky, solve_lower

# The number of rows whose covariances with the inducing points are held at once: they should fit in a core's cache.
_CHUNK = 256


class RowSums(NamedTuple):
    """Sums over n rows, each weighted by its precision p, that determine the bound and posterior of m inducing points.

    Let k be a row's covariances with the inducing points, K_zz = L L', and a = L^-1 k.

    Attributes:
        outer: [m, m], the sum of p a a'.
        cross: [m], the sum of p y a.
        prior: the sum of p k(x, x).
        square: the sum of p y^2.
        log_precision: the sum of log p.
        num_rows: the number n of rows.
    """

    outer: Float[AnyArray, "m m"]
    cross: Float[AnyArray, " m"]
    prior: Scalar
    square: Scalar
    log_precision: Scalar
    num_rows: ArrayLike


@exact_products
def row_sums(
    covariances: Callable[[PyTree], Float[AnyArray, "m c"]],
    whiten: Float[AnyArray, "m m"],
    rows: PyTree[Float[AnyArray, "n ..."]],
    prior_variance: Float[AnyArray, " n"],
    targets: Float[AnyArray, " n"],
    precisions: Float[AnyArray, " n"] | None = None,
    mesh: Mesh | None = None,
) -> RowSums:
    """The sums over rows that the sparse bound and posterior need, in one pass over chunks of the rows.

    This takes O(n m^2) time, and O(m chunk) memory beyond the rows themselves. The derivative passes over the rows once
    more, with no more memory. The covariances are whitened chunk by chunk, because sums of k k' lose half of the digits
    when they are whitened afterwards.

    Args:
        covariances: a Module, which maps some rows to the covariances of the inducing points with them.
        whiten: L^-1, the `inverse_factor` of the covariance of the inducing points with jitter on its diagonal.
        rows: the argument of `covariances`: arrays with a leading axis of rows.
        prior_variance: the kernel's value at each row with itself.
        targets: the rows' targets, of mean zero.
        precisions: the precision of each row's noise, relative to a common precision; None for equal noise.
        mesh: devices over whose axes the rows are distributed; None to keep the rows where they are.
    """
    n, xp = targets.shape[0], namespace(targets)
    weights = xp.ones_like(targets) if precisions is None else precisions
    if xp is np:
        outer, cross = _sums((covariances, whiten, rows, targets, weights))
    elif mesh is None:
        outer, cross = _streamed_sums((covariances, whiten, rows, targets, weights))
    else:
        outer, cross = _distributed_sums(covariances, whiten, rows, targets, weights, mesh)
    log_precision = xp.zeros((), targets.dtype) if precisions is None else xp.log(precisions).sum()
    return RowSums(
        outer=outer,
        cross=cross,
        prior=weights @ prior_variance,
        square=weights @ targets**2,
        log_precision=log_precision,
        num_rows=n,
    )


@exact_products
def collapsed_bound(sums: RowSums, noise_variance: Scalar) -> Scalar:
    """log N(y; 0, Q + noise P^-1) - tr(P (K - Q)) / (2 noise), with Q = K_xz K_zz^-1 K_zx and precisions P.

    Titsias (2009), eq. 9: a lower bound on `log_likelihood`, equal to it when the inducing points are
    the rows.

    Args:
        sums: the result of `row_sums`.
        noise_variance: the likelihood's variance, for a row of precision 1.
    """
    # B = I + outer / noise, log|Q + noise P^-1| = log|B| + log|noise P^-1|.
    log_det, explained = log_det_and_fit(_capacity(sums, noise_variance), sums.cross / noise_variance)
    # y'(Q + noise P^-1)^-1 y = square / noise - cross' B^-1 cross / noise^2.
    fit = sums.square / noise_variance / 2 - explained
    # tr(P (K - Q)) is not negative, and rounding must not make it so.
    xp = namespace(sums.cross)
    gap = xp.maximum(sums.prior - xp.trace(sums.outer), 0) / noise_variance / 2
    log_noise = sums.num_rows * (LOG_2PI + xp.log(noise_variance)) - sums.log_precision
    return -fit - gap - log_det - log_noise / 2


@exact_products
def variational_bound(
    sums: RowSums,
    mean: Float[Array, " m"],
    root: Float[Array, "m m"],
    noise_variance: Scalar,
    scale: Scalar | float = 1.0,
) -> Scalar:
    """scale * sum over rows of E_q log N(y; f(x), noise / p) - KL(q(v) || N(0, I)).

    Here u = L v, and q(v) = N(mean, R R'). It is eq. 4 of Hensman, Fusi & Lawrence (2013) in whitened coordinates. The
    bound is at most `collapsed_bound`. The two are equal where q is optimal: R R' = (I + outer / noise)^-1 and
    mean = R R' cross / noise.

    Args:
        sums: the result of `row_sums` for all rows, or for a minibatch.
        mean: the mean of q(v).
        root: R, a triangular square root of the covariance of q(v), with a positive diagonal.
        noise_variance: the likelihood's variance, for a row of precision 1.
        scale: the number of all rows over the number of rows of the minibatch. With this scale, the bound of a random
            minibatch is unbiased.
    """
    # sum of p E_q (y - f)^2 = fit + unknown: the squared errors of the mean, and the variances of f.
    fit = sums.square - 2 * mean @ sums.cross + mean @ sums.outer @ mean
    unknown = sums.prior - jnp.trace(sums.outer) + jnp.sum(root * (sums.outer @ root))
    log_noise = sums.num_rows * (LOG_2PI + jnp.log(noise_variance)) - sums.log_precision
    expected = -((fit + unknown) / noise_variance + log_noise) / 2
    # KL = (|mean|^2 + tr(R R') - m - log|R R'|) / 2.
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(root)))
    divergence = (mean @ mean + jnp.sum(root * root) - root.shape[0] - log_det) / 2
    return scale * expected - divergence


@exact_products
def posterior(sums: RowSums, whiten: Float[AnyArray, "m m"], noise_variance: Scalar) -> Posterior:
    """The posterior through the inducing points under the optimal q(u), Titsias (2009), eq. 6 and 10.

    The arguments are as in `row_sums` and `collapsed_bound`.
    """
    # B = C C', widen = C^-1 L^-1, weights = L^-T B^-1 cross / noise.
    capacity = cholesky(_capacity(sums, noise_variance))
    whitened = solve_lower(capacity, sums.cross[:, None])[:, 0] / noise_variance
    widen = solve_lower(capacity, whiten)
    return Posterior(weights=widen.T @ whitened, shrink=whiten, widen=widen)


@exact_products
def leave_one_out(
    posterior: Posterior,
    cross: Float[AnyArray, "*p m"],
    target: Float[AnyArray, "*p"],
    prior_variance: Float[AnyArray, "*p"],
    noise_variance: Float[AnyArray, "*p"],
) -> LeaveOneOut:
    """Error and variance of one row, or of several, given all others, with the same inducing points.

    A row changes the posterior by a term of rank one. Let h = |widen k|^2 be the variance of the row's latent value
    that comes from the inducing values. Let c = 1 - h / noise. Without the row, the variance is h / c, and the error is
    1 / c times as large.

    Args:
        posterior: the result of `posterior` for all rows.
        cross: the row's covariances with the inducing points.
        target: of the row.
        prior_variance: the row's covariance with itself.
        noise_variance: the likelihood's variance at the row.
    """
    xp = namespace(cross)
    known, unknown = cross @ posterior.shrink.T, cross @ cast(Array, posterior.widen).T
    spread = (unknown**2).sum(-1)
    # 1 - h / noise is positive, and rounding must not change that.
    left = xp.maximum(1 - spread / noise_variance, float(np.finfo(cross.dtype).eps))
    latent = xp.maximum(prior_variance - (known**2).sum(-1) + spread / left, 0)
    return LeaveOneOut((target - cross @ posterior.weights) / left, latent + noise_variance)


@exact_products
def greedy_rows(
    covariances_with: Callable[[Int[AnyArray, ""]], Float[AnyArray, " n"]],
    prior_variance: Float[AnyArray, " n"],
    num_rows: int,
) -> Int[AnyArray, " m"]:
    """Row numbers, chosen one by one: each row has the largest variance given the rows before it.

    This is pivoted Cholesky, stopped at `num_rows`: Burt, Rasmussen & van der Wilk (2020), algorithm 1 without
    its sampling. No row is chosen twice. It takes O(n m^2) time and O(n m) memory.

    Args:
        covariances_with: maps the number of a row to the row's covariances with all rows.
        prior_variance: the kernel's value at each row with itself.
        num_rows: how many to choose, at most n.
    """
    if namespace(prior_variance) is np:
        return _greedy_rows_on_host(covariances_with, prior_variance, num_rows)
    n, dtype = prior_variance.shape[0], prior_variance.dtype
    negligible = jnp.finfo(dtype).eps * jnp.max(prior_variance)

    def choose(step, state):
        rows, factor, variance = state
        row = jnp.argmax(variance)
        left = variance[row]
        # If only duplicates are left, they explain nothing more, and any of them may be next.
        scale = jnp.where(left > negligible, 1 / jnp.sqrt(jnp.maximum(left, negligible)), 0)
        # The next column of the Cholesky factor, and the variances given the rows so far.
        column = scale * (covariances_with(row) - factor[:, row] @ factor)
        variance = (variance - column**2).at[row].set(-jnp.inf)
        return rows.at[step].set(row), factor.at[step].set(column), variance

    start = (jnp.zeros(num_rows, int), jnp.zeros((num_rows, n), dtype), prior_variance)
    return lax.fori_loop(0, num_rows, choose, carried(start))[0]


def _greedy_rows_on_host(
    covariances_with: Callable[[int], Float[np.ndarray, " n"]], prior_variance: Float[np.ndarray, " n"], num_rows: int
) -> Int[np.ndarray, " m"]:
    """`greedy_rows` by NumPy, which multiplies only the columns of the factor so far."""
    variance, rows = prior_variance.copy(), np.zeros(num_rows, int)
    factor = np.empty((num_rows, len(variance)), variance.dtype)
    negligible = np.finfo(variance.dtype).eps * variance.max()
    for step in range(num_rows):
        row = rows[step] = int(np.argmax(variance))
        left, known = variance[row], factor[:step]
        factor[step] = (covariances_with(row) - known[:, row] @ known) / np.sqrt(left) if left > negligible else 0
        variance -= factor[step] ** 2
        variance[row] = -np.inf
    return rows


@exact_products
def _capacity(sums: RowSums, noise_variance) -> Float[AnyArray, "m m"]:
    """I + A A' / noise."""
    return sums.outer / noise_variance + np.eye(len(sums.cross), dtype=sums.cross.dtype)


@eqx.filter_custom_vjp
@exact_products
def _streamed_sums(arguments):
    """Outer and cross of `RowSums`; `arguments` is (covariances, whiten, rows, targets, precisions)."""
    return _sums(arguments)


@exact_products
def _sums(arguments):
    covariances, whiten, *row_arrays = arguments

    def add(sums, chunk):
        rows, targets, precisions = chunk
        root = whiten @ covariances(rows)
        weighted = root * precisions[None]
        return (sums[0] + weighted @ root.T, sums[1] + weighted @ targets), None

    nothing = namespace(whiten).zeros_like(whiten), namespace(whiten).zeros_like(whiten[0])
    return scan(add, nothing, _chunks(tuple(row_arrays)))[0]


@_streamed_sums.def_fwd
@exact_products
def _streamed_sums_fwd(perturbed, arguments):
    del perturbed
    # Not `_streamed_sums` itself, so that the derivative can be differentiated again.
    sums = _sums(arguments)
    return sums, sums


@_streamed_sums.def_bwd
@exact_products
def _streamed_sums_bwd(sums, cotangents, perturbed, arguments):
    """One more pass over the rows, with the cotangents of the sums known: no chunk's covariances are kept.

    Let G be the symmetrized cotangent of the outer sum, and let g be the cotangent of the cross sum. Let
    M = L^-T G L^-1 and u = L^-T g. Then these are the cotangents of a row:

    - of its covariances k: p (M k + u y).
    - of its precision: k'M k / 2 + y u'k.
    - of its target: p u'k.

    M has large entries that cancel. In float64 that costs five digits of sixteen. In float32 it costs all digits, so
    M k is computed in two products there.
    """
    covariances, whiten, *row_arrays = arguments
    outer, cross = sums
    # If nothing depends on a sum, its cotangent is None.
    cotangents = [
        jnp.zeros_like(total) if cotangent is None else cotangent
        for cotangent, total in zip(cotangents, sums, strict=True)
    ]
    grad_outer, grad_cross = cotangents[0] + cotangents[0].T, cotangents[1]
    half, target_factor = whiten.T @ grad_outer, whiten.T @ grad_cross
    gram_factor = half @ whiten if whiten.dtype == jnp.float64 else None
    varied, fixed = eqx.partition(covariances, perturbed[0])
    varied = jax.tree.map(jnp.asarray, varied)  # outside of jit a hyperparameter may be a Python number

    def add(total, chunk):
        rows, targets, precisions = chunk
        moved, still = eqx.partition(rows, perturbed[2])
        at = lambda varied, moved: eqx.combine(varied, fixed)(eqx.combine(moved, still))
        gram, pull = eqx.filter_vjp(at, varied, moved)
        pairs = half @ (whiten @ gram) if gram_factor is None else gram_factor @ gram
        cotangent, grad_rows = pull((pairs + target_factor[:, None] * targets[None]) * precisions[None])
        along = target_factor @ gram if perturbed[3] or perturbed[4] else None
        grad_targets = precisions * along if perturbed[3] else None
        grad_precisions = jnp.sum(gram * pairs, axis=0) / 2 + targets * along if perturbed[4] else None
        return jax.tree.map(jnp.add, total, cotangent), (grad_rows, grad_targets, grad_precisions)

    nothing = jax.tree.map(jnp.zeros_like, varied)
    grad_covariances, row_gradients = lax.scan(add, nothing, _chunks(tuple(row_arrays)))
    n = row_arrays[1].shape[0]
    row_gradients = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:n], row_gradients)
    # The cotangent of L^-1 is (G outer + g cross') L'.
    grad_root = grad_outer @ outer + jnp.outer(grad_cross, cross)
    return grad_covariances, solve_triangular(whiten, grad_root.T, lower=True).T, *row_gradients


@exact_products
def _distributed_sums(covariances, whiten, rows, targets, precisions, mesh: Mesh):
    """`_streamed_sums` over a mesh: every device sums over its part of the rows."""
    spread = PartitionSpec(mesh.axis_names)
    arrays, static = eqx.partition(covariances, eqx.is_array)
    # Every device takes the same number of rows.
    spread_out = _padded((rows, targets, precisions), mesh.size)
    # The axes of `jax.make_mesh` are explicit, so the rows have to be placed.
    if AxisType.Explicit in mesh.axis_types:
        spread_out = jax.tree.map(lambda a: jax.reshard(a, NamedSharding(mesh, spread)), spread_out)

    def local(arrays, whiten, rows, targets, precisions):
        # Every device has its own cotangents of the shared arrays. The transpose of this cast adds them up.
        arrays, whiten = lax.pcast((arrays, whiten), mesh.axis_names, to="varying")
        sums = _streamed_sums((eqx.combine(arrays, static), whiten, rows, targets, precisions))
        return lax.psum(sums, mesh.axis_names)

    specs = PartitionSpec(), PartitionSpec(), spread, spread, spread
    distributed = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    # Outside of jit, shard_map cannot differentiate a function with a custom rule.
    return jax.jit(distributed)(arrays, whiten, *spread_out)


def _chunks(arrays: PyTree[AnyArray]) -> PyTree[AnyArray]:
    """Rows as chunks [chunks, rows a chunk, ...], of nearly equal size."""
    n = jax.tree.leaves(arrays)[0].shape[0]
    chunks = -(-n // _CHUNK)
    return jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), _padded(arrays, chunks))


def _padded(arrays: tuple[PyTree[AnyArray], AnyArray, AnyArray], multiple: int) -> PyTree[AnyArray]:
    """(rows, targets, precisions) with the last row repeated at precision zero, up to a multiple of rows."""
    rows, targets, precisions = arrays
    missing = -targets.shape[0] % multiple
    if not missing:
        return arrays
    xp = namespace(targets)
    repeat = lambda a: xp.concatenate([a, xp.repeat(a[-1:], missing, axis=0)])
    return jax.tree.map(repeat, rows), repeat(targets), xp.concatenate([precisions, xp.zeros(missing, targets.dtype)])
