"""Conformal test martingales: is each new score exchangeable with those before it?

Every score gets a smoothed conformal p-value among the scores before it. If all scores are exchangeable, the p-values
are independent and uniform. A player with capital 1 bets on them. The capital ever reaches 1 / a with a probability of
at most a (Ville's inequality), however often it is checked. If the scores are not exchangeable, p-values become small,
or large, and the capital grows.

    past, p = p_value(past, score, tau)          # tau: uniform on (0, 1], a new one for every score
    martingale, log_value = step(martingale, p)  # log_value >= log(1 / a): an alarm

`functional.martingales.p_values` gives the p-values of a whole sequence, in O(n log n). `jaxcal.online.check_errors`
does all in one call, and says the result in words.

Source: Vovk, Nouretdinov and Gammerman, Testing exchangeability on-line, ICML 2003; Vovk, Petej, Nouretdinov, Ahlberg,
Carlsson and Gammerman, Retrain or not retrain: conformal test martingales for change-point detection, COPA 2021.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks, _programs
from jaxcal.functional import martingales
from jaxcal.online._base import as_array


def jumper(jump: ArrayLike = 0.01) -> "Martingale":
    """The simple jumper: three strategies, which bet on small p-values, on large ones, or not at all.

    The factors are 1 + a (p - 1/2) with a = -1, 0, 1. Before each bet a fraction of all capital is divided equally
    among the three, so that the martingale can follow a late change.

    Args:
        jump: J, the fraction, in [0, 1).

    Raises:
        ValueError: if J lies outside [0, 1).

    Source: Vovk et al., COPA 2021, Algorithm 1.

    Example:
        >>> martingale = jumper()
        >>> for p in (0.01, 0.02, 0.01):
        ...     martingale, log_value = step(martingale, p)
        >>> print(f"{jnp.exp(log_value):.3f}")
        1.467
    """
    if not _checks.is_traced(jump) and not (np.ndim(jump) == 0 and 0 <= float(np.asarray(jump)) < 1):
        raise ValueError(f"jump must be one number, at least 0 and below 1; got {jump}.")
    return _start("linear", np.array([-1.0, 0.0, 1.0]), jump)


def mixture(bet: str = "power", num_strategies: int = 20) -> "Martingale":
    """The mean of the capitals of many strategies that never exchange capital: a mixture over their parameter a.

    The factors of "power" are a p^(a - 1), which bet on small p-values. Here a runs over the midpoints of equal parts
    of (0, 1). The factors of "linear" are 1 + a (p - 1/2), which bet on small or on large p-values. Here a runs over
    the midpoints of equal parts of (-2, 2).

    Args:
        bet: "power" or "linear".
        num_strategies: k, the number of strategies.

    Raises:
        ValueError: if an option is not allowed.

    Source: Vovk, Nouretdinov and Gammerman, ICML 2003: the simple mixture, with a sum for the integral.

    Example:
        >>> martingale, log_value = step(mixture(num_strategies=1), 0.25)
        >>> print(log_value)
        0.0
    """
    _checks.check_choice("bet", bet, martingales.BETS)
    _checks.check_at_least("num_strategies", num_strategies, 1)
    middles = (np.arange(num_strategies) + 0.5) / num_strategies
    return _start(bet, middles if bet == "power" else 4 * middles - 2, 0.0)


class Martingale(eqx.Module):
    """The capitals of strategies that bet on p-values; made by `jumper` or `mixture`.

    Logarithms are kept, since capitals grow and fall exponentially.

    Attributes:
        log_capitals: the log capital of every strategy [k]; the capitals' sum starts at 1.
        log_max: the log of the largest sum so far, with the sum at the start.
        parameters: the parameter a of every strategy [k].
        jump: the fraction of the capital that is divided before each bet.
        bet: the bet of the strategies, "linear" or "power".
    """

    log_capitals: Float[Array, "*k"]
    log_max: Float[Array, "*runs"]
    parameters: Float[Array, "*k"]
    jump: Float[Array, "*runs"]
    bet: str = eqx.field(static=True)


@_programs.jit
def step(martingale: Martingale, p: Float[ArrayLike, ""]) -> tuple[Martingale, Float[Array, ""]]:
    """The martingale after one p-value, and the logarithm of its value; to be scanned over p-values.

    Args:
        martingale: a martingale of `jumper` or `mixture`, or of the step before.
        p: in (0, 1].

    Example:
        >>> last, log_values = jax.lax.scan(step, jumper(), jnp.full(100, 0.1))
        >>> print(f"{jnp.exp(log_values[-1]):.1e}")
        7.2e+13
    """
    p = jnp.asarray(p, martingale.log_capitals.dtype)
    # The capitals are multiplied by the factors of the bets; the martingale is their sum.
    log_factors = martingales.log_bets(martingale.bet, martingale.parameters, p)
    log_capitals = martingales.log_capitals_after(martingale.log_capitals, log_factors, martingale.jump)
    log_value = jax.scipy.special.logsumexp(log_capitals)
    log_max = jnp.maximum(martingale.log_max, log_value)
    moved = eqx.tree_at(lambda m: (m.log_capitals, m.log_max), martingale, (log_capitals, log_max))
    return moved, log_value


def history(scores: ArrayLike, capacity: int) -> "History":
    """The scores among which the p-values of new scores are taken.

    Args:
        scores: the scores of calibration rows [L], in any order.
        capacity: the most scores, L and all new rows, because arrays cannot grow.

    Raises:
        ValueError: if the scores are empty, not finite or no vector, or there are more than the capacity.
    """
    scores = _checks.as_vector("scores", scores)
    _checks.check_at_least("capacity", capacity, scores.shape[0])
    return History(_padded(scores, capacity), jax.device_put(np.int32(scores.shape[0])))


class History(eqx.Module):
    """Scores so far, followed by NaN in free places; made by `history`.

    Attributes:
        scores: [capacity].
        count: how many scores there are.
    """

    scores: Float[Array, "*capacity"]
    count: Int[Array, "*runs"]


def p_value(past: History, score: ArrayLike, tau: ArrayLike) -> tuple[History, Float[Array, ""]]:
    """The scores with a new one among them, and its smoothed conformal p-value; to be scanned over scores and taus.

    The p-value is the same as by `functional.martingales.p_values`, at a cost of O(capacity) for each score.

    Args:
        past: a result of `history`, or of the call before.
        score: the score of the new row. NaN, the score of an unknown target, counts as infinite.
        tau: uniform on (0, 1], a new one for every score.

    Returns:
        the new history, and the p-value. Under a transformation the p-value is NaN if there was no room left.

    Raises:
        ValueError: if it is known that there is no room left.

    Example:
        >>> past, p = p_value(history(jnp.array([1.0, 2.0, 3.0]), capacity=10), 2.5, 0.5)
        >>> print(p)
        0.375
    """
    capacity = past.scores.shape[0]
    if not _checks.is_traced(past.count) and int(past.count) >= capacity:
        raise ValueError(f"the history is full, of {capacity} scores: make one with a larger capacity.")
    return _p_value(past, score, tau)


@_programs.jit
def _p_value(past: History, score: ArrayLike, tau: ArrayLike) -> tuple[History, Float[Array, ""]]:
    dtype = past.scores.dtype
    score = jnp.asarray(score, dtype)
    score = jnp.where(jnp.isnan(score), jnp.inf, score)
    # Comparisons with NaN, which is in free places, are false.
    # Then `p = (#{s > score} + tau #{s = score}) / (count + 1)`, with the new score among the equal ones.
    larger, equal = jnp.sum(past.scores > score), 1 + jnp.sum(past.scores == score)
    p = (larger.astype(dtype) + jnp.asarray(tau, dtype) * equal.astype(dtype)) / (past.count + 1).astype(dtype)
    scores = past.scores.at[past.count].set(score, mode="drop")
    return History(scores, past.count + 1), jnp.where(past.count < scores.shape[0], p, jnp.nan)


def _padded(scores: Float[Array, " l"], capacity: int) -> Float[Array, " capacity"]:
    free = np.full(capacity - scores.shape[0], np.nan, scores.dtype)
    if _checks.is_traced(scores):
        return jnp.concatenate([scores, free])
    return jax.device_put(np.concatenate([np.asarray(scores), free]))


def _start(bet: str, parameters: np.ndarray, jump: ArrayLike) -> Martingale:
    """The capital 1, divided equally among the strategies."""
    dtype = dtypes.canonicalize_dtype(float)
    number = len(parameters)
    return Martingale(
        log_capitals=as_array(np.full(number, -math.log(number)), dtype),
        log_max=as_array(0.0, dtype),
        parameters=as_array(parameters, dtype),
        jump=as_array(jump, dtype),
        bet=bet,
    )
