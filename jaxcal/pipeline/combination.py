"""Several predictors as one: weighted means, a scale that follows the data, and the quantiles of scaled errors.

All of it is learned from predictions out of fold. The weights of the predictors' means are not negative and add up to
one. They make the mean absolute error least, which is the CRPS of a point (as stacking: Wolpert, "Stacked
generalization", 1992; Breiman, "Stacked regressions", 1996). The scale of the errors is learned by boosted trees from
the predictions: their mean, how far they are apart, and their stds. It is taken where it lowers the CRPS. Errors over
scale have one distribution for all rows, with a density everywhere and tails of Student t, `SmoothQuantiles`.

What is told about the rows of a fold comes from those of the other folds: weights, scale and quantiles. Without that
intervals are too short.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from jaxcal.distributions import Distribution, SmoothQuantiles
from jaxcal.distributions._base import marked_out_of_fold
from jaxcal.frames.layout import Table
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.steps import one_thread_for
from jaxcal.predictors import _tree_arrays

F = TypeVar("F")

# The levels whose quantiles make the distribution of the scaled errors.
_LEVELS = np.array([0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99])
# What the log score of rows out of fold chooses the degrees of freedom among.
_DEGREES_OF_FREEDOM = (3.0, 4.0, 6.0, 10.0, 30.0)
# What their CRPS chooses the power of the learned scale among; 0 is a constant scale.
_POWERS = (0.0, 0.5, 1.0)
# Below it a weight is 0.
_LEAST_WEIGHT = 0.02
_REWEIGHTINGS = 30
# A row whose error is 0 has this fraction of the median size.
_LEAST_SIZE = 0.1
# The least slope of quantiles in scores of Student t, as a fraction of that in the middle.
_LEAST_SLOPE = 1e-3
_MIDDLE = (0.1, 0.9)
# The density of Student t at 0, about.
_MIDDLE_DENSITY = 0.4
# As a fraction of the targets' std.
_LEAST_RESOLUTION = 1e-6


class Combination(eqx.Module):
    """Fitted chains, and what combines their predictions by NumPy, not under `jit`; the predictor of several.

    Attributes:
        names: what the chains are.
        chains: those that have a weight.
        combiner: what makes one distribution of their predictions.
        gains: by how much the mean absolute error out of fold would grow without each, as a fraction.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    chains: tuple[Chain, ...]
    combiner: "Combiner"
    gains: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, x: Table) -> SmoothQuantiles:
        """The distribution of every row."""
        return self.combiner([chain(x) for chain in self.chains])

    def __str__(self) -> str:
        """The weights, the largest first, and what each predictor adds."""
        lines = [f"{'':30}{'weight':>20}{'error without it':>20}"]
        for k in np.argsort(-self.combiner.weights, kind="stable"):
            more = "the only one" if np.isinf(self.gains[k]) else f"{100 * self.gains[k]:+.1f} %"
            lines.append(f"{self.names[k]:30}{self.combiner.weights[k]:20.2f}{more:>20}")
        return "\n".join(lines)


class Combined(NamedTuple):
    """What combines predictors.

    Attributes:
        kept: the numbers of those that have a weight.
        combiner: of the predictions of these.
        out_of_fold: the distribution of every row, from the rows of the other folds.
        gains: by how much the mean absolute error would grow without each.
    """

    kept: list[int]
    combiner: "Combiner"
    out_of_fold: SmoothQuantiles
    gains: tuple[float, ...]


def combine(predictions: Sequence[Distribution], y: Float[np.ndarray, " n"], parts: Sequence[np.ndarray]) -> Combined:
    """What combines these predictions of rows that the predictors were not fitted to.

    Args:
        predictions: of each predictor [n], out of fold.
        y: the targets [n].
        parts: the rows of each fold, as places among these.
    """
    with one_thread_for(len(y)):
        return _combined(predictions, np.asarray(y, float), parts)


