"""What all collectives work on: a bucket, what is remembered and sent of it, and what its sum has cost."""

from dataclasses import dataclass, fields

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import RECEIVERS, SENDERS, DoubleBuffer, Memory
from mpitrain.collectives.segments import Segment, cut
from mpitrain.comm.frame import MAX_MESSAGE_BYTES, Expected, Flag, Frame
from mpitrain.kernels.reduce import add, count_not_finite

Event = tuple[str, float, float]
"""What a rank did, from when to when, on the clock of `time.perf_counter`."""


@dataclass
class Traffic:
    """What one rank did for a sum. Bytes are payload and headers handed to MPI by this rank; seconds are its own.

    Attributes
    ----------
    hidden_bytes, exposed_bytes : int
        What was received of sums that may go on beside computation: before this rank had nothing left to do but wait
        for them, and after that.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    hidden_bytes: int = 0
    exposed_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Transport:
    """Limits of the messages.

    Attributes
    ----------
    timeout_s : float
        Silence until a peer counts as lost.
    piece_bytes : int
        A longer message is handed to MPI in pieces.
    segment : int or None
        Elements of the segments in which chunks travel (`mpitrain.collectives.segments`); None: chunks are whole.
    """

    timeout_s: float = 60.0
    piece_bytes: int = MAX_MESSAGE_BYTES
    segment: int | None = None


@dataclass(frozen=True)
class Bucket:
    """A vector that is summed as one.

    Attributes
    ----------
    values : (size,) contiguous array
        This rank's addend; holds the sum afterwards. Owned by the caller, untouched by others while the sum runs.
    index : int
        Number of the bucket, the same on all ranks.
    """

    values: Floats
    index: int = 0


class Stream:
    """One end of a stream of chunks: what is remembered of them, and a message buffer for every segment.

    Parameters
    ----------
    memory : Memory
        Of the whole chunk, however it is cut.
    segments : list of Segment
        Of the chunk.
    """

    def __init__(self, memory: Memory, segments: list[Segment]) -> None:
        self.memory = memory
        self.segments = segments
        self.frames = [Frame(memory.max_nbytes(segment.size)) for segment in segments]


class BucketState:
    """What a reducer keeps for one bucket from step to step: memories and message buffers.

    Parameters
    ----------
    bucket, codec, memory
        What is summed, as what bytes, with which memory (``none``, ``residual``, ``delta``).
    chunks : list of (start, stop)
        The part of the vector that each rank owns.
    segment : int or None
        As of `Transport`. The memories are those of whole chunks: they do not depend on it.

    Attributes
    ----------
    segments : list of list of Segment
        Of every chunk.
    total : array
        Room for the sum of the chunk that this rank owns.
    """

    def __init__(
        self, bucket: Bucket, codec: Codec, memory: str, chunks: list[tuple[int, int]], segment: int | None = None
    ) -> None:
        self.bucket = bucket
        self.codec = codec
        self.memory = memory
        self.sequence = 0
        self.chunks = chunks
        self.segments = [cut(chunk, *bounds, segment) for chunk, bounds in enumerate(chunks)]
        self.total: Floats = aligned_zeros(0, codec.dtype)
        self._flags = Flag.DELTA if memory == "delta" else Flag(0)
        self._streams: dict[str, Stream] = {}

    def own(self, chunk: int) -> None:
        """Make room for the sum of the chunk that this rank owns, ``total``."""
        start, stop = self.chunks[chunk]
        self.total = aligned_zeros(stop - start, self.codec.dtype)

    def sender(self, name: str, chunk: int) -> Stream:
        """Return the sending end of a stream, made on first use."""
        return self._end(SENDERS[self.memory], f"send.{name}.{chunk}", chunk)

    def receiver(self, name: str, chunk: int) -> Stream:
        """Return the receiving end of a stream, made on first use."""
        return self._end(RECEIVERS[self.memory], f"receive.{name}.{chunk}", chunk)

    def _end(self, kind: type[Memory], name: str, chunk: int) -> Stream:
        if name not in self._streams:
            start, stop = self.chunks[chunk]
            self._streams[name] = Stream(kind(self.codec, stop - start), self.segments[chunk])
        return self._streams[name]

    def expected(self, segment: Segment, sequence: int) -> Expected:
        """Say what the header of a segment's message must hold."""
        return Expected(self.codec.format_number, self._flags, sequence, segment.size)

    @property
    def frame_bytes(self) -> int:
        """Count the bytes of all message buffers."""
        return sum(frame.buffer.nbytes for stream in self._streams.values() for frame in stream.frames)

    def states(self) -> dict[str, DoubleBuffer]:
        """Name every vector that a checkpoint must keep."""
        return {
            f"{name}.{part}": state
            for name, stream in self._streams.items()
            for part, state in stream.memory.states().items()
        }

    def lost(self, out: Floats) -> None:
        """Add what the residuals of this rank have become by its sends in this step to ``out``, like the bucket."""
        for stream in self._streams.values():
            state = stream.memory.states().get("residual")
            if state and state.written:
                for segment in stream.segments:
                    out[segment.start : segment.stop] += state.next[segment.at : segment.at + segment.size]

    def commit(self) -> None:
        """Accept the step."""
        for stream in self._streams.values():
            stream.memory.commit()

    def rollback(self) -> None:
        """Undo the step."""
        for stream in self._streams.values():
            stream.memory.rollback()


def compile_kernels(codec: Codec, memory: str) -> None:
    """Run every kernel that a stream of this codec and memory uses once, on a few elements."""
    x, out = aligned_zeros(3, codec.dtype), aligned_zeros(3, codec.dtype)
    sender, receiver = SENDERS[memory](codec, 3), RECEIVERS[memory](codec, 3)
    frame = Frame(sender.max_nbytes(3))
    nbytes, _ = sender.encode(x, frame.payload, out, key=0, first=0)
    receiver.decode(frame.payload[:nbytes], out)
    receiver.decode_add(frame.payload[:nbytes], out)
    add(x, out)
    count_not_finite(x)
