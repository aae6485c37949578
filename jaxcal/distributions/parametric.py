"""Distributions with a formula: `Point`, `Normal`, `StudentT`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from jaxcal import _checks, _programs
from jaxcal._numpy import AnyArray, namespace, numpy_or_jit, special
from jaxcal.distributions._base import Distribution, as_parameters, match, of_targets, place, place_levels, standardize
from jaxcal.distributions._rows import Values
from jaxcal.functional import normal, student_t


class Point(Distribution):
    """Predictions without a spread: all the probability lies at `mean`.

    Args:
        mean: [n], or [n, t] for several outputs.

    Example:
        >>> print(Point(jnp.array([1.0, 2.0])).crps(3.0))
        [2. 1.]
    """

    _in_numpy: ClassVar[bool] = True
    has_std = has_density = is_continuous = False

    mean: Float[AnyArray, "*n"]

    def __init__(self, mean: Values):
        (self.mean,) = as_parameters(outputs=True, mean=mean)

    @property
    @numpy_or_jit
    def std(self) -> Float[AnyArray, "*n"]:
        """The std, which is 0 in every row."""
        return namespace(self.mean).zeros_like(self.mean)

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """A step from 0 to 1 at the mean."""
        return (match(y, self.mean) >= self.mean).astype(self.mean.dtype)

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """-inf everywhere, because there is no density."""
        return namespace(self.mean).full_like(match(y, self.mean), -np.inf)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """The absolute error |y - mean|."""
        return abs(match(y, self.mean) - self.mean)

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """The mean."""
        return self.mean


class Normal(Distribution):
    """Normal predictions. Rows with std 0 are points.

    Args:
        mean: [n], or [n, t] for several outputs, or one number for all rows.
        std: likewise; not negative.

    Example:
        >>> distribution = Normal(jnp.array([0.0, 10.0]), jnp.array([1.0, 2.0]))
        >>> lower, upper = distribution.interval(0.95)
        >>> print(f"{lower[1]:.2f} to {upper[1]:.2f}")
        6.08 to 13.92
    """

    _in_numpy: ClassVar[bool] = True
    is_location_scale = True

    mean: Float[AnyArray, "*n"]
    std: Float[AnyArray, "*n"]

    def __init__(self, mean: Values, std: Values):
        self.mean, self.std = as_parameters(outputs=True, mean=mean, std=std)
        _checks.check_not_negative("std", self.std)

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """Phi((y - mean) / std)."""
        return special(self.mean).ndtr(standardize(match(y, self.mean), self.mean, self.std))

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """The log density, finite far in the tails; -inf where std is 0."""
        return normal.log_prob(match(y, self.mean), self.mean, self.std)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """The score by the closed form of `functional.normal.crps`."""
        return normal.crps(match(y, self.mean), self.mean, self.std)

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[AnyArray, "..."]:
        """Values mean + std * z, with z standard normal."""
        _checks.check_key(key)
        z = jax.random.normal(key, shape + self.mean.shape, self.mean.dtype)
        return place(z, self.mean, self.std)

    @numpy_or_jit
    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """mean + std * z, with the standard normal quantiles z, which are computed once for all rows."""
        z = special(self.mean, levels).ndtri(levels.astype(self.mean.dtype))
        return place_levels(z if z.ndim == 0 else z.reshape((1,) * self.mean.ndim + (-1,)), self.mean, self.std)

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """mean + std * z, with z the standard normal quantile."""
        return place(special(p).ndtri(p), self.mean, self.std)


class StudentT(Distribution):
    """Student t predictions loc + scale * T, with `df` degrees of freedom of T. Rows with scale 0 are points.

    Args:
        df: degrees of freedom, [n], or [n, t] for several outputs, or one number for all rows; positive.
        loc: likewise.
        scale: likewise; not negative.

    Example:
        >>> distribution = StudentT(4.0, jnp.array([0.0, 1.0]), 2.0)
        >>> print(distribution.variance.round(4))
        [8. 8.]
    """

    _in_numpy: ClassVar[bool] = True
    has_closed_quantiles = False

    df: Float[AnyArray, "*n"]
    loc: Float[AnyArray, "*n"]
    scale: Float[AnyArray, "*n"]

    def __init__(self, df: Values, loc: Values, scale: Values):
        self.df, self.loc, self.scale = as_parameters(outputs=True, df=df, loc=loc, scale=scale)
        _checks.check_not_negative("scale", self.scale)
        if not _checks.is_traced(self.df) and (least := np.asarray(self.df).min()) <= 0:
            raise ValueError(f"df must be positive; got {least:g}.")

    @property
    def _num_filled(self) -> int | None:
        return len(self.loc) if self.loc.ndim == 1 else None

    @property
    @numpy_or_jit
    def mean(self) -> Float[AnyArray, "*n"]:
        """`loc`; NaN where df <= 1."""
        return namespace(self.df).where(self.df > 1, self.loc, np.nan)

    @property
    @numpy_or_jit
    def std(self) -> Float[AnyArray, "*n"]:
        """The scale times sqrt(df / (df - 2)); infinite where df <= 2."""
        xp, finite = namespace(self.df), self.df > 2
        df = xp.where(finite, self.df, 3)
        return xp.where(finite, self.scale * xp.sqrt(df / (df - 2)), np.inf)

    @of_targets
    def cdf(self, y: Values) -> Float[AnyArray, "*n"]:
        """F((y - loc) / scale), to full relative precision in the lower tail."""
        return student_t.cdf(standardize(match(y, self.loc), self.loc, self.scale), self.df)

    @of_targets
    def log_prob(self, y: Values) -> Float[AnyArray, "*n"]:
        """The log density; -inf where scale is 0."""
        return student_t.log_prob(match(y, self.loc), self.df, self.loc, self.scale)

    @of_targets
    def crps(self, y: Values) -> Float[AnyArray, "*n"]:
        """The score by the closed form of `functional.student_t.crps`; NaN where df <= 1."""
        return student_t.crps(match(y, self.loc), self.df, self.loc, self.scale)

    @_programs.jit
    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[AnyArray, "..."]:
        """Values loc + scale * t, with t drawn from the standard distribution."""
        _checks.check_key(key)
        shape = shape + self.loc.shape
        t = jax.random.t(key, jnp.broadcast_to(self.df, shape), shape, self.loc.dtype)
        return place(t, self.loc, self.scale)

    def _quantiles(self, levels: Float[AnyArray, "..."]) -> Float[AnyArray, "..."]:
        """The quantiles at checked levels.

        A quantile needs a search. Rows with the same known degrees of freedom share one search.
        """
        if self.df.ndim != 1 or _checks.is_traced(self.df):
            return super()._quantiles(levels)
        distinct, row = np.unique(np.asarray(self.df), return_inverse=True)
        if 2 * len(distinct) > len(row):
            return super()._quantiles(levels)
        t = Distribution._quantiles(StudentT(distinct, np.zeros_like(distinct), np.ones_like(distinct)), levels)
        return _placed(t, row.astype(np.int32), self.loc, self.scale)

    def quantile(self, p: Float[AnyArray, "*n"]) -> Float[AnyArray, "*n"]:
        """loc + scale * t, with t the quantile of the standard distribution."""
        return place(student_t.icdf(p, self.df), self.loc, self.scale)


@numpy_or_jit
def _placed(
    t: Float[AnyArray, "k ..."], row: Int[AnyArray, " n"], loc: Float[AnyArray, " n"], scale: Float[AnyArray, " n"]
) -> Float[AnyArray, "n ..."]:
    """loc + scale * t[row]."""
    return place_levels(t[row], loc, scale)
