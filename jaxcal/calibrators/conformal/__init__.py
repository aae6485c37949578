"""Split conformal prediction: intervals that cover at least as often as they claim, and calibrated distributions.

Every calibration row, on which the model was not trained, gets a score. The scores are sorted. The score of a new,
exchangeable row exceeds the score of rank ceil((L + 1) c) with a probability of at most 1 - c, whatever the model and
the data. The scores, by the argument `score` of `fit`:

| score | formula | source |
|---|---|---|
| "absolute" | abs(y - mean) | Papadopoulos et al. 2002; Lei et al. 2018 |
| "scaled" | abs(y - mean) / std | Papadopoulos et al. 2002; Lei et al. 2018, 5.2 |
| "signed" | (y - mean) / std, or y - mean: two tails | Linusson, Johansson and Lofstrom 2014 |
| "quantile" | max(lower - y, y - upper), for every level | Romano, Patterson and Candes 2019 |

The first three make one table of errors, which gives intervals at any level: `SplitConformal`, whose distributions are
`Empirical` with the rule "symmetric" or "conformal". The last makes intervals at levels that are chosen in the fit:
`ConformalizedQuantiles`, whose distributions are `Quantiles`.

A score that increases with y gives a whole predictive distribution, `ConformalCalibrator`. Such are "signed" and "cdf",
which is base.cdf(y). A new row lies below the quantile at level p with probability p: neither less nor more. How a
quantile is read from the sorted scores, by the argument `rule`:

| rule | quantile | source |
|---|---|---|
| "randomized" | rank floor(t) or floor(t) + 1, t = (L + 1) p, drawn so that it is t in the mean | Vovk et al. 2020 |
| "linear" | the j-th score at level j / (L + 1), straight lines between | Marx et al. 2022 |

Capone, Hirche and Pleiss (NeurIPS 2023, Table 1) compare with three recalibrators of a GP's predictions. "RV" is
rule="randomized". "RM" is rule="linear" from `Point(base.mean)`, without the variance. "RK" (Kuleshov, Fenner and Ermon
2018) is `isotonic.fit`.
"""

from collections.abc import Sequence
from typing import Literal, overload

from jaxtyping import PRNGKeyArray

from jaxcal import _checks
from jaxcal.calibrators import _grouped_tables
from jaxcal.calibrators._base import check_base, check_smoothing
from jaxcal.calibrators._grouped_tables import GroupedTables
from jaxcal.calibrators._groups import Labels, Weights
from jaxcal.calibrators.conformal import distributions, intervals, quantiles
from jaxcal.calibrators.conformal.distributions import ConformalCalibrator
from jaxcal.calibrators.conformal.intervals import SplitConformal
from jaxcal.calibrators.conformal.quantiles import ConformalizedQuantiles, GroupedConformalizedQuantiles
from jaxcal.distributions import Distribution, Point
from jaxcal.frames.layout import Series, Table

__all__ = [
    "ConformalCalibrator",
    "ConformalizedQuantiles",
    "GroupedConformalizedQuantiles",
    "GroupedTables",
    "SplitConformal",
    "fit",
]

# The scores that each rule takes.
_SCORES = {
    None: ("absolute", "scaled", "signed", "quantile"),
    "randomized": ("signed", "cdf"),
    "linear": ("signed", "cdf"),
}


