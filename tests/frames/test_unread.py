"""Means and standard deviations of rows that are read in chunks: those of all rows at once, to the last digits."""

import numpy as np
import pytest

from jaxcal.frames import unread


def test_moments_are_those_of_all_rows(rng, monkeypatch):
    """Far from the origin, in chunks of unequal size; a constant column is exactly constant."""
    monkeypatch.setattr(unread, "CHUNK_ROWS", 30)
    columns = np.column_stack([1e8 + rng.normal(size=101), np.full(101, 0.1), rng.exponential(size=101)])
    mean, std = unread.column_moments(lambda rows: columns[rows], 101)
    np.testing.assert_allclose(mean, columns.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(std[[0, 2]], columns[:, [0, 2]].std(axis=0, ddof=1), rtol=1e-7)
    assert (mean[1], std[1]) == (0.1, 0)


def test_moments_of_a_vector_and_of_float32(rng):
    values = (1000 + rng.normal(size=50)).astype(np.float32)
    mean, std = unread.column_moments(lambda rows: values[rows], 50)
    np.testing.assert_allclose(mean, values.astype(float).mean(), rtol=1e-14)
    np.testing.assert_allclose(std, values.astype(float).std(ddof=1), rtol=1e-12)


def test_moments_name_the_row_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(unread, "CHUNK_ROWS", 4)
    columns = np.ones((11, 2))
    columns[6, 1] = np.inf
    with pytest.raises(ValueError, match="row 6 holds a value that is NaN or infinite"):
        unread.column_moments(lambda rows: columns[rows], 11)
    with pytest.raises(ValueError, match="n must be at least 2; got 1"):
        unread.column_moments(lambda rows: columns[rows], 1)
