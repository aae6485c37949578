"""USNRT's Tables II to VI and IX run again: `python -m benchmarks.tables.usnrt --datasets steel,cbm --runs 2`.

A job is a data set, a run and a system; 80 % of the rows train, the rest test, drawn as the authors drew
them. By default (`--protocol clean`) features and target are standardized by the training rows, and USNRT is jaxcal's
default; with `--protocol paper` the target is standardized by all rows before the split, categorical columns of more
than ten levels are omitted, and USNRT follows the paper's rule, `preset="paper"`. `--protocol stability` is the study
of Fig. 1 on one data set: every point of it is a job. Finished jobs are kept in `runs/`; a script that was stopped goes
on where it was. `--report` makes the tables of `results/` from what is finished, also while another process still runs.
"""

import math
import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import process_time
from typing import NamedTuple

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _usnrt_report, _usnrt_stability
from benchmarks.tables._usnrt_report import METRICS, UNCORRECTED
from jaxcal.frames.columns import Columns

DATASETS = (
    "grid_stability",
    "cbm",
    "appliances",
    "election",
    "steel",
    "beijing_pm25",
    "protein",
    "traffic",
    "blog",
    "tetuan",
    "gpu_sgemm",
)
RUNS, RUNS_OF_LARGE = 5, {"blog": 1, "gpu_sgemm": 1}
TRAIN_SHARE, MOST_LEVELS, LEAST_ROWS = 0.8, 10, 1000
# Of all networks, as USNRT's: the authors train for 25 epochs at least. On large sets that takes hours.
PATIENCE, PATIENCE_OF_LARGE = 25, dict.fromkeys(RUNS_OF_LARGE, 10)
# What forests are chosen from, by the likelihood of a fifth of the training rows; large sets: of so many of them.
NUM_TREES, DEPTHS, FEATURE_SHARES, HELD_OUT = (50, 100, 150, 200), (4, 6, 8, 10, 12), (0.3, 0.5, 0.7, 0.9), 0.2
ROWS_TO_CHOOSE_BY = 10_000
NUM_SAMPLES = 1000
STABILITY_DATASET = "cbm"
# Of splitting networks and of leaves, in units of the number of columns.
STRUCTURES = {
    "S1": ((4, 2), (4, 2)),
    "S2": ((8, 4), (4, 2)),
    "S3": ((16, 8), (8, 4)),
    "S4": ((8, 16, 4), (4, 8, 2)),
    "S5": ((16, 16, 8), (8, 8, 4)),
}
MOST_LEAVES = (1, 2, 4, 6, 8, 10, 15, 20)
SIGNIFICANCES = (0.001, 0.002, 0.005, 0.01, 0.02)


def main() -> None:
    parser = _jobs.parser(__doc__, DATASETS, RUNS, RUNS_OF_LARGE)
    parser.add_argument("--protocol", choices=("clean", "paper", "stability"), default="clean")
    parser.add_argument("--systems", type=_jobs.names(SYSTEMS), default=",".join(SYSTEMS), help="default: all")
    arguments = parser.parse_args()
    runs = arguments.out / "runs" / "usnrt.jsonl"
    if not arguments.report:
        jobs = points(arguments.runs) if arguments.protocol == "stability" else cells(arguments)
        _jobs.run(run_job, jobs, runs, arguments.workers)
    records, results = _jobs.finished(runs), arguments.out / "results"
    _usnrt_report.write(records, DATASETS, results)
    _usnrt_stability.write(records, results)


def cells(arguments: Namespace) -> list[dict]:
    """The jobs of the tables, by runs from the outside, so that a sweep that is stopped has some of everything."""
    return [
        {"protocol": arguments.protocol, "dataset": name, "seed": seed, "system": system}
        for seed in range(arguments.runs)
        for name in arguments.datasets
        for system in arguments.systems
        # The paper's USNRT has the raw rule already.
        if seed < RUNS_OF_LARGE.get(name, RUNS) and (arguments.protocol, system) != ("paper", UNCORRECTED)
    ]


def points(runs: int) -> list[dict]:
    """The jobs of the study of stability: a hyperparameter is varied, the others are USNRT's defaults."""
    varied = {"structure": STRUCTURES, "leaves": MOST_LEAVES, "significance": SIGNIFICANCES}
    return [
        {"protocol": "stability", "dataset": STABILITY_DATASET, "seed": seed, "system": f"{name}={value}"}
        for seed in range(runs)
        for name, values in varied.items()
        for value in values
    ]


def run_job(protocol: str, dataset: str, seed: int, system: str) -> list[dict]:
    """A system on one split of one data set: its record."""
    rows, test = split(protocol, dataset, seed)
    run = Run(protocol, jax.random.key(seed), PATIENCE_OF_LARGE.get(dataset, PATIENCE))
    fit = partial(varied_usnrt, system) if protocol == "stability" else SYSTEMS[system]
    began = process_time()
    try:
        distribution, about = fit(rows, test.x, run)
    except FloatingPointError:  # the training diverged
        measures, about = dict.fromkeys(METRICS, math.nan), {}
    else:
        measures = {name: getattr(jc.metrics, name)(test.y, distribution) for name in METRICS}
    common = {"device": _jobs.machine(), "num_test": len(test.y), "time_s": process_time() - began}
    return [{**common, **measures, **about}]


class Run(NamedTuple):
    """What all systems take beside the rows."""

    protocol: str
    key: jax.Array
    patience: int


