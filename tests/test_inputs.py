"""Tensors of PyTorch, and numbers in the place of random keys, are refused wherever they come in, with what to do."""

import inspect
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

import jaxcal as jc
from jaxcal import _checks, optimize
from jaxcal.distributions import Concatenated, CrossConformal, Point
from jaxcal.functional.multiplicity import permutation_log_p

KEY, X = jax.random.key(0), np.linspace(-1, 1, 20)
# Of the annotations, which are checked in 64 bits, the messages are others.
without_annotations = pytest.mark.skipif(jax.config.jax_enable_x64, reason="annotations are checked in 64 bits")


class Tensor:
    """As one of PyTorch that requires its gradient, which answers NumPy so."""

    requires_grad, ndim, shape = True, 1, (20,)

    def __len__(self):
        return 20

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


class Detached(Tensor):
    requires_grad = False

    def __array__(self, dtype=None, copy=None):
        return X


class Model:
    """As an estimator whose predictions are such a tensor."""

    def fit(self, x, y):
        return self

    def predict(self, x):
        return Tensor()


ENTRIES = {
    "mean": lambda: jc.Point(Tensor()),
    "std": lambda: jc.Normal(X, Tensor()),
    "y": lambda: jc.Normal(X, 1.0).log_prob(Tensor()),
    "x": lambda: jc.mlp.fit(Tensor(), X, key=KEY),
    "prediction": lambda: jc.out_of_fold(lambda x, y, *, key: lambda x: Tensor(), X, X, key=KEY),
    r"model\.predict\(x\)": lambda: jc.pipeline.fit(X, X, predictor=Model(), key=KEY),
}


@without_annotations
@pytest.mark.parametrize("name", ENTRIES)
def test_a_tensor_with_a_gradient_is_refused(name):
    message = rf"{name} is a tensor that requires its gradient, .*: give {name}\.detach\(\)\.cpu\(\)\.numpy\(\)"
    with pytest.raises(ValueError, match=message):
        ENTRIES[name]()


def test_a_tensor_without_one_is_an_array():
    np.testing.assert_allclose(_checks.as_floats("mean", Detached()), X, rtol=1e-6)


def test_numbers_of_an_array_of_objects_are_numbers_and_none_is_nan():
    found = _checks.as_floats("x", np.array([[1, 2.5], [True, np.float32(3)]], object))
    np.testing.assert_array_equal(found, [[1, 2.5], [1, 3]])
    assert found.dtype == jnp.zeros(0).dtype
    with pytest.raises(ValueError, match=r"x holds 2 values that are NaN or infinite, the first at index \(0, 1\)"):
        jc.mlp.fit(np.array([[1, None], [2, np.nan]], object), np.zeros(2), key=KEY)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.array([[1, "red"], [2, "blue"]], object),
            "got 'red' in row 0 of column 1: give the data frame itself, whose labels become indicators, or numbers",
        ),
        (np.array([[1, 2, "a"], ["b", 2, 3]], object), "got 'a' in row 0 of column 2; columns 0, 2 hold such: give"),
        (np.array(["1", "2"])[:, None], "got '1' in row 0 of column 0"),
        (np.array([10**400], object), "x holds an integer that is too large"),
    ],
)
def test_what_is_no_number_is_shown_with_its_place(values, message):
    with pytest.raises(ValueError, match=message):
        jc.mlp.fit(values, np.zeros(len(values)), key=KEY)


def test_targets_that_are_no_numbers_are_shown_with_their_row():
    with pytest.raises(ValueError, match="y must be an array of real numbers; got 'low' in row 1: give numbers"):
        jc.mlp.fit(X[:2], np.array([1.5, "low"], object), key=KEY)
    with pytest.raises(ValueError, match="by holds 1 labels that are NaN or None: give each row a label"):
        jc.conformal.fit(None, Point(X[:2]), X[:2], by=np.array(["a", None], object))


@without_annotations
def test_the_value_of_a_model_is_named_where_it_is_no_array():
    with pytest.raises(ValueError, match="prediction must be an array of real numbers; got dict"):
        jc.out_of_fold(lambda x, y, *, key: lambda x: {}, X, X, key=KEY)


