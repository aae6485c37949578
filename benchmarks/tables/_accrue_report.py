"""ACCRUE's Table 1 from finished runs: every run as CSV, and ours beside the published medians as Markdown."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.tables import _report

METHODS = ("CRPS", "RECAL", "KM", "ACCRUE")
KINDS = ("in-sample", "out-of-fold")
PUBLISHED_METRICS = {"crps": "CRPS", "calibration_error": "calibration_error_percent"}
TITLES = {"crps": "CRPS", "calibration_error": "Calibration error in %"}
DECIMALS = {"crps": 3, "calibration_error": 1}
BY = ("dataset", "errors", "method")
COLUMNS = ("dataset", "seed", "errors", "method", *PUBLISHED_METRICS, "rmse", "at_half", "error_size", "num_test")
# There is one record of these in every run.
ONE_OF_EACH = KINDS[0], METHODS[0]
# How far above the best of the four ACCRUE's CRPS may be.
NEAR = 0.03

LEGEND = """\
Medians over random splits, 70 % to train and to calibrate, 30 % to test; the splits are ours, so runs are not those of
the paper. The network of the mean, which the paper does not describe, has the architecture and the training of its
network for the std. CRPS in standard deviations of the target, the calibration error 100 sup |C(p) - p|. *CRPS*
minimizes the CRPS alone (beta = 1), *RECAL* is isotonic recalibration of ACCRUE, in z, fitted to the same errors, *KM*
has the number of clusters, of 1 to 10, with the least calibration error on the test rows, as in the paper. *In-sample*:
the calibrations see the errors of the rows that the mean was trained on; *out-of-fold*: those of five networks fitted
to the other folds. *Floor*: the mean calibration error of the true distribution on as many test rows. *At 1/2*: 100
|C(1/2) - 1/2| of every distribution that is symmetric about the mean: no std brings the calibration error below it. The
target of energy is the heating load, the wine the red one: the paper names neither.
"""


def write(records: Sequence[dict], datasets: Sequence[str], path: Path) -> None:
    """Write every run as CSV, and the tables as Markdown beside it."""
    records = sorted(records, key=lambda record: (datasets.index(record["dataset"]), record["seed"]))
    runs = _report.Runs(records, BY)
    there = [name for name in datasets if runs.count(name, *ONE_OF_EACH)]
    published = _report.read_published("accrue_table1")
    counts = ", ".join(f"{name} {runs.count(name, *ONE_OF_EACH)}" for name in there)
    parts = [
        "# ACCRUE, Table 1",
        f"Runs: {counts}. The paper has 50 of each.",
        _report.list_of_origins(records),
        LEGEND.strip(),
        "## What holds",
        "\n".join(f"- {line}" for line in findings(runs, there, published)),
    ]
    for kind in KINDS:
        for metric in PUBLISHED_METRICS:
            parts += [f"## {TITLES[metric]}, errors {kind}", table(runs, there, published, kind, metric)]
    parts += ["## ACCRUE against the CRPS alone", paired(runs, there)]
    _report.write(path, records, COLUMNS, "\n\n".join(parts) + "\n")


def findings(runs: _report.Runs, names: Sequence[str], published: dict) -> list[str]:
    """What was asked of ACCRUE with errors out of fold, and the paper's claims, each with its count."""
    ours = lambda name, method, metric: runs.median(name, "out-of-fold", method, metric)
    below = [name for name in names if ours(name, "ACCRUE", "calibration_error") < theirs(published, name, "ACCRUE")]
    near = [
        name
        for name in names
        if ours(name, "ACCRUE", "crps") <= (1 + NEAR) * min(ours(name, method, "crps") for method in METHODS)
    ]
    lines = [
        f"With errors out of fold ACCRUE's calibration error is below the published one on {len(below)} of "
        f"{len(names)} data sets{_report.missed(below, names)}.",
        *(
            f"On {name} no distribution symmetric about the mean has less than {ours(name, 'ACCRUE', 'at_half'):.1f}, "
            "the median of its calibration error at 1/2."
            for name in names
            if name not in below
        ),
        f"Its CRPS is then within {NEAR:.0%} of the best of the four on {len(near)}{_report.missed(near, names)}.",
    ]
    for kind in KINDS:
        median = lambda name, method, kind=kind: runs.median(name, kind, method, "calibration_error")
        best = [name for name in names if median(name, "ACCRUE") <= min(median(name, method) for method in METHODS)]
        than_crps = [name for name in names if median(name, "ACCRUE") < median(name, "CRPS")]
        proven = [name for name in than_crps if p_value(runs, name, kind) < _report.SIGNIFICANT]
        lines.append(
            f"Errors {kind}: ACCRUE is better calibrated than CRPS alone on {len(than_crps)} of {len(names)} (the "
            f"paper: on all), significantly by Wilcoxon's test on {len(proven)}; the best calibrated of the four "
            f"on {len(best)} (the paper: on 6 of 8)."
        )
    return lines


def theirs(published: dict, dataset: str, method: str, metric: str = "calibration_error") -> float:
    return float(published[dataset, method, PUBLISHED_METRICS[metric]]["mean"])


def p_value(runs: _report.Runs, dataset: str, kind: str) -> float:
    """Of Wilcoxon's signed-rank test between ACCRUE and CRPS alone, in the calibration error."""
    values = (runs.values(dataset, kind, method, "calibration_error") for method in ("ACCRUE", "CRPS"))
    return _report.p_values(*values)[1]


def table(runs: _report.Runs, names: Sequence[str], published: dict, kind: str, metric: str) -> str:
    """Our medians ± standard deviations, and the published ones."""
    is_error = metric == "calibration_error"
    header = ["data set", "runs", *(["floor", "at 1/2"] if is_error else []), *METHODS]
    header += [f"published {method}" for method in METHODS]
    rows = []
    for name in names:
        num_test = int(runs.median(name, kind, "ACCRUE", "num_test"))
        bounds = 100 * stats.kstwo(num_test).mean(), runs.median(name, kind, "ACCRUE", "at_half")
        floor = [f"{bound:.1f}" for bound in bounds] if is_error else []
        ours = [spread(runs.values(name, kind, method, metric), DECIMALS[metric]) for method in METHODS]
        cells = (published.get((name, method, PUBLISHED_METRICS[metric])) for method in METHODS)
        rows.append([name, str(runs.count(name, *ONE_OF_EACH)), *floor, *ours, *map(_report.published_cell, cells)])
    return _report.markdown_table(header, rows)


def spread(values: np.ndarray, decimals: int) -> str:
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{np.median(values):.{decimals}f} ± {deviation:.{decimals}f}"


def paired(runs: _report.Runs, names: Sequence[str]) -> str:
    """The median of the paired differences, and the p-value of Wilcoxon's test; the sizes of the errors besides."""
    header = ["data set"]
    for kind in KINDS:
        header += [f"{kind}: rmse of the errors / of the test rows", "calibration error, ACCRUE - CRPS", "p"]
    rows = []
    for name in names:
        row = [name]
        for kind in KINDS:
            accrue, crps = (runs.values(name, kind, method, "calibration_error") for method in ("ACCRUE", "CRPS"))
            sizes = runs.values(name, kind, "ACCRUE", "error_size") / runs.values(name, kind, "ACCRUE", "rmse")
            p = p_value(runs, name, kind)
            shown = _report.MISSING if math.isnan(p) else f"{p:.3f}"
            row += [f"{np.median(sizes):.2f}", f"{np.median(accrue - crps):+.2f}", shown]
        rows.append(row)
    return _report.markdown_table(header, rows)
