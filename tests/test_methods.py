"""One battery over every method: what a user of JAX may do with it."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pytest
from compiled import compilations
from differences import check_gradients

from jaxcal import Distribution, Normal, Point, cross_conformal, load, mlp, rio, save
from jaxcal.calibrators import (
    accrue,
    conditional_conformal,
    conformal,
    crude,
    gaussian_mle,
    isotonic,
    kmeans,
    neural_quantiles,
    sharp_gp,
)
from jaxcal.optimize import Result
from jaxcal.predictors import (
    deep_ensemble,
    dropout,
    evidential,
    forests,
    gaussian_process,
    neural_process,
    quantile_boosting,
    usnrt,
    variance_network,
)

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


def fit_mlp(x, mean, y, **options):
    return mlp.fit(x, y, key=KEY, max_epochs=20, **options)


def fit_variance_network(x, mean, y, **options):
    options = {"learning_rate": 0.01, **options}
    return variance_network.fit(x, y, key=KEY, hidden=(8,), max_epochs=20, **options)


def fit_deep_ensemble(x, mean, y, **options):
    options = {"learning_rate": 0.01, **options}
    return deep_ensemble.fit(x, y, key=KEY, num_members=2, hidden=(8,), max_epochs=20, **options)


def fit_dropout(x, mean, y, **options):
    options = {"learning_rate": 0.01, **options}
    return dropout.fit(x, y, key=KEY, hidden=(8,), max_epochs=20, num_samples=10, **options)


def fit_evidential(x, mean, y, **options):
    options = {"learning_rate": 0.01, **options}
    return evidential.fit(x, y, key=KEY, hidden=(8,), max_epochs=20, **options)


def fit_gaussian_process(x, mean, y, **options):
    return gaussian_process.fit(x, y, **options)


def fit_usnrt(x, mean, y, **options):
    """With a split: of 40 rows 15 in each leaf at least."""
    return usnrt.fit(x, y, key=KEY, **{"min_leaf": 15, "significance": 0.9, "max_epochs": 20, **options})


def fit_forest(x, mean, y, **options):
    return forests.fit(x, y, key=KEY, **{"num_trees": 20, **options})


def fit_quantile_boosting(x, mean, y, **options):
    options = {"levels": (0.1, 0.5, 0.9), "max_iter": 20, "min_samples_leaf": 3, **options}
    return quantile_boosting.fit(x, y, key=KEY, **options)


def fit_neural_process(x, mean, y, **options):
    options = {"width": 8, "max_context": 10, "learning_rate": 0.01, "max_iterations": 100, **options}
    return neural_process.fit(x, y, key=KEY, **options)


def fit_rio(x, mean, y, **options):
    return rio.fit(x, Point(mean), y, **options)


def fit_accrue(x, mean, y):
    return accrue.fit(x, Point(mean), y, key=KEY, restarts=2)


def fit_gaussian_mle(x, mean, y):
    return gaussian_mle.fit(x, Point(mean), y)


def fit_gaussian_mle_weighted(x, mean, y):
    return gaussian_mle.fit(x, Point(mean), y, weights=lambda x: 1 + jnp.abs(x[:, 0]))


def fit_kmeans(x, mean, y):
    return kmeans.fit(x, Point(mean), y, key=KEY)


def fit_isotonic(x, mean, y):
    return isotonic.fit(x, Point(mean), y)


def fit_neural_quantiles(x, mean, y, **options):
    # What the network learns first are the base's own widths: they must be in the unit of y, as `unit` is.
    base = base_in_units(x, mean, jnp.nanmean(jnp.abs(y - mean[: len(y)])))
    return neural_quantiles.fit(None, base, y, key=KEY, max_epochs=20, pretraining_epochs=20, **options)


def call_neural_quantiles(module, x, mean):
    return module(None, base_in_units(x, mean, module.unit))


def base_in_units(x, mean, unit):
    return Normal(mean, unit * (1 + jnp.asarray(x)[:, 0] ** 2))


def fit_sharp_gp(x, mean, y, **options):
    """Of two calibration rows after each training row."""
    rest = lambda rows: rows[np.arange(len(rows)) % 3 > 0]
    options = {"x_train": x[::3], "y_train": y[::3], "kernel": sharp_gp.Kernel(1.0, 0.1), **options}
    return sharp_gp.fit(rest(x), Point(rest(mean)), rest(y), **options)


def fit_conditional_conformal(x, mean, y, **options):
    return fit_on_std(conditional_conformal.fit, x, mean, y, **options)


class Plane(eqx.Module):
    """Least squares, as a module of arrays."""

    center: jax.Array
    weights: jax.Array

    def __call__(self, x):
        return self.center + x @ self.weights


@jax.jit
def fit_plane(x, y, *, key):
    center = y.mean()
    return Plane(center, jnp.linalg.solve(x.T @ x, x.T @ (y - center)))


def fit_cross_conformal(x, mean, y, **options):
    return cross_conformal.fit(fit_plane, x, y, key=KEY, folds=5, **options)


def fit_cross_conformal_bootstrap(x, mean, y, **options):
    return cross_conformal.fit_bootstrap(fit_plane, x, y, key=KEY, num_models=20, **options)


def weigh(x):
    return 1 + x[:, 0] ** 2


def is_right(x):
    return x[:, 0] > 0


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
    "usnrt": (fit_usnrt, call_mlp),
    "random-forest": (fit_forest, call_mlp),
    "ngboost": (partial(fit_forest, model="ngboost"), call_mlp),
    "quantile-boosting": (fit_quantile_boosting, call_mlp),
    "cross-conformal": (fit_cross_conformal, call_mlp),
    "cross-conformal-bootstrap": (fit_cross_conformal_bootstrap, call_mlp),
    "rio": (fit_rio, call_rio),
    "rio-nearest": (partial(fit_rio, bound="nearest", ard=False), call_rio),
    "rio-collapsed": (partial(fit_rio, bound="collapsed", num_inducing=10), call_rio),
    "accrue": (fit_accrue, call_rio),
    "accrue-relative": (partial(fit_on_std, accrue.fit, relative=True, key=KEY, restarts=2), call_on_std),
    "crude": (partial(fit_on_std, crude.fit), call_on_std),
    "crude-neighbors": (partial(fit_on_std, crude.fit, neighbors=15), call_on_std),
    "crude-weights": (partial(fit_on_std, crude.fit, weights=weigh), call_on_std),
    "isotonic-groups": (partial(fit_on_std, isotonic.fit, by=is_right), call_on_std),
    "crude-pooled": (
        partial(fit_on_std, crude.fit, by=is_right, partial_pooling=True),
        call_on_std,
    ),
    "conformal": (partial(fit_on_std, conformal.fit), call_on_std),
    "conditional-conformal": (fit_conditional_conformal, call_on_std),
    "conformal-quantile": (lambda x, mean, y: conformal.fit(x, Point(mean), y, score="quantile"), call_rio),
    "conformal-randomized": (partial(fit_on_std, conformal.fit, rule="randomized", key=KEY), call_on_std),
    "conformal-linear": (lambda x, mean, y: conformal.fit(x, Point(mean), y, rule="linear"), call_rio),
    "gaussian-mle": (fit_gaussian_mle, call_rio),
    "gaussian-mle-weighted": (fit_gaussian_mle_weighted, call_rio),
    "isotonic": (fit_isotonic, call_rio),
    "kmeans": (fit_kmeans, call_rio),
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
    "usnrt": 1e-6 if X64 else 1e-2,
    # scikit-learn's trees split and sum in float32.
    **dict.fromkeys(["random-forest", "ngboost", "quantile-boosting"], 1e-5),
    "rio": 1e-4 if X64 else 2e-2,
    "rio-nearest": 1e-3 if X64 else 5e-2,
    "rio-collapsed": 1e-4 if X64 else 2e-2,
    **dict.fromkeys(["accrue", "accrue-relative"], 1e-4 if X64 else 2e-2),
    **dict.fromkeys(["crude", "crude-neighbors", "conformal", "conformal-quantile"], 1e-12 if X64 else 1e-5),
    **dict.fromkeys(["conformal-randomized", "conformal-linear"], 1e-12 if X64 else 1e-5),
    **dict.fromkeys(["crude-weights", "crude-pooled", "isotonic-groups"], 1e-12 if X64 else 1e-5),
    "conditional-conformal": 1e-10 if X64 else 1e-4,
    **dict.fromkeys(["cross-conformal", "cross-conformal-bootstrap"], 1e-12 if X64 else 1e-5),
    **dict.fromkeys(["gaussian-mle", "gaussian-mle-weighted"], 1e-12 if X64 else 1e-5),
    "isotonic": 1e-12 if X64 else 1e-5,
    "kmeans": 1e-12 if X64 else 1e-5,
    "sharp-gp": 1e-8 if X64 else 2e-2,
    "sharp-gp-paper": 1e-4 if X64 else 2e-2,
}


FORESTS = "random-forest", "ngboost", "quantile-boosting"
# What a method does not do by design, and says so: its fit or its predictions depend on values that a trace lacks.
NEEDS_VALUES = {
    "usnrt": {"fit": "a tree grows by the values of x and y"},
    "kmeans": {"fit": "scikit-learn needs NumPy arrays"},
    "conditional-conformal": {"fit": "a regression runs by its values"},
    **dict.fromkeys(FORESTS, dict.fromkeys(["fit", "predict"], "neither fit nor prediction runs")),
    "isotonic-groups": {"vmap": "by is traced, but its values must be known"},
    "crude-pooled": {"vmap": "by is traced, but its values must be known"},
}
# What the user gave them, a file of `save` cannot hold.
OF_THE_USER = {
    **dict.fromkeys(
        ["cross-conformal", "cross-conformal-bootstrap"], "models.model is an object of test_methods.Plane"
    ),
    **dict.fromkeys(
        ["isotonic-groups", "crude-pooled"], "rows.groups.by.function is the function test_methods.is_right"
    ),
    "crude-weights": "rows.weights is the function test_methods.weigh",
}
# Trees grow to sizes that depend on the values: only a fit to the same ones compiles nothing.
SHAPES_BY_VALUES = {"usnrt"}
# Tables and closed forms, through whose fits derivatives pass. Those of optima are tested with `differentiable=True` in
# test_derivatives.py; the others say that they have none.
DIFFERENTIABLE = {
    *("crude", "crude-neighbors", "crude-weights", "crude-pooled", "conformal", "conformal-quantile"),
    *("conformal-randomized", "conformal-linear", "isotonic", "isotonic-groups"),
    *("gaussian-mle", "gaussian-mle-weighted", "cross-conformal", "cross-conformal-bootstrap"),
}
NO_DERIVATIVE = "no derivative passes through"
# What these predict depends on the inputs through the base alone, or by a function that takes any.
BY_BASE_ALONE = {
    *("crude", "conformal", "conformal-quantile", "conformal-randomized", "conformal-linear"),
    *("gaussian-mle", "gaussian-mle-weighted", "isotonic", "neural-quantiles"),
    *("crude-weights", "crude-pooled", "isotonic-groups"),
}
# A constant target, or a constant error of the base: who predicts it exactly, and who has nothing to learn from.
NETWORKS = ("mlp", "variance-network", "deep-ensemble", "dropout", "concrete-dropout", "evidential", "neural-process")
EXACT = {
    "target": {*NETWORKS, "usnrt", "cross-conformal", "cross-conformal-bootstrap"},
    "error": {"gaussian-mle", "gaussian-mle-weighted", "isotonic", "conformal-linear"},
}
REFUSED = {
    "target": {"gaussian-process", "nngp", "accrue", "accrue-relative", "sharp-gp", "sharp-gp-paper", *FORESTS},
    "error": {"rio", "rio-nearest", "rio-collapsed"},
}
# What makes a training diverge. The fits of Gaussian processes end without a covariance in tests of their own
# (test_gaussian_process, test_rio); the rest is in closed form.
TOO_LARGE = float(jnp.finfo(jnp.zeros(0).dtype).max) / 10
DIVERGING = {name: {"learning_rate": TOO_LARGE} for name in (*NETWORKS, "usnrt", "neural-quantiles")}
# Slower forms of the method before them, and networks whose own tests say most of this.
SLOW = {
    "cross-conformal-bootstrap",
    "nngp",
    "neural-process",
    "rio-nearest",
    "rio-collapsed",
    "sharp-gp-paper",
    "crude-neighbors",
    "crude-weights",
    "crude-pooled",
    "accrue-relative",
    "gaussian-mle-weighted",
    "conditional-conformal",
    "conformal-randomized",
    "conformal-linear",
    "concrete-dropout",
    "neural-quantiles",
    "deep-ensemble",
}
# Those that nothing random, and no rank that counts from one side, decides.
SIGNLESS = (
    "cross-conformal",
    "gaussian-process",
    "nngp",
    "rio",
    "rio-nearest",
    "rio-collapsed",
    "accrue",
    "conformal",
    "conditional-conformal",
    "gaussian-mle",
)


def params_of(names):
    """Trees compute in a precision of their own: once is enough."""
    marks = dict.fromkeys(FORESTS, once) | dict.fromkeys(SLOW, pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


class Method(NamedTuple):
    """A method, and what it has fitted to the rows above."""

    name: str
    fit: Callable
    call: Callable
    module: Any

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.name]

    def mean(self, x=X, mean=MEAN, module=None):
        """What it predicts."""
        return self.call(self.module if module is None else module, x, mean).mean

    def traces(self, *parts: str):
        """A context for a trace of the fit or the prediction: where that is not possible, the error says why."""
        reasons = [reason for part, reason in NEEDS_VALUES.get(self.name, {}).items() if part in parts]
        return pytest.raises(TypeError, match=reasons[0]) if reasons else contextlib.nullcontext()


@pytest.fixture(scope="module", params=params_of(METHODS))
def method(request):
    fit, call = METHODS[request.param]
    return Method(request.param, fit, call, fit(X, MEAN, Y))


def test_predicts_a_distribution(method):
    distribution = method.call(method.module, X[:7], MEAN[:7])
    assert isinstance(distribution, Distribution)
    assert distribution.mean.shape == distribution.std.shape == (7,)
    assert np.isfinite(distribution.mean).all()
    assert np.isfinite(distribution.std).all()
    assert np.sqrt(np.mean((method.mean() - Y) ** 2)) < Y.std()


@once
def test_rows_are_predicted_independently(method):
    np.testing.assert_allclose(method.mean(X[5:8], MEAN[5:8]), method.mean()[5:8], atol=1e-8)


@once
def test_jit_of_the_fit_and_the_prediction(method):
    with method.traces("fit"):
        mean = jax.jit(lambda y: method.call(method.fit(X, MEAN, y), X, MEAN).mean)(jnp.asarray(Y))
        np.testing.assert_allclose(mean, method.mean(), atol=method.tolerance)


def reading(method, x, mean, y):
    """Means, stds and quantiles of what is predicted at a few rows, as one number."""
    distribution = method.call(method.fit(x, mean, y), X[:5], MEAN[:5])
    parts = distribution.mean, distribution.std, distribution.icdf(jnp.array([0.1, 0.4, 0.9]))
    return sum(jnp.sum(jnp.cos(jnp.arange(1.0, 1 + part.size)).reshape(part.shape) * part) for part in parts)


@once
@pytest.mark.parametrize("method", params_of(sorted(DIFFERENTIABLE)), indirect=True)
def test_derivatives_through_the_fit_are_those_of_differences(method):
    # Functions of x that give groups need a known x.
    fixed = [X] if "vmap" in NEEDS_VALUES.get(method.name, {}) else []
    rows = [jnp.asarray(rows) for rows in (X, MEAN, Y)][len(fixed) :]
    check_gradients(partial(reading, method, *fixed), rows, atol=1e-7)


@once
@pytest.mark.parametrize("method", params_of(sorted(set(METHODS) - DIFFERENTIABLE)), indirect=True)
def test_a_fit_without_a_derivative_says_so(method):
    reason = NEEDS_VALUES.get(method.name, {}).get("fit", NO_DERIVATIVE)
    with pytest.raises(TypeError, match=reason):
        jax.make_jaxpr(jax.grad(lambda y: reading(method, X, MEAN, y)))(jnp.asarray(Y))


@once
def test_vmap_over_runs_keeps_the_dtype(method):
    """Known from the traces alone."""
    runs = [np.stack([a, a]).astype(np.float32) for a in (X, MEAN, Y)]
    predict = lambda x, mean, y: method.call(method.fit(x, mean, y), x, mean)
    with method.traces("fit", "vmap"):
        distribution = eqx.filter_eval_shape(eqx.filter_vmap(predict), *runs)
        moments = lambda distribution: (distribution.mean, distribution.std)
        for moment in eqx.filter_eval_shape(eqx.filter_vmap(moments), distribution):
            assert moment.shape == (2, 40)
            assert moment.dtype == jnp.float32


# USNRT's fit in another precision is compiled anew.
@once
@pytest.mark.parametrize("method", [pytest.param("usnrt", marks=pytest.mark.slow), *FORESTS, "kmeans"], indirect=True)
def test_a_method_that_needs_values_keeps_the_dtype(method):
    x, mean, y = (a.astype(np.float32) for a in (X, MEAN, Y))
    distribution = method.call(method.fit(x, mean, y), x, mean)
    assert distribution.mean.dtype == distribution.std.dtype == jnp.float32


@once
@pytest.mark.slow
def test_vmap_over_runs_predicts_what_a_loop_does(method):
    other = X[::-1], MEAN[::-1] + 1, 2 * Y[::-1]
    runs = [jnp.stack(pair) for pair in zip((X, MEAN, Y), other, strict=True)]
    with method.traces("fit", "vmap"):
        modules = eqx.filter_vmap(method.fit)(*runs)
        means = eqx.filter_vmap(lambda *run: method.call(*run).mean)(modules, *runs[:2])
        np.testing.assert_allclose(means[0], method.mean(), atol=method.tolerance)
        alone = method.mean(*other[:2], module=method.fit(*other))
        np.testing.assert_allclose(means[1], alone, atol=2 * method.tolerance)


def test_gradients_of_the_prediction_are_finite(method):
    total = lambda x, mean: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(method.call(method.module, x, mean)))
    with method.traces("predict"):
        for gradient in jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(X), jnp.asarray(MEAN)):
            assert np.isfinite(gradient).all()


def through_joblib(module):
    file = io.BytesIO()
    joblib.dump(module, file)
    file.seek(0)
    return joblib.load(file)


def through_a_file(module, folder):
    save(folder / "module.safetensors", module)
    return load(folder / "module.safetensors")


PICKLES = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "joblib": through_joblib,
    "cloudpickle": lambda module: cloudpickle.loads(cloudpickle.dumps(module)),
    "deepcopy": copy.deepcopy,
}


@once
def test_saved_and_loaded_it_predicts_the_same_and_compiles_nothing(method, tmp_path):
    before = jax.tree.leaves(method.call(method.module, X, MEAN))
    ways = dict(PICKLES)
    if method.name in OF_THE_USER:
        with pytest.raises(TypeError, match=OF_THE_USER[method.name]):
            save(tmp_path / "module.safetensors", method.module)
        assert not list(tmp_path.iterdir())
    else:
        ways["save"] = partial(through_a_file, folder=tmp_path)
    for way, through in ways.items():
        loaded = through(method.module)
        with compilations() as compiled:
            after = jax.tree.leaves(method.call(loaded, X, MEAN))
        for old, new in zip(before, after, strict=True):
            assert old.dtype == new.dtype
            np.testing.assert_array_equal(old, new, err_msg=way)
        assert not compiled or (method.name == "nngp" and way != "save"), way


@once
def test_a_second_fit_compiles_nothing(method):
    fit, call = method.fit, method.call
    call(fit(X, MEAN, Y), X, MEAN)
    moved = (X, MEAN, Y) if method.name in SHAPES_BY_VALUES else (X[::-1].copy(), MEAN + 1, 2 * Y)
    with compilations() as compiled:
        call(fit(*moved), X, MEAN)
    assert not compiled


# Of the last two factors the squares leave the range of the numbers.
@pytest.mark.parametrize(
    ("factor", "shift"), [(2.0, -3.0), *(((1e-160, 0.0), (1e160, 0.0)) if X64 else ((1e-25, 0.0), (1e25, 0.0)))]
)
def test_equivariance(method, factor, shift):
    before = method.call(method.module, X, MEAN)
    moved = factor * MEAN + shift
    after = method.call(method.fit(X, moved, factor * Y + shift), X, moved)
    np.testing.assert_allclose((after.mean - shift) / factor, before.mean, atol=method.tolerance)
    np.testing.assert_allclose(after.std / factor, before.std, atol=method.tolerance)


@pytest.mark.parametrize("method", params_of(SIGNLESS), indirect=True)
def test_a_target_turned_around_turns_the_prediction(method):
    before, moved = method.call(method.module, X, MEAN), 5 - 3 * MEAN
    after = method.call(method.fit(X, moved, 5 - 3 * Y), X, moved)
    np.testing.assert_allclose((after.mean - 5) / -3, before.mean, atol=method.tolerance)
    np.testing.assert_allclose(after.std / 3, before.std, atol=method.tolerance)


@once
@pytest.mark.filterwarnings("ignore:y equals the .* mean of base in every row")
@pytest.mark.parametrize("constant", ["target", "error"])
def test_what_does_not_vary_is_exact_or_refused(method, constant):
    y = np.full(40, 7.0) if constant == "target" else MEAN + 3
    if method.name in REFUSED[constant]:
        with pytest.raises(ValueError, match=r"constant \("):
            method.fit(X, MEAN, y)
        return
    # New rows, too, where the target does not vary.
    distribution = method.call(method.fit(X, MEAN, y), 3 * X if constant == "target" else X, MEAN)
    assert np.isfinite(distribution.mean).all()
    assert np.isfinite(distribution.std).all()
    if method.name in EXACT[constant]:
        np.testing.assert_allclose(distribution.mean, y, rtol=1e-12)
        np.testing.assert_allclose(distribution.std, 0, atol=1e-12)


@once
@pytest.mark.parametrize(
    "method",
    [*params_of((*NETWORKS, "neural-quantiles")), pytest.param("usnrt", marks=pytest.mark.slow)],
    indirect=True,
)
def test_divergence_is_raised_or_reported(method):
    with pytest.raises(FloatingPointError, match=r"NaN or infinite|diverged"):
        method.fit(X, MEAN, Y, **DIVERGING[method.name])
    module = method.fit(X, MEAN, Y, **DIVERGING[method.name], throw=False)
    assert (np.asarray(module.training.result) == Result.NOT_FINITE).any()


@once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, mean, y: (x, mean, np.where(np.arange(40) == 4, np.nan, y)), "y holds 1 values that are NaN"),
        (lambda x, mean, y: (x, mean, y[:39]), "rows where"),
        (lambda x, mean, y: (x[:0], mean[:0], y[:0]), "is empty"),
    ],
    ids=["nan", "length", "empty"],
)
def test_wrong_targets_are_quoted(method, change, message):
    with pytest.raises(ValueError, match=message):
        method.fit(*change(X, MEAN, Y))


@once
def test_wrong_inputs_of_a_prediction_are_quoted(method):
    """A method that knows the inputs by the base alone takes any."""
    refused = contextlib.nullcontext() if method.name in BY_BASE_ALONE else pytest.raises(ValueError, match="columns")
    with refused:
        method.call(method.module, X[:, :1], MEAN)
