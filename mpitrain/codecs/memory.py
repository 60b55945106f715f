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
does not help.

Every state is double-buffered. Encoding and decoding write the next half; ``commit`` makes it the current one once the
step is accepted on all ranks, ``rollback`` leaves everything as it was.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, aligned_empty, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.codecs.prediction import Prediction
from mpitrain.kernels.reduce import add


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

    @property
    def max_nbytes(self) -> int:
        """Bound of an encoded vector."""
        return self.codec.max_nbytes(self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of an ordinary encoded vector."""
        return self.codec.nbytes(self.size)

    @abstractmethod
    def encode(self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int) -> tuple[int, int]:
        """Encode the next vector of the stream.

        Parameters
        ----------
        x : (size,) array
            Not changed.
        wire : (max_nbytes,) uint8, written
        decoded : (size,) array or None, written
            Receives what the other end will decode; may not be ``x``. None where the caller does not need it.
        key, first : int
            As in ``Codec.encode``.

        Returns
        -------
        nbytes, nonfinite : int
            As in ``Codec.encode``. With ``nonfinite`` the step must be rolled back.
        """

    @abstractmethod
    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode the next vector of the stream into ``out``; raises CodecError."""

    @abstractmethod
    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode the next vector of the stream and add it to ``acc``; raises CodecError."""

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

    def encode(self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int) -> tuple[int, int]:
        """Encode ``x``."""
        nbytes, nonfinite = self.codec.encode(x, wire, key, first)
        if decoded is not None and not nonfinite:
            self.codec.decode(wire[:nbytes], decoded)
        return nbytes, nonfinite

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode into ``out``."""
        self.codec.decode(wire, out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode and add to ``acc``."""
        self.codec.decode_add(wire, acc)


class ResidualSender(NoMemory):
    """Error feedback; the receiving end is a NoMemory."""

    name = "residual"

    def __init__(self, codec: Codec, size: int) -> None:
        super().__init__(codec, size)
        self.residual = DoubleBuffer(size, codec.dtype)
        self._decoded: Floats = aligned_empty(size, codec.dtype)

    def encode(self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int) -> tuple[int, int]:
        """Encode ``x`` plus what the last message lost, and keep what this one loses."""
        corrected = self.residual.next
        decoded = self._decoded if decoded is None else decoded
        with np.errstate(over="ignore"):  # counted as not finite by the codec
            np.add(x, self.residual.current, out=corrected)
        nbytes, nonfinite = super().encode(corrected, wire, decoded, key=key, first=first)
        if not nonfinite:
            np.subtract(corrected, decoded, out=corrected)
            self.residual.written = True
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
        self._prediction = Prediction(codec, size)

    @property
    def max_nbytes(self) -> int:
        """The codec's bound and the factors."""
        return super().max_nbytes + self._prediction.factor_nbytes

    @property
    def nbytes(self) -> int:
        """The codec's bytes and the factors."""
        return super().nbytes + self._prediction.factor_nbytes

    def encode(self, x: Floats, wire: Bytes, decoded: Floats | None, *, key: int, first: int) -> tuple[int, int]:
        """Encode the difference to the prediction."""
        reference = self.reference
        nbytes, nonfinite = self._prediction.encode(x, reference.current, wire, reference.next, key=key, first=first)
        if not nonfinite:
            reference.written = True
            if decoded is not None:
                decoded[:] = reference.next
        return nbytes, nonfinite

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode the difference and add the prediction."""
        out[:] = self._receive(wire)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode the difference, add the prediction, and add both to ``acc``."""
        add(self._receive(wire), acc)

    def _receive(self, wire: Bytes) -> Floats:
        self._prediction.decode(wire, self.reference.current, self.reference.next)
        self.reference.written = True
        return self.reference.next

    def states(self) -> dict[str, DoubleBuffer]:
        """Keep the reference."""
        return {"reference": self.reference}


SENDERS: dict[str, type[Memory]] = {"none": NoMemory, "residual": ResidualSender, "delta": Delta}
RECEIVERS: dict[str, type[Memory]] = {"none": NoMemory, "residual": NoMemory, "delta": Delta}
