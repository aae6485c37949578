"""Executors of other libraries, such as clusters: the methods that they need, and the wait for their futures."""

import asyncio
import contextlib
import importlib
import itertools
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future, as_completed
from typing import Any

from jaxcal.sweep._calls import Call, Outcome

_ALLOWED = (
    "executor must have a `submit` whose futures have `done` and `result`: a concurrent.futures executor, joblib's "
    "loky, dask's Client, a submitit executor, mpi4py's MPIPoolExecutor, or sweep.RayExecutor() for Ray"
)
# Some futures do not report when they are done. The pause between two checks of them is at least 0.01 seconds, and at
# least ten times as long as a check. A check may read the disk for each future.
_PAUSE, _PAUSE_IN_LOOKS = 0.01, 10
# SLURM takes a thousand jobs in one array by default.
_BATCH = 1000
_BROKEN = (
    "A process of this executor died, perhaps because of this job. The executor is broken, so the following jobs "
    "cannot run in it. The sweep's own processes, without executor=, outlive such jobs, and name them.\n"
)


class RayExecutor:
    """Ray as `executor` of `run`: each job is a Ray task.

    Args:
        options: the options of `ray.remote` for a job: `num_cpus`, `num_gpus`, `max_retries` for workers that die, ...

    Example:
        >>> from jaxcal import sweep
        >>> sweep.run(task, jobs, "runs.jsonl", executor=sweep.RayExecutor(num_cpus=1))  # doctest: +SKIP
    """

    def __init__(self, **options: Any):
        ray = importlib.import_module("ray")
        # Ray pickles a lambda by value. So its worker does not import jax before it has the call, which sets the
        # environment.
        job = lambda call: call()
        self._job = ray.remote(**options)(job) if options else ray.remote(job)

    def submit(self, call: Call) -> "_RayFuture":
        """A future of the call."""
        return _RayFuture(self._job.remote(call))


class _RayFuture:
    def __init__(self, reference: Any):
        self._reference = reference
        future = reference.future()
        self.done, self.result = future.done, future.result

    def cancel(self) -> None:
        importlib.import_module("ray").cancel(self._reference)


def check(executor: Any) -> None:
    """Raise a TypeError if an executor cannot run jobs, before it gets any."""
    if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
        raise TypeError(f"{_ALLOWED}; got {executor!r}.")
    if getattr(executor, "asynchronous", False):
        raise TypeError(f"{_ALLOWED}; got {executor!r}, which is asynchronous.")


def results(executor: Any, calls: Mapping[str, Call]) -> Iterator[tuple[str, Outcome]]:
    """Submit all calls in order, each once.

    Args:
        executor: an executor that `check` accepts.
        calls: the calls by the names of the jobs.

    Yields:
        The name and the outcome of each job, when it is finished. Other calls are canceled when the iterator is closed.

    Raises:
        TypeError: if the first future does not have the methods needed; no other call is submitted.
        Exception: the executor's error, if it does not even take the first call.
    """
    futures: dict[str, Any] = {}
    try:
        refused = _submit(executor, calls, futures)
        yield from refused.items()
        for name in _as_finished(dict(futures)):
            yield name, _outcome(futures.pop(name))
    finally:
        for future in futures.values():
            with contextlib.suppress(Exception):
                future.cancel()


def _submit(executor: Any, calls: Mapping[str, Call], futures: dict[str, Any]) -> dict[str, Outcome]:
    """Fill the dict of futures, and return the errors of the calls that the executor did not take."""
    refused = {}
    names = iter(calls)
    while batch := list(itertools.islice(names, _BATCH)):
        # submitit makes one array of jobs from a batch.
        with executor.batch() if hasattr(executor, "map_array") else contextlib.nullcontext():
            for name in batch:
                try:
                    future = executor.submit(calls[name])
                except Exception as error:
                    if not futures:
                        raise
                    refused[name] = _failure(error)
                else:
                    _check_future(future)
                    futures[name] = future
    return refused


def _check_future(future: Any) -> None:
    fits = callable(getattr(future, "done", None)) and callable(getattr(future, "result", None))
    if not fits or isinstance(future, asyncio.Future):
        with contextlib.suppress(Exception):
            future.cancel()
        raise TypeError(f"{_ALLOWED}; this one's submit returned {future!r}.")


def _as_finished(futures: Mapping[str, Any]) -> Iterator[str]:
    """The name of each future when it is done."""
    if all(isinstance(future, Future) for future in futures.values()):
        names = {future: name for name, future in futures.items()}
        yield from (names[future] for future in as_completed(names))
        return
    left = list(futures)
    while left:
        began, before = time.perf_counter(), left
        left = []
        for name in before:
            if futures[name].done():
                yield name
            else:
                left.append(name)
        if left == before:
            time.sleep(max(_PAUSE, _PAUSE_IN_LOOKS * (time.perf_counter() - began)))


def _outcome(future: Any) -> Outcome:
    """The outcome of a future. If it raises, the error is the executor's, because a job's error is an outcome."""
    try:
        outcome = future.result()
    except (Exception, asyncio.CancelledError) as error:
        return _failure(error)
    if isinstance(outcome, Outcome):
        return outcome
    return Outcome("error", f"The executor gave {outcome!r} in place of the job's outcome.\n")


def _failure(error: BaseException) -> Outcome:
    # Dask blames all jobs that were assigned to the workers that died.
    kind = "death" if type(error).__name__ == "KilledWorker" else "error"
    text = "".join(traceback.format_exception(error))
    if isinstance(error, BrokenExecutor):
        text += _BROKEN
    return Outcome(kind, text)
