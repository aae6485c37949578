"""Every method as one record: how it is fitted in the tests, and what is asked of it there.

A new method has one record here; test_complete.py finds those that are missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jaxcal import Normal, Point, cross_conformal
from jaxcal.calibrators import (
    accrue,
    conditional_conformal,
    conformal,
    crude,
    gaussian_mle,
    isotonic,
    kmeans,
    neural_quantiles,
    rio,
    sharp_gp,
)
from jaxcal.gp import Nearest, Sparse
from jaxcal.predictors import (
    deep_ensemble,
    dropout,
    evidential,
    forests,
    gaussian_process,
    mlp,
    neural_process,
    quantile_boosting,
    usnrt,
    variance_network,
)

X64 = jax.config.jax_enable_x64
RNG = np.random.default_rng(3)
X = RNG.uniform(-2, 2, size=(40, 2))
MEAN = np.sin(X[:, 0])
Y = MEAN + 0.3 * X[:, 1] + 0.1 * RNG.normal(size=40)
KEY = jax.random.key(0)

# How far apart two predictions may lie that would be the same without rounding. An optimum is as exact as its search
# was; a network after 20 epochs is a chaotic function of rounding; the trees of scikit-learn split and sum in float32.
ROUNDING = 1e-12 if X64 else 1e-5
OPTIMUM = 1e-4 if X64 else 2e-2
TRAINING = 1e-6 if X64 else 1e-2
TREES = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A method, and what the tests need to know about it.

    Attributes:
        name: of the form that is fitted.
        method: the module that has the fit.
        fit: of x, the means of a model, and y; options replace those of the case.
        call: of what was fitted, x and the means.
        tolerance: of predictions that differ by rounding.
        needs_values: what depends on values that a trace lacks, by design, and how the error says so: its "fit", its
            "predict", or the "vmap" of either.
        shapes_by_values: a fit to other values has other shapes, and compiles.
        differentiable: derivatives pass through its fit. Those of optima are tested with `differentiable=True` in
            test_derivatives.py; the others say that they have none.
        of_the_user: what the user gave it, which a file of `save` cannot hold, as the message says it.
        compiles_unpickled: what pickle loads is compiled anew.
        by_base_alone: its predictions depend on the inputs through the base alone, or by a function that takes any.
        signless: nothing random, and no rank that counts from one side, decides.
        exact: what it predicts exactly where that does not vary, the "target" or the "error" of the base.
        refused: what it cannot learn from where that does not vary, likewise.
        diverging: options that make its training diverge. Those of Gaussian processes end without a covariance in tests
            of their own (test_gaussian_process.py, test_rio.py).
        is_network: rounding decides how its training goes on: on another processor it is another network.
        own_precision: it computes in one precision, whatever JAX's is, and is tested once.
        slow: a slower form of another case, or a network whose own tests say most of this.
        slow_anew: its fit takes long to compile for other dtypes or options.
        quick_to_trace: it is lowered for accelerators in every run of the tests.
    """

    name: str
    method: ModuleType
    fit: Callable
    call: Callable
    tolerance: float = ROUNDING
    needs_values: Mapping[str, str] = field(default_factory=dict)
    shapes_by_values: bool = False
    differentiable: bool = False
    of_the_user: str | None = None
    compiles_unpickled: bool = False
    by_base_alone: bool = False
    signless: bool = False
    exact: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    diverging: Mapping[str, Any] = field(default_factory=dict)
    is_network: bool = False
    own_precision: bool = False
    slow: bool = False
    slow_anew: bool = False
    quick_to_trace: bool = False


def predictor(name: str, method: ModuleType, options: Mapping[str, Any], **about: Any) -> Case:
    """The case of a predictor."""
    return Case(name=name, method=method, fit=partial(fit_rows, method.fit, **options), call=call_rows, **about)


def of_points(name: str, method: ModuleType, options: Mapping[str, Any], **about: Any) -> Case:
    """The case of a calibrator of means."""
    return Case(name=name, method=method, fit=partial(fit_points, method.fit, **options), call=call_points, **about)


