"""Error feedback in one pass over memory: add what the last message lost, encode, keep what this one loses.

Block by block in the first cache, by the functions that encode and decode a block otherwise: bytes and floats are those
of the separate passes.
"""

from typing import Any

import numpy as np

from mpitrain.kernels import int4, quantize
from mpitrain.kernels.bits import as_bits, as_float, window
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import (
    BLOCK,
    INFINITE,
    NEAREST,
    choose_scale,
    count_not_single,
    whole_blocks,
    widen_scale,
)

_BLOCK = BLOCK
_HALF = BLOCK // 2

# Only functions that a kernel names directly are compiled into it.
_round8, _round8_stochastic = quantize.round_block_rest, quantize.round_block_stochastic
_decode8, _subtract8 = quantize.decode_block, quantize.decode_block_subtract
_round4, _round4_stochastic = int4.round_block_rest, int4.round_block_stochastic
_decode4, _subtract4 = int4.decode_block, int4.decode_block_subtract
_LIMIT8, _MAX_SCALE8 = quantize.LIMIT, np.uint32(quantize.MAX_SCALE)
_LIMIT4, _MAX_SCALE4 = int4.LIMIT, np.uint32(int4.MAX_SCALE)


@inlined
def _add(x: Any, error: Any, out: Any) -> Any:
    """Write the sum of two blocks; return its largest absolute value."""
    top = as_bits(x.dtype.type(0))
    for i in range(x.size):
        total = x[i] + error[i]
        out[i] = total
        top = max(top, as_bits(abs(total)))
    return as_float(top)


@inlined
def _encode8(
    x: Any, error: Any, rest: Any, scales: Any, codes: Any, decoded: Any, draw: Any, block: Any, count: Any
) -> Any:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    corrected, into = window(rest, start, count), window(codes, start, count)
    maximum = _add(window(x, start, count), window(error, start, count), corrected)
    scale, inverse = choose_scale(maximum, _LIMIT8, _MAX_SCALE8)
    if scale == INFINITE:
        return count_not_single(corrected)
    scales[block] = scale
    if stochastic:
        _round8_stochastic(corrected, inverse, into, key_a, key_b, np.uint32(first + np.uint32(start)))
        _subtract8(into, widen_scale(scale), corrected)
    else:
        _round8(corrected, inverse, widen_scale(scale), into)
    if decoded.size:
        _decode8(into, widen_scale(scale), window(decoded, start, count))
    return 0


@kernel
def encode_residual_int8(x: Any, error: Any, rest: Any, scales: Any, codes: Any, decoded: Any, draw: Any) -> int:
    """Encode ``x + error`` and write what that loses.

    Parameters
    ----------
    x, error
        Not changed.
    rest
        Receives ``x + error`` minus what is decoded, without subnormal numbers. Means nothing where elements are not
        finite.
    scales, codes, draw
        As of ``encode_int8``.
    decoded
        Receives what is decoded; of size 0 where nobody wants it.

    Returns
    -------
    int
        Elements of ``x + error`` that are not finite in float32; the output means nothing if there are any.
    """
    bad, whole = 0, whole_blocks(x, draw)
    for block in range(whole):
        bad += _encode8(x, error, rest, scales, codes, decoded, NEAREST, block, _BLOCK)
    for block in range(whole, scales.size):
        count = min(_BLOCK, x.size - block * _BLOCK)
        bad += _encode8(x, error, rest, scales, codes, decoded, draw, block, count)
    return bad


@inlined
def _encode4(
    x: Any, error: Any, rest: Any, scales: Any, packed: Any, decoded: Any, draw: Any, block: Any, count: Any
) -> Any:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    corrected, into = window(rest, start, count), window(packed, block * _HALF, (count + 1) // 2)
    maximum = _add(window(x, start, count), window(error, start, count), corrected)
    scale, inverse = choose_scale(maximum, _LIMIT4, _MAX_SCALE4)
    if scale == INFINITE:
        return count_not_single(corrected)
    scales[block] = scale
    if stochastic:
        _round4_stochastic(corrected, inverse, into, key_a, key_b, np.uint32(first + np.uint32(start)))
        _subtract4(into, widen_scale(scale), corrected)
    else:
        _round4(corrected, inverse, widen_scale(scale), into)
    if decoded.size:
        _decode4(into, widen_scale(scale), window(decoded, start, count))
    return 0


@kernel
def encode_residual_int4(x: Any, error: Any, rest: Any, scales: Any, packed: Any, decoded: Any, draw: Any) -> int:
    """Encode as int4, otherwise as ``encode_residual_int8``."""
    bad, whole = 0, whole_blocks(x, draw)
    for block in range(whole):
        bad += _encode4(x, error, rest, scales, packed, decoded, NEAREST, block, _BLOCK)
    for block in range(whole, scales.size):
        count = min(_BLOCK, x.size - block * _BLOCK)
        bad += _encode4(x, error, rest, scales, packed, decoded, draw, block, count)
    return bad
