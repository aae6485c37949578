"""Saving and loading: what comes back, what is refused and by which words, and files of every format there has been.

`python tests/test_serialization.py` writes the files of a new format into tests/saved, from the fits below.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import polars
import pytest
import safetensors.numpy
from jax import dtypes

import jaxcal as jc
from jaxcal import distributions
from jaxcal.distributions import multivariate
from jaxcal.frames.labels import ColumnBins
from jaxcal.functional import linear_tables, tables
from jaxcal.networks import FeedForward
from jaxcal.optimize import Optimum, Result
from jaxcal.predictors import quantile_boosting, usnrt

X64 = jax.config.jax_enable_x64
# What does not depend on the precision runs in 64 bits only.
once = pytest.mark.skipif(not X64, reason="does not depend on the precision")
KEY, FORMAT = jax.random.key(0), 1
SAVED = Path(__file__).parent / "saved"
RNG = np.random.default_rng(0)
X, NEW = RNG.uniform(-2, 2, (30, 2)), RNG.uniform(-2, 2, (4, 2))
Y = np.sin(X[:, 0]) + 0.3 * X[:, 1] + 0.1 * RNG.normal(size=30)


def mean(x):
    """Of the models behind the calibrators."""
    return np.sin(x[:, 0])


def frame_of(x):
    """A data frame: columns that have names, one of labels."""
    return polars.DataFrame({"height": x[:, 0], "color": np.where(x[:, 1] > 0, "red", "blue")})


def fit_grouped():
    """A predictor and a calibrator that belong together."""
    network = jc.variance_network.fit(X, Y, key=KEY, hidden=(3,), max_epochs=3)
    groups = ColumnBins.of(X, number=2)
    return {"network": network, "crude": jc.crude.fit(X, network(X), Y, by=groups)}


def fit_tree():
    """With the names of a data frame's columns; and groups that a method of the tree gives."""
    splits = usnrt.Splits(significance=0.9, hidden=(2,))
    tree = usnrt.fit(frame_of(X), Y, key=KEY, min_leaf=10, splits=splits, hidden=(2,), max_epochs=3)
    return {"tree": tree, "groups": jc.crude.fit(codes(X), jc.Point(mean(X)), Y, by=tree.apply)}


def codes(x):
    """The frame as an array: the labels by their numbers."""
    return np.column_stack([x[:, 0], x[:, 1] > 0])


def fit_gpjax():
    """With a kernel of gpjax, whose engine is a default of its class."""
    from gpjax.kernels import RBF, Matern32

    kernels = RBF(active_dims=[0]) + Matern32(), None
    return jc.rio.fit(X, jc.Point(mean(X)), Y, kernel=kernels, inference=jc.gp.Sparse(num_inducing=5, max_iterations=5))


def online_state():
    state = jc.online.adaptive.init(jc.Point(mean(X[:20])), Y[:20], confidence_level=0.8)
    return jc.online.run(state, jc.Point(mean(X[20:])), Y[20:])[0]


# What the files of a format hold, and a distribution, or arrays, that the loaded model must give.
MODELS = {
    "network": (lambda: jc.mlp.fit(X, Y, key=KEY, hidden=(3,), max_epochs=3), lambda model: model(NEW)),
    "grouped": (fit_grouped, lambda model: model["crude"](NEW, model["network"](NEW))),
    "tree": (fit_tree, lambda model: [model["tree"](frame_of(NEW)), model["groups"](codes(NEW), jc.Point(mean(NEW)))]),
    "gpjax": (fit_gpjax, lambda model: model(NEW, jc.Point(mean(NEW)))),
    "accrue": (
        lambda: jc.accrue.fit(X[:, 0], jc.Point(mean(X)), Y, key=KEY, model="polynomial"),
        lambda model: model(NEW[:, 0], jc.Point(mean(NEW))),
    ),
    "forest": (
        lambda: jc.forests.fit(X, Y, key=KEY, model="random_forest", num_trees=3),
        lambda model: model(NEW),
    ),
    "boosting": (
        lambda: quantile_boosting.fit(X, Y, key=KEY, levels=(0.1, 0.9), max_iter=3, min_samples_leaf=3),
        lambda model: model(NEW),
    ),
    "online": (online_state, lambda model: model.interval(jc.Point(mean(NEW)))),
    "distributions": (lambda: every_distribution(), lambda model: [part.mean for part in model]),
    "values": (lambda: every_value(), lambda model: model["arrays"]),
}


