"""Rows node after node: where the rows of every node of a tree lie, their residuals ranked, and where it may split."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from jaxcal import _checks
from jaxcal.functional import _wavelet


class Layout(NamedTuple):
    """Rows node after node; those of no node come last, as if in a node of their own."""

    nodes: Array | None
    """The node of every row [n], or None where there is one node of all rows."""
    node: Array
    """The node at every place [padded]."""
    first: Array
    """The first place of every node [k + 1], and how many rows it has."""
    size: Array
    start: Array
    """The first place of the node at every place [padded], and the first place behind it."""
    end: Array


class Ranked(NamedTuple):
    """Residuals in two orders: as they came, and in increasing order within their nodes."""

    layout: Layout
    residuals: Array
    """[n], less the median of the node, in units of the mean deviation from it; 0 in no node."""
    ranks: Array
    """[n], a permutation."""
    ordered: Array
    """[padded], by rank."""
    sums: Array
    """[padded], of those with lower ranks."""


class Problem(eqx.Module):
    """Rows in which splits are searched, and which splits are admissible; the attributes are those of `best_splits`."""

    x: Float[Array, "n d"]
    residuals: Float[Array, " n"]
    orders: Int[Array, "d n"] | None
    nodes: Int[Array, " n"] | None
    min_leaf: Int[Array, ""]
    num_nodes: int = eqx.field(static=True)
    center: str = eqx.field(static=True)
    step: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, x: Any, residuals: Any, orders: Any, nodes: Any, min_leaf: int, num_nodes: int, center: str, step: int
    ) -> "Problem":
        """What was given, checked."""
        x = _checks.as_matrix("x", x)
        residuals = _checks.as_vector("residuals", residuals, length=x.shape[0])
        _checks.check_choice("center", center, ("mean", "median"))
        for name, value in (("min_leaf", min_leaf), ("num_nodes", num_nodes), ("step", step)):
            _checks.check_at_least(name, value, 1)
        if nodes is not None:
            nodes = jnp.asarray(nodes)
            _checks.check_length("nodes", nodes, x.shape[0])
        if orders is not None and (orders := jnp.asarray(orders)).shape != x.T.shape:
            raise ValueError(f"orders must have shape (d, n) = {x.T.shape}; got {orders.shape}.")
        x, residuals = lax.stop_gradient((x, residuals))
        return cls(x, residuals, orders, nodes, jnp.asarray(min_leaf), num_nodes, center, step)

    @property
    def layout(self) -> Layout:
        """Where the rows of every node lie."""
        return layout_of(self.nodes, self.x.shape[0], self.num_nodes)


def layout_of(nodes: Array | None, n: int, num_nodes: int) -> Layout:
    """Where the rows of every node lie."""
    places = jnp.arange(_wavelet.padded_length(n), dtype=jnp.int32)
    if nodes is None:
        size = jnp.array([n, 0], jnp.int32)
    else:
        nodes = jnp.where((nodes >= 0) & (nodes < num_nodes), nodes, num_nodes).astype(jnp.int32)
        size = jnp.zeros(num_nodes + 1, jnp.int32).at[nodes].add(1)
    first = jnp.cumsum(size) - size
    node = jnp.searchsorted(first[1:], places, side="right").astype(jnp.int32)
    return Layout(nodes=nodes, node=node, first=first, size=size, start=first[node], end=(first + size)[node])


def by_node(order: Array, layout: Layout) -> Array:
    """An order of rows, kept within each node."""
    if layout.nodes is None:
        return order
    bits = (layout.first.shape[0] - 1).bit_length()
    return order[_wavelet.stable_order(layout.nodes[order].astype(jnp.uint32), bits)]


def nodes_of_rows(layout: Layout, n: int) -> Array:
    """The node of every row [n]."""
    return jnp.zeros(n, jnp.int32) if layout.nodes is None else layout.nodes


def means_of_nodes(values: Array, layout: Layout) -> Array:
    """The mean of the values [n] of every node's rows [k + 1]."""
    nodes = nodes_of_rows(layout, values.shape[0])
    sums = jax.ops.segment_sum(values, nodes, layout.size.shape[0])
    return sums / jnp.maximum(layout.size, 1).astype(values.dtype)


def rank(residuals: Array, layout: Layout) -> Ranked:
    """Rank and standardize the residuals within their nodes: T has no unit."""
    n, nodes = residuals.shape[0], nodes_of_rows(layout, residuals.shape[0])
    order = by_node(_wavelet.float_order(residuals), layout)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(n, dtype=order.dtype), unique_indices=True)
    # Prefix sums need it, in float32 above all. A residual as the center leaves nothing of equal ones.
    centers = residuals[order[jnp.minimum(layout.first + layout.size // 2, n - 1)]]
    residuals = residuals - centers[nodes]
    units = means_of_nodes(jnp.abs(residuals), layout)
    residuals = jnp.where(nodes < layout.first.shape[0] - 1, residuals / jnp.where(units > 0, units, 1)[nodes], 0)
    ordered = residuals[order]
    padding = _wavelet.padded_length(n) - n
    return Ranked(
        layout=layout,
        residuals=residuals,
        ranks=ranks,
        ordered=jnp.pad(ordered, (0, padding)),
        sums=_wavelet.prefix_sums(ordered),
    )


def admissible_cuts(column: Array, layout: Layout, min_leaf: ArrayLike, step: int) -> Array:
    """Whether a cut before each place [padded] may split the node there; `column` is in order within the nodes."""
    cut = jnp.arange(layout.node.shape[0], dtype=jnp.int32)
    column = jnp.pad(column, (1, cut.shape[0] - column.shape[0]))
    num_left = cut - layout.start
    enough = (num_left >= min_leaf) & (layout.end - cut >= min_leaf)
    visited = (num_left - min_leaf) % step == 0
    return enough & visited & (layout.node < layout.first.shape[0] - 1) & (column[:-1] < column[1:])


def centered_deviations(residuals: Array, layout: Layout, center: str) -> Array:
    """|e - center of the node| less its mean over the node; the residuals are centered on a median."""
    nodes = nodes_of_rows(layout, residuals.shape[0])
    less_mean = lambda values: values - means_of_nodes(values, layout)[nodes]
    return less_mean(jnp.abs(less_mean(residuals) if center == "mean" else residuals))
