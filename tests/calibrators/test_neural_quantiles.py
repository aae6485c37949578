"""The network that returns recalibrated quantiles: what it learns from simulated errors of known distribution."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal.calibrators import neural_quantiles
from jaxcal.distributions import Empirical, Normal, Point, Quantiles
from jaxcal.optimize import Result

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
LEVELS = np.arange(1, 200) / 200
# All fits and predictions are of so many rows: they share what is compiled.
ROWS = 600


def skewed(seed):
    """Means, stds and targets: a distribution of mean 0 and std 1 that is skewed to the right, of stds from 0.2 to
    0.8."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=ROWS)
    mean, std = 3 * np.sin(2 * x), 0.2 + 0.3 * np.abs(x)
    return mean, std, mean + std * (rng.gamma(2.0, size=ROWS) - 2) / np.sqrt(2)


MEAN, STD, Y = skewed(0)


def fit(base, y=Y, *, key=KEY, pretraining_epochs=100, **options):
    return neural_quantiles.fit(None, base, y, key=key, pretraining_epochs=pretraining_epochs, **options)


@pytest.fixture(scope="module")
def overconfident():
    """Fitted to a base whose stds are half the true ones."""
    return fit(Normal(MEAN, STD / 2))


def mean_pinball(y, quantiles):
    errors = y[:, None] - np.asarray(quantiles)
    return np.mean(np.maximum(LEVELS * errors, (LEVELS - 1) * errors))


def at(distribution, level):
    """The quantiles at one of the levels above."""
    return np.asarray(distribution.values)[:, round(200 * level) - 1]


def test_a_known_miscalibration_is_corrected(overconfident):
    coverages, scores = [], []
    for seed in range(1, 5):
        mean, std, y = skewed(seed)
        distribution = overconfident(None, Normal(mean, std / 2))
        coverages.append(
            [np.mean((y >= at(distribution, 0.5 - c / 2)) & (y <= at(distribution, 0.5 + c / 2))) for c in (0.5, 0.9)]
        )
        base = mean[:, None] + std[:, None] / 2 * scipy.stats.norm.ppf(LEVELS)
        truth = mean[:, None] + std[:, None] * (scipy.stats.gamma(2.0).ppf(LEVELS) - 2) / np.sqrt(2)
        scores.append([mean_pinball(y, quantiles) for quantiles in (base, distribution.values, truth)])
    # The base covers 26 % and 62 %.
    np.testing.assert_allclose(np.mean(coverages, axis=0), [0.5, 0.9], atol=0.04)
    before, after, best = np.mean(scores, axis=0)
    assert best < after < best + 0.4 * (before - best)
    # The distribution is skewed, as the errors are: the true distances of these quantiles from the median are 0.94 and
    # 2.2 stds.
    below, above = at(distribution, 0.5) - at(distribution, 0.05), at(distribution, 0.95) - at(distribution, 0.5)
    assert np.mean(above / std) > 1.4 * np.mean(below / std)


def test_distributions_that_differ_are_corrected_differently():
    # One std of the errors, which the base knows in half of the rows, and takes for three times as large in the others:
    # no map of its levels alone is right for both.
    std = np.where(np.arange(ROWS) % 2, 1.0, 3.0)
    base = Normal(np.zeros(ROWS), std)
    distribution = fit(base, np.random.default_rng(1).normal(size=ROWS))(None, base)
    widths = at(distribution, 0.9) - at(distribution, 0.1)
    np.testing.assert_allclose([widths[0], widths[1]], 2 * scipy.stats.norm.ppf(0.9), rtol=0.2)


@pytest.mark.parametrize(
    "z", [pytest.param(scipy.stats.norm.ppf(LEVELS), marks=pytest.mark.slow), scipy.stats.gamma(2.0).ppf(LEVELS)]
)
def test_without_targets_the_base_is_repeated(z):
    distribution = lambda mean, std: Quantiles(LEVELS, mean[:, None] + std[:, None] * z)
    mean, std, _ = skewed(1)
    base = distribution(mean, std)
    # Other targets change nothing but the units.
    for y in (Y, -Y):
        fitted = fit(distribution(MEAN, STD), y, max_epochs=0, pretraining_epochs=400)
        distance = np.asarray(fitted(None, base).values - base.values) / std[:, None]
        assert np.sqrt(np.mean(distance**2)) < 0.07
        assert np.abs(distance[:, 9:-9]).max() < 0.3
        assert int(fitted.training.epochs) == 0
        assert np.isinf(fitted.training.validation_loss)


