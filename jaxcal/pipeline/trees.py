"""Trees of other packages as predictors of means: `boosted_trees`, `extra_trees` and `catboost`.

Data frames are taken as numbers, with labels and missing values as indicators. Each fit has one thread, so that folds
can run side by side.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Array, Float

from jaxcal.frames.columns import Categorical
from jaxcal.frames.layout import Table
from jaxcal.pipeline.steps import OfNumbers

# Of the rows, or None for equal ones.
Weights = Float[Array, " n"] | None
# Above it, trees are grown on histograms: exact splits take too long. The options were chosen on twelve data sets:
# `benchmarks/results/boosted_trees.txt`.
_FEW_ROWS = 5_000


def boosted_trees(
    x: Table, y: Float[Array, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """Gradient boosting with small steps, small leaves and random parts of rows and columns (Friedman 2002).

    Of more than 5,000 rows it is scikit-learn's boosting on histograms.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor

    if len(y) > _FEW_ROWS:
        model: Any = HistGradientBoostingRegressor(
            max_iter=400, learning_rate=0.05, max_features=0.7, early_stopping=cast("Any", False), random_state=0
        )
    else:
        model = GradientBoostingRegressor(
            n_estimators=500,
            learning_rate=0.05,
            max_depth=6,
            min_samples_leaf=2,
            subsample=0.8,
            max_features=0.7,
            random_state=0,
        )
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


def extra_trees(
    x: Table, y: Float[Array, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """Extremely randomized trees (Geurts, Ernst and Wehenkel 2006): 400, or of more than 5,000 rows 100.

    Raises:
        ImportError: if scikit-learn is missing.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    number = 400 if len(y) <= _FEW_ROWS else 100
    return OfNumbers(ExtraTreesRegressor(number, random_state=0))(
        x, y, categorical=categorical, sample_weight=sample_weight
    )


def catboost(
    x: Table, y: Float[Array, " n"], *, categorical: Categorical = (), sample_weight: Weights = None
) -> Callable:
    """CatBoost with its defaults.

    Raises:
        ImportError: if it is missing.
    """
    from catboost import CatBoostRegressor  # pyright: ignore[reportMissingImports]

    model = CatBoostRegressor(random_seed=0, verbose=0, thread_count=1, allow_writing_files=False)
    return OfNumbers(model)(x, y, categorical=categorical, sample_weight=sample_weight)


# By the names of models.
TREES = {function.__name__: function for function in (boosted_trees, extra_trees, catboost)}


def missing(name: str) -> str | None:
    """The package that trees of this name need; None where it is there."""
    package, module = ("catboost", "catboost") if name == "catboost" else ("scikit-learn", "sklearn")
    return package if importlib.util.find_spec(module) is None else None
