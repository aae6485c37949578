"""A pipeline with a time limit: what does not end in time is omitted and named, and the rest can be repeated."""

import pickle
import time
from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.pipeline.side_by_side import OutOfTime, in_threads, one_by_one

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    return x, x[:, 0] + 0.1 * rng.normal(size=200)


def line(slope, seconds=0.0):
    """A predictor that takes its time."""

    def predict(x, y):
        time.sleep(seconds)
        return lambda x: slope * x[:, 0]

    predict.__name__ = f"line {slope}"
    return predict


def choose(rows, *predictors, **options):
    pairs = [each if isinstance(each, tuple) else (each, ()) for each in predictors]
    return jc.pipeline.fit(*rows, predictor=jc.pipeline.Best(pairs), key=KEY, **options)


def test_with_time_nothing_is_omitted(rows):
    fitted = choose(rows, line(1.01), line(1), time_limit=600.0)
    assert fitted.omitted == ()
    assert [step.name for step in fitted.steps] == ["line 1", "learned errors"]
    assert len(fitted.others) == 1


def test_what_is_slow_is_omitted_and_named(rows):
    fitted = choose(rows, line(1.01), line(1, seconds=1.0), time_limit=4.0)
    assert fitted.steps[0].name == "line 1.01"
    assert fitted.omitted == ("line 1",)
    assert fitted.others == ()
    assert "omitted, for want of time:\nline 1" in str(fitted)
    assert [predictor.__name__ for predictor, _ in fitted.recipe] == ["line 1.01"]


def test_a_slow_first_one_does_not_keep_the_others_out(rows):
    """Its score is the best, but its folds would not end in time."""
    fitted = choose(rows, line(1, seconds=1.0), line(1.01), time_limit=4.0)
    assert fitted.steps[0].name == "line 1.01"
    assert fitted.omitted == ("line 1",)


