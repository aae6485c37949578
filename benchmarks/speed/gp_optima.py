"""Does a Gaussian process end at the best optimum, and at what price?: `gp_optima.py --before DIR`.

For every data set and split the residuals of the paper's network on at most 500 training rows are fitted by `rio.fit`,
exactly and with one lengthscale for all inputs, from this checkout and from an older one (`--before`, a checkout of the
commit to compare with), each data set in one process a side, on the same core, one after the other. What the optimum is
16 initial values tell, drawn log-uniformly (`RANGES`), each climbed to 1e-4 nats: the best sane one, or what either
side found if that is better. Every fit more than 3 nats short is listed. The CRPS is the mean of at most as many test
rows, over the standard deviation of the training targets. Seconds are processor time of the second call, compilation
apart. The splits are none of those by which the initial values were chosen. Splits that are done are kept in `--runs`;
a script that was stopped goes on there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from operator import itemgetter
from pathlib import Path

import jax
import numpy as np
from _common import DATASETS, inferred_by, provenance, tell

import jaxcal as jc

# Initial lengthscales as multiples of the distances between rows, variances and noise as fractions of the target's.
RANGES = {"lengthscale": (0.03, 10.0), "variance": (0.01, 10.0), "noise": (1e-3, 1.0)}
NUM_STARTS, TOLERANCE = 16, 1e-4
# A fit this far below the best optimum is short, or far short.
SHORT, FAR = 0.5, 3.0
SIDES = ("after", "before")
# The splits before this one served to choose the initial values.
FIRST_SPLIT = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--datasets", default=",".join(DATASETS), help="default: all")
    parser.add_argument("--splits", type=int, default=20, help="random splits of every data set")
    parser.add_argument("--rows", type=int, default=500, help="training rows at most")
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/runs/gp_optima"), help="folder of what is done")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is done")
    parser.add_argument("--out", type=Path, help="file that gets a copy of what is printed")
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        for name in arguments.datasets.split(","):
            for side in SIDES:
                run(arguments, name, side)
    tell(report(arguments), arguments.out)


def run(arguments: argparse.Namespace, name: str, side: str) -> None:
    """The splits of a data set that are not done, in a process of their own."""
    here = Path(__file__).resolve().parents[2]
    code = here if side == "after" else arguments.before.resolve()
    command = [sys.executable, __file__, "--work", side, "--datasets", name]
    for option in ("splits", "rows", "runs"):
        command += [f"--{option}", str(getattr(arguments, option))]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(code)}, check=True)


def work(arguments: argparse.Namespace) -> None:
    """The splits of one data set, fitted by the code that is on the path."""
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # outliers are another matter
    name, path = arguments.datasets, arguments.runs / f"{arguments.datasets}.{arguments.work}.jsonl"
    done = {record["seed"] for record in records(path)}
    for seed in range(FIRST_SPLIT, FIRST_SPLIT + arguments.splits):
        if seed in done:
            continue
        record = {"dataset": name, "seed": seed, **fitted(problem(name, seed, arguments), arguments.work)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def problem(name: str, seed: int, arguments: argparse.Namespace):
    """Inputs, the network's predictions and targets of training and test rows; both sides have the same network."""
    path = arguments.runs / f"{name}_{seed}.npz"
    if not path.exists():
        data, arrays = jc.datasets.load(name), {}
        parts = [part[: arguments.rows] for part in jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)]
        network = jc.mlp.fit(data.x[parts[0]], data.y[parts[0]], key=jax.random.key(seed), preset="paper")
        for k, part in enumerate(parts):
            x, y = data.x[part], data.y[part]
            arrays |= {f"x{k}": x, f"base{k}": np.asarray(network(x).mean), f"y{k}": y}
        np.savez(path, **arrays)
    file = np.load(path)
    return [(file[f"x{k}"], jc.Point(file[f"base{k}"]), file[f"y{k}"]) for k in range(2)]


def fitted(parts, side: str) -> dict:
    """Evidence and seconds of a fit, its CRPS on test rows, and the evidence of the reference."""
    rows, (x_test, base_test, y_test) = parts
    call = lambda: jax.block_until_ready(jc.rio.fit(*rows, **inferred_by("Exact", ard=False), throw=False))
    call()
    began = time.process_time()
    rio = call()
    seconds = time.process_time() - began
    crps = float(jc.metrics.crps(y_test, rio(x_test, base_test))) / float(np.std(rows[2]))
    record = {"evidence": float(rio.evidence), "result": int(rio.result), "seconds": seconds, "crps": crps}
    return record | ({"reference": reference(*rows)} if side == "after" else {})


