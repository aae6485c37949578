"""Calibrators, one after another, as a single calibrator whose last step is fitted to out-of-fold errors.

The errors of a calibrator on its own training rows are too small. So all calibrators but the last are fitted once
without each fold, and predict the fold. The last calibrator is fitted to these predictions. For new rows, the other
calibrators are fitted to all data points, and the last calibrator follows them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _random
from jaxcal.distributions import Distribution
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Layout, Series, Table
from jaxcal.pipeline.folds import as_labels, drawn, number_for
from jaxcal.pipeline.out_of_fold import joined, models_of_folds
from jaxcal.pipeline.steps import (
    Taken,
    as_prediction,
    as_table_and_targets,
    checked,
    columns_of,
    with_columns,
    with_key,
)


def fit(
    x: "Table | None",
    base: "Distribution",
    y: "Series",
    *,
    calibrators: "Sequence[Callable]",
    folds: int | None = None,
    groups: "ArrayLike | None" = None,
    by: "Series | None" = None,
    categorical: "Categorical" = (),
    key: "PRNGKeyArray",
) -> "Chain":
    """Fit calibrators of existing predictions: each calibrator corrects the predictions of the calibrators before it.

    All calibrators but the last are fitted to all rows. The last calibrator is fitted to out-of-fold predictions: the
    others are also fitted without each fold, and predict it. No coverage guarantee follows, since the steps that
    predict a new row made none of these errors. `jaxcal.pipeline` also fits the model.

    Args:
        x: inputs [n, d], or a data frame, which every step receives as it is; None if no step uses inputs.
        base: the model's predictions of the rows [n]; the model was not trained on these rows.
        y: targets [n].
        calibrators: two or more fit functions `fit(x, base, y)`, such as `jc.rio.fit`, configured by
            `functools.partial`, in their order.
        folds: number of folds. None means 10 folds for at most 500 rows, and 5 folds for more.
        groups: labels [n]: rows of one group stay in one fold.
        by: labels of groups [n] for the last step, as of `jc.conformal.fit`; the call then needs labels of its rows.
        categorical: the columns of x whose values have no order, for the steps that take this argument.
        key: random key.

    Raises:
        TypeError: if a step is no function, or key no random key.
        ValueError: if there are fewer than two steps, or fewer rows or groups than folds. Also if an argument is empty
            or of the wrong length, or y is not finite. The steps raise their own errors.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(-3, 3, 60)
        >>> y = np.sin(x) + 0.1 * np.random.default_rng(0).normal(size=60)
        >>> base = jc.Point(x / 3)  # somebody's predictions
        >>> chain = jc.chain.fit(x, base, y, calibrators=[jc.rio.fit, jc.crude.fit], key=jax.random.key(0))
        >>> lower, upper = chain(x, base).interval(0.9)
        >>> bool((lower < upper).all())
        True
    """
    _checks.check_key(key)
    if len(calibrators) < 2:
        raise ValueError(f"a chain has two calibrators or more; got {len(calibrators)}. One calibrator needs no chain.")
    x, y = (None, _checks.as_vector("y", y)) if x is None else as_table_and_targets(x, y)
    if len(base) != len(y):
        raise ValueError(f"base has {len(base)} rows where {len(y)} are expected: the lengths must match.")
    columns = () if x is None else columns_of(x, categorical)
    *first, last = (with_columns(checked(step), columns) for step in calibrators)
    order_key, folds_key, first_key, last_key = _random.split(key, 4)
    labels = as_labels(groups, len(y))
    parts = drawn(len(y), number_for(folds, len(y), labels), labels, order_key)

    def fit_first(x: Any, base: Distribution, y: Array, *, key: PRNGKeyArray) -> Chain:
        return Chain(None, fit_steps(first, x, base, y, keys=_random.split(key, len(first))))

    keys = _random.split(folds_key, len(parts))
    _, predictions = models_of_folds(fit_first, (x, base), (y,), parts, keys)
    out_of_fold = marked_out_of_fold(joined(predictions, [fold.held_out for fold in parts]))
    groups_of_last: dict[str, Any] = {} if by is None else {"by": _checks.as_labels("by", by, len(y))}
    fitted = fit_first(x, base, y, key=first_key)
    return Chain(
        predictor=None,
        calibrators=(*fitted.calibrators, with_key(last, x, out_of_fold, y, key=last_key, **groups_of_last)),
        layout=None if x is None else Layout.of(x),
    )


class Chain(eqx.Module):
    """Fitted steps, one after another: a predictor, if there is one, and calibrators.

    Attributes:
        predictor: the first step; None if the predictions come from elsewhere.
        calibrators: the steps after it, in their order.
        layout: the columns of x; None if only the steps check them.
    """

    predictor: Callable | None
    calibrators: tuple[Callable, ...]
    layout: Layout | None = None

    def __call__(self, x: Table | None, base: Distribution | None = None, *, by: Series | None = None) -> Distribution:
        """The distribution of every row after the last step.

        Args:
            x: inputs [m, d], as of the fit.
            base: existing predictions of the rows [m]; None if the chain has a predictor.
            by: the labels of the rows' groups [m] for the last step, if its fit had labels.

        Raises:
            ValueError: if x has other columns than in the fit. The steps raise their own errors.
        """
        return self.after_each_step(x, base, by=by)[-1]

    def after_each_step(
        self, x: Table | None, base: Distribution | None = None, *, by: Series | None = None
    ) -> list[Distribution]:
        """The predictions after each step: the predictor, or `base`, and each calibrator. Arguments as of the call."""
        x = x if x is None or self.layout is None else self.layout(x)
        first: Any = base if self.predictor is None else as_prediction(self.predictor(x))
        predictions = [first]
        for number, calibrator in enumerate(self.calibrators, start=1):
            groups = {} if by is None or number < len(self.calibrators) else {"by": by}
            predictions.append(calibrator(x, predictions[-1], **groups))
        return predictions


def fit_steps(
    calibrators: Sequence[Callable],
    x: Table | None,
    base: Distribution,
    y: Float[Array, " n"],
    *,
    keys: Sequence[PRNGKeyArray],
    like: Sequence[Taken | None] | None = None,
) -> tuple[Callable, ...]:
    """Calibrators, each fitted to the predictions of the one before it; `like` is one of `with_key` for each."""
    fitted: list[Callable] = []
    for k, (calibrator, key) in enumerate(zip(calibrators, keys, strict=True)):
        base = fitted[-1](x, base) if fitted else base
        fitted.append(with_key(calibrator, x, base, y, key=key, like=None if like is None else like[k]))
    return tuple(fitted)
