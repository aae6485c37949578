"""From x and y to a distribution that covers: a predictor, calibrators, and a recalibration by out-of-fold errors.

The errors of a model on the data points that it was fitted to are too small, and so are intervals that rest on them.
Here predictor and calibrators are fitted together, once without each fold, and predict it; by these errors the last
step recalibrates predictor and calibrators fitted to all data points. Or a fraction is set aside for it: then the last
step's guarantee holds. Or the models of the folds predict new rows, too: then the guarantee of CV+ holds.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, cross_conformal, metrics, progress
from jaxcal._steps import Estimator, Fitted, Groups, OfNumbers, as_fit, checked, name_of, with_key, with_weights
from jaxcal.calibrators import conformal, rio
from jaxcal.chain import fit_steps
from jaxcal.cross_conformal import JackknifePlus
from jaxcal.cross_validation import (
    Fold,
    as_distribution,
    as_folds,
    as_labels,
    as_table_and_targets,
    columns_of,
    folds_of,
    joined,
    models_of_folds,
    number_of_folds,
    number_of_groups,
    one_warning,
    predictions_of_folds,
    take_rows,
    with_columns,
)
from jaxcal.distributions import Distribution, Point
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.distributions.concatenated import with_moments
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Layout, Series, Table
from jaxcal.guarantee import Guarantee, MeasuredCoverage, WorstCaseGuarantee
from jaxcal.predictors import gaussian_process, mlp

__all__ = ["Chain", "Estimator", "Groups", "Pipeline", "Scores", "Step", "candidates", "fit"]

# The interval of which the coverage is reported.
_LEVEL = 0.9


def fit(
    x: Table,
    y: Series,
    *,
    predictor: Any = None,
    calibrators: Sequence[Callable] = (),
    recalibrate: Callable | None = conformal.fit,
    method: str = "folds",
    folds: int | Iterable | None = None,
    fraction: float = 0.25,
    groups: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    by: Series | str | Callable | None = None,
    categorical: Categorical = (),
    key: PRNGKeyArray,
) -> "Pipeline":
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
        method: where these errors come from. "folds": predictor and calibrators are fitted once without each fold,
            and then to all rows. "split": a fraction of the rows is set aside for the last step; the guarantee of the
            last step holds, if it gives one. "cv+": predictor and calibrators are fitted without each fold, and kept:
            the intervals are those of CV+ (`jaxcal.cross_conformal`), with its guarantee. A predictor must be given,
            and `recalibrate` left as it is: CV+ is the last step. "prefit": the predictor is fitted already, to other
            rows, an object with `predict` or a function of inputs, and all rows are for the steps after it. Without
            calibrators the guarantee of the last step holds; they are fitted without each fold, as with "folds".
        folds: number of folds; with "split" the scores after the last step are measured by so many. None: 10 of at
            most 1,000 rows, where the errors of models fitted to fewer rows are too large, and 5 of more. With "cv+"
            all have the same size; the rest, fewer rows than folds, is in the training rows of each.
            With "folds" and "prefit" also the numbers of the rows of each fold, which hold every row once. Or pairs of
            training rows and held-out rows, as the splitters of scikit-learn give them, that hold out every row once
            at most. No step is calibrated by a row that is never held out.
        fraction: with "split", of the rows that are set aside; of fewer than 9 no interval of 90 % can be
            guaranteed, and it is infinite.
        groups: labels [n]: rows of one group stay in one fold, or on one side of the split. CV+ then guarantees
            nothing.
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
            on a row that they hold out, or come with groups; if method="cv+" comes without a predictor, or with
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
    _checks.check_choice("method", method, ("folds", "split", "cv+", "prefit"))
    if hasattr(folds, "split") and not isinstance(folds, str):
        raise ValueError(f"folds is a {type(folds).__name__}: give the folds that it makes, list(folds.split(x, y)).")
    number, given = (None, list(folds)) if isinstance(folds, Iterable) else (folds, None)
    if given is not None and method not in ("folds", "prefit"):
        raise ValueError(
            f"method={method!r} draws its folds itself: give their number; got {len(given)} lists of rows."
        )
    choice = candidates() if predictor is None else predictor if isinstance(predictor, list) else []
    if choice and (calibrators or weights is not None or method == "prefit"):
        raise ValueError("calibrators, weights and method='prefit' need a predictor: give one, or none of them.")
    labels, weights = as_labels(groups, len(y)), _checks.as_weights(weights, len(y))
    if given is not None:
        _checks.check_alone("folds says which rows stay together", groups=groups)
        given = as_folds("folds", given, len(y))
    columns = columns_of(x, categorical)
    if method == "cv+":
        if choice or recalibrate is not conformal.fit or by is not None:
            raise ValueError(_OF_CV_PLUS)
        shared = {"groups": labels, "weights": weights, "columns": columns, "key": key}
        return _fit_cv_plus(x, y, predictor, calibrators, folds=number, **shared)
    aside_key, key = jax.random.split(key)
    aside = None
    if method == "split":
        aside = _set_aside(len(y), fraction, number, labels, aside_key)
    elif method == "prefit":
        predictor = Fitted(predictor)
        aside = None if calibrators else _all_aside(given or number, len(y), labels, aside_key)
    options = {"folds": given or number, "columns": columns, "recalibrate": recalibrate, "method": method, "key": key}
    options["by"] = Groups.of(by, len(y))
    others = ()
    if choice:
        # What is set aside has no say in the choice: its guarantee would not hold.
        rows = np.arange(len(y)) if aside is None else _rest(len(y), aside)
        groups_of_rows = None if labels is None else labels[rows]
        x_own, y_own = take_rows(rows, x, y)
        own = options | {"by": options["by"].part(rows), "groups": groups_of_rows, "weights": None, "aside": None}
        tried = []
        with progress.work("pipeline.fit: candidates", len(choice)) as work:
            for steps in choice:
                tried.append(_fit(x_own, y_own, *steps, **own))
                work.advance()
        best = int(np.argmin([pipeline.steps[-1].scores.crps for pipeline in tried]))
        predictor, calibrators = choice[best]
        others = tuple(pipeline.steps for k, pipeline in enumerate(tried) if k != best)
        if aside is None:
            return dataclasses.replace(tried[best], others=others)
    pipeline = _fit(x, y, predictor, calibrators, groups=labels, weights=weights, aside=aside, **options)
    return dataclasses.replace(pipeline, others=others)


def candidates() -> list[tuple[Any, tuple[Callable, ...]]]:
    """The predictors that `fit` tries where none is given, with the calibrators of each.

    Of lists of three they have the least CRPS over data sets with noise (`benchmarks/results/pipelines.md`).
    """
    found = [(gaussian_process.fit, ()), (mlp.fit, (rio.fit,))]
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        return found
    return [*found, (OfNumbers(HistGradientBoostingRegressor(random_state=0)), (rio.fit,))]


class Pipeline(eqx.Module):
    """A predictor, calibrators and a last step; made by `fit`. `print(pipeline)` is a table of their scores.

    Attributes:
        chain: predictor and calibrators, fitted to all rows, or to those that were not set aside; with "cv+" all those
            that were fitted without a fold, as a `jaxcal.cross_conformal.JackknifePlus`.
        last: the last step; None where there is none, and with "cv+", whose `chain` does it.
        steps: what the predictor alone, each calibrator and the last step predict of rows they were not fitted to. That
            of "cv+" is what conformal calibration by the errors of the other folds makes of the predictions of a fold.
        others: the steps of the other pipelines that were tried, where the predictor was chosen.
        method: "folds", "split", "cv+" or "prefit".
        layout: the columns of x.
        by: where the last step has its groups from.
    """

    chain: "Chain | JackknifePlus"
    last: Callable | None
    steps: tuple["Step", ...]
    others: tuple[tuple["Step", ...], ...]
    method: str = eqx.field(static=True)
    layout: Layout
    by: Groups

    def __call__(self, x: Table, *, by: Series | None = None) -> Distribution:
        """The predictive distribution of every row of x.

        Args:
            x: inputs [n, d], or a data frame with the columns of the fit.
            by: the labels of the groups [n], where the fit had labels.

        Raises:
            ValueError: if x has other columns than in the fit; if labels are missing, or there are no groups.
        """
        x = self.layout(x)
        if isinstance(self.chain, JackknifePlus):
            return self.chain(x)
        prediction = self.chain(x)[-1]
        return prediction if self.last is None else self.last(x, prediction, **self.by.of_new_rows(by))

    @property
    def out_of_fold(self) -> Distribution:
        """What the whole pipeline predicts of the rows in `steps[-1].rows`, fitted without them."""
        return self.steps[-1].predictions

    def guarantee(self, confidence_level: float) -> Guarantee | WorstCaseGuarantee | MeasuredCoverage:
        """What is known of the coverage of the central interval at this level; `print` tells it in words.

        With "split", and with "prefit" and no calibrators, it is the guarantee of the last step, if it gives one, with
        "cv+" that of CV+, if there are no groups. With "folds" there is no guarantee: the model that predicts has made
        none of the errors by which it was recalibrated. Then it is what was measured. Where `by` gave groups, each has
        a guarantee of its own, `last.guarantee`, and this is what was measured of all rows.

        Raises:
            ValueError: if the confidence level lies outside (0, 1).
        """
        _checks.check_fraction("confidence_level", confidence_level)
        if isinstance(self.chain, JackknifePlus) and not self.chain.has_groups:
            return self.chain.guarantee(confidence_level)
        guarantee = getattr(self.last, "guarantee", None)
        if guarantee is not None and self.by.source is None and not self.out_of_fold.is_out_of_fold:
            return guarantee(confidence_level)
        return self.steps[-1].coverage(confidence_level)

    def __str__(self) -> str:
        """A table of the steps and their scores."""
        how = "out of fold" if self.out_of_fold.is_out_of_fold else "set aside"
        about = f"{len(self.steps[-1].y)} data points, {how}; mean ± standard error."
        lines = [_HEADER, *map(str, self.steps), about]
        for steps in self.others:
            lines += ["", "tried as well:", *map(str, steps)]
        return "\n".join(lines)


class Chain(eqx.Module):
    """A predictor and the calibrators of its predictions, fitted to the same rows."""

    predictor: Callable
    calibrators: tuple[Callable, ...]

    def __call__(self, x: Table) -> list[Distribution]:
        """What is predicted after each step."""
        predictions = [as_distribution(self.predictor(x))]
        for calibrator in self.calibrators:
            predictions.append(calibrator(x, predictions[-1]))
        return predictions


class Scores(NamedTuple):
    """Means over data points, with their standard errors."""

    crps: float
    crps_error: float
    rmse: float
    rmse_error: float


class Step(eqx.Module):
    """A step of a pipeline, and what it predicts of rows that neither it nor a step before was fitted to.

    Attributes:
        name: of the method.
        predictions: of the rows, m of them.
        y: their targets [m].
        rows: their numbers [m].
        num_not_held_out: how many further rows are in no fold, and have no say in the scores.
    """

    name: str = eqx.field(static=True)
    predictions: Distribution
    y: Float[Array, " m"]
    rows: Array
    num_not_held_out: int = eqx.field(static=True, default=0)

    @property
    def scores(self) -> Scores:
        """Continuous ranked probability score and root mean squared error."""
        with _precision_of(self.y):
            rmse, crps = float(metrics.rmse(self.y, self.predictions)), self.predictions.crps(self.y)
            errors = self.predictions.mean - self.y
        # In units in which their squares are numbers.
        unit = rmse or 1.0
        crps, squares = np.asarray(crps, float) / unit, (np.asarray(errors, float) / unit) ** 2
        error_of = lambda values: float(values.std(ddof=1) / np.sqrt(len(values)))
        return Scores(unit * float(crps.mean()), unit * error_of(crps), rmse, unit * error_of(squares) / 2)

    def coverage(self, confidence_level: float) -> MeasuredCoverage:
        """How many of the rows the central intervals cover."""
        with _precision_of(self.y):
            covered = metrics.coverage(self.y, self.predictions, confidence_level=confidence_level)
        num_rows = len(self.y)
        return MeasuredCoverage(confidence_level, num_rows, round(float(covered) * num_rows), self.num_not_held_out)

    def __str__(self) -> str:
        """A line of the table."""
        scores, covered = self.scores, self.coverage(_LEVEL)
        cells = (f"{v:.4g} ± {e:.2g}" for v, e in ((scores.crps, scores.crps_error), (scores.rmse, scores.rmse_error)))
        low, high = covered.band()
        coverage = f"{100 * covered.coverage:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        if isinstance(self.predictions, Point):
            coverage = "no interval"
        return f"{self.name:30}" + "".join(f"{cell:>20}" for cell in cells) + f"{coverage:>26}"


def _precision_of(y: Array) -> AbstractContextManager:
    """Where float64 numbers are, 64 bits: the estimator of scikit-learn computes in these, whatever JAX does."""
    return jax.enable_x64(True) if y.dtype == np.float64 else nullcontext()


_OF_CV_PLUS = (
    "method='cv+' needs a predictor, and neither recalibrate nor by: its guarantee is for the models of the folds "
    "themselves, with their absolute errors, and not for a predictor that is chosen by these errors."
)
_LAST_STEP = "in the last step, which is fitted without each fold as well"
_HEADER = f"{'':30}{'CRPS':>20}{'RMSE':>20}{'90 % interval covers':>26}"


# The fit


def _fit(
    x: Table,
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    *,
    recalibrate: Callable | None,
    folds: int | list[Fold] | None,
    groups: np.ndarray | None,
    weights: Float[Array, " n"] | None,
    by: Groups,
    columns: Categorical,
    method: str,
    aside: list[np.ndarray] | None,
    key: PRNGKeyArray,
) -> Pipeline:
    """The pipeline of one predictor; the rows set aside, where there are any, come in parts."""
    fit_rows = partial(fit_chain, predictor, calibrators, columns=columns)
    order_key, last_key, chain_key, folds_key = jax.random.split(key, 4)
    if aside is not None:
        rest, parts = _rest(len(y), aside), aside
        with one_warning("in the fit to the rows that are not set aside, which counts them anew"):
            of_rest = None if weights is None else weights[rest]
            x_rest, y_rest = take_rows(rest, x, y)
            chain = fit_rows(x_rest, y_rest, of_rest, key=chain_key)
        blocks = [chain(*take_rows(part, x)) for part in parts]
    else:
        pieces = _pieces(folds, len(y), groups, order_key)
        keys = list(jax.random.split(folds_key, len(pieces)))
        blocks = predictions_of_folds(fit_rows, x, y, pieces, keys, weights=weights)
        parts = [piece.held_out for piece in pieces]
        if len(parts) == 1:
            places = _places_in_parts(len(parts[0]), order_key)
            parts, blocks = [parts[0][own] for own in places], [[each[own] for each in blocks[0]] for own in places]
        chain = fit_rows(x, y, weights, key=chain_key)
    names = [name_of(step) for step in (predictor, *calibrators)]
    step_of = partial(_step, y=y, parts=parts, out_of_fold=aside is None)
    steps = [step_of(name, parts_of) for name, parts_of in zip(names, zip(*blocks, strict=True), strict=True)]
    last = None
    if recalibrate is not None:
        fit_last = partial(with_key, by.told(with_columns(checked(recalibrate), columns)), key=last_key)
        end = steps[-1]
        with one_warning(_LAST_STEP):
            last = fit_last(*take_rows(end.rows, x), end.predictions, end.y, **by.of_rows(np.asarray(end.rows)))
            recalibrated = _recalibrated(fit_last, x, y, [block[-1] for block in blocks], parts, by)
        steps.append(step_of(name_of(recalibrate), recalibrated))
    return Pipeline(
        chain=chain,
        last=last,
        steps=tuple(steps),
        others=(),
        method=method,
        layout=Layout.of(x),
        by=by.without_labels(),
    )


def _fit_cv_plus(
    x: Table,
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    *,
    folds: int | None,
    groups: np.ndarray | None,
    weights: Float[Array, " n"] | None,
    columns: Categorical,
    key: PRNGKeyArray,
) -> Pipeline:
    """The pipeline whose models of the folds predict; they give its scores, too."""
    num_rows = len(y)
    folds = number_of_folds(folds, num_rows, number_of_groups(num_rows, groups))
    order_key, folds_key = jax.random.split(key)
    pieces = cross_conformal.folds_for(num_rows, folds, groups, order_key)
    fit_rows = partial(fit_chain, predictor, calibrators, columns=columns)
    keys = list(jax.random.split(folds_key, folds))
    chains, blocks = models_of_folds(fit_rows, x, y, pieces, keys, weights=weights)
    ends, parts = [block[-1] for block in blocks], [piece.held_out for piece in pieces]
    ends_of_chains = [_End(chain) for chain in chains]
    no_groups = Groups.of(None, num_rows)
    with one_warning(_LAST_STEP):
        models = cross_conformal.of_folds(ends_of_chains, ends, pieces, x, y, score=None, has_groups=groups is not None)
        by_step = [*zip(*blocks, strict=True), _recalibrated(conformal.fit, x, y, ends, parts, no_groups)]
    names = [*(name_of(step) for step in (predictor, *calibrators)), "cv+"]
    steps = [
        _step(name, predictions, y=y, parts=parts, out_of_fold=True)
        for name, predictions in zip(names, by_step, strict=True)
    ]
    return Pipeline(
        chain=models,
        last=None,
        steps=tuple(steps),
        others=(),
        method="cv+",
        layout=Layout.of(x),
        by=no_groups,
    )


class _End(eqx.Module):
    """What is predicted after the last step of a chain."""

    chain: Callable[[Any], list[Distribution]]

    def __call__(self, x: Table) -> Distribution:
        return self.chain(x)[-1]


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
    fit_last: Callable,
    x: Table,
    y: Float[Array, " n"],
    predictions: Sequence,
    parts: Sequence[np.ndarray],
    by: Groups,
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
    whole = joined(predictions, [np.searchsorted(rows, part) for part in parts])
    return Step(
        name=name,
        predictions=marked_out_of_fold(whole) if out_of_fold else whole,
        y=take_rows(rows, y)[0],
        rows=jax.device_put(rows),
        num_not_held_out=len(y) - len(rows) if out_of_fold else 0,
    )


def _pieces(folds: int | list[Fold] | None, num_rows: int, groups: np.ndarray | None, key: PRNGKeyArray) -> list[Fold]:
    """Folds at random, or those that were given."""
    if isinstance(folds, list):
        return folds
    return folds_of(num_rows, number_of_folds(folds, num_rows, number_of_groups(num_rows, groups)), groups, key)


def _places_in_parts(num_rows: int, key: PRNGKeyArray) -> list[np.ndarray]:
    """The rows of one fold in parts, so that the last step, too, is scored on rows that it was not fitted to."""
    return [piece.held_out for piece in folds_of(num_rows, number_of_folds(None, num_rows, num_rows), None, key)]


def _set_aside(
    num_rows: int, fraction: float, folds: int | None, groups: np.ndarray | None, key: PRNGKeyArray
) -> list[np.ndarray]:
    """A fraction of the rows at random, or of the groups, in parts."""
    _checks.check_fraction("fraction", fraction)
    kinds, label_of = np.unique(np.arange(num_rows) if groups is None else groups, return_inverse=True)
    aside_key, parts_key = jax.random.split(key)
    number = round(fraction * len(kinds))
    folds = number_of_folds(folds, num_rows, number)
    if not folds <= number < len(kinds):
        raise ValueError(
            f"a fraction of {fraction:g} sets {number} of {len(kinds)} {'rows' if groups is None else 'groups'} aside; "
            f"at least {folds} are needed, and one to fit on."
        )
    chosen = np.asarray(jax.random.permutation(aside_key, len(kinds)))[:number]
    rows = np.flatnonzero(np.isin(label_of, chosen))
    pieces = folds_of(len(rows), folds, None if groups is None else groups[rows], parts_key)
    return [rows[piece.held_out] for piece in pieces]


def _all_aside(
    folds: int | list[Fold] | None, num_rows: int, groups: np.ndarray | None, key: PRNGKeyArray
) -> list[np.ndarray]:
    """All rows that are held out, in parts."""
    parts = [piece.held_out for piece in _pieces(folds, num_rows, groups, key)]
    return parts if len(parts) > 1 else [parts[0][own] for own in _places_in_parts(len(parts[0]), key)]


def _rest(num_rows: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers of the rows that are in none of the parts."""
    return np.setdiff1d(np.arange(num_rows), np.concatenate(parts))
