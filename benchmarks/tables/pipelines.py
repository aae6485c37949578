"""Which chain of steps, and which last step?: `python -m benchmarks.tables.pipelines --datasets yacht --runs 10`.

For every data set, split (80/20, at most 500 training rows) and predictor: the predictor alone and with RIO after
it, fitted out of five folds by `pipeline.fit`, and each last step fitted to the same out-of-fold predictions; scores
are those of the test rows. "none" is the chain without a last step: with RIO, what the paper does. The predictor
"paper's network" is that of RIO's tables; on the sets of RIO's Table 1 it has 20 splits, and once more with the default
number of folds. Processor seconds are those of the second fit, compilation apart, beside one fit of the chain. Finished
jobs are kept in `runs/`; a script that was stopped goes on where it was.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import combinations
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
# Of the paper's network on the sets of RIO's Table 1.
PAPERS, RUNS_OF_RIO = "paper's network", 20
# The same with RIO and all that `jc.pipeline.fit` does by default, its number of folds, too.
PAPERS_BY_DEFAULT = "paper's network, default folds"
FOLDS = 5
CHAINS = {"alone": (), "rio": (jc.rio.fit,)}
LAST = {
    "none": None,
    "crude": partial(jc.crude.fit, rank="conformal"),
    "gaussian_mle": partial(jc.gaussian_mle.fit, preset="paper"),
    "conformal": jc.conformal.fit,
}
METRICS = ("rmse", "crps", "coverage_90", "width_90")
NEAR = (0.88, 0.92)
# What `jc.pipeline.fit` takes where it is given neither a predictor nor a last step, and its last step.
DEFAULT, DEFAULT_LAST = "default", "conformal"
NOISELESS = ("cbm", "naval_compressor")
HEADER = ("predictor", "chain", "last", "CRPS", "covered, %", "ends", "88 to 92 %", "seconds / one fit")


def predictors() -> dict:
    """Those that are compared, by name."""
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor

    return {
        PAPERS: partial(jc.mlp.fit, preset="paper"),
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
        of_rio = [name for name in OF_RIO if name in arguments.datasets]
        jobs += [
            {"dataset": name, "seed": seed, "predictor": predictor}
            for seed in range(RUNS_OF_RIO)
            for name in of_rio
            for predictor in (PAPERS, PAPERS_BY_DEFAULT)
        ]
        jobs += [
            {"dataset": name, "seed": seed, "predictor": DEFAULT}
            for seed in range(arguments.runs)
            for name in arguments.datasets
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    write(_jobs.finished(path), arguments.out / "results")


def run_job(dataset: str, seed: int, predictor: str) -> list[dict]:
    """One predictor on one split: a record of every chain and last step, or of the default."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train = train[:ROWS]
    x, y, x_test, y_test = data.x[train], data.y[train], data.x[test], data.y[test]
    if predictor == DEFAULT:
        fitted = jc.pipeline.fit(x, y, key=jax.random.key(seed))
        *chain, last = (step.name for step in fitted.steps)
        return [{"device": machine(), "chain": ", ".join(chain), "last": last, **scores_of(y_test, fitted(x_test))}]
    fit = partial(fit_and_time, (dataset, predictor), x, y, key=jax.random.key(seed))
    if predictor == PAPERS_BY_DEFAULT:
        fitted, times = fit(predictors()[PAPERS], "rio")
        described = {"device": machine(), "chain": "rio", "last": DEFAULT_LAST}
        return [{**described, **times, **scores_of(y_test, fitted(x_test))}]
    records = []
    for chain in CHAINS:
        fitted, times = fit(predictors()[predictor], chain, method=jc.pipeline.Folds(folds=FOLDS), recalibrate=None)
        before = fitted(x_test)
        for name, last in LAST.items():
            after = before if last is None else last(x, fitted.out_of_fold, y)(x_test, before)
            records.append({"device": machine(), "chain": chain, "last": name, **times, **scores_of(y_test, after)})
    return records


