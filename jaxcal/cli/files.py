"""Tables in files: CSV and Parquet."""

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
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


def read(
    file: Path, given: Format = UNKNOWN, usual: Format = UNKNOWN, texts: Sequence[str] | None = None
) -> "tuple[polars.DataFrame, Text | None]":
    """The table in a file, and its text if it is a CSV.

    Args:
        file: CSV or Parquet.
        given: what is known of the format of a CSV.
        usual: what is assumed where the file does not tell.
        texts: the columns that stay texts; None for those that do not hold numbers, or such with leading zeros.

    Raises:
        ValueError: if there is no such file, it cannot be read, holds no rows, or two columns have one name.
    """
    import polars

    if not file.is_file():
        raise ValueError(f"there is no file {file}.")
    check_suffix(file)
    try:
        if file.suffix.lower() == ".parquet":
            table, text = polars.read_parquet(file), None
        else:
            table, text = _read_text(file, given, usual, texts)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"cannot read {file}: {str(error).splitlines()[0]}.") from error
    if table.is_empty():
        raise ValueError(f"{file} holds no rows.")
    return table, text


def _read_text(
    file: Path, given: Format, usual: Format, texts: Sequence[str] | None
) -> "tuple[polars.DataFrame, Text]":
    """The table in a CSV, and its text; tell what was recognized."""
    text = Text.read(file, given, usual)
    table = text.frame()
    marks = _find_marks(table, text.format, usual, file)
    text = replace(text, format=replace(text.format, decimal=marks.decimal, thousands=marks.thousands))
    if found := text.format.told(given, usual):
        console.complain("Note", f"{file} has {found}, and was read so: --separator and --decimal say otherwise.")
    for name in table.columns:  # one by one: the texts of a column go once its numbers are there
        if texts is None or name not in texts:
            table = table.with_columns(numerals.typed(table[name], marks, keep_padded=texts is None))
    return table, text


def _find_marks(table: "polars.DataFrame", form: Format, usual: Format, file: Path) -> Marks:
    """How numbers are written in a table of texts, as far as it is given or recognized, else as is usual."""
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
    """Warn that the points in the numbers of a table, which were read as decimal points, may separate thousands."""
    column = next(values for values in table.iter_columns() if Marks().fit(values) and not Marks(",").fit(values))
    example = column.filter(column.str.contains(".", literal=True))[0]
    console.complain(
        "Warning",
        f"column {column.name!r} of {file} holds {example!r}, which was read with a decimal point: --decimal '.' "
        "confirms it, and --thousands '.' says otherwise.",
    )


def write(table: "polars.DataFrame", text: Text | None, columns: dict[str, np.ndarray], out: Path) -> None:
    """The table with further columns, into a file, in one step; in a CSV its text stays as it is.

    Raises:
        ValueError: if it cannot be written.
    """
    import polars

    added = polars.DataFrame(columns)
    try:
        with replacing(out) as file:
            if out.suffix.lower() == ".parquet":
                table.hstack(added).write_parquet(file)
            elif text is not None:
                text.write(added, file)
            else:
                table.hstack(added).write_csv(file, separator="\t" if out.suffix.lower() == ".tsv" else ",")
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"cannot write {out}: {str(error).splitlines()[0]}.") from error


def check_output(
    out: Path, option: str, inputs: Iterable[Path | None], table: "polars.DataFrame | None" = None
) -> None:
    """Refuse, before anything is fitted, a file that could not be written in the end.

    Args:
        out: the file.
        option: that names it.
        inputs: the files that are read, none of which it may be.
        table: whose columns it is to hold, if any.

    Raises:
        ValueError: if it could not.
    """
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ValueError(f"cannot write {out}: {'it is a folder' if out.is_dir() else f'there is no folder {folder}'}.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {out}: permission denied in the folder {folder}.")
    for file in inputs:
        if file is not None and file.exists() and out.exists() and out.samefile(file):
            raise ValueError(f"{option} is {file} itself: its rows would be overwritten.")
    if table is None or out.suffix.lower() == ".parquet":
        return
    for name, dtype in table.schema.items():
        if dtype.is_nested():
            raise ValueError(f"column {name!r} holds {dtype}, which a CSV cannot: write Parquet, --out FILE.parquet.")


