"""Prediction from the past: alone, and in one pass with the coding of the difference.

The loops of the codecs work block by block in the first cache, by the functions of which the separate passes are made:
bytes and floats are the same. Blocks of codec and prediction are the same 128 elements.
"""

from typing import Any

import numpy as np

from mpitrain.kernels import int4, lanes, quantize
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import INFINITE, block_maximum, count_not_single, widen_scale
from mpitrain.kernels.reduce import count_not_finite

BLOCK = 128
LEVELS = 15
"""The prediction's factor is k / 15, k from 0 to 15: four bits a block."""

_BLOCK = BLOCK

# Only functions that a kernel names directly are compiled into it.
_int8_encode, _int8_encode_stochastic = quantize.encode_block, quantize.encode_block_stochastic
_int8_decode = quantize.decode_block
_int4_encode, _int4_encode_stochastic = int4.encode_block, int4.encode_block_stochastic
_int4_decode, _int4_bounds = int4.decode_block, int4.bounds


@inlined
def _fit(x: Any, past: Any) -> Any:
    """Choose the factor of a block.

    The sums are taken in float64 over four interleaved partial sums, in an order that depends on the size alone.
    """
    fits, powers = lanes.zeros(), lanes.zeros()
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        before = lanes.load(past, i)
        fits = lanes.add_products(fits, lanes.load(x, i), before)
        powers = lanes.add_products(powers, before, before)
    f0, f1, f2, f3 = lanes.split(fits)
    p0, p1, p2, p3 = lanes.split(powers)
    for i in range(whole, x.size):
        f0 += x[i] * np.float64(past[i])
        p0 += np.float64(past[i]) * past[i]
    power = (p0 + p1) + (p2 + p3)
    fit = ((f0 + f1) + (f2 + f3)) / power if power > 0 else 0.0
    return np.uint8(np.rint(min(max(fit, 0.0), 1.0) * LEVELS)) if np.isfinite(fit) else np.uint8(0)


