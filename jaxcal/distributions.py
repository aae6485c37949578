"""Predictive distributions: Equinox modules of arrays, one row a prediction, all with one interface.

They are what predictors return, what calibrators take and give back, and what metrics and plots accept.

A law computes in the dtype of its own parameters. Its methods are elementwise in the rows, so that a `vmap`
over runs or ensemble members gives a valid law, whose arrays have further leading axes.
"""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

import abc
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr, logsumexp, ndtr, ndtri
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.functional import quantiles, safe, scores

T = TypeVar("T")


class Distribution(eqx.Module):
    """A predictive law for each of n rows.

    Wherever a method takes `y`, it is [n] or one value for all rows, and the result is [n].
    """

    mean: eqx.AbstractVar[Float[Array, "*n"]]
    std: eqx.AbstractVar[Float[Array, "*n"]]

    @abc.abstractmethod
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The probability of a value of at most `y`."""

    @abc.abstractmethod
    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density at `y`; -inf where there is none, as for laws of atoms."""

    @abc.abstractmethod
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The continuous ranked probability score, the integral of (cdf(t) - 1{y <= t})^2 dt, in y's unit."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Independent random values, of shape `shape` + [n]."""

    @abc.abstractmethod
    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The quantile of every row at a level of its own."""

    @property
    def variance(self) -> Float[Array, "*n"]:
        """The square of `std`."""
        return self.std**2

    def icdf(self, p: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The quantiles at levels p in [0, 1]: [n] for one level, [n, k] for k levels.

        Raises:
            ValueError: if p has more than one axis, or a known level lies outside [0, 1].
        """
        levels = _checks.as_floats("p", p)
        if levels.ndim > 1:
            raise ValueError(f"p must be one level or a vector of levels; got shape {levels.shape}.")
        if not _checks.is_traced(levels) and not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"p must lie between 0 and 1; got {levels.min():g} to {levels.max():g}.")
        rows = self.mean
        at = lambda level: self._icdf(jnp.full(rows.shape, level, rows.dtype))
        return at(levels) if levels.ndim == 0 else jax.vmap(at, out_axes=-1)(levels)

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """The ends (lower, upper) of the central interval: the quantiles at (1 -+ confidence_level) / 2.

        Raises:
            ValueError: if `confidence_level` is not one number between 0 and 1.
        """
        _check_confidence_level(confidence_level)
        return self.icdf((1 - confidence_level) / 2), self.icdf((1 + confidence_level) / 2)


class Point(Distribution):
    """Predictions without a spread: all the probability lies at `mean`.

    Args:
        mean: [n], or of several outputs [n, t].

    Example:
        >>> print(Point(jnp.array([1.0, 2.0])).crps(3.0))
        [2. 1.]
    """

    mean: Float[Array, "*n"]

    def __init__(self, mean: Real[ArrayLike, "..."]):
        (self.mean,) = _as_rows(outputs=True, mean=mean)

    @property
    def std(self) -> Float[Array, "*n"]:
        """Zeros."""
        return jnp.zeros_like(self.mean)

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """A step from 0 to 1 at the mean."""
        return (_match(y, self.mean) >= self.mean).astype(self.mean.dtype)

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """-inf everywhere: there is no density."""
        return jnp.full_like(_match(y, self.mean), -jnp.inf)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The absolute error |y - mean|."""
        return jnp.abs(_match(y, self.mean) - self.mean)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The mean, `shape` times."""
        return jnp.broadcast_to(self.mean, shape + self.mean.shape)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return self.mean


class Normal(Distribution):
    """Normal predictions. Rows with std 0 are points.

    Args:
        mean: [n], or of several outputs [n, t], or one number for all rows.
        std: likewise; not negative.

    Example:
        >>> law = Normal(jnp.array([0.0, 10.0]), jnp.array([1.0, 2.0]))
        >>> lower, upper = law.interval(0.95)
        >>> print(f"{lower[1]:.2f} to {upper[1]:.2f}")
        6.08 to 13.92
    """

    mean: Float[Array, "*n"]
    std: Float[Array, "*n"]

    def __init__(self, mean: Real[ArrayLike, "..."], std: Real[ArrayLike, "..."]):
        self.mean, self.std = _as_rows(outputs=True, mean=mean, std=std)
        _check_not_negative("std", self.std)

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Phi((y - mean) / std)."""
        return ndtr(_standardise(_match(y, self.mean), self.mean, self.std))

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density, finite far in the tails; -inf where std is 0."""
        return scores.normal_log_prob(_match(y, self.mean), self.mean, self.std)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The closed form of `functional.scores.normal_crps`."""
        return scores.normal_crps(_match(y, self.mean), self.mean, self.std)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values mean + std * z, z standard normal."""
        z = jax.random.normal(key, shape + self.mean.shape, self.mean.dtype)
        return _place(z, self.mean, self.std)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return _place(ndtri(p), self.mean, self.std)


