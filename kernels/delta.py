"""What a memory adds around a codec: error feedback and prediction from the past."""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import kernel

BLOCK = 128
LEVELS = 15
"""The prediction's factor is k / 15, k from 0 to 15: four bits a block."""

_BLOCK = BLOCK


@kernel
def _dot(a: Any, b: Any) -> Any:
    """Sum ``a * b`` in float64 over four interleaved partial sums, in an order that depends on the size alone."""
    s0 = s1 = s2 = s3 = np.float64(0)
    whole = a.size - a.size % 4
    for i in range(0, whole, 4):
        s0 += np.float64(a[i]) * b[i]
        s1 += np.float64(a[i + 1]) * b[i + 1]
        s2 += np.float64(a[i + 2]) * b[i + 2]
        s3 += np.float64(a[i + 3]) * b[i + 3]
    for i in range(whole, a.size):
        s0 += np.float64(a[i]) * b[i]
    return (s0 + s1) + (s2 + s3)


@kernel
def fit_factors(x: Any, past: Any, factors: Any) -> None:
    """Choose for each block the factor with which ``past`` predicts ``x`` best (least squares, within 0 and 1)."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        power = _dot(past[start:stop], past[start:stop])
        fit = _dot(x[start:stop], past[start:stop]) / power if power > 0 else 0.0
        factors[block] = np.uint8(np.rint(min(max(fit, 0.0), 1.0) * LEVELS)) if np.isfinite(fit) else np.uint8(0)


@kernel
def subtract_prediction(x: Any, past: Any, factors: Any, unit: Any, out: Any) -> None:
    """Write ``x - factor * past`` to ``out``; ``unit`` is 1 / 15 in the arrays' type."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, x.size)
        factor = factors[block] * unit
        a, b, c = x[start:stop], past[start:stop], out[start:stop]
        for i in range(a.size):
            c[i] = a[i] - factor * b[i]


@kernel
def add_prediction(past: Any, factors: Any, unit: Any, out: Any) -> None:
    """Add ``factor * past`` to ``out``."""
    for block in range(factors.size):
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, out.size)
        factor = factors[block] * unit
        b, c = past[start:stop], out[start:stop]
        for i in range(c.size):
            c[i] += factor * b[i]


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
