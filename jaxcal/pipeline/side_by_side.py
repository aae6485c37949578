"""Folds in parallel: one thread for each core, if the steps are known to share nothing.

NumPy, LAPACK, XLA and boosted trees let other threads run while they compute. A fit in a thread has one thread of BLAS
and of OpenMP. Thread pools that compete for the same cores take several times as long.
"""

import contextvars
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import jax
from threadpoolctl import ThreadpoolController

from jaxcal import progress
from jaxcal._numpy import one_thread_of_blas
from jaxcal.pipeline.steps import OfNumbers, PrefittedModel

T = TypeVar("T")
R = TypeVar("R")

# The packages whose code an option may be.
_KNOWN = ("jaxcal", "jax", "jaxlib", "equinox", "optax", "gpjax")
# Seconds between two checks for Ctrl-C: not every system wakes a waiting thread for it.
_LOOKS = 0.2


def share_nothing(steps: Sequence[Any]) -> bool:
    """Whether fits of these steps may run in several threads, with the same results.

    They may if each step is a function of jaxcal, or an estimator of scikit-learn whose random numbers have a seed. A
    user's own code may count, write, or draw from one stream of random numbers. This also holds if the code is an
    option of a function of jaxcal.
    """
    return all(map(_shares_nothing, steps))


def _shares_nothing(step: Any) -> bool:
    step = step.model if isinstance(step, PrefittedModel | OfNumbers) else step
    if isinstance(step, partial):
        arguments = (*step.args, *step.keywords.values())
        return _shares_nothing(step.func) and all(_is_known(value) for value in arguments)
    if hasattr(step, "get_params"):
        return _package(type(step)) == "sklearn" and _has_seeds(step.get_params())
    return hasattr(step, "__name__") and _package(step) == "jaxcal"


def _is_known(value: Any) -> bool:
    """Whether an option of a function is not the user's own code."""
    if isinstance(value, list | tuple):
        return all(map(_is_known, value))
    if isinstance(value, partial) or hasattr(value, "fit"):
        return _shares_nothing(value)
    return not callable(value) or _package(value if hasattr(value, "__name__") else type(value)) in _KNOWN


def _package(origin: Any) -> str:
    return (getattr(origin, "__module__", None) or "").partition(".")[0]


def _has_seeds(parameters: dict[str, Any]) -> bool:
    """Whether all random states of an estimator are numbers, and all estimators in it are scikit-learn's."""
    states = [value for name, value in parameters.items() if name.endswith("random_state")]
    inner = [value for value in parameters.values() if callable(value) or hasattr(value, "fit")]
    are_known = all(_package(type(each)) == "sklearn" for each in inner)
    return are_known and all(isinstance(state, int) for state in states)


class OutOfTime(TimeoutError):
    """A deadline has passed."""


def one_by_one(
    function: Callable[[T], R], items: Sequence[T], ended: Callable[[], Any], deadline: float | None = None
) -> list[R]:
    """The function's values of all items, of which none begins after the deadline; arguments as of `in_threads`."""
    results = []
    for item in items:
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTime
        results.append(function(item))
        ended()
    return results


def in_threads(
    function: Callable[[T], R], items: Sequence[T], ended: Callable[[], Any], deadline: float | None = None
) -> list[R]:
    """The function's values of all items, in their order; one after another if threads cannot help.

    Ctrl-C, the deadline, and an error of one of the calls end all calls.

    Args:
        function: a function of an item. The progress that it reports is not shown.
        items: the items.
        ended: a function that is called after every item, in this thread.
        deadline: in the time of `time.monotonic`; None for no deadline.

    Raises:
        OutOfTime: if the deadline passes.
    """
    number = min(len(items), cores())
    if (number < 2 and deadline is None) or _settings() != _in_a_thread(_settings):
        return one_by_one(function, items, ended, deadline)
    work = _Queue(function, items)
    with one_thread_of_blas() as users:
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(work.run,)) for _ in range(number)]
        for thread in threads:
            thread.start()
        try:
            for _ in items:
                work.wait(deadline)
                ended()
        except BaseException:
            work.stop(threads)
            # Threads that were stopped may still be counted as users of the limit.
            one_thread_of_blas().users = users
            raise
        finally:
            for thread in threads:
                thread.join()
    return work.results


class _Queue:
    """The work that the threads share: the items, the next item, and the items that have ended."""

    def __init__(self, function: Callable[[T], R], items: Sequence[T]) -> None:
        self.results: list[Any] = [None] * len(items)
        self._function, self._items = function, items
        self._next, self._lock = iter(range(len(items))), threading.Lock()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._limits = ThreadpoolController()

    def run(self) -> None:
        """Do items until no item remains; runs in a thread."""
        try:
            # OpenMP keeps a limit for every thread. A training that reports progress leaves its program, and can be
            # stopped.
            with progress.to(_listen), self._limits.limit(limits=1, user_api="openmp"):
                while (k := self._take()) is not None:
                    self.results[k] = self._function(self._items[k])
                    self._ended.put(None)
        except BaseException as error:  # for the thread that waits
            self._ended.put(error)

    def _take(self) -> int | None:
        with self._lock:
            return next(self._next, None)

    def wait(self, deadline: float | None) -> None:
        """Wait until an item has ended; raises the error of the item, and OutOfTime after the deadline."""
        while True:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTime
            try:
                error = self._ended.get(timeout=_LOOKS)
            except Empty:
                continue
            if error is not None:
                raise error
            return

    def stop(self, threads: Sequence[threading.Thread]) -> None:
        """Take no further item, and end the threads, each after its present call of NumPy or XLA."""
        with self._lock:
            self._next = iter(())
        for thread in threads:
            if thread.is_alive():
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
        for thread in threads:
            thread.join()


def _listen(_: progress.Progress) -> None:
    """Listen to reports that are not shown."""


def cores() -> int:
    """How many cores this process may use.

    Two variables may set a smaller number: NPROC, which XLA reads, and OMP_NUM_THREADS, which joblib sets.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = [os.environ.get(name, "") for name in ("NPROC", "OMP_NUM_THREADS")]
    return min([available, *(int(number) for number in asked if number.isdigit() and int(number))])


def _settings() -> dict[str, Any]:
    """The settings of JAX and of scikit-learn in this thread; a caller may have changed them for this thread alone."""
    sklearn = sys.modules.get("sklearn")
    own = {} if sklearn is None else sklearn.get_config()
    return own | {name: getattr(jax.config, name, None) for name in jax.config.values}


def _in_a_thread(function: Callable[[], R]) -> R:
    results: list[R] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
