"""Checks of what users pass in: shapes and dtypes at trace time, values on the host, before any loop.

Values can be checked only where they are known. Under `jit`, `vmap` or `grad` the arrays are tracers,
and the checks of values are skipped; those of shapes never are.
"""

import operator
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from numbers import Real
from typing import Any, NoReturn, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

_CALLED_THROUGH = ("jaxcal", "equinox", "jax", "jaxtyping", "beartype", "functools", "contextlib")

P = ParamSpec("P")
T = TypeVar("T")


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: keywords are taken by their old names, too, with a warning; `old="new"`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def with_old_names(*args: P.args, **options: P.kwargs) -> T:
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise TypeError(f"{old} is an old name of {new}: give one of them.")
                warnings.warn(f"{old} is called {new} now.", DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return with_old_names

    return decorate


def renamed_value(name: str, value: T, **names: str) -> T | str:
    """The new name of an option's value, with a warning where the old one came; `old="new"`."""
    if not isinstance(value, str) or value not in names:
        return value
    warnings.warn(f"{name}={value!r} is called {names[value]!r} now.", DeprecationWarning, stacklevel=3)
    return names[value]


def as_floats(name: str, values: Any) -> Float[Array, "..."]:
    """`values` as a floating-point JAX array; integers and booleans are cast to the default float dtype.

    So are numbers of an array of objects, as mixed columns of a data frame give it; there None is NaN.

    Raises:
        ValueError: if the values are not real numbers, or a tensor of PyTorch that requires its gradient.
    """
    # A copy without the gradient would be a silent loss of it, where somebody trains through what is computed here.
    if getattr(values, "requires_grad", False) is True:
        raise ValueError(
            f"{name} is a tensor that requires its gradient, which does not pass from JAX to PyTorch: give "
            f"{name}.detach().cpu().numpy()."
        )
    if _holds_objects(values):
        values = _numbers_of(name, np.asarray(values))
    try:
        if type(values) is np.ndarray and values.dtype.kind in "fiub":
            # A copy, since JAX may share the memory; made by NumPy, since JAX compiles a program for every shape.
            dtype = dtypes.canonicalize_dtype(values.dtype if values.dtype.kind == "f" else float)
            return jax.device_put(np.array(values, dtype))
        array = jnp.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of real numbers; got {type(values).__name__}.") from error
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool:
        return array.astype(float)
    raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}.")


def _holds_objects(values: Any) -> bool:
    """Whether values are an array of objects or strings, or a series of pandas or polars that holds such."""
    if isinstance(values, jax.Array) or not (hasattr(values, "dtype") and hasattr(values, "__array__")):
        return False
    return getattr(values.dtype, "kind", "O") in "OUS" and np.asarray(values).dtype.kind in "OUS"


def _numbers_of(name: str, values: np.ndarray) -> np.ndarray:
    """The numbers of an array of objects; NaN where one is missing.

    Raises:
        ValueError: if one is no real number, or too large.
    """
    flat = values.ravel()
    is_number = np.array([isinstance(each, Real | np.bool_) for each in flat], bool)
    is_missing = np.array([_is_missing(each) for each in flat], bool)
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
    """Raise the ValueError for what is no number: what the first is, and where."""
    row, *place = map(int, np.argwhere(bad)[0]) if bad.ndim else (0,)
    first = values[bad][0]
    shown = repr(first.item() if isinstance(first, np.generic) else first)
    where, instead = f"row {row}", "give numbers."
    if bad.ndim == 2:
        others = np.flatnonzero(bad.any(axis=0)).tolist()
        where += f" of column {place[0]}"
        if others[1:]:
            where += f"; columns {', '.join(map(str, others))} hold such"
        instead = "give the data frame itself, whose labels become indicators, or numbers."
    raise ValueError(f"{name} must be an array of real numbers; got {shown} in {where}: {instead}")


