"""Random numbers of known keys by NumPy, which compiles nothing. The stream is the stream of `jax.random`.

It is Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror & Shaw, SC 2011. `jax.random` is used for traced keys, and for
keys of another generator.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, UInt32

from jaxcal._numpy import AnyArray, is_known
from jaxcal._programs import at_top

# The rotations of the rounds, four at a time, and the constant of the key schedule.
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
_LAST_WORD = 0xFFFFFFFF

_Words = tuple[Any, Any]


def split(key: PRNGKeyArray, number: int = 2) -> list[PRNGKeyArray]:
    """The keys of `jax.random.split`.

    >>> _, second = split(jax.random.key(0))
    >>> bool(second == jax.random.split(jax.random.key(0))[1])
    True
    """
    words = _words_of(key)
    if words is None:
        return list(jax.random.split(key, number))
    as_key: Any = jax.device_put if _is_raw(key) else partial(jax.random.wrap_key_data, impl="threefry2x32")
    with at_top():
        return [as_key(np.stack(pair)) for pair in zip(*_threefry(words, number), strict=True)]


def permutation(key: PRNGKeyArray, number: int) -> Int[AnyArray, " n"]:
    """`jax.random.permutation` of the numbers below `number`.

    >>> bool((permutation(jax.random.key(1), 2000) == jax.random.permutation(jax.random.key(1), 2000)).all())
    True
    """
    words = _words_of(key)
    if words is None:
        return jax.random.permutation(key, number)
    order = np.arange(number)
    for _ in range(_rounds(number)):
        firsts, seconds = _threefry(words, 2)
        words = firsts[0], seconds[0]
        words_of_numbers = np.bitwise_xor(*_threefry((firsts[1], seconds[1]), number))
        order = order[np.argsort(words_of_numbers, kind="stable")]
    return order


def leading(key: PRNGKeyArray, length: int, number: int | Int[Array, ""]) -> Int[Array, " length"]:
    """`jax.random.permutation` of the numbers below a traced `number`, then the other numbers below `length`.

    This holds if `draws_prefixes` is true for the key. Other keys give another permutation. If `number` is not traced,
    it is equal to `length`.

    >>> indices = jax.jit(leading, static_argnums=1)(jax.random.key(1), 2048, 2000)
    >>> bool((indices[:2000] == jax.random.permutation(jax.random.key(1), 2000)).all())
    True
    """
    if isinstance(number, int):
        return jax.random.permutation(key, length)
    order = places = jnp.arange(length)
    for earlier in range(_rounds(length)):
        key, own = jax.random.split(key)
        words = jnp.where(places < number, jax.random.bits(own, (length,), np.uint32), np.uint32(_LAST_WORD))
        shuffled = lax.platform_dependent(words, order, cpu=_by_packed_words, default=_by_words)
        # JAX has a further round if the number is larger than (2^32 - 1)^(r / 3) after r rounds.
        order = jnp.where(number > int(math.exp(earlier * math.log(_LAST_WORD) / 3)), shuffled, order)
    return order


def _by_words(words: UInt32[Array, " n"], order: Int[Array, " n"]) -> Int[Array, " n"]:
    """The numbers in the order of their words, by a stable sort."""
    return lax.sort_key_val(words, order)[1]


def _by_packed_words(words: UInt32[Array, " n"], order: Int[Array, " n"]) -> Int[Array, " n"]:
    """The same by one sort of integers, each a word and its place. XLA on a CPU takes a quarter of the time."""
    with jax.enable_x64(True):
        places = lax.iota(np.uint64, words.shape[0])
        packed = lax.sort(lax.convert_element_type(words, np.uint64) << np.uint64(32) | places, is_stable=False)
        at = lax.convert_element_type(packed & np.uint64(_LAST_WORD), np.int32)
    return order[at]


def draws_prefixes(key: PRNGKeyArray) -> bool:
    """Whether a shorter sequence of random words is the beginning of a longer sequence with the same key."""
    return _words_of(key) is not None


def _rounds(number: int) -> int:
    """How often JAX sorts by random words. It sorts again if two words are likely to be equal."""
    return math.ceil(3 * math.log(max(1, number)) / math.log(_LAST_WORD))


def uniform(
    key: PRNGKeyArray, number: int, dtype: DTypeLike, low: float = 0.0, high: float = 1.0
) -> Float[AnyArray, " n"]:
    """`number` values of `jax.random.uniform`: exact to the bit on [-1, 1] or [0, 1], else up to rounding.

    >>> values = uniform(jax.random.key(2), 5, np.float32, -1.0, 1.0)
    >>> bool((values == jax.random.uniform(jax.random.key(2), (5,), np.float32, -1, 1)).all())
    True
    """
    words, dtype = _words_of(key), np.dtype(dtype)
    if words is None or dtype not in (np.float32, np.float64):
        return jax.random.uniform(key, (number,), dtype, low, high)
    firsts, seconds = _threefry(words, number)
    float_info, low, high = np.finfo(dtype), dtype.type(low), dtype.type(high)
    words = firsts ^ seconds if dtype == np.float32 else firsts.astype(np.uint64) << np.uint64(32) | seconds
    # The bits are the mantissa of a number between 1 and 2.
    mantissa = words >> words.dtype.type(float_info.bits - float_info.nmant)
    unit = (mantissa | np.ones((), dtype).view(words.dtype)).view(dtype) - dtype.type(1)
    return np.maximum(low, unit * (high - low) + low)


def bits(key: PRNGKeyArray, width: int | None = None) -> int:
    """`jax.random.bits`: a random word of 32 or 64 bits. With no width it has the default width of integers.

    >>> bits(jax.random.key(3)) == int(jax.random.bits(jax.random.key(3)))
    True
    """
    words, width = _words_of(key), width or (64 if jax.config.read("jax_enable_x64") else 32)
    if words is None:
        return int(jax.random.bits(key, dtype=f"uint{width}"))
    (first,), (second,) = _threefry(words, 1)
    return int(first) << 32 | int(second) if width == 64 else int(first ^ second)


def _words_of(key: Any) -> _Words | None:
    """The two words of a key; None if only JAX can use the key."""
    if not (is_known(key) and getattr(jax.config, "jax_threefry_partitionable", False)):
        return None
    if not _is_raw(key) and str(jax.random.key_impl(key)) != "threefry2x32":
        return None
    with at_top():
        words = np.asarray(key if _is_raw(key) else jax.random.key_data(key))
    return (words[0], words[1]) if words.shape == (2,) else None


def _is_raw(key: Array) -> bool:
    """Whether it is an array of words, made by `jax.random.PRNGKey`."""
    return not jnp.issubdtype(key.dtype, dtypes.prng_key)


def _threefry(words: _Words, number: int) -> tuple[UInt32[np.ndarray, " n"], UInt32[np.ndarray, " n"]]:
    """The two random words of each counter 0, 1, ..., number - 1."""
    # The key schedule k_0, k_1, k_2 = k_0 ^ k_1 ^ C.
    schedule = *words, words[0] ^ words[1] ^ _PARITY
    counters = np.arange(number, dtype=np.uint64)
    with np.errstate(over="ignore"):  # words are added modulo 2^32
        a = (counters >> np.uint64(32)).astype(np.uint32) + schedule[0]
        b = counters.astype(np.uint32) + schedule[1]
        for step in range(5):
            # A round: a += b, then b = rotl(b, r) ^ a.
            for rotation in _ROTATIONS[step % 2]:
                a = a + b
                b = a ^ (b << np.uint32(rotation) | b >> np.uint32(32 - rotation))
            a = a + schedule[(step + 1) % 3]
            b = b + schedule[(step + 2) % 3] + np.uint32(step + 1)
    return a, b
