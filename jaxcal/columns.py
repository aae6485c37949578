"""The columns of inputs: of an array, or of a data frame, whose columns have names, labels and missing values.

A fit keeps the `Columns` of its inputs. They make the numbers that a method computes with, the same at every
prediction: a column of labels becomes an indicator of each, a column with missing values its median in their place and
an indicator of them. The columns of a frame are looked up by their names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import keeps_known

# A label is a string in a column of text, and a number in one of numbers; None stands for a missing one.
Label = str | float | None
_OF_LABELS = (str, int, float, type(None))
# Inputs: an array, or a data frame of any library; and targets: an array, or a series.
Table = Any
Series = Any

# A column of text with so many labels, and more than half as many as rows, holds names of the rows.
_FEW_LABELS = 20


class Layout(eqx.Module):
    """How many columns the inputs of a fit had, and in which order; made by `Layout.of`.

    Attributes:
        num_columns: how many there are.
        names: of the columns of a data frame; None of an array.
    """

    num_columns: int = eqx.field(static=True)
    names: tuple[str, ...] | None = eqx.field(static=True)

    @classmethod
    def of(cls, x: Table) -> "Layout":
        """That of a table.

        Raises:
            ValueError: if two columns have one name.
        """
        if is_frame(x):
            names = tuple(map(str, _as_frame(x).columns))
            return cls(len(names), names)
        shape = np.shape(x)
        return cls(shape[-1] if len(shape) > 1 else 1, None)

    def __call__(self, x: Table) -> Table:
        """The table with the columns of the fit, in their order, looked up by name; those of an array are the same.

        Raises:
            ValueError: if a frame lacks a column, or an array has another number of them.
        """
        if not is_frame(x):
            table = as_table(x)
            if table.shape[1] != self.num_columns:
                raise ValueError(f"x has {table.shape[1]} columns; the fit had {self.num_columns}.")
            return table
        frame = _as_frame(x)
        names = tuple(map(str, frame.columns))
        if self.names is None:
            if len(names) != self.num_columns:
                raise ValueError(f"x has {len(names)} columns; the fit had {self.num_columns}.")
            return x
        if names == self.names:
            return x
        return frame[:, [_place_of(name, names) for name in self.names]].to_native()

    def called(self, place: int) -> str:
        """What messages call a column."""
        return f"column {place}" if self.names is None else f"column {self.names[place]!r}"


class Columns(eqx.Module):
    """What the columns of the inputs of a fit were; made by `Columns.of`.

    Attributes:
        layout: their number and their names.
        categories: the labels of every column in increasing order, a missing one last; None where it holds numbers.
        majority: the position of the most frequent label of every column; None where it holds numbers.
        incomplete: the positions of the columns of numbers that had missing values.
        medians: of the other values of these columns.
        unseen: what a label is that was not there in the fit: an "error"; the most frequent one, "majority"; or "none"
            of the labels, with a warning.
    """

    layout: Layout
    categories: tuple[tuple[Label, ...] | None, ...] = eqx.field(static=True)
    majority: tuple[int | None, ...] = eqx.field(static=True)
    incomplete: tuple[int, ...] = eqx.field(static=True)
    medians: tuple[float, ...] = eqx.field(static=True)
    unseen: str = eqx.field(static=True, default="none")

    @classmethod
    def of(cls, x: Table, categorical: "Sequence[int | str] | Columns" = ()) -> "Columns":
        """The columns of a table.

        Args:
            x: inputs [n, d], or a data frame of pandas, polars or another library that narwhals knows; a vector [n] is
                one column.
            categorical: the columns whose values have no order, by position, or of a frame by name; the columns of a
                frame that hold labels are categorical in any case. Or the `Columns` of a larger table, of whose rows x
                has a part.

        Raises:
            TypeError: if x is traced, and a column is categorical.
            ValueError: if there is no such column, two columns have one name, a column holds neither numbers nor
                labels, no value at all, or a label of its own for most rows.

        Example:
            >>> columns = Columns.of(np.array([[0.5, 3.0], [1.5, 7.0], [2.5, 3.0]]), categorical=[1])
            >>> print(columns(np.array([[9.0, 7.0]])))
            [[9. 0. 1.]]
        """
        if isinstance(categorical, Columns):
            return categorical
        if not is_frame(x):
            return cls._of_array(x, categorical)
        layout = Layout.of(x)
        chosen = positions(categorical, layout)
        found = [
            _Found.of(layout.called(place), column, place in chosen)
            for place, column in enumerate(_as_frame(x).iter_columns())
        ]
        medians = {place: each.median for place, each in enumerate(found) if each.median is not None}
        return cls(
            layout=layout,
            categories=tuple(each.categories for each in found),
            majority=tuple(each.majority for each in found),
            incomplete=tuple(medians),
            medians=tuple(medians.values()),
        )

    @classmethod
    def _of_array(cls, x: ArrayLike, categorical: Sequence[int | str]) -> "Columns":
        layout = Layout.of(x)
        chosen = positions(categorical, layout)
        found = {}
        if chosen:
            if _checks.is_traced(x):
                raise TypeError("x is traced, but its categories must be known: call fit outside jit, vmap and grad.")
            matrix = np.asarray(_checks.as_matrix("x", x))
            found = {place: np.unique(matrix[:, place], return_counts=True) for place in chosen}
        places = range(layout.num_columns)
        return cls(
            layout=layout,
            categories=tuple(tuple(found[place][0].tolist()) if place in found else None for place in places),
            majority=tuple(int(found[place][1].argmax()) if place in found else None for place in places),
            incomplete=(),
            medians=(),
        )

    @property
    def num_columns(self) -> int:
        """How many there are."""
        return self.layout.num_columns

    @property
    def is_plain(self) -> bool:
        """Whether they are those of an array, and all hold numbers: it is the inputs as it is."""
        return self.layout.names is None and not self.categorical

    @property
    def categorical(self) -> tuple[int, ...]:
        """The positions of those that hold labels."""
        return tuple(place for place, categories in enumerate(self.categories) if categories is not None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many labels each categorical column has."""
        return tuple(len(categories) for categories in self.categories if categories is not None)

    @property
    def ordered(self) -> tuple[int, ...]:
        """The positions in what `table` gives of numbers, and of indicators of missing values."""
        return tuple(place for place in range(self.num_columns + len(self.incomplete)) if place not in self.categorical)

    @property
    def indicators(self) -> tuple[int, ...]:
        """The positions of the inputs, as the call gives them, that are 0 or 1: no scale of the data is theirs."""
        start = self.num_columns - len(self.categorical)
        return tuple(range(start, start + len(self.incomplete) + sum(self.sizes)))

    @keeps_known
    def __call__(self, x: Table) -> Float[Array, "n p"]:
        """The inputs of a method: the columns of numbers, indicators of missing values, indicators of labels.

        Args:
            x: as of `table`.

        Raises:
            ValueError: as `table` does.

        Warns:
            UserWarning: as `table` does.
        """
        return self.inputs(self.table(x))

    def inputs(self, table: Float[Array, "n c"]) -> Float[Array, "n p"]:
        """The inputs of a method, of what `table` gives."""
        return _with_indicators(table, self.categorical, self.sizes) if self.categorical else table

    def codes(self, table: Float[Array, "n c"]) -> Int[Array, "n c"]:
        """The position of every label among the categories, of what `table` gives; 0 in the columns of numbers."""
        is_label = np.isin(np.arange(table.shape[1]), self.categorical)
        return jnp.where(is_label[None], table, 0).astype(jnp.int32)

    def table_names(self) -> tuple[str, ...]:
        """What the columns that `table` gives are called: x[0], x[1], ... of an array."""
        names = self.layout.names or tuple(f"x[{place}]" for place in range(self.num_columns))
        return (*names, *(f"{names[place]} missing" for place in self.incomplete))

    def table(self, x: Table) -> Float[Array, "n c"]:
        """The columns as numbers, and an indicator of missing values for each that had such in the fit.

        A label becomes its position among the categories; one that was not there in the fit -1, or as `unseen` says.

        Args:
            x: a data frame, if the columns have names, or an array [n, d] of numbers; a vector [n] is one column. In a
                frame missing values are allowed, where the fit had such or the column holds labels; in an array of a
                frame's numbers a label is its position.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the fit; if a frame lacks a
                column, or has missing values in one that had none.

        Warns:
            UserWarning: if a frame or a known array holds a label that was not there in the fit, and unseen="none".
        """
        if is_frame(x):
            return self._of_frame(x)
        matrix = _checks.as_matrix("x", self.layout(x))
        for place in self.categorical:
            matrix = matrix.at[:, place].set(self._positions(place, matrix[:, place]))
        return matrix if not self.incomplete else jnp.pad(matrix, ((0, 0), (0, len(self.incomplete))))

    def _positions(self, place: int, values: Float[Array, " n"]) -> Int[Array, " n"]:
        """The positions of the labels in a column of an array."""
        categories = self.categories[place] or ()
        if self.layout.names is not None:  # they are positions already
            known = jnp.arange(len(categories), dtype=values.dtype)
        else:
            known = jnp.asarray(categories, values.dtype)
        position = jnp.clip(jnp.searchsorted(known, values), 0, len(categories) - 1)
        is_known = known[position] == values
        if not _checks.is_traced(values):
            self._check_seen(place, np.asarray(values), np.asarray(is_known))
        return jnp.where(is_known, position, self._instead(place))

    def _of_frame(self, x: Any) -> Float[Array, "n c"]:
        matrix, missing = [], {}
        for place, column in enumerate(_as_frame(self.layout(x)).iter_columns()):
            categories = self.categories[place]
            if categories is None:
                values = _numbers(self.layout.called(place), column)
                missing[place] = np.isnan(values)
                matrix.append(values)
            else:
                matrix.append(self._positions_of_labels(place, column, categories))
        self._check_complete(missing)
        for place, median in zip(self.incomplete, self.medians, strict=True):
            matrix[place] = np.where(missing[place], matrix[place].dtype.type(median), matrix[place])
            matrix.append(missing[place].astype(np.int8))
        return _checks.as_matrix("x", np.column_stack(matrix))

    def _positions_of_labels(self, place: int, column: Any, categories: tuple[Label, ...]) -> np.ndarray:
        """The positions of the labels in a column of a frame; small integers leave the dtype of other columns alone."""
        labels, number = _labels(self.layout.called(place), column, of_numbers=isinstance(categories[0], float))
        known = {label: position for position, label in enumerate(categories)}
        position = np.array([known.get(label, -1) for label in labels], np.int16)[number]
        if (position < 0).any():
            shown = np.array([_shown(label) for label in labels])[number]
            self._check_seen(place, shown, position >= 0)
        return np.where(position < 0, np.int16(self._instead(place)), position)

    def _instead(self, place: int) -> int:
        """The position in place of a label that was not there in the fit."""
        majority = self.majority[place]
        return majority if self.unseen == "majority" and majority is not None else -1

    def _check_seen(self, place: int, values: np.ndarray, is_known: np.ndarray) -> None:
        """Raise ValueError, or warn, of labels that were not there in the fit."""
        if is_known.all() or self.unseen == "majority":
            return
        strange = values[~is_known]
        shown = repr(str(strange[0])) if strange.dtype.kind == "U" else f"{strange[0]:g}"
        message = (
            f"{self.layout.called(place)} of x holds {shown}, which is none of the {len(self.categories[place] or ())} "
            "categories it was fitted on"
        )
        if self.unseen == "error":
            raise ValueError(f"{message}; unseen='majority' takes the most frequent category in its place.")
        _checks.warn(f"{message}: {len(strange)} rows are predicted as of no category.")

    def _check_complete(self, missing: dict[int, np.ndarray]) -> None:
        """Raise ValueError if values are missing in a column that had all in the fit."""
        bad = [place for place, rows in missing.items() if rows.any() and place not in self.incomplete]
        if bad:
            named = ", ".join(f"{self.layout.called(place)} ({missing[place].sum()})" for place in bad)
            raise ValueError(
                f"x has missing values where the fit had none: {named}. Fill or drop them, or fit on rows that have "
                "such, too."
            )

    def shown_labels(self) -> dict[int, tuple[str, ...]]:
        """The labels of every categorical column, as they are written."""
        return {
            place: tuple(map(_shown, categories))
            for place, categories in enumerate(self.categories)
            if categories is not None
        }


