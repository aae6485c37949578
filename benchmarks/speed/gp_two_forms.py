"""Does a fit find the same optimum on the host and inside of a caller's `jit`?: `gp_two_forms.py`.

The fits are those of `gp_optima.py`, whose data it shares (`--runs`): the residuals of the paper's network on at most
500 training rows, by `rio.fit`, exactly and with one lengthscale for all inputs. Each is fitted in 64 and in 32 bits,
both forms in one precision; told is by how many nats their evidence differs.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from _common import DATASETS, provenance, tell
from gp_optima import FIRST_SPLIT, problem, records

import jaxcal as jc

# What both forms are asked for: nats, and in which fraction of the fits.
ASKED = {64: (0.01, 1.0), 32: (0.5, 0.95)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--runs", type=Path, required=True, help="a folder for data and for fits that are done")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for name in arguments.datasets.split(","):
        for bits in ASKED:
            command = [sys.executable, __file__, "--work", str(bits), "--datasets", name]
            for option in ("splits", "rows", "runs"):
                command += [f"--{option}", str(getattr(arguments, option))]
            subprocess.run(command, env={**os.environ, "JAX_ENABLE_X64": str(int(bits == 64))}, check=True)
    tell(report(arguments), arguments.out)


def path_of(arguments: argparse.Namespace, name: str, bits: int) -> Path:
    return arguments.runs / f"{name}.forms{bits}.jsonl"


def work(arguments: argparse.Namespace) -> None:
    """The splits of one data set that are not done, in the precision of this process."""
    warnings.simplefilter("ignore")  # outliers are another matter
    name, path = arguments.datasets, path_of(arguments, arguments.datasets, arguments.work)
    done = {record["seed"] for record in records(path)}
    exactly = {"inference": jc.gp.Exact(ard=False), "throw": False}
    fit = lambda x, mean, y: jc.rio.fit(x, jc.Point(mean), y, **exactly).evidence
    inside = jax.jit(fit)
    for seed in range(FIRST_SPLIT, FIRST_SPLIT + arguments.splits):
        if seed in done:
            continue
        (x, base, y), _ = problem(name, seed, arguments)
        rows = x, np.asarray(base.mean), y
        record = {"dataset": name, "seed": seed, "host": float(fit(*rows)), "jit": float(inside(*rows))}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """In how many fits both forms agree, and in which they do not."""
    yield provenance()
    for bits, (nats, fraction) in ASKED.items():
        names = arguments.datasets.split(",")
        found = [record for name in names for record in records(path_of(arguments, name, bits))]
        apart = {(one["dataset"], one["seed"]): one["host"] - one["jit"] for one in found}
        others = {key: gap for key, gap in apart.items() if not abs(gap) <= nats}
        share = 1 - len(others) / len(apart)
        reached = "reached" if share >= fraction else "not reached"
        yield f"\n{bits} bits: {len(apart)} fits of {len(names)} data sets"
        yield f"within {nats:g} nats in {100 * share:.1f} % (asked for: {100 * fraction:g} %; {reached})"
        yield f"the host's is higher by more in {sum(gap > nats for gap in others.values())} fits, lower in " + (
            f"{sum(gap < -nats for gap in others.values())}; not finite in either or both in "
            f"{sum(not np.isfinite(gap) for gap in others.values())}"
        )
        yield from (f"  {name} {seed}: {gap:+.2f}" for (name, seed), gap in others.items())


if __name__ == "__main__":
    main()
