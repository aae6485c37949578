"""Rows of predictions: their number and their selection. Distributions of numbers and of vectors share this."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, Real

from jaxcal import _checks, _programs
from jaxcal._numpy import bucket, can_be_filled, filled, in_jax

T = TypeVar("T")
M = TypeVar("M", bound=eqx.Module)
R = TypeVar("R", bound="Rows")

# Larger numbers of rows are not padded: each call would copy all rows.
MANY = 2**16

# Values for rows, levels or a table: a number, or an array of some shape.
Values = Real[ArrayLike, "..."]


class Rows(eqx.Module):
    """Predictions in rows: `len(predictions)` is their number, and `predictions[index]` is a selection of the rows.

    A selection is of the same class. An array of a class has a row for each prediction on its first axis, unless the
    class names it in `_shared`.
    """

    # The names of the fields that all rows share, with their number of axes. A field of several arrays has the number
    # of axes of its first array.
    _shared: ClassVar[Mapping[str, int]] = {}
    # The number of rows, if rows may be padded and cut off. It is None for several runs, and for classes that take rows
    # in another way.
    _num_filled: ClassVar[Any] = None

    def __len__(self) -> int:
        """The number of rows."""
        axes, leaves = jax.tree.leaves(self._axes()), jax.tree.leaves(self)
        size, axis = next((leaf.shape, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis >= 0)
        if len(size) <= axis:
            raise TypeError(f"a {type(self).__name__} of one row without an axis has no length.")
        return size[axis]

    def __getitem__(self: R, index: Any) -> R:
        """The rows that an index selects, in the order of the index, by NumPy's rules for a vector.

        A number gives one row, of shape (1,), since all methods and metrics take rows. Under `jit` numbers of rows may
        be traced. A traced number that is out of range selects NaN.

        Args:
            index: a number, a slice, a mask [n] or numbers [k]; negative numbers count from the end.

        Raises:
            IndexError: if the index is none of these, or known numbers are out of range.
            TypeError: if a mask is traced.
            ValueError: if no row is selected, or the arrays have a further axis, of runs.
        """
        return self._take(_selected(index, len(self)))

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(
            f"a {type(self).__name__} is not iterated over, which would be slow: take its arrays, such as mean, or one "
            "row by its number, predictions[0]."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is no array: take one of its arrays, such as mean.")

    def _take(self: R, rows: Int[Array | np.ndarray, " k"]) -> R:
        """The rows of these numbers, which are not negative. No program is compiled for each count of rows."""
        if can_be_filled(self, rows):
            return in_jax(_on_host(self, np.asarray(rows)))
        return _gathered(self, rows)

    def _axes(self: R) -> R:
        """The axis of rows of every array; -1 for an array that all rows share.

        Raises:
            ValueError: if the arrays have a further axis, of runs.
        """
        self._check_one_run()
        axes: dict[str, Any] = {name: jax.tree.map(lambda _: -1, getattr(self, name)) for name in self._shared}
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), Rows):
                axes[field.name] = value._axes()
        return replaced(jax.tree.map(lambda _: 0, self), **axes)

    def _check_one_run(self) -> None:
        for name, ndim in self._shared.items():
            for first in jax.tree.leaves(getattr(self, name))[:1]:
                if first.ndim > ndim:
                    raise ValueError(
                        f"this {type(self).__name__} is a stack of several runs, whose {name} has shape {first.shape}: "
                        "take the rows of each run under jax.vmap."
                    )


def by_buckets(program: Callable[..., T], *, rows_of: int = 0) -> Callable[..., T]:
    """A program of predictions and values that is compiled once for nearby numbers of rows, by padding.

    The results have a row for each prediction. Rows are padded only on a CPU, and for classes with `_num_filled`.

    Args:
        program: `program(predictions, *values)`.
        rows_of: how many of the values have a row for each prediction, unless they are numbers.
    """

    @wraps(program)
    def call(predictions: Any, *values: Any, **options: Any) -> T:
        is_ours = type(predictions).__module__.partition(".")[0] == "jaxcal"  # a user's class may hold other arrays
        number = predictions._num_filled if is_ours else None
        is_of_rows = lambda each: np.shape(each) in ((), (number,))
        if number is None or number == bucket(number) or number > MANY or not all(map(is_of_rows, values[:rows_of])):
            return program(predictions, *values, **options)
        if not can_be_filled(predictions, values):
            return program(predictions, *values, **options)
        size = bucket(number)
        padded = [
            filled(each, size) if place < rows_of and np.ndim(each) else each for place, each in enumerate(values)
        ]
        places = np.where(np.arange(size) < number, np.arange(size), 0)
        results = program(_on_host(predictions, places), *padded, **options)
        return in_jax(jax.tree.map(lambda array: np.asarray(array)[:number], results))

    return call


def program_of_rows(method: Callable[..., T]) -> Callable[..., T]:
    """A method that is compiled as one program for nearby numbers of rows."""
    return by_buckets(_programs.jit(method))


def predicted_by_buckets(program: Callable[..., T]) -> Callable[..., T]:
    """`program(fitted, x)`, which predicts rows, compiled once for nearby numbers of rows.

    Args:
        program: gives predictions in rows, or an array of rows.
    """

    @wraps(program)
    def call(fitted: Any, x: Any) -> T:
        number = len(x)
        if number == bucket(number) or number > MANY or not can_be_filled(fitted, x):
            return program(fitted, x)
        results: Any = program(fitted, filled(x, bucket(number)))
        first: Any = _on_host(results, np.arange(number)) if isinstance(results, Rows) else np.asarray(results)[:number]
        return in_jax(first)

    return call


def _on_host(predictions: R, rows: Int[np.ndarray, " k"]) -> R:
    """The rows of these numbers, by NumPy."""
    take = lambda axis, leaf: leaf if axis < 0 else np.take(np.asarray(leaf), rows, axis=axis)
    return jax.tree.map(take, predictions._axes(), predictions)


def replaced(module: M, **fields: Any) -> M:
    """A copy of the module with other values in some fields, without the checks of its `__init__`."""
    other = copy.copy(module)
    for name, value in fields.items():
        object.__setattr__(other, name, value)  # as an __init__ would
    return other


@jax.jit
def _gathered(predictions: Any, rows: Int[Array, " k"]) -> Any:
    """The rows of these numbers, by one program."""
    take = lambda axis, leaf: leaf if axis < 0 else jnp.take(leaf, rows, axis=axis)
    return jax.tree.map(take, predictions._axes(), predictions)


def _selected(index: Any, size: int) -> Int[Array | np.ndarray, " k"]:
    """The numbers of the selected rows, not negative. Known numbers are checked."""
    if _checks.is_traced(index):
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"an index of dtype {index.dtype} is traced: only numbers of rows may be, since how many rows are "
                "selected must be known."
            )
        rows = jnp.where(index < 0, index + size, index)
    else:
        rows = np.arange(size, dtype=np.int32)[np.asarray(index) if isinstance(index, jax.Array) else index]
    if rows.ndim > 1:
        raise IndexError(f"an index must select rows by one axis; got one of shape {rows.shape}.")
    if rows.size == 0:
        raise ValueError(f"the index selects none of {size} rows: a distribution has at least one.")
    return rows.reshape(-1)
