"""The columns of a table: a matrix of numbers, or a data frame, whose columns have names and may hold strings."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import ArrayLike


class Columns(eqx.Module):
    """What the columns of a data frame are called, and the categories of those that are not numbers.

    A frame is what has `columns` and gives one by its name, as those of pandas and of polars do.

    Attributes:
        names: of the columns.
        categories: the labels of every column in increasing order, None where it holds numbers.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    categories: tuple[tuple[str, ...] | None, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, x: Any) -> "Columns | None":
        """The columns of a frame; None for an array.

        Raises:
            ValueError: if two columns have one name, or a label is missing.
        """
        if not _is_frame(x):
            return None
        names = tuple(map(str, x.columns))
        if len(set(names)) < len(names):
            raise ValueError(f"the columns of x must have different names; got {', '.join(names)}.")
        found = tuple(
            tuple(np.unique(_labels(x, column)).tolist()) if _holds_labels(x[column]) else None for column in x.columns
        )
        return cls(names, found)

    @property
    def categorical(self) -> tuple[int, ...]:
        """The positions of the columns that hold labels."""
        return tuple(place for place, categories in enumerate(self.categories) if categories is not None)

    def matrix(self, x: Any, unseen: str) -> ArrayLike:
        """The numbers of a frame [n, d], its columns looked up by name; an array as it is.

        A label becomes its position among the categories; one that is none of them their number.

        Raises:
            ValueError: if a column is missing, or there is another label, and `unseen` is an "error".
        """
        if not _is_frame(x):
            return x
        places = {str(column): column for column in x.columns}
        if missing := [name for name in self.names if name not in places]:
            raise ValueError(f"x has no column {missing[0]!r}; its columns are {', '.join(places)}.")
        columns = []
        for name, categories in zip(self.names, self.categories, strict=True):
            if categories is None:
                columns.append(np.asarray(x[places[name]]))
                continue
            known, labels = np.asarray(categories), _labels(x, places[name])
            place = np.searchsorted(known, labels)
            is_known = known[np.minimum(place, len(known) - 1)] == labels
            if unseen == "error" and not is_known.all():
                raise ValueError(
                    f"column {name!r} of x holds {str(labels[~is_known][0])!r}, which is none of the {len(known)} "
                    "categories it was fitted on; unseen='majority' takes the most frequent category in its place."
                )
            # Small integers leave the dtype of other columns alone.
            columns.append(np.where(is_known, place, len(known)).astype(np.int16))
        return np.column_stack(columns)


def positions(categorical: Sequence[int | str], names: Sequence[str] | None, num_columns: int) -> tuple[int, ...]:
    """The positions of columns that are given by position or by name.

    Raises:
        ValueError: if there is no such column.
    """
    known = {} if names is None else {name: place for place, name in enumerate(names)}
    found = tuple(sorted({known.get(column, -1) if isinstance(column, str) else column for column in categorical}))
    if any(not 0 <= place < num_columns for place in found):
        named = "" if names is None else f", or {', '.join(names)}"
        raise ValueError(
            f"categorical must hold columns of x, 0 to {num_columns - 1}{named}; got {tuple(categorical)}."
        )
    return found


def _is_frame(x: Any) -> bool:
    return hasattr(x, "columns") and hasattr(x, "__getitem__")


def _holds_labels(column: Any) -> bool:
    """Whether a column of a frame is categorical, or holds what are no numbers."""
    is_categorical = str(column.dtype).lower().startswith(("category", "categorical", "enum"))
    return is_categorical or np.asarray(column).dtype.kind not in "fiub"


def _labels(x: Any, column: Any) -> np.ndarray:
    """The labels of a column as strings [n].

    Raises:
        ValueError: if one is missing, or no string.
    """
    values = np.asarray(x[column])
    bad = [value for value in values.tolist() if not isinstance(value, str | int) and not _is_finite(value)]
    if bad:
        raise ValueError(
            f"column {str(column)!r} of x holds {len(bad)} values that are neither numbers nor strings, the first "
            f"{bad[0]!r}: fill or drop what is missing."
        )
    return values.astype(str)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
