"""Draws the pictures of the predictors, of the pipeline and of the online calibrators: docs/pictures/NAME.png.

`python docs/draw/predictors.py` draws all of them, `python docs/draw/predictors.py usnrt mlp` those that are named. It
takes some minutes. Every picture has fixed seeds.
"""

from functools import partial

import jax
import numpy as np
from _common import KEY, coverages, draw_all, draw_band, draw_coverage, draw_rows, noisy_sine, panels, save, std_of_sine

import jaxcal as jc
from jaxcal.functional import levene
from jaxcal.pipeline import Folds
from jaxcal.plots import _style


def usnrt():
    """The statistic of all splits of residuals, and the std of a tree beside that of one network."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1200, 2))
    std = lambda x: np.where(x[:, 1] > 0.2, 1.0, 0.1)
    y = np.sin(3 * x[:, 0]) + std(x) * rng.normal(size=1200)
    tree = jc.usnrt.fit(x, y, key=KEY, min_leaf=200, max_epochs=100)
    network = jc.variance_network.fit(x, y, key=KEY, max_epochs=100)

    figure, left, right = panels("Levene's test of every split of the residuals", "Std that is predicted, at a = 0")
    residuals = y - np.asarray(tree(x).mean)
    order = np.argsort(x[:, 1])
    left.plot(x[:, 1], residuals, ".", color=_style.GRAY, markersize=2.5, zorder=0)
    left.set(xlabel="feature b", ylabel="residual")
    statistics = left.twinx()
    statistics.plot(
        x[order[:-1], 1][199:-199],
        np.abs(levene.split_statistics(residuals[order]))[199:-199],
        color=_style.BLUE,
        label="|T| of a split at b",
    )
    statistics.axvline(0.2, color=_style.RED, linestyle="--", linewidth=1, label="largest |T|: the split")
    statistics.set_ylabel("|T|", fontsize=8)
    statistics.tick_params(labelsize=7)
    statistics.spines["right"].set_visible(True)
    statistics.set_ylim(0, 45)

    grid = np.stack([np.zeros(200), np.linspace(-1, 1, 200)], axis=1)
    right.plot(grid[:, 1], std(grid), color="k", linewidth=1, label="true")
    right.plot(grid[:, 1], network(grid).std, "--", color=_style.RED, label="one variance network")
    right.plot(grid[:, 1], tree(grid).std, color=_style.BLUE, label="USNRT, a network in each leaf")
    right.set(xlabel="feature b", ylabel="std", ylim=(0, 1.5))
    save(figure, "usnrt")


def gaussian_process():
    """A process after few rows, and the two models of the noise."""
    rng = np.random.default_rng(1)
    figure, left, right = panels("12 rows: wide where there are none", "Noise that depends on x")
    x = rng.uniform(0, 1, 12) ** 2 * 6
    y = np.sin(x) + 0.1 * rng.normal(size=12)
    grid = np.linspace(-1, 8, 300)
    draw_band(left, grid, jc.gaussian_process.fit(x, y)(grid))
    left.plot(x, y, "o", color="k", markersize=3)
    left.plot(grid, np.sin(grid), "k:", linewidth=0.8, label="true function")

    x = rng.uniform(0, 1, 300)
    y = np.sin(6 * x) + 10 ** (x - 1) * rng.normal(size=300)
    grid = np.linspace(0, 1, 300)
    draw_rows(right, x, y)
    for noise, color, style in ((jc.gp.GaussianNoise(), _style.RED, "--"), (jc.gp.InputNoise(), _style.BLUE, "-")):
        lower, upper = jc.gaussian_process.fit(x, y, noise=noise)(grid).interval(0.9)
        right.plot(grid, lower, style, color=color, linewidth=1.2, label=f"{type(noise).__name__}, 90 %")
        right.plot(grid, upper, style, color=color, linewidth=1.2)
    left.set(xlabel="x", ylabel="y", ylim=(-3, 4))
    right.set(xlabel="x")
    save(figure, "gaussian_process")


def mlp():
    """A network's predictions, and its errors on training rows and on new ones."""
    data = jc.datasets.load("concrete")
    train, test = jc.datasets.split(len(data.y), (0.3, 0.7), seed=0)
    network = jc.mlp.fit(data.x[train], data.y[train], key=KEY)
    figure, left, right = panels("Predictions of concrete, new rows", "Errors of the same network")
    predicted = np.asarray(network(data.x[test]).mean)
    ends = [data.y.min(), data.y.max()]
    left.plot(ends, ends, color="k", linewidth=0.8)
    left.plot(predicted, data.y[test], ".", color=_style.BLUE, markersize=2.5)
    left.set(xlabel="predicted strength, MPa", ylabel="true strength, MPa")
    bins = np.linspace(-20, 20, 41)
    for rows, color, name in ((train, _style.RED, "training rows"), (test, _style.BLUE, "new rows")):
        errors = data.y[rows] - np.asarray(network(data.x[rows]).mean)
        label = f"{name}, RMSE {np.sqrt(np.mean(errors**2)):.1f}"
        right.hist(errors, bins, density=True, histtype="step", color=color, label=label)
    right.set(xlabel="error, MPa", ylabel="density")
    save(figure, "mlp")


