"""Gaussian maximum likelihood: one shift and one scale for a model's normal predictions.

The baseline of Levi, Gispan, Giladi and Fetaya, "Evaluating and Calibrating Uncertainty Prediction in Regression
Tasks", Sensors 22 (2022), who scale all stds by one factor. Zelikman, Healy, Zhou and Avati ("CRUDE: Calibrating
Regression Uncertainty Distributions Empirically", 2020) compare with it "including shift". That can be read in more
than one way: `fit` offers every reading.
"""

import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, error_scale, location_and_scale
from jaxcal.distributions import Distribution, Normal, Point
from jaxcal.functional import linalg


def fit(x: ArrayLike | None, base: Distribution, y: ArrayLike, *, shift: str = "constant") -> "GaussianMLE":
    """Find the shift a and the scale b under which normal predictions make the targets most likely.

    With means mu, stds s, residuals r = y - mu and z = r / s the prediction is

    - "constant": N(mu + a, (b s)^2), a = sum(r / s^2) / sum(1 / s^2), b^2 = mean((r - a)^2 / s^2);
    - "scaled": N(mu + a s, (b s)^2), a and b the mean and the std of z (with the divisor n);
    - "none": N(mu, (b s)^2), b^2 = mean(z^2), the std scaling of Levi et al.

    A `Point` has no std: s is then 1 in every row. Works under `jit` and, over runs, under `eqx.filter_vmap`. No
    gradient passes through the fit; predictions are differentiable in base.

    Args:
        x: not used; may be None.
        base: the model's predictions [n] on rows that it was not trained on.
        y: targets [n].
        shift: "constant", on the scale of y; "scaled", in stds; or "none".

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite or of the wrong shape, a std of base is not positive, or `shift`
            is none of the above.

    Warns:
        UserWarning: if y equals the shifted mean in every row. The scale is then the machine epsilon in place of 0.

    Source: Levi et al. 2022 (std scaling) for "none"; the others solve the likelihood equations with a shift.

    Example:
        >>> import numpy as np
        >>> from jaxcal.calibrators import gaussian_mle
        >>> from jaxcal.distributions import Normal
        >>> base = Normal(np.zeros(4), np.ones(4))
        >>> fitted = gaussian_mle.fit(None, base, np.array([1.0, 5.0, 1.0, 5.0]))
        >>> distribution = fitted(None, base)
        >>> print(distribution.mean, distribution.std)
        [3. 3. 3. 3.] [2. 2. 2. 2.]
    """
    _checks.check_choice("shift", shift, ("constant", "scaled", "none"))
    check_base(base)
    y = _checks.as_vector("y", y, length=base.mean.shape[0])
    scaled = not isinstance(base, Point)
    mle = _fit(base.mean, error_scale(base, scaled), y, shift, scaled)
    if not _checks.is_traced(mle.scale) and np.any(np.asarray(mle.scale) == jnp.finfo(mle.scale.dtype).eps):
        warnings.warn(
            f"y equals the (shifted) mean of base in every row: the scale is {mle.scale.max():.0e} in place of 0. "
            "Was the model trained on these rows? Calibrate on others.",
            stacklevel=2,
        )
    return mle


class GaussianMLE(eqx.Module):
    """A shift and a scale of normal predictions; made by `fit`.

    Attributes:
        shift: a, what is added to the means.
        scale: b, what the stds are multiplied by.
        reading: how a enters, "constant", "scaled" or "none".
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
    """

    shift: Float[Array, "*runs"]
    scale: Float[Array, "*runs"]
    reading: str = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> Normal:
        """The shifted and scaled normal distributions of the predictions `base` [n]; x is not used.

        Raises:
            TypeError, ValueError: as `fit` does for its base; ValueError, too, if base is a `Point` and `scaled`.
        """
        mean, std = location_and_scale(base, self.scaled)
        return Normal(mean + self.shift * (std if self.reading == "scaled" else 1), self.scale * std)


@eqx.filter_jit
def _fit(
    mean: Float[Array, " n"], std: Float[Array, " n"], y: Float[Array, " n"], reading: str, scaled: bool
) -> GaussianMLE:
    mean, std, y = lax.stop_gradient((mean, std, y))
    residual = y - mean
    # Relative to the least std, no weight overflows.
    weight = (std.min() / std) ** 2
    shift = {
        "constant": (weight * residual).sum() / weight.sum(),
        "scaled": (residual / std).mean(),
        "none": jnp.zeros((), residual.dtype),
    }[reading]
    z = (residual - shift * (std if reading == "scaled" else 1)) / std
    scale = linalg.root_mean_square(z)
    return GaussianMLE(shift, jnp.where(scale > 0, scale, jnp.finfo(scale.dtype).eps), reading, scaled)
