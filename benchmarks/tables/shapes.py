"""What a base's shapes and stds are worth after recalibration: `python -m benchmarks.tables.shapes`.

Two simulated bases whose rows differ in shape and whose scale is wrong, recalibrated by their probabilities, which
keeps the shapes, and by mean and std, which does not; beside the truth. And ACCRUE that learns a factor of the
predicted std (`relative=True`) beside ACCRUE that learns the std from the inputs alone: on simulated rows and on the
paper's eight data sets, around a deep ensemble. It takes about ten minutes on one core.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from benchmarks.tables.accrue import DATASETS

RESULT = Path(__file__).parents[1] / "results" / "shapes.md"
RUNS, ROWS, NEW, TOO_WIDE = 20, 500, 2000, 2.0
SPLITS, FRACTIONS, MOST = 5, (0.5, 0.25, 0.25), (700, 400, 400)
MEMBERS, EPOCHS, RESTARTS = 3, 200, 3

LEGEND = f"""\
**Shapes.** {ROWS} calibration rows, {NEW} new ones, {RUNS} runs; the base's scales are {TOO_WIDE:g} times the truth's.
*Student t*: 3 and 30 degrees of freedom in turn. *Mixture*: of two normal distributions, the same one or 3 stds to
either side, in turn; the means are right. *Mixture, scaled*: the means are {TOO_WIDE:g} times as far out, too, so that
every row is the truth scaled. Mean ± standard error over runs of what is lost beside the truth, in nats of the log
density (NLPD), and in % of the truth's CRPS. – without a density."""

LEGEND_OF_STDS = f"""\
**Stds.** ACCRUE from calibration rows, by the inputs alone and as a factor of the predicted std (*relative*), beside
one factor for all rows (`gaussian_mle` without a shift) and the base as it is; {SPLITS} runs. Data sets: splits
{FRACTIONS[0]:g} / {FRACTIONS[1]:g} / {FRACTIONS[2]:g}, at most {MOST[0]} training, {MOST[1]} calibration and {MOST[2]}
test rows; the base is a deep ensemble of {MEMBERS}, {EPOCHS} epochs at most. Simulated: 300 calibration rows, 3000 new
ones, 5 columns, a std that varies by a factor of about 100; the base's mean is right. CRPS in stds of the target, or
as simulated. *Difference*: relative less alone, the mean ± its standard error over runs."""

