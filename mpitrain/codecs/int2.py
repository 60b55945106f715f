"""int2: codes -1, 0 and 1, four to a byte, with a bfloat16 scale for every 128 elements.

Format ``int2``: ceil(size / 128) uint16 (the bits of the scales), then ceil(size / 4) bytes; value = code · scale. Bits
2 k and 2 k + 1 of byte i of a block hold element 32 k + i as code + 2; in the last block of n elements it is element
k · ceil(n / 4) + i, and pairs behind the last element hold code 0. So 2.125 bits a value, and a pair of 0 is a mark of
damage.

With a given scale s the nearest code is 0 up to s / 2; with a given threshold the best scale is the mean magnitude
above it. The encoder alternates twice (Lloyd 1982): t = 0.8 · mean |x|; c = mean of |x| > t; s = mean of |x| > c / 2,
rounded to the nearest bfloat16. The first step is that of ternary weight networks (Li and Liu 2016, with 0.7; the
optimum is 0.77 for a Gaussian, 1.0 for a Laplace source). A Gaussian block keeps 18.7 % of its power as error, as with
the best scale that a search over the block finds; the best fixed quantizer of three levels keeps 19.0 %.

The error of a value is at most half the scale, or its excess over the scale where that is more: gradients need a
residual memory. Blocks whose scale is below 1.18e-38 become zeros.
"""

from typing import Any

import numpy.typing as npt

from mpitrain.codecs.planar import Planar, PlanarKernels
from mpitrain.kernels.int2 import BLOCK, ROWS, decode_int2, decode_int2_add, encode_int2, holds_no_code

_NO_ELEMENT = 2


class Int2(Planar):
    """Block-scaled int2."""

    wire_id = "int2"
    format_number = 5
    block = BLOCK
    kernels = PlanarKernels(encode_int2, decode_int2, decode_int2_add, ROWS)

    def are_codes(self, codes: npt.NDArray[Any], size: int) -> bool:
        """Refuse pairs of 0, and others than code 0 where there is no element."""
        spare = any((part >> 2 * row & 3 != _NO_ELEMENT).any() for row, part in self._spare(codes, size))
        return not spare and not holds_no_code(codes)
