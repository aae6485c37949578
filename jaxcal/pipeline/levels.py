"""The last step of learned errors: other rows recalibrate the levels, and the shape of every row stays.

Each group of rows has levels of its own.
"""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from jaxcal.calibrators import conformal
from jaxcal.calibrators._groups import Groups, Labels
from jaxcal.calibrators.conformal import ConformalCalibrator
from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Table
from jaxcal.guarantee import Guarantee, WeightedGuarantee
from jaxcal.pipeline.out_of_fold import joined, take_rows


class Levels(eqx.Module):
    """Recalibrated levels of each group; made by `recalibrated_levels`.

    Attributes:
        groups: their labels.
        calibrators: of each group.
    """

    groups: Groups
    calibrators: tuple[ConformalCalibrator, ...]

    def __call__(self, x: Table, base: Distribution, *, by: Labels | None = None) -> Distribution:
        """The distribution of every row, by the levels of its group.

        Raises:
            ValueError: if labels are missing, are not as many as the rows, or one was in no calibration row.
        """
        if not self.groups.labels:
            return self.calibrators[0](x, base)
        number = np.asarray(self.groups.number_of_rows(x, base, by, len(base)))
        rows = [np.flatnonzero(number == k) for k in range(self.groups.count)]
        found = [(each, of_group) for each, of_group in zip(self.calibrators, rows, strict=True) if len(of_group)]
        parts = [calibrator(*take_rows(of_group, x, base)) for calibrator, of_group in found]
        return joined(parts, [of_group for _, of_group in found])

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee | WeightedGuarantee:
        """The coverage guarantee of the central interval at this level, in the group with a label.

        Raises:
            ValueError: as `jaxcal.calibrators.conformal.ConformalCalibrator.guarantee`.
        """
        return self.calibrators[self.groups.number_of(group)].guarantee(confidence_level)


def recalibrated_levels(x: Table, base: Distribution, y: Float[Array, " n"], *, by: Labels | None = None) -> Levels:
    """Conformal calibration of the probabilities of targets (`score="cdf"`, `rule="linear"`), in every group.

    In a group with a target whose level is 0 or 1, an outlier, it is that of errors over stds.

    Args:
        x: inputs [n, d], or a data frame.
        base: predictions of rows that the model was not fitted to [n].
        y: targets [n].
        by: labels of groups [n], or a function of x; None for one group.
    """
    groups, number = Groups.of(x, base, by, len(y))
    rows = [np.flatnonzero(number == k) for k in range(groups.count)]
    return Levels(groups, tuple(_of_group(*take_rows(of_group, x, base, y)) for of_group in rows))


def _of_group(x: Table, base: Distribution, y: Float[Array, " n"]) -> ConformalCalibrator:
    try:
        return conformal.fit(x, base, y, score="cdf", rule="linear")
    except ValueError:
        return conformal.fit(x, base, y)
