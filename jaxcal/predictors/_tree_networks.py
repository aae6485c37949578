"""The networks of USNRT: those whose residuals are tested, and those of means and variances in the leaves."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from jaxcal import _programs
from jaxcal.networks import NormalNetwork, Widening, presets
from jaxcal.networks.modules import FeedForward
from jaxcal.networks.normal import alternate, residual_negative_log_likelihood
from jaxcal.networks.training import new_network, squared_error, trainer
from jaxcal.optimize import Optimum, Span, num_train, over_runs, reported_runs
from jaxcal.predictors._growing import Problem

_ROUNDS = 2
# What the held-out rows of all other leaves together count, where those of a leaf count one each.
_WEIGHT_OF_OTHERS = 50.0
# Of the intervals whose coverage of held-out rows is told.
_LEVEL = 0.9


class Lists(NamedTuple):
    """The rows of several trainings, to train on and to stop by: padded lists of row numbers, and how long they are."""

    train: Int[Array, "*k m"]
    num_train: Int[Array, "*k"]
    validation: Int[Array, "*k v"]
    num_validation: Int[Array, "*k"]

    @classmethod
    def padded(
        cls, train: Sequence[np.ndarray], validation: Sequence[np.ndarray], slots: int, most: tuple[int, int]
    ) -> "Lists":
        """As many lists as `slots`, the last of them without rows, as long as `most`, or a quarter, ... of it.

        So a few compiled programs are enough for parts of all sizes.
        """
        padded = []
        for part, length in zip((train, validation), most, strict=True):
            counts = [len(numbers) for numbers in part] + [0] * (slots - len(part))
            while -(-length // 4) >= max(counts):
                length = -(-length // 4)
            lists = np.zeros((slots, length), np.int32)
            for padded_numbers, numbers in zip(lists, part, strict=False):
                padded_numbers[: len(numbers)] = numbers
            padded += [jax.device_put(lists), jax.device_put(np.array(counts, np.int32))]
        return cls(*padded)

    @classmethod
    def divided(
        cls,
        parts: Sequence[np.ndarray],
        slots: int,
        fraction: float,
        num_rows: int,
        rng: np.random.Generator,
        held_out: Bool[np.ndarray, " n"] | None = None,
    ) -> "Lists":
        """The rows of every part in a random order, the first ones to train on and the others to stop by.

        These are those that are held out, where some are, and a random fraction of a part that has none of them, or
        only such.
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
        return cls.padded(train, validation, slots, (most, num_rows - most))


class Leaves(NamedTuple):
    """What is known of all leaves, [m, leaves]: their networks, root mean square residuals and widenings.

    And how much of their held-out rows lies in intervals of 90 %. The last two are None where no rows are held out.
    """

    optima: Optimum
    rmse: Float[Array, "m leaves"]
    widening: Widening | None
    coverage: Float[Array, "m leaves"] | None


class Draws(NamedTuple):
    """What several trainings draw at random: a seed for the order of the rows, and a key for every network."""

    seed: Int[Array, ""]
    keys: PRNGKeyArray

    @property
    def rng(self) -> np.random.Generator:
        """Of the order of the rows."""
        return np.random.default_rng(int(self.seed))

    @classmethod
    def of(cls, key: PRNGKeyArray, number: int) -> "Draws":
        """Those of so many networks."""
        list_key, train_key = jax.random.split(key)
        return cls(jax.random.bits(list_key), jax.random.split(train_key, number))


@partial(jax.jit, static_argnames="numbers")
def draws(key: PRNGKeyArray, numbers: tuple[int, ...]) -> tuple[PRNGKeyArray, list[Draws]]:
    """A key, and the draws of so many networks each, by one program."""
    own, *keys = jax.random.split(key, 1 + len(numbers))
    return own, [Draws.of(key, number) for key, number in zip(keys, numbers, strict=True)]


