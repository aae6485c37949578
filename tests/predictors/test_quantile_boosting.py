"""Boosted quantiles: against the packages by themselves, on new rows, and the answers to bad input."""

import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import metrics, quantile_boosting

pytestmark = pytest.mark.contract_in_32_bits

pytest.importorskip("sklearn", reason="scikit-learn is of the extra forests")
KEY, LEVELS = jax.random.key(0), (0.05, 0.5, 0.95)
# By which options each package grows 30 trees; the default steps of two of them are for many more.
PACKAGES = {
    "scikit-learn": {"max_iter": 30},
    "lightgbm": {"n_estimators": 30, "n_jobs": 1, "learning_rate": 0.2},
    "xgboost": {"n_estimators": 30, "n_jobs": 1},
    "catboost": {"iterations": 30, "thread_count": 1, "learning_rate": 0.2},
}


def rows(seed, n=600):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    return x, 5 + np.sin(2 * x[:, 0]) + np.where(x[:, 1] > 0, 1.0, 0.1) * rng.exponential(size=n)


X, Y = rows(0)
NEW, NEW_Y = rows(1, 2000)


@pytest.fixture(scope="module", params=PACKAGES)
def boosted(request):
    """Skips where a package is not there: all but the first are no dependencies."""
    if request.param != "scikit-learn":
        pytest.importorskip(request.param, reason="not a dependency: used where it is installed")
    return quantile_boosting.fit(X, Y, key=KEY, model=request.param, levels=LEVELS, **PACKAGES[request.param])


def test_quantiles_hold_on_new_rows(boosted):
    """Without the shift 600 rows and 30 trees cover too little."""
    distribution = boosted(NEW)
    assert 0.86 < metrics.coverage(NEW_Y, distribution) < 0.96
    assert 0.4 < np.mean(np.asarray(distribution.icdf(0.5)) >= NEW_Y) < 0.6
    lower, upper = distribution.interval(0.9)
    loud = NEW[:, 1] > 0
    # The shift widens both sides by as much.
    assert (upper - lower)[loud].mean() > 1.3 * (upper - lower)[~loud].mean()


def test_key_dtype_scale_and_pickle(boosted):
    values = boosted(NEW).values
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(boosted))(NEW).values, values)
    fit = lambda y, key=KEY: quantile_boosting.fit(
        X, y, key=key, model=boosted.model, levels=LEVELS, **PACKAGES[boosted.model]
    )
    np.testing.assert_allclose(fit(2.0**-30 * Y)(NEW).values * 2.0**30, values, rtol=1e-5)
    assert np.any(fit(Y, jax.random.key(1))(NEW).values != values)
    assert boosted(NEW.astype(np.float32)).values.dtype == jnp.float32


def test_intervals_hold_a_value_that_many_rows_have():
    """But for rounding its quantiles are that value, and it lies at an end of most intervals."""
    at_one_value = lambda y, seed: np.where(np.random.default_rng(seed).uniform(size=len(y)) < 0.7, 0.1, y)
    y, new_y = at_one_value(Y, 2), at_one_value(NEW_Y, 3)
    distribution = quantile_boosting.fit(X, y, key=KEY, levels=LEVELS, max_iter=30)(NEW)
    lower, upper = distribution.interval(0.9)
    tied = new_y == 0.1
    assert np.mean((lower <= new_y)[tied]) > 0.9
    assert np.mean(upper >= new_y) > 0.9


def test_the_shift_is_the_quantile_of_the_errors_of_held_out_rows():
    """A tree that cannot split predicts a constant at each level: what is left are quantiles of 120 held-out rows."""
    fitted = quantile_boosting.fit(X, Y, key=KEY, levels=LEVELS, max_iter=1, max_leaf_nodes=2, min_samples_leaf=400)
    values = np.asarray(fitted(NEW[:1]).values[0])
    covered = (Y[:, None] <= values).mean(axis=0)
    np.testing.assert_allclose(covered, LEVELS, atol=0.06)


def test_the_median_is_about_that_of_the_package_by_itself():
    """Of all rows, of which a random fifth is held out here."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    median = quantile_boosting.fit(X, Y, key=KEY, levels=LEVELS, max_iter=30)(NEW).icdf(0.5)
    alone = HistGradientBoostingRegressor(loss="quantile", quantile=0.5, max_iter=30).fit(X, Y).predict(NEW)
    assert np.corrcoef(median, alone)[0, 1] > 0.9


def test_quantiles_do_not_cross():
    fitted = quantile_boosting.fit(X[:60], Y[:60], key=KEY, max_iter=30, min_samples_leaf=2)
    assert (np.diff(np.asarray(fitted(NEW).values), axis=1) >= 0).all()
    assert fitted(NEW).levels.shape == (13,)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ImportError, match="lightgbm is not installed: pip install lightgbm"):
        quantile_boosting.fit(X, Y, key=KEY, model="lightgbm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": (0.5, 0.5)}, r"levels must be strictly increasing; got \(0.5, 0.5\)"),
        ({"levels": (0.5, 95.0)}, "levels must lie between 0 and 1; got 95: did you mean 0.95"),
        ({"model": "ngboost"}, "model must be one of 'scikit-learn', 'lightgbm', 'xgboost', 'catboost'; got 'ngboost'"),
        ({"x": X[:9], "y": Y[:9]}, "x has 9 rows; at least 10 are needed"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        quantile_boosting.fit(**({"x": X, "y": Y, "key": KEY} | change))
