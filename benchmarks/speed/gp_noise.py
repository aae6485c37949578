"""What `noise=` and `ard` do for a Gaussian process: `python benchmarks/speed/gp_noise.py`.

Simulated: one target of 300 that is wrong by 1000, the error on the function elsewhere; Student t noise, how often
intervals cover; noise whose std grows tenfold, coverage in thirds of x; 50 columns of which 5 matter, the error of RIO.
Real: what Student t noise and noise that depends on the inputs cost or gain in NLPD, on residuals of a linear model, by
five splits of at most 300 training rows. Means over the seeds; processor seconds are medians of second calls.
"""

import argparse
import time
import warnings
from pathlib import Path

import jax
import numpy as np
from _common import provenance, tell

import jaxcal as jc

NOISES = {"gaussian": jc.gp.GaussianNoise(), "student_t": jc.gp.StudentTNoise(), "input": jc.gp.InputNoise()}
DATASETS = ("yacht", "boston", "concrete", "auto_mpg", "wine_red", "energy_heating", "diabetes", "airfoil", "kin8nm")
ROWS, NEW = 300, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="samples, and half as many splits of every data set")
    parser.add_argument("--out", type=Path, help="file that gets a copy of what is printed")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # outliers are what this is about
    tell(lines(arguments.seeds), arguments.out)


def lines(seeds: int):
    yield provenance()
    yield f"\nSimulated, {ROWS} rows, {seeds} seeds: sin(2 x) and noise of std 0.3"
    yield f"{'':28}" + "".join(f"{noise:>24}" for noise in NOISES)
    for label, simulate in SIMULATIONS.items():
        found = {noise: [simulate(noise, np.random.default_rng(seed)) for seed in range(seeds)] for noise in NOISES}
        cells = (" ".join(f"{value:.3f}" for value in np.mean(found[noise], axis=0)) for noise in NOISES)
        yield f"{label:28}" + "".join(f"{cell:>24}" for cell in cells)
    yield f"\n50 columns of which 5 matter, {ROWS} rows, {seeds} seeds: RMSE of RIO, and how often ARD is chosen"
    for ard in (False, True, "auto"):
        found = [columns(ard, np.random.default_rng(seed)) for seed in range(seeds)]
        yield f"ard={ard!s:8}{np.mean(found, axis=0)[0]:8.3f}{np.mean(found, axis=0)[1]:8.2f}"
    yield f"\nReal, {max(1, seeds // 2)} splits: NLPD and processor seconds"
    yield f"{'':20}" + "".join(f"{noise:>20}" for noise in NOISES)
    for name in DATASETS:
        found = {noise: [real(name, seed, noise) for seed in range(max(1, seeds // 2))] for noise in NOISES}
        cells = ((np.mean(found[noise], axis=0)[0], np.median(found[noise], axis=0)[1]) for noise in NOISES)
        yield f"{name:20}" + "".join(f"{nlpd:12.3f}{seconds:8.3f}" for nlpd, seconds in cells)


def function(x: np.ndarray) -> np.ndarray:
    return np.sin(2 * x)


def sample(rng: np.random.Generator, draw):
    """Inputs and targets to fit, and others."""
    x, new = rng.uniform(-3, 3, ROWS), rng.uniform(-3, 3, NEW)
    return x, function(x) + draw(x), new, function(new) + draw(new)


def outlier(noise: str, rng: np.random.Generator) -> list[float]:
    """The error on the function, with and without a target that is wrong by 1000."""
    x, y, new, _ = sample(rng, lambda x: 0.3 * rng.normal(size=len(x)))
    errors = []
    for wrong in (1000, 0):
        y[7] += wrong
        after = jc.gaussian_process.fit(x, y, noise=NOISES[noise])(new)
        y[7] -= wrong
        errors.append(float(np.sqrt(np.mean((np.asarray(after.mean) - function(new)) ** 2))))
    return errors


def tails(df: float):
    """How often intervals of 68 and 90 % cover, and the NLPD, where the noise is Student t."""

    def simulate(noise: str, rng: np.random.Generator) -> list[float]:
        x, y, new, targets = sample(rng, lambda x: 0.3 * rng.standard_t(df, len(x)))
        after = jc.gaussian_process.fit(x, y, noise=NOISES[noise])(new)
        covered = (float(jc.metrics.coverage(targets, after, confidence_level=level)) for level in (0.68, 0.9))
        return [*covered, float(jc.metrics.nlpd(targets, after))]

    return simulate


def growing(noise: str, rng: np.random.Generator) -> list[float]:
    """How often intervals of 90 % cover in thirds of x, and the NLPD, where the std grows from 0.1 to 1."""
    x, y, new, targets = sample(rng, lambda x: 10 ** ((x - 3) / 6) * rng.normal(size=len(x)))
    after = jc.gaussian_process.fit(x, y, noise=NOISES[noise])(new)
    lower, upper = after.interval(0.9)
    inside = (targets >= lower) & (targets <= upper)
    third = np.minimum((new + 3) // 2, 2)
    return [*(float(np.mean(inside[third == number])) for number in range(3)), float(jc.metrics.nlpd(targets, after))]


SIMULATIONS = {
    "one outlier: RMSE, without": outlier,
    "t, df 2: 68 %, 90 %, NLPD": tails(2),
    "t, df 3: 68 %, 90 %, NLPD": tails(3),
    "t, df 4: 68 %, 90 %, NLPD": tails(4),
    "normal: 68 %, 90 %, NLPD": tails(1e6),
    "growing: thirds, NLPD": growing,
}


def columns(ard: bool | str, rng: np.random.Generator) -> list[float]:
    """The error of RIO, and whether its lengthscales differ."""
    x = rng.normal(size=(ROWS + NEW, 50))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3] ** 2 - x[:, 4] + 0.1 * rng.normal(size=len(x))
    base = jc.Point(np.zeros(len(x)))
    options = {"kernel": "input", "inference": jc.gp.Exact(ard=ard)}
    rio = jc.rio.fit(x[:ROWS], jc.Point(base.mean[:ROWS]), y[:ROWS], **options)
    after = rio(x[ROWS:], jc.Point(base.mean[ROWS:]))
    return [float(jc.metrics.rmse(y[ROWS:], after)), float(np.ptp(rio.kernel.input.log_lengthscale) > 0)]


def real(name: str, seed: int, noise: str) -> list[float]:
    """NLPD and seconds on one split, around a linear model."""
    data = jc.datasets.load(name)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train, test = train[:ROWS], test[:NEW]
    with_intercept = lambda x: np.column_stack([x, np.ones(len(x))])
    weights = np.linalg.lstsq(with_intercept(data.x[train]), data.y[train], rcond=None)[0]
    base = lambda rows: jc.Point(with_intercept(data.x[rows]) @ weights)
    options = {"noise": NOISES[noise], "throw": False}
    fit = lambda: jax.block_until_ready(jc.rio.fit(data.x[train], base(train), data.y[train], **options))
    fit()
    began = time.process_time()
    rio = fit()
    seconds = time.process_time() - began
    return [float(jc.metrics.nlpd(data.y[test], rio(data.x[test], base(test)))), seconds]


if __name__ == "__main__":
    main()
