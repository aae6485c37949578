"""CalibratedRegressor: scikit-learn's own checks, and what its users do with an estimator."""

import pickle
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is of the extra sklearn")
pandas = pytest.importorskip("pandas", reason="a data frame needs a library")

from sklearn import config_context  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.compose import make_column_transformer  # noqa: E402
from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: E402
from sklearn.linear_model import LinearRegression, Ridge  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    LeaveOneOut,
    PredefinedSplit,
    RepeatedKFold,
    ShuffleSplit,
    StratifiedKFold,
    TimeSeriesSplit,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler  # noqa: E402
from sklearn.tree import DecisionTreeRegressor  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from jaxcal.sklearn import CalibratedRegressor, neg_crps  # noqa: E402

# It computes in 64 bits whatever JAX's precision is: `test_the_precision_is_64_bits`.
pytestmark = pytest.mark.any_precision

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
Y = X[:, 0] + np.where(np.arange(120) % 2, 0.1, 1.0) * RNG.normal(size=120)
KIND = np.arange(120) % 2
WAVE = np.sin(3 * X[:, 0])
CITY = np.array(["Rome", "Oslo"])[np.arange(120) % 2]


@pytest.mark.filterwarnings("ignore")  # as scikit-learn's own runner does
def test_the_checks_of_scikit_learn():
    found = check_estimator(CalibratedRegressor(Ridge(), cv=2, random_state=0), on_skip=None)
    assert {each["status"] for each in found} == {"passed"}


def regressor(estimator=None, **options):
    return CalibratedRegressor(estimator or LinearRegression(), random_state=0, **options)


def test_it_is_the_pipeline():
    model = regressor(calibrators=[jc.rio.fit], cv=3).fit(X, Y)
    key = jax.random.key(np.random.RandomState(0).randint(np.iinfo(np.int32).max))
    options = {"predictor": LinearRegression(), "calibrators": (jc.rio.fit,), "method": jc.pipeline.Folds(folds=3)}
    with jax.enable_x64(True):
        direct = jc.pipeline.fit(X, Y, key=key, **options)
        np.testing.assert_allclose(model.predict(X), direct.means(X), rtol=1e-10)
        lower, upper = direct(X).interval(0.8)
    np.testing.assert_allclose(model.predict_interval(X, confidence_level=0.8), np.column_stack([lower, upper]))
    assert model.guarantee_ == model.guarantee(0.9) == direct.guarantee(0.9)
    assert "No coverage is guaranteed" in str(model.guarantee_)


def test_the_mean_is_the_estimators_and_the_std_is_asked_for():
    model = regressor().fit(X, Y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, LinearRegression().fit(X, Y).predict(X))
    np.testing.assert_array_equal(mean, model.predict(X))
    np.testing.assert_allclose(std, model.predict_distribution(X).std, rtol=1e-5)
    np.testing.assert_allclose(model.score(X, Y), LinearRegression().fit(X, Y).score(X, Y))


@pytest.mark.parametrize("method", ["folds", "split", "cv+"])
def test_means_and_stds_come_from_one_prediction(method):
    class Counting(LinearRegression):
        predictions = 0

        def predict(self, X):
            type(self).predictions += 1
            return super().predict(X)

    model, numbers = regressor(Counting(), cv=3, method=method).fit(X, Y), []
    for options in ({}, {"return_std": True}):
        Counting.predictions = 0
        model.predict(X, **options)
        numbers.append(Counting.predictions)
    assert numbers[0] == numbers[1] == (3 if method == "cv+" else 1)


def test_the_precision_is_64_bits_and_that_of_a_distribution_is_of_jax():
    model = regressor().fit(X, Y)
    assert model.predict(X).dtype == np.float64
    assert model.predict_quantiles(X, [0.1, 0.5]).shape == (120, 2)
    forecast = model.predict_distribution(X)
    assert forecast.mean.dtype == (np.float64 if jax.config.jax_enable_x64 else np.float32)
    np.testing.assert_allclose(forecast.icdf(0.9), model.predict_quantiles(X, 0.9)[:, 0], rtol=1e-5)
    with jax.enable_x64(False):
        assert model.predict_distribution(X).interval(0.9)[0].dtype == np.float32


