"""The Reducer contract: the sum of a vector over an axis, the same bits on every rank.

A collective is written as generators that read like blocking programs and yield whatever they wait for. A ``Pending``
drives it, either bit by bit between other work (``poll``) or to its end (``wait``).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from mpitrain.codecs.base import Codec
from mpitrain.collectives.base import Bucket, BucketState, Event, Traffic, Transport
from mpitrain.collectives.run import Activity, Run, Steps
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Watch, wait
from mpitrain.kernels.reduce import count_not_finite
from mpitrain.partition import chunk_bounds


class Underway:
    """All sums of a reducer that are under way. Waiting for one drives them all: ranks may wait in different orders.

    Attributes
    ----------
    sums : list of Pending
    watch : Watch
        Of all their messages: a look at them costs one call to MPI.
    """

    def __init__(self) -> None:
        self.sums: list[Pending] = []
        self.watch = Watch()
        self._seen = 0

    def advance(self) -> None:
        """Advance all as far as possible without blocking."""
        self.watch.look()
        while self._seen != self.watch.completed:
            self._seen = self.watch.completed
            for pending in self.sums:
                pending.advance()

    def worked(self) -> float:
        """Sum the seconds that all have spent on coding."""
        return sum(pending.traffic.encode_s + pending.traffic.decode_s for pending in self.sums)


class Pending:
    """A started sum.

    Parameters
    ----------
    run, steps
        What it has cost so far, and the generator that does it.
    underway : Underway
        Joined until the sum is complete.

    Attributes
    ----------
    nonfinite : bool
        Valid once complete, the same on all ranks: some rank's values were not finite, and the sum means nothing.
    """

    def __init__(self, run: Run, steps: Steps, underway: Underway, timeout_s: float) -> None:
        self._run = run
        self._underway = underway
        self._timeout_s = timeout_s
        self._steps = Activity(steps)
        self.advance()
        underway.sums.append(self)

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
        """Count what has come or left, for all sums under way."""
        return self._underway.watch.completed

    def poll(self) -> bool:
        """Advance all sums as far as possible without blocking; return whether this one is complete."""
        self._underway.advance()
        return self._steps.current is None

    def advance(self) -> None:
        """Advance this one as far as what has come allows."""
        while self._steps.advance():
            pass

    def waiting_for(self) -> str:
        """Name the peer that is missing."""
        return self._steps.current.waiting_for() if self._steps.current else "nothing"

    def wait(self) -> Traffic:
        """Complete the sum; raises PeerLostError, ProtocolError, CodecError."""
        worked, begin = self._underway.worked(), time.perf_counter()
        try:
            wait(self, timeout_s=self._timeout_s)
            self.traffic.wait_s += max(0.0, self._run.spent("wait", begin) - (self._underway.worked() - worked))
        finally:
            self.close()
        return self.traffic

    def close(self) -> None:
        """Leave the sums under way, and withdraw what is still open after an error."""
        if self in self._underway.sums:
            self._underway.sums.remove(self)
        if self._steps.current is not None:
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
        self._underway = Underway()

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
        state = BucketState(bucket, codec, memory, chunks, self.transport.segment)
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
        run = Run(self.axis, self.transport, state, key, self._underway.watch, self.events)
        state.sequence += 1
        return Pending(run, steps(run), self._underway, self.transport.timeout_s)

    @abstractmethod
    def steps(self, run: Run) -> Steps:
        """Sum, yielding what is waited for."""

    @staticmethod
    def _alone(run: Run) -> Steps:
        """Sum over one rank: nothing leaves the machine, so nothing is rounded."""
        run.nonfinite = count_not_finite(run.state.bucket.values) > 0
        yield from ()
