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

from jaxcal.calibrators import conformal, isotonic
from jaxcal.distributions import (
    Concatenated,
    Mixture,
    Normal,
    Point,
    Recalibrated,
    ScaledQuantiles,
    StudentT,
)
from jaxcal.functional import smoothing

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
    fitted = isotonic.fit(None, Normal(mean[order], std[order]), (mean + std * z)[order], tails="support")
    distribution = fitted(None, Normal(np.zeros(80), np.ones(80)))
    # A little beyond the knots, so that rounding does not decide on which side of a tie they lie.
    np.testing.assert_allclose(distribution.cdf(z + 1e-5), regression.predict(pit), atol=1e-3)
    # In between the two interpolate differently, but between the same knots.
    middle = np.append((z[:-1] + z[1:]) / 2, z[-1])
    np.testing.assert_allclose(distribution.cdf(middle + 1e-5), regression.predict(normal.cdf(middle)), atol=1 / 80)


def test_ties_make_the_cdf_jump_to_the_largest_count():
    fitted = isotonic.fit(None, Point(np.zeros(5)), np.array([1.0, 3.0, 3.0, 2.0, 5.0]), tails="support")
    out = read(fitted(None, Point(np.zeros(6))), np.array([0.9, 1.0, 1.5, 2.9999, 3.0, 5.0]), np.arange(1, 6) / 5)
    np.testing.assert_allclose(out["cdf"], [0, 0.2, 0.3, 0.6, 0.8, 1], atol=1e-4)
    np.testing.assert_allclose(out["icdf"][0], [1, 2, 3, 3, 5], rtol=EXACT)


def test_levels_and_tails():
    mean, std = RNG.normal(size=6), RNG.uniform(0.5, 2.0, size=6)
    z = np.array([-1.2, -0.3, 0.1, 0.8, 2.0])
    outs = {}
    for tails in ("support", "anchored", "fitted"):
        fitted = isotonic.fit(None, Normal(mean[:5], std[:5]), mean[:5] + std[:5] * z, tails=tails)
        outs[tails] = read(fitted(None, Normal(mean, std)), mean + std * 2.5, np.array([0.0, 0.1, 0.2, 0.9, 1.0]))
    place = lambda z: mean[:, None] + std[:, None] * np.asarray(z)
    np.testing.assert_allclose(outs["support"]["icdf"], place([-1.2, -1.2, -1.2, 1.4, 2.0]), rtol=EXACT, atol=EXACT)
    assert outs["support"]["cdf"].tolist() == [1.0] * 6
    np.testing.assert_allclose(outs["anchored"]["cdf"], 1 - normal.sf(np.full(6, 2.5)) / normal.sf(2.0) / 6, rtol=EXACT)
    q = [normal.ppf(0.1 * 6 * normal.cdf(-1.2)), -1.2 + 0.9 * 0.2, normal.isf(0.1 * 6 * normal.sf(2.0))]
    np.testing.assert_allclose(outs["anchored"]["icdf"][:, 1:4], place(q), rtol=EXACT, atol=EXACT)
    assert np.isinf(outs["anchored"]["icdf"][:, [0, 4]]).all()
    # The same in units in which the mean of z is 0 and its std 1.
    center, spread = z.mean(), z.std()
    upper = center + spread * normal.isf(0.1 * 6 * normal.sf((2.0 - center) / spread))
    lower = center + spread * normal.ppf(0.1 * 6 * normal.cdf((-1.2 - center) / spread))
    q = [lower, -1.2 + 0.9 * 0.2, upper]
    np.testing.assert_allclose(outs["fitted"]["icdf"][:, 1:4], place(q), rtol=10 * EXACT, atol=EXACT)


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

    for tails, expected in (("support", 2.98), ("anchored", 3.04), ("fitted", 3.06)):
        std, coverage = jax.jit(jax.vmap(functools.partial(simulate, tails)))(y, new)
        np.testing.assert_allclose(np.mean(std), expected, atol=0.02)
        np.testing.assert_allclose(np.mean(coverage), 0.9, atol=0.01)