def every_distribution():
    """One of every class."""
    loc, scale, group = jnp.array([0.0, 2.0]), jnp.array([1.0, 0.5]), jnp.array([0, 1])
    values, groups = jnp.array([-1.0, 1.0, -5.0, 5.0]), jnp.array([0, 0, 1, 1])
    normal = jc.Normal(loc, scale)
    return [
        jc.Point(loc),
        normal,
        jc.StudentT(5.0, loc, scale),
        jc.Mixture(jax.vmap(jc.Normal)(jnp.stack([loc, loc + 1]), jnp.stack([scale, scale]))),
        jc.Empirical(loc, scale, values[:3].sort()),
        jc.Quantiles(jnp.array([0.25, 0.75]), jnp.array([[0.0, 2.0], [1.0, 4.0]])),
        jc.SmoothQuantiles(jnp.array([0.25, 0.75]), jnp.array([[0.0, 2.0], [1.0, 4.0]]), 5.0),
        jc.Histogram(jnp.array([0.0, 1.0, 4.0]), jnp.array([[0.5, 0.5], [0.1, 0.9]]), "half_normal"),
        jc.ScaledQuantiles(loc, scale, jnp.array([0.25, 0.75]), jnp.array([-1.0, 1.0]), "normal"),
        jc.Empirical(loc, scale, tables.make(values, groups, 2), "conformal", group=group),
        jc.ScaledQuantiles(loc, scale, None, linear_tables.make(values, groups, np.array([2, 2])), group=group),
        jc.Quantiles(jnp.array([0.25, 0.75]), jnp.array([[-1.0, 1.0], [0.0, 2.0]]), lowest=0.25, highest=0.75),
        jc.Recalibrated(normal, jnp.array([0.1, 0.5, 0.9])),
        distributions.CrossConformal(loc[:, None], jnp.ones((1, 4)), jnp.array([1.0, 2.0, 3.0, 4.0])),
        distributions.Concatenated([normal, jc.Point(jnp.array([5.0]))], [[0, 2], [1]]),
        jc.MultivariateNormal(jnp.zeros((2, 2)), jnp.tile(jnp.array([[4.0, 2.0], [2.0, 2.0]]), (2, 1, 1))),
        jc.MultivariateEmpirical(jnp.zeros((1, 2)), 2 * jnp.eye(2)[None], jnp.array([[-1.0, 3.0], [1.0, 5.0]])),
    ]


def every_value():
    """All that a file can hold beside modules."""
    names = "bool", "int8", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn"
    arrays = {name: jnp.arange(6).reshape(2, 3).astype(name) for name in names}
    arrays |= {"empty": jnp.zeros((0, 3)), "scalar": jnp.array(2), "weak": jnp.asarray(2.5)}
    arrays["not finite"] = jnp.array([-jnp.inf, jnp.nan, -0.0])
    return {
        "arrays": arrays,
        "keys": (jax.random.split(KEY, 3), jax.random.key(1, impl="rbg"), jax.random.PRNGKey(2)),
        "numpy": [np.arange(6.0).reshape(2, 3).T, np.array([1, 2], ">i8"), np.array(3.0), np.float32(0.1), np.True_],
        "plain": [None, True, -(2**70), 0.1, math.inf, -math.inf, math.nan, -0.0, 'é \ud800 "quoted" digest', ""],
        "containers": ((), [], {}, ((1,), [2, {"a b": None}]), slice(None), slice(1, None, 2)),
        "records": (
            Optimum({"a": jnp.ones(2)}, jnp.array(1.0), jnp.array(3), Result.STEP_LIMIT),
            jc.Guarantee(0.9, 99, 90),
        ),
        "functions": [jax.nn.relu, jnp.tanh, jnp.asarray, jc.metrics.crps, jc.functional.normal.crps],
        "partial": functools.partial(jnp.clip, min=0.0, max=jnp.array(1.0)),
        "method": jc.Normal(jnp.zeros(2), 1.0).interval,
        "network": eqx.nn.MLP(2, "scalar", 3, 1, key=KEY),
    }


