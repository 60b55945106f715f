"""Memories turn a codec into a sender and a receiver of one stream of equally long vectors.

=========  ==========================================  ================  ==============
memory     sender sends                                sender keeps      receiver keeps
=========  ==========================================  ================  ==============
none       C(x)                                        nothing           nothing
residual   C(x + e); e becomes x + e - decoded         e                 nothing
delta      d = C(x - a r); r becomes a r + d           r                 r
=========  ==========================================  ================  ==============

``residual`` is error feedback (Seide 2014; Karimireddy 2019): what rounding lost is added next time, so errors do not
accumulate. ``delta`` is closed-loop difference coding (DPCM): both ends predict the vector from the last decoded one,
with a factor ``a`` in fifteenths that is fitted per block of 128 and sent as four bits; it falls to 0 where the past
does not help. With codecs that lose most of a value ``a`` is 1 (EF21).

A vector may travel in parts, each encoded and decoded on its own: a part takes its place in the states, which are those
of the whole vector.

Every state is double-buffered. Encoding and decoding write the next half; ``commit`` makes it the current one once the
step is accepted on all ranks, ``rollback`` leaves everything as it was.
"""

from abc import ABC, abstractmethod

import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, aligned_empty, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.codecs.prediction import LastValue, Prediction, difference_nbytes
from mpitrain.config.codec_names import is_coarse


class DoubleBuffer:
    """A vector with a current and a next half."""

    def __init__(self, size: int, dtype: npt.DTypeLike) -> None:
        self.current: Floats = aligned_zeros(size, dtype)
        self.next: Floats = aligned_zeros(size, dtype)
        self.written = False

    def commit(self) -> None:
        """Make the next half the current one, if it was written since."""
        if self.written:
            self.current, self.next = self.next, self.current
        self.written = False

    def rollback(self) -> None:
        """Forget the next half."""
        self.written = False


class Memory(ABC):
    """One end of a stream: a sender, a receiver, or an owner that does both with the same state.

    Parameters
    ----------
    codec : Codec
        Shared freely: it has no state.
    size : int
        Elements of every vector of the stream.
    """

    name: str

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec = codec
        self.size = size

    def max_nbytes(self, size: int) -> int:
        """Bound an encoded vector, or part of one, of ``size`` elements."""
        return self.codec.max_nbytes(size)

    @abstractmethod
    def encode(
        self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int, at: int = 0
    ) -> tuple[int, int]:
        """Encode the next vector of the stream, or a part of it.

        Parameters
        ----------
        x : array
            The vector, or its elements from ``at`` on. Not changed.
        wire : (max_nbytes(x.size),) uint8, written
        decoded : array like x, or None, written
            Receives what the other end will decode; may not be ``x``. None where the caller does not need it.
        key, first : int
            As in ``Codec.encode``.
        at : int
            Where a part begins. All parts of a vector together cover it.

        Returns
        -------
        nbytes, nonfinite : int
            As in ``Codec.encode``. With ``nonfinite`` the step must be rolled back.
        """

    @abstractmethod
    def decode(self, wire: Bytes, out: Floats, *, at: int = 0) -> None:
        """Decode the next vector of the stream, or its part from ``at`` on, into ``out``; raises CodecError."""

    @abstractmethod
    def decode_add(self, wire: Bytes, acc: Floats, *, at: int = 0) -> None:
        """Decode like ``decode`` and add the result to ``acc``; raises CodecError."""

    def states(self) -> dict[str, DoubleBuffer]:
        """Name the vectors that a checkpoint must keep."""
        return {}

    def commit(self) -> None:
        """Accept the step on this end."""
        for state in self.states().values():
            state.commit()

    def rollback(self) -> None:
        """Undo the step on this end."""
        for state in self.states().values():
            state.rollback()


