"""The networks of USNRT: networks whose residuals are tested, and networks of means and variances in the leaves."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxcal import _random
from jaxcal._numpy import AnyArray, as_numpy, namespace, numpy_or_jit
from jaxcal.functional._loops import over_leading_axis
from jaxcal.networks import NormalNetwork, Widening, presets
from jaxcal.networks.modules import FeedForward, at_rows
from jaxcal.networks.normal import (
    alternate,
    errors_of,
    residual_negative_log_likelihood,
    weighted_squared_error,
    with_unit_variances,
)
from jaxcal.networks.training import new_network, trainer
from jaxcal.optimize import Optimum, each_run, num_train
from jaxcal.predictors._growing import GrowingData

_ROUNDS = 2
# In the widening of a leaf, each of its held-out rows counts one, and the rows of all other leaves count this together.
_WEIGHT_OF_OTHERS = 50.0
# The level of the intervals whose coverage of held-out rows is reported.
_LEVEL = 0.9
# Up to this many rows to train on, one padded length serves parts of all sizes.
_FEW_ROWS = 8192


class TrainingRows(NamedTuple):
    """The rows of a training, to train on and to stop by: padded row numbers, and the numbers of rows."""

    train: Int[AnyArray, " m"]
    num_train: Int[AnyArray, ""]
    validation: Int[AnyArray, " v"]
    num_validation: Int[AnyArray, ""]

    @classmethod
    def padded(
        cls, train: Sequence[np.ndarray], validation: Sequence[np.ndarray], most: tuple[int, int]
    ) -> list["TrainingRows"]:
        """The rows of several trainings, padded to the lengths `most`.

        Where `most` is long, the padded lengths are the least of it, a quarter of it, a sixteenth of it, ... that holds
        all rows. So a few compiled programs are enough for parts of all sizes.
        """
        columns = []
        for part, length in zip((train, validation), most, strict=True):
            while most[0] > _FEW_ROWS and -(-length // 4) >= max(map(len, part)):
                length = -(-length // 4)
            columns.append([np.pad(numbers.astype(np.int32), (0, length - len(numbers))) for numbers in part])
            columns.append([np.array(len(numbers), np.int32) for numbers in part])
        return [cls(*each) for each in zip(*columns, strict=True)]

    @classmethod
    def divided(
        cls,
        parts: Sequence[np.ndarray],
        fraction: float,
        num_rows: int,
        rng: np.random.Generator,
        held_out: Bool[np.ndarray, " n"] | None = None,
    ) -> list["TrainingRows"]:
        """The rows of every part in a random order: the first ones to train on, the others to stop by.

        The rows to stop by are the rows of the part that are held out. A part without held-out rows, or with no others,
        has a random fraction of its rows to stop by.
        """
        orders = [rng.permutation(part) for part in parts]
        sizes = [num_train(len(order), fraction) for order in orders]
        if held_out is not None:
            orders = [order[np.argsort(held_out[order], kind="stable")] for order in orders]
            known = [np.count_nonzero(~held_out[order]) for order in orders]
            sizes = [k if 0 < k < len(o) else size for k, o, size in zip(known, orders, sizes, strict=True)]
        train, validation = zip(
            *(np.split(order, [size]) for order, size in zip(orders, sizes, strict=True)), strict=True
        )
        most = num_train(num_rows, fraction)
        return cls.padded(train, validation, (most, num_rows - most))

    def of(self, inputs: Float[AnyArray, "n p"], targets: Float[AnyArray, " n"]) -> tuple[tuple, tuple]:
        """The inputs and the targets of both parts."""
        return _taken(self.train, inputs, targets), _taken(self.validation, inputs, targets)


class Leaves(NamedTuple):
    """The results of all leaves, [m, leaves]: their networks, root mean square residuals, widenings and coverage.

    The coverage is the fraction of held-out rows in intervals of 90 %. Widening and coverage are None where no rows are
    held out.
    """

    optima: Optimum
    rmse: Float[Array, "m leaves"]
    widening: Widening | None
    coverage: Float[Array, "m leaves"] | None


class Draws(NamedTuple):
    """The random draws of several trainings: an order of the rows, and a key that is split among the networks."""

    rng: np.random.Generator
    key: PRNGKeyArray

    @classmethod
    def of(cls, key: PRNGKeyArray) -> "Draws":
        """The draws of a key."""
        list_key, train_key = _random.split(key)
        return cls(np.random.default_rng(_random.bits(list_key)), train_key)

    def keys(self, number: int) -> list[PRNGKeyArray]:
        """The keys of `number` networks."""
        return _random.split(self.key, number)


def held_out_rows(problem: GrowingData, settings: presets.Settings, draws: Draws) -> Bool[np.ndarray, " n"] | None:
    """The rows that no member's leaves are trained on; None where nothing is widened."""
    if not settings.calibrate:
        return None
    number = problem.target.shape[0]
    order = draws.rng.permutation(number)
    return np.isin(np.arange(number), order[num_train(number, settings.validation_fraction) :])


