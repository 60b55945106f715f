"""int8: codes from -127 to 127 with a bfloat16 scale for every 128 elements.

Format ``int8``: ceil(size / 128) uint16 (the bits of the scales), then one int8 a value; value = code · scale. The
error of a value is at most half its block's scale when rounded to nearest, one scale when rounded at random; the scale
is at most (1 + 2^-7) · max / 127, and blocks whose maximum is below 1.5e-36 become zeros.
"""

import numpy as np

from mpitrain.codecs.blocks import BlockKernels, BlockScaled
from mpitrain.kernels.delta import decode_difference_int8, encode_difference_int8
from mpitrain.kernels.quantize import (
    MAX_SCALE,
    decode_int8,
    decode_int8_add,
    encode_int8,
)
from mpitrain.kernels.residual import encode_residual_int8


class Int8(BlockScaled):
    """Block-scaled int8."""

    wire_id = "int8"
    format_number = 2
    code_type = np.int8
    kernels = BlockKernels(
        encode_int8,
        decode_int8,
        decode_int8_add,
        MAX_SCALE,
        encode_residual_int8,
        encode_difference_int8,
        decode_difference_int8,
    )

    def code_nbytes(self, size: int) -> int:
        """One byte a value."""
        return size