class NoMemory(Memory):
    """The codec alone."""

    name = "none"

    def encode(
        self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int, at: int = 0
    ) -> tuple[int, int]:
        """Encode ``x``."""
        nbytes, nonfinite = self.codec.encode(x, wire, key, first)
        if decoded is not None and not nonfinite:
            self.codec.decode(wire[:nbytes], decoded)
        return nbytes, nonfinite

    def decode(self, wire: Bytes, out: Floats, *, at: int = 0) -> None:
        """Decode into ``out``."""
        self.codec.decode(wire, out)

    def decode_add(self, wire: Bytes, acc: Floats, *, at: int = 0) -> None:
        """Decode and add to ``acc``."""
        self.codec.decode_add(wire, acc)


class ResidualSender(NoMemory):
    """Error feedback; the receiving end is a NoMemory."""

    name = "residual"

    def __init__(self, codec: Codec, size: int) -> None:
        super().__init__(codec, size)
        self.residual = DoubleBuffer(size, codec.dtype)
        self._decoded: Floats | None = None if codec.fuses_residual else aligned_empty(size, codec.dtype)

    def encode(
        self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int, at: int = 0
    ) -> tuple[int, int]:
        """Encode ``x`` plus what the last message lost, and keep what this one loses."""
        part = slice(at, at + x.size)
        if decoded is None and self._decoded is not None:
            decoded = self._decoded[part]
        error, following = self.residual.current[part], self.residual.next[part]
        nbytes, nonfinite = self.codec.encode_residual(x, error, wire, following, decoded, key, first)
        self.residual.written |= not nonfinite
        return nbytes, nonfinite

    def states(self) -> dict[str, DoubleBuffer]:
        """Keep the residual."""
        return {"residual": self.residual}


class Delta(Memory):
    """Prediction from the last decoded vector; sender and receiver keep the same reference.

    The payload is that of `mpitrain.codecs.prediction`.
    """

    name = "delta"

    def __init__(self, codec: Codec, size: int) -> None:
        super().__init__(codec, size)
        self.reference = DoubleBuffer(size, codec.dtype)
        self._prediction = LastValue(codec) if is_coarse(codec.wire_id) else Prediction(codec, size)

    def max_nbytes(self, size: int) -> int:
        """Return the codec's bound and that of the factors."""
        return super().max_nbytes(size) + difference_nbytes(self.codec, size)

    def encode(
        self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int, at: int = 0
    ) -> tuple[int, int]:
        """Encode the difference to the prediction."""
        past, following = self._halves(at, x.size)
        nbytes, nonfinite = self._prediction.encode(x, past, wire, following, key=key, first=first)
        if not nonfinite:
            self.reference.written = True
            if decoded is not None:
                decoded[:] = following
        return nbytes, nonfinite

    def decode(self, wire: Bytes, out: Floats, *, at: int = 0) -> None:
        """Decode the difference and add the prediction."""
        out[:] = self._receive(wire, at, out.size, None)

    def decode_add(self, wire: Bytes, acc: Floats, *, at: int = 0) -> None:
        """Decode the difference, add the prediction, and add both to ``acc``."""
        self._receive(wire, at, acc.size, acc)

    def _receive(self, wire: Bytes, at: int, size: int, acc: Floats | None) -> Floats:
        past, following = self._halves(at, size)
        self._prediction.decode(wire, past, following, acc)
        self.reference.written = True
        return following

    def _halves(self, at: int, size: int) -> tuple[Floats, Floats]:
        """Return what is known of a part, and where what follows on it is written."""
        return self.reference.current[at : at + size], self.reference.next[at : at + size]

    def states(self) -> dict[str, DoubleBuffer]:
        """Keep the reference."""
        return {"reference": self.reference}


SENDERS: dict[str, type[Memory]] = {"none": NoMemory, "residual": ResidualSender, "delta": Delta}
RECEIVERS: dict[str, type[Memory]] = {"none": NoMemory, "residual": NoMemory, "delta": Delta}
