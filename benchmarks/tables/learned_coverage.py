"""Coverage that a pipeline measures, beside fresh rows: `python -m benchmarks.tables.learned_coverage --runs 24`.

The errors of predictors are learned out of fold. Here the same 90 % intervals are counted on rows that nothing was
fitted to, on simulated data: pure noise, noise whose std depends on an input, Friedman's function, and skewed noise. Of
1,000 rows there are a third as many runs. Finished runs are kept in `runs/`; a script that was stopped goes on where it
was.
"""

from collections import defaultdict
from collections.abc import Iterator

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine

SIZES, LEVEL, NUM_NEW = (50, 200, 1000), 0.9, 2000
RUNS = 24
SCORES = ("measured", "fresh", "conformal", "crps", "crps_conformal")
KINDS = ("pure noise", "noise by an input", "Friedman's function", "skewed noise")
HEADER = ["rows", "data", "predictor", "measured, %", "fresh rows, %", "difference", "conformal, fresh rows, %"]
HEADER += ["CRPS over that of conformal"]


def predictors() -> dict:
    """What is fitted, by name."""
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.linear_model import Ridge
    from sklearn.neighbors import KNeighborsRegressor

    trees = ExtraTreesRegressor(50, random_state=0)
    single = {"ridge regression": Ridge(), "extra trees": trees, "5 neighbors": KNeighborsRegressor(5)}
    return {**single, "all three, combined": [(each, ()) for each in single.values()]}


def draw(kind: str, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [n, 10] and targets [n]."""
    x = rng.uniform(size=(number, 10)) if kind == KINDS[2] else rng.normal(size=(number, 10))
    noise = rng.normal(size=number)
    if kind == KINDS[0]:
        return x, noise
    if kind == KINDS[1]:
        return x, x[:, 0] + np.exp(0.7 * x[:, 1]) * noise
    if kind == KINDS[2]:
        waves = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        return x, waves + 10 * x[:, 3] + 5 * x[:, 4] + noise
    return x, x[:, 0] + np.exp(0.5 * x[:, 1]) * rng.exponential(size=number)


def main() -> None:
    arguments = _jobs.parser(__doc__, (), RUNS, {}).parse_args()
    path = arguments.out / "runs" / "learned_coverage.jsonl"
    if not arguments.report:
        jobs = [
            {"size": size, "kind": kind, "predictor": predictor, "seed": seed}
            for size in SIZES
            for kind in KINDS
            for predictor in predictors()
            for seed in range(arguments.runs // 3 if size == SIZES[-1] else arguments.runs)
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    records = _jobs.finished(path)
    text = "\n".join(["# Measured and fresh coverage", "", *report(records), ""])
    columns = ("size", "kind", "predictor", "seed", *SCORES, "device")
    _report.write(arguments.out / "results" / "learned_coverage.csv", records, columns, text)


def run_job(size: int, kind: str, predictor: str, seed: int) -> list[dict]:
    """One sample: what is measured out of fold, and on fresh rows."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng([seed, size, KINDS.index(kind)])
    (x, y), (new_x, new_y) = draw(kind, size, rng), draw(kind, NUM_NEW, rng)
    options = {"predictor": predictors()[predictor], "key": jax.random.key(seed)}
    fit = lambda **last: jc.pipeline.fit(x, y, **options, **last)
    learned, plain = fit(), fit(recalibrate=jc.conformal.fit)
    forecast, constant = learned(new_x), plain(new_x)
    covered = lambda each: float(jc.metrics.coverage(new_y, each, confidence_level=LEVEL))
    return [
        {
            "device": machine(),
            "measured": learned.guarantee(LEVEL).coverage,
            "fresh": covered(forecast),
            "conformal": covered(constant),
            "crps": float(jc.metrics.crps(new_y, forecast)),
            "crps_conformal": float(jc.metrics.crps(new_y, constant)),
        }
    ]


def report(records: list[dict]) -> Iterator[str]:
    """The text."""
    yield _report.list_of_origins(records)
    yield f"\nMeans over samples; fresh rows are {NUM_NEW:,}. The difference is measured less fresh coverage, in"
    yield "points, with its standard error. Conformal calibration is by the same errors out of fold.\n"
    found = defaultdict(list)
    for record in records:
        found[record["size"], record["kind"], record["predictor"]].append(record)
    rows = [[str(size), kind, predictor, *cells_of(own)] for (size, kind, predictor), own in found.items()]
    yield _report.markdown_table(HEADER, rows)


def cells_of(records: list[dict]) -> list[str]:
    """The numbers of one row of the table."""
    mean = lambda name: float(np.mean([record[name] for record in records]))
    differences = [100 * (record["measured"] - record["fresh"]) for record in records]
    cells = [f"{100 * mean(name):.1f}" for name in ("measured", "fresh")]
    cells += [f"{np.mean(differences):+.1f} ± {_report.standard_error(differences):.1f}"]
    return [*cells, f"{100 * mean('conformal'):.1f}", f"{mean('crps') / mean('crps_conformal'):.3f}"]


if __name__ == "__main__":
    main()
