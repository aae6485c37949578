"""Pictures of the central intervals: for rows beside each other, and over a real axis."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks
from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Layout, Table, is_frame
from jaxcal.frames.values import numbers_in
from jaxcal.plots import _style
from jaxcal.plots._style import Axes, Interval

# The most targets over a real axis at which the band is still visible, and the most arrows that can be distinguished.
_MOST_TARGETS, _MOST_ARROWS = 1000, 30


def intervals(
    y: ArrayLike,
    distribution: Distribution,
    *,
    order: ArrayLike | None = None,
    confidence_levels: Sequence[float] = (0.9, 0.5),
    max_rows: int = 120,
    ax: Axes | None = None,
) -> Axes:
    """Predictions with central intervals, rows in the order of the predicted mean, the truth as dots.

    Targets outside the widest interval are crosses. The legend gives the fraction of **all** rows inside each interval.
    If there are more than `max_rows` rows, `max_rows` of them are drawn, evenly spaced in the order. An infinite widest
    interval is cut at the frame, with an arrow. The legend gives the number of such rows among **all** rows.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        order: values [n] to sort the rows by; None takes the predicted mean.
        confidence_levels: levels of the intervals.
        max_rows: the most rows that are drawn.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or a level lies outside (0, 1).
        ImportError: if matplotlib is not installed.

    Warns:
        UserWarning: once, if the distribution does not reach the ends of an interval.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> ax = jc.plots.intervals(np.zeros(3), jc.Normal(np.arange(3.0), 1.0))
        >>> print(ax.get_xlabel())
        rows, sorted by predicted mean
    """
    targets, mean = _style.as_targets(y, distribution), np.asarray(distribution.mean)
    keys = mean if order is None else np.asarray(_checks.as_vector("order", order, length=len(mean)))
    levels, bounds = _intervals_of(distribution, confidence_levels)
    labels = _labels(levels, bounds, targets)
    rows = _some(np.argsort(keys, kind="stable"), max_rows)
    mean, targets, places = mean[rows], targets[rows], np.arange(len(rows))
    infinite = f"infinite, {_is_infinite(bounds[0]).sum()} rows"
    bounds = [(lower[rows], upper[rows]) for lower, upper in bounds]

    ax = ax or _style.new_axes(_style.PAGE_WIDTH, 2.7)
    frame = _style.limits(targets, mean, *(end for interval in bounds for end in interval))
    for label, interval, color in zip(labels, bounds, _style.shades(len(levels)), strict=True):
        lower, upper = (end.clip(*frame) for end in interval)  # matplotlib does not draw an infinite bar
        ax.bar(places, upper - lower, bottom=lower, width=0.84, color=color, linewidth=0, label=label)
    ax.hlines(mean, places - 0.42, places + 0.42, color=_style.BLUE, linewidth=1, label="predicted mean")
    _draw_targets(ax, places, targets, bounds[0])
    _style.mark_infinite(ax, places, bounds[0], frame, label=infinite)
    shown = "rows" if len(rows) == len(keys) else f"{len(rows)} of {len(keys)} rows"
    by = "sorted by predicted mean" if order is None else "in the given order"
    ax.set(xlim=(-1, len(rows)), xticks=[])
    _style.finish(ax, f"{shown}, {by}", "target", frame)
    return ax


def prediction_band(
    x: Table,
    distribution: Distribution,
    *,
    y: ArrayLike | None = None,
    confidence_levels: Sequence[float] = (0.9, 0.5),
    ax: Axes | None = None,
) -> Axes:
    """The predicted mean over x as a line, with central intervals as bands, and the targets as dots.

    The bands are pointwise: each interval holds its own target with the given probability. Targets outside the widest
    band are crosses. The legend gives the fraction of **all** targets inside each band. If there are more than 1000
    targets, 1000 of them are drawn, evenly spaced in the order of x. An infinite widest band is cut at the frame, with
    arrows. The legend gives the number of rows with an infinite band.

    Args:
        x: the places of the predictions [n], in any order; or a data frame with one column.
        distribution: predictions of n rows.
        y: targets [n], if there are any.
        confidence_levels: levels of the intervals.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or a level lies outside (0, 1).
        ImportError: if matplotlib is not installed.

    Warns:
        UserWarning: once, if the distribution does not reach the ends of an interval.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> x = np.linspace(0, 1, 50)
        >>> ax = jc.plots.prediction_band(x, jc.Normal(np.sin(x), 0.1 + x), confidence_levels=[0.8])
        >>> print([text.get_text() for text in ax.get_legend().get_texts()])
        ['80 % interval', 'predicted mean']
    """
    number = _style.number_of_rows(distribution)
    places = np.asarray(_checks.as_vector("x", _only_column(x), length=number))
    targets = None if y is None else _style.as_targets(y, distribution)
    levels, bounds = _intervals_of(distribution, confidence_levels)
    rows = np.argsort(places, kind="stable")
    places, mean = places[rows], np.asarray(distribution.mean)[rows]
    targets = None if targets is None else targets[rows]
    bounds = [(lower[rows], upper[rows]) for lower, upper in bounds]

    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 2.7)
    drawn = [mean, *(end for interval in bounds for end in interval)]
    frame = _style.limits(*drawn) if targets is None else _style.limits(targets, *drawn)
    colors, many = _style.shades(len(levels)), number > _style.MANY_ROWS
    for label, (lower, upper), color in zip(_labels(levels, bounds, targets), bounds, colors, strict=True):
        ends = lower.clip(*frame), upper.clip(*frame)  # an infinite end would leave a gap
        ax.fill_between(places, *ends, color=color, linewidth=0, label=label, rasterized=many)
    ax.plot(places, mean, color=_style.BLUE, linewidth=1, label="predicted mean")
    lower, upper = bounds[0]
    if targets is not None:
        some = _some(np.arange(number), _MOST_TARGETS)
        _draw_targets(ax, places[some], targets[some], (lower[some], upper[some]), of=number)
    infinite = np.flatnonzero(_is_infinite(bounds[0]))
    some = _some(infinite, _MOST_ARROWS)
    _style.mark_infinite(ax, places[some], (lower[some], upper[some]), frame, label=f"infinite, {len(infinite)} rows")
    ax.set_xlim(*_style.limits(places))
    _style.finish(ax, "x", "target", frame)
    return ax


def _only_column(x: Table) -> Any:
    """The column of a frame that has no other; what is no frame as it is."""
    if not is_frame(x):
        return x
    names = Layout.of(x).names or ()
    if len(names) != 1:
        raise ValueError(f"x has {len(names)} columns, {', '.join(names)}: give the one that the picture is over.")
    return numbers_in(x, names[0])


def _intervals_of(distribution: Distribution, confidence_levels: Sequence[float]) -> tuple[list[float], list[Interval]]:
    """The levels from the highest to the lowest, and the intervals of all rows at each."""
    _checks.check_fraction("confidence_levels", np.asarray(confidence_levels))
    levels = sorted(confidence_levels, reverse=True)
    widest = [_style.interval_of(distribution, level) for level in levels[:1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the widest interval has warned already
        return levels, widest + [_style.interval_of(distribution, level) for level in levels[1:]]


def _labels(levels: Sequence[float], bounds: Sequence[Interval], targets: np.ndarray | None) -> list[str]:
    """The legend's text for each interval: its level, and the fraction of the targets inside, if there are any."""
    names = [f"{100 * level:g} % interval" for level in levels]
    if targets is None:
        return names
    inside = [np.mean((lower <= targets) & (targets <= upper)) for lower, upper in bounds]
    return [f"{name}, holds {100 * fraction:.1f} %" for name, fraction in zip(names, inside, strict=True)]


def _is_infinite(interval: Interval) -> np.ndarray:
    return np.isinf(interval[0]) | np.isinf(interval[1])


def _some(rows: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the rows, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(int)]


def _draw_targets(ax: Axes, places: np.ndarray, targets: np.ndarray, interval: Interval, of: int | None = None) -> None:
    """Draw targets as dots, or as crosses outside the interval; the legend says if they are some of `of` targets."""
    outside = (targets < interval[0]) | (targets > interval[1])
    label = "truth" if of in (None, len(targets)) else f"truth, {len(targets)} of {of}"
    ax.plot(places[~outside], targets[~outside], ".", color="black", markersize=3, label=label)
    ax.plot(places[outside], targets[outside], "x", color=_style.RED, markersize=3.5, label="outside")
