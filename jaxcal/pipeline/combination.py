"""Several predictors as one: a weighted mean of their means, and the distribution of its errors.

All parts are learned from out-of-fold predictions. The weights of the predictors' means are not negative and have the
sum 1. They minimize the mean absolute error, which is the CRPS of a point. This is a kind of stacking (Wolpert,
"Stacked generalization", 1992; Breiman, "Stacked regressions", 1996). The errors of the weighted mean have a scale that
follows the data, and a density everywhere (`jaxcal.pipeline.errors`). A single predictor may keep the shape of its
distributions. The weights for the rows of a fold are learned from the other folds.
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

# Weights below this number are set to 0.
_LEAST_WEIGHT = 0.02
_REWEIGHTINGS = 30


class Combination(eqx.Module):
    """One predictor from one or several fitted chains; it makes one distribution of their predictions.

    Attributes:
        names: the names of the steps of each chain.
        chains: the chains that have a weight.
        combiner: makes one distribution of their predictions.
        gains: by how much the out-of-fold mean absolute error would grow without each chain, as a fraction.
        has_several: whether there were several predictors to combine.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    chains: tuple[Chain, ...]
    combiner: "Combiner"
    gains: tuple[float, ...] = eqx.field(static=True)
    has_several: bool = eqx.field(static=True)

    def __call__(self, x: Table) -> SmoothQuantiles:
        """The distribution of every row."""
        return self.combiner(x, self._predictions(x))

    def means(self, x: Table) -> Float[Array, " n"]:
        """The weighted means of the chains; the means of the distributions also include the skewness of the errors."""
        return self.combiner.means(self._predictions(x))

    def with_means(self, x: Table) -> tuple[SmoothQuantiles, Float[Array, " n"]]:
        """The distributions, and `means`; every chain predicts once."""
        predictions = self._predictions(x)
        return self.combiner(x, predictions), self.combiner.means(predictions)

    def _predictions(self, x: Table) -> list[Distribution]:
        return [chain(x) for chain in self.chains]

    def __str__(self) -> str:
        """The weights, the largest first, and the growth of the error without each predictor."""
        lines = [f"{'':30}{'weight':>20}{'error without it':>20}"]
        for k in np.argsort(-self.combiner.weights, kind="stable"):
            more = "the only one" if np.isinf(self.gains[k]) else f"{100 * self.gains[k]:+.1f} %"
            lines.append(f"{self.names[k]:30}{self.combiner.weights[k]:20.2f}{more:>20}")
        return "\n".join(lines)


class Combined(NamedTuple):
    """A combiner of predictors, and its out-of-fold distributions.

    Attributes:
        kept: the numbers of the predictors that have a weight.
        combiner: makes one distribution of the predictions of these predictors.
        out_of_fold: the distribution of every row, learned from the rows of the other folds.
        gains: by how much the mean absolute error would grow without each of these predictors, as a fraction.
    """

    kept: list[int]
    combiner: "Combiner"
    out_of_fold: SmoothQuantiles
    gains: tuple[float, ...]


def combine(
    x: Table, predictions: Sequence[Distribution], y: Float[np.ndarray, " n"], parts: Sequence[np.ndarray]
) -> Combined:
    """Learn to combine the out-of-fold predictions of several predictors.

    Args:
        x: the inputs of the rows [n, d].
        predictions: the out-of-fold predictions [n] of each predictor.
        y: the targets [n].
        parts: the rows of each fold, as places among these rows.
    """
    with one_thread_for(len(y)):
        return _combined(x, predictions, np.asarray(y, float), parts)


