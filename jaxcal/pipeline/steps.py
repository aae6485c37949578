"""The arguments of a pipeline: its steps, which are functions or estimators of scikit-learn, and groups of rows."""

import copy
import datetime
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from threadpoolctl import threadpool_limits

from jaxcal import _checks
from jaxcal.distributions import Distribution
from jaxcal.fitted_models import as_distribution, is_model, untouched
from jaxcal.fitted_models import as_prediction as as_prediction
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.labels import ColumnLabels, StdBins
from jaxcal.frames.layout import Series, Table, as_table, check_same_index, is_frame, num_rows
from jaxcal.gp import Exact, Nearest, Sparse, Stochastic
from jaxcal.gp.process import HoldsProcess
from jaxcal.pipeline.methods import Division
from jaxcal.predictors import _tree_arrays

_INFERENCES = {"exact": Exact, "sparse": Sparse, "nearest": Nearest, "stochastic": Stochastic}
# Folds differ by a few rows. For a larger ratio of rows the exact process may be too expensive.
_MORE_ROWS = 1.02
# Tables with at most this many numbers are too small for several threads.
_SMALL_TABLE = 200_000


class Estimator(eqx.Module):
    """A fitted model of another package as a function of inputs, which gives the model's own distribution."""

    model: Any

    def __call__(self, x: Table) -> Distribution:
        """The predictions of the rows, in the dtype of an array of numbers."""
        with _naming_dates(x):
            return as_distribution(self.model, x)

    def _to_save(self) -> "Estimator":
        """The estimator with arrays in place of trees of scikit-learn: `jaxcal.serialization`."""
        return Estimator(_tree_arrays.of_means(self.model))


class PrefittedModel(eqx.Module):
    """A fit that returns a model that is already fitted."""

    model: Any

    def __call__(self, x: Table, y: Float[Array, " n"]) -> Callable:
        """The model, whatever the rows."""
        return Estimator(self.model) if is_model(self.model) else checked(self.model)


class OfNumbers(eqx.Module):
    """The fit of an estimator that only takes numbers; labels of a data frame become indicators."""

    model: Any

    def __call__(
        self,
        x: Table,
        y: Float[Array, " n"],
        *,
        categorical: Categorical = (),
        sample_weight: Float[Array, " n"] | None = None,
    ) -> Callable:
        """The fitted estimator, after the columns of x."""
        columns = Columns.of(x, categorical)
        return _WithColumns(columns, _fit_estimator(self.model, columns(x), y, sample_weight=sample_weight))


class _WithColumns(eqx.Module):
    """A model of the numbers that `columns` makes of inputs."""

    columns: Columns
    model: Callable

    def __call__(self, x: Table) -> Distribution:
        return self.model(self.columns(x))


def as_fit(predictor: Any) -> Callable:
    """The fit function of a predictor, or the predictor if it is a fit function.

    Raises:
        TypeError: if the predictor is neither a function nor an object with fit and predict.
    """
    if hasattr(predictor, "fit") and is_model(predictor):
        return partial(_fit_estimator, predictor)
    return checked(predictor)


def _fit_estimator(
    estimator: Any, x: Table, y: Float[Array, " n"], *, sample_weight: Float[Array, " n"] | None = None
) -> Estimator:
    fresh = _unfitted(estimator)
    weights = {} if sample_weight is None else {"sample_weight": np.asarray(sample_weight)}
    with _naming_dates(x), _few_threads(estimator, x):
        fitted = fresh.fit(untouched(x), np.asarray(y), **weights)
    return Estimator(fresh if fitted is None else fitted)


def _few_threads(estimator: Any, x: Table) -> AbstractContextManager[Any]:
    """One thread of OpenMP for an estimator of scikit-learn on a small table, where more threads do not help.

    Boosted trees of 824 rows took 0.08 s with one thread, and 0.25 s with two threads beside a busy process.
    """
    is_of_sklearn = type(estimator).__module__.partition(".")[0] == "sklearn"
    return one_thread_for(math.prod(x.shape)) if is_of_sklearn else nullcontext()


def one_thread_for(number: int) -> AbstractContextManager[Any]:
    """One thread of OpenMP for a small table with this number of numbers."""
    return threadpool_limits(1, user_api="openmp") if number <= _SMALL_TABLE else nullcontext()


# The words for dates in the messages of NumPy and pandas.
_OF_DATES = re.compile("date|time|period", re.IGNORECASE)


