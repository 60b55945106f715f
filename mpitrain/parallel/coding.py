"""As what bytes a micro-batch crosses a cut: through a codec alone, or as its change since the last time.

Shape suffixes: B samples of a message, E elements of one sample.
"""

from mpitrain.arrays import Bytes, Floats, Ints, aligned_empty
from mpitrain.codecs.base import Codec
from mpitrain.codecs.prediction import Prediction, factor_nbytes
from mpitrain.comm.frame import ORDINARY, Flag
from mpitrain.errors import ConfigError
from mpitrain.parallel.references import References


class Plain:
    """The codec alone."""

    flags = ORDINARY

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def max_nbytes(self, size: int) -> int:
        """Bound of an encoded vector; both ends cut messages into pieces by it."""
        return self.codec.max_nbytes(size)

    def encode(self, x_BE: Floats, samples_B: Ints, wire: Bytes) -> tuple[int, int]:
        """Encode contiguous rows; return bytes and the count of values that are not finite, as `Codec.encode`."""
        return self.codec.encode(x_BE.reshape(-1), wire)

    def decode(self, wire: Bytes, samples_B: Ints, out_BE: Floats) -> None:
        """Decode into contiguous rows; raises CodecError."""
        self.codec.decode(wire, out_BE.reshape(-1))

    def skip(self, samples_B: Ints) -> None:
        """Take note that the sender's values were not finite."""


class Differential:
    """The change against the same samples' last decoded values, where there are any (AQ-SGD, Wang et al., 2022).

    Unlike there, the past counts with a factor that is fitted per block, so a sample's first message needs no other
    form. Blocks run on over the samples of a message: where activations are shorter than a block, a sample without a
    past coarsens its neighbours, too. Each end has its own instance; their references stay equal bit for bit.

    Parameters
    ----------
    codec : Codec
        Not raw: adding the rounded difference would make exact values inexact.
    references : References
        Of this end and direction alone.
    """

    flags = Flag.DELTA

    def __init__(self, codec: Codec, references: References) -> None:
        if codec.wire_id == "raw":
            raise ConfigError(
                'parallel: memory = "delta" with codec = "raw", which loses nothing; set parallel.codec to another '
                'one, or parallel.memory = "none"'
            )
        self.codec = codec
        self.references = references

    def max_nbytes(self, size: int) -> int:
        """Bound of an encoded vector; both ends cut messages into pieces by it."""
        return self.codec.max_nbytes(size) + factor_nbytes(size)

    def encode(self, x_BE: Floats, samples_B: Ints, wire: Bytes) -> tuple[int, int]:
        """Encode the change and remember what the other end decodes; as `Plain.encode`."""
        past_BE, slots_B = self.references.look_up(samples_B)
        following_BE = aligned_empty(x_BE.size, x_BE.dtype).reshape(x_BE.shape)
        nbytes, nonfinite = Prediction(self.codec, x_BE.size).encode(
            x_BE.reshape(-1), past_BE.reshape(-1), wire, following_BE.reshape(-1), key=0, first=0
        )
        if not nonfinite:
            self.references.stage(slots_B, following_BE)
        return nbytes, nonfinite

    def decode(self, wire: Bytes, samples_B: Ints, out_BE: Floats) -> None:
        """Decode the change, add it to the past and remember the sum, which is ``out_BE`` itself."""
        past_BE, slots_B = self.references.look_up(samples_B)
        Prediction(self.codec, out_BE.size).decode(wire, past_BE.reshape(-1), out_BE.reshape(-1))
        self.references.stage(slots_B, out_BE)

    def skip(self, samples_B: Ints) -> None:
        """Give the samples their slots, as the sender did."""
        self.references.look_up(samples_B)
