"""Gaussian maximum likelihood: one shift and one scale for a model's normal predictions.

The baseline scales all stds by one factor: Levi, Gispan, Giladi and Fetaya, "Evaluating and Calibrating Uncertainty
Prediction in Regression Tasks", Sensors 22 (2022). Zelikman, Healy, Zhou and Avati ("CRUDE: Calibrating
Regression Uncertainty Distributions Empirically", 2020) compare with it "including shift". That can be read in more
than one way: `fit` offers every reading.

The estimated scale and shift are uncertain. A normal distribution that takes the estimates for the truth is too narrow:
from five rows its 90 % intervals cover 75 %. With `z = (y - mean) / std` the shift is the slope of a linear regression
of z through the origin, on `u = 1 / std` ("constant") or `u = 1` ("scaled"). A new row follows a Student t
distribution, as in any linear regression.

Every group of rows may have a shift and a scale of its own, and rows may have different weights.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit
from jaxcal.calibrators import _groups
from jaxcal.calibrators._base import (
    AS_POINT,
    check_base,
    check_positive_std,
    error_scale,
    in_bucket,
    location_and_scale,
)
from jaxcal.calibrators._groups import GroupLabels, Labels, Weights
from jaxcal.distributions import Distribution, Normal, StudentT
from jaxcal.frames.layout import Series, Table
from jaxcal.functional import linalg, student_t

# The number of partial sums in the sum over a group, so that float32 sums of many rows stay exact enough.
_PARTS = 32


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    shift: str | None = None,
    by: "Labels | None" = None,
    weights: "Weights | None" = None,
    preset: str | None = None,
) -> "GaussianMLE":
    """Find the shift a and the scale b under which normal predictions make the targets most likely.

    Let n rows have means mu, stds s, residuals `r = y - mu` and `z = r / s`. Let T follow the Student t distribution.
    A new row is then

    - "constant": `mu + a + b sqrt(s^2 + 1 / sum(1 / s^2)) T` with n - 1 degrees of freedom. Here
      `a = sum(r / s^2) / sum(1 / s^2)` and `b^2 = sum((r - a)^2 / s^2) / (n - 1)`.
    - "scaled": `mu + a s + b s sqrt(1 + 1 / n) T` with n - 1 degrees of freedom. Here a is the mean of z, and
      `b^2 = sum((z - a)^2) / (n - 1)`.
    - "none": `mu + b s T` with n degrees of freedom. Here `b^2 = mean(z^2)`, the std scaling of Levi et al.
    - "auto": "constant" if it has the greater sum of leave-one-out log densities over all rows, else "none". Either
      has n - 1 degrees of freedom, since the choice costs one.

    For independent normal errors every interval covers a new row with exactly its level, on average over calibration
    sets; with "auto" to within 1 %.

    With `by` all of this holds in every group by itself. Each group has its own a and b, n is the number of its rows,
    and "auto" chooses for each group.

    With `weights` w the log likelihood is `sum(w log p)`. The sums and means above are then weighted, and n is the
    effective number of rows, `(sum w)^2 / sum(w^2)`. A row of weight 2 counts as much as two rows, but as evidence of
    the uncertainty of a and b it is one. So weights that are all equal have no effect, whatever their size, and a row
    of weight 0 does not count.

    Let w(x) be the density of new inputs divided by the density of the calibration inputs. Then a and b fit the new
    rows, even if the errors depend on x in a way that base does not describe. For independent normal errors the
    intervals then cover about what they claim: from ten effective rows on to within 1.5 %. With fewer effective rows
    they cover more (93 % in place of 90 % with five). If the scale of z depends on x, they cover less with few rows
    (86 % with ten effective rows, 89 % with 80).

    `preset="paper"` takes the estimates for the truth: N(mu + a, (b s)^2), N(mu + a s, (b s)^2) or N(mu, (b s)^2), with
    the divisor n in b^2.

    A `Point` has no std: s is then 1 in every row. Works under `jit` and, over runs, under `eqx.filter_vmap`. Fit and
    predictions are differentiable in base, y and weights; the choice of "auto" has derivative 0.

    Args:
        x: inputs [n, d]. Only functions of x use them; else x may be None.
        base: the model's predictions [n] on rows that it was not trained on.
        y: targets [n].
        shift: "constant", on the scale of y; "scaled", in stds; "none"; or "auto". None means "auto", or "constant"
            with the preset.
        by: labels of groups [n], numbers or strings, a function of x that gives them, or `jc.labels.StdBins` of the
            predicted std. If the labels are an array, the call needs labels, too.
        weights: the weights of the rows [n], not negative, or a function of x that gives them; None for equal weights.
            The call needs no weights.
        preset: None, or "paper" as above.

    Raises:
        TypeError: if base is not a Distribution, or labels are traced.
        ValueError: if y or base is empty, not finite or of the wrong shape. If a std of base is not positive, or
            `shift` or `preset` is none of the above. If a group, or all rows, leave fewer than two degrees of freedom:
            with one the distribution has no mean. With the preset one row is enough, and there is no "auto". If there
            are not as many labels or weights as rows. If a weight is negative, NaN or infinite, or all weights of a
            group are 0. If a std of base is below the least normal number of its dtype, or `(y - base.mean) / base.std`
            leaves the range of its dtype.

    Warns:
        UserWarning: if y equals the shifted mean in every row, or every row of a group. The scale is then the machine
            epsilon in place of 0. If there are two degrees of freedom, since the std is then infinite.

    Source: Levi et al. 2022 (std scaling) for "none"; "constant" and "scaled" solve the likelihood equations with a
    shift. The distribution of a new row: Seber and Lee, Linear Regression Analysis, 2003, section 5.3. The effective
    number of rows: Kish, Survey Sampling, 1965, section 11.7. Likelihoods weighted by ratios of densities: Shimodaira,
    Journal of Statistical Planning and Inference 90 (2000).

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
        >>> fitted = gaussian_mle.fit(None, base, y, by=["a", "a", "b", "b"], preset="paper", shift="none")
        >>> print(fitted.scale.round(2), fitted(None, base, by=["b", "b", "b", "a"]).std.round(2))
        [3.61 3.61] [3.61 3.61 3.61 3.61]
    """
    _checks.check_choice("preset", preset, (None, "paper"))
    readings = ("constant", "scaled", "none") if preset else ("auto", "constant", "scaled", "none")
    _checks.check_choice("shift", shift, (None, *readings))
    shift = shift or readings[0]
    check_base(base)
    check_positive_std(base, AS_POINT)
    y = _checks.as_vector("y", y, length=base.mean.shape[0])
    groups, number = GroupLabels.of(x, base, by, y.shape[0])
    counts = _groups.weights_of(x, weights, y.shape[0])
    groups.check_weights(number, counts)
    sizes = np.bincount(number)
    if not preset and counts is None:
        _check_degrees_of_freedom(sizes - (shift != "none"), sizes, groups)
    scaled = base.has_std
    # Weights of 1 go through the same program as others: equal ones, of any size, change no bit.
    w = jax.device_put(np.ones(y.shape, y.dtype)) if counts is None else counts
    rows = _ZScoreRows(base.mean, error_scale(base, scaled), y, w)
    rows = rows if groups.labels else in_bucket(rows)
    fitted = _fit(rows, groups, number if groups.labels else None, shift, scaled, plug_in=preset == "paper")
    if counts is not None and fitted.df is not None and not _checks.is_traced(fitted.df):
        _check_degrees_of_freedom(np.atleast_1d(fitted.df), sizes, groups)
    _check_range(fitted)
    _warn_without_width(fitted)
    return fitted


class GaussianMLE(eqx.Module):
    """A shift and a scale of normal predictions, for all rows or for every group; made by `fit`.

    Attributes:
        shift: the number a that is added to the means. With groups all arrays are [groups], in the order of the labels.
        scale: the factor b of the stds.
        shift_std: the std of the shift divided by the std of a row's z, `sqrt(sum(w^2 u^2)) / sum(w u^2)`; 0 without a
            shift.
        df: the degrees of freedom; None with preset="paper", since predictions are then normal.
        groups: the labels.
        reading: how a enters, "constant", "scaled" or "none"; after "auto" it is "constant", with a = 0 for "none".
        scaled: whether errors are measured in predicted stds; else, after a `Point`, on the scale of y.
    """

    shift: Float[Array, "*runs"]
    scale: Float[Array, "*runs"]
    shift_std: Float[Array, "*runs"]
    df: Float[Array, "*runs"] | None
    groups: GroupLabels
    reading: str = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def __call__(self, x: Table | None, base: Distribution, *, by: Labels | None = None) -> StudentT | Normal:
        """The Student t distributions of the predictions `base` [n]; with preset="paper" they are normal.

        Args:
            x: inputs [n, d]. Only a function of x that gives groups uses them; else x may be None.
            base: the model's predictions, [n].
            by: labels of the rows [n], if they were an array in the fit.

        Raises:
            TypeError, ValueError: as `fit` raises for its base.
            ValueError: if base is a `Point` and `scaled` is set. If labels are missing, if there are not as many labels
                as rows, or if no calibration row has one of the labels.
        """
        mean, std = location_and_scale(base, self.scaled)
        number = self.groups.number_of_rows(x, base, by, mean.shape[0])
        loc, scale, df = _moved(self, mean, std, number)
        return Normal(loc, scale) if df is None else StudentT(df, loc, scale)


@numpy_or_jit
def _moved(
    fitted: GaussianMLE, mean: Float[AnyArray, " n"], std: Float[AnyArray, " n"], number: Int[AnyArray, " n"]
) -> tuple[Float[AnyArray, " n"], Float[AnyArray, " n"], Float[AnyArray, "*n"] | None]:
    """The locations of the distributions, their scales, and their degrees of freedom."""
    value_of_row = (lambda values: values[number]) if fitted.groups.labels else lambda values: values
    shift, scale = value_of_row(fitted.shift), value_of_row(fitted.scale)
    unit = std if fitted.reading == "scaled" else namespace(std).ones_like(std)
    if fitted.df is None:
        return mean + shift * unit, scale * std, None
    # loc = mu + a u and scale = b sqrt(s^2 + (shift_std u)^2), with u = s ("scaled") or 1.
    spread = linalg.root_sum_squares(std, value_of_row(fitted.shift_std) * unit)
    return mean + shift * unit, scale * spread, value_of_row(fitted.df)


def _check_degrees_of_freedom(df: np.ndarray, sizes: np.ndarray, groups: GroupLabels) -> None:
    """Raise ValueError if a Student t distribution has fewer than 2 degrees of freedom; warn if it has no finite std.

    Args:
        df: the degrees of freedom of every group, or without groups of all rows, [1].
        sizes: the number of rows of each group.
        groups: the labels.
    """
    worst = int(np.argmin(df))
    if df[worst] > 2:
        return
    group_name, more = (f" of group {groups.labels[worst]!r}", ", or fewer groups") if groups.labels else ("", "")
    leave = f"the {sizes[worst]} rows{group_name} leave {df[worst]:.3g} degrees of freedom to the scale"
    if df[worst] < 2:
        raise ValueError(
            f"{leave}; at least 2 are needed, and 3 for a finite std: {2 - df[worst]:.3g} more rows of equal weight "
            f"are needed. Give more rows{more}."
        )
    _checks.warn(f"{leave}: the intervals cover what they claim, but the std is infinite. Give more rows{more}.")


def _check_range(fitted: GaussianMLE) -> None:
    """Raise ValueError if an error was not finite."""
    estimates = fitted.shift, fitted.scale
    if not _checks.is_traced(*estimates) and not np.isfinite(estimates).all():
        raise ValueError(
            f"(y - base.mean) / base.std leaves the range of {fitted.scale.dtype}: the stds of base are far too small, "
            "or its means far too large."
        )


def _warn_without_width(fitted: GaussianMLE) -> None:
    """Warn the caller of a fit if the machine epsilon replaces a scale of 0."""
    if _checks.is_traced(fitted.scale):
        return
    scale = np.atleast_1d(fitted.scale)
    flat = np.flatnonzero(scale == np.finfo(scale.dtype).eps)
    if flat.size:
        labels = fitted.groups.labels
        group_name = f" of {flat.size} groups, the first of them {labels[flat[0]]!r}" if labels else ""
        _checks.warn(
            f"y equals the (shifted) mean of base in every row{group_name}: the scale is {scale[flat[0]]:.0e} in place "
            "of 0. Was the model trained on these rows? Calibrate on other rows.",
        )


class _ZScoreRows(NamedTuple):
    """The calibration rows."""

    mean: Float[Array, " n"]
    std: Float[Array, " n"]
    y: Float[Array, " n"]
    weights: Float[Array, " n"]


class _Regression(NamedTuple):
    """Errors z, the regressor u, and the weights w; in rows that count none exceeds 1 in size.

    In rows of weight 0 they are finite, since the derivative in such a weight needs them.

    Without groups `number` is None, and the values of groups have shape [1].
    """

    z: Float[Array, " n"]
    u: Float[Array, " n"]
    w: Float[Array, " n"]
    number: Int[ArrayLike, " n"] | None
    num_groups: int

    def sum(self, values: Float[Array, " n"]) -> Float[Array, " groups"]:
        """The sum over the rows of every group."""
        if self.number is None:
            return jnp.sum(values, keepdims=True)
        part = jnp.arange(values.shape[0], dtype=jnp.int32) % _PARTS
        place = jnp.asarray(self.number) * _PARTS + part
        parts = jax.ops.segment_sum(values, place, num_segments=self.num_groups * _PARTS)
        return parts.reshape(self.num_groups, _PARTS).sum(1)

    def value_of_row(self, values: Float[Array, " groups"]) -> Float[Array, "*n"]:
        """For every row the value of its group."""
        return values if self.number is None else values[self.number]

    def slope(self) -> Float[Array, " groups"]:
        """The slope of the weighted regression."""
        return self.sum(self.w * self.u * self.z) / self.sum(self.w * self.u**2)

    def slope_std(self) -> Float[Array, " groups"]:
        """The std of the slope divided by the std of a row's z."""
        return jnp.sqrt(self.sum((self.w * self.u) ** 2)) / self.sum(self.w * self.u**2)

    def effective_rows(self) -> Float[Array, " groups"]:
        """(sum w)^2 / sum w^2; exactly the number of rows if all weights are 1."""
        total = self.sum(self.w)
        return total / (self.sum(self.w**2) / total)

    def root_mean_square(self, slope: Float[Array, " groups"]) -> Float[Array, " groups"]:
        """The root mean square of the residuals."""
        squares = (self.z - self.value_of_row(slope) * self.u) ** 2
        return linalg.sqrt(self.sum(self.w * squares) / self.sum(self.w))


