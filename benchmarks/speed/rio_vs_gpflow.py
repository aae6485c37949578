"""RIO by jaxcal and by GPflow 2, side by side: `python benchmarks/speed/rio_vs_gpflow.py`.

`make bench-peers` builds the environment that GPflow runs in, apart from jaxcal's. Both sides see the same splits, the
same predictions of one network a split (the paper's, trained by jaxcal) and the same cores, in float64, and explain
the residuals of the training rows:

- GPflow SVGP, as RIO's authors ran it: squared-exponential kernels of the standardized inputs and of the network's
  output; residuals and output not scaled; 50 inducing points initially the first rows, and trained; whitened
  q(u) of mean 0 and covariance I; variances, lengthscales and noise 1; full batch; `gpflow.optimizers.Scipy`
  (L-BFGS-B, compiled), at most 1000 iterations.
- GPflow SGPR: the same without q(u), a stronger peer.
- jaxcal, paper's setting: `rio.fit(preset="paper")`; the same model, q(u) in closed form.
- jaxcal, default: `rio.fit()`; up to 2000 rows the exact process. It ends where its default tolerance lets it, all
  others where scipy's L-BFGS-B does.

A system runs in two ways: in one process that has all cores, as one would start it; and side by side in as many pinned
processes as there are cores, with one thread each, which share the runs. Seconds a run are the time of the slowest
process, divided by all runs. They hold fits and their predictions at the test rows, but not what is compiled: jaxcal's
first call; and GPflow's construction of the model and first evaluation of its loss, in which TensorFlow traces it,
since a sweep over runs of one shape could do with one. "All in" counts this set-up, GPflow's in every run, since every
new model is traced, jaxcal's once in every process. Every way of jaxcal is set against every way of GPflow; what
stands in the table behind the seconds a run is of each system's faster way.

Bounds are in units of the raw residuals: jaxcal's default scales its target, which adding -n log(scale) undoes. It
centers its target as well: its process has the mean residual for its mean, all others 0. GPflow adds a jitter of 1e-6
to the inducing points' covariance; jaxcal 1e-8 of its mean diagonal there, none to the exact process, and at least 1e-6
of noise.

The last part times one evaluation of the collapsed bound with its gradient, by all hyperparameters and inducing points,
on protein, both sides at the same hyperparameters, inducing points and jitter. With all cores, jaxcal's rows are spread
over a mesh of them: every core is a device. The values do not change the time, so a linear model stands in for the
network there.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _common import processor, tell, verdict

HERE = Path(__file__).resolve().parent
SVGP, SGPR, PAPER, DEFAULT = "GPflow SVGP", "GPflow SGPR", "jaxcal, paper's setting", "jaxcal, default"
ONE_PROCESS, SIDE_BY_SIDE = "one process", "side by side"
# How many times as fast as GPflow's SVGP, and as the gradient of its SGPR, jaxcal is asked to be.
ASKED, ASKED_OF_BOUND = {PAPER: 5, DEFAULT: 25}, 5
NUM_INDUCING, MAX_ITERATIONS = 50, 1000
# The limits on the iterations with which jaxcal tries to reach GPflow's bound.
LADDER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# The jitter that GPflow adds to the inducing points' covariance, and how closely both sides' bounds must agree.
JITTER, AGREEMENT = 1e-6, 1e-8
READY = "ready"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="yacht,energy_heating", help="names, comma-separated; '' for none")
    parser.add_argument("--runs", type=int, default=20, help="number of random splits")
    parser.add_argument("--repeats", type=int, default=50, help="evaluations of the bound on protein; 0 for none")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    peers = HERE.parents[1] / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers", type=Path, default=peers, help="the interpreter that has GPflow")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    if not arguments.peers.is_file():
        parser.error(f"{arguments.peers} is not there: run `make bench-peers`, or name GPflow's python by --peers.")
    tell(report(arguments), arguments.out)


# What is reported


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    sides = Sides(str(arguments.peers))
    yield from heading(sides)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, arguments.datasets.split(",")):
            yield ""
            yield from compare_fits(sides, name, Path(folder) / f"{name}.npz", arguments.runs)
        if arguments.repeats:
            yield ""
            yield from compare_bounds(sides, "protein", Path(folder) / "protein.npz", arguments.repeats)


def heading(sides: "Sides") -> Iterator[str]:
    versions = sides.ask(PAPER, task="versions") | sides.ask(SVGP, task="versions")
    yield "RIO by jaxcal and by GPflow; the docstring of benchmarks/speed/rio_vs_gpflow.py says what is measured"
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"{processor()}, {len(cores())} cores, {datetime.date.today().isoformat()}"


def compare_fits(sides: "Sides", name: str, file: Path, runs: int) -> Iterator[str]:
    """All systems on one data set: the table, the ratios, and how soon jaxcal is where GPflow ends."""
    yield f"{name}, {runs} runs: " + sides.ask(PAPER, task="networks", dataset=name, runs=runs, file=str(file))["size"]
    yield (
        f"{'':24}{'seconds a run':^26}{'seconds a run, all in':^26}{'median s':^19}{'bound':^21}{'median':>11}"
        f"{'mean on test rows':>20}\n"
        f"{'':24}{ONE_PROCESS:>13}{SIDE_BY_SIDE:>13}{ONE_PROCESS:>13}{SIDE_BY_SIDE:>13}{'fit':>10}{'set-up':>9}"
        f"{'mean':>11}{'median':>10}{'iterations':>11}{'RMSE':>10}{'NLPD':>10}"
    )
    measured = {}
    for system in (SVGP, SGPR, PAPER, DEFAULT):
        measured[system] = measure(sides, system, file, runs)
        yield table_row(system, measured[system])
    yield from ratios(measured)
    for system in (PAPER, DEFAULT):
        yield f"{system}:"
        yield from (difference(measured, system, peer) for peer in (SVGP, SGPR))
        yield time_to_bound(sides, measured, system, file)


class Measured(NamedTuple):
    """A system's seconds a run by the way it ran in, without and with set-up, and a record a run of the faster way."""

    seconds: dict[str, float]
    all_in: dict[str, float]
    records: list[dict]

    def times(self, all_in: bool) -> dict[str, float]:
        """Seconds a run by way, with set-up if `all_in`."""
        return self.all_in if all_in else self.seconds

    def __call__(self, key: str) -> np.ndarray:
        """One entry of all records, in the order of the runs."""
        return np.array([record[key] for record in self.records])


