"""The output of the commands: results on stdout; progress, warnings and errors on stderr, one line each."""

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

# Seconds between two lines about running work, if there is no terminal for a bar.
_SECONDS = 10.0


class Commands(TyperGroup):
    """Commands that report an error in the input in one line on stderr, with exit code 2, and a warning in one line."""

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
    """Print a line on stderr."""
    _say_on_stderr(f"{kind}: {' '.join(str(message).split())}")


def say(text: str) -> None:
    """Print a text on stdout."""
    _console().print(text, markup=False)


def _say_on_stderr(line: str) -> None:
    try:
        typer.echo(line, err=True)
    except BrokenPipeError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Send a stream without a reader to the null device, so that the work continues and its files are written.

    A reader such as `head` may end before the command.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say_columns(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of texts in columns. Long lines are not wrapped, so that they can be copied."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *texts, last in rows:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        say("  ".join(("", *padded, last)))


def print_table(head: list[str], rows: Iterable[tuple[str, ...]], caption: str) -> None:
    """Print a table whose first column is text, and whose other columns are numbers."""
    table = Table(head[0], caption=caption, caption_justify="left")
    for name in head[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_scores(forecasts: list[str], scores: list[tuple[str, ...]], rows: str) -> None:
    """Print the table of `rows_of_scores`, with a description of the rows."""
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
        if isinstance(forecast, jc.Point):  # a point has no interval
            shown[-2][k] = shown[-1][k] = "none"
    return [(label, *values, wanted) for (label, *_, wanted), values in zip(rows, shown, strict=True)]


def about_scores(rows: str) -> str:
    """The text below a table of scores of these rows."""
    return (
        f"Measured on {rows}. ECE and coverage of calibrated forecasts of as many rows "
        "lie where the last column says, in 19 of 20 cases."
    )


def number(value: float) -> str:
    """A number with four digits."""
    return f"{value:.4g}"


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show the progress of work by a bar on a terminal, else by a line every few seconds; then say how long it took."""
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
            # Several pieces of work can follow one another, and the last one counts. A bar that was full once shows no
            # remaining time.
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
    """Print a line every few seconds."""
    while not done.wait(_SECONDS):
        reached = f", {told[0]}" if told else ""
        _say_on_stderr(f"{label}: {time.perf_counter() - start:.0f} s so far{reached}")


class _Console(Console):
    """A console that works on after its reader has ended."""

    def on_broken_pipe(self) -> None:
        """Continue without a reader, where rich would exit."""
        _drop(sys.stdout)


def _console() -> Console:
    return _Console(highlight=False, soft_wrap=True)
