"""ACCRUE's Table 1 run again: `python -m benchmarks.tables.accrue --datasets yacht,boston --runs 5`.

A job is a data set and a run: 70 % of the rows train a network for the mean and calibrate it, 30 % measure the result.
The mean has the architecture and the training of the paper's network for the std: 50 ReLU and 10 symmetric saturating
linear functions, L-BFGS on the squared error until ten steps gain nothing on a fifth of the rows, the best of five.
The errors that the calibrations take are in-sample, those of the training rows themselves, which the published figures
look like, or out of fold, by five networks fitted to four fifths each: the predictions of the test rows are the same.
The target is divided by its standard deviation over all rows, so that the CRPS is without a unit. Finished jobs are
kept in `runs/`; a script that was stopped goes on where it was. `--report` makes the table of `results/` from what is
finished, also while another process still runs.
"""

from collections.abc import Mapping
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jaxcal as jc
from benchmarks.tables import _accrue_report, _jobs
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.functional.scores import accrue_loss
from jaxcal.networks import FeedForward
from jaxcal.optimize import minimize_from_each, num_train

DATASETS = ("boston", "concrete", "energy", "kin8nm", "power_plant", "protein", "wine_red", "yacht")
RUNS, RUNS_OF_LARGE = 50, {"protein": 5}
FRACTIONS = (0.7, 0.3)
CLUSTERS = range(1, 11)
HIDDEN, ACTIVATIONS = (50, 10), (jax.nn.relu, jax.nn.hard_tanh)
RESTARTS, HELD_OUT, PATIENCE = 5, 0.2, 10


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, RUNS, RUNS_OF_LARGE).parse_args()
    runs = arguments.out / "runs" / "accrue_table1.jsonl"
    if not arguments.report:
        # By runs from the outside, so that a sweep that is stopped has some of everything.
        jobs = [
            {"dataset": name, "seed": seed}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            if seed < RUNS_OF_LARGE.get(name, RUNS)
        ]
        _jobs.run(run_job, jobs, runs, arguments.workers)
    records = _jobs.finished(runs)
    _accrue_report.write(records, DATASETS, arguments.out / "results" / "accrue_table1.csv")


def run_job(dataset: str, seed: int) -> list[dict]:
    """One split of one data set: a record of every calibration by either kind of errors."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load("energy_heating" if dataset == "energy" else dataset)
    x, y = data.x, data.y / data.y.std()
    train, test = jc.datasets.split(len(y), FRACTIONS, seed=seed)
    key = jax.random.key(seed)
    mean_key, fold_key, fit_key = jax.random.split(key, 3)
    # The networks train in 32 bits; calibrations are fitted and measured in 64.
    single = x[train].astype(np.float32), y[train].astype(np.float32)
    network = fit_mean(*single, key=mean_key)
    base = in_64_bits(network(x[test].astype(np.float32)))
    errors = {
        "in-sample": in_64_bits(network(single[0])),
        "out-of-fold": in_64_bits(jc.out_of_fold(fit_mean, *single, key=fold_key)),
    }
    common = {"device": _jobs.machine(), "num_test": len(test), "rmse": jc.metrics.rmse(y[test], base)}
    # The calibration error at p = 1/2 of every distribution that is symmetric about the mean, whatever its std.
    common["at_half"] = 100 * abs(np.mean(y[test] <= base.mean) - 0.5)
    records = []
    for kind, own in errors.items():
        distributions = calibrated((x[train], own, y[train]), (x[test], base), y[test], fit_key)
        size = jc.metrics.rmse(y[train], own)
        records += [
            {**common, "errors": kind, "error_size": size, "method": name, **measure(y[test], distribution)}
            for name, distribution in distributions.items()
        ]
    return records


class Mean(eqx.Module):
    """A network of the mean, made by `fit_mean`."""

    network: FeedForward
    x_scaler: Standardizer
    y_scaler: Standardizer

    @eqx.filter_jit
    def __call__(self, x: jax.Array) -> jc.Point:
        """The predictions [n] at the rows of x."""
        return jc.Point(self.y_scaler.inverse(jax.vmap(self.network)(self.x_scaler(x))))


@eqx.filter_jit
def fit_mean(x: jax.Array, y: jax.Array, *, key: jax.Array) -> Mean:
    """Train it by least squares, as the module's first lines say."""
    start_key, order_key = jax.random.split(key)
    x_scaler, y_scaler = Standardizer.of(x), Standardizer.of(y)
    new = lambda key: FeedForward(x.shape[1], HIDDEN, "scalar", key=key, activation=ACTIVATIONS, dtype=x.dtype)
    initial, fixed = eqx.partition(eqx.filter_vmap(new)(jax.random.split(start_key, RESTARTS)), eqx.is_inexact_array)

    def loss_of(rows):
        inputs, targets = x_scaler(x[rows]), y_scaler(y[rows])
        return lambda params: jnp.mean((jax.vmap(eqx.combine(params, fixed))(inputs) - targets) ** 2)

    order, size = jax.random.permutation(order_key, len(y)), num_train(len(y), HELD_OUT)
    train, held_out = loss_of(order[:size]), loss_of(order[size:])
    optimum = minimize_from_each(train, initial, validation_loss=held_out, patience=PATIENCE)
    return Mean(eqx.combine(optimum.params, fixed), x_scaler, y_scaler)


def calibrated(rows: tuple, at: tuple, truth: np.ndarray, key: jax.Array) -> Mapping[str, jc.Distribution]:
    """The distributions of the test rows by every method of the paper."""
    x, own, y = rows
    crps = jc.accrue.fit(x, own, y, key=key, loss=partial(accrue_loss, beta=1.0))
    accrue = jc.accrue.fit(x, own, y, key=key)
    recalibrated = jc.isotonic.fit(None, accrue(x, own), y, tails="support")
    # As in the paper the number of clusters is the one that serves the test rows best: an advantage.
    clusters = [jc.kmeans.fit(x, own, y, key=key, num_clusters=k)(*at) for k in CLUSTERS]
    errors = [float(jc.metrics.max_calibration_error(truth, distribution)) for distribution in clusters]
    return {
        "CRPS": crps(*at),
        "RECAL": recalibrated(None, accrue(*at)),
        "KM": clusters[int(np.argmin(errors))],
        "ACCRUE": accrue(*at),
    }


def measure(truth: np.ndarray, distribution: jc.Distribution) -> dict[str, jax.Array]:
    metrics = jc.metrics.crps, jc.metrics.max_calibration_error
    return dict(zip(("crps", "calibration_error"), (metric(truth, distribution) for metric in metrics), strict=True))


def in_64_bits(distribution: jc.Point) -> jc.Point:
    return jc.Point(jnp.asarray(distribution.mean, jnp.float64))


if __name__ == "__main__":
    main()
