"""Rows filled up to a common number, so that fits of several sizes share a compiled program.

Folds differ by a row, a set that grows has another size each time, and every size would be compiled anew. Rows that are
filled in do not count in the fit, `Data.included`, and are cut off from what it found. The host needs none of this.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool

from jaxcal import _checks
from jaxcal.gp.options import Options
from jaxcal.gp.process import Process

# Rows are filled up to a multiple of this: little of the time of a fit, but where the fit takes no time.
_MULTIPLE = 16


def padded(
    rows: Sequence[Any], options: Options, *, stationary: bool
) -> tuple[tuple[Array | None, ...], Bool[Array, " n"] | None]:
    """The rows filled up where the fit knows padding, and which of them count; None where all do.

    That is the exact fit with equal, normal noise, by kernels whose variance is the same at all rows. Of rows that are
    traced the number is in a program anyway.

    Args:
        rows: arrays with a leading axis of rows; None for what is not there.
        options: of the fit.
        stationary: whether the kernel's variance is known to be the same at all rows.
    """
    number = rows[-1].shape[0]
    can_be_padded = stationary and options.is_plain and not _checks.is_traced(*rows)
    if not can_be_padded or number % _MULTIPLE == 0:
        return tuple(rows), None
    places = np.r_[np.arange(number), np.zeros(-number % _MULTIPLE, int)]
    # On the host: there a number of rows needs no program. The first row is repeated, so that no extreme changes.
    filled = tuple(None if array is None else jax.device_put(np.asarray(array)[places]) for array in rows)
    return filled, jax.device_put(np.arange(len(places)) < number)


def without_padding(process: Process, number: int) -> Process:
    """The process with so many rows, the first ones; of several outputs their axis comes before."""
    first, every = slice(number), slice(None)
    cut = lambda array, *last_axes: jax.device_put(np.asarray(array)[(..., *last_axes)])
    parts = lambda process: (process.points, process.posterior.weights, process.posterior.shrink)
    points, weights, shrink = parts(process)
    points = jax.tree.map(lambda rows: cut(rows, first, every), points)
    return eqx.tree_at(parts, process, (points, cut(weights, first), cut(shrink, first, first)))
