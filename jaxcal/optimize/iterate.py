"""One loop in two forms: a Python loop around an evaluation, or `lax.while_loop` inside a transformation.

A search is an `evaluate`, which is expensive, and an `advance`, which decides where to evaluate next. The host runs one
after the other, with `advance` in NumPy. Then at most the evaluation is compiled. Inside `jit`, `vmap` or `grad` both
are one compiled loop. `advance` has one source for both, which branches on values by `xp.where` and `when` alone.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcal.functional._loops import carried

S = TypeVar("S")


def iterate(
    evaluate: Callable[[S], Any],
    advance: Callable[[ModuleType, S, Any], S],
    state: S,
    unfinished: Callable[[S], Any],
    *,
    on_host: bool,
) -> S:
    """The final state after repeated `state = advance(xp, state, evaluate(state))`, while it is unfinished.

    Args:
        evaluate: gives the evaluation that a state asks for.
        advance: gives the next state; `xp` is NumPy on the host, else `jax.numpy`.
        state: the first state, a pytree of arrays: NumPy's on the host.
        unfinished: gives a boolean of a state.
        on_host: whether to loop in Python; nothing may be traced then.

    Example:
        >>> halved = lambda xp, state, found: state - found
        >>> iterate(lambda state: state / 2, halved, np.float64(8), lambda state: state > 1, on_host=True).item()
        1.0
    """
    if on_host:
        with np.errstate(all="ignore"):  # the values themselves show what is not finite, as under a transformation
            while unfinished(state):
                state = advance(np, state, evaluate(state))
        return state
    return lax.while_loop(unfinished, lambda state: advance(jnp, state, evaluate(state)), carried(state))


def when(xp: ModuleType, condition: Any, made: Callable[[], S], otherwise: S) -> S:
    """`made()` if a condition holds, else `otherwise`; for a part of `advance` that is worth a branch.

    Under `vmap` both are computed. In a program both must have the same shapes and dtypes.

    Example:
        >>> when(np, 2 > 1, lambda: "made", "there"), int(when(jnp, jnp.array(False), lambda: 1, 0))
        ('made', 0)
    """
    if xp is np:
        return made() if condition else otherwise
    return lax.cond(condition, lambda: carried(made()), lambda: carried(otherwise))
