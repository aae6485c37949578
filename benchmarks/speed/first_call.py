"""What a user waits for: `python benchmarks/speed/first_call.py`.

Seconds to import jaxcal beside those to import jax and gpjax, and seconds of the first call of `rio.fit`, with
compilation, and of the second, on 246 rows of 6 columns (the size of yacht's training part). Every figure comes from
a process of its own; the median of three.
"""

import os
import platform
import statistics
import subprocess
import sys

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
    import jax
    import jaxlib

    import jaxcal

    print(f"jaxcal {jaxcal.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {os.cpu_count()} cores")
    with open("/proc/cpuinfo") as file:
        print(
            next(
                (line.split(":")[1].strip() for line in file if line.startswith("model name")),
                platform.processor(),
            )
        )
    print(f"{'':24}{'first s':>9}{'second s':>10}")
    for module in ("jax", "jaxcal", "gpjax"):
        print(f"{'import ' + module:24}{seconds(IMPORT.format(module=module))[0]:9.2f}")
    for name, options in (
        ("rio.fit", {}),
        ("rio.fit, collapsed", {"bound": "collapsed"}),
        ("rio.fit, paper's setting", {"preset": "paper"}),
    ):
        first, second = seconds(FIT.replace("{options}", repr(options)))
        print(f"{name:24}{first:9.2f}{second:10.3f}")


if __name__ == "__main__":
    main()
