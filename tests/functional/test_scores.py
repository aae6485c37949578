"""The scores and the quantile rules against scipy, scoringrules, numerical integration and plain loops."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import scoringrules

from jaxcal.functional import normal, quantiles, scores, student_t

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
# Relative errors of formulas that are exact but for rounding.
EXACT = 1e-11 if X64 else 1e-5
Y = np.array([-30.0, -2.0, -0.1, 0.0, 0.7, 5.0, 400.0])


def integrate(cdf, y, breaks):
    """The CRPS by its definition, from a cdf that is smooth between the breaks, and 0 or 1 outside."""
    ends = np.unique([*breaks, y])
    parts = [
        scipy.integrate.quad(lambda t: (cdf(t) - (y <= t)) ** 2, a, b, epsabs=1e-13, epsrel=1e-10, limit=200)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return sum(parts)


# Compiled once for all degrees of freedom.
student_t_cdf_slopes = jax.jit(jax.grad(student_t.cdf, (0, 1)))
student_t_icdf_slopes = jax.jit(jax.grad(student_t.icdf, (0, 1)))


def test_normal_scores_agree_with_scoringrules_and_scipy():
    mean, std = np.linspace(-1, 1, 7), np.geomspace(1e-3, 1e3, 7)
    expected = scoringrules.crps_normal(Y, mean, std)
    np.testing.assert_allclose(normal.crps(Y, mean, std), expected, rtol=EXACT)
    expected = scipy.stats.norm.logpdf(Y, mean, std)
    np.testing.assert_allclose(normal.log_prob(Y, mean, std), expected, rtol=EXACT)


def test_normal_scores_far_out_and_at_std_zero():
    z = jnp.array([100.0, 1e15], "float32")
    np.testing.assert_allclose(normal.log_prob(z, 0.0, 1.0), [-5000.919, -5e29], rtol=1e-5)
    assert float(normal.log_prob(1.0, 1.0, 0.0)) == -math.inf
    y, mean = jnp.array([3.0, 1.0, -2.0]), jnp.ones(3)
    assert normal.crps(y, mean, jnp.zeros(3)).tolist() == [2.0, 0.0, 3.0]
    slopes = jax.jit(jax.grad(lambda *args: normal.crps(*args).sum(), (0, 1, 2)))(y, mean, jnp.zeros(3))
    assert slopes[0].tolist() == [1.0, 0.0, -1.0]
    assert slopes[1].tolist() == [-1.0, 0.0, 1.0]
    # The derivatives in std from above: the score is |d| - std / sqrt(pi), or 0.2337 std where d = 0.
    np.testing.assert_allclose(slopes[2], [-0.56419, 0.23369, -0.56419], rtol=1e-4)
    tiny = jax.grad(normal.crps, 2)(jnp.float32(1), jnp.float32(0), jnp.float32(1e-30))
    np.testing.assert_allclose(tiny, -0.56419, rtol=1e-4)


def test_normal_mixture_crps(rng):
    means, weights = rng.normal(size=(4, 7)), rng.dirichlet(np.ones(4))
    stds = rng.exponential(size=(4, 7))
    expected = scoringrules.crps_mixnorm(Y, means.T, stds.T, np.tile(weights, (7, 1)))
    np.testing.assert_allclose(scores.normal_mixture_crps(Y, means, stds, weights), expected, rtol=10 * EXACT)
    points = np.abs(means - Y) @ np.eye(7)
    expected = weights @ points - 0.5 * np.einsum("i,j,ijn", weights, weights, np.abs(means[:, None] - means))
    zeros = np.zeros_like(stds)
    np.testing.assert_allclose(scores.normal_mixture_crps(Y, means, zeros, weights), expected, rtol=10 * EXACT)
    # Two equal points: a tie between members, and between y and a member.
    tied = jax.jit(jax.grad(lambda *args: scores.normal_mixture_crps(*args).sum(), (0, 1, 2, 3)))(
        jnp.zeros(1), jnp.zeros((2, 1)), jnp.zeros((2, 1)), jnp.array([0.5, 0.5])
    )
    assert all(np.isfinite(slope).all() for slope in tied)


def test_normal_mixture_crps_needs_no_array_of_pairs():
    members, rows = 64, 500
    args = (
        jnp.zeros(rows),
        jnp.zeros((members, rows)),
        jnp.ones((members, rows)),
        jnp.full(members, 1 / members),
    )
    gradient = jax.jit(jax.grad(lambda *args: scores.normal_mixture_crps(*args).sum(), (1, 2)))
    temporary = gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary < members * members * rows * args[0].itemsize / 4


@pytest.mark.parametrize("df", [1.1, 2.0, 5.5, 300.0, 1e6])
def test_student_t_scores_agree_with_scoringrules_and_scipy(df):
    # scoringrules loses digits where log gammas are large and cancel; the normal limit takes over there.
    distribution = scipy.stats.t(df, 0.5, 2.0)
    expected = scoringrules.crps_t(Y, df, 0.5, 2.0) if df < 1e5 else scoringrules.crps_normal(Y, 0.5, 2.0)
    rtol = (max(EXACT, 1e-9) if df < 1e5 else 1e-5) * (10 if df < 2 else 1)
    np.testing.assert_allclose(student_t.crps(Y, df, 0.5, 2.0), expected, rtol=rtol)
    np.testing.assert_allclose(student_t.log_prob(Y, df, 0.5, 2.0), distribution.logpdf(Y), rtol=max(EXACT, 1e-9))


def test_student_t_scores_at_the_limits():
    assert np.isnan(student_t.crps(0.0, 1.0, 0.0, 1.0))
    assert student_t.crps(jnp.array([3.0, 1.0]), 3.0, 1.0, 0.0).tolist() == [2.0, 0.0]
    assert float(student_t.log_prob(1.0, 3.0, 1.0, 0.0)) == -math.inf
    slopes = jax.jit(jax.grad(lambda *args: student_t.crps(*args).sum(), (0, 1, 2, 3)))(
        jnp.array([1.0, 1.0, 1.0, 1.0]),
        jnp.array([1.0, 1.5, 3.0, 3.0]),
        jnp.ones(4),
        jnp.array([1.0, 0.0, 0.0, 1.0]),
    )
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("df", [1.0, 1.5, 3.0, 30.0, 1e6])
def test_student_t_cdf_is_right_into_the_tails(df):
    t = -np.array([0.0, 1e-6, 0.3, 1.0, 4.0, 30.0, 1e4, 1e9])
    # At df = 1 scipy itself is off in the tails; the closed form is not.
    lower = np.arctan2(1, -t) / np.pi if df == 1 else scipy.stats.t.cdf(t, df)
    resolved = lower > (1e-200 if X64 else 1e-30)
    np.testing.assert_allclose(np.where(resolved, student_t.cdf(t, df), lower), lower, rtol=1e-12 if X64 else 2e-5)
    np.testing.assert_allclose(student_t.cdf(-t, df), 1 - lower, rtol=10 * EXACT)


@pytest.mark.parametrize("df", [1.0, 2.5, 40.0])
def test_student_t_cdf_differentiates_in_both_arguments(df):
    t, step = np.array([-50.0, -2.0, 0.0, 0.5, 3.0]), 1e-5 * df
    in_t, in_df = jax.vmap(student_t_cdf_slopes, (0, None))(t, df)
    np.testing.assert_allclose(in_t, scipy.stats.t.pdf(t, df), rtol=1e-9 if X64 else 1e-4, atol=1e-30)
    expected = (scipy.stats.t.cdf(t, df + step) - scipy.stats.t.cdf(t, df - step)) / (2 * step)
    np.testing.assert_allclose(in_df, expected, atol=1e-9 if X64 else 1e-6)


@pytest.mark.parametrize("df", [1.0, 2.0, 7.3, 1e6])
def test_student_t_icdf_reaches_the_tails(df):
    p = np.array([1e-12, 1e-5, 0.1, 0.5, 0.8, 1 - 1e-5, 1 - 1e-12]) if X64 else np.array([1e-12, 0.1, 0.5, 0.99])
    q = student_t.icdf(p, df)
    lower = np.where(p < 0.5, student_t.cdf(q, df), student_t.cdf(-q, df))
    np.testing.assert_allclose(lower, np.minimum(p, 1 - p), rtol=1e-3 if not X64 else 1e-10)
    assert student_t.icdf(jnp.array([0.0, 1.0]), df).tolist() == [-math.inf, math.inf]
    in_p, in_df = student_t_icdf_slopes(0.9, df)
    t = scipy.stats.t.ppf(0.9, df)
    np.testing.assert_allclose(in_p, 1 / scipy.stats.t.pdf(t, df), rtol=1e-9 if X64 else 1e-4)
    slope = -student_t_cdf_slopes(t, df)[1] / scipy.stats.t.pdf(t, df)
    np.testing.assert_allclose(in_df, slope, rtol=1e-8 if X64 else 1e-3, atol=1e-9)


@pytest.mark.parametrize("table", [[0.0], [-1.0, -1.0, 0.0, 0.0, 0.0, 5.0], np.random.default_rng(1).normal(size=50)])
def test_empirical_crps_agrees_with_a_loop(table):
    table = np.sort(table)
    u = np.array([-1e3, -1.0, -0.5, 0.0, 0.1, 5.0, 70.0])
    expected = [np.abs(v - table).mean() - 0.5 * np.abs(table[:, None] - table).mean() for v in u]
    np.testing.assert_allclose(scores.empirical_crps(u, table), expected, rtol=EXACT, atol=EXACT)


def test_empirical_crps_keeps_float32_precision_far_from_zero(rng):
    table = np.sort(rng.normal(size=2000)).astype("float32")
    near = scores.empirical_crps(np.float32(0.25), table)
    shift = np.float32(2048)
    moved = np.sort((table + shift).astype("float32"))
    expected = np.abs(shift + 0.25 - moved.astype(float)).mean()
    expected -= 0.5 * np.abs(moved[:, None].astype(float) - moved).mean()
    assert near.dtype == jnp.float32
    np.testing.assert_allclose(scores.empirical_crps(shift + np.float32(0.25), moved), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("levels", "values"),
    [
        ([0.5], [1.0]),
        ([0.1, 0.3, 0.9], [-1.0, 0.0, 0.7]),
        ([0.1, 0.2, 0.5, 0.6, 0.9], [0.0, 0.0, 0.7, 0.7, 0.7]),
        (np.linspace(0.05, 0.95, 19), np.sort(np.random.default_rng(2).normal(size=19))),
    ],
)
def test_quantile_crps_agrees_with_integration(levels, values):
    levels, values = np.array(levels), np.array(values)

    def cdf(t):
        if t < values[0] or t >= values[-1]:
            return float(t >= values[-1])
        right = np.searchsorted(values, t, side="right")
        share = (t - values[right - 1]) / (values[right] - values[right - 1])
        return levels[right - 1] + share * (levels[right] - levels[right - 1])

    expected = [integrate(cdf, y, values) for y in Y]
    actual = jax.vmap(scores.quantile_crps, (0, None, None))(Y, levels, values)
    np.testing.assert_allclose(actual, expected, rtol=10 * EXACT, atol=EXACT)
    slopes = jax.jit(jax.vmap(jax.grad(scores.quantile_crps, (0, 2)), (0, None, None)))(Y, levels, values)
    assert all(np.isfinite(slope).all() for slope in slopes)
    # The derivative of the score in y is 2 F(y) - 1 wherever F is continuous.
    smooth = ~np.isin(Y, values)
    np.testing.assert_allclose(slopes[0][smooth], [2 * cdf(y) - 1 for y in Y[smooth]], atol=1e-9 if X64 else 1e-5)


@pytest.mark.parametrize("ratio", [1.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_mixture_crps_agrees_with_the_closed_form(ratio):
    means, stds = np.array([[-1.0], [0.3], [0.6]]) * np.ones(7), np.array([[1.0], [0.5], [1 / ratio]]) * np.ones(7)

    def by_quadrature(y, means, stds, weights):
        crps = lambda y: jax.vmap(normal.crps, (None, 0, 0))(y, means, stds)
        return scores.mixture_crps(y, weights, crps, lambda p: means + stds * jax.scipy.special.ndtri(p)[None])

    def value_and_slopes(score):
        total = lambda *args: (score(*args).sum(), score(*args))
        return jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(*map(jnp.asarray, (Y, means, stds, weights)))

    weights = np.array([0.2, 0.5, 0.3])
    slopes, actual = value_and_slopes(by_quadrature)
    expected_slopes, expected = value_and_slopes(scores.normal_mixture_crps)
    np.testing.assert_allclose(actual, expected, rtol=1e-7 if X64 else 1e-5)
    # Towards the weights up to a common constant: they sum to one, and only so is the score defined.
    slopes, expected_slopes = ([*s[:3], s[3] - s[3].mean()] for s in (slopes, expected_slopes))
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-6 if X64 else 1e-3)


def test_interval_score_and_pinball_agree_with_scoringrules():
    lower, upper = np.full(7, -0.1), np.full(7, 0.7)
    expected = scoringrules.interval_score(Y, lower, upper, 0.2)
    np.testing.assert_allclose(scores.interval_score(Y, lower, upper, 0.8), expected, rtol=EXACT)
    expected = scoringrules.quantile_score(Y, upper, 0.3)
    np.testing.assert_allclose(scores.pinball(Y, upper, 0.3), expected, rtol=EXACT)


def rank(size, p, rule):
    """The rank by exact arithmetic."""
    match rule:
        case "inverse_cdf":
            return max(math.ceil(p * size), 1)
        case "crude":
            return min(math.floor(p * size) + 1, size)
        case "conformal":
            return math.ceil(p * (size + 1))


@pytest.mark.parametrize("rule", ["inverse_cdf", "crude", "conformal"])
@pytest.mark.parametrize("dtype", ["float32", "float64"] if X64 else ["float32"])
@pytest.mark.parametrize("size", [1, 7, 20, 100, 999, 1_000_000])
def test_empirical_quantile_takes_the_right_rank(size, dtype, rule):
    table = np.arange(1, size + 1, dtype=dtype)
    levels = [Fraction(i, 1000) for i in range(1001)]
    expected = np.array([rank(size, p, rule) for p in levels], float)
    expected = np.where(expected < 1, -np.inf, np.where(expected > size, np.inf, expected))
    actual = quantiles.empirical_quantile(table, np.array([float(p) for p in levels], dtype), rule)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected)


def test_empirical_quantile_names_its_rules():
    with pytest.raises(ValueError, match="'inverse_cdf', 'crude', 'conformal', 'symmetric'; got 'linear'"):
        quantiles.empirical_quantile(np.zeros(3), 0.5, "linear")


@pytest.mark.parametrize("size", [1, 6, 99, 1000])
def test_linear_quantile_hits_every_order_statistic(size, rng):
    table = np.sort(rng.normal(size=size))
    ranks = np.arange(1, size + 1)
    actual = quantiles.linear_quantile(table, ranks / (size + 1))
    np.testing.assert_array_equal(actual, jnp.asarray(table))
    below = np.searchsorted(actual, actual, side="right")
    np.testing.assert_array_equal(below, ranks)
    p = np.array([0.0, 0.37, 0.5, 1.0])
    expected = np.interp(p * (size + 1), ranks, table)
    np.testing.assert_allclose(quantiles.linear_quantile(table, p), expected, rtol=10 * EXACT, atol=EXACT)


def test_linear_quantile_differentiates():
    table = np.array([1.0, 2.0, 4.0])
    in_table, in_p = jax.grad(quantiles.linear_quantile, (0, 1))(table, 0.625)
    np.testing.assert_allclose(in_table, [0.0, 0.5, 0.5], atol=EXACT)
    np.testing.assert_allclose(in_p, 8.0, rtol=EXACT)
    in_table, in_p = jax.grad(quantiles.linear_quantile, (0, 1))(table, 0.25)
    np.testing.assert_allclose(in_table, [1.0, 0.0, 0.0], atol=EXACT)


def test_weighted_quantile_agrees_with_a_loop(rng):
    values, weights = rng.integers(0, 4, size=(5, 3)).astype(float), np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    for p in (0.0, 0.1, 0.3, 0.33, 0.5, 0.6, 0.99, 1.0):
        expected = [min(v for v in column if weights[column <= v].sum() >= p - 1e-12) for column in values.T]
        assert quantiles.weighted_quantile(values, weights, p).tolist() == expected


def test_interpolate_monotone():
    x, xp = np.linspace(-2, 5, 41), np.array([-1.0, 0.0, 0.5, 4.0])
    fp = np.array([0.0, 2.0, 2.0, 7.0])
    np.testing.assert_allclose(quantiles.interpolate_monotone(x, xp, fp), np.interp(x, xp, fp), rtol=EXACT, atol=EXACT)
    # Repeated knots: the curve jumps to the last of them, at the ends too.
    jumps = quantiles.interpolate_monotone(
        np.array([-0.1, 0.0, 0.5, 1.0, 1.1]), np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 2.0, 3.0])
    )
    np.testing.assert_allclose(jumps, [0.0, 1.0, 1.5, 3.0, 3.0], rtol=EXACT)
    slopes = jax.jit(jax.vmap(jax.grad(quantiles.interpolate_monotone, (0, 1, 2)), (0, None, None)))(
        np.array([-1.0, 0.0, 0.3, 1.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.0, 3.0])
    )
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_invert_cdf_is_exact_with_its_derivatives():
    @jax.jit
    def quantile(p, loc, scale):
        cdf = lambda y: jax.nn.sigmoid((y - loc) / scale)
        return quantiles.invert_cdf(cdf, p, jnp.full_like(p, -500.0), jnp.full_like(p, 900.0))

    p, loc, scale = jnp.array([1e-9, 0.3, 0.5, 0.999]), 3.0, 1.7
    logit = np.log(p / (1 - p))
    tol = 1e-11 if X64 else 1e-4
    np.testing.assert_allclose(quantile(p, loc, scale), loc + scale * logit, rtol=tol)
    in_p, in_loc, in_scale = jax.jit(jax.jacrev(quantile, (0, 1, 2)))(p, loc, scale)
    np.testing.assert_allclose(np.diag(in_p), scale / (p * (1 - p)), rtol=tol)
    np.testing.assert_allclose(in_loc, np.ones(4), rtol=tol)
    np.testing.assert_allclose(in_scale, logit, rtol=tol, atol=tol)
    second = jax.jit(jax.jacfwd(jax.jacrev(lambda q: quantile(q, loc, scale))))(p[1])
    np.testing.assert_allclose(second, scale * (2 * p[1] - 1) / (p[1] * (1 - p[1])) ** 2, rtol=100 * tol)


def test_invert_cdf_finds_the_smallest_value_at_jumps_and_flats():
    steps = lambda y: jnp.where(y < 1, 0.0, jnp.where(y < 2, 0.25, jnp.where(y < 7, 0.5, 1.0)))
    p = jnp.array([0.1, 0.25, 0.3, 0.5, 0.51])
    invert = jax.jit(lambda p, lower, upper: quantiles.invert_cdf(steps, p, lower, upper))
    actual = invert(p, jnp.full(5, -10.0), jnp.full(5, 1000.0))
    np.testing.assert_allclose(actual, [1.0, 1.0, 2.0, 2.0, 7.0], atol=1e-6 if X64 else 0.06)
    assert (steps(actual) >= p).all()
    infinite = invert(jnp.linspace(0, 1, 5), jnp.full(5, -jnp.inf), jnp.full(5, jnp.inf))
    assert infinite.tolist() == [-math.inf] * 2 + [math.inf] * 3


# The reliability score and the loss of ACCRUE

ERRORS = np.array([-2.0, -0.3, -0.3, 0.1, 0.4, 1.5, 3.0])
STD = np.array([0.8, 0.5, 0.5, 1.0, 0.3, 2.0, 1.5])  # the second and the third are ties


def reliability(z, cdf):
    """The reliability score by its definition, the paper's equation 6, in the variable z / sqrt(2)."""
    ends = [-np.inf, *np.sort(z), np.inf]
    parts = [
        scipy.integrate.quad(lambda t, k=k: (cdf(t) - k / len(z)) ** 2, a, b, epsabs=1e-13)[0]
        for k, (a, b) in enumerate(itertools.pairwise(ends))
        if a < b
    ]
    return sum(parts) / math.sqrt(2)


