"""Draws the pictures of rio, crude, sharp_gp, accrue and conformal: docs/pictures/NAME.png.

`python docs/draw/calibrators_papers.py` draws all of them, `python docs/draw/calibrators_papers.py rio` the one that is
named. Every picture has fixed seeds.
"""

import numpy as np
from _common import KEY, coverages, draw_all, draw_band, draw_coverage, draw_rows, noisy_sine, panels, save, std_of_sine

import jaxcal as jc
from jaxcal.functional import scores
from jaxcal.plots import _style


def rio():
    """The residuals of a model that is too simple, and its prediction with and without their process."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 6, 120)
    y = np.sin(x) + 0.4 * np.sin(3 * x) + 0.15 * rng.normal(size=120)
    model = lambda x: jc.Point(np.sin(x))
    fitted = jc.rio.fit(x, model(x), y)
    grid = np.linspace(0, 8, 400)
    figure, left, right = panels("Residuals of a model, and their process", "Prediction: the model plus the process")
    after = fitted(grid, model(grid))
    draw_rows(left, x, y - np.sin(x))
    draw_band(left, grid, jc.Normal(after.mean - np.sin(grid), after.std))
    left.axhline(0, color=_style.RED, linestyle="--", linewidth=1, label="the model alone")
    draw_rows(right, x, y)
    draw_band(right, grid, after, label="RIO, 90 % interval")
    right.plot(grid, np.sin(grid), "--", color=_style.RED, linewidth=1, label="the model")
    left.set(xlabel="x", ylabel="residual", ylim=(-1.2, 1.8))
    right.set(xlabel="x", ylabel="y", ylim=(-2, 3))
    save(figure, "rio")


def crude():
    """Skewed standardized errors beside the normal density, and how many rows lie below each quantile."""
    rng = np.random.default_rng(0)
    errors = rng.exponential(size=4500) - 1
    held_out, new = errors[:500], errors[500:]
    normal = jc.Normal(np.zeros(4000), np.ones(4000))
    fitted = jc.crude.fit(None, jc.Normal(np.zeros(500), np.ones(500)), held_out)
    levels, grid = np.linspace(0.01, 0.99, 99), np.linspace(-3.5, 5, 300)
    figure, left, right = panels("Errors in predicted stds, 500 calibration rows", "New rows below each quantile")
    left.hist(held_out, np.linspace(-3.5, 5, 52), density=True, color=_style.BLUE, alpha=0.4, label="CRUDE")
    density = np.exp(jc.Normal(np.zeros(300), np.ones(300)).log_prob(grid))
    left.plot(grid, density, "--", color=_style.RED, label="the model's normal distribution")
    left.set(xlabel="standardized error", ylabel="density")
    right.plot([0, 1], [0, 1], color="k", linewidth=0.8, label="exact")
    for name, forecast, style, color in (
        ("the model", normal, "--", _style.RED),
        ("CRUDE", fitted(None, normal), "-", _style.BLUE),
    ):
        below = [np.mean(new <= np.asarray(forecast.icdf(level))) for level in levels]
        right.plot(levels, below, style, color=color, label=name)
    right.set(xlabel="level", ylabel="fraction of new rows")
    save(figure, "crude")


def sharp_gp():
    """The half width of `sharp_gp` over the inputs, and the errors of new rows beside it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 2))
    y = np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1]) + 0.02 * rng.normal(size=1000)
    train, held_out, new = slice(0, 100), slice(100, 300), slice(300, 1000)
    model = jc.gaussian_process.fit(x[train], y[train])
    mean = lambda x: jc.Point(model(x).mean)
    rows = x[held_out], mean(x[held_out]), y[held_out]
    sharp = jc.sharp_gp.fit(*rows, x_train=x[train], y_train=y[train], levels=(0.05, 0.95))
    one_width = jc.conformal.fit(*rows, rule="linear")

    def half_width(fitted, x):
        lower, upper = fitted(x, mean(x)).interval(0.9)
        return np.asarray(upper - lower) / 2

    figure, left, right = panels("Half width of sharp_gp, and training rows", "Errors of new rows, by that half width")
    grid = np.stack(np.meshgrid(np.linspace(-3, 3, 60), np.linspace(-3, 3, 60)), axis=-1)
    widths = half_width(sharp, grid.reshape(-1, 2)).reshape(60, 60)
    drawn = left.contourf(grid[..., 0], grid[..., 1], widths, cmap="Blues", levels=8)
    figure.colorbar(drawn, ax=left).ax.tick_params(labelsize=8)
    left.plot(*x[train].T, ".", color="k", markersize=3)
    left.set(xlabel="first input", ylabel="second input", xlim=(-3, 3), ylim=(-3, 3))
    widths, errors = half_width(sharp, x[new]), np.abs(y[new] - np.asarray(mean(x[new]).mean))
    draw_rows(right, widths, np.maximum(errors, 1e-3))
    ends = np.array([widths.min(), widths.max()])
    right.loglog(ends, ends, color=_style.BLUE, label="sharp_gp")
    wide = half_width(one_width, x[new])[:1].repeat(2)
    right.loglog(ends, wide, "--", color=_style.RED, label="one width")
    right.set(xlabel="half width of sharp_gp", ylabel="size of the error, half width")
    right.set_xticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    right.xaxis.minorticks_off()
    save(figure, "sharp_gp")


