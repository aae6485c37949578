"""RIO's tables from finished runs: every run as CSV, and ours beside the published means as Markdown."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.tables import _report
from benchmarks.tables._report import MISSING

TITLES = {1: "", 5: " (with ARD)", 6: " (at most 10,000 iterations)", 7: " (random forests)"}
VARIANTS = ("RIO", "R+I", "R+O", "Y+O", "Y+IO", "SVGP")
RIVALS = ("NNGP", "ANP")
SETTINGS = ("paper", "jaxcal")
METRICS = (
    "RMSE",
    "NLPD",
    "noise_variance",
    "time_s",
    "coverage_95",
    "coverage_90",
    "coverage_68",
    "improvement_ratio",
    "evidence",
    "iterations",
    "result",
)
NOT_FINITE = 2  # jaxcal.optimize.Result

LEGEND = """\
Mean ± standard deviation (median) over random 80/20 splits; the splits are ours, so runs are not those of the paper.
*Paper's* is the paper's setting in jaxcal (50 trained inducing points, targets not scaled), *default* is jaxcal's,
but with as many lengthscales as the paper's table has (Table 5 one for every input, the others one for all; jaxcal's
default decides by the evidence), *published* the paper's number. † (paired t-test) and ‡ (Wilcoxon's signed-rank
test): differs from RIO of the same setting at the 5 % level; of five runs or fewer none has a ‡; runs of two machines
or versions are not compared. Seconds are processor time of fit and prediction, compilation apart; the published ones
come from another machine. Coverage is that of the central intervals of 95, 90 and 68 %; the residuals are those of rows
that the base model was trained on. The improvement ratio is the fraction of test rows whose error became smaller than
the base model's. *≤ published?* compares means, rounded as the published one is."""


class Runs:
    """Metrics of finished runs by data set, setting, system and seed."""

    def __init__(self, records: Sequence[dict]):
        self.records = records
        self._values = defaultdict(dict)
        self._seeds = defaultdict(set)
        for record in records:
            setting = record["setting"]
            self._seeds[record["dataset"]].add(record["seed"])
            for each in SETTINGS if setting == "base" else (setting,):
                self._values[record["dataset"], each, record["system"]][record["seed"]] = record

    def values(self, dataset: str, setting: str, system: str, metric: str) -> np.ndarray:
        """The metric of every run, in the order of seeds; NaN where it is not there."""
        runs = self._values[dataset, setting, system]
        seeds = sorted(self._seeds[dataset])
        return np.array([runs.get(seed, {}).get(metric, math.nan) for seed in seeds], float)

    def count(self, dataset: str, setting: str = "paper", system: str = "RIO") -> int:
        return len(self._values[dataset, setting, system])

    def comparable(self, dataset: str, setting: str, *systems: str) -> bool:
        """Whether the runs of two systems were made by the same code on the same machine, split by split."""
        one, other = (self._values[dataset, setting, system] for system in systems)
        return all(_report.made_by(one[seed]) == _report.made_by(other[seed]) for seed in {*one} & {*other})


def write(records: Sequence[dict], table: int, wanted: dict[str, int], folder: Path) -> None:
    """Write rio_table<n>.csv and .md, and print where they are.

    Args:
        records: of finished jobs, as `rio.run_job` makes them.
        table: the paper's number of the table: 1, 5, 6 or 7.
        wanted: how many runs there are to be, by data set, in the order of the report.
        folder: where the files go.
    """
    names, settings = list(wanted), ("base", *SETTINGS)
    order = lambda record: (names.index(record["dataset"]), record["seed"], settings.index(record["setting"]))
    records = sorted(records, key=order)
    path = folder / f"rio_table{table}.csv"
    text = markdown(Runs(records), table, wanted)
    columns = ("dataset", "seed", "setting", "system", *METRICS, *(("failed_initial_values",) if table == 1 else ()))
    _report.write(path, records, columns, text)


