"""How often USNRT's rules split noise that is the same everywhere: `python -m benchmarks.tables.usnrt_false_splits`.

A problem has 2000 rows, nine independent normal features and residuals that know nothing of them; leaves hold 200 rows
and the significance is 0.01, so a rule that is right splits one problem of a hundred. The last row is what a
rule is for: the residuals' std is 1.15 where the first feature is above its mean, and 1 elsewhere.

`--of steps` counts how many steps in the std of given residuals are found, by the number of rows and the least size of
a leaf. `--of fits` counts the splits of whole fits, whose residuals are those of networks: what these cannot fit is in
them, too. The noise is the same everywhere but in the last row.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.tables import _jobs, _report
from jaxcal.functional import levene, multiplicity
from jaxcal.predictors import usnrt

ROWS, FEATURES, MIN_LEAF, SIGNIFICANCE = 2000, 9, 200, 0.01
STEP, RATIO = 10, 1.15
CORRECTIONS = ("none", "miller-siegmund", "permutation")
# The exact test costs 200 searches a problem.
FEWER = {"permutation": 4}
NOISE = {
    "normal": jax.random.normal,
    "Student t, 3": partial(jax.random.t, df=3),
    "Laplace": jax.random.laplace,
    "exponential": jax.random.exponential,
}
STEP_IN_STD = "normal, with a step of its std"
# Steps in the std, as it is for the rest of the rows over that of the first ones, and the fraction of these.
STEPS = ((10, 0.9), (2, 0.5), (2, 0.8), (1.3, 0.5), (1.3, 0.8))
ROWS_OF_STEPS = (400, 500, 1000, 2000, 5000)
LEAST_LEAVES = {
    "n / 10": lambda n: n // 10,
    "default": lambda n: max(n // 10, 200),
    "paper": lambda n: max(n // 10, 1000),
}
# Whole fits: the mean, and the std where the second feature is above 0, in units of that elsewhere.
FIT_MIN_LEAF = 100
NARROW = (8, 4)
FITS = {
    "sin(3 x0) x1, 2 features, std 0.1": (2, lambda x: 10 * np.sin(3 * x[:, 0]) * x[:, 1], 1.0),
    "sin(3 x0) + x1^2, 5 features, std 1": (5, lambda x: np.sin(3 * x[:, 0]) + x[:, 1] ** 2, 1.0),
    "3 x0 - 2 x1, 5 features, std 1": (5, lambda x: 3 * x[:, 0] - 2 * x[:, 1], 1.0),
    "3 x0 - 2 x1, 5 features, std 1 and 1.5": (5, lambda x: 3 * x[:, 0] - 2 * x[:, 1], 1.5),
}
# The options of their `usnrt.Splits`, by the number of columns; the first is the preset.
RULES = {
    "paper": lambda _: {},
    "one network": lambda d: {"num_folds": 1, "hidden": [d * width for width in NARROW]},
    "5 folds, 8d and 4d units": lambda d: {"hidden": [d * width for width in NARROW]},
    "5 folds": lambda _: {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000, help="of every kind; a quarter with permutations")
    parser.add_argument("--of", choices=("residuals", "steps", "fits"), default="residuals", help="what is split")
    parser.add_argument("--fits", type=int, default=100, help="of every kind")
    parser.add_argument("--rows", type=int, default=1000, help="of a fit")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="a folder")
    arguments = parser.parse_args()
    if arguments.of == "fits":
        text, name = table_of_fits(arguments.fits, arguments.rows), "usnrt_false_fits.md"
    elif arguments.of == "steps":
        text, name = table_of_steps(arguments.problems), "usnrt_steps.md"
    else:
        text, name = table_of_residuals(arguments.problems), "usnrt_false_splits.md"
    (arguments.out / name).write_text(text + "\n", encoding="utf-8")
    print(text)


def table_of_residuals(problems: int) -> str:
    """How often given residuals are split."""
    jax.config.update("jax_enable_x64", True)
    header = ["residuals", *(f"{correction}, {center}" for correction in CORRECTIONS for center in ("mean", "median"))]
    rows = [
        [
            name,
            *(shown(name, correction, center, problems) for correction in CORRECTIONS for center in ("mean", "median")),
        ]
        for name in (*NOISE, STEP_IN_STD)
    ]
    return "\n\n".join([*heading(problems), _report.markdown_table(header, rows)])


def table_of_steps(problems: int) -> str:
    """How many steps in the std of given residuals are found."""
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(0), problems)
    rows = []
    for ratio, at in STEPS:
        for num_rows in ROWS_OF_STEPS:
            sizes = [least(num_rows) for least in LEAST_LEAVES.values()]
            found = [
                f"{float(jnp.mean(are_found(ratio, at, keys, num_rows, size))):.3f}"
                if num_rows >= 2 * size
                else _report.MISSING
                for size in sizes
            ]
            rows.append([f"{ratio} at {at}", str(num_rows), *found])
    about = (
        f"Fractions of {problems} problems that are split: {FEATURES} independent features, significance "
        f"{SIGNIFICANCE}, jaxcal's default rule. The std of the normal residuals is 1 for a fraction of the rows, "
        "those with the least first feature, and another for the rest: *10 at 0.9* is 10 for the last tenth. "
        "*n / 10*, *default* and *paper* are the least rows of a leaf: a tenth, or 200 or 1000 if that is more; – "
        "where so few rows are never split."
    )
    header = ["step", "rows", *LEAST_LEAVES]
    return "\n\n".join(["# Steps that USNRT's rule finds", _jobs.origin(), about, _report.markdown_table(header, rows)])


@partial(jax.jit, static_argnums=(3, 4))
def are_found(ratio: float, at: float, keys: jax.Array, num_rows: int, min_leaf: int) -> jax.Array:
    """Whether a step in the std is found, for every key."""

    def is_found(key: jax.Array) -> jax.Array:
        x_key, noise_key = jax.random.split(key)
        x = jax.random.normal(x_key, (num_rows, FEATURES))
        std = jnp.where(x[:, 0] > jnp.quantile(x[:, 0], at), ratio, 1.0)
        found = log_p(x, std * jax.random.normal(noise_key, (num_rows,)), "miller-siegmund", "median", key, min_leaf)
        return found <= math.log(SIGNIFICANCE)

    return lax.map(is_found, keys)


def table_of_fits(fits: int, num_rows: int) -> str:
    """How often whole fits split their rows, and the seconds of a fit."""
    rows = []
    for name, problem in FITS.items():
        found = {rule: [is_split_by_fit(problem, rule, seed, num_rows) for seed in range(fits)] for rule in RULES}
        rows.append([name, *(f"{sum(split for split, _ in of_rule)}" for of_rule in found.values())])
        rows[-1] += [f"{np.median([seconds for _, seconds in of_rule]):.2f}" for of_rule in found.values()]
    about = (
        f"Of {fits} fits of {num_rows} rows, with leaves of {FIT_MIN_LEAF} rows and significance {SIGNIFICANCE}, how "
        "many are split, and the processor seconds of a fit whose leaves have networks of one unit. The features are "
        "uniform on (-1, 1), the errors normal; their std is the same everywhere but in the last row, where the second "
        "one is that for a positive second feature. *paper* is the preset; *one network* tests the residuals of a "
        "network on its own training rows, four fifths of all, and on its validation set, with 8d and 4d hidden units "
        "and the other defaults; *5 folds, 8d and 4d units* tests out-of-fold residuals, *5 folds* is the default."
    )
    header = ["mean", *RULES, *(f"s, {rule}" for rule in RULES)]
    return "\n\n".join(["# False splits of USNRT's fits", _jobs.origin(), about, _report.markdown_table(header, rows)])


def is_split_by_fit(problem: tuple, rule: str, seed: int, num_rows: int) -> tuple[bool, float]:
    """Whether a fit splits its rows, and its processor seconds."""
    num_columns, mean, ratio = problem
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (num_rows, num_columns))
    y = mean(x) + np.where(x[:, 1] > 0, ratio, 1.0) * rng.normal(size=num_rows)
    splits = usnrt.Splits(significance=SIGNIFICANCE, **RULES[rule](num_columns))
    preset = "paper" if rule == "paper" else None
    options = {"min_leaf": FIT_MIN_LEAF, "splits": splits, "hidden": (1,), "preset": preset}
    began = time.process_time()
    fitted = usnrt.fit(x.astype(np.float32), y.astype(np.float32), key=jax.random.key(seed), **options)
    return bool(fitted.trees.feature[0, 0] >= 0), time.process_time() - began


def shown(name: str, correction: str, center: str, problems: int) -> str:
    """The fraction of problems that are split, ± its standard error."""
    problems //= FEWER.get(correction, 1)
    keys = jax.random.split(jax.random.key(0), problems)
    fraction = float(jnp.mean(are_split(name, correction, center, keys)))
    return f"{fraction:.3f} ± {math.sqrt(fraction * (1 - fraction) / problems):.3f}"


@partial(jax.jit, static_argnums=(0, 1, 2))
def are_split(name: str, correction: str, center: str, keys: jax.Array) -> jax.Array:
    """Whether the rule splits a problem, for every key."""

    def is_split(key: jax.Array) -> jax.Array:
        x_key, noise_key, permutation_key = jax.random.split(key, 3)
        x = jax.random.normal(x_key, (ROWS, FEATURES))
        draw: Callable = NOISE.get(name, jax.random.normal)
        residuals = draw(noise_key, shape=(ROWS,))
        if name == STEP_IN_STD:
            residuals = jnp.where(x[:, 0] > 0, RATIO, 1.0) * residuals
        return log_p(x, residuals, correction, center, permutation_key) <= math.log(SIGNIFICANCE)

    return lax.map(is_split, keys)


def log_p(
    x: jax.Array, residuals: jax.Array, correction: str, center: str, key: jax.Array, min_leaf: int = MIN_LEAF
) -> jax.Array:
    """Of the best split; without a correction of every tenth row, as in the paper."""
    options = {"min_leaf": min_leaf, "center": center}
    if correction == "permutation":
        return multiplicity.permutation_log_p(x, residuals, key=key, **options)[0]
    split = levene.best_split(x, residuals, step=STEP if correction == "none" else 1, **options)
    if correction == "none":
        return split.log_p
    return multiplicity.miller_siegmund(split.statistic, len(residuals), split.log_num_splits, min_leaf=min_leaf)


def heading(problems: int) -> list[str]:
    about = (
        f"Fractions of problems that are split, ± standard errors, of {problems} problems for each cell, with "
        f"permutations of {problems // FEWER['permutation']}: {ROWS} rows, {FEATURES} independent features, leaves of "
        f"{MIN_LEAF} rows, significance {SIGNIFICANCE}. The residuals know nothing of the features but in the last "
        f"row, where their std is {RATIO} in place of 1 in one half of one feature. *none* is the paper's rule, which "
        f"tests every {STEP}th row: *none, mean* as the paper writes it, *none, median* as its code does. "
        "*miller-siegmund, median* is jaxcal's default."
    )
    return ["# False splits of USNRT's rules", _jobs.origin(), about]


if __name__ == "__main__":
    main()
