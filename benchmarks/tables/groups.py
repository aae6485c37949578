"""What tables of groups gain, and what partial pooling adds: `python -m benchmarks.tables.groups`.

First on simulated rows whose skewness depends on x, from few rows to many; then on data sets, with bins of the
predicted std as groups. It takes a few minutes on one core.
"""

import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jaxcal as jc
from benchmarks.tables import _jobs, _report
from jaxcal.frames.labels import ColumnBins, StdBins

RESULT = Path(__file__).parents[1] / "results" / "groups.md"
SIZES, BINS, NUM_NEW = (60, 200, 1000, 10_000), (4, 20), 4000
RUNS = {60: 100, 200: 100, 1000: 40, 10_000: 10}
DATASETS = (
    *(
        "yacht",
        "auto_mpg",
        "energy_heating",
        "concrete",
        "airfoil",
        "wine_red",
        "wine_white",
        "parkinsons_total",
        "power_plant",
    ),
    *("protein", "appliances", "beijing_pm25", "tetuan"),
)
SPLITS, MOST_ROWS = 10, 8000
FITS = {
    "crude": jc.crude.fit,
    "crude, pooled": partial(jc.crude.fit, partial_pooling=True),
    "isotonic": jc.isotonic.fit,
    "isotonic, pooled": partial(jc.isotonic.fit, partial_pooling=True),
}

LEGEND = f"""\
The CRPS of each calibrator with a table for every group, in % of that of `crude` without groups: below 0 it is better.
Mean ± standard error of the paired differences. "pooled" is with `partial_pooling`.

**Simulated.** One uniform column x; the error is exponential with mean 0 and std 1, its long tail above for x > 0 and
below for x < 0; the base is normal with the right means and stds. Groups are bins of x with equally many rows; scores
are the mean of {NUM_NEW} new rows, over {RUNS[60]} calibration sets of up to 200 rows, {RUNS[1000]} of 1000 and
{RUNS[10_000]} of 10 000."""
LEGEND_OF_DATA = f"""\
**Data sets.** A random forest, fitted to half of the rows, predicts a quarter for calibration and a quarter to score;
{SPLITS} random splits of at most {MOST_ROWS} rows. Groups are bins of the predicted std with equally many rows."""


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    header = ["rows", "bins", *FITS]
    simulated = [row(str(size), bins, scores_of_simulations(size, bins)) for size in SIZES for bins in BINS]
    found = {name: scores_of_splits(name) for name in DATASETS}
    of_data = [row(name, bins, found[name][bins]) for name in DATASETS for bins in BINS]
    parts = ["# Tables of groups", f"- {_jobs.origin()}", LEGEND, _report.markdown_table(header, simulated)]
    parts += [LEGEND_OF_DATA, _report.markdown_table(["data set", *header[1:]], of_data)]
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def scores_of_simulations(size: int, bins: int) -> np.ndarray:
    """The CRPS without groups, and of all fits, of every calibration set [sets, 1 + fits]."""
    rng = np.random.default_rng(size)
    new_x, new_y = draw(rng, NUM_NEW)
    by = ColumnBins.of(np.linspace(-1, 1, 10_001), number=bins)
    found = []
    for _ in range(RUNS[size]):
        x, y = draw(rng, size)
        found.append(scores(x, normal(x), y, new_x, normal(new_x), new_y, by))
    return np.array(found)


def draw(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets whose skewness has the sign of x; every bin has a row."""
    x = rng.permutation((np.arange(size) + rng.uniform(size=size)) / size * 2 - 1)
    return x[:, None], np.sign(x) * (rng.exponential(size=size) - 1)


def normal(x: np.ndarray) -> jc.Normal:
    return jc.Normal(np.zeros(len(x)), np.ones(len(x)))


def scores_of_splits(name: str) -> dict[int, np.ndarray]:
    """The same of the random splits of a data set, for each number of bins."""
    data = jc.datasets.load(name)
    rng = np.random.default_rng(0)
    found = {bins: [] for bins in BINS}
    for seed in range(SPLITS):
        rows = rng.permutation(len(data.y))[:MOST_ROWS]
        half, quarter = len(rows) // 2, 3 * len(rows) // 4
        train, calibration, new = rows[:half], rows[half:quarter], rows[quarter:]
        # A std that is not calibrated: its errors are what the groups are for.
        forest = jc.forests.fit(
            data.x[train], data.y[train], key=jax.random.key(seed), model="random_forest", preset="usnrt"
        )
        base, new_base = forest(data.x[calibration]), forest(data.x[new])
        for bins in BINS:
            by = StdBins.of(base, number=bins)
            found[bins].append(
                scores(data.x[calibration], base, data.y[calibration], data.x[new], new_base, data.y[new], by)
            )
    return {bins: np.array(each) for bins, each in found.items()}


def scores(x, base, y, new_x, new_base, new_y, by) -> list[float]:
    """The CRPS of crude without groups, and of all fits with."""
    alone = jc.crude.fit(x, base, y)(new_x, new_base)
    grouped = [fit(x, base, y, by=by)(new_x, new_base) for fit in FITS.values()]
    return [float(jc.metrics.crps(new_y, distribution)) for distribution in (alone, *grouped)]


def row(name: str, bins: int, found: np.ndarray) -> list[str]:
    """The differences from the first score, in % of its mean."""
    differences = 100 * (found[:, 1:] - found[:, :1]) / found[:, 0].mean()
    errors = map(_report.standard_error, differences.T)
    return [
        name,
        str(bins),
        *(f"{mean:.1f} ± {error:.1f}" for mean, error in zip(differences.mean(0), errors, strict=True)),
    ]


if __name__ == "__main__":
    main()
