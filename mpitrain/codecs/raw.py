"""raw: the values themselves, little-endian."""

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.base import Codec, view
from mpitrain.kernels.reduce import add, copy_count_not_finite


class Raw(Codec):
    """float32 or float64 as it is."""

    wire_id = "raw"
    format_number = 0

    def max_nbytes(self, size: int) -> int:
        """Return the size of the vector itself."""
        return size * self.dtype.itemsize

    nbytes = max_nbytes

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Copy the values."""
        self.check_buffers(x, wire)
        nbytes = self.max_nbytes(x.size)
        return nbytes, copy_count_not_finite(x, wire[:nbytes].view(self.dtype))

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Copy the values."""
        self.check_size(wire, self.max_nbytes(out.size), out.size)
        out[:] = wire.view(self.dtype)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Add the values."""
        self.check_size(wire, self.max_nbytes(acc.size), acc.size)
        add(view(wire, self.dtype), acc)
