"""Models of an entropy coder: frequencies of 256 symbols that add up to 4,096, from few parameters or from counts.

Both ends must find the same frequencies, so everything here is integer arithmetic. Symbol 128 is code 0, symbol 0 an
escape; codes reach from ``-last`` to ``last``.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import inlined, kernel
from mpitrain.kernels.rans import BLOCK, TOTAL

GEOMETRIC, GAUSSIAN = 0, 1
"""Shapes of a parametric model: what a Laplace and a Gaussian source become when they are quantized."""

_ZERO = 128
_ONE = 1 << 31


@inlined
def _decay(shape: int, tail: int) -> tuple[int, int]:
    """Return the ratio of the weights of codes 2 and 1, and that of successive ratios; 2^31 stands for 1."""
    if shape == GEOMETRIC:
        return tail << 23, _ONE
    base = 65536 - tail * tail
    square = (base * base) >> 1
    return (square * base) >> 16, square


PARTS = 4
"""Counters of a symbol that take turns: one alone would wait for itself where a symbol follows itself."""


@inlined
def count_symbols(symbols: Any, counts: Any) -> None:
    """Add to ``counts``, (PARTS, 256) uint32, how often each symbol occurs."""
    one, two, three, four = counts[0], counts[1], counts[2], counts[3]
    whole = symbols.size // PARTS * PARTS
    for i in range(0, whole, PARTS):
        one[symbols[i]] += np.uint32(1)
        two[symbols[i + 1]] += np.uint32(1)
        three[symbols[i + 2]] += np.uint32(1)
        four[symbols[i + 3]] += np.uint32(1)
    for i in range(whole, symbols.size):
        one[symbols[i]] += np.uint32(1)


@kernel
def flip_and_count(codes: Any, flip: Any, symbols: Any, counts: Any) -> None:
    """Write ``codes ^ flip`` to ``symbols``, both uint8, and add to ``counts`` as ``count_symbols`` does."""
    for start in range(0, codes.size, BLOCK):
        here, into = codes[start : start + BLOCK], symbols[start : start + BLOCK]
        for i in range(here.size):
            into[i] = here[i] ^ flip
        count_symbols(into, counts)


@kernel
def fill_parametric(shape: int, last: int, zero: int, tail: int, escape: int, freqs: Any) -> None:
    """Write the frequencies of a parametric model.

    Parameters
    ----------
    shape : int
        GEOMETRIC: the weight of code k + 1 is tail / 256 times that of k. GAUSSIAN: the weight of code k is
        (1 - (tail / 256)^2)^(k^2).
    last : int
        Largest code, 0 to 127.
    zero, tail : int
        Share of code 0 in 256ths (1 to 255), and as above (0 to 255).
    escape : int
        1 if there are escapes, else 0: their frequency.
    freqs : (256,) uint32, written
    """
    freqs[:] = 0
    first_ratio, growth = _decay(shape, tail)
    total, weight, ratio = 0, _ONE, first_ratio
    for _ in range(last):
        total += weight
        weight, ratio = (weight * ratio) >> 31, (ratio * growth) >> 31
    share = max((TOTAL // 256 * (256 - zero) - 2 * last - escape) // 2, 0)
    rest, weight, ratio = TOTAL - escape, _ONE, first_ratio
    for code in range(1, last + 1):
        freq = 1 + (weight >> 8) * share // (total >> 8)
        freqs[_ZERO + code] = freqs[_ZERO - code] = freq
        rest -= 2 * freq
        weight, ratio = (weight * ratio) >> 31, (ratio * growth) >> 31
    freqs[0] = escape
    freqs[_ZERO] = rest


@kernel
def fill_counted(counts: Any, freqs: Any) -> None:
    """Write frequencies in proportion to ``counts`` ((256,) int64, not all 0), at least 1 for what occurs at all."""
    size = counts.sum()
    rare, common = 0, 0
    for symbol in range(counts.size):
        if counts[symbol] * TOTAL > size:
            common += counts[symbol]
        else:
            rare += counts[symbol] > 0
    rest, seen, given, top = TOTAL, 0, 0, 0
    for symbol in range(counts.size):
        if counts[symbol] * TOTAL > size:
            # What rounding takes from one symbol it gives to the next.
            seen += counts[symbol]
            freq = max(seen * (TOTAL - rare) // common - given, 1)
            given = seen * (TOTAL - rare) // common
        else:
            freq = np.int64(counts[symbol] > 0)
        freqs[symbol] = freq
        rest -= freq
        if counts[symbol] > counts[top]:
            top = symbol
    freqs[top] += rest


@kernel
def cost_of(counts: Any, freqs: Any, log2: Any) -> int:
    """Return the 65,536ths of a bit that symbols cost; -1 where one of them has no frequency.

    ``log2`` holds the binary logarithms of integers in 65,536ths.
    """
    cost = 0
    for symbol in range(counts.size):
        if counts[symbol]:
            if not freqs[symbol]:
                return -1
            cost += counts[symbol] * (np.int64(log2[TOTAL]) - np.int64(log2[freqs[symbol]]))
    return cost


@kernel
def fit_tail(shape: int, last: int, zero: int, escape: int, counts: Any, log2: Any, freqs: Any) -> int:
    """Find the tail with which symbols cost least, by halving steps from the middle; ``freqs`` is overwritten."""
    best, step = 128, 64
    fill_parametric(shape, last, zero, best, escape, freqs)
    least = cost_of(counts, freqs, log2)
    while step:
        middle = best
        for tail in (middle - step, middle + step):
            if 0 <= tail <= 255:
                fill_parametric(shape, last, zero, tail, escape, freqs)
                cost = cost_of(counts, freqs, log2)
                if cost < least:
                    best, least = tail, cost
        step >>= 1
    return best
