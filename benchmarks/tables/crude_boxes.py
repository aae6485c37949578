"""CRUDE's Table 2 for a detector's boxes: `python -m benchmarks.tables.crude_boxes --boxes detections.csv`.

The paper's nine detectors cannot be had here. The file has a row a box and, for each of its four coordinates c, the
columns mean_c, std_c and truth_c, with c one of x1, y1, x2, y2. A random half of the rows is calibrated on, the other
half measured, each coordinate for itself; the table shows the mean over coordinates. Without a file a synthetic
detector stands in, overconfident and with heavy tails: its figures say nothing about real ones.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report

COORDINATES = ("x1", "y1", "x2", "y2")
QUANTITIES = ("mean", "std", "truth")
BOXES = 5000
CALIBRATIONS = {
    "Gauss., shift": partial(jc.gaussian_mle.fit, shift="constant", preset="paper"),
    "Gauss.": partial(jc.gaussian_mle.fit, shift="none", preset="paper"),
    "Kule.": partial(jc.isotonic.fit, score="signed", tails="support"),
    "CRUDE": partial(jc.crude.fit, preset="paper"),
}
METRICS = {"sharpness": jc.metrics.sharpness, "calibration": jc.metrics.calibration_rmse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=Path, help="CSV of a detector's boxes; default: the synthetic stand-in")
    parser.add_argument("--seed", type=int, default=0, help="of the split, and of the stand-in")
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--out", type=Path, default=results / "crude_table2.md", help="a file for the table")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    boxes = read(arguments.boxes) if arguments.boxes else stand_in(arguments.seed)
    name = str(arguments.boxes) if arguments.boxes else "SYNTHETIC stand-in: overconfident, heavy tails"
    found = measure(boxes, arguments.seed)
    text = "\n\n".join([*heading(name, len(boxes["mean"]), arguments.seed), table(name, found), published()])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def read(path: Path) -> dict[str, np.ndarray]:
    """Mean, std and truth of every box, [n, 4] each."""
    import polars

    columns = polars.read_csv(path)
    missing = [f"{q}_{c}" for q in QUANTITIES for c in COORDINATES if f"{q}_{c}" not in columns.columns]
    if missing:
        raise SystemExit(f"{path} has no column {', '.join(missing)}.")
    return {q: columns.select(f"{q}_{c}" for c in COORDINATES).to_numpy() for q in QUANTITIES}


def stand_in(seed: int) -> dict[str, np.ndarray]:
    """Errors of Student's t with three degrees of freedom, three times as wide as the detector believes."""
    rng = np.random.default_rng(seed)
    shape = BOXES, len(COORDINATES)
    mean, std = rng.uniform(0, 1, shape), 0.01 * np.exp(rng.normal(0, 0.5, shape))
    return {"mean": mean, "std": std, "truth": mean + 3 * std * rng.standard_t(3, shape)}


def measure(boxes: Mapping[str, np.ndarray], seed: int) -> dict[tuple[str, str], float]:
    """Every metric of every calibration, the mean over coordinates."""
    fitted_on, unseen = jc.datasets.split(len(boxes["mean"]), (0.5, 0.5), seed=seed)
    found = {}
    for j in range(len(COORDINATES)):
        distribution = lambda rows, j=j: jc.Normal(boxes["mean"][rows, j], boxes["std"][rows, j])
        y, truth = boxes["truth"][fitted_on, j], boxes["truth"][unseen, j]
        distributions = {"None": distribution(unseen)}
        distributions |= {
            name: fit(None, distribution(fitted_on), y)(None, distribution(unseen))
            for name, fit in CALIBRATIONS.items()
        }
        for name, each in distributions.items():
            for metric, function in METRICS.items():
                found.setdefault((metric, name), []).append(float(function(truth, each)))
    return {key: float(np.mean(values)) for key, values in found.items()}


def heading(name: str, rows: int, seed: int) -> list[str]:
    return [
        "# CRUDE, Table 2",
        f"- {name}; {rows} boxes, half of them calibrated on, seed {seed}\n- {_jobs.origin()}",
    ]


def table(name: str, found: Mapping[tuple[str, str], float]) -> str:
    columns = ("None", *CALIBRATIONS)
    rows = [[metric, *(f"{found[metric, column]:.3f}" for column in columns)] for metric in METRICS]
    return _report.markdown_table([name, *columns], rows)


def published() -> str:
    """The paper's detectors."""
    cells = _report.read_published("crude_table2")
    columns = ("None", "Gauss.", "Kule.", "CRUDE")
    detectors = dict.fromkeys(method.partition(" / ")[0] for _, method, _ in cells)
    rows = [
        [
            f"{detector}, {metric}",
            *(cells["coco_boxes", f"{detector} / {column}", metric]["mean"] for column in columns),
        ]
        for metric in METRICS
        for detector in detectors
    ]
    return _report.markdown_table(["published", *columns], rows)


if __name__ == "__main__":
    main()
