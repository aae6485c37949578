"""The errors of one predictor: its shape is kept where it helps, the scale follows the inputs, groups have levels."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcal as jc
from jaxcal.frames.ordinal import Ordinal
from jaxcal.functional.small_trees import small_trees, sums
from jaxcal.pipeline.combination import combine
from jaxcal.pipeline.errors import LEVELS, SCORES_DF, Lines, Predicted
from jaxcal.pipeline.levels import recalibrated_levels, table_of

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)


def rows(rng, number=400):
    """Whose noise depends on the second input alone."""
    x = rng.uniform(-1, 1, (number, 2))
    return x, x[:, 0] + np.where(x[:, 1] > 0, 0.5, 0.05) * rng.normal(size=number)


def first_column(x, y):
    return lambda x: x[:, 0]


def test_lines_pass_through_the_quantiles_of_each_row(rng):
    mean, std = rng.normal(size=6), rng.uniform(0.5, 2, 6)
    quantiles = scipy.stats.norm.ppf(LEVELS, mean[:, None], std[:, None])
    lines = Lines.of(Predicted(mean, mean[:, None], quantiles), np.array(1.0), keeps_shape=True)
    t = scipy.stats.t.ppf(LEVELS, SCORES_DF)
    np.testing.assert_allclose(lines.center[:, None] + lines.quantiles(np.tile(t, (6, 1))), quantiles, rtol=1e-5)
    for place in (0, 4, 9):
        np.testing.assert_allclose(lines.score(quantiles[:, place]), t[place], rtol=1e-5)
    # Beyond the outermost quantiles the lines go on, and back.
    far = lines.score(mean + 20 * std)
    assert (far > t[-1]).all()
    again = lines.center + lines.quantiles(np.tile(far[:, None], (1, len(t))))[:, 0]
    np.testing.assert_allclose(again, mean + 20 * std, rtol=1e-5)
    plain = Lines.of(Predicted(mean, mean[:, None], quantiles), np.array(0.5), keeps_shape=False)
    np.testing.assert_allclose(plain.score(mean + 0.7), 1.4, rtol=1e-5)


def test_a_shape_of_its_own_is_kept_where_it_is_right(rng):
    """Exponential errors of known rates, twice as wide as is claimed."""
    scale = rng.uniform(0.2, 3, 600)
    y = 2 * scale * rng.exponential(size=600)
    base = jc.Quantiles(LEVELS, scale[:, None] * scipy.stats.expon.ppf(LEVELS))
    found = combine(np.zeros((600, 1)), [base], y, np.array_split(rng.permutation(600), 5))
    assert found.combiner.errors.keeps_shape
    of_rows = found.combiner(np.zeros((600, 1)), [base])
    np.testing.assert_allclose(of_rows.icdf(0.9), 2 * scale * scipy.stats.expon.ppf(0.9), rtol=0.15)
    # One that knows nothing is worse than no shape.
    wrong = jc.Normal(scale, rng.permutation(scale) ** 3)
    assert not combine(
        np.zeros((600, 1)), [wrong], scale + rng.normal(size=600), np.array_split(np.arange(600), 5)
    ).combiner.errors.keeps_shape


@pytest.mark.parametrize("keeps_shape", [False, True])
def test_another_unit_of_the_target_is_another_unit_of_the_forecast(keeps_shape, rng):
    x, y = rows(rng, 200)
    factor = 1e-20 if jax.config.jax_enable_x64 else 1e-12
    std = np.exp(x[:, 1]) if keeps_shape else 0
    base = lambda unit: jc.Normal(unit * x[:, 0], unit * std) if keeps_shape else jc.Point(unit * x[:, 0])
    parts = np.array_split(rng.permutation(200), 5)
    one, other = (combine(x, [base(unit)], unit * y, parts).combiner(x, [base(unit)]) for unit in (1.0, factor))
    np.testing.assert_allclose(other.icdf(0.9) / factor, one.icdf(0.9), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(other.icdf(0.05) / factor, one.icdf(0.05), rtol=1e-4, atol=1e-4)


def test_the_widths_of_one_predictor_follow_the_inputs(rng):
    x, y = rows(rng)
    fitted = jc.pipeline.fit(x, y, predictor=first_column, key=KEY)
    new_x, new_y = rows(rng, 2000)
    forecast = fitted(new_x)
    loud = new_x[:, 1] > 0
    assert np.median(forecast.std[loud]) > 4 * np.median(forecast.std[~loud])
    constant = jc.pipeline.fit(x, y, predictor=first_column, recalibrate=jc.conformal.fit, key=KEY)(new_x)
    assert jc.metrics.crps(new_y, forecast) < 0.9 * jc.metrics.crps(new_y, constant)
    assert np.isfinite(forecast.log_prob(new_y)).all()
    assert 0.86 < jc.metrics.coverage(new_y, forecast, confidence_level=0.9) < 0.94
    covered = lambda each, group: jc.metrics.coverage(new_y[group], each[group])
    difference = lambda each: covered(each, ~loud) - covered(each, loud)
    assert abs(difference(forecast)) < abs(difference(constant))
    assert [step.name for step in fitted.steps] == ["first_column", "learned errors"]
    assert "combined by" not in str(fitted)


def test_print_marks_densities_of_targets_that_are_equal(rng):
    x, y = rows(rng, 100)
    fit = lambda y: str(jc.pipeline.fit(x, y, predictor=first_column, method=jc.pipeline.Folds(folds=2), key=KEY))
    assert "100 targets are equal to others: densities, and log scores, are of targets spread over 0.5." in fit(
        np.round(2 * y) / 2
    )
    assert "equal to others" not in fit(y)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_the_fitted_pipeline_under_jit_vmap_and_grad_and_from_a_file(several, rng, tmp_path):
    x, y = rows(rng, 150)
    process = partial(jc.gaussian_process.fit, inference=jc.gp.Exact())
    line = partial(jc.mlp.fit, hidden=(), max_epochs=20)
    predictor = [(process, ()), (line, (jc.gaussian_mle.fit,))] if several else process
    fitted = jc.pipeline.fit(x, y, predictor=predictor, method=jc.pipeline.Folds(folds=3), key=KEY)
    new = jnp.asarray(rows(rng, 20)[0])
    forecast = fitted(new)
    tolerance = 1e-4 if forecast.mean.dtype == np.float32 else 1e-8
    of_program = eqx.filter_jit(lambda fitted, x: fitted(x).interval(0.9))(fitted, new)
    np.testing.assert_allclose(of_program, forecast.interval(0.9), rtol=tolerance, atol=tolerance)
    one = lambda row: fitted(row[None]).log_prob(jnp.zeros(1))[0]
    np.testing.assert_allclose(jax.vmap(one)(new), forecast.log_prob(jnp.zeros(20)), rtol=1e-3, atol=1e-3)
    slopes = jax.grad(lambda x: fitted(x).icdf(0.5).sum())(new)
    assert np.isfinite(slopes).all()
    assert abs(slopes[:, 0] - 1).max() < 0.6  # that of the data is 1
    jc.save(tmp_path / "model", fitted)
    np.testing.assert_allclose(jc.load(tmp_path / "model")(new).icdf(0.9), forecast.icdf(0.9), rtol=1e-6)


@pytest.mark.parametrize("method", [jc.pipeline.Folds(folds=4), jc.pipeline.Split(fraction=0.5, folds=4)])
def test_every_group_has_levels_of_its_own_and_keeps_its_shape(method, rng):
    """The noise of a group that the inputs do not tell."""
    x, kind = rng.uniform(-1, 1, (300, 1)), rng.integers(0, 3, 300)
    y = x[:, 0] + (0.1 + kind) * rng.normal(size=300)
    fitted = jc.pipeline.fit(x, y, predictor=first_column, by=kind, method=method, key=KEY)
    new_x, new_kind = rng.uniform(-1, 1, (3000, 1)), rng.integers(0, 3, 3000)
    new_y = new_x[:, 0] + (0.1 + new_kind) * rng.normal(size=3000)
    forecast = fitted(new_x, by=new_kind)
    widths = [float(np.median(forecast.std[new_kind == group])) for group in range(3)]
    assert widths[2] > 1.5 * widths[1] > 4 * widths[0]
    # That of 50 rows has a std of .04, from one set of rows to another.
    own = [np.flatnonzero(new_kind == group) for group in range(3)]
    covered = [float(jc.metrics.coverage(new_y[rows], forecast[rows], confidence_level=0.9)) for rows in own]
    assert min(covered) > 0.8
    assert 0.86 < np.mean(covered) < 0.96
    assert np.isfinite(forecast.log_prob(new_y)).all()
    if fitted.method == "split":
        number = fitted.last.guarantee(0.8, 1).num_calibration
        assert number == np.sum(kind[np.asarray(fitted.steps[-1].rows)] == 1)
    with pytest.raises(ValueError, match="which no calibration row has"):
        fitted(new_x, by=new_kind + 7)


def test_sums_of_small_trees_are_those_of_scikit_learn(rng):
    ensemble = pytest.importorskip("sklearn.ensemble")
    x = rng.normal(size=(300, 4)).astype(np.float32).astype(float)
    x[rng.random((300, 4)) < 0.2] = np.nan
    y = np.nan_to_num(x[:, 0]) + np.isnan(x[:, 1])
    model = ensemble.HistGradientBoostingRegressor(max_iter=20, max_leaf_nodes=8, min_samples_leaf=5).fit(x, y)
    nodes = [predictor.nodes for (predictor,) in model._predictors]
    trees = small_trees(nodes, model._baseline_prediction.item())
    np.testing.assert_allclose(sums(trees, x), model.predict(x), rtol=1e-12, atol=1e-12)
    # Where float32 cannot tell a value from a threshold, a program may take the other leaf.
    of_program = np.asarray(jax.jit(sums)(trees, jnp.asarray(x)))
    assert np.mean(abs(of_program - model.predict(x)) > 1e-4) < 0.01
    constant = ensemble.HistGradientBoostingRegressor(max_iter=2, max_leaf_nodes=8).fit(x[:20], y[:20])
    nodes = [predictor.nodes for (predictor,) in constant._predictors]
    np.testing.assert_allclose(sums(small_trees(nodes, 0.0), x), 0, atol=1e-12)
    large = ensemble.HistGradientBoostingRegressor(max_iter=1, max_leaf_nodes=9, min_samples_leaf=2).fit(x, y)
    with pytest.raises(ValueError, match="9 leaves; at most 8"):
        small_trees([large._predictors[0][0].nodes], 0.0)


def test_any_table_as_numbers():
    table = np.array([["b", 1.0], ["a", np.nan], [None, 3.0]], object)
    of_array = Ordinal.of(table)
    np.testing.assert_array_equal(of_array(table), [[1, 1], [0, np.nan], [np.nan, 3]])
    np.testing.assert_array_equal(of_array(np.array([["c", 2.0]], object)), [[np.nan, 2]])
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"kind": ["b", None], "day": pandas.to_datetime(["2026-01-01"] * 2), "size": [1, 2]})
    np.testing.assert_array_equal(Ordinal.of(frame)(frame), [[0, 1], [np.nan, 2]])
    numbers = np.array([[1.0, np.nan]])
    np.testing.assert_array_equal(Ordinal.of(numbers)(numbers), numbers)
    np.testing.assert_array_equal(jax.jit(Ordinal.of(numbers))(numbers), numbers)


def test_missing_values_are_for_the_estimator_to_take(rng):
    ensemble = pytest.importorskip("sklearn.ensemble")
    x, y = rows(rng, 120)
    x[::5, 1] = np.nan
    fitted = jc.pipeline.fit(x, y, predictor=ensemble.HistGradientBoostingRegressor(max_iter=5), key=KEY)
    assert np.isfinite(fitted(x).std).all()


@pytest.mark.parametrize("number", [9, 24, 60, 206])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_levels_of_rows_that_are_set_aside_cover_at_least_what_is_asked_for(number, level, rng):
    """Of uniform levels the coverage of an interval is the difference of its ends' levels."""
    found = []
    ranks = np.arange(1, 2 * number + 2) / (2 * number + 2)
    for _ in range(400):
        table = table_of(np.sort(abs(2 * rng.uniform(size=number) - 1)))
        assert (np.diff(table) > 0).all()
        np.testing.assert_allclose(table, 1 - table[::-1])
        found.append(np.diff(np.interp([(1 - level) / 2, (1 + level) / 2], ranks, table))[0])
    error = np.std(found) / np.sqrt(len(found))
    claimed = np.ceil(level * (number + 1)) / (number + 1)
    assert claimed - 3 * error < np.mean(found) < claimed + 1 / (number + 1) + 3 * error


