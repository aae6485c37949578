"""Sharp calibrated GPs' Table 1 run again: `python -m benchmarks.tables.sharp_gp --datasets boston,yacht --runs 5`.

A job is a data set, a base and a run: the rows are split at random in parts of 0.6, 0.2 and 0.2; the base, a Gaussian
process, is trained on the first, every method fitted on the second, and all measured on the third. There are two bases:
the process of the greatest evidence, and one whose noise is held at eight times the target's variance, since the
published row B is as wide as that. Inputs and target are in standard deviations of the training rows. Finished jobs are
kept in `runs/`; a script that was stopped goes on where it was. `--report` makes the table of `results/` from what is
finished, also while another process still runs; where nothing is, from the runs in `results/`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

import jaxcal as jc
from benchmarks.tables import _jobs, _report, _sharp_gp_report
from jaxcal.functional import gp, kernels, linalg
from jaxcal.optimize import minimize

DATASETS = ("boston", "yacht", "auto_mpg", "wine_red", "concrete", "kin8nm")
RUNS, RUNS_OF_LARGE = 100, {"wine_red": 10, "concrete": 10, "kin8nm": 10}
FRACTIONS = (0.6, 0.2, 0.2)
# As in the paper: 300 inducing points on the largest set, and a network trained on 500 rows at most.
SPARSE, SPARSE_SETS = jc.gp.Sparse(num_inducing=300), ("kin8nm",)
ROWS_OF_NETWORK = 500
BASES = ("evidence", "noise 8")
NOISE = 8.0
CONFIDENCE, NUM_LEVELS = 0.95, 21


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, RUNS, RUNS_OF_LARGE).parse_args()
    runs, result = (arguments.out / name for name in ("runs/sharp_gp_table1.jsonl", "results/sharp_gp_table1.csv"))
    if not arguments.report:
        # By runs from the outside, so that a sweep that is stopped has some of everything.
        jobs = [
            {"dataset": name, "base": base, "seed": seed}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            for base in BASES
            if seed < RUNS_OF_LARGE.get(name, RUNS) and (base == BASES[0] or name not in SPARSE_SETS)
        ]
        _jobs.run(run_job, jobs, runs, arguments.workers)
    is_rewritten = arguments.report and not runs.exists()
    records = _report.read_csv(result) if is_rewritten else _jobs.finished(runs)
    _sharp_gp_report.write(records, DATASETS, BASES, result)


class Part(NamedTuple):
    """Rows, and what the base predicts of them."""

    x: np.ndarray
    y: np.ndarray
    base: jc.Normal


def run_job(dataset: str, base: str, seed: int) -> list[dict]:
    """A base on one split of one data set: a record for every method."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    parts = jc.datasets.split(len(data.y), FRACTIONS, seed=seed)
    x, y = standardized(data.x, parts[0]), standardized(data.y, parts[0])
    train = x[parts[0]], y[parts[0]]
    if base == "evidence":
        inference = SPARSE if dataset in SPARSE_SETS else jc.gp.Exact()
        model = jc.gaussian_process.fit(*train, inference=inference)
    else:
        model = fit_wide(*map(jnp.asarray, train))
    calibration, test = (Part(x[rows], y[rows], model(x[rows])) for rows in parts[1:])
    common = {"device": _jobs.machine(), "num_calibration": len(calibration.y), "num_test": len(test.y)}
    distributions = methods(train, model, calibration, test, jax.random.key(seed))
    return [
        {**common, "method": name, **measures(test.y, distribution)} for name, distribution in distributions.items()
    ]


