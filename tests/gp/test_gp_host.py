"""The evidence on the host and in JAX: one formula in two forms, to 1e-9 in 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal.calibrators.rio import IOKernel, Points
from jaxcal.gp import bound_host, exact, host
from jaxcal.gp import model as models
from jaxcal.gp import rows as known
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model, StudentTLikelihood, as_vector

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
    evidence = host.Evidence(known.ProcessData(parts, widths, y, variance), np.asarray(jitter))
    for name, odd in ODD.items():
        vector = vector_of(odd)
        one, other = evidence(vector), in_jax(vector)
        size = max(1.0, np.abs(one.information).max())
        np.testing.assert_allclose(one.value, other.value, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(one.gradient, other.gradient, rtol=1e-9, atol=1e-9 * size, err_msg=name)
        np.testing.assert_allclose(one.information, other.information, rtol=1e-9, atol=1e-9 * size, err_msg=name)
        assert one.makes_sense == other.makes_sense


@pytest.mark.parametrize("student", [False, True], ids=["", "student t"])
@pytest.mark.parametrize("points", [None, "stay", "move"])
@pytest.mark.parametrize("learns", [True, False], ids=["", "noise known"])
def test_the_gradient_by_all_that_is_learned_is_the_automatic_one(rows, learns, points, student):
    """Of the evidence, and of its sparse and Student t bounds, with noise of the rows that differs."""
    x, mean, y, variance = rows
    relative = 0.3 + variance[::-1]
    data = Data(Points(x, mean), y, variance, relative)
    kernel = IOKernel(
        SquaredExponential(np.asarray(0.3), np.array([0.1, -0.4, 9.0])),
        SquaredExponential(np.asarray(-0.2), np.asarray(0.2)),
    )
    noise = StudentTLikelihood.of(np.asarray(5.0), variance**2) if student else None
    inducing = None if points is None else Points(x[:7] + 0.1, mean[:7])
    fixed = () if learns else ("log_noise",)
    model = Model(kernel, np.asarray(-1.5), np.asarray(0.4), noise, inducing, fixed=fixed)
    jitter, moves = np.asarray(1e-6), points == "move"
    vector = as_vector(model, with_inducing=moves)[0]
    in_jax, of_jax = jax.tree.map(jnp.asarray, (model, data))
    model_of, cost = as_vector(in_jax, with_inducing=moves)[1], models.cost_beyond_bounds(in_jax, of_jax)

    @jax.jit
    @jax.value_and_grad
    def loss(vector):
        model = model_of(vector)
        return cost(model) - models.evidence(model, of_jax, jitter)

    value, gradient = bound_host.loss_of(model, data, jitter, with_inducing=moves)(vector)
    expected = loss(jnp.asarray(vector))
    np.testing.assert_allclose(value, expected[0], rtol=1e-9)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-7, atol=1e-7 * np.abs(expected[1]).max())
    # The whole evidence and posterior, written once for both libraries.
    np.testing.assert_allclose(models.evidence(model, data, jitter), models.evidence(in_jax, of_jax, jitter), rtol=1e-9)
    for one, other in zip(
        jax.tree.leaves(models.posterior(model, data, jitter)),
        jax.tree.leaves(models.posterior(in_jax, of_jax, jitter)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-7)


def test_a_far_outlier_among_the_inducing_points_hides_no_covariance(rows):
    """Rounding of the largest rows must not decide: both forms of the bound are the same."""
    x, _, y, _ = rows
    x = np.where(np.arange(N)[:, None] == 0, 1e8, x)
    kernel = SquaredExponential(np.asarray(0.3), np.array([0.1, -0.4, 0.2]))
    model, data = Model(kernel, np.asarray(-1.5), inducing=x[:7]), Data(x, y)
    vector, jitter = as_vector(model)[0], np.asarray(1e-6)
    value = bound_host.loss_of(model, data, jitter, with_inducing=False)(vector)[0]
    beyond = models.penalty(vector, *models.bounds(model, data), N)[0]
    np.testing.assert_allclose(beyond - value, models.evidence(model, data, jitter), rtol=1e-9)
