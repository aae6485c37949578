"""Pictures of predictive distributions: reliability diagrams, intervals, residuals; and of USNRT's tree.

Every function draws on `ax`, or on a new figure of a size for print, and returns the Axes. Nothing is shown
or saved: `ax.figure.savefig("reliability.pdf")` does that. They need matplotlib, the extra `plots`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks, metrics
from jaxcal.distributions import Distribution
from jaxcal.guarantee import calibrated_band

if TYPE_CHECKING:
    import matplotlib.axes

    from jaxcal.predictors._tree import Branch
    from jaxcal.predictors.usnrt import USNRT

# Okabe and Ito's palette, which color-blind readers can distinguish; the line styles distinguish the curves in gray.
_BLUE, _RED = "#0072B2", "#D55E00"
_COLORS = (_BLUE, _RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_GRAY = "0.55"

# A figure of its own gets these; an `ax` of the caller's keeps the caller's style.
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
}
_COLUMN_WIDTH = 3.3  # inches, a column of most journals
_PAGE_WIDTH = 6.8
# Where the columns of a tree's picture end, and the last one begins, in fractions of its width.
_TREE_COLUMNS = (0.5, 0.56, 0.75, 0.79)


def reliability_diagram(
    y: ArrayLike,
    distributions: Distribution | Mapping[str, Distribution],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Observed against expected fraction of the targets below every predicted quantile.

    A calibrated forecast lies on the diagonal and, 95 % of the time at each level, inside the gray band: the
    central 95 % of Binomial(n, p) / n, which is what n independent rows of a perfectly calibrated forecast
    show. A curve steeper than the diagonal in the middle means intervals that are too wide, a flatter one too
    narrow. The legend gives the expected calibration error (`metrics.ece`).

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or there is nothing to draw.
        ImportError: if matplotlib is not installed.
    """
    named = {"": distributions} if isinstance(distributions, Distribution) else distributions
    if not named:
        raise ValueError("distributions is empty: there is nothing to draw.")
    ax = ax or _new_axes(_COLUMN_WIDTH, _COLUMN_WIDTH)
    levels = np.linspace(0, 1, 101)
    ax.fill_between(levels, *calibrated_band(levels, np.size(y)), color="0.88", linewidth=0, label="calibrated, 95 %")
    ax.plot((0, 1), (0, 1), color=_GRAY, linewidth=0.6)
    for i, (name, distribution) in enumerate(named.items()):
        ax.plot(
            levels,
            metrics.observed_fractions(y, distribution, levels),
            color=_COLORS[i % len(_COLORS)],
            linestyle=_LINE_STYLES[i % len(_LINE_STYLES)],
            linewidth=1.2,
            label=f"{name}, ECE {metrics.ece(y, distribution):.1f} %".removeprefix(", "),
        )
    ticks = np.linspace(0, 1, 6)
    ax.set(xlabel="expected fraction", ylabel="observed fraction", xticks=ticks, yticks=ticks)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    _add_legend(ax, loc="best")
    return ax


