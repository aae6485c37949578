"""The options of training, declared once for all networks, and the record of it."""

import inspect
from functools import partial

import jax
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.networks.presets import Settings
from jaxcal.optimize import Result

pytestmark = pytest.mark.any_precision

X = np.random.default_rng(0).normal(size=(60, 2))
Y = X[:, 0] + 0.1 * np.random.default_rng(1).normal(size=60)
KEY = jax.random.key(0)


def fit(**options):
    return jc.mlp.fit(X, Y, key=KEY, max_epochs=3, **options)


def test_every_option_has_a_value_and_a_line_of_text():
    options, steps = jc.networks.TrainingOptions, jc.networks.StepOptions
    assert tuple(steps.__annotations__) == Settings._fields[: len(steps.__annotations__)]
    text = inspect.cleandoc(options.__doc__ or "") + inspect.cleandoc(steps.__doc__ or "")
    for name in steps.__annotations__:
        assert f"    {name}: " in text


def test_none_is_the_default():
    np.testing.assert_array_equal(fit(hidden=None, learning_rate=None)(X).mean, fit()(X).mean)


@pytest.mark.parametrize(
    ("fit", "name", "message"),
    [
        (jc.mlp.fit, "learning_rates", r"mlp\.fit has no option 'learning_rates': did you mean 'learning_rate'\?"),
        (
            jc.mlp.fit,
            "color",
            r"mlp\.fit has no option 'color': the options of its training are hidden, learning_rate",
        ),
        # An argument of the fit itself.
        (jc.deep_ensemble.fit, "num_member", r"deep_ensemble\.fit has no option .*: did you mean 'num_members'\?"),
        (jc.usnrt.fit, "epochs", r"did you mean 'max_epochs'\?"),
        (jc.neural_process.fit, "iterations", r"neural_process\.fit has no option .*: did you mean 'max_iterations'\?"),
        (partial(jc.neural_quantiles.fit, X), "pretraining", r"did you mean 'pretraining_epochs'\?"),
        (partial(jc.accrue.fit, X), "restart", r"accrue\.fit has no option 'restart': did you mean 'restarts'\?"),
    ],
)
def test_an_unknown_option_is_refused(fit, name, message):
    base = jc.Normal(Y, 1.0)
    with pytest.raises(TypeError, match=message):
        fit(*([base] if isinstance(fit, partial) else [X]), Y, key=KEY, **{name: 3})


def test_weight_decay_draws_every_network_to_zero():
    size = lambda network: sum(float(np.sum(layer.weight**2)) for layer in network.network.layers)
    assert size(fit(weight_decay=10.0)) < size(fit())


def test_the_record_says_how_training_ended():
    assert fit().training.result == Result.STEP_LIMIT
    assert not fit().training.converged
    stopped = jc.mlp.fit(X, Y, key=KEY, max_epochs=500, patience=2).training
    assert stopped.converged
    assert stopped.epochs < 500
