"""bf16: bfloat16, the upper half of a float32, rounded to nearest even.

Format ``bf16``: one uint16 a value, its sign, eight bits of exponent and seven of fraction; the error of a value is at
most 2^-8 of it, or 2^-134 where that is more. Its range is that of float32 but for the last 2^-9 of it: a finite value
that would round to infinity (above 3.3961e38) becomes the largest finite one, 0x7F7F (3.3895e38), within the same
bound. So no encoder writes infinity or NaN, and a payload that holds one is refused. Values of float64 that are not
finite in float32 are counted like infinite ones.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec, view
from mpitrain.errors import CodecError
from mpitrain.kernels.bf16 import count_infinite, decode_bf16, decode_bf16_add, encode_bf16, encode_bf16_wide


class BFloat16(Codec):
    """Half of a float32."""

    wire_id = "bf16"
    format_number = 4

    def max_nbytes(self, size: int) -> int:
        """Two bytes a value."""
        return 2 * size

    nbytes = max_nbytes

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Round to bfloat16."""
        self.check_buffers(x, wire)
        codes = wire[: 2 * x.size].view(np.uint16)
        if self.dtype == np.float32:
            return codes.nbytes, encode_bf16(x, x.view(np.uint32), codes)
        return codes.nbytes, encode_bf16_wide(x, codes)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Widen the values."""
        decode_bf16(self._open(wire, out.size), out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Widen the values and add them; ``acc`` is as before where the payload is refused."""
        decode_bf16_add(self._open(wire, acc.size), acc)

    def _open(self, wire: Bytes, size: int) -> npt.NDArray[np.uint16]:
        self.check_size(wire, 2 * size, size)
        codes = view(wire, np.uint16)
        bad = count_infinite(codes)
        if bad:
            raise CodecError(f"codec bf16: {bad} values that no encoder writes; the payload is damaged")
        return codes
