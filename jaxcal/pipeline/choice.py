"""Several pipelines, fitted to the same folds; a pipeline that is far behind in the first fold is dropped there."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import progress
from jaxcal.distributions import Point
from jaxcal.frames.layout import Table
from jaxcal.pipeline.fitted import Recipe
from jaxcal.pipeline.methods import FOLDS_WITH_TIME, MANY_ROWS, Folds, Split, hold_out
from jaxcal.pipeline.out_of_fold import WITHOUT_A_FOLD, one_warning, take_rows
from jaxcal.pipeline.plan import Held, Models, Plan, held_of, models, taken_of
from jaxcal.pipeline.side_by_side import OutOfTime, cores, in_threads, share_nothing
from jaxcal.pipeline.steps import as_fit, as_prediction, name_of, name_of_weights

# A candidate is dropped after the first fold if its CRPS there exceeds the first number times the best CRPS. The second
# number is the least number of rows in that fold. The third number is the least difference, in standard errors.
_FAR_BEHIND, _FEWEST_ROWS, _STANDARD_ERRORS = 1.5, 20, 2
# The first fit of a process of many rows compares inferences. On two data sets later fits took 0.28 and 0.59 as long.
_LATER_FIT_OF_PROCESS = 0.6


class Best:
    """A predictor of `fit` that takes the best of several pairs, by the out-of-fold CRPS of the whole pipeline.

    Args:
        pairs: pairs of a predictor and its calibrators, as in the list that `jc.pipeline.fit` takes.

    Example:
        >>> best = Best([(fit, ()) for fit in ("a", "b")])
        >>> len(best.pairs)
        2
    """

    def __init__(self, pairs: Sequence[tuple[Any, Sequence[Callable]]]):
        self.pairs = tuple(pairs)


class Choice(NamedTuple):
    """Several pipelines, and what is done with them.

    Attributes:
        pairs: pairs of a predictor and its calibrators.
        combines: whether the pairs are combined; else the best pair is taken.
        repeats: whether all pairs are fitted to all folds, as in an earlier fit.
        folds: the number of folds in the earlier fit, if more than usual.
        without_weights: a line about each pair that was omitted since it takes no weights.
    """

    pairs: Sequence[tuple[Any, Sequence[Callable]]]
    combines: bool
    repeats: bool = False
    folds: int | None = None
    without_weights: tuple[str, ...] = ()

    def taking_weights(self) -> "Choice":
        """The choice among the pairs whose predictors take weights of rows.

        Raises:
            ValueError: if no predictor takes weights.
        """
        takes = [name_of_weights(as_fit(predictor)) is not None for predictor, _ in self.pairs]
        pairs = [pair for pair, one_takes in zip(self.pairs, takes, strict=True) if one_takes]
        if not pairs:
            raise ValueError("none of the predictors takes sample_weight or weights: fit without weights.")
        others = (pair for pair, one_takes in zip(self.pairs, takes, strict=True) if not one_takes)
        return self._replace(pairs=pairs, without_weights=tuple(map(named, others)))

    @classmethod
    def of(cls, predictor: Any) -> "Choice | None":
        """The choice that the argument `predictor` of `fit` describes; None if it is a single predictor.

        Raises:
            TypeError: if an item of the list is no pair.
            ValueError: if there are no pairs.
        """
        if isinstance(predictor, Recipe):
            return cls(predictor.pairs, predictor.combines, repeats=True, folds=predictor.folds)
        if isinstance(predictor, list):
            choice = cls(predictor, combines=True)
        elif isinstance(predictor, Best):
            choice = cls(predictor.pairs, combines=False)
        else:
            return None
        if not all(
            isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], list | tuple)
            for pair in choice.pairs
        ):
            raise TypeError("predictor holds pairs of a predictor and a list of its calibrators: (predictor, ()), say.")
        if not choice.pairs:
            raise ValueError("predictor holds no pairs: give one at least, or None for those of jaxcal.")
        return choice


class Tried(NamedTuple):
    """What is known of several candidates.

    Attributes:
        held: the held-out predictions of each candidate that was fitted to all folds, by its number.
        dropped: a line about each candidate that was far behind after the first fold.
        omitted: a line about each candidate for which the time did not suffice.
    """

    held: dict[int, Held]
    dropped: tuple[str, ...]
    omitted: tuple[str, ...]


def without_rows_set_aside(
    x: Table, y: Float[Array, " n"], plan: Plan, order_key: PRNGKeyArray
) -> tuple[Table, Float[Array, " m"], Plan]:
    """The rows that compare the candidates, and their plan, without the rows set aside, whose guarantee must hold."""
    method = plan.method
    if not isinstance(method, Split):
        return x, y, plan
    rows, labels = plan.division.folds[0].training, method.labels(len(y))
    groups = None if labels is None else labels[rows]
    folds = Folds(folds=method.folds, groups=groups)
    if method.folds is None and len(rows) >= MANY_ROWS // 2 and groups is None:
        division = hold_out(len(rows), order_key)
    else:
        division = folds.divide(len(rows), (order_key, order_key))
    x, y, weights = take_rows(rows, x, y, plan.weights)
    return x, y, dataclasses.replace(plan, method=folds, division=division, weights=weights, by=plan.by.part(rows))


def tried(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, key: PRNGKeyArray) -> tuple[Tried, Plan]:
    """The held-out predictions of the candidates that are kept and have time, and the plan of their folds.

    Models that are fitted without a tenth of the rows are more like the models of all rows than models without a fifth.
    With a deadline there are ten folds, if the fits of the first fold indicate that the time suffices for all folds.

    Raises:
        OutOfTime: if the deadline passes before any candidate is fitted to all folds.
    """
    may_have_more = plan.method.has_usual_folds(len(y))
    if may_have_more and (choice.folds or (plan.deadline is not None and not choice.repeats)):
        method = Folds(folds=FOLDS_WITH_TIME)
        more = dataclasses.replace(plan, method=method, division=method.divide(len(y), (key, key)))
        with _progress(choice, more) as told:
            trial = _Trial(x, y, choice, more, told)
            if choice.folds or trial.has_time():
                return trial.run(), more
    with _progress(choice, plan) as told:
        return _Trial(x, y, choice, plan, told).run(), plan


def _progress(choice: Choice, plan: Plan) -> AbstractContextManager[progress.Work]:
    return progress.work("pipeline.fit: fits", len(choice.pairs) * len(plan.division.folds))


class _Trial:
    """Candidates that are fitted to folds: all candidates to the first fold, then the kept candidates to the others.

    With a deadline the quickest candidate comes first. The next are the candidates whose fits seem to end in time, the
    best of the first fold first. The other candidates have the time that is left.
    """

    def __init__(self, x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, told: progress.Work) -> None:
        self.x, self.y, self.choice, self.plan, self.told = x, y, choice.pairs, plan, told
        self.combines, self.repeats = choice.combines, choice.repeats
        self.num_folds = len(plan.division.folds)
        self.begun: dict[int, Models] = {}
        self.seconds: dict[int, float] = {}
        self.held: dict[int, Held] = {}
        self.out_of_time: list[int] = []

    def has_time(self) -> bool:
        """Whether all fits of all candidates seem to end in time; fits the first fold of each."""
        self._begin_all()
        return not self.out_of_time and sum(map(self._need, self.begun)) < self._seconds_left

    def run(self) -> Tried:
        """Fit the candidates."""
        tells = not self.repeats and _first_fold_tells(self.plan, len(self.choice))
        order: Sequence[int] = range(len(self.choice))
        if tells or self.plan.deadline is not None:
            if not self.begun:
                self._begin_all()
            order = list(self.begun)
            if not order:
                raise OutOfTime
        scores = {k: self._first_scores(k) for k in order} if tells else {}
        known = {k: each for k, each in scores.items() if each is not None}
        kept, dropped, means = order, (), {}
        if tells and len(known) == len(scores):
            means = {k: float(np.mean(each)) for k, each in known.items()}
            kept, dropped = _kept(known, means, self.choice)
            self.told.advance((self.num_folds - 1) * (len(order) - len(kept)))
        if self.plan.deadline is not None and kept:
            # The quickest candidate comes first, so that there is an answer however long the others take.
            quickest = min(kept, key=self._need)
            kept = sorted(kept, key=lambda k: (k != quickest, self._rank(k, means.get(k, 0.0))))
        for k in kept:
            self._in_time(k, self._complete)
        if not self.held:
            raise OutOfTime
        lines = (named(self.choice[k]) for k in sorted(self.out_of_time))
        return Tried({k: self.held[k] for k in sorted(self.held)}, dropped, tuple(lines))

    def _begin_all(self) -> None:
        """Fit all candidates to the first fold: in threads if they share nothing and there is no deadline."""
        order = range(len(self.choice))
        if self.plan.deadline is None and all(share_nothing(_steps(each)) for each in self.choice):

            def first(k: int) -> Models:
                predictor, calibrators = self.choice[k]
                return models(self.x, self.y, predictor, calibrators, self.plan, slice(1), warns=False)

            with one_warning(WITHOUT_A_FOLD, in_threads=True):
                self.begun = dict(zip(order, in_threads(first, order, self.told.advance), strict=True))
            return
        for k in order:
            self._in_time(k, self._begin)

    def _in_time(self, k: int, do: Callable[[int, Plan], None]) -> None:
        """Do some of the fits of a candidate, by a deadline that leaves the reserved seconds."""
        plan = self.plan
        if plan.deadline is not None:
            plan = dataclasses.replace(plan, deadline=plan.deadline - self._reserved(k))
        try:
            do(k, plan)
        except OutOfTime:
            self.out_of_time.append(k)

    def _reserved(self, k: int) -> float:
        """The seconds that the next fits of a candidate must leave, so that at least one candidate can end."""
        if self.held:  # for the fits to all rows, or for the fit of the best
            seconds = [self.seconds[each] for each in self.held]
            return sum(seconds) + self.seconds[k] if self.combines else max(seconds)
        if k in self.begun:  # for its last fit; if time allows, also for another candidate, in case this one is slow
            others = min((self._need(each) for each in self.begun if each != k), default=0.0)
            return self.seconds[k] + (others if self._need(k) + others < self._seconds_left else 0.0)
        # In the first fold each candidate has a part of the time, so that a slow one leaves time to the others. If no
        # candidate seems to end in time yet, the part is at least 1 / (1 + folds). A fit that needs no more can be
        # repeated for all folds and all rows.
        waiting = len(self.choice) - len(self.begun) - len(self.out_of_time)
        in_time = [self._need(each) for each in self.begun if not self._is_late(each)]
        part = 1 / waiting if in_time else max(1 / waiting, 1 / (1 + self.num_folds))
        return max(min(in_time, default=0.0), self._seconds_left * (1 - part) if waiting > 1 else 0.0)

    @property
    def _seconds_left(self) -> float:
        """The seconds until the deadline; infinite without a deadline."""
        return (self.plan.deadline or math.inf) - time.monotonic()

    def _need(self, k: int) -> float:
        """The seconds of the other folds and of the fit to all rows, judged by the first fit."""
        at_once = cores() if share_nothing(_steps(self.choice[k])) else 1
        seconds = self.seconds[k] * (_LATER_FIT_OF_PROCESS if self._has_compared_inferences(k) else 1)
        return seconds * (1 + math.ceil((self.num_folds - 1) / at_once))

    def _has_compared_inferences(self, k: int) -> bool:
        taken = taken_of(self.begun[k][0][0]) if self.plan.shares_inference else ()
        return any(each is not None and each.inference != "exact" for each in taken)

    def _rank(self, k: int, score: float) -> tuple[bool, float]:
        """The sort key: first the candidates that seem to end in time, by score; then late ones, by seconds."""
        is_late = self._is_late(k)
        return is_late, self._need(k) if is_late else score

    def _is_late(self, k: int) -> bool:
        return self._need(k) > self._seconds_left

    def _begin(self, k: int, plan: Plan) -> None:
        began = time.monotonic()
        self.begun[k] = models(self.x, self.y, *self.choice[k], plan, slice(1), told=self.told)
        self.seconds[k] = time.monotonic() - began

    def _complete(self, k: int, plan: Plan) -> None:
        chains, blocks = self.begun.get(k, ([], []))
        some, like = slice(len(chains), None), taken_of(chains[0]) if chains and plan.shares_inference else None
        rest = models(self.x, self.y, *self.choice[k], plan, some, like, self.told)
        self.held[k] = held_of(self.x, self.y, *self.choice[k], plan, (chains + rest[0], blocks + rest[1]))

    def _first_scores(self, k: int) -> np.ndarray | None:
        return _first_scores(self.x, self.y, self.begun[k][1][0][-1], self.plan)


def _steps(candidate: tuple[Any, Sequence[Callable]]) -> tuple[Any, ...]:
    return (candidate[0], *candidate[1])


def named(candidate: tuple[Any, Sequence[Callable]]) -> str:
    """The names of the steps of a candidate."""
    return ", ".join(map(name_of, _steps(candidate)))


def _first_fold_tells(plan: Plan, candidates: int) -> bool:
    """Whether the first fold compares the candidates, before the other folds are fitted.

    The fold must be random: the rows of a fold that was given, or of whole groups, are alike. On an accelerator all
    folds are fitted at once.
    """
    method, folds = plan.method, plan.division.folds
    is_random = method.groups is None and not isinstance(method.folds, Iterable)
    are_enough = candidates > 1 and len(folds) > 1 and len(folds[0].held_out) >= _FEWEST_ROWS
    return is_random and are_enough and jax.default_backend() == "cpu"


def _first_scores(x: Table, y: Float[Array, " n"], prediction: Any, plan: Plan) -> np.ndarray | None:
    """The CRPS of the rows of the first fold, after a last step that is fitted to these rows themselves.

    The value is None if the last step needs more rows. Without a last step the predictions may have no spread: the
    value is then the CRPS of the means.
    """
    rows = plan.division.folds[0].held_out
    table, targets = take_rows(rows, x, y)
    prediction = as_prediction(prediction)
    if plan.recalibrate is None:
        prediction = Point(prediction.mean)
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rows are few
                last = plan.last()(table, prediction, targets, **plan.by.of_rows(rows))
                prediction = last(table, prediction, **plan.by.of_rows(rows))
        except (ValueError, FloatingPointError):
            return None
    return np.asarray(prediction.crps(targets))


def _kept(scores: dict[int, np.ndarray], means: dict[int, float], pairs: Sequence) -> tuple[list[int], tuple[str, ...]]:
    """The numbers of the candidates that are kept, and a line about each dropped candidate.

    A candidate is dropped if its mean CRPS exceeds 1.5 times the best, and the difference exceeds two standard errors.
    """
    best = min(means, key=lambda k: means[k])

    def is_far_behind(k: int) -> bool:
        differences = scores[k] - scores[best]
        error = np.std(differences, ddof=1) / np.sqrt(len(differences))
        return means[k] > _FAR_BEHIND * means[best] and bool(np.mean(differences) > _STANDARD_ERRORS * error)

    far = [k for k in scores if is_far_behind(k)]
    lines = (f"{named(pairs[k])}: CRPS {means[k]:.3g}, the best has {means[best]:.3g}" for k in far)
    return [k for k in scores if k not in far], tuple(lines)
