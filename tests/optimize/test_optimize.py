"""L-BFGS and the batching of runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from jaxcal.optimize import Optimum, Result, first_finite, minimize, one_run_at_a_time, over_runs

pytestmark = pytest.mark.contract_in_32_bits


def rosenbrock(p):
    return jnp.sum(100 * (p["b"] - p["a"] ** 2) ** 2 + (1 - p["a"]) ** 2)


INITIAL = {"a": jnp.full(3, -1.2), "b": jnp.ones(3)}


def test_minimum_is_that_of_scipy():
    optimum = jax.jit(lambda p: minimize(rosenbrock, p))(INITIAL)
    expected = scipy.optimize.minimize(
        lambda v: float(np.sum(100 * (v[3:] - v[:3] ** 2) ** 2 + (1 - v[:3]) ** 2)),
        np.array([-1.2] * 3 + [1.0] * 3),
        method="L-BFGS-B",
    )
    assert optimum.result == Result.CONVERGED
    assert optimum.loss < max(10 * expected.fun, 1e-8)
    np.testing.assert_allclose(optimum.params["a"], 1, atol=2e-3)


def test_stops_at_the_iterations_allowed():
    optimum = minimize(rosenbrock, INITIAL, max_iterations=3)
    assert optimum.result == Result.STEP_LIMIT
    assert optimum.steps == 3
    assert optimum.loss < rosenbrock(INITIAL)


def losses_after(start, steps):
    """Rosenbrock's function after 0, 1, ... steps."""
    loss_after = jax.jit(lambda limit: minimize(rosenbrock, start, max_iterations=limit).loss)
    return np.asarray([loss_after(jnp.asarray(limit)) for limit in range(steps + 1)])


def test_slow_steps_end_the_loop_only_where_little_is_left_to_gain():
    losses = losses_after(INITIAL, 15)
    gains = -np.diff(losses)
    slow = (gains < 0.1) & (np.arange(len(gains)) >= 4)
    plateau = 2 + int(np.argmax(slow[1:] & slow[:-1]))
    assert losses[plateau] > 0.2  # two slow steps, but the minimum is 0
    optimum = minimize(rosenbrock, INITIAL, gain_tolerance=0.1)
    assert optimum.result == Result.CONVERGED
    assert plateau < optimum.steps < minimize(rosenbrock, INITIAL).steps
    assert optimum.loss < 0.1


def test_slow_first_steps_are_no_end():
    start = {"a": jnp.asarray(-2.0), "b": jnp.asarray(4.0)}
    losses = losses_after(start, 3)
    assert (-np.diff(losses) < 0.05).all()
    assert minimize(rosenbrock, start, gain_tolerance=0.05).loss < 0.5 * losses[-1]


def test_stops_at_once_where_the_gradient_vanishes():
    optimum = minimize(lambda p: (p - 1.0) ** 2, jnp.asarray(1.0))
    assert optimum.result == Result.CONVERGED
    assert optimum.steps <= 1


def test_an_initial_value_of_nan_is_reported():
    optimum = minimize(lambda p: jnp.log(p), jnp.asarray(-1.0))
    assert optimum.result == Result.NOT_FINITE
    assert optimum.steps == 0


def test_steps_to_where_the_loss_is_nan_are_too_long():
    optimum = minimize(lambda p: p - jnp.log(p), jnp.asarray(20.0))
    assert optimum.result == Result.CONVERGED
    np.testing.assert_allclose(optimum.params, 1.0, atol=1e-2)


def test_first_finite_tries_again_and_gives_up():
    def attempt(step):
        result = jnp.where(step < 2, Result.NOT_FINITE, Result.CONVERGED).astype(jnp.int32)
        return Optimum(step, jnp.asarray(0.0), step, result)

    assert first_finite(attempt, 5).params == 2
    assert first_finite(attempt, 2).result == Result.NOT_FINITE


def test_over_runs_shares_what_is_no_array():
    out = over_runs(lambda x, name, n: {name: x * n})(jnp.arange(3.0), "twice", 2)
    assert out["twice"].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_one_run_at_a_time_gives_what_vmap_gives(in_axes):
    def norm(a, b):
        return {"norm": jnp.sqrt(jnp.sum(a * b)), "a": a}

    a = jnp.arange(1.0, 7.0).reshape(2, 3)
    args = [v if axis == 0 else v[0] for v, axis in zip((a, a + 1), in_axes, strict=True)]
    ours = jax.jit(jax.vmap(one_run_at_a_time(norm), in_axes=in_axes))(*args)
    jax.tree.map(np.testing.assert_allclose, ours, jax.vmap(norm, in_axes=in_axes)(*args))


def test_one_run_at_a_time_under_two_vmaps():
    loss = lambda center: minimize(lambda p: (p - center) ** 2, jnp.zeros(())).params
    centers = jnp.arange(6.0).reshape(2, 3)
    found = jax.vmap(jax.vmap(one_run_at_a_time(loss)))(centers)
    np.testing.assert_allclose(found, centers, atol=1e-4)


def test_a_validation_loss_stops_early_and_chooses():
    # The minimum of the validation loss lies on the way to that of the loss.
    loss, start = lambda p: jnp.sum((p - 3) ** 4), jnp.zeros(2)
    distance = lambda p: jnp.sum((p - 1) ** 2)
    after = jax.jit(lambda steps: minimize(loss, start, max_iterations=steps))
    path = [after(steps) for steps in range(25)]
    distances = np.array([distance(step.params) for step in path])
    best = int(np.argmin(distances))
    optimum = minimize(loss, start, validation_loss=distance, patience=3)
    assert 0 < best < len(path) - 4
    np.testing.assert_allclose(optimum.params, path[best].params, rtol=1e-6)
    np.testing.assert_allclose(optimum.loss, distances[best], rtol=1e-6)
    assert (optimum.steps, optimum.result) == (best + 3, Result.CONVERGED)


def test_a_validation_loss_that_never_stops_chooses_the_last_step():
    distance = lambda p: jnp.sum((p - 3) ** 2)
    optimum = minimize(distance, jnp.zeros(2), validation_loss=distance, patience=1)
    np.testing.assert_allclose(optimum.params, 3, atol=1e-5)
