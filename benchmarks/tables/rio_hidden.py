"""RIO on a network's hidden layers, at the size of RIO's Table 3: `python -m benchmarks.tables.rio_hidden --seeds 3`.

The paper estimates ages from 172,000 photographs with a pretrained DenseNet; its kernel depends on a pooled early layer
of the network in place of the image. Here all is synthetic: inputs are a fixed nonlinear map of a few factors, and the
network was trained elsewhere. A job is a seed: the network, the rows with an 80/20 split, and RIO and its variants on
the inputs and on either hidden layer. Seconds are processor time of fit and prediction, without compilation. Finished
jobs are kept in `runs/`; a script that was stopped goes on where it was.
"""

import argparse
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine, timed
from benchmarks.tables.rio import LEVELS, calibrate, measure
from jaxcal import sweep

ROWS, TRAIN_SHARE = 172_000, 0.8
ROWS_ELSEWHERE, SPREAD_ELSEWHERE = 20_000, 0.5
NUM_INDUCING = 100
NUM_FACTORS, NUM_PIXELS, NUM_DISTRACTORS = 8, 112, 16
LAYERS = {"first hidden": 0, "last hidden": -1}
VARIANTS = {"RIO": {"kernel": "io"}, "R+I": {"kernel": "input"}, "SVGP": {"kernel": "input", "target": "outcome"}}
METRICS = ("MAE", "RMSE", "NLPD", *(f"coverage_{level}" for level in LEVELS))
SHOWN = ("MAE", "RMSE", "NLPD", *(f"{level} %" for level in LEVELS))
OF_FIT = ("time_s", "evidence", "iterations", "result", "peak_memory_mib")
COLUMNS = ("rows", "seed", "system", "features", *METRICS, *OF_FIT)

LEGEND = """\
Mean ± standard deviation over seeds, on test rows. **Synthetic**: eight factors pass through a fixed random network of
two tanh layers into 112 noisy "pixels", beside 16 columns of pure noise. The "age" is a smooth function of four of the
factors plus normal noise, whose standard deviation (from 3 to about 20) two others set, rounded and cut to 0 to 100.
*Truth* predicts that function: about the least error there can be. The network (64 and 64 ReLU units) was trained on
20,000 other rows, whose factors have half the spread: it errs systematically here by construction, so how much of its
error RIO takes away says nothing about photographs. What the table shows is that `rio.fit` takes a hidden layer as any
matrix, what that costs at this size, and how well the intervals hold.

Settings: jaxcal's default with the sparse bound and 100 greedy inducing points, in float64. The paper has 50 trained
ones; for this experiment it names neither split nor seconds. *Features* is what the kernel depends on; RIO's depends on
the network's output too. The paper's features are those of an early layer: here, *first hidden*. Columns in % are the
fractions of rows in central intervals. Seconds are processor time on one core, compilation apart; the peak memory is
that of the whole process, data and compilation included."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="training and test rows together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    parser.add_argument("--report", action="store_true", help="run nothing, report what is finished")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[1],
        help="folder of runs/ and results/; another one for a trial with fewer rows",
    )
    arguments = parser.parse_args()
    runs = arguments.out / "runs" / "rio_hidden.jsonl"
    if not arguments.report:
        jobs = [{"rows": arguments.rows, "seed": seed} for seed in range(arguments.seeds)]
        _jobs.run(run_job, jobs, runs, arguments.workers)
    records = [record for record in sweep.read(runs) if record["rows"] == arguments.rows]
    if not records:
        raise SystemExit(f"{runs} holds no finished seeds of {arguments.rows} rows.")
    write(records, arguments.out / "results" / "rio_hidden.csv")


def stand_in(rows: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs [rows, 128], "ages" [rows], and their means before noise, rounding and cutting.

    The map and the function are the same for all seeds; factors have the standard deviation `spread`.
    """
    fixed, rng = np.random.default_rng(2020), np.random.default_rng((seed, rows))
    first = fixed.normal(size=(NUM_FACTORS, 64)) / np.sqrt(NUM_FACTORS)
    second = fixed.normal(size=(64, NUM_PIXELS)) / np.sqrt(64)
    directions, phases, sizes = fixed.normal(size=(4, 12)), fixed.uniform(0, 2 * np.pi, 12), fixed.normal(size=12)

    factors = spread * rng.normal(size=(rows, NUM_FACTORS))
    pixels = np.tanh(2 * np.tanh(factors @ first) @ second) + 0.1 * rng.normal(size=(rows, NUM_PIXELS))
    x = np.concatenate([pixels, rng.normal(size=(rows, NUM_DISTRACTORS))], axis=1)
    truth = 37 + 12 * np.sin(0.75 * factors[:, :4] @ directions + phases) @ sizes / np.sqrt(6)
    noise_std = 3 + 4 * np.logaddexp(0, factors[:, 6] + factors[:, 7])
    return x, np.clip(np.round(truth + noise_std * rng.normal(size=rows)), 0, 100), truth


