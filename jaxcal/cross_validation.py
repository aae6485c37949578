"""Predictions of data points by models that were fitted without them."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks, progress
from jaxcal.distributions import Concatenated, Distribution, Point
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions.concatenated import beneath_each_other
from jaxcal.frames.columns import Categorical, Columns
from jaxcal.frames.layout import Series, Table, as_table, check_same_index, is_frame, num_rows, take
from jaxcal.optimize import Result

# What a warning of one of several fits is about.
WITHOUT_A_FOLD = "in a fit without a fold, which counts its rows anew"
# Without a fifth of few rows errors are larger than those of the final model, and intervals too wide: 2 % of coverage
# and 8 % of width on 250 to 500 rows (`benchmarks/results/pipelines.md`).
_FOLDS_OF_FEW_ROWS, _FOLDS, _FEW_ROWS = 10, 5, 1000


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
    """Predict every data point by a model that was fitted to the other folds, so that none is set aside.

    A calibrator fitted to them corrects the model that is fitted to all data points, `fit(x, y, key=key)`. That model's
    errors on new ones are a little smaller than those out of fold, its errors on its own very much smaller. No coverage
    guarantee follows from them, since the model that will predict is another one: `conformal` and `crude` refuse it.
    They know these predictions by `is_out_of_fold`, not a distribution that is made anew from their means and stds.

    `jaxcal.pipeline` does all of this in one call.

    Args:
        fit: `fit(x, y, key=key)` gives a function of inputs whose value is a Distribution or an array of means: any
            predictor of jaxcal with its options as a `functools.partial`, or a few lines around somebody else's.
        x: inputs [n, d], or a data frame, which is handed on as it is; a vector [n] is one column.
        y: targets [n].
        key: random key of the folds, and of the fits.
        categorical: the columns of x whose values have no order, for a `fit` that takes that.
        folds: number of folds, whose sizes differ by one at most; so many models are fitted, each to equally many data
            points, so that nothing compiles anew.
        groups: labels [n], of numbers or strings: data points of one group stay in one fold. Folds then differ in size.

    Returns:
        the predictions of all data points, in their order; a `Point` where the model gives means, `Concatenated` where
        the rows of a fold share something.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty or of the wrong shape, there are fewer data points or groups than folds, or folds
            is less than 2.

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
    order_key, *keys = jax.random.split(key, folds + 1)
    parts = folds_of(len(y), folds, as_labels(groups, len(y)), order_key)
    fit = with_columns(fit, columns_of(x, categorical))
    predictions = [as_distribution(part) for part in predictions_of_folds(fit, x, y, parts, keys)]
    return marked_out_of_fold(joined(predictions, [fold.held_out for fold in parts]))


def as_table_and_targets(x: Table, y: Series) -> tuple[Table, Float[Array, " n"]]:
    """Inputs that are handed on to whatever is fitted, and checked targets.

    Raises:
        ValueError: if x or y is empty or of the wrong shape, y is not finite, or x is a frame and y a series of another
            index.
    """
    check_same_index(x, y)
    x = as_table(x)
    return x, _checks.as_vector("y", y, length=num_rows(x))


def columns_of(x: Table, categorical: Categorical) -> Categorical:
    """The columns of a frame, for fits to parts of it, which may lack a label; of an array what is categorical."""
    if not is_frame(x):
        return categorical
    try:
        return Columns.of(x, categorical)
    except ValueError:  # not for these methods; it is raised again by a fit that needs them
        return categorical


def with_columns(fit: Callable, columns: Categorical) -> Callable:
    """A fit that is told which columns are categorical, if it takes that and is not told already."""
    if not columns:
        return fit
    parameter = inspect.signature(fit).parameters.get("categorical")
    takes_it = parameter is not None and parameter.default == ()
    return partial(fit, categorical=columns) if takes_it else fit


class Fold(NamedTuple):
    """The numbers of the rows that a model is fitted to, and of those that it predicts."""

    training: np.ndarray
    held_out: np.ndarray


