"""Sharp calibrated GPs' Table 1 from finished runs: every run as CSV, ours beside the published as Markdown."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.tables import _report

# Our forms of the paper's method, and what it is compared with.
OURS = ("Ours", "line", "exact", "exact ARD")
RIVALS = ("RK", "RV", "RM", "NN", "B")
METHODS = (*OURS, *RIVALS)
# What every sentence sets them beside.
BESIDE = ("RK", "NN", "B")
PUBLISHED_AS = ("Ours", *RIVALS)
METRICS = {
    "ece": "ECE",
    "std": "STD",
    "nll": "NLL",
    "width": "width of 95 % intervals",
    "coverage": "coverage of 95 % intervals, in %",
    "width_at_coverage": "width of 95 % intervals at equal coverage",
}
PUBLISHED_METRICS = {"ece": "ECE", "std": "STD", "nll": "NLL", "width": "CI95_width"}
COLUMNS = ("dataset", "base", "seed", "method", *METRICS, "rmse", "num_calibration", "num_test")
BY = ("dataset", "base", "method")
# Widths that differ by less, as a fraction, are called equal.
MARGIN = 0.01

LEGEND = """\
Means ± standard deviations over random splits 0.6 / 0.2 / 0.2 (training, calibration, test); the paper has 100 of each.
Target in standard deviations of the training rows. ECE is the mean of eq. 8 over 21 levels, with *floor* its mean for
the true distribution's exact quantiles estimated from as many calibration rows: (3.325 / 21) (1 / T + 1 / (N + 2)). STD
is the mean predicted standard deviation, NLL that of the normal distribution of the same mean and std, since the
density of a distribution of quantiles explodes where they touch; the paper does not define its own. Intervals *at equal
coverage* are stretched about their middles until 95 % of the test rows of the run lie inside, one factor a run: what is
left of the differences in width when nobody covers too little. *Ours* is the paper's algorithm (`preset="paper"`),
*line* the same with common multiples of the lengthscales. *exact* and *exact ARD* choose lengthscales by the training
rows, which keeps the coverage guarantee; *exact* is jaxcal's default. *RK* is isotonic with normal tails, *RV* the
randomized and *RM* the variance-free calibrator of `conformal`, *NN* `neural_quantiles` as in the paper, *B* the base
itself. The base *evidence* is the Gaussian process of the greatest evidence; *noise 8* one whose noise variance is held
at 8, about what the published row B shows."""


def write(records: Sequence[dict], datasets: Sequence[str], bases: Sequence[str], path: Path) -> None:
    """Write every run as CSV, and the tables as Markdown beside it."""
    place = lambda record: (datasets.index(record["dataset"]), bases.index(record["base"]), record["seed"])
    records = sorted(records, key=place)
    _report.write(path, records, COLUMNS, markdown(records, datasets, bases))


def markdown(records: Sequence[dict], datasets: Sequence[str], bases: Sequence[str]) -> str:
    """The whole report."""
    runs = _report.Runs(records, BY)
    parts = ["# Sharp calibrated GPs, Table 1", _report.list_of_origins(records), LEGEND]
    for base in bases:
        names = [name for name in datasets if runs.count(name, base, "Ours")]
        if not names:
            continue
        counts = ", ".join(f"{name} {runs.count(name, base, 'Ours')}" for name in names)
        parts += [f"## Base: {base}", f"Runs: {counts}.", findings(runs, names, base)]
        for metric, title in METRICS.items():
            parts += [f"### {base}: {title}", table(runs, names, base, metric)]
    return "\n\n".join(parts) + "\n"


def findings(runs: _report.Runs, names: Sequence[str], base: str) -> str:
    """What of the paper's claims holds with a base, in plain sentences."""
    lines = []
    for method in OURS:
        lines.append(
            f"*{method}*: its 95 % intervals differ in width from {compared(runs, names, base, method, 'width')}. "
            f"They cover {coverages(runs, names, base, method)}, {short_of(runs, names, base, method)}; "
            f"{', '.join(f'{rival} {coverages(runs, names, base, rival)}' for rival in BESIDE)}. At equal coverage "
            f"they differ from {compared(runs, names, base, method, 'width_at_coverage')}. Its NLL is worse than "
            f"{' and '.join(worse(runs, names, base, method, rival) for rival in BESIDE)}."
        )
    rivals = [name for name in names if within_a_standard_error(runs, name, base)]
    lines.append(
        f"The ECE of the default, *exact*, is within one standard error of the least of RK, RV and RM on "
        f"{len(rivals)} of {len(names)} sets{_report.missed(rivals, names)}."
    )
    return "\n".join(f"- {line}" for line in lines)


