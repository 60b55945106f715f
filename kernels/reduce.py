"""Sums and scans over plain vectors."""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import kernel


@kernel
def add(x: Any, acc: Any) -> None:
    """Add ``x`` to ``acc``."""
    for i in range(x.size):
        acc[i] += x[i]


@kernel
def copy_count_not_finite(x: Any, out: Any) -> int:
    """Copy ``x`` to ``out``; return how many values are NaN or infinite."""
    bad = 0
    for i in range(x.size):
        value = x[i]
        out[i] = value
        bad += not np.isfinite(value)
    return bad


@kernel
def count_not_finite(x: Any) -> int:
    """Count the values that are NaN or infinite."""
    bad = 0
    for i in range(x.size):
        bad += not np.isfinite(x[i])
    return bad
