"""Gaussian maximum likelihood: one shift and one scale for a model's normal predictions.

The baseline of Levi, Gispan, Giladi and Fetaya, "Evaluating and Calibrating Uncertainty Prediction in Regression
Tasks", Sensors 22 (2022), who scale all stds by one factor. Zelikman, Healy, Zhou and Avati ("CRUDE: Calibrating
Regression Uncertainty Distributions Empirically", 2020) compare with it "including shift". That can be read in more
than one way: `fit` offers every reading.

The estimated scale and shift are uncertain. A normal distribution that takes them for the truth is too narrow: from
five rows its 90 % intervals cover 75 %. With z = (y - mean) / std the shift is a linear regression of z through the
origin, on w = 1 / std ("constant") or w = 1 ("scaled"): a new row follows a Student t distribution, as in any linear
regression.
"""

import math
import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxcal import _checks
from jaxcal.calibrators._base import check_base, error_scale, location_and_scale
from jaxcal.distributions import Distribution, Normal, Point, StudentT
from jaxcal.functional import linalg, student_t


def fit(
    x: ArrayLike | None, base: Distribution, y: ArrayLike, *, shift: str | None = None, preset: str | None = None
) -> "GaussianMLE":
    """Find the shift a and the scale b under which normal predictions make the targets most likely.

    With means mu, stds s, residuals r = y - mu and z = r / s of n rows, and T of the Student t distribution, a new row
    is

    - "constant": mu + a + b sqrt(s^2 + 1 / sum(1 / s^2)) T, a = sum(r / s^2) / sum(1 / s^2), with n - 1 degrees of
      freedom, b^2 = sum((r - a)^2 / s^2) / (n - 1);
    - "scaled": mu + a s + b s sqrt(1 + 1 / n) T, a the mean of z, with n - 1 degrees of freedom,
      b^2 = sum((z - a)^2) / (n - 1);
    - "none": mu + b s T with n degrees of freedom, b^2 = mean(z^2), the std scaling of Levi et al.;
    - "auto": "constant" where it has the greater log density of rows by leave-one-out, summed over all, else "none";
      with n - 1 degrees of freedom in either case, since the choice costs one.

    For independent normal errors every interval covers a new row with exactly its level, on average over calibration
    sets; with "auto" to within 1 %.

    `preset="paper"` takes the estimates for the truth: N(mu + a, (b s)^2), N(mu + a s, (b s)^2) or N(mu, (b s)^2), with
    the divisor n in b^2.

    A `Point` has no std: s is then 1 in every row. Works under `jit` and, over runs, under `eqx.filter_vmap`. No
    gradient passes through the fit; predictions are differentiable in base.

    Args:
        x: not used; may be None.
        base: the model's predictions [n] on rows that it was not trained on.
        y: targets [n].
        shift: "constant", on the scale of y; "scaled", in stds; "none"; or "auto". None is "auto", and with the preset
            "constant".
        preset: None, or "paper" as above.

    Raises:
        TypeError: if base is not a Distribution.
        ValueError: if y or base is empty, not finite or of the wrong shape, a std of base is not positive, `shift` or
            `preset` is none of the above, or there are fewer than two degrees of freedom, without which there is no
            mean; with the preset one row is enough, and there is no "auto".

    Warns:
        UserWarning: if y equals the shifted mean in every row. The scale is then the machine epsilon in place of 0. If
            there are two degrees of freedom, with which the std is infinite.

    Source: Levi et al. 2022 (std scaling) for "none"; the others solve the likelihood equations with a shift. The
    distribution of a new row: Seber and Lee, Linear Regression Analysis, 2003, section 5.3.

    Example:
        >>> import numpy as np
        >>> from jaxcal.calibrators import gaussian_mle
        >>> from jaxcal.distributions import Normal
        >>> base = Normal(np.zeros(4), np.ones(4))
        >>> y = np.array([1.0, 5.0, 1.0, 5.0])
        >>> print(gaussian_mle.fit(None, base, y, preset="paper")(None, base).interval(0.9)[1].round(2))
        [6.29 6.29 6.29 6.29]
        >>> print(gaussian_mle.fit(None, base, y, shift="constant")(None, base).interval(0.9)[1].round(2))
        [9.08 9.08 9.08 9.08]
    """
    _checks.check_choice("preset", preset, (None, "paper"))
    readings = ("constant", "scaled", "none") if preset else ("auto", "constant", "scaled", "none")
    _checks.check_choice("shift", shift, (None, *readings))
    shift = shift or readings[0]
    check_base(base)
    y = _checks.as_vector("y", y, length=base.mean.shape[0])
    if not preset:
        _check_degrees_of_freedom(y.shape[0] - (shift != "none"))
    scaled = not isinstance(base, Point)
    fitted = _fit(base.mean, error_scale(base, scaled), y, shift, scaled, plug_in=preset == "paper")
    if not _checks.is_traced(fitted.scale) and np.any(np.asarray(fitted.scale) == jnp.finfo(fitted.scale.dtype).eps):
        warnings.warn(
            f"y equals the (shifted) mean of base in every row: the scale is {fitted.scale.max():.0e} in place of 0. "
            "Was the model trained on these rows? Calibrate on others.",
            stacklevel=2,
        )
    return fitted