def _combined(predictions: Sequence[Distribution], y: np.ndarray, parts: Sequence[np.ndarray]) -> Combined:
    errors = y - np.stack([np.asarray(each.mean, float) for each in predictions])
    kept = [int(k) for k in np.flatnonzero(weights_of(errors))]
    table, errors = _Predicted.of([predictions[k] for k in kept]), errors[kept]
    weights = weights_of(errors)  # as those of each fold, without the others
    cross = _CrossFit(parts, len(y))
    mean = cross(lambda rows: weights_of(errors[:, rows]), lambda own, rows: own @ table.means[:, rows])
    features, error, resolution = table.features(mean), y - mean, resolution_of(y)
    floor = _LEAST_SIZE * float(np.median(abs(error))) or 1.0
    log_scale = cross(
        lambda rows: _learned(features[rows], error[rows], floor),
        lambda learned, rows: learned.predict(features[rows]),
    )

    def distribution(power: float, df: float) -> SmoothQuantiles:
        scale = Scale(None, power, float(log_scale.mean())).of(log_scale)
        tables = cross(
            lambda rows: quantiles_of(error[rows] / scale[rows], df),
            lambda z, rows: np.broadcast_to(z, (len(rows), len(_LEVELS))),
        )
        return placed(mean, scale, tables, df, resolution)

    score = lambda power: float(np.mean(np.asarray(distribution(power, _DEGREES_OF_FREEDOM[1]).crps(y))))
    power = min(_POWERS, key=score)
    log_score = lambda df: float(np.mean(np.asarray(distribution(power, df).log_prob(y))))
    df = max(_DEGREES_OF_FREEDOM, key=log_score)
    learned = _learned(features, error, floor) if power else None
    scale = Scale(learned, power, float(log_scale.mean()))
    z = quantiles_of(error / scale.of(log_scale), df)
    combiner = Combiner(weights, scale, z, df, resolution)
    return Combined(kept, combiner, marked_out_of_fold(distribution(power, df)), _gains(errors, weights))


def _gains(errors: Float[np.ndarray, "m n"], weights: Float[np.ndarray, " m"]) -> tuple[float, ...]:
    """By how much the mean absolute error grows without each predictor; infinite without the only one."""
    if len(errors) == 1:
        return (np.inf,)
    size = lambda some: float(np.mean(abs(weights_of(some) @ some)))
    least = float(np.mean(abs(weights @ errors)))
    return tuple(size(np.delete(errors, k, 0)) / least - 1 if least else 0.0 for k in range(len(errors)))


class Combiner(eqx.Module):
    """One distribution of the predictions of several predictors; made by `combine`.

    Attributes:
        weights: of the predictors' means [m].
        scale: of the errors.
        z: the quantiles of the scaled errors [k].
        df: the degrees of freedom of their tails.
        resolution: in which the targets are recorded.
    """

    weights: Float[np.ndarray, " m"]
    scale: "Scale"
    z: Float[np.ndarray, " k"]
    df: float
    resolution: float

    def __call__(self, predictions: Sequence[Distribution]) -> SmoothQuantiles:
        """The distribution of every row, of the predictions of each predictor [n]."""
        table = _Predicted.of(predictions)
        mean = self.weights @ table.means
        scale = self.scale(table.features(mean))
        z = np.broadcast_to(self.z, (len(mean), len(self.z)))
        return placed(mean, scale, z, self.df, self.resolution)


