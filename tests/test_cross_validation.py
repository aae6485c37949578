"""Predictions out of fold."""

from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc

KEY = jax.random.key(0)
X = np.arange(17.0)


def remember(x, y, *, key):
    """A model that knows the rows it was fitted to, and predicts -1 elsewhere; its std counts the former."""
    known = dict(zip(np.asarray(x)[:, 0].tolist(), np.asarray(y).tolist(), strict=True))
    return lambda x: jc.Normal(
        np.array([known.get(float(value), -1.0) for value in np.asarray(x)[:, 0]]), np.full(len(x), 1.0 + len(known))
    )


def test_every_row_is_predicted_by_a_model_that_has_not_seen_it():
    law = jc.out_of_fold(remember, X, X, key=KEY, folds=5)
    assert law.mean.tolist() == [-1.0] * 17
    # 17 rows in folds of 4 and 3: fitted on 13 rows or 14.
    assert sorted(np.asarray(law.std).tolist()) == [14.0] * 8 + [15.0] * 9


def test_rows_keep_their_order():
    fit = lambda x, y, *, key: lambda x: 2 * np.asarray(x)[:, 0]
    law = jc.out_of_fold(fit, X, X, key=KEY)
    assert isinstance(law, jc.Point)
    np.testing.assert_array_equal(law.mean, 2 * X)


@pytest.mark.slow
def test_the_errors_are_honest(rng):
    x = rng.normal(size=(60, 10))
    y = rng.normal(size=60)
    fit = partial(jc.mlp.fit, max_epochs=300, patience=300, validation_share=0.05)
    own = np.std(y - fit(x, y, key=KEY)(x).mean)
    out_of_fold = np.std(y - jc.out_of_fold(fit, x, y, key=KEY, folds=3).mean)
    assert own < 0.7 * y.std()
    assert out_of_fold > 0.9 * y.std()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be at least 2"),
        ({"folds": 18}, "at least 18 are needed"),
        ({"fit": lambda x, y, *, key: lambda x: jc.Empirical(x[:, 0], 1.0, np.arange(3.0))}, "Empirical with arrays"),
        ({"fit": lambda x, y, *, key: lambda x: np.zeros(3)[None]}, "shape"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jc.out_of_fold(**({"fit": remember, "x": X, "y": X, "key": KEY} | options))
