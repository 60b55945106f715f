"""Block-scaled int2: codes -1, 0 and 1, four to a byte, with a bfloat16 scale for every 128 elements.

A block is a grid (4, 32); bits 2 k and 2 k + 1 of byte i hold value i of row k, as the code plus 2: no encoder writes
0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import window
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.planar import WIDTH, flag, fold, magnitude, nearest_scale
from mpitrain.kernels.quantize import widen_scale

BLOCK = 128
ROWS = BLOCK // WIDTH

_LARGEST = np.float32(3.4028234663852886e38)
_PART = np.float32(1 / BLOCK)
_WHOLE = np.float32(BLOCK)
_HALF = np.float32(0.5)
_FIRST = np.float32(0.8)
_NEVER = np.float32(np.inf)
_TWO = np.int32(2)
_THREE = np.int32(3)
_ONE = np.uint8(1)
_ONES = np.uint8(0x55)


@inlined
def _above(value: Any, threshold: Any) -> Any:
    return value * np.float32(value > threshold)


@inlined
def _sum_above(x: Any, threshold: Any, lanes: Any) -> Any:
    for i in range(WIDTH):
        a, b = magnitude(x[i], _PART), magnitude(x[i + 32], _PART)
        c, d = magnitude(x[i + 64], _PART), magnitude(x[i + 96], _PART)
        lanes[i] = (_above(a, threshold) + _above(c, threshold)) + (_above(b, threshold) + _above(d, threshold))
    return fold(lanes)


@inlined
def _count_above(x: Any, threshold: Any) -> Any:
    count = np.int32(0)
    for i in range(BLOCK):
        count = np.int32(count + flag(magnitude(x[i], _PART) > threshold, 1))
    return count


@inlined
def _mean_above(x: Any, threshold: Any, lanes: Any) -> Any:
    """Return the mean of the magnitudes above a threshold, both multiplied by a part of the block; 0 if none is."""
    # Two loops: with the count in the first, its integers and the sum's floats kept each other from being vectors.
    total = _sum_above(x, threshold, lanes)
    return total / np.float32(max(_count_above(x, threshold), np.int32(1)))


@inlined
def _mean(x: Any, lanes: Any) -> Any:
    for i in range(WIDTH):
        lanes[i] = (magnitude(x[i], _PART) + magnitude(x[i + 64], _PART)) + (
            magnitude(x[i + 32], _PART) + magnitude(x[i + 96], _PART)
        )
    return fold(lanes)


@inlined
def _code(value: Any, threshold: Any) -> Any:
    return (_TWO + flag(value > threshold, 1)) - flag(value < -threshold, 1)


@inlined
def _pack(x: Any, threshold: Any, packed: Any) -> None:
    for i in range(WIDTH):
        low = _code(x[i], threshold) | (_code(x[i + 32], threshold) << _TWO)
        high = _code(x[i + 64], threshold) | (_code(x[i + 96], threshold) << _TWO)
        packed[i] = np.uint8(low | (high << np.int32(4)))


@kernel
def encode_int2(x: Any, more: Any, lanes: Any, scales: Any, packed: Any) -> int:
    """Quantize to the nearest of -scale, 0 and scale, with a scale of nearly the smallest square error.

    Parameters
    ----------
    x : (128 blocks,) float32 or float64
        Not changed. What stands for no element is 0.
    more : float32
        128 divided by the elements of a block.
    lanes : (32,) float32, overwritten
    scales : (blocks,) uint16, written
        Bits of the bfloat16 scales.
    packed : (32 blocks,) uint8, written

    Returns
    -------
    int
        Blocks that hold a value which is not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        here = window(x, block * BLOCK, BLOCK)
        mean = _mean(here, lanes)
        bad += not mean <= _LARGEST
        centroid = _mean_above(here, (mean * more) * (_FIRST * _PART), lanes)
        centroid = _mean_above(here, centroid * _HALF, lanes)
        scale = nearest_scale(centroid * _WHOLE)
        scales[block] = scale
        _pack(here, widen_scale(scale) * _HALF if scale else _NEVER, window(packed, block * WIDTH, WIDTH))
    return bad


@kernel
def holds_no_code(packed: Any) -> bool:
    """Tell whether a pair of bits is 0, which no encoder writes."""
    bad = False
    for i in range(packed.size):
        bad |= ((packed[i] | (packed[i] >> _ONE)) & _ONES) != _ONES
    return bad


@kernel
def decode_int2(scales: Any, packed: Any, out: Any) -> None:
    """Write ``code * scale`` to ``out``."""
    for block in range(scales.size):
        scale, codes = widen_scale(scales[block]), window(packed, block * WIDTH, WIDTH)
        for k in range(ROWS):
            row, shift = window(out, block * BLOCK + k * WIDTH, WIDTH), np.int32(2 * k)
            for i in range(WIDTH):
                row[i] = np.float32(((np.int32(codes[i]) >> shift) & _THREE) - _TWO) * scale


@kernel
def decode_int2_add(scales: Any, packed: Any, acc: Any) -> None:
    """Add ``code * scale`` to ``acc``."""
    for block in range(scales.size):
        scale, codes = widen_scale(scales[block]), window(packed, block * WIDTH, WIDTH)
        for k in range(ROWS):
            row, shift = window(acc, block * BLOCK + k * WIDTH, WIDTH), np.int32(2 * k)
            for i in range(WIDTH):
                row[i] += np.float32(((np.int32(codes[i]) >> shift) & _THREE) - _TWO) * scale
