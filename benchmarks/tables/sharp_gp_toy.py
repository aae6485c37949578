"""Figure 2 of "Sharp Calibrated Gaussian Processes", a toy: `python -m benchmarks.tables.sharp_gp_toy`.

The paper does not print the distribution of its toy. This one is in its spirit, and was fixed before any method was run
on it: y = sin(3 x) + 0.1 e with e standard normal; x is uniform on [-1, 1], a thin middle part, in one row of ten, and
on the rest of [-3, 3] in the others. The lengthscale by which a Gaussian process of 40 rows predicts the sine need not
be the one by which its errors grow between them. 200 other rows calibrate: the quantiles of a centered interval of 99 %
need 199. Fresh rows, 20,000 of them, measure width and coverage, over 20 draws of all rows.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._rio_figures import BLUE, GREY, RED, STYLE, WIDTH, save
from benchmarks.tables.sharp_gp import width_at_coverage

TRAIN, CALIBRATION, FRESH = 40, 200, 20_000
END, MIDDLE, SHARE_IN_MIDDLE, NOISE = 3.0, 1.0, 0.1, 0.1
CONFIDENCE_LEVEL = 0.99
ENDS = (0.005, 0.995)  # the levels of the interval's ends
METHODS = {
    "distribution": "the distribution itself",
    "GP": "Gaussian process alone",
    "sharp": "sharp_gp, default",
    "sharp, paper": 'sharp_gp, preset="paper"',
    "sharp, ends": "sharp_gp, default, only the ends' levels",
    "sharp, paper, ends": 'sharp_gp, preset="paper", only the ends\' levels',
    "RK": "RK: isotonic",
    "RV": "RV: randomized ranks",
    "RM": "RM: mean only",
    "NN": "NN: neural quantiles",
}
DRAWN = ("distribution", "GP", "sharp", "sharp, paper", "RK", "RV", "RM", "NN")


class Rows(NamedTuple):
    """Inputs and targets."""

    x: np.ndarray
    y: np.ndarray


class Draw(NamedTuple):
    """One draw of the toy: the rows, and the Gaussian process of the training rows."""

    seed: int
    train: Rows
    calibration: Rows
    model: jc.gaussian_process.GaussianProcess


class Found(NamedTuple):
    """The intervals of a method at the fresh rows of every draw, [draws, fresh]."""

    lower: np.ndarray
    upper: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="a folder")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    fresh, found = measured(arguments.draws)
    (arguments.out / "figures").mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        save(figure(drawn(0)), str(arguments.out / "figures" / "sharp_gp_toy.png"))
    text = "\n\n".join([*heading(arguments.draws), table(fresh, found), seen(fresh, found), ratios(fresh, found)])
    (arguments.out / "sharp_gp_toy.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def toy(size: int, rng: np.random.Generator) -> Rows:
    """Rows of the distribution that the head of this file states."""
    in_middle = rng.uniform(size=size) < SHARE_IN_MIDDLE
    outside = rng.choice((-1, 1), size=size) * rng.uniform(MIDDLE, END, size=size)
    x = np.where(in_middle, rng.uniform(-MIDDLE, MIDDLE, size=size), outside)
    return Rows(x, np.sin(3 * x) + NOISE * rng.normal(size=size))


def drawn(seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    train, calibration = toy(TRAIN, rng), toy(CALIBRATION, rng)
    return Draw(seed, train, calibration, jc.gaussian_process.fit(*train))


def calibrated(draw: Draw) -> dict[str, Callable]:
    """Of every method what gives the distribution at new inputs."""
    x, y = draw.calibration
    base = draw.model(x)
    key = jax.random.key(draw.seed)
    distribution = lambda fitted: lambda new: fitted(new, draw.model(new))

    def sharp(**options):
        given = {"x_train": draw.train.x, "y_train": draw.train.y, "kernel": draw.model}
        return distribution(jc.sharp_gp.fit(x, base, y, **given, **options))

    from_mean = jc.conformal.fit(None, jc.Point(base.mean), y, rule="linear")
    return {
        "distribution": lambda new: jc.Normal(np.sin(3 * new), np.full_like(new, NOISE)),
        "GP": draw.model,
        "sharp": sharp(),
        "sharp, paper": sharp(preset="paper"),
        "sharp, ends": sharp(levels=ENDS),
        "sharp, paper, ends": sharp(preset="paper", levels=ENDS),
        "RK": distribution(jc.isotonic.fit(None, base, y, tails="support")),
        "RV": distribution(jc.conformal.fit(None, base, y, rule="randomized", key=key)),
        "RM": lambda new: from_mean(None, jc.Point(draw.model(new).mean)),
        # No other quantiles are used.
        "NN": distribution(jc.neural_quantiles.fit(None, base, y, key=key, preset="paper", levels=ENDS)),
    }


def measured(draws: int) -> tuple[Rows, dict[str, Found]]:
    """Fresh rows [draws, fresh], and the intervals of every method there."""
    fresh, found = [], {}
    for seed in range(draws):
        fresh.append(toy(FRESH, np.random.default_rng([seed, 1])))
        for name, distribution in calibrated(drawn(seed)).items():
            ends = distribution(fresh[-1].x).interval(CONFIDENCE_LEVEL)
            found.setdefault(name, []).append(np.stack(ends))
    return Rows(*np.stack(fresh, 1)), {name: Found(*np.stack(ends, 1)) for name, ends in found.items()}


def heading(draws: int) -> list[str]:
    return [
        "# Sharp calibrated Gaussian processes: the toy of figure 2",
        f"- {draws} draws of {TRAIN} training, {CALIBRATION} calibration and {FRESH} fresh rows\n- {_jobs.origin()}",
        f"y = sin(3 x) + {NOISE:g} e, e standard normal; x uniform on [{-MIDDLE:g}, {MIDDLE:g}] in "
        f"{100 * SHARE_IN_MIDDLE:g} % of the rows, on the rest of [{-END:g}, {END:g}] in the others. Not the paper's "
        "distribution, which it does not print.",
        f"Centered intervals of {100 * CONFIDENCE_LEVEL:g} %: mean ± standard deviation over the draws. *Only the "
        "ends' levels* have lengthscales of their own, in place of those from 0.025 to 0.975. *middle* and "
        f"*outside* are mean widths where |x| is below and above {MIDDLE:g}; *at 99 %* is the mean width with all "
        "intervals of a method multiplied by the one number that makes them cover 99 % of all fresh rows. "
        "RK takes the k-th of N errors for the level k / N, so that its intervals are to cover "
        f"{100 * CONFIDENCE_LEVEL * CALIBRATION / (CALIBRATION + 1):.1f} % here; those of RV, RM and sharp_gp's "
        f"default {100 * CONFIDENCE_LEVEL:g} %.",
    ]


def table(fresh: Rows, found: dict[str, Found]) -> str:
    in_middle = np.abs(fresh.x) < MIDDLE
    rows = []
    for name, (lower, upper) in found.items():
        width = upper - lower
        covered = coverage(fresh, lower, upper)
        parts = [width[part].mean() for part in (in_middle, ~in_middle)]
        parts.append(width_at_coverage(fresh.y, lower, upper, CONFIDENCE_LEVEL))
        numbers = [f"{part:.2f}" for part in parts]
        cells = _report.mean_and_std(width.mean(1), 2), _report.mean_and_std(covered, 1), *numbers
        rows.append([METHODS[name], *cells])
    return _report.markdown_table(["", "width", "coverage, %", "middle", "outside", "at 99 %"], rows)


def coverage(fresh: Rows, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Of every draw, in per cent."""
    return 100 * ((lower <= fresh.y) & (fresh.y <= upper)).mean(1)


