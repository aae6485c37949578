"""Groups of rows, and weights of rows, of calibrators that are tables of errors.

The errors of each group make a table of their own, so that the coverage holds within every group (Mondrian conformal
prediction: Vovk, Lindsay, Nouretdinov and Gammerman 2003). With weights w(x), proportional to the density of the new
inputs over that of the calibration inputs, it holds for the new ones (Tibshirani, Barber, Candès and Ramdas 2019).
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.calibrators import _pooling
from jaxcal.calibrators._base import coverage_guarantee, error_scale, location_and_scale, standardized_errors
from jaxcal.distributions import Distribution, GroupedEmpirical, GroupedQuantiles
from jaxcal.functional import linear_tables, quantiles, tables
from jaxcal.functional.linear_tables import LinearTables
from jaxcal.functional.tables import Tables
from jaxcal.guarantee import Guarantee, WeightedGuarantee
from jaxcal.labels import StdBins

Labels = ArrayLike | Sequence | Callable | eqx.Module
Weights = ArrayLike | Callable


class _Function(eqx.Module):
    """A plain function of x, which is no array of a module."""

    function: Callable = eqx.field(static=True)

    def __call__(self, x: ArrayLike) -> Any:
        return self.function(x)


class Groups(eqx.Module):
    """The labels of groups, and where they come from.

    Attributes:
        labels: of the groups, in increasing order; one group of all rows where there are none.
        by: the module that gives them, of x or, as `labels.StdBins`, of the base; None where they come with the rows.
    """

    labels: tuple[Any, ...] = eqx.field(static=True)
    by: eqx.Module | None

    @classmethod
    def of(cls, x: ArrayLike | None, base: Distribution, by: Labels | None, length: int) -> tuple["Groups", np.ndarray]:
        """The groups of calibration rows, and the number of each row's group [length].

        Raises:
            ValueError: if there are not as many labels as rows, or `by` is a function and x is None.
        """
        if by is None:
            return cls(labels=(), by=None), np.zeros(length, np.int32)
        labels, number = np.unique(_checks.as_labels("by", _at(x, base, by, "by"), length), return_inverse=True)
        module = by if isinstance(by, eqx.Module) else _Function(by) if callable(by) else None
        return cls(labels=tuple(labels.tolist()), by=module), number.astype(np.int32)

    def number_of_rows(
        self, x: ArrayLike | None, base: Distribution, by: Labels | None, length: int
    ) -> Int[Array, " n"]:
        """The number of the group of each new row.

        Raises:
            ValueError: if labels are missing, are not as many as the rows, or one was in no calibration row.
        """
        if not self.labels:
            if by is not None:
                raise ValueError("by has no effect: the calibrator was fitted without groups.")
            return jax.device_put(np.zeros(length, np.int32))
        by = self.by if by is None else by
        if by is None:
            raise ValueError("the calibrator was fitted with labels of groups: give those of these rows, by=labels.")
        given, labels = _at(x, base, by, "by"), np.array(self.labels)
        if _checks.is_traced(given):  # numbers, whose values are not known
            return jnp.clip(jnp.searchsorted(labels, given), 0, len(labels) - 1).astype(jnp.int32)
        given = _checks.as_labels("by", given, length)
        if (given.dtype.kind in "US") != (labels.dtype.kind in "US"):
            raise ValueError(f"by holds {given.dtype.name}, but the labels of the fit are {labels.dtype.name}.")
        place = np.minimum(np.searchsorted(labels, given), len(labels) - 1)
        if (unseen := labels[place] != given).any():
            raise ValueError(
                f"by holds the label {given[unseen][0].item()!r}, which no calibration row has; there are "
                f"{', '.join(map(repr, self.labels[:10]))}{', ...' if len(self.labels) > 10 else ''}."
            )
        return jax.device_put(place.astype(np.int32))

    def check_weights(self, number: np.ndarray, weights: Float[Array, " l"] | None) -> None:
        """Raise ValueError if the known weights of all rows of a group are 0."""
        if self.labels and weights is not None and not _checks.is_traced(weights):
            _checks.check_weights_of_groups(np.array(self.labels), number, np.asarray(weights))

    def number_of(self, label: Any) -> int:
        """The number of the group with a label.

        Raises:
            ValueError: if there is no such group.
        """
        if not self.labels:
            return 0
        _checks.check_choice("group", label, self.labels)
        return self.labels.index(label)


class GroupedTables(eqx.Module):
    """A table of errors for every group, with weights; made by fits with `by` or `weights`.

    Attributes:
        tables: the errors of every group; with the rule "symmetric" the absolute errors and their negatives.
        groups: the labels.
        sizes: how many calibration rows each group has [groups].
        effective: how many rows of equal weight the table of each group is worth [groups], (sum w)^2 / sum w^2.
        pooling: how many rows of a group those of all groups count for, in the table of each; None without partial
            pooling.
        weights: the function of x that gives the weight of a row; None where they come with the rows.
        scaled: whether errors are measured in predicted stds, or on the scale of y.
        rule: how a quantile is read from a table, see `functional.tables.quantile`; or "linear", between its values.
        tails: with the rule "linear" beyond the values, see `GroupedQuantiles`.
        weighted: whether the rows have weights.
        out_of_fold: whether the errors are those of `jaxcal.out_of_fold`.
    """

    tables: Tables | LinearTables
    groups: Groups
    sizes: Int[Array, " groups"]
    effective: Float[Array, " groups"]
    pooling: Float[Array, ""] | None
    weights: Callable | None = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)
    rule: str = eqx.field(static=True)
    tails: str = eqx.field(static=True)
    weighted: bool = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(
        self,
        x: ArrayLike | None,
        base: Distribution,
        *,
        by: Labels | None = None,
        weights: Weights | None = None,
    ) -> GroupedEmpirical | GroupedQuantiles:
        """The distributions base.mean + scale * Z, Z from the table of the row's group.

        Args:
            x: inputs [n, d]; used by functions of x alone, else it may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.
            weights: of the rows [n], if they were an array in the fit.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite, or a std not positive; if labels or weights are missing, of
                the wrong length or out of range; if no calibration row has the label of a row.
        """
        loc, scale = location_and_scale(base, self.scaled)
        number = self.groups.number_of_rows(x, base, by, loc.shape[0])
        weights = self.weights if weights is None else weights
        if (weights is not None) != self.weighted:
            raise ValueError(
                "the calibrator was fitted with weights: give those of these rows, weights=w."
                if self.weighted
                else "weights have no effect: the calibrator was fitted without."
            )
        # A pooled table is worth a number of rows, and a new row is worth one.
        new_weight = None if self.pooling is None else jnp.ones_like(loc)
        if weights is not None:  # of new rows all may be 0
            new_weight = _checks.as_vector("weights", _at(x, base, weights, "weights"), length=loc.shape[0])
            _checks.check_not_negative("weights", new_weight)
        if isinstance(self.tables, LinearTables):
            return GroupedQuantiles(loc, scale, number, self.tables, self.tails, new_weight)
        return GroupedEmpirical(loc, scale, number, self.tables, self.rule, new_weight)

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
        number = self.groups.number_of(group)
        rows = int(self.sizes[number])
        guarantee = coverage_guarantee(confidence_level, rows, self.rule, self.out_of_fold)
        if self.groups.labels and guarantee.places > rows:
            needed = quantiles.smallest_table(
                confidence_level if self.rule == "symmetric" else (1 + confidence_level) / 2
            )
            raise ValueError(
                f"group {group!r} has {rows} calibration rows, too few for level {confidence_level:g}, which needs at "
                f"least {needed}. Give more rows, a lower level, or put it together with another group."
            )
        if not self.weighted:
            return guarantee
        return WeightedGuarantee(confidence_level, rows, float(self.effective[number]))


def fit(
    x: ArrayLike | None,
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
        ValueError: if labels or weights are not as many as the rows, a weight is negative, NaN or infinite, or those of
            a group are all 0; if `partial_pooling` comes without groups, with weights, or with a single row.
    """
    if partial_pooling and (by is None or weights is not None or y.shape[0] < 2):
        raise ValueError("partial_pooling goes with labels of groups, by, without weights, from two rows on.")
    groups, number = Groups.of(x, base, by, y.shape[0])
    known = weights_of(x, base, weights, y.shape[0])
    groups.check_weights(number, known)
    errors = standardized_errors(base, y, scaled)
    if known is not None and not _checks.is_traced(known):
        counts = np.asarray(known)
        if not counts.all():  # of rows of weight 0 no table needs to know
            errors, number, known = errors[counts > 0], number[counts > 0], known[counts > 0]
    count = max(len(groups.labels), 1)
    sizes, pooling = np.bincount(number, minlength=count), None
    effective = _effective(number, sizes, known, errors.dtype)
    values, of_values = jnp.abs(errors) if rule == "symmetric" else errors, number
    if partial_pooling:
        pooling = _pooling.best(errors, jax.device_put(number), jax.device_put(sizes), error_scale(base, scaled))
        values, of_values, known, effective = _pooling.pooled(errors, number, sizes, pooling)
    return GroupedTables(
        tables=linear_tables.make(values, of_values, np.bincount(of_values, minlength=count), known)
        if rule == "linear"
        else tables.make(values, of_values, count, known, rule == "symmetric"),
        groups=groups,
        sizes=jax.device_put(sizes),
        effective=effective,
        pooling=pooling,
        weights=weights if callable(weights) else None,
        scaled=scaled,
        rule=rule,
        tails=tails,
        weighted=weights is not None,
        out_of_fold=base.is_out_of_fold,
    )


