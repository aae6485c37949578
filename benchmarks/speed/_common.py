"""What the scripts of this folder share: what they ran on, timing, and printing.

jax is imported only where a call is timed: peers are measured in processes without it.
"""

import datetime
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# All real data sets that are compared on.
DATASETS = (
    "airfoil",
    "appliances",
    "auto_mpg",
    "beijing_pm25",
    "blog",
    "boston",
    "cbm",
    "concrete",
    "diabetes",
    "election",
    "energy_cooling",
    "energy_heating",
    "forest_fires",
    "gpu_sgemm",
    "grid_stability",
    "kin8nm",
    "naval_compressor",
    "parkinsons_total",
    "power_plant",
    "protein",
    "steel",
    "tetuan",
    "traffic",
    "wine_red",
    "wine_white",
    "yacht",
)


def provenance(*packages: str) -> str:
    """Versions, processor, cores and date."""
    versions = [f"{package} {version(package)}" for package in ("jaxcal", "jax", "jaxlib", *packages)]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join([*versions, processor(), cores, datetime.date.today().isoformat()])


def processor() -> str:
    """The model's name."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory() -> float:
    """The largest resident set so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def fastest(call: Callable, repeats: int, clock: Callable[[], float] = time.perf_counter):
    """What a call returns, and the seconds of the fastest of some, after a first one.

    With `time.process_time` for a clock other processes on the core do not count.
    """
    import jax

    result, seconds = None, []
    for repeat in range(repeats + 1):
        result = None  # two results at once would count as memory
        began = clock()
        result = jax.block_until_ready(call())
        if repeat:
            seconds.append(clock() - began)
    return result, min(seconds)


def inferred_by(name: str, **options: Any) -> dict[str, Any]:
    """The arguments of `rio.fit` and `gaussian_process.fit` for an inference of `jc.gp`, by the jaxcal on the path.

    An older commit knows names in place of these objects.
    """
    import jaxcal as jc

    try:
        return {"inference": getattr(jc.gp, name)(**options)}
    except AttributeError:
        return {"bound": {"Exact": "exact", "Sparse": "collapsed", "Nearest": "nearest"}[name], **options}


def verdict(reached: bool) -> str:
    """Of a figure that was asked for."""
    return "reached" if reached else "not reached"


def tell(lines: Iterable[str], out: Path | None) -> None:
    """Print every line as soon as it is known, and write all of them to a file at the end."""
    printed = []
    for line in lines:
        print(line, flush=True)
        printed.append(line)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(printed) + "\n", encoding="utf-8")
