"""Warnings and mistakes of the library, in words of the command line: columns, rows of the file, and its options.

The library names its arguments and the rows of arrays, and advises what to write in Python.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from jaxcal.cli.files import FileTable

_LARGER_GROUPS = "Fit to more rows of small groups, by --calibration-fraction, or put small groups together."
_NARROWER = "It is finite with more calibration rows, or at levels nearer to 0.5."
_CORRECT = "Correct them, or omit --std."
# A message of the library, and the words in its place; the number `row` becomes a row of the file.
_RULES = (
    # Of these the fit to all rows says the same, with a number that is a row's.
    (r"^in (?:a|the) fit .* numbered anew: (row \d+ lies|min_leaf).*", ""),
    (r"(in (?:a|the) fit .*), (?:whose rows|which) are numbered anew:", "{0}:"),
    (r"\brow (?P<row>\d+) lies (.*)\. noise=.*", "{row} lies {1}."),
    (
        r"min_leaf='auto' splits (.*)\. Give a min_leaf.*",
        "usnrt splits {0}. --models variance_network fits the same networks without a tree.",
    ),
    (r"Drop them; or groups=.*", "Drop them."),
    (r" groups=.* together\.", ""),
    (
        r"\(y - base\.mean\) / base\.std is infinite in (\d+) of .* index (?P<row>\d+), where base.std is 0"
        r"(\. Intervals.*, too)?: .*",
        "--std is 0 and the prediction wrong in {0} rows, the first of them {row}{2}. " + _CORRECT,
    ),
    (
        r"base\.std must be (.*); (\d+) values are not, the first at index (?P<row>\d+) \((\S+)\).*",
        "--std must be {0}; {1} values are not, the first, {3}, in {row}. " + _CORRECT,
    ),
    (
        r"base is a Point, whose.*",
        "--method neural-quantiles needs a std. --std names it, or --method accrue,neural-quantiles learns it.",
    ),
    (r"Give more rows, or lower confidence_levels\.", "Give more rows."),
    (r"Give other rows, or fewer clusters\.", "Give other rows."),
    (r"Give more rows, or fewer groups\.", "Give more rows, or put small groups together."),
    (r"Give more rows, a lower level, or put it together.*", _LARGER_GROUPS),
    (r"(their groups have too few calibration rows .* are needed\.)", "{0} " + _LARGER_GROUPS),
    (r"(\d+ calibration rows are too few for the level asked for.* infinite\.)", "{0} " + _NARROWER),
    (
        r"by holds the label (.*), which no calibration row has; there are (.*)\.$",
        "the group {0} had no rows in the fit; there are {1}. Fit to rows of it, too, or give it one of these labels.",
    ),
    (
        r"the \d+ training rows of a fold all have the target (.+): give other folds\..*",
        "the target is {0} in all rows that a part of the fit has. Give more rows, or other targets.",
    ),
    (r"\b[xy] has (\d+) rows; at least", "there are {0} rows to fit to; at least"),
    (r"^x has missing values", "{file} has missing values"),
    (r"\bof x holds", "of {file} holds"),
    (r"the residuals y - base\.mean are", "the errors of the predictions are"),
    (r"y equals base\.mean", "the target equals the prediction"),
    (r"y equals the \(shifted\) mean of base", "the target equals the (shifted) prediction"),
    (r"the stds of base are", "the stds are"),
    (r"y is constant", "the target is constant"),
    (r"the time_limit", "the --time-limit"),
    (r"at index (?P<row>\d+)", "in {row}"),
)
# Advice for programs: an argument with a value, or a name with points.
_PYTHON = re.compile(r"\b[a-z_]+=|\bjax(cal)?\.[a-z]")


@contextmanager
def of_rows(table: FileTable, rows: np.ndarray | None = None) -> Iterator[None]:
    """Inside, the library warns and refuses in words of the command line.

    Args:
        table: what is computed with.
        rows: the numbers of its rows that are, in their order; None for all.
    """
    shown = warnings.showwarning

    def show(message: object, *where: object, **more: object) -> None:
        if text := reworded(str(message), table, rows):
            shown(text, *where, **more)  # pyright: ignore[reportArgumentType]

    with warnings.catch_warnings():
        warnings.showwarning = show
        try:
            yield
        except (ValueError, FloatingPointError, TimeoutError) as error:
            raise ValueError(reworded(str(error), table, rows)) from error


def reworded(message: str, table: FileTable, rows: np.ndarray | None = None) -> str:
    """A message of the library in words of the command line; nothing where another one says the same."""
    text = " ".join(message.split())
    for pattern, words in _RULES:
        text = re.sub(pattern, partial(_filled, words, table, rows), text)
    sentences = re.split(r"(?<=[.?!]) ", text)
    return " ".join(filter(lambda sentence: not _PYTHON.search(sentence), sentences)) or text


def _filled(words: str, table: FileTable, rows: np.ndarray | None, match: re.Match[str]) -> str:
    """The words, with what was found and where that is in the file."""
    parts = {name: value or "" for name, value in match.groupdict().items()} | {"file": str(table.file)}
    if "row" in parts:
        number = int(parts["row"])
        parts["row"] = table.row(number if rows is None else int(rows[number]))
    return words.format(*match.groups(default=""), **parts)
