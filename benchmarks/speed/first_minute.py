"""The first minute of three new users: `python benchmarks/speed/first_minute.py`.

The script makes an empty environment, installs the checkout in it as the README says, and goes through three stories:
a data scientist with an estimator, an analyst with a file, and a researcher with gradients. Each step is a process, or
a part of one, and has its seconds of the clock. Programs are not on disk before.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import provenance, tell

HERE = Path(__file__).resolve().parents[2]
# The lines of a story between two marks are one step.
SCIENTIST = """
import jaxcal as jc
from jaxcal.sklearn import CalibratedRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
data = jc.datasets.load("concrete")
train, test = jc.datasets.split(len(data.y), (0.8, 0.2), seed=0)
#: imports, and data
model = CalibratedRegressor(HistGradientBoostingRegressor(), method="split", random_state=0)
model.fit(data.x[train], data.y[train])
#: CalibratedRegressor.fit, 824 rows
model.predict_interval(data.x[test]), model.guarantee_
#: intervals of 206 rows, and the guarantee
jc.metrics.evaluate(data.y[test], model.predict_distribution(data.x[test]))
#: scores
import jax
fitted = jc.pipeline.fit(data.x[train], data.y[train], key=jax.random.key(0))
#: jc.pipeline.fit without a model, 824 rows
print(fitted)
forecast = fitted(data.x[test])
forecast.interval(0.9), forecast.cdf(40.0)
#: its table, intervals and probabilities
"""
RESEARCHER = """
import equinox as eqx, jax, jax.numpy as jnp, jaxcal as jc
x = jnp.linspace(-1, 1, 100)[:, None]
y, keys = jnp.sin(3 * x[:, 0]), jax.random.split(jax.random.key(0), 8)
#: imports
networks = eqx.filter_vmap(lambda key: jc.mlp.fit(x, y, key=key, max_epochs=50))(keys)
eqx.filter_vmap(lambda network: network(x).mean)(networks).block_until_ready()
#: eight networks under vmap
process = jc.gaussian_process.fit(x, y + 0.1 * jax.random.normal(keys[0], (100,)))
process(x).interval(0.9)
#: a Gaussian process of 100 rows
jax.grad(lambda z: process(z[:, None]).mean.sum())(x[:, 0])
#: the gradient of its means
mean = lambda shift: jc.gaussian_mle.fit(x, jc.Normal(y + shift, jnp.ones(100)), y)(x, jc.Normal(y, jnp.ones(100))).mean
jax.grad(lambda shift: mean(shift).sum())(0.1)
#: the gradient through the fit of a calibrator
"""
ANALYST = (
    ("jaxcal --help", "--help"),
    (
        "calibrate 824 rows without predictions",
        "calibrate FILE --target y --exclude y_hat --out predicted.csv --save MODEL",
    ),
    ("apply to 206 rows", "apply MODEL NEW --out new.csv"),
    ("calibrate predictions that are there", "calibrate FILE --target y --prediction y_hat --out calibrated.csv"),
)
_CLOCK = "import time as _time; _began = _time.perf_counter()\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    with tempfile.TemporaryDirectory() as folder:
        tell(report(Path(folder)), parser.parse_args().out)


def report(folder: Path) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("scikit-learn")
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=folder, check=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{HERE}[cli,forests]"], cwd=folder, check=True)
    yield line("pip install", time.perf_counter() - began)
    yield from ("", "a data scientist", *story(SCIENTIST, python, folder))
    write_files(python, folder)
    yield from ("", "an analyst", *(line(about, seconds_of(command, python, folder)) for about, command in ANALYST))
    yield from ("", "a researcher", *story(RESEARCHER, python, folder))


def line(about: str, seconds: float) -> str:
    return f"{about:45}{seconds:8.1f} s"


def environment(folder: Path) -> dict[str, str]:
    """Without the variables of this process that a new user does not have."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAXCAL_DATA")}
    return kept | {"XDG_CACHE_HOME": str(folder / "cache")}


def story(text: str, python: Path, folder: Path) -> list[str]:
    """The seconds of the steps of one process."""
    mark = "print('#:', round(_time.perf_counter() - _began, 3), {!r}); _began = _time.perf_counter()"
    lines = [mark.format(each[3:]) if each.startswith("#: ") else each for each in text.splitlines()]
    ran = subprocess.run(
        [python, "-c", _CLOCK + "\n".join(lines)],
        cwd=folder, env=environment(folder), check=True, capture_output=True, text=True,
    )  # fmt: skip
    steps = [each.split(" ", 2)[1:] for each in ran.stdout.splitlines() if each.startswith("#: ")]
    return [line(about, float(seconds)) for seconds, about in steps]


def write_files(python: Path, folder: Path) -> None:
    """The tables of the analyst: rows with a target and predictions, and new rows."""
    code = """
import numpy as np, jaxcal as jc
data = jc.datasets.load("concrete")
y_hat = data.y + np.random.default_rng(0).normal(size=len(data.y)) * (2 + data.x[:, 0] / 100)
table = np.column_stack([data.x, y_hat, data.y])
names = ",".join([*(f"x{k}" for k in range(data.x.shape[1])), "y_hat", "y"])
np.savetxt("rows.csv", table[:824], delimiter=",", header=names, comments="")
np.savetxt("new_rows.csv", table[824:, :-2], delimiter=",", header=names.rsplit(",", 2)[0], comments="")
"""
    subprocess.run([python, "-c", code], cwd=folder, env=environment(folder), check=True)


def seconds_of(command: str, python: Path, folder: Path) -> float:
    """How long a command takes."""
    arguments = command.replace("FILE", "rows.csv").replace("NEW", "new_rows.csv").split()
    began = time.perf_counter()
    jaxcal = str(python.with_name("jaxcal"))
    subprocess.run([jaxcal, *arguments], cwd=folder, env=environment(folder), check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
