"""ACCRUE's figures 4 to 7: the std of problems whose noise is known. `python -m benchmarks.tables.accrue_toys`.

G, Y and W: 100 rows a run, the mean by a Gaussian process fitted to all of them, the std by the network and by the
polynomial, over 100 runs; the figures show the mean of the found stds with one and two standard deviations, the table
the mean absolute error of the std on a grid. 5D: 3300 rows to train on and as many to stop by, around a mean that is
known, and the density of the true std given the found one over a million new points. All runs of a problem are one
`vmap`. Every run is a row of `results/accrue_toys.csv`, of which the table is made.
"""

import argparse
import datetime
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._rio_figures import BLUE, RED, STYLE, WIDTH, save
from jaxcal.functional.scores import accrue_loss

PROBLEMS = {"g": 1.0, "y": 1.0, "w": np.pi}  # where their inputs end
ROWS, ROWS_5D, NEW_5D = 100, 6600, 1_000_000
MODELS = {"network": {}, "CRPS alone": {"loss": partial(accrue_loss, beta=1.0)}, "polynomial": {"model": "polynomial"}}
DRAWN = ("network", "polynomial")
GRID = np.linspace(0, 1, 201)
COLUMNS = ("problem", "seed", "rows", "mean_std", "best_constant", *MODELS, "correlation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="a folder")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    found = {name: recovered(name, arguments.runs) for name in PROBLEMS}
    true, std = five_dimensions()
    (arguments.out / "figures").mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        save(draw(found), str(arguments.out / "figures" / "accrue_toys.png"))
        save(draw_density(true, std), str(arguments.out / "figures" / "accrue_5d.png"))
    records = [record for name, by_model in found.items() for record in records_of(name, by_model)]
    records.append(record_of_five_dimensions(true, std))
    text = "\n\n".join([*heading(records), table(records), of_five_dimensions(records[-1])]) + "\n"
    _report.write(arguments.out / "accrue_toys.csv", records, COLUMNS, text)
    print(text)


def true_std(name: str) -> np.ndarray:
    """On the grid."""
    return jc.datasets.heteroscedastic_moments(name, PROBLEMS[name] * GRID[:, None])[1]


def recovered(name: str, runs: int) -> dict[str, np.ndarray]:
    """The std [runs, grid] by every model."""
    drawn = [jc.datasets.heteroscedastic(name, ROWS, seed=seed) for seed in range(runs)]
    x, y = np.stack([run.x for run in drawn]), np.stack([run.y for run in drawn])
    mean = np.stack([jc.gaussian_process.fit(*rows)(rows[0]).mean for rows in zip(x, y, strict=True)])
    keys = jax.random.split(jax.random.key(0), runs)
    grid = jnp.asarray(PROBLEMS[name] * GRID)

    def std(options: dict):
        fit = lambda x, mean, y, key: jc.accrue.fit(x, jc.Point(mean), y, key=key, **options).std(grid)
        return np.asarray(eqx.filter_jit(eqx.filter_vmap(fit))(x, mean, y, keys))

    return {model: std(options) for model, options in MODELS.items()}


def five_dimensions() -> tuple[np.ndarray, np.ndarray]:
    """True and found stds at new points."""
    data = jc.datasets.heteroscedastic("5d", ROWS_5D, seed=0)
    fitted = jc.accrue.fit(data.x, jc.Point(data.mean), data.y, key=jax.random.key(0))
    new = jc.datasets.heteroscedastic("5d", NEW_5D, seed=1)
    return new.std, np.asarray(fitted.std(new.x))


def records_of(name: str, by_model: dict[str, np.ndarray]) -> list[dict]:
    """The mean absolute error of the std by every model, and by the best constant: a record of each run."""
    true = true_std(name)
    errors = {model: np.abs(std - true[None]).mean(axis=1).tolist() for model, std in by_model.items()}
    common = {"problem": name.upper(), "rows": ROWS, "mean_std": float(true.mean()), "best_constant": of_constant(true)}
    runs = zip(*errors.values(), strict=True)
    return [stamp(common | {"seed": seed} | dict(zip(errors, run, strict=True))) for seed, run in enumerate(runs)]


def record_of_five_dimensions(true: np.ndarray, std: np.ndarray) -> dict:
    """The one run of 5D."""
    return stamp(
        {
            "problem": "5D",
            "seed": 0,
            "rows": ROWS_5D,
            "mean_std": float(true.mean()),
            "best_constant": of_constant(true),
            "network": float(np.abs(std - true).mean()),
            "correlation": float(np.corrcoef(true, std)[0, 1]),
        }
    )


def of_constant(true: np.ndarray) -> float:
    """The mean absolute error of the best constant std."""
    return float(np.abs(true - np.median(true)).mean())


def stamp(record: dict) -> dict:
    """A record, and what it was made with."""
    made = jc.__version__, jax.__version__, _jobs.machine(), datetime.date.today().isoformat()
    return record | dict(zip(_report.PROVENANCE, made, strict=True))


def heading(records: list[dict]) -> list[str]:
    runs = len({record["seed"] for record in records})
    origin = _report.list_of_origins(records)
    return ["# ACCRUE: problems whose noise is known", f"- {runs} runs of {ROWS} rows\n{origin}"]


def table(records: list[dict]) -> str:
    """The mean absolute error of the std, ± its standard error over runs; that of the best constant besides."""
    runs, rows = _report.Runs(records, ("problem",)), []
    for name in map(str.upper, PROBLEMS):
        errors = [runs.values(name, model) for model in MODELS]
        cells = [f"{error.mean():.3f} ± {_report.standard_error(error):.3f}" for error in errors]
        known = f"{runs.mean(name, 'mean_std'):.2f}", f"{runs.mean(name, 'best_constant'):.3f}"
        rows.append([name, *known, *cells])
    return _report.markdown_table(["problem", "mean std", "best constant", *MODELS], rows)


def of_five_dimensions(record: dict) -> str:
    return (
        f"5D, {ROWS_5D} rows: mean absolute error of the std {record['network']:.3f}, of the best constant "
        f"{record['best_constant']:.3f}; correlation of found and true std {record['correlation']:.3f}."
    )


def draw(found: dict[str, dict[str, np.ndarray]]):
    """A panel for each problem and model: the true std, the mean of the found ones, one and two deviations."""
    figure, axes = plt.subplots(
        len(found), len(DRAWN), figsize=(WIDTH, 1.6 * len(found)), layout="constrained", sharey="row"
    )
    for row, (name, by_model) in zip(axes, found.items(), strict=True):
        grid = PROBLEMS[name] * GRID
        for ax, model in zip(row, DRAWN, strict=True):
            mean, deviation = by_model[model].mean(0), by_model[model].std(0, ddof=1)
            for k in (2, 1):
                band = {"color": "0.85" if k == 2 else "0.7", "linewidth": 0}
                ax.fill_between(grid, np.maximum(mean - k * deviation, 0), mean + k * deviation, **band)
            ax.plot(grid, mean, color=BLUE, linewidth=1, label="found, mean")
            ax.plot(grid, true_std(name), color=RED, linewidth=1, label="true")
            ax.set_title(f"{name.upper()}, {model}")
            ax.set_ylim(0, 2 * true_std(name).max())
    for ax in axes[:, 0]:
        ax.set_ylabel("std")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    axes[0, 0].legend(loc="upper left")
    return figure


def draw_density(true: np.ndarray, std: np.ndarray):
    """The density of the true std for every found one, the largest value in each column 1, as in the paper."""
    edges = np.linspace(0, 1.1, 111)
    counts, _, _ = np.histogram2d(std, true, bins=(edges, edges))
    density = counts / np.maximum(counts.max(1, keepdims=True), 1)
    figure, ax = plt.subplots(figsize=(WIDTH * 0.7, WIDTH * 0.6), layout="constrained")
    image = ax.pcolormesh(edges, edges, np.where(density > 0, density, np.nan).T, cmap="viridis", rasterized=True)
    ax.plot(edges[[0, -1]], edges[[0, -1]], color=RED, linewidth=1)
    ax.set(xlabel="found std", ylabel="true std", title="5D", xlim=(0, 1.1), ylim=(0, 1.1))
    figure.colorbar(image, label="density, largest of the column 1")
    return figure


if __name__ == "__main__":
    main()