def out_of_fold_residuals(
    problem: GrowingData, settings: presets.Settings, num_folds: int, num_members: int, draws: Draws
) -> Float[np.ndarray, "m n"]:
    """For every member, each row's residual of a network that was trained on the other folds.

    The row's own fold decides when the training stops.
    """
    rng = draws.rng
    number = problem.target.shape[0]
    folds = [fold for _ in range(num_members) for fold in np.array_split(rng.permutation(number), num_folds)]
    others = [np.setdiff1d(np.arange(number), fold) for fold in folds]
    rows = TrainingRows.padded(others, folds, (number - number // num_folds, -(-number // num_folds)))
    own = list(zip(rows, draws.keys(len(rows)), strict=True))
    label = "usnrt.fit: networks without a fold"
    _, fold_residuals = each_run(_train_mean, _shared(problem, settings), own, label=label, slots=len(own))
    residuals = np.zeros((num_members, number), problem.target.dtype)
    for k, (fold, padded_residuals) in enumerate(zip(folds, np.asarray(fold_residuals), strict=True)):
        residuals[k // num_folds, fold] = padded_residuals[: len(fold)]
    return residuals


def node_residuals(
    problem: GrowingData, settings: presets.Settings, slots: int, rows: list[np.ndarray], key: PRNGKeyArray
) -> list[np.ndarray]:
    """The residuals of a network trained on the rows of every node (section IV-B).

    Most of them are residuals of the network's own training rows.
    """
    draws = Draws.of(key)
    divided = TrainingRows.divided(rows, settings.validation_fraction, problem.target.shape[0], draws.rng)
    own = list(zip(divided, draws.keys(len(divided)), strict=True))
    label = "usnrt.fit: networks of nodes"
    parts = as_numpy(each_run(_train_mean, _shared(problem, settings), own, label=label, slots=slots))
    whole = np.zeros(problem.target.shape, problem.target.dtype)
    residuals = []
    for k, (node_rows, its) in enumerate(zip(rows, divided, strict=True)):
        # Nodes of several members may share rows: the residuals of one are read before the next are written.
        for part, numbers, count in zip(
            parts, (its.train, its.validation), (its.num_train, its.num_validation), strict=True
        ):
            whole[numbers[:count]] = part[k, :count]
        residuals.append(whole[node_rows])
    return residuals


def train_on_all_rows(
    problem: GrowingData,
    settings: presets.Settings,
    held_out: Bool[np.ndarray, " n"],
    residuals: Float[np.ndarray, "m n"],
    draws: Draws,
) -> NormalNetwork:
    """Every member's networks of mean and variance of all rows, [m] in every field.

    The networks of the leaves start from these. The variance learns from out-of-fold residuals.
    """
    number = problem.target.shape[0]
    every = [np.arange(number)] * len(residuals)
    rows = TrainingRows.divided(every, settings.validation_fraction, number, draws.rng, held_out)
    own = list(zip(rows, draws.keys(len(rows)), residuals, strict=True))
    label = "usnrt.fit: networks of all rows"
    return each_run(_train_start, _shared(problem, settings), own, label=label, slots=len(own))


def train_leaves(
    problem: GrowingData,
    settings: presets.Settings,
    leaves: list[list[np.ndarray]],
    slots: int,
    held_out: Bool[np.ndarray, " n"] | None,
    start: NormalNetwork | None,
    draws: Draws,
) -> Leaves:
    """The networks of all leaves, with their root mean square residuals, widenings and coverage.

    Args:
        problem: the rows.
        settings: of the training.
        leaves: the rows of every leaf of every member.
        slots: the most leaves that there can be.
        held_out: whether a row is one that no leaf is trained on.
        start: the networks [m] that the networks of a member's leaves start from; None for new networks.
        draws: the random draws of the trainings.
    """
    flat = [rows for tree_leaves in leaves for rows in tree_leaves]
    counts = np.array([len(tree_leaves) for tree_leaves in leaves])
    rows = TrainingRows.divided(flat, settings.validation_fraction, problem.target.shape[0], draws.rng, held_out)
    start = as_numpy(start)
    starts = [jax.tree.map(lambda leaf, k=k: leaf[k], start) for k in np.repeat(np.arange(len(leaves)), counts)]
    own = list(zip(rows, draws.keys(len(rows)), starts, strict=True))
    results = each_run(_train_leaf, _shared(problem, settings), own, label="usnrt.fit: leaves", slots=slots)
    # A tree with fewer leaves than others is filled up with its first leaf.
    place = np.arange(counts.max())
    is_there = place < counts[:, None]
    number = (np.cumsum(counts) - counts)[:, None] + np.where(is_there, place, 0)
    return _by_leaf(results, number, is_there, settings.calibrate)


def _shared(problem: GrowingData, settings: presets.Settings) -> tuple:
    """The arguments that all trainings share."""
    return problem.inputs, problem.target, settings


class _HeldOut(NamedTuple):
    """Held-out rows of leaves, padded: the network's variance, the error, and whether the row is there."""

    variance: Float[AnyArray, "*k v"]
    errors: Float[AnyArray, "*k v"]
    included: Bool[AnyArray, "*k v"]

    def widenings(self) -> Widening:
        """The widening of every leaf of one tree [leaves]; rows of other leaves have little weight."""
        xp = namespace(self.errors)
        numbers = xp.arange(self.errors.shape[0])
        total, own = (xp.sum(self.included, axis=axis, dtype=self.errors.dtype) for axis in (None, 1))
        flat = jax.tree.map(xp.ravel, self)

        def of_leaf(number: Int[AnyArray, ""]) -> Widening:
            is_own = xp.repeat(numbers == number, self.errors.shape[1])
            # A row of the leaf itself has the weight 1, and another row 50 / (number of other rows), but at most 1.
            weight_of_another = _WEIGHT_OF_OTHERS / xp.maximum(total - own[number], _WEIGHT_OF_OTHERS)
            weights = flat.included * xp.where(is_own, 1, weight_of_another).astype(self.errors.dtype)
            return Widening.of(flat.variance, flat.errors, weights=weights)

        return over_leading_axis(of_leaf, numbers, at_once=1)

    def coverage(self, widening: Widening) -> Float[AnyArray, "*k"]:
        """The fraction of the rows in the intervals after the widening; NaN where there are none."""
        xp = namespace(self.errors)
        variance = jax.tree.map(lambda leaf: leaf[..., None], widening)(self.variance)
        # |y - m| <= z sqrt(v), with z the 95 % quantile of N(0, 1)
        is_inside = abs(self.errors) <= NormalDist().inv_cdf((1 + _LEVEL) / 2) * xp.sqrt(variance)
        total = lambda counted: xp.sum(counted, axis=-1, dtype=self.errors.dtype)
        return total(is_inside & self.included) / total(self.included)


@numpy_or_jit
def _by_leaf(
    results: tuple, number: Int[AnyArray, "m leaves"], is_there: Bool[AnyArray, "m leaves"], widen: bool
) -> Leaves:
    """The results of every leaf, [m, leaves], picked by its number from the list of all leaves."""
    optima, rmse, held_out = jax.tree.map(lambda leaf: leaf[number], results)
    rmse = namespace(rmse).where(is_there, rmse, np.nan)
    if not widen:
        return Leaves(optima, rmse, None, None)
    held_out = held_out._replace(included=held_out.included & is_there[..., None])
    if namespace(rmse) is np:  # without the padding, which the widenings would sort
        held_out = jax.tree.map(lambda leaf: leaf[..., : held_out.included.sum(-1).max()], held_out)
    widening = over_leading_axis(_HeldOut.widenings, held_out)
    return Leaves(optima, rmse, widening, held_out.coverage(widening))


def _train_mean(inputs, target, settings: presets.Settings, rows: TrainingRows, key) -> tuple:
    """The residuals of a network at the rows to train on and at the rows to stop by, padded as these are."""
    parts = rows.of(inputs, target)
    network = _trained_mean(parts, rows, key, settings)
    return tuple(errors_of(network, *part) for part in parts)


def _train_start(inputs, target, settings: presets.Settings, rows: TrainingRows, key, residuals) -> NormalNetwork:
    """A network of the mean, and one of the variance of the given residuals."""
    mean_key, variance_key = _random.split(key)
    mean = _trained_mean(rows.of(inputs, target), rows, mean_key, settings)
    options = {"activation": settings.variance_activation}
    residual_parts = rows.of(inputs, residuals)
    loss = residual_negative_log_likelihood
    return NormalNetwork((mean, _trained(loss, residual_parts, rows, variance_key, settings, **options)))


def _trained_mean(parts: tuple[tuple, tuple], rows: TrainingRows, key, settings: presets.Settings) -> FeedForward:
    """A network of the mean, by the program that trains the leaves' networks: every row has a variance there."""
    return _trained(weighted_squared_error, with_unit_variances(*parts), rows, key, settings)


def _trained(
    loss: Callable, parts: tuple[tuple, tuple], rows: TrainingRows, key, settings: presets.Settings, **options: Any
) -> FeedForward:
    """A new network, trained."""
    init_key, train_key = _random.split(key)
    network = new_network(parts[0][0], settings.hidden)("scalar", key=init_key, **options)
    return _trainer(rows, settings)(loss, network, *parts, key=train_key).params


def _train_leaf(
    inputs, target, settings: presets.Settings, rows: TrainingRows, key, start: NormalNetwork | None
) -> tuple[Optimum, Float[Array, ""], _HeldOut]:
    """The optimum of a leaf's networks, the root mean square of the residuals, and the held-out rows.

    The networks start from `start`, unless it is None.
    """
    parts, counts = rows.of(inputs, target), (rows.num_train, rows.num_validation)
    train = _trainer(rows, settings)
    if start is None:
        new_mean = new_network(inputs, settings.hidden)
        new_variance = partial(new_mean, activation=settings.variance_activation)
    else:
        new_mean, new_variance = (lambda _, key, network=network: network for network in start.networks)
        train = partial(_train_further, train, rows.num_validation)
    anew = not settings.calibrate
    optimum = alternate(parts, counts, new_mean, new_variance, train, key, _ROUNDS, anew=anew)
    return optimum, *_judged(optimum.params, parts, counts)


@numpy_or_jit
def _judged(network: NormalNetwork, parts: tuple[tuple, tuple], counts: tuple) -> tuple[Float[AnyArray, ""], _HeldOut]:
    """The root mean square of the residuals of all rows, and the predictions of the held-out rows."""
    moments = [at_rows(network, x) for x, _ in parts]
    errors = [y - mean for (_, y), (mean, _) in zip(parts, moments, strict=True)]
    xp = namespace(errors[0])
    included = [xp.arange(len(each)) < count for each, count in zip(errors, counts, strict=True)]
    total = sum(xp.sum(each**2, where=there) for each, there in zip(errors, included, strict=True))
    rmse = xp.sqrt(total / (counts[0] + counts[1]).astype(errors[0].dtype))
    return rmse, _HeldOut(moments[1][1], errors[1], included[1])


def _train_further(
    train: Callable[..., Optimum],
    count: Int[AnyArray, ""],
    loss: Callable,
    network: FeedForward,
    rows,
    held_out,
    *,
    key,
) -> Optimum:
    """Train, and keep the initial network unless the loss of held-out rows falls by more than its standard error."""
    optimum = train(loss, network, rows, held_out, key=key)
    return optimum._replace(params=_better(loss, network, optimum.params, held_out, count))


@numpy_or_jit
def _better(
    loss: Callable, old: FeedForward, new: FeedForward, held_out: tuple, count: Int[AnyArray, ""]
) -> FeedForward:
    """The new network, or the old one unless the gain is larger than its standard error.

    The gain is the mean difference of their losses of held-out rows.
    """
    before, after = (loss(network, held_out, None) for network in (old, new))
    xp = namespace(before)
    included = xp.arange(before.shape[0]) < count
    gain, std = (of(before - after, where=included) for of in (xp.mean, xp.std))
    # mean(g) > std(g) / sqrt(n), with g the difference of the two losses at each of n rows
    is_better = gain > std / xp.sqrt(count)
    return jax.tree.map(lambda new, old: xp.where(is_better, new, old), new, old)


@numpy_or_jit
def _taken(numbers: Int[AnyArray, " k"], *columns: AnyArray) -> tuple[AnyArray, ...]:
    """The rows of the columns with these numbers."""
    return tuple(column[numbers] for column in columns)


def _trainer(rows: TrainingRows, settings: presets.Settings) -> Callable[..., Optimum]:
    """The training of all these networks, without the padding of the rows."""
    return partial(trainer(settings), num_rows=(rows.num_train, rows.num_validation))
