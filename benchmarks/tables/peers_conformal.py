"""Intervals beside those of MAPIE and crepes, from the same errors: `python -m benchmarks.tables.peers_conformal`.

Both peers are dependencies of the extra `benchmarks`. Every method that a peer has is given the same calibration rows
and predictions; the ends of its intervals are compared at numbers of rows and levels with and without equal errors.
Where they differ the coverage of both is counted in places: an interval that contains r of the L + 1 places between
the sorted scores covers a new exchangeable row with probability r / (L + 1). It takes about a minute.
"""

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import PredefinedSplit

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables.cross_conformal import fit_plane
from jaxcal.distributions import Empirical
from jaxcal.pipeline import folds as jaxcal_folds

RESULT = Path(__file__).parents[1] / "results" / "peers_conformal.md"
SIZES, LEVELS, NUM_NEW, NUM_GROUPS, MODELS = (9, 19, 99, 999), (0.5, 0.8, 0.9, 0.99), 20, 3, 30
# Of equal size, as a peer has no rows without a fold.
FOLDS = {9: 3, 19: 19, 99: 9, 999: 9}
LEGEND = f"""\
Ends of the intervals of {NUM_NEW} new rows from the same calibration rows, at {", ".join(map(str, SIZES))} rows and
levels {", ".join(map(str, LEVELS))}; "equal errors" rounds targets and means, so that many errors are the same. Groups
have as many rows each. *Equal*: cases whose ends agree to rounding, or are infinite for both, or that both refuse. The
difference is the greatest one of finite ends in those cases. MAPIE is asked for infinite bounds where it takes the
option.

- Groups of rows (Mondrian): crepes has them; MAPIE {version("mapie")} has not.
- Weights for a shift of the inputs, crude with neighbors, an isotonic map and Student t intervals: neither has them.
- Groups that overlap (conditional conformal prediction): MAPIE {version("mapie")} has them. These and online methods
  are not compared.

The list below names every case that differs; in brackets the probability that the peer's interval covers a new row,
and ours, by the places between the scores."""


class Rows(NamedTuple):
    """Calibration rows, and the predictions of new ones; the inputs of a row are its mean, its std and two more."""

    x: np.ndarray
    y: np.ndarray
    new_x: np.ndarray
    groups: np.ndarray
    new_groups: np.ndarray


class Column(RegressorMixin, BaseEstimator):
    """A regressor that is fitted already, and predicts a sum of columns times weights."""

    def __init__(self, weights: tuple[float, ...] = (1.0,)):
        self.weights = weights

    def fit(self, x, y):
        """Nothing is left to fit."""
        return self

    def predict(self, x):
        """The predictions of all rows."""
        return np.asarray(x)[:, : len(self.weights)] @ np.array(self.weights)

    def __sklearn_is_fitted__(self) -> bool:
        """It always is."""
        return True


def drawn(size: int, equal_errors: bool, groups: int = 1) -> Rows:
    """Skewed errors about a mean."""
    rng = np.random.default_rng(size)
    rows = groups * size
    mean, std = rng.normal(size=rows + NUM_NEW), rng.uniform(0.5, 2, rows + NUM_NEW)
    y = mean[:rows] + std[:rows] * (rng.gamma(3, size=rows) - 3)
    if equal_errors:
        mean, std, y = mean.round(), np.ones_like(std), y.round()
    x = np.column_stack([mean, std, rng.normal(size=(rows + NUM_NEW, 2))])
    number = np.repeat(np.arange(groups), size), np.arange(NUM_NEW) % groups
    return Rows(x[:rows], y, x[rows:], *number)


def base(x: np.ndarray) -> jc.Normal:
    return jc.Normal(x[:, 0], x[:, 1])


# jaxcal


def ours(fit: Callable, grouped: bool = False) -> Callable:
    """The intervals of a calibrator."""

    def intervals(rows: Rows, level: float):
        by, new_by = ({"by": rows.groups}, {"by": rows.new_groups}) if grouped else ({}, {})
        return fit(None, base(rows.x), rows.y, **by)(None, base(rows.new_x), **new_by).interval(level)

    return intervals


def conformal(score: str) -> Callable:
    return partial(jc.conformal.fit, score=score)  # pyright: ignore[reportCallIssue, reportArgumentType]


def quantile(rows: Rows, level: float):
    if len(rows.y) < jc.functional.quantiles.smallest_table(level):
        return np.full((2, NUM_NEW), [[-np.inf], [np.inf]])  # the fit refuses it
    fitted = jc.conformal.fit(None, base(rows.x), rows.y, score="quantile", confidence_levels=[level])
    return fitted(None, base(rows.new_x)).interval(level)


