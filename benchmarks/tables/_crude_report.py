"""CRUDE's Table 1 from finished runs: every run as CSV, and ours beside the published means as Markdown."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.tables import _report

CALIBRATIONS = ("None", "MLE, shift", "MLE", "Kule.", "CRUDE")
PUBLISHED_AS = ("None", "MLE", "Kule.", "CRUDE")
METRICS = ("calibration", "sharpness", "crps", "rmse", "num_calibration", "num_test")
BY = ("dataset", "model", "calibrated_by")
COLUMNS = ("dataset", "model", "seed", "calibrated_by", *METRICS)
# How close two means of 20 trials may be and still count as equal: the rounding of the published ones.
DECIMALS = 3
# How far apart two sharpnesses must be, as a fraction, for one to be called sharper.
MARGIN = 0.01

LEGEND = """\
Means over random splits 0.5 / 0.4 / 0.1 (training, calibration, test); the splits are ours, so runs are not those of
the paper. Calibration is the root mean squared distance of the reliability curve from the diagonal (CRUDE, eq. 12),
sharpness the root of the mean predicted variance, in standard deviations of the target. *MLE, shift* is N(mu + a, (b
s)^2), *MLE* the same without shift; the text of the paper names the first, its numbers look like the second. *Kule.*
interpolates the calibration map in z, and ends where the calibration rows do: CRUDE's distribution but for the
interpolation between its z, so that neither can be much sharper than the other. *Floor* is what CRUDE scores in the
mean on a model that is perfectly calibrated already, fitted to as many rows and measured on as many. Models have the
settings of the paper's appendix A; it says nothing about epochs: our networks stop early by a validation set, a fifth
of the training rows; the Gaussian process takes 1000 steps of Adam, is sparse (500 inducing points) on the three
largest sets, and predicts without the noise, as the paper's figures suggest. It does not name its wine (here the red
one), the target of energy (heating) nor that of parkinsons (the total score, with the motor score among the inputs,
which makes its 21)."""


def write(records: Sequence[dict], datasets: Sequence[str], models: Sequence[str], path: Path) -> None:
    """Write every run as CSV, and the table as Markdown beside it."""
    place = lambda record: (datasets.index(record["dataset"]), models.index(record["model"]), record["seed"])
    records = sorted(records, key=place)
    _report.write(path, records, COLUMNS, markdown(records, datasets, models))


def markdown(records: Sequence[dict], datasets: Sequence[str], models: Sequence[str]) -> str:
    """The whole report."""
    runs, published = _report.Runs(records, BY), _report.read_published("crude_table1")
    cells = [(name, model) for model in models for name in datasets if runs.count(name, model, "CRUDE")]
    counts = ", ".join(f"{name} {max(runs.count(name, model, 'CRUDE') for model in models)}" for name in datasets)
    parts = [
        "# CRUDE, Table 1",
        f"Trials: {counts}. The paper has 20 of each.",
        _report.list_of_origins(records),
        LEGEND,
        "## What holds",
        findings(runs, cells),
        "## How often a calibration is the best of its cell",
        wins(runs, published, cells),
    ]
    for model in models:
        there = [name for name, other in cells if other == model]
        for metric in ("calibration", "sharpness"):
            parts += [f"## {model}: {metric}", table(runs, published, there, model, metric)]
    parts += ["## CRPS, in standard deviations of the target", scores(runs, cells)]
    return "\n\n".join(parts) + "\n"


def findings(runs: _report.Runs, cells: Sequence[tuple[str, str]]) -> str:
    """The paper's claims, each with its count."""
    unpaired, paired = (
        {each: sum(is_best(runs, cell, each, alike) for cell in cells) for each in CALIBRATIONS}
        for alike in (False, True)
    )
    listed = lambda counts: "; ".join(f"{each} in {counts[each]}" for each in reversed(CALIBRATIONS[:-1]))
    lines = [
        f"CRUDE's calibration is the best or within one standard error of the best in {unpaired['CRUDE']} of "
        f"{len(cells)} cells. That distinguishes little. By the same test the others are: {listed(unpaired)}.",
        f"With the standard errors of differences in pairs CRUDE passes in {paired['CRUDE']}. The others: "
        f"{listed(paired)}.",
        *(compared(runs, cells, other) for other in CALIBRATIONS[1:-1]),
    ]
    return "\n".join(f"- {line}" for line in lines)


def is_best(runs: _report.Runs, cell: tuple[str, str], name: str, paired: bool) -> bool:
    """Whether a calibration's mean is the least of its cell, or above it by at most a standard error.

    Args:
        runs: the metrics.
        cell: data set and model.
        name: of the calibration.
        paired: whether the standard error is that of the difference in the same runs; else that of its own mean.
    """
    own = runs.values(*cell, name, "calibration")
    best = min((runs.values(*cell, each, "calibration") for each in CALIBRATIONS), key=np.mean)
    error = _report.standard_error(list(own - best) if paired else list(own))
    return bool(own.mean() <= best.mean() + error)


