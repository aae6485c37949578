"""The predictive distributions of fitted models of other packages, in the form that each package gives.

A reader uses methods, arguments and parameters that a package documents. It imports no package and checks no class. The
first reader that knows the model gives the distribution. If no reader knows the model, its predictions are means.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from jaxcal import _checks
from jaxcal._numpy import JaxArray, in_jax, namespace, numpy_or_jit
from jaxcal.distributions import Distribution, Empirical, Histogram, Normal, Point, SmoothQuantiles
from jaxcal.frames.layout import Table, num_rows

# The levels of the quantiles that are taken from a model that gives quantiles at any level.
LEVELS = tuple(k / 100 for k in range(1, 100))
# The levels for a formula, which is also exact in the tails. The tail beyond 99 % makes 4 % of the mean of a skewed
# distribution.
_FAR_OUT = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
FORMULA_LEVELS = (*_FAR_OUT, *LEVELS, *(1 - level for level in reversed(_FAR_OUT)))
# The families of XGBDistribution, as scipy.stats names them; the parameters have scipy's names.
_FAMILIES = {
    "exponential": "expon",
    "laplace": "laplace",
    "log-normal": "lognorm",
    "negative-binomial": "nbinom",
    "normal": "norm",
    "poisson": "poisson",
}
# The quantile losses of CatBoost, with one level or several.
_CATBOOST_QUANTILES = re.compile(r"(?:Multi)?Quantile(?::.*?alpha=([^;:]*))?$")


def as_distribution(model: Any, x: Table, *, samples: bool = False) -> Distribution:
    """The predictions of a fitted model as a Distribution, with the spread that the model itself gives.

    | model | what it is asked for | distribution |
    |---|---|---|
    | scikit-learn's processes, BayesianRidge, ARDRegression | `predict(x, return_std=True)` | `Normal` |
    | TabPFN | `predict(x, output_type="full")`: its bars | `Histogram` |
    | TabICL | `predict(x, output_type="quantiles", alphas=...)` | `SmoothQuantiles` |
    | quantile-forest | `predict(x, quantiles=...)` | `SmoothQuantiles` |
    | NGBoost | `pred_dist(x)` | `Normal`, or by quantiles |
    | XGBDistribution | `predict(x)`, parameters by name | `Normal`, or by quantiles |
    | skpro | `predict_proba(x)` | `Normal`, or by quantiles |
    | CatBoost with RMSEWithUncertainty | `predict(x)`: means and variances | `Normal` |
    | CatBoost with MultiQuantile, XGBoost with several `quantile_alpha` | `predict(x)` | `SmoothQuantiles` |
    | a list of models of one level each, or a dict by their levels | `predict(x)` of each | `SmoothQuantiles` |
    | `jaxcal.sklearn.CalibratedRegressor` | `predict_distribution(x)` | its own |
    | any other | `predict(x)`, or the call | `Point`, or the Distribution that it gives |

    A Pipeline of scikit-learn is read by its last step, and a search by its best estimator. If all stds are 0, the
    predictions are a `Point`. Medians are taken as means. A single model of another level is refused.

    If a model gives quantiles at any level, they are taken at 1 %, 2 %, ..., 99 %. Quantiles of the formulas of NGBoost
    and XGBDistribution are taken from 0.01 % to 99.99 %. The tails beyond are tails of Student t. Quantiles that cross
    are sorted within each row.

    An array [n, k] may hold quantiles, samples, parameters or several targets. It is refused, unless the model says
    which, or you give samples=True. Your own function can return `jaxcal.Quantiles(levels, values)` or
    `jaxcal.Normal(mean, std)` to say what an array holds.

    Args:
        model: the fitted model, or a function of x; a list or tuple of fitted models, or a dict by their levels.
        x: inputs [n, d], or a data frame, which the model receives as it is.
        samples: whether the model gives samples, an array [n, s] with s values for each row.

    Raises:
        TypeError: if `model` is neither a model nor a function.
        ValueError: if the predictions are an array [n, k] without a meaning, or do not have as many rows as x. Also if
            a number is not finite, or a std is negative. Also if a model of a list has no level, or 1/2 is not between
            the levels. Also if a single model has another level.

    Example:
        >>> from sklearn.linear_model import BayesianRidge
        >>> x, y = np.arange(6.0)[:, None], np.array([0.1, 0.9, 2.1, 2.9, 4.1, 4.9])
        >>> forecast = as_distribution(BayesianRidge().fit(x, y), x[:2])
        >>> type(forecast).__name__, forecast.std.shape
        ('Normal', (2,))
    """
    if isinstance(model, Distribution):
        return model
    if callable(model) and not is_model(model):
        predicted: Any = model(x)
        return _of_samples(predicted) if samples else as_prediction(predicted)
    inputs = untouched(x)
    distribution = _of_samples(_predicted(model, inputs)) if samples else _read(model, inputs)
    if len(distribution) != num_rows(inputs):
        raise ValueError(
            f"the model {_named(model)} gave predictions of {len(distribution)} rows for {num_rows(inputs)}."
        )
    return _in_dtype(distribution, x.dtype) if isinstance(x, jax.Array) else distribution


def as_prediction(predicted: Any) -> Distribution:
    """The value of a function as a Distribution; numbers [n] are means, a `Point`.

    Raises:
        TypeError: if the value is None.
        ValueError: if there are several numbers for each row.
    """
    if isinstance(predicted, Distribution):
        return predicted
    if predicted is None:
        raise TypeError("a model gave None where predictions are expected: does its function return them?")
    return Point(_one_a_row("prediction", predicted))


def is_model(model: Any) -> bool:
    """Whether a model predicts by a method; models of jaxcal predict by their call."""
    if callable(model) and type(model).__module__.partition(".")[0] == "jaxcal":
        return False
    return hasattr(model, "predict") or hasattr(model, "pred_dist") or isinstance(model, list | tuple | Mapping)


def untouched(x: Any) -> Any:
    """The inputs for models of other packages: an array of JAX or a list becomes an array of NumPy."""
    if not isinstance(x, jax.Array | list | tuple):
        return x
    array = np.asarray(x)
    # Trees of scikit-learn look for missing values only in arrays that can be written.
    return array.copy() if array.dtype.kind == "f" and np.isnan(array).any() else array


# The readers: each returns None for a model of another kind.


def _of_several(models: Any, x: Any) -> Distribution | None:
    """Fitted models of the pinball loss; the level of each is in its parameters, or is its key in a dict."""
    if not isinstance(models, list | tuple | Mapping):
        return None
    if not models:
        raise ValueError("the models are an empty list: give one for each level.")
    models_by_level = models if isinstance(models, Mapping) else {}
    pairs = list(models_by_level.items()) if models_by_level else [(_needed_level(model), model) for model in models]
    pairs.sort(key=lambda pair: pair[0])
    values = [np.asarray(_one_a_row("model.predict(x)", _predicted(model, x))) for _, model in pairs]
    return _by_quantiles([level for level, _ in pairs], np.column_stack(values))


def _of_jaxcal(model: Any, x: Any) -> Distribution | None:
    """`jaxcal.sklearn.CalibratedRegressor`."""
    is_ours = hasattr(model, "predict_distribution") and hasattr(model, "predict_quantiles")
    return model.predict_distribution(x) if is_ours else None


def _of_ngboost(model: Any, x: Any) -> Distribution | None:
    """NGBoost: `pred_dist(x)` gives an object whose `dist` is a frozen distribution of scipy."""
    if not hasattr(model, "pred_dist"):
        return None
    predicted = model.pred_dist(x)
    frozen = getattr(predicted, "dist", None)
    if not callable(getattr(frozen, "ppf", None)):
        raise ValueError(
            f"model.pred_dist(x) gave a {type(predicted).__name__}, whose quantiles are not known: take another Dist."
        )
    return _by_scipy(frozen)


def _of_skpro(model: Any, x: Any) -> Distribution | None:
    """skpro: `predict_proba(x)` gives an object with `mean`, `var` and `quantile`; classifiers give an array."""
    if not (hasattr(model, "predict_proba") and hasattr(model, "predict_quantiles")):
        return None
    predicted = model.predict_proba(x)
    if type(predicted).__name__ == "Normal":
        mean, variance = (_column(model, part) for part in (predicted.mean(), predicted.var()))
        return Normal(mean, np.sqrt(variance))
    return _by_quantiles(LEVELS, predicted.quantile(list(LEVELS)))


def _of_tabicl(model: Any, x: Any) -> Distribution | None:
    """TabICL: `predict(x, output_type="quantiles", alphas=levels)` gives an array [n, k]."""
    if not _takes(model, "output_type", "alphas"):
        return None
    return _by_quantiles(LEVELS, model.predict(x, output_type="quantiles", alphas=list(LEVELS)))


def _of_tabpfn(model: Any, x: Any) -> Distribution | None:
    """TabPFN: `predict(x, output_type="full")` gives a dict with the borders of bars, and a logit for each bar.

    A model of a constant target only gives quantiles, a list of k arrays [n].
    """
    if not _takes(model, "output_type", "quantiles"):
        return None
    predicted = model.predict(x, output_type="full", quantiles=list(LEVELS))
    criterion, logits = predicted.get("criterion"), _as_numpy(predicted.get("logits", ()))
    borders = _as_numpy(getattr(criterion, "borders", ()))
    if logits.ndim != 2 or logits.shape[1] != len(borders) - 1:
        return _by_quantiles(LEVELS, np.column_stack([_as_numpy(each) for each in predicted["quantiles"]]))
    # softmax of the logits
    masses = np.exp(logits - logits.max(axis=1, keepdims=True))
    has_tails = hasattr(criterion, "halfnormal_with_p_weight_before")
    tails = "half_normal" if has_tails else "uniform"
    return Histogram(borders, masses / masses.sum(axis=1, keepdims=True), tails)


def _of_quantile_forest(model: Any, x: Any) -> Distribution | None:
    """quantile-forest: `predict(x, quantiles=levels)` gives an array [n, k]."""
    return _by_quantiles(LEVELS, model.predict(x, quantiles=list(LEVELS))) if _takes(model, "quantiles") else None


def _of_std(model: Any, x: Any) -> Distribution | None:
    """scikit-learn: `predict(x, return_std=True)` gives means and stds."""
    if not _takes(model, "return_std"):
        return None
    mean, std = (_one_a_row("model.predict(x, return_std=True)", part) for part in model.predict(x, return_std=True))
    return Normal(mean, std) if np.any(std) else Point(mean)


def _of_catboost(model: Any, x: Any) -> Distribution | None:
    """CatBoost: the loss says whether `predict(x)` gives quantiles [n, k], or means and variances [n, 2]."""
    loss = _loss_of(model)
    if loss.startswith("RMSEWithUncertainty"):
        mean, variance = np.transpose(model.predict(x, prediction_type="RMSEWithUncertainty"))
        return Normal(mean, np.sqrt(variance))
    return _by_quantiles(_catboost_levels(loss), model.predict(x)) if loss.startswith("MultiQuantile") else None


def _of_xgboost(model: Any, x: Any) -> Distribution | None:
    """XGBoost with several levels as `quantile_alpha`: `predict(x)` gives an array [n, k]."""
    levels = np.atleast_1d(_parameters(model).get("quantile_alpha", ()))
    is_of_several = _loss_of(model) == "reg:quantileerror" and len(levels) > 1
    return _by_quantiles(levels, model.predict(x)) if is_of_several else None


def _of_pipeline(model: Any, x: Any) -> Distribution | None:
    """A Pipeline of scikit-learn: its last step, for the transformed inputs."""
    if not (hasattr(model, "named_steps") and hasattr(model, "__getitem__")):
        return None
    return _read(model[-1], model[:-1].transform(x) if len(model) > 1 else x)


def _of_search(model: Any, x: Any) -> Distribution | None:
    """A search of scikit-learn: the best estimator."""
    return _read(model.best_estimator_, x) if hasattr(model, "best_estimator_") else None


_READERS: tuple[Callable[[Any, Any], Distribution | None], ...] = (
    _of_several,
    _of_jaxcal,
    _of_ngboost,
    _of_skpro,
    _of_tabicl,
    _of_tabpfn,
    _of_quantile_forest,
    _of_std,
    _of_catboost,
    _of_xgboost,
    _of_pipeline,
    _of_search,
)


def _read(model: Any, x: Any) -> Distribution:
    """The distribution of the first reader that knows the model; else of the values of its method `predict`."""
    for reader in _READERS:
        if (distribution := reader(model, x)) is not None:
            return distribution
    predicted = _predicted(model, x)
    if isinstance(predicted, Distribution):
        return predicted
    if hasattr(predicted, "_fields"):
        return _by_parameters(getattr(model, "distribution", None), predicted)
    if hasattr(model, "predict_proba") and np.size(getattr(model, "classes_", ())):
        raise ValueError(f"the model {_named(model)} is a classifier: its labels are no means. Give a regressor.")
    level = _level_of(model)
    if level not in (None, 0.5):
        raise ValueError(
            f"the model {_named(model)} predicts quantiles at the level {level:g}, which are no means: give a tuple of "
            "models of several levels."
        )
    return Point(_one_a_row("model.predict(x)", predicted))


def _predicted(model: Any, x: Any) -> Any:
    """The value of the method `predict`.

    Raises:
        TypeError: if the model has no such method.
    """
    if not hasattr(model, "predict"):
        raise TypeError(f"model must be a fitted model with predict, or a function of x; got {type(model).__name__}.")
    return model.predict(x)


# Functions of several readers


def _by_quantiles(levels: Iterable[float], values: Any) -> SmoothQuantiles:
    """The distribution of quantiles [n, k], sorted within each row."""
    levels, values = np.asarray(list(levels), float), _checks.as_numbers("quantiles", values)
    return SmoothQuantiles(levels, _sorted(values))


def _by_scipy(frozen: Any) -> Distribution:
    """The distribution of a frozen distribution of scipy, with parameters [n]."""
    if frozen.dist.name == "norm":
        return Normal(frozen.mean(), frozen.std())
    return _by_quantiles(FORMULA_LEVELS, np.transpose(frozen.ppf(np.array(FORMULA_LEVELS)[:, None])))


def _by_parameters(family: Any, parameters: Any) -> Distribution:
    """The distribution of a named tuple of parameters, as XGBDistribution gives them.

    Raises:
        ValueError: if the family is not known.
    """
    if family not in _FAMILIES:
        raise ValueError(
            f"model.predict(x) gave parameters {', '.join(parameters._fields)} of the family {family!r}; known are "
            f"{', '.join(map(repr, _FAMILIES))}. Give a function that returns jaxcal.Normal(mean, std) or the like."
        )
    import scipy.stats  # imported here since it takes a third of a second

    return _by_scipy(getattr(scipy.stats, _FAMILIES[family])(**parameters._asdict()))


def _of_samples(values: Any) -> Empirical:
    """The distribution of samples [n, s]."""
    table = _checks.as_matrix("samples", values)
    return Empirical(np.zeros(len(table), table.dtype), 1.0, _sorted(table))


@numpy_or_jit
def _sorted(values: Float[JaxArray, "n k"]) -> Float[JaxArray, "n k"]:
    """The values in order within each row."""
    return namespace(values).sort(values, axis=1)


def _one_a_row(name: str, values: Any) -> Float[JaxArray, "..."]:
    """Numbers, one for each row.

    Raises:
        ValueError: if there are several numbers for each row, without a meaning.
    """
    numbers = _checks.as_floats(name, values)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        return numbers[:, 0]
    if numbers.ndim == 2:
        raise ValueError(
            f"{name} has shape {numbers.shape}: nothing says what the {numbers.shape[1]} numbers of a row are. Give a "
            "function that returns jaxcal.Quantiles(levels, values, sort=True) or jaxcal.Normal(mean, std); of "
            "samples give jaxcal.as_distribution(model, x, samples=True)."
        )
    return numbers


def _column(model: Any, frame: Any) -> np.ndarray:
    """The values of one target [n], of a frame [n, 1].

    Raises:
        ValueError: if there are several targets.
    """
    values = np.asarray(frame, float)
    if values.ndim == 2 and values.shape[1] != 1:
        raise ValueError(f"the model {_named(model)} predicts {values.shape[1]} targets: give a model of one.")
    return values.reshape(-1)


def _as_numpy(values: Any) -> np.ndarray:
    """Numbers as an array of NumPy, also the numbers of a tensor of PyTorch."""
    return np.asarray(values.detach().cpu().double() if hasattr(values, "detach") else values, float)


def _takes(model: Any, *names: str) -> bool:
    """Whether the method `predict` has arguments of these names."""
    try:
        parameters = inspect.signature(model.predict).parameters
    except (AttributeError, TypeError, ValueError):  # without predict, or without a signature
        return False
    return all(name in parameters for name in names)


def _parameters(model: Any) -> dict[str, Any]:
    """The parameters that a model was made with, as scikit-learn, LightGBM, XGBoost and CatBoost give them."""
    try:
        return model.get_params()
    except (AttributeError, RuntimeError, TypeError):  # no parameters, or parameters that scikit-learn does not allow
        return {}


def _loss_of(model: Any) -> str:
    """The name of the loss; empty if the model has no loss, or a function."""
    parameters = _parameters(model)
    loss = next((parameters[name] for name in ("loss_function", "objective", "loss") if parameters.get(name)), "")
    return loss if isinstance(loss, str) else ""


def _level_of(model: Any) -> float | None:
    """The level of the quantile that a model was fitted to; None if its parameters have no level."""
    last = getattr(model, "best_estimator_", model)
    last = last[-1] if hasattr(last, "named_steps") else last
    # A meta-estimator predicts like its inner estimators. They are alike, or else the user must know.
    inner = [getattr(last, "regressor_", None), *np.ravel(getattr(last, "estimators_", []))[:1]]
    if (level := next((_level_of(each) for each in inner if each is not None), None)) is not None:
        return level
    parameters, loss = _parameters(last), _loss_of(last)
    levels: Any = ()
    if loss in ("", "quantile") and parameters.get("quantile") is not None:
        levels = parameters["quantile"]  # QuantileRegressor, HistGradientBoostingRegressor
    elif loss == "quantile":
        levels = parameters.get("alpha", 0.9)  # GradientBoostingRegressor; LightGBM, whose default is not listed
    elif loss == "reg:quantileerror":
        levels = parameters.get("quantile_alpha")  # XGBoost
    elif loss.startswith("Quantile"):
        levels = _catboost_levels(loss)
    levels = np.atleast_1d(np.asarray(levels, float))
    return levels.item() if levels.shape == (1,) and np.isfinite(levels).all() else None


def _needed_level(model: Any) -> float:
    """The level of a model of a list.

    Raises:
        ValueError: if the model has no level.
    """
    level = _level_of(model)
    if level is None:
        raise ValueError(
            f"the model {_named(model)} of a list has no level of its own: give a dict with the levels as keys, "
            "{0.1: ..., 0.5: ..., 0.9: ...}."
        )
    return level


def _catboost_levels(loss: str) -> list[float]:
    """The levels in the name of a loss of CatBoost, such as "MultiQuantile:alpha=0.1,0.9"."""
    match = _CATBOOST_QUANTILES.match(loss)
    return [float(level) for level in match[1].split(",")] if match and match[1] else [0.5]


def _in_dtype(distribution: Distribution, dtype: np.dtype) -> Distribution:
    """The distribution with numbers of a dtype."""
    is_other = lambda leaf: eqx.is_inexact_array(leaf) and leaf.dtype != dtype
    return in_jax(jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype) if is_other(leaf) else leaf, distribution))


def _named(model: Any) -> str:
    return type(model).__name__
