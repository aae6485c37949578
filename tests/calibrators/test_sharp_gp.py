"""Sharp calibrated Gaussian processes: calibration that is exact, quantiles that do not cross, and bad input."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from differences import check_gradients
from jax.scipy.special import ndtr
from scipy import stats

import jaxcal as jc
from jaxcal import Point
from jaxcal.calibrators import sharp_gp
from jaxcal.calibrators.sharp_gp import Variance, curves
from jaxcal.optimize import Result

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
EXACT = 1e-10 if X64 else 1e-4
KERNEL = sharp_gp.KernelAndNoise(np.array([1.0, 1.0]), 0.1)
SLOW = pytest.mark.slow
FORMS = (
    {},
    {"preset": "paper"},
    pytest.param({"variance": Variance(num_inducing=15)}, marks=SLOW),
    pytest.param({"variance": Variance(search="ard")}, marks=SLOW),
    pytest.param({"variance": Variance(fit_on="calibration")}, marks=SLOW),
)


def mean(x):
    return np.sin(2 * x[:, 0]) + x[:, 1]


def std(x):
    return 0.05 + 0.3 * np.abs(x[:, 0])


def draw(rng, size):
    """Rows whose noise grows where they are few, far from the middle."""
    x = rng.normal(size=(size, 2))
    return x, mean(x) + std(x) * rng.normal(size=size)


@pytest.fixture(scope="module")
def data():
    """60 training rows, 49 calibration rows and 100 others."""
    rng = np.random.default_rng(7)
    return [draw(rng, size) for size in (60, 49, 100)]


def values(distribution):
    """Its quantiles, whether those beyond them are infinite or not."""
    return getattr(distribution, "finite", distribution).values


def fit(data, **options):
    (x_train, y_train), (x, y) = data[:2]
    given = {"y_train": y_train, "kernel": KERNEL, **options}
    return sharp_gp.fit(x, Point(mean(x)), y, x_train=x_train, **given)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_exactly_j_calibration_rows_lie_at_or_below_level_j(data, form):
    """At all ranks, some of which are multiples of 1 / 200 and some not; and no quantiles cross, in any row."""
    x, y = (rows[:47] for rows in data[1])
    fitted = fit([data[0], (x, y)], **form)
    ranks = np.arange(1, 48)
    found = np.asarray(fitted(x, Point(mean(x))).icdf(ranks / 48))
    # The row of rank j lies on its own quantile: rounding decides on which side.
    slack = EXACT * np.abs(found).max()
    assert ((y[:, None] < found - slack).sum(axis=0) < ranks).all()
    assert ((y[:, None] <= found + slack).sum(axis=0) >= ranks).all()
    new = np.asarray(values(fitted(data[2][0], Point(mean(data[2][0])))))
    assert (np.diff(new, axis=1) >= 0).all()


def test_one_level_is_equation_6(data):
    """beta sigma, with beta the linear quantile of errors over sigma, on either side and whatever its sign."""
    (x_train, _), (x, y), (new, _) = data
    sigma = partial(exact_sigma, x_train)
    for level, shift in ((0.9, 0.0), (0.1, 0.0), (0.9, -5.0)):
        base = Point(mean(x) - shift)
        fitted = sharp_gp.fit(x, base, y, x_train=x_train, y_train=data[0][1], kernel=KERNEL, levels=level)
        errors = np.sort((y - base.mean) / sigma(x, fitted.lengthscales[0]))
        position = level * 50
        below = int(position + 1e-9)
        beta = errors[below - 1] + (position - below) * (errors[below] - errors[below - 1])
        distribution = fitted(new, Point(mean(new)))
        assert distribution.levels.tolist() == [pytest.approx(level)]
        expected = mean(new) + beta * sigma(new, fitted.lengthscales[0])
        np.testing.assert_allclose(
            distribution.values[:, 0], expected, rtol=1e-4 if X64 else 1e-2, atol=1e-5 if X64 else 1e-2
        )


def exact_sigma(x_train, x, lengthscale):
    """Eq. 3b, by the textbook."""
    gram = lambda a, b: np.exp(-(((a[:, None] - b[None]) / np.asarray(lengthscale)) ** 2).sum(-1) / 2)
    ratio = KERNEL.noise_ratio
    cross = gram(x_train, x)
    known = np.linalg.solve(gram(x_train, x_train) + ratio * np.eye(len(x_train)), cross)
    return np.sqrt(1 + ratio - (cross * known).sum(0))


def test_sharper_than_a_constant_width_where_errors_differ(data):
    """What it is for: narrow where the rows are many, wide where they are few."""
    x, _ = draw(np.random.default_rng(3), 2000)
    distribution = fit(data)(x, Point(mean(x)))
    lower, upper = distribution.interval(0.9)
    x_cal, y_cal = data[1]
    constant = jc.conformal.fit(None, Point(mean(x_cal)), y_cal)(None, Point(mean(x)))
    narrower, wider = (jnp.mean(jnp.subtract(*interval[::-1])) for interval in ((lower, upper), constant.interval(0.9)))
    assert narrower < wider
    assert np.corrcoef(upper - lower, np.abs(x[:, 0]))[0, 1] > 0.4


@SLOW
def test_kernel_is_found_where_none_is_given(data):
    model = jc.gaussian_process.fit(*data[0])
    given, found = fit(data, kernel=model), fit(data, kernel=None)
    np.testing.assert_allclose(found.lengthscales, given.lengthscales, rtol=1e-6 if X64 else 0.05)
    np.testing.assert_allclose(found.noise_ratio, given.noise_ratio, rtol=1e-3 if X64 else 0.05)


def test_calibration_rows_that_are_training_rows_raise_a_warning(data):
    (x, y), (new, y_new), _ = data
    again = partial(sharp_gp.fit, x_train=x, y_train=y, kernel=KERNEL)
    with pytest.warns(UserWarning, match="60 of 60 calibration rows are among the training rows"):
        again(x[::-1], Point(mean(x[::-1])), y[::-1])
    some, y_some = np.concatenate([new, x[:20]]), np.concatenate([y_new, y[:20]])
    with pytest.warns(UserWarning, match="20 of 69 calibration rows are among the training rows"):
        again(some, Point(mean(some)), y_some)
    # Given in another precision they are the same rows.
    with pytest.warns(UserWarning, match="60 of 60 calibration rows are among the training rows"):
        again(x.astype(np.float32), Point(mean(x)), y.astype(np.float32))
    # The inputs alone may be the same.
    again(x, Point(mean(x)), np.append(y[1:], 0.0))


def test_rows_that_are_often_repeated_raise_no_warning():
    """As where inputs and target are whole numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(3, size=(200, 2)), rng.integers(4, size=200)
    base = Point(x[100:].mean(axis=1))
    sharp_gp.fit(x[100:], base, y[100:], x_train=x[:100], y_train=y[:100], kernel=KERNEL)


