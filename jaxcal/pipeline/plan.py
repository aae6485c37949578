"""The pipeline of one predictor: the models of its folds, their predictions, the last step, and the fit to all rows."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxcal import _random, progress
from jaxcal.distributions import Distribution
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions.concatenated import with_moments
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Layout, Table
from jaxcal.pipeline import cross_conformal
from jaxcal.pipeline.chain import Chain, fit_steps
from jaxcal.pipeline.fitted import Pipeline, Recipe, Step
from jaxcal.pipeline.methods import Division, Method
from jaxcal.pipeline.out_of_fold import WITHOUT_A_FOLD, joined, models_of_folds, one_warning, take_rows
from jaxcal.pipeline.side_by_side import share_nothing
from jaxcal.pipeline.steps import (
    Groups,
    Taken,
    as_fit,
    as_prediction,
    checked,
    name_of,
    with_columns,
    with_key,
    with_weights,
)

# What warnings are about.
_SET_ASIDE = "in the fit to the rows that are not set aside, which counts them anew"
_LAST_STEP = "in the last step, which is fitted without each fold as well"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a pipeline is fitted, whatever its predictor and calibrators; arguments as of `fit`, checked.

    Attributes:
        division: of the rows.
        learns: whether the errors of predictors are learned before the last step, also those of one alone.
        keys: of the last step, of the chain that predicts, and of the folds.
        deadline: of `time.monotonic`, for the fits to folds; None for as long as they take.
    """

    method: Method
    division: Division
    recalibrate: Callable | None
    learns: bool
    weights: Float[Array, " n"] | None
    by: Groups
    columns: Categorical
    keys: tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]
    deadline: float | None = None

    @property
    def is_out_of_fold(self) -> bool:
        """Whether another model predicts new rows than those that made the errors."""
        return self.division.predicts != "fold"

    @property
    def shares_inference(self) -> bool:
        """Whether processes are fitted by the inference that was taken without the first fold.

        So errors out of fold are those of the inference that predicts. An exact one may be too expensive for all rows,
        and then these choose anew. Of CV+ each model knows nothing of the rows
        that it predicts. Nothing else is shared. When all searches began at one optimum, errors out of fold did not
        show that a fit may end at another one: 90 % intervals of election covered 66 %.
        """
        return self.division.predicts == "all_rows"

    def last(self) -> Callable:
        """The fit of the last step."""
        step = with_columns(checked(self.recalibrate), self.columns)
        return partial(with_key, self.by.told(step), key=self.keys[0])


# The models of some folds, and for every fold what each step predicts of the rows that it holds out.
Models = tuple[list[Callable], list[Any]]


class Held(NamedTuple):
    """What a pipeline predicts of rows that its models were not fitted to.

    Attributes:
        steps: the predictions after each step.
        last: the last step, fitted to those before; None where there is none, and with "cv+".
        chain: of a single fold, or of all folds together; None where one fitted to all rows predicts.
        like: what was taken without the first fold, for that one; None where it takes its own.
    """

    steps: tuple[Step, ...]
    last: Callable | None
    chain: Any
    like: Sequence[Taken | None] | None


def fit_one(
    x: Table,
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    plan: Plan,
    held: Held | None = None,
) -> Pipeline:
    """The pipeline of one predictor; `held` is what it predicts of held-out rows, if that is known."""
    if held is None:
        held = held_of(x, y, predictor, calibrators, plan, models(x, y, predictor, calibrators, plan, slice(None)))
    chain = held.chain
    if chain is None:
        chain = chain_of(x, y, plan, (predictor, calibrators), held.like)
    return pipeline_of(x, chain, held.last, held.steps, plan, Recipe(((predictor, tuple(calibrators)),)))


