"""The interface of all predictive distributions, and what they share: parameters as rows, and their checks."""

import abc
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import (
    AnyArray,
    JaxArray,
    by_numpy,
    is_known,
    is_on_host,
    is_working,
    keeps_known,
    namespace,
    numpy_or_jit,
)
from jaxcal.distributions._reach import EVERYWHERE, Reach
from jaxcal.distributions._rows import Rows, Values, by_buckets, replaced
from jaxcal.functional import rounding

D = TypeVar("D", bound="Distribution")
M = TypeVar("M", bound=Callable)

# Conversion to units of a table's mean and std, and back, makes three times as many rounding errors as otherwise.
# The factor is 4, a power of two, by which NumPy and XLA multiply alike: both move ends to the same bit.
ROUNDINGS = 4


def numpy_knows(distribution: "Distribution", *_: Any) -> bool:
    """Whether NumPy computes the methods of this distribution."""
    return distribution._in_numpy


def of_targets(method: M, *, when: Callable[..., bool] = numpy_knows) -> M:
    """A method of targets: NumPy computes it where `when` is true, and one compiled program elsewhere.

    JAX misreads targets of another byte order. So targets are converted here.
    """
    answer = numpy_or_jit(method, when=when, around=partial(by_buckets, rows_of=1))

    @wraps(method)
    def of_numbers(self: "Distribution", y: Any) -> JaxArray:
        return answer(self, _checks.as_floats("y", y))

    return cast("M", of_numbers)


