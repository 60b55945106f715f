"""int4: codes from -7 to 7, two to a byte, with a bfloat16 scale for every 128 elements.

Format ``int4``: ceil(size / 128) uint16 (the bits of the scales), then ceil(size / 2) bytes; value = code · scale.
Byte i of a block of n elements (128, or what is left for the last) holds element i in its low half and element
i + ceil(n / 2) in its high half, as code + 8; where n is odd, the high half of the last byte has no element and holds
code 0. So 4.125 bits a value, and a half of 0 is a mark of damage.

The error of a value is at most half its block's scale when rounded to nearest, one scale when rounded at random; the
scale is at most (1 + 2^-7) · max / 7, so the error is up to a fourteenth of the block's maximum: gradients need a
residual memory. Blocks whose maximum is below 8.3e-38 become zeros.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.blocks import BlockKernels, BlockScaled
from mpitrain.kernels.delta import decode_difference_int4, encode_difference_int4
from mpitrain.kernels.int4 import (
    MAX_SCALE,
    decode_int4,
    decode_int4_add,
    encode_int4,
    holds_no_code,
)
from mpitrain.kernels.residual import encode_residual_int4

_NO_ELEMENT = 8


class Int4(BlockScaled):
    """Block-scaled int4."""

    wire_id = "int4"
    format_number = 3
    code_type = np.uint8
    kernels = BlockKernels(
        encode_int4,
        decode_int4,
        decode_int4_add,
        MAX_SCALE,
        encode_residual_int4,
        encode_difference_int4,
        decode_difference_int4,
    )

    def code_nbytes(self, size: int) -> int:
        """Half a byte a value."""
        return -(-size // 2)

    def are_codes(self, codes: npt.NDArray[Any], size: int) -> bool:
        """Refuse halves of 0, and a last one that stands for an element where there is none."""
        spare = size % 2 == 1 and codes[-1] >> 4 != _NO_ELEMENT
        return not spare and not holds_no_code(codes)
