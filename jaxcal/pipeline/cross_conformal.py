"""CV+, the jackknife+ and the jackknife+-after-bootstrap: a coverage guarantee without setting rows aside.

Out-of-fold errors guarantee nothing about a model that is fitted to all rows, since it made none of these errors. So
here the models that made the errors also predict new rows. Calibration row i has the error R_i of the models that were
fitted without it. These models predict c_i(x) for a new row x. The interval goes from a low rank of the values c_i(x) -
R_i to a high rank of the values c_i(x) + R_i. The interval at the level 1 - a covers a new exchangeable row with
probability 1 - 2 a or somewhat less. This holds for every model and all data, and `WorstCaseGuarantee` computes the
probability. Typically the probability is 1 - a.

| function | method | source |
|---|---|---|
| `fit`, folds=K | CV+ | Barber et al. 2021, Theorem 4 |
| `fit`, folds=len(y) | the jackknife+ | Barber et al. 2021, Theorem 1 |
| `fit_bootstrap`, `of_forest` | the jackknife+-after-bootstrap | Kim et al. 2020, Theorem 1 |

Barber, Candes, Ramdas and Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 49 (2021); Kim,
Xu and Barber, "Predictive inference is free with the jackknife+-after-bootstrap", NeurIPS 2020.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal.calibrators._base import ABSOLUTE, check_base, error_scale, is_scaled, standardized_errors
from jaxcal.distributions import CrossConformal, Distribution, Normal, Point
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Layout, Series, Table
from jaxcal.guarantee import WorstCaseGuarantee
from jaxcal.pipeline.folds import Fold, as_labels, drawn
from jaxcal.pipeline.out_of_fold import joined, models_of_folds, take_rows
from jaxcal.pipeline.steps import as_prediction, as_table_and_targets, columns_of, with_columns
from jaxcal.predictors.forests import Forest, out_of_bag_weights

Moments = tuple[Float[Array, "n k"], Float[Array, "n k"] | None]


def fit(
    fit_model: "Callable",
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    folds: int = 10,
    groups: "ArrayLike | None" = None,
    score: str | None = None,
) -> "JackknifePlus":
    """Fit a model without each fold, and keep these models: CV+, or the jackknife+ if every row is a fold.

    All folds have n // folds rows, as the guarantee requires. The remaining rows, fewer than folds, are training rows
    of every model, and have no error. `jaxcal.pipeline.fit(method="cv+")` takes calibrators, and scores every step.

    Works under `jit` and, over runs of equal size, under `eqx.filter_vmap` if `fit_model` does. Fit and predictions are
    differentiable in all x and y if `fit_model` and the models are.

    Args:
        fit_model: `fit_model(x, y, key=key)` gives a function of inputs whose value is a Distribution or an array of
            means. It may be any predictor of jaxcal, with its options as a `functools.partial`, or a few lines around a
            model of another package. The fit must not depend on the order of the rows.
        x: inputs [n, d], or a data frame, which is passed on as it is; a vector [n] is one column.
        y: targets [n].
        key: random key of the folds, and of the fits.
        categorical: the columns of x whose values have no order, for a `fit_model` that takes this argument.
        folds: number of folds, and of models; n for the jackknife+.
        groups: labels [n], of numbers or strings: data points of one group stay in one fold. Folds then differ in
            size, and no coverage is guaranteed.
        score: the kind of error. "absolute" is |y - mean|, and "scaled" is |y - mean| / std. None means "scaled" if the
            models give a std, else "absolute".

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape. Also if there are fewer rows or groups than
            folds, or folds is less than 2. Also if a predicted mean or std is not finite, or score="scaled" and the
            models give no std.

    Source: Barber, Candes, Ramdas and Tibshirani, Annals of Statistics 49 (2021).

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(-1, 1, 50)
        >>> y = x + 0.1 * np.random.default_rng(0).normal(size=50)
        >>> def fit_line(x, y, *, key):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> fitted = jc.cross_conformal.fit(fit_line, x, y, key=jax.random.key(0), folds=50)
        >>> lower, upper = fitted(np.array([0.0, 0.5])).interval(0.9)
        >>> bool((lower < np.array([0.0, 0.5])).all() and (np.array([0.0, 0.5]) < upper).all())
        True
        >>> fitted.guarantee(0.9).coverage
        0.8
    """
    _checks.check_key(key)
    x, y = as_table_and_targets(x, y)
    labels = as_labels(groups, len(y))
    _checks.check_at_least("folds", folds, 2)
    with jax.ensure_compile_time_eval():  # a known key gives known folds, also where the fit is traced
        order_key, *keys = jax.random.split(key, folds + 1)
    parts = drawn(len(y), folds, labels, order_key, equal=True)  # as the guarantee needs them
    models, predictions = models_of_folds(with_columns(fit_model, columns_of(x, categorical)), (x,), (y,), parts, keys)
    return of_folds(models, predictions, parts, x, y, score=score, has_groups=labels is not None)


def of_folds(
    models: Sequence[Callable],
    predictions: Sequence[Any],
    parts: Sequence[Fold],
    x: Table,
    y: Float[Array, " n"],
    *,
    score: str | None,
    has_groups: bool,
) -> "JackknifePlus":
    """The same from models that are already fitted, and their predictions of their folds; x and y are checked."""
    sizes = [len(fold.held_out) for fold in parts]
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    base = joined([as_prediction(each) for each in predictions], places)
    (y_held_out,) = take_rows(np.concatenate([fold.held_out for fold in parts]), y)
    scaled = _is_scaled(score, base)
    errors = _absolute_errors(base, y_held_out, scaled)
    return JackknifePlus(
        models=_ensemble(models, x, scaled),
        weights=jax.device_put(np.repeat(np.eye(len(parts), dtype=errors.dtype), sizes, axis=1)),
        errors=errors,
        layout=Layout.of(x),
        num_folds=len(parts),
        has_groups=has_groups,
    )


def fit_bootstrap(
    fit_model: "Callable",
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    num_models: int = 50,
    score: str | None = None,
) -> "JackknifePlus":
    """Fit models to bootstrap samples, and average the models without a row: the jackknife+-after-bootstrap.

    A model's sample has n rows, drawn with replacement, so that about 37 % of the models are fitted without a given
    row. The error of the row is the error of the mean prediction of these models. The guarantee needs a random number
    of models: the number of samples, drawn from n + 1 rows, that do not contain the new row. This number is drawn from
    its binomial distribution. So `num_models` is only the mean number; the standard deviation is about 0.8
    sqrt(num_models).

    Args:
        fit_model: as of `fit`.
        x: inputs [n, d], or a data frame, which is passed on as it is; a vector [n] is one column.
        y: targets [n].
        key: random key of the samples and their number, and of the fits.
        categorical: the columns of x whose values have no order, for a `fit_model` that takes this argument.
        num_models: the mean number of models that are fitted.
        score: the kind of error, as of `fit`; the std of several models is the mean of their stds.

    Raises:
        TypeError: if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or if a row is in all samples. Also if a
            predicted mean or std is not finite, or score="scaled" and the models give no std.

    Source: Kim, Xu and Barber, NeurIPS 2020, Theorem 1, with the mean as aggregation.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x = np.linspace(-1, 1, 50)
        >>> y = x + 0.1 * np.random.default_rng(0).normal(size=50)
        >>> def fit_line(x, y, *, key):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> fitted = jc.cross_conformal.fit_bootstrap(fit_line, x, y, key=jax.random.key(0))
        >>> print(f"{fitted.guarantee(0.9).coverage:.2f} for {len(fitted.errors)} errors")
        0.80 for 50 errors
    """
    _checks.check_key(key)
    x, y = as_table_and_targets(x, y)
    fit_model = with_columns(fit_model, columns_of(x, categorical))
    num_rows = len(y)
    _checks.check_at_least("num_models", num_models, 1)
    with jax.ensure_compile_time_eval():  # a known key gives known samples, also where the fit is traced
        samples_key, fits_key = jax.random.split(key)
    rng = _numpy_generator(samples_key)
    number = _number_of_models(rng, math.ceil(num_models / _fraction_without(num_rows)), num_rows)
    samples = rng.integers(num_rows, size=(number, num_rows))
    in_bag = np.zeros((number, num_rows), bool)
    np.put_along_axis(in_bag, samples, True, axis=1)
    weights = out_of_bag_weights(in_bag)
    parts = [Fold(sample, np.arange(num_rows)) for sample in samples]
    about = "in a fit to a bootstrap sample, whose rows are numbered anew"
    keys = list(jax.random.split(fits_key, number))
    models, predictions = models_of_folds(fit_model, (x,), (y,), parts, keys, about=about)
    predictions = [as_prediction(each) for each in predictions]
    scaled = _is_scaled(score, predictions[0])
    weights = jax.device_put(weights.astype(predictions[0].mean.dtype))
    center = _out_of_bag([each.mean for each in predictions], weights)
    base = Normal(center, _out_of_bag([each.std for each in predictions], weights)) if scaled else Point(center)
    errors = _absolute_errors(base, y, scaled)
    return JackknifePlus(_ensemble(models, x, scaled), weights, errors, Layout.of(x))


def of_forest(forest: Forest, x: Table, y: Series, *, key: PRNGKeyArray) -> "JackknifePlus":
    """The jackknife+-after-bootstrap of the trees of a fitted random forest: nothing is fitted again.

    The error of a row is the error of the mean prediction of the trees that were grown without it. As in
    `fit_bootstrap`, the guarantee needs a random number of trees: the first trees of the forest are used, about 37 % of
    all.

    Args:
        forest: made by `jaxcal.forests.fit(x, y, model="random_forest")`.
        x: the inputs [n, d] that the forest was fitted to, in the same order.
        y: their targets [n].
        key: random key, which draws the number of trees.

    Raises:
        TypeError: if x or y is traced by a transformation of JAX; if key is no random key.
        ValueError: if the forest is of another model, or was not fitted to x and y. Also if a row is in the samples of
            all trees that are used.

    Source: Kim, Xu and Barber, NeurIPS 2020.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, key = np.linspace(-1, 1, 100), jax.random.key(0)
        >>> y = np.sin(3 * x) + 0.1 * np.random.default_rng(0).normal(size=100)
        >>> forest = jc.forests.fit(x, y, key=key, model="random_forest", num_trees=200)
        >>> fitted = jc.cross_conformal.of_forest(forest, x, y, key=key)
        >>> lower, upper = fitted(x).interval(0.9)
        >>> print(f"{fitted.guarantee(0.9).coverage:.2f}", bool((lower < upper).all()))
        0.80 True
    """
    _checks.check_key(key)
    in_bag = forest.in_bag(x, y)
    x, y = as_table_and_targets(x, y)
    number = _number_of_models(_numpy_generator(key), *in_bag.shape)
    weights = jax.device_put(out_of_bag_weights(in_bag[:number]).astype(y.dtype))
    trees = _Trees(forest, number)
    base = Point(_weighted_rows(trees(x)[0], weights))
    return JackknifePlus(trees, weights, _absolute_errors(base, y, scaled=False), Layout.of(x))


class JackknifePlus(eqx.Module):
    """Models, and the errors of calibration rows that they were not fitted to; made by `fit` and similar functions.

    Attributes:
        models: a function of inputs [n, d] that gives the means [n, K] of K models, and their stds or None. Models
            whose arrays have one structure are stacked, and called under one `vmap`.
        weights: [K, L] for each calibration row the weights of the models that were fitted without it.
        errors: [L] the absolute errors of the calibration rows, divided by the stds if `models` gives stds.
        layout: the columns of x.
        num_folds: the number of folds; None for bootstrap samples.
        has_groups: whether the folds consist of whole groups.
    """

    models: Callable[[Any], Moments]
    weights: Float[Array, "*k_l"]
    errors: Float[Array, "*l"]
    layout: Layout
    num_folds: int | None = eqx.field(static=True, default=None)
    has_groups: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Table) -> CrossConformal:
        """The distributions whose central intervals have the coverage of `guarantee`.

        An interval at a level for which there are too few calibration rows is infinite; a warning says how many rows
        are needed.

        Args:
            x: inputs [n, d], or a data frame, which is passed on as it is; a vector [n] is one column.

        Raises:
            ValueError: if x is empty, not finite, or has another number of columns than the training inputs.
        """
        means, stds = self.models(self.layout(x))
        return CrossConformal(means, self.weights, self.errors, stds)

    def guarantee(self, confidence_level: float) -> WorstCaseGuarantee:
        """The coverage guarantee of the central interval at this level; `print` tells it in words.

        Raises:
            ValueError: if the confidence level lies outside (0, 1), or the folds are of groups.
        """
        if self.has_groups:
            raise ValueError(
                "the folds are of groups, whose rows are not exchangeable with the rows of other groups: no coverage "
                "is guaranteed. Without groups= coverage is guaranteed, if all rows are exchangeable."
            )
        return WorstCaseGuarantee(confidence_level, self.errors.shape[-1], self.num_folds)


# The models, as one function of inputs


class _Stack(eqx.Module):
    """Models of one structure, as a single model whose arrays have a leading axis."""

    model: Callable
    scaled: bool = eqx.field(static=True)

    @_programs.jit
    def __call__(self, x: Float[Array, "n d"]) -> Moments:
        means, stds = eqx.filter_vmap(lambda model: _moments(model, x, self.scaled))(self.model)
        return means.T, None if stds is None else stds.T


class _Several(eqx.Module):
    """Models that are called one after another."""

    models: tuple[Callable, ...]
    scaled: bool = eqx.field(static=True)

    def __call__(self, x: Table) -> Moments:
        means, stds = zip(*(_moments(model, x, self.scaled) for model in self.models), strict=True)
        return _columns(means), _columns(stds) if self.scaled else None


class _Trees(eqx.Module):
    """The first trees of a forest."""

    forest: Forest
    number: int = eqx.field(static=True)

    def __call__(self, x: Table) -> Moments:
        return self.forest.tree_means(x, self.number), None


def _ensemble(models: Sequence[Callable], x: Table, scaled: bool) -> Callable[[Any], Moments]:
    """The models as one function: stacked, if the stack can be traced."""
    arrays, rest = zip(*(eqx.partition(model, eqx.is_array) for model in models), strict=True)
    if isinstance(x, jax.Array) and _are_alike(arrays, rest):
        stack = _Stack(eqx.combine(_stacked(arrays), rest[0]), scaled)
        try:
            eqx.filter_eval_shape(stack, x)
        except (TypeError, IndexError, jax.errors.JaxRuntimeError):  # a model reads values
            pass
        else:
            return stack
    return _Several(tuple(models), scaled)


def _are_alike(arrays: Sequence[Any], rest: Sequence[Any]) -> bool:
    """Whether the models have arrays, of the same shapes and dtypes in each, and are otherwise equal."""
    kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)] for each in arrays]
    if not kinds[0] or any(kind != kinds[0] for kind in kinds):
        return False
    return all(bool(eqx.tree_equal(rest[0], each)) for each in rest[1:])


def _moments(model: Callable, x: Table, scaled: bool) -> tuple[Array, Array | None]:
    distribution = as_prediction(model(x))
    return distribution.mean, distribution.std if scaled else None


@jax.jit
def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@jax.jit
def _columns(vectors: Sequence[Float[Array, " n"]]) -> Float[Array, "n k"]:
    return jnp.stack(vectors, axis=1)


# The errors


def _is_scaled(score: str | None, base: Distribution) -> bool:
    scaled = is_scaled(score, base)
    if scaled:
        error_scale(base, scaled)  # raises where there is no std
    return scaled


def _absolute_errors(base: Distribution, y: Float[Array, " l"], scaled: bool) -> Float[Array, " l"]:
    check_base(base, y.shape[0])
    return _sizes(standardized_errors(base, y, scaled, instead=ABSOLUTE))


@jax.jit
def _sizes(errors: Float[Array, " l"]) -> Float[Array, " l"]:
    return jnp.abs(errors)


@jax.jit
def _weighted_rows(values: Float[Array, "l k"], weights: Float[Array, "k l"]) -> Float[Array, " l"]:
    """For every row l the average sum_k v_lk w_kl of its values."""
    return jnp.sum(values * weights.T, axis=1)


def _out_of_bag(values: Sequence[Float[Array, " l"]], weights: Float[Array, "k l"]) -> Float[Array, " l"]:
    return _weighted_rows(_columns(values), weights)


# The bootstrap


def _fraction_without(num_rows: int) -> float:
    """The probability that n rows, drawn with replacement from n + 1, do not contain a given row."""
    return (1 - 1 / (num_rows + 1)) ** num_rows


def _number_of_models(rng: np.random.Generator, samples: int, num_rows: int) -> int:
    """How many of the samples, drawn from n + 1 rows, do not contain the new row."""
    return int(rng.binomial(samples, _fraction_without(num_rows)))


def _numpy_generator(key: PRNGKeyArray) -> np.random.Generator:
    with jax.ensure_compile_time_eval():
        return np.random.default_rng(int(jax.random.bits(key, dtype="uint32")))
