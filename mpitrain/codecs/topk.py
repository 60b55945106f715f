"""topk: the largest of every ``one_in`` values, and zeros elsewhere.

Format ``topk``: nothing for a vector without elements, else uint32 ``count``, uint16 ``lowest``, and the bits of
`mpitrain.kernels.rice` for ``count`` gaps and then for ``count`` levels, filled up with zeros to whole bytes. A gap is
the number of zeros since the previous value. A level is ``2 l + sign``, and stands for the float32 whose bits above the
twentieth are ``lowest + l``, in the middle of what they leave open: nine bits of a float, sign and two bits of
mantissa among them, of which those that the values share are sent once. So a value errs by at most an eighth.

The ``k = ceil(size / one_in)`` largest magnitudes are sent, of equal ones the first; but not zeros and what is below
the smallest normal float32 (1.2e-38), which the other end takes for zero anyway. ``count`` is less than ``k`` where
those would be among them. Where the values are normally distributed, one costs about 2.4 bits and its place, with one
in 100, 8.2: 0.11 bits for each of the vector.

What is chosen depends on the whole of the encoded vector: cut elsewhere, it is another choice.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec, view
from mpitrain.errors import CodecError
from mpitrain.kernels import rice, topk
from mpitrain.kernels.quantize import count_not_single

HEADER_BYTES = 6
MAX_LEVEL = 2 * topk.LEVELS_END - 1
SAMPLED_FROM = 4096
"""Shorter vectors are searched as a whole."""
MAX_SAMPLE = 1 << 14

_LOWEST_LEVEL = 4
"""That of the smallest normal float32."""
_MAX_LEVEL_BITS = 12
"""A level with the largest shift that can pay, 11 bits, and the end of its unary rest."""
_BITS: dict[np.dtype[np.floating[Any]], type[np.unsignedinteger[Any]]] = {
    np.dtype(np.float32): np.uint32,
    np.dtype(np.float64): np.uint64,
}


class TopK(Codec):
    """The largest magnitudes alone.

    Parameters
    ----------
    one_in : int
        One of so many values is sent. The receiver need not know.
    """

    wire_id = "topk"
    format_number = 7
    fixed_size = False

    def __init__(self, dtype: npt.DTypeLike = np.float32, one_in: int = 100) -> None:
        super().__init__(dtype)
        if one_in < 1:
            raise ValueError(f"codec topk: expected one value in 1 or more, got {one_in}")
        self.one_in = one_in
        unsigned = _BITS[self.dtype]
        self._top_bit = 8 * self.dtype.itemsize - 1
        self._mask = unsigned(2**self._top_bit - 1)
        self._least = self.dtype.type(np.finfo(np.float32).tiny).view(unsigned)

    def count(self, size: int) -> int:
        """Return how many of ``size`` elements are sent."""
        return -(-size // self.one_in)

    def max_nbytes(self, size: int) -> int:
        """Bound the bytes by those with one shift for all gaps, which those with the best shifts cannot exceed."""
        if not size:
            return 0
        count = self.count(size)
        gaps = min(count * (shift + 1) + (size - count >> shift) for shift in range(32))
        shifts = 2 * rice.SHIFT_BITS * -(-count // rice.BLOCK)
        return HEADER_BYTES + -(-(gaps + count * _MAX_LEVEL_BITS + shifts) // 8)

    def nbytes(self, size: int) -> int:
        """Estimate the bytes of normally distributed values.

        Places cost their entropy and a hundredth more; what a level costs was measured, for shares from 0.001 to 1.
        """
        if not size:
            return 0
        count = self.count(size)
        share = count / size
        places = -math.log2(share) - (1 - share) / share * math.log2(1 - share) if share < 1 else 1.0
        shifts = 2 * rice.SHIFT_BITS * -(-count // rice.BLOCK)
        bits = math.ceil(count * (1.01 * places + 2.1 + 3.3 * math.sqrt(share))) + shifts
        return min(HEADER_BYTES + -(-bits // 8), self.max_nbytes(size))

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Select the largest values, and code the gaps between them and their levels."""
        self.check_buffers(x, wire)
        if not x.size:
            return 0, 0
        places, found = self._select(x.view(self._mask.dtype), self.count(x.size))
        levels = np.empty(places.size, np.uint32)
        lowest, nonfinite = topk.to_integers(places, found.view(self.dtype), places, levels)
        if nonfinite:
            return 0, count_not_single(x)
        shifts = np.empty((2, -(-places.size // rice.BLOCK)), np.uint8)
        nbits = rice.fit_shifts(places, shifts[0]) + rice.fit_shifts(levels, shifts[1])
        words = np.zeros(-(-nbits // 64) + rice.SPARE_WORDS, np.uint64)
        rice.write(levels, shifts[1], words, rice.write(places, shifts[0], words, 0))
        nbytes = HEADER_BYTES + -(-nbits // 8)
        wire[:4].view(np.uint32)[0] = places.size
        wire[4:6].view(np.uint16)[0] = lowest if places.size else 0
        wire[HEADER_BYTES:nbytes] = words.view(np.uint8)[: nbytes - HEADER_BYTES]
        return nbytes, 0

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Write zeros, and the values to their places."""
        gaps, levels, lowest = self._open(wire, out.size)
        out[:] = 0
        topk.scatter(gaps, levels, lowest, out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Add the values to their places; ``acc`` is as before where the payload is refused."""
        gaps, levels, lowest = self._open(wire, acc.size)
        topk.scatter_add(gaps, levels, lowest, acc)

    def _select(self, bits: npt.NDArray[Any], rank: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
        """Return places and bits of the ``rank`` largest magnitudes that are not taken for zeros.

        A threshold that a sample suggests, a little low, leaves few candidates; where it was too high, or leaves too
        many, the whole vector is searched. The result is the same.
        """
        counts = np.empty(1 << topk.DIGIT_BITS, np.int64)
        if bits.size >= SAMPLED_FROM:
            threshold, room = self._suggest(bits, rank, counts)
            places, found = np.empty(room, np.uint32), np.empty(room, bits.dtype)
            count = topk.gather_above(bits, self._mask, threshold, places, found) if room < bits.size else -1
            places, found = places[: max(count, 0)], found[: max(count, 0)]
            if count > rank:
                limit, ties = topk.find_largest(found, self._mask, rank, self._top_bit, counts)
                count = topk.keep_largest(places, found, self._mask, np.uint64(limit), ties)
                return places[:count], found[:count]
            if count == rank or (count >= 0 and threshold == self._least):
                return places, found
        return self._search(bits, rank, counts)

    def _suggest(self, bits: npt.NDArray[Any], rank: int, counts: npt.NDArray[np.int64]) -> tuple[Any, int]:
        """Return a threshold that at least ``rank`` magnitudes should reach, and room for those that should.

        Both are four standard deviations on the safe side, if the sample is one.
        """
        sample = np.empty(min(bits.size // 16, MAX_SAMPLE), bits.dtype)
        topk.draw_sample(bits, sample)
        expected = rank * sample.size / bits.size
        low = math.ceil(expected + 4 * math.sqrt(expected)) + 4
        if low > sample.size:
            return self._least, bits.size
        threshold, _ = topk.find_largest(sample, self._mask, low, self._top_bit, counts)
        room = math.ceil((low + 4 * math.sqrt(low) + 4) * bits.size / sample.size) + topk.LANES
        return max(self._mask.dtype.type(threshold), self._least), min(room, bits.size)

    def _search(
        self, bits: npt.NDArray[Any], rank: int, counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
        """Select like ``_select``, from the histogram of the whole vector."""
        places, found = np.empty(rank, np.uint32), np.empty(rank, bits.dtype)
        limit, ties = topk.find_largest(bits, self._mask, rank, self._top_bit, counts)
        if limit < self._least:
            limit, ties = self._least - self._mask.dtype.type(1), 0
        count = topk.gather_largest(bits, self._mask, np.uint64(limit), ties, places, found)
        return places[:count], found[:count]

    def _open(self, wire: Bytes, size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], np.uint32]:
        """Return gaps, levels and the lowest level of a payload that an encoder can have written."""
        if not size:
            self.check_size(wire, 0, 0)
            return np.empty(0, np.uint32), np.empty(0, np.uint32), np.uint32(0)
        count, lowest = self._read_header(wire, size)
        payload = wire[HEADER_BYTES:]
        words = np.zeros(payload.size // 8 + 1 + rice.SPARE_WORDS, np.uint64)
        words.view(np.uint8)[: payload.size] = payload
        gaps, levels = np.empty(count, np.uint32), np.empty(count, np.uint32)
        at = rice.read(words, 0, 8 * payload.size, size - 1, gaps)
        if at >= 0:
            at = rice.read(words, at, 8 * payload.size, MAX_LEVEL - 2 * int(lowest), levels)
        if at < 0 or -(-at // 8) != payload.size or (at % 8 and payload[-1] >> at % 8):
            raise CodecError(f"codec topk: expected {count} gaps and levels that fill the payload, it is damaged")
        span = topk.measure_span(gaps)
        if span > size:
            raise CodecError(f"codec topk: expected places below {size}, got {span - 1}; the payload is damaged")
        return gaps, levels, lowest

    def _read_header(self, wire: Bytes, size: int) -> tuple[int, np.uint32]:
        if wire.size < HEADER_BYTES:
            raise CodecError(f"codec topk: expected {HEADER_BYTES} bytes or more for {size} elements, got {wire.size}")
        count, lowest = int(view(wire[:4], np.uint32)[0]), int(view(wire[4:6], np.uint16)[0])
        most = min(size, 4 * (wire.size - HEADER_BYTES))  # gap and level have a bit each
        if count > most:
            raise CodecError(f"codec topk: expected at most {most} values in {wire.size} bytes, got {count}")
        allowed = _LOWEST_LEVEL <= lowest < topk.LEVELS_END if count else not lowest
        if not allowed:
            raise CodecError(f"codec topk: expected a level that {count} values can have, got {lowest}")
        return count, np.uint32(lowest)
