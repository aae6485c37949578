"""Predicted stds of 0, as trees give them where all targets of a leaf are equal."""

import warnings
from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision

RNG = np.random.default_rng(3)
NUM, KEY = 120, jax.random.key(0)
X = RNG.uniform(size=(NUM, 2))
# A model that knows where the target is 0: its std is 0 there, and it is wrong in 6 rows.
ZERO = X[:, 0] < 0.6
WRONG = np.zeros(NUM, bool)
WRONG[np.flatnonzero(ZERO)[:6]] = True
Y = np.where(ZERO & ~WRONG, 0.0, 1 + RNG.normal(size=NUM))
MEAN, STD = np.where(ZERO, 0.0, 1.0), np.where(ZERO, 0.0, 1.0)
BASE = jc.Normal(MEAN, STD)


@pytest.mark.parametrize("score", ["absolute", "quantile"])
def test_a_score_that_does_not_use_the_std_takes_any(score):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower, upper = jc.conformal.fit(None, BASE, Y, score=score)(None, BASE).interval(0.9)
    assert np.isfinite(upper - lower).all()
    assert np.mean((lower <= Y) & (upper >= Y)) >= 0.9


FITS = {
    "conformal": jc.conformal.fit,
    "signed": partial(jc.conformal.fit, score="signed"),
    "randomized": partial(jc.conformal.fit, rule="randomized", key=KEY),
    "by groups": partial(jc.conformal.fit, by=lambda x: x[:, 1] > 0.5),
    "crude": jc.crude.fit,
}


@pytest.mark.parametrize("name", FITS)
def test_a_score_that_divides_is_0_or_infinite(name):
    with pytest.warns(UserWarning, match="infinite in 6 of 120 rows, the first at .* where base.std is 0") as found:
        fitted = FITS[name](X, BASE, Y)
    assert len(found) == 1
    assert found[0].filename == __file__
    forecast = fitted(X, BASE)
    for values in (forecast.mean, forecast.std, forecast.crps(Y), forecast.sample(KEY, (50,))):
        assert np.isfinite(values).all()
    lower, upper = map(np.asarray, forecast.interval(0.8))
    # Six of 120 errors are infinite: an interval of 80 % holds the mean alone where the std is 0, and is finite.
    assert np.isfinite(upper - lower).all()
    assert ((lower <= MEAN) & (upper >= MEAN)).all()
    assert (np.abs(upper - lower)[ZERO] < 1e-30).all()
    # One of 99 % holds them, and so every number.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.isinf(forecast.icdf(0.995)).all()


def test_errors_that_rounding_makes_are_none():
    # Means of a leaf whose targets are all 0.1 are not 0.1.
    targets = np.asarray(jc.Point(np.full(40, 0.1)).mean)
    base = jc.Normal(np.nextafter(targets, np.ones_like(targets)), np.zeros(40))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower, upper = jc.conformal.fit(None, base, targets, score="signed")(None, base).interval(0.9)
    assert ((lower <= targets) & (targets <= upper)).all()


@pytest.mark.parametrize(
    ("fit", "instead"),
    [
        (jc.isotonic.fit, "give jaxcal.Point"),
        (partial(jc.conformal.fit, rule="linear"), "give jaxcal.Point"),
        (partial(jc.conformal.fit, smoothing=0.1), "take score='absolute'"),
        (jc.conditional_conformal.fit, "take score='absolute'"),
    ],
)
def test_what_computes_with_infinite_scores_names_those_that_are_finite(fit, instead):
    with pytest.raises(ValueError, match=f"infinite in 6 of 120 rows.*{instead}"):
        fit(X, BASE, Y)


@pytest.mark.parametrize("init", [jc.online.adaptive.init, jc.online.adaptive.init_aggregated, jc.online.pid.init])
def test_intervals_that_follow_the_rows_go_on(init):
    with pytest.warns(UserWarning, match="is infinite in 6 of 120 rows"):
        state = init(BASE, Y, confidence_level=0.8)
    state, (lower, upper) = jc.online.run(state, BASE, Y)
    covered = np.mean((np.asarray(lower) <= Y) & (np.asarray(upper) >= Y))
    assert 0.7 < covered <= 1


def test_models_of_folds_may_predict_a_std_of_0():
    def fit_model(x, y, key):
        both = lambda x: np.where(np.asarray(x)[:, 0] < 0.6, 0.0, 1.0)
        return lambda x: jc.Normal(both(x), both(x))

    with pytest.warns(UserWarning, match="is infinite in 6 of 120 rows"):
        forecast = jc.cross_conformal.fit(fit_model, X, Y, key=KEY, folds=4)(X)
    for values in (forecast.mean, forecast.std, forecast.crps(Y), *forecast.interval(0.8)):
        assert np.isfinite(values).all()
    assert np.isinf(forecast.interval(0.98)).all()
    assert (forecast.cdf(0.0)[ZERO] >= 0.45).all()