def assert_same(one, other):
    """Of the same classes, with the same values; arrays bit by bit."""
    assert type(one) is type(other)
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, dtypes.prng_key):
        assert one.dtype == other.dtype
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if isinstance(one, jax.Array | np.ndarray | np.generic):
        assert (one.shape, one.dtype) == (other.shape, other.dtype.newbyteorder("="))
        assert getattr(one, "weak_type", None) == getattr(other, "weak_type", None)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        np.testing.assert_array_equal(np.signbit(np.asarray(one, float)), np.signbit(np.asarray(other, float)))
    elif isinstance(one, tuple | list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, functools.partial):
        assert_same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert (field.name in vars(one)) == (field.name in vars(other))
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert repr(one) == repr(other)


def through_a_file(path, model):
    jc.save(path, model)
    return jc.load(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def fitted():
    """Something small."""
    return jc.gaussian_mle.fit(X, jc.Point(mean(X)), Y)


def header_of(path):
    """What a file says of itself, as a JSON object, and its arrays."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["jaxcal"]), safetensors.numpy.load(data)


def rewrite(path, change):
    """Change what a file says of itself, with the digest that it then must have."""
    about, arrays = header_of(path)
    change(about)
    about = {"digest": 64 * "0", **{name: value for name, value in about.items() if name != "digest"}}
    data = safetensors.numpy.save(arrays, {"jaxcal": json.dumps(about, separators=(",", ":"))})
    path.write_bytes(data.replace(64 * b"0", hashlib.sha256(data).hexdigest().encode(), 1))


# What comes back


@pytest.mark.usefixtures("half_precision")
def test_every_value_comes_back(path):
    # A JAX array of every type is there in both precisions but for those of 64 bits.
    value = every_value() | {"64 bits": [jnp.arange(3), jnp.array([0.1, 1e-30]), np.array([1e300, 2**-1074])]}
    assert_same(through_a_file(path, value), value)


def test_every_distribution_comes_back(path):
    parts = every_distribution()
    own = {value for module in (distributions, multivariate) for value in vars(module).values() if is_final(value)}
    assert {type(part) for part in parts} == own
    loaded = through_a_file(path, parts)
    assert_same(loaded, parts)
    assert jax.tree.structure(loaded) == jax.tree.structure(parts)


def is_final(value):
    bases = distributions.Distribution, multivariate.Multivariate
    return isinstance(value, type) and issubclass(value, bases) and value not in bases


def test_predictions_out_of_fold_stay_so(path):
    base = jc.out_of_fold(lambda x, y, key: lambda x: jc.Point(x[:, 0]), X, Y, key=KEY, folds=3)
    assert through_a_file(path, base).is_out_of_fold


def test_an_array_in_two_places_is_written_once(path):
    array = jnp.arange(1000.0)
    first, second = through_a_file(path, (array, [array]))
    assert first is second[0]
    assert path.stat().st_size < 1.2 * array.nbytes + 1000


def test_the_same_model_gives_the_same_file(path, tmp_path, fitted):
    jc.save(path, fitted)
    jc.save(tmp_path / "again", copy.deepcopy(fitted))
    assert path.read_bytes() == (tmp_path / "again").read_bytes()


def test_no_init_runs(path, monkeypatch):
    jc.save(path, every_distribution()[:2])
    for cls in (jc.Point, jc.Normal):
        monkeypatch.delattr(cls, "__init__")
    assert jc.load(path)[1].std.tolist() == [1.0, 0.5]


def test_a_pipeline_comes_back_with_what_it_dropped(path):
    x = np.linspace(-1, 1, 240)
    # Noise that float32 holds: without it the process warns that its stds are rounding, on some processors.
    y = x + np.random.default_rng(0).normal(scale=0.3, size=240)
    wrong = lambda x, y: lambda x: -10 * x[:, 0]
    pipeline = jc.pipeline.fit(x, y, predictor=[(jc.gaussian_process.fit, ()), (wrong, ())], key=KEY)
    assert pipeline.dropped
    assert through_a_file(path, pipeline).dropped == pipeline.dropped


def test_a_pipeline_comes_back_with_its_table(path):
    grow = functools.partial(jc.forests.fit, model="random_forest", num_trees=5, preset="usnrt")
    pipeline = jc.pipeline.fit(X, Y, predictor=grow, method=jc.pipeline.Folds(folds=3), key=KEY)
    loaded = through_a_file(path, pipeline)
    assert str(loaded) == str(pipeline)
    assert str(loaded.guarantee(0.8)) == str(pipeline.guarantee(0.8))
    assert_same(loaded(NEW), pipeline(NEW))


def test_a_density_ratio_comes_back(path):
    ratio = jc.density_ratio.fit(X, NEW)
    for loaded in (through_a_file(path, ratio), pickle.loads(pickle.dumps(ratio))):
        np.testing.assert_array_equal(loaded(X), ratio(X))


@pytest.mark.parametrize("model", ["random_forest", "extra_trees"])
def test_a_forest_comes_back_with_all_it_can_do(path, model):
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(300, 3)), rng.normal(size=(1000, 3))
    # As they lie at thresholds, too.
    new[:300] = x.astype(np.float32)
    y = x[:, 0] + rng.normal(size=300)
    forest = jc.forests.fit(x, y, key=KEY, model=model, num_trees=90, preset="usnrt", max_features=0.5)
    loaded = through_a_file(path, forest)
    np.testing.assert_array_equal(loaded.trees.apply(new), forest.trees.apply(new))
    assert_same(loaded(new), forest(new))
    assert_same(loaded.tree_means(new, 7), forest.tree_means(new, 7))
    if model == "random_forest":
        np.testing.assert_array_equal(loaded.in_bag(x, y), forest.in_bag(x, y))
        assert_same(loaded.out_of_bag(x), forest.out_of_bag(x))
        before, after = (jc.cross_conformal.of_forest(each, x, y, key=KEY) for each in (forest, loaded))
        assert_same(through_a_file(path, before)(new), after(new))
    else:
        with pytest.raises(ValueError, match="no row is out of bag"):
            loaded.in_bag(x)
    # It is saved again as it is.
    assert_same(through_a_file(path, loaded)(new), forest(new))


@once
def test_a_network_with_any_activation_can_be_pickled_and_saved(path):
    network = FeedForward(2, (3, 3), 1, key=KEY, activation=(jnp.tanh, soft))
    for through in (lambda network: pickle.loads(pickle.dumps(network)), copy.deepcopy):
        assert through(network).activations == (jnp.tanh, soft)
    own = FeedForward(2, (3, 3), 1, key=KEY, activation=(jnp.tanh, lambda x: x))
    np.testing.assert_array_equal(cloudpickle.loads(cloudpickle.dumps(own))(jnp.ones(2)), own(jnp.ones(2)))
    with pytest.raises(TypeError, match=r"activation_names\[1\] is the function test_serialization.soft"):
        jc.save(path, network)
    assert_same(through_a_file(path, network.layers), network.layers)


def soft(x):
    return x / (1 + jnp.abs(x))


# What is refused


class Own(eqx.Module):
    """A module of the user's."""

    value: int = 1


class Stateful:
    def predict(self, x):
        return x[:, 0]

    def fit(self, x, y):
        return self


def pipeline_of(predictor):
    return jc.pipeline.fit(X, Y, predictor=predictor, method=jc.pipeline.Folds(folds=2), key=KEY)


@once
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: pipeline_of(Stateful()),
            r"chain\.chains\[0\]\.predictor\.model is an object of test_serialization\.Stateful",
        ),
        (
            lambda: jc.crude.fit(X, jc.Point(mean(X)), Y, weights=lambda x: 1 + x[:, 0] ** 2),
            r"rows\.weights is the function test_serialization\S*<lambda>, which cannot be saved: a file holds the "
            r"name of a function, and only those of jaxcal, jax\.nn and jax\.numpy are loaded\. Take cloudpickle\.dump",
        ),
        (
            lambda: {"a": [jc.Point(1.0), mean]},
            r"\['a'\]\[1\] is the function test_serialization\.mean.* joblib\.dump",
        ),
        (lambda: functools.partial(jnp.clip, max=Own()), r"keywords\['max'\] is an object of test_serialization\.Own"),
        (
            lambda: Own(),
            r"the model is an object of test_serialization\.Own, which cannot be saved: a file holds",
        ),
        (lambda: {1: 2}, r"the model is an object of builtins\.dict"),
        (lambda: ({1},), r"\[0\] is an object of builtins\.set"),
        (lambda: jc.Point, r"the model is the function jaxcal\.distributions\.parametric\.Point"),
        (lambda: [np.array(["a"])], r"\[0\] is an array of dtype <U1: only numbers can be saved"),
        (lambda: [np.ma.array([1.0])], r"\[0\] is an object of numpy\.ma\S*\.MaskedArray"),
        (lambda: [np.array([1j])], r"\[0\] is an array of dtype complex128"),
        (lambda: jnp.load, "the model is the function jax.*load"),
        (lambda: jc.save, "the model is the function jaxcal.serialization.save"),
    ],
    ids=range(13),
)
def test_what_cannot_be_saved_is_named(path, model, message):
    with pytest.raises(TypeError, match=message):
        jc.save(path, model())
    assert not path.exists()


