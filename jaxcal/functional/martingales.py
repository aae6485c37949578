"""Tests of exchangeability by betting: smoothed conformal p-values, and the capital of strategies that bet on them.

While the scores are exchangeable, the p-values are independent and uniform. Then no strategy multiplies its capital:
the capital is a martingale that starts at 1. By Ville's inequality, the probability that it ever reaches 1 / a is at
most a.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from jaxcal import _checks
from jaxcal.functional import _wavelet

BETS = ("linear", "power")


@jax.jit
def p_values(scores: Real[ArrayLike, " n"], tau: Real[ArrayLike, " n"]) -> Float[Array, " n"]:
    """The smoothed conformal p-value of every score among those before it and itself.

    p_t = (#{i <= t: s_i > s_t} + tau_t #{i <= t: s_i = s_t}) / t. If the scores are exchangeable and the taus
    independent and uniform, the p-values are independent and uniform on (0, 1]. A large score has a small p-value. All
    p-values together take O(n log n) time.

    Args:
        scores: [n], in the order of time. Infinite ones are allowed.
        tau: [n], in (0, 1].

    Returns:
        the p-values [n], in the dtype of the scores.

    Source: Vovk, Nouretdinov and Gammerman, Testing exchangeability on-line, ICML 2003.

    Example:
        >>> print(p_values(jnp.array([3.0, 1.0, 2.0, 2.0]), jnp.full(4, 0.5)))
        [0.5 0.75 0.5 0.5 ]
    """
    scores = _checks.as_floats("scores", scores)
    n = scores.shape[0]
    order = _wavelet.float_order(scores)
    places = jnp.arange(n, dtype=jnp.int32)
    ranks = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    in_order = scores[order]
    padding = (0, _wavelet.padded_length(n) - n)
    bounds = [
        jnp.pad(jnp.searchsorted(in_order, scores, side=side).astype(jnp.int32), padding) for side in ("left", "right")
    ]
    nothing = jnp.zeros_like(scores)  # only the counts are used
    counts_and_sums = _wavelet.count_and_sum_below(ranks, nothing, _wavelet.prefix_sums(nothing), bounds)
    smaller, not_larger = (count[:n] for count, _ in counts_and_sums)
    equal = (not_larger - smaller + 1).astype(scores.dtype)
    larger = (places - not_larger).astype(scores.dtype)
    return (larger + jnp.asarray(tau, scores.dtype) * equal) / (places + 1).astype(scores.dtype)


def log_bets(bet: str, parameters: Float[Array, " k"], p: Float[Array, ""]) -> Float[Array, " k"]:
    """The logarithms of the factors by which strategies multiply their capital after a p-value.

    - "linear": 1 + a (p - 1/2) with |a| < 2. A strategy with a < 0 bets on small p-values, and a strategy with a > 0
      bets on large ones. A strategy with a = 0 does not bet.
    - "power": a p^(a - 1) with a in (0, 1]. The strategy bets on small p-values, and it bets more if a is smaller.

    Each is a density on (0, 1), so that under uniform p-values the mean factor is 1.

    Args:
        bet: "linear" or "power".
        parameters: a, of k strategies.
        p: one p-value, in (0, 1].

    Source: "power": Vovk, Nouretdinov and Gammerman, ICML 2003; "linear": Vovk, Petej, Nouretdinov,
    Ahlberg, Carlsson and Gammerman, COPA 2021.

    Example:
        >>> print(jnp.exp(log_bets("power", jnp.array([0.5, 1.0]), jnp.array(0.25))))
        [1. 1.]
    """
    _checks.check_choice("bet", bet, BETS)
    if bet == "linear":
        return jnp.log1p(parameters * (p - 0.5))
    return jnp.log(parameters) + (parameters - 1) * jnp.log(p)


def log_capitals_after(
    log_capitals: Float[Array, " k"], log_factors: Float[Array, " k"], jump: Float[ArrayLike, ""]
) -> Float[Array, " k"]:
    """The logarithms of the capitals of k strategies after one bet, before which they share a fraction of all capital.

    C_j <- ((1 - J) C_j + J / k sum_i C_i) f_j. With J = 0 the strategies never exchange capital, and their sum is a
    mixture. With J > 0 the sum can follow a change. In both cases the sum of the capitals is a martingale.

    Args:
        log_capitals: log C_j.
        log_factors: log f_j, of `log_bets`.
        jump: J, in [0, 1).

    Source: Vovk, Petej, Nouretdinov, Ahlberg, Carlsson and Gammerman, Retrain or not retrain: conformal test
    martingales for change-point detection, COPA 2021, Algorithm 1 (the simple jumper).

    Example:
        >>> after = log_capitals_after(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([2.0, 0.0])), 0.1)
        >>> print(jnp.exp(log_capitals_after(after, jnp.zeros(2), 0.1)))
        [0.95 0.05]
    """
    total = jax.scipy.special.logsumexp(log_capitals)
    shared = jnp.log(jnp.asarray(jump, total.dtype)) - math.log(log_capitals.shape[0]) + total
    return jnp.logaddexp(jnp.log1p(-jnp.asarray(jump, total.dtype)) + log_capitals, shared[None]) + log_factors
