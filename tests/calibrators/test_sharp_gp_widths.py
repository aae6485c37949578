"""The search for lengthscales of sharp quantiles: what is minimized, on a line exactly, by column no worse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal._numpy import by_numpy
from jaxcal.calibrators.sharp_gp import widths

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
LEVELS = (0.1, 0.3, 0.7, 0.9)


@pytest.fixture
def problem(rng):
    """Rows whose errors grow where they are few; their variance is conditioned on others."""
    x = np.concatenate([rng.normal(0, 0.3, size=(40, 2)), rng.normal(0, 2, size=(10, 2))])
    at = rng.normal(0, 1, size=(30, 2))
    errors = rng.normal(size=30) * (0.1 + np.abs(at[:, 0]))
    return widths.WidthData(jnp.asarray(x), jnp.asarray(0.1), jnp.asarray(errors), jnp.asarray(at))


def left_out(problem):
    return problem._replace(at=None, errors=jnp.resize(problem.errors, 50))


def test_width_does_not_change_with_the_unit_of_the_variance(rng):
    variance, errors = jnp.asarray(rng.uniform(1, 2, size=20)), jnp.asarray(rng.normal(size=20))
    width = widths.log_width(variance, errors, 0.9)
    np.testing.assert_allclose(widths.log_width(7 * variance, errors, 0.9), width, rtol=1e-12 if X64 else 1e-5)
    np.testing.assert_allclose(
        widths.log_width(variance, 7 * errors, 0.9) - width, np.log(7), rtol=1e-12 if X64 else 1e-5
    )


def test_width_is_that_of_equation_7(rng):
    variance, errors = rng.uniform(1, 2, size=19), rng.normal(size=19)
    beta = np.sort(errors / np.sqrt(variance))[17]  # at level 18 / (19 + 1)
    expected = np.log(np.mean((beta * np.sqrt(variance)) ** 2)) / 2
    found = widths.log_width(jnp.asarray(variance), jnp.asarray(errors), 0.9)
    np.testing.assert_allclose(found, expected, rtol=1e-12 if X64 else 1e-5)


@pytest.mark.parametrize("view", [lambda problem: problem, left_out])
def test_variance_grows_with_every_inverse_lengthscale(problem, view, rng):
    """Assumption 4.1."""
    variance = jax.jit(view(problem).variance)
    for _ in range(20):
        shorter = rng.normal(0, 1.5, size=2)
        longer = shorter - np.abs(rng.normal(size=2))
        assert (variance(jnp.asarray(shorter)) >= variance(jnp.asarray(longer)) - (1e-9 if X64 else 1e-4)).all()


def test_best_path_is_that_of_brute_force(rng):
    best_path = jax.jit(widths._best_path)
    for _ in range(20):
        costs = rng.normal(size=(3, 5))
        paths = [path for path in itertools.product(range(5), repeat=3) if list(path) == sorted(path)]
        best = min(paths, key=lambda path: sum(costs[i, place] for i, place in enumerate(path)))
        assert best_path(jnp.asarray(costs)).tolist() == list(best)


def outwards(log_scales, levels):
    """The inverse lengthscales of either side, from the middle outwards."""
    below = widths.num_below(levels)
    return [log_scales[:below][::-1], log_scales[below:]]


@pytest.mark.parametrize("view", [pytest.param(lambda problem: problem, marks=pytest.mark.slow), left_out])
def test_lengthscales_do_not_grow_outwards_and_columns_beat_the_line(problem, view):
    problem, start = view(problem), jnp.zeros(2)
    found = {
        search: jax.jit(lambda problem, start, search=search: search(problem, start, LEVELS))(problem, start)
        for search in (widths.on_line, widths.by_column)
    }
    for log_scales in found.values():
        assert log_scales.shape == (4, 2)
        for side in outwards(log_scales, LEVELS):
            assert (jnp.diff(side, axis=0) >= -1e-6).all()
    # Nothing binds the outermost levels.
    for place in (0, 3):
        line, column = (
            problem.log_width(log_scales[place], jnp.asarray(LEVELS[place])) for log_scales in found.values()
        )
        assert column <= line + 0.02


@pytest.mark.parametrize("view", [lambda problem: problem, left_out])
@pytest.mark.parametrize("level", [0.8, 29 / 31])
def test_gradient_in_closed_form_is_that_of_jax(problem, view, level, rng):
    """On the host and in a program, also where a bound holds a column."""
    problem, level = view(problem), jnp.asarray(level)
    through = jax.jit(jax.value_and_grad(lambda log_scale: problem.log_width(log_scale, level)))
    tolerance = {"rtol": 1e-8, "atol": 1e-10} if X64 else {"rtol": 1e-2, "atol": 1e-3}
    for log_scale in (*rng.normal(size=(5, 2)), np.array([0.3, 6.0])):
        log_scale = jnp.asarray(log_scale)
        value, gradient = through(log_scale)
        on_host = by_numpy(widths.WidthData.log_width_and_gradient, problem, log_scale, level)
        for found in (on_host, jax.jit(problem.log_width_and_gradient)(log_scale, level)):
            np.testing.assert_allclose(found[0], value, **tolerance)
            np.testing.assert_allclose(found[1], gradient, **tolerance)


@pytest.mark.parametrize("view", [lambda problem: problem, left_out])
def test_the_host_finds_what_a_program_finds(problem, view):
    problem, start = view(problem), jnp.zeros(2)
    on_host, traced = (
        run(widths.on_line, problem, start, LEVELS)
        for run in (by_numpy, lambda search, *args: jax.jit(search, static_argnums=2)(*args))
    )
    np.testing.assert_allclose(on_host, traced, atol=1e-12 if X64 else 1e-5)
    # The sum of the widths by column: both end near minima of a rugged function.
    on_host, traced = (
        sum(problem.log_width(*each) for each in zip(found, jnp.asarray(LEVELS), strict=True))
        for found in (
            by_numpy(widths.by_column, problem, start, LEVELS),
            jax.jit(widths.by_column, static_argnums=2)(problem, start, LEVELS),
        )
    )
    np.testing.assert_allclose(on_host, traced, atol=1e-4 if X64 else 0.05)


def test_some_rows_are_taken_at_equal_distances(problem):
    some = problem.of_some_rows(7)
    assert some.x.shape == (7, 2)
    assert some.errors.shape == (7,)
    np.testing.assert_array_equal(some.at[np.array([0, -1])], problem.at[np.array([0, -1])])
    assert problem.of_some_rows(1000).x.shape == (50, 2)
