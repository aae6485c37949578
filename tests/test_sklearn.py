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
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from jaxcal.sklearn import CalibratedRegressor, neg_crps  # noqa: E402

# It computes in 64 bits whatever JAX's precision is: `test_the_precision_is_64_bits`.
pytestmark = pytest.mark.any_precision

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
Y = X[:, 0] + np.where(np.arange(120) % 2, 0.1, 1.0) * RNG.normal(size=120)
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
    options = {"predictor": LinearRegression(), "calibrators": (jc.rio.fit,), "folds": 3}
    with jax.enable_x64(True):
        direct = jc.pipeline.fit(X, Y, key=key, **options)
        np.testing.assert_allclose(model.predict(X), direct(X).mean, rtol=1e-10)
        lower, upper = direct(X).interval(0.8)
    np.testing.assert_allclose(model.predict_interval(X, confidence_level=0.8), np.column_stack([lower, upper]))
    assert model.guarantee_ == model.guarantee(0.9) == direct.guarantee(0.9)
    assert "No coverage is guaranteed" in str(model.guarantee_)


def test_the_mean_is_the_estimators_and_the_std_is_asked_for():
    model = regressor().fit(X, Y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, LinearRegression().fit(X, Y).predict(X))
    np.testing.assert_array_equal(mean, model.predict(X))
    assert std.shape == (120,)
    np.testing.assert_allclose(model.score(X, Y), LinearRegression().fit(X, Y).score(X, Y))


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
        with pytest.raises(ValueError, match="x and y have different indices"):
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
    with pytest.raises(ValueError, match="hold every row once"):
        regressor(cv=[(np.arange(60), np.arange(60, 100)), (np.arange(60, 100), np.arange(60))]).fit(X, Y)


def test_in_searches_and_pipelines():
    search = GridSearchCV(
        regressor(Ridge(), cv=2), {"estimator__alpha": [0.1, 1e4], "method": ["folds"]}, scoring=neg_crps, cv=2
    ).fit(X, Y)
    assert search.best_params_["estimator__alpha"] == 0.1
    assert cross_val_score(make_pipeline(StandardScaler(), regressor(cv=2)), X, Y, cv=2).shape == (2,)


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
