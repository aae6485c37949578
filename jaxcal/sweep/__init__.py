"""Many runs of one function: on the cores of this machine or on a cluster, each finished run on disk at once.

Threads slow small problems down: on CPUs a sweep is one process a core, each with a single thread and, where all cores
have one, bound to its core. An accelerator is one device for one process: there, take `executor=ThreadPoolExecutor(1)`,
and do many runs within a job by `vmap`. Clusters are reached through dask, Ray, submitit or MPI: see
docs/how-to/clusters.md. A sweep that was stopped goes on where it was.
"""

from typing import Any

from jaxcal.sweep import _calls
from jaxcal.sweep._executors import RayExecutor
from jaxcal.sweep._run import read, run

__all__ = ["RayExecutor", "clearings", "read", "run"]

# How often this process has emptied jax's caches: what was compiled before is compiled anew.
clearings: int


def __getattr__(name: str) -> Any:
    """`clearings`, as it is now."""
    if name == "clearings":
        return _calls.clearings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
