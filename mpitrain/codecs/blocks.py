"""What the block-scaled codecs share: one bfloat16 scale for every 128 elements, then codes.

Format: ceil(size / 128) uint16 (the bits of the scales, rounded up), then the codes; value = code · scale.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.scaled import Scaled
from mpitrain.kernels.quantize import BLOCK

_SIGN_MASK: dict[np.dtype[np.floating[Any]], np.unsignedinteger[Any]] = {
    np.dtype(np.float32): np.uint32(2**31 - 1),
    np.dtype(np.float64): np.uint64(2**63 - 1),
}


class BlockKernels(NamedTuple):
    """The loops of a codec, and the bits of its largest scale."""

    encode: Callable[..., int]
    encode_stochastic: Callable[..., int]
    decode: Callable[..., None]
    decode_add: Callable[..., None]
    max_scale: int


class BlockScaled(Scaled):
    """Codes with a scale for every block.

    Parameters
    ----------
    stochastic : bool
        Round at random to a neighbouring code so that the result is right on average (QSGD, Alistarh 2017);
        otherwise to the nearest, which errs less and needs a residual memory.
    """

    block = BLOCK
    kernels: ClassVar[BlockKernels]

    def __init__(self, dtype: npt.DTypeLike = np.float32, *, stochastic: bool = False) -> None:
        super().__init__(dtype)
        self.stochastic = stochastic

    @property
    def max_scale(self) -> int:
        """The bits of the largest scale that an encoder writes."""
        return self.kernels.max_scale

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Quantize block by block."""
        self.check_buffers(x, wire)
        scales, codes = self._parts(wire, x.size)
        mask = _SIGN_MASK[self.dtype]
        bits = x.view(mask.dtype)
        if self.stochastic:
            key_a, key_b = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
            start = np.uint32(first & 0xFFFFFFFF)
            bad = self.kernels.encode_stochastic(x, bits, mask, scales, codes, key_a, key_b, start)
        else:
            bad = self.kernels.encode(x, bits, mask, scales, codes)
        return self.max_nbytes(x.size), bad

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Multiply the codes by their scales."""
        self.kernels.decode(*self._open(wire, out.size), out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Multiply the codes by their scales and add them; ``acc`` is as before where the payload is refused."""
        self.kernels.decode_add(*self._open(wire, acc.size), acc)
