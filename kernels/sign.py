"""Signs with a bfloat16 scale for every 256 elements: the mean of their magnitudes.

A block is a grid (8, 32); bit k of byte i is the sign of value i in row k, 1 where it is below 0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import window
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
def _column_sum(x: Any, i: Any) -> Any:
    even = (magnitude(x[i], _PART) + magnitude(x[i + 128], _PART)) + (
        magnitude(x[i + 64], _PART) + magnitude(x[i + 192], _PART)
    )
    odd = (magnitude(x[i + 32], _PART) + magnitude(x[i + 160], _PART)) + (
        magnitude(x[i + 96], _PART) + magnitude(x[i + 224], _PART)
    )
    return even + odd


@inlined
def _column_signs(x: Any, i: Any) -> Any:
    low = (flag(x[i] < 0, 1) | flag(x[i + 32] < 0, 2)) | (flag(x[i + 64] < 0, 4) | flag(x[i + 96] < 0, 8))
    high = (flag(x[i + 128] < 0, 16) | flag(x[i + 160] < 0, 32)) | (
        flag(x[i + 192] < 0, 64) | flag(x[i + 224] < 0, 128)
    )
    return np.uint8(low | high)


@kernel
def encode_sign(x: Any, more: Any, lanes: Any, scales: Any, signs: Any) -> int:
    """Keep the signs, and the mean magnitude of every block.

    Parameters
    ----------
    x : (256 blocks,) float32 or float64
        Not changed. What stands for no element is 0.
    more : float32
        256 divided by the elements of a block.
    lanes : (32,) float32, overwritten
    scales : (blocks,) uint16, written
        Bits of the bfloat16 scales.
    signs : (32 blocks,) uint8, written

    Returns
    -------
    int
        Blocks that hold a value which is not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        here, bits = window(x, block * BLOCK, BLOCK), window(signs, block * WIDTH, WIDTH)
        for i in range(WIDTH):
            lanes[i] = _column_sum(here, i)
            bits[i] = _column_signs(here, i)
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
    """Write the scale or its negative to ``out``."""
    for block in range(scales.size):
        scale, bits = widen_scale(scales[block]), window(signs, block * WIDTH, WIDTH)
        for k in range(ROWS):
            row, shift = window(out, block * BLOCK + k * WIDTH, WIDTH), np.int32(k)
            for i in range(WIDTH):
                row[i] = _value(bits[i], shift, scale)


@kernel
def decode_sign_add(scales: Any, signs: Any, acc: Any) -> None:
    """Add the scale or its negative to ``acc``."""
    for block in range(scales.size):
        scale, bits = widen_scale(scales[block]), window(signs, block * WIDTH, WIDTH)
        for k in range(ROWS):
            row, shift = window(acc, block * BLOCK + k * WIDTH, WIDTH), np.int32(k)
            for i in range(WIDTH):
                row[i] += _value(bits[i], shift, scale)