@eqx.filter_jit
def _with_indicators(
    table: Float[Array, "n c"], categorical: tuple[int, ...], sizes: tuple[int, ...]
) -> Float[Array, "n p"]:
    """The columns of numbers, then an indicator for every label of the others."""
    of_labels = list(zip(categorical, sizes, strict=True))
    numbers = [place for place in range(table.shape[1]) if place not in categorical]
    codes = lambda place: table[:, place].astype(jnp.int32)
    parts = [jax.nn.one_hot(codes(place), size, dtype=table.dtype) for place, size in of_labels]
    return jnp.concatenate([table[:, np.array(numbers, int)], *parts], axis=1)


def positions(categorical: Sequence[int | str], layout: Layout) -> tuple[int, ...]:
    """The positions of columns that are given by position or by name.

    Raises:
        ValueError: if there is no such column.
    """
    names, num_columns = layout.names or (), layout.num_columns
    known = {name: place for place, name in enumerate(names)}
    found = tuple(sorted({known.get(column, -1) if isinstance(column, str) else column for column in categorical}))
    if any(not 0 <= place < num_columns for place in found):
        named = f", or {', '.join(names)}" if names else ""
        raise ValueError(
            f"categorical must hold columns of x, 0 to {num_columns - 1}{named}; got {tuple(categorical)}."
        )
    return found


