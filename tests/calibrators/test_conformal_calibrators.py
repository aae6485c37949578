"""Conformal calibrators, randomized and linear: against loops, scipy and simulation."""

import math
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal.calibrators import conformal
from jaxcal.distributions import Empirical, Mixture, Normal, Point, Quantiles, Recalibrated, ScaledQuantiles, StudentT
from jaxcal.functional import quantiles

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-12 if X64 else 1e-5
KEY = jax.random.key(5)
RNG = np.random.default_rng(20)
SIZE = 24
# Calibration rows, new rows, and levels that are multiples of 1 / 25 or lie between them or beyond.
MEAN, STD = RNG.normal(size=SIZE), RNG.uniform(0.5, 2, size=SIZE)
Y = MEAN + STD * RNG.standard_t(4, size=SIZE)
NEW_MEAN, NEW_STD = RNG.normal(size=6), RNG.uniform(0.5, 2, size=6)
STEPS = np.arange(1, SIZE + 1) / (SIZE + 1)
P = np.array([0.011, 0.05, 0.2, 0.333, 0.5, 0.71, 0.9, 0.995])
BASES = {
    "normal": Normal,
    "point": lambda mean, std: Point(mean),
    "student_t": lambda mean, std: StudentT(2 + 3 * std, mean, std),
}

read = jax.jit(lambda distribution, p: distribution.icdf(p))
probe = jax.jit(
    lambda distribution, y: (
        distribution.cdf(y),
        distribution.mean,
        distribution.std,
        distribution.crps(y),
        distribution.log_prob(y),
    )
)


def distribution_of(name, rule, factor=1.0, shift=0.0, **options):
    make = lambda mean, std: BASES[name](factor * mean + shift, factor * std)
    if name == "student_t":
        make = lambda mean, std: StudentT(2 + 3 * std, factor * mean + shift, factor * std)
    y = factor * Y + shift
    return conformal.fit(None, make(MEAN, STD), y, rule=rule, key=KEY, **options)(None, make(NEW_MEAN, NEW_STD))


def placed(name, z):
    """Errors on the scale of the score, put on the scale of y, in every new row."""
    scale = np.ones(6) if name == "point" else NEW_STD
    return NEW_MEAN[:, None] + scale[:, None] * np.asarray(z)


def errors(name):
    """The sorted scores of the calibration rows."""
    return np.sort(Y - MEAN if name == "point" else (Y - MEAN) / STD)


# ------------------------------------------------------------------ quantiles


@pytest.mark.parametrize("size", [1, 7, 100, 999])
@pytest.mark.parametrize("dtype", ["float32", "float64"] if X64 else ["float32"])
def test_randomized_ranks_are_those_of_exact_arithmetic(size, dtype):
    table, levels = np.arange(1, size + 1, dtype=dtype), [Fraction(i, 1000) for i in range(1001)]
    for tau in (0.0, 0.12345, 0.61803, float(np.nextafter(np.ones((), dtype), 0))):
        # With tau = 0 only levels at which rounding p does not change the rank.
        exact = [math.ceil(p * (size + 1) - Fraction(tau)) for p in levels]
        expected = np.where(np.array(exact) < 1, -np.inf, np.where(np.array(exact) > size, np.inf, exact))
        p = np.array([float(level) for level in levels], dtype)
        actual = quantiles.randomized_quantile(table, p, np.full(1001, tau, dtype))
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["normal", "point"])
def test_randomized_quantiles_are_those_of_a_loop(name):
    distribution, z = distribution_of(name, "randomized"), [-math.inf, *errors(name), math.inf]
    tau = np.asarray(distribution.tau, float)
    assert ((tau >= 0) & (tau < 1)).all()
    assert len(set(tau)) == 6
    expected = np.array([[z[math.ceil(round(p * (SIZE + 1), 9) - tau[i])] for p in P] for i in range(6)])
    assert np.isinf(expected).any()
    expected = np.array([placed(name, row)[i] for i, row in enumerate(expected)])
    np.testing.assert_allclose(read(distribution, P), expected, rtol=10 * EXACT, atol=EXACT)


@pytest.mark.parametrize("rule", ["randomized", "linear"])
@pytest.mark.parametrize("name", ["normal", "point"])
def test_steps_are_the_sorted_scores(name, rule):
    distribution = distribution_of(name, rule)
    np.testing.assert_allclose(read(distribution, STEPS), placed(name, errors(name)), rtol=10 * EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["normal", "point"])
