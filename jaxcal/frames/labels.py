"""Labels of groups: bins of a column of x, and bins of the predicted std, for `by` in a fit.

`by` may be any function of x. These are two frequent choices. The leaves of a tree are a third choice:
`usnrt.USNRT.apply`. A coverage guarantee for each group needs labels that do not depend on the calibration rows. So
take the edges of the bins from other rows, such as the training rows of the model. Edges from the calibration rows
themselves change the coverage by less than the weight of one row for each edge.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.distributions import Distribution
from jaxcal.frames.layout import Layout, Table, is_frame
from jaxcal.frames.values import labels_in, numbers_in


class ColumnBins(eqx.Module):
    """The number of the bin in which the value of a column lies: a function of x.

    Attributes:
        column: the number of the column; its name where x is a data frame.
        edges: the edges between the bins, in increasing order. A value at an edge lies in the bin below it.

    Example:
        >>> x = np.arange(8.0)[:, None] * np.array([[1.0, 10.0]])
        >>> by = ColumnBins.of(x, column=1, number=4)
        >>> print(by(x))
        [0 0 1 1 2 2 3 3]
    """

    column: int | str = eqx.field(static=True)
    edges: Float[Array, " b"]

    @classmethod
    def of(cls, x: Table, *, column: int | str = 0, number: int = 4) -> "ColumnBins":
        """Bins that hold about equally many of the rows of x; fewer than `number` where many values are equal.

        Args:
            x: inputs [n, d], or a data frame; a vector [n] is one column.
            column: the number of the column, from 0 on, or its name in a data frame.
            number: the number of bins, 2 or more.

        Raises:
            ValueError: if x is empty, not finite or of the wrong shape, or `number` is below 2. Also if there is no
                such column, or it holds no numbers or lacks some.
        """
        layout = Layout.of(x)
        names, known = layout.names or (), range(layout.num_columns)
        if column not in (*known, *names):
            named = f", or {', '.join(names)}" if names else ""
            raise ValueError(f"column must be one of 0 to {known[-1]}{named}; got {column!r}.")
        # A frame's columns are looked up by their names.
        column = names[column] if names and not isinstance(column, str) else column
        return cls(column, _edges(_numbers(x, column), number))

    def __call__(self, x: Table) -> Int[Array, " n"]:
        """The numbers of the bins of the rows of x, from 0 on.

        Raises:
            ValueError: if x is not finite or has no such column, or is an array although the fit had a data frame.
        """
        return _bins(self.edges, _numbers(x, self.column))


class ColumnLabels(eqx.Module):
    """The labels in a column of a data frame: a function of x.

    Attributes:
        name: the name of the column.
    """

    name: str = eqx.field(static=True)

    def __call__(self, x: Table) -> np.ndarray:
        """The labels of the rows, [n].

        Raises:
            ValueError: if x is no data frame, or has no such column, or a label is missing.
        """
        if not is_frame(x):
            raise ValueError(
                f"by={self.name!r} names a column, but x is no data frame: give labels, or a function of x."
            )
        return labels_in(x, self.name)


class StdBins(eqx.Module):
    """The number of the bin in which the predicted std of a row lies: a function of the base's predictions.

    Attributes:
        edges: the edges between the bins, in increasing order. A std at an edge lies in the bin below it.

    Example:
        >>> from jaxcal import Normal
        >>> base = Normal(np.zeros(4), np.array([1.0, 2.0, 3.0, 4.0]))
        >>> print(StdBins.of(base, number=2)(base))
        [0 0 1 1]
    """

    edges: Float[Array, " b"]

    @classmethod
    def of(cls, base: Distribution, *, number: int = 4) -> "StdBins":
        """Bins that hold about equally many of the rows of `base`; fewer than `number` where many stds are equal.

        Raises:
            ValueError: if `number` is below 2.
        """
        return cls(_edges(base.std, number))

    def __call__(self, base: Distribution) -> Int[Array, " n"]:
        """The numbers of the bins of the rows of `base`, from 0 on."""
        return _bins(self.edges, base.std)


def _numbers(x: Table, column: int | str) -> Float[Array, " n"]:
    """The numbers in a column of x."""
    if is_frame(x):
        return numbers_in(x, column)
    if isinstance(column, str):
        raise ValueError(f"the bins are those of the column {column!r} of a data frame: give x as one.")
    matrix = _checks.as_matrix("x", x)
    if column >= matrix.shape[1]:
        raise ValueError(f"x has {matrix.shape[1]} columns; the bins are those of column {column}.")
    return matrix[:, column]


def _edges(values: ArrayLike, number: int) -> Float[Array, " b"]:
    """The edges: the values at the quantiles of levels k / number, without equal edges and empty bins."""
    _checks.check_at_least("number", number, 2)
    values = np.sort(np.asarray(values))
    edges = np.unique(values[np.arange(1, number) * len(values) // number - 1])
    return jax.device_put(edges[edges < values[-1]])


@jax.jit
def _bins(edges: Float[Array, " b"], values: Float[Array, " n"]) -> Int[Array, " n"]:
    return jnp.searchsorted(edges, values, side="left")
