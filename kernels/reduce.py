"""Arithmetic and scans over plain vectors."""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import smallest_normal
from mpitrain.kernels.jit import inlined, kernel


@inlined
def flushed(value: Any) -> Any:
    """Return ``value``, or 0 where it is subnormal: a residual of such numbers slows every step that touches it."""
    # The difference to itself is 0, or NaN for NaN, which no comparison finds.
    return value if abs(value) >= smallest_normal(value) else value - value


@kernel
def add(x: Any, acc: Any) -> None:
    """Add ``x`` to ``acc``."""
    for i in range(x.size):
        acc[i] += x[i]


@kernel
def subtract(x: Any, rest: Any) -> None:
    """Subtract ``x`` from ``rest``; what is subnormal becomes 0."""
    for i in range(x.size):
        rest[i] = flushed(rest[i] - x[i])


@kernel
def flush(x: Any) -> None:
    """Replace subnormal numbers by 0."""
    for i in range(x.size):
        x[i] = flushed(x[i])


@kernel
def multiply(x: Any, by: Any) -> None:
    """Multiply ``x`` by ``by``, element by element."""
    for i in range(x.size):
        x[i] *= by[i]


@kernel
def divide(x: Any, by: Any) -> None:
    """Divide ``x`` by ``by``, element by element."""
    for i in range(x.size):
        x[i] /= by[i]


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