@overload
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: Literal["absolute", "scaled", "signed"] | None = None,
    rule: None = None,
    confidence_levels: None = None,
    key: PRNGKeyArray | None = None,
    smoothing: float | None = None,
) -> SplitConformal: ...
@overload
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: Literal["absolute", "scaled", "signed"] | None = None,
    rule: None = None,
    confidence_levels: None = None,
    key: PRNGKeyArray | None = None,
    by: Labels | None = None,
    weights: Weights | None = None,
) -> SplitConformal | GroupedTables: ...
@overload
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: Literal["quantile"],
    rule: None = None,
    confidence_levels: Sequence[float] | None = None,
    key: PRNGKeyArray | None = None,
    smoothing: float | None = None,
) -> ConformalizedQuantiles: ...
@overload
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: Literal["quantile"],
    rule: None = None,
    confidence_levels: Sequence[float] | None = None,
    key: PRNGKeyArray | None = None,
    by: Labels | None = None,
    weights: Weights | None = None,
) -> ConformalizedQuantiles | GroupedConformalizedQuantiles: ...
@overload
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: Literal["signed", "cdf"] | None = None,
    rule: Literal["randomized", "linear"],
    confidence_levels: None = None,
    key: PRNGKeyArray | None = None,
    smoothing: float | None = None,
) -> ConformalCalibrator: ...
def fit(
    x: Table | None,
    base: Distribution,
    y: Series,
    *,
    score: str | None = None,
    rule: str | None = None,
    confidence_levels: Sequence[float] | None = None,
    key: PRNGKeyArray | None = None,
    by: Labels | None = None,
    weights: Weights | None = None,
    smoothing: float | None = None,
) -> SplitConformal | ConformalizedQuantiles | ConformalCalibrator | GroupedTables | GroupedConformalizedQuantiles:
    """Sort the scores of calibration rows, which must not be rows that the model was trained on.

    The model that predicts the calibration rows must be the one that will predict new rows: predictions out of fold
    have no guarantee. `jaxcal.pipeline.fit(method="split")` sets calibration rows aside.

    Without a rule, central intervals with a coverage guarantee:

    - score="absolute", "scaled": the interval at level c is mean -+ s, or mean -+ s std, with the score s of rank
      ceil((L + 1) c).
    - score="signed": its ends are mean + z std, or mean + z, with the signed errors z of the ranks
      floor((L + 1) (1 - c) / 2) and ceil((L + 1) (1 + c) / 2). Each tail has a guarantee of its own.
    - score="quantile": its ends are the base's quantiles at (1 -+ c) / 2, moved outwards by the score of rank
      ceil((L + 1) c) of that level; a negative score moves them inwards, but not past the median. The intervals are
      nested: one that does not contain the intervals of all lower levels is widened until it does. That can only
      increase its coverage.

    With a rule, a whole distribution from a score that increases with y:

    - rule="randomized": the quantile at level p is the score of a rank that is drawn for the row, put back on the scale
      of y: mean + z std for "signed". It covers with probability exactly p, at every level, on average over draws and
      calibration sets. At the ranks 0 and L + 1 it is infinite.
    - rule="linear": no random draws. The quantile at level p = j / (L + 1) covers with probability p on average over
      calibration sets; from one calibration set to another its coverage follows Beta(j, L + 1 - j). Between two such
      levels the coverage lies between theirs. Beyond the outermost levels the quantile is constant, with "cdf" in the
      base's tails: it may cover less than its level, and a warning names the rows needed. The density is that of a
      smoothed version.
    - score="cdf": base.cdf(y), for bases whose distributions differ in shape from row to row. Rows of a normal base
      differ in mean and std only: "cdf" then means "signed", which gives the same ranks and does not saturate. With
      any other base rule="randomized" takes L quantiles of the base for each predicted row; rule="linear" maps its
      probabilities, on straight lines between the sorted ones, and keeps the shape of every row.

    These coverages are exact if no two scores are equal; equal scores can only increase them.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Fit and predictions are differentiable in
    base, y and weights; the derivative of a rank is 0.

    A std of base may be 0 where the score does not divide by it. Else an error of 0 has score 0 there, and any other
    one an infinite score. So may intervals be, if such scores are many: score="absolute" has none.

    With `by` every group of rows has a table and a guarantee of its own, with `weights` the guarantee is for new rows
    whose inputs are distributed otherwise than those of the calibration rows.

    Args:
        x: inputs [L, d], for functions of x; else it is not used and may be None.
        base: the model's predictions at x, [L].
        y: targets [L].
        score: without a rule "absolute", "scaled", "signed" or "quantile"; None for "scaled" where the base has a std,
            else "absolute". With a rule "signed", which None stands for, or "cdf".
        rule: None for intervals with a guarantee; "randomized" or "linear" for a calibrated distribution.
        confidence_levels: the levels c of the intervals of score="quantile" (default 0.5, 0.8, 0.9, 0.95).
        key: random key of the ranks that rule="randomized" draws. `ConformalCalibrator` says which draws are the same
            in all calls.
        by: labels of groups [L], numbers or strings, or a function of x that gives them, such as those of
            `jc.labels` and `usnrt.USNRT.apply`; not with rule="randomized" or score="cdf". Labels that are an array
            here are given again at the call, `module(x, base, by=labels)`.
        weights: of the rows [L], not negative, or a function of x that gives them; likewise. For a shift of the inputs
            they are proportional to the density of the new inputs over that of the calibration inputs.
        smoothing: None, or the half width in (0, 1/2] of a window of ranks: each of the sorted scores becomes the mean
            of those within floor(smoothing L) ranks, `functional.quantiles.smoothed_table`. The derivative of a
            quantile then depends on many rows, as training through the calibration wants. It guarantees no coverage.

    Returns:
        without a rule a `SplitConformal`, or with score="quantile" a `ConformalizedQuantiles`; with a rule a
        `ConformalCalibrator`; with `by` or `weights` a `GroupedTables`, or with score="quantile" a
        `GroupedConformalizedQuantiles`.

    Raises:
        TypeError: if base is not a Distribution; if key is no random key.
        ValueError: if an argument is empty, not finite, of the wrong shape or length; if the score needs a std, or a
            distribution, and base is a `Point`; if there are too few rows for a confidence level; if with score="cdf"
            in some row base.cdf(y) is 0 or 1, or base has no density at y; if rule="randomized" comes without a key;
            if smoothing is not in (0, 1/2], or comes with `by` or weights; if with rule="linear" or smoothing a score
            is infinite.

    Warns:
        UserWarning: if scores are infinite, since a std is 0 and the error is not.

    Source: Papadopoulos, Proedrou, Vovk and Gammerman, ECML 2002; Lei, G'Sell, Rinaldo, Tibshirani and Wasserman,
    JASA 113 (2018); Linusson, Johansson and Lofstrom, PAKDD 2014; Romano, Patterson and Candes, NeurIPS 2019; Vovk,
    Petej, Toccaceli, Gammerman, Ahlberg and Carlsson, Conformal calibrators, COPA 2020; Marx, Zhao, Neiswanger and
    Ermon, Modular conformal calibration, ICML 2022. For smoothing Stutz, Dvijotham, Cemgil and Doucet, Learning
    Optimal Conformal Classifiers, ICLR 2022.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Point
        >>> from jaxcal.calibrators import conformal
        >>> fitted = conformal.fit(None, Point(jnp.zeros(99)), jnp.arange(1.0, 100.0))
        >>> lower, upper = fitted(None, Point(1000.0)).interval(0.9)
        >>> print(lower.round(2), upper.round(2), fitted.guarantee(0.9).coverage)
        [910.] [1090.] 0.9
        >>> calibrate = conformal.fit(None, Point(jnp.zeros(99)), jnp.arange(1.0, 100.0), rule="linear")
        >>> distribution = calibrate(None, Point(1000.0))
        >>> print(f"{distribution.icdf(0.905)[0]:.1f} {distribution.cdf(1090.5)[0]:.3f}")
        1090.5 0.905
    """
    if key is not None:
        _checks.check_key(key)
    _checks.check_choice("rule", rule, tuple(_SCORES))
    if score is None:
        score = "signed" if rule else "absolute" if isinstance(base, Point) else "scaled"
    _checks.check_choice(f"with rule={rule!r} score", score, _SCORES[rule])
    check_smoothing(smoothing, by=by, weights=weights)
    y = _checks.as_vector("y", y)
    if by is not None or weights is not None:
        if rule == "randomized" or score == "cdf":
            given = f"rule={rule!r}" if rule == "randomized" else f"score={score!r}"
            raise ValueError(f"by and weights go with all but rule='randomized' and score='cdf'; got {given}.")
        if score == "quantile":
            return quantiles.fit_groups(x, base, y, confidence_levels, by, weights)
        check_base(base, y.shape[0])
        scaled = score == "scaled" or (score == "signed" and not isinstance(base, Point))
        table_rule = rule or ("conformal" if score == "signed" else "symmetric")
        return _grouped_tables.fit(x, base, y, by=by, weights=weights, scaled=scaled, rule=table_rule)
    if score == "quantile":
        return quantiles.fit(base, y, confidence_levels, smoothing)
    if confidence_levels is not None:
        raise ValueError(
            f"confidence_levels go with score='quantile'; score={score!r} answers at any level: drop them."
        )
    if rule is None:
        return intervals.fit(base, y, score, smoothing)
    return distributions.fit(base, y, score, rule, key, smoothing)
