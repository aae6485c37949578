"""How often USNRT's rules split noise that is the same everywhere: `python -m benchmarks.tables.usnrt_false_splits`.

A problem has 2000 rows, nine independent normal features and residuals that know nothing of them; leaves hold 200 rows
and the significance is 0.01, so a rule that is right splits one problem of a hundred. The last row is what a
rule is for: the residuals' std is 1.15 where the first feature is above its mean, and 1 elsewhere.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.tables import _jobs, _report
from jaxcal.functional import levene, multiplicity

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000, help="of every kind; a quarter with permutations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="a folder")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    header = ["residuals", *(f"{correction}, {center}" for correction in CORRECTIONS for center in ("mean", "median"))]
    rows = [
        [
            name,
            *(
                shown(name, correction, center, arguments.problems)
                for correction in CORRECTIONS
                for center in ("mean", "median")
            ),
        ]
        for name in (*NOISE, STEP_IN_STD)
    ]
    text = "\n\n".join([*heading(arguments.problems), _report.markdown_table(header, rows)])
    (arguments.out / "usnrt_false_splits.md").write_text(text + "\n", encoding="utf-8")
    print(text)


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


def log_p(x: jax.Array, residuals: jax.Array, correction: str, center: str, key: jax.Array) -> jax.Array:
    """Of the best split; without a correction of every tenth row, as in the paper."""
    options = {"min_leaf": MIN_LEAF, "center": center}
    if correction == "permutation":
        return multiplicity.permutation_log_p(x, residuals, key=key, **options)[0]
    split = levene.best_split(x, residuals, step=STEP if correction == "none" else 1, **options)
    if correction == "none":
        return split.log_p
    return multiplicity.miller_siegmund(split.statistic, ROWS, split.log_num_splits, min_leaf=MIN_LEAF)


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