class StudentT(Distribution):
    """Student t predictions, loc + scale * T with T of `df` degrees of freedom. Rows with scale 0 are points.

    Args:
        df: degrees of freedom, [n] or one number for all rows; positive.
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.

    Example:
        >>> law = StudentT(4.0, jnp.array([0.0, 1.0]), 2.0)
        >>> print(law.variance.round(4))
        [8. 8.]
    """

    df: Float[Array, "*n"]
    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]

    def __init__(self, df: Real[ArrayLike, "..."], loc: Real[ArrayLike, "..."], scale: Real[ArrayLike, "..."]):
        self.df, self.loc, self.scale = _as_rows(df=df, loc=loc, scale=scale)
        _check_not_negative("scale", self.scale)
        if not _checks.is_traced(self.df) and (self.df <= 0).any():
            raise ValueError(f"df must be positive; got {self.df.min():g}.")

    @property
    def mean(self) -> Float[Array, "*n"]:
        """`loc`; NaN where df <= 1."""
        return jnp.where(self.df > 1, self.loc, jnp.nan)

    @property
    def std(self) -> Float[Array, "*n"]:
        """The scale times sqrt(df / (df - 2)); infinite where df <= 2."""
        finite = self.df > 2
        df = jnp.where(finite, self.df, 3)
        return jnp.where(finite, self.scale * jnp.sqrt(df / (df - 2)), jnp.inf)

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """F((y - loc) / scale), to full relative precision in the lower tail."""
        return scores.student_t_cdf(_standardise(_match(y, self.loc), self.loc, self.scale), self.df)

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density; -inf where scale is 0."""
        return scores.student_t_log_prob(_match(y, self.loc), self.df, self.loc, self.scale)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The closed form of `functional.scores.student_t_crps`; NaN where df <= 1."""
        return scores.student_t_crps(_match(y, self.loc), self.df, self.loc, self.scale)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * t, t from the standard law."""
        shape = shape + self.loc.shape
        t = jax.random.t(key, jnp.broadcast_to(self.df, shape), shape, self.loc.dtype)
        return _place(t, self.loc, self.scale)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return _place(scores.student_t_icdf(p, self.df), self.loc, self.scale)


class Mixture(Distribution):
    """Mixtures of m laws of one class, as an ensemble gives them.

    The cdf of a row is the weighted mean of its members' cdfs.

    Args:
        components: a Distribution all of whose arrays have a leading member axis of length m, as a `vmap`
            over the members makes it.
        weights: [m], not negative, with sum 1; equal where it is None.

    Example:
        >>> members = jax.vmap(Normal)(jnp.array([[-1.0], [1.0]]), jnp.array([[1.0], [1.0]]))
        >>> law = Mixture(members)
        >>> print(law.variance.round(4))
        [2.]
    """

    components: Distribution
    weights: Float[Array, "*m"]

    def __init__(self, components: Distribution, weights: Real[ArrayLike, "..."] | None = None):
        members, dtype = _stack_of(components)
        if isinstance(components, Empirical) and components.rule in quantiles.CONFORMAL_RULES:
            raise ValueError(f"components must not have rule={components.rule!r}: no promise outlives the mixing.")
        self.components = components
        if weights is None:
            self.weights = jnp.full(members, 1 / members, dtype)
        else:
            self.weights = _checks.as_vector("weights", weights, length=members).astype(dtype)
        _check_not_negative("weights", self.weights)
        if not _checks.is_traced(self.weights) and not abs(self.weights.sum() - 1) < 1e-3:
            raise ValueError(f"weights must sum to 1; got {self.weights.sum():g}.")

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The weighted mean of the members' means."""
        return self._average(self._each(lambda member: member.mean))

    @property
    def std(self) -> Float[Array, "*n"]:
        """The root of the mean of the members' variances plus the variance of their means."""
        means, stds = self._each(lambda member: (member.mean, member.std))
        deviations = means - self._average(means)[None]
        return safe.sqrt(self._average(stds**2 + deviations**2))

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The weighted mean of the members' cdfs."""
        return self._average(self._each(lambda member: member.cdf(y)))

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log of the weighted mean of the members' densities."""
        logs = self._each(lambda member: member.log_prob(y))
        dense = (logs > -jnp.inf).any(0)
        # Where no member has a density the derivatives are 0, not NaN.
        logs = jnp.where(dense[None], logs, 0)
        weights = jnp.broadcast_to(self._columns(logs.ndim), logs.shape)
        return jnp.where(dense, logsumexp(logs, axis=0, b=weights), -jnp.inf)

    @eqx.filter_jit
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Closed for normal and point members; for others by quadrature, `functional.scores.mixture_crps`."""
        y = _match(y, self.mean)
        if isinstance(self.components, Normal | Point):
            return scores.normal_mixture_crps(y, self.components.mean, self.components.std, self.weights)
        crps = lambda y: self._each(lambda member: member.crps(y))
        icdf = lambda p: self._each(lambda member: member._icdf(p))
        return scores.mixture_crps(y, self.weights, crps, icdf)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The values of members drawn at random."""
        members = self.weights.shape[0]
        key_member, key_value = jax.random.split(key)
        keys = jax.random.split(key_value, members)
        values = jax.vmap(lambda member, key: member.sample(key, shape))(self.components, keys)
        drawn = jax.random.choice(key_member, members, (1, *values.shape[1:]), p=self.weights)
        return jnp.take_along_axis(values, drawn, axis=0)[0]

    @eqx.filter_jit
    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        if isinstance(self.components, Point):
            return quantiles.weighted_quantile(self.components.mean, self.weights, p)
        # The members' quantiles only bracket the mixture's: no derivative passes through them.
        components, level = jax.lax.stop_gradient((self.components, p))
        ends = jax.vmap(lambda member: member._icdf(level))(components)
        return quantiles.invert_cdf(self.cdf, p, ends.min(0), ends.max(0))

    def _each(self, function: Callable[[Any], T]) -> T:
        """The function of every member, stacked [m, n]."""
        return jax.vmap(function)(self.components)

    def _columns(self, ndim: int) -> Float[Array, "*m"]:
        """The weights, with axes of length 1 for all but the members."""
        return jnp.expand_dims(self.weights, tuple(range(1, ndim)))

    def _average(self, values: Float[Array, " m *n"]) -> Float[Array, "*n"]:
        return (self._columns(values.ndim) * values).sum(0)


