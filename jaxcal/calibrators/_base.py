"""Code that calibrators share: checks of the base predictions, their errors, and the table of sorted errors."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Real

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, bucket, can_be_filled, filled, namespace, numpy_or_jit
from jaxcal.distributions import Distribution
from jaxcal.distributions._rows import by_buckets
from jaxcal.frames.columns import Categorical, Columns, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.functional import rounding
from jaxcal.functional.quantiles import CONFORMAL_RULES, smallest_table, smoothed_table
from jaxcal.guarantee import Guarantee

R = TypeVar("R", bound=tuple)
W = TypeVar("W", bound=Any)

# The default levels of intervals that a fit makes.
_CONFIDENCE_LEVELS = (0.5, 0.8, 0.9, 0.95)
# The default levels of a distribution that is given by its quantiles. Every twentieth is a decile.
FINE_LEVELS = tuple(step / 200 for step in range(1, 200))


class CalibrationData(NamedTuple):
    """Inputs, the model's means and targets."""

    x: Float[Array, "n d"]
    mean: Float[Array, " n"]
    y: Float[Array, " n"]


def checked_rows(x: Table, base: Distribution, y: Series, categorical: Categorical) -> tuple[Columns, CalibrationData]:
    """The columns of x and checked rows, for methods that use the inputs and, of `base`, only the mean.

    Raises:
        TypeError: if `base` is not a Distribution.
        ValueError: if x, y or base is empty, not finite or of the wrong shape; otherwise as `as_data`.
    """
    columns, x, y = as_data(x, y, categorical, at_least=1)
    check_base(base, y.shape[0])
    return columns, CalibrationData(x, base.mean, y)


def rows_that_count(rows: R, weights: Float[Array, " n"] | None) -> tuple[R, Float[Array, " m"] | None]:
    """The rows and their weights without the rows of known weight 0; None in place of known weights that are all equal.

    So a row of weight 0 has no effect at all, and equal weights, of whatever size, change no bit of a fit.

    Args:
        rows: arrays with a leading axis of rows.
        weights: checked weights of the rows.
    """
    if weights is None or _checks.is_traced(weights):
        return rows, weights
    known = np.asarray(weights)
    if not known.all():
        take = lambda a: a[known > 0] if _checks.is_traced(a) else jax.device_put(np.asarray(a)[known > 0])
        rows, known = jax.tree.map(take, rows), known[known > 0]
    return rows, None if (known == known[0]).all() else jax.device_put(known)


def in_bucket(rows: W) -> W:
    """The rows, filled up to the size of a bucket with rows of weight 0: nearby numbers of rows share a program.

    Rows that cannot be filled up stay as they are.

    Args:
        rows: a named tuple of arrays with a leading axis of rows. Its field `weights` may be None, for equal weights.
    """
    if not can_be_filled(rows):
        return rows
    values = np.asarray(rows[0])
    number, size = len(values), bucket(len(values))
    weights = np.ones(number, values.dtype) if rows.weights is None else np.asarray(rows.weights)
    return filled(rows, size)._replace(weights=jax.device_put(np.pad(weights, (0, size - number))))


def check_base(base: object, length: int | None = None, *, outputs: bool = False) -> None:
    """Raise unless `base` is a Distribution of finite means and stds, with `length` rows unless that is None.

    A std may be 0, since not every method uses it: a forest predicts 0 where all targets of a leaf are equal.

    Args:
        base: the predictions.
        length: the number of rows expected.
        outputs: whether the predictions may be of several outputs, [n, t].

    Raises:
        TypeError: if `base` is not a Distribution.
        ValueError: if its mean or std is not finite or of that shape.
    """
    if not isinstance(base, Distribution):
        raise TypeError(
            f"base must be a Distribution; got {type(base).__name__}. "
            "Wrap point predictions as jaxcal.Point(mean), means and stds as jaxcal.Normal(mean, std)."
        )
    checked = _checks.as_matrix if outputs and base.mean.ndim == 2 else _checks.as_vector
    checked("base.mean", base.mean, length=length)
    if not base.has_std:
        return
    std = checked("base.std", base.std, length=length)
    if _checks.is_traced(std):
        return
    known, least = np.asarray(std), np.finfo(std.dtype).tiny  # XLA takes a smaller number for 0
    bad = np.argwhere((known > 0) & (known < least))
    if len(bad):
        raise ValueError(
            f"base.std must be at least {least:.2g}, the least normal number of {std.dtype}, or 0; "
            f"{_are_not(known, bad)}. Give y and base in another unit."
        )


