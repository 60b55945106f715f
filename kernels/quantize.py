"""Block-scaled int8: one bfloat16 scale for every 128 elements, codes from -127 to 127.

The maximum of a block is taken on the integer view of the floats: it vectorizes without fastmath, and NaN and infinity
show as the largest integers. Scales are rounded up, so that the largest element never leaves the range of the codes.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float
from mpitrain.kernels.jit import kernel
from mpitrain.kernels.rng import noise

BLOCK = 128
MIN_SCALE = 0x0080
"""Smallest normal bfloat16; a block whose scale would be below (maximum under 1.5e-36) is sent as zeros."""
MAX_SCALE = 0x7C01
"""Largest bfloat16 of which 127 times is finite in float32."""

_BLOCK = BLOCK
_MIN_SCALE = np.uint32(MIN_SCALE)
_MAX_SCALE = np.uint32(MAX_SCALE)
_LIMIT = np.float32(127.0)
_LARGEST = 3.4028234663852886e38
_ONE = np.float32(1.0)


@kernel
def _block_maximum(bits: Any, mask: Any) -> Any:
    # Integer arithmetic widens to 64 bits in numba; the casts keep the lanes narrow.
    top = bits.dtype.type(0)
    for i in range(bits.size):
        top = max(top, bits.dtype.type(bits[i] & mask))
    return as_float(top)


@kernel
def _block_scale(maximum: Any) -> Any:
    """Return the bits of the bfloat16 scale of a finite maximum, rounded up; 0 for a block of (almost) zeros."""
    scale = np.uint32((as_bits(np.float32(maximum) / _LIMIT) + np.uint32(0xFFFF)) >> np.uint32(16))
    if scale < _MIN_SCALE:
        return np.uint32(0)
    return np.uint32(min(scale, _MAX_SCALE))


@kernel
def _count_not_finite(x: Any) -> int:
    count = 0
    for i in range(x.size):
        count += not (abs(x[i]) <= _LARGEST)
    return count


@kernel
def _round_nearest(x: Any, inverse: Any, codes: Any) -> None:
    for i in range(x.size):
        codes[i] = np.int8(np.int32(min(max(np.rint(x[i] * inverse), -_LIMIT), _LIMIT)))


@kernel
def _round_stochastic(x: Any, inverse: Any, codes: Any, key_a: Any, key_b: Any, first: Any) -> None:
    for i in range(x.size):
        shifted = np.floor(x[i] * inverse + noise(key_a, key_b, np.uint32(first + np.uint32(i))))
        codes[i] = np.int8(np.int32(min(max(shifted, -_LIMIT), _LIMIT)))


@kernel
def encode_int8(x: Any, bits: Any, mask: Any, scales: Any, codes: Any) -> int:
    """Quantize to the nearest code.

    Parameters
    ----------
    x, bits, mask
        Values, the same memory as unsigned integers, and the integer that clears the sign bit.
    scales : (ceil(size / 128),) uint16, written
        Bits of the bfloat16 scales.
    codes : (size,) int8, written

    Returns
    -------
    int
        Elements that are not finite in float32; the output means nothing if there are any.
    """
    bad = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        maximum = _block_maximum(bits[start:stop], mask)
        if not maximum <= _LARGEST:
            bad += _count_not_finite(x[start:stop])
            continue
        scale = _block_scale(maximum)
        scales[block] = scale
        inverse = _ONE / as_float(np.uint32(scale << np.uint32(16))) if scale else np.float32(0)
        _round_nearest(x[start:stop], inverse, codes[start:stop])
    return bad


@kernel
def encode_int8_stochastic(
    x: Any, bits: Any, mask: Any, scales: Any, codes: Any, key_a: Any, key_b: Any, first: Any
) -> int:
    """Quantize to a neighbouring code at random, right on average (as ``encode_int8`` otherwise).

    ``first`` is the index of ``x[0]`` in the noise of the key.
    """
    bad = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        maximum = _block_maximum(bits[start:stop], mask)
        if not maximum <= _LARGEST:
            bad += _count_not_finite(x[start:stop])
            continue
        scale = _block_scale(maximum)
        scales[block] = scale
        inverse = _ONE / as_float(np.uint32(scale << np.uint32(16))) if scale else np.float32(0)
        here = np.uint32(first + np.uint32(start))
        _round_stochastic(x[start:stop], inverse, codes[start:stop], key_a, key_b, here)
    return bad


@kernel
def decode_int8(scales: Any, codes: Any, out: Any) -> int:
    """Write ``codes * scale`` to ``out``; return how many scales no encoder could have written."""
    bad = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, codes.size)
        bad += scales[block] > _MAX_SCALE
        scale: Any = as_float(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        here, values = codes[start:stop], out[start:stop]
        for i in range(here.size):
            values[i] = np.float32(here[i]) * scale
    return bad


@kernel
def decode_int8_add(scales: Any, codes: Any, acc: Any) -> int:
    """Add ``codes * scale`` to ``acc``; return how many scales no encoder could have written."""
    bad = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, codes.size)
        bad += scales[block] > _MAX_SCALE
        scale: Any = as_float(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        here, values = codes[start:stop], acc[start:stop]
        for i in range(here.size):
            values[i] += np.float32(here[i]) * scale
    return bad
