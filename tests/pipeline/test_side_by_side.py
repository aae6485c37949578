"""Folds in threads: the same values in the same order, and an end to all of them where one ends."""

import threading
import time
import warnings
from functools import partial

import jax
import numpy as np
import pytest
from sklearn.ensemble import BaggingRegressor, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

import jaxcal as jc
from jaxcal.gp import fit as of_process
from jaxcal.pipeline import out_of_fold, side_by_side
from jaxcal.pipeline.side_by_side import in_threads, one_by_one, share_nothing
from jaxcal.sklearn import CalibratedRegressor

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)
NOTHING = lambda: None


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(side_by_side, "cores", lambda: 2)


def test_values_come_in_order_and_every_end_is_told():
    ended, seen = [], set()

    def square(number):
        seen.add(threading.current_thread())
        time.sleep(0.01)
        return number**2

    assert in_threads(square, range(8), lambda: ended.append(1)) == [number**2 for number in range(8)]
    assert len(ended) == 8
    assert len(seen) == 2


def test_an_error_ends_all_of_them():
    called = []

    def fail(number):
        called.append(number)
        if number == 1:
            raise ValueError("the second")
        time.sleep(0.1)

    with pytest.raises(ValueError, match="the second"):
        in_threads(fail, range(100), NOTHING)
    assert len(called) < 100


def test_an_end_from_outside_ends_threads_at_work():
    def stop():
        raise KeyboardInterrupt

    begun = time.monotonic()

    def work(number):
        while number and time.monotonic() < begun + 60:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(4), stop)
    assert time.monotonic() < begun + 30


def test_where_the_caller_has_settings_of_its_own_no_thread_is_asked():
    """JAX keeps them for every thread."""
    asked = lambda _: (threading.current_thread(), jax.config.jax_enable_x64)
    other = not jax.config.jax_enable_x64
    with jax.enable_x64(other):
        assert in_threads(asked, range(3), NOTHING) == [(threading.current_thread(), other)] * 3


@pytest.mark.parametrize(
    ("step", "known"),
    [
        (jc.mlp.fit, True),
        (partial(jc.rio.fit, kernel="output"), True),
        (LinearRegression(), True),
        (HistGradientBoostingRegressor(random_state=0), True),
        (jc.pipeline.steps.OfNumbers(HistGradientBoostingRegressor(random_state=0)), True),
        (HistGradientBoostingRegressor(), False),
        (BaggingRegressor(HistGradientBoostingRegressor(random_state=0), random_state=0), True),
        (BaggingRegressor(LinearRegression()), False),
        (lambda x, y: x, False),
        (NOTHING, False),
        (partial(jc.pipeline.fit, predictor=NOTHING), False),
        (partial(jc.conformal.fit, by=NOTHING), False),
        (partial(jc.mlp.fit, activation=jax.nn.tanh), True),
        (CalibratedRegressor(LinearRegression()), False),
    ],
)
def test_only_steps_that_are_known_share_nothing(step, known):
    assert share_nothing([jc.conformal.fit, step]) == known


def test_a_pipeline_is_the_same_in_threads_and_one_by_one(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    y = np.sin(x[:, 0]) + rng.uniform(-0.5, 0.5, size=120)
    boosted = jc.pipeline.steps.OfNumbers(HistGradientBoostingRegressor(max_iter=5, random_state=0))
    fit = partial(jc.pipeline.fit, x, y, predictor=boosted, calibrators=[jc.rio.fit], method="folds", key=KEY)
    threads = fit()
    monkeypatch.setattr(out_of_fold, "in_threads", one_by_one)
    alone = fit()
    for one, other in zip(jax.tree.leaves(threads(x)), jax.tree.leaves(alone(x)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert str(threads) == str(alone)


def test_warnings_of_threads_are_one():
    def warn(number):
        warnings.warn(f"row {number} is far", stacklevel=1)

    said = pytest.warns(UserWarning, match=r"a fold: row 0 is far There were 3 more.")
    with said as caught, out_of_fold.one_warning("a fold", in_threads=True):
        in_threads(warn, range(4), NOTHING)
    assert len(caught) == 1


def test_folds_of_many_rows_share_the_choice_of_an_inference(monkeypatch):
    """Of more than 2000 rows two inferences are compared: not for each fold, nor for all rows."""
    asked = []
    chosen = of_process.chosen

    def told(n, *arguments, **options):
        asked.append(n)
        return chosen(10 * n, *arguments, **options)[-1:]  # the nearest rows

    monkeypatch.setattr(of_process, "chosen", told)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (260, 1))
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=260)
    fitted = jc.pipeline.fit(x, y, predictor=jc.gaussian_process.fit, key=KEY)
    assert asked == [234]  # for the first fold
    assert fitted.chain.chains[0].predictor.inference == "nearest"
    assert abs(fitted.steps[0].coverage(0.9).coverage - 0.9) < 0.06
