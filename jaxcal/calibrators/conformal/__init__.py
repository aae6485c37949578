"""Split conformal prediction: intervals that cover at least as often as they claim, and calibrated distributions.

Every calibration row, on which the model was not trained, gets a score. The scores are sorted. The score of a new,
exchangeable row exceeds the score of rank `ceil((L + 1) c)` with probability at most `1 - c`, whatever the model and
the data. The argument `score` of `fit` chooses the score:

| score | formula | source |
|---|---|---|
| "absolute" | abs(y - mean) | Papadopoulos et al. 2002; Lei et al. 2018 |
| "scaled" | abs(y - mean) / std | Papadopoulos et al. 2002; Lei et al. 2018, 5.2 |
| "signed" | (y - mean) / std, or y - mean: two tails | Linusson, Johansson and Lofstrom 2014 |
| "quantile" | max(lower - y, y - upper), for every level | Romano, Patterson and Candes 2019 |

The first three scores make one table of errors, which gives intervals at any level. The distributions are `Empirical`
with the rule "symmetric" or "conformal". The score "quantile" makes intervals at levels that are chosen in the fit. The
distributions are `Quantiles`.

A score that increases with y gives a whole predictive distribution. Two scores do: "signed" and "cdf", which is
base.cdf(y). A new row lies below the quantile at level p with probability p: neither less nor more. The argument `rule`
chooses how a quantile is read from the sorted scores:

| rule | quantile | source |
|---|---|---|
| "randomized" | rank floor(t) or floor(t) + 1, t = (L + 1) p, drawn so that it is t in the mean | Vovk et al. 2020 |
| "linear" | the j-th score at level j / (L + 1), straight lines between | Marx et al. 2022 |

Capone, Hirche and Pleiss (NeurIPS 2023, Table 1) compare with three recalibrators of a GP's predictions:

- "RV" is rule="randomized".
- "RM" is rule="linear" from `Point(base.mean)`, without the variance.
- "RK" (Kuleshov, Fenner and Ermon 2018) is `isotonic.fit`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real, UInt32

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.calibrators._base import (
    ABSOLUTE,
    AS_POINT,
    as_confidence_levels,
    check_base,
    check_density,
    check_guarantees,
    check_not_smoothed,
    check_rows_reach,
    check_smoothing,
    coverage_guarantee,
    error_scale,
    facts_of,
    in_order,
    levels_of_sample,
    probabilities,
    smoothed,
    standardized_errors,
)
from jaxcal.calibrators._groups import (
    CalibrationGroups,
    CalibratorArguments,
    Errors,
    Labels,
    Weights,
    of_new_rows,
    tables_of_groups,
)
from jaxcal.calibrators.conformal import quantiles
from jaxcal.distributions import Distribution, Empirical, Quantiles, Recalibrated, ScaledQuantiles
from jaxcal.frames.layout import Series, Table
from jaxcal.functional.tables import Tables
from jaxcal.guarantee import Guarantee, WeightedGuarantee

__all__ = ["ConformalCalibrator", "fit"]

# The scores that each rule takes.
_SCORES = {
    None: ("absolute", "scaled", "signed", "quantile"),
    "randomized": ("signed", "cdf"),
    "linear": ("signed", "cdf"),
}


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    score: str | None = None,
    rule: str | None = None,
    confidence_levels: "Sequence[float] | None" = None,
    key: "PRNGKeyArray | None" = None,
    by: "Labels | None" = None,
    weights: "Weights | None" = None,
    smoothing: float | None = None,
) -> "ConformalCalibrator":
    """Sort the scores of calibration rows, which must not be rows that the model was trained on.

    The model that predicts the calibration rows must also be the model that predicts new rows: out-of-fold predictions
    have no guarantee. `jaxcal.pipeline.fit(method="split")` sets calibration rows aside.

    Without a rule the fit gives central intervals with a coverage guarantee:

    - score="absolute", "scaled": the interval at level c is mean -+ s, or mean -+ s std. Here s is the score of rank
      `ceil((L + 1) c)`.
    - score="signed": the ends of the interval are mean + z std, or mean + z. Here z are the signed errors of the ranks
      `floor((L + 1) (1 - c) / 2)` and `ceil((L + 1) (1 + c) / 2)`. Each tail has a guarantee of its own.
    - score="quantile": the ends of the interval are the base's quantiles at `(1 -+ c) / 2`. They are moved outwards by
      the score of rank `ceil((L + 1) c)` at that level. A negative score moves them inwards, but not past the median.
      The intervals are nested: an interval that does not contain the intervals of all lower levels is widened until it
      does. Widening can only increase its coverage.

    With a rule the fit gives a whole distribution from a score that increases with y:

    - rule="randomized": the quantile at level p is the score of a rank that is drawn for the row. It is put back on the
      scale of y: mean + z std for "signed". It covers with probability exactly p, at every level, on average over draws
      and calibration sets. At the ranks 0 and L + 1 it is infinite.
    - rule="linear": nothing is random. The quantile at level `p = j / (L + 1)` covers with probability p on average
      over calibration sets. Its coverage for one calibration set follows Beta(j, L + 1 - j). Between two such levels
      the coverage lies between their coverages. Beyond the outermost levels the quantile is constant, or with "cdf"
      lies in the base's tails. It may cover less than its level there, and a warning names the rows needed. The density
      is the density of a smoothed version.
    - score="cdf": base.cdf(y), for bases whose distributions differ in shape from row to row. Rows of a normal base
      differ only in mean and std: "cdf" then means "signed", which gives the same ranks and does not saturate. With
      any other base rule="randomized" takes L quantiles of the base for each predicted row. With rule="linear" the map
      of the base's probabilities is linear between the sorted probabilities. It keeps the shape of every row.

    These coverages are exact if no two scores are equal; equal scores can only increase them.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Fit and predictions are differentiable in
    base, y and weights; the derivative of a rank is 0.

    A std of base may be 0 if the score does not divide by it. If the score divides by it, an error of 0 has score 0 in
    such a row, and any other error has an infinite score. Intervals may be infinite if there are many such scores;
    score="absolute" has none.

    With `by` every group of rows has a table and a guarantee of its own. With `weights` the guarantee is for new rows
    whose inputs have another distribution than the inputs of the calibration rows.

    Args:
        x: inputs [L, d], for functions of x; else it is not used and may be None.
        base: the model's predictions at x, [L].
        y: targets [L].
        score: without a rule "absolute", "scaled", "signed" or "quantile"; None for "scaled" if the base has a std,
            else "absolute". A rule takes "signed", also as None, or "cdf".
        rule: None for intervals with a guarantee; "randomized" or "linear" for a calibrated distribution.
        confidence_levels: the levels c of the intervals of score="quantile" (default 0.5, 0.8, 0.9, 0.95).
        key: random key of the ranks that rule="randomized" draws. `ConformalCalibrator` says which draws are the same
            in all calls.
        by: labels of groups [L], numbers or strings, or a function of x that gives them. Such functions are
            `usnrt.USNRT.apply` and the objects of `jc.labels`. Not with rule="randomized" or score="cdf". If the
            labels are an array here, the call needs labels, too: `module(x, base, by=labels)`.
        weights: the weights of the rows [L], not negative, or a function of x that gives them; otherwise as `by`. For a
            shift of the inputs they are proportional to the density of the new inputs divided by the density of the
            calibration inputs.
        smoothing: None, or the half width in (0, 1/2] of a window of ranks. Each of the sorted scores becomes the mean
            of the scores within `floor(smoothing L)` ranks, `functional.quantiles.smoothed_table`. The derivative of a
            quantile then depends on many rows, as training through the calibration needs. It guarantees no coverage.

    Raises:
        TypeError: if base is not a Distribution; if key is no random key.
        ValueError: if an argument is empty, not finite, of the wrong shape or length. If the score needs a std, or a
            distribution, and base is a `Point`. If there are too few rows for a confidence level. If with score="cdf"
            a base.cdf(y) is 0 or 1, or base has no density at a y. If rule="randomized" comes without a key. If
            smoothing is not in (0, 1/2], or comes with `by` or weights. If with rule="linear" or smoothing a score is
            infinite.

    Warns:
        UserWarning: if scores are infinite, since a std is 0 and the error is not.

    Source: Papadopoulos, Proedrou, Vovk and Gammerman, ECML 2002; Lei, G'Sell, Rinaldo, Tibshirani and Wasserman,
    JASA 113 (2018); Linusson, Johansson and Lofstrom, PAKDD 2014; Romano, Patterson and Candes, NeurIPS 2019; Vovk,
    Petej, Toccaceli, Gammerman, Ahlberg and Carlsson, Conformal calibrators, COPA 2020; Marx, Zhao, Neiswanger and
    Ermon, Modular conformal calibration, ICML 2022. Smoothing: Stutz, Dvijotham, Cemgil and Doucet, Learning Optimal
    Conformal Classifiers, ICLR 2022.

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
        score = "signed" if rule else "scaled" if base.has_std else "absolute"
    _checks.check_choice(f"with rule={rule!r} score", score, _SCORES[rule])
    check_smoothing(smoothing, by=by, weights=weights)
    y = _checks.as_vector("y", y)
    arguments = CalibratorArguments(x, base, by, weights)
    if arguments.is_counted and (rule == "randomized" or score == "cdf"):
        refused = f"rule={rule!r}" if rule == "randomized" else f"score={score!r}"
        raise ValueError(f"by and weights go with all but rule='randomized' and score='cdf'; got {refused}.")
    if score == "quantile":
        return _fit_quantiles(arguments, y, as_confidence_levels(confidence_levels), smoothing)
    if confidence_levels is not None:
        raise ValueError(
            f"confidence_levels go with score='quantile'; score={score!r} answers at any level: drop them."
        )
    check_base(base, y.shape[0])
    rows, seed = None, None
    if rule == "randomized":
        if key is None:
            raise ValueError("rule='randomized' needs a key: give key=jax.random.key(0), say.")
        seed = jax.random.bits(key, (), "uint32")
    scale, reading = _scale(score, base), rule or ("conformal" if score == "signed" else "symmetric")
    if scale == "cdf":
        scores = smoothed(in_order(probabilities(base, y, compiled=rule == "randomized")), smoothing)
    else:
        finite, instead = rule == "linear" or smoothing is not None, AS_POINT if rule else ABSOLUTE
        errors = standardized_errors(base, y, scale == "std", finite=finite, instead=instead)
        if arguments.is_counted:
            scores, rows = tables_of_groups(arguments, errors, rule=reading)
        elif reading == "symmetric":
            scores = _symmetric(errors, smoothing)
        else:
            scores = smoothed(in_order(errors), smoothing)
    facts = facts_of(base, y, smoothing)
    return ConformalCalibrator(scores=scores, rule=reading, scale=scale, rows=rows, seed=seed, **facts)


