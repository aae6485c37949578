"""The std that is widened by held-out rows: its factor and floor, and that intervals hold on new rows."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import jaxcal as jc
from jaxcal.frames.preprocessing import LogTails, Standardizer
from jaxcal.networks import Widening
from jaxcal.predictors import deep_ensemble, dropout, evidential, mlp, variance_network

pytestmark = pytest.mark.contract_in_32_bits

KEY, ONE = jax.random.key(0), jnp.ones(1)
SETTING = {"key": KEY, "hidden": (32, 32), "max_epochs": 100}
FITS = {
    "joint": variance_network.fit,
    "alternating": partial(variance_network.fit, form="alternating"),
    "deep_ensemble": partial(deep_ensemble.fit, num_members=2),
    "evidential": evidential.fit,
    "dropout": partial(dropout.fit, num_samples=20),
}


def rows(rng, number=2000):
    """Predicted variances and errors whose std is 1.5 times what was predicted."""
    variance = rng.uniform(0.5, 2.0, size=number)
    return variance, 1.5 * np.sqrt(variance) * rng.normal(size=number)


def test_the_factor_is_that_of_the_errors(rng):
    widening = Widening.of(*map(jnp.asarray, rows(rng)))
    np.testing.assert_allclose(widening(ONE), 1.5**2, rtol=0.1)


def test_factor_and_floor_are_those_of_the_greatest_likelihood(rng):
    """Where errors are normal, the intervals ask for no other factor; the optimum is that of scipy."""
    variance = rng.uniform(0.01, 3.0, size=20_000)
    errors = np.sqrt(0.7 * (variance + 0.4)) * rng.normal(size=20_000)
    widening = Widening.of(jnp.asarray(variance), jnp.asarray(errors))

    def cost(logs):
        widened = np.exp(logs[0]) * (variance + np.exp(logs[1]))
        return np.sum(np.log(widened) + errors**2 / widened)

    factor, floor = np.exp(optimize.minimize(cost, np.zeros(2), method="Nelder-Mead").x)
    np.testing.assert_allclose(widening(jnp.asarray(variance)), factor * (variance + floor), rtol=0.1)


def test_students_errors_have_students_factor(rng):
    scale = rng.uniform(0.5, 1.5, size=5000)
    errors = 2 * scale * rng.standard_t(3, size=5000)
    df = np.full(5000, 3.0)
    widening = Widening.of(*map(jnp.asarray, (scale**2, errors)), df=jnp.asarray(df))
    np.testing.assert_allclose(np.sqrt(widening(jnp.asarray(scale**2))), 2 * scale, rtol=0.06)


def test_heavy_tails_do_not_widen_what_holds(rng):
    """The root mean square alone would cover 95 % of Student t errors by intervals for 90 %."""
    errors = rng.standard_t(3, size=20_000)
    widening = Widening.of(jnp.ones(20_000), jnp.asarray(errors))
    inside = np.abs(errors) < stats.norm.ppf(0.95) * np.sqrt(widening(ONE))
    assert 0.9 < inside.mean() < 0.935


def test_few_rows_say_little():
    one = Widening.of(jnp.ones(1), jnp.full(1, 10.0))
    many = Widening.of(jnp.ones(100), jnp.full(100, 10.0))
    assert one(ONE) < 0.5 * many(ONE)
    exact = Widening.of(jnp.ones(100), jnp.zeros(100))
    assert exact(ONE) > 0


def test_what_is_all_but_certain_may_be_wrong(rng):
    """Most rows are predicted exactly: a new one that is not must not have a density of nearly 0."""
    certain = np.arange(1000) < 900
    variance, errors = np.where(certain, 1e-8, 1.0), np.where(certain, 0.0, rng.normal(size=1000))
    widening = Widening.of(jnp.asarray(variance), jnp.asarray(errors))
    assert np.sqrt(widening(jnp.asarray([1e-8]))) > 0.005 * np.std(errors)


def test_no_variance_below_those_of_the_rows(rng):
    """A network may predict any far from all rows, next to none, too."""
    variance, errors = rows(rng)
    widening = Widening.of(jnp.asarray(variance), jnp.asarray(errors))
    np.testing.assert_allclose(widening(jnp.asarray([1e-9])), widening(jnp.asarray([variance.min()])))


def test_the_least_variance_of_a_mixture_is_that_of_the_whole(rng):
    """Members may be more certain where they differ."""
    means, variances = rng.normal(size=(3, 400)), rng.uniform(0.1, 0.2, size=(3, 400))
    whole = means.var(axis=0) + variances.mean(axis=0)
    widening = Widening.of_mixture(jnp.asarray(means), jnp.asarray(variances), jnp.asarray(rng.normal(size=400)))
    for scale in (1.0, 1e-6):
        members = widening.of_members(jnp.asarray(scale**0.5 * means), jnp.asarray(scale * variances))
        mixed = np.var(members[0], axis=0) + np.mean(members[1], axis=0)
        np.testing.assert_allclose(mixed, widening(jnp.asarray(scale * whole)), rtol=1e-5)
        np.testing.assert_allclose(np.mean(members[0], axis=0), scale**0.5 * means.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_there_have_no_part(rng):
    variance, errors = rows(rng, 50)
    padded = np.r_[variance, np.full(7, 1e6)], np.r_[errors, np.full(7, 1e6)]
    included = np.arange(57) < 50
    few = Widening.of(*map(jnp.asarray, (variance, errors)))
    same = Widening.of(*map(jnp.asarray, padded), weights=jnp.asarray(included, float))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), few, same)


def test_a_weight_is_a_number_of_rows(rng):
    variance, errors = rows(rng, 400)
    twice = Widening.of(*(jnp.asarray(np.repeat(part, 2)) for part in (variance, errors)))
    weighed = Widening.of(jnp.asarray(variance), jnp.asarray(errors), weights=jnp.full(400, 2.0))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-2), twice, weighed)


def wide_table(rng, number):
    """Many columns, of which a network learns its training rows by heart."""
    x = rng.normal(size=(number, 20))
    return x, x[:, 0] + np.sin(2 * x[:, 1]) * x[:, 2] + 0.3 * rng.normal(size=number)


@pytest.mark.parametrize("method", FITS)
def test_intervals_hold_on_new_rows(method, rng):
    x, y = wide_table(rng, 500)
    new_x, new_y = wide_table(rng, 4000)
    distribution = FITS[method](x, y, **SETTING)(new_x)
    assert 0.84 < jc.metrics.coverage(new_y, distribution, confidence_level=0.9) < 0.96
    assert jc.metrics.nlpd(new_y, distribution) < -stats.norm.logpdf(new_y, y.mean(), y.std()).mean()


@pytest.mark.parametrize("method", FITS)
def test_far_from_all_rows_no_std_is_less_than_among_them(method, rng):
    x, y = wide_table(rng, 500)
    fitted = FITS[method](x, y, **SETTING)
    spread = lambda x: np.asarray(getattr(fitted(x), "scale", fitted(x).std))
    directions = rng.normal(size=(2000, 20))
    assert spread(30 * directions).min() >= 0.999 * spread(x).min()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["joint", "dropout"])
def test_rows_far_away_explode_no_score(method, rng):
    """Columns with tails so heavy that new rows lie hundreds of standard deviations away."""
    draw = lambda number: rng.standard_t(1, size=(number, 30))
    x, new_x = draw(500), draw(2000)
    y, new_y = (np.tanh(part[:, 0]) + 0.1 * rng.normal(size=len(part)) for part in (x, new_x))
    distribution = FITS[method](x, y, **SETTING)(new_x)
    assert jc.metrics.nlpd(new_y, distribution) < -stats.norm.logpdf(new_y, y.mean(), y.std()).mean()


def test_the_tails_of_inputs_are_logarithmic(rng):
    values = rng.normal(size=(1000, 3)) * [1.0, 5.0, 0.0]
    values[3, 0] = 1e6
    inputs = LogTails.of(values)
    clipped = np.clip(values[:, 1], *np.quantile(values[:, 1], [0.005, 0.995]))
    z = (values[:, 1] - clipped.mean()) / clipped.std(ddof=1)
    expected = np.where(np.abs(z) <= 3, z, np.sign(z) * 3 * (1 + np.log(np.abs(z) / 3)))
    np.testing.assert_allclose(inputs(values)[:, 1], expected, atol=1e-4)
    # One value of a million neither hides the others nor is far from them.
    assert 0.9 < np.std(np.delete(inputs(values)[:, 0], 3)) < 1.2
    assert inputs(values)[3, 0] < 45
    np.testing.assert_array_equal(inputs(values)[:, 2], 0)
    gradient = jax.grad(lambda x: inputs(x[None]).sum())(jnp.asarray([0.0, 1e6, 0.0]))
    assert np.isfinite(gradient).all()


def test_a_column_that_is_constant_but_for_its_tails_keeps_them():
    column = np.zeros((1000, 1))
    column[7] = 1.0
    scaled = LogTails.of(column)(column)
    assert scaled[7] - scaled[0] > 3
    assert Standardizer.of(column)(column)[7] > 3


@pytest.mark.parametrize("harm", ["outlier", "constant", "duplicated"])
def test_a_bad_column_harms_nothing(harm, rng):
    draw = lambda number: rng.uniform(-1, 1, size=(number, 2))
    x, new_x = draw(400), draw(1000)
    target = lambda x: np.sin(3 * x[:, 0]) + x[:, 1]
    y, new_y = target(x), target(new_x)
    error = lambda x, new_x: jc.metrics.rmse(new_y, mlp.fit(x, y, key=KEY, max_epochs=60)(new_x))
    alone = error(x, new_x)
    bad = x.copy()
    if harm == "outlier":
        bad[5, 0] = 1e6
        assert error(bad, new_x) < 0.1 * np.std(new_y)
    else:
        further = lambda x: np.c_[x, np.full(len(x), 0.1) if harm == "constant" else x[:, 0]]
        assert error(further(bad), further(new_x)) < 1.5 * alone


def test_scales_of_inputs_are_part_of_the_weights(rng):
    """An input that matters gets a greater scale than one that does not; the network has no further parameters."""
    x = rng.normal(size=(500, 10))
    network = mlp.fit(x, np.sin(2 * x[:, 0]), key=KEY, max_epochs=50).network
    norms = np.linalg.norm(network.layers[0].weight, axis=0)
    assert norms[0] > 1.5 * norms[1:].max()
    assert len(jax.tree.leaves(eqx.filter(network, eqx.is_array))) == 6
