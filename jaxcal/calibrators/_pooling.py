"""Partially pooled tables of errors, for groups of few rows.

The table of a group is a mixture, of its own errors and of those of all rows. Those of all rows have the weight
k / (k + L) in a group of L rows, as the posterior mean of a Dirichlet process has (Ferguson, Annals of Statistics 1,
1973). One k serves all groups, the one whose tables predict every row best, by CRPS, without that row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal.functional import tables

# What the weight of all rows is chosen from: for how many rows of a group they count.
COUNTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
# Pooled tables hold no more than so many values of all rows together, and each group no fewer than the second.
_POOLED_VALUES, _POOLED_AT_LEAST = 2**21, 200


@jax.jit
def best(
    errors: Float[Array, " l"], number: Int[Array, " l"], sizes: Int[Array, " groups"], scale: Float[Array, " l"]
) -> Float[Array, ""]:
    """The k for which the tables of the groups have the least CRPS of rows by leave-one-out, in the unit of y.

    CRPS = E|Z - z| - E|Z - Z'| / 2 is quadratic in the weights of two tables. Without row i, each mean distance is what
    it is with all rows, less what row i adds to it, so that all follows from the mean distances of row i itself.
    """
    count, total = sizes.shape[0], errors.shape[0]
    own, every = tables.make(errors, number, count), tables.make(errors, jnp.zeros_like(number), 1)
    nobody = jnp.zeros_like(number)
    # Mean distances of each row from those of its group and from all; of the pairs within and between, halved.
    to_own = tables.crps(own, number, errors) + own.distance[number]
    to_all = tables.crps(every, nobody, errors) + every.distance[0]
    size = sizes.astype(errors.dtype)
    between = jax.ops.segment_sum(to_all, number, count) / size
    n = size[number]
    less_own, less_all = n / jnp.maximum(n - 1, 1), total / (total - 1)
    pairs_own = (own.distance[number] - to_own / n) * less_own**2
    pairs_all = (every.distance[0] - to_all / total) * less_all**2
    pairs_between = (between[number] - to_all / n - to_own / total) * less_own * less_all
    to_own, to_all = to_own * less_own, to_all * less_all

    def score(k: Float[Array, ""]) -> Float[Array, ""]:
        part = k / (k + n - 1)
        rest = 1 - part
        crps = rest * to_own + part * to_all
        return jnp.mean(scale * (crps - rest**2 * pairs_own - rest * part * pairs_between - part**2 * pairs_all))

    counts = jnp.array(COUNTS, errors.dtype)
    return counts[jnp.argmin(jax.vmap(score)(counts))]


def pooled(
    errors: Float[Array, " l"], number: np.ndarray, sizes: Int[Array, " groups"], pooling: Float[Array, ""]
) -> tuple[Float[Array, " m"], np.ndarray, Float[Array, " m"]]:
    """The errors of each group and, after them, those of all rows for each group; their groups, and their weights.

    The weights of a table add up to the number of rows of equal weight that it is worth. Of many rows, evenly spaced
    order statistics stand for all.
    """
    total, count = len(number), sizes.shape[0]
    kept = min(total, max(_POOLED_AT_LEAST, _POOLED_VALUES // count))
    chosen = ((np.arange(kept) + 0.5) * total / kept).astype(np.int32)
    groups = np.concatenate([number, np.repeat(np.arange(count, dtype=np.int32), kept)])
    values, weights = _weights(errors, jax.device_put(number), sizes, pooling, jax.device_put(chosen))
    return values, groups, weights


@jax.jit
def _weights(
    errors: Float[Array, " l"],
    number: Int[Array, " l"],
    sizes: Int[Array, " groups"],
    pooling: Float[Array, ""],
    chosen: Int[Array, " kept"],
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    count, total, kept = sizes.shape[0], errors.shape[0], chosen.shape[0]
    size = sizes.astype(errors.dtype)
    part = pooling / (pooling + size)
    own, other = (1 - part) / size, part / total
    worth = 1 / (size * (own + other) ** 2 + (total - size) * other**2)
    values = jnp.concatenate([errors, jnp.tile(jnp.sort(errors)[chosen], count)])
    weights = jnp.concatenate([(own * worth)[number], jnp.repeat(part / kept * worth, kept)])
    return values, weights
