"""The last step of learned errors: other rows recalibrate the levels, and the shape of every row stays.

A target at level u of its distribution lies in the central intervals from the confidence level |2 u - 1| on. This level
is its score. Take the score of rank ceil(c (L + 1)) among L rows. The interval at this confidence level covers a new
row with probability at least c. This is split conformal prediction (Vovk, Gammerman and Shafer, "Algorithmic Learning
in a Random World", 2005). Between ranks the level is interpolated, one rank further out, so that there is a density.
Each group of rows has levels of its own.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from jaxcal.calibrators._base import check_not_out_of_fold
from jaxcal.calibrators._groups import GroupLabels, Labels
from jaxcal.distributions import Distribution, Recalibrated
from jaxcal.frames.layout import Table
from jaxcal.guarantee import Guarantee
from jaxcal.pipeline.out_of_fold import joined

# From this confidence level on, the ends of intervals are one rank further out. Below it they are a part of a rank
# further out.
_FROM = 0.5


class RecalibratedLevels(eqx.Module):
    """Recalibrated levels of each group; made by `recalibrated_levels`.

    Attributes:
        groups: the labels of the groups.
        tables: for each group, the levels of the ends of central intervals, symmetric around 1/2 [2 L + 1].
        numbers: for each group, how many rows it has, and how many of them have levels other than 0 and 1.
        out_of_fold: whether the rows were predicted by models other than the model that predicts new rows.
    """

    groups: GroupLabels
    tables: tuple[Float[Array, " _"], ...]
    numbers: tuple[tuple[int, int], ...] = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(self, x: Table, base: Distribution, *, by: Labels | None = None) -> Distribution:
        """The distribution of every row, by the levels of its group.

        Raises:
            ValueError: if labels are missing or are not as many as the rows, or if no calibration row has one of them.
        """
        if not self.groups.labels:
            return Recalibrated(base, self.tables[0], central=True)
        number = np.asarray(self.groups.number_of_rows(x, base, by, len(base)))
        rows = [np.flatnonzero(number == k) for k in range(self.groups.count)]
        tables = [(table, places) for table, places in zip(self.tables, rows, strict=True) if len(places)]
        parts = [Recalibrated(base[places], table, central=True) for table, places in tables]
        return joined(parts, [places for _, places in tables])

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee:
        """The coverage guarantee of the central interval at this level, in the group with a label.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), the rows are out of fold, or no group has the
                label.
        """
        check_not_out_of_fold(self.out_of_fold)
        rows, reached = self.numbers[self.groups.number_of(group)]
        places = Guarantee.of(confidence_level, rows, "symmetric").places
        inside = places if confidence_level >= _FROM else max(places - 1, 0)
        return Guarantee(confidence_level, rows, min(inside, reached), between_scores=True)


def recalibrated_levels(
    x: Table, base: Distribution, y: Float[Array, " n"], *, by: Labels | None = None
) -> RecalibratedLevels:
    """Learn the levels of the ends of central intervals from the levels of held-out targets.

    Args:
        x: inputs [n, d], or a data frame.
        base: predictions of these rows [n], with a density.
        y: targets [n].
        by: labels of groups [n], or a function of x; None for one group.
    """
    groups, number = GroupLabels.of(x, base, by, len(y))
    level = np.asarray(base.cdf(y), float)
    # s = |2 F(y) - 1|, sorted within each group
    scores = [np.sort(abs(2 * level[number == k] - 1)) for k in range(groups.count)]
    most = 1 - 2 * float(np.finfo(np.asarray(y).dtype).eps)
    numbers = tuple((len(each), int((each < most).sum())) for each in scores)
    tables = tuple(jax.device_put(table_of(np.minimum(each, most)).astype(y.dtype)) for each in scores)
    return RecalibratedLevels(groups, tables, numbers, base.is_out_of_fold)


def table_of(scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " m"]:
    """The levels of interval ends at the confidence levels j / (n + 1), on both sides of 1/2 [2 n + 1].

    At j / (n + 1) >= 1/2 the ends are at the score of rank j + 1. So the interval between two of these levels is never
    too small.

    Args:
        scores: the sorted scores [n].
    """
    rank = np.arange(1, len(scores) + 1)
    shift = np.minimum(rank / (len(scores) + 1) / _FROM, 1)
    # Beyond the last score s_n the last difference is repeated: min(2 s_n - s_(n-1), (1 + s_n) / 2). No level is then 0
    # or 1.
    last, before = scores[-1], scores[-2] if len(scores) > 1 else 0.0
    beyond = min(2 * last - before, (1 + last) / 2)
    reach = np.interp(rank + shift, np.arange(len(scores) + 2), [0.0, *scores, beyond])
    # levels (1 - s) / 2 and (1 + s) / 2
    return np.concatenate([(1 - reach[::-1]) / 2, [0.5], (1 + reach) / 2])
