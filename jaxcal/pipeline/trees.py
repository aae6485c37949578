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

# The weights of the rows; None means equal weights.
Weights = Float[AnyArray, " n"] | None
# For more rows, trees are grown on histograms, since exact splits take too long. The options were chosen on twelve data
# sets: `benchmarks/results/boosted_trees.txt`.
_FEW_ROWS = 5_000
# For more rows, trees are larger, and there are fewer of them.
_MANY_ROWS = 15_000
# The largest number of trees, and about the number of rows on which all trees together are grown, at most.
_MOST_TREES, _MOST_ROWS = 3_000, 200_000_000


def boosted_trees(
    x: Table, y: Float[AnyArray, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """Gradient boosting with small steps, small leaves and random subsets of rows and columns (Friedman 2002).

    For more than 5,000 rows, trees are grown on histograms, and a tenth of the rows decides how many trees there are.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    model = _of_few_rows() if len(y) <= _FEW_ROWS else _of_many_rows(len(y))
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


def _of_few_rows() -> Any:
    from sklearn.ensemble import GradientBoostingRegressor

    return GradientBoostingRegressor(
        n_estimators=500,
        learning_rate=0.05,
        max_depth=6,
        min_samples_leaf=2,
        subsample=0.8,
        max_features=0.7,
        random_state=0,
    )


def _of_many_rows(number: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    are_many = number > _MANY_ROWS
    return HistGradientBoostingRegressor(
        max_iter=min(_MOST_TREES, _MOST_ROWS // number + 1),
        learning_rate=0.1 if are_many else 0.05,
        max_leaf_nodes=127 if are_many else 63,
        min_samples_leaf=5,
        max_features=0.7,
        early_stopping=cast("Any", True),
        n_iter_no_change=30,
        random_state=0,
    )


def extra_trees(
    x: Table, y: Float[AnyArray, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """Extremely randomized trees (Geurts, Ernst and Wehenkel 2006): 400 trees, or 100 for more than 5,000 rows.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    number = 400 if len(y) <= _FEW_ROWS else 100
    return OfNumbers(ExtraTreesRegressor(number, random_state=0))(
        x, y, categorical=categorical, sample_weight=sample_weight
    )


def catboost(
    x: Table, y: Float[AnyArray, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """CatBoost with its defaults.

    Raises:
        ImportError: if CatBoost is missing.
    """
    from catboost import CatBoostRegressor  # pyright: ignore[reportMissingImports]

    model = CatBoostRegressor(random_seed=0, verbose=0, thread_count=1, allow_writing_files=False)
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


def lightgbm(
    x: Table, y: Float[AnyArray, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """LightGBM with small steps, small leaves and random subsets of rows and columns.

    Raises:
        ImportError: if LightGBM is missing.
    """
    from lightgbm import LGBMRegressor  # pyright: ignore[reportMissingImports]

    model = LGBMRegressor(
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
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


def xgboost(
    x: Table, y: Float[AnyArray, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """XGBoost with small steps, small leaves and random subsets of rows and columns.

    Raises:
        ImportError: if XGBoost is missing.
    """
    from xgboost import XGBRegressor  # pyright: ignore[reportMissingImports]

    model = XGBRegressor(
        n_estimators=500,
        learning_rate=0.05,
        min_child_weight=2,
        subsample=0.8,
        colsample_bytree=0.7,
        random_state=0,
        n_jobs=1,
    )
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


# The functions, by the names of their models.
TREES = {function.__name__: function for function in (boosted_trees, catboost, lightgbm, xgboost, extra_trees)}
# The package of each model, and the module of the package.
_PACKAGES = {"catboost": ("catboost",) * 2, "lightgbm": ("lightgbm",) * 2, "xgboost": ("xgboost",) * 2}
_OF_SKLEARN = ("scikit-learn", "sklearn")
# The trees that are combined if no models are named. LightGBM and XGBoost add nothing to them.
_BY_DEFAULT = ("boosted_trees", "catboost", "extra_trees")


def by_default() -> list[str]:
    """The trees that are combined if no models are named, as far as their packages are installed."""
    return [name for name in _BY_DEFAULT if missing(name) is None]


def missing(name: str) -> str | None:
    """The package that trees of this name need and that is missing; None if it is installed."""
    package, module = _PACKAGES.get(name, _OF_SKLEARN)
    return package if importlib.util.find_spec(module) is None else None
