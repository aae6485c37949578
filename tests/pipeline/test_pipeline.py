"""From x and y to a distribution that covers."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.distributions._rows import Rows
from jaxcal.guarantee import MeasuredCoverage
from jaxcal.pipeline import CVPlus, Folds, Prefit, Split

pytestmark = pytest.mark.contract_in_32_bits

KEY = jax.random.key(0)
# Ten folds of one size: what is compiled for one serves all.
ROWS = 200


def fit_line(x, y):
    slope, intercept = np.polyfit(np.asarray(x)[:, 0], np.asarray(y), 1)
    return lambda x: intercept + slope * x[:, 0]


def remember(x, y, *, key):
    """A model that knows the targets it was fitted to, claims to know all, and predicts 0 elsewhere."""
    known = dict(zip(np.asarray(x)[:, 0].tolist(), np.asarray(y).tolist(), strict=True))
    return lambda x: jc.Normal(np.array([known.get(float(v), 0.0) for v in np.asarray(x)[:, 0]]), 1e-3)


def line_with_noise(rng, n):
    x = rng.uniform(-1, 1, n)
    return x, 2 * x + rng.normal(size=n)


@pytest.fixture(scope="module")
def fitted():
    x, y = line_with_noise(np.random.default_rng(0), ROWS)
    steps = {"calibrators": [jc.gaussian_mle.fit], "recalibrate": jc.conformal.fit}
    return x, y, jc.pipeline.fit(x, y, predictor=fit_line, key=KEY, **steps)


def test_groups_and_weights_of_a_calibrator_may_be_functions_of_x(fitted):
    x, y, _ = fitted
    calibrator = partial(jc.gaussian_mle.fit, by=lambda x: x[:, 0] > 0, weights=lambda x: 2 + x[:, 0])
    pipeline = jc.pipeline.fit(x, y, predictor=fit_line, calibrators=[calibrator], recalibrate=None, key=KEY)
    x_new = np.array([-0.5, -0.2, 0.3])
    std = np.asarray(pipeline(x_new).std)
    assert std[0] == std[1] != std[2]


def test_the_intervals_of_a_model_that_overfits_cover_new_rows(rng):
    new_x, new_y = line_with_noise(rng, 1000)
    covered = []
    for _ in range(4):
        x, y = line_with_noise(rng, ROWS)
        alone = remember(x[:, None], y, key=KEY)
        pipeline = jc.pipeline.fit(x, y, predictor=remember, key=KEY)
        assert [step.name for step in pipeline.steps] == ["remember", "learned errors"]
        assert jc.metrics.coverage(y, alone(x[:, None])) == 1
        assert jc.metrics.coverage(new_y, alone(new_x[:, None])) < 0.01
        covered.append(float(jc.metrics.coverage(new_y, pipeline(new_x))))
    assert 0.87 < np.mean(covered) < 0.93


def test_steps_are_scored_on_rows_that_they_were_not_fitted_to(fitted):
    _, y, pipeline = fitted
    assert [step.name for step in pipeline.steps] == ["fit_line", "gaussian_mle", "conformal"]
    for step in pipeline.steps:
        assert step.rows.tolist() == list(range(ROWS))
        np.testing.assert_allclose(step.y, y, rtol=1e-6)
    base = pipeline.steps[0]
    errors = np.asarray(y - base.predictions.mean)
    scores = base.scores
    np.testing.assert_allclose(scores.rmse, np.sqrt(np.mean(errors**2)), rtol=1e-5)
    np.testing.assert_allclose(scores.crps, np.mean(np.abs(errors)), rtol=1e-5)
    np.testing.assert_allclose(scores.crps_error, np.abs(errors).std(ddof=1) / np.sqrt(ROWS), rtol=1e-5)
    draws = np.random.default_rng(1).choice(errors, (4000, ROWS))
    np.testing.assert_allclose(scores.rmse_error, np.sqrt(np.mean(draws**2, axis=1)).std(), rtol=0.1)


def test_scores_in_any_unit():
    errors, factor = np.array([1.0, -2.0, 0.5]), 1e160 if jax.config.jax_enable_x64 else 1e25
    rows = jnp.arange(3)
    of = lambda unit: jc.pipeline.Step("line", jc.Point(jnp.zeros(3)), jnp.asarray(unit * errors), rows).scores
    np.testing.assert_allclose(np.array(of(factor)) / factor, of(1.0), rtol=1e-5)


def test_scores_of_the_last_step_are_out_of_fold_too(rng):
    """A last step that remembers what it was fitted to is not scored better by it."""
    x, y = line_with_noise(rng, 60)

    def fit_last(x, base, y):
        model = remember(x, y, key=KEY)
        return lambda x, base: model(x)

    pipeline = jc.pipeline.fit(x, y, predictor=fit_line, recalibrate=fit_last, key=KEY)
    assert pipeline.out_of_fold.mean.tolist() == [0.0] * 60
    np.testing.assert_allclose(pipeline(x).mean, y, rtol=1e-6)


def test_with_folds_the_coverage_is_measured_and_not_guaranteed(fitted):
    _, _, pipeline = fitted
    found = pipeline.guarantee(0.9)
    assert isinstance(found, MeasuredCoverage)
    assert found.num_rows == ROWS
    assert found.coverage == pytest.approx(float(jc.metrics.coverage(pipeline.steps[-1].y, pipeline.out_of_fold)))
    assert str(found).startswith("No coverage is guaranteed.")
    low, high = MeasuredCoverage(0.9, 100, 90).band()
    draws = np.random.default_rng(0).binomial(100, 0.9, 100_000) / 100
    assert np.mean((low <= draws) & (draws <= high)) >= 0.95
    assert np.mean((low < draws) & (draws < high)) < 0.95
    with pytest.raises(ValueError, match="out of fold"):
        pipeline.last.guarantee(0.9)


def test_with_rows_set_aside_the_guarantee_is_that_of_the_last_step(rng):
    x, y = line_with_noise(rng, ROWS)
    pipeline = jc.pipeline.fit(
        x, y, predictor=fit_line, recalibrate=jc.conformal.fit, method=Split(fraction=0.3), key=KEY
    )
    aside = np.asarray(pipeline.steps[-1].rows)
    assert len(aside) == 60
    assert pipeline.guarantee(0.9).num_calibration == 60
    rest = np.setdiff1d(np.arange(ROWS), aside)
    alone = fit_line(x[rest, None], y[rest])
    np.testing.assert_allclose(pipeline.steps[0].predictions.mean, alone(x[aside, None]), rtol=1e-4, atol=1e-5)
    sizes = np.sort(np.abs(y[aside] - alone(x[aside, None])))
    lower, upper = pipeline(x[:1]).interval(0.9)
    np.testing.assert_allclose((upper - lower)[0] / 2, sizes[54], rtol=1e-3)  # of rank ceil(61 * 0.9)


@pytest.mark.slow
def test_the_guarantee_of_the_split_holds_where_the_predictor_is_chosen(monkeypatch):
    """The predictor is chosen among many that know nothing."""
    rng = np.random.default_rng(0)
    guess = lambda seed: lambda x, y: lambda x: jnp.sin((1 + 3 * seed) * x[:, 0])
    monkeypatch.setattr(jc.pipeline, "candidates", lambda: [(guess(seed), ()) for seed in range(8)])
    covered = []
    for seed in range(60):
        x, y = line_with_noise(rng, 80)
        pipeline = jc.pipeline.fit(x, y, method="split", key=jax.random.key(seed))
        new_x, new_y = line_with_noise(rng, ROWS)
        covered.append(float(jc.metrics.coverage(new_y, pipeline(new_x))))
    error = np.std(covered) / np.sqrt(60)
    claimed = pipeline.guarantee(0.9)
    assert claimed.num_calibration == 20
    # An end lies at most one rank further out than it must.
    assert claimed.coverage - 4 * error < np.mean(covered) < claimed.coverage + 1 / 21 + 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("n", [50, 200, 1000])
def test_coverage_with_folds_by_simulation(n):
    """The mean coverage of 90 % intervals over many samples; a line from all rows is the predictor."""
    rng = np.random.default_rng(n)
    covered = []
    for seed in range(40):
        x, y = line_with_noise(rng, n)
        pipeline = jc.pipeline.fit(x, y, predictor=fit_line, key=jax.random.key(seed))
        new_x, new_y = line_with_noise(rng, 500)
        covered.append(float(jc.metrics.coverage(new_y, pipeline(new_x))))
    # At least what was asked for; the ranks of 50 rows are rounded to 47 / 51.
    assert 0.89 < np.mean(covered) < 0.92 + 1.5 / n


def test_groups_stay_together(rng):
    groups = np.repeat(np.arange(20), 10)
    x, y = line_with_noise(rng, ROWS)
    y = y + 5 * rng.normal(size=20)[groups]
    x = x + groups  # rows of a group tell of each other
    fit_mean_of_near = lambda x, y: (
        lambda new: jnp.asarray(
            [np.mean(np.asarray(y)[np.argsort(np.abs(np.asarray(x)[:, 0] - float(v)))[:5]]) for v in new[:, 0]]
        )
    )
    fit = partial(jc.pipeline.fit, x, y, predictor=fit_mean_of_near, key=KEY)
    with pytest.warns(UserWarning, match="errors of neighboring rows are correlated"):
        torn = fit()
    assert fit(method=Folds(groups=groups)).steps[0].scores.rmse > 1.3 * torn.steps[0].scores.rmse
    split = fit(method=Split(groups=groups))
    aside = np.asarray(split.steps[0].rows)
    assert not set(groups[aside]) & set(np.delete(groups, aside))


@pytest.mark.parametrize(("rows", "groups", "folds"), [(40, 40, 10), (6, 6, 6), (40, 4, 4), (1001, 1001, 5)])
def test_as_many_folds_as_the_rows_need_and_the_groups_allow(rows, groups, folds, rng):
    fits = []

    def fit(x, y):
        fits.append(len(y))
        return fit_line(x, y)

    x, y = line_with_noise(rng, rows)
    method = Folds(groups=np.arange(rows) % groups)
    jc.pipeline.fit(x, y, predictor=fit, recalibrate=None, method=method, key=KEY)
    assert len(fits) == folds + 1


def test_a_model_of_scikit_learn_is_cloned(rng):
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = line_with_noise(rng, 50)
    model = linear_model.LinearRegression()
    pipeline = jc.pipeline.fit(x, y, predictor=model, key=KEY)
    assert not hasattr(model, "coef_")
    assert pipeline.steps[0].name == "LinearRegression"
    np.testing.assert_allclose(
        pipeline.chain.chains[0](jnp.asarray(x)[:, None]).mean, fit_line(x[:, None], y)(x[:, None]), rtol=1e-4
    )


def test_an_object_that_is_no_estimator_of_scikit_learn_is_copied(rng):
    class Mean:
        def fit(self, x, y):
            self.mean = y.mean()

        def predict(self, x):
            return np.full(len(x), self.mean)

    x, y = line_with_noise(rng, 50)
    model = Mean()
    pipeline = jc.pipeline.fit(x, y, predictor=model, key=KEY)
    assert not hasattr(model, "mean")
    np.testing.assert_allclose(pipeline.means(jnp.asarray(x)[:, None]), y.mean(), rtol=1e-5)


def test_keys_are_passed_where_they_are_taken(rng):
    keys = []

    def fit_with_key(x, y, *, key):
        keys.append(jax.random.key_data(key).tolist())
        return lambda x: jnp.zeros(len(x))

    x, y = line_with_noise(rng, 30)
    jc.pipeline.fit(x, y, predictor=fit_with_key, method=Folds(folds=3), key=KEY)
    assert len({tuple(key) for key in keys}) == 4
    keys.clear()
    jc.pipeline.fit(x, y, predictor=partial(fit_with_key, key=jax.random.key(5)), method=Folds(folds=3), key=KEY)
    assert keys == [jax.random.key_data(jax.random.key(5)).tolist()] * 4


@pytest.mark.parametrize("recalibrate", ["auto", jc.conformal.fit])
def test_the_last_step_leaves_the_mean(recalibrate, rng):
    """A few errors of many stds must not move the prediction of a row with a large std."""
    x, y = line_with_noise(rng, ROWS)
    stds = lambda x: jnp.where(jnp.arange(len(x)) % 9 == 0, 50.0, 0.01)
    flat = lambda x, y: lambda x: jc.Normal(jnp.zeros(len(x)), stds(x))
    pipeline = jc.pipeline.fit(x, y, predictor=flat, recalibrate=recalibrate, key=KEY)
    np.testing.assert_allclose(pipeline.means(x), 0, atol=1e-3)
    assert abs(pipeline(x).icdf(0.5)).max() < 0.5


def test_without_a_predictor_those_of_a_list_are_combined(rng, monkeypatch):
    constant = lambda x, y: lambda x: jnp.zeros(len(x))
    monkeypatch.setattr(jc.pipeline, "candidates", lambda: [(constant, ()), (fit_line, (jc.gaussian_mle.fit,))])
    x, y = line_with_noise(rng, 80)
    for method in (Folds(folds=2), Split(folds=2, fraction=0.5)):
        pipeline = jc.pipeline.fit(x, y, method=method, key=KEY)
        last = ["recalibrated_levels"] if isinstance(method, Split) else []
        assert [step.name for step in pipeline.steps] == ["combined", *last]
        assert pipeline.chain.names[-1] == "fit_line, gaussian_mle"
        assert pipeline.chain.combiner.weights[-1] > 0.5
        assert "each by itself" in str(pipeline)
        np.testing.assert_allclose(pipeline.means(x), pipeline(x).icdf(0.5), atol=0.6)


@pytest.mark.slow
def test_the_default_list_is_fitted(rng):
    x = rng.uniform(-2, 2, 40)
    pipeline = jc.pipeline.fit(x, np.sin(2 * x) + 0.1 * rng.normal(size=40), method=Folds(folds=2), key=KEY)
    assert len(pipeline.others) >= 1
    lower, upper = pipeline(x).interval(0.9)
    assert (upper > lower).all()


def test_print_is_a_table_of_the_steps(fitted):
    lines = str(fitted[2]).splitlines()
    assert lines[0].split() == ["CRPS", "RMSE", "90", "%", "interval", "covers"]
    assert [line.split()[0] for line in lines[1:4]] == ["fit_line", "gaussian_mle", "conformal"]
    assert lines[1].endswith("no interval")
    assert lines[4] == "200 data points, out of fold; mean ± standard error."


@pytest.mark.parametrize(
    ("method", "sizes"), [(Folds, [40, 40, 40, 60]), (Split, [30, 30, 30, 45]), (CVPlus, [40] * 3)]
)
def test_weights_reach_the_predictor_with_their_rows(method, sizes):
    seen = []

    def fit(x, y, *, weights):
        seen.append((np.asarray(x)[:, 0], np.asarray(weights)))
        return lambda x: jnp.zeros(len(x))

    x = np.arange(60.0)
    jc.pipeline.fit(x, x % 7, predictor=fit, weights=1 + x**2, method=method(folds=3), key=KEY)
    assert sorted(len(rows) for rows, _ in seen) == sizes
    for rows, weights in seen:
        np.testing.assert_allclose(weights, 1 + rows**2, rtol=1e-6)


def test_of_several_those_that_take_no_weights_are_omitted(rng):
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.neighbors import KNeighborsRegressor

    x, y = line_with_noise(rng, 60)
    pairs = [(each, ()) for each in (fit_line, linear_model.LinearRegression(), KNeighborsRegressor())]
    weights = np.where(x > 0, 1.0, 1e-6)
    y = np.where(x > 0, y, 50.0)  # rows that do not count
    fitted = jc.pipeline.fit(x, y, predictor=pairs, weights=weights, method=Folds(folds=3), key=KEY)
    assert "omitted, since they take no weights:\nfit_line\nKNeighborsRegressor" in str(fitted)
    with pytest.raises(ValueError, match="KNeighborsRegressor takes neither sample_weight nor weights"):
        jc.pipeline.fit(x, y, predictor=KNeighborsRegressor(), weights=weights, key=KEY)
    assert abs(fitted.means(x[x > 0]) - 2 * x[x > 0]).max() < 2


def zeros(x):
    """A model that is fitted already: its errors are the targets."""
    return jnp.zeros(len(x))


def reach(sizes, confidence_level):
    """Half of the width of a conformal interval, of these absolute errors."""
    return np.sort(sizes)[int(np.ceil((len(sizes) + 1) * confidence_level)) - 1]


def is_loud(x):
    return x[:, 0] > 0


@pytest.mark.parametrize("by", ["labels", "column", "function"])
@pytest.mark.parametrize("method", [Folds(folds=3), Split(folds=3, fraction=0.5)], ids=["folds", "split"])
def test_every_group_has_the_intervals_of_its_own_rows(method, by, rng):
    x = rng.uniform(-1, 1, (60, 1))
    y, kind = np.where(is_loud(x), 10, 1) * rng.normal(size=60), np.where(is_loud(x), "loud", "calm")
    table = pytest.importorskip("polars").DataFrame({"kind": kind}) if by == "column" else x
    given = {"labels": kind, "column": "kind", "function": is_loud}[by]
    options = {"by": given, "method": method, "recalibrate": jc.conformal.fit}
    pipeline = jc.pipeline.fit(table, y, predictor=lambda x, y: zeros, key=KEY, **options)
    step = pipeline.steps[-1]
    lower, upper = pipeline(table, **({"by": kind} if by == "labels" else {})).interval(0.8)
    for loud in (False, True):
        own = np.asarray(step.rows)[np.asarray(is_loud(x))[step.rows] == loud]
        np.testing.assert_allclose(((upper - lower) / 2)[is_loud(x) == loud], reach(np.abs(y[own]), 0.8), rtol=1e-5)
        if isinstance(method, Split):
            label = {"function": loud}.get(by, "loud" if loud else "calm")
            assert pipeline.last.guarantee(0.8, label).num_calibration == len(own)
    assert isinstance(pipeline.guarantee(0.8), MeasuredCoverage)


def test_labels_come_with_new_rows_if_they_came_with_those_of_the_fit(rng):
    x, y = line_with_noise(rng, 60)
    fit = partial(jc.pipeline.fit, x, y, predictor=zeros, method=Prefit(folds=3), key=KEY)
    for pipeline, labels in ((fit(by=x > 0), None), (fit(by=is_loud), x > 0), (fit(), x > 0)):
        with pytest.raises(ValueError, match="by must be the labels of the rows if the fit had labels, and only then"):
            pipeline(x, by=labels)


def test_all_rows_are_for_the_steps_after_a_model_that_is_fitted_already(rng):
    x, y = line_with_noise(rng, ROWS)
    pipeline = jc.pipeline.fit(x, y, predictor=zeros, method="prefit", key=KEY)
    assert pipeline.steps[0].name == "zeros"
    assert pipeline.steps[-1].rows.tolist() == list(range(ROWS))
    guarantee = pipeline.guarantee(0.9)
    assert guarantee.num_calibration == ROWS
    # The interval whose coverage is known whatever the model: that of the rank among all absolute errors.
    assert guarantee.coverage == pytest.approx(np.ceil(0.9 * (ROWS + 1)) / (ROWS + 1))
    lower, upper = pipeline(x[:1]).interval(0.9)
    np.testing.assert_allclose((upper - lower) / 2, reach(np.abs(y), 0.9), rtol=1e-5)


def test_calibrators_of_a_model_that_is_fitted_already_leave_no_guarantee(rng):
    x, y = line_with_noise(rng, ROWS)
    pipeline = jc.pipeline.fit(x, y, predictor=zeros, calibrators=[jc.gaussian_mle.fit], method="prefit", key=KEY)
    assert isinstance(pipeline.guarantee(0.9), MeasuredCoverage)
    assert pipeline.out_of_fold.is_out_of_fold
    alone = jc.gaussian_mle.fit(x, jc.Point(np.zeros(ROWS)), y)
    np.testing.assert_array_equal(
        pipeline.chain.calibrators[0](x, jc.Point(zeros(x))).std, alone(x, jc.Point(zeros(x))).std
    )


def test_folds_may_be_pairs_of_training_rows_and_held_out_rows(rng):
    x, y = line_with_noise(rng, 60)
    order = rng.permutation(60)
    pairs = [(order[:20], order[30:40]), (order[:30], order[40:45]), (order[5:45], order[45:])]
    held_out = np.sort(order[30:])
    options = {"recalibrate": jc.conformal.fit, "method": Folds(folds=pairs)}
    pipeline = jc.pipeline.fit(x, y, predictor=fit_line, key=KEY, **options)
    predicted = np.empty(60)
    for training, own in pairs:
        predicted[own] = fit_line(x[training, None], y[training])(x[own, None])
    np.testing.assert_array_equal(pipeline.steps[-1].rows, held_out)
    np.testing.assert_allclose(pipeline.steps[0].predictions.mean, predicted[held_out], rtol=1e-4, atol=1e-5)
    lower, upper = pipeline(x[:1]).interval(0.8)
    np.testing.assert_allclose((upper - lower) / 2, reach(np.abs(y - predicted)[held_out], 0.8), rtol=1e-4)
    assert pipeline.guarantee(0.9).num_not_held_out == 30
    # The rows of a fold are recalibrated by the errors of the others.
    own = np.sort(order[40:45])
    others = np.setdiff1d(held_out, own)
    lower, upper = pipeline.out_of_fold[np.searchsorted(held_out, own)].interval(0.8)
    np.testing.assert_allclose((upper - lower) / 2, reach(np.abs(y - predicted)[others], 0.8), rtol=1e-4)


@pytest.mark.parametrize("method", [Folds, Prefit])
def test_the_rows_of_a_single_fold_score_the_last_step_in_parts(method, rng):
    x, y = line_with_noise(rng, 60)
    single = method(folds=[(np.arange(30), np.arange(30, 60))])
    predictor = fit_line if method is Folds else zeros
    pipeline = jc.pipeline.fit(x, y, predictor=predictor, recalibrate=jc.conformal.fit, method=single, key=KEY)
    model = fit_line(x[:30, None], y[:30]) if method is Folds else zeros
    assert pipeline.steps[-1].rows.tolist() == list(range(30, 60))
    np.testing.assert_allclose(pipeline.steps[0].predictions.mean, model(x[30:, None]), rtol=1e-4, atol=1e-5)
    lower, upper = pipeline.out_of_fold.interval(0.8)
    sizes = np.abs(y[30:] - model(x[30:, None]))
    assert len(set(np.round((upper - lower) / 2, 5).tolist())) > 1
    lower, upper = pipeline(x[:1]).interval(0.8)
    np.testing.assert_allclose((upper - lower) / 2, reach(sizes, 0.8), rtol=1e-4)


@pytest.mark.parametrize("method", [Folds, CVPlus])
def test_twice_as_many_folds_look_up_twice_as_many_lengths(method, rng, monkeypatch):
    length, looked_up = Rows.__len__, []
    monkeypatch.setattr(Rows, "__len__", lambda rows: (looked_up.append(1), length(rows))[1])
    numbers = []
    for folds in (10, 20):
        looked_up.clear()
        jc.pipeline.fit(*line_with_noise(rng, 20), predictor=fit_line, method=method(folds=folds), key=KEY)
        numbers.append(len(looked_up))
    assert numbers[1] <= 2 * numbers[0] + 5


class Halves(list):
    """Like a splitter of scikit-learn, and of a type that is told to be taken."""

    def split(self, x, y):
        yield from (np.split(np.arange(len(y)), 2), np.split(np.arange(len(y)), 2)[::-1])


def varied(x, y):
    if np.ptp(y) == 0:
        raise ValueError("y is constant.")
    return fit_line(x, y)


@pytest.mark.parametrize("method", [Split, Folds, CVPlus])
def test_infinite_errors_of_all_folds_are_one_warning(method, rng):
    """Of a base that gives some rows a std of 0."""
    x = rng.uniform(-1, 1, 60)
    flat = lambda x, y: lambda x: jc.Normal(jnp.zeros(len(x)), jnp.where(x[:, 0] > 0.5, 0.0, 1.0))
    last = {} if method is CVPlus else {"recalibrate": jc.conformal.fit}
    with pytest.warns(UserWarning, match=r"base\.std is 0") as caught:
        jc.pipeline.fit(x, rng.normal(size=60), predictor=flat, method=method(folds=3), key=KEY, **last)
    infinite = [each for each in caught if "base.std is 0" in str(each.message)]
    assert len(infinite) == 1
    assert str(infinite[0].message).startswith("in the last step, which is fitted without each fold as well: ")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"method": Folds(folds=[np.arange(15), np.arange(14, 30)])},
            ValueError,
            "folds must be a number, or two lists",
        ),
        (
            {"method": Folds(folds=[np.arange(15), np.arange(15, 30)], groups=np.arange(30))},
            ValueError,
            "cannot go with groups",
        ),
        (
            {"method": Folds(folds=[(np.arange(9), [9]), (np.arange(9), [9])])},
            ValueError,
            "every row once at most; row 9 is held out 2",
        ),
        ({"method": Folds(folds=[(np.arange(9), np.arange(8, 12))])}, ValueError, "row 8 is both in fold 0"),
        (
            {"method": Folds(folds=[(np.arange(9), [9]), np.arange(8)])},
            ValueError,
            "folds must hold lists of row numbers, or pairs",
        ),
        ({"method": Folds(folds=[(np.arange(9), [-1])])}, ValueError, "row numbers from 0 to 29; got -1 to -1"),
        ({"method": Folds(folds=[(np.arange(9), [9.5])])}, ValueError, "row numbers; got some of dtype float64"),
        ({"method": Folds(folds=[(np.arange(9), [9])])}, ValueError, "must hold out at least 2 rows; got 1"),
        ({"method": Folds(folds=[])}, ValueError, "folds must hold lists of row numbers"),
        ({"method": Split(folds=[(np.arange(9), [9, 10])])}, ValueError, "draws its folds itself"),
        ({"predictor": lambda x, y: lambda x: None}, TypeError, "a model gave None where predictions are expected"),
        (
            {"method": Folds(folds=Halves())},
            ValueError,
            r"folds is a Halves: give the folds that it makes, list\(folds.split",
        ),
        ({"y": np.eye(30)[3], "predictor": varied}, ValueError, "27 training rows of a fold all have the target 0"),
        ({"predictor": [(fit_line, ()), (fit_line, ())], "weights": np.ones(30)}, ValueError, "none of the predictors"),
        ({"predictor": None, "method": "prefit"}, ValueError, "need a predictor"),
        ({"predictor": jc.mlp, "method": "prefit"}, TypeError, "did you mean jaxcal.predictors.mlp.fit"),
        ({"weights": np.ones(30)}, ValueError, "the predictor fit_line takes neither sample_weight nor weights"),
        (
            {"weights": np.ones(30), "method": "prefit", "predictor": zeros},
            ValueError,
            "the predictor zeros takes neither sample_weight nor weights",
        ),
        ({"weights": -np.ones(30)}, ValueError, "weights must not be negative"),
        ({"weights": np.ones(29)}, ValueError, "weights has 29 rows where 30 are expected"),
        ({"by": np.arange(29)}, ValueError, r"by must have shape \(30,\), a label for each row"),
        ({"by": "kind"}, ValueError, "by='kind' names a column, but x is no data frame"),
        ({"by": np.arange(30) % 2, "recalibrate": jc.rio.fit}, ValueError, "the last step rio takes no groups"),
        ({"by": np.arange(30) % 2, "recalibrate": None}, ValueError, "recalibrate=None is no last step"),
        ({"by": np.arange(30) % 2, "method": "cv+"}, ValueError, "neither recalibrate nor by"),
        ({"predictor": jc.mlp}, TypeError, "did you mean jaxcal.predictors.mlp.fit"),
        ({"predictor": None, "calibrators": [jc.rio.fit]}, ValueError, "need a predictor"),
        ({"method": "jackknife"}, ValueError, "one of 'auto', 'folds', 'split'"),
        ({"method": Folds(folds=1)}, ValueError, "folds must be at least 2"),
        ({"method": Split(fraction=0.1, folds=5)}, ValueError, "sets 3 of 30 rows aside; at least 5"),
        ({"method": Split(fraction=30.0)}, ValueError, r"between 0 and 1; got 30: did you mean 0\.3"),
        ({"method": Folds(groups=np.arange(29))}, ValueError, "a label for each row"),
        ({"method": Folds(groups=np.arange(30) // 10, folds=5)}, ValueError, "3 groups; at least 5"),
        ({"y": np.zeros(29)}, ValueError, "29 rows where 30"),
    ],
)
def test_mistakes_are_named(options, error, message):
    x = np.arange(30.0)
    with pytest.raises(error, match=message):
        jc.pipeline.fit(**({"x": x, "y": x, "predictor": fit_line, "key": KEY} | options))


def no_fit(x, y):
    raise AssertionError("fitted in spite of the mistake")


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize(
    ("method", "size", "found"),
    [
        ("folds", 1, "it has 1. Give more rows"),
        (Folds(folds=[range(15), range(15, 30)]), 3, "it has 3, all in one fold. Give more rows"),
        (Split(folds=2), 1, "it has [01]. Give more rows"),
        (Prefit(), 1, "it has 1. Give more rows"),
    ],
    ids=str,
)
def test_a_group_with_too_few_rows_is_named_before_anything_is_fitted(method, size, found, is_function):
    x = np.arange(30.0)
    of_rows = lambda x: np.where(np.asarray(x).ravel() < size, "small", "large")
    by = of_rows if is_function else of_rows(x)
    with pytest.raises(ValueError, match=f"the group 'small' needs at least 2 held-out rows, in different .*; {found}"):
        jc.pipeline.fit(x, x, predictor=no_fit, method=method, by=by, key=KEY)


X = np.linspace(0, 1, 30)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda: eqx.filter_vmap(lambda key: jc.pipeline.fit(X, X, predictor=no_fit, key=key))(jax.random.split(KEY, 2)),
        lambda: eqx.filter_vmap(lambda y: jc.pipeline.fit(X, y, predictor=no_fit, key=KEY))(np.stack([X, X])),
        lambda: jax.jit(lambda x: jc.pipeline.fit(x, X, predictor=no_fit, key=KEY)(x).mean)(X),
        lambda: jax.grad(lambda w: jc.pipeline.fit(X, X, predictor=no_fit, weights=w, key=KEY)(X).mean[0])(X),
    ],
    ids=["key", "y", "x", "weights"],
)
def test_a_fit_under_a_transformation_says_what_to_map(transformed):
    with pytest.raises(TypeError, match=r"^pipeline\.fit decides on the host.* is traced.* Map the fit of a method"):
        transformed()