def test_a_saturated_base_gives_a_warning_and_does_no_harm():
    y = np.array([0.0, 1.0, 50.0, 2.0, -60.0])
    base, rows = Normal(np.zeros(5), np.ones(5)), Normal(np.zeros(6), np.ones(6))
    for tails, size in (("support", 5), ("anchored", 6), ("fitted", 6)):
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
        tails: isotonic.fit(None, base, np.array([3.0]), tails=tails)(None, base)
        for tails in ("support", "anchored", "fitted")
    }
    for tails in ("support", "fitted"):
        with pytest.warns(UserWarning, match="1 calibration rows are too few"):
            np.testing.assert_allclose(distributions[tails].icdf(0.7), 3.0, rtol=EXACT)
        assert distributions[tails].std.tolist() == [0.0]
    # Half of a normal distribution below z = 1.5, half of one above it.
    cdf = jax.jit(lambda distribution, y: distribution.cdf(y))
    np.testing.assert_allclose(cdf(distributions["anchored"], 3.0), [0.5], rtol=EXACT)
    np.testing.assert_allclose(
        cdf(distributions["anchored"], 1.0), [0.5 * normal.cdf(0.5) / normal.cdf(1.5)], rtol=EXACT
    )


@pytest.mark.parametrize(
    ("std", "y", "options", "message"),
    [
        (np.ones(3), np.zeros(3), {"tails": "normal"}, "tails must be one of .*'support'; got 'normal'"),
        (np.ones(3), np.zeros(3), {"score": "scaled"}, "score must be one of None, 'signed', 'cdf'; got 'scaled'"),
        (
            np.ones(3),
            np.zeros(3),
            {"score": "cdf", "tails": "support"},
            "has the tails of the base; got tails='support'",
        ),
        (np.ones(3), np.zeros(2), {}, "y has 2 rows where 3 are expected"),
        (np.array([1.0, 0.0, 1.0]), np.ones(3), {}, "is infinite in 1 of 3 rows, the first at index 1.*: give .*Point"),
    ],
)
def test_mistakes_are_named(std, y, options, message):
    with pytest.raises(ValueError, match=message):
        isotonic.fit(None, Normal(np.zeros(3), std), y, **options)


# Small samples, densities and bases that are not normal


def test_levels_that_the_rows_do_not_reach_come_with_a_warning():
    y = np.random.default_rng(3).normal(size=18)
    for tails, what in ((None, "in a normal tail"), ("support", "the outermost of their values")):
        distribution = isotonic.fit(None, Point(np.zeros(18)), y, tails=tails)(None, Point(np.zeros(6)))
        with pytest.warns(
            UserWarning, match=f"18 calibration rows are too few .* needs at least 19: .* {what}"
        ) as caught:
            distribution.interval(0.9)
        assert len(caught) == 1
        distribution.interval(0.89)
    t = StudentT(5.0, np.zeros(18), 1.0)
    with pytest.warns(UserWarning, match=r"18 calibration rows .* at least 19: .* in the tail of the base"):
        isotonic.fit(None, t, y)(None, t).interval(0.9)


def test_no_interval_covers_less_than_it_claims_where_rows_reach_it():
    # The paper's levels: 85 % from 19 rows.
    y = np.random.default_rng(4).normal(size=(2000, 19))

    def coverage(tails):
        fit = lambda y: isotonic.fit(None, Normal(jnp.zeros(19), jnp.full(19, 0.4)), y, tails=tails)
        read = lambda y: fit(y)(None, Normal(jnp.zeros(1), jnp.full(1, 0.4))).interval(0.9)
        lower, upper = jax.jit(jax.vmap(read))(y)
        return np.mean(normal.cdf(upper) - normal.cdf(lower))

    assert abs(coverage(None) - 0.9) < 0.01
    assert coverage("support") < 0.87