@contextmanager
def _naming_dates(x: Table) -> Iterator[None]:
    """Let the error of an estimator that takes no dates name the columns that hold dates."""
    try:
        yield
    except TypeError as error:
        columns = _columns_of_dates(x) if is_frame(x) and _OF_DATES.search(str(error)) else []
        if not columns:
            raise
        named = ", ".join(map(repr, columns))
        raise ValueError(
            f"x holds dates or times in {'columns' if columns[1:] else 'column'} {named}, which the estimator does not "
            "take: make numbers of them, such as days, or drop them."
        ) from error


def _columns_of_dates(x: Any) -> list[str]:
    """The names of the columns that hold dates or times."""
    import narwhals.stable.v2 as nw

    frame = nw.from_native(x, eager_only=True)
    kinds = (datetime.date, datetime.time, datetime.timedelta)
    holds_dates = lambda column: any(isinstance(value, kinds) for value in column.to_list())
    is_of_dates = lambda column: (
        column.dtype.is_temporal() or column.dtype == nw.Unknown or (column.dtype == nw.Object and holds_dates(column))
    )
    return [column.name for column in frame.iter_columns() if is_of_dates(column)]


def _unfitted(estimator: Any) -> Any:
    """An unfitted copy, so that the models of different folds do not share what they learn."""
    if not hasattr(estimator, "get_params"):
        return copy.deepcopy(estimator)
    from sklearn.base import clone

    return clone(estimator)


def checked(step: Any) -> Callable:
    """The step, if it is a function.

    Raises:
        TypeError: if the step is not a function.
    """
    if not callable(step):
        name = str(getattr(step, "__name__", type(step).__name__))
        hint = f": did you mean {name}.fit?" if getattr(step, "fit", None) else "."
        raise TypeError(
            f"a step must be a fit function, or as predictor an object with fit and predict; got {name}{hint}"
        )
    return step


def with_key(
    fit: Callable, *arguments: Any, key: PRNGKeyArray, like: "Taken | None" = None, **options: Any
) -> Callable:
    """Call a fit function, with the key if it takes a key and has none of its own.

    Args:
        fit: the function.
        arguments: the rows to which it is fitted.
        key: random key.
        like: the inference that a fit to other rows chose. A process is fitted by the same inference, since comparing
            several inferences takes ten times as long if there are many rows. After an exact inference the fit chooses
            again if there are more rows, which may be too many.
        options: further options of the fit.

    Raises:
        TypeError: if the fit does not return a function.
    """
    parameters = inspect.signature(fit).parameters
    is_open = lambda name: name in parameters and parameters[name].default in (None, inspect.Parameter.empty)
    if is_open("key"):
        options["key"] = key
    if like is not None and like.suits(arguments[0]) and is_open("inference") and is_open("preset"):
        options["inference"] = _INFERENCES[like.inference]()
    return _checks.as_model(fit, fit(*arguments, **options))


class Taken(NamedTuple):
    """The inference by which a process was fitted, and its number of points."""

    inference: str
    number: int

    @classmethod
    def of(cls, model: Any) -> "Taken | None":
        """The inference of a fitted step; None if the step holds no process."""
        if not isinstance(model, HoldsProcess):
            return None
        return cls(model.inference, jax.tree.leaves(model.points)[0].shape[0])

    def suits(self, x: Table) -> bool:
        """Whether other rows can be fitted by this inference: the cost of exact inference is cubic."""
        return self.inference != "exact" or num_rows(x) < _MORE_ROWS * self.number


def name_of_weights(fit: Callable) -> str | None:
    """The name of the argument by which a fit takes weights of rows; None if it takes no weights."""
    step = fit
    while isinstance(step, partial):
        if step.func is _fit_estimator:  # which passes the weights on
            return "sample_weight" if _takes_sample_weight(step.args[0].fit) else None
        step = step.func
    return next((name for name in ("sample_weight", "weights") if name in inspect.signature(fit).parameters), None)


def _takes_sample_weight(fit: Callable) -> bool:
    """Whether the method of an estimator takes weights, by name or by `**kwargs`."""
    parameters = inspect.signature(fit).parameters
    return "sample_weight" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def with_weights(fit: Callable, weights: Float[Array, " n"] | None) -> Callable:
    """A fit of the weighted rows.

    Raises:
        ValueError: if the fit takes no weights.
    """
    if weights is None:
        return fit
    name = name_of_weights(fit)
    if name is None:
        raise ValueError(f"the predictor {name_of(fit)} takes neither sample_weight nor weights: fit without weights.")
    return partial(fit, **{name: weights})


