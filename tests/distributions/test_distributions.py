"""One battery over every distribution; each against scipy, plain NumPy and the definition of its score."""

import functools
import io
import itertools
import math

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from compiled import compilations

from jaxcal.distributions import (
    CrossConformal,
    Empirical,
    Histogram,
    Mixture,
    Normal,
    Point,
    Quantiles,
    Recalibrated,
    ScaledQuantiles,
    SmoothQuantiles,
    StudentT,
    concatenated,
)
from jaxcal.functional import linear_tables, quantiles, smoothing

X64 = jax.config.jax_enable_x64
# What does not depend on the precision runs in 64 bits only.
once = pytest.mark.skipif(not X64, reason="does not depend on the precision")
EXACT = 1e-10 if X64 else 3e-5
LEVELS = np.array([0.02, 0.1, 0.35, 0.5, 0.77, 0.98])

# Three rows of every distribution, and the two members of the mixtures.
LOC, SCALE, DF = np.array([0.0, -1.5, 2.0]), np.array([1.0, 0.3, 2.0]), np.array([5.0, 7.5, 30.0])
OFFSETS, SPREADS, WEIGHTS = np.array([-0.7, 0.9]), np.array([1.0, 0.4]), np.array([0.3, 0.7])
TABLE = np.array([-2.0, -0.5, -0.5, 0.0, 0.25, 1.0, 3.0])
TABLES = np.stack([TABLE, TABLE[::-1] ** 2 - 3, 0.1 * TABLE])
TABLES.sort(axis=1)
KNOTS, SHAPE = np.array([0.05, 0.2, 0.5, 0.6, 0.9]), np.array([-2.0, -0.5, 0.1, 0.1, 1.7])
STEPS = np.array([-2.0, -0.5, 0.1, 0.4, 1.7])
# Of a histogram: the last bin but one has no mass.
EDGES, MASSES = np.array([-2.5, -1.0, -0.2, 0.1, 0.9, 1.4]), np.array([0.03, 0.35, 0.4, 0.0, 0.22])
# Two models, the rows that each was fitted without, and the mean of both.
MODELS, FITTED_WITHOUT = np.array([-0.3, 0.4]), np.array([[1, 1, 1, 0, 0, 0, 0.5], [0, 0, 0, 1, 1, 1, 0.5]])
SIZES = np.array([0.2, 1.1, 2.5, 0.7, 0.7, 1.6, 0.0])
CENTERS = MODELS @ FITTED_WITHOUT
# A sample of nine values.
SAMPLE, STEPS_OF_SAMPLE = np.array([-2.0, -1.1, -0.9, -0.3, 0.0, 0.2, 0.7, 1.3, 2.1]), np.arange(1, 10) / 10
# Of nine calibration rows of a base that is recalibrated: enough for intervals of 80 %.
PROBABILITIES = np.array([0.05, 0.12, 0.3, 0.4, 0.42, 0.6, 0.75, 0.9, 0.94])


def mixture(member, loc, scale):
    """A mixture of two distributions, each of which `member` makes of a location and a scale."""
    locs, scales = loc + OFFSETS[:, None] * scale, SPREADS[:, None] * scale
    return Mixture(jax.vmap(member)(locs, scales), WEIGHTS)


# Each distribution is a function of the locations and scales of its rows; y -> a y + b makes them a loc + b, a scale.
DISTRIBUTIONS = {
    "point": lambda loc, scale: Point(loc),
    "normal": Normal,
    "student_t": lambda loc, scale: StudentT(DF, loc, scale),
    "mixture": functools.partial(mixture, Normal),
    "mixture_of_points": functools.partial(mixture, lambda loc, scale: Point(loc)),
    "mixture_of_t": functools.partial(mixture, lambda loc, scale: StudentT(4.5, loc, scale)),
    "empirical": lambda loc, scale: Empirical(loc, scale, TABLE),
    "own_tables": lambda loc, scale: Empirical(loc, scale, TABLES),
    "cross_conformal": lambda loc, scale: CrossConformal(
        loc[:, None] + scale[:, None] * MODELS, FITTED_WITHOUT, SIZES, np.repeat(scale[:, None], 2, 1)
    ),
    "quantiles": lambda loc, scale: Quantiles(KNOTS, loc[:, None] + scale[:, None] * SHAPE),
    "scaled_quantiles": lambda loc, scale: ScaledQuantiles(loc, scale, KNOTS, SHAPE),
    "normal_tails": lambda loc, scale: ScaledQuantiles(loc, scale, KNOTS, STEPS, "normal"),
    "of_a_sample": lambda loc, scale: ScaledQuantiles(loc, scale, STEPS_OF_SAMPLE, SAMPLE, from_sample=True),
    "recalibrated": lambda loc, scale: Recalibrated(Normal(loc, scale), PROBABILITIES),
    "smooth_quantiles": lambda loc, scale: SmoothQuantiles(KNOTS, loc[:, None] + scale[:, None] * STEPS, 4.5),
    "histogram": lambda loc, scale: Histogram(loc[:, None] + scale[:, None] * EDGES, np.tile(MASSES, (3, 1))),
    "half_normal_tails": lambda loc, scale: Histogram(
        loc[:, None] + scale[:, None] * EDGES, np.tile(MASSES, (3, 1)), "half_normal"
    ),
}
CONTINUOUS = {
    "normal",
    "student_t",
    "mixture",
    "mixture_of_t",
    "normal_tails",
    "recalibrated",
    "smooth_quantiles",
    "half_normal_tails",
}
# Of a smoothed version is the density of these.
SMOOTHED = {"of_a_sample", "recalibrated"}
BY_KNOTS = ("quantiles", "scaled_quantiles", "normal_tails")
each_distribution = pytest.mark.parametrize(
    "name",
    [
        # Its parts are in the tests as well; it takes seconds to compile.
        pytest.param(name, marks=pytest.mark.slow) if name == "mixture_of_t" else name
        for name in DISTRIBUTIONS
    ],
)
# The quantiles of "cross_conformal" are conformal ones: infinite at the ends, and not quite those of its table.
each_with_an_inverse = pytest.mark.parametrize(
    "name",
    [
        # In 32 bits the parts of this mixture are enough, which takes seconds to compile.
        pytest.param(name, marks=once) if name == "mixture_of_t" else name
        for name in DISTRIBUTIONS
        if name != "cross_conformal"
    ],
)
# What holds for one mixture holds for the other; this one takes seconds to compile.
each_law_but_one = pytest.mark.parametrize(
    "name",
    [
        # Its own test (test_isotonic) has gradients, too.
        pytest.param(name, marks=pytest.mark.slow) if name == "recalibrated" else name
        for name in DISTRIBUTIONS
        if name != "mixture_of_t"
    ],
)


def build(name, dtype=float, shift=0.0, factor=1.0):
    distribution = DISTRIBUTIONS[name](factor * LOC + shift, factor * SCALE)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.zeros(0, dtype).dtype), distribution)


def probe(distribution, y, p=LEVELS):
    """All that the interface gives, by name."""
    return _probe(distribution, jnp.asarray(y), jnp.asarray(p))


@jax.jit
def _probe(distribution, y, p):
    return {
        "mean": distribution.mean,
        "std": distribution.std,
        "variance": distribution.variance,
        "cdf": distribution.cdf(y),
        "log_prob": distribution.log_prob(y),
        "crps": distribution.crps(y),
        "icdf": distribution.icdf(p),
        "interval": jnp.stack(distribution.interval(0.8), axis=-1),
    }


@jax.jit
@jax.grad
def slopes(inputs):
    """The gradient of all that the interface gives, in the distribution, the outcomes and the levels."""
    distribution, y, p = inputs
    density = distribution.log_prob(y)
    rows = (
        distribution.mean
        + distribution.std
        + distribution.cdf(y)
        + distribution.crps(y)
        + jnp.where(jnp.isfinite(density), density, 0)
    )
    return rows.sum() + distribution.icdf(p).sum()


