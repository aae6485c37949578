"""The default pipeline beside published scores: `python -m benchmarks.tables.default_answer`.

`jc.pipeline.fit(x, y, time_limit=120)` is fitted with the trees of scikit-learn alone or, with `--catboost`, with
CatBoost installed, in three protocols:

- ibug: ten folds, KFold(10, shuffle=True, random_state=1), of which large sets have the first three. CRPS of IBUG and
  PGBM: Brophy and Lowd, "Instance-Based Uncertainty Estimation for Gradient-Boosted Regression Trees", NeurIPS 2022.
- mc_dropout: five of the standard splits, nine tenths to train on. RMSE and log likelihood of MC dropout with one
  hidden layer and 100 times the epochs, tuned for each split: Gal and Ghahramani, "Dropout as a Bayesian
  Approximation", ICML 2016, results of the authors' repository.
- clear: five seeds, a fifth to test on. Interval scores at 95 % of CLEAR (2025), results of the authors' repository. It
  has three variants of its base models, of which the best in the mean of a data set is taken.

The scores stand in `benchmarks/published`. Finished runs are kept in `runs/`; a script that was stopped goes on where
it was.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine

TIME_LIMIT = 120.0
# How many runs of each data set a protocol has.
RUNS = {
    "ibug": {"concrete": 10, "energy_heating": 10, "yacht": 10, "power_plant": 3, "kin8nm": 3},
    "mc_dropout": dict.fromkeys(
        ("yacht", "energy_heating", "boston", "concrete", "wine_red", "power_plant", "kin8nm"), 5
    ),
    "clear": dict.fromkeys(("airfoil", "concrete", "energy_heating", "power_plant"), 5),
}
DATASETS = tuple(dict.fromkeys(name for runs in RUNS.values() for name in runs))
METRICS = ("crps", "rmse", "coverage_90", "width_90", "coverage_95", "width_95", "interval_score_95", "log_likelihood")
METRICS = (*METRICS, "nats_below", "seconds")
# Whose mean over the runs is shown, with its digits.
PUBLISHED = {
    "ibug": ("ibug_crps", {"crps": "CRPS"}),
    "mc_dropout": ("mc_dropout_splits", {"rmse": "RMSE", "log_likelihood": "log likelihood"}),
    "clear": ("clear_intervals", {"interval_score_95": "interval score"}),
}
LEVEL_OF = {"ibug": 90, "mc_dropout": 90, "clear": 95}
FOLDER = Path(__file__).parent.parent / "published"


def main() -> None:
    parser = _jobs.parser(__doc__, DATASETS, 10, {})
    parser.add_argument("--protocols", type=_jobs.names(tuple(RUNS)), default=",".join(RUNS), help="default: all")
    parser.add_argument("--catboost", action="store_true", help="with CatBoost, which must be installed")
    arguments = parser.parse_args()
    path = arguments.out / "runs" / "default_answer.jsonl"
    if not arguments.report:
        jobs = [
            {"protocol": protocol, "dataset": name, "run": k, "catboost": arguments.catboost}
            for protocol in arguments.protocols
            for name, number in RUNS[protocol].items()
            for k in range(min(number, arguments.runs))
            if name in arguments.datasets
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    records = _jobs.finished(path)
    columns = ("protocol", "dataset", "run", "catboost", "candidates", "weights", *METRICS, "rows", "device")
    text = "\n".join(["# The default answer", "", *report(records), ""])
    _report.write(arguments.out / "results" / "default_answer.csv", records, columns, text)


def rows_of(protocol: str, dataset: str, run: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on, and those to test on."""
    from sklearn.model_selection import KFold, train_test_split

    if protocol == "mc_dropout":
        return jc.datasets.pbp_split(dataset, run)
    if protocol == "clear":
        parts: Any = train_test_split(np.arange(number), test_size=0.2, random_state=777 + run)
        train, test = parts
        return train, test
    return list(KFold(10, shuffle=True, random_state=1).split(np.arange(number)))[run]


def run_job(protocol: str, dataset: str, run: int, catboost: bool) -> list[dict]:
    """The default on one division of the rows."""
    import time

    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    x, y = np.asarray(data.x), np.asarray(data.y)
    train, test = rows_of(protocol, dataset, run, len(y))
    names = ["boosted_trees", *(["catboost"] if catboost else []), "extra_trees", "gaussian_process", "deep_ensemble"]
    began = time.perf_counter()
    fitted = jc.pipeline.fit(
        x[train], y[train], predictor=jc.pipeline.candidates(names), time_limit=TIME_LIMIT, key=jax.random.key(run)
    )
    seconds, forecast, y_test = time.perf_counter() - began, fitted(x[test]), y[test]
    chain: Any = fitted.chain
    weights = dict(zip(chain.names, chain.combiner.weights.round(2).tolist(), strict=True))
    candidates = ", ".join(steps[0].name for steps in fitted.others)
    return [
        {
            "device": machine(),
            "candidates": ", ".join([candidates, *fitted.dropped, *fitted.omitted]),
            "weights": ", ".join(f"{name} {weight:g}" for name, weight in weights.items()),
            **scores_of(y_test, forecast, jc.Normal(np.full(len(test), y[train].mean()), y[train].std())),
            "rows": len(test),
            "seconds": seconds,
        }
    ]


