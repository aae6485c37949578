"""Pictures of calibration: reliability diagrams, PIT histograms, coverage by groups of rows."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from jaxcal import _checks, metrics
from jaxcal.distributions import Distribution
from jaxcal.frames.labels import ColumnBins
from jaxcal.functional import rounding
from jaxcal.guarantee import calibrated_band
from jaxcal.plots import _style
from jaxcal.plots._style import Axes, Forecasts

# The greatest fraction of the width for names and numbers beside a picture.
_MOST_TEXT = 0.65


def reliability_diagram(y: ArrayLike, distributions: Forecasts, *, ax: Axes | None = None) -> Axes:
    """The observed fraction of the targets below every predicted quantile, against the expected fraction.

    The curve of a calibrated forecast lies near the diagonal. At each level it is inside the gray band 95 % of the
    time. The band is the central 95 % of Binomial(n, p) / n, the distribution for n independent rows of a perfectly
    calibrated forecast. If the curve is steeper than the diagonal in the middle, the intervals are too wide. If it is
    flatter, they are too narrow. The legend gives the expected calibration error (`metrics.ece`).

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or there is nothing to draw.
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.random.default_rng(0).normal(size=200)
        >>> ax = jc.plots.reliability_diagram(y, {"wide": jc.Normal(np.zeros(200), 2.0)})
        >>> print(ax.get_legend().get_texts()[1].get_text())
        wide, ECE 10.6 %
    """
    named = _style.by_name(distributions)
    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, _style.COLUMN_WIDTH)
    levels = np.linspace(0, 1, 101)
    band = calibrated_band(levels, np.size(y))
    ax.fill_between(levels, *band, color=_style.PALE, linewidth=0, label="calibrated, 95 %")
    ax.plot((0, 1), (0, 1), color=_style.GRAY, linewidth=0.6)
    for i, (name, distribution) in enumerate(named.items()):
        fractions = metrics.observed_fractions(y, distribution, levels)
        label = _style.label_of(name, f"ECE {metrics.ece(y, distribution):.1f} %")
        ax.plot(levels, fractions, linewidth=1.2, label=label, **_style.curve_style(i))
    ticks = np.linspace(0, 1, 6)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=ticks, yticks=ticks)
    _style.finish(ax, "expected fraction", "observed fraction")
    return ax


def pit_histogram(y: ArrayLike, distributions: Forecasts, *, bins: int = 10, ax: Axes | None = None) -> Axes:
    """Histogram of the probability integral transform F(y) of every row (`metrics.pit`), as a density.

    The histogram of a calibrated forecast is about flat, at 1. In each bin it is inside the gray band 95 % of the time.
    The band is the central 95 % of Binomial(n, 1 / bins) / n, times the number of bins. A hump means that the intervals
    are too wide, and high ends mean that they are too narrow. A slope means that the predictions are too low or too
    high.

    If the distribution has an atom at the target, the row has no single value. It counts in every bin with the part of
    [F(y-), F(y)] that lies there. The transform of a `Point` is 0 below and 1 above the prediction.

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        bins: the number of bins, of equal width.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, there is nothing to draw, or there are fewer than 2 bins.
        ImportError: if matplotlib is not installed.

    Source: Czado, Gneiting and Held, Predictive model assessment for count data, Biometrics 65 (2009), section 2.1: the
    histogram without randomization.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.array([-2.0, -0.1, 0.1, 2.0])
        >>> ax = jc.plots.pit_histogram(y, jc.Normal(np.zeros(4), 1.0), bins=4)
        >>> print(ax.get_xlabel())
        probability integral transform
    """
    named = _style.by_name(distributions)
    _checks.check_at_least("bins", bins, 2)
    densities = {name: _pit_density(y, distribution, bins) for name, distribution in named.items()}
    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 2.5)
    low, high = (bins * end for end in calibrated_band(1 / bins, np.size(y)))
    ax.fill_between((0, 1), low, high, color=_style.PALE, linewidth=0, label="calibrated, 95 %")
    ax.plot((0, 1), (1, 1), color=_style.GRAY, linewidth=0.6)
    edges = np.linspace(0, 1, bins + 1)
    for i, (name, density) in enumerate(densities.items()):
        ax.stairs(density, edges, baseline=None, linewidth=1.2, label=name or "forecast", **_style.curve_style(i))
    ax.set_xlim(0, 1)
    highest = float(max(high, *(density.max() for density in densities.values())))
    _style.finish(ax, "probability integral transform", "density", (0.0, 1.05 * highest))
    return ax


def _pit_density(y: ArrayLike, distribution: Distribution, bins: int) -> np.ndarray:
    """The height of the histogram in every bin."""
    targets = _style.as_targets(y, distribution)
    upper = np.asarray(metrics.pit(targets, distribution))
    lower = np.asarray(metrics.pit(_just_below(targets.astype(upper.dtype), distribution), distribution))
    # If k / L and the edge j / bins are equal, they round to the same number, but only in the same precision.
    edges = np.arange(bins + 1, dtype=upper.dtype) / bins
    jumps = upper - lower > 8 * np.finfo(upper.dtype).eps
    counts = np.histogram(upper[~jumps], edges)[0].astype(float)
    upper, lower = upper[jumps, None].astype(float), lower[jumps, None].astype(float)
    # A jump adds to each bin the part of [F(y-), F(y)] in the bin, divided by F(y) - F(y-).
    counts += np.sum(np.diff((np.arange(bins + 1) / bins).clip(lower, upper)) / (upper - lower), axis=0)
    return counts * bins / len(targets)


def _just_below(targets: np.ndarray, distribution: Distribution) -> np.ndarray:
    """Values so little below the targets that nothing but an atom at the target lies between.

    A cdf counts values within rounding of a target (`functional.rounding`), so they are further below than rounding.
    """
    mean, std = (jnp.nan_to_num(each, posinf=0) for each in (distribution.mean, distribution.std))
    # The next smaller number is not enough: next to 0, compiled programs take it as 0.
    least = np.finfo(targets.dtype).tiny
    return targets - np.maximum(16 * np.asarray(rounding.tolerance(jnp.asarray(targets), mean, std)), least)


def coverage_by(
    y: ArrayLike,
    distributions: Forecasts,
    by: ArrayLike | Sequence,
    *,
    confidence_level: float = 0.9,
    bins: int = 10,
    ax: Axes | None = None,
) -> Axes:
    """Coverage of the central interval in groups of rows: by label, or by bins of a column of numbers.

    The gray bar of a group is the central 95 % of Binomial(m, confidence_level) / m. If the intervals are exact in this
    group, the coverage of its m rows lies in the bar 95 % of the time. One of 20 groups lies outside by chance. The
    numbers of rows are written beside the names. The legend gives the fraction of all rows that are covered.

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        by: labels [n], numbers or strings. If numbers have more than `bins` different values, they are cut into `bins`
            bins of about equally many rows (`labels.ColumnBins`). Else each value is a group.
        confidence_level: the level of the interval.
        bins: the number of bins of a column of numbers, 2 or more.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, there is nothing to draw, or the level lies outside (0, 1). Also if
            there are fewer than 2 bins, or a label is NaN.
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.random.default_rng(0).normal(size=200)
        >>> ax = jc.plots.coverage_by(y, jc.Normal(np.zeros(200), 1.0), np.where(y > 0, "positive", "negative"))
        >>> print([text.get_text() for text in ax.texts])
        ['negative', 'positive', '98', '102', 'rows']
    """
    named = _style.by_name(distributions)
    _checks.check_fraction("confidence_level", confidence_level)
    _checks.check_at_least("bins", bins, 2)
    groups, number = _groups(by, np.size(y), bins)
    rows = np.bincount(number, minlength=len(groups))
    covered = {name: _covered(y, distribution, confidence_level) for name, distribution in named.items()}
    fractions = {name: np.bincount(number, inside) / rows for name, inside in covered.items()}
    low, high = np.transpose([calibrated_band(confidence_level, count) for count in rows.tolist()])

    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 0.2 * (len(groups) + len(named)) + 0.9)
    places = -np.arange(len(groups))
    ax.barh(places, high - low, left=low, height=0.7, color=_style.PALE, label="calibrated, 95 %")
    ax.vlines(confidence_level, places[-1] - 0.5, 0.5, color=_style.GRAY, linewidth=0.6)
    for i, (name, fraction) in enumerate(fractions.items()):
        label = _style.label_of(name, f"{100 * covered[name].mean():.1f} % of all rows")
        beside = 0.6 * ((len(named) - 1) / 2 - i) / len(named)
        ax.plot(fraction, places + beside, linestyle="", markersize=3, label=label, **_style.marker_style(i))
    ax.set_yticks([])
    _style.finish(ax, f"coverage of the {100 * confidence_level:g} % interval", "", (places[-1] - 0.6, 1.4))
    _write_groups(ax, groups, rows, _style.limits(low, high, *fractions.values()))
    return ax


def _covered(y: ArrayLike, distribution: Distribution, confidence_level: float) -> np.ndarray:
    """Whether the interval holds the target, for every row."""
    targets = _style.as_targets(y, distribution)
    lower, upper = _style.interval_of(distribution, confidence_level)
    return (lower <= targets) & (targets <= upper)


def _groups(by: ArrayLike | Sequence, length: int, bins: int) -> tuple[list[str], np.ndarray]:
    """The names of the groups, and the number of every row's group."""
    labels = _checks.as_labels("by", by, length)
    values, number = np.unique(labels, return_inverse=True)
    if labels.dtype.kind not in "iuf":
        return [str(value) for value in values], number
    if len(values) <= bins:
        return [f"{value:g}" for value in values], number
    _checks.check_finite("by", labels)
    cut = ColumnBins.of(labels, number=bins)
    edges = _numbers(np.asarray(cut.edges))
    between = [f"{low} to {high}" for low, high in pairwise(edges)]
    return [f"up to {edges[0]}", *between, f"above {edges[-1]}"], np.asarray(cut(labels))


