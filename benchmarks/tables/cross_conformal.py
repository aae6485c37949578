"""How often CV+ and its kin cover, simulated: `python -m benchmarks.tables.cross_conformal`.

Three models of simulated rows, each with the 90 % intervals of split conformal prediction, of errors out of fold around
the model of all rows, and of CV+, the jackknife+ and the jackknife+-after-bootstrap. Every interval is measured at
fresh rows. It takes about two minutes on one core. Other numbers of rows and levels are in `coverage`.
"""

from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables.sharp_gp_coverage import truth

RESULT = Path(__file__).parents[1] / "results" / "cross_conformal.md"
NUM_ROWS, NUM_NEW, LEVEL, RUNS = 100, 500, 0.9, 40
FOLDS, SPLIT, MODELS, NEIGHBORS = 10, 0.25, 50, 5

LEGEND = f"""\
{NUM_ROWS} rows, {NUM_NEW} fresh ones, {RUNS} runs. "least squares" is fitted to a linear target with normal noise of
std 1, in 5 or in 100 columns: there it has the least norm. "nearest rows" predicts the mean of the {NEIGHBORS} nearest
rows; rows have 8 standard normal columns, the target is the sum of the sines of the first two and normal noise, whose
std is 0.3 and the size of the first column together. Coverage is the fraction of the fresh rows in the intervals of
{100 * LEVEL:g} %, in per cent: its mean ± standard error over the runs, and the least and the greatest of a run. The
width is the mean one, over that of the true distribution. "guaranteed" is the least probability that the method
guarantees, on average over runs. "split" sets {100 * SPLIT:g} % of the rows aside. "out of fold" has the errors of
{FOLDS} folds around the model that is fitted to all rows, which has made none of them. The jackknife+-after-bootstrap
has {MODELS} models in the mean."""


class Plane(eqx.Module):
    """A linear function."""

    weights: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Its value at every row."""
        return x @ self.weights


class NearestRows(eqx.Module):
    """The mean target of the nearest rows."""

    x: jax.Array
    y: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """The prediction of every row."""
        distances = jnp.sum(self.x**2, axis=1)[None] - 2 * x @ self.x.T  # but for what all rows share
        return self.y[jax.lax.top_k(-distances, NEIGHBORS)[1]].mean(axis=1)


@jax.jit
def fit_plane(x: jax.Array, y: jax.Array, *, key: jax.Array) -> Plane:
    return Plane(jnp.linalg.pinv(x) @ y)


def fit_nearest(x: jax.Array, y: jax.Array, *, key: jax.Array) -> NearestRows:
    return NearestRows(x, y)


def linear(rng: np.random.Generator, columns: int, size: int) -> tuple[np.ndarray, jc.Normal]:
    """Inputs, and the distribution of their targets, in all columns."""
    x = rng.normal(size=(size, columns))
    return x, jc.Normal(x.sum(axis=1) / np.sqrt(columns), 1.0)


def sines(rng: np.random.Generator, columns: int, size: int) -> tuple[np.ndarray, jc.Normal]:
    """Inputs, and the distribution of their targets, in the first two columns."""
    x = rng.normal(size=(size, columns))
    return x, truth(x)


PROBLEMS = {
    "least squares, 5 columns": (linear, 5, fit_plane),
    "least squares, 100 columns": (linear, 100, fit_plane),
    "nearest rows, 8 columns": (sines, 8, fit_nearest),
}


def split(fit: Callable, x: np.ndarray, y: np.ndarray, key: jax.Array) -> Callable:
    return jc.pipeline.fit(x, y, predictor=fit, method=jc.pipeline.Split(fraction=SPLIT), key=key)


def out_of_fold(fit: Callable, x: np.ndarray, y: np.ndarray, key: jax.Array) -> Callable:
    calibrated = jc.conformal.fit(None, jc.out_of_fold(fit, x, y, key=key, folds=FOLDS), y)
    model = fit(jnp.asarray(x), jnp.asarray(y), key=key)
    return lambda x: calibrated(None, jc.Point(model(jnp.asarray(x))))


def cv_plus(fit: Callable, x: np.ndarray, y: np.ndarray, key: jax.Array) -> Callable:
    return jc.cross_conformal.fit(fit, x, y, key=key, folds=FOLDS)


def jackknife_plus(fit: Callable, x: np.ndarray, y: np.ndarray, key: jax.Array) -> Callable:
    return jc.cross_conformal.fit(fit, x, y, key=key, folds=NUM_ROWS)


def after_bootstrap(fit: Callable, x: np.ndarray, y: np.ndarray, key: jax.Array) -> Callable:
    return jc.cross_conformal.fit_bootstrap(fit, x, y, key=key, num_models=MODELS)


METHODS = {
    "split": split,
    "out of fold": out_of_fold,
    "CV+": cv_plus,
    "jackknife+": jackknife_plus,
    "jackknife+-after-bootstrap": after_bootstrap,
}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    rows = [row for problem in PROBLEMS for row in rows_of(problem)]
    header = ["model", "method", "guaranteed", "coverage", "width"]
    parts = ["# How often CV+ and its kin cover", f"- {_jobs.origin()}", LEGEND, _report.markdown_table(header, rows)]
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def rows_of(problem: str) -> list[list[str]]:
    """A row of the table for each method; all have the same rows in a run."""
    draw, columns, fit = PROBLEMS[problem]
    found = {name: [] for name in METHODS}
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        x, distribution = draw(rng, columns, NUM_ROWS)
        x_new, new = draw(rng, columns, NUM_NEW)
        y, y_new = (each.mean + each.std * rng.normal(size=len(each.mean)) for each in (distribution, new))
        true_lower, true_upper = new.interval(LEVEL)
        for name, method in METHODS.items():
            module = method(fit, x, y, jax.random.key(seed))
            lower, upper = module(x_new).interval(LEVEL)
            covered, width = (lower <= y_new) & (y_new <= upper), (upper - lower).mean()
            found[name].append((100 * covered.mean(), width / (true_upper - true_lower).mean(), least(module)))
    return [[problem, name, *cells(np.array(values))] for name, values in found.items()]


def least(module: Callable) -> float:
    """The least coverage that is guaranteed, in per cent; 0 where none is."""
    guarantee = getattr(module, "guarantee", None)
    return 100 * guarantee(LEVEL).coverage if guarantee else 0.0


def cells(values: np.ndarray) -> list[str]:
    """What is guaranteed, the coverage and the width, of all runs of a method."""
    coverage, width, guaranteed = values.T
    ends = f"{coverage.min():.0f} to {coverage.max():.0f}"
    measured = f"{coverage.mean():.1f} ± {_report.standard_error(coverage):.1f} ({ends})"
    return [f"{guaranteed[0]:.1f}" if guaranteed[0] else "nothing", measured, f"{width.mean():.2f}"]


if __name__ == "__main__":
    main()