def is_frame(x: Any) -> bool:
    """Whether x is a data frame: what has columns, of a library that narwhals knows."""
    kind = type(x)  # of a lazy frame the names of the columns would have to be computed
    return hasattr(kind, "columns") or hasattr(kind, "column_names")


def as_table(x: Any) -> Table:
    """A table that is handed on to whatever is fitted: a frame or an array of objects as it is, numbers as a matrix.

    Numbers may be missing: it is for what is fitted to refuse them.

    Raises:
        ValueError: if the shape is not (n, d), or there are no rows or no columns.
    """
    if is_frame(x):
        frame = _as_frame(x)
        if not all(frame.shape):
            raise ValueError(f"x is empty: its shape is {frame.shape}.")
        return frame.to_native()
    is_of_objects = isinstance(x, np.ndarray) and x.dtype.kind in "OUS"
    return np.atleast_2d(x.T).T if is_of_objects else _checks.as_numbers("x", x)


def num_rows(x: Table) -> int:
    """How many rows a table has."""
    return (_as_frame(x) if is_frame(x) else x).shape[0]


def names_rows(num_labels: int, num_rows: int) -> bool:
    """Whether a column of so many different labels seems to hold names of the rows."""
    return num_labels > max(_FEW_LABELS, num_rows / 2)