def standardized(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    """In standard deviations of the training rows; a column that is constant there is zero."""
    spread = values[train].std(axis=0)
    return (values - values[train].mean(axis=0)) / np.where(spread > 0, spread, np.inf)


def methods(train, model: jc.sharp_gp.HasKernel, calibration: Part, test: Part, key: jax.Array) -> dict:
    """The distributions of the test rows by every method, named as in the paper; our own by what they are."""
    x, y, base = calibration
    x_train, y_train = train
    sharp = partial(jc.sharp_gp.fit, x, base, y, x_train=x_train, y_train=y_train, kernel=model)
    rows = slice(ROWS_OF_NETWORK)
    some = jc.Normal(base.mean[rows], base.std[rows])
    fitted = {
        "Ours": sharp(preset="paper"),
        "line": sharp(variance=jc.sharp_gp.Variance(fit_on="calibration")),
        "exact": sharp(),
        "exact ARD": sharp(variance=jc.sharp_gp.Variance(search="ard")),
        "RK": jc.isotonic.fit(x, base, y, tails="anchored"),
        "RV": jc.conformal.fit(x, base, y, rule="randomized", key=key),
        "NN": jc.neural_quantiles.fit(x[rows], some, y[rows], key=key, preset="paper"),
    }
    distributions = {name: calibrate(test.x, test.base) for name, calibrate in fitted.items()}
    constant = jc.conformal.fit(x, jc.Point(base.mean), y, rule="linear")
    return {**distributions, "RM": constant(test.x, jc.Point(test.base.mean)), "B": test.base}


def measures(y: np.ndarray, distribution: jc.Distribution) -> dict[str, float]:
    """The paper's four metrics, the coverage, and the width of intervals that are stretched to cover as they should."""
    return {
        "ece": jc.metrics.calibration_sse(y, distribution, num_levels=NUM_LEVELS) / NUM_LEVELS,
        "std": jc.metrics.mean_std(y, distribution),
        "nll": jc.metrics.nlpd(y, jc.Normal(distribution.mean, distribution.std)),
        "width": jc.metrics.mean_width(y, distribution, confidence_level=CONFIDENCE),
        "coverage": jc.metrics.coverage(y, distribution, confidence_level=CONFIDENCE),
        "width_at_coverage": width_at_coverage(y, *distribution.interval(CONFIDENCE), CONFIDENCE),
        "rmse": jc.metrics.rmse(y, distribution),
    }


def width_at_coverage(y: np.ndarray, lower: ArrayLike, upper: ArrayLike, confidence_level: float) -> float:
    """The mean width of intervals that one factor has stretched about their middles until they cover as they should."""
    half = np.subtract(upper, lower) / 2
    stretch = np.quantile(np.abs(y - np.add(lower, upper) / 2) / half, confidence_level)
    return float(2 * half.mean() * stretch)


class WideProcess(NamedTuple):
    """A Gaussian process whose noise is not learned."""

    x: jax.Array
    log_lengthscale: jax.Array
    log_variance: jax.Array
    posterior: gp.Posterior

    def __call__(self, x: np.ndarray) -> jc.Normal:
        """The distributions of the targets at rows of x."""
        return jc.Normal(*_predict_wide(self, jnp.asarray(x)))

    @property
    def lengthscale(self) -> jax.Array:
        """As of `jc.sharp_gp.KernelAndNoise`."""
        return jnp.exp(self.log_lengthscale)

    @property
    def noise_ratio(self) -> jax.Array:
        """As of `jc.sharp_gp.KernelAndNoise`."""
        return NOISE / jnp.exp(self.log_variance)


@jax.jit
def fit_wide(x: jax.Array, y: jax.Array) -> WideProcess:
    """The process of the greatest evidence, given that the variance of its noise is 8."""

    def gram(log_lengthscale, log_variance):
        return linalg.add_diagonal(
            kernels.squared_exponential(x, x, jnp.exp(log_lengthscale), jnp.exp(log_variance)), NOISE
        )

    start = jnp.full(x.shape[1], jnp.log(x.shape[1]) / 2), jnp.zeros(())
    found = minimize(lambda params: -gp.log_likelihood(gram(*params), y), start)
    return WideProcess(x, *found.params, gp.posterior(gram(*found.params), y))


@jax.jit
def _predict_wide(process: WideProcess, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    variance = jnp.exp(process.log_variance)
    cross = kernels.squared_exponential(x, process.x, process.lengthscale, variance)
    mean, latent = jax.vmap(gp.predict, (None, 0, None))(process.posterior, cross, variance)
    return mean, jnp.sqrt(latent + NOISE)


if __name__ == "__main__":
    main()
