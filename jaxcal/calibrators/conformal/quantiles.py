"""Conformalized quantile regression: a base's own intervals at given levels, moved until they cover."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxcal import _checks
from jaxcal.calibrators._base import (
    as_confidence_levels,
    check_base,
    check_not_smoothed,
    check_rows_reach,
    coverage_guarantee,
    smoothed,
)
from jaxcal.calibrators._groups import CalibrationGroups, Labels, Weights
from jaxcal.distributions import Distribution, Point, Quantiles
from jaxcal.frames.layout import Table
from jaxcal.functional import rounding, tables
from jaxcal.functional.quantiles import empirical_quantile, smallest_table
from jaxcal.functional.tables import Tables
from jaxcal.guarantee import Guarantee, WeightedGuarantee


def fit(
    base: Distribution,
    y: Float[Array, " l"],
    confidence_levels: Sequence[float] | None,
    smoothing: float | None,
) -> "ConformalizedQuantiles":
    """`conformal.fit` with score="quantile", of checked targets."""
    levels, rows = as_confidence_levels(confidence_levels), y.shape[0]
    check_rows_reach(rows, levels[-1])
    margins, num_covered = _margins(_quantiles_of(base, levels, rows), y, np.array(levels, y.dtype), smoothing)
    return ConformalizedQuantiles(
        margins=margins,
        num_covered=num_covered,
        confidence_levels=levels,
        num_calibration=rows,
        out_of_fold=base.is_out_of_fold,
        smoothed=smoothing is not None,
    )


def fit_groups(
    x: Table | None,
    base: Distribution,
    y: Float[Array, " l"],
    confidence_levels: Sequence[float] | None,
    by: Labels | None,
    weights: Weights | None,
) -> "GroupedConformalizedQuantiles":
    """`conformal.fit` with score="quantile" and groups or weights, of checked targets."""
    levels = as_confidence_levels(confidence_levels)
    errors = _errors(_quantiles_of(base, levels, y.shape[0]), y)
    rows, (number, known, kept) = CalibrationGroups.of(x, base, by, weights, y.dtype)
    sizes, needed = np.bincount(number, minlength=rows.groups.count), smallest_table(levels[-1])
    if known is None and sizes.min() < needed:
        raise ValueError(
            f"group {rows.groups.labels[sizes.argmin()]!r} has {sizes.min()} rows, too few for confidence level "
            f"{levels[-1]:g}: at least {needed} are needed. Give more rows, or lower confidence_levels, or put it "
            "together with another group."
        )
    made = _tables_of_levels(errors if kept is None else errors[kept], number, rows.groups.count, known)
    return GroupedConformalizedQuantiles(made, rows, levels, base.is_out_of_fold)


class ConformalizedQuantiles(eqx.Module):
    """How far the quantiles of a base are moved; made by `conformal.fit` with score="quantile".

    Attributes:
        margins: by how much the interval of each level grows at either end, [k], on the scale of y; negative where it
            shrinks.
        num_covered: how many calibration rows lie in the interval of each level, [k], after it is widened to contain
            those of lower levels.
        confidence_levels: the levels, in increasing order.
        num_calibration: the number of calibration rows.
        out_of_fold: whether the quantiles are those of `jaxcal.out_of_fold`.
        smoothed: whether the margins are means over neighboring ranks.
    """

    margins: Float[Array, "*k"]
    num_covered: Int[Array, "*k"]
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)
    smoothed: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Table | None, base: Distribution) -> Quantiles:
        """The distributions with these intervals at the levels of the fit, the base's median, and lines in between.

        The guarantee is that of the intervals at these levels alone. The distribution ends at the widest of them.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean, or a quantile that is needed, is not finite.
        """
        quantiles = _quantiles_of(base, self.confidence_levels)
        return Quantiles(_levels(self.confidence_levels), _moved_outwards(quantiles, self.margins))

    def guarantee(self, confidence_level: float) -> Guarantee:
        """The coverage guarantee of the interval at one of the levels of the fit.

        An interval that is widened to contain those of lower levels covers more: the guarantee tells how many
        calibration rows it covers.

        Raises:
            ValueError: if the confidence level is none of them, or the quantiles are out of fold or smoothed.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        check_not_smoothed(self.smoothed)
        guarantee = coverage_guarantee(confidence_level, self.num_calibration, "symmetric", self.out_of_fold)
        if self.num_covered.ndim > 1:  # of several runs
            return guarantee
        number = int(self.num_covered[self.confidence_levels.index(confidence_level)])
        return dataclasses.replace(guarantee, widened_to=number) if number > guarantee.places else guarantee


