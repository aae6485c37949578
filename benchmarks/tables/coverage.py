"""How often intervals cover, simulated, beside what is stated: `python -m benchmarks.tables.coverage`.

Every method of intervals but the conditional and the online ones, which have scripts of their own, from 9 to 999
calibration rows. Coverage is a probability, by the cdf of the truth, averaged over runs; most methods calibrate all
runs of a size in one call. It takes about ten minutes on one core, most of them for models that are fitted anew. A new
method is an entry of METHODS. The second table is what densities from few rows are worth.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

import jaxcal as jc
from benchmarks.tables import _coverage_bands as bands
from benchmarks.tables import _jobs, _report
from benchmarks.tables.cross_conformal import fit_plane, linear

RESULT = Path(__file__).parents[1] / "results" / "coverage.md"
SIZES, LEVELS = (9, 19, 99, 999), (0.5, 0.8, 0.9, 0.99)
FEW = (5, *SIZES)
# A mean lies in a band if it is at most so many standard errors off.
ERRORS = 4
RUNS = {5: 4000, 9: 4000, 19: 4000, 99: 2000, 999: 400}
# Of methods that fit a model, or a classifier, in every run.
FEWER_RUNS = {9: 200, 19: 200, 99: 100, 999: 20}
NEIGHBORS, NUM_GROUPS, NUM_NEW, NUM_DENSITIES = 20, 3, 50, 1000
CV_FOLDS, MODELS, TREES = {9: 3, 19: 3, 99: 10, 999: 10}, 50, 300
SHIFT, NUM_UNLABELLED = 1.0, 1000

LEGEND = f"""\
Coverage in %, its mean ± standard error over {RUNS[9]} calibration sets of up to 19 rows, {RUNS[99]} of 99 and
{RUNS[999]} of 999; {FEWER_RUNS[9]}, {FEWER_RUNS[99]} and {FEWER_RUNS[999]} of the methods that fit a model, or a
classifier, in every run. *Stated* is what documentation or guarantee says of it; – where they say nothing. **!** marks
a mean more than {ERRORS} standard errors off. inf: the interval is infinite in every run, as no finite one covers as
often, or the fit refuses the level; (inf 20 %): at least one end is, for so many of the new rows.

- *wrong base*: the noise is a gamma distribution's, its std exp(x) with x uniform on [0, 1]; the base is normal, with
  mean 0.3 and std 1 + x.
- *right base*: the targets' own distribution, standard normal or of Student t with 5 degrees of freedom.
- *groups*: as many rows in each of {NUM_GROUPS} groups, one of them normal and two skewed, to either side; their stds
  are 1, 0.5 and 2, those of the base 1; *normal groups*: all three are normal. "worst" is the group of the least
  coverage, "all" their mean. "pooled" is with `partial_pooling`.
- *shift*: the one column is standard normal in the calibration rows, and normal with mean {SHIFT:g} in the new ones;
  the std of the noise is exp(x / 4). The ratio of densities is known, or `density_ratio.fit`'s from
  {NUM_UNLABELLED} other rows of each kind.
- *least squares*: a linear target in 2 columns, normal noise; CV+ has {CV_FOLDS[9]} folds of up to 19 rows, else
  {CV_FOLDS[99]}. The jackknife+-after-bootstrap has {MODELS} models in the mean, the forest, which takes 10 rows
  at least, {TREES} trees.

