"""The predictors that a pipeline combines if no predictor is given."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from jaxcal import predictors
from jaxcal.calibrators import rio
from jaxcal.pipeline import trees

# These two learn smooth functions best. Trees learn steps and interactions best.
_OF_JAXCAL = ("gaussian_process", "deep_ensemble")
# RIO follows a predictor of smooth functions that gives means alone. It does not follow boosting, whose errors on its
# training rows are near 0.
_OF_MEANS = ("mlp",)


def candidates(
    models: Sequence[str] | None = None, *, jax_only: bool = False
) -> list[tuple[Any, tuple[Callable, ...]]]:
    """Predictors, each with its calibrators, which `jaxcal.pipeline.fit(predictor=...)` combines.

    Args:
        models: names of predictors of jaxcal, names of trees of scikit-learn ("boosted_trees" and "extra_trees"), or
            "catboost", "lightgbm" and "xgboost". None means a Gaussian process, an ensemble of networks, the trees of
            scikit-learn, and CatBoost, each if its package is installed. RIO follows a single network, "mlp".
        jax_only: whether trees are omitted if models is None. The fitted pipeline then predicts under `jit`, `vmap` and
            `grad`, and `jc.save` stores it without an object of another package.

    Raises:
        ImportError: if trees are named and their package is missing.
        ValueError: if there is no predictor of a name, or no name is given.

    Example:
        >>> import jaxcal as jc
        >>> [fit.__module__ for fit, _ in candidates(jax_only=True)]
        ['jaxcal.predictors.gaussian_process', 'jaxcal.predictors.deep_ensemble']
        >>> [(fit.__module__, len(calibrators)) for fit, calibrators in candidates(["mlp", "forests"])]
        [('jaxcal.predictors.mlp', 1), ('jaxcal.predictors.forests', 0)]
    """
    if models is None:  # the quickest first: with a time limit they leave their spare time to the others
        models = [*(() if jax_only else trees.by_default()), *_OF_JAXCAL]
    if not models:
        raise ValueError("models must name one at least.")
    return [(_predictor(name), (rio.fit,) if name in _OF_MEANS else ()) for name in models]


def _predictor(name: str) -> Any:
    if name in trees.TREES:
        if package := trees.missing(name):
            raise ImportError(f"the model {name!r} needs {package}: pip install {package}.")
        return trees.TREES[name]
    if name not in _names():
        raise ValueError(f"there is no model {name!r}; there are {', '.join((*_names(), *trees.TREES))}.")
    return importlib.import_module(f"jaxcal.predictors.{name}").fit


def _names() -> list[str]:
    """The modules of all predictors."""
    return [module.name for module in pkgutil.iter_modules(predictors.__path__) if not module.name.startswith("_")]
