"""CRUDE against Algorithm 1 as a loop, its equations as sums, and a plain search for neighbors."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcal.calibrators import crude
from jaxcal.distributions import Empirical, MultivariateNormal, Normal, Point, StudentT

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-12 if X64 else 1e-5


@functools.cache
def rows(size, seed=0):
    """Means, stds and targets of calibration rows; a third of the standardized errors are tied."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=size), rng.uniform(0.5, 2, size=size)
    z = rng.normal(size=size)
    z[::3] = 0.5
    return mean, std, mean + std * z


def algorithm_1(calibration, queries, p):
    """The p-th quantiles as the paper's Algorithm 1 finds them, with its int(p L) free of binary rounding."""
    table = []
    for mean, std, y in zip(*calibration, strict=True):
        table.append((y - mean) / std)
        table.sort()
    z_p = table[min(math.floor(p * len(table) + 1e-9), len(table) - 1)]
    return [mean + std * z_p for mean, std, _ in zip(*queries, strict=True)]


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("options", [{"preset": "paper"}, {"rank": "crude"}], ids=["preset", "rank"])
def test_quantiles_are_those_of_algorithm_1(size, options):
    mean, std, y = rows(size)
    new = rows(5, seed=1)
    distribution = crude.fit(None, Normal(mean, std), y, **options)(None, Normal(*new[:2]))
    # Unsorted levels stay in their order; 0.29 x 100, 0.57 x 100 and 0.58 x 100 are no integers in binary.
    levels = np.array([0.95, 0.05, 0.29, 0.5, 0.57, 0.58, 0.01, 1.0, 0.0])
    expected = np.transpose([algorithm_1((mean, std, y), new, p) for p in levels])
    np.testing.assert_allclose(distribution.icdf(levels), expected, rtol=10 * EXACT, atol=EXACT)


def test_cdf_moments_and_score_are_sums_over_the_table():
    mean, std, y = rows(30)
    new_mean, new_std, new_y = rows(5, seed=1)
    distribution = crude.fit(None, Normal(mean, std), y)(None, Normal(new_mean, new_std))
    z = (y - mean) / std
    for row, (location, scale, outcome) in enumerate(zip(new_mean, new_std, new_y, strict=True)):
        values = location + scale * z
        # Equations 1, 2, 4 and 5, and the cdf before them.
        np.testing.assert_allclose(distribution.mean[row], location + scale * sum(z) / 30, rtol=EXACT)
        variance = sum((z - sum(z) / 30) ** 2) / 30
        np.testing.assert_allclose(distribution.variance[row], scale**2 * variance, rtol=EXACT)
        np.testing.assert_allclose(
            distribution.cdf(outcome + 1e-4)[row], sum(values <= outcome + 1e-4) / 30, rtol=EXACT
        )
        spread = sum(abs(a - b) for a in values for b in values) / 30**2
        score = sum(abs(values - outcome)) / 30 - spread / 2
        np.testing.assert_allclose(distribution.crps(outcome)[row], score, rtol=10 * EXACT)


def test_errors_of_a_point_are_on_the_scale_of_y():
    mean, _, y = rows(30)
    fitted = crude.fit(None, Point(mean), y)
    np.testing.assert_allclose(fitted.z, np.sort(y - mean), rtol=EXACT, atol=EXACT)
    # The stds of new predictions are then not used.
    for base in (Point(mean[:3]), Normal(mean[:3], 5.0)):
        np.testing.assert_allclose(fitted(None, base).mean, mean[:3] + np.mean(y - mean), rtol=EXACT)


@pytest.mark.parametrize("neighbors", [1, 4, 30])
def test_tables_of_neighbors(neighbors, rng):
    mean, std, y = rows(30)
    # Columns of other scales and one that is constant; inputs that come twice, whose order is that of the rows.
    x = np.column_stack([rng.normal(size=30), 1000 * rng.normal(size=30), np.full(30, 7.0)])
    x[15:20] = x[5:10]
    new_x, (new_mean, new_std, _) = rng.normal(size=(6, 3)) * [1, 1000, 0] + [0, 0, 7], rows(6, seed=1)
    new_x[:2] = x[15:17]
    fitted = crude.fit(x, Normal(mean, std), y, neighbors=neighbors)
    distribution = fitted(new_x, Normal(new_mean, new_std))
    scale = np.where(x.std(0) > 0, x.std(0, ddof=1), 1)
    for row, query in enumerate(new_x):
        distances = np.sum(((x - query) / scale) ** 2, axis=1).round(9)
        nearest = np.argsort(distances, kind="stable")[:neighbors]
        np.testing.assert_allclose(
            distribution.z[row], np.sort((y - mean)[nearest] / std[nearest]), rtol=EXACT, atol=EXACT
        )
    assert isinstance(distribution, Empirical)
    assert distribution.icdf(0.5).shape == (6,)


def test_neighbors_in_discrete_inputs_are_not_those_with_the_lowest_errors():
    y = np.arange(20.0)[::-1].copy()
    fitted = crude.fit(np.zeros(20), Point(np.zeros(20)), y, neighbors=5)
    np.testing.assert_array_equal(fitted(np.zeros(1), Point(0.0)).z, np.sort(y[:5])[None])