@pytest.mark.parametrize("calibrate", [isotonic.fit, functools.partial(conformal.fit, rule="linear")])
def test_the_density_is_consistent(calibrate):
    # A density that is constant between all neighbors is 0.42 nats too low at any size.
    rng = np.random.default_rng(5)
    values = rng.normal(size=1000)

    def log_density(y):
        base = lambda n: Normal(jnp.zeros(n), jnp.full(n, 2.0))
        return calibrate(None, base(y.shape[0]), y)(None, base(1000)).log_prob(values).mean()

    losses = []
    for size in (100, 1000):
        found = jax.jit(jax.vmap(log_density))(rng.normal(size=(40, size)))
        losses.append(normal.logpdf(values).mean() - np.mean(found))
    assert losses[1] < 0.02
    assert losses[1] < losses[0] < 0.1


def test_the_density_is_that_of_the_bins_and_has_mass_one():
    for size in (2, 9, 40):
        z = np.sort(RNG.standard_t(3, size=size))
        ranks = np.concatenate([[0], smoothing.bin_ranks(size), [size + 1]])
        ends = np.concatenate([[-np.inf], z[ranks[1:-1] - 1], [np.inf]])
        # The logistic distribution of the sample's quartiles, as its quantiles at levels k / (L + 1) are.
        q = np.interp(np.array([0.25, 0.5, 0.75]) * (size + 1), np.arange(1, size + 1), z)
        shape = scipy.stats.logistic(q[1], (q[2] - q[0]) / math.log(9))
        for u in (z[0] - 3.0, z[0] + 1e-3, np.median(z) + 0.011, z[-1] + 2.0):
            j = np.searchsorted(ends, u, side="right") - 1
            mass = (ranks[j + 1] - ranks[j]) / (size + 1)
            expected = math.log(mass / (shape.cdf(ends[j + 1]) - shape.cdf(ends[j]))) + shape.logpdf(u)
            np.testing.assert_allclose(smoothing.sample_log_density(u, z), expected, rtol=1e-6 if X64 else 1e-3)
    p, u = np.array([1e-9, 0.03, 0.4, 0.9, 1 - 1e-6]), np.sort(RNG.uniform(size=40) ** 2)
    ranks = np.concatenate([[0], smoothing.bin_ranks(40), [41]])
    ends = np.concatenate([[0], u[ranks[1:-1] - 1], [1]])
    j = np.searchsorted(ends, p, side="right") - 1
    expected = np.log((ranks[j + 1] - ranks[j]) / 41 / (ends[j + 1] - ends[j]))
    np.testing.assert_allclose(smoothing.map_log_slope(p, u), expected, rtol=1e-6 if X64 else 1e-3)


def test_the_density_of_an_outlier_is_finite():
    z = np.sort(RNG.normal(size=50))
    for table in (z, np.append(z[:-1], 1e6), np.append(np.zeros(40), z[:10] + 5).copy()):
        density = smoothing.sample_log_density(np.array([-1e8, 0.3, 1e8]), np.sort(table))
        assert np.isfinite(density).all()
    assert np.isneginf(smoothing.sample_log_density(np.array([1.0, 2.0]), np.ones(9))).all()
    slope = jax.grad(lambda table: smoothing.sample_log_density(jnp.array([0.1, 9.0]), table).sum())
    for table in (z, np.ones(9), np.append(np.zeros(40), z[40:])):
        assert np.isfinite(slope(jnp.sort(jnp.asarray(table)))).all()


def shaped(rows, factor=1.0):
    """Student t distributions of different degrees of freedom, whose scales are off by a factor."""
    df = np.where(np.arange(rows) % 2, 2.5, 30.0)
    return StudentT(df, np.zeros(rows), np.full(rows, factor)), df


