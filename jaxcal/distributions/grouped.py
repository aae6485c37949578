"""Distributions of a table of values that the rows of a group share: `GroupedEmpirical`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import Distribution, match, place, standardize
from jaxcal.functional import quantiles, tables
from jaxcal.functional.tables import Tables


class GroupedEmpirical(Distribution):
    """Predictions loc + scale * Z, with Z one of the weighted values of the table of the row's group.

    `Empirical` with a table for each group, and weights. A row takes O(log M) for M values in all, and no [n, L] array
    is ever made. A row with scale 0 is a point. Made by calibrators that are fitted with `by` or `weights`.

    Args:
        loc: [n].
        scale: [n], not negative.
        group: the number of each row's group [n].
        tables: of all groups, made by `functional.tables.make`.
        rule: how `icdf` reads a table, see `functional.tables.quantile`. "conformal" and "symmetric" are infinite, with
            a warning, where the table is too short for a guarantee.
        new_weight: the weight of each row [n] beside those of its table, for these two rules; 1 where None.

    Example:
        >>> from jaxcal.functional import tables
        >>> both = tables.make(jnp.array([-1.0, 1.0, -5.0, 5.0]), jnp.array([0, 0, 1, 1]), 2)
        >>> distribution = GroupedEmpirical(jnp.zeros(2), jnp.ones(2), jnp.array([0, 1]), both, "inverse_cdf")
        >>> print(distribution.icdf(0.9), distribution.std)
        [1. 5.] [1. 5.]
    """

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    group: Int[Array, "*n"]
    tables: Tables
    new_weight: Float[Array, "*n"] | None
    rule: str = eqx.field(static=True)

    def __init__(
        self,
        loc: Float[Array, " n"],
        scale: Float[Array, " n"],
        group: Int[Array, " n"],
        tables: Tables,
        rule: str,
        new_weight: Float[Array, " n"] | None = None,
    ):
        _checks.check_choice("rule", rule, quantiles.RULES)
        self.loc, self.scale, self.group, self.tables = loc, scale, group, tables
        self.rule, self.new_weight = rule, new_weight

    @property
    @eqx.filter_jit
    def mean(self) -> Float[Array, "*n"]:
        """The mean of the table, placed."""
        return self.loc + self.scale * self.tables.mean[self.group]

    @property
    @eqx.filter_jit
    def std(self) -> Float[Array, "*n"]:
        """The std of the table, scaled."""
        return self.scale * self.tables.std[self.group]

    @eqx.filter_jit
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The fraction of the weight of the table at or below (y - loc) / scale."""
        return tables.cdf(self.tables, self.group, standardize(match(y, self.loc), self.loc, self.scale))

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """-inf everywhere: a distribution of atoms has no density."""
        return jnp.full_like(match(y, self.loc), -jnp.inf)

    @eqx.filter_jit
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The scale times `functional.tables.crps` at (y - loc) / scale."""
        error, positive = match(y, self.loc) - self.loc, self.scale > 0
        score = tables.crps(self.tables, self.group, error / jnp.where(positive, self.scale, 1))
        return jnp.where(positive, self.scale * score, jnp.abs(error))

    def _warn_of_levels(self, p: ArrayLike, values: Float[Array, "..."]) -> None:
        if self.rule not in quantiles.CONFORMAL_RULES or _checks.is_traced(p, values):
            return
        inside = (np.asarray(p) > 0) & (np.asarray(p) < 1)
        infinite = np.isinf(np.asarray(values)) & inside
        if infinite.any():
            rows = int(infinite.reshape(len(infinite), -1).any(axis=1).sum())
            warnings.warn(
                f"in {rows} rows the quantile is infinite: their groups have too few calibration rows for a "
                "guarantee at the level asked for.",
                stacklevel=3,
            )

    @eqx.filter_jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * z, z drawn from the table by weight."""
        rows = self.loc.shape
        # In the middles of the cells that random numbers come from: never 0.
        epsilon = float(jnp.finfo(self.loc.dtype).epsneg)
        levels = jax.random.uniform(key, (math.prod(shape), *rows), self.loc.dtype) + epsilon
        draw = lambda levels: tables.quantile(self.tables, self.group, levels, "inverse_cdf")
        return place(jax.vmap(draw)(levels).reshape(shape + rows), self.loc, self.scale)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        z = tables.quantile(self.tables, self.group, p, self.rule, self.new_weight)
        # An infinite quantile is a refusal, and stays one where the scale is 0.
        infinite = jnp.isinf(z)
        return jnp.where(infinite, z, place(jnp.where(infinite, 0, z), self.loc, self.scale))
