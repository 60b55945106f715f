"""The entropy coder: codes as bytes, and their models: two shapes with two parameters each, or a table of frequencies.

A model is a byte for its shape (0 geometric, 1 Gaussian, 2 table) and one for the largest code ``last``. Behind them
stand the share of code 0 and the tail, a byte each (``mpitrain.kernels.frequencies``); or the frequencies of codes
-last to -1, 1 to last and, where the payload has escapes, of the escape: a byte below 128, else two, the lower seven
bits first with the top bit set. Code 0 has what is left of 4,096.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Ints
from mpitrain.codecs.base import view
from mpitrain.errors import CodecError
from mpitrain.kernels import rans
from mpitrain.kernels.frequencies import GAUSSIAN, GEOMETRIC, cost_of, fill_counted, fill_parametric, fit_tail
from mpitrain.kernels.rans import TOTAL

TABLE = 2
ZERO = 128
"""Symbol of code 0."""


def binary_logarithms(size: int) -> npt.NDArray[np.int32]:
    """Return log2 of 0 to ``size - 1`` in 65,536ths, cut; that of 0 is 0. By squaring: the same on every machine."""
    numbers = np.maximum(np.arange(size, dtype=np.uint64), 1)
    result: npt.NDArray[np.uint64] = (np.frexp(numbers.astype(np.float64))[1] - 1).astype(np.uint64)
    mantissas = np.left_shift(numbers, np.uint64(30) - result)
    for _ in range(16):
        mantissas = np.right_shift(mantissas * mantissas, np.uint64(30))
        above = np.right_shift(mantissas, np.uint64(31))
        mantissas = np.right_shift(mantissas, above)
        result = np.left_shift(result, np.uint64(1)) | above
    return result.astype(np.int32)


SAMPLE = 1 << 14
"""Values that are enough to find a step."""
LOG2 = binary_logarithms(SAMPLE + 1)
UNIT = 1 << 16
"""Of a bit in costs."""


@dataclass(frozen=True)
class Model:
    """How often symbols occur, and the bytes that say so."""

    freqs: npt.NDArray[np.uint32]
    described: bytes


def best_model(counts: Ints, escape: int) -> tuple[Model, int]:
    """Choose the model with which counted symbols, and the model itself, cost least.

    Parameters
    ----------
    counts : (256,) int64
    escape : int
        1 if the payload has escapes, here or elsewhere.

    Returns
    -------
    model, bits : Model, int
        Bits of the symbols and the model, rounded up.
    """
    codes = np.flatnonzero(counts[1:]) + 1 - ZERO
    last = int(np.abs(codes).max()) if codes.size else 0
    candidates = [_parametric(shape, last, counts, escape) for shape in (GEOMETRIC, GAUSSIAN)] if last else []
    candidates.append(_counted(last, counts, escape))
    costs = [-(-int(cost_of(counts, model.freqs, LOG2)) // UNIT) + 8 * len(model.described) for model in candidates]
    best = min(range(len(costs)), key=costs.__getitem__)
    return candidates[best], costs[best]


def _parametric(shape: int, last: int, counts: Ints, escape: int) -> Model:
    freqs = np.empty(256, np.uint32)
    zero = min(max(256 * int(counts[ZERO]) // int(counts.sum()), 1), 255)
    tail = int(fit_tail(shape, last, zero, escape, counts, LOG2, freqs))
    fill_parametric(shape, last, zero, tail, escape, freqs)
    return Model(freqs, bytes((shape, last, zero, tail)))


def _counted(last: int, counts: Ints, escape: int) -> Model:
    freqs = np.empty(256, np.uint32)
    fill_counted(counts, freqs)
    described = bytearray((TABLE, last))
    for symbol in _order(last, escape):
        freq = int(freqs[symbol])
        described += bytes((freq,)) if freq < 128 else bytes((128 | freq & 127, freq >> 7))
    return Model(freqs, bytes(described))


def _order(last: int, escape: int) -> Iterator[int]:
    yield from (symbol for symbol in range(ZERO - last, ZERO + last + 1) if symbol != ZERO)
    if escape:
        yield 0


class Reader:
    """Takes a payload of a codec apart from its beginning."""

    def __init__(self, wire: Bytes, codec: str) -> None:
        self.wire = wire
        self.codec = codec
        self.at = 0

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes; raises CodecError at the end."""
        if self.at + nbytes > self.wire.size:
            raise CodecError(f"codec {self.codec}: expected at least {self.at + nbytes} bytes, got {self.wire.size}")
        self.at += nbytes
        return self.wire[self.at - nbytes : self.at]

    def byte(self) -> int:
        """Return the next byte."""
        return int(self.take(1)[0])