RECALIBRATIONS: dict[str, Callable] = {
    "isotonic": jc.isotonic.fit,
    'isotonic, score="signed"': partial(jc.isotonic.fit, score="signed"),
    'crude, score="cdf"': partial(jc.crude.fit, score="cdf"),
    "crude": jc.crude.fit,
    'conformal, rule="linear", score="cdf"': partial(jc.conformal.fit, rule="linear", score="cdf"),
    'conformal, rule="linear"': partial(jc.conformal.fit, rule="linear"),
}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    parts = ["# Shapes and stds after recalibration", f"- {_jobs.origin()}", LEGEND, table_of_shapes()]
    RESULT.write_text("\n\n".join([*parts, LEGEND_OF_STDS, table_of_stds()]) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


# Shapes


def student_t(rng: np.random.Generator, size: int, wide: float) -> tuple[jc.Distribution, np.ndarray]:
    """Distributions of that scale, and targets of the true ones."""
    df = np.where(np.arange(size) % 2, 3.0, 30.0)
    return jc.StudentT(df, np.zeros(size), wide), rng.standard_t(df)


def mixture(
    rng: np.random.Generator, size: int, wide: float, modes_move: bool = False
) -> tuple[jc.Distribution, np.ndarray]:
    """The same; in place or as far out as the scale says, the modes."""
    far = np.where(np.arange(size) % 2, 3.0, 0.0)
    means = np.stack([-far, far]) * (wide if modes_move else 1)
    components = jax.vmap(jc.Normal)(means, np.full((2, size), wide))
    return jc.Mixture(components), rng.choice([-1, 1], size) * far + rng.normal(size=size)


BASES: dict[str, Callable] = {
    "Student t": student_t,
    "mixture": mixture,
    "mixture, scaled": partial(mixture, modes_move=True),
}


def table_of_shapes() -> str:
    """What every recalibration loses."""
    header = ["recalibration", *(f"{base}, {metric} lost" for base in BASES for metric in ("NLPD", "CRPS %"))]
    lost = {name: losses(draw) for name, draw in BASES.items()}
    rows = [
        [name, *(cell(values) for base in BASES for values in lost[base][name])] for name in ["none", *RECALIBRATIONS]
    ]
    return _report.markdown_table(header, rows)


def losses(draw: Callable) -> dict[str, np.ndarray]:
    """By every recalibration the lost log densities and CRPS [2, runs]."""
    found = {name: [] for name in ["none", *RECALIBRATIONS]}
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        base, y = draw(rng, ROWS, TOO_WIDE)
        new, _ = draw(rng, NEW, TOO_WIDE)
        truth, y_new = draw(rng, NEW, 1.0)
        best = measured(y_new, truth)
        for name, values in found.items():
            forecast = new if name == "none" else RECALIBRATIONS[name](None, base, y)(None, new)
            nlpd, crps = measured(y_new, forecast)
            values.append((nlpd - best[0], 100 * (crps / best[1] - 1)))
    return {name: np.array(values).T for name, values in found.items()}


def measured(y: np.ndarray, forecast: jc.Distribution) -> tuple[float, float]:
    """NLPD and CRPS."""
    return -float(forecast.log_prob(y).mean()), float(forecast.crps(y).mean())


def cell(values: np.ndarray) -> str:
    if not np.isfinite(values).all():
        return _report.MISSING
    return f"{values.mean():.3f} ± {_report.standard_error(list(values)):.3f}"


# Stds


def simulated(kind: str, seed: int) -> tuple:
    """Calibration rows and new ones: x, base, y of both."""
    rng = np.random.default_rng(seed)

    def draw(size: int) -> tuple:
        x = rng.uniform(-2, 2, (size, 5))
        std = np.exp(1.2 * np.sin(2 * x[:, 0]) + 0.8 * x[:, 1] - 1)
        noise = rng.standard_t(3, size) / np.sqrt(3) if kind == "right std, t3 noise" else rng.normal(size=size)
        given = {"a third of the std": std / 3, "std of 1": np.ones(size)}.get(kind, std)
        return x, jc.Normal(np.zeros(size), given), std * noise

    return draw(300), draw(3000)


def of_data(name: str, seed: int) -> tuple:
    """The same, of a data set."""
    data = jc.datasets.load("energy_heating" if name == "energy" else name)
    parts = jc.datasets.split(len(data.y), FRACTIONS, seed=seed)
    train, calibration, test = (part[:most] for part, most in zip(parts, MOST, strict=True))
    x, y = data.x, data.y / data.y.std()
    key = jax.random.key(seed)
    model = jc.deep_ensemble.fit(x[train], y[train], key=key, num_members=MEMBERS, max_epochs=EPOCHS)

    def rows(part: np.ndarray) -> tuple:
        predicted = model(x[part])
        return x[part], jc.Normal(predicted.mean, predicted.std), y[part]

    return rows(calibration), rows(test)


SIMULATED = ("right std, normal noise", "right std, t3 noise", "a third of the std", "std of 1")
PROBLEMS: dict[str, Callable[[int], tuple]] = {
    **{kind: partial(simulated, kind) for kind in SIMULATED},
    **{name: partial(of_data, name) for name in DATASETS},
}


def table_of_stds() -> str:
    """NLPD and CRPS of every problem and method."""
    rows = []
    for name, draw in PROBLEMS.items():
        values = np.array([scores(draw, seed) for seed in range(SPLITS)])  # [runs, methods, metrics]
        cells = []
        for metric, decimals in ((0, 2), (1, 4)):
            alone, relative = values[:, 0, metric], values[:, 1, metric]
            cells += [f"{each:.{decimals}f}" for each in values[:, :, metric].mean(axis=0)]
            difference = relative - alone
            cells.append(f"{difference.mean():+.{decimals}f} ± {_report.standard_error(list(difference)):.{decimals}f}")
        rows.append([name, *cells])
        print(" | ".join(rows[-1]), flush=True)
    methods = "alone", "relative", "one factor", "base", "difference"
    return _report.markdown_table(["rows", *(f"{m}, {s}" for m in ("NLPD", "CRPS") for s in methods)], rows)


def scores(draw: Callable[[int], tuple], seed: int) -> list[tuple[float, float]]:
    """NLPD and CRPS by every method."""
    (x, base, y), (new_x, new, y_new) = draw(seed)
    accrue = partial(jc.accrue.fit, x, base, y, key=jax.random.key(seed), restarts=RESTARTS)
    one = jc.gaussian_mle.fit(None, base, y, shift="none")
    forecasts = accrue()(new_x, new), accrue(relative=True)(new_x, new), one(None, new), new
    return [measured(y_new, forecast) for forecast in forecasts]


if __name__ == "__main__":
    main()
