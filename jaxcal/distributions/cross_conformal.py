"""`CrossConformal`: predictions of a new row by models, each fitted without some of the calibration rows."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.distributions._base import Distribution, as_parameter, as_table, match, numpy_knows, of_targets
from jaxcal.distributions._reach import Reach
from jaxcal.distributions._rows import Values
from jaxcal.functional import linalg, quantiles, rounding, scores
from jaxcal.functional._loops import over_leading_axis

# The largest number of centers that memory holds at once.
_CENTERS_AT_ONCE = 2**22


class CrossConformal(Distribution):
    """Predictions with the central intervals of CV+, the jackknife+ or the jackknife+-after-bootstrap.

    Some of the models were fitted without calibration row i. This row has an error R_i of these models. Their average
    prediction of a new row x is the center c_i(x) = sum_k predictions_k(x) weights_ki. The 2 L values c_i(x) -+ R_i are
    equally likely. With stds, they are c_i(x) -+ s_i(x) R_i, where s_i(x) is the average of the models' stds. Mean,
    std, cdf, score and samples belong to this table.

    `functional.quantiles.jackknife_plus_quantile` computes the quantiles. Below the median it reads the values
    c_i - R_i, and above the median the values c_i + R_i, at ranks that guarantee a coverage. So `icdf` is not exactly
    the inverse of `cdf`. Quantiles are rounded away from the median. A value within rounding of y counts as equal to y
    (`functional.rounding`).

    Rows are computed in batches, so that no [n, L] array is made where n and L are large.

    Args:
        predictions: [n, K] the predictions of K models.
        weights: [K, L] the weights of the models that were fitted without each calibration row; not negative, with
            sum 1 for each row.
        errors: [L] the absolute errors of the calibration rows, in units of `stds` if `stds` are given. If errors are
            infinite, quantiles can be infinite, too. Mean, std, score and samples replace an infinite error by the
            largest finite error.
        stds: [n, K] the models' stds; None for errors on the scale of y.

    Raises:
        ValueError: if an argument is empty, not finite, negative or of the wrong shape, or weights do not sum to 1.

    Source: Barber, Candes, Ramdas and Tibshirani, Annals of Statistics 49 (2021); Kim, Xu and Barber, NeurIPS 2020.

    Example:
        >>> weights = jnp.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])  # two folds of two rows
        >>> distribution = CrossConformal(jnp.array([[0.0, 1.0]]), weights, jnp.array([1.0, 2.0, 3.0, 4.0]))
        >>> lower, upper = distribution.interval(0.6)  # the second smallest and the third largest of four
        >>> print(lower.round(2), upper.round(2))
        [-2.] [4.]
    """

    predictions: Float[Array, "*n_k"]
    weights: Float[Array, "*k_l"]
    errors: Float[Array, "*l"]
    stds: Float[Array, "*n_k"] | None
    _shared: ClassVar = {"weights": 2, "errors": 1}
    has_density = is_continuous = False

    def __init__(self, predictions: Values, weights: Values, errors: Values, stds: Values | None = None):
        self.predictions = _checks.as_matrix("predictions", predictions)
        dtype, (rows, models) = self.predictions.dtype, self.predictions.shape
        self.errors = as_parameter(as_table("errors", errors), dtype)
        self.weights = as_parameter(_checks.as_matrix("weights", weights, length=models), dtype)
        _checks.check_columns("weights", self.weights, self.errors.shape[0], "the errors are")
        self.stds = None if stds is None else as_parameter(_checks.as_matrix("stds", stds, length=rows), dtype)
        if self.stds is not None:
            _checks.check_columns("stds", self.stds, models, "predictions has")
            _checks.check_not_negative("stds", self.stds)
        _checks.check_not_negative("errors", self.errors)
        _checks.check_not_negative("weights", self.weights)
        _check_sums("weights", self.weights)

    @property
    def reach(self) -> Reach:
        """The levels that the ranks of the calibration rows reach."""
        return Reach.of_rows(self.errors.shape[-1], central=True)

    @property
    def _in_numpy(self) -> bool:
        return self.predictions.ndim == 2

    @property
    @numpy_or_jit(when=numpy_knows)
    def mean(self) -> Float[AnyArray, "*n"]:
        """The mean of the centers."""
        return _dot(self.predictions, self.weights.mean(-1)[..., None])[..., 0]

    @property
    @numpy_or_jit(when=numpy_knows)
    def std(self) -> Float[AnyArray, "*n"]:
        """The std of the table."""

        def std(row: _Row) -> AnyArray:
            deviations = row.centers - row.centers.mean()
            unit = linalg.scale_of(deviations, row.widths)
            # The mean of (d +- w)^2 over both signs is d^2 + w^2.
            return unit * linalg.sqrt(((deviations / unit) ** 2 + (row.widths / unit) ** 2).mean())

        return self._each_row(std)

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """The fraction of the table's values that are at most y, up to rounding."""

        def fraction(row: _Row, y: AnyArray) -> AnyArray:
            xp = namespace(row.margins)
            upper = xp.where(xp.isinf(row.margins), np.inf, row.centers + row.widths - row.margins)
            table = xp.concatenate([row.centers - row.widths - row.margins, upper])
            return xp.mean(table <= y, dtype=y.dtype)

        return self._each_row(fraction, match(y, self.mean))

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """-inf everywhere, because a distribution of atoms has no density."""
        rows = match(y, self.mean)
        return namespace(rows).full_like(rows, -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """`functional.scores.empirical_crps` of the table."""
        crps = lambda row, y: scores.empirical_crps(y, namespace(row.centers).sort(row.table))
        return self._each_row(crps, match(y, self.mean))

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[AnyArray, "*n"], Float[AnyArray, "*n"]]:
        """The ends (lower, upper) of the central interval, which has the coverage of `guarantee`.

        The ends are the quantiles at (1 -+ confidence_level) / 2. Let a = 1 - confidence_level. The lower end is the
        floor(a (L + 1))-th smallest center minus error. The upper end is the ceil((1 - a) (L + 1))-th smallest center
        plus error. If the median of the centers lies outside, it replaces an end.
        """
        confidence_level = _checks.as_fraction("confidence_level", confidence_level)
        level = (1 + confidence_level) / 2
        ends = self._both(jnp.asarray([(1 - confidence_level) / 2, level]))
        self._warn_of_levels(level, ends[1])
        return ends

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[AnyArray, "..."]:
        """Values drawn from the table."""
        _checks.check_key(key)
        rows = self.mean.shape
        drawn = jax.random.randint(key, (*rows, math.prod(shape)), 0, 2 * self.errors.shape[-1])
        values = self._each_row(lambda row, index: row.table[index], drawn)
        return jnp.moveaxis(values, -1, 0).reshape(shape + rows)

    @numpy_or_jit(when=numpy_knows)
    def _both(self, levels: Float[AnyArray, " 2"]) -> tuple[Float[AnyArray, "*n"], Float[AnyArray, "*n"]]:
        """The quantiles at two levels. A row is sorted once for both."""
        ends = self._quantiles(levels)
        return ends[..., 0], ends[..., 1]

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        return self._each_row(lambda row: row.quantile(levels))

    @numpy_or_jit(when=numpy_knows)
    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The quantile of the jackknife+, rounded away from the median."""
        return self._each_row(lambda row, p: row.quantile(p), p)

    def _each_row(self, function: Callable[..., AnyArray], *values: AnyArray) -> AnyArray:
        """Apply a function of a row's table and of its values to every row."""
        if self.predictions.ndim > 2:  # there are leading axes, of runs
            return jax.vmap(lambda run, *values: run._each_row(function, *values))(self, *values)
        xp = namespace(self.predictions)
        # An average of m values is rounded m - 1 times, in another order than in the computation of the errors.
        roundings = ((self.weights != 0).sum(axis=0) + 3).astype(self.weights.dtype) / 4

        def row(inputs: tuple[AnyArray, AnyArray | None, tuple[AnyArray, ...]]) -> AnyArray:
            predictions, stds, values = inputs
            centers = _dot(predictions, self.weights)
            scales = xp.ones_like(centers) if stds is None else _dot(stds, self.weights)
            widths = linalg.finite_part(self.errors) * scales
            margins = rounding.tolerance(roundings * xp.abs(predictions).max(), roundings * widths)
            margins = xp.where(xp.isinf(self.errors), np.inf, margins)
            return function(_Row(centers, widths, margins), *values)

        if xp is np:
            return over_leading_axis(row, (self.predictions, self.stds, values))
        at_once = max(1, _CENTERS_AT_ONCE // self.errors.shape[0])
        return lax.map(row, (self.predictions, self.stds, values), batch_size=at_once)


class _Row(NamedTuple):
    """The parts of one row's prediction.

    Attributes:
        centers: the average predictions of the models that were fitted without each calibration row [L].
        widths: the errors of the calibration rows, times the average stds of these models [L].
        margins: the largest rounding error of a center plus a width [L]; infinite where an error is infinite.
    """

    centers: Float[AnyArray, " l"]
    widths: Float[AnyArray, " l"]
    margins: Float[AnyArray, " l"]

    @property
    def table(self) -> Float[AnyArray, " m"]:
        """The values that are equally likely, in any order."""
        return namespace(self.centers).concatenate([self.centers - self.widths, self.centers + self.widths])

    def quantile(self, p: Float[AnyArray, "*k"]) -> Float[AnyArray, "*k"]:
        """The quantile of the jackknife+, rounded away from the median."""
        return quantiles.jackknife_plus_quantile(self.centers, self.widths + self.margins, p)


def _dot(a: Float[AnyArray, "..."], b: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """The product of matrices in the full precision of their dtype. By default a GPU uses a lower precision."""
    return a @ b if namespace(a, b) is np else jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _check_sums(name: str, weights: Float[AnyArray, "k l"]) -> None:
    """Raise ValueError unless known weights sum to 1 in every column."""
    if _checks.is_traced(weights):
        return
    sums = np.asarray(weights).sum(axis=0)
    wrong = np.flatnonzero(~(np.abs(sums - 1) < 1e-3))
    if wrong.size:
        raise ValueError(f"{name} must sum to 1 in every column; got {sums[wrong[0]]:g} in column {wrong[0]}.")