def bins(name):
    """The bins as distributions of scipy's; that of a lower tail is mirrored."""
    found = [scipy.stats.uniform(start, end - start) for start, end in itertools.pairwise(EDGES)]
    if name == "half_normal_tails":
        unit = scipy.stats.norm.ppf(0.75)
        found[0] = scipy.stats.halfnorm(-EDGES[1], (EDGES[1] - EDGES[0]) / unit)
        found[-1] = scipy.stats.halfnorm(EDGES[-2], (EDGES[-1] - EDGES[-2]) / unit)
    return found


def atoms_of_models():
    return np.sort([*(CENTERS - SIZES), *(CENTERS + SIZES)])


def standard_cdf(name, row, u):
    """The cdf of a row at location 0 and scale 1, by scipy and NumPy."""
    match name:
        case "point":
            return (u >= 0).astype(float)
        case "normal":
            return scipy.stats.norm.cdf(u)
        case "student_t":
            return scipy.stats.t.cdf(u, DF[row])
        case "of_a_sample":
            inside = np.interp(np.nextafter(u, np.inf), SAMPLE, STEPS_OF_SAMPLE)
            return np.where(u < SAMPLE[0], 0.0, np.where(u >= SAMPLE[-1], 1.0, inside))
        case "recalibrated":
            return np.interp(scipy.stats.norm.cdf(u), [0, *PROBABILITIES, 1], np.arange(11) / 10)
        case "empirical":
            return np.searchsorted(TABLE, u, side="right") / len(TABLE)
        case "cross_conformal":
            return np.searchsorted(atoms_of_models(), u, side="right") / 14
        case "own_tables":
            return np.searchsorted(TABLES[row], u, side="right") / len(TABLE)
        case "normal_tails":
            below = KNOTS[0] * np.exp(scipy.stats.norm.logcdf(u) - scipy.stats.norm.logcdf(STEPS[0]))
            above = (1 - KNOTS[-1]) * np.exp(scipy.stats.norm.logsf(u) - scipy.stats.norm.logsf(STEPS[-1]))
            inside = np.interp(u, STEPS, KNOTS)
            return np.where(u < STEPS[0], below, np.where(u > STEPS[-1], 1 - above, inside))
        case "histogram" | "half_normal_tails":
            first, *rest = bins(name)
            lowest = first.cdf(u) if name == "histogram" else first.sf(-u)
            return MASSES[0] * lowest + sum(m * each.cdf(u) for m, each in zip(MASSES[1:], rest, strict=True))
        case "smooth_quantiles":
            # Straight in the scores of Student t, and on beyond the knots.
            knots, below, above = scipy.stats.t.ppf(KNOTS, 4.5), u - STEPS[0], u - STEPS[-1]
            slopes = np.diff(knots) / np.diff(STEPS)
            inside = np.interp(u, STEPS, knots)
            score = np.where(
                below < 0, knots[0] + slopes[0] * below, np.where(above > 0, knots[-1] + slopes[-1] * above, inside)
            )
            return scipy.stats.t.cdf(score, 4.5)
        case "quantiles" | "scaled_quantiles":
            # np.interp takes the last of repeated knots at the knot itself only if it is nudged past it.
            inside = np.interp(np.nextafter(u, np.inf), SHAPE, KNOTS)
            return np.where(u < SHAPE[0], 0.0, np.where(u >= SHAPE[-1], 1.0, inside))
    member = {
        "mixture": scipy.stats.norm.cdf,
        "mixture_of_points": lambda u: u >= 0,
        "mixture_of_t": scipy.stats.t(4.5).cdf,
    }[name]
    members = zip(WEIGHTS, OFFSETS, SPREADS, strict=True)
    return sum(weight * member((u - offset) / spread) for weight, offset, spread in members)


def test_the_score_of_an_infinite_target_is_infinite():
    forecast = SmoothQuantiles(KNOTS, np.array([STEPS]), 4.0)
    for target in (np.inf, -np.inf):
        assert np.isinf(forecast.crps(target)).all()
    assert np.isfinite(forecast.crps(-1e30)).all()


def oracle_cdf(name, row, t):
    """The cdf of one row at t."""
    return standard_cdf(name, row, (np.asarray(t) - LOC[row]) / SCALE[row])


def standard_moments(name):
    """The means and stds of the rows at location 0 and scale 1."""
    t_std = math.sqrt(4.5 / 2.5)
    stds = {"mixture": SPREADS, "mixture_of_points": np.zeros(2), "mixture_of_t": t_std * SPREADS}.get(name)
    if stds is not None:
        mean = WEIGHTS @ OFFSETS
        return mean, math.sqrt(WEIGHTS @ (stds**2 + (OFFSETS - mean) ** 2))
    if name in ("histogram", "half_normal_tails"):
        means, variances = np.transpose([each.stats() for each in bins(name)])
        means[0] *= -1 if name == "half_normal_tails" else 1
        mean = MASSES @ means
        return mean, math.sqrt(MASSES @ (variances + (means - mean) ** 2))
    p = (np.arange(10**6) + 0.5) / 10**6
    if name == "of_a_sample":
        q = np.interp(p, STEPS_OF_SAMPLE, SAMPLE)
        return q.mean(), q.std()
    if name == "recalibrated":
        levels = np.interp(p, np.arange(11) / 10, [0, *PROBABILITIES, 1])
        q = scipy.stats.norm.ppf(levels)
        return q.mean(), q.std()
    if name == "smooth_quantiles":
        knots = scipy.stats.t.ppf(KNOTS, 4.5)
        lines = np.diff(STEPS) / np.diff(knots)

        def moment(power):
            """The integral of a power of the values over their scores, piece by piece."""
            ends, total = [-np.inf, *knots[1:-1], np.inf], 0.0
            for k, slope in enumerate(lines):
                value = lambda u, k=k, slope=slope: STEPS[k] + slope * (u - knots[k])
                weighted = lambda u, value=value: value(u) ** power * scipy.stats.t.pdf(u, 4.5)
                total += scipy.integrate.quad(weighted, ends[k], ends[k + 1], epsabs=1e-12)[0]
            return total

        return moment(1), math.sqrt(moment(2) - moment(1) ** 2)
    q = np.interp(p, KNOTS, STEPS if name == "normal_tails" else SHAPE)
    if name == "normal_tails":
        below, above = p < KNOTS[0], p > KNOTS[-1]
        q[below] = scipy.stats.norm.ppf(p[below] / KNOTS[0] * scipy.stats.norm.cdf(STEPS[0]))
        q[above] = scipy.stats.norm.isf((1 - p[above]) / (1 - KNOTS[-1]) * scipy.stats.norm.sf(STEPS[-1]))
    return {
        "point": (0.0, 0.0),
        "normal": (0.0, 1.0),
        "student_t": (0.0, np.sqrt(DF / (DF - 2))),
        "empirical": (TABLE.mean(), TABLE.std()),
        "own_tables": (TABLES.mean(1), TABLES.std(1)),
        "cross_conformal": (CENTERS.mean(), atoms_of_models().std()),
        **dict.fromkeys(BY_KNOTS, (q.mean(), q.std())),
    }[name]


def integrate_crps(cdf, y, breaks, scale):
    """The integral of (cdf(t) - 1{y <= t})^2, by Gauss-Legendre rules between the breaks and far outside."""
    middle = np.unique([*breaks, y])
    far = scale * np.geomspace(0.3, 1e4, 24)
    near = np.arange(middle[0], middle[-1], 0.2 * scale)
    ends = np.unique(np.concatenate([middle[0] - far, near, middle, middle[-1] + far]))
    nodes, weights = np.polynomial.legendre.leggauss(12)
    width, start = np.diff(ends)[:, None], ends[:-1, None]
    t = start + width * (nodes + 1) / 2
    return (width / 2 * weights * (cdf(t) - (y <= t)) ** 2).sum()


