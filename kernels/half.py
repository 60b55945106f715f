"""Half precision: encode, decode, decode-add."""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float, half_to_single, single_to_half
from mpitrain.kernels.jit import inlined, kernel

_EXPONENT = np.uint16(0x7C00)


@kernel
def encode_half(x: Any, scale: Any, halves: Any) -> int:
    """Round ``x * scale`` (float32) to halves; return how many came out infinite or NaN."""
    infinite = 0
    for i in range(x.size):
        half = single_to_half(x[i] * scale)
        halves[i] = half
        infinite += (half & _EXPONENT) == _EXPONENT
    return infinite


@inlined
def round_to_odd(wide: Any) -> Any:
    """Narrow a float64 to float32 so that a further rounding gives what a single one would have given.

    Rounding to odd (cut towards zero, then set the last bit if anything was lost) keeps the information that the second
    rounding needs (Boldo and Melquiond, 2008).
    """
    single = np.float32(wide)
    bits = as_bits(single)
    if np.float64(single) != wide:
        bits -= np.uint32(abs(np.float64(single)) > abs(wide))
        bits |= np.uint32(1)
    return as_float(np.uint32(bits))


@kernel
def encode_half_wide(x: Any, scale: Any, halves: Any) -> int:
    """Round ``x * scale`` (float64) to halves in one rounding; the way over float32 would round twice."""
    infinite = 0
    for i in range(x.size):
        half = single_to_half(round_to_odd(x[i] * scale))
        halves[i] = half
        infinite += (half & _EXPONENT) == _EXPONENT
    return infinite


@kernel
def decode_half(halves: Any, scale: Any, out: Any) -> None:
    """Write ``halves * scale`` to ``out``."""
    for i in range(halves.size):
        out[i] = half_to_single(halves[i]) * scale


@kernel
def decode_half_add(halves: Any, scale: Any, acc: Any) -> None:
    """Add ``halves * scale`` to ``acc``."""
    for i in range(halves.size):
        acc[i] += half_to_single(halves[i]) * scale
