"""The choice among several pipelines: what is far behind after the first fold is fitted no more."""

from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    return x, x[:, 0] + 0.1 * rng.normal(size=200)


class Line:
    """Predicts a multiple of x, far off where x is `wrong`, and counts its fits."""

    def __init__(self, slope, *, wrong=0, asked=None):
        self.slope, self.wrong, self.fits, self.asked = slope, wrong, 0, asked
        self.__name__ = f"line {slope}"

    def __call__(self, x, y):
        self.fits += 1
        return self.predict_rows

    def predict_rows(self, x):
        if self.asked is not None:
            self.asked.append(np.asarray(x))
        return self.slope * x[:, 0] + (100.0 * (x[:, 0] == self.wrong) if self.wrong else 0)


def choose(rows, *lines, **options):
    best = jc.pipeline.Best([(line, ()) for line in lines])
    return jc.pipeline.fit(*rows, predictor=best, key=KEY, **options)


def test_one_that_is_far_behind_is_fitted_once(rows):
    good, bad = Line(1), Line(-1)
    fitted = choose(rows, bad, good)
    assert (good.fits, bad.fits) == (11, 1)
    assert fitted.steps[0].name == "line 1"
    assert fitted.others == ()
    (line,) = fitted.dropped
    assert line.startswith("line -1: CRPS ")
    assert f"dropped after the first fold:\n{line}" in str(fitted)


def test_one_that_is_a_little_behind_goes_on_and_only_the_best_is_fitted_to_all_rows(rows):
    good, other = Line(1), Line(1.02)
    fitted = choose(rows, good, other)
    assert (good.fits, other.fits) == (11, 10)
    assert len(fitted.others) == 1
    assert fitted.dropped == ()


def test_a_single_row_drops_nothing(rows):
    """In the first fold one is far behind by one row alone, which may be chance."""
    asked = []
    probe = Line(1, asked=asked)
    choose(rows, probe, Line(1))
    other = Line(1.01, wrong=float(asked[0][3, 0]))
    assert choose(rows, Line(1), other).dropped == ()
    assert other.fits == 10


@pytest.mark.parametrize(
    "method",
    [jc.pipeline.Folds(groups=np.arange(200) // 20), jc.pipeline.Folds(folds=np.arange(200).reshape(10, 20))],
    ids=["groups", "given"],
)
def test_a_fold_of_rows_that_may_be_alike_drops_nothing(rows, method):
    assert choose(rows, Line(1), Line(-1), method=method).dropped == ()


def test_a_fold_of_few_rows_drops_nothing_and_need_not_suffice_for_the_last_step(rows):
    x, y = rows
    fitted = choose((x[:20], y[:20]), Line(1), Line(-1), recalibrate=jc.gaussian_mle.fit)
    assert fitted.dropped == ()
    assert fitted.steps[0].name == "line 1"


def test_where_a_fold_does_not_suffice_for_the_last_step_nothing_is_dropped(rows):
    several = partial(jc.kmeans.fit, num_clusters=25)
    assert choose(rows, Line(1), Line(-1), recalibrate=several).dropped == ()


def test_with_rows_set_aside_the_choice_is_made_by_the_others(rows):
    x, y = (np.concatenate([each] * 2) for each in rows)
    good, bad = Line(1), Line(-1)
    fitted = choose((x, y + 1e-6 * np.arange(len(y))), bad, good, method="split")
    assert bad.fits == 1
    assert fitted.method == "split"
    assert fitted.dropped[0].startswith("line -1")