def accrue():
    """The std that is found, and the two scores by a factor of the true std."""
    x, y = noisy_sine(600)
    errors = y - np.sin(3 * x[:, 0])
    fitted = jc.accrue.fit(x, jc.Point(np.sin(3 * x[:, 0])), y, key=KEY)
    grid = np.linspace(-1, 1, 300)
    figure, left, right = panels("Errors of a model, and the std of ACCRUE", "The scores, by a factor of the true std")
    draw_rows(left, x, np.abs(errors))
    left.plot(grid, std_of_sine(grid), color="k", linewidth=1, label="true std")
    left.plot(grid, fitted.std(grid), color=_style.BLUE, label="ACCRUE")
    left.axhline(errors.std(), color=_style.RED, linestyle="--", linewidth=1, label="one std for all rows")
    left.set(xlabel="x", ylabel="std, size of the error", ylim=(0, 2))
    factors, std = np.geomspace(0.3, 3, 60), std_of_sine(x[:, 0])
    crps = [jc.metrics.crps(errors, jc.Normal(np.zeros(600), factor * std)) for factor in factors]
    reliability = [scores.reliability_score(errors, factor * std) for factor in factors]
    for name, values, style, color in (("CRPS", crps, "-", _style.BLUE), ("RS", reliability, "--", _style.RED)):
        right.semilogx(factors, values, style, color=color, label=name)
    right.axvline(1, color="k", linewidth=0.8)
    right.set(xlabel="std over true std", ylabel="score", ylim=(0, 0.6))
    right.set_xticks([0.3, 1, 3], ["0.3", "1", "3"])
    right.minorticks_off()
    save(figure, "accrue")


def conformal():
    """The sorted errors of calibration rows, and the coverage by errors of training rows and by those."""
    from sklearn.ensemble import GradientBoostingRegressor

    data = jc.datasets.load("concrete")
    levels, covered = np.linspace(0.1, 0.95, 18), {"std of training errors": [], "conformal": []}
    for seed in range(10):
        train, held_out, test = jc.datasets.split(len(data.y), (0.4, 0.2, 0.4), seed=seed)
        model = GradientBoostingRegressor(random_state=0).fit(data.x[train], data.y[train])
        training, held, new = (jc.Point(model.predict(data.x[rows])) for rows in (train, held_out, test))
        fitted = jc.conformal.fit(None, held, data.y[held_out])
        own = jc.Normal(new.mean, np.std(data.y[train] - np.asarray(training.mean)))
        for name, forecast in {"std of training errors": own, "conformal": fitted(None, new)}.items():
            covered[name].append(coverages(data.y[test], forecast, levels))
    figure, left, right = panels("Sorted errors of 206 calibration rows", "Coverage of new rows, mean of ten splits")
    sizes = np.sort(np.abs(data.y[held_out] - np.asarray(held.mean)))
    rank = int(np.ceil((len(sizes) + 1) * 0.9))
    left.plot(np.arange(1, len(sizes) + 1), sizes, ".", color=_style.BLUE, markersize=3)
    left.axvline(rank, color="k", linewidth=0.8)
    left.axhline(
        sizes[rank - 1], color=_style.RED, linestyle="--", linewidth=1, label=f"rank {rank}, half width at 90 %"
    )
    left.set(xlabel="rank", ylabel="size of the error, MPa")
    draw_coverage(right, levels, covered)
    save(figure, "conformal")


if __name__ == "__main__":
    draw_all()