def is_numeric(dtype: "polars.DataType") -> bool:
    """Whether a column holds numbers, or truth values."""
    import polars

    return dtype.is_numeric() or dtype == polars.Boolean


def numbers(table: "polars.DataFrame", column: str, file: Path, *, may_be_missing: bool = False) -> np.ndarray:
    """The values of a column, if all of them are finite numbers; NaN where they may be missing.

    Raises:
        ValueError: if there is no such column, or a value is no finite number.
    """
    import polars

    check_column(table, column, file)
    values = table[column]
    if values.dtype == polars.String:
        check_numerals(table, [column], file)
        found = numerals.numbers_in(values)
        values = values if found is None else found
    if not (is_numeric(values.dtype) or values.dtype == polars.Null):
        others = numerals.not_numbers(values) if values.dtype == polars.String else values
        bad = values[0] if others.is_empty() else others[0]
        row = values.to_list().index(bad)
        raise ValueError(f"column {column!r} of {file} must hold numbers; data row {row + 1} holds {bad!r}.")
    numbers = values.cast(polars.Float64).to_numpy()
    missing = np.isinf(numbers) if may_be_missing else ~np.isfinite(numbers)
    if missing.any():
        raise ValueError(
            f"column {column!r} of {file} holds {missing.sum()} values that are "
            f"{'infinite' if may_be_missing else 'missing, NaN or infinite'}, "
            f"the first in data row {missing.argmax() + 1}."
        )
    return numbers


def labels(table: "polars.DataFrame", column: str, file: Path) -> np.ndarray:
    """The values of a column, whatever they are, as labels of groups.

    Raises:
        ValueError: if there is no such column, or a value is missing.
    """
    check_column(table, column, file)
    missing = table[column].is_null().to_numpy()
    if missing.any():
        raise ValueError(
            f"column {column!r} of {file} holds {missing.sum()} labels that are missing, the first in data row "
            f"{missing.argmax() + 1}."
        )
    return np.array(table[column].to_list())


def select(table: "polars.DataFrame", columns: Sequence[str], file: Path) -> "polars.DataFrame":
    """These columns of a table.

    Raises:
        ValueError: if there is no such column.
    """
    for column in columns:
        check_column(table, column, file)
    return table.select(columns)


def texts_in(table: "polars.DataFrame") -> list[str]:
    """The columns of texts."""
    import polars

    return [name for name, dtype in table.schema.items() if dtype == polars.String]


def check_numerals(table: "polars.DataFrame", columns: Iterable[str], file: Path) -> None:
    """Raise ValueError if one of these columns of a CSV holds numbers that were not read as such."""
    for name in texts_in(table):
        if name in columns and (problem := unread_numbers(table[name], file)):
            raise ValueError(f"column {name!r} of {file} {problem}")


def unread_numbers(values: "polars.Series", file: Path) -> str | None:
    """Which numbers in a column of texts were not read as such, as the end of a sentence; in Parquet a text is one."""
    return None if file.suffix.lower() == ".parquet" else numerals.explain(values)


def check_column(table: "polars.DataFrame", column: str, file: Path) -> None:
    """Raise ValueError unless the table has the column; suggest one."""
    if column not in table.columns:
        raise ValueError(f"{file} has no column {column!r}: {suggest(column, table.columns)}")


def check_suffix(file: Path) -> None:
    """Raise ValueError unless the name of the file tells its format."""
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{file} must end in .csv, .tsv or .parquet.")


def suggest(name: str, names: Sequence[str]) -> str:
    """The nearest names, or all of them, as the end of a message."""
    by_lower_case = {known.lower(): known for known in names}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case)
    if nearest:
        return f"did you mean {' or '.join(repr(by_lower_case[known]) for known in nearest)}?"
    return f"there are {', '.join(names)}."
