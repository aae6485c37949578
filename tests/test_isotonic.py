"""Isotonic recalibration and its distribution: against scikit-learn, numerical integration and simulation."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from sklearn.isotonic import IsotonicRegression

from jaxcal.calibrators import isotonic
from jaxcal.distributions import Normal, Point, ScaledQuantiles

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-10 if X64 else 2e-5
RNG = np.random.default_rng(11)
normal = scipy.stats.norm

# Most distributions here have five knots, six rows and are read at five levels: they use the same compiled code.
P = np.array([1e-30, 1e-3, 0.35, 0.9, 0.999])


@jax.jit
def read(distribution, y, p):
    names = ("mean", "std", "cdf", "crps", "log_prob", "icdf")
    return dict(
        zip(
            names,
            (
                distribution.mean,
                distribution.std,
                distribution.cdf(y),
                distribution.crps(y),
                distribution.log_prob(y),
                distribution.icdf(p),
            ),
            strict=True,
        )
    )


def test_the_map_is_the_isotonic_regression_of_the_pit_values():
    # Algorithm 1: the fraction of PIT values at or below each of them, regressed on it.
    mean, std, z = RNG.normal(size=80), RNG.uniform(0.5, 2.0, size=80), np.sort(RNG.normal(0.3, 1.7, size=80))
    z[[20, 21, 22]] = z[20]
    pit = normal.cdf(z)
    fractions = (pit[None] <= pit[:, None]).mean(1)
    regression = IsotonicRegression().fit(pit, fractions)
    order = RNG.permutation(80)
    fitted = isotonic.fit(None, Normal(mean[order], std[order]), (mean + std * z)[order])
    distribution = fitted(None, Normal(np.zeros(80), np.ones(80)))
    # A little beyond the knots, so that rounding does not decide on which side of a tie they lie.
    np.testing.assert_allclose(distribution.cdf(z + 1e-5), regression.predict(pit), atol=1e-3)
    # In between the two interpolate differently, but between the same knots.
    middle = np.append((z[:-1] + z[1:]) / 2, z[-1])
    np.testing.assert_allclose(distribution.cdf(middle + 1e-5), regression.predict(normal.cdf(middle)), atol=1 / 80)


def test_ties_make_the_cdf_jump_to_the_largest_count():
    fitted = isotonic.fit(None, Point(np.zeros(5)), np.array([1.0, 3.0, 3.0, 2.0, 5.0]))
    out = read(fitted(None, Point(np.zeros(6))), np.array([0.9, 1.0, 1.5, 2.9999, 3.0, 5.0]), np.arange(1, 6) / 5)
    np.testing.assert_allclose(out["cdf"], [0, 0.2, 0.3, 0.6, 0.8, 1], atol=1e-4)
    np.testing.assert_allclose(out["icdf"][0], [1, 2, 3, 3, 5], rtol=EXACT)


def test_levels_and_tails():
    mean, std = RNG.normal(size=6), RNG.uniform(0.5, 2.0, size=6)
    z = np.array([-1.2, -0.3, 0.1, 0.8, 2.0])
    outs = {}
    for tails in ("support", "anchored"):
        fitted = isotonic.fit(None, Normal(mean[:5], std[:5]), mean[:5] + std[:5] * z, tails=tails)
        outs[tails] = read(fitted(None, Normal(mean, std)), mean + std * 2.5, np.array([0.0, 0.1, 0.2, 0.9, 1.0]))
    place = lambda z: mean[:, None] + std[:, None] * np.asarray(z)
    np.testing.assert_allclose(outs["support"]["icdf"], place([-1.2, -1.2, -1.2, 1.4, 2.0]), rtol=EXACT, atol=EXACT)
    assert outs["support"]["cdf"].tolist() == [1.0] * 6
    np.testing.assert_allclose(outs["anchored"]["cdf"], 1 - normal.sf(np.full(6, 2.5)) / normal.sf(2.0) / 6, rtol=EXACT)
    q = [normal.ppf(0.1 * 6 * normal.cdf(-1.2)), -1.2 + 0.9 * 0.2, normal.isf(0.1 * 6 * normal.sf(2.0))]
    np.testing.assert_allclose(outs["anchored"]["icdf"][:, 1:4], place(q), rtol=EXACT, atol=EXACT)
    assert np.isinf(outs["anchored"]["icdf"][:, [0, 4]]).all()


# Around 0; far out on both sides; all on one side of 0, with one of the tails bent around it; all tied.
TABLES = {
    "usual": [-2.0, -0.4, 0.3, 0.9, 2.2],
    "far": [-40.0, -3.0, 0.0, 5.5, 38.0],
    "one side": [4.0, 5.0, 6.5, 6.6, 7.0],
    "tied": [-7.0, -7.0, -7.0, -7.0, -7.0],
}
LEVELS = np.array([0.05, 0.2, 0.3, 0.6, 0.8])


def log_tails(t, z):
    """The logs of Phi(t) / Phi(z[0]) and of (1 - Phi(t)) / (1 - Phi(z[-1]))."""
    return normal.logcdf(t) - normal.logcdf(z[0]), normal.logsf(t) - normal.logsf(z[-1])


def tailed_cdf(t, z):
    below, above = log_tails(t, z)
    if t < z[0]:
        return LEVELS[0] * math.exp(below)
    return 1 - (1 - LEVELS[-1]) * math.exp(above) if t >= z[-1] else np.interp(t, z, LEVELS)


@pytest.mark.parametrize("name", TABLES)
def test_normal_tails_agree_with_numerical_integration(name):
    z = np.array(TABLES[name])
    u = np.array([z[0] - 0.8, z[0], z[2] + 0.1, z[-1], z[-1] + 0.05, z[-1] + 1.3])
    out = read(ScaledQuantiles(np.zeros(6), 1.0, LEVELS, z, "normal"), u, P)
    cdf = functools.partial(tailed_cdf, z=z)
    # The integrals of step functions, in pieces that end where they jump or bend, and beyond which nothing is left.
    ends = np.unique([min(z[0], 0) - 12, z[0] - 0.1, *z, *u, z[-1] + 0.1, max(z[-1], 0) + 12])
    quad = functools.partial(scipy.integrate.quad, epsabs=1e-12, epsrel=1e-11)
    integral = lambda f: sum(quad(f, a, b)[0] for a, b in itertools.pairwise(ends))
    mean = ends[-1] - integral(cdf)
    deviation = lambda t: 2 * (t - mean) * (cdf(t) - (t >= mean))
    tolerance = 1e-8 if X64 else 2e-5
    np.testing.assert_allclose(out["mean"], np.full(6, mean), rtol=tolerance)
    # The mean is where the integrand of the variance has its own bend.
    ends = np.unique([*ends, mean])
    np.testing.assert_allclose(out["std"], np.full(6, math.sqrt(-integral(deviation))), rtol=tolerance)
    np.testing.assert_allclose(out["cdf"], [cdf(t) for t in u], rtol=tolerance if X64 else 3e-4)
    scores = [integral(lambda t, y=y: (cdf(t) - (y <= t)) ** 2) for y in u]
    np.testing.assert_allclose(out["crps"], scores, rtol=tolerance if X64 else 1e-4)


@pytest.mark.parametrize("name", TABLES)
def test_normal_tails_in_logs(name):
    # The tail of a knot at -40 begins at a probability of 1e-350.
    z = np.array(TABLES[name])
    u = np.array([z[0] - 2, z[0] - 1, z[0] - 1e-3, z[-1] + 1e-3, z[-1] + 1, z[-1] + 2])
    out = read(ScaledQuantiles(np.zeros(6), 1.0, LEVELS, z, "normal"), u, P)
    rounding = 1e-7 if X64 else 3e-3
    q = np.asarray(out["icdf"], float)[0]
    below, above = log_tails(q, z)
    np.testing.assert_allclose(below[:2], np.log(P[:2] / LEVELS[0]), atol=rounding)
    np.testing.assert_allclose(above[3:], np.log((1 - P[3:]) / (1 - LEVELS[-1])), atol=rounding)
    # The density is the derivative of the mass in the tail: exp(log mass) times the derivative of the log.
    for i, side, mass in [(0, 0, LEVELS[0]), (1, 0, LEVELS[0]), (4, 1, 1 - LEVELS[-1]), (5, 1, 1 - LEVELS[-1])]:
        derivative = (log_tails(u[i] + 1e-4, z)[side] - log_tails(u[i] - 1e-4, z)[side]) / 2e-4
        expected = math.log(mass * abs(derivative)) + log_tails(u[i], z)[side]
        np.testing.assert_allclose(out["log_prob"][i], expected, atol=1e-6 if X64 else rounding)


def test_constant_tails_agree_with_numerical_integration():
    z, levels, y = np.array([-1.0, 0.2, 0.2, 1.5, 3.0]), np.arange(1, 6) / 5, np.array([-2.5, 0.1, 0.7, 2.0, 3.0, 4.0])
    out = read(ScaledQuantiles(np.zeros(6), 1.0, levels, z), y, P)
    q = lambda p: np.interp(p, [0, *levels], [-1, *z])
    quad = functools.partial(scipy.integrate.quad, a=0, b=1, epsabs=1e-11, limit=200)
    mean = quad(q, points=levels[:-1])[0]
    np.testing.assert_allclose(out["mean"], np.full(6, mean), rtol=EXACT)
    variance = quad(lambda p: (q(p) - mean) ** 2, points=levels[:-1])[0]
    np.testing.assert_allclose(out["std"], np.full(6, math.sqrt(variance)), rtol=EXACT)
    # The score is twice the integral of the pinball loss over the level.
    for i in range(6):
        loss = lambda p, y=y[i]: 2 * ((y < q(p)) - p) * (q(p) - y)
        kinks = [*levels[:-1], np.interp(y[i], z[[0, 1, 3, 4]], [0.2, 0.6, 0.8, 0.999])]
        np.testing.assert_allclose(out["crps"][i], quad(loss, points=kinks)[0], rtol=1e-7 if X64 else EXACT)


def test_overconfident_models_are_corrected():
    # 500 calibrations by 200 rows whose stds are three times too small: the mean std of Z, as a simulation in NumPy
    # gives it, and the coverage of new rows.
    rng = np.random.default_rng(2)
    y, new = 3 * rng.normal(size=(500, 200)), 3 * rng.normal(size=(500, 400))

    def simulate(tails, y, new):
        fitted = isotonic.fit(None, Normal(jnp.zeros(200), jnp.ones(200)), y, tails=tails)
        distribution = fitted(None, Normal(jnp.zeros(1), jnp.ones(1)))
        lower, upper = distribution.interval(0.9)
        return distribution.std[0], jnp.mean((new >= lower) & (new <= upper))

    for tails, expected in (("support", 2.98), ("anchored", 3.04)):
        std, coverage = jax.jit(jax.vmap(functools.partial(simulate, tails)))(y, new)
        np.testing.assert_allclose(np.mean(std), expected, atol=0.02)
        np.testing.assert_allclose(np.mean(coverage), 0.9, atol=0.01)


def test_a_saturated_base_gives_a_warning_and_does_no_harm():
    y = np.array([0.0, 1.0, 50.0, 2.0, -60.0])
    base, rows = Normal(np.zeros(5), np.ones(5)), Normal(np.zeros(6), np.ones(6))
    for tails, size in (("support", 5), ("anchored", 6)):
        with pytest.warns(UserWarning, match=r"40 % of the PIT values are 0 or 1 in double precision, .* up to 60"):
            fitted = isotonic.fit(None, base, y, tails=tails)
        out = read(fitted(None, rows), np.append(y, 0.0), P)
        # Each outcome is a knot, at its own level, whatever Phi says of it.
        np.testing.assert_allclose(out["cdf"], np.array([2, 3, 5, 4, 1, 2]) / size, rtol=EXACT)
        assert np.isfinite(out["icdf"]).all()
        assert np.isfinite(out["std"]).all()


def test_targets_equal_to_the_means_give_a_warning():
    base = Normal(np.ones(5), np.ones(5))
    with pytest.warns(UserWarning, match=r"y equals base.mean in every row: no prediction has a width"):
        fitted = isotonic.fit(None, base, np.ones(5))
    out = read(fitted(None, Normal(np.ones(6), np.ones(6))), np.full(6, 3.0), P)
    assert out["std"].tolist() == [0.0] * 6
    np.testing.assert_allclose(out["crps"], np.full(6, 2.0), rtol=EXACT)


def test_one_row_is_enough():
    base = Normal(np.zeros(1), np.full(1, 2.0))
    distributions = {
        tails: isotonic.fit(None, base, np.array([3.0]), tails=tails)(None, base) for tails in ("support", "anchored")
    }
    assert distributions["support"].icdf(0.7).tolist() == [3.0]
    assert distributions["support"].std.tolist() == [0.0]
    # Half of a normal distribution below z = 1.5, half of one above it.
    cdf = jax.jit(lambda distribution, y: distribution.cdf(y))
    np.testing.assert_allclose(cdf(distributions["anchored"], 3.0), [0.5], rtol=EXACT)
    np.testing.assert_allclose(
        cdf(distributions["anchored"], 1.0), [0.5 * normal.cdf(0.5) / normal.cdf(1.5)], rtol=EXACT
    )


@pytest.mark.parametrize(
    ("std", "y", "options", "message"),
    [
        (np.ones(3), np.zeros(3), {"tails": "normal"}, "tails must be one of 'support', 'anchored'; got 'normal'"),
        (np.ones(3), np.zeros(2), {}, "y has 2 rows where 3 are expected"),
        (np.array([1.0, 0.0, 1.0]), np.zeros(3), {}, "base.std must be positive; .* index 1"),
    ],
)
def test_mistakes_are_named(std, y, options, message):
    with pytest.raises(ValueError, match=message):
        isotonic.fit(None, Normal(np.zeros(3), std), y, **options)


def test_a_base_must_keep_its_kind():
    fitted = isotonic.fit(None, Normal(np.zeros(3), np.ones(3)), np.arange(3.0))
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        fitted(None, Point(np.zeros(3)))
