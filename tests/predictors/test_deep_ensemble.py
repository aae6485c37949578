"""Deep ensembles: their members, the mixture of their distributions, and what they make of bad input."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from scipy import stats

from jaxcal import Mixture
from jaxcal.predictors import deep_ensemble, variance_network

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
TOLERANCE = 1e-8 if X64 else 1e-4
KEY = jax.random.key(0)
# One setting and one size for nearly all tests, so that they share what is compiled.
SETTING: dict[str, Any] = {"hidden": (16,), "batch_size": 50, "max_epochs": 100, "learning_rate": 0.02}
ROWS = 500


def fit(x, y, **options):
    return deep_ensemble.fit(x, y, **({"key": KEY, "num_members": 3} | SETTING | options))


@pytest.fixture
def data(rng):
    x = rng.uniform(-1, 1, size=ROWS)
    return x, np.sin(3 * x) + 0.1 * rng.normal(size=ROWS)


@pytest.fixture
def ensemble(data):
    return fit(*data)


def test_with_a_preset_every_member_is_a_variance_network(data):
    """That of its key, which stopped on its own."""
    x, y = data
    ensemble = fit(x, y, preset="crude")
    distribution = ensemble(x)
    for i, key in enumerate(jax.random.split(KEY, 3)):
        alone = variance_network.fit(x, y, key=key, preset="crude", **SETTING)
        np.testing.assert_allclose(distribution.components.mean[i], alone(x).mean, atol=TOLERANCE)
        np.testing.assert_allclose(distribution.components.std[i], alone(x).std, atol=TOLERANCE)
        np.testing.assert_allclose(ensemble.training.validation_loss[i], alone.training.validation_loss, atol=TOLERANCE)
        assert ensemble.training.epochs[i] == alone.training.epochs
    assert len(np.unique(ensemble.training.validation_loss)) == 3
    assert len(np.unique(ensemble.training.epochs)) > 1


def test_members_may_alternate(data):
    options = partial(fit, form="alternating", num_members=4)
    networks = eqx.filter_eval_shape(options, *data).networks.networks
    assert [network.layers[0].weight.shape for network in networks] == [(4, 16, 1), (4, 16, 1)]


def test_the_distribution_is_the_mixture_with_equal_weights(ensemble, data):
    """Its moments and its density, by the formulas of the paper."""
    x, y = data
    distribution = ensemble(x)
    assert isinstance(distribution, Mixture)
    means, stds = np.asarray(distribution.components.mean, float), np.asarray(distribution.components.std, float)
    assert means.shape == stds.shape == (3, ROWS)
    np.testing.assert_allclose(distribution.mean, means.mean(axis=0), atol=TOLERANCE)
    variance = (stds**2 + means**2).mean(axis=0) - means.mean(axis=0) ** 2
    np.testing.assert_allclose(distribution.variance, variance, atol=TOLERANCE)
    density = stats.norm.pdf(y, means, stds).mean(axis=0)
    np.testing.assert_allclose(distribution.log_prob(y), np.log(density), rtol=1e-3, atol=1e-3)


def test_members_agree_on_the_data_and_nowhere_else(ensemble):
    disagreement = lambda x: ensemble(np.array([-x, x])).components.mean.std(axis=0).mean()
    assert disagreement(6.0) > 3 * disagreement(0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_members": 0}, "num_members must be at least 1; got 0"),
        ({"form": "separate"}, "form must be one of 'joint', 'alternating'; got 'separate'"),
    ],
)
def test_bad_options(change, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*data, **change)
