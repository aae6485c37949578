"""Functions for several files of metrics: checks of targets, reliability curves, and the rows of every group."""

import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Real

from jaxcal import _checks
from jaxcal._numpy import JaxArray, is_working, namespace, numpy_or_jit
from jaxcal.distributions import Distribution
from jaxcal.functional import linalg

Scalar = Float[JaxArray, ""]
Weights = Real[ArrayLike, " n"] | None
# A number for each row, and the lower and the upper ends of the rows' intervals.
OfRows = Float[JaxArray, " n"]
Ends = tuple[OfRows, OfRows]
P = ParamSpec("P")


def in_numpy(y: ArrayLike, distribution: Distribution, *_: Any, **__: Any) -> bool:
    """Whether NumPy can compute the methods of a distribution."""
    return distribution._in_numpy


def as_metric(
    formula: Callable[Concatenate[Float[JaxArray, " n"], Distribution, P], Scalar],
) -> Callable[Concatenate[ArrayLike, Distribution, P], Scalar]:
    """The metric of a formula: the targets are checked where their values are known, and the rest is one program."""
    answer = numpy_or_jit(formula, when=in_numpy)

    @wraps(formula)
    def metric(y: ArrayLike, distribution: Distribution, *args: P.args, **options: P.kwargs) -> Scalar:
        y = as_targets(y, distribution)
        options["weights"] = _checks.as_weights(options.get("weights"), y.shape[0])
        return answer(y, distribution, *args, **options)

    return metric


def as_targets(y: ArrayLike, distribution: Distribution) -> Float[JaxArray, " n"]:
    """The targets as a vector of as many rows as there are predictions."""
    shape = distribution.mean.shape
    if len(shape) != 1:
        raise ValueError(f"A metric takes predictions of shape (n,); got {shape}: use vmap over runs.")
    return _checks.as_vector("y", y, length=shape[0])


def dtype_of(y: ArrayLike, distribution: Distribution) -> DTypeLike:
    return jnp.result_type(_checks.as_floats("y", y), distribution.mean)


def share(rows: Bool[JaxArray, " n"], dtype: DTypeLike, weights: Weights = None) -> Scalar:
    if weights is not None:
        return linalg.weighted_mean(rows.astype(dtype), weights)
    # Counted in integers: a float32 sum of ones stops growing at 2^24.
    return namespace(rows).asarray(rows.sum(dtype=np.int32), dtype) / rows.size


@numpy_or_jit
def share_inside(y: OfRows, ends: Ends, weights: Weights) -> Scalar:
    lower, upper = ends
    return share((lower <= y) & (y <= upper), jnp.result_type(y, lower), weights)


@numpy_or_jit
def mean_width_of(ends: Ends, weights: Weights) -> Scalar:
    lower, upper = ends
    return linalg.weighted_mean(upper - lower, weights)


# The levels t, in percent, of the metrics' curves, which have 1 - t as well: all levels, and the levels of the tails.
PERCENTS, TAILS = tuple(range(51)), (5, 10, 15, 20)


class Curve(NamedTuple):
    """Fractions of the targets at levels t, which are at most a half, and at levels 1 - t.

    Attributes:
        levels: [2, k], t and 1 - t.
        below: [2, k], the fraction with y < F⁻¹(level).
        at_most: [2, k], the fraction with y <= F⁻¹(level).
        between: [k], the fraction with F⁻¹(t) < y < F⁻¹(1 - t).
    """

    levels: Float[JaxArray, "2 k"]
    below: Float[JaxArray, "2 k"]
    at_most: Float[JaxArray, "2 k"]
    between: Float[JaxArray, " k"]


def curve_of(
    y: Float[JaxArray, " n"], distribution: Distribution, percents: tuple[int, ...], weights: Weights
) -> Curve:
    """The curve at levels t of these percentages, by one pass over the quantiles, in O(n) memory."""
    xp, low, dtype = namespace(y), np.array(percents), dtype_of(y, distribution)
    levels = xp.asarray(np.stack([low, 100 - low]) / 100, dtype)
    is_below, is_at_most = (below_quantile(y, distribution, less) for less in (operator.lt, operator.le))

    def fractions(pair: Float[JaxArray, " 2"]) -> Float[JaxArray, " 5"]:
        below, at_most = ([of(level) for level in pair] for of in (is_below, is_at_most))
        rows = [*below, *at_most, below[1] & ~at_most[0]]
        return xp.stack([share(each, dtype, weights) for each in rows])

    observed = one_by_one(fractions, levels.T).T
    return Curve(levels, observed[:2], observed[2:4], observed[4])


def ece_of(curve: Curve) -> Scalar:
    return 100 * in_order(abs(curve.below - curve.levels))[1:-1].mean()


def tce_of(curve: Curve) -> Scalar:
    return 100 * abs(curve.between - (curve.levels[1] - curve.levels[0])).mean()


def calibration_rmse_of(curve: Curve) -> Scalar:
    return linalg.sqrt((in_order(curve.below - curve.levels) ** 2).sum() / 100)


def in_order(values: Float[JaxArray, "2 k"]) -> Float[JaxArray, " levels"]:
    """Values at levels t and 1 - t, up to a half, as values at increasing levels."""
    return namespace(values).concatenate([values[0], values[1, -2::-1]])


def below_quantile(
    y: Float[JaxArray, " n"], distribution: Distribution, less: Callable
) -> Callable[[Scalar], Bool[JaxArray, " n"]]:
    """A function that says for a level which rows lie below their quantile of that level.

    The metrics are defined by quantiles, and ties with atoms count, so y is compared with the quantile. If the quantile
    is an expensive root of a continuous cdf, the cdf at y is compared with the level instead. This gives the same rows,
    with one evaluation for all levels.
    """
    if distribution.has_closed_quantiles or not distribution.is_continuous:
        return lambda level: less(y, distribution.icdf(level))
    values = distribution.cdf(y)
    # A cdf that rounds to 0 or 1 far out must not put y beyond an infinite quantile.
    return lambda level: namespace(values).where((level > 0) & (level < 1), less(values, level), level >= 1)


def one_by_one(function: Callable[[JaxArray], JaxArray], values: JaxArray) -> JaxArray:
    """The function of each value along the leading axis, in the memory of one call."""
    stack: Any = np.stack
    return stack([function(value) for value in values]) if is_working() else jax.lax.map(function, values)


def groups_of(by: ArrayLike | Sequence, weights: Weights, y: Float[Array, " n"]) -> tuple[list, np.ndarray]:
    """The labels of the groups, and the number of every row's group.

    Raises:
        ValueError: if the labels are not as many as the rows, or all weights of a group are 0.
    """
    labels, number = np.unique(_checks.as_labels("by", by, y.shape[0]), return_inverse=True)
    if weights is not None:
        _checks.check_weights_of_groups(labels, number, weights)
    return labels.tolist(), number.astype(np.int32)


def map_groups(
    function: Callable, number: Int[ArrayLike, " n"], weights: Weights, groups: int, dtype: DTypeLike
) -> Any:
    """The function of every group's weights, which are 0 for the rows of other groups; one group at a time."""
    own = jnp.ones((), dtype) if weights is None else jnp.asarray(weights, dtype)
    return jax.lax.map(lambda k: function(jnp.where(number == k, own, 0)), jnp.arange(groups, dtype=jnp.int32))
