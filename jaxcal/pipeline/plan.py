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
    GroupSource,
    Taken,
    as_fit,
    as_prediction,
    checked,
    name_of,
    with_columns,
    with_key,
    with_weights,
)

# The fits that merged warnings are about.
_SET_ASIDE = "in the fit to the rows that are not set aside, which are numbered anew"
_LAST_STEP = "in the last step, which is fitted without each fold as well"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a pipeline is fitted, for any predictor and calibrators; other attributes are checked arguments of `fit`.

    Attributes:
        division: the division of the rows.
        learns: whether errors are learned before the last step, also the errors of a single predictor.
        keys: the random keys of the last step, of the chain that predicts, and of the folds.
        deadline: the end of the fits to folds, in the time of `time.monotonic`; None for no deadline.
    """

    method: Method
    division: Division
    recalibrate: Callable | None
    learns: bool
    weights: Float[Array, " n"] | None
    by: GroupSource
    columns: Categorical
    keys: tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]
    deadline: float | None = None

    @property
    def is_out_of_fold(self) -> bool:
        """Whether the errors are out of fold: new rows are not predicted by the single model that made them."""
        return self.division.predicts != "fold"

    @property
    def shares_inference(self) -> bool:
        """Whether Gaussian processes use the inference that the fit without the first fold chose.

        Out-of-fold errors are then errors of the inference that predicts. Exact inference may be too expensive for all
        rows: the fit to all rows then chooses again. With CV+ no inference is shared, since a model must know nothing
        of the rows that it predicts. Nothing but the inference is shared. When all searches began at the same optimum,
        out-of-fold errors did not show that a fit may end at another optimum. On election, 90 % intervals covered 66 %
        then.
        """
        return self.division.predicts == "all_rows"

    def last(self) -> Callable:
        """The fit of the last step."""
        step = with_columns(checked(self.recalibrate), self.columns)
        return partial(with_key, self.by.told(step), key=self.keys[0])


# The models of some folds, and for every fold the predictions of its held-out rows after each step.
Models = tuple[list[Callable], list[Any]]


class Held(NamedTuple):
    """The held-out predictions of a pipeline.

    Attributes:
        steps: the predictions after each step.
        last: the last step, fitted to the predictions before it; None if there is none, and with "cv+".
        chain: the chain of a single fold, or of all folds together; None if a chain fitted to all rows predicts.
        like: the inferences that the fit without the first fold chose, for that chain; None if it chooses its own.
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
    """The pipeline of one predictor; `held` is its held-out predictions, if they are known."""
    if held is None:
        held = held_of(x, y, predictor, calibrators, plan, models(x, y, predictor, calibrators, plan, slice(None)))
    chain = held.chain
    if chain is None:
        chain = chain_of(x, y, plan, (predictor, calibrators), held.like)
    return pipeline_of(x, chain, held.last, held.steps, plan, Recipe(((predictor, tuple(calibrators)),)))


def pipeline_of(
    x: Table, chain: Any, last: Callable | None, steps: tuple[Step, ...], plan: Plan, recipe: Recipe | None
) -> Pipeline:
    """The pipeline of these fitted parts, without other candidates."""
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
    """The inferences by which the processes of a chain were fitted; None for a step without a process."""
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
    """The models of some of the folds, and their held-out predictions.

    Args:
        x: inputs [n, d], or a data frame.
        y: targets [n].
        predictor: the first step.
        calibrators: those after it.
        plan: how a pipeline is fitted.
        some: which of the folds.
        like: the inferences that the fit without another fold chose.
        told: the work that these fits are steps of.
        warns: whether the warnings of the fits are merged into one; not in a thread, where they cannot be caught.
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
    """The held-out predictions of the models of all folds, after each step and after the last step."""
    (chains, blocks), division = models, plan.division
    chain: Any = None if division.predicts == "all_rows" else chains[0]
    parts = [division.rows[places] for places in division.parts]
    if not division.folds[1:]:
        blocks = [[each[places] for each in blocks[0]] for places in division.parts]
    as_step = partial(step_of, y=y, parts=parts, out_of_fold=plan.is_out_of_fold)
    names = [name_of(step) for step in (predictor, *calibrators)]
    steps = [as_step(name, ends_of_parts) for name, ends_of_parts in zip(names, zip(*blocks, strict=True), strict=True)]
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
    """The last step, fitted to the predictions before it, and its held-out predictions as a step.

    Args:
        x: inputs [n, d], or a data frame.
        y: targets [n].
        end: the step before the last step.
        ends: the predictions of that step for every part.
        plan: how a pipeline is fitted.
    """
    rows, parts = np.asarray(end.rows), [plan.division.rows[places] for places in plan.division.parts]
    with one_warning(_LAST_STEP):
        last = plan.last()(*take_rows(rows, x), end.predictions, end.y, **plan.by.of_rows(rows))
        predictions = _recalibrated(plan.last(), x, y, ends, parts, plan.by)
    return last, step_of(name_of(plan.recalibrate), predictions, y=y, parts=parts, out_of_fold=plan.is_out_of_fold)


def chain_of(
    x: Table,
    y: Float[Array, " n"],
    plan: Plan,
    pair: tuple[Any, Sequence[Callable]],
    like: Sequence[Taken | None] | None,
) -> Chain:
    """Predictor and calibrators that predict new rows, fitted to all rows that are not set aside."""
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
    """Fit a predictor and calibrators, each calibrator to the predictions of the steps before it; steps as of `fit`.

    `like` holds the inferences that a fit to other rows chose: processes are fitted by the same inferences.
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
    fit_last: Callable,
    x: Table,
    y: Float[Array, " n"],
    predictions: Sequence,
    parts: Sequence[np.ndarray],
    by: GroupSource,
) -> list[Distribution]:
    """The predictions of each part after a last step that is fitted to the other parts, and so held out."""
    order, recalibrated = np.concatenate(parts), []
    places = np.split(np.arange(len(order)), np.cumsum([len(part) for part in parts])[:-1])
    whole = with_moments(joined(predictions, places))  # joined once: n folds would take time in n^2
    for k, (prediction, part) in enumerate(zip(predictions, parts, strict=True)):
        others = np.delete(np.arange(len(order)), places[k])
        rows = order[others]
        x_others, y_others = take_rows(rows, x, y)
        last = fit_last(x_others, whole[others], y_others, **by.of_rows(rows))
        recalibrated.append(last(*take_rows(part, x), prediction, **by.of_rows(part)))
    return recalibrated


def step_of(
    name: str,
    predictions: Sequence[Distribution],
    *,
    y: Float[Array, " n"],
    parts: Sequence[np.ndarray],
    out_of_fold: bool,
) -> Step:
    """The predictions of all parts as a step, in the order of the rows."""
    rows = np.sort(np.concatenate(parts))
    whole, left = joined(predictions, [np.searchsorted(rows, part) for part in parts]), 0
    if out_of_fold:
        whole, left = marked_out_of_fold(whole), len(y) - len(rows)
    return Step(name, whole, take_rows(rows, y)[0], jax.device_put(rows), num_not_held_out=left)