def test_reliability_score_is_its_integral():
    expected = reliability(ERRORS / STD, scipy.stats.norm.cdf)
    np.testing.assert_allclose(scores.reliability_score(ERRORS, STD), expected, rtol=1e-10 if X64 else 1e-5)
    same_scale = scores.reliability_score(ERRORS, 0.7)
    np.testing.assert_allclose(same_scale, reliability(ERRORS / 0.7, scipy.stats.norm.cdf), rtol=EXACT)
    # Equation 8, with sorted eta and 1 / (sqrt(pi) N).
    eta, n = np.sort(ERRORS / STD) / math.sqrt(2), len(ERRORS)
    ranks = np.arange(1, n + 1)
    terms = (
        eta / n * (scipy.special.erf(eta) + 1)
        - eta / n**2 * (2 * ranks - 1)
        + np.exp(-(eta**2)) / (n * math.sqrt(math.pi))
    )
    np.testing.assert_allclose(expected, terms.sum() - 0.5 * math.sqrt(2 / math.pi), rtol=1e-9)


def test_reliability_score_of_smoothed_distances():
    z, weights, length = ERRORS / STD, np.arange(1.0, 8.0), 0.3
    distances, pairs = np.abs(z[:, None] - z[None]), np.outer(weights, weights) / weights.sum() ** 2
    shorter = np.sum(pairs * (distances - np.hypot(distances, length) + length))
    expected = scores.reliability_score(ERRORS, STD, weights=weights) + shorter / 2 / math.sqrt(2)
    smoothed = scores.reliability_score(ERRORS, STD, weights=weights, smoothing=length)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12 if X64 else 1e-5)
    almost = scores.reliability_score(ERRORS, STD, weights=weights, smoothing=1e-5)
    np.testing.assert_allclose(almost, scores.reliability_score(ERRORS, STD, weights=weights), atol=1e-5)


