"""What Gaussian processes cost from the first import on: `python benchmarks/speed/light_engine.py --before DIR`.

DIR is a checkout of an older commit, such as `git worktree add DIR COMMIT` makes. Every story is told by fresh
processes without compiled programs on disk, in turn by the older commit and by this one, each pinned to the same core
with one thread. The stories are fits of 800 rows of concrete and of 5,000 rows of kin8nm by `gaussian_process` and
`rio`, and of 600 training and 200 calibration rows of concrete by `sharp_gp`. Further ones are fits with other noise,
through inducing points, and with a kernel of gpjax. All are in float32, with the default options but for what the name
tells; the model behind `rio` and `sharp_gp` is a linear one.

- story: import, first fit, prediction of at most 1,000 other rows, all scores; processor seconds of the whole process;
- again: the same fit once more, its programs there: the least of three of 800 rows, one of more;
- CRPS: on these other rows, in the unit of y.

Of the fits of 800 rows there are more figures:

- many: a fit of 2,000 rows of kin8nm once more, the least of two;
- programs: how many are compiled for 790 rows in place of 800, for another tolerance, and for predictions of 1, 7, 50,
  300 and 900 rows;
- evidence: of the fits of 800 rows and of 2,000, in nats.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from _common import provenance, tell
from first_call import commit

HERE = Path(__file__).resolve().parents[2]
_STORY = """
import json, logging, re, resource, time, warnings
processor = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
warnings.simplefilter("ignore")
import numpy as np
import jax
import jaxcal as jc
imported = processor()

def rows(name, number):
    data = jc.datasets.load(name)
    x, y = data.x.astype(np.float32), data.y.astype(np.float32)
    columns = np.c_[x, np.ones(len(x))]
    mean = columns @ np.linalg.lstsq(columns[:number], y[:number], rcond=None)[0]
    return x, mean.astype(np.float32), y

def fit(part, x, mean, y, **options):
    options |= OTHERWISE and eval(OTHERWISE[not hasattr(jc.gp, "Exact")])
    if METHOD == "gaussian_process":
        found = jc.gaussian_process.fit(x[part], y[part], **options)
    elif METHOD == "rio":
        found = jc.rio.fit(x[part], jc.Point(mean[part]), y[part], **options)
    else:
        own = slice(OF_MODEL, part.stop)
        options |= {"x_train": x[:OF_MODEL], "y_train": y[:OF_MODEL]}
        found = jc.sharp_gp.fit(x[own], jc.Point(mean[own]), y[own], **options)
    return jax.block_until_ready(found)

def predict(found, part, x, mean, y):
    return found(x[part]) if METHOD == "gaussian_process" else found(x[part], jc.Point(mean[part]))

def with_tolerance(tolerance):
    try:
        return {"inference": jc.gp.Exact(tolerance=tolerance)}
    except AttributeError:  # as an older commit says it
        return {"tolerance": tolerance}

def timed(call):
    began = processor()
    call()
    return processor() - began

data, train, test = rows(DATASET, OF_MODEL), slice(ROWS), slice(ROWS, ROWS + 1000)
fitted = fit(train, *data)
predicted = predict(fitted, test, *data)
scores = jc.metrics.evaluate(data[2][test], predicted)
figures = {"import": imported, "story": processor(), "crps": float(scores["crps"])}
"""
_AGAIN = """
figures["again"] = timed(lambda: fit(train, *data))
"""
_MORE = """
figures["evidence"] = float(fitted.evidence)
figures["again"] = min(timed(lambda: fit(train, *data)) for _ in range(3))
count = []
class Counts(logging.Handler):
    def emit(self, record):
        if re.match("Finished XLA compilation", record.getMessage()):
            count.append(1)
logger = logging.getLogger("jax._src.dispatch")
logger.setLevel(logging.DEBUG)
logger.propagate = False
logger.addHandler(Counts())
def compiled(call):
    before = len(count)
    call()
    return len(count) - before