class _Predicted(NamedTuple):
    """The means of several predictors [m, n], and the logs of the stds of those that have one [s, n]."""

    means: Float[np.ndarray, "m n"]
    log_stds: Float[np.ndarray, "s n"]

    @classmethod
    def of(cls, predictions: Sequence[Distribution]) -> "_Predicted":
        means = np.stack([np.asarray(each.mean, float) for each in predictions])
        least = np.finfo(np.float32).tiny
        stds = [np.log(np.maximum(np.asarray(each.std, float), least)) for each in predictions if each.has_std]
        return cls(means, np.reshape(stds, (-1, means.shape[1])))

    def features(self, mean: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n f"]:
        """What the scale is learned from."""
        apart = [np.log(self.means.std(0) + np.finfo(np.float32).tiny)] if len(self.means) > 1 else []
        return np.column_stack([mean, *apart, *self.log_stds])


class Scale(eqx.Module):
    """The scale of the errors, exp(c + power (log s - c)): s is learned, c the mean of its logs.

    Attributes:
        learned: what predicts log s; None where the power is 0.
        power: how far the scale follows it.
        center: c.
    """

    learned: Any
    power: float
    center: float

    def __call__(self, features: Float[np.ndarray, "n f"]) -> Float[np.ndarray, " n"]:
        """The scales of rows."""
        if self.learned is None:
            return np.ones(len(features))
        with one_thread_for(len(features)):
            return self.of(self.learned.predict(features))

    def of(self, log_scale: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The scales of rows whose log s is known."""
        return np.exp(self.power * (log_scale - self.center))

    def _to_save(self) -> "Scale":
        """With the arrays of the trees in place of scikit-learn's objects: `jaxcal.serialization`."""
        return replace(self, learned=_tree_arrays.of_gradient_boosting(self.learned))


def _learned(features: Float[np.ndarray, "n f"], error: Float[np.ndarray, " n"], floor: float) -> Any:
    """Boosted trees of the logs of the sizes of the errors; without scikit-learn a constant."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        return _Zero()
    trees = HistGradientBoostingRegressor(
        max_iter=60,
        learning_rate=0.05,
        max_leaf_nodes=8,
        min_samples_leaf=20,
        l2_regularization=5.0,
        early_stopping=cast("Any", False),
        random_state=0,
    )
    return trees.fit(features, np.log(abs(error) + floor))


class _Zero:
    """In place of trees."""

    def predict(self, features: Float[np.ndarray, "n f"]) -> Float[np.ndarray, " n"]:
        """Zeros."""
        return np.zeros(len(features))


class _CrossFit:
    """What is learned from the rows of all other folds, applied to those of each."""

    def __init__(self, parts: Sequence[np.ndarray], number: int) -> None:
        self.parts = [(np.setdiff1d(np.arange(number), part), part) for part in parts]

    def __call__(self, fit: Callable[[np.ndarray], F], apply: Callable[[F, np.ndarray], np.ndarray]) -> np.ndarray:
        """The results of all rows, in their order."""
        found = [apply(fit(others), part) for others, part in self.parts]
        order = np.argsort(np.concatenate([part for _, part in self.parts]))
        return np.concatenate(found)[order]


def weights_of(errors: Float[np.ndarray, "m n"]) -> Float[np.ndarray, " m"]:
    """Weights, not negative and with sum 1, that make the mean absolute value of the weighted errors least.

    By reweighted least squares: each is a problem of non-negative least squares, whose solution is scaled to the sum 1.
    A little of the identity is added to the matrix of products, so that predictors that can hardly be told apart have
    equal weights. How much that is depends on the best one: a bad one has no say.
    """
    number, size = errors.shape
    unit = np.median(abs(errors)) or np.mean(abs(errors)) or 1.0
    errors, found = errors / unit, np.full(number, 1 / number)
    for _ in range(_REWEIGHTINGS):
        weights = found
        row_weights = 1 / np.maximum(abs(weights @ errors), 1e-3)
        products = errors * row_weights @ errors.T / size
        products[np.diag_indices(number)] += (products.diagonal().min() or 1.0) / size
        root = np.linalg.cholesky(products).T
        # The sum is 1 up to a factor, which scaling removes.
        found, _ = optimize.nnls(np.vstack([root, np.ones(number)]), np.append(np.zeros(number), 1.0))
        found /= found.sum()
        if abs(found - weights).max() < 1e-4:
            break
    weights = np.where(found < _LEAST_WEIGHT, 0, found)
    return weights / weights.sum()


def quantiles_of(z: Float[np.ndarray, " n"], df: float) -> Float[np.ndarray, " k"]:
    """The quantiles at `_LEVELS` of a distribution of which z are values, linear in the scores of Student t.

    The j-th of n sorted values is the quantile at level j / (n + 1). Beyond these levels the slope is that in the
    middle.
    """
    ranks = np.arange(1, len(z) + 1) / (len(z) + 1)
    knots, scores, ordered = special.stdtrit(df, ranks), special.stdtrit(df, _LEVELS), np.sort(z)
    middle = np.interp(special.stdtrit(df, _MIDDLE), knots, ordered)
    slope = np.diff(middle)[0] / np.diff(special.stdtrit(df, _MIDDLE))[0]
    beyond = slope * (np.minimum(scores - knots[0], 0) + np.maximum(scores - knots[-1], 0))
    return np.interp(scores, knots, ordered) + beyond


def placed(
    mean: Float[np.ndarray, " n"],
    scale: Float[np.ndarray, " n"],
    z: Float[np.ndarray, "n k"],
    df: float,
    resolution: float,
) -> SmoothQuantiles:
    """The distributions whose scaled errors have these quantiles.

    No density is larger than the resolution of the targets allows, 1 over it, or much larger than in the middle.
    """
    scores = special.stdtrit(df, _LEVELS)
    steps, widths = scale[:, None] * np.diff(z), np.diff(scores)
    low, high = (np.searchsorted(_LEVELS, level) for level in _MIDDLE)
    middle = scale * (z[:, high] - z[:, low]) / (scores[high] - scores[low])
    least = np.maximum(_LEAST_SLOPE * middle, _MIDDLE_DENSITY * resolution)
    rounding = 2 * np.finfo(jax.dtypes.canonicalize_dtype(float)).eps * abs(mean)
    steps = np.maximum(np.maximum(steps, least[:, None] * widths), rounding[:, None])
    median = int(np.searchsorted(_LEVELS, 0.5))
    outward = np.cumsum(np.pad(steps, ((0, 0), (1, 0))), axis=1)
    values = mean[:, None] + scale[:, None] * z[:, median, None] + outward - outward[:, median, None]
    return SmoothQuantiles(_LEVELS, values, df)


def resolution_of(y: Float[np.ndarray, " n"]) -> float:
    """The least distance between two different targets, if some are equal; else a millionth of their std."""
    least = _LEAST_RESOLUTION * float(np.std(y) or abs(y).max() or 1)
    distinct = np.unique(y)
    gaps = np.diff(distinct)
    gaps = gaps[gaps > least]
    return float(gaps.min()) if len(distinct) < len(y) and len(gaps) else least