def test_a_search_for_neighbors_takes_little_memory():
    rows, size = 3000, 30_000
    x = jax.ShapeDtypeStruct((size, 3), jnp.zeros(0).dtype)
    predict = lambda x, y: crude.fit(x, Point(y), y, neighbors=10)(x[:rows], Point(y[:rows])).z
    memory = jax.jit(predict).lower(x, jax.ShapeDtypeStruct((size,), x.dtype)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.2 * x.dtype.itemsize * rows * size


def test_a_model_without_errors_gives_a_warning():
    with pytest.warns(UserWarning, match="y equals base.mean in every row"):
        distribution = crude.fit(None, Normal(np.ones(5), 1.0), np.ones(5))(None, Normal(np.ones(2), 1.0))
    assert distribution.std.tolist() == [0.0, 0.0]
    assert distribution.crps(3.0).tolist() == [2.0, 2.0]


def test_what_the_ranks_cover():
    mean, std, y = rows(20)
    # Between the ranks 2 and 20 of 20 lies a new value with probability 18 / 21.
    with pytest.raises(ValueError, match=r"its 90 % interval covers a new row with probability 85\.7 %"):
        crude.fit(None, Normal(mean, std), y, preset="paper").guarantee(0.9)
    guarantee = crude.fit(None, Normal(mean, std), y).guarantee(0.9)
    assert guarantee.coverage == pytest.approx(19 / 21)
    with pytest.raises(ValueError, match="a table of neighbors guarantees nothing"):
        crude.fit(y, Normal(mean, std), y, neighbors=3).guarantee(0.9)


def of_shape(mean, std):
    """Student t distributions with these means and stds, of other degrees of freedom in every row."""
    df = 3 + 4 * std
    return StudentT(df, mean, std * np.sqrt((df - 2) / df))


def test_the_ranks_of_probabilities_keep_the_shape_of_every_row():
    mean, std, y = rows(39)
    new_mean, new_std, _ = rows(5, seed=1)
    fitted = crude.fit(None, of_shape(mean, std), y, score="cdf")
    distribution = fitted(None, of_shape(new_mean, new_std))
    t_of = lambda mean, std: scipy.stats.t(3 + 4 * std, mean, std * np.sqrt((1 + 4 * std) / (3 + 4 * std)))
    u = np.sort(t_of(mean, std).cdf(y))
    for level, rank in ((0.05, 2), (0.5, 20), (0.95, 38)):
        expected = t_of(new_mean, new_std).ppf(u[rank - 1])
        np.testing.assert_allclose(
            distribution.icdf(level), expected, rtol=1e-8 if X64 else 1e-3, atol=1e-4 * (not X64)
        )
    assert fitted.guarantee(0.9).coverage == pytest.approx(36 / 40)
    # Of a normal base the ranks of the errors are the same.
    assert eqx.tree_equal(*(crude.fit(None, Normal(mean, std), y, score=score) for score in ("signed", "cdf")))


def covered(size, runs, level=0.9, **options):
    """How often normal outcomes lie in the intervals of so many calibrations of a right model."""

    def one(y, x):
        base = lambda n: Normal(jnp.zeros(n), jnp.ones(n))
        lower, upper = crude.fit(x, base(size), y, **options)(jnp.full((1, 1), 0.5), base(1)).interval(level)
        return lower[0], upper[0]

    rng = np.random.default_rng(size)
    lower, upper = jax.jit(jax.vmap(one))(rng.normal(size=(runs, size)), rng.uniform(size=(runs, size, 1)))
    return np.mean(scipy.stats.norm.cdf(upper) - scipy.stats.norm.cdf(lower)), 4 * 0.3 / math.sqrt(runs)


def test_default_intervals_cover_what_they_claim():
    # From 20 rows, or by 20 neighbors, Algorithm 1 covers 18 / 21 = 86 %.
    for coverage, error in (covered(20, 2000), covered(40, 2000, neighbors=20)):
        assert abs(coverage - 19 / 21) < error < 0.03
    with pytest.warns(UserWarning, match="9 calibration rows are too few for the level .* at least 19"):
        assert np.isinf(crude.fit(None, Point(np.zeros(9)), rows(9)[2])(None, Point(0.0)).interval(0.9)).all()


def test_an_interval_is_a_pair_of_quantiles():
    # Of 30 rows neither 31 x 0.05 nor 31 x 0.95 is a rank.
    distribution = crude.fit(None, Point(np.zeros(30)), np.arange(30.0))(None, Point(0.0))
    for level in (0.5, 0.8, 0.9):
        ends = np.concatenate(distribution.interval(level))
        np.testing.assert_array_equal(ends, distribution.icdf(np.array([(1 - level) / 2, (1 + level) / 2]))[0])
    np.testing.assert_allclose(ends, [0.0, 29.0], rtol=1e-5)


def fit_on(mean=None, std=None, y=None, base=Normal, **options):
    defaults = rows(5)
    mean, std, y = (own if given is None else given for given, own in zip((mean, std, y), defaults, strict=True))
    base = of_shape if base is StudentT else base
    return crude.fit(options.pop("x", None), base(mean, std), y, **options)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: fit_on(std=np.array([1, -1, 1, 1, 1])), "std must not be negative; got -1"),
        (lambda: fit_on(std=np.array([1, 1, np.nan, 1, 1])), "std holds 1 values that are NaN"),
        (lambda: fit_on(y=np.zeros(4)), "base.mean has 5 rows where 4 are expected"),
        (lambda: fit_on(rank="inverse_cdf"), "rank must be one of None, 'crude', 'conformal'; got 'inverse_cdf'"),
        (lambda: fit_on(std=np.full(5, 1e-38), y=np.full(5, 1e20)), r"\(y - base.mean\) / base.std holds .* infinite")
        if not X64
        else (lambda: fit_on(std=np.full(5, 1e-300), y=np.full(5, 1e20)), r"\(y - base.mean\) / base.std holds"),
        (lambda: fit_on(neighbors=3), "x is None"),
        (lambda: fit_on(neighbors=0, x=np.zeros(5)), "neighbors must be at least 1; got 0"),
        (lambda: fit_on(neighbors=6, x=np.zeros(5)), "neighbors is 6, but there are 5 calibration rows"),
        (lambda: fit_on(neighbors=3, x=np.zeros(4)), "x has 4 rows where 5 are expected"),
        (
            lambda: fit_on(neighbors=3, x=np.zeros(5), score="cdf", base=StudentT),
            "neighbors=3 cannot go with score='cdf'",
        ),
        (lambda: fit_on(preset="crude"), "preset must be one of None, 'paper'; got 'crude'"),
        (lambda: fit_on(preset="paper", rank="conformal"), "preset='paper' is rank='crude'; got rank='conformal'"),
        (lambda: fit_on(score="absolute"), "score must be one of 'signed', 'cdf'; got 'absolute'"),
        (lambda: crude.fit(None, Point(np.zeros(5)), np.ones(5), score="cdf"), "base is a Point: score='cdf' needs"),
        (
            lambda: fit_on(y=np.full(5, 1e30), score="cdf", base=StudentT),
            "score='cdf' needs a base.cdf.* 5 rows, the first at index 0, lack one",
        ),
        (
            lambda: fit_on(neighbors=3, x=np.zeros(5))(np.zeros((1, 2)), Normal(0.0, 1.0)),
            "x has 2 columns; the fit had 1",
        ),
        (lambda: fit_on(neighbors=3, x=np.zeros(5))(np.zeros(2), Normal(0.0, 1.0)), "x has 2 rows where 1"),
        (lambda: fit_on()(None, Point(0.0)), "base is a Point, but errors are measured in predicted stds"),
        (lambda: fit_on()(None, Normal(0.0, 1.0)).interval(90), "did you mean 0.9"),
        (lambda: fit_on(rank="conformal").guarantee(90.0), "did you mean 0.9"),
    ],
)
def test_mistakes_are_named(mistake, message):
    with pytest.raises(ValueError, match=message):
        mistake()


