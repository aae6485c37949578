"""Many rows, exactly, through inducing points or by the nearest rows: `python benchmarks/speed/gp_sparse.py`.

For every data set of more than 2000 rows: RIO on the residuals of the paper's network, from at most `--rows` training
rows, in several settings: the paper's, of 50 trained points; greedy points, chosen and then left; points that are
trained from the first rows for 50 steps; the rows nearest to each prediction; exactly from all rows; the default, which
is one of these; and exactly from 1000 rows. `--rows 2000,5000,20000` takes parts of these sizes, and a last table
shows at which size the exact process stops to pay, by seconds and by CRPS, over the data sets of so many rows. An exact
evaluation of n rows holds some matrices of n^2 numbers: 3.2 GB each of 20,000 rows.

Errors are RMSE and CRPS in units of the target's std, NLPD and the coverage of 90 % intervals on at most 5000 other
rows. Seconds are those of fit and prediction without compilation: pin the process to a core that does nothing else.
Fits that are done are kept in `--runs`; a script that was stopped goes on there.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import numpy as np
from _common import provenance, tell
from rio_bounds import split

import jaxcal as jc

DATASETS = (
    "wine_white",
    "power_plant",
    "kin8nm",
    "parkinsons_total",
    "grid_stability",
    "naval_compressor",
    "appliances",
    "election",
    "steel",
    "beijing_pm25",
    "traffic",
    "tetuan",
    "protein",
    "gpu_sgemm",
)
EXACT, FEW = "exact", "1000 rows"
SETTINGS = {
    "paper": {"preset": "paper"},
    "100 greedy": {"inference": jc.gp.Sparse(num_inducing=100)},
    "200 greedy": {"inference": jc.gp.Sparse(num_inducing=200)},
    "400 greedy": {"inference": jc.gp.Sparse(num_inducing=400)},
    "800 greedy": {"inference": jc.gp.Sparse()},
    "200 trained": {"inference": jc.gp.Sparse(num_inducing=200, points="trained", max_iterations=50)},
    "400 trained": {"inference": jc.gp.Sparse(num_inducing=400, points="trained", max_iterations=50)},
    "nearest": {"inference": jc.gp.Nearest()},
    EXACT: {"inference": jc.gp.Exact()},
    "default": {},
    FEW: {"inference": jc.gp.Exact()},
}
NEW = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default=",".join(DATASETS), help="default: all")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="default: all")
    parser.add_argument("--rows", default="5000", help="training rows at most; several sizes with commas between them")
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/runs/gp_sparse"), help="folder of what is done")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is done")
    parser.add_argument("--out", type=Path, help="file that gets a copy of what is printed")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.monitoring.register_event_duration_secs_listener(listen)
    warnings.simplefilter("ignore")  # outliers are another matter
    arguments.runs.mkdir(parents=True, exist_ok=True)
    names, labels = arguments.datasets.split(","), arguments.settings.split(",")
    sizes = [int(size) for size in arguments.rows.split(",")]
    if not arguments.report:
        for size in sizes:
            for name in names:
                run(name, labels, size, arguments.runs)
    tell(report(names, labels, sizes, arguments.runs), arguments.out)


def run(name: str, labels: list[str], size: int, runs: Path) -> None:
    """The settings of one data set that are not done."""
    missing = [label for label in labels if not path(name, label, size, runs).exists()]
    parts = split(name, 0, "network", size) if missing else ()
    train, test = parts[:3], jax.tree.map(lambda a: a[:NEW], parts[3:])
    for label in missing:
        record = fitted(train, test, label)
        path(name, label, size, runs).write_text(json.dumps(record), encoding="utf-8")
        print(name, label, record, flush=True)


def path(name: str, label: str, size: int, runs: Path) -> Path:
    """Where a fit is kept: under the number of rows that there are, if those are fewer."""
    return runs / f"{name}_{min(size, rows_of(name))}_{label.replace(' ', '_')}.json"


@cache
def rows_of(name: str) -> int:
    """How many training rows a data set has."""
    return len(jc.datasets.split(len(jc.datasets.load(name).y), (0.8, 0.2), seed=0)[0])


def fitted(train: tuple, test: tuple, label: str) -> dict:
    """Errors and seconds of one setting."""
    if label == FEW:
        train = jax.tree.map(lambda a: a[:1000], train)
    x_test, base_test, y_test = test
    compiling.clear()
    began = time.perf_counter()
    rio = jc.rio.fit(*train, **SETTINGS[label], throw=False)
    after = jax.block_until_ready(rio(x_test, base_test))
    seconds, compiled = time.perf_counter() - began, compilation()
    scale = float(np.std(y_test))
    return {
        "rows": len(train[2]),
        "inference": rio.inference,
        "RMSE": float(jc.metrics.rmse(y_test, after)) / scale,
        "CRPS": float(jc.metrics.crps(y_test, after)) / scale,
        "NLPD": float(jc.metrics.nlpd(y_test, after)) - float(np.log(scale)),
        "coverage": float(jc.metrics.coverage(y_test, after, confidence_level=0.9)),
        "seconds": seconds - compiled,
        "compilation": compiled,
        "steps": int(rio.iterations),
        "result": int(rio.result),
    }


# When something was traced, lowered or compiled since the list was cleared; of traces some lie within others.
compiling: list[tuple[float, float]] = []


def listen(event: str, seconds: float, **_) -> None:
    if event.startswith("/jax/core/compile/"):
        end = time.perf_counter()
        compiling.append((end - seconds, end))


def compilation() -> float:
    """The seconds in which something was compiled."""
    total, covered = 0.0, 0.0
    for start, end in sorted(compiling):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def report(names: list[str], labels: list[str], sizes: list[int], runs: Path) -> Iterator[str]:
    """A table for every size, and one of all of them where the exact process is among the settings."""
    yield provenance()
    done = {size: records(names, labels, size, runs) for size in sizes}
    for size, found in done.items():
        yield from table(found, labels, size)
    if EXACT in labels:
        yield from beside_exact(done, labels)


def records(names: list[str], labels: list[str], size: int, runs: Path) -> dict[str, dict[str, dict]]:
    """What was measured on the data sets that have all settings, by data set and setting."""
    return {
        name: {label: json.loads(path(name, label, size, runs).read_text(encoding="utf-8")) for label in labels}
        for name in names
        if all(path(name, label, size, runs).exists() for label in labels)
    }


def table(found: dict[str, dict[str, dict]], labels: list[str], size: int) -> Iterator[str]:
    """What every setting costs and gives, and how the settings compare over the data sets.

    The first setting is what the others are compared with: "paper" in the default list.
    """
    yield f"\n{len(found)} data sets, at most {size} training rows; RMSE, CRPS, NLPD, coverage, seconds"
    yield f"{'':24}" + "".join(f"{label:>38}" for label in labels)
    for name, of in found.items():
        cells = "".join(
            f"{r['RMSE']:10.4f}{r['CRPS']:8.4f}{r['NLPD']:7.3f}{r['coverage']:6.3f}{r['seconds']:7.1f}"
            for r in (of[label] for label in labels)
        )
        yield f"{name:17}{max(r['rows'] for r in of.values()):7}{cells}"
    if not found:
        return
    best = {name: min(r["RMSE"] for r in of.values()) for name, of in found.items()}
    yield f"\n{'':16}{'mean RMSE / best':>18}{f'most / {labels[0]}':>22}{'off 90 %':>15}{'mean seconds':>14}"
    for label in labels:
        over = np.mean([of[label]["RMSE"] / best[name] for name, of in found.items()])
        beside = {name: of[label]["RMSE"] / of[labels[0]]["RMSE"] for name, of in found.items()}
        worst = max(beside, key=lambda name: beside[name])
        coverage = np.mean([abs(of[label]["coverage"] - 0.9) for of in found.values()])
        seconds = np.mean([of[label]["seconds"] for of in found.values()])
        cells = f"{over:18.3f}{beside[worst]:8.3f} {worst:13}{coverage:15.3f}{seconds:14.1f}"
        yield f"{label:16}{cells}"


def beside_exact(done: dict[int, dict[str, dict[str, dict]]], labels: list[str]) -> Iterator[str]:
    """Seconds, and the CRPS over that of the exact process, over the data sets that have so many rows."""
    yield "\nBeside the exact process: mean seconds, and the CRPS over its own (geometric mean), by the number of rows"
    yield f"{'rows':>7}{'sets':>6}  {'':14}{'seconds':>9}{'seconds / exact':>17}{'CRPS / exact':>14}{'higher on':>11}"
    for size, found in done.items():
        full = [of for of in found.values() if of[EXACT]["rows"] == size]
        for label in labels if full else ():
            seconds, exactly = (np.mean([of[name]["seconds"] for of in full]) for name in (label, EXACT))
            ratios = np.array([of[label]["CRPS"] / of[EXACT]["CRPS"] for of in full])
            cells = f"{seconds:9.1f}{seconds / exactly:17.2f}{np.exp(np.mean(np.log(ratios))):14.3f}"
            yield f"{size:7}{len(full):6}  {label:14}{cells}{np.sum(ratios > 1):11}"


if __name__ == "__main__":
    main()
