"""`concatenate` and `Concatenated`: the rows of several distributions as one distribution."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray
from jaxcal.distributions._base import D, Distribution, marked_out_of_fold, match
from jaxcal.distributions._reach import Reach
from jaxcal.distributions._rows import R, Rows, Values, replaced


def concatenate(distributions: Sequence[Any]) -> Any:
    """The rows of several distributions as one distribution, in their order.

    Rows of a distribution can share arrays, such as the levels of `Quantiles` or the table of an `Empirical`. If all
    distributions have one class and the same shared arrays, the result has this class. Else it is a `Concatenated`, in
    which each part keeps its shared arrays. The result is marked as out-of-fold if one of the distributions is.

    Args:
        distributions: distributions of any classes, or only `MultivariateNormal`, or only `MultivariateEmpirical`.

    Raises:
        TypeError: if one of them is no distribution.
        ValueError: if there is none, one is a stack of several runs, or distributions of vectors have different shared
            arrays.

    Example:
        >>> from jaxcal import Normal
        >>> whole = concatenate([Normal(jnp.zeros(2), 1.0), Normal(jnp.array([5.0]), 2.0)])
        >>> print(type(whole).__name__, whole.std, whole[-1].mean)
        Normal [1. 1. 2.] [5.]
    """
    parts = tuple(distributions)
    for part in parts:
        if not isinstance(part, Rows):
            raise TypeError(f"distributions must be a sequence of distributions; got {type(part).__name__} among them.")
    if not parts:
        raise ValueError("distributions is empty: there is nothing to concatenate.")
    if (together := beneath_each_other(parts)) is not None:
        return together
    univariate_parts = [part for part in parts if isinstance(part, Distribution)]
    if len(univariate_parts) < len(parts):
        raise ValueError("distributions of vectors must be of one class, of as many outcomes, and share one table.")
    ends = np.cumsum([len(part) for part in parts])
    whole = Concatenated(univariate_parts, np.split(np.arange(ends[-1]), ends[:-1]))
    return marked_out_of_fold(whole) if any(part.is_out_of_fold for part in univariate_parts) else whole


def beneath_each_other(parts: Sequence[R], order: np.ndarray | None = None) -> R | None:
    """The rows of parts as one distribution of their class, in an order if one is given.

    The parts must have one class and equal shared arrays. The result is None for other parts.
    """
    parts = _marked_alike(parts)
    if len({jax.tree.structure(part) for part in parts}) > 1 or _holds_parts(parts[0]):
        return None
    axes, *leaves = (jax.tree.leaves(tree) for tree in (parts[0]._axes(), *parts))
    if not all(_fit_together(*field) for field in zip(axes, *leaves, strict=True)):
        return None
    return _joined(parts, order)


def _marked_alike(parts: Sequence[R]) -> Sequence[R]:
    """The parts, all marked as out-of-fold if one of them is."""
    is_marked = any(isinstance(part, Distribution) and part.is_out_of_fold for part in parts)
    return [replaced(part, is_out_of_fold=True) for part in parts] if is_marked else parts


def _holds_parts(distribution: Any) -> bool:
    is_one = lambda node: isinstance(node, Concatenated)
    return any(map(is_one, jax.tree.leaves(distribution, is_leaf=is_one)))


def _fit_together(axis: int, first: Array, *others: Array) -> bool:
    """Whether arrays can be joined on their axis of rows.

    With such an axis the lengths of all other axes must be equal. Without it (-1) the arrays must be known to be equal.
    """
    if axis >= 0:
        lengths = lambda array: array.shape[:axis] + array.shape[axis + 1 :]
        return all(lengths(other) == lengths(first) for other in others)
    if any(other.shape != first.shape or other.dtype != first.dtype for other in others):
        return False
    changed = [other for other in others if other is not first]
    return not changed or (not _checks.is_traced(first, *changed) and all(np.array_equal(first, x) for x in changed))


@jax.jit
def _joined(parts: Sequence[Any], order: Int[ArrayLike, " n"] | None) -> Any:
    def join(axis: int, *leaves: Array) -> Array:
        if axis < 0:
            return leaves[0]
        whole = jnp.concatenate(leaves, axis)
        return whole if order is None else jnp.take(whole, order, axis)

    return jax.tree.map(join, parts[0]._axes(), *parts)


# The methods of up to this number of parts are called one after another. The default folds are so few.
_FEW_PARTS = 16


class Concatenated(Distribution):
    """Distributions of different data points, whose rows are put into one order.

    Each part keeps what its rows share, such as the table of an `Empirical`.

    Args:
        parts: distributions, of any classes.
        rows: for each part the numbers of the rows that it predicts, [k]. All parts together have each of the numbers 0
            to n - 1 once.

    Raises:
        ValueError: if a part predicts another number of rows, or not every row occurs once.

    Example:
        >>> from jaxcal import Empirical, Normal
        >>> first, second = Empirical(jnp.zeros(2), 1.0, jnp.array([-1.0, 1.0])), Normal(jnp.array([5.0]), 1.0)
        >>> print(Concatenated([first, second], [[0, 2], [1]]).mean)
        [0. 5. 0.]
    """

    parts: tuple[Distribution, ...]
    # The numbers of the rows of all parts, one part after another, and the end of each part. It is one array, because n
    # folds take rows of n parts n times.
    rows: Int[Array, "*n"]
    ends: tuple[int, ...] = eqx.field(static=True)
    # Mean and std, if they are kept because rows are taken many times.
    moments: tuple[Float[Array, "*n"], Float[Array, "*n"]] | None = None

    def __init__(self, parts: Sequence[Distribution], rows: Sequence[ArrayLike | Sequence[int]]):
        numbers = [np.asarray(each) for each in rows]
        sizes, expected = _lengths(parts), [each.shape[0] for each in numbers]
        if sizes != expected:
            raise ValueError(f"the parts predict {sizes} rows, where {expected} are expected.")
        if not np.array_equal(np.sort(np.concatenate(numbers)), np.arange(sum(sizes))):
            raise ValueError(f"rows must hold each of the numbers 0 to {sum(sizes) - 1} once.")
        self.parts, self.moments = tuple(parts), None
        self.rows, self.ends = jax.device_put(np.concatenate(numbers)), tuple(np.cumsum(sizes).tolist())

    @property
    def has_std(self) -> bool:
        """Whether the predictions of at least one part have a std."""
        return any(part.has_std for part in self.parts)

    @property
    def has_density(self) -> bool:
        """Whether at least one part has a density."""
        return any(part.has_density for part in self.parts)

    @property
    def is_continuous(self) -> bool:
        """Whether all parts are continuous."""
        return all(part.is_continuous for part in self.parts)

    @property
    def is_location_scale(self) -> bool:
        """Whether all parts are location-scale distributions of one class."""
        return len(set(map(type, self.parts))) == 1 and self.parts[0].is_location_scale

    @property
    def has_closed_quantiles(self) -> bool:
        """Whether all parts have closed quantiles."""
        return all(part.has_closed_quantiles for part in self.parts)

    @property
    def reach(self) -> Reach:
        """Every row has the reach of its part."""
        reaches = list(zip([part.reach for part in self.parts], _lengths(self.parts), strict=True))
        xp = np if not _checks.is_traced(*(end for reach, _ in reaches for end in reach[:2])) else jnp
        of_rows = lambda k: self._join([xp.broadcast_to(reach[k], size) for reach, size in reaches])
        return Reach(of_rows(0), of_rows(1))

    def __len__(self) -> int:
        """The number of rows."""
        if self.rows.ndim > 1:
            return len(self.parts[0])  # this raises ValueError: the part is a stack of several runs
        return self.rows.shape[0]

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The means of the parts."""
        return self._join([part.mean for part in self.parts]) if self.moments is None else self.moments[0]

    @property
    def std(self) -> Float[Array, "*n"]:
        """The stds of the parts."""
        return self._join([part.std for part in self.parts]) if self.moments is None else self.moments[1]

    def cdf(self, y: Values) -> Float[Array, "*n"]:
        """The cdfs of the parts."""
        return self._each("cdf", y)

    def log_prob(self, y: Values) -> Float[Array, "*n"]:
        """The log densities of the parts."""
        return self._each("log_prob", y)

    def crps(self, y: Values) -> Float[Array, "*n"]:
        """The scores of the parts."""
        return self._each("crps", y)

    def icdf(self, p: Values) -> Float[Array, "..."]:
        """The quantiles of the parts, each by the rule of its part."""
        return self._join([part.icdf(p) for part in self.parts])

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """The intervals of the parts, each by the rule of its part."""
        lower, upper = zip(*(part.interval(confidence_level) for part in self.parts), strict=True)
        return self._join(lower), self._join(upper)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Samples of the parts, with a key for each."""
        _checks.check_key(key)
        keys = jax.random.split(key, len(self.parts))
        samples = [part.sample(each, shape) for part, each in zip(self.parts, keys, strict=True)]
        return self._join(samples, axis=len(shape))

    def quantile(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The quantiles of the parts, neither checked nor rounded."""
        return self._each("quantile", p)

    def _take(self, rows: Int[Array | np.ndarray, " k"]) -> "Concatenated":
        if _checks.is_traced(rows, self.rows):
            raise TypeError(
                "rows of a Concatenated cannot be taken under jit, vmap or grad: they decide how many each part has. "
                "Take them outside."
            )
        place = np.argsort(np.asarray(self.rows))[rows]  # the positions among the rows of all parts in sequence
        part_of = np.searchsorted(self.ends, place, side="right")
        order = np.argsort(part_of, kind="stable")
        part_of, place, number = part_of[order], place[order], len(self.parts)
        sizes, starts = np.bincount(part_of, minlength=number), np.array([0, *self.ends[:-1]])
        ends, place = np.cumsum(sizes), place - starts[part_of]  # the positions within each part
        # A part stays unchanged if all its rows are taken, in their order.
        is_elsewhere = place != np.arange(len(place)) - (ends - sizes)[part_of]
        is_whole = (sizes == np.diff(self.ends, prepend=0)) & (np.bincount(part_of, is_elsewhere, number) == 0)
        parts = [
            part if whole else part._take(place[end - size : end])
            for part, whole, size, end in zip(self.parts, is_whole, sizes, ends, strict=True)
            if size
        ]
        moments = None if self.moments is None else tuple(jnp.take(each, rows) for each in self.moments)
        ends, order = tuple(ends[sizes > 0].tolist()), jax.device_put(order)
        return replaced(self, parts=tuple(parts), rows=order, ends=ends, moments=moments)

    def _each(self, method: str, values: ArrayLike) -> Float[Array, "*n"]:
        """The results of a method of every part for the values of its rows, in the order of the rows."""
        values = match(values, self.mean)
        is_traced = _checks.is_traced(values, *jax.tree.leaves(self))
        if is_traced or len(self.parts) <= _FEW_PARTS:
            in_parts = values[self.rows] if is_traced else np.asarray(values)[np.asarray(self.rows)]
            own = (jnp if is_traced else np).split(in_parts, self.ends[:-1])
            return self._join([getattr(part, method)(each) for part, each in zip(self.parts, own, strict=True)])
        results = np.empty(values.shape, values.dtype)
        for parts, rows in _alike(self.parts, np.split(np.asarray(self.rows), self.ends[:-1])):
            results[rows] = _of_alike(method, parts, values[rows])
        return jax.device_put(results)

    def _join(self, values: Sequence[JaxArray | np.ndarray], axis: int = 0) -> Array:
        """The values of the parts in the order of the rows."""
        if _checks.is_traced(*values, self.rows):
            return jnp.take(jnp.concatenate(values, axis), jnp.argsort(self.rows), axis)
        return jax.device_put(np.take(np.concatenate(values, axis), np.argsort(np.asarray(self.rows)), axis))


