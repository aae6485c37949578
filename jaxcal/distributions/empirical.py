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

# Those whose quantile is infinite where the table is too short for the level.
INFINITE_RULES = (*quantiles.CONFORMAL_RULES, "randomized")


def _shares_a_table(distribution: Any, *_: Any) -> bool:
    """Whether all rows have one table, which NumPy scores."""
    z = distribution.z
    return not isinstance(z, Tables) and z.ndim == distribution.loc.ndim == 1


class Empirical(Distribution):
    """Predictions loc + scale * Z, with Z uniform on a sorted table z: one of all rows, of each row or of each group.

    With a shared table the cdf and the score cost O(log L) a row, and no [n, L] array is ever made. A row with
    scale 0 is a point.

    With rule="randomized" every row has a tau of its own, and the mass 1 / (L + 1) on each value of its table,
    tau / (L + 1) on -inf and (1 - tau) / (L + 1) on +inf. Its cdf and quantiles are those of this distribution; mean,
    std, score and samples are those of the table, given that the value is finite (the score of the whole would be
    infinite).

    With `group` every row has the table of its group, whose values may have weights: Z is one of them with a
    probability that is proportional to its weight. A row takes O(log M) for M values of all groups.

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        z: [L] standardized values, in increasing order, or [n, L], a table for every row; with `group` the tables of
            all groups, made by `functional.tables.make`. Values may be infinite, and quantiles then are, too; mean,
            std, score and samples take the outermost finite values in their place.
        rule: how `icdf` reads the table, see `functional.quantiles.empirical_quantile`, and of groups
            `functional.tables.quantile`. Only "inverse_cdf" makes it the inverse of `cdf`; "conformal" and "symmetric",
            which is for tables symmetric about 0, are infinite, with a warning, where the table is too short for a
            guarantee. "conformal" rounds ranks away from the median: ceil((L + 1) p), below the median
            floor((L + 1) p). Their central intervals hold a new exchangeable value with probability at least the
            confidence level. Nothing else depends on these rules. "randomized", without groups, reads it by
            `functional.quantiles.randomized_quantile`.
        tau: [n], or one number for all rows, in [0, 1]; with rule="randomized" only. Drawn from the uniform
            distribution it makes every quantile of an exchangeable value exact in the mean.
        group: the number of each row's group [n], with tables of groups only.
        new_weight: the weight of each row [n] beside those of its group's table, for the rules "conformal" and
            "symmetric"; 1 where None.

    Raises:
        ValueError: if an argument is not finite or of the wrong shape, the rule is none of these, z does not increase,
            or is not symmetric with the rule "symmetric"; if tau comes without rule="randomized", or group without
            tables of groups, or the other way around.

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
        """With one table for all rows, and a rule that draws nothing."""
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
            given = "no tau" if tau is None else "a tau"
            raise ValueError(f"rule='randomized' and tau go together; got rule={rule!r} and {given}.")
        self.loc, self.scale = as_parameters(loc=loc, scale=scale)
        self.tau = None if tau is None else as_parameters(loc=self.loc, tau=tau)[1].astype(self.loc.dtype)
        self.z = z if isinstance(z, Tables) else _as_sorted(z, self.loc, rule)
        self.rule, self.group, self.new_weight = rule, group, new_weight
        _checks.check_not_negative("scale", self.scale)
        if self.tau is not None:
            check_share("tau", self.tau)

    @property
    def reach(self) -> Reach:
        """As far as the ranks of the table reach, with a rule whose quantiles are infinite beyond."""
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
        """The mean of the table, placed."""
        return self.loc + self.scale * self._moments[0]

    @property
    @partial(numpy_or_jit, when=_shares_a_table)
    def std(self) -> Float[JaxArray, "*n"]:
        """The std of the table (with the divisor L), scaled."""
        return self.scale * self._moments[1]

    @of_targets
    def cdf(self, y: Values) -> Float[JaxArray, "*n"]:
        """k / L for the k values of the table up to y, as far as rounding can tell; what rule="randomized" says.

        Then it is (k + tau (m + 1)) / (L + 1), with k values below y and m equal to it: uniform for an exchangeable y.
        Of weighted values it is the fraction of the weight up to y.
        """
        y = match(y, self.loc)
        if self._of_groups:
            return tables.cdf(*self._of_groups, standardize(reached(y, self.loc), self.loc, self.scale))
        if self.tau is None:
            return self._count(reached(y, self.loc)) / self._size
        # Half as far, so that a quantile, which is moved by the whole, lies beyond its value.
        upto, below = (self._count(rounded_outward(y, side, self.loc)) for side in (0.5, -0.5))
        return (below + self.tau * (upto - below + 1)) / (self._size + 1)

    @of_targets
    def log_prob(self, y: Values) -> Float[JaxArray, "*n"]:
        """-inf everywhere: a distribution of atoms has no density."""
        return namespace(self.loc).full_like(match(y, self.loc), -np.inf)

    @partial(of_targets, when=_shares_a_table)
    def crps(self, y: Values) -> Float[JaxArray, "*n"]:
        """The scale times the score of Z at (y - loc) / scale, `functional.scores.empirical_crps` or `tables.crps`."""
        xp, error, positive = namespace(self.loc), match(y, self.loc) - self.loc, self.scale > 0
        u = error / xp.where(positive, self.scale, 1)
        if self._of_groups:
            score = tables.crps(*self._of_groups, u)
        else:
            score = self._read(lambda z, u: scores.empirical_crps(u, linalg.finite_part(z)), u)
        return xp.where(positive, self.scale * score, abs(error))

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * z, z drawn from the table, by weight where there are weights."""
        _checks.check_key(key)
        rows = self.loc.shape
        if self._of_groups:
            of_all, group = self._of_groups
            finite = eqx.tree_at(lambda tables: tables.values, of_all, linalg.finite_part(of_all.values))
            icdf = lambda p: place(tables.quantile(finite, group, p, "inverse_cdf"), self.loc, self.scale)
            return sample_by_inversion(icdf, key, shape, rows, self.loc.dtype)
        drawn = jax.random.randint(key, (math.prod(shape), *rows), 0, self._size)
        z = jax.vmap(lambda index: self._read(lambda z, k: linalg.finite_part(z)[k], index))(drawn)
        return place(z.reshape(shape + rows), self.loc, self.scale)

    @numpy_or_jit(when=numpy_knows)
    def quantile(self, p: Float[JaxArray, "*n"]) -> Float[JaxArray, "*n"]:
        """As the rule reads the table."""
        if self._of_groups:
            z = tables.quantile(*self._of_groups, p, self.rule, self.new_weight)
        elif self.tau is None:
            z = self._read(lambda z, p: quantiles.entries(z, p, self.rule), p)
        else:
            z = self._read(quantiles.randomized_quantile, p, self.tau)
        return _placed(z, self.loc, self.scale)

    def _rounded_quantiles(self, levels: Float[JaxArray, "..."], side: Values | None = None) -> Float[JaxArray, "..."]:
        """Of one table NumPy finds the entries. They are placed by a program of the rows, whatever the table's length.

        XLA rounds loc + scale z once, NumPy twice: a traced fit has the same intervals to the bit.
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
        """The tables of all groups and the number of each row's; nothing without groups."""
        return (self.z, self.group) if isinstance(self.z, Tables) and self.group is not None else ()

    @property
    def _size(self) -> int:
        """L, without groups."""
        return cast("Array", self.z).shape[-1]

    @property
    def _shared(self) -> Mapping[str, int]:
        return {"z": 1} if self._is_shared else {}

    @property
    def _is_shared(self) -> bool:
        """Whether the rows share a table, or those of groups. Leading axes, of runs, are common to rows and table."""
        return isinstance(self.z, Tables) or self.z.ndim <= self.loc.ndim

    def _read(self, function: Callable[..., JaxArray], *values: JaxArray) -> JaxArray:
        """The function of a table and of what is looked up in it, each [n], for the table of each row."""
        if is_working():  # with a table of all rows
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
        """The mean and the std of each row's table, [n]; of a shared one with an axis of length 1 for the rows."""
        if self._of_groups:
            of_all, group = self._of_groups
            return of_all.mean[group], of_all.std[group]
        # Infinite values become the outermost finite ones.
        of_tables = linalg.finite_part if is_working() else jnp.vectorize(linalg.finite_part, signature="(l)->(l)")
        values = of_tables(self.z)
        average = lambda values: values.mean(-1, keepdims=self._is_shared)
        deviations = values - values.mean(-1, keepdims=True)
        unit = linalg.scale_of(deviations)
        return average(values), unit * linalg.sqrt(average((deviations / unit) ** 2))