def test_reliability_score_of_another_family():
    crps = lambda z: student_t.crps(z, 4.0, 0.0, 1.0)
    actual = scores.reliability_score(ERRORS, STD, crps=crps)
    np.testing.assert_allclose(actual, reliability(ERRORS / STD, scipy.stats.t(4).cdf), rtol=1e-9 if X64 else 1e-4)


def test_reliability_score_far_out():
    # Of n errors one of which is far out it is that one's distance over n^2, nearly.
    n, far = 100, 1e6
    errors = np.append(np.zeros(n - 1), far)
    np.testing.assert_allclose(scores.reliability_score(errors, 1.0), far / n**2 / math.sqrt(2), rtol=0.01)
    at_zero = scores.reliability_score(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    np.testing.assert_allclose(at_zero, reliability(np.array([0.0, 1.0]), scipy.stats.norm.cdf), rtol=EXACT)
    assert scores.reliability_score(np.array([0.5, 1.0]), np.array([0.0, 1.0])) == math.inf


@pytest.mark.skipif(not X64, reason="differences of losses need 64 bits")
@pytest.mark.parametrize("beta", [0.0, 0.6, 1.0])
def test_accrue_loss_differentiates_as_central_differences_do(beta):
    loss = jax.jit(lambda errors, std: scores.accrue_loss(errors, std, beta))
    slopes = jax.grad(loss, (0, 1))(ERRORS, STD)
    step = 1e-6 * np.eye(len(ERRORS))  # at ties the differences are right to a tenth of it
    differences = [(loss(ERRORS + d, STD) - loss(ERRORS - d, STD)) / 2e-6 for d in step]
    np.testing.assert_allclose(slopes[0], differences, atol=1e-7)
    differences = [(loss(ERRORS, STD + d) - loss(ERRORS, STD - d)) / 2e-6 for d in step]
    np.testing.assert_allclose(slopes[1], differences, atol=1e-7)
    assert slopes[1][1] == slopes[1][2]


@pytest.mark.skipif(not X64, reason="differences need 64 bits")
def test_derivatives_in_weights_and_second_derivatives():
    def loss(errors, std, weights):
        unbiased = scores.reliability_score(errors, std, weights=weights, unbiased=True)
        return scores.accrue_loss(errors, std, 0.3, weights=weights) + unbiased

    loss, slopes = jax.jit(loss), jax.jit(jax.grad(loss, (0, 1, 2)))
    weights, step = np.array([1.0, 3.0, 2.0, 1.5, 4.0, 0.5, 2.0]), 1e-6 * np.eye(7)
    differences = [(loss(ERRORS, STD, weights + d) - loss(ERRORS, STD, weights - d)) / 2e-6 for d in step]
    np.testing.assert_allclose(slopes(ERRORS, STD, weights)[2], differences, atol=1e-8)
    # From a weight of 0 upwards, of a tie and of another value.
    for number in (1, 3):
        absent = np.where(np.arange(7) == number, 0, weights)
        difference = (loss(ERRORS, STD, absent + step[number]) - loss(ERRORS, STD, absent)) / 1e-6
        np.testing.assert_allclose(slopes(ERRORS, STD, absent)[2][number], difference, atol=1e-6)
    # Between ties.
    apart = ERRORS + np.arange(7) / 100
    hessian = jax.jit(jax.jacfwd(lambda std: slopes(apart, std, weights)))(STD)
    differences = [np.subtract(slopes(apart, STD + d, weights), slopes(apart, STD - d, weights)) / 2e-6 for d in step]
    np.testing.assert_allclose(np.stack(hessian), np.stack(differences, axis=-1), atol=1e-7)


def test_derivative_of_the_normal_crps():
    slope = jax.grad(lambda std: normal.crps(ERRORS, 0.0, std).sum())(STD)
    expected = math.sqrt(2 / math.pi) * np.exp(-(ERRORS**2) / (2 * STD**2)) - 1 / math.sqrt(math.pi)
    np.testing.assert_allclose(slope, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("weights", [-np.arange(7.0), np.zeros(7), np.append(np.ones(6), np.nan)])
def test_weights_that_make_no_sense_are_refused(weights):
    for score in (
        lambda: scores.reliability_score(ERRORS, STD, weights=weights),
        lambda: scores.accrue_beta(ERRORS, weights=weights),
        lambda: scores.accrue_loss(ERRORS, STD, 0.5, weights=weights),
    ):
        with pytest.raises(ValueError, match="weights must not be negative, and not all zero; got"):
            score()


def test_conformal_ranks_are_rounded_away_from_the_median():
    for size in (1, 9, 30, 100):
        steps = np.arange(1, 1000)
        exact = [(math.floor if i < 500 else math.ceil)(Fraction(int(i), 1000) * (size + 1)) for i in steps]
        expected = [-math.inf if rank < 1 else math.inf if rank > size else rank for rank in exact]
        np.testing.assert_array_equal(quantiles.outward_quantile(np.arange(1.0, size + 1), steps / 1000), expected)


def test_weights_are_repetitions():
    weights = np.array([1, 3, 2, 1, 4, 1, 2])
    repeated = [np.repeat(a, weights) for a in (ERRORS, STD)]
    options = {"weights": 2.0 * weights}
    np.testing.assert_allclose(
        scores.reliability_score(ERRORS, STD, **options), scores.reliability_score(*repeated), rtol=EXACT
    )
    np.testing.assert_allclose(
        scores.accrue_loss(ERRORS, STD, 0.3, **options), scores.accrue_loss(*repeated, 0.3), rtol=EXACT
    )


def test_minibatches_have_the_score_of_all_rows_in_the_mean():
    batches = [list(batch) for batch in itertools.combinations(range(7), 3)]
    score = jax.jit(jax.vmap(lambda errors, std: scores.reliability_score(errors, std, unbiased=True)))
    mean = score(ERRORS[np.array(batches)], STD[np.array(batches)]).mean()
    whole = scores.reliability_score(ERRORS, STD, unbiased=True)
    np.testing.assert_allclose(mean, whole, rtol=EXACT, atol=EXACT)
    # Calibrated errors: 0.3989 / n, or 0 where unbiased.
    draws = np.random.default_rng(0).normal(size=(20_000, 5))
    plain = jax.vmap(lambda z: scores.reliability_score(z, 1.0))(draws)
    np.testing.assert_allclose(plain.mean(), 0.3989 / 5, rtol=0.02)
    unbiased = jax.vmap(lambda z: scores.reliability_score(z, 1.0, unbiased=True))(draws)
    assert abs(unbiased.mean()) < 4 * unbiased.std() / math.sqrt(20_000)


def test_the_least_reliability_score():
    z = scipy.stats.norm.ppf((np.arange(33) + 0.5) / 33)
    least = scores.min_reliability_score(33)
    np.testing.assert_allclose(least, scores.reliability_score(z, 1.0), atol=1e-14 if X64 else 1e-7)
    np.testing.assert_allclose(least, 2.987e-4, rtol=1e-3)
    slope = jax.grad(lambda z: scores.reliability_score(z, 1.0))(z)
    np.testing.assert_allclose(slope, np.zeros(33), atol=1e-15 if X64 else 1e-7)


def test_automatic_beta():
    # Both parts by numerical minimization: of the CRPS row by row, and of the score without its constant.
    crps = lambda log_std, error: float(scoringrules.crps_normal(error, 0.0, np.exp(log_std)))
    minimum = lambda error: scipy.optimize.minimize_scalar(crps, bounds=(-3, 3), args=(error,), method="bounded").fun
    least = [minimum(error) for error in ERRORS]
    reliability_part = float(scores.min_reliability_score(7)) + 0.5 * math.sqrt(2 / math.pi)
    expected = reliability_part / (np.mean(least) + reliability_part)
    np.testing.assert_allclose(scores.accrue_beta(ERRORS), expected, rtol=1e-6 if X64 else 1e-5)
    np.testing.assert_allclose(scores.accrue_beta(-ERRORS), scores.accrue_beta(ERRORS), rtol=EXACT)


def test_the_run_of_the_least_mean_is_that_of_all_runs(rng):
    values = rng.integers(0, 3, size=40).astype(float)
    for shortest in (1, 7, 25, 40):
        ends = [(i, j) for i in range(40) for j in range(i + shortest, 41)]
        expected = min(values[i:j].mean() for i, j in ends)
        mean, start, length = scores.least_mean_of_runs(jnp.asarray(values), shortest)
        np.testing.assert_allclose(mean, expected, rtol=1e-5)
        np.testing.assert_allclose(values[start : start + length].mean(), expected, rtol=1e-5)
        assert length >= shortest


def test_an_empirical_score_of_known_values_is_that_of_a_program():
    """By NumPy, of a long table, too, whose sums would round in 32 bits."""
    rng = np.random.default_rng(0)
    table = jnp.sort(jnp.asarray(rng.normal(loc=3, size=50_000)))
    u = jnp.asarray(rng.normal(loc=3, size=200))
    found = scores.empirical_crps(u, table)
    assert found.dtype == table.dtype
    inside = jax.jit(scores.empirical_crps)(u, table)
    np.testing.assert_allclose(found, inside, rtol=1e-12 if table.dtype == np.float64 else 1e-3, atol=1e-4)
    exact = [np.abs(np.asarray(table, float) - value).mean() for value in np.asarray(u, float)]
    distances = found - found.mean()
    np.testing.assert_allclose(distances, exact - np.mean(exact), atol=1e-10 if table.dtype == np.float64 else 1e-5)