def compared(runs: _report.Runs, cells: Sequence[tuple[str, str]], other: str) -> str:
    """What the paper says of CRUDE beside another calibration, better calibrated and sharper, as a plain sentence."""
    ratio = lambda metric: np.array(
        [runs.mean(*cell, "CRUDE", metric) / runs.mean(*cell, other, metric) for cell in cells]
    )
    calibration, sharpness = ratio("calibration"), ratio("sharpness")
    sharper, less_sharp = (sharpness < 1 - MARGIN).sum(), (sharpness > 1 + MARGIN).sum()
    return (
        f"Beside {other}: CRUDE is better calibrated in {(calibration < 1).sum()} cells (the median ratio is "
        f"{np.median(calibration):.2f}). It is sharper by more than {MARGIN:.0%} in {sharper}, less sharp by more than "
        f"that in {less_sharp} (median ratio {np.median(sharpness):.3f}): the paper's claim that it is the sharper one "
        f"in most cells is {'confirmed' if sharper > len(cells) / 2 else 'contradicted'} here."
    )


def wins(runs: _report.Runs, published: dict, cells: Sequence[tuple[str, str]]) -> str:
    """In how many cells each calibration has the least mean, as rounded; ties count for all."""
    header = ["", *CALIBRATIONS, *(f"published {name}" for name in PUBLISHED_AS)]
    rows = []
    for metric in ("calibration", "sharpness"):
        ours = [[runs.mean(*cell, each, metric) for each in CALIBRATIONS] for cell in cells]
        theirs = [[published_mean(published, *cell, each, metric) for each in PUBLISHED_AS] for cell in cells]
        # Sharpness is a virtue of calibrated distributions only.
        skipped = int(metric == "sharpness")
        rows.append([metric, *counted(ours, skipped), *counted(theirs, skipped)])
    return _report.markdown_table(header, rows)


def counted(means: Sequence[Sequence[float]], skipped: int) -> list[str]:
    """How often each column is the least one, without the first `skipped` ones."""
    table = np.round(np.array(means)[:, skipped:], DECIMALS)
    return [_report.MISSING] * skipped + [str(n) for n in (table == table.min(axis=1, keepdims=True)).sum(axis=0)]


def published_mean(published: dict, dataset: str, model: str, calibration: str, metric: str) -> float:
    return float(published[dataset, f"{model} / {calibration}", metric]["mean"])


def table(runs: _report.Runs, published: dict, names: Sequence[str], model: str, metric: str) -> str:
    """One metric of one model: our means and the published ones."""
    header = ["data set", "trials", *(["floor"] if metric == "calibration" else []), *CALIBRATIONS]
    rows = []
    for name in names:
        sizes = (int(runs.mean(name, model, "None", size)) for size in ("num_test", "num_calibration"))
        floor = [f"{perfect_calibration(*sizes):.{DECIMALS}f}"] if metric == "calibration" else []
        ours = [f"{runs.mean(name, model, each, metric):.{DECIMALS}f}" for each in CALIBRATIONS]
        theirs = [f"{published_mean(published, name, model, each, metric):.{DECIMALS}f}" for each in PUBLISHED_AS]
        rows.append([name, str(runs.count(name, model, "CRUDE")), *floor, *ours, *theirs])
    return _report.markdown_table([*header, *(f"published {each}" for each in PUBLISHED_AS)], rows)


def scores(runs: _report.Runs, cells: Sequence[tuple[str, str]]) -> str:
    """What calibration and sharpness come to together: not in the paper."""
    rows = [
        [f"{name}, {model}", *(f"{runs.mean(name, model, each, 'crps'):.{DECIMALS}f}" for each in CALIBRATIONS)]
        for name, model in cells
    ]
    return _report.markdown_table(["", *CALIBRATIONS], rows)


@cache
def perfect_calibration(num_test: int, num_calibration: int, draws: int = 500) -> float:
    """The mean calibration of CRUDE on a model whose PIT values are uniform, simulated."""
    rng = np.random.default_rng(0)
    levels = np.arange(101) / 100
    ranks = np.minimum(np.floor(levels * num_calibration + 1e-9).astype(int), num_calibration - 1)
    found = []
    for _ in range(draws):
        quantiles = np.sort(rng.uniform(size=num_calibration))[ranks]
        fractions = np.searchsorted(np.sort(rng.uniform(size=num_test)), quantiles) / num_test
        found.append(np.sqrt(np.sum((fractions - levels) ** 2) / 100))
    return float(np.mean(found))
