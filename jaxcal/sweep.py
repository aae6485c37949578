"""Many runs of one function: a process for every core, each finished run on disk at once.

Threads slow small problems down: on CPUs a sweep is one process a core, each with a single thread and bound to its
core. An accelerator is one device for one process: there, take `executor=ThreadPoolExecutor(1)`, and do many runs
within a job by `vmap`. A sweep that was stopped goes on where it was.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

# One thread a process, in XLA and in the BLAS below NumPy and SciPy, which counts cores when it is imported.
_ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_FAILED_JOBS_NAMED = 5
# How often this process has emptied jax's caches: what was compiled before is compiled anew.
clearings = 0

Record = dict[str, Any]


def run(
    task: Callable[..., list[Record]],
    jobs: Iterable[Record],
    path: str | os.PathLike,
    *,
    workers: int | None = None,
    stamp: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Call `task(**job)` for every job that is not in the file yet, and append what it returns.

    Jobs are handed out in order. A job that raises does not keep the others from being done and written. Two sweeps
    must not write to one file at the same time.

    Args:
        task: a function of a module, so that other processes find it; returns a list of flat dicts, whose values
            are plain or arrays (read back as lists).
        jobs: the keyword arguments of each call: plain values. They are a job's name in the file.
        path: file of finished jobs, a line of JSON each; made where it is missing, with its folder.
        workers: number of processes; None takes one for each core that this process may use.
        stamp: plain values to keep beside the records of every job: versions, the date.
        executor: where the jobs are run in place of processes of our own: anything whose `submit` returns
            `concurrent.futures` futures, like dask's `client.get_executor()` for a cluster.
        on_progress: called with the numbers of finished and of all jobs: once before the first one is run, and
            after every one.

    Returns:
        The records of all jobs, in the order of the jobs, as `read` gives them.

    Raises:
        ValueError: if workers is not positive, or a line of the file (other than a last one cut short) is damaged.
        RuntimeError: if jobs failed; it names them, with the first one's traceback. The next sweep tries them again.

    Example:
        >>> import tempfile
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from jaxcal import sweep
        >>> task = lambda seed: [{"metric": "rmse", "value": seed / 2}]
        >>> path = tempfile.mkdtemp() + "/runs.jsonl"
        >>> sweep.run(task, [{"seed": 0}, {"seed": 1}], path, executor=ThreadPoolExecutor(1))
        [{'seed': 0, 'metric': 'rmse', 'value': 0.0}, {'seed': 1, 'metric': 'rmse', 'value': 0.5}]
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be positive, got {workers}.")
    path = Path(path)
    asked = {_name(job): dict(job) for job in jobs}
    done = _finished(path)
    left = {name: job for name, job in asked.items() if name not in done}
    _drop_torn_line(path)
    tell = on_progress or (lambda finished, total: None)
    tell(len(asked) - len(left), len(asked))

    failures: dict[str, BaseException] = {}
    own = contextlib.nullcontext(executor) if executor is not None else _processes(workers, len(left))
    with own as pool, _appending(path) as append:
        call = task if executor is not None else partial(_with_room_to_compile, task)
        names = {pool.submit(call, **job): name for name, job in left.items()}
        for i, future in enumerate(as_completed(names), start=1):
            name = names[future]
            try:
                text = _line(left[name], stamp or {}, future.result())
            except Exception as error:
                failures[name] = error
            else:
                append(text)
                done[name] = json.loads(text)
            tell(len(asked) - len(left) + i, len(asked))
    if failures:
        raise _summary({name: failures[name] for name in left if name in failures})
    return [record for name in asked for record in _flat(done[name])]


def read(path: str | os.PathLike) -> list[Record]:
    """The records of all finished jobs, in the order in which they finished: {**job, **stamp, **record}.

    Args:
        path: a file that `run` wrote, perhaps still writes; one that does not exist holds no records.

    Raises:
        ValueError: if a line (other than a last one cut short) is damaged.

    Example:
        >>> from jaxcal import sweep
        >>> sweep.read("not_yet_there.jsonl")
        []
    """
    return [record for line in _finished(Path(path)).values() for record in _flat(line)]


def _name(job: Mapping[str, Any]) -> str:
    """What a job is known by: the order of its arguments does not matter."""
    return json.dumps(job, sort_keys=True)


def _line(job: Record, stamp: Mapping[str, Any], records: list[Record]) -> str:
    """A finished job as it stands in the file; `tolist` is what arrays, and numbers of NumPy and jax, have."""
    line = {"job": job, "stamp": dict(stamp), "records": records}
    return json.dumps(line, default=lambda value: value.tolist())


def _flat(line: Record) -> list[Record]:
    return [{**line["job"], **line["stamp"], **record} for record in line["records"]]


def _finished(path: Path) -> dict[str, Record]:
    """What the file holds, by the name of the job."""
    if not path.exists():
        return {}
    done = {}
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):  # cut short by a kill, and so the last one
            break
        try:
            line = json.loads(text)
            done[_name(line["job"])] = line
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a finished job: {text[:80]!r}.") from error
    return done


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end: the next one starts afresh."""
    if path.exists():
        size = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, size)


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[Callable[[str], None]]:
    """A function that writes one line to the end of the file, down to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:

        def append(text: str) -> None:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield append


@contextlib.contextmanager
def _processes(workers: int | None, jobs: int) -> Iterator[Executor]:
    """Processes of one thread each, bound to the cores in turn. They end with this one, whatever ends it."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    workers = workers or len(cores or range(os.cpu_count() or 1))
    # Not forked: XLA's threads, where this process has some, do not survive that.
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for core in itertools.islice(itertools.cycle(cores or [None]), workers):
        queue.put(core)
    before = set(multiprocessing.active_children())
    # The children's libraries read the environment while they are imported, which is before any code of ours.
    with _environment(_ONE_THREAD):
        pool = ProcessPoolExecutor(min(workers, max(jobs, 1)), context, _start_worker, (queue,))
        try:
            yield pool
        except BaseException:
            # Most of all for Ctrl-C: no waiting for the jobs that are being run.
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(queue: Any) -> None:
    """Bind a new process to a core of its own, and to the life of its parent."""
    core = queue.get()
    if core is not None:
        os.sched_setaffinity(0, {core})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it as well, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _with_room_to_compile(task: Callable[..., list[Record]], **job: Any) -> list[Record]:
    """The task's records, after programs of earlier jobs are forgotten where they are too many.

    Each compiled program holds memory maps; at Linux's limit for a process XLA crashes.
    """
    global clearings
    if "jax" in sys.modules and _memory_maps_are_half_used():
        sys.modules["jax"].clear_caches()
        clearings += 1
    return task(**job)


def _memory_maps_are_half_used() -> bool:
    try:
        with open("/proc/self/maps") as maps, open("/proc/sys/vm/max_map_count") as limit:
            return sum(1 for _ in maps) > int(limit.read()) // 2
    except OSError:  # no such limit on this system
        return False


def _end_with_parent() -> None:
    """Wait for the end of the parent, and end: else a killed sweep would leave its workers behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with these values, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _summary(failures: Mapping[str, BaseException]) -> RuntimeError:
    """One error for all jobs that failed."""
    names = list(failures)
    more = f" and {len(names) - _FAILED_JOBS_NAMED} more" if len(names) > _FAILED_JOBS_NAMED else ""
    first = failures[names[0]]
    return RuntimeError(
        f"{len(names)} jobs failed: {', '.join(names[:_FAILED_JOBS_NAMED])}{more}. The first one:\n"
        + "".join(traceback.format_exception(first))
    )
