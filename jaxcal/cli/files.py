"""Tables in files: CSV and Parquet."""

import datetime
import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxcal._files import replacing
from jaxcal.cli import console, numerals
from jaxcal.cli.numerals import Marks
from jaxcal.cli.text import UNKNOWN, Format, Text

if TYPE_CHECKING:  # slow to import
    import polars

_SUFFIXES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True, eq=False)
class FileTable:
    """A table in a file.

    Attributes:
        frame: its values.
        file: its path.
        text: its text, if it is a CSV.
    """

    frame: "polars.DataFrame"
    file: Path
    text: Text | None

    @classmethod
    def read(
        cls, file: Path, stated: Format = UNKNOWN, usual: Format = UNKNOWN, texts: Sequence[str] | None = None
    ) -> "FileTable":
        """The table in a file.

        Args:
            file: CSV or Parquet.
            stated: the known properties of the format of a CSV.
            usual: the properties that are assumed where the file leaves them open.
            texts: the columns that stay texts. With None a column stays text if it does not hold numbers, or holds
                numbers with leading zeros.

        Raises:
            ValueError: if there is no such file, it cannot be read, has no rows, or two columns have the same name.
        """
        import polars

        if not file.is_file():
            raise ValueError(f"there is no file {file}.")
        check_suffix(file)
        try:
            if file.suffix.lower() == ".parquet":
                frame, text = polars.read_parquet(file), None
            else:
                frame, text = _read_text(file, stated, usual, texts)
        except (polars.exceptions.PolarsError, OSError) as error:
            raise ValueError(f"cannot read {file}: {str(error).splitlines()[0]}.") from error
        if frame.is_empty():
            raise ValueError(f"{file} holds no rows.")
        return cls(frame, file, text)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.frame)

    def write(self, columns: dict[str, np.ndarray], out: Path) -> None:
        """Write the table with further columns into a file, in one step. The text of a CSV stays unchanged.

        Raises:
            ValueError: if it cannot be written.
        """
        import polars

        added = polars.DataFrame(columns)
        try:
            with replacing(out) as file:
                if out.suffix.lower() == ".parquet":
                    self.frame.hstack(added).write_parquet(file)
                elif self.text is not None:
                    self.text.write(added, file)
                else:
                    separator = "\t" if out.suffix.lower() == ".tsv" else ","
                    self.frame.hstack(added).write_csv(file, separator=separator)
        except polars.exceptions.PolarsError as error:
            raise ValueError(f"cannot write {out}: {str(error).splitlines()[0]}.") from error

    def numbers(self, column: str, *, may_be_missing: bool = False) -> np.ndarray:
        """The values of a column, if all of them are finite numbers. Missing values are NaN, if they are allowed.

        Raises:
            ValueError: if there is no such column, or a value is no finite number.
        """
        import polars

        self.check_column(column)
        values = self.frame[column]
        if values.dtype == polars.String:
            self.check_numerals([column])
            parsed = numerals.numbers_in(values)
            values = values if parsed is None else parsed
        if not (is_numeric(values.dtype) or values.dtype == polars.Null):
            others = numerals.not_numbers(values) if values.dtype == polars.String else values
            bad = values[0] if others.is_empty() else others[0]
            row = self.row(values.to_list().index(bad))
            raise ValueError(f"column {column!r} must hold numbers; {row} holds {bad!r}.")
        numbers = values.cast(polars.Float64).to_numpy()
        missing = np.isinf(numbers) if may_be_missing else ~np.isfinite(numbers)
        kind = "infinite" if may_be_missing else "missing, NaN or infinite"
        self._check_none(column, missing, f"values that are {kind}")
        return numbers

    def labels(self, column: str) -> np.ndarray:
        """The values of a column, of any kind, as labels of groups.

        Raises:
            ValueError: if there is no such column, or a value is missing.
        """
        self.check_column(column)
        self._check_none(column, self.frame[column].is_null().to_numpy(), "labels that are missing")
        return np.array(self.frame[column].to_list())

    def times(self, column: str) -> tuple[np.ndarray, list[str]]:
        """The numbers of the rows in the order of the times in a column, equal ones as in the file; the times in words.

        Raises:
            ValueError: if there is no such column, or a value is neither a number nor a date, as ISO 8601 writes them.
        """
        import polars

        self.check_column(column)
        values = self.frame[column]
        self._check_none(column, values.is_null().to_numpy(), "times that are missing")
        times = values.to_list()
        if values.dtype == polars.String:
            times = [self._time(column, row, text) for row, text in enumerate(times)]
        elif not (values.dtype.is_numeric() or values.dtype.is_temporal()):
            raise ValueError(f"column {column!r} of {self.file} holds {values.dtype}, no times.")
        try:
            order = sorted(range(len(times)), key=times.__getitem__)
        except TypeError as error:
            raise ValueError(f"column {column!r} of {self.file} holds times with and without a time zone.") from error
        return np.array(order), [str(value) for value in values.to_list()]

    def _time(self, column: str, row: int, text: str) -> datetime.datetime:
        try:
            return datetime.datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise ValueError(
                f"column {column!r} must hold numbers, or times such as 2026-11-30 or 2026-11-30 14:05; "
                f"{self.row(row)} holds {text!r}."
            ) from error

    def _check_none(self, column: str, bad: np.ndarray, what: str) -> None:
        """Raise ValueError if there are bad values. The message says what they are, and where the first is."""
        if bad.any():
            raise ValueError(f"column {column!r} holds {bad.sum()} {what}, the first in {self.row(int(bad.argmax()))}.")

    def row(self, number: int) -> str:
        """The row of this number, from 0, by its number in a spreadsheet."""
        if self.text is None:
            return f"row {number + 1} of {self.file}"
        return f"row {self.text.rows[number + 1]} of {self.file} (the header is row {self.text.rows[0]})"

    def select(self, columns: Sequence[str]) -> "polars.DataFrame":
        """A frame of these columns.

        Raises:
            ValueError: if there is no such column.
        """
        for column in columns:
            self.check_column(column)
        return self.frame.select(columns)

    @property
    def texts(self) -> list[str]:
        """The columns of texts."""
        import polars

        return [name for name, dtype in self.frame.schema.items() if dtype == polars.String]

    def check_numerals(self, columns: Collection[str]) -> None:
        """Raise ValueError if one of these columns of a CSV holds numbers that were not read as numbers."""
        for name in self.texts:
            if name in columns and (problem := self.unread_numbers(self.frame[name])):
                raise ValueError(f"column {name!r} of {self.file} {problem}")

    def unread_numbers(self, texts: "polars.Series") -> str | None:
        """The numbers in a column of texts that were not read as numbers, as the end of a sentence.

        A text in Parquet is always a text.
        """
        return None if self.file.suffix.lower() == ".parquet" else numerals.explain(texts)

    def check_column(self, column: str) -> None:
        """Raise ValueError unless the table has the column. The message suggests a column."""
        if column not in self.frame.columns:
            raise ValueError(f"{self.file} has no column {column!r}: {suggest(column, self.frame.columns)}")


