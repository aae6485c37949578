"""Rows filled up to a common number, so that fits and predictions of several sizes share a compiled program.

Folds differ by a row, and a growing set has another size each time. Without padding every size would be compiled anew.
The padding rows do not count in the fit (`Data.included`), and are cut off from its result. NumPy needs no padding.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax import Device
from jaxtyping import Array, Bool

from jaxcal._numpy import filled, is_known, numpy_or_jit
from jaxcal._programs import at_top
from jaxcal.gp.process import Process

# Rows of a fit are filled up to a multiple of this. They take little of its time, unless the fit is very short.
_MULTIPLE = 16
# Points of a prediction are filled up to a power of two, and more points than this to a multiple of this.
_FEW_POINTS = 1024

T = TypeVar("T")


def padded(rows: Sequence[Any], device: Device | None) -> tuple[tuple[Array | None, ...], Bool[Array, " n"]]:
    """The rows of a fit filled up, and which of them count.

    Args:
        rows: arrays with a leading axis of rows; None for an array that is not there.
        device: where to put them.
    """
    number = len(rows[-1])
    size = number + -number % _MULTIPLE
    return filled(tuple(rows), size, device), jax.device_put(np.arange(size) < number, device)


def device_of(*trees: Any) -> Device | None:
    """The one device that arrays were put on; None if they were put on no device, or on several."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array) and leaf.committed]
    devices = {device for array in arrays for device in array.devices()}
    return devices.pop() if len(devices) == 1 else None


def without_padding(process: Process, number: int) -> Process:
    """The process with the first `number` rows alone."""
    parts = lambda process: (process.points, process.posterior.weights, process.posterior.shrink)
    points, weights, shrink = parts(process)
    points, weights = jax.tree.map(lambda rows: _cut(rows, number), (points, weights))
    return eqx.tree_at(parts, process, (points, weights, _cut(shrink, number, axes=2)))


def prediction(predict: Callable[..., T]) -> Callable[..., T]:
    """Decorate `predict(fitted, points, include_noise)`: by NumPy if possible, else by one program for each bucket.

    Args:
        predict: the function to decorate. `fitted` holds a process. `points` is a tuple of arrays with a leading axis
            of points, or None. All results have that axis.
    """
    return numpy_or_jit(predict, when=lambda fitted, *_: fitted.process.in_numpy, around=_by_buckets)


def _by_buckets(program: Callable[..., T]) -> Callable[..., T]:
    @wraps(program)
    def call(fitted: Any, points: tuple[Any, ...], include_noise: bool) -> T:
        if not is_known(fitted, points) or _is_distributed(points):
            return program(fitted, points, include_noise)
        number = len(points[-1])
        few = 1 << (number - 1).bit_length()
        size = few if number <= _FEW_POINTS else number + -number % _FEW_POINTS
        more = filled(points, size, device_of(fitted, points))
        with at_top():
            results = program(fitted, more, include_noise)
            return jax.tree.map(lambda array: _cut(array, number), results)

    return call


def _is_distributed(points: tuple[Any, ...]) -> bool:
    return any(len(array.sharding.device_set) > 1 for array in points if isinstance(array, jax.Array))


def _cut(array: Array, number: int, *, axes: int = 1) -> Array:
    """The first rows of an array; with axes=2 also the first columns of a square matrix."""
    if len(array) == number:
        return array
    return jax.device_put(np.asarray(array)[(slice(number),) * axes], device_of(array))
