"""One battery over every method: what a user of JAX may do with it."""

import contextlib
import copy
import io
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pytest
from cases import CASES, MEAN, X64, Case, X, Y
from compiled import compilations
from differences import check_gradients

from jaxcal import Distribution, load, save
from jaxcal.optimize import Result

# The rows lie about a plane: in 32 bits the std of rio-nearest is off by 3 %, which is within its tolerance.
pytestmark = pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater")
# What does not depend on the precision runs in 64 bits only.
once = pytest.mark.skipif(not X64, reason="does not depend on the precision")
SLOW = pytest.mark.slow
NO_DERIVATIVE = "no derivative passes through"


def params_of(cases: Iterable[Case], *, anew: bool = False) -> list:
    """The cases with their marks, of fits that are compiled anew with those of such; some run once."""
    marks = lambda case: once if case.own_precision else SLOW if case.slow or (anew and case.slow_anew) else ()
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


class Method(NamedTuple):
    """A case, and what it has fitted to the rows of all."""

    case: Case
    module: Any

    def mean(self, x=X, mean=MEAN, module=None):
        """What it predicts."""
        return self.case.call(self.module if module is None else module, x, mean).mean

    def traces(self, *parts: str):
        """A context for a trace of the fit or the prediction: where that is not possible, the error says why."""
        reasons = [reason for part, reason in self.case.needs_values.items() if part in parts]
        return pytest.raises(TypeError, match=reasons[0]) if reasons else contextlib.nullcontext()


@pytest.fixture(scope="module", params=params_of(CASES))
def method(request):
    return Method(request.param, request.param.fit(X, MEAN, Y))


def test_predicts_a_distribution(method):
    distribution = method.case.call(method.module, X[:7], MEAN[:7])
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
        mean = jax.jit(lambda y: method.case.call(method.case.fit(X, MEAN, y), X, MEAN).mean)(jnp.asarray(Y))
        np.testing.assert_allclose(mean, method.mean(), atol=method.case.tolerance)


def reading(method, x, mean, y):
    """Means, stds and quantiles of what is predicted at a few rows, as one number."""
    distribution = method.case.call(method.case.fit(x, mean, y), X[:5], MEAN[:5])
    parts = distribution.mean, distribution.std, distribution.icdf(jnp.array([0.1, 0.4, 0.9]))
    return sum(jnp.sum(jnp.cos(jnp.arange(1.0, 1 + part.size)).reshape(part.shape) * part) for part in parts)


@once
@pytest.mark.parametrize("method", params_of(case for case in CASES if case.differentiable), indirect=True)
def test_derivatives_through_the_fit_are_those_of_differences(method):
    # Functions of x that give groups need a known x.
    fixed = [X] if "vmap" in method.case.needs_values else []
    rows = [jnp.asarray(rows) for rows in (X, MEAN, Y)][len(fixed) :]
    check_gradients(partial(reading, method, *fixed), rows, atol=1e-7)


@once
@pytest.mark.parametrize("method", params_of(case for case in CASES if not case.differentiable), indirect=True)
def test_a_fit_without_a_derivative_says_so(method):
    reason = method.case.needs_values.get("fit", NO_DERIVATIVE)
    with pytest.raises(TypeError, match=reason):
        jax.make_jaxpr(jax.grad(lambda y: reading(method, X, MEAN, y)))(jnp.asarray(Y))


@once
def test_vmap_over_runs_keeps_the_dtype(method):
    """Known from the traces alone."""
    runs = [np.stack([a, a]).astype(np.float32) for a in (X, MEAN, Y)]
    predict = lambda x, mean, y: method.case.call(method.case.fit(x, mean, y), x, mean)
    with method.traces("fit", "vmap"):
        distribution = eqx.filter_eval_shape(eqx.filter_vmap(predict), *runs)
        moments = lambda distribution: (distribution.mean, distribution.std)
        for moment in eqx.filter_eval_shape(eqx.filter_vmap(moments), distribution):
            assert moment.shape == (2, 40)
            assert moment.dtype == jnp.float32


@once
@pytest.mark.parametrize(
    "method", params_of((case for case in CASES if "fit" in case.needs_values), anew=True), indirect=True
)
def test_a_method_that_needs_values_keeps_the_dtype(method):
    x, mean, y = (a.astype(np.float32) for a in (X, MEAN, Y))
    distribution = method.case.call(method.case.fit(x, mean, y), x, mean)
    assert distribution.mean.dtype == distribution.std.dtype == jnp.float32