def test_little_noise_is_not_raised_in_silence(data):
    """In 32 bits: what rounding adds to the noise ratio is small, or a warning says what it hides."""
    in_32_bits = [tuple(rows.astype(np.float32) for rows in part) for part in data]
    fitted = fit(in_32_bits, kernel=sharp_gp.KernelAndNoise(np.float32(1), np.float32(1e-4)), levels=0.9)
    np.testing.assert_allclose(fitted.noise_ratio, 1e-4, rtol=0.2)
    with pytest.warns(UserWarning, match="hardly greater than what rounding in float32 hides"):
        fit(in_32_bits, kernel=sharp_gp.KernelAndNoise(np.float32(10), np.float32(1e-7)), levels=0.9)


def test_target_of_the_training_rows_is_not_needed_to_fit_on_calibration_rows(data):
    variance = Variance(fit_on="calibration")
    with_targets, without = (fit(data, variance=variance, y_train=y_train) for y_train in (data[0][1], None))
    np.testing.assert_array_equal(with_targets.scores, without.scores)


@pytest.mark.slow
def test_sparse_variance_with_all_rows_is_the_exact_one(data):
    exact, sparse = fit(data), fit(data, variance=Variance(num_inducing=60))
    base = Point(mean(data[2][0]))
    np.testing.assert_allclose(
        values(sparse(data[2][0], base)), values(exact(data[2][0], base)), atol=1e-4 if X64 else 0.1
    )


