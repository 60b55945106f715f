"""What all messages between a worker and its servers share: the axis, and what they cost."""

import time
from dataclasses import dataclass, field

from mpitrain.collectives.base import Event, Traffic, Transport
from mpitrain.comm.frame import Frame
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests


@dataclass(frozen=True)
class Column(Axis):
    """The ranks that hold the same part of a model: first the workers, then the servers, by which names it calls them.

    Attributes
    ----------
    workers : int
        How many train.
    """

    workers: int = 0

    def label(self, rank: int) -> str:
        """Name a rank for messages, by what it does and by its place in the world."""
        role = f"worker {rank}" if rank < self.workers else f"server {rank - self.workers}"
        return f"{role} (rank {self.members[rank]} of all)"


@dataclass
class Link:
    """One end of every conversation that a rank has on an axis.

    Attributes
    ----------
    axis : Axis
        Its communicator must carry no other messages of the tags PUSH, REPLY and CONTROL.
    transport : Transport
        Limits of the messages.
    traffic : Traffic
        Added to by every message; the caller may replace it.
    events : list of Event or None
        Where to note what was done when; None to note nothing.
    heard : int
        Grows with every message that has arrived.
    """

    axis: Axis
    transport: Transport
    traffic: Traffic = field(default_factory=Traffic)
    events: list[Event] | None = None
    heard: int = 0

    def send(self, frame: Frame, peer: int, tag: int) -> Requests:
        """Start sending a sealed frame, which must not change until the result is complete."""
        requests = frame.send(self.axis, peer, tag, piece_bytes=self.transport.piece_bytes)
        self.traffic.sent_bytes += frame.nbytes
        self.traffic.messages += 1
        return Requests(requests, f"{self.axis.label(peer)} to take what rank {self.axis.rank} sent")

    def receive(self, frame: Frame, peer: int, tag: int) -> Requests:
        """Post the receives of one message."""
        return frame.receive(self.axis, peer, tag, piece_bytes=self.transport.piece_bytes)

    def arrived(self, requests: Requests) -> None:
        """Count a message that is complete."""
        self.traffic.received_bytes += requests.received_bytes
        self.heard += 1

    def encoded(self, begin: float) -> None:
        """Note that something was encoded since ``begin``."""
        self.traffic.encode_s += self._spent("encode", begin)

    def decoded(self, begin: float) -> None:
        """Note that something was decoded since ``begin``."""
        self.traffic.decode_s += self._spent("decode", begin)

    def waited(self, begin: float) -> None:
        """Note that nothing else was done since ``begin``."""
        self.traffic.wait_s += self._spent("wait", begin)

    def _spent(self, what: str, begin: float) -> float:
        end = time.perf_counter()
        if self.events is not None:
            self.events.append((what, begin, end))
        return end - begin
