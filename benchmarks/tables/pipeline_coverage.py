"""How often the intervals of a pipeline cover, simulated: `python -m benchmarks.tables.pipeline_coverage --runs 20`.

The distribution of the target is known, so that coverage is a probability, not a count: that of the 90 % interval, in
the mean of fresh rows. A job is a number of rows, a seed, a chain of steps and where the errors for the last step come
from; every last step is fitted to the same errors. Finished jobs are kept in `runs/`; a script that was stopped goes on
where it was.
"""

from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine
from benchmarks.tables.pipelines import LAST
from benchmarks.tables.sharp_gp_coverage import NUM_COLUMNS, NUM_NEW, draw, truth

SIZES, LEVEL = (50, 200, 1000), 0.9
RUNS = 100
METHODS = ("folds", "split")
LEGEND = f"""\
Rows have {NUM_COLUMNS} standard normal columns; the target is the sum of the sines of the first two and normal noise,
whose std is 0.3 and the size of the first column together. Coverage is the probability of the central interval of 90 %
in the mean of {NUM_NEW} fresh rows, in per cent: its mean ± standard error over the runs, and the least and
the greatest of a run. "none" is the chain without a last step; with "split" it is fitted to three quarters of the
rows. The width is the mean one of the intervals, over that of the true distribution."""


def chains() -> dict:
    """Predictors and calibrators, by name."""
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(random_state=0)
    return {
        "gaussian_process": (jc.gaussian_process.fit, ()),
        "random forest": (forest, ()),
        "random forest, rio": (forest, (jc.rio.fit,)),
        "mlp, rio": (jc.mlp.fit, (jc.rio.fit,)),
    }


def main() -> None:
    arguments = _jobs.parser(__doc__, (), RUNS, {}).parse_args()
    path = arguments.out / "runs" / "pipeline_coverage.jsonl"
    if not arguments.report:
        jobs = [
            {"size": size, "chain": chain, "method": method, "seed": seed}
            for size in SIZES
            for chain in chains()
            for method in METHODS
            for seed in range(arguments.runs)
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    write(_jobs.finished(path), arguments.out / "results" / "pipeline_coverage.md")


def run_job(size: int, chain: str, method: str, seed: int) -> list[dict]:
    """One training set: the coverage and the width after every last step."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(seed)
    x, y = draw(rng, size)
    predictor, calibrators = chains()[chain]
    steps = {"predictor": predictor, "calibrators": calibrators, "recalibrate": None}
    fitted = jc.pipeline.fit(x, y, method=method, key=jax.random.key(seed), **steps)
    honest = fitted.steps[-1]
    x_new = rng.normal(size=(NUM_NEW, NUM_COLUMNS))
    before, target = fitted(x_new), truth(x_new)
    true_lower, true_upper = target.interval(LEVEL)
    records = []
    for name, last in LAST.items():
        after = before if last is None else last(x[honest.rows], honest.predictions, honest.y)(x_new, before)
        lower, upper = after.interval(LEVEL)
        covered = (target.cdf(upper) - target.cdf(lower)).mean()
        width = (upper - lower).mean() / (true_upper - true_lower).mean()
        records.append({"last": name, "coverage": float(covered), "width": float(width), "device": machine()})
    return records


def write(records: list[dict], path: Path) -> None:
    """The table as Markdown, printed as well."""
    runs = _report.Runs(records, ("size", "chain", "method", "last"))
    there = dict.fromkeys((record["size"], record["chain"], record["method"]) for record in records)
    rows = []
    for cell in sorted(there, key=lambda cell: (cell[0], list(chains()).index(cell[1]), METHODS.index(cell[2]))):
        size, chain, method = cell
        row = [str(size), chain, method, str(runs.count(*cell, "none"))]
        for last in LAST:
            covered = 100 * runs.values(*cell, last, "coverage")
            error, ends = _report.standard_error(covered), f"{covered.min():.0f} to {covered.max():.0f}"
            row.append(f"{covered.mean():.1f} ± {error:.1f} ({ends})")
        row += [f"{runs.mean(*cell, last, 'width'):.2f}" for last in LAST]
        rows.append(row)
    header = ["rows", "chain", "errors", "runs", *LAST, *(f"width, {last}" for last in LAST)]
    parts = ["# How often the intervals of a pipeline cover", _report.list_of_origins(records), LEGEND]
    text = "\n\n".join([*parts, _report.markdown_table(header, rows)]) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
