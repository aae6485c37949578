"""Checks of users' arguments: shapes and dtypes at trace time, values on the host, before any loop.

Values can be checked only if they are known. Under `jit`, `vmap` or `grad` the arrays are tracers. Then the checks of
values are skipped, but never the checks of shapes.
"""

import operator
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from numbers import Number, Real
from typing import Any, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, DTypeLike, Float

from jaxcal import _numpy
from jaxcal._numpy import JaxArray

_CALLED_THROUGH = ("jaxcal", "equinox", "jax", "jaxtyping", "beartype", "functools", "contextlib")

T = TypeVar("T")


@_numpy.keeps_known
def as_floats(name: str, values: Any) -> Float[JaxArray, "..."]:
    """`values` as a JAX array: of float32 if they have single or half precision, else of the default float dtype.

    Inside `_numpy.by_numpy` arrays stay arrays of NumPy. Any byte order is allowed. An array of objects may hold
    numbers, for example from mixed columns of a data frame, and None in it becomes NaN. A number beyond the range of
    the dtype becomes infinite.

    Raises:
        ValueError: if the values are not real numbers, a value is masked, or they are a tensor of PyTorch that requires
            its gradient.
    """
    # A copy would lose the gradient silently if the user trains through this computation.
    if getattr(values, "requires_grad", False) is True:
        raise ValueError(
            f"{name} is a tensor that requires its gradient, which does not pass from JAX to PyTorch: give "
            f"{name}.detach().cpu().numpy()."
        )
    if _numpy.is_working():
        array: Any = np.asarray(values)
        return array if array.dtype in (np.float32, np.float64) else array.astype(_float_dtype(name, array.dtype))
    if not isinstance(values, jax.Array):
        # NumPy makes a copy: JAX may share the memory of an array, and would compile a program for every shape.
        if hasattr(values, "__array__") or _has_masked_parts(values) or _is_list_of_numbers(values):
            return jax.device_put(as_numpy_floats(name, values))
        try:
            values = jnp.asarray(values)
        except (TypeError, ValueError, OverflowError) as error:
            # NumPy can read more than JAX: objects, any byte order, large integers.
            if isinstance(values, list | tuple | Number):
                return jax.device_put(as_numpy_floats(name, values))
            raise ValueError(f"{name} must be an array of real numbers; got {type(values).__name__}.") from error
    dtype = _float_dtype(name, values.dtype)
    return values if values.dtype == dtype else values.astype(dtype)


def as_numpy_floats(name: str, values: Any, dtype: DTypeLike | None = None) -> np.ndarray:
    """Known `values` as a new array of NumPy, of this dtype, or of the dtype that `as_floats` chooses.

    Raises:
        ValueError: if they are not real numbers, or a value is masked.
    """
    array = _as_array(name, values)
    chosen = _float_dtype(name, array.dtype)
    with np.errstate(over="ignore"):
        return np.array(array, chosen if dtype is None else dtype)


def _float_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """The dtype of computations with numbers of a dtype.

    Raises:
        ValueError: if it is not a dtype of real numbers.
    """
    if dtype.kind in "mM":
        raise ValueError(f"{name} must hold real numbers; got dtype {dtype}: make numbers of them, such as days.")
    if jnp.issubdtype(dtype, jnp.floating):
        return dtypes.canonicalize_dtype(np.float32 if dtype.itemsize <= 4 else float)
    if jnp.issubdtype(dtype, jnp.integer) or dtype.kind == "b":
        return dtypes.canonicalize_dtype(float)
    raise ValueError(f"{name} must hold real numbers; got dtype {dtype}.")


def _as_array(name: str, values: Any) -> np.ndarray:
    """`values` as an array of NumPy. Objects become numbers.

    Raises:
        ValueError: if NumPy cannot read them, an object is no real number, or a value is masked.
    """
    check_not_masked(name, values)
    if str(getattr(values, "dtype", "")) == "torch.bfloat16":  # NumPy does not know this dtype
        values = values.float()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of real numbers; got {type(values).__name__}.") from error
    return _numbers_of(name, array) if array.dtype.kind in "OUS" else array


