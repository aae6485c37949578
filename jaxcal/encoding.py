"""Columns as inputs of networks: continuous ones standardized, categorical ones as indicators of their levels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcal import _checks
from jaxcal.scaling import Standardizer


class Encoder(eqx.Module):
    """What turns rows [n, d] into the inputs [n, p] of a network; made by `Encoder.of`.

    Attributes:
        scaler: the standardization of all columns, of which the continuous ones are used.
        levels: the levels of every categorical column, ascending.
        majority: the position of the most frequent level of every categorical column.
        categorical: which columns are categorical.
        unseen: what a level that was not there means: an "error", or the "majority" level in its place.
    """

    scaler: Standardizer
    levels: tuple[Float[Array, " levels"], ...]
    majority: tuple[Int[Array, ""], ...]
    categorical: tuple[int, ...] = eqx.field(static=True)
    unseen: str = eqx.field(static=True)

    @classmethod
    def of(cls, x: Float[Array, "n d"], categorical: tuple[int, ...], unseen: str) -> "Encoder":
        """The encoder of the columns of x, whose values must be known."""
        found = [np.unique(np.asarray(x[:, column]), return_counts=True) for column in categorical]
        levels = tuple(jnp.asarray(values) for values, _ in found)
        majority = tuple(jnp.asarray(counts.argmax(), jnp.int32) for _, counts in found)
        return cls(Standardizer.of(x), levels, majority, categorical, unseen)

    @property
    def continuous(self) -> tuple[int, ...]:
        """The columns that are not categorical."""
        return tuple(column for column in range(self.scaler.loc.shape[-1]) if column not in self.categorical)

    def codes(self, x: Float[Array, "n d"]) -> Int[Array, "n d"]:
        """The position of every value of a categorical column among its levels; 0 in the other columns."""
        codes = jnp.zeros(x.shape, jnp.int32)
        for column, levels, majority in zip(self.categorical, self.levels, self.majority, strict=True):
            values = x[:, column]
            position = jnp.clip(jnp.searchsorted(levels, values), 0, levels.shape[0] - 1).astype(jnp.int32)
            codes = codes.at[:, column].set(jnp.where(levels[position] == values, position, majority))
        return codes

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """The inputs of a network: the continuous columns, then an indicator for every level of the others."""
        codes = self.codes(x)
        indicators = [
            jax.nn.one_hot(codes[:, column], levels.shape[0], dtype=x.dtype)
            for column, levels in zip(self.categorical, self.levels, strict=True)
        ]
        return jnp.concatenate([self.scaler(x)[:, np.array(self.continuous, int)], *indicators], axis=1)

    def check_seen(self, x: Float[Array, "n d"]) -> None:
        """Raise ValueError if a known value of a categorical column is none of its levels, and that is an error."""
        if self.unseen != "error" or _checks.is_traced(x, *self.levels):
            return
        for column, levels in zip(self.categorical, self.levels, strict=True):
            values = np.asarray(x[:, column])
            unseen = np.setdiff1d(values, np.asarray(levels))
            if unseen.size:
                raise ValueError(
                    f"column {column} of x holds {unseen[0]:g}, which is none of the {levels.shape[0]} levels it was "
                    "fitted on; unseen='majority' takes the most frequent level in its place."
                )