def labels_in(x: Table, name: str) -> np.ndarray:
    """The labels in a column of a frame, [n].

    Raises:
        ValueError: if there is no such column, or a label is missing.
    """
    column = _column(x, name)
    if count := int(_values(column)[1].sum()):
        raise ValueError(f"column {name!r} of x has no label in {count} rows: give each row a label.")
    return column.to_numpy()


def numbers_in(x: Table, column: int | str) -> Float[Array, " n"]:
    """The numbers in a column of a frame, by its position or its name, [n].

    Raises:
        ValueError: if there is no such column, or it holds labels, or values that are missing or infinite.
    """
    values = _column(x, column)
    called = f"column {str(values.name)!r}"
    if _holds_labels(called, values):
        raise ValueError(f"{called} of x holds labels, where numbers are needed.")
    return _checks.as_vector(f"{called} of x", _numbers(called, values))


def _column(x: Table, column: int | str) -> Any:
    """A column of a frame, as a series of narwhals."""
    frame = _as_frame(x)
    return frame[frame.columns[_place_of(column, tuple(map(str, frame.columns)))]]


def _place_of(column: int | str, names: tuple[str, ...]) -> int:
    """The position of a column of a frame.

    Raises:
        ValueError: if there is no such column.
    """
    if column not in (*range(len(names)), *names):
        raise ValueError(f"x has no column {column!r}; its columns are {', '.join(names)}.")
    return names.index(column) if isinstance(column, str) else column


