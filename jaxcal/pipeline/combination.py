"""Predictors as one: weighted means of several, and the distribution of their errors.

All of it is learned from predictions out of fold. The weights of the predictors' means are not negative and add up to
one. They make the mean absolute error least, which is the CRPS of a point (as stacking: Wolpert, "Stacked
generalization", 1992; Breiman, "Stacked regressions", 1996). The errors of the weighted mean have a scale that follows
the data, and a density everywhere (`jaxcal.pipeline.errors`). One predictor alone may keep the shape of its
distributions. The weights for the rows of a fold come from those of the other folds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize

from jaxcal._numpy import AnyArray, is_known, namespace
from jaxcal.distributions import Distribution, SmoothQuantiles
from jaxcal.frames.layout import Table
from jaxcal.frames.ordinal import Ordinal
from jaxcal.pipeline.chain import Chain
from jaxcal.pipeline.errors import LEVELS, CrossFit, Errors, Predicted, fit_errors
from jaxcal.pipeline.steps import one_thread_for

# Below it a weight is 0.
_LEAST_WEIGHT = 0.02
_REWEIGHTINGS = 30


class Combination(eqx.Module):
    """Fitted chains, and what makes one distribution of their predictions; the predictor of one or of several.

    Attributes:
        names: what the chains are.
        chains: those that have a weight.
        combiner: what makes one distribution of their predictions.
        gains: by how much the mean absolute error out of fold would grow without each, as a fraction.
        of_several: whether there were several to combine.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    chains: tuple[Chain, ...]
    combiner: "Combiner"
    gains: tuple[float, ...] = eqx.field(static=True)
    of_several: bool = eqx.field(static=True)

    def __call__(self, x: Table) -> SmoothQuantiles:
        """The distribution of every row."""
        return self.combiner(x, self._predictions(x))

    def means(self, x: Table) -> Float[Array, " n"]:
        """The weighted means of the chains; the means of the distributions also know how their errors are skewed."""
        return self.combiner.means(self._predictions(x))

    def with_means(self, x: Table) -> tuple[SmoothQuantiles, Float[Array, " n"]]:
        """The distributions, and `means`; every chain predicts once."""
        predictions = self._predictions(x)
        return self.combiner(x, predictions), self.combiner.means(predictions)

    def _predictions(self, x: Table) -> list[Distribution]:
        return [chain(x) for chain in self.chains]

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


def combine(
    x: Table, predictions: Sequence[Distribution], y: Float[np.ndarray, " n"], parts: Sequence[np.ndarray]
) -> Combined:
    """What combines these predictions of rows that the predictors were not fitted to.

    Args:
        x: the inputs of the rows [n, d].
        predictions: of each predictor [n], out of fold.
        y: the targets [n].
        parts: the rows of each fold, as places among these.
    """
    with one_thread_for(len(y)):
        return _combined(x, predictions, np.asarray(y, float), parts)


def _combined(x: Table, predictions: Sequence[Distribution], y: np.ndarray, parts: Sequence[np.ndarray]) -> Combined:
    inputs, means = Ordinal.of(x), np.asarray(_means(predictions))
    errors = y - means
    kept = [int(k) for k in np.flatnonzero(weights_of(errors))]
    predictions, means, errors = [predictions[k] for k in kept], means[kept], errors[kept]
    weights = weights_of(errors)  # as those of each fold, without the others
    mean = y - CrossFit(parts, len(y))(
        lambda rows: weights_of(errors[:, rows]), lambda own, rows: own @ errors[:, rows]
    )
    of_errors, out_of_fold = fit_errors(_predicted(inputs(x), predictions, means, mean), y, parts)
    return Combined(kept, Combiner(inputs, weights, of_errors), out_of_fold, _gains(errors, weights))


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
        inputs: what makes numbers of the inputs, which the scale is learned from.
        weights: of the predictors' means [m].
        errors: the distribution of the errors.
    """

    inputs: Ordinal
    weights: Float[AnyArray, " m"]
    errors: Errors

    def __call__(self, x: Table, predictions: Sequence[Distribution]) -> SmoothQuantiles:
        """The distribution of every row, of its inputs and of the predictions of each predictor [n]."""
        means = _means(predictions)
        return self.errors(_predicted(self.inputs(x), predictions, means, self.weights @ means))

    def means(self, predictions: Sequence[Distribution]) -> Float[Array, " n"]:
        """The weighted means of the predictions of each predictor [n]."""
        return jnp.asarray(self.weights @ _means(predictions))


def _means(predictions: Sequence[Distribution]) -> Float[AnyArray, "m n"]:
    means = [_floats(each.mean) for each in predictions]
    return namespace(*means).stack(means)


def _floats(values: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
    """Known values as an array of NumPy, with its precision."""
    return np.asarray(values, float) if is_known(values) else values


def _predicted(
    inputs: Float[AnyArray, "n d"],
    predictions: Sequence[Distribution],
    means: Float[AnyArray, "m n"],
    mean: Float[AnyArray, " n"],
) -> Predicted:
    """What the distribution of the errors of this mean is told: how far predictions are apart, their stds, and x."""
    xp, least = namespace(mean), np.finfo(np.float32).tiny
    stds = [xp.log(xp.maximum(_floats(each.std), least)) for each in predictions if each.has_std]
    apart = [xp.log(means.std(0) + least)] if predictions[1:] else []
    features = xp.column_stack([mean, *apart, *stds, inputs])
    is_one = len(predictions) == 1 and predictions[0].has_std
    # Without the warning of levels that a prediction does not reach: its outermost lines go on there.
    quantiles = _floats(predictions[0]._quantiles(jnp.asarray(LEVELS))) if is_one else None
    return Predicted(mean, features, quantiles)


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
