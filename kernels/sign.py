"""Signs with a bfloat16 scale for every 256 elements: the mean of their magnitudes.

A block is a grid (8, 32); bit k of byte i is the sign of value i in row k, 1 where it is below 0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.planar import WIDTH, flag, fold, magnitude, nearest_scale
from mpitrain.kernels.quantize import widen_scale

BLOCK = 256
ROWS = BLOCK // WIDTH

_LARGEST = np.float32(3.4028234663852886e38)
_PART = np.float32(1 / BLOCK)
_ONE = np.int32(1)
_TWO = np.int32(2)


@inlined
def _column_sum(x: Any, block: Any, i: Any) -> Any:
    even = (magnitude(x[block, 0, i], _PART) + magnitude(x[block, 4, i], _PART)) + (
        magnitude(x[block, 2, i], _PART) + magnitude(x[block, 6, i], _PART)
    )
    odd = (magnitude(x[block, 1, i], _PART) + magnitude(x[block, 5, i], _PART)) + (
        magnitude(x[block, 3, i], _PART) + magnitude(x[block, 7, i], _PART)
    )
    return even + odd


@inlined
def _column_signs(x: Any, block: Any, i: Any) -> Any:
    low = (flag(x[block, 0, i] < 0, 1) | flag(x[block, 1, i] < 0, 2)) | (
        flag(x[block, 2, i] < 0, 4) | flag(x[block, 3, i] < 0, 8)
    )
    high = (flag(x[block, 4, i] < 0, 16) | flag(x[block, 5, i] < 0, 32)) | (
        flag(x[block, 6, i] < 0, 64) | flag(x[block, 7, i] < 0, 128)
    )
    return np.uint8(low | high)


@kernel
def encode_sign(x: Any, more: Any, lanes: Any, scales: Any, signs: Any) -> int:
    """Keep the signs, and the mean magnitude of every block.

    Parameters
    ----------
    x : (blocks, 8, 32) float32 or float64
        Not changed. What stands for no element is 0.
    more : float32
        256 divided by the elements of a block.
    lanes : (32,) float32, overwritten
    scales : (blocks,) uint16, written
        Bits of the bfloat16 scales.
    signs : (blocks, 32) uint8, written

    Returns
    -------
    int
        Blocks that hold a value which is not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        for i in range(WIDTH):
            lanes[i] = _column_sum(x, block, i)
            signs[block, i] = _column_signs(x, block, i)
        mean = fold(lanes)
        bad += not mean <= _LARGEST
        scales[block] = nearest_scale(mean * more)
    return bad


@inlined
def _value(signs: Any, shift: Any, scale: Any) -> Any:
    # A product, since a choice between two floats was not turned into vectors.
    return np.float32(_ONE - _TWO * ((np.int32(signs) >> shift) & _ONE)) * scale


@kernel
def decode_sign(scales: Any, signs: Any, out: Any) -> None:
    """Write the scale or its negative to ``out``, a grid (blocks, 8, 32)."""
    for block in range(scales.size):
        scale = widen_scale(scales[block])
        for k in range(ROWS):
            shift = np.int32(k)
            for i in range(WIDTH):
                out[block, k, i] = _value(signs[block, i], shift, scale)


@kernel
def decode_sign_add(scales: Any, signs: Any, acc: Any) -> None:
    """Add the scale or its negative to ``acc``, a grid (blocks, 8, 32)."""
    for block in range(scales.size):
        scale = widen_scale(scales[block])
        for k in range(ROWS):
            shift = np.int32(k)
            for i in range(WIDTH):
                acc[block, k, i] += _value(signs[block, i], shift, scale)
