"""Pictures of the widths of central intervals: their distribution, and their mean against the coverage."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks
from jaxcal.distributions import Distribution
from jaxcal.guarantee import calibrated_band
from jaxcal.plots import _style
from jaxcal.plots._style import Axes, Forecasts


def widths(distributions: Forecasts, *, confidence_level: float = 0.9, bins: int = 30, ax: Axes | None = None) -> Axes:
    """Histogram of the widths of the central intervals, as fractions of the rows in each bin.

    The legend gives the mean width, or the median if some widths are infinite. Infinite widths have their own bar on
    the right, at ∞, and the legend gives their number. Widths that are the same in all rows are a vertical line.

    Args:
        distributions: predictions of n rows, or several by name.
        confidence_level: the level of the interval.
        bins: the number of bins, of equal width; all forecasts share them.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if there is nothing to draw, the level lies outside (0, 1), or there are fewer than 2 bins.
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> ax = jc.plots.widths(jc.Normal(np.zeros(3), np.array([1.0, 2.0, 3.0])))
        >>> print(ax.get_legend().get_texts()[0].get_text())
        mean 6.58
    """
    named = _style.by_name(distributions)
    _checks.check_at_least("bins", bins, 2)
    widths_by_name = {name: _widths_of(distribution, confidence_level) for name, distribution in named.items()}
    edges = _edges([values[np.isfinite(values)] for values in widths_by_name.values()], bins)
    infinite = [float(np.mean(np.isinf(values))) for values in widths_by_name.values()]
    fractions = [np.histogram(values, edges)[0] / len(values) for values in widths_by_name.values()]
    # A forecast whose widths are all in one bin is drawn as a line. A bar would leave no room for the others.
    top = 1.05 * max([*infinite, *(float(fraction.max()) for fraction in fractions if fraction.max() < 1)]) or 1.0
    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 2.5)
    for i, ((name, values), fraction) in enumerate(zip(widths_by_name.items(), fractions, strict=True)):
        style = {**_style.curve_style(i), "linewidth": 1.2, "label": _style.label_of(name, _center(values))}
        if fraction.max() == 1:
            ax.plot((values.mean(), values.mean()), (0, top), **style)
        else:
            ax.stairs(fraction, edges, **style)
    ax.set_xlim(*_style.limits(edges))
    if any(infinite):
        _draw_infinite(ax, infinite, edges)
    _style.finish(ax, f"width of the {100 * confidence_level:g} % interval", "fraction of the rows", (0.0, top))
    return ax


def _draw_infinite(ax: Axes, fractions: Sequence[float], edges: np.ndarray) -> None:
    """Draw bars at ∞, to the right of the bins: the fraction of the rows, for every forecast with infinite widths."""
    low, high = edges[0], edges[-1]
    shown = np.flatnonzero(fractions).tolist()
    left, whole = high + 0.15 * (high - low), 0.08 * (high - low)
    width = whole / len(shown)
    for k, i in enumerate(shown):
        style = {"fill": False, "hatch": "//////", "edgecolor": _style.color_of(i)}
        ax.bar(left + k * width, fractions[i], width, align="edge", **style)
    ticks = ax.get_xticks()
    ax.set_xticks(ticks[(ticks >= low) & (ticks <= high)])
    ax.set_xticks([left + whole / 2], ["∞"], minor=True)
    ax.set_xlim(_style.limits(edges)[0], left + 1.5 * whole)


def _widths_of(distribution: Distribution, confidence_level: float) -> np.ndarray:
    _style.number_of_rows(distribution)
    lower, upper = _style.interval_of(distribution, confidence_level)
    return upper - lower


def _center(values: np.ndarray) -> str:
    """The mean width as a text; if some widths are infinite, the median and the number of infinite widths."""
    infinite = np.isinf(values).sum()
    if not infinite:
        return f"mean {values.mean():.3g}"
    return f"median {np.median(values):.3g} ({infinite} infinite)".replace("inf ", "∞ ")


def _edges(finite: Sequence[np.ndarray], bins: int) -> np.ndarray:
    """The edges of bins for all finite widths; widths that differ by rounding lie in the middle of one bin."""
    values = np.concatenate(finite).astype(float)
    low, high = (values.min(), values.max()) if values.size else (0.0, 1.0)
    # The bins are a little wider than needed, with a width above 0 also if all widths are equal.
    width = 1.01 * (max(high - low, 0.1 * high) or 1.0) / (bins - 1)
    start = max(0.0, (low + high) / 2 - (bins // 2 + 0.5) * width)
    return start + width * np.arange(bins + 1)


def width_against_coverage(
    y: ArrayLike, distributions: Forecasts, *, confidence_levels: Sequence[float] = (0.9,), ax: Axes | None = None
) -> Axes:
    """Mean width of the central intervals against their coverage: a mark for each method, a curve at several levels.

    Good methods lie low, and not to the left of the nominal level, a dashed line. The gray band about it is the central
    95 % of Binomial(n, confidence_level) / n. If the intervals are exact, the coverage of n rows lies in the band 95 %
    of the time. If an interval of any method is infinite, the widths are medians, as the axis says. The legend then
    gives the number of rows with infinite widths. A median that is itself infinite is an arrow at the upper edge.

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        confidence_levels: levels of the intervals.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, there is nothing to draw, or a level lies outside (0, 1).
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.random.default_rng(0).normal(size=200)
        >>> forecasts = {"good": jc.Normal(np.zeros(200), 1.0), "wide": jc.Normal(np.zeros(200), 2.0)}
        >>> ax = jc.plots.width_against_coverage(y, forecasts)
        >>> print(ax.get_xlabel(), "|", ax.get_ylabel())
        coverage of the 90 % interval | mean width
    """
    named = _style.by_name(distributions)
    _checks.check_fraction("confidence_levels", np.asarray(confidence_levels))
    levels = sorted(confidence_levels)
    measures = {name: _coverages_and_widths(y, distribution, levels) for name, distribution in named.items()}
    infinite = {name: np.isinf(widths).any(axis=0).sum() for name, (_, widths) in measures.items()}
    average = np.median if any(infinite.values()) else np.mean
    bands = [calibrated_band(level, np.size(y)) for level in levels]
    points = [(coverages, average(widths, axis=1)) for coverages, widths in measures.values()]
    top = _style.limits(np.zeros(1), *(widths for _, widths in points))[1]

    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 2.7)
    for i, (level, band) in enumerate(zip(levels, bands, strict=True)):
        labels = ("_", "_") if i else ("calibrated, 95 %", "nominal level")
        ax.fill_betweenx((0, top), *band, color=_style.PALE, linewidth=0, label=labels[0])
        ax.vlines(level, 0, top, color=_style.GRAY, linewidth=0.6, linestyle="--", label=labels[1])
    for i, (name, (coverages, widths)) in enumerate(zip(measures, points, strict=True)):
        note = f" ({infinite[name]} infinite)" if infinite[name] else ""
        style = {**_style.curve_style(i), **_style.marker_style(i), "markersize": 4, "linewidth": 1}
        ax.plot(coverages, widths.clip(max=top), label=f"{name or 'forecast'}{note}", **style)
        _style.mark_infinite(ax, coverages, (widths, widths), (0.0, top), color=style["color"])
    ax.set_xlim(*_style.limits(np.ravel(bands), *(coverages for coverages, _ in points)))
    one = f" of the {100 * levels[0]:g} % interval" if len(levels) == 1 else ""
    _style.finish(ax, f"coverage{one}", f"{average.__name__} width", (0.0, top))
    return ax


def _coverages_and_widths(
    y: ArrayLike, distribution: Distribution, levels: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The coverage at every level [k], and the widths [k, n]."""
    targets = _style.as_targets(y, distribution)
    ends = [_style.interval_of(distribution, level) for level in levels]
    coverages = np.array([np.mean((lower <= targets) & (targets <= upper)) for lower, upper in ends])
    return coverages, np.array([upper - lower for lower, upper in ends])