def _combined(x: Table, predictions: Sequence[Distribution], y: np.ndarray, parts: Sequence[np.ndarray]) -> Combined:
    inputs, means = Ordinal.of(x), np.asarray(_means(predictions))
    errors = y - means
    kept = [int(k) for k in np.flatnonzero(weights_of(errors))]
    predictions, means, errors = [predictions[k] for k in kept], means[kept], errors[kept]
    weights = weights_of(errors)  # again, without the predictors of weight 0
    # m = y - sum_k w_k e_k = sum_k w_k m_k. The weights of a fold's rows come from the other folds.
    mean = y - CrossFit(parts, len(y))(
        lambda rows: weights_of(errors[:, rows]), lambda own, rows: own @ errors[:, rows]
    )
    errors_fit, out_of_fold = fit_errors(_predicted(inputs(x), predictions, means, mean), y, parts)
    return Combined(kept, Combiner(inputs, weights, errors_fit), out_of_fold, _gains(errors, weights))


def _gains(errors: Float[np.ndarray, "m n"], weights: Float[np.ndarray, " m"]) -> tuple[float, ...]:
    """By how much the mean absolute error grows without each predictor, as a fraction; infinite for a single one."""
    if len(errors) == 1:
        return (np.inf,)
    size = lambda some: float(np.mean(abs(weights_of(some) @ some)))
    least = float(np.mean(abs(weights @ errors)))
    return tuple(size(np.delete(errors, k, 0)) / least - 1 if least else 0.0 for k in range(len(errors)))


class Combiner(eqx.Module):
    """Makes one distribution of the predictions of several predictors; made by `combine`.

    Attributes:
        inputs: turns the inputs into numbers, from which the scale is learned.
        weights: the weights of the predictors' means [m].
        errors: the distribution of the errors.
    """

    inputs: Ordinal
    weights: Float[AnyArray, " m"]
    errors: Errors

    def __call__(self, x: Table, predictions: Sequence[Distribution]) -> SmoothQuantiles:
        """The distribution of every row, from its inputs and the predictions [n] of each predictor."""
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
    """The mean, and what its errors may depend on: the mean, the spread of the means, the stds, and the inputs."""
    xp, least = namespace(mean), np.finfo(np.float32).tiny
    stds = [xp.log(xp.maximum(_floats(each.std), least)) for each in predictions if each.has_std]
    apart = [xp.log(means.std(0) + least)] if predictions[1:] else []
    features = xp.column_stack([mean, *apart, *stds, inputs])
    is_one = len(predictions) == 1 and predictions[0].has_std
    # `_quantiles` does not warn of levels that a prediction does not reach: its outermost lines go on there.
    quantiles = _floats(predictions[0]._quantiles(jnp.asarray(LEVELS))) if is_one else None
    return Predicted(mean, features, quantiles)


def weights_of(errors: Float[np.ndarray, "m n"]) -> Float[np.ndarray, " m"]:
    """Weights, not negative and with sum 1, that minimize the mean absolute value of the weighted errors.

    The method is iteratively reweighted least squares. Each iteration solves a problem of non-negative least squares,
    and scales the solution to the sum 1. A small multiple of the identity is added to the matrix of products, so that
    predictors with nearly equal errors have equal weights. The multiple depends on the best predictor alone: a bad
    predictor does not change it.
    """
    number, size = errors.shape
    unit = np.median(abs(errors)) or np.mean(abs(errors)) or 1.0
    errors, solution = errors / unit, np.full(number, 1 / number)
    for _ in range(_REWEIGHTINGS):
        weights = solution
        # r_i = 1 / max(|w'e_i|, 0.001), P = E diag(r) E' / n + c I = R'R, with c = min_k P_kk / n
        row_weights = 1 / np.maximum(abs(weights @ errors), 1e-3)
        products = errors * row_weights @ errors.T / size
        products[np.diag_indices(number)] += (products.diagonal().min() or 1.0) / size
        root = np.linalg.cholesky(products).T
        # min w'P w + (sum(w) - 1)^2 with w >= 0: it is the minimum of w'P w with sum 1, up to a factor.
        solution, _ = optimize.nnls(np.vstack([root, np.ones(number)]), np.append(np.zeros(number), 1.0))
        solution /= solution.sum()
        if abs(solution - weights).max() < 1e-4:
            break
    weights = np.where(solution < _LEAST_WEIGHT, 0, solution)
    return weights / weights.sum()
