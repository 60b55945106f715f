"""fp16: IEEE half precision, rounded to nearest even.

Format ``fp16``: one uint16 a value, then, only where a value would overflow (above 65,504), an int16 exponent ``e`` by
which all values were divided: value = half · 2^e. So finite values stay finite, and ordinary ones cost two bytes.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec, view
from mpitrain.errors import CodecError
from mpitrain.kernels.half import decode_half, decode_half_add, encode_half, encode_half_wide
from mpitrain.kernels.reduce import count_not_finite

_LARGEST_HALF = 65504.0


class Half(Codec):
    """Half precision."""

    wire_id = "fp16"
    format_number = 1

    @property
    def _max_exponent(self) -> int:
        """Largest exponent with which every half stays finite."""
        return int(np.finfo(self.dtype).maxexp) - 16

    def max_nbytes(self, size: int) -> int:
        """Two bytes a value and the exponent of an overflowing vector."""
        return 2 * size + 2 * (size > 0)

    def nbytes(self, size: int) -> int:
        """Two bytes a value."""
        return 2 * size

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Round to halves; where that overflows, again with a common exponent."""
        self.check_buffers(x, wire)
        round_to_half = encode_half if self.dtype == np.float32 else encode_half_wide
        halves = wire[: 2 * x.size].view(np.uint16)
        if not round_to_half(x, self.dtype.type(1), halves):
            return 2 * x.size, 0
        nonfinite = count_not_finite(x)
        if not nonfinite:
            exponent = min(math.frexp(float(np.max(np.abs(x))))[1] - 15, self._max_exponent)
            scaled = np.clip(x * self.dtype.type(2.0**-exponent), -_LARGEST_HALF, _LARGEST_HALF)
            round_to_half(scaled, self.dtype.type(1), halves)
            wire[2 * x.size : 2 * x.size + 2].view(np.int16)[0] = exponent
        return 2 * x.size + 2, nonfinite

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Widen the halves."""
        halves, scale = self._open(wire, out.size)
        decode_half(halves, scale, out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Widen the halves and add them."""
        halves, scale = self._open(wire, acc.size)
        decode_half_add(halves, scale, acc)

    def _open(self, wire: Bytes, size: int) -> tuple[npt.NDArray[np.uint16], np.floating[Any]]:
        exponent = 0
        if size and wire.size == 2 * size + 2:
            exponent = int(view(wire[2 * size :], np.int16)[0])
            if not 1 <= exponent <= self._max_exponent:
                raise CodecError(f"codec fp16: expected an exponent from 1 to {self._max_exponent}, got {exponent}")
        else:
            self.check_size(wire, 2 * size, size)
        return view(wire[: 2 * size], np.uint16), self.dtype.type(2.0**exponent)
