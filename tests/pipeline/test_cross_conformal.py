"""CV+, the jackknife+ and the jackknife+-after-bootstrap: against loops over their formulas, and by simulation."""

import math
import warnings
from fractions import Fraction
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal import cross_conformal
from jaxcal.distributions import CrossConformal
from jaxcal.guarantee import MeasuredCoverage, WorstCaseGuarantee
from jaxcal.pipeline import CVPlus
from jaxcal.pipeline.folds import drawn
from jaxcal.predictors.forests import out_of_bag_weights

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)
X64 = jax.config.jax_enable_x64
EXACT = 1e-12 if X64 else 2e-5
LEVELS = (0.02, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)
FEW_ROWS = pytest.mark.filterwarnings("ignore:.* calibration rows are too few")


def interval_by_hand(centers, widths, level):
    """The ranks floor(a (n + 1)) and ceil((1 - a) (n + 1)) of one row, in exact arithmetic; never past the median."""
    n, level = len(centers), Fraction(str(level))
    low, high = math.floor((1 - level) * (n + 1)), math.ceil(level * (n + 1))
    lower = sorted(centers - widths)[low - 1] if low >= 1 else -math.inf
    upper = sorted(centers + widths)[high - 1] if high <= n else math.inf
    return min(lower, np.median(centers)), max(upper, np.median(centers))


def assert_intervals(distribution, centers, widths, levels=LEVELS):
    """Of all rows and levels; centers and widths are [n, L]."""
    ends = distribution.icdf(np.array([(1 + sign * level) / 2 for level in levels for sign in (-1, 1)]))
    for row, (c, w) in enumerate(zip(centers, widths, strict=True)):
        expected = [end for level in levels for end in interval_by_hand(c, w, level)]
        np.testing.assert_allclose(ends[row], expected, rtol=EXACT, atol=EXACT)


def line_with_noise(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(n, 2))
    return x, 2 * x[:, 0] + rng.normal(size=n)


class Line(eqx.Module):
    """A line in the first column, as a module of arrays."""

    slope: jax.Array

    def __call__(self, x):
        return self.slope * x[:, 0]


@jax.jit
def fit_line(x, y, *, key):
    return Line((x[:, 0] @ y) / (x[:, 0] @ x[:, 0]))


def slope_by_hand(x, y):
    return (x[:, 0] @ y) / (x[:, 0] @ x[:, 0])


# ------------------------------------------------------------------ the formulas


