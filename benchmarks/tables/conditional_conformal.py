"""How often conformal intervals cover in groups that overlap, simulated.

`python -m benchmarks.tables.conditional_conformal` takes some minutes on one core. Split conformal prediction, a table
for each group of one partition, and conditional conformal prediction by all groups, plain and randomized, on rows whose
noise differs from group to group. And how long a cutoff takes, beside that of a linear program for each new row.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog
from scipy.special import ndtr

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from jaxcal.functional.quantiles import smallest_table

RESULT = Path(__file__).parents[1] / "results" / "conditional_conformal.md"
LEVELS, RUNS, NUM_NEW = (0.5, 0.8, 0.9, 0.99), {9: 400, 19: 400, 99: 300, 999: 60}, 200
TIMED_ROWS, TIMED_FEATURES, PROGRAMS = 1000, 20, 20
KINDS = ("all", "left", "top", "left or top", "tilt")

LEGEND = f"""\
Inputs are uniform on [-1, 1]^2 and the base predicts 0, the mean. The noise is normal, its std 1, 2 more where the
first input exceeds 0.2, which is not "left", and 1 more where the second one exceeds 0, "top". Coverage in %, by the
noise's own distribution, of {NUM_NEW} new rows of each of {RUNS[9]} calibration sets of up to 19 rows, {RUNS[99]} of 99
and {RUNS[999]} of 999: its mean ± standard error over the sets. "tilt" weights new rows by 1 + the second input: their
density is shifted towards the top. "by left" is `conformal.fit` with `by=`, a table for each side. "conditional" has
the indicators of "left", of "top" and of both, and the second input as features: all five columns are combinations of
these. Infinite intervals cover; in brackets how many are infinite in %, where there are any."""

SPEED = """\
**Speed**: {rows} calibration rows, {features} normal features, {rows} new rows, one level, 64 bits, one core, after
compilation: {ours:.2f} s, of which the fit takes {fit:.2f} s. The linear program of a new row takes HiGHS, in scipy,
{highs:.0f} ms: {total:.0f} s for all. The cutoffs of both differ by at most {difference:.0e} stds of the scores, of
{programs} rows."""


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # of infinite intervals, which the table counts
    parts = ["# How often conformal intervals cover within groups", f"- {_jobs.origin()}", LEGEND]
    for level in LEVELS:
        sizes = [size for size in RUNS if size >= smallest_table(level)]
        rows = [row for size in sizes for row in rows_of(size, level)]
        header = ["method", "rows", *KINDS]
        parts += [f"**{100 * level:g} %**", _report.markdown_table(header, rows)]
    parts.append(SPEED.format(**speed()))
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def stds_of(x: np.ndarray) -> np.ndarray:
    return 1.0 + 2.0 * (x[:, 0] > 0.2) + 1.0 * (x[:, 1] > 0)


def features_of(x: jax.Array) -> jax.Array:
    left, top = x[:, 0] <= 0.2, x[:, 1] > 0
    return jnp.stack([left, top, left & top, x[:, 1]], axis=1)


def side_of(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    return x[:, 0] <= 0.2


def split(x: np.ndarray, y: np.ndarray, level: float, key: jax.Array) -> Callable:
    return jc.conformal.fit(x, jc.Point(np.zeros(len(y))), y)


def by_left(x: np.ndarray, y: np.ndarray, level: float, key: jax.Array) -> Callable:
    fitted = jc.conformal.fit(x, jc.Point(np.zeros(len(y))), y, by=np.asarray(side_of(x)))
    return lambda x, base: fitted(x, base, by=np.asarray(side_of(x)))


def conditional(x: np.ndarray, y: np.ndarray, level: float, key: jax.Array | None) -> Callable:
    options = {"features": features_of, "confidence_levels": (level,), "key": key}
    return jc.conditional_conformal.fit(x, jc.Point(np.zeros(len(y))), y, **options)


def plain(x: np.ndarray, y: np.ndarray, level: float, key: jax.Array) -> Callable:
    return conditional(x, y, level, None)


METHODS = {"split": split, "by left": by_left, "conditional": plain, "conditional, randomized": conditional}


def rows_of(size: int, level: float) -> list[list[str]]:
    """A row of the table for each method; all have the same rows in a run."""
    found = {name: [] for name in METHODS}
    for seed in range(RUNS[size]):
        rng = np.random.default_rng(seed)
        x, x_new = rng.uniform(-1, 1, size=(size, 2)), rng.uniform(-1, 1, size=(NUM_NEW, 2))
        y = stds_of(x) * rng.normal(size=size)
        while len(np.unique(side_of(x))) < 2:  # a table for each side needs rows of both
            x = rng.uniform(-1, 1, size=(size, 2))
            y = stds_of(x) * rng.normal(size=size)
        for name, method in METHODS.items():
            module = method(x, y, level, jax.random.key(seed))
            lower, upper = (np.asarray(end) for end in module(x_new, jc.Point(np.zeros(NUM_NEW))).interval(level))
            covered = ndtr(upper / stds_of(x_new)) - ndtr(lower / stds_of(x_new))
            found[name].append([*averages(x_new, covered), np.isinf(upper).mean()])
    return [[name, str(size), *cells(100 * np.array(values))] for name, values in found.items()]


def averages(x: np.ndarray, covered: np.ndarray) -> list[float]:
    """Of the coverage over all rows, each group, and the rows weighted by the tilt."""
    left, top = np.asarray(side_of(x)), x[:, 1] > 0
    weights = np.ones(len(x)), left, top, left | top, 1 + x[:, 1]
    return [float(np.average(covered, weights=each)) for each in weights]


def cells(values: np.ndarray) -> list[str]:
    """The coverages of all runs of a method, and how many intervals were infinite."""
    *coverages, infinite = values.T
    shown = [f"{each.mean():.1f} ± {_report.standard_error(each):.1f}" for each in coverages]
    if infinite.any():
        shown[0] += f" ({infinite.mean():.0f})"
    return shown


def speed() -> dict[str, float]:
    """How long cutoffs take, and linear programs for the first new rows."""
    rng, level = np.random.default_rng(0), 0.9
    x, x_new = rng.normal(size=(2, TIMED_ROWS, TIMED_FEATURES - 1))
    y, base = rng.normal(size=TIMED_ROWS), jc.Point(np.zeros(TIMED_ROWS))
    fit = lambda: jc.conditional_conformal.fit(None, base, y, features=x, confidence_levels=(level,))
    upper = lambda module: np.asarray(module(None, base, features=x_new).icdf(0.95))
    upper(fit())
    start = time.perf_counter()
    module = fit()
    fitted = time.perf_counter()
    ours = upper(module)
    end = time.perf_counter()
    rows, new, scores = np.column_stack([np.ones(TIMED_ROWS), x]), np.insert(x_new, 0, 1, axis=1), np.abs(y)
    programs = [program(rows, scores, row, level) for row in new[:PROGRAMS]]
    highs = (time.perf_counter() - end) / PROGRAMS
    return {
        "rows": TIMED_ROWS,
        "features": TIMED_FEATURES,
        "ours": end - start,
        "fit": fitted - start,
        "highs": 1000 * highs,
        "total": TIMED_ROWS * highs,
        "programs": PROGRAMS,
        "difference": np.abs(np.array(programs) - ours[:PROGRAMS]).max() / scores.std(),
    }


def program(rows: np.ndarray, scores: np.ndarray, new: np.ndarray, level: float) -> float:
    """The cutoff of one new row by a linear program: its dual is the level, the coefficients are the multipliers."""
    bounds = [(level - 1, level)] * len(scores)
    found = linprog(-scores, A_eq=rows.T, b_eq=-level * new, bounds=bounds, method="highs")
    return float(-found.eqlin.marginals @ new)


if __name__ == "__main__":
    main()