def of_stds(name: str, method: ModuleType, options: Mapping[str, Any], **about: Any) -> Case:
    """The case of a calibrator of means and stds."""
    return Case(name=name, method=method, fit=partial(fit_stds, method.fit, **options), call=call_stds, **about)


def fit_rows(fit, x, mean, y, **options):
    return fit(x, y, **options)


def call_rows(module, x, mean):
    return module(x)


def fit_points(fit, x, mean, y, **options):
    return fit(x, Point(mean), y, **options)


def call_points(module, x, mean):
    return module(x, Point(mean))


def fit_stds(fit, x, mean, y, **options):
    return fit(x, base_with_std(x, mean), y, **options)


def call_stds(module, x, mean):
    return module(x, base_with_std(x, mean))


def base_with_std(x, mean):
    return Normal(mean, 1 + jnp.asarray(x)[:, 0] ** 2)


def weigh(x):
    return 1 + x[:, 0] ** 2


def is_right(x):
    return x[:, 0] > 0


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
    options = {"x_train": x[::3], "y_train": y[::3], "kernel": sharp_gp.KernelAndNoise(1.0, 0.1), **options}
    return sharp_gp.fit(rest(x), Point(rest(mean)), rest(y), **options)


DIVERGING = {"learning_rate": float(jnp.finfo(jnp.zeros(0).dtype).max) / 10}
NETWORK: dict[str, Any] = {"tolerance": TRAINING, "exact": ("target",), "diverging": DIVERGING, "is_network": True}
SMALL = {"key": KEY, "hidden": (8,), "max_epochs": 20, "learning_rate": 0.01}
PROCESS: dict[str, Any] = {"tolerance": OPTIMUM, "refused": ("target",)}
FOREST: dict[str, Any] = {
    "tolerance": TREES,
    "needs_values": dict.fromkeys(["fit", "predict"], "neither fit nor prediction runs"),
    "refused": ("target",),
    "own_precision": True,
}
RIO: dict[str, Any] = {"tolerance": OPTIMUM, "signless": True, "refused": ("error",)}
TABLE: dict[str, Any] = {"differentiable": True, "by_base_alone": True}
GROUPED: dict[str, Any] = {
    **TABLE,
    "needs_values": {"vmap": "by is traced, but its values must be known"},
    "of_the_user": "rows.groups.by.function is the function cases.is_right",
}
CROSS_CONFORMAL: dict[str, Any] = {
    "method": cross_conformal,
    "call": call_rows,
    "differentiable": True,
    "of_the_user": "models.model is an object of cases.Plane",
    "exact": ("target",),
}

