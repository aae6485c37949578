"""The choice among several pipelines, by their CRPS out of fold. One that is far behind is fitted to one fold alone."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import progress
from jaxcal.frames.layout import Table
from jaxcal.pipeline.methods import Folds, Split
from jaxcal.pipeline.out_of_fold import take_rows
from jaxcal.pipeline.plan import Held, Plan, held_of, models
from jaxcal.pipeline.steps import as_distribution, name_of

# After the first fold a candidate is dropped whose CRPS is so many times the best. The fold must hold so many rows, and
# the difference must be so many standard errors.
_FAR_BEHIND, _FEWEST_ROWS, _STANDARD_ERRORS = 1.5, 10, 2


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
    firsts = []
    with progress.work("pipeline.fit: first folds", len(choice)) as work:
        for predictor, calibrators in choice:
            firsts.append(models(x, y, predictor, calibrators, plan, slice(1)))
            work.advance()
    kept, dropped = _kept([_first_scores(x, y, blocks[0][-1], plan) for _, blocks in firsts], choice)
    found = {}
    with progress.work("pipeline.fit: candidates", len(kept)) as work:
        for k in kept:
            (chains, blocks), rest = firsts[k], models(x, y, *choice[k], plan, slice(1, None))
            found[k] = held_of(x, y, *choice[k], plan, (chains + rest[0], blocks + rest[1]))
            work.advance()
    return found, dropped


def _first_scores(x: Table, y: Float[Array, " n"], prediction: Any, plan: Plan) -> np.ndarray:
    """The CRPS of the rows of the first fold, after a last step that is fitted to these rows themselves."""
    rows = plan.division.folds[0].held_out
    table, targets = take_rows(rows, x, y)
    prediction = as_distribution(prediction)
    if plan.recalibrate is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so few rows
            last = plan.last()(table, prediction, targets, **plan.by.of_rows(rows))
        prediction = last(table, prediction, **plan.by.of_rows(rows))
    return np.asarray(prediction.crps(targets))


def _kept(scores: Sequence[np.ndarray], choice: Sequence[tuple[Any, Sequence[Callable]]]) -> tuple[list[int], tuple]:
    """The numbers of the candidates that go on, and a line about each of the others.

    A candidate is dropped if its mean CRPS is more than half again the best, and this is no chance of the rows.
    """
    means = [float(np.mean(each)) for each in scores]
    best = int(np.argmin(means))

    def is_far_behind(k: int) -> bool:
        differences = scores[k] - scores[best]
        error = np.std(differences, ddof=1) / np.sqrt(len(differences)) if len(differences) >= _FEWEST_ROWS else np.inf
        return means[k] > _FAR_BEHIND * means[best] and bool(np.mean(differences) > _STANDARD_ERRORS * error)

    far = [k for k in range(len(scores)) if is_far_behind(k)]
    name = lambda k: ", ".join(name_of(step) for step in (choice[k][0], *choice[k][1]))
    lines = tuple(f"{name(k)}: CRPS {means[k]:.3g}, the best has {means[best]:.3g}" for k in far)
    return [k for k in range(len(scores)) if k not in far], lines