def take(rows: Int[ArrayLike, " k"], x: Table) -> Table:
    """The rows of a table by their numbers; a frame stays one, of its own library, with its index."""
    numbers = np.asarray(rows)
    return _as_frame(x)[numbers.tolist(), :].to_native() if is_frame(x) else x[numbers]


def like(x: Table, columns: dict[str, np.ndarray]) -> Any:
    """A matrix [n, k] of these columns; of a frame a frame of its library, with its index."""
    if not is_frame(x):
        return np.column_stack(list(columns.values()))
    import narwhals.stable.v2 as nw

    found = nw.from_dict(columns, backend=_as_frame(x).implementation).to_native()
    if hasattr(x, "index") and not callable(x.index):  # of pandas
        found.index = x.index
    return found


def check_same_index(x: Any, y: Any) -> None:
    """Raise ValueError if a frame and a series of pandas have different indices: their rows would not be one's."""
    index, other = getattr(x, "index", None), getattr(y, "index", None)
    if index is None or other is None or callable(index) or callable(other):
        return
    if not index.equals(other):
        raise ValueError(
            "x and y have different indices: their rows do not belong together. Align them, y = y.loc[x.index], or "
            "drop the index, y.to_numpy()."
        )


# Which columns have no order: some of them, by position or by name, or those of a larger table.
Categorical = Sequence[int | str] | Columns


def as_data(
    x: Table, y: Series, categorical: Categorical = (), *, at_least: int = 2
) -> tuple[Columns, Float[Array, "n p"], Float[Array, " n"]]:
    """The columns of a table, the inputs that they make of it, and its targets.

    Args:
        x: a table, and
        categorical: which of its columns have no order, as of `Columns.of`.
        y: targets [n].
        at_least: how many rows are needed.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, or has fewer rows; if x is a frame, and y a
            series of another index.
    """
    check_same_index(x, y)
    columns = Columns.of(x, categorical)
    inputs = columns(x)
    y = _checks.as_vector("y", y, length=inputs.shape[0])
    _checks.check_rows("x", inputs, at_least)
    return columns, inputs, y


class _Found(NamedTuple):
    """What a column of a frame is."""

    categories: tuple[Label, ...] | None
    majority: int | None
    median: float | None

    @classmethod
    def of(cls, name: str, column: Any, categorical: bool) -> "_Found":
        of_labels = _holds_labels(name, column)
        if not (categorical or of_labels):
            values = _numbers(name, column)
            missing = np.isnan(values)
            if missing.all():
                raise ValueError(f"{name} of x has no value at all: drop it.")
            return cls(None, None, float(np.median(values[~missing])) if missing.any() else None)
        labels, number = _labels(name, column, of_numbers=not of_labels)
        if not categorical and names_rows(len(labels), len(number)):
            raise ValueError(
                f"{name} of x holds {len(labels)} different labels in {len(number)} rows: it seems to name "
                "the rows. Drop it, or name it in categorical=."
            )
        return cls(labels, int(np.bincount(number).argmax()), None)