def measure(sides: "Sides", system: str, file: Path, runs: int) -> Measured:
    ways = {
        way: sides.share(system, where, runs, task="fits", file=str(file), max_iterations=MAX_ITERATIONS)
        for way, where in ((ONE_PROCESS, [None]), (SIDE_BY_SIDE, cores()))
    }
    seconds, all_in = (
        {way: seconds_a_run(processes, *keys) for way, processes in ways.items()}
        for keys in (("seconds",), ("seconds", "set_up"))
    )
    faster = ways[min(seconds, key=seconds.__getitem__)]
    records = sorted((record for process in faster for record in process), key=lambda record: record["run"])
    return Measured(seconds, all_in, records)


def seconds_a_run(processes: list[list[dict]], *keys: str) -> float:
    """The time of the slowest process, divided by the runs of all."""
    slowest = max(sum(record[key] for record in records for key in keys) for records in processes)
    return slowest / sum(len(records) for records in processes)


def table_row(system: str, measured: Measured) -> str:
    set_up, bound = measured("set_up"), measured("bound")
    times = "".join(f"{value:13.3f}" for values in (measured.seconds, measured.all_in) for value in values.values())
    return (
        f"{system:24}{times}"
        f"{np.median(measured('seconds')):10.3f}{np.median(set_up[set_up > 0]):9.2f}"
        f"{bound.mean():11.2f}{np.median(bound):10.2f}{np.median(measured('iterations')):11.0f}"
        f"{measured('rmse').mean():10.3f}{measured('nlpd').mean():10.3f}"
    )


def ratios(measured: dict[str, Measured]) -> Iterator[str]:
    """How many times as fast as GPflow, every way against every way, with what was asked for."""
    peers = [(peer, way) for peer in (SVGP, SGPR) for way in (ONE_PROCESS, SIDE_BY_SIDE)]
    yield f"{'times as fast as':46}" + "".join(f"{f'{peer}, {way}':>28}" for peer, way in peers)
    for all_in in (False, True):
        for system in (PAPER, DEFAULT):
            for way in (ONE_PROCESS, SIDE_BY_SIDE):
                own = measured[system].times(all_in)[way]
                row = f"{system}, {way}"
                yield f"{row + ', all in' * all_in:46}" + "".join(
                    f"{ratio(measured[peer].times(all_in)[other] / own, system, peer, all_in):>28}"
                    for peer, other in peers
                )


def ratio(times: float, system: str, peer: str, all_in: bool) -> str:
    if peer == SVGP and not all_in:
        return f"{verdict(times >= ASKED[system])}, asked {ASKED[system]}: {times:.1f}"
    return f"{times:.1f}"


