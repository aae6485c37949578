"""The pipeline of several predictors: all of them combined, or the best."""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal.calibrators import conformal
from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Table
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.choice import Choice, Tried, named, tried, without_rows_set_aside
from jaxcal.pipeline.combination import Combination, combine
from jaxcal.pipeline.fitted import Pipeline, Recipe, Step
from jaxcal.pipeline.methods import Split
from jaxcal.pipeline.out_of_fold import take_rows
from jaxcal.pipeline.plan import Plan, chain_of, fit_one, last_step, pipeline_of, step_of
from jaxcal.pipeline.side_by_side import in_threads, one_by_one, share_nothing


def fit_best(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, order_key: PRNGKeyArray) -> Pipeline:
    """The pipeline with the best CRPS out of fold."""
    rest, targets, inner = without_rows_set_aside(x, y, plan, order_key)
    known = tried(rest, targets, choice, inner)
    found = known.found
    best = min(found, key=lambda k: float(found[k].steps[-1].scores.crps))
    others = tuple(held.steps for k, held in found.items() if k != best)
    held = None if isinstance(plan.method, Split) else found[best]
    fitted = fit_one(x, y, *choice.pairs[best], plan, held)
    return _told(fitted, choice, known, others)


def fit_combined(x: Table, y: Float[Array, " n"], choice: Choice, plan: Plan, order_key: PRNGKeyArray) -> Pipeline:
    """The pipeline of all predictors that have a weight."""
    compared = dataclasses.replace(plan, recalibrate=None)
    rest, targets, inner = without_rows_set_aside(x, y, compared, order_key)
    known = tried(rest, targets, choice, inner)
    numbers, held = zip(*known.found.items(), strict=True)
    end, division = held[0].steps[-1], inner.division
    places = [np.searchsorted(np.asarray(end.rows), division.rows[part]) for part in division.parts]
    combined = combine([each.steps[-1].predictions for each in held], np.asarray(end.y), places)
    fits = [(choice.pairs[numbers[k]], held[k].like) for k in combined.kept]
    chains = _fitted_to_all(x, y, fits, plan)
    names = tuple(named(pair) for pair, _ in fits)
    chain = Combination(names, chains, combined.combiner, combined.gains)
    parts, whole = [plan.division.rows[part] for part in plan.division.parts], combined.out_of_fold
    if isinstance(plan.method, Split):
        whole, places = chain(*take_rows(plan.division.rows, x)), plan.division.parts
    ends = [whole[part] for part in places]
    steps: list[Step] = [step_of("combined", ends, y=y, parts=parts, out_of_fold=plan.is_out_of_fold)]
    last = None
    if plan.recalibrate is not None:
        last, step = last_step(x, y, steps[0], ends, plan)
        steps.append(step)
    fitted = pipeline_of(x, chain, last, tuple(steps), plan, None)
    return _told(fitted, choice, known, tuple(each.steps for each in held))


def recalibrated_levels(x: Table, base: Distribution, y: Float[Array, " n"]) -> Callable:
    """The last step of rows that are set aside: of levels, or where an outlier has level 1, of errors over stds."""
    try:
        return conformal.fit(x, base, y, score="cdf", rule="linear")
    except ValueError:
        return conformal.fit(x, base, y)


def _fitted_to_all(x: Table, y: Float[Array, " n"], fits: list, plan: Plan) -> tuple[Chain, ...]:
    """The chains that predict new rows, fitted side by side where they share nothing."""
    steps = [step for (predictor, calibrators), _ in fits for step in (predictor, *calibrators)]
    call_all = in_threads if share_nothing(steps) else one_by_one
    fit = partial(chain_of, x, y, plan)
    return tuple(call_all(lambda pair_and_like: fit(*pair_and_like), fits, lambda: None))


def _told(fitted: Pipeline, choice: Choice, known: Tried, others: tuple) -> Pipeline:
    """The pipeline, with what is known of the others."""
    pairs = (choice.pairs[k] for k in known.found)
    recipe = Recipe(tuple((predictor, tuple(calibrators)) for predictor, calibrators in pairs), choice.combines)
    return dataclasses.replace(fitted, others=others, dropped=known.dropped, omitted=known.omitted, recipe=recipe)
