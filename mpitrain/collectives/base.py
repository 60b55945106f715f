"""The Reducer contract: the sum of a vector over an axis, the same bits on every rank.

A collective is written as a generator that reads like a blocking program and yields whatever it waits for. A
``Pending`` drives it, either bit by bit between other work (``poll``) or to its end (``wait``).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields

from mpi4py import MPI

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import RECEIVERS, SENDERS, DoubleBuffer, Memory
from mpitrain.comm.frame import MAX_MESSAGE_BYTES, Expected, Flag, Frame, Tag
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, wait
from mpitrain.kernels.reduce import add, count_not_finite
from mpitrain.partition import chunk_bounds

Steps = Generator[Requests, None, None]

Event = tuple[str, float, float]
"""What a rank did, from when to when, on the clock of `time.perf_counter`."""


@dataclass
class Traffic:
    """What one rank did for a sum. Bytes are payload and headers handed to MPI by this rank; seconds are its own."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Transport:
    """Limits of the messages: seconds of silence until a peer counts as lost, and the size of a piece."""

    timeout_s: float = 60.0
    piece_bytes: int = MAX_MESSAGE_BYTES


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


class BucketState:
    """What a reducer keeps for one bucket from step to step: memories and message buffers.

    Parameters
    ----------
    bucket, codec, memory
        What is summed, as what bytes, with which memory (``none``, ``residual``, ``delta``).
    chunks : list of (start, stop)
        The part of the vector that each rank owns.
    """

    def __init__(self, bucket: Bucket, codec: Codec, memory: str, chunks: list[tuple[int, int]]) -> None:
        self.bucket = bucket
        self.codec = codec
        self.memory = memory
        self.flags = Flag.DELTA if memory == "delta" else Flag(0)
        self.sequence = 0
        self.chunks = chunks
        self.memories: dict[str, Memory] = {}
        self.frames: dict[str, Frame] = {}
        self.total: Floats = aligned_zeros(0, codec.dtype)

    def own(self, chunk: int) -> None:
        """Make room for the sum of the chunk that this rank owns, ``total``."""
        start, stop = self.chunks[chunk]
        self.total = aligned_zeros(stop - start, self.codec.dtype)

    def sender(self, name: str, chunk: int) -> Memory:
        """Return the sending end of a stream, made on first use."""
        return self._end(SENDERS[self.memory], f"send.{name}.{chunk}", chunk)

    def receiver(self, name: str, chunk: int) -> Memory:
        """Return the receiving end of a stream, made on first use."""
        return self._end(RECEIVERS[self.memory], f"receive.{name}.{chunk}", chunk)

    def _end(self, kind: type[Memory], name: str, chunk: int) -> Memory:
        if name not in self.memories:
            start, stop = self.chunks[chunk]
            self.memories[name] = kind(self.codec, stop - start)
        return self.memories[name]

    def frame(self, name: str, memory: Memory) -> Frame:
        """Return a message buffer for vectors of ``memory``, made on first use."""
        if name not in self.frames:
            self.frames[name] = Frame(memory.max_nbytes)
        return self.frames[name]

    def states(self) -> dict[str, DoubleBuffer]:
        """Name every vector that a checkpoint must keep."""
        return {
            f"{name}.{part}": state for name, memory in self.memories.items() for part, state in memory.states().items()
        }

    def commit(self) -> None:
        """Accept the step."""
        for memory in self.memories.values():
            memory.commit()

    def rollback(self) -> None:
        """Undo the step."""
        for memory in self.memories.values():
            memory.rollback()