def _is_list_of_numbers(values: Any) -> bool:
    """Whether values are a list of Python's numbers."""
    return isinstance(values, list | tuple) and all(type(each) in (int, float) for each in values)


def _has_masked_parts(values: Any) -> bool:
    """Whether values are a list that holds masked arrays or values, also in nested lists."""
    is_list = isinstance(values, list | tuple)
    return is_list and any(isinstance(each, np.ma.MaskedArray) or _has_masked_parts(each) for each in values)


def check_not_masked(name: str, values: Any) -> None:
    """Raise ValueError if a mask of NumPy hides a value. The message says how many are hidden, and which is first."""
    if not (isinstance(values, np.ma.MaskedArray) or _has_masked_parts(values)):
        return
    with warnings.catch_warnings(action="ignore"):  # NumPy warns that a masked number of a list is NaN
        hidden = np.ma.getmaskarray(np.ma.asarray(values))
    if hidden.any() and hidden.ndim == 0:
        raise ValueError(f"{name} is masked: give a number.")
    if hidden.any():
        raise ValueError(
            f"{name} holds {hidden.sum()} masked values, the first at {_first_index(hidden)}: leave their rows out, or "
            "fill them."
        )


def _first_index(bad: np.ndarray) -> str:
    """The index of the first bad value of an array, in words."""
    index = tuple(int(place) for place in np.argwhere(bad)[0])
    return f"index {index[0] if len(index) == 1 else index}"


def _numbers_of(name: str, values: np.ndarray) -> np.ndarray:
    """The numbers of an array of objects, NaN where a value is missing.

    Raises:
        ValueError: if a value is no real number, or too large.
    """
    flat = values.ravel()
    is_number = np.array([isinstance(each, Real | Decimal | np.bool_) for each in flat], bool)
    is_missing = np.array([_is_missing(each) for each in flat], bool) & (values.ndim > 0)
    bad = ~(is_number | is_missing)
    if bad.any():
        _refuse_objects(name, values, bad.reshape(values.shape))
    try:
        numbers = [float(each) if known else np.nan for each, known in zip(flat, is_number, strict=True)]
    except OverflowError as error:
        raise ValueError(f"{name} holds an integer that is too large for a floating-point number.") from error
    return np.array(numbers).reshape(values.shape)