def test_linear_quantiles_are_linear_quantiles(name):
    distribution = distribution_of(name, "linear")
    assert isinstance(distribution, ScaledQuantiles)
    z = np.asarray(quantiles.linear_quantile(errors(name), P), float)
    q = read(distribution, P)
    np.testing.assert_allclose(q, placed(name, z), rtol=10 * EXACT, atol=EXACT)
    inner = slice(1, -1)
    for k in range(*inner.indices(len(P))):
        np.testing.assert_allclose(probe(distribution, q[:, k])[0], np.full(6, P[k]), rtol=1e3 * EXACT)


@pytest.mark.parametrize("rule", ["randomized", "linear"])
def test_scores_by_the_cdf_of_the_base(rule):
    distribution = distribution_of("student_t", rule, score="cdf")
    assert isinstance(distribution, Recalibrated)
    scores = np.sort(scipy.stats.t.cdf((Y - MEAN) / STD, 2 + 3 * STD))
    knots = placed("student_t", scipy.stats.t.ppf(scores, 2 + 3 * NEW_STD[:, None]))
    np.testing.assert_allclose(read(distribution, STEPS), knots, rtol=1e-9 if X64 else 1e-3, atol=1e-4 * (not X64))
    if rule == "linear":  # the base's quantiles, at levels that are straight between the scores
        levels = np.interp(P, [0, *STEPS, 1], [0, *scores, 1])
        expected = placed("student_t", scipy.stats.t.ppf(levels, 2 + 3 * NEW_STD[:, None]))
        np.testing.assert_allclose(read(distribution, P), expected, rtol=1e-9 if X64 else 1e-3, atol=1e-4 * (not X64))


@pytest.mark.parametrize("rule", ["randomized", "linear"])
def test_a_base_of_constant_shape_adds_nothing_to_its_means(rule):
    options = {"rule": rule, "key": KEY}
    general = conformal.fit(None, StudentT(4.0, MEAN, 0.7), Y, score="cdf", **options)(None, StudentT(4, NEW_MEAN, 0.7))
    point = conformal.fit(None, Point(MEAN), Y, **options)(None, Point(NEW_MEAN))
    for p in (STEPS, P) if rule == "randomized" else (STEPS,):
        np.testing.assert_allclose(read(general, p), read(point, p), rtol=1e-9 if X64 else 1e-3, atol=1e-3 * (not X64))
    if rule == "randomized":
        for actual, expected in zip(probe(general, NEW_MEAN + 0.3), probe(point, NEW_MEAN + 0.3), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-8 if X64 else 5e-3)


def test_normal_bases_do_not_saturate():
    y = np.where(np.arange(SIZE) == 3, 50.0, Y)
    distributions = [
        conformal.fit(None, Normal(MEAN, STD), y, score=score, rule="linear")(None, Normal(NEW_MEAN, NEW_STD))
        for score in ("cdf", "signed")
    ]
    assert eqx.tree_equal(*distributions)
    np.testing.assert_allclose(
        read(distributions[0], STEPS)[:, -1], NEW_MEAN + NEW_STD * (50 - MEAN[3]) / STD[3], rtol=EXACT
    )


# ------------------------------------------------------------------ the distribution


def test_a_randomized_distribution_has_mass_at_infinity():
    distribution, z = distribution_of("normal", "randomized"), errors("normal")
    table = Empirical(NEW_MEAN, NEW_STD, z)
    for k in (0, 1, 12, 24):
        u = (z[k - 1] if k else z[0] - 1) + 1e-4
        cdf, *others = probe(distribution, NEW_MEAN + u * NEW_STD)
        np.testing.assert_allclose(cdf, (k + distribution.tau) / (SIZE + 1), rtol=EXACT)
        # The quantile at this level is the value below, at a higher one that above.
        p = np.asarray(cdf, float)
        for i, level in enumerate(p):
            ends = [-math.inf, *(NEW_MEAN[i] + NEW_STD[i] * z), math.inf]
            np.testing.assert_allclose(
                read(distribution, np.full(8, level - 1e-4))[i], np.full(8, ends[k]), rtol=10 * EXACT
            )
            np.testing.assert_allclose(
                read(distribution, np.full(8, level + 1e-4))[i], np.full(8, ends[k + 1]), rtol=10 * EXACT
            )
        # All but cdf and quantiles are those of the table.
        for actual, expected in zip(others, probe(table, NEW_MEAN + u * NEW_STD)[1:], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=EXACT)
    with pytest.warns(UserWarning, match="24 calibration rows .* at least 32: the quantile is infinite in some rows"):
        distribution.icdf(1 / 33)
    with pytest.raises(ValueError, match="must not have rule='randomized'"):
        Mixture(jax.vmap(lambda loc: Empirical(loc, 1.0, z, "randomized", 0.5))(np.zeros((2, 3))))