@inlined
def _subtract(x: Any, past: Any, factor: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = x[i] - factor * past[i]


@inlined
def _add(past: Any, factor: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] += factor * past[i]


@inlined
def _accumulate(values: Any, acc: Any) -> None:
    for i in range(acc.size):
        acc[i] += values[i]


@kernel
def fit_factors(x: Any, past: Any, factors: Any) -> None:
    """Choose for each block the factor with which ``past`` predicts ``x`` best (least squares, within 0 and 1)."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        factors[block] = _fit(x[start:stop], past[start:stop])


@kernel
def subtract_prediction(x: Any, past: Any, factors: Any, unit: Any, out: Any) -> None:
    """Write ``x - factor * past`` to ``out``; ``unit`` is 1 / 15 in the arrays' type."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        _subtract(x[start:stop], past[start:stop], factors[block] * unit, out[start:stop])


@kernel
def add_prediction(past: Any, factors: Any, unit: Any, out: Any) -> None:
    """Add ``factor * past`` to ``out``."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, out.size)
        _add(past[start:stop], factors[block] * unit, out[start:stop])


@kernel
def pack_factors(factors: Any, packed: Any) -> None:
    """Put factors 2 i and 2 i + 1 into the low and high half of byte i."""
    for i in range(packed.size):
        high = factors[2 * i + 1] if 2 * i + 1 < factors.size else np.uint8(0)
        packed[i] = factors[2 * i] | np.uint8(high << np.uint8(4))


@kernel
def unpack_factors(packed: Any, factors: Any) -> None:
    """Undo ``pack_factors``."""
    for i in range(factors.size):
        factors[i] = (packed[i // 2] >> np.uint8(4 * (i % 2))) & np.uint8(15)


@kernel
def encode_difference_int8(
    x: Any,
    past: Any,
    factors: Any,
    unit: Any,
    following: Any,
    bits: Any,
    mask: Any,
    scales: Any,
    codes: Any,
    draw: Any,
) -> int:
    """Predict ``x`` and encode the difference.

    Parameters
    ----------
    x, past
        Not changed.
    factors : (ceil(size / 128),) uint8, written
    unit
        1 / 15 in the arrays' type.
    following, bits, mask
        Receives what the other end decodes; the same memory as unsigned integers; the integer that clears the sign
        bit. Means nothing where elements are not finite.
    scales, codes
        Written as by ``encode_int8``.
    draw : (bool, uint32, uint32, uint32)
        Whether to round at random, the key of the noise, and the index of ``x[0]`` in it.

    Returns
    -------
    int
        Elements of the difference that are not finite in float32; if there are none, elements of ``following`` that
        are not finite. The output means nothing if there are any.
    """
    stochastic, key_a, key_b, first = draw
    bad = beyond = 0
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        here, values, before = codes[start:stop], following[start:stop], past[start:stop]
        level = _fit(x[start:stop], before)
        factors[block] = level
        _subtract(x[start:stop], before, level * unit, values)
        if stochastic:
            index = np.uint32(first + np.uint32(start))
            scale = _int8_encode_stochastic(values, bits[start:stop], mask, here, key_a, key_b, index)
        else:
            scale = _int8_encode(values, bits[start:stop], mask, here)
        if scale == INFINITE:
            bad += count_not_single(values)
            continue
        scales[block] = scale
        _int8_decode(here, widen_scale(scale), values)
        _add(before, level * unit, values)
        if not np.isfinite(block_maximum(bits[start:stop], mask)):
            beyond += count_not_finite(values)
    return bad if bad else beyond


@kernel
def decode_difference_int8(
    scales: Any, codes: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any
) -> None:
    """Write what ``encode_difference_int8`` said is decoded, and add it to ``acc`` unless that is of size 0."""
    for block in range(scales.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, past.size)
        values = following[start:stop]
        _int8_decode(codes[start:stop], widen_scale(scales[block]), values)
        _add(past[start:stop], factors[block] * unit, values)
        if acc.size:
            _accumulate(values, acc[start:stop])


@kernel
def encode_difference_int4(
    x: Any,
    past: Any,
    factors: Any,
    unit: Any,
    following: Any,
    bits: Any,
    mask: Any,
    scales: Any,
    codes: Any,
    draw: Any,
) -> int:
    """Predict and encode as int4, otherwise as ``encode_difference_int8``."""
    stochastic, key_a, key_b, first = draw
    bad = beyond = 0
    for block in range(scales.size):
        start, stop, lead, end = _int4_bounds(block, x.size)
        here, values, before = codes[lead:end], following[start:stop], past[start:stop]
        level = _fit(x[start:stop], before)
        factors[block] = level
        _subtract(x[start:stop], before, level * unit, values)
        if stochastic:
            index = np.uint32(first + np.uint32(start))
            scale = _int4_encode_stochastic(values, bits[start:stop], mask, here, key_a, key_b, index)
        else:
            scale = _int4_encode(values, bits[start:stop], mask, here)
        if scale == INFINITE:
            bad += count_not_single(values)
            continue
        scales[block] = scale
        _int4_decode(here, widen_scale(scale), values)
        _add(before, level * unit, values)
        if not np.isfinite(block_maximum(bits[start:stop], mask)):
            beyond += count_not_finite(values)
    return bad if bad else beyond


@kernel
def decode_difference_int4(
    scales: Any, codes: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any
) -> None:
    """Decode as int4, otherwise as ``decode_difference_int8``."""
    for block in range(scales.size):
        start, stop, lead, end = _int4_bounds(block, past.size)
        values = following[start:stop]
        _int4_decode(codes[lead:end], widen_scale(scales[block]), values)
        _add(past[start:stop], factors[block] * unit, values)
        if acc.size:
            _accumulate(values, acc[start:stop])
