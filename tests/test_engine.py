"""One fit in two worlds: on the host, and inside of a caller's transformation, with the same answers."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from gpjax.kernels import Matern32
from threadpoolctl import threadpool_info

from jaxcal import Normal, Point, _numpy, _programs, gaussian_process, metrics, rio
from jaxcal.gp import Exact, GaussianNoise, InputNoise, Nearest, Sparse, StudentTNoise

X64 = jax.config.read("jax_enable_x64")
# The evidence of both worlds in nats, and predictions of a target of variance one.
NATS, CLOSE = (0.01, 1e-3) if X64 else (0.5, 5e-2)
N, NEW = 40, 5


def rows(of=np):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, 2))
    y = np.sin(2 * x[:, 0]) + 0.5 * np.cos(x[:, 1]) + 0.2 * rng.normal(size=N)
    return of.asarray(x), of.asarray(y)


def by_process(x, y, new):
    fitted = gaussian_process.fit(x, y)
    return fitted.evidence, fitted(new).mean


def by_rio(x, y, new):
    model = lambda x: Point(0.8 * (np if isinstance(x, np.ndarray) else jnp).sin(2 * x[:, 0]))
    fitted = rio.fit(x, model(x), y)
    return fitted.evidence, fitted(new, model(new)).mean


def matern():
    """A kernel that only JAX knows."""
    with _programs.at_top():  # also inside of a program, where its parameters would be traced
        return Matern32(active_dims=[0, 1], lengthscale=jnp.ones(2))


def by_gpjax(x, y, new):
    fitted = gaussian_process.fit(x, y, kernel=matern())
    return fitted.evidence, fitted(new).mean


PREDICTIONS = [by_process, by_rio, by_gpjax]


# A fit to data that a function closes over


@pytest.mark.parametrize("of", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("predict", PREDICTIONS)
def test_known_data_are_fitted_inside_of_a_program(predict, of):
    x, y = rows(of)
    evidence, mean = predict(x, y, x[:NEW])
    inside = jax.jit(lambda new: predict(x, y, new))(x[:NEW])
    np.testing.assert_allclose(inside[0], evidence, atol=NATS)
    np.testing.assert_allclose(inside[1], mean, atol=CLOSE)


@pytest.mark.parametrize("of", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("fit", ["process", "rio", "gpjax"])
def test_known_data_are_fitted_by_the_host_also_inside_of_a_program(fit, of):
    x, y = rows(of)
    base, kernel = Point(0.8 * of.sin(2 * x[:, 0])), matern()
    evidence = {
        "process": lambda: gaussian_process.fit(x, y).evidence,
        "rio": lambda: rio.fit(x, base, y).evidence,
        "gpjax": lambda: gaussian_process.fit(x, y, kernel=kernel).evidence,
    }[fit]
    alone = evidence()
    one, scaled = jnp.ones(2), lambda one: one * evidence()
    with compilations() as compiled:
        inside = jax.jit(scaled)(one)
    assert len(compiled) == 1  # the caller's own
    np.testing.assert_array_equal(inside, alone)
    jax.vmap(scaled)(one), jax.grad(scaled)(one[0])
    with compilations() as compiled:
        jax.vmap(scaled)(one), jax.grad(scaled)(one[0])
    assert compiled == []


def test_known_data_are_fitted_inside_of_derivatives():
    x, y = rows()
    fitted = gaussian_process.fit(x, y)
    total = lambda new: gaussian_process.fit(x, y)(new).mean.sum()
    slope = jax.grad(lambda new: fitted(new).mean.sum())(x[:NEW])
    np.testing.assert_allclose(jax.grad(total)(x[:NEW]), slope, atol=CLOSE)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x[:NEW]), slope, atol=CLOSE)
    at = jnp.asarray(x[0])
    bend = jax.hessian(lambda point: total(point[None]))(at)
    np.testing.assert_allclose(bend, jax.hessian(lambda point: fitted(point[None]).mean.sum())(at), atol=10 * CLOSE)


def test_nothing_is_compiled_without_jit_either():
    x, y = rows()
    evidence, mean = by_process(x, y, x[:NEW])
    with jax.disable_jit():
        found = by_process(x, y, x[:NEW])
    np.testing.assert_array_equal(found[0], evidence)
    np.testing.assert_array_equal(found[1], mean)


# A fit to data that are traced


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_both_worlds_find_the_same_optimum(predict):
    x, y = rows()
    evidence, mean = predict(x, y, x[:NEW])
    traced = jax.jit(predict)(x, y, x[:NEW])
    np.testing.assert_allclose(traced[0], evidence, atol=NATS)
    np.testing.assert_allclose(traced[1], mean, atol=CLOSE)


SMALL_PROGRAMS = {
    "sparse": lambda tolerance: {"inference": Sparse(num_inducing=6, tolerance=tolerance)},
    "nearest": lambda tolerance: {"inference": Nearest(neighbors=6, tolerance=tolerance)},
    "student": lambda tolerance: {"inference": Exact(tolerance=tolerance), "noise": StudentTNoise()},
    "input": lambda tolerance: {"inference": Sparse(num_inducing=6, tolerance=tolerance), "noise": InputNoise()},
}


@pytest.mark.parametrize("options", SMALL_PROGRAMS.values(), ids=SMALL_PROGRAMS)
def test_small_programs_find_what_numpy_finds(options, monkeypatch):
    """They are called by the host for gpjax's kernels, and on accelerators."""
    x, y = rows()
    fit = lambda tolerance: gaussian_process.fit(x, y, **options(tolerance))
    by_numpy = fit(1e-6)
    monkeypatch.setattr("jaxcal.gp.fit.is_on_host", lambda *_: False)
    by_programs = fit(1e-6)
    np.testing.assert_allclose(by_programs(x[:NEW]).mean, by_numpy(x[:NEW]).mean, atol=CLOSE)
    with compilations() as compiled:
        fit(1e-3), fit(1), fit(jnp.asarray(0.1))
    assert compiled == []


