"""The evidence on the host and in JAX: one formula in two forms, to 1e-9 in 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal.calibrators.rio import IOKernel, Points
from jaxcal.gp import exact, host
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model, as_vector

pytestmark = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="the host computes in 64 bits")

N = 40
# Log variance, log lengthscales and log noise of one kernel: usual, short, long, nearly without noise, beyond bounds.
ODD = {
    "usual": (0.3, (0.1, -0.4, 0.7), -1.5),
    "short": (1.0, (-5.0, -4.0, -3.0), -3.0),
    "long": (-2.0, (5.0, 0.0, 9.0), 0.5),
    "little noise": (2.0, (0.0, 0.3, 0.5), -9.0),
    "beyond the bounds": (12.0, (-6.0, 10.0, 1.0), 4.0),
}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x, mean = rng.normal(size=(N, 3)), rng.normal(size=(N, 1))
    y = np.sin(2 * x[:, 0]) + mean[:, 0] ** 2 + 0.3 * rng.normal(size=N)
    return x, mean, (y - y.mean()) / y.std(), rng.gamma(2.0, size=N) / 2


@pytest.mark.parametrize("base", [False, True], ids=["", "base"])
@pytest.mark.parametrize("by_column", [False, True], ids=["isotropic", "by column"])
@pytest.mark.parametrize("number", [1, 2])
def test_both_forms_of_the_evidence_are_the_same(rows, number, by_column, base):
    x, mean, y, variance = rows
    variance = variance if base else None
    parts = (x, mean)[:number]
    points = Points(jnp.asarray(x), jnp.asarray(mean)) if number == 2 else jnp.asarray(x)
    data = Data(points, jnp.asarray(y), None if variance is None else jnp.asarray(variance))
    jitter, widths = 1e-6, (3 if by_column else 1, 1)[:number]

    def model(log_variance, log_lengthscales, log_noise):
        scales = jnp.asarray(log_lengthscales) if by_column else jnp.asarray(log_lengthscales[0])
        kernel = SquaredExponential(jnp.asarray(log_variance), scales)
        if number == 2:
            kernel = IOKernel(kernel, SquaredExponential(jnp.asarray(log_variance / 2), jnp.asarray(0.2)))
        return Model(kernel, jnp.asarray(log_noise), jnp.asarray(0.4) if base else None)

    vector_of = lambda odd: np.asarray(as_vector(model(*odd))[0])
    in_jax = jax.jit(exact.exact_objective(as_vector(model(*ODD["usual"]))[1], data, jitter))
    evidence = host.Evidence(host.Rows(parts, widths, y, variance), np.asarray(jitter))
    for name, odd in ODD.items():
        vector = vector_of(odd)
        one, other = evidence(vector), in_jax(vector)
        size = max(1.0, np.abs(one.information).max())
        np.testing.assert_allclose(one.value, other.value, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(one.gradient, other.gradient, rtol=1e-9, atol=1e-9 * size, err_msg=name)
        np.testing.assert_allclose(one.information, other.information, rtol=1e-9, atol=1e-9 * size, err_msg=name)
        assert one.makes_sense == other.makes_sense