@FEW_ROWS
@pytest.mark.parametrize(("num_models", "num_errors"), [(5, 5), (3, 39), (10, 100)])
@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_those_of_a_loop(num_models, num_errors, ties, rng):
    predictions, stds = 3 * rng.normal(size=(4, num_models)), rng.uniform(0.5, 2, size=(4, num_models))
    errors = np.abs(rng.normal(size=num_errors))
    weights = rng.dirichlet(np.ones(num_models), num_errors).T
    if ties:
        predictions, errors = predictions.round(), errors.round()
        weights = np.repeat(np.eye(num_models), -(-num_errors // num_models), axis=1)[:, :num_errors]
    centers = predictions @ weights
    assert_intervals(CrossConformal(predictions, weights, errors), centers, np.tile(errors, (4, 1)))
    assert_intervals(CrossConformal(predictions, weights, errors, stds), centers, stds @ weights * errors)


@FEW_ROWS
def test_quantiles_are_the_ends_of_the_intervals_and_increase(rng):
    # Models that disagree by more than their errors: at low levels the ends of the formula cross.
    distribution = CrossConformal(5 * rng.normal(size=(6, 4)), np.repeat(np.eye(4), 5, axis=1), rng.uniform(size=20))
    for level in LEVELS:
        lower, upper = distribution.interval(level)
        np.testing.assert_array_equal(lower, distribution.icdf((1 - level) / 2))
        np.testing.assert_array_equal(upper, distribution.icdf((1 + level) / 2))
    levels = np.linspace(0, 1, 201)
    quantiles = np.asarray(distribution.icdf(levels))
    assert (quantiles[:, 1:] >= quantiles[:, :-1]).all()
    centers = np.asarray(distribution.predictions) @ np.asarray(distribution.weights)
    np.testing.assert_allclose(distribution.icdf(0.5), np.median(centers, axis=1), rtol=EXACT)
    formula = np.sort(centers - np.asarray(distribution.errors), axis=1)[:, 19 - 1]
    assert (formula > np.asarray(distribution.icdf(0.45))).any()  # a = 0.9, rank 18.9: they do cross


@pytest.mark.parametrize(("level", "needed"), [(0.5, 1), (0.9, 9), (0.99, 99)])
def test_too_few_errors_for_a_level_give_infinite_ends_and_one_warning(level, needed):
    with_errors = lambda number: CrossConformal(np.zeros((2, 1)), np.ones((1, number)), np.arange(1.0, number + 1))
    assert np.isfinite(with_errors(needed).interval(level)).all()
    if needed == 1:
        return
    text = f"{needed - 1} calibration rows are too few for the level asked for, which needs at least"
    with pytest.warns(UserWarning, match=f"{text} {needed}: the quantile is infinite") as caught:
        lower, upper = with_errors(needed - 1).interval(level)
    assert len(caught) == 1
    assert np.isneginf(lower).all()
    assert np.isposinf(upper).all()


def test_rows_in_batches_are_the_same(monkeypatch, rng):
    monkeypatch.setattr("jaxcal.distributions.cross_conformal._CENTERS_AT_ONCE", 22)
    predictions, errors = rng.normal(size=(7, 1)), rng.uniform(size=11)  # shapes of no other test: nothing is compiled
    distribution = CrossConformal(predictions, np.ones((1, 11)), errors)
    assert_intervals(distribution, np.tile(predictions, 11), np.tile(errors, (7, 1)), LEVELS[2:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"errors": np.array([1.0, -1.0])}, "errors must not be negative; got -1"),
        ({"errors": np.ones(3)}, "weights has 2 columns; the errors are 3"),
        ({"weights": np.array([[1.0, 0.5], [0.5, 0.5]])}, "weights must sum to 1 in every column; got 1.5 in column 0"),
        ({"weights": np.array([[2.0, 1.0], [-1.0, 0.0]])}, "weights must not be negative"),
        ({"weights": np.eye(3)}, "weights has 3 rows where 2 are expected"),
        ({"stds": np.ones((4, 3))}, "stds has 3 columns; predictions has 2"),
        ({"stds": -np.ones((4, 2))}, "stds must not be negative"),
        ({"predictions": np.full((4, 2), np.nan)}, "predictions holds 8 values that are NaN"),
    ],
)
def test_mistakes_in_a_distribution_are_named(change, message):
    right = {"predictions": np.zeros((4, 2)), "weights": np.eye(2), "errors": np.ones(2)}
    with pytest.raises(ValueError, match=message):
        CrossConformal(**(right | change))


# ------------------------------------------------------------------ the fits


def test_folds_of_equal_size():
    parts = drawn(23, 5, None, KEY, equal=True)
    held_out = np.concatenate([part.held_out for part in parts])
    assert [len(part.held_out) for part in parts] == [4] * 5
    assert len(set(held_out.tolist())) == 20
    rest = np.setdiff1d(np.arange(23), held_out)
    for part in parts:
        assert sorted([*part.training, *part.held_out]) == list(range(23))
        assert set(rest) <= set(part.training)


@FEW_ROWS
def test_cv_plus_is_the_loop_over_its_models():
    """Which rows a model was fitted to is known from what it was given."""
    x, y = line_with_noise(13)
    given = []

    def fit(x, y, *, key):
        given.append((np.asarray(x), np.asarray(y)))
        return fit_line(x, y, key=key)

    new = np.linspace(-1, 1, 4)[:, None] * np.ones(2)
    distribution = cross_conformal.fit(fit, x, y, key=KEY, folds=4)(new)
    size, slopes, errors = 13 // 4, [], []
    for x_fitted, y_fitted in given:
        held_out = [row for row in range(13) if not np.isclose(x_fitted, x[row]).all(axis=1).any()]
        assert len(held_out) == size
        slope = slope_by_hand(x_fitted, y_fitted)
        slopes += [slope] * size
        errors += [abs(y[row] - slope * x[row, 0]) for row in held_out]
    assert_intervals(distribution, new[:, :1] * np.array(slopes), np.tile(errors, (4, 1)))


