"""What codecs with a bfloat16 scale for every block share.

Format: ceil(size / block) uint16 (the bits of the scales), then the codes.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes
from mpitrain.codecs.base import Codec
from mpitrain.errors import CodecError
from mpitrain.kernels.quantize import count_bad_scales


class Scaled(Codec):
    """Scales, then codes."""

    code_type: ClassVar[type[np.integer[Any]]]

    @property
    @abstractmethod
    def max_scale(self) -> int:
        """The bits of the largest scale that an encoder writes."""

    @abstractmethod
    def code_nbytes(self, size: int) -> int:
        """Return the bytes that the codes of ``size`` elements take."""

    def are_codes(self, codes: npt.NDArray[Any], size: int) -> bool:
        """Tell whether an encoder could have written these codes of ``size`` elements; what every byte can be."""
        return True

    def max_nbytes(self, size: int) -> int:
        """Two bytes a block, and the codes."""
        return 2 * -(-size // self.block) + self.code_nbytes(size)

    nbytes = max_nbytes

    def _parts(self, wire: Bytes, size: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
        split, end = 2 * -(-size // self.block), self.max_nbytes(size)
        return wire[:split].view(np.uint16), wire[split:end].view(self.code_type)

    def _open(self, wire: Bytes, size: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
        self.check_size(wire, self.max_nbytes(size), size)
        scales, codes = self._parts(wire, size)
        bad = count_bad_scales(scales, np.uint32(self.max_scale))
        if bad:
            raise CodecError(f"codec {self.wire_id}: {bad} block scales that no encoder writes; the payload is damaged")
        if not self.are_codes(codes, size):
            raise CodecError(f"codec {self.wire_id}: a code that no encoder writes; the payload is damaged")
        return scales, codes
