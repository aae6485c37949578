"""Predictions out of fold."""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.pipeline.folds import drawn

pytestmark = pytest.mark.any_precision

KEY = jax.random.key(0)
X = np.arange(17.0)


def remember(x, y, *, key):
    """A model that knows the rows it was fitted to, and predicts -1 elsewhere; its std counts the former."""
    known = dict(zip(np.asarray(x)[:, 0].tolist(), np.asarray(y).tolist(), strict=True))
    return lambda x: jc.Normal(
        np.array([known.get(float(value), -1.0) for value in np.asarray(x)[:, 0]]), np.full(len(x), 1.0 + len(known))
    )


def test_every_row_is_predicted_by_a_model_that_has_not_seen_it():
    distribution = jc.out_of_fold(remember, X, X, key=KEY, folds=5)
    assert distribution.mean.tolist() == [-1.0] * 17
    # 17 rows in folds of 4 and 3: every model is fitted on 13 rows.
    assert distribution.std.tolist() == [14.0] * 17


@pytest.mark.parametrize("method", ["process", "rio"])
def test_the_target_of_a_row_has_no_part_in_its_own_prediction(method, rng):
    """No search of a fold begins where the rows that are held out have led."""
    x = rng.normal(size=(48, 2))
    y = np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=48)

    def fit_rio(x, y, *, key):
        base = lambda x: jc.Point(0.5 * np.asarray(x)[:, 0])
        fitted = jc.rio.fit(x, base(x), y, key=key)
        return lambda x: fitted(x, base(x))

    fit = {"process": jc.gaussian_process.fit, "rio": fit_rio}[method]
    fit(x, y, key=KEY)  # what it may leave behind
    predicted = jc.out_of_fold(fit, x, y, key=KEY, folds=4)
    other = jc.out_of_fold(fit, x, np.where(np.arange(48) == 5, y + 1, y), key=KEY, folds=4)
    assert (other.mean[5], other.std[5]) == (predicted.mean[5], predicted.std[5])
    assert (np.asarray(other.mean) != np.asarray(predicted.mean)).any()


def test_a_group_stays_in_one_fold():
    groups = np.array(list("aabbbcdeeffffgghh"))
    order = jax.random.key(1)
    for fold in drawn(17, 3, groups, order):
        assert not set(groups[fold.training]) & set(groups[fold.held_out])
        assert sorted([*fold.training, *fold.held_out]) == list(range(17))
        assert 5 <= len(fold.held_out) <= 7


def test_folds_are_random_and_the_fits_have_keys_of_their_own():
    """Rows in the order of time, as many files have them, do not fall into the folds in that order."""
    seen = []

    def fit(x, y, *, key):
        seen.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return lambda x: x[:, 0]

    x = np.arange(60.0)
    jc.out_of_fold(fit, x, x, key=KEY, folds=5)
    assert len(set(seen)) == 5
    parts = [fold.held_out for fold in drawn(60, 5, None, KEY)]
    # Of neighbors in one fold there are 55 without a random order, and about 11 with it.
    fold_of = np.zeros(60, int)
    for number, part in enumerate(parts):
        fold_of[part] = number
    assert np.sum(fold_of[1:] == fold_of[:-1]) < 25
    others = [fold.held_out for fold in drawn(60, 5, None, jax.random.key(1))]
    assert any(set(a) != set(b) for a, b in zip(parts, others, strict=True))


def test_rows_that_share_a_table_keep_that_of_their_fold():
    def fit(x, y, *, key):
        return lambda new: jc.Empirical(new[:, 0], 1.0, jnp.sort(y))

    distribution = jc.out_of_fold(fit, X, X, key=KEY, folds=2)
    tables = np.stack([distribution.icdf(level) - X for level in np.linspace(0.01, 0.99, 99)])
    for row, table in enumerate(tables.T):
        assert row not in table.round().astype(int)
    assert len({tuple(table) for table in tables.T.round().tolist()}) == 2
    np.testing.assert_allclose(distribution.mean - X, tables.mean(0), atol=0.5)


