"""Gaussian noise of one variance."""

from typing import ClassVar

import numpy as np
from jaxtyping import ArrayLike, Float

from jaxcal import _checks
from jaxcal._numpy import AnyArray
from jaxcal.gp.model import Data
from jaxcal.gp.process import Process
from jaxcal.gp.protocols import First, Inference, InitialOf, Noise, initial_models


class GaussianNoise(Noise):
    """y = f(x) + e, with e ~ N(0, variance); Rasmussen & Williams (2006), eq. 2.20.

    If the base model of RIO has a std, the noise variance is a learned mixture of a constant and the base's variance.

    Attributes:
        variance: the known variance in squared units of y, a number or a scalar array. None to learn it.

    Raises:
        ValueError: if the variance is no positive scalar.

    Example:
        >>> GaussianNoise(variance=0.25)
        GaussianNoise(variance=0.25)
    """

    is_host_driven: ClassVar[bool] = True

    variance: ArrayLike | None = None

    def __check_init__(self) -> None:
        """Check the options."""
        if self.variance is None:
            return
        if np.shape(self.variance):
            raise ValueError(f"the variance of the noise must be one number; got the shape {np.shape(self.variance)}.")
        _checks.check_positive("the variance of the noise", self.variance)

    @property
    def is_gaussian(self) -> bool:
        """True."""
        return True

    @property
    def known_variance(self) -> ArrayLike | None:
        """The variance that the user gave."""
        return self.variance

    def fit(
        self, inference: Inference, initial_of: InitialOf, data: Data, jitter: Float[AnyArray, ""], first: First = None
    ) -> Process:
        """The process of the greatest evidence, as the inference defines it."""
        return inference.conclude(inference.search(initial_models(initial_of, data), data, jitter, first), data, jitter)
