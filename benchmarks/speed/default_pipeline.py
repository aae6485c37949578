"""The default pipeline beside an older commit: `python benchmarks/speed/default_pipeline.py --before DIR`.

DIR is a checkout of the older commit, such as `git worktree add DIR COMMIT` makes. For each data set and seed both fit
the default pipeline to the same rows and predict the same new ones. Each commit has one process, which keeps its
compiled programs; it is pinned to the cores of this one. Coverage is that of 90 % intervals of the new rows. The last
lines say how far the commits are apart, with the standard error over all fits.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import provenance, tell

HERE = Path(__file__).resolve().parents[2]
DATASETS = ("auto_mpg", "diabetes", "parkinsons_total", "steel", "grid_stability", "election")
# The most rows that are fitted to, and predicted. Of fewer a quarter is predicted.
ROWS, NEW_ROWS = 800, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.seeds)
    else:
        tell(report(arguments.before, arguments.seeds), arguments.out)


def report(before: Path, seeds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("scikit-learn")
    yield f"{'':18}{'seed':>5}{'CRPS':>22}{'90 % coverage':>18}{'clock s':>16}  taken"
    sides = [start(folder, seeds) for folder in (before, HERE)]
    pairs = []
    for lines in zip(*(side.stdout for side in sides), strict=True):
        a, b = map(json.loads, lines)
        pairs.append((a, b))
        two = lambda name, form, a=a, b=b: f"{a[name]:{form}} {b[name]:{form}}"
        numbers = f"{two('crps', '.4g'):>22}{two('coverage', '.3f'):>18}{two('seconds', '.1f'):>16}"
        yield f"{a['name']:18}{a['seed']:5}{numbers}  {a['taken']} / {b['taken']}"
    if any(side.wait() for side in sides):
        raise SystemExit("a process failed; the reason is above.")
    for about, differences in (
        ("log of the ratio of CRPS, now to before", [np.log(b["crps"] / a["crps"]) for a, b in pairs]),
        ("coverage, now less before", [b["coverage"] - a["coverage"] for a, b in pairs]),
    ):
        error = np.std(differences, ddof=1) / np.sqrt(len(differences))
        yield f"{about}: {np.mean(differences):+.4f} ± {error:.4f}"
    ratio = np.exp(np.mean([np.log(b["seconds"] / a["seconds"]) for a, b in pairs]))
    yield f"seconds, now over before (geometric mean): {ratio:.2f}"


def start(folder: Path, seeds: int) -> subprocess.Popen:
    """A process of one commit."""
    command = [sys.executable, __file__, "--work", "--seeds", str(seeds)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def work(seeds: int) -> None:
    """A line of JSON for each data set and seed."""
    import jax

    import jaxcal as jc

    warnings.simplefilter("ignore")  # of outliers
    jax.config.update("jax_enable_x64", True)
    for name in DATASETS:
        data = jc.datasets.load(name)
        x, y = np.asarray(data.x), np.asarray(data.y)
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(y))
            n = min(ROWS, len(y) * 3 // 4)
            rows, new = order[:n], order[n : n + NEW_ROWS]
            began = time.perf_counter()
            fitted = jc.pipeline.fit(x[rows], y[rows], key=jax.random.key(seed))
            seconds, forecast = time.perf_counter() - began, fitted(x[new])
            lower, upper = map(np.asarray, forecast.interval(0.9))
            found = {
                "name": name,
                "seed": seed,
                "crps": float(np.mean(np.asarray(forecast.crps(y[new])))),
                "coverage": float(np.mean((lower <= y[new]) & (y[new] <= upper))),
                "seconds": seconds,
                "taken": fitted.steps[0].name,
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
