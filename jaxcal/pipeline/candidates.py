"""The predictors that a pipeline tries where none is given."""

from collections.abc import Callable
from typing import Any

from jaxcal.calibrators import rio
from jaxcal.pipeline.steps import OfNumbers
from jaxcal.predictors import gaussian_process, mlp


def candidates() -> list[tuple[Any, tuple[Callable, ...]]]:
    """Predictors, with the calibrators of each.

    Of lists of three they have the least CRPS over data sets with noise (`benchmarks/results/pipelines.md`).
    """
    found = [(gaussian_process.fit, ()), (mlp.fit, (rio.fit,))]
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        return found
    return [*found, (OfNumbers(HistGradientBoostingRegressor(random_state=0)), (rio.fit,))]