def as_folds(name: str, folds: Iterable, num_rows: int) -> list[Fold]:
    """Folds that are given: as the rows of each, or as pairs of training rows and held-out rows.

    Args:
        name: of the argument.
        folds: the numbers of rows of each fold, or a mask; or pairs of these, as the splitters of scikit-learn give
            them.
        num_rows: the number of rows.

    Raises:
        ValueError: if lists do not hold every row once; if pairs hold out a row several times, or a row that is among
            their training rows; if one of them is empty or holds no numbers of rows.
    """
    given = list(folds)
    pairs = [each for each in given if isinstance(each, tuple | list) and len(each) == 2 and np.ndim(each[0])]
    if not given or 0 < len(pairs) < len(given):
        raise ValueError(f"{name} must hold lists of row numbers, or pairs of training rows and held-out rows.")
    if not pairs:
        parts = [_row_numbers(name, each, num_rows) for each in given]
        if len(parts) < 2 or not np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_rows)):
            raise ValueError(
                f"{name} must be a number, or two lists of row numbers or more that hold every row once. Give pairs "
                "of training rows and held-out rows for other folds."
            )
        return [Fold(np.setdiff1d(np.arange(num_rows), part), part) for part in parts]
    found = [Fold(*(_row_numbers(name, rows, num_rows) for rows in pair)) for pair in pairs]
    for number, fold in enumerate(found):
        if (both := np.intersect1d(fold.training, fold.held_out)).size:
            raise ValueError(
                f"{name} must hold out other rows than it trains on; row {both[0]} is both in fold {number}. Its error "
                "would not be out of sample."
            )
    times = np.bincount(np.concatenate([fold.held_out for fold in found]), minlength=num_rows)
    if times.max() > 1:
        raise ValueError(
            f"{name} must hold out every row once at most; row {times.argmax()} is held out {times.max()} times. Give "
            "folds that share no held-out rows."
        )
    if times.sum() < 2:
        raise ValueError(f"{name} must hold out at least 2 rows; got 1.")
    return found


def _row_numbers(name: str, rows: Any, num_rows: int) -> np.ndarray:
    """The numbers of rows that are given as such, or as a mask."""
    found = np.asarray(rows)
    if found.dtype == bool and found.shape == (num_rows,):
        found = np.flatnonzero(found)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"{name} must hold vectors of row numbers, none empty; got one of shape {found.shape}.")
    if found.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold row numbers; got some of dtype {found.dtype}.")
    if found.min() < 0 or found.max() >= num_rows:
        raise ValueError(f"{name} must hold row numbers from 0 to {num_rows - 1}; got {found.min()} to {found.max()}.")
    return found.astype(int)


def as_labels(groups: ArrayLike | None, num_rows: int) -> np.ndarray | None:
    """The labels of the groups, if there are any.

    Raises:
        ValueError: if they are not as many as the rows.
    """
    return None if groups is None else _checks.as_labels("groups", groups, num_rows)


def number_of_groups(num_rows: int, groups: np.ndarray | None) -> int:
    """How many parts folds can have at most: of rows, or of groups of them."""
    return num_rows if groups is None else len(np.unique(groups))


def number_of_folds(folds: int | None, num_rows: int, num_groups: int) -> int:
    """Those that were asked for, or as many as the rows need and the groups allow."""
    if folds is not None:
        return folds
    return max(2, min(num_groups, _FOLDS_OF_FEW_ROWS if num_rows <= _FEW_ROWS else _FOLDS))


def folds_of(num_rows: int, folds: int, groups: np.ndarray | None, key: PRNGKeyArray) -> list[Fold]:
    """Folds at random, whose training parts have equally many rows; or folds of whole groups.

    Raises:
        ValueError: if there are fewer rows or groups than folds, or folds is less than 2.
    """
    order = _random_order(num_rows, folds, key)
    if groups is None:
        _check_enough(num_rows, folds)
        parts = np.array_split(order, folds)
        at_most = num_rows - len(parts[0])
    else:
        parts, at_most = _parts_of_groups(groups, folds, order), num_rows
    rest = lambda k: np.concatenate(parts[:k] + parts[k + 1 :])
    return [Fold(rest(k)[:at_most], part) for k, part in enumerate(parts)]


