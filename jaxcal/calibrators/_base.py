"""The check of what a calibrator stands on: somebody's predictions, as a Distribution."""

import numpy as np

from jaxcal import _checks
from jaxcal.distributions import Distribution, Point


def check_base(base: object, length: int | None = None) -> None:
    """Raise unless `base` is a Distribution of finite means and positive stds, with `length` rows where given.

    Raises:
        TypeError: if `base` is not a Distribution.
        ValueError: if its mean or std is not a finite vector of that length, or a std is not positive.
    """
    if not isinstance(base, Distribution):
        raise TypeError(
            f"base must be a Distribution; got {type(base).__name__}. "
            "Wrap point predictions as jaxcal.Point(mean), means and stds as jaxcal.Normal(mean, std)."
        )
    _checks.as_vector("base.mean", base.mean, length=length)
    if isinstance(base, Point):
        return
    std = _checks.as_vector("base.std", base.std, length=length)
    if not _checks.is_traced(std) and np.any(np.asarray(std) <= 0):
        bad = np.flatnonzero(np.asarray(std) <= 0)
        raise ValueError(
            f"base.std must be positive; {bad.size} values are not, the first at index {bad[0]} ({std[bad[0]]:g})."
        )
