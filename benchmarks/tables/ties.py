"""How often intervals cover targets that are equal in many rows: `python -m benchmarks.tables.ties --bits 32`.

Rain, claims and counts are 0 in most rows. Where a model says the same of many rows, their scores are equal, and an
interval ends at a value that many new rows have. Every calibrator with a guarantee is measured, in both precisions,
with its ends rounded outward and as floating point leaves them (`jaxcal.functional.rounding`).
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.neural_network import MLPRegressor

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from jaxcal.functional import rounding

RESULTS = Path(__file__).parents[1] / "results"
LEVEL, NUM_TRAIN, NUM_NEW = 0.9, 400, 1000
# How many calibration sets of how many rows.
SETS = {400: 8, 20_000: 2}
_SETS_OF_CV_PLUS = 2
KEY = jax.random.key(0)

LEGEND = f"""\
Intervals of {100 * LEVEL:g} %. A row has the lowest and the mean coverage, in %, over {{cells}} cells, each a target
and a base. A cell has {{sets}} calibration sets of each size, and {NUM_NEW} new rows for each. *Short* counts
the cells whose mean lies more than three standard errors below {100 * LEVEL:g} %: chance leaves about one in 700.
*As they are* is without the helper, with ends as floating point leaves them: of the constant base, 400 rows. *Width*
is by how much the helper widens the intervals of the normal target then, in the mean, as a fraction.

- Targets: 0 in 50, 90 and 97 % of the rows, else of a gamma distribution; Poisson of mean 0.05, 0.5 and 3;
  normal, rounded to halves; binary, 1 in 10 and in 50 %; normal.
- Bases, trained on {NUM_TRAIN} other rows: a constant; a random forest with the std of its trees, which may be 0;
  boosted trees and a network, with the std of their errors. Those of score="cdf" have the shape of Student's t.
