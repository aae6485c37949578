"""Ctrl-C at any moment ends a command: with its exit code, without a traceback, and with whole files or none."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxcal import _files

pytestmark = [pytest.mark.any_precision, pytest.mark.skipif(os.name == "nt", reason="a process gets no SIGINT there")]

# Presses, and until when after its begin a command is pressed; it takes about that long.
_PRESSES, _LATEST = 20, 4.0
# Generous: it is two on a quiet machine (`benchmarks/speed/interrupt.py`).
_SECONDS = 30.0


def test_a_press_at_any_moment_ends_the_command(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 2))
    rows = np.c_[x, x[:, 0] + 0.3 * rng.normal(size=150)]
    np.savetxt(tmp_path / "data.csv", rows, delimiter=",", header="a,b,y", comments="")

    def press(number):
        """At its own moment: exit code, and what the command said."""
        out = tmp_path / f"out{number}.csv"
        options = ("--target", "y", "--models", "gaussian_process,mlp", "--out", str(out))
        command = [sys.executable, "-m", "jaxcal", "calibrate", str(tmp_path / "data.csv"), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # Python itself begins before anything of jaxcal's.
        time.sleep(0.5 + (_LATEST - 0.5) * random.Random(number).random())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=_SECONDS)
        return process.returncode, said, out

    with ThreadPoolExecutor(max_workers=4) as pool:
        ended = list(pool.map(press, range(_PRESSES)))
    for code, said, out in ended:
        assert code in (0, 130), said
        assert "Traceback" not in said
        if out.exists():
            assert len(out.read_text().splitlines()) == 151
    assert sum(code == 130 for code, _, _ in ended) >= _PRESSES / 4
    written = {out.name for _, _, out in ended if out.exists()} | {"data.csv"}
    assert {path.name for path in tmp_path.iterdir()} == written


def test_what_is_being_written_is_removed(tmp_path):
    left = []

    def write():
        with _files.replacing(tmp_path / "out") as temporary:
            temporary.write_text("half")
            _files.remove_unfinished()
            left.extend(tmp_path.iterdir())

    with pytest.raises(ValueError, match="cannot write"):
        write()
    assert left == []
