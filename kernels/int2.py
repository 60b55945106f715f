"""Block-scaled int2: codes -1, 0 and 1, four to a byte, with a bfloat16 scale for every 128 elements.

A block is a grid (4, 32); bits 2 k and 2 k + 1 of byte i hold value i of row k, as the code plus 2: no encoder writes
0.
"""

from typing import Any

import numpy as np

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
def _sum_above(x: Any, block: Any, threshold: Any, lanes: Any) -> Any:
    for i in range(WIDTH):
        a, b = magnitude(x[block, 0, i], _PART), magnitude(x[block, 1, i], _PART)
        c, d = magnitude(x[block, 2, i], _PART), magnitude(x[block, 3, i], _PART)
        lanes[i] = (_above(a, threshold) + _above(c, threshold)) + (_above(b, threshold) + _above(d, threshold))
    return fold(lanes)


@inlined
def _count_above(x: Any, block: Any, threshold: Any) -> Any:
    count = np.int32(0)
    for i in range(WIDTH):
        for k in range(ROWS):
            count = np.int32(count + flag(magnitude(x[block, k, i], _PART) > threshold, 1))
    return count


@inlined
def _mean_above(x: Any, block: Any, threshold: Any, lanes: Any) -> Any:
    """Return the mean of the magnitudes above a threshold, both multiplied by a part of the block; 0 if none is."""
    # Two loops: with the count in the first, its integers and the sum's floats kept each other from being vectors.
    total = _sum_above(x, block, threshold, lanes)
    return total / np.float32(max(_count_above(x, block, threshold), np.int32(1)))


@inlined
def _mean(x: Any, block: Any, lanes: Any) -> Any:
    for i in range(WIDTH):
        lanes[i] = (magnitude(x[block, 0, i], _PART) + magnitude(x[block, 2, i], _PART)) + (
            magnitude(x[block, 1, i], _PART) + magnitude(x[block, 3, i], _PART)
        )
    return fold(lanes)


@inlined
def _code(value: Any, threshold: Any) -> Any:
    return (_TWO + flag(value > threshold, 1)) - flag(value < -threshold, 1)


@inlined
def _pack(x: Any, block: Any, threshold: Any, packed: Any) -> None:
    for i in range(WIDTH):
        low = _code(x[block, 0, i], threshold) | (_code(x[block, 1, i], threshold) << _TWO)
        high = _code(x[block, 2, i], threshold) | (_code(x[block, 3, i], threshold) << _TWO)
        packed[block, i] = np.uint8(low | (high << np.int32(4)))


@kernel
def encode_int2(x: Any, more: Any, lanes: Any, scales: Any, packed: Any) -> int:
    """Quantize to the nearest of -scale, 0 and scale, with a scale of nearly the smallest square error.

    Parameters
    ----------
    x : (blocks, 4, 32) float32 or float64
        Not changed. What stands for no element is 0.
    more : float32
        128 divided by the elements of a block.
    lanes : (32,) float32, overwritten
    scales : (blocks,) uint16, written
        Bits of the bfloat16 scales.
    packed : (blocks, 32) uint8, written

    Returns
    -------
    int
        Blocks that hold a value which is not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        mean = _mean(x, block, lanes)
        bad += not mean <= _LARGEST
        centroid = _mean_above(x, block, (mean * more) * (_FIRST * _PART), lanes)
        centroid = _mean_above(x, block, centroid * _HALF, lanes)
        scale = nearest_scale(centroid * _WHOLE)
        scales[block] = scale
        _pack(x, block, widen_scale(scale) * _HALF if scale else _NEVER, packed)
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
    """Write ``code * scale`` to ``out``, a grid (blocks, 4, 32)."""
    for block in range(scales.size):
        scale = widen_scale(scales[block])
        for k in range(ROWS):
            shift = np.int32(2 * k)
            for i in range(WIDTH):
                out[block, k, i] = np.float32(((np.int32(packed[block, i]) >> shift) & _THREE) - _TWO) * scale


@kernel
def decode_int2_add(scales: Any, packed: Any, acc: Any) -> None:
    """Add ``code * scale`` to ``acc``, a grid (blocks, 4, 32)."""
    for block in range(scales.size):
        scale = widen_scale(scales[block])
        for k in range(ROWS):
            shift = np.int32(2 * k)
            for i in range(WIDTH):
                acc[block, k, i] += np.float32(((np.int32(packed[block, i]) >> shift) & _THREE) - _TWO) * scale