@once
@pytest.mark.slow
def test_vmap_over_runs_predicts_what_a_loop_does(method):
    other = X[::-1], MEAN[::-1] + 1, 2 * Y[::-1]
    runs = [jnp.stack(pair) for pair in zip((X, MEAN, Y), other, strict=True)]
    with method.traces("fit", "vmap"):
        modules = eqx.filter_vmap(method.case.fit)(*runs)
        means = eqx.filter_vmap(lambda *run: method.case.call(*run).mean)(modules, *runs[:2])
        np.testing.assert_allclose(means[0], method.mean(), atol=method.case.tolerance)
        alone = method.mean(*other[:2], module=method.case.fit(*other))
        np.testing.assert_allclose(means[1], alone, atol=2 * method.case.tolerance)


def test_gradients_of_the_prediction_are_finite(method):
    total = lambda x, mean: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(method.case.call(method.module, x, mean)))
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
    before = jax.tree.leaves(method.case.call(method.module, X, MEAN))
    ways = dict(PICKLES)
    if method.case.of_the_user:
        with pytest.raises(TypeError, match=method.case.of_the_user):
            save(tmp_path / "module.safetensors", method.module)
        assert not list(tmp_path.iterdir())
    else:
        ways["save"] = partial(through_a_file, folder=tmp_path)
    for way, through in ways.items():
        loaded = through(method.module)
        with compilations() as compiled:
            after = jax.tree.leaves(method.case.call(loaded, X, MEAN))
        for old, new in zip(before, after, strict=True):
            assert old.dtype == new.dtype
            np.testing.assert_array_equal(old, new, err_msg=way)
        assert not compiled or (method.case.compiles_unpickled and way != "save"), way


@once
def test_a_second_fit_compiles_nothing(method):
    fit, call = method.case.fit, method.case.call
    call(fit(X, MEAN, Y), X, MEAN)
    moved = (X, MEAN, Y) if method.case.shapes_by_values else (X[::-1].copy(), MEAN + 1, 2 * Y)
    with compilations() as compiled:
        call(fit(*moved), X, MEAN)
    assert not compiled


# Of the last two factors the squares leave the range of the numbers.
@pytest.mark.parametrize(
    ("factor", "shift"), [(2.0, -3.0), *(((1e-160, 0.0), (1e160, 0.0)) if X64 else ((1e-25, 0.0), (1e25, 0.0)))]
)
def test_equivariance(method, factor, shift):
    before = method.case.call(method.module, X, MEAN)
    moved = factor * MEAN + shift
    after = method.case.call(method.case.fit(X, moved, factor * Y + shift), X, moved)
    np.testing.assert_allclose((after.mean - shift) / factor, before.mean, atol=method.case.tolerance)
    np.testing.assert_allclose(after.std / factor, before.std, atol=method.case.tolerance)


@pytest.mark.parametrize("method", params_of(case for case in CASES if case.signless), indirect=True)
def test_a_target_turned_around_turns_the_prediction(method):
    before, moved = method.case.call(method.module, X, MEAN), 5 - 3 * MEAN
    after = method.case.call(method.case.fit(X, moved, 5 - 3 * Y), X, moved)
    np.testing.assert_allclose((after.mean - 5) / -3, before.mean, atol=method.case.tolerance)
    np.testing.assert_allclose(after.std / 3, before.std, atol=method.case.tolerance)


@once
@pytest.mark.filterwarnings("ignore:y equals the .* mean of base in every row")
@pytest.mark.parametrize("constant", ["target", "error"])
def test_what_does_not_vary_is_exact_or_refused(method, constant):
    y = np.full(40, 7.0) if constant == "target" else MEAN + 3
    if constant in method.case.refused:
        with pytest.raises(ValueError, match=r"constant \("):
            method.case.fit(X, MEAN, y)
        return
    # New rows, too, where the target does not vary.
    distribution = method.case.call(method.case.fit(X, MEAN, y), 3 * X if constant == "target" else X, MEAN)
    assert np.isfinite(distribution.mean).all()
    assert np.isfinite(distribution.std).all()
    if constant in method.case.exact:
        np.testing.assert_allclose(distribution.mean, y, rtol=1e-12)
        np.testing.assert_allclose(distribution.std, 0, atol=1e-12)


@once
@pytest.mark.parametrize("method", params_of((case for case in CASES if case.diverging), anew=True), indirect=True)
def test_divergence_is_raised_or_reported(method):
    with pytest.raises(FloatingPointError, match=r"NaN or infinite|diverged"):
        method.case.fit(X, MEAN, Y, **method.case.diverging)
    module = method.case.fit(X, MEAN, Y, **method.case.diverging, throw=False)
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
        method.case.fit(*change(X, MEAN, Y))


@once
def test_wrong_inputs_of_a_prediction_are_quoted(method):
    """A method that knows the inputs by the base alone takes any."""
    refused = contextlib.nullcontext() if method.case.by_base_alone else pytest.raises(ValueError, match="columns")
    with refused:
        method.case.call(method.module, X[:, :1], MEAN)
