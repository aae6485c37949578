"""The values of a column of a data frame: numbers, or labels. Values may be missing."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks
from jaxcal.frames.layout import Table, as_frame, place_of

# A label is a string in a column of text, and a number in a column of numbers. None stands for a missing label.
Label = str | float | None
_LABEL_TYPES = (str, int, float, type(None))


def labels_in(x: Table, name: str) -> np.ndarray:
    """The labels in a column of a frame, [n].

    Raises:
        ValueError: if there is no such column, or a label is missing.
    """
    column = _column(x, name)
    if count := int(values_of(column)[1].sum()):
        raise ValueError(f"column {name!r} of x has no label in {count} rows: give each row a label.")
    return column.to_numpy()


def numbers_in(x: Table, column: int | str) -> Float[Array, " n"]:
    """The numbers in a column of a frame, by its position or its name, [n].

    Raises:
        ValueError: if there is no such column, or it holds labels, or a value is missing or infinite.
    """
    values = _column(x, column)
    called = f"column {str(values.name)!r}"
    if holds_labels(called, values):
        raise ValueError(f"{called} of x holds labels, where numbers are needed.")
    return _checks.as_vector(f"{called} of x", numbers(called, values))


def _column(x: Table, column: int | str) -> Any:
    """A column of a frame, as a series of narwhals."""
    frame = as_frame(x)
    return frame[frame.columns[place_of(column, tuple(map(str, frame.columns)))]]


def holds_labels(name: str, column: Any) -> bool:
    """Whether a column of a frame is categorical or holds text.

    Raises:
        ValueError: if it holds neither labels nor numbers.
    """
    import narwhals.stable.v2 as nw

    dtype = column.dtype
    if dtype.is_numeric() or dtype == nw.Boolean:
        return False
    if dtype in (nw.String, nw.Categorical, nw.Enum, nw.Object):
        return True
    if dtype == nw.Unknown and column.to_numpy().dtype.kind in "fiu":  # another byte order, or long doubles
        return False
    raise ValueError(
        f"{name} of x holds {dtype}, which is neither numbers nor labels: make numbers of it, such as days "
        "since a date, or drop it."
    )


def numbers(name: str, column: Any) -> np.ndarray:
    """The values of a column as floats, NaN where they are missing.

    Raises:
        ValueError: if it holds labels, or a value is infinite.
    """
    import narwhals.stable.v2 as nw

    if holds_labels(name, column):
        raise ValueError(f"{name} of x holds labels, where the fit had numbers.")
    if column.dtype != nw.Unknown:
        column = column.cast(nw.Float32 if str(column.dtype) in ("Float16", "Float32") else nw.Float64)
    array = column.to_numpy()
    is_short = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    values = _checks.as_numpy_floats(f"{name} of x", array, np.float32 if is_short else np.float64)
    if np.isinf(values).any():
        raise ValueError(f"{name} of x holds {np.isinf(values).sum()} values that are infinite.")
    return values


def distinct_labels(name: str, column: Any, *, numeric: bool) -> tuple[tuple[Label, ...], Int[np.ndarray, " n"]]:
    """The labels of a column in increasing order, a missing label last, and the position of every row's label.

    Raises:
        ValueError: if a label is neither a number nor a string.
    """
    if numeric:
        values = numbers(name, column)
        missing = np.isnan(values)
    else:
        objects, missing = values_of(column)
        bad = [value for value in objects if not isinstance(value, _LABEL_TYPES)]
        if bad:
            raise ValueError(
                f"{name} of x holds {len(bad)} values that are neither numbers nor strings, the first "
                f"{bad[0]!r}: make numbers or strings of them."
            )
        values = np.array([str(value) for value in objects])
    labels, position = np.unique(values[~missing], return_inverse=True)
    number = np.full(len(values), len(labels))
    number[~missing] = position
    distinct = [float(label) if numeric else str(label) for label in labels]
    return tuple([*distinct, None] if missing.any() else distinct), number


def values_of(column: Any) -> tuple[list, np.ndarray]:
    """The values of a column of labels, and which values are missing: NaN and None. pandas' NA becomes None."""
    is_null = column.is_null().to_list()
    values = [None if null else value for value, null in zip(column.to_list(), is_null, strict=True)]
    return values, np.array([value is None or value != value for value in values])
