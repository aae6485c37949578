"""Coverage before and after the noise changes, simulated: `python -m benchmarks.tables.online`.

Fixed intervals of split conformal prediction beside those that follow the rows: adaptive conformal inference (ACI), its
aggregated form (DtACI) and conformal PID control, all with their defaults; and how soon the conformal test martingale
finds the change.
"""

from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcal as jc
from benchmarks.tables import _jobs, _report

RESULT = Path(__file__).parents[1] / "results" / "online.md"
RUNS, CALIBRATION, ROWS, CHANGE, LEVEL, SIGNIFICANCE = 500, 200, 3000, 1000, 0.9, 0.01
METHODS: dict[str, Callable | None] = {
    "fixed": None,
    "ACI": jc.online.adaptive.init,
    "DtACI": jc.online.adaptive.init_aggregated,
    "PID": jc.online.pid.init,
}
TIME = np.arange(ROWS)
NOISE = {
    "constant": np.ones(ROWS),
    "doubles at once": np.where(TIME < CHANGE, 1.0, 2.0),
    "doubles slowly": 2 ** np.clip((TIME - CHANGE) / (ROWS - CHANGE), 0, 1),
    "halves at once": np.where(TIME < CHANGE, 1.0, 0.5),
}
PARTS = {
    f"rows 1 to {CHANGE}": slice(0, CHANGE),
    "the next 100": slice(CHANGE, CHANGE + 100),
    "the next 400": slice(CHANGE + 100, CHANGE + 500),
    f"the last {ROWS - CHANGE - 500}": slice(CHANGE + 500, None),
}

LEGEND = f"""\
{RUNS} runs of {CALIBRATION} calibration rows and {ROWS} new ones; targets are normal about the prediction, with std 1
up to new row {CHANGE}. Coverage of {100 * LEVEL:g} % intervals in percent, in the mean of rows and runs, ± its standard
error over runs. *width*: the median width over the width of the exact interval, of the last
{ROWS - CHANGE - 500} rows."""

LEGEND_OF_TESTS = f"""\
The simple jumper over absolute errors, with an alarm at {1 / SIGNIFICANCE:g}: by Ville's inequality at most
{100 * SIGNIFICANCE:g} % of the runs whose noise is constant have one. *rows until the alarm*: the median after the
change, of the runs without an alarm before it."""


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    noise = jax.random.normal(jax.random.key(0), (RUNS, CALIBRATION + ROWS))
    std = {name: np.concatenate([np.ones(CALIBRATION), values]) for name, values in NOISE.items()}
    rows = [
        [name, method, *row(noise * std[name][None], init, NOISE[name])]
        for name in NOISE
        for method, init in METHODS.items()
    ]
    header = ["noise", "intervals", *PARTS, "width"]
    tests = [[name, *alarms(noise * std[name][None])] for name in NOISE]
    header_of_tests = ["noise", f"alarm in {ROWS} rows, %", f"alarm by row {CHANGE}, %", "rows until the alarm"]
    parts = [
        "# Rows that come one after another",
        f"- {_jobs.origin()}",
        LEGEND,
        _report.markdown_table(header, rows),
        LEGEND_OF_TESTS,
        _report.markdown_table(header_of_tests, tests),
    ]
    RESULT.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def row(y: jax.Array, init: Callable | None, std: np.ndarray) -> list[str]:
    """The coverage of every part of the rows, and the relative width."""
    lower, upper = (np.asarray(end) for end in intervals(y, init))
    new = np.asarray(y)[:, CALIBRATION:]
    covered = (lower <= new) & (new <= upper)
    cells = []
    for part in PARTS.values():
        of_runs = 100 * covered[:, part].mean(axis=1)
        cells.append(f"{of_runs.mean():.1f} ± {_report.standard_error(of_runs):.1f}")
    exact = np.subtract(*(float(jc.Normal(0.0, 1.0).icdf(p)[0]) for p in ((1 + LEVEL) / 2, (1 - LEVEL) / 2))) * std
    last = list(PARTS.values())[-1]
    return [*cells, f"{np.median(((upper - lower) / exact)[:, last]):.2f}"]


@eqx.filter_jit
def intervals(y: jax.Array, init: Callable | None) -> tuple[jax.Array, jax.Array]:
    """The ends [run, row] of the intervals of the new rows."""

    def of_run(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, new = jc.Point(jnp.zeros(CALIBRATION)), jc.Point(jnp.zeros(ROWS))
        if init is None:
            return jc.conformal.fit(None, first, y[:CALIBRATION])(None, new).interval(LEVEL)
        state = init(first, y[:CALIBRATION], confidence_level=LEVEL)
        return jc.online.run(state, new, y[CALIBRATION:])[1]

    return eqx.filter_vmap(of_run)(y)


def alarms(y: jax.Array) -> list[str]:
    """The percentages of runs with an alarm, of those with one before the change, and the rows until the others."""
    reached = np.asarray(log_values(jnp.abs(y))) >= -np.log(SIGNIFICANCE)
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), ROWS)
    later = first[first >= CHANGE] - CHANGE + 1
    median = np.median(later)
    shown = f"{median:.0f}" if median <= ROWS - CHANGE else _report.MISSING
    return [f"{100 * np.mean(first < ROWS):.1f}", f"{100 * np.mean(first < CHANGE):.1f}", shown]


@eqx.filter_jit
def log_values(scores: jax.Array) -> jax.Array:
    """The logarithms of the martingale [run, new row]."""
    taus = 1 - jax.random.uniform(jax.random.key(1), scores.shape)

    def of_run(run: tuple[jax.Array, jax.Array]) -> jax.Array:
        p = jc.functional.martingales.p_values(*run)[CALIBRATION:]
        return lax.scan(jc.online.martingales.step, jc.online.martingales.jumper(), p)[1]

    return lax.map(of_run, (scores, taus))


if __name__ == "__main__":
    main()
