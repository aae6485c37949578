"""Conformal PID control: the misses so far control the threshold of the scores itself.

The interval of row t holds every y whose score is at most s_t = q_t + r_t(x_t) + g_t:

- P, quantile tracking: `q_{t+1} = q_t + eta_t (err_t - a)`, with a = 1 - confidence_level. Here err_t is 1 for a miss,
  else 0, and eta_t is a fraction of the largest of the last W scores.
- I, error integration: x_t is the number of misses less a t, and r_t is `functional.tracking.saturated_integral`. With
  too many misses r_t is infinite, and with too few it is -infinite.
- D, scorecasting: g_t is a forecast of the score from the last W scores, by a function that the user gives.

Source: Angelopoulos, Candès and Tibshirani, Conformal PID control for time series prediction, NeurIPS 2023.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jaxcal import _checks, _programs
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg, quantiles, tracking
from jaxcal.online._base import OnlineIntervals, as_array, calibration_scores, pushed


def init(
    base: Distribution,
    y: ArrayLike,
    *,
    confidence_level: ArrayLike = 0.9,
    learning_rate: ArrayLike = 0.1,
    gain: ArrayLike | None = None,
    saturation: ArrayLike = 2 / math.pi,
    scorecaster: Callable[[Float[Array, " w"]], Float[Array, ""]] | None = None,
    score: str | None = None,
    window: int | None = None,
) -> "ControlledIntervals":
    """The state of conformal PID control after calibration rows, which must not be rows that the model was trained on.

    The number of misses in every sequence of T >= 3 rows differs from (1 - confidence_level) T by at most `C (pi / 2)
    (T + 1) / log(T + 1) + 1`. Here C is the saturation. This holds without any assumption, and for every P and D.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`.

    Args:
        base: the model's predictions of the calibration rows, [L].
        y: their targets [L], in the order of time.
        confidence_level: the coverage of the intervals in the long run, in (0, 1).
        learning_rate: eta_t as a fraction of the largest of the last W scores, positive.
        gain: K of the integral, in the unit of the scores, positive; None for the largest calibration score.
        saturation: C of the integral, positive. With a smaller C the bound is tighter, and the intervals vary more.
        scorecaster: gives g from the last W scores [W], the oldest first; a function of JAX. None for g = 0.
        score: "absolute", |y - mean|, or "scaled", |y - mean| / std; None for "scaled" if the base has a std.
        window: W, how many of the last scores are kept; None for all L. New scores replace the oldest.

    Returns:
        a state for `jaxcal.online.step` and `jaxcal.online.run`.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite, of the wrong shape or length. Also if an option is not allowed,
            or all calibration scores are 0 and no gain is given.

    Source: section 2 of the paper; the bound follows from its proposition on error integration.

    Example:
        >>> import jax.numpy as jnp, jaxcal as jc
        >>> state = init(jc.Point(jnp.zeros(99)), jnp.arange(1.0, 100.0), confidence_level=0.9)
        >>> print(*(end.round(2) for end in state.interval(jc.Point(1000.0))))
        [910.] [1090.]
    """
    confidence_level = _checks.as_fraction("confidence_level", confidence_level)
    positive = {"learning_rate": learning_rate, "saturation": saturation} | ({} if gain is None else {"gain": gain})
    for name, value in positive.items():
        _checks.check_positive(name, value)
    recent, scaled = calibration_scores(base, y, score, window)
    if gain is None and not _checks.is_traced(recent) and not np.asarray(recent).any():
        raise ValueError("y equals base.mean in every row: the gain of the integral is not known. Give one, gain=1.0.")
    numbers = {name: as_array(value, recent.dtype) for name, value in positive.items()}
    return _controlled(recent, as_array(confidence_level, recent.dtype), scorecaster, scaled, **numbers)


class ControlledIntervals(OnlineIntervals):
    """The state of conformal PID control; made by `init`.

    Attributes:
        recent: the scores of the last W rows [W], the oldest first.
        tracked: q, the part of the threshold that quantile tracking moves.
        num_rows: t, the number of rows since the calibration.
        num_missed: how many of these rows the intervals missed.
        confidence_level: the coverage in the long run.
        learning_rate: eta as a fraction of the largest of the last W scores.
        gain: K of the integral.
        saturation: C of the integral.
        scorecaster: gives g from the last scores; None for g = 0.
        scaled: whether scores are |y - mean| / std, or |y - mean|.
    """

    recent: Float[Array, "*w"]
    tracked: Float[Array, "*runs"]
    num_rows: Int[Array, "*runs"]
    num_missed: Int[Array, "*runs"]
    confidence_level: Float[Array, "*runs"]
    learning_rate: Float[Array, "*runs"]
    gain: Float[Array, "*runs"]
    saturation: Float[Array, "*runs"]
    scorecaster: Callable[[Float[Array, " w"]], Float[Array, ""]] | None = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def threshold(self) -> Float[Array, ""]:
        """The sum of the three parts, q + r + g."""
        dtype = self.tracked.dtype
        # x_t = number of misses - a t
        excess = self.num_missed.astype(dtype) - (1 - self.confidence_level) * self.num_rows.astype(dtype)
        integral = tracking.saturated_integral(excess, self.num_rows, self.gain, self.saturation)
        return self.tracked + integral + _forecast(self.scorecaster, self.recent)

    def updated(self, score: Float[Array, ""], missed: Bool[Array, ""]) -> "ControlledIntervals":
        """The state after a row: the oldest score is replaced, q moves, and the row is counted."""
        finite = linalg.finite_part(self.recent)
        # q <- q + eta (err - a)
        error = missed.astype(self.tracked.dtype) - (1 - self.confidence_level)
        return replace(
            self,
            recent=pushed(self.recent, score),
            tracked=self.tracked + self.learning_rate * finite.max() * error,
            num_rows=self.num_rows + 1,
            num_missed=self.num_missed + missed,
        )


@_programs.jit
def _controlled(
    recent: Float[Array, " w"], level: Float[Array, ""], scorecaster: Callable | None, scaled: bool, **numbers: Array
) -> ControlledIntervals:
    """The state before the first row, with the learning rate, the saturation and, if it is given, the gain."""
    largest = linalg.finite_part(recent).max()
    # The conformal quantile; the largest score if there are too few rows for the quantile.
    quantile = jnp.minimum(quantiles.empirical_quantile(jnp.sort(recent), level, "conformal"), largest)
    return ControlledIntervals(
        recent=recent,
        tracked=quantile - _forecast(scorecaster, recent),
        num_rows=jnp.zeros((), int),
        num_missed=jnp.zeros((), int),
        confidence_level=level,
        scorecaster=scorecaster,
        scaled=scaled,
        **{"gain": largest} | numbers,
    )


def _forecast(scorecaster: Callable | None, recent: Float[Array, " w"]) -> Float[Array, ""]:
    if scorecaster is None:
        return jnp.zeros((), recent.dtype)
    forecast = scorecaster(jax.lax.stop_gradient(recent))
    return jnp.asarray(forecast, recent.dtype)
