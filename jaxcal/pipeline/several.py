"""Pipelines of several predictors, combined or compared, and of a single predictor whose errors are learned."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Table
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.choice import Choice, Tried, named, tried, without_rows_set_aside
from jaxcal.pipeline.combination import Combination, Combined, combine
from jaxcal.pipeline.dependence import warn_of_dependence
from jaxcal.pipeline.fitted import Pipeline, Recipe, Step
from jaxcal.pipeline.methods import Folds, Split
from jaxcal.pipeline.out_of_fold import take_rows
from jaxcal.pipeline.plan import Held, Plan, chain_of, fit_one, last_step, pipeline_of, step_of
from jaxcal.pipeline.side_by_side import in_threads, one_by_one, share_nothing
from jaxcal.pipeline.steps import name_of

# The name of the learned step: for a single predictor, and for several.
_LEARNED = ("learned errors", "combined")


def fit_several(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, order_key: PRNGKeyArray) -> Pipeline:
    """The pipeline of all predictors that have a weight, or of the best predictor by out-of-fold CRPS."""
    learns = plan.learns or choice.combines
    compared = dataclasses.replace(plan, recalibrate=None) if learns else plan
    rest, targets, inner = without_rows_set_aside(x, y, compared, order_key)
    is_usual = inner.method.number is None
    known, inner = tried(rest, targets, choice, inner, order_key)
    choice = choice._replace(folds=inner.method.number if is_usual else None)
    if isinstance(plan.method, Folds):
        plan = dataclasses.replace(plan, method=inner.method, division=inner.division)
    if not learns:
        return _fit_best(x, y, choice, plan, known)
    sets = [list(known.held)] if choice.combines else [[k] for k in known.held]
    learned_of_sets = [_learned(rest, known, numbers, inner) for numbers in sets]
    best = min(learned_of_sets, key=lambda each: float(each.step.scores.crps) if learned_of_sets[1:] else 0.0)
    if not isinstance(inner.method.folds, list) and inner.method.groups is None:
        warn_of_dependence(take_rows(np.asarray(best.step.rows), rest)[0], best.step)
    if len(choice.pairs) == 1:
        others = ()
    elif choice.combines:
        others = tuple(held.steps for held in best.held)
    else:
        others = tuple((*each.held[0].steps, each.step) for each in learned_of_sets if each is not best)
    return _told(_fit_learned(x, y, choice, plan, best), choice, known, others)


def _fit_best(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, known: Tried) -> Pipeline:
    """The pipeline with the best CRPS after the last step."""
    held_of_pairs = known.held
    best = min(held_of_pairs, key=lambda k: float(held_of_pairs[k].steps[-1].scores.crps))
    held = None if isinstance(plan.method, Split) else held_of_pairs[best]
    others = tuple(held.steps for k, held in held_of_pairs.items() if k != best)
    return _told(fit_one(x, y, *choice.pairs[best], plan, held), choice, known, others)


class _Learned(NamedTuple):
    """The combination of predictors that was learned from their out-of-fold predictions.

    Attributes:
        numbers: the numbers of the predictors.
        held: the held-out predictions of each predictor.
        combined: makes one distribution of these predictions.
        step: the out-of-fold distributions of the combination, as a step.
    """

    numbers: list[int]
    held: list[Held]
    combined: Combined
    step: Step


def _learned(x: Table, known: Tried, numbers: list[int], plan: Plan) -> _Learned:
    """The combination of some predictors; x and plan are the rows and the plan of their trial."""
    held, division = [known.held[k] for k in numbers], plan.division
    end = held[0].steps[-1]
    places = [np.searchsorted(np.asarray(end.rows), division.rows[part]) for part in division.parts]
    inputs = take_rows(np.asarray(end.rows), x)[0]
    combined = combine(inputs, [each.steps[-1].predictions for each in held], np.asarray(end.y), places)
    step = dataclasses.replace(end, name=_LEARNED[bool(numbers[1:])], predictions=combined.out_of_fold)
    return _Learned(numbers, held, combined, step)


def _fit_learned(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, learned: _Learned) -> Pipeline:
    """Fit the predictors that have a weight to all rows, except rows that are set aside, and then the last step."""
    combined, division = learned.combined, plan.division
    fits = [(choice.pairs[learned.numbers[k]], learned.held[k].like) for k in combined.kept]
    names = tuple(named(pair) for pair, _ in fits)
    has_several, chains = bool(learned.numbers[1:]), _fitted_to_all(x, y, fits, plan)
    chain = Combination(names, chains, combined.combiner, combined.gains, has_several)
    if isinstance(plan.method, Split):
        steps, ends = _of_rows_set_aside(x, y, chain, fits[0][0], plan)
    else:
        steps, rows = [*(() if has_several else learned.held[0].steps), learned.step], np.asarray(learned.step.rows)
        places = [np.searchsorted(rows, division.rows[part]) for part in division.parts]
        ends = [learned.step.predictions[place] for place in places]
    last = None
    if plan.recalibrate is not None:
        last, end = last_step(x, y, steps[-1], ends, plan)
        steps.append(end)
    return pipeline_of(x, chain, last, tuple(steps), plan, None)


def _of_rows_set_aside(
    x: Table, y: Float[Array, " n"], chain: Combination, pair: tuple[Any, Sequence[Callable]], plan: Plan
) -> tuple[list[Step], list[Distribution]]:
    """The steps that predict the rows set aside, and the last predictions of each part of these rows.

    A single predictor has all its steps. Several predictors have one step, their combination.
    """
    division, (inputs,) = plan.division, take_rows(plan.division.rows, x)
    after = [each.after_each_step(inputs) for each in chain.chains]
    names = [] if chain.has_several else [name_of(step) for step in (pair[0], *pair[1])]
    predictions_of_steps = list(zip(names, after[0], strict=True)) if names else []
    predictions_of_steps.append(
        (_LEARNED[chain.has_several], chain.combiner(inputs, [predictions[-1] for predictions in after]))
    )
    parts = [division.rows[part] for part in division.parts]
    parts_of_steps = [(name, [whole[part] for part in division.parts]) for name, whole in predictions_of_steps]
    steps = [step_of(name, ends, y=y, parts=parts, out_of_fold=False) for name, ends in parts_of_steps]
    return steps, parts_of_steps[-1][1]


def _fitted_to_all(x: Table, y: Float[Array, " n"], fits: list, plan: Plan) -> tuple[Chain, ...]:
    """The chains that predict new rows, fitted in threads if they share nothing."""
    steps = [step for (predictor, calibrators), _ in fits for step in (predictor, *calibrators)]
    call_all: Callable = in_threads if share_nothing(steps) else one_by_one
    fit = partial(chain_of, x, y, plan)
    return tuple(call_all(lambda pair_and_like: fit(*pair_and_like), fits, lambda: None))


def _told(fitted: Pipeline, choice: Choice, known: Tried, others: tuple) -> Pipeline:
    """The pipeline, with its recipe and with the steps of the other candidates."""
    pairs = (choice.pairs[k] for k in known.held)
    recipe = Recipe(tuple((each, tuple(calibrators)) for each, calibrators in pairs), choice.combines, choice.folds)
    told = {"dropped": known.dropped, "omitted": known.omitted, "without_weights": choice.without_weights}
    return dataclasses.replace(fitted, others=others, recipe=recipe, **told)