def markdown(runs: Runs, table: int, wanted: dict[str, int]) -> str:
    """The whole report."""
    published = _report.read_published(f"rio_table{table}")
    base = "RF" if table == 7 else "NN"
    there = [name for name in wanted if runs.count(name)]
    counts = ", ".join(f"{name} {runs.count(name)} of {number}" for name, number in wanted.items())
    parts = [
        f"# RIO, Table {table}{TITLES[table]}",
        f"Runs: {counts}. The paper has 100 of each.",
        *(of_rivals(runs, there) if table == 1 else ()),
        _report.list_of_origins(runs.records),
        LEGEND,
        "## Summary",
        summary(runs, published, there, base),
    ]
    if table == 1:
        parts += ["## Table 2: Spearman's correlation of error and noise", correlations(runs, there)]
    for name in there:
        parts += [
            f"## {name} (runs: {runs.count(name)})",
            errors(runs, published, name, base),
            other_metrics(runs, published, name, base),
        ]
    return "\n\n".join([*parts, *failures(runs)]) + "\n"


def of_rivals(runs: Runs, names: Sequence[str]) -> list[str]:
    """How many runs there are of the last two systems, and how many factorizations failed on NNGP's grid."""
    counts = {name: max(runs.count(name, "paper", rival) for rival in RIVALS) for name in names}
    records = [record for record in runs.records if record["system"] in RIVALS]
    if not records:
        return []
    failed = sum(record["failed_initial_values"] for record in records if "failed_initial_values" in record)
    devices = " and ".join(sorted({record["device"] for record in records}))
    listed = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return [
        f"NNGP and ANP, of which the paper has the same data sets, on {devices}: {listed}. Their improvement ratio "
        "would be that of another model and is not given. NNGP, paper's: a grid of 900 pairs of variances, noise 0.01; "
        "default: the variances and the noise of the greatest evidence, exact. Factorizations that failed, of all: "
        f"{int(failed)}."
    ]


def summary(runs: Runs, published: dict, names: Sequence[str], base: str) -> str:
    """Whether RIO is better than the base model, and as good as published, in either setting."""
    header = ["data set", "runs", f"{base} RMSE"]
    for setting in ("paper's", "default"):
        header += [f"RIO, {setting}", "90 % cover", f"< {base}?", "p (t, Wilcoxon)", "≤ published?"]
    header.append(f"published {base} → RIO")
    rows = []
    for name in names:
        before = runs.values(name, "paper", base, "RMSE")
        paper = {system: published.get((name, system, "RMSE")) for system in (base, "RIO")}
        row = [name, str(runs.count(name)), _report.mean_and_std(before)]
        for setting in SETTINGS:
            after = runs.values(name, setting, "RIO", "RMSE")
            cells = verdict(before, after, paper["RIO"], runs.comparable(name, setting, base, "RIO"))
            covered = _report.mean(100 * runs.values(name, setting, "RIO", "coverage_90"), 1)
            row += [cells[0], covered, *cells[1:]]
        rows.append([*row, " → ".join(_report.published_cell(paper[system]) for system in (base, "RIO"))])
    return _report.markdown_table(header, rows)


def verdict(before: np.ndarray, after: np.ndarray, published: dict | None, comparable: bool) -> list[str]:
    """The cells of one setting in the summary; no test where the runs are not comparable."""
    if np.isnan(after).all():
        return [MISSING] * 4
    p = ", ".join(p_cell(value) for value in _report.p_values(after, before)) if comparable else MISSING
    better = "yes" if np.nanmean(after) < np.nanmean(before) else "no"
    if published is None:
        return [_report.mean_and_std(after), better, p, MISSING]
    # As many decimals as were published: more of ours would make a tie a loss.
    decimals = len(published["mean"].partition(".")[2])
    reached = round(float(np.nanmean(after)), decimals) <= float(published["mean"])
    return [_report.mean_and_std(after), better, p, "yes" if reached else "no"]


