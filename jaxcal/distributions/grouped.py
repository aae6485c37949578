"""Distributions of a table that the rows of a group share: `GroupedQuantiles`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import (
    ROUNDINGS,
    Distribution,
    match,
    of_targets,
    outer_levels,
    place,
    place_levels,
    rounded_outward,
    sample_by_inversion,
)
from jaxcal.functional import linear_tables, quantiles
from jaxcal.functional.linear_tables import LinearTables


class GroupedQuantiles(Distribution):
    """Predictions loc + scale * Z, whose cdf is linear between the weighted values of the table of the row's group.

    `ScaledQuantiles` of a sample with a table for each group, and weights. A row takes O(log M) for M values in all,
    and no [n, L] array is ever made. The log density is that of a smoothed version. Quantiles at levels that the values
    of a group do not reach come with a warning. A row with scale 0 is a point. Made by calibrators that are fitted with
    `by` or `weights`.

    Args:
        loc: [n].
        scale: [n], not negative.
        group: the number of each row's group [n].
        tables: of all groups, made by `functional.linear_tables.make`.
        tails: beyond the outermost values of a table "constant", atoms at them, or "normal", tails of the normal
            distribution with the table's mean and std.
        new_weight: the weight of each row [n] beside those of its table; their mean where None.

    Example:
        >>> from jaxcal.functional import linear_tables
        >>> values, group = jnp.array([-1.0, 1.0, -5.0, 5.0]), jnp.array([0, 0, 1, 1])
        >>> both = linear_tables.make(values, group, np.array([2, 2]))
        >>> distribution = GroupedQuantiles(jnp.zeros(2), jnp.ones(2), jnp.array([0, 1]), both)
        >>> print(", ".join(f"{quantile:.1f}" for quantile in distribution.icdf(0.6)))
        0.6, 3.0
    """

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    group: Int[Array, "*n"]
    tables: LinearTables
    new_weight: Float[Array, "*n"] | None
    tails: str = eqx.field(static=True)
    _shared: ClassVar = {"tables": 1}

    def __init__(
        self,
        loc: Float[Array, " n"],
        scale: Float[Array, " n"],
        group: Int[Array, " n"],
        tables: LinearTables,
        tails: str = "constant",
        new_weight: Float[Array, " n"] | None = None,
    ):
        _checks.check_choice("tails", tails, linear_tables.TAILS)
        self.loc, self.scale, self.group, self.tables = loc, scale, group, tables
        self.tails, self.new_weight = tails, new_weight

    @property
    @eqx.filter_jit
    def mean(self) -> Float[Array, "*n"]:
        """The mean of the table, placed."""
        loc, scale = self._units
        return loc + scale * linear_tables.mean_and_std(self.tables, self.group, self.new_weight, self.tails)[0]

    @property
    @eqx.filter_jit
    def std(self) -> Float[Array, "*n"]:
        """The std of the table, scaled."""
        return self._units[1] * linear_tables.mean_and_std(self.tables, self.group, self.new_weight, self.tails)[1]

    @of_targets
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The level of y, by `functional.linear_tables.cdf`."""
        loc, scale = self._units
        y = rounded_outward(match(y, loc), ROUNDINGS, *self._locations)
        u = (y - loc) / jnp.where(scale > 0, scale, 1)
        level = linear_tables.cdf(self.tables, self.group, u, self.new_weight, self.tails)
        return jnp.where(scale > 0, level, (u >= 0).astype(level.dtype))

    @of_targets
    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density of a smoothed version, `functional.linear_tables.log_density`."""
        loc, scale = self._units
        positive = scale > 0
        scale = jnp.where(positive, scale, 1)
        log_density = linear_tables.log_density(self.tables, self.group, (match(y, loc) - loc) / scale, self.new_weight)
        return jnp.where(positive, log_density - jnp.log(scale), -jnp.inf)

    @of_targets
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The scale times `functional.linear_tables.crps`."""
        loc, scale = self._units
        error, positive = match(y, loc) - loc, scale > 0
        u = error / jnp.where(positive, scale, 1)
        score = linear_tables.crps(self.tables, self.group, u, self.new_weight, self.tails)
        return jnp.where(positive, scale * score, jnp.abs(error))

    def _warn_of_levels(self, p: ArrayLike, values: Float[Array, "..."]) -> None:
        if _checks.is_traced(p, self.group, self.tables.start):
            return
        sizes = np.diff(np.asarray(self.tables.start))[np.asarray(self.group)]
        levels = np.asarray(outer_levels(p))
        inside = levels[levels < 1]
        needed = quantiles.smallest_table(inside.max()) if inside.size else 0
        if (few := sizes < needed).any():
            _checks.warn(
                f"in {few.sum()} rows the group has too few calibration rows for the level asked for, which needs at "
                f"least {needed}; the smallest has {sizes.min()}. The quantile may cover less than its level.",
            )

    @eqx.filter_jit
    def _quantiles(self, levels: Float[Array, "..."]) -> Float[Array, "..."]:
        """The quantiles at checked levels: rows without weights of their own share the search of their group."""
        number = self.tables.total.shape[0]
        if self.new_weight is not None or number > self.loc.shape[0]:
            return super()._quantiles(levels)
        groups = jnp.arange(number, dtype=jnp.int32)
        at = lambda p: linear_tables.quantile(
            self.tables, groups, jnp.full(number, p, self.loc.dtype), None, self.tails
        )
        z = at(levels) if levels.ndim == 0 else jax.vmap(at, out_axes=-1)(levels)
        return place_levels(z[self.group], *self._units)

    @eqx.filter_jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The quantiles at uniformly random levels."""
        return sample_by_inversion(self._icdf, key, shape, self.loc.shape, self.loc.dtype)

    def _moved(
        self, values: Float[Array, "..."], levels: Float[Array, "..."], side: Real[ArrayLike, "..."]
    ) -> Float[Array, "..."]:
        return rounded_outward(values, ROUNDINGS * side, *self._locations)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return place(linear_tables.quantile(self.tables, self.group, p, self.new_weight, self.tails), *self._units)

    @property
    def _locations(self) -> tuple[Float[Array, "*n"], ...]:
        """What a quantile is the sum of beside the scale times a value in the unit of its table."""
        return self.loc, self.scale * self.tables.center[self.group]

    @property
    def _units(self) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """Where the unit of the table of each row lies, and its size."""
        tables = self.tables
        return self.loc + self.scale * tables.center[self.group], self.scale * tables.spread[self.group]