def test_the_guarantee_of_recalibrated_levels(rng):
    base = jc.SmoothQuantiles(LEVELS, np.tile(scipy.stats.norm.ppf(LEVELS), (24, 1)))
    y = jnp.asarray(rng.normal(size=24))
    levels = recalibrated_levels(np.zeros((24, 1)), base, y)
    assert levels.guarantee(0.9).coverage == pytest.approx(23 / 25)
    assert "with probability at least 92.0 %" in str(levels.guarantee(0.9))
    assert levels.guarantee(0.3).coverage == pytest.approx(7 / 25)  # its ends are moved by less than a rank
    # The table ends before: nothing is claimed that it does not hold, and a warning says it.
    assert levels.guarantee(0.99).coverage == pytest.approx(24 / 25)
    with pytest.warns(UserWarning, match="24 calibration rows are too few for the level asked for, which needs at lea"):
        levels(None, base).interval(0.99)
    lower, upper = levels(None, base).interval(0.9)
    assert (upper > lower).all()
    # Outliers whose level is 0 or 1 are beyond all intervals.
    wild = recalibrated_levels(np.zeros((24, 1)), base, y.at[:3].set(1e9))
    assert wild.guarantee(0.9).coverage == pytest.approx(21 / 25)
    assert np.isfinite(wild(None, base).log_prob(y)).all()


def test_loaded_trees_send_missing_values_their_way(rng, tmp_path):
    ensemble = pytest.importorskip("sklearn.ensemble")
    pandas = pytest.importorskip("pandas")
    x, y = rows(rng, 200)
    x[rng.random(x.shape) < 0.3] = np.nan
    frame = pandas.DataFrame(x, columns=["a", "b"])
    y = y + 2 * np.isnan(x[:, 0])
    for model in (ensemble.HistGradientBoostingRegressor(max_iter=5), ensemble.ExtraTreesRegressor(5)):
        known = x if type(model).__name__.startswith("Hist") else np.nan_to_num(x)
        for table in (known, frame.fillna(0.0)):
            fitted = jc.pipeline.fit(table, y, predictor=model, method=jc.pipeline.Folds(folds=2), key=KEY)
            jc.save(tmp_path / "model", fitted)
            np.testing.assert_allclose(jc.load(tmp_path / "model").means(table), fitted.means(table), rtol=1e-6)
    with pytest.raises(ValueError, match="missing values, which these trees do not take"):
        jc.load(tmp_path / "model")(frame)
