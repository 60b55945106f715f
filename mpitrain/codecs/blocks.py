"""What the block-scaled codecs share: one bfloat16 scale for every 128 elements, then codes.

Format: ceil(size / 128) uint16 (the bits of the scales, rounded up), then the codes; value = code · scale.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.scaled import Scaled
from mpitrain.kernels.delta import LEVELS
from mpitrain.kernels.quantize import BLOCK

Draw = tuple[bool, np.uint32, np.uint32, np.uint32]


class BlockKernels(NamedTuple):
    """The loops of a codec, the bits of its largest scale, and its loops with a memory, if it has any."""

    encode: Callable[..., int]
    decode: Callable[..., None]
    decode_add: Callable[..., None]
    max_scale: int
    encode_residual: Callable[..., int] | None = None
    encode_difference: Callable[..., int] | None = None
    decode_difference: Callable[..., None] | None = None


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
        self._unit = self.dtype.type(1 / LEVELS)

    @property
    def max_scale(self) -> int:
        """The bits of the largest scale that an encoder writes."""
        return self.kernels.max_scale

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Quantize block by block."""
        self.check_buffers(x, wire)
        scales, codes = self._parts(wire, x.size)
        return self.max_nbytes(x.size), self.kernels.encode(x, scales, codes, self._draw(key, first))

    def _draw(self, key: int, first: int) -> Draw:
        """Tell the kernels whether to round at random, the halves of the key, and the index in its noise."""
        low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 & 0xFFFFFFFF)
        return self.stochastic, low, high, np.uint32(first & 0xFFFFFFFF)

    @property
    def fuses_residual(self) -> bool:
        """Whether there is a loop for it."""
        return self.kernels.encode_residual is not None

    def encode_residual(
        self,
        x: Floats,
        error: Floats,
        wire: Bytes,
        next_error: Floats,
        decoded: Floats | None = None,
        key: int = 0,
        first: int = 0,
    ) -> tuple[int, int]:
        """Quantize ``x + error`` block by block; each block passes through the cache once."""
        if self.kernels.encode_residual is None:
            return super().encode_residual(x, error, wire, next_error, decoded, key, first)
        self.check_buffers(x, wire)
        self.check_like(x, error, next_error, next_error if decoded is None else decoded)
        decoded = next_error[:0] if decoded is None else decoded
        scales, codes = self._parts(wire, x.size)
        draw = self._draw(key, first)
        bad = self.kernels.encode_residual(x, error, next_error, scales, codes, decoded, draw)
        return self.max_nbytes(x.size), bad

    def encode_difference(
        self,
        x: Floats,
        past: Floats,
        wire: Bytes,
        following: Floats,
        factors: npt.NDArray[np.uint8],
        key: int = 0,
        first: int = 0,
    ) -> tuple[int, int]:
        """Predict and quantize block by block; each block passes through the cache once."""
        if self.kernels.encode_difference is None:
            return super().encode_difference(x, past, wire, following, factors, key, first)
        self.check_buffers(x, wire)
        self.check_like(x, past, following)
        self._check_factors(factors, x.size)
        scales, codes = self._parts(wire, x.size)
        draw = self._draw(key, first)
        bad = self.kernels.encode_difference(x, past, factors, self._unit, following, scales, codes, draw)
        return self.max_nbytes(x.size), bad

    def decode_difference(
        self,
        wire: Bytes,
        past: Floats,
        factors: npt.NDArray[np.uint8],
        following: Floats,
        acc: Floats | None = None,
    ) -> None:
        """Decode, predict and add block by block; all is as before where the payload is refused."""
        if self.kernels.decode_difference is None:
            return super().decode_difference(wire, past, factors, following, acc)
        scales, codes = self._open(wire, following.size)
        self.check_like(following, following, past, following if acc is None else acc)
        self._check_factors(factors, following.size)
        self.kernels.decode_difference(
            scales, codes, past, factors, self._unit, following, following[:0] if acc is None else acc
        )
        return None

    def _check_factors(self, factors: npt.NDArray[np.uint8], size: int) -> None:
        if factors.dtype != np.uint8 or factors.size != -(-size // BLOCK):
            raise TypeError(
                f"codec {self.wire_id}: expected {-(-size // BLOCK)} uint8 of factors, "
                f"got {factors.size} {factors.dtype}"
            )

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Multiply the codes by their scales."""
        self.kernels.decode(*self._open(wire, out.size), out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Multiply the codes by their scales and add them; ``acc`` is as before where the payload is refused."""
        self.kernels.decode_add(*self._open(wire, acc.size), acc)