_node_draws = jax.jit(Draws.of, static_argnums=1)


def held_out_rows(problem: Problem, settings: presets.Settings, draws: Draws) -> Bool[np.ndarray, " n"] | None:
    """The rows that no member's leaves are trained on; None where nothing is widened by them."""
    if not settings.calibrate:
        return None
    number = problem.target.shape[0]
    order = draws.rng.permutation(number)
    return np.isin(np.arange(number), order[num_train(number, settings.validation_fraction) :])


def out_of_fold_residuals(
    problem: Problem, settings: presets.Settings, num_folds: int, num_members: int, draws: Draws
) -> Float[np.ndarray, "m n"]:
    """Every row's residual of a network that was trained on the other folds, for every member; it stops by this one."""
    rng = draws.rng
    number = problem.target.shape[0]
    folds = [fold for _ in range(num_members) for fold in np.array_split(rng.permutation(number), num_folds)]
    others = [np.setdiff1d(np.arange(number), fold) for fold in folds]
    most = number - number // num_folds, -(-number // num_folds)
    lists = Lists.padded(others, folds, len(folds), most)
    means = partial(_train_means, problem.inputs, problem.target, lists, draws.keys, settings)
    _, found = reported_runs(means, "usnrt.fit: networks without a fold", len(folds))
    residuals = np.zeros((num_members, number), problem.target.dtype)
    for k, (fold, of_fold) in enumerate(zip(folds, np.asarray(found), strict=True)):
        residuals[k // num_folds, fold] = of_fold[: len(fold)]
    return residuals


def node_residuals(
    problem: Problem, settings: presets.Settings, slots: int, rows: list[np.ndarray], key: PRNGKeyArray
) -> list[np.ndarray]:
    """The residuals of a network trained on the rows of every node (section IV-B), most of them its training rows."""
    draws = _node_draws(key, slots)
    lists = Lists.divided(rows, slots, settings.validation_fraction, problem.target.shape[0], draws.rng)
    means = partial(_train_means, problem.inputs, problem.target, lists, draws.keys, settings)
    parts = reported_runs(means, "usnrt.fit: networks of nodes", len(rows))
    parts, lists = jax.tree.map(np.asarray, (parts, lists))
    whole = np.zeros(problem.target.shape, problem.target.dtype)
    found = []
    for k, node_rows in enumerate(rows):
        # Nodes of several members may share rows; each is read before the next one is written.
        for part, numbers, count in zip(
            parts, (lists.train, lists.validation), (lists.num_train, lists.num_validation), strict=True
        ):
            whole[numbers[k, : count[k]]] = part[k, : count[k]]
        found.append(whole[node_rows])
    return found


def train_on_all_rows(
    problem: Problem,
    settings: presets.Settings,
    held_out: Bool[np.ndarray, " n"],
    residuals: Float[np.ndarray, "m n"],
    draws: Draws,
) -> NormalNetwork:
    """Every member's networks of mean and variance of all rows, [m] of everything: the leaves' start from these.

    The variance learns from residuals out of fold.
    """
    number, num_members = problem.target.shape[0], len(residuals)
    every = [np.arange(number)] * num_members
    lists = Lists.divided(every, num_members, settings.validation_fraction, number, draws.rng, held_out)
    start = partial(_train_start, problem.inputs, problem.target, lists, draws.keys, settings, residuals)
    return reported_runs(start, "usnrt.fit: networks of all rows", num_members)


def train_leaves(
    problem: Problem,
    settings: presets.Settings,
    leaves: list[list[np.ndarray]],
    slots: int,
    held_out: Bool[np.ndarray, " n"] | None,
    start: NormalNetwork | None,
    draws: Draws,
) -> Leaves:
    """The networks of all leaves, and what is known of them.

    Args:
        problem: the rows.
        settings: of the training.
        leaves: the rows of every leaf of every member.
        slots: how many leaves there can be at most.
        held_out: which rows no leaf is trained on.
        start: the networks [m] that those of a member's leaves start from; new ones where None.
        draws: of the trainings, for so many leaves.
    """
    flat = [rows for of_tree in leaves for rows in of_tree]
    counts = np.array([len(of_tree) for of_tree in leaves])
    lists = Lists.divided(flat, slots, settings.validation_fraction, problem.target.shape[0], draws.rng, held_out)
    member = np.pad(np.repeat(np.arange(len(leaves)), counts), (0, slots - len(flat)))
    variances = partial(_train_variances, problem.inputs, problem.target, lists, draws.keys, settings, start, member)
    found = reported_runs(variances, "usnrt.fit: leaves", len(flat))
    # Trees with fewer leaves than others are filled up.
    place = np.arange(counts.max())
    is_there = place < counts[:, None]
    number = (np.cumsum(counts) - counts)[:, None] + np.where(is_there, place, 0)
    return _by_leaf(found, jnp.asarray(number), jnp.asarray(is_there), settings.calibrate)


class _HeldOut(NamedTuple):
    """The rows of leaves that their networks were not trained on, padded, and which of them there are."""

    variance: Float[Array, "*k v"]
    errors: Float[Array, "*k v"]
    included: Bool[Array, "*k v"]

    def widenings(self) -> Widening:
        """Those of every leaf of one tree [leaves], by its own rows and, with little weight, by those of the others."""
        numbers = jnp.arange(self.errors.shape[0])
        total, own = (jnp.sum(self.included, axis=axis, dtype=self.errors.dtype) for axis in (None, 1))
        flat = jax.tree.map(jnp.ravel, self)

        def of_leaf(number):
            is_own = jnp.repeat(numbers == number, self.errors.shape[1])
            weight_of_another = _WEIGHT_OF_OTHERS / jnp.maximum(total - own[number], _WEIGHT_OF_OTHERS)
            weights = flat.included * jnp.where(is_own, 1.0, weight_of_another)
            return Widening.of(flat.variance, flat.errors, weights=weights)

        return lax.map(of_leaf, numbers)

    def coverage(self, widening: Widening) -> Float[Array, ""]:
        """How much of them lies in the intervals after the widening; NaN where there are none."""
        reach = NormalDist().inv_cdf((1 + _LEVEL) / 2) * jnp.sqrt(widening(self.variance))
        return jnp.mean(jnp.abs(self.errors) <= reach, where=self.included)


@_programs.jit
def _by_leaf(found: tuple, number: Int[Array, "m leaves"], is_there: Bool[Array, "m leaves"], widen: bool) -> Leaves:
    """What every leaf has, [m, leaves]: of those there are, the one of its number."""
    optima, rmse, held_out = jax.tree.map(lambda leaf: leaf[number] if eqx.is_array(leaf) else leaf, found)
    rmse = jnp.where(is_there, rmse, jnp.nan)
    if not widen:
        return Leaves(optima, rmse, None, None)
    held_out = held_out._replace(included=held_out.included & is_there[..., None])
    widening = jax.vmap(_HeldOut.widenings)(held_out)
    return Leaves(optima, rmse, widening, jax.vmap(jax.vmap(_HeldOut.coverage))(held_out, widening))


@_programs.jit
def _train_means(inputs, target, lists: Lists, keys, settings: presets.Settings, span: Span | None):
    """The residuals of a network for every list, of the rows to train on and of those to stop by, padded as it is."""

    def one(lists: Lists, key):
        network = _trained(squared_error, inputs, target, lists, key, settings)
        return tuple(target[part] - jax.vmap(network)(inputs[part]) for part in (lists.train, lists.validation))

    return over_runs(one, span=span)(lists, keys)


@_programs.jit
def _train_start(
    inputs, target, lists: Lists, keys, settings: presets.Settings, residuals, span: Span | None
) -> NormalNetwork:
    """A network of the mean for every list, and one of the variance of these residuals."""

    def one(lists: Lists, key, residuals):
        keys = [jax.random.fold_in(key, number) for number in range(2)]
        mean = _trained(squared_error, inputs, target, lists, keys[0], settings)
        options = {"activation": settings.variance_activation}
        loss = residual_negative_log_likelihood
        return NormalNetwork((mean, _trained(loss, inputs, residuals, lists, keys[1], settings, **options)))

    return over_runs(one, span=span)(lists, keys, residuals)


def _trained(loss: Callable, inputs, targets, lists: Lists, key, settings: presets.Settings, **options) -> FeedForward:
    """A new network, trained on the rows of a list."""
    init_key, train_key = jax.random.split(key)
    network = new_network(inputs, settings.hidden)("scalar", key=init_key, **options)
    train, validation = ((inputs[part], targets[part]) for part in (lists.train, lists.validation))
    return _trainer(lists, settings)(loss, network, train, validation, key=train_key).params


@_programs.jit
def _train_variances(
    inputs,
    target,
    lists: Lists,
    keys,
    settings: presets.Settings,
    start: NormalNetwork | None,
    member: Int[ArrayLike, " k"],
    span: Span | None,
) -> tuple[Optimum, Float[Array, " k"], _HeldOut]:
    """The optimum of networks for every list, the root mean square of the residuals, and the held-out rows.

    Those of a list start from the networks of its member, where there are some.
    """
    start = jax.tree.map(lambda leaf: leaf[member] if eqx.is_array(leaf) else leaf, start)

    def one(lists: Lists, key, start: NormalNetwork | None):
        train, validation = ((inputs[part], target[part]) for part in (lists.train, lists.validation))
        if start is None:
            new_mean = new_network(inputs, settings.hidden)
            new_variance = partial(new_mean, activation=settings.variance_activation)
        else:
            new_mean, new_variance = (lambda _, key, network=network: network for network in start.networks)
        counts = lists.num_train, lists.num_validation
        train_one = _trainer(lists, settings)
        if start is not None:
            train_one = _if_clearly_better(train_one, counts[1])
        anew = not settings.calibrate
        optimum = alternate((train, validation), counts, new_mean, new_variance, train_one, key, _ROUNDS, anew=anew)
        moments = [jax.vmap(optimum.params)(x) for x, _ in (train, validation)]
        errors = [y - mean for (_, y), (mean, _) in zip((train, validation), moments, strict=True)]
        included = [jnp.arange(e.shape[0]) < count for e, count in zip(errors, counts, strict=True)]
        total = sum(jnp.sum(e**2, where=there) for e, there in zip(errors, included, strict=True))
        held_out = _HeldOut(moments[1][1], errors[1], included[1])
        return optimum, jnp.sqrt(total / (counts[0] + counts[1])), held_out

    return over_runs(one, span=span)(lists, keys, start)


def _if_clearly_better(train: Callable[..., Optimum], count: Int[Array, ""]) -> Callable[..., Optimum]:
    """A training that gives the initial network unless the loss of held-out rows is lower by its standard error."""

    def train_further(loss, network, rows, held_out, *, key):
        optimum = train(loss, network, rows, held_out, key=key)
        before, after = (loss(candidate, held_out, None) for candidate in (network, optimum.params))
        included = jnp.arange(before.shape[0]) < count
        gain, std = (of(before - after, where=included) for of in (jnp.mean, jnp.std))
        is_better = gain > std / jnp.sqrt(count)
        choose = lambda new, old: jnp.where(is_better, new, old) if eqx.is_array(new) else new
        return optimum._replace(params=jax.tree.map(choose, optimum.params, network))

    return train_further


def _trainer(lists: Lists, settings: presets.Settings):
    """How all these networks are trained, on the rows that there are."""
    return partial(trainer(settings), num_rows=(lists.num_train, lists.num_validation))
