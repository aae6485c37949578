"""Sharp calibrated GPs beside conformal prediction around the process: `python -m benchmarks.tables.sharp_gp_choice`.

Who has a Gaussian process and calibration rows may take `sharp_gp`, whose sigma has lengthscales of its own, or scale
the process's own std by `conformal`. A job is a data set and a run. Rows are split as in `sharp_gp.py`, in parts of
0.6, 0.2 and 0.2, and the base is the process of the greatest evidence. Besides, `conformal` scales the std of other
processes, whose lengthscales, and whose noise ratio too, are chosen by the training rows, each by leave-one-out, and by
several criteria: the criterion is then the only difference from the base. Finished jobs are kept in `runs/`.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables._report import Runs
from benchmarks.tables.sharp_gp import CONFIDENCE, FRACTIONS, Part, standardized, width_at_coverage
from jaxcal.functional import gp
from jaxcal.functional.quantiles import linear_quantile
from jaxcal.gp.kernels import SquaredExponential, gram

DATASETS = ("boston", "yacht", "auto_mpg", "concrete", "energy_heating", "wine_red")
RUNS, RUNS_OF_LARGE = 40, {"concrete": 10, "energy_heating": 10, "wine_red": 5}
# Multiples of the regression's lengthscales and of its noise ratio, and lengthscales of the mean as a column, in stds
# of the target: infinite without that column.
MULTIPLES = np.geomspace(1 / 4, 4, 7)
NOISES = (0.1, 1.0, 10.0)
OF_MEAN = (np.inf, 1.5, 0.7, 0.35)
LEVELS = (0.5, 0.8, 0.9, 0.95)
# More of a width than this, as a fraction, is a difference.
MARGIN = 0.01
METHODS = {
    "conformal": "`conformal` around the process",
    "sharp_gp": "`sharp_gp`, default",
    "isotonic": "`isotonic`, default",
    "process": "the process alone",
}
FREE = {
    "lengthscales": "lengthscales",
    "noise": "lengthscales, noise",
    "mean": "lengthscales, noise, mean as a column",
}

LEGEND = f"""\
Intervals of {100 * CONFIDENCE:g} %, means over random splits 0.6 / 0.2 / 0.2 (training, calibration, test), in standard
deviations of the training rows' target; in brackets the coverage of the test rows, in per cent. *At equal coverage*
the intervals of each run are stretched about their middles by one factor until they cover {100 * CONFIDENCE:g} % of its
test rows; the table says by how much they then differ in width from those of `conformal` around the process.