def reference(x, base, y) -> float:
    """The greatest sane evidence that is climbed to from the random initial values."""
    # The older checkout has no such modules.
    from jaxcal._numpy import by_numpy
    from jaxcal.calibrators.rio import IOKernel, Points
    from jaxcal.frames.preprocessing import Standardizer
    from jaxcal.gp.kernels import SquaredExponential, spacing
    from jaxcal.gp.model import Data, Model, exact_jitters
    from jaxcal.gp.process import first_fit

    exactly = jc.gp.Exact(ard=False, tolerance=TOLERANCE, max_iterations=200)

    def climbed(*columns):
        x, mean, residuals = (Standardizer.of(a)(a) for a in columns)
        data = Data(Points(x, mean[:, None]), residuals)
        spacings = [np.log(spacing(part)) for part in jax.tree.leaves(data.points)]
        rng = np.random.default_rng(0)
        draw = lambda name: rng.uniform(*np.log(RANGES[name]), size=NUM_STARTS)
        parts = [SquaredExponential(draw("variance"), draw("lengthscale") + spacing) for spacing in spacings]
        initial = Model(IOKernel(*parts), draw("noise"))
        starts = [jax.tree.map(itemgetter(slice(k, k + 1)), initial) for k in range(NUM_STARTS)]
        fit = lambda start, jitter: jc.gp.GaussianNoise().fit(exactly, lambda *_: start, data, jitter)
        jitters = exact_jitters(residuals.dtype)
        return [first_fit(fit(start, jitter) for jitter in jitters) for start in starts]

    found = by_numpy(climbed, np.asarray(x), np.asarray(base.mean), np.asarray(y - base.mean))
    sane = [process for process in found if process.result != jc.optimize.Result.NOT_FINITE]
    return max((float(process.evidence) for process in sane), default=-np.inf)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(arguments: argparse.Namespace):
    """How many fits of either side are short, which, and how long they take."""
    found = {
        side: {
            (record["dataset"], record["seed"]): record
            for name in arguments.datasets.split(",")
            for record in records(arguments.runs / f"{name}.{side}.jsonl")
        }
        for side in SIDES
    }
    both = sorted(found["after"].keys() & found["before"].keys())
    best = {key: max(found["after"][key]["reference"], *(value(found[side][key]) for side in SIDES)) for key in both}
    short = {side: {key: best[key] - value(found[side][key]) for key in both} for side in SIDES}
    yield provenance()
    yield f"\n{len(both)} fits of {len({name for name, _ in both})} data sets; nats below the best optimum known."
    yield f"{'':24}{'after':>12}{'before':>12}"
    for name, least in (("short", SHORT), ("far short", FAR)):
        cells = [100 * sum(not nats <= least for nats in short[side].values()) / len(both) for side in SIDES]
        yield f"{f'{name}: more than {least:g}':24}" + "".join(f"{cell:10.1f} %" for cell in cells)
    for name, of in (("median", statistics.median), ("mean", statistics.fmean)):
        cells = [of(found[side][key]["seconds"] for key in both) for side in SIDES]
        yield (
            f"{name + ' seconds':24}"
            + "".join(f"{cell:12.3f}" for cell in cells)
            + f"   ratio {cells[0] / cells[1]:.2f}"
        )
    known = [key for key in both if all(np.isfinite(found[side][key]["crps"]) for side in SIDES)]
    cells = [statistics.fmean(found[side][key]["crps"] for key in known) for side in SIDES]
    better = sum(found["after"][key]["crps"] < found["before"][key]["crps"] for key in known)
    yield f"{'mean CRPS':24}" + "".join(f"{cell:12.4f}" for cell in cells) + f"   better in {better} of {len(known)}"
    missed = sum(best[key] - found["after"][key]["reference"] > SHORT for key in both)
    yield f"The reference alone is short in {missed} of them."
    yield f"\n{'data set':20}{'fits':>5}{'short':>12}{'worst':>16}{'seconds':>16}{'ratio':>8}"
    yield f"{'':20}{'':5}{'after before':>14}{'after before':>18}{'after before':>16}"
    for name in sorted({name for name, _ in both}):
        keys = [key for key in both if key[0] == name]
        shorts = [sum(not short[side][key] <= SHORT for key in keys) for side in SIDES]
        worst = [max(short[side][key] for key in keys) for side in SIDES]
        seconds = [statistics.median(found[side][key]["seconds"] for key in keys) for side in SIDES]
        cells = f"{shorts[0]:7}{shorts[1]:7}{worst[0]:10.2f}{worst[1]:8.2f}{seconds[0]:9.3f}{seconds[1]:7.3f}"
        yield f"{name:20}{len(keys):5}{cells}{seconds[0] / seconds[1]:8.2f}"
    for side in SIDES:
        far = [
            f"{name} {seed} ({short[side][name, seed]:.1f})"
            for name, seed in both
            if not short[side][name, seed] <= FAR
        ]
        yield f"\nMore than {FAR:g} nats short, {side}: {', '.join(far) or 'none'}"


def value(record: dict) -> float:
    """The evidence of a fit that did not fail and that 500 rows and a noise variance of 1e-6 allow."""
    sane = record["result"] != 2 and record["evidence"] < 250 * np.log(1e6 / (2 * np.pi))
    return record["evidence"] if sane else -np.inf


if __name__ == "__main__":
    main()
