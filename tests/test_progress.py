"""What long work tells of itself, to whom, and that it changes nothing."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import compilations

import jaxcal as jc
from jaxcal import progress, sweep
from jaxcal.optimize import batching, each_run, train_minibatches

pytestmark = pytest.mark.any_precision
X = np.linspace(-1, 1, 40)
KEY = jax.random.key(0)


@pytest.fixture
def seen(monkeypatch):
    """What is reported inside of the test, after every step."""
    monkeypatch.setattr(progress, "_BETWEEN_REPORTS", 0.0)
    seen = []
    with progress.to(seen.append):
        yield seen


def squared_error(slope, rows, key):
    x, y = rows
    return (slope * x - y) ** 2


def train(slope=3.0, loss=squared_error, max_epochs=12):
    rows = jnp.asarray(X, jnp.float32), slope * jnp.asarray(X, jnp.float32)
    options = {"key": KEY, "optimizer": optax.sgd, "learning_rate": 0.01, "max_epochs": max_epochs, "what": "a"}
    return train_minibatches(loss, jnp.zeros(()), rows, rows, **options)


def told(seen):
    return [(each.label, each.done, each.total, each.is_finished) for each in seen]


def test_a_training_reports_every_part_and_is_the_same(seen):
    with progress.to(None):
        silent = train()
    with compilations() as compiled:
        reported = train()
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, silent, reported)
    assert told(seen) == [("a: epochs", k, 12, False) for k in range(13)] + [("a: epochs", 12, 12, True)]


def test_parts_grow_to_the_time_between_reports(seen, monkeypatch):
    monkeypatch.setattr(progress, "_BETWEEN_REPORTS", 1e6)
    train()
    assert [each.done for each in seen] == [0, 1, 12, 12]


def test_a_training_that_stops_early_ends_its_report(seen):
    optimum = train(slope=0.0)  # the initial slope is the best
    assert seen[-1].is_finished
    assert seen[-1].done == optimum.steps < 12


@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda s: jax.vmap(f)(s[None])[0]], ids=["jit", "vmap"])
def test_silent_inside_of_transformations(seen, transform):
    slope = jnp.float32(3)
    np.testing.assert_allclose(transform(lambda s: train(s).params)(slope), train(3.0).params, rtol=1e-6)
    assert [each.label for each in seen if each.is_finished] == ["a: epochs"]  # of the second one
    text = jax.jit(lambda s: train(s).params).lower(slope).as_text()
    assert "callback" not in text


def test_a_loss_that_closes_over_what_is_traced(seen):
    params = lambda factor: train(loss=lambda p, rows, key: factor * squared_error(p, rows, key)).params
    np.testing.assert_allclose(jax.vmap(params)(jnp.ones(1))[0], train().params, rtol=1e-6)


def _squared(factor, value):
    return {"square": factor * value**2}


@pytest.mark.parametrize("on_host", [True, False])
def test_runs_report_one_after_another_and_are_the_same(seen, on_host, monkeypatch):
    monkeypatch.setattr(batching, "can_be_filled", lambda *_: on_host)
    own = [(jnp.asarray(value),) for value in (1.0, 2.0, 3.0)]
    found = each_run(_squared, (np.float32(2),), own, label="runs", slots=5)
    np.testing.assert_array_equal(found["square"], [2, 8, 18])
    steps = range(4) if on_host else (0, 3)
    assert told(seen) == [*(("runs", k, 3, False) for k in steps), ("runs", 3, 3, True)]


def test_folds_hold_what_is_done_inside(seen):
    def fit(x, y, *, key):
        train(max_epochs=2)
        return lambda x: jnp.zeros(x.shape[0])

    jc.out_of_fold(fit, X, X, key=KEY, folds=2)
    assert {each.label for each in seen} == {"cross-validation: models"}
    assert str(seen[3]) == "cross-validation: models 0 of 2, a: epochs 2 of 2"
    assert seen[2].fraction == 0.25
    fractions = [each.fraction for each in seen]
    assert fractions == sorted(fractions)
    assert [each.is_finished for each in seen] == [False] * (len(seen) - 1) + [True]


def test_what_a_callback_raises_ends_the_work():
    def stop(told):
        if told.done == 1:
            raise KeyboardInterrupt

    with progress.to(stop), pytest.raises(KeyboardInterrupt), progress.work("steps", 3) as steps:
        steps.advance()
    with progress.work("steps", 3) as steps:  # nobody listens any more
        assert steps.is_silent


def test_other_threads_and_jobs_of_sweeps_are_silent(seen, tmp_path):
    silent = []

    def ask():
        with progress.work("steps", 3) as steps:
            silent.append(steps.is_silent)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    class AtOnce:
        def submit(self, call):
            future = Future()
            future.set_result(call())
            return future

    sweep.run(lambda seed: ask() or [], [{"seed": 0}], tmp_path / "runs.jsonl", executor=AtOnce())
    assert silent == [True, True]
    assert {each.label for each in seen} == {"sweep.run: jobs"}


_WORK = f"""
import sys, time, types
# The module alone: to import all of jaxcal takes another second.
package = types.ModuleType("jaxcal")
package.__path__ = [{os.path.dirname(jc.__file__)!r}]
sys.modules["jaxcal"] = package
from jaxcal import progress
for label, delay, wrong in ("a", 0.15, None), ("b", 60, None), ("c", 0, 3):
    progress._DELAY = delay
    with progress.work(label, 4) as steps:
        for _ in range(4):
            time.sleep(0.11)
            steps.advance()
            if steps.done == wrong:
                sys.exit("wrong")
"""


def test_a_bar_on_a_terminal_is_shown_after_a_while_and_cleared():
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    subprocess.run([sys.executable, "-c", _WORK], stdout=writer, stderr=writer, check=False)
    os.close(writer)
    shown = b""
    while chunk := _read(reader):
        shown += chunk
    os.close(reader)
    frames = [frame.split("|")[0].strip() for frame in shown.decode().split("\r")]
    # An empty frame clears the bar, after the error of the last work, too; the second one is too short for a bar.
    a, c = ["a 2 of 4", "a 3 of 4", "a 4 of 4"], ["c 0 of 4", "c 1 of 4", "c 2 of 4", "c 3 of 4"]
    assert list(dict.fromkeys(filter(None, frames))) == [*a, *c, "wrong"]
    assert frames[frames.index("c 0 of 4") - 2] == frames[frames.index("wrong") - 1] == ""
    assert "50 % [00:00, 00:00 left]" in shown.decode()


def _read(reader):
    try:
        return os.read(reader, 10_000)
    except OSError:  # of Linux, at the end
        return b""


def test_a_pipe_gets_nothing():
    run = subprocess.run([sys.executable, "-c", _WORK], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("", "wrong\n")