def breaks_of(name, row):
    tables = {"empirical": TABLE, "own_tables": TABLES[row], "cross_conformal": atoms_of_models()}
    shape = {**tables, "normal_tails": STEPS, "point": [0.0], **dict.fromkeys(BY_KNOTS[:2], SHAPE)}
    shape["of_a_sample"] = SAMPLE
    shape["histogram"] = shape["half_normal_tails"] = EDGES
    shape["recalibrated"] = scipy.stats.norm.ppf(PROBABILITIES)
    return LOC[row] + SCALE[row] * np.asarray(shape.get(name, OFFSETS))


# ------------------------------------------------------------------ the battery


@pytest.mark.contract_in_32_bits
@each_distribution
def test_cdf_and_moments_agree_with_the_oracle(name):
    distribution = build(name)
    # Between the atoms and the knots, where rounding decides nothing.
    for u in (-5.03, -1.71, -0.41, 0.033, 0.61, 2.27, 9.1):
        out = probe(distribution, LOC + SCALE * u)
        expected = [standard_cdf(name, row, np.array(u)) for row in range(3)]
        np.testing.assert_allclose(out["cdf"], expected, rtol=EXACT, atol=1e-12 if X64 else 1e-6)
    mean, std = standard_moments(name)
    tolerance = dict.fromkeys(
        ["rtol", "atol"], 1e-4 if name == "recalibrated" else 1e-5 if name in (*BY_KNOTS, "of_a_sample") else EXACT
    )
    np.testing.assert_allclose(out["mean"], LOC + SCALE * mean, **tolerance)
    np.testing.assert_allclose(out["std"], SCALE * std, **tolerance)
    np.testing.assert_allclose(out["variance"], (SCALE * std) ** 2, **tolerance)


@pytest.mark.contract_in_32_bits
@each_with_an_inverse
def test_icdf_inverts_cdf(name):
    distribution = build(name)
    q = probe(distribution, LOC)["icdf"]
    for j, level in enumerate(LEVELS):
        assert (probe(distribution, q[:, j] + 1e-4)["cdf"] >= level - EXACT).all()
        assert (probe(distribution, q[:, j] - 1e-3)["cdf"] <= level + EXACT).all()
        if name in CONTINUOUS:
            np.testing.assert_allclose(probe(distribution, q[:, j])["cdf"], np.full(3, level), rtol=EXACT)


@each_distribution
def test_crps_agrees_with_its_definition(name):
    distribution = build(name)
    # A tie with a member, an atom or a knot, a value in between, and values far outside.
    for y in (LOC + SCALE * breaks_of(name, 0)[0], LOC + 0.33 * SCALE, LOC - 7 * SCALE, LOC + 60.0):
        expected = [
            integrate_crps(functools.partial(oracle_cdf, name, row), y[row], breaks_of(name, row), SCALE[row])
            for row in range(3)
        ]
        rtol = 2e-4 if name == "recalibrated" else 1e-6 if X64 else 2e-5
        np.testing.assert_allclose(probe(distribution, y)["crps"], expected, rtol=rtol)


@pytest.mark.contract_in_32_bits
@each_law_but_one
def test_samples_follow_the_distribution(name):
    distribution = build(name)
    draws = np.asarray(jax.jit(lambda distribution: distribution.sample(jax.random.key(3), (40, 100)))(distribution))
    assert draws.shape == (40, 100, 3)
    draws = draws.reshape(4000, 3)
    out = probe(distribution, LOC)
    error = 4.5 * float(out["std"].max()) / math.sqrt(4000)
    np.testing.assert_allclose(draws.mean(0), out["mean"], atol=error + 1e-5)
    np.testing.assert_allclose(draws.std(0), out["std"], rtol=0.1, atol=1e-5)
    # Probabilities say more than two moments do.
    for y in (LOC - 0.31 * SCALE, LOC + 0.55 * SCALE):
        np.testing.assert_allclose(
            (draws <= y).mean(0), probe(distribution, y)["cdf"], atol=4.5 * 0.5 / math.sqrt(4000)
        )


@each_distribution
def test_shapes(name):
    out = probe(build(name), LOC)
    assert {key: value.shape for key, value in out.items()} == {
        **dict.fromkeys(["mean", "std", "variance", "cdf", "log_prob", "crps"], (3,)),
        "icdf": (3, len(LEVELS)),
        "interval": (3, 2),
    }
    np.testing.assert_allclose(out["interval"][:, 0], out["icdf"][:, 1], rtol=EXACT)


@pytest.mark.parametrize("name", ["normal", "mixture"])
def test_a_level_may_be_a_number_and_so_may_an_outcome(name):
    distribution = build(name)
    out = probe(distribution, np.full(3, 0.5))
    cdf, q, column = jax.jit(
        lambda distribution: (distribution.cdf(0.5), distribution.icdf(0.1), distribution.icdf(LEVELS[1:2]))
    )(distribution)
    np.testing.assert_allclose(cdf, out["cdf"], rtol=EXACT)
    np.testing.assert_allclose(q, out["icdf"][:, 1], rtol=EXACT)
    np.testing.assert_allclose(column, out["icdf"][:, 1:2], rtol=EXACT)


def of_groups(loc, scale, tails="constant", **options):
    """Tables of two groups."""
    made = linear_tables.make(jnp.asarray(SAMPLE), jnp.asarray([0, 1, 0, 1, 1, 0, 0, 1, 1]), np.array([4, 5]))
    return ScaledQuantiles(loc, scale, None, made, tails, group=jnp.asarray([0, 1, 1], np.int32), **options)


BY_NUMPY = {name: DISTRIBUTIONS[name] for name in DISTRIBUTIONS if build(name)._in_numpy} | {
    "groups": of_groups,
    "weights_of_groups": functools.partial(of_groups, tails="normal", new_weight=jnp.asarray([0.5, 1.0, 2.0])),
}


@pytest.mark.filterwarnings("ignore:9 calibration rows", "ignore:quantiles are given", "ignore:in . rows the quantile")
@pytest.mark.parametrize("name", BY_NUMPY)
def test_numpy_answers_known_rows_as_a_program_does(name):
    """Also points, and levels 0 and 1."""
    for scale in (SCALE, np.array([1.0, 0.0, 2.0])):
        distribution, y, p = (
            BY_NUMPY[name](LOC, scale),
            jnp.asarray(LOC + 0.3),
            jnp.asarray([0, 0.1, 0.35, 0.5, 0.77, 1]),
        )
        with compilations() as compiled:
            found = _probe.__wrapped__(distribution, y, p)
        assert not {*compiled} & {f"jit({key})" for key in ("mean", "std", "cdf", "log_prob", "crps", "quantile")}
        for key, expected in probe(distribution, y, p).items():
            assert found[key].dtype == expected.dtype
            np.testing.assert_allclose(found[key], expected, rtol=EXACT, atol=EXACT, err_msg=key)


@pytest.mark.filterwarnings(
    "ignore:[79] calibration rows", "ignore:quantiles are given", "ignore:in . rows the quantile"
)
@pytest.mark.parametrize("name", BY_NUMPY)
@once
def test_numpy_computes_in_the_dtype_of_a_distribution(name):
    """A step in 64 bits would move the ends of intervals by the rounding of these."""
    given = BY_NUMPY[name](LOC, SCALE)
    given = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == float else leaf, given)
    found = _probe.__wrapped__(given, jnp.asarray(LOC), jnp.asarray(LEVELS))
    assert {key: value.dtype for key, value in found.items()} == dict.fromkeys(found, jnp.float32)


@each_distribution
@once
def test_vmap_over_runs_is_traced(name):
    runs = jax.tree.map(lambda *leaves: jnp.stack(leaves), build(name), build(name))
    together, alone = jax.eval_shape(jax.vmap(_probe, (0, None, None)), runs, LOC, LEVELS), probe(build(name), LOC)
    assert {key: value.shape for key, value in together.items()} == {key: (2, *alone[key].shape) for key in alone}


