"""A table of errors for every group of rows, with weights: what `by` and `weights` make of a fit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxcal import _checks
from jaxcal.calibrators import _pooling
from jaxcal.calibrators._base import error_scale, location_and_scale, standardized_errors
from jaxcal.calibrators._groups import CalibrationGroups, Labels, Weights
from jaxcal.distributions import Distribution, Empirical, ScaledQuantiles
from jaxcal.frames.layout import Table
from jaxcal.functional import linear_tables, quantiles, tables
from jaxcal.functional.linear_tables import LinearTables
from jaxcal.functional.tables import Tables
from jaxcal.guarantee import Guarantee, WeightedGuarantee


class GroupedTables(eqx.Module):
    """A table of errors for every group, with weights; made by fits with `by` or `weights`.

    Attributes:
        tables: the errors of every group; with the rule "symmetric" the absolute errors and their negatives.
        rows: the groups and weights of the calibration rows.
        pooling: how many rows of a group those of all groups count for, in the table of each; None without partial
            pooling.
        scaled: whether errors are measured in predicted stds, or on the scale of y.
        rule: how a quantile is read from a table, see `functional.tables.quantile`; or "linear", between its values.
        tails: with the rule "linear" beyond the values, see `ScaledQuantiles`.
        out_of_fold: whether the errors are those of `jaxcal.out_of_fold`.
    """

    tables: Tables | LinearTables
    rows: CalibrationGroups
    pooling: Float[Array, ""] | None
    scaled: bool = eqx.field(static=True)
    rule: str = eqx.field(static=True)
    tails: str = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(
        self,
        x: Table | None,
        base: Distribution,
        *,
        by: Labels | None = None,
        weights: Weights | None = None,
    ) -> Empirical | ScaledQuantiles:
        """The distributions base.mean + scale * Z, Z from the table of the row's group.

        Args:
            x: inputs [n, d]; used by functions of x alone, else it may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.
            weights: of the rows [n], if they were an array in the fit.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite; if labels or weights are missing, of
                the wrong length or out of range; if no calibration row has the label of a row.
        """
        loc, scale = location_and_scale(base, self.scaled)
        number, new_weight = self.rows.of_new(x, base, by, weights)
        if self.pooling is not None:  # a pooled table is worth a number of rows, and a new row is worth one
            new_weight = jnp.ones_like(loc)
        if isinstance(self.tables, LinearTables):
            return ScaledQuantiles(loc, scale, None, self.tables, self.tails, group=number, new_weight=new_weight)
        return Empirical(loc, scale, self.tables, self.rule, group=number, new_weight=new_weight)

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee | WeightedGuarantee:
        """The coverage guarantee of the central interval at this level, in the group with a label.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), the errors are out of fold, the rule or a pooled
                table guarantees nothing, there is no group with the label, or it has too few rows for the level.
        """
        _checks.check_fraction("confidence_level", confidence_level)
        if self.pooling is not None:
            raise ValueError("partially pooled tables guarantee nothing: fit without partial_pooling for a guarantee.")
        if self.rule not in quantiles.CONFORMAL_RULES:
            raise ValueError(
                f"tables read by the rule {self.rule!r} guarantee nothing: use conformal.fit without a rule."
            )
        return self.rows.guarantee(confidence_level, group, self.rule, self.out_of_fold)


def fit(
    x: Table | None,
    base: Distribution,
    y: Float[Array, " l"],
    *,
    by: Labels | None,
    weights: Weights | None,
    scaled: bool,
    rule: str,
    tails: str = "constant",
    partial_pooling: bool = False,
) -> GroupedTables:
    """The tables of checked calibration rows.

    Raises:
        ValueError: as `CalibrationGroups.of` does; if `partial_pooling` comes without groups, with weights, or with a
            single row.
    """
    if partial_pooling and (by is None or weights is not None or y.shape[0] < 2):
        raise ValueError("partial_pooling goes with labels of groups, by, without weights, from two rows on.")
    errors = standardized_errors(base, y, scaled, finite=rule == "linear" or partial_pooling)
    rows, (number, known, kept) = CalibrationGroups.of(x, base, by, weights, errors.dtype)
    errors = errors if kept is None else errors[kept]
    pooling, count = None, rows.groups.count
    if partial_pooling:
        pooling = _pooling.best(errors, jax.device_put(number), rows.sizes, error_scale(base, scaled))
        errors, number, known = _pooling.pooled(errors, number, rows.sizes, pooling)
    if rule == "linear":
        made = linear_tables.make(errors, number, np.bincount(number, minlength=count), known)
    else:
        symmetric = rule == "symmetric"
        made = tables.make(jnp.abs(errors) if symmetric else errors, number, count, known, symmetric)
    return GroupedTables(
        tables=made,
        rows=rows,
        pooling=pooling,
        scaled=scaled,
        rule=rule,
        tails=tails,
        out_of_fold=base.is_out_of_fold,
    )
