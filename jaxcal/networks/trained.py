"""The base classes of the trained networks of all methods."""

import abc
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Generic, TypeVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from jaxcal._numpy import AnyArray, bucket, can_be_filled, filled, numpy_or_jit
from jaxcal.distributions import Distribution
from jaxcal.distributions._rows import predicted_by_buckets
from jaxcal.frames.columns import Columns
from jaxcal.frames.layout import Table
from jaxcal.frames.preprocessing import LogTails, Standardizer
from jaxcal.networks.held_out import Widening
from jaxcal.networks.presets import Settings
from jaxcal.networks.training import XY, TrainingRecord, TrainingSplit
from jaxcal.optimize import Optimum

T = TypeVar("T")
D = TypeVar("D", bound=Distribution)
F = TypeVar("F", bound="TrainedNetwork")


class TrainedNetwork(eqx.Module, Generic[D]):
    """A network trained on standardized data: the base of the classes that the methods' `fit` returns.

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

    @classmethod
    def of(cls: type[F], columns: Columns, rows: TrainingSplit, optimum: Optimum, settings: Settings, **own: Any) -> F:
        """The module that `fit` returns, from the results of a training and the method's own parts.

        Raises:
            FloatingPointError: if the training diverged, and the settings say to throw.
        """
        training = TrainingRecord.of(optimum, throw=settings.throw, validated=settings.steps is None)
        return cls(columns=columns, x_scaler=rows.x_scaler, y_scaler=rows.y_scaler, training=training, **own)

    def __call__(self, x: Table) -> D:
        """The predictions at the rows of x; a row's prediction does not depend on the other rows.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        return _predict(self, self.columns(x))

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy can predict with it."""
        return False

    @abc.abstractmethod
    def _distribution(self, x: Float[AnyArray, "n d"]) -> D:
        """The predictions at standardized inputs, on the scale of the data."""


def _knows(fitted: TrainedNetwork, *_: Any) -> bool:
    return fitted.in_numpy


@numpy_or_jit(when=_knows, around=predicted_by_buckets)
def _predict(fitted: TrainedNetwork[D], x: Float[AnyArray, "n d"]) -> D:
    return fitted._distribution(fitted.x_scaler(x))


class WidenedNetwork(TrainedNetwork[D]):
    """A network whose variance is corrected to the variance of new rows by its validation set.

    Attributes:
        widening: this correction; None with a preset.
    """

    widening: Widening | None

    @classmethod
    def of(cls: type[F], columns: Columns, rows: TrainingSplit, optimum: Optimum, settings: Settings, **own: Any) -> F:
        """As `TrainedNetwork.of`; if the settings calibrate, the validation set widens the variance."""
        fitted = super().of(columns, rows, optimum, settings, widening=None, **own)
        return replace(fitted, widening=_widening(fitted, rows.validation)) if settings.calibrate else fitted

    @abc.abstractmethod
    def _moments(self, x: Float[AnyArray, "n d"]) -> tuple[Float[AnyArray, " n"], ...]:
        """The mean and the variance before widening, at standardized inputs; for Student t the squared scale and df."""


def weighing_held_out_rows(program: Callable[..., T]) -> Callable[..., T]:
    """Pad the held-out rows of a program of (model, rows, weights), so that nearby numbers of rows share a program.

    The padding has the weight 0. On an accelerator, and in a transformation, nothing is padded and the weights are
    None.
    """

    @wraps(program)
    def call(fitted: Any, validation: XY) -> T:
        number = len(validation[1])
        if not can_be_filled(fitted, validation):
            return program(fitted, validation)
        size = bucket(number)
        return program(fitted, filled(validation, size), (np.arange(size) < number).astype(validation[1].dtype))

    return call


@numpy_or_jit(when=_knows, around=weighing_held_out_rows)
def _widening(fitted: WidenedNetwork, validation: XY, weights: Float[Array, " n"] | None = None) -> Widening:
    x, y = validation
    mean, variance, *df = fitted._moments(x)
    return Widening.of(variance, y - mean, df=df[0] if df else None, weights=weights)
