"""One lengthscale, or one for each column, where rows are few: `python benchmarks/speed/gp_columns.py`.

Targets of noise .3: the sum of three columns, "few"; a weighted sum of all, "all"; and sin(2 a) + b c, "bent". For each
number of rows and columns the exact Gaussian process is fitted by column, with one lengthscale, as the evidence decides
("auto"), and as the library decides ("default"). What is told are means over seeds: the CRPS of 1,000 new rows, and how
many of them 90 % intervals cover.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

SIZES = ((60, 20), (150, 15), (150, 30), (150, 50), (150, 100), (400, 60), (400, 100), (824, 100), (150, 2000))
TARGETS = {
    "few": lambda x: x[:, :3].sum(axis=1),
    "all": lambda x: x @ np.linspace(1, 0, x.shape[1]) / np.sqrt(x.shape[1] / 3),
    "bent": lambda x: np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2],
}
WAYS = {"by column": True, "one": False, "auto": "auto", "default": None}
# By more columns no fit is tried: it takes minutes.
MOST_COLUMNS, NEW_ROWS = 100, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.seeds), arguments.out)


def report(seeds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    import jax

    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # of outliers
    yield provenance()
    yield f"{'rows':>5}{'columns':>8}  {'target':8}" + "".join(f"{way:>22}" for way in WAYS)
    yield f"{'':23}" + f"{'CRPS  covers  seconds':>22}" * len(WAYS)
    for rows, columns in SIZES:
        for name, target in TARGETS.items():
            cells = []
            for ard in WAYS.values():
                if ard in (True, "auto") and columns > MOST_COLUMNS:
                    cells.append("not tried")
                    continue
                found = np.mean([measured(rows, columns, target, ard, seed) for seed in range(seeds)], axis=0)
                cells.append("{:.3f}  {:5.3f}  {:7.2f}".format(*found))
            yield f"{rows:5}{columns:8}  {name:8}" + "".join(f"{cell:>22}" for cell in cells)


def measured(rows: int, columns: int, target, ard: bool | str | None, seed: int) -> tuple[float, float, float]:
    """CRPS, coverage, and seconds of the fit."""
    import jaxcal as jc

    rng = np.random.default_rng(seed)
    x, new = rng.normal(size=(rows, columns)), rng.normal(size=(NEW_ROWS, columns))
    y, truth = (target(each) + 0.3 * rng.normal(size=len(each)) for each in (x, new))
    began = time.perf_counter()
    fitted = jc.gaussian_process.fit(x, y, inference=jc.gp.Exact(ard=ard), throw=False)
    seconds, forecast = time.perf_counter() - began, fitted(new)
    lower, upper = map(np.asarray, forecast.interval(0.9))
    crps = float(np.mean(np.asarray(forecast.crps(truth))))
    return crps, float(np.mean((lower <= truth) & (truth <= upper))), seconds


if __name__ == "__main__":
    main()
