"""Calibrated regression: an isotonic map from predicted to observed probabilities.

Kuleshov, Fenner and Ermon, "Accurate Uncertainties for Deep Learning Using Calibrated Regression", ICML 2018,
Algorithm 1. The fraction of the PIT values base.cdf(y) at or below the k-th smallest is k / L. The fractions increase
already, so that their isotonic regression on the PIT values interpolates them.

For normal predictions the PIT values are `Phi(z)` with `z = (y - mean) / std`. The recalibrated distribution of every
row is then mean + std * Z with one Z for all rows. All computations use z, which does not saturate: in double precision
Phi(z) is 1 from z = 8.3 on. Predictions whose distributions differ in shape from row to row keep their shapes: they and
the map make a `distributions.Recalibrated`.

A new row lies below the k-th smallest value with probability `k / (L + 1)`, not k / L. Only tails="support" has the
paper's levels.
"""

import equinox as eqx
import numpy as np
from jaxtyping import Float

from jaxcal import _checks
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.calibrators._base import (
    check_base,
    check_density,
    check_smoothing,
    error_scale,
    in_order,
    levels_of_sample,
    probabilities,
    rows_without_probability,
    smoothed,
    standardized_errors,
    warn_without_width,
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
from jaxcal.distributions import Distribution, Normal, Recalibrated, ScaledQuantiles
from jaxcal.frames.layout import Series, Table
from jaxcal.functional import linalg
from jaxcal.functional.linear_tables import LinearTables

# Beyond these values of z, Phi(z) is 0 or 1 in double precision.
_SATURATED = (-38.47, 8.292)


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    score: str | None = None,
    tails: str | None = None,
    by: "Labels | None" = None,
    weights: "Weights | None" = None,
    partial_pooling: bool = False,
    smoothing: float | None = None,
) -> "Isotonic":
    """Recalibrate predictions by isotonic regression on their PIT values.

    The calibration rows must not be rows that the model behind `base` was trained on. `jaxcal.out_of_fold` predicts
    every row by a model that was not trained on it.

    With score="signed" the recalibrated cdf is linear between the sorted `z = (y - mean) / std`. At equal z it jumps,
    to the count of all of them. The k-th smallest z has the level `k / (L + 1)`, with which it covers a new row. Below
    the least and above the greatest z the regression says nothing; there are three options:

    - "fitted": tails of the normal distribution with the mean and the std of z, scaled to the mass `1 / (L + 1)` at
      either end;
    - "anchored": the base's normal tails, scaled to the same mass; after a `Point` normal tails of std 1 on the scale
      of y;
    - "support": levels k / L, as in the paper. The distribution ends at the least and the greatest z, as for CRUDE, and
      an atom of mass 1 / L lies at the least. Its intervals cover less than they claim: at 90 % from nine rows 77 %.

    With score="cdf" the cdf is the base's cdf, mapped to levels. The map is linear between the sorted base.cdf(y), and
    the k-th of them has the level `k / (L + 1)`. Beyond both ends it has the base's own tails, scaled.

    Only the tails determine quantiles at levels below `1 / (L + 1)` and above `L / (L + 1)`. Such a quantile may cover
    less than its level, and a warning names the rows needed.

    The cost is O(L log L). A `Point` has no std: 1 is used in every row, and the result is the distribution of the
    errors. Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Fit and predictions are
    differentiable in base, y and weights; the derivative of a rank is 0.

    Args:
        x: inputs [L, d], for functions of x; else it is not used and may be None.
        base: the model's predictions [L] on rows that it was not trained on.
        y: targets [L].
        score: "signed" or "cdf", as above. None is "cdf" for bases that are continuous and whose rows may differ in
            shape, as `StudentT` and a `Mixture` of normals. None is "signed" if tails, `by` or weights are given, if a
            base.cdf(y) is 0 or 1, and for all other bases.
        tails: with score="signed" one of the above; None is "fitted", the only option with `by` or weights.
        by: labels of groups [L], or a function of x that gives them: every group is recalibrated by itself. See
            `conformal.fit` for `by` and `weights`.
        weights: the weights of the rows [L], or a function of x that gives them. The k-th smallest z has the level
            `(m_k + w / 2) / (W + w)`. Here m_k is the sum of the weights below this z plus half its own weight. W is
            the sum of all weights, and w is the weight of the new row.
        partial_pooling: as in `crude.fit`.
        smoothing: as in `crude.fit`, for the sorted z or base.cdf(y).

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite or of the wrong shape. If `score` or `tails` is none of the above.
            If a z is infinite, since a std is 0 and the error is not; if both are 0, z is 0. If tails, `by` or weights
            come with score="cdf". If other tails than "fitted" come with `by` or weights. If partial_pooling comes
            without `by`, or with weights. If with score="cdf" base is a `Point`, some base.cdf(y) is 0 or 1, or base
            has no density at a y. If smoothing is not in (0, 1/2], or comes with `by` or weights.

    Warns:
        UserWarning: if PIT values are 0 or 1 in double precision, with their fraction; the recalibrated distribution
            is then made from mean and std. If y equals base.mean in every row, so that no prediction has a width.

    Source: Kuleshov et al. 2018, Algorithm 1.

    Example:
        >>> import numpy as np
        >>> from jaxcal.calibrators import isotonic
        >>> from jaxcal.distributions import Normal
        >>> base = Normal(np.zeros(4), np.full(4, 0.5))
        >>> fitted = isotonic.fit(None, base, np.array([2.0, 0.0, -1.0, -2.0]))
        >>> distribution = fitted(None, Normal(np.array([10.0]), np.array([1.0])))
        >>> print(distribution.icdf(np.array([0.2, 0.5, 0.8])).round(2))
        [[ 6.  9. 14.]]
    """
    _checks.check_choice("score", score, (None, "signed", "cdf"))
    _checks.check_choice("tails", tails, (None, "fitted", "anchored", "support"))
    check_smoothing(smoothing, by=by, weights=weights)
    check_base(base)
    y = _checks.as_vector("y", y, length=base.mean.shape[0])
    if score == "cdf" and tails is not None:
        raise ValueError(f"score='cdf' has the tails of the base; got tails={tails!r}: drop one of the two.")
    arguments = CalibratorArguments(x, base, by, weights)
    if arguments.is_counted or partial_pooling:
        if score == "cdf" or tails not in (None, "fitted"):
            refused = "score='cdf'" if score == "cdf" else f"tails={tails!r}"
            raise ValueError(f"by and weights go with score='signed' and tails='fitted'; got {refused}.")
        scaled = base.has_std
        errors = standardized_errors(base, y, scaled, finite=True)
        scale = error_scale(base, scaled) if partial_pooling else None
        made, rows = tables_of_groups(arguments, errors, rule="linear", scale=scale)
        return Isotonic(made, "fitted", scaled, rows=rows)
    if score == "cdf" and not base.is_location_scale:
        return Isotonic(smoothed(in_order(probabilities(base, y)), smoothing), "fitted", scaled=True, uses_cdf=True)
    if score is None and tails is None and base.is_continuous and not base.is_location_scale:
        p = base.cdf(y)
        if not (bad := rows_without_probability(base, y, p)).size:
            return Isotonic(smoothed(in_order(p), smoothing), "fitted", scaled=True, uses_cdf=True)
        _checks.warn(
            f"{_checks.percent(bad.size / p.shape[0])} of the PIT values are 0 or 1 in this precision: the predictions "
            "are recalibrated by their means and stds, without their shapes (score='signed')."
        )
    scaled = base.has_std
    z = in_order(standardized_errors(base, y, scaled, finite=True))
    warn_without_width(z)
    if isinstance(base, Normal) and not _checks.is_traced(z):  # then Phi(z) are the PIT values
        _warn_of_extremes(np.asarray(z))
    return Isotonic(smoothed(z, smoothing), tails or "fitted", scaled)


