"""Gaussian processes that ask the nearest rows: against the dense process."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Normal, Point, gaussian_process, metrics, rio
from jaxcal.functional import gp
from jaxcal.gp import Exact
from jaxcal.gp import model as models
from jaxcal.gp.inference import nearest
from jaxcal.gp.inference.nearest import Nearest, NearestRows
from jaxcal.gp.kernels import SquaredExponential
from jaxcal.gp.model import Data, Model, SearchResult

pytestmark = [pytest.mark.contract_in_32_bits, pytest.mark.usefixtures("own_programs")]

X64 = jax.config.jax_enable_x64
N = 40


@pytest.fixture(scope="module")
def data():
    """Rows [40, 2] with noise of their own."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-2, 2, size=(N, 2))
    y = np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=N)
    return Data(jnp.asarray(x), jnp.asarray(y - y.mean()), relative_noise=jnp.asarray(rng.uniform(0.5, 2, N)))


@pytest.fixture(scope="module")
def model():
    return Model(SquaredExponential(jnp.log(0.7), jnp.log(0.8)), jnp.log(0.05))


def rows_of(n, d=2, noise=0.3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, d))
    return x, np.sin(3 * x[:, 0]) * np.cos(2 * x[:, -1]) + noise * rng.normal(size=n)


def test_all_rows_asked_give_the_dense_process(data, model):
    new = jnp.asarray(np.random.default_rng(1).normal(size=(7, 2)))
    dense = jax.jit(lambda: models.predict(model.kernel, models.posterior(model, data, 0.0), data.points, new))()
    # One row fewer than there are is asked: a row of no weight makes up for it.
    far = jnp.concatenate([data.points, jnp.full((1, 2), 1e3)])
    noises = jnp.append(models.row_noise(model, data), 1.0)
    given = NearestRows(jnp.append(data.targets, 0.0), noises, jnp.ones(()), 50)
    found = jax.jit(lambda: given.predict(model.kernel, far, new))()
    np.testing.assert_allclose(found, dense, atol=1e-9 if X64 else 2e-5)


def test_leave_one_out_is_that_of_the_dense_process(data, model):
    dense = jax.jit(lambda: gp.leave_one_out(models.posterior(model, data, 0.0)))()
    rows = jnp.asarray([5, 0, 31])
    of_nearest = lambda given: nearest.leave_one_out(model.kernel, given, data.points, rows)
    found = jax.jit(lambda: of_nearest(NearestRows.of(model, data, 0.0, 50)))()
    close = {"rtol": 1e-8 if X64 else 2e-3, "atol": 1e-9 if X64 else 2e-4}
    np.testing.assert_allclose(found.error, dense.error[rows], **close)
    np.testing.assert_allclose(found.variance, dense.variance[rows], **close)


def test_the_nearest_are_those_of_the_least_distance(data, model):
    found = jax.jit(lambda: Nearest(neighbors=4).neighbors_of(model, data, 0.0, jnp.arange(N)))()
    distances = np.linalg.norm(data.points[:, None] - data.points[None], axis=2)
    np.testing.assert_array_equal(np.sort(found), np.sort(np.argsort(distances)[:, 1:5]))


def test_the_scale_makes_leave_one_out_errors_as_large_as_predicted(data, model):
    narrow = eqx.tree_at(lambda m: (m.kernel.log_variance, m.log_noise), model, (jnp.log(0.007), jnp.log(0.0005)))
    known = Model(narrow.kernel, narrow.log_noise, fixed=("log_noise",))
    zero = jnp.int32(0)
    found = [
        SearchResult(model=m, evidence=jnp.zeros(()), steps=zero, result=zero, failed_initial_values=zero)
        for m in (narrow, known)
    ]
    given, as_known = (Nearest().conclude(each, data, jnp.zeros(())).posterior for each in found)
    others = jax.jit(lambda: nearest.leave_one_out(narrow.kernel, given, data.points, jnp.arange(N)))()
    np.testing.assert_allclose(jnp.mean(others.error**2 / others.variance), 1, rtol=1e-3)
    assert given.scale > 2
    assert as_known.scale == 1


@pytest.fixture(scope="module")
def fitted():
    """A process by the nearest rows, new rows and their targets."""
    x, y = rows_of(360)
    return gaussian_process.fit(x[:160], y[:160], inference=Nearest()), x[160:], y[160:]


@pytest.mark.slow
def test_claimed_coverage_is_what_new_rows_get(fitted):
    process, x, y = fitted
    distribution = process(x)
    assert metrics.rmse(y, distribution) < 0.36
    assert 0.84 < metrics.coverage(y, distribution, confidence_level=0.9) < 0.96
    np.testing.assert_allclose(process.noise_variance, 0.09, rtol=0.35)


def test_it_is_near_the_exact_process(fitted):
    process, x, _ = fitted
    x_train, y_train = (part[:160] for part in rows_of(360))
    exact = gaussian_process.fit(x_train, y_train, inference=Exact())(x)
    distribution = process(x)
    assert jnp.sqrt(jnp.mean((distribution.mean - exact.mean) ** 2)) < 0.5 * jnp.mean(exact.std)
    np.testing.assert_allclose(jnp.mean(distribution.std), jnp.mean(exact.std), rtol=0.15)


def test_the_noise_ratio_is_that_before_the_scale(fitted):
    process = fitted[0]
    ratio = jnp.exp(process.process.model.log_noise - process.kernel.log_variance)
    np.testing.assert_allclose(process.noise_ratio, ratio, rtol=1e-3)
    assert process.process.scale != 1


@pytest.mark.slow
def test_noise_follows_the_std_of_the_base():
    rng = np.random.default_rng(2)
    x, std = rng.uniform(-2, 2, size=(160, 1)), np.where(np.arange(160) % 2, 0.1, 1.0)
    y = np.sin(2 * x[:, 0]) + std * rng.normal(size=160)
    base = lambda part: Normal(np.zeros(len(std[part])), std[part])
    train, new = slice(110), slice(110, 160)
    distribution = rio.fit(x[train], base(train), y[train], kernel="input", inference=Nearest())(x[new], base(new))
    assert distribution.std[1::2].max() < 0.3 < distribution.std[::2].min()


def test_predictions_are_differentiable_in_x(fitted):
    process, x, _ = fitted
    slope = jax.grad(lambda x: process(x).mean.sum() + process(x).std.sum())(jnp.asarray(x[:3]))
    assert jnp.isfinite(slope).all()
    assert jnp.abs(slope).max() > 0.1


@pytest.mark.slow
def test_an_outlier_is_warned_of():
    x, y = rows_of(160)
    y[17] += 100
    with pytest.warns(UserWarning, match="row 17 lies"):
        gaussian_process.fit(x, y, inference=Nearest())


def test_the_rows_that_are_asked_are_as_many_as_the_user_says():
    x, y = rows_of(160)
    few, many = (gaussian_process.fit(x, y, inference=Nearest(neighbors=k)) for k in (5, 30))
    assert (few.process.posterior.neighbors, many.process.posterior.neighbors) == (5, 30)
    assert few.inference == "nearest"
    assert not np.allclose(few(x[:5] + 0.1).mean, many(x[:5] + 0.1).mean)


def test_the_preset_goes_without():
    """Its inducing points are those of another inference; unit hyperparameters and scales stay."""
    x, y = rows_of(160)
    fitted = rio.fit(x, Point(np.zeros(160)), y, preset="paper", inference=Nearest())
    assert fitted.inference == "nearest"
    assert fitted.target_scaler.scale == 1
