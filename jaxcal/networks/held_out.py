"""A std that is right for new rows: rows that nothing was trained on decide its scale and its floor.

A network learns its std from residuals of rows that its mean was trained on. These residuals are smaller than the
residuals of new rows. The rows of the validation set show by how much.
"""

from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.functional import linalg, student_t
from jaxcal.functional._loops import carried, scan

# The floor, which is added to every variance, is one of these factors times the mean variance.
_FLOORS = np.concatenate([[0.0], np.geomspace(1e-4, 1e2, 49)])
# The level of the intervals whose coverage is corrected, and the normal quantile at their upper end.
_LEVEL, _REACH = 0.9, NormalDist().inv_cdf(0.95)
# Few rows say little. So prior rows are added: they have the mean variance, and their standardized errors are these
# quantiles of a normal distribution.
_PRIOR_ERRORS = np.array([NormalDist().inv_cdf(level) for level in (0.55, 0.65, 0.75, 0.85, 0.95)])
_PRIOR_ROWS = len(_PRIOR_ERRORS)
# A squared error of more than this many times the variance shows that a prediction was too certain.
_STRIKING = 30.0
# The std by the intervals lies within this factor of the std by the likelihood.
_MOST = 2.0
# The number of EM steps for the scale of a Student t likelihood: they are enough.
_STEPS = 30


def _is_normal(*_: Any, df: Any = None, **__: Any) -> bool:
    """Whether errors are normal: NumPy has no quantiles of other distributions."""
    return df is None