class Run:
    """One sum under way: the operations of which collectives are made, and what they cost."""

    def __init__(
        self, axis: Axis, transport: Transport, state: BucketState, key: int, events: list[Event] | None = None
    ) -> None:
        self.axis = axis
        self.events = events
        self.state = state
        self.traffic = Traffic()
        self.nonfinite = False
        self.receives: list[Requests] = []
        self._key = key
        self._transport = transport
        self._sends: list[MPI.Request] = []
        self._sequence = state.sequence

    @property
    def sends(self) -> Requests:
        """Everything sent so far."""
        return Requests(self._sends, f"the {self.axis.name} axis to take what rank {self.axis.rank} sent")

    def chunk(self, index: int) -> Floats:
        """Return the part of the vector that rank ``index`` owns, a view."""
        start, stop = self.state.chunks[index]
        return self.state.bucket.values[start:stop]

    def encode(self, memory: Memory, frame: Frame, x: Floats, chunk: int, decoded: Floats | None = None) -> bool:
        """Encode ``x`` into the frame; return whether it was finite. A flag goes out in its place if not."""
        begin = time.perf_counter()
        first = self.state.chunks[chunk][0]
        nbytes, nonfinite = memory.encode(x, frame.payload, decoded, key=self._key, first=first)
        frame.seal(self._expected(chunk), 0 if nonfinite else nbytes, Flag.NONFINITE if nonfinite else Flag(0))
        self.traffic.encode_s += self.spent("encode", begin)
        self.nonfinite |= bool(nonfinite)
        return not nonfinite

    def flag(self, frame: Frame, chunk: int) -> None:
        """Fill the frame with a flag: what it would have carried is not finite."""
        frame.seal(self._expected(chunk), 0, Flag.NONFINITE)

    def send(self, frame: Frame, dest: int, tag: Tag) -> None:
        """Start sending."""
        number = tag.of_bucket(self.state.bucket.index)
        self._sends += frame.send(self.axis, dest, number, piece_bytes=self._transport.piece_bytes)
        self.traffic.sent_bytes += frame.nbytes
        self.traffic.messages += 1

    def post(self, frame: Frame, source: int, tag: Tag) -> Requests:
        """Post the receives of one message."""
        number = tag.of_bucket(self.state.bucket.index)
        request = frame.receive(self.axis, source, number, piece_bytes=self._transport.piece_bytes)
        self.receives.append(request)
        return request

    def decode(self, memory: Memory, frame: Frame, request: Requests, chunk: int, out: Floats, *, add: bool) -> bool:
        """Open a received message and decode it into (or add it to) ``out``; return whether it was finite."""
        self.traffic.received_bytes += request.received_bytes
        payload = frame.open(request.received_bytes, self._expected(chunk), request.waiting_for())
        if payload is None:
            self.nonfinite = True
            return False
        begin = time.perf_counter()
        if add:
            memory.decode_add(payload, out)
        else:
            memory.decode(payload, out)
        self.traffic.decode_s += self.spent("decode", begin)
        return True

    def spent(self, what: str, begin: float) -> float:
        """Note an event that ends now; return its seconds."""
        end = time.perf_counter()
        if self.events is not None:
            self.events.append((what, begin, end))
        return end - begin

    def _expected(self, chunk: int) -> Expected:
        start, stop = self.state.chunks[chunk]
        return Expected(self.state.codec.format_number, self.state.flags, self._sequence, stop - start)


class Pending:
    """A started sum.

    Parameters
    ----------
    run, steps
        What it has cost so far, and the generator that does it.
    active : list of Pending
        All sums of the reducer that are under way. Waiting for one drives them all, so that ranks may wait for them
        in different orders.

    Attributes
    ----------
    nonfinite : bool
        Valid once complete, the same on all ranks: some rank's values were not finite, and the sum means nothing.
    """

    def __init__(self, run: Run, steps: Steps, active: "list[Pending]", timeout_s: float) -> None:
        self._run = run
        self._steps = steps
        self._active = active
        self._timeout_s = timeout_s
        self._current: Requests | None = next(steps, None)
        active.append(self)

    @property
    def nonfinite(self) -> bool:
        """Whether the sum must be rejected."""
        return self._run.nonfinite

    @property
    def traffic(self) -> Traffic:
        """What the sum has cost so far."""
        return self._run.traffic

    @property
    def progress(self) -> int:
        """Count what was heard from peers, for all sums under way."""
        return sum(request.progress for pending in self._active for request in pending._run.receives)

    def poll(self) -> bool:
        """Advance all sums as far as possible without blocking; return whether this one is complete."""
        for pending in self._active:
            pending._advance()
        return self._current is None

    def _advance(self) -> None:
        while self._current is not None and self._current.poll():
            self._current = next(self._steps, None)

    def _worked(self) -> float:
        """Sum the seconds that all sums under way have spent on coding: waiting goes on with it."""
        return sum(pending.traffic.encode_s + pending.traffic.decode_s for pending in self._active)

    def waiting_for(self) -> str:
        """Name the peer that is missing."""
        return self._current.waiting_for() if self._current else "nothing"

    def wait(self) -> Traffic:
        """Complete the sum; raises PeerLostError, ProtocolError, CodecError."""
        worked, begin = self._worked(), time.perf_counter()
        try:
            wait(self, timeout_s=self._timeout_s)
            self.traffic.wait_s += max(0.0, self._run.spent("wait", begin) - (self._worked() - worked))
        finally:
            self.close()
        return self.traffic

    def close(self) -> None:
        """Leave the sums under way, and withdraw what is still open after an error."""
        if self in self._active:
            self._active.remove(self)
        if self._current is not None:
            for request in self._run.receives:
                request.cancel()


