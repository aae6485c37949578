"""Split conformal prediction: intervals that cover at least as often as they claim, and calibrated distributions.

The scores of calibration rows that the model was not trained on are sorted; that of rank ceil((L + 1) c) is exceeded
by the score of a new, exchangeable row with a probability of at most 1 - c, whatever the model and the data. The
scores, by the argument `score` of `fit`:

============  ===========================================  ==============================================
"absolute"    |y - mean|                                   Papadopoulos et al. 2002; Lei et al. 2018
"scaled"      |y - mean| / std                             Papadopoulos et al. 2002; Lei et al. 2018, 5.2
"signed"      (y - mean) / std, or y - mean: two tails     Linusson, Johansson and Lofstrom 2014
"quantile"    max(lower - y, y - upper), for every level   Romano, Patterson and Candes 2019
============  ===========================================  ==============================================

The first three read their intervals, at any level, from one table: `distributions.Empirical` with the rule "symmetric"
or "conformal". The last one makes intervals at the levels chosen beforehand: `distributions.Quantiles`.

A score that increases with y, "signed" or "cdf", which is base.cdf(y), gives a whole predictive distribution, each
quantile of which is to have its own level as coverage: neither less nor more. Its quantiles, by the argument `rule`:

============  =============================================================  =======================
"randomized"  rank floor(t) or floor(t) + 1 of the scores, t = (L + 1) p,    Vovk et al. 2020
              drawn so that it is t in the mean
"linear"      the j-th score at level j / (L + 1), straight lines between    Marx et al. 2022
============  =============================================================  =======================

Recalibrators that Capone, Hirche and Pleiss (NeurIPS 2023, Table 1) compare with, from the base distribution of a GP:
"RV" is rule="randomized"; "RM" is rule="linear" from `Point(base.mean)`, without the variance; "RK" (Kuleshov, Fenner
and Ermon 2018) is `isotonic.fit`.
"""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, UInt32

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, check_not_out_of_fold, error_unit, standardized_errors
from jaxcal.distributions import Distribution, Empirical, Normal, Point, Quantiles, ScaledQuantiles
from jaxcal.functional.quantiles import empirical_quantile, smallest_table
from jaxcal.guarantee import Guarantee

_CONFIDENCE_LEVELS = (0.5, 0.8, 0.9, 0.95)
# Which scores a rule goes with.
_SCORES = {
    None: ("absolute", "scaled", "signed", "quantile"),
    "randomized": ("signed", "cdf"),
    "linear": ("signed", "cdf"),
}