@once
def test_boosted_trees_of_other_packages_are_named(path):
    pytest.importorskip("lightgbm", reason="not a dependency: used where it is installed")
    fitted = quantile_boosting.fit(X, Y, key=KEY, model="lightgbm", n_estimators=2, n_jobs=1)
    with pytest.raises(TypeError, match=r"predict\.models\[0\] is an object of lightgbm\.sklearn\.LGBMRegressor"):
        jc.save(path, fitted)


@once
def test_nothing_is_saved_under_a_transformation(path):
    with pytest.raises(TypeError, match="mean is traced by a transformation of JAX: save outside of it"):
        jax.jit(lambda mean: jc.save(path, jc.Point(mean)))(jnp.zeros(2))


# Files


NOT_WHOLE = r"model\.safetensors is (damaged or cut short|not a file that jaxcal\.save has written)"


@once
def test_every_flipped_byte_is_found(path, fitted):
    jc.save(path, fitted)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=NOT_WHOLE):
            jc.load(path)


@once
def test_what_is_no_whole_file_is_refused(path, fitted, tmp_path):
    jc.save(path, fitted)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=NOT_WHOLE):
            jc.load(path)
    path.write_bytes(data + b" ")
    with pytest.raises(ValueError, match="is damaged or cut short: it does not match the digest"):
        jc.load(path)
    safetensors.numpy.save_file({"weight": np.ones(3)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.safetensors is not a file that jaxcal\.save has written"):
        jc.load(path)
    with pytest.raises(ValueError, match=r"cannot read .*missing: No such file or directory"):
        jc.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        jc.load(tmp_path)


@once
def test_a_file_of_a_later_version_is_refused(path, fitted):
    jc.save(path, fitted)
    own, _ = header_of(path)
    assert own["format"] == FORMAT
    assert own["version"] == jc.__version__
    rewrite(path, lambda about: about.update(format=2, version="9.3"))
    message = r"model\.safetensors was written by jaxcal 9\.3 in format 2, and this one reads format 1: update jaxcal\."
    with pytest.raises(ValueError, match=message):
        jc.load(path)


def fields(about):
    return about["tree"]["fields"]


@once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda about: about["tree"].update({"class": "jaxcal.distributions.parametric.Cauchy"}),
            r"the model is a jaxcal\.distributions\.parametric\.Cauchy, which jaxcal \S+ does not know\. The file was "
            r"written by jaxcal 9\.3",
        ),
        (lambda about: fields(about).update(skew=1.0), "the model is a StudentT with the field 'skew', which jaxcal"),
        (
            lambda about: fields(about).pop("df"),
            "the model is a StudentT, and the file lacks its field 'df', which",
        ),
        (lambda about: fields(about).update(df={"interval": [1, 2]}), "df is of the kind 'interval', which jaxcal"),
        (lambda about: fields(about).update(df={"default": True}), "df is the default of a StudentT, which jaxcal"),
        (lambda about: fields(about).update(df={"function": "jax.nn.tuna"}), "df is the function jax.nn.tuna"),
    ],
    ids=["class", "more", "less", "kind", "default", "function"],
)
def test_what_this_version_does_not_know_is_named(path, change, message):
    jc.save(path, jc.StudentT(5.0, jnp.zeros(2), 1.0))
    rewrite(path, lambda about: (about.update(version="9.3"), change(about)))
    with pytest.raises(ValueError, match=message):
        jc.load(path)


