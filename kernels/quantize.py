"""Block-scaled int8: one bfloat16 scale for every 128 elements, codes from -127 to 127.

The maximum of a block is taken on the integer view of the floats: it vectorizes without fastmath, and NaN and infinity
show as the largest integers. Scales are rounded up, so that the largest element never leaves the range of the codes.
``kernels/int4.py`` measures its blocks with the same functions.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.rng import noise

BLOCK = 128
MIN_SCALE = 0x0080
"""Smallest normal bfloat16; a block whose scale would be below (int8: maximum under 1.5e-36) is sent as zeros."""
MAX_SCALE = 0x7C01
"""Largest bfloat16 of which 127 times is finite in float32."""
INFINITE = np.uint32(0x7F80)
"""Stands for the scale of a block that cannot be sent."""

_BLOCK = BLOCK
_MIN_SCALE = np.uint32(MIN_SCALE)
_MAX_SCALE = np.uint32(MAX_SCALE)
_LIMIT = np.float32(127.0)
_LARGEST = 3.4028234663852886e38
_ONE = np.float32(1.0)


@inlined
def block_maximum(bits: Any, mask: Any) -> Any:
    """Find the largest absolute value of a block; NaN or infinite where an element is."""
    # Integer arithmetic widens to 64 bits in numba; the casts keep the lanes narrow.
    top = bits.dtype.type(0)
    for i in range(bits.size):
        top = max(top, bits.dtype.type(bits[i] & mask))
    return as_float(top)


@inlined
def _scale_bits(maximum: Any, limit: Any, max_scale: Any) -> Any:
    scale = np.uint32((as_bits(np.float32(maximum) / limit) + np.uint32(0xFFFF)) >> np.uint32(16))
    if scale < _MIN_SCALE:
        return np.uint32(0)
    return np.uint32(min(scale, max_scale))


@kernel
def count_not_single(x: Any) -> int:
    """Count the values that are not finite in float32."""
    count = 0
    for i in range(x.size):
        count += not (abs(x[i]) <= _LARGEST)
    return count


@inlined
def widen_scale(scale: Any) -> Any:
    """Read the bits of a bfloat16 as float32."""
    return as_float(np.uint32(np.uint32(scale) << np.uint32(16)))


@inlined
def measure_block(bits: Any, mask: Any, limit: Any, max_scale: Any) -> tuple[Any, Any]:
    """Find the scale with which the largest element of a block becomes ``limit`` or a little less.

    Parameters
    ----------
    bits, mask
        The block as unsigned integers, and the integer that clears the sign bit.
    limit : float32
        Largest code.
    max_scale : uint32
        Bits of the largest bfloat16 of which ``limit`` times is finite.

    Returns
    -------
    scale : uint32
        Bits of the bfloat16 scale, rounded up; 0 for a block of (almost) zeros, INFINITE where an element is not
        finite in float32: such a block cannot be sent.
    inverse : float32
        Its reciprocal, or 0.
    """
    maximum = block_maximum(bits, mask)
    if not maximum <= _LARGEST:
        return INFINITE, np.float32(0)
    scale = _scale_bits(maximum, limit, max_scale)
    return scale, _ONE / widen_scale(scale) if scale else np.float32(0)


@kernel
def count_bad_scales(scales: Any, max_scale: Any) -> int:
    """Count the scales that no encoder could have written."""
    bad = 0
    for i in range(scales.size):
        bad += (scales[i] > max_scale) | ((scales[i] < _MIN_SCALE) & (scales[i] != 0))
    return bad


@inlined
def _round_nearest(x: Any, inverse: Any, codes: Any) -> None:
    for i in range(x.size):
        codes[i] = np.int8(np.int32(min(max(np.rint(x[i] * inverse), -_LIMIT), _LIMIT)))


@inlined
def _round_stochastic(x: Any, inverse: Any, codes: Any, key_a: Any, key_b: Any, first: Any) -> None:
    for i in range(x.size):
        shifted = np.floor(x[i] * inverse + noise(key_a, key_b, np.uint32(first + np.uint32(i))))
        codes[i] = np.int8(np.int32(min(max(shifted, -_LIMIT), _LIMIT)))


@inlined
def encode_block(x: Any, bits: Any, mask: Any, codes: Any) -> Any:
    """Write the nearest codes of a block; returns the bits of its scale, or INFINITE and no codes."""
    scale, inverse = measure_block(bits, mask, _LIMIT, _MAX_SCALE)
    if scale != INFINITE:
        _round_nearest(x, inverse, codes)
    return scale


@inlined
def encode_block_stochastic(x: Any, bits: Any, mask: Any, codes: Any, key_a: Any, key_b: Any, first: Any) -> Any:
    """Write random codes as ``encode_block`` does nearest ones; ``first`` is the index of ``x[0]`` in the noise."""
    scale, inverse = measure_block(bits, mask, _LIMIT, _MAX_SCALE)
    if scale != INFINITE:
        _round_stochastic(x, inverse, codes, key_a, key_b, first)
    return scale


@inlined
def decode_block(codes: Any, scale: Any, out: Any) -> None:
    """Write the values of a block's codes; ``scale`` is a float32."""
    for i in range(codes.size):
        out[i] = np.float32(codes[i]) * scale


@inlined
def decode_block_add(codes: Any, scale: Any, acc: Any) -> None:
    """Add the values of a block's codes to ``acc``."""
    for i in range(codes.size):
        acc[i] += np.float32(codes[i]) * scale


@inlined
def decode_block_subtract(codes: Any, scale: Any, rest: Any) -> None:
    """Subtract the values of a block's codes from ``rest``."""
    for i in range(codes.size):
        rest[i] -= np.float32(codes[i]) * scale


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
        scale = encode_block(x[start:stop], bits[start:stop], mask, codes[start:stop])
        if scale == INFINITE:
            bad += count_not_single(x[start:stop])
            continue
        scales[block] = scale
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
        here = np.uint32(first + np.uint32(start))
        scale = encode_block_stochastic(x[start:stop], bits[start:stop], mask, codes[start:stop], key_a, key_b, here)
        if scale == INFINITE:
            bad += count_not_single(x[start:stop])
            continue
        scales[block] = scale
    return bad


@kernel
def decode_int8(scales: Any, codes: Any, out: Any) -> None:
    """Write ``codes * scale`` to ``out``."""
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, codes.size)
        decode_block(codes[start:stop], widen_scale(scales[block]), out[start:stop])


@kernel
def decode_int8_add(scales: Any, codes: Any, acc: Any) -> None:
    """Add ``codes * scale`` to ``acc``."""
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, codes.size)
        decode_block_add(codes[start:stop], widen_scale(scales[block]), acc[start:stop])
