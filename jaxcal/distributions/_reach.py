"""`Reach`: the levels between which a distribution knows its quantiles, and the warning of quantiles beyond."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from jaxcal.functional.quantiles import smallest_table


class Reach(NamedTuple):
    """The levels between which a distribution knows its quantiles, and the value of a quantile beyond.

    Attributes:
        lowest: the lowest of these levels: one number for all rows, or a number for each row [n].
        highest: the highest of these levels, likewise.
        beyond: the value of a quantile beyond, as a clause of a warning.
        rows: the number of calibration rows that the levels follow from: one for all rows, or one for each row [n].
            None for levels that the user gave.
        central: whether the calibration rows bound the confidence levels of intervals, and through them the levels.

    Example:
        >>> print(Reach(0.05, 0.95).warning(0.99, np.zeros(3)))
        quantiles are given at levels from 0.05 to 0.95; at 0.99 the outermost of them is taken, which is too near to \
the median.
    """

    lowest: ArrayLike = 0.0
    highest: ArrayLike = 1.0
    beyond: str = "the outermost of them is taken, which is too near to the median"
    rows: ArrayLike | None = None
    central: bool = False

    @classmethod
    def of_rows(cls, rows: int, beyond: str = "the quantile is infinite", *, central: bool = False) -> "Reach":
        """The reach of n calibration rows: levels up to n / (n + 1), or confidence levels if `central`."""
        share = rows / (rows + 1)
        highest = (1 + share) / 2 if central else share
        return cls(1 - highest, highest, beyond, rows, central)

    def warning(self, p: ArrayLike, values: ArrayLike) -> str | None:
        """The message about known quantiles, if some of their levels lie beyond; else None.

        Args:
            p: one level, or k levels.
            values: the quantiles, [n] or [n, k].
        """
        levels, values = np.asarray(p, float), np.asarray(values)
        inside = (levels > 0) & (levels < 1)
        wanted = np.unique(levels[inside])
        low, high = (np.asarray(each, float)[..., None] for each in (self.lowest, self.highest))
        rounding = 4 * float(jnp.finfo(values.dtype).eps)
        is_beyond = (wanted < low - rounding) | (wanted > high + rounding)
        if not is_beyond.any():
            return None
        wanted = wanted[is_beyond.reshape(-1, len(wanted)).any(0)]
        if self.rows is not None:
            return self._of_calibration(wanted, np.atleast_1d(is_beyond.any(-1)))
        infinite = np.isinf(values) & inside
        if low.ndim > 1 and infinite.any():
            rows = (infinite.any(-1) if levels.ndim else infinite).sum()
            return (
                f"in {rows} rows the quantile is infinite: too few calibration rows resemble them for a guarantee at "
                "the level asked for."
            )
        what = " and ".join(f"{level:g}" for level in wanted) if len(wanted) < 3 else f"{len(wanted)} levels"
        return f"quantiles are given at levels from {low.min():g} to {high.max():g}; at {what} {self.beyond}."

    def _of_calibration(self, wanted: np.ndarray, is_beyond: np.ndarray) -> str:
        """The message if the quantiles are ranks: how many calibration rows these levels need."""
        levels = np.abs(2 * wanted - 1) if self.central else np.maximum(wanted, 1 - wanted)
        needed, rows = smallest_table(levels.max()), np.asarray(self.rows)
        if rows.ndim == 0:
            return (
                f"{rows} calibration rows are too few for the level asked for, which needs at least {needed}: "
                f"{self.beyond}."
            )
        return (
            f"in {is_beyond.sum()} rows {self.beyond}: their groups have too few calibration rows for the level asked "
            f"for; the smallest has {rows[is_beyond].min()}, and {needed} of equal weight are needed."
        )


# The quantiles of most distributions are known at all levels.
EVERYWHERE = Reach()
