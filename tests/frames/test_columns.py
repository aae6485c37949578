"""Data frames as inputs: names, labels and missing values, in every method and in pipelines, of pandas and polars."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcal as jc
from jaxcal.frames.columns import Columns
from jaxcal.frames.labels import ColumnBins, ColumnLabels

pandas = pytest.importorskip("pandas", reason="a data frame needs a library")
polars = pytest.importorskip("polars", reason="a data frame needs a library")
# In 32 bits the noise of these few rows is near to rounding.
pytestmark = pytest.mark.filterwarnings("ignore:the uncertainty is hardly greater")
LIBRARIES = pytest.mark.parametrize("library", [pandas, polars], ids=["pandas", "polars"])

RNG = np.random.default_rng(0)
N = 60
SIZE, AGE = RNG.normal(size=N), RNG.uniform(20, 60, size=N)
COLOR = np.array(["red", "green", "blue"])[np.arange(N) % 3]
Y = SIZE + 2 * (COLOR == "red") + 0.1 * RNG.normal(size=N)
KEY = jax.random.key(0)
# What a frame of these columns is to a method: numbers, and an indicator of each label in alphabetical order.
INPUTS = np.column_stack([SIZE, AGE, COLOR == "blue", COLOR == "green", COLOR == "red"])


def frame_of(library, rows=slice(None), **columns):
    columns = {"size": SIZE, "age": AGE, "color": COLOR, **columns}
    return library.DataFrame({name: np.asarray(values)[rows] for name, values in columns.items()})


@LIBRARIES
def test_labels_become_indicators_and_names_decide(library):
    columns = Columns.of(frame_of(library))
    np.testing.assert_allclose(columns(frame_of(library)), INPUTS)
    assert columns.indicators == (2, 3, 4)
    shuffled = frame_of(library)[["color", "size", "age"]]
    np.testing.assert_allclose(columns(shuffled), INPUTS)
    np.testing.assert_allclose(columns(frame_of(library, more=AGE)), INPUTS)
    with pytest.raises(ValueError, match=r"x has no column 'age'; its columns are size, color\."):
        columns(frame_of(library)[["size", "color"]])


@LIBRARIES
def test_truth_values_categories_and_numbers_that_are_named_categorical(library):
    frame = frame_of(library, old=AGE > 40, code=np.arange(N) % 4)
    if library is pandas:
        frame["color"] = frame["color"].astype("category")
    else:
        frame = frame.with_columns(polars.col("color").cast(polars.Categorical))
    columns = Columns.of(frame, ["code"])
    assert columns.categories[2] == ("blue", "green", "red")
    assert columns.categories[4] == (0.0, 1.0, 2.0, 3.0)
    found = np.asarray(columns(frame))
    np.testing.assert_array_equal(found[:, 2], AGE > 40)
    np.testing.assert_array_equal(found[:, -4:], np.eye(4)[np.arange(N) % 4])


def test_a_categorical_column_of_an_array():
    x = np.column_stack([SIZE, np.arange(N) % 3 * 10.0])
    columns = Columns.of(x, [1])
    np.testing.assert_array_equal(columns(x)[:, 1:], np.eye(3)[np.arange(N) % 3])
    np.testing.assert_array_equal(jax.jit(columns)(x), columns(x))
    with pytest.raises(TypeError, match="x is traced"):
        jax.jit(lambda x: Columns.of(x, [1])(x))(x)
    with pytest.raises(ValueError, match=r"categorical must hold columns of x, 0 to 1; got \(2,\)"):
        Columns.of(x, [2])


def test_missing_values_of_an_array_become_medians_and_indicators():
    x = np.column_stack([SIZE, AGE, np.arange(N) % 3])
    x[3, 0] = x[5, 2] = np.nan
    with pytest.raises(ValueError, match="x holds 2 values that are NaN"):
        Columns.of(x, [2])(x)
    columns = Columns.of(x, [2], missing=True)
    found = np.asarray(columns(x))
    np.testing.assert_allclose(found[3, 0], np.nanmedian(x[:, 0]))
    np.testing.assert_array_equal(found[:, 2], np.arange(N) == 3)
    np.testing.assert_array_equal(found[:, -1], np.arange(N) == 5)
    np.testing.assert_array_equal(jax.jit(columns)(x), found)
    with pytest.raises(ValueError, match=r"missing values where the fit had none: column 1 \(1\)"):
        columns(np.where(np.arange(3) == 1, np.nan, x[:1]))
    with pytest.raises(ValueError, match="x holds 1 values that are NaN or infinite"):
        columns(np.where(np.arange(3) == 0, np.inf, x[:1]))
    with pytest.raises(ValueError, match="column 0 of x has no value at all"):
        Columns.of(np.where(np.arange(3) == 0, np.nan, x), missing=True)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">f2", ">i4", "f2", np.longdouble])
def test_columns_of_pandas_hold_numbers_of_any_order_of_bytes_and_precision(dtype):
    whole = np.round(AGE).astype(dtype)
    short = whole.dtype.kind == "f" and whole.dtype.itemsize <= 4
    frame = pandas.DataFrame({"age": whole, "old": np.where(AGE > 40, 1, 2).astype(dtype)})
    columns = Columns.of(frame)
    found = columns(pandas.DataFrame({"old": frame["old"], "age": whole}))
    assert found.dtype == jnp.zeros(0, np.float32 if short else float).dtype
    np.testing.assert_array_equal(found[:, 0], whole.astype(float))
    assert Columns.of(frame, ["old"]).categories == (None, (1.0, 2.0))
    fit_age = lambda x, y, *, key: lambda x: x["age"].to_numpy()
    np.testing.assert_array_equal(jc.out_of_fold(fit_age, frame, Y, key=KEY).mean, whole.astype(float))


@pytest.mark.skipif(not hasattr(polars, "Float16"), reason="polars of this version has no Float16")
def test_half_precision_of_polars_is_computed_in_float32():
    frame = polars.DataFrame({"age": polars.Series([1.5, None, 3.5], dtype=polars.Float16)})
    found = Columns.of(frame)(frame)
    np.testing.assert_array_equal(found, [[1.5, 0], [2.5, 1], [3.5, 0]])
    assert found.dtype == np.float32


@LIBRARIES
def test_missing_numbers_are_the_median_and_an_indicator(library):
    age = np.where(np.arange(N) % 4 == 0, np.nan, AGE)
    columns = Columns.of(frame_of(library, age=age))
    found = np.asarray(columns(frame_of(library, age=age)))
    missing = np.arange(N) % 4 == 0
    np.testing.assert_array_equal(found[:, 2], missing)
    np.testing.assert_allclose(found[missing, 1], np.median(AGE[~missing]))
    np.testing.assert_allclose(found[~missing, 1], AGE[~missing])
    assert columns.indicators == (2, 3, 4, 5)
    # A missing value where the fit had none has no indicator.
    with pytest.raises(ValueError, match=r"missing values where the fit had none: column 'size' \(60\)"):
        columns(frame_of(library, size=np.full(N, np.nan), age=age))


@LIBRARIES
def test_a_missing_label_is_a_label(library):
    color = [None if k % 5 == 0 else str(value) for k, value in enumerate(COLOR)]
    columns = Columns.of(frame_of(library, color=color))
    assert columns.categories[2] == ("blue", "green", "red", None)
    assert columns.shown_labels()[2][-1] == "missing"
    np.testing.assert_array_equal(columns(frame_of(library, color=color))[:, -1], np.arange(N) % 5 == 0)


def test_a_missing_label_of_a_string_column_of_pandas_is_a_label():
    frame = pandas.DataFrame({"size": SIZE[:4], "color": pandas.array(["red", None, "blue", "red"], dtype="string")})
    columns = Columns.of(frame)
    assert columns.categories[1] == ("blue", "red", None)
    np.testing.assert_array_equal(columns(frame)[:, 1:], np.eye(3)[[1, 2, 0, 1]])


@LIBRARIES
def test_a_label_that_was_not_there_is_none_of_them_and_warns(library):
    columns = Columns.of(frame_of(library))
    with pytest.warns(UserWarning, match=r"column 'color' of x holds 'pink', which is none of the 3 .*: 60 rows"):
        found = columns(frame_of(library, color=["pink"] * N))
    np.testing.assert_array_equal(found[:, 2:], 0)
    of_array = Columns.of(np.column_stack([SIZE, np.arange(N) % 3]), [1])
    with pytest.warns(UserWarning, match="column 1 of x holds 7"):
        np.testing.assert_array_equal(of_array(np.array([[0.0, 7.0]]))[:, 1:], 0)


@LIBRARIES
def test_columns_that_are_no_inputs_are_refused_by_name(library):
    name = [f"row {k}" for k in range(N)]
    with pytest.raises(ValueError, match="column 'name' of x holds 60 different labels in 60 rows: it seems to name"):
        Columns.of(frame_of(library, name=name))
    assert len(Columns.of(frame_of(library, name=name), ["name"]).categories[3]) == N
    day = np.arange(N).astype("datetime64[D]")
    with pytest.raises(ValueError, match=r"column 'day' of x holds Date.*, which is neither numbers nor labels"):
        Columns.of(frame_of(library, day=day))
    with pytest.raises(ValueError, match="column 'age' of x holds 60 values that are infinite"):
        Columns.of(frame_of(library, age=np.full(N, np.inf)))


def test_frames_without_values_or_with_one_name_twice_are_refused():
    twice = pandas.DataFrame(np.ones((3, 2)), columns=["a", "a"])
    with pytest.raises(ValueError, match="must have different names; got a, a"):
        Columns.of(twice)
    with pytest.raises(TypeError, match="x is a LazyFrame, which is no data frame with values: collect it"):
        Columns.of(frame_of(polars).lazy())


def test_rows_that_do_not_belong_together_are_refused():
    frame, y = frame_of(pandas), pandas.Series(Y)
    shuffled = y.sample(frac=1, random_state=0)
    for fit in (partial(jc.mlp.fit, key=KEY, max_epochs=2), partial(jc.pipeline.fit, predictor=fit_mean, key=KEY)):
        with pytest.raises(ValueError, match="x and y have different indices"):
            fit(frame, shuffled)
    with pytest.raises(ValueError, match="x and y have different indices"):
        jc.rio.fit(frame, jc.Point(np.zeros(N)), shuffled)
    jc.rio.fit(frame, jc.Point(np.zeros(N)), y, inference=jc.gp.Exact(max_iterations=1))


def fit_mean(x, y):
    return lambda x: jnp.full(len(x), y.mean())


PREDICTORS = {
    "mlp": partial(jc.mlp.fit, key=KEY, max_epochs=5),
    "variance_network": partial(jc.variance_network.fit, key=KEY, max_epochs=5),
    "deep_ensemble": partial(jc.deep_ensemble.fit, key=KEY, max_epochs=2, num_members=2),
    "dropout": partial(jc.dropout.fit, key=KEY, max_epochs=2, num_samples=5),
    "evidential": partial(jc.evidential.fit, key=KEY, max_epochs=2),
    "gaussian_process": jc.gaussian_process.fit,
    "neural_process": partial(jc.neural_process.fit, key=KEY, max_iterations=5, width=8),
    "usnrt": partial(jc.usnrt.fit, key=KEY, max_epochs=2, min_leaf=25),
    "random_forest": partial(jc.forests.fit, key=KEY, model="random_forest", num_trees=20),
    "quantile_boosting": partial(jc.quantile_boosting.fit, key=KEY, levels=(0.1, 0.5, 0.9), max_iter=5),
}
CALIBRATORS = {
    "rio": jc.rio.fit,
    "accrue": partial(jc.accrue.fit, key=KEY, restarts=1, max_iterations=5),
    "kmeans": partial(jc.kmeans.fit, key=KEY),
    "crude": partial(jc.crude.fit, neighbors=20),
    "conditional_conformal": partial(jc.conditional_conformal.fit, confidence_levels=(0.8,)),
    "sharp_gp": lambda x, base, y: jc.sharp_gp.fit(x[:40], base_of(40), y[:40], x_train=x[40:], y_train=y[40:]),
}


# These take long to compile, for the columns that the others take as well.
COMPILED_LONG = {
    "deep_ensemble",
    "dropout",
    "evidential",
    "gaussian_process",
    "neural_process",
    "usnrt",
    "accrue",
    "sharp_gp",
}


def methods(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in COMPILED_LONG else name for name in names]


def base_of(number):
    return jc.Point(np.zeros(number))


@pytest.mark.parametrize("name", methods(PREDICTORS))
def test_predictors_take_frames(name):
    """In another order of columns the same rows have the same predictions."""
    frame = frame_of(polars)
    fitted = PREDICTORS[name](frame, Y)
    assert fitted.columns.categories[2] == ("blue", "green", "red")
    np.testing.assert_array_equal(fitted(frame[["color", "age", "size"]]).mean, fitted(frame).mean)
    by_position = PREDICTORS[name](np.column_stack([SIZE, AGE, np.unique(COLOR, return_inverse=True)[1]]), Y)
    assert by_position.columns.categories == (None, None, None)


@pytest.mark.parametrize("name", methods(CALIBRATORS))
def test_calibrators_take_frames(name):
    frame = frame_of(polars)
    fitted = CALIBRATORS[name](frame, base_of(N), Y)
    forecast = fitted(frame[["color", "age", "size"]], base_of(N))
    np.testing.assert_array_equal(forecast.icdf(0.9), fitted(frame, base_of(N)).icdf(0.9))


def test_features_that_are_a_frame_are_indicators_of_its_labels():
    """And so are those that a function makes of x."""
    fit = partial(jc.conditional_conformal.fit, confidence_levels=(0.5, 0.8))
    frame, kinds = frame_of(polars), COLOR[:, None] == np.unique(COLOR)[None]
    given = fit(None, base_of(N), Y, features=kinds)(None, base_of(N), features=kinds)
    of_frame = fit(None, base_of(N), Y, features=frame[["color"]])(None, base_of(N), features=frame[["color"]])
    of_function = fit(frame, base_of(N), Y, features=lambda x: x[["color"]])(frame, base_of(N))
    for found in (of_frame, of_function):
        np.testing.assert_allclose(found.icdf(0.9), given.icdf(0.9), rtol=1e-5)
    with pytest.raises(ValueError, match="features has 60 rows where 59 are expected"):
        fit(frame, base_of(59), Y[:59])


@LIBRARIES
def test_bins_and_labels_of_a_column_of_a_frame(library):
    frame = frame_of(library)
    by = ColumnBins.of(frame, column="age", number=4)
    np.testing.assert_array_equal(by(frame), ColumnBins.of(AGE, number=4)(AGE))
    assert ColumnBins.of(frame, column=1).column == "age"
    np.testing.assert_array_equal(by(frame[["color", "age"]]), by(frame))
    np.testing.assert_array_equal(ColumnBins.of(AGE[:, None])(frame[["age"]]), ColumnBins.of(AGE)(AGE))
    np.testing.assert_array_equal(ColumnLabels("color")(frame), COLOR)
    for wrong, message in (
        (lambda: ColumnBins.of(frame, column="weight"), "column must be one of 0 to 2, or size, age, color; got 'wei"),
        (lambda: ColumnBins.of(frame, column="color"), "column 'color' of x holds labels, where numbers are needed"),
        (lambda: by(np.ones((3, 2))), "the bins are those of the column 'age' of a data frame: give x as one"),
        (lambda: by(frame[["size"]]), "x has no column 'age'; its columns are size"),
        (lambda: ColumnBins.of(np.ones((3, 3)), column=2)(np.ones((3, 2))), "x has 2 columns; the bins are those of c"),
        (lambda: ColumnLabels("color")(frame_of(library, color=[None] * N)), "'color' of x has no label in 60 rows"),
        (lambda: ColumnLabels("kind")(frame), "x has no column 'kind'; its columns are size, age, color"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@LIBRARIES
def test_the_density_ratio_of_frames(library):
    frame, new = frame_of(library), frame_of(library, slice(20, 60), size=SIZE + 1)
    ratio = jc.density_ratio.fit(frame, new)
    by_arrays = jc.density_ratio.fit(INPUTS, INPUTS[20:] + np.eye(5)[0])
    np.testing.assert_allclose(ratio(new[["color", "age", "size"]]), by_arrays(INPUTS[20:] + np.eye(5)[0]), rtol=1e-4)
    with pytest.raises(ValueError, match="new_x cannot stand beside x: x has no column 'color'"):
        jc.density_ratio.fit(frame, new[["age", "size"]])
    with pytest.warns(UserWarning, match="column 'color' of x holds 'pink'"):
        jc.density_ratio.fit(frame, frame_of(library, color=["pink"] * N))


def test_indicators_have_no_scale_of_the_data():
    """However rare a label is, its rows are no farther from the others than those of another."""
    rare = np.where(np.arange(N) == 0, "rare", "usual")
    process = jc.gaussian_process.fit(frame_of(polars, color=rare), Y, inference=jc.gp.Exact(ard=False))
    np.testing.assert_array_equal(process.x_scaler.scale[2:], 1)
    np.testing.assert_array_equal(process.x_scaler.loc[2:], 0)


def test_labels_explain_what_numbers_do_not():
    with_labels = jc.gaussian_process.fit(frame_of(polars), Y)
    without = jc.gaussian_process.fit(frame_of(polars)[["size", "age"]], Y)
    assert with_labels(frame_of(polars)).std.mean() < 0.3 * without(frame_of(polars)).std.mean()


@LIBRARIES
@pytest.mark.parametrize("method", ["folds", pytest.param("split", marks=pytest.mark.slow), "cv+"])
def test_a_frame_comes_untouched_to_a_users_fit(library, method):
    """And the folds of a jaxcal step know the labels of all rows, one of which only one row has."""
    frame, kinds = frame_of(library, color=np.where(np.arange(N) == 7, "only", COLOR)), set()

    def fit_user(x, y):
        kinds.add(type(x))
        return lambda x: np.asarray(x["size"], float)

    by_rio = partial(jc.rio.fit, inference=jc.gp.Exact(max_iterations=2))
    fitted = jc.pipeline.fit(
        frame,
        Y,
        predictor=fit_user,
        calibrators=[by_rio],
        method=method,
        key=KEY,
    )
    assert kinds == {library.DataFrame}
    assert fitted(frame[["color", "size", "age"]]).mean.shape == (N,)
    with pytest.raises(ValueError, match="x has no column 'size'"):
        fitted(frame[["color", "age"]])


def test_a_pipeline_of_scikit_learn_gets_the_frame():
    sklearn_pipeline = pytest.importorskip("sklearn.pipeline")
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(handle_unknown="ignore")
    model = sklearn_pipeline.make_pipeline(
        make_column_transformer((encoder, ["color"]), remainder="passthrough"), Ridge()
    )
    frame = frame_of(pandas)
    fitted = jc.pipeline.fit(frame, pandas.Series(Y), predictor=model, key=KEY)
    np.testing.assert_allclose(fitted.means(frame), model.fit(frame, Y).predict(frame), rtol=1e-5)
    forecast = jc.out_of_fold(lambda x, y, *, key: model.fit(x, y).predict, frame, Y, key=KEY)
    assert jc.metrics.rmse(Y, forecast) < 0.5


def test_a_pipeline_takes_missing_values_of_an_array_with_any_predictor():
    ensemble = pytest.importorskip("sklearn.ensemble")
    x = np.column_stack([SIZE, np.where(np.arange(N) % 3, AGE, np.nan)])
    fitted = jc.pipeline.fit(x, Y, predictor=ensemble.HistGradientBoostingRegressor(max_iter=5), key=KEY)
    assert np.isfinite(fitted(x).interval(0.8)).all()
    with pytest.raises(ValueError, match="x holds 20 values that are NaN"):
        jc.mlp.fit(x, Y, max_epochs=2, key=KEY)
    fitted = jc.pipeline.fit(x, Y, predictor=partial(jc.mlp.fit, max_epochs=2), key=KEY)
    frame = pandas.DataFrame({"size": x[:, 0], "age": x[:, 1]})
    of_frame = jc.pipeline.fit(frame, Y, predictor=partial(jc.mlp.fit, max_epochs=2), key=KEY)
    np.testing.assert_allclose(fitted(x).mean, of_frame(frame).mean, rtol=1e-5, atol=1e-5)


def test_folds_do_not_warn_of_labels_that_other_folds_have():
    frame = frame_of(polars, color=np.where(np.arange(N) == 7, "only", COLOR))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = jc.out_of_fold(partial(jc.mlp.fit, max_epochs=2), frame, Y, key=KEY)
    assert forecast.mean.shape == (N,)
