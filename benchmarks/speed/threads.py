"""What OpenBLAS's own threads cost: `python benchmarks/speed/threads.py`.

JAX on a CPU factorizes by SciPy's OpenBLAS, which starts a thread for every core, whatever NPROC says; while they wait
for each other they keep their cores busy. Seconds of the processor and of the clock of a second `rio.fit`, with these
threads and with OPENBLAS_NUM_THREADS=1, on a quiet machine and beside other processes that keep every core busy. Every
figure comes from a process of its own; the median of the rounds.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from _common import provenance, tell

FIT = """
import resource, time
import jax, numpy as np, jaxcal as jc
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (ROWS, 4))
mean = np.sin(3 * x[:, 0])
y = mean + np.sin(2 * x[:, 1]) + 0.3 * rng.normal(size=ROWS)
fit = lambda: jax.block_until_ready(jc.rio.fit(x, jc.Point(mean), y))
fit()
before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
fit()
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - began)
"""
ROWS = (250, 500, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rounds), arguments.out)


def report(rounds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("scipy")
    yield f"{'':24}{'threads of OpenBLAS':>28}{'one thread':>24}"
    yield f"{'':24}" + f"{'processor s':>14}{'clock s':>12}" * 2
    for name, load in (("quiet", contextlib.nullcontext), ("every core busy", busy)):
        with load():
            for rows in ROWS:
                both = [seconds(rows, rounds, variables) for variables in ({}, {"OPENBLAS_NUM_THREADS": "1"})]
                cells = "".join(f"{processor:14.2f}{clock:12.2f}" for processor, clock in both)
                yield f"{f'{name}, {rows} rows':24}{cells}"


def seconds(rows: int, rounds: int, variables: dict[str, str]) -> list[float]:
    """The medians of the seconds of the processor and of the clock."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("NUM_THREADS")} | variables
    code = FIT.replace("ROWS", str(rows))
    runs = [
        subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split() for _ in range(rounds)
    ]
    return [statistics.median(float(run[i]) for run in runs) for i in range(2)]


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Other processes that keep every core busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()


if __name__ == "__main__":
    main()