def _scale(score: str, base: Distribution) -> str:
    """The scale of the scores: "std" for predicted stds, "y" for the unit of y, "cdf" for probabilities."""
    if score == "cdf" and not base.is_location_scale:
        return "cdf"
    return "std" if score == "scaled" or (score != "absolute" and base.has_std) else "y"


@numpy_or_jit(when=lambda _, smoothing: smoothing is None)
def _symmetric(errors: Float[AnyArray, " l"], smoothing: Real[ArrayLike, ""] | None) -> Float[AnyArray, " m"]:
    """The negatives of the sorted absolute errors, followed by these errors; smoothed unless `smoothing` is None."""
    xp = namespace(errors)
    sizes = smoothed(xp.sort(xp.abs(errors)), smoothing)
    return xp.concatenate([-sizes[::-1], sizes])


def _fit_quantiles(
    arguments: CalibratorArguments, y: Float[Array, " l"], levels: tuple[float, ...], smoothing: float | None
) -> "ConformalCalibrator":
    """`fit` with score="quantile", for checked targets and confidence levels."""
    rows, num_covered = None, None
    if arguments.is_counted:
        scores, rows = quantiles.tables_of_groups(arguments, y, levels)
    else:
        check_rows_reach(y.shape[0], levels[-1])
        base_quantiles = quantiles.of_base(arguments.base, levels, y.shape[0])
        scores, num_covered = quantiles.margins(base_quantiles, y, np.array(levels, y.dtype), smoothing)
    fields = {"scores": scores, "rows": rows, "num_covered": num_covered, **facts_of(arguments.base, y, smoothing)}
    return ConformalCalibrator(rule="symmetric", scale="y", confidence_levels=levels, **fields)