def test_calls_share_their_draws():
    fit = lambda key: conformal.fit(None, Normal(MEAN, STD), Y, rule="randomized", key=key)
    new = Normal(NEW_MEAN, NEW_STD)
    fitted = fit(KEY)
    assert eqx.tree_equal(fitted(None, new), fitted(None, new), eqx.filter_jit(fitted)(None, new), rtol=EXACT)
    assert not (fitted(None, new).tau == fit(jax.random.key(6))(None, new).tau).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [("normal", {}), ("point", {}), ("student_t", {"score": "cdf"})],
)
@pytest.mark.parametrize("rule", ["randomized", "linear"])
def test_equivariance(name, options, rule):
    plain, moved = (read(distribution_of(name, rule, *move, **options), P) for move in ((), (1e3, -300.0)))
    np.testing.assert_allclose(moved, 1e3 * plain - 300, rtol=1e-8 if X64 else 1e-3, atol=1e-2 if not X64 else 0)


@pytest.mark.parametrize(("name", "rule"), [("normal", "randomized"), ("student_t", "linear")])
def test_jit_and_vmap_over_runs(name, rule):
    # Fit and prediction of two runs, each with draws of its own.
    def run(key, y):
        fitted = conformal.fit(None, BASES[name](MEAN, STD), y, score="cdf", rule=rule, key=key)
        return fitted(None, BASES[name](NEW_MEAN, NEW_STD))

    keys, ys = jax.random.split(KEY), jnp.stack([jnp.asarray(Y), Y + 1])
    together = eqx.filter_jit(eqx.filter_vmap(lambda *run_of: run(*run_of).icdf(jnp.asarray(P))))(keys, ys)
    for i in range(2):
        alone = read(run(keys[i], ys[i]), P)
        np.testing.assert_allclose(together[i], alone, rtol=1e-9 if X64 else 1e-3, atol=1e-4 * (not X64))


def test_quantiles_follow_the_base():
    fitted = conformal.fit(None, StudentT(4.0, MEAN, STD), Y, score="cdf", rule="linear")
    levels = jnp.asarray([0.2, 0.52])
    quantile_sums = lambda loc, scale: fitted(None, StudentT(4.0, loc, scale)).icdf(levels).sum(1)
    # A row's quantiles are loc + z scale.
    total = lambda loc, scale: (quantile_sums(loc, scale).sum(), quantile_sums(loc, scale))
    loc, scale = jnp.asarray(NEW_MEAN), jnp.asarray(NEW_STD)
    (in_loc, in_scale), sums = jax.jit(jax.grad(total, (0, 1), has_aux=True))(loc, scale)
    np.testing.assert_allclose(in_loc, np.full(6, 2.0), rtol=1e-6 if X64 else 1e-3)
    np.testing.assert_allclose(in_scale * scale, sums - 2 * loc, rtol=1e-6 if X64 else 1e-3, atol=1e-3 * (not X64))


def test_levels_that_the_rows_do_not_reach_come_with_a_warning():
    linear = conformal.fit(None, Point(MEAN), Y, rule="linear")(None, Point(NEW_MEAN))
    linear.interval(0.92)
    with pytest.warns(UserWarning, match="24 calibration rows .* at least 39: the quantile is the outermost"):
        linear.interval(0.95)


# ------------------------------------------------------------------ coverage


def simulated(rule, size, p, runs, rows, base=lambda rows: Normal(jnp.full(rows, 0.3), jnp.full(rows, 0.6)), **options):
    """How often normal outcomes lie below the quantiles [runs, rows, k] of many calibrations of a wrong model."""

    @eqx.filter_jit
    @eqx.filter_vmap
    def one(key, y, p):
        return conformal.fit(None, base(size), y, rule=rule, key=key, **options)(None, base(rows)).icdf(p)

    y = jax.random.normal(jax.random.key(size), (runs, size))
    p = jnp.broadcast_to(jnp.asarray(p), (runs, len(p)))
    return scipy.stats.norm.cdf(np.asarray(one(jax.random.split(KEY, runs), y, p), float))