def _is_missing(value: Any) -> bool:
    """Whether a value of an array of objects is None, NaN or pandas' NA."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)


def _refuse_objects(name: str, values: np.ndarray, bad: np.ndarray) -> NoReturn:
    """Raise the ValueError for objects that are no numbers. The message shows the first of them and its place."""
    first = values[bad][0]
    shown = repr(first.item() if isinstance(first, np.generic) else first)
    if bad.ndim == 0:
        raise ValueError(f"{name} must be a real number; got {shown}.")
    row, *place = map(int, np.argwhere(bad)[0])
    where, instead = f"row {row}", "give numbers."
    if bad.ndim == 2:
        others = np.flatnonzero(bad.any(axis=0)).tolist()
        where += f" of column {place[0]}"
        if others[1:]:
            where += f"; columns {', '.join(map(str, others))} hold such"
        instead = "give the data frame itself, whose labels become indicators, or numbers."
    raise ValueError(f"{name} must be an array of real numbers; got {shown} in {where}: {instead}")


def as_vector(name: str, values: Any, *, length: int | None = None) -> Float[JaxArray, " n"]:
    """`values` as a vector [n] of finite numbers.

    Raises:
        ValueError: if the shape is not (n,), n is not `length` (if not None), or a value is NaN or infinite.
    """
    array = as_floats(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (n,); got {array.shape}{hint_of_column(name, array)}")
    check_length(name, array, length)
    check_finite(name, array)
    return array


def hint_of_column(name: str, array: JaxArray) -> str:
    """The end of a message about the shape of an array that should be a vector."""
    return f": did you mean {name}[:, 0]?" if array.ndim == 2 and array.shape[1] == 1 else "."


def as_matrix(name: str, values: Any, *, length: int | None = None) -> Float[JaxArray, "n d"]:
    """`values` as a matrix [n, d] of finite numbers, one row per data point; a vector [n] is one column.

    Raises:
        ValueError: if the shape is not (n, d), n is not `length` (if not None), or a value is NaN or infinite.
    """
    array = as_numbers(name, values)
    check_length(name, array, length)
    check_finite(name, array)
    return array


@_numpy.keeps_known
def as_numbers(name: str, values: Any) -> Float[JaxArray, "n d"]:
    """`values` as a matrix [n, d] of numbers that need not be finite; a vector [n] is one column.

    Raises:
        ValueError: if the shape is not (n, d), or there are no rows or no columns.
    """
    is_column = isinstance(values, np.ndarray | jax.Array) and values.ndim == 1
    array = as_floats(name, values[:, None] if is_column else values)
    if array.ndim != 2:
        raise ValueError(f"{name} must have shape (n, d); got {array.shape}.")
    if array.shape[1] == 0:
        raise ValueError(f"{name} has no columns: its shape is {array.shape}.")
    check_length(name, array, None)
    return array


def as_weights(values: Any, length: int) -> Float[JaxArray, " n"] | None:
    """Weights of rows as a vector [n], or None.

    Raises:
        ValueError: if the shape is not (n,), a known weight is negative, NaN or infinite, or all weights are 0.
    """
    if values is None:
        return None
    weights = as_vector("weights", values, length=length)
    check_not_negative("weights", weights)
    if not is_traced(weights) and not np.asarray(weights).any():
        raise ValueError("weights are all 0: at least one row must count.")
    return weights


def check_weights_of_groups(labels: np.ndarray, number: np.ndarray, weights: ArrayLike) -> None:
    """Raise ValueError if the known weights of all rows of a group are 0.

    Args:
        labels: the labels of the groups.
        number: the number of each row's group [n].
        weights: the weights of the rows [n].
    """
    total = np.bincount(number, np.asarray(weights), minlength=len(labels))
    if (total == 0).any():
        label = labels[total == 0][0].item()
        raise ValueError(f"the weights of group {label!r} are all 0: at least one of its rows must count.")


def as_labels(name: str, labels: Any, length: int) -> np.ndarray:
    """Labels of rows, numbers or strings, as a NumPy array [n].

    Raises:
        TypeError: if they are traced.
        ValueError: if their number is not the number of rows, or a label is missing or NaN.
    """
    if is_traced(labels):
        raise TypeError(f"{name} is traced, but its values must be known: call this outside jit, vmap and grad.")
    check_not_masked(name, labels)
    array = np.asarray(labels)
    if jnp.issubdtype(array.dtype, jnp.floating):  # labels are Python's numbers, whatever their precision is
        array = array.astype(float)
    if array.dtype == object and all(isinstance(label, str) for label in array):  # columns of data frames are such
        array = array.astype(str)
    if array.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), a label for each row; got {array.shape}.")
    missing = sum(_is_missing(label) for label in array) if array.dtype == object else int((array != array).sum())
    if missing:
        raise ValueError(f"{name} holds {missing} labels that are NaN or None: give each row a label.")
    return array


def check_finite(name: str, array: ArrayLike) -> None:
    """Raise ValueError if a known value is NaN or infinite. The message says how many are, and which is first."""
    if is_traced(array):
        return
    values = np.asarray(array)
    bad = ~np.isfinite(values)
    if bad.any():
        largest = np.finfo(values.dtype).max
        hint = f": {values.dtype} holds numbers up to {largest:.2g}." if np.isinf(values[bad][0]) else "."
        where = f", the first at {_first_index(bad)}" if bad.ndim else ""
        raise ValueError(f"{name} holds {bad.sum()} values that are NaN or infinite{where}{hint}")


def check_length(name: str, array: Array | np.ndarray, length: int | None) -> None:
    """Raise ValueError if there are no rows, or their number is not `length` (if not None)."""
    if array.shape[0] == 0:
        raise ValueError(f"{name} is empty: its shape is {array.shape}.")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} rows where {length} are expected: the lengths must match.")


def check_columns(name: str, array: Array, number: int, fitted: str) -> None:
    """Raise ValueError if the number of columns is not `number`.

    `fitted` is a clause that says what had this number of columns: "the network was trained on".
    """
    if array.shape[1] != number:
        raise ValueError(f"{name} has {array.shape[1]} columns; {fitted} {number}.")


def check_rows(name: str, array: Array, at_least: int) -> None:
    """Raise ValueError if there are fewer rows than `at_least`."""
    if array.shape[0] < at_least:
        raise ValueError(f"{name} has {array.shape[0]} rows; at least {at_least} are needed.")


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raise ValueError if `value` is none of `choices`. The message quotes the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_alone(clause: str, **others: object) -> None:
    """Raise ValueError if one of the other arguments is not None, although they exclude an argument.

    Args:
        clause: states that argument and the reason: "steps=3 is a training on all rows".
        others: the other arguments, by name.
    """
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{clause}: it cannot go with {name}. Leave one of them out.")


def options_of(name: str, value: Any, kind: type, called: str) -> dict[str, Any]:
    """The fields of an object of options, or of the defaults if it is None.

    Raises:
        TypeError: if it is of another kind.

    Example:
        >>> import jaxcal as jc
        >>> options_of("variance", {"search": "ard"}, jc.sharp_gp.Variance, "jc.sharp_gp.Variance")
        Traceback (most recent call last):
        TypeError: variance must be made by jc.sharp_gp.Variance(...); got a dict.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be made by {called}(...); got a {type(value).__name__}.")
    return dict(vars(kind() if value is None else value))


