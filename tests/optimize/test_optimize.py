"""L-BFGS and the batching of runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from compiled import compilations
from jax.sharding import Mesh, PartitionSpec

from jaxcal.optimize import (
    Optimum,
    Result,
    descend,
    first_finite,
    minimize,
    minimize_from_each,
    one_run_at_a_time,
    over_runs,
)

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


def quadratic(xp, v):
    scales = 10.0 ** np.arange(4)
    return xp.sum(scales * (v - 1) ** 2), 2 * scales * (v - 1)


def valley(xp, v):
    """Rosenbrock's function, and its gradient."""
    a, b = v[:-1], v[1:]
    zero = xp.zeros_like(v[:1])
    gradient = xp.concatenate([-400 * a * (b - a**2) - 2 * (1 - a), zero])
    return xp.sum(100 * (b - a**2) ** 2 + (1 - a) ** 2), gradient + xp.concatenate([zero, 200 * (b - a**2)])


def cliff(xp, v):
    """NaN for negative entries."""
    return xp.sum(v - xp.log(v)), 1 - 1 / v


def plateau(xp, v):
    """Flat far from 0."""
    return xp.sum(1 - xp.exp(-(v**2))), 2 * v * xp.exp(-(v**2))


VALLEY = [-1.2, 1.0, -1.2, 1.0]
FUNCTIONS = {
    "quadratic": (quadratic, [3.0, -2.0, 0.0, 5.0], {}, Result.CONVERGED),
    "valley": (valley, VALLEY, {}, Result.CONVERGED),
    "cliff": (cliff, [20.0, 0.01], {}, Result.CONVERGED),
    "plateau": (plateau, [3.0, 2.0], {}, Result.CONVERGED),
    "slow": (valley, VALLEY, {"gain_tolerance": 0.01}, Result.CONVERGED),
    "limit": (valley, VALLEY, {"max_iterations": 7}, Result.STEP_LIMIT),
    "no step": (valley, VALLEY, {"max_iterations": 0}, Result.STEP_LIMIT),
    "nan": (cliff, [1.0, -1.0], {}, Result.NOT_FINITE),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_descent_of_the_host_is_that_of_a_program(name):
    function, start, options, result = FUNCTIONS[name]
    start = jnp.asarray(start)
    asked = []
    with np.errstate(invalid="ignore"), compilations() as compiled:
        evaluate = lambda vector: asked.append(vector) or function(np, vector)
        host = descend(evaluate, np.asarray(start), **options, on_host=True)
    assert compiled == []
    assert {(vector.dtype, vector.shape) for vector in asked} == {(np.dtype(np.float64), start.shape)}
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in host)
    program = jax.jit(lambda start: descend(lambda v: function(jnp, v), start, **options, on_host=False))(start)
    assert host.result == program.result == result
    assert program.params.dtype == program.loss.dtype == start.dtype
    if start.dtype == np.float64:
        assert host.steps == program.steps
        np.testing.assert_allclose(host.params, program.params, rtol=1e-6, atol=1e-9)
    elif result == Result.CONVERGED and not options:  # in 32 bits rounding decides where the last steps go
        np.testing.assert_allclose(host.params, program.params, rtol=1e-2, atol=1e-2)


def test_a_descent_needs_as_few_evaluations_as_scipy():
    start, asked = np.tile([-1.2, 1.0], 5), []
    ours = descend(lambda v: asked.append(v) or valley(np, v), start, on_host=True)
    theirs = scipy.optimize.minimize(lambda v: valley(np, v), start, jac=True, method="L-BFGS-B")
    np.testing.assert_allclose(ours.params, theirs.x, atol=1e-3)
    assert len(asked) < 1.3 * theirs.nfev


def bfgs_direction(gradient, pairs):
    """By the dense recursion over the moves s and the changes y of the last ten steps."""
    if not pairs:
        return -gradient / max(np.linalg.norm(gradient), 1)
    s, y = pairs[-1]
    inverse = np.eye(len(s)) * (s @ y) / (y @ y)
    for s, y in pairs[-10:]:
        left = np.eye(len(s)) - np.outer(s, y) / (s @ y)
        inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
    return -inverse @ gradient


def test_trials_are_those_of_the_dense_recursion(rng):
    root, asked = rng.normal(size=(6, 6)), []
    hessian = root @ root.T + np.eye(6)
    function = lambda v: (v @ hessian @ v / 2, hessian @ v)
    never = {"loss_tolerance": 0.0, "gradient_tolerance": 0.0}
    descend(lambda v: asked.append(v) or function(v), rng.normal(size=6), max_iterations=14, **never, on_host=True)
    trials = iter(asked)
    place, pairs = next(trials), []
    for _ in range(14):
        value, gradient = function(place)
        direction, low, high, length = bfgs_direction(gradient, pairs), 0.0, np.inf, 1.0
        slope, accepted = direction @ gradient, False
        while not accepted:
            point = next(trials)
            np.testing.assert_allclose(point, place + length * direction, rtol=1e-6, atol=1e-8)
            new, after = function(point)
            falls = new <= value + 1e-4 * length * slope
            accepted = falls and direction @ after >= 0.9 * slope
            low, high = (length, high) if falls else (low, length)
            length = 2 * length if np.isinf(high) else (low + high) / 2
        pairs.append((point - place, after - gradient))
        place = point
    assert next(trials, None) is None


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


def test_a_validation_loss_is_computed_once_a_step():
    counted = []

    def validation(p):
        jax.debug.callback(lambda: counted.append(1))
        return jnp.sum((p - 3) ** 2)

    start, asked = jnp.array(VALLEY), []

    def counted_loss(p):
        jax.debug.callback(lambda: asked.append(1))
        return valley(jnp, p)[0]

    optimum = jax.jit(lambda p: minimize(counted_loss, p, validation_loss=validation, patience=50))(start)
    jax.block_until_ready(optimum)
    jax.effects_barrier()
    assert len(counted) == optimum.steps + 1 < len(asked)


def test_validation_losses_under_vmap_are_those_of_each():
    loss, starts = lambda p: jnp.sum((p - 3) ** 4), jnp.array([[0.0, 0.5], [-2.0, 1.0], [8.0, 5.0]])
    distance = lambda p: jnp.sum((p - 1) ** 2)
    alone = [minimize(loss, start, validation_loss=distance, patience=3) for start in starts]
    together = jax.vmap(lambda start: minimize(loss, start, validation_loss=distance, patience=3))(starts)
    for number, each in enumerate(alone):
        assert each.steps == together.steps[number]
        np.testing.assert_allclose(each.params, together.params[number], rtol=1e-5)
    best = minimize_from_each(loss, starts, validation_loss=distance, patience=3)
    np.testing.assert_allclose(best.loss, min(each.loss for each in alone), rtol=1e-5)


def test_a_minimum_on_a_device_of_its_own():
    mesh, rows = Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows")

    def fit(targets):
        distance = lambda p: jnp.sum((p - targets) ** 2)
        return minimize(distance, jnp.zeros_like(targets), validation_loss=distance).params

    targets = jnp.arange(3.0)
    found = jax.jit(jax.shard_map(fit, mesh=mesh, in_specs=rows, out_specs=rows))(targets)
    np.testing.assert_allclose(found, targets, atol=1e-4)
