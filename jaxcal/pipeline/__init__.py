"""From x and y to a distribution that covers: predictors, calibrators, and a recalibration by out-of-fold errors.

The errors of a model on its training rows are too small, and so are intervals that are based on them. The pipeline fits
the predictor and the calibrators once without each fold, and predicts the fold. These out-of-fold errors recalibrate a
predictor and calibrators that are fitted to all data points. With `Split`, a fraction of the rows is set aside for the
last step, and the guarantee of the last step holds. With `CVPlus`, the models of the folds also predict new rows, and
the guarantee of CV+ holds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import ArrayLike, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal.calibrators import conformal
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Series, Table
from jaxcal.pipeline.candidates import candidates
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.choice import Best, Choice
from jaxcal.pipeline.combination import Combination
from jaxcal.pipeline.fitted import Pipeline, Recipe, Step, StepScores
from jaxcal.pipeline.levels import recalibrated_levels
from jaxcal.pipeline.methods import CVPlus, Folds, Method, Prefit, Split, as_method
from jaxcal.pipeline.plan import Plan, fit_chain, fit_one
from jaxcal.pipeline.several import fit_several
from jaxcal.pipeline.side_by_side import OutOfTime
from jaxcal.pipeline.steps import Estimator, GroupSource, PrefittedModel, as_table_and_targets, columns_of

__all__ = [
    "Best",
    "CVPlus",
    "Chain",
    "Combination",
    "Estimator",
    "Folds",
    "GroupSource",
    "Pipeline",
    "Prefit",
    "Recipe",
    "Split",
    "Step",
    "StepScores",
    "candidates",
    "fit",
    "fit_chain",
]

_OF_CV_PLUS = (
    "method='cv+' needs a predictor, and neither recalibrate nor by: its guarantee is for the models of the folds "
    "themselves, with their absolute errors, and not for a predictor that is chosen by these errors."
)
_OF_TRACERS = (
    "pipeline.fit decides on the host, by known values, but x, y, weights or key is traced. Call it outside jit, vmap "
    "and grad. Map the fit of a method instead, such as jc.mlp.fit, or run many pipelines by jaxcal.sweep."
)


def fit(
    x: "Table",
    y: "Series",
    *,
    predictor: Any = None,
    calibrators: "Sequence[Callable]" = (),
    recalibrate: "Callable | str | None" = "auto",
    method: "str | Method" = "auto",
    weights: "ArrayLike | None" = None,
    by: "Series | str | Callable | None" = None,
    categorical: "Categorical" = (),
    time_limit: float | None = None,
    key: "PRNGKeyArray",
) -> "Pipeline":
    """Fit a model, calibrators of its predictions, and a last step that makes the intervals hold for new data points.

    `method` decides which errors the last step is fitted to. Every method takes groups of rows that stay together,
    `groups=labels`:

    - `Folds(folds=5)`, "folds": predictor and calibrators are fitted once without each fold, and then to all rows.
    - `Split(fraction=0.25)`, "split": a fraction of the rows is set aside for the last step. If the last step gives a
      guarantee, the guarantee holds. Errors are learned from folds of the other rows.
    - `CVPlus(folds=5)`, "cv+": predictor and calibrators are fitted without each fold, and all these models are kept.
      The intervals are the intervals of CV+ (`jaxcal.cross_conformal`), with its guarantee. A predictor must be given.
      CV+ is the last step: `recalibrate` and `by` must be left at their defaults.
    - `Prefit()`, "prefit": the predictor is already fitted, to other rows. It is an object with `predict` or a function
      of inputs. All rows are for `jc.conformal.fit`, or for the steps that are given. Without calibrators the guarantee
      of the last step holds. Calibrators are fitted without each fold, as with `Folds`.

    Args:
        x: inputs [n, d], or a data frame of pandas or polars, which every step receives as it is. A vector [n] is one
            column. The names of a frame's columns are kept, and the columns of new rows are put into the same order.
        y: targets [n].
        predictor: a fit function, `fit(x, y)` or `fit(x, y, key=key)`, such as `jc.mlp.fit`; `functools.partial` sets
            its options. Its value is called on inputs, and gives a Distribution or an array of means. An object with
            `fit` and `predict`, such as an estimator of scikit-learn, is also a predictor: it is cloned, and
            `jaxcal.as_distribution` reads its predictions. A list holds pairs, each of a predictor and its calibrators.
            The pairs are combined (`jaxcal.pipeline.combination`), and `print` shows the weights. On a CPU a pair may
            be dropped after a random first fold of 20 rows or more, and `print` names it. It is dropped if its CRPS
            there exceeds 1.5 times the best CRPS, and the difference exceeds two standard errors. `Best(pairs)` takes
            the best pair of a list, by the out-of-fold CRPS of the whole pipeline. The CRPS of the best of several
            pairs is a little too low. None means the list of `candidates`: a Gaussian process and an ensemble of
            networks. If scikit-learn is installed, boosted trees and extremely randomized trees belong to the list. If
            CatBoost is installed, it also does.
        calibrators: fit functions `fit(x, base, y)`, such as `jc.rio.fit`, in their order. Each calibrator is fitted to
            the predictions of the steps before it on their training rows.
        recalibrate: the last step. By default, "auto", the errors of held-out rows are learned
            (`jaxcal.pipeline.errors`). Widths follow the inputs, and the shape of a predictor's distributions is kept,
            if that lowers the CRPS. The distributions have a density everywhere. If rows are set aside or have groups
            (`by`), they then recalibrate the levels. Instead of "auto", give a fit function like the calibrators, such
            as `jc.conformal.fit` or `jc.crude.fit`, which is fitted to the same errors. None means no last step.
        method: one of the methods above: an object with options of its own, or its name for the defaults. "auto" is
            "folds" below 10,000 rows. From 10,000 rows on, "auto" is "split" with 2,000 rows set aside.
        weights: weights of the rows [n], for a predictor that takes `sample_weight`, as in scikit-learn, or `weights`.
            If there are several predictors, predictors that take no weights are omitted. The other steps count every
            row once.
        by: groups for the last step, as of `jc.conformal.fit`: each group is calibrated by its own rows. Give labels
            [n], the name of a column of a data frame, or a function of x. If labels are given, the call needs labels of
            the new rows, too.
        categorical: the columns of x whose values have no order, for the steps that take this argument. Columns of a
            data frame that hold labels are always categorical.
        time_limit: seconds for the whole fit. If there are several pairs, the quickest pair is fitted first, and then
            the best of the first fold. Pairs for which the time does not suffice are omitted, and `print` names them.
            With 501 to 4,999 rows there are ten folds in place of five, if the time seems to suffice. `fitted.recipe`
            holds what was fitted, and `predictor=fitted.recipe` repeats the fit without a time limit. A fit of the
            user's own function is not interrupted, and neither is the last fit to all rows.
        key: random key. It is known, as all arguments are: the fit does not run under `jit`, `vmap` or `grad`.

    Warns:
        UserWarning: if rows are repeated, or errors of neighboring rows are correlated. Out-of-fold errors are then too
            small for other groups or times.

    Raises:
        TimeoutError: if the time limit passes before any pair is fitted to all folds.
        TypeError: if a step is not a function, or the predictor is neither a function nor an object with fit and
            predict. Also if key is no random key, or if x, y, weights or key is traced.
        ValueError: if x or y is empty or of the wrong shape, or y is not finite. Also if there are fewer rows or groups
            than folds. Also if calibrators or "prefit" come without a single predictor. Also if given folds hold out a
            row several times, train on a row that they hold out, or come with groups. Also if CV+ comes without a
            predictor, or with `recalibrate` or `by`. Also if weights come without a predictor that takes them, or `by`
            without a last step that takes groups. Also if a step refuses x: steps of jaxcal refuse an array that is
            infinite. Also if a group of `by` has fewer than two held-out rows, or all of them in one fold.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(-3, 3, 60)
        >>> y = np.sin(x) + 0.1 * np.random.default_rng(0).normal(size=60)
        >>> def fit_line(x, y):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> fitted = jc.pipeline.fit(x, y, predictor=fit_line, calibrators=[jc.rio.fit], key=jax.random.key(0))
        >>> [step.name for step in fitted.steps]
        ['fit_line', 'rio', 'learned errors']
        >>> lower, upper = fitted(np.array([0.0, 1.0])).interval(0.9)
        >>> bool((lower < upper).all())
        True
    """
    began = time.monotonic()
    if _checks.is_traced(x, y, weights, key):
        raise TypeError(_OF_TRACERS)
    _checks.check_key(key)
    if time_limit is not None:
        _checks.check_positive("time_limit", time_limit)
    x, y = as_table_and_targets(x, y)
    method = as_method(method, len(y)).checked(len(y))
    last, learns = _last_step(recalibrate, method, by)
    choice = Choice.of(candidates() if predictor is None else predictor)
    folds = None if choice is None else choice.folds
    if choice is not None and len(choice.pairs) == 1 and not calibrators:
        ((predictor, calibrators),), choice = choice.pairs, None
    if choice is not None and (calibrators or isinstance(method, Prefit)):
        raise ValueError("calibrators and method='prefit' need a predictor, and one alone: give it, or none of them.")
    if choice is not None and weights is not None:
        choice = choice.taking_weights()
    if isinstance(method, CVPlus) and (choice is not None or recalibrate != "auto" or by is not None):
        raise ValueError(_OF_CV_PLUS)
    divide = method
    if isinstance(method, Prefit):
        predictor = predictor if isinstance(predictor, PrefittedModel) else PrefittedModel(predictor)
        divide = Folds(folds=method.folds, groups=method.groups) if calibrators else method
    division_key, key = _random.split(key)
    order_key, last_key, chain_key, folds_key = _random.split(key, 4)
    plan = Plan(
        method=method,
        division=divide.divide(len(y), (division_key, order_key)),
        recalibrate=last,
        learns=learns,
        weights=_checks.as_weights(weights, len(y)),
        by=GroupSource.of(by, len(y)),
        columns=columns_of(x, categorical),
        keys=(last_key, chain_key, folds_key),
        deadline=None if time_limit is None else began + time_limit,
    )
    plan.by.check_rows(x, plan.division)
    if choice is None and learns:
        choice = Choice([(predictor, calibrators)], combines=True, folds=folds)
    try:
        if choice is not None:
            return fit_several(x, y, choice, plan, order_key)
        return fit_one(x, y, predictor, calibrators, plan)
    except OutOfTime:
        raise TimeoutError(f"the time_limit of {time_limit:g} s passed before a predictor had all its folds.") from None


def _last_step(recalibrate: Callable | str | None, method: Method, by: Any) -> tuple[Callable | None, bool]:
    """The last step, and whether the errors of the predictors are learned before it.

    By default there is no last step, since the errors are learned out of fold, which calibrates them. If rows are set
    aside or have groups, these rows recalibrate the levels. With CV+ and after a fitted model the last step is
    conformal calibration.

    Raises:
        ValueError: if it is a string other than "auto", or None where there are groups.
    """
    if recalibrate is None and by is not None:
        raise ValueError("by: recalibrate=None is no last step, which groups are for; jaxcal.conformal.fit takes them.")
    if not isinstance(recalibrate, str):
        return recalibrate, False
    _checks.check_choice("recalibrate", recalibrate, ("auto",))
    if isinstance(method, CVPlus | Prefit):
        return conformal.fit, False
    return recalibrated_levels if isinstance(method, Split) or by is not None else None, True
