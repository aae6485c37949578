"""How functions become programs: with exact products, and compiled as quickly as they still run well."""

import contextlib
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
from jax.core import eval_context
from jax.extend.core import get_opaque_trace_state

P = ParamSpec("P")
T = TypeVar("T")

# By backend. They halve the time to compile an evaluation of a Gaussian process on a CPU, 1.3 to .65 s, at no cost to
# run. On an accelerator the defaults are as good.
_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_cpu_use_fusion_emitters": False,
        "xla_backend_optimization_level": 1,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
}


def exact_products(function: Callable[P, T]) -> Callable[P, T]:
    """The function with products of matrices in the precision of their dtype.

    By default accelerators round what they multiply to 10 bits or fewer, which no evidence survives.

    Example:
        >>> import jax.numpy as jnp
        >>> square = exact_products(lambda x: x @ x)
        >>> "HIGHEST" in str(jax.make_jaxpr(square)(jnp.eye(2)))
        True
    """

    @wraps(function)
    def precise(*args: P.args, **options: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return function(*args, **options)

    return precise


def jit(function: Callable[P, T]) -> Callable[P, T]:
    """`equinox.filter_jit`, with the compile options of the backend.

    JAX takes options at top level alone; inside of a caller's transformation the function is a part of the caller's
    program. What the user says by `XLA_FLAGS` or `jax_disable_most_optimizations` goes before.
    """
    plain = eqx.filter_jit(function)

    @cache
    def with_options(backend: str) -> Callable[P, T]:
        jitted: Any = eqx.filter_jit  # hands what it does not know to `jax.jit`
        return jitted(function, compiler_options=_OPTIONS[backend])

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        backend = jax.default_backend()
        if not (is_at_top() and _has_options(backend)):
            return plain(*args, **options)
        return with_options(backend)(*args, **options)

    return call


def at_top() -> contextlib.AbstractContextManager[None]:
    """In it known arrays are computed with as if no transformation were at work around, which would take them in."""
    return eval_context()


def is_at_top() -> bool:
    """Whether no transformation is at work around."""
    return get_opaque_trace_state() == _top()


@cache
def _top() -> Any:
    """The state without a transformation."""
    with at_top():
        return get_opaque_trace_state()


@cache
def _has_options(backend: str) -> bool:
    """Whether a backend has options that the user left open, and that this version of XLA knows."""
    options = _OPTIONS.get(backend)
    if options is None or jax.config.read("jax_disable_most_optimizations"):
        return False
    if any(name in os.environ.get("XLA_FLAGS", "") for name in options):
        return False
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
