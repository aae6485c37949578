"""Fits that begin at the hyperparameters of another one: fewer steps, to the optimum that is nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (90, 3))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + 0.2 * rng.normal(size=90)


@pytest.fixture(scope="module")
def first(rows):
    x, y = rows
    return jc.gaussian_process.fit(x[:80], y[:80])


def test_at_its_own_optimum_it_stays(rows, first):
    x, y = rows
    again = jc.gaussian_process.fit(x[:80], y[:80], start=first)
    assert again.iterations <= 3 < first.iterations
    assert abs(float(again.evidence - first.evidence)) < 0.02
    np.testing.assert_allclose(again(x).mean, first(x).mean, atol=0.02)


def test_of_other_rows_it_ends_where_all_initial_values_lead(rows, first):
    x, y = rows
    found = jc.gaussian_process.fit(x[10:], y[10:])
    again = jc.gaussian_process.fit(x[10:], y[10:], start=first)
    assert again.iterations < found.iterations
    assert float(again.evidence) > float(found.evidence) - 0.02
    np.testing.assert_allclose(again.lengthscale[:2], found.lengthscale[:2], rtol=0.1)


def test_lengthscales_stay_as_many(rows):
    x, y = rows
    one = jc.gaussian_process.fit(x[:80], y[:80], inference=jc.gp.Exact(ard=False))
    again = jc.gaussian_process.fit(x[10:], y[10:], start=one)
    assert np.ptp(np.asarray(again.lengthscale / again.x_scaler.scale)) < 1e-6


def test_the_inference_stays_where_none_is_named(rows, first):
    x, y = rows
    near = jc.gaussian_process.fit(x[:80], y[:80], inference=jc.gp.Nearest(neighbors=20))
    assert jc.gaussian_process.fit(x[10:], y[10:], start=near, inference=jc.gp.Exact()).inference == "exact"
    again = jc.gaussian_process.fit(x[10:], y[10:], start=near, inference=jc.gp.Nearest(neighbors=20))
    assert again.inference == "nearest"
    assert again(x).crps(y).mean() < 1.1 * near(x).crps(y).mean()


def test_a_known_noise_stays(rows, first):
    x, y = rows
    again = jc.gaussian_process.fit(x[10:], y[10:], start=first, noise=jc.gp.GaussianNoise(variance=0.25))
    np.testing.assert_allclose(again.noise_variance, 0.25, rtol=1e-3)


@pytest.mark.parametrize("noise", [jc.gp.StudentTNoise(), jc.gp.InputNoise()], ids=["student_t", "input"])
def test_any_noise(rows, noise):
    x, y = rows
    before = jc.gaussian_process.fit(x[:80], y[:80], noise=noise)
    again = jc.gaussian_process.fit(x[10:], y[10:], noise=noise, start=before)
    whole = jc.gaussian_process.fit(x[10:], y[10:], noise=noise)
    np.testing.assert_allclose(again(x).mean, whole(x).mean, atol=0.15)
    np.testing.assert_allclose(again(x).std, whole(x).std, rtol=0.3)


def test_each_output_begins_at_its_own(rows):
    x, y = rows
    y = np.stack([y, x[:, 2] ** 2 + 0.3 * np.random.default_rng(1).normal(size=90)], axis=1)
    base = jc.Point(np.sin(x[:, :2]))
    before = jc.rio.fit(x[:80], jc.Point(base.mean[:80]), y[:80], kernel="input")
    again = jc.rio.fit(x[:80], jc.Point(base.mean[:80]), y[:80], kernel="input", start=before)
    assert int(again.iterations.max()) <= 3
    np.testing.assert_allclose(again.evidence, before.evidence, atol=0.05)


def test_a_kernel_of_gpjax(rows):
    from gpjax.kernels import Matern32

    x, y = rows
    before = jc.gaussian_process.fit(x[:80], y[:80], kernel=Matern32())
    again = jc.gaussian_process.fit(x[:80], y[:80], kernel=Matern32(), start=before)
    assert again.iterations <= 3
    assert abs(float(again.evidence - before.evidence)) < 0.05


def test_it_must_fit(rows, first):
    x, y = rows
    with pytest.raises(ValueError, match="rows of the same columns, with the same kernel"):
        jc.gaussian_process.fit(x[:, :2], y, start=first)
    with pytest.raises(ValueError, match="no transformation traces"):
        jax.jit(lambda y: jc.gaussian_process.fit(jnp.asarray(x), y, start=first)(x).mean)(jnp.asarray(y))


def test_rows_of_one_column_have_one_lengthscale_however_it_is_asked(rows):
    x, y = rows
    one = jc.gaussian_process.fit(x[:, :1], y)
    assert jc.gaussian_process.fit(x[:, :1], y, start=one).iterations <= 3


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
