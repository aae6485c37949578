"""Draws the pictures of the other calibrators: docs/pictures/NAME.png.

`python docs/draw/calibrators.py` draws all of them, `python docs/draw/calibrators.py isotonic` the one that is named.
Every picture has fixed seeds.
"""

import jax.numpy as jnp
import numpy as np
from _common import KEY, draw_all, draw_band, draw_rows, noisy_sine, panels, save, std_of_sine

import jaxcal as jc
from jaxcal.plots import _style

GRID = np.linspace(-1, 1, 300)


def _skewed(n, seed):
    """Targets whose errors are skewed, and predictions with the right std."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=n)
    return mean + rng.exponential(size=n) - 1, jc.Normal(mean, np.ones(n))


def _reliability(ax, y, forecasts):
    """Fractions of targets below the predicted quantiles."""
    levels = np.linspace(0.01, 0.99, 99)
    ax.plot([0, 1], [0, 1], color=_style.GRAY, linewidth=0.6)
    for color, (name, forecast) in zip((_style.RED, _style.BLUE), forecasts.items(), strict=True):
        ax.plot(levels, jc.metrics.observed_fractions(y, forecast, levels), color=color, label=name)
    ax.set(xlabel="level", ylabel="fraction below the quantile")


def conditional_conformal():
    """Coverage along x, by one width and by features."""
    x, y = noisy_sine(800)
    x_new, y_new = noisy_sine(20_000, seed=1)
    model = lambda x: jc.Point(np.sin(3 * np.ravel(x)))
    features = lambda x: jnp.stack([jnp.ravel(x) > 0, jnp.ravel(x) > 0.5], axis=1).astype(float)
    fitted = jc.conditional_conformal.fit(x, model(x), y, features=features)
    one_width = jc.conformal.fit(None, model(x), y)
    figure, left, right = panels("Intervals by two overlapping groups", "Coverage of 90 % intervals along x")
    draw_band(left, GRID, fitted(GRID[:, None], model(GRID)))
    draw_rows(left, x, y)
    edges = np.linspace(-1, 1, 11)
    bins = np.digitize(x_new[:, 0], edges) - 1
    some = np.random.default_rng(0).permutation(20_000)[:4000]
    for color, name, forecast in (
        (_style.RED, "one width", one_width(None, model(x_new[some]))),
        (_style.BLUE, "by features", fitted(x_new[some], model(x_new[some]))),
    ):
        lower, upper = forecast.interval(0.9)
        inside = np.asarray((lower <= y_new[some]) & (y_new[some] <= upper))
        covered = [inside[bins[some] == k].mean() for k in range(10)]
        right.plot((edges[:-1] + edges[1:]) / 2, covered, "o-", color=color, markersize=3, label=name)
    right.axhline(0.9, color=_style.GRAY, linewidth=0.6)
    right.set(xlabel="x", ylabel="fraction inside", ylim=(0.5, 1.02))
    save(figure, "conditional_conformal")


def isotonic():
    """The map of probabilities, and reliability before and after."""
    y, base = _skewed(200, 0)
    y_new, new = _skewed(4000, 1)
    after = jc.isotonic.fit(None, base, y)(None, new)
    figure, left, right = panels("The isotonic map of 200 calibration rows", "Quantiles of new rows")
    pit = np.sort(np.asarray(base.cdf(y)))
    left.plot(pit, np.arange(1, 201) / 201, ".", color=_style.BLUE, markersize=3)
    left.plot([0, 1], [0, 1], color=_style.GRAY, linewidth=0.6)
    left.set(xlabel="predicted probability", ylabel="observed fraction")
    _reliability(right, y_new, {"before": new, "after": after})
    save(figure, "isotonic")


def gaussian_mle():
    """Predictions with a bias and too small stds, before and after."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 100)
    y = np.sin(3 * x) + 0.3 * rng.normal(size=100)
    base = lambda x: jc.Normal(np.sin(3 * x) + 0.3, np.full(len(x), 0.1))
    fitted = jc.gaussian_mle.fit(None, base(x), y)
    figure, left, right = panels("Before: biased, and stds too small", "After: one shift, one factor")
    for ax, forecast in ((left, base(GRID)), (right, fitted(None, base(GRID)))):
        draw_band(ax, GRID, forecast)
        draw_rows(ax, x, y)
    save(figure, "gaussian_mle")


def kmeans():
    """The std of each cluster."""
    x, y = noisy_sine(600)
    model = lambda x: jc.Point(np.sin(3 * np.ravel(x)))
    fitted = jc.kmeans.fit(x, model(x), y, key=KEY)
    figure, left, right = panels("Predictions with the std of their cluster", "The std")
    forecast = fitted(GRID[:, None], model(GRID))
    draw_band(left, GRID, forecast)
    draw_rows(left, x, y)
    right.plot(GRID, std_of_sine(GRID), color="k", linewidth=1, label="true")
    right.plot(GRID, forecast.std, color=_style.BLUE, label="k-means")
    right.set(xlabel="x", ylabel="std")
    save(figure, "kmeans")


def neural_quantiles():
    """Errors whose shape depends on the prediction, before and after."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 2000)
    y = x + np.where(x > 0, rng.exponential(0.5, 2000) - 0.5, 0.2 * rng.normal(size=2000))
    base = lambda x: jc.Normal(x, np.full(len(x), 0.4))
    fitted = jc.neural_quantiles.fit(None, base(x), y, key=KEY)
    figure, left, right = panels("Before: one normal distribution", "After: skewed where the errors are")
    for ax, forecast in ((left, base(GRID)), (right, fitted(None, base(GRID)))):
        draw_band(ax, GRID, forecast)
        draw_rows(ax, x[:500], y[:500])
    save(figure, "neural_quantiles")


DRAWN = (
    conditional_conformal,
    isotonic,
    gaussian_mle,
    kmeans,
    neural_quantiles,
)

if __name__ == "__main__":
    draw_all(DRAWN)
