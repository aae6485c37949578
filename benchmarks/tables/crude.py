"""CRUDE's Table 1 run again: `python -m benchmarks.tables.crude --datasets yacht,concrete --runs 5`.

A job is a data set, a model and a trial: the rows are split at random in parts of 0.5, 0.4 and 0.1; the model is
trained on the first, every calibration fitted on the second, and both measured on the third. The target is divided by
its standard deviation over all rows, a choice of unit: so the paper's sharpness seems to be measured. Finished jobs are
kept in `runs/`; a script that was stopped goes on where it was. `--report` makes the table of `results/` from what is
finished, also while another process still runs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _crude_report, _jobs

DATASETS = (
    "forest_fires",
    "yacht",
    "auto_mpg",
    "diabetes",
    "boston",
    "energy",
    "concrete",
    "wine_red",
    "kin8nm",
    "power_plant",
    "airfoil",
    "parkinsons",
)
FRACTIONS = (0.5, 0.4, 0.1)
TRIALS, TRIALS_OF_LARGE = 20, {"kin8nm": 5, "power_plant": 5, "parkinsons": 5}
# A thousand steps of Adam on the exact Gaussian process of so many rows would take too long: there it is sparse, and
# climbed by L-BFGS.
SPARSE = jc.gp.Sparse(num_inducing=500)


class Model(NamedTuple):
    """How a model is fitted, in which precision, and with which options it predicts."""

    fit: Callable
    precision: type
    options: Mapping = MappingProxyType({})


# The models of the paper's appendix A. Its Gaussian process seems to predict without the noise.
MODELS = {
    "Variational NN": Model(partial(jc.variance_network.fit, preset="crude"), np.float32),
    "Dropout NN": Model(partial(jc.dropout.fit, preset="crude"), np.float32),
    "NGBoost": Model(partial(jc.forests.fit, model="ngboost", preset="crude"), np.float64),
    "Gaussian Process": Model(partial(jc.gaussian_process.fit, preset="crude"), np.float64, {"include_noise": False}),
}
CALIBRATIONS = {
    "MLE, shift": partial(jc.gaussian_mle.fit, shift="constant", preset="paper"),
    "MLE": partial(jc.gaussian_mle.fit, shift="none", preset="paper"),
    "Kule.": partial(jc.isotonic.fit, score="signed", tails="support"),
    "CRUDE": partial(jc.crude.fit, preset="paper"),
}
METRICS = {
    "calibration": jc.metrics.calibration_rmse,
    "sharpness": jc.metrics.sharpness,
    "crps": jc.metrics.crps,
    "rmse": jc.metrics.rmse,
}


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, TRIALS, TRIALS_OF_LARGE).parse_args()
    runs = arguments.out / "runs" / "crude_table1.jsonl"
    if not arguments.report:
        # By trials from the outside, so that a sweep that is stopped has some of everything.
        jobs = [
            {"dataset": name, "model": model, "seed": seed}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for model in MODELS
            if seed < TRIALS_OF_LARGE.get(name, TRIALS)
        ]
        _jobs.run(run_job, jobs, runs, arguments.workers)
    records = _jobs.finished(runs)
    _crude_report.write(records, DATASETS, tuple(MODELS), arguments.out / "results" / "crude_table1.csv")


def run_job(dataset: str, model: str, seed: int) -> list[dict]:
    """One split of one data set: a record of the model, and of every calibration of it."""
    jax.config.update("jax_enable_x64", True)
    x, y = load(dataset)
    train, calibration, test = jc.datasets.split(len(y), FRACTIONS, seed=seed)
    fit, precision, options = MODELS[model]
    if model == "Gaussian Process" and dataset in TRIALS_OF_LARGE:
        fit = partial(fit, inference=SPARSE)
    predictor = fit(x[train].astype(precision), y[train].astype(precision), key=jax.random.key(seed))
    predict = lambda part: in_64_bits(predictor(x[part].astype(precision), **options))
    base, base_test = predict(calibration), predict(test)

    distributions = {"None": base_test}
    for name, fit in CALIBRATIONS.items():
        distributions[name] = fit(x[calibration], base, y[calibration])(x[test], base_test)
    common = {"device": _jobs.machine(), "num_calibration": len(calibration), "num_test": len(test)}
    measure = lambda distribution: {metric: function(y[test], distribution) for metric, function in METRICS.items()}
    return [{**common, "calibrated_by": name, **measure(distribution)} for name, distribution in distributions.items()]


def load(dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and the target in units of its standard deviation."""
    if dataset == "parkinsons":  # 21 inputs in the paper: the other score is among them
        data, other = jc.datasets.load("parkinsons_total"), jc.datasets.load("parkinsons_motor")
        x = np.column_stack([data.x, other.y])
    else:
        data = jc.datasets.load("energy_heating" if dataset == "energy" else dataset)
        x = data.x
    return x, data.y / data.y.std()


def in_64_bits(distribution: jc.Distribution) -> jc.Normal:
    """Whatever the model's precision is, calibrations are fitted and measured in 64 bits."""
    return jc.Normal(np.asarray(distribution.mean, float), np.asarray(distribution.std, float))


if __name__ == "__main__":
    main()