def _max(values: Float[Array, " n"], number: Int[ArrayLike, " n"] | None, num_groups: int) -> Float[Array, " groups"]:
    if number is None:
        return jnp.max(values, keepdims=True)
    return jax.ops.segment_max(values, number, num_segments=num_groups)


def _regression(
    rows: _ZScoreRows, number: Int[ArrayLike, " n"] | None, num_groups: int, reading: str
) -> tuple[_Regression, Float[Array, " groups"], Float[Array, " groups"]]:
    """The rows in units in which no square overflows; the unit of z; the unit of the shift divided by the unit of z.

    The units are constants for derivatives, since the fitted values do not depend on them.
    """
    value_of_row = lambda values: values if number is None else values[number]
    largest = lambda values: _max(lax.stop_gradient(values), number, num_groups)
    z = (rows.y - rows.mean) / rows.std
    w = rows.weights.astype(z.dtype)
    greatest = value_of_row(largest(w))
    ratio = w / greatest
    # A compiled quotient of equal numbers may differ from 1.
    w = linalg.snapped(ratio, jnp.where(w == greatest, 1, ratio))
    counts = w > 0
    size = largest(jnp.where(counts, jnp.abs(z), 0))
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    unit = jnp.ones_like(size) if reading == "scaled" else -largest(jnp.where(counts, -rows.std, -jnp.inf))
    u = jnp.ones_like(z) if reading == "scaled" else value_of_row(unit) / rows.std
    bound = float(jnp.finfo(z.dtype).max) ** 0.25
    z, u = (jnp.where(counts | (jnp.abs(values) < bound), values, 0) for values in (z / value_of_row(size), u))
    return _Regression(z, u, w, number, num_groups), size, unit


