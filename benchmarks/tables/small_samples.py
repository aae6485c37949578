"""How often intervals from few calibration rows cover, and what densities are worth, simulated.

`python -m benchmarks.tables.small_samples` takes two minutes. The base is right: its coverage and its log density are
what calibration rows can only harm. Each calibrator is measured by its default and as it is without it.
"""

import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

import jaxcal as jc
from benchmarks.tables import _jobs, _report

RESULT = Path(__file__).parents[1] / "results" / "small_samples.md"
SIZES, LEVELS = (5, 9, 19, 99, 999), (0.5, 0.8, 0.9, 0.99)
RUNS, NEIGHBORS = {5: 4000, 9: 4000, 19: 4000, 99: 2000, 999: 400}, 20
# Log densities are measured at so many new values.
NUM_NEW = 2000
METHODS = {
    "crude": jc.crude.fit,
    'crude, preset="paper"': partial(jc.crude.fit, preset="paper"),
    f"crude, {NEIGHBORS} neighbors": partial(jc.crude.fit, neighbors=NEIGHBORS),
    f'crude, {NEIGHBORS} neighbors, rank="crude"': partial(jc.crude.fit, neighbors=NEIGHBORS, rank="crude"),
    "isotonic": jc.isotonic.fit,
    'isotonic, tails="support"': partial(jc.isotonic.fit, tails="support"),
    "isotonic, Student t base": jc.isotonic.fit,
    "gaussian_mle": jc.gaussian_mle.fit,
    'gaussian_mle, preset="paper"': partial(jc.gaussian_mle.fit, preset="paper"),
    'conformal, rule="linear"': partial(jc.conformal.fit, rule="linear"),
    "conformal": jc.conformal.fit,
}
STUDENT_T = {"isotonic, Student t base"}

LEGEND = f"""\
Targets are standard normal, or of a Student t distribution with 5 degrees of freedom, and the base is just that;
one uniform column x, on which nothing depends. Coverage in %, the mean over {RUNS[9]} calibration sets of up to 19
rows, {RUNS[99]} of 99 and {RUNS[999]} of 999. inf: the interval is infinite, as no finite one covers as often. In the
last column the mean log density that is lost, in nats, of {NUM_NEW} new values, beside that of the base; – without a
density. Standard errors are below 0.3 % and, of the last column, a few per cent of it. (*): the level is beyond what so
few rows reach, and a warning says so."""


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    rows = [row(name, size) for name in METHODS for size in SIZES if size >= NEIGHBORS or "neighbors" not in name]
    header = ["calibrator", "rows", *(f"{100 * level:g} %" for level in LEVELS), "log density lost"]
    parts = ["# What few calibration rows give", f"- {_jobs.origin()}", LEGEND, _report.markdown_table(header, rows)]
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def row(name: str, size: int) -> list[str]:
    """The coverages of a calibrator from so many rows, and what its log density loses."""
    draw, cdf, base = student_t() if name in STUDENT_T else normal()
    rng = np.random.default_rng(size)
    y, x = draw(rng, (RUNS[size], size)), rng.uniform(size=(RUNS[size], size, 1))
    lower, upper = ends(METHODS[name], base, x, y)
    covered = np.mean(cdf(upper) - cdf(lower), axis=0)
    infinite = np.isinf(upper).any(axis=0)
    few = [jc.functional.quantiles.smallest_table((1 + level) / 2) > size for level in LEVELS]
    by_table = "mle" not in name and name != "conformal"
    cells = [
        "inf" if none else f"{100 * value:.1f}" + (" (*)" if by_table and short else "")
        for value, none, short in zip(covered, infinite, few, strict=True)
    ]
    new = draw(rng, NUM_NEW)
    lost = np.mean(base(NUM_NEW).log_prob(new)) - log_density(METHODS[name], base, x[:100], y[:100], new)
    return [name, str(size), *cells, f"{lost:.3f}" if np.isfinite(lost) else _report.MISSING]


def normal():
    """How targets are drawn, their cdf, and a base of so many rows."""
    return lambda rng, shape: rng.normal(size=shape), ndtr, lambda n: jc.Normal(jnp.zeros(n), jnp.ones(n))


def student_t():
    """The same of a Student t distribution."""
    base = lambda n: jc.distributions.StudentT(5.0, jnp.zeros(n), jnp.ones(n))
    return lambda rng, shape: rng.standard_t(5, size=shape), lambda y: jc.functional.student_t.cdf(y, 5.0), base


def ends(fit, base, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends [runs, levels] of the intervals that each calibration set gives a row in the middle."""

    def of_one(x, y):
        forecast = fit(x, base(y.shape[0]), y)(jnp.full((1, 1), 0.5), base(1))
        pairs = [forecast.interval(level) for level in LEVELS]
        return tuple(jnp.stack([pair[side][0] for pair in pairs]) for side in (0, 1))

    return jax.jit(jax.vmap(of_one))(x, y)


def log_density(fit, base, x: np.ndarray, y: np.ndarray, new: np.ndarray) -> float:
    """The mean log density of new values."""

    def of_one(x, y):
        return fit(x, base(y.shape[0]), y)(jnp.full((NUM_NEW, 1), 0.5), base(NUM_NEW)).log_prob(new).mean()

    return float(jax.jit(jax.vmap(of_one))(x, y).mean())


if __name__ == "__main__":
    main()