def test_with_a_row_a_fold_it_is_the_jackknife_plus():
    x, y = line_with_noise(19)
    without = lambda i: slope_by_hand(np.delete(x, i, axis=0), np.delete(y, i))
    slopes = np.array([without(i) for i in range(19)])
    fitted = cross_conformal.fit(fit_line, x, y, key=KEY, folds=19)
    centers, widths = x[:5, :1] * slopes, np.tile(np.abs(y - slopes * x[:, 0]), (5, 1))
    assert_intervals(fitted(x[:5]), centers, widths, LEVELS[:-1])
    assert fitted.guarantee(0.9).coverage == pytest.approx(0.8)


def test_after_bootstrap_is_the_loop_over_its_models():
    x, y = line_with_noise(30)
    given = []

    def fit(x, y, *, key):
        given.append((np.asarray(x), np.asarray(y)))
        return fit_line(x, y, key=key)

    fitted = cross_conformal.fit_bootstrap(fit, x, y, key=KEY, num_models=20)
    assert {len(x_fitted) for x_fitted, _ in given} == {30}
    slopes = np.array([slope_by_hand(*rows) for rows in given])
    without = np.array([[not np.isclose(rows, row).all(axis=1).any() for rows, _ in given] for row in x])
    mean_slopes = np.array([slopes[each].mean() for each in without])
    errors = np.abs(y - mean_slopes * x[:, 0])
    assert_intervals(fitted(x[:3]), x[:3, :1] * mean_slopes, np.tile(errors, (3, 1)), LEVELS[:-1])
    assert fitted.guarantee(0.9) == WorstCaseGuarantee(0.9, 30)


def test_the_number_of_bootstrap_models_follows_its_binomial_distribution():
    rng = np.random.default_rng(0)
    fraction = (1 - 1 / 31) ** 30
    draws = np.array([cross_conformal._number_of_models(rng, 100, 30) for _ in range(2000)])
    np.testing.assert_allclose(draws.mean(), 100 * fraction, atol=0.5)
    np.testing.assert_allclose(draws.var(), 100 * fraction * (1 - fraction), rtol=0.15)
    # Of samples of n + 1 rows so many are without the last one.
    samples = rng.integers(31, size=(20000, 30))
    np.testing.assert_allclose((samples < 30).all(axis=1).mean(), fraction, atol=0.015)


def test_a_row_in_all_samples_is_refused():
    in_bag = np.array([[True, True, False], [True, False, False]])
    with pytest.raises(ValueError, match="row 0 is in the bootstrap samples of all 2 models"):
        out_of_bag_weights(in_bag)
    np.testing.assert_array_equal(out_of_bag_weights(in_bag[:, 1:]), [[0, 0.5], [1, 0.5]])


def fit_normal(x, y, *, key):
    """A model with a std that depends on x."""
    line = fit_line(x, y, key=key)
    return lambda x: jc.Normal(line(x), 0.5 + jnp.abs(x[:, 1]))


@pytest.mark.parametrize(
    "fit",
    [partial(cross_conformal.fit, folds=6), pytest.param(cross_conformal.fit_bootstrap, marks=pytest.mark.slow)],
)
def test_errors_are_scaled_where_there_is_a_std(fit):
    x, y = line_with_noise(30)
    scaled, absolute = fit(fit_normal, x, y, key=KEY), fit(fit_normal, x, y, key=KEY, score="absolute")
    assert absolute(x).stds is None
    lower, upper = scaled(x).interval(0.8)
    by_std = np.asarray(upper - lower) / (0.5 + np.abs(x[:, 1]))
    assert by_std.max() < 1.3 * by_std.min()  # the centers differ a little
    np.testing.assert_array_equal(absolute(x).mean, scaled(x).mean)
    with pytest.raises(ValueError, match="it must have a std"):
        fit(fit_line, x, y, key=KEY, score="scaled")


def test_modules_of_arrays_are_stacked_and_predict_the_same():
    x, y = line_with_noise(40)
    calls = []

    class Counted(Line):
        def __call__(self, x):
            calls.append(1)
            return super().__call__(x)

    fit = lambda x, y, *, key: Counted(fit_line(x, y, key=key).slope)
    stacked = cross_conformal.fit(fit, x, y, key=KEY)
    assert stacked.models.model.slope.shape == (10,)
    calls.clear()
    together = stacked(x[:7])
    assert len(calls) <= 1  # a trace
    one_by_one = cross_conformal.fit(lambda x, y, *, key: fit(x, y, key=key).__call__, x, y, key=KEY)
    np.testing.assert_allclose(together.predictions, one_by_one(x[:7]).predictions, rtol=EXACT)


