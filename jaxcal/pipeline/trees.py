"""Trees of other packages as predictors of means: of scikit-learn, CatBoost, LightGBM and XGBoost.

Data frames are converted to numbers, with indicators for labels and missing values. Each fit has one thread, so that
folds can run in parallel.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Float

from jaxcal._numpy import AnyArray
from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Table
from jaxcal.pipeline.steps import OfNumbers

# For more rows, trees are grown on histograms, since exact splits take too long. The options were chosen on twelve data
# sets: `benchmarks/results/boosted_trees.txt`.
_FEW_ROWS = 5_000
# For more rows, trees are larger, and there are fewer of them.
_MANY_ROWS = 15_000
# The largest number of trees, and about the number of rows on which all trees together are grown, at most.
_MOST_TREES, _MOST_ROWS = 3_000, 200_000_000


def _fit_of(model: Callable[[int], Any]) -> Callable:
    """The fit of a model that depends on the number of rows, under the model's name."""

    def fit(
        x: Table,
        y: Float[AnyArray, " n"],
        *,
        categorical: Categorical = (),
        sample_weight: Float[AnyArray, " n"] | None = None,
    ) -> Callable:
        return OfNumbers(model(len(y)))(x, y, categorical=categorical, sample_weight=sample_weight)

    fit.__name__, fit.__qualname__, fit.__doc__ = model.__name__, model.__qualname__, model.__doc__
    return fit


@_fit_of
def boosted_trees(num_rows: int) -> Any:
    """Gradient boosting with small steps, small leaves and random subsets of rows and columns (Friedman 2002).

    For more than 5,000 rows, trees are grown on histograms, and a tenth of the rows decides how many trees there are.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor

    if num_rows <= _FEW_ROWS:
        return GradientBoostingRegressor(
            n_estimators=500,
            learning_rate=0.05,
            max_depth=6,
            min_samples_leaf=2,
            subsample=0.8,
            max_features=0.7,
            random_state=0,
        )
    are_many = num_rows > _MANY_ROWS
    return HistGradientBoostingRegressor(
        max_iter=min(_MOST_TREES, _MOST_ROWS // num_rows + 1),
        learning_rate=0.1 if are_many else 0.05,
        max_leaf_nodes=127 if are_many else 63,
        min_samples_leaf=5,
        max_features=0.7,
        early_stopping=cast("Any", True),
        n_iter_no_change=30,
        random_state=0,
    )


@_fit_of
def extra_trees(num_rows: int) -> Any:
    """Extremely randomized trees (Geurts, Ernst and Wehenkel 2006): 400 trees, or 100 for more than 5,000 rows.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    return ExtraTreesRegressor(400 if num_rows <= _FEW_ROWS else 100, random_state=0)


@_fit_of
def catboost(_: int) -> Any:
    """CatBoost with its defaults.

    Raises:
        ImportError: if CatBoost is missing.
    """
    from catboost import CatBoostRegressor  # pyright: ignore[reportMissingImports]

    return CatBoostRegressor(random_seed=0, verbose=0, thread_count=1, allow_writing_files=False)


@_fit_of
def lightgbm(_: int) -> Any:
    """LightGBM with small steps, small leaves and random subsets of rows and columns.

    Raises:
        ImportError: if LightGBM is missing.
    """
    from lightgbm import LGBMRegressor  # pyright: ignore[reportMissingImports]

    return LGBMRegressor(
        n_estimators=500,
        learning_rate=0.05,
        min_child_samples=5,
        subsample=0.8,
        subsample_freq=1,
        colsample_bytree=0.7,
        random_state=0,
        n_jobs=1,
        verbose=-1,
    )


@_fit_of
def xgboost(_: int) -> Any:
    """XGBoost with small steps, small leaves and random subsets of rows and columns.

    Raises:
        ImportError: if XGBoost is missing.
    """
    from xgboost import XGBRegressor  # pyright: ignore[reportMissingImports]

    return XGBRegressor(
        n_estimators=500,
        learning_rate=0.05,
        min_child_weight=2,
        subsample=0.8,
        colsample_bytree=0.7,
        random_state=0,
        n_jobs=1,
    )


# The fits, by the names of their models.
TREES = {fit.__name__: fit for fit in (boosted_trees, catboost, lightgbm, xgboost, extra_trees)}
# The packages whose names differ from the models' names.
_PACKAGES = {"boosted_trees": "scikit-learn", "extra_trees": "scikit-learn"}
# The modules of the packages whose names differ from the packages' names.
_MODULES = {"scikit-learn": "sklearn"}
# The trees that are combined if no models are named. Beside them LightGBM and XGBoost change the error by less than
# 0.5 %: `benchmarks/results/boosted_trees.txt`.
_BY_DEFAULT = ("boosted_trees", "catboost", "extra_trees")


def by_default() -> list[str]:
    """The trees that are combined if no models are named, as far as their packages are installed."""
    return [name for name in _BY_DEFAULT if missing(name) is None]


def missing(name: str) -> str | None:
    """The package that trees of this name need and that is missing; None if it is installed."""
    package = _PACKAGES.get(name, name)
    return package if importlib.util.find_spec(_MODULES.get(package, package)) is None else None
