"""A std that holds on new rows: its scale and its floor are those of rows that nothing was trained on.

A network's std is learned from residuals of rows that its mean was trained on, which are smaller than those of new
rows. The rows of the validation set tell by how much.
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

# What is added to every variance is one of these, times their mean.
_FLOORS = np.concatenate([[0.0], np.geomspace(1e-4, 1e2, 49)])
# The level of the intervals that should hold as many rows as they say, and the normal quantile at their upper end.
_LEVEL, _REACH = 0.9, NormalDist().inv_cdf(0.95)
# Few rows say little: so many more, of the mean variance, are taken to lie as they should, at these quantiles of a
# normal distribution.
_PRIOR_ERRORS = np.array([NormalDist().inv_cdf(level) for level in (0.55, 0.65, 0.75, 0.85, 0.95)])
_PRIOR_ROWS = len(_PRIOR_ERRORS)
# How many times the variance a squared error may be before it says that something was predicted as too certain.
_STRIKING = 30.0
# How far the interval's scale may lie from that of the likelihood.
_MOST = 2.0
# Enough steps to the scale of a Student t likelihood.
_STEPS = 30


def _is_normal(*_: Any, df: Any = None, **__: Any) -> bool:
    """Whether errors are normal: NumPy has no quantiles of others."""
    return df is None


class Widening(eqx.Module):
    """What makes a variance v that of new rows: factor (max(v, least) + floor).

    Attributes:
        factor: of the variance.
        floor: what is added before.
        least: the least variance of the held-out rows. Far from all rows networks may predict any; no row bears out a
            smaller one.
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
        """That of held-out rows.

        For every floor of a grid, from none to many times the mean variance, the factor is that of the greatest
        likelihood, of normal errors or, with df, of Student t ones; the floor is that of the greatest of these. Among
        the rows is one more, which has the least variance and an error of the usual size, where that is striking: what
        is predicted as all but certain may be wrong. With this floor the factor is the geometric mean of the
        likelihood's and of the one by which the 90 % intervals hold 90 % of the rows: the first alone is too large
        where errors have heavy tails, the second alone ignores them.

        Args:
            variance: v, of the rows; with df the square of the scale.
            errors: of the means.
            df: degrees of freedom of the rows.
            weights: how much each row counts; one each where None. The least variance is that of rows that count
                one or more, 0 where there are none.
        """
        xp = namespace(errors)
        counts: AnyArray = xp.ones_like(errors) if weights is None else weights.astype(errors.dtype)
        rows = _Rows(variance, errors, df, counts, xp.average(variance, weights=counts))
        floors = xp.asarray(_FLOORS, errors.dtype) * rows.usual
        all_rows = rows.and_a_bad_one()
        factors, heights = scan(lambda _, floor: (None, _likeliest(all_rows, floor)), None, floors)[1]
        best = xp.argmax(heights)
        factor, floor = factors[best], floors[best]
        by_intervals = xp.clip(_ratio_of_intervals(rows, factor, floor), 1 / _MOST, _MOST)
        least = xp.min(xp.where(counts >= 1, variance, np.inf))
        factor = (factor * by_intervals).astype(errors.dtype)  # NumPy interpolates in float64
        return cls(factor, floor, xp.where(xp.isfinite(least), least, 0).astype(errors.dtype))

    @classmethod
    def of_mixture(
        cls, means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"], targets: Float[AnyArray, " n"]
    ) -> "Widening":
        """That of a mixture with equal weights as a whole, by held-out rows."""
        mean, variance = mixture_moments(means, variances)
        return cls.of(variance, targets - mean)

    def __call__(self, variance: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The variance of new rows."""
        return self.factor * (namespace(variance).maximum(variance, self.least) + self.floor)

    def of_members(
        self, means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"]
    ) -> tuple[Float[AnyArray, "m n"], Float[AnyArray, "m n"]]:
        """The means and the variances of a mixture's members, so that the mixture has the variance of new rows.

        Its mean stays, and the members' distances from it grow, too.
        """
        mean, variance = mixture_moments(means, variances)
        xp = namespace(variance)
        lacking = xp.maximum(self.least - variance, 0)
        moved = mean[None] + xp.sqrt(self.factor) * (means - mean[None])
        return moved, self.factor * (variances + (lacking + self.floor)[None])


def widened(variance: Float[AnyArray, "*n"], widening: Widening | None) -> Float[AnyArray, "*n"]:
    """The variance of new rows; as it is where there is no widening."""
    return variance if widening is None else widening(variance)


def mixture_moments(
    means: Float[AnyArray, "m n"], variances: Float[AnyArray, "m n"]
) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"]]:
    """The mean and the variance of a mixture with equal weights."""
    return means.mean(axis=0), variances.mean(axis=0) + means.var(axis=0)


class _Rows(NamedTuple):
    """Held-out rows, and the mean of their variances, which is that of the prior's rows."""

    variance: Float[AnyArray, " n"]
    errors: Float[AnyArray, " n"]
    df: Float[AnyArray, " n"] | None
    weights: Float[AnyArray, " n"]
    usual: Float[AnyArray, ""]

    @property
    def number(self) -> Float[AnyArray, ""]:
        """How many rows there are."""
        return self.weights.sum()

    def and_a_bad_one(self) -> "_Rows":
        """These, and one with the least variance whose error is usual among all, as far as it is striking there."""
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


def _likeliest(rows: _Rows, floor: Float[AnyArray, ""]) -> tuple[Float[AnyArray, ""], Float[AnyArray, ""]]:
    """The factor of the greatest likelihood, with the prior's rows, and the log of it."""
    variance, usual = rows.variance + floor, rows.usual + floor
    xp, squares, df = namespace(variance), rows.errors**2 / variance, rows.df

    def step(factor: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        precision = 1.0 if df is None else (df + 1) / (df + squares / factor)
        total = xp.sum(rows.weights * precision * squares)
        return (_PRIOR_ROWS * rows.usual / usual + total) / (_PRIOR_ROWS + rows.number)

    factor = step(xp.ones_like(floor))
    if df is not None:
        factor = lax.fori_loop(0, _STEPS, lambda _, factor: step(factor), carried(factor))
    costs = squares / factor if df is None else (df + 1) * jnp.log1p(squares / factor / df)
    cost = xp.sum(rows.weights * (xp.log(factor * variance) + costs))
    return factor, -cost - _PRIOR_ROWS * (xp.log(factor * usual) + rows.usual / (factor * usual))


def _ratio_of_intervals(rows: _Rows, factor: Float[AnyArray, ""], floor: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
    """How many times as wide the intervals must be to hold as many rows, the prior's among them, as they say."""
    xp, df = namespace(rows.variance), rows.df
    widths = xp.sqrt(factor * (rows.variance + floor))
    reach = _REACH if df is None else student_t.icdf(jnp.full_like(df, (1 + _LEVEL) / 2), df)
    ratios = xp.where(rows.weights > 0, abs(rows.errors) / (reach * widths), np.inf)
    prior = xp.asarray(_PRIOR_ERRORS / _REACH, ratios.dtype) * xp.sqrt(rows.usual / (factor * (rows.usual + floor)))
    ratios, weights = (xp.concatenate(parts) for parts in ((ratios, prior), (rows.weights, xp.ones_like(prior))))
    order = xp.argsort(ratios)
    # Of equal weights the j-th smallest has the place j, from 0 on.
    places = xp.cumsum(weights[order]) - (weights[order] + 1) / 2
    return xp.interp(_LEVEL * (rows.number + _PRIOR_ROWS - 1), places, ratios[order])
