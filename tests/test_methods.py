"""One battery over every method: what a user of JAX may do with it."""

import contextlib
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcal import Distribution, Normal, Point, mlp, rio
from jaxcal.calibrators import accrue, conformal, crude, gaussian_mle, isotonic, neural_quantiles, sharp_gp
from jaxcal.predictors import deep_ensemble, dropout, evidential, gaussian_process, neural_process, variance_network

# The rows lie about a plane: in 32 bits the std of rio-nearest is off by 3 %, which is within its tolerance.
pytestmark = pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater")
X64 = jax.config.jax_enable_x64
# What does not depend on the precision runs in 64 bits only.
once = pytest.mark.skipif(not X64, reason="does not depend on the precision")
RNG = np.random.default_rng(3)
X = RNG.uniform(-2, 2, size=(40, 2))
MEAN = np.sin(X[:, 0])
Y = MEAN + 0.3 * X[:, 1] + 0.1 * RNG.normal(size=40)
KEY = jax.random.key(0)


def fit_mlp(x, mean, y):
    return mlp.fit(x, y, key=KEY, max_epochs=20)


def fit_variance_network(x, mean, y, **options):
    return variance_network.fit(x, y, key=KEY, hidden=(8,), learning_rate=0.01, max_epochs=20, **options)


def fit_deep_ensemble(x, mean, y):
    return deep_ensemble.fit(x, y, key=KEY, num_members=2, hidden=(8,), learning_rate=0.01, max_epochs=20)


def fit_dropout(x, mean, y, **options):
    return dropout.fit(x, y, key=KEY, hidden=(8,), learning_rate=0.01, max_epochs=20, num_samples=10, **options)


def fit_evidential(x, mean, y):
    return evidential.fit(x, y, key=KEY, hidden=(8,), learning_rate=0.01, max_epochs=20)


def fit_gaussian_process(x, mean, y, **options):
    return gaussian_process.fit(x, y, **options)


def fit_neural_process(x, mean, y):
    options = {"width": 8, "max_context": 10, "learning_rate": 0.01, "max_iterations": 100}
    return neural_process.fit(x, y, key=KEY, **options)


def fit_rio(x, mean, y, **options):
    return rio.fit(x, Point(mean), y, **options)


def fit_accrue(x, mean, y):
    return accrue.fit(x, Point(mean), y, key=KEY, restarts=2)


def fit_gaussian_mle(x, mean, y):
    return gaussian_mle.fit(x, Point(mean), y)


def fit_isotonic(x, mean, y):
    return isotonic.fit(x, Point(mean), y)


def fit_neural_quantiles(x, mean, y):
    # What the network learns first are the base's own widths: they must be in the unit of y, as `unit` is.
    base = base_in_units(x, mean, jnp.mean(jnp.abs(y - mean)))
    return neural_quantiles.fit(None, base, y, key=KEY, max_epochs=20, pretraining_epochs=20)


def call_neural_quantiles(module, x, mean):
    return module(None, base_in_units(x, mean, module.unit))


def base_in_units(x, mean, unit):
    return Normal(mean, unit * (1 + jnp.asarray(x)[:, 0] ** 2))


def fit_sharp_gp(x, mean, y, **options):
    """Of two calibration rows after each training row."""
    train, rest = np.arange(40) % 3 == 0, np.arange(40) % 3 > 0
    options = {"x_train": x[train], "y_train": y[train], "kernel": sharp_gp.Kernel(1.0, 0.1), **options}
    return sharp_gp.fit(x[rest], Point(mean[rest]), y[rest], **options)


def base_with_std(x, mean):
    return Normal(mean, 1 + jnp.asarray(x)[:, 0] ** 2)


def fit_on_std(fit, x, mean, y, **options):
    return fit(x, base_with_std(x, mean), y, **options)


def call_mlp(module, x, mean):
    return module(x)


def call_rio(module, x, mean):
    return module(x, Point(mean))


def call_on_std(module, x, mean):
    return module(x, base_with_std(x, mean))


