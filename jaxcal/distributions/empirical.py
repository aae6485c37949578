"""Distributions of a table of values that many rows share: `Empirical`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import math
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import (
    Distribution,
    as_parameter,
    as_rows,
    as_table,
    check_increasing,
    check_not_negative,
    check_share,
    match,
    of_targets,
    outer_levels,
    place,
    reached,
    rounded_outward,
    standardize,
    warn_if_too_few,
)
from jaxcal.functional import linalg, quantiles, scores

# Those whose quantile is infinite where the table is too short for the level.
INFINITE_RULES = (*quantiles.CONFORMAL_RULES, "randomized")


class Empirical(Distribution):
    """Predictions loc + scale * Z, with Z uniform on a sorted table z: one that all rows share, or one a row.

    With a shared table the cdf and the score cost O(log L) a row, and no [n, L] array is ever made. A row with
    scale 0 is a point.

    With rule="randomized" every row has a tau of its own, and the mass 1 / (L + 1) on each value of its table,
    tau / (L + 1) on -inf and (1 - tau) / (L + 1) on +inf. Its cdf and quantiles are those of this distribution; mean,
    std, score and samples are those of the table, given that the value is finite (the score of the whole would be
    infinite).

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        z: [L] standardized values, in increasing order, or [n, L], a table for every row. They may be infinite, and
            quantiles then are, too; mean, std, score and samples take the outermost finite values in their place.
        rule: how `icdf` reads the table, see `functional.quantiles.empirical_quantile`. Only "inverse_cdf"
            makes it the inverse of `cdf`; "conformal" and "symmetric", which is for tables symmetric about 0, are
            infinite, with a warning, where the table is too short for a guarantee. "conformal" rounds ranks away from
            the median: ceil((L + 1) p), below the median floor((L + 1) p). Their central intervals hold a new
            exchangeable value with probability at least the confidence level. Nothing else depends on these rules.
            "randomized" reads it by `functional.quantiles.randomized_quantile`.
        tau: [n], or one number for all rows, in [0, 1]; with rule="randomized" only. Drawn from the uniform
            distribution it makes every quantile of an exchangeable value exact in the mean.

    Example:
        >>> distribution = Empirical(jnp.array([0.0, 10.0]), 2.0, jnp.array([-1.0, 0.0, 1.0]))
        >>> print(distribution.icdf(0.9))
        [ 2. 12.]
    """

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    z: Float[Array, "*n_l"]
    tau: Float[Array, "*n"] | None
    rule: str = eqx.field(static=True)

    def __init__(
        self,
        loc: Real[ArrayLike, "..."],
        scale: Real[ArrayLike, "..."],
        z: Real[ArrayLike, "..."],
        rule: str = "inverse_cdf",
        tau: Real[ArrayLike, "..."] | None = None,
    ):
        _checks.check_choice("rule", rule, (*quantiles.RULES, "randomized"))
        if (rule == "randomized") != (tau is not None):
            given = "no tau" if tau is None else "a tau"
            raise ValueError(f"rule='randomized' and tau go together; got rule={rule!r} and {given}.")
        self.loc, self.scale = as_rows(loc=loc, scale=scale)
        shared = np.ndim(z) < 2
        table = as_table("z", z) if shared else as_table("z", z, rows=self.loc.shape[0])
        self.z = as_parameter(table, self.loc.dtype)
        self.tau = None if tau is None else as_rows(loc=self.loc, tau=tau)[1].astype(self.loc.dtype)
        self.rule = rule
        check_not_negative("scale", self.scale)
        check_increasing("z", self.z, strictly=False)
        if rule == "symmetric":
            _check_symmetric("z", self.z)
        if self.tau is not None:
            check_share("tau", self.tau)

    @property
    @eqx.filter_jit
    def mean(self) -> Float[Array, "*n"]:
        """The mean of the table, placed."""
        return self.loc + self.scale * self._average(self._finite)

    @property
    @eqx.filter_jit
    def std(self) -> Float[Array, "*n"]:
        """The std of the table (with the divisor L), scaled."""
        deviations = self._finite - self._finite.mean(-1, keepdims=True)
        unit = linalg.scale_of(deviations)
        return self.scale * (unit * linalg.sqrt(self._average((deviations / unit) ** 2)))

    @of_targets
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """k / L for the k values of the table up to y, as far as rounding can tell; what rule="randomized" says.

        Then it is (k + tau (m + 1)) / (L + 1), with k values below y and m equal to it: uniform for an exchangeable y.
        """
        y, size = match(y, self.loc), self.z.shape[-1]
        if self.tau is None:
            return self._count(reached(y, self.loc)) / size
        # Half as far, so that a quantile, which is moved by the whole, lies beyond its value.
        upto, below = (self._count(rounded_outward(y, side, self.loc)) for side in (0.5, -0.5))
        return (below + self.tau * (upto - below + 1)) / (size + 1)

    @of_targets
    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """-inf everywhere: a distribution of atoms has no density."""
        return jnp.full_like(match(y, self.loc), -jnp.inf)

    @of_targets
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The scale times `functional.scores.empirical_crps` at (y - loc) / scale."""
        error, positive = match(y, self.loc) - self.loc, self.scale > 0
        u = error / jnp.where(positive, self.scale, 1)
        score = self._read(lambda z, u: scores.empirical_crps(u, linalg.finite_part(z)), u)
        return jnp.where(positive, self.scale * score, jnp.abs(error))

    @eqx.filter_jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * z, z drawn from the table."""
        _checks.check_key(key)
        rows = self.loc.shape
        drawn = jax.random.randint(key, (math.prod(shape), *rows), 0, self.z.shape[-1])
        z = jax.vmap(lambda index: self._read(lambda z, k: linalg.finite_part(z)[k], index))(drawn)
        return place(z.reshape(shape + rows), self.loc, self.scale)

    @eqx.filter_jit
    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        if self.rule == "conformal":
            z = self._read(quantiles.outward_quantile, p)
        elif self.tau is None:
            z = self._read(lambda z, p: quantiles.empirical_quantile(z, p, self.rule), p)
        else:
            z = self._read(quantiles.randomized_quantile, p, self.tau)
        # An infinite quantile is a refusal, and stays one where the scale is 0.
        infinite = jnp.isinf(z)
        return jnp.where(infinite, z, place(jnp.where(infinite, 0, z), self.loc, self.scale))

    @property
    def _mirrors_levels(self) -> bool:
        return self.rule in quantiles.CONFORMAL_RULES

    def _sides(self, levels: Float[Array, "..."]) -> Array:
        return jnp.zeros_like(levels) if self.rule == "inverse_cdf" else super()._sides(levels)

    @property
    def _locations(self) -> tuple[Float[Array, "*n"], ...]:
        return (self.loc,)

    def _count(self, y: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """How many values of each row's table are at most y."""
        u = standardize(y, self.loc, self.scale)
        return self._read(lambda z, u: jnp.searchsorted(z, u, side="right"), u).astype(u.dtype)

    @property
    def _finite(self) -> Float[Array, "*n_l"]:
        """The tables, whose infinite values become their outermost finite ones."""
        return jnp.vectorize(linalg.finite_part, signature="(l)->(l)")(self.z)

    @property
    def _shared(self) -> Mapping[str, int]:
        return {"z": 1} if self._is_shared else {}

    @property
    def _is_shared(self) -> bool:
        """Whether the rows share a table; leading axes, of runs, are those of the rows."""
        return self.z.ndim <= self.loc.ndim

    def _read(self, function: Callable[..., Array], *values: Array) -> Array:
        """The function of a table and of what is looked up in it, each [n], for the table of each row."""
        row = "(n)" if self._is_shared else "()"
        signature = f"(l){f',{row}' * len(values)}->{row}"
        return jnp.vectorize(function, signature=signature)(self.z, *values)

    def _average(self, values: Float[Array, "*n_l"]) -> Float[Array, "*n"]:
        """The mean over the table; of a shared one with an axis of length 1 for the rows."""
        return values.mean(-1, keepdims=self._is_shared)

    def _warn_of_levels(self, p: ArrayLike, values: Float[Array, "..."]) -> None:
        if needed := self._needed(p):
            warn_if_too_few(*needed)

    def _needed(self, p: ArrayLike) -> tuple[int, ArrayLike, str] | None:
        """What `warn_if_too_few` is asked at levels p; None for a rule whose quantiles are finite."""
        if self.rule not in INFINITE_RULES or _checks.is_traced(p):
            return None
        symmetric, size = self.rule == "symmetric", self.z.shape[-1]
        levels = np.abs(2 * np.asarray(p) - 1) if symmetric else outer_levels(p)
        where = " in some rows" if self.rule == "randomized" else ""
        return size // 2 if symmetric else size, levels, f"the quantile is infinite{where}"


def _check_symmetric(name: str, values: Array) -> None:
    """Raise ValueError unless there are 2 L values along the last axis, known ones symmetric about 0."""
    if values.shape[-1] % 2:
        raise ValueError(f"{name} must hold an even number of values, symmetric about 0; got {values.shape[-1]}.")
    if _checks.is_traced(values):
        return
    known = np.asarray(values)
    if (known != -known[..., ::-1]).any():
        raise ValueError(f"{name} must be symmetric about 0; got values from {known.min():g} to {known.max():g}.")