def as_vector(name: str, values: Any, *, length: int | None = None) -> Float[Array, " n"]:
    """`values` as a vector [n] of finite numbers.

    Raises:
        ValueError: if the shape is not (n,), n is not `length` (where given), or a value is NaN or infinite.
    """
    array = as_floats(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (n,); got {array.shape}{hint_of_column(name, array)}")
    check_length(name, array, length)
    check_finite(name, array)
    return array


def hint_of_column(name: str, array: Array) -> str:
    """The end of a message about the shape of an array that should be a vector."""
    return f": did you mean {name}[:, 0]?" if array.ndim == 2 and array.shape[1] == 1 else "."


def as_matrix(name: str, values: Any, *, length: int | None = None) -> Float[Array, "n d"]:
    """`values` as a matrix [n, d] of finite numbers, one row a point; a vector [n] is one column.

    Raises:
        ValueError: if the shape is not (n, d), n is not `length` (where given), or a value is NaN or infinite.
    """
    array = as_numbers(name, values)
    check_length(name, array, length)
    check_finite(name, array)
    return array


def as_numbers(name: str, values: Any) -> Float[Array, "n d"]:
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


def as_weights(values: Any, length: int) -> Float[Array, " n"] | None:
    """Weights of rows as a vector [n], or None.

    Raises:
        ValueError: if the shape is not (n,), or a known one is negative, NaN or infinite, or all are 0.
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
        labels: of the groups.
        number: the number of each row's group [n].
        weights: of the rows [n].
    """
    total = np.bincount(number, np.asarray(weights), minlength=len(labels))
    if (total == 0).any():
        label = labels[total == 0][0].item()
        raise ValueError(f"the weights of group {label!r} are all 0: at least one of its rows must count.")


def as_labels(name: str, labels: Any, length: int) -> np.ndarray:
    """Labels of rows, numbers or strings, as a NumPy array [n].

    Raises:
        TypeError: if they are traced.
        ValueError: if they are not as many as the rows, or one is missing or NaN.
    """
    if is_traced(labels):
        raise TypeError(f"{name} is traced, but its values must be known: call this outside jit, vmap and grad.")
    found = np.asarray(labels)
    if found.dtype == object and all(isinstance(label, str) for label in found):  # as data frames have them
        found = found.astype(str)
    if found.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), a label for each row; got {found.shape}.")
    missing = sum(_is_missing(label) for label in found) if found.dtype == object else int((found != found).sum())
    if missing:
        raise ValueError(f"{name} holds {missing} labels that are NaN or None: give each row a label.")
    return found


def check_finite(name: str, array: ArrayLike) -> None:
    """Raise ValueError if a known value is NaN or infinite; say how many are, and which is the first."""
    if is_traced(array):
        return
    bad = ~np.isfinite(np.asarray(array))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{name} holds {int(bad.sum())} values that are NaN or infinite, the first at index {where}.")


def check_length(name: str, array: Array | np.ndarray, length: int | None) -> None:
    """Raise ValueError if there are no rows, or not `length` (where given)."""
    if array.shape[0] == 0:
        raise ValueError(f"{name} is empty: its shape is {array.shape}.")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} has {array.shape[0]} rows where {length} are expected: the lengths must match.")


def check_columns(name: str, array: Array, number: int, fitted: str) -> None:
    """Raise ValueError if the columns are not as many as something was fitted on: "the network was trained on"."""
    if array.shape[1] != number:
        raise ValueError(f"{name} has {array.shape[1]} columns; {fitted} {number}.")


def check_rows(name: str, array: Array, at_least: int) -> None:
    """Raise ValueError if there are fewer rows than `at_least`."""
    if array.shape[0] < at_least:
        raise ValueError(f"{name} has {array.shape[0]} rows; at least {at_least} are needed.")


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raise ValueError if `value` is none of `choices`; quote them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def check_alone(given: str, **others: object) -> None:
    """Raise ValueError if one of the others, which do not go with what is given, is not None.

    Args:
        given: what, and why it goes without them, a clause: "steps=3 is a training on all rows".
        others: by name.
    """
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{given}: it cannot go with {name}. Leave one of them out.")


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError unless a count is a whole number, and not below `minimum`."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number; got {value!r}.") from error
    if count < minimum:
        raise ValueError(f"{name} must be at least {minimum}; got {value}.")