def equal_folds_of(num_rows: int, folds: int, key: PRNGKeyArray) -> list[Fold]:
    """Folds at random, all of n // folds rows. The rest, fewer rows than folds, is in the training part of each.

    Raises:
        ValueError: if there are fewer rows than folds, or folds is less than 2.
    """
    order = _random_order(num_rows, folds, key)
    _check_enough(num_rows, folds)
    size = num_rows // folds
    return [
        Fold(np.delete(order, slice(start, start + size)), order[start : start + size])
        for start in range(0, size * folds, size)
    ]


def _random_order(num_rows: int, folds: int, key: PRNGKeyArray) -> np.ndarray:
    _checks.check_at_least("folds", folds, 2)
    with jax.ensure_compile_time_eval():
        return np.asarray(_permutation(key, num_rows))


_permutation = jax.jit(jax.random.permutation, static_argnums=1)  # one program


def _check_enough(num_rows: int, folds: int) -> None:
    if num_rows < folds:
        raise ValueError(f"x has {num_rows} rows; at least {folds} are needed for {folds} folds.")


def out_of_bag_weights(in_bag: np.ndarray) -> np.ndarray:
    """For every row equal weights, with sum 1, of the models whose samples it is not in.

    Args:
        in_bag: [m, n] whether row i is in the sample of model k.

    Raises:
        ValueError: if there is a row that is in all samples.
    """
    without = ~in_bag
    numbers = without.sum(axis=0)
    if not numbers.all():
        row = int(numbers.argmin())
        raise ValueError(
            f"row {row} is in the bootstrap samples of all {len(in_bag)} models: none was fitted without it. Fit more."
        )
    return without / numbers


def _parts_of_groups(groups: np.ndarray, folds: int, order: np.ndarray) -> list[np.ndarray]:
    """Whole groups in parts of about equal size: the largest group first, each to the smallest part."""
    labels, first, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    if len(labels) < folds:
        raise ValueError(f"there are {len(labels)} groups; at least {folds} are needed for {folds} folds.")
    parts, filled = [[] for _ in range(folds)], np.zeros(folds, int)
    for label in np.lexsort((first, -sizes)):  # of equal sizes in random order
        smallest = filled.argmin()
        parts[smallest].append(order[groups[order] == labels[label]])
        filled[smallest] += sizes[label]
    return [np.concatenate(part) for part in parts]


def predictions_of_folds(
    fit: Callable,
    x: Table,
    y: Array,
    parts: Sequence[Fold],
    keys: Sequence[PRNGKeyArray],
    *,
    weights: Array | None = None,
) -> list[Any]:
    """What each fold is predicted by a model that was fitted to the others, and to their weights where there are some.

    On an accelerator the models are fitted in one `vmap`, where that can be done.
    """
    with one_warning(WITHOUT_A_FOLD):
        return [predicted for _, predicted in _fitted_to_folds(fit, _tables(x, y, weights), parts, keys)]


def models_of_folds(
    fit: Callable,
    x: Table,
    y: Array,
    parts: Sequence[Fold],
    keys: Sequence[PRNGKeyArray],
    *,
    weights: Array | None = None,
    about: str = WITHOUT_A_FOLD,
) -> tuple[list[Callable], list[Any]]:
    """The models of `predictions_of_folds`, which it does not keep, and these predictions; warnings name `about`."""
    with one_warning(about):
        models, predictions = zip(*_fitted_to_folds(fit, _tables(x, y, weights), parts, keys), strict=True)
    return list(models), list(predictions)


def _tables(x: Table, y: Array, weights: Array | None) -> tuple[Any, ...]:
    """What a fit takes of rows."""
    return (x, y) if weights is None else (x, y, weights)


def _fitted_to_folds(
    fit: Callable, tables: tuple[Any, ...], parts: Sequence[Fold], keys: Sequence[PRNGKeyArray]
) -> list[tuple[Callable, Any]]:
    """A model for each fold, and what it predicts of it."""
    if jax.default_backend() != "cpu":
        found = _of_a_vmap(fit, tables, parts, keys)
        if found is not None:
            return found
    found = []
    with progress.work("cross-validation: models", len(parts), tables) as work:
        for fold, key in zip(parts, keys, strict=True):
            model = _fitted(fit, take_rows(fold.training, *tables), key)
            found.append((model, model(*take_rows(fold.held_out, tables[0]))))
            work.advance()
    return found