def check_positive_std(base: Distribution, instead: str) -> None:
    """Raise ValueError if base has a std and a known one is 0, for a method that divides by every std.

    Args:
        base: checked predictions.
        instead: what to do, a clause: "take score='absolute'".
    """
    if not base.has_std or _checks.is_traced(std := base.std):
        return
    known = np.asarray(std)
    bad = np.argwhere(known <= 0)
    if len(bad):
        raise ValueError(f"base.std must be positive; {_are_not(known, bad)}: {instead}.")


def _are_not(values: np.ndarray, bad: np.ndarray) -> str:
    """The end of a message: how many values are bad, and the first of them."""
    index = tuple(int(i) for i in bad[0])
    return f"{len(bad)} values are not, the first at index {index[0] if len(index) == 1 else index} ({values[index]:g})"


def as_levels(levels: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Checked levels of quantiles, as plain numbers.

    Raises:
        ValueError: if they are no vector, or an empty one; if one lies outside (0, 1); or if they do not increase.
    """
    values = _checks.as_numpy_floats("levels", levels, float)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"levels must be a vector of at least one level; got shape {values.shape}.")
    _checks.check_fraction("levels", values)
    if np.any(np.diff(values) <= 0):
        raise ValueError(f"levels must be strictly increasing; got {levels}.")
    return tuple(values.tolist())


def as_confidence_levels(wanted: Sequence[float] | None) -> tuple[float, ...]:
    """Checked levels of intervals in increasing order, each once; 0.5, 0.8, 0.9 and 0.95 for None.

    Raises:
        ValueError: if there are none, or one lies outside (0, 1).
    """
    levels = _checks.as_numpy_floats("confidence_levels", _CONFIDENCE_LEVELS if wanted is None else wanted, float)
    if levels.ndim != 1:
        raise ValueError(f"confidence_levels must be a vector of levels; got shape {levels.shape}.")
    _checks.check_length("confidence_levels", levels, None)
    _checks.check_fraction("confidence_levels", levels)
    return tuple(np.unique(levels).tolist())


def check_rows_reach(rows: int, confidence_level: float) -> None:
    """Raise ValueError if the interval at this level, from the absolute errors of `rows` rows, is infinite."""
    if rows < (needed := smallest_table(confidence_level)):
        raise ValueError(
            f"{rows} rows are too few for confidence level {confidence_level:g}: at least {needed} are needed. "
            "Give more rows, or lower confidence_levels."
        )


def location_and_scale(base: Distribution, scaled: bool) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """The means and the `error_scale` of checked predictions, [n] each: an error z is put back as mean + scale z.

    Raises:
        TypeError: if `base` is not a Distribution.
        ValueError: if its mean or std is not finite, or if it is a `Point` and `scaled` is set.
    """
    check_base(base)
    return base.mean, error_scale(base, scaled)


def is_scaled(score: str | None, base: Distribution) -> bool:
    """Whether errors are measured in predicted stds: the score says so, or it is None and base has a std.

    Raises:
        ValueError: if the score is none of None, "absolute" and "scaled".
    """
    _checks.check_choice("score", score, (None, "absolute", "scaled"))
    return score == "scaled" or (score is None and base.has_std)


def error_scale(base: Distribution, scaled: bool) -> Float[Array, "*n"]:
    """The scale that errors are divided by: the predicted stds [n] if `scaled`, else 1, for errors in the unit of y.

    Raises:
        ValueError: if `scaled` is set and `base` is a `Point`, which has no std.
    """
    if scaled and not base.has_std:
        raise ValueError(
            f"base is a {type(base).__name__}, but errors are measured in predicted stds: it must have a std. Give "
            "a base with a std, such as jaxcal.Normal(mean, std)."
        )
    return base.std if scaled else _ones(base.mean)


@numpy_or_jit
def in_order(values: Float[AnyArray, " l"]) -> Float[AnyArray, " l"]:
    """The values in increasing order."""
    return namespace(values).sort(values)


@numpy_or_jit
def _ones(values: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    return namespace(values).ones_like(values)


# Advice that uses no std, for a message about stds that are 0.
_POINT = "give jaxcal.Point(base.mean) as base, for errors on the scale of y"
AS_POINT = f"{_POINT}, or in a pipeline take jaxcal.conformal.fit with score='absolute'"
ABSOLUTE = f"take score='absolute', or {_POINT}"


def standardized_errors(
    base: Distribution, y: Float[Array, " l"], scaled: bool, *, finite: bool = False, instead: str = AS_POINT
) -> Float[Array, " l"]:
    """The signed errors (y - mean) / scale of every row.

    Where the scale is 0, an error of 0 stays 0 and any other error is infinite. Intervals at high levels may
    then be infinite, too.

    Args:
        base: checked predictions.
        y: targets.
        scaled: see `error_scale`.
        finite: whether infinite errors raise an error, for methods that compute with them.
        instead: what to do about infinite errors, a clause.

    Raises:
        ValueError: if an error is not a number, or if it is infinite and `finite` is set; also as `error_scale` does.

    Warns:
        UserWarning: if known errors are infinite.
    """
    scale = error_scale(base, scaled)
    z = in_scales(y, base.mean, scale)
    if _checks.is_traced(z, scale):
        return z
    known, has_scale = np.asarray(z), np.asarray(scale) != 0
    _checks.check_finite("(y - base.mean) / base.std", np.where(has_scale, known, 0))
    infinite = np.flatnonzero(~np.isfinite(known))
    if infinite.size:
        what = (
            f"(y - base.mean) / base.std is infinite in {infinite.size} of {known.size} rows, the first at index "
            f"{infinite[0]}, where base.std is 0"
        )
        if finite:
            raise ValueError(f"{what}: {instead}.")
        _checks.warn(f"{what}. Intervals at high levels may be infinite, too: {instead}.")
    return z


@numpy_or_jit
def in_scales(
    y: Float[AnyArray, " l"], mean: Float[AnyArray, " l"], scale: Float[AnyArray, " l"]
) -> Float[AnyArray, " l"]:
    """(y - mean) / scale; if the scale is 0: 0 where y is the mean up to rounding, else infinite."""
    xp, error, positive = namespace(y), y - mean, scale > 0
    same = xp.abs(error) <= rounding.tolerance(y, mean)
    without = xp.where(same, 0, xp.sign(error) * np.inf)
    return xp.where(positive, error / xp.where(positive, scale, 1), without)


@numpy_or_jit
def levels_of_sample(z: Float[AnyArray, "*runs l"]) -> Float[AnyArray, " l"]:
    """The levels k / (L + 1) at which L sorted values cover a new exchangeable one."""
    size = z.shape[-1]
    return namespace(z).arange(1, size + 1, dtype=z.dtype) / (size + 1)


def probabilities(base: Distribution, y: Float[Array, " l"], *, compiled: bool = False) -> Float[Array, " l"]:
    """The probabilities base.cdf(y) of every row.

    Raises:
        ValueError: if base is a `Point`, if a probability is 0 or 1, or if base has no density at a y.
    """
    check_density(base)
    p = cdf_of(base, y) if compiled else base.cdf(y)
    if (bad := rows_without_probability(base, y, p)).size:
        raise ValueError(
            "score='cdf' needs a base.cdf(y) strictly between 0 and 1, and a density of base at y. "
            f"{bad.size} rows, the first at index {bad[0]}, lack one of the two: take score='signed'."
        )
    return p


@partial(by_buckets, rows_of=1)
@_programs.jit
def cdf_of(base: Distribution, y: Float[Array, " l"]) -> Float[Array, " l"]:
    """base.cdf(y) by a program, as `Recalibrated` with a rule computes it; NumPy's rounding may part equal targets."""
    return base.cdf(y)


def rows_without_probability(base: Distribution, y: Float[Array, " l"], p: Float[Array, " l"]) -> np.ndarray:
    """The numbers of the rows where the known probability p is 0 or 1, or base has no density at y."""
    base, y, p = lax.stop_gradient((base, y, p))  # under an eager jax.grad the values are known
    if _checks.is_traced(p):
        return np.zeros(0, int)
    known, density = np.asarray(p), np.asarray(base.log_prob(y))
    return np.flatnonzero(~((known > 0) & (known < 1) & np.isfinite(density)))


def check_density(base: Distribution) -> None:
    """Raise ValueError if base has no density, as a `Point`, since its cdf then jumps."""
    if not base.has_density:
        raise ValueError(
            f"base is a {type(base).__name__}: score='cdf' needs distributions that have a density. Give a "
            "base with a density, or use score='signed'."
        )


def coverage_guarantee(confidence_level: float, num_calibration: int, rule: str, out_of_fold: bool) -> Guarantee:
    """The guarantee that a rule gives for the errors of `num_calibration` rows.

    Raises:
        ValueError: if the errors are out of fold, or the confidence level lies outside (0, 1).
    """
    check_not_out_of_fold(out_of_fold)
    return Guarantee.of(confidence_level, num_calibration, rule)


def check_guarantees(rule: str) -> None:
    """Raise ValueError if a table that is read by this rule guarantees no coverage of central intervals."""
    if rule not in CONFORMAL_RULES:
        raise ValueError(f"tables read by the rule {rule!r} guarantee nothing: use conformal.fit without a rule.")


def check_smoothing(smoothing: float | None, **others: object) -> None:
    """Raise ValueError unless smoothing is None, or smoothing lies in (0, 1/2] and all others are None."""
    if smoothing is None:
        return
    if not 0 < smoothing <= 0.5:
        raise ValueError(f"smoothing must lie between 0 and 1/2; got {smoothing:g}.")
    _checks.check_alone(f"smoothing={smoothing:g} is for one table of all rows", **others)


def smoothed(table: Float[AnyArray, " l"], smoothing: Real[ArrayLike, ""] | None) -> Float[AnyArray, " l"]:
    """The sorted table, smoothed unless `smoothing` is None."""
    return table if smoothing is None else smoothed_table(table, smoothing)


def check_not_smoothed(smoothed: bool) -> None:
    """Raise ValueError if the table is smoothed, since it then guarantees nothing."""
    if smoothed:
        raise ValueError(
            "the table is smoothed: its values are no scores of calibration rows, so that no coverage guarantee "
            "follows from their ranks. Fit without smoothing for a guarantee."
        )


def check_not_out_of_fold(out_of_fold: bool) -> None:
    """Raise ValueError if the errors are out of fold, since they then guarantee nothing."""
    if out_of_fold:
        raise ValueError(
            "the errors are out of fold: they come from other models than the model that predicts, and give no "
            "coverage guarantee. Errors of data points that were set aside do, as with "
            "jaxcal.pipeline.fit(method='split')."
        )


def facts_of(base: Distribution, y: Float[Array, " l"], smoothing: float | None) -> dict[str, Any]:
    """Fields of a calibrator: the facts about the calibration rows that its table of scores keeps."""
    return {"num_calibration": y.shape[0], "out_of_fold": base.is_out_of_fold, "smoothed": smoothing is not None}


def num_among(rows: tuple[Array, Array], known: tuple[Array, Array]) -> int:
    """How many of the rows (x, y) are among the known rows; 0 if chance explains the number, or a value is unknown.

    If all rows follow one distribution, a row is among the known rows as often as a known row equals another known row.
    Chance explains up to three standard deviations more.
    """
    if _checks.is_traced(*rows, *known):
        return 0
    dtype = min((array.dtype for array in (*rows, *known)), key=lambda dtype: dtype.itemsize)
    # -0 and 0 are one number.
    keys_of = lambda part: [row.tobytes() for row in np.column_stack(part).astype(dtype) + np.zeros((), dtype)]
    keys, counts = keys_of(rows), Counter(keys_of(known))
    number, twins = sum(key in counts for key in keys), sum(count for count in counts.values() if count > 1)
    # The expected fraction of matches is p = (twins + 1) / (N + 2). Chance explains m p + 3 sqrt(m p (1 - p)) of m.
    expected = (twins + 1) / (counts.total() + 2)
    usual = len(keys) * expected + 3 * math.sqrt(len(keys) * expected * (1 - expected))
    return number if number > usual else 0


def warn_without_width(z: Float[Array, " l"]) -> None:
    """Warn the caller of a fit if all its errors are zero."""
    if not _checks.is_traced(z) and not np.asarray(z).any():
        _checks.warn("y equals base.mean in every row: no prediction has a width.")
