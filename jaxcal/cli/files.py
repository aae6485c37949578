"""Tables in files: CSV and Parquet."""

import csv
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxcal._files import replacing

if TYPE_CHECKING:  # slow to import
    import polars

# What people write where a value is missing: read as text it would make a column of numbers one of text.
_MISSING = ("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NAN", "NULL", "Null", "null", "None", "none", "?", "-")
# What people write between columns beside commas.
_SEPARATORS = {";": "semicolons", "\t": "tabs"}


def read(file: Path) -> "polars.DataFrame":
    """The table in a file; the usual words for a missing value are missing values.

    Raises:
        ValueError: if there is no such file, it cannot be read, holds no rows, or two columns have one name.
    """
    import polars

    if not file.is_file():
        raise ValueError(f"there is no file {file}.")
    check_suffix(file)
    try:
        if file.suffix.lower() == ".csv":
            _check_header(file)
            table = polars.read_csv(file, infer_schema_length=None, null_values=list(_MISSING))
        else:
            table = polars.read_parquet(file)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"cannot read {file}: {str(error).splitlines()[0]}.") from error
    if table.is_empty():
        raise ValueError(f"{file} holds no rows.")
    return table


def _check_header(file: Path) -> None:
    """Raise ValueError if two columns of a CSV have one name, or something else than commas is between them."""
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        names = next(csv.reader(lines), [])
    between = next((found for character, found in _SEPARATORS.items() if character in "".join(names)), None)
    if len(names) == 1 and between is not None:
        raise ValueError(
            f"{file} has one column, {names[0]!r}: its columns seem to be separated by {between}, and must be by "
            "commas, with points in numbers."
        )
    # polars would rename the second, silently
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(f"{file} has more than one column {', '.join(map(repr, twice))}: rename or remove them.")


def write(table: "polars.DataFrame", columns: dict[str, np.ndarray], out: Path) -> None:
    """The table with further columns, into a file, in one step.

    Raises:
        ValueError: if it cannot be written.
    """
    import polars

    table = table.with_columns(polars.Series(name, values) for name, values in columns.items())
    try:
        with replacing(out) as file:
            if out.suffix.lower() == ".csv":
                table.write_csv(file)
            else:
                table.write_parquet(file)
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
    if table is None or out.suffix.lower() != ".csv":
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
    if not (is_numeric(values.dtype) or values.dtype == polars.Null):
        row = 0
        if values.dtype == polars.String:  # show the value because of which the column was read as text
            is_text = values.cast(polars.Float64, strict=False).is_null() & values.is_not_null()
            row = int(is_text.to_numpy().argmax())
        raise ValueError(f"column {column!r} of {file} must hold numbers; data row {row + 1} holds {values[row]!r}.")
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


def check_column(table: "polars.DataFrame", column: str, file: Path) -> None:
    """Raise ValueError unless the table has the column; suggest one."""
    if column not in table.columns:
        raise ValueError(f"{file} has no column {column!r}: {suggest(column, table.columns)}")


def check_suffix(file: Path) -> None:
    """Raise ValueError unless the name of the file tells its format."""
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise ValueError(f"{file} must end in .csv or .parquet.")


def suggest(name: str, names: Sequence[str]) -> str:
    """The nearest names, or all of them, as the end of a message."""
    by_lower_case = {known.lower(): known for known in names}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case)
    if nearest:
        return f"did you mean {' or '.join(repr(by_lower_case[known]) for known in nearest)}?"
    return f"there are {', '.join(names)}."