def check_positive(name: str, value: ArrayLike) -> None:
    """Raise ValueError unless every known value is real and positive, in the precision in use, too."""
    if is_traced(value):
        return
    values = np.asarray(value)
    if np.iscomplexobj(values) or not np.all(values > 0):
        raise ValueError(f"{name} must be positive; got {value}.")
    dtype = dtypes.canonicalize_dtype(float)
    if not np.all(values.astype(dtype) > 0):
        raise ValueError(f"{name} must be positive; got {value}, which is 0 in {dtype.name}.")


def check_not_negative(name: str, value: ArrayLike) -> None:
    """Raise ValueError if a known value is negative, NaN or complex."""
    if not is_traced(value) and (np.iscomplexobj(value) or not np.all(np.asarray(value) >= 0)):
        raise ValueError(f"{name} must not be negative; got {value}.")


def check_varies(name: str, targets: ArrayLike, size: ArrayLike = 0) -> None:
    """Raise ValueError if known targets, made of numbers of up to `size`, do not vary by more than their rounding."""
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
    values = np.asarray(value, dtype=float)
    bad = values[~((values > 0) & (values < 1))]
    if bad.size:
        hint = f": did you mean {bad.flat[0] / 100:g}?" if 1 < bad.flat[0] < 100 else "."
        raise ValueError(f"{name} must lie between 0 and 1; got {bad.flat[0]:g}{hint}")


def squared(name: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
    """`value` squared; a warning where a known square leaves the range of its dtype."""
    square = value**2
    if not is_traced(square) and _leaves_the_range(np.asarray(value), np.asarray(square)):
        warnings.warn(
            f"{name} is in squared units and leaves the range of {square.dtype}, as 0 or infinite: take its root, or "
            "another unit.",
            stacklevel=3,
        )
    return square


def _leaves_the_range(value: np.ndarray, square: np.ndarray) -> bool:
    return bool((np.isfinite(value) & (value != 0) & ((square == 0) | np.isinf(square))).any())


def check_known(models: str, *arrays: Any) -> None:
    """Raise TypeError, in the name of models of NumPy packages, if an array is traced by a transformation of JAX."""
    if is_traced(*arrays):
        raise TypeError(f"{models} are NumPy models: neither fit nor prediction runs under jit, vmap or grad.")


def check_key(key: Any, name: str = "key") -> None:
    """Raise TypeError unless it is one random key of JAX: of `jax.random.key`, or its numbers, of `jax.random.PRNGKey`.

    Example:
        >>> check_key(jax.random.key(0))
        >>> check_key(0)
        Traceback (most recent call last):
        TypeError: key must be a random key; got 0: did you mean jax.random.key(0)?
    """
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, dtypes.prng_key) and key.ndim == 0:
        return
    if is_array and key.dtype == np.uint32 and key.shape in ((2,), (4,)):  # of threefry, of rbg
        return
    if isinstance(key, int | np.integer):
        raise TypeError(f"{name} must be a random key; got {key}: did you mean jax.random.key({key})?")
    got = f"an array of dtype {key.dtype} and shape {key.shape}" if is_array else repr(key)
    raise TypeError(f"{name} must be one random key, such as jax.random.key(0); got {got}.")


def warn(message: str) -> None:
    """A UserWarning at the first line outside of jaxcal, and of what its functions are called through."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _CALLED_THROUGH:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def is_traced(*arrays: Any) -> bool:
    """Whether a value is unknown because a transformation is tracing it."""
    return any(isinstance(array, Tracer) for array in arrays)


def without_derivative(tree: T, what: str, instead: str) -> T:
    """The arrays as they are; TypeError where a derivative by them is asked for.

    Args:
        tree: arrays, and what else there is.
        what: has no derivative: "mlp.fit".
        instead: what to do, a clause: "give steps= for ...".
    """
    refuse = lambda leaf: _identity(what, instead, leaf) if eqx.is_inexact_array(leaf) else leaf
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
