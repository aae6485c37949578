"""What one step of the sparse bound says of its end: `python benchmarks/speed/gp_sparse_begun.py`.

Of up to 10,000 rows each, a Gaussian process by the nearest rows, by the bound after one step and after its whole
search, and by the library's own choice. That looks at the first step, and leaves the rest of the search where its CRPS
is a quarter above that of the nearest rows. What is told are the CRPS of 2,000 other rows, over that of the nearest,
and the seconds of the fits.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

SETS = (
    "power_plant",
    "protein",
    "kin8nm",
    "parkinsons_total",
    "grid_stability",
    "naval_compressor",
    "cbm",
    "appliances",
    "election",
    "steel",
    "beijing_pm25",
    "traffic",
    "tetuan",
)
ROWS, NEW_ROWS = 10_000, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    tell(report(), parser.parse_args().out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    warnings.simplefilter("ignore")  # of outliers
    yield provenance()
    yield f"{'':18}{'rows':>7}{'nearest':>10}{'one step':>21}{'whole search':>21}{'own choice':>21}"
    yield f"{'':25}{'seconds':>10}" + f"{'CRPS  seconds':>21}" * 3
    for name in SETS:
        number, cells = measured(name)
        (least, seconds), *others = cells
        shown = "".join(f"{crps / least:13.3f}{taken:8.1f}" for crps, taken in others)
        yield f"{name:18}{number:7}{seconds:10.1f}{shown}"


def measured(name: str) -> tuple[int, list[tuple[float, float]]]:
    """The number of rows, and of every way the CRPS of other rows and the seconds of the fit."""
    import jaxcal as jc

    data = jc.datasets.load(name)
    order = np.random.default_rng(0).permutation(len(data.y))
    number = min(ROWS, len(order) - NEW_ROWS)
    x, y = (np.asarray(part, np.float32)[order] for part in (data.x, data.y))
    cells = []
    for inference in (jc.gp.Nearest(), jc.gp.Sparse(max_iterations=1), jc.gp.Sparse(), None):
        began = time.perf_counter()
        fitted = jc.gaussian_process.fit(x[:number], y[:number], inference=inference)
        seconds, new = time.perf_counter() - began, slice(number, number + NEW_ROWS)
        cells.append((float(np.mean(np.asarray(fitted(x[new]).crps(y[new])))), seconds))
    return number, cells


if __name__ == "__main__":
    main()