def seen(fresh: Rows, found: dict[str, Found]) -> str:
    """In words, how sharp_gp compares with RK."""
    covers = {name: f"{coverage(fresh, *ends).mean():.1f} %" for name, ends in found.items()}
    width = {name: (upper - lower).mean(1) for name, (lower, upper) in found.items()}
    lines = []
    for name in [name for name in found if name.startswith("sharp")]:
        ratio, p = np.median(width[name] / width["RK"]), _report.p_values(width[name], width["RK"])[1]
        verdict = "no significant difference" if p > _report.SIGNIFICANT else "narrower" if ratio < 1 else "wider"
        lines.append(
            f"- {METHODS[name]}: {verdict}, {ratio:.2f} times as wide as RK in the median; covers {covers[name]}, "
            f"RK {covers['RK']}."
        )
    return "\n".join(lines)


def ratios(fresh: Rows, found: dict[str, Found]) -> str:
    """The widths of sharp_gp over those of the methods that scale the Gaussian process's own std."""
    in_middle = np.abs(fresh.x) < MIDDLE
    width = {name: upper - lower for name, (lower, upper) in found.items()}
    rows = []
    for name in [name for name in found if name.startswith("sharp")]:
        for other in ("RK", "RV"):
            own, others = width[name].mean(1), width[other].mean(1)
            parts = [width[name][part].mean() / width[other][part].mean() for part in (in_middle, ~in_middle)]
            p = _report.p_values(own, others)[1]
            numbers = f"{np.median(own / others):.2f}", f"{(own < others).sum()} of {len(own)}", f"{p:.1g}"
            rows.append([f"{METHODS[name]} / {other}", *numbers, *(f"{part:.2f}" for part in parts)])
    header = ["ratio of widths", "median over draws", "narrower in", "p, Wilcoxon", "middle", "outside"]
    return _report.markdown_table(header, rows)


def figure(draw: Draw):
    """A panel for each method: the Gaussian process's mean, which is that of all of them, the interval and the rows."""
    distributions = calibrated(draw)
    grid = np.linspace(-END, END, 601)
    mean = np.asarray(draw.model(grid).mean)
    figure, axes = plt.subplots(4, 2, figsize=(WIDTH, 5.6), layout="constrained", sharex=True, sharey=True)
    for ax, name in zip(axes.flat, DRAWN, strict=True):
        lower, upper = distributions[name](grid).interval(CONFIDENCE_LEVEL)
        ax.fill_between(grid, lower, upper, color=BLUE, alpha=0.25, linewidth=0, label="99 % interval")
        hollow = {"markerfacecolor": "none", "markeredgewidth": 0.4}
        ax.plot(*draw.calibration, "s", color=GREY, markersize=2.2, **hollow, label="calibration rows")
        ax.plot(*draw.train, "x", color=RED, markersize=3.2, markeredgewidth=0.8, label="training rows")
        ax.plot(grid, mean, color=BLUE, linewidth=0.9, label="mean")
        ax.set_title(METHODS[name], pad=3)
        ax.set_xlim(-END, END)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4, columnspacing=1.2)
    figure.supxlabel("x", fontsize=8)
    figure.supylabel("y", fontsize=8)
    return figure


if __name__ == "__main__":
    main()