@pytest.mark.parametrize(
    "name",
    # One in closed form, a table and quantiles in `make test`.
    [
        name if name in ("normal", "empirical", "quantiles") else pytest.param(name, marks=pytest.mark.slow)
        for name in DISTRIBUTIONS
    ],
)
@once
def test_vmap_over_runs(name):
    runs = [build(name), build(name, shift=0.4, factor=3.0)]
    stacked, y = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs), LOC + 0.2
    together = jax.jit(jax.vmap(probe, (0, None)))(stacked, y)
    for i, run in enumerate(runs):
        for key, alone in probe(run, y).items():
            np.testing.assert_allclose(together[key][i], alone, rtol=EXACT, atol=EXACT, err_msg=key)
    if not isinstance(stacked, Mixture):
        # Without a vmap too: the methods are elementwise in leading axes.
        direct = {
            "cdf": stacked.cdf(y),
            "crps": stacked.crps(y),
            "icdf": stacked.icdf(0.1),
            "std": stacked.std,
        }
        expected = {**together, "icdf": together["icdf"][..., 1]}
        for key, value in direct.items():
            np.testing.assert_allclose(value, expected[key], rtol=EXACT, atol=EXACT, err_msg=key)


@pytest.mark.contract_in_32_bits
@each_law_but_one
def test_gradients_are_finite(name):
    # The second row is a tie with its location.
    y = LOC + np.array([0.4, 0.0, 11.0])
    for leaf in jax.tree.leaves(slopes((build(name), y, LEVELS))):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("name", [*sorted(CONTINUOUS - SMOOTHED), "quantiles"])
def test_icdf_has_exact_derivatives(name):
    distribution = build(name)
    # Moving a row moves its quantiles: the derivatives in all the locations add up to one.
    places = {
        "normal": lambda distribution: distribution.mean,
        "student_t": lambda distribution: distribution.loc,
        "mixture": lambda distribution: distribution.components.mean,
        "mixture_of_t": lambda distribution: distribution.components.loc,
        "normal_tails": lambda distribution: distribution.loc,
        "quantiles": lambda distribution: distribution.values,
        "smooth_quantiles": lambda distribution: distribution.values,
        "half_normal_tails": lambda distribution: distribution.edges,
    }
    shift = eqx.tree_at(places[name], jax.tree.map(jnp.zeros_like, distribution), replace_fn=jnp.ones_like)
    zeros, p = jax.tree.map(jnp.zeros_like, distribution), jnp.full((), 0.3)
    push = jax.jit(
        lambda shift, rise: jax.jvp(lambda distribution, p: distribution.icdf(p), (distribution, p), (shift, rise))
    )
    q, moved = push(shift, jnp.zeros(()))
    np.testing.assert_allclose(moved, np.ones(3), rtol=EXACT)
    # The derivative in the level is one over the density.
    in_p = push(zeros, jnp.ones(()))[1]
    np.testing.assert_allclose(in_p, np.exp(-probe(distribution, q)["log_prob"]), rtol=10 * EXACT)


@each_distribution
def test_save_and_load(name):
    distribution, buffer = build(name), io.BytesIO()
    eqx.tree_serialise_leaves(buffer, distribution)
    buffer.seek(0)
    loaded = eqx.tree_deserialise_leaves(buffer, jax.tree.map(jnp.zeros_like, distribution))
    assert eqx.tree_equal(distribution, loaded)


@each_distribution
@pytest.mark.parametrize("factor", [1e-160, 1e160] if X64 else [1e-25, 1e25])
def test_equivariance(name, factor):
    """Also where squares leave the range of the numbers."""
    y, shift = LOC + 0.37, 2 * factor
    plain = probe(build(name), y)
    moved = probe(build(name, shift=shift, factor=factor), factor * y + shift)
    expected = {
        **{key: factor * plain[key] for key in ("std", "crps")},
        **{key: factor * plain[key] + shift for key in ("mean", "icdf", "interval")},
        "cdf": plain["cdf"],
        "log_prob": plain["log_prob"] - math.log(factor),
    }
    for key, value in expected.items():
        atol = 0 if key in {"cdf", "log_prob"} else 5 * EXACT * factor
        np.testing.assert_allclose(moved[key], value, rtol=5 * EXACT, atol=atol, err_msg=key)


@each_distribution
def test_a_distribution_keeps_its_dtype(name):
    distribution = build(name, "float32")
    out = jax.eval_shape(_probe, distribution, LOC, LEVELS)
    out["sample"] = jax.eval_shape(distribution.sample, jax.random.key(0))
    out["integers"] = jax.eval_shape(distribution.cdf, np.arange(3))
    assert {key: value.dtype for key, value in out.items()} == dict.fromkeys(out, jnp.float32)


@each_with_an_inverse
def test_quantiles_stay_finite_and_in_order(name):
    p = np.array([0.0, 1e-12, 1e-4, 0.9, 1 - 1e-6, 1.0])
    q = np.asarray(probe(build(name), LOC, p)["icdf"])
    assert np.isfinite(q[:, 1:-1]).all()
    assert (q[:, 1:] >= q[:, :-1]).all()
    assert np.isinf(q[:, [0, -1]]).all() == (name in CONTINUOUS)


# ------------------------------------------------------------------ one distribution at a time


def test_log_probs_agree_with_scipy():
    u = np.array([0.3, -2.0, 40.0])
    actual = {name: probe(build(name), LOC + SCALE * u)["log_prob"] + np.log(SCALE) for name in DISTRIBUTIONS}
    np.testing.assert_allclose(actual["normal"], scipy.stats.norm.logpdf(u), rtol=EXACT)
    np.testing.assert_allclose(actual["student_t"], scipy.stats.t.logpdf(u, DF), rtol=EXACT)
    for name, member in (("mixture", scipy.stats.norm), ("mixture_of_t", scipy.stats.t(4.5))):
        members = zip(WEIGHTS, OFFSETS, SPREADS, strict=True)
        logs = [math.log(w / s) + member.logpdf((u - m) / s) for w, m, s in members]
        np.testing.assert_allclose(actual[name], np.logaddexp(*logs), rtol=EXACT)
    for name in ("point", "mixture_of_points", "empirical"):
        assert actual[name].tolist() == [-math.inf] * 3
    for row in range(3):  # the base's, and the log of the density of its probabilities between those of some ranks
        ranks = np.concatenate([[0], smoothing.bin_ranks(9), [10]])
        p, ends = scipy.stats.norm.cdf(u[row]), np.array([0, *PROBABILITIES, 1])[ranks]
        j = np.searchsorted(ends, p, side="right") - 1 if p < 1 else -2
        ratio = math.log((ranks[j + 1] - ranks[j]) / 10 / (ends[j + 1] - ends[j]))
        np.testing.assert_allclose(
            actual["recalibrated"][row], scipy.stats.norm.logpdf(u[row]) + ratio, rtol=10 * EXACT
        )


def test_log_prob_of_quantiles_is_the_derivative_of_the_cdf():
    expected = np.log([0.15 / 1.5, 0.3 / 0.6, 0.3 / 1.6]) - np.log(SCALE)
    for distribution in (build("quantiles"), build("scaled_quantiles")):
        np.testing.assert_allclose(
            distribution.log_prob(LOC + SCALE * np.array([-1.0, -0.3, 1.2])), expected, rtol=EXACT
        )
        for u in (-2.1, 1.8):
            assert distribution.log_prob(LOC + SCALE * u).tolist() == [-math.inf] * 3


