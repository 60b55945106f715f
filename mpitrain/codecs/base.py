"""The codec contract: floats to bytes and back, stateless, in buffers that the caller owns."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.errors import CodecError


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
        Whether ``nbytes`` is exact. Where it is only typical, the bytes depend on the values and on how a vector is
        cut.
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
        """Return the bytes of ``size`` ordinary elements, which the byte counts of the README use."""

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

    @abstractmethod
    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode exactly the payload ``wire`` into all of ``out``.

        Raises
        ------
        CodecError
            No encoder could have written this payload for ``out.size`` elements.
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

    def check_size(self, wire: Bytes, expected: int, size: int) -> None:
        """Refuse a payload of the wrong length."""
        if wire.size != expected:
            raise CodecError(f"codec {self.wire_id}: expected {expected} bytes for {size} elements, got {wire.size}")


def view(wire: Bytes, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Read bytes as ``dtype``; copies only where they do not lie on its boundary."""
    typed = wire.view(dtype)
    return typed if typed.flags.aligned else typed.copy()
