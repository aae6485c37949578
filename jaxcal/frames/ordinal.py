"""Any table as numbers for trees, which take missing values. Labels become their positions.

A prediction raises no error for a new label, or for a new missing value: it becomes a missing number.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxcal import _checks
from jaxcal._numpy import AnyArray
from jaxcal.frames.layout import Table, as_frame, is_frame, num_rows
from jaxcal.frames.values import holds_labels, numbers, values_of


class Ordinal(eqx.Module):
    """The columns of the inputs of a fit; made by `Ordinal.of`.

    Attributes:
        labels: the labels of each column, in increasing order; empty for a column of numbers. None for a column of
            other values, such as dates, which is omitted.
    """

    labels: tuple[tuple[str | float, ...] | None, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, x: Table) -> "Ordinal":
        """The columns of a table: an array [n, d], or a data frame.

        Example:
            >>> print(Ordinal.of(np.array([["b", 1.0], ["a", np.nan]], object)).labels)
            (('a', 'b'), ())
        """
        return cls(tuple(map(_labels_of, _columns(x))))

    def __call__(self, x: Table) -> Float[AnyArray, "n c"]:
        """The numbers, NaN where they are missing or infinite.

        Args:
            x: a table with the columns of the fit, in their order.
        """
        if _checks.is_traced(x):
            return jnp.where(jnp.isinf(x), jnp.nan, x)
        known = ((column, labels) for column, labels in zip(_columns(x), self.labels, strict=True))
        columns = [_numbers_of(column, labels) for column, labels in known if labels is not None]
        table = np.column_stack(columns) if columns else np.empty((num_rows(x), 0))
        return np.where(np.isinf(table), np.nan, table)


def _columns(x: Table) -> list[Any]:
    """The columns of a frame, as series of narwhals, or of an array."""
    return list(as_frame(x).iter_columns()) if is_frame(x) else list(np.asarray(x).T)


def _labels_of(column: Any) -> tuple[str | float, ...] | None:
    if isinstance(column, np.ndarray):
        return () if _floats(column) is not None else _distinct(column.tolist())
    try:
        return _distinct(values_of(column)[0]) if holds_labels("a column", column) else ()
    except ValueError:
        return None


def _distinct(values: list) -> tuple[str | float, ...]:
    """The labels, numbers before strings."""
    labels = {_label(value) for value in values if value is not None and value == value}
    return tuple(sorted(labels, key=lambda label: (isinstance(label, str), label)))


def _label(value: Any) -> str | float:
    """A label as a float or a string. A column of whole numbers may be a column of floats at a prediction."""
    return float(value) if isinstance(value, bool | int | float | np.number | np.bool_) else str(value)


def _numbers_of(column: Any, labels: tuple[str | float, ...]) -> Float[np.ndarray, " n"]:
    if labels:
        places = {label: float(place) for place, label in enumerate(labels)}
        values = column.tolist() if isinstance(column, np.ndarray) else values_of(column)[0]
        return np.array([np.nan if value is None else places.get(_label(value), np.nan) for value in values])
    floats = _floats(column) if isinstance(column, np.ndarray) else numbers("a column", column)
    return np.full(len(column), np.nan) if floats is None else np.asarray(floats, float)


def _floats(column: np.ndarray) -> np.ndarray | None:
    """The numbers of an array's column; None if it holds other values."""
    try:
        return column.astype(float)
    except (TypeError, ValueError):
        return None