class GroupedConformalizedQuantiles(eqx.Module):
    """The scores of every level and group; made by `conformal.fit` with score="quantile" and `by` or `weights`.

    Attributes:
        tables: the scores of every level, [k] leading.
        rows: the groups and weights of the calibration rows.
        confidence_levels: the levels, in increasing order.
        out_of_fold: whether the quantiles are those of `jaxcal.out_of_fold`.
    """

    tables: Tables
    rows: CalibrationGroups
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(
        self, x: Table | None, base: Distribution, *, by: Labels | None = None, weights: Weights | None = None
    ) -> Quantiles:
        """The distributions that `ConformalizedQuantiles` gives, each by the scores of the row's group.

        With weights an interval is infinite, with a warning, where the weight of a row is too large beside those of the
        calibration rows.

        Args:
            x: inputs [n, d]; used by functions of x alone, else it may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.
            weights: of the rows [n], if they were an array in the fit.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean, or a quantile that is needed, is not finite; if labels or weights are missing, of
                the wrong length or out of range; if no calibration row has the label of a row.
        """
        values = _quantiles_of(base, self.confidence_levels)
        number, new_weight = self.rows.of_new(x, base, by, weights)
        central = np.array(self.confidence_levels)
        values, reach = _moved_by_tables(values, self.tables, number, central, new_weight)
        levels = _levels(self.confidence_levels)
        if not self.rows.weighted:
            return Quantiles(levels, values)
        return Quantiles(levels, values, lowest=(1 - reach) / 2, highest=(1 + reach) / 2)

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee | WeightedGuarantee:
        """The coverage guarantee of the interval at one of the levels of the fit, in the group with a label.

        An interval that is widened to contain those of lower levels covers more.

        Raises:
            ValueError: if the confidence level is none of them, the quantiles are out of fold, or there is no group
                with the label.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        return self.rows.guarantee(confidence_level, group, "symmetric", self.out_of_fold)


def _levels(confidence_levels: tuple[float, ...]) -> np.ndarray:
    """The levels of the quantiles, in increasing order: those of the lower ends, the median, those of the upper."""
    central = np.array(confidence_levels)
    return np.concatenate([(1 - central[::-1]) / 2, [0.5], (1 + central) / 2])


def _quantiles_of(
    base: Distribution, confidence_levels: tuple[float, ...], length: int | None = None
) -> Float[Array, "n q"]:
    """The base's quantiles at these levels, finite, [n, 2 k + 1]."""
    # Only the mean is checked: the quantiles of a row may all be equal, and its std 0.
    check_base(Point(base.mean) if isinstance(base, Distribution) else base, length)
    quantiles = base.icdf(_levels(confidence_levels))
    _checks.check_finite("base.icdf(levels)", quantiles)
    return quantiles


@jax.jit
def _margins(
    quantiles: Float[Array, "l q"],
    y: Float[Array, " l"],
    confidence_levels: Float[ArrayLike, " k"],
    smoothing: Real[ArrayLike, ""] | None,
) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """The score of rank ceil((L + 1) c) of every level, and how many rows the intervals then cover."""
    errors, middle = _errors(quantiles, y), quantiles.shape[1] // 2
    margin = lambda table, level: empirical_quantile(smoothed(table, smoothing), level, "conformal")
    margins = jax.vmap(margin, (1, 0))(jnp.sort(errors, axis=0), confidence_levels)
    moved = _moved_outwards(quantiles, margins)
    inside = (moved[:, :middle][:, ::-1] <= y[:, None]) & (y[:, None] <= moved[:, middle + 1 :])
    return margins, jnp.count_nonzero(inside, axis=0)


@jax.jit
def _errors(quantiles: Float[Array, "l q"], y: Float[Array, " l"]) -> Float[Array, "l k"]:
    """How far each y lies outside the interval of every level; negative inside."""
    middle = quantiles.shape[1] // 2
    lower, upper = quantiles[:, :middle][:, ::-1], quantiles[:, middle + 1 :]
    return jnp.maximum(lower - y[:, None], y[:, None] - upper)


@partial(jax.jit, static_argnames="count")
def _tables_of_levels(
    errors: Float[Array, "l k"], number: Int[ArrayLike, " l"], count: int, weights: Float[Array, " l"] | None
) -> Tables:
    return jax.vmap(lambda errors: tables.make(errors, number, count, weights), 1)(errors)


@jax.jit
def _moved_by_tables(
    quantiles: Float[Array, "n q"],
    of_levels: Tables,
    number: Int[Array, " n"],
    confidence_levels: Float[ArrayLike, " k"],
    new_weight: Float[Array, " n"] | None,
) -> tuple[Float[Array, "n q"], Float[Array, " n"]]:
    """The quantiles moved by the margins of each row's group, and the highest level whose margin is finite, or 0.

    Beyond it the margin of that level stands for the infinite ones.
    """
    new = jnp.ones(number.shape, quantiles.dtype) if new_weight is None else new_weight.astype(quantiles.dtype)
    levels = jnp.asarray(confidence_levels, quantiles.dtype)
    of_level = lambda table, c: tables.reaching(table, number, jnp.full_like(new, c), new, jnp.zeros_like(new))
    margins = jax.vmap(of_level, out_axes=1)(of_levels, levels)
    count = jnp.isfinite(margins).sum(1)  # the margins of lower levels are finite where that of a higher one is
    last = jnp.take_along_axis(margins, jnp.maximum(count - 1, 0)[:, None], axis=1)
    margins = jnp.where(jnp.isfinite(margins), margins, jnp.where(count[:, None] > 0, last, 0))
    reach = jnp.where(count > 0, levels[jnp.maximum(count - 1, 0)], 0)
    return _moved_outwards(quantiles, margins), reach


@jax.jit
def _moved_outwards(quantiles: Float[Array, "n q"], margins: Float[Array, "... k"]) -> Float[Array, "n q"]:
    """The quantiles moved by their margins, and rounded outward.

    Each interval is widened to contain the narrower ones and the median.
    """
    middle = margins.shape[-1]
    margins = jnp.atleast_2d(margins).astype(quantiles.dtype)
    moves = jnp.concatenate([-margins[:, ::-1], jnp.zeros_like(margins[:, :1]), margins], axis=1)
    moves, side = jnp.broadcast_to(moves, quantiles.shape), jnp.sign(jnp.arange(2 * middle + 1) - middle)
    moved = rounding.outward(quantiles + moves, jnp.broadcast_to(side, quantiles.shape), quantiles, moves)
    lower = lax.cummin(moved[:, : middle + 1], axis=1, reverse=True)
    upper = lax.cummax(moved[:, middle:], axis=1)
    return jnp.concatenate([lower, upper[:, 1:]], axis=1)