def test_models_that_read_values_are_called_one_after_another():
    class Careful(Line):
        def __call__(self, x):
            return super().__call__(x) if float(self.slope) < 9 else 0 * x[:, 0]

    x, y = line_with_noise(20)
    careful = cross_conformal.fit(lambda x, y, *, key: Careful(fit_line(x, y, key=key).slope), x, y, key=KEY, folds=4)
    assert isinstance(careful.models, cross_conformal._Several)
    plain = cross_conformal.fit(fit_line, x, y, key=KEY, folds=4)
    np.testing.assert_allclose(careful(x).predictions, plain(x).predictions, rtol=EXACT)


@jax.jit
@jax.vmap
def ends_and_gradient(x, fitted):
    width = lambda x: jnp.subtract(*fitted(x).interval(0.8)[::-1])
    return fitted(x).interval(0.8), jax.grad(lambda x: width(x).sum())(x)


def test_the_call_under_jit_vmap_and_grad():
    x, y = line_with_noise(30)
    fitted = cross_conformal.fit(lambda x, y, *, key: fit_line(x, y, key=key), x, y, key=KEY, folds=6)
    ends, gradient = ends_and_gradient(jnp.stack([x, x[::-1]]), jax.tree.map(lambda a: jnp.stack([a, a]), fitted))
    np.testing.assert_allclose(jnp.stack(ends, axis=1)[0], fitted(x).interval(0.8), rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(jnp.stack(ends, axis=1)[1], fitted(x[::-1]).interval(0.8), rtol=EXACT, atol=EXACT)
    # The ends move with x by the slopes of two of the models.
    slopes = np.asarray(fitted.models.model.slope)
    between = np.min(np.abs(np.asarray(gradient)[0, :, :1] - np.subtract.outer(slopes, slopes).ravel()), axis=1)
    np.testing.assert_allclose(between, 0, atol=1e-6)
    assert not gradient[:, :, 1].any()


@pytest.mark.slow
def test_a_predictor_of_jaxcal():
    x, y = line_with_noise(200)
    fitted = cross_conformal.fit(partial(jc.variance_network.fit, max_epochs=50), x[:100], y[:100], key=KEY, folds=5)
    assert isinstance(fitted.models, cross_conformal._Stack)
    assert fitted(x).stds is not None
    assert 0.8 < jc.metrics.coverage(y[100:], fitted(x[100:])) < 0.98


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"folds": 31}, "at least 31 are needed for 31 folds"),
        ({"score": "signed"}, "score must be one of None, 'absolute', 'scaled'; got 'signed'"),
        ({"groups": np.arange(29)}, "a label for each row"),
        ({"y": np.zeros(29)}, "29 rows where 30"),
        ({"fit_model": lambda x, y, *, key: lambda x: x[:1, 0]}, r"predict \[1, 1"),
    ],
)
def test_mistakes_are_named(options, message):
    x, y = line_with_noise(30)
    with pytest.raises(ValueError, match=message):
        cross_conformal.fit(**({"fit_model": fit_line, "x": x, "y": y, "key": KEY} | options))


# ------------------------------------------------------------------ the guarantee


def test_the_guarantee_is_that_of_the_theorems():
    for rows, folds in [(100, 5), (100, 10), (1000, 10), (50, 50), (12, 2)]:
        guarantee = WorstCaseGuarantee(0.9, rows, folds)
        n, k = Fraction(rows), Fraction(folds)
        excess = min(2 * (1 - 1 / k) / (n / k + 1), (1 - k / n) / (k + 1))
        assert guarantee.coverage == pytest.approx(max(0.0, float(Fraction(4, 5) - excess)))
        assert excess <= math.sqrt(2 / rows)  # as the paper sums it up
    assert WorstCaseGuarantee(0.9, 50, 50).coverage == WorstCaseGuarantee(0.9, 50).coverage == pytest.approx(0.8)