def _fitted(fit: Callable, tables: tuple[Any, ...], key: PRNGKeyArray) -> Callable:
    """A model of training rows; an error says where these have one target, as those of a fold may have."""
    try:
        return _checks.as_model(fit, fit(*tables, key=key))
    except ValueError as error:
        if not _checks.is_traced(tables[1]) and np.ptp(y := np.asarray(tables[1])) == 0:
            raise ValueError(
                f"the {len(y)} training rows of a fold have one target alone, {y[0]:g}: give other folds. {error}"
            ) from error
        raise


def _of_a_vmap(
    fit: Callable, tables: tuple[Any, ...], parts: Sequence[Fold], keys: Sequence[PRNGKeyArray]
) -> list[tuple[Callable, Any]] | None:
    """The same from one `vmap` of the fits; None where the fits must run one after another.

    That is where training parts differ in size, `fit` reads values or memory does not suffice; and where something went
    wrong, since inside a transformation nothing is raised: one after another, they say what.
    """
    if len({len(fold.training) for fold in parts}) > 1 or not isinstance(tables[0], jax.Array):
        return None
    rows = jnp.asarray(np.stack([fold.training for fold in parts]))
    try:
        fit_rows = lambda rows, key: fit(*(table[rows] for table in tables), key=key)
        stacked = eqx.filter_vmap(fit_rows)(rows, jnp.stack(keys))
        arrays, rest = eqx.partition(stacked, eqx.is_array)
        model_of = lambda k: eqx.combine(jax.tree.map(lambda leaf: leaf[k], arrays), rest)
        models = [model_of(k) for k in range(len(parts))]
        found = [model(*take_rows(fold.held_out, tables[0])) for model, fold in zip(models, parts, strict=True)]
    except (TypeError, IndexError, jax.errors.JaxRuntimeError):  # the first two are those of values in a trace
        return None
    return list(zip(models, found, strict=True)) if _is_sound(stacked, found) else None


def _is_sound(models: Any, predictions: Any) -> bool:
    """Whether every optimization ended with a number, and there are predictions of numbers."""
    is_code = lambda path: getattr(path[-1], "name", "") == "result" if path else False
    codes = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(models) if is_code(path)]
    numbers = [leaf for leaf in jax.tree.leaves(predictions) if eqx.is_inexact_array(leaf)]
    wrong = [*(code == Result.NOT_FINITE for code in codes), *map(jnp.isnan, numbers)]
    return not any(each.any() for each in wrong)


@contextmanager
def one_warning(about: str) -> Iterator[None]:
    """One warning in place of those of a kind that come inside: what they are about, the first, and how many."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for category in dict.fromkeys(each.category for each in caught):
        first, *others = [each.message for each in caught if each.category is category]
        more = f" There were {len(others)} more." if others else ""
        _checks.warn(f"{about}: {first}{more}", category)


def as_distribution(predicted: Distribution | ArrayLike | None) -> Distribution:
    """What a model gives, as a Distribution: means are a `Point`.

    Raises:
        TypeError: if it gives None.
    """
    if predicted is None:
        raise TypeError("a model gave None where predictions are expected: does its function return them?")
    return predicted if isinstance(predicted, Distribution) else Point(_checks.as_floats("prediction", predicted))


def joined(parts: Sequence[Any], rows: Sequence[np.ndarray]) -> Distribution:
    """The predictions of several models in the order of the rows' numbers.

    Raises:
        ValueError: if a part does not predict as many rows as there are numbers.
    """
    whole = Concatenated(parts, rows)
    together = beneath_each_other(parts, np.argsort(np.concatenate(rows)))
    return whole if together is None else together


def take_rows(rows: Int[ArrayLike, " k"], *tables: Table) -> tuple[Any, ...]:
    """The rows of these numbers of every table; of arrays by one program."""
    if all(isinstance(table, jax.Array) for table in tables):
        return _take_rows(rows, *tables)
    return tuple(_take_rows(rows, t)[0] if isinstance(t, jax.Array) else take(rows, t) for t in tables)


@jax.jit
def _take_rows(rows: Int[ArrayLike, " k"], *arrays: Array) -> tuple[Array, ...]:
    return tuple(array[rows] for array in arrays)