def pipeline_of(
    x: Table, chain: Any, last: Callable | None, steps: tuple[Step, ...], plan: Plan, recipe: Recipe | None
) -> Pipeline:
    """The pipeline of these fitted parts, without others that were tried."""
    return Pipeline(
        chain,
        last,
        steps=steps,
        others=(),
        dropped=(),
        omitted=(),
        without_weights=(),
        recipe=recipe,
        method=plan.method.name,
        layout=Layout.of(x),
        by=plan.by.without_labels(),
    )


def taken_of(chain: Any) -> tuple[Taken | None, ...]:
    """By which inferences the processes of a chain were fitted."""
    return tuple(Taken.of(step) for step in (chain.predictor, *chain.calibrators))


def _fit_of(
    predictor: Any, calibrators: Sequence[Callable], plan: Plan, like: Sequence[Taken | None] | None = None
) -> Callable:
    return partial(fit_chain, predictor, calibrators, columns=plan.columns, like=like)


def _targets(y: Float[Array, " n"], plan: Plan) -> tuple[Array, ...]:
    return (y,) if plan.weights is None else (y, plan.weights)


def models(
    x: Table,
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    plan: Plan,
    some: slice,
    like: Sequence[Taken | None] | None = None,
    told: progress.Work | None = None,
    *,
    warns: bool = True,
) -> Models:
    """The models of some of the folds, and what they predict.

    Args:
        x: inputs [n, d], or a data frame.
        y: targets [n].
        predictor: the first step.
        calibrators: those after it.
        plan: how a pipeline is fitted.
        some: of the folds.
        like: what was taken without another fold.
        told: the work that these fits are steps of.
        warns: whether warnings of the fits become one; not in a thread, where they cannot be caught.
    """
    (_, chain_key, folds_key), folds = plan.keys, plan.division.folds
    keys = _random.split(folds_key, len(folds)) if plan.is_out_of_fold else [chain_key]
    about = WITHOUT_A_FOLD if plan.is_out_of_fold else _SET_ASIDE
    fit_rows, targets = _fit_of(predictor, calibrators, plan, like), _targets(y, plan)
    as_first = lambda chain: _fit_of(predictor, calibrators, plan, taken_of(chain))
    begin = as_first if like is None and plan.shares_inference else None
    return models_of_folds(
        fit_rows,
        (x,),
        targets,
        folds[some],
        keys[some],
        predict=Chain.after_each_step,
        about=about if warns else None,
        share_nothing=share_nothing((predictor, *calibrators)),
        begin=begin,
        deadline=plan.deadline,
        told=told,
    )


def held_of(
    x: Table, y: Float[Array, " n"], predictor: Any, calibrators: Sequence[Callable], plan: Plan, models: Models
) -> Held:
    """What the models of all folds predict, after each step, and after the last."""
    (chains, blocks), division = models, plan.division
    chain: Any = None if division.predicts == "all_rows" else chains[0]
    parts = [division.rows[places] for places in division.parts]
    if not division.folds[1:]:
        blocks = [[each[places] for each in blocks[0]] for places in division.parts]
    as_step = partial(step_of, y=y, parts=parts, out_of_fold=plan.is_out_of_fold)
    names = [name_of(step) for step in (predictor, *calibrators)]
    steps = [as_step(name, of_parts) for name, of_parts in zip(names, zip(*blocks, strict=True), strict=True)]
    last, ends = None, [block[-1] for block in blocks]
    if division.predicts == "folds":
        with one_warning(_LAST_STEP):
            has_groups = plan.method.groups is not None
            chain = cross_conformal.of_folds(chains, ends, division.folds, x, y, score=None, has_groups=has_groups)
            steps.append(as_step("cv+", _recalibrated(plan.last(), x, y, ends, parts, plan.by)))
    elif plan.recalibrate is not None:
        last, step = last_step(x, y, steps[-1], ends, plan)
        steps.append(step)
    like = taken_of(chains[0]) if plan.shares_inference else None
    return Held(tuple(steps), last, chain, like)