def test_the_guarantee_in_words():
    assert "covers a new row with probability 71.8 % at least" in str(WorstCaseGuarantee(0.9, 100, 10))
    assert "It is about 90 % where models" in str(WorstCaseGuarantee(0.9, 100, 10))
    assert str(WorstCaseGuarantee(0.5, 100, 10)).startswith("In the worst case no coverage of the 50 % interval")
    assert WorstCaseGuarantee(0.5, 100, 10).coverage == 0
    infinite = WorstCaseGuarantee(0.99, 50, 10)
    assert "infinite: 50 calibration rows are too few" in str(infinite)
    assert infinite.coverage == 1
    for level, rows, folds, message in [(90.0, 100, 10, "did you mean 0.9"), (0.9, 103, 10, "a multiple of num_folds")]:
        with pytest.raises(ValueError, match=message):
            WorstCaseGuarantee(level, rows, folds)


def test_no_guarantee_for_folds_of_groups():
    x, y = line_with_noise(40)
    groups = np.repeat(np.arange(8), 5)
    fitted = cross_conformal.fit(fit_line, x, y, key=KEY, folds=4, groups=groups)
    assert fitted.errors.shape == (40,)
    with pytest.raises(ValueError, match="not exchangeable"):
        fitted.guarantee(0.9)


# ------------------------------------------------------------------ pipelines


class Mean:
    """An object with `fit` and `predict`, as scikit-learn has them."""

    def fit(self, x, y):
        self.mean = y.mean()

    def predict(self, x):
        return np.full(len(x), self.mean)


@pytest.mark.parametrize("predictor", [Mean(), lambda x, y: fit_line(x, y, key=None), fit_normal])
def test_pipelines_of_objects_modules_and_functions(predictor):
    x, y = line_with_noise(40)
    pipeline = jc.pipeline.fit(x, y, predictor=predictor, method=CVPlus(folds=5), key=KEY)
    assert isinstance(pipeline(x), CrossConformal)
    assert [step.name for step in pipeline.steps][-1] == "cv+"
    assert pipeline.guarantee(0.9) == WorstCaseGuarantee(0.9, 40, 5)
    assert str(pipeline).splitlines()[-1].startswith("40 data points, out of fold")
    # The scores are those of the same models: the errors of the first step are the calibration errors.
    first = pipeline.steps[0]
    errors = np.abs(np.asarray(first.y - first.predictions.mean)) / (
        1.0 if pipeline(x).stds is None else np.asarray(first.predictions.std)
    )
    np.testing.assert_allclose(np.sort(pipeline.chain.errors), np.sort(errors), rtol=1e-5)


def test_calibrators_are_fitted_without_each_fold_too():
    x, y = line_with_noise(43)
    seen = []

    def shift(x, base, y):
        seen.append(len(y))
        offset = jnp.mean(y - base.mean)
        return lambda x, base: jc.Point(base.mean + offset)

    predictor = lambda x, y: lambda x: jnp.zeros(len(x))
    pipeline = jc.pipeline.fit(x, y, predictor=predictor, calibrators=[shift], method="cv+", key=KEY)
    assert seen == [39] * 10  # and no fit to all rows
    assert [step.name for step in pipeline.steps] == ["<lambda>", "shift", "cv+"]
    offsets = np.asarray(pipeline(x[:1]).predictions)[0]
    assert len(set(offsets.tolist())) == 10
    assert pipeline.guarantee(0.9).num_calibration == len(pipeline.steps[-1].rows) == 40


def test_a_pipeline_with_groups_reports_what_was_measured():
    x, y = line_with_noise(40)
    predictor = lambda x, y: fit_line(x, y, key=None)
    groups = np.repeat(np.arange(8), 5)
    pipeline = jc.pipeline.fit(x, y, predictor=predictor, method=CVPlus(groups=groups, folds=4), key=KEY)
    assert isinstance(pipeline.guarantee(0.9), MeasuredCoverage)
    assert pipeline.guarantee(0.9).num_rows == 40


@pytest.mark.parametrize("options", [{"predictor": None}, {"recalibrate": None}, {"recalibrate": jc.crude.fit}])
def test_cv_plus_needs_a_predictor_and_is_the_last_step_itself(options):
    x, y = line_with_noise(30)
    with pytest.raises(ValueError, match="needs a predictor, and neither recalibrate nor by"):
        jc.pipeline.fit(x, y, **{"predictor": Mean(), "method": "cv+", "key": KEY, **options})


