"""What the commands say: results on stdout; progress, warnings and mistakes on stderr, a line each."""

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

import jaxcal as jc

if TYPE_CHECKING:
    from jaxcal.distributions import Distribution
    from jaxcal.progress import Progress as Reached

# Seconds between two lines about work that goes on, where there is no terminal to draw a bar on.
_SECONDS = 10.0


class Commands(TyperGroup):
    """Commands that answer a mistake in the input with one line on stderr and exit code 2, and warn in one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with _warnings_in_one_line():
                return super().invoke(ctx)
        except (ValueError, FloatingPointError, TimeoutError) as error:
            complain("Error", error)
            raise typer.Exit(2) from error


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Inside, a warning is one line on stderr, and comes once."""
    told = set()

    def show(message: object, *_: object, **__: object) -> None:
        if str(message) not in told:
            told.add(str(message))
            complain("Warning", message)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def complain(kind: str, message: object) -> None:
    """A line on stderr."""
    _say_on_stderr(f"{kind}: {' '.join(str(message).split())}")


def say(text: str) -> None:
    """A text on stdout."""
    _console().print(text, markup=False)


def _say_on_stderr(line: str) -> None:
    try:
        typer.echo(line, err=True)
    except BrokenPipeError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Send a stream nowhere, whose reader, such as `head`, is gone: the work goes on, and its files are written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say_columns(rows: Iterable[tuple[str, ...]]) -> None:
    """Rows of texts in columns; a long line is left to the terminal, so that it can be copied."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *texts, last in rows:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        say("  ".join(("", *padded, last)))


def print_table(head: list[str], rows: Iterable[tuple[str, ...]], caption: str) -> None:
    """A table whose first column is text, the others numbers."""
    table = Table(head[0], caption=caption, caption_justify="left")
    for name in head[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_scores(forecasts: list[str], scores: list[tuple[str, ...]], rows: str) -> None:
    """A table of what `rows_of_scores` gives, and of which rows it is."""
    print_table(["", *forecasts, "calibrated"], scores, about_scores(rows))


def rows_of_scores(y: np.ndarray, forecasts: "dict[str, Distribution]") -> list[tuple[str, ...]]:
    """A row for each score: its name, its value for every forecast, and what calibrated forecasts have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a forecast does not reach: the table shows it
        scores = [jc.metrics.evaluate(y, forecast) for forecast in forecasts.values()]
    low, high = (f"{100 * float(end):.1f}" for end in jc.guarantee.calibrated_band(0.9, len(y)))
    percent = lambda value: f"{value:.1f} %"
    rows = (
        ("RMSE", "rmse", number, "low"),
        ("NLPD", "nlpd", lambda value: number(value) if np.isfinite(value) else "none", "low"),
        ("CRPS", "crps", number, "low"),
        ("ECE", "ece", percent, f"up to {jc.metrics.calibrated_ece(len(y)):.1f} %"),
        ("90 % coverage", "coverage_90", lambda value: percent(100 * value), f"{low} to {high} %"),
        ("90 % width", "width_90", number, "low"),
    )
    shown = [[show(float(each[name])) for each in scores] for _, name, show, _ in rows]
    for k, forecast in enumerate(forecasts.values()):
        if isinstance(forecast, jc.Point):  # it has no interval
            shown[-2][k] = shown[-1][k] = "none"
    return [(label, *values, wanted) for (label, *_, wanted), values in zip(rows, shown, strict=True)]


def about_scores(rows: str) -> str:
    """What stands below a table of scores of these rows."""
    return (
        f"Measured on {rows}. ECE and coverage of calibrated forecasts of as many rows "
        "lie where the last column says, in 19 of 20 cases."
    )


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show how far work is, by a bar on a terminal, else by a line every few seconds; in the end, how long it took."""
    start, console = time.perf_counter(), _console()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    told: list[Reached] = []
    done = threading.Event()
    if not console.is_terminal:
        threading.Thread(target=_say_how_far, args=(label, start, told, done), daemon=True).start()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def show(reached: "Reached") -> None:
            told[:] = [reached]
            # Of several works one after another the last one counts. A bar that was full once shows no time left.
            if bar.tasks[0].finished:
                bar.reset(task)
            bar.update(task, total=1.0 if reached.fraction is not None else None, completed=reached.fraction or 0.0)

        try:
            with jc.progress.to(show):
                yield
        finally:
            done.set()
    say(f"{label}: {time.perf_counter() - start:.1f} s.")


def _say_how_far(label: str, start: float, told: "list[Reached]", done: threading.Event) -> None:
    """A line every few seconds."""
    while not done.wait(_SECONDS):
        reached = f", {told[0]}" if told else ""
        _say_on_stderr(f"{label}: {time.perf_counter() - start:.0f} s so far{reached}")


class _Console(Console):
    """A console that outlives its reader."""

    def on_broken_pipe(self) -> None:
        """Go on without a reader; rich would exit."""
        _drop(sys.stdout)


def _console() -> Console:
    return _Console(highlight=False, soft_wrap=True)
