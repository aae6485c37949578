"""Sweeps in executors of others: what fits, what is refused, and how their processes are prepared."""

import asyncio
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from jaxcal import progress, sweep

pytestmark = pytest.mark.any_precision

JOBS = [{"seed": seed} for seed in range(5)]


def half(seed: int) -> list[dict]:
    if seed == 3:
        raise ZeroDivisionError("seed 3 is bad")
    return [{"value": seed / 2}]


def prepared(seed: int) -> list[dict]:
    """How the process of a job was prepared."""
    import jax

    names = ("NPROC", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {name: os.environ.get(name) for name in names}
    return [{**variables, "process": os.getpid(), "cache": jax.config.jax_compilation_cache_dir}]


def end_process(seed: int) -> list[dict]:
    if seed == 1:
        os._exit(1)
    return [{"value": seed}]


class Polled:
    """An executor whose futures tell only when they are asked, as dask's and submitit's."""

    def __init__(self, refuses=()):
        self.submitted, self.cancelled, self._refuses = [], [], refuses

    def submit(self, call):
        number = len(self.submitted)
        self.submitted.append(call)
        if number in self._refuses:
            raise ConnectionError("no more jobs")
        return PolledFuture(call, lambda: self.cancelled.append(number))


class PolledFuture:
    def __init__(self, call, cancel):
        self.cancel = cancel
        self._outcome = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(call()))
        self._thread.start()

    def done(self):
        return not self._thread.is_alive()

    def result(self):
        return self._outcome[0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.jsonl"


def test_failures_progress_and_resume_with_futures_that_are_polled(path):
    seen = []
    executor = Polled()
    tell = lambda told: None if told.is_finished else seen.append((told.done, told.total))
    for _ in range(2):
        with (
            progress.to(tell),
            pytest.raises(RuntimeError, match=r'1 job failed: {"seed": 3}.*\n(.*\n)*ZeroDivisionError: seed 3 is bad'),
        ):
            sweep.run(half, JOBS, path, executor=executor)
    assert seen == [(i, 5) for i in range(6)] + [(4, 5), (5, 5)]
    assert len(executor.submitted) == 6
    assert executor.cancelled == []
    assert sorted(record["value"] for record in sweep.read(path)) == [0, 0.5, 1, 2]


def test_what_an_executor_does_not_take_later_fails_alone(path):
    with pytest.raises(RuntimeError, match=r'2 jobs failed: {"seed": 2}, {"seed": 3}'):
        sweep.run(half, JOBS, path, executor=Polled(refuses=[2]))
    assert len(sweep.read(path)) == 3


def test_an_executor_that_takes_nothing(path):
    with pytest.raises(ConnectionError, match="no more jobs"):
        sweep.run(half, JOBS, path, executor=Polled(refuses=[0]))


def test_what_is_left_of_a_sweep_that_ends_is_cancelled(path):
    def stop(told):
        if told.done == 2:
            raise KeyboardInterrupt

    executor = Polled()
    with progress.to(stop), pytest.raises(KeyboardInterrupt):
        sweep.run(half, JOBS, path, executor=executor)
    assert len(sweep.read(path)) == 2
    assert len(executor.cancelled) == 3


class Asynchronous(Polled):
    asynchronous = True


class Wrong(Polled):
    def submit(self, call):
        self.submitted.append(call)
        return "job 1234"


class Coroutines(Polled):
    def submit(self, call):
        self.submitted.append(call)
        loop = asyncio.new_event_loop()
        loop.close()
        return asyncio.Future(loop=loop)


@pytest.mark.parametrize("executor", [4, ThreadPoolExecutor, threading, Asynchronous()])
def test_what_cannot_run_jobs_is_refused_before_anything_is_submitted(path, executor):
    with pytest.raises(
        TypeError, match=r"executor must have a `submit` whose futures have `done` and `result`.*; got "
    ):
        sweep.run(half, JOBS, path, executor=executor)
    assert getattr(executor, "submitted", []) == []
    assert not path.exists()


@pytest.mark.parametrize("kind", [Wrong, Coroutines])
def test_futures_that_do_not_fit_are_refused_at_the_first(path, kind):
    executor = kind()
    with pytest.raises(TypeError, match=r"executor must have a `submit`.*; this one's submit returned "):
        sweep.run(half, JOBS, path, executor=executor)
    assert len(executor.submitted) == 1


@pytest.fixture
def new_processes(monkeypatch):
    """joblib's loky, with an environment that says nothing of threads."""
    loky = pytest.importorskip("joblib.externals.loky", reason="joblib is not installed")
    for name in ("NPROC", "OPENBLAS_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    executor = loky.get_reusable_executor(max_workers=1, kill_workers=True, reuse=False)
    yield executor
    executor.shutdown(kill_workers=True)


def test_processes_of_others_have_one_thread_and_keep_programs(path, new_processes, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    by_value = lambda seed: [{"jax": "jax" in sys.modules, **prepared(seed)[0]}]
    (record,) = sweep.run(by_value, [{"seed": 0}], path, executor=new_processes)
    assert record["process"] != os.getpid()
    assert (record["NPROC"], record["OPENBLAS_NUM_THREADS"]) == ("1", "1")
    assert record["MKL_NUM_THREADS"] == "2"  # what the cluster says stays
    assert record["cache"] == str(tmp_path / "programs")


def test_a_broken_executor_says_what_outlives_such_jobs(path):
    executor = ProcessPoolExecutor(1, get_context("spawn"))
    with executor, pytest.raises(RuntimeError, match="The sweep's own processes, without executor=, outlive such jobs"):
        sweep.run(end_process, JOBS, path, executor=executor)
