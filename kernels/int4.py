"""Block-scaled int4: one bfloat16 scale for every 128 elements, codes from -7 to 7, two to a byte.

Packing is planar: byte i of a block holds element i in its low half and element i + 64 in its high half, so that
both halves are read and written in order, as vectors. A half holds the code plus 8, from 1 to 15: a subtraction
decodes it, and no encoder writes 0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import window
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import (
    BLOCK,
    INFINITE,
    NEAREST,
    block_maximum,
    choose_scale,
    count_not_single,
    whole_blocks,
    widen_scale,
)
from mpitrain.kernels.reduce import flushed
from mpitrain.kernels.rng import noise

MAX_SCALE = 0x7E12
"""Largest bfloat16 of which 7 times is finite in float32."""

_BLOCK = BLOCK
_HALF = BLOCK // 2
_MAX_SCALE = np.uint32(MAX_SCALE)
LIMIT = np.float32(7.0)
"""Largest code."""
_SIXTEEN = np.float32(16.0)
_ZEROS = np.float32(0x88)
_SPARE = np.float32(0)
_NIBBLE = np.uint8(15)
_FOUR = np.uint8(4)
_EIGHT = np.int32(8)


@inlined
def _pack(low: Any, high: Any) -> Any:
    """Put two rounded floats into a byte; in floats, since converting once is faster than shifting integers."""
    return np.uint8(np.int32(low + _SIXTEEN * high + _ZEROS))


@inlined
def round_block(x: Any, inverse: Any, packed: Any) -> None:
    """Write the nearest codes of a block; ``inverse`` is one over its scale."""
    # Scales are rounded up, and 7 times the largest falls short of float32 by 0.2 %: no code is beyond 7.
    low, high = x[: packed.size], x[packed.size :]
    for i in range(high.size):
        packed[i] = _pack(np.rint(low[i] * inverse), np.rint(high[i] * inverse))
    for i in range(high.size, low.size):
        packed[i] = _pack(np.rint(low[i] * inverse), _SPARE)


@inlined
def _rest(value: Any, code: Any, scale: Any) -> Any:
    return flushed(value - np.float32(np.int32(code)) * scale)


@inlined
def round_block_rest(x: Any, inverse: Any, scale: Any, packed: Any) -> None:
    """Write the nearest codes of a block, and subtract their values from ``x``."""
    low, high = x[: packed.size], x[packed.size :]
    for i in range(high.size):
        a, b = np.rint(low[i] * inverse), np.rint(high[i] * inverse)
        packed[i] = _pack(a, b)
        low[i], high[i] = _rest(low[i], a, scale), _rest(high[i], b, scale)
    for i in range(high.size, low.size):
        a = np.rint(low[i] * inverse)
        packed[i] = _pack(a, _SPARE)
        low[i] = _rest(low[i], a, scale)


@inlined
def _round_stochastic(value: Any, key_a: Any, key_b: Any, index: Any) -> Any:
    return min(max(np.floor(value + noise(key_a, key_b, np.uint32(index))), -LIMIT), LIMIT)


@inlined
def round_block_stochastic(x: Any, inverse: Any, packed: Any, key_a: Any, key_b: Any, first: Any) -> None:
    """Write random codes as ``round_block`` does nearest ones; ``first`` is the index of ``x[0]`` in the noise."""
    low, high = x[: packed.size], x[packed.size :]
    middle = np.uint32(first + np.uint32(low.size))
    for i in range(high.size):
        a = _round_stochastic(low[i] * inverse, key_a, key_b, first + np.uint32(i))
        b = _round_stochastic(high[i] * inverse, key_a, key_b, middle + np.uint32(i))
        packed[i] = _pack(a, b)
    for i in range(high.size, low.size):
        packed[i] = _pack(_round_stochastic(low[i] * inverse, key_a, key_b, first + np.uint32(i)), _SPARE)


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
        low[i] = flushed(low[i] - _low(packed[i], scale))
    for i in range(high.size):
        high[i] = flushed(high[i] - _high(packed[i], scale))


@inlined
def _encode(x: Any, scales: Any, packed: Any, block: Any, count: Any, draw: Any) -> Any:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    here, into = window(x, start, count), window(packed, block * _HALF, (count + 1) // 2)
    scale, inverse = choose_scale(block_maximum(here), LIMIT, _MAX_SCALE)
    if scale == INFINITE:
        return count_not_single(here)
    scales[block] = scale
    if stochastic:
        round_block_stochastic(here, inverse, into, key_a, key_b, np.uint32(first + np.uint32(start)))
    else:
        round_block(here, inverse, into)
    return 0


@kernel
def encode_int4(x: Any, scales: Any, packed: Any, draw: Any) -> int:
    """Quantize to the nearest code, or to a neighbouring one at random, right on average.

    Parameters
    ----------
    x, scales, draw
        As of ``encode_int8``.
    packed : (ceil(size / 2),) uint8, written
        Codes; in the last block of n elements the high halves begin with element ceil(n / 2).

    Returns
    -------
    int
        Elements that are not finite in float32; the output means nothing if there are any.
    """
    bad, whole = 0, whole_blocks(x, draw)
    for block in range(whole):
        bad += _encode(x, scales, packed, block, _BLOCK, NEAREST)
    for block in range(whole, scales.size):
        bad += _encode(x, scales, packed, block, min(_BLOCK, x.size - block * _BLOCK), draw)
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
    whole = out.size // _BLOCK
    for block in range(whole):
        here = window(packed, block * _HALF, _HALF)
        decode_block(here, widen_scale(scales[block]), window(out, block * _BLOCK, _BLOCK))
    if whole < scales.size:
        decode_block(packed[whole * _HALF :], widen_scale(scales[whole]), out[whole * _BLOCK :])


@kernel
def decode_int4_add(scales: Any, packed: Any, acc: Any) -> None:
    """Add ``code * scale`` to ``acc``."""
    whole = acc.size // _BLOCK
    for block in range(whole):
        here = window(packed, block * _HALF, _HALF)
        decode_block_add(here, widen_scale(scales[block]), window(acc, block * _BLOCK, _BLOCK))
    if whole < scales.size:
        decode_block_add(packed[whole * _HALF :], widen_scale(scales[whole]), acc[whole * _BLOCK :])
