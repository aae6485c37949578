"""What the scripts of the papers' tables share: how their jobs are run, timed and stamped."""

import datetime
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import jaxcal as jc
from benchmarks.speed._common import processor
from jaxcal import sweep

# What this process has compiled.
_compiled: set[tuple] = set()


def run(task: Callable[..., list[dict]], jobs: Sequence[dict], path: Path, workers: int | None) -> None:
    """All jobs that are not finished yet, with a bar of progress."""
    stamp = {"jaxcal": jc.__version__, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("")
        tell = lambda finished, total: progress.update(bar, completed=finished, total=total)
        sweep.run(task, jobs, path, workers=workers, stamp=stamp, on_progress=tell)


def timed(kind: tuple, call: Callable):
    """What the call returns, and its processor seconds; the first of a kind is made once before, since it compiles."""
    if kind not in _compiled:
        jax.block_until_ready(call())
        _compiled.add(kind)
    began = time.process_time()
    result = jax.block_until_ready(call())
    return result, time.process_time() - began


@cache
def machine() -> str:
    """What the numbers are measured on."""
    device = jax.devices()[0]
    return processor() if device.platform == "cpu" else device.device_kind