class Distribution(Rows):
    """A predictive distribution for each of n rows.

    Wherever a method takes `y`, it is [n] or one value for all rows, and the result is [n]. `len(distribution)` is n,
    and `distribution[index]` has some of the rows, by a number, a slice, a mask or numbers. `concatenate` joins rows.

    Calibrators, metrics and plots never test the class of a distribution. They read its properties. The values of these
    properties in this class are right for a distribution with a density everywhere and quantiles at all levels. All
    properties but `reach` are static.

    Attributes:
        has_std: whether predictions have a spread, in units of which errors can be measured.
        has_density: whether there is a density at all. Atoms have none.
        is_continuous: whether rows of a positive std have a density everywhere, and no atom.
        is_location_scale: whether all rows are known to have one shape, and to differ by mean and std alone.
        has_closed_quantiles: whether a quantile costs about as much as the cdf. Else it is found by a search.
        is_out_of_fold: whether `jaxcal.out_of_fold` made the predictions. Then a model that was fitted without a row
            predicted this row, and another model will predict new data points. So no coverage guarantee follows from
            the errors of these predictions.
    """

    # Whether NumPy computes the methods for known rows, in place of a compiled program.
    _in_numpy: ClassVar[bool] = False

    has_std: ClassVar[bool] = True
    has_density: ClassVar[bool] = True
    is_continuous: ClassVar[bool] = True
    is_location_scale: ClassVar[bool] = False
    has_closed_quantiles: ClassVar[bool] = True

    is_out_of_fold: bool = eqx.field(static=True, default=False, kw_only=True, repr=False)
    mean: eqx.AbstractVar[Float[JaxArray, "*n"]]
    std: eqx.AbstractVar[Float[JaxArray, "*n"]]

    @property
    def reach(self) -> Reach:
        """The levels between which quantiles are known. Quantiles at other levels come with a warning."""
        return EVERYWHERE

    @abc.abstractmethod
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """The probability of a value of at most `y`."""

    @abc.abstractmethod
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """The log density at `y`; -inf where there is no density, for example for distributions of atoms."""

    @abc.abstractmethod
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The continuous ranked probability score, the integral of (cdf(t) - 1{y <= t})^2 dt, in y's unit."""

    @abc.abstractmethod
    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """The quantile of every row at a level in [0, 1] of its own. The levels are not checked or rounded."""

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[JaxArray, "..."]:
        """Independent random values, of shape `shape` + [n]: the quantiles at uniformly random levels."""
        return sample_by_inversion(self.quantile, key, shape, self.mean.shape, self.mean.dtype)

    @property
    def variance(self) -> Float[JaxArray, "*n"]:
        """The square of `std`, with a warning if the square leaves the range of the dtype."""
        return _checks.squared("the variance", self.std)

    def icdf(self, p: Values) -> Float[JaxArray, "..."]:
        """The quantiles at levels p in [0, 1]: [n] for one level, [n, k] for k levels.

        Quantiles that are read from calibration rows are rounded away from the median, by `functional.rounding`: up for
        p >= 1/2, else down. So an interval between two such quantiles holds the values of these rows.

        Raises:
            ValueError: if p has more than one axis, or a known level lies outside [0, 1].

        Warns:
            UserWarning: if a known level strictly between 0 and 1 is beyond `reach`. The warning says what the quantile
                is then.
        """
        levels = _checks.as_floats("p", p)
        if levels.ndim > 1:
            raise ValueError(f"p must be one level or a vector of levels; got shape {levels.shape}.")
        check_share("p", levels)
        values = self._rounded_quantiles(levels)
        self._warn_of_levels(p, values)
        return values

    @numpy_or_jit(when=numpy_knows)
    def _quantiles(self, levels: Float[JaxArray, "..."]) -> Float[JaxArray, "..."]:
        """The quantiles at checked levels, as one program."""
        return at_levels(self.quantile, levels, self.mean)

    @numpy_or_jit(when=numpy_knows, around=by_buckets)
    def _rounded_quantiles(self, levels: Float[JaxArray, "..."], side: Values | None = None) -> Float[JaxArray, "..."]:
        """The quantiles at checked levels, moved outward if calibration rows decide them, as one program.

        Args:
            levels: one level or k levels.
            side: the side of each level, as in `functional.rounding.outward`; None for `_sides(levels)`.
        """
        return self._moved(self._quantiles(levels), levels, self._sides(levels) if side is None else side)

    @property
    def _mirrors_levels(self) -> bool:
        """Whether the lower level of an interval is exactly 1 minus the upper level, so that their ranks mirror."""
        return False

    def _sides(self, levels: Float[JaxArray, "..."]) -> JaxArray:
        """The side to which the quantile at each level is rounded: -1 is down, 1 is up."""
        return namespace(levels).where(levels < 0.5, -1, 1)

    def _moved(
        self, values: Float[JaxArray, "..."], levels: Float[JaxArray, "..."], side: Values
    ) -> Float[JaxArray, "..."]:
        """The quantiles at these levels, rounded to a side if calibration rows decide them, else unchanged."""
        return rounded_outward(values, side, *self._locations) if self._locations else values

    @property
    def _locations(self) -> tuple[Float[JaxArray, "*n"], ...]:
        """The summands of a quantile that calibration rows decide, without its multiple of the scale."""
        return ()

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[JaxArray, "*n"], Float[JaxArray, "*n"]]:
        """The ends (lower, upper) of the central interval: the quantiles at (1 -+ confidence_level) / 2.

        If calibration rows decide the ends, the ends are rounded outward, as in `icdf`.

        Raises:
            ValueError: if `confidence_level` is not one number between 0 and 1.

        Warns:
            UserWarning: as `icdf` does, once for both ends.
        """
        confidence_level = _checks.as_fraction("confidence_level", confidence_level)
        low, high = (1 - confidence_level) / 2, (1 + confidence_level) / 2
        low = 1 - high if self._mirrors_levels else low
        ends = self._rounded_quantiles(_checks.as_floats("levels", [low, high]), np.array([-1, 1]))
        self._warn_of_levels([low, high], ends)  # once for both
        return _ends(ends)

    def _warn_of_levels(self, p: Any, values: Float[JaxArray, "..."]) -> None:
        """Warn the caller of `icdf` or `interval` of known quantiles at levels beyond `reach`."""
        # Inside another function the user did not ask for these levels. In a program no value is known.
        if type(self).reach is Distribution.reach or is_working() or not is_known(self, p, values):
            return
        if message := _known_reach(self).warning(_checks.as_numpy_floats("p", p, float), values):
            _checks.warn(message)


@keeps_known
def _known_reach(distribution: Distribution) -> Reach:
    """The reach as known numbers.

    On a CPU NumPy computes it, so that a warning compiles nothing. From an accelerator only the fields are copied that
    the levels depend on.
    """
    return by_numpy(lambda known: known.reach, distribution) if is_on_host(distribution) else distribution.reach


@numpy_or_jit
def _ends(both: Float[JaxArray, "*n 2"]) -> tuple[Float[JaxArray, "*n"], Float[JaxArray, "*n"]]:
    """The quantiles at two levels, as a pair."""
    return both[..., 0], both[..., 1]


