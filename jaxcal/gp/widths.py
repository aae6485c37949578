"""Lengthscales for sharp quantiles: those whose quantiles lie closest to the mean, level by level.

Capone, Hirche & Pleiss, "Sharp Calibrated Gaussian Processes", NeurIPS 2023. What is minimized is `log_width`, eq. 7.
From the middle outwards lengthscales do not grow, so that the variance does not fall: Assumption 4.1, which for the
squared-exponential kernel is a theorem, since a shorter kernel is a longer one times one of unit diagonal.

The search goes from the outermost level inwards. Near the middle all lengthscales are as good, and those that are found
there would bind the levels beyond.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal.functional import gp
from jaxcal.functional._loops import carried
from jaxcal.functional.quantiles import linear_quantile
from jaxcal.gp.inference._adam import inverse_softplus
from jaxcal.gp.kernels import SquaredExponential, gram
from jaxcal.optimize import as_constants, lowest, minimize, one_run_at_a_time, over_runs

# Multiples of the regression's inverse lengthscales that are tried: on a line alone, and as initial values of L-BFGS.
_SMALLEST, _LARGEST = 0.1, 10.0
_NUM_ON_LINE, _NUM_STARTS = 42, 9
# How many of the best initial values are improved, by how many steps at most, and the gain of a step, as a fraction of
# the width, that ends it.
_NUM_IMPROVED, _STEPS, _GAIN = 2, 40, 1e-4
# Bounds of the inverse lengthscales, in standard deviations of the inputs: beyond them hardly anything changes.
_LEAST, _GREATEST = math.log(1e-4), math.log(1e2)
# Initial values are at least so far below the level before it: at the bound itself the gradient is 0.
_LEAST_GAP = 1e-3


def log_width(
    variance: Float[Array, " n"], errors: Float[Array, " n"], level: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """log |beta| + log(mean of variance) / 2, beta the quantile of errors / sqrt(variance) at a level.

    Half the log of the mean over the rows of what eq. 7 adds up: how far the quantiles lie from the mean. A factor of
    the variance does not change it. -inf where beta is 0.

    Args:
        variance: of the rows, positive.
        errors: theirs, y - mean.
        level: in (0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(jnp.exp(log_width(jnp.ones(3), jnp.array([-1.0, 2.0, 4.0]), 0.5))), 3)
        2.0
    """
    beta = linear_quantile(jnp.sort(errors / jnp.sqrt(variance)), level)
    return jnp.log(jnp.abs(beta)) + jnp.log(jnp.mean(variance)) / 2


class Problem(NamedTuple):
    """What lengthscales are chosen by.

    Attributes:
        x: inputs that the variance is conditioned on.
        noise_ratio: the variance of the noise, that of the process being 1.
        errors: of the rows at `at`, or, where that is None, of the inputs.
        at: inputs of other rows; None for those of `x`, each by leave-one-out.
    """

    x: Float[Array, "n d"]
    noise_ratio: Float[Array, ""]
    errors: Float[Array, " m"]
    at: Float[Array, "m d"] | None

    def variance(self, log_scale: Float[Array, " d"]) -> Float[Array, " m"]:
        """sigma^2 of the rows (eq. 3b) at inverse lengthscales exp(log_scale)."""
        kernel = SquaredExponential(jnp.zeros_like(self.noise_ratio), -jnp.clip(log_scale, _LEAST, _GREATEST))
        covariance = gram(kernel, self.x, self.noise_ratio)
        if self.at is None:
            return gp.leave_one_out_variance(covariance)
        cross = kernel(self.x, self.at)
        return 1 + self.noise_ratio - gp.explained_variance(covariance, cross)

    def of_some_rows(self, most: int) -> "Problem":
        """The problem of at most so many inputs and so many errors, at equal distances in their order."""
        some = lambda rows: rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)]
        return self._replace(x=some(self.x), errors=some(self.errors), at=None if self.at is None else some(self.at))

    def log_width(self, log_scale: Float[Array, " d"], level: Float[Array, ""]) -> Float[Array, ""]:
        """What is minimized."""
        return log_width(self.variance(log_scale), self.errors, level)


def on_line(problem: Problem, log_scale: Float[Array, " d"], levels: tuple[float, ...]) -> Float[Array, "k d"]:
    """The best common multiples of the inverse lengthscales exp(log_scale), in logs, one for every level.

    The same factorizations serve all levels; the sequences that do not fall outwards with the least sum of log widths,
    of the multiples tried, are exact. Derivatives pass to the lengthscales, but not through the choice.

    Args:
        problem: what they are chosen by.
        log_scale: logs of the regression's inverse lengthscales.
        levels: in increasing order; those below 1/2 are one side, the others the other one.
    """
    multiples = _multiples(_NUM_ON_LINE, log_scale.dtype)
    held, held_scale = as_constants((problem, log_scale))

    def widths_of(multiple):
        variance = held.variance(held_scale + multiple)
        return jax.vmap(lambda level: log_width(variance, held.errors, level))(jnp.asarray(levels, variance.dtype))

    widths = over_runs(widths_of)(multiples).T
    widths = jnp.where(jnp.isnan(widths), jnp.inf, widths)
    below = num_below(levels)
    sides = [widths[:below][::-1], widths[below:]]
    chosen = [_best_path(side) if side.shape[0] else jnp.zeros(0, int) for side in sides]
    best = jnp.concatenate([chosen[0][::-1], chosen[1]])
    return log_scale[None] + multiples[best][:, None]


def by_column(problem: Problem, log_scale: Float[Array, " d"], levels: tuple[float, ...]) -> Float[Array, "k d"]:
    """The best inverse lengthscales, in logs, one a column for every level, by L-BFGS from the best of some multiples.

    Arguments as of `on_line`. Safe under `vmap`: see `optimize.one_run_at_a_time`.
    """
    below, number = num_below(levels), len(levels)
    # Each side from its outermost level inwards.
    order = np.concatenate([np.arange(below), np.arange(below, number)[::-1]])
    is_outermost = np.isin(np.arange(number), [0, below])

    def search(problem, log_scale):
        dtype = log_scale.dtype
        multiples = _multiples(_NUM_STARTS, dtype)[:, None]

        def next_level(bound, given):
            level, is_outermost = given
            bound = jnp.where(is_outermost, jnp.asarray(_GREATEST, dtype), bound)
            tried = jnp.minimum(log_scale[None] + multiples, bound[None])
            widths = over_runs(lambda initial: problem.log_width(initial, level))(tried)
            best = jnp.argsort(jnp.where(jnp.isnan(widths), jnp.inf, widths))[:_NUM_IMPROVED]
            found = _improved(problem, tried[best], bound, level)
            return found, found

        given = jnp.asarray(np.array(levels)[order], dtype), jnp.asarray(is_outermost)
        found = lax.scan(next_level, carried(log_scale), given)[1]
        return found[np.argsort(order)]

    return one_run_at_a_time(search)(problem, log_scale)


def num_below(levels: tuple[float, ...]) -> int:
    """How many of the levels, in increasing order, lie below 1/2."""
    return sum(level < 0.5 for level in levels)


def _improved(problem: Problem, initial: Float[Array, "s d"], bound: Float[Array, " d"], level) -> Float[Array, " d"]:
    """The best of the minima that L-BFGS reaches from some initial values, below a bound."""
    # Remark 5.3 has the log of the distance from the bound; its softplus is not as flat far from it.
    place = lambda gap: jnp.clip(bound - jax.nn.softplus(gap), _LEAST, _GREATEST)

    def improve(one):
        gap = inverse_softplus(jnp.maximum(bound - one, _LEAST_GAP))
        loss = lambda gap: problem.log_width(place(gap), level)
        return minimize(loss, gap, max_iterations=_STEPS, gain_tolerance=_GAIN)

    return place(lowest(over_runs(improve)(initial)).params)


def _multiples(number: int, dtype) -> Float[Array, " s"]:
    """Logs of multiples, in increasing order."""
    return jnp.log(jnp.geomspace(_SMALLEST, _LARGEST, number, dtype=dtype))


def _best_path(costs: Float[Array, "k s"]) -> Int[Array, " k"]:
    """The places p[0] <= p[1] <= ... of the least sum of costs[i, p[i]], by dynamic programming."""
    places = jnp.arange(costs.shape[1])

    def forwards(total, cost):
        """The least total up to every place, and where it was."""
        least = lax.cummin(total)
        return cost + least, lax.cummax(jnp.where(total == least, places, 0))

    total, came_from = lax.scan(forwards, jnp.zeros_like(costs[0]), costs)

    def backwards(place, came_from):
        return came_from[place], place

    # What came before the first cost is of no account.
    return lax.scan(backwards, jnp.argmin(total), came_from, reverse=True)[1]
