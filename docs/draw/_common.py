"""What the scripts that draw the pictures of the pages have in common: panels, a toy problem, and saving."""

import inspect
import sys
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxcal as jc
from jaxcal.plots import _style

KEY = jax.random.key(0)
PICTURES = Path(__file__).parents[1] / "pictures"


def panels(*titles):
    """A new figure of one panel for each title, and the panels."""
    with plt.rc_context(_style.STYLE):
        figure, axes = plt.subplots(1, len(titles), figsize=(8, 3.2), layout="constrained")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=8, loc="left")
    return figure, *axes


def save(figure, name):
    """Write docs/pictures/NAME.png."""
    for ax in figure.axes:
        if ax.get_legend_handles_labels()[0] and ax.get_legend() is None:
            ax.legend(fontsize=7, frameon=False)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=110)
    plt.close(figure)


def noisy_sine(n, *, seed=0):
    """Inputs [n, 1], and targets [n] whose std is 0.1 on the left of 0 and 0.6 on the right."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, n)
    return x[:, None], np.sin(3 * x) + std_of_sine(x) * rng.normal(size=n)


def std_of_sine(x):
    """The true std of `noisy_sine`."""
    return np.where(x > 0, 0.6, 0.1)


def draw_band(ax, grid, forecast, *, color=_style.BLUE, label="90 % interval"):
    """The mean and the central interval of 90 % over a grid of inputs [n]."""
    lower, upper = forecast.interval(0.9)
    ax.fill_between(grid, lower, upper, color=color, alpha=0.25, linewidth=0, label=label)
    ax.plot(grid, forecast.mean, color=color, linewidth=1.2)


def draw_rows(ax, x, y):
    """The rows as dots."""
    ax.plot(np.ravel(x), y, ".", color=_style.GRAY, markersize=2.5, zorder=0)


def coverages(y, forecast, levels):
    """The fraction of targets in the central interval of every level."""
    return [jc.metrics.coverage(y, forecast, confidence_level=level) for level in levels]


def draw_coverage(ax, levels, covered):
    """Coverage over the level of the interval: of two methods, the mean of their splits."""
    ax.plot([0, 1], [0, 1], color="k", linewidth=0.8, label="exact")
    for (name, splits), color, style in zip(covered.items(), (_style.RED, _style.BLUE), ("--", "-"), strict=True):
        ax.plot(levels, np.mean(splits, axis=0), style, color=color, label=name)
    ax.set(xlabel="level of the interval", ylabel="fraction of rows inside")


def draw_all() -> None:
    """Draw the pictures of the script that runs, one by each of its functions, or those that its arguments name."""
    jax.config.update("jax_enable_x64", True)
    for name, draw in list(vars(sys.modules["__main__"]).items()):  # a drawing may import more
        is_own = inspect.isfunction(draw) and draw.__module__ == "__main__"
        if is_own and (len(sys.argv) == 1 or name in sys.argv[1:]):
            print(name, flush=True)
            draw()