The rows after the first four are `conformal` around the std of other processes of variance 1. What is free is chosen on
a grid by the errors of the training rows, each by leave-one-out: a common multiple of the lengthscales; the noise
ratio; the lengthscale of one more column, the model's mean. By *width*: the least width of the central interval, the
quantile of |error| / std at {CONFIDENCE:g} times the mean std, which is the paper's criterion for both tails together;
by *widths*: the least sum of the logs of such widths at {", ".join(f"{level:g}" for level in LEVELS)}; by *likelihood*:
the greatest normal likelihood, the std scaled."""


def main() -> None:
    arguments = _jobs.parser(__doc__, DATASETS, RUNS, RUNS_OF_LARGE).parse_args()
    path = arguments.out / "runs" / "sharp_gp_choice.jsonl"
    if not arguments.report:
        jobs = [
            {"dataset": name, "seed": seed}
            for seed in range(arguments.runs)
            for name in arguments.datasets
            if seed < RUNS_OF_LARGE.get(name, RUNS)
        ]
        _jobs.run(run_job, jobs, path, arguments.workers)
    records = sorted(_jobs.finished(path), key=lambda record: (DATASETS.index(record["dataset"]), record["seed"]))
    columns = ("dataset", "seed", "method", "width", "coverage", "width_at_coverage")
    _report.write(arguments.out / "results" / "sharp_gp_choice.csv", records, columns, markdown(records))


def run_job(dataset: str, seed: int) -> list[dict]:
    """One split of one data set: a record for every method."""
    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(dataset)
    train, *rest = jc.datasets.split(len(data.y), FRACTIONS, seed=seed)
    x, y = standardized(data.x, train), standardized(data.y, train)
    model = jc.gaussian_process.fit(x[train], y[train], bound="exact")
    calibration, test = (Part(x[rows], y[rows], model(x[rows])) for rows in rest)
    records = []
    for name, (lower, upper) in intervals(x[train], y[train], model, calibration, test).items():
        inside = (lower <= test.y) & (test.y <= upper)
        measured = {
            "width": float(np.mean(upper - lower)),
            "coverage": float(np.mean(inside)),
            "width_at_coverage": width_at_coverage(test.y, lower, upper, CONFIDENCE),
        }
        records.append({"device": _jobs.machine(), "method": name, **measured})
    return records


def intervals(x_train, y_train, model, calibration: Part, test: Part) -> dict[str, tuple[Array, Array]]:
    """Those of the test rows, by every method."""
    x, y, base = calibration
    sharp = jc.sharp_gp.fit(x, base, y, x_train=x_train, y_train=y_train, kernel=model)
    fitted = {"conformal": jc.conformal.fit(x, base, y), "sharp_gp": sharp, "isotonic": jc.isotonic.fit(x, base, y)}
    found = {name: calibrate(test.x, test.base).interval(CONFIDENCE) for name, calibrate in fitted.items()}
    found["process"] = test.base.interval(CONFIDENCE)
    known = Known.of(x_train, y_train, model)
    for name, choice in best_choices(known).items():
        std = partial(new_std, known, choice)
        scaled = jc.conformal.fit(None, jc.Normal(base.mean, std(x, base.mean)), y)
        found[name] = scaled(None, jc.Normal(test.base.mean, std(test.x, test.base.mean))).interval(CONFIDENCE)
    return found


class Known(NamedTuple):
    """The training rows, in lengthscales of the regression, and what is known of them by leave-one-out."""

    x: Float[Array, "n d"]
    mean: Float[Array, " n"]
    errors: Float[Array, " n"]
    lengthscale: Float[Array, " d"]
    noise_ratio: Float[Array, ""]

    @classmethod
    def of(cls, x, y, model: jc.sharp_gp.HasKernel) -> "Known":
        """By the regression's own kernel."""
        lengthscale = jnp.broadcast_to(jnp.asarray(model.lengthscale), x.shape[1:])
        x = x / lengthscale
        errors = gp.leave_one_out(gp.posterior(gram(unit_kernel(x), x, model.noise_ratio), jnp.asarray(y))).error
        return cls(x, y - errors, errors, lengthscale, jnp.asarray(model.noise_ratio))


class Choice(NamedTuple):
    """What is free: multiples of lengthscales and of the noise ratio, and the lengthscale of the mean."""

    multiple: np.ndarray
    noise: np.ndarray
    of_mean: np.ndarray


def unit_kernel(x: Float[Array, "n d"]) -> SquaredExponential:
    return SquaredExponential(jnp.zeros_like(x[0, 0]), jnp.zeros_like(x[0]))


def points(x: Float[Array, "n d"], mean: Float[Array, " n"], choice: Choice) -> Float[Array, "n e"]:
    """The inputs in their lengthscales, with the mean as the last of them."""
    return jnp.concatenate([x / choice.multiple, mean[:, None] / choice.of_mean], axis=1)


@eqx.filter_jit
def widths(known: Known, choice: Choice) -> dict[str, Float[Array, ""]]:
    """What every criterion makes least, at one choice."""
    at = points(known.x, known.mean, choice)
    variance = gp.leave_one_out_variance(gram(unit_kernel(at), at, choice.noise * known.noise_ratio))
    std, z = jnp.sqrt(variance), jnp.sort(jnp.abs(known.errors) / jnp.sqrt(variance))
    log_width = lambda level: jnp.log(linear_quantile(z, level) * std.mean())
    return {
        "width": log_width(CONFIDENCE),
        "widths": sum(log_width(level) for level in LEVELS),
        "likelihood": (jnp.log(jnp.mean(z**2)) + jnp.mean(jnp.log(variance))) / 2,
    }


