"""Block-scaled int4: one bfloat16 scale for every 128 elements, codes from -7 to 7, two to a byte.

Packing is planar: byte i of a block holds element i in its low half and element i + 64 in its high half, so that
both halves are read and written in order, as vectors. A half holds the code plus 8, from 1 to 15: a subtraction
decodes it, and no encoder writes 0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import BLOCK, INFINITE, count_not_single, measure_block, widen_scale
from mpitrain.kernels.rng import noise

MAX_SCALE = 0x7E12
"""Largest bfloat16 of which 7 times is finite in float32."""

_BLOCK = BLOCK
_HALF = BLOCK // 2
_MAX_SCALE = np.uint32(MAX_SCALE)
_LIMIT = np.float32(7.0)
_SIXTEEN = np.float32(16.0)
_ZEROS = np.float32(0x88)
_SPARE = np.float32(0)
_NIBBLE = np.uint8(15)
_FOUR = np.uint8(4)
_EIGHT = np.int32(8)


@inlined
def bounds(block: Any, size: Any) -> tuple[int, int, int, int]:
    """Return where a block of elements and where its bytes start and stop."""
    start, stop = block * _BLOCK, min((block + 1) * _BLOCK, size)
    first = block * _HALF
    return start, stop, first, first + (stop - start + 1) // 2


@inlined
def _pack(low: Any, high: Any) -> Any:
    """Put two rounded floats into a byte; in floats, since converting once is faster than shifting integers."""
    return np.uint8(np.int32(low + _SIXTEEN * high + _ZEROS))


@inlined
def _pack_nearest(low: Any, high: Any, inverse: Any, packed: Any) -> None:
    # Scales are rounded up, and 7 times the largest falls short of float32 by 0.2 %: no code is beyond 7.
    for i in range(high.size):
        packed[i] = _pack(np.rint(low[i] * inverse), np.rint(high[i] * inverse))
    for i in range(high.size, low.size):
        packed[i] = _pack(np.rint(low[i] * inverse), _SPARE)


@inlined
def _round_stochastic(value: Any, key_a: Any, key_b: Any, index: Any) -> Any:
    return min(max(np.floor(value + noise(key_a, key_b, np.uint32(index))), -_LIMIT), _LIMIT)


@inlined
def _pack_stochastic(low: Any, high: Any, inverse: Any, packed: Any, key_a: Any, key_b: Any, first: Any) -> None:
    middle = np.uint32(first + np.uint32(low.size))
    for i in range(high.size):
        a = _round_stochastic(low[i] * inverse, key_a, key_b, first + np.uint32(i))
        b = _round_stochastic(high[i] * inverse, key_a, key_b, middle + np.uint32(i))
        packed[i] = _pack(a, b)
    for i in range(high.size, low.size):
        packed[i] = _pack(_round_stochastic(low[i] * inverse, key_a, key_b, first + np.uint32(i)), _SPARE)


@inlined
def encode_block(x: Any, bits: Any, mask: Any, packed: Any) -> Any:
    """Write the nearest codes of a block; returns the bits of its scale, or INFINITE and no codes."""
    scale, inverse = measure_block(bits, mask, _LIMIT, _MAX_SCALE)
    if scale != INFINITE:
        _pack_nearest(x[: packed.size], x[packed.size :], inverse, packed)
    return scale


@inlined
def encode_block_stochastic(x: Any, bits: Any, mask: Any, packed: Any, key_a: Any, key_b: Any, first: Any) -> Any:
    """Write random codes as ``encode_block`` does nearest ones; ``first`` is the index of ``x[0]`` in the noise."""
    scale, inverse = measure_block(bits, mask, _LIMIT, _MAX_SCALE)
    if scale != INFINITE:
        _pack_stochastic(x[: packed.size], x[packed.size :], inverse, packed, key_a, key_b, first)
    return scale


@inlined
def _low(byte: Any, scale: Any) -> Any:
    return np.float32(np.int32(byte & _NIBBLE) - _EIGHT) * scale


@inlined
def _high(byte: Any, scale: Any) -> Any:
    return np.float32(np.int32(byte >> _FOUR) - _EIGHT) * scale


@inlined
def decode_block(packed: Any, scale: Any, out: Any) -> None:
    """Write the values of a block's codes; ``scale`` is a float32."""
    low, high = out[: packed.size], out[packed.size :]
    for i in range(low.size):
        low[i] = _low(packed[i], scale)
    for i in range(high.size):
        high[i] = _high(packed[i], scale)


@inlined
def decode_block_add(packed: Any, scale: Any, acc: Any) -> None:
    """Add the values of a block's codes to ``acc``."""
    low, high = acc[: packed.size], acc[packed.size :]
    for i in range(low.size):
        low[i] += _low(packed[i], scale)
    for i in range(high.size):
        high[i] += _high(packed[i], scale)


@inlined
def decode_block_subtract(packed: Any, scale: Any, rest: Any) -> None:
    """Subtract the values of a block's codes from ``rest``."""
    low, high = rest[: packed.size], rest[packed.size :]
    for i in range(low.size):
        low[i] -= _low(packed[i], scale)
    for i in range(high.size):
        high[i] -= _high(packed[i], scale)


@kernel
def encode_int4(x: Any, bits: Any, mask: Any, scales: Any, packed: Any) -> int:
    """Quantize to the nearest code.

    Parameters
    ----------
    x, bits, mask
        Values, the same memory as unsigned integers, and the integer that clears the sign bit.
    scales : (ceil(size / 128),) uint16, written
        Bits of the bfloat16 scales.
    packed : (ceil(size / 2),) uint8, written
        Codes; in the last block of n elements the high halves begin with element ceil(n / 2).

    Returns
    -------
    int
        Elements that are not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        start, stop, lead, end = bounds(block, x.size)
        scale = encode_block(x[start:stop], bits[start:stop], mask, packed[lead:end])
        if scale == INFINITE:
            bad += count_not_single(x[start:stop])
            continue
        scales[block] = scale
    return bad


@kernel
def encode_int4_stochastic(
    x: Any, bits: Any, mask: Any, scales: Any, packed: Any, key_a: Any, key_b: Any, first: Any
) -> int:
    """Quantize to a neighbouring code at random, right on average (as ``encode_int4`` otherwise).

    ``first`` is the index of ``x[0]`` in the noise of the key.
    """
    bad = 0
    for block in range(scales.size):
        start, stop, lead, end = bounds(block, x.size)
        here = np.uint32(first + np.uint32(start))
        scale = encode_block_stochastic(x[start:stop], bits[start:stop], mask, packed[lead:end], key_a, key_b, here)
        if scale == INFINITE:
            bad += count_not_single(x[start:stop])
            continue
        scales[block] = scale
    return bad


@kernel
def holds_no_code(packed: Any) -> bool:
    """Tell whether a half of a byte is 0, which no encoder writes."""
    bad = False
    for i in range(packed.size):
        bad |= ((packed[i] & _NIBBLE) == 0) | (packed[i] <= _NIBBLE)
    return bad


@kernel
def decode_int4(scales: Any, packed: Any, out: Any) -> None:
    """Write ``code * scale`` to ``out``."""
    for block in range(scales.size):
        start, stop, lead, end = bounds(block, out.size)
        decode_block(packed[lead:end], widen_scale(scales[block]), out[start:stop])


@kernel
def decode_int4_add(scales: Any, packed: Any, acc: Any) -> None:
    """Add ``code * scale`` to ``acc``."""
    for block in range(scales.size):
        start, stop, lead, end = bounds(block, acc.size)
        decode_block_add(packed[lead:end], widen_scale(scales[block]), acc[start:stop])
