"""Rows in the order of a tree's nodes: the places of every node, its ranked residuals, and its admissible splits."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal._numpy import AnyArray, in_jax, namespace
from jaxcal.functional import _wavelet


class NodeOrder(NamedTuple):
    """Rows in the order of their nodes; the rows of no node come last, like one more node."""

    nodes: AnyArray | None
    """The node of every row [n], or None where there is one node of all rows."""
    node: AnyArray
    """The node at every place [padded]."""
    first: AnyArray
    """The first place of every node [k + 1], and how many rows it has."""
    size: AnyArray
    start: AnyArray
    """The first place of the node at every place [padded], and the first place behind it."""
    end: AnyArray


class Ranked(NamedTuple):
    """Residuals in two orders: as they came, and in increasing order within their nodes."""

    layout: NodeOrder
    residuals: AnyArray
    """[n], minus the node's median, in units of the node's mean deviation from it; 0 for rows of no node."""
    ranks: AnyArray
    """[n], a permutation."""
    ordered: AnyArray
    """[padded], the residuals in the order of their ranks."""
    sums: AnyArray
    """[padded], the sums of the residuals with lower ranks."""


class SplitSearch(eqx.Module):
    """The rows of a search for splits, and which splits are admissible; the attributes are as in `best_splits`."""

    x: Float[AnyArray, "n d"]
    residuals: Float[AnyArray, " n"]
    orders: Int[AnyArray, "d n"] | None
    nodes: Int[AnyArray, " n"] | None
    min_leaf: Int[AnyArray, ""]
    num_nodes: int = eqx.field(static=True)
    center: str = eqx.field(static=True)
    step: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, x: Any, residuals: Any, orders: Any, nodes: Any, min_leaf: int, num_nodes: int, center: str, step: int
    ) -> "SplitSearch":
        """The checked arguments."""
        x = _checks.as_matrix("x", x)
        residuals = _checks.as_vector("residuals", residuals, length=x.shape[0])
        _checks.check_choice("center", center, ("mean", "median"))
        for name, value in (("min_leaf", min_leaf), ("num_nodes", num_nodes), ("step", step)):
            _checks.check_at_least(name, value, 1)
        if nodes is not None:
            nodes = jnp.asarray(in_jax(nodes))  # for NumPy's arrays this compiles no program
            _checks.check_length("nodes", nodes, x.shape[0])
        if orders is not None and (orders := jnp.asarray(orders)).shape != x.shape[::-1]:
            raise ValueError(f"orders must have shape (d, n) = {x.shape[::-1]}; got {orders.shape}.")
        x, residuals = lax.stop_gradient((x, residuals))
        return cls(x, residuals, orders, nodes, in_jax(np.int32(min_leaf)), num_nodes, center, step)

    @property
    def layout(self) -> NodeOrder:
        """The places of the rows of every node."""
        return layout_of(self.nodes, self.x, self.num_nodes)


def layout_of(nodes: AnyArray | None, rows: AnyArray, num_nodes: int) -> NodeOrder:
    """The places of the rows of every node."""
    xp, n = namespace(rows), rows.shape[0]
    places = xp.arange(_wavelet.padded_length(n), dtype=np.int32)
    if nodes is None:
        size = xp.asarray([n, 0], np.int32)
    else:
        nodes = xp.where((nodes >= 0) & (nodes < num_nodes), nodes, num_nodes).astype(np.int32)
        size = number_of_each(nodes, num_nodes + 1)
    first = xp.cumsum(size, dtype=np.int32) - size
    node = xp.searchsorted(first[1:], places, side="right").astype(np.int32)
    return NodeOrder(nodes=nodes, node=node, first=first, size=size, start=first[node], end=(first + size)[node])


def number_of_each(numbers: AnyArray, length: int) -> AnyArray:
    """How often each number below `length` occurs."""
    if namespace(numbers) is np:
        return np.bincount(numbers, minlength=length).astype(np.int32)
    return jnp.zeros(length, jnp.int32).at[numbers].add(1)


def by_node(order: AnyArray, layout: NodeOrder) -> AnyArray:
    """An order of rows, sorted by node; within each node the order does not change."""
    if layout.nodes is None:
        return order
    bits = (layout.first.shape[0] - 1).bit_length()
    return order[_wavelet.stable_order(layout.nodes[order].astype(jnp.uint32), bits)]


def nodes_of_rows(layout: NodeOrder, rows: AnyArray) -> AnyArray:
    """The node of every row [n]."""
    return namespace(rows).zeros(rows.shape[0], np.int32) if layout.nodes is None else layout.nodes


def means_of_nodes(values: AnyArray, layout: NodeOrder) -> AnyArray:
    """The mean of the values [n] of every node's rows [k + 1]."""
    nodes, number, xp = nodes_of_rows(layout, values), layout.size.shape[0], namespace(values)
    by_numpy = lambda: np.bincount(nodes, values, number).astype(values.dtype)
    sums = by_numpy() if xp is np else jax.ops.segment_sum(values, nodes, number)
    return sums / xp.maximum(layout.size, 1).astype(values.dtype)