def best_choices(known: Known) -> dict[str, Choice]:
    """For every criterion and all that may be free the choice that makes it least."""
    grid = np.stack(np.meshgrid(MULTIPLES, NOISES, OF_MEAN), -1).reshape(-1, 3)
    choices = [Choice(*map(np.array, each)) for each in grid]
    is_free = {
        "lengthscales": lambda choice: choice.noise == 1 and np.isinf(choice.of_mean),
        "noise": lambda choice: np.isinf(choice.of_mean),
        "mean": lambda choice: True,
    }
    found = [widths(known, choice) for choice in choices]
    least = {}
    for free in FREE:
        allowed = [at for at, choice in enumerate(choices) if is_free[free](choice)]
        for criterion in found[0]:
            values = np.array([found[at][criterion] for at in allowed])
            least[f"{free}, {criterion}"] = choices[allowed[np.nanargmin(values)]]
    return least


@eqx.filter_jit
def new_std(known: Known, choice: Choice, x, mean) -> Float[Array, " m"]:
    """That of a new target, of the process of a choice, whose variance is 1."""
    at, new = points(known.x, known.mean, choice), points(x / known.lengthscale, mean, choice)
    noise_ratio = choice.noise * known.noise_ratio
    explained = gp.explained_variance(gram(unit_kernel(at), at, noise_ratio), unit_kernel(at)(at, new))
    return jnp.sqrt(1 + noise_ratio - explained)


def markdown(records: list[dict]) -> str:
    """The whole report."""
    runs = Runs(records, ("dataset", "method"))
    names = [name for name in DATASETS if runs.count(name, "conformal")]
    methods = list(dict.fromkeys(record["method"] for record in records))
    counts = ", ".join(f"{name} {runs.count(name, 'conformal')}" for name in names)
    parts = ["# Sharp calibrated GPs, or conformal around the process", _report.list_of_origins(records), LEGEND]
    parts += [f"Runs: {counts}.", "## Widths, and coverage", table(runs, names, methods, widths_and_coverage)]
    parts += ["## Widths at equal coverage, beside `conformal`", compared(runs, names, methods)]
    return "\n\n".join(parts) + "\n"


def title(method: str) -> str:
    free, _, criterion = method.partition(", ")
    return METHODS.get(method) or f"{FREE[free]}, by {criterion}"


def table(runs: Runs, names: list[str], methods: list[str], cell) -> str:
    rows = [[title(method), *(cell(runs, name, method) for name in names)] for method in methods]
    return _report.markdown_table(["95 % intervals of", *names], rows)


def widths_and_coverage(runs: Runs, name: str, method: str) -> str:
    return f"{_report.mean(runs.values(name, method, 'width'))} ({100 * runs.mean(name, method, 'coverage'):.1f})"


def compared(runs: Runs, names: list[str], methods: list[str]) -> str:
    """The differences in width, and on how many sets they are more than the margin."""
    rows = []
    for method in methods[1:]:
        pairs = [[runs.mean(name, each, "width_at_coverage") for each in (method, "conformal")] for name in names]
        differences = np.array([ours / theirs - 1 for ours, theirs in pairs])
        narrower, wider = (differences < -MARGIN).sum(), (differences > MARGIN).sum()
        cells = [f"{100 * difference:+.1f} %" for difference in differences]
        rows.append([title(method), *cells, f"{narrower} of {len(names)}", f"{wider} of {len(names)}"])
    header = ["95 % intervals of", *names, f"narrower by {MARGIN:.0%}", f"wider by {MARGIN:.0%}"]
    return _report.markdown_table(header, rows)


if __name__ == "__main__":
    main()
