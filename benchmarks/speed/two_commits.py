"""Two commits beside each other, every method: `python benchmarks/speed/two_commits.py --before DIR`.

DIR is a checkout of the older commit. Every method is fitted to the same rows by both, and predicts others. Both
commits run at once, each in a process on a core of its own; then once more with the cores exchanged. Seconds are the
least of all calls of a commit but the first ones, which compile. The difference is the largest one between the
predictions, in units of the older std: of the mean, and of the std. Of Levene's search it is that of |T|.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _common import fastest, inferred_by, provenance, tell

# Which commit runs on the first core and which on the second one, in each round.
ROUNDS = ("before", "after"), ("after", "before")
# Calls are repeated for so many seconds, but so many times at least and at most.
SECONDS, LEAST, MOST = 2.0, 3, 50
# Slower than this is said.
SLOWER = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--methods", help="names, with semicolons between them (default: all)")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        os.sched_setaffinity(0, {arguments.core})
        work(arguments.methods, arguments.work)
    else:
        tell(compare(arguments), arguments.out)


def compare(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, after all processes have ended."""
    yield provenance()
    sides = {"before": [], "after": []}
    cores = sorted(os.sched_getaffinity(0))[:2]
    with TemporaryDirectory() as folder:
        for order in ROUNDS:
            outs = [Path(folder) / f"{side}.npz" for side in order]
            processes = [start(arguments, side, core, out) for side, core, out in zip(order, cores, outs, strict=True)]
            if any(process.wait() for process in processes):
                raise SystemExit("a process failed; the reason is above.")
            for side, out in zip(order, outs, strict=True):
                sides[side].append(dict(np.load(out)))
    before, after = sides["before"], sides["after"]
    yield f"{'':28}  before, s   after, s   ratio   first call   mean      std"
    names = json.loads(str(before[0]["names"]))
    ratios = []
    for name in names:
        of = lambda side, key, name=name: min(float(run[f"{name}.{key}"]) for run in sides[side])
        ratio = of("after", "seconds") / of("before", "seconds")
        ratios.append(ratio)
        first = of("after", "first") / of("before", "first")
        unit = np.maximum(before[0][f"{name}.std"], 1e-300)
        differences = [
            np.max(np.abs(after[0][f"{name}.{key}"] - before[0][f"{name}.{key}"]) / unit) for key in ("mean", "std")
        ]
        yield (
            f"{name:28} {of('before', 'seconds'):10.4f} {of('after', 'seconds'):10.4f} {ratio:7.2f} {first:12.2f}   "
            + "   ".join(f"{difference:.0e}" for difference in differences)
            + ("   slower" if ratio > SLOWER else "")
        )
    yield f"geometric mean of the ratios {np.exp(np.mean(np.log(ratios))):.3f}, largest {max(ratios):.2f}"


def start(arguments: argparse.Namespace, side: str, core: int, out: Path) -> subprocess.Popen:
    """A process of one commit."""
    command = [sys.executable, __file__, "--work", str(out), "--core", str(core)]
    command += ["--methods", arguments.methods] if arguments.methods else []
    code = Path(__file__).resolve().parents[2] if side == "after" else arguments.before.resolve()
    one_thread = {"NPROC": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, env={**os.environ, **one_thread, "PYTHONPATH": str(code)})


def work(methods: str | None, out: Path) -> None:
    """Times and predictions of the commit that is on the path."""
    import jax

    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    cases = all_cases()
    names = methods.split(";") if methods else list(cases)
    found: dict[str, Any] = {"names": json.dumps(names)}
    for name in names:
        began = time.perf_counter()
        jax.block_until_ready(cases[name]())
        found[f"{name}.first"] = time.perf_counter() - began
        _, seconds = fastest(cases[name], 1)
        (mean, std), seconds = fastest(cases[name], int(np.clip(SECONDS / seconds, LEAST, MOST)))
        found |= {f"{name}.seconds": seconds, f"{name}.mean": np.asarray(mean), f"{name}.std": np.asarray(std)}
    np.savez(out, **found)