def deep_ensemble():
    """The members and the mixture, and the two parts of its std."""
    x, y = noisy_sine(300)
    ensemble = jc.deep_ensemble.fit(x, y, key=KEY, max_epochs=300)
    members = [jc.variance_network.fit(x, y, key=key, max_epochs=300) for key in jax.random.split(KEY, 5)]
    grid = np.linspace(-2.5, 2.5, 300)
    figure, left, right = panels("Five networks, and the mixture of five", "Std over the inputs")
    draw_rows(left, x, y)
    draw_band(left, grid, ensemble(grid), label="mixture, 90 % interval")
    for i, member in enumerate(members):
        left.plot(grid, member(grid).mean, color="k", linewidth=0.5, label="_" if i else "means of networks")
    left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    right.plot(grid, ensemble(grid).std, color=_style.BLUE, label="ensemble")
    for i, member in enumerate(members):
        right.plot(grid, member(grid).std, color="k", linewidth=0.5, label="_" if i else "single networks")
    right.axvspan(-1, 1, color=_style.PALE, linewidth=0, zorder=-1, label="where there are rows")
    right.set(xlabel="x", ylabel="std", ylim=(0, 1))
    save(figure, "deep_ensemble")


def dropout():
    """Some passes, and the band with and without the noise."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 200)
    y = np.sin(3 * x) + 0.3 * rng.normal(size=200)
    fit = partial(jc.dropout.fit, x, y, key=KEY, max_epochs=300)
    mixture, grid = fit(distribution="mixture")(np.linspace(-2, 2, 200)), np.linspace(-2, 2, 200)
    figure, left, right = panels("20 passes of one network", "90 % intervals")
    draw_rows(left, x, y)
    left.plot(grid, np.asarray(mixture.components.mean)[:20].T, color=_style.BLUE, linewidth=0.5, alpha=0.7)
    draw_rows(right, x, y)
    draw_band(right, grid, mixture, label="passes and noise")
    passes = np.asarray(mixture.components.mean)
    alone = jc.Normal(passes.mean(axis=0), passes.std(axis=0))
    draw_band(right, grid, alone, color=_style.RED, label="passes alone")
    left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    right.set(xlabel="x", ylim=(-3, 3))
    save(figure, "dropout")


def evidential():
    """The band, and the Student t density with little and with much evidence."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 500)
    y = np.sin(3 * x) + std_of_sine(x) * rng.standard_t(3, size=500)
    network = jc.evidential.fit(x, y, key=KEY, max_epochs=300)
    grid = np.linspace(-1, 1, 200)
    figure, left, right = panels("Errors with heavy tails", "Density of the target, by the evidence")
    draw_rows(left, x, y)
    draw_band(left, grid, network(grid))
    left.set(xlabel="x", ylabel="y", ylim=(-5, 5))
    values = np.linspace(-6, 6, 400)
    for i, (alpha, nu) in enumerate(((1.2, 0.5), (3, 3), (30, 30))):
        scale = np.sqrt((1 + nu) / nu)  # with beta equal to alpha
        density = np.exp(jc.StudentT(2.0 * alpha, np.zeros(400), scale).log_prob(values))
        right.plot(values, density, **_style.curve_style(i), label=rf"$\alpha$ = {alpha}, $\nu$ = {nu}")
    right.set(xlabel="error, in units of the noise", ylabel="density")
    save(figure, "evidential")


