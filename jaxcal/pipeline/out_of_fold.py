"""Predictions of data points by models that were fitted without them: the only loop over folds."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, PRNGKeyArray

from jaxcal import _checks, _random, progress
from jaxcal._numpy import can_be_filled, in_jax
from jaxcal.distributions import Concatenated, Distribution
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions._rows import Rows
from jaxcal.distributions.concatenated import beneath_each_other
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Series, Table, take
from jaxcal.optimize import Result
from jaxcal.pipeline.folds import Fold, as_labels, drawn
from jaxcal.pipeline.side_by_side import in_threads, one_by_one, share_nothing
from jaxcal.pipeline.steps import as_prediction, as_table_and_targets, columns_of, with_columns

# The fit that a merged warning is about.
WITHOUT_A_FOLD = "in a fit without a fold, whose rows are numbered anew"


def out_of_fold(
    fit: Callable,
    x: Table,
    y: Series,
    *,
    key: PRNGKeyArray,
    categorical: Categorical = (),
    folds: int = 5,
    groups: ArrayLike | None = None,
) -> Distribution:
    """Predict every data point by a model that was fitted to the other folds, so that no data point is set aside.

    A calibrator that is fitted to these predictions corrects the model that is fitted to all data points,
    `fit(x, y, key=key)`. On new data points, the errors of that model are a little smaller than the out-of-fold errors.
    On its training points, its errors are very much smaller. No coverage guarantee follows from out-of-fold
    predictions, since another model will predict: `conformal` and `crude` refuse to give a guarantee. These calibrators
    recognize the predictions by `is_out_of_fold`. They do not recognize a distribution that is made anew from the means
    and stds.

    `jaxcal.pipeline` does all this in one call.

    Args:
        fit: `fit(x, y, key=key)` gives a function of inputs whose value is a Distribution or an array of means. It may
            be any predictor of jaxcal, with its options as a `functools.partial`, or a few lines around a model of
            another package.
        x: inputs [n, d], or a data frame, which is passed on as it is; a vector [n] is one column.
        y: targets [n].
        key: random key of the folds, and of the fits.
        categorical: the columns of x whose values have no order, for a `fit` that takes this argument.
        folds: number of folds, and of models. The sizes of folds differ by one at most. All models are fitted to
            equally many data points, so that nothing compiles again.
        groups: labels [n], of numbers or strings: data points of one group stay in one fold. Folds then differ in size.

    Returns:
        the predictions of all data points, in their order. They are a `Point` if the model gives means, and
        `Concatenated` if the rows of a fold share something.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty or of the wrong shape. Also if there are fewer data points or groups than folds,
            or folds is less than 2.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, key = np.linspace(-1, 1, 50), jax.random.key(0)
        >>> def fit_line(x, y, *, key):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> distribution = jc.out_of_fold(fit_line, x, x**3, key=key)
        >>> fitted = jc.accrue.fit(x, distribution, x**3, key=key, model="polynomial")
        >>> final = fit_line(x[:, None], x**3, key=key)
        >>> fitted(x, jc.Point(final(x[:, None]))).std.shape
        (50,)
    """
    x, y = as_table_and_targets(x, y)
    _checks.check_key(key)
    order_key, *keys = _random.split(key, folds + 1)
    parts = drawn(len(y), folds, as_labels(groups, len(y)), order_key)
    fit_rows = with_columns(fit, columns_of(x, categorical))
    _, predictions = models_of_folds(fit_rows, (x,), (y,), parts, keys, share_nothing=share_nothing([fit]))
    rows = [fold.held_out for fold in parts]
    return marked_out_of_fold(joined([as_prediction(part) for part in predictions], rows))


def models_of_folds(
    fit: Callable,
    inputs: tuple[Any, ...],
    targets: tuple[Array, ...],
    folds: Sequence[Fold],
    keys: Sequence[PRNGKeyArray],
    *,
    predict: Callable = lambda model, *inputs: model(*inputs),
    about: str | None = WITHOUT_A_FOLD,
    share_nothing: bool = False,
    begin: Callable | None = None,
    deadline: float | None = None,
    told: progress.Work | None = None,
) -> tuple[list[Callable], list[Any]]:
    """For each fold, a model that is fitted to its training rows, and its predictions of the held-out rows.

    On an accelerator the models are fitted in one `vmap`, if possible.

    Args:
        fit: `fit(*inputs, *targets, key=key)` gives a function of inputs.
        inputs: tables or predictions of all rows; None for a table that is missing.
        targets: y, and the weights if there are any.
        folds: the training rows and the held-out rows of each fit.
        keys: the random keys of the fits.
        predict: `predict(model, *inputs)` gives the predictions of a model.
        about: a clause that says what the warnings of the fits are about; None if the caller merges the warnings.
        share_nothing: whether several fits may run at once, as of `side_by_side.share_nothing`.
        begin: `begin(model)` gives the `fit` of the other folds, which may share a choice with the first model.
        deadline: in the time of `time.monotonic`; None for no deadline.
        told: the work that these fits are steps of; None for a work of their own.

    Raises:
        OutOfTime: if the deadline passes.
    """
    with nullcontext() if about is None else one_warning(about, in_threads=share_nothing):
        work = _FoldWork(fit, predict, inputs, targets, folds, keys, share_nothing, begin, deadline, told)
        stacked = _of_a_vmap(work) if jax.default_backend() != "cpu" else None
        return _one_each(work) if stacked is None else stacked


class _FoldWork(NamedTuple):
    """The arguments of `models_of_folds`."""

    fit: Callable
    predict: Callable
    inputs: tuple[Any, ...]
    targets: tuple[Array, ...]
    folds: Sequence[Fold]
    keys: Sequence[PRNGKeyArray]
    share_nothing: bool
    begin: Callable | None
    deadline: float | None
    told: progress.Work | None


def _one_each(work: _FoldWork) -> tuple[list[Callable], list[Any]]:
    """A fit for every fold, in threads if they are known to change nothing."""

    def one(fold_and_key: tuple[Fold, PRNGKeyArray], fit: Callable) -> tuple[Callable, Any]:
        fold, key = fold_and_key
        tables = take_rows(fold.training, *work.inputs, *work.targets)
        model = _fitted(fit, tables, tables[len(work.inputs)], key)
        return model, work.predict(model, *take_rows(fold.held_out, *work.inputs))

    folds, fit, results = list(zip(work.folds, work.keys, strict=True)), work.fit, []
    call_all = in_threads if work.share_nothing else one_by_one
    own = progress.work("cross-validation: models", len(folds), work.targets)
    with own if work.told is None else nullcontext(work.told) as told:
        if work.begin is not None:
            results += call_all(partial(one, fit=fit), folds[:1], told.advance, work.deadline)
            fit = work.begin(results[0][0])
        results += call_all(partial(one, fit=fit), folds[len(results) :], told.advance, work.deadline)
    return [model for model, _ in results], [prediction for _, prediction in results]


def _fitted(fit: Callable, tables: tuple[Any, ...], y: Array, key: PRNGKeyArray) -> Callable:
    """A model of training rows; an error says if their targets are constant, as the targets of a fold may be."""
    try:
        return _checks.as_model(fit, fit(*tables, key=key))
    except ValueError as error:
        if len(y) and not _checks.is_traced(y) and np.ptp(np.asarray(y)) == 0:
            raise ValueError(
                f"the {len(y)} training rows of a fold all have the target {y[0]:g}: give other folds. {error}"
            ) from error
        raise


def _of_a_vmap(work: _FoldWork) -> tuple[list[Callable], list[Any]] | None:
    """The same from one `vmap` of the fits; None if the fits must run one after another.

    The value is None if training parts differ in size, `fit` reads values, or memory does not suffice. It is also None
    if a result is not sound, since nothing is raised inside a transformation. Fits that run one after another raise the
    error.
    """
    fit, predict, inputs, targets, folds, keys, *_ = work
    tables, number = (*inputs, *targets), len(folds)
    can_be_stacked = number > 1 and all(isinstance(table, jax.Array) for table in tables)
    if not can_be_stacked or len({len(fold.training) for fold in folds}) > 1:
        return None
    rows = jnp.asarray(np.stack([fold.training for fold in folds]))
    try:
        fit_rows = lambda rows, key: fit(*(table[rows] for table in tables), key=key)
        stacked = eqx.filter_vmap(fit_rows)(rows, jnp.stack(keys))
        arrays, rest = eqx.partition(stacked, eqx.is_array)
        model_of = lambda k: eqx.combine(jax.tree.map(lambda leaf: leaf[k], arrays), rest)
        models = [model_of(k) for k in range(number)]
        rows_of = lambda fold: take_rows(fold.held_out, *inputs)
        predictions = [predict(model, *rows_of(fold)) for model, fold in zip(models, folds, strict=True)]
    except (TypeError, IndexError, jax.errors.JaxRuntimeError):  # the first two: values in a trace
        return None
    return (models, predictions) if _is_sound(stacked, predictions) else None


def _is_sound(models: Any, predictions: Any) -> bool:
    """Whether every optimization ended with a finite number, and no prediction is NaN."""
    is_code = lambda path: getattr(path[-1], "name", "") == "result" if path else False
    codes = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(models) if is_code(path)]
    numbers = [leaf for leaf in jax.tree.leaves(predictions) if eqx.is_inexact_array(leaf)]
    wrong = [*(code == Result.NOT_FINITE for code in codes), *map(jnp.isnan, numbers)]
    return not any(each.any() for each in wrong)


@contextmanager
def one_warning(about: str, *, in_threads: bool = False) -> Iterator[None]:
    """Merge the warnings of each category into one: what they are about, the first message, and the number of others.

    Warnings of threads come in any order: the first message is then the first in alphabetical order.
    """
    with warnings.catch_warnings(record=True) as caught:
        yield
    for category in dict.fromkeys(each.category for each in caught):
        messages = [each.message for each in caught if each.category is category]
        first, *others = sorted(messages, key=str) if in_threads else messages
        more = f" There were {len(others)} more." if others else ""
        _checks.warn(f"{about}: {first}{more}", category)


def joined(parts: Sequence[Any], rows: Sequence[np.ndarray]) -> Distribution:
    """The predictions of several models, in the order of the row numbers.

    Raises:
        ValueError: if a part does not predict as many rows as there are numbers.
    """
    whole = Concatenated(parts, rows)
    together = beneath_each_other(parts, np.argsort(np.concatenate(rows)))
    return whole if together is None else together


def take_rows(rows: Int[ArrayLike, " k"], *tables: Any) -> tuple[Any, ...]:
    """The rows with these numbers, of every table or prediction; None stays None."""
    return tuple(_taken(rows, table) for table in tables)


def _taken(rows: Int[ArrayLike, " k"], table: Any) -> Any:
    if table is None or isinstance(table, Rows):
        return None if table is None else table[rows]
    if not isinstance(table, jax.Array):
        return take(rows, table)
    is_of_keys = jnp.issubdtype(table.dtype, jax.dtypes.prng_key)
    if is_of_keys or not can_be_filled(table, rows):
        return _take_rows(rows, table)
    return in_jax(np.asarray(table)[np.asarray(rows)])  # NumPy needs no program for another number of rows


@jax.jit
def _take_rows(rows: Int[ArrayLike, " k"], array: Array) -> Array:
    return array[rows]
