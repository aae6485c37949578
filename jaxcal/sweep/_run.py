"""A sweep: it finds the jobs that are left, runs them, and writes their results."""

import contextlib
import json
import os
from collections.abc import Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxcal import progress
from jaxcal.sweep import _executors, _file, _processes
from jaxcal.sweep._calls import Call, Outcome, PickledTask, Record, Task

_FAILED_JOBS_NAMED = 5


def run(
    task: Task,
    jobs: Iterable[Record],
    path: str | os.PathLike,
    *,
    workers: int | None = None,
    stamp: Mapping[str, Any] | None = None,
    executor: Any = None,
) -> list[Record]:
    """Call `task(**job)` for every job that is not in the file yet, and append its result.

    Jobs start in order. If a job fails, the others are still done and written. A job fails if it raises, exits, returns
    a result that cannot be written, or ends its process. In the last case it is run once more, alone, after all others,
    because their use of memory may have been the cause. If it ends its process again, it counts as failed.

    The sweep's own processes have one thread each and keep compiled programs on disk
    (`jaxcal.enable_compilation_cache`). So do an executor's processes, unless their environment says otherwise.

    `jaxcal.progress` reports, after every job, how many jobs are finished; fits inside jobs report nothing.

    Args:
        task: a function of a module, so that other processes find it. It returns a list of flat dicts, whose values are
            plain or arrays (read back as lists). A dict that has a key of the job or the stamp must give it the same
            value.
        jobs: the keyword arguments of each call, plain values. They are a job's name in the file. So a job that is
            given twice is one job, done once; repetitions must differ, for example, by a seed.
        path: the file of finished jobs, a line of JSON for each. It is made if it is missing, with its folder. While a
            sweep writes to it the operating system locks it.
        workers: the number of processes. None for one on each core that this process may use.
        stamp: plain values to keep beside the records of every job: versions, the date.
        executor: runs the jobs in place of the sweep's own processes. It may be a `concurrent.futures` executor
            (threads, joblib's loky, mpi4py's MPIPoolExecutor), dask's Client, a submitit executor, or `RayExecutor`.
            Any other object will do if its `submit(function)` returns futures with `done` and `result`. The executor is
            not closed.

    Returns:
        The records of all jobs, in the order of the jobs, as `read` gives them.

    Raises:
        ValueError: if workers is not positive, or if jobs or stamp are not plain or have different values of a key.
            Also if a line of the file is damaged (other than a last line that was cut short).
        TypeError: if the task or the executor cannot be used. No job was run.
        BlockingIOError: if another sweep is writing to the file.
        RuntimeError: if jobs failed; it names them, with the first one's traceback. The next sweep tries them again.

    Warns:
        UserWarning: if the file system has no locks.

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
    if executor is not None:
        _executors.check(executor)
    asked = _by_name(jobs)
    # Jobs and stamp are kept as text. So it has no effect on the file if the task changes its arguments, or the caller
    # the stamp.
    texts = {name: json.dumps(job) for name, job in asked.items()}
    stamped = _file.plain(stamp or {}, "stamp")
    for job in asked.values():
        _file.check_same(job, stamp or {}, "a job and the stamp")

    failures: dict[str, str] = {}
    with _file.writing(Path(path)) as append:
        done = _file.read_lines(Path(path))
        left = {name: job for name, job in asked.items() if name not in done}
        finished = len(asked) - len(left)
        with (
            progress.work("sweep.run: jobs", len(asked), done=finished) as work,
            contextlib.closing(_outcomes(task, left, workers, executor)) as outcomes,
        ):
            for name, outcome in outcomes:
                try:
                    done[name] = _line(texts[name], stamped, outcome)
                except _JobError as error:
                    failures[name] = str(error)
                else:
                    append(done[name])
                work.advance()
    if failures:
        raise _summary({name: failures[name] for name in left if name in failures})
    return [record for name in asked for record in _file.flat(done[name])]


def read(path: str | os.PathLike) -> list[Record]:
    """The records of all finished jobs, in the order in which they finished: {**job, **stamp, **record}.

    Args:
        path: a file that `run` wrote or still writes. A file that does not exist has no records.

    Raises:
        ValueError: if a line is damaged (other than a last line that was cut short).

    Warns:
        UserWarning: if a job is there more than once with different records, as in concatenated files. The first one
            counts.

    Example:
        >>> from jaxcal import sweep
        >>> sweep.read("not_yet_there.jsonl")
        []
    """
    return [record for line in _file.read_lines(Path(path)).values() for record in _file.flat(line)]


class _JobError(Exception):
    """A job failed; the message is the traceback."""


def _by_name(jobs: Iterable[Record]) -> dict[str, Record]:
    """The jobs, each once."""
    named = {}
    for number, job in enumerate(jobs):
        _file.plain(job, f"job {number}")
        named[_file.name_of(job)] = dict(job)
    return named


def _outcomes(
    task: Task, jobs: Mapping[str, Record], workers: int | None, executor: Any
) -> Generator[tuple[str, Outcome], None, None]:
    """The name and the outcome of each job that finishes; last, jobs whose process died are run once more."""
    if executor is None:
        results = partial(_processes.results, task, workers=workers)
    else:
        pickled = PickledTask(task)
        results = lambda jobs: _executors.results(executor, {name: Call(pickled, job) for name, job in jobs.items()})
    died = []
    for name, outcome in results(jobs):
        if outcome.kind == "death":
            died.append(name)
        else:
            yield name, outcome
    for name in died:  # alone
        yield from results({name: jobs[name]})


def _line(job: str, stamp: str, outcome: Outcome) -> Record:
    """The line of a finished job."""
    if outcome.kind != "records":
        raise _JobError(outcome.text)
    try:
        return _file.finished_line(job, stamp, outcome.text)
    except ValueError as error:
        raise _JobError(f"ValueError: {error}\n") from error


def _summary(failures: Mapping[str, str]) -> RuntimeError:
    """One error for all jobs that failed."""
    names = list(failures)
    more = f" and {len(names) - _FAILED_JOBS_NAMED} more" if len(names) > _FAILED_JOBS_NAMED else ""
    number = f"{len(names)} job{'s' if len(names) > 1 else ''} failed"
    return RuntimeError(
        f"{number}: {', '.join(names[:_FAILED_JOBS_NAMED])}{more}. The first one:\n{failures[names[0]]}"
    )
