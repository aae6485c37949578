"""The common parts of online calibrators: scores of past rows, intervals of new rows, single steps and runs."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from jaxcal import _checks, _programs
from jaxcal.calibrators._base import ABSOLUTE, check_base, in_scales, is_scaled, location_and_scale, standardized_errors
from jaxcal.distributions import Distribution
from jaxcal.functional import rounding


class OnlineIntervals(eqx.Module):
    """Intervals mean -+ s * scale, whose threshold s adapts to the rows that come one after another.

    Attributes:
        recent: the scores of the last W rows [W], the oldest first.
        scaled: whether scores are |y - mean| / std, or |y - mean|.
    """

    recent: eqx.AbstractVar[Float[Array, "*w"]]
    scaled: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def threshold(self) -> Float[Array, ""]:
        """The largest score inside the next interval: infinite for all numbers, negative for none."""

    @abc.abstractmethod
    def updated(self, score: Float[Array, ""], missed: Bool[Array, ""]) -> "OnlineIntervals":
        """The state after a row with this score; `missed` says whether its interval missed its target."""

    def interval(self, base: Distribution) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
        """The ends (lower, upper) of the intervals of rows whose targets are not known yet.

        An interval of all numbers is (-inf, inf). An empty interval is (inf, -inf): no y has lower <= y <= upper. Other
        ends are rounded outward (`functional.rounding`).

        Args:
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite; if it is a `Point` and scores are measured in predicted stds.
        """
        return _intervals(self, *location_and_scale(base, self.scaled))


def step(
    state: OnlineIntervals, base: Distribution, y: ArrayLike
) -> tuple[OnlineIntervals, tuple[Float[Array, "..."], Float[Array, "..."]]]:
    """The interval of the next row, made before its target is used, and the state after its target is known.

    It can be scanned over rows: `lax.scan(lambda state, row: step(state, *row), state, (base, y))`. For this, every
    array of base needs a value for each row, as in `Point`, `Normal` and `StudentT`. `run` scans any base.

    Under a transformation a target that is NaN counts as missed, with an infinite score.

    Args:
        state: a state of `adaptive.init`, `adaptive.init_aggregated` or `pid.init`, or of the step before.
        base: the model's prediction of one row. Its mean has shape (1,), or () within a scan.
        y: the target of the row, a number or an array of shape (1,).

    Returns:
        the next state, and the interval (lower, upper) in the shape of base.mean.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if base or y has more than one row; and as `OnlineIntervals.interval` does.

    Example:
        >>> import jax.numpy as jnp, jaxcal as jc
        >>> state = jc.online.adaptive.init(jc.Point(jnp.zeros(9)), jnp.arange(1.0, 10.0), confidence_level=0.8)
        >>> state, (lower, upper) = jc.online.step(state, jc.Point(100.0), 103.0)
        >>> print(lower.round(2), upper.round(2))
        [92.] [108.]
    """
    if isinstance(base, Distribution) and base.mean.ndim == 0:
        state, (lower, upper) = step(state, jax.tree.map(lambda leaf: leaf[None], base), y)
        return state, (lower[0], upper[0])
    loc, scale = location_and_scale(base, state.scaled)
    target = _checks.as_floats("y", y)
    if loc.shape != (1,) or target.shape not in ((), (1,)):
        raise ValueError(
            f"a step takes one row; got a base.mean of shape {loc.shape} and a y of shape {target.shape}: "
            "jaxcal.online.run takes many rows."
        )
    _checks.check_finite("y", target)
    return _step(state, loc, scale, target)


def run(
    state: OnlineIntervals, base: Distribution, y: ArrayLike
) -> tuple[OnlineIntervals, tuple[Float[Array, " n"], Float[Array, " n"]]]:
    """A step for each of n rows in the order of time, as one compiled loop.

    Args:
        state: as for `step`.
        base: the model's predictions, [n]; any Distribution.
        y: the targets [n].

    Returns:
        the last state, and the intervals (lower, upper), [n] each. Every interval was made before its target was used.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite or of the wrong shape; and as `OnlineIntervals.interval` does.

    Example:
        >>> import jax, jaxcal as jc
        >>> noise = jax.random.normal(jax.random.key(0), (1200,))
        >>> base = jc.Point(0 * noise)
        >>> state = jc.online.adaptive.init(jc.Point(base.mean[:200]), noise[:200], confidence_level=0.9)
        >>> state, (lower, upper) = jc.online.run(state, jc.Point(base.mean[200:]), 2 * noise[200:])
        >>> covered = (lower <= 2 * noise[200:]) & (2 * noise[200:] <= upper)
        >>> print(f"{covered.mean():.2f}")
        0.90
    """
    y = _checks.as_vector("y", y)
    check_base(base, y.shape[0])
    return _run(state, *location_and_scale(base, state.scaled), y)


def calibration_scores(
    base: Distribution, y: ArrayLike, score: str | None, window: int | None
) -> tuple[Float[Array, " w"], bool]:
    """The last `window` scores of calibration rows, and whether they are scaled.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if an argument is not allowed, or y or base is not finite or of the wrong shape.
    """
    errors, scaled = signed_errors(base, y, score)
    rows = errors.shape[0]
    if window is not None:
        _checks.check_at_least("window", window, 1)
        if window > rows:
            raise ValueError(f"window must be at most the number of calibration rows, {rows}; got {window}.")
    return _sizes(errors, window or rows), scaled


def signed_errors(base: Distribution, y: ArrayLike, score: str | None) -> tuple[Float[Array, " l"], bool]:
    """The errors of checked rows in the unit of the score, and whether this unit is the predicted std."""
    y = _checks.as_vector("y", y)
    check_base(base, y.shape[0])
    scaled = is_scaled(score, base)
    return standardized_errors(base, y, scaled, instead=ABSOLUTE), scaled


def as_array(value: ArrayLike, dtype: np.dtype) -> Float[Array, "..."]:
    """An option as an array that is part of a state; for a known option no program is compiled."""
    return jnp.asarray(value, dtype) if _checks.is_traced(value) else jax.device_put(np.asarray(value, dtype))


def pushed(recent: Float[Array, " w"], score: Float[Array, ""]) -> Float[Array, " w"]:
    """The last W scores after one more score."""
    return jnp.roll(recent, -1).at[-1].set(score)


@_programs.jit
def _sizes(errors: Float[Array, " l"], window: int) -> Float[Array, " w"]:
    return jnp.abs(errors)[-window:]


@_programs.jit
def _intervals(
    state: OnlineIntervals, loc: Float[Array, " n"], scale: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    threshold = lax.stop_gradient(state.threshold())
    bounded = jnp.isfinite(threshold) & (threshold >= 0)
    radius = scale * jnp.where(bounded, threshold, 0)
    end = jnp.where(threshold < 0, -jnp.inf, jnp.inf).astype(loc.dtype)
    lower, upper = (rounding.outward(loc + side * radius, side, loc, radius) for side in (-1, 1))
    return jnp.where(bounded, lower, -end), jnp.where(bounded, upper, end)


@_programs.jit
def _step(
    state: OnlineIntervals, loc: Float[Array, " 1"], scale: Float[Array, " 1"], y: Real[Array, "..."]
) -> tuple[OnlineIntervals, tuple[Float[Array, " 1"], Float[Array, " 1"]]]:
    dtype = state.recent.dtype
    loc, scale, y = loc.astype(dtype), scale.astype(dtype), y.astype(dtype).reshape(loc.shape)
    lower, upper = _intervals(state, loc, scale)
    missed = ~((lower <= y) & (y <= upper))
    # |y - loc| / scale
    score = lax.stop_gradient(jnp.abs(in_scales(y, loc, scale)))
    score = jnp.where(jnp.isnan(score), jnp.inf, score)
    return state.updated(score[0], missed[0]), (lower, upper)


@_programs.jit
def _run(
    state: OnlineIntervals, loc: Float[Array, " n"], scale: Float[Array, " n"], y: Float[Array, " n"]
) -> tuple[OnlineIntervals, tuple[Float[Array, " n"], Float[Array, " n"]]]:
    def one(state: OnlineIntervals, row: tuple[Array, ...]) -> tuple[OnlineIntervals, tuple[Array, Array]]:
        state, (lower, upper) = _step(state, *(part[None] for part in row))
        return state, (lower[0], upper[0])

    return lax.scan(one, state, (loc, scale, y))
