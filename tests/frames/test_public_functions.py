"""Every public function that takes x takes a data frame of pandas or polars, as it takes the frame's numbers."""

import inspect
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.pipeline import Folds
from jaxcal.pipeline.folds import Fold

pandas = pytest.importorskip("pandas", reason="a data frame needs a library")
polars = pytest.importorskip("polars", reason="a data frame needs a library")
ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn is of the extra sklearn")
LIBRARIES = pytest.mark.parametrize("library", [pandas, polars], ids=["pandas", "polars"])
# In 32 bits the noise of these few rows is near to rounding.
pytestmark = pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater")

RNG = np.random.default_rng(0)
N = 60
X = np.column_stack([RNG.normal(size=N), RNG.uniform(20, 60, size=N)])
Y = X[:, 0] + 0.1 * RNG.normal(size=N)
KEY = jax.random.key(0)
BASE = jc.Point(0.8 * X[:, 0])

# These are steps of methods: their x is the numbers that a method has made of a table.
OF_NUMBERS = {"functional", "frames", "gp", "networks", "optimize"}
# What a simulation knows of its own inputs.
OF_ARRAYS = {"datasets.heteroscedastic_moments"}


def of_predictor(fit, **options):
    """The quantiles of rows, by a predictor that is fitted to them."""
    return lambda x: fit(x, Y, **options)(x).icdf(0.7)


def of_calibrator(fit, base=BASE, **options):
    return lambda x: fit(x, base, Y, **options)(x, base).icdf(0.7)


def fit_first(x, y):
    """A user's own fit, which gets a frame as it is."""
    return lambda x: np.asarray(x)[:, 0]


def fit_keyed(x, y, *, key):
    return fit_first(x, y)


def by_sharp_gp(x):
    parts = (x[:40], BASE[:40], Y[:40])
    return jc.sharp_gp.fit(*parts, x_train=x[40:], y_train=Y[40:])(x, BASE).icdf(0.7)


def by_grown_trees(fit):
    """What a function makes of a forest that was grown elsewhere."""
    trees = ensemble.RandomForestRegressor(10, random_state=0).fit(X, Y)
    return lambda x: fit(trees, x)(x).icdf(0.7)


def by_features(x):
    fitted = jc.conditional_conformal.fit(x, BASE, Y, features=jc.conditional_conformal.inputs, confidence_levels=[0.8])
    return fitted(x, BASE).icdf(0.9)


def as_distribution(x):
    return jc.as_distribution(ensemble.RandomForestRegressor(10, random_state=0).fit(x, Y), x).mean


def by_steps(x):
    (fitted,) = jc.chain.fit_steps([jc.kmeans.fit], x, BASE, jnp.asarray(Y), keys=[KEY])
    return fitted(x, BASE).icdf(0.7)


def by_chain(x):
    return jc.pipeline.fit_chain(fit_first, [jc.kmeans.fit], x, jnp.asarray(Y), key=KEY)(x).icdf(0.7)


def by_folds(x):
    folds = [Fold(np.arange(30), np.arange(30, N)), Fold(np.arange(30, N), np.arange(30))]
    models = [fit_first(None, None)] * 2
    predictions = [X[fold.held_out, 0] for fold in folds]
    options = {"score": None, "has_groups": False}
    return jc.cross_conformal.of_folds(models, predictions, folds, x, jnp.asarray(Y), **options)(x).icdf(0.7)


def by_random_forest(x):
    forest = jc.forests.fit(x, Y, key=KEY, model="random_forest", num_trees=100)
    return jc.cross_conformal.of_forest(forest, x, Y, key=KEY)(x).icdf(0.7)


def in_a_picture(x):
    """Over the only column of a frame, or a vector."""
    ax = jc.plots.prediction_band(X[:, 0] if x is X else x[["size"]], jc.Normal(BASE.mean, 1.0))
    return ax.lines[0].get_xdata()


