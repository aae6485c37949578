"""USNRT's Fig. 1 on one data set: ECE, TCE and sharpness against its hyperparameters, as CSV and as a figure."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.tables import _report
from benchmarks.tables._rio_figures import BLUE, GREY, STYLE, save
from benchmarks.tables._usnrt_report import UNITS

TITLES = {"structure": "networks", "leaves": "most leaves", "significance": "significance"}
METRICS = {"ece": "ECE in %", "tce": "TCE in %", "mean_std": "100 sharpness"}
COLUMNS = ("dataset", "seed", "varied", "value", *METRICS, "rmse", "nlpd", "leaves", "num_test", "time_s")


def write(records: Sequence[dict], folder: Path) -> None:
    """Write every run of the study, if there is one, as CSV, and the figure."""
    named = lambda system: dict(zip(("varied", "value"), system.split("="), strict=True))
    records = [record | named(record["system"]) for record in records if record["protocol"] == "stability"]
    if not records:
        return
    path = folder / "usnrt_stability.csv"
    _report.write_csv(path, records, COLUMNS)
    print(f"Every run of the study is in {path}.")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        save(draw(records), str(folder / "figures" / "usnrt_stability.png"))


def draw(records: Sequence[dict]) -> plt.Figure:
    """A row of panels for every metric, a column for every hyperparameter; a line is the mean, a dot a run."""
    figure, panels = plt.subplots(3, 3, figsize=(5.6, 4.4), sharex="col", sharey="row", layout="constrained")
    runs = _report.Runs(records, ("varied", "value"))
    for column, (varied, title) in zip(panels.T, TITLES.items(), strict=True):
        values = sorted({record["value"] for record in records if record["varied"] == varied}, key=place)
        for ax, (metric, label) in zip(column, METRICS.items(), strict=True):
            points = [UNITS[metric] * runs.values(varied, value, metric) for value in values]
            for x, at in enumerate(points):
                ax.plot([x] * len(at), at, ".", color=GREY, markersize=3)
            ax.plot(range(len(values)), [at.mean() for at in points], color=BLUE, linewidth=1)
            ax.set_xticks(range(len(values)), values)
            if varied == next(iter(TITLES)):
                ax.set_ylabel(label)
        column[-1].set_xlabel(title)
    for ax in panels[:, 0]:  # not before all panels of a row have been drawn
        ax.set_ylim(bottom=0)
    return figure


def place(value: str) -> tuple[float, str]:
    """Numbers in their order, and names in theirs."""
    return (0.0, value) if value[0].isalpha() else (float(value), "")
