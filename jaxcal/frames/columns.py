"""The columns of inputs: of an array, or of a data frame, whose columns have names, labels and missing values.

A fit keeps the `Columns` of its inputs. They convert inputs to the numbers that a method computes with, in the same way
at every prediction. A column of labels becomes an indicator of each label. In a column with missing values the median
replaces them, and a further column is an indicator of them. The columns of a frame are looked up by their names.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, keeps_known, namespace, numpy_or_jit
from jaxcal.frames.layout import Layout, Series, Table, as_frame, check_same_index, is_frame
from jaxcal.frames.values import Label, distinct_labels, holds_labels, numbers

# A column of text holds names of the rows if its labels are more than 20, and more than half of the number of rows.
_FEW_LABELS = 20


class Columns(eqx.Module):
    """The columns of the inputs of a fit; made by `Columns.of`.

    Attributes:
        layout: the number and the names of the columns.
        categories: the labels of every column in increasing order, a missing label last; None for a column of numbers.
        majority: the position of the most frequent label of every column; None for a column of numbers.
        incomplete: the positions of the columns of numbers that had missing values.
        medians: the medians of the other values of these columns.
        unseen: how to treat a label that was not in the fit. "error" raises an error. "majority" replaces it by the
            most frequent label. "none" counts it as none of the labels, with a warning.
    """

    layout: Layout
    categories: tuple[tuple[Label, ...] | None, ...] = eqx.field(static=True)
    majority: tuple[int | None, ...] = eqx.field(static=True)
    incomplete: tuple[int, ...] = eqx.field(static=True)
    medians: tuple[float, ...] = eqx.field(static=True)
    unseen: str = eqx.field(static=True, default="none")

    @classmethod
    def of(cls, x: Table, categorical: "Sequence[int | str] | Columns" = (), *, missing: bool = False) -> "Columns":
        """The columns of a table.

        Args:
            x: inputs [n, d], or a data frame of pandas, polars or another library that narwhals knows; a vector [n] is
                one column.
            categorical: the columns whose values have no order, by position, or for a frame by name. The columns of a
                frame that hold labels are always categorical. Or the `Columns` of a larger table, from which the rows
                of x are taken.
            missing: whether NaN in an array is a missing value, as it always is in a frame. Otherwise NaN is refused.

        Raises:
            TypeError: if x is traced, and a column is categorical.
            ValueError: if there is no such column, or two columns have the same name. Also if a column holds neither
                numbers nor labels, has no value at all, or has a different label in most rows.

        Example:
            >>> columns = Columns.of(np.array([[0.5, 3.0], [1.5, 7.0], [2.5, 3.0]]), categorical=[1])
            >>> print(columns(np.array([[9.0, 7.0]])))
            [[9. 0. 1.]]
        """
        if isinstance(categorical, Columns):
            return categorical
        layout = Layout.of(x)
        chosen = positions(categorical, layout)
        contents = _found_in_frame(x, layout, chosen) if is_frame(x) else _found_in_array(x, layout, chosen, missing)
        medians = {place: each.median for place, each in enumerate(contents) if each.median is not None}
        categories, majority = tuple(each.categories for each in contents), tuple(each.majority for each in contents)
        return cls(layout, categories, majority, incomplete=tuple(medians), medians=tuple(medians.values()))

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return self.layout.num_columns

    @property
    def num_inputs(self) -> int:
        """How many numbers a row of inputs has after the call."""
        return self.num_columns - len(self.categorical) + len(self.incomplete) + sum(self.sizes)

    @property
    def is_plain(self) -> bool:
        """Whether all columns are columns of an array that hold numbers, so that the array itself is the inputs."""
        return self.layout.names is None and not self.categorical and not self.incomplete

    @property
    def categorical(self) -> tuple[int, ...]:
        """The positions of the columns that hold labels."""
        return tuple(place for place, categories in enumerate(self.categories) if categories is not None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many labels each categorical column has."""
        return tuple(len(categories) for categories in self.categories if categories is not None)

    @property
    def ordered(self) -> tuple[int, ...]:
        """The positions in the result of `table` of numbers, and of indicators of missing values."""
        return tuple(place for place in range(self.num_columns + len(self.incomplete)) if place not in self.categorical)

    @property
    def indicators(self) -> tuple[int, ...]:
        """The positions of the inputs after the call that are 0 or 1, and have no scale of the data."""
        start = self.num_columns - len(self.categorical)
        return tuple(range(start, start + len(self.incomplete) + sum(self.sizes)))

    @keeps_known
    def __call__(self, x: Table) -> Float[Array, "n p"]:
        """The inputs of a method: the columns of numbers, indicators of missing values, indicators of labels.

        Args:
            x: as in `table`.

        Raises:
            ValueError: as `table` does.

        Warns:
            UserWarning: as `table` does.
        """
        return self.inputs(self.table(x))

    def inputs(self, table: Float[AnyArray, "n c"]) -> Float[AnyArray, "n p"]:
        """The inputs of a method, made of the result of `table`."""
        return _with_indicators(table, self.categorical, self.sizes) if self.categorical else table

    def codes(self, table: Float[AnyArray, "n c"]) -> Int[AnyArray, "n c"]:
        """The position of every label in the result of `table` among the categories; 0 in the columns of numbers."""
        is_label = np.isin(np.arange(table.shape[1]), self.categorical)
        return namespace(table).where(is_label[None], table, 0).astype(np.int32)

    def table_names(self) -> tuple[str, ...]:
        """The names of the columns of the result of `table`; x[0], x[1], ... for an array."""
        names = self.layout.names or tuple(f"x[{place}]" for place in range(self.num_columns))
        return (*names, *(f"{names[place]} missing" for place in self.incomplete))

    def table(self, x: Table) -> Float[Array, "n c"]:
        """The columns as numbers, with an indicator of missing values for each column that had some in the fit.

        A label becomes its position among the categories. A label that was not in the fit becomes -1, or the position
        that `unseen` decides.

        Args:
            x: a data frame, if the columns have names, or an array [n, d] of numbers; a vector [n] is one column. A
                frame may have missing values in columns of labels, and in columns that had some in the fit, and so
                may an array, as NaN. In an array of a frame's numbers a label is its position.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the fit. Also if a frame lacks
                a column, or if values are missing in a column that had none missing in the fit.

        Warns:
            UserWarning: if a frame or a known array holds a label that was not in the fit, and unseen="none".
        """
        if is_frame(x):
            return self._of_frame(x)
        matrix = _checks.as_numbers("x", self.layout(x)) if self._takes_nan else _checks.as_matrix("x", self.layout(x))
        if not (self.categorical or self.incomplete):
            return matrix
        labels = {place: (self._labels(place), self._instead(place)) for place in self.categorical}
        if self._takes_nan and not _checks.is_traced(matrix):
            is_number = [place for place in range(self.num_columns) if place not in labels]
            self._check_complete({place: np.isnan(np.asarray(matrix)[:, place]) for place in is_number})
        medians = tuple(zip(self.incomplete, self.medians, strict=True))
        table, is_known = _with_positions(matrix, tuple(labels.items()), medians)
        _checks.check_finite("x", table)
        if not _checks.is_traced(matrix):
            for place, known in zip(self.categorical, is_known, strict=True):
                self._check_seen(place, np.asarray(matrix)[:, place], np.asarray(known))
        return table

    @property
    def _takes_nan(self) -> bool:
        """Whether values were missing in the fit."""
        return bool(self.incomplete) or any(None in (categories or ()) for categories in self.categories)

    def _labels(self, place: int) -> tuple[Any, ...]:
        """A column's labels in an array, NaN for a missing one. After a fit to a frame they are positions."""
        categories = self.categories[place] or ()
        if self.layout.names is not None:
            return tuple(map(float, range(len(categories))))
        return tuple(math.nan if label is None else label for label in categories)

    def _of_frame(self, x: Any) -> Float[Array, "n c"]:
        matrix, missing = [], {}
        for place, column in enumerate(as_frame(self.layout(x)).iter_columns()):
            categories = self.categories[place]
            if categories is None:
                values = numbers(self.layout.called(place), column)
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
        """The positions of the labels in a column of a frame.

        They are small integers, which do not change the dtype of the other columns.
        """
        numeric = isinstance(categories[0], float)
        labels, number = distinct_labels(self.layout.called(place), column, numeric=numeric)
        known = {label: position for position, label in enumerate(categories)}
        position = np.array([known.get(label, -1) for label in labels], np.int16)[number]
        if (position < 0).any():
            shown = np.array([_shown(label) for label in labels])[number]
            self._check_seen(place, shown, position >= 0)
        return np.where(position < 0, np.int16(self._instead(place)), position)

    def _instead(self, place: int) -> int:
        """The position that replaces a label that was not in the fit."""
        majority = self.majority[place]
        return majority if self.unseen == "majority" and majority is not None else -1

    def _check_seen(self, place: int, values: np.ndarray, is_known: np.ndarray) -> None:
        """Raise ValueError, or warn, if labels were not in the fit."""
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
        """Raise ValueError if values are missing in a column that had no missing value in the fit."""
        bad = [place for place, rows in missing.items() if rows.any() and place not in self.incomplete]
        if bad:
            named = ", ".join(f"{self.layout.called(place)} ({missing[place].sum()})" for place in bad)
            raise ValueError(
                f"x has missing values where the fit had none: {named}. Fill or drop them, or fit on rows that have "
                "such, too."
            )

    def shown_labels(self) -> dict[int, tuple[str, ...]]:
        """The labels of every categorical column, as texts."""
        return {
            place: tuple(map(_shown, categories))
            for place, categories in enumerate(self.categories)
            if categories is not None
        }