def test_randomized_quantiles_cover_exactly():
    # At 0.05 and 0.98 they are infinite in about every second row; none of the levels is a multiple of 1 / 11.
    p = np.array([0.05, 0.33, 0.5, 0.77, 0.98])
    coverage = simulated("randomized", 10, p, 3000, 20).mean(1)
    error = coverage.std(0) / math.sqrt(3000)
    assert (abs(coverage.mean(0) - p) < 4 * error).all()
    # Small enough to find a mistake: rounding the rank would be wrong by many of these errors.
    assert (4 * error < 0.02).all()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda rows: Normal(jnp.full(rows, 0.3), jnp.full(rows, 0.6)), {}),
        (lambda rows: Point(jnp.full(rows, 0.3)), {}),
        (lambda rows: StudentT(3.0, jnp.full(rows, 0.3), 0.6), {"score": "cdf"}),
    ],
)
def test_linear_quantiles_cover_by_their_beta_distribution(make, options):
    size, ranks = 19, np.array([1, 6, 17])
    coverage = simulated("linear", size, ranks / (size + 1), 1000, 1, make, **options)[:, 0]
    for j, covered in zip(ranks, coverage.T, strict=True):
        assert abs(covered.mean() - j / (size + 1)) < 4 * covered.std() / math.sqrt(1000)
        assert scipy.stats.kstest(covered, scipy.stats.beta(j, size + 1 - j).cdf).pvalue > 1e-4


# ------------------------------------------------------------------ mistakes


def fit_on(base, y=None, **options):
    return conformal.fit(None, base, np.linspace(-1, 1, base.mean.shape[0]) if y is None else y, **options)


NORMAL = Normal(np.zeros(5), np.ones(5))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: fit_on(NORMAL, rule="modular"), "rule must be one of None, 'randomized', 'linear'; got 'modular'"),
        (lambda: fit_on(NORMAL, rule="linear", score="scaled"), "with rule='linear' score must be .* got 'scaled'"),
        (lambda: fit_on(NORMAL, score="cdf"), "with rule=None score must be one of 'absolute', .* got 'cdf'"),
        (lambda: fit_on(NORMAL, rule="randomized"), "rule='randomized' needs a key: give key="),
        (lambda: fit_on(NORMAL, rule="linear", confidence_levels=[0.9]), "confidence_levels go with score='quantile'"),
        (lambda: fit_on(NORMAL, np.array([0, 1, np.nan, 3, 4]), rule="linear"), "y holds 1 values that are NaN"),
        (lambda: conformal.fit(None, NORMAL, np.zeros(0), rule="linear"), "y is empty"),
        (lambda: fit_on(NORMAL, np.zeros(4), rule="linear"), "base.mean has 5 rows where 4 are expected"),
        (lambda: fit_on(NORMAL, rule="linear")(None, Point(0.0)), "base is a Point, but errors are measured in"),
        (lambda: fit_on(NORMAL, rule="linear")(None, NORMAL).icdf(1.2), "p must lie between 0 and 1; got 1.2"),
        (
            lambda: fit_on(Point(np.zeros(5)), rule="linear", score="cdf"),
            "base is a Point: score='cdf' needs distributions",
        ),
        (
            lambda: fit_on(StudentT(9.0, MEAN, STD), Y, rule="linear", score="cdf")(None, Point(0.0)),
            "base is a Point: score='cdf' needs distributions that have a density. Give a base with a density, or use",
        ),
        (
            lambda: fit_on(Empirical(np.zeros(5), 1.0, np.arange(-4.0, 5)), rule="linear", score="cdf"),
            "base is a Empirical: score='cdf' needs distributions that have a density",
        ),
        (
            lambda: fit_on(Quantiles(np.array([0.4, 0.6]), np.tile([90.0, 91], (5, 1))), rule="linear", score="cdf"),
            "a density of base at y. 5 rows, the first at index 0, lack one of the two: take score='signed'",
        ),
        (
            lambda: fit_on(
                StudentT(9.0, MEAN, STD), np.where(np.arange(SIZE) == 3, 1e9, Y), rule="linear", score="cdf"
            ),
            "score='cdf' needs a base.cdf.* 1 rows, the first at index 3, lack one",
        ),
        (lambda: Empirical(np.zeros(2), 1.0, np.zeros(3), "randomized"), "got rule='randomized' and no tau"),
        (lambda: Empirical(np.zeros(2), 1.0, np.zeros(3), tau=0.5), "got rule='inverse_cdf' and a tau"),
        (lambda: Empirical(np.zeros(2), 1.0, np.zeros(3), "randomized", 1.5), "tau must lie between 0 and 1; got 1.5"),
    ],
)
def test_mistakes_are_named(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()
