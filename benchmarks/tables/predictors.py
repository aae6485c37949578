"""Do the predictors hold on data nobody tuned them for?: `python -m benchmarks.tables.predictors --runs 3`.

On every data set at hand of at least 1000 rows each predictor is fitted by its defaults to at most 2000 rows of a
random split (80/20) and scored on at most 10,000 of the others. "parts" are the variance network without one part of
the recipe by which networks are trained. `--predictors` takes some of them: LightGBM, XGBoost and CatBoost, which must
be installed, only so. Beside them stand scikit-learn's HistGradientBoostingRegressor, which gives a
mean alone, and the ngboost package by its own defaults. Processor seconds are those of the second fit, compilation
apart. Finished jobs are kept in `runs/`; a script that was stopped goes on where it was.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np

import jaxcal as jc
from benchmarks.speed._common import DATASETS
from benchmarks.tables import _jobs, _report
from benchmarks.tables._jobs import machine, timed
from jaxcal.networks import presets

RUNS, ROWS, TEST_ROWS, LEAST = 3, 2000, 10_000, 1000
# Not of the extras: they run where they are asked for.
PACKAGES = ("lightgbm", "xgboost", "catboost")
PREDICTORS = {
    "mlp": jc.mlp.fit,
    "variance_network": jc.variance_network.fit,
    "variance_network, alternating": partial(jc.variance_network.fit, form="alternating"),
    "deep_ensemble": jc.deep_ensemble.fit,
    "evidential": jc.evidential.fit,
    "dropout": jc.dropout.fit,
    "gaussian_process": jc.gaussian_process.fit,
    "gaussian_process, student_t": partial(jc.gaussian_process.fit, noise=jc.gp.StudentTNoise()),
    "usnrt": jc.usnrt.fit,
    "usnrt, 5 members": partial(jc.usnrt.fit, num_members=5),
    "random_forest": jc.forests.fit,
    "extra_trees": partial(jc.forests.fit, model="extra_trees"),
    "ngboost": partial(jc.forests.fit, model="ngboost"),
    "quantile_boosting": jc.quantile_boosting.fit,
    **{f"quantile_boosting, {model}": partial(jc.quantile_boosting.fit, model=model) for model in PACKAGES},
}
# What a variance network is without one part of the recipe, or with all of it as it was before.
PARTS = {
    "patience 10": {"patience": 10},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "rate not decayed": {"plateau_decay": 1.0},
    "no scales of inputs": {"scale_inputs": False},
    "no logarithmic tails": {"log_tails": False},
    "plain likelihood": {"beta": 0.0},
    "std not widened": {"calibrate": False},
    "none of them": presets.Settings()._asdict(),
}
HGB, NGBOOST = "HistGradientBoosting", "ngboost package"
LABELS = (*PREDICTORS, HGB, NGBOOST, *(f"part: {part}" for part in PARTS))
ENSEMBLE = "deep_ensemble"
# What all are measured by, and those that predict no distribution.
RIVALS, POINTS = (HGB, ENSEMBLE), ("mlp", HGB)
# Data sets with more than this fraction of the target at one value are named: no continuous distribution holds there.
TIED = 0.05
METRICS = ("rmse", "crps", "nlpd", "coverage_90", "width_90")


def main() -> None:
    names = [name for name in DATASETS if len(jc.datasets.load(name).y) >= LEAST]
    parser = _jobs.parser(__doc__, names, RUNS, {})
    usual = [label for label in LABELS if not label.endswith(PACKAGES)]
    parser.add_argument("--predictors", type=labels, default=usual, help="separated by ;; default: all but packages")
    arguments = parser.parse_args()
    path = arguments.out / "runs" / "predictors.jsonl"
    if not arguments.report:
        jobs = [
            {"dataset": name, "seed": seed, "predictor": label}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for label in arguments.predictors
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    write(_jobs.finished(path), arguments.out / "results")


def labels(text: str) -> list[str]:
    """The type of an argument that is a list of labels."""
    given = text.split(";")
    if unknown := set(given) - set(LABELS):
        raise argparse.ArgumentTypeError(f"there is no {'; '.join(unknown)}; there are {'; '.join(LABELS)}")
    return given


def run_job(dataset: str, seed: int, predictor: str) -> list[dict]:
    """One predictor on one split, in the default precision."""
    jax.config.update("jax_enable_x64", False)  # whatever the environment says
    data = jc.datasets.load(dataset)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train, test = train[:ROWS], test[:TEST_ROWS]
    fit = partial(fitted, predictor, data.x[train], data.y[train], seed)
    distribution, seconds = timed((dataset, predictor), lambda: fit()(data.x[test]))
    y = data.y[test]
    plain = jc.Normal(np.full(len(y), data.y[train].mean()), float(data.y[train].std(ddof=1)))
    scores = jc.metrics.evaluate(y, distribution)
    of_one = {"nlpd_of_one_normal": float(jc.metrics.nlpd(y, plain))}
    return [{"device": machine(), "time_s": seconds, **{name: float(scores[name]) for name in METRICS}, **of_one}]


def fitted(label: str, x, y, seed: int):
    """The predictor of this name, fitted: a function from inputs to distributions."""
    key = jax.random.key(seed)
    if label == HGB:
        from sklearn.ensemble import HistGradientBoostingRegressor

        model = HistGradientBoostingRegressor(random_state=seed).fit(x, y)
        return lambda x: jc.Point(model.predict(x))
    if label == NGBOOST:
        from ngboost import NGBRegressor

        model = NGBRegressor(verbose=False, random_state=seed).fit(x, y)
        return lambda x: jc.Normal(*(model.pred_dist(x).params[name] for name in ("loc", "scale")))
    if label in PREDICTORS:
        return PREDICTORS[label](x, y, key=key)
    settings = presets.DEFAULT._replace(**PARTS[label.removeprefix("part: ")])
    with patch.object(presets, "DEFAULT", settings):
        return jc.variance_network.fit(x, y, key=key)


def write(records: list[dict], folder: Path) -> None:
    """Every run as CSV, the tables as Markdown, and the figure."""
    columns = ("dataset", "seed", "predictor", *METRICS, "nlpd_of_one_normal", "time_s")
    text = "\n".join(["# Predictors by their defaults", "", *report(records), ""])
    _report.write(folder / "predictors.csv", records, columns, text)
    draw(Table(records), folder / "figures" / "predictors.png")


class Table:
    """The metrics of every predictor on every data set: means over its splits, which its rivals have, too."""

    def __init__(self, records: list[dict]):
        there = {record["predictor"] for record in records}
        self.predictors = [label for label in LABELS if label in there]
        self.runs = {
            label: _report.Runs(_report.comparable(records, {label, *RIVALS}, "predictor"), ("dataset", "predictor"))
            for label in self.predictors
        }
        names = sorted({record["dataset"] for record in records})
        self.datasets = [name for name in names if all(self.runs[label].count(name, label) for label in self.runs)]
        if not self.datasets:
            raise SystemExit(
                f"No data set has runs of all predictors and, on the same splits, of {' and '.join(RIVALS)}."
            )
        self.tied = [name for name in self.datasets if fraction_at_one_value(name) > TIED]

    def splits(self, predictor: str) -> int:
        """Of how many splits of every data set there are runs, at least."""
        return min(self.runs[predictor].count(name, predictor) for name in self.datasets)

    def values(
        self, predictor: str, metric: str, datasets: Sequence[str] | None = None, *, of: str | None = None
    ) -> np.ndarray:
        """A metric on every data set, or that of a rival on the same splits."""
        names = self.datasets if datasets is None else datasets
        return np.array([self.runs[predictor].mean(name, of or predictor, metric) for name in names])

    def ratios(self, predictor: str) -> np.ndarray:
        """The RMSE over HistGradientBoosting's."""
        return self.values(predictor, "rmse") / self.values(predictor, "rmse", of=HGB)

    def above_one_normal(self, predictor: str) -> float:
        """The NLPD over that of one normal distribution for all rows, at its worst over data sets and splits."""
        gaps = [
            self.runs[predictor].values(name, predictor, "nlpd")
            - self.runs[predictor].values(name, predictor, "nlpd_of_one_normal")
            for name in self.datasets
        ]
        return float(np.max(np.concatenate(gaps)))