def last_step(
    x: Table, y: Float[Array, " n"], end: Step, ends: Sequence[Distribution], plan: Plan
) -> tuple[Callable, Step]:
    """The last step, fitted to what those before predict; and as one of the steps, scored on held-out rows.

    Args:
        x: inputs [n, d], or a data frame.
        y: targets [n].
        end: the step before.
        ends: its predictions of every part.
        plan: how a pipeline is fitted.
    """
    rows, parts = np.asarray(end.rows), [plan.division.rows[places] for places in plan.division.parts]
    with one_warning(_LAST_STEP):
        last = plan.last()(*take_rows(rows, x), end.predictions, end.y, **plan.by.of_rows(rows))
        found = _recalibrated(plan.last(), x, y, ends, parts, plan.by)
    return last, step_of(name_of(plan.recalibrate), found, y=y, parts=parts, out_of_fold=plan.is_out_of_fold)


def chain_of(
    x: Table,
    y: Float[Array, " n"],
    plan: Plan,
    pair: tuple[Any, Sequence[Callable]],
    like: Sequence[Taken | None] | None,
) -> Chain:
    """Predictor and calibrators that predict new rows: fitted to all, or to those that are not set aside."""
    tables = (x, *_targets(y, plan))
    if plan.division.predicts == "fold":
        tables = take_rows(plan.division.folds[0].training, *tables)
    return _fit_of(*pair, plan, like)(*tables, key=plan.keys[1])


def fit_chain(
    predictor: Any,
    calibrators: Sequence[Callable],
    x: Table,
    y: Float[Array, " n"],
    weights: Float[Array, " n"] | None = None,
    *,
    columns: Categorical = (),
    like: Sequence[Taken | None] | None = None,
    key: PRNGKeyArray,
) -> Chain:
    """A predictor and calibrators, each fitted to what the steps before it predict; steps as those of `fit`.

    `like` is what was taken of other rows: processes are fitted by the same inferences.
    """
    model_key, *keys = _random.split(key, 1 + len(calibrators))
    first, others = (None, None) if like is None else (like[0], like[1:])
    fit_model = with_weights(with_columns(as_fit(predictor), columns), weights)
    model = with_key(fit_model, x, y, key=model_key, like=first)
    steps = [with_columns(checked(calibrator), columns) for calibrator in calibrators]
    if not steps:
        return Chain(model, ())
    return Chain(model, fit_steps(steps, x, as_prediction(model(x)), y, keys=keys, like=others))


def _recalibrated(
    fit_last: Callable, x: Table, y: Float[Array, " n"], predictions: Sequence, parts: Sequence[np.ndarray], by: Groups
) -> list[Distribution]:
    """What the last step makes of each part, fitted to the others: its scores are of held-out rows, too."""
    order, found = np.concatenate(parts), []
    places = np.split(np.arange(len(order)), np.cumsum([len(part) for part in parts])[:-1])
    whole = with_moments(joined(predictions, places))  # joined once, or n folds took time in n^2
    for k, (prediction, part) in enumerate(zip(predictions, parts, strict=True)):
        others = np.delete(np.arange(len(order)), places[k])
        rows = order[others]
        x_others, y_others = take_rows(rows, x, y)
        last = fit_last(x_others, whole[others], y_others, **by.of_rows(rows))
        found.append(last(*take_rows(part, x), prediction, **by.of_rows(part)))
    return found


def step_of(
    name: str,
    predictions: Sequence[Distribution],
    *,
    y: Float[Array, " n"],
    parts: Sequence[np.ndarray],
    out_of_fold: bool,
) -> Step:
    """The predictions of all parts, in the order of the rows."""
    rows = np.sort(np.concatenate(parts))
    whole, left = joined(predictions, [np.searchsorted(rows, part) for part in parts]), 0
    if out_of_fold:
        whole, left = marked_out_of_fold(whole), len(y) - len(rows)
    return Step(name, whole, take_rows(rows, y)[0], jax.device_put(rows), num_not_held_out=left)
