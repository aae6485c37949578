"""Where NumPy answers at once, NumPy answers: known arrays on a CPU need no compiled program.

A function is written once, for the arrays of either library: `xp = namespace(values)`. `numpy_or_jit` calls it with
arrays of NumPy where all are known and on a CPU, and elsewhere as one compiled program.
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
# Matrices of so many rows are factorized by one thread of BLAS.
_FEW_ROWS = 1024

P = ParamSpec("P")
T = TypeVar("T")

# NumPy's arrays, JAX's or tracers, in annotations of shapes; and the same, which type checkers take for JAX's.
AnyArray = Any
if TYPE_CHECKING:
    JaxArray = jax.Array
else:
    JaxArray = Any
ARRAYS = np.ndarray | np.generic | jax.Array


def is_array(leaf: Any) -> bool:
    """Whether it is an array of NumPy, one of its scalars, or an array of JAX."""
    return isinstance(leaf, ARRAYS)


def namespace(*arrays: AnyArray) -> ModuleType:
    """`jax.numpy` if one of the arrays is of JAX, else NumPy.

    >>> namespace(np.zeros(2)) is np, namespace(np.zeros(2), jnp.zeros(2)) is jnp
    (True, True)
    """
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def special(*arrays: AnyArray) -> ModuleType:
    """`jax.scipy.special` or `scipy.special`, as `namespace`."""
    if namespace(*arrays) is jnp:
        return jax.scipy.special
    import scipy.special  # only where it is needed: a third of a second

    return scipy.special


def constant(array: AnyArray) -> AnyArray:
    """The array, through which no derivative passes."""
    return lax.stop_gradient(array) if isinstance(array, jax.Array) else array


def is_working() -> bool:
    """Whether this thread is inside of a function of `numpy_or_jit` that NumPy answers."""
    return getattr(_thread, "works", False)


def is_known(*trees: Any) -> bool:
    """Whether this process can read all arrays: no transformation traces them."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    return not any(isinstance(array, Tracer) or not array.is_fully_addressable for array in arrays)


def is_on_host(*trees: Any) -> bool:
    """Whether NumPy can answer: JAX works on a CPU, and all arrays are known."""
    return jax.default_backend() == "cpu" and is_known(*trees)


def keeps_known(function: Callable[P, T]) -> Callable[P, T]:
    """A function that makes known arrays of known arguments, also where a transformation is at work around.

    >>> halved, array, found = keeps_known(lambda array: array / 2), jnp.ones(2), []
    >>> _ = jax.jit(lambda: found.append(halved(array)))()
    >>> is_known(found)
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
    """`function(*args, **options)` with arrays of NumPy, which share the memory of JAX's; the result is `in_jax`."""
    args, options = as_numpy((args, options))
    before, _thread.works = is_working(), True
    try:
        with np.errstate(all="ignore"):  # what is not finite is told by values, as in a program
            found = function(*args, **options)
    finally:
        _thread.works = before
    return in_jax(found)


def as_numpy(tree: T) -> T:
    """A pytree with JAX's arrays as NumPy's, which share their memory."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def in_jax(tree: T) -> T:
    """A pytree with NumPy's arrays as JAX's, which are known also where a transformation is at work around."""
    put = lambda leaf: jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
    with _programs.at_top():
        return jax.tree.map(put, tree)


def filled(tree: T, size: int, device: Any = None, *, axis: int = 0) -> T:
    """Known arrays with so many rows, on the host: there a number of rows needs no program.

    The first row is repeated, so that no extreme changes.
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
    """Whether rows may be filled up: JAX works on a CPU, at top level, and all arrays are on its default device."""
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    if not (_programs.is_at_top() and is_on_host(arrays)):
        return False
    usual = {getattr(jax.config, "jax_default_device", None) or jax.local_devices(backend="cpu")[0]}
    return all(array.sharding.device_set == usual for array in arrays)


def bucket(number: int) -> int:
    """How many rows there are after filling up: one of four sizes from a power of two to the next.

    >>> [bucket(number) for number in (1, 100, 741, 742, 4000)]
    [16, 112, 768, 768, 4096]
    """
    step = max(16, 1 << max(0, (number - 1).bit_length() - 3))
    return number + -number % step


def stacked(trees: Sequence[T]) -> T:
    """Pytrees of one structure as one, whose arrays have a leading axis; of known arrays without a program."""
    xp = np if is_known(trees) else jnp
    return in_jax(jax.tree.map(lambda *leaves: xp.stack(leaves), *trees))


def numpy_or_jit(
    function: Callable[P, T] | None = None,
    *,
    when: Callable[..., bool] = lambda *_, **__: True,
    around: Callable[[Callable], Callable] = lambda program: program,
) -> Any:
    """A function of either library's arrays: by NumPy where that can read all of them, else one compiled program.

    Inside of another such function that NumPy answers, arrays stay NumPy's.

    Args:
        function: what to decorate.
        when: of its arguments, whether NumPy knows how.
        around: what to decorate the program with.

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
    """A part of a fit that the host drives, compiled as one program where an argument is a known array of JAX.

    With NumPy's arrays alone it is computed as it is written. Inside of a transformation it is part of the caller's
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
    """One thread of BLAS, for as long as somebody needs it: the limit is the process's, and several may fit at once."""

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
    """The libraries of NumPy and SciPy; to look for them takes milliseconds."""
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


_one_thread = _OneThread()


def threads_for(number: int) -> contextlib.AbstractContextManager[Any]:
    """One thread of BLAS for matrices of few rows, whose threads would wait for each other longer than they compute.

    With two threads beside a busy process a fit of 800 rows took 8.0 in place of 1.7 s.

    Args:
        number: of rows.
    """
    return one_thread_of_blas() if number <= _FEW_ROWS else contextlib.nullcontext()


def one_thread_of_blas() -> _OneThread:
    """In it BLAS has one thread, in all threads of this process; it gives how many are in it."""
    return _one_thread
