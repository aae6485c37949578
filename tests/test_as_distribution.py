"""What fitted models of other packages predict, as distributions: each against the numbers that the model gives."""

import itertools
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.special
import scipy.stats

import jaxcal as jc
from jaxcal.fitted_models import FORMULA_LEVELS, LEVELS, as_prediction

sklearn = pytest.importorskip("sklearn", reason="most models here are scikit-learn's")

from sklearn.dummy import DummyRegressor  # noqa: E402
from sklearn.ensemble import (  # noqa: E402
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor  # noqa: E402
from sklearn.linear_model import ARDRegression, BayesianRidge, LinearRegression, QuantileRegressor  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

# It computes in the precision of the models, 64 bits; tests of dtypes say what they hold in.
pytestmark = pytest.mark.any_precision

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
Y = X[:, 0] + (0.2 + abs(X[:, 1])) * RNG.normal(size=120)
NEW = X[:7] + 0.1
KEY = jax.random.key(0)
P = np.array([0.1, 0.5, 0.9])
OF_CATBOOST = {"iterations": 20, "verbose": False, "allow_writing_files": False, "thread_count": 1}


def assert_normal(forecast, mean, std):
    assert isinstance(forecast, jc.Normal)
    np.testing.assert_allclose(forecast.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(forecast.std, std, rtol=1e-6)


def assert_quantiles(forecast, levels, values):
    assert isinstance(forecast, jc.SmoothQuantiles)
    levels = np.asarray(levels)
    np.testing.assert_allclose(forecast.levels, levels)
    np.testing.assert_allclose(forecast.values, np.sort(values, axis=1), rtol=1e-6)
    np.testing.assert_allclose(forecast.icdf(levels), np.sort(values, axis=1), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ scikit-learn


@pytest.mark.parametrize("model", [BayesianRidge(), ARDRegression(), GaussianProcessRegressor(alpha=0.5)])
def test_means_and_stds_are_normal(model):
    model.fit(X, Y)
    assert_normal(jc.as_distribution(model, NEW), *model.predict(NEW, return_std=True))


def test_a_pipeline_and_a_search_are_what_they_end_with():
    pipeline = make_pipeline(StandardScaler(), BayesianRidge()).fit(X, Y)
    assert_normal(jc.as_distribution(pipeline, NEW), *pipeline.predict(NEW, return_std=True))
    search = GridSearchCV(pipeline, {"bayesianridge__max_iter": [50, 60]}, cv=2).fit(X, Y)
    assert_normal(jc.as_distribution(search, NEW), *search.best_estimator_.predict(NEW, return_std=True))
    alone = make_pipeline(BayesianRidge()).fit(X, Y)
    assert_normal(jc.as_distribution(alone, NEW), *alone.predict(NEW, return_std=True))


@pytest.mark.parametrize("model", [LinearRegression(), make_pipeline(StandardScaler(), LinearRegression())])
def test_means_alone_are_points(model):
    forecast = jc.as_distribution(model.fit(X, Y), NEW)
    assert isinstance(forecast, jc.Point)
    np.testing.assert_allclose(forecast.mean, model.predict(NEW), rtol=1e-6)


def test_stds_that_are_all_0_say_nothing():
    assert isinstance(jc.as_distribution(DummyRegressor().fit(X, Y), NEW), jc.Point)


def of_levels(make):
    """Models of three levels, not in order."""
    return [make(level).fit(X, Y) for level in P[[2, 0, 1]]]


LISTS = {
    "HistGradientBoosting": lambda p: HistGradientBoostingRegressor(loss="quantile", quantile=p, max_iter=10),
    "GradientBoosting": lambda p: GradientBoostingRegressor(loss="quantile", alpha=p, n_estimators=10),
    "QuantileRegressor": lambda p: QuantileRegressor(quantile=p, alpha=0.01),
    "in pipelines": lambda p: make_pipeline(StandardScaler(), QuantileRegressor(quantile=p, alpha=0.01)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_models_of_one_level_each_says_its_levels(name):
    models = of_levels(LISTS[name])
    values = np.column_stack([model.predict(NEW) for model in models])
    assert_quantiles(jc.as_distribution(models, NEW), P, values[:, [1, 2, 0]])
    assert_quantiles(jc.as_distribution(tuple(models), NEW), P, values[:, [1, 2, 0]])


def test_quantiles_of_one_model_are_no_means_unless_they_are_medians():
    for make in LISTS.values():
        with pytest.raises(ValueError, match=r"predicts quantiles at the level 0\.9, which are no means"):
            jc.as_distribution(make(0.9).fit(X, Y), NEW)
        model = make(0.5).fit(X, Y)
        np.testing.assert_allclose(jc.as_distribution(model, NEW).mean, model.predict(NEW), rtol=1e-6)


def test_a_dict_has_the_levels_as_keys():
    """Also of models that say nothing of them."""
    models = {0.9: LinearRegression().fit(X, Y + 1), 0.1: LinearRegression().fit(X, Y - 2)}
    mean = LinearRegression().fit(X, Y).predict(NEW)
    assert_quantiles(jc.as_distribution(models, NEW), [0.1, 0.9], np.column_stack([mean - 2, mean + 1]))


def test_crossing_quantiles_are_sorted():
    models = {0.1: LinearRegression().fit(X, Y + 1), 0.9: LinearRegression().fit(X, Y - 2)}
    values = np.asarray(jc.as_distribution(models, NEW).values)
    assert (np.diff(values, axis=1) > 0).all()


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([LinearRegression()], "the model LinearRegression of a list has no level of its own: give a dict"),
        ([HistGradientBoostingRegressor()], "HistGradientBoostingRegressor of a list has no level"),
        ([GradientBoostingRegressor(alpha=0.1)], "GradientBoostingRegressor of a list has no level"),
        ([QuantileRegressor(quantile=0.7), QuantileRegressor(quantile=0.9)], "levels must have 1/2 between"),
        ([QuantileRegressor(quantile=0.3), QuantileRegressor(quantile=0.3)], "levels must be strictly increasing"),
        ([], "the models are an empty list"),
    ],
)
def test_lists_that_are_no_distribution(models, message):
    with pytest.raises(ValueError, match=message):
        jc.as_distribution([model.fit(X, Y) for model in models], NEW)


# ------------------------------------------------------------------ packages that are installed for the tests, or not


def test_ngboost():
    ngboost = pytest.importorskip("ngboost")
    distns = pytest.importorskip("ngboost.distns")
    make = partial(ngboost.NGBRegressor, n_estimators=10, verbose=False, random_state=0)
    model = make().fit(X, Y)
    params = model.pred_dist(NEW).params
    assert_normal(jc.as_distribution(model, NEW), params["loc"], params["scale"])
    in_pipeline = make_pipeline(StandardScaler(), make()).fit(X, Y)
    params = in_pipeline[-1].pred_dist(in_pipeline[:-1].transform(NEW)).params
    assert_normal(jc.as_distribution(in_pipeline, NEW), params["loc"], params["scale"])
    for family, y in ((distns.Laplace, Y), (distns.LogNormal, np.exp(Y)), (distns.Poisson, np.round(np.exp(Y)))):
        model = make(Dist=family).fit(X, y)
        theirs = model.pred_dist(NEW).dist
        forecast = jc.as_distribution(model, NEW)
        assert_quantiles(forecast, FORMULA_LEVELS, np.column_stack([theirs.ppf(p) for p in FORMULA_LEVELS]))
        np.testing.assert_allclose(forecast.mean, theirs.mean(), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore")  # of pandas and scikit-learn, by skpro
def test_skpro():
    residual = pytest.importorskip("skpro.regression.residual")
    bootstrap = pytest.importorskip("skpro.regression.bootstrap")
    model = residual.ResidualDouble(LinearRegression()).fit(X, Y)
    theirs = model.predict_proba(NEW)
    assert_normal(jc.as_distribution(model, NEW), theirs.mean().to_numpy()[:, 0], theirs.var().to_numpy()[:, 0] ** 0.5)
    model = bootstrap.BootstrapRegressor(LinearRegression(), n_bootstrap_samples=20, random_state=0).fit(X, Y)
    assert_quantiles(jc.as_distribution(model, NEW), LEVELS, model.predict_proba(NEW).quantile(list(LEVELS)).to_numpy())


def test_catboost():
    catboost = pytest.importorskip("catboost")
    make = partial(catboost.CatBoostRegressor, **OF_CATBOOST)
    model = make(loss_function="MultiQuantile:alpha=0.1,0.5,0.9").fit(X, Y)
    assert_quantiles(jc.as_distribution(model, NEW), P, model.predict(NEW))
    model = make(loss_function="RMSEWithUncertainty").fit(X, Y)
    mean, variance = model.predict(NEW).T
    assert_normal(jc.as_distribution(model, NEW), mean, variance**0.5)
    models = of_levels(lambda p: make(loss_function=f"Quantile:alpha={p}"))
    values = np.column_stack([model.predict(NEW) for model in models])
    assert_quantiles(jc.as_distribution(models, NEW), P, values[:, [1, 2, 0]])
    assert isinstance(jc.as_distribution(make().fit(X, Y), NEW), jc.Point)


def test_a_model_of_catboost_from_a_file_says_its_loss(tmp_path):
    catboost = pytest.importorskip("catboost")
    model = catboost.CatBoostRegressor(loss_function="MultiQuantile:alpha=0.1,0.5,0.9", **OF_CATBOOST).fit(X, Y)
    model.save_model(tmp_path / "model.cbm")
    loaded = catboost.CatBoostRegressor().load_model(tmp_path / "model.cbm")
    assert_quantiles(jc.as_distribution(loaded, NEW), P, model.predict(NEW))


def test_lightgbm():
    lightgbm = pytest.importorskip("lightgbm")
    make = partial(lightgbm.LGBMRegressor, n_estimators=10, verbosity=-1, n_jobs=1)
    models = of_levels(lambda p: make(objective="quantile", alpha=p))
    values = np.column_stack([model.predict(NEW) for model in models])
    assert_quantiles(jc.as_distribution(models, NEW), P, values[:, [1, 2, 0]])
    models = [make(objective="quantile", alpha=0.1).fit(X, Y), make(objective="quantile").fit(X, Y)]
    np.testing.assert_allclose(jc.as_distribution(models, NEW).levels, [0.1, 0.9])
    assert isinstance(jc.as_distribution(make().fit(X, Y), NEW), jc.Point)


def test_xgboost():
    xgboost = pytest.importorskip("xgboost")
    make = partial(xgboost.XGBRegressor, n_estimators=10, objective="reg:quantileerror", n_jobs=1)
    model = make(quantile_alpha=P).fit(X, Y)
    assert_quantiles(jc.as_distribution(model, NEW), P, model.predict(NEW))
    models = of_levels(lambda p: make(quantile_alpha=p))
    values = np.column_stack([model.predict(NEW) for model in models])
    assert_quantiles(jc.as_distribution(models, NEW), P, values[:, [1, 2, 0]])
    assert isinstance(jc.as_distribution(xgboost.XGBRegressor(n_estimators=5).fit(X, Y), NEW), jc.Point)


def test_quantile_forest():
    forests = pytest.importorskip("quantile_forest")
    for kind in (forests.RandomForestQuantileRegressor, forests.ExtraTreesQuantileRegressor):
        model = kind(n_estimators=20, min_samples_leaf=5, random_state=0).fit(X, Y)
        assert_quantiles(jc.as_distribution(model, NEW), LEVELS, model.predict(NEW, quantiles=list(LEVELS)))


def test_xgboost_distribution():
    package = pytest.importorskip("xgboost_distribution")
    model = package.XGBDistribution(distribution="normal", n_estimators=5).fit(X, Y)
    assert_normal(jc.as_distribution(model, NEW), *model.predict(NEW))
    model = package.XGBDistribution(distribution="log-normal", n_estimators=5).fit(X, np.exp(Y))
    scale, s = model.predict(NEW)
    values = np.column_stack([scipy.stats.lognorm.ppf(p, s, scale=scale) for p in FORMULA_LEVELS])
    assert_quantiles(jc.as_distribution(model, NEW), FORMULA_LEVELS, values)


# ------------------------------------------------------------------ objects with a documented interface


class WithPredict:
    """What fits nothing, and predicts by a function."""

    def __init__(self, predict, **attributes):
        self.predict = predict
        vars(self).update(attributes)

    def fit(self, x, y):
        return self


@pytest.mark.parametrize(
    ("family", "parameters", "theirs"),
    [
        # The families, and the names of their parameters, of XGBDistribution.predict in xgboost-distribution 0.4.0.
        ("laplace", {"loc": Y[:7], "scale": np.full(7, 0.5)}, scipy.stats.laplace),
        ("exponential", {"scale": np.exp(Y[:7])}, scipy.stats.expon),
        ("poisson", {"mu": np.exp(Y[:7])}, scipy.stats.poisson),
        ("negative-binomial", {"n": np.full(7, 3.0), "p": np.full(7, 0.2)}, scipy.stats.nbinom),
    ],
)
def test_named_parameters_are_those_of_their_family(family, parameters, theirs):
    named = namedtuple("Params", parameters)
    model = WithPredict(lambda x: named(**parameters), distribution=family)
    values = np.column_stack([theirs.ppf(p, **parameters) for p in FORMULA_LEVELS])
    assert_quantiles(jc.as_distribution(model, NEW), FORMULA_LEVELS, values)


def test_named_parameters_of_an_unknown_family_are_refused():
    named = namedtuple("Params", ["loc", "scale"])
    for attributes in ({"distribution": "gumbel"}, {}):
        with pytest.raises(ValueError, match=r"parameters loc, scale of the family ('gumbel'|None); known are"):
            jc.as_distribution(WithPredict(lambda x: named(Y[:7], abs(Y[:7])), **attributes), NEW)


class Tensor:
    """What a tensor of PyTorch is asked for."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return self

    def double(self):
        return self.values.astype(float)


class FullSupportBars:
    """TabPFN's FullSupportBarDistribution has `borders` and, as static method, the scale of its half normal tails."""

    def __init__(self, borders):
        self.borders = Tensor(borders)

    @staticmethod
    def halfnormal_with_p_weight_before(range_max, p=0.5):
        return scipy.stats.halfnorm(scale=range_max / scipy.stats.halfnorm.ppf(p))

    def parts(self):
        """The distribution of each bar, the first mirrored."""
        borders, tail = self.borders.values, self.halfnormal_with_p_weight_before
        bars = [scipy.stats.uniform(a, b - a) for a, b in itertools.pairwise(borders)]
        return tail(borders[1] - borders[0]), bars[1:-1], tail(borders[-1] - borders[-2])

    def cdf(self, masses, y):
        left, bars, right = self.parts()
        borders = self.borders.values
        below = [left.sf(borders[1] - y), *(bar.cdf(y) for bar in bars), right.cdf(y - borders[-2])]
        return masses @ np.array(below)

    def mean(self, masses):
        left, bars, right = self.parts()
        borders = self.borders.values
        return masses @ [borders[1] - left.mean(), *(bar.mean() for bar in bars), borders[-2] + right.mean()]


class TabPFN:
    """`predict` as of TabPFNRegressor in tabpfn 9.2.0: "full" gives the outputs of "main", a criterion and logits.

    A criterion of another number of bars stands for a constant target, where "full" has one logit a row.
    """

    def __init__(self, num_bars=40, borders=None):
        self.borders = np.sort(RNG.normal(size=41)) if borders is None else borders
        self.logits = RNG.normal(size=(7, num_bars)).astype(np.float32)
        self.calls = []

    def fit(self, X, y):
        return self

    def predict(self, X, *, output_type="mean", quantiles=None):
        assert type(X) is np.ndarray
        assert all(type(level) is float for level in quantiles)
        self.calls.append(output_type)
        assert output_type == "full"
        constant = np.full(len(X), 3.0)
        main = {"mean": constant, "median": constant, "mode": constant, "quantiles": [constant for _ in quantiles]}
        return main | {"criterion": FullSupportBars(self.borders), "logits": Tensor(self.logits)}


def test_the_bars_of_tabpfn_are_a_histogram_with_its_tails():
    model = TabPFN()
    forecast = jc.as_distribution(model, NEW)
    assert isinstance(forecast, jc.Histogram)
    assert forecast.tails == "half_normal"
    assert model.calls == ["full"]
    masses, theirs = scipy.special.softmax(model.logits.astype(float), axis=1), FullSupportBars(model.borders)
    np.testing.assert_allclose(forecast.mean, theirs.mean(masses), rtol=1e-5, atol=1e-6)
    for y in (-4.0, -1.0, 0.3, 5.0):
        np.testing.assert_allclose(forecast.cdf(y), theirs.cdf(masses, y), rtol=1e-5, atol=1e-6)
    assert np.isfinite(forecast.log_prob(1e3)).all()


def test_borders_that_rounding_makes_equal_are_no_mistake():
    """As of targets far from 0 in 32 bits, and as TabPFN allows them."""
    borders = np.sort(RNG.normal(size=41))
    borders[20] = borders[21]
    forecast = jc.as_distribution(TabPFN(borders=borders), NEW)
    np.testing.assert_allclose(forecast.cdf(forecast.icdf(0.9)), 0.9, rtol=1e-5)
    assert (np.asarray(forecast.crps(0.0)) > 0).all()


def test_bars_without_tails_have_none():
    bars = WithPredict(lambda x: None)
    bars.borders = np.arange(4.0)

    class Bars(TabPFN):
        def predict(self, X, *, output_type="mean", quantiles=None):
            return {"criterion": bars, "logits": np.zeros((len(X), 3)), "quantiles": []}

    forecast = jc.as_distribution(Bars(), NEW)
    assert forecast.tails == "uniform"
    np.testing.assert_allclose(forecast.masses, 1 / 3, rtol=1e-6)


def test_a_constant_target_of_tabpfn_is_a_point():
    forecast = jc.as_distribution(TabPFN(num_bars=1), NEW)
    np.testing.assert_array_equal(forecast.std, np.zeros(7))
    np.testing.assert_array_equal(forecast.mean, np.full(7, 3.0))


class TabICL:
    """`predict` as of TabICLRegressor in tabicl 2.2.0: "quantiles" gives an array [n, k]."""

    def predict(self, X, output_type="mean", alphas=None):
        assert output_type == "quantiles"
        return X[:, :1] + scipy.stats.norm.ppf(alphas)


def test_tabicl():
    assert_quantiles(jc.as_distribution(TabICL(), NEW), LEVELS, NEW[:, :1] + scipy.stats.norm.ppf(LEVELS))


def test_quantiles_at_many_levels_are_near_to_the_distribution():
    """Of a normal distribution: mean, std, cdf and score."""
    forecast = jc.as_distribution(TabICL(), NEW)
    theirs = jc.Normal(NEW[:, 0], 1.0)
    np.testing.assert_allclose(forecast.mean, theirs.mean, atol=1e-4)
    np.testing.assert_allclose(forecast.std, theirs.std, rtol=0.02)
    np.testing.assert_allclose(forecast.crps(Y[:7]), theirs.crps(Y[:7]), rtol=0.01)
    np.testing.assert_allclose(forecast.cdf(Y[:7]), theirs.cdf(Y[:7]), atol=0.001)


# ------------------------------------------------------------------ functions, arrays, and what is refused


def test_a_distribution_and_what_gives_one_are_left_as_they_are():
    forecast = jc.Normal(Y[:7], 1.0)
    assert jc.as_distribution(forecast, NEW) is forecast
    assert jc.as_distribution(lambda x: forecast, NEW) is forecast
    assert jc.as_distribution(WithPredict(lambda x: forecast), NEW) is forecast
    assert isinstance(jc.as_distribution(lambda x: x[:, 0], NEW), jc.Point)


def test_fitted_methods_of_jaxcal_predict_by_their_call():
    """Also where they have something called predict."""
    fitted = jc.quantile_boosting.fit(X, Y, key=KEY, levels=P.tolist(), max_iter=5)
    np.testing.assert_array_equal(jc.as_distribution(fitted, NEW).values, fitted(NEW).values)
    prefit = jc.pipeline.fit(X, Y, predictor=fitted, method="prefit", key=KEY)
    assert isinstance(prefit.steps[0].predictions, jc.Quantiles)


def test_samples_are_what_you_say_they_are():
    draws = RNG.normal(size=(7, 30))
    for model in (lambda x: draws, WithPredict(lambda x: draws)):
        forecast = jc.as_distribution(model, NEW, samples=True)
        assert isinstance(forecast, jc.Empirical)
        np.testing.assert_allclose(forecast.mean, draws.mean(axis=1), atol=1e-6)
        np.testing.assert_allclose(forecast.std, draws.std(axis=1), rtol=1e-5)
        np.testing.assert_allclose(forecast.cdf(0.2), (draws <= 0.2).mean(axis=1), rtol=1e-6)


def test_an_array_of_several_columns_is_refused():
    """It may hold quantiles, samples, a mean and a variance, or several targets."""
    two = RNG.normal(size=(7, 2))
    for model in (WithPredict(lambda x: two), lambda x: two, RandomForestRegressor(3).fit(X, X[:, :2])):
        with pytest.raises(ValueError, match=r"has shape \(7, 2\): nothing says what the 2 numbers of a row are"):
            jc.as_distribution(model, NEW)
    with pytest.raises(ValueError, match=r"prediction has shape \(7, 2\)"):
        as_prediction(two)
    with pytest.raises(ValueError, match=r"has shape \(7, 2\)"):
        jc.as_distribution(GaussianProcessRegressor().fit(X, X[:, :2]), NEW)
    np.testing.assert_allclose(jc.as_distribution(WithPredict(lambda x: two[:, :1]), NEW).mean, two[:, 0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"prediction has shape \(2, 7\)"):  # a mean and a std
        jc.pipeline.fit(X, Y, predictor=lambda x: (x[:, 0][:7], x[:, 1][:7]), method="prefit", key=KEY)


def test_what_is_no_mean_is_refused_within_other_estimators():
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import BaggingRegressor
    from sklearn.tree import DecisionTreeClassifier

    ninth = QuantileRegressor(quantile=0.9, alpha=0)
    for model in (TransformedTargetRegressor(ninth), BaggingRegressor(ninth, 2)):
        with pytest.raises(ValueError, match=r"quantiles at the level 0\.9, which are no means"):
            jc.as_distribution(model.fit(X, Y), NEW)
    with pytest.raises(ValueError, match="is a classifier"):
        jc.as_distribution(DecisionTreeClassifier().fit(X, Y > 0), NEW)


def test_what_is_no_model_and_wrong_numbers_are_named():
    with pytest.raises(TypeError, match="must be a fitted model with predict, or a function of x; got int"):
        jc.as_distribution(3, NEW)
    with pytest.raises(TypeError, match="a model gave None"):
        jc.as_distribution(lambda x: None, NEW)
    with pytest.raises(ValueError, match="WithPredict gave predictions of 3 rows for 7"):
        jc.as_distribution(WithPredict(lambda x: Y[:3]), NEW)
    with_std = lambda std: WithPredict(lambda x, return_std=False: (Y[:7], std))
    with pytest.raises(ValueError, match="std holds 1 values that are NaN"):
        jc.as_distribution(with_std(np.array([1, 1, 1, np.nan, 1, 1, 1])), NEW)
    with pytest.raises(ValueError, match="std must not be negative"):
        jc.as_distribution(with_std(-np.ones(7)), NEW)
    forecast = WithPredict(None, pred_dist=lambda x: WithPredict(None, dist=None))
    with pytest.raises(ValueError, match="whose quantiles are not known"):
        jc.as_distribution(forecast, NEW)


def test_the_dtype_is_that_of_an_array_of_jax():
    model = BayesianRidge().fit(X, Y)
    for x in (jnp.asarray(NEW, jnp.float32), jnp.asarray(NEW)):
        forecast = jc.as_distribution(model, x)
        assert forecast.mean.dtype == forecast.std.dtype == x.dtype
    histogram = jc.as_distribution(TabPFN(), jnp.asarray(NEW, jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(histogram)} == {np.dtype("float32")}


def test_sparse_inputs_come_to_the_model_as_they_are():
    x = scipy.sparse.csr_matrix(X)
    model = LinearRegression().fit(x, Y)
    np.testing.assert_allclose(jc.as_distribution(model, x).mean, model.predict(x), rtol=1e-6)


def test_a_data_frame_comes_to_the_model_as_it_is():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    model = BayesianRidge().fit(frame, Y)
    assert_normal(jc.as_distribution(model, frame[:7]), *model.predict(frame[:7], return_std=True))


# ------------------------------------------------------------------ in pipelines


def test_the_pipeline_calibrates_the_distribution_of_the_model():
    fitted = jc.pipeline.fit(X, Y, predictor=BayesianRidge(), recalibrate=jc.conformal.fit, key=KEY)
    base = fitted.steps[0].predictions
    assert isinstance(base, jc.Normal)
    assert np.ptp(np.asarray(base.std)) > 0
    # The intervals are as wide as the stds of the model say.
    lower, upper = fitted(NEW).interval(0.8)
    std = BayesianRidge().fit(X, Y).predict(NEW, return_std=True)[1]
    np.testing.assert_allclose((upper - lower) / (upper - lower)[0], std / std[0], rtol=1e-4)


def test_the_estimator_of_scikit_learn_has_the_stds_of_its_own():
    face = pytest.importorskip("jaxcal.sklearn")
    model = face.CalibratedRegressor(BayesianRidge(), recalibrate=jc.conformal.fit, random_state=0).fit(X, Y)
    mean, std = model.predict(NEW, return_std=True)
    own_mean, own_std = BayesianRidge().fit(X, Y).predict(NEW, return_std=True)
    np.testing.assert_allclose(mean, own_mean, rtol=1e-6)
    np.testing.assert_allclose(std / std[0], own_std / own_std[0], rtol=1e-6)
    # And what it predicts is read in its turn.
    forecast = jc.as_distribution(model, NEW)
    np.testing.assert_allclose(forecast.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(forecast.std, std, rtol=1e-6)


def test_fitted_models_are_calibrated_by_other_rows():
    half, rest = slice(60), slice(60, None)
    model = BayesianRidge().fit(X[half], Y[half])
    fitted = jc.pipeline.fit(X[rest], Y[rest], predictor=model, method="prefit", key=KEY)
    assert_normal(fitted.steps[0].predictions, *model.predict(X[rest], return_std=True))
    models = [QuantileRegressor(quantile=p, alpha=0.01).fit(X[half], Y[half]) for p in P]
    for several in (tuple(models), dict(zip(P, models, strict=True)), partial(jc.as_distribution, models)):
        fitted = jc.pipeline.fit(X[rest], Y[rest], predictor=several, method="prefit", key=KEY)
        assert_quantiles(fitted.steps[0].predictions, P, np.column_stack([each.predict(X[rest]) for each in models]))
        assert np.isfinite(np.asarray(fitted(NEW).interval(0.8))).all()


def test_a_fit_may_return_a_list_of_models():
    def fit(x, y):
        return partial(jc.as_distribution, [QuantileRegressor(quantile=p, alpha=0.01).fit(x, y) for p in P])

    base = jc.pipeline.fit(X, Y, predictor=fit, method=jc.pipeline.Folds(folds=2), key=KEY).steps[0].predictions
    assert isinstance(base, jc.SmoothQuantiles)
    assert len(base) == len(Y)


class OnlyPredDist:
    """A model without predict."""

    def fit(self, X, y):
        self.mean = y.mean()
        return self

    def pred_dist(self, X):
        frozen = scipy.stats.norm(np.full(len(X), self.mean), 1 + abs(X[:, 1]))
        return WithPredict(None, dist=frozen)


@pytest.mark.parametrize("method", ["folds", "split", "cv+"])
@pytest.mark.parametrize("model", [BayesianRidge(), OnlyPredDist()])
def test_each_method_takes_the_distribution_of_the_model(method, model):
    fitted = jc.pipeline.fit(X, Y, predictor=model, method=method, key=KEY)
    lower, upper = fitted(NEW).interval(0.8)
    assert (np.asarray(lower) < np.asarray(upper)).all()
    assert np.isfinite(np.asarray(upper)).all()


def test_bars_of_other_borders_in_every_fold_are_put_together():
    class Bars(TabPFN):
        """The borders are those of the standardized target, moved back to its unit."""

        def fit(self, X, y):
            self.borders = y.mean() + y.std() * np.linspace(-3, 3, 41)
            return self

        def predict(self, X, *, output_type="mean", quantiles=None):
            middle = (self.borders[1:] + self.borders[:-1]) / 2
            logits = -0.5 * ((middle - X[:, :1]) / 0.8) ** 2
            return {"criterion": FullSupportBars(self.borders), "logits": logits, "quantiles": []}

    fitted = jc.pipeline.fit(
        X, Y, predictor=Bars(), recalibrate=partial(jc.conformal.fit, score="cdf", rule="linear"), key=KEY
    )
    assert 0.8 < jc.metrics.coverage(Y, fitted.out_of_fold) < 1
    assert np.isfinite(np.asarray(fitted(NEW).log_prob(0.0))).all()
