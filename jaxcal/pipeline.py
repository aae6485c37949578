"""From x and y to a distribution that covers: a predictor, calibrators, and a recalibration by honest errors.

The errors of a model on the data points that it was fitted to are too small, and so are intervals that rest on them.
Here predictor and calibrators are fitted together without each fold in turn, and predict it; by these errors the last
step recalibrates predictor and calibrators fitted to all data points. Or a fraction is set aside for it: then the last
step's guarantee holds. Or the models of the folds predict new rows, too: then the guarantee of CV+ holds.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, cross_conformal, metrics
from jaxcal.calibrators import conformal, rio
from jaxcal.cross_conformal import JackknifePlus
from jaxcal.cross_validation import (
    as_distribution,
    as_labels,
    folds_of,
    joined,
    models_of_folds,
    one_warning,
    predictions_of_folds,
    take_rows,
)
from jaxcal.distributions import Distribution, Point
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.guarantee import Guarantee, MeasuredCoverage, WorstCaseGuarantee
from jaxcal.predictors import gaussian_process, mlp

# The interval of which the coverage is reported.
_LEVEL = 0.9
# Without a fifth of few rows errors are larger than those of the final model, and intervals too wide: 2 % of coverage
# and 8 % of width on 250 to 500 rows (`benchmarks/results/pipelines.md`).
_FOLDS_OF_FEW_ROWS, _FOLDS, _FEW_ROWS = 10, 5, 1000


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    predictor: Any = None,
    calibrators: Sequence[Callable] = (),
    recalibrate: Callable | None = conformal.fit,
    method: str = "folds",
    folds: int | None = None,
    fraction: float = 0.25,
    groups: ArrayLike | None = None,
    key: PRNGKeyArray,
) -> "Pipeline":
    """Fit a model, calibrators of its predictions, and a last step that makes the intervals hold for new data points.

    Args:
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n].
        predictor: a fit function, `fit(x, y)` or `fit(x, y, key=key)`, such as `jc.mlp.fit`, configured by
            `functools.partial`; its value is called on inputs and gives a Distribution or an array of means. Or an
            object with `fit` and `predict`, as scikit-learn has them, which is cloned. None takes the best of a short
            list, by the CRPS of the whole pipeline out of fold: a Gaussian process, a network with RIO and, where
            scikit-learn is installed, boosted trees with RIO; `print` shows all of it. The scores of the best of
            several are a little too good.
        calibrators: fit functions `fit(x, base, y)`, such as `jc.rio.fit`, in their order; each is fitted to what the
            steps before predict of the rows they were fitted to.
        recalibrate: the last step, a fit function as these, of errors that are honest; None for no such step. The
            default leaves the mean as it is, with intervals around it; where errors are skewed, `jc.crude.fit` has the
            sharper distributions.
        method: where these errors come from. "folds": predictor and calibrators are fitted without each fold in turn,
            and then to all rows. "split": a fraction of the rows is set aside for the last step; the guarantee of the
            last step holds, if it gives one. "cv+": predictor and calibrators are fitted without each fold, and kept:
            the intervals are those of CV+ (`jaxcal.cross_conformal`), with its guarantee. A predictor must be given,
            and `recalibrate` left as it is: CV+ is the last step.
        folds: number of folds; with "split" the scores after the last step are measured by so many. None: 10 of at
            most 1,000 rows, where the errors of models fitted to fewer rows are too large, and 5 of more. With "cv+"
            all have the same size; the rest, fewer rows than folds, is in the training rows of each.
        fraction: with "split", of the rows that are set aside; of fewer than 9 no interval of 90 % can be
            guaranteed, and it is infinite.
        groups: labels [n]: rows of one group stay in one fold, or on one side of the split. CV+ then guarantees
            nothing.
        key: random key.

    Raises:
        TypeError: if a step is neither a function nor, as predictor, an object with fit and predict; if key is no
            random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, there are fewer rows or groups than folds, or
            there are calibrators without a predictor; if method="cv+" comes without a predictor, or with
            `recalibrate`.

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
    x = _checks.as_matrix("x", x)
    y = _checks.as_vector("y", y, length=x.shape[0])
    _checks.check_key(key)
    _checks.check_choice("method", method, ("folds", "split", "cv+"))
    if predictor is None and calibrators:
        raise ValueError("calibrators without a predictor: give both, or neither.")
    labels = as_labels(groups, x.shape[0])
    if method == "cv+":
        if predictor is None or recalibrate is not conformal.fit:
            raise ValueError(_OF_CV_PLUS)
        return _fit_cv_plus(x, y, predictor, calibrators, folds=folds, groups=labels, key=key)
    aside_key, key = jax.random.split(key)
    aside = _set_aside(x.shape[0], fraction, folds, labels, aside_key) if method == "split" else None
    options = {"recalibrate": recalibrate, "folds": folds, "key": key}
    others = ()
    if predictor is None:
        # What is set aside has no say in the choice: its guarantee would not hold.
        rows = np.arange(x.shape[0]) if aside is None else _rest(x.shape[0], aside)
        groups_of_rows = None if labels is None else labels[rows]
        candidates = _candidates()
        x_own, y_own = take_rows(rows, x, y)
        tried = [_fit(x_own, y_own, *steps, groups=groups_of_rows, aside=None, **options) for steps in candidates]
        best = int(np.argmin([pipeline.steps[-1].scores.crps for pipeline in tried]))
        predictor, calibrators = candidates[best]
        others = tuple(pipeline.steps for k, pipeline in enumerate(tried) if k != best)
        if aside is None:
            return dataclasses.replace(tried[best], others=others)
    pipeline = _fit(x, y, predictor, calibrators, groups=labels, aside=aside, **options)
    return dataclasses.replace(pipeline, others=others)


