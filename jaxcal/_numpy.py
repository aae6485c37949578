"""Computations by NumPy in place of compiled programs, for known arrays on a CPU.

A function is written once, for the arrays of either library: `xp = namespace(values)`. `numpy_or_jit` calls it with
arrays of NumPy if all arrays are known and on a CPU. Else the function is one compiled program.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
from jax import lax
from jax.core import Tracer
from threadpoolctl import ThreadpoolController

from jaxcal import _programs

_thread = threading.local()
# Matrices of at most 1024 rows are factorized by one thread of BLAS.
_FEW_ROWS = 1024

P = ParamSpec("P")
T = TypeVar("T")

# For annotations of shapes. Both names stand for arrays of NumPy, arrays of JAX and tracers. Type checkers read
# `JaxArray` as an array of JAX.
AnyArray = Any
if TYPE_CHECKING:
    JaxArray = jax.Array
else:
    JaxArray = Any
ARRAYS = np.ndarray | np.generic | jax.Array


def is_array(leaf: Any) -> bool:
    """Whether it is an array or a scalar of NumPy, or an array of JAX."""
    return isinstance(leaf, ARRAYS)


def namespace(*arrays: AnyArray) -> ModuleType:
    """`jax.numpy` if one of the arrays is an array of JAX, else NumPy.

    >>> namespace(np.zeros(2)) is np, namespace(np.zeros(2), jnp.zeros(2)) is jnp
    (True, True)
    """
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def special(*arrays: AnyArray) -> ModuleType:
    """`jax.scipy.special` or `scipy.special`, chosen as in `namespace`."""
    if namespace(*arrays) is jnp:
        return jax.scipy.special
    import scipy.special  # only when it is needed, because it takes a third of a second

    return scipy.special


def constant(array: AnyArray) -> AnyArray:
    """The array as a constant: no derivative passes through it."""
    return lax.stop_gradient(array) if isinstance(array, jax.Array) else array


def is_working() -> bool:
    """Whether this thread is inside a function of `numpy_or_jit` that NumPy computes."""
    return getattr(_thread, "works", False)


def is_known(*trees: Any) -> bool:
    """Whether this process can read all arrays, because no transformation traces them."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    return not any(isinstance(array, Tracer) or not array.is_fully_addressable for array in arrays)


def is_on_host(*trees: Any) -> bool:
    """Whether NumPy can compute: JAX uses a CPU, and all arrays are known."""
    return jax.default_backend() == "cpu" and is_known(*trees)


