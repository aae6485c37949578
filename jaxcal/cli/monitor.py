"""`jaxcal monitor`: a test whether the intervals of a file still cover while the file grows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import jaxcal as jc
from jaxcal.cli import console, words
from jaxcal.cli.columns import Roles, TableRows
from jaxcal.cli.files import FileTable
from jaxcal.cli.options import Decimal, Encoding, Separator, Thousands, csv_format, told

if TYPE_CHECKING:
    from jaxcal.online import ErrorCheck


def monitor(
    file: Annotated[Path, typer.Argument(help="CSV or Parquet, one row a prediction.")],
    target: Annotated[str, typer.Option(help="Column of the true values; empty where they are not known yet.")],
    prediction: Annotated[str, typer.Option(help="Column of the model's predictions.")],
    std: Annotated[str | None, typer.Option(help="Column of its standard deviations, if it has any.")] = None,
    time: Annotated[
        str | None, told("Column of times, numbers or dates such as 2026-11-30: the order of the rows.", "that of FILE")
    ] = None,
    calibration_rows: Annotated[int, typer.Option(help="How many of the first rows calibrate the intervals.")] = 100,
    confidence_level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.9,
    significance: Annotated[float, typer.Option(help="Probability of a false alarm.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the order of equal errors in the test.")] = 0,
    separator: Separator = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
) -> None:
    """Measure how often intervals cover while FILE grows, and test whether their guarantee is still true.

    The first rows, in the order of time, calibrate two intervals of the rows after them. One is fixed, by split
    conformal prediction; the other adapts after every row (adaptive conformal inference). A conformal test martingale
    tests whether the errors change. The command may be repeated whenever rows were added. As long as targets become
    known in the order of the rows, that makes no false alarm more likely.
    """
    import jax

    from jaxcal import _checks

    _checks.check_at_least("--calibration-rows", calibration_rows, 1)
    for name, value in (("--confidence-level", confidence_level), ("--significance", significance)):
        _checks.check_fraction(name, value)
    table = FileTable.read(file, csv_format(separator, decimal, thousands, encoding))
    roles = Roles(target, prediction, std)
    roles.check(table)
    y = table.numbers(target, may_be_missing=True)
    order, times = _in_order(table, time)
    known = order[np.isfinite(y[order])]
    if len(known) <= calibration_rows:
        raise ValueError(
            f"{file} has {len(known)} rows whose target is known; more than the {calibration_rows} calibration rows "
            "are needed: give fewer by --calibration-rows."
        )
    rows = TableRows.read(table, roles, with_targets=False)
    first, new = known[:calibration_rows], known[calibration_rows:]
    base, new_base = rows.take(first).base, rows.take(new).base
    with words.of_rows(table, first):
        fixed = jc.conformal.fit(None, base, y[first])
        intervals = {"fixed": fixed(None, new_base).interval(confidence_level)}
        state = jc.online.adaptive.init(base, y[first], confidence_level=confidence_level)
        state, intervals["adaptive"] = jc.online.run(state, new_base, y[new])
        key = jax.random.key(seed)
        check = jc.online.check_errors(base, y[first], new_base, y[new], key=key, significance=significance)
    console.say(str(fixed.guarantee(confidence_level)))
    labels = range(1, len(new) + 1) if times is None else [times[row] for row in new]
    _print_coverage(y[new], intervals, check, confidence_level, labels)
    alarm = check.first_alarm
    when = "" if times is None or alarm is None else f" New row {alarm + 1} is of {labels[alarm]}."
    following = _next_interval(float(state.threshold()), confidence_level, std, len(y) - len(known))
    console.say(f"{check}{when}\n\n{following}")


def _in_order(table: FileTable, time: str | None) -> tuple[np.ndarray, list[str] | None]:
    """The numbers of the rows in the order of time, and the time of every row in words; None without times."""
    if time is None:
        return np.arange(len(table)), None
    order, times = table.times(time)
    if (np.diff(order) < 0).any():
        console.complain("Note", f"the rows of {table.file} are not in the order of {time!r}, and are sorted by it.")
    return order, times


def _print_coverage(
    y: np.ndarray, intervals: dict[str, tuple], check: "ErrorCheck", confidence_level: float, labels: Sequence[Any]
) -> None:
    """A table of coverages, part after part of the rows, beside the largest value of the martingale so far."""
    from jaxcal.online.exchangeability import exponential

    low, high = (f"{100 * end:.1f} %" for end in jc.guarantee.calibrated_band(confidence_level, len(y)))
    caption = (
        f"New rows with a known target, inside their {100 * confidence_level:g} % interval. Exact intervals cover "
        f"between {low} and {high} of {len(y)} rows (in 19 of 20 cases)."
    )
    covered = {name: (np.asarray(lower) <= y) & (y <= np.asarray(upper)) for name, (lower, upper) in intervals.items()}
    largest = np.maximum.accumulate(np.maximum(check.log_martingale, 0))
    whole = np.arange(len(y))
    rows = []
    for part in (*np.array_split(whole, min(10, len(y))), whole):
        label = "all" if part is whole else f"{labels[part[0]]} to {labels[part[-1]]}"
        fractions = (f"{100 * inside[part].mean():.1f} %" for inside in covered.values())
        rows.append((label, *fractions, exponential(float(largest[part[-1]]))))
    console.print_table(["new rows", *intervals, "martingale, largest"], rows, caption)


def _next_interval(threshold: float, confidence_level: float, std: str | None, waiting: int) -> str:
    """The adaptive interval of the next rows, in plain words."""
    level = f"{100 * confidence_level:g} %"
    rows = f"{waiting} rows whose target is not known yet" if waiting else "next row"
    if not np.isfinite(threshold) or threshold < 0:
        return f"The adaptive {level} interval of the {rows} is {'infinite' if threshold > 0 else 'empty'}."
    times = "" if std is None else f" times {std}"
    return (
        f"The adaptive {level} interval of the {rows}: the prediction plus or minus {console.number(threshold)}{times}."
    )
