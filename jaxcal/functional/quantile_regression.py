"""Exact linear quantile regression, and its change by one more row whose score is not known.

The regression at level c of scores S_i on features phi_i minimizes sum_i rho(S_i - phi_i'b). Here
rho(u) = max(c u, (c - 1) u) is the pinball loss. The solution is a linear function of the features that interpolates d
rows, the basis. A row above it has the dual c, and a row below it has the dual c - 1. The duals of the basis lie in
between, so that sum_i eta_i phi_i = 0.

With a new row of features phi and dual t, the condition is sum_i eta_i phi_i + t phi = 0. The solution then minimizes
sum_i rho(S_i - phi_i'b) - t phi'b. As t goes from 0 to its end, the basis changes a few times: `cutoffs` follows that
path. `solve` finds where the path starts, on the host and in 64 bits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

# How a path ended: at its end; with a cutoff of +inf or -inf; without a solution that could be verified.
SOLVED, INFINITE, MINUS_INFINITE, FAILED = range(4)
# How many entries [rows, n] the paths hold at once: this number stays in a processor's cache.
_AT_ONCE = 2**16


class Vertex(NamedTuple):
    """The state of a regression, or of a path.

    Attributes:
        basis: the numbers of the d rows that are interpolated [d].
        inverse: the inverse of their features [d, d].
        duals: their duals eta [d], each between c - 1 and c.
        side: of every row [n]: 1 above (its dual is c), -1 below (its dual is c - 1), and 0 in the basis.
    """

    basis: Int[Array, "..."]
    inverse: Float[Array, "..."]
    duals: Float[Array, "..."]
    side: Int[Array, "..."]


class Cutoffs(NamedTuple):
    """The values of the regression at new rows.

    Attributes:
        value: [m], finite. Where the cutoff is infinite, it is the last finite value of the path.
        outcome: [m], `SOLVED`, `INFINITE`, `MINUS_INFINITE` or `FAILED`.
    """

    value: Float[Array, " m"]
    outcome: Int[Array, " m"]


def separated(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Values of std 1, in 64 bits and moved a little, so that no two are equal and no path goes in circles.

    They move by up to eps^(2/3) of their own dtype. A vertex that is optimal for the moved values is optimal for the
    values as well. Cutoffs are computed from the values.
    """
    step = np.finfo(values.dtype).eps ** (2 / 3)
    return values.astype(float) + step * np.random.default_rng(0).uniform(size=len(values))


def solve(
    features: Float[np.ndarray, "n d"], scores: Float[np.ndarray, " n"], level: float, start: Int[np.ndarray, " d"]
) -> Vertex:
    """The regression at one level: it moves from vertex to vertex, each time as far as the loss decreases.

    It computes in 64 bits, on the host.

    Args:
        features: [n, d], of full rank.
        scores: [n]. No two rows with equal features may have equal scores: see `separated`.
        level: c, in (0, 1).
        start: d rows whose features are independent, such as `independent_rows`, or the basis at another level.

    Returns:
        the optimum, in the dtype of the features.

    Raises:
        FloatingPointError: if rounding leaves no step that decreases the loss.

    Source: Barrodale and Roberts, SIAM Journal on Numerical Analysis 10 (1973); Koenker and d'Orey, Applied Statistics
    36 (1987).

    Example:
        >>> features, scores = np.ones((5, 1)), np.array([3.0, 1.0, 4.0, 1.5, 9.0])
        >>> vertex = solve(features, scores, 0.7, np.array([0]))
        >>> print(scores[vertex.basis], vertex.duals, vertex.side)
        [4.] [0.2] [-1 -1  0 -1  1]
    """
    dtype, basis = features.dtype, np.array(start)
    features, scores = features.astype(float), scores.astype(float)
    side = np.where(scores > features @ (np.linalg.inv(features[basis]) @ scores[basis]), 1, -1)
    side[basis] = 0
    for _ in range(100 + 20 * features.shape[1] + len(scores)):
        # The duals of the basis solve sum_i eta_i phi_i = 0, given the duals of all other rows.
        inverse = np.linalg.inv(features[basis])
        residuals = scores - features @ (inverse @ scores[basis])
        duals = -(np.where(side > 0, level, np.where(side < 0, level - 1, 0)) @ features) @ inverse
        excess = np.maximum(duals - level, level - 1 - duals)
        leaving = int(np.argmax(excess))
        if excess[leaving] <= 1e-9:
            duals = np.clip(duals, level - 1, level)
            parts = basis.astype(np.int32), inverse.astype(dtype), duals.astype(dtype), side.astype(np.int8)
            return Vertex(*map(jax.device_put, parts))
        upwards = 1 if duals[leaving] > level else -1
        passed = _downhill(features @ (-upwards * inverse[:, leaving]), residuals, side, excess[leaving])
        # Sides change here alone. Near the regression, the sign of a rounded residual may not be the side of its row.
        side[passed] *= -1
        side[basis[leaving]] = upwards
        basis[leaving] = passed[-1]
        side[basis] = 0
    raise FloatingPointError("the quantile regression found no optimum: the features are close to dependent.")


