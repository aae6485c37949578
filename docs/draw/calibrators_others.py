"""Draws the pictures of conditional conformal, isotonic, k-means, maximum likelihood and neural quantiles.

`python docs/draw/calibrators_others.py` draws all of docs/pictures/NAME.png, with names after it those alone. Every
picture has fixed seeds.
"""

import equinox as eqx
import numpy as np
from _common import KEY, draw_all, draw_band, draw_rows, noisy_sine, panels, save, std_of_sine

import jaxcal as jc
from jaxcal.plots import _style


def conditional_conformal():
    """The half widths over one input, and the coverage in groups that overlap."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (11000, 2))
    std = 1 + 2 * (x[:, 0] < 0) + (x[:, 1] > 0)
    y = std * rng.normal(size=11000)
    known, new = slice(0, 1000), slice(1000, None)
    groups = lambda x: np.stack([x[:, 0] < 0, x[:, 1] > 0], axis=1).astype(float)
    base, model = jc.Point(np.zeros(1000)), jc.Point(np.zeros(10000))
    forecasts = {
        "split": jc.conformal.fit(None, base, y[known])(None, model),
        "conditional": jc.conditional_conformal.fit(x[known], base, y[known], features=groups)(x[new], model),
    }
    left, top = groups(x[new]).astype(bool).T
    rows = {"left": left, "right": ~left, "top": top, "bottom": ~top, "all": left | ~left}
    figure, axis, right = panels("90 % intervals; the noise is larger on the left and the top", "Coverage in groups")
    axis.plot(x[new][:600, 0], y[new][:600], ".", color=_style.GRAY, markersize=2.5, zorder=0)
    for i, (name, forecast) in enumerate(forecasts.items()):
        lower, upper = (np.asarray(end) for end in forecast.interval(0.9))
        color, style = ((_style.RED, "--"), (_style.BLUE, "-"))[i]
        order = np.argsort(x[new, 0])
        for group, width in ((top, 1.6), (~top, 0.9)):
            at = order[group[order]]
            place = "top" if width > 1 else "bottom"
            axis.plot(x[new][at, 0], upper[at], style, color=color, linewidth=width, label=f"{name}, {place}")
            axis.plot(x[new][at, 0], lower[at], style, color=color, linewidth=width)
        inside = (lower <= y[new]) & (y[new] <= upper)
        covered = [inside[of].mean() for of in rows.values()]
        right.bar(np.arange(5) + 0.35 * i - 0.175, covered, 0.35, color=color, label=name)
    right.axhline(0.9, color="k", linewidth=0.8)
    right.set_xticks(np.arange(5), rows)
    axis.set(xlabel="first input", ylabel="y", ylim=(-12, 20))
    right.set(ylabel="fraction of rows inside", ylim=(0.7, 1.08))
    save(figure, "conditional_conformal")


def isotonic():
    """The map of probabilities, and a density before and after it."""
    rng = np.random.default_rng(0)
    y = 0.5 * (rng.exponential(size=500) - 1)
    base = jc.Normal(np.zeros(500), np.ones(500))
    fitted = jc.isotonic.fit(None, base, y)
    figure, left, right = panels("The map of probabilities, 500 rows", "The density")
    values = np.linspace(-3, 4, 400)
    wide = jc.Normal(np.zeros(400), np.ones(400))
    left.plot([0, 1], [0, 1], color="k", linewidth=0.8, label="a calibrated model")
    left.plot(wide.cdf(values), fitted(None, wide).cdf(values), color=_style.BLUE, label="isotonic")
    left.set(xlabel="predicted probability", ylabel="recalibrated probability")
    smooth = np.linspace(-1.5, 2.5, 81)
    cdf = np.asarray(fitted(None, jc.Normal(np.zeros(81), np.ones(81))).cdf(smooth))
    right.stairs(np.diff(cdf) / np.diff(smooth), smooth, color=_style.BLUE, label="isotonic, means over 0.05")
    right.plot(values, np.exp(wide.log_prob(values)), "--", color=_style.RED, label="model")
    true = np.where(values > -0.5, 2 * np.exp(-np.maximum(2 * values + 1, 0)), 0)
    right.plot(values, true, color="k", linewidth=0.8, label="true")
    right.set(xlabel="y", ylabel="density", xlim=(-2, 3))
    save(figure, "isotonic")


def kmeans():
    """The intervals of five clusters, and their stds beside the true one."""
    x, y = noisy_sine(600)
    mean = np.sin(3 * x[:, 0])
    fitted = jc.kmeans.fit(x, jc.Point(mean), y, key=KEY)
    grid = np.linspace(-1, 1, 400)
    forecast = fitted(grid, jc.Point(np.sin(3 * grid)))
    figure, left, right = panels("90 % interval, five clusters", "Std")
    draw_rows(left, x, y)
    draw_band(left, grid, forecast)
    right.plot(grid, std_of_sine(grid), color="k", linewidth=1, label="true")
    right.plot(grid, forecast.std, color=_style.BLUE, label="five clusters")
    right.axhline(np.std(y - mean), color=_style.RED, linestyle="--", linewidth=1, label="one std for all rows")
    left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    right.set(xlabel="x", ylabel="std", ylim=(0, 1))
    save(figure, "kmeans")


def gaussian_mle():
    """The coverage by the number of rows, and the density that one set of five rows gives."""
    rng = np.random.default_rng(0)
    sizes = (4, 5, 7, 10, 20, 40)
    kinds = {'preset="paper"': {"preset": "paper", "shift": "none"}, 'shift="none"': {"shift": "none"}}
    colors = ((_style.RED, "--"), (_style.BLUE, "-"))
    new = rng.normal(size=5000)
    figure, left, right = panels("Coverage of 90 % intervals, 2000 calibration sets", "Density from five rows")
    model = jc.Normal(np.zeros(1), np.ones(1))
    covered = {name: [] for name in kinds}
    for size in sizes:
        base, sets = jc.Normal(np.zeros(size), np.ones(size)), rng.normal(size=(2000, size))
        for name, options in kinds.items():
            end = lambda y, base=base, options=options: jc.gaussian_mle.fit(None, base, y, **options)(
                None, model
            ).interval(0.9)[1][0]
            ends = np.asarray(eqx.filter_vmap(end)(sets))
            covered[name].append((np.abs(new) <= ends[:, None]).mean())
    values, five = np.linspace(-5, 5, 400), jc.Normal(np.zeros(5), np.ones(5))
    wide, y = jc.Normal(np.zeros(400), np.ones(400)), rng.normal(size=5)
    for (name, options), (color, style) in zip(kinds.items(), colors, strict=True):
        left.plot(sizes, covered[name], style, marker=".", color=color, label=name)
        density = np.exp(jc.gaussian_mle.fit(None, five, y, **options)(None, wide).log_prob(values))
        right.plot(values, density, style, color=color, label=name)
    left.axhline(0.9, color="k", linewidth=0.8)
    right.plot(y, np.zeros(5), "o", color="k", markersize=3, label="the five errors", clip_on=False)
    left.set(xlabel="calibration rows", ylabel="fraction of new rows inside", ylim=(0.7, 1))
    right.set(xlabel="error, in predicted stds", ylabel="density")
    save(figure, "gaussian_mle")


def neural_quantiles():
    """Quantiles by the predicted std, and how often they hold where that is small."""
    rng = np.random.default_rng(0)
    std = rng.uniform(0.5, 1.5, 6000)
    y = std * np.where(std > 1, 1, -1) * (rng.exponential(size=6000) - 1)
    known, new = slice(0, 2000), slice(2000, None)
    base, grid = jc.Normal(np.zeros(2000), std[known]), np.linspace(0.5, 1.5, 200)
    network = jc.neural_quantiles.fit(None, base, y[known], key=KEY, pretraining_epochs=50, max_epochs=200)
    map_of_levels = jc.isotonic.fit(None, base, y[known])
    figure, left, right = panels("Quantiles 0.05 and 0.95", "New rows of a predicted std below 1")
    draw_rows(left, std[known], y[known])
    levels, small = np.linspace(0.05, 0.95, 19), std[new] < 1
    right.plot([0, 1], [0, 1], color="k", linewidth=0.8, label="exact")
    fitted = {"isotonic": (map_of_levels, _style.RED, "--"), "neural_quantiles": (network, _style.BLUE, "-")}
    for name, (calibrator, color, style) in fitted.items():
        along = calibrator(None, jc.Normal(np.zeros(200), grid))
        left.plot(grid, along.icdf(0.05), style, color=color, label=name)
        left.plot(grid, along.icdf(0.95), style, color=color)
        forecast = calibrator(None, jc.Normal(np.zeros(4000), std[new]))
        below = [(y[new] < forecast.icdf(level))[small].mean() for level in levels]
        right.plot(levels, below, style, color=color, label=name)
    left.set(xlabel="predicted std", ylabel="error", ylim=(-5, 6))
    right.set(xlabel="level", ylabel="fraction of rows below")
    save(figure, "neural_quantiles")


if __name__ == "__main__":
    draw_all()