def weights_of(
    x: ArrayLike | None, base: Distribution, weights: Weights | None, length: int
) -> Float[Array, " l"] | None:
    """The weights of calibration rows, or None.

    Raises:
        ValueError: if they are not as many as the rows; if one is negative, NaN or infinite, or all are 0; if they are
            a function of x, and x is None.
    """
    return None if weights is None else _checks.as_weights(_at(x, base, weights, "weights"), length)


def _at(x: ArrayLike | None, base: Distribution, values: Labels | Weights, name: str) -> Any:
    """Labels or weights that are given, or those of a function of x or of the base."""
    if not callable(values):
        return values
    if isinstance(values, StdBins):
        return values(base)
    if x is None:
        raise ValueError(f"x is None, but {name} is a function of x: give x.")
    return values(x)


def _effective(number: np.ndarray, sizes: np.ndarray, weights: Float[Array, " l"] | None, dtype: np.dtype) -> Array:
    """(sum w)^2 / sum w^2 of every group."""
    if weights is None:
        return jax.device_put(np.array(sizes, dtype))
    if _checks.is_traced(weights):
        sums, squares = (jax.ops.segment_sum(each, number, len(sizes)) for each in (weights, weights**2))
        return sums**2 / squares
    known = np.asarray(weights, float)
    sums, squares = (np.bincount(number, each, minlength=len(sizes)) for each in (known, known**2))
    return jax.device_put(np.array(sums**2 / squares, dtype))