def _as_frame(x: Any) -> Any:
    """A frame of narwhals, if its columns have different names."""
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
    if frame.implementation.is_pandas():  # which takes no rows of numbers of another order of bytes
        native = frame.to_native()
        of_numpy = {name: dtype for name, dtype in native.dtypes.items() if isinstance(dtype, np.dtype)}
        swapped = {name: dtype.newbyteorder("=") for name, dtype in of_numpy.items() if not dtype.isnative}
        if swapped:
            native = native.astype(swapped)
            return nw.from_native(native, eager_only=True)
    return frame


def _holds_labels(name: str, column: Any) -> bool:
    """Whether a column of a frame is categorical or holds text.

    Raises:
        ValueError: if it holds neither that nor numbers.
    """
    import narwhals.stable.v2 as nw

    dtype = column.dtype
    if dtype.is_numeric() or dtype == nw.Boolean:
        return False
    if dtype in (nw.String, nw.Categorical, nw.Enum, nw.Object):
        return True
    if dtype == nw.Unknown and column.to_numpy().dtype.kind in "fiu":  # of another order of bytes, or long doubles
        return False
    raise ValueError(
        f"{name} of x holds {dtype}, which is neither numbers nor labels: make numbers of it, such as days "
        "since a date, or drop it."
    )


def _numbers(name: str, column: Any) -> np.ndarray:
    """The values of a column as floats, NaN where they are missing.

    Raises:
        ValueError: if it holds labels, or a value is infinite.
    """
    import narwhals.stable.v2 as nw

    if _holds_labels(name, column):
        raise ValueError(f"{name} of x holds labels, where the fit had numbers.")
    if column.dtype != nw.Unknown:
        column = column.cast(nw.Float32 if str(column.dtype) in ("Float16", "Float32") else nw.Float64)
    given = column.to_numpy()
    is_short = given.dtype.kind == "f" and given.dtype.itemsize <= 4
    values = _checks.as_numpy_floats(f"{name} of x", given, np.float32 if is_short else np.float64)
    if np.isinf(values).any():
        raise ValueError(f"{name} of x holds {np.isinf(values).sum()} values that are infinite.")
    return values


def _labels(name: str, column: Any, *, of_numbers: bool) -> tuple[tuple[Label, ...], Int[np.ndarray, " n"]]:
    """The labels of a column in increasing order, a missing one last, and the position of every row's.

    Raises:
        ValueError: if one is neither a number nor a string.
    """
    if of_numbers:
        values = _numbers(name, column)
        missing = np.isnan(values)
    else:
        given, missing = _values(column)
        bad = [value for value in given if not isinstance(value, _OF_LABELS)]
        if bad:
            raise ValueError(
                f"{name} of x holds {len(bad)} values that are neither numbers nor strings, the first "
                f"{bad[0]!r}: make numbers or strings of them."
            )
        values = np.array([str(value) for value in given])
    labels, position = np.unique(values[~missing], return_inverse=True)
    number = np.full(len(values), len(labels))
    number[~missing] = position
    found = [float(label) if of_numbers else str(label) for label in labels]
    return tuple([*found, None] if missing.any() else found), number


def _values(column: Any) -> tuple[list, np.ndarray]:
    """The values of a column of labels, and which are missing: NaN, or None, which is also in place of pandas' NA."""
    is_null = column.is_null().to_list()
    given = [None if null else value for value, null in zip(column.to_list(), is_null, strict=True)]
    return given, np.array([value is None or value != value for value in given])


def _shown(label: Label) -> str:
    return "missing" if label is None else label if isinstance(label, str) else f"{label:g}"
