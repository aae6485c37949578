"""RIO's Tables 1, 2, 5, 6 and 7 run again: `python -m benchmarks.tables.rio --datasets yacht,airfoil --runs 20`.

A job is a data set, a seed and a setting: an 80/20 split at random, the base model trained, and the six variants of
Gaussian processes fitted on the base's training rows, as the paper does. The settings are the paper's (50 trained
inducing points, targets not scaled) and jaxcal's default. `--rivals` runs the last two systems of Table 1 on the same
splits: the neural-network Gaussian process and the attentive neural process. Seconds are processor time of fit and
prediction, without compilation: with one process a core, what else the machine does hardly matters to them. Finished
jobs are kept in `runs/`; a script that was stopped goes on where it was. `--report` makes the tables of `results/` from
what is finished, also while another process still runs.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _rio_figures, _rio_report
from benchmarks.tables._jobs import machine, timed

DATASETS = (
    "yacht",
    "energy_heating",
    "energy_cooling",
    "concrete",
    "airfoil",
    "wine_red",
    "wine_white",
    "power_plant",
    "protein",
)
RUNS, RUNS_OF_LARGE = 100, {"protein": 10}
VARIANTS = {
    "RIO": {"kernel": "io", "target": "residual"},
    "R+I": {"kernel": "input", "target": "residual"},
    "R+O": {"kernel": "output", "target": "residual"},
    "Y+O": {"kernel": "output", "target": "outcome"},
    "Y+IO": {"kernel": "io", "target": "outcome"},
    "SVGP": {"kernel": "input", "target": "outcome"},
}
# The data sets of which the paper has them, and how many splits there are of ours.
RUNS_OF_RIVALS = {"yacht": 5, "energy_heating": 5, "energy_cooling": 5, "airfoil": 5}
# What is kept of those fits, where they have it.
OF_RIVALS = ("noise_variance", "evidence", "failed_initial_values", "iterations", "result")
NAMES = {"network": "NN", "forest": "RF"}
SETTINGS = ("paper", "jaxcal")
# Up to so many rows the default is the exact process, or the better of it and of the nearest rows above 2000.
EXACT_ROWS = 5000
LEVELS = (95, 90, 68)


def main() -> None:
    arguments = parse()
    table = table_number(arguments)
    runs = arguments.out / "runs" / f"rio_table{table}.jsonl"
    if not arguments.report:
        run(arguments, runs)
    # The base model has no setting: it was run beside the paper's.
    of_base = lambda record: record["system"] in NAMES.values()
    records = [record | {"setting": "base"} if of_base(record) else record for record in _jobs.finished(runs)]
    wanted = {name: number_of_runs(name, RUNS) for name in DATASETS}
    _rio_report.write(records, table, wanted, arguments.out / "results")
    if arguments.figures:
        stem = arguments.out / "results" / "figures" / f"rio_table{table}"
        _rio_figures.draw(records, DATASETS, NAMES[arguments.base], stem)


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = _jobs.parser(__doc__, DATASETS, RUNS, RUNS_OF_LARGE)
    settings = ",".join(SETTINGS)
    parser.add_argument("--settings", type=_jobs.names(SETTINGS), default=settings, help=f"default: {settings}")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--ard", action="store_true", help="a lengthscale for every input: Table 5")
    one.add_argument("--max-iterations", type=int, choices=(1000, 10000), default=1000, help="10000 is Table 6")
    one.add_argument("--rivals", action="store_true", help="the last two systems of Table 1, in place of the others")
    one.add_argument("--base", choices=("network", "forest"), default="network", help="forest is Table 7")
    parser.add_argument("--figures", action="store_true", help="draw figures 3, 10 and 11 as well")
    return parser.parse_args()


def table_number(arguments: argparse.Namespace) -> int:
    """The paper's table that the arguments ask for."""
    if arguments.ard:
        return 5
    if arguments.max_iterations == 10000:
        return 6
    return 7 if arguments.base == "forest" else 1


def number_of_runs(name: str, most: int) -> int:
    return min(most, RUNS_OF_LARGE.get(name, RUNS))


def run(arguments: argparse.Namespace, path: Path) -> None:
    """All jobs that are not finished yet."""
    if arguments.rivals:
        # By seeds from the outside, so that a sweep that is stopped has some of everything.
        jobs = [
            {"dataset": name, "seed": seed, "setting": setting, "systems": "rivals"}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for setting in arguments.settings
            if seed < RUNS_OF_RIVALS.get(name, 0)
        ]
        _jobs.run(run_rivals, jobs, path, arguments.workers)
        return
    jobs = [
        {"dataset": name, "seed": seed, "setting": setting}
        for setting in arguments.settings
        for name in arguments.datasets
        for seed in range(number_of_runs(name, arguments.runs))
    ]
    options = {"ard": arguments.ard, "max_iterations": arguments.max_iterations}
    task = partial(run_job, base=arguments.base, options=options, programs=str(path.parent / "compiled"))
    _jobs.run(task, jobs, path, arguments.workers)


