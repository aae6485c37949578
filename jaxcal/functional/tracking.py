"""Formulas of online conformal prediction: weights of several step sizes, and the integral of past errors."""

import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Real

from jaxcal import _checks


def aggregation_rates(confidence_level: Float[ArrayLike, ""], number: int, horizon: int) -> tuple[Array, float]:
    """The learning rate eta of the weights of DtACI and the fraction sigma of them that is shared at each step.

    sigma = 1 / (2 I) and eta = sqrt((log(2 k I) + 1) / (I E)), where a = 1 - c. E = (c^2 a^3 + a^2 c^3) / 3 is the mean
    squared pinball loss of a level a where the coverage is exact.

    Args:
        confidence_level: c.
        number: k, of step sizes.
        horizon: I, the number of rows over which the weights should be good.

    Source: Gibbs and Candès, JMLR 25 (2024). With c = 0.9, k = 8 and I = 500 these are the constants of their code.

    Example:
        >>> eta, sigma = aggregation_rates(0.9, 8, 500)
        >>> print(f"{eta:.2f} {sigma}")
        2.72 0.001
    """
    c = _checks.as_floats("confidence_level", confidence_level)
    squared_loss = ((1 - c) ** 3 * c**2 + (1 - c) ** 2 * c**3) / 3
    return jnp.sqrt((math.log(2 * number * horizon) + 1) / (horizon * squared_loss)), 1 / (2 * horizon)


def reweighted(
    weights: Float[Array, " k"], losses: Float[Array, " k"], eta: Float[ArrayLike, ""], sigma: Float[ArrayLike, ""]
) -> Float[Array, " k"]:
    """The weights of k experts after their losses: w_j exp(-eta l_j), normalized, and a fraction sigma shared.

    Args:
        weights: not negative, with sum 1.
        losses: l_j.
        eta: the learning rate.
        sigma: in [0, 1]; above 0 no weight ever vanishes.

    Source: Gibbs and Candès, JMLR 25 (2024), Algorithm 1.

    Example:
        >>> print(reweighted(jnp.array([0.5, 0.5]), jnp.array([0.0, 100.0]), 1.0, 0.5))
        [0.75 0.25]
    """
    grown = weights * jnp.exp(-jnp.asarray(eta) * (losses - losses.min()))
    fraction = jnp.asarray(sigma)
    return (1 - fraction) * grown / grown.sum() + fraction / weights.shape[0]


def saturated_integral(
    excess: Real[ArrayLike, ""],
    num_rows: Int[ArrayLike, ""],
    gain: Float[ArrayLike, ""],
    saturation: Float[ArrayLike, ""],
) -> Float[Array, ""]:
    """The integral part of conformal PID control: r_t(x) = K tan(x log(t + 1) / (C (t + 1))), infinite beyond +-pi/2.

    Because it becomes infinite, |x| never exceeds C (pi / 2) (t + 1) / log(t + 1) + 1 from t = 3 on.

    Args:
        excess: x, the number of missed rows less the number expected.
        num_rows: t, of all rows so far.
        gain: K, positive, in the unit of the scores.
        saturation: C, positive.

    Source: Angelopoulos, Candès and Tibshirani, NeurIPS 2023; with t + 1 for t, as in their code.

    Example:
        >>> print(saturated_integral(0.0, 10, 1.0, 1.0), saturated_integral(9.0, 10, 1.0, 1.0))
        0.0 inf
    """
    t = jnp.asarray(num_rows) + 1
    angle = jnp.asarray(excess) * jnp.log(t.astype(jnp.result_type(excess, float))) / (saturation * t)
    inside = jnp.abs(angle) < math.pi / 2
    return jnp.where(inside, gain * jnp.tan(jnp.where(inside, angle, 0)), jnp.sign(angle) * jnp.inf)
