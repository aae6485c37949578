"""Partially pooled tables of errors, for groups of few rows.

The table of a group is a mixture of two tables: the errors of the group, and the errors of all rows. In a group of L
rows the table of all rows has the weight k / (k + L). The posterior mean of a Dirichlet process has the same form
(Ferguson, Annals of Statistics 1, 1973). One k serves all groups: the k with the least leave-one-out CRPS over all
rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal.functional import tables

# The candidates for k: the table of all rows counts for k rows of a group.
COUNTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 1e5)
# The largest number of values from all rows in all pooled tables together, and the smallest number in one group.
_POOLED_VALUES, _POOLED_AT_LEAST = 2**21, 200


@jax.jit
def best(
    errors: Float[Array, " l"], number: Int[Array, " l"], sizes: Int[Array, " groups"], scale: Float[Array, " l"]
) -> Float[Array, ""]:
    """The k for which the tables of the groups have the least mean leave-one-out CRPS, in the unit of y.

    CRPS = E|Z - z| - E|Z - Z'| / 2 is quadratic in the weights of two tables. Without row i each mean distance
    lacks the contribution of row i. So every leave-one-out score follows from the mean distances of row i to its group
    and to all rows.
    """
    count, total = sizes.shape[0], errors.shape[0]
    own, every = tables.make(errors, number, count), tables.make(errors, jnp.zeros_like(number), 1)
    nobody = jnp.zeros_like(number)
    # E|Z - z_i| over the rows of the group of row i, and over all rows. `distance` is E|Z - Z'| / 2 within a table.
    to_own = tables.crps(own, number, errors) + own.distance[number]
    to_all = tables.crps(every, nobody, errors) + every.distance[0]
    size = sizes.astype(errors.dtype)
    # The mean distance between a row of the group and any row.
    between = jax.ops.segment_sum(to_all, number, count) / size
    n = size[number]
    less_own, less_all = n / jnp.maximum(n - 1, 1), total / (total - 1)
    # Without row i a group has n - 1 of its n rows: D_-i = (D - E|Z - z_i| / n) (n / (n - 1))^2, D = E|Z - Z'| / 2.
    pairs_own = (own.distance[number] - to_own / n) * less_own**2
    pairs_all = (every.distance[0] - to_all / total) * less_all**2
    pairs_between = (between[number] - to_all / n - to_own / total) * less_own * less_all
    to_own, to_all = to_own * less_own, to_all * less_all

    def score(k: Float[Array, ""]) -> Float[Array, ""]:
        # A mixture (1 - p) own + p all, p = k / (k + n - 1): E|Z - Z'| / 2 is a quadratic form in 1 - p and p.
        part = k / (k + n - 1)
        rest = 1 - part
        crps = rest * to_own + part * to_all
        return jnp.mean(scale * (crps - rest**2 * pairs_own - rest * part * pairs_between - part**2 * pairs_all))

    counts = jnp.array(COUNTS, errors.dtype)
    return counts[jnp.argmin(jax.vmap(score)(counts))]


def pooled(
    errors: Float[Array, " l"], number: np.ndarray, sizes: Int[Array, " groups"], pooling: Float[Array, ""]
) -> tuple[Float[Array, " m"], np.ndarray, Float[Array, " m"]]:
    """The errors of each group, followed by the errors of all rows once for each group; their groups; their weights.

    The weights of a table add up to its effective number of rows. If there are many rows, evenly spaced order
    statistics stand for the errors of all rows.
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
    # The effective number of rows, 1 / sum w^2: L rows of the group have own + other, the rest have other.
    worth = 1 / (size * (own + other) ** 2 + (total - size) * other**2)
    values = jnp.concatenate([errors, jnp.tile(jnp.sort(errors)[chosen], count)])
    weights = jnp.concatenate([(own * worth)[number], jnp.repeat(part / kept * worth, kept)])
    return values, weights