METHODS = {
    "mlp": (fit_mlp, call_mlp),
    "variance-network": (fit_variance_network, call_mlp),
    "deep-ensemble": (fit_deep_ensemble, call_mlp),
    "dropout": (fit_dropout, call_mlp),
    "concrete-dropout": (partial(fit_dropout, rate="concrete"), call_mlp),
    "evidential": (fit_evidential, call_mlp),
    "gaussian-process": (fit_gaussian_process, call_mlp),
    "nngp": (partial(fit_gaussian_process, kernel="nngp"), call_mlp),
    "neural-process": (fit_neural_process, call_mlp),
    "rio": (fit_rio, call_rio),
    "rio-nearest": (partial(fit_rio, bound="nearest", ard=False), call_rio),
    "rio-collapsed": (partial(fit_rio, bound="collapsed", num_inducing=10), call_rio),
    "accrue": (fit_accrue, call_rio),
    "crude": (partial(fit_on_std, crude.fit), call_on_std),
    "crude-neighbors": (partial(fit_on_std, crude.fit, neighbors=15), call_on_std),
    "conformal": (partial(fit_on_std, conformal.fit), call_on_std),
    "conformal-quantile": (lambda x, mean, y: conformal.fit(x, Point(mean), y, score="quantile"), call_rio),
    "conformal-randomized": (partial(fit_on_std, conformal.fit, rule="randomized", key=KEY), call_on_std),
    "conformal-linear": (lambda x, mean, y: conformal.fit(x, Point(mean), y, rule="linear"), call_rio),
    "gaussian-mle": (fit_gaussian_mle, call_rio),
    "isotonic": (fit_isotonic, call_rio),
    "neural-quantiles": (fit_neural_quantiles, call_neural_quantiles),
    "sharp-gp": (fit_sharp_gp, call_rio),
    "sharp-gp-paper": (partial(fit_sharp_gp, preset="paper"), call_rio),
}
# A network after 20 epochs is a chaotic function of rounding, an optimum is not.
TOLERANCE = {
    "mlp": 1e-6 if X64 else 1e-2,
    "variance-network": 1e-6 if X64 else 1e-2,
    "deep-ensemble": 1e-6 if X64 else 1e-2,
    "dropout": 1e-6 if X64 else 1e-2,
    "concrete-dropout": 1e-6 if X64 else 1e-2,
    "evidential": 1e-6 if X64 else 1e-2,
    "neural-quantiles": 1e-6 if X64 else 1e-2,
    "gaussian-process": 1e-4 if X64 else 2e-2,
    "nngp": 1e-4 if X64 else 2e-2,
    "neural-process": 1e-6 if X64 else 1e-2,
    "rio": 1e-4 if X64 else 2e-2,
    "rio-nearest": 1e-3 if X64 else 5e-2,
    "rio-collapsed": 1e-4 if X64 else 2e-2,
    "accrue": 1e-4 if X64 else 2e-2,
    **dict.fromkeys(["crude", "crude-neighbors", "conformal", "conformal-quantile"], 1e-12 if X64 else 1e-5),
    **dict.fromkeys(["conformal-randomized", "conformal-linear"], 1e-12 if X64 else 1e-5),
    "gaussian-mle": 1e-12 if X64 else 1e-5,
    "isotonic": 1e-12 if X64 else 1e-5,
    "sharp-gp": 1e-8 if X64 else 2e-2,
    "sharp-gp-paper": 1e-4 if X64 else 2e-2,
}


# Slower forms of the method before them, and networks whose own tests say most of this.
SLOW = {
    "nngp",
    "neural-process",
    "rio-nearest",
    "rio-collapsed",
    "sharp-gp-paper",
    "crude-neighbors",
    "conformal-randomized",
    "conformal-linear",
    "concrete-dropout",
    "neural-quantiles",
    "deep-ensemble",
}
# Those that nothing random, and no rank that counts from one side, decides.
SIGNLESS = ("gaussian-process", "nngp", "rio", "rio-nearest", "rio-collapsed", "accrue", "conformal", "gaussian-mle")


