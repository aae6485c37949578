"""Intervals of 90 % in jaxcal, MAPIE and crepes: `python benchmarks/speed/peers_intervals.py`.

MAPIE and crepes are dependencies of the extra `benchmarks`. All put intervals around the same boosted trees of
scikit-learn, for the same new rows. In "split" three quarters of the rows fit the trees, and the absolute errors of the
others calibrate them. In "CV+" five models are fitted without a fifth of the rows each. Each library has its own folds,
and crepes has no such method. The trees alone fit the same models and predict the same rows, without intervals.

Cold is a process from its start to its first intervals: Python, imports, data, fits and, in jaxcal, compilation, with
no compiled program on disk. Warm is the same again in that process, but for the fit of the trees in "split". Each
process has one thread. The processes of all libraries alternate, and the least of their seconds counts. Processor
seconds do not count what else runs on the machine, the seconds of the clock do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _common import provenance, tell

LEVEL, FOLDS, MAX_NEW_ROWS = 0.9, 5, 1000
ALONE, JAXCAL, MAPIE, CREPES = "the trees alone", "jaxcal", "MAPIE", "crepes"
SIDES = {"split": (ALONE, JAXCAL, MAPIE, CREPES), "CV+": (ALONE, JAXCAL, MAPIE)}
# Warm calls in each process, of which the fastest counts.
WARM_CALLS = {"split": 5, "CV+": 1}
SECONDS = {"cold processor": ".2f", "cold clock": ".2f", "warm processor": ".4f"}
FIGURES = SECONDS | {"coverage": ".3f", "width": ".3f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="concrete,protein", help="names, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each library, of which the fastest counts")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
    else:
        tell(report(arguments.datasets.split(","), arguments.rounds), arguments.out)


# What is reported


def report(names: list[str], rounds: int) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance("mapie", "crepes", "scikit-learn")
    yield f"seconds with one thread, the least of {rounds} processes"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder) / f"{name}.npz"
            known, new = write_rows(name, file)
            for side in SIDES["split"]:
                ask(side, "split", file)  # it fills the caches of the disk
            for task, sides in SIDES.items():
                yield f"\n{name}, {task}: {known} rows to fit and calibrate on, {new} new rows"
                yield f"{'':16}" + "".join(f"{figure:>16}" for figure in FIGURES)
                for side, found in beside(task, sides, file, rounds).items():
                    cells = (f"{found[figure]:{form}}" if figure in found else "–" for figure, form in FIGURES.items())
                    yield f"{side:16}" + "".join(f"{cell:>16}" for cell in cells)


def write_rows(name: str, file: Path) -> tuple[int, int]:
    """Write the rows of a data set for the processes, in a random order; how many are known and new."""
    import jaxcal as jc

    data = jc.datasets.load(name)
    order = np.random.default_rng(0).permutation(len(data.y))
    new, known = np.split(order, [min(len(order) // 5, MAX_NEW_ROWS)])
    x, y = np.asarray(data.x, float), np.asarray(data.y, float)
    np.savez(file, x=x[known], y=y[known], new_x=x[new], new_y=y[new])
    return len(known), len(new)


def beside(task: str, sides: tuple[str, ...], file: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The figures of every library: the least seconds, and what does not change from process to process."""
    runs = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            runs[side].append(ask(side, task, file))
    return {
        side: found[0] | {each: min(run[each] for run in found) for each in SECONDS} for side, found in runs.items()
    }


def ask(side: str, task: str, file: Path) -> dict[str, float]:
    """The figures of one process."""
    threads = dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = {**threads, "JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONWARNINGS": "ignore", "BEGAN": str(time.time())}
    command = [sys.executable, __file__, "--worker", side, task, str(file)]
    run = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


# What a process does


class Rows(NamedTuple):
    """Rows to fit and calibrate on, and new rows."""

    x: np.ndarray
    y: np.ndarray
    new_x: np.ndarray
    new_y: np.ndarray


def work(side: str, task: str, file: str) -> None:
    """Print the figures of this process."""
    with np.load(file) as found:
        rows = Rows(**found)
    call = TASKS[task](side, rows)
    ends = call()
    figures = {"cold processor": time.process_time(), "cold clock": time.time() - float(os.environ["BEGAN"])}
    figures["warm processor"] = min(seconds(call) for _ in range(WARM_CALLS[task]))
    if ends is not None:
        lower, upper = ends
        figures["coverage"] = float(np.mean((lower <= rows.new_y) & (rows.new_y <= upper)))
        figures["width"] = float(np.mean(upper - lower))
    print(json.dumps(figures))


def seconds(call: Callable) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def trees():
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(random_state=0)


def split(side: str, rows: Rows) -> Callable:
    """What gives the intervals of the new rows around trees that are fitted here."""
    train = 3 * len(rows.y) // 4
    model, x, y = trees().fit(rows.x[:train], rows.y[:train]), rows.x[train:], rows.y[train:]

    def alone():
        model.predict(x)
        model.predict(rows.new_x)

    def jaxcal():
        import jaxcal as jc

        calibrator = jc.conformal.fit(None, jc.Point(model.predict(x)), y)
        return np.asarray(calibrator(None, jc.Point(model.predict(rows.new_x))).interval(LEVEL))

    def mapie():
        from mapie.regression import SplitConformalRegressor

        regressor = SplitConformalRegressor(model, confidence_level=LEVEL, prefit=True).conformalize(x, y)
        return regressor.predict_interval(rows.new_x)[1][:, :, 0].T

    def crepes():
        from crepes import WrapRegressor

        wrapped = WrapRegressor(model)
        wrapped.calibrate(x, y)
        return wrapped.predict_int(rows.new_x, confidence=LEVEL).T

    return {ALONE: alone, JAXCAL: jaxcal, MAPIE: mapie, CREPES: crepes}[side]


def cv_plus(side: str, rows: Rows) -> Callable:
    """What fits the models and gives the intervals of the new rows."""

    def alone():
        from sklearn.model_selection import KFold

        for train, held_out in KFold(FOLDS).split(rows.x):
            model = trees().fit(rows.x[train], rows.y[train])
            model.predict(rows.x[held_out])
            model.predict(rows.new_x)

    def jaxcal():
        import jax

        import jaxcal as jc

        fit = lambda x, y, key: trees().fit(x, y).predict
        fitted = jc.cross_conformal.fit(fit, rows.x, rows.y, key=jax.random.key(0), folds=FOLDS)
        return np.asarray(fitted(rows.new_x).interval(LEVEL))

    def mapie():
        from mapie.regression import CrossConformalRegressor

        regressor = CrossConformalRegressor(trees(), confidence_level=LEVEL, cv=FOLDS)
        return regressor.fit_conformalize(rows.x, rows.y).predict_interval(rows.new_x)[1][:, :, 0].T

    return {ALONE: alone, JAXCAL: jaxcal, MAPIE: mapie}[side]


TASKS = {"split": split, "CV+": cv_plus}


if __name__ == "__main__":
    main()
