"""Coverage where it is worst: the least coverage of groups of rows, and of slabs of inputs."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal.distributions import Distribution
from jaxcal.frames.columns import Columns
from jaxcal.frames.layout import Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional import linalg, scores
from jaxcal.metrics._common import Ends, OfRows, Scalar, Weights, as_targets, groups_of, map_groups, share_inside


def worst_group_coverage(
    y: ArrayLike,
    distribution: Distribution,
    by: ArrayLike | Sequence,
    *,
    confidence_level: ArrayLike = 0.9,
    weights: Weights = None,
) -> Scalar:
    """The least coverage of the central interval over the groups with these labels.

    Even for exact intervals it is less than the confidence level, because it is the least of several random fractions.
    `evaluate(y, distribution, by=by)` has the coverage at 90 % and the number of rows of every group.

    Raises:
        TypeError, ValueError: as `evaluate` and `coverage` do.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y, distribution = np.array([0.0, 1.0, 9.0]), jc.Normal(np.zeros(3), 1.0)
        >>> print(jc.metrics.worst_group_coverage(y, distribution, [0, 1, 1]))
        0.5
    """
    y = as_targets(y, distribution)
    weights = _checks.as_weights(weights, y.shape[0])
    labels, number = groups_of(by, weights, y)
    return _worst_coverage(y, distribution.interval(confidence_level), number, weights, len(labels))


@_programs.jit
def _worst_coverage(y: OfRows, ends: Ends, number: Int[ArrayLike, " n"], weights: Weights, groups: int) -> Scalar:
    coverage = lambda weights: share_inside(y, ends, weights)
    return map_groups(coverage, number, weights, groups, y.dtype).min()


def worst_slab_coverage(
    x: Table,
    y: ArrayLike,
    distribution: Distribution,
    *,
    confidence_level: ArrayLike = 0.9,
    fraction: float = 0.2,
    num_directions: int = 200,
    key: PRNGKeyArray,
) -> Scalar:
    """The coverage of the central interval over the worst slab of inputs, {x: a <= v'x <= b}, that can be found.

    One half of the rows finds the slab with the least coverage, over random directions v of standardized columns. A
    slab holds at least a `fraction` of these rows. The other half measures the coverage of that slab. So an interval
    that covers equally often everywhere has the coverage of its level in the mean. An interval that does not has less.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`), whose labels are indicators; a vector [n] is one column.
        y: targets [n].
        distribution: predictions of n rows.
        confidence_level: of the interval.
        fraction: the least fraction of the rows that a slab holds, in (0, 1).
        num_directions: how many directions are tried; the columns themselves are tried as well.
        key: random key of the halves and the directions.

    Raises:
        TypeError: if key is no random key.
        ValueError: as `coverage` does; if `fraction` is out of its range, or there are fewer than 2 / fraction rows.

    Source: Cauchois, Gupta and Duchi, Knowing what you know, JMLR 22 (2021), section 4. The two halves are from Romano,
    Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020, section S1.2.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, 1000)
        >>> y = np.where(x > 0, 2.0, 0.5) * rng.normal(size=1000)
        >>> distribution = jc.Normal(np.zeros(1000), 1.458)  # covers 90 % of all rows
        >>> print(jc.metrics.worst_slab_coverage(x, y, distribution, key=jax.random.key(0)) < 0.85)
        True
    """
    y = as_targets(y, distribution)
    x = Columns.of(x)(x)
    _checks.check_length("x", x, y.shape[0])
    _checks.check_key(key)
    _checks.check_fraction("fraction", fraction)
    _checks.check_at_least("num_directions", num_directions, 0)
    _checks.check_rows("y", y, math.ceil(2 / fraction))
    lower, upper = distribution.interval(confidence_level)
    return _worst_slab_coverage(x, (lower <= y) & (y <= upper), fraction, num_directions, key)


@_programs.jit
def _worst_slab_coverage(
    x: Float[Array, "n d"], covered: Bool[Array, " n"], fraction: float, num_directions: int, key: PRNGKeyArray
) -> Scalar:
    order_key, key = jax.random.split(key)
    order = jax.random.permutation(order_key, x.shape[0])
    x, covered = Standardizer.of(x)(x)[order], covered[order].astype(x.dtype)
    half = x.shape[0] // 2
    random = jax.random.normal(key, (num_directions, x.shape[1]), x.dtype)
    directions = jnp.concatenate([jnp.eye(x.shape[1], dtype=x.dtype), random])
    shortest = math.ceil(fraction * half)

    def find(direction: Float[Array, " d"]) -> tuple[Scalar, Scalar, Scalar]:
        places = x[:half] @ direction
        rows = jnp.argsort(places)
        least, start, length = scores.least_mean_of_runs(covered[:half][rows], shortest)
        return least, places[rows[start]], places[rows[start + length - 1]]

    least, low, high = jax.lax.map(find, directions)
    worst = jnp.argmin(least)
    places = x[half:] @ directions[worst]
    return linalg.weighted_mean(covered[half:], ((low[worst] <= places) & (places <= high[worst])).astype(x.dtype))
