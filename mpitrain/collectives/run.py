"""A sum under way: the operations of which collectives are made, and how several of them advance side by side."""

import time
from collections.abc import Generator

from mpitrain.arrays import Floats
from mpitrain.collectives.base import BucketState, Event, Stream, Traffic, Transport
from mpitrain.collectives.segments import Segment
from mpitrain.comm.frame import Flag, Tag
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, Waitable, Watch

Steps = Generator[Waitable, None, None]
"""A part of a collective: reads like a blocking program and yields whatever it waits for, watched by its Run."""


class Turn:
    """Waits for nothing, but gives MPI, and what else goes on beside, a turn."""

    progress = 0

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def poll(self) -> bool:
        """Be complete, after a look at all messages; raises PeerLostError."""
        self._watch.look()
        return True

    def waiting_for(self) -> str:
        """Name nothing."""
        return "nothing"


class Activity:
    """Drives a generator of steps, as far as it gets without blocking.

    Attributes
    ----------
    current : Waitable or None
        What it waits for; None once it has ended.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.current = next(steps, None)

    def advance(self) -> bool:
        """Take one step, if what it waits for is there; return whether it was."""
        if self.current is None or not self.current.poll():
            return False
        self.current = next(self._steps, None)
        return True


class Together:
    """Several parts of a collective that advance side by side, a step of each in turn.

    None may depend on how far another one is when it takes a step: which of them gets on first is chance.
    """

    def __init__(self, *parts: Steps) -> None:
        self._activities = [Activity(steps) for steps in parts]

    @property
    def progress(self) -> int:
        """Grow with what they are waiting for."""
        return sum(current.progress for current in self._open())

    def poll(self) -> bool:
        """Advance all of them as far as possible without blocking; return whether all have ended."""
        while sum([activity.advance() for activity in self._activities]):  # every one has a turn, unlike with any()
            pass
        return not self._open()

    def waiting_for(self) -> str:
        """Name what the first of them that has not ended waits for."""
        return next((current.waiting_for() for current in self._open()), "nothing")

    def _open(self) -> list[Waitable]:
        return [activity.current for activity in self._activities if activity.current is not None]


class Run:
    """One sum under way: the operations of which collectives are made, and what they cost.

    Attributes
    ----------
    traffic : Traffic
        What it has cost so far.
    nonfinite : bool
        Whether something that is not finite was met so far.
    receives : list of Requests
        All that were posted.
    sends : Requests
        Everything sent so far.
    turn : Turn
        A turn for others, after something was sent.
    watch : Watch
        Of all requests: what is yielded must be watched by it.
    """

    def __init__(
        self,
        axis: Axis,
        transport: Transport,
        state: BucketState,
        key: int,
        watch: Watch,
        events: list[Event] | None = None,
    ) -> None:
        self.axis = axis
        self.events = events
        self.state = state
        self.traffic = Traffic()
        self.nonfinite = False
        self.watch = watch
        self.turn = Turn(watch)
        self.receives: list[Requests] = []
        self.sends = Requests([], f"the {axis.name} axis to take what rank {axis.rank} sent", watch)
        self._key = key
        self._transport = transport
        self._sequence = state.sequence

    def values(self, segment: Segment) -> Floats:
        """Return a segment of the vector, a view."""
        return self.state.bucket.values[segment.start : segment.stop]

    def total(self, segment: Segment) -> Floats:
        """Return a segment of the sum of the own chunk, a view."""
        return self.state.total[segment.at : segment.at + segment.size]

    def encode(self, stream: Stream, segment: Segment, x: Floats, decoded: Floats | None = None) -> bool:
        """Encode ``x`` into the segment's frame; return whether it was finite. If not, a flag goes out in its place."""
        begin = time.perf_counter()
        frame = stream.frames[segment.index]
        nbytes, nonfinite = stream.memory.encode(
            x, frame.payload, decoded, key=self._key, first=segment.start, at=segment.at
        )
        flags = Flag.NONFINITE if nonfinite else Flag(0)
        frame.seal(self.state.expected(segment, self._sequence), 0 if nonfinite else nbytes, flags)
        self.traffic.encode_s += self.spent("encode", begin)
        self.nonfinite |= bool(nonfinite)
        return not nonfinite

    def flag(self, stream: Stream, segment: Segment) -> None:
        """Fill the segment's frame with a flag: what it would have carried is not finite."""
        stream.frames[segment.index].seal(self.state.expected(segment, self._sequence), 0, Flag.NONFINITE)

    def send(self, stream: Stream, segment: Segment, dest: int, tag: Tag) -> None:
        """Start sending the segment's frame; ``turn`` may be yielded then."""
        frame, number = stream.frames[segment.index], tag.of_bucket(self.state.bucket.index)
        self.sends.add(frame.send(self.axis, dest, number, piece_bytes=self._transport.piece_bytes))
        self.traffic.sent_bytes += frame.nbytes
        self.traffic.messages += 1

    def post(self, stream: Stream, source: int, tag: Tag) -> list[Requests]:
        """Post the receives of all segments, in the order in which they are sent."""
        number, piece_bytes = tag.of_bucket(self.state.bucket.index), self._transport.piece_bytes
        requests = [
            frame.receive(self.axis, source, number, piece_bytes=piece_bytes, watch=self.watch)
            for frame in stream.frames
        ]
        self.receives += requests
        return requests

    def decode(self, stream: Stream, segment: Segment, request: Requests, out: Floats, *, add: bool) -> bool:
        """Open a received segment and decode it into (or add it to) ``out``; return whether it was finite."""
        self.traffic.received_bytes += request.received_bytes
        frame, expected = stream.frames[segment.index], self.state.expected(segment, self._sequence)
        payload = frame.open(request.received_bytes, expected, request.waiting_for())
        if payload is None:
            self.nonfinite = True
            return False
        begin = time.perf_counter()
        if add:
            stream.memory.decode_add(payload, out, at=segment.at)
        else:
            stream.memory.decode(payload, out, at=segment.at)
        self.traffic.decode_s += self.spent("decode", begin)
        return True

    def spent(self, what: str, begin: float) -> float:
        """Note an event that ends now; return its seconds."""
        end = time.perf_counter()
        if self.events is not None:
            self.events.append((what, begin, end))
        return end - begin
