"""Error feedback in one pass over memory: add what the last message lost, encode, keep what this one loses.

Block by block in the first cache, by the functions that encode and decode a block otherwise: bytes and floats are those
of the separate passes.
"""

from typing import Any

import numpy as np

from mpitrain.kernels import int4, quantize
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import BLOCK, INFINITE, count_not_single, widen_scale

_BLOCK = BLOCK

# Only functions that a kernel names directly are compiled into it.
_int8_encode, _int8_encode_stochastic = quantize.encode_block, quantize.encode_block_stochastic
_int8_decode, _int8_subtract = quantize.decode_block, quantize.decode_block_subtract
_int4_encode, _int4_encode_stochastic = int4.encode_block, int4.encode_block_stochastic
_int4_decode, _int4_subtract = int4.decode_block, int4.decode_block_subtract
_int4_bounds = int4.bounds


@inlined
def _add(x: Any, error: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = x[i] + error[i]


@kernel
def encode_residual_int8(
    x: Any, error: Any, rest: Any, bits: Any, mask: Any, scales: Any, codes: Any, decoded: Any, draw: Any
) -> int:
    """Encode ``x + error`` and write what that loses.

    Parameters
    ----------
    x, error
        Not changed.
    rest, bits, mask
        Receives ``x + error`` minus what is decoded; the same memory as unsigned integers; the integer that clears the
        sign bit. Means nothing where elements are not finite.
    scales, codes
        Written as by ``encode_int8``.
    decoded
        Receives what is decoded; of size 0 where nobody wants it.
    draw : (bool, uint32, uint32, uint32)
        Whether to round at random, the key of the noise, and the index of ``x[0]`` in it.

    Returns
    -------
    int
        Elements of ``x + error`` that are not finite in float32; the output means nothing if there are any.
    """
    stochastic, key_a, key_b, first = draw
    bad = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        corrected, words, here = rest[start:stop], bits[start:stop], codes[start:stop]
        _add(x[start:stop], error[start:stop], corrected)
        if stochastic:
            index = np.uint32(first + np.uint32(start))
            scale = _int8_encode_stochastic(corrected, words, mask, here, key_a, key_b, index)
        else:
            scale = _int8_encode(corrected, words, mask, here)
        if scale == INFINITE:
            bad += count_not_single(corrected)
            continue
        scales[block] = scale
        _int8_subtract(here, widen_scale(scale), corrected)
        if decoded.size:
            _int8_decode(here, widen_scale(scale), decoded[start:stop])
    return bad


@kernel
def encode_residual_int4(
    x: Any, error: Any, rest: Any, bits: Any, mask: Any, scales: Any, codes: Any, decoded: Any, draw: Any
) -> int:
    """Encode as int4, otherwise as ``encode_residual_int8``."""
    stochastic, key_a, key_b, first = draw
    bad = 0
    for block in range(scales.size):
        start, stop, lead, end = _int4_bounds(block, x.size)
        corrected, words, here = rest[start:stop], bits[start:stop], codes[lead:end]
        _add(x[start:stop], error[start:stop], corrected)
        if stochastic:
            index = np.uint32(first + np.uint32(start))
            scale = _int4_encode_stochastic(corrected, words, mask, here, key_a, key_b, index)
        else:
            scale = _int4_encode(corrected, words, mask, here)
        if scale == INFINITE:
            bad += count_not_single(corrected)
            continue
        scales[block] = scale
        _int4_subtract(here, widen_scale(scale), corrected)
        if decoded.size:
            _int4_decode(here, widen_scale(scale), decoded[start:stop])
    return bad