# What a name in a file must not reach, by any of the ways that names are used.
FORBIDDEN = (
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "jaxcal.serialization.save",
    "jaxcal.cli.app.app",
    "jaxcal.datasets.load",
    "jaxcal.predictors.quantile_boosting._imported",
    "jaxcal.predictors.quantile_boosting.importlib",
    "jaxcal.predictors.quantile_boosting.importlib.import_module",
    "jaxcal.__main__.app",
    "jax.numpy.load",
    "jax.numpy.save",
    "jax.numpy.np",
    "this.s",
)


@once
@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_file_cannot_name_what_is_not_allowed(path, name):
    activations = {"layers": None, "activation_names": {"function": name}}
    uses = (
        {"function": name},
        {"class": name, "fields": {}},
        {"enum": name, "member": "x"},
        {"partial": {"function": name}, "args": [], "keywords": {"dict": {}}},
        {"class": "jaxcal.networks.modules.FeedForward", "fields": activations},
    )
    for use in uses:
        jc.save(path, None)
        rewrite(path, lambda about, use=use: about.update(tree=use))
        with pytest.raises(ValueError, match=rf"is (a|the function)? ?{name}[^,]*, which jaxcal"):
            jc.load(path)
    assert "this" not in sys.modules
    assert "jaxcal.__main__" not in sys.modules


