"""bfloat16, the upper half of a float32: encode, decode, decode-add."""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float
from mpitrain.kernels.half import round_to_odd
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import count_not_single

LARGEST = 0x7F7F
"""Bits of the largest finite bfloat16."""

_LARGEST = np.uint32(LARGEST)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIGN = np.uint32(0x8000)
_MASK = np.uint16(0x7FFF)
_SHIFT = np.uint32(16)
_PART = 4096


@inlined
def round_magnitude(bits: Any) -> Any:
    """Round the bits of a finite float32 above 0 to the nearest bfloat16, ties to even, never to infinity."""
    return min(np.uint32(np.uint32(bits + _HALF + ((bits >> _SHIFT) & _ONE)) >> _SHIFT), _LARGEST)


@inlined
def _round(bits: Any) -> Any:
    return np.uint16(round_magnitude(np.uint32(bits & _MAGNITUDE)) | (np.uint32(bits >> _SHIFT) & _SIGN))


@kernel
def encode_bf16(x: Any, bits: Any, codes: Any) -> int:
    """Round float32 (``bits``: the same memory as uint32) to bfloat16; return how many are NaN or infinite."""
    bad = 0
    for start in range(0, x.size, _PART):
        here, rounded = bits[start : start + _PART], codes[start : start + _PART]
        top = np.uint32(0)
        for i in range(here.size):
            top = max(top, np.uint32(here[i] & _MAGNITUDE))
            rounded[i] = _round(here[i])
        if top >= _INFINITE:
            bad += count_not_single(x[start : start + _PART])
    return bad


@kernel
def encode_bf16_wide(x: Any, codes: Any) -> int:
    """Round float64 to bfloat16 in one rounding; return how many are not finite in float32."""
    for i in range(x.size):
        codes[i] = _round(as_bits(round_to_odd(x[i])))
    return count_not_single(x)


@kernel
def count_infinite(codes: Any) -> int:
    """Count the bfloat16 that are infinite or NaN."""
    count = 0
    for start in range(0, codes.size, _PART):
        part, top = codes[start : start + _PART], np.uint16(0)
        for i in range(part.size):
            top = max(top, np.uint16(part[i] & _MASK))
        if top > _LARGEST:
            for i in range(part.size):
                count += 1 if (part[i] & _MASK) > _LARGEST else 0
    return count


@kernel
def decode_bf16(codes: Any, out: Any) -> None:
    """Widen to ``out``."""
    for i in range(codes.size):
        out[i] = as_float(np.uint32(np.uint32(codes[i]) << _SHIFT))


@kernel
def decode_bf16_add(codes: Any, acc: Any) -> None:
    """Widen and add to ``acc``."""
    for i in range(codes.size):
        acc[i] += as_float(np.uint32(np.uint32(codes[i]) << _SHIFT))