@numpy_or_jit
def _with_positions(
    matrix: Float[AnyArray, "n d"],
    labels: tuple[tuple[int, tuple[tuple[Any, ...], int]], ...],
    medians: tuple[tuple[int, float], ...],
) -> tuple[Float[AnyArray, "n c"], list[Bool[AnyArray, " n"]]]:
    """Columns with the positions of their labels and with medians for missing values; then indicators of the latter.

    A label that is none of the known ones has another position. For each column of labels, which rows hold a known one.
    """
    xp, columns, is_known = namespace(matrix), list(matrix.T), []
    is_missing = [xp.isnan(columns[place]) for place, _ in medians]
    for (place, median), missing in zip(medians, is_missing, strict=True):
        columns[place] = xp.where(missing, xp.asarray(median, matrix.dtype), columns[place])
    for place, (known, instead) in labels:
        table = xp.asarray(known, matrix.dtype)
        position = xp.clip(xp.searchsorted(table, columns[place]), 0, len(known) - 1)
        is_same = table[position] == columns[place]
        is_known.append(is_same | (xp.isnan(table[position]) & xp.isnan(columns[place])))
        columns[place] = xp.where(is_known[-1], position, instead).astype(matrix.dtype)
    return xp.stack([*columns, *(missing.astype(matrix.dtype) for missing in is_missing)], axis=1), is_known


