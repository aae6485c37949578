"""The common parts of pictures: colors, sizes, new figures, texts and legends that fit, marks of infinite intervals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks
from jaxcal.distributions import Distribution

if TYPE_CHECKING:  # an extra
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend
    from matplotlib.text import Text
else:
    Artist = Axes = Legend = Text = Any

# The input of a picture: predictions of n rows, or several by name.
Forecasts = Distribution | Mapping[str, Distribution]
# The lower and the upper ends of every row's interval.
Interval = tuple[np.ndarray, np.ndarray]

# Okabe and Ito's palette, which color-blind readers can distinguish. The line styles and the markers
# distinguish the forecasts in gray.
BLUE, RED = "#0072B2", "#D55E00"
COLORS = (BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
GRAY, PALE = "0.55", "0.88"

# The style of a new figure. The caller's `ax` keeps the caller's style.
STYLE: dict[Any, Any] = {
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
COLUMN_WIDTH = 3.3  # inches, a column of most journals
PAGE_WIDTH = 6.8

MANY_ROWS = 5000  # more dots are drawn as an image, because a vector graphic of them is slow to open
SMALLEST_FONT = 5.0  # points

_Place = Literal["best", "upper left"]


# Input


def by_name(distributions: Forecasts) -> dict[str, Distribution]:
    """The forecasts by name; a single one has the name "".

    Raises:
        ValueError: if there are none.
    """
    if isinstance(distributions, Distribution):
        return {"": distributions}
    if not distributions:
        raise ValueError("distributions is empty: there is nothing to draw.")
    return dict(distributions)


def number_of_rows(distribution: Distribution) -> int:
    """How many rows there are.

    Raises:
        ValueError: if there are several outputs or runs.
    """
    shape = distribution.mean.shape
    if len(shape) != 1:
        raise ValueError(f"A picture takes predictions of shape (n,); got {shape}: draw one output or run at a time.")
    return shape[0]


def as_targets(y: ArrayLike, distribution: Distribution) -> np.ndarray:
    """The targets [n] as a NumPy array.

    Raises:
        ValueError: if their number differs from the number of predictions.
    """
    return np.asarray(_checks.as_vector("y", y, length=number_of_rows(distribution)))


def interval_of(distribution: Distribution, confidence_level: float) -> Interval:
    """The ends of the central interval as NumPy arrays."""
    lower, upper = distribution.interval(confidence_level)
    return np.asarray(lower), np.asarray(upper)


def color_of(i: int) -> str:
    """The color of the forecast number i."""
    return COLORS[i % len(COLORS)]


def curve_style(i: int) -> dict[str, Any]:
    """The style of the curve of the forecast number i; a color that is used again has another line style."""
    return {"color": color_of(i), "linestyle": LINE_STYLES[(i + i // len(COLORS)) % len(LINE_STYLES)]}


def marker_style(i: int) -> dict[str, Any]:
    """The style of the marks of the forecast number i; a color that is used again has another marker."""
    return {"color": color_of(i), "marker": MARKERS[(i + i // len(COLORS)) % len(MARKERS)]}


def label_of(name: str, note: str) -> str:
    """A forecast's entry in the legend; only the note if it has no name."""
    return f"{name}, {note}" if name else note


# Axes and their limits


def new_axes(width: float, height: float) -> Axes:
    """The axes of a new figure of this size in inches."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'jaxcal[plots]'.") from error
    with plt.rc_context(STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained")[1]


def limits(*values: np.ndarray) -> tuple[float, float]:
    """The limits of an axis for all finite values, with a margin."""
    finite = np.concatenate(values)
    finite = finite[np.isfinite(finite)]
    margin = 0.04 * (np.ptp(finite) or 1.0)
    return float(finite.min() - margin), float(finite.max() + margin)


def shades(count: int) -> list[tuple[float, ...]]:
    """Blues from pale to medium, for intervals from the widest to the narrowest."""
    red, green, blue = 0.0, 0.447, 0.698  # BLUE
    weights = np.linspace(0.22, 0.5, count)
    return [tuple(1 - weight * (1 - part) for part in (red, green, blue)) for weight in weights]


# Texts and legends that fit


def font_of(text: Text) -> float:
    """The size of a text's letters, in points."""
    return text.get_fontproperties().get_size_in_points()


def small_font(ax: Axes) -> float:
    """The size of the letters in a legend, in points: a little less than the size of the axes' labels."""
    return 0.85 * font_of(ax.xaxis.label)


def small_fonts(ax: Axes) -> list[float]:
    """The font sizes that are tried for texts inside the axes, from the largest."""
    size = small_font(ax)
    return [size, *(shrunk for shrunk in (0.85 * size, 0.7 * size) if shrunk > SMALLEST_FONT)]


def size_in_pixels(ax: Axes) -> tuple[float, float]:
    """The width and the height of the axes after the figure's layout."""
    engine = ax.figure.get_layout_engine()
    if engine is not None:
        engine.execute(ax.figure.figure)  # the whole figure, also of a subfigure
    ax.apply_aspect()
    box = ax.get_window_extent()
    return box.width, box.height


def width_of(drawn: Artist) -> float:
    """The greatest width of a text in pixels: its letters are up to 6 % wider at other resolutions."""
    return 1.06 * drawn.get_window_extent().width


