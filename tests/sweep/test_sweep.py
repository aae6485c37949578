"""Sweeps: finished jobs are kept and not run again, failures lose nothing, workers are pinned and end in time."""

import json
import math
import mmap
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxcal import progress, sweep
from jaxcal.compilation import cache_environment

pytestmark = pytest.mark.any_precision

JOBS = [{"dataset": "a", "seed": seed} for seed in range(4)]
SLOW_SWEEP = """
import os, sys, time
from jaxcal import sweep
def task(seed):
    open(f"{sys.argv[1]}.{seed}", "w").write(str(os.getpid()))
    time.sleep(60)
if __name__ == "__main__":
    sweep.run(task, [{"seed": 0}], sys.argv[1], workers=1)
"""


def where(seed: int) -> list[dict]:
    """What a worker sees of the machine."""
    time.sleep(0.2 * (1 - seed))  # the first job ends last
    machine = {"process": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "NPROC": os.environ["NPROC"]}
    return [{**machine, "programs": jax.config.jax_compilation_cache_dir}]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "table.jsonl"


@pytest.fixture
def calls():
    return []


@pytest.fixture
def run(path, calls):
    """A sweep in this process, whose task writes down that it was called."""

    def task(dataset, seed):
        calls.append(seed)
        return [{"metric": "rmse", "value": np.float32(seed) / 2}, {"metric": "rows", "value": np.arange(2)}]

    with ThreadPoolExecutor(1) as executor:
        yield lambda jobs=JOBS, **options: sweep.run(task, jobs, path, executor=executor, **options)


def test_finished_jobs_are_not_run_again(run, calls, path):
    run(JOBS[:2], stamp={"version": "1"})
    seen = []
    with progress.to(seen.append):
        records = run(stamp={"version": "2"})
    assert calls == [0, 1, 2, 3]
    assert [(told.done, told.total) for told in seen] == [(2, 4), (3, 4), (4, 4), (4, 4)]
    assert seen[-1].is_finished
    assert records[::2] == [
        {**job, "version": "1" if job["seed"] < 2 else "2", "metric": "rmse", "value": job["seed"] / 2} for job in JOBS
    ]
    assert [record["value"] for record in records[1::2]] == [[0, 1]] * 4
    assert records == sweep.read(path)


def test_order_of_arguments_does_not_make_another_job(run, calls):
    records = run([{"dataset": "a", "seed": 0}, {"seed": 0, "dataset": "a"}])
    assert calls == [0]
    assert len(records) == 2  # of one job


def test_results_come_in_the_order_of_jobs(run):
    run(JOBS[2:])
    assert [record["seed"] for record in run(JOBS[::-1])[::2]] == [3, 2, 1, 0]


@pytest.mark.parametrize("torn", [b'{"job": {"dataset": "a", "se', b'{"job": {"dataset": "\xc3'])
def test_a_line_cut_short_is_dropped(run, calls, path, torn):
    run(JOBS[:3])
    path.write_bytes(path.read_bytes() + torn)
    assert len(sweep.read(path)) == 6
    assert len(run()) == 8
    assert calls == [0, 1, 2, 3]
    assert all(json.loads(line)["job"] in JOBS for line in path.read_text().splitlines())


def test_a_damaged_line_is_an_error(run, path):
    run(JOBS[:1])
    path.write_bytes(b"no json\n" + path.read_bytes())
    with pytest.raises(ValueError, match="line 1, is not a finished job: b'no json"):
        run()


def test_a_failing_job_loses_no_other(path):
    tried = []

    def task(seed):
        tried.append(seed)
        if seed in (1, 2):
            raise ZeroDivisionError(f"seed {seed} is bad")
        return [{"value": object() if seed == 3 else seed}]  # 3 cannot be written

    jobs = [{"seed": seed} for seed in range(5)]
    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="3 jobs failed") as error:
                sweep.run(task, jobs, path, executor=executor)
    assert '{"seed": 1}, {"seed": 2}, {"seed": 3}. The first one:\nTraceback' in str(error.value)
    assert "seed 1 is bad" in str(error.value)
    assert "seed 2 is bad" not in str(error.value)
    assert tried == [0, 1, 2, 3, 4, 1, 2, 3]  # the failed ones again
    assert [record["value"] for record in sweep.read(path)] == [0, 4]