def test_a_split_has_a_guarantee_and_cross_conformal_that_of_the_worst_case():
    assert regressor(method="split").fit(X, Y).guarantee_.num_calibration == 30
    assert regressor(method="cv+", cv=6).fit(X, Y).guarantee(0.8).coverage == pytest.approx(0.6, abs=0.1)


def test_a_model_that_is_fitted_already_is_calibrated_by_all_rows():
    fitted = LinearRegression().fit(X[:40], Y[:40])
    model = regressor(fitted, method="prefit").fit(X[40:], Y[40:])
    assert model.guarantee_.num_calibration == 80
    np.testing.assert_allclose(model.predict(X), fitted.predict(X))
    errors = np.sort(np.abs(Y[40:] - fitted.predict(X[40:])))
    lower, upper = model.predict_interval(X[:1], confidence_level=0.9)[0]
    np.testing.assert_allclose((upper - lower) / 2, errors[int(np.ceil(0.9 * 81)) - 1])
    with_rio = regressor(fitted, method="prefit", calibrators=[jc.rio.fit], cv=3).fit(X[40:], Y[40:])
    assert "No coverage is guaranteed" in str(with_rio.guarantee_)


def polars_codes(polars):
    return (polars.col("city") == "Rome").cast(float)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_comes_untouched_to_the_estimator_and_its_index_comes_back(library):
    frames = pytest.importorskip(library)
    frame = frames.DataFrame({"a": X[:, 0], "b": X[:, 1], "city": CITY})
    index = pandas.Index(np.arange(120)[::-1])
    if library == "pandas":
        frame = frame.set_index(index)
    if library == "pandas":
        encoder = make_column_transformer((OneHotEncoder(), ["city"]), remainder="passthrough")
    else:
        encoder = FunctionTransformer(lambda frame: frame.select("a", polars_codes(frames)).to_numpy())
    model = regressor(make_pipeline(encoder, Ridge())).fit(frame, Y)
    assert list(model.feature_names_in_) == ["a", "b", "city"]
    interval = model.predict_interval(frame)
    assert isinstance(interval, frames.DataFrame)
    assert list(interval.columns) == ["lower", "upper"]
    assert list(model.predict_quantiles(frame, [0.1, 0.9]).columns) == ["q0.1", "q0.9"]
    if library == "pandas":
        assert interval.index.equals(index)
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame[["b", "a", "city"]])
        with pytest.raises(ValueError, match=r"^X and y have different indices.* y = y\.loc\[X\.index\]"):
            regressor(make_pipeline(encoder, Ridge())).fit(frame, pandas.Series(Y))


def test_missing_values_are_for_the_estimator_to_take():
    x = np.where(RNG.uniform(size=X.shape) < 0.1, np.nan, X)
    model = regressor(HistGradientBoostingRegressor(max_iter=5)).fit(x, Y)
    assert np.isfinite(model.predict_interval(x)).all()
    with pytest.raises(ValueError, match="contains NaN"):
        regressor().fit(x, Y)


def test_weights_are_those_of_the_estimator():
    weights = RNG.uniform(size=120)
    expected = LinearRegression().fit(X, Y, sample_weight=weights).predict(X)
    np.testing.assert_allclose(regressor().fit(X, Y, sample_weight=weights).predict(X), expected)
    with config_context(enable_metadata_routing=True):
        asked = regressor(LinearRegression().set_fit_request(sample_weight=True))
        np.testing.assert_allclose(asked.fit(X, Y, sample_weight=weights).predict(X), expected)
        unasked = regressor(LinearRegression().set_fit_request(sample_weight=False))
        np.testing.assert_allclose(
            unasked.fit(X, Y, sample_weight=weights).predict(X), LinearRegression().fit(X, Y).predict(X)
        )


