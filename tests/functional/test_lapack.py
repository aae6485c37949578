"""The factor and the inverse of LAPACK, called without Python's lock: those of NumPy, and several at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxcal.functional import _lapack

pytestmark = pytest.mark.any_precision


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_they_are_those_of_numpy_in_several_threads(dtype):
    def one(seed):
        rows = np.random.default_rng(seed).normal(size=(60, 80))
        gram = (rows @ rows.T / 80).astype(dtype)
        matrix = np.asfortranarray(gram)
        assert _lapack.factorize(matrix)
        factor = np.tril(matrix)
        _lapack.invert(matrix)
        return gram, factor, np.tril(matrix)

    tolerance = 200 * np.finfo(dtype).eps
    with ThreadPoolExecutor(4) as pool:
        for gram, factor, inverse in pool.map(one, range(12)):
            np.testing.assert_allclose(factor @ factor.T, gram, atol=tolerance)
            expected = np.linalg.inv(gram.astype(float))
            np.testing.assert_allclose(inverse, np.tril(expected), atol=tolerance * np.abs(expected).max() * 10)


def test_what_is_not_positive_definite_has_none():
    assert not _lapack.factorize(np.asfortranarray([[1.0, 2.0], [2.0, 1.0]]))


def test_rows_in_the_order_of_c_are_refused():
    with pytest.raises(ValueError, match="stored by columns"):
        _lapack.factorize(np.ones((3, 3)))
