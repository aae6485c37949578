"""Functions of jax.nn and jax.numpy by name, because most are compiled objects, which cannot be pickled.

A name is the same in every process. So JAX recognizes the compiled programs of an object with a name, also after the
object was saved and loaded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_MODULES = {"jax.nn": vars(jax.nn), "jax.numpy": vars(jnp)}
# This function reads a file. A name in a saved file must not call it.
_NO_FORMULA = "jax.numpy.load"


def named(function: Callable) -> str | Callable:
    """The name of a function of jax.nn or jax.numpy, such as "jax.nn.relu"; any other function unchanged."""
    for module in _MODULES:
        name = f"{module}.{getattr(function, '__name__', '')}"
        if find(name) is function:
            return name
    return function


def function_of(name: str | Callable) -> Callable:
    """The function with a name by `named`; a function unchanged.

    Raises:
        ValueError: if there is no such function.
    """
    function = find(name) if isinstance(name, str) else name
    if function is None:
        raise ValueError(f"{name} is no function of the installed version of JAX.")
    return function


def find(name: str) -> Any:
    """The function of a name; None if there is none."""
    module, _, attribute = name.rpartition(".")
    function = _MODULES.get(module, {}).get(attribute)
    is_function = callable(function) and not isinstance(function, type) and not attribute.startswith("_")
    # jax.numpy also contains functions of NumPy.
    own = str(getattr(function, "__module__", "")).partition(".")[0] == "jax"
    return function if is_function and own and name != _NO_FORMULA else None
