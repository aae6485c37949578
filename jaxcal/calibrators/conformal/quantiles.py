"""Conformalized quantile regression: the base's own intervals at chosen levels are moved until they cover."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, smoothed
from jaxcal.calibrators._groups import CalibrationGroups, CalibratorArguments
from jaxcal.distributions import Distribution, Point
from jaxcal.functional import rounding, tables
from jaxcal.functional.quantiles import empirical_quantile, smallest_table
from jaxcal.functional.tables import Tables


def levels_of(confidence_levels: tuple[float, ...]) -> np.ndarray:
    """The levels of the lower ends, the median and the upper ends, in increasing order."""
    central = np.array(confidence_levels)
    return np.concatenate([(1 - central[::-1]) / 2, [0.5], (1 + central) / 2])


def of_base(base: Distribution, confidence_levels: tuple[float, ...], length: int | None = None) -> Float[Array, "n q"]:
    """The base's quantiles at these levels, checked to be finite, [n, 2 k + 1]."""
    # Only the mean is checked: the quantiles of a row may all be equal, so that its std is 0.
    check_base(Point(base.mean) if isinstance(base, Distribution) else base, length)
    quantiles = base.icdf(levels_of(confidence_levels))
    _checks.check_finite("base.icdf(levels)", quantiles)
    return quantiles


@jax.jit
def margins(
    quantiles: Float[Array, "l q"],
    y: Float[Array, " l"],
    confidence_levels: Float[ArrayLike, " k"],
    smoothing: Real[ArrayLike, ""] | None,
) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """The score of rank `ceil((L + 1) c)` for every level c, and how many rows the moved intervals cover."""
    errors, middle = _errors(quantiles, y), quantiles.shape[1] // 2
    margin = lambda table, level: empirical_quantile(smoothed(table, smoothing), level, "conformal")
    margins = jax.vmap(margin, (1, 0))(jnp.sort(errors, axis=0), confidence_levels)
    moved = moved_outwards(quantiles, margins)
    inside = (moved[:, :middle][:, ::-1] <= y[:, None]) & (y[:, None] <= moved[:, middle + 1 :])
    return margins, jnp.count_nonzero(inside, axis=0)


@jax.jit
def _errors(quantiles: Float[Array, "l q"], y: Float[Array, " l"]) -> Float[Array, "l k"]:
    """The distance of each y from the interval of every level; negative inside."""
    middle = quantiles.shape[1] // 2
    lower, upper = quantiles[:, :middle][:, ::-1], quantiles[:, middle + 1 :]
    # max(lower - y, y - upper)
    return jnp.maximum(lower - y[:, None], y[:, None] - upper)


def tables_of_groups(
    arguments: CalibratorArguments, y: Float[Array, " l"], confidence_levels: tuple[float, ...]
) -> tuple[Tables, CalibrationGroups]:
    """Weighted tables of the scores for every level and every group, with a leading axis [k]; and the groups.

    Raises:
        ValueError: as `CalibrationGroups.of` does. If there are no weights and a group has too few rows for the highest
            level.
    """
    errors = _errors(of_base(arguments.base, confidence_levels, y.shape[0]), y)
    rows, (number, known, kept) = CalibrationGroups.of(arguments, y.dtype)
    sizes, highest = np.bincount(number, minlength=rows.groups.count), confidence_levels[-1]
    if known is None and sizes.min() < (needed := smallest_table(highest)):
        raise ValueError(
            f"group {rows.groups.labels[sizes.argmin()]!r} has {sizes.min()} rows, too few for confidence level "
            f"{highest:g}: at least {needed} are needed. Give more rows, or lower confidence_levels, or put it "
            "together with another group."
        )
    return _tables_of_levels(errors if kept is None else errors[kept], number, rows.groups.count, known), rows


@partial(jax.jit, static_argnames="count")
def _tables_of_levels(
    errors: Float[Array, "l k"], number: Int[ArrayLike, " l"], count: int, weights: Float[Array, " l"] | None
) -> Tables:
    return jax.vmap(lambda errors: tables.make(errors, number, count, weights), 1)(errors)


@jax.jit
def moved_by_tables(
    quantiles: Float[Array, "n q"],
    level_tables: Tables,
    number: Int[Array, " n"],
    confidence_levels: Float[ArrayLike, " k"],
    new_weight: Float[Array, " n"] | None,
) -> tuple[Float[Array, "n q"], Float[Array, " n"]]:
    """The quantiles moved by the margins of each row's group, and the highest level whose margin is finite, or 0.

    The margin of this level replaces the infinite margins of higher levels.
    """
    new = jnp.ones(number.shape, quantiles.dtype) if new_weight is None else new_weight.astype(quantiles.dtype)
    levels = jnp.asarray(confidence_levels, quantiles.dtype)
    of_level = lambda table, c: tables.reaching(table, number, jnp.full_like(new, c), new, jnp.zeros_like(new))
    margins = jax.vmap(of_level, out_axes=1)(level_tables, levels)
    count = jnp.isfinite(margins).sum(1)  # if the margin of a level is finite, the margins of lower levels are
    last = jnp.take_along_axis(margins, jnp.maximum(count - 1, 0)[:, None], axis=1)
    margins = jnp.where(jnp.isfinite(margins), margins, jnp.where(count[:, None] > 0, last, 0))
    reach = jnp.where(count > 0, levels[jnp.maximum(count - 1, 0)], 0)
    return moved_outwards(quantiles, margins), reach


@jax.jit
def moved_outwards(quantiles: Float[Array, "n q"], margins: Float[Array, "... k"]) -> Float[Array, "n q"]:
    """The quantiles moved by their margins, and rounded outward.

    Each interval is widened to contain the narrower ones and the median.
    """
    middle = margins.shape[-1]
    margins = jnp.atleast_2d(margins).astype(quantiles.dtype)
    # Lower ends move by -margin, the median by 0, upper ends by +margin.
    moves = jnp.concatenate([-margins[:, ::-1], jnp.zeros_like(margins[:, :1]), margins], axis=1)
    moves, side = jnp.broadcast_to(moves, quantiles.shape), jnp.sign(jnp.arange(2 * middle + 1) - middle)
    moved = rounding.outward(quantiles + moves, jnp.broadcast_to(side, quantiles.shape), quantiles, moves)
    lower = lax.cummin(moved[:, : middle + 1], axis=1, reverse=True)
    upper = lax.cummax(moved[:, middle:], axis=1)
    return jnp.concatenate([lower, upper[:, 1:]], axis=1)