def cv_plus(rows: Rows, level: float):
    key = jax.random.key(0)
    return jc.cross_conformal.fit(fit_plane, rows.x, rows.y, key=key, folds=FOLDS[len(rows.y)])(rows.new_x).interval(
        level
    )


def after_bootstrap(rows: Rows, level: float):
    return bootstrap(rows)[0](rows.new_x).interval(level)


def bootstrap(rows: Rows) -> tuple[Callable, list[np.ndarray]]:
    """The jackknife+-after-bootstrap, and the rows of its samples."""
    samples = []
    place = {row.tobytes(): number for number, row in enumerate(rows.x)}

    def fit(x, y, *, key):
        samples.append(np.array([place[row.tobytes()] for row in np.asarray(x)]))
        return fit_plane(x, y, key=key)

    return jc.cross_conformal.fit_bootstrap(fit, rows.x, rows.y, key=jax.random.key(0), num_models=MODELS), samples


# MAPIE


def mapie_split(score: str) -> Callable:
    def intervals(rows: Rows, level: float):
        from mapie.conformity_scores import AbsoluteConformityScore, ResidualNormalisedScore
        from mapie.regression import SplitConformalRegressor

        scores = {
            "absolute": AbsoluteConformityScore(),
            "signed": AbsoluteConformityScore(sym=False),
            "scaled": ResidualNormalisedScore(residual_estimator=Column((0.0, 1.0)), prefit=True),
        }
        regressor = SplitConformalRegressor(Column(), confidence_level=level, conformity_score=scores[score])
        return ends(regressor.conformalize(rows.x, rows.y), rows)

    return intervals


def mapie_quantile(rows: Rows, level: float):
    from mapie.regression import ConformalizedQuantileRegressor

    models = [Column((1.0, -far(level))), Column((1.0, far(level))), Column()]
    regressor = ConformalizedQuantileRegressor(models, confidence_level=level, prefit=True)
    return ends(regressor.conformalize(rows.x, rows.y), rows, symmetric_correction=True)


def mapie_cv_plus(rows: Rows, level: float):
    from mapie.regression import CrossConformalRegressor

    folds, size = FOLDS[len(rows.y)], len(rows.y)
    parts = jaxcal_folds.drawn(size, folds, None, jax.random.split(jax.random.key(0), folds + 1)[0], equal=True)
    number = np.empty(size, int)
    for fold, part in enumerate(parts):
        number[part.held_out] = fold
    cv = PredefinedSplit(number)
    regressor = CrossConformalRegressor(LinearRegression(fit_intercept=False), confidence_level=level, cv=cv)
    return ends(regressor.fit_conformalize(rows.x, rows.y), rows)


