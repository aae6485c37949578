"""Conformalized quantile regression: a base's own intervals at given levels, moved until they cover."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, coverage_guarantee
from jaxcal.distributions import Distribution, Point, Quantiles
from jaxcal.functional.quantiles import empirical_quantile, smallest_table
from jaxcal.guarantee import Guarantee

_CONFIDENCE_LEVELS = (0.5, 0.8, 0.9, 0.95)


def fit(
    base: Distribution, y: Float[Array, " l"], confidence_levels: Sequence[float] | None
) -> "ConformalizedQuantiles":
    """`conformal.fit` with score="quantile", of checked targets."""
    wanted = _CONFIDENCE_LEVELS if confidence_levels is None else confidence_levels
    levels = tuple(sorted({float(level) for level in wanted}))
    rows = y.shape[0]
    _checks.check_length("confidence_levels", np.array(levels), None)
    _checks.check_fraction("confidence_levels", np.array(levels))
    if rows < (needed := smallest_table(levels[-1])):
        raise ValueError(
            f"{rows} rows are too few for confidence level {levels[-1]:g}: at least {needed} are needed. "
            "Give more rows, or lower confidence_levels."
        )
    margins, num_covered = _margins(_quantiles_of(base, levels, rows), y, np.array(levels))
    return ConformalizedQuantiles(
        margins=margins,
        num_covered=num_covered,
        confidence_levels=levels,
        num_calibration=rows,
        out_of_fold=base.is_out_of_fold,
    )


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
    """

    margins: Float[Array, "*k"]
    num_covered: Int[Array, "*k"]
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Quantiles:
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
            ValueError: if the confidence level is none of them, or the quantiles are out of fold.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        guarantee = coverage_guarantee(confidence_level, self.num_calibration, "symmetric", self.out_of_fold)
        if self.num_covered.ndim > 1:  # of several runs
            return guarantee
        number = int(self.num_covered[self.confidence_levels.index(confidence_level)])
        return dataclasses.replace(guarantee, widened_to=number) if number > guarantee.places else guarantee


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
    quantiles: Float[Array, "l q"], y: Float[Array, " l"], confidence_levels: Float[ArrayLike, " k"]
) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """The score of rank ceil((L + 1) c) of every level, and how many rows the intervals then cover."""
    quantiles, y = lax.stop_gradient((quantiles, y))
    middle = quantiles.shape[1] // 2
    lower, upper = quantiles[:, :middle][:, ::-1], quantiles[:, middle + 1 :]
    errors = jnp.maximum(lower - y[:, None], y[:, None] - upper)
    margins = jax.vmap(lambda table, level: empirical_quantile(table, level, "conformal"), (1, 0))(
        jnp.sort(errors, axis=0), confidence_levels
    )
    moved = _moved_outwards(quantiles, margins)
    inside = (moved[:, :middle][:, ::-1] <= y[:, None]) & (y[:, None] <= moved[:, middle + 1 :])
    # A row at an end of an interval lies in it, whatever rounding makes of the end.
    inside |= lax.cummax((errors <= margins[None]).astype(int), axis=1) > 0
    return margins, jnp.count_nonzero(inside, axis=0)


@jax.jit
def _moved_outwards(quantiles: Float[Array, "n q"], margins: Float[Array, " k"]) -> Float[Array, "n q"]:
    """The quantiles moved by their margins; each interval is widened to contain the narrower ones and the median."""
    middle = margins.shape[0]
    margins = margins.astype(quantiles.dtype)
    moved = quantiles + jnp.concatenate([-margins[::-1], jnp.zeros_like(margins[:1]), margins])[None]
    lower = lax.cummin(moved[:, : middle + 1], axis=1, reverse=True)
    upper = lax.cummax(moved[:, middle:], axis=1)
    return jnp.concatenate([lower, upper[:, 1:]], axis=1)