class Rows(NamedTuple):
    """Rows of a data set, to train or to test, and which of their columns are categorical."""

    x: np.ndarray
    y: np.ndarray
    categorical: tuple[int, ...]


def split(protocol: str, dataset: str, seed: int) -> tuple[Rows, Rows]:
    """The training and the test rows of a run, their target standardized as the protocol has it."""
    data = jc.datasets.load(dataset)
    num_rows = len(data.y)
    # As the authors draw them.
    chosen = random.Random(42 + 100 * seed).sample(range(num_rows), int(TRAIN_SHARE * num_rows))
    is_train = np.isin(np.arange(num_rows), chosen)
    columns = list(range(data.x.shape[1]))
    if protocol == "paper":
        columns = [k for k in columns if k not in data.categorical or len(np.unique(data.x[:, k])) <= MOST_LEVELS]
    scaled_by = data.y if protocol == "paper" else data.y[is_train]
    x, y = data.x[:, columns], (data.y - scaled_by.mean()) / scaled_by.std(ddof=1)
    categorical = tuple(columns.index(k) for k in data.categorical if k in columns)
    train, test = (Rows(x[i].astype(np.float32), y[i].astype(np.float32), categorical) for i in (is_train, ~is_train))
    return train, test


def fit_usnrt(rows: Rows, at: np.ndarray, run: Run, **options) -> tuple[jc.Distribution, dict]:
    """USNRT's distributions of the test rows, and what its first tree looks like."""
    options |= {"key": run.key, "patience": run.patience, "preset": "paper" if run.protocol == "paper" else None}
    fitted = jc.usnrt.fit(rows.x, rows.y, categorical=rows.categorical, unseen="majority", **options)
    leaves = np.isfinite(fitted.leaf_rmse[0]).sum()
    return fitted(at), {"leaves": leaves, "heterogeneity": fitted.heterogeneity[0]}


def varied_usnrt(point: str, rows: Rows, at: np.ndarray, run: Run) -> tuple[jc.Distribution, dict]:
    """USNRT with one hyperparameter off its default, of Fig. 1's ranges."""
    name, value = point.split("=")
    num_rows, num_columns = rows.x.shape
    if name == "structure":
        splitting, leaf = ([width * num_columns for width in widths] for widths in STRUCTURES[value])
        options = {"splits": jc.usnrt.Splits(hidden=splitting), "hidden": leaf}
    elif name == "leaves":
        options = {"min_leaf": max(num_rows // int(value), LEAST_ROWS)}
    else:
        options = {"splits": jc.usnrt.Splits(significance=float(value))}
    return fit_usnrt(rows, at, run, **options)


def fit_network(fit: Callable, widths: Sequence[int], rows: Rows, at: np.ndarray, run: Run):
    """The predictions of a network with hidden layers of so many units a column; levels enter as indicators."""
    x, at = with_indicators(rows, at)
    hidden = [width * rows.x.shape[1] for width in widths]
    return fit(x, rows.y, key=run.key, hidden=hidden, patience=run.patience, preset="usnrt")(at), {}


def fit_forest(model: str, rows: Rows, at: np.ndarray, run: Run):
    """The predictions of a forest, whose depth, fraction of features and number of trees are chosen one by one."""
    x, at = map(np.asarray, with_indicators(rows, at))
    y = rows.y
    order = np.random.default_rng(0).permutation(len(y))[:ROWS_TO_CHOOSE_BY]
    held_out, rest = np.split(order, [int(HELD_OUT * len(order))])
    fit = partial(jc.forests.fit, model=model, key=run.key, min_leaf_rows=1, preset="usnrt")

    def loss(**options) -> float:
        return float(jc.metrics.nlpd(y[held_out], fit(x[rest], y[rest], **options)(x[held_out])))

    chosen = {"max_features": FEATURE_SHARES[1], "num_trees": NUM_TREES[0]}
    for name, values in (("max_depth", DEPTHS), ("max_features", FEATURE_SHARES), ("num_trees", NUM_TREES)):
        chosen[name] = min(values, key=lambda value, name=name: loss(**{**chosen, name: value}))
    return fit(x, y, **chosen)(at), chosen


def with_indicators(rows: Rows, at: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The columns of the training rows and of others, with indicators in place of the levels."""
    columns = replace(Columns.of(rows.x, rows.categorical), unseen="majority")
    return columns(rows.x), columns(at)


SYSTEMS = {
    "HNN": partial(fit_network, jc.variance_network.fit, (8, 4)),
    "Extra Trees": partial(fit_forest, "extra_trees"),
    "Random Forest": partial(fit_forest, "random_forest"),
    "USNRT": fit_usnrt,
    UNCORRECTED: partial(fit_usnrt, splits=jc.usnrt.Splits(correction="none")),
    "MC Dropout": partial(fit_network, partial(jc.dropout.fit, rate=0.5, num_samples=NUM_SAMPLES), (8, 16, 4)),
    "Concrete Dropout": partial(fit_network, partial(jc.dropout.fit, rate="concrete", num_samples=NUM_SAMPLES), (8, 4)),
    "Deep Ensemble": partial(fit_network, jc.deep_ensemble.fit, (8, 4)),
    "Evidential": partial(fit_network, jc.evidential.fit, (8, 4)),
    "USNRT Ensemble": partial(fit_usnrt, num_members=5),
}


if __name__ == "__main__":
    main()
