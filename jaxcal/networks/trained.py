"""What the trained networks of all methods have in common."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float

from jaxcal.distributions import Distribution
from jaxcal.networks.training import TrainingRecord, as_inputs
from jaxcal.preprocessing import LogTails, Standardizer

D = TypeVar("D", bound=Distribution)


class TrainedNetwork(eqx.Module, Generic[D]):
    """A network, trained on standardized data: the base of what the `fit` of a method returns.

    Attributes:
        x_scaler: the standardization of the inputs.
        y_scaler: the standardization of the target.
        training: how training went, a `jaxcal.networks.TrainingRecord`.
    """

    x_scaler: Standardizer | LogTails
    y_scaler: Standardizer
    training: TrainingRecord

    def __call__(self, x: ArrayLike) -> D:
        """The predictions at the rows of x; the same for a row whatever the others are.

        Args:
            x: inputs [n, d]; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        return _predict(self, as_inputs(x, self.x_scaler))

    @abc.abstractmethod
    def _distribution(self, x: Float[Array, "n d"]) -> D:
        """The predictions at standardized inputs, on the scale of the data."""


@eqx.filter_jit
def _predict(fitted: TrainedNetwork[D], x: Float[Array, "n d"]) -> D:
    return fitted._distribution(fitted.x_scaler(x))