class ConformalCalibrator(eqx.Module):
    """The scores of calibration rows, and how predictions are made from them; made by `fit`.

    The ranks of rule="randomized" are drawn from a seed that the fit has fixed. So a call gives the same distributions
    each time, also under `jit` and after loading. The draw tau belongs to the position of a row. Row i has the same tau
    in every call, and in every calibrator fitted with the same key. The coverage of each row is exact on average over
    keys and calibration sets. For independent draws fit again with another key.

    Attributes:
        scores: the scores of the calibration rows, in increasing order [L]. With the rule "symmetric" they are the
            absolute errors and their negatives, [2 L]. With groups or weights they are a table for every group. With
            score="quantile" they are the growth of the interval of each level at either end, [k], on the scale of y.
            It is negative if the interval shrinks. With groups or weights they are then tables with a leading axis of
            levels, [k].
        rows: the groups and weights of the calibration rows; None without groups and weights.
        num_covered: with score="quantile" and without groups and weights the number of calibration rows in the interval
            of each level, [k]. The interval is first widened to contain the intervals of lower levels. Else None.
        seed: the seed of the ranks of rule="randomized", else None. Unlike a key it can be saved.
        rule: how a quantile is read from the scores: "symmetric" from absolute errors, "conformal" from signed errors,
            "randomized" or "linear".
        scale: the scale of the scores: "std" for predicted stds, "y" for the unit of y, or "cdf" for probabilities.
        num_calibration: the number of calibration rows.
        out_of_fold: whether the scores come from predictions by `jaxcal.out_of_fold`.
        smoothed: whether the scores are means over neighboring ranks.
        confidence_levels: the levels of score="quantile", in increasing order; else None.
    """

    scores: Errors
    rule: str = eqx.field(static=True)
    scale: str = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)
    smoothed: bool = eqx.field(static=True)
    confidence_levels: tuple[float, ...] | None = eqx.field(static=True, default=None)
    rows: CalibrationGroups | None = None
    num_covered: Int[Array, "*k"] | None = None
    seed: UInt32[Array, "*runs"] | None = None

    def __call__(
        self, x: Table | None, base: Distribution, *, by: Labels | None = None, weights: Weights | None = None
    ) -> Empirical | ScaledQuantiles | Recalibrated | Quantiles:
        """The calibrated distributions.

        - Without a rule they are `Empirical`, with the intervals of `guarantee`. An interval is infinite if there are
          too few calibration rows for its level; a warning says how many rows are needed.
        - With score="quantile" they are `Quantiles`, with the intervals at the levels of the fit, the base's median,
          and linear interpolation in between. The guarantee holds for the intervals at these levels alone. The
          distribution ends at the widest interval. With weights an interval is infinite, with a warning, if the
          row's weight is too large compared to the weights of the calibration rows.
        - With rule="randomized" they are `Empirical`, with mass at -inf and +inf. Their mean, std and score use only
          the finite values.
        - With rule="linear" they are `ScaledQuantiles`, with atoms of mass `1 / (L + 1)` at both ends. All methods are
          exact but the density, which is the density of a smoothed version.
        - If the scores are probabilities, scale "cdf", they are `Recalibrated`. With rule="linear" the probabilities
          are piecewise linear in the probabilities of the base, with the base's own tails. With rule="randomized" the
          quantiles are the base's quantiles at the sorted probabilities. Mean, std and score are then computed from a
          table of them for each row, [n, L].

        Args:
            x: inputs [n, d]. Only functions of x use them; else x may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.
            weights: the weights of the rows [n], if they were an array in the fit.

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if the mean or std of base, or with score="quantile" a quantile that is needed, is not finite.
                If base is a `Point` but the scores need a std or a distribution. If labels or weights are missing, have
                no effect, are of the wrong length or out of range. If no calibration row has the label of a row.
        """
        arguments = CalibratorArguments(x, base, by, weights)
        if self.confidence_levels is not None:
            return self._move(arguments, self.confidence_levels)
        check_base(base)
        group, new_weight = of_new_rows(self.rows, arguments)
        if self.scale == "cdf":
            check_density(base)
            return Recalibrated(base, self.scores, self.rule, self._tau(base.mean))
        loc, scale = base.mean, error_scale(base, self.scale == "std")
        if self.rule != "linear":
            tau = self._tau(loc)
            return Empirical(loc, scale, self.scores, self.rule, tau, group=group, new_weight=new_weight)
        levels = None if group is not None else levels_of_sample(self.scores)
        return ScaledQuantiles(loc, scale, levels, self.scores, from_sample=True, group=group, new_weight=new_weight)

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee | WeightedGuarantee:
        """The coverage guarantee of the central interval at this level, in the group with a label.

        With score="quantile" it holds for the interval at one of the levels of the fit. An interval that is widened to
        contain the intervals of lower levels covers more. Without groups and weights the guarantee then says how many
        calibration rows the interval covers.

        Args:
            confidence_level: in (0, 1).
            group: the label of a group, if the fit had groups.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), or with score="quantile" is no level of the fit. If
                the scores are out of fold or smoothed. If the fit had rule="randomized", or rule="linear" with groups
                or weights. If no group has the label, or the group has too few rows for the level.
        """
        if self.confidence_levels is not None:
            _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        check_not_smoothed(self.smoothed)
        if self.rule != "linear" or self.rows is not None:
            check_guarantees(self.rule)
        if self.rows is not None:
            return self.rows.guarantee(confidence_level, group, self.rule, self.out_of_fold)
        guarantee = coverage_guarantee(confidence_level, self.num_calibration, self.rule, self.out_of_fold)
        if self.num_covered is None or self.confidence_levels is None or self.num_covered.ndim > 1:  # of several runs
            return guarantee
        number = int(self.num_covered[self.confidence_levels.index(confidence_level)])
        return dataclasses.replace(guarantee, widened_to=number) if number > guarantee.places else guarantee

    def _move(self, arguments: CalibratorArguments, confidence_levels: tuple[float, ...]) -> Quantiles:
        """The base's quantiles at the levels of the fit, moved outwards."""
        values, levels = quantiles.of_base(arguments.base, confidence_levels), quantiles.levels_of(confidence_levels)
        group, new_weight = of_new_rows(self.rows, arguments)
        if not isinstance(self.scores, Tables):
            return Quantiles(levels, quantiles.moved_outwards(values, self.scores))
        central = np.array(confidence_levels)
        values, reach = quantiles.moved_by_tables(values, self.scores, group, central, new_weight)
        if new_weight is None:
            return Quantiles(levels, values)
        return Quantiles(levels, values, lowest=(1 - reach) / 2, highest=(1 + reach) / 2)

    def _tau(self, rows: Float[Array, "*n"]) -> Float[Array, "*n"] | None:
        """The draws of rule="randomized", one for each of these rows."""
        if self.seed is None:
            return None
        return jax.random.uniform(jax.random.key(self.seed), rows.shape, rows.dtype)
