"""The check of what a calibrator stands on: somebody's predictions, as a Distribution."""

import numpy as np

from jaxcal import _checks
from jaxcal.distributions import Distribution, Point


def check_base(base: object, length: int | None = None, *, outputs: bool = False) -> None:
    """Raise unless `base` is a Distribution of finite means and positive stds, with `length` rows where given.

    Args:
        base: the predictions.
        length: the number of rows expected.
        outputs: whether the predictions may be of several outputs, [n, t].

    Raises:
        TypeError: if `base` is not a Distribution.
        ValueError: if its mean or std is not finite or of that shape, or a std is not positive.
    """
    if not isinstance(base, Distribution):
        raise TypeError(
            f"base must be a Distribution; got {type(base).__name__}. "
            "Wrap point predictions as jaxcal.Point(mean), means and stds as jaxcal.Normal(mean, std)."
        )
    checked = _checks.as_matrix if outputs and base.mean.ndim == 2 else _checks.as_vector
    checked("base.mean", base.mean, length=length)
    if isinstance(base, Point):
        return
    std = checked("base.std", base.std, length=length)
    if not _checks.is_traced(std) and np.any(np.asarray(std) <= 0):
        bad = np.argwhere(np.asarray(std) <= 0)
        index = tuple(int(i) for i in bad[0])
        where = index[0] if len(index) == 1 else index
        raise ValueError(
            f"base.std must be positive; {len(bad)} values are not, the first at index {where} ({std[index]:g})."
        )