def fit(
    x: ArrayLike | None,
    base: Distribution,
    y: ArrayLike,
    *,
    score: str | None = None,
    rule: str | None = None,
    confidence_levels: Sequence[float] | None = None,
    key: PRNGKeyArray | None = None,
) -> "SplitConformal | ConformalizedQuantiles | ConformalCalibrator":
    """Sort the scores of the calibration rows, which must not be those that the model was trained on.

    They must be predicted by the very model that will predict new rows: of predictions out of fold there is no
    guarantee. `jaxcal.pipeline.fit(method="split")` sets rows aside for it.

    - "absolute", "scaled": the interval at level c is mean -+ s (std) with the score s of rank ceil((L + 1) c).
    - "signed": its ends are mean + z (std) with the z of the ranks floor((L + 1) (1 - c) / 2) and
      ceil((L + 1) (1 + c) / 2), each tail by itself.
    - "quantile": the base's own quantiles at (1 -+ c) / 2 are moved apart (or together, not past the median) by the
      score of rank ceil((L + 1) c) of that level. Where the interval of a higher level would leave out some of that of
      a lower one it is widened, which keeps the guarantee.

    With a rule, the whole distribution by a score that increases with y:

    - rule="randomized": the quantile at level p is the score of a rank drawn for the row, put back to the scale of y:
      mean + z std for "signed". It covers with probability p exactly, at every level, in the mean over draws and
      calibration sets. At the ranks 0 and L + 1 it is infinite.
    - rule="linear": nothing is drawn. At the levels p = j / (L + 1) the quantile covers with probability p in the mean
      over calibration sets, and from one to the next its coverage follows Beta(j, L + 1 - j); at a level in between it
      covers more than at the one below and less than at the one above. Beyond the outermost levels it is constant.
    - score="cdf": base.cdf(y), where the distribution of each row has a shape of its own. For a normal base, in which
      nothing but mean and std differs between rows, it is taken as "signed", which does not saturate. For others a
      predicted row costs L quantiles of the base.

    All this holds for scores without ties.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. No gradient passes through the fit;
    predictions are differentiable in base.

    Args:
        x: not used; may be None.
        base: the model's predictions at x, [L].
        y: targets [L].
        score: one of the four above; None for "scaled" where the base has a std, else "absolute". With a rule "signed",
            the same as None, or "cdf".
        rule: None for intervals with a guarantee; "randomized" or "linear" for a calibrated distribution.
        confidence_levels: the levels c of the intervals of score="quantile" (default 0.5, 0.8, 0.9, 0.95).
        key: random key of the ranks of rule="randomized". See `ConformalCalibrator` for what calls share.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is empty, not finite, of the wrong shape or length; if a std of base is not positive
            ("quantile" uses no std); if the score needs a std, or a distribution, and base is a `Point`; if there
            are too few rows for a confidence level; if base.cdf(y) is 0 or 1 or base has no density at y, in a row,
            where that is the score; if there is no key where ranks are drawn.

    Source: Papadopoulos, Proedrou, Vovk and Gammerman, ECML 2002; Lei, G'Sell, Rinaldo, Tibshirani and Wasserman,
    JASA 113 (2018); Linusson, Johansson and Lofstrom, PAKDD 2014; Romano, Patterson and Candes, NeurIPS 2019; Vovk,
    Petej, Toccaceli, Gammerman, Ahlberg and Carlsson, Conformal calibrators, COPA 2020; Marx, Zhao, Neiswanger and
    Ermon, Modular conformal calibration, ICML 2022.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Point
        >>> from jaxcal.calibrators import conformal
        >>> fitted = conformal.fit(None, Point(jnp.zeros(99)), jnp.arange(1.0, 100.0))
        >>> lower, upper = fitted(None, Point(1000.0)).interval(0.9)
        >>> print(lower, upper, fitted.guarantee(0.9).coverage)
        [910.] [1090.] 0.9
        >>> calibrate = conformal.fit(None, Point(jnp.zeros(99)), jnp.arange(1.0, 100.0), rule="linear")
        >>> distribution = calibrate(None, Point(1000.0))
        >>> print(distribution.icdf(0.905), distribution.cdf(1090.5))
        [1090.5] [0.905]
    """
    rule = _checks.renamed_value("rule", rule, randomised="randomized")
    _checks.check_choice("rule", rule, tuple(_SCORES))
    if score is None:
        score = "signed" if rule else "absolute" if isinstance(base, Point) else "scaled"
    _checks.check_choice(f"with rule={rule!r} score", score, _SCORES[rule])
    y = _checks.as_vector("y", y)
    if score == "quantile":
        return _fit_quantiles(base, y, _CONFIDENCE_LEVELS if confidence_levels is None else confidence_levels)
    if confidence_levels is not None:
        raise ValueError(f"confidence_levels go with score='quantile'; score={score!r} answers at any level.")
    check_base(base, y.shape[0])
    if rule is not None:
        return _fit_distribution(base, y, score, rule, key)
    scaled = score == "scaled" or (score == "signed" and not isinstance(base, Point))
    rule = "conformal" if score == "signed" else "symmetric"
    table = _table(standardized_errors(base, y, scaled), rule)
    return SplitConformal(z=table, scaled=scaled, rule=rule, out_of_fold=base.is_out_of_fold)


