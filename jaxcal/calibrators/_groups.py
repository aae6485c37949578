"""Groups and weights, of calibration rows and of new rows.

The errors of each group make a table of their own, so that the coverage holds within every group (Mondrian conformal
prediction: Vovk, Lindsay, Nouretdinov and Gammerman 2003). Let p be the density of the calibration inputs and q the
density of the new inputs. With weights w(x) proportional to q(x) / p(x), the coverage holds for new rows (Tibshirani,
Barber, Candès and Ramdas 2019).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.calibrators import _pooling
from jaxcal.calibrators._base import check_guarantees, coverage_guarantee
from jaxcal.distributions import Distribution
from jaxcal.frames.labels import StdBins
from jaxcal.frames.layout import Table
from jaxcal.functional import linear_tables, tables
from jaxcal.functional.linear_tables import LinearTables
from jaxcal.functional.quantiles import smallest_table
from jaxcal.functional.tables import Tables
from jaxcal.guarantee import Guarantee, WeightedGuarantee

Labels = ArrayLike | Sequence | Callable | eqx.Module
Weights = ArrayLike | Callable
# The sorted errors of calibration rows, or a table of errors for every group. The type checker cannot know which.
if TYPE_CHECKING:
    Errors = Any
else:
    Errors = Float[Array, "*l"] | Tables | LinearTables

_NO_GROUPS = "by has no effect: the calibrator was fitted without groups."
_LACKS_WEIGHTS = "the calibrator was fitted with weights: give the weights of these rows, weights=w."
_NO_WEIGHTS = "weights have no effect: the calibrator was fitted without."


class CalibratorArguments(NamedTuple):
    """The arguments about rows that a calibrator gets: predictions, and inputs, labels and weights or None."""

    x: Table | None
    base: Distribution
    by: Labels | None
    weights: Weights | None

    @property
    def is_counted(self) -> bool:
        """Whether rows have groups or weights."""
        return self.by is not None or self.weights is not None


class _Function(eqx.Module):
    """A plain function of x as a static field, since a function is no array."""

    function: Callable = eqx.field(static=True)

    def __call__(self, x: Table) -> Any:
        return self.function(x)


class GroupLabels(eqx.Module):
    """The labels of groups, and where they come from.

    Attributes:
        labels: the labels of the groups, in increasing order; empty for one group of all rows.
        by: the module that computes the labels from x or, if it is a `labels.StdBins`, from the base; None if the
            labels come with the rows.
    """

    labels: tuple[Any, ...] = eqx.field(static=True)
    by: eqx.Module | None

    @classmethod
    def of(
        cls, x: Table | None, base: Distribution, by: Labels | None, length: int
    ) -> tuple["GroupLabels", np.ndarray]:
        """The groups of calibration rows, and the number of each row's group [length].

        Raises:
            ValueError: if there are not as many labels as rows, or `by` is a function and x is None.
        """
        if by is None:
            return cls(labels=(), by=None), np.zeros(length, np.int32)
        labels, number = np.unique(_checks.as_labels("by", _labels(x, base, by), length), return_inverse=True)
        module = by if isinstance(by, eqx.Module) else _Function(by) if callable(by) else None
        return cls(labels=tuple(labels.tolist()), by=module), number.astype(np.int32)

    def number_of_rows(self, x: Table | None, base: Distribution, by: Labels | None, length: int) -> Int[Array, " n"]:
        """The number of the group of each new row.

        Raises:
            ValueError: if labels are missing, if there are not as many labels as rows, or if no calibration row has
                one of the labels.
        """
        if not self.labels:
            if by is not None:
                raise ValueError(_NO_GROUPS)
            return jax.device_put(np.zeros(length, np.int32))
        by = self.by if by is None else by
        if by is None:
            raise ValueError(
                "the calibrator was fitted with labels of groups: give the labels of these rows, by=labels."
            )
        new_labels, labels = _labels(x, base, by), np.array(self.labels)
        if _checks.is_traced(new_labels):  # numbers, whose values are not known
            return jnp.clip(jnp.searchsorted(labels, new_labels), 0, len(labels) - 1).astype(jnp.int32)
        new_labels = _checks.as_labels("by", new_labels, length)
        if (new_labels.dtype.kind in "US") != (labels.dtype.kind in "US"):
            raise ValueError(f"by holds {new_labels.dtype.name}, but the labels of the fit are {labels.dtype.name}.")
        place = np.minimum(np.searchsorted(labels, new_labels), len(labels) - 1)
        if (unseen := labels[place] != new_labels).any():
            raise ValueError(
                f"by holds the label {new_labels[unseen][0].item()!r}, which no calibration row has; there are "
                f"{', '.join(map(repr, self.labels[:10]))}{', ...' if len(self.labels) > 10 else ''}."
            )
        return jax.device_put(place.astype(np.int32))

    def check_weights(self, number: np.ndarray, weights: Float[Array, " l"] | None) -> None:
        """Raise ValueError if the known weights of all rows of a group are 0."""
        if self.labels and weights is not None and not _checks.is_traced(weights):
            _checks.check_weights_of_groups(np.array(self.labels), number, np.asarray(weights))

    @property
    def count(self) -> int:
        """The number of groups."""
        return max(len(self.labels), 1)

    def number_of(self, label: Any) -> int:
        """The number of the group with a label.

        Raises:
            ValueError: if there is no such group.
        """
        if not self.labels:
            return 0
        _checks.check_choice("group", label, self.labels)
        return self.labels.index(label)


class CalibrationGroups(eqx.Module):
    """The calibration rows without their errors: their groups, their weights, and their number.

    Attributes:
        groups: the labels.
        sizes: the number of calibration rows of each group [groups].
        effective: the effective number of rows of each group [groups], (sum w)^2 / sum w^2.
        weights: the function of x that gives the weight of a row; None if the weights come with the rows.
        weighted: whether the rows have weights.
        pooling: the number of rows of a group that the errors of all groups count for, in the table of each group; None
            without partial pooling.
    """

    groups: GroupLabels
    sizes: Int[Array, " groups"]
    effective: Float[Array, " groups"]
    weights: Callable | None = eqx.field(static=True)
    weighted: bool = eqx.field(static=True)
    pooling: Float[Array, ""] | None = None

    @classmethod
    def of(cls, arguments: CalibratorArguments, dtype: np.dtype) -> tuple["CalibrationGroups", "CountedRows"]:
        """The groups and weights of calibration rows, and the number of the group and the weight of each row.

        Raises:
            ValueError: if there are not as many labels or weights as rows. If a weight is negative, NaN or infinite. If
                all weights of a group are 0.
        """
        x, base, by, weights = arguments
        length = base.mean.shape[0]
        groups, number = GroupLabels.of(x, base, by, length)
        known = weights_of(x, weights, length)
        groups.check_weights(number, known)
        kept = None
        if known is not None and not _checks.is_traced(known) and not (counts := np.asarray(known) > 0).all():
            kept = np.flatnonzero(counts)
            number, known = number[kept], known[kept]
        sizes = np.bincount(number, minlength=groups.count)
        effective = _effective(number, sizes, known, dtype)
        made = cls(groups, jax.device_put(sizes), effective, weights if callable(weights) else None, known is not None)
        return made, CountedRows(number, known, kept)

    def of_new(self, arguments: CalibratorArguments) -> tuple[Int[Array, " n"], Float[Array, " n"] | None]:
        """The number of the group of each new row, and its weight if the calibration rows have weights or are pooled.

        Raises:
            ValueError: if labels or weights are missing, have no effect, are of the wrong length or out of range. If
                no calibration row has the label of a row.
        """
        x, base, by, weights = arguments
        length = base.mean.shape[0]
        number = self.groups.number_of_rows(x, base, by, length)
        weights = self.weights if weights is None else weights
        if (weights is not None) != self.weighted:
            raise ValueError(_LACKS_WEIGHTS if self.weighted else _NO_WEIGHTS)
        if weights is None:  # the weights of a pooled table add up to a number of rows: a new row has weight 1
            return number, None if self.pooling is None else jnp.ones_like(base.mean)
        new_weight = _checks.as_vector("weights", values_at(x, weights, "weights"), length=length)
        _checks.check_not_negative("weights", new_weight)  # all may be 0
        return number, new_weight

    def guarantee(
        self, confidence_level: float, group: Any, rule: str, out_of_fold: bool
    ) -> Guarantee | WeightedGuarantee:
        """The guarantee of the interval that a rule reads from the table of the group with a label.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), or the errors are out of fold. If the rule
                guarantees nothing, or the tables are pooled. If no group has the label, or the group has too few rows
                for the level.
        """
        if self.pooling is not None:
            raise ValueError("partially pooled tables guarantee nothing: fit without partial_pooling for a guarantee.")
        check_guarantees(rule)
        number = self.groups.number_of(group)
        rows = int(self.sizes[number])
        guarantee = coverage_guarantee(confidence_level, rows, rule, out_of_fold)
        if self.groups.labels and guarantee.places > rows:
            needed = smallest_table(confidence_level if rule == "symmetric" else (1 + confidence_level) / 2)
            raise ValueError(
                f"group {group!r} has {rows} calibration rows, too few for level {confidence_level:g}, which needs at "
                f"least {needed}. Give more rows, a lower level, or put it together with another group."
            )
        if not self.weighted:
            return guarantee
        return WeightedGuarantee(confidence_level, rows, float(self.effective[number]))


class CountedRows(NamedTuple):
    """The calibration rows that count.

    Attributes:
        number: the number of the group of each row.
        weights: the weight of each row; None if the rows have no weights.
        kept: the positions of these rows; None for all rows. Tables do not contain rows of weight 0.
    """

    number: Int[np.ndarray, " l"]
    weights: Float[Array, " l"] | None
    kept: Int[np.ndarray, " l"] | None


def of_new_rows(
    rows: CalibrationGroups | None, arguments: CalibratorArguments
) -> tuple[Int[Array, " n"] | None, Float[Array, " n"] | None]:
    """`CalibrationGroups.of_new`; (None, None) for rows=None, if the calibrator was fitted without groups and weights.

    Raises:
        ValueError: as `CalibrationGroups.of_new` does, also if rows is None and labels or weights have no effect.
    """
    if rows is not None:
        return rows.of_new(arguments)
    if arguments.is_counted:
        raise ValueError(_NO_WEIGHTS if arguments.by is None else _NO_GROUPS)
    return None, None


def tables_of_groups(
    arguments: CalibratorArguments, errors: Float[Array, " l"], *, rule: str, scale: Float[Array, " l"] | None = None
) -> tuple[Errors, CalibrationGroups]:
    """A weighted table of the errors of calibration rows for every group, and the groups.

    Args:
        arguments: the arguments about the rows. `by` is None for one group of all rows, and `weights` is None for equal
            weights. The predictions are checked.
        errors: the errors of the rows [l], in units of `scale`.
        rule: how a quantile is read from a table, see `functional.tables.quantile`. "symmetric" has absolute errors and
            their negatives; "linear" interpolates between the values of the table.
        scale: the scale of the errors, for partial pooling in the unit of y; None for tables of the groups alone.

    Raises:
        ValueError: as `CalibrationGroups.of` does. If partial pooling comes without groups, with weights, or with a
            single row.
    """
    if scale is not None and (arguments.by is None or arguments.weights is not None or errors.shape[0] < 2):
        raise ValueError("partial_pooling goes with labels of groups, by, without weights, from two rows on.")
    rows, (number, known, kept) = CalibrationGroups.of(arguments, errors.dtype)
    errors, count = errors if kept is None else errors[kept], rows.groups.count
    if scale is not None:
        pooling = _pooling.best(errors, jax.device_put(number), rows.sizes, scale)
        errors, number, known = _pooling.pooled(errors, number, rows.sizes, pooling)
        rows = dataclasses.replace(rows, pooling=pooling)
    if rule == "linear":
        return linear_tables.make(errors, number, np.bincount(number, minlength=count), known), rows
    symmetric = rule == "symmetric"
    return tables.make(jnp.abs(errors) if symmetric else errors, number, count, known, symmetric), rows


def weights_of(x: Table | None, weights: Weights | None, length: int) -> Float[Array, " l"] | None:
    """The weights of calibration rows, or None.

    Raises:
        ValueError: if there are not as many weights as rows. If one is negative, NaN or infinite, or all are 0. If they
            are a function of x and x is None.
    """
    return None if weights is None else _checks.as_weights(values_at(x, weights, "weights"), length)


def _labels(x: Table | None, base: Distribution, by: Labels) -> Any:
    """The labels: `by` itself, or its values if it is a function of x or of the base."""
    return by(base) if isinstance(by, StdBins) else values_at(x, by, "by")


def values_at(x: Table | None, values: Any, name: str) -> Any:
    """Labels, weights or features: `values` itself, or its values at x if it is a function.

    Raises:
        ValueError: if `values` is a function and x is None.
    """
    if not callable(values):
        return values
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
