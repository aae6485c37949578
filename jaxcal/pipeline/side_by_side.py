"""Folds side by side: threads, one a core, where the steps are known to share nothing.

NumPy, LAPACK, XLA and boosted trees let other threads run while they compute. A fit in a thread has one thread of BLAS
and of OpenMP. Pools that fight for the same cores take a multiple of the time.
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
from jaxcal.pipeline.steps import Fitted, OfNumbers

T = TypeVar("T")
R = TypeVar("R")

# What an option may be code of.
_KNOWN = ("jaxcal", "jax", "jaxlib", "equinox", "optax", "gpjax")
# Seconds between two looks for Ctrl-C: not every system wakes a waiting thread for it.
_LOOKS = 0.2


def share_nothing(steps: Sequence[Any]) -> bool:
    """Whether fits of these steps may run in several threads, with the same results.

    They may where all are functions of jaxcal, or estimators of scikit-learn whose random numbers have a seed. A
    user's own code may count, write, or draw from one stream of random numbers, also where it is an option of a
    function of jaxcal.
    """
    return all(map(_shares_nothing, steps))


def _shares_nothing(step: Any) -> bool:
    step = step.model if isinstance(step, Fitted | OfNumbers) else step
    if isinstance(step, partial):
        given = (*step.args, *step.keywords.values())
        return _shares_nothing(step.func) and all(_is_known(value) for value in given)
    if hasattr(step, "get_params"):
        return _package(type(step)) == "sklearn" and _has_seeds(step.get_params())
    return hasattr(step, "__name__") and _package(step) == "jaxcal"


def _is_known(value: Any) -> bool:
    """Whether an option of a function is no code of the user's."""
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
    """The function's values of all items; arguments as of `in_threads`. None begins after the deadline."""
    found = []
    for item in items:
        if deadline is not None and time.monotonic() > deadline:
            raise OutOfTime
        found.append(function(item))
        ended()
    return found


def in_threads(
    function: Callable[[T], R], items: Sequence[T], ended: Callable[[], Any], deadline: float | None = None
) -> list[R]:
    """The function's values of all items, in their order; one after the other where threads cannot help.

    Ctrl-C, the deadline, and what one of the calls raises, end all of them.

    Args:
        function: of an item. What it reports as progress is not shown.
        items: what it is called with.
        ended: is called after every item, in this thread.
        deadline: of `time.monotonic`.

    Raises:
        OutOfTime: if the deadline passes.
    """
    number = min(len(items), cores())
    if (number < 2 and deadline is None) or _settings() != _in_a_thread(_settings):
        return one_by_one(function, items, ended, deadline)
    work = _Work(function, items)
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
            # Those that were stopped may not have said that they need one thread no more.
            one_thread_of_blas().users = users
            raise
        finally:
            for thread in threads:
                thread.join()
    return work.results


class _Work:
    """What the threads share: the items, whose turn it is, and what has ended."""

    def __init__(self, function: Callable[[T], R], items: Sequence[T]) -> None:
        self.results: list[Any] = [None] * len(items)
        self._function, self._items = function, items
        self._next, self._lock = iter(range(len(items))), threading.Lock()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._limits = ThreadpoolController()

    def run(self) -> None:
        """Do items until none is left; in a thread."""
        try:
            # OpenMP keeps a number for every thread. A training that reports leaves its program, and can be stopped.
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
        """Until an item has ended; raises what it raised, and OutOfTime after the deadline."""
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
        """Take no further item, and end those that are at work: each after the call of NumPy or XLA that it is in."""
        with self._lock:
            self._next = iter(())
        for thread in threads:
            if thread.is_alive():
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
        for thread in threads:
            thread.join()


def _listen(_: progress.Progress) -> None:
    """To reports that nobody is shown."""


def cores() -> int:
    """How many cores this process may use. NPROC, which XLA reads, says fewer; OMP_NUM_THREADS, which joblib sets."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = [os.environ.get(name, "") for name in ("NPROC", "OMP_NUM_THREADS")]
    return min([available, *(int(number) for number in asked if number.isdigit() and int(number))])


def _settings() -> dict[str, Any]:
    """The settings of JAX and of scikit-learn in this thread, which its caller may have changed here alone."""
    sklearn = sys.modules.get("sklearn")
    own = {} if sklearn is None else sklearn.get_config()
    return own | {name: getattr(jax.config, name, None) for name in jax.config.values}


def _in_a_thread(function: Callable[[], R]) -> R:
    found: list[R] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]
