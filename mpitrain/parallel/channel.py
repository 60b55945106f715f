"""What crosses a cut of the model: activations one way, their gradients the other.

Shape suffixes: B samples of a micro-batch, E elements of one sample.
"""

import time
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np

from mpitrain.arrays import Floats, Ints, aligned_empty
from mpitrain.codecs.raw import Raw
from mpitrain.collectives.base import Event, Traffic, Transport
from mpitrain.comm.frame import ORDINARY, Expected, Flag, Frame, Tag
from mpitrain.comm.grid import Axis
from mpitrain.comm.waiting import Requests, abandoned, wait
from mpitrain.parallel.coding import Differential, Plain

EAGER_BYTES = 60_000
"""Largest piece of a message. MPI sends what is shorter at once, and asks the receiver for leave before anything
longer (Open MPI over TCP: from 64 KiB on). That answer is only seen in the next call of MPI, and a stage makes none
while it computes: the receiver would wait for a whole pass of the sender."""


class Wire:
    """What all channels of a rank share: the axis, buffers that go round, and what it costs.

    Parameters
    ----------
    axis : Axis
        The stages; no other messages of the tags ACTIVATION and GRADIENT may travel on it.
    transport : Transport
        Limits of the messages.

    Attributes
    ----------
    traffic : Traffic
        Added to by every message and wait; the caller may replace it.
    events : list of Event or None
        Where to note what was done when; None to note nothing.
    piece_bytes : int
        Length of the pieces of a message; the same on all ranks.
    nonfinite : bool
        Whether a message since the caller last cleared it carried a flag in place of values, here or on its way here.
    """

    def __init__(self, axis: Axis, transport: Transport) -> None:
        self.axis = axis
        self.transport = transport
        self.traffic = Traffic()
        self.events: list[Event] | None = None
        self.nonfinite = False
        self.piece_bytes = min(transport.piece_bytes, EAGER_BYTES)
        self._free: dict[int, list[Frame]] = {}
        self._sends: list[tuple[Requests, Frame]] = []

    def frame(self, max_payload_bytes: int) -> Frame:
        """Take a buffer out of the pool, or make one."""
        free = self._free.setdefault(max_payload_bytes, [])
        return free.pop() if free else Frame(max_payload_bytes)

    def give_back(self, frame: Frame) -> None:
        """Return a buffer that nobody reads or writes any more."""
        self._free[frame.payload.size].append(frame)

    def send(self, frame: Frame, peer: int, tag: int) -> None:
        """Start sending, without waiting; the frame is given back once it has left."""
        self._reap()
        requests = frame.send(self.axis, peer, tag, piece_bytes=self.piece_bytes)
        label = f"{self.axis.label(peer)} to take what rank {self.axis.rank} sent"
        self._sends.append((Requests(requests, label), frame))
        self.traffic.sent_bytes += frame.nbytes
        self.traffic.messages += 1

    def _reap(self) -> None:
        """Give back the frames that have left."""
        open_sends = []
        for requests, frame in self._sends:
            if requests.poll():
                self.give_back(frame)
            else:
                open_sends.append((requests, frame))
        self._sends = open_sends

    def flush(self) -> None:
        """Wait until everything sent has left; raises PeerLostError."""
        for requests, _ in self._sends:
            self.wait(requests)
        self._reap()

    def abandon(self) -> None:
        """Leave what is under way to MPI, after an error."""
        abandoned.extend(self._sends)
        self._sends = []

    def wait(self, requests: Requests) -> None:
        """Wait, and note how long; raises PeerLostError."""
        begin = time.perf_counter()
        wait(requests, timeout_s=self.transport.timeout_s)
        self.traffic.wait_s += self.spent("wait", begin)

    def spent(self, what: str, begin: float) -> float:
        """Note an event that ends now; return its seconds."""
        end = time.perf_counter()
        if self.events is not None:
            self.events.append((what, begin, end))
        return end - begin


class Arrival(Protocol):
    """An array that is on its way here."""

    def take(self) -> Floats:
        """Wait for it and return it, owned by the caller, who may read it only; raises as `Channel` says."""

    def cancel(self) -> None:
        """Withdraw the receives, after an error."""


class Way(Protocol):
    """From one piece of the model to a neighbouring one, on another rank (`Channel`) or this one (`Handover`)."""

    def send(self, x: Floats, samples: Ints, *, train: bool) -> None:
        """Send a micro-batch; never waits."""

    def post(self, samples: Ints, *, train: bool) -> Arrival:
        """Prepare for the next micro-batch, of these samples."""


