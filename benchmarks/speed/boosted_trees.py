"""Options of the default pipeline's boosted trees: `OMP_NUM_THREADS=1 python benchmarks/speed/boosted_trees.py`.

Boosting by scikit-learn is fitted to some hundred rows of each data set, and predicts others. What is told for each set
of options are the mean absolute error over that of the first ones, its geometric mean over the data sets, and the
processor seconds of all fits. None of the data sets is among those of `benchmarks/tables/default_answer.py`.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

DATASETS = ("auto_mpg", "diabetes", "forest_fires", "parkinsons_total", "steel", "grid_stability", "appliances")
DATASETS += ("tetuan", "traffic", "beijing_pm25", "gpu_sgemm", "election")
ROWS, NEW_ROWS, SEED = (300, 1000), 2000, 5
FIRST = {"n_estimators": 500, "learning_rate": 0.05, "max_depth": 6, "max_features": 0.7}
OPTIONS = (
    {"min_samples_leaf": 5, "subsample": 0.5},
    {"min_samples_leaf": 10, "subsample": 0.5},
    {"min_samples_leaf": 2, "subsample": 0.5},
    {"min_samples_leaf": 2, "subsample": 0.8},  # what is taken
    {"min_samples_leaf": 1, "subsample": 0.8},
    {"min_samples_leaf": 1, "subsample": 0.8, "max_features": 0.5},
    {"min_samples_leaf": 2, "subsample": 0.7, "max_features": 1.0},
    {"min_samples_leaf": 2, "subsample": 0.7, "max_depth": 5},
    {"min_samples_leaf": 2, "subsample": 0.7, "max_depth": 7, "learning_rate": 0.03, "n_estimators": 700},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    tell(report(), parser.parse_args().out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("scikit-learn")
    yield "data sets: " + ", ".join(DATASETS)
    for rows in ROWS:
        first = None
        for options in OPTIONS:
            errors, seconds = measured(rows, FIRST | options)
            first = errors if first is None else first
            ratios = errors / first
            told = ", ".join(f"{name} {value:g}" for name, value in options.items())
            yield (
                f"{rows:5} rows {np.exp(np.mean(np.log(ratios))):6.3f} {seconds:6.1f} s "
                f"{' '.join(f'{ratio:5.2f}' for ratio in ratios)}  {told}"
            )


def measured(rows: int, options: dict) -> tuple[np.ndarray, float]:
    """The mean absolute error on each data set, and the processor seconds of all fits."""
    from sklearn.ensemble import GradientBoostingRegressor

    import jaxcal as jc

    errors, seconds = [], 0.0
    for name in DATASETS:
        data = jc.datasets.load(name)
        x, y = np.asarray(data.x, float), np.asarray(data.y, float)
        order = np.random.default_rng(SEED).permutation(len(y))
        number = min(rows, len(y) * 7 // 10)
        known, new = order[:number], order[number : number + NEW_ROWS]
        began = time.process_time()
        fitted = GradientBoostingRegressor(random_state=0, **options).fit(x[known], y[known])
        seconds += time.process_time() - began
        errors.append(np.mean(abs(y[new] - fitted.predict(x[new]))))
    return np.array(errors), seconds


if __name__ == "__main__":
    main()
