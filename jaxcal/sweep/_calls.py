"""One job where it is run: the process is prepared, the task is called, and the outcome becomes text.

Only text crosses from process to process. So no exception and no result that cannot be pickled or unpickled harms the
process that runs the sweep.
"""

import importlib
import json
import operator
import os
import pickle
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple

from jaxcal import progress
from jaxcal.compilation import enable_compilation_cache

Record = dict[str, Any]
Task = Callable[..., list[Record]]

# One thread for each process, in XLA and in the BLAS of NumPy and SciPy, which counts cores when it is imported.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The settings of the cache of programs that a cluster's process gets. Else it has a cache in its own user's folder.
_CACHE_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
# This code runs before this module is imported, and with it jax and NumPy, which read the variables. Variables that the
# cluster itself has set stay. If dask's workers are threads of the sweep's own process, all variables stay.
_SET_VARIABLES = """
import os, sys
module = sys.modules.get("jaxcal.sweep._calls")
if module is None or module.PROCESS != process:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
"""
PROCESS = uuid.uuid4().hex
# How often this process has emptied jax's caches.
clearings = 0


class Outcome(NamedTuple):
    """The outcome of a job.

    Attributes:
        kind: "records"; "error" of the job; or "death" of its process, which other jobs may have caused.
        text: the records as JSON, or the text of the error.
    """

    kind: str
    text: str


class PickledTask:
    """A task, and its pickle, made once and only if it is needed; functions of `__main__` by value if possible."""

    def __init__(self, task: Task):
        """Keep the task."""
        self.task = task

    @cached_property
    def pickle(self) -> bytes:
        """The pickle for processes that do not have this process's `__main__`."""
        return _pickler().dumps(self.task)


class Call:
    """A job in the form that an executor gets; threads of this process call it directly.

    Unpickled, it is a function of the standard library that holds bytes. A scheduler that unpickles it in passing
    neither imports jax nor runs anything. Its call loads the bytes. This first sets the environment, then imports this
    module and with it jax, and then runs the job.
    """

    def __init__(self, task: PickledTask, job: Mapping[str, Any]):
        """Keep the task and the arguments of its call."""
        self._task, self._job = task, job
        self.__name__ = getattr(task.task, "__name__", "task")  # clusters show this name

    def __dask_tokenize__(self) -> str:
        """A new token: dask takes calls with equal tokens for one, and a second try would have the first outcome."""
        return uuid.uuid4().hex

    def __call__(self) -> Outcome:
        """Run the job in this process. An interrupt of the main thread ends the sweep."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        return _outcome(lambda: self._task.task(**self._job), interruptible=in_main_thread)

    def __reduce__(self) -> tuple:
        """The pickle that the class's docstring describes."""
        variables = ONE_THREAD | {name: os.environ[name] for name in _CACHE_VARIABLES if name in os.environ}
        prepare = _WhenLoaded(exec, _SET_VARIABLES, {"variables": variables, "process": PROCESS})
        perform = _WhenLoaded(run_pickled, pack(self._task.pickle, self._job))
        return partial, (pickle.loads, pickle.dumps(_WhenLoaded(operator.getitem, (prepare, perform), 1)))


class _WhenLoaded:
    """The pickle of a function's call: to load it calls the function, and gives the function's result."""

    def __init__(self, function: Callable, *arguments: Any):
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


def pack(task: bytes, job: Mapping[str, Any]) -> bytes:
    """The input of `run_pickled`: a pickled task, and the arguments of its call."""
    return pickle.dumps((task, dict(job)))


def run_pickled(packed: bytes) -> Outcome:
    """The outcome of a job in a process that was made to run jobs."""

    def call() -> Any:
        task, job = pickle.loads(packed)
        _keep_programs()
        _make_room_to_compile()
        return _unpickled(task)(**job)

    return _outcome(call)


_keep_programs = cache(enable_compilation_cache)
# The last task is kept: if it is pickled by value, its compiled programs are lost when it is unpickled again.
_unpickled = lru_cache(maxsize=1)(pickle.loads)


def _outcome(call: Callable[[], Any], interruptible: bool = False) -> Outcome:
    """The result of a call, or its error. Neither `sys.exit` nor an interrupt in a job ends its process.

    A job reports no progress: the sweep does, and several jobs at a time would write over each other.
    """
    try:
        with progress.to(None):
            return Outcome("records", _json(call()))
    except BaseException as error:
        if interruptible and isinstance(error, KeyboardInterrupt):
            raise
        return Outcome("error", "".join(traceback.format_exception(error)))


def _json(records: Any) -> str:
    """The result of a task in the form of the file."""
    if not isinstance(records, list):
        raise TypeError(f"a task must return a list of dicts, got {type(records).__name__}: {_short(records)}.")
    for record in records:
        if not isinstance(record, Mapping):
            raise TypeError(f"a task must return a list of dicts, got {type(record).__name__} in it: {_short(record)}.")
        if keys := [key for key in record if not isinstance(key, str)]:
            raise TypeError(f"the keys of a record must be strings, got {_short(keys[0])}.")
    return json.dumps([dict(record) for record in records], default=_plain)


def _plain(value: Any) -> Any:
    """An array as a list, and a number of NumPy or jax as a number of Python."""
    if not hasattr(value, "tolist"):
        kind = type(value).__name__
        raise TypeError(f"the values of a record must be plain or arrays, got {kind}: {_short(value)}.")
    return value.tolist()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _pickler() -> Any:
    """A pickler of functions by value, which dask, submitit, joblib and Ray install; else pickle itself."""
    for name in ("cloudpickle", "joblib.externals.cloudpickle", "ray.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return pickle


def _make_room_to_compile() -> None:
    """Delete the compiled programs of earlier jobs if they are too many.

    Each compiled program holds memory maps. XLA crashes at Linux's limit for a process.
    """
    global clearings
    if "jax" in sys.modules and memory_maps_are_half_used():
        sys.modules["jax"].clear_caches()
        clearings += 1


def memory_maps_are_half_used() -> bool:
    """Whether this process has more than half of the memory maps that Linux allows."""
    try:
        with open("/proc/self/maps") as maps, open("/proc/sys/vm/max_map_count") as limit:
            return sum(1 for _ in maps) > int(limit.read()) // 2
    except OSError:  # no such limit on this system
        return False