def intervals(
    y: ArrayLike,
    distribution: Distribution,
    *,
    order: ArrayLike | None = None,
    confidence_levels: Sequence[float] = (0.9, 0.5),
    max_rows: int = 120,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """Predictions with central intervals, rows in the order of the predicted mean, the truth as dots.

    Targets outside the widest interval are crosses. The legend gives the fraction of **all** rows inside each
    interval; of more than `max_rows` rows, that many are drawn, evenly spaced in the order.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        order: values [n] to sort the rows by; None takes the predicted mean.
        confidence_levels: levels of the intervals.
        max_rows: how many rows are drawn at most.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or a level lies outside (0, 1).
        ImportError: if matplotlib is not installed.
    """
    mean = np.asarray(distribution.mean)
    targets = np.asarray(_checks.as_vector("y", y, length=len(mean)))
    keys = mean if order is None else np.asarray(_checks.as_vector("order", order, length=len(mean)))
    _checks.check_fraction("confidence_levels", np.asarray(confidence_levels))
    rows = np.argsort(keys, kind="stable")
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), max_rows)).round().astype(int)]
    mean, targets, places = mean[rows], targets[rows], np.arange(len(rows))
    levels = sorted(confidence_levels, reverse=True)
    bounds = [[np.asarray(bound)[rows] for bound in distribution.interval(level)] for level in levels]

    ax = ax or _new_axes(_PAGE_WIDTH, 2.7)
    bottom, top = _limits(targets, mean, *bounds[0])
    for level, (lower, upper), color in zip(levels, bounds, _shades(len(levels)), strict=True):
        fraction = metrics.coverage(y, distribution, confidence_level=level)
        # An infinite bar would not be drawn at all: cut it at the frame.
        lower, upper = lower.clip(bottom, top), upper.clip(bottom, top)
        label = f"{100 * level:g} % interval, holds {100 * fraction:.1f} %"
        ax.bar(places, upper - lower, bottom=lower, width=0.84, color=color, linewidth=0, label=label)
    ax.hlines(mean, places - 0.42, places + 0.42, color=_BLUE, linewidth=1, label="predicted mean")
    outside = (targets < bounds[0][0]) | (targets > bounds[0][1])
    ax.plot(places[~outside], targets[~outside], ".", color="black", markersize=3, label="truth")
    ax.plot(places[outside], targets[outside], "x", color=_RED, markersize=3.5, label="outside")
    shown = "rows" if len(rows) == len(keys) else f"{len(rows)} of {len(keys)} rows"
    by = "sorted by predicted mean" if order is None else "in the given order"
    ax.set(xlabel=f"{shown}, {by}", ylabel="target", ylim=(bottom, top), xlim=(-1, len(rows)))
    ax.set_xticks([])
    is_wide = ax.get_window_extent().width / ax.figure.dpi > 1.2 * _COLUMN_WIDTH
    columns = len(levels) + 3 if is_wide else 2
    _add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, columnspacing=1.2)
    return ax