def variance_network():
    """The band, and the std beside the true one."""
    x, y = noisy_sine(600)
    network = jc.variance_network.fit(x, y, key=KEY)
    grid = np.linspace(-1, 1, 300)
    figure, left, right = panels("Mean and 90 % interval", "Std")
    draw_rows(left, x, y)
    draw_band(left, grid, network(grid))
    right.plot(grid, std_of_sine(grid), color="k", linewidth=1, label="true")
    right.plot(grid, network(grid).std, color=_style.BLUE, label="variance network")
    right.axhline(np.std(y - network(x).mean), color=_style.RED, linestyle="--", label="one std for all rows")
    left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
    right.set(xlabel="x", ylabel="std", ylim=(0, 1))
    save(figure, "variance_network")


def neural_process():
    """Predictions of a new curve from few and from more of its rows."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (200, 20, 1))
    y = np.sin(2 * x[..., 0] + rng.uniform(0, 2 * np.pi, (200, 1))) + 0.1 * rng.normal(size=(200, 20))
    process = jc.neural_process.fit(x, y, key=KEY, width=32, max_context=15, max_iterations=3000)
    new = rng.uniform(-2, 2, 15)
    target = np.sin(2 * new + 1) + 0.1 * rng.normal(size=15)
    grid = np.linspace(-2, 2, 200)
    figure, *axes = panels("3 rows are known", "6 rows", "15 rows")
    for ax, known in zip(axes, (3, 6, 15), strict=True):
        draw_band(ax, grid, process(grid, context=(new[:known], target[:known])))
        ax.plot(grid, np.sin(2 * grid + 1), "k:", linewidth=0.8, label="true function")
        ax.plot(new[:known], target[:known], "o", color="k", markersize=3)
        ax.set(xlabel="x", ylim=(-2.4, 2.4))
    axes[0].set_ylabel("y")
    for ax in axes[1:]:
        ax.legend([], frameon=False)
    save(figure, "neural_process")


def forests():
    """The intervals of a forest, and its density where the noise is skewed and where it has two modes."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 2000)
    skewed = 0.5 * rng.exponential(size=2000)
    two = 1.5 * rng.choice([-1, 1], 2000) + 0.25 * rng.normal(size=2000)
    y = np.where(x < 0, skewed, two)
    forest = jc.forests.fit(x, y, key=KEY, model="random_forest", num_trees=300, min_leaf_rows=20)
    grid = np.linspace(-1, 1, 300)
    figure, left, right = panels("Intervals over the inputs", "Density at two points")
    draw_rows(left, x[:500], y[:500])
    lower, upper = forest(grid).interval(0.9)
    left.fill_between(grid, lower, upper, color=_style.BLUE, alpha=0.25, linewidth=0, label="90 % interval")
    values = np.linspace(-3, 3.5, 400)
    for i, point in enumerate((-0.5, 0.5)):
        density = np.exp(forest(np.full(400, point)).log_prob(values))
        right.plot(values, density, **_style.curve_style(i), label=f"x = {point}")
    left.set(xlabel="x", ylabel="y")
    right.set(xlabel="y", ylabel="density")
    save(figure, "forests")


