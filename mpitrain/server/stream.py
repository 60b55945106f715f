"""Streams of encoded vectors between a worker and a server, several messages of which may be under way.

Both ends keep a ring of buffers, as many as messages may be under way. The receives of the whole ring are posted at all
times, so a peer that sends more than it may meets no memory: its messages wait on its own side.
"""

import time
from collections import deque

from mpitrain.arrays import Bytes, Floats
from mpitrain.codecs.memory import Memory
from mpitrain.comm.frame import Expected, Flag, Frame
from mpitrain.comm.waiting import Requests
from mpitrain.server.link import Link


def expected(memory: Memory, sequence: int) -> Expected:
    """Say what the header of a message must hold."""
    flags = Flag.DELTA if memory.name == "delta" else Flag(0)
    return Expected(memory.codec.format_number, flags, sequence, memory.size)


class Outgoing:
    """The sending end.

    Parameters
    ----------
    link, peer, tag
        Where the messages go.
    memory : Memory
        What is remembered of earlier ones; its commit is the caller's affair.
    slots : int
        Messages that may be under way.
    """

    def __init__(self, link: Link, peer: int, tag: int, memory: Memory, slots: int) -> None:
        self.memory = memory
        self._link, self._peer, self._tag = link, peer, tag
        self._frames = [Frame(memory.max_nbytes(memory.size)) for _ in range(slots)]
        self._sends: list[Requests | None] = [None] * slots
        self.sequence = 0

    @property
    def busy(self) -> Requests | None:
        """What the next message must wait for, if its buffer is still on its way."""
        requests = self._sends[self._slot]
        return None if requests is None or requests.poll() else requests

    @property
    def _slot(self) -> int:
        return self.sequence % len(self._frames)

    def send(self, x: Floats, *, key: int = 0, first: int = 0) -> bool:
        """Encode ``x`` and start sending it; return whether it was finite. A flag goes out in its place if not."""
        frame, begin = self._frames[self._slot], time.perf_counter()
        nbytes, nonfinite = self.memory.encode(x, frame.payload, None, key=key, first=first)
        flags = Flag.NONFINITE if nonfinite else Flag(0)
        frame.seal(expected(self.memory, self.sequence), 0 if nonfinite else nbytes, flags)
        self._link.encoded(begin)
        self._sends[self._slot] = self._link.send(frame, self._peer, self._tag)
        self.sequence += 1
        return not nonfinite

    def poll(self) -> None:
        """Let messages that are under way get on."""
        for requests in self._sends:
            if requests is not None:
                requests.poll()


class Incoming:
    """The receiving end; parameters as above.

    Attributes
    ----------
    sequence : int
        What the header of the next message that is decoded must say.
    """

    def __init__(self, link: Link, peer: int, tag: int, memory: Memory, slots: int) -> None:
        self.memory = memory
        self.sequence = 0
        self._link, self._peer, self._tag = link, peer, tag
        self._posted: deque[tuple[Frame, Requests]] = deque()
        for _ in range(slots):
            self._post(Frame(memory.max_nbytes(memory.size)))
        self._arrived = 0

    def _post(self, frame: Frame) -> None:
        self._posted.append((frame, self._link.receive(frame, self._peer, self._tag)))

    @property
    def progress(self) -> int:
        """Grow whenever something arrives."""
        return sum(requests.progress for _, requests in self._posted)

    def arrived(self) -> int:
        """Count the messages that are complete and have not been taken."""
        while self._arrived < len(self._posted) and self._posted[self._arrived][1].poll():
            self._link.arrived(self._posted[self._arrived][1])
            self._arrived += 1
        return self._arrived

    def follows(self, position: int, sequence: int) -> bool:
        """Tell whether the message at a position, 0 for the oldest, has this sequence number."""
        return self._posted[position][0].sequence == sequence & 0xFFFFFFFF

    def take(self, out: Floats, *, add: bool = False) -> None:
        """Decode the oldest message, which must have arrived, into ``out`` (or add it to it).

        The memory is committed: what a peer has sent, it has sent.

        Raises
        ------
        ProtocolError, CodecError
            It is not what was to come.
        """
        frame, requests = self._posted[0]
        payload = frame.open(requests.received_bytes, expected(self.memory, self.sequence), self._name)
        if payload is not None:
            self._decode(payload, out, add=add)
        self.sequence += 1
        self.drop()

    def _decode(self, payload: Bytes, out: Floats, *, add: bool) -> None:
        begin = time.perf_counter()
        if add:
            self.memory.decode_add(payload, out)
        else:
            self.memory.decode(payload, out)
        self.memory.commit()
        self._link.decoded(begin)

    @property
    def _name(self) -> str:
        return self._link.axis.label(self._peer)

    def skip(self) -> None:
        """Pass over the oldest message, which its sender knows to be void."""
        self.sequence += 1
        self.drop()

    def drop(self) -> None:
        """Lose the oldest message: the next one does not follow on what this end has."""
        frame, _ = self._posted.popleft()
        self._arrived -= 1
        self._post(frame)

    def cancel(self) -> None:
        """Withdraw the receives."""
        for _, requests in self._posted:
            requests.cancel()
