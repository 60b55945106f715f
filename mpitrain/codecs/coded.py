"""int8, int4 and int2 whose codes take as many bits as they are surprising: ``int8-rans`` and so on.

Format: the last byte says what is before it. 0: the payload of the codec in front of the dash. 1: its scales, a model
(``mpitrain.codecs.entropy``), the u32 states of eight coders (below 16,384 bytes of codes only one), and their u16
words (``mpitrain.kernels.rans``), for the bytes of the codes. A byte is the symbol in which code 0 becomes 128: for
int4 and int2 several codes together, so that a symbol costs what all of them do.

Where coding saves nothing, as with few values, the first form is sent: one byte more than the plain codec.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec
from mpitrain.codecs.entropy import Reader, best_model, lanes_for, read_codes, read_model, write_codes
from mpitrain.codecs.int2 import Int2
from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.scaled import Scaled
from mpitrain.errors import CodecError
from mpitrain.kernels import rans
from mpitrain.kernels.frequencies import PARTS, flip_and_count

PLAIN, CODED = range(2)
"""Last byte of a payload, so that scales lie where words may."""


class Coded(Codec):
    """Codes of another codec, entropy-coded."""

    fixed_size = False
    zero: ClassVar[int]
    """A byte of zero codes, less 128: what symbols and bytes differ by."""
    typical_bits: ClassVar[float]
    """A value, of Gaussian ones and with the scales."""

    plain: ClassVar[type[Scaled]]
    """Without the coder."""

    def __init__(self, dtype: npt.DTypeLike = np.float32, **options: bool) -> None:
        super().__init__(dtype)
        self._plain = self.plain(dtype, **options)

    def max_nbytes(self, size: int) -> int:
        """Return a byte more than without the coder."""
        return self._plain.max_nbytes(size) + (size > 0)

    def nbytes(self, size: int) -> int:
        """Return what Gaussian values take, about; a table of the most frequent symbols is part of it."""
        table = 1 << 8
        return min(self.max_nbytes(size), int(self.typical_bits * size / 8) + table + 4 * lanes_for(size))

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Quantize, then code what can be written in fewer bytes."""
        self.check_buffers(x, wire)
        if not x.size:
            return 0, 0
        nbytes, nonfinite = self._plain.encode(x, wire, key, first)
        kind = PLAIN
        if not nonfinite:
            nbytes, kind = self._code(wire[:nbytes], self._split(x.size))
        wire[nbytes] = kind
        return nbytes + 1, nonfinite

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode into ``out``, which is as before where the payload is refused."""
        self._plain.decode(self._uncoded(wire, out.size), out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode and add; ``acc`` is as before where the payload is refused."""
        self._plain.decode_add(self._uncoded(wire, acc.size), acc)

    def _split(self, size: int) -> int:
        """Return the bytes of the scales."""
        return self._plain.max_nbytes(size) - self._plain.code_nbytes(size)

    def _code(self, wire: Bytes, split: int) -> tuple[int, int]:
        """Replace the codes behind ``split`` bytes of scales by fewer bytes if it can be done; return all, and how."""
        codes = wire[split:]
        symbols, counts = np.empty_like(codes), np.zeros((PARTS, 256), np.uint32)
        flip_and_count(codes, np.uint8(self.zero), symbols, counts)
        model, bits = best_model(counts.sum(axis=0, dtype=np.int64), 0)
        lanes = lanes_for(symbols.size)
        room = codes.size - len(model.described) - 4 * lanes
        if bits // 8 + 4 * lanes >= codes.size or room <= 0:
            return wire.size, PLAIN
        words: Bytes = np.empty(room, np.uint8)
        indices = np.zeros(-(-symbols.size // rans.BLOCK), np.uint8)
        written, states = write_codes(symbols, indices, [model], words)
        if written < 0:
            return wire.size, PLAIN
        head = model.described + states[:lanes].astype("<u4").tobytes()
        codes[: len(head)] = np.frombuffer(head, np.uint8)
        codes[len(head) : len(head) + written] = words[:written]
        return split + len(head) + written, CODED

    def _uncoded(self, wire: Bytes, size: int) -> Bytes:
        """Return the payload of the plain codec, which checks it."""
        if not size or not wire.size:
            self.check_size(wire, int(size > 0), size)
            return wire
        kind, most = int(wire[-1]), self.max_nbytes(size)
        if kind > CODED or wire.size > most:
            raise CodecError(
                f"codec {self.wire_id}: expected at most {most} bytes of kind 0 or 1, got {wire.size} of {kind}"
            )
        if kind == PLAIN:
            self.check_size(wire, most, size)
            return wire[:-1]
        split, reader = self._split(size), Reader(wire[:-1], self.wire_id)
        payload: Bytes = np.empty(self._plain.max_nbytes(size), np.uint8)
        payload[:split] = reader.take(split)
        freqs = read_model(reader, 0)
        indices = np.zeros(-(-(payload.size - split) // rans.BLOCK), np.uint8)
        symbols = read_codes(reader, payload.size - split, indices, [freqs])
        np.bitwise_xor(symbols, np.uint8(self.zero), out=payload[split:])
        return payload


class CodedInt8(Coded):
    """Block-scaled int8, entropy-coded; ``stochastic`` as of `Int8`."""

    wire_id = "int8-rans"
    format_number = 9
    block = Int8.block
    plain = Int8
    zero = 0x00 ^ 0x80
    typical_bits = 7.66


class CodedInt4(Coded):
    """Block-scaled int4, entropy-coded in pairs; ``stochastic`` as of `Int4`."""

    wire_id = "int4-rans"
    format_number = 10
    block = Int4.block
    plain = Int4
    zero = 0x88 ^ 0x80
    typical_bits = 3.51


class CodedInt2(Coded):
    """Block-scaled int2, entropy-coded in fours."""

    wire_id = "int2-rans"
    format_number = 11
    block = Int2.block
    plain = Int2
    zero = 0xAA ^ 0x80
    typical_bits = 1.66