def run_job(rows: int, seed: int) -> list[dict]:
    """One draw of the data: a record of the truth, of the network and of every variant."""
    jax.config.update("jax_enable_x64", True)
    x, y, truth = stand_in(rows, seed)
    elsewhere = stand_in(ROWS_ELSEWHERE, seed, SPREAD_ELSEWHERE)[:2]
    train, test = jc.datasets.split(rows, (TRAIN_SHARE, 1 - TRAIN_SHARE), seed=seed)
    fit_network = partial(jc.mlp.fit, *elsewhere, key=jax.random.key(seed), batch_size=128)
    network, seconds = timed(("network",), fit_network)
    before, before_test = network(x[train]), network(x[test])
    errors = lambda base: {name: getattr(jc.metrics, name.lower())(y[test], base) for name in ("MAE", "RMSE")}

    records = [
        {"system": "truth", "features": "factors", **errors(jc.Point(truth[test]))},
        {"system": "NN", "features": "inputs", **errors(before_test), "time_s": seconds},
    ]
    layers = {"inputs": x, **{name: np.asarray(network.features(x, layer=layer)) for name, layer in LAYERS.items()}}
    variants = [(system, features, options) for system, options in VARIANTS.items() for features in layers]
    for system, features, options in [*variants, ("R+O", "output", {"kernel": "output"})]:
        fit = partial(jc.rio.fit, **options, inference=jc.gp.Sparse(num_inducing=NUM_INDUCING), throw=False)
        inputs, inputs_test = (layers[features][part] if features in layers else None for part in (train, test))
        call = partial(calibrate, fit, inputs, before, y[train], inputs_test, before_test)
        (fitted, after), seconds = timed((system, features), call)
        record = {"system": system, "features": features, **errors(after), "time_s": seconds}
        records.append(record | measure(fitted, after, y[test], before_test))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # counted in KiB on Linux
    return [{"device": machine(), "peak_memory_mib": peak, **record} for record in records]


def write(records: Sequence[dict], path: Path) -> None:
    """Write every run as CSV, and the table as Markdown beside it."""
    records = sorted(records, key=lambda record: record["seed"])
    rows, seeds = records[0]["rows"], {record["seed"] for record in records}
    peak = max(record["peak_memory_mib"] for record in records) / 1024
    parts = [
        "# RIO on hidden layers, at the size of Table 3",
        f"Seeds: {len(seeds)}. Rows: {rows:,}, {TRAIN_SHARE:.0%} of them to fit on. Peak memory: {peak:.1f} GiB.",
        _report.list_of_origins(records),
        LEGEND,
        "## The synthetic stand-in",
        table(records),
        "## Published: photographs",
        published(),
    ]
    _report.write(path, records, COLUMNS, "\n\n".join(parts) + "\n")


def table(records: Sequence[dict]) -> str:
    """Every system and what its kernel depends on, in the order of a job."""
    lines = []
    for system, features in dict.fromkeys((record["system"], record["features"]) for record in records):
        runs = [record for record in records if (record["system"], record["features"]) == (system, features)]
        values = lambda metric, runs=runs: [float(run.get(metric, np.nan)) for run in runs]
        errors = [_report.mean_and_std(values(metric), 3) for metric in ("MAE", "RMSE", "NLPD")]
        covered = [_report.mean(values(f"coverage_{level}"), 3) for level in LEVELS]
        lines.append([system, features, *errors, *covered, _report.mean(values("time_s"))])
    return _report.markdown_table(["", "features", *SHOWN, "seconds"], lines)


def published() -> str:
    """The paper's Table 3; its data are not these."""
    cells = _report.read_published("rio_table3")
    at = lambda system, metric: _report.published_cell(cells.get(("imdb_age", system, metric)))
    systems = dict.fromkeys(system for _, system, _ in cells)
    lines = [[system, *(at(system, metric) for metric in METRICS)] for system in systems]
    return _report.markdown_table(["", *SHOWN], lines)


if __name__ == "__main__":
    main()
