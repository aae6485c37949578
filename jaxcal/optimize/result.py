"""The result of an optimization, and how it ended."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxcal import _checks
from jaxcal._numpy import JaxArray, namespace


class Result(enum.IntEnum):
    """How an optimization ended: the values that an array of result codes holds."""

    CONVERGED = 0
    """The stopping rule was met."""
    STEP_LIMIT = 1
    """The allowed number of steps or epochs was used up first."""
    NOT_FINITE = 2
    """The loss became NaN or infinite, and the loop ended."""


class Optimum(NamedTuple):
    """The result of an optimization; its arrays are NumPy's if the host searched.

    Attributes:
        params: the parameters, in the form of the initial parameters.
        loss: the lowest loss met, on the validation rows if there are any. After a fixed number of steps the last loss.
        steps: how many steps or epochs were run.
        result: one of the values of `Result`.
    """

    params: PyTree
    loss: Float[JaxArray, ""]
    steps: Int[JaxArray, ""]
    result: Int[JaxArray, ""]


def raise_unless_finite(optimum: Optimum) -> None:
    """Raise FloatingPointError if a loss became NaN or infinite; inside a transformation, do nothing."""
    if _checks.is_traced(optimum.result):
        return
    if np.any(np.asarray(optimum.result) == Result.NOT_FINITE):
        raise FloatingPointError(
            f"training diverged: the loss is NaN or infinite after {np.max(optimum.steps)} epochs. "
            "A lower learning_rate may help; throw=False returns the parameters as they are."
        )


def lowest(optima: Optimum) -> Optimum:
    """The optimum of the lowest loss among optima stacked along the leading axis of every array.

    NaN counts as the greatest loss.
    """
    xp = namespace(optima.loss)
    best = xp.argmin(xp.where(xp.isnan(optima.loss), np.inf, optima.loss))
    return jax.tree.map(lambda leaf: leaf[best], optima)


class EarlyStopping(NamedTuple):
    """The state of early stopping: the best parameters so far, by a validation loss.

    Attributes:
        params: the parameters of the lowest loss; None if they are not asked for.
        loss: the lowest loss.
        stale: the number of steps (or epochs) in a row without a lower loss.
    """

    params: PyTree
    loss: Float[Array, ""]
    stale: Int[Array, ""]

    @classmethod
    def before(cls, params: PyTree, dtype: jnp.dtype) -> "EarlyStopping":
        """The state before the first comparison."""
        return cls(params, jnp.asarray(jnp.inf, dtype), jnp.zeros((), jnp.int32))

    def after(self, params: PyTree, loss: Float[Array, ""]) -> "EarlyStopping":
        """The state after these parameters have been compared, too; NaN is no improvement."""
        improved = loss < self.loss
        kept = None if self.params is None else select(improved, params, self.params)
        return EarlyStopping(kept, jnp.where(improved, loss, self.loss), jnp.where(improved, 0, self.stale + 1))


def select(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """The pytree `new` if the condition holds, else `old`; their arrays have the same shapes."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