class Isotonic(eqx.Module):
    """Recalibrated predictions; made by `fit`.

    Attributes:
        z: the standardized errors [L], or the probabilities base.cdf(y), in increasing order. With groups or weights
            z is a table for every group.
        tails: "fitted", "anchored" or "support".
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
        uses_cdf: whether z are probabilities.
        rows: the groups and weights of the calibration rows; None without groups and weights.
    """

    z: Errors
    tails: str = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)
    uses_cdf: bool = eqx.field(static=True, default=False)
    rows: CalibrationGroups | None = None

    def __call__(
        self, x: Table | None, base: Distribution, *, by: Labels | None = None, weights: Weights | None = None
    ) -> ScaledQuantiles | Recalibrated:
        """The recalibrated distributions of the predictions.

        Args:
            x: inputs [n, d]. Only functions of x use them; else x may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.
            weights: the weights of the rows [n], if they were an array in the fit.

        Raises:
            TypeError, ValueError: as `fit` raises for its base.
            ValueError: if base is a `Point` and `scaled` is set. If labels or weights are missing, have no effect, are
                of the wrong length or out of range. If no calibration row has the label of a row.
        """
        check_base(base)
        group, new_weight = of_new_rows(self.rows, CalibratorArguments(x, base, by, weights))
        if self.uses_cdf:
            check_density(base)
            return Recalibrated(base, self.z)
        loc, scale = base.mean, error_scale(base, self.scaled)
        if isinstance(self.z, LinearTables):
            return ScaledQuantiles(loc, scale, None, self.z, "normal", group=group, new_weight=new_weight)
        levels, z, tails, shift = levels_of_sample(self.z), self.z, "normal", None
        if self.tails == "fitted":
            loc, scale, z, shift = _by_fitted_normal(loc, scale, z)
        elif self.tails == "support":
            levels, tails = _levels_of_paper(self.z), "constant"
        return ScaledQuantiles(loc, scale, levels, z, tails, from_sample=True, shift=shift)


@numpy_or_jit
def _by_fitted_normal(
    loc: Float[AnyArray, "*n"], scale: Float[AnyArray, "*n"], z: Float[AnyArray, " l"]
) -> tuple[Float[AnyArray, "*n"], Float[AnyArray, "*n"], Float[AnyArray, " l"], Float[AnyArray, "*n"]]:
    """A new loc, scale and z of mean 0 and std 1 with the same values loc + scale z; the shift of loc."""
    # `loc + scale z = (loc + scale m) + (scale s) (z - m) / s`, with the mean m and the std s of z.
    center = z.mean()
    spread = linalg.root_mean_square(z - center)
    shift = scale * center
    return loc + shift, scale * spread, (z - center) / namespace(z).where(spread > 0, spread, 1), shift


@numpy_or_jit
def _levels_of_paper(z: Float[AnyArray, " l"]) -> Float[AnyArray, " l"]:
    return namespace(z).arange(1, z.shape[0] + 1, dtype=z.dtype) / z.shape[0]


def _warn_of_extremes(z: np.ndarray) -> None:
    fraction = np.mean((z < _SATURATED[0]) | (z > _SATURATED[1]))
    if fraction > 0:
        _checks.warn(
            f"{_checks.percent(float(fraction))} of the PIT values are 0 or 1 in double precision, with |z| up to "
            f"{np.abs(z).max():.3g}: the stds of base are far too small there. The recalibrated distribution is "
            "not affected."
        )
