"""CRUDE: the errors on calibration rows, measured in predicted stds, give every prediction its shape.

Zelikman, Healy, Zhou and Avati, "CRUDE: Calibrating Regression Uncertainty Distributions Empirically", 2020. The
predictive distribution is `y = mean + std Z`, with Z uniform on the sorted `z = (y - mean) / std` of the calibration
rows. `distributions.Empirical` has its cdf, quantiles (equation 3), mean (1, 4) and variance (2, 5). The index of
Algorithm 1 is the rule "crude" of `functional.quantiles.empirical_quantile`; the default is "conformal", whose
intervals cover what they claim. For vector targets the table holds the whitened errors `L^-1 (y - mean)`, with the
Cholesky factor L of the predicted covariance. The predictive distribution is then `MultivariateEmpirical`.
"""

from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxcal import _checks, _programs
from jaxcal.calibrators._base import (
    check_base,
    check_density,
    check_not_smoothed,
    check_smoothing,
    coverage_guarantee,
    error_scale,
    facts_of,
    in_order,
    probabilities,
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
from jaxcal.distributions import Distribution, Empirical, MultivariateEmpirical, MultivariateNormal, Recalibrated
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional.quantiles import empirical_rank
from jaxcal.guarantee import Guarantee, WeightedGuarantee

# The largest number of distances to calibration rows that memory holds at once.
_DISTANCES_AT_ONCE = 2**22


def fit(
    x: "Table | None",
    base: "Distribution | MultivariateNormal",
    y: "Series",
    *,
    rank: str | None = None,
    score: str = "signed",
    neighbors: int | None = None,
    categorical: "Categorical" = (),
    by: "Labels | None" = None,
    weights: "Weights | None" = None,
    partial_pooling: bool = False,
    smoothing: float | None = None,
    preset: str | None = None,
) -> "CRUDE":
    """Sort the standardized errors z = (y - base.mean) / base.std: the table that shapes every prediction.

    The calibration rows must not be rows that the model behind `base` was trained on: its errors there are smaller than
    on new rows. `jaxcal.out_of_fold` predicts every row by a model that was not trained on it.

    A base without a std, a `Point`, has scale 1 in every row: z is the error itself. For vector targets base is a
    `MultivariateNormal`, whose covariance whitens the errors.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. Fit and predictions are differentiable in
    base, y and weights; the derivative of a rank, and of which rows are neighbors, is 0.

    Args:
        x: inputs [L, d], or a data frame (`jaxcal.frames`); a vector [L] is one column. Only `neighbors` uses them;
            without it x may be None.
        base: the model's predictions at x, [L]; for vector targets [L, t] a `MultivariateNormal`.
        y: targets [L], or [L, t].
        rank: which of the sorted z is the quantile at level p; None for "conformal". Ranks are counted from 1.

            - "conformal": the z of rank `ceil((L + 1) p)`, or below the median of rank `floor((L + 1) p)`. Its
              intervals have the coverage of `CRUDE.guarantee`. If L is too small for this rank, the quantile is
              infinite, and a warning names the L needed.
            - "crude": Algorithm 1's `z[int(p L)]`, with an index counted from 0. A new row lies at or below it with
              probability `(int(p L) + 1) / (L + 1)`. The 90 % interval from 20 rows covers it with probability 85.7 %.
        score: the sorted values. "signed" is z. "cdf" is base.cdf(y), for bases whose distributions differ in shape
            from row to row. The quantile at level p is then the base's own quantile at the sorted value of this rank.
            Mean, std and score of a row then take L quantiles of the base. For a normal base "cdf" means "signed",
            which has the same ranks.
        neighbors: the number of calibration rows in the table of a prediction. They are the rows whose inputs are
            nearest to its inputs by Euclidean distance; the calibration rows standardize every column. None for all
            rows. A table of k neighbors has the ranks of a table of length k. Its intervals cover what they claim if z
            does not depend on the inputs. Otherwise they cover about what they claim, and closer neighbors are better.
        categorical: with neighbors: the columns of x whose values have no order, by position, or of a data frame by
            name.
        by: labels of groups [L], or a function of x that gives them: every group has a table of its own. See
            `conformal.fit` for `by` and `weights`.
        weights: the weights of the rows [L], or a function of x that gives them.
        partial_pooling: whether the table of a group also takes in the errors of all rows, for groups of few rows. They
            count for as many rows of the group as makes the leave-one-out CRPS least. It guarantees no coverage.
        smoothing: None, or the half width in (0, 1/2] of a window of ranks. Each of the sorted z becomes the mean of
            the z within `floor(smoothing L)` ranks, `functional.quantiles.smoothed_table`. The derivative of a
            quantile then depends on many rows, as training through the calibration needs. It guarantees no coverage.
        preset: None, or "paper", which is rank="crude".

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is empty, not finite, of the wrong shape or length. If there are fewer rows than
            neighbors. If neighbors come without x, with score="cdf" or with vector targets. If a rank or score="cdf"
            comes with vector targets, which have no ranks. If score="cdf" comes with a `Point`, or some base.cdf(y) is
            0 or 1. If preset="paper" comes with another rank. If partial_pooling comes without `by`, or with weights.
            If smoothing is not in (0, 1/2], or comes with neighbors, `by`, weights or vector targets.

    Warns:
        UserWarning: if y equals base.mean in every row, so that no prediction has a width. If z is infinite in some
            rows, because their std is 0 and their error is not; if both are 0, z is 0.

    Source: Zelikman et al., CRUDE, 2020, Algorithm 1; its section 7 proposes neighbors and vector targets.
    Smoothing: Stutz, Dvijotham, Cemgil and Doucet, ICLR 2022.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcal import Normal
        >>> from jaxcal.calibrators import crude
        >>> base = Normal(jnp.zeros(4), jnp.array([1.0, 2.0, 1.0, 2.0]))
        >>> fitted = crude.fit(None, base, jnp.array([3.0, -2.0, 0.0, 1.0]))
        >>> print(fitted.z, fitted(None, Normal(5.0, 2.0)).icdf(0.8).round(2))
        [-1.   0.   0.5  3. ] [11.]
    """
    _checks.check_choice("preset", preset, (None, "paper"))
    _checks.check_choice("rank", rank, (None, "crude", "conformal"))
    _checks.check_choice("score", score, ("signed", "cdf"))
    if preset and rank == "conformal":
        raise ValueError("preset='paper' is rank='crude'; got rank='conformal'.")
    if isinstance(base, MultivariateNormal):
        score_given = "cdf" if score == "cdf" else None
        options = {"rank": rank, "score": score_given, "neighbors": neighbors, "smoothing": smoothing}
        for name, value in options.items():
            if value is not None:
                raise ValueError(
                    f"base is a MultivariateNormal, with {name}={value!r}: vector targets have neither ranks nor "
                    "tables of neighbors. Leave the options at their defaults, or calibrate every component by itself."
                )
        return _fit_vectors(base, y)
    check_smoothing(smoothing, neighbors=neighbors, by=by, weights=weights)
    y = _checks.as_vector("y", y)
    check_base(base, y.shape[0])
    uses_cdf, scaled = score == "cdf" and not base.is_location_scale, base.has_std
    if uses_cdf and neighbors is not None:
        raise ValueError(f"neighbors={neighbors} cannot go with score='cdf': use score='signed', or no neighbors.")
    rank = rank or ("crude" if preset else "conformal")
    arguments = CalibratorArguments(x, base, by, weights)
    has_groups = arguments.is_counted or partial_pooling
    if has_groups and (neighbors is not None or uses_cdf):
        refused = "score='cdf'" if uses_cdf else f"neighbors={neighbors}"
        raise ValueError(f"{refused} cannot go with by or weights: omit one of them.")
    neighborhood = None if neighbors is None else _neighborhood(x, y.shape[0], neighbors, categorical)
    rows = None
    if uses_cdf:
        z = smoothed(in_order(probabilities(base, y)), smoothing)
    else:
        errors = standardized_errors(base, y, scaled, finite=partial_pooling or smoothing is not None)
        if has_groups:
            scale = error_scale(base, scaled) if partial_pooling else None
            z, rows = tables_of_groups(arguments, errors, rule=rank, scale=scale)
        else:
            # If rows are equally distant, a search for neighbors takes the first: do not sort them by their errors.
            z = errors if neighbors is not None else smoothed(in_order(errors), smoothing)
            warn_without_width(z)
    facts = facts_of(base, y, smoothing)
    return CRUDE(z=z, rank=rank, scaled=scaled, uses_cdf=uses_cdf, neighborhood=neighborhood, rows=rows, **facts)


class CRUDE(eqx.Module):
    """A table of standardized errors; made by `fit`.

    Attributes:
        z: the standardized errors [L], or the probabilities base.cdf(y), in increasing order. With neighbors they are
            in the order of the calibration rows. With groups or weights z is a table for every group. For vector
            targets z holds the whitened errors [L, t], in the order of the calibration rows. The components of a row
            stay together, which keeps any dependence between them that the predicted covariance does not explain.
        rank: "crude" or "conformal"; None for vector targets, which have no ranks.
        num_calibration: the number L of calibration rows.
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
        uses_cdf: whether z are probabilities base.cdf(y) in place of errors.
        out_of_fold: whether the errors are errors of `jaxcal.out_of_fold`.
        smoothed: whether z are means over neighboring ranks.
        neighborhood: the search for the rows in the table of a prediction; None if the table has all rows.
        rows: the groups and weights of the calibration rows; None without groups and weights.
    """

    z: Errors
    rank: str | None = eqx.field(static=True)
    num_calibration: int = eqx.field(static=True)
    scaled: bool = eqx.field(static=True, default=True)
    uses_cdf: bool = eqx.field(static=True, default=False)
    out_of_fold: bool = eqx.field(static=True, default=False)
    smoothed: bool = eqx.field(static=True, default=False)
    neighborhood: "Neighborhood | None" = None
    rows: CalibrationGroups | None = None

    def __call__(
        self,
        x: Table | None,
        base: Distribution | MultivariateNormal,
        *,
        by: Labels | None = None,
        weights: Weights | None = None,
    ) -> Empirical | Recalibrated | MultivariateEmpirical:
        """The distribution base.mean + base.std * Z of every row, or base.mean + base.factor Z for vectors.

        Without neighbors all rows share one table, or with groups all rows of a group: n predictions take n means and n
        stds. With k neighbors every row has a table of its own, [n, k]. With score="cdf" a row keeps the shape of its
        base, and its quantiles are the base's own.

        Args:
            x: inputs [n, d]; a vector [n] is one column. Only neighbors and functions of x use them; else x may be
                None.
            base: the model's predictions at x, [n]; for vector targets a `MultivariateNormal`, [n, t].
            by: labels of the rows [n], if they were an array in the fit.
            weights: the weights of the rows [n], if they were an array in the fit.

        Raises:
            TypeError: if base is not a Distribution, or for vector targets no `MultivariateNormal`.
            ValueError: if an argument is not finite, of the wrong shape or length. If base is a `Point` but errors are
                measured in predicted stds, or if base has another number of components. If labels or weights are
                missing, have no effect or are out of range. If no calibration row has the label of a row.
        """
        if self.rank is None:
            return self._of_vectors(base)
        check_base(base)
        base = cast("Distribution", base)
        group, new_weight = of_new_rows(self.rows, CalibratorArguments(x, base, by, weights))
        if self.uses_cdf:
            check_density(base)
            return Recalibrated(base, self.z, self.rank)
        loc, scale = base.mean, error_scale(base, self.scaled)
        if self.neighborhood is None:
            return Empirical(loc, scale, self.z, self.rank, group=group, new_weight=new_weight)
        x = self.neighborhood.columns(x)
        _checks.check_length("x", x, loc.shape[0])
        return Empirical(loc, scale, self.neighborhood.tables(self.z, x), self.rank)

    def guarantee(self, confidence_level: float, group: Any = None) -> Guarantee | WeightedGuarantee:
        """The coverage guarantee of the central interval at this level, in the group with a label.

        Args:
            confidence_level: in (0, 1).
            group: the label of a group, if the fit had groups.

        Raises:
            ValueError: if the confidence level lies outside (0, 1). If the rank is "crude" or None, or the table is
                pooled, smoothed or made of neighbors, since these guarantee nothing. If the errors are out of fold. If
                no group has the label, or the group has too few rows for the level.

        Example:
            >>> import jax.numpy as jnp
            >>> from jaxcal import Point
            >>> from jaxcal.calibrators import crude
            >>> fitted = crude.fit(None, Point(jnp.zeros(99)), jnp.arange(99.0))
            >>> print(fitted.guarantee(0.9).coverage)
            0.9
        """
        _checks.check_fraction("confidence_level", confidence_level)
        check_not_smoothed(self.smoothed)
        if self.rank is None:
            raise ValueError("vector targets have no ranks, and no coverage is guaranteed: calibrate each component.")
        if self.rows is not None:
            return self.rows.guarantee(confidence_level, group, self.rank, self.out_of_fold)
        if self.neighborhood is not None:
            raise ValueError(
                "a table of neighbors guarantees nothing: its intervals cover about what they claim. Fit without "
                "neighbors for a guarantee."
            )
        rows = self.num_calibration
        if self.rank == "crude":
            low, high = (empirical_rank((1 + sign * confidence_level) / 2, rows, "crude") for sign in (-1, 1))
            raise ValueError(
                f"rank='crude' guarantees nothing: its {100 * confidence_level:g} % interval covers a new row with "
                f"probability {100 * float(high - low) / (rows + 1):.1f} %. Fit with rank='conformal' for a guarantee."
            )
        return coverage_guarantee(confidence_level, rows, self.rank, self.out_of_fold)

    def _of_vectors(self, base: Distribution | MultivariateNormal) -> MultivariateEmpirical:
        """The distributions of vector targets."""
        if not isinstance(base, MultivariateNormal):
            raise TypeError(
                f"base must be a MultivariateNormal, as it was in the fit; got {type(base).__name__}. "
                "Fit on scalar predictions to calibrate scalar predictions."
            )
        return MultivariateEmpirical(base.mean, base.factor, self.z)


class Neighborhood(eqx.Module):
    """The calibration rows nearest to a query.

    Attributes:
        inputs: the standardized inputs of the calibration rows [L, d].
        columns: the description of the columns of these inputs.
        x_scaler: the standardization of the inputs.
        number: the number of calibration rows in the table of a query.
    """

    inputs: Float[Array, "*l d"]
    columns: Columns
    x_scaler: Standardizer
    number: int = eqx.field(static=True)

    @_programs.jit
    def tables(self, z: Float[Array, " l"], x: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """The sorted errors of the nearest rows of every query."""

        def table(query: Float[Array, " d"]) -> Float[Array, " k"]:
            distances = jnp.sum((self.inputs - query[None]) ** 2, axis=1)
            # Single precision: in double precision a CPU would sort all distances, which is ten times slower.
            return jnp.sort(z[lax.top_k(-distances.astype(jnp.float32), self.number)[1]])

        at_once = max(1, _DISTANCES_AT_ONCE // z.shape[0])
        return lax.map(table, lax.stop_gradient(self.x_scaler(x)), batch_size=at_once)


def _fit_vectors(base: MultivariateNormal, y: Series) -> CRUDE:
    y = _checks.as_matrix("y", y, length=base.mean.shape[0])
    z = base.whiten(y)
    _checks.check_finite("the whitened errors", z)
    return CRUDE(z=z, rank=None, num_calibration=y.shape[0])


def _neighborhood(x: Table | None, length: int, number: int, categorical: Categorical) -> Neighborhood:
    if x is None:
        raise ValueError(f"x is None, but neighbors={number} finds neighbors by their inputs: give x.")
    _checks.check_at_least("neighbors", number, 1)
    if number > length:
        raise ValueError(f"neighbors is {number}, but there are {length} calibration rows: take at most {length}.")
    columns = Columns.of(x, categorical)
    x = columns(x)
    _checks.check_length("x", x, length)
    x_scaler, inputs = _standardized(x, columns.indicators)
    return Neighborhood(inputs=inputs, columns=columns, x_scaler=x_scaler, number=number)


@partial(jax.jit, static_argnums=1)
def _standardized(x: Float[Array, "l d"], indicators: tuple[int, ...]) -> tuple[Standardizer, Float[Array, "l d"]]:
    x = lax.stop_gradient(x)
    x_scaler = Standardizer.of(x).without(indicators)
    return x_scaler, x_scaler(x)
