"""Options of the default pipeline's boosted trees: `OMP_NUM_THREADS=1 python benchmarks/speed/boosted_trees.py`.

Boosting by scikit-learn is fitted to rows of each data set, and predicts others. Few rows have exact splits, many rows
histograms. Each line has a set of options, its mean absolute errors over those of the first options, their geometric
mean, and the processor seconds of all fits. The last part combines trees of several packages, as the default pipeline
does. None of the data sets is among those of `benchmarks/tables/default_answer.py`.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from _common import provenance, tell
from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor

import jaxcal as jc
from jaxcal.pipeline import trees
from jaxcal.pipeline.combination import weights_of

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
LARGE = ("grid_stability", "appliances", "tetuan", "traffic", "beijing_pm25", "gpu_sgemm", "blog")
MANY_ROWS, MANY_NEW_ROWS = (8_000, 17_000, 37_000, 150_000), 10_000
FIRST_OF_MANY = {"max_iter": 400, "learning_rate": 0.05, "early_stopping": False, "max_features": 0.7}
BY_ERRORS = {"max_iter": 3_000, "early_stopping": True, "n_iter_no_change": 30}
OPTIONS_OF_MANY = (
    {},
    {**BY_ERRORS},
    {**BY_ERRORS, "max_leaf_nodes": 63},
    {**BY_ERRORS, "max_leaf_nodes": 63, "min_samples_leaf": 5},  # what is taken of up to 15,000 rows
    {**BY_ERRORS, "max_leaf_nodes": 127, "min_samples_leaf": 5, "learning_rate": 0.1},  # of more
)
PACKAGES = ("boosted_trees", "extra_trees", "catboost", "lightgbm", "xgboost")
SETS = (2, 3, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    tell(report(), parser.parse_args().out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("scikit-learn")
    yield from compared(GradientBoostingRegressor, DATASETS, ROWS, NEW_ROWS, [FIRST | each for each in OPTIONS])
    several = [FIRST_OF_MANY | each for each in OPTIONS_OF_MANY]
    for rows in MANY_ROWS:
        large = [name for name in LARGE if len(jc.datasets.load(name).y) > 1.1 * rows]
        yield from compared(HistGradientBoostingRegressor, large, (rows,), MANY_NEW_ROWS, several)
    if not any(map(trees.missing, PACKAGES)):
        yield from (combined(rows) for rows in ROWS)


def compared(
    kind: type, datasets: Sequence[str], sizes: Sequence[int], new_rows: int, several: Sequence[dict]
) -> Iterator[str]:
    """A line for each set of options."""
    yield "data sets: " + ", ".join(datasets)
    for rows in sizes:
        first = None
        for options in several:
            errors, seconds = measured(kind, datasets, rows, new_rows, options)
            first = errors if first is None else first
            ratios = errors / first
            told = ", ".join(f"{name} {value:g}" for name, value in options.items())
            yield (
                f"{rows:6} rows {np.exp(np.mean(np.log(ratios))):6.3f} {seconds:6.1f} s "
                f"{' '.join(f'{ratio:5.2f}' for ratio in ratios)}  {told}"
            )


def measured(kind: type, datasets: Sequence[str], rows: int, new_rows: int, options: dict) -> tuple[np.ndarray, float]:
    """The mean absolute error on each data set, and the processor seconds of all fits."""
    errors, seconds = [], 0.0
    for name in datasets:
        x, y, x_new, y_new = divided(name, rows, new_rows)
        began = time.process_time()
        fitted = kind(random_state=0, **options).fit(x, y)
        seconds += time.process_time() - began
        errors.append(np.mean(abs(y_new - fitted.predict(x_new))))
    return np.array(errors), seconds


def divided(name: str, rows: int, new_rows: int) -> tuple[np.ndarray, ...]:
    """Inputs and targets of rows to fit on, and of new ones."""
    data = jc.datasets.load(name)
    x, y = np.asarray(data.x, float), np.asarray(data.y, float)
    order = np.random.default_rng(SEED).permutation(len(y))
    number = min(rows, len(y) * 7 // 10 if new_rows == NEW_ROWS else rows)
    known, new = order[:number], order[number : number + new_rows]
    return x[known], y[known], x[new], y[new]


def combined(rows: int) -> str:
    """The errors of the first packages together, then with each of the others."""
    ratios = []
    for name in DATASETS:
        x, y, x_new, y_new = divided(name, rows, NEW_ROWS)
        fits = [trees.TREES[package] for package in PACKAGES]
        held_out = np.stack([y - out_of_fold(fit, x, y) for fit in fits])
        of_new = np.stack([y_new - fit(x, y)(x_new).mean for fit in fits])
        errors = [np.mean(abs(weights_of(held_out[:k]) @ of_new[:k])) for k in SETS]
        ratios.append(np.array(errors) / errors[0])
    means = np.exp(np.mean(np.log(ratios), axis=0))
    told = ", ".join(f"with {package} {mean:.3f}" for package, mean in zip(PACKAGES[2:], means[1:], strict=True))
    return f"{rows:6} rows, mean absolute error over the error of {', '.join(PACKAGES[:2])}: {told}"


def out_of_fold(fit: Callable, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The predictions of models that were fitted without each fold; trees take no key."""
    return np.asarray(jc.out_of_fold(lambda x, y, key: fit(x, y), x, y, key=jax.random.key(SEED)).mean)


if __name__ == "__main__":
    main()