def _numbers(values: np.ndarray) -> list[str]:
    """Different numbers as different texts: with 3 digits if they are enough, or up to 6 for large numbers."""
    digits = max(3, min(6, len(f"{np.abs(values).max():.0f}")))
    written = lambda precision: [f"{value:.{precision}g}" for value in values]
    return written(next(precision for precision in range(digits, 18) if len({*written(precision)}) == len(values)))


def _write_groups(ax: Axes, groups: Sequence[str], rows: np.ndarray, frame: tuple[float, float]) -> None:
    """Write names and numbers of rows as columns on the left inside the axes, whose other part shows the frame."""
    from matplotlib.ticker import MaxNLocator

    width, height = _style.size_in_pixels(ax)
    point = ax.figure.dpi / 72
    line = height / np.ptp(ax.get_ylim()) / point
    write = partial(ax.text, 0, va="center", transform=ax.get_yaxis_transform(), parse_math=False)
    names = [write(-k, group) for k, group in enumerate(groups)]
    counts = [write(-k, f"{count}", ha="right") for k, count in enumerate(rows)]
    counts.append(write(0.9, "rows", ha="right", color="0.4"))
    width_of = lambda texts: max(map(_style.width_of, texts))

    def written_in(font: float) -> tuple[float, float]:
        """The gap between columns, and the room for the names, in pixels."""
        for text in names + counts:
            text.set_fontsize(min(font, 0.75 * line))
        gap = 0.8 * min(font, 0.75 * line) * point
        return gap, _MOST_TEXT * width - width_of(counts) - 3 * gap

    largest, *smaller = _style.small_fonts(ax)
    gap, room = written_in(largest)
    for font in smaller:
        if width_of(names) > room:
            gap, room = written_in(font)
    for text in names:
        _style.shorten(text, room)
        text.set_x(gap / width)
    end = 2 * gap + width_of(names) + width_of(counts)
    for text in counts:
        text.set_x(end / width)
    part = 1 - (end + gap) / width
    low, high = frame
    most = max(1, int(part * width / (4 * point * _style.font_of(ax.xaxis.label))))
    ticks = np.asarray(MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high))
    ax.set_xticks(ticks[(ticks >= low) & (ticks <= min(high, 1))])
    ax.set_xlim(high - (high - low) / part, high)