@pytest.mark.parametrize("by", ["labels", "name", "function"])
def test_groups_are_calibrated_each_by_its_own_rows(by):
    """Every second row has a tenth of the noise."""
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": np.arange(120) % 2})
    given = {"labels": np.arange(120) % 2, "name": "kind", "function": lambda x: x["kind"].to_numpy()}[by]
    model = regressor().fit(frame, Y, by=given)
    width = np.diff(model.predict_interval(frame, by=given if by == "labels" else None).to_numpy())[:, 0]
    assert width[0] > 3 * width[1]
    if by == "labels":
        with pytest.raises(ValueError, match="by must be the labels of the rows if the fit had labels"):
            model.predict(frame)
    with pytest.raises(ValueError, match="takes no groups"):
        regressor(recalibrate=lambda x, base, y: None).fit(frame, Y, by=given)


def test_rows_of_a_group_stay_together():
    groups = np.arange(120) // 4
    model = regressor(cv=3).fit(X, Y, groups=groups)
    of_splitter = regressor(cv=KFold(3)).fit(X, Y)
    assert model.pipeline_.out_of_fold.mean.shape == of_splitter.pipeline_.out_of_fold.mean.shape == (120,)
    errors = Y - np.concatenate([LinearRegression().fit(X[a], Y[a]).predict(X[b]) for a, b in KFold(3).split(X)])
    np.testing.assert_allclose(
        of_splitter.pipeline_.steps[0].y - of_splitter.pipeline_.steps[0].predictions.mean, errors
    )


SHORT, TARGETS, GROUPS = X[:60], Y[:60], np.arange(60) // 5
IN_PART = np.repeat([-1, 0, 1, 2], 15)


def splits_of(cv, y, groups):
    """The pairs of a splitter, or those that are given."""
    return list(cv.split(SHORT, y, groups) if hasattr(cv, "split") else cv)


@pytest.mark.parametrize("library", ["numpy", "pandas"])
@pytest.mark.parametrize("method", ["folds", "prefit"])
@pytest.mark.parametrize(
    "cv",
    [
        GroupKFold(3),
        LeaveOneGroupOut(),
        LeaveOneOut(),
        TimeSeriesSplit(4),
        PredefinedSplit(IN_PART),
        PredefinedSplit(np.where(IN_PART < 1, -1, 0)),
        KFold(3, shuffle=True, random_state=0),
        StratifiedKFold(3),
        ShuffleSplit(1, test_size=20, random_state=0),
        [(np.arange(30), np.arange(30, 40)), (np.arange(40, 60), np.arange(10))],
        [(np.arange(60) < 30, np.arange(60) >= 30), (np.arange(60) >= 30, np.arange(60) < 30)],
    ],
    ids=lambda cv: type(cv).__name__,
)
def test_a_splitter_holds_rows_out_and_names_the_training_rows(cv, method, library):
    y = np.where(TARGETS > 0, 1.0, 0.0) if isinstance(cv, StratifiedKFold) else TARGETS
    x = SHORT if library == "numpy" else pandas.DataFrame(SHORT, columns=["a", "b"])
    fitted = LinearRegression().fit(x, y)
    predicted = np.full(60, np.nan)
    groups = GROUPS if isinstance(cv, GroupKFold | LeaveOneGroupOut) else None
    for training, held_out in splits_of(cv, y, groups):
        model = LinearRegression().fit(SHORT[training], y[training])
        whole = model.predict(SHORT) if method == "folds" else fitted.predict(x)
        predicted[held_out] = whole[held_out]
    rows = np.flatnonzero(np.isfinite(predicted))
    options = {"cv": cv, "method": method, "recalibrate": jc.conformal.fit}
    model = regressor(fitted if method == "prefit" else None, **options).fit(x, y, groups=groups)
    for step in model.pipeline_.steps:
        np.testing.assert_array_equal(step.rows, rows)
    np.testing.assert_allclose(model.pipeline_.steps[0].predictions.mean, predicted[rows], rtol=1e-5, atol=1e-6)
    errors = np.sort(np.abs(y - predicted)[rows])
    lower, upper = np.asarray(model.predict_interval(x, confidence_level=0.8))[0]
    np.testing.assert_allclose((upper - lower) / 2, errors[int(np.ceil(0.8 * (len(rows) + 1))) - 1], rtol=1e-5)
    np.testing.assert_allclose(model.predict(x), fitted.predict(x))
    if method == "prefit":
        assert model.guarantee_.num_calibration == len(rows)
    else:
        assert (model.guarantee_.num_rows, model.guarantee_.num_not_held_out) == (len(rows), 60 - len(rows))