EXACT = jc.gp.Exact(max_iterations=2)
FOREST = {"model": "random_forest", "num_trees": 10}
CALLS = {
    "accrue.fit": of_calibrator(jc.accrue.fit, key=KEY, restarts=1, max_iterations=2),
    "as_distribution": as_distribution,
    "chain.fit": of_calibrator(
        jc.chain.fit, calibrators=[partial(jc.rio.fit, inference=EXACT), jc.conformal.fit], folds=2, key=KEY
    ),
    "chain.fit_steps": by_steps,
    "conditional_conformal.fit": of_calibrator(jc.conditional_conformal.fit, confidence_levels=[0.4, 0.8]),
    "conditional_conformal.inputs": by_features,
    "conformal.fit": of_calibrator(jc.conformal.fit),
    "cross_conformal.fit": lambda x: jc.cross_conformal.fit(fit_keyed, x, Y, folds=3, key=KEY)(x).icdf(0.7),
    "cross_conformal.fit_bootstrap": lambda x: jc.cross_conformal.fit_bootstrap(fit_keyed, x, Y, key=KEY)(x).icdf(0.7),
    "cross_conformal.of_folds": by_folds,
    "cross_conformal.of_forest": by_random_forest,
    "crude.fit": of_calibrator(jc.crude.fit, neighbors=20),
    "deep_ensemble.fit": of_predictor(jc.deep_ensemble.fit, key=KEY, max_epochs=2, num_members=2),
    "density_ratio.fit": lambda x: jc.density_ratio.fit(x, x[20:])(x),
    "dropout.fit": of_predictor(jc.dropout.fit, key=KEY, max_epochs=2, num_samples=5),
    "evidential.fit": of_predictor(jc.evidential.fit, key=KEY, max_epochs=2),
    "fitted_models.untouched": jc.fitted_models.untouched,
    "forests.fit": of_predictor(jc.forests.fit, key=KEY, **FOREST),
    "forests.of_trees": by_grown_trees(lambda trees, x: jc.forests.of_trees(trees, x, Y)),
    "gaussian_mle.fit": of_calibrator(jc.gaussian_mle.fit),
    "gaussian_process.fit": of_predictor(jc.gaussian_process.fit, inference=EXACT),
    "isotonic.fit": of_calibrator(jc.isotonic.fit),
    "kmeans.fit": of_calibrator(jc.kmeans.fit, key=KEY),
    "metrics.worst_slab_coverage": lambda x: jc.metrics.worst_slab_coverage(x, Y, jc.Normal(0 * Y, 1.0), key=KEY),
    "mlp.fit": lambda x: jc.mlp.fit(x, Y, key=KEY, max_epochs=2)(x).mean,
    "neural_process.fit": of_predictor(jc.neural_process.fit, key=KEY, max_iterations=2, width=8),
    "neural_quantiles.fit": of_calibrator(jc.neural_quantiles.fit, jc.Normal(BASE.mean, 1.0), key=KEY, max_epochs=2),
    "online.check_inputs": lambda x: jc.online.check_inputs(x[:25], x[25:], key=KEY).auc,
    "out_of_fold": lambda x: jc.out_of_fold(fit_keyed, x, Y, key=KEY).mean,
    "pipeline.fit": of_predictor(jc.pipeline.fit, predictor=fit_first, method=Folds(folds=3), key=KEY),
    "pipeline.fit_chain": by_chain,
    "plots.prediction_band": in_a_picture,
    "quantile_boosting.fit": of_predictor(jc.quantile_boosting.fit, key=KEY, levels=(0.1, 0.5, 0.9), max_iter=5),
    "rio.fit": of_calibrator(jc.rio.fit, inference=EXACT),
    "sharp_gp.fit": by_sharp_gp,
    "usnrt.fit": of_predictor(jc.usnrt.fit, key=KEY, max_epochs=2, min_leaf=25),
    "variance_network.fit": of_predictor(jc.variance_network.fit, key=KEY, max_epochs=2),
}


# These take long to compile, for the columns that the others take as well.
COMPILED_LONG = {
    "accrue.fit",
    "deep_ensemble.fit",
    "dropout.fit",
    "evidential.fit",
    "neural_process.fit",
    "sharp_gp.fit",
    "usnrt.fit",
}


def functions_of(module, name=""):
    """The public functions of a module, and of the modules that are public in jaxcal, with their names."""
    for each in getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")]):
        found = getattr(module, each)
        if inspect.isfunction(found) and found.__module__.startswith(module.__name__):
            yield f"{name}{each}", found
        elif isinstance(found, ModuleType) and module is jc and each not in OF_NUMBERS:
            yield from functions_of(found, f"{each}.")


def test_every_public_function_that_takes_x_has_a_call():
    names = {function: name for name, function in reversed(list(functions_of(jc)))}
    takes_x = {name for function, name in names.items() if "x" in inspect.signature(function).parameters}
    assert takes_x == set(CALLS) | OF_ARRAYS


@LIBRARIES
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in COMPILED_LONG else n for n in CALLS])
def test_a_frame_is_its_numbers(name, library):
    frame = library.DataFrame({"size": X[:, 0], "age": X[:, 1]})
    np.testing.assert_allclose(CALLS[name](frame), CALLS[name](X), rtol=1e-4)


@LIBRARIES
def test_labels_and_missing_values_in_a_check_of_inputs(library):
    """The same result whichever rows are the new ones: nothing but them tells the two kinds apart."""
    labels = np.where(np.arange(N) == 50, "new", np.array(["red", "green", "blue"])[np.arange(N) % 3])
    age = np.where(np.arange(N) == 55, np.nan, X[:, 1])
    frame = library.DataFrame({"age": age, "color": labels})
    found = jc.online.check_inputs(frame[:25], frame[25:][["color", "age"]], key=KEY)
    assert (found.num_calibration, found.num_new) == (25, 35)
    columns = jc.frames.columns.Columns.of(frame)
    numbers = columns(frame)
    assert found == jc.online.check_inputs(numbers[:25], numbers[25:], key=KEY)
    shifted = library.DataFrame({"age": X[:, 1], "color": np.where(np.arange(N) < 30, "red", labels)})
    assert jc.online.check_inputs(shifted[:30], shifted[30:], key=KEY).auc > 0.6


@LIBRARIES
def test_frames_that_do_not_go_together_are_refused(library):
    frame = library.DataFrame({"size": X[:, 0], "age": X[:, 1]})
    check = partial(jc.online.check_inputs, frame, key=KEY)
    whole = library.DataFrame({"size": np.arange(N), "age": X[:, 1]})
    assert check(whole).num_new == N
    for wrong, message in (
        (X, "the inputs are a DataFrame and a ndarray: give two frames of one library, or two arrays"),
        (frame[["size"]], "x has no column 'age'; its columns are size"),
        (library.DataFrame({"size": ["a"] * N, "age": X[:, 1]}), "column 'size' holds Float64 in one frame, and Str"),
    ):
        with pytest.raises(ValueError, match=message):
            check(wrong)
    with pytest.raises(ValueError, match="x has 2 columns, size, age: give the one that the picture is over"):
        jc.plots.prediction_band(frame, BASE)