def fit_and_time(kind: tuple, x, y, predictor, chain: str, *, key, **options) -> tuple[jc.pipeline.Pipeline, dict]:
    """A pipeline, and its processor seconds beside those of one fit of its chain."""
    steps = {"predictor": predictor, "calibrators": CHAINS[chain], "key": key}
    fitted, seconds = timed((*kind, chain), partial(jc.pipeline.fit, x, y, **options, **steps))
    _, seconds_once = timed((*kind, chain, "once"), partial(fit_once, x, y, **steps))
    return fitted, {"time_s": seconds, "time_of_one_fit_s": seconds_once}


def scores_of(y, distribution) -> dict[str, float]:
    """Those that are compared."""
    scores = jc.metrics.evaluate(y, distribution)
    return {metric: float(scores[metric]) for metric in METRICS}


def fit_once(x, y, *, predictor, calibrators, key):
    """The chain fitted to all rows alone, for its seconds."""
    return jc.pipeline.fit_chain(predictor, calibrators, jnp.asarray(x), jnp.asarray(y), key=key)


def write(records: list[dict], folder: Path) -> None:
    """Every run as CSV, and the comparison as Markdown."""
    columns = ("dataset", "seed", "predictor", "chain", "last", *METRICS, "time_s", "time_of_one_fit_s")
    text = "\n".join(["# Chains and last steps", "", *report(records), ""])
    _report.write(folder / "pipelines.csv", records, columns, text)


def report(records: list[dict]) -> Iterator[str]:
    """The text: every combination, lists of chains, the default, and the network with RIO."""
    chosen = [record for record in records if record["predictor"] == DEFAULT]
    given = [record for record in records if record["predictor"] not in (DEFAULT, PAPERS_BY_DEFAULT)]
    # Means are compared over the same splits, of runs of one code on one machine.
    whole = _report.comparable(given, {*predictors()}, "predictor")
    yield f"At most {ROWS} training rows; scores of the test rows.\n"
    yield _report.list_of_origins(records)
    yield from report_of_chains(whole)
    yield "\n## What the default takes\n\n`jc.pipeline.fit(x, y)`; the CRPS over the least of the same split above.\n"
    yield _report.markdown_table(["data set", "split", "steps", "CRPS", "covered, %"], rows_of_default(chosen, whole))
    yield "\n## The paper's network with RIO, by the last step\n"
    yield "Coverage of 90 % intervals: mean ± standard error; RMSE over that without a last step.\n"
    runs = _report.Runs(records, ("dataset", "predictor", "chain", "last"))
    of = [name for name in OF_RIO if runs.count(name, PAPERS, "rio", DEFAULT_LAST)]
    header = [f"{metric}, {last}" for metric in ("covered", "RMSE", "CRPS") for last in LAST]
    yield _report.markdown_table(["data set", "splits", *header], [row_of_rio(name, runs) for name in of])
    yield "\n## The paper's network with RIO, by the number of folds\n"
    yield f"{FOLDS} folds and the default number, with {DEFAULT_LAST} as the last step; processor seconds over those of"
    yield "one fit of the chain.\n"
    of = [name for name in of if runs.count(name, PAPERS_BY_DEFAULT, "rio", DEFAULT_LAST)]
    header = [f"{name}, {folds}" for name in ("covered", "CRPS", "width", "seconds") for folds in (FOLDS, "default")]
    yield _report.markdown_table(["data set", "splits", *header], [row_of_folds(name, runs) for name in of])


def report_of_chains(records: list[dict]) -> Iterator[str]:
    """Every combination over all data sets, and the best lists of chains."""
    splits = defaultdict(set)
    for record in records:
        splits[record["dataset"]].add(record["seed"])
    datasets = sorted(splits)
    yield f"\n## All data sets\n\nSplits: {', '.join(f'{name} {len(splits[name])}' for name in datasets)}.\n"
    yield "CRPS over the least of the data set, geometric mean; coverage of 90 % intervals.\n"
    runs = _report.Runs(records, ("dataset", "predictor", "chain", "last"))
    kinds = dict.fromkeys((record["predictor"], record["chain"], record["last"]) for record in records)
    crps = {kind: np.array([runs.mean(name, *kind, "crps") for name in datasets]) for kind in kinds}
    least = np.min(list(crps.values()), axis=0)
    yield _report.markdown_table(HEADER, [row_of(kind, crps[kind] / least, runs, datasets) for kind in kinds])
    yield "\n## Lists of chains\n"
    yield f"The same CRPS where the best of a list is known, with {DEFAULT_LAST} as the last step, but those on"
    yield f"{' and '.join(NOISELESS)}: their targets are functions of the inputs, and the least CRPS is rounding.\n"
    noisy = [name not in NOISELESS for name in datasets]
    chains = {f"{kind[0]}, {kind[1]}": (crps[kind] / least)[noisy] for kind in kinds if kind[2] == DEFAULT_LAST}
    yield _report.markdown_table(["list", "CRPS", "greatest"], lists(chains))