def marked_out_of_fold(distribution: D) -> D:
    """The same predictions, marked as out-of-fold."""
    return replaced(distribution, is_out_of_fold=True)


@keeps_known
def as_parameters(*, outputs: bool = False, **parameters: ArrayLike) -> list[JaxArray]:
    """The parameters as vectors [n] of one dtype.

    A number holds for all rows and does not affect the dtype. With `outputs` the parameters may be matrices [n, t] of
    several outputs.
    """
    arrays = {name: _checks.as_floats(name, values) for name, values in parameters.items()}
    sources = [array for array in arrays.values() if array.ndim] or [a[None] for a in arrays.values()]
    shape, dtype = sources[0].shape, jnp.result_type(*sources)
    rows = {name: as_parameter(a, dtype) if a.ndim else _repeated(a, shape, dtype) for name, a in arrays.items()}
    if not (outputs and len(shape) == 2 and shape[1] > 1):
        # Arrays are checked first. A number takes the shape of an array, and an error must name the array.
        order = sorted(rows, key=lambda name: arrays[name].ndim == 0)
        vectors = {name: _checks.as_vector(name, rows[name], length=shape[0]) for name in order}
        return [vectors[name] for name in rows]
    for name, row in rows.items():
        if row.shape != shape:
            raise ValueError(f"{' and '.join(rows)} must have one shape; got {shape} and for {name} {row.shape}.")
    return [_checks.as_matrix(name, row) for name, row in rows.items()]


def as_table(name: str, values: ArrayLike, *, rows: int | None = None) -> Array:
    """Values of calibration rows as a vector [L], or with `rows` as a matrix [rows, L]. They may be infinite.

    Raises:
        ValueError: if the values have another shape, or a known value is NaN.
    """
    array = _checks.as_floats(name, values) if rows is None else _checks.as_numbers(name, values)
    if rows is None and array.ndim != 1:
        raise ValueError(f"{name} must have shape (n,); got {array.shape}{_checks.hint_of_column(name, array)}")
    _checks.check_length(name, array, rows)
    if not _checks.is_traced(array) and (missing := int(np.isnan(np.asarray(array)).sum())):
        raise ValueError(f"{name} holds {missing} values that are NaN.")
    return array


def as_parameter(values: JaxArray, dtype: np.dtype) -> JaxArray:
    """Checked values as an array of this dtype. A NumPy array that `vmap` passes through becomes one of JAX."""
    return jnp.array(values, dtype) if _checks.is_traced(values) else values.astype(dtype)


def _repeated(value: Float[JaxArray, ""], shape: tuple[int, ...], dtype: np.dtype) -> JaxArray:
    """An array of this shape with one number in every place. A known number needs no program for the shape."""
    if _checks.is_traced(value):
        return jnp.full(shape, value, dtype)
    array: Any = np.full(shape, value, dtype)
    return array if is_working() else jax.device_put(array)


def match(y: ArrayLike, rows: JaxArray) -> JaxArray:
    """`y` in the dtype and the shape of the rows."""
    values = _checks.as_floats("y", y).astype(rows.dtype)
    if values.ndim > rows.ndim or values.shape != rows.shape[rows.ndim - values.ndim :]:
        hint = _checks.hint_of_column("y", values)
        raise ValueError(f"y must be one number or have shape {rows.shape}; got {values.shape}{hint}")
    return namespace(values, rows).broadcast_to(values, rows.shape)


def standardize(y: JaxArray, loc: JaxArray, scale: JaxArray) -> JaxArray:
    """(y - loc) / scale, infinite where the scale is 0, so that a cdf becomes a step."""
    xp = namespace(y, loc, scale)
    positive, step = scale > 0, xp.where(y >= loc, xp.full_like(loc, np.inf), -np.inf)
    return xp.where(positive, (y - loc) / xp.where(positive, scale, 1), step)


def place(z: JaxArray, loc: JaxArray, scale: JaxArray) -> JaxArray:
    """Values loc + scale * z for z [..., n]. Where the scale is 0 they are loc, even if z is infinite."""
    xp = namespace(z, loc, scale)
    loc, scale = xp.broadcast_to(loc, z.shape), xp.broadcast_to(scale, z.shape)
    return loc + scale * xp.where((scale == 0) & xp.isinf(z), 0, z)