class Channel:
    """One direction across one cut, seen from one of its two ends.

    Parameters
    ----------
    wire : Wire
        Shared by all channels of the rank.
    cut : int
        Number of the piece of the model before the cut.
    kind : Tag
        ACTIVATION or GRADIENT.
    peer : int
        The other end, on the axis of ``wire``.
    coding : Plain or Differential
        Of training; evaluations travel raw.
    shape : tuple of int
        Of one sample's activation.

    Notes
    -----
    Both ends must see the same micro-batches in the same order. Messages are counted, so a lost one is found. Errors:
    PeerLostError, ProtocolError, CodecError. Values that are not finite raise nothing: a flag travels in their place,
    the receiver gets NaN, and ``wire.nonfinite`` is set on both ends; the step must then be rolled back.
    """

    def __init__(
        self, wire: Wire, cut: int, kind: Tag, peer: int, coding: Plain | Differential, shape: Sequence[int]
    ) -> None:
        self.coding = coding
        self.shape = tuple(shape)
        self.peer = peer
        self.tag = kind.of_bucket(cut)
        self._wire = wire
        self._elements = prod(self.shape)
        self._exact = Plain(Raw(coding.codec.dtype))
        self._sequence = 0

    def send(self, x: Floats, samples: Ints, *, train: bool) -> None:
        """Send a micro-batch; never waits.

        Parameters
        ----------
        x : (B, *shape) array
            Read before this returns.
        samples : (B,) int array
            Which samples they are.
        train : bool
            Off for evaluations: raw, without memory.
        """
        if x.shape != (len(samples), *self.shape):
            raise ValueError(f"pipeline: expected {(len(samples), *self.shape)} at the cut, got {x.shape}")
        begin = time.perf_counter()
        coding = self.coding if train else self._exact
        frame = self._wire.frame(coding.max_nbytes(x.size))
        rows = np.ascontiguousarray(x).reshape(len(samples), self._elements)
        nbytes, nonfinite = coding.encode(rows, samples, frame.payload)
        flag = Flag.NONFINITE if nonfinite else ORDINARY
        frame.seal(self._next(coding, x.size), 0 if nonfinite else nbytes, flag)
        self._wire.nonfinite |= bool(nonfinite)
        self._wire.traffic.encode_s += self._wire.spent("encode", begin)
        self._wire.send(frame, self.peer, self.tag)

    def post(self, samples: Ints, *, train: bool) -> "Message":
        """Post the receives of the next micro-batch, of these samples; messages are taken in the same order."""
        coding = self.coding if train else self._exact
        size = len(samples) * self._elements
        frame = self._wire.frame(coding.max_nbytes(size))
        requests = frame.receive(self._wire.axis, self.peer, self.tag, piece_bytes=self._wire.piece_bytes)
        return Message(self._wire, coding, frame, requests, self._next(coding, size), samples, self.shape)

    def _next(self, coding: Plain | Differential, elements: int) -> Expected:
        self._sequence += 1
        return Expected(coding.codec.format_number, coding.flags, self._sequence, elements)


class Message:
    """A micro-batch on its way here, its receives posted."""

    def __init__(
        self,
        wire: Wire,
        coding: Plain | Differential,
        frame: Frame,
        requests: Requests,
        expected: Expected,
        samples: Ints,
        shape: tuple[int, ...],
    ) -> None:
        self._wire, self._coding, self._frame, self._requests = wire, coding, frame, requests
        self._expected, self._samples, self._shape = expected, samples, shape

    def take(self) -> Floats:
        """Wait for the message and decode it."""
        wire, frame = self._wire, self._frame
        wire.wait(self._requests)
        wire.traffic.received_bytes += self._requests.received_bytes
        payload = frame.open(self._requests.received_bytes, self._expected, self._requests.waiting_for())
        begin = time.perf_counter()
        count = len(self._samples)
        out: Floats = aligned_empty(count * prod(self._shape), self._coding.codec.dtype)
        rows = out.reshape(count, prod(self._shape))
        if payload is None:
            self._coding.skip(self._samples)
            wire.nonfinite = True
            out[:] = np.nan
        else:
            self._coding.decode(payload, self._samples, rows)
        wire.traffic.decode_s += wire.spent("decode", begin)
        wire.give_back(frame)
        return out.reshape(count, *self._shape)

    def cancel(self) -> None:
        """Withdraw the receives."""
        self._requests.cancel()


class Handover:
    """Between two pieces on one rank: the array itself, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Floats] = deque()

    def send(self, x: Floats, samples: Ints, *, train: bool) -> None:
        """Lay it down."""
        self._waiting.append(x)

    def post(self, samples: Ints, *, train: bool) -> "Handover":
        """Nothing to prepare."""
        return self

    def take(self) -> Floats:
        """Pick up the next one."""
        return self._waiting.popleft()

    def cancel(self) -> None:
        """Drop what was laid down."""
        self._waiting.clear()