def compared(runs: _report.Runs, names: Sequence[str], base: str, method: str, metric: str) -> str:
    """By how much a method's mean widths differ from those of the methods that stand beside it."""
    return ", from ".join(f"{rival}'s by {ratios(runs, names, base, method, rival, metric)}" for rival in BESIDE)


def ratios(runs: _report.Runs, names: Sequence[str], base: str, method: str, rival: str, metric: str) -> str:
    """By how much a method's mean widths differ from a rival's over the data sets."""
    fractions = np.array(
        [runs.mean(name, base, method, metric) / runs.mean(name, base, rival, metric) - 1 for name in names]
    )
    narrower, wider = (fractions < -MARGIN).sum(), (fractions > MARGIN).sum()
    least, median, greatest = 100 * np.quantile(fractions, (0, 0.5, 1))
    return (
        f"{median:+.0f} % in the median, {least:+.0f} to {greatest:+.0f} % (narrower by more than "
        f"{MARGIN:.0%} on {narrower}, wider on {wider} of {len(names)})"
    )


def coverages(runs: _report.Runs, names: Sequence[str], base: str, method: str) -> str:
    coverage = [100 * runs.mean(name, base, method, "coverage") for name in names]
    return f"{min(coverage):.1f} to {max(coverage):.1f} %"


def short_of(runs: _report.Runs, names: Sequence[str], base: str, method: str) -> str:
    """Where a method's intervals cover too little."""
    short = [name for name in names if covers_too_little(runs, name, base, method)]
    return (
        f"less than 95 % by more than two standard errors on {len(short)} of {len(names)} sets "
        f"({', '.join(short) or 'none'})"
    )


def worse(runs: _report.Runs, names: Sequence[str], base: str, method: str, rival: str) -> str:
    """Where a method's mean NLL is above a rival's."""
    found = [name for name in names if runs.mean(name, base, method, "nll") > runs.mean(name, base, rival, "nll")]
    return f"{rival}'s on {len(found)} of {len(names)} sets ({', '.join(found) or 'none'})"


def covers_too_little(runs: _report.Runs, name: str, base: str, method: str) -> bool:
    values = runs.values(name, base, method, "coverage")
    return len(values) > 1 and values.mean() + 2 * _report.standard_error(values) < 0.95


def within_a_standard_error(runs: _report.Runs, name: str, base: str) -> bool:
    ours = runs.values(name, base, "exact", "ece")
    least = min(runs.mean(name, base, rival, "ece") for rival in ("RK", "RV", "RM"))
    return ours.mean() - _report.standard_error(ours) <= least


def table(runs: _report.Runs, names: Sequence[str], base: str, metric: str) -> str:
    """One metric with one base: ours, and the published means."""
    is_ece = metric == "ece"
    header = ["data set", *(["floor"] if is_ece else []), *METHODS]
    published = PUBLISHED_METRICS.get(metric)
    header += [f"published {method}" for method in PUBLISHED_AS] if published else []
    scale = 100 if metric == "coverage" else 1
    rows = []
    for name in names:
        sizes = (runs.values(name, base, "Ours", size)[0] for size in ("num_test", "num_calibration"))
        floor = [f"{perfect_ece(*sizes):.4f}"] if is_ece else []
        decimals = 4 if is_ece else 1 if metric == "coverage" else None
        ours = [_report.mean_and_std(scale * runs.values(name, base, each, metric), decimals) for each in METHODS]
        theirs = _report.read_published("sharp_gp_table1")
        cells = [_report.published_cell(theirs[name, each, published]) for each in PUBLISHED_AS] if published else []
        rows.append([name, *floor, *ours, *cells])
    return _report.markdown_table(header, rows)


def perfect_ece(num_test: float, num_calibration: float) -> float:
    """The mean ECE of quantiles at ranks j of N exchangeable rows, on T others: sum of p (1 - p) is 3.325."""
    return 3.325 / 21 * (1 / num_test + 1 / (num_calibration + 2))
