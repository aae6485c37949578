"""Five folds or ten of some hundred rows: `NPROC=1 python benchmarks/speed/pipeline_folds.py`.

The default pipeline is fitted to the same rows with either number. What is told are the CRPS of other rows, and how
many of them 90 % intervals cover, beside the coverage that the pipeline itself tells, out of fold; and the processor
seconds of the fits. The last lines are the means over all fits, with the standard error of the difference.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

DATASETS = ("auto_mpg", "concrete", "diabetes", "airfoil", "energy_heating", "grid_stability", "wine_red")
FOLDS = (5, 10)
# The most rows that are predicted.
NEW_ROWS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=700, help="to fit to, but no more than three quarters of a set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows, arguments.seeds), arguments.out)


def report(rows: int, seeds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    warnings.simplefilter("ignore")  # of outliers
    yield provenance("scikit-learn")
    yield f"{'':16}{'seed':>5}{'rows':>6}{'CRPS':>20}{'covers':>16}{'out of fold':>16}{'seconds':>14}"
    pairs = []
    for name in DATASETS:
        for seed in range(seeds):
            number, *pair = measured(name, rows, seed)
            pairs.append(pair)
            both = lambda k, form, pair=pair: " ".join(f"{found[k]:{form}}" for found in pair)
            yield (
                f"{name:16}{seed:5}{number:6}{both(0, '.4g'):>20}{both(1, '.3f'):>16}{both(2, '.3f'):>16}"
                f"{both(3, '.1f'):>14}"
            )
    of_folds = np.swapaxes(np.array(pairs), 0, 1)
    of_folds[:, :, 0] = np.log(of_folds[:, :, 0])
    for k, about in enumerate(("log CRPS", "coverage", "coverage out of fold", "seconds")):
        few, many = of_folds[:, :, k]
        error = np.std(few - many, ddof=1) / np.sqrt(len(few))
        yield f"{about}: {few.mean():.4f} of 5 folds, {many.mean():.4f} of 10; {np.mean(few - many):+.4f} ± {error:.4f}"


def measured(name: str, rows: int, seed: int) -> tuple:
    """How many rows are fitted to; and of each number of folds CRPS, coverage, the same out of fold, and seconds."""
    import jax

    import jaxcal as jc

    data = jc.datasets.load(name)
    order = np.random.default_rng(seed).permutation(len(data.y))
    number = min(rows, len(order) * 3 // 4)
    x, y = (np.asarray(part)[order[: number + NEW_ROWS]] for part in (data.x, data.y))
    pair = []
    for folds in FOLDS:
        began = time.process_time()
        fitted = jc.pipeline.fit(
            x[:number], y[:number], key=jax.random.key(seed), method=jc.pipeline.Folds(folds=folds)
        )
        seconds, forecast = time.process_time() - began, fitted(x[number:])
        lower, upper = map(np.asarray, forecast.interval(0.9))
        covered = np.mean((lower <= y[number:]) & (y[number:] <= upper))
        crps = float(np.mean(np.asarray(forecast.crps(y[number:]))))
        pair.append((crps, covered, float(fitted.steps[-1].coverage(0.9).coverage), seconds))
    return number, *pair


if __name__ == "__main__":
    main()