def scores_of(y: np.ndarray, forecast: jc.Distribution, one_normal: jc.Normal) -> dict[str, float]:
    """Of test rows; `nats_below` is the most by which the log score of a row falls below one normal for all rows."""
    log_scores = np.asarray(forecast.log_prob(y))
    found = {
        "crps": jc.metrics.crps(y, forecast),
        "rmse": jc.metrics.rmse(y, forecast),
        "interval_score_95": jc.metrics.interval_score(y, forecast, confidence_level=0.95),
        "log_likelihood": log_scores.mean(),
        "nats_below": (np.asarray(one_normal.log_prob(y)) - log_scores).max(),
    }
    for level in (90, 95):
        found[f"coverage_{level}"] = jc.metrics.coverage(y, forecast, confidence_level=level / 100)
        lower, upper = forecast.interval(level / 100)
        found[f"width_{level}"] = np.mean(np.asarray(upper) - np.asarray(lower))
    return {name: float(value) for name, value in found.items()}


def report(records: list[dict]) -> Iterator[str]:
    """The text."""
    yield _report.list_of_origins(records)
    yield f"\nMeans over the runs, of at most {TIME_LIMIT:g} s each. The band holds the coverage of 19 of 20 exact"
    yield "intervals with as many rows. Nats are the most by which a row's log score falls below one normal for all."
    found = defaultdict(list)
    for record in records:
        found[record["protocol"], record["dataset"], record["catboost"]].append(record)
    for protocol, runs in RUNS.items():
        for catboost, about in ((False, "scikit-learn alone"), (True, "with CatBoost installed")):
            names = [name for name in runs if found[protocol, name, catboost]]
            if names:
                yield f"\n## {protocol}: {about}\n"
                rows = [row_of(protocol, name, found[protocol, name, catboost]) for name in names]
                yield _report.markdown_table(header_of(protocol), rows)


def header_of(protocol: str) -> list[str]:
    """The columns of a protocol's table."""
    metrics = PUBLISHED[protocol][1].values()
    scores = [column for metric in metrics for column in (metric, "published", "better in")]
    return ["data set", "weights", *scores, f"{LEVEL_OF[protocol]} % covers", "null band", "nats", "seconds"]


def row_of(protocol: str, name: str, records: list[dict]) -> list[str]:
    """One data set."""
    records = sorted(records, key=lambda record: record["run"])
    mean = lambda key: float(np.mean([record[key] for record in records]))
    cells = []
    for metric in PUBLISHED[protocol][1]:
        theirs = published(protocol, name, metric, [record["run"] for record in records])
        sign = -1 if metric == "log_likelihood" else 1
        differences = sign * (theirs - np.array([record[metric] for record in records]))
        better = "" if len(theirs) == 1 else f"{(differences > 0).sum()} of {len(records)}"
        cells += [f"{mean(metric):.4g}", f"{theirs.mean():.4g}", better]
    level, rows = LEVEL_OF[protocol], np.array([record["rows"] for record in records])
    covered = float(np.average([record[f"coverage_{level}"] for record in records], weights=rows))
    low, high = jc.guarantee.MeasuredCoverage(level / 100, int(rows.sum()), round(covered * rows.sum()), 0).band()
    band = f"{100 * low:.1f} to {100 * high:.1f}"
    ends = [f"{max(record['nats_below'] for record in records):.1f}", f"{mean('seconds'):.0f}"]
    return [name, weights_of(records), *cells, f"{100 * covered:.1f}", band, *ends]


def weights_of(records: Sequence[dict]) -> str:
    """The mean weight of each predictor."""
    found = defaultdict(float)
    for record in records:
        for part in record["weights"].split(", "):
            name, weight = part.split()
            found[name] += float(weight) / len(records)
    return ", ".join(f"{name} {weight:.2f}" for name, weight in sorted(found.items(), key=lambda item: -item[1]))


def published(protocol: str, dataset: str, metric: str, runs: Sequence[int]) -> np.ndarray:
    """The published scores of these runs; of ibug the lower mean of two methods."""
    with (FOLDER / f"{PUBLISHED[protocol][0]}.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["data_set"] == dataset]
    if protocol == "ibug":
        return np.array([min(float(rows[0]["ibug"]), float(rows[0]["pgbm"]))])
    if protocol == "mc_dropout":
        return np.array([float(row[metric]) for row in rows if int(row["split"]) in runs])
    variants = defaultdict(list)
    for row in rows:
        if int(row["seed"]) in runs:
            variants[row["variant"]].append(float(row["interval_score"]))
    return np.array(min(variants.values(), key=np.mean))


if __name__ == "__main__":
    main()
