"""Many runs of a whole fit, and several attempts at one, inside of one compiled program."""

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
    """The result of attempt(*args, 0), or of the first of attempt(*args, 1), ... that does not end in NaN.

    Args:
        attempt: gives a record, one of whose arrays is its `result`, a value of `Result`.
        tries: how often at most.
        args: of every attempt, before its number.
    """
    run = _ArraysOut(partial(attempt, *args), (None,))

    def failed(state):
        tried, found = state
        return (tried < tries) & (found.result == Result.NOT_FINITE)

    def again(state):
        tried, _ = state
        return tried + 1, carried(traced((tried,)))

    traced = jax.jit(run)  # once, not here and in the loop
    shapes = jax.eval_shape(traced, (jnp.int32(0),))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    nothing = eqx.tree_at(lambda n: n.result, nothing, jnp.full_like(nothing.result, Result.NOT_FINITE))
    return run.whole(lax.while_loop(failed, again, carried((jnp.int32(0), nothing)))[1])


def over_runs(fun: Callable[..., PyTree], *, mesh: Mesh | None = None) -> Callable[..., PyTree]:
    """`fun` over the leading axis of its array arguments: one run after another on a CPU, else all in one `vmap`.

    On a CPU a vmap of an optimizer gains nothing: every run waits for the slowest line search; and a loop over batched
    Cholesky factorizations can hang for ever where XLA has two threads. On an accelerator it is what fills the device.
    It can be differentiated if `fun` can. Arguments that are not arrays are shared by all runs, and so is what `fun`
    closes over.

    Meant for use inside of a jitted function: outside, every call compiles anew.

    Args:
        fun: a run; what it gives may hold arrays and anything else that is the same for all runs.
        mesh: devices over which the runs are spread, as evenly as they go: every device does its own, and none waits
            for another. The results stay where they are. None for wherever the arguments are.

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
        of_device = partial(over_leading_axis, run)
        return run.whole(of_device(arrays) if mesh is None else _spread(of_device, arrays, mesh))

    return mapped


def each_run(run: Callable[..., T], shared: tuple, own: Sequence[tuple], *, label: str, slots: int) -> T:
    """What a run gives for each of some arguments, stacked along a leading axis; for known arrays.

    On a CPU the host goes from run to run, and reports. What it calls there are the small programs of a run, which
    all runs share. Elsewhere one program does all runs at once.

    Args:
        run: a function of the shared arguments and of its own ones; one at module level compiles once.
        shared: what is the same for all runs.
        own: what each run has for itself, pytrees of one structure whose arrays have the same shapes.
        label: of the work.
        slots: for how many runs the one program is made; it does the first run again in place of those that lack.
    """
    with progress.work(label, len(own)) as work:
        if not can_be_filled(shared, own):
            whole = [*own, *[own[0]] * (slots - len(own))]
            found = _all_runs(run, shared, jax.tree.map(lambda *leaves: jnp.stack(leaves), *whole))
            work.report(len(own))
            return jax.tree.map(lambda leaf: leaf[: len(own)], found)
        found = []
        for each in own:
            found.append(run(*shared, *each))
            work.advance()
    return stacked(found)


@_programs.jit
def _all_runs(run: Callable, shared: tuple, own: tuple) -> PyTree:
    return over_runs(partial(run, *shared))(*own)


def _spread(of_device: Callable[[PyTree], PyTree], arrays: PyTree, mesh: Mesh) -> PyTree:
    """A function of arrays with an axis of runs, of every device's part of the runs.

    Some runs are repeated where they do not make up equal parts.
    """
    lengths = {a.shape[:1] for a in jax.tree.leaves(arrays)}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(f"all arrays need one leading axis of runs; their shapes begin with {sorted(lengths)}.")
    ((number,),) = lengths
    numbers = np.arange(-(-number // mesh.size) * mesh.size)
    if len(numbers) > number:
        arrays = jax.tree.map(lambda a: a[numbers % number], arrays)
    if AxisType.Explicit in mesh.axis_types:  # as `jax.make_mesh` gives them
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    runs = PartitionSpec(mesh.axis_names)
    # Every result is that of a device's own runs, so that there is nothing to check; and the check refuses a loop of
    # `fun` that begins with a constant.
    spread = jax.shard_map(of_device, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.tree.map(lambda a: a[:number], jax.jit(spread)(arrays))


def one_run_at_a_time(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, with the rule that a `vmap` of it becomes `over_runs`.

    XLA's CPU client with a pool of two threads can hang for ever in a batched loop that holds a line search over
    Cholesky factorizations. With this around the loop, `vmap` is safe on every device. Arguments that are not arrays
    are shared by all runs.
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
    """A function of one tuple of arrays, and to arrays; what else it gives, the same in every call, is kept."""

    def __init__(self, fun: Callable[..., PyTree], static: PyTree):
        self.fun, self.static, self.rest = fun, static, None

    def __call__(self, arrays: PyTree) -> PyTree:
        out, self.rest = eqx.partition(self.fun(*eqx.combine(arrays, self.static)), eqx.is_array)
        return out

    def whole(self, arrays: PyTree) -> PyTree:
        """What the function gave, with these arrays."""
        return eqx.combine(arrays, self.rest)
