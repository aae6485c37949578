"""The exact process beside sparse bounds, and their initial values: `python benchmarks/speed/rio_bounds.py`.

First the bounds: for training sets of growing size, the evidence, the error on test rows and the seconds of the exact
process and of the sparse bound with 50, 100 and 200 greedy points and with 50 trained ones; "converged" is climbed at
tolerance 0, the others at the default. Then the initial values: every one of the grid of `rio.fit`, climbed alone with
the 100 greedy points of its own, beside the sparse fit that begins where the best of them leads. Base models that
explain much (the paper's network, overfitted), little (a linear one) and nothing (a constant) have residuals of
different kinds. Seconds are processor time of fit and prediction, compilation apart: pin the process to one core.
"""

import argparse
import statistics
import time
import warnings
from itertools import chain
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import provenance, tell

import jaxcal as jc
from jaxcal.calibrators import rio
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.gp import fit, initial, model
from jaxcal.gp.protocols import Inference

# Data sets with the number of training rows taken; None for 80 % of all.
SIZES = (
    ("yacht", None),
    ("concrete", 400),
    ("energy_heating", None),
    ("concrete", None),
    ("airfoil", None),
    ("wine_red", None),
)
BOUNDS = {
    "exact": jc.gp.Exact(),
    "converged": jc.gp.Exact(tolerance=0.0),
    "50 trained": jc.gp.Sparse(num_inducing=50, points="trained"),
    "50 greedy": jc.gp.Sparse(num_inducing=50),
    "100 greedy": jc.gp.Sparse(num_inducing=100),
    "200 greedy": jc.gp.Sparse(num_inducing=200),
}
CLIMBED = ("yacht", "energy_heating", "airfoil")
BASES = ("network", "linear", "constant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="random splits of every data set")
    parser.add_argument("--out", type=Path, help="file that gets a copy of what is printed")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    # With fewer rows than points all of them are taken, and rio.fit says so.
    warnings.simplefilter("ignore")
    tell(chain([provenance()], bounds(arguments.seeds), climbs(arguments.seeds)), arguments.out)


def bounds(num_seeds: int):
    """The exact process and the sparse bound on the network's residuals: means over the seeds."""
    yield f"\nBounds: means over seeds 0 to {num_seeds - 1}; evidence in nats of the scaled residuals"
    yield f"{'data set':16}{'rows':>6}  {'bound':12}{'evidence':>10}{'RMSE':>8}{'NLPD':>8}{'steps':>7}{'seconds':>9}"
    for name, rows in SIZES:
        splits = [split(name, seed, "network", rows) for seed in range(num_seeds)]
        for label, inference in BOUNDS.items():
            found = np.mean([fitted(*part, inference) for part in splits], axis=0)
            value, rmse, nlpd, steps, seconds = found
            cells = f"{value:10.1f}{rmse:8.3f}{nlpd:8.3f}{steps:7.0f}{seconds:9.3f}"
            yield f"{name:16}{len(splits[0][2]):6}  {label:12}{cells}"


def fitted(x, base, y, x_test, base_test, y_test, inference: Inference) -> list[float]:
    """Evidence, error, iterations and seconds of one fit."""
    call = lambda: predicted(rio.fit(x, base, y, inference=inference), x_test, base_test)
    call()  # compiles
    began = time.process_time()
    process, after = call()
    seconds = time.process_time() - began
    scores = jc.metrics.rmse(y_test, after), jc.metrics.nlpd(y_test, after)
    return [float(value) for value in (process.evidence, *scores, process.iterations, seconds)]


def predicted(process: rio.RIO, x, base):
    return process, jax.block_until_ready(process(x, base))


def climbs(num_seeds: int):
    """All initial values climbed alone, and the chosen one."""
    yield "\nInitial values: the bound with 100 greedy points from each of the grid alone, and from the chosen one"
    yield f"{'data set':16}{'base':10}{'seed':>5}{'worst':>10}{'median':>10}{'best':>10}{'chosen':>10}{'steps':>7}"
    noise = jc.gp.GaussianNoise()
    sparse = jc.gp.Sparse(num_inducing=100, ard=False).settled(1000, noise, differentiable=False)
    way = fit.Way((sparse,), noise)
    climb = eqx.filter_jit(lambda grid, data: fit.maximize_evidence(lambda *_: grid, data, way))
    for name in CLIMBED:
        for base in BASES:
            for seed in range(num_seeds):
                grid, data = prepared(*split(name, seed, base)[:3])
                values = [float(climb(initial, data).evidence) for initial in one_by_one(grid)]
                chosen = climb(grid, data)
                cells = min(values), statistics.median(values), max(values), float(chosen.evidence)
                steps = f"{int(chosen.iterations):7}"
                yield f"{name:16}{base:10}{seed:5}" + "".join(f"{c:10.1f}" for c in cells) + steps


def prepared(x, base, y):
    """The initial values of `rio.fit`, and the data as the process takes them."""
    x_scaler, output_scaler, scaler = (Standardizer.of(a) for a in (x, base.mean, y - base.mean))
    points = rio.Points(x_scaler(x), output_scaler(base.mean)[:, None])
    data = model.Data(points, scaler(y - base.mean))
    return initial.on_grid(data, jax.tree.leaves(points), lambda kernels: rio.IOKernel(*kernels)), data


def one_by_one(grid: model.Model):
    """The models of a grid, each a grid of one."""
    number = len(grid.log_noise)
    return [jax.tree.map(lambda a, i=i: a[i : i + 1], grid) for i in range(number)]


def split(name: str, seed: int, base: str, rows: int | None = None) -> tuple:
    """Training rows (at most `rows`) and test rows, each with the base model's predictions."""
    data = jc.datasets.load(name)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train = train[:rows]
    x, y, x_test, y_test = (jnp.asarray(a) for a in (data.x[train], data.y[train], data.x[test], data.y[test]))
    if base == "network":
        network = jc.mlp.fit(x, y, key=jax.random.key(seed), preset="paper")
        return x, network(x), y, x_test, network(x_test), y_test
    columns = (lambda a: a) if base == "linear" else (lambda a: a[:, :0])
    with_intercept = lambda a: jnp.concatenate([columns(a), jnp.ones_like(a[:, :1])], axis=1)
    weights = jnp.linalg.lstsq(with_intercept(x), y)[0]
    predict = lambda a: jc.Point(with_intercept(a) @ weights)
    return x, predict(x), y, x_test, predict(x_test), y_test


if __name__ == "__main__":
    main()
