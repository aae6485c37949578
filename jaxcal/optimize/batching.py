"""Many runs of a whole fit, and several attempts at one fit, inside one compiled program."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxcal import _programs, progress
from jaxcal._numpy import can_be_filled, stacked
from jaxcal.functional._loops import carried, over_leading_axis
from jaxcal.optimize.result import Result

T = TypeVar("T")


def first_finite(attempt: Callable[..., PyTree], tries: int, *args: PyTree) -> PyTree:
    """The first result among attempt(*args, 0), attempt(*args, 1), ... that is not NOT_FINITE, or the last one.

    Args:
        attempt: gives a record with a field `result`, a value of `Result`.
        tries: the most attempts.
        args: the arguments of every attempt, before its number.
    """
    run = _ArraysOut(partial(attempt, *args), (None,))

    def failed(state):
        tried, record = state
        return (tried < tries) & (record.result == Result.NOT_FINITE)

    def again(state):
        tried, _ = state
        return tried + 1, carried(traced((tried,)))

    traced = jax.jit(run)  # traced once, not here and in the loop
    shapes = jax.eval_shape(traced, (jnp.int32(0),))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    nothing = eqx.tree_at(lambda n: n.result, nothing, jnp.full_like(nothing.result, Result.NOT_FINITE))
    return run.whole(lax.while_loop(failed, again, carried((jnp.int32(0), nothing)))[1])


def over_runs(fun: Callable[..., PyTree], *, mesh: Mesh | None = None) -> Callable[..., PyTree]:
    """`fun` over the leading axis of its array arguments: one run after another on a CPU, else all in one `vmap`.

    On a CPU a vmap of an optimizer gains nothing, because every run waits for the slowest line search. And a loop over
    batched Cholesky factorizations can hang forever if XLA has two threads. On an accelerator the vmap fills the
    device. The result can be differentiated if `fun` can. All runs share the arguments that are not arrays, and the
    values that `fun` closes over.

    Meant for use inside a jitted function: outside, every call compiles anew.

    Args:
        fun: a run. Its result may hold arrays, and anything else that is the same for all runs.
        mesh: the devices over which the runs are divided as evenly as possible. Every device does its own runs, and
            none waits for another. The results stay on these devices. None for the devices of the arguments.

    Returns:
        a function of arrays with an axis of runs before their own, and of anything else; its results have that axis.

    Raises:
        ValueError: if the arrays differ in the number of runs, or there is no array, so that the number is unknown.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, numpy as np
        >>> from jaxcal.predictors import mlp
        >>> over_runs(lambda x: x**2)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 4.0]
        >>> x, mesh = np.linspace(-1, 1, 40)[:, None], jax.make_mesh((len(jax.devices()),), ("runs",))
        >>> fit = lambda key: mlp.fit(x, np.sin(x[:, 0]), key=key, max_epochs=5)
        >>> networks = eqx.filter_jit(over_runs(fit, mesh=mesh))(jax.random.split(jax.random.key(0), 6))
        >>> networks.training.epochs.shape
        (6,)
    """

    def mapped(*args: PyTree) -> PyTree:
        arrays, static = eqx.partition(args, eqx.is_array)
        run = _ArraysOut(fun, static)
        run_on_device = partial(over_leading_axis, run)
        return run.whole(run_on_device(arrays) if mesh is None else _spread(run_on_device, arrays, mesh))

    return mapped


def each_run(run: Callable[..., T], shared: tuple, own: Sequence[tuple], *, label: str, slots: int) -> T:
    """The results of a run for several arguments, stacked along a leading axis; for known arrays.

    On a CPU the host makes one run after the other, and reports progress. It calls the small programs of a run, which
    all runs share. Elsewhere one program does all runs at once.

    Args:
        run: a function of the shared arguments and of a run's own arguments. At module level it compiles once.
        shared: the arguments that are the same for all runs.
        own: the arguments of each run, pytrees of one structure whose arrays have the same shapes.
        label: the name of the work in progress reports.
        slots: the number of runs of the one program. It repeats the first run if there are fewer.
    """
    with progress.work(label, len(own)) as work:
        if not can_be_filled(shared, own):
            whole = [*own, *[own[0]] * (slots - len(own))]
            results = _all_runs(run, shared, jax.tree.map(lambda *leaves: jnp.stack(leaves), *whole))
            work.report(len(own))
            return jax.tree.map(lambda leaf: leaf[: len(own)], results)
        results = []
        for each in own:
            results.append(run(*shared, *each))
            work.advance()
    return stacked(results)


@_programs.jit
def _all_runs(run: Callable, shared: tuple, own: tuple) -> PyTree:
    return over_runs(partial(run, *shared))(*own)


def _spread(run_on_device: Callable[[PyTree], PyTree], arrays: PyTree, mesh: Mesh) -> PyTree:
    """`run_on_device` of every device's part of the runs, joined along the axis of runs.

    Some runs are repeated if they cannot be divided into equal parts.
    """
    lengths = {a.shape[:1] for a in jax.tree.leaves(arrays)}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(f"all arrays need one leading axis of runs; their shapes begin with {sorted(lengths)}.")
    ((number,),) = lengths
    numbers = np.arange(-(-number // mesh.size) * mesh.size)
    if len(numbers) > number:
        arrays = jax.tree.map(lambda a: a[numbers % number], arrays)
    if AxisType.Explicit in mesh.axis_types:  # as in meshes of `jax.make_mesh`
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    runs = PartitionSpec(mesh.axis_names)
    # Every result belongs to a device's own runs, so that there is nothing to check. And the check refuses a loop of
    # `fun` that begins with a constant.
    spread = jax.shard_map(run_on_device, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.tree.map(lambda a: a[:number], jax.jit(spread)(arrays))


def one_run_at_a_time(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, with the rule that a `vmap` of it becomes `over_runs`.

    XLA's CPU client with a pool of two threads can hang forever in a batched loop with a line search over Cholesky
    factorizations. With this function around the loop, `vmap` is safe on every device. All runs share the arguments
    that are not arrays.
    """

    def guarded(*args: PyTree) -> PyTree:
        arrays, static = eqx.partition(args, eqx.is_array)
        run = _ArraysOut(fun, static)
        return run.whole(_with_rule(run)(arrays))

    return guarded


def _with_rule(run: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The rule of `one_run_at_a_time`, for a function of one tuple of arrays."""
    safe = jax.custom_batching.custom_vmap(run)

    @safe.def_vmap
    def rule(axis_size, in_batched, arrays):
        del axis_size
        batched, shared = eqx.partition(arrays, in_batched[0])
        out = lax.platform_dependent(
            batched,
            cpu=partial(lax.map, lambda batched: safe(eqx.combine(batched, shared))),
            default=jax.vmap(lambda batched: run(eqx.combine(batched, shared))),
        )
        return out, jax.tree.map(lambda _: True, out)

    return safe


class _ArraysOut:
    """A function from one tuple of arrays to arrays; its other results, the same in every call, are kept."""

    def __init__(self, fun: Callable[..., PyTree], static: PyTree):
        self.fun, self.static, self.rest = fun, static, None

    def __call__(self, arrays: PyTree) -> PyTree:
        out, self.rest = eqx.partition(self.fun(*eqx.combine(arrays, self.static)), eqx.is_array)
        return out

    def whole(self, arrays: PyTree) -> PyTree:
        """The function's result, with these arrays."""
        return eqx.combine(arrays, self.rest)
