"""Distributions of a table of values that many rows share: `Empirical`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import JaxArray, is_on_host, is_working, namespace, numpy_or_jit
from jaxcal.distributions._base import (
    Distribution,
    as_parameter,
    as_parameters,
    as_table,
    check_group,
    check_increasing,
    check_share,
    match,
    numpy_knows,
    of_targets,
    place,
    reached,
    rounded_outward,
    sample_by_inversion,
    standardize,
)
from jaxcal.distributions._reach import EVERYWHERE, Reach
from jaxcal.distributions._rows import Rows, Values, by_buckets
from jaxcal.functional import linalg, quantiles, scores, tables
from jaxcal.functional.tables import Tables

# The rules with infinite quantiles where the table is too short for the level.
INFINITE_RULES = (*quantiles.CONFORMAL_RULES, "randomized")


def _shares_a_table(distribution: Any, *_: Any) -> bool:
    """Whether all rows have one table, so that NumPy computes the score."""
    z = distribution.z
    return not isinstance(z, Tables) and z.ndim == distribution.loc.ndim == 1


class Empirical(Distribution):
    """Predictions loc + scale * Z, with Z uniform on a sorted table z.

    All rows share one table, or every row or every group of rows has its own. With a shared table the cdf and the score
    cost O(log L) per row, and no [n, L] array is made. A row with scale 0 is a point.

    With rule="randomized" every row has its own tau. Each value of its table has the mass 1 / (L + 1). The mass at -inf
    is tau / (L + 1), and the mass at +inf is (1 - tau) / (L + 1). The cdf and the quantiles belong to this
    distribution. Mean, std, score and samples are conditional on a finite value, because the score of the whole
    distribution would be infinite.

    With `group` every row has the table of its group. The values of a table may have weights: the probability of a
    value is then proportional to its weight. A row costs O(log M) for M values of all groups.

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        z: [L] standardized values, in increasing order, or [n, L], a table for every row. If there is a `group`, z are
            the tables of all groups, made by `functional.tables.make`. If values are infinite, quantiles can be
            infinite, too. Mean, std, score and samples replace infinite values by the outermost finite values.
        rule: how `icdf` reads the table. `functional.quantiles.empirical_quantile` describes the rules, and
            `functional.tables.quantile` the rules for groups.

            - "inverse_cdf": `icdf` is the inverse of `cdf`. The other rules do not have this property.
            - "conformal": ranks are rounded away from the median. They are ceil((L + 1) p), and floor((L + 1) p) below
              the median.
            - "symmetric": for tables that are symmetric about 0.
            - "randomized": `functional.quantiles.randomized_quantile` reads the table. It is not for groups.

            With "conformal" and "symmetric", central intervals hold a new exchangeable value with probability at least
            the confidence level. Where the table is too short for this guarantee, quantiles are infinite, with a
            warning. These two rules affect nothing else.
        tau: [n], or one number for all rows, in [0, 1], only with rule="randomized". If tau is drawn from the uniform
            distribution, every quantile of an exchangeable value is exact on average.
        group: the number of each row's group [n], only with tables of groups.
        new_weight: the weight of each row [n], on the scale of the weights of its group's table, for the rules
            "conformal" and "symmetric". None for the weight 1.

    Raises:
        ValueError: in each of these cases:

            - an argument is not finite or has the wrong shape;
            - the rule is unknown;
            - z does not increase, or is not symmetric with the rule "symmetric";
            - tau comes without rule="randomized", or the rule without tau;
            - group comes without tables of groups, or such tables without group.

    Example:
        >>> distribution = Empirical(jnp.array([0.0, 10.0]), 2.0, jnp.array([-1.0, 0.0, 1.0]))
        >>> print(distribution.icdf(0.9))
        [ 2. 12.]
        >>> both = tables.make(jnp.array([-1.0, 1.0, -5.0, 5.0]), jnp.array([0, 0, 1, 1]), 2)
        >>> distribution = Empirical(jnp.zeros(2), 1.0, both, group=jnp.array([0, 1]))
        >>> print(distribution.icdf(0.9), distribution.std)
        [1. 5.] [1. 5.]
    """

    has_density = is_continuous = False

    @property
    def _in_numpy(self) -> bool:
        """NumPy needs one table for all rows, and a rule without random numbers."""
        return self.tau is None and _shares_a_table(self)

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    z: Float[Array, "*n_l"] | Tables
    tau: Float[Array, "*n"] | None
    group: Int[Array, "*n"] | None
    new_weight: Float[Array, "*n"] | None
    rule: str = eqx.field(static=True)

    def __init__(
        self,
        loc: Values,
        scale: Values,
        z: Values | Tables,
        rule: str = "inverse_cdf",
        tau: Values | None = None,
        *,
        group: Int[Array, "*n"] | None = None,
        new_weight: Float[Array, "*n"] | None = None,
    ):
        check_group(z, Tables, group, new_weight)
        _checks.check_choice("rule", rule, quantiles.RULES if group is not None else (*quantiles.RULES, "randomized"))
        if (rule == "randomized") != (tau is not None):
            state = "no tau" if tau is None else "a tau"
            raise ValueError(f"rule='randomized' and tau go together; got rule={rule!r} and {state}.")
        self.loc, self.scale = as_parameters(loc=loc, scale=scale)
        self.tau = None if tau is None else as_parameters(loc=self.loc, tau=tau)[1].astype(self.loc.dtype)
        self.z = z if isinstance(z, Tables) else _as_sorted(z, self.loc, rule)
        self.rule, self.group, self.new_weight = rule, group, new_weight
        _checks.check_not_negative("scale", self.scale)
        if self.tau is not None:
            check_share("tau", self.tau)

    @property
    def reach(self) -> Reach:
        """The levels that the ranks of the table reach; all levels if the rule has finite quantiles everywhere."""
        central = self.rule == "symmetric"
        if self.rule not in INFINITE_RULES:
            return EVERYWHERE
        if self._of_groups:
            return _reach_of_groups(*self._of_groups, self.new_weight, central)
        where = " in some rows" if self.rule == "randomized" else ""
        return Reach.of_rows(self._size // (1 + central), f"the quantile is infinite{where}", central=central)

    @property
    @partial(numpy_or_jit, when=_shares_a_table)
    def mean(self) -> Float[JaxArray, "*n"]:
        """loc + scale * m, with m the mean of the table."""
        return self.loc + self.scale * self._moments[0]

    @property
    @partial(numpy_or_jit, when=_shares_a_table)
    def std(self) -> Float[JaxArray, "*n"]:
        """scale * s, with s the std of the table (with the divisor L)."""
        return self.scale * self._moments[1]

    @of_targets
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """k / L for the k values of the table that are at most y, up to rounding.

        With weights it is the fraction of the weight up to y. With rule="randomized" it is
        (k + tau (m + 1)) / (L + 1), where k values lie below y and m values equal y. This is uniform for an
        exchangeable y.
        """
        y = match(y, self.loc)
        if self._of_groups:
            return tables.cdf(*self._of_groups, standardize(reached(y, self.loc), self.loc, self.scale))
        if self.tau is None:
            return self._count(reached(y, self.loc)) / self._size
        # y moves by half the distance that a quantile moves, so that a quantile lies beyond its value of the table.
        upto, below = (self._count(rounded_outward(y, side, self.loc)) for side in (0.5, -0.5))
        return (below + self.tau * (upto - below + 1)) / (self._size + 1)

    @of_targets
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """-inf everywhere, because a distribution of atoms has no density."""
        return namespace(self.loc).full_like(match(y, self.loc), -np.inf)

    @partial(of_targets, when=_shares_a_table)
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The scale times the score of Z at (y - loc) / scale.

        The score is `functional.scores.empirical_crps`, or `functional.tables.crps` with groups.
        """
        xp, error, positive = namespace(self.loc), match(y, self.loc) - self.loc, self.scale > 0
        u = error / xp.where(positive, self.scale, 1)
        if self._of_groups:
            score = tables.crps(*self._of_groups, u)
        else:
            score = self._read(lambda z, u: scores.empirical_crps(u, linalg.finite_part(z)), u)
        return xp.where(positive, self.scale * score, abs(error))

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * z, with z drawn from the table, in proportion to the weights if there are any."""
        _checks.check_key(key)
        rows = self.loc.shape
        if self._of_groups:
            group_tables, group = self._of_groups
            finite = eqx.tree_at(lambda tables: tables.values, group_tables, linalg.finite_part(group_tables.values))
            icdf = lambda p: place(tables.quantile(finite, group, p, "inverse_cdf"), self.loc, self.scale)
            return sample_by_inversion(icdf, key, shape, rows, self.loc.dtype)
        drawn = jax.random.randint(key, (math.prod(shape), *rows), 0, self._size)
        z = jax.vmap(lambda index: self._read(lambda z, k: linalg.finite_part(z)[k], index))(drawn)
        return place(z.reshape(shape + rows), self.loc, self.scale)

    @numpy_or_jit(when=numpy_knows)
    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """loc + scale * z, with z read from the table by the rule."""
        if self._of_groups:
            z = tables.quantile(*self._of_groups, p, self.rule, self.new_weight)
        elif self.tau is None:
            z = self._read(lambda z, p: quantiles.entries(z, p, self.rule), p)
        else:
            z = self._read(quantiles.randomized_quantile, p, self.tau)
        return _placed(z, self.loc, self.scale)

    def _rounded_quantiles(self, levels: Float[JaxArray, "..."], side: Values | None = None) -> Float[JaxArray, "..."]:
        """The rounded quantiles: NumPy finds the entries of one table, and a program places them in the rows.

        So the program does not depend on the table's length. XLA rounds loc + scale z once, and NumPy rounds it twice.
        By the program a traced fit has the same intervals, to the bit.
        """
        if is_working() or not (self._in_numpy and is_on_host(self, levels) and _programs.is_at_top()):
            return super()._rounded_quantiles(levels, side)
        z = quantiles.entries(cast("Array", self.z), levels, self.rule)
        side = self._sides(levels) if side is None else side
        return _placed_outward(_Placing(self.loc, self.scale), z, side)

    @property
    def _mirrors_levels(self) -> bool:
        return self.rule in quantiles.CONFORMAL_RULES

    def _sides(self, levels: Float[JaxArray, "..."]) -> JaxArray:
        return namespace(levels).zeros_like(levels) if self.rule == "inverse_cdf" else super()._sides(levels)

    @property
    def _locations(self) -> tuple[Float[JaxArray, "*n"], ...]:
        return (self.loc,)

    @property
    def _of_groups(self) -> tuple[Tables, Int[JaxArray, "*n"]] | tuple[()]:
        """The tables of all groups and the number of each row's group; empty without groups."""
        return (self.z, self.group) if isinstance(self.z, Tables) and self.group is not None else ()

    @property
    def _size(self) -> int:
        """The length L of a table; only without groups."""
        return cast("Array", self.z).shape[-1]

    @property
    def _shared(self) -> Mapping[str, int]:
        return {"z": 1} if self._is_shared else {}

    @property
    def _is_shared(self) -> bool:
        """Whether the rows share one table, or the tables of groups.

        Rows and table have the leading axes of runs in common.
        """
        return isinstance(self.z, Tables) or self.z.ndim <= self.loc.ndim

    def _read(self, function: Callable[..., JaxArray], *values: JaxArray) -> JaxArray:
        """Apply a function of a table and of values [n] to the table and the values of each row."""
        if is_working():  # NumPy has one table for all rows
            return function(self.z, *values)
        row = "(n)" if self._is_shared else "()"
        signature = f"(l){f',{row}' * len(values)}->{row}"
        return jnp.vectorize(function, signature=signature)(self.z, *values)

    def _count(self, y: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """How many values of each row's table are at most y."""
        u = standardize(y, self.loc, self.scale)
        return self._read(lambda z, u: namespace(z, u).searchsorted(z, u, side="right"), u).astype(u.dtype)

    @property
    def _moments(self) -> tuple[Float[JaxArray, "..."], Float[JaxArray, "..."]]:
        """The mean and the std of each row's table, [n]. For a shared table the axis of rows has length 1."""
        if self._of_groups:
            group_tables, group = self._of_groups
            return group_tables.mean[group], group_tables.std[group]
        # Infinite values become the outermost finite values.
        finite_part = linalg.finite_part if is_working() else jnp.vectorize(linalg.finite_part, signature="(l)->(l)")
        values = finite_part(self.z)
        average = lambda values: values.mean(-1, keepdims=self._is_shared)
        deviations = values - values.mean(-1, keepdims=True)
        unit = linalg.scale_of(deviations)
        # std = u sqrt(mean((d / u)^2)): a square in this unit neither overflows nor underflows.
        return average(values), unit * linalg.sqrt(average((deviations / unit) ** 2))


class _Placing(Rows):
    """The location and the scale of rows."""

    loc: Float[JaxArray, "*n"]
    scale: Float[JaxArray, "*n"]

    @property
    def _num_filled(self) -> int | None:
        return len(self.loc) if self.loc.ndim == 1 else None


@by_buckets
@_programs.jit
def _placed_outward(rows: _Placing, z: Float[Array, "..."], side: Values) -> Float[Array, "..."]:
    """loc + scale * z for the values z of one level, or of k levels, rounded to a side."""
    loc, scale = (each[:, None] if z.ndim else each for each in (rows.loc, rows.scale))
    z = jnp.broadcast_to(z, jnp.broadcast_shapes(loc.shape, z.shape))
    return rounded_outward(_placed(z, loc, scale), side, rows.loc)


def _placed(z: Float[JaxArray, "..."], loc: Float[JaxArray, "..."], scale: Float[JaxArray, "..."]) -> JaxArray:
    """loc + scale * z. An infinite z means that there is no guarantee, and stays infinite if the scale is 0."""
    xp = namespace(z, loc)
    infinite = xp.isinf(z)
    return xp.where(infinite, z, place(xp.where(infinite, 0, z), loc, scale))


def _reach_of_groups(
    group_tables: Tables, group: Int[JaxArray, "*n"], new_weight: Float[JaxArray, "*n"] | None, central: bool
) -> Reach:
    """The levels that the weights of each row's group reach. A symmetric table holds each value twice."""
    sides = 1 + central
    start, end = group_tables.start[group], group_tables.start[group + 1]
    total = group_tables.upto[end - 1] / sides
    # W / (W + w), with the weight W of the group and the weight w of the new row.
    share = total / (total + (1 if new_weight is None else new_weight))
    highest = (1 + share) / 2 if central else share
    return Reach(1 - highest, highest, "the quantile is infinite", (end - start) // sides, central)


def _as_sorted(z: Values, loc: Float[Array, "*n"], rule: str) -> Float[Array, "*n_l"]:
    """Checked tables in the dtype of the rows: a vector for all rows, or a matrix with a table for each row."""
    table = as_table("z", z) if np.ndim(z) < 2 else as_table("z", z, rows=loc.shape[0])
    table = as_parameter(table, loc.dtype)
    check_increasing("z", table, strictly=False)
    if rule == "symmetric":
        _check_symmetric("z", table)
    return table


def _check_symmetric(name: str, values: Array) -> None:
    """Raise ValueError unless the last axis has 2 L values, and known values are symmetric about 0."""
    if values.shape[-1] % 2:
        raise ValueError(f"{name} must hold an even number of values, symmetric about 0; got {values.shape[-1]}.")
    if _checks.is_traced(values):
        return
    known = np.asarray(values)
    if (known != -known[..., ::-1]).any():
        raise ValueError(f"{name} must be symmetric about 0; got values from {known.min():g} to {known.max():g}.")