@pytest.mark.parametrize("column", [pytest.param("constant", marks=pytest.mark.slow), "duplicate rows"])
def test_degenerate_inputs(data, column):
    (x_train, y_train), (x, y), (new, _) = data
    if column == "constant":
        x_train, x, new = (np.column_stack([a, np.full(len(a), 3.0)]) for a in (x_train, x, new))
        kernel = sharp_gp.KernelAndNoise(np.array([1.0, 1.0, 1.0]), 0.1)
    else:
        x_train, y_train, kernel = np.repeat(x_train, 3, axis=0), np.repeat(y_train, 3), KERNEL
    fitted = sharp_gp.fit(x, Point(mean(x)), y, x_train=x_train, y_train=y_train, kernel=kernel)
    assert np.isfinite(values(fitted(new, Point(mean(new))))).all()


def test_few_rows_carry_few_levels(data):
    (x_train, y_train), (x, y), _ = data
    few = partial(sharp_gp.fit, x_train=x_train, y_train=y_train, kernel=KERNEL)
    fitted = few(x[:9], Point(mean(x[:9])), y[:9])
    assert fitted.levels == (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9)
    assert [fitted.grid[0], fitted.grid[-1]] == pytest.approx([0.1, 0.9])
    with pytest.raises(ValueError, match=r"1 calibration rows are too few"):
        few(x[:1], Point(mean(x[:1])), y[:1])
    with pytest.raises(ValueError, match=r"49 calibration rows are too few for level 0\.99: at least 99"):
        fit(data, levels=(0.5, 0.99))


def test_levels_beyond_the_calibration_rows_are_infinite(data):
    """As those of conformal intervals; in the paper's algorithm they are those of the outermost level."""
    (x, y), new = (rows[:47] for rows in data[1]), data[2][0]
    some = [data[0], (x, y)]
    distribution = fit(some)(new, Point(mean(new)))
    assert np.isfinite(distribution.interval(0.95)).all()
    assert np.isfinite(distribution.icdf(np.array([0.025, 0.975]))).all()
    with pytest.warns(UserWarning, match=r"47 calibration rows are too few for .* at least 199: the quantile is inf"):
        lower, upper = distribution.interval(0.99)
    assert (lower == -np.inf).all()
    assert (upper == np.inf).all()
    with pytest.warns(UserWarning, match="at least 99: the quantile is infinite"):
        outer = distribution.icdf(0.99)
    assert (outer == np.inf).all()
    assert np.isfinite(distribution.mean).all()
    paper = fit(some, preset="paper")(new, Point(mean(new)))
    with pytest.warns(UserWarning, match="at 0.999 the outermost of them is taken"):
        np.testing.assert_array_equal(paper.icdf(0.999), paper.icdf(47 / 48))


@pytest.mark.parametrize("number", [9, pytest.param(19, marks=SLOW), 29])
def test_the_outermost_level_is_finite_however_it_is_rounded(data, number):
    some = [data[0], tuple(rows[:number] for rows in data[1])]
    distribution = fit(some)(data[2][0], Point(mean(data[2][0])))
    ends = np.array([1, number]) / (number + 1)
    for levels in (ends, 1 - ends):
        assert np.isfinite(distribution.icdf(levels)).all()
    assert np.isfinite(distribution.interval((number - 1) / (number + 1))).all()


