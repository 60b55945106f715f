"""Golomb-Rice coding of small integers, with a parameter for every block.

Format: for every BLOCK integers (the last block may be shorter) five bits with a shift ``s``, then the low ``s`` bits
of each, then of each the rest in unary: that many zeros and a one. Everything is written from the lowest bit on.

Integers that fall off geometrically, such as the gaps between places drawn at random, cost hardly more than their
entropy (Golomb 1966; Gallager and van Voorhis 1975). Low bits and unary rests apart, as Elias and Fano keep them, are
read without a branch for each bit.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import trailing_zeros
from mpitrain.kernels.jit import inlined, kernel

BLOCK = 128
SHIFT_BITS = 5
SPARE_WORDS = 2
"""Words that must follow the last one written or read."""

_BLOCK = BLOCK
_SHIFT_BITS = SHIFT_BITS
_MAX_SHIFT = (1 << SHIFT_BITS) - 1
_WORD = 64
_ONE = np.uint64(1)


@inlined
def _count_bits(values: Any, shift: Any) -> Any:
    total = np.int64(0)
    for i in range(values.size):
        total += np.uint32(values[i] >> np.uint32(shift))
    return total + values.size * (shift + 1)


@inlined
def _guess_shift(values: Any) -> Any:
    total, shift = np.int64(0), 0
    for i in range(values.size):
        total += values[i]
    while shift < _MAX_SHIFT and total >> (shift + 1) >= values.size:
        shift += 1
    return shift


@kernel
def fit_shifts(values: Any, shifts: Any) -> int:
    """Find the cheapest shift of each block, the smallest of equally cheap ones; return the bits of everything.

    The cost is convex in the shift, so a search from any start finds it.

    Parameters
    ----------
    values : (size,) uint32
    shifts : (ceil(size / BLOCK),) uint8, written
    """
    total = 0
    for block in range(shifts.size):
        here = values[block * _BLOCK : min((block + 1) * _BLOCK, values.size)]
        shift = _guess_shift(here)
        cost = _count_bits(here, shift)
        while shift < _MAX_SHIFT:
            other = _count_bits(here, shift + 1)
            if other >= cost:
                break
            shift, cost = shift + 1, other
        while shift > 0:
            other = _count_bits(here, shift - 1)
            if other > cost:
                break
            shift, cost = shift - 1, other
        shifts[block] = shift
        total += _SHIFT_BITS + cost
    return total


@inlined
def _put(words: Any, at: Any, value: Any) -> None:
    word, bit = at // _WORD, np.uint64(at % _WORD)
    words[word] |= value << bit
    words[word + 1] |= value >> np.uint64(63) - bit >> _ONE


@inlined
def _get(words: Any, at: Any) -> Any:
    word, bit = at // _WORD, np.uint64(at % _WORD)
    return words[word] >> bit | words[word + 1] << np.uint64(63) - bit << _ONE


@kernel
def write(values: Any, shifts: Any, words: Any, at: Any) -> Any:
    """Write integers from bit ``at`` of ``words`` on, which are zeros there; return the bit after them."""
    for block in range(shifts.size):
        here = values[block * _BLOCK : min((block + 1) * _BLOCK, values.size)]
        shift = np.int64(shifts[block])
        low = np.uint64((_ONE << np.uint64(shift)) - _ONE)
        _put(words, at, np.uint64(shift))
        at += _SHIFT_BITS
        one = at + here.size * shift
        for i in range(here.size):
            value = np.uint64(here[i])
            _put(words, at, value & low)
            at += shift
            one += np.int64(value >> np.uint64(shift))
            words[one // _WORD] |= _ONE << np.uint64(one % _WORD)
            one += 1
        at = one
    return at


@kernel
def read(words: Any, at: Any, end: int, limit: int, values: Any) -> Any:
    """Read integers from bit ``at`` on; return the bit after them, or -1 where ``write`` did not write them.

    Parameters
    ----------
    words : (ceil(end / 64) + SPARE_WORDS,) uint64 or longer
        Zeros from bit ``end`` on.
    limit : int
        Largest integer that may come.
    values : (size,) uint32, written
    """
    for start in range(0, values.size, _BLOCK):
        here = values[start : min(start + _BLOCK, values.size)]
        shift = np.int64(_get(words, at) & np.uint64(_MAX_SHIFT))
        at += _SHIFT_BITS
        previous = at + here.size * shift - 1
        if previous >= end:
            return -1
        low = np.uint64((_ONE << np.uint64(shift)) - _ONE)
        place, bit = (previous + 1) // _WORD, np.uint64((previous + 1) % _WORD)
        word = words[place] >> bit << bit
        for i in range(here.size):
            while word == 0:
                place += 1
                if place * _WORD >= end:
                    return -1
                word = words[place]
            one = place * _WORD + trailing_zeros(word)
            word &= word - _ONE
            rest = one - previous - 1
            if rest > limit >> shift:
                return -1
            previous = one
            value = rest << shift | np.int64(_get(words, at) & low)
            if value > limit:
                return -1
            here[i] = value
            at += shift
        at = previous + 1
    return at
