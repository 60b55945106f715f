"""sign: one bit a value, with a bfloat16 scale for every 256 elements.

Format ``sign``: ceil(size / 256) uint16 (the bits of the scales), then ceil(size / 8) bytes; value = scale, or -scale
where the bit is 1. Bit k of byte i of a block is element 32 k + i; in the last block of n elements it is element
k · ceil(n / 8) + i, and bits behind the last element are 0. So 1.0625 bits a value.

The scale is the mean magnitude of the block, rounded to the nearest bfloat16: of all scales it loses least (1-bit Adam,
Tang 2021, and EF-signSGD, Karimireddy 2019, take it over a whole tensor). A mean below 1.18e-38 is sent as 0: the block
becomes zeros. In every other block a zero decodes to the scale, whatever its own sign: one bit has no third value.

The error of a value is up to its magnitude plus the scale. Signs alone do not follow a gradient: they need a residual
memory, and tensors of which most values are zeros should not take them.
"""

from typing import Any

import numpy.typing as npt

from mpitrain.codecs.planar import Planar, PlanarKernels
from mpitrain.kernels.sign import BLOCK, ROWS, decode_sign, decode_sign_add, encode_sign


class Sign(Planar):
    """Signs and a mean magnitude."""

    wire_id = "sign"
    format_number = 6
    block = BLOCK
    kernels = PlanarKernels(encode_sign, decode_sign, decode_sign_add, ROWS)

    def are_codes(self, codes: npt.NDArray[Any], size: int) -> bool:
        """Refuse bits behind the last element."""
        return not any((part >> row & 1).any() for row, part in self._spare(codes, size))
