"""What a user waits for: `python benchmarks/speed/first_call.py`.

Seconds to import jaxcal beside those to import jax and gpjax, and seconds of the first call of `rio.fit`, with
compilation, and of the second, on 246 rows of 6 columns (the size of yacht's training part). Every figure comes from
a process of its own; the median of three.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from _common import provenance, tell

IMPORT = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
FIT = """
import time
import jax, numpy as np, jaxcal as jc
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = rng.normal(size=(246, 6))
mean = np.sin(x[:, 0])
y = mean + 0.3 * x[:, 1] ** 2 + 0.1 * rng.normal(size=246)
jax.numpy.zeros(1).block_until_ready()  # starts the device
for _ in range(2):
    t = time.perf_counter()
    jax.block_until_ready(jc.rio.fit(x, jc.Point(mean), y, **{options}))
    print(time.perf_counter() - t)
"""


def seconds(code: str) -> list[float]:
    """The medians, over three processes, of the numbers that the code prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    outputs = [
        subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split() for _ in range(3)
    ]
    return [statistics.median(float(run[i]) for run in outputs) for i in range(len(outputs[0]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(), arguments.out)


def report() -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("gpjax")
    yield f"{'':24}{'first s':>9}{'second s':>10}"
    for module in ("jax", "jaxcal", "gpjax"):
        yield f"{'import ' + module:24}{seconds(IMPORT.format(module=module))[0]:9.2f}"
    for name, options in (
        ("rio.fit", {}),
        ("rio.fit, collapsed", {"bound": "collapsed"}),
        ("rio.fit, paper's setting", {"preset": "paper"}),
    ):
        first, second = seconds(FIT.replace("{options}", repr(options)))
        yield f"{name:24}{first:9.2f}{second:10.3f}"


if __name__ == "__main__":
    main()