class Empirical(Distribution):
    """Predictions loc + scale * Z, with Z uniform on a sorted table z: one that all rows share, or one a row.

    With a shared table the cdf and the score cost O(log L) a row, and no [n, L] array is ever made. A row with
    scale 0 is a point.

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        z: [L] standardised values, in increasing order, or [n, L], a table for every row.
        rule: how `icdf` reads the table, see `functional.quantiles.empirical_quantile`. Only "inverse_cdf"
            makes it the inverse of `cdf`; "conformal" and "symmetric", which is for tables symmetric about 0, are
            infinite, with a warning, where the table is too short for a promise. Nothing else depends on the rule.

    Example:
        >>> law = Empirical(jnp.array([0.0, 10.0]), 2.0, jnp.array([-1.0, 0.0, 1.0]))
        >>> print(law.icdf(0.9))
        [ 2. 12.]
    """

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    z: Float[Array, "*n_l"]
    rule: str = eqx.field(static=True)

    def __init__(
        self,
        loc: Real[ArrayLike, "..."],
        scale: Real[ArrayLike, "..."],
        z: Real[ArrayLike, "..."],
        rule: str = "inverse_cdf",
    ):
        _checks.check_choice("rule", rule, quantiles.RULES)
        self.loc, self.scale = _as_rows(loc=loc, scale=scale)
        shared = np.ndim(z) < 2
        table = _checks.as_vector("z", z) if shared else _checks.as_matrix("z", z, length=self.loc.shape[0])
        self.z = jnp.array(table, self.loc.dtype)
        self.rule = rule
        _check_not_negative("scale", self.scale)
        _check_increasing("z", self.z, strictly=False)
        if rule == "symmetric":
            _check_symmetric("z", self.z)

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The mean of the table, placed."""
        return self.loc + self.scale * self._average(self.z)

    @property
    def std(self) -> Float[Array, "*n"]:
        """The std of the table (with the divisor L), scaled."""
        deviations = self.z - self.z.mean(-1, keepdims=True)
        return self.scale * safe.sqrt(self._average(deviations**2))

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The share of the table at or below (y - loc) / scale."""
        u = _standardise(_match(y, self.loc), self.loc, self.scale)
        count = self._read(lambda z, u: jnp.searchsorted(z, u, side="right"), u)
        return count.astype(u.dtype) / self.z.shape[-1]

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """-inf everywhere: a law of atoms has no density."""
        return jnp.full_like(_match(y, self.loc), -jnp.inf)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The scale times `functional.scores.empirical_crps` at (y - loc) / scale."""
        error, positive = _match(y, self.loc) - self.loc, self.scale > 0
        u = error / jnp.where(positive, self.scale, 1)
        score = self._read(lambda z, u: scores.empirical_crps(u, z), u)
        return jnp.where(positive, self.scale * score, jnp.abs(error))

    def icdf(self, p: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The quantiles at levels p in [0, 1]: [n] for one level, [n, k] for k levels.

        Raises:
            ValueError: if p has more than one axis, or a known level lies outside [0, 1].

        Warns:
            UserWarning: if the table is too short for a known level strictly between 0 and 1, whose quantile is then
                infinite.
        """
        values = super().icdf(p)
        if self.rule in quantiles.CONFORMAL_RULES and not _checks.is_traced(p):
            self._warn_if_infinite(np.asarray(p))
        return values

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """The ends (lower, upper) of the central interval.

        With rule="conformal" and "symmetric" it holds a new exchangeable value with probability at least
        `confidence_level`. Both ends are rounded outwards: where "conformal" takes the rank k at the upper end, it
        takes L + 1 - k = floor((L + 1) (1 - confidence_level) / 2) at the lower one.
        """
        if self.rule not in quantiles.CONFORMAL_RULES:
            return super().interval(confidence_level)
        _check_confidence_level(confidence_level)
        level = (1 + confidence_level) / 2
        mirrored = eqx.tree_at(lambda law: (law.loc, law.z), self, (-self.loc, -self.z[..., ::-1]))
        return -mirrored._icdf(jnp.full_like(self.loc, level)), self.icdf(level)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Values loc + scale * z, z drawn from the table."""
        rows = self.loc.shape
        drawn = jax.random.randint(key, (math.prod(shape), *rows), 0, self.z.shape[-1])
        z = jax.vmap(lambda index: self._read(lambda z, k: z[k], index))(drawn)
        return _place(z.reshape(shape + rows), self.loc, self.scale)

    @eqx.filter_jit
    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        z = self._read(lambda z, p: quantiles.empirical_quantile(z, p, self.rule), p)
        # An infinite quantile is a refusal, and stays one where the scale is 0.
        infinite = jnp.isinf(z)
        return jnp.where(infinite, z, _place(jnp.where(infinite, 0, z), self.loc, self.scale))

    @property
    def _is_shared(self) -> bool:
        """Whether the rows share a table; leading axes, of runs, are those of the rows."""
        return self.z.ndim <= self.loc.ndim

    def _read(self, function: Callable[[Array, Array], Array], values: Array) -> Array:
        """The function of a table and of what is looked up in it, [n], for the table of each row."""
        signature = "(l),(n)->(n)" if self._is_shared else "(l),()->()"
        return jnp.vectorize(function, signature=signature)(self.z, values)

    def _average(self, values: Float[Array, "*n_l"]) -> Float[Array, "*n"]:
        """The mean over the table; of a shared one with an axis of length 1 for the rows."""
        return values.mean(-1, keepdims=self._is_shared)

    def _warn_if_infinite(self, p: np.ndarray) -> None:
        symmetric, size = self.rule == "symmetric", self.z.shape[-1]
        levels = np.atleast_1d(np.abs(2 * p - 1) if symmetric else p)
        inside = (levels > 0) & (levels < 1)
        needed = quantiles.smallest_table(levels[inside].max()) if inside.any() else 0
        if (rows := size // 2 if symmetric else size) < needed:
            warnings.warn(
                f"{rows} calibration rows are too few for the promise at the level asked for, which needs at least "
                f"{needed}: the quantile is infinite.",
                stacklevel=3,
            )


class Quantiles(Distribution):
    """Predictions given by their quantiles at k levels, linear in between.

    Beyond the outer levels the quantile function is constant: atoms of mass levels[0] and 1 - levels[-1] lie
    at the outer quantiles. The mean, the std, the cdf and the score are exactly those of this law.

    Args:
        levels: [k], strictly increasing in (0, 1), the same for all rows.
        values: [n, k], the quantiles, not decreasing along a row.

    Example:
        >>> law = Quantiles(jnp.array([0.25, 0.75]), jnp.array([[0.0, 2.0]]))
        >>> print(law.cdf(1.0), law.icdf(0.625))
        [0.5] [1.5]
    """

    levels: Float[Array, "*k"]
    values: Float[Array, "*n k"]

    def __init__(self, levels: Real[ArrayLike, "..."], values: Real[ArrayLike, "..."]):
        self.values = jnp.array(_checks.as_matrix("values", values))
        self.levels = jnp.array(_checks.as_vector("levels", levels), self.values.dtype)
        if self.values.shape[1] != self.levels.shape[0]:
            raise ValueError(
                f"values must have one column a level: got shape {self.values.shape} and {self.levels.shape[0]} levels."
            )
        _checks.check_fraction("levels", self.levels)
        _check_increasing("levels", self.levels, strictly=True)
        _check_increasing("values", self.values, strictly=False)

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The integral of the quantile function over the level."""
        p, q = self._knots
        return (jnp.diff(p) * (q[..., :-1] + q[..., 1:]) / 2).sum(-1)

    @property
    def std(self) -> Float[Array, "*n"]:
        """The root of the integral of the squared deviation from the mean over the level."""
        p, q = self._knots
        deviations = q - self.mean[..., None]
        a, b = deviations[..., :-1], deviations[..., 1:]
        return safe.sqrt((jnp.diff(p) * (a * a + a * b + b * b) / 3).sum(-1))

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The largest level whose quantile is at most y."""
        p, q = self._knots
        return _with_knots(quantiles.interpolate_monotone)(_match(y, q[..., 0]), q, p)

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log of the constant density between two quantiles; -inf outside, where only atoms are."""
        p, q = self._knots
        return _with_knots(_log_slope)(_match(y, q[..., 0]), q, p)

    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The closed form of `functional.scores.quantile_crps`."""
        levels = jnp.expand_dims(self.levels, -2)
        return _with_knots(scores.quantile_crps)(_match(y, self.values[..., 0]), levels, self.values)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The quantiles at uniformly random levels."""
        rows = self.values.shape[:-1]
        levels = jax.random.uniform(key, (math.prod(shape), *rows), self.values.dtype)
        return jax.vmap(self._icdf)(levels).reshape(shape + rows)

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return _with_knots(quantiles.interpolate_monotone)(p, *self._knots)

    @property
    def _knots(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The levels and the quantiles with those of levels 0 and 1 added, both [n, k + 2]."""
        levels = jnp.broadcast_to(jnp.expand_dims(self.levels, -2), self.values.shape)
        ends = [(0, 0)] * (self.values.ndim - 1) + [(1, 1)]
        return jnp.pad(levels, ends, constant_values=(0, 1)), jnp.pad(self.values, ends, mode="edge")


class ScaledQuantiles(Distribution):
    """Predictions loc + scale * Z, whose quantile function is linear between knots that all rows share.

    Beyond the outer levels it is constant, as that of `Quantiles` (tails="constant"). Or Z has there the tails of a
    standard normal law, scaled to the mass that is left (tails="normal"): P(Z <= t) is levels[0] Phi(t) / Phi(z[0])
    for t <= z[0], and likewise above; in logs, so that a knot at -40 does no harm. All methods are exact for this law;
    the cdf and the score cost O(log L) a row, and no [n, L] array is ever made. A row with scale 0 is a point.

    Args:
        loc: [n], or one number for all rows.
        scale: [n], or one number for all rows; not negative.
        levels: [L], in increasing order in (0, 1); the last may be 1 where the tails are constant.
        z: [L], the quantiles of Z at these levels, in increasing order.
        tails: "constant" or "normal".

    Example:
        >>> law = ScaledQuantiles(jnp.array([0.0, 10.0]), 2.0, jnp.array([0.25, 0.75]), jnp.array([-1.0, 1.0]))
        >>> print(law.icdf(0.625), law.cdf(1.0))
        [ 1. 11.] [0.625 0.   ]
    """

    loc: Float[Array, "*n"]
    scale: Float[Array, "*n"]
    levels: Float[Array, "*l"]
    z: Float[Array, "*l"]
    tails: str = eqx.field(static=True)

    def __init__(
        self,
        loc: Real[ArrayLike, "..."],
        scale: Real[ArrayLike, "..."],
        levels: Real[ArrayLike, "..."],
        z: Real[ArrayLike, "..."],
        tails: str = "constant",
    ):
        _checks.check_choice("tails", tails, ("constant", "normal"))
        self.loc, self.scale = _as_rows(loc=loc, scale=scale)
        self.z = jnp.array(_checks.as_vector("z", z), self.loc.dtype)
        self.levels = jnp.array(_checks.as_vector("levels", levels, length=self.z.shape[0]), self.loc.dtype)
        self.tails = tails
        _check_not_negative("scale", self.scale)
        _check_increasing("z", self.z, strictly=False)
        _check_increasing("levels", self.levels, strictly=False)
        if not _checks.is_traced(self.levels):
            inner = np.asarray(self.levels)
            _checks.check_fraction("levels", inner if tails == "normal" else inner[inner != 1])

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The mean of Z, placed."""
        return self.loc + self.scale * self._moments[0]

    @property
    def std(self) -> Float[Array, "*n"]:
        """The std of Z, scaled."""
        return self.scale * safe.sqrt(self._moments[1])

    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The largest level whose quantile is at most y; in normal tails by the formula above."""
        error, u = self._standardised(y)
        p, q = self._knots
        cdf = _with_knots(quantiles.interpolate_monotone)(u, q, p)
        if self.tails == "normal":
            upper, mass, end, x = self._nearest_end(u)
            tail = _normal_tail(x, end, mass)
            cdf = jnp.where(upper, 1 - tail, jnp.where(x > end, tail, cdf))
        return jnp.where(self.scale > 0, cdf, (error >= 0).astype(cdf.dtype))

    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The log density, which is constant between two knots; -inf where only atoms are."""
        _, u = self._standardised(y)
        p, q = self._knots
        log_density = _with_knots(_log_slope)(u, q, p)
        if self.tails == "normal":
            upper, mass, end, x = self._nearest_end(u)
            in_tail = jnp.log(mass) + scores.normal_log_prob(x, 0, 1) - log_ndtr(-end)
            log_density = jnp.where(upper | (x > end), in_tail, log_density)
        positive = self.scale > 0
        return jnp.where(positive, log_density - jnp.log(jnp.where(positive, self.scale, 1)), -jnp.inf)

    @eqx.filter_jit
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """The scale times the score of Z at u = (y - loc) / scale, by prefix sums of integrals over the segments.

        Beyond an outer knot the score grows by the distance from it, less twice the integral of the tail between.
        """
        error, u = self._standardised(y)
        p, q = self._knots
        upper, mass, end, x = self._nearest_end(u)
        score = _with_knots(_linear_crps)(jnp.clip(u, q[..., 0], q[..., -1]), q, p) + x - end
        if self.tails == "normal":
            masses, ends = self._ends
            inside = (masses**2 * _normal_tail_score(ends)).sum(-1, keepdims=True)
            beyond_end = _pick(upper, masses * _normal_excess(ends)[0])
            score = score + inside - 2 * (beyond_end - _normal_tail(x, end, mass) * _normal_excess(x)[0])
        return jnp.where(self.scale > 0, self.scale * score, jnp.abs(error))

    def icdf(self, p: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The quantiles at levels p in [0, 1], [n] for one level, [n, k] for k levels: those of Z, placed in every row.

        Raises:
            ValueError: if p has more than one axis, or a known level lies outside [0, 1].
        """
        loc, scale = self.loc, self.scale
        standard = jnp.zeros_like(loc[..., :1]), jnp.ones_like(scale[..., :1])
        z = Distribution.icdf(eqx.tree_at(lambda law: (law.loc, law.scale), self, standard), p)
        if z.ndim > loc.ndim:
            loc, scale = loc[..., None], scale[..., None]
        return _place(jnp.broadcast_to(z, jnp.broadcast_shapes(z.shape, loc.shape)), loc, scale)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """The quantiles at uniformly random levels."""
        rows, dtype = self.loc.shape, self.loc.dtype
        levels = jax.random.uniform(key, (math.prod(shape), *rows), dtype)
        # In the middles of the cells that random numbers come from: never 0, where a quantile may be infinite.
        return jax.vmap(self._icdf)(levels + float(jnp.finfo(dtype).epsneg)).reshape(shape + rows)

    @eqx.filter_jit
    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        levels, q = self._knots
        z = _with_knots(quantiles.interpolate_monotone)(p, levels, q)
        if self.tails == "normal":
            upper = p > self.levels[..., -1:]
            share = jnp.where(upper, 1 - p, p)
            mass, end = (_pick(upper, pair) for pair in self._ends)
            beyond, possible = share < mass, share > 0
            log_level = jnp.log(jnp.where(beyond & possible, share, mass) / mass) + log_ndtr(-end)
            # Phi(-x) <= exp(-x^2 / 2) / 2 for x >= 0: the search starts below the answer.
            x = -quantiles.invert_cdf(log_ndtr, log_level, -jnp.sqrt(-2 * log_level), -end)
            x = jnp.where(possible, x, jnp.inf)
            z = jnp.where(beyond, jnp.where(upper, x, -x), z)
        return _place(z, self.loc, self.scale)

    @property
    def _knots(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The levels and z with those of levels 0 and 1 added, both [1, L + 2]: the same for all rows."""
        ends = [(0, 0)] * (self.z.ndim - 1) + [(1, 1)]
        levels, z = jnp.pad(self.levels, ends, constant_values=(0, 1)), jnp.pad(self.z, ends, mode="edge")
        return jnp.expand_dims(levels, -2), jnp.expand_dims(z, -2)

    @property
    def _ends(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The masses beyond the lower and the upper knot, and where these are, seen outwards; both [2]."""
        masses = jnp.concatenate([self.levels[..., :1], 1 - self.levels[..., -1:]], axis=-1)
        return masses, jnp.concatenate([-self.z[..., :1], self.z[..., -1:]], axis=-1)

    def _nearest_end(self, u: Array) -> tuple[Array, ...]:
        """Whether u is at or beyond the upper end, the mass and the end on its side, and u seen outwards, if beyond."""
        upper = u >= self.z[..., -1:]
        mass, end = (_pick(upper, pair) for pair in self._ends)
        return upper, mass, end, jnp.maximum(jnp.where(upper, u, -u), end)

    @property
    def _moments(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The mean and the variance of Z, both [1]."""
        p, q = self._knots
        mean = (jnp.diff(p) * (q[..., :-1] + q[..., 1:]) / 2).sum(-1)
        masses, ends = self._ends
        excess, square = _normal_excess(ends) if self.tails == "normal" else 2 * [jnp.zeros_like(ends)]
        mean = mean + jnp.diff(masses * excess)
        a, b = q[..., :-1] - mean[..., None], q[..., 1:] - mean[..., None]
        variance = (jnp.diff(p) * (a * a + a * b + b * b) / 3).sum(-1)
        deviations = ends + jnp.concatenate([mean, -mean], axis=-1)
        return mean, variance + (masses * (2 * deviations * excess + square)).sum(-1, keepdims=True)

    def _standardised(self, y: ArrayLike) -> tuple[Array, Array]:
        """y - loc, and that over the scale (or over 1 where it is 0)."""
        error = _match(y, self.loc) - self.loc
        return error, error / jnp.where(self.scale > 0, self.scale, 1)


def _as_rows(*, outputs: bool = False, **parameters: ArrayLike) -> list[Array]:
    """The parameters as vectors [n] of one dtype; a number holds for all rows and has no say in the dtype.

    With `outputs` they may be matrices [n, t] of several outputs.
    """
    arrays = {name: _checks.as_floats(name, values) for name, values in parameters.items()}
    vectors = [array for array in arrays.values() if array.ndim] or [a[None] for a in arrays.values()]
    shape, dtype = vectors[0].shape, jnp.result_type(*vectors)
    # A copy makes a JAX array even of a NumPy array that `vmap` hands through.
    rows = {name: jnp.array(a if a.ndim else jnp.full(shape, a), dtype) for name, a in arrays.items()}
    if not (outputs and len(shape) == 2 and shape[1] > 1):
        return [_checks.as_vector(name, row, length=shape[0]) for name, row in rows.items()]
    for name, row in rows.items():
        if row.shape != shape:
            raise ValueError(f"{' and '.join(rows)} must have one shape; got {shape} and for {name} {row.shape}.")
    return [_checks.as_matrix(name, row) for name, row in rows.items()]


def _match(y: ArrayLike, rows: Array) -> Array:
    """`y` in the dtype and the shape of the rows."""
    values = _checks.as_floats("y", y).astype(rows.dtype)
    if values.ndim > rows.ndim or values.shape != rows.shape[rows.ndim - values.ndim :]:
        raise ValueError(f"y must be one number or have shape {rows.shape}; got {values.shape}.")
    return jnp.broadcast_to(values, rows.shape)


def _standardise(y: Array, loc: Array, scale: Array) -> Array:
    """(y - loc) / scale; infinite where the scale is 0, so that a cdf becomes a step."""
    positive, step = scale > 0, jnp.where(y >= loc, jnp.inf, -jnp.inf)
    return jnp.where(positive, (y - loc) / jnp.where(positive, scale, 1), step)


def _place(z: Array, loc: Array, scale: Array) -> Array:
    """Values loc + scale * z for z [..., n]; loc where the scale is 0, even if z is infinite."""
    loc, scale = jnp.broadcast_to(loc, z.shape), jnp.broadcast_to(scale, z.shape)
    return loc + scale * jnp.where((scale == 0) & jnp.isinf(z), 0, z)


def _log_slope(x: Array, xp: Array, fp: Array) -> Array:
    """The log of the slope at x of a piecewise-linear curve; -inf where it jumps or is constant."""
    right = jnp.clip(jnp.searchsorted(xp, x, side="right"), 1, xp.shape[0] - 1)
    step, rise = xp[right] - xp[right - 1], fp[right] - fp[right - 1]
    sloped = (step > 0) & (rise > 0) & (x >= xp[0])
    rise, step = jnp.where(sloped, rise, 1), jnp.where(sloped, step, 1)
    return jnp.where(sloped, jnp.log(rise) - jnp.log(step), -jnp.inf)


def _linear_crps(u: Array, q: Array, p: Array) -> Array:
    """CRPS at u within the knots q of the law whose cdf is linear between values p from 0 to 1; O(log k) a value.

    The integrals of cdf^2 up to every knot and of (1 - cdf)^2 from it on are prefix sums of positive terms.
    """
    width, squares = jnp.diff(q), lambda f: f[:-1] ** 2 + f[:-1] * f[1:] + f[1:] ** 2
    below = jnp.pad(jnp.cumsum(width * squares(p) / 3), (1, 0))
    above = jnp.pad(jnp.cumsum((width * squares(1 - p) / 3)[::-1])[::-1], (0, 1))
    left = jnp.clip(jnp.searchsorted(q, u, side="right") - 1, 0)
    return (below + above)[left] + (u - q[left]) * (p[left] + quantiles.interpolate_monotone(u, q, p) - 1)


def _pick(upper: Array, pair: Array) -> Array:
    """The second of a pair for the rows where `upper`, the first for the others."""
    return jnp.where(upper, pair[..., 1:], pair[..., :1])


def _normal_tail(x: Array, end: Array, mass: Array) -> Array:
    """The mass beyond x >= end of an upper normal tail with `mass` beyond its end."""
    return mass * jnp.exp(jnp.minimum(log_ndtr(-x) - log_ndtr(-end), 0))


def _normal_excess(end: Array) -> tuple[Array, Array]:
    """The mean and the mean square of N - end, given that the standard normal N exceeds it.

    The mean is phi(end) / Phi(-end) - end, the mean square 1 - end * mean; far out, where these cancel, both by the
    continued fraction of Mills' ratio.
    """
    far = end > 5
    near = jnp.where(far, 5, end)
    mean = jnp.exp(scores.normal_log_prob(near, 0, 1)) / ndtr(-near) - near
    end = jnp.where(far, end, 5)
    rest = jax.lax.fori_loop(0, 24, lambda k, rest: (25 - k) / (end + rest), jnp.zeros_like(end))
    return jnp.where(far, 1 / (end + rest), mean), jnp.where(far, rest / (end + rest), 1 - near * mean)


def _normal_tail_score(end: Array) -> Array:
    """The integral over t >= end of P(N > t | N > end)^2, N standard normal.

    With t = -end and h = phi(t) / Phi(t) it is t + 2 h - Phi(sqrt(2) t) / (sqrt(pi) Phi(t)^2). For end > 0 the same in
    the mean excesses e over end and e' over sqrt(2) end, so that nothing cancels.
    """
    root = math.sqrt(2)
    t, outer = jnp.maximum(-end, 0), jnp.maximum(end, 0)
    e, e_root = _normal_excess(end)[0], _normal_excess(root * outer)[0]
    inner = 2 * e - t - ndtr(root * t) / (math.sqrt(math.pi) * ndtr(t) ** 2)
    return jnp.where(end > 0, (outer * e_root + 2 * e * e_root - root * e**2) / (root * outer + e_root), inner)


def _with_knots(function: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """A function of one value and the k knots of one curve, over all rows."""
    return jnp.vectorize(function, signature="(),(k),(k)->()")


def _stack_of(components: Distribution) -> tuple[int, Any]:
    """The number of members of a stack, and its dtype."""
    if not isinstance(components, Distribution):
        raise ValueError(f"components must be a Distribution; got {type(components).__name__}.")
    leaves = jax.tree.leaves(components)
    shapes = [leaf.shape for leaf in leaves]
    if any(len(shape) < 2 or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(
            "components must be a stack, whose arrays all have a leading member axis, as jax.vmap makes it; "
            f"got arrays of shapes {', '.join(map(str, shapes))}."
        )
    return shapes[0][0], leaves[0].dtype


def _check_confidence_level(confidence_level: ArrayLike) -> None:
    """Raise ValueError unless it is one number, between 0 and 1 if known."""
    if np.ndim(confidence_level):
        raise ValueError(f"confidence_level must be one number; got shape {np.shape(confidence_level)}.")
    _checks.check_fraction("confidence_level", confidence_level)


def _check_not_negative(name: str, values: Array) -> None:
    if not _checks.is_traced(values) and (values < 0).any():
        raise ValueError(f"{name} must not be negative; got {values.min():g}.")


def _check_increasing(name: str, values: Array, *, strictly: bool) -> None:
    """Raise ValueError unless known values increase along the last axis."""
    if _checks.is_traced(values):
        return
    steps = np.diff(np.asarray(values))
    bad = np.argwhere(steps <= 0 if strictly else steps < 0)
    if bad.size:
        *row, k = bad[0].tolist()
        first, second = values[(*row, k)], values[(*row, k + 1)]
        where = f" in row {row[0]}" if row else ""
        raise ValueError(
            f"{name} must be {'strictly increasing' if strictly else 'in increasing order'}; "
            f"got {first:g} before {second:g}{where}."
        )


def _check_symmetric(name: str, values: Array) -> None:
    """Raise ValueError unless there are 2 L values along the last axis, known ones symmetric about 0."""
    if values.shape[-1] % 2:
        raise ValueError(f"{name} must hold an even number of values, symmetric about 0; got {values.shape[-1]}.")
    if not _checks.is_traced(values) and (values != -values[..., ::-1]).any():
        raise ValueError(f"{name} must be symmetric about 0; got values from {values.min():g} to {values.max():g}.")