def test_vectors_all_at_once_find_the_same_optimum(monkeypatch):
    """As on an accelerator, which is asked at all ascents by one call."""
    x, y = rows()
    evidence, mean = by_gpjax(x, y, x[:NEW])
    monkeypatch.setattr(jax, "default_backend", lambda: "accelerator")
    found = by_gpjax(x, y, x[:NEW])
    np.testing.assert_allclose(found[0], evidence, atol=NATS)
    np.testing.assert_allclose(found[1], mean, atol=CLOSE)


@pytest.mark.skipif(not X64, reason="finite differences need the last digits")
def test_derivatives_pass_through_a_search_on_the_host():
    """Inside of a program: test_derivatives.py."""
    x, y = rows()
    mean = lambda y: gaussian_process.fit(x, y, inference=Exact(ard=False), differentiable=True)(x[:NEW]).mean[0]
    step = 1e-5 * np.eye(N)[3]
    difference = (mean(y + step) - mean(y - step)) / 2e-5
    np.testing.assert_allclose(jax.grad(mean)(jnp.asarray(y))[3], difference, rtol=1e-4)


# Threads


def test_fits_at_once_are_those_one_after_another():
    x, y = rows()
    parts = [(x[k:], y[k:]) for k in range(4)]
    alone = [float(gaussian_process.fit(*part).evidence) for part in parts]
    before = [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda part: float(gaussian_process.fit(*part).evidence), parts * 3))
    np.testing.assert_array_equal(found, alone * 3)
    assert [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"] == before


@pytest.mark.any_precision
def test_the_limit_of_threads_holds_until_the_last_one_leaves():
    blas = lambda: {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}
    with _numpy.threads_for(10):
        first = _numpy.threads_for(10)
        with first:
            assert blas() == {1}
        assert blas() == {1}
    with _numpy.threads_for(10**6):
        pass


# What is compiled


def test_another_number_or_option_compiles_nothing():
    x, y = rows()
    std = np.full(N, 0.3)
    with compilations() as compiled:
        inference = Exact(tolerance=0.1, max_iterations=30)
        fitted = gaussian_process.fit(x, y, inference=inference, noise=GaussianNoise(variance=0.04))
        for number in (1, 7, 30):
            predicted = fitted(x[:number])
            metrics.evaluate(y[:number], predicted)
        rio.fit(x, Normal(y - 0.1, std), y[::-1].copy(), inference=inference)
    assert compiled == []


def test_programs_are_shared_by_nearby_numbers():
    """Of a kernel that only JAX knows: by the rows of fits, and by the points of predictions."""
    x, y = rows()
    fitted = gaussian_process.fit(x, y, kernel=Matern32(active_dims=[0, 1]))
    whole = fitted(x[:8])
    with compilations() as compiled:
        few = [fitted(x[:number]) for number in (8, 7, 5)]
        gaussian_process.fit(x[:35], y[:35], kernel=Matern32(active_dims=[0, 1]), inference=Exact(tolerance=0.1))
    assert compiled == []
    for part in few:
        np.testing.assert_allclose(part.mean, whole.mean[: len(part.mean)], atol=CLOSE)


@pytest.mark.any_precision
def test_options_are_for_programs_at_top_level(monkeypatch):
    known = {"xla_backend_optimization_level": 1}
    monkeypatch.setattr(_programs, "_OPTIONS", {"cpu": known})
    monkeypatch.setattr(_programs, "_has_options", lambda backend: True)
    double = _programs.jit(lambda x: 2 * x)
    one = jnp.ones(())
    assert double(one) == 2
    assert jax.jit(double)(one) == jax.vmap(double)(one[None])[0] == jax.grad(double)(one) == 2
    assert jax.jit(lambda x: x * double(one))(one) == jax.grad(lambda x: x * double(one))(one) == 2
    assert jax.make_jaxpr(double)(one)
    with jax.disable_jit():
        assert double(one) == 2


@pytest.mark.any_precision
@pytest.mark.parametrize(
    ("options", "flags", "are_there"),
    [
        ({"xla_backend_optimization_level": 1}, "", True),
        ({"xla_backend_optimization_level": 1}, "--xla_backend_optimization_level=2", False),
        ({"xla_is_not_known": 1}, "", False),
    ],
)
def test_options_are_what_the_user_left_open_and_xla_knows(monkeypatch, options, flags, are_there):
    monkeypatch.setattr(_programs, "_OPTIONS", {"cpu": options})
    monkeypatch.setenv("XLA_FLAGS", flags)
    disabled = jax.config.read("jax_disable_most_optimizations")
    try:
        jax.config.update("jax_disable_most_optimizations", False)
        assert _programs._has_options.__wrapped__("cpu") is are_there
        jax.config.update("jax_disable_most_optimizations", True)
        assert not _programs._has_options.__wrapped__("cpu")
    finally:
        jax.config.update("jax_disable_most_optimizations", disabled)
