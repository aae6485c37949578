"""The predictors that a pipeline tries where none is given."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from jaxcal import predictors
from jaxcal.calibrators import rio
from jaxcal.pipeline.steps import OfNumbers

_BOOSTED_TREES = "boosted_trees"
# Those with the least CRPS of lists of three over data sets with noise (`benchmarks/results/pipelines.md`).
_BEST = ("gaussian_process", "mlp", _BOOSTED_TREES)
# Predictors of means alone: RIO follows them.
_OF_MEANS = ("mlp", _BOOSTED_TREES)


def candidates(models: Sequence[str] | None = None) -> list[tuple[Any, tuple[Callable, ...]]]:
    """Predictors, with the calibrators of each: what `jaxcal.pipeline.fit(predictor=...)` chooses among.

    Args:
        models: names of predictors of jaxcal, or "boosted_trees" for those of scikit-learn. None for a Gaussian
            process, a network with RIO and, where scikit-learn is installed, boosted trees with RIO. RIO follows all
            that predict means alone.

    Raises:
        ImportError: if boosted trees are named, and scikit-learn is missing.
        ValueError: if there is no such predictor, or none at all.

    Example:
        >>> import jaxcal as jc
        >>> [(fit.__module__, len(calibrators)) for fit, calibrators in candidates(["mlp", "forests"])]
        [('jaxcal.predictors.mlp', 1), ('jaxcal.predictors.forests', 0)]
    """
    if models is None:
        try:
            return candidates(_BEST)
        except ImportError:
            return candidates(_BEST[:-1])
    if not models:
        raise ValueError("models must name one at least.")
    return [(_predictor(name), (rio.fit,) if name in _OF_MEANS else ()) for name in models]


def _predictor(name: str) -> Any:
    if name == _BOOSTED_TREES:
        from sklearn.ensemble import HistGradientBoostingRegressor

        return OfNumbers(HistGradientBoostingRegressor(random_state=0))
    if name not in _names():
        raise ValueError(f"there is no model {name!r}; there are {', '.join((*_names(), _BOOSTED_TREES))}.")
    return importlib.import_module(f"jaxcal.predictors.{name}").fit


def _names() -> list[str]:
    """The modules of all predictors."""
    return [module.name for module in pkgutil.iter_modules(predictors.__path__) if not module.name.startswith("_")]
