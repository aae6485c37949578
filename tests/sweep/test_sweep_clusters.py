"""Sweeps on clusters of this machine: dask, and Ray, submitit and MPI where they are installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcal import progress, sweep

pytestmark = pytest.mark.any_precision

JOBS = [{"seed": seed} for seed in range(8)]
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
NEEDS = {"run_dask.py": "distributed", "run_mpi.py": "mpi4py", "run_ray.py": "ray", "run_submitit.py": "submitit"}
# Two workers of dask in place of those that SLURM would start.
NO_SLURM = """
from distributed import LocalCluster

class SLURMCluster(LocalCluster):
    def __init__(self, cores, processes, memory, walltime):
        super().__init__(n_workers=0, threads_per_worker=1, dashboard_address=None)

    def scale(self, n=0, jobs=0):
        super().scale(2 if jobs else n)
"""


def half(seed: int) -> list[dict]:
    if seed == 3:
        raise ZeroDivisionError("seed 3 is bad")
    return [{"value": seed / 2, "threads": os.environ["OPENBLAS_NUM_THREADS"]}]


def end_process(seed: int) -> list[dict]:
    if seed == 1:
        os._exit(1)
    return [{"value": seed / 2}]


@pytest.fixture(scope="module", autouse=True)
def tasks_are_found():
    """A cluster's processes import the task's module: this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def dask_client():
    distributed = pytest.importorskip("distributed", reason="dask's distributed is not installed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": "CRITICAL"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ray_executor():
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield sweep.RayExecutor(num_cpus=1, max_retries=0)
    ray.shutdown()


@pytest.fixture(scope="module")
def submitit_executor(tmp_path_factory):
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")
    return submitit.LocalExecutor(tmp_path_factory.mktemp("logs"))


@pytest.fixture(params=["dask_client", "ray_executor", "submitit_executor"])
def executor(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.jsonl"


def test_failures_progress_and_resume(executor, path):
    seen = []
    tell = lambda told: None if told.is_finished else seen.append((told.done, told.total))
    with progress.to(tell):
        sweep.run(half, JOBS[:3], path, executor=executor)
    with (
        progress.to(tell),
        pytest.raises(RuntimeError, match=r'1 job failed: {"seed": 3}.*\n(.*\n)*ZeroDivisionError: seed 3 is bad'),
    ):
        sweep.run(half, JOBS, path, executor=executor)
    assert seen == [(i, 3) for i in range(4)] + [(i, 8) for i in range(3, 9)]
    records = sweep.run(half, JOBS[:3] + JOBS[4:], path, executor=executor)
    assert records == [{**job, "value": job["seed"] / 2, "threads": "1"} for job in JOBS if job["seed"] != 3]


@pytest.mark.slow
def test_a_job_that_ends_its_process_fails_alone(executor, path):
    with pytest.raises(RuntimeError, match=r'1 job failed: {"seed": 1}'):
        sweep.run(end_process, JOBS, path, executor=executor)
    assert sorted(record["seed"] for record in sweep.read(path)) == [0, 2, 3, 4, 5, 6, 7]


def test_functions_of_scripts_are_sent_by_value(executor, path):
    task = lambda seed: [{"value": seed / 4}]
    assert sweep.run(task, JOBS[:2], path, executor=executor)[1] == {"seed": 1, "value": 0.25}


@pytest.mark.parametrize("name", ["run.py", *(pytest.param(name, marks=pytest.mark.slow) for name in NEEDS)])
def test_the_programs_of_the_page_run(name, request, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    for file, program in {**PROGRAMS, "dask_jobqueue.py": NO_SLURM}.items():
        (tmp_path / file).write_text(program.replace("range(100)", "range(2)"))
    command = [sys.executable, name]
    if name == "run_ray.py":
        request.getfixturevalue("ray_executor")  # the cluster that it connects to
    if name == "run_mpi.py":
        command = ["mpiexec", "-n", "2", sys.executable, "-m", "mpi4py.futures", name]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    assert len(sweep.read(tmp_path / "runs.jsonl")) == 4


def test_every_block_of_the_page_is_a_program():
    for name, program in PROGRAMS.items():
        compile(program, name, "exec")
    assert PROGRAMS.keys() == {"experiment.py", "run.py", *NEEDS}
    assert len(PROGRAMS) == PAGE.count("```python")
