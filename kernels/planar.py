"""What the codecs of one and two bits share: rows of 32 values, and sums whose order is fixed.

A block is a grid of rows of 32 values, (8, 32) or (4, 32); the values of a column share a byte, so that loops along the
rows run on vectors. Sums are taken down the columns and then by folding halves of the row of 32: nothing is left to the
compiler, so every machine gets the same bits. They are of magnitudes in float32, each multiplied by one part of the
block first: of a whole block the sum is the mean, and finite exactly where every value is.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bf16 import round_magnitude
from mpitrain.kernels.bits import as_bits
from mpitrain.kernels.jit import inlined
from mpitrain.kernels.quantize import MIN_SCALE

WIDTH = 32
"""Values in a row."""

_MIN_SCALE = np.uint32(MIN_SCALE)


@inlined
def magnitude(value: Any, part: Any) -> Any:
    """Return a part of the magnitude of ``value`` in float32."""
    return abs(np.float32(value)) * part


@inlined
def fold(lanes: Any) -> Any:
    """Sum 32 float32, which are overwritten."""
    for i in range(16):
        lanes[i] += lanes[i + 16]
    for i in range(8):
        lanes[i] += lanes[i + 8]
    for i in range(4):
        lanes[i] += lanes[i + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@inlined
def nearest_scale(value: Any) -> Any:
    """Round a finite or infinite float32 above 0 to the nearest scale: a finite normal bfloat16, or 0 below them."""
    bits = round_magnitude(as_bits(np.float32(value)))
    return bits if bits >= _MIN_SCALE else np.uint32(0)


@inlined
def flag(condition: Any, bit: Any) -> Any:
    """Return ``bit`` where ``condition`` holds; 32 bits wide, as the lanes of the vectors are."""
    return np.int32(bit) if condition else np.int32(0)
