"""Is our variance network worse than published for its patience?: `python -m benchmarks.tables.usnrt_patience`.

The variance network of USNRT's Table II, on the data sets where its ECE is far above the published one, with less
patience than the 25 epochs of that table: the authors measure the validation loss after every batch, and say of the
stopping only that they train for 25 epochs at least. One split, drawn as theirs. Finished jobs are kept in `runs/`.
"""

from pathlib import Path

import jax

import jaxcal as jc
from benchmarks.tables import _jobs, _report, usnrt

DATASETS = ("cbm", "election", "steel", "gpu_sgemm")
PATIENCES = (25, 10, 4, 1)
METRICS = ("ece", "rmse", "nlpd")


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, 1, {}).parse_args()
    path = arguments.out / "runs" / "usnrt_patience.jsonl"
    if not arguments.report:
        jobs = [
            {"dataset": name, "seed": seed, "patience": patience}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for patience in PATIENCES
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    write(_jobs.finished(path), arguments.out / "results" / "usnrt_patience.md")


def run_job(dataset: str, seed: int, patience: int) -> list[dict]:
    """A variance network on one split of one data set."""
    rows, test = usnrt.split("clean", dataset, seed)
    run = usnrt.Run("clean", jax.random.key(seed), patience)
    distribution, _ = usnrt.SYSTEMS["HNN"](rows, test.x, run)
    measures = {name: float(getattr(jc.metrics, name)(test.y, distribution)) for name in METRICS}
    return [{"device": _jobs.machine(), **measures}]


def write(records: list[dict], path: Path) -> None:
    """The table as Markdown."""
    runs = _report.Runs(records, ("dataset", "patience"))
    published = _report.read_published("usnrt_table2")
    names = [name for name in DATASETS if all(runs.count(name, patience) for patience in PATIENCES)]
    header = ["data set", "published ECE", *(f"{metric}, {p}" for metric in ("ECE", "RMSE", "NLPD") for p in PATIENCES)]
    rows = [
        [
            name,
            published[name, "HNN", "ECE"]["mean"],
            *(_report.mean(runs.values(name, p, metric)) for metric in METRICS for p in PATIENCES),
        ]
        for name in names
    ]
    parts = [
        "# The variance network of USNRT's Table II, by the patience",
        _report.list_of_origins(records),
        "ECE in %, RMSE and NLPD of the standardized target, by how many epochs without a better validation loss end a "
        f"training; {len({record['seed'] for record in records})} split.",
        _report.markdown_table(header, rows),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
