"""Range coding with asymmetric numeral systems (Duda 2009; interleaved as in Giesen 2014).

A coder is one integer below 2^31. Coding a symbol of frequency ``f`` (of 4,096) multiplies it by about 4096 / f; where
that would leave the range, 16 bits go to the wire first. Decoding runs backwards: the last symbol comes first, and the
last word is read first. Eight coders take turns, so that the processor works on eight symbols at once; all share one
stream of words, since who needs one follows from the states.

Rows of eight symbols belong to coders 0 to 7; what is left behind the last row, and all of a vector without rows,
belongs to coder 0.
"""

from typing import Any

import numpy as np

from mpitrain.kernels.jit import inlined, kernel

LANES = 8
"""Coders that take turns."""
SCALE_BITS = 12
TOTAL = 1 << SCALE_BITS
"""Sum of the frequencies of a model."""
LOWEST = 1 << 15
"""Smallest state, and the one that a coder starts from and must come back to; all are below 2^16 times it."""
BLOCK = 4096
"""Symbols that share a model."""

STEPS = 1024
"""Numbers with which an encoder works, of a model."""

_ONE, _TWO, _THREE, _EIGHT = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(8)
_WORD_BITS, _WORD = np.uint64(16), np.uint64(0xFFFF)
_SLOT_BITS, _SLOT = np.uint64(SCALE_BITS), np.uint64(TOTAL - 1)
_TOTAL = np.uint64(TOTAL)
_LOWEST = np.uint64(LOWEST)
_FULL_BITS = np.uint64(19)
_RECIPROCAL_BITS = np.uint64(43)
_SYMBOL = np.uint64(0xFF)
_FREQ_AT, _OFFSET_AT = np.uint64(8), np.uint64(20)
_ROW = LANES
_ROOM = np.uint64(2 * LANES)


@kernel
def prepare_encoder(freqs: Any, steps: Any) -> None:
    """Lay out a model for the encoder.

    Parameters
    ----------
    freqs : (256,) uint32
        Frequencies f of the symbols; their sum is 4,096.
    steps : (1024,) uint64, written
        Four numbers a symbol: f * 2^19, from which on a state is full; floor(2^43 / f) + 1; the sum of the frequencies
        before; 4,096 - f. With the second, r, ``x * r >> 43`` is exactly x // f for every x below f * 2^19 (Alverson
        1991): the error x * f / 2^43 / f stays below 1 / f.
    """
    start = np.uint64(0)
    for symbol in range(freqs.size):
        freq = np.uint64(freqs[symbol])
        steps[4 * symbol] = freq << _FULL_BITS
        steps[4 * symbol + 1] = (_ONE << _RECIPROCAL_BITS) // freq + _ONE if freq else np.uint64(0)
        steps[4 * symbol + 2] = start
        steps[4 * symbol + 3] = _TOTAL - freq
        start += freq


@kernel
def prepare_decoder(freqs: Any, slots: Any) -> None:
    """Lay out a model for the decoder.

    Parameters
    ----------
    freqs : (256,) uint32
        As above.
    slots : (4096,) uint32, written
        By the low 12 bits of a state: the symbol (8 bits), its frequency less one (12), and how far into the symbol's
        slots this one lies (12).
    """
    at = 0
    for symbol in range(freqs.size):
        for offset in range(freqs[symbol]):
            slots[at] = symbol | (freqs[symbol] - 1) << 8 | offset << 20
            at += 1


@inlined
def _put(state: Any, symbol: Any, steps: Any, wire: Any, at: Any) -> tuple[Any, Any]:
    place = np.uint64(symbol) << _TWO
    # Written in any case and kept where the state is full: cheaper than a jump that nobody can predict.
    wire[at] = np.uint8(state & _SYMBOL)
    wire[at + _ONE] = np.uint8((state >> _EIGHT) & _SYMBOL)
    full = state >= steps[place]
    at = at + _TWO if full else at
    state = state >> _WORD_BITS if full else state
    quotient = (state * steps[place + _ONE]) >> _RECIPROCAL_BITS
    return state + steps[place + _TWO] + quotient * steps[place + _THREE], at


@inlined
def _get(state: Any, slots: Any, wire: Any, at: Any) -> tuple[Any, Any, Any]:
    slot = np.uint64(slots[state & _SLOT])
    freq = ((slot >> _FREQ_AT) & _SLOT) + _ONE
    state = freq * (state >> _SLOT_BITS) + (slot >> _OFFSET_AT)
    word = np.uint64(wire[at - _TWO]) | np.uint64(wire[at - _ONE]) << _EIGHT
    low = state < _LOWEST
    at = at - _TWO if low else at
    state = (state << _WORD_BITS) | word if low else state
    return np.uint8(slot & _SYMBOL), state, at


