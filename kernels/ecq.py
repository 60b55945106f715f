"""Uniform quantizer with a dead zone: its step from a sample, its codes, and back.

A code is ``trunc(|x| / step + 15/32)`` with the sign of x: values are rounded to nearest, a little towards zero, which
costs less in distortion than it saves in bits. Symbols are code + 128; symbol 0 stands for values beyond code 127,
which travel as they are.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float, window
from mpitrain.kernels.frequencies import count_symbols
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.quantize import count_not_single, widen_scale
from mpitrain.kernels.rans import BLOCK

LIMIT = 128
"""Symbol of code 0, and the smallest code that is not sent."""
MIN_STEP, MAX_STEP = 0x0080, 0x7C00
"""Bits of the smallest (normal) bfloat16 step, and of the largest of which 127.5 times is finite."""
CLASSES = 40
"""Classes of blocks by their mean magnitude, two an octave."""
RAW_BITS = 32
"""Bits of a value that travels as it is."""

_ROUND = np.float32(15 / 32)
_LIMIT = np.float32(LIMIT)
_ZERO = np.int32(LIMIT)
_SHIFT = 256.0
"""Reconstruction points are shifted in 256ths of a step."""
_CLOSE = 0.004
_OCTAVE = 128
"""Bfloat16 numbers in an octave."""


@kernel
def draw_sample(x: Any, sample: Any) -> float:
    """Copy ``sample.size`` of the values to ``sample`` (float32), spread by the golden ratio; return their energy."""
    energy = 0.0
    for i in range(sample.size):
        place = i if sample.size == x.size else ((i * 2654435769) & 0xFFFFFFFF) * x.size >> 32
        sample[i] = x[place]
        energy += np.float64(sample[i]) * np.float64(sample[i])
    return energy


@kernel
def measure_step(sample: Any, step: Any, counts: Any, sums: Any) -> float:
    """Quantize a sample.

    Parameters
    ----------
    sample : (size,) float32
    step : float32
    counts : (129,) int64, written
        How many values have each magnitude of code; the last are those that travel as they are.
    sums : (3,) float64, written
        Of magnitude less code, in steps, where the code is 0, 1, more.

    Returns
    -------
    float
        Squared error over the sample, if every reconstruction point is the mean of its values.
    """
    inverse = np.float32(1) / step
    counts[:] = 0
    sums[:] = 0
    squares = 0.0
    for i in range(sample.size):
        scaled = np.float32(abs(sample[i]) * inverse)
        code = np.int64(min(np.float32(scaled + _ROUND), _LIMIT))
        counts[code] += 1
        if code < LIMIT:
            error = np.float64(scaled) - code
            sums[min(code, 2)] += error
            squares += error * error
    more = sample.size - counts[0] - counts[1] - counts[LIMIT]
    for group, count in ((1, counts[1]), (2, more)):
        if count:
            squares -= sums[group] * sums[group] / count
    width = float(step)
    return float(max(squares, 0.0) * width * width)


@inlined
def _rate(counts: Any, size: int, log2: Any) -> float:
    """Entropy of a sample's codes in bits a value; ``log2`` holds 65,536ths."""
    total = size * np.int64(log2[size])
    for code in range(counts.size):
        total -= counts[code] * np.int64(log2[counts[code]])
    total += (size - counts[0] - counts[LIMIT]) * 65536  # signs
    total += counts[LIMIT] * RAW_BITS * 65536
    return float(total / (65536.0 * size))


@inlined
def _octaves(energy: float) -> float:
    """Grow with ``energy`` like its binary logarithm, which it is at powers of two: exact on every machine."""
    exponent = 0
    while energy >= 2.0:
        energy *= 0.5
        exponent += 1
    while energy < 1.0:
        energy *= 2.0
        exponent -= 1
    return exponent + (energy - 1.0)


@kernel
def find_step(sample: Any, guess: int, bits: float, noise: float, log2: Any, counts: Any, sums: Any) -> int:
    """Find the step that has a rate, or an error.

    Parameters
    ----------
    sample : (size,) float32
    guess : int
        Bits of a bfloat16 step to begin with.
    bits : float
        Rate to aim at, if above 0.
    noise : float
        Squared error over the sample to aim at, if ``bits`` is 0.
    log2 : (size + 1,) int
        Binary logarithms of the integers in 65,536ths; that of 0 is 0.
    counts, sums
        As in ``measure_step``, for the step that is returned.

    Returns
    -------
    int
        Bits of the bfloat16 step.
    """
    fine, coarse = MIN_STEP - 1, MAX_STEP + 1
    slope = 1.0
    here, before, before_excess = min(max(guess, MIN_STEP), MAX_STEP), 0, 0.0
    best, best_excess, kept = here, 1e300, False
    for _ in range(20):
        error = measure_step(sample, widen_scale(here), counts, sums)
        if bits > 0:
            excess = _rate(counts, sample.size, log2) - bits
        else:
            excess = 0.5 * (_octaves(noise) - _octaves(max(error, 1e-300)))
        # Where no step comes close, as with few different values: too few bits, or too little noise.
        within = excess < 0.25 if bits > 0 else excess > -0.25
        if best_excess == 1e300 or (within and (abs(excess) < abs(best_excess) or not kept)):
            best, best_excess, kept = here, excess, within
        if excess > 0:
            fine = here
        else:
            coarse = here
        if abs(excess) < _CLOSE or coarse - fine <= 1:
            break
        if before and here != before:
            slope = min(max((before_excess - excess) * _OCTAVE / (here - before), 0.1), 2.0)
        before, before_excess = here, excess
        move = int(np.rint(min(max(excess / slope, -64.0), 64.0) * _OCTAVE))
        here += move if move else (1 if excess > 0 else -1)
        if not fine < here < coarse:
            here = (fine + coarse) // 2
    measure_step(sample, widen_scale(best), counts, sums)
    return best