def keeps_known(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose results are known if its arguments are known, also inside a transformation.

    >>> halved, array, results = keeps_known(lambda array: array / 2), jnp.ones(2), []
    >>> _ = jax.jit(lambda: results.append(halved(array)))()
    >>> is_known(results)
    True
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if _programs.is_at_top() or not is_known(args, options):
            return function(*args, **options)
        with _programs.at_top():
            return function(*args, **options)

    return call


def by_numpy(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """`function(*args, **options)` with arrays of NumPy, which share memory with JAX's. The result is `in_jax`."""
    args, options = as_numpy((args, options))
    before, _thread.works = is_working(), True
    try:
        with np.errstate(all="ignore"):  # values that are not finite show overflows, as in a compiled program
            result = function(*args, **options)
    finally:
        _thread.works = before
    return in_jax(result)


def as_numpy(tree: T) -> T:
    """A pytree with arrays of NumPy in place of JAX's. They share the memory."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def in_jax(tree: T) -> T:
    """A pytree with arrays of JAX in place of NumPy's. They are known, also inside a transformation."""
    put = lambda leaf: jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
    with _programs.at_top():
        return jax.tree.map(put, tree)


def filled(tree: T, size: int, device: Any = None, *, axis: int = 0) -> T:
    """Known arrays padded to `size` rows on the host, where no program is compiled for each number of rows.

    The first row is repeated, so that no minimum or maximum changes.
    """

    def of_size(rows: AnyArray) -> AnyArray:
        number = rows.shape[axis]
        if size > number:
            places = np.arange(size)
            places[number:] = 0
            rows = np.take(np.asarray(rows), places, axis)
        return jax.device_put(rows, device)

    return jax.tree.map(of_size, tree)


def can_be_filled(*trees: Any) -> bool:
    """Whether rows may be padded: JAX uses a CPU, at top level, and all arrays are on its default device."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    if not (_programs.is_at_top() and is_on_host(arrays)):
        return False
    usual = {getattr(jax.config, "jax_default_device", None) or jax.local_devices(backend="cpu")[0]}
    return all(array.sharding.device_set == usual for array in arrays)


def bucket(number: int) -> int:
    """The number of rows after padding: one of four sizes from a power of two to the next.

    >>> [bucket(number) for number in (1, 100, 741, 742, 4000)]
    [16, 112, 768, 768, 4096]
    """
    step = max(16, 1 << max(0, (number - 1).bit_length() - 3))
    return number + -number % step


def stacked(trees: Sequence[T]) -> T:
    """Pytrees of one structure as one pytree, whose arrays have a leading axis. Known arrays need no program."""
    xp = np if is_known(trees) else jnp
    return in_jax(jax.tree.map(lambda *leaves: xp.stack(leaves), *trees))


def numpy_or_jit(
    function: Callable[P, T] | None = None,
    *,
    when: Callable[..., bool] = lambda *_, **__: True,
    around: Callable[[Callable], Callable] = lambda program: program,
) -> Any:
    """A function of either library's arrays: NumPy computes it if it can read all arrays, else one compiled program.

    Inside another such function that NumPy computes, arrays stay arrays of NumPy.

    Args:
        function: the function to decorate.
        when: a function of the same arguments that says whether NumPy may compute them.
        around: a decorator for the program.

    Example:
        >>> @numpy_or_jit
        ... def root(values):
        ...     return namespace(values).sqrt(values)
        >>> root(jnp.array([4.0])).tolist()
        [2.0]
    """
    if function is None:
        return partial(numpy_or_jit, when=when, around=around)
    program = around(_programs.jit(function))

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if is_working():
            return function(*args, **options)
        if is_on_host(args, options) and when(*args, **options):
            return by_numpy(function, *args, **options)
        return program(*args, **options)

    return call


def part(function: Callable[P, T]) -> Callable[P, T]:
    """A part of a fit that the host drives. It is compiled as one program if an argument is a known array of JAX.

    If all arrays are arrays of NumPy, it is computed by NumPy. Inside a transformation it is part of the caller's
    program.

    Example:
        >>> halved = part(lambda array: array / 2)
        >>> type(halved(np.ones(2))).__name__, halved(jnp.ones(2)).tolist()
        ('ndarray', [0.5, 0.5])
    """
    program = _programs.jit(function)

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        is_of_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((args, options)))
        if is_of_jax and _programs.is_at_top() and is_known(args, options):
            return program(*args, **options)
        return function(*args, **options)

    return call


class _OneThread:
    """A context in which BLAS has one thread.

    The limit holds for the whole process, and several fits may run at once. So the last user restores the limit.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.limit = threading.Lock(), 0, None

    def __enter__(self) -> int:
        with self.lock:
            if not self.users:
                self.limit = _blas().limit(limits=1, user_api="blas")
            self.users += 1
            return self.users

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users and self.limit is not None:
                self.limit.restore_original_limits()
                self.limit = None


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of NumPy and SciPy. The search for them takes milliseconds."""
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


_one_thread = _OneThread()


def threads_for(number: int) -> contextlib.AbstractContextManager[Any]:
    """One thread of BLAS for matrices of few rows: several threads would wait longer than they compute.

    A fit of 800 rows took 8.0 s with two threads beside a busy process, and 1.7 s with one thread.

    Args:
        number: the number of rows.
    """
    return one_thread_of_blas() if number <= _FEW_ROWS else contextlib.nullcontext()


def one_thread_of_blas() -> _OneThread:
    """A context in which BLAS has one thread, in all threads of this process. It returns its number of users."""
    return _one_thread
