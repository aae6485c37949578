"""How RIO grows with the number of rows: `python benchmarks/speed/rio_scaling.py`.

Seconds and memory of `rio.fit` with its default options, and of predictions at all 48,320 test rows, for random parts
of the 193,280 training rows of gpu_sgemm (80 % of 241,600, of 14 columns), in float64. The target is the logarithm of
the run time; the base is a linear model of the same training rows.

Every size has a process of its own. It fits and predicts twice: "fit" and "predict" are seconds of the second time,
"first" those of the first, fit and prediction with compilation. "processor" is what all threads of the second fit took
together: it hardly changes where other work shares the cores. "peak" is the process's largest resident set, of both
times, in MB of 10^6 bytes; "above" is how much of that came after the start, with jaxcal imported, the rows loaded and
the base fitted. The compiler's memory is in both.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from _common import peak_memory, provenance, tell, verdict

DATA_SET = "gpu_sgemm"
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 193_280)
CONFIDENCE_LEVEL = 0.9
# What is asked for: the slope of log seconds over log rows from so many rows on; memory in MB and seconds at the end.
ASKED_SLOPE, FROM_ROWS, ASKED_MEMORY, ASKED_SECONDS = 1.1, 10_000, 2000, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of rows, comma-separated")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured(arguments.worker, arguments.seed)))
        return
    tell(report([int(size) for size in arguments.sizes.split(",")], arguments.seed), arguments.out)


# What is reported


def report(sizes: list[int], seed: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield "RIO by number of rows; the docstring of benchmarks/speed/rio_scaling.py says what is measured"
    records = []
    for size in sizes:
        records.append(in_own_process(size, seed))
        if size == sizes[0]:
            yield from heading(records[0], seed)
        yield row(records[-1])
    many = [record for record in records if record["rows"] >= FROM_ROWS]
    if len(many) > 1:
        yield from slopes(many)
    yield from at_the_end(records[-1])


def heading(record: dict, seed: int) -> Iterator[str]:
    yield provenance()
    yield f"{DATA_SET}, {record['columns']} columns, {record['test_rows']} test rows, seed {seed}"
    yield (
        f"{'':19}{'seconds':^36}{'memory, MB':^14}{'RMSE on test rows':^20}{'covered':>9}\n"
        f"{'rows':>8}  {'inference':9}{'fit':>9}{'processor':>10}{'predict':>9}{'first':>8}{'peak':>7}{'above':>7}"
        f"{'base':>10}{'RIO':>10}{f'at {CONFIDENCE_LEVEL:.0%}':>9}{'steps':>7}"
    )


def row(record: dict) -> str:
    return (
        f"{record['rows']:8}  {record['inference']:9}"
        f"{record['fit']:9.2f}{record['processor']:10.2f}{record['predict']:9.2f}{record['first']:8.1f}"
        f"{record['peak']:7.0f}{record['peak'] - record['start']:7.0f}"
        f"{record['rmse_base']:10.4f}{record['rmse']:10.4f}{record['coverage']:9.1%}{record['steps']:7}"
    )


def slopes(records: list[dict]) -> Iterator[str]:
    """How the seconds of a fit grow, by least squares on the logarithms, and the memory."""
    rows = [record["rows"] for record in records]
    for name, seconds in (
        ("fit", [record["fit"] for record in records]),
        ("processor", [record["processor"] for record in records]),
        ("processor a step", [record["processor"] / record["steps"] for record in records]),
    ):
        logarithms = ([math.log(value) for value in values] for values in (rows, seconds))
        power = statistics.linear_regression(*logarithms).slope
        asked = f" (asked for: below {ASKED_SLOPE}; {verdict(power < ASKED_SLOPE)})" if name == "fit" else ""
        yield f"{name}: seconds grow as rows ^ {power:.2f} from {rows[0]} rows on{asked}"
    a_row = 1e6 * statistics.linear_regression(rows, [record["peak"] for record in records]).slope
    yield f"peak memory grows by {a_row:.0f} bytes a row, {8 * (records[0]['columns'] + 2)} of which are the row itself"


def at_the_end(record: dict) -> Iterator[str]:
    total = record["first"]
    yield (
        f"{record['rows']} rows: {total:.1f} s for fit and prediction with compilation (asked for: below "
        f"{ASKED_SECONDS}; {verdict(total < ASKED_SECONDS)}), peak {record['peak']:.0f} MB (asked for: below "
        f"{ASKED_MEMORY}; {verdict(record['peak'] < ASKED_MEMORY)})"
    )


# A process for every size


def in_own_process(size: int, seed: int) -> dict:
    """What a new process measures. This one holds little: a child's peak memory counts from its parent's."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(size), "--seed", str(seed)]
    alike = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return json.loads(subprocess.check_output(command, text=True, env=os.environ | alike))


def measured(size: int, seed: int) -> dict:
    import jax
    import numpy as np

    import jaxcal as jc

    jax.config.update("jax_enable_x64", True)
    data = jc.datasets.load(DATA_SET)
    train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=seed)
    train = train[:size]
    x, x_test, y, y_test = data.x[train], data.x[test], np.log(data.y[train]), np.log(data.y[test])
    weights = np.linalg.lstsq(np.column_stack([np.ones(len(x)), x]), y)[0]
    base, base_test = (jc.Point(weights[0] + rows @ weights[1:]) for rows in (x, x_test))
    jax.block_until_ready((base, base_test))
    start = peak_memory()

    times = []
    for _ in range(2):
        began, began_processor = time.perf_counter(), time.process_time()
        rio = jax.block_until_ready(jc.rio.fit(x, base, y))
        fitted, fitted_processor = time.perf_counter(), time.process_time()
        after = jax.block_until_ready(rio(x_test, base_test))
        times.append((fitted - began, fitted_processor - began_processor, time.perf_counter() - fitted))
    peak = peak_memory()
    fit, processor_time, predict = times[1]
    return {
        "rows": len(y),
        "columns": x.shape[1],
        "test_rows": len(y_test),
        "inference": rio.inference,
        "fit": fit,
        "processor": processor_time,
        "predict": predict,
        "first": times[0][0] + times[0][2],
        "start": start,
        "peak": peak,
        "rmse_base": float(jc.metrics.rmse(y_test, base_test)),
        "rmse": float(jc.metrics.rmse(y_test, after)),
        "coverage": float(jc.metrics.coverage(y_test, after, confidence_level=CONFIDENCE_LEVEL)),
        "steps": int(rio.iterations),
    }


if __name__ == "__main__":
    main()
