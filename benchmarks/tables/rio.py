"""RIO's Table 1 run again: `python -m benchmarks.tables.rio --datasets yacht,energy_heating --runs 20`.

Each run splits the data 80/20 at random (seed = run), trains the paper's network, and fits the Gaussian processes on
the network's training rows, as the paper does. Every system is there in the paper's setting (50 trained inducing
points, at most 1000 iterations, targets not scaled) and in jaxcal's default. NLPD is that of the normal prediction;
seconds are those of fit and prediction, without compilation.
"""

import argparse
import csv
import datetime
import time
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxcal as jc

HERE = Path(__file__).parents[1]
# Name, row of the published table, fit.
SYSTEMS = (
    ("RIO, paper's setting", "RIO", partial(jc.rio.fit, preset="paper")),
    ("RIO", "RIO", jc.rio.fit),
    ("SVGP, paper's setting", "SVGP", partial(jc.rio.fit, kernel="input", target="outcome", preset="paper")),
    ("SVGP", "SVGP", partial(jc.rio.fit, kernel="input", target="outcome")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="yacht,energy_heating", help="names, comma-separated")
    parser.add_argument("--runs", type=int, default=20, help="number of random splits")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rio_table1.csv", help="where results go")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = [row for name in arguments.datasets.split(",") for row in run_dataset(name, arguments.runs)]
    show(rows, arguments.runs)
    save(rows, arguments.out)


def run_dataset(name: str, runs: int) -> list[dict]:
    """One row of results for each system: lists over the runs."""
    data = jc.datasets.load(name)
    splits = [jc.datasets.split(len(data.y), (0.8, 0.2), seed=run) for run in range(runs)]
    x, y = (np.stack([values[train] for train, _ in splits]) for values in (data.x, data.y))
    x_test, y_test = (np.stack([values[test] for _, test in splits]) for values in (data.x, data.y))

    networks, seconds = train_networks(x, y)
    predict = eqx.filter_vmap(lambda network, x: network(x))
    base, base_test = predict(networks, jnp.asarray(x)), predict(networks, jnp.asarray(x_test))
    rmse = [float(jc.metrics.rmse(y_test[r], take(base_test, r))) for r in range(runs)]
    rows = [{"dataset": name, "system": "NN", "published": "NN", "RMSE": rmse, "time_s": [seconds] * runs}]
    for system, published, fit in SYSTEMS:
        row = {"dataset": name, "system": system, "published": published}
        row |= {"RMSE": [], "NLPD": [], "coverage_90": [], "noise_variance": [], "time_s": []}
        fit(x[0], take(base, 0), y[0])(x_test[0], take(base_test, 0))  # compiles
        for run in track(range(runs), f"{name}: {system}", transient=True):
            began = time.perf_counter()
            fitted = fit(x[run], take(base, run), y[run])
            after = jax.block_until_ready(fitted(x_test[run], take(base_test, run)))
            row["time_s"].append(time.perf_counter() - began)
            row["RMSE"].append(float(jc.metrics.rmse(y_test[run], after)))
            row["NLPD"].append(float(jc.metrics.nlpd(y_test[run], after)))
            row["coverage_90"].append(float(jc.metrics.coverage(y_test[run], after, confidence_level=0.9)))
            row["noise_variance"].append(float(fitted.noise_variance))
        rows.append(row)
    return rows


def train_networks(x: np.ndarray, y: np.ndarray):
    """The paper's network on every split, all under one vmap, and the seconds a network took."""
    train = eqx.filter_jit(eqx.filter_vmap(lambda x, y, key: jc.mlp.fit(x, y, key=key, preset="paper")))
    arguments = jnp.asarray(x), jnp.asarray(y), jax.vmap(jax.random.key)(jnp.arange(len(y)))
    jax.block_until_ready(train(*arguments))  # compiles
    began = time.perf_counter()
    networks = jax.block_until_ready(train(*arguments))
    return networks, (time.perf_counter() - began) / len(y)


def take(distribution: jc.Point, run: int) -> jc.Point:
    """One run of a distribution over runs."""
    return jax.tree.map(lambda values: values[run], distribution)


def published(name: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The paper's mean and standard deviation by system and metric."""
    with open(HERE / "published" / "rio_table1.csv", newline="") as file:
        return {
            (row["method"], row["metric"]): (row["mean"], row["std"])
            for row in csv.DictReader(file)
            if row["dataset"] == name
        }


def show(rows: list[dict], runs: int) -> None:
    """Our means and standard deviations over the runs, and the published ones."""
    table = Table(title=f"RIO, Table 1: {runs} runs here, 100 in the paper", caption=machine())
    for column in (
        "data set",
        "system",
        "RMSE",
        "published",
        "NLPD",
        "published",
        "90 % covered",
        "s a run",
        "published",
    ):
        table.add_column(column, justify="left" if column in ("data set", "system") else "right")
    for row in rows:
        paper = published(row["dataset"])
        cells = [row["dataset"], row["system"]]
        for metric, digits in (("RMSE", 2), ("NLPD", 3)):
            cells.append(
                f"{np.mean(row[metric]):.{digits}f} ± {np.std(row[metric], ddof=1):.{digits}f}"
                if metric in row
                else "–"
            )
            mean, std = paper.get((row["published"], metric), ("–", ""))
            cells.append(f"{mean} ± {std}" if std else mean)
        cells.append(f"{100 * np.mean(row['coverage_90']):.1f} %" if "coverage_90" in row else "–")
        cells.append(f"{np.mean(row['time_s']):.3f}")
        cells.append(paper.get((row["published"], "time_s"), ("–", ""))[0])
        table.add_row(*cells, end_section=row is rows[-1])
    Console(width=150).print(table)


def save(rows: list[dict], path: Path) -> None:
    """Every run of every system, in long form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = [jc.__version__, jax.__version__, machine(), datetime.date.today().isoformat()]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dataset", "system", "seed", "metric", "value", "jaxcal", "jax", "device", "date"])
        for row in rows:
            for metric, values in row.items():
                if isinstance(values, list):
                    for seed, value in enumerate(values):
                        writer.writerow([row["dataset"], row["system"], seed, metric, f"{value:.6g}", *stamp])
    print(f"Every run is in {path}.")


def machine() -> str:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    with open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))


if __name__ == "__main__":
    main()
