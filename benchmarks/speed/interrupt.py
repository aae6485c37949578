"""How long a command goes on after Ctrl-C: `python benchmarks/speed/interrupt.py --before DIR`.

DIR is a checkout of an older commit, such as `git worktree add DIR COMMIT` makes. `jaxcal calibrate` chooses and fits
models to a file of 824 rows. It is pressed at moments that are spread over its first seconds, the same for both
commits: while it imports, compiles, fits and writes. Asked for: an end within 2 s, with exit code 130, no traceback and
no half file. A process that goes on for two minutes is killed.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _common import provenance, tell, verdict

HERE = Path(__file__).resolve().parents[2]
ASKED_SECONDS, PATIENCE, ROWS = 2.0, 120.0, 824


class End(NamedTuple):
    """How a process ended: seconds after the press, exit code, and what it left."""

    seconds: float
    code: int
    has_traceback: bool
    left: tuple[str, ...]

    @property
    def is_as_asked(self) -> bool:
        """Whether it is within the time, and clean."""
        return self.seconds <= ASKED_SECONDS and self.code == 130 and not self.has_traceback and not self.left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--presses", type=int, default=20)
    parser.add_argument("--latest", type=float, default=15.0, help="seconds after the start of the last press")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    arguments = parser.parse_args()
    tell(report(arguments.before, arguments.presses, arguments.latest), arguments.out)


def report(before: Path | None, presses: int, latest: float) -> Iterator[str]:
    """The lines, each as soon as it is known."""
    yield provenance()
    yield f"{presses} presses in the first {latest:g} s; asked: {ASKED_SECONDS:g} s, exit code 130, nothing left"
    yield f"{'':8}{'median s':>10}{'slowest s':>11}{'as asked':>10}  exit codes"
    moments = np.linspace(0.3, latest, presses)
    for name, folder in (("before", before), ("now", HERE)):
        if folder is not None:
            ends = [press(folder, moment) for moment in moments]
            seconds = [end.seconds for end in ends]
            asked = sum(end.is_as_asked for end in ends)
            codes = ", ".join(f"{code}: {sum(e.code == code for e in ends)}" for code in sorted({e.code for e in ends}))
            numbers = f"{statistics.median(seconds):10.2f}{max(seconds):11.2f}{asked:7}/{presses}"
            yield f"{name:8}{numbers}  {codes} {verdict(asked == presses) if name == 'now' else ''}".rstrip()


def press(folder: Path, moment: float) -> End:
    """Press Ctrl-C so many seconds after the start."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (ROWS, 4))
    rows = np.c_[x, x[:, 0] + np.where(x[:, 1] > 0, 1.0, 0.2) * rng.normal(size=ROWS)]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.csv"
        np.savetxt(file, rows, delimiter=",", header="a,b,c,d,y", comments="")
        command = [sys.executable, "-m", "jaxcal", "calibrate", str(file), "--target", "y"]
        # Without programs of a process before.
        environment = os.environ | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(Path(place) / "cache")}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        time.sleep(moment)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        left = tuple(sorted(each.name for each in Path(place).iterdir() if each.name not in ("rows.csv", "cache")))
        return End(time.perf_counter() - began, process.returncode, "Traceback" in said, left)


if __name__ == "__main__":
    main()
