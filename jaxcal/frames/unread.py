"""Rows that stay where they are, for example in a file on disk, and are read in chunks."""

import itertools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from jaxcal import _checks
from jaxcal.frames.preprocessing import Standardizer

# The largest number of rows that are in memory at once.
CHUNK_ROWS = 65_536


def unread_rows(x: ArrayLike, length: int) -> np.ndarray:
    """Inputs [n, d] that stay where they are, for example in a file on disk. Only their first row is read.

    Raises:
        ValueError: if they are not numbers, or have another number of rows.
    """
    x = np.asanyarray(x)
    if x.ndim == 1:
        x = x[:, None]
    _checks.as_matrix("x", x[:1])
    _checks.check_length("x", x, length)
    return x


def standardizer(x: np.ndarray, dtype: jnp.dtype) -> Standardizer:
    """The standardizer of inputs [n, d], which are read in chunks."""
    moments = column_moments(lambda part: x[part], len(x))
    return Standardizer(*(jnp.asarray(moment, dtype) for moment in moments))


def column_moments(
    read: Callable[[slice], Float[np.ndarray, " k *d"]], n: int
) -> tuple[Float[np.ndarray, "*d"], Float[np.ndarray, "*d"]]:
    """Means and standard deviations (divisor n - 1) of columns, in one pass over chunks of their rows, in float64.

    Each chunk has a mean and a sum of squared deviations. They are merged with the earlier chunks by eq. 2.1 of Chan,
    Golub & LeVeque, "Algorithms for Computing the Sample Variance" (1983). So no large sums of squares cancel. The
    standard deviation of a constant column is 0.

    Args:
        read: gives the rows of a slice.
        n: the number of rows, at least two.

    Raises:
        ValueError: if there are fewer rows, or one of them is NaN or infinite.

    Example:
        >>> import numpy as np
        >>> rows = np.asarray([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
        >>> mean, std = column_moments(lambda part: rows[part], 3)
        >>> mean.tolist(), std.round(4).tolist()
        ([4.0, 5.0], [3.6056, 0.0])
    """
    _checks.check_at_least("n", n, 2)
    origin = np.asarray(read(slice(0, 1)), float)[0]
    count, mean, square = 0, np.zeros_like(origin), np.zeros_like(origin)
    for part in chunks(n):
        values = np.asarray(read(part), float) - origin
        if not np.isfinite(values).all():
            row = part.start + np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1))
            raise ValueError(f"row {row} holds a value that is NaN or infinite.")
        own, total = values.mean(axis=0), count + len(values)
        # S = S_a + S_b + (m_b - m_a)^2 n_a n_b / n, and m = m_a + (m_b - m_a) n_b / n.
        square += np.sum((values - own) ** 2, axis=0) + (own - mean) ** 2 * (count * len(values) / total)
        mean += (own - mean) * (len(values) / total)
        count = total
    return np.asarray(origin + mean), np.asarray(np.sqrt(square / (n - 1)))


def chunks(n: int) -> Iterator[slice]:
    """All rows in chunks of at most two sizes, so that at most two programs are compiled."""
    edges = np.linspace(0, n, -(-n // CHUNK_ROWS) + 1).astype(int).tolist()
    return (slice(start, stop) for start, stop in itertools.pairwise(edges))