def test_the_guarantee_says_which_rows_it_rests_on():
    some = str(regressor(cv=TimeSeriesSplit(4)).fit(SHORT, TARGETS).guarantee_)
    assert "of 48 data points, each predicted by a model that was fitted without it" in some
    assert some.endswith("The other 12 of 60 data points were never held out.")
    assert "never" not in str(regressor(cv=KFold(4)).fit(SHORT, TARGETS).guarantee_)


def test_groups_of_the_last_step_are_those_of_the_rows_that_are_held_out():
    kind = np.arange(120) % 2
    model = regressor(cv=TimeSeriesSplit(4), recalibrate=jc.conformal.fit).fit(X, Y, by=kind)
    lower, upper = model.predict_interval(X, by=kind).T
    errors = Y[24:] - np.asarray(model.pipeline_.steps[0].predictions.mean)
    for own in (0, 1):
        sizes = np.sort(np.abs(errors[kind[24:] == own]))
        np.testing.assert_allclose((upper - lower)[own] / 2, sizes[int(np.ceil(0.9 * 49)) - 1], rtol=1e-5)


def test_splits_may_be_a_generator_and_weights_follow_the_rows():
    weights = RNG.uniform(size=60)
    generator = (pair for pair in TimeSeriesSplit(4).split(SHORT))
    model = regressor(cv=generator).fit(SHORT, TARGETS, sample_weight=weights)
    expected = [
        LinearRegression().fit(SHORT[a], TARGETS[a], sample_weight=weights[a]).predict(SHORT[b])
        for a, b in TimeSeriesSplit(4).split(SHORT)
    ]
    np.testing.assert_allclose(model.pipeline_.steps[0].predictions.mean, np.concatenate(expected), rtol=1e-5)


def test_groups_reach_a_splitter_through_routed_metadata():
    weights = RNG.uniform(size=60)
    with config_context(enable_metadata_routing=True):
        asked = regressor(LinearRegression().set_fit_request(sample_weight=True), cv=GroupKFold(3))
        direct = asked.fit(SHORT, TARGETS, groups=GROUPS, sample_weight=weights)
        errors = [
            LinearRegression().fit(SHORT[a], TARGETS[a], sample_weight=weights[a]).predict(SHORT[b])
            for a, b in GroupKFold(3).split(SHORT, TARGETS, GROUPS)
        ]
        order = np.argsort(np.concatenate([b for _, b in GroupKFold(3).split(SHORT, TARGETS, GROUPS)]))
        np.testing.assert_allclose(
            direct.pipeline_.steps[0].predictions.mean, np.concatenate(errors)[order], rtol=1e-5, atol=1e-6
        )
        routed = clone(asked).set_fit_request(groups=True, sample_weight=False)
        found = cross_validate(routed, SHORT, TARGETS, params={"groups": GROUPS}, cv=2)
    assert np.isfinite(found["test_score"]).all()