def difference(measured: dict[str, Measured], system: str, peer: str) -> str:
    gain = measured[system]("bound") - measured[peer]("bound")
    asked = f" (asked for: at or above; {verdict(gain.mean() >= 0)})" if (system, peer) == (DEFAULT, SVGP) else ""
    return (
        f"  bound {gain.mean():+.2f} in the mean against {peer}{asked}, "
        f"at or above in {np.sum(gain >= 0)} of {len(gain)} runs, {gain.min():+.2f} in the worst"
    )


def time_to_bound(sides: "Sides", measured: dict[str, Measured], system: str, file: Path) -> str:
    """How soon the system is at or above the bound at which GPflow's SVGP ends; one run after another."""
    goals, peer_seconds = measured[SVGP]("bound"), measured[SVGP]("seconds")
    if system == PAPER:
        processes = sides.share(PAPER, cores(), len(goals), task="climb", file=str(file), goals=goals.tolist())
        records = [record for process in processes for record in process]
        how = f"the lowest of {len(LADDER)} limits on the iterations that suffices"
    else:
        records = [record for record in measured[system].records if record["bound"] >= goals[record["run"]]]
        how = "the whole fit"
    begins = f"  at the bound where {SVGP} ends in {len(records)} of {len(goals)} runs"
    if not records:
        return begins
    seconds = statistics.median(record["seconds"] for record in records)
    sooner = statistics.median(peer_seconds[record["run"]] / record["seconds"] for record in records)
    iterations = statistics.median(record["iterations"] for record in records)
    return f"{begins}, {how}: {seconds:.3f} s, {iterations:.0f} iterations, {sooner:.1f} times as soon (medians)"


def compare_bounds(sides: "Sides", name: str, file: Path, repeats: int) -> Iterator[str]:
    """The collapsed bound with its gradient, with all cores and with one."""
    size = sides.ask(PAPER, task="linear", dataset=name, file=str(file))["size"]
    yield f"{name}, the collapsed bound with its gradient: {size}, {NUM_INDUCING} inducing points, {repeats} times"
    yield f"{'':24}{'all cores, ms':^20}{'one pinned core, ms':^20}"
    yield f"{'':24}{'median':>10}{'least':>10}{'median':>10}{'least':>10}{'value':>18}{'norm of gradient':>18}"
    found = {
        system: [sides.ask(system, core, task="bound", file=str(file), repeats=repeats) for core in (None, cores()[0])]
        for system in (SGPR, PAPER)
    }
    for side, ways in zip((SGPR, "jaxcal"), found.values(), strict=True):
        times = "".join(f"{1000 * way[key]:10.1f}" for way in ways for key in ("median", "least"))
        yield f"{side:24}{times}{ways[0]['value']:18.6f}{ways[0]['gradient']:18.6f}"
    for key in ("median", "least"):
        peer, own = (np.array([way[key] for way in found[system]]) for system in (SGPR, PAPER))
        times, best = peer / own, peer.min() / own.min()
        yield (
            f"by the {key}, jaxcal is {times[0]:.1f} times as fast with all cores, {times[1]:.1f} with one, {best:.1f} "
            f"best against best (asked for: {ASKED_OF_BOUND}; {verdict(min(*times, best) >= ASKED_OF_BOUND)})"
        )
    for key in ("value", "gradient"):
        peer, own = (found[system][0][key] for system in (SGPR, PAPER))
        if abs(own - peer) > AGREEMENT * abs(peer):
            raise SystemExit(f"the {key}s differ: {peer} by GPflow, {own} by jaxcal.")
    yield f"both values and both gradients (by the inducing points) agree to {AGREEMENT:.0e} of their size"


# The processes that do the work


@cache
def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def device_a_core() -> dict[str, str]:
    """Makes a device of each core, for a mesh. OpenBLAS's threads would only wait, and keep a core busy with it."""
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={len(cores())}", "OPENBLAS_NUM_THREADS": "1"}