class Widening(eqx.Module):
    """The correction of a network's variance v to the variance of new rows: factor (max(v, least) + floor).

    Attributes:
        factor: multiplies the variance.
        floor: is added to the variance before it is multiplied.
        least: the least variance of the held-out rows. Far from all rows, networks may predict any variance. No
            held-out row supports a smaller one.
    """

    factor: Float[AnyArray, "*runs"]
    floor: Float[AnyArray, "*runs"]
    least: Float[AnyArray, "*runs"]

    @classmethod
    @partial(numpy_or_jit, when=_is_normal)
    def of(
        cls,
        variance: Float[AnyArray, " n"],
        errors: Float[AnyArray, " n"],
        *,
        df: Float[AnyArray, " n"] | None = None,
        weights: Float[AnyArray, " n"] | None = None,
    ) -> "Widening":
        """The widening that held-out rows ask for.

        For every floor of a grid, from zero to many times the mean variance, the factor maximizes the likelihood of the
        errors. The errors are normal or, with df, Student t. The floor with the greatest likelihood is taken.

        The likelihood contains one more row, which has the least variance. Its squared error is the mean squared error
        minus 30 times the least variance, but at least 0. It guards against predictions that are nearly certain and
        wrong.

        The final factor is the geometric mean of two factors at this floor. One factor maximizes the likelihood. With
        the other, the 90 % intervals hold 90 % of the rows. The factor of the likelihood is too large where errors have
        heavy tails, and the factor of the intervals ignores the tails.

        Args:
            variance: v of the rows; with df, the square of their scale.
            errors: the targets minus the predicted means.
            df: degrees of freedom of the rows; None for normal errors.
            weights: how much each row counts; None counts each as one. The least variance is the minimum over rows that
                count one or more, or 0 where there are none.
        """
        xp = namespace(errors)
        counts: AnyArray = xp.ones_like(errors) if weights is None else weights.astype(errors.dtype)
        rows = _HeldOutRows(variance, errors, df, counts, xp.average(variance, weights=counts))
        floors = xp.asarray(_FLOORS, errors.dtype) * rows.usual
        all_rows = rows.and_a_bad_one()
        factors, heights = scan(lambda _, floor: (None, _likeliest(all_rows, floor)), None, floors)[1]
        best = xp.argmax(heights)
        factor, floor = factors[best], floors[best]
        interval_ratio = xp.clip(_ratio_of_intervals(rows, factor, floor), 1 / _MOST, _MOST)
        least = xp.min(xp.where(counts >= 1, variance, np.inf))
        factor = (factor * interval_ratio).astype(errors.dtype)  # NumPy interpolates in float64
        return cls(factor, floor, xp.where(xp.isfinite(least), least, 0).astype(errors.dtype))

    @classmethod
    def of_mixture(
        cls, means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"], targets: Float[AnyArray, " n"]
    ) -> "Widening":
        """The widening of a mixture with equal weights as a whole, by held-out rows."""
        mean, variance = mixture_moments(means, variances)
        return cls.of(variance, targets - mean)

    def __call__(self, variance: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The variance of new rows."""
        return self.factor * (namespace(variance).maximum(variance, self.least) + self.floor)

    def of_members(
        self, means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"]
    ) -> tuple[Float[AnyArray, "m n"], Float[AnyArray, "m n"]]:
        """The members' means and variances, changed so that the mixture has the variance of new rows.

        The mean of the mixture stays the same. The members' distances from it are multiplied by sqrt(factor).
        """
        mean, variance = mixture_moments(means, variances)
        xp = namespace(variance)
        # m and v are the mixture's mean and variance: m_i -> m + sqrt(factor) (m_i - m), and v_i -> factor (v_i +
        # max(least - v, 0) + floor). Then v becomes factor (max(v, least) + floor).
        lacking = xp.maximum(self.least - variance, 0)
        moved = mean[None] + xp.sqrt(self.factor) * (means - mean[None])
        return moved, self.factor * (variances + (lacking + self.floor)[None])


def widened(variance: Float[AnyArray, "*n"], widening: Widening | None) -> Float[AnyArray, "*n"]:
    """The variance of new rows; unchanged where there is no widening."""
    return variance if widening is None else widening(variance)


def mixture_moments(
    means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"]
) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
    """The mean and the variance of a mixture with equal weights."""
    # v = avg(v_i) + avg((m_i - m)^2)
    return means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0)


class _HeldOutRows(NamedTuple):
    """Held-out rows, and the mean of their variances, `usual`, which the prior rows have."""

    variance: Float[AnyArray, " n"]
    errors: Float[AnyArray, " n"]
    df: Float[AnyArray, " n"] | None
    weights: Float[AnyArray, " n"]
    usual: Float[AnyArray, ""]

    @property
    def number(self) -> Float[AnyArray, ""]:
        """How many rows there are."""
        return self.weights.sum()

    def and_a_bad_one(self) -> "_HeldOutRows":
        """These rows, and one with the least variance v and the squared error max(mean squared error - 30 v, 0)."""
        xp = namespace(self.errors)
        least = xp.argmin(xp.where(self.weights > 0, self.variance, np.inf))
        usual = xp.average(self.errors**2, weights=self.weights)
        bad = self._replace(
            variance=self.variance[least],
            errors=linalg.sqrt(xp.maximum(usual - _STRIKING * self.variance[least], 0)),
            df=None if self.df is None else self.df[least],
            weights=xp.ones((), self.weights.dtype),
            usual=None,
        )
        longer = jax.tree.map(lambda row, rows: xp.append(rows, row), bad, self._replace(usual=None))
        return longer._replace(usual=self.usual)


def _likeliest(rows: _HeldOutRows, floor: Float[AnyArray, ""]) -> tuple[Float[AnyArray, ""], Float[AnyArray, ""]]:
    """The factor of the greatest likelihood, prior rows included, and twice its log likelihood up to a constant."""
    variance, usual = rows.variance + floor, rows.usual + floor
    xp, squares, df = namespace(variance), rows.errors**2 / variance, rows.df

    def step(factor: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        # Normal errors: factor = mean(e^2 / v). Student t errors, a step of EM: factor' = mean(w e^2 / v), w = (df + 1)
        # / (df + e^2 / (factor v)).
        precision = 1.0 if df is None else (df + 1) / (df + squares / factor)
        total = xp.sum(rows.weights * precision * squares)
        return (_PRIOR_ROWS * rows.usual / usual + total) / (_PRIOR_ROWS + rows.number)

    factor = step(xp.ones_like(floor))
    if df is not None:
        factor = lax.fori_loop(0, _STEPS, lambda _, factor: step(factor), carried(factor))
    costs = squares / factor if df is None else (df + 1) * jnp.log1p(squares / factor / df)
    cost = xp.sum(rows.weights * (xp.log(factor * variance) + costs))
    return factor, -cost - _PRIOR_ROWS * (xp.log(factor * usual) + rows.usual / (factor * usual))


def _ratio_of_intervals(
    rows: _HeldOutRows, factor: Float[AnyArray, ""], floor: Float[AnyArray, ""]
) -> Float[AnyArray, ""]:
    """How many times as wide the 90 % intervals must be to hold 90 % of the rows, prior rows included."""
    xp, df = namespace(rows.variance), rows.df
    widths = xp.sqrt(factor * (rows.variance + floor))
    reach = _REACH if df is None else student_t.icdf(jnp.full_like(df, (1 + _LEVEL) / 2), df)
    ratios = xp.where(rows.weights > 0, abs(rows.errors) / (reach * widths), np.inf)
    prior = xp.asarray(_PRIOR_ERRORS / _REACH, ratios.dtype) * xp.sqrt(rows.usual / (factor * (rows.usual + floor)))
    ratios, weights = (xp.concatenate(parts) for parts in ((ratios, prior), (rows.weights, xp.ones_like(prior))))
    order = xp.argsort(ratios)
    # With weights of 1, the j-th smallest ratio has the place j, counted from 0.
    places = xp.cumsum(weights[order]) - (weights[order] + 1) / 2
    return xp.interp(_LEVEL * (rows.number + _PRIOR_ROWS - 1), places, ratios[order])