def no_fit(x, y):
    raise AssertionError("fitted in spite of the mistake")


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"cv": 1}, {}, "^cv must be at least 2; got 1"),
        ({"cv": 61}, {}, "^cv=61 folds need as many rows at least; X has 60"),
        ({"cv": 5}, {"groups": np.arange(60) // 20}, "there are 3 groups; at least 5 are needed"),
        ({"cv": GroupKFold(3), "method": "split"}, {}, "give cv as a number; got GroupKFold"),
        ({"cv": KFold(3), "method": "cv+"}, {}, "give cv as a number; got KFold"),
        (
            {"cv": RepeatedKFold(n_splits=3, n_repeats=4)},
            {},
            "^cv must hold out every row once at most; row 0 is .* 4 times",
        ),
        ({"cv": ShuffleSplit(9, random_state=0)}, {}, "^cv must hold out every row once at most; row"),
        ({"cv": [(np.arange(31), np.arange(30, 60))]}, {}, "^cv must hold out other rows than it trains on; row 30 is"),
        ({"cv": [(np.arange(30), np.arange(30, 61))]}, {}, "^cv must hold row numbers from 0 to 59; got 30 to 60"),
        ({"cv": [(np.arange(0), np.arange(30, 60))]}, {}, "^cv must hold vectors of row numbers, none empty"),
        ({}, {"sample_weight": -np.ones(60)}, "^sample_weight must not be negative"),
        ({}, {"sample_weight": np.ones(59)}, "^sample_weight has 59 rows where 60 are expected"),
        ({}, {"sample_weight": np.zeros(60)}, "^sample_weight is 0 in all rows"),
        ({}, {"sample_weight": np.full(60, np.nan)}, "^sample_weight holds 60 values that are NaN"),
        ({"estimator": None, "method": "prefit"}, {}, "^calibrators and .* need an estimator"),
        ({"estimator": None, "method": "cv+"}, {}, "^method='cv\\+' needs an estimator"),
        ({}, {"y": np.ma.masked_less(TARGETS, 0)}, r"^y holds \d+ masked values: drop their rows, or give y.filled"),
        ({}, {"X": np.ma.masked_less(SHORT, 0)}, r"^X holds \d+ masked values"),
        ({}, {"sample_weight": np.ma.masked_less(np.arange(60.0), 3)}, "^sample_weight holds 3 masked values"),
        ({"cv": GroupKFold(3)}, {"groups": np.ma.masked_less(np.arange(60) // 20, 1)}, "^groups holds 20 masked"),
    ],
)
def test_mistakes_are_named_in_the_words_of_the_estimator(options, given, message):
    model = CalibratedRegressor(**({"estimator": no_fit} | options))
    with pytest.raises(ValueError, match=message):
        model.fit(**({"X": SHORT, "y": TARGETS} | given))


def test_masked_inputs_are_refused_in_predictions_and_a_mask_of_nothing_is_none():
    model = regressor(cv=2).fit(np.ma.array(SHORT), np.ma.array(TARGETS))
    np.testing.assert_array_equal(model.predict(SHORT), regressor(cv=2).fit(SHORT, TARGETS).predict(SHORT))
    with pytest.raises(ValueError, match="X holds 1 masked values"):
        model.predict(np.ma.array(SHORT, mask=np.arange(120).reshape(60, 2) == 7))


@pytest.mark.parametrize("kind", ["dates", "zoned", "spans", "objects", "alone"])
def test_a_column_of_dates_is_named(kind):
    days = pandas.date_range("2020-01-01", periods=60)
    of_kind = {"zoned": days.tz_localize("UTC"), "spans": days - days[0], "objects": [day.date() for day in days]}
    frame = pandas.DataFrame({"a": SHORT[:, 0], "when": of_kind.get(kind, days)})
    frame = frame[["when"]] if kind == "alone" else frame
    with pytest.raises(ValueError, match=r"^X holds dates or times in column 'when', .*: make numbers of them"):
        regressor(cv=2).fit(frame, TARGETS)
    with pytest.raises(ValueError, match=r"^column 'when' of X holds .*: make numbers"):
        regressor(jc.mlp.fit, cv=2).fit(frame, TARGETS)
    if kind != "alone":
        takes_them = make_pipeline(FunctionTransformer(lambda frame: frame[["a"]]), Ridge())
        assert regressor(takes_them, cv=2).fit(frame, TARGETS).predict(frame).shape == (60,)


def test_a_pipeline_names_a_column_of_dates_as_well():
    frame = pandas.DataFrame({"a": SHORT[:, 0], "when": pandas.date_range("2020-01-01", periods=60)})
    with pytest.raises(ValueError, match=r"^x holds dates or times in column 'when', .*: make numbers of them"):
        jc.pipeline.fit(frame, TARGETS, predictor=LinearRegression(), key=jax.random.key(0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "options",
    [{"method": "folds"}, {"method": "split"}, {"method": "cv+"}, {"recalibrate": jc.conformal.fit}],
    ids=["folds", "split", "cv+", "conformal"],
)
def test_a_pipeline_of_64_bits_is_told_where_jax_has_32(options):
    with jax.enable_x64(False):
        told = str(regressor(cv=2, **options).fit(X, Y).pipeline_)
    assert "LinearRegression" in told


def test_an_error_of_the_estimator_is_its_own():
    def fails(x, y):
        raise TypeError("no dates here")

    with pytest.raises(TypeError, match=r"^no dates here"):
        regressor(fails, cv=2).fit(pandas.DataFrame({"a": SHORT[:, 0]}), TARGETS)


def test_in_searches_and_pipelines():
    search = GridSearchCV(
        regressor(Ridge(), cv=2), {"estimator__alpha": [0.1, 1e4], "method": ["folds"]}, scoring=neg_crps, cv=2
    ).fit(X, Y)
    assert search.best_params_["estimator__alpha"] == 0.1
    assert cross_val_score(make_pipeline(StandardScaler(), regressor(cv=2)), X, Y, cv=2).shape == (2,)


@pytest.mark.parametrize("scoring", [None, neg_crps], ids=["score", "neg_crps"])
def test_as_the_last_step_of_a_pipeline(scoring):
    """A tree of depth 1 cannot follow a wave."""
    model = make_pipeline(StandardScaler(), regressor(DecisionTreeRegressor(random_state=0), cv=2))
    grid = {"calibratedregressor__estimator__max_depth": [1, 6]}
    search = GridSearchCV(model, grid, scoring=scoring, cv=2, error_score="raise").fit(X, WAVE)
    assert search.best_params_ == {"calibratedregressor__estimator__max_depth": 6}
    mean, std = search.best_estimator_.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, search.predict(X))
    assert std.shape == (120,)
    scaler, alone = search.best_estimator_
    scores = {None: alone.score, neg_crps: partial(neg_crps, alone)}
    np.testing.assert_allclose(search.score(X, WAVE), scores[scoring](scaler.transform(X), WAVE))
    of_folds = cross_val_score(search.best_estimator_, X, WAVE, cv=2, scoring=scoring, error_score="raise")
    np.testing.assert_allclose(of_folds.mean(), search.best_score_)
    assert neg_crps(make_pipeline(alone), X, Y) == neg_crps(alone, X, Y)


def test_groups_in_searches_and_pipelines():
    """A search takes the name of a column, a pipeline also labels."""
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": KIND})
    search = GridSearchCV(regressor(Ridge(), cv=2), {"estimator__alpha": [0.1, 1e4]}, scoring=neg_crps, cv=2)
    search.fit(frame, Y, by="kind")
    width = np.diff(search.best_estimator_.predict_interval(frame).to_numpy())[:, 0]
    assert width[0] > 3 * width[1]
    model = make_pipeline(StandardScaler(), regressor(cv=2)).fit(X, Y, calibratedregressor__by=KIND)
    _, std = model.predict(X, return_std=True, by=KIND)
    assert std[0] > 3 * std[1]


@pytest.mark.parametrize("method", ["folds", "cv+"])
def test_a_jaxcal_predictor_clone_and_pickle(method):
    fit = partial(jc.mlp.fit, max_epochs=3)
    model = clone(regressor(fit, method=method, cv=2)).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_interval(X), model.predict_interval(X))


@pytest.mark.slow
def test_the_checks_of_skpro():
    """In a process of its own: the tests' checks of types give constructors another signature."""
    pytest.importorskip("skpro", reason="skpro is an extra of its own")
    code = """
from skpro.utils.estimator_checks import check_estimator
from jaxcal.skpro import CalibratedProbaRegressor
found = check_estimator(CalibratedProbaRegressor, raise_exceptions=False, verbose=False)
print(len(found) > 50, {name: result for name, result in found.items() if result != "PASSED"})
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "True {}", run.stdout + run.stderr