@_programs.jit
def _fit(
    rows: _ZScoreRows,
    groups: GroupLabels,
    number: Int[ArrayLike, " n"] | None,
    reading: str,
    scaled: bool,
    plug_in: bool,
) -> GaussianMLE:
    num_groups = groups.count
    number = None if number is None else jnp.asarray(number)
    regression, size, unit = _regression(rows, number, num_groups, reading)
    slope = regression.slope()
    if reading == "none":
        used = jnp.zeros_like(slope, bool)
    elif reading == "auto":
        used = _log_score(regression, slope) > _log_score(regression, None)
    else:
        used = jnp.ones_like(slope, bool)
    slope = jnp.where(used, slope, 0)
    # b = `sqrt(sum(w (z - a u)^2) / sum(w)) sqrt(n / df)`, with the effective number n of rows. The preset has no
    # factor `sqrt(n / df)`.
    effective = regression.effective_rows()
    df = effective - (reading != "none")
    scale = size * regression.root_mean_square(slope) * (1 if plug_in else jnp.sqrt(effective / df))
    # The regression is of z / size on u = unit / s (or 1, with unit = 1): a = slope size unit.
    all_rows = (lambda values: values[0]) if number is None else lambda values: values
    return GaussianMLE(
        shift=all_rows(slope * size * unit),
        scale=all_rows(jnp.where(scale > 0, scale, jnp.finfo(scale.dtype).eps)),
        shift_std=all_rows(jnp.where(used, unit * regression.slope_std(), 0)),
        df=None if plug_in else all_rows(df),
        groups=groups,
        reading="constant" if reading == "auto" else reading,
        scaled=scaled,
    )


