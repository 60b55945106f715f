"""Segments: a chunk of a large vector travels as several messages, so that its coding and the wire go on side by side.

The first segment is on its way while the second is encoded, and what has arrived is decoded while the rest arrives. A
segment is coded on its own, but holds whole blocks: the bits of a sum do not depend on how it was cut. The one
exception is fp16 beyond 65,504, whose common exponent is that of a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mpitrain.kernels.delta import BLOCK

SEGMENT_BLOCK = 2 * BLOCK
"""Elements of which all segments but the last hold a multiple: whole blocks of every codec, and of ``delta`` whole
pairs, whose factors share a byte."""

FLOAT32_BYTES = 4


def segment_elements(kilobytes: float) -> int | None:
    """Return the elements of a segment of so many 10^3 bytes of float32, rounded up; 0 is None: chunks stay whole."""
    return -(-round(1000 * kilobytes) // (FLOAT32_BYTES * SEGMENT_BLOCK)) * SEGMENT_BLOCK or None


@dataclass(frozen=True)
class Segment:
    """A part of a chunk that travels as a message.

    Attributes
    ----------
    chunk, index : int
        Which chunk, and which part of it.
    start, stop : int
        Its range of the vector.
    at : int
        Where it begins in the chunk.
    """

    chunk: int
    index: int
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


def cut(chunk: int, start: int, stop: int, elements: int | None) -> list[Segment]:
    """Cut a chunk into segments of so many elements, the last of which may have fewer; an empty chunk has none.

    Parameters
    ----------
    chunk : int
        Its number.
    start, stop : int
        Its range of the vector.
    elements : int or None
        None: the chunk is one segment.
    """
    begins = range(start, stop, elements or max(1, stop - start))
    step = begins.step
    return [Segment(chunk, i, begin, min(begin + step, stop), begin - start) for i, begin in enumerate(begins)]


def in_turns(chunks: Sequence[Sequence[Segment]]) -> list[Segment]:
    """List the first segments of all chunks, then the second ones, and so on."""
    return [segment for row in zip_longest(*chunks) for segment in row if segment is not None]
