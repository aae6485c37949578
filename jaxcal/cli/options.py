"""The options that several commands share: the format of the CSVs that they read, and the file that they write."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxcal.cli import numerals
from jaxcal.cli.text import Format


def told(about: str, default: str) -> Any:
    """An option whose default is described in words."""
    return typer.Option(help=about, show_default=default)


_RECOGNIZED = "recognized"
Out = Annotated[Path | None, told("CSV or Parquet.", "FILE with .calibrated in its name")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Separator = Annotated[str | None, told("What separates the fields of a CSV, such as ';' or tab.", _RECOGNIZED)]
Decimal = Annotated[str | None, told("The decimal mark of a CSV, '.' or ','.", _RECOGNIZED)]
Thousands = Annotated[str | None, told("What separates thousands in a CSV, such as ',' in 1,234.50.", "nothing")]
Encoding = Annotated[str | None, told("The encoding of a CSV, by its name in Python.", "utf-8")]
# Other ways to write these characters.
_ALIKE = {"tab": "\t", "\\t": "\t", "\u00a0": " ", "\u202f": " ", "\u2019": "'"}


def csv_format(separator: str | None, decimal: str | None, thousands: str | None, encoding: str | None) -> Format:
    """The format that the options name.

    Raises:
        ValueError: if an option has an impossible value.
    """
    separator, thousands = (value and _ALIKE.get(value, value) for value in (separator, thousands))
    if separator is not None and (len(separator) != 1 or not separator.isascii() or separator.isalnum()):
        raise ValueError(f"--separator must be one character, such as ';', or tab; got {separator!r}.")
    if separator in ('"', "\n", "\r"):
        raise ValueError(f"--separator cannot be a quote or a line end; got {separator!r}.")
    if decimal not in (None, *numerals.DECIMALS):
        raise ValueError(f"--decimal must be '.' or ','; got {decimal!r}.")
    if thousands not in (None, *numerals.THOUSANDS):
        allowed = ", ".join(map(repr, numerals.THOUSANDS))
        raise ValueError(f"--thousands must be one of {allowed}; got {thousands!r}.")
    if thousands is not None and thousands == decimal:
        raise ValueError(f"--decimal and --thousands must be different; got {decimal!r} for both.")
    return Format(separator, decimal, thousands, encoding)
