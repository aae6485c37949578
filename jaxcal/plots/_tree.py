"""The picture of USNRT's tree: an outline with a line for every node."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxcal.plots import _style
from jaxcal.plots._style import Axes

if TYPE_CHECKING:
    from jaxcal.predictors._tree import Branch
    from jaxcal.predictors.usnrt import USNRT

# The columns beside the conditions. The numbers of the last column stand at the ends of bars.
_TITLES = ("rows", "|T|", "ratio of stds", "leaf", "rmse")
# The longest bar, and the least width of the conditions, as fractions of the picture's width.
_BAR, _CONDITIONS = 0.12, 0.35


def tree(fitted: "USNRT", names: Sequence[str] | None = None, *, member: int = 0, ax: Axes | None = None) -> Axes:
    """The tree of `predictors.usnrt` as an outline; below each node stand its left and its right side.

    Every node has a line, with the condition that leads to it and the number of its training rows. If it is split, the
    line has |T| of Levene's test. It also has the std of the residuals on the right over the std on the left, with the
    ratio's 95 % interval. The bar of a leaf is as long as the root mean square of its training residuals, in the unit
    of the target. The leaf's number stands before the bar, as `USNRT.apply` gives it. The font is as small as the axes
    need. A condition that is too long is cut in its middle.

    Args:
        fitted: the module that `usnrt.fit` made.
        names: the names of the columns of x. The default is the data frame's names in the fit, or x[0], x[1], ...
        member: the number of the tree in an ensemble.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the numbers of names and columns differ.
        ImportError: if matplotlib is not installed.
    """
    root = fitted.root(names, member=member)
    lines = list(_outline(root))
    ax = ax or _style.new_axes(_style.PAGE_WIDTH, 0.2 * (len(lines) + 2))
    ax.set(xlim=(0, 1), ylim=(len(lines) - 0.4, -1.6))
    ax.set_axis_off()
    table = [_cells(branch) for _, _, branch in lines]
    font, gap, ends = _columns(ax, [_TITLES, *table])
    write = partial(ax.text, va="center", fontsize=font, parse_math=False)
    bar = float(ends[-1] + gap / 2)
    for end, title in zip(ends[1:], _TITLES[:-1], strict=True):
        write(end, -1, title, ha="right", color="0.4")
    write(bar, -1, _TITLES[-1], color="0.4")
    indent = min(0.025, 0.2 / max(root.depth(), 1))
    longest = max(leaf.rmse for leaf in root.leaves()) or 1.0
    for row, ((level, above, branch), (*cells, rmse)) in enumerate(zip(lines, table, strict=True)):
        start = indent * level
        if branch.condition:
            corner = start - 0.6 * indent
            ax.plot((corner, corner, start - 0.1 * indent), (above + 0.4, row, row), color=_style.GRAY, linewidth=0.6)
        condition = write(start, row, branch.condition or "all")
        _style.shorten(condition, (ends[0] - start) * ax.get_window_extent().width)
        for end, cell in zip(ends[1:], cells, strict=True):
            write(end, row, cell, ha="right")
        if not branch.below:
            width = float(_BAR * branch.rmse / longest)
            ax.barh(row, width, left=bar, height=0.6, color=_style.BLUE)
            write(bar + width + gap / 3, row, rmse)
    return ax


def _outline(branch: "Branch", level: int = 0, above: int = 0, row: int = 0) -> Iterator[tuple[int, int, "Branch"]]:
    """Every node, beginning with the root and each before its sides, with its level and the line of the node above."""
    yield level, above, branch
    below = row + 1
    for part in branch.below:
        nodes = list(_outline(part, level + 1, row, below))
        yield from nodes
        below += len(nodes)


def _cells(branch: "Branch") -> tuple[str, ...]:
    """The text of a line in each column."""
    if not branch.below:
        return f"{branch.num_rows}", "", "", f"{branch.leaf}", f"{branch.rmse:.3g}"
    low, high = branch.std_ratio_interval
    ratio = f"{branch.std_ratio:.2f} ({low:.2f} to {high:.2f})"
    return f"{branch.num_rows}", f"{branch.statistic:.1f}", ratio, "", ""


def _columns(ax: Axes, table: Sequence[tuple[str, ...]]) -> tuple[float, float, np.ndarray]:
    """The font in points, and as fractions of the width the gap between columns and the ends of the columns.

    The first end is the end of the conditions. The last column, whose bars have a fixed width, ends at 1.
    """
    width, height = _style.size_in_pixels(ax)
    point = ax.figure.dpi / 72
    font = min(_style.small_font(ax), 0.7 * height / abs(np.subtract(*ax.get_ylim())) / point)
    probe = ax.text(0, 0, "", parse_math=False)

    def needed(text: str) -> float:
        probe.set(text=text, fontsize=font)
        return _style.width_of(probe) / width

    measure = lambda: np.array([max(map(needed, column)) for column in zip(*table, strict=True)])
    gap = 1.2 * font * point / width
    total, most = np.sum(measure() + gap), 1 - _BAR - _CONDITIONS
    if total > most:
        font, gap = font * most / total, gap * most / total
    ends = 1 - _BAR - np.cumsum((measure() + gap)[::-1])[::-1]
    probe.remove()
    return font, gap, ends
