"""Predictions of rows that the model has not seen, by refitting it without them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from jaxcal import _checks
from jaxcal.distributions import Distribution, Point


def out_of_fold(fit: Callable, x: ArrayLike, y: ArrayLike, *, key: PRNGKeyArray, folds: int = 5) -> Distribution:
    """Predict every row by a model that was fitted to the other folds: honest errors without rows set aside.

    A calibrator fitted to them corrects the model that is fitted to all rows, `fit(x, y, key=key)`. That model's errors
    on new rows are a little smaller than those out of fold, its errors on its own rows very much smaller.

    Args:
        fit: `fit(x, y, key=key)` gives a function of inputs whose value is a Distribution or an array of means: any
            predictor of jaxcal with its options as a `functools.partial`, or a few lines around somebody else's.
        x: inputs [n, d]; a vector [n] is one column.
        y: targets [n].
        key: random key of the folds, and of the fits.
        folds: number of folds, whose sizes differ by one row at most; so many models are fitted.

    Returns:
        the predictions of all rows, in their order; a `Point` where the model gives means.

    Raises:
        ValueError: if x or y is empty, not finite or of the wrong shape, there are fewer rows than folds, folds is less
            than 2, or the predictions are of a class whose rows share a table.

    Example:
        >>> import jax, numpy as np, jaxcal as jc
        >>> x, key = np.linspace(-1, 1, 50), jax.random.key(0)
        >>> def fit_line(x, y, *, key):
        ...     slope, intercept = np.polyfit(x[:, 0], y, 1)
        ...     return lambda x: intercept + slope * x[:, 0]
        >>> law = jc.out_of_fold(fit_line, x, x**3, key=key)
        >>> fitted = jc.accrue.fit(x, law, x**3, key=key, model="polynomial")
        >>> final = fit_line(x[:, None], x**3, key=key)
        >>> fitted(x, jc.Point(final(x[:, None]))).std.shape
        (50,)
    """
    x = _checks.as_matrix("x", x)
    y = _checks.as_vector("y", y, length=x.shape[0])
    _checks.check_at_least("folds", folds, 2)
    _checks.check_rows("x", x, folds)
    order_key, *keys = jax.random.split(key, folds + 1)
    order = jax.random.permutation(order_key, x.shape[0])
    parts = jnp.split(order, np.cumsum(_sizes(x.shape[0], folds))[:-1])
    laws = []
    for k, (held_out, fold_key) in enumerate(zip(parts, keys, strict=True)):
        rest = jnp.concatenate(parts[:k] + parts[k + 1 :])
        laws.append(_as_law(fit(x[rest], y[rest], key=fold_key)(x[held_out]), held_out.shape[0]))
    back = jnp.argsort(order)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[back], *laws)


def _sizes(n: int, folds: int) -> list[int]:
    return [n // folds + (k < n % folds) for k in range(folds)]


def _as_law(predicted: Distribution | ArrayLike, rows: int) -> Distribution:
    """The predictions as a Distribution all of whose arrays have a row each."""
    law = predicted if isinstance(predicted, Distribution) else Point(jnp.asarray(predicted))
    leaves: list[Array] = jax.tree.leaves(law)
    if any(leaf.shape[:1] != (rows,) for leaf in leaves):
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"the predictions of {rows} rows are a {type(law).__name__} with arrays of shapes {shapes}; "
            "those of different folds can be put together only where all arrays have a row each."
        )
    return law
