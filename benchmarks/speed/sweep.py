"""What a sweep costs beside its jobs: `python benchmarks/speed/sweep.py`.

First, milliseconds of a job that does nothing, from one to the next, in one process that is warm: each finished job is
on disk before it counts. The median of three sweeps of 200 jobs, and the processor time of the process that hands them
out.

Second, new processes: seconds from the call of `sweep.run` until they have done as many jobs as they are, and processor
seconds of one process until its job is done, the larger ones of two. The two agree where each process has a core to
itself; a busy machine delays the former, so the latter are judged. A job that does nothing takes the start of a
process, which imports jaxcal. The other job fits RIO with its default options on 246 rows of 6 columns. Cold: the cache
of programs is an empty folder. Warm: it is as the first sweep has left it. The median of three warm sweeps.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _common import provenance, tell, verdict

from jaxcal import progress, sweep

JOBS, REPEATS = 200, 3
# What was asked for: milliseconds and seconds.
OVERHEAD, START = 15, 2


def nothing(seed: int) -> list[dict]:
    return [{"processor": time.process_time()}]


def fit(seed: int) -> list[dict]:
    import jax
    import numpy as np

    import jaxcal as jc

    rng = np.random.default_rng(seed)
    x = rng.normal(size=(246, 6))
    mean = np.sin(x[:, 0])
    y = mean + 0.3 * x[:, 1] ** 2 + 0.1 * rng.normal(size=246)
    jax.block_until_ready(jc.rio.fit(x, jc.Point(mean), y))
    return nothing(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(), arguments.out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    from joblib.externals.loky import get_reusable_executor  # not for the processes, which import this file

    yield f"{provenance('joblib')}; processes that wanted a core before: {os.getloadavg()[0]:.1f}"
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
    for task, what in ((nothing, "nothing"), (fit, "a fit of RIO")):
        for workers in dict.fromkeys((1, cores)):
            name = f"{what}, {workers} process{'es' if workers > 1 else ''}"
            with tempfile.TemporaryDirectory() as folder:
                os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
                seconds, processor = start(task, workers)
                if task is fit:
                    yield f"{name + ', cold':40}{seconds:8.2f}{processor:14.2f}"
                    name += ", warm"
                runs = [start(task, workers) for _ in range(REPEATS)]
            seconds, processor = map(statistics.median, zip(*runs, strict=True))
            yield f"{name:40}{seconds:8.2f}{processor:14.2f}   {START} s: {verdict(processor < START)}"


def overhead(**options: object) -> tuple[float, float]:
    """Milliseconds from a job to the next, after the first one, and of the processor in this process."""
    finished = []
    sweep_of(nothing, JOBS, lambda: finished.append((time.perf_counter(), time.process_time())), **options)
    first, last = finished[1], finished[-1]
    each = [1000 * (after - before) / (JOBS - 1) for before, after in zip(first, last, strict=True)]
    return each[0], each[1]


def start(task: Callable, workers: int) -> tuple[float, float]:
    """Seconds until each process has done a job, and of the processor in one process."""
    began = time.perf_counter()
    finished = []
    records = sweep_of(task, workers, lambda: finished.append(time.perf_counter()), workers=workers)
    return finished[-1] - began, max(record["processor"] for record in records)


def sweep_of(task: Callable, jobs: int, tell: Callable, **options: object) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.jsonl"
        with progress.to(lambda told: None if told.is_finished else tell()):
            return sweep.run(task, [{"seed": seed} for seed in range(jobs)], path, **options)


if __name__ == "__main__":
    main()