def test_keys_of_jax_are_random_keys():
    for key in (KEY, jax.random.PRNGKey(0), np.zeros(2, np.uint32), jax.random.key(0, impl="rbg")):
        _checks.check_key(key)
    jax.jit(jax.vmap(lambda key: _checks.check_key(key)))(jax.random.split(KEY, 3))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (0, r"seed must be a random key; got 0: did you mean jax\.random\.key\(0\)\?"),
        (np.int64(7), r"got 7: did you mean jax\.random\.key\(7\)\?"),
        (None, r"seed must be one random key, such as jax\.random\.key\(0\); got None"),
        ("key", "got 'key'"),
        (jax.random.split(KEY, 3), r"got an array of dtype key<fry> and shape \(3,\)"),
        (jnp.zeros(2), r"got an array of dtype float\d\d and shape \(2,\)"),
    ],
)
def test_what_is_no_key_is_named(key, message):
    with pytest.raises(TypeError, match=message):
        _checks.check_key(key, "seed")


def taking_a_key(*, needed: bool) -> dict[str, Callable]:
    """The fits of predictors and calibrators whose key is needed, or may be None, as functions of it."""
    fits = {}
    for method in dict.fromkeys(case.method for case in CASES if case.method is not jc.cross_conformal):
        parameters = inspect.signature(method.fit).parameters
        if "key" in parameters and (parameters["key"].default is inspect.Parameter.empty) == needed:
            fits[method.__name__] = partial(method.fit, *((X, Point(X), X) if "base" in parameters else (X, X)))
    return fits


AT_CHOICE = taking_a_key(needed=False)
# The key is checked first, whatever the other arguments are.
TAKING_A_KEY = {
    **taking_a_key(needed=True),
    "cv_plus": partial(jc.cross_conformal.fit, lambda x, y, *, key: lambda x: x[:, 0], X, X),
    "bootstrap": partial(jc.cross_conformal.fit_bootstrap, lambda x, y, *, key: lambda x: x[:, 0], X, X),
    "of_forest": partial(jc.cross_conformal.of_forest, None, X, X),
    "check_errors": partial(jc.online.check_errors, Point(X), X, Point(X), X),
    "check_inputs": partial(jc.online.check_inputs, X, X),
    "train_minibatches": partial(optimize.train_minibatches, None, X, X, X),
    "train_steps": partial(optimize.train_steps, None, X, X, num_steps=1),
    "train_full_batch": partial(optimize.train_full_batch, None, X, X, num_steps=1),
    "permutation_log_p": partial(permutation_log_p, X[:, None], X, min_leaf=2),
    "out_of_fold": lambda key: jc.out_of_fold(lambda x, y, *, key: lambda x: x[:, 0], X, X, key=key),
    "pipeline": lambda key: jc.pipeline.fit(X, X, key=key),
    "worst_slab_coverage": lambda key: jc.metrics.worst_slab_coverage(X, X, Point(X), key=key),
    "point": lambda key: Point(X).sample(key),
    "normal": lambda key: jc.Normal(X, 1.0).sample(key),
    "student_t": lambda key: jc.StudentT(4.0, X, 1.0).sample(key),
    "mixture": lambda key: jc.Mixture(jax.vmap(Point)(X[None])).sample(key),
    "empirical": lambda key: jc.Empirical(X, 1.0, X).sample(key),
    "quantiles": lambda key: jc.Quantiles(np.array([0.1, 0.9]), np.zeros((2, 2))).sample(key),
    "scaled_quantiles": lambda key: jc.ScaledQuantiles(X, 1.0, np.array([0.1, 0.9]), np.zeros(2)).sample(key),
    "recalibrated": lambda key: jc.Recalibrated(jc.Normal(X, 1.0), np.array([0.5])).sample(key),
    "cross_conformal": lambda key: CrossConformal(X[:, None], np.ones((1, 2)), np.ones(2)).sample(key),
    "concatenated": lambda key: Concatenated([Point(X)], [np.arange(20)]).sample(key),
    "multivariate": lambda key: jc.MultivariateNormal(np.zeros((2, 2)), np.stack([np.eye(2)] * 2)).sample(key),
}


@without_annotations
@pytest.mark.parametrize("name", [*TAKING_A_KEY, *AT_CHOICE])
def test_a_number_in_the_place_of_a_key_is_named(name):
    with pytest.raises(TypeError, match=r"key must be a random key; got 0: did you mean jax\.random\.key\(0\)\?"):
        (TAKING_A_KEY | AT_CHOICE)[name](key=0)


@without_annotations
@pytest.mark.parametrize("name", TAKING_A_KEY)
def test_no_key_where_one_is_needed_is_named(name):
    with pytest.raises(TypeError, match=r"key must be one random key, such as jax\.random\.key\(0\); got None"):
        TAKING_A_KEY[name](key=None)