@once
def test_a_method_must_be_a_public_one_of_its_class(path):
    for name in ("__class__", "_quantiles", "mean", "std", "delete"):
        jc.save(path, jc.Normal(jnp.zeros(2), 1.0).interval)
        rewrite(path, lambda about, name=name: about["tree"].update(method=name))
        with pytest.raises(ValueError, match=f"the model is the method '{name}' of a Normal, which jaxcal"):
            jc.load(path)


# Writing


@once
def test_a_file_has_the_permissions_of_the_umask(path, fitted):
    before = os.umask(0o027)
    try:
        jc.save(path, fitted)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@once
@pytest.mark.parametrize("fails", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stopped"]
)
def test_an_old_file_stays_whole_until_the_new_one_is(path, tmp_path, fitted, monkeypatch, fails, error):
    jc.save(path, jc.Point(jnp.array([7.0])))

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, fail)
        expected = pytest.raises(ValueError, match=r"cannot write .*model\.safetensors: No space left on device\.")
        with expected if isinstance(error, OSError) else pytest.raises(KeyboardInterrupt):
            jc.save(path, fitted)
    assert jc.load(path).mean.tolist() == [7.0]
    assert list(tmp_path.iterdir()) == [path]


@once
def test_a_file_is_replaced_through_a_link(path, tmp_path, fitted):
    link = tmp_path / "link"
    jc.save(path, jc.Point(jnp.array([7.0])))
    link.symlink_to(path)
    jc.save(link, fitted)
    assert link.is_symlink()
    assert_same(jc.load(path), fitted)


@once
def test_where_nothing_can_be_written_it_is_said(path, tmp_path, fitted):
    with pytest.raises(ValueError, match=r"cannot write .*missing/file: No such file or directory"):
        jc.save(tmp_path / "missing" / "file", fitted)
    with pytest.raises(ValueError, match=r"cannot write .*: Is a directory"):
        jc.save(tmp_path, fitted)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot write .*: Not a directory"):
        jc.save(path / "file", fitted)
    assert list(tmp_path.iterdir()) == [path]


# Precision and processes


OTHER = """
import json, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import jaxcal as jc

def leaves(precision):
    jax.config.update("jax_enable_x64", precision)
    x = np.load(sys.argv[1] + ".npy")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        network, calibrator, process, counts = jc.load(sys.argv[1])
        distribution = calibrator(x, process(x))
    parts = [network(x).mean, distribution.mean, distribution.std, counts]
    return [[str(part.dtype), np.asarray(part, float).tolist()] for part in parts], [str(w.message) for w in warned]

own, other = (leaves(precision) for precision in (sys.argv[2] == "True", sys.argv[2] == "False"))
print(json.dumps([own, other]))
"""


