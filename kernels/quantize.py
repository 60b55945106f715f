"""Block-scaled int8: one bfloat16 scale for every 128 elements, codes from -127 to 127.

The maximum of a block is taken on the bits of the floats: it vectorizes without fastmath, and NaN and infinity show as
the largest integers. Scales are rounded up, and 127 times the largest scale falls short of float32 by 0.01 %, so that
no nearest code leaves the range. ``kernels/int4.py`` measures its blocks with the same functions.

Whole blocks that are rounded to nearest run through loops whose length the compiler knows, which are a fifth faster;
what is shorter or random through the same functions compiled once more.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float, window
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.reduce import flushed
from mpitrain.kernels.rng import noise

BLOCK = 128
MIN_SCALE = 0x0080
"""Smallest normal bfloat16; a block whose scale would be below (int8: maximum under 1.5e-36) is sent as zeros."""
MAX_SCALE = 0x7C01
"""Largest bfloat16 of which 127 times is finite in float32."""
INFINITE = np.uint32(0x7F80)
"""Stands for the scale of a block that cannot be sent."""
NEAREST = (False, np.uint32(0), np.uint32(0), np.uint32(0))
"""How to round, for an encoder: not at random, hence without a key and a place in the noise."""

_BLOCK = BLOCK
_MIN_SCALE = np.uint32(MIN_SCALE)
_MAX_SCALE = np.uint32(MAX_SCALE)
LIMIT = np.float32(127.0)
"""Largest code."""
_LARGEST = 3.4028234663852886e38
_ONE = np.float32(1.0)


@inlined
def block_maximum(x: Any) -> Any:
    """Find the largest absolute value of a block; NaN or infinite where an element is."""
    top = as_bits(x.dtype.type(0))
    for i in range(x.size):
        top = max(top, as_bits(abs(x[i])))
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
def choose_scale(maximum: Any, limit: Any, max_scale: Any) -> tuple[Any, Any]:
    """Find the scale with which the largest element of a block becomes ``limit`` or a little less.

    Parameters
    ----------
    maximum : float
        From ``block_maximum``.
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
def round_block(x: Any, inverse: Any, codes: Any) -> None:
    """Write the nearest codes of a block; ``inverse`` is one over its scale."""
    for i in range(x.size):
        codes[i] = np.int8(np.int32(np.rint(x[i] * inverse)))


@inlined
def round_block_rest(x: Any, inverse: Any, scale: Any, codes: Any) -> None:
    """Write the nearest codes of a block, and subtract their values from ``x``."""
    for i in range(x.size):
        code = np.int32(np.rint(x[i] * inverse))
        codes[i] = np.int8(code)
        x[i] = flushed(x[i] - np.float32(code) * scale)


@inlined
def round_block_stochastic(x: Any, inverse: Any, codes: Any, key_a: Any, key_b: Any, first: Any) -> None:
    """Write random codes as ``round_block`` does nearest ones; ``first`` is the index of ``x[0]`` in the noise."""
    for i in range(x.size):
        shifted = np.floor(x[i] * inverse + noise(key_a, key_b, np.uint32(first + np.uint32(i))))
        codes[i] = np.int8(np.int32(min(max(shifted, -LIMIT), LIMIT)))


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
        rest[i] = flushed(rest[i] - np.float32(codes[i]) * scale)


@inlined
def whole_blocks(x: Any, draw: Any) -> int:
    """Tell how many blocks, from the first on, have a length that the compiler knows."""
    return 0 if draw[0] else x.size // _BLOCK


@inlined
def _encode(x: Any, scales: Any, codes: Any, block: Any, count: Any, draw: Any) -> Any:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    here, into = window(x, start, count), window(codes, start, count)
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
def encode_int8(x: Any, scales: Any, codes: Any, draw: Any) -> int:
    """Quantize to the nearest code, or to a neighbouring one at random, right on average.

    Parameters
    ----------
    x : (size,) float32 or float64
        Not changed.
    scales : (ceil(size / 128),) uint16, written
        Bits of the bfloat16 scales.
    codes : (size,) int8, written
    draw : (bool, uint32, uint32, uint32)
        Whether to round at random, the key of the noise, and the index of ``x[0]`` in it.

    Returns
    -------
    int
        Elements that are not finite in float32; the output means nothing if there are any.
    """
    bad, whole = 0, whole_blocks(x, draw)
    for block in range(whole):
        bad += _encode(x, scales, codes, block, _BLOCK, NEAREST)
    for block in range(whole, scales.size):
        bad += _encode(x, scales, codes, block, min(_BLOCK, x.size - block * _BLOCK), draw)
    return bad


@kernel
def decode_int8(scales: Any, codes: Any, out: Any) -> None:
    """Write ``codes * scale`` to ``out``."""
    whole = codes.size // _BLOCK
    for block in range(whole):
        start = block * _BLOCK
        decode_block(window(codes, start, _BLOCK), widen_scale(scales[block]), window(out, start, _BLOCK))
    if whole < scales.size:
        start = whole * _BLOCK
        decode_block(codes[start:], widen_scale(scales[whole]), out[start:])


@kernel
def decode_int8_add(scales: Any, codes: Any, acc: Any) -> None:
    """Add ``codes * scale`` to ``acc``."""
    whole = codes.size // _BLOCK
    for block in range(whole):
        start = block * _BLOCK
        decode_block_add(window(codes, start, _BLOCK), widen_scale(scales[block]), window(acc, start, _BLOCK))
    if whole < scales.size:
        start = whole * _BLOCK
        decode_block_add(codes[start:], widen_scale(scales[whole]), acc[start:])
