"""What a user waits for at first: `python benchmarks/speed/first_call.py --before DIR`.

DIR is a checkout of an older commit, such as `git worktree add DIR COMMIT` makes. A story is what one process does from
its start on: it imports jaxcal, fits, predicts and scores. Each is told in turn by processes of their own: by the older
commit, by this one without compiled programs on disk ("cold"), and by this one with those of a process before ("warm").
Every figure is the median of the rounds. Processor seconds are those of all threads.

The second table says where the time goes: Python and its imports until jaxcal is there, JAX's tracing, lowering and
compilation (or reading of programs), all in seconds of the clock, and the number of programs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _common import provenance, tell

HERE = Path(__file__).resolve().parents[2]
_CLOCK = """
import json, os, resource, sys, time
began, imported, seconds = time.perf_counter(), 0.0, {}
"""
_BEGIN = """
import jax
import jaxcal as jc
if hasattr(jc, "enable_compilation_cache"):
    jc.enable_compilation_cache()
imported = time.perf_counter() - began
import numpy as np
listen = lambda event, length, **_: seconds.setdefault(event.split("/")[-1], []).append(length)
jax.monitoring.register_event_duration_secs_listener(listen)
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (ROWS, 4))
y = x[:, 0] + np.where(x[:, 1] > 0, 1.0, 0.2) * rng.normal(size=ROWS)
base, key = jc.Point(0.9 * x[:, 0]), jax.random.key(0)
"""
_END = """
spent = resource.getrusage(resource.RUSAGE_SELF)
parts = {"trace": "jaxpr_trace", "lower": "jaxpr_to_mlir_module", "compile": "backend_compile"}
found = {name: seconds.get(event + "_duration", []) for name, event in parts.items()}
print(json.dumps({
    "processor": spent.ru_utime + spent.ru_stime, "clock": time.perf_counter() - began, "import": imported,
    "programs": len(found["compile"]), **{name: sum(lengths) for name, lengths in found.items()},
}))
"""
_SCORES = "distribution = fitted({inputs}); jc.metrics.evaluate(y, distribution); distribution.interval(0.9)"
# What is told, of how many rows; None for a story that needs neither JAX nor data.
STORIES = {
    "jaxcal --help": (
        None,
        """
import contextlib
from jaxcal.cli.app import app
with contextlib.redirect_stdout(sys.stderr):
    app(["--help"], standalone_mode=False)
""",
    ),
    "import jaxcal": (10, ""),
    "conformal, 400 rows": (400, "fitted = jc.conformal.fit(x, base, y); fitted(x, base).interval(0.9)"),
    "yacht: rio.fit, call, evaluate, interval": (
        10,
        """
data = jc.datasets.load("yacht")
x, y = data.x[:246], data.y[:246]
columns = np.c_[x, np.ones(246)]
base = jc.Point(columns @ np.linalg.lstsq(columns, y, rcond=None)[0])
fitted = jc.rio.fit(x, base, y)
"""
        + _SCORES.format(inputs="x, base"),
    ),
    "jaxcal demo": (
        10,
        """
import contextlib
from jaxcal.cli.app import app
with contextlib.redirect_stdout(sys.stderr):
    app(["demo", "--out", FOLDER], standalone_mode=False)
""",
    ),
    "mlp, 824 rows": (824, "fitted = jc.mlp.fit(x, y, key=key); " + _SCORES.format(inputs="x")),
    "usnrt, 5000 rows": (5000, "fitted = jc.usnrt.fit(x, y, key=key); " + _SCORES.format(inputs="x")),
    "deep_ensemble, 300 rows": (300, "fitted = jc.deep_ensemble.fit(x, y, key=key); " + _SCORES.format(inputs="x")),
    "sharp_gp, 300 rows": (
        300,
        """
model = jc.gaussian_process.fit(x[:200], y[:200])
new = x[200:], model(x[200:])
fitted = jc.sharp_gp.fit(*new, y[200:], x_train=x[:200], y_train=y[:200], kernel=model)
y = y[200:]
"""
        + _SCORES.format(inputs="*new"),
    ),
    "deep_ensemble, 824 rows": (824, "fitted = jc.deep_ensemble.fit(x, y, key=key); " + _SCORES.format(inputs="x")),
    "default pipeline, 824 rows": (
        824,
        """
