"""What a sweep costs beside its jobs: `python benchmarks/speed/sweep.py`.

First, milliseconds of a job that does nothing, from one to the next, in one process that is warm: each finished job is
on disk before it counts. The median of three sweeps of 200 jobs, and the processor time of the process that hands them
out.

Second, seconds from the call of `sweep.run` until new processes have done their first jobs, one each. A job that does
nothing takes the start of a process, which imports jaxcal. The other job fits RIO twice, with its default options, on
246 rows of 6 columns; the second fit, which compiles nothing, is subtracted. Cold: the cache of programs is an empty
folder. Warm: it is as the first sweep has left it. The median of three warm sweeps. The processor time is that of the
processes, from their start to their end, and of their parent.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _common import provenance, tell, verdict
from joblib.externals.loky import get_reusable_executor

from jaxcal import sweep

JOBS, REPEATS = 200, 3
# What was asked for: milliseconds and seconds.
OVERHEAD, START = 15, 2


def nothing(seed: int) -> list[dict]:
    return []


def fits(seed: int) -> list[dict]:
    """The seconds of the second of two fits."""
    import jax
    import numpy as np

    import jaxcal as jc

    rng = np.random.default_rng(seed)
    x = rng.normal(size=(246, 6))
    mean = np.sin(x[:, 0])
    y = mean + 0.3 * x[:, 1] ** 2 + 0.1 * rng.normal(size=246)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(jc.rio.fit(x, jc.Point(mean), y))
        seconds = time.perf_counter() - began
    return [{"seconds": seconds}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(), arguments.out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("joblib")
    loky = get_reusable_executor(max_workers=1)
    yield f"\n{'a job that does nothing':40}{'ms':>8}{'processor ms':>14}"
    for name, options, asked in (
        ("threads", {"executor": ThreadPoolExecutor(1)}, False),
        ("loky", {"executor": loky}, True),
        ("processes of the sweep", {"workers": 1}, True),
    ):
        each, processor = map(statistics.median, zip(*(overhead(**options) for _ in range(REPEATS)), strict=True))
        asked_for = f"   {OVERHEAD} ms: {verdict(each < OVERHEAD)}" if asked else ""
        yield f"{name:40}{each:8.2f}{processor:14.2f}{asked_for}"
    loky.shutdown()
    yield f"\n{'first jobs of new processes':40}{'s':>8}{'processor s':>14}"
    cores = len(os.sched_getaffinity(0))
    for task, what in ((nothing, "nothing"), (fits, "a fit of RIO")):
        for workers in dict.fromkeys((1, cores)):
            name = f"{what}, {workers} process{'es' if workers > 1 else ''}"
            with tempfile.TemporaryDirectory() as folder:
                os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
                seconds, processor = start(task, workers)
                if task is fits:
                    yield f"{name + ', cold':40}{seconds:8.2f}{processor:14.2f}"
                runs = [start(task, workers) for _ in range(REPEATS)]
            seconds, processor = map(statistics.median, zip(*runs, strict=True))
            name += ", warm" if task is fits else ""
            yield f"{name:40}{seconds:8.2f}{processor:14.2f}   {START} s: {verdict(seconds < START)}"


def overhead(**options: object) -> tuple[float, float]:
    """Milliseconds from a job to the next, after the first one, and of the processor in this process."""
    finished = []
    sweep_of(nothing, JOBS, lambda *_: finished.append((time.perf_counter(), time.process_time())), **options)
    first, last = finished[1], finished[-1]
    each = [1000 * (after - before) / (JOBS - 1) for before, after in zip(first, last, strict=True)]
    return each[0], each[1]


def start(task: Callable, workers: int) -> tuple[float, float]:
    """Seconds until all processes have done a job, less those of its second fit; and of the processor."""
    before, began = processor_seconds(), time.perf_counter()
    finished = []
    records = sweep_of(task, workers, lambda *_: finished.append(time.perf_counter()), workers=workers)
    second_fit = max((record["seconds"] for record in records), default=0.0)
    return finished[-1] - began - second_fit, processor_seconds() - before


def processor_seconds() -> float:
    """Of this process and of those of its children that have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def sweep_of(task: Callable, jobs: int, tell: Callable, **options: object) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        return sweep.run(task, [{"seed": seed} for seed in range(jobs)], path, on_progress=tell, **options)


if __name__ == "__main__":
    main()
