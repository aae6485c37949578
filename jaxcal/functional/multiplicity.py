"""Corrections for multiplicity: how likely the largest of many Levene statistics is by chance."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import ArrayLike, Bool, Float, Int, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, special
from jaxcal.functional import _wavelet
from jaxcal.functional._loops import scan
from jaxcal.functional._nodes import SplitSearch, admissible_cuts, by_node, centered_deviations, over_nodes, rank
from jaxcal.functional.levene import feature_orders, log_p_value
from jaxcal.functional.linalg import sqrt


@numpy_or_jit
def miller_siegmund(
    statistic: Real[ArrayLike, "*k"],
    num_rows: Int[ArrayLike, "*k"],
    log_num_splits: Real[ArrayLike, "*k d"],
    *,
    min_leaf: Int[ArrayLike, "*#k"],
    ordered: bool | Bool[ArrayLike, " d"] = True,
) -> Float[AnyArray, "*k"]:
    """The logarithm of a bound on the probability that the largest |T| of all splits is this large by chance.

    Over the cuts of one ordered feature, T is about a standardized Brownian bridge. Let b be the normal quantile that
    corresponds to |T|, and let e = min_leaf / n. Then P(max |T| >= b) is about
    phi(b) (4 / b + (b - 1 / b) log((1 - e)^2 / e^2)). By Bonferroni, the probability is at most m times the p-value of
    the best of m splits, ordered or not. The lesser of the two bounds is summed over the features.

    Args:
        statistic: the largest |T| of every node.
        num_rows: n, of every node.
        log_num_splits: log m of every feature, as `Split` and `Subset` have it.
        min_leaf: the least number of rows on either side.
        ordered: whether the splits are cuts of an order, of all features or of each one.

    Source: Miller and Siegmund, Biometrics 38 (1982).

    Example:
        >>> print(f"{jnp.exp(miller_siegmund(4.19, 2000, jnp.full(9, 7.0), min_leaf=200)):.4f}")
        0.0105
    """
    statistic = _checks.as_floats("statistic", statistic)
    xp = namespace(statistic, log_num_splits)
    n = xp.asarray(num_rows, statistic.dtype)
    own = xp.asarray(log_num_splits, statistic.dtype) + log_p_value(statistic, num_rows)[..., None]
    # b is the normal quantile of |T|, by Wallace's approximation. `odds` is (1 - e) / e, and its logarithm is taken
    # twice for the square in log((1 - e)^2 / e^2).
    df = xp.maximum(n - 2, 1)
    b = sqrt(df * xp.log1p(statistic**2 / df)) * (8 * df + 1) / (8 * df + 3)
    tail = xp.maximum(b, 1)
    odds = xp.maximum(n / xp.asarray(min_leaf, n.dtype) - 1, 1)
    log_path = xp.log(4 / tail + 2 * (tail - 1 / tail) * xp.log(odds)) - 0.5 * tail**2 - 0.5 * math.log(2 * math.pi)
    log_path = xp.where(b > 1, log_path, 0)[..., None]
    feature_bounds = xp.where(xp.isneginf(own), own, xp.minimum(own, xp.where(ordered, log_path, np.inf)))
    bound = xp.minimum(special(own).logsumexp(feature_bounds, -1), 0)
    return xp.where(xp.isneginf(own).all(-1), 0, bound)


@numpy_or_jit
def miller_siegmund_quantile(
    log_p: Real[ArrayLike, ""],
    num_rows: Int[ArrayLike, "*k"],
    log_num_splits: Real[ArrayLike, "*k d"],
    *,
    min_leaf: Int[ArrayLike, "*#k"],
    ordered: bool | Bool[ArrayLike, " d"] = True,
) -> Float[AnyArray, "*k"]:
    """The largest |T| for which `miller_siegmund` gives this value, by bisection: its inverse, up to 100.

    For one feature with one split it is the quantile of Student's t distribution.

    Args:
        log_p: the logarithm of the bound.
        num_rows: as for `miller_siegmund`.
        log_num_splits: as for `miller_siegmund`.
        min_leaf: as for `miller_siegmund`.
        ordered: as for `miller_siegmund`.

    Example:
        >>> quantile = miller_siegmund_quantile(jnp.log(0.0105), 2000, jnp.full(9, 7.0), min_leaf=200)
        >>> print(f"{quantile:.2f}")
        4.19
    """
    counts = _checks.as_floats("log_num_splits", log_num_splits)
    xp = namespace(counts, log_p)
    ordered = xp.broadcast_to(ordered, counts.shape[-1:])
    bound = partial(miller_siegmund, num_rows=num_rows, log_num_splits=counts, min_leaf=min_leaf, ordered=ordered)
    zero = xp.zeros(np.shape(num_rows), counts.dtype)

    def halve(ends: tuple[AnyArray, AnyArray], _: AnyArray) -> tuple[tuple[AnyArray, AnyArray], None]:
        low, high = ends
        middle = 0.5 * (low + high)
        above = bound(middle) > log_p
        return (xp.where(above, middle, low), xp.where(above, high, middle)), None

    return scan(halve, (zero, zero + 100), np.arange(np.finfo(counts.dtype).nmant + 6))[0][1]


def permutation_log_p(
    x: ArrayLike,
    residuals: ArrayLike,
    nodes: ArrayLike | None = None,
    *,
    key: PRNGKeyArray,
    min_leaf: int,
    num_nodes: int = 1,
    num_permutations: int = 199,
    center: str = "median",
    step: int = 1,
    orders: ArrayLike | None = None,
) -> Float[AnyArray, " k"]:
    """The logarithm of the p-value of every node's largest |T|, by permutations of its residuals.

    p = (1 + the number of permutations whose largest |T| is no less) / (1 + num_permutations). Here deviations are
    taken from the center of the node, which a permutation does not change. So the largest |T| needs prefix sums only.
    The permutations are powers of one random cycle of the node's n rows, so one sort serves all of them.

    The powers of a cycle are a group. So P(p <= q) <= q if the residuals are independent of x and of each other,
    whatever their distribution. The p-value is at least 1 / n.

    Args:
        x: features [n, d].
        residuals: [n].
        nodes: the node of every row, as for `best_splits`. If None, all rows are in one node.
        key: a random key.
        min_leaf: the least number of rows on either side, at least 1.
        num_nodes: k, the number of nodes.
        num_permutations: the p-value is at least 1 / (1 + num_permutations).
        center: the center of the deviations, the "mean" or the "median" of the node.
        step: only splits with min_leaf, min_leaf + step, ... rows on the left are candidates.
        orders: the `feature_orders` of x, if they are known.

    Returns:
        one logarithm for each node [k]; 0 where no split is admissible.

    Raises:
        TypeError: if key is no random key.
        ValueError: if the lengths differ, a value is NaN or infinite, or an option is none of those above.

    Source: Westfall and Young, Resampling-Based Multiple Testing (1993); for subgroups: Hemerik and Goeman, TEST 27
    (2018).

    Example:
        >>> x = jnp.arange(100.0)[:, None]
        >>> residuals = jnp.sin(jnp.arange(100.0)) * jnp.where(jnp.arange(100) < 50, 1, 3)
        >>> print(jnp.exp(permutation_log_p(x, residuals, key=jax.random.key(0), min_leaf=10)))
        [0.01]
    """
    _checks.check_key(key)
    _checks.check_at_least("num_permutations", num_permutations, 1)
    problem = SplitSearch.of(x, residuals, orders, nodes, min_leaf, num_nodes, center, step)
    return _permutation_log_p(key, problem, num_permutations)


@partial(jax.jit, static_argnames="num_permutations")
def _permutation_log_p(key: PRNGKeyArray, problem: SplitSearch, num_permutations: int) -> Float[AnyArray, " k"]:
    """`permutation_log_p`: the rows of a node in random order are a ring, which a power of the cycle turns."""
    n, layout, num_nodes = problem.x.shape[0], problem.layout, problem.num_nodes
    deviations = centered_deviations(rank(problem.residuals, layout).residuals, layout, problem.center)
    ring_key, turn_key = jax.random.split(key)
    ring = by_node(_wavelet.stable_order(jax.random.bits(ring_key, (n,), jnp.uint32), 32), layout)
    place_in_ring = _wavelet.inverse(ring)
    ring = deviations[ring]
    # A run of consecutive turns contains the original order of the residuals at a random place. That turn comes first.
    number = num_permutations + 1
    before = jax.random.randint(turn_key, (1, num_nodes + 1), 0, number, jnp.int32)
    turns = (jnp.arange(number, dtype=jnp.int32)[:, None] + before) % number - before
    turns = turns % jnp.maximum(layout.size, 1)[None]
    end = layout.end[:n]
    cut = jnp.arange(layout.start.shape[0], dtype=jnp.int32)
    sizes = cut - layout.start, layout.end - cut

    def largest(feature: tuple[AnyArray, AnyArray]) -> AnyArray:
        column, order = feature
        order = by_node(order, layout)
        admissible = admissible_cuts(column[order], layout, problem.min_leaf, problem.step)
        # |T| grows with the variance between the sides: S^2 / (n_left n_right), with S the sum over the left side.
        scale = jnp.where(admissible, 1 / jnp.maximum(sizes[0], 1).astype(ring.dtype) / jnp.maximum(sizes[1], 1), 0)
        places = place_in_ring[order]

        def permuted(turn: AnyArray) -> AnyArray:
            turned = places + turn[layout.node[:n]]
            turned = jnp.where(turned >= end, turned - layout.size[layout.node[:n]], turned)
            between = _wavelet.prefix_sums(ring[turned]) ** 2 * scale
            return over_nodes("max", between, layout)[:num_nodes]

        return lax.map(permuted, turns)

    orders = feature_orders(problem.x) if problem.orders is None else problem.orders
    maxima = lax.map(largest, (problem.x.T, orders)).max(0)
    return jnp.log((maxima >= maxima[0][None]).mean(0, dtype=ring.dtype))
