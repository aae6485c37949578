"""Many runs of a whole fit, and several attempts at one, inside of one compiled program."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxcal.optimize.result import Result


def first_finite(attempt: Callable[[Int[Array, ""]], PyTree], tries: int) -> PyTree:
    """The result of attempt(0), or of the first of attempt(1), attempt(2), ... that does not end in NaN.

    Args:
        attempt: gives a record of arrays, one of them its `result`, a value of `Result`.
        tries: how often at most.
    """

    def failed(state):
        tried, found = state
        return (tried < tries) & (found.result == Result.NOT_FINITE)

    def again(state):
        tried, _ = state
        return tried + 1, attempt(tried)

    attempt = jax.jit(attempt)  # traced once, not here and in the loop
    shapes = jax.eval_shape(attempt, jnp.int32(0))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    nothing = eqx.tree_at(lambda n: n.result, nothing, jnp.full_like(nothing.result, Result.NOT_FINITE))
    return lax.while_loop(failed, again, (jnp.int32(0), nothing))[1]


def over_runs(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun` over the leading axis of its array arguments: one run after another on a CPU, else all in one `vmap`.

    On a CPU a vmap of an optimizer gains nothing: every run waits for the slowest line search. On an accelerator
    it is what fills the device. Arguments that are not arrays are shared by all runs.

    Example:
        >>> import jax.numpy as jnp
        >>> over_runs(lambda x: x**2)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 4.0]
    """

    def mapped(*args: PyTree) -> PyTree:
        arrays, static = eqx.partition(args, eqx.is_array)
        # What is not an array is the same in every run, so the trace of one run tells it.
        static_out = []

        def run(arrays):
            out_arrays, out = eqx.partition(fun(*eqx.combine(arrays, static)), eqx.is_array)
            static_out.append(out)
            return out_arrays

        run = jax.jit(run)  # traced once for both
        out_arrays = lax.platform_dependent(arrays, cpu=partial(lax.map, run), default=jax.vmap(run))
        return eqx.combine(out_arrays, static_out[0])

    return mapped


def one_run_at_a_time(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, with the rule that a `vmap` of it becomes `over_runs`.

    XLA's CPU client with a pool of two threads can hang for ever in a batched loop that holds a line search over
    Cholesky factorizations. With this around the loop, `vmap` is safe on every device. `fun` takes and returns
    pytrees of arrays.
    """
    safe = jax.custom_batching.custom_vmap(fun)

    @safe.def_vmap
    def rule(axis_size, in_batched, *args):
        del axis_size
        batched = jax.tree.map(lambda a, b: a if b else None, args, tuple(in_batched))
        shared = jax.tree.map(lambda a, b: None if b else a, args, tuple(in_batched))
        out = lax.platform_dependent(
            batched,
            cpu=partial(lax.map, lambda batched: safe(*eqx.combine(batched, shared))),
            default=jax.vmap(lambda batched: fun(*eqx.combine(batched, shared))),
        )
        return out, jax.tree.map(lambda _: True, out)

    return safe