def all_cases() -> dict[str, Callable]:
    """Every method, as a function that fits it and returns the moments of its predictions."""
    import jax

    import jaxcal as jc

    data = jc.datasets.load("concrete")
    train, rest, test = jc.datasets.split(len(data.y), (0.5, 0.25, 0.25), seed=0)
    x, y, new = data.x[train], data.y[train], data.x[test]
    key = jax.random.key(0)
    network = jc.variance_network.fit(x, y, key=key, max_epochs=20)
    point = lambda at: jc.Point(network(at).mean)
    own = (data.x[rest], data.y[rest])
    exact, nearest = inferred_by("Exact"), inferred_by("Nearest")
    process = jc.gaussian_process.fit(x, y, **exact)

    def predictor(fit, **options):
        return lambda: moments(fit(x, y, **options)(new))

    def calibrator(fit, model, **options):
        return lambda: moments(fit(own[0], model(own[0]), own[1], **options)(new, model(new)))

    trained = partial(predictor, key=key, max_epochs=20)
    rio = partial(calibrator, jc.rio.fit, point)
    of_process = {"x_train": x, "y_train": y, "kernel": process}
    cases = {
        "rio": rio(),
        "rio, collapsed": rio(**inferred_by("Sparse", num_inducing=50)),
        "rio, paper": rio(preset="paper"),
        "rio, nearest": lambda: moments(jc.rio.fit(x, point(x), y, **nearest)(new, point(new))),
        "gaussian_process": predictor(jc.gaussian_process.fit, **exact),
        "nngp": predictor(jc.gaussian_process.fit, kernel="nngp"),
        "sharp_gp": calibrator(jc.sharp_gp.fit, process, **of_process),
        "sharp_gp, paper": calibrator(jc.sharp_gp.fit, process, preset="paper", **of_process),
        "crude": calibrator(jc.crude.fit, network),
        "conformal": calibrator(jc.conformal.fit, network),
        "isotonic": calibrator(jc.isotonic.fit, network),
        "gaussian_mle": calibrator(jc.gaussian_mle.fit, network),
        "kmeans": calibrator(jc.kmeans.fit, point, key=key),
        "accrue": calibrator(jc.accrue.fit, point, key=key),
        "neural_quantiles": calibrator(jc.neural_quantiles.fit, network, key=key, max_epochs=20, pretraining_epochs=20),
        "mlp": trained(jc.mlp.fit),
        "variance_network": trained(jc.variance_network.fit),
        "variance_network, alternating": trained(jc.variance_network.fit, form="alternating"),
        "deep_ensemble": trained(jc.deep_ensemble.fit),
        "dropout": trained(jc.dropout.fit),
        "dropout, concrete": trained(jc.dropout.fit, rate="concrete"),
        "evidential": trained(jc.evidential.fit),
        "neural_process": predictor(jc.neural_process.fit, key=key, max_iterations=200),
        "usnrt": trained(jc.usnrt.fit, min_leaf=100, splits=jc.usnrt.Splits(significance=0.5)),
    }
    return cases | {f"accrue, toy {name}": toy(name) for name in "gyw"} | levene_cases()


def moments(distribution):
    """The mean and the std."""
    return distribution.mean, distribution.std


def toy(name: str) -> Callable:
    """ACCRUE on a problem of its paper."""
    import jax

    import jaxcal as jc

    data = jc.datasets.heteroscedastic(name, 100, seed=0)
    base = lambda: jc.Point(data.mean)
    return lambda: moments(jc.accrue.fit(data.x, base(), data.y, key=jax.random.key(0))(data.x, base()))


def levene_cases() -> dict[str, Callable]:
    """The search for the best split of protein's 45,730 rows; what is predicted is |T|, of std 1."""
    import jax.numpy as jnp

    import jaxcal as jc
    from jaxcal.functional import levene

    data = jc.datasets.load("protein")
    x = jnp.asarray(data.x)
    residuals = jnp.asarray(data.y - data.y.mean())

    def search(center: str, step: int):
        split = levene.best_split(x, residuals, min_leaf=4573, center=center, step=step)
        return split.statistic[None], jnp.ones(1)

    return {
        f"levene, {center}, step {step}": partial(search, center, step)
        for center in ("mean", "median")
        for step in (1, 10)
    }


if __name__ == "__main__":
    main()
