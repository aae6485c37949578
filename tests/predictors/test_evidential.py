"""Deep evidential regression: its distribution, its loss, what it learns, and what it makes of bad input."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing_noise import ROWS, SETTING, draw, mean, std
from scipy import stats
from scipy.special import gammaln

from jaxcal import StudentT
from jaxcal.predictors import evidential

pytestmark = pytest.mark.contract_in_32_bits

X64 = jax.config.jax_enable_x64
TOLERANCE = 1e-8 if X64 else 1e-3
KEY = jax.random.key(0)


def fit(x, y, **options):
    return evidential.fit(x, y, **(SETTING | options))


@pytest.fixture
def data(rng):
    return draw(rng)


def evidence(fitted, x):
    """Gamma, nu, alpha and beta of the standardized target at standardized inputs: the forward pass written out."""
    layers = [(np.asarray(layer.weight, float), np.asarray(layer.bias, float)) for layer in fitted.network.layers]
    (weight, bias), (last_weight, last_bias) = layers
    gamma, *outputs = (np.maximum(x[:, None] @ weight.T + bias, 0) @ last_weight.T + last_bias).T
    nu, above_one, beta = (np.logaddexp(0, output) + 1e-6 for output in outputs)
    return gamma, nu, 1 + above_one, beta


def negative_log_likelihood(y, gamma, nu, alpha, beta):
    """Equation 8 of the paper."""
    omega = 2 * beta * (1 + nu)
    squares = (y - gamma) ** 2 * nu + omega
    ratio = gammaln(alpha) - gammaln(alpha + 0.5)
    return np.log(np.pi / nu) / 2 - alpha * np.log(omega) + (alpha + 0.5) * np.log(squares) + ratio


def test_the_distribution_is_the_student_t_of_the_evidence(data):
    x, y = data
    fitted = fit(x, y)
    distribution, (gamma, nu, alpha, beta) = fitted(x), evidence(fitted, np.asarray(fitted.x_scaler(x[:, None]))[:, 0])
    assert isinstance(distribution, StudentT)
    loc, unit = y.mean(), y.std(ddof=1)
    squared_scale = beta * (1 + nu) / (nu * alpha)
    scale = unit * np.sqrt(fitted.widening(jnp.asarray(squared_scale)))
    np.testing.assert_allclose(
        distribution.log_prob(y), stats.t.logpdf(y, 2 * alpha, loc + unit * gamma, scale), atol=TOLERANCE
    )
    by_the_paper = negative_log_likelihood((y - loc) / unit, gamma, nu, alpha, beta)
    log_density = stats.t.logpdf((y - loc) / unit, 2 * alpha, gamma, np.sqrt(squared_scale))
    np.testing.assert_allclose(-log_density, by_the_paper, atol=TOLERANCE)


def test_the_loss_is_that_of_the_paper():
    """Of rows of two kinds, the 400 for validation are so many of one and the rest of the other: a whole number."""
    y = np.arange(ROWS) % 4 == 0
    fitted = fit(np.zeros(ROWS), y, penalty=0.3)
    parameters = gamma, nu, alpha, _ = evidence(fitted, np.zeros(1))
    zeros, ones = (
        (negative_log_likelihood(kind, *parameters) + 0.3 * np.abs(kind - gamma) * (2 * nu + alpha))[0]
        for kind in (np.array([0, 1]) - y.mean()) / y.std(ddof=1)
    )
    number = 400 * (fitted.training.validation_loss - zeros) / (ones - zeros)
    assert 50 < number < 150
    assert abs(number - np.round(number)) < (1e-8 if X64 else 1e-2)


def test_it_recovers_a_spread_that_varies(data):
    """Half of the central 68 % interval, to a tenth on average."""
    grid = np.linspace(-1.8, 1.8, 50)
    distribution = fit(*data)(grid)
    lower, upper = distribution.interval(0.6827)
    assert np.abs((upper - lower) / 2 / std(grid) - 1).mean() < 0.1
    assert np.mean(np.abs(distribution.mean - mean(grid)) / std(grid)) < 0.2


def test_the_penalty_lowers_the_evidence(data):
    x, y = data
    weak, strong = (evidence(fit(x, y, penalty=penalty), x) for penalty in (0.0, 1.0))
    total = lambda evidence: np.mean(2 * evidence[1] + evidence[2])
    assert total(strong) < 0.5 * total(weak)


def test_the_preset_has_the_layers_of_usnrt(data):
    x, y = data
    preset = partial(evidential.fit, key=KEY, preset="usnrt")
    network = eqx.filter_eval_shape(preset, np.stack([x, x**2, np.cos(x)], axis=1), y).network
    assert [layer.weight.shape for layer in network.layers] == [(24, 3), (12, 24), (4, 12)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty": -1.0}, "penalty must not be negative; got -1"),
        ({"preset": "crude"}, "preset must be one of None, 'usnrt'; got 'crude'"),
    ],
)
def test_bad_options(change, message, data):
    with pytest.raises(ValueError, match=message):
        fit(*data, **change)