class Reducer(ABC):
    """A way to sum a vector over an axis.

    Parameters
    ----------
    axis : Axis
        The ranks that take part; its communicator must carry no other messages of the same tags.
    transport : Transport
        Limits of the messages.

    Attributes
    ----------
    events : list of Event or None
        Where to note what was done when; None to note nothing. May be replaced between sums.

    Notes
    -----
    Synchronous reducers leave the same bits on every rank: the order of additions depends on the rank count and the
    chunk alone, the owner of a chunk encodes its sum once, and everyone, the owner too, decodes those bytes.
    """

    name: str

    def __init__(self, axis: Axis, transport: Transport | None = None) -> None:
        self.axis = axis
        self.events: list[Event] | None = None
        self.transport = transport or Transport()
        self._active: list[Pending] = []

    def open(
        self, bucket: Bucket, codec: Codec, memory: str, *, chunks: list[tuple[int, int]] | None = None
    ) -> BucketState:
        """Prepare the memories and buffers of a bucket.

        Parameters
        ----------
        chunks : list of (start, stop), optional
            The part of the vector that each rank owns, one after the other; those of ``chunks`` where left out.
        """
        chunks = chunks or self.chunks(bucket.values.size, codec.block)
        state = BucketState(bucket, codec, memory, chunks)
        self.prepare(state)
        return state

    def chunks(self, size: int, block: int) -> list[tuple[int, int]]:
        """Cut a vector into the ranges that the ranks own: equal ones that start on multiples of ``block``."""
        return chunk_bounds(size, self.axis.size, block)

    @abstractmethod
    def prepare(self, state: BucketState) -> None:
        """Make the senders, receivers and frames that every step will use."""

    def start(self, state: BucketState, key: int = 0) -> Pending:
        """Start the sum of the bucket. Collective over the axis, in the same order of starts on all ranks.

        Parameters
        ----------
        state : BucketState
            Its memories are written (next half), until ``commit`` or ``rollback``.
        key : int
            Seed of stochastic rounding, different for every bucket, rank and step.
        """
        return self._start(state, key, self.steps if self.axis.size > 1 else self._alone)

    def _start(self, state: BucketState, key: int, steps: Callable[[Run], Steps]) -> Pending:
        run = Run(self.axis, self.transport, state, key, self.events)
        state.sequence += 1
        return Pending(run, steps(run), self._active, self.transport.timeout_s)

    @abstractmethod
    def steps(self, run: Run) -> Steps:
        """Sum, yielding what is waited for."""

    @staticmethod
    def _alone(run: Run) -> Steps:
        """Sum over one rank: nothing leaves the machine, so nothing is rounded."""
        run.nonfinite = count_not_finite(run.state.bucket.values) > 0
        yield from ()


def compile_kernels(codec: Codec, memory: str) -> None:
    """Run every kernel that a stream of this codec and memory uses once, on a few elements."""
    x, out = aligned_zeros(3, codec.dtype), aligned_zeros(3, codec.dtype)
    sender, receiver = SENDERS[memory](codec, 3), RECEIVERS[memory](codec, 3)
    frame = Frame(sender.max_nbytes)
    nbytes, _ = sender.encode(x, frame.payload, out, key=0, first=0)
    receiver.decode(frame.payload[:nbytes], out)
    receiver.decode_add(frame.payload[:nbytes], out)
    add(x, out)
    count_not_finite(x)
