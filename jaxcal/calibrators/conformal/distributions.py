"""Conformal calibrators: whole distributions whose quantiles cover with the probability that their level names."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, UInt32

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, location_and_scale, sorted_errors
from jaxcal.distributions import Distribution, Empirical, Normal, Point, Quantiles, ScaledQuantiles


def fit(
    base: Distribution, y: Float[Array, " l"], score: str, rule: str, key: PRNGKeyArray | None
) -> "ConformalCalibrator":
    """`conformal.fit` with a rule, of checked targets."""
    check_base(base, y.shape[0])
    seed = None
    if rule == "randomized":
        if key is None:
            raise ValueError("rule='randomized' needs a key: give key=jax.random.key(0), say.")
        seed = jax.random.bits(key, (), "uint32")
    if score == "cdf" and not isinstance(base, Normal):
        return ConformalCalibrator(jnp.sort(_probabilities(base, y)), seed, "cdf")
    scaled = not isinstance(base, Point)
    return ConformalCalibrator(sorted_errors(base, y, scaled), seed, "std" if scaled else "y")


class ConformalCalibrator(eqx.Module):
    """A table of scores that increase with y; made by `conformal.fit` with a rule.

    The ranks of rule="randomized" are drawn from a seed that the fit has fixed: a call gives the same distributions
    each time, under `jit` and after loading as well. The draw belongs to the position of a row: row i has the same tau
    in every call, and in every calibrator that was fitted with the same key. The coverage of each row is exact on
    average over keys and calibration sets. For independent draws fit again with another key.

    Attributes:
        scores: of the calibration rows, in increasing order [L].
        seed: of the ranks of rule="randomized", None with rule="linear". Unlike a key it can be saved.
        scale: of the scores: signed errors in predicted stds, "std", or on the scale of y, "y"; or probabilities,
            "cdf".
    """

    scores: Float[Array, "*l"]
    seed: UInt32[Array, "*runs"] | None
    scale: str = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Empirical | ScaledQuantiles | Quantiles:
        """The calibrated distributions.

        With rule="randomized" they are `Empirical`, with mass at -inf and +inf: their mean, std and score are those of
        the finite values. With rule="linear" they are `ScaledQuantiles`, with atoms of mass 1 / (L + 1) at both ends,
        and all methods are exact. Scores that are probabilities, scale "cdf", give every row a table of its own,
        [n, L], the quantiles of the base at these probabilities: `Empirical` of this table, or `Quantiles`, linear
        between its values.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite, or a std not positive; if it is a `Point` where the scores
                need more.
        """
        by_cdf = self.scale == "cdf"
        if by_cdf:
            check_base(base)
            loc, scale, table = jnp.zeros_like(base.mean), 1.0, _quantiles_at(base, self.scores)
        else:
            (loc, scale), table = location_and_scale(base, self.scale == "std"), self.scores
        if self.seed is not None:
            tau = jax.random.uniform(jax.random.key(self.seed), loc.shape, loc.dtype)
            return Empirical(loc=loc, scale=scale, z=table, rule="randomized", tau=tau)
        size = self.scores.shape[-1]
        levels = jnp.arange(1, size + 1, dtype=loc.dtype) / (size + 1)
        return Quantiles(levels, table) if by_cdf else ScaledQuantiles(loc, scale, levels, table)


def _probabilities(base: Distribution, y: Float[Array, " l"]) -> Float[Array, " l"]:
    """base.cdf(y) of every row, as constants."""
    _check_not_point(base)
    base, y = lax.stop_gradient((base, y))
    p = base.cdf(y)
    if not _checks.is_traced(p):
        bad = np.flatnonzero(~((p > 0) & (p < 1) & np.isfinite(base.log_prob(y))))
        if bad.size:
            raise ValueError(
                "score='cdf' needs a base.cdf(y) strictly between 0 and 1, and a density of base at y. "
                f"{bad.size} rows, the first at index {bad[0]}, lack one of the two: take score='signed'."
            )
    return p


def _quantiles_at(base: Distribution, p: Float[Array, " l"]) -> Float[Array, "n l"]:
    """The base's quantiles at these increasing levels."""
    _check_not_point(base)
    # Rounding in the search for a quantile must not put two of them out of order.
    return lax.cummax(base.icdf(p), axis=1)


def _check_not_point(base: Distribution) -> None:
    if isinstance(base, Point):
        raise ValueError(
            "base is a Point: score='cdf' needs distributions that have a density. Give such, or use score='signed'."
        )
