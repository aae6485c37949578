"""Networks that NumPy predicts: the same as by a program, without one."""

import equinox as eqx
import jax
import numpy as np
import pytest
from cases import SMALL
from compiled import compilations

from jaxcal import deep_ensemble, mlp, variance_network
from jaxcal.networks import FeedForward
from jaxcal.networks.held_out import Widening

KEY = jax.random.key(0)
TOLERANCE = 1e-12 if jax.config.read("jax_enable_x64") else 1e-4
FITS = {
    "mlp": (mlp.fit, {}),
    "joint": (variance_network.fit, {}),
    "alternating": (variance_network.fit, {"form": "alternating", "preset": "usnrt"}),
    "ensemble": (deep_ensemble.fit, {"num_members": 2}),
}


def rows(number):
    x = np.random.default_rng(number).normal(size=(number, 3))
    return x, x[:, 0] + 0.3 * np.cos(7 * x[:, 1])


@pytest.mark.parametrize("name", FITS)
def test_a_prediction_is_that_of_a_program_and_compiles_none(name):
    fit, options = FITS[name]
    fitted, read = fit(*rows(40), **SMALL, **options), lambda found: (found.mean, found.std)
    read(fitted(rows(10)[0]))
    for number in (1, 7):
        x = rows(number)[0]
        with compilations() as compiled:
            found = fitted(x)
        assert compiled == []
        for one, other in zip(read(found), eqx.filter_jit(lambda x: read(fitted(x)))(x), strict=True):
            np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_activation_that_numpy_lacks_is_left_to_a_program():
    network = FeedForward(3, (4,), 1, key=KEY, activation=(jax.nn.silu,))
    assert not network.in_numpy
    x = jax.numpy.asarray(rows(5)[0])
    np.testing.assert_allclose(network.of_rows(x), jax.vmap(network)(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_widening_is_that_of_a_program(weighted):
    rng = np.random.default_rng(0)
    variance = jax.numpy.asarray(rng.gamma(2.0, size=50))
    errors, weights = variance * rng.standard_t(3, size=50), (variance > 1) * 1.0 if weighted else None
    of = lambda *rows: Widening.of(*rows, weights=weights)
    found, expected = of(variance, errors), eqx.filter_jit(of)(variance, errors)
    for name in ("factor", "floor", "least"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=100 * TOLERANCE)
    narrow = of(variance.astype(np.float32), errors.astype(np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {np.dtype(np.float32)}


def test_members_and_a_network_of_the_same_shape_share_their_program():
    x, y = rows(44)
    with compilations() as compiled:
        deep_ensemble.fit(x, y, **SMALL, num_members=3)
    assert compiled.count("_go_on") <= 1
    with compilations() as compiled:
        variance_network.fit(x, y, **SMALL)
    assert "_go_on" not in compiled