@cache
def fraction_at_one_value(name: str) -> float:
    """How much of the target is its most frequent value."""
    _, counts = np.unique(jc.datasets.load(name).y, return_counts=True)
    return counts.max() / counts.sum()


def report(records: list[dict]) -> Iterator[str]:
    """The text: all data sets together, then each."""
    table = Table(records)
    yield f"At most {ROWS} training rows of {len(table.datasets)} data sets, random splits of each.\n"
    yield _report.list_of_origins(records)
    tied = ", ".join(f"{name} ({100 * fraction_at_one_value(name):.0f} %)" for name in table.tied)
    yield f"\nMore than {100 * TIED:.0f} % of the target at one value: {tied}."
    yield "The ends of the coverage are without these."
    yield f"RMSE over {HGB}'s: geometric mean, and the worst data set. CRPS over that of {ENSEMBLE}, geometric mean."
    yield "NLPD less that of one normal distribution for all rows: the worst split of all.\n"
    header = ("predictor", "splits", "RMSE", "worst", "CRPS", "covered, %", "ends", "NLPD, worst", "seconds")
    yield _report.markdown_table(header, [row(table, predictor) for predictor in table.predictors])
    shown = [predictor for predictor in table.predictors if not predictor.startswith("part")]
    for title, cell in (
        ("RMSE over HistGradientBoosting's", lambda p, i: f"{table.ratios(p)[i]:.2f}"),
        ("Coverage of 90 % intervals", lambda p, i: f"{100 * table.values(p, 'coverage_90')[i]:.1f}"),
        ("NLPD", lambda p, i: f"{table.values(p, 'nlpd')[i]:.3f}"),
    ):
        yield f"\n## {title}\n"
        rows = [[name, *(cell(p, i) for p in shown)] for i, name in enumerate(table.datasets)]
        yield _report.markdown_table(["data set", *shown], rows)


