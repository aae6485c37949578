"""Gradient boosting of quantiles: trees boosted on the pinball loss at a grid of levels, moved by held-out rows.

The boosted trees are scikit-learn's HistGradientBoostingRegressor (the extra `forests`), or LightGBM's, XGBoost's or
CatBoost's where these are installed. The packages do the work. Their quantiles cross, and they cover new rows too
little, because they were fitted to the training rows.

So the quantiles are sorted (Chernozhukov, Fernandez-Val & Galichon, Econometrica 78, 2010). Then the errors of held-out
rows move the quantile of each level by itself, as in Romano, Patterson & Candes, "Conformalized Quantile Regression",
NeurIPS 2019.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxcal import _checks, progress
from jaxcal._extras import needed
from jaxcal.distributions import Quantiles
from jaxcal.frames.columns import Categorical, Columns, as_data
from jaxcal.frames.layout import Series, Table
from jaxcal.frames.preprocessing import Standardizer
from jaxcal.predictors import _tree_arrays

_LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
_HELD_OUT = 0.2
# A value that is nearer than this to a target, in stds of the target, differs from it by the rounding of boosted trees
# alone.
_ROUNDING = 1e-6
# With fewer rows, too few are held out.
_LEAST_ROWS = 10


def fit(
    x: "Table",
    y: "Series",
    *,
    key: "PRNGKeyArray",
    categorical: "Categorical" = (),
    model: str = "scikit-learn",
    levels: "Sequence[float]" = _LEVELS,
    **options: Any,
) -> "QuantileBoosting":
    """Boost trees on the pinball loss of every level, and move each quantile by the errors of held-out rows.

    A random fifth of the rows, N rows, is held out. The boosted quantiles at x are sorted over the levels; q_p(x) is
    the quantile at level p. E_p is the quantile at level p of the errors y - q_p(x) of the held-out rows. The j-th
    smallest of the N errors has the level j / (N + 1). The prediction is q_p(x) + E_p, sorted again.

    So each quantile covers the fraction p of new rows, up to the random error of N held-out rows. Where N + 1 < 1 / p,
    E_p is the least error, and the quantile covers more than p. The same holds above, with the largest error.

    The distribution function is linear between the levels and ends at the outermost levels: there is no density beyond.
    A quantile that differs from a training target by rounding alone becomes this target. So intervals contain a value
    that many rows have.

    The quantiles of a model that is already fitted are `jaxcal.Quantiles(levels, values, sort=True)`. Then
    `jaxcal.conformal.fit(x, base, y, score="quantile")` calibrates them by rows that the model was not fitted to.

    The target is standardized by the rows given here. The trees come from other packages: neither fit nor prediction
    runs under `jit`, `vmap` or `grad`.

    Args:
        x: inputs [n, d], or a data frame (`jaxcal.frames`); a vector [n] is one column.
        y: targets [n].
        key: random key of the held-out rows and of the trees.
        categorical: the columns of x whose values have no order, by position, or of a data frame by name.
        model: the package. "scikit-learn" and "lightgbm" boost every level by itself; "xgboost" and "catboost" boost
            all levels together.
        levels: of the quantiles, strictly increasing in (0, 1).
        **options: of `HistGradientBoostingRegressor`, `LGBMRegressor`, `XGBRegressor` or `CatBoostRegressor`.

    Raises:
        ImportError: if the package is not installed.
        TypeError: if x or y is traced by a transformation of JAX; if key is no random key.
        ValueError: if x or y is empty, not finite or of the wrong shape, or has fewer than ten rows. Also if y is
            constant without the held-out rows, or if the levels are out of (0, 1) or do not increase.

    Example:
        >>> import jax, numpy as np
        >>> from jaxcal.predictors import quantile_boosting
        >>> x = np.linspace(-1, 1, 500)
        >>> y = x + np.where(x > 0, 1.0, 0.1) * np.random.default_rng(0).exponential(size=500)
        >>> fitted = quantile_boosting.fit(x, y, key=jax.random.key(0), levels=(0.05, 0.5, 0.95))
        >>> lower, upper = fitted(np.array([-0.5, 0.5])).interval(0.9)
        >>> bool(upper[1] - lower[1] > 3 * (upper[0] - lower[0]))
        True
    """
    _checks.check_key(key)
    _checks.check_known("boosted trees", x, y)
    columns, x, y = as_data(x, y, categorical, at_least=_LEAST_ROWS)
    _checks.check_choice("model", model, tuple(_BOOST))
    grid = np.asarray(_checks.as_vector("levels", levels), float)
    _checks.check_fraction("levels", grid)
    if (np.diff(grid) <= 0).any():
        raise ValueError(f"levels must be strictly increasing; got {tuple(levels)}.")
    seed = int(jax.random.bits(key, dtype="uint32")) >> 1  # these packages take 31 bits
    held_out, rest = np.split(np.random.default_rng(seed).permutation(len(y)), [int(_HELD_OUT * len(y))])
    _checks.check_varies("without the held-out rows, y is", np.asarray(y)[rest])
    y_scaler = Standardizer.of(y)
    rows, targets = np.asarray(x, float), np.asarray(y_scaler(y), float)
    predict = _BOOST[model](rows[rest], targets[rest], grid, seed, options)
    errors = np.sort(targets[held_out, None] - np.sort(predict(rows[held_out]), axis=1), axis=0)
    # E_p interpolates between the sorted errors, whose levels are j / (N + 1); beyond the ends it is the outermost
    # error.
    ranks = np.arange(1, len(errors) + 1) / (len(errors) + 1)
    shift = np.array([np.interp(p, ranks, column) for p, column in zip(grid, errors.T, strict=True)])
    return QuantileBoosting(model, predict, grid, shift, y_scaler, np.unique(np.asarray(y, float)), columns)


@dataclass(frozen=True)
class QuantileBoosting:
    """Boosted quantiles; made by `fit`. It is no pytree, as it holds no JAX array.

    `jaxcal.save` writes the trees of scikit-learn as arrays. A loaded model predicts the same without the package, but
    it is slower for many rows. Models of the other packages can only be pickled.

    Attributes:
        model: the package.
        predict: a function of inputs [n, d] that gives the boosted quantiles [n, k], in any order.
        levels: of the quantiles [k].
        shift: what is added to each quantile [k]; it and the boosted quantiles are of the standardized target.
        y_scaler: the standardization of the target.
        targets: the distinct training targets, sorted.
        columns: what the columns of the training inputs were.
    """

    model: str
    predict: Callable[[np.ndarray], np.ndarray]
    levels: np.ndarray
    shift: np.ndarray
    y_scaler: Standardizer
    targets: np.ndarray
    columns: Columns

    def __call__(self, x: Table) -> Quantiles:
        """The quantiles at the rows of x, in its dtype.

        Args:
            x: inputs [n, d], or a data frame, as `Columns.table` takes them; a vector [n] is one column.

        Raises:
            TypeError: if x is traced by a transformation of JAX.
            ValueError: if x is empty, not finite, or has other columns than the training inputs.
        """
        _checks.check_known("boosted trees", x)
        x = self.columns(x)
        # sort(sort(q_p(x)) + E_p)
        moved = np.sort(self.predict(np.asarray(x, float)), axis=1) + self.shift
        placed = float(self.y_scaler.loc) + float(self.y_scaler.scale) * np.sort(moved, axis=1)
        return Quantiles(self.levels, self._without_rounding(placed).astype(x.dtype))

    def _to_save(self) -> "QuantileBoosting":
        """The model with arrays in place of scikit-learn's objects: `jaxcal.serialization`."""
        if self.model != "scikit-learn" or not isinstance(self.predict, _Each):
            return self
        return replace(self, predict=_Each(tuple(map(_tree_arrays.of_gradient_boosting, self.predict.models))))

    def _without_rounding(self, values: np.ndarray) -> np.ndarray:
        """The values; a value that differs from a target by rounding alone is replaced by this target."""
        above = np.clip(np.searchsorted(self.targets, values), 1, len(self.targets) - 1)
        lower, upper = self.targets[above - 1], self.targets[above]
        nearest = np.where(values - lower < upper - values, lower, upper)
        return np.where(np.abs(values - nearest) <= _ROUNDING * float(self.y_scaler.scale), nearest, values)