class Sides:
    """Both sides of the race: which interpreter and script runs a system, on which cores."""

    def __init__(self, peers: str):
        self.peers = peers

    def ask(self, system: str, core: int | None = None, **job) -> dict:
        """The one record that a process answers with; without a core it has all of them."""
        return together([self._launch(system, core, job)])[0][0]

    def share(self, system: str, where: list[int | None], runs: int, **job) -> list[list[dict]]:
        """The records of processes that share the runs, one on each core."""
        return together(
            [
                self._launch(system, core, job | {"system": system, "runs": list(range(i, runs, len(where)))})
                for i, core in enumerate(where[:runs])
            ]
        )

    def _launch(self, system: str, core: int | None, job: dict) -> "Worker":
        if system in (SVGP, SGPR):
            return Worker([self.peers, str(HERE / "gpflow_worker.py")], core, job)
        one_each = job["task"] == "bound" and core is None
        return Worker([sys.executable, str(Path(__file__).resolve())], core, job, device_a_core() if one_each else {})


class Worker:
    """A process that says when it is ready, waits for the start, and prints a record a line; see `emit`."""

    def __init__(self, command: list[str], core: int | None, job: dict, variables: Mapping[str, str] = {}):
        alike = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
        single = {} if core is None else dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        # A child inherits its parent's cores: no library uses others, even while it is imported.
        os.sched_setaffinity(0, cores() if core is None else [core])
        self.process = subprocess.Popen(
            [*command, "--worker", json.dumps(job | {"core": core})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | alike | single | variables,
        )
        os.sched_setaffinity(0, cores())

    def wait_until_ready(self) -> None:
        """Wait until it has compiled everything."""
        if self.process.stdout.readline() != READY + "\n":
            self._fail()

    def start(self) -> None:
        """Let it measure."""
        self.process.stdin.write("\n")
        self.process.stdin.close()

    def records(self) -> list[dict]:
        """What it measured, once it has ended."""
        lines = self.process.stdout.readlines()
        if self.process.wait() != 0:
            self._fail()
        return [json.loads(line) for line in lines]

    def _fail(self) -> None:
        code = self.process.wait()
        self.errors.seek(0)
        raise SystemExit(f"{' '.join(self.process.args)} ended with {code}:\n{self.errors.read()[-4000:]}")


def together(workers: list[Worker]) -> list[list[dict]]:
    """The records of processes that start to measure at the same time."""
    for worker in workers:
        worker.wait_until_ready()
    for worker in workers:
        worker.start()
    return [worker.records() for worker in workers]


# What a worker calls, on either side


def job() -> dict:
    """What a worker is asked to do."""
    return json.loads(sys.argv[sys.argv.index("--worker") + 1])


def wait_for_start() -> None:
    """Tell that everything is compiled and wait until the others are ready, too."""
    print(READY, flush=True)
    sys.stdin.readline()


def emit(**record: object) -> None:
    """Hand a record over."""
    print(json.dumps(record), flush=True)


def time_evaluations(evaluate: Callable[[], tuple[float, np.ndarray]]) -> None:
    """Emit the value, the norm of the gradient, and the seconds of one call, without the first two."""
    evaluate()
    value, gradient = evaluate()
    wait_for_start()
    seconds = []
    for _ in range(job()["repeats"]):
        began = time.perf_counter()
        evaluate()
        seconds.append(time.perf_counter() - began)
    emit(value=value, gradient=float(np.linalg.norm(gradient)), median=statistics.median(seconds), least=min(seconds))


# jaxcal's worker; GPflow's is gpflow_worker.py


def work() -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    {"versions": versions, "networks": networks, "linear": linear, "fits": fits, "climb": climb, "bound": bound}[
        job()["task"]
    ]()


def versions() -> None:
    import jax

    import jaxcal

    wait_for_start()
    emit(jaxcal=jaxcal.__version__, jax=jax.__version__)


def networks() -> None:
    """Save every run's split and the predictions of the paper's network for it: all networks under one vmap."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import jaxcal as jc

    wait_for_start()
    runs = job()["runs"]
    data = jc.datasets.load(job()["dataset"])
    splits = [jc.datasets.split(len(data.y), (0.8, 0.2), seed=run) for run in range(runs)]
    x, y = (np.stack([values[train] for train, _ in splits]) for values in (data.x, data.y))
    x_test, y_test = (np.stack([values[test] for _, test in splits]) for values in (data.x, data.y))

    @eqx.filter_jit
    @eqx.filter_vmap
    def predict(x, y, x_test, key):
        network = jc.mlp.fit(x, y, key=key, preset="paper")
        return network(x).mean, network(x_test).mean

    keys = jax.vmap(jax.random.key)(jnp.arange(runs))
    base, base_test = predict(*map(jnp.asarray, (x, y, x_test)), keys)
    np.savez(job()["file"], x=x, y=y, base=base, x_test=x_test, y_test=y_test, base_test=base_test)
    emit(size=f"{y.shape[1]} rows of {x.shape[2]} columns, {y_test.shape[1]} test rows")


def linear() -> None:
    """Save the training rows of one split and a linear model's predictions for them."""
    import jaxcal as jc

    wait_for_start()
    data = jc.datasets.load(job()["dataset"])
    train, _ = jc.datasets.split(len(data.y), (0.8, 0.2), seed=0)
    x, y = data.x[train], data.y[train]
    design = np.column_stack([np.ones(len(x)), x])
    np.savez(job()["file"], x=x, y=y, base=design @ np.linalg.lstsq(design, y)[0])
    emit(size=f"{len(y)} rows of {x.shape[1]} columns")


def fits() -> None:
    """A record a run; the process's first tells how long its first call took, with compilation."""
    rows, runs = dict(np.load(job()["file"])), job()["runs"]
    began = time.perf_counter()
    fit(rows, runs[0], job()["system"], MAX_ITERATIONS)
    first = time.perf_counter() - began
    wait_for_start()
    for run in runs:
        emit(set_up=first if run == runs[0] else 0, **fit(rows, run, job()["system"], MAX_ITERATIONS))


def climb() -> None:
    """A record for every run that reaches its goal: that of the first rung of the ladder at which it does."""
    rows, left, goals = dict(np.load(job()["file"])), job()["runs"], job()["goals"]
    wait_for_start()
    for limit in LADDER:
        if left:
            fit(rows, left[0], PAPER, limit)  # compiles
        reached = [record for run in left if (record := fit(rows, run, PAPER, limit))["bound"] >= goals[run]]
        for record in reached:
            emit(**record)
            left.remove(record["run"])


def fit(rows: dict[str, np.ndarray], run: int, system: str, max_iterations: int) -> dict:
    """Seconds of a fit with its prediction, the bound in units of the raw residuals, and the test scores."""
    import jax

    import jaxcal as jc

    x, x_test, y, y_test = (rows[key][run] for key in ("x", "x_test", "y", "y_test"))
    base, base_test = (jc.Point(rows[key][run]) for key in ("base", "base_test"))
    options = {}
    if system == PAPER:
        limits = {"tolerance": 0.0, "max_iterations": max_iterations}
        inference = jc.gp.Sparse(num_inducing=NUM_INDUCING, points="trained", ard=False, **limits)
        options = {"preset": "paper", "inference": inference}
    began = time.perf_counter()
    rio = jc.rio.fit(x, base, y, **options)
    rio, after = jax.block_until_ready((rio, rio(x_test, base_test)))
    return {
        "run": run,
        "seconds": time.perf_counter() - began,
        "bound": float(rio.evidence - len(y) * np.log(rio.target_scaler.scale)),
        "iterations": int(rio.iterations),
        "rmse": float(jc.metrics.rmse(y_test, after)),
        "nlpd": float(jc.metrics.nlpd(y_test, after)),
    }


def bound() -> None:
    """Seconds of the collapsed bound with its gradient, at GPflow's initial hyperparameters and points."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from jaxcal.calibrators.rio import IOKernel, Points
    from jaxcal.frames.preprocessing import Standardizer
    from jaxcal.gp.kernels import SquaredExponential, take
    from jaxcal.gp.model import Data, Model, evidence

    rows = {name: jnp.asarray(values) for name, values in np.load(job()["file"]).items()}
    points = Points(Standardizer.of(rows["x"])(rows["x"]), rows["base"][:, None])
    data, mesh = Data(points, rows["y"] - rows["base"]), None
    if jax.device_count() > 1:
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("cores",))
    zero = jnp.zeros(())
    kernel = IOKernel(SquaredExponential(zero, zero), SquaredExponential(zero, zero))
    # The least noise that a process can have is taken off, so that its noise is 1.
    least = Model(kernel, jnp.asarray(-jnp.inf)).noise_variance(points)
    start = Model(kernel, jnp.log1p(-least), inducing=take(points, jnp.arange(NUM_INDUCING)))
    # Relative to the mean variance, which is 2.
    jitter = jnp.asarray(JITTER / 2)

    @eqx.filter_jit
    def value_and_grad(model, data, jitter):
        return eqx.filter_value_and_grad(evidence)(model, data, jitter, mesh)

    def evaluate() -> tuple[float, np.ndarray]:
        value, gradient = jax.block_until_ready(value_and_grad(start, data, jitter))
        return float(value), np.column_stack(jax.tree.leaves(gradient.inducing))

    time_evaluations(evaluate)


if __name__ == "__main__":
    main()
