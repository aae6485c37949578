"""From x and y to a distribution that covers: a predictor, calibrators, and a recalibration by out-of-fold errors.

The errors of a model on the data points that it was fitted to are too small, and so are intervals that rest on them.
Here predictor and calibrators are fitted together, once without each fold, and predict it; by these errors the last
step recalibrates predictor and calibrators fitted to all data points. Or a fraction is set aside for it: then the last
step's guarantee holds. Or the models of the folds predict new rows, too: then the guarantee of CV+ holds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, progress
from jaxcal.calibrators import conformal
from jaxcal.distributions import Distribution
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions.concatenated import with_moments
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Layout, Series, Table
from jaxcal.pipeline import cross_conformal
from jaxcal.pipeline.candidates import candidates
from jaxcal.pipeline.chain import Chain, fit_steps
from jaxcal.pipeline.fitted import Pipeline, Scores, Step
from jaxcal.pipeline.methods import CVPlus, Division, Folds, Method, Prefit, Split, as_method
from jaxcal.pipeline.out_of_fold import WITHOUT_A_FOLD, joined, models_of_folds, one_warning, take_rows
from jaxcal.pipeline.steps import (
    Estimator,
    Fitted,
    Groups,
    as_distribution,
    as_fit,
    as_table_and_targets,
    checked,
    columns_of,
    name_of,
    with_columns,
    with_key,
    with_weights,
)

__all__ = [
    "CVPlus",
    "Chain",
    "Estimator",
    "Folds",
    "Groups",
    "Pipeline",
    "Prefit",
    "Scores",
    "Split",
    "Step",
    "candidates",
    "fit",
]

# What warnings are about.
_SET_ASIDE = "in the fit to the rows that are not set aside, which counts them anew"
_LAST_STEP = "in the last step, which is fitted without each fold as well"
_OF_CV_PLUS = (
    "method='cv+' needs a predictor, and neither recalibrate nor by: its guarantee is for the models of the folds "
    "themselves, with their absolute errors, and not for a predictor that is chosen by these errors."
)


def fit(
    x: Table,
    y: Series,
    *,
    predictor: Any = None,
    calibrators: Sequence[Callable] = (),
    recalibrate: Callable | None = conformal.fit,
    method: str | Method = "folds",
    weights: ArrayLike | None = None,
    by: Series | str | Callable | None = None,
    categorical: Categorical = (),
    key: PRNGKeyArray,
) -> Pipeline:
    """Fit a model, calibrators of its predictions, and a last step that makes the intervals hold for new data points.

    Args:
        x: inputs [n, d], or a data frame of pandas or polars, which comes to every step as it is; a vector [n] is one
            column. The names of a frame's columns are kept, and those of new rows put into their order.
        y: targets [n].
        predictor: a fit function, `fit(x, y)` or `fit(x, y, key=key)`, such as `jc.mlp.fit`, configured by
            `functools.partial`; its value is called on inputs and gives a Distribution or an array of means. Or an
            object with `fit` and `predict`, as scikit-learn has them, which is cloned. Or a list of pairs, a predictor
            and its calibrators each: the best is taken, by the CRPS of the whole pipeline out of fold; `print` shows
            all of it. The scores of the best of several are a little too good. None is for the list of `candidates`: a
            Gaussian process, a network with RIO and, where scikit-learn is installed, boosted trees with RIO.
        calibrators: fit functions `fit(x, base, y)`, such as `jc.rio.fit`, in their order; each is fitted to what the
            steps before predict of the rows they were fitted to.
        recalibrate: the last step, a fit function as these, of errors on rows that the models were not fitted to; None
            for no such step. The default leaves the mean as it is, with intervals around it; where errors are skewed,
            `jc.crude.fit` has the sharper distributions.
        method: where these errors come from, an object with options of its own, or its name for the defaults.
            `Folds(folds=5)`, "folds": predictor and calibrators are fitted once without each fold, and then to all
            rows. `Split(fraction=0.25)`, "split": a fraction of the rows is set aside for the last step; the guarantee
            of the last step holds, if it gives one. `CVPlus(folds=5)`, "cv+": predictor and calibrators are fitted
            without each fold, and kept: the intervals are those of CV+ (`jaxcal.cross_conformal`), with its guarantee.
            A predictor must be given, and `recalibrate` left as it is: CV+ is the last step. `Prefit()`, "prefit": the
            predictor is fitted already, to other rows, an object with `predict` or a function of inputs, and all rows
            are for the steps after it. Without calibrators the guarantee of the last step holds; they are fitted
            without each fold, as with `Folds`. All take groups of rows that stay together, `groups=labels`.
        weights: of the rows [n], for a predictor that takes `sample_weight`, as those of scikit-learn do, or `weights`.
            The other steps count every row once.
        by: labels of groups for the last step, as of `jc.conformal.fit`, each group calibrated by its own rows: labels
            [n], which the call then needs for new rows, too, the name of a column of a data frame, or a function of x.
        categorical: the columns of x whose values have no order, for the steps that take that; those of a frame that
            hold labels are categorical in any case.
        key: random key.

    Raises:
        TypeError: if a step is neither a function nor, as predictor, an object with fit and predict; if key is no
            random key.
        ValueError: if x or y is empty or of the wrong shape, y is not finite, there are fewer rows or groups than
            folds, or there are calibrators without a predictor; if given folds hold out a row several times, or train
            on a row that they hold out, or come with groups; if CV+ comes without a predictor, or with
            `recalibrate`; if weights come without a predictor that takes them, or `by` without a last step that does;
            if a step refuses x, as those of jaxcal do where an array is not finite.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(-3, 3, 60)
        >>> y = np.sin(x) + 0.1 * np.random.default_rng(0).normal(size=60)
        >>> def fit_line(x, y):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> fitted = jc.pipeline.fit(x, y, predictor=fit_line, calibrators=[jc.rio.fit], key=jax.random.key(0))
        >>> [step.name for step in fitted.steps]
        ['fit_line', 'rio', 'conformal']
        >>> lower, upper = fitted(np.array([0.0, 1.0])).interval(0.9)
        >>> bool((lower < upper).all())
        True
    """
    _checks.check_key(key)
    x, y = as_table_and_targets(x, y)
    method = as_method(method).checked(len(y))
    choice = candidates() if predictor is None else predictor if isinstance(predictor, list) else []
    if choice and (calibrators or weights is not None or isinstance(method, Prefit)):
        raise ValueError("calibrators, weights and method='prefit' need a predictor: give one, or none of them.")
    if isinstance(method, CVPlus) and (choice or recalibrate is not conformal.fit or by is not None):
        raise ValueError(_OF_CV_PLUS)
    divide = method
    if isinstance(method, Prefit):
        predictor = Fitted(predictor)
        divide = Folds(folds=method.folds, groups=method.groups) if calibrators else method
    division_key, key = jax.random.split(key)
    order_key, last_key, chain_key, folds_key = jax.random.split(key, 4)
    plan = _Plan(
        method=method,
        division=divide.divide(len(y), (division_key, order_key)),
        recalibrate=recalibrate,
        weights=_checks.as_weights(weights, len(y)),
        by=Groups.of(by, len(y)),
        columns=columns_of(x, categorical),
        keys=(last_key, chain_key, folds_key),
    )
    if not choice:
        return _fit(x, y, predictor, calibrators, plan)
    tried = _tried(x, y, choice, plan, order_key)
    best = int(np.argmin([pipeline.steps[-1].scores.crps for pipeline in tried]))
    others = tuple(pipeline.steps for k, pipeline in enumerate(tried) if k != best)
    predictor, calibrators = choice[best]
    chosen = _fit(x, y, predictor, calibrators, plan) if isinstance(method, Split) else tried[best]
    return dataclasses.replace(chosen, others=others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """How a pipeline is fitted, whatever its predictor and calibrators; arguments as of `fit`, checked.

    Attributes:
        division: of the rows.
        keys: of the last step, of the chain that predicts, and of the folds.
    """

    method: Method
    division: Division
    recalibrate: Callable | None
    weights: Float[Array, " n"] | None
    by: Groups
    columns: Categorical
    keys: tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]

    @property
    def is_out_of_fold(self) -> bool:
        """Whether another model predicts new rows than those that made the errors."""
        return self.division.predicts != "fold"

    def last(self) -> Callable:
        """The fit of the last step."""
        step = with_columns(checked(self.recalibrate), self.columns)
        return partial(with_key, self.by.told(step), key=self.keys[0])


def _tried(
    x: Table,
    y: Float[Array, " n"],
    choice: Sequence[tuple[Any, Sequence[Callable]]],
    plan: _Plan,
    order_key: PRNGKeyArray,
) -> list[Pipeline]:
    """The pipelines to choose from. What is set aside has no say in the choice: its guarantee would not hold."""
    method = plan.method
    if isinstance(method, Split):
        rows, groups = plan.division.folds[0].training, method.labels(len(y))
        folds = Folds(folds=method.folds, groups=None if groups is None else groups[rows])
        division = folds.divide(len(rows), (order_key, order_key))
        plan = dataclasses.replace(plan, method=folds, division=division, by=plan.by.part(rows))
        x, y = take_rows(rows, x, y)
    tried = []
    with progress.work("pipeline.fit: candidates", len(choice)) as work:
        for predictor, calibrators in choice:
            tried.append(_fit(x, y, predictor, calibrators, plan))
            work.advance()
    return tried


def _fit(x: Table, y: Float[Array, " n"], predictor: Any, calibrators: Sequence[Callable], plan: _Plan) -> Pipeline:
    """The pipeline of one predictor."""
    fit_rows = partial(fit_chain, predictor, calibrators, columns=plan.columns)
    division, by, (_, chain_key, folds_key) = plan.division, plan.by, plan.keys
    folds, is_out_of_fold = division.folds, plan.is_out_of_fold
    targets = (y,) if plan.weights is None else (y, plan.weights)
    keys = list(jax.random.split(folds_key, len(folds))) if is_out_of_fold else [chain_key]
    about = WITHOUT_A_FOLD if is_out_of_fold else _SET_ASIDE
    chains, blocks = models_of_folds(fit_rows, (x,), targets, folds, keys, predict=Chain.after_each_step, about=about)
    chain: Any = fit_rows(x, *targets, key=chain_key) if division.predicts == "all_rows" else chains[0]
    parts = [division.rows[places] for places in division.parts]
    if not folds[1:]:
        blocks = [[each[places] for each in blocks[0]] for places in division.parts]
    step_of = partial(_step, y=y, parts=parts, out_of_fold=is_out_of_fold)
    names = [name_of(step) for step in (predictor, *calibrators)]
    steps = [step_of(name, of_parts) for name, of_parts in zip(names, zip(*blocks, strict=True), strict=True)]
    last, ends = None, [block[-1] for block in blocks]
    with one_warning(_LAST_STEP):
        if division.predicts == "folds":
            has_groups = plan.method.groups is not None
            chain = cross_conformal.of_folds(chains, ends, folds, x, y, score=None, has_groups=has_groups)
        elif plan.recalibrate is not None:
            end = steps[-1]
            last = plan.last()(*take_rows(end.rows, x), end.predictions, end.y, **by.of_rows(np.asarray(end.rows)))
        if plan.recalibrate is not None:
            name = "cv+" if last is None else name_of(plan.recalibrate)
            steps.append(step_of(name, _recalibrated(plan.last(), x, y, ends, parts, by)))
    by, method = by.without_labels(), plan.method.name
    return Pipeline(chain, last, steps=tuple(steps), others=(), method=method, layout=Layout.of(x), by=by)


def fit_chain(
    predictor: Any,
    calibrators: Sequence[Callable],
    x: Table,
    y: Float[Array, " n"],
    weights: Float[Array, " n"] | None = None,
    *,
    columns: Categorical = (),
    key: PRNGKeyArray,
) -> Chain:
    """A predictor and calibrators, each fitted to what the steps before it predict; steps as those of `fit`."""
    model_key, *keys = jax.random.split(key, 1 + len(calibrators))
    model = with_key(with_weights(with_columns(as_fit(predictor), columns), weights), x, y, key=model_key)
    steps = [with_columns(checked(calibrator), columns) for calibrator in calibrators]
    return Chain(model, fit_steps(steps, x, as_distribution(model(x)), y, keys=keys) if steps else ())


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


def _step(
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
