"""What the trained networks of all methods have in common."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from jaxcal.distributions import Distribution
from jaxcal.frames.columns import Columns
from jaxcal.frames.layout import Table
from jaxcal.frames.preprocessing import LogTails, Standardizer
from jaxcal.networks.training import TrainingRecord

D = TypeVar("D", bound=Distribution)


class TrainedNetwork(eqx.Module, Generic[D]):
    """A network, trained on standardized data: the base of what the `fit` of a method returns.

    Attributes:
        columns: what the columns of the training inputs were.
        x_scaler: the standardization of the inputs.
        y_scaler: the standardization of the target.
        training: how training went, a `jaxcal.networks.TrainingRecord`.
    """

    columns: Columns
    x_scaler: Standardizer | LogTails
    y_scaler: Standardizer
    training: TrainingRecord

    def __call__(self, x: Table) -> D:
        """The predictions at the rows of x; the same for a row whatever the others are.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        return _predict(self, self.columns(x))

    @abc.abstractmethod
    def _distribution(self, x: Float[Array, "n d"]) -> D:
        """The predictions at standardized inputs, on the scale of the data."""


@eqx.filter_jit
def _predict(fitted: TrainedNetwork[D], x: Float[Array, "n d"]) -> D:
    return fitted._distribution(fitted.x_scaler(x))