def p_cell(p: float) -> str:
    if math.isnan(p):
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def correlations(runs: Runs, names: Sequence[str]) -> str:
    """Table 2: over the means of the six variants, how RMSE goes with noise variance; published beside."""
    paper = _report.read_published("rio_table2")
    rows = []
    for name in names:
        row = [name]
        for setting in SETTINGS:
            if not runs.count(name, setting):
                row.append(MISSING)
                continue
            means = [
                [np.nanmean(runs.values(name, setting, system, metric)) for system in VARIANTS]
                for metric in ("RMSE", "noise_variance")
            ]
            found = stats.spearmanr(*means)
            row.append(f"{found.statistic:.3f} (p {p_cell(found.pvalue)})")
        rho, p = (
            paper.get((name, "RIO variants and SVGP", metric), {"mean": MISSING})["mean"]
            for metric in ("spearman_rmse_noise", "p_value")
        )
        rows.append([*row, f"{rho} (p {p})"])
    return _report.markdown_table(["data set", "paper's", "default", "published"], rows)


def systems(runs: Runs, name: str, base: str) -> list[str]:
    """The rows of a data set's tables."""
    return [base, *VARIANTS, *(rival for rival in RIVALS if any(runs.count(name, each, rival) for each in SETTINGS))]


def errors(runs: Runs, published: dict, name: str, base: str) -> str:
    """RMSE and NLPD of every system, marked where they differ from RIO's."""
    header = [""]
    for metric in ("RMSE", "NLPD"):
        header += [f"{metric}, paper's", "published", f"{metric}, default"]
    rows = []
    for system in systems(runs, name, base):
        row = [system]
        for metric, decimals in (("RMSE", None), ("NLPD", 3)):
            cells = [marked(runs, name, setting, system, metric, decimals) for setting in SETTINGS]
            row += [cells[0], _report.published_cell(published.get((name, system, metric))), cells[1]]
        rows.append(row)
    return _report.markdown_table(header, rows)


def marked(runs: Runs, name: str, setting: str, system: str, metric: str, decimals: int | None) -> str:
    """Mean, standard deviation, median and marks of one cell."""
    values, rio = (runs.values(name, setting, each, metric) for each in (system, "RIO"))
    if np.isnan(values).all():
        return MISSING
    marks = _report.marks(values, rio) if runs.comparable(name, setting, system, "RIO") else ""
    cell = _report.mean_and_std(values, decimals, marks=marks)
    return f"{cell} ({_report.mean([np.nanmedian(values)], decimals)})"


def other_metrics(runs: Runs, published: dict, name: str, base: str) -> str:
    """Noise variance, seconds, coverage and improvement ratio of every system."""
    header = [""]
    for metric in ("noise variance", "seconds"):
        header += [f"{metric}, paper's", "published", "default"]
    for metric in ("coverage 95 / 90 / 68 %", "improvement ratio"):
        header += [f"{metric}, paper's", "default"]
    rows = []
    for system in systems(runs, name, base):
        row = [system]
        for metric in ("noise_variance", "time_s"):
            cells = [_report.mean(runs.values(name, setting, system, metric)) for setting in SETTINGS]
            row += [cells[0], _report.published_cell(published.get((name, system, metric))), cells[1]]
        row += [coverages(runs, name, setting, system) for setting in SETTINGS]
        row += [_report.mean(runs.values(name, setting, system, "improvement_ratio"), 2) for setting in SETTINGS]
        rows.append(row)
    return _report.markdown_table(header, rows)


def coverages(runs: Runs, name: str, setting: str, system: str) -> str:
    """Mean fractions covered, in per cent."""
    fractions = [100 * runs.values(name, setting, system, f"coverage_{level}") for level in (95, 90, 68)]
    cells = [_report.mean(fraction, 1) for fraction in fractions]
    return MISSING if cells == [MISSING] * 3 else " / ".join(cells)


def failures(runs: Runs) -> list[str]:
    """The fits that did not give a number: they are in no mean above."""
    failed = [record for record in runs.records if record.get("result") == NOT_FINITE]
    if not failed:
        return []
    lines = [f"- {r['dataset']}, {r['system']}, setting {r['setting']}, seed {r['seed']}" for r in failed]
    return ["## Fits that failed (not in the means and tests)", "\n".join(lines)]