def test_rows_without_a_spread_are_points():
    y, loc, zero = np.array([-1.0, 2.0, 2.5]), np.full(3, 2.0), np.zeros(3)
    levels, pair = np.array([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]), np.full((2, 3), 2.0)
    distributions = [
        Recalibrated(Normal(loc, zero), PROBABILITIES),
        Point(loc),
        Normal(loc, zero),
        StudentT(5.0, loc, zero),
        Empirical(loc, zero, TABLE),
        Quantiles(KNOTS, np.full((3, 5), 2.0)),
        ScaledQuantiles(loc, zero, KNOTS, SHAPE),
        ScaledQuantiles(loc, zero, KNOTS, STEPS, "normal"),
        Histogram(np.full((3, 6), 2.0), np.tile(MASSES, (3, 1))),
        Histogram(np.full((3, 6), 2.0), np.tile(MASSES, (3, 1)), "half_normal"),
        Mixture(jax.vmap(Point)(pair)),
        Mixture(jax.vmap(Normal)(pair, 0 * pair)),
    ]
    for distribution in distributions:
        out = probe(distribution, y, levels)
        np.testing.assert_allclose(out["crps"], [3.0, 0.0, 0.5], rtol=EXACT)
        assert out["cdf"].tolist() == [0.0, 1.0, 1.0]
        assert out["std"].tolist() == [0.0] * 3
        assert out["log_prob"].tolist() == [-math.inf] * 3
        np.testing.assert_allclose(out["icdf"], 2.0, rtol=EXACT)
        for leaf in jax.tree.leaves(slopes((distribution, y, LEVELS))):
            assert np.isfinite(leaf).all(), distribution


def test_student_t_without_moments():
    distribution = StudentT(np.array([0.8, 1.5, 3.0]), 1.0, 2.0)
    assert np.isnan(distribution.mean).tolist() == [True, False, False]
    assert np.isinf(distribution.variance).tolist() == [True, True, False]
    np.testing.assert_allclose(distribution.icdf(0.9), scipy.stats.t.ppf(0.9, [0.8, 1.5, 3.0], 1, 2), rtol=EXACT)


def test_student_t_of_many_rows():
    """More of them than are integrated at once, by their number; the ends of intervals are their quantiles."""
    y = np.linspace(-5, 5, 70_001)
    distribution = StudentT(5.0, np.zeros(len(y)), 2.0)
    some = slice(None, None, 7000)
    np.testing.assert_allclose(distribution.cdf(y)[some], scipy.stats.t.cdf(y[some] / 2, 5), rtol=1e-9 if X64 else 1e-4)
    for end, level in zip(distribution.interval(0.9), (0.05, 0.95), strict=True):
        np.testing.assert_allclose(end[some], 2 * scipy.stats.t.ppf(level, 5), rtol=EXACT)


def test_student_t_of_several_outputs():
    """Each output is as it is alone."""
    df, loc, y = 3 + np.arange(6.0).reshape(3, 2), np.ones((3, 2)), np.arange(6.0).reshape(3, 2)
    both = StudentT(df, loc, 2.0)
    for k in range(2):
        alone = StudentT(df[:, k], loc[:, k], 2.0)
        for ours, theirs in zip(both.interval(0.9), alone.interval(0.9), strict=True):
            np.testing.assert_allclose(ours[:, k], theirs, rtol=EXACT)
        np.testing.assert_allclose(both.std[:, k], alone.std, rtol=EXACT)
        np.testing.assert_allclose(both.crps(y)[:, k], alone.crps(y[:, k]), rtol=EXACT)
        np.testing.assert_allclose(both.icdf(np.array([0.1, 0.7]))[:, k], alone.icdf(np.array([0.1, 0.7])), rtol=EXACT)


def test_student_t_quantiles_of_equal_degrees_of_freedom():
    distribution = StudentT(5.0, LOC, SCALE)
    expected = scipy.stats.t.ppf(LEVELS, 5, LOC[:, None], SCALE[:, None])
    np.testing.assert_allclose(distribution.icdf(LEVELS), expected, rtol=EXACT)
    np.testing.assert_allclose(distribution.icdf(0.1), expected[:, 1], rtol=EXACT)
    # Under jit, too, where the degrees of freedom are known, and where they are not.
    np.testing.assert_allclose(jax.jit(lambda p: distribution.icdf(p))(LEVELS), expected, rtol=EXACT)
    in_df = jax.jit(jax.grad(lambda df: StudentT(df, LOC, SCALE).icdf(0.9).sum()))(jnp.full(3, 5.0))
    step = (scipy.stats.t.ppf(0.9, 5.001) - scipy.stats.t.ppf(0.9, 4.999)) / 0.002
    np.testing.assert_allclose(in_df, SCALE * step, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:7 calibration rows are too few")
@pytest.mark.parametrize("rule", ["inverse_cdf", "crude", "conformal"])
def test_rules_of_an_empirical_distribution(rule):
    distribution = Empirical(LOC, SCALE, TABLE, rule)
    for p in (0.01, 2 / 7, 0.3, 0.5, 0.8, 0.95):
        size = len(TABLE)
        k = {
            "inverse_cdf": math.ceil(round(p * size, 9)),
            "crude": min(math.floor(round(p * size, 9)) + 1, size),
            "conformal": (math.floor if p < 0.5 else math.ceil)(round(p * (size + 1), 9)),
        }[rule]
        z = TABLE[k - 1] if 1 <= k <= size else -math.inf if k < 1 else math.inf
        np.testing.assert_allclose(distribution.icdf(p), LOC + SCALE * z, rtol=EXACT)
    assert np.isneginf(distribution.icdf(0.0)).all() == (rule == "conformal")
    # An end that the table cannot vouch for is infinite, even where the scale is 0.
    lower, upper = Empirical(LOC, 0.0, TABLE, rule).interval(0.9)
    assert np.isinf(lower).all() == np.isinf(upper).all() == (rule == "conformal")


def test_a_symmetric_interval_is_the_split_conformal_one(rng):
    sizes = np.sort(rng.uniform(1, 2, size=19))
    distribution = Empirical(LOC, SCALE, np.concatenate([-sizes[::-1], sizes]), "symmetric")
    for level, rank in ((0.01, 1), (0.5, 10), (0.7, 14), (0.9, 18), (0.95, 19)):
        lower, upper = distribution.interval(level)
        np.testing.assert_allclose(lower, LOC - SCALE * sizes[rank - 1], rtol=EXACT)
        np.testing.assert_allclose(upper, LOC + SCALE * sizes[rank - 1], rtol=EXACT)
        np.testing.assert_allclose(distribution.icdf((1 - level) / 2), lower, rtol=EXACT)
    np.testing.assert_allclose(distribution.icdf(0.5), LOC, rtol=EXACT)
    assert distribution.icdf(np.array([0.0, 1.0])).tolist() == [[-math.inf, math.inf]] * 3


@pytest.mark.contract_in_32_bits
@pytest.mark.parametrize(("level", "needed"), [(0.8, 9), (0.9, 19), (0.99, 199)])
def test_a_table_too_short_for_a_guarantee_says_so_once(level, needed):
    table = np.arange(1.0, 200.0)
    distributions = {
        "conformal": lambda size: Empirical(LOC, SCALE, table[:size], "conformal"),
        "symmetric": lambda size: Empirical(LOC, SCALE, np.r_[-table[:size][::-1], table[:size]], "symmetric"),
    }
    for rule, fewest in (("conformal", needed), ("symmetric", needed // 2)):
        assert np.isfinite(distributions[rule](fewest).interval(level)).all()
        with pytest.warns(UserWarning, match=f"{fewest - 1} calibration rows .* at least {fewest}:") as caught:
            lower, upper = distributions[rule](fewest - 1).interval(level)
        assert len(caught) == 1
        assert np.isneginf(lower).all()
        assert np.isposinf(upper).all()
        # Either end alone needs as many.
        for p in (round((1 - level) / 2, 9), (1 + level) / 2):
            with pytest.warns(UserWarning, match=f"at least {fewest}"):
                assert np.isinf(distributions[rule](fewest - 1).icdf(p)).all()


@pytest.mark.parametrize(("size", "level"), [(20, 0.9), (20, 0.5), (100, 0.9), (39, 0.95)])
def test_a_conformal_interval_has_its_coverage(size, level):
    # Between the order statistics of ranks j and k of L lies a new value with probability (k - j) / (L + 1).
    distribution = Empirical(0.0, 1.0, np.arange(1.0, size + 1), "conformal")
    lower, upper = distribution.interval(level)
    assert level - 1e-6 <= float(upper[0] - lower[0]) / (size + 1) < level + 2 / (size + 1)


def test_an_interval_under_jit_reads_the_same_ranks():
    # 1 - 0.9 is not 0.1 in binary: the rank of 200 x 0.05 must not depend on where the level is computed.
    distribution = Empirical(np.zeros(1), 1.0, np.arange(1.0, 201.0))
    for level in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99):
        lower, upper = jax.jit(lambda level: distribution.interval(level))(level)
        ranks = round(100 * (1 - level)), round(100 * (1 + level))
        np.testing.assert_allclose((lower[0], upper[0]), ranks, rtol=EXACT)


@pytest.mark.slow
@once
def test_large_tables_cost_little_memory():
    rows, size = 5000, 5000
    z, p = np.linspace(-1, 1, size), np.linspace(0.001, 0.999, size)
    for distribution in (Empirical(np.zeros(rows), 1.0, z), ScaledQuantiles(np.zeros(rows), 1.0, p, z, "normal")):
        for method in (
            lambda distribution: distribution.cdf(0.1),
            lambda distribution: distribution.crps(0.1),
            lambda distribution: distribution.icdf(0.1),
        ):
            memory = jax.jit(method).lower(distribution).compile().memory_analysis()
            assert memory.temp_size_in_bytes < 100 * (rows + size)


def test_mixture_moments_do_not_cancel():
    distribution = Mixture(jax.vmap(Normal)(np.array([[4096.0], [4097.0]]), np.array([[1e-3], [1e-3]])))
    np.testing.assert_allclose(distribution.std, math.sqrt(0.25 + 1e-6), rtol=1e-6)


def test_mixture_of_points_takes_the_smallest_value():
    distribution = Mixture(jax.vmap(Point)(np.array([[3.0, 1.0], [1.0, 1.0], [2.0, 5.0]])))
    levels = np.array([0.0, 1 / 3, 0.34, 2 / 3, 0.67, 1.0])
    assert distribution.icdf(levels).tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]]


