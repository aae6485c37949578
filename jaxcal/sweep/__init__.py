"""Many runs of one function, on the cores of this machine or on a cluster; a finished run is on disk at once.

Threads slow small problems down. So on CPUs a sweep has one process for each core, with a single thread. If all cores
have a process, each process is bound to its core. An accelerator is one device for one process. There, take
`executor=ThreadPoolExecutor(1)`, and do many runs within a job by `vmap`. Clusters are reached through dask, Ray,
submitit or MPI: see docs/how-to/clusters.md. A sweep that was stopped continues where it was.
"""

from typing import Any

from jaxcal.sweep import _calls
from jaxcal.sweep._executors import RayExecutor
from jaxcal.sweep._run import read, run

__all__ = ["RayExecutor", "clearings", "read", "run"]

# How often this process has emptied jax's caches. Earlier programs are then compiled anew.
clearings: int


def __getattr__(name: str) -> Any:
    """The current value of `clearings`."""
    if name == "clearings":
        return _calls.clearings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
