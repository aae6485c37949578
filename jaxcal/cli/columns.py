"""The roles of the columns of a file, and its rows as arrays."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import jaxcal as jc
from jaxcal.cli import console, files, numerals, words
from jaxcal.cli.files import FileTable

if TYPE_CHECKING:  # slow to import
    import polars

    from jaxcal.distributions import Distribution
    from jaxcal.frames.columns import Columns

# A column of text with more labels is no feature, unless the user names it: each label would be a column of numbers.
_MOST_LABELS = 50
# A column of different whole numbers with such a name names the rows.
_NAME_OF_ROWS = re.compile(r"(^|[\W_])(id|idx|index|key|row|nr|no|number|uuid)$|[a-z](Id|ID|Idx)$|^unnamed|^$", re.I)


@dataclass(frozen=True)
class Roles:
    """The names of the columns with a role.

    Attributes:
        target: the column of the true values.
        prediction: the column of a model's predictions, if there is one.
        std: the column of the model's stds.
        by: the column of labels of groups.
        weights: the column of weights.
        features: the columns of the inputs.
    """

    target: str
    prediction: str | None = None
    std: str | None = None
    by: str | None = None
    weights: str | None = None
    features: tuple[str, ...] = ()

    def named(self) -> dict[str, str]:
        """The columns that the user named, without the features."""
        names = ("target", "prediction", "std", "by", "weights")
        return {name: column for name in names if (column := getattr(self, name)) is not None}

    def check(self, table: FileTable) -> None:
        """Raise ValueError unless the named columns are different and exist."""
        named = self.named()
        if len(set(named.values())) < len(named):
            raise ValueError(f"{', '.join(named)} must be different columns; got {', '.join(named.values())}.")
        for column in named.values():
            table.check_column(column)


def choose_features(
    roles: Roles, features: str | None, exclude: str | None, table: FileTable
) -> tuple[tuple[str, ...], "Columns | None"]:
    """The named features, or all other columns that can be features, and the content of these columns.

    The features and the unused columns are printed.

    Raises:
        ValueError: if there is no such column, it is the target, or holds neither numbers nor labels.
    """
    others = [name for name in table.frame.columns if name not in roles.named().values()]
    excluded = _excluded(exclude, features, roles, table)
    if features is None:
        why_not = {name: _Why("excluded") for name in excluded}
        why_not |= {
            name: why for name in others if name not in excluded and (why := _why_no_feature(table.frame[name], table))
        }
        chosen = [name for name in others if name not in why_not]
    else:
        chosen = _names_in(features)
        why_not = {name: _Why("not named") for name in others if name not in chosen}
        _check_chosen(chosen, roles.target, table)
    named = [f"{name} ({why.text})" for name, why in why_not.items()]
    shown = [_described(table.frame[name]) for name in chosen]
    console.say(f"Features: {', '.join(shown) or 'none'}." + (f" Not used: {', '.join(named)}." if named else ""))
    for name, why in why_not.items():
        if why.is_told:
            instead = " To use it, name all features: --features." if why.may_be_named else ""
            console.complain("Warning", f"column {name!r} {why.text} and is no feature.{instead}")
    with words.of_rows(table):
        return tuple(chosen), jc.frames.columns.Columns.of(table.frame.select(chosen)) if chosen else None


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _excluded(exclude: str | None, features: str | None, roles: Roles, table: FileTable) -> list[str]:
    """The columns that the user excludes from the features.

    Raises:
        ValueError: if there is no such column, it has a role, or the features are named as well.
    """
    if exclude is None:
        return []
    if features is not None:
        raise ValueError("--exclude and --features exclude each other: what is not named is no feature.")
    names = _names_in(exclude)
    for name in names:
        table.check_column(name)
        for role, column in roles.named().items():
            if column == name:
                raise ValueError(f"--exclude names {name!r}, which is the column of --{role}.")
    return names


class _Why(NamedTuple):
    """The reason why a column is no feature.

    Attributes:
        text: the end of a sentence about the column.
        may_be_named: whether the column is a feature if the user names it.
        is_told: whether a warning says so.
    """

    text: str
    may_be_named: bool = False
    is_told: bool = False


def _check_chosen(chosen: Sequence[str], target: str, table: FileTable) -> None:
    """Raise ValueError if a feature is the target, does not exist, or cannot be a feature."""
    if target in chosen:
        raise ValueError(f"the target {target!r} must not be among the features.")
    for name in chosen:
        table.check_column(name)
        why = _why_no_feature(table.frame[name], table)
        if why is not None and not why.may_be_named:
            raise ValueError(f"column {name!r} of {table.file} {why.text}: leave it out of --features.")


def _why_no_feature(values: "polars.Series", table: FileTable) -> _Why | None:
    """The reason why a column is no feature by default; None if it is a feature.

    Raises:
        ValueError: if it holds numbers and a text among them, or numbers that were not read as numbers.
    """
    import polars

    dtype = values.dtype
    is_text = dtype in (polars.String, polars.Categorical, polars.Enum)
    if dtype == polars.Null:
        return _Why("holds nothing")
    if not (files.is_numeric(dtype) or is_text):
        return _Why(f"holds {dtype}, neither numbers nor labels")
    if is_text:
        _check_no_numbers(values, table)
    number, rows = values.n_unique(), len(values)
    if number == 1:
        return _Why("holds one value")
    if is_text and jc.frames.columns.names_rows(number, rows):
        return _Why("seems to name the rows", is_told=True)
    if is_text and number > _MOST_LABELS:
        zeros = ", numbers with leading zeros," if _is_padded(values) else ""
        return _Why(f"holds {number} labels{zeros}", may_be_named=True, is_told=True)
    if dtype.is_integer() and number == rows and _counts(values):
        return _Why("seems to number the rows", may_be_named=True, is_told=True)
    return None


def _counts(values: "polars.Series") -> bool:
    """Whether different whole numbers have no gap, or the name of their column says that they name rows."""
    first, last = int(values.min()), int(values.max())  # pyright: ignore[reportArgumentType]
    return last - first == len(values) - 1 or _NAME_OF_ROWS.search(values.name) is not None


def _check_no_numbers(values: "polars.Series", table: FileTable) -> None:
    """Raise ValueError if a column of text holds numbers that were not read as numbers, or mostly numbers."""
    import polars

    texts, column = values.cast(polars.String), f"column {values.name!r} of {table.file}"
    instead = "To keep it in the file and not use it, name it in --exclude."
    if problem := table.unread_numbers(texts):
        raise ValueError(f"{column} {problem} {instead}")
    there, others = texts.drop_nulls(), numerals.not_numbers(texts)
    if 0 < len(others) < len(there) / 2 and not numerals.has_leading_zeros(there):
        raise ValueError(
            f"{column} holds numbers, and {others[0]!r} among them: correct it, or leave it empty. {instead}"
        )


def _described(values: "polars.Series") -> str:
    """The name of a feature, with notes on its labels, leading zeros and missing values."""
    labels = "" if files.is_numeric(values.dtype) else f"{values.n_unique()} labels"
    missing = (values.fill_nan(None) if values.dtype.is_float() else values).null_count()
    zeros = "leading zeros" if _is_padded(values) else ""
    notes = ", ".join(filter(None, [labels, zeros, f"{missing} missing" if missing else ""]))
    return f"{values.name} ({notes})" if notes else values.name


def _is_padded(values: "polars.Series") -> bool:
    """Whether a column holds labels only because its numbers have leading zeros."""
    import polars

    return values.dtype == polars.String and numerals.numbers_in(values) is not None


def targets(table: FileTable, column: str) -> np.ndarray | None:
    """The targets [n], NaN where they are unknown; None if there is no such column."""
    return table.numbers(column, may_be_missing=True) if column in table.frame.columns else None


@dataclass(frozen=True)
class TableRows:
    """Features, a model's predictions, and the targets where they are known.

    Attributes:
        x: the features, a data frame [n, d]; None if there are none.
        mean: the predictions [n].
        std: the stds of the predictions [n], or None.
        y: the targets [n], NaN where they are unknown; None if there are none.
        counts: the labels of groups `by` [n] and the `weights` [n], if there are any.
    """

    x: "polars.DataFrame | None"
    mean: np.ndarray
    std: np.ndarray | None
    y: np.ndarray | None
    counts: dict[str, np.ndarray]

    @classmethod
    def read(cls, table: FileTable, roles: Roles, *, with_targets: bool = True) -> "TableRows":
        """The rows of a table. They have no targets if there is no such column, or `with_targets` is false.

        Raises:
            ValueError: if a column is missing, or holds other values than finite numbers; if a std is below 0.
        """
        mean = table.numbers(str(roles.prediction))
        std = None if roles.std is None else table.numbers(roles.std)
        if std is not None and (std < 0).any():
            raise ValueError(
                f"column {roles.std!r} must not be negative; {np.sum(std < 0)} values are, the first in "
                f"{table.row(int(np.argmax(std < 0)))}."
            )
        x = table.select(roles.features) if roles.features else None
        y = targets(table, roles.target) if with_targets else None
        readers = {"by": (roles.by, table.labels), "weights": (roles.weights, table.numbers)}
        # Rows to predict may lack these columns, because not every method uses them in predictions.
        there = table.frame.columns
        return cls(x, mean, std, y, {name: read(column) for name, (column, read) in readers.items() if column in there})

    def take(self, rows: np.ndarray) -> "TableRows":
        """The rows of these numbers."""
        pick = lambda values: None if values is None else values[rows]
        counts = {name: values[rows] for name, values in self.counts.items()}
        return TableRows(pick(self.x), self.mean[rows], pick(self.std), pick(self.y), counts)

    @property
    def base(self) -> "Distribution":
        """The model's predictions."""
        return jc.Point(self.mean) if self.std is None else jc.Normal(self.mean, self.std)
