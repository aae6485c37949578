"""What the scripts of the papers' tables share: how their jobs are run, timed and stamped."""

import argparse
import datetime
import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import jax

import jaxcal as jc
from benchmarks.speed._common import processor
from jaxcal import sweep

# What this process has compiled.
_compiled: set[tuple] = set()


def parser(about: str | None, datasets: Sequence[str], runs: int, fewer: Mapping[str, int]) -> argparse.ArgumentParser:
    """The arguments that all these scripts have.

    Args:
        about: the script's docstring.
        datasets: the names of the data sets, if any.
        runs: how many random splits there are at most.
        fewer: of which data sets there are fewer, and how many.
    """
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if datasets:
        default = ",".join(datasets)
        found.add_argument("--datasets", type=names(datasets), default=default, help=f"default: {default}")
    exceptions = "".join(f"; {name} has {number}" for name, number in fewer.items())
    found.add_argument("--runs", type=int, default=runs, help=f"random splits at most{exceptions}")
    found.add_argument("--workers", type=int, help="processes; default: one for each core")
    found.add_argument("--report", action="store_true", help="run nothing, report what is finished")
    found.add_argument("--out", type=Path, default=Path(__file__).parents[1], help="folder of runs/ and results/")
    return found


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is a list of known names."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {','.join(known)}")
        return given

    return read


def run(task: Callable[..., list[dict]], jobs: Sequence[dict], path: Path, workers: int | None) -> None:
    """All jobs that are not finished yet."""
    stamp = {"jaxcal": version(), "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    # Workers are new processes, which find there what earlier ones compiled.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(path.parent / "compiled"))
    sweep.run(task, jobs, path, workers=workers, stamp=stamp)


def finished(path: Path) -> list[dict]:
    """The records of all runs that were ever finished: a report must not shrink to what was asked for now."""
    records = sweep.read(path)
    if not records:
        raise SystemExit(f"{path} holds no finished runs.")
    return records


def timed(kind: tuple, call: Callable, compiles: Callable | None = None):
    """What the call returns, and its processor seconds; before the first of a kind `compiles`, or the call itself."""
    kind = (sweep.clearings, *kind)
    if kind not in _compiled:
        jax.block_until_ready((compiles or call)())
        _compiled.add(kind)
    began = time.process_time()
    result = jax.block_until_ready(call())
    return result, time.process_time() - began


def origin() -> str:
    """What a result of today is made with: versions, machine and day."""
    return f"jaxcal {version()}, jax {jax.__version__}, {machine()}, {datetime.date.today().isoformat()}"


@cache
def version() -> str:
    """That of jaxcal, with the last commit to the package: 0.1.0+1a2b3c4, and .changed where there is more than it."""
    git = partial(subprocess.run, cwd=Path(jc.__file__).parent, capture_output=True, text=True, check=False)
    commit = git(["git", "log", "-1", "--format=%h", "--", "."]).stdout.strip()
    if not commit:
        return jc.__version__
    changed = ".changed" if git(["git", "status", "--porcelain", "--", "."]).stdout else ""
    return f"{jc.__version__}+{commit}{changed}"


@cache
def machine() -> str:
    """What the numbers are measured on."""
    device = jax.devices()[0]
    return processor() if device.platform == "cpu" else device.device_kind