def params_of(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.fixture(scope="module", params=params_of(METHODS))
def method(request):
    fit, call = METHODS[request.param]
    return fit, call, fit(X, MEAN, Y), TOLERANCE[request.param]


def test_predicts_a_distribution(method):
    _, call, module, _ = method
    distribution = call(module, X[:7], MEAN[:7])
    assert isinstance(distribution, Distribution)
    assert distribution.mean.shape == distribution.std.shape == (7,)
    assert np.isfinite(distribution.mean).all()
    assert np.isfinite(distribution.std).all()
    assert np.sqrt(np.mean((call(module, X, MEAN).mean - Y) ** 2)) < Y.std()


@once
def test_rows_are_predicted_independently(method):
    _, call, module, _ = method
    whole, part = call(module, X, MEAN), call(module, X[5:8], MEAN[5:8])
    np.testing.assert_allclose(part.mean, whole.mean[5:8], atol=1e-8 if X64 else 1e-4)


@once
def test_jit_of_the_fit_and_the_prediction_and_no_gradient_through_the_fit(method):
    fit, call, module, tolerance = method

    @eqx.filter_jit
    def mean_and_slope(y):
        mean, pull = jax.vjp(lambda y: call(fit(X, MEAN, y), X, MEAN).mean, y)
        return mean, pull(jnp.ones_like(mean))[0]

    mean, slope = mean_and_slope(jnp.asarray(Y))
    np.testing.assert_allclose(mean, call(module, X, MEAN).mean, atol=tolerance)
    assert not slope.any()


@once
def test_vmap_over_runs(method):
    fit, call, module, tolerance = method
    runs = [jnp.stack([a, a]) for a in (X, MEAN, Y)]
    modules = eqx.filter_vmap(fit)(*runs)
    means = eqx.filter_vmap(lambda *run: call(*run).mean)(modules, *runs[:2])
    assert means.shape == (2, 40)
    np.testing.assert_allclose(means[1], call(module, X, MEAN).mean, atol=tolerance)


def test_gradients_of_the_prediction_are_finite(method):
    _, call, module, _ = method
    total = lambda x, mean: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(call(module, x, mean)))
    for slope in jax.grad(total, (0, 1))(jnp.asarray(X), jnp.asarray(MEAN)):
        assert np.isfinite(slope).all()


@once
def test_save_and_load(method, tmp_path):
    fit, call, module, _ = method
    eqx.tree_serialise_leaves(tmp_path / "module.eqx", module)
    like = eqx.filter_eval_shape(fit, X, MEAN, Y)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "module.eqx", like)
    np.testing.assert_array_equal(call(loaded, X, MEAN).mean, call(module, X, MEAN).mean)


@contextlib.contextmanager
def compilations():
    """Counts what is compiled meanwhile."""
    compiled = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@once
def test_a_second_fit_compiles_nothing(method):
    fit, call, _, _ = method
    call(fit(X, MEAN, Y), X, MEAN)
    with compilations() as compiled:
        call(fit(X[::-1].copy(), MEAN + 1, 2 * Y), X, MEAN)
    assert not compiled


# Of the last two factors the squares leave the range of the numbers.
@pytest.mark.parametrize(
    ("factor", "shift"), [(2.0, -3.0), *(((1e-160, 0.0), (1e160, 0.0)) if X64 else ((1e-25, 0.0), (1e25, 0.0)))]
)
def test_equivariance(method, factor, shift):
    fit, call, module, tolerance = method
    before = call(module, X, MEAN)
    moved = factor * MEAN + shift
    after = call(fit(X, moved, factor * Y + shift), X, moved)
    np.testing.assert_allclose((after.mean - shift) / factor, before.mean, atol=tolerance)
    np.testing.assert_allclose(after.std / factor, before.std, atol=tolerance)


@pytest.mark.parametrize("method", params_of(SIGNLESS), indirect=True)
def test_a_target_turned_around_turns_the_prediction(method):
    fit, call, module, tolerance = method
    before, moved = call(module, X, MEAN), 5 - 3 * MEAN
    after = call(fit(X, moved, 5 - 3 * Y), X, moved)
    np.testing.assert_allclose((after.mean - 5) / -3, before.mean, atol=tolerance)
    np.testing.assert_allclose(after.std / 3, before.std, atol=tolerance)


@once
def test_the_dtype_of_the_input_is_kept(method):
    """Known from the traces alone."""
    fit, call, _, _ = method
    single = [np.asarray(a, np.float32) for a in (X, MEAN, Y)]
    distribution = eqx.filter_eval_shape(lambda x, mean, y: call(fit(x, mean, y), x, mean), *single)
    mean, std = eqx.filter_eval_shape(lambda distribution: (distribution.mean, distribution.std), distribution)
    assert mean.dtype == std.dtype == jnp.float32