# ------------------------------------------------------------------ the host, and programs


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"kernel": None},
        {"variance": Variance(search="ard"), "levels": 0.9},
        {"variance": Variance(fit_on="calibration")},
    ],
    ids=str,
)
def test_known_rows_compile_nothing_and_answers_are_those_of_a_program(data, form):
    (x_train, y_train), (x, y), (new, _) = (tuple(rows[:29] for rows in part) for part in data)
    options = {"x_train": x_train, "kernel": KERNEL} | form
    at, base, of_new = new, Point(mean(x)), Point(mean(new))
    with compilations() as compiled:
        fitted = sharp_gp.fit(x, base, y, y_train=y_train, **options)
        found = values(fitted(at, of_new))
    assert compiled == []

    @jax.jit
    def traced(x, y, y_train, at):
        return values(sharp_gp.fit(x, base, y, y_train=y_train, **options)(at, of_new))

    close = 1e-6 if X64 and "kernel" not in form else 0.05
    np.testing.assert_allclose(traced(x, y, y_train, at), found, atol=close)
    # Rows that a program closes over are known.
    inside = jax.jit(lambda at: values(sharp_gp.fit(x, base, y, y_train=y_train, **options)(at, of_new)))(at)
    np.testing.assert_allclose(inside, found, rtol=1e-5, atol=1e-9 if X64 else 1e-4)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("num_below", [0, 1, 3])
def test_a_score_is_the_place_of_an_error(rng, num_below, of):
    """Inside of the curve, on its quantiles, and beyond its ends."""
    distances = rng.uniform(0.1, 1, size=(6, 3))
    curve = curves.nested(of(distances), num_below)
    assert (np.diff(curve, axis=1) >= 0).all()
    np.testing.assert_array_equal(curve[:, num_below], 0)
    error = of(np.array([-3.0, -0.05, 0.0, 0.02, 0.3, 2.5]))
    scores = curves.scores(curve, error, num_below)
    found = np.diagonal(curves.errors(curve, scores, num_below))
    np.testing.assert_allclose(found, error, atol=1e-12 if X64 else 1e-5)
    places = of(np.arange(4.0) - num_below)
    np.testing.assert_allclose(curves.errors(curve, places, num_below), curve, atol=1e-12 if X64 else 1e-6)


def upper_end(x, mean_of_x, y, x_train, y_train, lengthscale=None, noise_ratio=None, **options):
    """Of intervals at three rows, as a function of all that is fitted to."""
    kernel = None if lengthscale is None else sharp_gp.KernelAndNoise(lengthscale, noise_ratio)
    fitted = sharp_gp.fit(
        x, Point(mean_of_x), y, x_train=x_train, y_train=y_train, kernel=kernel, levels=(0.2, 0.8), **options
    )
    return (values(fitted(x_train[:3] + 0.1, Point(jnp.zeros(3)))) @ jnp.arange(1.0, 1 + len(fitted.grid))).sum()


@pytest.mark.skipif(not X64, reason="differences need float64")
@pytest.mark.parametrize("given", [True, pytest.param(False, marks=SLOW)])
def test_the_fit_moves_with_its_rows_and_its_kernel(data, given):
    (x_train, y_train), (x, y), _ = data
    args = x[:20], mean(x[:20]), y[:20], x_train[:30], y_train[:30], *(map(np.asarray, KERNEL) if given else ())
    check_gradients(partial(upper_end, differentiable=True), args, 1e-6)


@SLOW
@pytest.mark.skipif(not X64, reason="takes an optimum to the last digits")
def test_derivatives_of_many_runs_and_of_a_search_cut_short(data, monkeypatch, own_programs):
    (x_train, y_train), (x, y), _ = data
    args, both = (x[:20], mean(x[:20]), y[:20], x_train[:30]), np.stack([y_train[:30], y_train[:30] ** 2])
    derivative = jax.grad(partial(upper_end, differentiable=True), argnums=4)
    runs = jax.jit(jax.vmap(lambda y_train: derivative(*args, y_train)))(both)
    np.testing.assert_allclose(runs, [derivative(*args, one) for one in both], rtol=1e-6, atol=1e-9)

    monkeypatch.setattr(sharp_gp.conditioning, "_BY_ALL", jc.gp.Exact(max_iterations=1))
    jax.clear_caches()
    assert np.isnan(derivative(*args, y_train[:30])).any()
    fitted = sharp_gp.fit(*args[:1], Point(args[1]), args[2], x_train=args[3], y_train=y_train[:30])
    assert fitted.result == Result.STEP_LIMIT


