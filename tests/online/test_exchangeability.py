"""Test martingales against loops in NumPy and Ville's inequality; checks of new rows against what was done to them."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import lax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import roc_auc_score
from sklearn.naive_bayes import GaussianNB

import jaxcal as jc
from jaxcal.distributions import Normal, Point
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.functional.martingales import p_values
from jaxcal.online import exchangeability, martingales

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-11 if X64 else 2e-5
KEY = jax.random.key(0)
MARTINGALES = {
    "jumper": martingales.jumper,
    "power": martingales.mixture,
    "linear": lambda: martingales.mixture("linear"),
}


# ------------------------------------------------------------------ p-values


@pytest.fixture
def scores(rng):
    """With many ties, and an infinite one."""
    return np.concatenate([np.round(rng.normal(size=60), 1), [np.inf, 0.1]]), rng.uniform(0.01, 1, size=62)


def test_p_values_are_those_of_a_loop(scores):
    scores, tau = scores
    expected = [
        (np.sum(scores[: t + 1] > scores[t]) + tau[t] * np.sum(scores[: t + 1] == scores[t])) / (t + 1)
        for t in range(62)
    ]
    np.testing.assert_allclose(p_values(scores, tau), expected, rtol=EXACT)


def test_p_values_one_by_one(scores):
    scores, tau = scores
    past = martingales.history(scores[:40], capacity=60)
    last, p = lax.scan(lambda past, row: martingales.p_value(past, *row), past, (scores[40:], tau[40:]))
    np.testing.assert_allclose(p[:20], p_values(scores, tau)[40:60], rtol=EXACT)
    assert np.isnan(p[20:]).all()
    with pytest.raises(ValueError, match="the history is full, of 60 scores"):
        martingales.p_value(last, 1.0, 0.5)
    # What is not known counts as the largest.
    _, p = martingales.p_value(past, jnp.nan, 0.5)
    np.testing.assert_allclose(p, 0.5 / 41, rtol=EXACT)


def simulated_p_values(scores, key=KEY):
    """Of many runs [runs, n]."""
    tau = 1 - jax.random.uniform(key, scores.shape, scores.dtype)
    return jax.jit(jax.vmap(p_values))(scores, tau)


def test_p_values_of_exchangeable_scores_are_uniform_and_independent(rng):
    scores = jnp.asarray(np.round(rng.normal(size=(4000, 12)), 1))  # with ties
    p = np.asarray(simulated_p_values(scores), float)
    for t in (0, 3, 11):
        assert scipy.stats.kstest(p[:, t], "uniform").pvalue > 1e-3
    off_diagonal = np.corrcoef(p, rowvar=False) - np.eye(12)
    assert np.abs(off_diagonal).max() < 4.5 / math.sqrt(4000)


# ------------------------------------------------------------------ martingales


def capital_of_a_loop(name, p):
    """The capital after each p-value, without logarithms."""
    if name == "jumper":
        capitals, values = {-1: 1 / 3, 0: 1 / 3, 1: 1 / 3}, []
        for each in p:
            total = sum(capitals.values())
            capitals = {a: (0.99 * c + 0.01 / 3 * total) * (1 + a * (each - 0.5)) for a, c in capitals.items()}
            values.append(sum(capitals.values()))
        return values
    middles = [(k + 0.5) / 20 for k in range(20)]
    if name == "power":
        return np.mean([np.cumprod(a * p ** (a - 1)) for a in middles], axis=0)
    return np.mean([np.cumprod(1 + (4 * a - 2) * (p - 0.5)) for a in middles], axis=0)


@pytest.mark.parametrize("name", MARTINGALES)
def test_martingales_are_those_of_a_loop(name, rng):
    p = rng.uniform(size=80) ** 1.5
    last, log_values = lax.scan(martingales.step, MARTINGALES[name](), jnp.asarray(p))
    expected = np.log(capital_of_a_loop(name, p))
    np.testing.assert_allclose(log_values, expected, rtol=100 * EXACT, atol=100 * EXACT)
    np.testing.assert_allclose(last.log_max, max(0, expected.max()), rtol=100 * EXACT, atol=100 * EXACT)
    state, values = MARTINGALES[name](), []
    for each in p[:3]:
        state, value = martingales.step(state, each)
        values.append(value)
    np.testing.assert_allclose(values, log_values[:3], rtol=EXACT, atol=EXACT)


@pytest.mark.skipif(not X64, reason="a tenth of the integral of a power lies below the least number of 32 bits")
@pytest.mark.parametrize("name", MARTINGALES)
def test_the_mean_factor_of_a_bet_is_one(name):
    """By numerical integration over the next p-value, whatever came before."""
    after, _ = lax.scan(martingales.step, MARTINGALES[name](), jnp.array([0.1, 0.9, 0.3]))
    nodes, weights = np.polynomial.legendre.leggauss(60)
    # p = u^20 for the powers' poles at 0.
    u = (nodes + 1) / 2
    p, weights = u**20, weights / 2 * 20 * u**19
    log_values = jax.vmap(lambda p: martingales.step(after, p)[1])(jnp.asarray(p))
    before = jax.scipy.special.logsumexp(after.log_capitals)
    assert np.sum(weights * np.exp(log_values - before)) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("name", MARTINGALES)
def test_capitals_beyond_all_floats_are_finite_logarithms(name):
    p = jnp.concatenate([jnp.full(20_000, 0.01), jnp.full(5000, 0.5)])
    last, log_values = lax.scan(martingales.step, MARTINGALES[name](), p)
    assert np.isfinite(log_values).all()
    assert last.log_max == log_values.max() > 5000


def maxima(name, scores, calibration):
    """log max M over the rows after the calibration, of every run."""
    p = simulated_p_values(jnp.asarray(scores))[:, calibration:]
    run = lambda p: lax.scan(martingales.step, MARTINGALES[name](), p)[0].log_max
    return np.asarray(jax.jit(jax.vmap(run))(p))


@pytest.mark.parametrize(
    ("name", "runs", "rows"),
    [("jumper", 1000, 150), *(pytest.param(name, 5000, 1000, marks=pytest.mark.slow) for name in MARTINGALES)],
)
def test_false_alarms_are_as_rare_as_villes_inequality_says(name, runs, rows, rng):
    found = maxima(name, np.abs(rng.standard_t(3, size=(runs, rows))).astype(np.float32), 50)
    for probability in (0.5, 0.2, 0.05, 0.01):
        alarms = np.mean(found >= -math.log(probability))
        assert alarms <= probability + 4 * math.sqrt(probability / runs)
    assert np.mean(found >= math.log(2)) > 0.02  # and it does bet


@pytest.mark.parametrize(("name", "factor"), [("jumper", 2.0), ("jumper", 0.5), ("power", 2.0), ("linear", 0.5)])
def test_changes_of_the_noise_are_found(name, factor, rng):
    scores = np.abs(rng.normal(size=(50, 500)))
    scores[:, 250:] *= factor
    assert np.mean(maxima(name, scores, 200) >= math.log(100)) > 0.9


def test_martingales_under_vmap_and_their_options(rng):
    p = jnp.asarray(rng.uniform(0.01, 1, size=(3, 10)))
    run = lambda jump, p: lax.scan(martingales.step, martingales.jumper(jump), p)[1]
    batch = eqx.filter_vmap(run)(jnp.array([0.0, 0.01, 0.1]), p)
    np.testing.assert_allclose(batch[1], run(0.01, p[1]), rtol=100 * EXACT, atol=100 * EXACT)
    for mistake, message in (
        (lambda: martingales.jumper(1.0), "jump must be one number, at least 0 and below 1; got 1.0"),
        (lambda: martingales.mixture("log"), "bet must be one of 'linear', 'power'; got 'log'"),
        (lambda: martingales.mixture(num_strategies=0), "num_strategies must be at least 1"),
        (lambda: martingales.history(np.zeros(3), capacity=2), "capacity must be at least 3"),
    ):
        with pytest.raises(ValueError, match=message):
            mistake()


# ------------------------------------------------------------------ the check with targets


def check_errors(y, new_y, **options):
    zeros = lambda rows: Normal(np.zeros(len(rows)), np.ones(len(rows)))
    return jc.online.check_errors(zeros(y), y, zeros(new_y), new_y, key=KEY, **options)


def test_errors_that_change_are_found_and_said(rng):
    y = rng.normal(size=400)
    y[300:] *= 3
    found = check_errors(y[:200], y[200:])
    assert found.alarm
    assert 100 < found.first_alarm < 160
    assert found.p_value == pytest.approx(math.exp(-found.log_martingale.max()))
    text = str(found)
    assert text.startswith(
        "The errors of 200 new rows were tested for exchangeability with those of 200 calibration rows"
    )
    assert f"reached 100 after new row {found.first_alarm + 1}" in text
    assert "with a probability of at most 1 %" in text
    # It may be repeated: the same rows have the same values when more rows have come.
    before = check_errors(y[:200], y[200:350])
    np.testing.assert_allclose(before.log_martingale, found.log_martingale[:150], rtol=EXACT, atol=EXACT)


def test_errors_that_do_not_change_raise_no_alarm(rng):
    y = rng.normal(size=400)
    found = check_errors(y[:200], y[200:], martingale=martingales.mixture(), significance=0.05)
    assert not found.alarm
    assert found.first_alarm is None
    assert "no evidence against it. The test martingale, which starts at 1, reached" in str(found)
    assert "and not 20" in str(found)


def test_scores_are_those_of_the_base(rng):
    std = np.where(np.arange(400) < 200, 1.0, 3.0)
    y = std * rng.normal(size=400)
    check = lambda make, **options: jc.online.check_errors(
        make(0 * y[:200], std[:200]), y[:200], make(0 * y[200:], std[200:]), y[200:], key=KEY, **options
    )
    assert not check(Normal).alarm
    assert check(Normal, score="absolute").alarm
    assert check(lambda mean, std: Point(mean)).alarm


def test_mistakes_in_checks_of_errors(rng):
    y = rng.normal(size=30)
    with pytest.raises(ValueError, match=r"did you mean 0\.05"):
        check_errors(y, y, significance=5.0)
    with pytest.raises(ValueError, match="base is a Point"):
        jc.online.check_errors(Normal(y, 1.0), y, Point(y), y, key=KEY)
    after_a_bet, _ = martingales.step(martingales.jumper(), 0.1)
    with pytest.raises(ValueError, match="must not have made a bet yet"):
        check_errors(y, y, martingale=after_a_bet)
    with pytest.raises(ValueError, match="out of fold"):
        jc.online.check_errors(marked_out_of_fold(Point(y)), y, Point(y), y, key=KEY)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda y: check_errors(y, y))(y)


def test_large_values_are_shown():
    assert [exchangeability.exponential(x) for x in (0.0, math.log(250), 1000.0)] == ["1.0", "250", "2.0e+434"]


# ------------------------------------------------------------------ the check without targets


class Means(ClassifierMixin, BaseEstimator):
    """The direction between the means of two kinds of rows."""

    def fit(self, x, y):
        self.direction_ = x[y].mean(axis=0) - x[~y].mean(axis=0)
        return self

    def decision_function(self, x):
        return x @ self.direction_


class Memory(ClassifierMixin, BaseEstimator):
    """It recognizes the rows that it was fitted to, and nothing else."""

    def fit(self, x, y):
        self.new_ = {row.tobytes() for row in x[y]}
        return self

    def decision_function(self, x):
        return np.array([float(row.tobytes() in self.new_) for row in x])


def check_inputs(x, new_x, seed=0, **options):
    return jc.online.check_inputs(x, new_x, key=jax.random.key(seed), **{"classifier": Means(), **options})


def test_the_rank_statistic_is_mann_whitneys(rng):
    scores, is_new = rng.normal(size=80), rng.uniform(size=80) < 0.3
    found = exchangeability._rank_statistic(scores, is_new, np.arange(80), rng)
    expected = scipy.stats.mannwhitneyu(
        scores[is_new], scores[~is_new], alternative="greater", method="asymptotic", use_continuity=False
    )
    assert found.wins == pytest.approx(expected.statistic)
    assert scipy.stats.norm.sf(found.excess / math.sqrt(found.variance)) == pytest.approx(expected.pvalue)
    assert found.wins / found.pairs == pytest.approx(roc_auc_score(is_new, scores))


def false_alarms(draw, runs, significance=0.1, **options):
    rng = np.random.default_rng(4)
    return np.mean([check_inputs(*draw(rng), seed=run, **options).p_value <= significance for run in range(runs)])


def within(fraction, probability, runs):
    return fraction <= probability + 3.5 * math.sqrt(probability * (1 - probability) / runs)


@pytest.mark.parametrize("runs", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_false_alarms_of_the_check_of_inputs(runs):
    continuous = lambda rng: (rng.normal(size=(40, 3)), rng.normal(size=(25, 3)))
    few_values = lambda rng: (rng.integers(0, 3, size=(60, 1)), rng.integers(0, 3, size=(30, 1)))
    for draw in (continuous, few_values):
        assert within(false_alarms(draw, runs), 0.1, runs)


@pytest.mark.parametrize("runs", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_copies_are_no_evidence(runs):
    copied = lambda rng: (rng.normal(size=(60, 2)), np.repeat(rng.normal(size=(15, 2)), 4, axis=0))
    for classifier in (Means(), Memory()):
        assert within(false_alarms(copied, runs, classifier=classifier), 0.1, runs)
    # Taken for independent rows they would be.
    each = {"groups": np.arange(60), "new_groups": np.arange(60, 120)}
    assert false_alarms(copied, 20, classifier=Memory(), **each) == 1


def test_rows_of_a_group_are_one_piece_of_evidence():
    def draw(rng):  # groups of four rows, about a center of their own
        centers = np.repeat(rng.normal(size=(30, 2)), 4, axis=0)
        rows = centers + 0.1 * rng.normal(size=(120, 2))
        return rows[:60], rows[60:]

    groups = np.repeat(np.arange(30), 4)
    assert within(false_alarms(draw, 100, groups=groups[:60], new_groups=groups[60:]), 0.1, 100)
    assert not within(false_alarms(draw, 100), 0.1, 100)


@pytest.mark.parametrize("classifier", [None, GaussianNB()])
def test_inputs_that_change_are_found_and_said(classifier, rng):
    x, new_x = rng.normal(size=(300, 2)), rng.normal([1.0, 0.0], size=(200, 2))
    found = check_inputs(x, new_x, classifier=classifier)
    same = check_inputs(x, rng.normal(size=(200, 2)), classifier=classifier)
    assert found.alarm
    assert found.auc > 0.65
    text = str(found)
    assert text.startswith(
        "The inputs of 200 new rows were tested for exchangeability with those of 300 calibration rows"
    )
    assert f"an AUC of {found.auc:.3f} out of fold" in text
    assert not same.alarm
    assert "no evidence against it" in str(same)


def test_another_frequency_of_few_values_is_found(rng):
    x, new_x = (rng.uniform(size=(200, 1)) < 0.5) * 1.0, (rng.uniform(size=(200, 1)) < 0.8) * 1.0
    assert check_inputs(x, new_x).alarm


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda x: check_inputs(x, x[:, :1]), "new_x has 1 columns; the calibration rows have 2"),
        (lambda x: check_inputs(x, x[:9] + 1), "new_x has 9 groups of rows; 10 are needed for 5 folds"),
        (lambda x: check_inputs(x, x + 1, groups=np.zeros(30)), "groups and new_groups go together"),
        (lambda x: check_inputs(x, x + 1, groups=np.zeros(3), new_groups=np.zeros(30)), r"shape \(30,\)"),
        (lambda x: check_inputs(x, x + 1, folds=1), "folds must be at least 2"),
        (lambda x: check_inputs(x, x + 1, significance=1.0), "significance must lie between 0 and 1"),
    ],
)
def test_mistakes_in_checks_of_inputs(mistake, message, rng):
    with pytest.raises(ValueError, match=message):
        mistake(rng.normal(size=(30, 2)))


def test_checks_of_inputs_need_values(rng):
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: check_inputs(x, x))(rng.normal(size=(30, 2)))