def test_a_slow_one_does_not_keep_others_out_where_the_first_fold_tells_nothing(rows):
    folds = jc.pipeline.Folds(groups=np.arange(200) // 20)
    fitted = choose(rows, line(1, seconds=1.0), line(1.01), time_limit=5.0, method=folds)
    assert fitted.steps[0].name == "line 1.01"


def test_also_where_the_first_fold_tells_nothing(rows):
    folds = jc.pipeline.Folds(groups=np.arange(200) // 20)
    fitted = choose(rows, line(1.01), line(1, seconds=1.0), time_limit=4.0, method=folds)
    assert fitted.steps[0].name == "line 1.01"
    assert fitted.omitted == ("line 1",)


@pytest.mark.parametrize("method", ["folds", "cv+"])
def test_where_nothing_ends_in_time_an_error_says_so(rows, method):
    with pytest.raises(TimeoutError, match=r"time_limit of 0.1 s"):
        jc.pipeline.fit(*rows, predictor=line(1, seconds=0.2), key=KEY, method=method, time_limit=0.1)


def test_a_limit_is_positive(rows):
    with pytest.raises(ValueError, match="time_limit"):
        choose(rows, line(1), time_limit=0.0)


@pytest.mark.parametrize(("method", "number"), [("folds", 2), ("split", 4)])
def test_a_recipe_repeats_the_fit(rows, method, number):
    """A fold of what is not set aside has too few rows to drop one."""
    forests = (partial(jc.forests.fit, num_trees=5, preset="usnrt"), (jc.gaussian_mle.fit,))
    first = choose(rows, line(-1), line(1.01), (jc.gaussian_process.fit, ()), forests, time_limit=600.0, method=method)
    assert len(first.recipe) == number
    again = jc.pipeline.fit(*rows, predictor=first.recipe, key=KEY, method=method)
    x, _ = rows
    for one, other in zip(jax.tree.leaves(first(x)), jax.tree.leaves(again(x)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert again.recipe.pairs == first.recipe.pairs
    assert again.dropped == ()


def test_the_recipe_of_one_predictor_repeats_the_fit(rows):
    first = jc.pipeline.fit(*rows, predictor=line(1), calibrators=[jc.rio.fit], key=KEY)
    again = jc.pipeline.fit(*rows, predictor=first.recipe, key=KEY)
    assert str(again) == str(first)
    np.testing.assert_array_equal(again(rows[0]).mean, first(rows[0]).mean)


def test_a_recipe_has_no_say_in_what_is_compiled_and_a_pickle_may_be_without_it(rows):
    one, other = (jc.pipeline.fit(*rows, predictor=line(1), key=KEY) for _ in range(2))
    assert one.recipe == other.recipe
    assert hash(one.recipe) == hash(other.recipe)
    own = lambda x, y: jc.gaussian_process.fit(x, y)
    fitted = jc.pipeline.fit(*rows, predictor=own, key=KEY)
    again = pickle.loads(pickle.dumps(fitted))
    assert again.recipe is None
    np.testing.assert_array_equal(again(rows[0]).mean, fitted(rows[0]).mean)


def test_the_recipe_of_a_fitted_model_repeats_the_fit(rows):
    model = lambda x: x[:, 0]
    first = jc.pipeline.fit(*rows, predictor=model, method="prefit", key=KEY)
    again = jc.pipeline.fit(*rows, predictor=first.recipe, method="prefit", key=KEY)
    assert str(again) == str(first)


def test_fast_folds_end_at_the_deadline_too():
    with pytest.raises(OutOfTime):
        in_threads(lambda _: time.sleep(0.1), range(100), lambda: None, time.monotonic() + 0.5)


def test_a_training_in_a_thread_can_be_stopped(rows):
    began = time.monotonic()
    endless = partial(jc.mlp.fit, max_epochs=10**7, patience=10**7)
    with pytest.raises(TimeoutError):
        jc.pipeline.fit(*rows, predictor=endless, key=KEY, time_limit=2.0)
    assert time.monotonic() - began < 60


def test_a_recipe_of_jaxcal_comes_back_from_a_file_and_no_other(rows, tmp_path):
    for predictor, is_kept in ((jc.gaussian_process.fit, True), (lambda x, y: jc.gaussian_process.fit(x, y), False)):
        fitted = jc.pipeline.fit(*rows, predictor=predictor, key=KEY)
        jc.save(tmp_path / "model", fitted)
        loaded = jc.load(tmp_path / "model")
        assert (loaded.recipe is not None) == is_kept
        assert not is_kept or loaded.recipe.pairs == fitted.recipe.pairs
        np.testing.assert_array_equal(loaded(rows[0]).mean, fitted(rows[0]).mean)


@pytest.mark.parametrize("call_all", [in_threads, one_by_one])
def test_after_the_deadline_nothing_begins(call_all):
    called = []
    work = lambda number: (called.append(number), time.sleep(0.3))
    with pytest.raises(OutOfTime):
        call_all(work, range(100), lambda: None, time.monotonic() + 0.5)
    assert 0 < len(called) < 20


def test_with_time_there_are_ten_folds_in_place_of_five(rng):
    fits = []

    def counted(x, y):
        fits.append(len(y))
        return lambda x: x[:, 0]

    x = rng.normal(size=(600, 1))
    y = x[:, 0] + 0.1 * rng.normal(size=600)
    for limit, method, sizes in (
        (None, "folds", [480] * 5 + [600]),
        (600.0, "folds", [540] * 10 + [600]),
        (600.0, jc.pipeline.Folds(folds=2), [300] * 2 + [600]),
        (600.0, "split", [450] * 11),
    ):
        fits.clear()
        fitted = jc.pipeline.fit(x, y, predictor=counted, method=method, time_limit=limit, key=KEY)
        assert sorted(fits) == sizes if method != "split" else (len(fits), max(fits)) == (11, 450)
        assert len(fitted.steps[-1].y) == (150 if method == "split" else 600)
        fits.clear()
        again = jc.pipeline.fit(x, y, predictor=fitted.recipe, method=method, key=KEY)
        assert sorted(fits) == sizes if method != "split" else len(fits) == 11
        np.testing.assert_array_equal(again(x).std, fitted(x).std)


def test_where_ten_folds_take_too_long_there_are_five(rng):
    fits = []

    def slow(x, y):
        fits.append(len(y))
        time.sleep(0.4)
        return lambda x: x[:, 0]

    x = rng.normal(size=(510, 1))
    y = x[:, 0] + 0.1 * rng.normal(size=510)
    fitted = jc.pipeline.fit(x, y, predictor=slow, time_limit=4.0, key=KEY)
    assert fits == [459, *[408] * 5, 510]
    assert len(fitted.out_of_fold) == 510
