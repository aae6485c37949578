"""Calibrators one after the other, the last fitted to out-of-fold errors."""

import jax
import numpy as np
import polars as pl
import pytest

import jaxcal as jc

pytestmark = pytest.mark.any_precision


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2))
    return x, jc.Point(x[:, 0]), x[:, 0] + 0.3 * rng.normal(size=60)


def memorize(x, base, y):
    """A calibrator that knows the targets of its own rows, and adds 1 to the mean of others."""
    known = {tuple(row): target for row, target in zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True)}
    of = lambda row, mean: known.get(tuple(row), mean + 1)
    return lambda x, base: jc.Point(
        np.array([of(*pair) for pair in zip(np.asarray(x).tolist(), np.asarray(base.mean).tolist(), strict=True)])
    )


def test_the_last_step_is_fitted_to_errors_out_of_fold(rows):
    x, base, y = rows
    seen = []

    def last(x, base, y):
        seen.append((x, base, y))
        return jc.conformal.fit(None, base, y)

    chain = jc.chain.fit(x, base, y, calibrators=[memorize, last], key=jax.random.key(0))
    [(_, base_seen, y_seen)] = seen
    assert base_seen.is_out_of_fold
    np.testing.assert_allclose(base_seen.mean, x[:, 0] + 1, rtol=1e-6)  # no row knew its own target
    np.testing.assert_allclose(y_seen, y, rtol=1e-6)
    np.testing.assert_allclose(chain(x, base).mean, y, rtol=1e-6)  # the final step is fitted to all


def test_groups_of_the_last_step_and_frames(rows):
    x, base, y = rows
    frame = pl.DataFrame({"a": x[:, 0], "b": x[:, 1]})
    by = np.arange(60) % 2
    fit = lambda x: jc.chain.fit(
        x, base, y, calibrators=[jc.gaussian_mle.fit, jc.conformal.fit], by=by, key=jax.random.key(0)
    )
    one, other = fit(frame)(frame.select("b", "a"), base, by=by), fit(None)(None, base, by=by)
    np.testing.assert_allclose(one.icdf(0.9), other.icdf(0.9), rtol=1e-6)
    with pytest.raises(ValueError, match="has no column 'b'"):
        fit(frame)(frame.select("a"), base, by=by)
    with pytest.raises(ValueError, match="give the labels of these rows, by="):
        fit(None)(None, base)


def test_mistakes(rows):
    x, base, y = rows
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="two calibrators or more; got 1"):
        jc.chain.fit(x, base, y, calibrators=[jc.crude.fit], key=key)
    with pytest.raises(ValueError, match="base has 59 rows where 60 are expected"):
        jc.chain.fit(x, base[:59], y, calibrators=[jc.crude.fit, jc.crude.fit], key=key)


def test_a_list_of_pipelines_to_choose_from(rows):
    x, _, y = rows
    line = lambda x, y: lambda x: x[:, 0]
    constant = lambda x, y: lambda x: 0 * x[:, 0]
    fitted = jc.pipeline.fit(x, y, predictor=jc.pipeline.Best([(constant, ()), (line, ())]), key=jax.random.key(0))
    np.testing.assert_allclose(fitted.means(x), x[:, 0], rtol=1e-6)
    assert len(fitted.others) == 1


def test_what_calibrated_forecasts_have(rng):
    """The bound holds the error of 19 of 20 samples of uniform transforms."""
    bound = jc.metrics.calibrated_ece(200)
    uniform = jc.Quantiles(np.array([0.001, 0.999]), np.tile([0.001, 0.999], (200, 1)))
    errors = [float(jc.metrics.ece(rng.uniform(size=200), uniform)) for _ in range(200)]
    assert 0.9 <= np.mean(np.array(errors) <= bound) <= 0.99