def shorten(text: Text, room: float) -> None:
    """Cut a text in its middle until it is at most `room` pixels wide, if possible before the last comma."""
    whole = text.get_text()
    name, comma, note = whole.rpartition(", ")
    for long, rest in ((name, comma + note), (whole, "")) if comma else ((whole, ""),):
        for kept in range(len(long) - 1, 2, -1):
            if width_of(text) <= room:
                return
            end = kept // 2
            text.set_parse_math(False)  # half of a formula cannot be parsed
            text.set_text(f"{long[: kept - end]}…{long[len(long) - end :]}{rest}")


def finish(ax: Axes, x_label: str, y_label: str, frame: tuple[float, float] | None = None) -> None:
    """Name the axes, and add the legend inside them; above them it would overlap a title, or be cut.

    Args:
        ax: the axes with all that is drawn, and with the limits of the horizontal axis.
        x_label: the label of the horizontal axis, in a smaller font if it is longer than the axis.
        y_label: the label of the vertical axis, likewise.
        frame: the limits of the vertical axis; the legend lies above everything between them. None puts it where it
            covers the least, and keeps the limits.
    """
    ax.set(xlabel=x_label, ylabel=y_label)
    if frame is None:
        _add_legend(ax, loc="best", most_columns=1, most_height=0.6)
    else:
        _add_legend_above(ax, *frame)
    width, height = size_in_pixels(ax)
    for text, side, room in ((ax.xaxis.label, "width", width), (ax.yaxis.label, "height", height)):
        length = getattr(text.get_window_extent(), side)
        if length > room:
            text.set_fontsize(max(SMALLEST_FONT, font_of(text) * room / length))


def _add_legend_above(ax: Axes, bottom: float, top: float) -> None:
    """Add a legend at the upper edge, and set limits with room for it above `top`, also in axes that share them."""
    shared = [other for other in ax.get_shared_y_axes().get_siblings(ax) if other is not ax and other.has_data()]
    lowest, highest = ax.get_ylim() if shared else (bottom, top)
    bottom = min(bottom, lowest)
    ax.set_ylim(bottom, max(top, highest))
    entries = len(ax.get_legend_handles_labels()[0])
    legend = _add_legend(ax, loc="upper left", most_columns=entries, most_height=0.4)
    gap = 4 * ax.figure.dpi / 72
    covered = min((legend.get_window_extent().height + gap) / size_in_pixels(ax)[1], 0.8)
    ax.set_ylim(bottom, max(highest, bottom + (top - bottom) / (1 - covered)))


def _add_legend(ax: Axes, *, loc: _Place, most_columns: int, most_height: float) -> Legend:
    """A legend inside the axes, in a smaller font or with shorter names if it would not fit.

    Args:
        ax: the axes that it explains.
        loc: the place of the legend.
        most_columns: the most entries beside each other.
        most_height: the greatest fraction of the height that it covers, unless the font would become too small.
    """
    width, height = size_in_pixels(ax)
    width *= 0.97  # longer tick labels may later make the axes narrower
    *larger, smallest = small_fonts(ax)
    for font in larger:
        legend = _legend_in_columns(ax, loc, font, most_columns, width)
        if width_of(legend) <= width and legend.get_window_extent().height <= most_height * height:
            return legend
    legend = _legend_in_columns(ax, loc, smallest, most_columns, width)
    besides = width_of(legend) - max(map(width_of, legend.get_texts()))
    for text in legend.get_texts():
        shorten(text, width - besides)
    return legend


def _legend_in_columns(ax: Axes, loc: _Place, font: float, most: int, width: float) -> Legend:
    """A legend with the most columns, up to `most`, that fit into `width` pixels; with one column if none fits."""
    for columns in range(most, 1, -1):
        legend = _legend(ax, loc, font, columns)
        if width_of(legend) <= width:
            return legend
    return _legend(ax, loc, font, 1)


def _legend(ax: Axes, loc: _Place, font: float, columns: int) -> Legend:
    return ax.legend(
        loc=loc,
        fontsize=font,
        ncols=columns,
        frameon=True,  # white, so that it can be read above curves
        framealpha=0.8,
        edgecolor="none",
        fancybox=False,
        borderpad=0.2,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )


# Marks


def mark_infinite(
    ax: Axes, places: np.ndarray, interval: Interval, frame: tuple[float, float], *, label: str = "_", color: str = BLUE
) -> None:
    """Draw arrows at the ends of the frame where an interval is infinite.

    Args:
        ax: the axes to draw on.
        places: the places of the rows on the horizontal axis.
        interval: the ends of every row's interval.
        frame: the ends of the vertical axis, where the intervals are cut.
        label: the entry in the legend, which has it once. matplotlib's "_" stays out of the legend.
        color: the color of the arrows.
    """
    (lower, upper), (bottom, top) = interval, frame
    for rows, height, marker in ((np.isposinf(upper), top, 6), (np.isneginf(lower), bottom, 7)):  # tips at the frame
        if rows.any():
            heights = np.full(rows.sum(), height)
            ax.plot(places[rows], heights, linestyle="", marker=marker, markersize=4, color=color, label=label)
            label = "_"