def test_another_process_predicts_the_same_in_this_precision_and_in_the_other(path):
    network = jc.mlp.fit(X, Y, key=KEY, hidden=(3,), max_epochs=3)
    sparse = jc.gp.Sparse(num_inducing=5, max_iterations=5)
    process = jc.gaussian_process.fit(X, Y, inference=sparse, throw=False)
    calibrator = jc.crude.fit(X, process(X), Y, by=ColumnBins.of(X, number=2))
    jc.save(path, (network, calibrator, process, jnp.array([3, 4])))
    np.save(f"{path}.npy", NEW)
    run = subprocess.run([sys.executable, "-c", OTHER, path, str(X64)], capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    (own, no_warning), (other, warned) = json.loads(run.stdout.splitlines()[-1])
    distribution = calibrator(NEW, process(NEW))
    here = [network(NEW).mean, distribution.mean, distribution.std, jnp.array([3, 4])]
    assert [name for name, _ in own] == [str(part.dtype) for part in here]
    # NEW is an array of 64 bits: the rows are in those that JAX is in, and so are predictions of 32 bits in 64.
    assert [name for name, _ in other] == (["float32"] * 3 + ["int32"] if X64 else ["float64"] * 3 + ["int32"])
    for part, (_, in_own), (_, in_other) in zip(here, own, other, strict=True):
        np.testing.assert_allclose(in_own, part, rtol=1e-12 if X64 else 1e-5)
        np.testing.assert_allclose(in_other, part, rtol=1e-3)
    assert not no_warning
    assert len(warned) == X64
    assert not warned or "was written in 64 bits and is loaded in 32: predictions change by rounding" in warned[0]


@once
def test_arrays_take_the_precision_that_jax_is_in(path):
    model = [jnp.array([0.1]), jnp.array([2]), jnp.array(0.5, "float32"), np.array([0.1]), jnp.asarray(2.0), KEY]
    jc.save(path, model)
    with jax.enable_x64(False), pytest.warns(UserWarning, match="in 64 bits and is loaded in 32") as warned:
        loaded = jc.load(path)
    assert len(warned) == 1
    assert [part.dtype.name for part in loaded[:5]] == ["float32", "int32", "float32", "float64", "float32"]
    assert loaded[4].weak_type
    for number in (1e300, 2**40):
        jc.save(path, {"a": jnp.array([1, number])})
        message = (
            r"\['a'\] in .* holds 1e\+300, which float32 cannot" if number == 1e300 else "1.09951e.12, which int32"
        )
        with jax.enable_x64(False), pytest.raises(ValueError, match=message):
            jc.load(path)


@pytest.mark.skipif(X64, reason="of 32 bits")
def test_arrays_of_32_bits_keep_them_in_64(path):
    jc.save(path, [jnp.array([0.1]), jnp.array([2])])
    with jax.enable_x64(True):
        assert [part.dtype.name for part in jc.load(path)] == ["float32", "int32"]


# Files of every format


@pytest.mark.filterwarnings("ignore:.* was written in 64 bits and is loaded in 32")
@pytest.mark.parametrize(
    ("saved", "name"),
    [
        pytest.param(folder, name, id=f"{folder.name}-{name}")
        for folder in sorted(SAVED.glob("format_*"))
        for name in json.loads((folder / "expected.json").read_text())
    ],
)
def test_saved_files_predict_what_they_did(saved, name, path):
    expected = json.loads((saved / "expected.json").read_text())[name]
    model = jc.load(saved / f"{name}.safetensors")
    for loaded in (model, through_a_file(path, model)):
        for part, values in zip(predicted(name, loaded), expected, strict=True):
            values = np.array(values, float).reshape(part.shape)
            np.testing.assert_allclose(part, values, rtol=1e-6 if X64 else 1e-3, atol=1e-12 if X64 else 1e-6)


def predicted(name, model):
    """What a model must give, as arrays."""
    found = jax.tree.leaves(MODELS[name][1](model), is_leaf=lambda part: isinstance(part, jc.Distribution))
    moments = [(part.mean, part.std) if isinstance(part, jc.Distribution) else (part,) for part in found]
    return [np.asarray(part, float) for parts in moments for part in parts]


def write():
    """The files of this format, which must not be there."""
    jax.config.update("jax_enable_x64", True)
    folder, expected = SAVED / f"format_{FORMAT}", {}
    folder.mkdir(parents=True)
    for name, (fit, _) in MODELS.items():
        model = fit()
        jc.save(folder / f"{name}.safetensors", model)
        expected[name] = [part.tolist() for part in predicted(name, model)]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write()