@numpy_or_jit
def _with_indicators(
    table: Float[AnyArray, "n c"], categorical: tuple[int, ...], sizes: tuple[int, ...]
) -> Float[AnyArray, "n p"]:
    """The columns of numbers, then an indicator for every label of the categorical columns."""
    numbers = [place for place in range(table.shape[1]) if place not in categorical]
    indicators = lambda place, size: (table[:, place, None] == np.arange(size)[None]).astype(table.dtype)
    parts = [indicators(place, size) for place, size in zip(categorical, sizes, strict=True)]
    return namespace(table).concatenate([table[:, np.array(numbers, int)], *parts], axis=1)


def positions(categorical: Sequence[int | str], layout: Layout) -> tuple[int, ...]:
    """The positions of columns that the user named by position or by name.

    Raises:
        ValueError: if there is no such column.
    """
    names, num_columns = layout.names or (), layout.num_columns
    known = {name: place for place, name in enumerate(names)}
    places = tuple(sorted({known.get(column, -1) if isinstance(column, str) else column for column in categorical}))
    if any(not 0 <= place < num_columns for place in places):
        named = f", or {', '.join(names)}" if names else ""
        raise ValueError(
            f"categorical must hold columns of x, 0 to {num_columns - 1}{named}; got {tuple(categorical)}."
        )
    return places


