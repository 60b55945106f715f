"""Prediction from the past: alone, and in one pass with the coding of the difference.

The loops of the codecs work block by block in the first cache, by the functions of which the separate passes are made:
bytes and floats are the same. Blocks of codec and prediction are the same 128 elements.
"""

from typing import Any

import numpy as np

from mpitrain.kernels import int4, lanes, quantize
from mpitrain.kernels.bits import as_bits, as_float, window
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import (
    INFINITE,
    NEAREST,
    choose_scale,
    count_not_single,
    whole_blocks,
    widen_scale,
)
from mpitrain.kernels.reduce import count_not_finite

BLOCK = 128
LEVELS = 15
"""The prediction's factor is k / 15, k from 0 to 15: four bits a block."""

_BLOCK = BLOCK

_HALF = BLOCK // 2

# Only functions that a kernel names directly are compiled into it.
_round8, _round8_stochastic, _decode8 = quantize.round_block, quantize.round_block_stochastic, quantize.decode_block
_round4, _round4_stochastic, _decode4 = int4.round_block, int4.round_block_stochastic, int4.decode_block
_LIMIT8, _MAX_SCALE8 = quantize.LIMIT, np.uint32(quantize.MAX_SCALE)
_LIMIT4, _MAX_SCALE4 = int4.LIMIT, np.uint32(int4.MAX_SCALE)


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
def _subtract(x: Any, past: Any, factor: Any, out: Any) -> Any:
    """Write the difference to a prediction; return its largest absolute value."""
    top = as_bits(x.dtype.type(0))
    for i in range(x.size):
        difference = x[i] - factor * past[i]
        out[i] = difference
        top = max(top, as_bits(abs(difference)))
    return as_float(top)


@inlined
def _add(past: Any, factor: Any, out: Any) -> Any:
    """Add the prediction; return the largest absolute value of the result."""
    top = as_bits(out.dtype.type(0))
    for i in range(out.size):
        value = out[i] + factor * past[i]
        out[i] = value
        top = max(top, as_bits(abs(value)))
    return as_float(top)


@inlined
def _accumulate(past: Any, factor: Any, out: Any, acc: Any) -> None:
    """Add the prediction to ``out``, and the result to ``acc``."""
    for i in range(out.size):
        value = out[i] + factor * past[i]
        out[i] = value
        acc[i] += value


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


@inlined
def _encode8(
    x: Any,
    past: Any,
    factors: Any,
    unit: Any,
    following: Any,
    scales: Any,
    codes: Any,
    draw: Any,
    block: Any,
    count: Any,
) -> tuple[Any, Any]:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    here, before = window(x, start, count), window(past, start, count)
    values, into = window(following, start, count), window(codes, start, count)
    level = _fit(here, before)
    factors[block] = level
    scale, inverse = choose_scale(_subtract(here, before, level * unit, values), _LIMIT8, _MAX_SCALE8)
    if scale == INFINITE:
        return count_not_single(values), 0
    scales[block] = scale
    if stochastic:
        _round8_stochastic(values, inverse, into, key_a, key_b, np.uint32(first + np.uint32(start)))
    else:
        _round8(values, inverse, into)
    _decode8(into, widen_scale(scale), values)
    return 0, 0 if np.isfinite(_add(before, level * unit, values)) else count_not_finite(values)


@kernel
def encode_difference_int8(
    x: Any, past: Any, factors: Any, unit: Any, following: Any, scales: Any, codes: Any, draw: Any
) -> int:
    """Predict ``x`` and encode the difference.

    Parameters
    ----------
    x, past
        Not changed.
    factors : (ceil(size / 128),) uint8, written
    unit
        1 / 15 in the arrays' type.
    following
        Receives what the other end decodes. Means nothing where elements are not finite.
    scales, codes, draw
        As of ``encode_int8``.

    Returns
    -------
    int
        Elements of the difference that are not finite in float32; if there are none, elements of ``following`` that
        are not finite. The output means nothing if there are any.
    """
    bad, beyond, whole = 0, 0, whole_blocks(x, draw)
    for block in range(whole):
        wrong, more = _encode8(x, past, factors, unit, following, scales, codes, NEAREST, block, _BLOCK)
        bad, beyond = bad + wrong, beyond + more
    for block in range(whole, scales.size):
        count = min(_BLOCK, x.size - block * _BLOCK)
        wrong, more = _encode8(x, past, factors, unit, following, scales, codes, draw, block, count)
        bad, beyond = bad + wrong, beyond + more
    return bad if bad else beyond


