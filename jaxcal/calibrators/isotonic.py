"""Calibrated regression: an isotonic map from predicted to observed probabilities.

Kuleshov, Fenner and Ermon, "Accurate Uncertainties for Deep Learning Using Calibrated Regression", ICML 2018,
Algorithm 1, for predictions that enter as normal distributions, by their mean and std. The PIT values are Phi(z) with
z = (y - mean) / std, and the fraction of them at or below the k-th smallest is k / L: increasing already, so that the
isotonic regression of the fractions on the PIT values interpolates them. The recalibrated distribution of every row is
then mean + std * Z with one Z for all rows, P(Z <= z_(k)) = k / L.

All computations use z, which does not saturate: in double precision Phi(z) is 1 from z = 8.3 on.
"""

import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, location_and_scale, sorted_errors, warn_without_width
from jaxcal.distributions import Distribution, Point, ScaledQuantiles

# Beyond these Phi(z) is 0 or 1 in double precision.
_SATURATED = (-38.47, 8.292)


def fit(x: ArrayLike | None, base: Distribution, y: ArrayLike, *, tails: str = "support") -> "Isotonic":
    """Recalibrate normal predictions by isotonic regression on their PIT values.

    The calibration rows must not be those that the model behind `base` was trained on. `jaxcal.out_of_fold` predicts
    every row by a model that was not trained on it.

    Between the sorted z the recalibrated cdf is linear in z. Where z are equal it jumps, to the count of all of them.
    Below the least and above the greatest z the regression says nothing; there are two options:

    - "support": levels k / L; the distribution ends at the least and the greatest z, as that of CRUDE does, and an atom
      of mass 1 / L lies at the least;
    - "anchored": levels k / (L + 1); beyond both ends the base's normal tails, scaled to the mass 1 / (L + 1).

    The cost is O(L log L). A `Point` has no std: 1 is used in every row, and with "support" the result is the
    distribution of the errors. Works under `jit` and, over runs of equal size, under `eqx.filter_vmap`. No gradient
    passes through the fit; predictions are differentiable in base.

    Args:
        x: not used; may be None.
        base: the model's predictions [L] on rows that it was not trained on.
        y: targets [L].
        tails: "support" or "anchored", as above.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite or of the wrong shape, a std of base is not positive, or `tails`
            is none of the above.

    Warns:
        UserWarning: if PIT values are 0 or 1 in double precision, with their fraction (the recalibrated distribution is
            not affected); if y equals base.mean in every row, so that with "support" no prediction has a width.

    Source: Kuleshov et al. 2018, Algorithm 1.

    Example:
        >>> import numpy as np
        >>> from jaxcal.calibrators import isotonic
        >>> from jaxcal.distributions import Normal
        >>> base = Normal(np.zeros(5), np.full(5, 0.5))
        >>> fitted = isotonic.fit(None, base, np.array([2.0, 0.0, -1.0, -2.0, 1.0]))
        >>> distribution = fitted(None, Normal(np.array([10.0]), np.array([1.0])))
        >>> print(distribution.icdf(np.array([0.2, 0.5, 1.0])))
        [[ 6.  9. 14.]]
    """
    _checks.check_choice("tails", tails, ("support", "anchored"))
    check_base(base)
    y = _checks.as_vector("y", y, length=base.mean.shape[0])
    scaled = not isinstance(base, Point)
    z = sorted_errors(base, y, scaled)
    if tails == "support":
        warn_without_width(z)
    if scaled and not _checks.is_traced(z):  # without a std there are no PIT values
        _warn_of_extremes(np.asarray(z))
    return Isotonic(z, tails, scaled)


class Isotonic(eqx.Module):
    """Recalibrated normal predictions; made by `fit`.

    Attributes:
        z: the standardized errors [L], in increasing order.
        tails: "support" or "anchored".
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
    """

    z: Float[Array, "*runs l"]
    tails: str = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> ScaledQuantiles:
        """The recalibrated distributions of the predictions `base` [n]; x is not used.

        Raises:
            TypeError, ValueError: as `fit` does for its base; ValueError, too, if base is a `Point` and `scaled`.
        """
        loc, scale = location_and_scale(base, self.scaled)
        anchored = self.tails == "anchored"
        size = self.z.shape[-1]
        levels = jnp.arange(1, size + 1, dtype=self.z.dtype) / (size + anchored)
        return ScaledQuantiles(
            loc=loc, scale=scale, levels=levels, z=self.z, tails="normal" if anchored else "constant"
        )


def _warn_of_extremes(z: np.ndarray) -> None:
    fraction = np.mean((z < _SATURATED[0]) | (z > _SATURATED[1]))
    if fraction > 0:
        warnings.warn(
            f"{100 * fraction:.2g} % of the PIT values are 0 or 1 in double precision, with |z| up to "
            f"{np.abs(z).max():.3g}: the stds of base are far too small there. The recalibrated distribution is "
            "not affected.",
            stacklevel=3,
        )
