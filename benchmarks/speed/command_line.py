"""How long `jaxcal calibrate` takes for many rows, and how much memory: `python benchmarks/speed/command_line.py`.

A CSV of a million rows: five columns of inputs, one of labels, the target, a prediction and its std. Half of the rows
are fitted on, all are predicted and written, the others are measured. Every method without a network runs once, in a
process of its own; the command line keeps compiled programs on disk, so that what earlier runs compiled is read. Asked
for: 30 s and 2 GB.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from _common import provenance, tell, verdict

METHODS = (
    "crude",
    "split-conformal",
    "isotonic",
    "gaussian-mle",
    "kmeans",
    "conditional-conformal",
    "sharp-gp",
    "rio",
)
ASKED_SECONDS, ASKED_GIGABYTES = 30, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is stopped")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows, arguments.methods.split(","), arguments.limit), arguments.out)


def report(num_rows: int, methods: list[str], limit: float) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("polars")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write(file, num_rows)
        yield f"{num_rows} rows, {file.stat().st_size / 1e6:.0f} MB; asked: {ASKED_SECONDS} s, {ASKED_GIGABYTES} GB"
        yield f"{'method':24}{'clock s':>10}{'processor s':>14}{'memory GB':>12}"
        for method in methods:
            yield line(method, file, limit)


def write(file: Path, num_rows: int) -> None:
    """A table whose noise differs, with predictions that miss a part of the mean, and one std for all."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 5))
    prediction = x[:, 0] + 0.5 * x[:, 1] ** 2
    y = prediction + 0.3 * np.sin(3 * x[:, 3]) + (0.5 + 0.5 * np.abs(x[:, 2])) * rng.normal(size=num_rows)
    columns = {
        **{f"x{i}": x[:, i] for i in range(5)},
        "site": rng.choice(["a", "b", "c"], num_rows),
        "y": y,
        "mu": prediction,
        "sigma": np.full(num_rows, 0.9),
    }
    pl.DataFrame(columns).write_csv(file)


def line(method: str, file: Path, limit: float) -> str:
    """What one method takes, or that it was stopped."""
    roles = ["--target", "y", "--prediction", "mu", "--std", "sigma", "--method", method]
    if method == "sharp-gp":
        roles += ["--training", str(_head(file))]
    out = file.with_name("out.csv")
    command = [sys.executable, "-m", "jaxcal", "calibrate", str(file), *roles, "--out", str(out), "--force"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        if time.perf_counter() - began > limit:
            process.kill()
            os.wait4(process.pid, 0)
            return f"{method:24}stopped after {limit:.0f} s"
        time.sleep(0.05)
    seconds, used = time.perf_counter() - began, ended[2]
    if ended[1]:
        return f"{method:24}failed: {process.stderr.read().strip().splitlines()[-1]}"
    gigabytes = used.ru_maxrss * 1024 / 1e9
    reached = verdict(seconds < ASKED_SECONDS and gigabytes < ASKED_GIGABYTES)
    return f"{method:24}{seconds:10.1f}{used.ru_utime + used.ru_stime:14.1f}{gigabytes:12.2f}  {reached}"


def _head(file: Path) -> Path:
    """The first thousand rows, in a file of their own: those that a model was trained on."""
    head = file.with_name("head.csv")
    pl.read_csv(file, n_rows=1000).write_csv(head)
    return head


if __name__ == "__main__":
    main()
