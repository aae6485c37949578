"""Training by a fixed number of full-batch steps: its derivatives, what goes with it, and what has none."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import check_gradients
from jax.flatten_util import ravel_pytree

import jaxcal as jc
from jaxcal import Normal
from jaxcal.calibrators.neural_quantiles import Recalibrator
from jaxcal.networks import FeedForward, NormalNetwork
from jaxcal.optimize import Result

pytestmark = pytest.mark.any_precision

X64 = jax.config.jax_enable_x64
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 2))
MEAN, STD, WEIGHTS = np.sin(X[:, 0]), np.exp(0.2 * X[:, 1]), RNG.uniform(0.5, 2, size=20)
Y = MEAN + 0.3 * RNG.normal(size=20)
NEW = Normal(jnp.asarray(MEAN[:5]), jnp.asarray(STD[:5]))
STEPS, RATE = 4, 0.05


def one(out_size, **options):
    """A small network, the last of whose units is never active."""
    network = FeedForward(2, (4,), out_size, key=KEY, **options)
    return eqx.tree_at(lambda n: n.layers[0].bias, network, network.layers[0].bias.at[-1].set(-50.0))


NETWORK, TWO, LOG_STD = one("scalar"), NormalNetwork((one(2),)), one("scalar", activation=jnp.tanh)
# Slopes that are not 0: there a step turns around within 1e-8.
QUANTILES = jax.tree.map(lambda a: a + 0.1, Recalibrator(9, key=KEY, dtype=jnp.zeros(()).dtype))


def reading(distribution):
    """Means and stds of five rows, as one number."""
    return jnp.cos(jnp.arange(5.0)) @ distribution.mean + jnp.sin(jnp.arange(1, 6.0)) @ distribution.std


def read_mlp(x, y, initial, rate, key=KEY):
    fitted = jc.mlp.fit(x, y, key=key, steps=STEPS, initial=initial, learning_rate=rate)
    return reading(fitted(X[:5]))


def read_variance_network(x, y, initial, rate):
    fitted = jc.variance_network.fit(x, y, key=KEY, steps=STEPS, initial=initial, learning_rate=rate, weight_decay=0.1)
    return reading(fitted(X[:5]))


def read_quantiles(mean, std, y, weights, initial, rate):
    options = {"steps": STEPS, "initial": initial, "learning_rate": rate, "weights": weights, "levels": (0.2, 0.6)}
    fitted = jc.neural_quantiles.fit(None, Normal(mean, std), y, key=KEY, **options)
    return reading(fitted(None, NEW))


def read_accrue(x, mean, std, y, weights, model, rate):
    options = {"steps": STEPS, "model": model, "learning_rate": rate, "weights": weights}
    fitted = jc.accrue.fit(x, Normal(mean, std), y, key=KEY, relative=True, **options)
    return reading(fitted(X[:5], NEW))


CASES = {
    "mlp": (read_mlp, (X, Y), NETWORK),
    "variance_network": (read_variance_network, (X, Y), TWO),
    "neural_quantiles": (read_quantiles, (MEAN, STD, Y, WEIGHTS), QUANTILES),
    "accrue": (read_accrue, (X, MEAN, STD, Y, WEIGHTS), LOG_STD),
}


@pytest.mark.skipif(not X64, reason="differences need 64 bits")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "neural_quantiles" else []) for name in CASES]
)
def test_derivatives_in_every_argument_are_those_of_differences(name):
    read, rows, initial = CASES[name]
    weights, whole = ravel_pytree(eqx.filter(initial, eqx.is_array))
    network = lambda vector: eqx.combine(whole(vector), initial)
    arguments = [*map(jnp.asarray, rows), weights, jnp.asarray(RATE)]
    value = lambda *arguments: read(*arguments[:-2], network(arguments[-2]), arguments[-1])
    found, differences = check_gradients(value, arguments, 1e-6)
    np.testing.assert_allclose(value(*arguments), found, rtol=1e-10)  # without jit
    assert all(difference != 0 for difference in differences)


def test_vmap_over_keys_is_a_loop():
    run = lambda key: read_mlp(X, Y, None, 0.05, key)
    keys = jax.random.split(KEY, 3)
    np.testing.assert_allclose(jax.vmap(run)(keys), [run(key) for key in keys], rtol=1e-4)


def test_no_step_leaves_the_initial_network():
    fitted = jc.mlp.fit(X, Y, key=KEY, steps=0, initial=NETWORK)
    assert eqx.tree_equal(fitted.network, NETWORK)
    fitted = jc.accrue.fit(X, Normal(MEAN, STD), Y, key=KEY, steps=0, model=LOG_STD)
    assert eqx.tree_equal(fitted.model, LOG_STD)


def test_the_record_says_so():
    fitted = jc.mlp.fit(X, Y, key=KEY, steps=STEPS, initial=NETWORK)
    assert (fitted.training.epochs, fitted.training.result) == (STEPS, Result.STEP_LIMIT)
    assert fitted.training.validation_loss is None
    fitted = jc.accrue.fit(X, Normal(MEAN, STD), Y, key=KEY, steps=0, model=LOG_STD)
    errors, std = Y - MEAN, fitted(X, Normal(MEAN, STD)).std
    unit = Y.std(ddof=1)
    loss = jc.functional.scores.accrue_loss(errors / unit, std / unit, fitted.beta)
    np.testing.assert_allclose(fitted.loss, loss, rtol=1e-5)
    with pytest.raises(FloatingPointError, match="after 4 epochs"):
        jc.mlp.fit(X, Y, key=KEY, steps=STEPS, initial=NETWORK, learning_rate=1e30 if not X64 else 1e200)


PREDICTORS = {
    name: partial(getattr(jc, name).fit, X, key=KEY)
    for name in ("mlp", "variance_network", "deep_ensemble", "dropout", "evidential", "neural_process")
}
CALIBRATORS = {
    name: partial(getattr(jc, name).fit, X, Normal(MEAN, STD), key=KEY) for name in ("neural_quantiles", "accrue")
}
FITS = PREDICTORS | CALIBRATORS


def derivative(fit, argument):
    """Of every number of a fitted module; what is known is traced, too."""
    total = lambda argument: sum(
        jnp.sum(leaf) for leaf in jax.tree.leaves(eqx.filter(fit(argument), eqx.is_inexact_array))
    )
    return jax.make_jaxpr(jax.jit(jax.grad(total)))(jnp.asarray(argument))


@pytest.mark.skipif(not X64, reason="does not depend on the precision")
@pytest.mark.parametrize("name", FITS)
def test_a_training_until_it_stops_has_none_and_says_so(name):
    steps = "give steps=" if name in CASES else "take mlp.fit or variance_network.fit with steps="
    with pytest.raises(TypeError, match=rf"no derivative passes through {name}\.fit: {steps}"):
        derivative(lambda y: FITS[name](y=y), Y)
    if name != "accrue":
        with pytest.raises(TypeError, match=rf"no derivative passes through {name}\.fit"):
            derivative(lambda rate: FITS[name](y=Y, learning_rate=rate), 0.01)


@pytest.mark.skipif(not X64, reason="does not depend on the precision")
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("mlp", "weight_decay"),
        ("evidential", "penalty"),
        ("dropout", "rate"),
    ],
)
def test_nor_in_what_the_loss_is_made_of(name, option):
    with pytest.raises(TypeError, match=rf"no derivative passes through {name}\.fit"):
        derivative(lambda value: FITS[name](y=Y, **{option: value}), 0.2)


@pytest.mark.skipif(not X64, reason="does not depend on the precision")
def test_nor_in_the_numbers_of_a_loss():
    loss = lambda beta: partial(jc.functional.scores.accrue_loss, beta=beta)
    with pytest.raises(TypeError, match=r"no derivative passes through accrue\.fit"):
        derivative(lambda beta: FITS["accrue"](y=Y, loss=loss(beta)), 0.2)


@pytest.mark.skipif(not X64, reason="does not depend on the precision")
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_fit_to_constants_is_no_obstacle(name):
    """Whatever else there is a derivative by."""

    @jax.jit
    def total(scale, y):
        fitted = PREDICTORS[name](y=jax.lax.stop_gradient(scale * y))
        return jnp.sum(fitted(scale * X[:5]).mean)

    jax.make_jaxpr(jax.grad(total))(2.0, jnp.asarray(Y))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("mlp", {"steps": -1}, ValueError, "steps must be at least 0; got -1"),
        (
            "mlp",
            {"steps": 3, "patience": 5},
            ValueError,
            "steps=3 is a training on all rows .* cannot go with patience",
        ),
        ("mlp", {"steps": 3, "preset": "paper"}, ValueError, "cannot go with preset"),
        ("mlp", {"initial": NETWORK}, ValueError, "give steps, too"),
        ("mlp", {"steps": 3, "initial": NETWORK, "hidden": (4,)}, ValueError, "hidden layers of its own"),
        ("mlp", {"steps": 3, "initial": TWO}, TypeError, "initial must be a FeedForward, .* got NormalNetwork"),
        ("mlp", {"steps": 3, "initial": one(1)}, ValueError, "2 inputs to scalar outputs; it maps 2 to 1"),
        ("variance_network", {"steps": 3, "form": "alternating"}, ValueError, "give form='joint'; got 'alternating'"),
        ("deep_ensemble", {"steps": 3}, TypeError, "no option 'steps'"),
        ("neural_quantiles", {"steps": 3, "pretraining_epochs": 5}, ValueError, "cannot go with pretraining_epochs"),
        ("neural_quantiles", {"initial": QUANTILES}, ValueError, "give steps, too"),
        ("accrue", {"steps": 3, "restarts": 2}, ValueError, "cannot go with restarts"),
        ("accrue", {"learning_rate": 0.1}, ValueError, "give steps, too"),
        ("accrue", {"steps": 3, "learning_rate": -0.1}, ValueError, "learning_rate must be positive; got -0.1"),
    ],
)
def test_what_does_not_go_with_steps_is_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        FITS[name](y=Y, **options)