def quantile_boosting():
    """Quantiles as boosted, and corrected by held-out rows: how many new rows lie below each."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4000, 3))
    y = x[:, 0] + np.where(x[:, 1] > 0, 1.0, 0.2) * rng.exponential(size=4000)
    train, test = slice(0, 700), slice(700, 4000)
    levels = np.linspace(0.05, 0.95, 19)
    boosted = [HistGradientBoostingRegressor(loss="quantile", quantile=p, random_state=0) for p in levels]
    raw = np.stack([model.fit(x[train], y[train]).predict(x[test]) for model in boosted], axis=1)
    fitted = jc.quantile_boosting.fit(x[train], y[train], key=KEY, levels=levels)
    corrected = np.stack([np.asarray(fitted(x[test]).icdf(p)) for p in levels], axis=1)

    figure, left, right = panels("Quantiles along one feature", "New rows below each quantile")
    line = np.stack([np.zeros(200), np.linspace(-1, 1, 200), np.zeros(200)], axis=1)
    for number, level in ((0, 0.05), (18, 0.95)):
        left.plot(line[:, 1], boosted[number].predict(line), "--", color=_style.RED, linewidth=1)
        left.plot(line[:, 1], fitted(line).icdf(level), color=_style.BLUE, linewidth=1)
        true = np.where(line[:, 1] > 0, 1.0, 0.2) * -np.log(1 - level)
        left.plot(line[:, 1], true, color="k", linewidth=0.8)
    left.set(xlabel="second feature", ylabel="quantiles 0.05 and 0.95")
    right.plot([0, 1], [0, 1], color="k", linewidth=0.8, label="exact")
    right.plot(levels, (y[test, None] < raw).mean(axis=0), "--", color=_style.RED, label="as boosted")
    right.plot(levels, (y[test, None] < corrected).mean(axis=0), color=_style.BLUE, label="quantile_boosting")
    right.set(xlabel="level", ylabel="fraction of new rows")
    save(figure, "quantile_boosting")


def pipeline():
    """Errors on training rows and out of fold, and the coverage by each."""
    from sklearn.ensemble import GradientBoostingRegressor

    data = jc.datasets.load("auto_mpg")
    levels = np.linspace(0.1, 0.95, 18)
    covered = {"training errors": [], "jc.pipeline": []}
    for seed in range(10):
        train, test = jc.datasets.split(len(data.y), (0.6, 0.4), seed=seed)
        x, y = data.x[train], data.y[train]
        model = GradientBoostingRegressor(random_state=0).fit(x, y)
        fitted = jc.pipeline.fit(
            x, y, predictor=GradientBoostingRegressor(random_state=0), method=Folds(folds=10), key=KEY
        )
        training = y - model.predict(x)
        own = jc.Normal(model.predict(data.x[test]), training.std())
        for name, forecast in {"training errors": own, "jc.pipeline": fitted(data.x[test])}.items():
            covered[name].append(coverages(data.y[test], forecast, levels))
        step = fitted.steps[0]
    figure, left, right = panels("Errors of boosted trees, auto_mpg", "Coverage of new rows, mean of ten splits")
    bins = np.linspace(-10, 10, 41)
    out_of_fold = np.asarray(step.y) - np.asarray(step.predictions.mean)
    left.hist(training, bins, density=True, histtype="step", color=_style.RED, label="training rows")
    left.hist(out_of_fold, bins, density=True, histtype="step", color=_style.BLUE, label="out of fold")
    left.set(xlabel="error, miles per gallon", ylabel="density")
    draw_coverage(right, levels, covered)
    save(figure, "pipeline")


def online():
    """Intervals of a stream whose noise doubles, and the coverage of the last rows."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=2200)
    y[1200:] *= 2
    zeros = jc.Point(np.zeros(2000))
    start = jc.Point(np.zeros(200)), y[:200]
    new, rows = y[200:], np.arange(2000)
    states = {"DtACI": jc.online.adaptive.init_aggregated(*start), "PID": jc.online.pid.init(*start)}
    ends = {name: np.asarray(jc.online.run(state, zeros, new)[1][1]) for name, state in states.items()}
    ends = {"fixed": np.full(2000, np.quantile(np.abs(y[:200]), 0.9)), **ends}
    figure, left, right = panels("90 % intervals; the noise doubles after row 1000", "Coverage of the last 200 rows")
    draw_rows(left, rows[::5], new[::5])
    colors = (_style.RED, _style.BLUE, "#009E73")
    for (name, end), color in zip(ends.items(), colors, strict=True):
        left.plot(rows[::5], end[::5], color=color, linewidth=0.8, label=name)
        left.plot(rows[::5], -end[::5], color=color, linewidth=0.8)
        inside = np.convolve(np.abs(new) <= end, np.full(200, 1 / 200), mode="valid")
        right.plot(rows[199::5], inside[::5], color=color, linewidth=1, label=name)
    right.axhline(0.9, color="k", linewidth=0.8)
    left.set(xlabel="row", ylabel="error", ylim=(-7, 9))
    right.set(xlabel="row", ylabel="fraction inside", ylim=(0.4, 1))
    save(figure, "online")


if __name__ == "__main__":
    draw_all()
