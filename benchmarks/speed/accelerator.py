"""A GPU or TPU beside the CPU of its machine: `python benchmarks/speed/accelerator.py [--small]`.

- "Levene's search": the best split of all rows over ten columns, median-centered.
- "CRUDE": the fit to so many rows, and the intervals of as many.
- "deep ensemble": so many members on 1,000 rows.
- "sharp GP": the fit to so many training rows, and as many to calibrate by.
- "USNRT": a tree of so many rows with its leaves' networks.
- "seeds": a network trained, calibrated by `gaussian_mle` and scored for so many random keys.
- "RIO's table 1": splits of yacht; on each a network and seven Gaussian processes: the paper's six and the NNGP.

Every figure comes from a process of its own, in float32: "first" with compilation, "device" the fastest of later calls.
"CPU" is this machine's, on `--cores` of its cores. A task of many runs is as many processes there, each on a core with
a part of the runs, as `jaxcal.sweep` has them; of a hundred runs and more a fifth, times five, since a CPU does one run
after another. Any other task is one process on these cores. Where the machine has enough cores, all tasks are measured
on the CPU at once, each on cores of its own, while the device works with the rest. "Apart" is how far what both found
lies apart, relative to its size: of networks, which amplify rounding, some percent, and of an ensemble, which has other
members in each process. A process that fails, or does not end and is stopped, has no figure.

`--small` is a check of the script, with other sizes. Without a GPU or TPU the device is the CPU itself, and there are
no ratios.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _common import provenance, tell, verdict

REPEATS = 3
# Asked for: seconds of RIO's table 1, and how many times as fast as two cores batches of a hundred are.
SECONDS, RATIO = 10, 20


class Task(NamedTuple):
    """What is timed.

    Attributes:
        size: how much of it: rows, or runs.
        small: the same with `--small`.
        start: `start(numbers)` of the runs to do, or of range(rows), gives a function without arguments to time.
        is_runs: whether it consists of runs, which can be divided.
    """

    size: int
    small: int
    start: Callable[[range], Callable[[], Any]]
    is_runs: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes, for a check")
    parser.add_argument("--cores", type=int, default=2, help="of the CPU")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a process is stopped")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(*arguments.worker)))
        return
    tell(report(arguments), arguments.out)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield "An accelerator beside the CPU; the docstring of benchmarks/speed/accelerator.py says what is measured"
    yield provenance()
    yield f"\n{'task':18}{'size':>12}{'first s':>9}{'device s':>10}{'CPU s':>9}{'ratio':>7}{'apart':>9}  device"
    sizes = {name: task.small if arguments.small else task.size for name, task in TASKS.items()}
    reached = {}
    for name, device, cpu in measured(sizes, arguments.cores, arguments.timeout):
        size = sizes[name]
        ratio = cpu["seconds"] / device["seconds"] if device["platform"] != "cpu" else np.nan
        apart = abs(cpu["found"] - device["found"]) / abs(cpu["found"])
        figures = f"{device['first']:9.2f}{device['seconds']:10.3f}{cpu['seconds']:9.2f}{ratio:7.1f}{apart:9.1e}"
        yield f"{name:18}{size:12,}{figures}  {device['device']}"
        if np.isfinite(ratio):
            reached[name] = device["seconds"], ratio
    if not arguments.small and "RIO's table 1" in reached:
        seconds, ratio = reached["RIO's table 1"]
        yield f"\nRIO's table 1 in {SECONDS} s: {verdict(seconds <= SECONDS)}"
        yield f"{RATIO} times as fast as {arguments.cores} cores: {verdict(ratio >= RATIO)}"


def measured(sizes: dict[str, int], cores: int, timeout: float) -> Iterator[tuple[str, dict, dict]]:
    """Every task, what is measured on the device, and what on the CPU."""
    usable = sorted(os.sched_getaffinity(0))
    *of_tasks, rest = np.split(usable, np.arange(1, len(sizes) + 1) * cores)
    # The device's process takes as many as a task at least.
    at_once = len(rest) >= cores
    with ThreadPoolExecutor() as pool:
        if at_once:
            jobs = [
                pool.submit(on_cpu, name, size, part.tolist(), timeout)
                for (name, size), part in zip(sizes.items(), of_tasks, strict=True)
            ]
            for (name, size), job in zip(sizes.items(), jobs, strict=True):
                yield name, on_device(name, size, rest.tolist(), timeout), job.result()
            return
    for name, size in sizes.items():
        yield name, on_device(name, size, usable, timeout), on_cpu(name, size, usable[:cores], timeout)


def on_device(name: str, size: int, cores: list[int], timeout: float) -> dict:
    """What a process on the accelerator measures, if there is one, with these cores of the CPU."""
    return result_of([name, 0, size, cores], {"JAX_ENABLE_COMPILATION_CACHE": "false"}, timeout)


def on_cpu(name: str, size: int, usable: list[int], timeout: float) -> dict:
    """What processes on these cores of the CPU measure: the seconds of the slowest, times what part they are of all."""
    if not TASKS[name].is_runs:
        return result_of([name, 0, size, usable], {"JAX_PLATFORMS": "cpu", "NPROC": str(len(usable))}, timeout)
    done = size // 5 if size >= 100 else size
    edges = np.linspace(0, done, len(usable) + 1).astype(int).tolist()
    parts = [[name, *edges[i : i + 2], [core]] for i, core in enumerate(usable)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda part: result_of(part, {"JAX_PLATFORMS": "cpu", "NPROC": "1"}, timeout), parts))
    weights = np.diff(edges) / done
    return {
        "seconds": max(each["seconds"] for each in found) * size / done,
        "found": float(weights @ [each["found"] for each in found]),
    }


def result_of(part: list, environment: dict[str, str], timeout: float) -> dict:
    """What a worker prints; NaN where it failed or did not end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(part)]
    settings = {**os.environ, "JAX_ENABLE_X64": "0", "OPENBLAS_NUM_THREADS": "1", **environment}
    try:
        out = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        missing = dict.fromkeys(("first", "seconds", "found"), float("nan"))
        failed = isinstance(error, subprocess.CalledProcessError)
        return {**missing, "platform": "", "device": "failed" if failed else f"stopped after {timeout:g} s"}
    return json.loads(out.stdout.splitlines()[-1])


