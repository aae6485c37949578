"""Processes of this machine, one for each core, with one thread; a process gets a job when it is free.

Each process has a single job at a time, so that the job of a process that died is known. The cause may be the other
jobs' use of memory. So this job is run once more, alone, when all others are done.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxcal.compilation import cache_environment
from jaxcal.sweep._calls import ONE_THREAD, Outcome, Task, pack, run_pickled

# The seconds between two checks for dead processes: a job's own children may hold its end of the pipe open.
_LOOK_FOR_DEATHS = 1.0
# The time for a process to end that has closed its end of the pipe, or was told to end.
_SECONDS_TO_END = 10.0


def results(task: Task, jobs: Mapping[str, Mapping[str, Any]], workers: int | None) -> Iterator[tuple[str, Outcome]]:
    """Run jobs in order, each once.

    Args:
        task: a function of a module.
        jobs: the arguments of the task, by the name of the job.
        workers: the number of processes. None for one on each core that this process may use.

    Yields:
        The name and the outcome of each job, when it is finished. The processes end when the iterator is closed.

    Raises:
        TypeError: if the task cannot be pickled.
        RuntimeError: if processes cannot be started.
    """
    try:
        pickled = pickle.dumps(task)
    except Exception as error:
        raise TypeError(
            f"the task must be a function of a module, which other processes can import: {error}."
        ) from error
    yield from _run(pickled, jobs, _cores(workers))


def _cores(workers: int | None) -> list[int | None]:
    """A core for each process, one after the other; None if the processes are not bound to cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    workers = workers or len(cores or range(os.cpu_count() or 1))
    if cores and workers < len(cores):
        cores = None  # another sweep may use the same cores while others are idle
    return list(itertools.islice(itertools.cycle(cores or [None]), workers))


def _run(task: bytes, jobs: Mapping[str, Mapping[str, Any]], cores: list[int | None]) -> Iterator[tuple[str, Outcome]]:
    """Run each job in one of several processes, one for each entry of `cores`."""
    waiting = deque(jobs)
    workers = [_Worker(core) for core in cores[: len(jobs)]]
    without_jobs: list[_Worker] = []
    try:
        while workers:
            for worker in _heard_of(workers):
                name, outcome = worker.job, worker.receive()
                if outcome is not None and outcome.kind == "death":
                    workers.remove(worker)
                    if waiting:
                        workers.append(_Worker(worker.core))
                elif waiting:
                    worker.give(waiting[0], pack(task, jobs[waiting.popleft()]))
                else:
                    workers.remove(worker)
                    without_jobs.append(worker)
                    worker.connection.close()  # it ends
                if name is not None and outcome is not None:
                    yield name, outcome
    finally:
        # Running jobs are not waited for, above all after Ctrl-C.
        for worker in workers:
            worker.kill()
        for worker in without_jobs:
            worker.process.join(_SECONDS_TO_END)
            worker.kill()


def _heard_of(workers: Iterable["_Worker"]) -> list["_Worker"]:
    """The workers that have sent something, or have died."""
    ready = wait([worker.connection for worker in workers], _LOOK_FOR_DEATHS)
    return [worker for worker in workers if worker.connection in ready or not worker.process.is_alive()]


class _Worker:
    """A process bound to a core.

    Attributes:
        core: the number of the core; None if it is not bound.
        process: the process itself.
        connection: this end of the pipe to it.
        job: the name of the job that it runs.
    """

    def __init__(self, core: int | None):
        # The process is not forked, because XLA's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.core = core
        self.job: str | None = None
        self._started = False
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_work, args=(other_end, core))
        # The process's libraries read the environment when they are imported, which is before any code of jaxcal.
        with _environment(ONE_THREAD | cache_environment()):
            self.process.start()
        other_end.close()

    def give(self, name: str, packed: bytes) -> None:
        """Let it run a job."""
        self.job = name
        with contextlib.suppress(OSError):  # it has died, and receive will say so
            self.connection.send_bytes(packed)

    def receive(self) -> Outcome | None:
        """The outcome of its job; None if it had no job and is ready for its first one."""
        try:
            if not self.connection.poll():
                raise EOFError  # dead, while children of its job hold the pipe open
            outcome = self.connection.recv()
        except (EOFError, OSError):
            return self._death()
        self._started = True
        self.job = None
        return outcome

    def _death(self) -> Outcome:
        self.process.join(_SECONDS_TO_END)
        self.kill()
        how = _exit(self.process.exitcode)
        if not self._started:
            raise RuntimeError(
                f"a process of the sweep ended {how} while it started. Its output says why. A script must call "
                'sweep.run below `if __name__ == "__main__":`, because each process imports it.'
            )
        return Outcome("death", f"The process of this job ended {how}, twice: the second time the job ran alone.\n")

    def kill(self) -> None:
        """End it at once."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def _exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}" + (", perhaps for lack of memory" if -code == 9 else "")
    return f"by signal {-code}"


def _work(connection: Connection, core: int | None) -> None:
    """Run one job after another in this process, until there are no more."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal, too, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send(None)
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        connection.send(run_pickled(packed))


def _end_with_parent() -> None:
    """Wait for the end of the parent, and end; otherwise the workers of a killed sweep would go on."""
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
