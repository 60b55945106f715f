"""Difference coding: a vector is sent as its difference to a prediction from a past that both ends know.

The past counts with a factor in fifteenths, fitted per block of 128 and sent as four bits; it falls to 0 where the past
does not help. The payload is the codec's, followed by the factors, two to a byte.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, aligned_empty, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.errors import CodecError
from mpitrain.kernels import delta as kernels
from mpitrain.kernels.delta import BLOCK, LEVELS
from mpitrain.kernels.reduce import count_not_finite


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
        self._difference: Floats = aligned_empty(size, codec.dtype)
        self._unit = codec.dtype.type(1 / LEVELS)

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
        factors, difference = self._factors_of(x.size), self._difference[: x.size]
        kernels.fit_factors(x, past, factors)
        kernels.subtract_prediction(x, past, factors, self._unit, difference)
        nbytes, nonfinite = self.codec.encode(difference, wire, key, first)
        if nonfinite:
            return nbytes, nonfinite
        end = nbytes + factor_nbytes(x.size)
        kernels.pack_factors(factors, wire[nbytes:end])
        self._advance(wire[:nbytes], past, following)
        # A prediction beside the largest float may overflow what the codec alone does not; it must not be remembered.
        return end, count_not_finite(following)

    def decode(self, wire: Bytes, past: Floats, following: Floats) -> None:
        """Decode into ``following``; raises CodecError."""
        least = factor_nbytes(following.size)
        split = wire.size - least
        if split < 0:
            raise CodecError(f"delta: expected at least {least} bytes of factors, got {wire.size}")
        kernels.unpack_factors(wire[split:], self._factors_of(following.size))
        self._advance(wire[:split], past, following)

    def _advance(self, payload: Bytes, past: Floats, following: Floats) -> None:
        """Add difference and prediction, with the same operations on both ends."""
        self.codec.decode(payload, following)
        kernels.add_prediction(past, self._factors_of(following.size), self._unit, following)

    def _factors_of(self, size: int) -> npt.NDArray[np.uint8]:
        """Return room for the factors of a vector."""
        return self._factors[: -(-size // BLOCK)]
