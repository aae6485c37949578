"""Adaptive conformal inference, ACI: the level of the interval rises after a miss and falls a little after a hit.

The interval of row t holds every y whose score is at most the last W scores' conformal quantile at level 1 - a_t. After
the row, `a_{t+1} = a_t + gamma (a - err_t)` (Gibbs and Candès 2021, eq. 2). Here a is 1 - confidence_level, and err_t
is 1 if the interval missed, else 0. The score of every new row replaces the oldest of the W scores.

The best gamma depends on how fast the distribution of the scores changes. DtACI keeps one level for each of several
gammas and takes their weighted mean. The weights fall with the pinball losses of the levels (Gibbs and Candès 2024).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxcal import _checks, _programs
from jaxcal.distributions import Distribution
from jaxcal.functional import quantiles, scores, tracking
from jaxcal.online._base import OnlineIntervals, as_array, calibration_scores, pushed

# The step sizes of the paper's experiments.
_STEP_SIZES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)


def init(
    base: Distribution,
    y: ArrayLike,
    *,
    confidence_level: ArrayLike = 0.9,
    step_size: ArrayLike = 0.005,
    score: str | None = None,
    window: int | None = None,
) -> "AdaptiveIntervals":
    """The state of ACI after calibration rows, which must not be rows that the model was trained on.

    The fraction of misses in every sequence of T rows differs from a = 1 - confidence_level by at most `(max(a, 1 - a)
    + gamma) / (gamma T)`. This holds without any assumption. If the rows are exchangeable, each interval has about the
    coverage of split conformal prediction, and gamma makes it vary a little.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`.

    Args:
        base: the model's predictions of the calibration rows, [L].
        y: their targets [L], in the order of time.
        confidence_level: the coverage of the intervals in the long run, in (0, 1).
        step_size: gamma, positive. With a larger gamma the intervals follow a change faster, and vary more.
        score: "absolute", |y - mean|, or "scaled", |y - mean| / std; None for "scaled" if the base has a std.
        window: W, how many of the last scores are kept; None for all L. New scores replace the oldest.

    Returns:
        a state for `jaxcal.online.step` and `jaxcal.online.run`.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite, of the wrong shape or length; if an option is not allowed.

    Source: Gibbs and Candès, Adaptive conformal inference under distribution shift, NeurIPS 2021, eq. 2 and
    proposition 4.1.

    Example:
        >>> import jax.numpy as jnp, jaxcal as jc
        >>> state = init(jc.Point(jnp.zeros(99)), jnp.arange(1.0, 100.0), confidence_level=0.9)
        >>> print(*(end.round(2) for end in state.interval(jc.Point(1000.0))))
        [910.] [1090.]
    """
    confidence_level = _checks.as_fraction("confidence_level", confidence_level)
    if np.ndim(step_size):
        raise ValueError(
            f"step_size must be one number; got shape {np.shape(step_size)}: init_aggregated takes several."
        )
    _checks.check_positive("step_size", step_size)
    recent, scaled = calibration_scores(base, y, score, window)
    level, step = (as_array(option, recent.dtype) for option in (confidence_level, step_size))
    return _adaptive(recent, level, step, scaled)


def init_aggregated(
    base: Distribution,
    y: ArrayLike,
    *,
    confidence_level: ArrayLike = 0.9,
    step_sizes: ArrayLike | Sequence[float] = _STEP_SIZES,
    horizon: int = 500,
    score: str | None = None,
    window: int | None = None,
) -> "AggregatedIntervals":
    """The state of DtACI after calibration rows, which must not be rows that the model was trained on.

    Each step size has the bound of `init`. Their weighted mean has no bound that holds for every sequence. The paper
    bounds its regret against the best level of any `horizon` rows in succession.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`.

    Args:
        base: the model's predictions of the calibration rows, [L].
        y: their targets [L], in the order of time.
        confidence_level: the coverage of the intervals in the long run, in (0, 1).
        step_sizes: gamma of every expert [k], positive.
        horizon: the number of rows over which the weights of the step sizes should be good.
        score: as of `init`.
        window: as of `init`.

    Returns:
        a state for `jaxcal.online.step` and `jaxcal.online.run`.

    Raises:
        TypeError, ValueError: as `init` does.

    Source: Gibbs and Candès, Conformal inference for online prediction with arbitrary distribution shifts, JMLR 25
    (2024), Algorithm 1. The mean of the levels replaces a level drawn at random.

    Example:
        >>> import jax.numpy as jnp, jaxcal as jc
        >>> state = init_aggregated(jc.Point(jnp.zeros(99)), jnp.arange(1.0, 100.0), confidence_level=0.9)
        >>> print(*(end.round(2) for end in state.interval(jc.Point(1000.0))))
        [910.] [1090.]
    """
    confidence_level = _checks.as_fraction("confidence_level", confidence_level)
    step_sizes = _checks.as_vector("step_sizes", step_sizes)
    _checks.check_positive("step_sizes", step_sizes)
    _checks.check_at_least("horizon", horizon, 1)
    recent, scaled = calibration_scores(base, y, score, window)
    level, steps = (as_array(option, recent.dtype) for option in (confidence_level, step_sizes))
    return _aggregated(recent, level, steps, horizon, scaled)


class _RankedIntervals(OnlineIntervals):
    """Intervals by a quantile of the last scores, which are also kept in increasing order."""

    recent: Float[Array, "*w"]
    table: Float[Array, "*w"]
    confidence_level: Float[Array, "*runs"]
    scaled: bool = eqx.field(static=True)

    def _after(self, score: Float[Array, ""], **moved: Float[Array, "..."]) -> Any:
        """This state with the oldest score replaced, and with the moved fields."""
        table = quantiles.replace_in_sorted(self.table, self.recent[0], score)
        return replace(self, recent=pushed(self.recent, score), table=table, **moved)


class AdaptiveIntervals(_RankedIntervals):
    """The state of ACI; made by `init`.

    Attributes:
        recent: the scores of the last W rows [W], the oldest first.
        table: the same in increasing order.
        alpha: 1 - the level of the next interval. At 0 and below the interval is infinite, at 1 and above it is empty.
        confidence_level: the coverage in the long run.
        step_size: gamma.
        scaled: whether scores are |y - mean| / std, or |y - mean|.
    """

    alpha: Float[Array, "*runs"]
    step_size: Float[Array, "*runs"]

    def threshold(self) -> Float[Array, ""]:
        """The conformal quantile of the scores at level 1 - alpha."""
        return quantiles.empirical_quantile(self.table, 1 - self.alpha, "conformal")

    def updated(self, score: Float[Array, ""], missed: Bool[Array, ""]) -> "AdaptiveIntervals":
        """The state after a row: alpha moves by gamma (1 - confidence_level - missed); a score is replaced."""
        error = 1 - self.confidence_level - missed.astype(self.alpha.dtype)
        return self._after(score, alpha=self.alpha + self.step_size * error)


class AggregatedIntervals(_RankedIntervals):
    """The state of DtACI; made by `init_aggregated`.

    Attributes:
        recent: the scores of the last W rows [W], the oldest first.
        table: the same in increasing order.
        alphas: the alpha of every step size [k], as in `AdaptiveIntervals`.
        weights: the weight of every step size [k], with sum 1.
        confidence_level: the coverage in the long run.
        step_sizes: gammas [k].
        eta: the learning rate of the weights.
        sigma: the fraction of the weights that is shared at each step.
        scaled: whether scores are |y - mean| / std, or |y - mean|.
    """

    alphas: Float[Array, "*k"]
    weights: Float[Array, "*k"]
    step_sizes: Float[Array, "*k"]
    eta: Float[Array, "*runs"]
    sigma: Float[Array, "*runs"]

    @property
    def alpha(self) -> Float[Array, ""]:
        """1 - the level of the next interval: the weighted mean of the alphas."""
        return jnp.sum(self.weights * self.alphas)

    def threshold(self) -> Float[Array, ""]:
        """The conformal quantile of the scores at level 1 - alpha."""
        return quantiles.empirical_quantile(self.table, 1 - self.alpha, "conformal")

    def updated(self, score: Float[Array, ""], missed: Bool[Array, ""]) -> "AggregatedIntervals":
        """The state after a row: every alpha moves by its own miss, and the weights by the losses of the alphas.

        The oldest score is replaced. The loss of an alpha is the pinball loss at beta, the largest alpha whose interval
        would have held y.
        """
        size, target = self.table.shape[0], 1 - self.confidence_level
        smaller = jnp.sum(self.table < score)
        # beta = 1 - #{s < score} / (W + 1)
        beta = 1 - smaller.astype(score.dtype) / (size + 1)
        misses = smaller >= quantiles.empirical_rank(1 - self.alphas, size, "conformal")
        losses = scores.pinball(beta, self.alphas, target)
        # a <- a + gamma (target - err), for each gamma
        alphas = self.alphas + self.step_sizes * (target - misses.astype(score.dtype))
        return self._after(
            score, alphas=alphas, weights=tracking.reweighted(self.weights, losses, self.eta, self.sigma)
        )


@_programs.jit
def _adaptive(
    recent: Float[Array, " w"], level: Float[Array, ""], step_size: Float[Array, ""], scaled: bool
) -> AdaptiveIntervals:
    return AdaptiveIntervals(
        recent=recent,
        table=jnp.sort(recent),
        alpha=1 - level,
        confidence_level=level,
        step_size=step_size,
        scaled=scaled,
    )


@_programs.jit
def _aggregated(
    recent: Float[Array, " w"], level: Float[Array, ""], step_sizes: Float[Array, " k"], horizon: int, scaled: bool
) -> AggregatedIntervals:
    eta, sigma = tracking.aggregation_rates(level, step_sizes.shape[0], horizon)
    return AggregatedIntervals(
        recent=recent,
        table=jnp.sort(recent),
        alphas=jnp.full_like(step_sizes, 1 - level),
        weights=jnp.full_like(step_sizes, 1 / step_sizes.shape[0]),
        confidence_level=level,
        step_sizes=step_sizes,
        eta=eta,
        sigma=jnp.asarray(sigma, recent.dtype),
        scaled=scaled,
    )
