"""Which chain of steps, and which last step?: `python -m benchmarks.tables.pipelines --datasets yacht --runs 10`.

For every data set, split (80/20, at most 500 training rows) and predictor: the predictor alone and with RIO after
it, fitted out of fold by `pipeline.fit`, and each last step fitted to the same out-of-fold predictions; scores are
those of the test rows. "none" is the chain without a last step: with RIO, what the paper does. The predictor "paper's
network" is that of RIO's tables. Processor seconds are those of the second fit, compilation apart, beside one fit of
the chain. Finished jobs are kept in `runs/`; a script that was stopped goes on where it was.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxcal as jc
from benchmarks.speed._common import DATASETS
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine, timed
from benchmarks.tables.rio import DATASETS as OF_RIO

RUNS, ROWS = 10, 500
CHAINS = {"alone": (), "rio": (jc.rio.fit,)}
LAST = {
    "none": None,
    "crude": partial(jc.crude.fit, rank="conformal"),
    "gaussian_mle": jc.gaussian_mle.fit,
    "conformal": jc.conformal.fit,
}
METRICS = ("rmse", "crps", "coverage_90", "width_90")
NEAR = (0.88, 0.92)


def predictors() -> dict:
    """Those that are compared, by name."""
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor

    return {
        "paper's network": partial(jc.mlp.fit, preset="paper"),
        "mlp": jc.mlp.fit,
        "gaussian_process": jc.gaussian_process.fit,
        "variance_network": jc.variance_network.fit,
        "random_forest": RandomForestRegressor(random_state=0),
        "boosting": HistGradientBoostingRegressor(random_state=0),
    }


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, RUNS, {}).parse_args()
    path = arguments.out / "runs" / "pipelines.jsonl"
    if not arguments.report:
        jobs = [
            {"dataset": name, "seed": seed, "predictor": predictor}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for predictor in predictors()
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    write(_jobs.finished(path), arguments.out / "results")


def run_job(dataset: str, seed: int, predictor: str) -> list[dict]:
    """One predictor on one split: a record of every chain and last step."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train = train[:ROWS]
    x, y, x_test, y_test = data.x[train], data.y[train], data.x[test], data.y[test]
    records = []
    for chain, calibrators in CHAINS.items():
        steps = {"predictor": predictors()[predictor], "calibrators": calibrators, "key": jax.random.key(seed)}
        kind = (dataset, predictor, chain)
        fitted, seconds = timed(kind, partial(jc.pipeline.fit, x, y, recalibrate=None, **steps))
        _, seconds_once = timed((*kind, "once"), partial(fit_once, x, y, **steps))
        before = fitted(x_test)
        for name, last in LAST.items():
            after = before if last is None else last(x, fitted.out_of_fold, y)(x_test, before)
            scores = jc.metrics.evaluate(y_test, after)
            record = {"chain": chain, "last": name, "time_s": seconds, "time_of_one_fit_s": seconds_once}
            records.append(record | {metric: float(scores[metric]) for metric in METRICS})
    return [{"device": machine(), **record} for record in records]


def fit_once(x, y, *, predictor, calibrators, key):
    """The chain fitted to all rows alone, for its seconds."""
    return jc.pipeline.fit_chain(predictor, calibrators, jnp.asarray(x), jnp.asarray(y), key=key)


def write(records: list[dict], folder: Path) -> None:
    """Every run as CSV, and the comparison as Markdown."""
    columns = ("dataset", "seed", "predictor", "chain", "last", *METRICS, "time_s", "time_of_one_fit_s")
    text = "\n".join(["# Chains and last steps", "", *report(records), ""])
    _report.write(folder / "pipelines.csv", records, columns, text)


def report(records: list[dict]) -> Iterator[str]:
    """The text: every combination over all data sets, and the network with RIO on the sets of RIO's Table 1."""
    cells = defaultdict(list)
    for record in records:
        cells[record["dataset"], record["predictor"], record["chain"], record["last"]].append(record)
    mean = lambda cell, metric: float(np.mean([record[metric] for record in cells[cell]]))
    datasets = sorted({cell[0] for cell in cells})
    best = {name: min(mean(cell, "crps") for cell in cells if cell[0] == name) for name in datasets}
    counts = ", ".join(f"{name} {len({r['seed'] for r in records if r['dataset'] == name})}" for name in datasets)
    yield f"Splits: {counts}. At most {ROWS} training rows; scores of the test rows.\n"
    yield _report.list_of_origins(records)
    yield "\n## All data sets\n\nCRPS over the least of the data set, geometric mean; coverage of 90 % intervals.\n"
    rows = []
    for kind in dict.fromkeys(cell[1:] for cell in cells):
        of = [(name, *kind) for name in datasets if (name, *kind) in cells]
        ratio = np.exp(np.mean([np.log(mean(cell, "crps") / best[cell[0]]) for cell in of]))
        covered = [mean(cell, "coverage_90") for cell in of]
        near = sum(NEAR[0] <= value <= NEAR[1] for value in covered)
        seconds = np.mean([mean(cell, "time_s") / mean(cell, "time_of_one_fit_s") for cell in of])
        ends = f"{100 * min(covered):.1f} to {100 * max(covered):.1f}"
        rows.append(
            [*kind, f"{ratio:.3f}", f"{100 * np.mean(covered):.1f}", ends, f"{near} of {len(of)}", f"{seconds:.1f}"]
        )
    header = ("predictor", "chain", "last", "CRPS", "covered, %", "ends", "88 to 92 %", "seconds / one fit")
    yield _report.markdown_table(header, rows)
    yield "\n## The paper's network with RIO, by the last step\n"
    rows = []
    for name in (name for name in OF_RIO if name in datasets):
        of = [(name, "paper's network", "rio", last) for last in LAST]
        row = [name, *(f"{100 * mean(cell, 'coverage_90'):.1f}" for cell in of)]
        rows.append(
            [*row, *(f"{mean(cell, 'rmse'):.4g}" for cell in of), *(f"{mean(cell, 'crps'):.4g}" for cell in of)]
        )
    header = [f"{metric}, {last}" for metric in ("covered", "RMSE", "CRPS") for last in LAST]
    yield _report.markdown_table(["data set", *header], rows)


if __name__ == "__main__":
    main()