def names_rows(num_labels: int, num_rows: int) -> bool:
    """Whether a column with this number of different labels seems to hold names of the rows."""
    return num_labels > max(_FEW_LABELS, num_rows / 2)


# The columns without an order: by position or by name, or the `Columns` of a larger table.
Categorical = Sequence[int | str] | Columns


def as_data(
    x: Table, y: Series, categorical: Categorical = (), *, at_least: int = 2
) -> tuple[Columns, Float[Array, "n p"], Float[Array, " n"]]:
    """The columns of a table, the inputs that they make of it, and its targets.

    Args:
        x: a table.
        categorical: the columns without an order, as in `Columns.of`.
        y: targets [n].
        at_least: how many rows are needed.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, or has fewer rows. Also if x is a frame, and y
            is a series with another index.
    """
    check_same_index(x, y)
    columns = Columns.of(x, categorical)
    inputs = columns(x)
    y = _checks.as_vector("y", y, length=inputs.shape[0])
    _checks.check_rows("x", inputs, at_least)
    return columns, inputs, y


class _ColumnKind(NamedTuple):
    """The content of a column: its labels and the most frequent label, or the median of an incomplete column."""

    categories: tuple[Label, ...] | None = None
    majority: int | None = None
    median: float | None = None


def _found_in_array(x: ArrayLike, layout: Layout, chosen: tuple[int, ...], missing: bool) -> list[_ColumnKind]:
    if not (chosen or missing):
        return [_ColumnKind()] * layout.num_columns
    if _checks.is_traced(x):
        raise TypeError("x is traced, but its categories must be known: call fit outside jit, vmap and grad.")
    matrix = np.asarray(_checks.as_numbers("x", x))
    if not missing:
        _checks.check_finite("x", matrix)
    return [
        _found_in_labels(column) if place in chosen else _found_in_numbers(layout.called(place), column)
        for place, column in enumerate(matrix.T)
    ]


def _found_in_labels(column: np.ndarray) -> _ColumnKind:
    labels, counts = np.unique(column, return_counts=True)
    return _ColumnKind(tuple(None if np.isnan(label) else label for label in labels.tolist()), int(counts.argmax()))


def _found_in_numbers(name: str, values: np.ndarray) -> _ColumnKind:
    missing = np.isnan(values)
    if missing.all():
        raise ValueError(f"{name} of x has no value at all: drop it.")
    return _ColumnKind(median=float(np.median(values[~missing])) if missing.any() else None)


def _found_in_frame(x: Any, layout: Layout, chosen: tuple[int, ...]) -> list[_ColumnKind]:
    return [
        _found_in_column(layout.called(place), column, place in chosen)
        for place, column in enumerate(as_frame(x).iter_columns())
    ]


def _found_in_column(name: str, column: Any, categorical: bool) -> _ColumnKind:
    has_labels = holds_labels(name, column)
    if not (categorical or has_labels):
        return _found_in_numbers(name, numbers(name, column))
    labels, number = distinct_labels(name, column, numeric=not has_labels)
    if not categorical and names_rows(len(labels), len(number)):
        raise ValueError(
            f"{name} of x holds {len(labels)} different labels in {len(number)} rows: it seems to name "
            "the rows. Drop it, or name it in categorical=."
        )
    return _ColumnKind(labels, int(np.bincount(number).argmax()))


def _shown(label: Label) -> str:
    return "missing" if label is None else label if isinstance(label, str) else f"{label:g}"
