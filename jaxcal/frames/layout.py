"""The rows and the columns of a table, an array or a data frame: their number, order and names."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import ArrayLike, Int

from jaxcal import _checks

# Inputs are an array, or a data frame of any library. Targets are an array, or a series.
Table = Any
Series = Any


class Layout(eqx.Module):
    """The number and the order of the columns of the inputs of a fit; made by `Layout.of`.

    Attributes:
        num_columns: the number of columns.
        names: the names of the columns of a data frame; None for an array.
    """

    num_columns: int = eqx.field(static=True)
    names: tuple[str, ...] | None = eqx.field(static=True)

    @classmethod
    def of(cls, x: Table) -> "Layout":
        """The layout of a table.

        Raises:
            ValueError: if two columns have the same name.
        """
        if is_frame(x):
            names = tuple(map(str, as_frame(x).columns))
            return cls(len(names), names)
        shape = np.shape(x)
        return cls(shape[-1] if len(shape) > 1 else 1, None)

    def __call__(self, x: Table) -> Table:
        """The table with the columns of the fit, looked up by name, in their order. An array stays unchanged.

        Raises:
            ValueError: if a frame lacks a column, or an array has another number of them.
        """
        table = as_frame(x) if is_frame(x) else as_table(x)
        if self.names is None or not is_frame(x):
            if table.shape[1] != self.num_columns:
                raise ValueError(f"x has {table.shape[1]} columns; the fit had {self.num_columns}.")
            return x if is_frame(x) else table
        names = tuple(map(str, table.columns))
        return x if names == self.names else table[:, [place_of(name, names) for name in self.names]].to_native()

    def called(self, place: int) -> str:
        """The name of a column in messages."""
        return f"column {place}" if self.names is None else f"column {self.names[place]!r}"


def is_frame(x: Any) -> bool:
    """Whether x is a data frame: an object with columns, of a library that narwhals knows."""
    kind = type(x)  # the class is enough: a lazy frame would have to compute the names of its columns
    return hasattr(kind, "columns") or hasattr(kind, "column_names")


def as_table(x: Any) -> Table:
    """A table for the model that is fitted: a frame or an array of objects stays unchanged, numbers become a matrix.

    Numbers may be missing. The model itself must refuse them if it needs all numbers.

    Raises:
        ValueError: if the shape is not (n, d), or there are no rows or no columns.
    """
    if is_frame(x):
        frame = as_frame(x)
        if not all(frame.shape):
            raise ValueError(f"x is empty: its shape is {frame.shape}.")
        return frame.to_native()
    is_of_objects = isinstance(x, np.ndarray) and x.dtype.kind in "OUS"
    return np.atleast_2d(x.T).T if is_of_objects else _checks.as_numbers("x", x)


def num_rows(x: Table) -> int:
    """The number of rows of a table."""
    return (as_frame(x) if is_frame(x) else x).shape[0]


def take(rows: Int[ArrayLike, " k"], x: Table) -> Table:
    """The rows of a table by their numbers. A frame stays a frame of its library, with its index."""
    numbers = np.asarray(rows)
    return as_frame(x)[numbers.tolist(), :].to_native() if is_frame(x) else x[numbers]


def like(x: Table, columns: dict[str, np.ndarray]) -> Any:
    """A matrix [n, k] of these columns. If x is a frame, the result is a frame of its library, with its index."""
    if not is_frame(x):
        return np.column_stack(list(columns.values()))
    import narwhals.stable.v2 as nw

    frame = nw.from_dict(columns, backend=as_frame(x).implementation).to_native()
    if hasattr(x, "index") and not callable(x.index):  # of pandas
        frame.index = x.index
    return frame


def stacked(x: Table, other: Table) -> Table:
    """The rows of a frame, and those of another one below them: its columns are looked up by name.

    Raises:
        ValueError: if one of them is no frame, they are of two libraries, or a column is of two kinds.
    """
    import narwhals.stable.v2 as nw

    if type(x) is not type(other):
        raise ValueError(
            f"the inputs are a {type(x).__name__} and a {type(other).__name__}: give two frames of one library, or two "
            "arrays."
        )
    first, second = as_frame(x), as_frame(Layout.of(x)(other))
    pairs = [(column, second[column.name]) for column in first.iter_columns()]
    unequal = [(one, two) for one, two in pairs if one.dtype != two.dtype]
    for one, two in unequal:
        if not (one.dtype.is_numeric() and two.dtype.is_numeric()):
            raise ValueError(f"column {one.name!r} holds {one.dtype} in one frame, and {two.dtype} in the other.")
    as_floats = [nw.col(one.name).cast(nw.Float64) for one, _ in unequal]
    return nw.concat([each.with_columns(*as_floats) for each in (first, second)]).to_native()


def check_same_index(x: Any, y: Any) -> None:
    """Raise ValueError if a frame and a series of pandas have different indices: their rows do not match."""
    index, other = getattr(x, "index", None), getattr(y, "index", None)
    if index is None or other is None or callable(index) or callable(other):
        return
    if not index.equals(other):
        raise ValueError(
            "x and y have different indices: their rows do not belong together. Align them, y = y.loc[x.index], or "
            "drop the index, y.to_numpy()."
        )


def as_frame(x: Any) -> Any:
    """The frame as one of narwhals.

    Raises:
        TypeError: if it is lazy, or no data frame.
        ValueError: if two columns have the same name.
    """
    import narwhals.stable.v2 as nw

    try:
        frame = nw.from_native(x, eager_only=True)
        names = list(map(str, frame.columns))
    except nw.exceptions.DuplicateError:
        frame, names = None, list(map(str, x.columns))
    except TypeError as error:
        raise TypeError(
            f"x is a {type(x).__name__}, which is no data frame with values: collect it, or give an array."
        ) from error
    if frame is None or len(set(names)) < len(names):
        raise ValueError(f"the columns of x must have different names; got {', '.join(names)}.")
    if frame.implementation.is_pandas():  # pandas cannot take rows of numbers of another byte order
        native = frame.to_native()
        numpy_dtypes = {name: dtype for name, dtype in native.dtypes.items() if isinstance(dtype, np.dtype)}
        swapped = {name: dtype.newbyteorder("=") for name, dtype in numpy_dtypes.items() if not dtype.isnative}
        if swapped:
            native = native.astype(swapped)
            return nw.from_native(native, eager_only=True)
    return frame


def place_of(column: int | str, names: tuple[str, ...]) -> int:
    """The position of a column of a frame.

    Raises:
        ValueError: if there is no such column.
    """
    if column not in (*range(len(names)), *names):
        raise ValueError(f"x has no column {column!r}; its columns are {', '.join(names)}.")
    return names.index(column) if isinstance(column, str) else column