@pytest.mark.slow
@once
def test_mixtures_of_any_distribution(rng):
    table = np.sort(rng.normal(size=30))
    levels = np.linspace(0.0005, 0.9995, 30)
    y = LOC + 0.7
    for make in (lambda loc: Empirical(loc, SCALE, table), lambda loc: Quantiles(levels, loc[:, None] + table)):
        parts = make(LOC), make(LOC + 1)
        distribution = Mixture(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), WEIGHTS)
        out = probe(distribution, y)
        expected = sum(w * probe(part, y)["cdf"] for w, part in zip(WEIGHTS, parts, strict=True))
        np.testing.assert_allclose(out["cdf"], expected, rtol=EXACT)
        for j, level in enumerate(LEVELS):
            assert (probe(distribution, out["icdf"][:, j] + 1e-4)["cdf"] >= level - EXACT).all()
            assert (probe(distribution, out["icdf"][:, j] - 1e-3)["cdf"] <= level + EXACT).all()
        # The score by the atoms of a fine discretisation: these distributions have no closed form.
        fine = [np.asarray(part.icdf((np.arange(600) + 0.5) / 600)) for part in parts]
        weights = np.repeat(WEIGHTS, 600) / 600
        for row in range(3):
            atoms = np.concatenate([fine[0][row], fine[1][row]])
            spread = np.abs(atoms[:, None] - atoms) @ weights @ weights
            expected = np.abs(atoms - y[row]) @ weights - 0.5 * spread
            np.testing.assert_allclose(out["crps"][row], expected, rtol=1e-2)


def test_parameters_are_numpy_arrays_numbers_and_integers():
    distribution = Normal(np.arange(3), 2)
    assert distribution.mean.dtype == distribution.std.dtype == jnp.zeros(0).dtype
    assert distribution.std.tolist() == [2.0] * 3
    assert Normal(0.0, 1.0).mean.shape == (1,)
    # A number has no say in the dtype; neither do levels and tables.
    single = np.zeros(3, "float32")
    assert Normal(single, np.float64(1)).std.dtype == jnp.float32
    assert Empirical(single, 1, TABLE).z.dtype == jnp.float32
    assert Quantiles(KNOTS, np.tile(SHAPE, (2, 1)).astype("float32")).levels.dtype == jnp.float32