@pytest.mark.any_precision
def test_no_derivative_passes_unless_asked_for(data):
    (x_train, y_train), (x, y), _ = data
    args = x, mean(x), y, x_train, y_train, *map(jnp.asarray, KERNEL)
    for number in range(len(args)):
        with pytest.raises(TypeError, match=r"through sharp_gp\.fit: give differentiable=True"):
            jax.grad(upper_end, argnums=number)(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": (0.5, 1.0)}, "levels must lie"),
        ({"levels": (0.9, 0.5)}, "levels must be strictly increasing"),
        ({"levels": ()}, "at least one level"),
        ({"preset": "capone"}, "preset must be"),
        ({"preset": "paper", "differentiable": True}, "the search by column has no derivative"),
        ({"y_train": None}, "y_train may be None only"),
        ({"y_train": np.ones(60)}, "y_train is"),
        ({"y_train": np.ones(59)}, "y_train"),
        ({"kernel": sharp_gp.KernelAndNoise(np.ones(3), 0.1)}, "lengthscale for each of the 2 columns"),
        ({"kernel": sharp_gp.KernelAndNoise(1.0, -0.1)}, "noise_ratio must be positive"),
        ({"kernel": sharp_gp.KernelAndNoise(np.nan, 0.1)}, "lengthscale"),
    ],
)
def test_bad_options(data, options, message):
    with pytest.raises(ValueError, match=message):
        fit(data, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "grid"}, "search must be"),
        ({"fit_on": "test"}, "fit_on must be"),
        ({"num_inducing": 0}, "num_inducing must be"),
    ],
)
def test_bad_options_of_the_variance(options, message):
    with pytest.raises(ValueError, match=message):
        Variance(**options)


def test_bad_rows(data):
    (x_train, y_train), (x, y), (new, _) = data
    good = {"x_train": x_train, "y_train": y_train, "kernel": KERNEL}
    with pytest.raises(ValueError, match="NaN or infinite"):
        sharp_gp.fit(x, Point(mean(x)), np.where(np.arange(49) == 3, np.nan, y), **good)
    with pytest.raises(TypeError, match="Distribution"):
        sharp_gp.fit(x, mean(x), y, **good)
    with pytest.raises(ValueError, match="columns"):
        sharp_gp.fit(x[:, :1], Point(mean(x)), y, **good)
    with pytest.raises(ValueError, match="columns"):
        fit(data)(new[:, :1], Point(mean(new)))
    with pytest.warns(UserWarning, match="no prediction has a width"):
        sharp_gp.fit(x, Point(y), y, **good)


# ------------------------------------------------------------------ the guarantee


def coverages(num_sets, **options):
    """The probability of a new row at or below its 0.9-quantile, after each of many calibrations with 39 rows."""
    rng = np.random.default_rng(11)
    x_train, y_train = draw(rng, 40)
    sets = [np.stack(arrays) for arrays in zip(*(draw(rng, 39) for _ in range(num_sets)), strict=True)]
    # 1024 points of equal probability.
    along = stats.norm.ppf((np.arange(32) + 0.5) / 32)
    new = np.stack(np.meshgrid(along, along), axis=-1).reshape(-1, 2)

    @eqx.filter_jit
    def covered(x, y):
        fitted = sharp_gp.fit(
            x, Point(jnp.zeros(39)), y, x_train=x_train, y_train=y_train, kernel=KERNEL, levels=0.9, **options
        )
        quantiles = fitted(new, Point(jnp.zeros(1024))).values[:, 0]
        return jnp.mean(ndtr((quantiles - mean(new)) / std(new)))

    return np.array([covered(*rows) for rows in zip(*sets, strict=True)])


def test_coverage_of_the_default_follows_the_beta_distribution():
    found = coverages(150)
    distribution = stats.beta(36, 4)
    assert abs(found.mean() - distribution.mean()) < 4 * distribution.std() / np.sqrt(150)
    assert stats.kstest(found, distribution.cdf).pvalue > 0.01


@SLOW
def test_lengthscales_chosen_by_the_calibration_rows_cover_too_little():
    """The paper's Theorem 5.4, which does not hold for its own algorithm: by more than twenty standard errors."""
    found = coverages(300, preset="paper")
    distribution = stats.beta(36, 4)
    assert found.mean() < distribution.mean() - 4 * distribution.std() / np.sqrt(300)
