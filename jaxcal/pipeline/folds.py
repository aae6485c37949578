"""Folds: the rows that a model is fitted to and the rows that it predicts, drawn at random or given."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from jaxcal import _checks, _random

# If there are few rows, models that are fitted without a fifth of them have larger errors than the final model. With
# five folds on 250 to 500 rows, intervals cover 2 % more and are 8 % wider (`benchmarks/results/pipelines.md`). On 576
# to 700 rows they cover 0.8 % more, and the CRPS is about the same (`pipeline_folds.txt`).
_FOLDS_OF_FEW_ROWS, _FOLDS, _FEW_ROWS = 10, 5, 500


class Fold(NamedTuple):
    """The numbers of the rows that a model is fitted to, and of the rows that it predicts."""

    training: np.ndarray
    held_out: np.ndarray


def as_folds(name: str, folds: Iterable, num_rows: int) -> list[Fold]:
    """The folds that a user gives, as the rows of each fold or as pairs of training rows and held-out rows.

    Args:
        name: the name of the argument.
        folds: the row numbers of each fold, or a mask of its rows. Or pairs of these, as the splitters of scikit-learn
            give them.
        num_rows: the number of rows.

    Raises:
        ValueError: if lists do not hold every row once. Also if pairs hold out a row several times, or hold out one of
            their own training rows. Also if a list is empty or does not hold row numbers.
    """
    folds_or_pairs = list(folds)
    pairs = [each for each in folds_or_pairs if isinstance(each, tuple | list) and len(each) == 2 and np.ndim(each[0])]
    if not folds_or_pairs or 0 < len(pairs) < len(folds_or_pairs):
        raise ValueError(f"{name} must hold lists of row numbers, or pairs of training rows and held-out rows.")
    if not pairs:
        parts = [_row_numbers(name, each, num_rows) for each in folds_or_pairs]
        if len(parts) < 2 or not np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_rows)):
            raise ValueError(
                f"{name} must be a number, or two lists of row numbers or more that hold every row once. Give pairs "
                "of training rows and held-out rows for other folds."
            )
        return [Fold(np.setdiff1d(np.arange(num_rows), part), part) for part in parts]
    pairs_of_rows = [Fold(*(_row_numbers(name, rows, num_rows) for rows in pair)) for pair in pairs]
    for number, fold in enumerate(pairs_of_rows):
        if (both := np.intersect1d(fold.training, fold.held_out)).size:
            raise ValueError(
                f"{name} must hold out other rows than it trains on; row {both[0]} is both in fold {number}. Its error "
                "would not be out of sample."
            )
    times = np.bincount(np.concatenate([fold.held_out for fold in pairs_of_rows]), minlength=num_rows)
    if times.max() > 1:
        raise ValueError(
            f"{name} must hold out every row once at most; row {times.argmax()} is held out {times.max()} times. Give "
            "folds that share no held-out rows."
        )
    if times.sum() < 2:
        raise ValueError(f"{name} must hold out at least 2 rows; got 1.")
    return pairs_of_rows


def _row_numbers(name: str, rows: Any, num_rows: int) -> np.ndarray:
    """The row numbers that are given as numbers or as a mask."""
    numbers = np.asarray(rows)
    if numbers.dtype == bool and numbers.shape == (num_rows,):
        numbers = np.flatnonzero(numbers)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"{name} must hold vectors of row numbers, none empty; got one of shape {numbers.shape}.")
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold row numbers; got some of dtype {numbers.dtype}.")
    if numbers.min() < 0 or numbers.max() >= num_rows:
        raise ValueError(
            f"{name} must hold row numbers from 0 to {num_rows - 1}; got {numbers.min()} to {numbers.max()}."
        )
    return numbers.astype(int)


def as_labels(groups: ArrayLike | None, num_rows: int) -> np.ndarray | None:
    """The labels of the groups, if there are any.

    Raises:
        ValueError: if they are not as many as the rows.
    """
    return None if groups is None else _checks.as_labels("groups", groups, num_rows)


def number_for(folds: int | None, num_rows: int, groups: np.ndarray | None = None) -> int:
    """The number of folds that the user gave, or the number that the rows need and the groups allow."""
    if folds is not None:
        return folds
    most = num_rows if groups is None else len(np.unique(groups))
    return max(2, min(most, _FOLDS_OF_FEW_ROWS if num_rows <= _FEW_ROWS else _FOLDS))


def drawn(
    num_rows: int, number: int, groups: np.ndarray | None, key: PRNGKeyArray, *, equal: bool = False
) -> list[Fold]:
    """Random folds whose training parts have equally many rows, or random folds of whole groups.

    Args:
        num_rows: how many rows there are.
        number: the number of folds.
        groups: labels of the rows; None for folds of single rows.
        key: random key.
        equal: whether all folds have n // number rows, as a guarantee may require. The remaining rows, fewer than
            folds, are in the training part of each fold.

    Raises:
        ValueError: if there are fewer rows or groups than folds, or `number` is less than 2.
    """
    _checks.check_at_least("folds", number, 2)
    with jax.ensure_compile_time_eval():  # a known key gives known folds, also where the fit is traced
        order = np.asarray(_random.permutation(key, num_rows))
    if groups is None:
        if num_rows < number:
            raise ValueError(f"x has {num_rows} rows; at least {number} are needed for {number} folds.")
        in_folds = num_rows // number * number if equal else num_rows
        parts, rest = np.array_split(order[:in_folds], number), order[in_folds:]
        at_most = num_rows - len(parts[0])
    else:
        parts, rest, at_most = _parts_of_groups(groups, number, order), order[:0], num_rows
    others = lambda k: np.concatenate([*parts[:k], *parts[k + 1 :], rest])
    return [Fold(others(k)[:at_most], part) for k, part in enumerate(parts)]


def _parts_of_groups(groups: np.ndarray, folds: int, order: np.ndarray) -> list[np.ndarray]:
    """Whole groups in parts of about equal size: the largest group first, each to the smallest part."""
    labels, first, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    if len(labels) < folds:
        raise ValueError(f"there are {len(labels)} groups; at least {folds} are needed for {folds} folds.")
    parts, filled = [[] for _ in range(folds)], np.zeros(folds, int)
    for label in np.lexsort((first, -sizes)):  # groups of equal size come in random order
        smallest = filled.argmin()
        parts[smallest].append(order[groups[order] == labels[label]])
        filled[smallest] += sizes[label]
    return [np.concatenate(part) for part in parts]