def test_a_pipeline_warns_once_and_goes_on():
    knows_zeros = lambda x, y: lambda x: jc.Normal(*2 * [np.where(np.asarray(x)[:, 0] < 0.6, 0.0, 1.0)])
    options = {"predictor": knows_zeros, "method": jc.pipeline.Folds(folds=4), "key": KEY}
    with pytest.warns(UserWarning, match="is infinite in 6 of 120 rows") as found:
        fitted = jc.pipeline.fit(X, Y, recalibrate=jc.conformal.fit, **options)
    assert len(found) == 1
    for each in (fitted, jc.pipeline.fit(X, Y, **options)):
        lower, upper = map(np.asarray, each(X).interval(0.9))
        assert np.mean((lower <= Y) & (upper >= Y)) >= 0.9


# All pairs of methods, on a target that is mostly 0.

X_ALL = RNG.uniform(size=(150, 2))
RAIN = np.where(RNG.uniform(size=150) < 0.9, 0.0, RNG.gamma(2.0, size=150))
SHORT = {"key": KEY, "learning_rate": 0.01, "hidden": (8,), "max_epochs": 3}
PREDICTORS = {
    "gaussian_process": jc.gaussian_process.fit,
    "mlp": partial(jc.mlp.fit, **SHORT),
    "variance_network": partial(jc.variance_network.fit, **SHORT),
    "deep_ensemble": partial(jc.deep_ensemble.fit, num_members=2, **SHORT),
    "dropout": partial(jc.dropout.fit, num_samples=10, **SHORT),
    "evidential": partial(jc.evidential.fit, **SHORT),
    "neural_process": partial(jc.neural_process.fit, key=KEY, width=8, max_context=10, max_iterations=20),
    "forests": partial(jc.forests.fit, key=KEY, num_trees=20),
    "extra_trees": partial(jc.forests.fit, key=KEY, model="extra_trees", num_trees=20),
    "quantile_boosting": partial(jc.quantile_boosting.fit, key=KEY, levels=(0.1, 0.5, 0.9), max_iter=20),
    "usnrt": partial(jc.usnrt.fit, **SHORT),
}
CALIBRATORS = {
    "conformal": jc.conformal.fit,
    "absolute": partial(jc.conformal.fit, score="absolute"),
    "quantile": partial(jc.conformal.fit, score="quantile", confidence_levels=(0.8,)),
    "crude": jc.crude.fit,
    "isotonic": jc.isotonic.fit,
    "gaussian_mle": jc.gaussian_mle.fit,
    "kmeans": partial(jc.kmeans.fit, key=KEY, num_clusters=3),
    "rio": partial(jc.rio.fit, inference=jc.gp.Exact(max_iterations=3), throw=False),
    "accrue": partial(jc.accrue.fit, key=KEY, restarts=2),
    "neural_quantiles": partial(jc.neural_quantiles.fit, key=KEY, max_epochs=2, pretraining_epochs=2),
    "conditional_conformal": partial(jc.conditional_conformal.fit, score="absolute", confidence_levels=(0.8,)),
    "sharp_gp": partial(jc.sharp_gp.fit, x_train=X, y_train=Y, kernel=jc.sharp_gp.KernelAndNoise(0.5, 0.1)),
}
GUARANTEED = ("conformal", "absolute", "quantile", "crude", "conditional_conformal", "sharp_gp")


@pytest.fixture(scope="module")
def predictions():
    """Of each predictor, out of 150 other rows."""
    other = np.where(RNG.uniform(size=150) < 0.85, 0.0, RNG.gamma(2.0, size=150))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: fit(X_ALL[::-1], other)(X_ALL) for name, fit in PREDICTORS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALIBRATORS)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_each_pair_of_methods_takes_a_target_that_is_mostly_0(predictions, predictor, name):
    base = predictions[predictor]
    if isinstance(base, jc.Point) and name in ("quantile", "neural_quantiles"):
        pytest.skip("quantiles of a point are the point")
    # Where every std counts, and some are 0, the message says what to do.
    if name in ("isotonic", "gaussian_mle") and not isinstance(base, jc.Point) and not np.asarray(base.std).all():
        with pytest.raises(ValueError, match=r"give jaxcal\.Point\(base\.mean\)"):
            CALIBRATORS[name](X_ALL, base, RAIN)
        base = jc.Point(base.mean)
    forecast = CALIBRATORS[name](X_ALL, base, RAIN)(X_ALL, base)
    lower, upper = map(np.asarray, forecast.interval(0.8))
    assert not np.isnan([lower, upper]).any()
    assert not np.isnan(forecast.crps(RAIN)).any()
    if name in GUARANTEED:
        assert np.mean((lower <= RAIN) & (upper >= RAIN)) >= 0.8