def name_of(step: Any) -> str:
    """The name of a step: the module of a function called fit, else the name of the function or of the class."""
    step = step.model if isinstance(step, PrefittedModel | OfNumbers) else step
    while isinstance(step, partial):
        step = step.args[0] if step.func is _fit_estimator else step.func
    name = getattr(step, "__name__", type(step).__name__)
    return step.__module__.rpartition(".")[2] if name == "fit" else name


def as_table_and_targets(x: Table, y: Series) -> tuple[Table, Float[Array, " n"]]:
    """The inputs as they are passed on to the fits, and the checked targets.

    Raises:
        ValueError: if x or y is empty or of the wrong shape, or y is not finite. Also if x is a frame and y is a series
            with another index.
    """
    check_same_index(x, y)
    x = as_table(x)
    return x, _checks.as_vector("y", y, length=num_rows(x))


def columns_of(x: Table, categorical: Categorical) -> Categorical:
    """The columns of a table, for fits to parts of it, where a label may be missing.

    For an array without missing values these are the categorical columns.
    """
    has_missing = not (is_frame(x) or _checks.is_traced(x)) and _has_nan(np.asarray(x))
    if not (is_frame(x) or has_missing):
        return categorical
    try:
        return Columns.of(x, categorical, missing=has_missing)
    except ValueError:  # a fit that needs the columns raises it again
        return categorical


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def with_columns(fit: Callable, columns: Categorical) -> Callable:
    """The fit with the categorical columns as an argument, if it takes this argument and does not have it yet."""
    if not columns:
        return fit
    parameter = inspect.signature(fit).parameters.get("categorical")
    takes_it = parameter is not None and parameter.default == ()
    return partial(fit, categorical=columns) if takes_it else fit


# Groups of rows


class GroupSource(eqx.Module):
    """The source of the last step's groups: labels of the rows, or a function of x; made by `GroupSource.of`.

    Attributes:
        source: "labels", or the function; None without groups.
        labels: the labels of the rows of the fit [n]; None if the source is a function.
    """

    source: Any
    labels: np.ndarray | None

    @classmethod
    def of(cls, by: Series | str | Callable | None, num_rows: int) -> "GroupSource":
        """The groups that the argument `by` of `fit` describes."""
        if by is None or callable(by):
            return cls(by, None)
        if isinstance(by, str):
            return cls(ColumnLabels(by), None)
        return cls("labels", _checks.as_labels("by", by, num_rows))

    def part(self, rows: np.ndarray) -> "GroupSource":
        """The groups of some of the rows."""
        return GroupSource(self.source, None if self.labels is None else self.labels[rows])

    def without_labels(self) -> "GroupSource":
        """The source of the groups, which is all that new rows need."""
        return GroupSource(self.source, None)

    def check_rows(self, x: Table, division: Division) -> None:
        """Raise ValueError if the held-out rows of a group are all in one part, since other parts calibrate it."""
        if self.source is None or isinstance(self.source, StdBins):  # bins of predictions, which are not known yet
            return
        values = self.source(x) if self.labels is None else self.labels
        labels, number = np.unique(_checks.as_labels("by", values, num_rows(x)), return_inverse=True)
        held_out = number[division.rows]
        sizes = np.stack([np.bincount(held_out[part], minlength=len(labels)) for part in division.parts])
        too_few = (sizes > 0).sum(axis=0) < 2
        if too_few.any():
            size = int(sizes.sum(axis=0)[too_few][0])
            raise ValueError(
                f"by: the group {labels[too_few][0].item()!r} needs at least 2 held-out rows, in different folds; it "
                f"has {size}{', all in one fold' if size > 1 else ''}. Give more rows, or put it together with another "
                "group."
            )

    def told(self, fit: Callable) -> Callable:
        """The fit of the last step, with the source as its argument if the source is a function.

        Raises:
            ValueError: if the fit takes no groups.
        """
        if self.source is None:
            return fit
        if "by" not in inspect.signature(fit).parameters:
            raise ValueError(f"by: the last step {name_of(fit)} takes no groups; jaxcal.conformal.fit does.")
        return fit if self.source == "labels" else partial(fit, by=self.source)

    def of_rows(self, rows: np.ndarray) -> dict[str, Any]:
        """The arguments of the last step after x and predictions, for rows of the fit."""
        return {} if self.labels is None else {"by": self.labels[rows]}

    def of_new_rows(self, by: Series | None) -> dict[str, Any]:
        """The arguments of the last step after x and predictions, for new rows.

        Raises:
            ValueError: if labels are missing, or the fit had none.
        """
        if (by is None) == (self.source == "labels"):
            raise ValueError("by must be the labels of the rows if the fit had labels, and only then.")
        return {} if by is None else {"by": by}