@inlined
def _quantize_block(x: Any, inverse: Any, codes: Any) -> tuple[Any, Any]:
    """Write the symbols of a block; return the sum of its magnitudes, and the largest scaled one before rounding."""
    # Integer arithmetic widens to 64 bits in numba; the casts keep the lanes narrow.
    total, top = np.int32(0), np.uint32(0)
    for i in range(x.size):
        value = np.float32(x[i]) * inverse
        magnitude = abs(value)
        top = max(top, as_bits(magnitude))
        code = np.int32(min(magnitude + _ROUND, _LIMIT))
        total = np.int32(total + code)
        codes[i] = np.uint8(np.int32(_ZERO + (code if value >= 0 else np.int32(-code))))
    return total, as_float(top)


@inlined
def _class_of(total: int) -> int:
    """Tell the class of a block by the sum of its magnitudes: the bits of its square, two an octave."""
    square, found = np.int64(total) * np.int64(total), 0
    while square:
        square >>= 1
        found += 1
    return found


@inlined
def _quantize(x: Any, inverse: Any, codes: Any, classes: Any, counts: Any, block: Any, count: Any) -> Any:
    here, symbols = window(x, block * BLOCK, count), window(codes, block * BLOCK, count)
    total, top = _quantize_block(here, inverse, symbols)
    bad = 0 if np.isfinite(top) else count_not_single(here)
    if not bad:
        kind = _class_of(total)
        classes[block] = kind
        count_symbols(symbols, counts[kind])
    return bad


@kernel
def quantize(x: Any, inverse: Any, codes: Any, classes: Any, counts: Any) -> int:
    """Quantize a vector.

    Parameters
    ----------
    x
        Not changed.
    inverse : float32
        One over the step.
    codes : (size,) uint8, written
        Symbols.
    classes : (ceil(size / 4096),) uint8, written
        Class of each block.
    counts : (CLASSES, PARTS, 256) uint32
        Added to: how often each symbol occurs in the blocks of a class.

    Returns
    -------
    int
        Elements that are not finite in float32; the output means nothing if there are any.
    """
    bad, whole = 0, x.size // BLOCK
    for block in range(whole):
        bad += _quantize(x, inverse, codes, classes, counts, block, BLOCK)
    if whole < classes.size:
        bad += _quantize(x, inverse, codes, classes, counts, whole, x.size - whole * BLOCK)
    return bad


@kernel
def collect_escapes(x: Any, codes: Any, escapes: Any) -> int:
    """Copy the values of symbol 0 to ``escapes`` while there is room; return how many there are."""
    count = 0
    for i in range(x.size):
        if codes[i] == 0:
            if count < escapes.size:
                escapes[count] = x[i]
            count += 1
    return count


@kernel
def fill_points(step: Any, first: int, more: int, points: Any) -> None:
    """Write the value of every symbol: those of codes 1 and -1 lie ``first`` / 256 steps further out, others ``more``.

    ``points`` is (256,) float32.
    """
    points[0] = points[LIMIT] = np.float32(0)
    for code in range(1, LIMIT):
        shift = first if code == 1 else more
        value = np.float32(code + shift / _SHIFT) * step
        points[LIMIT + code] = value
        points[LIMIT - code] = -value


@kernel
def look_up(codes: Any, points: Any, out: Any) -> None:
    """Write the values of symbols to ``out``."""
    for i in range(out.size):
        out[i] = points[codes[i]]


@kernel
def look_up_add(codes: Any, points: Any, acc: Any) -> None:
    """Add the values of symbols to ``acc``."""
    for i in range(acc.size):
        acc[i] += points[codes[i]]


@kernel
def put_escapes(codes: Any, escapes: Any, out: Any) -> None:
    """Write ``escapes`` where symbol 0 stands; as many as there are of it."""
    count = 0
    for i in range(out.size):
        if codes[i] == 0:
            out[i] = escapes[count]
            count += 1


@kernel
def add_escapes(codes: Any, escapes: Any, acc: Any) -> None:
    """Add ``escapes`` where symbol 0 stands; as many as there are of it."""
    count = 0
    for i in range(acc.size):
        if codes[i] == 0:
            acc[i] += escapes[count]
            count += 1