def work(name: str, first: int, last: int, cores: list[int] | None = None) -> dict:
    """One task, or some of its runs, in this process."""
    if cores:
        os.sched_setaffinity(0, cores)
    import jax

    call = TASKS[name].start(range(first, last))
    found, compiled = timed(call)
    seconds = min(timed(call)[1] for _ in range(REPEATS))
    device = jax.devices()[0]
    return {
        "first": compiled,
        "seconds": seconds,
        "found": float(found),
        "platform": device.platform,
        "device": device.device_kind,
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What one call returns, and its seconds."""
    import time

    import jax

    began = time.perf_counter()
    found = jax.block_until_ready(call())
    return found, time.perf_counter() - began


def rio_table(numbers: range) -> Callable[[], Any]:
    """Mean CRPS of the eight systems over some splits."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import jaxcal as jc
    from jaxcal.optimize import over_runs

    data = jc.datasets.load("yacht")
    splits = [jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed) for seed in numbers]
    rows = lambda part: (data.x[part].astype(np.float32), data.y[part].astype(np.float32))
    (x, y), (x_test, y_test) = (rows(np.stack(parts)) for parts in zip(*splits, strict=True))

    def train(key, x, y, x_test):
        network = jc.mlp.fit(x, y, key=key)
        return network(x), network(x_test)

    def calibrate(x, before, y, x_test, before_test, y_test, **variant):
        fitted = jc.rio.fit(x, before, y, **variant, throw=False)
        return fitted(x_test, before_test).crps(y_test).mean()

    def nngp(x, y, x_test, y_test):
        return jc.gaussian_process.fit(x, y, kernel="nngp", throw=False)(x_test).crps(y_test).mean()

    kinds = [{"kernel": kernel, "target": target} for kernel in ("io", "input", "output") for target in TARGETS]
    networks = eqx.filter_jit(over_runs(train))
    systems = [eqx.filter_jit(over_runs(lambda *rows, kind=kind: calibrate(*rows, **kind))) for kind in kinds]
    last = eqx.filter_jit(over_runs(nngp))
    keys = jax.vmap(jax.random.key)(jnp.asarray(numbers))

    def call():
        before, before_test = networks(keys, x, y, x_test)
        scores = [system(x, before, y, x_test, before_test, y_test) for system in systems]
        return jnp.stack([*scores, last(x, y, x_test, y_test)]).mean()

    return call