@pytest.mark.slow
def test_quantiles_that_cross_are_put_in_order(overconfident):
    # Weights that have learned nothing give curves that go up and down.
    shaken = jax.tree.map(lambda leaf: jnp.sin(1e3 * leaf + 1), overconfident.network)
    fitted = eqx.tree_at(lambda fitted: fitted.network, overconfident, shaken)
    base = Normal(MEAN, STD / 2)
    deciles = np.asarray(base.icdf(np.arange(1, 10) / 10))
    features = deciles - deciles[:, 4:5]
    features[:, 4] = deciles[:, 4]
    z = jnp.asarray(scipy.stats.norm.ppf(LEVELS), fitted.unit.dtype)
    curves = jax.vmap(lambda row: jax.vmap(shaken, (None, 0))(row, z))(fitted.scaler(jnp.asarray(features)))
    raw = MEAN[:, None] + np.asarray(fitted.unit * curves)
    assert np.mean(np.diff(raw, axis=1) < 0) > 0.1
    values = fitted(None, base).values
    assert np.diff(values, axis=1).min() >= 0
    np.testing.assert_allclose(values, np.sort(raw, axis=1), atol=1e-10 if X64 else 1e-4)
    assert mean_pinball(Y, values) < mean_pinball(Y, raw)


def test_levels_are_those_asked_for(overconfident):
    base = Normal(MEAN, STD / 2)
    levels = [0.05, 0.25, 0.5, 0.9]
    distribution = fit(base, levels=levels)(None, base)
    assert isinstance(distribution, Quantiles)
    np.testing.assert_allclose(distribution.levels, levels, rtol=1e-6)
    # But for quantiles that cross.
    np.testing.assert_allclose(
        distribution.values, np.stack([at(overconfident(None, base), p) for p in levels], 1), atol=0.02
    )


def test_widths_that_are_all_the_same_are_no_numbers_to_divide_by():
    # The deciles' distances from the median are one number each, but for their rounding.
    options = {"max_epochs": 1, "pretraining_epochs": 2}
    predict = lambda a, b: fit(Normal(a * MEAN + b, 0.3 * a * np.ones(ROWS)), a * Y + b, **options)(
        None, Normal(a * MEAN + b, a * np.linspace(0.2, 0.5, ROWS))
    )
    before, after = predict(1.0, 0.0), predict(1000.0, 7.0)
    assert np.abs(before.values - MEAN[:, None]).max() < 10
    # In 32 bits the rounding is large enough to be learned, and shows at widths that were not in the rows.
    np.testing.assert_allclose((after.values - 7) / 1000, before.values, atol=1e-6 if X64 else 0.2)


def test_targets_equal_to_the_medians_make_the_distribution_narrow():
    base = Normal(MEAN, STD)
    distribution = fit(base, MEAN)(None, base)
    assert np.mean(distribution.std) < 0.1 * np.mean(STD)


@pytest.mark.slow
def test_many_keys_at_once_and_each_key_its_own_result():
    base = Normal(MEAN, STD / 2)
    few = {"max_epochs": 3, "pretraining_epochs": 0}
    keys = jax.random.split(KEY, 2)
    together = eqx.filter_vmap(lambda key: fit(base, key=key, **few))(keys)
    values = eqx.filter_vmap(lambda fitted: fitted(None, base).values)(together)
    for key, own in zip(keys, values, strict=True):
        np.testing.assert_allclose(own, fit(base, key=key, **few)(None, base).values, atol=1e-8 if X64 else 1e-2)
    assert np.abs(values[0] - values[1]).max() > 1e-2
    first, again = (fit(base, key=keys[0], **few) for _ in range(2))
    assert eqx.tree_equal(first, again)


@pytest.mark.slow
def test_rows_of_little_weight_are_little_learned_from(overconfident):
    # Errors of two sizes, of which the base says nothing.
    rare = np.arange(ROWS) % 2 == 0
    base, y = Normal(np.zeros(ROWS), STD), np.where(rare, 4, 1) * STD * np.random.default_rng(1).normal(size=ROWS)
    distribution = fit(base, y, weights=np.where(rare, 1e-3, 5.0))(None, base)
    half_widths = (at(distribution, 0.9) - at(distribution, 0.1)) / STD / 2
    np.testing.assert_allclose(np.median(half_widths), scipy.stats.norm.ppf(0.9), rtol=0.2)
    equal = fit(Normal(MEAN, STD / 2), weights=np.full(ROWS, 0.1))
    assert eqx.tree_equal(equal, overconfident)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, 1 + STD**2], ids=["equal", "weighted"])
