"""Two folds or five of many rows, for the residuals of USNRT: `NPROC=1 python benchmarks/speed/usnrt_folds.py`.

A tree is fitted to four fifths of the rows of a set with either number. What is told are CRPS and negative log
likelihood of the other rows, how many of them 90 % intervals cover, and the processor seconds of the fit. The last
lines are the means over all fits, with the standard error of the difference.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

DATASETS = ("protein", "tetuan", "beijing_pm25", "traffic", "gpu_sgemm")
FOLDS = (2, 5)
# Of more rows one seed is enough.
MANY_ROWS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=DATASETS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.datasets, arguments.seeds), arguments.out)


def report(datasets: list[str], seeds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    warnings.simplefilter("ignore")  # of outliers
    yield provenance("equinox")
    yield f"{'':14}{'seed':>5}{'rows':>8}{'CRPS':>20}{'NLL':>18}{'covers':>16}{'seconds':>16}"
    pairs = []
    for name in datasets:
        for seed in range(seeds):
            number, *pair = measured(name, seed)
            pairs.append(pair)
            both = lambda k, form, pair=pair: " ".join(f"{found[k]:{form}}" for found in pair)
            yield (
                f"{name:14}{seed:5}{number:8}{both(0, '.4g'):>20}{both(1, '.3f'):>18}{both(2, '.3f'):>16}"
                f"{both(3, '.1f'):>16}"
            )
            if number > MANY_ROWS:
                break
    of_folds = np.swapaxes(np.array(pairs), 0, 1)
    of_folds[:, :, 0] = np.log(of_folds[:, :, 0])
    of_folds[:, :, 3] = np.log(of_folds[:, :, 3])
    for k, about in enumerate(("log CRPS", "NLL", "coverage", "log seconds")):
        few, many = of_folds[:, :, k]
        error = np.std(few - many, ddof=1) / np.sqrt(len(few))
        yield f"{about}: {few.mean():.4f} of 2 folds, {many.mean():.4f} of 5; {np.mean(few - many):+.4f} ± {error:.4f}"


def measured(name: str, seed: int) -> tuple:
    """How many rows are fitted to; and of each number of folds CRPS, negative log likelihood, coverage and seconds."""
    import jax

    import jaxcal as jc

    data = jc.datasets.load(name)
    order = np.random.default_rng(seed).permutation(len(data.y))
    number = len(order) * 4 // 5
    x, y = (np.asarray(part, np.float32)[order] for part in (data.x, data.y))
    pair = []
    for folds in FOLDS:
        began = time.process_time()
        fitted = jc.usnrt.fit(x[:number], y[:number], key=jax.random.key(seed), num_folds=folds)
        seconds, forecast, target = time.process_time() - began, fitted(x[number:]), y[number:]
        lower, upper = map(np.asarray, forecast.interval(0.9))
        scores = (float(np.mean(np.asarray(each))) for each in (forecast.crps(target), -forecast.log_prob(target)))
        pair.append((*scores, np.mean((lower <= target) & (target <= upper)), seconds))
    return number, *pair


if __name__ == "__main__":
    main()