class Pipeline(eqx.Module):
    """A predictor, calibrators and a last step; made by `fit`. `print(pipeline)` is a table of their scores.

    Attributes:
        chain: predictor and calibrators, fitted to all rows, or to those that were not set aside; with "cv+" all those
            that were fitted without a fold, as a `jaxcal.cross_conformal.JackknifePlus`.
        last: the last step; None where there is none, and with "cv+", whose `chain` does it.
        steps: what the predictor alone, each calibrator and the last step predict of rows they were not fitted to. That
            of "cv+" is what conformal calibration by the errors of the other folds makes of the predictions of a fold.
        others: the steps of the other pipelines that were tried, where the predictor was chosen.
        method: "folds", "split" or "cv+".
    """

    chain: "Chain | JackknifePlus"
    last: Callable | None
    steps: tuple["Step", ...]
    others: tuple[tuple["Step", ...], ...]
    method: str = eqx.field(static=True)

    def __call__(self, x: ArrayLike) -> Distribution:
        """The predictive distribution of every row of x [n, d]."""
        x = _checks.as_matrix("x", x)
        if isinstance(self.chain, JackknifePlus):
            return self.chain(x)
        prediction = self.chain(x)[-1]
        return prediction if self.last is None else self.last(x, prediction)

    @property
    def out_of_fold(self) -> Distribution:
        """What the whole pipeline predicts of the rows in `steps[-1].rows`, fitted without them."""
        return self.steps[-1].predictions

    def guarantee(self, confidence_level: float) -> Guarantee | WorstCaseGuarantee | MeasuredCoverage:
        """What is known of the coverage of the central interval at this level; `print` tells it in words.

        With "split" it is the guarantee of the last step, if it gives one, with "cv+" that of CV+, if there are no
        groups. With "folds" there is no guarantee: the model that predicts has made none of the errors by which it was
        recalibrated. Then it is what was measured.

        Raises:
            ValueError: if the confidence level lies outside (0, 1).
        """
        _checks.check_fraction("confidence_level", confidence_level)
        if isinstance(self.chain, JackknifePlus) and not self.chain.has_groups:
            return self.chain.guarantee(confidence_level)
        guarantee = getattr(self.last, "guarantee", None)
        if self.method == "split" and guarantee is not None:
            return guarantee(confidence_level)
        return self.steps[-1].coverage(confidence_level)

    def __str__(self) -> str:
        """A table of the steps and their scores."""
        how = "set aside" if self.method == "split" else "out of fold"
        about = f"{len(self.steps[-1].y)} data points, {how}; mean ± standard error."
        lines = [_HEADER, *map(str, self.steps), about]
        for steps in self.others:
            lines += ["", "tried as well:", *map(str, steps)]
        return "\n".join(lines)


