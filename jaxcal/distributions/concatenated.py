"""Predictions of several models, one beneath the other: `Concatenated`."""
# Equinox lets a property stand for an abstract variable; the type checker does not know that.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real

from jaxcal import _checks
from jaxcal.distributions._base import Distribution, match


class Concatenated(Distribution):
    """Distributions of different data points, whose rows are put into one order.

    Each part keeps what its rows share, such as the table of an `Empirical`.

    Args:
        parts: distributions, of any classes.
        rows: for each part the numbers of the rows that it predicts, [k]; together 0 to n - 1, each once.

    Raises:
        ValueError: if the rows of a part are not as many as it predicts, or not every row occurs once.

    Example:
        >>> from jaxcal import Empirical, Normal
        >>> first, second = Empirical(jnp.zeros(2), 1.0, jnp.array([-1.0, 1.0])), Normal(jnp.array([5.0]), 1.0)
        >>> print(Concatenated([first, second], [[0, 2], [1]]).mean)
        [0. 5. 0.]
    """

    parts: tuple[Distribution, ...]
    rows: tuple[Int[Array, "*k"], ...]

    def __init__(self, parts: Sequence[Distribution], rows: Sequence[ArrayLike | Sequence[int]]):
        numbers = [np.array(each) for each in rows]
        self.parts, self.rows = tuple(parts), tuple(map(jax.device_put, numbers))
        sizes = [part.mean.shape[0] for part in self.parts]
        given = [each.shape[0] for each in numbers]
        if sizes != given:
            raise ValueError(f"the parts predict {sizes} rows, where {given} are expected.")
        if not np.array_equal(np.sort(np.concatenate(numbers)), np.arange(sum(sizes))):
            raise ValueError(f"rows must hold each of the numbers 0 to {sum(sizes) - 1} once.")

    @property
    def mean(self) -> Float[Array, "*n"]:
        """The means of the parts."""
        return self._join([part.mean for part in self.parts])

    @property
    def std(self) -> Float[Array, "*n"]:
        """The stds of the parts."""
        return self._join([part.std for part in self.parts])

    @eqx.filter_jit
    def cdf(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Those of the parts."""
        return self._each(lambda part, y: part.cdf(y), y)

    @eqx.filter_jit
    def log_prob(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Those of the parts."""
        return self._each(lambda part, y: part.log_prob(y), y)

    @eqx.filter_jit
    def crps(self, y: Real[ArrayLike, "..."]) -> Float[Array, "*n"]:
        """Those of the parts."""
        return self._each(lambda part, y: part.crps(y), y)

    def icdf(self, p: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
        """Those of the parts, as each reads them."""
        return self._join([part.icdf(p) for part in self.parts])

    def interval(self, confidence_level: ArrayLike) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
        """Those of the parts, as each reads them."""
        lower, upper = zip(*(part.interval(confidence_level) for part in self.parts), strict=True)
        return self._join(lower), self._join(upper)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Samples of the parts, with a key for each."""
        _checks.check_key(key)
        keys = jax.random.split(key, len(self.parts))
        samples = [part.sample(each, shape) for part, each in zip(self.parts, keys, strict=True)]
        return self._join(samples, axis=len(shape))

    def _icdf(self, p: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return self._each(lambda part, p: part._icdf(p), p)

    def _each(self, function: Callable[[Any, Array], Array], values: ArrayLike) -> Array:
        """The function of every part and of the values of its rows."""
        values = match(values, self.mean)
        return self._join([function(part, values[rows]) for part, rows in zip(self.parts, self.rows, strict=True)])

    @eqx.filter_jit
    def _join(self, values: Sequence[Array], axis: int = 0) -> Array:
        order = jnp.argsort(jnp.concatenate(self.rows))
        return jnp.take(jnp.concatenate(values, axis), order, axis)