def check_at_least(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError unless a count is a whole number and at least `minimum`."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number; got {value!r}.") from error
    if count < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}.")


def check_positive(name: str, value: ArrayLike) -> None:
    """Raise ValueError unless every known value is a positive real number, also after rounding to the default dtype."""
    if is_traced(value):
        return
    values, dtype = as_numpy_floats(name, value, float), dtypes.canonicalize_dtype(float)
    _refuse(name, "be positive", values, ~(values > 0))
    with np.errstate(under="ignore"):
        _refuse(name, "be positive", values, ~(values.astype(dtype) > 0), f", which is 0 in {dtype.name}")


def check_not_negative(name: str, value: ArrayLike) -> None:
    """Raise ValueError if a known value is negative, NaN or no real number."""
    if not is_traced(value):
        values = as_numpy_floats(name, value, float)
        _refuse(name, "not be negative", values, ~(values >= 0))


def _refuse(name: str, rule: str, values: np.ndarray, bad: np.ndarray | np.bool_, why: str = "") -> None:
    """Raise ValueError if there are bad values. The message says which is first, and how many there are.

    Args:
        name: the name of the values.
        rule: the rule for the values, without "must": "be positive".
        values: all values.
        bad: which values break the rule.
        why: further words about the first bad value.
    """
    if not bad.any():
        return
    first = values[bad][0]
    if values.ndim == 0:
        raise ValueError(f"{name} must {rule}; got {first}{why}.")
    of = f", the first of {bad.sum()} such values" if bad.sum() > 1 else ""
    raise ValueError(f"{name} must {rule}; got {first:g}{why} at {_first_index(np.asarray(bad))}{of}.")


def check_varies(name: str, targets: ArrayLike, size: ArrayLike = 0) -> None:
    """Raise ValueError if known targets do not vary by more than rounding errors of numbers of up to `size`."""
    if is_traced(targets, size):
        return
    values = np.asarray(targets)
    constant = np.ptp(values, axis=0) <= 4 * np.finfo(values.dtype).eps * np.asarray(size)
    if constant.any():
        value = values[0] if values.ndim == 1 else values[0, constant.argmax()]
        raise ValueError(f"{name} constant ({value:g}): there is no uncertainty to learn from.")


def check_fraction(name: str, value: ArrayLike) -> None:
    """Raise ValueError unless every known value lies in the open interval (0, 1)."""
    if is_traced(value):
        return
    values = as_numpy_floats(name, value, float)
    bad = values[~((values > 0) & (values < 1))]
    if bad.size:
        hint = f": did you mean {bad.flat[0] / 100:g}?" if 1 < bad.flat[0] < 100 else "."
        raise ValueError(f"{name} must lie between 0 and 1; got {bad.flat[0]:g}{hint}")