class SplitConformal(eqx.Module):
    """A table of scores; made by `fit`.

    Attributes:
        z: the signed scores [L], in increasing order; or the scores of size and their negatives [2 L].
        scaled: whether errors are measured in predicted stds, or in the unit of y.
        rule: how a quantile is read from the table: "conformal" from signed scores, "symmetric" from scores of size.
        out_of_fold: whether the errors are those of `jaxcal.out_of_fold`.
    """

    z: Float[Array, "*l"]
    scaled: bool = eqx.field(static=True)
    rule: str = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Empirical:
        """The distribution whose central intervals have the coverage of `guarantee`.

        They are infinite, with a warning that names the rows needed, at levels for which the calibration rows are too
        few.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite, or a std not positive; if it is a `Point` where errors are
                measured in predicted stds.
        """
        check_base(base)
        return Empirical(base.mean, error_unit(base, self.scaled), self.z, self.rule)

    def guarantee(self, confidence_level: float) -> Guarantee:
        """The coverage guarantee of the central interval at this level.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), or the errors are out of fold.
        """
        check_not_out_of_fold(self.out_of_fold)
        size = self.z.shape[-1]
        return Guarantee.of(confidence_level, size // 2 if self.rule == "symmetric" else size, self.rule)


class ConformalizedQuantiles(eqx.Module):
    """How far the quantiles of a base are to be moved; made by `fit` with score="quantile".

    Attributes:
        margins: by how much the interval of each level grows at either end, [k], in the unit of y; negative where it
            shrinks.
        confidence_levels: the levels, in increasing order.
        num_calibration: the number of calibration rows.
        out_of_fold: whether the quantiles are those of `jaxcal.out_of_fold`.
    """

    margins: Float[Array, "*k"]
    confidence_levels: tuple[float, ...] = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Quantiles:
        """The distribution with these intervals at the levels of the fit, the base's median, and lines in between.

        The guarantee is that of the intervals at these levels alone. The distribution ends at the widest of them.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean, or a quantile that is needed, is not finite.
        """
        quantiles = _quantiles_of(base, self.confidence_levels)
        return Quantiles(_levels(self.confidence_levels), _moved_outwards(quantiles, self.margins))

    def guarantee(self, confidence_level: float) -> Guarantee:
        """The coverage guarantee of the interval at one of the levels of the fit.

        Raises:
            ValueError: if the confidence level is none of them, or the quantiles are out of fold.
        """
        _checks.check_choice("confidence_level", confidence_level, self.confidence_levels)
        check_not_out_of_fold(self.out_of_fold)
        return Guarantee.of(confidence_level, self.num_calibration, "symmetric")


class ConformalCalibrator(eqx.Module):
    """A table of scores that increase with y, from which whole distributions are read; made by `fit` with a rule.

    The ranks of rule="randomized" are drawn from a seed that was fixed in the fit: a call gives the same distribution
    each time, and so do `jit` and a saved calibrator. Row i of every call has the same tau. The coverage of each row is
    exact in the mean, whichever call it is in, but the draws of all calls are the same, as are those of runs that were
    fitted with one key: fit again with another key for independent draws.

    Attributes:
        scores: of the calibration rows, in increasing order [L].
        seed: of the ranks of rule="randomized", None with rule="linear". Unlike a key it can be saved.
        unit: what the scores are: errors in predicted stds, "std", or in the unit of y, "y"; or probabilities, "cdf".
    """

    scores: Float[Array, "*l"]
    seed: UInt32[Array, "*runs"] | None
    unit: str = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Empirical | ScaledQuantiles | Quantiles:
        """The calibrated distributions.

        Those of rule="randomized" are `Empirical`, with mass at -inf and +inf: their mean, std and score are those of
        the finite values. Those of rule="linear" are `ScaledQuantiles` with atoms of mass 1 / (L + 1) at both ends, of
        which all methods are exact. From probabilities, unit "cdf", every row has a table of its own, [n, L]: the
        distributions are then `Empirical` and `Quantiles`, straight between the quantiles of the base at these
        probabilities.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite, or a std not positive; if it is a `Point` where the scores
                need more.
        """
        check_base(base)
        if self.unit == "cdf":
            loc, scale, table = jnp.zeros_like(base.mean), 1.0, _quantiles_at(base, self.scores)
        else:
            loc, scale, table = base.mean, error_unit(base, self.unit == "std"), self.scores
        if self.seed is not None:
            tau = jax.random.uniform(jax.random.key(self.seed), loc.shape, loc.dtype)
            return Empirical(loc=loc, scale=scale, z=table, rule="randomized", tau=tau)
        size = self.scores.shape[-1]
        levels = jnp.arange(1, size + 1, dtype=loc.dtype) / (size + 1)
        return Quantiles(levels, table) if self.unit == "cdf" else ScaledQuantiles(loc, scale, levels, table)


@functools.partial(jax.jit, static_argnames="rule")
def _table(errors: Float[Array, " l"], rule: str) -> Float[Array, "..."]:
    """The sorted errors, or their sizes after the negatives of these."""
    if rule == "conformal":
        return jnp.sort(errors)
    sizes = jnp.sort(jnp.abs(errors))
    return jnp.concatenate([-sizes[::-1], sizes])


def _fit_distribution(base: Distribution, y: Float[Array, " l"], score: str, rule: str, key: PRNGKeyArray | None):
    seed = None
    if rule == "randomized":
        if key is None:
            raise ValueError("rule='randomized' needs a key: jax.random.key(0), say.")
        seed = jax.random.bits(key, (), "uint32")
    if score == "cdf" and not isinstance(base, Normal):
        return ConformalCalibrator(jnp.sort(_probabilities(base, y)), seed, "cdf")
    scaled = not isinstance(base, Point)
    return ConformalCalibrator(jnp.sort(standardized_errors(base, y, scaled)), seed, "std" if scaled else "y")


def _probabilities(base: Distribution, y: Float[Array, " l"]) -> Float[Array, " l"]:
    """base.cdf(y) of every row, as constants."""
    _check_not_point(base)
    base, y = lax.stop_gradient((base, y))
    p = base.cdf(y)
    if not _checks.is_traced(p):
        bad = np.flatnonzero(~((p > 0) & (p < 1) & np.isfinite(base.log_prob(y))))
        if bad.size:
            raise ValueError(
                "score='cdf' needs a base.cdf(y) strictly between 0 and 1, and a density of base at y. "
                f"{bad.size} rows, the first at index {bad[0]}, lack one of the two: take score='signed'."
            )
    return p


def _quantiles_at(base: Distribution, p: Float[Array, " l"]) -> Float[Array, "n l"]:
    """The base's quantiles at these increasing levels."""
    _check_not_point(base)
    # Rounding in the search for a quantile must not put two of them out of order.
    return lax.cummax(base.icdf(p), axis=1)


def _check_not_point(base: Distribution) -> None:
    if isinstance(base, Point):
        raise ValueError("base is a Point: score='cdf' needs distributions that have a density.")


def _fit_quantiles(base: Distribution, y: Float[Array, " l"], confidence_levels: Sequence[float]):
    levels = tuple(sorted({float(level) for level in confidence_levels}))
    rows = y.shape[0]
    _checks.check_length("confidence_levels", np.array(levels), None)
    _checks.check_fraction("confidence_levels", np.array(levels))
    if rows < (needed := smallest_table(levels[-1])):
        raise ValueError(f"{rows} rows are too few for confidence level {levels[-1]:g}: at least {needed} are needed.")
    margins = _margins(_quantiles_of(base, levels, rows), y, np.array(levels))
    return ConformalizedQuantiles(
        margins=margins, confidence_levels=levels, num_calibration=rows, out_of_fold=base.is_out_of_fold
    )


def _levels(confidence_levels: tuple[float, ...]) -> np.ndarray:
    """The levels of the quantiles: the lower ends from the widest interval on, the median, the upper ends."""
    central = np.array(confidence_levels)
    return np.concatenate([(1 - central[::-1]) / 2, [0.5], (1 + central) / 2])


def _quantiles_of(base: Distribution, confidence_levels: tuple[float, ...], length: int | None = None):
    """The base's quantiles at these levels, finite, [n, 2 k + 1]."""
    # They may all coincide in a row: its std of 0 is not used.
    check_base(Point(base.mean) if isinstance(base, Distribution) else base, length)
    quantiles = base.icdf(_levels(confidence_levels))
    _checks.check_finite("base.icdf(levels)", quantiles)
    return quantiles


@jax.jit
def _margins(quantiles: Float[Array, "l q"], y: Float[Array, " l"], confidence_levels) -> Float[Array, " k"]:
    """The score of rank ceil((L + 1) c) of every level."""
    quantiles, y = lax.stop_gradient((quantiles, y))
    middle = quantiles.shape[1] // 2
    lower, upper = quantiles[:, :middle][:, ::-1], quantiles[:, middle + 1 :]
    errors = jnp.sort(jnp.maximum(lower - y[:, None], y[:, None] - upper), axis=0)
    return jax.vmap(lambda table, level: empirical_quantile(table, level, "conformal"), (1, 0))(
        errors, confidence_levels
    )


@jax.jit
def _moved_outwards(quantiles: Float[Array, "n q"], margins: Float[Array, " k"]) -> Float[Array, "n q"]:
    """The quantiles moved by their margins, each interval so wide that it holds the narrower ones and the median."""
    middle = margins.shape[0]
    margins = margins.astype(quantiles.dtype)
    moved = quantiles + jnp.concatenate([-margins[::-1], jnp.zeros_like(margins[:1]), margins])[None]
    lower = lax.cummin(moved[:, : middle + 1], axis=1, reverse=True)
    upper = lax.cummax(moved[:, middle:], axis=1)
    return jnp.concatenate([lower, upper[:, 1:]], axis=1)