@kernel
def encode_symbols(codes: Any, lanes: int, models: Any, steps: Any, wire: Any, states: Any) -> int:
    """Encode symbols.

    Parameters
    ----------
    codes : (size,) uint8
        Symbols, each of a frequency above 0 in the model of its block.
    lanes : int
        1 for no rows, else 8.
    models : (ceil(size / 4096),) uint8
        Index of the model of each block.
    steps : (models, 1024)
        From ``prepare_encoder``.
    wire : uint8, written
        Room for the words, little-endian.
    states : (8,) uint64, written
        Where the coders ended.

    Returns
    -------
    int
        Bytes written, or -1: the wire is too short.
    """
    a = b = c = d = e = f = g = h = _LOWEST
    at, most = np.uint64(0), np.uint64(wire.size)
    for block in range(models.size):
        here = codes[block * BLOCK : min((block + 1) * BLOCK, codes.size)]
        step = steps[models[block]]
        rest = here.size // _ROW * _ROW if lanes > 1 else 0
        for i in range(0, rest, _ROW):
            if at + _ROOM > most:
                return -1
            row = np.uint64(i)
            a, at = _put(a, here[row + np.uint64(0)], step, wire, at)
            b, at = _put(b, here[row + np.uint64(1)], step, wire, at)
            c, at = _put(c, here[row + np.uint64(2)], step, wire, at)
            d, at = _put(d, here[row + np.uint64(3)], step, wire, at)
            e, at = _put(e, here[row + np.uint64(4)], step, wire, at)
            f, at = _put(f, here[row + np.uint64(5)], step, wire, at)
            g, at = _put(g, here[row + np.uint64(6)], step, wire, at)
            h, at = _put(h, here[row + np.uint64(7)], step, wire, at)
        for i in range(rest, here.size):
            if at + _TWO > most:
                return -1
            a, at = _put(a, here[i], step, wire, at)
    states[0], states[1], states[2], states[3] = a, b, c, d
    states[4], states[5], states[6], states[7] = e, f, g, h
    return int(np.int64(at))


@kernel
def decode_symbols(codes: Any, lanes: int, models: Any, slots: Any, wire: Any, begin: int, states: Any) -> bool:
    """Decode symbols.

    Parameters
    ----------
    codes : (size,) uint8, written
    lanes, models
        As in ``encode_symbols``.
    slots : (models, 4096) uint32
        From ``prepare_decoder``.
    wire : uint8
        The words, behind at least 16 bytes of something else: a damaged stream is noticed a row too late.
    begin : int
        Where the words begin; at least 2 * lanes.
    states : (8,) uint64
        From 2^15 to 2^31 - 1; those that no lane uses are 2^15.

    Returns
    -------
    bool
        Whether every word was used and every coder came back to where it began. What an encoder wrote does.
    """
    a, b, c, d = states[0], states[1], states[2], states[3]
    e, f, g, h = states[4], states[5], states[6], states[7]
    at, first = np.uint64(wire.size), np.uint64(begin)
    for block in range(models.size - 1, -1, -1):
        here = codes[block * BLOCK : min((block + 1) * BLOCK, codes.size)]
        slot = slots[models[block]]
        rest = here.size // _ROW * _ROW if lanes > 1 else 0
        for i in range(here.size - 1, rest - 1, -1):
            here[i], a, at = _get(a, slot, wire, at)
            if at < first:
                return False
        for i in range(rest - _ROW, -1, -_ROW):
            row = np.uint64(i)
            here[row + np.uint64(7)], h, at = _get(h, slot, wire, at)
            here[row + np.uint64(6)], g, at = _get(g, slot, wire, at)
            here[row + np.uint64(5)], f, at = _get(f, slot, wire, at)
            here[row + np.uint64(4)], e, at = _get(e, slot, wire, at)
            here[row + np.uint64(3)], d, at = _get(d, slot, wire, at)
            here[row + np.uint64(2)], c, at = _get(c, slot, wire, at)
            here[row + np.uint64(1)], b, at = _get(b, slot, wire, at)
            here[row + np.uint64(0)], a, at = _get(a, slot, wire, at)
            if at < first:
                return False
    ends = (a | b | c | d | e | f | g | h) == _LOWEST and (a & b & c & d & e & f & g & h) == _LOWEST
    return bool(ends and at == first)