- Of CV+ the guarantee is lower. It has the constant and, with 400 rows, the forest; {{cv_plus}} sets of rows."""


# Targets: functions of random numbers and x [n, 3].


def zero_inflated(fraction: float) -> Callable:
    def draw(rng, x):
        return np.where(rng.uniform(size=len(x)) < fraction, 0, np.exp(x[:, 0]) * rng.gamma(2.0, size=len(x)))

    return draw


def poisson(mean: float, rng, x):
    return rng.poisson(mean, len(x))


def binary(p: float, rng, x):
    return rng.uniform(size=len(x)) < p


TARGETS = {
    **{f"{100 * fraction:g} % zero": zero_inflated(fraction) for fraction in (0.5, 0.9, 0.97)},
    **{
        f"Poisson {mean:g}": partial(lambda rng, x, mean: rng.poisson(mean, len(x)), mean=mean)
        for mean in (0.05, 0.5, 3)
    },
    "rounded": lambda rng, x: np.round(2 * (x[:, 0] + rng.normal(size=len(x)))) / 2,
    **{f"binary {100 * p:g} %": partial(binary, p) for p in (0.1, 0.5)},
    "normal": lambda rng, x: x[:, 0] + rng.normal(size=len(x)),
}


# Bases: functions of training rows that give a function of x, whose value is means and stds.


def constant(x, y):
    mean, std = y.mean(), y.std() + 0.1
    return lambda x: (np.full(len(x), mean), np.full(len(x), std))


def of_trees(x, y):
    forest = RandomForestRegressor(50, min_samples_leaf=5, random_state=0).fit(x, y)

    def predict(x):
        trees = np.stack([tree.predict(x) for tree in forest.estimators_])
        return trees.mean(axis=0), trees.std(axis=0)

    return predict


def of_estimator(estimator, x, y):
    model = clone(estimator).fit(x, y)
    std = np.sqrt(np.mean((y - model.predict(x)) ** 2)) + 0.01
    return lambda x: (model.predict(x), np.full(len(x), std))


ESTIMATORS = {
    "forest": RandomForestRegressor(20, min_samples_leaf=5, random_state=0),
    "boosted trees": HistGradientBoostingRegressor(max_iter=10, random_state=0),
    "network": MLPRegressor((20,), max_iter=300, random_state=0),
}
BASES = {
    "constant": constant,
    "forest": of_trees,
    "boosted trees": partial(of_estimator, ESTIMATORS["boosted trees"]),
    "network": partial(of_estimator, ESTIMATORS["network"]),
}


# Calibrators, each a function of calibration rows, and of what its base is made of.


def _fit_sharp_gp(x, base, y):
    rng = np.random.default_rng(0)
    x_train = rng.uniform(size=(60, x.shape[1]))
    kernel = jc.sharp_gp.KernelAndNoise(0.5, 0.1)
    return jc.sharp_gp.fit(x, base, y, x_train=x_train, y_train=rng.normal(size=60), kernel=kernel)


def student_t(mean, std):
    return jc.StudentT(5.0, mean, np.maximum(std, 0.5))


def _is_large(x):
    return x[:, 0] > 0.5


def _weights(x):
    return np.exp(np.asarray(x)[:, 1] - 0.5)


CALIBRATORS = {
    'conformal, score="scaled"': (partial(jc.conformal.fit, score="scaled"), jc.Normal),
    'conformal, score="absolute"': (partial(jc.conformal.fit, score="absolute"), jc.Normal),
    'conformal, score="signed"': (partial(jc.conformal.fit, score="signed"), lambda mean, std: jc.Point(mean)),
    'conformal, score="quantile"': (partial(jc.conformal.fit, score="quantile"), jc.Normal),
    "conformal, by groups": (partial(jc.conformal.fit, score="absolute", by=_is_large), jc.Normal),
    "conformal, by weights": (partial(jc.conformal.fit, score="absolute", weights=_weights), jc.Normal),
    'conformal, rule="linear"': (partial(jc.conformal.fit, rule="linear"), lambda mean, std: jc.Point(mean)),
    'conformal, rule="linear", score="cdf"': (partial(jc.conformal.fit, rule="linear", score="cdf"), student_t),
    'conformal, rule="randomized"': (partial(jc.conformal.fit, rule="randomized", key=KEY), jc.Normal),
    'conformal, rule="randomized", score="cdf"': (
        partial(jc.conformal.fit, rule="randomized", score="cdf", key=KEY),
        student_t,
    ),
    "crude": (jc.crude.fit, jc.Normal),
    'crude, score="cdf"': (partial(jc.crude.fit, score="cdf"), student_t),
    "isotonic": (jc.isotonic.fit, lambda mean, std: jc.Point(mean)),
    'isotonic, score="cdf"': (partial(jc.isotonic.fit, score="cdf"), student_t),
    "conditional_conformal": (
        partial(jc.conditional_conformal.fit, features=_is_large, score="absolute", confidence_levels=[LEVEL]),
        jc.Normal,
    ),
    "sharp_gp": (_fit_sharp_gp, lambda mean, std: jc.Point(mean)),
}
CV_PLUS = "CV+"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, choices=(32, 64), required=True, help="the precision")
    parser.add_argument("--rows", type=int, nargs="*", choices=tuple(SETS), default=[*SETS], help="of calibration")
    options = parser.parse_args()
    sets = {rows: SETS[rows] for rows in options.rows}
    with jax.enable_x64(options.bits == 64):
        table = [*rows_of(sets)]
    header = ["calibrator", "rows", "lowest", "in", "mean", "short", "as they are: lowest", "short", "width"]
    numbers = " and ".join(map(str, sets.values()))
    legend = LEGEND.format(cells=len(TARGETS) * len(BASES), sets=numbers, cv_plus=_SETS_OF_CV_PLUS)
    title = f"# How often intervals cover equal targets, in {options.bits} bits"
    text = "\n\n".join([title, f"- {_jobs.origin()}", legend, _report.markdown_table(header, table)]) + "\n"
    (RESULTS / f"ties_{options.bits}.md").write_text(text, encoding="utf-8")
    print(text)


def rows_of(sets: dict[int, int]) -> Iterator[list[str]]:
    """The rows of the table in the precision in use."""
    rounded = covered_by(sets, BASES)
    # As floating point leaves the ends.
    with mock.patch.object(rounding, "UNITS", 0), mock.patch.object(rounding, "beyond", lambda cdf, end, *_: end):
        jax.clear_caches()
        as_they_are = covered_by({400: sets[400]}, ["constant"])
    jax.clear_caches()
    for (name, size), cells in rounded.items():
        means = {cell: np.mean([coverage for coverage, _ in found]) for cell, found in cells.items()}
        lowest = min(means, key=lambda cell: means[cell])
        before = as_they_are.get((name, size))
        yield [
            name,
            str(size),
            f"{100 * means[lowest]:.1f}",
            ", ".join(lowest),
            f"{100 * np.mean([*means.values()]):.1f}",
            f"{num_short(cells, size)} of {len(cells)}",
            *(compared(cells, before) if before else [_report.MISSING] * 3),
        ]


def compared(cells: dict, before: dict) -> list[str]:
    """The lowest coverage without the helper, how many cells it leaves short, and by how much it widens the others."""
    lowest = min(np.mean([coverage for coverage, _ in found]) for found in before.values())
    width = lambda side: np.mean([width for _, width in side["normal", "constant"]])
    return [
        f"{100 * lowest:.1f}",
        f"{num_short(before, 400)} of {len(before)}",
        f"{width(cells) / width(before) - 1:.0e}",
    ]


def num_short(cells: dict, size: int) -> int:
    """How many cells cover less than the level by more than three standard errors."""
    # Of one set with this coverage: by its calibration rows and by its new rows.
    error = np.sqrt(LEVEL * (1 - LEVEL) * (1 / (size + 1) + 1 / NUM_NEW))
    means = [(np.mean([coverage for coverage, _ in found]), len(found)) for found in cells.values()]
    return sum(mean < LEVEL - 3 * error / np.sqrt(number) for mean, number in means)


def covered_by(sets: dict[int, int], bases: Collection[str]) -> dict[tuple[str, int], dict]:
    """For every calibrator and number of rows, in every cell, the coverage and the mean width of each set."""
    found: dict[tuple[str, int], dict] = defaultdict(lambda: defaultdict(list))
    for target, draw_target in TARGETS.items():
        for base in bases:
            rng = np.random.default_rng(seed_of(target, base))
            draw = partial(draw_rows, rng, draw_target)
            predict = BASES[base](*draw(NUM_TRAIN))
            for size, number in sets.items():
                for _ in range(number):
                    calibration, new = draw(size), draw(NUM_NEW)
                    known, wanted = predict(calibration[0]), predict(new[0])
                    for name, (fit, base_of) in CALIBRATORS.items():
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            module = fit(calibration[0], base_of(*known), calibration[1])
                            forecast = module(new[0], base_of(*wanted))
                            found[name, size][target, base].append(measured(forecast, new[1]))
                for fit_model in models_of_folds(base, size):
                    for _ in range(_SETS_OF_CV_PLUS):
                        calibration, new = draw(size), draw(NUM_NEW)
                        forecast = jc.cross_conformal.fit(fit_model, *calibration, key=KEY)(new[0])
                        found[CV_PLUS, size][target, base].append(measured(forecast, new[1]))
    return found


def models_of_folds(base: str, size: int) -> Iterator[Callable]:
    """The fit function of CV+, if the base is measured with it."""
    if base == "constant":
        yield lambda x, y, key: lambda x: np.full(len(x), np.asarray(y).mean())
    elif base == "forest" and size < 1000:
        yield lambda x, y, key: clone(ESTIMATORS[base]).fit(np.asarray(x), np.asarray(y)).predict


def measured(forecast: jc.Distribution, y: np.ndarray) -> tuple[float, float]:
    """The fraction of the rows that intervals cover, and the mean of their finite widths."""
    lower, upper = (np.asarray(end) for end in forecast.interval(LEVEL))
    width = (upper - lower)[np.isfinite(upper - lower)]
    return float(np.mean((lower <= y) & (y <= upper))), float(width.astype(float).mean()) if width.size else np.nan


def draw_rows(rng: np.random.Generator, draw_target: Callable, size: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(size=(size, 3))
    # Numbers that both precisions have.
    return tuple(np.float64(np.float32(values)) for values in (x, draw_target(rng, x)))


def seed_of(*words: str) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(" ".join(words).encode()[-6:], "big")


if __name__ == "__main__":
    main()
