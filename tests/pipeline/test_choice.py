"""The choice among several pipelines: what is far behind after the first fold is fitted no more."""

import jax
import numpy as np
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 1))
    return x, x[:, 0] + 0.1 * rng.normal(size=100)


class Line:
    """Predicts a multiple of x, far off where x is `wrong`, and counts its fits."""

    def __init__(self, slope, *, wrong=0):
        self.slope, self.wrong, self.fits = slope, wrong, 0
        self.__name__ = f"line {slope}"

    def __call__(self, x, y):
        self.fits += 1
        return lambda x: self.slope * x[:, 0] + (100.0 * (x[:, 0] == self.wrong) if self.wrong else 0)


def choose(rows, *lines, **options):
    return jc.pipeline.fit(*rows, predictor=[(line, ()) for line in lines], key=KEY, **options)


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
    folds = jc.pipeline.Folds(folds=np.arange(100).reshape(10, 10))
    other = Line(1.01, wrong=float(rows[0][3, 0]))
    assert choose(rows, Line(1), other, method=folds).dropped == ()
    assert other.fits == 10


def test_a_fold_of_few_rows_drops_nothing(rows):
    x, y = rows
    assert choose((x[:60], y[:60]), Line(1), Line(-1)).dropped == ()


def test_with_rows_set_aside_the_choice_is_made_by_the_others(rows):
    x, y = (np.concatenate([each] * 2) for each in rows)
    good, bad = Line(1), Line(-1)
    fitted = choose((x, y), bad, good, method="split")
    assert bad.fits == 1
    assert fitted.method == "split"
    assert fitted.dropped[0].startswith("line -1")