def _downhill(speed: np.ndarray, residuals: np.ndarray, side: np.ndarray, slope: float) -> np.ndarray:
    """The rows that the regression meets as it moves, up to the one where the loss, of this slope, is least."""
    met = np.flatnonzero(side * speed > 1e-10)
    order = met[np.argsort(residuals[met] / speed[met], kind="stable")]
    rises = np.cumsum(np.abs(speed[order])) - slope
    return order[: np.searchsorted(rises, 0) + 1]


def independent_rows(features: Float[np.ndarray, "n d"]) -> Int[np.ndarray, " d"]:
    """d rows whose features are far from dependent: the first rows of a QR decomposition with pivots.

    Example:
        >>> print(independent_rows(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])))
        [1 2]
    """
    from scipy.linalg import qr  # comes with jax; slow to import

    return qr(features.astype(float).T, mode="economic", pivoting=True)[-1][: features.shape[1]]


@jax.jit
def cutoffs(
    features: Float[Array, "n d"],
    scores: Float[Array, " n"],
    moved: Float[Array, " n"],
    vertex: Vertex,
    level: Float[ArrayLike, ""],
    new: Float[Array, "m d"],
    dual: Float[Array, " m"],
) -> Cutoffs:
    """phi'b(t) at each new row, for the regression in which this row has the dual t.

    With t = c this is the largest score whose row does not lie above the regression of all n + 1 rows. If several
    numbers qualify, the cutoff is the least of them. If the path meets no further row, too few rows resemble the new
    one, and the cutoff is infinite. The derivative with respect to phi is b(t).

    Every vertex at which a path ends is checked: the sides of all rows, and the sum of the duals. Cutoffs are rounded
    upwards, so that a score that equals its cutoff lies inside.

    Args:
        features: of the n rows [n, d]; best if their mean square is 1 and they are uncorrelated.
        scores: [n], of a std of about 1.
        moved: [n], the scores that `solve` took.
        vertex: the result of `solve`, in the dtype of the features.
        level: c.
        new: features of m new rows [m, d].
        dual: t of the new rows [m], from c - 1 to c.

    Source: Gibbs, Cherian and Candes, Conformal prediction with conditional guarantees, JRSSB 87 (2025), section 4.

    Example:
        >>> features, scores = np.ones((9, 1)), np.arange(1.0, 10.0)
        >>> vertex = solve(features, scores, 0.8, np.array([0]))
        >>> rows = [jnp.asarray(each) for each in (features, scores, scores)]
        >>> found = cutoffs(*rows, vertex, 0.8, jnp.ones((1, 1)), jnp.array([0.8]))
        >>> print(found.value.round(5))  # the rank is ceil(10 x 0.8)
        [8.]
    """
    find = partial(_cutoff, features, scores, moved, vertex, jnp.asarray(level, new.dtype))
    count = new.shape[0]
    at_once = min(count, max(1, _AT_ONCE // features.shape[0]))
    batches = -(-count // at_once)
    fill = batches * at_once - count
    new = jnp.pad(new, ((0, fill), (0, 0)), mode="edge").reshape(batches, at_once, -1)
    dual = jnp.pad(dual, (0, fill), mode="edge").reshape(batches, at_once)
    in_batches = lax.map(lambda batch: jax.vmap(find)(*batch), (new, dual))
    return jax.tree.map(lambda values: values.reshape(-1)[:count], in_batches)


def _cutoff(
    features: Array, scores: Array, moved: Array, vertex: Vertex, level: Array, new: Array, dual: Array
) -> Cutoffs:
    """`cutoffs` of one new row."""
    fixed = lax.stop_gradient(new)
    end, left, failed = _follow(features, moved, vertex, level, jnp.sign(dual) * fixed, jnp.abs(dual))
    infinite = (left > 0) & ~failed
    reached = dual - jnp.sign(dual) * left
    matrix, known = features[end.basis], jnp.stack([scores[end.basis], moved[end.basis]], axis=1)
    coefficients = jnp.linalg.solve(matrix, known)
    ok = _is_optimal(features, moved, vertex, end, level, coefficients[:, 1], reached * fixed)
    # Sums of d products round by less than this.
    rounding = 4 * known.shape[0] * jnp.finfo(new.dtype).eps * (jnp.abs(fixed @ end.inverse) @ jnp.abs(known[:, 0]))
    value = _dot(new, lax.stop_gradient(coefficients[:, 0])) + lax.stop_gradient(rounding)
    known_end = jnp.where(ok & ~failed, SOLVED, FAILED)
    outcome = jnp.where(infinite, jnp.where(dual > 0, INFINITE, MINUS_INFINITE), known_end)
    finite = jnp.isfinite(value)
    return Cutoffs(jnp.where(finite, value, 0), jnp.where(finite, outcome, FAILED))


def _is_optimal(
    features: Array, moved: Array, start: Vertex, end: Vertex, level: Array, coefficients: Array, pull: Array
) -> Array:
    """Whether every row is on its side, and the duals are within their bounds and sum up as they must."""
    tolerance = 10 * float(jnp.finfo(features.dtype).eps) ** (2 / 3)
    residuals = moved - _dot(features, coefficients)
    sides = end.side * residuals >= -tolerance * (1 + jnp.abs(moved))
    # The change of the duals since the start has few terms. Its sum rounds less than the sum of all duals.
    change = _duals(end, level) - _duals(start, level)
    sums = jnp.abs(_dot(change, features) + pull) <= tolerance * (1 + _dot(jnp.abs(change), jnp.abs(features)))
    inside = (end.duals >= level - 1 - tolerance) & (end.duals <= level + tolerance)
    return sides.all() & sums.all() & inside.all()


def _duals(vertex: Vertex, level: Array) -> Array:
    """The duals of all rows [n]."""
    outside = jnp.where(vertex.side > 0, level, level - 1)
    return outside.at[vertex.basis].set(vertex.duals)


class _PathState(NamedTuple):
    """A path between two steps."""

    at: Vertex
    residuals: Array
    left: Array
    steps: Array
    going: Array


def _follow(
    features: Array, moved: Array, start: Vertex, level: Array, direction: Array, length: Array
) -> tuple[Vertex, Array, Array]:
    """The vertex at the end of a path; the rest of its length, 0 unless it is unbounded; whether the steps ran out."""
    most = 100 + 20 * features.shape[1]
    residuals = moved - _dot(features, _dot(start.inverse, moved[start.basis]))
    state = _PathState(start, residuals, length, jnp.zeros((), int), jnp.ones((), bool))
    step = partial(_step, features, level, direction)
    state = lax.while_loop(lambda state: state.going & (state.steps < most), step, state)
    return state.at, state.left, state.going


def _step(features: Array, level: Array, direction: Array, state: _PathState) -> _PathState:
    """The duals move until one of the basis is at a bound; then its row leaves, and the next row that is met enters."""
    eps = float(jnp.finfo(features.dtype).eps)
    at, left = state.at, state.left
    # sum_i eta_i phi_i + t phi = 0: the duals of the basis change by -phi'inverse as t grows.
    rates = -_dot(direction, at.inverse)
    room = jnp.maximum(jnp.where(rates > 0, level - at.duals, at.duals - (level - 1)), 0)
    moving = jnp.abs(rates) > eps ** (2 / 3)
    times = jnp.where(moving, room / jnp.where(moving, jnp.abs(rates), 1), jnp.inf)
    leaving = jnp.argmin(times)
    # The basis does not change right at the end, so the cutoff is the least of the numbers that qualify.
    arrives = times[leaving] >= left - eps ** (2 / 3)
    time = jnp.minimum(times[leaving], left)
    duals, left = at.duals + time * rates, jnp.where(arrives, 0, left - time)

    upwards = jnp.where(rates[leaving] > 0, 1, -1)
    column = at.inverse[:, leaving]
    speed = _dot(features, -upwards * column)
    meets = at.side * speed > eps ** (2 / 3)
    distance = jnp.where(meets, jnp.maximum(state.residuals / jnp.where(meets, speed, 1), 0), jnp.inf)
    entering = jnp.argmin(distance)
    changes = ~arrives & meets.any()
    new = _exchanged(at._replace(duals=duals), features, level, leaving, entering, upwards)
    residuals = (state.residuals - distance[entering] * speed).at[entering].set(0)
    vertex = jax.tree.map(partial(jnp.where, changes), new, at._replace(duals=duals))
    residuals = jnp.where(changes, residuals, state.residuals)
    return _PathState(vertex, residuals, left, state.steps + 1, changes)


def _exchanged(at: Vertex, features: Array, level: Array, leaving: Array, entering: Array, upwards: Array) -> Vertex:
    """The vertex with another row in the basis; its inverse by the formula of Sherman and Morrison."""
    row, column = _dot(features[entering], at.inverse), at.inverse[:, leaving]
    others = row.at[leaving].add(-1)
    dual = jnp.where(at.side[entering] > 0, level, level - 1)
    return Vertex(
        basis=at.basis.at[leaving].set(entering.astype(at.basis.dtype)),
        inverse=at.inverse - column[:, None] * (others / row[leaving])[None],
        duals=at.duals.at[leaving].set(dual),
        side=at.side.at[at.basis[leaving]].set(upwards.astype(at.side.dtype)).at[entering].set(0),
    )


def _dot(a: Array, b: Array) -> Array:
    """The product in the full precision of the dtype, which is not the default of a GPU."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