def test_no_guarantee_follows_from_predictions_out_of_fold():
    distribution = jc.out_of_fold(remember, X, X, key=KEY)
    for fitted in (jc.conformal.fit(None, distribution, X), jc.crude.fit(None, distribution, X, rank="conformal")):
        with pytest.raises(ValueError, match="out of fold"):
            fitted.guarantee(0.9)
    anew = jc.Normal(distribution.mean, distribution.std)
    assert jc.conformal.fit(None, anew, X).guarantee(0.9).num_calibration == 17


def test_rows_keep_their_order():
    fit = lambda x, y, *, key: lambda x: 2 * np.asarray(x)[:, 0]
    distribution = jc.out_of_fold(fit, X, X, key=KEY)
    assert isinstance(distribution, jc.Point)
    np.testing.assert_array_equal(distribution.mean, 2 * X)


@pytest.mark.slow
def test_the_errors_are_honest(rng):
    x = rng.normal(size=(60, 10))
    y = rng.normal(size=60)
    fit = partial(jc.mlp.fit, max_epochs=300, patience=300, validation_fraction=0.05)
    own = np.std(y - fit(x, y, key=KEY)(x).mean)
    out_of_fold = np.std(y - jc.out_of_fold(fit, x, y, key=KEY, folds=3).mean)
    assert own < 0.7 * y.std()
    assert out_of_fold > 0.9 * y.std()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"folds": 18}, "at least 18 are needed"),
        ({"groups": X // 5}, "there are 4 groups; at least 5 are needed"),
        ({"groups": X[1:]}, "a label for each row"),
        ({"fit": lambda x, y, *, key: lambda x: np.zeros(1)}, r"predict \[1, 1, 1, 1, 1\] rows"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jc.out_of_fold(**({"fit": remember, "x": X, "y": X, "key": KEY} | options))


def on_an_accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.slow
def test_on_an_accelerator_one_vmap_of_the_fits_predicts_the_same(monkeypatch, rng):
    calls = []

    def fit(x, y, *, key):
        calls.append(1)
        return jc.mlp.fit(x, y, key=key, max_epochs=3)

    x, y = rng.normal(size=(53, 2)), rng.normal(size=53)
    in_turn = jc.out_of_fold(fit, x, y, key=KEY)
    on_an_accelerator(monkeypatch)
    at_once = jc.out_of_fold(fit, x, y, key=KEY)
    assert len(calls) == 5 + 1
    np.testing.assert_allclose(at_once.mean, in_turn.mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("returns", ["values", "a function of tracers"])
def test_on_an_accelerator_a_fit_that_cannot_be_traced_is_done_in_turn(returns, monkeypatch):
    def fit(x, y, *, key):
        slope = (x[:, 0] * y).sum() if returns == "a function of tracers" else float((x[:, 0] * y).sum())
        return lambda x: slope * x[:, 0]

    x = np.linspace(-1, 1, 20)
    in_turn = jc.out_of_fold(fit, x, x**3, key=KEY)
    on_an_accelerator(monkeypatch)
    np.testing.assert_array_equal(jc.out_of_fold(fit, x, x**3, key=KEY).mean, in_turn.mean)


@pytest.mark.slow
def test_on_an_accelerator_a_training_that_diverges_is_reported(monkeypatch, rng):
    on_an_accelerator(monkeypatch)
    x, y = rng.normal(size=(40, 1)), rng.normal(size=40)
    too_large = float(jnp.finfo(jnp.asarray(y).dtype).max) / 10
    fit = partial(jc.mlp.fit, learning_rate=too_large, max_epochs=3)
    with pytest.raises(FloatingPointError, match="diverged"):
        jc.out_of_fold(fit, x, y, key=KEY)


def test_a_warning_of_every_fold_comes_once():
    def fit(x, y, *, key):
        warnings.warn(f"row {np.argmax(y)} is large.", stacklevel=2)
        return lambda x: x[:, 0]

    x = np.linspace(-1, 1, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jc.out_of_fold(fit, x, x**3, key=KEY)
    (message,) = [str(each.message) for each in caught]
    assert re.fullmatch(r"in a fit without a fold, .*: row \d+ is large. There were 4 more.", message)