def residuals(
    y: ArrayLike, distribution: Distribution, *, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Standardized residuals (y - mean) / std against the predicted mean, with guides at ±1.96.

    If the forecast is normal and calibrated, they scatter about 0 with the same spread everywhere, 5 % of
    them beyond the guides. The legend gives the fraction that is.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or a predicted std is not positive (as a `Point`'s is).
        ImportError: if matplotlib is not installed.
    """
    mean, std = np.asarray(distribution.mean), np.asarray(distribution.std)
    if not (std > 0).all():
        raise ValueError(f"Standardized residuals need a positive std; {np.sum(~(std > 0))} rows have none.")
    scores = (np.asarray(_checks.as_vector("y", y, length=len(mean))) - mean) / std
    outside = np.abs(scores) > 1.96
    ax = ax or _new_axes(_COLUMN_WIDTH, 2.5)
    ax.axhline(0, color=_GRAY, linewidth=0.6)
    for guide in (-1.96, 1.96):
        ax.axhline(guide, color=_GRAY, linewidth=0.6, linestyle="--")
    label = f"{100 * outside.mean():.1f} % beyond ±1.96"
    many = len(mean) > 5000  # a vector graphic of that many dots is slow to open
    ax.plot(mean[~outside], scores[~outside], ".", color=_BLUE, markersize=3, rasterized=many)
    ax.plot(mean[outside], scores[outside], "x", color=_RED, markersize=3.5, label=label, rasterized=many)
    reach = 1.1 * max(3.0, np.abs(scores).max())
    ax.set(xlabel="predicted mean", ylabel="residual / predicted std", ylim=(-reach, reach))
    _add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def tree(
    fitted: "USNRT",
    names: Sequence[str] | None = None,
    *,
    member: int = 0,
    ax: "matplotlib.axes.Axes | None" = None,
) -> "matplotlib.axes.Axes":
    """The tree of `predictors.usnrt` as an outline, a line for every node, below each one its left and its right side.

    A line has the condition that leads to the node and its training rows; where it is split, |T| of Levene's test and
    the std of the residuals on the right over that on the left, with its 95 % interval. The bar of a leaf is as long as
    the root mean square of its training residuals, in the unit of the target; before it stands the leaf's number, as
    `USNRT.apply` gives it. What is too long for its place is cut.

    Args:
        fitted: the module that `usnrt.fit` made.
        names: the names of the columns of x; by default those of the data frame of the fit, or x[0], x[1], ...
        member: which tree of an ensemble.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if there is another number of names than columns.
        ImportError: if matplotlib is not installed.
    """
    root = fitted.root(names, member=member)
    lines = list(_outline(root))
    # The layout of a new figure lets the axes fill it, but not before it is drawn.
    inches = _PAGE_WIDTH if ax is None else ax.get_window_extent().width / ax.figure.dpi
    ax = ax or _new_axes(_PAGE_WIDTH, 0.2 * (len(lines) + 2))
    small = 0.85 * ax.xaxis.label.get_fontproperties().get_size_in_points()
    indent = min(0.025, 0.2 / max(root.depth(), 1))
    longest = max(leaf.rmse for leaf in root.leaves()) or 1.0
    write = partial(ax.text, va="center", fontsize=small)
    for place, title in zip(_TREE_COLUMNS, ("rows", "|T|", "ratio of stds", "leaf, rmse"), strict=True):
        write(place, -1, title, ha="right" if place < _TREE_COLUMNS[-1] else "left", color="0.4")
    for row, (level, above, branch) in enumerate(lines):
        start = indent * level
        if branch.condition:
            corner = start - 0.6 * indent
            ax.plot((corner, corner, start - 0.1 * indent), (above + 0.4, row, row), color=_GRAY, linewidth=0.6)
        # A letter is about 0.6 times as wide as it is high.
        room = int((_TREE_COLUMNS[0] - 0.06 - start) * inches * 72 / (0.6 * small))
        write(start, row, _shortened(branch.condition or "all", room))
        cells = [f"{branch.num_rows}", "", ""]
        if branch.below:
            low, high = branch.std_ratio_interval
            cells[1:] = f"{branch.statistic:.1f}", f"{branch.std_ratio:.2f} ({low:.2f} to {high:.2f})"
        else:
            width = float(0.12 * branch.rmse / longest)
            write(_TREE_COLUMNS[-1], row, f"{branch.leaf}", color="0.4")
            ax.barh(row, width, left=_TREE_COLUMNS[-1] + 0.03, height=0.6, color=_BLUE)
            write(_TREE_COLUMNS[-1] + 0.035 + width, row, f"{branch.rmse:.3g}")
        for place, cell in zip(_TREE_COLUMNS, cells, strict=False):
            write(place, row, cell, ha="right")
    ax.set(xlim=(0, 1), ylim=(len(lines) - 0.4, -1.6))
    ax.set_axis_off()
    return ax


def _outline(branch: "Branch", level: int = 0, above: int = 0, row: int = 0) -> Iterator[tuple[int, int, "Branch"]]:
    """Every node from the root on, each one before its sides, with its level and the line of the node above."""
    yield level, above, branch
    below = row + 1
    for part in branch.below:
        found = list(_outline(part, level + 1, row, below))
        yield from found
        below += len(found)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _new_axes(width: float, height: float) -> "matplotlib.axes.Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'jaxcal[plots]'.") from error
    with plt.rc_context(_STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _add_legend(ax: "matplotlib.axes.Axes", **options: Any) -> None:
    """A legend without a frame, a little smaller than the labels of the axes."""
    size = 0.85 * ax.xaxis.label.get_fontproperties().get_size_in_points()
    ax.legend(frameon=False, fontsize=size, borderaxespad=0.3, handlelength=1.6, **options)


def _shades(count: int) -> list[tuple[float, ...]]:
    """Blues from pale to middling, for intervals from the widest to the narrowest."""
    red, green, blue = 0.0, 0.447, 0.698  # _BLUE
    weights = np.linspace(0.22, 0.5, count)
    return [tuple(1 - weight * (1 - part) for part in (red, green, blue)) for weight in weights]


def _limits(*values: np.ndarray) -> tuple[float, float]:
    """Limits of an axis that holds all finite values, with a margin."""
    finite = np.concatenate(values)
    finite = finite[np.isfinite(finite)]
    margin = 0.04 * (np.ptp(finite) or 1.0)
    return float(finite.min() - margin), float(finite.max() + margin)