class NeverUnpickled(Exception):
    """An error that can be pickled, and cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__("it was this")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot be pickled")


RETURNED = {
    "none": None,
    "dict": {"value": 1},
    "numbers": [1, 2],
    "key": [{1: 2}],
    "set": [{"value": {1}}],
    "object": [{"value": Unpicklable()}],
    "job": [{"how": "fine"}],
    "stamp": [{"version": 2}],
}
RAISED = {
    "error": NeverUnpickled(1, 2),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "unpicklable": ValueError(Unpicklable()),
}
SAID = {
    "none": "a task must return a list of dicts, got NoneType: None",
    "dict": "a task must return a list of dicts, got dict",
    "numbers": "a task must return a list of dicts, got int in it: 1",
    "key": "the keys of a record must be strings, got 1",
    "set": "the values of a record must be plain or arrays, got set: {1}",
    "object": "the values of a record must be plain or arrays, got Unpicklable",
    "job": "the job and its record have the key 'how' with two values, 'job' and 'fine'",
    "stamp": "the stamp and a record have the key 'version' with two values, 1 and 2",
    "error": "NeverUnpickled: it was this",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "unpicklable": "ValueError",
}


def misbehave(how: str) -> list[dict]:
    if how in RAISED:
        raise RAISED[how]
    return RETURNED.get(how, [{"value": how}])


@pytest.fixture(params=["processes", "threads"])
def place(request):
    """Where jobs are run."""
    if request.param == "processes":
        yield {"workers": 1}
    else:
        with ThreadPoolExecutor(1) as executor:
            yield {"executor": executor}


def test_jobs_fail_alone(path, place):
    jobs = [{"how": how} for how in ("first", *SAID, "last")]
    with pytest.raises(RuntimeError, match=f"{len(SAID)} jobs failed") as error:
        sweep.run(misbehave, jobs, path, stamp={"version": 1}, **place)
    assert SAID["none"] in str(error.value)
    assert sweep.read(path) == [{"how": how, "version": 1, "value": how} for how in ("first", "last")]


@pytest.mark.parametrize("how", SAID)
def test_what_a_failed_job_did_is_said(path, how):
    with ThreadPoolExecutor(1) as executor, pytest.raises(RuntimeError) as error:
        sweep.run(misbehave, [{"how": how}], path, stamp={"version": 1}, executor=executor)
    assert str(error.value).startswith(f'1 job failed: {{"how": "{how}"}}. The first one:\n')
    assert SAID[how] in str(error.value)


def end_process(seed: int, folder: str) -> list[dict]:
    """The job 1 ends its process the first time it is run, the job 2 each time, the others never."""
    first_time = not (Path(folder) / str(seed)).exists()
    (Path(folder) / str(seed)).touch()
    if seed == 2 and hasattr(os, "fork") and os.fork() == 0:
        time.sleep(5)  # a child of the job outlives it, and holds the pipe to the sweep open
        os._exit(0)
    if seed == 2 or (seed == 1 and first_time):
        os.kill(os.getpid(), signal.SIGTERM)
    return [{"value": seed}]


def test_a_job_that_ends_its_process_fails_alone(path, tmp_path):
    jobs = [{"seed": seed, "folder": str(tmp_path)} for seed in range(6)]
    seen = []
    with (
        progress.to(seen.append),
        pytest.raises(RuntimeError, match=r'1 job failed: {"folder": .*, "seed": 2}') as error,
    ):
        sweep.run(end_process, jobs, path, workers=1)
    assert "ended by SIGTERM, twice" in str(error.value)
    assert sorted(record["value"] for record in sweep.read(path)) == [0, 1, 3, 4, 5]
    assert [(told.done, told.total) for told in seen] == [(i, 6) for i in (*range(7), 6)]


def test_numbers_are_read_back_as_they_were(path):
    values = [float("nan"), float("inf"), -float("inf"), 0.1, 1e-300, 2**70, np.float32(0.1), np.array([np.nan, 1])]
    with ThreadPoolExecutor(1) as executor:
        task = lambda seed: [{"value": value} for value in values]
        for _ in range(2):
            records = sweep.run(task, [{"seed": math.nan}], path, executor=executor, stamp={"limit": math.inf})
            np.testing.assert_equal(
                [record["value"] for record in records], [*values[:6], float(values[6]), [np.nan, 1]]
            )
            assert all(math.isnan(record["seed"]) and record["limit"] == math.inf for record in records)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="another system call locks there")
def test_a_file_system_without_locks_is_warned_of(run, path, monkeypatch):
    import fcntl

    def flock(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked \(no locks available\): no other sweep must write"):
        assert len(run()) == 8


def test_a_record_may_repeat_its_job(path):
    task = lambda seed, rate: [{"seed": np.float32(seed), "rate": math.nan}]
    with ThreadPoolExecutor(1) as executor:
        assert len(sweep.run(task, [{"seed": 1, "rate": math.nan}], path, executor=executor)) == 1


def test_a_task_that_changes_its_arguments_does_not_change_the_job(path):
    def task(rows):
        rows.clear()
        return []

    jobs = [{"rows": [1, 2]}]
    with ThreadPoolExecutor(1) as executor:
        sweep.run(task, jobs, path, executor=executor)
    assert json.loads(path.read_text())["job"] == {"rows": [1, 2]}


@pytest.mark.parametrize(
    ("jobs", "stamp", "said"),
    [
        ([{"seed": 0}, {"seed": np.int64(1)}], {}, "job 1 must hold plain values.*int64"),
        ([{"seed": 0}], {"date": {1}}, "stamp must hold plain values.*set"),
        ([{"seed": 0}], {"seed": 1}, "a job and the stamp have the key 'seed' with two values, 0 and 1"),
    ],
)
def test_what_cannot_be_written_is_an_error_before_anything_is_run(run, calls, path, jobs, stamp, said):
    with pytest.raises(ValueError, match=said):
        run(jobs, stamp=stamp)
    assert calls == []
    assert not path.exists()


def test_a_task_that_other_processes_cannot_find(path):
    with pytest.raises(TypeError, match="the task must be a function of a module"):
        sweep.run(lambda seed: [], [{"seed": 0}], path, workers=1)


def test_a_sweep_is_refused_while_another_one_writes(path):
    def task(seed):
        with ThreadPoolExecutor(1) as second, pytest.raises(BlockingIOError, match="another sweep is writing to"):
            sweep.run(task, [{"seed": 1}], path, executor=second)
        return [{"read": len(sweep.read(path))}]  # reading is allowed

    with ThreadPoolExecutor(1) as executor:
        assert sweep.run(task, [{"seed": 0}], path, executor=executor) == [{"seed": 0, "read": 0}]


def test_of_files_put_together_the_first_record_of_a_job_counts(run, path):
    run(JOBS[:2])
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second + first)  # the same records: nothing is lost
    assert len(sweep.read(path)) == 4
    path.write_text(first + second + first.replace('"rmse"', '"mae"'))
    with pytest.warns(UserWarning, match="line 3 is a job that was finished before, with other records; 1 such"):
        assert [record["metric"] for record in sweep.read(path)] == ["rmse", "rows"] * 2


def test_no_jobs(run, path):
    assert run([]) == []
    assert sweep.read(path) == []


def test_too_few_workers(path):
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        sweep.run(where, [], path, workers=0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities on this system")
def test_every_worker_has_one_thread_on_a_core_of_its_own_and_keeps_programs(path, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    mine = sorted(os.sched_getaffinity(0))[:2]
    with on_cores(mine):
        first, second = sweep.run(where, [{"seed": 0}, {"seed": 1}], path, workers=2)
    assert os.getpid() not in (first["process"], second["process"])
    assert first["NPROC"] == second["NPROC"] == "1"
    assert "NPROC" not in os.environ
    assert first["programs"] == second["programs"] == cache_environment()["JAX_COMPILATION_CACHE_DIR"]
    assert len(first["cores"]) == len(second["cores"]) == 1
    if first["process"] != second["process"]:
        assert {*first["cores"], *second["cores"]} == {*mine}
    assert [first["seed"], second["seed"]] == [0, 1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities on this system")
def test_fewer_workers_than_cores_leave_the_cores_to_the_system(path):
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one core")
    (record,) = sweep.run(where, [{"seed": 0}], path, workers=1)
    assert record["cores"] == mine


@contextmanager
def on_cores(cores):
    """This process, and those that it starts, on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@jax.jit