# ------------------------------------------------------------------ simulations


def min_norm(x, y):
    """Least squares of the least norm for many runs at once: x [r, n, d], y [r, n] -> [r, d]."""
    return (np.linalg.pinv(x) @ y[..., None])[..., 0]


@pytest.mark.slow
def test_cv_plus_covers_where_errors_out_of_fold_do_not(rng):
    """Least squares with as many columns as rows: without a fold its errors are small, with all rows they are large."""
    covered = {"naive": [], "cv+": []}
    for seed in range(25):
        x, x_new = rng.normal(size=(100, 100)), rng.normal(size=(200, 100))
        weights = rng.normal(size=100) / 10
        y, y_new = x @ weights + rng.normal(size=100), x_new @ weights + rng.normal(size=200)

        def fit(x, y, *, key):
            slopes = np.linalg.pinv(np.asarray(x, float)) @ np.asarray(y, float)
            return lambda x: np.asarray(x) @ slopes

        base = jc.out_of_fold(fit, x, y, key=jax.random.key(seed), folds=10)
        naive = jc.conformal.fit(None, base, y)(None, jc.Point(fit(x, y, key=None)(x_new)))
        crossed = cross_conformal.fit(fit, x, y, key=jax.random.key(seed), folds=10)(x_new)
        covered["naive"].append(float(jc.metrics.coverage(y_new, naive)))
        covered["cv+"].append(float(jc.metrics.coverage(y_new, crossed)))
    assert np.mean(covered["naive"]) < 0.4
    assert 0.87 < np.mean(covered["cv+"]) < 0.99


@pytest.mark.slow
@FEW_ROWS
@pytest.mark.parametrize("rows", [9, 19, 99])
@pytest.mark.parametrize("columns", [1, 15])
def test_coverage_by_simulation(rows, columns, rng):
    """The jackknife+, and CV+ of 3 folds: never below the guarantee, and a line's coverage is that of its rank."""
    runs, slopes = (500 if rows == 99 else 2000), rng.normal(size=columns)
    x, x_new = rng.normal(size=(runs, rows, columns)), rng.normal(size=(runs, columns))
    y, y_new = x @ slopes + rng.normal(size=(runs, rows)), x_new @ slopes + rng.normal(size=runs)
    for folds in (3, rows):
        size = rows // folds
        predictions, errors = np.zeros((runs, folds)), np.zeros((runs, rows))
        for fold in range(folds):
            held_out = np.arange(fold * size, (fold + 1) * size)
            found = min_norm(np.delete(x, held_out, axis=1), np.delete(y, held_out, axis=1))
            predictions[:, fold] = np.sum(x_new * found, axis=1)
            errors[:, held_out] = np.abs(y[:, held_out] - (x[:, held_out] @ found[..., None])[..., 0])
        used = size * folds
        weights = np.tile(np.repeat(np.eye(folds), size, axis=1), (runs, 1, 1))
        runs_of = jax.vmap(CrossConformal)(predictions[:, None], weights, errors[:, :used])
        for level in (0.5, 0.8, 0.9, 0.99):
            lower, upper = runs_of.interval(level)
            covered = np.mean((np.asarray(lower)[:, 0] <= y_new) & (y_new <= np.asarray(upper)[:, 0]))
            error = 4 * math.sqrt(0.25 / runs)
            assert covered > WorstCaseGuarantee(level, used, folds).coverage - error, (level, folds)
            exact = min(1, math.ceil(round(level * (used + 1), 9)) / (used + 1))
            if columns == 1 and folds == rows:
                assert abs(covered - exact) < error + 2 / rows, (level, covered, exact)
            assert covered > exact - error - 0.02, (level, folds, covered)


@pytest.mark.slow
def test_coverage_after_bootstrap_by_simulation():
    covered = []
    for seed in range(150):
        x, y = line_with_noise(80, seed)
        fitted = cross_conformal.fit_bootstrap(fit_line, x[:40], y[:40], key=jax.random.key(seed), num_models=40)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of models compiles anew
            covered.append(float(jc.metrics.coverage(y[40:], fitted(x[40:]))))
    assert abs(np.mean(covered) - 37 / 41) < 4 * np.std(covered) / math.sqrt(150) + 0.01