def test_a_base_that_is_not_normal_keeps_the_shape_of_every_row():
    base, df = shaped(600, factor=2.0)
    y = scipy.stats.t(df).rvs(random_state=np.random.default_rng(6))
    fitted = isotonic.fit(None, base, y)
    assert fitted.uses_cdf
    new, df = shaped(2)
    new = StudentT(new.df, new.loc + 1, 2 * new.scale)
    distribution = fitted(None, new)
    assert isinstance(distribution, Recalibrated)
    # Linear in probabilities between those of the calibration rows.
    u = np.sort(scipy.stats.t(shaped(600)[1], 0, 2).cdf(y))
    for level in (0.01, 0.333, 0.9, 0.9995):
        level_of_base = np.interp(level * 601, np.arange(602), np.concatenate([[0], u, [1]]))
        if level > 600 / 601:
            with pytest.warns(UserWarning, match="too few"):
                q = distribution.icdf(level)
        else:
            q = distribution.icdf(level)
        np.testing.assert_allclose(q, 1 + 2 * scipy.stats.t(df).ppf(level_of_base), rtol=1e-6 if X64 else 1e-2)
    # By mean and std both rows would be as wide in the middle: here each is as wide as it is.
    lower, upper = distribution.interval(0.98)
    np.testing.assert_allclose((upper - lower) / 2, scipy.stats.t(df).ppf(0.99), rtol=0.25)
    by_std = isotonic.fit(None, base, y, score="signed")(None, new)
    assert isinstance(by_std, ScaledQuantiles)


def test_a_map_of_probabilities_under_jit_vmap_and_gradients():
    base, df = shaped(30)
    y = np.stack([scipy.stats.t(df).rvs(random_state=seed) for seed in (1, 2)])

    def ends(loc, y):
        fitted = isotonic.fit(None, base, y)
        return fitted(None, StudentT(4.0, loc, 1.0)).interval(0.8)[1]

    loc = jnp.array([0.0, 1.0])
    together = jax.jit(jax.vmap(ends, (None, 0)))(loc, y)
    for run in range(2):
        np.testing.assert_allclose(together[run], ends(loc, y[run]), rtol=1e-8 if X64 else 1e-3)
    # The ends move with the base, and with the calibration rows next to them.
    in_loc, in_y = jax.jit(jax.grad(lambda loc, y: ends(loc, y).sum(), (0, 1)))(loc, jnp.asarray(y[0]))
    np.testing.assert_allclose(in_loc, np.ones(2), rtol=1e-6 if X64 else 1e-3)
    assert 0 < np.count_nonzero(in_y) <= 2


def test_which_bases_are_recalibrated_by_their_probabilities():
    y = np.random.default_rng(7).normal(size=20)
    pair = np.zeros((2, 20)), np.full((2, 20), 1.5)
    mixture = Mixture(jax.vmap(Normal)(*pair))
    t, plain = StudentT(5.0, np.zeros(20), 1.0), Normal(np.zeros(20), 1.0)
    for base, uses_cdf in ((t, True), (mixture, True), (plain, False), (Point(np.zeros(20)), False)):
        assert isotonic.fit(None, base, y).uses_cdf == uses_cdf
        assert not isotonic.fit(None, base, y, score="signed").uses_cdf
    parts = [[t, mixture], [t, plain], [plain, plain]]
    for (first, second), uses_cdf in zip(parts, (True, True, False), strict=True):
        joined = Concatenated([first, second], [np.arange(20), np.arange(20, 40)])
        assert isotonic.fit(None, joined, np.concatenate([y, y])).uses_cdf == uses_cdf
    # A saturated base falls back on means and stds, and says so; asked for by name it is refused.
    far = np.where(np.arange(20) == 3, 50.0, y)
    with pytest.warns(UserWarning, match="5 % of the PIT values are 0 or 1 in this precision: .* without their shapes"):
        assert not isotonic.fit(None, mixture, far).uses_cdf
    with pytest.raises(ValueError, match=r"score='cdf' needs a base.cdf.* 1 rows, the first at index 3"):
        isotonic.fit(None, mixture, far, score="cdf")
    with pytest.raises(ValueError, match="base is a Point: score='cdf' needs"):
        isotonic.fit(None, t, y)(None, Point(np.zeros(20)))


def test_a_base_must_keep_its_kind():
    fitted = isotonic.fit(None, Normal(np.zeros(3), np.ones(3)), np.arange(3.0))
    with pytest.raises(ValueError, match="base is a Point, but errors are measured in predicted stds"):
        fitted(None, Point(np.zeros(3)))