figures["rows"] = compiled(lambda: fit(slice(790), *data))
figures["option"] = compiled(lambda: fit(train, *data, **with_tolerance(0.01)))
figures["batches"] = compiled(lambda: [predict(fitted, slice(k), *data) for k in (1, 7, 50, 300, 900)])
many, all_rows = rows("kin8nm", 2000), slice(2000)
found = fit(all_rows, *many)
figures["evidence of many"] = float(found.evidence)
figures["many"] = min(timed(lambda: fit(all_rows, *many)) for _ in range(2))
"""
_END = "\nprint(json.dumps(figures))\n"
# What is printed, with the number of decimals.
LINES = {
    "import": ("import, processor s", 2),
    "story": ("story, processor s", 2),
    "again": ("again, processor s", 2),
    "many": ("again, 2,000 rows, processor s", 2),
    "rows": ("programs for another number of rows", 0),
    "option": ("programs for another tolerance", 0),
    "batches": ("programs for five batch sizes", 0),
    "evidence": ("log evidence, 800 rows", 2),
    "evidence of many": ("log evidence, 2,000 rows", 2),
    "crps": ("CRPS on other rows", 3),
}


class Story(NamedTuple):
    """What a process does.

    Attributes:
        method: of `jaxcal`.
        dataset: whose rows.
        rows: how many the fit takes.
        of_model: how many the linear model is fitted to: the first ones.
        more: code that one process runs after the story.
        otherwise: options in the words of this commit, and in those of an older one; none for the default.
    """

    method: str
    dataset: str
    rows: int
    of_model: int
    more: str
    otherwise: tuple[str, ...] = ()


_STUDENT_T = "{'noise': jc.gp.StudentTNoise()}", "{'noise': 'student_t'}"
_INPUT = "{'noise': jc.gp.InputNoise()}", "{'noise': 'input'}"
_SPARSE = "{'inference': jc.gp.Sparse()}", "{'bound': 'collapsed'}"
_MATERN = "{'kernel': __import__('gpjax').kernels.Matern52()}"
_OF_MATERN = {
    "exact": ("{}", "{}"),
    "sparse": _SPARSE,
    "nearest": ("{'inference': jc.gp.Nearest()}", "{'bound': 'nearest'}"),
    "Student t": _STUDENT_T,
    "input noise": _INPUT,
}

STORIES = {
    "gaussian_process": Story("gaussian_process", "concrete", 800, 800, _MORE),
    "rio": Story("rio", "concrete", 800, 800, _MORE),
    "gaussian_process, 5,000 rows": Story("gaussian_process", "kin8nm", 5000, 5000, _AGAIN),
    "rio, 5,000 rows": Story("rio", "kin8nm", 5000, 5000, _AGAIN),
    "sharp_gp, 600 + 200 rows": Story("sharp_gp", "concrete", 800, 600, _AGAIN),
    "gaussian_process, 800 rows, Student t": Story("gaussian_process", "concrete", 800, 800, _AGAIN, _STUDENT_T),
    "gaussian_process, 800 rows, input noise": Story("gaussian_process", "concrete", 800, 800, _AGAIN, _INPUT),
    "gaussian_process, 5,000 rows, sparse": Story("gaussian_process", "kin8nm", 5000, 5000, _AGAIN, _SPARSE),
    "rio, 5,000 rows, sparse": Story("rio", "kin8nm", 5000, 5000, _AGAIN, _SPARSE),
} | {
    f"gpjax's Matern52, 800 rows, {name}": Story(
        "gaussian_process", "concrete", 800, 800, _AGAIN, tuple(f"{each} | {_MATERN}" for each in words)
    )
    for name, words in _OF_MATERN.items()
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="stories of each; their median is told")
    parser.add_argument("--stories", nargs="*", default=list(STORIES), help="their names (default: all)")
    parser.add_argument("--core", type=int, default=0, help="the core that processes are pinned to")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments), arguments.out)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines, those of a story as soon as it was told."""
    sides = {"before": arguments.before.resolve(), "after": HERE}
    yield provenance("equinox")
    yield ", ".join(f"{side}: {commit(path)}" for side, path in sides.items()) + f"; stories: {arguments.rounds} rounds"
    for name in arguments.stories:
        runs = {side: [] for side in sides}
        for number in range(arguments.rounds):
            for side, path in sides.items():
                runs[side].append(told(STORIES[name], path, arguments.core, whole=number == 0))
        yield f"\n{name:40}{'before':>10}{'after':>10}{'ratio':>8}"
        for key, (line, decimals) in LINES.items():
            if key not in runs["after"][0]:
                continue
            of_side = {side: statistics.median(run[key] for run in each if key in run) for side, each in runs.items()}
            cells = "".join(f"{value:10.{decimals}f}" for value in of_side.values())
            ratio = f"{of_side['after'] / of_side['before']:8.2f}" if decimals == 2 and "evidence" not in key else ""
            yield f"{line:40}{cells}{ratio}"


def told(story: Story, checkout: Path, core: int, *, whole: bool) -> dict[str, float]:
    """One process's figures; with those of further calls where the whole is asked for."""
    of_story = {"METHOD": story.method, "DATASET": story.dataset, "ROWS": story.rows, "OF_MODEL": story.of_model}
    of_story["OTHERWISE"] = story.otherwise
    values = "".join(f"{name} = {value!r}\n" for name, value in of_story.items())
    code = values + _STORY + (story.more if whole else "") + _END
    own = {"PYTHONPATH": str(checkout), "NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    run = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-c", code],
        env=environment | own,
        cwd=checkout,  # Python looks for modules there first
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