class GaussianMLE(eqx.Module):
    """A shift and a scale of normal predictions; made by `fit`.

    Attributes:
        shift: a, what is added to the means.
        scale: b, what the stds are multiplied by.
        shift_std: the std of the shift over that of a row's z, 1 / sqrt(sum of w^2); 0 without a shift.
        df: the degrees of freedom; None with preset="paper", after which predictions are normal.
        reading: how a enters, "constant", "scaled" or "none"; "auto" is "constant" where a is not 0.
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
    """

    shift: Float[Array, "*runs"]
    scale: Float[Array, "*runs"]
    shift_std: Float[Array, "*runs"]
    df: Float[Array, "*runs"] | None
    reading: str = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def __call__(self, x: ArrayLike | None, base: Distribution) -> StudentT | Normal:
        """The Student t distributions of the predictions `base` [n]; x is not used.

        With preset="paper" they are normal.

        Raises:
            TypeError, ValueError: as `fit` does for its base; ValueError, too, if base is a `Point` and `scaled`.
        """
        mean, std = location_and_scale(base, self.scaled)
        loc, scale = _moved(self, mean, std)
        return Normal(loc, scale) if self.df is None else StudentT(self.df, loc, scale)


@eqx.filter_jit
def _moved(
    fitted: GaussianMLE, mean: Float[Array, "*n"], std: Float[Array, "*n"]
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Where the distributions lie, and their scales."""
    unit = std if fitted.reading == "scaled" else jnp.ones_like(std)
    spread = std if fitted.df is None else linalg.root_sum_squares(std, fitted.shift_std * unit)
    return mean + fitted.shift * unit, fitted.scale * spread


def _check_degrees_of_freedom(number: int) -> None:
    """Raise ValueError where a Student t distribution has no mean; warn where it has no finite std."""
    if number < 2:
        raise ValueError(
            f"the rows leave {number} degrees of freedom to the scale; at least 2 are needed, and 3 for a finite std: "
            "give more rows."
        )
    if number == 2:
        warnings.warn(
            "the rows leave 2 degrees of freedom to the scale: the intervals cover what they claim, but the std is "
            "infinite. Give more rows.",
            stacklevel=3,
        )


@eqx.filter_jit
def _fit(
    mean: Float[Array, " n"], std: Float[Array, " n"], y: Float[Array, " n"], reading: str, scaled: bool, plug_in: bool
) -> GaussianMLE:
    mean, std, y = lax.stop_gradient((mean, std, y))
    least = std.min()
    z = (y - mean) / std
    # Relative to the least std, no square of w overflows.
    w = jnp.ones_like(z) if reading == "scaled" else least / std
    unit = jnp.ones_like(least) if reading == "scaled" else least
    total = jnp.sum(w**2)
    slope = jnp.sum(w * z) / total  # of the regression of z on w; the shift is that times `unit`
    if reading == "none":
        used = jnp.zeros((), bool)
    elif reading == "auto":
        size = linalg.scale_of(z)
        used = _log_score(z / size, w, total, slope / size) > _log_score(z / size, None, total, slope / size)
    else:
        used = jnp.ones((), bool)
    slope = jnp.where(used, slope, 0)
    df = z.shape[0] - (reading != "none")
    scale = linalg.root_mean_square(z - slope * w) * (1 if plug_in else math.sqrt(z.shape[0] / df))
    return GaussianMLE(
        shift=slope * unit,
        scale=jnp.where(scale > 0, scale, jnp.finfo(scale.dtype).eps),
        shift_std=jnp.where(used, unit / jnp.sqrt(total), 0),
        df=None if plug_in else jnp.asarray(df, z.dtype),
        reading="constant" if reading == "auto" else reading,
        scaled=scaled,
    )


def _log_score(
    z: Float[Array, " n"], w: Float[Array, " n"] | None, total: Float[Array, ""], slope: Float[Array, ""]
) -> Float[Array, ""]:
    """The sum of the log densities of all z, each predicted from the others, less a constant: with a shift, or without.

    With h = w^2 / sum(w^2), residuals e = z - slope w, q = e^2 / (1 - h) and R = sum e^2 the sum of squares without a
    row is R - q. So the log density of a row by its Student t distribution, of df degrees of freedom, is

        log t_df(0) + log(df (1 - h)) / 2 - (df + 1) / 2 log R + df / 2 log(R - q).
    """
    leverage = jnp.zeros_like(z) if w is None else w**2 / total
    squares = (z if w is None else z - slope * w) ** 2
    df = z.shape[0] - (1 if w is None else 2)
    if df < 1:
        return jnp.array(-jnp.inf, z.dtype)
    info = jnp.finfo(z.dtype)
    rest = jnp.maximum(1 - leverage, info.eps)
    all_rows = jnp.maximum(squares.sum(), info.tiny)
    others = jnp.maximum(all_rows - squares / rest, info.eps * all_rows)
    peak = student_t.log_prob(0.0, jnp.asarray(df, z.dtype), 0.0, 1.0)
    log_density = peak + 0.5 * jnp.log(df * rest) - 0.5 * (df + 1) * jnp.log(all_rows) + 0.5 * df * jnp.log(others)
    return log_density.sum()