def row(table: Table, predictor: str) -> list[str]:
    """One predictor over all data sets."""
    ratios = table.ratios(predictor)
    continuous = [name for name in table.datasets if name not in table.tied]
    covered, ends = (100 * table.values(predictor, "coverage_90", of) for of in (table.datasets, continuous))
    crps = table.values(predictor, "crps") / table.values(predictor, "crps", of=ENSEMBLE)
    is_point = predictor in POINTS
    return [
        predictor,
        str(table.splits(predictor)),
        f"{np.exp(np.mean(np.log(ratios))):.3f}",
        f"{ratios.max():.2f} {table.datasets[int(ratios.argmax())]}",
        f"{np.exp(np.mean(np.log(crps))):.3f}",
        _report.MISSING if is_point else f"{covered.mean():.1f}",
        _report.MISSING if is_point else f"{ends.min():.1f} to {ends.max():.1f}",
        _report.MISSING if is_point else f"{table.above_one_normal(predictor):.2f}",
        f"{table.values(predictor, 'time_s').mean():.2f}",
    ]


def draw(table: Table, path: Path) -> None:
    """The error against the seconds, and the coverage on every data set."""
    import matplotlib.pyplot as plt

    shown = [predictor for predictor in table.predictors if not predictor.startswith("part")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for number, predictor in enumerate(shown):
        seconds, error = table.values(predictor, "time_s").mean(), np.exp(np.mean(np.log(table.ratios(predictor))))
        left.plot(seconds, error, "os^D"[number // 10], color=f"C{number}", label=predictor)
    left.set(xscale="log", xlabel="processor seconds of a fit with its predictions", ylabel=f"RMSE over {HGB}'s")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    with_std = [predictor for predictor in shown if predictor not in POINTS]
    right.axvspan(85, 95, color="0.93")
    right.axvline(90, color="0.6")
    for place, predictor in enumerate(with_std):
        covered = 100 * table.values(predictor, "coverage_90")
        right.plot(covered, np.full(len(covered), place), "|", markersize=12, color=f"C{shown.index(predictor)}")
        right.plot(covered.mean(), place, "k.")
    right.set(yticks=range(len(with_std)), yticklabels=with_std, xlabel="coverage of 90 % intervals by data set, %")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
