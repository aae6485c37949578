"""The default pipeline beside published scores: `python -m benchmarks.tables.default_answer`.

Ten folds, KFold(10, shuffle=True, random_state=1), of which large sets have the first three: the protocol of Brophy and
Lowd, "Instance-Based Uncertainty Estimation for Gradient-Boosted Regression Trees" (NeurIPS 2022), whose scores of IBUG
and PGBM stand in `benchmarks/published/ibug_crps.csv`. `jc.pipeline.fit(x, y)` is fitted to nine tenths, with the trees
of scikit-learn alone or, with `--catboost`, with CatBoost installed. Finished folds are kept in `runs/`; a script that
was stopped goes on where it was.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine

# How many of the ten folds.
DATASETS = {"concrete": 10, "energy_heating": 10, "yacht": 10, "power_plant": 3, "kin8nm": 3}
METRICS = ("crps", "rmse", "coverage_90", "width_90", "nlpd", "worst")
PUBLISHED = Path(__file__).parent.parent / "published" / "ibug_crps.csv"
HEADER = ["data set", "folds", "candidates", "CRPS", "IBUG", "PGBM", "RMSE", "covered, %", "null band, %", "NLPD"]
HEADER += ["most nats below one normal", "seconds"]


def main() -> None:
    parser = _jobs.parser(__doc__, DATASETS, 10, {})
    parser.add_argument("--catboost", action="store_true", help="with CatBoost, which must be installed")
    arguments = parser.parse_args()
    path = arguments.out / "runs" / "default_answer.jsonl"
    if not arguments.report:
        jobs = [
            {"dataset": name, "fold": fold, **({"catboost": True} if arguments.catboost else {})}
            for name in arguments.datasets
            for fold in range(min(DATASETS[name], arguments.runs))
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    records = _jobs.finished(path)
    records = [{"catboost": False, **record} for record in records]
    columns = ("dataset", "fold", "catboost", "candidates", "weights", *METRICS, "rows", "seconds", "device")
    text = "\n".join(["# The default answer", "", *report(records), ""])
    _report.write(arguments.out / "results" / "default_answer.csv", records, columns, text)


def run_job(dataset: str, fold: int, *, catboost: bool = False) -> list[dict]:
    """The default on one fold."""
    import time

    from sklearn.model_selection import KFold

    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    x, y = np.asarray(data.x), np.asarray(data.y)
    train, test = list(KFold(10, shuffle=True, random_state=1).split(x))[fold]
    names = ["gaussian_process", "deep_ensemble", "boosted_trees", "extra_trees", *(["catboost"] if catboost else [])]
    models = jc.pipeline.candidates(names)
    began = time.perf_counter()
    fitted = jc.pipeline.fit(x[train], y[train], predictor=models, key=jax.random.key(fold))
    seconds = time.perf_counter() - began
    forecast = fitted(x[test])
    nlpd = -np.asarray(forecast.log_prob(y[test]))
    under_one = -np.asarray(jc.Normal(np.full(len(test), y[train].mean()), y[train].std()).log_prob(y[test]))
    scores = jc.metrics.evaluate(y[test], forecast)
    weights = dict(zip(fitted.chain.names, fitted.chain.combiner.weights.round(2).tolist(), strict=True))
    candidates = ", ".join(steps[0].name for steps in fitted.others)
    return [
        {
            "device": machine(),
            "candidates": ", ".join([candidates, *fitted.dropped, *fitted.omitted]),
            "weights": ", ".join(f"{name} {weight:g}" for name, weight in weights.items()),
            **{metric: float(scores[metric]) for metric in METRICS[:4]},
            "nlpd": float(nlpd.mean()),
            "worst": float((nlpd - under_one).max()),
            "rows": len(test),
            "seconds": seconds,
        }
    ]


def report(records: list[dict]) -> Iterator[str]:
    """The text."""
    with PUBLISHED.open() as lines:
        _, *rows = (line.strip().split(",") for line in lines)
    published = {name: scores for name, *scores in rows}
    yield _report.list_of_origins(records)
    yield "\nMeans over the folds. 90 % intervals; the band holds 19 of 20 exact ones with as many rows.\n"
    found = defaultdict(list)
    for record in records:
        found[record["dataset"], record["catboost"]].append(record)
    for catboost, about in ((False, "With scikit-learn alone"), (True, "With CatBoost installed")):
        names = [name for name in DATASETS if found[name, catboost]]
        if names:
            yield f"\n## {about}\n"
            table = [row_of(name, found[name, catboost], published.get(name, ["", ""])) for name in names]
            yield _report.markdown_table(HEADER, table)


def row_of(name: str, records: list[dict], published: list[str]) -> list[str]:
    """One data set."""
    mean = lambda key: float(np.mean([record[key] for record in records]))
    rows = np.array([record["rows"] for record in records])
    covered = float(np.average([record["coverage_90"] for record in records], weights=rows))
    low, high = jc.guarantee.MeasuredCoverage(0.9, int(rows.sum()), round(covered * rows.sum()), 0).band()
    kinds = sorted({name for record in records for name in record["weights"].replace(",", "").split()[::2]})
    worst = max(record["worst"] for record in records)
    cells = [f"{mean('crps'):.4g}", *published, f"{mean('rmse'):.4g}", f"{100 * covered:.1f}"]
    band = f"{100 * low:.1f} to {100 * high:.1f}"
    return [
        name,
        str(len(records)),
        ", ".join(kinds),
        *cells,
        band,
        f"{mean('nlpd'):.3f}",
        f"{worst:.1f}",
        f"{mean('seconds'):.0f}",
    ]


if __name__ == "__main__":
    main()