# The packages


@dataclass(frozen=True)
class _Each:
    """Models of one level each, as a function of inputs."""

    models: tuple

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.column_stack([model.predict(x) for model in self.models])


@dataclass(frozen=True)
class _Together:
    """A model of all levels, as a function of inputs."""

    model: Any

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.model.predict(x), float).reshape(len(x), -1)


def _boost_scikit_learn(x: np.ndarray, y: np.ndarray, levels: np.ndarray, seed: int, options: dict) -> _Each:
    with needed("scikit-learn", "'jaxcal[forests]'"):
        from sklearn.ensemble import HistGradientBoostingRegressor
    common = {"loss": "quantile", "random_state": seed, **options}
    return _Each(_of_levels(lambda p: HistGradientBoostingRegressor(quantile=p, **common).fit(x, y), levels))


def _boost_lightgbm(x: np.ndarray, y: np.ndarray, levels: np.ndarray, seed: int, options: dict) -> _Each:
    lightgbm = _imported("lightgbm")
    common = {"objective": "quantile", "random_state": seed, "verbosity": -1, **options}
    return _Each(_of_levels(lambda p: lightgbm.LGBMRegressor(alpha=p, **common).fit(x, y), levels))


def _of_levels(fit: Callable[[float], Any], levels: np.ndarray) -> tuple:
    models = []
    with progress.work("quantile_boosting.fit: levels", len(levels)) as work:
        for level in levels:
            models.append(fit(level))
            work.advance()
    return tuple(models)


def _boost_xgboost(x: np.ndarray, y: np.ndarray, levels: np.ndarray, seed: int, options: dict) -> _Together:
    common = {"objective": "reg:quantileerror", "quantile_alpha": levels, "random_state": seed, **options}
    return _Together(_imported("xgboost").XGBRegressor(**common).fit(x, y))


def _boost_catboost(x: np.ndarray, y: np.ndarray, levels: np.ndarray, seed: int, options: dict) -> _Together:
    loss = f"MultiQuantile:alpha={','.join(map(str, levels))}"
    common = {"loss_function": loss, "random_seed": seed, "verbose": False, "allow_writing_files": False, **options}
    return _Together(_imported("catboost").CatBoostRegressor(**common).fit(x, y))


_BOOST = {
    "scikit-learn": _boost_scikit_learn,
    "lightgbm": _boost_lightgbm,
    "xgboost": _boost_xgboost,
    "catboost": _boost_catboost,
}


def _imported(package: str) -> Any:
    with needed(package, package):
        return importlib.import_module(package)
