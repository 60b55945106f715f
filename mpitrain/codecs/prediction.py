"""Difference coding: a vector is sent as its difference to a prediction from a past that both ends know.

The past counts with a factor in fifteenths, fitted per block of 128 and sent as four bits; it falls to 0 where the past
does not help. The payload is the codec's, followed by the factors, two to a byte.

Codecs that lose most of a value are another matter: only what both ends add up brings them near, and a factor below 1
would forget it. With them the past counts fully, and the payload is the codec's alone (EF21: Richtárik 2021).
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.config.codec_names import is_coarse
from mpitrain.errors import CodecError
from mpitrain.kernels import delta as kernels
from mpitrain.kernels.delta import BLOCK
from mpitrain.kernels.reduce import add, count_not_finite


def factor_nbytes(size: int) -> int:
    """Return the bytes that the factors add to a vector of ``size`` elements."""
    return -(-size // (2 * BLOCK))


def difference_nbytes(codec: Codec, size: int) -> int:
    """Return what difference coding adds to the codec's bytes for a vector of ``size`` elements."""
    return 0 if is_coarse(codec.wire_id) else factor_nbytes(size)


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


class LastValue:
    """Coding of vectors as their full difference to a past that the caller keeps; methods as of `Prediction`."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def encode(
        self, x: Floats, past: Floats, wire: Bytes, following: Floats, *, key: int, first: int
    ) -> tuple[int, int]:
        """Encode ``x`` less ``past``; ``following`` becomes what the other end decodes."""
        with np.errstate(over="ignore"):  # counted as not finite by ``encode``
            np.subtract(x, past, out=following)
        nbytes, nonfinite = self.codec.encode(following, wire, key, first)
        if not nonfinite:
            self.decode(wire[:nbytes], past, following)
            nonfinite = count_not_finite(following)
        return nbytes, nonfinite

    def decode(self, wire: Bytes, past: Floats, following: Floats, acc: Floats | None = None) -> None:
        """Decode into ``following``, and add that to ``acc``; raises CodecError."""
        self.codec.decode(wire, following)
        add(past, following)
        if acc is not None:
            add(following, acc)
