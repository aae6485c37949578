"""How often sharp calibrated quantiles cover, simulated: `python -m benchmarks.tables.sharp_gp_coverage`.

Theorem 5.4 of the paper says that a new row lies at or below the quantile at level j / (N + 1) with about that
probability. The fraction of all new rows that does would follow Beta(j, N + 1 - j) from one calibration set to the
next. Here 2000 calibration sets of three sizes are drawn, and the 0.9-quantile of each measured at fresh rows: with
lengthscales chosen by the training rows, jaxcal's default, and by the calibration rows, the paper's algorithm.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import jaxcal as jc
from benchmarks.tables import _jobs, _report

RESULT = Path(__file__).parents[1] / "results" / "sharp_gp_coverage.md"
NUM_TRAIN, NUM_COLUMNS, NUM_NEW = 60, 8, 2000
SIZES, LEVEL = (39, 99, 199), 0.9
# Each training set is calibrated so often.
TRAINING_SETS, CALIBRATIONS = 10, 200
METHODS = {
    "exact (default)": {},
    "exact ARD": {"variance": jc.sharp_gp.Variance(search="ard")},
    "line by calibration rows": {"variance": jc.sharp_gp.Variance(fit_on="calibration")},
    'preset="paper"': {"preset": "paper"},
}
BAND = 0.9

LEGEND = f"""\
Rows have {NUM_COLUMNS} standard normal columns; the target is the sum of the sines of the first two and normal noise,
whose std is 0.3 and the size of the first column together. The base is the Gaussian process of the greatest evidence
of {NUM_TRAIN} training rows. {TRAINING_SETS} training sets, {CALIBRATIONS} calibration sets of each; coverage is the
probability that a target is at most the {LEVEL:g}-quantile, in the mean of {NUM_NEW} fresh rows for every set. By the
guarantee its mean is {LEVEL:g}, and a fraction of {BAND:g} of the sets lies in the central band of the Beta
distribution, which Kolmogorov and Smirnov's test compares with."""


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    rows = [row(size, name) for size in SIZES for name in METHODS]
    header = ["calibration rows", "lengthscales", "mean coverage", "standard errors from 0.9", "in the band", "KS p"]
    parts = ["# How often sharp calibrated quantiles cover", f"- {_jobs.origin()}", LEGEND]
    RESULT.write_text("\n\n".join([*parts, _report.markdown_table(header, rows)]) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def row(size: int, name: str) -> list[str]:
    """The realised coverages of a method beside their Beta distribution."""
    found = np.concatenate([coverages(size, name, seed) for seed in range(TRAINING_SETS)])
    rank = round(LEVEL * (size + 1))
    distribution = stats.beta(rank, size + 1 - rank)
    error = (found.mean() - distribution.mean()) / (distribution.std() / np.sqrt(len(found)))
    low, high = distribution.interval(BAND)
    inside = np.mean((found >= low) & (found <= high))
    return [str(size), name, f"{found.mean():.4f}", f"{error:+.1f}", f"{inside:.3f}", p_value(found, distribution)]


def p_value(found: np.ndarray, distribution) -> str:
    p = stats.kstest(found, distribution.cdf).pvalue
    return f"{p:.2f}" if p >= 0.01 else f"{p:.0e}"


def coverages(size: int, name: str, seed: int) -> np.ndarray:
    """Of all calibration sets of one training set."""
    rng = np.random.default_rng(seed)
    train = draw(rng, NUM_TRAIN)
    model = jc.gaussian_process.fit(*train)
    # New rows for every set: the same ones would err in the same direction each time.
    sets = [(*draw(rng, size), rng.normal(size=(NUM_NEW, NUM_COLUMNS))) for _ in range(CALIBRATIONS)]
    measure = partial(coverage, model, *train, **METHODS[name])
    return np.array([measure(*each) for each in sets])


def draw(rng: np.random.Generator, size: int) -> tuple[np.ndarray, jax.Array]:
    x = rng.normal(size=(size, NUM_COLUMNS))
    distribution = truth(x)
    return x, distribution.mean + distribution.std * rng.normal(size=size)


def truth(x: np.ndarray) -> jc.Normal:
    """The distribution of the target."""
    return jc.Normal(jnp.sin(x[:, :2]).sum(axis=1), 0.3 + jnp.abs(x[:, 0]))


@eqx.filter_jit
def coverage(model, x_train, y_train, x, y, x_new, **options) -> jax.Array:
    """The probability, in the mean of new rows, that the target is at most the quantile that calibration rows give."""
    fit = partial(jc.sharp_gp.fit, x_train=x_train, y_train=y_train, kernel=model, levels=LEVEL)
    fitted = fit(x, model(x), y, **options)
    return truth(x_new).cdf(fitted(x_new, model(x_new)).values[:, 0]).mean()


if __name__ == "__main__":
    main()
