"""The exponential in a form that compiles to vector instructions: libm's takes one value at a time.

``exp(v) = 2^k·exp(r)`` with integer k and ``|r| <= ln(2)/2``: a Taylor polynomial for exp(r), and k written into the
bits of the exponent (Cody and Waite, 1980, for the reduction in two parts).
"""

from fractions import Fraction
from functools import cache
from math import factorial

import numpy as np
import numpy.typing as npt

from mpitrain.kernels.jit import kernel

Vector = npt.NDArray[np.floating]
Words = npt.NDArray[np.signedinteger]
Scalars = tuple[np.floating, ...]

LN2 = Fraction("0.693147180559945309417232121458176568")

DEGREE = 13
"""Leaves an error of 5e-18, below the last bit of float64."""


@cache
def constants(dtype: "np.dtype[np.floating]") -> tuple[Scalars, Scalars, tuple[int, int]]:
    """List the arguments ``reduction``, ``taylor`` and ``exponent`` of `exponential` for float32 or float64."""
    info = np.finfo(dtype)
    kind = info.dtype.type
    # From the first exponent that means 0 to the one that means infinity.
    least, most = (-88, 89) if info.bits == 32 else (-709, 710)
    # The high part of ln 2 has so few bits that its product with k is exact.
    high = Fraction(round(LN2 * 2 ** (info.nmant - 11)), 2 ** (info.nmant - 11))
    reduction = (kind(least), kind(most), kind(float(1 / LN2)), kind(0.5), kind(float(high)), kind(float(LN2 - high)))
    taylor = tuple(kind(1 / factorial(power)) for power in range(DEGREE, -1, -1))
    return reduction, taylor, (info.maxexp - 1, info.nmant)


def workspace(size: int, dtype: "np.dtype[np.floating]") -> Words:
    """Allocate what `exponential` writes exponents into: (size,) integers as wide as ``dtype``."""
    return np.empty(size, np.int32 if np.finfo(dtype).bits == 32 else np.int64)


@kernel
def exponential(
    x: Vector,
    words: Words,
    reduction: Scalars,
    taylor: Scalars,
    exponent: tuple[int, int],
) -> None:
    """Replace ``x`` by exp(x), within a unit of the last place; NaN stays NaN.

    What is below the smallest normal number becomes 0; from 0.7 times the largest number on, the result is infinity.

    Parameters
    ----------
    x : (n,) float array
        Best of a size that stays in the first cache.
    words : (>= n,) integers as wide as x
        Workspace.
    reduction, taylor, exponent : tuple
        `constants` of the type of x.
    """
    least, most, reciprocal, half, high, low = reduction
    bias, shift = exponent
    c13, c12, c11, c10, c9, c8, c7, c6, c5, c4, c3, c2, c1, c0 = taylor
    for i in range(x.size):
        v = x[i]
        v = least if v < least else v  # comparisons with NaN are false, so it passes
        v = most if v > most else v
        k = np.floor(v * reciprocal + half)
        words[i] = words.dtype.type(half if np.isnan(k) else k)  # NaN has no integer
        r = v - k * high - k * low
        p = ((((((c13 * r + c12) * r + c11) * r + c10) * r + c9) * r + c8) * r + c7) * r + c6
        x[i] = (((((p * r + c5) * r + c4) * r + c3) * r + c2) * r + c1) * r + c0
    for i in range(x.size):
        words[i] = (words[i] + bias) << shift
    powers = words.view(x.dtype)
    for i in range(x.size):
        x[i] *= powers[i]