def with_moments(distribution: D) -> D:
    """The same predictions. A `Concatenated` then keeps its means and stds, also when rows are taken."""
    if not isinstance(distribution, Concatenated):
        return distribution
    return replaced(distribution, moments=(distribution.mean, distribution.std))


def _lengths(parts: Sequence[Distribution]) -> list[int]:
    """The number of rows of every part. The axis of rows is looked up once for parts of one structure."""
    lengths, places = [], {}
    for part in parts:
        leaves, structure = jax.tree.flatten(part)
        kind = structure, tuple(map(np.ndim, leaves))
        if type(part).__len__ is not Rows.__len__:
            lengths.append(len(part))
            continue
        if kind not in places:
            places[kind] = next((k, axis) for k, axis in enumerate(jax.tree.leaves(part._axes())) if axis >= 0)
        place, axis = places[kind]
        lengths.append(leaves[place].shape[axis])
    return lengths


def _alike(
    parts: Sequence[Distribution], rows: Sequence[Int[np.ndarray, "..."]]
) -> list[tuple[Distribution, Int[np.ndarray, "..."]]]:
    """Stacks of the parts whose arrays have the same structure, shapes and dtypes, with the rows of each part."""
    kinds: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        leaves, structure = jax.tree.flatten(part)
        kinds.setdefault((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)), []).append(number)
    stack = lambda *leaves: np.stack(leaves)
    return [
        (jax.tree.map(stack, *(parts[k] for k in numbers)), np.stack([rows[k] for k in numbers]))
        for numbers in kinds.values()
    ]


@_programs.jit
def _of_alike(method: str, parts: Distribution, values: Float[Array, "m k"]) -> Float[Array, "m k"]:
    """The results of a method of every part of a stack for its values, by one program for all parts."""
    return lax.map(lambda each: getattr(each[0], method)(each[1]), (parts, values))
