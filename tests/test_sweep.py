"""Sweeps: finished jobs are kept and not run again, failures lose nothing, workers are pinned and end in time."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxcal import sweep

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
    return [{"process": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "NPROC": os.environ["NPROC"]}]


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
    progress = []
    records = run(stamp={"version": "2"}, on_progress=lambda *numbers: progress.append(numbers))
    assert calls == [0, 1, 2, 3]
    assert progress == [(2, 4), (3, 4), (4, 4)]
    assert records[::2] == [
        {**job, "version": "1" if job["seed"] < 2 else "2", "metric": "rmse", "value": job["seed"] / 2} for job in JOBS
    ]
    assert [record["value"] for record in records[1::2]] == [[0, 1]] * 4
    assert records == sweep.read(path)


def test_order_of_arguments_does_not_make_another_job(run, calls):
    run([{"dataset": "a", "seed": 0}, {"seed": 0, "dataset": "a"}])
    assert calls == [0]


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


def test_no_jobs(run, path):
    assert run([]) == []
    assert sweep.read(path) == []


def test_too_few_workers(path):
    with pytest.raises(ValueError, match="workers must be positive, got 0"):
        sweep.run(where, [], path, workers=0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities on this system")
def test_every_worker_has_one_thread_on_a_core_of_its_own(path, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    mine = sorted(os.sched_getaffinity(0))
    first, second = sweep.run(where, [{"seed": 0}, {"seed": 1}], path, workers=2)
    assert os.getpid() not in (first["process"], second["process"])
    assert first["NPROC"] == second["NPROC"] == "1"
    assert "NPROC" not in os.environ
    assert len(first["cores"]) == len(second["cores"]) == 1
    if first["process"] != second["process"]:
        assert {*first["cores"], *second["cores"]} == set(mine[:2])
    assert [first["seed"], second["seed"]] == [0, 1]


@jax.jit
def double(x):
    return 2 * x


def compiled_before(seed: int, num_maps: int) -> list[dict]:
    """Whether this process still holds the program of an earlier job; then this job's program, and memory maps."""
    compiled = double._cache_size()
    double(1.0)
    MAPS.extend(mmap.mmap(-1, 4096) for _ in range(num_maps))
    return [{"compiled": compiled}]


MAPS: list[mmap.mmap] = []


@pytest.mark.skipif(not Path("/proc/sys/vm/max_map_count").exists(), reason="no limit of memory maps on this system")
def test_programs_are_forgotten_before_they_use_up_the_memory_maps(path):
    half = int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    jobs = [{"seed": 0, "num_maps": 0}, {"seed": 1, "num_maps": half}, {"seed": 2, "num_maps": 0}]
    assert [record["compiled"] for record in sweep.run(compiled_before, jobs, path, workers=1)] == [0, 1, 0]


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