class Chain(eqx.Module):
    """A predictor and the calibrators of its predictions, fitted to the same rows."""

    predictor: Callable
    calibrators: tuple[Callable, ...]

    def __call__(self, x: Float[Array, "n d"]) -> list[Distribution]:
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
    """

    name: str = eqx.field(static=True)
    predictions: Distribution
    y: Float[Array, " m"]
    rows: Array

    @property
    def scores(self) -> Scores:
        """Continuous ranked probability score and root mean squared error."""
        rmse = float(metrics.rmse(self.y, self.predictions))
        # In units in which their squares are numbers.
        unit = rmse or 1.0
        crps = np.asarray(self.predictions.crps(self.y), float) / unit
        squares = (np.asarray(self.predictions.mean - self.y, float) / unit) ** 2
        error_of = lambda values: float(values.std(ddof=1) / np.sqrt(len(values)))
        return Scores(unit * float(crps.mean()), unit * error_of(crps), rmse, unit * error_of(squares) / 2)

    def coverage(self, confidence_level: float) -> MeasuredCoverage:
        """How many of the rows the central intervals cover."""
        covered = metrics.coverage(self.y, self.predictions, confidence_level=confidence_level)
        return MeasuredCoverage(confidence_level, len(self.y), round(float(covered) * len(self.y)))

    def __str__(self) -> str:
        """A line of the table."""
        scores, covered = self.scores, self.coverage(_LEVEL)
        cells = (f"{v:.4g} ± {e:.2g}" for v, e in ((scores.crps, scores.crps_error), (scores.rmse, scores.rmse_error)))
        low, high = covered.band()
        coverage = f"{100 * covered.coverage:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        if isinstance(self.predictions, Point):
            coverage = "no interval"
        return f"{self.name:30}" + "".join(f"{cell:>20}" for cell in cells) + f"{coverage:>26}"


_OF_CV_PLUS = (
    "method='cv+' needs a predictor, and no recalibrate: its guarantee is for the models of the folds themselves, with "
    "their absolute errors, and not for a predictor that is chosen by these errors."
)
_HEADER = f"{'':30}{'CRPS':>20}{'RMSE':>20}{'90 % interval covers':>26}"


# The fit


def _fit(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    *,
    recalibrate: Callable | None,
    folds: int | None,
    groups: np.ndarray | None,
    aside: list[np.ndarray] | None,
    key: PRNGKeyArray,
) -> Pipeline:
    """The pipeline of one predictor; the rows set aside, where there are any, come in parts."""
    fit_rows = partial(fit_chain, predictor, calibrators)
    order_key, last_key, chain_key, folds_key = jax.random.split(key, 4)
    if aside is not None:
        rest, parts = _rest(x.shape[0], aside), aside
        with one_warning("in the fit to the rows that are not set aside, which counts them anew"):
            chain = fit_rows(*take_rows(rest, x, y), key=chain_key)
        blocks = [chain(*take_rows(part, x)) for part in parts]
    else:
        folds = _number_of_folds(folds, x.shape[0], x.shape[0] if groups is None else len(np.unique(groups)))
        pieces = folds_of(x.shape[0], folds, groups, order_key)
        parts = [piece.held_out for piece in pieces]
        blocks = predictions_of_folds(fit_rows, x, y, pieces, list(jax.random.split(folds_key, folds)))
        chain = fit_rows(x, y, key=chain_key)
    names = [_name_of(step) for step in (predictor, *calibrators)]
    step_of = partial(_step, y=y, parts=parts, out_of_fold=aside is None)
    steps = [step_of(name, parts_of) for name, parts_of in zip(names, zip(*blocks, strict=True), strict=True)]
    last = None
    if recalibrate is not None:
        fit_last = partial(_with_key, _checked(recalibrate), key=last_key)
        end = steps[-1]
        last = fit_last(*take_rows(end.rows, x), end.predictions, end.y)
        recalibrated = _recalibrated(fit_last, x, y, [block[-1] for block in blocks], parts)
        steps.append(step_of(_name_of(recalibrate), recalibrated))
    return Pipeline(chain=chain, last=last, steps=tuple(steps), others=(), method="folds" if aside is None else "split")


def _fit_cv_plus(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    predictor: Any,
    calibrators: Sequence[Callable],
    *,
    folds: int | None,
    groups: np.ndarray | None,
    key: PRNGKeyArray,
) -> Pipeline:
    """The pipeline whose models of the folds predict; they give its scores, too."""
    num_rows = x.shape[0]
    folds = _number_of_folds(folds, num_rows, num_rows if groups is None else len(np.unique(groups)))
    order_key, folds_key = jax.random.split(key)
    pieces = cross_conformal.folds_for(num_rows, folds, groups, order_key)
    fit_rows = partial(fit_chain, predictor, calibrators)
    chains, blocks = models_of_folds(fit_rows, x, y, pieces, list(jax.random.split(folds_key, folds)))
    ends, parts = [block[-1] for block in blocks], [piece.held_out for piece in pieces]
    ends_of_chains = [_End(chain) for chain in chains]
    models = cross_conformal.of_folds(ends_of_chains, ends, pieces, x, y, score=None, has_groups=groups is not None)
    by_step = [*zip(*blocks, strict=True), _recalibrated(conformal.fit, x, y, ends, parts)]
    names = [*(_name_of(step) for step in (predictor, *calibrators)), "cv+"]
    steps = [
        _step(name, predictions, y=y, parts=parts, out_of_fold=True)
        for name, predictions in zip(names, by_step, strict=True)
    ]
    return Pipeline(chain=models, last=None, steps=tuple(steps), others=(), method="cv+")


class _End(eqx.Module):
    """What is predicted after the last step of a chain."""

    chain: Callable[[Any], list[Distribution]]

    def __call__(self, x: Float[Array, "n d"]) -> Distribution:
        return self.chain(x)[-1]


def fit_chain(
    predictor: Any, calibrators: Sequence[Callable], x: Float[Array, "n d"], y: Float[Array, " n"], *, key: PRNGKeyArray
) -> Chain:
    """A predictor and calibrators, each fitted to what the steps before it predict; steps as those of `fit`."""
    model_key, *keys = jax.random.split(key, 1 + len(calibrators))
    model = _with_key(_as_fit(predictor), x, y, key=model_key)
    prediction, fitted = as_distribution(model(x)) if calibrators else None, []
    for calibrator, each in zip(calibrators, keys, strict=True):
        if fitted:
            prediction = fitted[-1](x, prediction)
        fitted.append(_with_key(_checked(calibrator), x, prediction, y, key=each))
    return Chain(model, tuple(fitted))


def _recalibrated(
    fit_last: Callable,
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    predictions: Sequence,
    parts: Sequence[np.ndarray],
) -> list[Distribution]:
    """What the last step makes of each part, fitted to the others: its scores are honest, too."""
    found = []
    for k, (prediction, part) in enumerate(zip(predictions, parts, strict=True)):
        others = [other for j, other in enumerate(predictions) if j != k]
        rows = np.concatenate([other for j, other in enumerate(parts) if j != k])
        ends = np.cumsum([other.mean.shape[0] for other in others])
        places = np.split(np.arange(len(rows)), ends[:-1])
        x_others, y_others = take_rows(rows, x, y)
        found.append(fit_last(x_others, joined(others, places), y_others)(*take_rows(part, x), prediction))
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
    )


def _number_of_folds(folds: int | None, num_rows: int, num_groups: int) -> int:
    """Those that were asked for, or as many as the rows need and the groups allow."""
    if folds is not None:
        return folds
    return max(2, min(num_groups, _FOLDS_OF_FEW_ROWS if num_rows <= _FEW_ROWS else _FOLDS))


def _set_aside(
    num_rows: int, fraction: float, folds: int | None, groups: np.ndarray | None, key: PRNGKeyArray
) -> list[np.ndarray]:
    """A fraction of the rows at random, or of the groups, in parts."""
    _checks.check_fraction("fraction", fraction)
    kinds, label_of = np.unique(np.arange(num_rows) if groups is None else groups, return_inverse=True)
    aside_key, parts_key = jax.random.split(key)
    number = round(fraction * len(kinds))
    folds = _number_of_folds(folds, num_rows, number)
    if not folds <= number < len(kinds):
        raise ValueError(
            f"a fraction of {fraction:g} sets {number} of {len(kinds)} {'rows' if groups is None else 'groups'} aside; "
            f"at least {folds} are needed, and one to fit on."
        )
    chosen = np.asarray(jax.random.permutation(aside_key, len(kinds)))[:number]
    rows = np.flatnonzero(np.isin(label_of, chosen))
    pieces = folds_of(len(rows), folds, None if groups is None else groups[rows], parts_key)
    return [rows[piece.held_out] for piece in pieces]


def _rest(num_rows: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers of the rows that are in none of the parts."""
    return np.setdiff1d(np.arange(num_rows), np.concatenate(parts))