Conditional conformal prediction has a table of its own. What follows the rows (ACI, DtACI, PID) is in `online.md`: its
statement is about the long run."""

LEGEND_OF_DENSITIES = f"""\
**What densities from few rows are worth**: the mean log density, in nats, that is lost beside that of the right base,
at {NUM_DENSITIES} new values; the mean ± standard error over {RUNS[9] // 4} calibration sets of up to 19 rows,
{RUNS[99] // 4} of 99 and {RUNS[999] // 4} of 999."""


class Coverage(NamedTuple):
    """What was found for one method and size.

    Attributes:
        covered: the probabilities [runs, new rows, levels] that the intervals cover.
        infinite: the fraction of infinite ones [levels].
    """

    covered: np.ndarray
    infinite: np.ndarray


class Method(NamedTuple):
    """A row of the table for every size.

    Attributes:
        simulate: gives the `Coverage` from so many calibration rows.
        band: what is stated of it.
        part: None; or "worst" or "all" where every new row stands for a group.
        sizes: the numbers of calibration rows.
    """

    simulate: Callable[[int], Coverage]
    band: bands.Band
    part: str | None = None
    sizes: tuple[int, ...] = SIZES


class Problem(NamedTuple):
    """Rows whose distribution is known.

    Attributes:
        draw: gives x and y of a shape [runs, rows].
        base: the predictions at x [n, 1].
        cdf: of targets y [runs, new rows, levels] at the new inputs.
        new: the new inputs [m, 1].
    """

    draw: Callable[[np.random.Generator, tuple[int, int]], tuple[np.ndarray, np.ndarray]]
    base: Callable[[Any], jc.Distribution]
    cdf: Callable[[np.ndarray], np.ndarray]
    new: np.ndarray


# The problems


def gamma_cdf(y: np.ndarray) -> np.ndarray:
    """Of a gamma distribution of shape 3, with mean 0 and std 1."""
    return special.gammainc(3, np.maximum(3 + np.sqrt(3) * y, 0))


def gamma(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values of that distribution."""
    return (rng.gamma(3, size=shape) - 3) / np.sqrt(3)


def draw_wrong(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    x = rng.uniform(size=shape)
    return x, np.exp(x) * gamma(rng, shape)


GRID = (np.arange(64.0)[:, None] + 0.5) / 64
WRONG = Problem(
    draw_wrong, lambda x: jc.Normal(jnp.full(len(x), 0.3), 1 + x[:, 0]), lambda y: gamma_cdf(y / np.exp(GRID)), GRID
)
MIDDLE = np.full((1, 1), 0.5)
NORMAL = Problem(
    lambda rng, shape: (rng.uniform(size=shape), rng.normal(size=shape)),
    lambda x: jc.Normal(jnp.zeros(len(x)), jnp.ones(len(x))),
    special.ndtr,
    MIDDLE,
)
STUDENT_T = Problem(
    lambda rng, shape: (rng.uniform(size=shape), rng.standard_t(5, size=shape)),
    lambda x: jc.StudentT(5.0, jnp.zeros(len(x)), jnp.ones(len(x))),
    lambda y: special.stdtr(5, y),
    MIDDLE,
)


def draw_groups(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    runs, size = shape
    y = np.stack([rng.normal(size=shape), -0.5 * gamma(rng, shape), 2 * gamma(rng, shape)], axis=1)
    return np.tile(labels(size), (runs, 1)), y.reshape(runs, -1)


def groups_cdf(y: np.ndarray) -> np.ndarray:
    return np.stack([special.ndtr(y[:, 0]), 1 - gamma_cdf(-2 * y[:, 1]), gamma_cdf(y[:, 2] / 2)], axis=1)


def labels(size: int) -> np.ndarray:
    """The number of the group of every row."""
    return np.repeat(np.arange(NUM_GROUPS), size)


GROUPS = Problem(draw_groups, NORMAL.base, groups_cdf, np.arange(NUM_GROUPS)[:, None])
STDS = np.array([1.0, 0.5, 2.0])


def draw_normal_groups(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    runs, size = shape
    number = np.tile(labels(size), (runs, 1))
    return number, STDS[number] * rng.normal(size=number.shape)


NORMAL_GROUPS = GROUPS._replace(draw=draw_normal_groups, cdf=lambda y: special.ndtr(y / STDS[:, None]))


# The simulations


def split(problem: Problem, intervals: Callable) -> Callable[[int], Coverage]:
    """The simulation of a calibrator: `intervals(x, base, y, new_x, new_base, key)` gives the ends at all levels."""

    def simulate(size: int) -> Coverage:
        rng = np.random.default_rng(size)
        x, y = problem.draw(rng, (RUNS[size], size))
        keys = jax.random.split(jax.random.key(size), RUNS[size])
        lower, upper = (np.asarray(end) for end in _ends(problem, intervals, x[..., None], y, keys))
        return Coverage(problem.cdf(upper) - problem.cdf(lower), np.isinf(upper - lower).mean(axis=(0, 1)))

    return simulate


@eqx.filter_jit
def _ends(problem: Problem, intervals: Callable, x, y, keys) -> tuple[jax.Array, jax.Array]:
    def of_run(run):
        x, y, key = run
        pairs = intervals(x, problem.base(x), y, problem.new, problem.base(problem.new), key)
        return tuple(jnp.stack([pair[side] for pair in pairs], axis=-1) for side in (0, 1))

    return jax.lax.map(of_run, (x, y, keys), batch_size=400)


def of(fit: Callable) -> Callable:
    """Intervals at all levels from one fit."""

    def intervals(x, base, y, new_x, new_base, key):
        forecast = fit(x, base, y)(new_x, new_base)
        return [forecast.interval(level) for level in LEVELS]

    return intervals


def randomized(x, base, y, new_x, new_base, key):
    return of(partial(jc.conformal.fit, rule="randomized", key=key))(x, base, y, new_x, new_base, key)


def quantile(x, base, y, new_x, new_base, key):
    """A fit for each level, which no other one widens; a level that it refuses has an infinite interval."""
    infinite = jnp.full(len(new_x), jnp.inf)
    found = []
    for level in LEVELS:
        if y.shape[0] < jc.functional.quantiles.smallest_table(level):
            found.append((-infinite, infinite))
        else:
            fitted = jc.conformal.fit(None, base, y, score="quantile", confidence_levels=[level])
            found.append(fitted(None, new_base).interval(level))
    return found


def by_groups(fit: Callable) -> Callable:
    """Intervals of the rows of `GROUPS`, each from its group."""

    def intervals(x, base, y, new_x, new_base, key):
        forecast = fit(None, base, y, by=labels(y.shape[0] // NUM_GROUPS))(None, new_base, by=np.arange(NUM_GROUPS))
        return [forecast.interval(level) for level in LEVELS]

    return intervals


def quantile_by_groups(x, base, y, new_x, new_base, key):
    """A fit for each level, from the groups; a level that it refuses has an infinite interval."""
    by, infinite = labels(y.shape[0] // NUM_GROUPS), jnp.full(NUM_GROUPS, jnp.inf)
    found = []
    for level in LEVELS:
        if y.shape[0] // NUM_GROUPS < jc.functional.quantiles.smallest_table(level):
            found.append((-infinite, infinite))
        else:
            fitted = jc.conformal.fit(None, base, y, score="quantile", confidence_levels=[level], by=by)
            found.append(fitted(None, new_base, by=np.arange(NUM_GROUPS)).interval(level))
    return found


def shifted(fit: Callable, weights: str | None) -> Callable[[int], Coverage]:
    """The simulation of a shift of the inputs; every run is a group of one fit, so that all are one call.

    Args:
        fit: takes `by` and `weights`.
        weights: "known", "estimated" or None for none.
    """

    def simulate(size: int) -> Coverage:
        rng = np.random.default_rng(size)
        runs = FEWER_RUNS[size] if weights == "estimated" else RUNS[size]
        x, new_x = rng.normal(size=(runs, size)), SHIFT + rng.normal(size=(runs, NUM_NEW))
        y = np.exp(x / 4) * rng.normal(size=x.shape)
        ratios = [ratio(rng, weights) for _ in range(runs)] if weights else []
        weight, new_weight = (
            {"weights": np.concatenate([of_run(each) for of_run, each in zip(ratios, rows, strict=True)])}
            if weights
            else {}
            for rows in (x, new_x)
        )
        run, new_run = (np.repeat(np.arange(runs), each.shape[1]) for each in (x, new_x))
        fitted = fit(None, standard(x.size), y.ravel(), by=run, **weight)
        forecast = fitted(None, standard(new_x.size), by=new_run, **new_weight)
        ends = (np.asarray(forecast.interval(level)).reshape(2, runs, NUM_NEW) for level in LEVELS)
        lower, upper = np.stack(list(ends), axis=-1)
        std = np.exp(new_x / 4)[..., None]
        covered = special.ndtr(upper / std) - special.ndtr(lower / std)
        return Coverage(covered, np.isinf(upper).mean(axis=(0, 1)))

    return simulate


def ratio(rng: np.random.Generator, weights: str) -> Callable[[np.ndarray], Any]:
    """The density of new inputs over that of the others."""
    if weights == "known":
        return lambda x: np.exp(SHIFT * x - SHIFT**2 / 2)
    x, new_x = rng.normal(size=(2, NUM_UNLABELLED)) + np.array([[0.0], [SHIFT]])
    return jc.density_ratio.fit(x, new_x)


def standard(rows: int) -> jc.Normal:
    return jc.Normal(np.zeros(rows), np.ones(rows))


def crossed(fit: Callable, runs: dict[int, int] = FEWER_RUNS) -> Callable[[int], Coverage]:
    """The simulation of `fit(x, y, key)`, which fits models: of linear targets in 2 columns."""

    def simulate(size: int) -> Coverage:
        found = [of_run(size, seed) for seed in range(runs[size])]
        covered, infinite = (np.stack(each) for each in zip(*found, strict=True))
        return Coverage(covered, infinite.mean(axis=(0, 1)))

    def of_run(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        (x, rows), (new_x, new) = linear(rng, 2, size), linear(rng, 2, NUM_NEW)
        forecast = fit(x, rows.mean + rng.normal(size=size), jax.random.key(seed))(new_x)
        ends = [forecast.interval(level) for level in LEVELS]
        covered = [new.cdf(upper) - new.cdf(lower) for lower, upper in ends]
        return np.stack(covered, axis=-1), np.stack([np.isinf(upper) for _, upper in ends], axis=-1)

    return simulate


def cv_plus(x, y, key):
    return jc.cross_conformal.fit(fit_plane, x, y, key=key, folds=CV_FOLDS[len(y)])


def jackknife_plus(x, y, key):
    return jc.cross_conformal.fit(fit_plane, x, y, key=key, folds=len(y))


def after_bootstrap(x, y, key):
    return jc.cross_conformal.fit_bootstrap(fit_plane, x, y, key=key, num_models=MODELS)


def out_of_bag(x, y, key):
    forest = jc.forests.fit(x, y, key=key, model="random_forest", num_trees=TREES)
    return jc.cross_conformal.of_forest(forest, x, y, key=key)


def errors_of_folds(size: int) -> int:
    """Of CV+, whose folds have equal size."""
    return size // CV_FOLDS[size] * CV_FOLDS[size]


# The methods


def two_parts(name: str, simulate: Callable, band: bands.Band, band_of_all: bands.Band) -> dict[str, Method]:
    """Rows for the worst group and for all of them, of one simulation."""
    once = cache(simulate)
    return {
        f"{name}: worst": Method(once, band, "worst"),
        f"{name}: all": Method(once, band_of_all, "all"),
    }


conformal: Callable = jc.conformal.fit
crude, gaussian_mle, isotonic = jc.crude.fit, jc.gaussian_mle.fit, jc.isotonic.fit
POOLED = partial(crude, partial_pooling=True)
NEAREST = tuple(size for size in SIZES if size >= NEIGHBORS)
SCORES = {"absolute": bands.symmetric, "scaled": bands.symmetric, "signed": bands.two_tails}
METHODS: dict[str, Method] = {
    **{
        f'conformal, score="{score}", wrong base': Method(split(WRONG, of(partial(conformal, score=score))), band)
        for score, band in SCORES.items()
    },
    'conformal, score="quantile", wrong base': Method(split(WRONG, quantile), bands.symmetric),
    'conformal, rule="randomized", wrong base': Method(split(WRONG, randomized), bands.as_named),
    'conformal, rule="linear", wrong base': Method(
        split(WRONG, of(partial(conformal, rule="linear"))), bands.lines_that_end
    ),
    "crude, wrong base": Method(split(WRONG, of(crude)), bands.two_tails),
    'crude, score="cdf", right base, Student t': Method(
        split(STUDENT_T, of(partial(crude, score="cdf"))), bands.two_tails
    ),
    'crude, preset="paper", wrong base': Method(split(WRONG, of(partial(crude, preset="paper"))), bands.crude),
    f"crude, {NEIGHBORS} neighbors, right base": Method(
        split(NORMAL, of(partial(crude, neighbors=NEIGHBORS))), bands.of_neighbors(NEIGHBORS), sizes=NEAREST
    ),
    f'crude, {NEIGHBORS} neighbors, rank="crude", right base': Method(
        split(NORMAL, of(partial(crude, neighbors=NEIGHBORS, rank="crude"))),
        bands.crude_of_neighbors(NEIGHBORS),
        sizes=NEAREST,
    ),
    "isotonic, wrong base": Method(split(WRONG, of(isotonic)), bands.lines, sizes=FEW),
    "isotonic, right base": Method(split(NORMAL, of(isotonic)), bands.lines, sizes=FEW),
    "isotonic, right base, Student t": Method(split(STUDENT_T, of(isotonic)), bands.lines, sizes=FEW),
    'isotonic, tails="support", right base': Method(
        split(NORMAL, of(partial(isotonic, tails="support"))), bands.lines_of_paper, sizes=FEW
    ),
    "gaussian_mle, right base": Method(split(NORMAL, of(gaussian_mle)), bands.within_one_percent, sizes=FEW),
    **{
        f'gaussian_mle, shift="{shift}", right base': Method(
            split(NORMAL, of(partial(gaussian_mle, shift=shift))), bands.as_named
        )
        for shift in ("constant", "none")
    },
    'gaussian_mle, preset="paper", right base': Method(
        split(NORMAL, of(partial(gaussian_mle, preset="paper"))), bands.nothing, sizes=FEW
    ),
    **two_parts("conformal, groups, without by", split(GROUPS, of(conformal)), bands.nothing, bands.nothing),
    **two_parts("conformal by groups", split(GROUPS, by_groups(conformal)), bands.symmetric, bands.symmetric),
    **two_parts(
        'conformal by groups, score="quantile"', split(GROUPS, quantile_by_groups), bands.symmetric, bands.symmetric
    ),
    **two_parts("crude by groups", split(GROUPS, by_groups(crude)), bands.two_tails, bands.two_tails),
    **two_parts("crude by groups, pooled", split(GROUPS, by_groups(POOLED)), bands.nothing, bands.nothing),
    **two_parts("isotonic by groups", split(GROUPS, by_groups(isotonic)), bands.lines, bands.lines),
    **two_parts(
        "gaussian_mle by normal groups",
        split(NORMAL_GROUPS, by_groups(gaussian_mle)),
        bands.within_one_percent,
        bands.within_one_percent,
    ),
    "conformal, shift, without weights": Method(shifted(conformal, None), bands.nothing),
    "conformal, shift, known weights": Method(shifted(conformal, "known"), bands.at_least),
    "conformal, shift, estimated weights": Method(shifted(conformal, "estimated"), bands.nothing),
    "crude, shift, known weights": Method(shifted(crude, "known"), bands.at_least),
    "isotonic, shift, known weights": Method(shifted(isotonic, "known"), bands.nothing),
    "CV+, least squares": Method(crossed(cv_plus), bands.worst_case(errors_of_folds, CV_FOLDS.__getitem__)),
    "jackknife+, least squares": Method(
        crossed(jackknife_plus), bands.worst_case(lambda size: size, lambda size: size)
    ),
    "jackknife+-after-bootstrap, least squares": Method(
        crossed(after_bootstrap), bands.worst_case(lambda size: size, lambda size: None)
    ),
    "out of bag, random forest": Method(
        crossed(out_of_bag), bands.worst_case(lambda size: size, lambda size: None), sizes=SIZES[1:]
    ),
}
DENSITIES: dict[str, tuple[Problem, Callable]] = {
    "isotonic": (NORMAL, isotonic),
    "isotonic, Student t": (STUDENT_T, isotonic),
    'isotonic, tails="support"': (NORMAL, partial(isotonic, tails="support")),
    'conformal, rule="linear"': (NORMAL, partial(conformal, rule="linear")),
    "gaussian_mle": (NORMAL, gaussian_mle),
    'gaussian_mle, preset="paper"': (NORMAL, partial(gaussian_mle, preset="paper")),
}


# The table


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # of infinite intervals, which the table has
    rows, off, checked = [], [], 0
    for name, method in METHODS.items():
        for size in method.sizes:
            cells, outside = row(method, size)
            rows.append([name, str(size), *cells])
            off += [f"{name}, {size} rows, {100 * level:g} %" for level in outside]
            checked += sum(method.band(size, level) != bands.nothing(size, level) for level in LEVELS)
            print(" | ".join(rows[-1]), flush=True)
    verdict = f"{checked - len(off)} of {checked} cells of which something is stated are so."
    header = ["method", "rows", *(cell for level in LEVELS for cell in (f"{100 * level:g} %", "stated"))]
    parts = ["# How often intervals cover", f"- {_jobs.origin()}", LEGEND, _report.markdown_table(header, rows)]
    parts += [f"**{verdict}**" + "".join(f"\n- not {each}" for each in off), LEGEND_OF_DENSITIES]
    lost = [[name, *(density_lost(*DENSITIES[name], size) for size in FEW)] for name in DENSITIES]
    parts.append(_report.markdown_table(["calibrator", *(f"{size} rows" for size in FEW)], lost))
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def row(method: Method, size: int) -> tuple[list[str], list[float]]:
    """The cells of all levels, and the levels at which the coverage is not as stated."""
    cells, outside = [], []
    covered, infinite = method.simulate(size)
    for level, part, never in zip(LEVELS, np.moveaxis(covered, -1, 0), infinite, strict=True):
        mean, error = mean_and_error(part, method.part)
        band = method.band(size, level)
        holds = is_as_stated(mean, error, band)
        cells += [cell(mean, error, never, holds), stated(*band)]
        outside += [] if holds else [level]
    return cells, outside


def mean_and_error(covered: np.ndarray, part: str | None) -> tuple[float, float]:
    """The mean coverage and its standard error over runs, of all new rows or of the worst of them."""
    column = covered[:, covered.mean(axis=0).argmin()] if part == "worst" else covered.mean(axis=1)
    return float(column.mean()), _report.standard_error(list(column))


def is_as_stated(mean: float, error: float, band: tuple[float, float]) -> bool:
    """Whether a mean is in the band, or at most so many standard errors off; rounding excepted."""
    low, high = band
    return low - ERRORS * error - 1e-9 <= mean <= high + ERRORS * error + 1e-9


def cell(mean: float, error: float, infinite: float, holds: bool) -> str:
    if infinite == 1 and mean == 1:
        return "inf"
    shown = f"{100 * mean:.1f} ± {100 * error:.1f}" + ("" if holds else " **!**")
    return shown + (f" (inf {100 * infinite:.0f} %)" if infinite else "")


def stated(low: float, high: float) -> str:
    """A band in words: a number, two, or the least one."""
    if (low, high) == (0, 1):
        return _report.MISSING
    if low == high:
        return "inf" if low == 1 else f"{100 * low:.1f}"
    return f"≥ {100 * low:.1f}" if high == 1 else f"{100 * low:.1f} to {100 * high:.1f}"


def density_lost(problem: Problem, fit: Callable, size: int) -> str:
    """The mean log density that is lost beside that of the base, ± its standard error over calibration sets."""
    rng = np.random.default_rng(size)
    sets = RUNS[size] // 4
    _, y = problem.draw(rng, (sets, size))
    _, new = problem.draw(rng, (sets, NUM_DENSITIES))
    rows, new_rows = (problem.base(np.full((number, 1), 0.5)) for number in (size, NUM_DENSITIES))

    @jax.jit
    def lost(y, new):
        of_set = lambda each: new_rows.log_prob(each[1]) - fit(None, rows, each[0])(None, new_rows).log_prob(each[1])
        return jax.lax.map(lambda each: of_set(each).mean(), (y, new), batch_size=100)

    found = list(np.asarray(lost(y, new)))
    return f"{np.mean(found):.3f} ± {_report.standard_error(found):.3f}"


if __name__ == "__main__":
    main()