def as_fraction(name: str, value: ArrayLike) -> Any:
    """One number in the open interval (0, 1). A known number becomes a number of Python, in double precision.

    Raises:
        ValueError: if it is not one real number, or a known number lies outside.
    """
    if np.ndim(value):
        raise ValueError(f"{name} must be one number; got shape {np.shape(value)}.")
    check_fraction(name, value)
    return as_floats(name, value) if is_traced(value) else as_numpy_floats(name, value, float).item()


def squared(name: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
    """`value` squared, with a warning if a known square leaves the range of its dtype."""
    square = value**2
    if not is_traced(square) and _leaves_the_range(np.asarray(value), np.asarray(square)):
        warn(
            f"{name} is in squared units and leaves the range of {square.dtype}, as 0 or infinite: take its root, or "
            "another unit."
        )
    return square


def _leaves_the_range(value: np.ndarray, square: np.ndarray) -> bool:
    return bool((np.isfinite(value) & (value != 0) & ((square == 0) | np.isinf(square))).any())


def check_known(models: str, *arrays: Any) -> None:
    """Raise TypeError if a transformation of JAX traces an array. `models` names the NumPy models in the message."""
    if is_traced(*arrays):
        raise TypeError(f"{models} are NumPy models: neither fit nor prediction runs under jit, vmap or grad.")


def as_model(fit: Callable, fitted: Any) -> Callable:
    """The result of a user's fit function, if it is a function.

    Raises:
        TypeError: if it is no function.
    """
    if callable(fitted):
        return fitted
    while isinstance(fit, partial):
        fit = fit.func
    name = getattr(fit, "__name__", type(fit).__name__)
    if fitted is None:
        raise TypeError(f"the fit function {name} returned None: is its return missing?")
    hint = ": did you mean its method predict?" if hasattr(fitted, "predict") else "."
    raise TypeError(f"the fit function {name} must return a function; got {type(fitted).__name__}{hint}")


def percent(fraction: float) -> str:
    """A fraction in percent, to two significant digits."""
    digits = np.format_float_positional(100 * fraction, precision=2, unique=False, fractional=False, trim="-")
    return f"{digits} %"


def check_key(key: Any, name: str = "key") -> None:
    """Raise TypeError unless it is one random key of JAX, by `jax.random.key` or `jax.random.PRNGKey`.

    Example:
        >>> check_key(jax.random.key(0))
        >>> check_key(0)
        Traceback (most recent call last):
        TypeError: key must be a random key; got 0: did you mean jax.random.key(0)?
    """
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, dtypes.prng_key) and key.ndim == 0:
        return
    if is_array and key.dtype == np.uint32 and key.shape in ((2,), (4,)):  # the shapes of threefry and rbg
        return
    if isinstance(key, int | np.integer):
        raise TypeError(f"{name} must be a random key; got {key}: did you mean jax.random.key({key})?")
    got = f"an array of dtype {key.dtype} and shape {key.shape}" if is_array else repr(key)
    raise TypeError(f"{name} must be one random key, such as jax.random.key(0); got {got}.")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first line outside of jaxcal, and outside of the libraries through which its functions are called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _CALLED_THROUGH:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def is_traced(*arrays: Any) -> bool:
    """Whether an array is unknown because a transformation traces it."""
    return any(isinstance(array, Tracer) for array in arrays)


def without_derivative(tree: T, what: str, instead: str) -> T:
    """The same arrays. The computation of a derivative by them raises TypeError.

    Args:
        tree: arrays, and other values.
        what: the function without a derivative: "mlp.fit".
        instead: what to do, as a clause: "give steps= for ...".
    """
    refuse = lambda leaf: _identity(what, instead, leaf) if is_traced(leaf) and eqx.is_inexact_array(leaf) else leaf
    return jax.tree.map(refuse, tree)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _identity(what: str, instead: str, array: Array) -> Array:
    return array


@_identity.defjvp
def _no_derivative(what: str, instead: str, primals: tuple, tangents: tuple) -> NoReturn:
    raise TypeError(
        f"no derivative passes through {what}: {instead}, or hold what it is fitted to constant, "
        "jax.lax.stop_gradient(...)."
    )