def place_levels(z: JaxArray, loc: JaxArray, scale: JaxArray) -> JaxArray:
    """Quantiles z of one level, or of k levels along a further last axis, placed in every row."""
    if z.ndim > loc.ndim:
        loc, scale = loc[..., None], scale[..., None]
    return place(namespace(z, loc).broadcast_to(z, np.broadcast_shapes(z.shape, loc.shape)), loc, scale)


def rounded_outward(
    values: Float[AnyArray, "..."], side: Any, *locations: Float[AnyArray, "..."]
) -> Float[AnyArray, "..."]:
    """Quantiles of one level, or of k levels along a further last axis, by `functional.rounding.outward`.

    Args:
        values: the quantiles, each the sum of the row's locations and a multiple of its scale.
        side: the side of each level.
        locations: the locations of the rows.
    """
    at_levels, xp = values.ndim > locations[0].ndim, namespace(values, *locations)
    row_locations = [xp.broadcast_to(each[..., None] if at_levels else each, values.shape) for each in locations]
    # The other summand is q - loc, a multiple of the scale.
    apart = [xp.where(xp.isfinite(values), values - each, 0) for each in row_locations]
    return rounding.outward(values, xp.broadcast_to(side, values.shape), *row_locations, *apart)


def reached(y: Float[AnyArray, "*n"], *locations: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
    """The largest value within rounding of y, by the rounding of quantiles with these locations."""
    return rounded_outward(y, 1, *locations)


def at_levels(
    icdf: Callable[[JaxArray], JaxArray], levels: Float[JaxArray, "..."], rows: Float[JaxArray, "*n"]
) -> Float[JaxArray, "..."]:
    """The quantiles of all rows at one level, [n], or at k levels, [n, k]."""
    xp = namespace(rows, levels)
    at = lambda level: icdf(xp.full(rows.shape, level, rows.dtype))
    if levels.ndim == 0:
        return at(levels)
    return xp.stack([at(level) for level in levels], axis=-1) if xp is np else jax.vmap(at, out_axes=-1)(levels)


def sample_by_inversion(
    icdf: Callable[[Array], Array], key: PRNGKeyArray, shape: tuple[int, ...], rows: tuple[int, ...], dtype: np.dtype
) -> Float[Array, "..."]:
    """The quantiles of rows at uniformly random levels, of shape `shape` + `rows`."""
    _checks.check_key(key)
    levels = jax.random.uniform(key, (math.prod(shape), *rows), dtype)
    # Random numbers lie on a grid. Half a step up they are never 0, where a quantile may be infinite.
    return jax.vmap(icdf)(levels + float(jnp.finfo(dtype).epsneg)).reshape(shape + rows)


def check_share(name: str, values: JaxArray) -> None:
    """Raise ValueError unless known values lie in [0, 1]."""
    if _checks.is_traced(values):
        return
    known = np.asarray(values)  # under jit an operation on a known JAX array is traced, too
    if not ((known >= 0) & (known <= 1)).all():
        raise ValueError(f"{name} must lie between 0 and 1; got {known.min():g} to {known.max():g}.")


def check_group(z: object, kind: type, group: Array | None, new_weight: Array | None) -> None:
    """Raise ValueError unless z, if it is of this kind (tables of groups), has a group, and any other z has none."""
    if isinstance(z, kind) != (group is not None) or (group is None and new_weight is not None):
        names = [name for name, value in (("group", group), ("new_weight", new_weight)) if value is not None]
        raise ValueError(
            f"group and new_weight are for tables of groups, {kind.__name__} as z, and these need a group; got "
            f"{type(z).__name__} with {' and '.join(names) or 'neither'}."
        )


def check_increasing(name: str, values: Array, *, strictly: bool) -> None:
    """Raise ValueError unless known values increase along the last axis."""
    if _checks.is_traced(values):
        return
    known = np.asarray(values)
    before, after = known[..., :-1], known[..., 1:]
    bad = np.argwhere(after <= before if strictly else after < before)
    if bad.size:
        *row, k = bad[0].tolist()
        first, second = known[(*row, k)], known[(*row, k + 1)]
        where = f" in row {row[0]}" if row else ""
        raise ValueError(
            f"{name} must be {'strictly increasing' if strictly else 'in increasing order'}; "
            f"got {first:g} before {second:g}{where}."
        )
