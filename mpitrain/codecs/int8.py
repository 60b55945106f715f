"""int8: codes from -127 to 127 with a bfloat16 scale for every 128 elements.

Format ``int8``: ceil(size / 128) uint16 (the bits of the scales), then one int8 a value; value = code · scale. The
error of a value is at most half its block's scale when rounded to nearest, one scale when rounded at random; the scale
is at most (1 + 2^-7) · max / 127, and blocks whose maximum is below 1.5e-36 become zeros.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec
from mpitrain.errors import CodecError
from mpitrain.kernels.quantize import BLOCK, decode_int8, decode_int8_add, encode_int8, encode_int8_stochastic

_SIGN_MASK: dict[np.dtype[np.floating[Any]], np.unsignedinteger[Any]] = {
    np.dtype(np.float32): np.uint32(2**31 - 1),
    np.dtype(np.float64): np.uint64(2**63 - 1),
}


class Int8(Codec):
    """Block-scaled int8.

    Parameters
    ----------
    stochastic : bool
        Round at random to a neighbouring code so that the result is right on average (QSGD, Alistarh 2017);
        otherwise to the nearest, which errs less and needs a residual memory.
    """

    wire_id = "int8"
    format_number = 2
    block = BLOCK

    def __init__(self, dtype: npt.DTypeLike = np.float32, *, stochastic: bool = False) -> None:
        super().__init__(dtype)
        self.stochastic = stochastic

    def max_nbytes(self, size: int) -> int:
        """One byte a value, two a block."""
        return size + 2 * -(-size // BLOCK)

    nbytes = max_nbytes

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Quantize block by block."""
        self.check_buffers(x, wire)
        scales, codes = self._parts(wire, x.size)
        mask = _SIGN_MASK[self.dtype]
        bits = x.view(mask.dtype)
        if self.stochastic:
            key_a, key_b = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
            start = np.uint32(first & 0xFFFFFFFF)
            bad = encode_int8_stochastic(x, bits, mask, scales, codes, key_a, key_b, start)
        else:
            bad = encode_int8(x, bits, mask, scales, codes)
        return self.max_nbytes(x.size), bad

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Multiply the codes by their scales."""
        self.check_size(wire, self.max_nbytes(out.size), out.size)
        self._check_scales(decode_int8(*self._parts(wire, out.size), out))

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Multiply the codes by their scales and add them."""
        self.check_size(wire, self.max_nbytes(acc.size), acc.size)
        self._check_scales(decode_int8_add(*self._parts(wire, acc.size), acc))

    @staticmethod
    def _parts(wire: Bytes, size: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8]]:
        scale_bytes = 2 * -(-size // BLOCK)
        return wire[:scale_bytes].view(np.uint16), wire[scale_bytes : scale_bytes + size].view(np.int8)

    @staticmethod
    def _check_scales(bad: int) -> None:
        if bad:
            raise CodecError(f"codec int8: {bad} block scales that no encoder writes; the payload is damaged")
