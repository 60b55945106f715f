"""The k largest magnitudes of a vector, exactly: selection, the two integers that stand for each, and their way back.

Magnitudes are compared as unsigned integers, ``bits & mask`` with the sign cleared: the order is that of the floats,
and what is not finite is largest of all.

The levels of the values are uniform on those integers, which is a logarithm made of straight lines: two bits of
mantissa are kept, so the middle of a level is at most an eighth off, in whole numbers and alike on every machine.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.bits import as_bits, as_float, trailing_zeros
from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.rng import noise

DIGIT_BITS = 11
LANES = 32
LEVELS_END = 0x3FC
"""First level that is not finite."""

_DIGIT_BITS = np.uint64(DIGIT_BITS)
_LANES = LANES
_LEVEL_SHIFT = np.uint32(21)
_HALF_LEVEL = np.uint32(1 << 20)
_SIGN = np.uint32(1 << 31)
_MAGNITUDE = np.uint32((1 << 31) - 1)
_LARGEST = 3.4028234663852886e38
_ONE = np.uint64(1)


@kernel
def draw_sample(bits: Any, sample: Any) -> None:
    """Copy one element of each of ``sample.size`` equal stretches, at places that depend on the sizes alone.

    They are scattered, so that no row length of a matrix meets the same column again and again.
    """
    stretch = bits.size // sample.size
    for i in range(sample.size):
        sample[i] = bits[i * stretch + int(noise(np.uint32(0), np.uint32(0), np.uint32(i)) * stretch)]


@kernel
def find_largest(bits: Any, mask: Any, rank: int, top_bit: int, counts: Any) -> tuple[Any, Any]:
    """Find the ``rank``-th largest magnitude (1 is the largest) by a radix select.

    Parameters
    ----------
    bits, mask
        At least ``rank`` values as unsigned integers, and the integer that clears the sign bit.
    top_bit : int
        Bits of a magnitude.
    counts : (2^DIGIT_BITS,) int64, overwritten

    Returns
    -------
    magnitude, ties : int
        How many of the ``rank`` largest are of just this magnitude; all larger ones belong to them.
    """
    prefix, shift, ties = np.uint64(0), np.uint64(top_bit), rank
    while shift > 0:
        width = min(_DIGIT_BITS, shift)
        above, low = shift, np.uint64((_ONE << width) - _ONE)
        shift = np.uint64(shift - width)
        counts[:] = 0
        for i in range(bits.size):
            magnitude = np.uint64(bits[i] & mask)
            if magnitude >> above == prefix:
                counts[(magnitude >> shift) & low] += 1
        digit = np.int64(low)
        while counts[digit] < ties:
            ties -= counts[digit]
            digit -= 1
        prefix = np.uint64((prefix << width) | np.uint64(digit))
    return prefix, ties


@inlined
def _hits(bits: Any, mask: Any, threshold: Any, top_bit: Any) -> Any:
    # The sign of a difference, not a comparison: that vectorizes a fifth better.
    kind, hits = bits.dtype.type, np.uint32(0)
    below = kind(threshold - kind(1))
    for i in range(_LANES):
        hit = np.uint32(kind(kind(below - kind(bits[i] & mask)) >> top_bit))
        hits = np.uint32(hits | np.uint32(hit << np.uint32(i)))
    return hits


@kernel
def gather_above(bits: Any, mask: Any, threshold: Any, places: Any, found: Any) -> int:
    """Collect the magnitudes of ``threshold`` (1 or more) and above; return the count, or -1 where room may not do.

    The comparisons of LANES elements become the bits of one word, so there is a branch only for what is found.

    Parameters
    ----------
    places, found : vectors of equal size, written
        Indices, and the bits there.
    """
    count, top_bit = 0, bits.dtype.type(8 * bits.itemsize - 1)
    whole = bits.size // _LANES * _LANES
    for start in range(0, whole, _LANES):
        here = bits[start : start + _LANES]
        hits = _hits(here, mask, threshold, top_bit)
        if count + _LANES > places.size:
            return -1
        while hits:
            lane = trailing_zeros(hits)
            hits = np.uint32(hits & np.uint32(hits - np.uint32(1)))
            places[count], found[count] = start + lane, here[lane]
            count += 1
    if count + _LANES > places.size:
        return -1
    for i in range(whole, bits.size):
        places[count], found[count] = i, bits[i]
        count += (bits[i] & mask) >= threshold
    return count


@kernel
def keep_largest(places: Any, found: Any, mask: Any, threshold: Any, ties: int) -> int:
    """Move to the front what is larger than ``threshold``, and the first ``ties`` of just that; return the count."""
    count = 0
    for i in range(places.size):
        place, value = places[i], found[i]
        magnitude = np.uint64(value & mask)
        tie = (magnitude == threshold) & (ties > 0)
        places[count], found[count] = place, value
        ties -= tie
        count += tie | (magnitude > threshold)
    return count


@kernel
def gather_largest(bits: Any, mask: Any, threshold: Any, ties: int, places: Any, found: Any) -> int:
    """Collect from the whole vector what ``keep_largest`` keeps, which is at most ``places.size``."""
    count = 0
    for i in range(bits.size):
        magnitude = np.uint64(bits[i] & mask)
        tie = (magnitude == threshold) & (ties > 0)
        if tie | (magnitude > threshold):
            places[count], found[count] = i, bits[i]
            count += 1
            ties -= tie
    return count


@kernel
def to_integers(places: Any, values: Any, gaps: Any, levels: Any) -> tuple[Any, int]:
    """Turn places into the gaps between them, and values into twice their level, plus 1 where negative.

    Parameters
    ----------
    places : (k,) uint32
        Increasing.
    values : (k,) float32 or float64
    gaps, levels : (k,) uint32, written
        ``gaps`` may be ``places``. The levels count from the lowest one.

    Returns
    -------
    lowest, nonfinite : int
        The lowest level, and how many values are not finite in float32; with any the output means nothing.
    """
    nonfinite, after, lowest = 0, np.int64(0), np.uint32(LEVELS_END)
    for i in range(places.size):
        place = np.int64(places[i])
        gaps[i] = place - after
        after = place + 1
        nonfinite += not (abs(values[i]) <= _LARGEST)
        bits = as_bits(np.float32(values[i]))
        level = np.uint32(np.uint32(bits & _MAGNITUDE) >> _LEVEL_SHIFT)
        lowest = min(lowest, level)
        levels[i] = (level << np.uint32(1)) | (bits >> np.uint32(31))
    for i in range(places.size):
        levels[i] -= lowest << np.uint32(1)
    return lowest, nonfinite


@kernel
def measure_span(gaps: Any) -> Any:
    """Return one more than the last place."""
    span = np.int64(gaps.size)
    for i in range(gaps.size):
        span += np.int64(gaps[i])
    return span


@inlined
def _value(level: Any, lowest: Any) -> Any:
    magnitude = np.uint32(((level >> np.uint32(1)) + lowest) << _LEVEL_SHIFT) + _HALF_LEVEL
    return as_float(np.uint32(magnitude | np.uint32(level << np.uint32(31))))


@kernel
def scatter(gaps: Any, levels: Any, lowest: Any, out: Any) -> None:
    """Write the values to their places in ``out``; gaps must be measured, and levels within the finite ones."""
    place = np.uint64(0)
    for i in range(gaps.size):
        place += np.uint64(gaps[i])
        out[place] = _value(levels[i], lowest)
        place += _ONE


@kernel
def scatter_add(gaps: Any, levels: Any, lowest: Any, acc: Any) -> None:
    """Add the values to ``acc`` at their places (as ``scatter`` otherwise)."""
    place = np.uint64(0)
    for i in range(gaps.size):
        place += np.uint64(gaps[i])
        acc[place] += _value(levels[i], lowest)
        place += _ONE