@inlined
def _decode_add8(
    scales: Any, codes: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any, block: Any, count: Any
) -> None:
    start = block * _BLOCK
    values, before, factor = window(following, start, count), window(past, start, count), factors[block] * unit
    _decode8(window(codes, start, count), widen_scale(scales[block]), values)
    if acc.size:
        _accumulate(before, factor, values, window(acc, start, count))
    else:
        _add(before, factor, values)


@kernel
def decode_difference_int8(
    scales: Any, codes: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any
) -> None:
    """Write what ``encode_difference_int8`` said is decoded, and add it to ``acc`` unless that is of size 0."""
    whole = past.size // _BLOCK
    for block in range(whole):
        _decode_add8(scales, codes, past, factors, unit, following, acc, block, _BLOCK)
    if whole < scales.size:
        _decode_add8(scales, codes, past, factors, unit, following, acc, whole, past.size - whole * _BLOCK)


@inlined
def _encode4(
    x: Any,
    past: Any,
    factors: Any,
    unit: Any,
    following: Any,
    scales: Any,
    packed: Any,
    draw: Any,
    block: Any,
    count: Any,
) -> tuple[Any, Any]:
    stochastic, key_a, key_b, first = draw
    start = block * _BLOCK
    here, before = window(x, start, count), window(past, start, count)
    values, into = window(following, start, count), window(packed, block * _HALF, (count + 1) // 2)
    level = _fit(here, before)
    factors[block] = level
    scale, inverse = choose_scale(_subtract(here, before, level * unit, values), _LIMIT4, _MAX_SCALE4)
    if scale == INFINITE:
        return count_not_single(values), 0
    scales[block] = scale
    if stochastic:
        _round4_stochastic(values, inverse, into, key_a, key_b, np.uint32(first + np.uint32(start)))
    else:
        _round4(values, inverse, into)
    _decode4(into, widen_scale(scale), values)
    return 0, 0 if np.isfinite(_add(before, level * unit, values)) else count_not_finite(values)


@kernel
def encode_difference_int4(
    x: Any, past: Any, factors: Any, unit: Any, following: Any, scales: Any, packed: Any, draw: Any
) -> int:
    """Predict and encode as int4, otherwise as ``encode_difference_int8``."""
    bad, beyond, whole = 0, 0, whole_blocks(x, draw)
    for block in range(whole):
        wrong, more = _encode4(x, past, factors, unit, following, scales, packed, NEAREST, block, _BLOCK)
        bad, beyond = bad + wrong, beyond + more
    for block in range(whole, scales.size):
        count = min(_BLOCK, x.size - block * _BLOCK)
        wrong, more = _encode4(x, past, factors, unit, following, scales, packed, draw, block, count)
        bad, beyond = bad + wrong, beyond + more
    return bad if bad else beyond


@inlined
def _decode_add4(
    scales: Any, packed: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any, block: Any, count: Any
) -> None:
    start = block * _BLOCK
    values, before, factor = window(following, start, count), window(past, start, count), factors[block] * unit
    _decode4(window(packed, block * _HALF, (count + 1) // 2), widen_scale(scales[block]), values)
    if acc.size:
        _accumulate(before, factor, values, window(acc, start, count))
    else:
        _add(before, factor, values)


@kernel
def decode_difference_int4(
    scales: Any, packed: Any, past: Any, factors: Any, unit: Any, following: Any, acc: Any
) -> None:
    """Decode as int4, otherwise as ``decode_difference_int8``."""
    whole = past.size // _BLOCK
    for block in range(whole):
        _decode_add4(scales, packed, past, factors, unit, following, acc, block, _BLOCK)
    if whole < scales.size:
        _decode_add4(scales, packed, past, factors, unit, following, acc, whole, past.size - whole * _BLOCK)
