"""What the codecs of one and two bits share: blocks that are grids of rows of 32 values.

The values of a column share a byte. The last block of n elements has rows of w = ceil(n / rows) values instead, and w
bytes: the elements in order, the last rows short or empty. What stands for no element is coded like 0.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.scaled import Scaled
from mpitrain.kernels.bf16 import LARGEST
from mpitrain.kernels.planar import WIDTH
from mpitrain.kernels.quantize import count_not_single


class PlanarKernels(NamedTuple):
    """The loops of a codec, over whole blocks, and the rows of one."""

    encode: Callable[..., int]
    decode: Callable[..., None]
    decode_add: Callable[..., None]
    rows: int


class Planar(Scaled):
    """Scales, then bytes that each hold a column of a grid."""

    kernels: ClassVar[PlanarKernels]
    code_type = np.uint8

    @property
    def max_scale(self) -> int:
        """The bits of the largest finite bfloat16."""
        return LARGEST

    def code_nbytes(self, size: int) -> int:
        """One byte a column."""
        return -(-size // self.kernels.rows)

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Quantize block by block."""
        self.check_buffers(x, wire)
        scales, codes = self._parts(wire, x.size)
        lanes = np.empty(WIDTH, np.float32)
        whole = x.size // self.block
        end = whole * self.block
        bad = self.kernels.encode(x[:end], np.float32(1), lanes, scales[:whole], codes)
        if end < x.size:
            packed = np.empty(WIDTH, np.uint8)
            more = np.float32(self.block / (x.size - end))
            bad += self.kernels.encode(self._spread(x[end:]), more, lanes, scales[whole:], packed)
            rest = codes[whole * WIDTH :]
            rest[:] = packed[: rest.size]
        return self.max_nbytes(x.size), count_not_single(x) if bad else 0

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Multiply the codes by their scales."""
        scales, codes = self._open(wire, out.size)
        whole = out.size // self.block
        end = whole * self.block
        self.kernels.decode(scales[:whole], codes, out[:end])
        if end < out.size:
            out[end:] = self._rest(scales[whole:], codes[whole * WIDTH :], out.size - end)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Multiply the codes by their scales and add them; ``acc`` is as before where the payload is refused."""
        scales, codes = self._open(wire, acc.size)
        whole = acc.size // self.block
        end = whole * self.block
        self.kernels.decode_add(scales[:whole], codes, acc[:end])
        if end < acc.size:
            acc[end:] += self._rest(scales[whole:], codes[whole * WIDTH :], acc.size - end)

    def _spread(self, rest: Floats) -> Floats:
        """Copy the last elements into a grid whose rows are longer than needed."""
        rows, width = self.kernels.rows, self.code_nbytes(rest.size)
        grid = np.zeros((rows, WIDTH), self.dtype)
        values = np.zeros(rows * width, self.dtype)
        values[: rest.size] = rest
        grid[:, :width] = values.reshape(rows, width)
        return grid.reshape(-1)

    def _spare(self, codes: Bytes, size: int) -> Iterator[tuple[int, Bytes]]:
        """Give the rows of the last block that are short, each with the bytes in which it has no element."""
        rest = size % self.block
        if rest:
            width = self.code_nbytes(rest)
            last = codes[codes.size - width :]
            yield from ((row, last[max(rest - row * width, 0) :]) for row in range(rest // width, self.kernels.rows))

    def _rest(self, scales: npt.NDArray[np.uint16], codes: Bytes, size: int) -> Floats:
        """Decode the last block."""
        grid = np.empty((self.kernels.rows, WIDTH), self.dtype)
        packed = np.zeros(WIDTH, np.uint8)
        packed[: codes.size] = codes
        self.kernels.decode(scales, packed, grid.reshape(-1))
        values: Floats = grid[:, : codes.size].reshape(-1)[:size]
        return values