def read_model(reader: Reader, escape: int) -> npt.NDArray[np.uint32]:
    """Read a model's frequencies; raises CodecError where no encoder wrote it."""
    shape, last = reader.byte(), reader.byte()
    if shape > TABLE or last >= ZERO:
        raise CodecError(
            f"codec {reader.codec}: expected a model of shape 0 to 2 and code 0 to 127, got {shape} and {last}"
        )
    freqs = np.zeros(256, np.uint32)
    if shape != TABLE:
        zero, tail = reader.byte(), reader.byte()
        if not zero:
            raise CodecError(f"codec {reader.codec}: expected a share of zeros from 1 to 255, got 0")
        fill_parametric(shape, last, zero, tail, escape, freqs)
        return freqs
    rest = TOTAL
    for symbol in _order(last, escape):
        freq = reader.byte()
        freq = freq & 127 | reader.byte() << 7 if freq > 127 else freq
        freqs[symbol] = freq
        rest -= freq
    if rest < 0:
        raise CodecError(f"codec {reader.codec}: expected frequencies of at most {TOTAL}, got {TOTAL - rest}")
    freqs[ZERO] = rest
    return freqs


_INTERLEAVED = 16384
"""From so many codes on the states of eight coders weigh little."""


def lanes_for(size: int) -> int:
    """Choose the number of coders for so many codes."""
    return rans.LANES if size >= _INTERLEAVED else 1


def write_codes(
    codes: Bytes, indices: Bytes, models: Sequence[Model], wire: Bytes
) -> tuple[int, npt.NDArray[np.uint64]]:
    """Encode codes.

    Parameters
    ----------
    codes : (size,) uint8
        Symbols that occur in the models of their blocks.
    indices : (ceil(size / 4096),) uint8
        Of the model of each block.
    wire : uint8, written
        Receives the words.

    Returns
    -------
    nbytes, states : int, (8,) uint64
        Bytes written, or -1 if the wire is too short; where the coders ended.
    """
    steps = np.empty((len(models), rans.STEPS), np.uint64)
    for model, row in zip(models, steps, strict=True):
        rans.prepare_encoder(model.freqs, row)
    states = np.empty(rans.LANES, np.uint64)
    lanes = lanes_for(codes.size)
    return int(rans.encode_symbols(codes, lanes, indices, steps, wire, states)), states


def read_codes(reader: Reader, size: int, indices: Bytes, models: Sequence[npt.NDArray[np.uint32]]) -> Bytes:
    """Decode the states and words that are left of a payload; raises CodecError where they are damaged."""
    lanes = lanes_for(size)
    states = np.full(rans.LANES, rans.LOWEST, np.uint64)
    states[:lanes] = view(reader.take(4 * lanes), "<u4")
    if not ((states >= rans.LOWEST) & (states < rans.LOWEST << 16)).all():
        raise CodecError(f"codec {reader.codec}: a state that no encoder writes; the payload is damaged")
    slots = np.empty((len(models), rans.TOTAL), np.uint32)
    for freqs, row in zip(models, slots, strict=True):
        rans.prepare_decoder(freqs, row)
    codes = np.empty(size, np.uint8)
    if not rans.decode_symbols(codes, lanes, indices, slots, reader.wire, reader.at, states):
        raise CodecError(f"codec {reader.codec}: the codes do not end where they should; the payload is damaged")
    return codes