def test_errors_of_vectors_are_whitened():
    """Errors L z with skewed, dependent components z: their distribution is found back under another covariance."""
    rng = np.random.default_rng(5)
    factors = np.tril(rng.normal(size=(400, 2, 2))) + 2 * np.eye(2)[None]
    z = rng.gamma(2, size=(400, 2))
    z[:, 1] += z[:, 0] ** 2
    mean = rng.normal(size=(400, 2))
    base = MultivariateNormal(mean, factors @ np.swapaxes(factors, 1, 2))
    fitted = crude.fit(None, base, mean + (factors @ z[..., None])[..., 0])
    # Cholesky factors have a positive diagonal; those drawn here may not.
    signs = np.sign(np.diagonal(factors, axis1=1, axis2=2))
    tolerance = 1e-10 if X64 else 1e-3
    np.testing.assert_allclose(fitted.z, signs * z, rtol=tolerance, atol=tolerance)
    distribution = fitted(None, MultivariateNormal(np.array([[10.0, 20.0]]), np.array([[[4.0, 2.0], [2.0, 2.0]]])))
    expected = 20 + np.asarray(fitted.z) @ [1.0, 1.0]
    np.testing.assert_allclose(distribution.marginal(1).icdf(0.9), [np.sort(expected)[359]], rtol=tolerance)
    np.testing.assert_allclose(distribution.mean[:, 1], [expected.mean()], rtol=tolerance)


def test_vectors_have_no_ranks():
    base = MultivariateNormal(np.zeros((3, 2)), np.tile(np.eye(2), (3, 1, 1)))
    for options in ({"rank": "conformal"}, {"neighbors": 2}):
        with pytest.raises(ValueError, match=r"with (rank='conformal'|neighbors=2): vector targets have neither"):
            crude.fit(np.ones(3), base, np.ones((3, 2)), **options)
    with pytest.raises(TypeError, match="MultivariateNormal"):
        crude.fit(None, base, np.ones((3, 2)))(None, Normal(np.zeros(3), 1.0))