def double(x):
    return 2 * x


def compiled_before(seed: int, num_maps: int) -> list[dict]:
    """Whether this process still holds the program of an earlier job; then this job's program, and memory maps."""
    compiled = double._cache_size()
    double(1.0)
    MAPS.extend(mmap.mmap(-1, 4096) for _ in range(num_maps))
    return [{"compiled": compiled, "clearings": sweep.clearings}]


MAPS: list[mmap.mmap] = []


@pytest.mark.skipif(not Path("/proc/sys/vm/max_map_count").exists(), reason="no limit of memory maps on this system")
def test_programs_are_forgotten_before_they_use_up_the_memory_maps(path):
    half = int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    jobs = [{"seed": 0, "num_maps": 0}, {"seed": 1, "num_maps": half}, {"seed": 2, "num_maps": 0}]
    records = sweep.run(compiled_before, jobs, path, workers=1)
    assert [record["compiled"] for record in records] == [0, 1, 0]
    assert [record["clearings"] for record in records] == [0, 0, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_workers_end_with_the_sweep(tmp_path, number):
    script = tmp_path / "slow.py"
    script.write_text(SLOW_SWEEP)
    running = tmp_path / "runs.0"
    parent = subprocess.Popen(
        [sys.executable, script, tmp_path / "runs"], stderr=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: running.exists() and running.read_text())
    parent.send_signal(number)
    parent.communicate(timeout=20)
    wait_until(lambda: not is_alive(int(running.read_text())))
    assert sweep.run(where, [], tmp_path / "runs") == []  # nobody holds the file any more


UNGUARDED_SWEEP = """
import sys
from jaxcal import sweep
def task(seed):
    return []
sweep.run(task, [{"seed": 0}], sys.argv[1], workers=1)
"""


@pytest.mark.slow
def test_a_script_that_its_processes_cannot_import(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED_SWEEP)
    ended = subprocess.run([sys.executable, script, tmp_path / "runs"], stderr=subprocess.PIPE, text=True)
    assert "a process of the sweep ended with exit code 1 while it started" in ended.stderr
    assert '`if __name__ == "__main__":`' in ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_forked_process_does_not_keep_the_lock(path):
    def task(seed):
        started, tell = os.pipe()
        child = os.fork()
        if not child:
            os.write(tell, b".")
            time.sleep(60)
            os._exit(0)
        assert os.read(started, 1)
        os.close(started)
        os.close(tell)
        return [{"child": child}]

    with ThreadPoolExecutor(1) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks in processes with threads
        (record,) = sweep.run(task, [{"seed": 0}], path, executor=executor)
    try:
        assert len(sweep.run(where, [], path)) == 0
    finally:
        os.kill(record["child"], signal.SIGKILL)
        os.waitpid(record["child"], 0)


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