def over_nodes(kind: str, values: AnyArray, layout: NodeOrder) -> AnyArray:
    """The "max", "min" or "sum" of the values [padded] over the places of every node, [k + 1]."""
    number = layout.size.shape[0]
    if namespace(values) is jnp:
        reduction = getattr(jax.ops, f"segment_{kind}")
        return reduction(values, layout.node, number, indices_are_sorted=True)
    ufunc = {"max": np.maximum, "min": np.minimum, "sum": np.add}[kind]
    nothing = {"max": -np.inf, "min": np.iinfo(np.int32).max, "sum": 0}[kind]
    results, there = np.full(number, nothing, values.dtype), np.unique(layout.node)
    results[there] = ufunc.reduceat(values, np.searchsorted(layout.node, there))
    return results


def rank(residuals: AnyArray, layout: NodeOrder) -> Ranked:
    """Rank and standardize the residuals within their nodes; neither their center nor their unit matters to T."""
    xp, n, nodes = namespace(residuals), residuals.shape[0], nodes_of_rows(layout, residuals)
    order = by_node(_wavelet.float_order(residuals), layout)
    # Prefix sums need centered residuals, in float32 above all. The center is a residual: equal ones become exactly 0.
    centers = residuals[order[xp.minimum(layout.first + layout.size // 2, n - 1)]]
    residuals = residuals - centers[nodes]
    units = means_of_nodes(abs(residuals), layout)
    residuals = xp.where(nodes < layout.first.shape[0] - 1, residuals / xp.where(units > 0, units, 1)[nodes], 0)
    ordered = residuals[order]
    padding = _wavelet.padded_length(n) - n
    return Ranked(
        layout=layout,
        residuals=residuals,
        ranks=_wavelet.inverse(order),
        ordered=xp.pad(ordered, (0, padding)),
        sums=_wavelet.prefix_sums(ordered),
    )


def admissible_cuts(column: AnyArray, layout: NodeOrder, min_leaf: ArrayLike, step: int) -> AnyArray:
    """Whether a cut before each place [padded] may split the node there; `column` is sorted within each node."""
    xp = namespace(column)
    cut = xp.arange(layout.node.shape[0], dtype=np.int32)
    column = xp.pad(column, (1, cut.shape[0] - column.shape[0]))
    num_left = cut - layout.start
    enough = (num_left >= min_leaf) & (layout.end - cut >= min_leaf)
    visited = (num_left - min_leaf) % step == 0
    return enough & visited & (layout.node < layout.first.shape[0] - 1) & (column[:-1] < column[1:])


def centered_deviations(residuals: AnyArray, layout: NodeOrder, center: str) -> AnyArray:
    """|e - center of the node| minus its mean over the node; the residuals are centered on their node's median."""
    nodes = nodes_of_rows(layout, residuals)
    less_mean = lambda values: values - means_of_nodes(values, layout)[nodes]
    return less_mean(abs(less_mean(residuals) if center == "mean" else residuals))
