"""Split conformal intervals at any level, from one table of errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from jaxcal.calibrators._base import (
    ABSOLUTE,
    check_base,
    check_not_smoothed,
    coverage_guarantee,
    location_and_scale,
    smoothed,
    standardized_errors,
)
from jaxcal.distributions import Distribution, Empirical, Point
from jaxcal.frames.layout import Table
from jaxcal.guarantee import Guarantee


def fit(base: Distribution, y: Float[Array, " l"], score: str, smoothing: float | None) -> "SplitConformal":
    """`conformal.fit` with score "absolute", "scaled" or "signed", of checked targets."""
    check_base(base, y.shape[0])
    signed = score == "signed"
    scaled = score == "scaled" or (signed and not isinstance(base, Point))
    errors = standardized_errors(base, y, scaled, finite=smoothing is not None, instead=ABSOLUTE)
    table = smoothed(jnp.sort(errors), smoothing) if signed else _symmetric(errors, smoothing)
    return SplitConformal(
        z=table,
        scaled=scaled,
        rule="conformal" if signed else "symmetric",
        out_of_fold=base.is_out_of_fold,
        smoothed=smoothing is not None,
    )


class SplitConformal(eqx.Module):
    """A table of errors; made by `conformal.fit`.

    Attributes:
        z: the signed errors [L], in increasing order; or the absolute errors and their negatives, [2 L].
        scaled: whether errors are measured in predicted stds, or on the scale of y.
        rule: how a quantile is read from the table: "conformal" from signed errors, "symmetric" from absolute errors.
        out_of_fold: whether the errors are those of `jaxcal.out_of_fold`.
        smoothed: whether the errors are means over neighboring ranks.
    """

    z: Float[Array, "*l"]
    scaled: bool = eqx.field(static=True)
    rule: str = eqx.field(static=True)
    out_of_fold: bool = eqx.field(static=True)
    smoothed: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Table | None, base: Distribution) -> Empirical:
        """The distributions whose central intervals have the coverage of `guarantee`.

        An interval at a level for which there are too few calibration rows is infinite; a warning says how many rows
        are needed.

        Args:
            x: not used; may be None.
            base: the model's predictions, [n].

        Raises:
            TypeError: if base is not a Distribution.
            ValueError: if its mean or std is not finite; if it is a `Point` where errors are
                measured in predicted stds.
        """
        loc, scale = location_and_scale(base, self.scaled)
        return Empirical(loc, scale, self.z, self.rule)

    def guarantee(self, confidence_level: float) -> Guarantee:
        """The coverage guarantee of the central interval at this level.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), or the errors are out of fold or smoothed.
        """
        check_not_smoothed(self.smoothed)
        rows = self.z.shape[-1] // (2 if self.rule == "symmetric" else 1)
        return coverage_guarantee(confidence_level, rows, self.rule, self.out_of_fold)


@jax.jit
def _symmetric(errors: Float[Array, " l"], smoothing: Real[ArrayLike, ""] | None) -> Float[Array, " m"]:
    """The sorted absolute errors, smoothed if that is asked for, after their negatives."""
    sizes = smoothed(jnp.sort(jnp.abs(errors)), smoothing)
    return jnp.concatenate([-sizes[::-1], sizes])