def test_the_paper_trains_for_all_its_epochs_on_all_rows(weights):
    base = Normal(MEAN, STD / 2)
    fitted = fit(base, preset="paper", pretraining_epochs=5, weights=weights)
    assert int(fitted.training.epochs) == 200
    assert int(fitted.training.result) == Result.STEP_LIMIT
    # 0.05, 0.1, ..., 0.95, of the rows that it was trained on.
    watched = np.asarray(fitted(None, base).values)[:, 9::10]
    errors, levels = (Y[:, None] - watched) / float(fitted.unit), LEVELS[9::10]
    loss = np.average(np.maximum(levels * errors, (levels - 1) * errors).mean(1), weights=weights)
    # But for quantiles that cross.
    np.testing.assert_allclose(loss, fitted.training.validation_loss, rtol=1e-2)


def test_divergence_is_reported():
    base, rate = Normal(MEAN, STD), 1e150 if X64 else 1e30
    with pytest.raises(FloatingPointError, match="training diverged"):
        fit(base, learning_rate=rate)
    for epochs in ({"max_epochs": 5, "pretraining_epochs": 0}, {"max_epochs": 0, "pretraining_epochs": 5}):
        fitted = fit(base, learning_rate=rate, throw=False, **epochs)
        assert int(fitted.training.result) == Result.NOT_FINITE


@pytest.mark.parametrize(
    ("base", "y", "options", "message"),
    [
        (Normal(MEAN, STD), Y[:-1], {}, "y has 599 rows where 600 are expected"),
        (Normal(MEAN, STD), np.full(ROWS, np.nan), {}, "y holds 600 values that are NaN or infinite"),
        (Normal(MEAN, STD), Y[:, None], {}, r"y must have shape \(n,\); got \(600, 1\)"),
        (Normal(MEAN, 0 * STD), Y, {}, "base.std is 0 in every row"),
        (Point(MEAN), Y, {}, "base is a Point, whose quantiles are all its mean: it must have a std"),
        (Normal(MEAN[:1], STD[:1]), Y[:1], {}, "a validation_fraction of 0.2 leaves 0 of 1 rows"),
        (Empirical(MEAN, STD, np.arange(3.0), "conformal"), Y, {}, r"base.icdf\(levels\) holds .* infinite"),
        (Normal(MEAN, STD), Y, {"levels": []}, r"levels must be a vector of at least one level; got shape \(0,\)"),
        (Normal(MEAN, STD), Y, {"levels": [0.0, 0.5]}, "levels must lie between 0 and 1; got 0"),
        (Normal(MEAN, STD), Y, {"levels": [5.0, 95.0]}, "levels must lie between 0 and 1; got 5: did you mean 0.05"),
        (Normal(MEAN, STD), Y, {"levels": [0.5, 0.1]}, r"levels must be strictly increasing; got \[0.5, 0.1\]"),
        (Normal(MEAN, STD), Y, {"max_epochs": -1}, "max_epochs must be at least 0; got -1"),
        (Normal(MEAN, STD), Y, {"pretraining_epochs": -1}, "pretraining_epochs must be at least 0; got -1"),
        (Normal(MEAN, STD), Y, {"patience": 0}, "patience must be at least 1; got 0"),
        (Normal(MEAN, STD), Y, {"learning_rate": 0.0}, "learning_rate must be positive; got 0"),
        (Normal(MEAN, STD), Y, {"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1; got 1"),
        (Normal(MEAN, STD), Y, {"weights": -STD}, "weights must not be negative"),
        (Normal(MEAN, STD), Y, {"weights": lambda x: x}, "x is None, but weights is a function of x"),
        (Normal(MEAN, STD), Y, {"preset": "usnrt"}, "preset must be one of None, 'paper'; got 'usnrt'"),
    ],
)
def test_mistakes_are_named(base, y, options, message):
    with pytest.raises(ValueError, match=message):
        fit(base, y, **options)


def test_mistakes_in_a_prediction_are_named(overconfident):
    with pytest.raises(ValueError, match="base is a Point"):
        overconfident(None, Point(MEAN))
    with pytest.raises(ValueError, match=r"base\.std is 0 in every row"):
        overconfident(None, Normal(MEAN, 0 * STD))
