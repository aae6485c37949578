"""Pictures of standardized residuals, which test the predicted mean and std."""

import numpy as np
from jaxtyping import ArrayLike

from jaxcal.distributions import Distribution
from jaxcal.plots import _style
from jaxcal.plots._style import Axes, Forecasts

# The most of the sorted residuals that are drawn: as many as a curve needs.
_MOST_POINTS = 400


def residuals(y: ArrayLike, distribution: Distribution, *, ax: Axes | None = None) -> Axes:
    """Standardized residuals (y - mean) / std against the predicted mean, with guides at ±1.96.

    If the forecast is normal and calibrated, they scatter about 0 with the same spread everywhere, and 5 % of them lie
    beyond the guides. The legend gives the observed fraction beyond the guides.

    Args:
        y: targets [n].
        distribution: predictions of n rows.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, or a predicted std is not positive (as a `Point`'s is) or not finite.
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> ax = jc.plots.residuals(np.array([0.0, 1.0, 2.0, 3.0]), jc.Normal(np.zeros(4), 1.0))
        >>> print(ax.get_legend().get_texts()[0].get_text())
        50.0 % beyond ±1.96
    """
    mean, scores = np.asarray(distribution.mean), _standardized(y, distribution)
    outside = np.abs(scores) > 1.96
    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, 2.5)
    ax.axhline(0, color=_style.GRAY, linewidth=0.6)
    for guide in (-1.96, 1.96):
        ax.axhline(guide, color=_style.GRAY, linewidth=0.6, linestyle="--")
    label = f"{100 * outside.mean():.1f} % beyond ±1.96"
    many = len(mean) > _style.MANY_ROWS
    ax.plot(mean[~outside], scores[~outside], ".", color=_style.BLUE, markersize=3, rasterized=many)
    ax.plot(mean[outside], scores[outside], "x", color=_style.RED, markersize=3.5, label=label, rasterized=many)
    reach = 1.1 * max(3.0, np.abs(scores).max())
    _style.finish(ax, "predicted mean", "residual / predicted std", (-reach, reach))
    return ax


def z_scores(y: ArrayLike, distributions: Forecasts, *, ax: Axes | None = None) -> Axes:
    """Quantiles of z = (y - mean) / std against quantiles of the standard normal distribution.

    The curve of a calibrated normal forecast lies near the diagonal. At each point it is inside the gray band 95 % of
    the time. Other curves have a meaning:

    - If the slope is above 1, the predicted std is too small.
    - If the curve is shifted up, the predicted mean is too low.
    - If the ends bend away from the diagonal, the tails are heavier than the normal distribution's.

    The legend gives the std of z, the root mean squared deviation from its mean, which should be 1. For forecasts that
    are not normal, take `pit_histogram`.

    The value number k of n in increasing order stands above the normal quantile of (k - 1/2) / n. The level of its
    quantile has the distribution Beta(k, n + 1 - k), which gives the band. If there are many rows, some values are
    drawn: the outermost ones, and others evenly spaced.

    Args:
        y: targets [n].
        distributions: predictions of n rows, or several by name.
        ax: where to draw; a new figure if None.

    Raises:
        ValueError: if the lengths do not match, there is nothing to draw, or a predicted std is not positive (as a
            `Point`'s is) or not finite.
        ImportError: if matplotlib is not installed.

    Example:
        >>> import numpy as np, jaxcal as jc
        >>> y = np.random.default_rng(0).normal(size=200)
        >>> ax = jc.plots.z_scores(y, {"good": jc.Normal(np.zeros(200), 1.0), "narrow": jc.Normal(np.zeros(200), 0.5)})
        >>> print([text.get_text() for text in ax.get_legend().get_texts()])
        ['calibrated and normal, 95 %', 'good, std of z 0.96', 'narrow, std of z 1.92']
    """
    from scipy.special import betaincinv, ndtri  # comes with jax; slow to import

    named = _style.by_name(distributions)
    scores = {name: _standardized(y, distribution) for name, distribution in named.items()}
    number = np.size(y)
    ranks = _some_ranks(number)
    expected = ndtri((ranks - 0.5) / number)
    ax = ax or _style.new_axes(_style.COLUMN_WIDTH, _style.COLUMN_WIDTH)
    # The level of the value number k has the distribution Beta(k, n + 1 - k).
    band = (ndtri(betaincinv(ranks, number + 1 - ranks, level)) for level in (0.025, 0.975))
    ax.fill_between(expected, *band, color=_style.PALE, linewidth=0, label="calibrated and normal, 95 %")
    ax.plot(expected, expected, color=_style.GRAY, linewidth=0.6)
    for i, (name, values) in enumerate(scores.items()):
        label = _style.label_of(name, f"std of z {values.std():.2f}")
        drawn = np.sort(values)[ranks - 1]
        ax.plot(expected, drawn, linewidth=1.2, marker=".", markersize=2.5, label=label, **_style.curve_style(i))
    _style.finish(ax, "standard normal quantile", "quantile of (y - mean) / std")
    return ax


def _standardized(y: ArrayLike, distribution: Distribution) -> np.ndarray:
    """The residuals over the predicted std."""
    targets, std = _style.as_targets(y, distribution), np.asarray(distribution.std)
    good = (std > 0) & np.isfinite(std)
    if not good.all():
        raise ValueError(f"Standardized residuals need a positive, finite std; {np.sum(~good)} rows have none.")
    return (targets - np.asarray(distribution.mean)) / std


def _some_ranks(number: int) -> np.ndarray:
    """Ranks from 1 to `number`, at most `_MOST_POINTS`, whose normal quantiles are about evenly spaced."""
    from scipy.special import ndtr, ndtri

    # Rank k is at the level (k - 1/2) / n, so k = n level + 1/2.
    end = -ndtri(0.5 / number)
    levels = ndtr(np.linspace(-end, end, _MOST_POINTS))
    return np.unique(np.clip(np.rint(number * levels + 0.5), 1, number)).astype(int)
