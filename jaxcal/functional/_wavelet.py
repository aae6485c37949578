"""Sorting, prefix sums and queries about ranks in prefixes of a list, in operations that are fast in XLA.

A wavelet tree holds a permutation: n items in one order, and their ranks 0..n-1 in another order. Every level of the
tree lists the items again, grouped by the leading bits of their ranks. Each level uses one bit more than the level
before it. A group is a node, and its items stay in the first order. As the ranks are distinct, the node of the ranks
s, s + 1, ... starts at place s of its level's list.

A query follows one path through the tree:

- `count_and_sum_below`: how many of the first i items have a rank below v, and the sum of their values.
- `select`: the k-th smallest rank of the first i items, or of the items after them.

All queries of a list go down the tree together, with a few gathers per level. A level is made when it is needed. In all
this takes O(n log n) time and O(n) memory.

XLA's cumulative sums along a vector are slow on a CPU, and so are its sorts of anything but single integers. Sums down
the columns of a matrix, row after row, take an eighth of the time. A sort of integers that hold a key and, in their low
bits, its place takes a seventh of the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int, Real, UInt

from jaxcal._numpy import AnyArray, namespace
from jaxcal.functional._loops import scan

# The number of rows of the matrix down whose columns prefix sums run, a power of two.
_ROWS_LOG2 = 5
_ROWS = 1 << _ROWS_LOG2


def padded_length(n: int) -> int:
    """The least multiple of `_ROWS` above n, so that there is a prefix of every length from 0 to n."""
    return _ROWS * (n // _ROWS + 1)


def stable_order(keys: UInt[AnyArray, " n"], bits: int) -> Int[AnyArray, " n"]:
    """The places of unsigned integers of `bits` bits in increasing order; equal integers keep their order.

    This is a radix sort from the last digit on. Each pass sorts the digit and the place as one integer. NumPy's arrays
    are sorted by NumPy.
    """
    if namespace(keys) is np:
        return np.argsort(keys, kind="stable").astype(np.int32)
    word, place_bits, digit_bits = _digits(keys.shape[0])
    places = jnp.arange(keys.shape[0], dtype=word)
    order = jnp.arange(keys.shape[0], dtype=jnp.int32)
    for low in range(0, bits, digit_bits):
        digits = (keys[order] >> low).astype(word) & ((1 << min(digit_bits, bits - low)) - 1)
        packed = lax.sort((digits << place_bits) | places, is_stable=False)
        order = order[(packed & ((1 << place_bits) - 1)).astype(jnp.int32)]
    return order


def float_order(values: Float[AnyArray, " n"]) -> Int[AnyArray, " n"]:
    """The places of floating-point numbers in increasing order; equal numbers keep their order."""
    if namespace(values) is np:
        return np.argsort(values, kind="stable").astype(np.int32)
    bits = jnp.finfo(values.dtype).bits
    unsigned = {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[bits]
    raw = lax.bitcast_convert_type(jnp.where(values == 0, 0, values), unsigned)  # no -0.0
    sign = unsigned(1 << (bits - 1))
    # Integers in the order of the numbers: the sign bit of positive ones is set, all bits of negative ones are flipped.
    keys = jnp.where(raw < sign, raw | sign, ~raw)
    digit_bits = _digits(values.shape[0])[2]
    if bits == 64:
        # One pass over the leading bits puts nearly all numbers in order.
        order = stable_order(keys >> (bits - digit_bits), digit_bits)
        is_sorted = (keys[order][:-1] <= keys[order][1:]).all()
        return lax.cond(is_sorted, lambda: order, lambda: stable_order(keys, bits))
    return stable_order(keys, bits)


def inverse(order: Int[AnyArray, " n"]) -> Int[AnyArray, " n"]:
    """The rank of every item, from the places of the items in increasing order."""
    xp = namespace(order)
    return moved(xp.arange(order.shape[0], dtype=order.dtype), order)


def moved(values: Real[AnyArray, " n"], targets: Int[AnyArray, " n"]) -> Real[AnyArray, " n"]:
    """The permuted values: each value moves to its target place."""
    if namespace(values, targets) is np:
        permuted = np.empty_like(values)
        permuted[targets] = values
        return permuted
    return jnp.zeros_like(values).at[targets].set(values, unique_indices=True)


def _digits(n: int) -> tuple[Any, int, int]:
    """The largest available unsigned integer type, and how many of its bits hold a place in n, and a digit."""
    word = jax.dtypes.canonicalize_dtype(jnp.uint64)  # uint32 where x64 is off
    place_bits = n.bit_length()
    return word, place_bits, jnp.iinfo(word).bits - place_bits


def prefix_sums(values: Real[AnyArray, " n"]) -> Real[AnyArray, " padded"]:
    """The sums of the first 0, 1, ..., `padded_length(n)` - 1 values, which are padded with zeros."""
    return _sums_before(_as_columns(values, padded_length(values.shape[0])))[0].T.ravel()


def count_and_sum_below(
    ranks: Int[AnyArray, " n"],
    values: Float[AnyArray, " n"],
    sums_by_rank: Float[AnyArray, " padded"],
    bounds: Sequence[Int[AnyArray, " padded"]],
) -> list[tuple[Int[AnyArray, " padded"], Float[AnyArray, " padded"]]]:
    """For each array of bounds: how many of the first i items have a rank below bounds[i], and the sum of their values.

    Let c be the number of the first i items in the present node. Let u be the sum of all values before the c-th item of
    the node, in the level's list. A step to the right adds the drop of c to the count, and the drop of u to the sum.
    The values that precede the node are in u, too. Over all steps they telescope to the sum of all values with ranks
    below the bound. So every change of direction adds or subtracts one c and one u.

    Args:
        ranks: [n], a permutation.
        values: [n], the summands.
        sums_by_rank: the `prefix_sums` of the values in the order of their ranks.
        bounds: [padded_length(n)] each, at most n.
    """
    n, xp = ranks.shape[0], namespace(ranks)

    def step(bit: AnyArray, before: tuple, queries: tuple) -> tuple:
        zeros, sums = before

        def descend(bound: AnyArray, query: tuple) -> tuple:
            inside, count, total = query
            start, right = _node_start(bound, bit), (bound >> bit) & 1
            # Items that go to the left: zeros before the place, minus the zeros of the full nodes before this one.
            place = _address(start + inside, n)
            on_left = zeros[place] - (start >> 1)
            # 1 where the path turns to the right, -1 where it turns to the left, 0 where it keeps its direction.
            turn = right - ((bound >> (bit + 1)) & 1)
            total = total + sums[place] * turn.astype(total.dtype)
            return xp.where(right == 1, inside - on_left, on_left), count + inside * turn, total

        return tuple(descend(*pair) for pair in zip(bounds, queries, strict=True))

    prefix = xp.arange(padded_length(n), dtype=np.int32)
    queries = tuple((prefix, xp.zeros_like(prefix), sums_by_rank[bound]) for bound in bounds)
    queries = _descend((ranks, values), queries, step)
    return [
        (count - inside * (bound & 1), total - sums_by_rank[bound + inside] * (bound & 1).astype(total.dtype))
        for bound, (inside, count, total) in zip(bounds, queries, strict=True)
    ]


def select(
    ranks: Int[AnyArray, " n"],
    in_prefixes: Sequence[tuple[AnyArray, AnyArray]],
    in_suffixes: Sequence[tuple[AnyArray, AnyArray]],
) -> tuple[list[AnyArray], list[AnyArray]]:
    """The k-th smallest rank (from 0) of the first i items, or of all but the first i, for arrays of pairs (i, k).

    Where there are fewer than k + 1 such items, the result has no meaning.
    """
    n, xp = ranks.shape[0], namespace(ranks)
    padded = padded_length(n)

    def step(bit: AnyArray, before: tuple, queries: tuple) -> tuple:
        (zeros,) = before

        def descend(query: tuple, suffix: bool) -> tuple:
            start, inside, k = query
            first = zeros[_address(xp.minimum(start + inside, padded - 1), n)] - (start >> 1)
            on_left = xp.clip(padded - start, 0, 1 << bit) - first if suffix else first
            right = k >= on_left
            inside = xp.where(right, inside - first, first)
            return xp.where(right, start + (1 << bit), start), inside, xp.where(right, k - on_left, k)

        prefixes, suffixes = queries
        return tuple(descend(query, False) for query in prefixes), tuple(descend(query, True) for query in suffixes)

    groups = (in_prefixes, in_suffixes)
    queries = tuple(tuple((xp.zeros_like(i), i, k) for i, k in group) for group in groups)
    prefixes, suffixes = _descend((ranks,), queries, step)
    return [query[0] for query in prefixes], [query[0] for query in suffixes]


def _descend(items: tuple, queries: Any, step: Callable) -> Any:
    """Take queries down the tree: step(bit, (zeros, sums of values, ...) before each place, queries) -> queries.

    `items` holds the ranks of the items [n], and then arrays of their values [n].
    """
    n, xp = items[0].shape[0], namespace(*items)
    padded = padded_length(n)
    places = _as_columns(xp.arange(padded, dtype=np.int32), padded)
    ranks, *values = (_as_columns(part, padded) for part in items)
    ranks = xp.where(places < n, ranks, places)

    def level(state: tuple, bit: AnyArray) -> tuple[tuple, None]:
        (ranks, *values), queries = state
        one = (ranks >> bit) & 1
        zeros, *sums = _sums_before(1 - one, *values)
        queries = step(bit, tuple(part.ravel() for part in (zeros, *sums)), queries)
        zeros_of_nodes_before = _node_start(ranks, bit) >> 1  # those nodes are full: half of their bits are 0
        on_left = zeros - zeros_of_nodes_before
        target = xp.where(one == 1, (1 << bit) + places - on_left, zeros_of_nodes_before + zeros)
        target = _address(target, n).ravel()
        move = lambda part: moved(part.ravel(), target).reshape(part.shape)
        return (tuple(map(move, (ranks, *values))), queries), None

    bits = np.arange((padded - 1).bit_length() - 1, -1, -1, dtype=np.int32)
    return scan(level, ((ranks, *values), queries), bits)[0][1]


def _node_start(rank: AnyArray, bit: AnyArray) -> AnyArray:
    """The first rank of the node that is divided by this bit."""
    return (rank >> (bit + 1)) << (bit + 1)


def _address(place: AnyArray, n: int) -> AnyArray:
    """The index of a place of a list of n items in the raveled matrix of `_as_columns`."""
    return (place & (_ROWS - 1)) * (padded_length(n) // _ROWS) + (place >> _ROWS_LOG2)


def _as_columns(values: AnyArray, padded: int) -> AnyArray:
    """A list as the columns of a matrix, padded with zeros."""
    return namespace(values).pad(values, (0, padded - values.shape[0])).reshape(-1, _ROWS).T


def _sums_before(*columns: AnyArray) -> tuple[AnyArray, ...]:
    """The sum of all entries before each entry, for lists in columns: one scan over the rows for all lists."""
    xp = namespace(*columns)
    totals = [part.sum(0, dtype=part.dtype) for part in columns]
    starts = tuple(xp.cumsum(xp.pad(total[:-1], (1, 0)), dtype=total.dtype) for total in totals)
    if xp is np:
        from_start = lambda start, part: np.cumsum(np.vstack([start, part[:-1]]), axis=0, dtype=part.dtype)
        return tuple(map(from_start, starts, columns))
    # The results of a scan are in memory. A sum of two arrays would be computed again for each use.
    add = lambda sums, row: (tuple(a + b for a, b in zip(sums, row, strict=True)), sums)
    return lax.scan(add, starts, columns)[1]
