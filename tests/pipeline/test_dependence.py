"""Warnings that rows of different folds tell of each other."""

import warnings

import jax
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.pipeline.dependence import correlation_of_neighbors, num_twins

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


def mean(x, y):
    return lambda x: 0 * x[:, 0]


def test_repeated_rows_are_counted_but_for_columns_of_few_values(rng):
    x, y = rng.normal(size=(100, 2)), rng.normal(size=100)
    again = np.arange(100) % 60
    assert num_twins(x, y) == 0
    assert num_twins(x[again], y[again]) == 80
    assert num_twins(x[again], y) == 0
    x[0, 1] = np.nan
    assert num_twins(np.vstack([x[:90], x[:10]]), np.append(y[:90], y[:10])) == 20
    few = rng.integers(0, 5, (80, 3)).astype(float)
    assert num_twins(few, rng.integers(0, 3, 80).astype(float)) == 0


def test_errors_of_neighbors_are_correlated_where_they_follow_each_other(rng):
    noise = rng.normal(size=500)
    assert correlation_of_neighbors(noise) == 0
    assert correlation_of_neighbors(np.zeros(500)) == 0
    steps = np.zeros(500)
    for k in range(1, 500):
        steps[k] = 0.7 * steps[k - 1] + noise[k]
    assert correlation_of_neighbors(steps) == pytest.approx(0.7, abs=0.1)
    assert correlation_of_neighbors(np.sign(steps) * 10 ** abs(steps)) == correlation_of_neighbors(steps)


def test_a_fit_warns_of_both_and_groups_end_it(rng):
    x = rng.normal(size=(200, 1))
    again = np.arange(200) // 2
    y = rng.normal(size=200)[again]
    neighbors = pytest.warns(UserWarning, match=r"errors of neighboring rows are correlated \(0\.")
    with pytest.warns(UserWarning, match="200 of 200 rows are repeated"), neighbors:
        jc.pipeline.fit(np.repeat(x[:100], 2, axis=0), y, predictor=mean, key=KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = jc.pipeline.Folds(groups=again)
        jc.pipeline.fit(np.repeat(x[:100], 2, axis=0), y, predictor=mean, method=method, key=KEY)
        jc.pipeline.fit(x, rng.normal(size=200), predictor=mean, key=KEY)