def _log_score(rows: _Regression, slope: Float[Array, " groups"] | None) -> Float[Array, " groups"]:
    """The weighted sum of the leave-one-out log densities of all z within each group, with a slope, or with slope 0.

    Let `h = w u^2 / sum(w u^2)`, `e = z - slope u` and `R = sum(w e^2)`. The leave-one-out error of a row is then
    `e / (1 - h)`, and the weighted sum of squares of the other rows is `R - w e^2 / (1 - h)`. The other rows have one
    effective row less than all rows.
    """
    info = jnp.finfo(rows.z.dtype)
    wu = rows.w * rows.u
    products = rows.value_of_row(rows.sum(wu * rows.u))
    # 1 - h, h = w u^2 / sum(w u^2)
    rest = 1 if slope is None else jnp.maximum(1 - wu * rows.u / products, info.eps)
    residual = rows.z if slope is None else rows.z - rows.value_of_row(slope) * rows.u
    squares = rows.w * residual**2
    # The floor keeps the scale above 0 if all residuals are 0.
    total = rows.value_of_row(jnp.maximum(rows.sum(squares), info.tiny / info.eps**2))
    others = jnp.maximum(total - squares / rest, info.eps * total)
    weight = jnp.maximum(rows.value_of_row(rows.sum(rows.w)) - rows.w, info.eps)
    effective = rows.effective_rows() - 1
    df = jnp.maximum(effective - (slope is not None), 1)
    variance = others / weight * rows.value_of_row(effective / df)
    # The variance of the slope of the other rows is var(z) (sum(w^2 u^2) - w^2 u^2) / (sum(w u^2) (1 - h))^2.
    if slope is not None:
        variance = variance * (1 + rows.u**2 * (rows.value_of_row(rows.sum(wu**2)) - wu**2) / (products * rest) ** 2)
    # log p = log p(0) - log(variance) / 2 - (df + 1) / 2 log(1 + (e / (1 - h))^2 / (df variance))
    peak = student_t.log_prob(jnp.zeros_like(df), df, 0.0, 1.0)
    far = jnp.log1p((residual / rest) ** 2 / (variance * rows.value_of_row(df)))
    log_density = rows.value_of_row(peak) - 0.5 * jnp.log(variance) - 0.5 * rows.value_of_row(df + 1) * far
    score = rows.sum(jnp.where(rows.w > 0, rows.w * log_density, 0))
    return jnp.where(effective - (slope is not None) >= 1, score, -jnp.inf)