TARGETS = ("residual", "outcome")


def levene_search(numbers: range) -> Callable[[], Any]:
    """|T| of the best split."""
    import jax.numpy as jnp

    from jaxcal.functional import levene

    n, rng = len(numbers), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, 10)).astype(np.float32))
    residuals = jnp.asarray((rng.normal(size=n) * np.where(rng.random(n) < 0.5, 1, 1.1)).astype(np.float32))
    return lambda: levene.best_split(x, residuals, min_leaf=n // 10).statistic


def crude_of_many(numbers: range) -> Callable[[], Any]:
    """The mean width of the intervals."""
    import jax
    import jax.numpy as jnp

    import jaxcal as jc

    n, rng = len(numbers), np.random.default_rng(0)
    mean, std, y = (jnp.asarray(rng.normal(size=n).astype(np.float32)) for _ in range(3))

    @jax.jit
    def widths(mean, log_std, y):
        base = jc.Normal(mean, jnp.exp(log_std))
        lower, upper = jc.crude.fit(None, base, y)(None, base).interval(0.9)
        return jnp.mean(upper - lower)

    return lambda: widths(mean, std, y)


def synthetic(n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with noise that depends on a column."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, columns)).astype(np.float32)
    noise = np.exp(0.5 * x[:, 1]) * rng.normal(size=n)
    return x, (np.sin(2 * x[:, 0]) + 0.2 * noise).astype(np.float32)


def ensemble(numbers: range) -> Callable[[], Any]:
    """The ensemble's mean CRPS."""
    import jax

    from jaxcal.predictors import deep_ensemble

    x, y = synthetic(1000, 8)
    key = jax.random.fold_in(jax.random.key(0), numbers.start)
    return lambda: deep_ensemble.fit(x, y, key=key, num_members=len(numbers), max_epochs=50)(x).crps(y).mean()


def sharp(numbers: range) -> Callable[[], Any]:
    """The mean width of the intervals."""
    import jaxcal as jc
    from jaxcal.calibrators import sharp_gp

    n = len(numbers)
    x, y = synthetic(2 * n, 4)
    base = jc.Point(np.sin(2 * x[:, 0]))

    def call():
        fitted = sharp_gp.fit(x[n:], jc.Point(base.mean[n:]), y[n:], x_train=x[:n], y_train=y[:n])
        lower, upper = fitted(x, base).interval(0.9)
        return (upper - lower).mean()

    return call


def tree(numbers: range) -> Callable[[], Any]:
    """The mean CRPS of the tree's distributions."""
    import jax

    from jaxcal.predictors import usnrt

    x, y = synthetic(len(numbers), 8)
    return lambda: usnrt.fit(x, y, key=jax.random.key(0))(x).crps(y).mean()


def seeds(numbers: range) -> Callable[[], Any]:
    """The mean CRPS over the seeds."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import jaxcal as jc
    from jaxcal.optimize import over_runs

    x, y = synthetic(400, 8)

    def run(key):
        network = jc.mlp.fit(x[:300], y[:300], key=key, max_epochs=50)
        calibrated = jc.gaussian_mle.fit(x[300:], network(x[300:]), y[300:])
        return calibrated(x, network(x)).crps(y).mean()

    runs, keys = eqx.filter_jit(over_runs(run)), jax.vmap(jax.random.key)(jnp.asarray(numbers))
    return lambda: runs(keys).mean()


TASKS = {
    "Levene's search": Task(1_000_000, 5_000, levene_search, is_runs=False),
    "CRUDE": Task(10_000_000, 10_000, crude_of_many, is_runs=False),
    "deep ensemble": Task(100, 2, ensemble, is_runs=True),
    "sharp GP": Task(1_000, 60, sharp, is_runs=False),
    "USNRT": Task(5_000, 1_000, tree, is_runs=False),
    "seeds": Task(1_000, 4, seeds, is_runs=True),
    "RIO's table 1": Task(100, 2, rio_table, is_runs=True),
}

if __name__ == "__main__":
    main()
