"""Random numbers by NumPy are those of `jax.random`, to the bit."""

import jax
import numpy as np
import pytest

from jaxcal import _random

KEYS = {
    "threefry": jax.random.key(3),
    "words": jax.random.PRNGKey(3),
    "another generator": jax.random.key(3, impl="rbg"),
}
DTYPES = [np.float32, *([np.float64] if jax.config.read("jax_enable_x64") else [])]


@pytest.fixture(params=list(KEYS))
def key(request):
    return KEYS[request.param]


# From 1,626 numbers on JAX sorts twice.
@pytest.mark.parametrize("number", [1, 2, 1625, 1626])
def test_permutations_are_those_of_jax(key, number):
    np.testing.assert_array_equal(_random.permutation(key, number), jax.random.permutation(key, number))


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_numbers_are_those_of_jax(key, dtype):
    found = _random.uniform(key, 100, dtype, -2.0, 1.0)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, jax.random.uniform(key, (100,), dtype, -2.0, 1.0))


def test_keys_are_those_of_jax(key):
    for found, expected in zip(_random.split(key, 3), jax.random.split(key, 3), strict=True):
        assert found.dtype == expected.dtype
        assert (found == expected).all()


def test_keys_of_another_generator_than_the_default_are_split():
    key = jax.random.key(0)
    with jax.default_prng_impl("rbg"):
        assert (_random.split(key)[1] == jax.random.split(key)[1]).all()


def test_traced_keys_go_to_jax(key):
    found = jax.jit(lambda key: _random.uniform(_random.split(key)[1], 5, np.float32))(key)
    np.testing.assert_array_equal(found, _random.uniform(_random.split(key)[1], 5, np.float32))
