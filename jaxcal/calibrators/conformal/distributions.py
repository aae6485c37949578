"""Conformal calibrators: whole distributions whose quantiles cover with the probability that their level names."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from jaxcal.calibrators._base import (
    check_base,
    check_not_point,
    levels_of_sample,
    location_and_scale,
    probabilities,
    smoothed,
    sorted_errors,
)
from jaxcal.distributions import Distribution, Empirical, Normal, Point, Recalibrated, ScaledQuantiles
from jaxcal.frames.layout import Table


def fit(
    base: Distribution,
    y: Float[Array, " l"],
    score: str,
    rule: str,
    key: PRNGKeyArray | None,
    smoothing: float | None,
) -> "ConformalCalibrator":
    """`conformal.fit` with a rule, of checked targets."""
    check_base(base, y.shape[0])
    seed = None
    if rule == "randomized":
        if key is None:
            raise ValueError("rule='randomized' needs a key: give key=jax.random.key(0), say.")
        seed = jax.random.bits(key, (), "uint32")
    if score == "cdf" and not isinstance(base, Normal):
        return ConformalCalibrator(smoothed(jnp.sort(probabilities(base, y)), smoothing), seed, "cdf")
    scaled, finite = not isinstance(base, Point), rule == "linear" or smoothing is not None
    table = sorted_errors(base, y, scaled, finite=finite)
    return ConformalCalibrator(smoothed(table, smoothing), seed, "std" if scaled else "y")


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

    def __call__(self, x: Table | None, base: Distribution) -> Empirical | ScaledQuantiles | Recalibrated:
        """The calibrated distributions.

        With rule="randomized" they are `Empirical`, with mass at -inf and +inf: their mean, std and score are those of
        the finite values. With rule="linear" they are `ScaledQuantiles`, with atoms of mass 1 / (L + 1) at both ends,
        and all methods but the density, that of a smoothed version, are exact. Of scores that are probabilities, scale
        "cdf", rule="linear" makes `Recalibrated`, whose probabilities are linear in those of the base, with the base's
        own tails. With rule="randomized" its quantiles are those of the base at these probabilities, and its mean, std
        and score those of a table for each row, [n, L].

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite; if it is a `Point` where the scores
                need more.
        """
        if self.scale == "cdf":
            check_base(base)
            check_not_point(base)
            rule = "linear" if self.seed is None else "randomized"
            return Recalibrated(base, self.scores, rule, self._tau(base.mean))
        loc, scale = location_and_scale(base, self.scale == "std")
        if self.seed is None:
            return ScaledQuantiles(loc, scale, levels_of_sample(self.scores), self.scores, from_sample=True)
        return Empirical(loc, scale, self.scores, "randomized", self._tau(loc))

    def _tau(self, rows: Float[Array, "*n"]) -> Float[Array, "*n"] | None:
        """The draws of rule="randomized", one for each of these rows."""
        if self.seed is None:
            return None
        return jax.random.uniform(jax.random.key(self.seed), rows.shape, rows.dtype)
