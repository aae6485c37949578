"""Online intervals against loops in NumPy, their bounds for every sequence, and their coverage after a change."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from compiled import compilations
from jax import lax

from jaxcal import online
from jaxcal.calibrators import conformal
from jaxcal.distributions import Mixture, Normal, Point
from jaxcal.functional import quantiles, tracking
from jaxcal.online import adaptive, pid

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-10 if X64 else 1e-4
CALIBRATION, NEW = 37, 150
INITS = {"aci": adaptive.init, "dtaci": adaptive.init_aggregated, "pid": pid.init}


@pytest.fixture
def rows(rng):
    """Means, stds and targets of calibration rows and of new ones, whose noise grows."""
    size = CALIBRATION + NEW
    mean, std = rng.normal(size=size), rng.uniform(0.5, 2, size=size)
    return mean, std, mean + std * np.geomspace(1, 30, size) * rng.normal(size=size)


def base_of(mean, std, score):
    return Normal(mean, std) if score == "scaled" else Point(mean)


def run_on(init, rows, score, **options):
    mean, std, y = rows
    state = init(base_of(mean[:CALIBRATION], std[:CALIBRATION], score), y[:CALIBRATION], **options)
    state, ends = online.run(state, base_of(mean[CALIBRATION:], std[CALIBRATION:], score), y[CALIBRATION:])
    return state, np.stack(ends, axis=1)


def scores_of(rows, score):
    mean, std, y = rows
    return np.abs(y - mean) / (std if score == "scaled" else 1)


def quantile(table, level):
    """The conformal quantile, from its definition."""
    rank = math.ceil(round((len(table) + 1) * level, 9))
    return -math.inf if rank < 1 else math.inf if rank > len(table) else sorted(table)[rank - 1]


def interval(mean, scale, threshold):
    return (math.inf, -math.inf) if threshold < 0 else (mean - scale * threshold, mean + scale * threshold)


def loop(rows, score, window, threshold_of, update):
    """The intervals of any method: its threshold from the last scores, and what it learns from a score and a miss."""
    mean, std, _ = rows
    scores, ends = scores_of(rows, score), []
    for t in range(CALIBRATION, CALIBRATION + NEW):
        recent = scores[t - window : t]
        threshold = threshold_of(recent)
        ends.append(interval(mean[t], std[t] if score == "scaled" else 1, threshold))
        update(recent, scores[t], scores[t] > threshold)
    return np.array(ends)


# ------------------------------------------------------------------ against loops


@pytest.mark.parametrize(("score", "window"), [("scaled", CALIBRATION), ("absolute", 20)])
def test_aci_is_that_of_a_loop(rows, score, window):
    alpha = 0.2
    thresholds = []

    def threshold_of(recent):
        thresholds.append(quantile(recent, 1 - alpha))
        return thresholds[-1]

    def update(recent, score, missed):
        nonlocal alpha
        alpha += 0.1537 * (0.2 - missed)

    expected = loop(rows, score, window, threshold_of, update)
    state, ends = run_on(adaptive.init, rows, score, confidence_level=0.8, step_size=0.1537, window=window)
    np.testing.assert_allclose(ends, expected, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(state.alpha, alpha, atol=EXACT)
    assert np.isinf(thresholds).any()  # the noise grows so fast that some intervals are infinite
    np.testing.assert_allclose(state.table, sorted(scores_of(rows, score)[-window:]), rtol=EXACT)


def test_dtaci_is_that_of_a_loop(rows):
    steps, horizon, target = np.array([0.0137, 0.0537, 0.1711]), 60, 0.2
    alphas, weights = np.full(3, target), np.ones(3) / 3
    squared_loss, error = scipy.integrate.quad(
        lambda b: max(target * (b - target), (target - 1) * (b - target)) ** 2, 0, 1
    )
    assert error < 1e-7
    eta = math.sqrt((math.log(2 * 3 * horizon) + 1) / (horizon * squared_loss))

    def update(recent, score, missed):
        nonlocal alphas, weights
        size = len(recent)
        # The largest level at which the interval held the score, found by trying all.
        levels = [k / (size + 1) for k in range(1, size + 2)]
        beta = max(level for level in levels if score <= quantile(recent, 1 - level + 1e-6))
        losses = np.maximum(target * (beta - alphas), (target - 1) * (beta - alphas))
        misses = np.array([score > quantile(recent, 1 - alpha) for alpha in alphas])
        grown = weights * np.exp(-eta * losses)
        weights = (1 - 1 / (2 * horizon)) * grown / grown.sum() + 1 / (2 * horizon) / 3
        alphas = alphas + steps * (target - misses)

    expected = loop(rows, "scaled", CALIBRATION, lambda recent: quantile(recent, 1 - weights @ alphas), update)
    options = {"confidence_level": 0.8, "step_sizes": steps, "horizon": horizon}
    state, ends = run_on(adaptive.init_aggregated, rows, "scaled", **options)
    np.testing.assert_allclose(state.weights, weights, rtol=100 * EXACT)
    np.testing.assert_allclose(state.alphas, alphas, atol=EXACT)
    np.testing.assert_allclose(ends, expected, rtol=EXACT, atol=EXACT)


def mean_of_recent(recent):
    return 0.5 * recent.mean()


@pytest.mark.parametrize("scorecaster", [None, mean_of_recent])
def test_pid_is_that_of_a_loop(rows, scorecaster):
    target, gain, saturation = 0.2, 1.3, 0.7
    forecast = scorecaster or (lambda recent: 0.0)
    first = scores_of(rows, "absolute")[:CALIBRATION]
    tracked, misses, t = quantile(first, 1 - target) - forecast(first), 0, 0

    def threshold_of(recent):
        angle = (misses - target * t) * math.log(t + 1) / (saturation * (t + 1))
        integral = gain * math.tan(angle) if abs(angle) < math.pi / 2 else math.copysign(math.inf, angle)
        return tracked + integral + forecast(recent)

    def update(recent, score, missed):
        nonlocal tracked, misses, t
        tracked, misses, t = tracked + 0.1 * recent.max() * (missed - target), misses + missed, t + 1

    expected = loop(rows, "absolute", CALIBRATION, threshold_of, update)
    options = {"confidence_level": 0.8, "gain": gain, "saturation": saturation, "scorecaster": scorecaster}
    state, ends = run_on(pid.init, rows, "absolute", **options)
    np.testing.assert_allclose(ends, expected, rtol=10 * EXACT, atol=10 * EXACT)
    assert (int(state.num_rows), int(state.num_missed)) == (t, misses)


def test_the_first_intervals_are_those_of_split_conformal_prediction(rows):
    mean, std, y = (part[:CALIBRATION] for part in rows)
    new = Normal(rows[0][CALIBRATION:], rows[1][CALIBRATION:])
    expected = conformal.fit(None, Normal(mean, std), y)(None, new).interval(0.9)
    for init in INITS.values():
        np.testing.assert_allclose(init(Normal(mean, std), y).interval(new), expected, rtol=EXACT, atol=EXACT)


def test_a_value_of_a_sorted_table_is_replaced(rng):
    replace = jax.jit(quantiles.replace_in_sorted)
    for _ in range(200):
        table = np.sort(rng.integers(0, 6, size=5)).astype(float)
        old, new = rng.choice(table), rng.choice([*range(7), -1, np.inf])
        expected = table.tolist()
        expected.remove(old)
        np.testing.assert_array_equal(replace(table, old, new), sorted([*expected, new]))


# ------------------------------------------------------------------ what holds for every sequence


def adversaries(key, rows):
    """Targets [adversary, row] of a prediction 0: heavy tails, growth, blocks, and a drift of the noise."""
    noise = jax.random.cauchy(key, (4, rows))
    t = jnp.arange(rows)
    return jnp.stack([noise[0], noise[1] * 1.01**t, jnp.where(t // 100 % 2 == 0, 0.0, 1.0 + t), noise[3] / (1 + t)])


def misses_of(state, targets, opposes):
    """Whether each row was missed; an adversary that opposes puts the target just outside of a finite interval."""

    def one(state, y):
        base = Point(jnp.zeros(1))
        lower, upper = state.interval(base)
        outside = jnp.where(jnp.isfinite(upper[0]), upper[0] + 1, 0.0)
        y = jnp.where(opposes, outside, y).astype(targets.dtype)
        state, (lower, upper) = online.step(state, base, y)
        return state, ~((lower[0] <= y) & (y <= upper[0]))

    return lax.scan(one, state, targets)[1]


def excess_over_all_adversaries(make, options, confidence_level, rows=600):
    """|misses - (1 - c) t| after every row t, for every option and adversary."""
    targets = adversaries(jax.random.key(1), rows)
    calibration = jax.random.normal(jax.random.key(2), (30,))

    @jax.jit
    @jax.vmap
    def misses(option):
        state = make(Point(jnp.zeros(30)), calibration, option)
        quiet = jax.vmap(lambda y: misses_of(state, y, False))(targets)
        return jnp.concatenate([quiet, misses_of(state, targets[0], True)[None]])

    missed = np.asarray(misses(jnp.asarray(options)))
    return np.abs(np.cumsum(missed - (1 - confidence_level), axis=-1)), np.arange(1, rows + 1)


@pytest.mark.parametrize("confidence_level", [0.9, 0.5])
def test_aci_misses_as_many_rows_as_its_bound_allows_of_every_sequence(confidence_level):
    gammas = np.array([0.003, 0.03, 0.3])
    make = lambda base, y, gamma: adaptive.init(base, y, confidence_level=confidence_level, step_size=gamma)
    excess, t = excess_over_all_adversaries(make, gammas, confidence_level)
    bound = (max(confidence_level, 1 - confidence_level) + gammas) / gammas
    assert (excess / t <= bound[:, None, None] / t + EXACT).all()
    assert excess[1:, -1].max() > 0.2 * bound[1:].min()  # the adversary makes use of it


def test_pid_misses_as_many_rows_as_its_bound_allows_of_every_sequence():
    saturations = np.array([0.05, 0.3, 2.0])
    options = {"confidence_level": 0.9, "scorecaster": lambda recent: -recent.max()}
    make = lambda base, y, saturation: pid.init(base, y, saturation=saturation, gain=1.0, **options)
    excess, t = excess_over_all_adversaries(make, saturations, 0.9)
    bound = saturations[:, None, None] * (math.pi / 2) * (t + 1) / np.log(t + 1) + 1
    assert (excess <= bound + 1e-3)[..., 2:].all()
    assert (excess > bound / 2)[0].any()


# ------------------------------------------------------------------ coverage


def coverages(init, std, runs, calibration=200, **options):
    """The fraction of runs that cover, row after row, where the noise has these stds and the calibration has 1."""
    noise = jax.random.normal(jax.random.key(5), (runs, calibration + len(std)))
    y = noise * jnp.concatenate([jnp.ones(calibration), jnp.asarray(std)])[None]

    @eqx.filter_jit
    @eqx.filter_vmap
    def covered(y):
        first, new = y[:calibration], y[calibration:]
        zeros = lambda rows: Point(jnp.zeros_like(rows))
        if init is None:
            lower, upper = conformal.fit(None, zeros(first), first)(None, zeros(new)).interval(0.9)
        else:
            lower, upper = online.run(init(zeros(first), first, **options), zeros(new), new)[1]
        return (lower <= new) & (new <= upper)

    return np.asarray(covered(y))


def test_doubled_noise_is_covered_by_adaptive_intervals_alone():
    std = np.full(1000, 2.0)
    fixed = coverages(None, std, 40)
    expected = 2 * scipy.stats.norm.cdf(scipy.stats.norm.ppf(0.95) / 2) - 1
    assert expected == pytest.approx(0.589, abs=1e-3)
    # From one calibration set to the next the quantile has a std of 0.1, and the coverage of 0.04.
    assert abs(fixed.mean() - expected) < 4 * 0.04 / math.sqrt(40)
    adapted = coverages(adaptive.init, std, 40)
    assert adapted[:, :50].mean() < 0.8
    assert abs(adapted[:, 400:].mean() - 0.9) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("method", INITS)
@pytest.mark.parametrize("std", ["constant", "doubling", "jump", "waves"])
def test_coverage_in_the_long_run(method, std):
    t = np.linspace(0, 1, 3000)
    std = {
        "constant": np.ones(3000),
        "doubling": 1 + t,
        "jump": np.where(t < 0.3, 1, 2),
        "waves": np.exp(np.sin(20 * t)),
    }[std]
    covered = coverages(INITS[method], std, 100)[:, 300:]
    assert abs(covered.mean() - 0.9) < 0.015
    assert np.abs(covered.mean(1) - 0.9).max() < 0.04  # in each run


@pytest.mark.slow
def test_exchangeable_rows_are_covered_at_every_time():
    covered = coverages(adaptive.init, np.ones(500), 4000, step_size=0.005)
    by_time = covered.mean(0)
    assert np.abs(by_time - 0.9).max() < 5 * math.sqrt(0.09 / 4000)


# ------------------------------------------------------------------ ends, transformations, mistakes


def test_infinite_and_empty_intervals():
    state = adaptive.init(Point(np.zeros(9)), np.arange(9.0))
    at = lambda alpha: eqx.tree_at(lambda s: s.alpha, state, jnp.full_like(state.alpha, alpha))
    new = Normal(np.array([1.0, 2.0]), np.ones(2))
    for alpha, ends in ((0.0, (-np.inf, np.inf)), (-0.1, (-np.inf, np.inf)), (1.0, (np.inf, -np.inf))):
        lower, upper = at(alpha).interval(new)
        assert (lower == ends[0]).all()
        assert (upper == ends[1]).all()
        gradient = jax.grad(lambda mean, alpha=alpha: at(alpha).interval(Point(mean))[1].sum())(new.mean)
        assert (gradient == 0).all()
    # An empty interval is missed, an infinite one is not.
    for alpha, moved in ((1.0, -0.9), (0.0, 0.1)):
        after, _ = online.step(at(alpha), Point(0.0), 0.0)
        np.testing.assert_allclose(after.alpha, alpha + 0.005 * moved, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", INITS)
def test_steps_scans_runs_and_batches_are_the_same(method, rows):
    mean, std, y = rows
    init = INITS[method]
    first = [part[:CALIBRATION] for part in rows]
    base, targets = Normal(mean[CALIBRATION:], std[CALIBRATION:]), jnp.asarray(y[CALIBRATION:])
    start = init(Normal(*first[:2]), first[2])
    _, expected = online.run(start, base, targets)
    state, stepped = start, []
    for t in range(3):
        state, ends = online.step(state, Normal(base.mean[t : t + 1], base.std[t : t + 1]), targets[t])
        stepped.append(np.concatenate(ends))
    np.testing.assert_allclose(np.stack(stepped, axis=1), np.stack(expected)[:, :3], rtol=EXACT)
    _, scanned = lax.scan(lambda state, row: online.step(state, *row), start, (base, targets))
    np.testing.assert_allclose(scanned, expected, rtol=EXACT)

    @eqx.filter_jit
    @eqx.filter_vmap
    def batch(y):
        state = init(Normal(*first[:2]), y[:CALIBRATION])
        return online.run(state, base, y[CALIBRATION:])[1]

    both = np.stack(batch(jnp.stack([y[::-1], y])))
    np.testing.assert_allclose(both[:, 1], expected, rtol=10 * EXACT, atol=10 * EXACT)
    assert np.isfinite(both).any()


@pytest.mark.parametrize("method", ["aci", "pid", pytest.param("dtaci", marks=pytest.mark.slow)])
def test_gradients_and_dtype(method, rows):
    mean, std, y = (part.astype(np.float32) for part in rows)
    state = INITS[method](Normal(mean[:CALIBRATION], std[:CALIBRATION]), y[:CALIBRATION])

    @jax.jit
    @jax.grad
    def gradient(moments):
        _, (lower, upper) = online.run(state, Normal(*moments), y[CALIBRATION:])
        return jnp.sum(jnp.where(jnp.isfinite(upper), upper + 2 * lower, 0))

    for part in gradient((jnp.asarray(mean[CALIBRATION:]), jnp.asarray(std[CALIBRATION:]))):
        assert np.isfinite(part).all()
        assert part.any()
    after, ends = online.run(state, Normal(mean[CALIBRATION:], std[CALIBRATION:]), y[CALIBRATION:])
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((after, ends)) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert dtypes == {np.dtype("float32")}


@pytest.mark.parametrize("method", INITS)
def test_a_second_start_and_run_compile_nothing(method, rows):
    run_on(INITS[method], rows, "scaled")
    with compilations() as compiled:
        run_on(INITS[method], [part + 1 for part in rows], "scaled", confidence_level=0.8)
    assert not compiled


def test_a_run_takes_any_base(rows):
    mean, _, y = rows
    mixture = lambda part: Mixture(Normal(np.stack([part, part + 1]), 1.0), np.array([0.5, 0.5]))
    state = adaptive.init(mixture(mean[:CALIBRATION]), y[:CALIBRATION])
    new = mixture(mean[CALIBRATION:])
    _, ends = online.run(state, new, y[CALIBRATION:])
    np.testing.assert_allclose(ends, online.run(state, Normal(new.mean, new.std), y[CALIBRATION:])[1], rtol=EXACT)


def test_a_target_that_is_not_known_in_a_trace_counts_as_missed():
    state = adaptive.init(Point(np.zeros(9)), np.arange(9.0))
    after, _ = jax.jit(online.step)(state, Point(jnp.zeros(1)), jnp.nan)
    np.testing.assert_allclose(after.alpha, state.alpha - 0.005 * 0.9, rtol=1e-5)
    assert np.asarray(after.recent)[-1] == np.inf
    again, _ = online.step(after, Point(0.0), 3.0)
    np.testing.assert_array_equal(np.sort(again.recent), again.table)


def state_on(init=adaptive.init, **options):
    return init(Point(np.zeros(9)), np.arange(9.0), **options)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: state_on(confidence_level=90.0), "did you mean 0.9"),
        (lambda: state_on(step_size=0.0), "step_size must be positive; got 0.0"),
        (lambda: state_on(step_size=np.array([0.1, 0.2])), r"step_size must be one number; got shape \(2,\)"),
        (lambda: state_on(score="signed"), "score must be one of None, 'absolute', 'scaled'; got 'signed'"),
        (lambda: state_on(score="scaled"), "base is a Point"),
        (lambda: state_on(window=10), "window must be at most the number of calibration rows, 9; got 10"),
        (lambda: state_on(window=0), "window must be at least 1"),
        (lambda: state_on(adaptive.init_aggregated, step_sizes=0.1), "step_sizes must have shape"),
        (lambda: state_on(adaptive.init_aggregated, step_sizes=[0.1, -1.0]), "step_sizes must be positive"),
        (lambda: state_on(adaptive.init_aggregated, horizon=0), "horizon must be at least 1"),
        (lambda: state_on(pid.init, gain=0.0), "gain must be positive"),
        (lambda: state_on(pid.init, saturation=-1.0), "saturation must be positive"),
        (lambda: pid.init(Point(np.zeros(3)), np.zeros(3)), "the gain of the integral is not known"),
        (
            lambda: online.step(state_on(), Point(np.zeros(2)), np.zeros(2)),
            "a step takes one row; got .*jaxcal.online.run",
        ),
        (lambda: online.step(state_on(), Point(0.0), np.nan), "y holds 1 values that are NaN"),
        (lambda: online.run(state_on(), Point(np.zeros(2)), np.zeros(3)), "base.mean has 2 rows where 3"),
    ],
)
def test_mistakes_are_named(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()


def test_predictions_must_be_a_distribution():
    for mistake in (lambda: online.step(state_on(), 0.0, 0.0), lambda: adaptive.init(np.zeros(3), np.zeros(3))):
        with pytest.raises(TypeError, match="Distribution"):
            mistake()


def test_the_integral_has_the_value_of_its_formula():
    assert tracking.saturated_integral(0.4, 9, 2.0, 0.5) == pytest.approx(
        2 * math.tan(0.4 * math.log(10) / 5), rel=1e-5
    )
    assert tracking.saturated_integral(-4.0, 9, 2.0, 0.5) == -np.inf
