"""What a fit of USNRT costs: `NPROC=1 python benchmarks/speed/usnrt.py`.

Processor seconds of a first fit in its process, with all that it compiles, and of a second one, for numbers of rows of
which each is ten times the one before; and how many programs were compiled that took longer than a tenth of a second.
The std of the noise differs between four regions, so that the tree splits.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from _common import provenance, tell

import jaxcal as jc

COLUMNS, LEAST_SECONDS = 8, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000, 50_000])
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.rows), arguments.out)


def report(rows: list[int]) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("equinox")
    yield f"{'rows':>8}{'leaves':>8}{'programs':>10}{'first fit, s':>14}{'second, s':>12}{'over the one before':>22}"
    before = None
    for number in rows:
        x, y = draw(number)
        # Another size compiles anew whatever came before.
        compiled, first, _ = fit(x, y)
        _, second, leaves = fit(x, y)
        grown = "" if before is None else f"{second / before:.1f}"
        yield f"{number:8}{leaves:8}{compiled:10}{first:14.1f}{second:12.1f}{grown:>22}"
        before = second


def draw(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose noise has four stds."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (number, COLUMNS))
    std = np.where(x[:, 1] > 0.2, 1, 0.1) * np.where(x[:, 2] > 0, 1, 2)
    return x, np.sin(3 * x[:, 0]) + std * rng.normal(size=number)


def fit(x: np.ndarray, y: np.ndarray) -> tuple[int, float, int]:
    """How many programs a fit compiles, its processor seconds, and how many leaves it has."""
    seconds = []
    listen = lambda name, duration, **_: seconds.append(duration) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    began = time.process_time()
    fitted = jax.block_until_ready(jc.usnrt.fit(x, y, key=jax.random.key(0)))
    elapsed = time.process_time() - began
    jax.monitoring.unregister_event_duration_listener(listen)
    return sum(duration > LEAST_SECONDS for duration in seconds), elapsed, len(fitted.leaf_table()["leaf"])


if __name__ == "__main__":
    main()