CASES = (
    predictor("mlp", mlp, {"key": KEY, "max_epochs": 20}, **NETWORK, quick_to_trace=True),
    predictor("variance-network", variance_network, SMALL, **NETWORK),
    predictor("deep-ensemble", deep_ensemble, {**SMALL, "num_members": 2}, **NETWORK, slow=True, quick_to_trace=True),
    predictor("dropout", dropout, {**SMALL, "num_samples": 10}, **NETWORK),
    predictor("concrete-dropout", dropout, {**SMALL, "num_samples": 10, "rate": "concrete"}, **NETWORK, slow=True),
    predictor("evidential", evidential, SMALL, **NETWORK),
    predictor("gaussian-process", gaussian_process, {}, **PROCESS, signless=True),
    predictor(
        "nngp", gaussian_process, {"kernel": "nngp"}, **PROCESS, signless=True, compiles_unpickled=True, slow=True
    ),
    predictor(
        "neural-process",
        neural_process,
        {"key": KEY, "width": 8, "max_context": 10, "learning_rate": 0.01, "max_iterations": 100},
        **NETWORK,
        slow=True,
    ),
    predictor(
        "usnrt",
        usnrt,
        # With a split: of 40 rows 15 in each leaf at least.
        {"key": KEY, "min_leaf": 15, "splits": usnrt.Splits(significance=0.9), "max_epochs": 20},
        **NETWORK,
        needs_values={"fit": "a tree grows by the values of x and y"},
        shapes_by_values=True,
        slow_anew=True,
    ),
    predictor("random-forest", forests, {"key": KEY, "num_trees": 20}, **FOREST),
    predictor("ngboost", forests, {"key": KEY, "num_trees": 20, "model": "ngboost"}, **FOREST),
    predictor(
        "quantile-boosting",
        quantile_boosting,
        {"key": KEY, "levels": (0.1, 0.5, 0.9), "max_iter": 20, "min_samples_leaf": 3},
        **FOREST,
    ),
    Case(name="cross-conformal", fit=fit_cross_conformal, **CROSS_CONFORMAL, signless=True),
    Case(name="cross-conformal-bootstrap", fit=fit_cross_conformal_bootstrap, **CROSS_CONFORMAL, slow=True),
    of_points("rio", rio, {}, **RIO, quick_to_trace=True),
    of_points(
        "rio-nearest",
        rio,
        {"inference": Nearest(ard=False)},
        **RIO | {"tolerance": 1e-3 if X64 else 5e-2},
        slow=True,
    ),
    of_points("rio-collapsed", rio, {"inference": Sparse(num_inducing=10)}, **RIO, slow=True),
    of_points("accrue", accrue, {"key": KEY, "restarts": 2}, **PROCESS, is_network=True, signless=True),
    of_stds(
        "accrue-relative",
        accrue,
        {"key": KEY, "restarts": 2, "relative": True},
        **PROCESS,
        is_network=True,
        slow=True,
    ),
    of_stds("crude", crude, {}, **TABLE, quick_to_trace=True),
    of_stds("crude-neighbors", crude, {"neighbors": 15}, differentiable=True, slow=True),
    of_stds(
        "crude-weights",
        crude,
        {"weights": weigh},
        **TABLE,
        of_the_user="rows.weights is the function cases.weigh",
        slow=True,
    ),
    of_stds("isotonic-groups", isotonic, {"by": is_right}, **GROUPED),
    of_stds("crude-pooled", crude, {"by": is_right, "partial_pooling": True}, **GROUPED, slow=True),
    of_stds("conformal", conformal, {}, **TABLE, signless=True, quick_to_trace=True),
    of_stds(
        "conditional-conformal",
        conditional_conformal,
        {},
        tolerance=1e-10 if X64 else 1e-4,
        needs_values={"fit": "a regression runs by its values"},
        signless=True,
        slow=True,
    ),
    of_points("conformal-quantile", conformal, {"score": "quantile"}, **TABLE),
    of_stds("conformal-randomized", conformal, {"rule": "randomized", "key": KEY}, **TABLE, slow=True),
    of_points("conformal-linear", conformal, {"rule": "linear"}, **TABLE, exact=("error",), slow=True),
    of_points("gaussian-mle", gaussian_mle, {}, **TABLE, exact=("error",), signless=True, quick_to_trace=True),
    of_points(
        "gaussian-mle-weighted",
        gaussian_mle,
        {"weights": lambda x: 1 + jnp.abs(x[:, 0])},
        **TABLE,
        exact=("error",),
        slow=True,
    ),
    of_points("isotonic", isotonic, {}, **TABLE, exact=("error",)),
    of_points("kmeans", kmeans, {"key": KEY}, needs_values={"fit": "scikit-learn needs NumPy arrays"}),
    Case(
        name="neural-quantiles",
        method=neural_quantiles,
        fit=fit_neural_quantiles,
        call=call_neural_quantiles,
        **NETWORK | {"exact": ()},
        by_base_alone=True,
        slow=True,
    ),
    Case(
        name="sharp-gp",
        method=sharp_gp,
        fit=fit_sharp_gp,
        call=call_points,
        tolerance=1e-8 if X64 else 2e-2,
        refused=("target",),
    ),
    Case(
        name="sharp-gp-paper",
        method=sharp_gp,
        fit=partial(fit_sharp_gp, preset="paper"),
        call=call_points,
        **PROCESS,
        slow=True,
    ),
)