def _read_text(
    file: Path, known: Format, usual: Format, texts: Sequence[str] | None
) -> "tuple[polars.DataFrame, Text]":
    """The table in a CSV, and its text. A note on stderr says which format was recognized."""
    text = Text.read(file, known, usual)
    table = text.frame()
    marks = _find_marks(table, text.format, usual, file)
    text = replace(text, format=replace(text.format, decimal=marks.decimal, thousands=marks.thousands))
    if recognized := text.format.told(known, usual):
        console.complain("Note", f"{file} has {recognized}, and was read so: --separator and --decimal say otherwise.")
    for name in table.columns:  # one by one, so that the texts of a column are freed before the next column
        if texts is None or name not in texts:
            table = table.with_columns(numerals.typed(table[name], marks, keep_padded=texts is None))
    return table, text


def _find_marks(table: "polars.DataFrame", form: Format, usual: Format, file: Path) -> Marks:
    """The format of the numbers in a table of texts: as the options say, else as recognized, else as usual."""
    thousands = form.thousands or (None if usual.thousands == form.decimal else usual.thousands)
    if form.decimal:
        return Marks(form.decimal, thousands)
    possible = {marks for marks in numerals.recognize(table.iter_columns()) if marks.decimal != thousands}
    decimals = {marks.decimal for marks in possible}
    if len(decimals) == 1:
        return Marks(decimals.pop(), thousands)
    if form.separator != "," and not usual.decimal and Marks() in possible and Marks(",") not in possible:
        _warn_of_points(table, file)
    return Marks(usual.decimal or ".", thousands)


def _warn_of_points(table: "polars.DataFrame", file: Path) -> None:
    """Warn that points, which were read as decimal points, may be thousands separators."""
    column = next(values for values in table.iter_columns() if Marks().fit(values) and not Marks(",").fit(values))
    example = column.filter(column.str.contains(".", literal=True))[0]
    console.complain(
        "Warning",
        f"column {column.name!r} of {file} holds {example!r}, which was read with a decimal point: --decimal '.' "
        "confirms it, and --thousands '.' says otherwise.",
    )


def check_output(out: Path, option: str, others: Iterable[Path | None], *, force: bool) -> None:
    """Refuse, before anything is read or fitted, a file that could not be written in the end, or exists.

    Args:
        out: the file.
        option: that names it, or its folder.
        others: the files that are read or written, too, none of which it may be.
        force: whether it may exist.

    Raises:
        ValueError: if it is one of the others, could not be written, or exists.
    """
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ValueError(f"cannot write {out}: {'it is a folder' if out.is_dir() else f'there is no folder {folder}'}.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {out}: permission denied in the folder {folder}.")
    for file in others:
        if file is not None and out.resolve() == file.resolve():
            raise ValueError(f"{option} is {file} itself, which would be overwritten: name another file.")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: --force overwrites it, or {option} names another place.")


def check_holds(out: Path, table: FileTable) -> None:
    """Raise ValueError if a file of this name cannot hold the columns of a table."""
    if out.suffix.lower() == ".parquet":
        return
    for name, dtype in table.frame.schema.items():
        if dtype.is_nested():
            raise ValueError(f"column {name!r} holds {dtype}, which a CSV cannot: write Parquet, --out FILE.parquet.")


def is_numeric(dtype: "polars.DataType") -> bool:
    """Whether a column holds numbers, or truth values."""
    import polars

    return dtype.is_numeric() or dtype == polars.Boolean


def check_suffix(file: Path) -> None:
    """Raise ValueError unless the suffix of the file names a known format."""
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{file} must end in .csv, .tsv or .parquet.")


def suggest(name: str, names: Sequence[str]) -> str:
    """The most similar names, or all names, as the end of a message."""
    names_in_lower_case = {known.lower(): known for known in names}
    nearest = difflib.get_close_matches(name.lower(), names_in_lower_case)
    if nearest:
        return f"did you mean {' or '.join(repr(names_in_lower_case[known]) for known in nearest)}?"
    return f"there are {', '.join(names)}."