def mapie_after_bootstrap(rows: Rows, level: float):
    from mapie.regression import JackknifeAfterBootstrapRegressor
    from mapie.subsample import Subsample

    samples = bootstrap(rows)[1]

    class Same(Subsample):
        """The samples of jaxcal."""

        def split(self, X, *args, **kwargs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            return ((sample, np.setdiff1d(np.arange(len(X)), sample)) for sample in samples)

    model, resampling = LinearRegression(fit_intercept=False), Same(n_resamplings=len(samples))
    regressor = JackknifeAfterBootstrapRegressor(model, confidence_level=level, resampling=resampling)
    return ends(regressor.fit_conformalize(rows.x, rows.y), rows)


def ends(regressor, rows: Rows, **options) -> np.ndarray:
    found = regressor.predict_interval(rows.new_x, allow_infinite_bounds=True, **options)[1]
    return found[:, :, 0].T


# crepes


def crepes_regressor(scaled: bool, grouped: bool = False) -> Callable:
    """Of absolute errors."""
    return lambda rows, level: crepes("ConformalRegressor", rows, level, scaled, grouped)


def crepes_system(rows: Rows, level: float, grouped: bool = False):
    """Of signed errors: a conformal predictive system."""
    return crepes("ConformalPredictiveSystem", rows, level, True, grouped)


def crepes(kind: str, rows: Rows, level: float, scaled: bool, grouped: bool):
    import crepes

    sigmas, new_sigmas = ({"sigmas": x[:, 1]} if scaled else {} for x in (rows.x, rows.new_x))
    bins, new_bins = ({"bins": each} if grouped else {} for each in (rows.groups, rows.new_groups))
    fitted = getattr(crepes, kind)().fit(rows.y - rows.x[:, 0], **sigmas, **bins)
    return fitted.predict_int(rows.new_x[:, 0], **new_sigmas, **new_bins, confidence=level).T


# The comparison


class Pair(NamedTuple):
    """A method of both.

    Attributes:
        ours: gives the ends of the intervals of the new rows at a level.
        theirs: the same.
        coverage: gives the probability that an interval covers a new row, by places; None where several models make
            the interval.
        grouped: whether rows have groups.
    """

    ours: Callable
    theirs: Callable
    coverage: Callable[[Rows, float, np.ndarray], float] | None = None
    grouped: bool = False


def by_errors(tails: int, scaled: bool) -> Callable[[Rows, float, np.ndarray], float]:
    """By the places between absolute errors, of one tail, or signed ones, of two, in the first new row's group."""

    def coverage(rows: Rows, level: float, found: np.ndarray) -> float:
        scale, new_scale = (x[:, 1] if scaled else np.ones(len(x)) for x in (rows.x, rows.new_x))
        lower, upper = (found[:, 0] - rows.new_x[0, 0]) / new_scale[0]
        z = ((rows.y - rows.x[:, 0]) / scale)[rows.groups == rows.new_groups[0]]
        inside = np.count_nonzero((z >= lower - 1e-9) & (z <= upper + 1e-9))
        return (inside - (tails == 2)) / (len(z) + 1)

    return coverage


def by_quantiles(rows: Rows, level: float, found: np.ndarray) -> float:
    """By the places between the scores of conformalized quantile regression."""
    scores = np.abs(rows.y - rows.x[:, 0]) - far(level) * rows.x[:, 1]
    margin = found[1, 0] - rows.new_x[0, 0] - far(level) * rows.new_x[0, 1]
    return np.count_nonzero(scores <= margin + 1e-9) / (len(scores) + 1)


def far(level: float) -> float:
    """Half the width of an interval of the standard normal distribution."""
    return float(jc.Normal(0.0, 1.0).icdf((1 + level) / 2)[0])


MAPIE, CREPES = f"MAPIE {version('mapie')}", f"crepes {version('crepes')}"
PAIRS: dict[tuple[str, str], Pair] = {
    ('conformal, score="absolute"', MAPIE): Pair(
        ours(conformal("absolute")), mapie_split("absolute"), by_errors(1, False)
    ),
    ('conformal, score="absolute"', CREPES): Pair(
        ours(conformal("absolute")), crepes_regressor(False), by_errors(1, False)
    ),
    ('conformal, score="scaled"', MAPIE): Pair(ours(conformal("scaled")), mapie_split("scaled"), by_errors(1, True)),
    ('conformal, score="scaled"', CREPES): Pair(ours(conformal("scaled")), crepes_regressor(True), by_errors(1, True)),
    ('conformal, score="signed"', MAPIE): Pair(
        lambda rows, level: ours(conformal("signed"))(unscaled(rows), level), mapie_split("signed"), by_errors(2, False)
    ),
    ('conformal, score="quantile"', MAPIE): Pair(quantile, mapie_quantile, by_quantiles),
    ('conformal, score="scaled", by', CREPES): Pair(
        ours(conformal("scaled"), True), crepes_regressor(True, True), by_errors(1, True), grouped=True
    ),
    ("crude", CREPES): Pair(ours(jc.crude.fit), crepes_system, by_errors(2, True)),
    ("crude, by", CREPES): Pair(
        ours(jc.crude.fit, True),
        lambda rows, level: crepes_system(rows, level, True),
        by_errors(2, True),
        grouped=True,
    ),
    ("CV+, jackknife+ at 19 rows", MAPIE): Pair(cv_plus, mapie_cv_plus),
    ("jackknife+-after-bootstrap", MAPIE): Pair(after_bootstrap, mapie_after_bootstrap),
}


def unscaled(rows: Rows) -> Rows:
    """With stds of 1: signed errors are scaled where there is a std."""
    one = lambda x: np.column_stack([x[:, 0], np.ones(len(x)), x[:, 2:]])
    return rows._replace(x=one(rows.x), new_x=one(rows.new_x))


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows, differ = [], []
    for (name, peer), pair in PAIRS.items():
        cells, found = compared(pair)
        rows.append([name, peer, *cells])
        differ += [f"{name}, {peer}, {line}" for line in found]
        print(rows[-1], found, flush=True)
    equal, cases = probabilities_agree()
    rows.append(['conformal, rule="randomized": p-values', CREPES, f"{equal} of {cases}", "–"])
    parts = ["# Intervals beside those of peers", f"- {_jobs.origin()}, {MAPIE}, {CREPES}", LEGEND]
    parts += [_report.markdown_table(["method", "peer", "equal", "greatest difference"], rows), "## Where they differ"]
    parts.append("\n".join(f"- {line}" for line in differ))
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def compared(pair: Pair) -> tuple[list[str], list[str]]:
    """How many cases are equal, by how much they differ, and lines on those that are not."""
    equal, cases, greatest, differ = 0, 0, 0.0, defaultdict(dict)
    for size in SIZES:
        for equal_errors in (False, True):
            rows = drawn(size, equal_errors, NUM_GROUPS if pair.grouped else 1)
            for level in LEVELS:
                cases += 1
                own, peer = np.asarray(pair.ours(rows, level)), asked(pair, rows, level)
                if isinstance(peer, str) and np.isinf(own).all():
                    equal += 1  # neither has an interval
                elif isinstance(peer, str):
                    differ[peer][size, level] = f"{level:g}"
                elif agree(own, peer):
                    equal += 1
                    both = np.isfinite(own)
                    greatest = max(greatest, float(np.abs(own[both] - peer[both]).max(initial=0)))
                else:
                    # Equal errors are named where only they make a difference.
                    only = " with equal errors" if equal_errors else ""
                    shown = f"{level:g}{covering(pair, rows, level, own, peer)}{only}"
                    differ[kind(own, peer)].setdefault((size, level), shown)
    return [f"{equal} of {cases}", f"{greatest:.0e}"], [f"{what}: {listed(where)}" for what, where in differ.items()]


def asked(pair: Pair, rows: Rows, level: float) -> np.ndarray | str:
    """The intervals of a peer, or its refusal."""
    try:
        return np.asarray(pair.theirs(rows, level))
    except ValueError as error:
        return f'refuses, "{re.split("[,.]", str(error))[0]}"'


def agree(own: np.ndarray, peer: np.ndarray) -> bool:
    """Whether the same ends are infinite, and the others equal to rounding."""
    return np.array_equal(np.isfinite(own), np.isfinite(peer)) and np.allclose(own, peer, rtol=1e-9, atol=1e-9)


def kind(own: np.ndarray, peer: np.ndarray) -> str:
    """How the ends of a peer differ."""
    if np.isinf(own).any() and np.isfinite(peer).all():
        return "finite where no finite interval covers as often"
    if np.isinf(peer).any() and np.isfinite(own).all():
        return "infinite where a finite interval covers as often"
    own_width, peer_width = own[1] - own[0], peer[1] - peer[0]
    if (peer_width >= own_width - 1e-9).all():
        return "wider"
    return "narrower" if (peer_width <= own_width + 1e-9).all() else "partly wider, partly narrower"


def covering(pair: Pair, rows: Rows, level: float, own: np.ndarray, peer: np.ndarray) -> str:
    """The probability with which the peer's interval covers, by places, and ours."""
    if pair.coverage is None:
        return ""
    theirs, our = (1.0 if np.isinf(ends[:, 0]).any() else pair.coverage(rows, level, ends) for ends in (peer, own))
    return f" ({100 * theirs:.1f} % for {100 * our:.1f})"


def listed(where: dict[tuple[int, float], str]) -> str:
    """The cases: "9 rows at 0.9, 0.99"."""
    by_size = defaultdict(list)
    for (size, _), shown in where.items():
        by_size[size].append(shown)
    return "; ".join(f"{size} rows at {', '.join(shown)}" for size, shown in by_size.items())


def probabilities_agree() -> tuple[int, int]:
    """How often a target is at most the randomized quantile at p where crepes' p-value, of the same draws, is below."""
    import crepes

    equal, cases = 0, 0
    for size in SIZES:
        rows = drawn(size, False)
        system = crepes.ConformalPredictiveSystem().fit(rows.y - rows.x[:, 0], sigmas=rows.x[:, 1])
        y = rows.new_x[:, 0] + np.random.default_rng(1).normal(size=NUM_NEW)
        p_values = system.predict_p(rows.new_x[:, 0], y, sigmas=rows.new_x[:, 1], seed=2)
        tau = np.random.RandomState(2).rand(NUM_NEW)
        table = np.sort((rows.y - rows.x[:, 0]) / rows.x[:, 1])
        forecast = Empirical(rows.new_x[:, 0], rows.new_x[:, 1], table, "randomized", tau)
        for p in np.arange(1, 50) / 50 + 1e-6:
            equal += int(np.count_nonzero((y <= np.asarray(forecast.icdf(p))) == (p_values < p)))
            cases += NUM_NEW
    return equal, cases


if __name__ == "__main__":
    main()
