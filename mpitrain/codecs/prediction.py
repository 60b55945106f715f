"""Difference coding: a vector is sent as its difference to a prediction from a past that both ends know.

The past counts with a factor in fifteenths, fitted per block of 128 and sent as four bits; it falls to 0 where the past
does not help. The payload is the codec's, followed by the factors, two to a byte.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.errors import CodecError
from mpitrain.kernels import delta as kernels
from mpitrain.kernels.delta import BLOCK


def factor_nbytes(size: int) -> int:
    """Return the bytes that the factors add to a vector of ``size`` elements."""
    return -(-size // (2 * BLOCK))


class Prediction:
    """Coding of vectors against a past that the caller keeps.

    Parameters
    ----------
    codec : Codec
        Of the differences.
    size : int
        Elements of the longest vector.
    """

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec = codec
        self._factors: npt.NDArray[np.uint8] = aligned_zeros(-(-size // BLOCK), np.uint8)

    def encode(
        self, x: Floats, past: Floats, wire: Bytes, following: Floats, *, key: int, first: int
    ) -> tuple[int, int]:
        """Encode ``x`` against ``past``.

        Parameters
        ----------
        x, past : (size,) arrays
            Not changed.
        wire : (codec.max_nbytes(size) + factor_nbytes(size),) uint8 or longer, written
        following : (size,) array, written
            What the other end decodes.
        key, first : int
            As in ``Codec.encode``.

        Returns
        -------
        nbytes, nonfinite : int
            As in ``Codec.encode``. With ``nonfinite``, ``following`` means nothing.
        """
        factors = self._factors_of(x.size)
        nbytes, nonfinite = self.codec.encode_difference(x, past, wire, following, factors, key, first)
        if nonfinite:
            return nbytes, nonfinite
        end = nbytes + factor_nbytes(x.size)
        kernels.pack_factors(factors, wire[nbytes:end])
        return end, 0

    def decode(self, wire: Bytes, past: Floats, following: Floats, acc: Floats | None = None) -> None:
        """Decode into ``following``, and add that to ``acc``; raises CodecError."""
        least = factor_nbytes(following.size)
        split = wire.size - least
        if split < 0:
            raise CodecError(f"delta: expected at least {least} bytes of factors, got {wire.size}")
        factors = self._factors_of(following.size)
        kernels.unpack_factors(wire[split:], factors)
        self.codec.decode_difference(wire[:split], past, factors, following, acc)

    def _factors_of(self, size: int) -> npt.NDArray[np.uint8]:
        """Return room for the factors of a vector."""
        return self._factors[: -(-size // BLOCK)]