@once
def test_several_outputs_are_as_many_columns(rng):
    means, stds, y = rng.normal(size=(4, 3)), rng.uniform(1, 2, size=(4, 3)), rng.normal(size=(4, 3))
    distribution = Normal(means, stds)
    for column in range(3):
        alone = Normal(means[:, column], stds[:, column])
        for name in ("cdf", "log_prob", "crps"):
            together, expected = getattr(distribution, name)(y), getattr(alone, name)(y[:, column])
            np.testing.assert_allclose(together[:, column], expected, rtol=1e-6)
        np.testing.assert_allclose(distribution.interval(0.9)[1][:, column], alone.interval(0.9)[1], rtol=1e-6)
    assert Point(means).crps(y).shape == (4, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normal(np.zeros(5), np.ones(3)), "std has 3 rows where 5 are expected"),
        (
            lambda: Normal(np.zeros((5, 1)), 1.0),
            r"mean must have shape \(n,\); got \(5, 1\): did you mean mean",
        ),
        (
            lambda: Normal(np.zeros((5, 2)), np.ones(5)),
            r"mean and std must have one shape; got \(5, 2\) and for std \(5,\)",
        ),
        (lambda: Normal(np.zeros(2), np.array([1.0, -2.0])), "std must not be negative; got -2"),
        (lambda: Point(np.array([0.0, np.nan])), "mean holds 1 values that are NaN or infinite"),
        (lambda: Point(np.zeros(0)), "mean is empty"),
        (lambda: StudentT(0.0, np.zeros(2), 1.0), "df must be positive; got 0"),
        (lambda: Mixture(Normal(np.zeros(2), 1.0)), r"components must be a stack.*shapes \(2,\), \(2,\)"),
        (lambda: Mixture(jax.vmap(Point)(np.zeros((2, 3))), np.ones(3) / 3), "weights has 3 rows where 2"),
        (
            lambda: Mixture(jax.vmap(Point)(np.zeros((2, 3))), np.array([0.5, 0.6])),
            "weights must sum to 1; got 1.1",
        ),
        (
            lambda: Mixture(jax.vmap(Point)(np.zeros((2, 3))), np.array([1.5, -0.5])),
            "weights must not be negative",
        ),
        (
            lambda: Empirical(np.zeros(2), 1.0, np.array([0.0, 2.0, 1.0])),
            "z must be in increasing order; got 2 before 1",
        ),
        (lambda: Empirical(np.zeros(2), 1.0, TABLE, "linear"), "rule must be one of .* got 'linear'"),
        (lambda: Empirical(np.zeros(2), 1.0, TABLES), "z has 3 rows where 2 are expected"),
        (lambda: Empirical(LOC, 1.0, -TABLES), "z must be in increasing order; got .* in row 0"),
        (lambda: Empirical(LOC, 1.0, TABLE, "symmetric"), "z must hold an even number of values, .* got 7"),
        (lambda: Empirical(LOC, 1.0, TABLE[:6], "symmetric"), "z must be symmetric about 0; got values from -2 to 1"),
        (lambda: build("empirical").interval(np.array([0.5, 0.9])), r"must be one number; got shape \(2,\)"),
        (lambda: Empirical(LOC, 1.0, TABLE, "conformal").interval(90), "did you mean 0.9"),
        (
            lambda: Mixture(jax.vmap(lambda loc: Empirical(loc, 1.0, TABLE, "conformal"))(np.zeros((2, 3)))),
            "must not have rule='conformal'",
        ),
        (lambda: Quantiles(np.array([0.1, 0.9]), np.zeros((2, 3))), r"got shape \(2, 3\) and 2 levels"),
        (
            lambda: Quantiles(np.array([0.5, 0.5]), np.zeros((2, 2))),
            "levels must be strictly increasing; got 0.5",
        ),
        (lambda: Recalibrated(build("normal"), KNOTS[::-1]), "u must be in increasing order; got 0.9 before 0.6"),
        (lambda: Recalibrated(build("normal"), np.array([0.5, 1.0])), "u must lie between 0 and 1; got 1"),
        (lambda: ScaledQuantiles(LOC, 1.0, KNOTS, SHAPE[:4]), "levels has 5 rows where 4 are expected"),
        (
            lambda: ScaledQuantiles(LOC, 1.0, np.array([0.5, 1.0]), np.zeros(2), "normal"),
            "levels must lie between .* got 1",
        ),
        (
            lambda: ScaledQuantiles(LOC, 1.0, np.array([0.5, 1.5]), np.zeros(2)),
            "levels must lie between 0 and 1; got 1.5",
        ),
        (lambda: ScaledQuantiles(LOC, 1.0, KNOTS, -SHAPE), "z must be in increasing order; got 2 before 0.5"),
        (lambda: ScaledQuantiles(LOC, 1.0, KNOTS, SHAPE, "linear"), "tails must be one of .* got 'linear'"),
        (
            lambda: Quantiles(np.array([5.0, 95.0]), np.zeros((2, 2))),
            "levels must lie between 0 and 1; got 5",
        ),
        (
            lambda: Quantiles(np.array([0.1, 0.9]), np.array([[0.0, 1.0], [3.0, 2.0]])),
            "the quantiles of 1 of 2 rows cross, the first in row 1, 3 before 2. sort=True sorts them",
        ),
        (lambda: Histogram(EDGES[:5], MASSES[None]), r"edges must be one more than the bins: got shape \(5,\)"),
        (lambda: Histogram(np.stack([EDGES, EDGES]), MASSES[None]), "edges has 2 rows where 1 are expected"),
        (lambda: Histogram(EDGES[::-1], MASSES[None]), "edges must be in increasing order; got 1.4 before 0.9"),
        (lambda: Histogram(EDGES, 2 * MASSES[None]), "masses of a row must have the sum 1; got 2 in row 0"),
        (lambda: Histogram(EDGES, np.array([[1.2, 0, 0, 0, -0.2]])), "masses must not be negative; got -0.2"),
        (lambda: Histogram(EDGES, MASSES[None], "normal"), "tails must be one of .* got 'normal'"),
        (lambda: Histogram(EDGES[:2], np.ones((1, 1)), "half_normal"), "needs two bins at least"),
        (lambda: build("normal").cdf(np.zeros(4)), r"y must be one number or have shape \(3,\); got \(4,\)"),
        (lambda: build("normal").cdf(np.zeros((3, 1))), r"got \(3, 1\): did you mean y\[:, 0\]"),
        # A number for all rows is not what is wrong.
        (lambda: StudentT(4.0, np.zeros((5, 1)), 1.0), r"loc must have shape \(n,\); got \(5, 1\): did you mean loc"),
        (lambda: Normal(0.0, np.ones((5, 1))), r"std must have shape \(n,\); got \(5, 1\): did you mean std"),
        *(
            (make, r"(mean|loc|lowest) must have shape \(n,\); got \(5, 1\): did you mean (mean|loc|lowest)\[:, 0\]")
            for make in (
                lambda: Point(np.zeros((5, 1))),
                lambda: Normal(np.zeros((5, 1)), np.ones(5)),
                lambda: Mixture(jax.vmap(Normal)(np.zeros((2, 5, 1)), np.ones((2, 5, 1)))),
                lambda: Empirical(np.zeros((5, 1)), 1.0, TABLE),
                lambda: ScaledQuantiles(np.zeros((5, 1)), 1.0, KNOTS, SHAPE),
                lambda: Quantiles(KNOTS, np.tile(SHAPE, (5, 1)), lowest=np.zeros((5, 1))),
            )
        ),
        (lambda: build("normal").icdf(95.0), "p must lie between 0 and 1; got 95"),
        (
            lambda: build("normal").icdf(np.zeros((2, 2))),
            r"p must be one level or a vector.*got shape \(2, 2\)",
        ),
        (
            lambda: build("normal").interval(90),
            "confidence_level must lie between 0 and 1; got 90: did you mean 0.9",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_shapes_are_checked_under_jit():
    with pytest.raises(ValueError, match="std has 3 rows where 5 are expected"):
        jax.jit(Normal)(jnp.zeros(5), jnp.ones(3))


# ------------------------------------------------------------------ quantiles that are given


def test_crossing_quantiles_are_sorted_within_each_row(rng):
    """That never increases the pinball loss of a row, the sum over the levels."""
    y, crossing = rng.normal(size=(50, 1)), rng.normal(size=(50, len(KNOTS)))
    distribution = Quantiles(KNOTS, crossing, sort=True)
    np.testing.assert_allclose(distribution.values, np.sort(crossing, axis=1), rtol=1e-7)
    loss = lambda q: np.maximum(KNOTS * (y - q), (KNOTS - 1) * (y - q)).sum(axis=1)
    before, after = loss(crossing), loss(np.asarray(distribution.values))
    assert (after <= before + 1e-6).all()
    assert (after < before - 1e-3).any()
    traced = jax.jit(lambda values: Quantiles(KNOTS, values, sort=True).values)(crossing)
    np.testing.assert_array_equal(traced, distribution.values)


def test_crossing_quantiles_say_how_many_rows_cross():
    values = np.array([[0.0, 1.0], [2.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    message = r"of 2 of 4 rows cross, the first in row 1, 2 before 1\. sort=True sorts them within each row"
    with pytest.raises(ValueError, match=message):
        Quantiles(np.array([0.1, 0.9]), values)


# Each has quantiles from 0.2 to 0.9.
ASYMMETRIC = np.array([0.2, 0.5, 0.9])
ENDING = {
    "quantiles": lambda: Quantiles(ASYMMETRIC, np.tile([0.0, 1.0, 2.0], (3, 1))),
    "partial": lambda: Quantiles(ASYMMETRIC, np.tile([0.0, 1.0, 2.0], (3, 1)), lowest=0.0),
    "scaled": lambda: ScaledQuantiles(LOC, 1.0, ASYMMETRIC, np.array([0.0, 1.0, 2.0])),
    "mixture": lambda: Mixture(
        jax.vmap(lambda loc: Quantiles(ASYMMETRIC, loc[:, None] + jnp.array([[0.0, 1.0, 2.0]])))(np.zeros((2, 3)))
    ),
}


@pytest.mark.parametrize("name", ENDING)
def test_levels_beyond_the_quantiles_come_with_one_warning(name):
    distribution = ENDING[name]()
    for ask, what in (
        (lambda: distribution.icdf(0.95), "0.95"),
        (lambda: distribution.icdf(np.array([0.1, 0.5, 0.95])), "0.1 and 0.95"),
        (lambda: distribution.icdf(np.linspace(0.01, 0.99, 99)), "28 levels"),
        (lambda: distribution.interval(0.8), "0.1"),
        (lambda: distribution.interval(0.9), "0.05 and 0.95"),
    ):
        with pytest.warns(UserWarning, match=f"at levels from 0.2 to 0.9; at {what} the outermost of them") as caught:
            ask()
        assert len(caught) == 1
        if not X64:  # without the frames of the checks of annotations
            assert caught[0].filename == __file__
    # None at these levels, nor where they are not known.
    distribution.interval(0.6)
    distribution.icdf(np.array([0.0, 0.2, 0.9, 1.0]))
    jax.jit(lambda p: distribution.icdf(p))(0.99)
    jax.jit(lambda distribution: distribution.interval(0.9))(distribution)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_puts_no_level_beyond_the_quantiles(dtype):
    for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.999):
        ends = np.array([(1 - level) / 2, (1 + level) / 2]).astype(dtype)
        distribution = Quantiles(np.array([round((1 - level) / 2, 9), (1 + level) / 2]), np.array([[0, 1]], dtype))
        distribution.interval(level)
        distribution.interval(jnp.asarray(level))
        distribution.icdf(ends)


# ------------------------------------------------------------------ invariants

FLOATS = st.floats(-1e6, 1e6, width=32)
crps_of_normal = jax.jit(lambda y, mean, std: Normal(mean, std).crps(y))
crps_and_levels = jax.jit(lambda distribution, y, p: (distribution.crps(y), distribution.icdf(p), distribution.cdf(y)))


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(y=FLOATS, mean=FLOATS, std=st.floats(0, 1e6, width=32))
def test_a_normal_score_lies_between_zero_and_the_absolute_error(y, mean, std):
    score, error = float(crps_of_normal(y, mean, std)[0]), abs(y - mean)
    rounding = 1e-5 * (error + std)
    assert -rounding <= score <= error + std * 0.2337 + rounding


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(
    values=st.lists(FLOATS, min_size=6, max_size=6),
    y=FLOATS,
    p=st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3),
)
def test_distributions_of_tables_and_quantiles_keep_their_order(values, y, p):
    values, p = np.sort(np.array(values)), np.sort(np.array(p))
    size = np.abs(values).max() + abs(y)
    for distribution in (
        Empirical(np.zeros(1), 1.0, values),
        Quantiles(np.linspace(0.1, 0.9, 6), values[None]),
        Histogram(values, np.full((1, 5), 0.2)),
        Mixture(jax.vmap(Point)(values[:, None])),
    ):
        score, quantiles, probability = crps_and_levels(distribution, y, p)
        assert float(score[0]) >= -1e-5 * size
        assert (np.diff(quantiles[0]) >= -1e-5 * size).all()
        assert 0 <= float(probability[0]) <= 1 + 1e-6


def test_rows_are_filled_up_where_that_changes_nothing(rng):
    """37 rows are no bucket; rows of several classes, several runs and mistakes are as they are."""
    loc, y = rng.normal(size=(2, 37))
    both = concatenated.concatenate([Normal(loc[:20], 1.0), StudentT(5.0, loc[20:], 1.0)])
    levels = jnp.asarray(np.linspace(0.05, 0.95, 30))
    given = Quantiles(KNOTS, loc[:, None] + SHAPE)
    for forecast in (given, StudentT(5.0, loc, 1.0), Recalibrated(both, levels)):
        found = forecast.mean, forecast.std, forecast.crps(y), *forecast.interval(0.8)
        traced = jax.jit(lambda d: (d.mean, d.std, d.crps(y), *d.interval(0.8)))(forecast)
        for one, other in zip(found, traced, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    runs = jax.vmap(StudentT)(*jnp.broadcast_to(jnp.asarray(loc[:5]), (3, 5, 5)) ** 2 + 1)
    assert runs.crps(y[:5]).shape == (5, 5)
    with pytest.raises(ValueError, match=r"shape \(37,\); got \(5,\)"):
        StudentT(5.0, loc, 1.0).cdf(y[:5])


def test_tables_of_integers_have_infinite_quantiles():
    table = jnp.arange(1, 6)
    found = quantiles.empirical_quantile(table, jnp.array([0.0, 0.5, 0.99]), "conformal")
    np.testing.assert_array_equal(found, [-np.inf, 3, np.inf])
    assert quantiles.empirical_quantile(jnp.array([-2, -1, 1, 2]), 0.99, "symmetric") == np.inf


# ------------------------------------------------------------------ histograms


@pytest.mark.parametrize("tails", ["uniform", "half_normal"])
def test_the_density_of_a_histogram_is_the_derivative_of_its_cdf(tails):
    """And rows of shared edges are those of edges of their own; there is no density where no mass is."""
    masses = np.stack([MASSES, MASSES[::-1], np.full(5, 0.2)])
    shared, own = Histogram(EDGES, masses, tails), Histogram(np.tile(EDGES, (3, 1)), masses, tails)
    for y in (-3.7, -2.0, -0.5, 0.5, 1.2, 1.9):
        exact = jax.vmap(jax.grad(lambda y, row: shared[row].cdf(y)[0]), (None, 0))(y, jnp.arange(3))
        np.testing.assert_allclose(np.exp(shared.log_prob(y)), exact, rtol=1e-4, atol=1e-7)
        np.testing.assert_array_equal(shared.log_prob(y), own.log_prob(y))
        np.testing.assert_allclose(shared.crps(y), own.crps(y), rtol=EXACT)
    np.testing.assert_array_equal(shared.icdf(LEVELS), own.icdf(LEVELS))
    assert shared.log_prob(0.5)[0] == -np.inf
    assert np.isinf(shared.log_prob(1.5)).all() == (tails == "uniform")
    assert np.isinf(shared.crps(np.inf)).all()


def test_a_bin_without_a_width_is_an_atom():
    distribution = Histogram(np.array([0.0, 1.0, 1.0, 2.0]), np.array([[0.25, 0.5, 0.25]]))
    below, at = distribution.cdf(1 - 1e-6), distribution.cdf(1.0)
    np.testing.assert_allclose([below[0], at[0]], [0.25, 0.75], atol=1e-5)
    np.testing.assert_allclose(distribution.icdf(np.array([0.125, 0.3, 0.7, 0.875]))[0], [0.5, 1, 1, 1.5], rtol=1e-6)
    np.testing.assert_allclose(distribution.variance, 2 * 0.25 * (0.25 + 1 / 12), rtol=1e-6)


def test_levels_0_and_1_of_a_histogram_are_the_ends_of_its_mass():
    distribution = Histogram(np.arange(6.0), np.array([[0, 0.3, 0.4, 0.3, 0]]))
    np.testing.assert_array_equal(distribution.icdf(np.array([0.0, 1.0]))[0], [1, 4])


def test_the_outermost_bins_hold_half_of_a_half_normal_tail():
    distribution = Histogram(EDGES, MASSES[None], "half_normal")
    np.testing.assert_allclose(distribution.cdf(EDGES[0]), 0.5 * MASSES[0], rtol=1e-5)
    np.testing.assert_allclose(1 - distribution.cdf(EDGES[-1]), 0.5 * MASSES[-1], rtol=1e-5)
    assert distribution.is_continuous
    assert not Histogram(EDGES, MASSES[None]).is_continuous


def test_equal_smooth_quantiles_are_atoms():
    """Against the quantile function, at the outermost levels and between."""
    values = np.array([-1.0, -1.0, 0.0, 0.0, 2.0])
    distribution, knots = SmoothQuantiles(KNOTS, values[None], 4.0), scipy.stats.t.ppf(KNOTS, 4)

    def mean_of(function):
        """The integral of a function of the level and its quantile, between the knots."""

        def at(p):
            u = scipy.stats.t.ppf(p, 4)
            beyond = max(u - knots[-1], 0) * 2 / (knots[-1] - knots[-2])
            return function(p, np.interp(u, knots, values) + beyond)

        ends = [0, *KNOTS, 0.99, 0.9999, 1 - 1e-6, 1]
        return sum(scipy.integrate.quad(at, a, b, limit=200)[0] for a, b in itertools.pairwise(ends))

    tolerance = 1e-5
    mean = mean_of(lambda p, q: q)
    np.testing.assert_allclose(distribution.mean, mean, rtol=tolerance)
    np.testing.assert_allclose(distribution.variance, mean_of(lambda p, q: (q - mean) ** 2), rtol=1e-3)
    for y in (-2.0, -1.0, -0.4, 0.0, 1.0, 4.0):
        expected = mean_of(lambda p, q, y=y: 2 * ((y <= q) - p) * (q - y))
        np.testing.assert_allclose(distribution.crps(y), expected, rtol=1e-4, err_msg=str(y))
    cdf = [float(distribution.cdf(y)[0]) for y in (-1.001, -1.0, -1e-6, 0.0)]
    np.testing.assert_allclose(cdf, [0, 0.2, 0.5, 0.6], atol=1e-4)
    np.testing.assert_allclose(distribution.icdf(np.array([0.001, 0.1, 0.55]))[0], [-1, -1, 0], atol=1e-6)
    assert distribution.log_prob(-1.5) == -np.inf
    assert np.isfinite(distribution.log_prob(0.5)).all()
