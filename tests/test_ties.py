"""Targets that are equal in many rows: an interval that ends at such a value contains it, whatever rounding does."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxcal as jc
from jaxcal._numpy import by_numpy
from jaxcal.distributions._base import ROUNDINGS, rounded_outward
from jaxcal.functional import rounding

RNG = np.random.default_rng(5)
NUM, LEVEL, KEY = 100, 0.9, jax.random.key(0)
# Means and stds of which single precision loses the value 0 in more than half.
PAIRS = [*zip(RNG.uniform(0.01, 0.5, 12), RNG.uniform(0.1, 2, 12), strict=True)]
X = RNG.uniform(size=(NUM, 2))
# 0 in nine of ten rows and more, so that both ends of the interval of nine of ten rows are the score of 0.
RARE = np.where(np.arange(NUM) % 25 == 7, RNG.gamma(2, size=NUM), 0.0)


def normal(mean, std, num=NUM):
    return jc.Normal(np.full(num, mean), np.full(num, std))


def student_t(mean, std, num=NUM):
    return jc.StudentT(5.0, np.full(num, mean), np.full(num, std))


def mixture(mean, std, num=NUM):
    stack = lambda a: jnp.stack([jnp.full(num, a), jnp.full(num, 1.5 * a)])
    return jc.Mixture(jax.vmap(jc.Normal)(stack(mean), stack(1 + std)))


def quantiles(mean, std, num=NUM):
    levels = np.array([0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95])
    return jc.Quantiles(levels, np.broadcast_to(mean + std * stats.norm.ppf(levels), (num, 7)))


def of_groups(fit, **options):
    return partial(fit, by=lambda x: x[:, 0] > 0.5, **options)


def sharp_gp(x, base, y):
    """At one place, where all rows have one width, and equal errors equal scores."""
    options = {"x_train": X[:30], "y_train": X[:30, 0], "kernel": jc.sharp_gp.KernelAndNoise(0.5, 0.1)}
    fitted = jc.sharp_gp.fit(0 * x, base, y, **options)
    return lambda x, base: fitted(0 * x, base)


conformal, conditional = jc.conformal.fit, jc.conditional_conformal.fit
CALIBRATORS = {
    "scaled": (conformal, normal),
    "absolute": (partial(conformal, score="absolute"), normal),
    "signed": (partial(conformal, score="signed"), normal),
    "quantile": (partial(conformal, score="quantile", confidence_levels=[0.5, LEVEL]), quantiles),
    "groups": (of_groups(conformal), normal),
    "signed by groups": (of_groups(conformal, score="signed"), normal),
    "quantile by groups": (of_groups(conformal, score="quantile", confidence_levels=[LEVEL]), quantiles),
    "weights": (partial(conformal, weights=lambda x: 1 + x[:, 1]), normal),
    "linear": (partial(conformal, rule="linear"), normal),
    "linear by groups": (of_groups(conformal, rule="linear"), normal),
    "linear cdf": (partial(conformal, rule="linear", score="cdf"), student_t),
    "randomized": (partial(conformal, rule="randomized", key=KEY), normal),
    "randomized cdf": (partial(conformal, rule="randomized", score="cdf", key=KEY), mixture),
    "crude": (jc.crude.fit, normal),
    "crude by cdf": (partial(jc.crude.fit, score="cdf"), student_t),
    "crude of neighbors": (partial(jc.crude.fit, neighbors=60), normal),
    "CRUDE": (partial(jc.crude.fit, preset="paper"), normal),
    "isotonic": (jc.isotonic.fit, normal),
    "isotonic by cdf": (partial(jc.isotonic.fit, score="cdf"), mixture),
    "isotonic by groups": (of_groups(jc.isotonic.fit), normal),
    "conditional": (partial(conditional, features=lambda x: x[:, 0] > 0.5, confidence_levels=[LEVEL]), normal),
    "sharp_gp": (sharp_gp, normal),
}


@pytest.mark.parametrize("name", CALIBRATORS)
@pytest.mark.filterwarnings("ignore:.*PIT values are 0 or 1:UserWarning")
def test_an_interval_holds_the_value_that_most_calibration_rows_have(name):
    fit, base_of = CALIBRATORS[name]
    for mean, std in PAIRS:
        base = base_of(mean, std)
        forecast = fit(X, base, RARE)(X, base)
        for lower, upper in (forecast.interval(LEVEL), forecast.icdf(np.array([0.05, 0.95])).T):
            assert ((lower <= 0) & (upper >= 0)).all()
        # One end is that value, to rounding; intervals around the mean have the other one as far away.
        rounding_of_ends = 100 * float(jnp.finfo(forecast.mean.dtype).eps) * (mean + std)
        assert np.abs(np.asarray(forecast.interval(LEVEL))).min(0).max() < rounding_of_ends, name


# Others are given by some quantiles, on straight lines between them.
TABLES = sorted({*CALIBRATORS} - {"quantile", "quantile by groups", "conditional", "sharp_gp"})


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.filterwarnings("ignore:.*PIT values are 0 or 1:UserWarning")
def test_the_cdf_reaches_the_level_of_its_quantile(name):
    fit, base_of = CALIBRATORS[name]
    levels = np.array([0.5, 0.75, 0.9, 0.95])
    for mean, std in PAIRS[:4]:
        base = base_of(mean, std)
        forecast = fit(X, base, RARE)(X, base)
        slack = 16 * float(jnp.finfo(forecast.mean.dtype).eps)  # of sums of weights, and of lines between values
        for level in levels:
            assert (forecast.cdf(forecast.icdf(level)) >= level - slack).all()


def test_an_end_is_moved_by_a_few_units_in_its_last_place_and_an_infinite_one_not_at_all():
    ends = jnp.array([1.0, -1e30, 0.0, jnp.inf, -jnp.inf])
    moved = np.asarray(rounding.outward(ends, jnp.array([1, -1, 1, 1, -1]), jnp.array([0.1, 1.0, 0.0, 1.0, 2.0])))
    units = np.abs(moved[:2] - np.asarray(ends)[:2]) / np.spacing(np.abs(np.asarray(ends)[:2]))
    assert ((units >= 2) & (units <= 8)).all()
    np.testing.assert_array_equal(moved[2:], ends[2:])
    assert jax.grad(lambda end: rounding.outward(end, 1, jnp.ones(())))(jnp.array(3.0)) == 1


@pytest.mark.parametrize("side", [1, -1, ROUNDINGS, -ROUNDINGS])
def test_numpy_and_a_program_move_ends_to_the_same_bit(side, rng):
    ends, *sizes = jnp.asarray(rng.normal(size=(3, 1000)) * 10.0 ** rng.integers(-8, 8, (3, 1000)))
    move = lambda ends, *sizes: rounded_outward(ends, side, *sizes)
    found = by_numpy(move, ends, *sizes)
    np.testing.assert_array_equal(found, jax.jit(move)(ends, *sizes))
    assert (side * (found - ends) > 0).all()


@pytest.mark.parametrize("score", ["absolute", "scaled", "signed"])
def test_widths_of_continuous_targets_grow_by_rounding_only(score):
    y = np.random.default_rng(0).normal(size=NUM)
    base = normal(3.0, 0.7)
    forecast = conformal(None, base, y, score=score)(None, base)
    lower, upper = map(np.asarray, forecast.interval(LEVEL))
    z = np.asarray(forecast.z, float) * (1 if score == "absolute" else float(base.std[0]))
    low, high = (z[len(z) // 2 - 91], z[len(z) // 2 + 90]) if score != "signed" else (z[4], z[95])
    eps = float(jnp.finfo(base.mean.dtype).eps)
    np.testing.assert_allclose(lower, float(base.mean[0]) + low, rtol=0, atol=32 * eps)
    np.testing.assert_allclose(upper, float(base.mean[0]) + high, rtol=0, atol=32 * eps)


@eqx.filter_jit
def interval_of(fit, base, y):
    return fit(None, base, y)(None, base).interval(LEVEL)


@pytest.mark.parametrize("fit", [conformal, jc.crude.fit, jc.isotonic.fit], ids=["conformal", "crude", "isotonic"])
def test_a_compiled_fit_holds_it_too(fit):
    for mean, std in PAIRS:
        lower, upper = interval_of(fit, normal(mean, std), RARE)
        assert ((lower <= 0) & (upper >= 0)).all()


def test_the_quantile_of_the_rule_that_inverts_the_cdf_is_a_value_of_the_table():
    table = jnp.array([-0.3, 0.1, 0.7])
    distribution = jc.Empirical(jnp.full(2, 0.3), 1.7, table)
    at = distribution.loc + 1.7 * table[1]
    np.testing.assert_array_equal(distribution.icdf(0.5), at)
    np.testing.assert_array_equal(distribution.cdf(at), np.float32(2) / 3 if at.dtype == np.float32 else 2 / 3)
    lower, upper = distribution.interval(0.1)
    assert (lower < at).all()
    assert (at < upper).all()


def test_a_value_far_out_where_the_cdf_is_the_same_for_many_lies_inside():
    base = jc.StudentT(5.0, np.zeros(NUM), np.ones(NUM))
    eps = float(jnp.finfo(base.mean.dtype).eps)
    far = float(stats.t.isf(2 * eps, 5))  # two steps of the cdf below 1
    y = np.where(np.arange(NUM) < 30, far, stats.t.ppf(np.linspace(0.1, 0.9, NUM), 5))
    for options in ({"rule": "linear"}, {"rule": "randomized", "key": KEY}):
        forecast = conformal(None, base, y, score="cdf", **options)(None, base)
        assert (np.asarray(forecast.icdf(0.9)) >= y[0]).all()


@pytest.mark.parametrize("score", ["signed", "cdf"])
def test_randomized_pit_values_are_uniform_where_scores_are_equal(score):
    rng, rows = np.random.default_rng(2), 2000
    y = lambda size: np.where(rng.uniform(size=size) < 0.6, 0.0, rng.gamma(2, size=size))
    values = []
    for key in range(10):
        base = student_t(0.3, 0.8, 200)
        calibrate = conformal(None, base, y(200), rule="randomized", score=score, key=jax.random.key(key))
        new = student_t(0.3, 0.8, rows)
        values.append(np.asarray(calibrate(None, new).cdf(y(rows))))
    # Of one calibration set they are not: in the mean of all sets they are.
    quantiles = np.quantile(np.concatenate(values), np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(quantiles, np.linspace(0.1, 0.9, 9), atol=0.03)


@pytest.mark.parametrize("base_of", [student_t, mixture])
def test_probabilities_that_ranks_are_drawn_from_are_to_the_bit_those_of_a_program(base_of, rng):
    base, y = base_of(0.3, 0.8), jnp.asarray(rng.normal(size=NUM))
    of_a_program = jax.jit(lambda base, y: jnp.sort(base.cdf(y)))(base, y)
    fitted = conformal(None, base, y, score="cdf", rule="randomized", key=jax.random.key(0))
    np.testing.assert_array_equal(fitted(None, base).u, of_a_program)


@pytest.mark.parametrize("base_of", [student_t, mixture])
def test_a_program_counts_targets_that_numpy_has_seen(base_of, rng):
    """A probability may be another one to rounding, and yet its own row counts."""
    base, y = base_of(0.3, 0.8), jnp.asarray(rng.normal(size=NUM))
    levels = jnp.arange(1, NUM + 1) / (NUM + 1)
    order = jnp.argsort(base.cdf(y))
    fitted = conformal(None, base, y, score="cdf", rule="linear")(None, base)
    for cdf in (fitted.cdf, jax.jit(lambda y, fitted=fitted: fitted.cdf(y))):
        assert (cdf(y)[order] >= levels).all()


def test_features_of_another_dtype_follow_the_rows():
    x, y = X.astype(np.float32), RARE.astype(np.float32)
    base = jc.Normal(np.full(NUM, np.float32(0.1)), np.ones(NUM, np.float32))
    options = {"features": lambda x: x[:, 0] > 0.5, "confidence_levels": [LEVEL]}
    lower, upper = conditional(x, base, y, **options)(x, base).interval(LEVEL)
    assert lower.dtype == np.float32
    assert ((lower <= 0) & (upper >= 0)).all()


def test_cross_conformal_intervals_hold_it():
    x = np.random.default_rng(0).uniform(size=(NUM, 1))
    fit_mean = lambda x, y, key: lambda x: np.full(len(x), np.asarray(y).mean() + 0.07)
    for seed in range(5):
        fitted = jc.cross_conformal.fit(fit_mean, x, RARE, key=jax.random.key(seed), folds=10)
        forecast = fitted(x)
        lower, upper = forecast.interval(LEVEL)
        assert ((lower <= 0) & (upper >= 0)).all()
        # Half of the table is below the centers, and 0 in nine of ten rows of that half.
        assert (forecast.cdf(0.0) >= 0.45).all()


def test_bootstrapped_models_hold_a_row_that_comes_again():
    x = np.random.default_rng(0).uniform(size=(NUM, 1))
    y = np.sin(5 * x[:, 0])

    def fit_line(x, y, key):
        slope, intercept = np.polyfit(np.asarray(x)[:, 0], np.asarray(y), 1)
        return lambda x: intercept + slope * np.asarray(x)[:, 0]

    forecast = jc.cross_conformal.fit_bootstrap(fit_line, x, y, key=KEY, num_models=20)(x)
    # A row's own error ends at its target: of all rows the largest error's row is at an end of its interval.
    lower, upper = map(np.asarray, forecast.interval(1 - 1 / (NUM + 1)))
    assert ((lower <= y) & (y <= upper)).all()


@pytest.mark.parametrize("init", [jc.online.adaptive.init, jc.online.adaptive.init_aggregated, jc.online.pid.init])
def test_intervals_that_follow_the_rows_hold_it(init):
    for mean, std in PAIRS:
        base = normal(mean, std)
        lower, upper = init(base, RARE, confidence_level=LEVEL).interval(base)
        assert ((lower <= 0) & (upper >= 0)).all()


def test_intervals_of_a_component_hold_it():
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.999, 0.9], [0.999, 1.0, 0.9], [0.9, 0.9, 1.0]])
    for mean in rng.uniform(-0.5, 0.5, (10, 3)):
        base = jc.MultivariateNormal(np.broadcast_to(mean, (NUM, 3)), np.broadcast_to(covariance, (NUM, 3, 3)))
        y = np.where(rng.uniform(size=(NUM, 1)) < 0.95, 0.0, rng.normal(size=(NUM, 3)))
        forecast = jc.crude.fit(None, base, y)(None, base)
        for component in range(3):
            lower, upper = forecast.marginal(component).interval(LEVEL)
            assert ((lower <= 0) & (upper >= 0)).all()


def test_a_split_of_the_rows_covers_what_its_guarantee_says():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 2))
    y = np.where(rng.uniform(size=400) < 0.95, 0.0, rng.gamma(2, size=400))
    constant = lambda x, y: lambda x: jc.Normal(np.full(len(x), 0.07), np.full(len(x), 0.7846))
    fitted = jc.pipeline.fit(x, y, predictor=constant, method="split", key=KEY)
    lower, upper = fitted(x).interval(LEVEL)
    assert np.mean((lower <= y) & (y <= upper)) >= fitted.guarantee(LEVEL).coverage - 0.05
