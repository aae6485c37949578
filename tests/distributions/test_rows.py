"""Distributions have rows: how many, some of them, and those of several together, for every class."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal import _checks
from jaxcal.distributions import (
    Concatenated,
    CrossConformal,
    Empirical,
    Histogram,
    Mixture,
    MultivariateEmpirical,
    MultivariateNormal,
    Normal,
    Point,
    Quantiles,
    Recalibrated,
    ScaledQuantiles,
    StudentT,
)
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions.concatenated import with_moments
from jaxcal.functional import linear_tables, tables

pytestmark = pytest.mark.any_precision

# What every row has of its own: five rows.
RNG = np.random.default_rng(3)
LOC, SCALE, OTHER = RNG.normal(size=5), RNG.uniform(1, 2, size=5), RNG.uniform(size=5)
GROUP = np.array([0, 1, 0, 1, 1], np.int32)
TABLES = np.sort(RNG.normal(size=(5, 7)))
ROOTS = np.tril(RNG.uniform(1, 2, size=(5, 2, 2)))
ALL = np.arange(5)
# What all rows share.
LEVELS, SHAPE = np.array([0.1, 0.5, 0.9]), np.array([-1.0, 0.2, 2.0])
TABLE = np.sort(RNG.normal(size=5))  # as many as there are rows
MODELS, WEIGHTS = RNG.normal(size=(5, 2)), np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
HEIGHTS = RNG.dirichlet(np.ones(4), size=5)
OF_GROUPS = jnp.array([-1.0, 1.0, 2.0, -5.0, 5.0]), jnp.array([0, 0, 0, 1, 1])


# Each is a function of the numbers of its rows.
BUILD = {
    "point": lambda rows: Point(LOC[rows]),
    "normal": lambda rows: Normal(LOC[rows], SCALE[rows]),
    "of several outputs": lambda rows: Normal(MODELS[rows], 1 + MODELS[rows] ** 2),
    "student_t": lambda rows: StudentT(3 + OTHER[rows], LOC[rows], SCALE[rows]),
    "mixture": lambda rows: Mixture(jax.vmap(Normal)(MODELS[rows].T, 1 + MODELS[rows].T ** 2), np.array([0.3, 0.7])),
    "mixture of quantiles": lambda rows: Mixture(
        jax.vmap(lambda loc: Quantiles(LEVELS, loc[:, None] + SHAPE[None]))(MODELS[rows].T)
    ),
    "empirical": lambda rows: Empirical(LOC[rows], SCALE[rows], TABLE),
    "own tables": lambda rows: Empirical(LOC[rows], SCALE[rows], TABLES[rows]),
    "randomized": lambda rows: Empirical(LOC[rows], SCALE[rows], TABLE, "randomized", OTHER[rows]),
    "grouped": lambda rows: Empirical(
        LOC[rows],
        SCALE[rows],
        tables.make(*OF_GROUPS, 2),
        "crude",
        group=jnp.asarray(GROUP[rows]),
        new_weight=jnp.asarray(OTHER[rows]),
    ),
    "grouped quantiles": lambda rows: ScaledQuantiles(
        LOC[rows],
        SCALE[rows],
        None,
        linear_tables.make(*OF_GROUPS, np.array([3, 2])),
        group=jnp.asarray(GROUP[rows]),
    ),
    "quantiles": lambda rows: Quantiles(LEVELS, LOC[rows, None] + SHAPE),
    "scaled quantiles": lambda rows: ScaledQuantiles(LOC[rows], SCALE[rows], LEVELS, SHAPE, "normal"),
    "partial quantiles": lambda rows: Quantiles(LEVELS, LOC[rows, None] + SHAPE, lowest=OTHER[rows] / 2),
    "recalibrated": lambda rows: Recalibrated(Normal(LOC[rows], SCALE[rows]), LEVELS),
    "histogram": lambda rows: Histogram(TABLE, HEIGHTS[rows]),
    "histogram of own edges": lambda rows: Histogram(TABLES[rows, :5], HEIGHTS[rows], "half_normal"),
    "cross-conformal": lambda rows: CrossConformal(MODELS[rows], WEIGHTS, SHAPE**2, MODELS[rows] ** 2),
    "multivariate normal": lambda rows: MultivariateNormal(MODELS[rows], ROOTS[rows] @ ROOTS[rows].mT),
    "multivariate empirical": lambda rows: MultivariateEmpirical(MODELS[rows], ROOTS[rows], MODELS),
}
each_class = pytest.mark.parametrize("name", BUILD)
INDICES = [
    3,
    np.int64(-1),
    slice(1, 3),
    slice(None, None, -2),
    np.median(OTHER) < OTHER,
    [True, False, False, True, False],
    [4, 0, 0, -2],
    jnp.array([1, -1]),
]


# ------------------------------------------------------------------ some rows


@each_class
def test_some_rows_are_a_distribution_made_of_them(name):
    """Also where a table that all rows share has as many values as there are rows."""
    distribution = BUILD[name](ALL)
    assert len(distribution) == 5
    for index in INDICES:
        some, rows = distribution[index], np.atleast_1d(ALL[index])
        assert eqx.tree_equal(some, BUILD[name](rows)), index
        assert len(some) == len(rows)


def parts_of_two_tables():
    """Rows 0, 3, 4 by one table, rows 2, 1 by another."""
    parts = [Empirical(np.zeros(3), 1.0, TABLE), Empirical(np.ones(2), 1.0, 2 * TABLE)]
    return Concatenated(parts, [[0, 3, 4], [2, 1]])


@pytest.mark.parametrize("wrap", [lambda parts: parts, lambda parts: Recalibrated(parts, LEVELS)])
def test_some_rows_of_several_parts_keep_their_tables(wrap):
    distribution, levels = wrap(parts_of_two_tables()), jnp.array([0.3, 0.6, 0.9])
    quantiles = np.asarray(distribution._quantiles(levels))
    for index in (2, [4, 1, 1, 0], slice(None, None, -1), ALL == 3):
        some, rows = distribution[index], np.atleast_1d(ALL[index])
        assert len(some) == len(rows)
        np.testing.assert_array_equal(some._quantiles(levels), quantiles[rows])


def test_predictions_out_of_fold_stay_so():
    for distribution in (BUILD["quantiles"](ALL), parts_of_two_tables()):
        assert marked_out_of_fold(distribution)[1:].is_out_of_fold
        assert not distribution[1:].is_out_of_fold


def test_numbers_of_rows_may_be_traced():
    for name in ("mixture of quantiles", "empirical", "recalibrated"):
        taken = jax.jit(lambda distribution, index: distribution[index])(BUILD[name](ALL), np.array([-1, 2, 0]))
        assert eqx.tree_equal(taken, BUILD[name](np.array([4, 2, 0])))
    distribution = BUILD["normal"](ALL)
    _, means = jax.lax.scan(lambda _, i: (None, distribution[i].mean[0]), None, jnp.arange(6))
    np.testing.assert_array_equal(means[:5], distribution.mean)
    assert np.isnan(means[5])  # out of range
    # Known rows of traced arrays.
    taken = jax.jit(lambda mean: Point(mean)[OTHER > 0.5])(LOC)
    assert eqx.tree_equal(taken, Point(LOC[OTHER > 0.5]))


def test_derivatives_pass_to_the_rows_that_are_taken():
    gradient = jax.grad(lambda mean: Normal(mean, 1.0)[[1, 1, 3]].mean.sum())(jnp.zeros(5))
    assert gradient.tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "index 5 is out of bounds"),
        ([0, -6], IndexError, "index -6 is out of bounds"),
        (ALL[:4] > 1, IndexError, "boolean index did not match"),
        ("mean", IndexError, "only integers, slices"),
        (0.5, IndexError, "only integers, slices"),
        ((slice(None), 0), IndexError, "too many indices"),
        (np.zeros((2, 2), int), IndexError, r"one axis; got one of shape \(2, 2\)"),
        (ALL > 9, ValueError, "selects none of 5 rows"),
        (slice(3, 3), ValueError, "selects none of 5 rows"),
    ],
)
def test_wrong_indices_are_named(index, error, message):
    with pytest.raises(error, match=message):
        BUILD["empirical"](ALL)[index]


def test_what_must_be_known_says_so():
    with pytest.raises(TypeError, match="dtype bool is traced: only numbers of rows may be"):
        jax.jit(lambda mask: Point(LOC)[mask].mean)(ALL > 1)
    with pytest.raises(TypeError, match="rows of a Concatenated cannot be taken under jit"):
        jax.jit(lambda index: parts_of_two_tables()[index].mean)(ALL)


@pytest.mark.parametrize("name", ["empirical", "mixture", "partial quantiles", "cross-conformal", "grouped"])
def test_a_stack_of_runs_is_refused_where_runs_have_tables(name):
    runs = jax.tree.map(lambda *leaves: jnp.stack(leaves), BUILD[name](ALL), BUILD[name](ALL))
    with pytest.raises(ValueError, match=r"is a stack of several runs, .* under jax\.vmap"):
        runs[0]
    taken = jax.vmap(lambda distribution: distribution[1:])(runs)
    assert eqx.tree_equal(jax.tree.map(lambda leaf: leaf[1], taken), BUILD[name](ALL[1:]))


@each_class
def test_a_distribution_is_no_sequence_of_numbers(name):
    distribution = BUILD[name](ALL)
    kind = type(distribution).__name__
    assert distribution
    for iterate in (list, tuple, iter, sorted):
        with pytest.raises(TypeError, match=f"a {kind} is not iterated over"):
            iterate(distribution)
    for convert in (np.asarray, jnp.asarray, np.ndim, lambda distribution: np.ones(5) * distribution):
        with pytest.raises(TypeError, match=f"a {kind} is no array"):
            convert(distribution)
    with pytest.raises(ValueError, match=f"mean must be an array of real numbers; got {kind}"):
        _checks.as_floats("mean", distribution)


# ------------------------------------------------------------------ rows together


@each_class
def test_rows_of_one_class_are_put_together_in_it(name):
    """As long as what all rows share is the same."""
    parts = [BUILD[name](rows) for rows in (np.array([0, 3]), np.array([1]), np.array([4, 2]))]
    assert eqx.tree_equal(jc.concatenate(parts), BUILD[name](np.array([0, 3, 1, 4, 2])))


def test_other_rows_are_put_together_as_parts():
    levels = jnp.array([0.3, 0.6, 0.9])
    first, second = Empirical(np.zeros(3), 1.0, TABLE), Empirical(np.ones(2), 1.0, 2 * TABLE)
    for parts in ([first, second], [first, Normal(LOC, SCALE)], [parts_of_two_tables(), second]):
        whole = jc.concatenate(parts)
        assert isinstance(whole, Concatenated)
        assert len(whole) == len(parts[0]) + len(parts[1])
        quantiles = np.concatenate([part._quantiles(levels) for part in parts])
        np.testing.assert_allclose(whole._quantiles(levels), quantiles, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(whole.sample(jax.random.key(0), (2, 3)).shape, (2, 3, len(whole)))
    # Tables of other lengths, rules and outcomes.
    assert isinstance(jc.concatenate([first, Empirical(np.zeros(1), 1.0, TABLE, "crude")]), Concatenated)
    assert isinstance(jc.concatenate([BUILD["own tables"](ALL), Empirical(LOC, 1.0, TABLES[:, 1:])]), Concatenated)


def test_slices_of_a_distribution_put_together_are_the_distribution():
    distribution = BUILD["student_t"](ALL)
    assert eqx.tree_equal(jc.concatenate([distribution[:2], distribution[2:3], distribution[3:]]), distribution)


def test_one_part_out_of_fold_is_enough():
    first, second = BUILD["normal"](ALL), BUILD["empirical"](ALL)
    for parts in ([first, marked_out_of_fold(first)], [marked_out_of_fold(second), first]):
        assert jc.concatenate(parts).is_out_of_fold
        assert not jc.concatenate([first, second]).is_out_of_fold
    assert not jc.concatenate([first, first]).is_out_of_fold


def test_rows_are_put_together_under_jit():
    whole = jax.jit(lambda mean: jc.concatenate([Point(mean), Point(mean + 1)]).mean)(LOC)
    np.testing.assert_allclose(whole, np.concatenate([LOC, LOC + 1]))
    # Whether two traced tables are equal is not known: each part keeps its own.
    two_tables = lambda z: jc.concatenate([Empirical(LOC, 1.0, z), Empirical(LOC, 1.0, 2 * z)])
    median = jax.jit(lambda z: two_tables(z).icdf(0.5))(TABLE)
    np.testing.assert_allclose(median, np.concatenate([LOC + TABLE[2], LOC + 2 * TABLE[2]]), rtol=1e-6)


def test_what_cannot_be_put_together_is_named():
    with pytest.raises(TypeError, match="must be a sequence of distributions; got ndarray among them"):
        jc.concatenate([Point(LOC), LOC])
    with pytest.raises(ValueError, match="distributions is empty"):
        jc.concatenate([])
    with pytest.raises(ValueError, match="distributions of vectors must be of one class"):
        jc.concatenate([BUILD["multivariate normal"](ALL), BUILD["multivariate empirical"](ALL)])


@pytest.mark.parametrize("method", ["cdf", "crps", "mean", "std"])
def test_many_parts_are_each_what_they_are_alone(method, rng):
    parts = [Empirical(rng.normal(size=1 + k % 2), 1.0, np.sort(rng.normal(size=5))) for k in range(20)]
    order, ends = rng.permutation(30), np.cumsum([len(part) for part in parts])
    rows, y = np.split(order, ends[:-1]), rng.normal(size=30)
    is_moment = method in ("mean", "std")
    of = lambda distribution, y: getattr(distribution, method) if is_moment else getattr(distribution, method)(y)
    alone = np.empty(30)
    for part, own in zip(parts, rows, strict=True):
        alone[own] = of(part, y[own])
    whole = with_moments(Concatenated(parts, rows))
    np.testing.assert_allclose(of(whole, y), alone, rtol=1e-6, atol=1e-6)
    some = rng.permutation(30)[:9]
    np.testing.assert_allclose(of(whole[some], y[some]), alone[some], rtol=1e-6, atol=1e-6)
