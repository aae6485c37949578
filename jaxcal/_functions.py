"""Functions of jax.nn and jax.numpy by name: most are compiled objects, which cannot be pickled.

A name is the same in every process: what holds one, and was saved and loaded, is known to be compiled already.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_MODULES = {"jax.nn": vars(jax.nn), "jax.numpy": vars(jnp)}
# It reads a file: a name that comes from a file must not make it do so.
_NO_FORMULA = "jax.numpy.load"


def named(function: Callable) -> str | Callable:
    """The name of a function of jax.nn or jax.numpy, "jax.nn.relu"; any other function as it is."""
    for module in _MODULES:
        name = f"{module}.{getattr(function, '__name__', '')}"
        if find(name) is function:
            return name
    return function


def function_of(name: str | Callable) -> Callable:
    """The function that `named` gave the name of; a function as it is.

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
    found = _MODULES.get(module, {}).get(attribute)
    is_function = callable(found) and not isinstance(found, type) and not attribute.startswith("_")
    # jax.numpy has functions of NumPy, too.
    own = str(getattr(found, "__module__", "")).partition(".")[0] == "jax"
    return found if is_function and own and name != _NO_FORMULA else None