def run_job(dataset: str, seed: int, setting: str, base: str, options: dict, programs: str) -> list[dict]:
    """One split of one data set: a record of every variant in one setting; with the paper's, one of the base too."""
    jax.config.update("jax_compilation_cache_dir", programs)
    x, y, x_test, y_test = rows_of(dataset, seed)

    records = []
    train_base = {"network": train_network, "forest": train_forest}[base]
    (before, before_test), seconds = timed((dataset, base), partial(train_base, x, y, x_test, seed))
    if setting == "paper":
        rmse = jc.metrics.rmse(y_test, before_test)
        records.append({"system": NAMES[base], "RMSE": rmse, "time_s": seconds})
    for system, variant in VARIANTS.items():
        fit = partial(jc.rio.fit, **variant, **arguments_of(setting, len(y), options), throw=False)
        call = partial(calibrate, fit, x, before, y, x_test, before_test)
        (fitted, after), seconds = timed((dataset, setting, system), call)
        record = {"system": system, "setting": setting, "time_s": seconds}
        record |= measure(fitted, after, y_test, before_test)
        if seed == 0 and system == "RIO":  # for figure 10
            record |= {"before": before_test.mean, "after": after.mean}
        records.append(record)
    return [{"device": machine(), **record} for record in records]


def arguments_of(setting: str, n: int, options: dict) -> dict:
    """How n rows are fitted in a setting, with a table's number of lengthscales and of iterations.

    Of more rows than are fitted exactly the nearest stand for jaxcal's default: it took them on power_plant and protein
    (`gp_sparse.txt`).
    """
    if setting == "paper":
        inference = jc.gp.Sparse(num_inducing=50, points="trained", tolerance=0.0, **options)
        return {"preset": "paper", "inference": inference}
    return {"inference": jc.gp.Exact(**options) if n <= EXACT_ROWS else jc.gp.Nearest(**options)}


def rows_of(dataset: str, seed: int) -> tuple[np.ndarray, ...]:
    """Inputs and targets to train on, and those to test on, in 64 bits."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    return data.x[train], data.y[train], data.x[test], data.y[test]


def run_rivals(dataset: str, seed: int, setting: str, systems: str) -> list[dict]:
    """One split of one data set: a record of the Gaussian process and of the neural process in one setting."""
    x, y, x_test, y_test = rows_of(dataset, seed)
    # In 32 bits, as networks are trained.
    single = [np.asarray(a, np.float32) for a in (x, y, x_test)]
    paper = setting == "paper"
    of_process = {"preset": "nngp"} if paper else {"kernel": "nngp", "inference": jc.gp.Exact()}
    of_network = {"key": jax.random.key(seed), "preset": "paper" if paper else None}
    process = partial(train_on, jc.gaussian_process.fit, x, y, x_test, throw=False, **of_process)
    network = partial(train_on, jc.neural_process.fit, *single, **of_network)
    # A hundred steps compile the same program as all of them.
    calls = {"NNGP": (process,), "ANP": (network, partial(network, max_iterations=100))}
    records = []
    for system, call in calls.items():
        (fitted, after), seconds = timed((dataset, setting, system), *call)
        record = {"system": system, "setting": setting, "time_s": seconds} | scores(y_test, after)
        records.append(record | {name: getattr(fitted, name) for name in OF_RIVALS if hasattr(fitted, name)})
    return [{"device": machine(), **record} for record in records]


def train_on(fit, x, y, x_test, **options):
    """A predictor fitted on the training rows, and its prediction of the others."""
    fitted = fit(x, y, **options)
    return fitted, fitted(x_test)


def calibrate(fit, x, before, y, x_test, before_test):
    """A variant fitted on the training rows, and its prediction of the others."""
    fitted = fit(x, before, y)
    return fitted, fitted(x_test, before_test)


def train_network(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> tuple[jc.Point, jc.Point]:
    """The paper's network: its predictions of the rows that it was trained on, and of the others."""
    network = jc.mlp.fit(x, y, key=jax.random.key(seed), preset="paper")
    return network(x), network(x_test)


def train_forest(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int) -> tuple[jc.Point, jc.Point]:
    """The paper's random forest (appendix D.6), likewise."""
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(100, min_samples_leaf=10, max_depth=5, random_state=seed).fit(x, y)
    return jc.Point(jnp.asarray(forest.predict(x))), jc.Point(jnp.asarray(forest.predict(x_test)))


def measure(fitted: jc.rio.RIO, after: jc.Normal, y: np.ndarray, before: jc.Point) -> dict:
    """The metrics of a variant on the test rows."""
    return {
        **scores(y, after),
        "noise_variance": fitted.noise_variance,
        "improvement_ratio": jc.metrics.improvement_ratio(y, before, after),
        "evidence": fitted.evidence,
        "iterations": fitted.iterations,
        "result": fitted.result,
    }


def scores(y: np.ndarray, distribution: jc.Distribution) -> dict:
    """The metrics of any prediction of the test rows."""
    covered = {
        f"coverage_{level}": jc.metrics.coverage(y, distribution, confidence_level=level / 100) for level in LEVELS
    }
    return {"RMSE": jc.metrics.rmse(y, distribution), "NLPD": jc.metrics.nlpd(y, distribution), **covered}


if __name__ == "__main__":
    main()
