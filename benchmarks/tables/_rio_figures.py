"""RIO's figures 3, 10 and 11 from finished runs, as PNG, legible at half a page's width."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.tables._rio_report import SETTINGS, Runs
from jaxcal.plots._style import STYLE as PRINT_STYLE

# Okabe and Ito's palette, which color-blind readers can distinguish.
BLUE, RED, GREY = "#0072B2", "#D55E00", "0.55"
WIDTH = 4.6  # inches: printed at three quarters of that, the letters are still 5 points high
STYLE = {**PRINT_STYLE, "axes.titlesize": 8, "legend.frameon": False, "savefig.dpi": 300}
NAMES = {"paper": "paper's setting", "jaxcal": "jaxcal's default"}


def draw(records: Sequence[dict], names: Sequence[str], base: str, stem: Path) -> None:
    """Draw all three figures, 3 and 10 in either setting.

    Args:
        records: of finished jobs, as `rio.run_job` makes them.
        names: the data sets, in the order of the panels.
        base: the base model's row in the table: NN or RF.
        stem: path that "_figure3_paper.png" and so on are added to.
    """
    runs = Runs(records)
    names = [name for name in names if runs.count(name)]
    stem.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for setting in SETTINGS:
            save(errors(runs, names, base, setting), f"{stem}_figure3_{setting}.png")
            save(corrections(records, base, names, setting), f"{stem}_figure10_{setting}.png")
        save(improvement_ratios(runs, names), f"{stem}_figure11.png")


def save(figure: Figure, path: str) -> None:
    figure.savefig(path)
    plt.close(figure)
    print(f"A figure is in {path}.")


def errors(runs: Runs, names: Sequence[str], base: str, setting: str) -> Figure:
    """Figure 3: the base model's RMSE against that of RIO and of SVGP; a dot is a run."""
    figure, panels = grid(names)
    for name, ax in panels.items():
        before = runs.values(name, setting, base, "RMSE")
        # RIO last: it must not hide behind the crosses.
        for system, marker, color in (("SVGP", "x", RED), ("RIO", ".", BLUE)):
            after = runs.values(name, setting, system, "RMSE")
            ax.plot(before, after, marker, color=color, markersize=3, markeredgewidth=0.6, alpha=0.7, label=system)
        square(ax)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=2, title=NAMES[setting])
    figure.supxlabel(f"RMSE of {base}", fontsize=8)
    figure.supylabel("RMSE of the Gaussian processes", fontsize=8)
    return figure


def corrections(records: Sequence[dict], base: str, names: Sequence[str], setting: str) -> Figure:
    """Figure 10: the base model's predictions against RIO's, for the test rows of the first run."""
    kept = {r["dataset"]: r for r in records if r["setting"] == setting and "before" in r}
    figure, panels = grid([name for name in names if name in kept])
    for name, ax in panels.items():
        size = 3 if len(kept[name]["before"]) < 1000 else 1.2
        ax.plot(kept[name]["before"], kept[name]["after"], ".", color=BLUE, markersize=size, markeredgewidth=0)
        square(ax)
    figure.suptitle(NAMES[setting], fontsize=8)
    figure.supxlabel(f"prediction of {base}", fontsize=8)
    figure.supylabel("prediction of RIO", fontsize=8)
    return figure


def improvement_ratios(runs: Runs, names: Sequence[str]) -> Figure:
    """Figure 11: the fraction of test rows that RIO moved nearer to the truth; a box is over runs."""
    figure, ax = plt.subplots(figsize=(WIDTH, 0.8 + 0.36 * len(names)), layout="constrained")
    places = np.arange(len(names))
    for setting, color, shift in zip(SETTINGS, (BLUE, RED), (-0.19, 0.19), strict=True):
        values = [runs.values(name, setting, "RIO", "improvement_ratio") for name in names]
        line = {"color": color, "linewidth": 0.8}
        ax.boxplot(
            [of_one[np.isfinite(of_one)] for of_one in values],
            positions=places + shift,
            widths=0.28,
            orientation="horizontal",
            patch_artist=True,
            boxprops={"facecolor": "white", "edgecolor": color, "linewidth": 0.8},
            medianprops={"color": color, "linewidth": 1.6},
            whiskerprops=line,
            capprops=line,
            flierprops={"marker": ".", "markersize": 2.5, "markeredgecolor": color},
            manage_ticks=False,
        )
        ax.plot([], [], "s", color=color, markerfacecolor="white", label=NAMES[setting])
    ax.axvline(0.5, color=GREY, linewidth=0.6, linestyle="--")
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set(xlabel="improvement ratio of RIO")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def grid(names: Sequence[str]) -> tuple[Figure, dict[str, Axes]]:
    """A panel for every data set, three in a row."""
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    side = WIDTH / columns
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, rows * side + 0.5), layout="constrained", squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    panels = dict(zip(names, axes.flat, strict=False))
    for name, ax in panels.items():
        ax.set_title(name, pad=3)
    return figure, panels


def square(ax: Axes) -> None:
    """The same limits on both axes, and the diagonal, where nothing was changed."""
    values = np.concatenate([np.concatenate(line.get_data()) for line in ax.lines]).astype(float)
    values = values[np.isfinite(values)]
    margin = 0.04 * np.ptp(values)
    limits = values.min() - margin, values.max() + margin
    ax.set(xlim=limits, ylim=limits, aspect="equal")
    ax.axline((limits[0], limits[0]), slope=1, color=GREY, linewidth=0.6, zorder=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(3, steps=[1, 2, 2.5, 5, 10]))
