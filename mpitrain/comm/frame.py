"""A message: a 16-byte header and a payload in one buffer, sent in pieces below a size limit.

Header, little-endian: u8 version, u8 format, u16 flags, u32 sequence, u32 elements, u32 payload bytes.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from mpi4py import MPI

from mpitrain.arrays import Bytes, aligned_empty
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, Watch, telling_deaths
from mpitrain.errors import ProtocolError

HEADER_BYTES = 16
VERSION = 1
MAX_MESSAGE_BYTES = 4 * 10**6
"""Default size of a piece. Small enough to arrive within the patience for a silent peer on a link of 1 Mbit/s."""

_HEADER = struct.Struct("<BBHIII")


class Flag(IntFlag):
    """Bits of the header's flags."""

    NONFINITE = 1
    """The sender met NaN or infinity; there is no payload and the step must be rejected."""
    DELTA = 2
    """The payload is a difference to a prediction."""


ORDINARY = Flag(0)


class Tag(IntEnum):
    """What a message is for; the bucket's number is added in steps of ``len(Tag)``."""

    SCATTER = 0
    """A contribution on its way to the owner of a chunk."""
    GATHER = 1
    """The sum of a chunk on its way to everyone."""
    ACTIVATION = 2
    """The output of a piece of the model on its way to the next piece; the bucket is the number of the cut."""
    GRADIENT = 3
    """The gradient by that output on its way back."""
    PUSH = 4
    """A worker's gradient on its way to the server."""
    REPLY = 5
    """The change of the weights on its way to a worker."""
    CONTROL = 6
    """Clocks, counts and wishes between workers and servers, and the order of operations among servers."""

    def of_bucket(self, index: int) -> int:
        """Return the MPI tag, different for every bucket, so that buckets may overtake each other."""
        return self + len(Tag) * index


@dataclass(frozen=True)
class Expected:
    """What the header of the next message must say."""

    format: int
    flags: Flag
    sequence: int
    elements: int


class Frame:
    """A buffer for one message.

    Parameters
    ----------
    max_payload_bytes : int
        Sender and receiver must agree on it: the number of pieces follows from it.
    """

    def __init__(self, max_payload_bytes: int) -> None:
        self.buffer: Bytes = aligned_empty(HEADER_BYTES + max_payload_bytes, "u1", lead_bytes=HEADER_BYTES)
        self.payload: Bytes = self.buffer[HEADER_BYTES:]
        self.nbytes = 0

    def seal(self, expected: Expected, payload_bytes: int, flags: Flag = ORDINARY) -> None:
        """Write the header; ``flags`` are added to the ordinary ones."""
        self.nbytes = HEADER_BYTES + payload_bytes
        _HEADER.pack_into(
            self.buffer.data,
            0,
            VERSION,
            expected.format,
            expected.flags | flags,
            expected.sequence & 0xFFFFFFFF,
            expected.elements,
            payload_bytes,
        )

    def open(self, received_bytes: int, expected: Expected, sender: str) -> Bytes | None:
        """Check a received message.

        Returns
        -------
        payload : uint8 array or None
            A view, valid until the frame is used again; None if the sender met non-finite values.

        Raises
        ------
        ProtocolError
            The header is not the expected one: the ranks do not do the same thing.
        """
        if received_bytes < HEADER_BYTES:
            raise ProtocolError(f"{sender}: expected a header of {HEADER_BYTES} bytes, got {received_bytes} in all")
        version, form, flags, sequence, elements, payload_bytes = _HEADER.unpack_from(self.buffer.data)
        self.nbytes = received_bytes
        got = (version, form, flags & ~int(Flag.NONFINITE), sequence, elements, payload_bytes)
        flagged = bool(flags & Flag.NONFINITE)
        wanted = (
            VERSION,
            expected.format,
            int(expected.flags),
            expected.sequence & 0xFFFFFFFF,
            expected.elements,
            0 if flagged else received_bytes - HEADER_BYTES,
        )
        if got != wanted:
            fields = ("version", "format", "flags", "sequence", "elements", "payload bytes")
            differ = [f"{f} {w}, got {g}" for f, w, g in zip(fields, wanted, got, strict=True) if w != g]
            raise ProtocolError(f"{sender}: expected {'; '.join(differ)}; do all ranks run the same configuration?")
        return None if flagged else self.payload[:payload_bytes]

    @property
    def sequence(self) -> int:
        """Sequence number in the header of a message, modulo 2^32."""
        return int(_HEADER.unpack_from(self.buffer.data)[3])

    def send(self, axis: Axis, dest: int, tag: int, *, piece_bytes: int) -> list[MPI.Request]:
        """Start sending the sealed message; the buffer must not change until the requests are complete."""
        with telling_deaths(axis.label(dest)):
            return [
                axis.comm.Isend([self.buffer[a : max(a, min(b, self.nbytes))], MPI.BYTE], dest, tag)
                for a, b in self._pieces(piece_bytes)
            ]

    def receive(self, axis: Axis, source: int, tag: int, *, piece_bytes: int, watch: Watch | None = None) -> Requests:
        """Post the receives of one message."""
        with telling_deaths(axis.label(source)):
            pieces = self._pieces(piece_bytes)
            requests = [axis.comm.Irecv([self.buffer[a:b], MPI.BYTE], source, tag) for a, b in pieces]
        return Requests(requests, axis.label(source), watch)

    def _pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        # As many pieces as the largest message needs, empty ones at the end: the receiver does not know the size.
        return [(a, min(a + piece_bytes, self.buffer.size)) for a in range(0, self.buffer.size, piece_bytes)]
