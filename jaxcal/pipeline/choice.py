"""The choice among several pipelines, by their CRPS out of fold. One that is far behind is fitted to one fold alone."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import progress
from jaxcal.frames.layout import Table
from jaxcal.pipeline.methods import Folds, Split
from jaxcal.pipeline.out_of_fold import take_rows
from jaxcal.pipeline.plan import Held, Plan, held_of, models
from jaxcal.pipeline.steps import as_distribution, name_of

# A candidate is dropped after the first fold if its CRPS there exceeds the first number times the best. The second one
# is the least number of rows in that fold. The third one is the least difference, in standard errors.
_FAR_BEHIND, _FEWEST_ROWS, _STANDARD_ERRORS = 1.5, 20, 2


def tried(
    x: Table,
    y: Float[Array, " n"],
    choice: Sequence[tuple[Any, Sequence[Callable]]],
    plan: Plan,
    order_key: PRNGKeyArray,
) -> tuple[dict[int, Held], tuple[str, ...]]:
    """What the candidates predict, by their numbers, and lines about those that were dropped after the first fold.

    What is set aside has no say in the choice: its guarantee would not hold.
    """
    method = plan.method
    if isinstance(method, Split):
        rows, groups = plan.division.folds[0].training, method.labels(len(y))
        folds = Folds(folds=method.folds, groups=None if groups is None else groups[rows])
        division = folds.divide(len(rows), (order_key, order_key))
        plan = dataclasses.replace(plan, method=folds, division=division, by=plan.by.part(rows))
        x, y = take_rows(rows, x, y)
    first, kept, dropped = 1 if _first_fold_tells(plan, len(choice)) else 0, range(len(choice)), ()
    in_first = [([], []) for _ in choice]
    if first:
        in_first = []
        with progress.work("pipeline.fit: first folds", len(choice)) as work:
            for predictor, calibrators in choice:
                in_first.append(models(x, y, predictor, calibrators, plan, slice(1)))
                work.advance()
        scores = [_first_scores(x, y, blocks[0][-1], plan) for _, blocks in in_first]
        if all(each is not None for each in scores):
            kept, dropped = _kept(scores, choice)
    found = {}
    with progress.work("pipeline.fit: candidates", len(kept)) as work:
        for k in kept:
            chains, blocks = in_first[k]
            start = chains[0] if first and plan.shares_start else None
            rest = models(x, y, *choice[k], plan, slice(first, None), start)
            found[k] = held_of(x, y, *choice[k], plan, (chains + rest[0], blocks + rest[1]))
            work.advance()
    return found, dropped


def _first_fold_tells(plan: Plan, candidates: int) -> bool:
    """Whether the first fold compares the candidates, before the others are fitted.

    The rows of a fold of whole groups, or of one that was given, are alike. On an accelerator all folds are fitted at
    once.
    """
    method, folds = plan.method, plan.division.folds
    is_random = method.groups is None and not isinstance(method.folds, Iterable)
    are_enough = candidates > 1 and len(folds) > 1 and len(folds[0].held_out) >= _FEWEST_ROWS
    return is_random and are_enough and jax.default_backend() == "cpu"


def _first_scores(x: Table, y: Float[Array, " n"], prediction: Any, plan: Plan) -> np.ndarray | None:
    """The CRPS of the rows of the first fold, after a last step that is fitted to these rows themselves.

    None where it needs more rows.
    """
    rows = plan.division.folds[0].held_out
    table, targets = take_rows(rows, x, y)
    prediction = as_distribution(prediction)
    if plan.recalibrate is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of so few rows
                last = plan.last()(table, prediction, targets, **plan.by.of_rows(rows))
                prediction = last(table, prediction, **plan.by.of_rows(rows))
        except (ValueError, FloatingPointError):
            return None
    return np.asarray(prediction.crps(targets))


def _kept(scores: Sequence[Any], choice: Sequence[tuple[Any, Sequence[Callable]]]) -> tuple[Sequence[int], tuple]:
    """The numbers of the candidates that go on, and a line about each of the others.

    A candidate is dropped if its mean CRPS is more than half again the best, and this is no chance of the rows.
    """
    means = [float(np.mean(each)) for each in scores]
    best = int(np.argmin(means))

    def is_far_behind(k: int) -> bool:
        differences = scores[k] - scores[best]
        error = np.std(differences, ddof=1) / np.sqrt(len(differences))
        return means[k] > _FAR_BEHIND * means[best] and bool(np.mean(differences) > _STANDARD_ERRORS * error)

    far = [k for k in range(len(scores)) if is_far_behind(k)]
    name = lambda k: ", ".join(name_of(step) for step in (choice[k][0], *choice[k][1]))
    lines = tuple(f"{name(k)}: CRPS {means[k]:.3g}, the best has {means[best]:.3g}" for k in far)
    return [k for k in range(len(scores)) if k not in far], lines