def row_of(kind: tuple[str, ...], ratios: np.ndarray, runs: _report.Runs, datasets: list[str]) -> list[str]:
    """One chain and last step over all data sets."""
    covered = 100 * np.array([runs.mean(name, *kind, "coverage_90") for name in datasets])
    near = sum((covered >= 100 * NEAR[0]) & (covered <= 100 * NEAR[1]))
    fits = [runs.mean(name, *kind, "time_s") / runs.mean(name, *kind, "time_of_one_fit_s") for name in datasets]
    ends = f"{covered.min():.1f} to {covered.max():.1f}"
    crps = f"{np.exp(np.mean(np.log(ratios))):.3f}"
    return [*kind, crps, f"{covered.mean():.1f}", ends, f"{near} of {len(datasets)}", f"{np.mean(fits):.1f}"]


def lists(chains: dict[str, np.ndarray]) -> Iterator[list[str]]:
    """The best lists of every length, by the mean of the least CRPS in the list."""
    least = lambda names: np.min([chains[name] for name in names], axis=0)
    loss = lambda names: np.exp(np.mean(np.log(least(names))))
    for length in range(1, 6):
        for names in sorted(combinations(chains, length), key=loss)[:3]:
            yield ["; ".join(names), f"{loss(names):.3f}", f"{least(names).max():.2f}"]


def rows_of_default(chosen: list[dict], whole: list[dict]) -> Iterator[list[str]]:
    """The steps that were chosen on every split, and the means."""
    least = defaultdict(lambda: np.nan)
    for record in whole:
        split = record["dataset"], record["seed"]
        least[split] = np.fmin(least[split], record["crps"])
    ratios = [record["crps"] / least[record["dataset"], record["seed"]] for record in chosen]
    covered = [100 * record["coverage_90"] for record in chosen]
    for record, ratio, cover in zip(chosen, ratios, covered, strict=True):
        yield [record["dataset"], str(record["seed"]), record["chain"], f"{ratio:.3f}", f"{cover:.1f}"]
    if chosen:
        yield ["mean", "", "", f"{np.exp(np.nanmean(np.log(ratios))):.3f}", f"{np.mean(covered):.1f}"]


def row_of_rio(name: str, runs: _report.Runs) -> list[str]:
    """The paper's network with RIO on one data set."""
    cells = {last: (name, PAPERS, "rio", last) for last in LAST}
    covered = [100 * runs.values(*cell, "coverage_90") for cell in cells.values()]
    rmse = [runs.mean(*cell, "rmse") / runs.mean(*cells["none"], "rmse") for cell in cells.values()]
    return [
        name,
        str(runs.count(*cells["none"])),
        *(f"{values.mean():.1f} ± {_report.standard_error(values):.1f}" for values in covered),
        *(f"{ratio:.4f}" for ratio in rmse),
        *(f"{runs.mean(*cell, 'crps'):.4g}" for cell in cells.values()),
    ]


def row_of_folds(name: str, runs: _report.Runs) -> list[str]:
    """The same network on one data set, with two numbers of folds."""
    cells = [(name, predictor, "rio", DEFAULT_LAST) for predictor in (PAPERS, PAPERS_BY_DEFAULT)]
    covered = [100 * runs.values(*cell, "coverage_90") for cell in cells]
    return [
        name,
        str(runs.count(*cells[1])),
        *(f"{values.mean():.1f} ± {_report.standard_error(values):.1f}" for values in covered),
        *(f"{runs.mean(*cell, metric):.4g}" for metric in ("crps", "width_90") for cell in cells),
        *(f"{runs.mean(*cell, 'time_s') / runs.mean(*cell, 'time_of_one_fit_s'):.1f}" for cell in cells),
    ]


if __name__ == "__main__":
    main()