class _Placing(Rows):
    """Where rows place values."""

    loc: Float[JaxArray, "*n"]
    scale: Float[JaxArray, "*n"]

    @property
    def _num_filled(self) -> int | None:
        return len(self.loc) if self.loc.ndim == 1 else None


@by_buckets
@_programs.jit
def _placed_outward(rows: _Placing, z: Float[Array, "..."], side: Values) -> Float[Array, "..."]:
    """Values of one level, or of k levels, placed in every row and rounded to a side."""
    loc, scale = (each[:, None] if z.ndim else each for each in (rows.loc, rows.scale))
    z = jnp.broadcast_to(z, jnp.broadcast_shapes(loc.shape, z.shape))
    return rounded_outward(_placed(z, loc, scale), side, rows.loc)


def _placed(z: Float[JaxArray, "..."], loc: Float[JaxArray, "..."], scale: Float[JaxArray, "..."]) -> JaxArray:
    """Values placed in rows. An infinite quantile is a refusal, and stays one where the scale is 0."""
    xp = namespace(z, loc)
    infinite = xp.isinf(z)
    return xp.where(infinite, z, place(xp.where(infinite, 0, z), loc, scale))


def _reach_of_groups(
    of_all: Tables, group: Int[JaxArray, "*n"], new_weight: Float[JaxArray, "*n"] | None, central: bool
) -> Reach:
    """As far as the weights of each row's group reach beside its own; a symmetric table holds each value twice."""
    sides = 1 + central
    start, end = of_all.start[group], of_all.start[group + 1]
    total = of_all.upto[end - 1] / sides
    share = total / (total + (1 if new_weight is None else new_weight))
    highest = (1 + share) / 2 if central else share
    return Reach(1 - highest, highest, "the quantile is infinite", (end - start) // sides)


def _as_sorted(z: Values, loc: Float[Array, "*n"], rule: str) -> Float[Array, "*n_l"]:
    """Checked tables in the dtype of the rows: a vector for all rows, or a matrix with a table for each."""
    table = as_table("z", z) if np.ndim(z) < 2 else as_table("z", z, rows=loc.shape[0])
    table = as_parameter(table, loc.dtype)
    check_increasing("z", table, strictly=False)
    if rule == "symmetric":
        _check_symmetric("z", table)
    return table


def _check_symmetric(name: str, values: Array) -> None:
    """Raise ValueError unless there are 2 L values along the last axis, known ones symmetric about 0."""
    if values.shape[-1] % 2:
        raise ValueError(f"{name} must hold an even number of values, symmetric about 0; got {values.shape[-1]}.")
    if _checks.is_traced(values):
        return
    known = np.asarray(values)
    if (known != -known[..., ::-1]).any():
        raise ValueError(f"{name} must be symmetric about 0; got values from {known.min():g} to {known.max():g}.")