# Steps that users give


class Estimator(eqx.Module):
    """A fitted model with `predict`, as scikit-learn has it, as a function of inputs."""

    model: Any

    def __call__(self, x: Float[Array, "n d"]) -> Point:
        """The predictions of the rows."""
        return Point(_checks.as_floats("model.predict(x)", self.model.predict(np.asarray(x))).astype(x.dtype))


def _as_fit(predictor: Any) -> Callable:
    if hasattr(predictor, "fit") and hasattr(predictor, "predict"):
        return partial(_fit_estimator, predictor)
    return _checked(predictor)


def _fit_estimator(estimator: Any, x: Float[Array, "n d"], y: Float[Array, " n"]) -> Estimator:
    fresh = _unfitted(estimator)
    fitted = fresh.fit(np.asarray(x), np.asarray(y))
    return Estimator(fresh if fitted is None else fitted)


def _unfitted(estimator: Any) -> Any:
    """A copy, so that the models of different folds do not share what they learn."""
    if not hasattr(estimator, "get_params"):
        return copy.deepcopy(estimator)
    from sklearn.base import clone

    return clone(estimator)


def _checked(step: Any) -> Callable:
    """The step, if it is a function.

    Raises:
        TypeError: if it is not.
    """
    if not callable(step):
        name = str(getattr(step, "__name__", type(step).__name__))
        hint = f": did you mean {name}.fit?" if getattr(step, "fit", None) else "."
        raise TypeError(
            f"a step must be a fit function, or as predictor an object with fit and predict; got {name}{hint}"
        )
    return step


def _with_key(fit: Callable, *arguments: Any, key: PRNGKeyArray) -> Any:
    """The value of a fit function, which gets the key if it takes one and has none of its own."""
    parameter = inspect.signature(fit).parameters.get("key")
    if parameter is not None and (parameter.default is None or parameter.default is parameter.empty):
        return fit(*arguments, key=key)
    return fit(*arguments)


def _name_of(step: Any) -> str:
    """The method that a step is: the module of a function that is called fit, else its own name, or its class's."""
    while isinstance(step, partial):
        step = step.func
    name = getattr(step, "__name__", type(step).__name__)
    return step.__module__.rpartition(".")[2] if name == "fit" else name


def _candidates() -> list[tuple[Any, tuple[Callable, ...]]]:
    """The predictors that are tried where none is given, with the calibrators of each.

    Of lists of three they have the least CRPS over data sets with noise (`benchmarks/results/pipelines.md`).
    """
    found = [(gaussian_process.fit, ()), (mlp.fit, (rio.fit,))]
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        return found
    return [*found, (HistGradientBoostingRegressor(random_state=0), (rio.fit,))]
