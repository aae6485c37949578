"""The columns of inputs: of an array, or of a data frame, whose columns have names, labels and missing values.

A fit keeps the `Columns` of its inputs. They make the numbers that a method computes with, the same at every
prediction: a column of labels becomes an indicator of each, a column with missing values its median in their place and
an indicator of them. The columns of a frame are looked up by their names.
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

# A column of text with so many labels, and more than half as many as rows, holds names of the rows.
_FEW_LABELS = 20


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
    def of(cls, x: Table, categorical: "Sequence[int | str] | Columns" = (), *, missing: bool = False) -> "Columns":
        """The columns of a table.

        Args:
            x: inputs [n, d], or a data frame of pandas, polars or another library that narwhals knows; a vector [n] is
                one column.
            categorical: the columns whose values have no order, by position, or of a frame by name; the columns of a
                frame that hold labels are categorical in any case. Or the `Columns` of a larger table, of whose rows x
                has a part.
            missing: whether NaN in an array is a missing value, as it always is in a frame. Else it is refused.

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
        layout = Layout.of(x)
        chosen = positions(categorical, layout)
        found = _found_in_frame(x, layout, chosen) if is_frame(x) else _found_in_array(x, layout, chosen, missing)
        medians = {place: each.median for place, each in enumerate(found) if each.median is not None}
        categories, majority = tuple(each.categories for each in found), tuple(each.majority for each in found)
        return cls(layout, categories, majority, incomplete=tuple(medians), medians=tuple(medians.values()))

    @property
    def num_columns(self) -> int:
        """How many there are."""
        return self.layout.num_columns

    @property
    def num_inputs(self) -> int:
        """How many numbers a row of inputs has, as the call gives them."""
        return self.num_columns - len(self.categorical) + len(self.incomplete) + sum(self.sizes)

    @property
    def is_plain(self) -> bool:
        """Whether they are those of an array, and all hold numbers: it is the inputs as it is."""
        return self.layout.names is None and not self.categorical and not self.incomplete

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

    def inputs(self, table: Float[AnyArray, "n c"]) -> Float[AnyArray, "n p"]:
        """The inputs of a method, of what `table` gives."""
        return _with_indicators(table, self.categorical, self.sizes) if self.categorical else table

    def codes(self, table: Float[AnyArray, "n c"]) -> Int[AnyArray, "n c"]:
        """The position of every label among the categories, of what `table` gives; 0 in the columns of numbers."""
        is_label = np.isin(np.arange(table.shape[1]), self.categorical)
        return namespace(table).where(is_label[None], table, 0).astype(np.int32)

    def table_names(self) -> tuple[str, ...]:
        """What the columns that `table` gives are called: x[0], x[1], ... of an array."""
        names = self.layout.names or tuple(f"x[{place}]" for place in range(self.num_columns))
        return (*names, *(f"{names[place]} missing" for place in self.incomplete))

    def table(self, x: Table) -> Float[Array, "n c"]:
        """The columns as numbers, and an indicator of missing values for each that had such in the fit.

        A label becomes its position among the categories; one that was not there in the fit -1, or as `unseen` says.

        Args:
            x: a data frame, if the columns have names, or an array [n, d] of numbers; a vector [n] is one column. In a
                frame missing values are allowed, where the fit had such or the column holds labels. In an array NaN is
                allowed where the fit had it. In an array of a frame's numbers a label is its position.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the fit; if a frame lacks a
                column; if values are missing in a column that had all in the fit.

        Warns:
            UserWarning: if a frame or a known array holds a label that was not there in the fit, and unseen="none".
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
        found, is_known = _with_positions(matrix, tuple(labels.items()), medians)
        _checks.check_finite("x", found)
        if not _checks.is_traced(matrix):
            for place, known in zip(self.categorical, is_known, strict=True):
                self._check_seen(place, np.asarray(matrix)[:, place], np.asarray(known))
        return found

    @property
    def _takes_nan(self) -> bool:
        """Whether values were missing in the fit."""
        return bool(self.incomplete) or any(None in (categories or ()) for categories in self.categories)

    def _labels(self, place: int) -> tuple[Any, ...]:
        """The labels of a column as an array holds them, NaN for a missing one. A frame's are their positions."""
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
        """The positions of the labels in a column of a frame; small integers leave the dtype of other columns alone."""
        of_numbers = isinstance(categories[0], float)
        labels, number = distinct_labels(self.layout.called(place), column, of_numbers=of_numbers)
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
    """The columns of numbers, then an indicator for every label of the others."""
    numbers = [place for place in range(table.shape[1]) if place not in categorical]
    indicators = lambda place, size: (table[:, place, None] == np.arange(size)[None]).astype(table.dtype)
    parts = [indicators(place, size) for place, size in zip(categorical, sizes, strict=True)]
    return namespace(table).concatenate([table[:, np.array(numbers, int)], *parts], axis=1)


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


def names_rows(num_labels: int, num_rows: int) -> bool:
    """Whether a column of so many different labels seems to hold names of the rows."""
    return num_labels > max(_FEW_LABELS, num_rows / 2)


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
    """What a column is."""

    categories: tuple[Label, ...] | None = None
    majority: int | None = None
    median: float | None = None


def _found_in_array(x: ArrayLike, layout: Layout, chosen: tuple[int, ...], missing: bool) -> list[_Found]:
    if not (chosen or missing):
        return [_Found()] * layout.num_columns
    if _checks.is_traced(x):
        raise TypeError("x is traced, but its categories must be known: call fit outside jit, vmap and grad.")
    matrix = np.asarray(_checks.as_numbers("x", x))
    if not missing:
        _checks.check_finite("x", matrix)
    of = {True: _found_in_labels, False: _found_in_numbers}
    return [of[place in chosen](layout.called(place), column) for place, column in enumerate(matrix.T)]


def _found_in_labels(_: str, column: np.ndarray) -> _Found:
    labels, counts = np.unique(column, return_counts=True)
    return _Found(tuple(None if np.isnan(label) else label for label in labels.tolist()), int(counts.argmax()))


def _found_in_numbers(name: str, values: np.ndarray) -> _Found:
    missing = np.isnan(values)
    if missing.all():
        raise ValueError(f"{name} of x has no value at all: drop it.")
    return _Found(median=float(np.median(values[~missing])) if missing.any() else None)


def _found_in_frame(x: Any, layout: Layout, chosen: tuple[int, ...]) -> list[_Found]:
    return [
        _found_in_column(layout.called(place), column, place in chosen)
        for place, column in enumerate(as_frame(x).iter_columns())
    ]


def _found_in_column(name: str, column: Any, categorical: bool) -> _Found:
    of_labels = holds_labels(name, column)
    if not (categorical or of_labels):
        return _found_in_numbers(name, numbers(name, column))
    labels, number = distinct_labels(name, column, of_numbers=not of_labels)
    if not categorical and names_rows(len(labels), len(number)):
        raise ValueError(
            f"{name} of x holds {len(labels)} different labels in {len(number)} rows: it seems to name "
            "the rows. Drop it, or name it in categorical=."
        )
    return _Found(labels, int(np.bincount(number).argmax()))


def _shown(label: Label) -> str:
    return "missing" if label is None else label if isinstance(label, str) else f"{label:g}"
