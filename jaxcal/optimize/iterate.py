"""One loop for two worlds: Python around an evaluation, or `lax.while_loop` inside of a caller's transformation.

A search is an `evaluate`, which is expensive, and an `advance`, which decides what to evaluate next. The host runs one
after the other, `advance` in NumPy: nothing but the evaluation is ever compiled, if it is. Inside of `jit`, `vmap` or
`grad` both are one compiled loop. `advance` has one source, written by `xp.where` and `when`, without other branches on
values.
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
    """The state that is reached by `advance(xp, state, evaluate(state))`, again and again, while it is unfinished.

    Args:
        evaluate: what is asked at a state.
        advance: the next state; `xp` is NumPy on the host, else `jax.numpy`.
        state: the first one, a pytree of arrays: of NumPy's on the host.
        unfinished: a boolean of a state.
        on_host: whether nothing is traced, so that a Python loop can do it.

    Example:
        >>> halved = lambda xp, state, found: state - found
        >>> iterate(lambda state: state / 2, halved, np.float64(8), lambda state: state > 1, on_host=True).item()
        1.0
    """
    if on_host:
        with np.errstate(all="ignore"):  # what is not finite is told by values, as under a transformation
            while unfinished(state):
                state = advance(np, state, evaluate(state))
        return state
    return lax.while_loop(unfinished, lambda state: advance(jnp, state, evaluate(state)), carried(state))


def when(xp: ModuleType, condition: Any, made: Callable[[], S], otherwise: S) -> S:
    """`made()` where a condition holds, else what is there: a part of `advance` that is worth a branch.

    Under `vmap` both are computed. In a program what is made has the shapes and dtypes of what is there.

    Example:
        >>> when(np, 2 > 1, lambda: "made", "there"), int(when(jnp, jnp.array(False), lambda: 1, 0))
        ('made', 0)
    """
    if xp is np:
        return made() if condition else otherwise
    return lax.cond(condition, lambda: carried(made()), lambda: carried(otherwise))