import warnings
warnings.simplefilter("ignore")
data = jc.datasets.load("concrete")
fitted = jc.pipeline.fit(data.x[:824], data.y[:824], key=key)
""",
    ),
    "accrue, 300 rows": (
        300,
        "fitted = jc.accrue.fit(x, base, y, key=key); " + _SCORES.format(inputs="x, base"),
    ),
    "mlp and ensemble, four sizes of 742 to 824": (
        824,
        """
for n in (824, 800, 790, 742):
    for method in (jc.mlp, jc.deep_ensemble):
        fitted = method.fit(x[:n], y[:n], key=key, max_epochs=20)
        distribution = fitted(x[: n // 3])
        distribution.mean, distribution.std
""",
    ),
    "conformal, 1,000 times one row": (
        400,
        """
fitted = jc.conformal.fit(None, base, y)
for _ in range(1000):
    fitted(None, base[:1]).interval(0.9)
""",
    ),
    "rio, stochastic, 5000 rows": (
        5000,
        """
try:
    options = {"inference": jc.gp.Stochastic()}
except AttributeError:  # as an older commit says it
    options = {"bound": "stochastic"}
fitted = jc.rio.fit(x, base, y, key=key, **options)
"""
        + _SCORES.format(inputs="x, base"),
    ),
}
TELLERS = ("before", "cold", "warm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stories", nargs="*", default=list(STORIES), help="their names, or beginnings of them")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    names = [name for name in STORIES if name.startswith(tuple(arguments.stories))]
    tell(report(arguments.before.resolve(), names, arguments.rounds), arguments.out)


def report(before: Path, names: list[str], rounds: int) -> Iterator[str]:
    """The lines, those of a story as soon as it was told."""
    yield provenance("equinox")
    yield f"before: {commit(before)}; cold and warm: {commit(HERE)}; medians of {rounds} rounds"
    yield f"\n{'processor seconds':42}{'before':>8}{'cold':>8}{'warm':>8}{'cold / before':>15}{'warm / before':>15}"
    found = {}
    for name in names:
        found[name] = told(before, name, rounds)
        first, cold, warm = (found[name][teller]["processor"] for teller in TELLERS)
        yield f"{name:42}{first:8.2f}{cold:8.2f}{warm:8.2f}{cold / first:15.2f}{warm / first:15.2f}"
    columns = ("clock", "import", "trace", "lower", "compile")
    yield f"\n{'seconds of the clock':42}{'':8}{'programs':>9}" + "".join(f"{column:>9}" for column in columns)
    for name, of_story in found.items():
        for teller, figures in of_story.items():
            cells = "".join(f"{figures[column]:9.2f}" for column in columns)
            yield f"{name if teller == 'before' else '':42}{teller:8}{figures['programs']:9.0f}{cells}"


def told(before: Path, name: str, rounds: int) -> dict[str, dict[str, float]]:
    """The medians of every teller's figures."""
    results = {teller: [] for teller in TELLERS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            results["before"].append(tell_once(name, before, cache, JAX_ENABLE_COMPILATION_CACHE="0"))
            results["cold"].append(tell_once(name, HERE, cache))
            results["warm"].append(tell_once(name, HERE, cache))
    return {
        teller: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for teller, runs in results.items()
    }


def tell_once(name: str, checkout: Path, cache: str, **variables: str) -> dict[str, float]:
    """One process's figures; its compiled programs lie in a folder of `cache`."""
    rows, story = STORIES[name]
    begin = _CLOCK if rows is None else _CLOCK + _BEGIN.replace("ROWS", str(rows))
    code = begin + story.replace("FOLDER", repr(f"{cache}/pictures")) + _END
    own = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": cache, "PYTHONWARNINGS": "ignore", **variables}
    unwanted = ("PYTHONDONTWRITEBYTECODE", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | own,
        cwd=cache,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return json.loads(run.stdout.splitlines()[-1])


def commit(checkout: Path) -> str:
    """The commit of a checkout, and whether it was changed since."""
    git = lambda *command: subprocess.check_output(["git", "-C", checkout, *command], text=True).strip()
    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")


if __name__ == "__main__":
    main()
