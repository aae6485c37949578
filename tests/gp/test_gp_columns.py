"""Lengthscales by column where rows are few: they must pay, or there is one, so that intervals cover."""

import numpy as np
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision


@pytest.mark.parametrize(("columns", "number"), [(3, 3), (12, 1), (40, 1)], ids=["many rows", "few", "fewer"])
def test_with_few_rows_for_each_column_lengthscales_must_pay(columns, number):
    """Linear in all columns alike: lengthscales by column could fit noise alone."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, columns))
    y = x.mean(axis=1) * np.sqrt(columns) + 0.3 * rng.normal(size=100)
    lengthscales = jc.gaussian_process.fit(x, y).kernel.log_lengthscale
    assert np.unique(lengthscales).size == number


def test_with_few_rows_for_each_column_intervals_cover():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(2, 150, 50))
    target = lambda x: x[:, :3].sum(axis=1) + 0.3 * rng.normal(size=len(x))
    lower, upper = jc.gaussian_process.fit(x, target(x))(new).interval(0.9)
    truth = target(new)
    assert np.mean((lower <= truth) & (truth <= upper)) > 0.8
