"""The codec contract: floats to bytes and back, stateless, in buffers that the caller owns."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.errors import CodecError
from mpitrain.kernels import delta
from mpitrain.kernels.reduce import add, count_not_finite, subtract


class Codec(ABC):
    """A byte format for vectors of one float type.

    Parameters
    ----------
    dtype : dtype
        float32 or float64: the type of the vectors. The bytes do not depend on it, except with ``raw``.

    Attributes
    ----------
    wire_id : str
        Names the byte format; once released it never changes meaning.
    format_number : int
        The same as one byte of the message header.
    block : int
        Elements that share a scale: cutting a vector at multiples of it does not change the bytes.
    fixed_size : bool
        Whether ``nbytes`` is what every ordinary vector takes. Otherwise it is only typical, the bytes depend on the
        values, and a vector that is cut is coded otherwise than the whole.
    """

    wire_id: ClassVar[str]
    format_number: ClassVar[int]
    block: ClassVar[int] = 1
    fixed_size: ClassVar[bool] = True

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = cast(np.dtype[np.floating[Any]], np.dtype(dtype))
        if self.dtype not in (np.float32, np.float64):
            raise TypeError(f"codec {self.wire_id}: expected vectors of float32 or float64, got {self.dtype}")

    @abstractmethod
    def max_nbytes(self, size: int) -> int:
        """Bound the bytes of ``size`` elements; never more than raw."""

    @abstractmethod
    def nbytes(self, size: int) -> int:
        """Return the bytes of ``size`` ordinary elements (typical ones where they are not ``fixed_size``)."""

    @abstractmethod
    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Encode a vector.

        Parameters
        ----------
        x : (size,) dtype, contiguous
            Not changed.
        wire : (max_nbytes(size),) uint8 or longer, written
        key, first : int
            Seed of stochastic rounding, and the index of ``x[0]`` in its noise (modulo 2^32). Deterministic codecs
            ignore them.

        Returns
        -------
        nbytes, nonfinite : int
            Bytes written, and the count of values that are NaN or infinite (in float32). Never raises on data; where
            ``nonfinite`` is not 0 the bytes mean nothing and must not be sent.
        """

    def encode_residual(
        self,
        x: Floats,
        error: Floats,
        wire: Bytes,
        next_error: Floats,
        decoded: Floats | None = None,
        key: int = 0,
        first: int = 0,
    ) -> tuple[int, int]:
        """Encode ``x + error`` and keep what that loses (error feedback).

        Codecs whose loops do so in one pass override this, with the same bytes and floats.

        Parameters
        ----------
        x, error : (size,) dtype, contiguous
            Not changed.
        wire, key, first
            As in ``encode``.
        next_error : (size,) dtype, contiguous, written
            ``x + error`` minus what the other end decodes, where that is not subnormal; not memory of the others.
        decoded : (size,) dtype, contiguous, or None, written
            Receives what the other end decodes. Room for it is allocated otherwise, unless ``fuses_residual``.

        Returns
        -------
        nbytes, nonfinite : int
            As in ``encode``, of ``x + error``. With ``nonfinite``, ``next_error`` and ``decoded`` mean nothing.
        """
        decoded = np.empty_like(x) if decoded is None else decoded
        with np.errstate(over="ignore"):  # counted as not finite by ``encode``
            np.add(x, error, out=next_error)
        nbytes, nonfinite = self.encode(next_error, wire, key, first)
        if not nonfinite:
            self.decode(wire[:nbytes], decoded)
            subtract(decoded, next_error)
        return nbytes, nonfinite

    def encode_difference(
        self,
        x: Floats,
        past: Floats,
        wire: Bytes,
        following: Floats,
        factors: npt.NDArray[np.uint8],
        key: int = 0,
        first: int = 0,
    ) -> tuple[int, int]:
        """Encode what a prediction from ``past`` leaves of ``x``.

        Codecs whose loops do so in one pass override this, with the same bytes and floats.

        Parameters
        ----------
        x, past : (size,) dtype, contiguous
            Not changed.
        wire, key, first
            As in ``encode``.
        following : (size,) dtype, contiguous, written
            What the other end decodes; not memory of the others.
        factors : (ceil(size / 128),) uint8, written
            Of the prediction, in fifteenths.

        Returns
        -------
        nbytes, nonfinite : int
            As in ``encode``, of the difference; where that is finite, ``nonfinite`` counts what is not in
            ``following``: beside the largest float, the sum with the prediction may overflow. With ``nonfinite``,
            ``following`` and ``factors`` mean nothing.
        """
        self.check_buffers(x, wire)
        self.check_like(x, past, following)
        unit = self.dtype.type(1 / delta.LEVELS)
        delta.fit_factors(x, past, factors)
        delta.subtract_prediction(x, past, factors, unit, following)
        nbytes, nonfinite = self.encode(following, wire, key, first)
        if not nonfinite:
            self.decode(wire[:nbytes], following)
            delta.add_prediction(past, factors, unit, following)
            nonfinite = count_not_finite(following)
        return nbytes, nonfinite

    def decode_difference(
        self,
        wire: Bytes,
        past: Floats,
        factors: npt.NDArray[np.uint8],
        following: Floats,
        acc: Floats | None = None,
    ) -> None:
        """Decode into ``following`` what ``encode_difference`` wrote, and add it to ``acc``; raises like ``decode``."""
        self.decode(wire, following)
        delta.add_prediction(past, factors, self.dtype.type(1 / delta.LEVELS), following)
        if acc is not None:
            add(following, acc)

    @property
    def fuses_residual(self) -> bool:
        """Whether ``encode_residual`` needs no room for decoded values that nobody wants."""
        return False

    @abstractmethod
    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode exactly the payload ``wire`` into all of ``out``.

        Raises
        ------
        CodecError
            No encoder could have written this payload for ``out.size`` elements; ``out`` is as before.
        """

    @abstractmethod
    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode the payload and add it to ``acc``; raises like ``decode``."""

    def check_buffers(self, x: Floats, wire: Bytes) -> None:
        """Refuse arrays that the kernels would misread, or write past.

        Raises
        ------
        TypeError
            A vector of the wrong type, dimension or strides.
        ValueError
            A wire that may be too short.
        """
        if x.dtype != self.dtype or x.ndim != 1 or not x.flags.c_contiguous:
            layout = "contiguous" if x.flags.c_contiguous else "strided"
            raise TypeError(
                f"codec {self.wire_id}: expected a contiguous vector of {self.dtype}, "
                f"got {layout} {x.dtype} of shape {x.shape}"
            )
        if wire.size < self.max_nbytes(x.size):
            raise ValueError(
                f"codec {self.wire_id}: expected a wire of {self.max_nbytes(x.size)} bytes or more, got {wire.size}"
            )

    def check_like(self, x: Floats, *others: Floats) -> None:
        """Refuse arrays that a kernel would misread, or write past, where it takes them to be like ``x``.

        Raises
        ------
        TypeError
            A vector of another type, dimension or size, or a strided one.
        """
        for other in others:
            if other.dtype != x.dtype or other.shape != x.shape or not other.flags.c_contiguous:
                layout = "contiguous" if other.flags.c_contiguous else "strided"
                raise TypeError(
                    f"codec {self.wire_id}: expected contiguous vectors of {x.size} {x.dtype}, "
                    f"got {layout} {other.dtype} of shape {other.shape}"
                )

    def check_size(self, wire: Bytes, expected: int, size: int) -> None:
        """Refuse a payload of the wrong length."""
        if wire.size != expected:
            raise CodecError(f"codec {self.wire_id}: expected {expected} bytes for {size} elements, got {wire.size}")


def view(wire: Bytes, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Read bytes as ``dtype``; copies only where they do not lie on its boundary."""
    typed = wire.view(dtype)
    return typed if typed.flags.aligned else typed.copy()
